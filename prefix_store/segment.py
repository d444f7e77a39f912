"""Sequences to and from one immutable segment: a Zarr v3 group of columnar arrays.

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

The group's attributes name the columns, the codes and the sha256 of every other file, and the segment's name is the
sha256 of that group file: whoever knows the name can check every byte.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
import threading
import uuid

import numpy as np

from prefix_store.chunked import ArrayReader, DamagedData, write_array
from prefix_store.disk import write_file
from prefix_store.trajectory import (
    SEGMENT_KINDS,
    SOURCE_KINDS,
    Context,
    Segment,
    Sequence,
    canonical_logprob,
    own_actions,
    sequence_from_record,
)

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
TABLE_ROWS = 1024
RECORD_ROWS = 65536
CHUNK_ROWS = {"contexts": TABLE_ROWS, "segments": TABLE_ROWS, "points": TABLE_ROWS, "sequences": TABLE_ROWS}
CHUNK_ROWS |= {"tokens": TOKEN_ROWS, "behaviour_logprob": TOKEN_ROWS, "weights_version": TOKEN_ROWS}
CHUNK_ROWS |= {"ids": TABLE_ROWS, "records": RECORD_ROWS}
ARRAYS = tuple(CHUNK_ROWS)


@dataclasses.dataclass(frozen=True)
class Item:
    """A checked sequence on its way to the disk: id (32 bytes), record (canonical JSON) and the sequence."""

    id: bytes
    record: bytes
    sequence: Sequence


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a version names a segment: its name (which pins its bytes) and what it holds."""

    name: str
    sequences: int
    points: int
    tokens: int


class _Codes(dict):
    """Numbers for strings in order of appearance."""

    def __missing__(self, key: str) -> int:
        self[key] = len(self)
        return self[key]


def write_segment(parent: pathlib.Path, items: list[Item]) -> tuple[pathlib.Path, Entry]:
    """Write the items (at least one) as a segment folder inside `parent`; returns the folder and its entry.

    The folder bears the segment's name already; `disk.publish_folder` flushes it and moves it into the store.
    """
    domains, splits, writers = _Codes(), _Codes(), _Codes()
    fingerprints: dict[str, dict[str, str]] = {}
    tokens, logprob, version = [], [], []
    contexts, segments, points, sequences, records = [], [], [], [], []
    token_at = record_at = 0
    for number, item in enumerate(items):
        seq = item.sequence
        context_start, point_start = len(contexts), len(points)
        for context_number, c in enumerate(seq.contexts):
            parent_number = -1 if c.parent is None else c.parent
            contexts.append((parent_number, c.fork, len(c.tokens), token_at, len(segments), len(c.segments)))
            segments.extend(
                (SEGMENT_KINDS.index(s.kind), s.start, s.end, s.turn, writers[s.writer]) for s in c.segments
            )
            points.extend((number, context_number, s.turn, s.start, s.end - s.start) for s in own_actions(c))
            tokens.append(c.tokens[c.fork :])
            logprob.append(canonical_logprob(c.behaviour_logprob[c.fork :]))
            version.append(c.weights_version[c.fork :])
            token_at += len(c.tokens) - c.fork
        record_end = record_at + len(item.record)
        row = (context_start, len(seq.contexts), point_start, len(points) - point_start, record_at, record_end)
        codes = (domains[seq.domain], SOURCE_KINDS.index(seq.source.kind), splits[seq.split])
        sequences.append((*row, *codes, int(seq.outcome.success), int(seq.outcome.is_infra)))
        records.append(item.record)
        record_at = record_end
        fingerprint = dict(vars(seq.fingerprint))
        fingerprints[json.dumps(fingerprint, sort_keys=True)] = fingerprint

    arrays = {
        "tokens": np.concatenate(tokens),
        "behaviour_logprob": np.concatenate(logprob),
        "weights_version": np.concatenate(version),
        "contexts": np.array(contexts, dtype=np.int64),
        "segments": np.array(segments, dtype=np.int32),
        "points": np.array(points, dtype=np.int32),
        "sequences": np.array(sequences, dtype=np.int64),
        "ids": np.frombuffer(b"".join(item.id for item in items), dtype=np.uint8).reshape(len(items), 32),
        "records": np.frombuffer(b"".join(records), dtype=np.uint8),
    }
    aside = parent / f"writing-{uuid.uuid4().hex}"
    try:
        aside.mkdir()
        name = _write_files(aside, arrays, (list(domains), list(splits), list(writers)), fingerprints)
        folder = parent / name
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder, Entry(name, len(items), len(points), token_at)


def _write_files(
    aside: pathlib.Path,
    arrays: dict[str, np.ndarray],
    codes: tuple[list[str], list[str], list[str]],
    fingerprints: dict[str, dict[str, str]],
) -> str:
    """Write arrays and group file into the folder; returns the name that the segment gets by its group file."""
    checksums = {}
    for name in ARRAYS:
        (aside / name).mkdir()
        for path in write_array(aside / name, arrays[name], CHUNK_ROWS[name]):
            checksums[str(path.relative_to(aside))] = hashlib.sha256(path.read_bytes()).hexdigest()
    attributes = {
        "layout": LAYOUT,
        # makes two segments of equal content two segments, so that removing one never touches another's
        "nonce": uuid.uuid4().hex,
        "columns": {
            "contexts": CONTEXT_COLUMNS,
            "segments": SEGMENT_COLUMNS,
            "points": POINT_COLUMNS,
            "sequences": SEQUENCE_COLUMNS,
        },
        "codes": {
            "kind": SEGMENT_KINDS,
            "source": SOURCE_KINDS,
            "domain": codes[0],
            "split": codes[1],
            "writer": codes[2],
        },
        "fingerprints": [fingerprints[key] for key in sorted(fingerprints)],
        "sha256": checksums,
    }
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"prefix_store": attributes}}
    data = json.dumps(group, indent=1).encode()
    write_file(aside / "zarr.json", data)
    return hashlib.sha256(data).hexdigest()[:NAME_DIGITS]


class SegmentReader:
    """Reads one segment. Arrays are mapped when first used; safe to use from several threads."""

    def __init__(self, folder: pathlib.Path):
        """Read and check the group file. Raises DamagedData naming the segment where it is missing or not sound."""
        self.folder, self.name = folder, folder.name
        try:
            data = (folder / "zarr.json").read_bytes()
        except OSError as error:
            raise DamagedData(f"segment {self.name}: zarr.json cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(data).hexdigest()[:NAME_DIGITS] != self.name:
            raise DamagedData(f"segment {self.name}: zarr.json is not the file that was published under this name")
        self.attributes = json.loads(data)["attributes"]["prefix_store"]
        if self.attributes["layout"] != LAYOUT:
            raise DamagedData(
                f"segment {self.name} has layout {self.attributes['layout']}, which this prefix_store cannot read "
                f"(it knows {LAYOUT}); use a newer one"
            )
        self.codes = self.attributes["codes"]
        self._arrays: dict[str, ArrayReader] = {}
        self._lock = threading.Lock()

    def array(self, name: str) -> ArrayReader:
        reader = self._arrays.get(name)
        if reader is None:
            with self._lock:
                digest = self.attributes["sha256"][f"{name}/zarr.json"]
                reader = self._arrays.setdefault(name, ArrayReader(self.folder / name, digest))
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

    def item(self, number: int) -> Item:
        """Sequence `number` of the segment with its id and record."""
        return Item(self.array("ids").read(number, number + 1).tobytes(), *self.content(number))

    def content(self, number: int) -> tuple[bytes, Sequence]:
        """Record (canonical JSON) and sequence of row `number`."""
        row = self._row("sequences", number)
        record = self.array("records").read(row["record_start"], row["record_end"]).tobytes()
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
            contexts.append(Context(tokens, logprob, version, segments, parent, c["fork"]))
        return record, sequence_from_record(json.loads(record), tuple(contexts))

    def ids(self) -> np.ndarray:
        """uint8 [Q, 32]: content hashes in the order of the segment."""
        return self.array("ids").all()
