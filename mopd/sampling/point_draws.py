"""Decision points for groups that are launched one by one: drawn a step's worth at a time, kept in order, saved.

A selector draws for (step, domain, stream). Where sampling runs ahead there is no step yet when a group is launched, so each
source takes its trajectories from a queue that is filled with whole draws. What is drawn counts as used at once: it is
trained, or dropped and counted, whatever happens in between.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

from prefix_store.scores import rows_of
from prefix_store.selection import Selector
from prefix_store.trajectory import SOURCE_KINDS, DecisionPoint


class PointDraws:
    """Trajectories, each as its chosen decision points, for the sources "domain/stream" of stored prefixes.

    selector    draws them, and learns what was measured; its state is part of `state_dict`
    """

    def __init__(self, selector: Selector):
        self.selector = selector
        self._queues: dict[str, deque[list[DecisionPoint]]] = defaultdict(deque)
        self._next: dict[str, int] = {}

    def take(self, source: str, step: int, size: int) -> list[DecisionPoint]:
        """The decision points of the next trajectory of `source`. A new draw takes `size` trajectories as of `step`, or of
        the first later step that has had no draw yet. Raises NothingToSelect where there is nothing to draw from."""
        domain, stream = source.rsplit("/", 1)
        queue = self._queues[source]
        while not queue:
            draw = max(step, self._next.get(source, 0))
            self._next[source] = draw + 1
            # A quota may leave out whole trajectories; the next draw brings others.
            queue.extend(self.selector.select_sequences(draw, domain, stream, size))
            self.selector.observe(draw)
        return queue.popleft()

    def observe(self, step: int, points: Mapping[int, DecisionPoint],
                turn_scores: Mapping[tuple[int, int], Mapping[str, float]]) -> None:
        """What step `step` measured at its `points`; both as `measured` takes them."""
        self.selector.observe(step, measured(points, turn_scores))

    def drawn(self, step: int, points: Mapping[str, Iterable[DecisionPoint]]) -> dict[str, dict[str, Any]]:
        """For a step's record: domain → {"points", "depth": {turn: points}, "sources": {kind: points}, "streams": {stream:
        what its draws chose from}}. `points`: "domain/stream" → those of the step."""
        index, found = self.selector.index, {}
        for source, chosen in points.items():
            chosen = list(chosen)
            domain, stream = source.rsplit("/", 1)
            part = found.setdefault(domain, {"points": 0, "depth": Counter(), "sources": Counter(), "streams": {}})
            part["points"] += len(chosen)
            part["depth"].update(str(point.turn) for point in chosen)
            part["sources"].update(SOURCE_KINDS[kind] for kind in index.source[rows_of(index, chosen)].tolist())
            part["streams"][stream] = self.selector.describe(step, domain, stream)
        return {domain: part | {"depth": dict(sorted(part["depth"].items(), key=lambda item: int(item[0]))),
                                "sources": dict(part["sources"])} for domain, part in found.items()}

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"selector": self.selector.state_dict(), "next": dict(self._next),
                "queues": {source: [points_to_plain(points) for points in queue] for source, queue in self._queues.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.selector.load_state_dict(state["selector"])
        self._next = {source: int(step) for source, step in state["next"].items()}
        self._queues = defaultdict(deque, {source: deque(points_from_plain(points) for points in queue)
                                           for source, queue in state["queues"].items()})


def measured(points: Mapping[int, DecisionPoint], turn_scores: Mapping[tuple[int, int], Mapping[str, float]],
             ) -> dict[DecisionPoint, dict[str, float]]:
    """Decision point → {name: mean of what was measured there}. points: group → its point; turn_scores: (group, turn) →
    {name: mean}. Of a sequence that went on from a point for several turns, the first is the point's own."""
    found: dict[DecisionPoint, list[Mapping[str, float]]] = defaultdict(list)
    for group, point in points.items():
        if (values := turn_scores.get((group, point.turn))) is not None:
            found[point].append(values)  # a point that was drawn twice has two groups
    return {point: {name: math.fsum(m[name] for m in parts) / len(parts)
                    for name in parts[0] if all(name in m for m in parts)}
            for point, parts in found.items()}


def points_to_plain(points: Iterable[DecisionPoint]) -> list[list]:
    """As JSON values."""
    return [[point.sequence, point.context, point.turn] for point in points]


def points_from_plain(plain: Iterable[list]) -> list[DecisionPoint]:
    """What `points_to_plain` was given."""
    return [DecisionPoint(str(sequence), int(context), int(turn)) for sequence, context, turn in plain]
