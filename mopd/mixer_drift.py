"""When a domain's rollouts leave the ground its teacher knows, more of its samples start from stored prefixes.

A teacher's scores teach little in states that it would never reach itself. There the student's reverse KL on its own
rollouts is far above that on stored prefixes, where the teacher (or a demonstration) led. That ratio is the measure.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

LEAST_KL = 1e-4
# nats per token; below it student and teacher agree and a ratio would be noise over noise


@dataclasses.dataclass(frozen=True)
class DriftOptions:
    """ratio_high        the prefix fraction rises by `step` where rollout KL / prefix KL is above it
    ratio_low         it falls back by `step`, never below where it began, where the ratio is under it; between both it
                      stays, so that noise does not move it to and fro
    maximum           upper bound of the fraction, below 1: without any rollouts nothing could be measured any more
    smoothing         weight of the past in both means of the KL, in [0, 1)
    patience          steps between two moves of a domain, and before its first
    """

    ratio_high: float = 2.0
    ratio_low: float = 1.25
    step: float = 0.1
    maximum: float = 0.9
    smoothing: float = 0.9
    patience: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.ratio_low <= self.ratio_high:
            raise ValueError(f"ratio_low {self.ratio_low} must be positive and at most ratio_high {self.ratio_high}")
        if not 0 < self.maximum < 1:
            raise ValueError(f"the largest prefix fraction must lie between 0 and 1, got {self.maximum}")
        if not 0 < self.step <= 1:
            raise ValueError(f"step must lie in (0, 1], got {self.step}")
        if not 0 <= self.smoothing < 1:
            raise ValueError(f"smoothing must lie in [0, 1), got {self.smoothing}")
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1 step, got {self.patience}")


def prefix_fraction(streams: Mapping[str, float]) -> float:
    """Share of a domain's samples that start from stored prefixes, of stream shares that sum to anything positive."""
    total = math.fsum(streams.values())
    return math.fsum(share for stream, share in streams.items() if stream != "rollout") / total


def with_prefix_fraction(streams: Mapping[str, float], fraction: float) -> dict[str, float]:
    """Stream shares (rollout and prefix streams, summing to 1) with `fraction` from prefixes, which keep their proportions;
    as they are where one of the two is missing."""
    prefixes = math.fsum(share for stream, share in streams.items() if stream != "rollout")
    if not prefixes or "rollout" not in streams:
        return dict(streams)
    return {stream: 1 - fraction if stream == "rollout" else fraction * share / prefixes for stream, share in streams.items()}


class PrefixDrift:
    """Prefix fractions by domain that follow the ratio of two smoothed reverse KLs. State is plain numbers.

    base: domain → the fraction of its samples that start from stored prefixes by configuration. A domain with 0 or 1 has
    only one of the two to measure and never moves.
    """

    def __init__(self, base: Mapping[str, float], options: DriftOptions | None = None):
        for domain, fraction in base.items():
            if not 0 <= fraction <= 1:
                raise ValueError(f"prefix fraction of domain {domain!r} must lie in [0, 1], got {fraction}")
        self.base, self.options = dict(base), options or DriftOptions()
        self.fraction = dict(base)
        self.kl: dict[str, list[float]] = {}
        self.measured: dict[str, int] = dict.fromkeys(base, 0)
        self.since: dict[str, int] = dict.fromkeys(base, 0)

    def update(self, kl: Mapping[str, tuple[float | None, float | None]]) -> tuple[dict[str, float], list[str]]:
        """New fractions and a sentence for every move, after a step whose mean reverse KL per token was
        kl[domain] = (of rollouts, of fresh turns at prefixes); None where the step had none, and that domain waits.

        A mean below 0 (an estimate where both agree) counts as 0. Raises ValueError for an unknown domain or a number that
        is not finite.
        """
        said = []
        for domain, pair in kl.items():
            if domain not in self.base:
                raise ValueError(f"unknown domain {domain!r}; there are: {', '.join(self.base)}")
            if any(value is None for value in pair):
                continue
            if not all(math.isfinite(value) for value in pair):
                raise ValueError(f"reverse KL of domain {domain!r} must be finite, got {pair}")
            new = [max(float(value), 0.0) for value in pair]
            old, keep = self.kl.get(domain, new), self.options.smoothing
            self.kl[domain] = [keep * before + (1 - keep) * now for before, now in zip(old, new, strict=True)]
            self.measured[domain] += 1
            self.since[domain] += 1
            said += self._move(domain)
        return dict(self.fraction), said

    def ratio(self, domain: str) -> float | None:
        """Smoothed reverse KL of rollouts over that of prefixes; None before both were measured."""
        if domain not in self.kl:
            return None
        rollout, prefix = self.kl[domain]
        return max(rollout, LEAST_KL) / max(prefix, LEAST_KL)

    def _move(self, domain: str) -> list[str]:
        options, now, ratio = self.options, self.fraction[domain], self.ratio(domain)
        if self.since[domain] < options.patience or not 0 < self.base[domain] < 1:
            return []
        if ratio > options.ratio_high:
            new, why = min(now + options.step, max(options.maximum, now)), f"above {options.ratio_high:g}"
        elif ratio < options.ratio_low:
            new, why = max(now - options.step, self.base[domain]), f"below {options.ratio_low:g}"
        else:
            return []
        if abs(new - now) < 1e-12:
            return []
        self.fraction[domain], self.since[domain] = new, 0
        rollout, prefix = self.kl[domain]
        verb = "rises" if new > now else "falls"
        ground = "its rollouts leave the teacher's ground" if new > now else "its rollouts are back on the teacher's ground"
        return [f"domain {domain}: {ground} (reverse KL {rollout:.3f} on rollouts, {prefix:.3f} on prefixes, ratio "
                f"{ratio:.2f}, {why}); its prefix fraction {verb} from {now:.2f} to {new:.2f}"]

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"fraction": dict(self.fraction), "kl": {d: list(v) for d, v in self.kl.items()},
                "measured": dict(self.measured), "since": dict(self.since)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["fraction"]) != set(self.base):
            raise ValueError(f"the saved prefix fractions are for domains {sorted(state['fraction'])}, this run has "
                             f"{sorted(self.base)}")
        self.fraction, self.kl = dict(state["fraction"]), {d: list(v) for d, v in state["kl"].items()}
        self.measured = {d: int(n) for d, n in state["measured"].items()}
        self.since = {d: int(n) for d, n in state["since"].items()}
