"""The index of a store's version as numpy columns: which decision points there are and what is known of each.

Sequences stand in the order of their ids, not of the commits that brought them, so that a draw from the index depends
on what a version holds and not on which writer was first.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import itertools
from collections.abc import Iterable

import numpy as np

from prefix_store.segment import SegmentReader
from prefix_store.trajectory import SOURCE_KINDS, DecisionPoint


@dataclasses.dataclass(frozen=True)
class PointIndex:
    """Columns over P decision points of Q sequences; points are ordered by sequence id, then turn.

    Per point, each [P]:
        sequence int32       ordinal of its sequence, 0 … Q-1
        context int32        context number inside the sequence
        turn int32           depth: number of the turn that is about to be played
        turns int32          turns of the sequence
        prefix_tokens int32  tokens before the decision point
        action_tokens int32  length of what was played there
        domain int16         index into `domains`
        source int8          index into SOURCE_KINDS
        split int16          index into `splits`
        success bool         whether the sequence succeeded
    Per sequence: ids uint8 [Q, 32] content hashes; first int64 [Q + 1], the points of sequence q are rows
    first[q] … first[q + 1] - 1, in order of their turns.
    """

    sequence: np.ndarray
    context: np.ndarray
    turn: np.ndarray
    turns: np.ndarray
    prefix_tokens: np.ndarray
    action_tokens: np.ndarray
    domain: np.ndarray
    source: np.ndarray
    split: np.ndarray
    success: np.ndarray
    ids: np.ndarray
    first: np.ndarray
    domains: tuple[str, ...]
    splits: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.turn)

    @property
    def sequences(self) -> int:
        return len(self.ids)

    def sequence_id(self, ordinal: int) -> str:
        """The id (64 hexadecimal digits) of a sequence."""
        return self.ids[ordinal].tobytes().hex()

    def point(self, row: int) -> DecisionPoint:
        """Row `row` as a DecisionPoint."""
        return DecisionPoint(self.sequence_id(self.sequence[row]), int(self.context[row]), int(self.turn[row]))

    def rows(
        self,
        domain: str | None = None,
        *,
        sources: Iterable[str] | None = None,
        splits: Iterable[str] | None = None,
        success_only: bool = False,
        max_prefix_tokens: int | None = None,
        min_turns_from_end: int = 0,
    ) -> np.ndarray:
        """int64 [n]: the rows of the points that pass every filter, ascending.

        sources are kinds of SOURCE_KINDS (a string is one kind); min_turns_from_end m keeps the points with at least m
        turns after theirs (the last turn has 0). Raises ValueError for an unknown source kind; a domain or split that
        the index does not have gives no rows.
        """
        keep = np.ones(len(self), dtype=bool)
        if domain is not None:
            keep &= self.domain == (self.domains.index(domain) if domain in self.domains else -1)
        if sources is not None:
            kinds = (sources,) if isinstance(sources, str) else tuple(sources)
            unknown = [kind for kind in kinds if kind not in SOURCE_KINDS]
            if unknown:
                raise ValueError(f"source kind {unknown[0]!r} is none of {', '.join(SOURCE_KINDS)}")
            keep &= np.isin(self.source, [SOURCE_KINDS.index(kind) for kind in kinds])
        if splits is not None:
            names = (splits,) if isinstance(splits, str) else tuple(splits)
            keep &= np.isin(self.split, [self.splits.index(name) for name in names if name in self.splits])
        if success_only:
            keep &= self.success
        if max_prefix_tokens is not None:
            keep &= self.prefix_tokens <= max_prefix_tokens
        if min_turns_from_end > 0:
            keep &= self.turns - 1 - self.turn >= min_turns_from_end
        return np.flatnonzero(keep)


class DecisionPoints(collections.abc.Sequence):
    """Rows of a PointIndex as a sequence of DecisionPoint; each is made when asked for."""

    def __init__(self, index: PointIndex, rows: np.ndarray):
        self.index_columns, self.rows = index, rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int | slice) -> DecisionPoint | DecisionPoints:
        if isinstance(item, slice):
            return DecisionPoints(self.index_columns, self.rows[item])
        return self.index_columns.point(self.rows[item])

    def __repr__(self) -> str:
        return f"<{len(self)} decision points>"


class StoreIndex:
    """`points` (PointIndex) and where each sequence and context lies in its segment."""

    def __init__(self, segments: list[SegmentReader]):
        """Reads the tables of the segments. A sequence that two segments hold counts once (the first one's)."""
        self.segments = segments
        domains = _union(s.codes["domain"] for s in segments)
        splits = _union(s.codes["split"] for s in segments)
        sequences, contexts, points, ids, where = [], [], [], [], []
        context_offset = point_offset = 0
        for number, reader in enumerate(segments):
            table = reader.columns("sequences")
            table["domain"] = _recode(table["domain"], reader.codes["domain"], domains)
            table["split"] = _recode(table["split"], reader.codes["split"], splits)
            table["source"] = _recode(table["source"], reader.codes["source"], SOURCE_KINDS)
            local = np.arange(len(table["turns"]))
            where.append(np.stack([np.full(len(local), number), local, table["context_start"]], axis=1))
            table["context_start"] = table["context_start"] + context_offset
            table["point_start"] = table["point_start"] + point_offset
            sequences.append(table)
            contexts.append(reader.columns("contexts"))
            points.append(reader.columns("points"))
            ids.append(reader.ids())
            context_offset += len(contexts[-1]["fork"])
            point_offset += len(points[-1]["turn"])

        all_ids = np.concatenate(ids) if ids else np.zeros((0, 32), dtype=np.uint8)
        order = np.lexsort([_key(all_ids, part) for part in (3, 2, 1, 0)])
        if len(order):
            ordered = all_ids[order]
            order = order[np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])]
        kept = ("context_start", "point_start", "turns", "domain", "source", "split", "success")
        table = {column: _join(sequences, column)[order] for column in kept}
        self.where = (np.concatenate(where) if where else np.zeros((0, 3), dtype=np.int64))[order]
        """int64 [Q, 3]: segment number, row in its `sequences`, row of its first context in its `contexts`."""

        turns = table["turns"]
        first = np.concatenate([[0], np.cumsum(turns)]).astype(np.int64)
        sequence = np.repeat(np.arange(len(order), dtype=np.int32), turns)
        rows = np.repeat(table["point_start"] - first[:-1], turns) + np.arange(first[-1])
        kept = ("context", "turn", "prefix_tokens", "action_tokens")
        per_point = {column: _join(points, column)[rows].astype(np.int32) for column in kept}
        self.points = PointIndex(
            sequence=sequence,
            turns=turns[sequence].astype(np.int32),
            domain=table["domain"][sequence].astype(np.int16),
            source=table["source"][sequence].astype(np.int8),
            split=table["split"][sequence].astype(np.int16),
            success=table["success"][sequence].astype(bool),
            ids=all_ids[order],
            first=first,
            domains=domains,
            splits=splits,
            **per_point,
        )
        self._context_start = table["context_start"]
        self._contexts = {c: _join(contexts, c) for c in ("parent", "fork", "token_start")}
        self._keys = _key(self.points.ids, 0)

    def find(self, sequence_id: str) -> int:
        """The ordinal of a sequence. Raises KeyError naming it if this version does not hold it."""
        try:
            identity = bytes.fromhex(sequence_id)
        except ValueError:
            identity = b""
        if len(identity) == 32:
            at = int(np.searchsorted(self._keys, np.uint64(int.from_bytes(identity[:8], "big"))))
            while at < len(self._keys) and self.points.ids[at, :8].tobytes() == identity[:8]:
                if self.points.ids[at].tobytes() == identity:
                    return at
                at += 1
        raise KeyError(f"this version of the store holds no sequence {sequence_id!r}")

    def locate(self, point: DecisionPoint) -> int:
        """The row of a decision point. Raises KeyError if its sequence or the point is not there."""
        ordinal, columns = self.find(point.sequence), self.points
        row = int(columns.first[ordinal]) + point.turn
        if not columns.first[ordinal] <= row < columns.first[ordinal + 1] or columns.context[row] != point.context:
            place = f"context {point.context}, turn {point.turn}"
            raise KeyError(f"sequence {point.sequence} has no decision point at {place}")
        return row

    def pieces(self, row: int, start: int, stop: int) -> tuple[int, list[tuple[int, int]]]:
        """Where tokens [start, stop) of a point's context lie: the segment's number and ranges of its `tokens`.

        A context's own tokens lie together; what it shares with its parents lies with them.
        """
        ordinal = int(self.points.sequence[row])
        base = int(self._context_start[ordinal])
        context = base + int(self.points.context[row])
        ranges = []
        while stop > start:
            fork, token_start = int(self._contexts["fork"][context]), int(self._contexts["token_start"][context])
            if stop > fork:
                own = max(start, fork)
                ranges.append((token_start + own - fork, token_start + stop - fork))
            stop = min(stop, fork)
            context = base + int(self._contexts["parent"][context])
        return int(self.where[ordinal, 0]), ranges[::-1]


def _union(lists: Iterable[list[str]]) -> tuple[str, ...]:
    return tuple(sorted(set(itertools.chain.from_iterable(lists))))


def _recode(codes: np.ndarray, names: list[str], common: tuple[str, ...]) -> np.ndarray:
    return np.array([common.index(name) for name in names], dtype=np.int64)[codes]


def _join(tables: list[dict[str, np.ndarray]], column: str) -> np.ndarray:
    return np.concatenate([t[column] for t in tables]) if tables else np.zeros(0, dtype=np.int64)


def _key(ids: np.ndarray, part: int) -> np.ndarray:
    """uint64 [Q]: bytes 8·part … 8·part + 7 of each id; part 0 orders as the ids do, but for ties."""
    return np.ascontiguousarray(ids[:, 8 * part : 8 * part + 8]).view(">u8").ravel().astype(np.uint64)
