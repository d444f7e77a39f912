"""What sharing a micro-batch's columns over two ranks (deepspeed.sequence_parallel_size) saves and costs for long contexts.

    python benchmarks/bench_columns.py [--prefix 2048,4096,8192] [--turn 64] [--steps 2] [--json FILE]

One trajectory of random tokens with four fresh turns trains a tiny Mixture-of-Experts model on one process and on
two over gloo, one thread each, float32. Memory is what training adds to a process at its peak: the largest resident size less
that before the first step, weights and optimizer states being there. Every length runs in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import psutil  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.bench_scaling import VOCABULARY, loss, processes, rows_of  # noqa: E402
from mopd.learner.engine import Learner, LearnerConfig, start_processes  # noqa: E402
from mopd.learner.model import TinyMoEConfig, new_tiny_moe  # noqa: E402
from mopd.learner.packing import pack  # noqa: E402
from mopd.ranks import leave  # noqa: E402
from mopd.rows import STREAMS  # noqa: E402


def ranks_main(options: dict) -> None:
    """One length on this rank; rank 0 prints what both found."""
    torch.set_num_threads(1)
    _, size = start_processes()
    model = new_tiny_moe(TinyMoEConfig(hidden_size=options["hidden"], layers=options["layers"]), vocabulary=VOCABULARY,
                         seed=0, pad_id=0, bos_id=None, eos_id=1)
    model.config.max_position_embeddings = options["prefix"] + options["turn"]
    learner = Learner(model, config=LearnerConfig(schedule="constant", sequence_parallel_size=size), total_steps=99)
    batches = pack(rows_of(1, options["prefix"], options["turn"]), token_budget=1, pad_id=0, domains=["domain"],
                   streams=STREAMS)
    if learner.sequence is not None:
        batches = [learner.sequence.mine(batch) for batch in batches]
    before = psutil.Process().memory_info().rss
    cpu, clock, losses = time.process_time(), time.perf_counter(), []
    for _ in range(options["steps"]):
        losses.append(learner.train_step(batches, loss).loss)
    mine = {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before, "cpu": time.process_time() - cpu,
            "seconds": time.perf_counter() - clock, "loss": losses[-1]}
    parts = [None] * size
    torch.distributed.all_gather_object(parts, mine)
    if os.environ.get("RANK", "0") == "0":
        print("RESULT" + json.dumps({
            "peak": max(p["peak"] for p in parts), "cpu": sum(p["cpu"] for p in parts) / options["steps"],
            "seconds": max(p["seconds"] for p in parts) / options["steps"], "loss": losses[-1]}), flush=True)
    leave()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefix", default="2048,4096,8192")
    for name, value in (("hidden", 128), ("layers", 4), ("turn", 64), ("steps", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", default="", help="file for all numbers")
    given, found = parser.parse_args(), []
    print("| tokens | ranks | MiB a rank at its peak | to 1 rank | s a step | CPU s a step | loss |\n"
          "| --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for prefix in map(int, given.prefix.split(",")):
        options = {"prefix": prefix, **{name: getattr(given, name) for name in ("hidden", "layers", "turn", "steps")}}
        for size in (1, 2):
            found.append({"prefix": prefix, "ranks": size} | processes(options, size, "bench_columns"))
            now, one = found[-1], found[-1] if size == 1 else found[-2]
            print(f"| {prefix + 4 * given.turn:,} | {size} | {now['peak'] / 2**20:,.0f} | {now['peak'] / one['peak']:.2f} | "
                  f"{now['seconds']:.2f} | {now['cpu']:.2f} | {now['loss']:.6f} |", flush=True)
    print("load:", " ".join(f"{x:.1f}" for x in os.getloadavg()))
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
