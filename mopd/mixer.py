"""What comes next: oversampling, launch order, domain shares, and the exact composition of a step's batch.

Formulas are pure functions; the state machines keep plain numbers, own no clients, and save and load themselves.
Nothing depends on the order in which work finishes. Source of the mixer: MiMo-V2.6 technical report, section 6.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "Composer",
    "DomainSchedule",
    "StepPlan",
    "adaptive_shares",
    "compose",
    "largest_remainder",
    "launch_weights",
    "next_launch",
    "oversampling",
]


def oversampling(
    demand: Sequence[float], duration: Sequence[float], *, mean: float, minimum: float, maximum: float
) -> list[float]:
    """Share p_i of extra work in flight per domain: p_i = clip(c·t_i − 1, minimum, maximum), Σ m_i p_i / Σ m_i = mean.

    demand m_i: groups needed per step (B_i / r_i); duration t_i > 0 in any one unit. Slow domains get more in flight.
    c is solved exactly: the mean is piecewise linear and rising in c, with kinks where a domain meets a bound. Where
    it is flat (every domain with demand at a bound) the smallest c is taken.

    Raises ValueError if the mean lies outside [minimum, maximum], a duration is not positive, a demand is negative, all
    demands are zero, lengths differ, or a number is not finite.
    """
    m, t = [float(x) for x in _numbers("demand", demand)], [float(x) for x in _numbers("duration", duration)]
    if len(m) != len(t) or not m:
        raise ValueError(f"demand and duration need one number per domain, got {len(m)} and {len(t)}")
    for i, (need, seconds) in enumerate(zip(m, t, strict=True)):
        if seconds <= 0:
            raise ValueError(f"duration of domain {i} must be positive, got {seconds}")
        if need < 0:
            raise ValueError(f"demand of domain {i} must not be negative, got {need}")
    if not all(math.isfinite(x) for x in (mean, minimum, maximum)) or not minimum <= mean <= maximum:
        raise ValueError(f"mean oversampling {mean} must lie between minimum {minimum} and maximum {maximum}")
    total = math.fsum(m)
    if total <= 0:
        raise ValueError("no domain has any demand, so there is no mean oversampling to reach")

    def level(c: float) -> float:
        return math.fsum(need * _clip(c * s - 1.0, minimum, maximum) for need, s in zip(m, t, strict=True)) / total

    kinks = sorted({(bound + 1.0) / s for s in t for bound in (minimum, maximum)})
    right = next((i for i, c in enumerate(kinks) if level(c) >= mean), len(kinks) - 1)
    c = kinks[right]
    if right > 0 and level(c) > mean:
        # Between two kinks the same domains are free; with their sums the linear equation is solved without bisection.
        left, middle = kinks[right - 1], (kinks[right - 1] + c) / 2
        free = [i for i, s in enumerate(t) if minimum < middle * s - 1.0 < maximum]
        fixed = math.fsum(
            m[i] * _clip(middle * s - 1.0, minimum, maximum) for i, s in enumerate(t) if i not in set(free)
        )
        slope = math.fsum(m[i] * t[i] for i in free)
        if slope > 0:  # 0 only where minimum and maximum differ by less than a rounding error
            c = _clip((mean * total - fixed + math.fsum(m[i] for i in free)) / slope, left, c)
    return [_clip(c * s - 1.0, minimum, maximum) for s in t]


def launch_weights(
    target: Sequence[float], acceptance: Sequence[float], accepted: Sequence[float], *, alpha: float = 0.5
) -> list[float]:
    """Weight of each domain for the next launch: w_i = α B_i/r_i + (1 − α) (B_i − a_i)₊ / r_i, to be fed to
    `next_launch`.

    target B_i groups per step, acceptance rate r_i in (0, 1], a_i groups accepted so far this step. α = 1 keeps the
    steady mix, α = 0 chases what is missing. Raises ValueError for numbers outside those ranges.
    """
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    b, r, a = _numbers("target", target), _numbers("acceptance", acceptance), _numbers("accepted", accepted)
    if not len(b) == len(r) == len(a):
        raise ValueError(
            f"target, acceptance and accepted need one number per domain, got {len(b)}, {len(r)}, {len(a)}"
        )
    for i, (goal, rate, done) in enumerate(zip(b, r, a, strict=True)):
        if not 0.0 < rate <= 1.0:
            raise ValueError(f"acceptance of domain {i} must lie in (0, 1], got {rate}")
        if goal < 0 or done < 0:
            raise ValueError(f"target and accepted of domain {i} must not be negative, got {goal} and {done}")
    return [
        (alpha * goal + (1.0 - alpha) * max(goal - done, 0.0)) / rate for goal, rate, done in zip(b, r, a, strict=True)
    ]


def next_launch(weights: Sequence[float], credit: Sequence[float]) -> tuple[int, list[float]]:
    """Smooth weighted round-robin: (index to launch, new credit). Start with zeros; keep the credit between calls.

    Each call adds the weights to the credits, takes the largest (the first of equals) and charges it the sum of the
    weights, so launches are spread evenly in proportion to the weights. Raises ValueError if no weight is positive.
    """
    if len(weights) != len(credit):
        raise ValueError(f"{len(weights)} weights and {len(credit)} credits do not match")
    total = math.fsum(weights)
    if not total > 0 or min(weights) < 0:
        raise ValueError(f"launch weights must not be negative and one must be positive, got {list(weights)}")
    new = [c + w for c, w in zip(credit, weights, strict=True)]
    chosen = max((i for i, w in enumerate(weights) if w > 0), key=lambda i: (new[i], -i))
    new[chosen] -= total
    return chosen, new


def adaptive_shares(
    base: Sequence[float],
    kl: Sequence[float],
    *,
    gamma: float = 1.0,
    minimum: float = 0.0,
    maximum: float = 1.0,
    previous: Sequence[float] | None = None,
    smoothing: float = 0.0,
) -> list[float]:
    """Shares moved towards the domains with most left to learn; they sum to 1.

    new_d ∝ base_d · kl_d^gamma; values outside [minimum, maximum] are set to the bound and the others rescaled so
    that the sum is 1, until none is outside; then smoothing · previous + (1 − smoothing) · new. kl_d ≥ 0 is the
    smoothed reverse KL per token of d's own samples. If nothing is left to learn anywhere (Σ = 0) the base shares
    stand in for new.

    Raises ValueError for negative or non-finite numbers, base shares that do not sum to a positive number, or bounds
    that no shares can satisfy.
    """
    b, k = _numbers("base", base), _numbers("kl", kl)
    count = len(b)
    if count == 0 or len(k) != count or (previous is not None and len(previous) != count):
        raise ValueError("base, kl and previous need one number per domain")
    if min(b) < 0 or math.fsum(b) <= 0:
        raise ValueError(f"base shares must not be negative and must have a positive sum, got {list(base)}")
    if min(k) < 0:
        raise ValueError(f"kl must not be negative, got {list(kl)}; smooth an estimator that cannot be, such as k3")
    if not 0.0 <= smoothing <= 1.0:
        raise ValueError(f"smoothing must lie in [0, 1], got {smoothing}")
    if not gamma >= 0.0:
        raise ValueError(f"gamma must not be negative, got {gamma}")
    if not 0.0 <= minimum <= maximum <= 1.0 or minimum * count > 1.0 + 1e-12 or maximum * count < 1.0 - 1e-12:
        raise ValueError(f"no {count} shares between {minimum} and {maximum} sum to 1")
    raw = [s * x**gamma for s, x in zip(b, k, strict=True)]
    if math.fsum(raw) <= 0:
        raw = list(b)
    new = _bounded(raw, minimum, maximum)
    if previous is None:
        return new
    before = _numbers("previous", previous)
    return [smoothing * p + (1.0 - smoothing) * n for p, n in zip(before, new, strict=True)]


def _bounded(raw: Sequence[float], minimum: float, maximum: float) -> list[float]:
    """raw scaled to sum 1, with the clamping loop of `adaptive_shares`."""
    total = math.fsum(raw)
    shares = [x / total for x in raw]
    held: dict[int, float] = {}
    while True:
        outside = {
            i: _clip(s, minimum, maximum) for i, s in enumerate(shares) if i not in held and not minimum <= s <= maximum
        }
        if not outside:
            return shares
        held |= outside
        rest = 1.0 - math.fsum(held.values())
        free = [i for i in range(len(raw)) if i not in held]
        if not free and abs(rest) > 1e-12:
            return _fill(raw, minimum, maximum)
        mass = math.fsum(shares[i] for i in free)
        for i in range(len(raw)):
            if i in held:
                shares[i] = held[i]
            else:
                shares[i] = shares[i] / mass * rest if mass > 0 else rest / len(free)


def _fill(raw: Sequence[float], minimum: float, maximum: float) -> list[float]:
    """clip(factor · raw, minimum, maximum) with the factor that makes the sum 1, found by bisection.

    Stands in where clamping both ends at once has left no share free although the sum is not 1 yet.
    """
    weights = [max(x, max(raw) * 1e-12) for x in raw]  # a share of zero must still be able to take part
    low, high = 0.0, maximum / min(weights)
    for _ in range(200):
        factor = (low + high) / 2
        if math.fsum(_clip(factor * w, minimum, maximum) for w in weights) < 1.0:
            low = factor
        else:
            high = factor
    return [_clip(high * w, minimum, maximum) for w in weights]


class DomainSchedule:
    """Adaptive shares over a run: smooths each domain's KL, moves the shares, and holds domains that stopped learning.

    A domain whose smoothed KL has not reached a new low for `patience` updates is *stalled*: it may keep or lose
    share, but not gain (it may be unlearnable). `update` returns what to say about it. State is plain numbers:
    state_dict.
    """

    def __init__(
        self,
        base: Mapping[str, float],
        *,
        gamma: float = 1.0,
        minimum: float = 0.0,
        maximum: float = 1.0,
        smoothing: float = 0.8,
        kl_smoothing: float = 0.5,
        patience: int = 10,
    ):
        if patience < 1:
            raise ValueError(f"patience must be at least 1 step, got {patience}")
        if not 0.0 <= kl_smoothing < 1.0:
            raise ValueError(f"kl_smoothing must lie in [0, 1), got {kl_smoothing}")
        total = math.fsum(base.values())
        if not base or total <= 0 or min(base.values()) < 0:
            raise ValueError(f"base shares must not be negative and must have a positive sum, got {dict(base)}")
        self.base = {d: s / total for d, s in base.items()}
        self.gamma, self.minimum, self.maximum = gamma, minimum, maximum
        self.smoothing, self.kl_smoothing, self.patience = smoothing, kl_smoothing, patience
        self.shares = dict(self.base)
        self.kl: dict[str, float] = {}
        self.best: dict[str, float] = {}
        self.since_best: dict[str, int] = dict.fromkeys(self.base, 0)
        adaptive_shares(list(self.base.values()), [1.0] * len(self.base), minimum=minimum, maximum=maximum)

    def update(self, kl: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
        """New shares after a step whose mean reverse KL per token by domain is `kl` (a domain without tokens is left
        out), and messages. Shares move once every domain has been measured. A negative or non-finite value raises
        ValueError."""
        for domain, value in kl.items():
            if domain not in self.base:
                raise ValueError(f"unknown domain {domain!r}; there are: {', '.join(self.base)}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"reverse KL of domain {domain!r} must be finite and not negative, got {value}")
            old = self.kl.get(domain, value)
            self.kl[domain] = self.kl_smoothing * old + (1.0 - self.kl_smoothing) * value
            if self.kl[domain] < self.best.get(domain, math.inf):
                self.best[domain], self.since_best[domain] = self.kl[domain], 0
            else:
                self.since_best[domain] += 1
        names = list(self.base)
        if any(d not in self.kl for d in names):
            return dict(self.shares), []
        moved = adaptive_shares(
            [self.base[d] for d in names], [self.kl[d] for d in names], gamma=self.gamma, minimum=self.minimum,
            maximum=self.maximum, previous=[self.shares[d] for d in names], smoothing=self.smoothing,
        )  # fmt: skip
        new = dict(zip(names, moved, strict=True))
        stalled = [d for d in names if self.since_best[d] >= self.patience and new[d] > self.shares[d]]
        messages = [
            f"domain {d}: reverse KL has not fallen for {self.since_best[d]} steps; its share stays at "
            f"{self.shares[d]:.3f} instead of growing (is its teacher out of reach?)"
            for d in stalled
        ]
        if stalled:
            kept = math.fsum(self.shares[d] for d in stalled)
            rest = math.fsum(new[d] for d in names if d not in stalled)
            factor = (1.0 - kept) / rest if rest > 0 else 0.0
            new = {d: self.shares[d] if d in stalled or rest <= 0 else new[d] * factor for d in names}
        self.shares = new
        return dict(new), messages

    def state_dict(self) -> dict[str, Any]:
        return {
            "shares": dict(self.shares),
            "kl": dict(self.kl),
            "best": dict(self.best),
            "since_best": dict(self.since_best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["shares"]) != set(self.base):
            raise ValueError(
                f"the saved schedule is for domains {sorted(state['shares'])}, this run has {sorted(self.base)}"
            )
        self.shares, self.kl, self.best = dict(state["shares"]), dict(state["kl"]), dict(state["best"])
        self.since_best = {d: int(n) for d, n in state["since_best"].items()}


def largest_remainder(targets: Sequence[float], carry: Sequence[float] | None = None) -> tuple[list[int], list[float]]:
    """Whole numbers for fractional targets, and what is owed afterwards: (counts, new carry).

    Each number gets the whole part of target + carry (what it was owed, or negative what it got too early); what is
    left of the rounded sum goes to the largest remainders, the first of equals. counts + new carry = targets + carry,
    so over steps nothing is lost. Σ counts = Σ targets when that is whole and the carry sums to 0. Counts are never
    negative.
    """
    t = _numbers("targets", targets)
    if t and min(t) < 0:
        raise ValueError(f"targets must not be negative, got {list(targets)}")
    owed = [0.0] * len(t) if carry is None else _numbers("carry", carry)
    if len(owed) != len(t):
        raise ValueError(f"{len(t)} targets and {len(owed)} carried remainders do not match")
    wanted = [a + b for a, b in zip(t, owed, strict=True)]
    # 1e-9: a sum of shares such as 0.1 + 0.2 + 0.7 must not lose a group to binary rounding.
    counts = [max(math.floor(w + 1e-9), 0) for w in wanted]
    left = max(round(math.fsum(wanted)), 0) - sum(counts)
    order = sorted(range(len(t)), key=lambda i: (-round(wanted[i] - counts[i], 9), i))
    while left > 0 and order:
        for i in order[:left]:
            counts[i] += 1
        left -= min(left, len(order))
    while left < 0:  # some number got more than its due earlier, and the floor at 0 hands out too much now
        giver = min((i for i in order if counts[i] > 0), key=lambda i: (wanted[i] - counts[i], -i))
        counts[giver] -= 1
        left += 1
    return counts, [w - c for w, c in zip(wanted, counts, strict=True)]


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """Groups of one step: `groups` by domain, `cells` by (domain, stream); cells of a domain sum to its groups. `shares` and
    `streams` are what it was made of: domain → share, domain → {stream: share}, each summing to 1."""

    step: int
    groups: dict[str, int]
    cells: dict[tuple[str, str], int]
    shares: dict[str, float] = dataclasses.field(default_factory=dict)
    streams: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(self.groups.values())


class Composer:
    """Composes one step after the other: exactly `groups_per_step` groups, shared among domains, then among their
    streams.

    Fractions are carried over steps, by domain and by stream within a domain, so that over n steps every cell has its
    share to within a group or so. Depends on the sequence of shares only. `stream_shares`: {stream: share}, or
    {domain: {stream: share}}; each is normalised. Keep state_dict with the run's state.
    """

    def __init__(
        self,
        domains: Sequence[str],
        groups_per_step: int,
        stream_shares: Mapping[str, float] | Mapping[str, Mapping[str, float]] | None = None,
    ):
        if groups_per_step < 1:
            raise ValueError(f"a step needs at least 1 group, got {groups_per_step}")
        if not domains or len(set(domains)) != len(domains):
            raise ValueError(f"domains must be distinct and at least one, got {list(domains)}")
        self.domains, self.groups_per_step, self.step = tuple(domains), groups_per_step, 0
        self.streams = {d: _stream_shares(d, stream_shares or {"rollout": 1.0}) for d in domains}
        self.carry = [0.0] * len(self.domains)
        self.stream_carry = {d: [0.0] * len(s) for d, s in self.streams.items()}

    def set_streams(self, streams: Mapping[str, Mapping[str, float]]) -> None:
        """From the next step on domain d's groups are shared among its streams as streams[d] says; a domain that is left
        out keeps its shares. The streams must be those that the composer was made with, in any order; a share may be 0."""
        for domain, shares in streams.items():
            if domain not in self.streams or set(shares) != set(self.streams[domain]):
                raise ValueError(f"stream shares of domain {domain!r} must name {', '.join(self.streams.get(domain, ()))}, "
                                 f"got {', '.join(shares)}")
            own = _stream_shares(domain, shares)
            self.streams[domain] = {stream: own[stream] for stream in self.streams[domain]}

    def next(self, shares: Mapping[str, float]) -> StepPlan:
        """The plan of the next step under domain shares (normalised here; every domain must have one)."""
        missing = [d for d in self.domains if d not in shares]
        if missing:
            raise ValueError(f"no share for domain {', '.join(missing)}")
        total = math.fsum(shares[d] for d in self.domains)
        if not (total > 0 and math.isfinite(total)):
            raise ValueError(f"domain shares must have a positive sum, got {dict(shares)}")
        parts_of = {d: shares[d] / total for d in self.domains}
        targets = [part * self.groups_per_step for part in parts_of.values()]
        counts, self.carry = largest_remainder(targets, self.carry)
        groups = dict(zip(self.domains, counts, strict=True))
        cells: dict[tuple[str, str], int] = {}
        for domain, count in groups.items():
            streams = self.streams[domain]
            parts, self.stream_carry[domain] = largest_remainder(
                [count * share for share in streams.values()], self.stream_carry[domain]
            )
            cells |= {(domain, s): n for s, n in zip(streams, parts, strict=True) if n}
        plan = StepPlan(self.step, groups, cells, parts_of, {d: dict(parts) for d, parts in self.streams.items()})
        self.step += 1
        return plan

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "carry": list(self.carry),
            "stream_carry": {d: list(c) for d, c in self.stream_carry.items()},
            "streams": {d: dict(s) for d, s in self.streams.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if set(state["stream_carry"]) != set(self.domains):
            raise ValueError(
                f"the saved plan is for domains {sorted(state['stream_carry'])}, this run has {sorted(self.domains)}"
            )
        self.step, self.carry = int(state["step"]), [float(x) for x in state["carry"]]
        self.stream_carry = {d: [float(x) for x in state["stream_carry"][d]] for d in self.domains}
        for domain, shares in state.get("streams", {}).items():  # what set_streams moved, to the last bit
            if set(shares) != set(self.streams[domain]):
                raise ValueError(f"the saved plan of domain {domain!r} is for streams {sorted(shares)}, this run has "
                                 f"{sorted(self.streams[domain])}")
            self.streams[domain] = {stream: float(shares[stream]) for stream in self.streams[domain]}


def compose(
    step: int,
    shares: Mapping[str, float],
    groups_per_step: int,
    stream_shares: Mapping[str, float] | Mapping[str, Mapping[str, float]] | None = None,
) -> StepPlan:
    """The plan of step `step` ≥ 0 when shares never change: a pure function of its arguments (it replays a
    Composer)."""
    if step < 0:
        raise ValueError(f"step must not be negative, got {step}")
    composer = Composer(tuple(shares), groups_per_step, stream_shares)
    for _ in range(step):
        composer.next(shares)
    return composer.next(shares)


def _stream_shares(domain: str, shares: Mapping[str, Any]) -> dict[str, float]:
    nested = any(isinstance(v, Mapping) for v in shares.values())
    if nested and domain not in shares:
        raise ValueError(f"no stream shares for domain {domain!r}; there are: {', '.join(shares)}")
    own = dict(shares[domain]) if nested else dict(shares)
    total = math.fsum(own.values())
    if not own or total <= 0 or min(own.values()) < 0:
        raise ValueError(f"stream shares of domain {domain!r} must not be negative and need a positive sum, got {own}")
    return {stream: value / total for stream, value in own.items()}


def _numbers(name: str, values: Sequence[float]) -> list[float]:
    numbers = [float(x) for x in values]
    if not all(math.isfinite(x) for x in numbers):
        raise ValueError(f"{name} must be finite, got {numbers}")
    return numbers


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)
