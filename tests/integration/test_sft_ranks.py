"""`mopd teacher sft` on two real processes: the losses and the teacher of one process, however the weights lie."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest
import torch

from mopd import cli
from mopd.config import load_config
from mopd.learner.model import load_model
from mopd.ranks import RanksDiffer, leave
from teachers.sft import run_sft
from tests.tiny_run import torchrun

pytestmark = pytest.mark.timeout(600)
COMMON = ["sft.steps=4", "sft.rows_per_step=5", "sft.checkpoint_every=2", "sft.optimizer.learning_rate=0.005"]
CASES = {
    "evaluated": [*COMMON, "deepspeed.zero_stage=1", "sft.evaluate_every=2", "sft.evaluation_episodes=2"],
    "split": [*COMMON, "deepspeed.zero_stage=3"],
    "adapters": [*COMMON, "sft.lora.rank=2"],
}


def trained(path: str, place: str | Path, name: str, *changes: str) -> dict:
    """The steps of a teacher of both domains: losses, gradient norms and what was evaluated."""
    run_sft(load_config(path, [*CASES[name], *changes]), ["embodied", "game"], Path(place) / name)
    if os.environ.get("RANK", "0") != "0":
        return {}
    lines = Path(f"{place}/{name}.metrics.jsonl").read_text().splitlines()
    return {"steps": [{key: json.loads(line).get(key) for key in ("loss", "gradient_norm", "evaluation", "tokens")}
                      for line in lines]}


def ranks_main(path: str, place: str) -> None:
    """What each rank of the two does; rank 0 prints the result."""
    rank = int(os.environ["RANK"])
    results = {name: trained(path, place, name) for name in CASES}
    with contextlib.suppress(SystemExit):
        try:
            trained(path, place, "split", f"sft.rows_per_step={4 + rank}")
        except RanksDiffer as error:
            results["differs"] = str(error)
    if rank == 0:
        print("RESULT" + json.dumps(results), flush=True)
    leave()


@pytest.fixture(scope="module")
def two(tiny_run, tmp_path_factory):
    place = tmp_path_factory.mktemp("two")
    done = torchrun("from tests.integration.test_sft_ranks import ranks_main\n"
                    f"ranks_main({str(tiny_run.path)!r}, {str(place)!r})\n", place, timeout=500)
    return json.loads(done.stdout[done.stdout.index("RESULT") + 6:]) | {"place": place, "said": done.stdout + done.stderr}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_make_the_teacher_of_one(tiny_run, two, name, tmp_path):
    one, both = trained(tiny_run.path, tmp_path, name)["steps"], two[name]["steps"]
    assert len(one) == len(both) == 4 and len({step["loss"] for step in one}) == 4
    for mine, theirs in zip(one, both, strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=2e-6)
        assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=2e-5)
        assert (theirs["evaluation"] is None) == (mine["evaluation"] is None)
        assert theirs["tokens"]["trained"] == mine["tokens"]["trained"] > 0
    first, second = (dict(load_model(place / name).named_parameters()) for place in (tmp_path, two["place"]))
    assert first.keys() == second.keys()
    for key, value in first.items():
        torch.testing.assert_close(second[key], value, rtol=1e-4, atol=2e-5)
    manifest = json.loads((two["place"] / name / "manifest.json").read_text())
    assert manifest["router_hash_before"] == manifest["router_hash_after"]
    assert not (two["place"] / f"{name}.checkpoints").exists()


def test_it_is_said_once_and_ranks_that_differ_are_refused(two):
    assert two["said"].count("result: teacher of embodied, game") == len(CASES)
    assert "rank 1 of 2 differs from rank 0 in what it trains on: settings" in two["differs"]


def test_spread_experts_are_refused_before_processes_start(tiny_run, monkeypatch, capsys):
    monkeypatch.setattr("mopd.ranks.start_on_this_machine", lambda *_: pytest.fail("processes were started"))
    monkeypatch.setattr("sys.argv", ["mopd", "teacher", "sft", str(tiny_run.path), "game", "deepspeed.autoep_size=2",
                                     "deepspeed.zero_stage=1", "--ranks", "2"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert "deepspeed.autoep_size: 2 spreads experts over ranks" in " ".join(capsys.readouterr().err.split())
