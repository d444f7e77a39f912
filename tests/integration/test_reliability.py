"""A run that is killed, asked to end or rolled back goes on as if nothing had happened, and what it made can be exported."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest
import torch

from mopd.export_model import ExportError, export_student, source
from mopd.learner.checkpoint import checkpoints
from mopd.learner.model import load_model
from mopd.rollback import CannotRollBack
from mopd.run import train
from mopd.sampling.streams import Streams
from mopd.signals import Stopped
from scripts.kill_train import rounds
from tests.tiny_run import mopd, records, same_weights, start_mopd

pytestmark = pytest.mark.timeout(1800)
STEPS = 5
CHANGES = [f"train.steps={STEPS}", "train.checkpoint_every=1", "train.keep_checkpoints=3", "train.group_size=2",
           "consistency.points=0", "train.selftest=false", "selection.draw=epoch"]


def student(run):
    return run / "students" / "student_mixed" / "seed-1"


def kept(run):
    return [step for own in student(run).glob("checkpoints/*") for step, _ in checkpoints(own)]


@pytest.fixture(scope="module")
def straight(tiny_run, tmp_path_factory):
    run = tmp_path_factory.mktemp("straight")
    train(tiny_run.config(f"run={run}", *CHANGES))
    return student(run)


def is_straight(run, straight):
    """Whether a finished run is the uninterrupted one, to the bit."""
    assert records(student(run)) == records(straight)
    assert same_weights(straight / "model", student(run) / "model")
    return True


def at_sample(monkeypatch, step, work):
    """Call `work()` within this process's own sampling of `step`."""
    rollouts = Streams._rollouts

    def patched(self, plan, result):
        if plan.step == step:
            work()
        return rollouts(self, plan, result)

    monkeypatch.setattr(Streams, "_rollouts", patched)


def interrupt():
    raise KeyboardInterrupt


def test_rollback_goes_on_from_an_earlier_step(tiny_run, straight, tmp_path, monkeypatch, capsys):
    config = tiny_run.config(f"run={tmp_path}", *CHANGES)
    at_sample(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    before = (student(tmp_path) / "metrics.jsonl").read_bytes().splitlines()
    assert kept(tmp_path) == [2, 3, 4] and len(before) == 4
    with pytest.raises(CannotRollBack, match="made 4 steps, so it would go on from step 1 or before; checkpoints are kept of "
                                             "step 2, 3, 4"):
        train(config, rollback=3)
    with pytest.raises(CannotRollBack, match="no checkpoint of this configuration"):
        train(tiny_run.config(f"run={tmp_path}", *CHANGES, "train.objective=jsd"), rollback=1)
    assert kept(tmp_path) == [2, 3, 4], "what is refused changes nothing"

    monkeypatch.undo()
    at_sample(monkeypatch, 2, interrupt)
    with pytest.raises(KeyboardInterrupt):  # before it has made a step
        train(config, rollback=2)
    said = capsys.readouterr().err
    assert "rolled back from step 4 to step 2" in said and "metrics.cut-1.jsonl" in said
    assert (student(tmp_path) / "metrics.cut-1.jsonl").read_bytes().splitlines() == before[2:]
    assert kept(tmp_path) == [2] and [r["step"] for r in records(student(tmp_path))] == [0, 1]
    monkeypatch.undo()
    train(config)
    assert is_straight(tmp_path, straight) and not (student(tmp_path) / "checkpoints").exists()


def test_a_stop_finishes_the_step_and_milestones_stay(tiny_run, straight, tmp_path, monkeypatch, capfd):
    config = tiny_run.config(f"run={tmp_path}", *CHANGES, "train.keep_every=2", "train.keep_checkpoints=1")
    at_sample(monkeypatch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Stopped) as stopped:
        train(config)
    assert stopped.value.code == 143 and signal.getsignal(signal.SIGTERM) is handler
    assert "stopped by SIGTERM after 3 of 5 steps: its checkpoint is saved" in capfd.readouterr().err
    assert kept(tmp_path) == [2, 3] and len(records(student(tmp_path))) == 3
    monkeypatch.undo()
    train(config)
    assert is_straight(tmp_path, straight) and kept(tmp_path) == [2, 4]
    assert source(student(tmp_path), None) == (STEPS, student(tmp_path) / "model") and source(student(tmp_path), 4)[0] == 4
    with pytest.raises(ExportError, match=r"of step 3; there is step 2, step 4, the finished student \(step 5\)"):
        source(student(tmp_path), 3)
    # a finished run goes back to a milestone
    at_sample(monkeypatch, 4, interrupt)
    with pytest.raises(KeyboardInterrupt):
        train(config, rollback=1)
    assert [r["step"] for r in records(student(tmp_path))] == [0, 1, 2, 3] and kept(tmp_path) == [2, 4]


def test_sampling_that_lasts_too_long_is_broken_off(tiny_run, straight, tmp_path, monkeypatch, capfd):
    config = tiny_run.config(f"run={tmp_path}", *CHANGES, "train.checkpoint_every=100", "train.stop_within_s=0.5")

    def hang():
        os.kill(os.getpid(), signal.SIGINT)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(0.01)
        raise AssertionError("nothing broke it off")

    at_sample(monkeypatch, 2, hang)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background
    try:
        with pytest.raises(Stopped) as stopped:
            train(config)
    finally:
        signal.signal(signal.SIGINT, previous)
    assert stopped.value.code == 130 and "stopped by SIGINT after 2 of 5 steps" in capfd.readouterr().err
    assert kept(tmp_path) == [2] and len(records(student(tmp_path))) == 2
    monkeypatch.undo()
    train(config)
    assert is_straight(tmp_path, straight)


def test_a_process_stops_and_its_checkpoint_is_exported(tiny_run, straight, tmp_path):
    command = ("train", tiny_run.path, f"run={tmp_path}", *CHANGES)
    process = start_mopd(*command, log=tmp_path / "log")
    try:
        wait_for(lambda: (student(tmp_path) / "metrics.jsonl").is_file() and records(student(tmp_path)), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 143, (tmp_path / "log").read_text()
    finally:
        process.kill()
    said = (tmp_path / "log").read_text()
    made = len(records(student(tmp_path)))
    assert f"stopped by SIGTERM after {made} of {STEPS} steps" in said and "exit status 143" in said
    assert "Traceback" not in said and kept(tmp_path)[-1] == made
    result = export_student(student(tmp_path), made, tmp_path / "exported", shard_size="20KB")
    assert result["step"] == made and result["largest_difference"] < 1e-4 and len(result["files"]) > 1
    manifest = json.loads((tmp_path / "exported" / "manifest.json").read_text())
    assert manifest["steps"] == made and manifest["exported_from"] == f"step-{made}"
    train(tiny_run.config(f"run={tmp_path}", *CHANGES))
    assert is_straight(tmp_path, straight)
    export_student(student(tmp_path), None, tmp_path / "finished")
    assert same_weights(tmp_path / "finished", student(tmp_path) / "model")
    assert not same_weights(tmp_path / "finished", tmp_path / "exported") or made == STEPS


def wait_for(there, *processes):
    deadline = time.monotonic() + 900
    while not there():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.01)


def test_two_ranks_agree_to_stop_and_their_split_weights_are_exported(tiny_run, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    changes = (f"run={tmp_path}", *CHANGES, "train.steps=500", "train.checkpoint_every=100", "deepspeed.zero_stage=3",
               "deepspeed.autoep_size=2")
    ranks = [start_mopd("train", tiny_run.path, *changes, log=tmp_path / f"log-{rank}", RANK=str(rank), WORLD_SIZE="2",
                        LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port) for rank in range(2)]
    try:
        wait_for(lambda: (student(tmp_path) / "metrics.jsonl").is_file() and records(student(tmp_path)), *ranks)
        ranks[1].send_signal(signal.SIGTERM)  # one is told, both stop
        assert [rank.wait(timeout=600) for rank in ranks] == [143, 143], (tmp_path / "log-0").read_text()
    finally:
        for rank in ranks:
            rank.kill()
    made = len(records(student(tmp_path)))
    assert kept(tmp_path) == [made] and f"stopped by SIGTERM after {made} of 500" in (tmp_path / "log-0").read_text()
    done = mopd("export", tmp_path, "--out", tmp_path / "exported", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["step"] == made and result["largest_difference"] < 1e-3
    start, end = load_model(tiny_run.folder / "base"), load_model(tmp_path / "exported")
    moved = {name for (name, a), (_, b) in zip(start.named_parameters(), end.named_parameters(), strict=True)
             if not torch.equal(a, b)}
    assert any("experts" in name for name in moved) and not any("mlp.gate.weight" in name for name in moved)


def test_kills_at_random_instants_change_nothing(tiny_run, straight, tmp_path):
    result = rounds(tiny_run, tmp_path, number=2, seed=1, changes=CHANGES, say=lambda _: None,
                    uninterrupted=(straight.parents[2], 8.0))
    assert len(result["rounds"]) == 2 and any(r["saving"] for r in result["rounds"])
