"""Strategies: what weight each decision point has in a draw. Pure functions of the index, the step and the scores.

    uniform        w = 1
    uniform_depth  w = 1 / (candidates at this depth)
    geometric      w = κ^t                               ReOPD (2607.04763)
    curriculum     w = share of the turn inside a window of relative depth that moves with the step
                                                         back to front: reverse curricula (1707.05300, 2402.05808)
    weighted       w = (1 − ρ) · s^a / Σ s^a + ρ / n     prioritised replay (1511.05952), s = max(score, floor)
    pivot          most of the mass on the points whose last measured score is above a threshold
                                                         after the pivots of PivotRL (2603.21383)

t is the turn number (0 for the first). A strategy sees the index only: no tokens, and never what was played at a point.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from prefix_store.index import PointIndex
from prefix_store.scores import Scores


class NothingToSelect(ValueError):
    """No decision point can be drawn; the message says what ruled them out."""


class Strategy(Protocol):
    """Weights for drawing.

    by_step   whether the weights change with the step
    scores    optional: names of the scores that it reads. With some, it is called with a fourth argument, the table of
              measured and supplied scores (prefix_store.scores.Scores), and again whenever a score changed
    describe  optional: (index, rows, step, scores) -> JSON values for the statistics of a step
    """

    by_step: bool

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int) -> np.ndarray:
        """float64 [n], each ≥ 0 and not all 0: the weight of each candidate row of the index at `step`."""


@dataclasses.dataclass(frozen=True)
class Uniform:
    """Every decision point alike: a trajectory with more turns is met more often."""

    by_step = False

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int) -> np.ndarray:
        return np.ones(len(rows))


@dataclasses.dataclass(frozen=True)
class UniformDepth:
    """Every depth (turn number) that occurs alike, and alike within a depth, however few trajectories reach it."""

    by_step = False

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int) -> np.ndarray:
        depth = index.turn[rows]
        return 1.0 / np.bincount(depth)[depth]


@dataclasses.dataclass(frozen=True)
class Geometric:
    """A decision point at turn t has weight kappa^t: below 1 early turns come more often, above 1 late ones.

    ReOPD (arXiv 2607.04763) draws the step of a teacher's trajectory so, with kappa 0.6, to stay where the student would
    get by itself.
    """

    kappa: float = 0.8
    by_step = False

    def __post_init__(self) -> None:
        if not (self.kappa > 0 and np.isfinite(self.kappa)):
            raise ValueError(f"kappa is {self.kappa}; it must be a finite number above 0")

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int) -> np.ndarray:
        depth = index.turn[rows].astype(np.float64)
        # weights are relative: measured from the end that weighs most, no power overflows
        reference = depth.min() if self.kappa < 1 else depth.max()
        return self.kappa ** (depth - reference)


@dataclasses.dataclass(frozen=True)
class Curriculum:
    """A window of relative depth that moves through the trajectories over `steps` steps.

    Turn t of n covers the relative depths [t/n, (t+1)/n]; its weight is the share of these that lies inside the window,
    so every trajectory has a point in every window, whatever its length.

    direction  "front_to_back": from the first turns to the last; "back_to_front": from the last, where little is left
               to do, to the first, as in reverse curricula (Florensa et al. 1707.05300; R3, 2402.05808)
    steps      over which the window moves; from then on it stays. None: the run's number of steps
    width      of the window, a share of a trajectory in (0, 1]; 1 is `uniform`
    widen      True: what was reached stays in the window, which ends as the whole trajectory; False: it moves on
    """

    direction: str = "front_to_back"
    steps: int | None = None
    width: float = 0.25
    widen: bool = False
    by_step = True

    def __post_init__(self) -> None:
        if self.direction not in ("front_to_back", "back_to_front"):
            raise ValueError(f"direction is {self.direction!r}; use 'front_to_back' or 'back_to_front'")
        if self.steps is None:
            raise ValueError("steps is not known: say over how many steps the window moves (a run's own number of "
                             "steps is taken where one is given)")
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ValueError(f"steps is {self.steps!r}; it must be a whole number of at least 1")
        if not 0 < self.width <= 1:
            raise ValueError(f"width is {self.width}; it is a share of a trajectory, above 0 and at most 1")

    def window(self, step: int) -> tuple[float, float]:
        """The relative depths [low, high] that are drawn from at `step`."""
        progress = min(max(step, 0) / max(self.steps - 1, 1), 1.0)
        high = self.width + (1.0 - self.width) * progress
        low = 0.0 if self.widen else high - self.width
        return (low, high) if self.direction == "front_to_back" else (1.0 - high, 1.0 - low)

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int) -> np.ndarray:
        low, high = self.window(step)
        turn, turns = index.turn[rows].astype(np.float64), index.turns[rows].astype(np.float64)
        inside = np.minimum((turn + 1) / turns, high) - np.maximum(turn / turns, low)
        # rounding at the border of the window must not leave slivers that are drawn once in 1e16
        return np.where(inside * turns > 1e-9, np.minimum(inside * turns, 1.0), 0.0)

    def describe(self, index: PointIndex, rows: np.ndarray, step: int, scores: Scores) -> dict[str, Any]:
        low, high = self.window(step)
        return {"window": [low, high]}


def _share(name: str, value: float, *, one: bool) -> None:
    if not (0 <= value < 1 or (one and value == 1)):
        raise ValueError(f"{name} is {value}; it is a share of the draws, at least 0 and {'at most' if one else 'below'} 1")


class Weighted:
    """Points with a high score come more often: w = (1 − ρ) · u / Σ u + ρ / n over the n candidates, u = max(s, floor)^a,
    or u = exp(s / temperature) where a temperature is given.

    score        name of the score: "reverse_kl", "k1", "teacher_entropy", "student_entropy", "disagreement" (measured in
                 training), "outcome.success", "outcome.reward", … (stored), or a column of supplied scores
    exponent     a; 0 is uniform, above 1 sharper, below 0 prefers low scores (then floor must be above 0)
    temperature  None, or the softmax temperature in units of the score (exponent and floor then do nothing)
    floor        smallest score that counts, in units of the score: what scores nothing can still come
    unmeasured   points that were never measured: "optimistic" gives them the largest weight of any measured point, so
                 that they are soon measured (as new transitions in prioritised replay, 1511.05952), "mean" the mean
                 weight, a number that score
    remeasure    ρ: share of the draws that go to all candidates alike, so that every score is measured again
    """

    by_step = False

    def __init__(self, score: str = "reverse_kl", exponent: float = 1.0, temperature: float | None = None,
                 floor: float = 0.01, unmeasured: str | float = "optimistic", remeasure: float = 0.1):
        if not np.isfinite(exponent):
            raise ValueError(f"exponent is {exponent}; it must be finite")
        if temperature is not None and not (temperature > 0 and np.isfinite(temperature)):
            raise ValueError(f"temperature is {temperature}; it must be above 0")
        if not (floor >= 0 and np.isfinite(floor)) or (floor == 0 and exponent < 0):
            raise ValueError(f"floor is {floor}; it must be at least 0, and above 0 with a negative exponent")
        if isinstance(unmeasured, str) and unmeasured not in ("optimistic", "mean"):
            raise ValueError(f"unmeasured is {unmeasured!r}; use 'optimistic', 'mean' or a number")
        if not isinstance(unmeasured, str) and not np.isfinite(unmeasured):
            raise ValueError(f"unmeasured is {unmeasured}; it must be finite")
        _share("remeasure", remeasure, one=True)
        self.exponent, self.temperature, self.floor = float(exponent), temperature, float(floor)
        self.unmeasured, self.remeasure = unmeasured, float(remeasure)
        self.scores = (str(score),)

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int, scores: Scores) -> np.ndarray:
        score = scores.of(self.scores[0], rows)
        known = ~np.isnan(score)
        if not isinstance(self.unmeasured, str):
            score, known = np.where(known, score, float(self.unmeasured)), np.ones(len(rows), dtype=bool)
        weights = np.ones(len(rows))
        if known.any():
            weights[known] = self._of(score[known])
            if weights[known].any():
                weights[~known] = weights[known].max() if self.unmeasured == "optimistic" else weights[known].mean()
            else:  # every measured point scores 0 and floor is 0: what was never measured is all that is left
                weights[~known] = 1.0
        total = weights.sum()
        if total == 0:
            return np.full(len(rows), self.remeasure)
        return (1.0 - self.remeasure) * weights / total + self.remeasure / len(rows)

    def _of(self, score: np.ndarray) -> np.ndarray:
        if self.temperature is not None:
            return np.exp((score - score.max()) / self.temperature)
        score = np.maximum(score, self.floor)
        # weights are relative: no power of a ratio of at most 1 overflows
        reference = score.max() if self.exponent >= 0 else score.min()
        return (score / reference) ** self.exponent if reference > 0 else np.zeros(len(score))


class Pivot:
    """Most draws go to pivots: the points whose last measured score is above the threshold.

    Of the draws the share `remeasure` goes to points that were measured at or below the threshold, and `unmeasured` to
    points that were never measured, alike within each; the rest goes to the pivots. A point moves between the three as it
    is measured again. Where one of them is empty its share goes to the others in proportion; where no point is a pivot
    and `none_left` is "all", the points of the others are drawn alike, "stop" raises NothingToSelect.

    score       name of the score, see Weighted: "reverse_kl", "disagreement" or another
    threshold   in units of the score; or
    quantile    the threshold is this quantile of the candidates' measured scores, anew whenever a score changes
    remeasure, unmeasured   shares of the draws; both 0 draws from supplied scores alone
    none_left   "all" or "stop"

    PivotRL (2603.21383) keeps the turns whose sampled actions end differently; here the teacher's own measure takes the
    place of outcomes.
    """

    by_step = False

    def __init__(self, score: str = "reverse_kl", threshold: float | None = None, quantile: float | None = None,
                 remeasure: float = 0.1, unmeasured: float = 0.3, none_left: str = "all"):
        if (threshold is None) == (quantile is None):
            raise ValueError("give either threshold (in units of the score) or quantile (of the measured scores)")
        if threshold is not None and not np.isfinite(threshold):
            raise ValueError(f"threshold is {threshold}; it must be finite")
        if quantile is not None and not 0 < quantile < 1:
            raise ValueError(f"quantile is {quantile}; it must lie between 0 and 1")
        _share("remeasure", remeasure, one=False)
        _share("unmeasured", unmeasured, one=False)
        if remeasure + unmeasured >= 1:
            raise ValueError(f"remeasure {remeasure} and unmeasured {unmeasured} leave no draws to the pivots")
        if none_left not in ("all", "stop"):
            raise ValueError(f"none_left is {none_left!r}; use 'all' or 'stop'")
        self.threshold, self.quantile = threshold, quantile
        self.shares = (1.0 - remeasure - unmeasured, float(remeasure), float(unmeasured))
        self.none_left = none_left
        self.scores = (str(score),)

    def parts(self, rows: np.ndarray, scores: Scores) -> tuple[np.ndarray, float]:
        """int [n] with 0 for pivots, 1 for points measured at or below the threshold, 2 for points never measured; and
        the threshold (NaN where a quantile is wanted and nothing is measured)."""
        score = scores.of(self.scores[0], rows)
        known = ~np.isnan(score)
        # scores are kept as float32: compare with the threshold as it would be kept
        threshold = None if self.threshold is None else float(np.float32(self.threshold))
        if threshold is None:
            threshold = float(np.quantile(score[known], self.quantile)) if known.any() else float("nan")
        return np.where(~known, 2, np.where(score > threshold, 0, 1)), threshold

    def __call__(self, index: PointIndex, rows: np.ndarray, step: int, scores: Scores) -> np.ndarray:
        part, threshold = self.parts(rows, scores)
        counts = np.bincount(part, minlength=3)
        if counts[0] == 0:
            if self.none_left == "stop":
                raise NothingToSelect(
                    f"no decision point has a {self.scores[0]} above {threshold:g} ({counts[1]} are at or below it, "
                    f"{counts[2]} were never measured); lower the threshold, supply scores, or set none_left: all"
                )
            return np.ones(len(rows))
        mass = np.where(counts > 0, self.shares, 0.0)
        return (mass / mass.sum() / np.maximum(counts, 1))[part]

    def describe(self, index: PointIndex, rows: np.ndarray, step: int, scores: Scores) -> dict[str, Any]:
        part, threshold = self.parts(rows, scores)
        pivots, below, unmeasured = np.bincount(part, minlength=3).tolist()
        found = {"pivots": pivots, "below": below, "unmeasured": unmeasured}
        return found if np.isnan(threshold) else {"threshold": threshold, **found}


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "uniform": Uniform,
    "uniform_depth": UniformDepth,
    "geometric": Geometric,
    "curriculum": Curriculum,
    "weighted": Weighted,
    "pivot": Pivot,
}


def make_strategy(name: str, options: Mapping[str, Any] | None = None, *, steps: int | None = None) -> Strategy:
    """The strategy registered under `name`, or made by the factory at the dotted path `package.module:factory`.

    steps  the run's number of steps: given to a `curriculum` that has none of its own
    Raises ValueError naming the strategy for an unknown name, a path that cannot be imported, or options it refuses.
    """
    factory: Callable[..., Strategy] | None
    given = dict(options or {})
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            factory = getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError) as error:
            raise ValueError(f"selection strategy {name!r} cannot be imported: {error}") from error
    else:
        factory = STRATEGIES.get(name)
        if factory is None:
            raise ValueError(
                f"unknown selection strategy {name!r}; use one of {', '.join(STRATEGIES)} or package.module:factory"
            )
        known = inspect.signature(factory).parameters
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise ValueError(f"selection strategy {name!r} refuses its options {given}: it has no option "
                             f"{', '.join(map(repr, unknown))}; there is {', '.join(known) or 'none'}")
    if factory is Curriculum and given.get("steps") is None:
        given["steps"] = steps
    try:
        made = factory(**given)
        if not callable(made) or not hasattr(made, "by_step"):
            raise TypeError(f"it made {type(made).__name__}, which is no strategy: a callable (index, rows, step) -> weights "
                            "with an attribute by_step")
        return made
    except (TypeError, ValueError) as error:
        raise ValueError(f"selection strategy {name!r} refuses its options {dict(options or {})}: {error}") from error
