"""Per-token numbers of a step, summed by domain and stream, over micro-batches and ranks.

Holds sums and counts only, so that parts merge exactly; means are formed at the end.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import torch

# name in the record -> name among the objective's diagnostics
MEANS = {
    "k1": "k1", "k3": "k3", "reverse_kl": "reverse_kl", "forward_kl": "forward_kl",
    "student_entropy": "student_entropy", "teacher_entropy": "teacher_entropy", "agreement": "agreement",
}
SHARES = ("masked", "clipped", "unscored", "infinite")
UNNAMED = {*MEANS.values(), *SHARES, "loss", "student_logprob", "teacher_logprob"}
# diagnostics that are no further number of the objective's own


@dataclasses.dataclass
class CellSums:
    """Sums over the loss tokens of one (domain, stream).

    tokens            loss tokens, of which `trained` had a weight
    sums, counts      of every diagnostic, over the tokens where it is known (finite)
    ratio, ratio_squared, known_ratio   Σρ, Σρ², number, ρ = π_θ/µ: the effective sample size is (Σρ)²/(n Σρ²)
    gap, largest_gap  Σ and max of |log π_θ − log µ|
    cut, candidates   tokens of which top-p or top-k cut ids off, and the ids that it left of them, summed
    depth             actions by turn number
    """

    tokens: int = 0
    trained: int = 0
    stale: int = 0
    weight: float = 0.0
    loss: float = 0.0
    sums: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    ratio: float = 0.0
    ratio_squared: float = 0.0
    known_ratio: int = 0
    gap: float = 0.0
    largest_gap: float = 0.0
    staleness: float = 0.0
    cut: int = 0
    candidates: int = 0
    depth: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def merge(self, other: CellSums) -> None:
        for field in dataclasses.fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if field.name == "largest_gap":
                setattr(self, field.name, max(mine, theirs))
            elif isinstance(mine, collections.Counter):
                for key, value in theirs.items():  # Counter's own + drops what is not positive
                    mine[key] += value
            else:
                setattr(self, field.name, mine + theirs)

    def record(self) -> dict:
        """Plain numbers under METHOD section 9's names; a mean over nothing is left out."""
        found = {"tokens": self.tokens, "trained_tokens": self.trained, "weight": self.weight, "loss": self.loss,
                 "stale_tokens": self.stale, "actions": sum(self.depth.values()),
                 "depth": {str(k): self.depth[k] for k in sorted(self.depth)}}
        found["cut_share"] = self.cut / self.tokens if self.tokens else 0.0
        if self.cut:
            found["candidates_mean"] = self.candidates / self.cut
        for name in MEANS:
            if self.counts[name]:
                found[name] = self.sums[name] / self.counts[name]
        found["diagnostics"] = {name: self.sums[name] / count for name, count in sorted(self.counts.items())
                                if name not in MEANS and count}
        for name in SHARES:
            found[f"{name}_share"] = self.sums[name] / self.tokens if self.tokens else 0.0
            if name in ("unscored", "infinite"):
                found[f"{name}_tokens"] = int(self.sums[name])
        if self.known_ratio:
            found |= {"mismatch_mean": self.gap / self.known_ratio, "mismatch_max": self.largest_gap,
                      "staleness": self.staleness / self.known_ratio,
                      "effective_sample_size": self.ratio**2 / (self.known_ratio * self.ratio_squared)
                      if self.ratio_squared and math.isfinite(self.ratio_squared) else float("nan")}
        return found


# name of a decision point's score -> name among the objective's diagnostics
TURN_SCORES = {"k1": "k1", "k3": "k3", "reverse_kl": "reverse_kl", "teacher_entropy": "teacher_entropy",
               "student_entropy": "student_entropy", "agreement": "agreement"}


class TurnSums:
    """Sums of the diagnostics by action, over a step: what was measured at each decision point, per (group, turn).

    Holds one row per action; an action's tokens lie in one micro-batch of one rank, so how a batch was split moves no sum.
    """

    def __init__(self):
        self.keys: list[np.ndarray] = []
        self.parts: dict[str, list[np.ndarray]] = {name: [] for name in TURN_SCORES}

    def add(self, tokens: Mapping[str, np.ndarray], diagnostics: Mapping[str, torch.Tensor], chosen: np.ndarray) -> None:
        """Take the tokens of a micro-batch where `chosen` (bool [N]) holds; tokens have group, turn and sequence."""
        if not chosen.any():
            return
        keys, action = np.unique(np.stack([tokens[name][chosen] for name in ("group", "turn", "sequence")], axis=1), axis=0,
                                 return_inverse=True)
        action = action.ravel()
        self.keys.append(keys)
        for name, source in TURN_SCORES.items():
            values = np.full(len(action), np.nan) if source not in diagnostics else \
                diagnostics[source].detach().cpu().numpy().astype(np.float64)[chosen]
            known = np.isfinite(values)
            sums = [np.bincount(action, weights, minlength=len(keys)) for weights in (np.where(known, values, 0.0), known)]
            self.parts[name].append(np.stack(sums, axis=1))

    def plain(self) -> tuple[list[np.ndarray], dict[str, list[np.ndarray]]]:
        """For `of`, in values that go to another process (see mopd.encoding)."""
        return self.keys, self.parts

    @classmethod
    def of(cls, plain: tuple[list[np.ndarray], dict[str, list[np.ndarray]]]) -> TurnSums:
        """What `plain` was made of."""
        sums = cls()
        sums.keys, sums.parts = plain
        return sums

    def merge(self, other: TurnSums) -> None:
        self.keys += other.keys
        for name, parts in other.parts.items():
            self.parts[name] += parts

    def scores(self) -> dict[tuple[int, int], dict[str, float]]:
        """(group, turn) -> {"reverse_kl", "k1", "teacher_entropy", "student_entropy", "disagreement"}, means over the tokens
        of all its actions; the reverse KL is exact where the teacher's distribution was there, else the k3 estimate. What
        is not known is left out. Sums are exactly rounded, so neither order nor ranks move them."""
        if not self.keys:
            return {}
        keys = np.concatenate(self.keys)
        sums = {name: np.concatenate(parts) for name, parts in self.parts.items()}
        rows: dict[tuple[int, int], list[int]] = {}
        for i, (group, turn, _) in enumerate(keys.tolist()):
            rows.setdefault((group, turn), []).append(i)
        found = {}
        for key, mine in sorted(rows.items()):
            mean = {name: math.fsum(values[mine, 0]) / count for name, values in sums.items()
                    if (count := values[mine, 1].sum())}
            if "reverse_kl" not in mean and "k3" in mean:
                mean["reverse_kl"] = mean["k3"]
            mean.pop("k3", None)
            if "agreement" in mean:
                mean["disagreement"] = 1.0 - mean.pop("agreement")
            found[key] = mean
        return found


def begins_of(row: np.ndarray, action: np.ndarray) -> np.ndarray:
    """bool [N]: the first token of each action, of tokens in a micro-batch's order."""
    first = np.ones(len(row), dtype=bool)
    first[1:] = (np.diff(row) != 0) | (np.diff(action) != 0)
    return first


class StepSums:
    """CellSums by (domain, stream) index of a whole step."""

    def __init__(self):
        self.cells: dict[tuple[int, int], CellSums] = {}

    def add(self, tokens: Mapping[str, np.ndarray], diagnostics: Mapping[str, torch.Tensor], *, version: int) -> None:
        """Take one micro-batch's tokens: its per-loss-token fields with `loss`, `include` and `stale`, and where ids were cut
        off `candidates`, int [N] how many were left (0: all); where actions may have begun elsewhere `begins`, bool [N]."""
        found = {name: value.detach().float().cpu().numpy() for name, value in diagnostics.items()}
        gap = found["student_logprob"].astype(np.float64) - tokens["behaviour_logprob"] if "student_logprob" in found \
            else np.full(len(tokens["domain"]), np.nan)
        known = np.isfinite(gap)
        streams = int(tokens["stream"].max(initial=0)) + 1
        cells = tokens["domain"] * streams + tokens["stream"]
        first = tokens.get("begins")
        if first is None:
            first = begins_of(tokens["row"], tokens["action"])
        for cell in np.unique(cells):
            here = cells == cell
            part = CellSums(
                tokens=int(here.sum()), trained=int((here & tokens["include"]).sum()),
                stale=int((here & tokens["stale"]).sum()), weight=float(tokens["weight"][here].sum(dtype=np.float64)),
                loss=float((tokens["weight"] * tokens["loss"])[here].sum(dtype=np.float64)),
                depth=collections.Counter(tokens["turn"][here & first].tolist()))
            own = {name: name for name, values in found.items() if name not in UNNAMED and values.ndim == 1}
            for name, source in (MEANS | own).items():
                if source in found:
                    values = found[source][here & np.isfinite(found[source])]
                    part.sums[name], part.counts[name] = float(values.sum(dtype=np.float64)), len(values)
            for name in SHARES:
                if name in found:
                    part.sums[name] = float(found[name][here].sum(dtype=np.float64))
            if "candidates" in tokens:
                part.cut = int((tokens["candidates"][here] > 0).sum())
                part.candidates = int(tokens["candidates"][here].sum())
            some = gap[here & known]
            if len(some):
                ratio = np.exp(np.clip(some, -80.0, 80.0))
                part.ratio, part.ratio_squared = float(ratio.sum()), float((ratio**2).sum())
                part.known_ratio, part.gap = len(some), float(np.abs(some).sum())
                part.largest_gap = float(np.abs(some).max())
                part.staleness = float((version - tokens["version"][here & known]).sum())
            key = (int(cell) // streams, int(cell) % streams)
            self.cells.setdefault(key, CellSums()).merge(part)

    def plain(self) -> dict[tuple[int, int], dict]:
        """For `of`, in values that go to another process (see mopd.encoding)."""
        return {key: {f.name: dict(value) if isinstance(value := getattr(part, f.name), dict) else value
                      for f in dataclasses.fields(part)} for key, part in self.cells.items()}

    @classmethod
    def of(cls, plain: Mapping[tuple[int, int], Mapping]) -> StepSums:
        """What `plain` was made of."""
        sums = cls()
        for key, fields in plain.items():
            sums.cells[key] = CellSums(**{name: collections.Counter(value) if isinstance(value, dict) else value
                                          for name, value in fields.items()})
        return sums

    def merge(self, other: StepSums) -> None:
        for key, part in other.cells.items():
            self.cells.setdefault(key, CellSums()).merge(part)

    def by_domain(self, *, own: set[int]) -> dict[int, CellSums]:
        """Summed over the streams in `own`, what the student itself sampled (all streams where it sampled nothing)."""
        result: dict[int, CellSums] = {}
        for domain in sorted({d for d, _ in self.cells}):
            parts = [c for (d, s), c in sorted(self.cells.items()) if d == domain and s in own]
            parts = parts or [c for (d, _), c in sorted(self.cells.items()) if d == domain]
            total = CellSums()
            for part in parts:
                total.merge(part)
            result[domain] = total
        return result
