"""Environment steps a second, in this process and in worker processes: python benchmarks/bench_environment_workers.py

For each family the same tasks are played by their experts with 8 threads; beside it, if asked for (--busy), a thread that
keeps this interpreter busy as a learner's or an engine's Python does. One JSON line per case: steps and resets a second,
CPU seconds of this process and of all workers per 1,000 steps, and the rounds that the busy thread made meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import make_family
from mopd.environments.workers import WorkerFamily, WorkerOptions

FAMILIES = {
    "babyai": {"levels": ["BabyAI-GoToLocalS6N4-v0"]},
    "textworld_express": {"games": {"coin": "numLocations=6,includeDoors=0,numDistractorItems=2"}},
}


def cpu_of(pids: list[int]) -> float:
    """CPU seconds that these processes and their children have used."""
    ticks, left = 0, list(pids)
    while left:
        pid = left.pop()
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
            left += [int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()]
        except OSError:
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


def play(family, tasks, seconds: float, busy: bool) -> dict[str, float]:
    """Play `tasks` in turn for so long."""
    steps, resets, rounds, over = [0] * 8, [0] * 8, [0], threading.Event()

    def loop(number: int) -> None:
        place = number
        while not over.is_set():
            environment, view = pool.acquire(tasks[place % len(tasks)], expert=True)
            resets[number] += 1
            for _ in range(20):
                action = None if view.done or over.is_set() else environment.expert_action()
                if action is None:
                    break
                view = environment.step(action)
                steps[number] += 1
            pool.release(environment)
            place += 8

    def spin() -> None:
        while not over.is_set():
            sum(range(10_000))
            rounds[0] += 1

    with EnvironmentPool(family, size=8) as pool, ThreadPoolExecutor(9) as threads:
        for environment, _ in [pool.acquire(task, expert=True) for task in tasks[:8]]:  # everything has started
            pool.release(environment)
        pids = family.pids() if isinstance(family, WorkerFamily) else [
            pid for pid in [getattr(getattr(family, "java", None), "pid", None)] if pid]
        here, there, started = time.process_time(), cpu_of(pids), time.perf_counter()
        waiting = [threads.submit(loop, n) for n in range(8)] + ([threads.submit(spin)] if busy else [])
        time.sleep(seconds)
        over.set()
        for one in waiting:
            one.result()
        wall = time.perf_counter() - started
        here, there = time.process_time() - here, cpu_of(pids) - there
    total = sum(steps)
    return {"steps_per_s": round(total / wall, 1), "resets_per_s": round(sum(resets) / wall, 1),
            "cpu_s_here_per_1000_steps": round(1000 * here / total, 2),
            "cpu_s_workers_per_1000_steps": round(1000 * there / total, 2), "busy_rounds_per_s": round(rounds[0] / wall, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--processes", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--busy", action="store_true")
    given = parser.parse_args()
    for name in given.families:
        for processes in given.processes:
            family = WorkerFamily(name, FAMILIES[name], workers=WorkerOptions(processes)) if processes else make_family(
                name, FAMILIES[name])
            try:
                found = play(family, family.tasks("train")[:400], given.seconds, given.busy)
            finally:
                family.close()
            print(json.dumps({"family": name, "processes": processes, "busy": given.busy, **found,
                              "load": round(os.getloadavg()[0], 1)}), flush=True)


if __name__ == "__main__":
    main()
