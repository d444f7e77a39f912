"""What a store segment is, and how it is read: an immutable Zarr v3 group of columnar arrays. building.py makes them.

A segment holds whole sequences. Its arrays (rows first):

    tokens            uint32 [N]     each context's own tokens one after another; what a child shares is its parent's
    behaviour_logprob float32 [N]    beside them
    weights_version   int32 [N]
    contexts          int64 [C, 6]   CONTEXT_COLUMNS
    segments          int32 [S, 5]   SEGMENT_COLUMNS
    points            int32 [P, 5]   POINT_COLUMNS, one row per decision point, in order of sequence and turn
    sequences         int64 [Q, 11]  SEQUENCE_COLUMNS
    ids               uint8 [Q, 32]  content hashes
    records           uint8 [R]      each sequence's record as canonical JSON (ASCII), one after another
    extras/NAME/offsets  int64 [N + 1]    the extra's values of token row i are rows offsets[i] … offsets[i + 1] - 1 of
    extras/NAME/values   any [V, ...tail] (one row of zeros where no token has any)

The group's attributes name the columns, the codes, the extras and the sha256 of every other file, and the segment's name
is the sha256 of that group file: whoever knows the name can check every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import threading
from typing import TYPE_CHECKING

import numpy as np

from prefix_store.chunked import ArrayReader, DamagedData
from prefix_store.content import sequence_from_record
from prefix_store.extras import Extra, join_extras
from prefix_store.model import Context, Segment, Sequence

if TYPE_CHECKING:
    from prefix_store.storage import Storage

LAYOUT = 1
NAME_DIGITS = 32
CONTEXT_COLUMNS = ("parent", "fork", "length", "token_start", "segment_start", "segment_count")
SEGMENT_COLUMNS = ("kind", "start", "end", "turn", "writer")
POINT_COLUMNS = ("sequence", "context", "turn", "prefix_tokens", "action_tokens")
SEQUENCE_COLUMNS = (
    "context_start",
    "context_count",
    "point_start",
    "turns",
    "record_start",
    "record_end",
    "domain",
    "source",
    "split",
    "success",
    "is_infra",
)
TOKEN_ROWS = 4096
# 16 KiB: a prefix touches one or two chunks, and unpacking one costs about 10 microseconds
BESIDE_ROWS = 16384
# what lies beside the tokens is read by whole sequences only; larger chunks are packed in half the time
TABLE_ROWS = 1024
RECORD_ROWS = 65536
CHUNK_ROWS = {"contexts": TABLE_ROWS, "segments": TABLE_ROWS, "points": TABLE_ROWS, "sequences": TABLE_ROWS}
CHUNK_ROWS |= {"tokens": TOKEN_ROWS, "behaviour_logprob": BESIDE_ROWS, "weights_version": BESIDE_ROWS}
CHUNK_ROWS |= {"ids": TABLE_ROWS, "records": RECORD_ROWS}
ARRAYS = tuple(CHUNK_ROWS)


@dataclasses.dataclass(frozen=True)
class Item:
    """A checked sequence on its way to the disk: id (32 bytes), record (canonical JSON) and the sequence, whose arrays are
    canonical (see content.own_copy)."""

    id: bytes
    record: bytes
    sequence: Sequence


class SegmentReader:
    """Reads one segment. Arrays are opened when first used; safe to use from several threads."""

    def __init__(self, storage: Storage, key: str, *, checked: bool = True):
        """Read and check the group file of the segment in the folder `key` ("segments/NAME") of a storage.

        Raises DamagedData naming the segment where it is missing or not sound. checked=False takes a damaged group file as
        far as it can be read, for a caller that checks every sequence against its id.
        """
        self.storage, self.key, self.name = storage, key, key.rpartition("/")[2]
        try:
            data = storage.read(f"{key}/zarr.json")
        except OSError as error:
            raise DamagedData(f"segment {self.name}: zarr.json cannot be read: {error.strerror or error}") from error
        if checked and hashlib.sha256(data).hexdigest()[:NAME_DIGITS] != self.name:
            raise DamagedData(f"segment {self.name}: zarr.json is not the file that was published under this name")
        try:
            self.attributes = json.loads(data)["attributes"]["prefix_store"]
            self.attributes["layout"], self.attributes["codes"], self.attributes["sha256"], self.attributes["columns"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"segment {self.name}: zarr.json cannot be read: {error!r}") from None
        if self.attributes["layout"] != LAYOUT:
            raise DamagedData(
                f"segment {self.name} has layout {self.attributes['layout']}, which this prefix_store cannot read "
                f"(it knows {LAYOUT}); use a newer one"
            )
        self.codes = self.attributes["codes"]
        self.extras = self.attributes.get("extras", [])
        """The extras that it holds: {"name", "dtype", "tail", "folder"} each."""
        self._arrays: dict[str, ArrayReader] = {}
        self._lock = threading.Lock()

    def array(self, name: str) -> ArrayReader:
        reader = self._arrays.get(name)
        if reader is None:
            with self._lock:
                digest = self.attributes["sha256"][f"{name}/zarr.json"]
                reader = self._arrays.setdefault(name, ArrayReader(self.storage, f"{self.key}/{name}", digest))
        return reader

    def columns(self, name: str) -> dict[str, np.ndarray]:
        """A whole table as columns by name."""
        table = self.array(name).all()
        return {column: table[:, i] for i, column in enumerate(self.attributes["columns"][name])}

    def _row(self, table: str, number: int) -> dict[str, int]:
        row = self.array(table).read(number, number + 1)[0].tolist()
        return dict(zip(self.attributes["columns"][table], row, strict=True))

    def context_values(self, name: str, context_start: int, context: int, stop: int | None = None) -> np.ndarray:
        """Values [0, stop) of one context in the ragged array `name`, what it shares with its parents included.

        context_start is the row of its sequence's first context; stop None takes the whole context.
        """
        row = self._row("contexts", context_start + context)
        stop = row["length"] if stop is None else stop
        own_stop = max(stop - row["fork"], 0)
        own = self.array(name).read(row["token_start"], row["token_start"] + own_stop)
        if row["fork"] == 0:
            return own
        shared = self.context_values(name, context_start, row["parent"], min(stop, row["fork"]))
        return np.concatenate([shared, own])

    def context_extra(self, folder: str, context_start: int, context: int, stop: int | None = None) -> Extra:
        """`context_values` for the extra in a folder of `extras`: that of tokens [0, stop) of one context."""
        row = self._row("contexts", context_start + context)
        stop = row["length"] if stop is None else stop
        first, own_stop = row["token_start"], max(stop - row["fork"], 0)
        offsets = self.array(f"extras/{folder}/offsets").read(first, first + own_stop + 1)
        values = self.array(f"extras/{folder}/values").read(int(offsets[0]), int(offsets[-1]))
        own = Extra(np.diff(offsets).astype(np.int32), values)
        if row["fork"] == 0:
            return own
        return join_extras([self.context_extra(folder, context_start, row["parent"], min(stop, row["fork"])), own])

    def extra_folder(self, name: str, kind: list) -> str:
        """The folder of the extra with this name and kind ([dtype, tail], as a record has it)."""
        for extra in self.extras:
            if extra["name"] == name and [extra["dtype"], extra["tail"]] == kind:
                return extra["folder"]
        raise KeyError(f"segment {self.name} has no extra {name!r} of kind {kind}")

    def contexts_of(self, number: int) -> int:
        """How many contexts row `number` has."""
        return self._row("sequences", number)["context_count"]

    def record(self, number: int) -> bytes:
        """The record (canonical JSON) of row `number`."""
        row = self._row("sequences", number)
        return self.array("records").read(row["record_start"], row["record_end"]).tobytes()

    def item(self, number: int) -> Item:
        """Sequence `number` of the segment with its id and record."""
        return Item(self.array("ids").read(number, number + 1).tobytes(), *self.content(number))

    def content(self, number: int) -> tuple[bytes, Sequence]:
        """Record (canonical JSON) and sequence of row `number`."""
        row = self._row("sequences", number)
        record = self.array("records").read(row["record_start"], row["record_end"]).tobytes()
        fields = json.loads(record)
        folders = {name: self.extra_folder(name, kind) for name, kind in fields.get("extras", {}).items()}
        first = row["context_start"]
        contexts = []
        for context in range(row["context_count"]):
            c = self._row("contexts", first + context)
            table = self.array("segments").read(c["segment_start"], c["segment_start"] + c["segment_count"]).tolist()
            segments = tuple(
                Segment(self.codes["kind"][kind], start, end, turn, self.codes["writer"][writer])
                for kind, start, end, turn, writer in table
            )
            tokens, logprob, version = (
                self.context_values(name, first, context) for name in ("tokens", "behaviour_logprob", "weights_version")
            )
            parent = None if c["parent"] < 0 else c["parent"]
            extras = {name: self.context_extra(folder, first, context) for name, folder in folders.items()}
            contexts.append(Context(tokens, logprob, version, segments, parent, c["fork"], extras))
        return record, sequence_from_record(fields, tuple(contexts))

    def ids(self) -> np.ndarray:
        """uint8 [Q, 32]: content hashes in the order of the segment."""
        return self.array("ids").all()
