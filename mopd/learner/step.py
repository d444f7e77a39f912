"""One MOPD² learner step: score rows with their domains' teachers, weigh every token once, train, report.

    rows ─▶ pack ─▶ scores (teachers) ─▶ weights (global, once) ─▶ DeepSpeed step ─▶ metrics

Knows no teacher (they come as callables by domain) and no sampling. The whole loss is METHOD section 3's:
L = Σ over cells (domain, stream) of ω · agg, each cell with its own global denominator over all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mopd.learner.engine import Learner, StepReport
from mopd.learner.imbalance import split_alerts
from mopd.learner.load import expert_load
from mopd.learner.packing import MicroBatch, empty_micro_batch, pack
from mopd.learner.route_similarity import RouteSimilarity
from mopd.learner.router_drift import drift_alerts
from mopd.learner.scores import Scorer, Scores, what_to_ask
from mopd.learner.step_metrics import StepSums, TurnSums
from mopd.losses import aggregation_schedule, domain_balance, make_objective, merge_moments, moments, step_weights
from mopd.losses.aggregation import Mode
from mopd.losses.balance import Moments
from mopd.losses.candidates import CandidateSets
from mopd.losses.chunked import Head
from mopd.losses.objectives import (
    OBJECTIVES,
    Objective,
    ObjectiveResult,
    checked_result,
    label_logprob,
    over_candidates,
    takes_candidates,
)
from mopd.ranks import exchange
from mopd.rows import STREAMS, Row

OWN_STREAMS = {STREAMS.index(s) for s in ("rollout", "teacher_prefix", "sft_prefix")}
PREFIX_STREAMS = [STREAMS.index(s) for s in ("teacher_prefix", "sft_prefix")]


class MissingScorer(ValueError):
    """Rows of a domain that no teacher scores."""


@dataclasses.dataclass
class StepConfig:
    """What a learner step optimises.

    objective, objective_options   see mopd.losses.make_objective
    aggregation     token_mean, sequence_mean, prompt_mean or turn_mean
    aggregation_to  another of these, to which it moves linearly until the run's end (TurnOPD 2607.05804); None: it stays
    balance         none, fixed (with balance_weights) or normalised (DN-MOPD)
    stream_share    stream -> share, or domain -> stream -> share
    temperature     at which log-probabilities are compared (the sampling temperature)
    max_staleness   tokens sampled by weights older than this many versions are left out and counted
    staleness_decay   a token's weight is multiplied by this number to the power of its age in versions; 1: nothing is.
                    See `LearnerStep._aged`
    token_budget    padded tokens per micro-batch and rank
    peak_alert, cold_alert   expert load limits (METHOD section 5)
    router_drift_alert   share of a trained router's choices on fixed inputs that may differ from the start's
    routing_similarity_every   steps between two measures of how far teacher and student agree on experts; 0: none
    turn_scores     measure every prefix sample by itself (`LearnerReport.turn_scores`)
    """

    objective: str = "forward_kl"
    objective_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    aggregation: Mode = "token_mean"
    aggregation_to: str | None = None
    balance: str = "none"
    balance_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    stream_share: Mapping[str, Any] = dataclasses.field(
        default_factory=lambda: {"rollout": 1.0, "teacher_prefix": 1.0, "sft_prefix": 1.0, "demonstration": 0.0})
    temperature: float = 1.0
    max_staleness: int = 4
    staleness_decay: float = 1.0
    token_budget: int = 2048
    peak_alert: float = 7.0
    cold_alert: float = 0.3
    router_drift_alert: float = 0.2
    routing_similarity_every: int = 0
    turn_scores: bool = False


@dataclasses.dataclass(frozen=True)
class LearnerReport:
    """What `LearnerStep` did. `metrics` is a plain dict (JSON after `mopd.metrics.clean`); see `LearnerStep`.

    reverse_kl   domain -> mean reverse KL per token of the student's own samples: exact where the teacher gave its
                 whole distribution, else the k3 estimate (never negative)
    turn_scores  (group, turn) -> what was measured there, of all ranks' prefix streams (see TurnSums.scores); empty
                 unless the config asks for it
    """

    metrics: dict[str, Any]
    reverse_kl: dict[str, float]
    skipped: bool = False
    turn_scores: dict[tuple[int, int], dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def loss(self) -> float:
        return self.metrics["loss"]

    @property
    def seconds(self) -> dict[str, float]:
        return self.metrics["seconds"]


def _on_tokens(objective: Objective, name: str, arguments: dict[str, Any], chosen: torch.Tensor) -> ObjectiveResult:
    """The objective on the chosen tokens (bool [n]) alone; the others get loss 0, no gradient, and NaN or False as
    diagnostics."""
    places = (chosen.nonzero()[:, 0],)
    result = checked_result(objective(**{n: None if value is None else value[places] for n, value in arguments.items()}),
                            name, len(places[0]))

    def spread(values: torch.Tensor, rest: float) -> torch.Tensor:
        return values.new_full((len(chosen), *values.shape[1:]), rest).index_put(places, values)

    found = {n: spread(v, math.nan if v.is_floating_point() else 0) for n, v in result.diagnostics.items()}
    return ObjectiveResult(spread(result.loss, 0.0), found | {"unscored": ~chosen})


class LearnerStep:
    """Callable once per optimizer step. Every rank calls it with its own rows (possibly none); the ranks of a group of
    sequence_parallel_size with the same.

    domains   all domain names in the run's order
    scorers   domain -> Scorer; one scorer may serve several domains

    metrics: loss, gradient_norm, learning_rate, step, skipped, tokens, loss_tokens, padded_tokens, micro_batches,
    seconds {training, scoring, packing}, aggregation {mode: share}, omega {"domain/stream": ω}, balance {domain: factor},
    missing {teacher: {reason: tokens}}, expert_load {cv, peak, cold: per layer; drift, split, replay, similarity},
    alerts [sentences], domains {domain: numbers}, streams {"domain/stream": numbers}; numbers as `CellSums.record` gives
    them.
    """

    def __init__(self, learner: Learner, *, domains: Sequence[str], scorers: Mapping[str, Scorer], config: StepConfig):
        self.learner, self.domains, self.scorers, self.config = learner, tuple(domains), dict(scorers), config
        options = dict(config.objective_options)
        if config.temperature != 1.0:
            options.setdefault("temperature", config.temperature)
        self.objective = make_objective(config.objective, options)
        self.temperature = float(options.get("temperature", 1.0))
        self.top_k = int(getattr(self.objective, "top_k", 0))  # see mopd.losses.objectives.Objective
        self.similarity = RouteSimilarity(learner, self.scorers, config.routing_similarity_every)
        self._not_finite: dict[str, Any] = {}  # tokens of this step whose loss is not, by domain
        self._heads: dict[str, Head] = {}  # of the teachers that answer with hidden states, by domain
        missing = [d for d in self.domains if d not in self.scorers]
        if missing:
            raise MissingScorer(f"no teacher scores {', '.join(missing)}; give every domain of the run a teacher")

    @property
    def asks_top_k(self) -> bool:
        """Whether some teacher of the run is asked for its likeliest ids."""
        return any(what_to_ask(getattr(scorer, "gives", ()), self.objective.needs, self.top_k)[1]
                   for scorer in self.scorers.values())

    def __call__(self, rows: Sequence[Row], *, shares: Mapping[str, float], step: int | None = None) -> LearnerReport:
        """Train on `rows`; `shares` is domain -> share of the loss. A step of which no token is left over all ranks
        is skipped with a warning (METHOD section 8)."""
        config, version = self.config, self.learner.step if step is None else step
        clock = time.perf_counter()
        sequence = self.learner.sequence
        batches = pack(rows, token_budget=config.token_budget * (1 if sequence is None else sequence.size),
                       pad_id=self.learner.pad_id, domains=self.domains, streams=STREAMS,
                       prefix_gradient=self.learner.config.prefix_gradient)
        if sequence is not None:
            batches = [sequence.mine(batch) for batch in batches]
        packed = time.perf_counter()
        missing = self._score(batches, version)
        scored = time.perf_counter()
        similar = self.similarity.measure(batches, self.domains) if self.similarity.due(version) else None
        include, stale = self._included(batches, version)
        balance = self._balance(batches, include)
        mode = self._aggregation(version)
        omega = self._weigh(batches, include, shares, balance, mode, version)
        seconds = {"packing": packed - clock, "scoring": scored - packed}
        if not omega:
            warnings.warn(f"step {version}: no token is left to train on, so the step is skipped "
                          f"({sum(b.loss_tokens for b in batches)} tokens here, of them stale: "
                          f"{sum(int(old.sum()) for old in stale)}; missing scores: {missing})", stacklevel=2)
            self.learner.skip_step()
            self._release()
            return LearnerReport({"step": version, "skipped": True, "loss": float("nan"), "missing": missing,
                                  "seconds": {**seconds, "training": 0.0}, "domains": {}, "streams": {}}, {}, True)
        report = self._train(batches)
        self._release()
        sums, turns = StepSums(), TurnSums() if config.turn_scores else None
        for batch, keep, old, detail in zip(batches, include, stale, report.details, strict=True):
            if not batch.loss_tokens:
                continue  # the other ranks of its group have them all
            fields = {name: getattr(batch, name).numpy() for name in (
                "domain", "stream", "turn", "row", "action", "version", "behaviour_logprob", "weight")}
            if "begins" in batch.extra:
                fields["begins"] = batch.extra["begins"].numpy()
            if batch.candidates is not None:
                fields["candidates"] = batch.candidates.counts.numpy()
            loss = detail.pop("loss")
            sums.add({**fields, "loss": loss.float().cpu().numpy(), "include": keep, "stale": old}, detail,
                     version=version)
            if turns is not None:
                turns.add({name: getattr(batch, name).numpy() for name in ("group", "turn", "sequence")}, detail,
                          keep & np.isin(fields["stream"], PREFIX_STREAMS))
        sums, missing = self._over_ranks(sums, missing)
        seconds["training"] = time.perf_counter() - scored
        done = self._report(report, sums, omega, balance, missing, seconds, version)
        done.metrics["aggregation"] = {mode: 1.0} if isinstance(mode, str) else dict(mode)
        if similar is not None:
            done.metrics["expert_load"]["similarity"] = self.similarity.record(self._gather(similar))
        return done if turns is None else dataclasses.replace(done, turn_scores=self._turn_scores(turns))

    # Scores

    def _score(self, batches: Sequence[MicroBatch], version: int) -> dict[str, dict[str, int]]:
        """Put teacher scores into every micro-batch's `extra`; returns missing tokens by teacher and reason."""
        noting = self.similarity.noting if self.similarity.due(version) else lambda *_: contextlib.nullcontext()
        missing: dict[str, collections.Counter[str]] = {}
        for scorer, batch in self._calls(batches):
            need, k = what_to_ask(getattr(scorer, "gives", ()), self.objective.needs, self.top_k)
            with noting(scorer, batch):
                scores = scorer(batch, need=need, temperature=self.temperature, **({"k": k} if k else {}))
            if not batch.loss_tokens:
                continue  # only other ranks' work
            domain = self.domains[int(batch.domain[0])]
            batch.extra["teacher_scored"] = scores.scored()
            self._check(scores, batch, domain)
            if batch.candidates is not None and not scores.over_candidates:
                scores.logprob = None  # of another distribution than µ's; logits or hidden states say the right one
            for name in ("logprob", "logits", "hidden", "top_ids", "top_logprob"):
                if (value := getattr(scores, name)) is not None:
                    batch.extra[f"teacher_{name}"] = value
            if scores.head is not None:
                self._heads[domain] = self._heads.get(domain) or scores.head.to(self.learner.device)
            if scores.missing:
                missing.setdefault(scores.teacher, collections.Counter()).update(scores.missing)
        for scorer in dict.fromkeys(self.scorers.values()):
            getattr(scorer, "rest", lambda: None)()  # a teacher may leave the device while the student trains
        return {teacher: dict(counts) for teacher, counts in sorted(missing.items())}

    def _calls(self, batches: Sequence[MicroBatch]) -> list[tuple[Scorer, MicroBatch]]:
        """Which scorer is called with which micro-batch, in order: one scorer after the other. A scorer whose calls are
        collective gets empty micro-batches up to the largest number of any rank."""
        calls: dict[Scorer, list[MicroBatch]] = {scorer: [] for scorer in self.scorers.values()}
        for batch in (batch for batch in batches if batch.loss_tokens):
            calls[self.scorers[self.domains[int(batch.domain[0])]]].append(batch)
        together = [parts for scorer, parts in calls.items() if getattr(scorer, "collective", False)]
        if together:
            for parts, *counts in zip(together, *self._gather([len(parts) for parts in together]), strict=True):
                parts += [empty_micro_batch(self.learner.pad_id, self.learner.config.prefix_gradient)
                          for _ in range(max(counts) - len(parts))]
        return [(scorer, batch) for scorer, parts in calls.items() for batch in parts]

    def _release(self) -> None:
        """Let go of the output heads of teachers that are split over ranks: they are gathered anew in the next step."""
        for domain, scorer in self.scorers.items():
            if getattr(scorer, "collective", False):
                self._heads.pop(domain, None)

    def _check(self, scores: Scores, batch: MicroBatch, domain: str) -> None:
        given = scores.hidden if scores.logprob is None else scores.logprob
        if len(given) != batch.loss_tokens:
            raise ValueError(f"teacher {scores.teacher!r} of {domain!r} gave {len(given)} scores for "
                             f"{batch.loss_tokens} tokens")
        whole = scores.logits is not None or (scores.hidden is not None and scores.head is not None)
        if self.objective.needs == "full" and not whole and not (self.top_k and scores.top_logprob is not None):
            raise ValueError(f"objective {self.config.objective!r} needs the whole distribution; teacher "
                             f"{scores.teacher!r} gives the sampled token's score only. Take an in-process teacher, or "
                             "the objective 'mopd'")
        if batch.candidates is None:
            return
        if not scores.over_candidates and scores.logits is None and scores.hidden is None:
            raise ValueError(f"teacher {scores.teacher!r} of {domain!r} scores tokens over all ids, but they were sampled "
                             "under top-p or top-k: its scores cannot be renormalised over the candidate sets. Take a "
                             "teacher in this process, or train.top_p=1 and train.top_k=0")
        if self.objective.needs == "sampled" and not takes_candidates(self.objective):
            raise ValueError(f"objective {self.config.objective!r} takes no `candidates`, but its tokens were sampled under "
                             "top-p or top-k; give its __call__ that parameter, or take train.top_p=1 and train.top_k=0")

    def _included(self, batches: Sequence[MicroBatch], version: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Which tokens train (scored and not stale), and which are stale, bool [N] per micro-batch."""
        include, stale = [], []
        for batch in batches:
            sampled = batch.version.numpy() >= 0
            old = sampled & (version - batch.version.numpy() > self.config.max_staleness)
            scored = batch.extra["teacher_scored"].cpu().numpy() if batch.loss_tokens else np.zeros(0, bool)
            include.append(scored & ~old)
            stale.append(old)
        return include, stale

    # Weights

    def _balance(self, batches: Sequence[MicroBatch], include: Sequence[np.ndarray]) -> dict[str, float]:
        config = self.config
        if config.balance != "normalised":
            return domain_balance(config.balance, self.domains, fixed=config.balance_weights)
        # σ needs the log-probabilities of all tokens before any weight: one forward without a graph.
        ratios = self.learner.forward_only(batches, self._log_ratio, split=True)
        parts: dict[str, list] = {d: [] for d in self.domains}
        for batch, keep, ratio in zip(batches, include, ratios, strict=True):
            if ratio is None:
                continue
            # What the objective's own mask leaves out, and what is not finite (no loss either), does not count.
            chosen = torch.from_numpy(keep & np.isin(batch.stream.numpy(), list(OWN_STREAMS))) & torch.isfinite(ratio)
            parts[self.domains[int(batch.domain[0])]].append(moments(ratio[chosen]))
        mine = {d: dataclasses.astuple(merge_moments(found)) for d, found in parts.items()}
        ranks = self._gather(mine)
        return domain_balance("normalised", self.domains,
                              log_ratio={d: merge_moments(Moments(*rank[d]) for rank in ranks) for d in self.domains})

    def _log_ratio(self, logits: torch.Tensor, batch: MicroBatch) -> torch.Tensor:
        """log π_T − log π_θ of the labels, [n] on the CPU; NaN where the objective's own mask leaves a token out."""
        logits, teacher_logits, candidates = self._compared(logits, batch)
        teacher = batch.extra.get("teacher_logprob")
        if teacher is None:
            teacher = label_logprob(teacher_logits, batch.label, self.temperature, candidates)
        student = label_logprob(logits, batch.label, self.temperature, candidates)
        if hasattr(self.objective, "leaves_out"):
            teacher = teacher.masked_fill(self.objective.leaves_out(student, batch.behaviour_logprob), math.nan)
        return (teacher - student).cpu()

    def _aggregation(self, version: int) -> Mode:
        """The aggregation at this step, {mode: share} where it moves: by steps, or by `learner.spent`, the share of the
        run's token budget, where that is further on (as the learning rate does)."""
        config = self.config
        if config.aggregation_to is None:
            return config.aggregation
        done = max(version / self.learner.total_steps, self.learner.spent)
        return aggregation_schedule(config.aggregation, config.aggregation_to, done, 1)

    def _aged(self, batch: MicroBatch, version: int) -> np.ndarray:
        """staleness_decay ** (trainer version − token version) of the loss tokens, [N]; 1 where no student sampled.

        The factor comes after the denominators, like the w_t of METHOD section 3: an old token counts less without others
        counting more, so a fresh token's gradient does not depend on how old its neighbours are, and a batch that is old
        throughout makes a smaller step (within the denominators a common factor would cancel and do nothing). The price
        is that cells with older tokens lose some of their share ω; what each kept is the `weight` of its stream.
        """
        made = batch.version.numpy()
        age = np.where(made >= 0, np.maximum(version - made, 0), 0)
        return np.power(float(self.config.staleness_decay), age)

    def _weigh(self, batches: Sequence[MicroBatch], include: Sequence[np.ndarray], shares: Mapping[str, float],
               balance: Mapping[str, float], mode: Mode, version: int) -> dict[tuple[str, str], float]:
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
            mode, *whole[:5], domains=self.domains, streams=STREAMS, domain_share=shares,
            stream_share=self.config.stream_share, balance=balance, include=whole[5])
        start = sum(len(rank[0]) for rank in ranks[:self.learner.rank])
        for batch in batches:
            mine = weights[start:start + batch.loss_tokens] * self._aged(batch, version)
            batch.weight = torch.from_numpy(mine.astype(np.float32))
            start += batch.loss_tokens
        return omega

    def _teacher_logits(self, batch: MicroBatch) -> torch.Tensor | None:
        """[n, V] as given, or made here from hidden states and the teacher's head; None where there are none."""
        hidden = batch.extra.get("teacher_hidden")
        if hidden is None:
            return batch.extra.get("teacher_logits")
        return self._heads[self.domains[int(batch.domain[0])]].logits(hidden)

    def _compared(self, logits: torch.Tensor, batch: MicroBatch
                  ) -> tuple[torch.Tensor, torch.Tensor | None, CandidateSets | None]:
        """Logits of student and teacher, and the candidate sets, over the ids that both have: output matrices may be padded
        to other sizes."""
        teacher, candidates = self._teacher_logits(batch), batch.candidates
        width = logits.shape[-1] if teacher is None else min(logits.shape[-1], teacher.shape[-1])
        if candidates is not None and width < logits.shape[-1]:
            candidates = candidates.below(width)
        return logits[:, :width], None if teacher is None else teacher[:, :width], candidates

    def _loss(self, logits: torch.Tensor, batch: MicroBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The weighted loss of a chunk of tokens, and what the objective says of each of them."""
        logits, teacher, candidates = self._compared(logits, batch)
        arguments = dict(
            student_logits=logits, teacher_logits=teacher,
            teacher_logprob=batch.extra.get("teacher_logprob"), label=batch.label,
            behaviour_logprob=batch.behaviour_logprob, outcome_advantage=batch.outcome_advantage)
        if getattr(self.objective, "advantage_student", "") == "snapshot":
            # One update per batch: the policy at the start of the step is the present one.
            arguments["snapshot_logprob"] = label_logprob(logits.detach(), batch.label, self.temperature, candidates)
        unaware = candidates is not None and not takes_candidates(self.objective)
        if candidates is not None and not unaware:
            arguments["candidates"] = candidates
        if "teacher_top_logprob" in batch.extra:
            arguments |= {name: batch.extra[name] for name in ("teacher_top_ids", "teacher_top_logprob")}
        scored = batch.extra["teacher_scored"]
        name = self.config.objective
        if name in OBJECTIVES or bool(scored.all()):
            result = checked_result(self.objective(**arguments), name, len(logits))
        else:  # an objective of the user's own need not know of missing scores: it is not shown them
            result = _on_tokens(self.objective, name, arguments, scored)
        if unaware:  # the gauges compare with µ whatever the objective does
            result = ObjectiveResult(result.loss, over_candidates(
                dict(result.diagnostics), logits, teacher, arguments["teacher_logprob"], batch.label, self.temperature,
                candidates))
        # Tokens without weight may carry anything (a missing score): select before arithmetic.
        kept = torch.where(batch.weight != 0, result.loss, 0.0)
        lost = (~torch.isfinite(kept.detach())).sum()
        domain = self.domains[int(batch.domain[0])]
        self._not_finite[domain] = self._not_finite.get(domain, 0) + lost
        return (kept * batch.weight).sum(), {**result.diagnostics, "loss": kept.detach()}

    def _train(self, batches: Sequence[MicroBatch]) -> StepReport:
        """The learner's step; where the loss is not finite, the error says whose tokens gave it on this rank."""
        self._not_finite = {}
        try:
            return self.learner.train_step(batches, self._loss)
        except FloatingPointError as error:
            found = {domain: int(count) for domain, count in self._not_finite.items() if int(count)}
            if not found:
                raise
            said = ", ".join(f"{count} tokens of {domain}" for domain, count in found.items())
            raise FloatingPointError(f"{error}. {self.config.objective} gave losses that are not finite for {said}"
                                     ) from error

    # Reports

    def _gather(self, mine: Any) -> list[Any]:
        """One value of every rank, in rank order; values as `mopd.encoding.encode` takes them."""
        return exchange(mine, self.learner.world_size, device=self.learner.device)

    def _turn_scores(self, mine: TurnSums) -> dict[tuple[int, int], dict[str, float]]:
        total = TurnSums()
        for part in self._gather(mine.plain()):
            total.merge(TurnSums.of(part))
        return total.scores()

    def _over_ranks(self, sums: StepSums, missing: dict[str, dict[str, int]]):
        if self.learner.world_size == 1:
            return sums, missing
        total, counts = StepSums(), {}
        for part, lost in self._gather((sums.plain(), missing)):
            total.merge(StepSums.of(part))
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
        if report.router_drift is not None:
            metrics["expert_load"]["drift"] = dataclasses.asdict(report.router_drift)
            metrics["alerts"] += drift_alerts(report.router_drift, self.config.router_drift_alert)
        if report.replayed is not None:
            metrics["expert_load"]["replay"] = report.replayed.record()
        if report.splits is not None:
            metrics["expert_load"]["split"] = dataclasses.asdict(report.splits)
            metrics["alerts"] += split_alerts(report.splits, self.learner.config.split_on_imbalance)
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
