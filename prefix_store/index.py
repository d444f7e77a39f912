"""The index of a store's version as numpy columns: which decision points there are and what is known of each.

Sequences stand in the order of their ids, not of the commits that brought them, so that a draw from the index depends
on what a version holds and not on which writer was first.
"""

from __future__ import annotations

import bisect
import collections.abc
import dataclasses
from collections.abc import Iterable

import numpy as np

from prefix_store.merged import COLUMNS, Part, Segments, cover, open_index
from prefix_store.segment import SegmentReader
from prefix_store.storage import Storage
from prefix_store.trajectory import SOURCE_KINDS, DecisionPoint


@dataclasses.dataclass(frozen=True)
class PointIndex:
    """Columns over P decision points of Q sequences; points are ordered by sequence id, then turn. Read-only, and mapped
    from files where the index is kept in files.

    Per point, each [P]:
        sequence int32       ordinal of its sequence, 0 … Q-1
        context int32        context number inside the sequence
        turn int32           depth: number of the turn that is about to be played
        turns int32          turns of the sequence
        prefix_tokens int32  tokens before the decision point
        action_tokens int32  length of what was played there
        domain int32         index into `domains`
        source int8          index into SOURCE_KINDS
        split int32          index into `splits`
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

    def __init__(self, index: PointIndex, rows: np.ndarray | range):
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
    """Where the sequences and decision points of a version lie. Columns are mapped where the index lies in files."""

    def __init__(self, names: list[str], part: Part):
        """names are those of the version's segments, in its order, and `part` the index of all of them."""
        self.names, self.about = names, part.about
        columns = {name: part.column(name) for name in COLUMNS}
        self.where = columns.pop("where")
        """int32 [Q, 3]: number of the segment, row in its `sequences`, row of its first context in its `contexts`."""
        self.token_start, self.fork = columns.pop("token_start"), columns.pop("fork")
        """Per point: where the own tokens of its context begin in the segment's `tokens`, and the context's fork."""
        domains, splits = (tuple(part.about[name]) for name in ("domains", "splits"))
        self.points = PointIndex(**columns, domains=domains, splits=splits)
        self._ids = memoryview(columns["ids"].reshape(-1))

    def find(self, sequence_id: str) -> int:
        """The ordinal of a sequence. Raises KeyError naming it if this version does not hold it."""
        try:
            identity = bytes.fromhex(sequence_id)
        except ValueError:
            identity = b""
        at = find_id(self._ids, identity) if len(identity) == 32 else -1
        if at < 0:
            raise KeyError(f"this version of the store holds no sequence {sequence_id!r}")
        return at

    def locate(self, point: DecisionPoint) -> int:
        """The row of a decision point. Raises KeyError if its sequence or the point is not there."""
        ordinal, columns = self.find(point.sequence), self.points
        row = int(columns.first[ordinal]) + point.turn
        if not columns.first[ordinal] <= row < columns.first[ordinal + 1] or columns.context[row] != point.context:
            place = f"context {point.context}, turn {point.turn}"
            raise KeyError(f"sequence {point.sequence} has no decision point at {place}")
        return row


def find_id(ids: memoryview, identity: bytes) -> int:
    """The place of a hash (32 bytes) among ascending ones (their bytes, one after another); -1 if it is not there."""
    count = len(ids) // 32
    at = bisect.bisect_left(range(count), identity, key=lambda n: bytes(ids[32 * n : 32 * n + 32]))
    return at if at < count and ids[32 * at : 32 * at + 32] == identity else -1


class KnownIds:
    """Which sequences a version holds, for writers: ids in mapped indexes, and a set for segments that have none yet."""

    def __init__(self, storage: Storage, names: list[str], segments: Segments):
        """Raises DamagedData if the table of ids of a segment cannot be read."""
        self._mapped: list[memoryview] = []
        self._ids: set[bytes] = set()
        for found in cover(storage, names):
            part = open_index(storage, found)
            if part is not None:
                self._mapped.append(memoryview(part.column("ids").reshape(-1)))
                continue
            for number in range(found.start, found.stop):
                self.add_segment(segments(number))

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._ids or any(find_id(ids, identity) >= 0 for ids in self._mapped)

    def add_segment(self, reader: SegmentReader) -> None:
        """Take up the ids of a segment."""
        data = reader.ids().tobytes()
        self._ids.update(data[at : at + 32] for at in range(0, len(data), 32))

    def update(self, ids: Iterable[bytes]) -> None:
        """Take up ids."""
        self._ids.update(ids)
