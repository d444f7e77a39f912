"""Intervals for held-out scores: Wilson for shares, bootstrap for means, paired bootstrap for normalised scores.

Knows numpy only; no files. Every resampling is seeded, and a domain's resamples depend on (seed, domain name, number
of tasks) alone, so two models evaluated on the same tasks are resampled together whatever else is compared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

UNDEFINED_LIMIT = 0.05
# Above this share of resamples in which a teacher is not above the base, percentiles of the rest would mislead.


def wilson_interval(successes: float, n: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """Wilson's score interval for a success share (E. B. Wilson, JASA 22, 1927); (nan, nan) for n = 0.

    `successes` may be fractional: the mean count over training seeds that played the same n tasks. A task's mean over
    seeds varies no more than one yes-or-no answer of the same share, so the interval then errs on the wide side.
    Raises ValueError unless 0 <= successes <= n and 0 < confidence < 1.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"wilson_interval: {successes} successes of {n} episodes")
    z = _z(confidence)
    if n == 0:
        return math.nan, math.nan
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def bootstrap_interval(values: np.ndarray, *, resamples: int = 2000, seed: int = 0,
                       confidence: float = 0.95) -> tuple[float, float]:
    """Percentile bootstrap interval for the mean of `values` [n] (B. Efron, Ann. Statist. 7, 1979); nan for n = 0."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"bootstrap_interval: one row of finite values is needed, got shape {values.shape}")
    if not values.size:
        return math.nan, math.nan
    return _percentiles(_resample_weights("", values.size, resamples, seed) @ values, confidence)


def mean_interval(values: np.ndarray, *, confidence: float = 0.95) -> tuple[float, float, float]:
    """(mean, low, high) of `values` [n] by Student's t, mean ± t(n − 1) · s / √n (Student, Biometrika 6, 1908); no interval
    (nan) for n < 2, all nan for n = 0."""
    values = np.asarray(values, dtype=np.float64)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"mean_interval: one row of finite values is needed, got shape {values.shape}")
    if not values.size:
        return math.nan, math.nan, math.nan
    mean = float(values.mean())
    if values.size < 2:
        return mean, math.nan, math.nan
    half = t_quantile(0.5 + confidence / 2, values.size - 1) * float(values.std(ddof=1)) / math.sqrt(values.size)
    return mean, mean - half, mean + half


def t_quantile(p: float, degrees: int) -> float:
    """Quantile of Student's t distribution, by bisection on its distribution function in closed form (Abramowitz and
    Stegun, 26.7.3 and 26.7.4). Raises ValueError unless 0.5 <= p < 1 and degrees >= 1."""
    if not 0.5 <= p < 1 or degrees < 1:
        raise ValueError(f"t_quantile: p {p} must lie in [0.5, 1) and degrees {degrees} be at least 1")

    def inside(theta: float) -> float:  # P(|T| <= tan(theta) · sqrt(degrees))
        term = total = 1.0 if degrees % 2 == 0 else math.cos(theta)
        if degrees == 1:
            return 2 * theta / math.pi
        for k in range(2 if degrees % 2 == 0 else 3, degrees - 1, 2):
            term *= math.cos(theta) ** 2 * (k - 1) / k
            total += term
        total *= math.sin(theta)
        return total if degrees % 2 == 0 else 2 / math.pi * (theta + total)

    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle) < 2 * p - 1 else (low, middle)
    return math.tan(low) * math.sqrt(degrees)


@dataclasses.dataclass(frozen=True)
class NormalisedScore:
    """`mean` over domains of `by_domain`; nan, with the reason in `words`, where a teacher is not above the base."""

    mean: float
    by_domain: dict[str, float]
    words: tuple[str, ...] = ()


def normalised_score(student: Mapping[str, float], base: Mapping[str, float],
                     teacher: Mapping[str, float]) -> NormalisedScore:
    """Mean over domains of (student − base) / (teacher − base), each domain with its own teacher's score there.

    0 is the checkpoint that the student starts from, 1 its teachers. A domain whose teacher is not above the base has
    no such measure: its value and the mean are nan and `words` says why. Raises ValueError when the three do not name
    the same domains, or none.
    """
    _same_domains(student, base, teacher)
    by_domain, words = {}, []
    for domain in student:
        gain = teacher[domain] - base[domain]
        if gain > 0:
            by_domain[domain] = (student[domain] - base[domain]) / gain
        else:
            by_domain[domain] = math.nan
            words.append(f"{domain}: no normalised score, the teacher ({teacher[domain]:.3f}) is not above the base "
                         f"({base[domain]:.3f})")
    return NormalisedScore(float(np.mean(list(by_domain.values()))), by_domain, tuple(words))


@dataclasses.dataclass(frozen=True)
class PairedBootstrap:
    """A normalised score with its interval. `samples` [resamples] are the resampled means (nan where undefined), which
    pair up with those of another model on the same tasks; `undefined` is their share of nan."""

    value: float
    low: float
    high: float
    by_domain: dict[str, float]
    by_domain_interval: dict[str, tuple[float, float]]
    undefined: float
    words: tuple[str, ...]
    samples: np.ndarray


def paired_bootstrap(student: Mapping[str, np.ndarray], base: Mapping[str, np.ndarray],
                     teacher: Mapping[str, np.ndarray], *, resamples: int = 2000, seed: int = 0,
                     confidence: float = 0.95) -> PairedBootstrap:
    """Normalised score with a percentile interval that resamples a domain's tasks jointly for all three models.

    student  {domain: [tasks] or [training seeds, tasks]}; training seeds are averaged, not resampled, so the interval
             speaks about the held-out tasks and not about the luck of training
    base, teacher  {domain: [tasks]}, in the same task order; teacher is the domain's own
    Undefined resamples (teacher not above base) are left out of the percentiles and counted in `undefined`; above
    UNDEFINED_LIMIT the interval is nan and `words` says so. Raises ValueError for domains or tasks that do not match.
    """
    _same_domains(student, base, teacher)
    means: dict[str, tuple[float, float, float]] = {}
    sampled: dict[str, np.ndarray] = {}
    for domain in student:
        rows = [np.atleast_2d(np.asarray(x[domain], dtype=np.float64)).mean(axis=0) for x in (student, base, teacher)]
        sizes = {row.size for row in rows}
        if len(sizes) != 1 or sizes == {0}:
            raise ValueError(f"paired_bootstrap: {domain} needs the same tasks for student, base and teacher, "
                             f"got {[row.size for row in rows]}")
        weights = _resample_weights(domain, rows[0].size, resamples, seed)
        s, b, t = (weights @ row for row in rows)
        with np.errstate(divide="ignore", invalid="ignore"):
            sampled[domain] = np.where(t - b > 1e-12, (s - b) / (t - b), np.nan)
        means[domain] = tuple(float(row.mean()) for row in rows)
    point = normalised_score(*({d: m[i] for d, m in means.items()} for i in range(3)))
    samples = np.mean(list(sampled.values()), axis=0)
    words = list(point.words)
    undefined = float(np.isnan(samples).mean())
    low, high = _percentiles(samples, confidence)
    if undefined > UNDEFINED_LIMIT:
        low = high = math.nan
        if not words:
            words.append(f"no interval: in {undefined:.0%} of the resamples a teacher is not above the base; "
                         "evaluate on more tasks")
    intervals = {d: _percentiles(x, confidence) for d, x in sampled.items()}
    return PairedBootstrap(point.mean, low, high, point.by_domain, intervals, undefined, tuple(words), samples)


def paired_difference(first: PairedBootstrap, second: PairedBootstrap, *,
                      confidence: float = 0.95) -> tuple[float, float, float]:
    """(difference, low, high) of two normalised scores that were resampled on the same tasks with the same seed."""
    if first.samples.shape != second.samples.shape:
        raise ValueError("paired_difference: the two scores have different numbers of resamples")
    return first.value - second.value, *_percentiles(first.samples - second.samples, confidence)


def _same_domains(*scores: Mapping[str, object]) -> None:
    names = [set(s) for s in scores]
    if not names[0] or any(n != names[0] for n in names):
        raise ValueError("normalised score: student, base and teacher need the same domains, got "
                         + ", ".join(str(sorted(n)) for n in names))


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


@functools.lru_cache(maxsize=8)
def _resample_weights(name: str, n: int, resamples: int, seed: int) -> np.ndarray:
    """[resamples, n] weights, each row the counts of n draws with replacement divided by n. Kept for the next model."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode()), n])
    weights = rng.multinomial(n, np.full(n, 1.0 / n), size=resamples) / n
    weights.setflags(write=False)
    return weights


def _percentiles(samples: np.ndarray, confidence: float) -> tuple[float, float]:
    _z(confidence)
    samples = samples[~np.isnan(samples)]
    if not samples.size:
        return math.nan, math.nan
    low, high = np.quantile(samples, [0.5 - confidence / 2, 0.5 + confidence / 2])
    return float(low), float(high)
