"""A whole `mopd train` on two processes with a teacher that is split over them: the run that it is with whole teachers."""

from __future__ import annotations

import json
import os
import sys

import pytest

from mopd.ranks import leave
from mopd.run import train
from tests.integration.test_ranks import folder_of, records_of
from tests.tiny_run import TinyRun, same_weights, torchrun

pytestmark = pytest.mark.timeout(900)
COMMON = ["train.steps=2", "train.probe_every=1", "consistency.points=2", "train.group_size=2"]
SPLIT = ["teachers.embodied.shard=true"]
CASES = {"whole": COMMON, "split": [*COMMON, *SPLIT],
         "mixed": [*COMMON, *SPLIT, "train.objective=mopd", "deepspeed.zero_stage=3",
                   "deepspeed.autoep_size=2", "train.prefix_gradient=none",
                   "domains.game.teacher_weights={embodied: 1, game: 2}"]}
CASES["mixed, whole"] = [change for change in CASES["mixed"] if change not in SPLIT]


def ranks_main(tiny: TinyRun, place: str) -> None:
    """What each rank of the two does."""
    for name, changes in CASES.items():
        train(tiny.config(f"run={place}/{name}", *changes))
        if os.environ["RANK"] == "0":
            print(f"END OF {name}", file=sys.stderr, flush=True)
    leave()


@pytest.fixture(scope="module")
def two(tiny_run, tmp_path_factory):
    """All cases on two processes that torchrun starts: the folder of the runs, and what was said in each."""
    place = tmp_path_factory.mktemp("two")
    done = torchrun("from pathlib import Path\nfrom tests.integration.test_sharded_teacher import TinyRun, ranks_main\n"
                    f"ranks_main(TinyRun(Path({str(tiny_run.folder)!r}), Path({str(tiny_run.path)!r})), {str(place)!r})\n",
                    place, timeout=800)
    said, rest = {}, done.stderr
    for name in CASES:
        said[name], rest = rest.split(f"END OF {name}\n", 1)
    return place, said


def lasting(record: dict) -> dict:
    """A step's record without clocks."""
    return {name: value for name, value in record.items() if name not in ("seconds", "scoring", "environments", "ranks")}


@pytest.mark.parametrize("whole, split", [("whole", "split"), ("mixed, whole", "mixed")])
def test_a_run_with_a_split_teacher_is_the_run_with_whole_ones(two, whole, split):
    place, _ = two
    mine, theirs = records_of(place / split), records_of(place / whole)
    assert len(mine) == len(theirs) == 2
    for a, b in zip(mine, theirs, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert json.dumps(lasting(a), sort_keys=True) == json.dumps(lasting(b), sort_keys=True)
        assert same_weights(folder_of(place / split) / "model", folder_of(place / whole) / "model")
    probes = [json.loads((folder_of(place / name) / "probes.json").read_text()) for name in (split, whole)]
    assert probes[0].keys() == probes[1].keys() and "embodied" in probes[0]
    for name in probes[0]:
        assert sum(probes[0][name]["logprob"], []) == pytest.approx(sum(probes[1][name]["logprob"], []), abs=1e-5)


def test_what_a_split_teacher_cannot_do_is_said(two):
    place, said = two
    assert "embodied: teacher embodied: not measured, its weights are split over ranks" in said["split"]
    assert "episodes.json has no teacher's scores for embodied: their teacher's weights are split over ranks" in said["split"]
    assert "split over ranks" not in said["whole"] and "teachers.embodied.shard has no effect" not in said["split"]
    tokens = {}
    for episode in json.loads((folder_of(place / "split") / "episodes.json").read_text()):
        for segment in episode["segments"]:
            tokens.setdefault(episode["domain"], []).extend(t["teacher_logprob"] for t in segment.get("tokens", ()))
    assert set(tokens["embodied"]) == {None} and None not in tokens["game"]
