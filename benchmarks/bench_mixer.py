"""The mixer against its bars: exact batches in 1,000 steps, and slots as busy as a clairvoyant scheduler keeps them with 25
sources whose durations differ 66 times and whose lengths differ 90 times; and what a decision of the mixer costs.

    python benchmarks/bench_mixer.py --seeds 1 2 3 --steps 150
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from mopd.config import load_as
from mopd.progress import Progress
from mopd.simulate import Scenario, SimulateConfig, config_errors, scenario
from mopd.simulator import Simulation, Simulator, bound_step_seconds

RECIPE = Path(__file__).resolve().parent.parent / "configs" / "simulate.yaml"


def made(*overrides: str) -> Scenario:
    return scenario(load_as(SimulateConfig, RECIPE, overrides, config_errors))


def simulate(of: Scenario, name: str, steps: int) -> tuple[Simulation, float, int]:
    """(what happened, CPU seconds, events offered)."""
    scheduler = of.scheduler(name, steps)
    offered, offer = 0, scheduler.offer

    def counted(event):
        nonlocal offered
        offered += 1
        return offer(event)

    scheduler.offer = counted
    progress, start = Progress(f"{name}, {steps} steps", steps), time.process_time()
    found = Simulator(scheduler, of.cluster, of.work, steps, progress=progress.update).run()
    return found, time.process_time() - start, offered


def exact(steps: int, seed: int) -> dict:
    """Largest distance of any source's collected groups from its share of all, in groups, over `steps` small batches."""
    of = made(f"seed={seed}", "groups_per_step=16", "cluster.engines=2", "cluster.slots=16")
    found, _, _ = simulate(of, "corrected", steps)
    collected = np.array(found.collected)
    away = collected.cumsum(axis=0) - np.array(list(of.target.values())) * np.arange(1, steps + 1)[:, None]
    return {"steps": steps, "whole_batches": bool((collected.sum(axis=1) == 16).all()),
            "furthest_groups": float(np.abs(away).max())}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    arguments.add_argument("--steps", type=int, default=150)
    arguments.add_argument("--exact-steps", type=int, default=1000)
    arguments.add_argument("--json", action="store_true")
    given = arguments.parse_args()
    rows = []
    for seed in given.seeds:
        of = made(f"seed={seed}")
        bound = bound_step_seconds(of.work, of.target, of.cluster.all_slots)
        best, _, _ = simulate(of, "clairvoyant", given.steps)
        for name in ("corrected", "target", "deficit"):
            found, cpu, offered = simulate(of, name, given.steps)
            rows.append({"seed": seed, "scheduler": name, "occupancy": found.occupancy,
                         "of_clairvoyant": found.occupancy / best.occupancy, "step_over_bound": found.step_seconds / bound,
                         "mean_age": found.mean_age, "useful": found.useful_share, "cpu_us_per_event": 1e6 * cpu / offered})
    share = exact(given.exact_steps, given.seeds[0])
    if given.json:
        print(json.dumps({"schedulers": rows, "exact": share}))
        return
    print(f"{'seed':>4} {'scheduler':<10} {'occupancy':>9} {'of clairvoyant':>14} {'step/bound':>10} {'mean age':>8} "
          f"{'µs/event':>8}")
    for row in rows:
        print(f"{row['seed']:>4} {row['scheduler']:<10} {row['occupancy']:>9.1%} {row['of_clairvoyant']:>14.1%} "
              f"{row['step_over_bound']:>10.3f} {row['mean_age']:>8.2f} {row['cpu_us_per_event']:>8.0f}")
    print(f"{share['steps']} steps of 16 groups, 25 sources: every batch whole: {share['whole_batches']}; no source was ever "
          f"further than {share['furthest_groups']:.2f} groups from its share")


if __name__ == "__main__":
    main()
