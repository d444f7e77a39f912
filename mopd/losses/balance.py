"""Domain balance: factors on a domain's loss so that no domain drowns another (DN-MOPD). Plain numbers, no tensors
kept."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from torch import Tensor

KINDS = ("none", "fixed", "normalised")
CLIP = (0.25, 4.0)


@dataclasses.dataclass(frozen=True)
class Moments:
    """Count, mean and sum of squared deviations: merges over micro-batches and ranks without cancellation (Chan et
    al. 1979)."""

    count: int = 0
    mean: float = 0.0
    m2: float = 0.0

    @property
    def deviation(self) -> float:
        """Population standard deviation; 0 without values."""
        return math.sqrt(max(self.m2, 0.0) / self.count) if self.count else 0.0

    def merge(self, other: Moments) -> Moments:
        count = self.count + other.count
        if count == 0:
            return Moments()
        delta = other.mean - self.mean
        return Moments(
            count,
            self.mean + delta * other.count / count,
            self.m2 + other.m2 + delta * delta * self.count * other.count / count,
        )


def moments(values: Tensor) -> Moments:
    """Moments of values[N], computed in float64. Pass only what counts: unmasked, scored tokens. NaN raises
    ValueError."""
    values = values.detach().double().reshape(-1)
    if values.numel() == 0:
        return Moments()
    mean = float(values.mean())
    if not math.isfinite(mean):
        raise ValueError("log-ratios for the domain balance must be finite; leave masked and unscored tokens out")
    return Moments(values.numel(), mean, float((values - mean).square().sum()))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    total = Moments()
    for part in parts:
        total = total.merge(part)
    return total


def domain_balance(
    kind: str,
    domains: Iterable[str],
    *,
    fixed: Mapping[str, float] | None = None,
    log_ratio: Mapping[str, Moments] | None = None,
    clip: tuple[float, float] = CLIP,
) -> dict[str, float]:
    """Factor by domain, to be multiplied onto ω.

    ``none`` 1 everywhere; ``fixed`` the given weights; ``normalised`` (DN-MOPD) clip(σ_all/σ_d, 0.25, 4) with σ the
    population standard deviation of the *unclipped* log π_T − log π_θ on unmasked sampled tokens, global over ranks
    (merge the Moments of all ranks first), of all domains together and of d. σ_d = 0, or no token of d, gives 1.
    """
    names = list(domains)
    if kind == "none":
        return dict.fromkeys(names, 1.0)
    if kind == "fixed":
        missing = [d for d in names if d not in (fixed or {})]
        if missing:
            raise ValueError(f"fixed domain balance needs a weight for every domain; missing: {', '.join(missing)}")
        return {d: float(fixed[d]) for d in names}
    if kind != "normalised":
        raise ValueError(f"unknown domain balance {kind!r}; there are: {', '.join(KINDS)}")
    parts = {d: (log_ratio or {}).get(d, Moments()) for d in names}
    everything = merge_moments(parts.values()).deviation
    return {
        d: 1.0 if part.deviation == 0.0 else min(max(everything / part.deviation, clip[0]), clip[1])
        for d, part in parts.items()
    }
