"""Index files: the decision points of a run of segments in one table, mapped rather than read, merged in tiers.

An index covers the segments [start, stop) of a version's list and lies in `index/KIND-START-STOP-DIGEST/`, where the
digest is one of their names: what it holds never changes, and any of them may be deleted at any time. It is a Zarr v3
group of uncompressed arrays of one chunk each, followed by their crc32c, so that a reader maps them and any Zarr library
opens them. Rows are ordered by sequence id. Writers make *tiers*, merging the newest where enough small ones have come
together; a reader merges the tiers of its version into a *whole* index. docs/prefix_store.md describes the arrays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import mmap
import pathlib
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import google_crc32c
import numpy as np

from prefix_store.chunked import CRC_BYTES, DamagedData, shard_name
from prefix_store.disk import StoreError
from prefix_store.segment import SegmentReader
from prefix_store.storage import LocalStorage, Storage
from prefix_store.trajectory import SOURCE_KINDS, canonical_json

INDEX_LAYOUT = 1
FAN = 16
# parts of one size that are merged into one: a store of n segments has at most 15 parts for each power of 16 below n,
# and a row is written again log16(n) times
BLOCK_POINTS = 1 << 18
# merged at a time: about 40 MB with the copies that sorting makes, however large the store is
GROUP_POINTS = 500_000
# rows of single segments that are merged in memory before they are written aside
SAVED_PARTS, SAVED_POINTS = 8, 20_000
# what has fewer parts and points is merged again in a few milliseconds whenever it is needed, and never written
KEPT_WHOLES = 2
# versions with a whole index; an older one is merged again from the tiers when its version is opened
CHECK_BYTES = 4 << 20

SEQUENCE_COLUMNS = {"ids": ("uint8", (32,)), "where": ("int32", (3,))}
POINT_COLUMNS = {
    "sequence": ("int32", ()),
    "context": ("int32", ()),
    "turn": ("int32", ()),
    "turns": ("int32", ()),
    "prefix_tokens": ("int32", ()),
    "action_tokens": ("int32", ()),
    "domain": ("int32", ()),
    "source": ("int8", ()),
    "split": ("int32", ()),
    "success": ("bool", ()),
    "token_start": ("int64", ()),
    "fork": ("int32", ()),
}
COLUMNS = SEQUENCE_COLUMNS | {"first": ("int64", ())} | POINT_COLUMNS
_NAME = re.compile(r"(tier|whole)-(\d+)-(\d+)-[0-9a-f]{32}")
_log = logging.getLogger(__name__)

Segments = Callable[[int], SegmentReader]
"""Gives the reader of segment `number` of a version's list."""


class Rows:
    """Index rows in memory.

    columns   ids uint8 [Q, 32] ascending; where int32 [Q, 3]: number of the segment (0 is the first one that these rows
              cover), row in its `sequences`, row of its first context in its `contexts`; first int64 [Q + 1]; and per
              point [P] the columns of PointIndex with token_start int64 (row in `tokens` of the segment where the own
              tokens of the point's context begin) and fork int32
    about     domains and splits behind the codes, fingerprints and extras of the sequences: plain JSON data
    """

    def __init__(self, columns: dict[str, np.ndarray], about: dict[str, list]):
        self.columns, self.about = columns, about
        self.sequences, self.points = len(columns["ids"]), len(columns["turn"])

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of one column."""
        return self.columns[name][start:stop]

    def column(self, name: str) -> np.ndarray:
        return self.columns[name]


class _Fetched:
    """A file of an object store, fetched whole: looking something up touches many places of it."""

    def __init__(self, data: bytes):
        self._data, self.size = memoryview(data), len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return self._data[start:stop]


class IndexFile:
    """The same rows in an index folder; columns are views of mapped files where the storage is a local folder."""

    def __init__(self, storage: Storage, key: str):
        """Read the group file and check every array's checksum. Raises DamagedData where one is not sound, OSError where
        it is not there."""
        try:
            attributes = json.loads(storage.read(f"{key}/zarr.json"))["attributes"]["prefix_store_index"]
            digest = attributes.pop("sha256")
            if digest != _digest(canonical_json(attributes)) or attributes["layout"] != INDEX_LAYOUT:
                raise ValueError("it fails its checksum")
            self.about = {name: attributes[name] for name in _ABOUT}
            self.sequences, self.points = attributes["sequences"], attributes["points"]
            checksums = attributes["crc32c"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedData(f"{key}/zarr.json cannot be read: {error}") from error
        self._files = {}
        for name, (_, tail) in COLUMNS.items():
            file = storage.file(f"{key}/{name}/{shard_name(1 + len(tail))}")
            if not isinstance(storage, LocalStorage):
                file = _Fetched(file.read(0, file.size))
            self._files[name] = file
            size = self._length(name) * _row_bytes(name)
            if file.size != size + CRC_BYTES or _checksum(file, size) != checksums[name]:
                raise DamagedData(f"{key}/{name} fails its checksum")

    def _length(self, name: str) -> int:
        if name in SEQUENCE_COLUMNS:
            return self.sequences
        return self.sequences + 1 if name == "first" else self.points

    def read(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of one column, read-only."""
        dtype, tail = COLUMNS[name]
        size = _row_bytes(name)
        data = self._files[name].read(start * size, stop * size)
        return np.frombuffer(data, dtype=np.dtype(dtype).newbyteorder("<")).reshape(stop - start, *tail)

    def column(self, name: str) -> np.ndarray:
        return self.read(name, 0, self._length(name))


Part = Rows | IndexFile
_ABOUT = ("domains", "splits", "fingerprints", "extras")


def _row_bytes(name: str) -> int:
    dtype, tail = COLUMNS[name]
    return np.dtype(dtype).itemsize * int(np.prod(tail, dtype=np.int64))


def _checksum(file: Any, size: int) -> int:
    """crc32c of the first `size` bytes. What was mapped for it is let go again, so that checking needs no memory."""
    crc = 0
    for at in range(0, size, CHECK_BYTES):
        block = file.read(at, min(at + CHECK_BYTES, size))
        crc = google_crc32c.extend(crc, bytes(block))
        if isinstance(block, memoryview) and isinstance(block.obj, mmap.mmap):
            block.obj.madvise(mmap.MADV_DONTNEED)
    return crc


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ---------------------------------------------------------------------------------------------------------------
# Rows from segments, and rows from rows


def segment_rows(reader: SegmentReader) -> Rows:
    """The index rows of one segment. Raises DamagedData if its tables cannot be read."""
    sequences, contexts, points = (reader.columns(name) for name in ("sequences", "contexts", "points"))
    ids = reader.ids()
    order = _ascending(ids)
    turns = sequences["turns"][order]
    first = np.concatenate([[0], np.cumsum(turns)])
    sequence = np.repeat(np.arange(len(order)), turns)
    rows = np.repeat(sequences["point_start"][order] - first[:-1], turns) + np.arange(first[-1])
    context = sequences["context_start"][order][sequence] + points["context"][rows]
    source = np.array([SOURCE_KINDS.index(kind) for kind in reader.codes["source"]])[sequences["source"]]
    columns = {
        "ids": ids[order],
        "where": np.stack([np.zeros(len(order), np.int64), order, sequences["context_start"][order]], axis=1),
        "first": first,
        "sequence": sequence,
        "turns": turns[sequence],
        "source": source[order][sequence],
        "token_start": contexts["token_start"][context],
        "fork": contexts["fork"][context],
    }
    columns |= {name: points[name][rows] for name in ("context", "turn", "prefix_tokens", "action_tokens")}
    columns |= {name: sequences[name][order][sequence] for name in ("domain", "split", "success")}
    about = {
        "domains": reader.codes["domain"],
        "splits": reader.codes["split"],
        "fingerprints": reader.attributes["fingerprints"],
        "extras": [{key: extra[key] for key in ("name", "dtype", "tail")} for extra in reader.extras],
    }
    return Rows({name: columns[name].astype(COLUMNS[name][0]) for name in COLUMNS}, about)


def _ascending(ids: np.ndarray) -> np.ndarray:
    """int64 [Q]: the rows of `ids` in ascending order; of equal ones the first stays first."""
    keys = np.ascontiguousarray(ids).view(">u8").astype(np.uint64).reshape(-1, 4)
    order = np.argsort(keys[:, 0], kind="stable")
    first = keys[order, 0]
    return np.lexsort(keys.T[::-1]) if (first[1:] == first[:-1]).any() else order


def _about(parts: list[Part]) -> dict[str, list]:
    """What the parts say together, each list in a fixed order."""
    out = {name: sorted({text for part in parts for text in part.about[name]}) for name in ("domains", "splits")}
    for name in ("fingerprints", "extras"):
        found = {canonical_json(item): item for part in parts for item in part.about[name]}
        out[name] = [found[key] for key in sorted(found)]
    return out


def merge(parts: list[tuple[int, Part]], about: dict[str, list]) -> Iterator[dict[str, np.ndarray]]:
    """Blocks of columns in the order of the ids, from parts and the number of the first segment of each, in list order.

    A sequence that two segments hold counts once (the first one's). `first` is given without its leading 0. Ids are
    hashes, so that equal ranges of ids hold about equally many: a block is one range, and only its rows are in memory.
    """
    blocks = max(1, sum(part.points for _, part in parts) // BLOCK_POINTS)
    edges = [[0] + [_lower(part, b, blocks) for b in range(1, blocks)] + [part.sequences] for _, part in parts]
    codes = {
        name: [np.array([about[f"{name}s"].index(text) for text in part.about[f"{name}s"]], np.int64) for _, part in parts]
        for name in ("domain", "split")
    }
    sequence_at = point_at = 0
    for block in range(blocks):
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in COLUMNS}
        for number, (start, part) in enumerate(parts):
            a, b = edges[number][block], edges[number][block + 1]
            first = part.read("first", a, b + 1)
            pieces["first"].append(np.diff(first))
            for name in POINT_COLUMNS:
                rows = part.read(name, int(first[0]), int(first[-1]))
                pieces[name].append(codes[name][number][rows] if name in codes else rows)
            pieces["ids"].append(part.read("ids", a, b))
            pieces["where"].append(part.read("where", a, b) + np.array([start, 0, 0], dtype=np.int32))
        columns = {name: np.concatenate(pieces[name]) for name in COLUMNS}
        turns, starts = columns["first"], np.concatenate([[0], np.cumsum(columns["first"])[:-1]]).astype(np.int64)
        order = _ascending(columns["ids"])
        if len(order):
            ordered = columns["ids"][order]
            order = order[np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])]
        turns = turns[order]
        first = np.cumsum(turns)
        rows = np.repeat(starts[order] - (first - turns), turns) + np.arange(first[-1] if len(order) else 0)
        out = {name: columns[name][order] for name in SEQUENCE_COLUMNS}
        out |= {name: columns[name][rows] for name in POINT_COLUMNS}
        out["sequence"] = np.repeat(np.arange(len(order)) + sequence_at, turns)
        out["first"] = first + point_at
        yield {name: out[name].astype(COLUMNS[name][0], copy=False) for name in COLUMNS}
        sequence_at, point_at = sequence_at + len(order), point_at + len(rows)


def _lower(part: Part, block: int, blocks: int) -> int:
    """How many of the part's ids lie below the beginning of a block's range."""
    edge = ((block << 64) // blocks).to_bytes(8, "big")
    low, high = 0, part.sequences
    while low < high:
        middle = (low + high) // 2
        if part.read("ids", middle, middle + 1)[0, :8].tobytes() < edge:
            low = middle + 1
        else:
            high = middle
    return low


def merged_rows(parts: list[tuple[int, Part]]) -> Rows:
    """The parts as one table in memory."""
    about = _about([part for _, part in parts])
    blocks = list(merge(parts, about))
    columns = {name: np.concatenate([block[name] for block in blocks]) for name in COLUMNS}
    columns["first"] = np.concatenate([[0], columns["first"]]).astype(np.int64)
    return Rows(columns, about)


# ---------------------------------------------------------------------------------------------------------------
# Folders


def _write(folder: pathlib.Path, parts: list[tuple[int, Part]]) -> None:
    """Write the parts as one index into a new local folder, one block at a time."""
    about = _about([part for _, part in parts])
    checksums, lengths = dict.fromkeys(COLUMNS, 0), dict.fromkeys(COLUMNS, 0)
    with contextlib.ExitStack() as stack:
        files = {}
        for name, (_, tail) in COLUMNS.items():
            (folder / name).mkdir(parents=True)
            files[name] = stack.enter_context(open(folder / name / shard_name(1 + len(tail)), "xb"))

        def put(name: str, rows: np.ndarray) -> None:
            data = np.ascontiguousarray(rows, dtype=np.dtype(COLUMNS[name][0]).newbyteorder("<")).tobytes()
            files[name].write(data)
            checksums[name] = google_crc32c.extend(checksums[name], data)
            lengths[name] += len(rows)

        put("first", np.zeros(1, dtype=np.int64))
        for block in merge(parts, about):
            for name, rows in block.items():
                put(name, rows)
        for name, file in files.items():
            file.write(checksums[name].to_bytes(CRC_BYTES, "little"))
    for name, (dtype, tail) in COLUMNS.items():
        (folder / name / "zarr.json").write_text(json.dumps(_metadata([lengths[name], *tail], dtype), indent=1))
    attributes = {"layout": INDEX_LAYOUT, "sequences": lengths["ids"], "points": lengths["turn"], "crc32c": checksums} | about
    attributes["sha256"] = _digest(canonical_json(attributes))
    group = {"zarr_format": 3, "node_type": "group", "attributes": {"prefix_store_index": attributes}}
    (folder / "zarr.json").write_text(json.dumps(group, indent=1))


def _metadata(shape: list[int], dtype: str) -> dict:
    endian = {} if np.dtype(dtype).itemsize == 1 else {"configuration": {"endian": "little"}}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in shape]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": False if dtype == "bool" else 0,
        "codecs": [{"name": "bytes"} | endian, {"name": "crc32c"}],
        "attributes": {},
        "storage_transformers": [],
    }


@dataclasses.dataclass(frozen=True, order=True)
class Found:
    """An index folder that covers segments [start, stop) of a list."""

    start: int
    stop: int
    name: str

    @property
    def whole(self) -> bool:
        return self.name.startswith("whole-")


def index_name(names: list[str], start: int, stop: int, kind: str) -> str:
    """The folder of the index ("tier" or "whole") of segments [start, stop) of a version's list of segment names."""
    return f"{kind}-{start}-{stop}-{_digest(f'{INDEX_LAYOUT} ' + ' '.join(names[start:stop]))[:32]}"


def found_indexes(storage: Storage, names: list[str]) -> list[Found]:
    """The indexes in the storage that cover segments of this list, ascending."""
    out = []
    for name in storage.names("index"):
        match = _NAME.fullmatch(name)
        if match:
            start, stop = int(match[2]), int(match[3])
            if start < stop <= len(names) and name == index_name(names, start, stop, match[1]):
                out.append(Found(start, stop, name))
    return sorted(out)


def stale_indexes(storage: Storage, lists: Iterable[list[str]]) -> list[str]:
    """Names of index folders that serve none of these lists of segment names (one for each version): `gc` may delete
    them, with `storage.delete_folder(f"index/{name}")`, as it may delete any other."""
    serving = {found.name for names in lists for found in found_indexes(storage, names)}
    return [name for name in storage.names("index") if name not in serving and name.startswith(("tier-", "whole-"))]


def cover(storage: Storage, names: list[str], wholes: bool = True) -> list[Found]:
    """Consecutive ranges of the list: indexes that are there, from each place the longest, and where there is none
    single segments, with no name. Without `wholes` of tiers only."""
    longest = {found.start: found for found in found_indexes(storage, names) if wholes or not found.whole}
    out, at = [], 0  # they come ascending, so that the last and longest of each start stays
    while at < len(names):
        out.append(longest.get(at, Found(at, at + 1, "")))
        at = out[-1].stop
    return out


def open_index(storage: Storage, found: Found) -> IndexFile | None:
    """The index that was found, None where it cannot be had. One that is damaged is deleted, so that it is made again."""
    if not found.name:
        return None
    key = f"index/{found.name}"
    try:
        return IndexFile(storage, key)
    except DamagedData as error:
        _log.warning("%s: %s; the index is made again", storage.location, error)
        with contextlib.suppress(OSError, StoreError):
            storage.delete_folder(key)
    except (OSError, StoreError) as error:
        _log.info("%s: the index %s cannot be read (%s); it is made again", storage.location, found.name, error)
    return None


def load_rows(storage: Storage, names: list[str], segments: Segments, save: bool = True) -> Part:
    """The index of a version's whole list of segments, from its files or made now from what there is.

    With `save` it is written for the next reader unless it is small; where that is not possible (a folder that cannot
    be written, no room) it is kept in memory. Raises DamagedData if a segment's tables cannot be read.
    """
    if not names:
        empty = {name: np.zeros((int(name == "first"), *tail), dtype) for name, (dtype, tail) in COLUMNS.items()}
        return Rows(empty, _about([]))
    ranges = cover(storage, names)
    if len(ranges) == 1:
        whole = open_index(storage, ranges[0])
        if whole is not None:
            return whole
    try:
        return _make(storage, names, cover(storage, names), segments, save)
    except OSError:  # an index that another process deleted just now, or a damaged segment, which comes up again
        return _make(storage, names, [Found(n, n + 1, "") for n in range(len(names))], segments, save)


def _make(storage: Storage, names: list[str], ranges: list[Found], segments: Segments, save: bool) -> Part:
    with contextlib.ExitStack() as stack:
        aside = stack.enter_context(_aside(storage)) if save and len(ranges) >= SAVED_PARTS else None
        parts = _parts(storage, ranges, segments, aside)
        if save and aside is None and sum(part.points for _, part in parts) >= SAVED_POINTS:
            aside = stack.enter_context(_aside(storage))
        if aside is not None:
            try:
                made = _publish(storage, index_name(names, 0, len(names), "whole"), parts, 0, aside)
                wholes = [found for found in found_indexes(storage, names) if found.whole]
                _drop(storage, wholes[:-KEPT_WHOLES])
                return made
            except (OSError, StoreError) as error:
                _log.info("%s: the index cannot be written (%s); it is kept in memory", storage.location, error)
        return merged_rows(parts)


@contextlib.contextmanager
def _aside(storage: Storage) -> Iterator[pathlib.Path | None]:
    """A local folder for an index in the making; None where there can be none."""
    try:
        folder = storage.scratch() / f"index-{uuid.uuid4().hex}"
        folder.mkdir()
    except (OSError, StoreError):
        yield None
        return
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _parts(
    storage: Storage, ranges: list[Found], segments: Segments, aside: pathlib.Path | None
) -> list[tuple[int, Part]]:
    """The ranges as parts. Rows of many single segments are merged in groups, and written aside where that is possible,
    so that they do not all lie in memory."""
    out: list[tuple[int, Part]] = []
    group: list[tuple[int, Part]] = []

    def close() -> None:
        if len(group) > 1 and aside is not None and sum(part.points for _, part in group) >= GROUP_POINTS:
            folder = aside / f"group-{group[0][0]}"
            _write(folder, group)
            out.append((0, IndexFile(LocalStorage(aside), folder.name)))
        else:
            out.extend(group)
        group.clear()

    for found in ranges:
        part = open_index(storage, found)
        if part is not None:
            close()
            out.append((found.start, part))
            continue
        points = 0
        for number in range(found.start, found.stop):
            group.append((number, segment_rows(segments(number))))
            points += group[-1][1].points
            if points >= GROUP_POINTS:
                close()
                points = 0
    close()
    return out


def _publish(storage: Storage, name: str, parts: list[tuple[int, Part]], start: int, aside: pathlib.Path) -> IndexFile:
    """Write the parts as the index of this name, whose first segment has number `start`, and publish it."""
    folder = aside / name
    _write(folder, [(first - start, part) for first, part in parts])
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files["zarr.json"] = files.pop("zarr.json")  # last: where it is there, all is there
    storage.create("index/zarr.json", b'{"zarr_format": 3, "node_type": "group", "attributes": {}}')
    storage.put_folder(f"index/{name}", files)
    return IndexFile(storage, f"index/{name}")


def _drop(storage: Storage, indexes: list[Found]) -> None:
    for found in indexes:
        with contextlib.suppress(OSError, StoreError):
            storage.delete_folder(f"index/{found.name}")


def maintain(storage: Storage, names: list[str], segments: Segments) -> None:
    """Merge the newest parts of the list where enough small ones have come together; for writers, after a commit.

    Most calls find nothing to do. Raises nothing for a full disk or a folder in use: the index is a convenience.
    """
    width = FAN
    try:
        while width <= len(names):
            ranges = cover(storage, names, wholes=False)
            tail = len(ranges)
            while tail > 0 and ranges[tail - 1].stop - ranges[tail - 1].start < width:
                tail -= 1
            if len(ranges) - tail >= FAN:
                start = ranges[tail].start
                with _aside(storage) as aside:
                    if aside is None:
                        return
                    parts = _parts(storage, ranges[tail:], segments, aside)
                    _publish(storage, index_name(names, start, len(names), "tier"), parts, start, aside)
                _drop(storage, [found for found in ranges[tail:] if found.name])
            width *= FAN
    except (OSError, StoreError) as error:
        _log.info("%s: the index was not brought up to date: %s", storage.location, error)
