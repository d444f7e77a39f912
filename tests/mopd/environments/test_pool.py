"""The pool on real environments: prefetching, killed and hung Java processes, counts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from mopd.environments.base import EnvironmentFailure, Observation, Task
from mopd.environments.java import JavaMachine
from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import make_family


def test_prefetched_and_direct_starts_are_equal(family):
    tasks = family.tasks("train")[:5]
    direct = [family.create().reset(task) for task in tasks]
    with EnvironmentPool(family, size=2, workers=2) as pool:
        pool.prefetch([*tasks, tasks[0]])  # more than fit; the first twice
        for task, expected in zip([*tasks[::-1], tasks[0]], [*direct[::-1], direct[0]], strict=True):
            environment, observation = pool.acquire(task)
            assert (observation.text, observation.instruction) == (expected.text, expected.instruction)
            pool.release(environment)
        assert pool.stats.resets == 6 and not pool.stats.failures and pool.stats.reset_seconds > 0


def test_more_acquired_than_size(families):
    tasks = families["babyai"].tasks("train")[:4]
    with EnvironmentPool(families["babyai"], size=1) as pool:
        taken = [pool.acquire(task) for task in tasks]
        assert len({id(environment) for environment, _ in taken}) == 4
        for environment, _ in taken:
            environment.step("turn left")
            pool.release(environment)
        assert pool.stats.steps == 4
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(tasks[0])


@pytest.mark.parametrize(("answer", "words"), [
    (None, "a NoneType instead of an Observation"), ("a room", "a str instead of an Observation"),
    (Observation(5), "text and instruction are int and str, not strings"),
    (Observation("a room", score=float("nan")), "score is nan, not a finite number"),
    (Observation("a room", score=None), "score is None, not a finite number"),
])
def test_what_no_model_could_be_shown_or_rewarded_with_is_a_failure_of_the_environment(answer, words):
    answers = [Observation("a room"), answer]
    made = SimpleNamespace(reset=lambda task, expert: answers[0], step=lambda action: answers[1], close=lambda: None)
    with EnvironmentPool(SimpleNamespace(name="mine", create=lambda: made), size=1, retries=0) as pool:
        environment, _ = pool.acquire(Task("t", 0, "train"))
        with pytest.raises(EnvironmentFailure, match=f"bad_observation: environment 'mine' answered with .*{words}"):
            environment.step("look")
        assert environment.broken
        answers.reverse()
        with pytest.raises(EnvironmentFailure, match="bad_observation"):
            pool.acquire(Task("t", 1, "train"))
        assert pool.stats.failures == {"bad_observation": 2}


@pytest.fixture
def own_process():
    """A family whose Java process may be killed."""
    family = make_family("textworld_express", {"games": {"coin": "numLocations=3,includeDoors=0,numDistractorItems=0"}})
    yield family
    family.close()


def test_killed_java_is_an_infrastructure_failure_and_the_pool_recovers(own_process):
    task = own_process.tasks("train")[0]
    with EnvironmentPool(own_process, size=2) as pool:
        environment, before = pool.acquire(task)
        other, _ = pool.acquire(own_process.tasks("train")[1])
        os.kill(own_process.java.pid, signal.SIGKILL)
        with pytest.raises(EnvironmentFailure, match="java_died") as caught:
            environment.step(before.admissible[0])
        assert caught.value.category == "java_died"
        pool.release(environment)
        with pytest.raises(EnvironmentFailure):  # it lived in the same process
            other.step("look around")
        pool.release(other)
        environment, after = pool.acquire(task)
        assert after == before
        assert pool.stats.failures == {"java_died": 2}


def test_hung_java_is_killed_and_the_reset_tried_again():
    family = make_family("textworld_express", {"timeout_s": 3.0})
    task = family.tasks("train")[0]
    with EnvironmentPool(family, size=1) as pool:
        environment, before = pool.acquire(task)
        pool.release(environment)
        pid = family.java.pid
        os.kill(pid, signal.SIGSTOP)  # neither alive nor dead
        while _state(pid) != "T":
            time.sleep(0.01)
        _, after = pool.acquire(task)
        assert after == before and pool.stats.failures == {"java_timeout": 1}
    assert family.java.pid != pid
    family.close()


def test_failure_is_raised_when_all_retries_fail(own_process, monkeypatch):
    monkeypatch.setattr("mopd.environments.pool.BACKOFF_S", 0.001)
    monkeypatch.setattr(own_process.java, "_options", ("-XX:NoSuchOption",))
    with EnvironmentPool(own_process, size=1, retries=1) as pool:
        with pytest.raises(EnvironmentFailure, match="java_start.*NoSuchOption"):
            pool.acquire(own_process.tasks("train")[0])
        assert pool.stats.failures == {"java_start": 2}


def test_java_does_not_outlive_its_parent():
    """Killed without a chance to clean up, the parent takes its Java process along."""
    code = (
        "from mopd.environments.registry import make_family; import os, signal; f = make_family('textworld_express');"
        "f.create(); print(f.java.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    for _ in range(100):
        if _state(pid) in ("", "Z"):
            return
        time.sleep(0.05)
    pytest.fail(f"Java process {pid} outlived its parent")


def _state(pid: int) -> str:
    """One letter, as ps shows it; empty when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


def test_missing_jar_is_named():
    machine = JavaMachine("nothing", "/nowhere/nothing.jar")
    with pytest.raises(EnvironmentFailure, match="nothing"):
        machine.new("no.such.Thing")
    machine.close()
