"""One array on disk: written once in row chunks, read a few rows at a time, checked whenever it is read.

The files are an ordinary sharded Zarr v3 array that any Zarr library opens: `zarr.json` beside one shard with all
chunks, each a Blosc frame followed by its crc32c, and the chunk index at the end. Writing the shard and reading slices
of it here, rather than through Zarr's general machinery, costs tens of microseconds a chunk instead of a millisecond.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from typing import TYPE_CHECKING

import google_crc32c
import numcodecs.blosc
import numpy as np

if TYPE_CHECKING:
    from prefix_store.storage import Storage

INDEX_ENTRY = 16
# two little-endian uint64 per chunk: offset and length in the shard (Zarr v3, sharding_indexed)
CRC_BYTES = 4
CACHED_CHUNKS = 256
# at 16 to 64 KiB each this bounds the memory of a process's readers, however many stores and segments they read


class DamagedData(OSError):
    """Bytes on disk are not those that were written; the message names the file and the place.

    `rows` is the range of rows that cannot be read, None where the whole array is concerned.
    """

    def __init__(self, message: str, rows: tuple[int, int] | None = None):
        super().__init__(message)
        self.rows = rows


def _crc(data: bytes | memoryview) -> bytes:
    return google_crc32c.value(bytes(data)).to_bytes(CRC_BYTES, "little")


def shard_name(dimensions: int) -> str:
    """The file of an array's one shard, in the array's folder."""
    return ".".join(["c", *["0"] * dimensions])


def _metadata(shape: tuple[int, ...], dtype: np.dtype, rows: int, chunks: int, cname: str) -> dict:
    tail, itemsize = list(shape[1:]), dtype.itemsize
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}]
    blosc = {"typesize": itemsize, "cname": cname, "clevel": 1, "shuffle": _shuffle(itemsize)[0], "blocksize": 0}
    codecs.append({"name": "blosc", "configuration": blosc})
    codecs.append({"name": "crc32c"})
    sharding = {
        "chunk_shape": [rows, *tail],
        "codecs": codecs,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [rows * chunks, *tail]}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {},
        "storage_transformers": [],
    }


def _shuffle(itemsize: int) -> tuple[str, int]:
    """Byte shuffle groups the mostly equal high bytes of ids and offsets; text gains nothing from it."""
    return ("shuffle", numcodecs.blosc.SHUFFLE) if itemsize > 1 else ("noshuffle", numcodecs.blosc.NOSHUFFLE)


def pack_chunks(array: np.ndarray, rows: int, cname: str) -> list[bytes]:
    """The chunks of `array` [n, …], `rows` rows each, as a Blosc frame and the crc32c of that for each. The last one is
    filled up with zeros, as Zarr's regular grid asks. Packing releases the interpreter's lock."""
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    codec = numcodecs.blosc.Blosc(cname, clevel=1, shuffle=_shuffle(array.dtype.itemsize)[1])
    frames = []
    for at in range(0, len(array), rows):
        chunk = array[at : at + rows]
        if len(chunk) < rows:
            chunk = np.concatenate([chunk, np.zeros((rows - len(chunk), *array.shape[1:]), dtype=array.dtype)])
        frame = codec.encode(chunk)
        frames += [frame, _crc(frame)]
    return frames


def encode_array(array: np.ndarray, rows: int, cname: str = "zstd", packed: list[bytes] | None = None) -> dict[str, bytes]:
    """An array [n, …] (n ≥ 1) as the files of a Zarr v3 array, name → bytes: `zarr.json` and its one shard.

    A chunk has `rows` rows. `packed` are its first chunks, which have been packed already (`pack_chunks`), and `array`
    are the rows behind them.
    """
    parts = list(packed or [])
    length = len(parts) // 2 * rows + len(array)
    if length == 0:
        raise ValueError("an array without rows is never written")
    chunks = math.ceil(length / rows)
    parts += pack_chunks(array, rows, cname)
    lengths = np.array([len(frame) for frame in parts], dtype="<u8").reshape(chunks, 2).sum(axis=1, dtype="<u8")
    index = np.stack([np.cumsum(lengths) - lengths, lengths], axis=1)
    table = index.tobytes()
    parts += [table, _crc(table)]
    description = json.dumps(_metadata((length, *array.shape[1:]), array.dtype, rows, chunks, cname), indent=1).encode()
    return {"zarr.json": description, shard_name(array.ndim): b"".join(parts)}


class ArrayReader:
    """Reads row ranges of an array that `encode_array` made, by ranged reads. Safe to use from several threads."""

    def __init__(self, storage: Storage, key: str, sha256: str | None = None):
        """Read the description and the chunk index of the array in the folder `key`.

        Raises DamagedData where file, index or description are not sound. sha256 is the known hash of the description
        `zarr.json`; None takes it as it is.
        """
        self.storage, self.key = storage, key
        self.name = key.partition("/")[2] or key
        try:
            data = storage.read(f"{key}/zarr.json")
            if sha256 not in (None, hashlib.sha256(data).hexdigest()):
                raise ValueError("it is not the file that was published")
            description = json.loads(data)
            self.shape = tuple(description["shape"])
            self.dtype = np.dtype(description["data_type"]).newbyteorder("<")
            self.rows = description["codecs"][0]["configuration"]["chunk_shape"][0]
            self.chunks = math.ceil(self.shape[0] / self.rows)
        except (OSError, ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
            raise DamagedData(f"{self.name}/zarr.json cannot be read: {error}") from error
        tail = self.chunks * INDEX_ENTRY + CRC_BYTES
        try:
            file = self._file = storage.file(f"{key}/{shard_name(len(self.shape))}")
            if file.size < tail:
                raise DamagedData(f"{self.name}: {file.size} bytes are too few for {self.chunks} chunks")
            table = bytes(file.read(file.size - tail, file.size))
        except DamagedData:
            raise
        except OSError as error:
            raise DamagedData(f"{self.name}: {error.strerror or error}") from error
        if _crc(table[:-CRC_BYTES]) != table[-CRC_BYTES:]:
            raise DamagedData(f"{self.name}: the chunk index fails its checksum")
        self._index = np.frombuffer(table, dtype="<u8", count=2 * self.chunks)
        self._codec = numcodecs.blosc.Blosc()

    def __len__(self) -> int:
        return self.shape[0]

    def chunk(self, number: int) -> np.ndarray:
        """Chunk `number` with all its rows, read-only. Raises DamagedData with its rows if its checksum fails."""
        offset, length = int(self._index[2 * number]), int(self._index[2 * number + 1])
        lost = (number * self.rows, min((number + 1) * self.rows, len(self)))
        try:
            data = self._file.read(offset, offset + length)
        except OSError as error:
            reason = error.strerror or error
            raise DamagedData(f"{self.name}: rows {lost[0]} to {lost[1]} cannot be read: {reason}", lost) from error
        frame = bytes(data[: length - CRC_BYTES])
        if _crc(frame) != data[length - CRC_BYTES :]:
            raise DamagedData(f"{self.name}: rows {lost[0]} to {lost[1]} fail their checksum", lost)
        try:
            return np.frombuffer(self._codec.decode(frame), dtype=self.dtype).reshape(self.rows, *self.shape[1:])
        except (RuntimeError, ValueError) as error:
            raise DamagedData(f"{self.name}: rows {lost[0]} to {lost[1]} cannot be unpacked: {error}", lost) from error

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) as a new array."""
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"{self.name}: rows [{start}, {stop}) of {len(self)}")
        out = np.empty((stop - start, *self.shape[1:]), dtype=self.dtype.newbyteorder("="))
        for number in range(start // self.rows, math.ceil(stop / self.rows) if stop > start else 0):
            first = number * self.rows
            a, b = max(start, first), min(stop, first + self.rows)
            out[a - start : b - start] = _chunk(self, number)[a - first : b - first]
        return out

    def all(self) -> np.ndarray:
        """The whole array."""
        return self.read(0, len(self))


@functools.lru_cache(maxsize=CACHED_CHUNKS)
def _chunk(reader: ArrayReader, number: int) -> np.ndarray:
    """The chunks read last, of all readers together: points of one trajectory lie in the same ones."""
    return reader.chunk(number)
