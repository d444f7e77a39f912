"""Ways to configure the learner that must all train alike: the factors, rows that pair every two levels, and one row run.

`scripts/config_matrix.py` runs them all on two processes, tests/mopd/learner/test_configurations.py a few.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.packing import pack
from mopd.learner.weights import named_weights
from mopd.ranks import leave
from mopd.rows import STREAMS
from tests.mopd.learner.tiny import make_model, mixed_rows
from tests.tiny_run import torchrun

DOMAINS = ("game", "science")
FACTORS = {
    "family": ("qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "mimo_v2_flash"),
    "stage": (0, 1, 2, 3),
    "experts": (0, 1, 2),  # deepspeed.autoep_size
    "dtype": ("float32", "bfloat16"),
    "batches": ("one", "several"),  # micro-batches a step on a rank
    "checkpointing": (False, True),
    "offload": ("", "optimizer", "parameters"),
    "prefix": ("full", "none"),
}
# Rows on rank 0 of 7 in each of 5 steps: once all are there, once none.
SPLITS = (2, 7, 0, 6, 4)
COUNT = 7
# Largest relative difference of loss and gradient norm from one process. bfloat16 rounds at 2^-8 in every product, and a rank
# pads and sums in another order; a MoE router may then choose another expert for a token.
TOLERANCE = {"float32": (2e-6, 1e-5), "bfloat16": (0.02, 0.15)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration; the fields are FACTORS' keys."""

    family: str
    stage: int
    experts: int
    dtype: str
    batches: str
    checkpointing: bool
    offload: str
    prefix: str

    def __str__(self) -> str:
        batches = "micro-batch" if self.batches == "one" else "micro-batches"
        words = [self.family, f"ZeRO-{self.stage}", self.dtype, f"{self.batches} {batches}"]
        words += [f"experts over {self.experts}"] * bool(self.experts) + ["checkpointing"] * self.checkpointing
        words += [f"{self.offload} offloaded"] * bool(self.offload) + ["prefixes without a graph"] * (self.prefix == "none")
        return ", ".join(words)

    def config(self) -> LearnerConfig:
        return LearnerConfig(
            learning_rate=3e-3, schedule="constant", weight_decay=0.05, gradient_clipping=0.5, zero_stage=self.stage,
            dtype=self.dtype, autoep_size=self.experts, gradient_checkpointing=self.checkpointing,
            autoep_preset="deepseek_v3" if self.experts and self.family == "mimo_v2_flash" else "",
            offload_optimizer=bool(self.offload), offload_parameters=self.offload == "parameters",
            prefix_gradient=self.prefix)


def possible(row: Row) -> bool:
    """Whether the learner takes this combination; what it refuses is in its `errors()`."""
    if row.experts and row.family == "qwen3":
        return False  # no experts to spread
    return not row.config().errors()


def covering(rows: list[Row], strength: int = 2) -> list[Row]:
    """A few of `rows` in which every combination of `strength` levels occurs that occurs in `rows` at all: always the row
    with most combinations that are still missing (a greedy cover; of equals the first)."""
    def parts(row: Row) -> set:
        return set(itertools.combinations(((name, getattr(row, name)) for name in FACTORS), strength))

    found = [(row, parts(row)) for row in rows]
    missing, chosen = set().union(*(part for _, part in found)), []
    while missing:
        best, covered = max(found, key=lambda item: len(item[1] & missing))
        chosen.append(best)
        missing -= covered
    return chosen


def every(strength: int = 2) -> list[Row]:
    """Rows with every `strength` levels that can be together."""
    return covering([row for values in itertools.product(*FACTORS.values()) if possible(row := Row(*values))], strength)


def spread_rows() -> list[Row]:
    """Experts over one rank and two, at every ZeRO stage that takes them, of two families."""
    plain = Row("qwen3_moe", 1, 1, "float32", "several", False, "", "full")
    return [dataclasses.replace(plain, family=family, stage=stage, experts=size)
            for family in ("qwen3_moe", "deepseek_v3") for stage in (1, 2, 3) for size in (1, 2)]


def weighted_cross_entropy(logits, batch):
    losses = torch.nn.functional.cross_entropy(logits, batch.label, reduction="none")
    return (losses * batch.weight).sum(), {}


def batches_of(rows, row: Row) -> list:
    found = pack(rows, token_budget=5000 if row.batches == "one" else 90, pad_id=0, domains=DOMAINS, streams=STREAMS,
                 by_domain=row.batches != "one", prefix_gradient=row.prefix)
    for batch in found:
        batch.weight = (1.0 + batch.label.float() / 10) / 50
    return found


def trained(row: Row, rank: int = 0, size: int = 1) -> dict:
    """Five steps of one configuration on this rank of `size`: {loss, norm: [5], tokens, counts, change: of the weights in
    their L2 norm, seconds}."""
    began = time.perf_counter()
    model = make_model(row.family)
    learner = Learner(model, config=row.config(), total_steps=len(SPLITS))
    start = {name: tensor.float().clone() for name, tensor in named_weights(learner)}
    found: dict = {"loss": [], "norm": [], "tokens": [], "counts": []}
    for step, split in enumerate(SPLITS):
        rows = mixed_rows(np.random.default_rng(step), COUNT)
        mine = rows if size == 1 else rows[:split] if rank == 0 else rows[split:]
        report = learner.train_step(batches_of(mine, row), weighted_cross_entropy)
        found["loss"].append(report.loss)
        found["norm"].append(report.gradient_norm)
        found["tokens"].append(report.tokens)
        found["counts"].append(report.expert_counts.tolist())
    learner.check_routers()
    found["change"] = sum(float((tensor.float() - start[name]).double().square().sum())
                          for name, tensor in named_weights(learner)) ** 0.5
    learner.close()
    return found | {"seconds": time.perf_counter() - began}


def reference_of(row: Row) -> Row:
    """The plain configuration of one process that a row is compared with."""
    return dataclasses.replace(row, stage=0, experts=0, batches="one", checkpointing=False, offload="")


def differences(one: dict, two: dict) -> tuple[float, float, float]:
    """Largest relative difference over the steps of loss, of gradient norm, and that of the weights' change."""
    def worst(name: str) -> float:
        return max(abs(a - b) / abs(a) for a, b in zip(one[name], two[name], strict=True))

    return worst("loss"), worst("norm"), abs(one["change"] - two["change"]) / one["change"]


def results_of_two(module: str, rows: list[Row], place: Path, *, timeout: float) -> dict[Row, dict]:
    """Row → what `ranks_main()` of a test module printed of it (`tell`), run by two processes."""
    done = torchrun(f"from {module} import ranks_main\nranks_main()\n", place, timeout=timeout)
    return dict(zip(rows, json.loads(done.stdout[done.stdout.index("RESULT") + 6:]), strict=True))


def tell(results: list[dict]) -> None:
    """The end of a `ranks_main`: rank 0 prints what was found, and all ranks leave together."""
    if os.environ["RANK"] == "0":
        print("RESULT" + json.dumps(results), flush=True)
    leave()


def on_ranks(rows: list[Row]) -> list[dict]:
    """Every row on this process of a job; all ranks call it."""
    from mopd.learner.engine import start_processes

    rank, size = start_processes()
    assert size == int(os.environ["WORLD_SIZE"])
    results = []
    for row in rows:
        try:
            results.append(trained(row, rank, size))
        except Exception as error:  # noqa: BLE001 - the table says which row failed, and how
            if size > 1 and not isinstance(error, ValueError):
                raise RuntimeError(f"{row}: {error}") from error
            results.append({"error": f"{type(error).__name__}: {error}"})
    return results
