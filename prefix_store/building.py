"""Sequences into one immutable segment: what they are, column by column, and the files that hold it (see segment.py)."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import uuid
from typing import NamedTuple

import numpy as np

from prefix_store.chunked import encode_array, pack_chunks
from prefix_store.content import canonical_json, hash_content, own_copy, segment_rows, sequence_record
from prefix_store.disk import write_file
from prefix_store.extras import Extra, canonical_values
from prefix_store.model import SEGMENT_KINDS, SOURCE_KINDS, Fingerprint, InvalidSequence, Sequence
from prefix_store.segment import (
    BESIDE_ROWS,
    CHUNK_ROWS,
    CONTEXT_COLUMNS,
    LAYOUT,
    NAME_DIGITS,
    POINT_COLUMNS,
    SEGMENT_COLUMNS,
    SEQUENCE_COLUMNS,
    TOKEN_ROWS,
    Item,
)
from prefix_store.validity import check_sequence

_KIND = {kind: code for code, kind in enumerate(SEGMENT_KINDS)}
EXTRA_CHUNK_BYTES = 32768
CODECS = {"behaviour_logprob": "lz4", "weights_version": "lz4"}
# others zstd. Random floats and runs of one number pack hardly better with zstd (7% of a store), but 2 to 4 times slower
TOKEN_COLUMNS = {"tokens": "<u4", "behaviour_logprob": "<f4", "weights_version": "<i4"}
PACKED_RUN = BESIDE_ROWS
# tokens are packed whenever so many have come (a multiple of their chunks' rows), while the cache still has them
PACKING_THREADS = min(4, os.cpu_count() or 1)


@dataclasses.dataclass(frozen=True)
class Entry:
    """How a version names a segment: its name (which pins its bytes) and what it holds."""

    name: str
    sequences: int
    points: int
    tokens: int


def prepare(sequence: Sequence) -> Item:
    """Make an item of a copy of the sequence, and check that. Raises InvalidSequence naming the place."""
    try:
        own = own_copy(sequence)
    except Exception:
        check_sequence(sequence)  # names what is not of the data model's types
        raise
    check_sequence(own, json_too=False)
    try:
        record = canonical_json(sequence_record(own)).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        check_sequence(sequence)  # names what has no JSON form
        raise InvalidSequence(f"the sequence cannot be written as JSON: {error}") from None
    return Item(bytes.fromhex(hash_content(record, own.contexts, canonical=True)), record, own)


class _ContextRow(NamedTuple):
    """A context but for its tokens and what lies beside them."""

    parent: int
    fork: int
    length: int
    segments: list[tuple]
    extras: dict[str, Extra]


class _Row(NamedTuple):
    """What a builder keeps of a sequence beside its tokens; `end` is the segment's token row behind its last one."""

    end: int
    record: bytes
    contexts: list[_ContextRow]
    domain: str
    source: str
    split: str
    success: bool
    is_infra: bool
    fingerprint: Fingerprint


class _Tokens(NamedTuple):
    """The columns with a row per token: the chunks that are packed (of `done` tokens), and a buffer with those behind
    them. What is in it beyond the last row's end is nothing. `spare` is a buffer to go on with."""

    packed: dict[str, list[bytes]]
    done: int
    buffer: dict[str, np.ndarray]
    spare: dict[str, np.ndarray]


class SegmentBuilder:
    """Takes items one after another and makes a segment of them. Keeps tokens packed, so that a buffered token takes
    about 3 bytes; an item whose `add` was interrupted is not there."""

    def __init__(self) -> None:
        self.weight = 0
        """Tokens so far, and extras in the same measure (12 bytes are a token)."""
        self._rows: dict[bytes, _Row] = {}
        self._tokens = _Tokens({name: [] for name in TOKEN_COLUMNS}, 0, _buffer(0), _buffer(0))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, identity: bytes) -> bool:
        return identity in self._rows

    @property
    def ids(self) -> list[bytes]:
        """The ids of the items, in their order."""
        return list(self._rows)

    @property
    def tokens(self) -> int:
        """How many tokens the items have, without those that children share."""
        return next(reversed(self._rows.values())).end if self._rows else 0

    def add(self, item: Item) -> None:
        """Take an item that is not there yet; nothing of its arrays is needed afterwards, but for its extras."""
        sequence = item.sequence
        own = sum(len(c.tokens) - c.fork for c in sequence.contexts)
        buffer, at = self._room(own)
        rows = []
        for c in sequence.contexts:
            length = len(c.tokens)
            for name, column in buffer.items():
                column[at : at + length - c.fork] = getattr(c, name)[c.fork :]
            at += length - c.fork
            rows.append(_ContextRow(-1 if c.parent is None else c.parent, c.fork, length, segment_rows(c), c.extras))
        about = (sequence.domain, sequence.source.kind, sequence.split, sequence.outcome.success, sequence.outcome.is_infra)
        # from here on it is there
        self._rows[item.id] = _Row(self.tokens + own, item.record, rows, *about, sequence.fingerprint)
        self.weight += own + sum(extra.values.nbytes // 12 for c in rows for extra in c.extras.values())

    def _room(self, count: int) -> tuple[dict[str, np.ndarray], int]:
        """A buffer with room for `count` more tokens, and the place in it behind those that are there."""
        packed, done, buffer, spare = self._tokens
        at = self.tokens - done
        if at >= PACKED_RUN:
            full = at // PACKED_RUN * PACKED_RUN
            packed = {name: packed[name] + _pack(name, column[:full]) for name, column in buffer.items()}
            for name, column in buffer.items():
                spare[name][: at - full] = column[full:at]
            self._tokens = _Tokens(packed, done + full, spare, buffer)
            return self._room(count)
        if at + count > len(buffer["tokens"]):
            size = PACKED_RUN + at + count
            larger, spare = _buffer(size), _buffer(size)
            for name, column in buffer.items():
                larger[name][:at] = column[:at]
            self._tokens = _Tokens(packed, done, larger, spare)
            buffer = larger
        return buffer, at

    def encode(self) -> tuple[Entry, dict[str, bytes]]:
        """The items (at least one) as a segment: its entry and its files, by name relative to the segment's folder.

        The group file `zarr.json` stands last: where it is there, all is there. The builder stays as it is.
        """
        arrays, attributes = _tables(self._rows)
        packed, done, buffer, _ = self._tokens
        tokens = self.tokens
        arrays = {name: column[: tokens - done] for name, column in buffer.items()} | arrays
        arrays |= _extra_arrays(self._rows, attributes["extras"], tokens)

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
        return Entry(name, len(self), len(arrays["points"]), tokens), files

    def write(self, parent: pathlib.Path) -> tuple[pathlib.Path, Entry]:
        """Write the items (at least one) as a segment folder inside `parent`; returns the folder and its entry.

        The folder bears the segment's name already; nothing is flushed to the device yet.
        """
        entry, files = self.encode()
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


def _buffer(size: int) -> dict[str, np.ndarray]:
    return {name: np.empty(size, dtype=dtype) for name, dtype in TOKEN_COLUMNS.items()}


def _pack(name: str, column: np.ndarray) -> list[bytes]:
    return pack_chunks(column, CHUNK_ROWS[name], CODECS.get(name, "zstd"))


def _group(attributes: dict) -> bytes:
    """The document of a Zarr v3 group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": attributes}, indent=1).encode()


def _rows_of(values: np.ndarray) -> int:
    """Rows of one chunk of an extra's values."""
    return max(1, EXTRA_CHUNK_BYTES // (values.dtype.itemsize * math.prod(values.shape[1:])))


class _Codes(dict):
    """Numbers for strings in order of appearance."""

    def __missing__(self, key: str) -> int:
        self[key] = len(self)
        return self[key]


def _tables(rows: dict[bytes, _Row]) -> tuple[dict[str, np.ndarray], dict]:
    """The arrays but those with a row per token, and the attributes of the group file (still without checksums)."""
    domains, splits, writers = _Codes(), _Codes(), _Codes()
    fingerprints: dict[Fingerprint, None] = {}
    extras: dict[tuple, None] = {}
    contexts, segments, points, sequences, records = [], [], [], [], []
    token_at = record_at = 0
    for number, row in enumerate(rows.values()):
        context_start, point_start = len(contexts), len(points) // 5
        for context_number, (parent, fork, length, segment_table, extras_of) in enumerate(row.contexts):
            contexts.append((parent, fork, length, token_at, len(segments) // 5, len(segment_table)))
            for kind, start, end, turn, writer in segment_table:
                segments += (_KIND[kind], start, end, turn, writers[writer])
                if kind == "action" and end > fork:
                    points += (number, context_number, turn, start, end - start)
            token_at += length - fork
            for name, extra in extras_of.items():
                extras[name, *extra.kind] = None
        record_end = record_at + len(row.record)
        turns = len(points) // 5 - point_start
        codes = (domains[row.domain], SOURCE_KINDS.index(row.source), splits[row.split])
        places = (context_start, len(row.contexts), point_start, turns, record_at, record_end)
        sequences.append((*places, *codes, int(row.success), int(row.is_infra)))
        records.append(row.record)
        record_at = record_end
        fingerprints[row.fingerprint] = None

    arrays = {
        "contexts": np.array(contexts, dtype=np.int64),
        "segments": np.array(segments, dtype=np.int32).reshape(-1, 5),  # flat lists become arrays twice as fast
        "points": np.array(points, dtype=np.int32).reshape(-1, 5),
        "sequences": np.array(sequences, dtype=np.int64),
        "ids": np.frombuffer(b"".join(rows), dtype=np.uint8).reshape(len(rows), 32),
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
    return arrays, attributes


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


def _extra_arrays(rows: dict[bytes, _Row], extras: list[dict], tokens: int) -> dict[str, np.ndarray]:
    """`extras/FOLDER/offsets` and `…/values` for each of the extras."""
    arrays = {}
    for extra in extras:
        kind = (extra["dtype"], tuple(extra["tail"]))
        counts = np.zeros(tokens + 1, dtype=np.int64)
        values = []
        at = 1
        for row in rows.values():
            for c in row.contexts:
                found = c.extras.get(extra["name"])
                if found is not None and found.kind == kind:
                    own = found.cut(c.fork, c.length)
                    counts[at : at + len(own)] = own.counts
                    values.append(own.values)
                at += c.length - c.fork
        joined = canonical_values(np.concatenate(values))
        if len(joined) == 0:
            joined = np.zeros((1, *kind[1]), dtype=joined.dtype)
        arrays[f"extras/{extra['folder']}/offsets"] = np.cumsum(counts)
        arrays[f"extras/{extra['folder']}/values"] = joined
    return arrays
