"""Which decision points next: filters, quotas and draws that are seeded and exactly restartable.

A strategy (prefix_store.strategies) gives every candidate a weight; the Selector draws by those weights. What is drawn
depends on the seed, on what the version of the store holds, on (step, domain, stream) and on what was trained before
(scores, and the place in an epoch), never on workers, clocks or the order of other draws. Reads the index only: no
tokens, and never what was played at a point.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from prefix_store.index import PointIndex
from prefix_store.scores import FLOAT32_MAX, STORED, Scores, SuppliedScores, rows_of, stored_scores
from prefix_store.strategies import STRATEGIES, NothingToSelect, Strategy, make_strategy
from prefix_store.trajectory import SOURCE_KINDS, DecisionPoint

__all__ = ["DRAWS", "STRATEGIES", "STREAM_SOURCES", "NothingToSelect", "SelectionOptions", "Selector", "Strategy",
           "make_strategy"]

STREAM_SOURCES = {"teacher_prefix": ("teacher",), "sft_prefix": ("expert", "demonstration")}
DRAWS = ("replacement", "distinct", "epoch")
STATE = 2
# layout of `state_dict`


@dataclasses.dataclass(frozen=True)
class SelectionOptions:
    """How decision points are chosen.

    strategy, options     a name of STRATEGIES or `package.module:factory`, and its keyword arguments
    points_per_sequence   of a drawn trajectory take at most this many points; 0 or "all": as many as their weights allow
    success_only          only trajectories that succeeded
    max_prefix_tokens     only points with at most this many tokens before them
    min_turns_from_end    only points with at least this many turns after theirs (the last turn has 0)
    max_turns_from_end    only points with at most this many turns after theirs
    splits                only trajectories of tasks of these splits
    sources               only these source kinds, of those that a stream resumes
    quotas                domain → at most this many decision points of it in one draw (of a step and stream)
    draw                  "replacement": each draw alone; "distinct": no repetition within one call while candidates
                          last; "epoch": no repetition until all candidates were drawn, over the whole run
    score_smoothing       weight of the past where a point is measured again; 0 keeps the last measurement
    update_scores         False: scores stay as supplied or stored, whatever is measured
    record_scores         True: measured scores are kept though the strategy reads none
    stream_sources        stream → source kinds whose trajectories it resumes
    """

    strategy: str = "uniform"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    points_per_sequence: int | str = "all"
    success_only: bool = False
    max_prefix_tokens: int | None = None
    min_turns_from_end: int = 0
    max_turns_from_end: int | None = None
    splits: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    quotas: Mapping[str, int] = dataclasses.field(default_factory=dict)
    draw: str = "replacement"
    score_smoothing: float = 0.0
    update_scores: bool = True
    record_scores: bool = False
    stream_sources: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=lambda: dict(STREAM_SOURCES))

    def __post_init__(self) -> None:
        points = self.points_per_sequence
        if points != "all" and (isinstance(points, bool) or not isinstance(points, int) or points < 0):
            raise ValueError(f"points_per_sequence is {points!r}; use a whole number, or 0 or 'all' for all of them")
        if self.draw not in DRAWS:
            raise ValueError(f"draw is {self.draw!r}, none of {', '.join(DRAWS)}")
        for name, kinds in {"sources": self.sources or (), **self.stream_sources}.items():
            unknown = [kind for kind in kinds if kind not in SOURCE_KINDS]
            if unknown:
                raise ValueError(f"{name}: source kind {unknown[0]!r} is none of {', '.join(SOURCE_KINDS)}")
        for name in ("max_prefix_tokens", "min_turns_from_end", "max_turns_from_end"):
            if getattr(self, name) is not None and getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.max_turns_from_end is not None and self.max_turns_from_end < self.min_turns_from_end:
            raise ValueError(f"max_turns_from_end {self.max_turns_from_end} is below min_turns_from_end "
                             f"{self.min_turns_from_end}: no turn passes both")
        if self.record_scores and not self.update_scores:
            raise ValueError("record_scores keeps what is measured, update_scores: false keeps nothing; choose one")
        for domain, quota in self.quotas.items():
            if isinstance(quota, bool) or not isinstance(quota, int) or quota < 1:
                raise ValueError(f"quotas.{domain} is {quota!r}; use a whole number of decision points of at least 1")

    @property
    def points(self) -> int:
        """points_per_sequence with "all" as a number no sequence reaches."""
        return self.points_per_sequence if self.points_per_sequence not in (0, "all") else 2**31 - 1

    def plain(self) -> dict[str, Any]:
        """JSON values: equal for options that draw alike."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}


@dataclasses.dataclass
class _Candidates:
    """What one domain and stream may draw: rows of the index, grouped by sequence, and the weights of one moment.

    sequence_weights   of a trajectory s with weights w and m points at most: max(max w, Σ w / m)
    """

    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    moment: tuple | None = None
    weights: np.ndarray | None = None
    sequence_weights: np.ndarray | None = None


@dataclasses.dataclass
class _Drawn:
    """What was drawn: places taken by order's name, points by (domain, source kind, depth), and points over a quota."""

    places: dict[str, int] = dataclasses.field(default_factory=dict)
    points: dict[tuple[str, str, int], int] = dataclasses.field(default_factory=dict)
    over_quota: dict[str, int] = dataclasses.field(default_factory=dict)

    def add(self, other: _Drawn) -> None:
        for name in ("places", "points", "over_quota"):
            mine = getattr(self, name)
            for key, count in getattr(other, name).items():
                mine[key] = mine.get(key, 0) + count

    def histogram(self) -> dict[str, dict[str, dict[int, int]]]:
        """domain → source kind → depth → points."""
        found: dict[str, dict[str, dict[int, int]]] = {}
        for (domain, source, depth), count in sorted(self.points.items()):
            found.setdefault(domain, {}).setdefault(source, {})[depth] = count
        return found


class Selector:
    """Draws decision points, or whole trajectories with their points, for (step, domain, stream).

    A draw is a pure function of (seed, step, domain, stream), the version of the store, and what `observe` was told
    before: with draw "epoch" also of how many were drawn since. `observe` says that a step was trained; `state_dict`
    holds what was trained and nothing of what was only drawn, so a run that is killed anywhere, and resumed from the
    state that was saved with its weights, draws what it would have drawn.
    """

    def __init__(self, store: Any, options: SelectionOptions | None = None, seed: int = 0, *, steps: int | None = None,
                 supplied: SuppliedScores | None = None):
        """
        store      a PrefixStore at its version, or a PointIndex (which has no stored scores)
        steps      of the run: the length of a `curriculum` that names none
        supplied   scores from elsewhere (prefix_store.scores.read_scores)

        Raises ValueError for options that do not fit together, or stored scores that are not there.
        """
        self.index: PointIndex = store if isinstance(store, PointIndex) else store.index()
        self.options = options or SelectionOptions()
        self.seed = int(seed)
        self.strategy = make_strategy(self.options.strategy, self.options.options, steps=steps)
        self.reads: tuple[str, ...] = tuple(getattr(self.strategy, "scores", ()))
        """Names of the scores that the strategy draws by."""
        if self.options.draw == "epoch" and (self.strategy.by_step or self.reads):
            by = "step" if self.strategy.by_step else f"the score {', '.join(self.reads)}"
            raise ValueError(f"strategy {self.options.strategy!r} changes by {by}; draw 'epoch' needs a fixed one: use "
                             "'distinct' or 'replacement'")
        self.scores = Scores(self.index, self.options.score_smoothing)
        self.supplied: dict[str, int] = {}
        """Of supplied scores: {"points", "unknown" (points that the version does not have), "not_finite"}."""
        self.digest = None if supplied is None else supplied.digest
        """sha256 of the supplied scores, None without."""
        self._given: set[str] = set()
        if supplied is not None:
            self.supplied = supplied.put_into(self.scores)
            self._given |= set(supplied.columns)
        for name in self.reads:
            if name.startswith(STORED) and name not in self._given:
                if name != "outcome.success":
                    rows, values = stored_scores(store, name)
                    self.scores.supply(name, rows, values)
                self._given.add(name)
        self._candidates: dict[tuple[str, str], _Candidates] = {}
        self._orders: dict[tuple, tuple[int, np.ndarray]] = {}
        self._trained = _Drawn()
        self._pending: dict[int, _Drawn] = {}
        self._content = ""

    @property
    def wants_scores(self) -> bool:
        """Whether `observe` keeps measured scores: not where the strategy reads stored ones alone."""
        measured = any(not name.startswith(STORED) for name in self.reads)
        return self.options.update_scores and (measured or self.options.record_scores)

    def require_scores(self, measured: Iterable[str]) -> None:
        """Raise ValueError where the strategy draws by a score that is neither supplied, nor stored, nor `measured`."""
        measured = tuple(measured) if self.options.update_scores else ()
        for name in self.reads:
            if name not in self._given and name not in measured:
                there = ", ".join(sorted({*measured, *self._given})) or "none"
                raise ValueError(f"strategy {self.options.strategy!r} draws by the score {name!r}, which is neither "
                                 f"measured in this run nor supplied; there is {there}")

    # ------------------------------------------------------------------------------------------------- drawing

    def select(self, step: int, domain: str | Mapping[str, float], stream: str, count: int) -> list[DecisionPoint]:
        """`count` decision points for this step of a domain's stream, at most the domain's quota.

        domain  a name, or shares by domain: `count` is split by them (largest remainder), domain after domain
        Raises NothingToSelect where no point passes the filters, ValueError for a stream that resumes no stored
        trajectories.
        """
        step = int(step)
        if isinstance(domain, Mapping):
            return [p for name, n in split(domain, int(count)).items() if n for p in self.select(step, name, stream, n)]
        count = min(int(count), self.options.quotas.get(domain, int(count)))
        candidates = self._at(step, domain, stream)
        chosen = self._draw(candidates.weights, count, "points", step, domain, stream)
        rows = candidates.rows[chosen]
        self._count(step, rows)
        return [self.index.point(row) for row in rows]

    def select_sequences(
        self, step: int, domain: str | Mapping[str, float], stream: str, count: int
    ) -> list[list[DecisionPoint]]:
        """`count` trajectories, each as its chosen decision points in the order of their turns.

        Points are met exactly as often as when they are drawn one by one, in proportion to their weights w, but several
        of a trajectory together: with m = points_per_sequence, trajectory s is drawn with weight W = max(max w, Σ w / m),
        and each of its points is taken with probability w / W (randomised systematic sampling: between the whole numbers
        around Σ w / W, which is at most m). Equal weights give min(m, n) points of n, all of them for m = "all".
        Over the domain's quota points are left out at random; a trajectory of which none is left is left out.
        `domain` as in `select`.
        """
        step = int(step)
        if isinstance(domain, Mapping):
            shares = split(domain, int(count))
            return [g for name, n in shares.items() if n for g in self.select_sequences(step, name, stream, n)]
        candidates = self._at(step, domain, stream)
        drawn_before = self._places(f"sequences/{domain}/{stream}")
        chosen = self._draw(candidates.sequence_weights, int(count), "sequences", step, domain, stream)
        groups = []
        for number, sequence in enumerate(chosen):
            start = candidates.starts[sequence]
            here = slice(start, start + candidates.counts[sequence])
            share = candidates.weights[here] / candidates.sequence_weights[sequence]
            rows = candidates.rows[here]
            if (share < 1.0).any():
                # an epoch's order knows no step: there the running number names the draw
                place = (drawn_before + number,) if self.options.draw == "epoch" else (step, number)
                rows = rows[_systematic(share, self._generator("within", domain, stream, *place))]
            groups.append(rows)
        groups = self._within_quota(groups, step, domain, stream)
        self._count(step, np.concatenate([np.zeros(0, dtype=np.int64), *groups]))
        return [[self.index.point(row) for row in rows] for rows in groups]

    def available(self, domain: str, stream: str) -> dict[str, int]:
        """How many {"sequences", "decision_points"} a domain's stream can draw from; zeros where nothing passes."""
        rows = self._rows(domain, stream)
        return {"sequences": len(np.unique(self.index.sequence[rows])), "decision_points": len(rows)}

    def require(self, domain: str, stream: str) -> None:
        """Raise NothingToSelect if this stream of the domain has nothing to draw from at the first step. Draws nothing."""
        self._at(0, domain, stream)

    def candidates(self, domain: str, stream: str) -> np.ndarray:
        """int64 [n]: the rows of `index` that this stream of the domain can draw from, ascending. Draws nothing."""
        return self._rows(domain, stream)

    def _rows(self, domain: str, stream: str) -> np.ndarray:
        o = self.options
        rows = self.index.rows(
            domain,
            sources=self._sources(stream),
            splits=o.splits,
            success_only=o.success_only,
            max_prefix_tokens=o.max_prefix_tokens,
            min_turns_from_end=o.min_turns_from_end,
        )
        if o.max_turns_from_end is not None:
            rows = rows[self.index.turns[rows] - 1 - self.index.turn[rows] <= o.max_turns_from_end]
        return rows

    def _sources(self, stream: str) -> tuple[str, ...]:
        if stream not in self.options.stream_sources:
            known = ", ".join(self.options.stream_sources)
            raise ValueError(f"stream {stream!r} resumes no stored trajectories; the streams that do are {known}")
        kinds = tuple(self.options.stream_sources[stream])
        return kinds if self.options.sources is None else tuple(k for k in kinds if k in self.options.sources)

    def _at(self, step: int, domain: str, stream: str) -> _Candidates:
        """The candidates with their weights at `step`."""
        candidates = self._candidates.get((domain, stream))
        if candidates is None:
            rows = self._rows(domain, stream)
            if not len(rows):
                raise NothingToSelect(self._explain(domain, stream))
            starts = np.flatnonzero(np.diff(self.index.sequence[rows], prepend=-1))
            counts = np.diff(starts, append=len(rows))
            candidates = self._candidates[domain, stream] = _Candidates(rows, starts, counts)
        moment = (step if self.strategy.by_step else None, self.scores.changed if self.reads else None)
        if candidates.weights is None or candidates.moment != moment:
            arguments = (self.index, candidates.rows, step) + ((self.scores,) if self.reads else ())
            weights = np.asarray(self.strategy(*arguments), dtype=np.float64)
            if weights.shape != candidates.rows.shape or not np.isfinite(weights.sum()) or (weights < 0).any():
                raise ValueError(
                    f"strategy {self.options.strategy!r} must give {len(candidates.rows)} finite weights of at least 0, with "
                    "a finite sum"
                )
            if not weights.any():
                raise NothingToSelect(f"strategy {self.options.strategy!r} gives every point of {domain!r} weight 0")
            totals = np.add.reduceat(weights, candidates.starts)
            largest = np.maximum.reduceat(weights, candidates.starts)
            candidates.weights, candidates.moment = weights, moment
            candidates.sequence_weights = np.maximum(largest, totals / self.options.points)
        return candidates

    def _explain(self, domain: str, stream: str) -> str:
        index, o, sources = self.index, self.options, self._sources(stream)
        left = [f"{len(index)} decision points in the store", f"{len(index.rows(domain))} of domain {domain!r}"]
        kinds = " or ".join(sources) or "no source (the filter `sources` leaves none to this stream)"
        left.append(f"{len(index.rows(domain, sources=sources))} of these from {kinds}")
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
        begin = self._places(name)
        places = self._pending.setdefault(step, _Drawn()).places
        places[name] = places.get(name, 0) + count
        return self._take(weights, begin, begin + count, (what, domain, stream))

    def _places(self, name: str) -> int:
        """How many places of an epoch's order are taken, by steps that were trained or are still to be."""
        return self._trained.places.get(name, 0) + sum(d.places.get(name, 0) for d in self._pending.values())

    def _take(self, weights: np.ndarray, begin: int, end: int, key: tuple) -> np.ndarray:
        """Places [begin, end) of an endless row of shuffles, each holding every candidate with a weight once."""
        live = np.flatnonzero(weights)
        parts = [np.zeros(0, dtype=np.int64)]
        while begin < end:
            number, at = divmod(begin, len(live))
            stop = min(at + end - begin, len(live))
            known, order = self._orders.get(key, (None, None))
            if known != number:
                order = _first(self._keys(weights[live], *key, number), len(live) if self.options.draw == "epoch" else stop)
                if self.options.draw == "epoch":  # its weights never change
                    self._orders[key] = number, order
            parts.append(live[order[at:stop]])
            begin += stop - at
        return np.concatenate(parts)

    def _keys(self, weights: np.ndarray, *key: Any) -> np.ndarray:
        """Keys whose ascending order is a weighted draw without replacement (Efraimidis & Spirakis 2006)."""
        exponential = self._generator(*key).standard_exponential(len(weights))
        return exponential / weights

    def _within_quota(self, groups: list[np.ndarray], step: int, domain: str, stream: str) -> list[np.ndarray]:
        total, quota = sum(map(len, groups)), self.options.quotas.get(domain)
        if quota is None or total <= quota:
            return groups
        over = self._pending.setdefault(step, _Drawn()).over_quota
        over[domain] = over.get(domain, 0) + total - quota
        keep = np.zeros(total, dtype=bool)
        keep[self._generator("quota", domain, stream, step).permutation(total)[:quota]] = True
        parts = np.split(keep, np.cumsum([len(rows) for rows in groups])[:-1])
        return [rows[part] for rows, part in zip(groups, parts, strict=True) if part.any()]

    def _generator(self, *key: Any) -> np.random.Generator:
        digest = hashlib.sha256(repr((self.seed, *key)).encode()).digest()
        return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))

    @contextlib.contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """What is drawn inside leaves no trace: the same draw comes again later, if no score changes meanwhile."""
        kept = self._pending
        self._pending = {step: dataclasses.replace(
            drawn, places=dict(drawn.places), points=dict(drawn.points), over_quota=dict(drawn.over_quota))
            for step, drawn in kept.items()}
        try:
            yield
        finally:
            self._pending = kept

    # ------------------------------------------------------------------------------------------------- training

    def observe(
        self, step: int, scores: Mapping[DecisionPoint, Mapping[str, float] | float] | None = None, name: str = "reverse_kl"
    ) -> dict[str, int]:
        """Step `step` was trained, and with it all draws of this and earlier steps.

        scores  decision point → {name: value} as measured in it, or a number under `name`; values that are not finite
                are left out. Kept where the strategy draws by scores or `record_scores` is on, and not fixed.
        Returns {"points": measured points, "not_finite": values that were left out}. Raises KeyError for a point that this
        version of the store does not have, and then takes nothing.
        """
        found = {"points": 0, "not_finite": 0}
        if scores and self.wants_scores:
            points = sorted(scores, key=lambda p: (p.sequence, p.turn))
            rows = rows_of(self.index, points)
            values = [v if isinstance(v := scores[p], Mapping) else {name: v} for p in points]
            names = sorted({key for value in values for key in value})
            columns = {key: np.array([value.get(key, np.nan) for value in values], dtype=np.float64) for key in names}
            there = sum(len(value) for value in values)
            found = {"points": len(points),
                     "not_finite": there - sum(int((np.abs(column) <= FLOAT32_MAX).sum()) for column in columns.values())}
            self.scores.record(int(step), rows, columns)
        for earlier in sorted(s for s in self._pending if s <= int(step)):
            self._trained.add(self._pending.pop(earlier))
        return found

    def _count(self, step: int, rows: np.ndarray) -> None:
        index, points = self.index, self._pending.setdefault(step, _Drawn()).points
        columns = (index.domain[rows].tolist(), index.source[rows].tolist(), index.turn[rows].tolist())
        for (domain, source, turn), count in collections.Counter(zip(*columns, strict=True)).items():
            key = (index.domains[domain], SOURCE_KINDS[source], turn)
            points[key] = points.get(key, 0) + count

    # ------------------------------------------------------------------------------------------------- statistics

    def statistics(self) -> dict[str, dict[str, dict[int, int]]]:
        """What was drawn so far: domain → source kind → depth (turn number) → decision points."""
        return self._total().histogram()

    def drawn(self, step: int) -> dict[str, Any]:
        """What was drawn for a step that is not yet observed: {domain: {"points", "sources": {kind: points}, "depth":
        {turn: points}, and "over_quota" where points were left out}}."""
        drawn, found = self._pending.get(int(step), _Drawn()), {}
        for domain, sources in drawn.histogram().items():
            depth: dict[str, int] = {}
            for depths in sources.values():
                for turn, count in depths.items():
                    depth[str(turn)] = depth.get(str(turn), 0) + count
            found[domain] = {"points": sum(depth.values()), "depth": dict(sorted(depth.items(), key=lambda d: int(d[0]))),
                             "sources": {kind: sum(depths.values()) for kind, depths in sources.items()}}
            if drawn.over_quota.get(domain):
                found[domain]["over_quota"] = drawn.over_quota[domain]
        return found

    def describe(self, step: int, domain: str, stream: str) -> dict[str, Any]:
        """What a draw of this step chooses from: {"candidates", what the strategy says of itself (a curriculum's window, a
        pivot's counts), "scores": {name: summary of the candidates' scores}}. JSON values."""
        candidates = self._at(int(step), domain, stream)
        found: dict[str, Any] = {"candidates": len(candidates.rows)}
        if hasattr(self.strategy, "describe"):
            found |= self.strategy.describe(self.index, candidates.rows, int(step), self.scores)
        if self.reads:
            found["scores"] = {name: self.scores.summary(name, candidates.rows) for name in self.reads}
        return found

    def _total(self) -> _Drawn:
        total = _Drawn()
        for drawn in (self._trained, *self._pending.values()):
            total.add(drawn)
        return total

    # ------------------------------------------------------------------------------------------------- state

    def _identity(self) -> dict[str, Any]:
        if not self._content:
            self._content = hashlib.sha256(np.ascontiguousarray(self.index.ids).tobytes()).hexdigest()
        return {"layout": STATE, "seed": self.seed, "content": self._content, "supplied": self.digest,
                "options": self.options.plain()}

    def state_dict(self) -> dict[str, Any]:
        """A small state as plain JSON data: what was trained (places in epochs, statistics, measured scores)."""
        trained = self._trained
        return {
            **self._identity(),
            "places": dict(sorted(trained.places.items())),
            "points": [[*key, count] for key, count in sorted(trained.points.items())],
            "over_quota": dict(sorted(trained.over_quota.items())),
            "scores": self.scores.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken; for a selector that has observed nothing yet. Raises ValueError if the state
        was taken under another seed, options, supplied scores, or contents of the store."""
        if self._trained.points or len(self.scores.touched()):
            raise ValueError("this selector has trained already; load the state into a fresh one")
        mine = self._identity()
        if state.get("layout") != STATE:
            raise ValueError(f"the selector's state has layout {state.get('layout')}, this one reads layout {STATE}; start "
                             "the run anew")
        if state["seed"] != self.seed:
            raise ValueError(f"the selector's state was saved with seed {state['seed']}, this run has seed {self.seed}")
        if state["content"] != mine["content"]:
            raise ValueError("the selector's state was saved for other contents of the store: its decision points are not "
                             "these. Open the store at the version of the run, or start the run anew")
        then, now = state["options"], mine["options"]
        differ = [key for key in sorted({*then, *now}) if then.get(key) != now.get(key)]
        if differ:
            said = "; ".join(f"{key} was {then.get(key)!r} and is {now.get(key)!r}" for key in differ)
            raise ValueError(f"the selector's state was saved with other options: {said}")
        if state["supplied"] != mine["supplied"]:
            raise ValueError("the selector's state was saved with other supplied scores; give the same ones, or start anew")
        self._pending.clear()
        self._trained = _Drawn({name: int(n) for name, n in state["places"].items()},
                               {(d, s, int(t)): int(n) for d, s, t, n in state["points"]},
                               {name: int(n) for name, n in state["over_quota"].items()})
        self.scores.load_state_dict(state["scores"])


def _first(keys: np.ndarray, count: int) -> np.ndarray:
    """int64 [count]: positions of the smallest keys, ascending."""
    if count >= len(keys):
        return np.argsort(keys, kind="stable")
    found = np.argpartition(keys, count - 1)[:count] if count else np.zeros(0, dtype=np.int64)
    return found[np.lexsort((found, keys[found]))]


def split(shares: Mapping[str, float], count: int) -> dict[str, int]:
    """`count` in whole numbers by `shares` (largest remainder; equal remainders in the order given). Raises ValueError
    unless all shares are finite and at least 0, and one is above 0."""
    values = np.array([float(s) for s in shares.values()])
    if not len(values) or not np.isfinite(values).all() or (values < 0).any() or not values.any():
        raise ValueError(f"shares by domain must be numbers of at least 0, not all 0; got {dict(shares)}")
    exact = values / values.sum() * count
    whole = np.floor(exact + 1e-9).astype(int)
    for i in np.argsort(-(exact - whole), kind="stable")[: count - int(whole.sum())]:
        whole[i] += 1
    return dict(zip(shares, whole.tolist(), strict=True))


def _systematic(share: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """int64, ascending: positions drawn so that each i is in with probability share[i] ≤ 1, and their number is one of
    the two whole numbers around Σ share (randomised systematic sampling, Madow 1949; in a random order, so that no two
    positions exclude each other for where they stand)."""
    order = generator.permutation(len(share))
    edges = np.cumsum(share[order])
    if abs(edges[-1] - round(edges[-1])) < 1e-9:
        edges[-1] = round(edges[-1])
    start = 1.0 - generator.random()  # in (0, 1]
    places = np.floor(np.concatenate([[0.0], edges]) - start)
    return np.sort(order[np.diff(places) > 0])


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
