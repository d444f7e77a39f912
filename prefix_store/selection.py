"""Which decision points next: strategies, filters and draws that are seeded and exactly restartable.

A strategy gives every candidate a weight; the Selector draws by those weights. What is drawn depends on the seed, on
what the version of the store holds and on (step, domain, stream), never on workers, clocks or the order of other draws.
Reads the index only: no tokens, and never what was played at a point.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from prefix_store.index import PointIndex
from prefix_store.trajectory import SOURCE_KINDS, DecisionPoint

STREAM_SOURCES = {"teacher_prefix": ("teacher",), "sft_prefix": ("expert", "demonstration")}
DRAWS = ("replacement", "distinct", "epoch")


class NothingToSelect(ValueError):
    """No decision point passes the filters; the message counts what each filter left."""


class Strategy(Protocol):
    """Weights for drawing. `by_step` says whether they change with the step."""

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
    """A decision point at turn t has weight kappa^t: below 1 early turns come more often, above 1 late ones."""

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


STRATEGIES: dict[str, Callable[..., Strategy]] = {
    "uniform": Uniform,
    "uniform_depth": UniformDepth,
    "geometric": Geometric,
}


def make_strategy(name: str, options: Mapping[str, Any] | None = None) -> Strategy:
    """The strategy registered under `name`, or made by the factory at the dotted path `package.module:factory`.

    Raises ValueError naming the strategy for an unknown name, a path that cannot be imported, or options it refuses.
    """
    factory: Callable[..., Strategy] | None
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
    try:
        return factory(**dict(options or {}))
    except (TypeError, ValueError) as error:
        raise ValueError(f"selection strategy {name!r} refuses its options {dict(options or {})}: {error}") from error


@dataclasses.dataclass(frozen=True)
class SelectionOptions:
    """How decision points are chosen.

    strategy, options     a name of STRATEGIES or `package.module:factory`, and its keyword arguments
    points_per_sequence   of a drawn trajectory take this many points; 0 or "all": all of them
    success_only          only trajectories that succeeded
    max_prefix_tokens     only points with at most this many tokens before them
    min_turns_from_end    only points with at least this many turns after theirs
    splits                only trajectories of tasks of these splits
    draw                  "replacement": each draw alone; "distinct": no repetition within one call while candidates
                          last; "epoch": no repetition until all candidates were drawn, over the whole run
    stream_sources        stream → source kinds whose trajectories it resumes
    """

    strategy: str = "uniform"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    points_per_sequence: int | str = "all"
    success_only: bool = False
    max_prefix_tokens: int | None = None
    min_turns_from_end: int = 0
    splits: tuple[str, ...] | None = None
    draw: str = "replacement"
    stream_sources: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: dict(STREAM_SOURCES))

    def __post_init__(self) -> None:
        points = self.points_per_sequence
        if points != "all" and (isinstance(points, bool) or not isinstance(points, int) or points < 0):
            raise ValueError(f"points_per_sequence is {points!r}; use a whole number, or 0 or 'all' for all of them")
        if self.draw not in DRAWS:
            raise ValueError(f"draw is {self.draw!r}, none of {', '.join(DRAWS)}")

    @property
    def points(self) -> int:
        """points_per_sequence with "all" as a number no sequence reaches."""
        return self.points_per_sequence if self.points_per_sequence not in (0, "all") else 2**31 - 1


@dataclasses.dataclass
class _Candidates:
    """What one domain and stream may draw: rows of the index, grouped by sequence, and the weights of one step."""

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    step: int | None = None
    weights: np.ndarray | None = None
    sequence_weights: np.ndarray | None = None


class Selector:
    """Draws decision points, or whole trajectories with their points, for (step, domain, stream).

    With draw "replacement" and "distinct" every answer is a pure function of (seed, step, domain, stream) and the
    version of the store. With "epoch" it is one of (seed, domain, stream) and how many were drawn before, which
    `state_dict` keeps: save it with what was trained, and a restarted run goes on exactly there.
    """

    def __init__(self, store: Any, options: SelectionOptions | None = None, seed: int = 0):
        """store is a PrefixStore at its version, or a PointIndex."""
        self.index: PointIndex = store if isinstance(store, PointIndex) else store.index()
        self.options = options or SelectionOptions()
        self.seed = int(seed)
        self.strategy = make_strategy(self.options.strategy, self.options.options)
        if self.options.draw == "epoch" and self.strategy.by_step:
            raise ValueError(f"strategy {self.options.strategy!r} changes by step; draw 'epoch' needs a fixed one")
        self._candidates: dict[tuple[str, str], _Candidates] = {}
        self._orders: dict[tuple, tuple[tuple, np.ndarray]] = {}
        self._drawn: dict[str, int] = {}
        self._histogram: dict[str, dict[str, dict[int, int]]] = {}

    # ------------------------------------------------------------------------------------------------- drawing

    def select(self, step: int, domain: str, stream: str, count: int) -> list[DecisionPoint]:
        """`count` decision points for this step of a domain's stream. Raises NothingToSelect where no point passes the
        filters, ValueError for a stream that resumes no stored trajectories."""
        step = int(step)
        candidates = self._at(step, domain, stream)
        chosen = self._draw(candidates.weights, int(count), "points", step, domain, stream)
        return self._points(candidates.rows[chosen])

    def select_sequences(self, step: int, domain: str, stream: str, count: int) -> list[list[DecisionPoint]]:
        """`count` trajectories, each as its chosen decision points in the order of their turns.

        With m = points_per_sequence, a trajectory s with n_s candidates of weights w is drawn with weight
        Σ w / min(m, n_s), and then m of its points by w without repetition (all, if it has no more): points are met as
        often as when they are drawn one by one, exactly so for m = 1 and for equal weights.
        """
        step, points = int(step), self.options.points
        candidates = self._at(step, domain, stream)
        drawn_before = self._drawn.get(f"sequences/{domain}/{stream}", 0)
        chosen = self._draw(candidates.sequence_weights, int(count), "sequences", step, domain, stream)
        answer = []
        for number, sequence in enumerate(chosen):
            start = candidates.starts[sequence]
            here = slice(start, start + candidates.counts[sequence])
            live = candidates.weights[here] > 0
            rows, weights = candidates.rows[here][live], candidates.weights[here][live]
            if len(rows) > points:
                # an epoch's order knows no step: there the running number names the draw
                place = (drawn_before + number,) if self.options.draw == "epoch" else (step, number)
                order = np.argsort(self._keys(weights, "within", domain, stream, *place), kind="stable")
                rows = rows[np.sort(order[:points])]
            answer.append(self._points(rows))
        return answer

    def available(self, domain: str, stream: str) -> dict[str, int]:
        """How many {"sequences", "decision_points"} a domain's stream can draw from; zeros where nothing passes."""
        rows = self._rows(domain, stream)
        return {"sequences": len(np.unique(self.index.sequence[rows])), "decision_points": len(rows)}

    def require(self, domain: str, stream: str) -> None:
        """Raise NothingToSelect if this stream of the domain has nothing to draw from. Draws nothing."""
        if len(self._rows(domain, stream)) == 0:
            raise NothingToSelect(self._explain(domain, stream))

    def _rows(self, domain: str, stream: str) -> np.ndarray:
        o = self.options
        return self.index.rows(
            domain,
            sources=self._sources(stream),
            splits=o.splits,
            success_only=o.success_only,
            max_prefix_tokens=o.max_prefix_tokens,
            min_turns_from_end=o.min_turns_from_end,
        )

    def _sources(self, stream: str) -> tuple[str, ...]:
        if stream not in self.options.stream_sources:
            known = ", ".join(self.options.stream_sources)
            raise ValueError(f"stream {stream!r} resumes no stored trajectories; the streams that do are {known}")
        return tuple(self.options.stream_sources[stream])

    def _at(self, step: int, domain: str, stream: str) -> _Candidates:
        """The candidates with their weights at `step`."""
        candidates = self._candidates.get((domain, stream))
        if candidates is None:
            self.require(domain, stream)
            rows = self._rows(domain, stream)
            starts = np.flatnonzero(np.diff(self.index.sequence[rows], prepend=-1))
            counts = np.diff(starts, append=len(rows))
            candidates = self._candidates[domain, stream] = _Candidates(rows, starts, counts)
        if candidates.weights is None or (self.strategy.by_step and candidates.step != step):
            weights = np.asarray(self.strategy(self.index, candidates.rows, step), dtype=np.float64)
            if weights.shape != candidates.rows.shape or not np.isfinite(weights).all() or (weights < 0).any():
                raise ValueError(
                    f"strategy {self.options.strategy!r} must give {len(candidates.rows)} finite weights of at least 0"
                )
            if not weights.any():
                raise NothingToSelect(f"strategy {self.options.strategy!r} gives every point of {domain!r} weight 0")
            totals = np.add.reduceat(weights, candidates.starts)
            live = np.add.reduceat((weights > 0).astype(np.int64), candidates.starts)
            candidates.weights, candidates.step = weights, step
            candidates.sequence_weights = totals / np.clip(live, 1, self.options.points)
        return candidates

    def _explain(self, domain: str, stream: str) -> str:
        index, o, sources = self.index, self.options, self._sources(stream)
        left = [f"{len(index)} decision points in the store", f"{len(index.rows(domain))} of domain {domain!r}"]
        left.append(f"{len(index.rows(domain, sources=sources))} of these from {' or '.join(sources)}")
        if o.success_only:
            n = len(index.rows(domain, sources=sources, success_only=True))
            left.append(f"{n} of these from successful trajectories")
        left.append("none after all filters")
        return (
            f"nothing to draw for stream {stream!r} of domain {domain!r}: {', '.join(left)}. Collect or import such "
            "trajectories, loosen the selection's filters, or give this stream no share"
        )

    def _draw(self, weights: np.ndarray, count: int, what: str, step: int, domain: str, stream: str) -> np.ndarray:
        """int64 [count]: positions in `weights`."""
        if self.options.draw == "replacement":
            edges = np.cumsum(weights)
            draws = self._generator(what, domain, stream, step).random(count) * edges[-1]
            # `right` never lands on a weight of 0; the minimum guards the rounding of the last edge
            return np.minimum(np.searchsorted(edges, draws, side="right"), np.flatnonzero(weights)[-1])
        if self.options.draw == "distinct":
            return self._take(weights, 0, count, (what, domain, stream, step))
        name = f"{what}/{domain}/{stream}"
        begin = self._drawn.get(name, 0)
        self._drawn[name] = begin + count
        return self._take(weights, begin, begin + count, (what, domain, stream))

    def _take(self, weights: np.ndarray, begin: int, end: int, key: tuple) -> np.ndarray:
        """Places [begin, end) of an endless row of shuffles, each holding every candidate with a weight once."""
        live = np.flatnonzero(weights)
        parts = [np.zeros(0, dtype=np.int64)]
        while begin < end:
            number, at = divmod(begin, len(live))
            stop = min(at + end - begin, len(live))
            known, order = self._orders.get(key[:3], (None, None))
            if known != (key, number):
                order = np.argsort(self._keys(weights[live], *key, number), kind="stable")
                self._orders[key[:3]] = (key, number), order
            parts.append(live[order[at:stop]])
            begin += stop - at
        return np.concatenate(parts)

    def _keys(self, weights: np.ndarray, *key: Any) -> np.ndarray:
        """Keys whose ascending order is a weighted draw without replacement (Efraimidis & Spirakis 2006)."""
        exponential = self._generator(*key).standard_exponential(len(weights))
        return exponential / weights

    def _generator(self, *key: Any) -> np.random.Generator:
        digest = hashlib.sha256(repr((self.seed, *key)).encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))

    def _points(self, rows: np.ndarray) -> list[DecisionPoint]:
        index = self.index
        for row in rows:
            depths = self._histogram.setdefault(index.domains[index.domain[row]], {}).setdefault(
                SOURCE_KINDS[index.source[row]], {}
            )
            depth = int(index.turn[row])
            depths[depth] = depths.get(depth, 0) + 1
        return [index.point(row) for row in rows]

    # ------------------------------------------------------------------------------------------------- state

    def statistics(self) -> dict[str, dict[str, dict[int, int]]]:
        """What was drawn so far: domain → source kind → depth (turn number) → decision points."""
        return {
            domain: {source: dict(sorted(depths.items())) for source, depths in sorted(sources.items())}
            for domain, sources in sorted(self._histogram.items())
        }

    def state_dict(self) -> dict[str, Any]:
        """A small state as plain JSON data: how many were drawn, and their statistics."""
        return {
            "seed": self.seed,
            "drawn": dict(self._drawn),
            "statistics": {
                domain: {source: {str(depth): n for depth, n in depths.items()} for source, depths in sources.items()}
                for domain, sources in self.statistics().items()
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Raises ValueError if it was taken under another seed."""
        if state["seed"] != self.seed:
            raise ValueError(f"the selector's state was saved with seed {state['seed']}, this run has seed {self.seed}")
        self._drawn = {name: int(n) for name, n in state["drawn"].items()}
        self._histogram = {
            domain: {source: {int(depth): int(n) for depth, n in depths.items()} for source, depths in sources.items()}
            for domain, sources in state["statistics"].items()
        }
