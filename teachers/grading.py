"""Edits of rewards and advantages for teachers trained by RL, in the order they apply. Pure numpy, float64 out.

S sequences (a group of G where a function says so), T tokens. Symbols are those of the MiMo-V2.6 technical report,
sections 4.1 and 4.3. Infrastructure failures have left the group before any of this; a NaN reward is refused, because
it would be one of them.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

# A group whose rewards differ by less than this has no spread.
SPREAD = 1e-12


def zero_hacks(reward: ArrayLike, hack: ArrayLike) -> Array:
    """reward[S] with 0 where hack[S] (a confirmed hack). Comes before any group statistic, so that a hack moves no
    mean."""
    r, h = _same(reward=reward, hack=hack)
    return np.where(h.astype(bool), 0.0, r)


def rubric_reward(test_reward: ArrayLike, solution_score: ArrayLike, behaviour_score: ArrayLike) -> Array:
    """GRS: R = R_test · S_solution · S_behaviour, [S] each, scores in [0, 1]; what failed its tests stays at 0.

    Raises ValueError for a score outside [0, 1].
    """
    r, solution, behaviour = _same(
        test_reward=test_reward, solution_score=solution_score, behaviour_score=behaviour_score
    )
    for name, score in (("solution_score", solution), ("behaviour_score", behaviour)):
        if ((score < 0) | (score > 1)).any():
            raise ValueError(f"{name} must lie in [0, 1], got {score.tolist()}")
    return r * solution * behaviour


def length_penalty(
    reward: ArrayLike,
    length: ArrayLike,
    passing: ArrayLike,
    *,
    A: float = 0.5,
    B: float = 50.0,
    X: float = 0.2,
    delta: float = 0.1,
    s: float = 0.6,
    gamma: float = 1.0,
) -> Array:
    """Takes up to X off the reward[G] of passing sequences that are long for their group; others stay as they are.

    Only if the passing share |P|/G exceeds A. With ℓ* the B/100 quantile (linear interpolation) of the passing lengths,
    R_i − X · clip((ℓ_i/ℓ* − 1 − delta)/(s − delta), 0, 1)^gamma: nothing up to (1 + delta)·ℓ*, all of X from (1 +
    s)·ℓ*. length[G] in tokens, passing[G] bool. Raises ValueError for s ≤ delta, B outside [0, 100] or a length that
    is not positive.
    """
    r, lengths, p = _same(reward=reward, length=length, passing=passing)
    p = p.astype(bool)
    if not s > delta:
        raise ValueError(f"the length penalty needs s > delta, got s={s}, delta={delta}")
    if not 0.0 <= B <= 100.0:
        raise ValueError(f"the length penalty's quantile B is in percent, got {B}")
    if not gamma > 0:
        raise ValueError(f"the length penalty's gamma must be positive, got {gamma}")
    if not p.any() or p.mean() <= A:
        return r.copy()
    if (lengths[p] <= 0).any():
        raise ValueError(f"lengths of passing sequences must be positive, got {lengths[p].tolist()}")
    reference = np.quantile(lengths[p], B / 100.0)
    excess = np.clip((lengths / reference - 1.0 - delta) / (s - delta), 0.0, 1.0)
    return np.where(p, r - X * excess**gamma, r)


def centre(reward: ArrayLike, *, std_normalise: bool = False) -> Array:
    """A_i = R_i − mean over the group, [G]; with std_normalise divided by the population standard deviation too.

    A group with no spread gives zeros (`has_spread` tells; such groups are filtered and counted by the caller).
    """
    (r,) = _same(reward=reward)
    if r.size == 0 or not has_spread(r):
        return np.zeros_like(r)
    advantage = r - r.mean()
    return advantage / r.std() if std_normalise else advantage


def has_spread(reward: ArrayLike) -> bool:
    """Whether the rewards of a group[G] differ at all; without it the group teaches nothing."""
    (r,) = _same(reward=reward)
    return bool(r.size and np.ptp(r) > SPREAD)


def redistribute(advantage: ArrayLike, quality: ArrayLike, passing: ArrayLike, *, lambda_max: float = 2.0) -> Array:
    """GAR: shares the passing set's advantage out by quality, [G] each.

    λ = min(lambda_max, Σ_P A / Σ_P f·A); A_i ← λ f_i A_i on the passing set P; then the group's mean is subtracted.
    quality f in (0, 1] on P. A grader's answer that is unusable (a quality on P that is NaN or outside (0, 1], no
    passing sequence, or a weighted sum that is not positive) leaves the advantages unchanged.
    """
    a, p = _same(advantage=advantage, passing=passing)
    f = np.asarray(quality, np.float64)
    if f.shape != a.shape:
        raise ValueError(f"quality {f.shape} and advantage {a.shape} differ in shape")
    p = p.astype(bool)
    if not p.any() or not ((f[p] > 0) & (f[p] <= 1)).all():
        return a.copy()
    weighted = float((f[p] * a[p]).sum())
    if not weighted > 0:
        return a.copy()
    scale = min(lambda_max, float(a[p].sum()) / weighted)
    out = np.where(p, scale * np.where(p, f, 0.0) * a, a)
    return out - out.mean()


def segment_penalty(
    advantage: ArrayLike,
    token_sequence: ArrayLike,
    flag: ArrayLike,
    *,
    kappa: float = 2.0,
    alpha_max: float = 1.5,
    beta_min: float = 0.5,
) -> Array:
    """Token advantages [T] from sequence advantages[S], the sequence of each token[T] and flag[T] (a format violation
    or tool-call error).

    A > 0: flagged tokens get 0, clean ones A·α with α = min(alpha_max, 1 + Σ_flagged A / Σ_clean A).
    A < 0: flagged tokens get kappa·A, clean ones A·β with β = max(beta_min, 1 − (kappa − 1) Σ_flagged |A| / Σ_clean
    |A|). Sums run over all tokens given, which must be those of the whole batch; an empty denominator gives scale 1.
    Up to the bounds the batch's total positive and total negative advantage stay what they were.

    Raises ValueError for a token of a sequence that is not there.
    """
    a = np.asarray(advantage, np.float64)
    owner, flagged = np.asarray(token_sequence), np.asarray(flag).astype(bool)
    if owner.shape != flagged.shape or owner.ndim != 1:
        raise ValueError(f"token_sequence {owner.shape} and flag {flagged.shape} must both be [T]")
    if not np.isfinite(a).all():
        raise ValueError("advantages must be finite")
    if owner.size and not (0 <= owner.min() and owner.max() < len(a)):
        raise ValueError(f"token_sequence must lie in [0, {len(a)}), got {owner.min()} to {owner.max()}")
    token = a[owner.astype(np.int64)] if owner.size else np.zeros(0)
    positive, negative = token > 0, token < 0
    alpha = beta = 1.0
    if (clean := token[positive & ~flagged].sum()) > 0:
        alpha = min(alpha_max, 1.0 + token[positive & flagged].sum() / clean)
    if (clean := -token[negative & ~flagged].sum()) > 0:
        beta = max(beta_min, 1.0 - (kappa - 1.0) * -token[negative & flagged].sum() / clean)
    scale = np.where(positive, np.where(flagged, 0.0, alpha), np.where(flagged, kappa, beta))
    return token * np.where(token == 0, 0.0, scale)


def _same(**arrays: ArrayLike) -> list[Array]:
    """The arrays as float64 vectors of one length; NaN or infinite entries and differing shapes raise ValueError by
    name."""
    out = {name: np.asarray(values).astype(np.float64) for name, values in arrays.items()}
    if len({x.shape for x in out.values()}) != 1 or any(x.ndim != 1 for x in out.values()):
        raise ValueError("expected vectors of one length, got " + ", ".join(f"{n} {x.shape}" for n, x in out.items()))
    for name, x in out.items():
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite, got {x.tolist()}")
    return list(out.values())
