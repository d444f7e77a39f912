"""Environments in worker processes: the same as in this one, and trouble costs only those that were in it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mopd.environments.base import EnvironmentFailure, EnvironmentFamily, Task
from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import EnvironmentConfigError, make_family
from mopd.environments.workers import WorkerError, WorkerFamily, WorkerOptions
from mopd.processes import of_session as processes_of

UNRULY = "unruly_family:UnrulyFamily"
TASK = Task("count", 100, "train")


@contextlib.contextmanager
def family(environment=UNRULY, options=None, **workers):
    made = WorkerFamily(environment, options, workers=WorkerOptions(**workers))
    sessions = set(made.pids())
    try:
        yield made
        sessions |= set(made.pids())
    finally:
        made.close()
        for leader in sessions:
            assert processes_of(leader) == [], f"worker {leader} left something behind"


def until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_an_environment_is_the_same_in_a_worker_and_here():
    options = {"sizes": {"train": 40, "development": 5, "test": 5}}
    here = make_family("babyai", options)
    with family("babyai", options, processes=2) as there:
        assert isinstance(there, EnvironmentFamily)
        assert (there.name, there.version, there.system_prompt) == (here.name, here.version, here.system_prompt)
        assert all(there.tasks(split) == here.tasks(split) for split in ("train", "development", "test"))
        with pytest.raises(ValueError, match="unknown split 'tset'"):
            there.tasks("tset")
        one, other = here.create(), there.create()
        for task in here.tasks("train")[:4]:
            assert one.reset(task, expert=True) == other.reset(task, expert=True)
            for _ in range(4):
                action = one.expert_action()
                assert other.expert_action() == action
                assert action is None or one.step(action) == other.step(action)
            assert one.step("gibberish") == other.step("gibberish")
        assert not hasattr(other, "possible_actions")
        other.close()
        other.close()


def test_environments_are_spread_and_play_beside_each_other():
    with family(processes=2) as there, EnvironmentPool(there, size=4) as pool, ThreadPoolExecutor(4) as threads:
        played = list(threads.map(pool.acquire, [TASK] * 4))
        assert sorted(Counter(view.info["pid"] for _, view in played).values()) == [2, 2]
        started = time.perf_counter()
        views = list(threads.map(lambda p: [p[0].step("go") for _ in range(5)][-1], played))
        assert {view.text for view in views} == {"count 5"} and time.perf_counter() - started < 60
        assert played[0][0].possible_actions() == ("go", "stay") and played[0][0].expert_action() == "go 5"
        assert pool.stats.steps == 20 and pool.stats.resets == 4 and not pool.stats.failures


def test_a_killed_worker_costs_its_own_episodes_only():
    with family(processes=2) as there, EnvironmentPool(there, size=6) as pool:
        played = [pool.acquire(TASK) for _ in range(6)]
        idle = [one for one, view in played[4:]]
        for one in idle:
            pool.release(one)
        victim = played[0][1].info["pid"]
        for one, _ in played[:4]:
            one.step("start")
        children = {view.info["pid"]: view.info["child"] for view in [one.step("go") for one, _ in played[:4]]}
        os.kill(victim, signal.SIGKILL)
        hit = 0
        for one, view in played[:4]:
            if view.info["pid"] == victim:
                with pytest.raises(EnvironmentFailure, match="killed by signal 9") as caught:
                    one.step("go")
                assert caught.value.category == "worker_died" and one.broken
                hit += 1
            else:
                assert one.step("go").text == "count 3"
            pool.release(one)
        assert hit == 2 and pool.stats.failures == {"worker_died": 2}
        until(lambda: not alive(children[victim]))
        assert all(alive(child) for pid, child in children.items() if pid != victim)
        # Environments that rested in the dead worker live on elsewhere, without a failure.
        views = [pool.acquire(TASK) for _ in range(6)]
        assert len({view.info["pid"] for _, view in views}) == 2 and victim not in {v.info["pid"] for _, v in views}
        assert pool.stats.failures == {"worker_died": 2} and there.counts == {"started": 3, "died": 1}


@pytest.mark.parametrize("how", ["hang", "hold"])
def test_a_worker_that_hangs_is_killed_with_everything_under_it(how):
    with family(processes=1, step_timeout_s=1.0) as there, EnvironmentPool(there, size=2) as pool, \
            ThreadPoolExecutor(2) as threads:
        (hanging, _), (beside, _) = pool.acquire(TASK), pool.acquire(TASK)
        child = beside.step("start").info["child"]
        started = time.perf_counter()
        stuck = threads.submit(hanging.step, how)
        with pytest.raises(EnvironmentFailure, match="did not answer `step` in 1 s") as caught:
            stuck.result()
        assert caught.value.category == "worker_timeout" and time.perf_counter() - started < 60
        with pytest.raises(EnvironmentFailure, match="worker_timeout"):
            beside.step("go")
        until(lambda: not alive(child))
        assert pool.acquire(TASK)[1].text == "count 0" and there.counts == {"started": 2, "timed_out": 1}


def test_a_stopped_worker_and_a_reset_that_takes_too_long():
    with family(processes=1, step_timeout_s=1.0, reset_timeout_s=5.0) as there:
        environment = there.create()
        environment.reset(TASK)
        os.kill(environment.pid, signal.SIGSTOP)
        with pytest.raises(EnvironmentFailure, match="worker_timeout"):
            environment.step("go")
        environment.reset(TASK)
        there.workers = WorkerOptions(reset_timeout_s=0.5)
        with pytest.raises(EnvironmentFailure, match="did not answer `reset` in 0.5 s"):
            environment.reset(Task("slow", 1, "train"))


def test_a_worker_that_floods_its_output_goes_on():
    with family(processes=1) as there:
        environment = there.create()
        environment.reset(TASK)
        for number in range(1, 4):
            assert environment.step("flood").text == f"count {number}"
        with pytest.raises(EnvironmentFailure, match="ended with status 7 .its last words: .*yyy"):
            environment.step("exit")


def test_errors_of_options_and_constructors_are_the_same_as_here():
    for options, kind in (({"trouble": "start"}, ValueError), ({"treble": 1}, EnvironmentConfigError)):
        with pytest.raises(kind) as here:
            make_family(UNRULY, options)
        with pytest.raises(kind) as there:
            WorkerFamily(UNRULY, options)
        assert str(there.value) == str(here.value)
    with pytest.raises(EnvironmentConfigError, match="no module 'unruly_famly'"):
        WorkerFamily("unruly_famly:UnrulyFamily")
    with pytest.raises(EnvironmentFailure, match="worker_died.*status 3.*cannot find the world map"):
        WorkerFamily(UNRULY, {"trouble": "exit"})
    with family(options={"trouble": "create"}) as there:
        for _ in range(2):
            with pytest.raises(ValueError, match="no such world: atlantis"):
                there.create()
        assert there.counts == {"started": 1}
    with pytest.raises(ValueError, match="processes: 0 must be above 0; recycle_after: -1 must be at least 0"):
        WorkerFamily(UNRULY, workers=WorkerOptions(processes=0, recycle_after=-1))


def test_exceptions_keep_their_kind_and_the_worker_lives():
    with family() as there:
        environment = there.create()
        environment.reset(TASK)
        with pytest.raises(EnvironmentFailure, match="^lost_game: the game is gone$") as caught:
            environment.step("fail")
        assert caught.value.category == "lost_game"
        with pytest.raises(TypeError, match="^a bug") as bug:
            environment.step("bug")
        assert "in a worker process" in bug.value.__notes__[0] and "line" in bug.value.__notes__[0]
        with pytest.raises(WorkerError, match="OwnError: mine"):
            environment.step("own")
        with pytest.raises(TypeError, match="cannot be sent"):
            environment.step("secret")
        assert environment.step("go").text == "count 1" and there.counts == {"started": 1}


def test_workers_are_recycled_after_episodes_and_for_memory():
    with family(processes=1, recycle_after=3) as there, EnvironmentPool(there, size=2) as pool:
        running, view = pool.acquire(TASK)
        pids = {view.info["pid"]}
        for _ in range(6):
            other, view = pool.acquire(TASK)
            pids.add(view.info["pid"])
            pool.release(other)
        assert len(pids) == 3 and there.counts["recycled_age"] == 2 and not pool.stats.failures
        # An episode under way keeps its retired worker alive, and no longer than that.
        first = running.step("go").info["pid"]
        assert running.step("go").text == "count 2" and first in there.pids()
        pool.release(running)
        until(lambda: not alive(first))
        until(lambda: len(there.pids()) == 1)
    with family(processes=1, memory_mib=120) as there:
        environment = there.create()
        before = environment.reset(TASK).info["pid"]
        environment.step("grow")
        assert environment.reset(TASK).info["pid"] == before  # what it holds is seen with the reset
        assert environment.reset(TASK).info["pid"] != before and there.counts["recycled_memory"] == 1
        until(lambda: not alive(before))


def test_nothing_outlives_a_killed_run(tmp_path):
    program = textwrap.dedent(f"""
        import os, signal, threading, time
        from mopd.environments.base import Task
        from mopd.environments.workers import WorkerFamily, WorkerOptions
        there = WorkerFamily({UNRULY!r}, workers=WorkerOptions(processes=2, step_timeout_s=600))
        made = [there.create(), there.create()]
        views = [one.reset(Task("count", 100, "train")) for one in made]
        views = [one.step("start") for one in made]
        threading.Thread(target=made[1].step, args=("hang",), daemon=True).start()
        time.sleep(0.3)
        print(*there.pids(), *(view.info["child"] for view in views), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60,
                          env={**os.environ, "PYTHONPATH": path})
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 4 and done.returncode == -signal.SIGKILL
    until(lambda: not any(alive(pid) for pid in pids))


@pytest.mark.parametrize("game", ["textworld_express", "scienceworld"])
def test_a_dead_java_process_costs_its_own_episodes(game):
    options = {"scienceworld": {"tasks": ["find-non-living-thing"]},
               "textworld_express": {"games": {"coin": "numLocations=2"}}}
    with family(game, options[game], processes=2) as there, EnvironmentPool(there, size=2) as pool:
        tasks = there.tasks("train")[:2]
        (one, first), (other, second) = pool.acquire(tasks[0]), pool.acquire(tasks[1])
        assert first.text and second.text
        java = {pid: [p for p in processes_of(pid) if p != pid] for pid in there.pids()}
        assert [len(found) for found in java.values()] == [1, 1]  # each worker has a Java process of its own
        hosts = {one: one._environment.pid, other: other._environment.pid}
        if game == "scienceworld":
            os.kill(java[hosts[one]][0], signal.SIGKILL)
        else:
            os.kill(java[hosts[one]][0], signal.SIGSTOP)  # hung for good; the worker is killed, and it with it
            there.workers = WorkerOptions(processes=2, step_timeout_s=1.0)
        with pytest.raises(EnvironmentFailure) as caught:
            one.step(first.admissible[0] if first.admissible else "look around")
        assert caught.value.category == ("java_died" if game == "scienceworld" else "worker_timeout")
        until(lambda: not alive(java[hosts[one]][0]))
        assert other.step("inventory").text
        pool.release(one)
        assert pool.acquire(tasks[0])[1].text == first.text
        assert pool.stats.failures == {caught.value.category: 1}
