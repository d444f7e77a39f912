"""Whole runs whose environments live in worker processes: the same result, whatever is killed; and several harnesses."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mopd.environments import workers
from mopd.processes import of_session as processes_of
from mopd.run import train
from tests.tiny_run import records, same_weights

pytestmark = pytest.mark.timeout(600)
CHANGES = ["train.steps=5", "train.prefix_fraction=0.25", "train.selftest=false", "consistency.points=0"]


def student(run):
    return run / "students" / "student_mixed" / "seed-1"


def plain(run):
    """The steps of a run without what is counted of its environments' processes, and without the gauges that show the
    rounding of other batches: an episode that is played again is sampled beside others than before."""
    found = records(student(run))
    for record in found:
        for domain in record["domains"].values():
            for key in ("environment_failures", "workers", "java", "mismatch_mean", "mismatch_max", "effective_sample_size"):
                domain.pop(key, None)
    return found


def kill_in_mid_episode(done: list[str], until: threading.Event) -> None:
    """SIGKILL to a worker of BabyAI and to the Java process of a worker of the game, each while it hosts an episode."""
    while not until.is_set() and len(done) < 2:
        for family in list(workers._OPEN):
            if family.environment in done or family.counts["started"] > 1:
                continue
            for slot in family._slots:
                worker = slot.worker
                if worker is None or worker.ended is not None or worker.resets < 2 or not worker.playing:
                    continue
                java = family.environment == "textworld_express"
                pids = [p for p in processes_of(worker.process.pid) if p != worker.process.pid] if java else [
                    worker.process.pid]
                for pid in pids[:1]:
                    os.kill(pid, signal.SIGKILL)
                    done.append(family.environment)
        time.sleep(0.002)


def test_killed_workers_and_java_change_no_step(tiny_run, tmp_path):
    train(tiny_run.config(f"run={tmp_path / 'here'}", *CHANGES))
    killed: list[str] = []
    over = threading.Event()
    killer = threading.Thread(target=kill_in_mid_episode, args=(killed, over))
    killer.start()
    try:
        train(tiny_run.config(f"run={tmp_path / 'there'}", *CHANGES, "domains.embodied.worker_processes=1",
                              "domains.game.worker_processes=1"))
    finally:
        over.set()
        killer.join()
    assert sorted(killed) == ["babyai", "textworld_express"]
    assert plain(tmp_path / "here") == plain(tmp_path / "there") and len(plain(tmp_path / "here")) == 5
    assert same_weights(student(tmp_path / "here") / "model", student(tmp_path / "there") / "model")
    last = records(student(tmp_path / "there"))[-1]["domains"]
    assert last["embodied"]["workers"] == {"started": 2, "died": 1}
    assert set(last["embodied"]["environment_failures"]) == {"worker_died"}
    # A game asks Java for admissible actions only, so the tiny student may not notice; the worker starts another.
    assert set(last["game"]["environment_failures"]) <= {"java_died"} and last["game"]["workers"] == {"started": 1}


def test_several_harnesses_are_reported_apart(tiny_run, tmp_path):
    train(tiny_run.config(
        f"run={tmp_path}", *CHANGES, "train.steps=2", "train.samples_per_step=12",
        "domains.embodied.harnesses={whole: {share: 1}, last: {share: 1, history_window: 1, system_prompt: Act.}}"))
    for record in records(student(tmp_path)):
        assert "harnesses" not in record["domains"]["game"]
        found = record["domains"]["embodied"]["harnesses"]
        assert set(found) <= {"whole", "last"} and sum(part["sequences"] for part in found.values()) > 2
