"""What more ranks, ZeRO stages and spread experts cost and save: tokens per second and memory of the learner.

    python benchmarks/bench_scaling.py [--hidden 128] [--layers 4] [--experts 8] [--steps 4] [--json FILE]

A Mixture-of-Experts model of random weights trains on the same rows on one process at every ZeRO stage and on two over gloo,
there also with experts spread over one rank and two. A step is a warm-up, then `--steps` are timed. tokens/s is of all ranks
together in wall-clock time; CPU seconds per 1,000 tokens, summed over ranks, are steadier on a machine with other work;
memory is what training keeps between steps on a rank (tensors, counted once) and the estimate of mopd/memory.py for it. On
one machine two ranks share its cores: this shows overheads and memory, not speed-up over machines.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.learner.engine import Learner, LearnerConfig, start_processes  # noqa: E402
from mopd.learner.model import TinyMoEConfig, new_tiny_moe  # noqa: E402
from mopd.learner.packing import pack, row_cost, spread  # noqa: E402
from mopd.memory import model_states  # noqa: E402
from mopd.model_shape import shape_of  # noqa: E402
from mopd.ranks import leave  # noqa: E402
from mopd.rows import STREAMS, Action, Row  # noqa: E402
from tests.live_tensors import live_bytes  # noqa: E402

VOCABULARY = 1024
CASES = {1: [(stage, 0) for stage in range(4)] + [(1, 1)],
         2: [(stage, 0) for stage in range(4)] + [(stage, size) for stage in (1, 2, 3) for size in (1, 2)]}


def rows_of(count: int, prefix: int, turn: int) -> list[Row]:
    """Trajectories of random tokens with four fresh turns at as many points."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(count):
        trunk = draw.integers(5, VOCABULARY, prefix).astype(np.uint32)
        actions = tuple(Action(at=prefix * (t + 1) // 4, tokens=draw.integers(5, VOCABULARY, turn).astype(np.uint32),
                               behaviour_logprob=np.full(turn, -1.0, np.float32), version=np.zeros(turn, np.int32),
                               branch=True, turn=t, sequence=number * 4 + t, group=number) for t in range(4))
        found.append(Row("domain", "sft_prefix", trunk, actions, f"row {number}"))
    return found


def loss(logits, batch):
    each = torch.nn.functional.cross_entropy(logits, batch.label, reduction="none")
    return each.sum() / 1000, {}


def measured(options: dict, stage: int, experts: int, rank: int, size: int) -> dict:
    """Of one configuration on this rank: seconds, CPU seconds and tokens of the timed steps, bytes kept."""
    torch.set_num_threads(1)
    shape = TinyMoEConfig(hidden_size=options["hidden"], layers=options["layers"], experts=options["experts"])
    before = live_bytes()
    model = new_tiny_moe(shape, vocabulary=VOCABULARY, seed=0, pad_id=0, bos_id=None, eos_id=1)
    config = model.config.to_dict()
    learner = Learner(model, config=LearnerConfig(zero_stage=stage, autoep_size=experts, schedule="constant"), total_steps=99)
    del model
    rows = rows_of(options["rows"], options["prefix"], options["turn"])
    mine = [rows[i] for i in spread([row_cost(row) for row in rows], size)[rank]]
    batches = pack(mine, token_budget=options["budget"], pad_id=0, domains=["domain"], streams=STREAMS)
    learner.train_step(batches, loss)
    kept = live_bytes() - before
    clock, cpu, tokens, waited = time.perf_counter(), time.process_time(), 0, 0.0
    for _ in range(options["steps"]):
        tokens += learner.train_step(batches, loss).tokens
        waited += learner.waited
    found = {"seconds": time.perf_counter() - clock, "cpu": time.process_time() - cpu, "tokens": tokens, "kept": kept,
             "waited": waited, "config": config}
    learner.close()
    return found


def on_ranks(options: dict, size: int) -> list[dict]:
    """Every case of so many processes; what both ranks found, put together."""
    rank, world = start_processes()
    assert world == size
    found = []
    for stage, experts in CASES[size]:
        mine = measured(options, stage, experts, rank, size)
        parts = [mine]
        if size > 1:
            parts = [None] * size
            torch.distributed.all_gather_object(parts, {k: v for k, v in mine.items() if k != "config"})
        found.append({"ranks": size, "stage": stage, "experts": experts, "tokens": mine["tokens"], "config": mine["config"],
                      "seconds": max(p["seconds"] for p in parts), "cpu": sum(p["cpu"] for p in parts),
                      "kept": max(p["kept"] for p in parts), "waited": max(p["waited"] for p in parts)})
    return found


def ranks_main(options: dict) -> None:
    found = on_ranks(options, int(os.environ["WORLD_SIZE"]))
    if os.environ["RANK"] == "0":
        print("RESULT" + json.dumps(found), flush=True)
    leave()


def processes(options: dict, size: int, module: str = "bench_scaling") -> Any:
    """What `ranks_main(options)` of a benchmark finds in `size` processes, started afresh so that none inherits another's
    memory."""
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "ranks.py"
        script.write_text(f"import sys; sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\n"
                          f"from {module} import ranks_main; ranks_main({options!r})\n")
        done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}",
                               str(script)], env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True,
                              check=True)
    return json.loads(done.stdout[done.stdout.index("RESULT") + 6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("hidden", 128), ("layers", 4), ("experts", 8), ("steps", 4), ("rows", 12), ("prefix", 256),
                        ("turn", 12), ("budget", 2048)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", default="", help="file for all numbers")
    given = parser.parse_args()
    options = {name: value for name, value in vars(given).items() if name != "json"}
    print("| ranks | ZeRO | experts over | tokens/s | to 1 rank, ZeRO-0 | CPU s per 1,000 tokens | waited | "
          "MiB a rank keeps | estimate |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    results = [case for size in CASES for case in processes(options, size)]
    first = results[0]["tokens"] / results[0]["seconds"]
    for case in results:
        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(case.pop("config")))
            shape = shape_of(place)
        states, _ = model_states(shape, stage=case["stage"], dtype="float32", ranks=case["ranks"],
                                 experts_over=case["experts"])
        said = states["parameters"] + states["optimizer"]
        said += states["gradients"] + states["buckets"] if case["stage"] == 3 else 0
        speed = case["tokens"] / case["seconds"]
        case |= {"speed": speed, "estimate": said}
        print(f"| {case['ranks']} | {case['stage']} | {case['experts'] or 'all here'} | {speed:,.0f} | {speed / first:.2f} | "
              f"{case['cpu'] / case['tokens'] * 1000:.2f} | {case['waited'] / case['seconds']:.0%} | "
              f"{case['kept'] / 2**20:.1f} | {said / 2**20:.1f} |", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps({"options": options, "results": results}, indent=1))


if __name__ == "__main__":
    main()
