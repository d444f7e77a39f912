"""One MOPD² learner step: score rows with their domains' teachers, weigh every token once, train, report.

    rows ─▶ pack ─▶ scores (teachers) ─▶ weights (global, once) ─▶ DeepSpeed step ─▶ metrics

Knows no teacher (they come as callables by domain) and no sampling. The whole loss is METHOD section 3's:
L = Σ over cells (domain, stream) of ω · agg, each cell with its own global denominator over all ranks.
"""

from __future__ import annotations

import collections
import dataclasses
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mopd.learner.engine import Learner
from mopd.learner.load import expert_load
from mopd.learner.packing import MicroBatch, pack
from mopd.learner.scores import Scorer, Scores
from mopd.learner.step_metrics import StepSums
from mopd.losses import domain_balance, make_objective, merge_moments, moments, step_weights
from mopd.losses.aggregation import Mode
from mopd.losses.objectives import label_logprob
from mopd.rows import STREAMS, Row

OWN_STREAMS = {STREAMS.index(s) for s in ("rollout", "teacher_prefix", "sft_prefix")}


class MissingScorer(ValueError):
    """Rows of a domain that no teacher scores."""


@dataclasses.dataclass
class StepConfig:
    """What a learner step optimises.

    objective, objective_options   see mopd.losses.make_objective
    aggregation     token_mean, sequence_mean, prompt_mean or turn_mean
    balance         none, fixed (with balance_weights) or normalised (DN-MOPD)
    stream_share    stream -> share, or domain -> stream -> share
    temperature     at which log-probabilities are compared (the sampling temperature)
    max_staleness   tokens sampled by weights older than this many versions are left out and counted
    token_budget    padded tokens per micro-batch
    peak_alert, cold_alert   expert load limits (METHOD section 5)
    """

    objective: str = "forward_kl"
    objective_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    aggregation: Mode = "token_mean"
    balance: str = "none"
    balance_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    stream_share: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"rollout": 1.0, "teacher_prefix": 1.0, "sft_prefix": 1.0, "demonstration": 0.0})
    temperature: float = 1.0
    max_staleness: int = 4
    token_budget: int = 2048
    peak_alert: float = 7.0
    cold_alert: float = 0.3


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """What `LearnerStep` did. `metrics` is a plain dict (JSON after `mopd.metrics.clean`); see `LearnerStep`.

    reverse_kl   domain -> mean reverse KL per token of the student's own samples: exact where the teacher gave its
                 whole distribution, else the k3 estimate (never negative)
    """

    metrics: dict[str, Any]
    reverse_kl: dict[str, float]
    skipped: bool = False

    @property
    def loss(self) -> float:
        return self.metrics["loss"]

    @property
    def seconds(self) -> dict[str, float]:
        return self.metrics["seconds"]


class LearnerStep:
    """Callable once per optimizer step. Every rank calls it with its own rows (possibly none).

    domains   all domain names in the run's order
    scorers   domain -> Scorer; one scorer may serve several domains

    metrics: loss, gradient_norm, learning_rate, step, skipped, tokens, loss_tokens, padded_tokens, micro_batches,
    seconds {training, scoring, packing}, omega {"domain/stream": ω}, balance {domain: factor}, missing {teacher:
    {reason: tokens}}, expert_load {cv, peak, cold: per layer}, alerts [sentences], domains {domain: numbers},
    streams {"domain/stream": numbers}; numbers as `CellSums.record` gives them.
    """

    def __init__(self, learner: Learner, *, domains: Sequence[str], scorers: Mapping[str, Scorer], config: StepConfig):
        self.learner, self.domains, self.scorers, self.config = learner, tuple(domains), dict(scorers), config
        options = dict(config.objective_options)
        if config.temperature != 1.0:
            options.setdefault("temperature", config.temperature)
        self.objective = make_objective(config.objective, options)
        self.temperature = float(options.get("temperature", 1.0))
        missing = [d for d in self.domains if d not in self.scorers]
        if missing:
            raise MissingScorer(f"no teacher scores {', '.join(missing)}; give every domain of the run a teacher")

    def __call__(self, rows: Sequence[Row], *, shares: Mapping[str, float], step: int | None = None) -> LearnerReport:
        """Train on `rows`; `shares` is domain -> share of the loss. A step of which no token is left over all ranks
        is skipped with a warning (METHOD section 8)."""
        config, version = self.config, self.learner.step if step is None else step
        clock = time.perf_counter()
        batches = pack(rows, token_budget=config.token_budget, pad_id=self.learner.pad_id, domains=self.domains,
                       streams=STREAMS)
        packed = time.perf_counter()
        missing = self._score(batches)
        scored = time.perf_counter()
        include, stale = self._included(batches, version)
        balance = self._balance(batches, include)
        omega = self._weigh(batches, include, shares, balance)
        seconds = {"packing": packed - clock, "scoring": scored - packed}
        if not omega:
            warnings.warn(f"step {version}: no token is left to train on, so the step is skipped "
                          f"({sum(b.loss_tokens for b in batches)} tokens here, of them stale: "
                          f"{sum(int(old.sum()) for old in stale)}; missing scores: {missing})", stacklevel=2)
            self.learner.skip_step()
            return LearnerReport({"step": version, "skipped": True, "loss": float("nan"), "missing": missing,
                                  "seconds": {**seconds, "training": 0.0}, "domains": {}, "streams": {}}, {}, True)
        report = self.learner.train_step(batches, self._loss)
        sums = StepSums()
        for batch, keep, old, detail in zip(batches, include, stale, report.details, strict=True):
            fields = {name: getattr(batch, name).numpy() for name in (
                "domain", "stream", "turn", "row", "action", "version", "behaviour_logprob", "weight")}
            loss = detail.pop("loss")
            sums.add({**fields, "loss": loss.float().cpu().numpy(), "include": keep, "stale": old}, detail,
                     version=version)
        sums, missing = self._over_ranks(sums, missing)
        seconds["training"] = time.perf_counter() - scored
        return self._report(report, sums, omega, balance, missing, seconds, version)

    # Scores

    def _score(self, batches: Sequence[MicroBatch]) -> dict[str, dict[str, int]]:
        """Put teacher scores into every micro-batch's `extra`; returns missing tokens by teacher and reason."""
        missing: dict[str, collections.Counter[str]] = {}
        for batch in batches:
            domain = self.domains[int(batch.domain[0])]
            scores = self.scorers[domain](batch, need=self.objective.needs, temperature=self.temperature)
            self._check(scores, batch, domain)
            batch.extra["teacher_logprob"] = scores.logprob
            if scores.logits is not None:
                batch.extra["teacher_logits"] = scores.logits
            if scores.missing:
                missing.setdefault(scores.teacher, collections.Counter()).update(scores.missing)
        return {teacher: dict(counts) for teacher, counts in sorted(missing.items())}

    def _check(self, scores: Scores, batch: MicroBatch, domain: str) -> None:
        if scores.logprob.shape != batch.label.shape:
            raise ValueError(f"teacher {scores.teacher!r} of {domain!r} gave {tuple(scores.logprob.shape)} scores for "
                             f"{batch.loss_tokens} tokens")
        if self.objective.needs == "full" and scores.logits is None:
            raise ValueError(f"objective {self.config.objective!r} needs the whole distribution; teacher "
                             f"{scores.teacher!r} gives the sampled token's score only. Take an in-process teacher, or "
                             "the objective 'mopd'")

    def _included(self, batches: Sequence[MicroBatch], version: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Which tokens train (scored and not stale), and which are stale, bool [N] per micro-batch."""
        include, stale = [], []
        for batch in batches:
            sampled = batch.version.numpy() >= 0
            old = sampled & (version - batch.version.numpy() > self.config.max_staleness)
            scored = torch.isfinite(batch.extra["teacher_logprob"]).cpu().numpy()
            include.append(scored & ~old)
            stale.append(old)
        return include, stale

    # Weights

    def _balance(self, batches: Sequence[MicroBatch], include: Sequence[np.ndarray]) -> dict[str, float]:
        config = self.config
        if config.balance != "normalised":
            return domain_balance(config.balance, self.domains, fixed=config.balance_weights)
        # σ needs the student's own log-probabilities of all tokens before any weight: one forward without a graph.
        student = self.learner.forward_only(
            batches, lambda logits, batch: label_logprob(logits, batch.label, self.temperature).cpu())
        parts: dict[str, list] = {d: [] for d in self.domains}
        for batch, keep, logprob in zip(batches, include, student, strict=True):
            chosen = torch.from_numpy(keep & np.isin(batch.stream.numpy(), list(OWN_STREAMS)))
            ratio = batch.extra["teacher_logprob"].cpu() - logprob
            parts[self.domains[int(batch.domain[0])]].append(moments(ratio[chosen]))
        mine = {d: merge_moments(found) for d, found in parts.items()}
        ranks = self._gather(mine)
        return domain_balance("normalised", self.domains,
                              log_ratio={d: merge_moments(rank[d] for rank in ranks) for d in self.domains})

    def _weigh(self, batches: Sequence[MicroBatch], include: Sequence[np.ndarray], shares: Mapping[str, float],
               balance: Mapping[str, float]) -> dict[tuple[str, str], float]:
        """Fill `weight` of every micro-batch from the whole step's tokens (all ranks); returns ω by cell."""
        names = ("sequence", "group", "turn", "domain", "stream")
        columns = [np.concatenate([getattr(b, name).numpy() for b in batches]) if batches else np.zeros(0, np.int64)
                   for name in names]
        columns.append(np.concatenate(include) if batches else np.zeros(0, bool))
        ranks = self._gather(columns)
        whole = [np.concatenate(parts) for parts in zip(*ranks, strict=True)]
        if not whole[-1].any():
            return {}
        weights, omega = step_weights(
            self.config.aggregation, *whole[:5], domains=self.domains, streams=STREAMS, domain_share=shares,
            stream_share=self.config.stream_share, balance=balance, include=whole[5])
        start = sum(len(rank[0]) for rank in ranks[:self.learner.rank])
        for batch in batches:
            batch.weight = torch.from_numpy(weights[start:start + batch.loss_tokens].astype(np.float32))
            start += batch.loss_tokens
        return omega

    def _loss(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        teacher = batch.extra.get("teacher_logits")
        width = logits.shape[-1] if teacher is None else min(logits.shape[-1], teacher.shape[-1])
        # Output matrices padded to other sizes: the softmax runs over the ids that both have.
        logits = logits[:, :width]
        arguments = dict(
            student_logits=logits, teacher_logits=None if teacher is None else teacher[:, :width],
            teacher_logprob=batch.extra["teacher_logprob"], label=batch.label,
            behaviour_logprob=batch.behaviour_logprob, outcome_advantage=batch.outcome_advantage)
        if getattr(self.objective, "advantage_student", "") == "snapshot":
            # One update per batch: the policy at the start of the step is the present one.
            arguments["snapshot_logprob"] = label_logprob(logits.detach(), batch.label, self.temperature)
        result = self.objective(**arguments)
        # Tokens without weight may carry anything (a missing score): select before arithmetic.
        kept = torch.where(batch.weight != 0, result.loss, 0.0)
        return (kept * batch.weight).sum(), {"loss": kept.detach(), **result.diagnostics}

    # Reports

    def _gather(self, mine: Any) -> list[Any]:
        """One value of every rank, in rank order."""
        if self.learner.world_size == 1:
            return [mine]
        found: list[Any] = [None] * self.learner.world_size
        torch.distributed.all_gather_object(found, mine)
        return found

    def _over_ranks(self, sums: StepSums, missing: dict[str, dict[str, int]]):
        if self.learner.world_size == 1:
            return sums, missing
        total, counts = StepSums(), {}
        for part, lost in self._gather((sums, missing)):
            total.merge(part)
            for teacher, reasons in lost.items():
                counts.setdefault(teacher, collections.Counter()).update(reasons)
        return total, {teacher: dict(reasons) for teacher, reasons in sorted(counts.items())}

    def _report(self, report, sums: StepSums, omega, balance, missing, seconds, version) -> LearnerReport:
        domains = {self.domains[d]: cell.record() for d, cell in sums.by_domain(own=OWN_STREAMS).items()}
        metrics: dict[str, Any] = {
            "step": version, "skipped": False, "loss": report.loss, "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate, "tokens": report.tokens, "loss_tokens": report.loss_tokens,
            "padded_tokens": report.padded_tokens, "micro_batches": report.micro_batches, "seconds": seconds,
            "omega": {f"{d}/{s}": value for (d, s), value in omega.items()}, "balance": dict(balance),
            "missing": missing, "domains": domains,
            "streams": {f"{self.domains[d]}/{STREAMS[s]}": cell.record()
                        for (d, s), cell in sorted(sums.cells.items())},
            "alerts": [],
        }
        if len(report.expert_counts):
            load = expert_load(report.expert_counts)
            metrics["expert_load"] = {name: getattr(load, name).tolist() for name in ("cv", "peak", "cold")}
            metrics["alerts"] = load_alerts(load, peak=self.config.peak_alert, cold=self.config.cold_alert)
        for teacher, reasons in missing.items():
            metrics["alerts"].append(f"teacher {teacher}: {sum(reasons.values())} tokens without a score ({reasons})")
        return LearnerReport(metrics, {d: numbers.get("reverse_kl", numbers.get("k3", float("nan")))
                                       for d, numbers in domains.items()})


def load_alerts(load, *, peak: float, cold: float) -> list[str]:
    """Sentences about layers whose load crossed a limit (METHOD section 5)."""
    said = []
    for layer, (p, c) in enumerate(zip(load.peak.tolist(), load.cold.tolist(), strict=True)):
        if p > peak:
            said.append(f"MoE layer {layer}: the busiest expert has {p:.1f} times the mean load (limit {peak:g})")
        if c > cold:
            said.append(f"MoE layer {layer}: {c:.0%} of the experts have less than a tenth of the mean load "
                        f"(limit {cold:.0%})")
    return said
