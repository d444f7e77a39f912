"""Supervised next-token training through the same learner: base pre-training, SFT teachers, the off-policy baseline.

Knows rows and cross-entropy; nothing of teachers or sampling. What is trained is what the rows mark as actions: all
tokens of a text (`row_of_text`) or the action segments of a trajectory (`row_of_sequence`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

from mopd.learner.best import Evaluation, Evaluations
from mopd.learner.checkpoint import load_checkpoint, save_checkpoint, sound
from mopd.learner.engine import Learner, LearnerConfig, StepReport
from mopd.learner.packing import MicroBatch, pack, row_cost, spread
from mopd.ranks import exchange
from mopd.rows import Action, Row
from prefix_store.trajectory import Sequence as Trajectory

STREAM = "demonstration"


@dataclasses.dataclass
class SupervisedConfig:
    """One supervised run.

    steps          optimizer steps; 0 takes `epochs` passes over the rows
    batch_rows     rows per optimizer step, over all ranks
    mixture        domain -> share of each batch's rows; empty: all rows in one pool
    token_budget   padded tokens per micro-batch
    save_every     steps between checkpoints (0: none)
    evaluate_every steps between calls of the evaluation callback (0: only at the end)
    patience       evaluations without a new best after which the run ends (0: it never does)
    """

    steps: int = 0
    epochs: float = 1.0
    batch_rows: int = 32
    mixture: dict[str, float] = dataclasses.field(default_factory=dict)
    token_budget: int = 2048
    seed: int = 0
    save_every: int = 0
    evaluate_every: int = 0
    patience: int = 0
    learner: LearnerConfig = dataclasses.field(default_factory=LearnerConfig)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is: after `step` of `total` steps; `loss` is the step's mean cross-entropy in nats per token, `report`
    what the learner said about the step, `evaluation` what an evaluation after it found, if there was one."""

    step: int
    total: int
    loss: float
    seconds_left: float
    tokens_per_second: float
    report: StepReport
    evaluation: Evaluation | None = None


@dataclasses.dataclass(frozen=True)
class SupervisedResult:
    """losses [steps] in nats per token, seconds, trained (loss) tokens and computed tokens of this call; `first_step`
    is where it started (after a resume) and `steps` how many were made in all; `evaluations` [(step, Evaluation)] are
    those of the whole run, and `best` the one whose weights the model has now, None without any; `stopped_early`: no new
    best came for `patience` evaluations."""

    losses: list[float]
    seconds: float
    loss_tokens: int
    tokens: int
    first_step: int
    steps: int
    evaluations: list[tuple[int, Evaluation]]
    expert_counts: torch.Tensor
    best: tuple[int, Evaluation] | None = None
    stopped_early: bool = False


def row_of_text(tokens: np.ndarray, *, domain: str, origin: str = "") -> Row:
    """All tokens but the first are trained (pre-training)."""
    tokens = np.asarray(tokens, dtype=np.uint32)
    if len(tokens) < 2:
        raise ValueError(f"text {origin or '(no origin)'} has {len(tokens)} tokens; next-token training needs two")
    return Row(domain, STREAM, tokens, (_action(tokens, 1, len(tokens), 0),), origin)


def rows_of_sequence(sequence: Trajectory, *, all_tokens: bool = False, origin: str = "",
                     max_tokens: int | None = None) -> list[Row]:
    """One row per context of a trajectory, with its own actions trained (or all its tokens). Tokens that a child
    context shares with its parent are trained once, in the parent. Actions that end behind `max_tokens` are left
    out; a context without any action left gives no row."""
    rows = []
    for number, context in enumerate(sequence.contexts):
        tokens = np.asarray(context.tokens, dtype=np.uint32)
        name = f"{origin}[{number}]" if len(sequence.contexts) > 1 else origin
        limit = len(tokens) if max_tokens is None else min(max_tokens, len(tokens))
        if all_tokens:
            start = max(1, context.fork)
            if limit > start:
                rows.append(Row(sequence.domain, STREAM, tokens[:limit], (_action(tokens, start, limit, 0),), name))
            continue
        actions = tuple(_action(tokens, s.start, s.end, s.turn) for s in context.actions()
                        if s.start >= max(1, context.fork) and s.end <= limit)
        if actions:
            rows.append(Row(sequence.domain, STREAM, tokens[:limit], actions, name))
    return rows


def _action(tokens: np.ndarray, start: int, end: int, turn: int) -> Action:
    n = end - start
    return Action(at=start, tokens=tokens[start:end], behaviour_logprob=np.full(n, np.nan, np.float32),
                  version=np.full(n, -1, np.int32), branch=False, turn=turn, sequence=0, group=0)


class BatchPlan:
    """Which rows a step trains on: a pure function of (rows, config, step).

    Each pool (a domain of the mixture, or all rows) is walked through in a fresh seeded order per epoch. With a
    mixture, batches hold shares by cumulative rounding, so that the totals are right after any number of steps.
    """

    def __init__(self, rows: Sequence[Row], config: SupervisedConfig):
        if not rows:
            raise ValueError("there are no rows to train on")
        if config.batch_rows < 1:
            raise ValueError(f"batch_rows must be positive, got {config.batch_rows}")
        self.config = config
        domains = sorted({row.domain for row in rows})
        if config.mixture:
            missing = [d for d, share in config.mixture.items() if share > 0 and d not in domains]
            if missing:
                raise ValueError(f"the mixture names {missing}, but there are rows only for {domains}")
            total = sum(config.mixture.values())
            names = [d for d in sorted(config.mixture) if config.mixture[d] > 0]
            self.shares = [config.mixture[d] / total for d in names]
            self.pools = [[i for i, row in enumerate(rows) if row.domain == d] for d in names]
        else:
            self.shares, self.pools = [1.0], [list(range(len(rows)))]
        covered = sum(len(pool) for pool in self.pools)
        self.steps = config.steps or max(1, int(np.ceil(config.epochs * covered / config.batch_rows)))
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def rows_at(self, step: int) -> list[int]:
        """Row numbers of a step, in an order that does not depend on anything else."""
        size, chosen = self.config.batch_rows, []
        edges = np.concatenate([[0.0], np.cumsum(self.shares)])
        edges[-1] = 1.0
        for pool, members in enumerate(self.pools):
            drawn, until = self._drawn(step, edges, pool), self._drawn(step + 1, edges, pool)
            chosen += [members[self._order(pool, k // len(members))[k % len(members)]] for k in range(drawn, until)]
        assert len(chosen) == size
        return chosen

    def _drawn(self, steps: int, edges: np.ndarray, pool: int) -> int:
        total = steps * self.config.batch_rows
        return int(np.floor(total * edges[pool + 1] + 1e-9)) - int(np.floor(total * edges[pool] + 1e-9))

    def _order(self, pool: int, epoch: int) -> np.ndarray:
        key = (pool, epoch)
        if key not in self._orders:
            if len(self._orders) > 4 * len(self.pools):
                self._orders.clear()
            generator = np.random.default_rng([self.config.seed, pool, epoch])
            self._orders[key] = generator.permutation(len(self.pools[pool]))
        return self._orders[key]


def cross_entropy(logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Sum over loss tokens of weight · (−log p(label)), from logits float32 [N, V]."""
    losses = torch.nn.functional.cross_entropy(logits, batch.label, reduction="none")
    return (losses * batch.weight).sum(), {}


def train_supervised(
    model: nn.Module, rows: Sequence[Row], config: SupervisedConfig, *, pad_id: int,
    progress: Callable[[Progress], None] | None = None,
    evaluate: Callable[[int], Evaluation] | None = None,
    checkpoint_folder: str | Path | None = None,
) -> SupervisedResult:
    """Train `model` in place with mean next-token cross-entropy over each step's loss tokens.

    rows             what to train; several transcripts share a micro-batch
    progress         called after every step on rank 0
    evaluate         called with the step number every `evaluate_every` steps and at the end, on rank 0. With it the model
                     ends with the weights of its best evaluation
    checkpoint_folder  where to save every `save_every` steps and after every evaluation, and to go on from when something
                     is there: the result is that of the uninterrupted run
    """
    plan = BatchPlan(rows, config)
    total = plan.steps
    domains = sorted({row.domain for row in rows})
    learner = Learner(model, config=config.learner, total_steps=total, pad_id=pad_id)
    try:
        kept = Evaluations(model, None if checkpoint_folder is None else Path(checkpoint_folder) / "best",
                           patience=config.patience, writes=learner.rank == 0)
        if checkpoint_folder is not None and (found := sound(checkpoint_folder, quiet=learner.rank != 0)):
            kept.load(load_checkpoint(learner, found).get("evaluations", []))
        first = learner.step
        losses, tokens, loss_tokens = [], 0, 0
        counts = torch.zeros_like(learner.expert_loads.counts)
        started = time.perf_counter()
        while learner.step < total:
            numbers = plan.rows_at(learner.step)
            shares_of_ranks = spread([row_cost(rows[i]) for i in numbers], learner.world_size)
            mine = [rows[numbers[k]] for k in shares_of_ranks[learner.rank]]
            batches = pack(mine, token_budget=config.token_budget, pad_id=pad_id, domains=domains, streams=(STREAM,),
                           by_domain=False)
            share = 1.0 / sum(rows[i].loss_tokens for i in numbers)
            for batch in batches:
                batch.weight.fill_(share)
            report = learner.train_step(batches, cross_entropy)
            losses.append(report.loss)
            tokens += report.tokens
            loss_tokens += report.loss_tokens
            counts += report.expert_counts
            done = learner.step
            evaluation = None
            if evaluate is not None and (
                    done == total or (config.evaluate_every and done % config.evaluate_every == 0)):
                evaluation = _evaluate(learner, evaluate)
                kept.add(done, evaluation)
                torch.distributed.barrier()  # the best weights are on disk for every rank
            ends = done == total or kept.over
            if progress is not None and learner.rank == 0:
                spent = time.perf_counter() - started
                each = spent / (done - first)
                progress(Progress(done, total, report.loss, each * (total - done), tokens / spent, report, evaluation))
            if ends:
                break
            # After the callback, so that what it writes down is never behind a checkpoint.
            if checkpoint_folder is not None and (
                    evaluation is not None or (config.save_every and done % config.save_every == 0)):
                save_checkpoint(learner, checkpoint_folder, {"evaluations": kept.state()})
                kept.tidy()
        learner.check_routers()
        seconds, steps = time.perf_counter() - started, learner.step
    finally:
        learner.close()
        model.eval()
    kept.restore(model)
    return SupervisedResult(losses, seconds, loss_tokens, tokens, first, steps, kept.history, counts, kept.best, kept.over)


def _evaluate(learner: Learner, evaluate: Callable[[int], Evaluation]) -> Evaluation:
    """The evaluation of the learner's present weights: rank 0 makes it, every rank is told."""
    learner.model.eval()
    found = evaluate(learner.step) if learner.rank == 0 else None
    if learner.world_size == 1:
        return found
    mine = None if found is None else (tuple(found.rank), found.record)
    return Evaluation(*exchange(mine, learner.world_size, device=learner.device)[0])


def mean_cross_entropy(model: nn.Module, rows: Sequence[Row], *, pad_id: int,
                       token_budget: int = 2048) -> dict[str, float]:
    """Held-out cross-entropy in nats per loss token by domain, of a model outside any learner."""
    from mopd.learner.forward import PackedLM

    domains = sorted({row.domain for row in rows})
    batches = pack(rows, token_budget=token_budget, pad_id=pad_id, domains=domains, streams=(STREAM,))
    sums, counts = dict.fromkeys(domains, 0.0), dict.fromkeys(domains, 0)
    device = next(model.parameters()).device
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            batch = batch.to(device)
            losses = PackedLM(model).per_token(batch, lambda logits, part: torch.nn.functional.cross_entropy(
                logits, part.label, reduction="none"))
            domain = domains[int(batch.domain[0])]
            sums[domain] += float(losses.double().sum())
            counts[domain] += batch.loss_tokens
    model.train(was_training)
    return {d: sums[d] / counts[d] for d in domains}
