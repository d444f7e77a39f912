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
import mmap
import os
import pathlib

import google_crc32c
import numcodecs.blosc
import numpy as np

from prefix_store.disk import write_file

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


def _shard(folder: pathlib.Path, dimensions: int) -> pathlib.Path:
    """The file of an array's one shard."""
    return folder / ".".join(["c", *["0"] * dimensions])


def _metadata(array: np.ndarray, rows: int, chunks: int) -> dict:
    tail = list(array.shape[1:])
    itemsize = array.dtype.itemsize
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"}]
    blosc = {"typesize": itemsize, "cname": "zstd", "clevel": 1, "shuffle": _shuffle(itemsize)[0], "blocksize": 0}
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
        "shape": list(array.shape),
        "data_type": array.dtype.name,
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


def write_array(folder: pathlib.Path, array: np.ndarray, rows: int) -> list[pathlib.Path]:
    """Write `array` [n, …] (n ≥ 1) as a Zarr v3 array in `folder`, which exists and is empty, `rows` rows to a chunk.

    Returns the files written. The last chunk is filled up with zeros, as Zarr's regular grid asks.
    """
    array = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    if len(array) == 0:
        raise ValueError(f"{folder.name}: an array without rows is never written")
    chunks = math.ceil(len(array) / rows)
    codec = numcodecs.blosc.Blosc("zstd", clevel=1, shuffle=_shuffle(array.dtype.itemsize)[1])
    parts: list[bytes] = []
    index = np.empty((chunks, 2), dtype="<u8")
    at = 0
    for number in range(chunks):
        chunk = array[number * rows : (number + 1) * rows]
        if len(chunk) < rows:
            chunk = np.concatenate([chunk, np.zeros((rows - len(chunk), *array.shape[1:]), dtype=array.dtype)])
        frame = codec.encode(chunk)
        frame += _crc(frame)
        index[number] = at, len(frame)
        parts.append(frame)
        at += len(frame)
    table = index.tobytes()
    parts += [table, _crc(table)]

    metadata, shard = folder / "zarr.json", _shard(folder, array.ndim)
    write_file(metadata, json.dumps(_metadata(array, rows, chunks), indent=1).encode())
    write_file(shard, b"".join(parts))
    return [metadata, shard]


class ArrayReader:
    """Reads row ranges of an array that `write_array` wrote. Safe to use from several threads."""

    def __init__(self, folder: pathlib.Path, sha256: str | None = None):
        """Map the shard and check its index. Raises DamagedData where file, index or description are not sound.

        sha256 is the known hash of the description `zarr.json`; None takes it as it is.
        """
        self.name = f"{folder.parent.name}/{folder.name}"
        try:
            data = (folder / "zarr.json").read_bytes()
            if sha256 not in (None, hashlib.sha256(data).hexdigest()):
                raise ValueError("it is not the file that was published")
            description = json.loads(data)
            self.shape = tuple(description["shape"])
            self.dtype = np.dtype(description["data_type"]).newbyteorder("<")
            self.rows = description["codecs"][0]["configuration"]["chunk_shape"][0]
            self.chunks = math.ceil(self.shape[0] / self.rows)
        except (OSError, ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
            raise DamagedData(f"{self.name}/zarr.json cannot be read: {error}") from error
        path = _shard(folder, len(self.shape))
        tail = self.chunks * INDEX_ENTRY + CRC_BYTES
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < tail:
                    raise DamagedData(f"{self.name}: {size} bytes are too few for {self.chunks} chunks")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except DamagedData:
            raise
        except OSError as error:
            raise DamagedData(f"{self.name}: {error.strerror or error}") from error
        table = self._map[size - tail : size - CRC_BYTES]
        if _crc(table) != self._map[size - CRC_BYTES :]:
            raise DamagedData(f"{self.name}: the chunk index fails its checksum")
        self._index = np.frombuffer(table, dtype="<u8").reshape(self.chunks, 2).tolist()
        self._codec = numcodecs.blosc.Blosc()

    def __len__(self) -> int:
        return self.shape[0]

    def chunk(self, number: int) -> np.ndarray:
        """Chunk `number` with all its rows, read-only. Raises DamagedData with its rows if its checksum fails."""
        offset, length = self._index[number]
        end = offset + length - CRC_BYTES
        frame, checksum = self._map[offset:end], self._map[end : end + CRC_BYTES]
        lost = (number * self.rows, min((number + 1) * self.rows, len(self)))
        if _crc(frame) != checksum:
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
