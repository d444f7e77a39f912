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
    extras/NAME/offsets  int64 [N + 1]    the extra's values of token row i are rows offsets[i] … offsets[i + 1] - 1 of
    extras/NAME/values   any [V, ...tail] (one row of zeros where no token has any)

The group's attributes name the columns, the codes, the extras and the sha256 of every other file, and the segment's name
is the sha256 of that group file: whoever knows the name can check every byte.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import threading
import uuid
from typing import TYPE_CHECKING

import numpy as np

from prefix_store.chunked import ArrayReader, DamagedData, encode_array, pack_chunks
from prefix_store.content import canonical_json, hash_content, own_copy, sequence_from_record, sequence_record
from prefix_store.disk import write_file
from prefix_store.extras import Extra, canonical_values, join_extras
from prefix_store.model import SEGMENT_KINDS, SOURCE_KINDS, Context, Fingerprint, InvalidSequence, Segment, Sequence
from prefix_store.validity import check_sequence

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
_KIND = {kind: code for code, kind in enumerate(SEGMENT_KINDS)}
TOKEN_ROWS = 4096
# 16 KiB: a prefix touches one or two chunks, and unpacking one costs about 10 microseconds
TABLE_ROWS = 1024
RECORD_ROWS = 65536
CHUNK_ROWS = {"contexts": TABLE_ROWS, "segments": TABLE_ROWS, "points": TABLE_ROWS, "sequences": TABLE_ROWS}
CHUNK_ROWS |= {"tokens": TOKEN_ROWS, "behaviour_logprob": TOKEN_ROWS, "weights_version": TOKEN_ROWS}
CHUNK_ROWS |= {"ids": TABLE_ROWS, "records": RECORD_ROWS}
ARRAYS = tuple(CHUNK_ROWS)
EXTRA_CHUNK_BYTES = 32768
CODECS = {"behaviour_logprob": "lz4", "weights_version": "lz4"}
# others zstd. Random floats and runs of one number pack hardly better with zstd (7% of a store), but 2 to 4 times slower
PACKED_RUN = 16 * TOKEN_ROWS
PACKING_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Item:
    """A checked sequence on its way to the disk: id (32 bytes), record (canonical JSON) and the sequence, whose arrays are
    canonical (see content.own_copy)."""

    id: bytes
    record: bytes
    sequence: Sequence

    @property
    def weight(self) -> int:
        """What it adds to a buffer: its tokens, and its extras in the same measure (12 bytes are a token)."""
        contexts = self.sequence.contexts
        tokens = sum(len(c.tokens) - c.fork for c in contexts)
        return tokens + sum(extra.values.nbytes // 12 for c in contexts for extra in c.extras.values())


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a version names a segment: its name (which pins its bytes) and what it holds."""

    name: str
    sequences: int
    points: int
    tokens: int


def prepare(sequence: Sequence) -> Item:
    """Check a sequence and make an item of a copy of it. Raises InvalidSequence naming the place."""
    check_sequence(sequence, json_too=False)
    own = own_copy(sequence)
    try:
        record = canonical_json(sequence_record(own)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        check_sequence(sequence)  # names what has no JSON form
        raise InvalidSequence(f"the sequence cannot be written as JSON: {error}") from None
    return Item(bytes.fromhex(hash_content(record, own.contexts, canonical=True)), record, own)


class _Codes(dict):
    """Numbers for strings in order of appearance."""

    def __missing__(self, key: str) -> int:
        self[key] = len(self)
        return self[key]


class Packer:
    """Packs the tokens of items, and what lies beside them, in other threads while more items are on their way."""

    COLUMNS = ("tokens", "behaviour_logprob", "weights_version")

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._waiting: list[tuple[np.ndarray, ...]] = []
        self._rows = self.tokens = 0
        self._jobs: list[concurrent.futures.Future] = []

    def add(self, item: Item) -> None:
        """Take the next item."""
        for c in item.sequence.contexts:
            self._waiting.append(tuple(getattr(c, name)[c.fork :] for name in self.COLUMNS))
            self._rows += len(c.tokens) - c.fork
            self.tokens += len(c.tokens) - c.fork
        if self._rows >= PACKED_RUN:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(PACKING_THREADS)
            arrays = [np.concatenate(parts) for parts in zip(*self._waiting, strict=True)]
            full = self._rows // PACKED_RUN * PACKED_RUN
            self._jobs.append(self._pool.submit(self._pack, [array[:full] for array in arrays]))
            self._waiting, self._rows = [tuple(array[full:] for array in arrays)], self._rows - full

    def _pack(self, arrays: list[np.ndarray]) -> list[list[bytes]]:
        pairs = zip(self.COLUMNS, arrays, strict=True)
        return [pack_chunks(array, CHUNK_ROWS[name], CODECS.get(name, "zstd")) for name, array in pairs]

    def rest(self) -> dict[str, np.ndarray]:
        """The rows that are not packed yet, by column."""
        columns = zip(*self._waiting, strict=True)
        return {name: np.concatenate(parts) for name, parts in zip(self.COLUMNS, columns, strict=True)}

    def packed(self) -> dict[str, list[bytes]]:
        """The chunks so far, by column; waits for those that are being packed."""
        done = [job.result() for job in self._jobs]
        return {name: [frame for job in done for frame in job[n]] for n, name in enumerate(self.COLUMNS)}

    def close(self) -> None:
        """Let the threads go; they come again where more is added."""
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None


def encode_segment(items: list[Item], packer: Packer | None = None) -> tuple[Entry, dict[str, bytes]]:
    """The items (at least one) as a segment: its entry and its files, by name relative to the segment's folder.

    The group file `zarr.json` stands last: where it is there, all is there. `packer` has been given the same items.
    """
    arrays, attributes, tokens = _tables(items)
    if packer is None or packer.tokens != tokens:  # not equal where an append was interrupted
        packer = Packer()
        for item in items:
            packer.add(item)
    arrays = packer.rest() | arrays | _extra_arrays(items, attributes["extras"], tokens)
    packed = packer.packed()
    packer.close()

    def encode(name: str) -> dict[str, tuple[bytes, str]]:
        rows = CHUNK_ROWS.get(name) or (TOKEN_ROWS if name.endswith("/offsets") else _rows_of(arrays[name]))
        made = encode_array(arrays[name], rows, CODECS.get(name, "zstd"), packed.get(name))
        return {f"{name}/{file}": (data, hashlib.sha256(data).hexdigest()) for file, data in made.items()}

    with concurrent.futures.ThreadPoolExecutor(PACKING_THREADS) as pool:
        made = [item for found in pool.map(encode, arrays) for item in found.items()]
    if attributes["extras"]:
        for group in ["extras", *(f"extras/{extra['folder']}" for extra in attributes["extras"])]:
            made.append((f"{group}/zarr.json", (_group({}), hashlib.sha256(_group({})).hexdigest())))
    files = {name: data for name, (data, _) in made}
    attributes["sha256"] = {name: digest for name, (_, digest) in made}
    data = files["zarr.json"] = _group({"prefix_store": attributes})
    name = hashlib.sha256(data).hexdigest()[:NAME_DIGITS]
    return Entry(name, len(items), len(arrays["points"]), tokens), files


def write_segment(parent: pathlib.Path, items: list[Item], packer: Packer | None = None) -> tuple[pathlib.Path, Entry]:
    """Write the items (at least one) as a segment folder inside `parent`; returns the folder and its entry.

    The folder bears the segment's name already; nothing is flushed to the device yet.
    """
    entry, files = encode_segment(items, packer)
    aside = parent / f"writing-{uuid.uuid4().hex}"
    try:
        for name, data in files.items():
            path = aside / name
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, data)
        folder = parent / entry.name
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return folder, entry


def _group(attributes: dict) -> bytes:
    """The document of a Zarr v3 group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=1).encode()


def _rows_of(values: np.ndarray) -> int:
    """Rows of one chunk of an extra's values."""
    return max(1, EXTRA_CHUNK_BYTES // (values.dtype.itemsize * math.prod(values.shape[1:])))


def _tables(items: list[Item]) -> tuple[dict[str, np.ndarray], dict, int]:
    """The arrays but those with a row per token, the attributes of the group file (still without checksums), and the
    number of tokens."""
    domains, splits, writers = _Codes(), _Codes(), _Codes()
    fingerprints: dict[Fingerprint, None] = {}
    extras: dict[tuple, None] = {}
    contexts, segments, points, sequences, records = [], [], [], [], []
    token_at = record_at = 0
    for number, item in enumerate(items):
        seq = item.sequence
        context_start, point_start = len(contexts), len(points) // 5
        for context_number, c in enumerate(seq.contexts):
            parent_number = -1 if c.parent is None else c.parent
            contexts.append((parent_number, c.fork, len(c.tokens), token_at, len(segments) // 5, len(c.segments)))
            for s in c.segments:
                segments += (_KIND[s.kind], s.start, s.end, s.turn, writers[s.writer])
                if s.kind == "action" and s.end > c.fork:
                    points += (number, context_number, s.turn, s.start, s.end - s.start)
            token_at += len(c.tokens) - c.fork
            for name, extra in c.extras.items():
                extras[name, *extra.kind] = None
        record_end = record_at + len(item.record)
        row = (context_start, len(seq.contexts), point_start, len(points) // 5 - point_start, record_at, record_end)
        codes = (domains[seq.domain], SOURCE_KINDS.index(seq.source.kind), splits[seq.split])
        sequences.append((*row, *codes, int(seq.outcome.success), int(seq.outcome.is_infra)))
        records.append(item.record)
        record_at = record_end
        fingerprints[seq.fingerprint] = None

    arrays = {
        "contexts": np.array(contexts, dtype=np.int64),
        "segments": np.array(segments, dtype=np.int32).reshape(-1, 5),  # flat lists become arrays twice as fast
        "points": np.array(points, dtype=np.int32).reshape(-1, 5),
        "sequences": np.array(sequences, dtype=np.int64),
        "ids": np.frombuffer(b"".join(item.id for item in items), dtype=np.uint8).reshape(len(items), 32),
        "records": np.frombuffer(b"".join(records), dtype=np.uint8),
    }
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
            "domain": list(domains),
            "split": list(splits),
            "writer": list(writers),
        },
        "extras": _extra_folders(extras),
        "fingerprints": sorted((dict(vars(found)) for found in fingerprints), key=canonical_json),
    }
    return arrays, attributes, token_at


def _extra_folders(kinds: dict[tuple, None]) -> list[dict]:
    """How the group file names the extras: {"name", "dtype", "tail", "folder"}. A name that comes with several types
    (from sequences that were made differently) has a folder for each."""
    taken = {name for name, _, _ in kinds}
    seen: set[str] = set()
    out = []
    for name, dtype, tail in sorted(kinds):
        folder, number = name, 1
        while folder in seen or (number > 1 and folder in taken):
            number += 1
            folder = f"{name}.{number}"
        seen.add(folder)
        out.append({"name": name, "dtype": dtype, "tail": list(tail), "folder": folder})
    return out


def _extra_arrays(items: list[Item], extras: list[dict], tokens: int) -> dict[str, np.ndarray]:
    """`extras/FOLDER/offsets` and `…/values` for each of the extras."""
    arrays = {}
    for extra in extras:
        kind = (extra["dtype"], tuple(extra["tail"]))
        counts = np.zeros(tokens + 1, dtype=np.int64)
        values = []
        at = 1
        for item in items:
            for c in item.sequence.contexts:
                found = c.extras.get(extra["name"])
                if found is not None and found.kind == kind:
                    own = found.cut(c.fork, len(c.tokens))
                    counts[at : at + len(own)] = own.counts
                    values.append(own.values)
                at += len(c.tokens) - c.fork
        joined = canonical_values(np.concatenate(values))
        if len(joined) == 0:
            joined = np.zeros((1, *kind[1]), dtype=joined.dtype)
        arrays[f"extras/{extra['folder']}/offsets"] = np.cumsum(counts)
        arrays[f"extras/{extra['folder']}/values"] = joined
    return arrays


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
