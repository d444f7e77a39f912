"""`mopd train` on two real processes over gloo: the tokens, losses and gradients of one process, whatever is split; and what
happens when the ranks differ or one of them dies."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import time
import types
from pathlib import Path

import pytest

from mopd.config import load_config
from mopd.learner.checkpoint import checkpoints
from mopd.ranks import RankFailed, RanksDiffer, leave
from mopd.run import train
from mopd.run_parts import build_engine
from mopd.sampling.streams import Streams
from tests.tiny_run import mopd, same_weights, start_mopd, torchrun

pytestmark = pytest.mark.timeout(1800)
STEPS = 3
MIXED = ["consistency.points=0", "train.selftest=false", "train.group_size=2", "train.fresh_turns=2",
         "train.demonstration_fraction=0.2"]
# Sequences that go on from stored points, outcome advantages of whole groups, prefixes without a graph.
FURTHER = ["consistency.points=0", "train.group_size=3", "train.resume_turns=2", "train.objective=mopd",
           "train.objective_options.alpha=0.5", "train.prefix_gradient=none"]
SPREAD = ["deepspeed.autoep_size=2"]
# Stages, spread experts and ways to sample, so that every two of them meet.
CASES = {
    "zero 0": ("mixed", []),
    "zero 1": ("further", ["deepspeed.zero_stage=1"]),
    "zero 2, experts spread": ("mixed", ["deepspeed.zero_stage=2", *SPREAD]),
    "zero 3": ("mixed", ["deepspeed.zero_stage=3"]),
    "zero 3, experts spread": ("further", ["deepspeed.zero_stage=3", *SPREAD]),
    "zero 3, columns shared": ("mixed", ["deepspeed.zero_stage=3", "deepspeed.sequence_parallel_size=2",
                                         "train.selftest=true"]),
}
RECIPES = {"mixed": MIXED, "further": FURTHER}


def trained(path: str | Path, run: str | Path, *changes: str, **how) -> dict:
    """What a run sampled (a digest a step: tokens and where they stand, without log-probabilities) and its records."""
    found: list[str] = []
    sample = Streams.sample

    def keeping(self, plan):
        samples = sample(self, plan)
        digest = hashlib.sha256()
        for row in samples.rows:
            digest.update(f"{row.domain} {row.stream} {row.origin}".encode() + row.trunk.tobytes())
            for a in row.actions:
                digest.update(f"{a.at} {a.branch} {a.turn} {a.sequence} {a.group}".encode() + a.tokens.tobytes())
        found.append(digest.hexdigest())
        return samples

    Streams.sample = keeping
    try:
        train(load_config(path, [f"run={run}", f"train.steps={STEPS}", *changes]), **how)
    finally:
        Streams.sample = sample
    return {"sampled": found[:-1], "records": records_of(run)}  # the last are the episodes that rank 0 writes down


def folder_of(run) -> Path:
    return Path(run) / "students" / "student_mixed" / "seed-1"


def records_of(run) -> list[dict]:
    return [json.loads(line) for line in (folder_of(run) / "metrics.jsonl").read_text().splitlines()]


def counted(record: dict) -> dict:
    """What does not depend on rounding."""
    return {name: record[name] for name in ("step", "tokens", "environment_steps", "groups", "dropped_groups", "selection",
                                            "missing")} | {
        name: {key: domain[key] for key in ("samples", "tokens", "reward", "success", "turns", "malformed", "infra_failures",
                                            "outcome_groups", "depth", "resumed", "environment_failures")}
        for name, domain in record["domains"].items()}


def ranks_main(path: str, place: str) -> None:
    """What each rank of the two does; rank 0 prints the result."""
    rank, results = int(os.environ["RANK"]), {}
    for name, (recipe, changes) in CASES.items():
        results[name] = trained(path, f"{place}/{name}", *RECIPES[recipe], *changes)
    results["resumed"] = interrupted(path, f"{place}/resumed", *RECIPES["further"], *CASES["zero 3, experts spread"][1])
    results["differs"] = refused(lambda: trained(path, f"{place}/differs", f"train.samples_per_step={8 + rank}"))
    from mopd import run

    opening = run.open_launch

    def failing(config):
        if rank == 1:
            raise OSError("the planted disk is gone")
        return opening(config)

    run.open_launch = failing
    results["failed"] = refused(lambda: trained(path, f"{place}/failed"))
    if rank == 0:
        print("RESULT" + json.dumps(results), flush=True)
    leave()


def interrupted(path: str, run: str, *changes: str) -> dict:
    """A run that ends where it would sample step 2, and goes on from its checkpoint of step 1."""
    sample = Streams.sample

    def until(self, plan):
        if plan.step == 2:
            raise KeyboardInterrupt
        return sample(self, plan)

    Streams.sample = until
    try:
        with contextlib.suppress(KeyboardInterrupt):
            trained(path, run, "train.checkpoint_every=1", *changes)
    finally:
        Streams.sample = sample
    assert len(records_of(run)) == 2
    return trained(path, run, "train.checkpoint_every=1", *changes)


def refused(work) -> str:
    with contextlib.suppress(SystemExit):
        try:
            work()
        except (RanksDiffer, RankFailed, OSError) as error:
            return f"{type(error).__name__}: {error}"
    return "left it to rank 0 to say"


@pytest.fixture(scope="module")
def alone(tiny_run, tmp_path_factory):
    """The recipes on one process: this one."""
    return {name: trained(tiny_run.path, tmp_path_factory.mktemp(name), *changes)
            for name, changes in RECIPES.items()}


@pytest.fixture(scope="module")
def two(tiny_run, tmp_path_factory):
    """All cases on two processes that torchrun starts."""
    place = tmp_path_factory.mktemp("two")
    done = torchrun("from tests.integration.test_ranks import ranks_main\n"
                    f"ranks_main({str(tiny_run.path)!r}, {str(place)!r})\n", place, timeout=1500)
    return json.loads(done.stdout[done.stdout.index("RESULT") + 6:]) | {"place": place, "said": done.stderr}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_do_what_one_does(alone, two, name):
    one, both = alone[CASES[name][0]], two[name]
    assert both["sampled"] == one["sampled"] and len(set(one["sampled"])) == STEPS
    for mine, theirs in zip(one["records"], both["records"], strict=True):
        assert counted(theirs) == counted(mine)
        assert theirs["loss"] == pytest.approx(mine["loss"], rel=2e-6)
        assert theirs["gradient_norm"] == pytest.approx(mine["gradient_norm"], rel=2e-5)
        assert theirs["router"]["peak"] == pytest.approx(mine["router"]["peak"])
    assert (folder_of(two["place"] / name) / "model" / "config.json").is_file()
    assert json.loads((folder_of(two["place"] / name) / "episodes.json").read_text())


def test_the_recipes_have_what_they_are_to_show(alone):
    further = alone["further"]["records"]
    assert any(domain["resumed"] for record in further for domain in record["domains"].values())
    assert any(domain["outcome_groups"] for record in further for domain in record["domains"].values())


def test_split_weights_and_spread_experts_resume_to_the_bit(two):
    straight, resumed = two["zero 3, experts spread"], two["resumed"]
    assert resumed["sampled"] == straight["sampled"][2:], "it played again what was saved"
    for mine, theirs in zip(resumed["records"], straight["records"], strict=True):
        assert (mine["loss"], mine["gradient_norm"]) == (theirs["loss"], theirs["gradient_norm"])
    assert same_weights(*(folder_of(two["place"] / name) / "model" for name in ("resumed", "zero 3, experts spread")))


def test_files_are_written_once(two):
    assert two["said"].count("3/3") == len(CASES) + 1, "progress of rank 0 alone"
    assert not list(two["place"].glob("*/students/*/*/checkpoints"))


def test_ranks_of_other_configs_are_refused(two):
    assert "RanksDiffer: rank 1 of 2 differs from rank 0 in its configuration: train.samples_per_step" in two["differs"]


def test_a_failure_on_one_rank_is_told_to_the_others(two):
    assert two["failed"] == ("RankFailed: opening what the run stands on failed on rank 1 of 2: OSError: the planted disk is "
                             "gone")


def test_a_rank_that_is_killed_ends_the_job_which_then_goes_on(tiny_run, two, tmp_path):
    """Without a launcher that would stop the other rank: it must find out by itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    changes = (*MIXED, f"run={tmp_path}", f"train.steps={STEPS}", "train.checkpoint_every=1")
    ranks = [start_mopd("train", tiny_run.path, *changes, log=tmp_path / f"log-{rank}", RANK=str(rank), WORLD_SIZE="2",
                        LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]
    try:
        deadline = time.monotonic() + 500
        while not list((folder_of(tmp_path) / "checkpoints").glob("*/step-1/state.json")):
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks), read(tmp_path)
            time.sleep(0.005)
        ranks[1].send_signal(signal.SIGKILL)
        assert ranks[0].wait(timeout=300) == 1, read(tmp_path)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    said = (tmp_path / "log-0").read_text()
    assert "rank 0 of 2 lost the others at step" in said and "rank 1 was last seen at step" in said
    assert "goes on from the last checkpoint" in said and not (folder_of(tmp_path) / "model").exists()
    (own,) = (folder_of(tmp_path) / "checkpoints").iterdir()
    saved = [step for step, _ in checkpoints(own)]
    assert saved and saved[-1] < STEPS
    done = mopd("train", tiny_run.path, *changes, "--ranks", "2")
    assert done.returncode == 0, done.stderr[-3000:]
    straight = two["zero 0"]["records"]
    for mine, theirs in zip(records_of(tmp_path), straight, strict=True):
        assert (mine["loss"], mine["gradient_norm"]) == (theirs["loss"], theirs["gradient_norm"])
    assert same_weights(folder_of(tmp_path) / "model", folder_of(two["place"] / "zero 0") / "model")


def read(place: Path) -> str:
    return "\n".join(path.read_text()[-2000:] for path in place.glob("log-*"))


def test_the_option_is_not_for_jobs_of_a_launcher(tiny_run):
    done = mopd("train", tiny_run.path, "--ranks", "2", RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and "leave it out" in done.stderr


def test_experts_need_as_many_ranks(tiny_run, tmp_path):
    with pytest.raises(ValueError, match="autoep_size: experts spread over 2 ranks need a multiple of 2 ranks"):
        train(tiny_run.config(f"run={tmp_path}", "deepspeed.zero_stage=1", *SPREAD))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_where_weights_are_split_the_sampling_copy_has_the_configured_attention(tiny_run, attention, monkeypatch):
    """Under ZeRO-3 the engine reads a second model, against whose own attention it checks the one that it samples with."""
    monkeypatch.setattr("mopd.sampling.hf.HFEngine", lambda model, **_: model)
    config = tiny_run.config(f"student.attention={attention}")
    model = build_engine(config, types.SimpleNamespace(whole=False, model=None))
    assert model.config._attn_implementation == attention
