"""How far teachers are from the student's start: the reverse KL per token on the student's own samples.

A teacher that was made from the student's own start is near it; one of another origin is not, and on-policy distillation from
it may fail: in the MOPD paper (arXiv 2606.30406) a teacher at a reverse KL of 0.19 made a run collapse, where teachers of the
student's own origin stood at 0.04.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from torch import nn

from mopd.config import Config
from mopd.learner.forward import PackedLM
from mopd.learner.packing import MicroBatch, pack
from mopd.rows import Row
from mopd.sampling.base import SamplingEngine, SamplingOptions
from mopd.sampling.fresh_turn import FreshTurnPoint, sample_fresh_turns
from mopd.sampling.rendering import ChatRenderer
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.trajectory import Sequence as Trajectory
from prefix_store.trajectory import decision_points_of, prefix_of
from teachers.demonstrations import gather_demonstrations
from teachers.registry import model_revision

STREAM = "teacher_prefix"


@dataclasses.dataclass(frozen=True)
class Distance:
    """Reverse KL of the student's start to one teacher in one domain, in nats per token.

    kl          Σ over tokens / their number; exact in the vocabulary, or ("sampled") the mean of log p − log q of the sampled
                tokens, which is unbiased and noisier. NaN where nothing could be measured, and then `note` says why
    low, high   its 95% interval, turns being the independent units (linearised variance of a ratio, Cochran, Sampling
                Techniques, 1977, ch. 6)
    tokens      scored, of `turns` turns; `unscored` are those without a usable score
    where       what the student answered to
    threshold   above which the teacher counts as far
    own         whether the teacher's manifest says that it was made from this very start
    """

    domain: str
    teacher: str
    kl: float
    low: float
    high: float
    tokens: int
    turns: int
    unscored: int
    estimator: str
    where: str
    threshold: float
    note: str = ""
    own: bool = False

    @property
    def far(self) -> bool:
        return self.kl > self.threshold

    def as_json(self) -> dict[str, Any]:
        """JSON values; a number that is not there is None."""
        plain = dataclasses.asdict(self) | {"far": self.far}
        return {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in plain.items()}

    def __str__(self) -> str:
        if self.note:
            return f"{self.domain}: teacher {self.teacher}: not measured, {self.note}"
        lost = f" ({self.unscored} more have no score)" if self.unscored else ""
        return (f"{self.domain}: teacher {self.teacher}: reverse KL {self.kl:.4f} [{self.low:.4f}, {self.high:.4f}] nats per "
                f"token on {self.tokens} tokens{lost} of {self.turns} turns of the student's start {self.where}")

    @property
    def warning(self) -> str:
        """What to say of a teacher that is far, "" of one that is not."""
        if not self.far:
            return ""
        said = (f"domain {self.domain}: teacher {self.teacher} is far from the student's start: reverse KL {self.kl:.3f} is "
                f"above consistency.threshold={self.threshold:g}. ")
        origin = ("It was made from this very start, so this is what it has learnt" if self.own else
                  "Teachers of another origin have made runs collapse (0.19 against 0.04, arXiv 2606.30406); train it from "
                  "the student's own start (`mopd teacher sft`) if you can")
        return (f"{said}{origin}. Watch entropy and reverse KL of the first steps; where they go well, set "
                "consistency.threshold above what your own teachers measure, so that only a worse one is warned of")


def measure_distances(config: Config, domains: Sequence[str], student: nn.Module, engine: SamplingEngine,
                      scorers: Mapping[str, Any], renderer: ChatRenderer, store: PrefixStore | None, *,
                      points: int | None = None, demonstrations: bool = True) -> list[Distance]:
    """The distance of every teacher of `domains` (those of a mixture each for itself).

    student, engine  the student's start, and an engine that samples from it, at `train.temperature`
    scorers          domain → TeacherScorer
    store            where the prefixes come from; where it has none of a domain, `sft.files` or `sft.experts`
    points           decision points per domain, by default `consistency.points`
    demonstrations   False: only a store is looked at
    The same config and weights give the same numbers. Raises what engine, scorers and demonstrations raise.
    """
    wanted = points or config.consistency.points or 32
    found: list[Distance] = []
    for name in domains:
        chosen, where = _points(config, name, renderer, store, wanted, demonstrations)
        scorer = scorers[name]
        members = getattr(scorer, "members", (scorer,))
        split = [m for m in members if getattr(m, "collective", False)]
        found += [Distance(name, m.teacher, *[math.nan] * 3, 0, 0, 0, "", "", config.consistency.threshold, "its weights are "
                           "split over ranks; `mopd teacher compare` on one process loads it whole") for m in split]
        if not (members := [m for m in members if m not in split]):
            continue
        if not chosen:
            nothing = "there is no stored prefix of this domain, and neither sft.files nor sft.experts names demonstrations"
            found += [Distance(name, m.teacher, *[math.nan] * 3, 0, 0, 0, "", "", config.consistency.threshold, nothing)
                      for m in members]
            continue
        domain = config.domains[name]
        rows = sample_fresh_turns(engine, chosen, SamplingOptions(
            config.train.temperature, max_tokens=domain.max_turn_tokens, stop_ids=renderer.stop_ids,
            stop_strings=renderer.stop_strings))
        for member in members:
            found.append(_distance(config, name, member, student, rows, renderer.end_id, where))
    return found


def _points(config: Config, name: str, renderer: ChatRenderer, store: PrefixStore | None, count: int,
            demonstrations: bool) -> tuple[list[FreshTurnPoint], str]:
    """`count` decision points of a domain, evenly over what there is, and in words where they come from."""
    limit = config.domains[name].max_context_tokens - config.domains[name].max_turn_tokens
    if store is not None:
        there = store.decision_points(name, max_prefix_tokens=limit)
        at = [there[i] for i in _evenly(len(there), count)]
        found = [(p.sequence, p.context, p.turn, store.prefix(p)) for p in at]
        if found:
            return _fresh(config, name, found), "at prefixes of the store"
    sections = [config.sft_domains.get(name, config.sft), config.sft]
    options = next((o for o in sections if o.files or o.experts), None)
    if options is None or not demonstrations:
        return [], ""
    _, sequences = gather_demonstrations(config, dataclasses.replace(options, store=""), [name], renderer)
    places = [(identity, sequence, p) for identity, sequence in sorted(sequences[name].items())
              for p in decision_points_of(sequence, identity) if len(_prefix(sequence, p)) <= limit]
    at = [places[i] for i in _evenly(len(places), count)]
    found = [(identity, p.context, p.turn, _prefix(sequence, p)) for identity, sequence, p in at]
    return _fresh(config, name, found), "at demonstrations' turns"


def _prefix(sequence: Trajectory, point: Any):
    return prefix_of(sequence, point.context, point.turn)


def _evenly(size: int, count: int) -> list[int]:
    return list(range(size)) if size <= count else [i * size // count for i in range(count)]


def _fresh(config: Config, name: str, found: list[tuple]) -> list[FreshTurnPoint]:
    return [FreshTurnPoint(name, STREAM, (sequence, context), prefix, turn,
                           (stable_seed(config.seed, name, "consistency", number),), number, number)
            for number, (sequence, context, turn, prefix) in enumerate(found) if len(prefix)]


def _distance(config: Config, name: str, scorer: Any, student: nn.Module, rows: Sequence[Row], pad_id: int,
              where: str) -> Distance:
    need = _need(scorer)
    student.eval()
    device = next(student.parameters()).device
    sums: dict[int, list[float]] = {}
    unscored = 0
    for batch in pack(rows, token_budget=config.train.micro_batch_tokens, pad_id=pad_id, domains=[name], streams=(STREAM,)):
        values = _token_values(batch.to(device), scorer, student, config.train.temperature, need).double().cpu()
        for group, value in zip(batch.group.tolist(), values.tolist(), strict=True):
            if math.isfinite(value):
                own = sums.setdefault(group, [0.0, 0.0])
                own[0] += value
                own[1] += 1.0
            else:
                unscored += 1
    kl, low, high = ratio_interval([s for s, _ in sums.values()], [n for _, n in sums.values()])
    tokens = int(sum(n for _, n in sums.values()))
    note = "" if tokens else "the teacher gave no usable score"
    return Distance(name, scorer.teacher, kl, low, high, tokens, len(sums), unscored,
                    "sampled" if need == "sampled" else "exact", where,
                    config.consistency.threshold, note, _made_from_the_student(config, scorer.teacher))


def _made_from_the_student(config: Config, teacher: str) -> bool:
    """Whether the manifest beside a teacher's weights (`mopd teacher sft` writes one) names the student's start as base."""
    model = config.teachers[teacher].model if teacher in config.teachers else ""
    try:
        base = json.loads(Path(model, "manifest.json").read_text())["base_revision"] if model else None
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return base is not None and base == model_revision(config.student.model)


def _need(scorer: Any) -> str:
    """What to ask a teacher for: hidden states with a head (no logits are kept), its distribution, or the sampled token."""
    if "hidden" in scorer.gives and getattr(scorer, "head", None) is not None:
        return "hidden"
    return "full" if "full" in scorer.gives else "sampled"


def _token_values(batch: MicroBatch, scorer: Any, student: nn.Module, temperature: float, need: str) -> torch.Tensor:
    """float32 [N]: per loss token KL(p ‖ q) over the ids that both have, or log p − log q of the label; NaN where q has no
    score."""
    scores = scorer(batch, need=need, temperature=temperature)
    if need == "sampled":
        batch.extra = {"label": scores.logprob.to(batch.label.device)}
    else:
        batch.extra = {"theirs": (scores.hidden if need == "hidden" else scores.logits).to(batch.label.device)}
    head = scores.head

    def value(logits: torch.Tensor, part: MicroBatch) -> torch.Tensor:
        if need == "sampled":
            ours = torch.log_softmax(logits / temperature, dim=-1)
            return ours.gather(1, part.label[:, None])[:, 0] - part.extra["label"]
        theirs = part.extra["theirs"]
        theirs = (head.logits(theirs) if need == "hidden" else theirs).float()
        q = torch.log_softmax(theirs / temperature, dim=-1)
        p = torch.log_softmax(logits[:, :q.shape[1]] / temperature, dim=-1)
        return (p.exp() * (p - q)).sum(dim=-1)

    return PackedLM(student).per_token(batch, value)


def ratio_interval(sums: Sequence[float], counts: Sequence[float]) -> tuple[float, float, float]:
    """(mean, low, high) of Σ sums / Σ counts with its 95% interval, one sum and count per independent unit; the interval is
    NaN below two units, all is NaN without any."""
    total, units = sum(counts), len(counts)
    if not total:
        return math.nan, math.nan, math.nan
    mean = sum(sums) / total
    if units < 2:
        return mean, math.nan, math.nan
    spread = sum((s - mean * n) ** 2 for s, n in zip(sums, counts, strict=True))
    half = 1.959964 * math.sqrt(spread * units / (units - 1)) / total
    return mean, mean - half, mean + half


def print_distances(found: Sequence[Distance], console: Console | None = None) -> None:
    """Every distance in a line, and a warning for every teacher that is far."""
    console = console or Console(highlight=False)
    for distance in found:
        console.print(escape(str(distance)), soft_wrap=True)
    for distance in found:
        if distance.warning:
            console.print(f"[yellow]warning[/yellow] {escape(distance.warning)}", soft_wrap=True)
