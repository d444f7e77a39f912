"""StoreReader: what one version of a store holds, read at any sequence or decision point. PrefixStore builds on it.

A prefix costs two look-ups in the index and one or two chunks of one array. Readers of segments and the chunks read last
are kept in number-bounded caches, and the index is mapped, so that memory does not grow with the store.
"""

from __future__ import annotations

import collections
import functools
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from prefix_store.chunked import DamagedData
from prefix_store.disk import StoreError
from prefix_store.extras import Extra
from prefix_store.index import DecisionPoints, PointIndex, StoreIndex
from prefix_store.merged import load_rows
from prefix_store.segment import SegmentReader
from prefix_store.storage import Storage
from prefix_store.trajectory import DecisionPoint, Fingerprint, Sequence
from prefix_store.versions import is_removed

OPEN_SEGMENTS = 256
# readers of segments that are kept, at some 20 KiB each


def _naming(place: int) -> Callable:
    """For a method whose argument number `place` is a decision point or sequence id: damage that it meets is told with the
    sequence and what can be done."""

    def decorate(method: Callable) -> Callable:
        @functools.wraps(method)
        def named(self: StoreReader, *arguments: Any, **options: Any) -> Any:
            try:
                return method(self, *arguments, **options)
            except DamagedData as error:
                where = arguments[place] if len(arguments) > place else next(iter(options.values()), "")
                point = isinstance(where, DecisionPoint)
                who = f"sequence {where.sequence}, turn {where.turn}: " if point else f"sequence {where}: "
                raise self._with_remedy(error, who) from error

        return named

    return decorate


class StoreReader:
    """Reads one version of a store. Safe to use from several threads; needs no lock against writers."""

    mode = "r"

    def __init__(self, storage: Storage, manifest: dict[str, Any], skip_damaged: bool):
        self.storage = storage
        self.damaged: dict[str, str] = {}
        """Segments that were left out because they cannot be read (only with `skip_damaged`): name → reason."""
        self._skip_damaged = skip_damaged
        self._manifest = manifest
        self._readers: collections.OrderedDict[str, SegmentReader] = collections.OrderedDict()
        self._index: StoreIndex | None = None
        self._lock = threading.RLock()

    def _move_to(self, manifest: dict[str, Any]) -> None:
        self._manifest, self._index = manifest, None

    def _names(self) -> list[str]:
        """The names of this version's segments, in its order."""
        return [entry["name"] for entry in self._manifest["segments"]]

    def _list(self) -> tuple[list[str], Callable[[int], SegmentReader]]:
        """The names and, by number, the readers of this version's segments."""
        names = self._names()
        return names, lambda number: self._reader(names[number])

    def _reader(self, name: str) -> SegmentReader:
        with self._lock:
            reader = self._readers.get(name)
            if reader is None:
                reader = self._readers[name] = SegmentReader(self.storage, f"segments/{name}")
                if len(self._readers) > OPEN_SEGMENTS:
                    self._readers.popitem(last=False)
            else:
                self._readers.move_to_end(name)
            return reader

    def _segments(self) -> Iterator[SegmentReader]:
        """Readers of this version's segments, in the version's order, without those that were found damaged."""
        for name in self._names():
            if name in self.damaged:
                continue
            try:
                reader = self._reader(name)
                if self._skip_damaged:
                    for table in ("sequences", "contexts", "points"):
                        reader.columns(table)
                    reader.ids()
                yield reader
            except DamagedData as error:
                if not self._skip_damaged:
                    raise self._with_remedy(error) from error
                self.damaged[name] = str(error)

    def _store_index(self) -> StoreIndex:
        index = self._index
        if index is not None:
            return index
        with self._lock:
            if self._index is None:
                names = [reader.name for reader in self._segments()] if self._skip_damaged else self._names()
                try:
                    part = load_rows(
                        self.storage, names, lambda number: self._reader(names[number]), save=not self._skip_damaged
                    )
                except DamagedData as error:
                    raise self._with_remedy(error) from error
                self._index = StoreIndex(names, part)
                if self.mode == "r":
                    self.storage.close()  # the scratch folder in which an index was made
            return self._index

    def _with_remedy(self, error: DamagedData, who: str = "") -> DamagedData:
        if self.storage.location in str(error):
            return error
        try:
            gone = self._manifest["number"] and is_removed(self.storage, self._manifest["number"])
        except (OSError, StoreError):
            gone = False
        if gone:
            remedy = f"gc has removed {self._manifest['version']} while this handle read it; `refresh()` or open it again"
        else:
            remedy = (
                "`verify()` says what is lost, `quarantine()` makes a version without it, and "
                "PrefixStore.open(path, skip_damaged=True) opens what has sound tables"
            )
        return DamagedData(f"{self.storage.location}: {who}{error}; {remedy}", error.rows)

    def index(self) -> PointIndex:
        """The version's decision points as numpy columns. Raises DamagedData if a segment's tables cannot be read."""
        return self._store_index().points

    def __len__(self) -> int:
        """Committed sequences in this version (without damaged segments, where those are skipped)."""
        if self._skip_damaged:
            collections.deque(self._segments(), maxlen=0)
        return sum(entry["sequences"] for entry in self._manifest["segments"] if entry["name"] not in self.damaged)

    def ids(self) -> list[str]:
        """The ids of all sequences of this version, ascending."""
        points = self.index()
        return [points.sequence_id(ordinal) for ordinal in range(points.sequences)]

    def __iter__(self) -> Iterator[Sequence]:
        return (self.sequence(identity) for identity in self.ids())

    def __contains__(self, sequence_id: str) -> bool:
        try:
            self._store_index().find(sequence_id)
        except KeyError:
            return False
        return True

    def _at(self, index: StoreIndex, ordinal: int) -> tuple[SegmentReader, int, int]:
        """The segment of a sequence, its row there, and the row of its first context."""
        segment, row, context_start = index.where[ordinal].tolist()
        return self._reader(index.names[segment]), row, context_start

    @_naming(0)
    def sequence(self, sequence_id: str) -> Sequence:
        """The whole sequence with this id. Raises KeyError if this version does not hold it, DamagedData if it cannot
        be read."""
        index = self._store_index()
        reader, row, _ = self._at(index, index.find(sequence_id))
        return reader.content(row)[1]

    def records(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """(ordinal in the index, record) of every sequence: everything but its contexts, as plain values. Reads no tokens."""
        index = self._store_index()
        for ordinal in range(len(index.where)):
            reader, row, _ = self._at(index, ordinal)
            yield ordinal, json.loads(reader.record(row))

    def decision_points(
        self,
        domain: str | None = None,
        *,
        sources: Iterable[str] | None = None,
        success_only: bool = False,
        max_prefix_tokens: int | None = None,
    ) -> DecisionPoints:
        """The decision points that pass every filter, ordered by sequence id and turn, as a lazy sequence.

        sources are source kinds ("teacher", "expert", "demonstration", "student"); None takes all.
        """
        points = self.index()
        if domain is None and sources is None and not success_only and max_prefix_tokens is None:
            return DecisionPoints(points, range(len(points)))
        rows = points.rows(domain, sources=sources, success_only=success_only, max_prefix_tokens=max_prefix_tokens)
        return DecisionPoints(points, rows)

    @_naming(0)
    def prefix(self, point: DecisionPoint) -> np.ndarray:
        """uint32 [p]: all tokens of the context before the decision point, as the acting model saw them, and nothing of
        what was played there. Raises KeyError for a point that is not there, DamagedData where it cannot be read."""
        index = self._store_index()
        row = index.locate(point)
        reader, _, context_start = self._at(index, int(index.points.sequence[row]))
        stop = int(index.points.prefix_tokens[row])
        if index.fork[row]:
            return reader.context_values("tokens", context_start, point.context, stop)
        start = int(index.token_start[row])
        return reader.array("tokens").read(start, start + stop)

    @_naming(0)
    def continuation(self, point: DecisionPoint) -> np.ndarray:
        """uint32 [n]: the tokens of the action that was played at the decision point. The one route to them: for the
        demonstration stream and for analysis, never for a stream that learns from fresh turns."""
        index = self._store_index()
        row = index.locate(point)
        reader, _, _ = self._at(index, int(index.points.sequence[row]))
        # an action of a decision point never begins before its context's fork
        start = int(index.token_start[row]) + int(index.points.prefix_tokens[row]) - int(index.fork[row])
        return reader.array("tokens").read(start, start + int(index.points.action_tokens[row]))

    @_naming(1)
    def extra(self, name: str, where: DecisionPoint | str, context: int = 0) -> Extra:
        """The extra of this name over the prefix of a decision point, or, given a sequence id, over one whole context.

        Reads the rows of those tokens only. Raises KeyError for a point, sequence, context or extra that is not there,
        DamagedData where it cannot be read.
        """
        index = self._store_index()
        stop = None
        if isinstance(where, DecisionPoint):
            row = index.locate(where)
            ordinal, context, stop = int(index.points.sequence[row]), where.context, int(index.points.prefix_tokens[row])
        else:
            ordinal = index.find(where)
        reader, row, context_start = self._at(index, ordinal)
        kinds = json.loads(reader.record(row)).get("extras", {})
        identity = index.points.sequence_id(ordinal)
        if name not in kinds:
            raise KeyError(f"sequence {identity} has no extra {name!r}; it has {', '.join(sorted(kinds)) or 'none'}")
        if not 0 <= context < reader.contexts_of(row):
            raise KeyError(f"sequence {identity} has no context {context}")
        return reader.context_extra(reader.extra_folder(name, kinds[name]), context_start, context, stop)

    def fingerprints(self) -> list[Fingerprint]:
        """The distinct fingerprints of this version's sequences, in a fixed order."""
        found = [Fingerprint(**fingerprint) for fingerprint in self._store_index().about["fingerprints"]]
        return sorted(found, key=lambda fp: (fp.tokenizer, fp.chat_template, fp.model_config))

    def extras(self) -> list[dict[str, Any]]:
        """The extras that this version's sequences have: {"name", "dtype", "tail"} each, ordered by name."""
        return sorted(self._store_index().about["extras"], key=lambda extra: (extra["name"], extra["dtype"], extra["tail"]))
