"""How long a step's draw takes, strategy by strategy, over an index of many decision points; and how large the state is.

    python benchmarks/bench_selection.py --sequences 125000 --turns 8 --steps 20
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np

from prefix_store.index import PointIndex
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.trajectory import SOURCE_KINDS

STRATEGIES = {
    "uniform": {}, "uniform_depth": {}, "geometric": {"kappa": 0.6}, "curriculum": {"steps": 100},
    "weighted": {"exponent": 1.0}, "pivot": {"quantile": 0.8},
}  # fmt: skip
TRAJECTORIES = 18
# a step of the demo


def make_index(sequences: int, turns: int, seed: int = 0) -> PointIndex:
    """One domain, experts only, lengths around `turns`, in memory."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(max(1, turns // 2), turns + turns // 2 + 1, sequences).astype(np.int32)
    first = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    sequence = np.repeat(np.arange(sequences, dtype=np.int32), lengths)
    ids = np.sort(np.frombuffer(rng.bytes(32 * sequences), "S32")).view(np.uint8).reshape(-1, 32)
    points, zeros = len(sequence), np.zeros(len(sequence), dtype=np.int32)
    return PointIndex(
        sequence=sequence, context=zeros, turn=(np.arange(points) - first[sequence]).astype(np.int32),
        turns=lengths[sequence], prefix_tokens=zeros + 100, action_tokens=zeros + 10, domain=zeros,
        source=np.full(points, SOURCE_KINDS.index("expert"), dtype=np.int8), split=zeros,
        success=np.ones(points, dtype=bool), ids=ids, first=first, domains=("game",), splits=("train",))  # fmt: skip


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--sequences", type=int, default=125_000)
    arguments.add_argument("--turns", type=int, default=8)
    arguments.add_argument("--steps", type=int, default=20)
    given = arguments.parse_args()
    index = make_index(given.sequences, given.turns)
    rng = np.random.default_rng(1)
    print(f"{len(index):,} decision points of {given.sequences:,} trajectories; {TRAJECTORIES} trajectories a step")
    for name, options in STRATEGIES.items():
        for draw in ("replacement", "distinct"):
            selector = Selector(index, SelectionOptions(name, options, points_per_sequence=2, draw=draw), seed=1)
            selector.select_sequences(0, "game", "sft_prefix", TRAJECTORIES)
            times, told = [], []
            for step in range(given.steps):
                start = time.perf_counter()
                groups = selector.select_sequences(step, "game", "sft_prefix", TRAJECTORIES)
                drawn = time.perf_counter()
                selector.observe(step, {p: {"reverse_kl": rng.exponential()} for g in groups for p in g})
                told.append(time.perf_counter() - drawn)
                times.append(drawn - start)
            state = len(json.dumps(selector.state_dict()["scores"]))
            touched = len(selector.scores.touched())
            print(f"  {name:14s} {draw:12s} draw {np.median(times) * 1e3:7.2f} ms, observe {np.median(told) * 1e3:6.2f} ms"
                  + (f", state {state:,} characters for {touched} measured points" if touched else ""))


if __name__ == "__main__":
    main()
