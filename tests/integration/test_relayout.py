"""`mopd train` goes on from checkpoints of another number of processes, ZeRO stage and spread of experts."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from mopd.config import load_config
from mopd.export_model import export_student
from mopd.ranks import leave
from mopd.run import train
from mopd.sampling.streams import Streams
from tests.integration.test_ranks import folder_of, records_of
from tests.tiny_run import torchrun

pytestmark = pytest.mark.timeout(1200)
STEPS, SAVED = 3, 2
CHANGES = ["consistency.points=0", "train.selftest=false", "train.checkpoint_every=1", f"train.steps={STEPS}",
           "train.fresh_turns=2", "train.keep_best=reverse_kl"]
SPLIT = ["deepspeed.zero_stage=3", "deepspeed.autoep_size=2"]


def stopped(path, run, *changes: str) -> None:
    """A run that ends where it would sample step SAVED."""
    sample = Streams.sample

    def until(self, plan):
        if plan.step == SAVED:
            raise KeyboardInterrupt
        return sample(self, plan)

    Streams.sample = until
    try:
        with contextlib.suppress(KeyboardInterrupt):
            train(load_config(path, [f"run={run}", *CHANGES, *changes]))
    finally:
        Streams.sample = sample
    assert len(records_of(run)) == SAVED


def ranks_main(path: str, place: str) -> None:
    """Two processes: one run is begun, another is ended."""
    stopped(path, f"{place}/two", "deepspeed.zero_stage=2")
    train(load_config(path, [f"run={place}/one", *CHANGES, *SPLIT]))
    leave()


@pytest.fixture(scope="module")
def place(tiny_run, tmp_path_factory):
    place = tmp_path_factory.mktemp("relayout")
    train(load_config(tiny_run.path, [f"run={place}/straight", *CHANGES]))
    stopped(tiny_run.path, place / "one")
    done = torchrun("from tests.integration.test_relayout import ranks_main\n"
                    f"ranks_main({str(tiny_run.path)!r}, {str(place)!r})\n", place, timeout=800)
    (place / "said").write_text(done.stderr)
    return place


def same(place: Path, run: str) -> None:
    straight, found = (records_of(place / name) for name in ("straight", run))
    assert [record["step"] for record in found] == list(range(STEPS))
    for one, other in zip(straight, found, strict=True):
        assert other["tokens"]["sampled"] == one["tokens"]["sampled"]
        assert other["loss"] == pytest.approx(one["loss"], rel=2e-5)
        assert other["gradient_norm"] == pytest.approx(one["gradient_norm"], rel=2e-4)


def test_one_process_without_zero_goes_on_as_two_with_split_weights_and_spread_experts(place):
    same(place, "one")
    said = (place / "said").read_text()
    assert ("step-2 was written with world_size 1, zero_stage 0, autoep_size 0, this run has world_size 2, zero_stage 3, "
            "autoep_size 2") in said
    assert json.loads((folder_of(place / "one") / "config.json").read_text())["deepspeed"]["zero_stage"] == 3


def test_two_processes_go_on_as_one_and_old_checkpoints_are_exported_as_they_lie(tiny_run, place, capfd):
    (own,) = (folder_of(place / "two") / "checkpoints").iterdir()
    train(load_config(tiny_run.path, [f"run={place}/two", *CHANGES, "train.keep_every=1"]))
    said = capfd.readouterr().err
    assert "step-2 was written with world_size 2, zero_stage 2, this run has world_size 1, zero_stage 0" in said
    same(place, "two")
    assert not list(own.glob(".*")) or [path.name for path in own.glob(".*")] == [".finished"], "the copy by name is gone"
    result = export_student(folder_of(place / "straight"), None, place / "best", best=True)
    assert result["largest_difference"] < 1e-4 and 0 < result["step"] <= STEPS
