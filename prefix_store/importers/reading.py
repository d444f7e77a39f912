"""Rows of files: JSON lines, JSON arrays, single JSON objects, Parquet, each also compressed; one row at a time.

Memory is bounded by the longest row. A row that cannot be parsed is handed on with the error instead of a value.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import gzip
import io
import json
import os
import pathlib
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from prefix_store.importers.base import ImportFailed, Where

SUFFIXES = (".jsonl", ".ndjson", ".json", ".traj", ".parquet")
"""Files of a folder that are looked at; also with .gz or .zst behind."""
CHUNK = 1 << 20
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_BETWEEN = frozenset(_SPACE + ",")


@dataclasses.dataclass
class Row:
    """One row: where it stands and its value, or what is wrong with it."""

    where: Where
    value: Any = None
    error: str = ""


def files_of(path: str | os.PathLike) -> list[pathlib.Path]:
    """The file itself, or all files of a folder whose names end as SUFFIXES say, sorted by path."""
    path = pathlib.Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path]
    return sorted(p for p in path.rglob("*") if p.is_file() and _plain_name(p).endswith(SUFFIXES))


def _plain_name(path: pathlib.Path) -> str:
    name = path.name.lower()
    return name.removesuffix(".gz").removesuffix(".zst")


def read_rows(path: pathlib.Path, progress: Callable[[int], None] | None = None) -> Iterator[Row]:
    """The rows of a file. `progress` is told how many bytes of the file have been read.

    Raises ImportFailed where the file cannot be read at all: damaged compression or Parquet, or a missing package.
    """
    if _plain_name(path).endswith(".parquet"):
        yield from _parquet_rows(path, progress)
        return
    try:
        with open(path, "rb") as raw:
            told = _Told(raw, progress)
            with contextlib.closing(_unpacked(path, told)) as file:
                yield from _json_rows(io.BufferedReader(file, CHUNK) if isinstance(file, io.RawIOBase) else file)
    except (OSError, EOFError, zlib.error) as error:
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError):
            raise
        raise ImportFailed(f"{path} cannot be read: {error}") from error


class _Told(io.RawIOBase):
    """A file that says how far it has been read."""

    def __init__(self, file: BinaryIO, progress: Callable[[int], None] | None):
        self.file, self.progress = file, progress

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self.file.readinto(buffer)
        if self.progress:
            self.progress(self.file.tell())
        return count


def _unpacked(path: pathlib.Path, file: io.RawIOBase) -> Any:
    name = path.name.lower()
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=io.BufferedReader(file, CHUNK))
    if name.endswith(".zst"):
        arrow = _pyarrow(path)
        return io.BufferedReader(_ArrowFile(arrow.CompressedInputStream(arrow.PythonFile(file, mode="r"), "zstd")), CHUNK)
    return io.BufferedReader(file, CHUNK)


class _ArrowFile(io.RawIOBase):
    """An Arrow input stream as a Python file."""

    def __init__(self, stream: Any):
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _pyarrow(path: pathlib.Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise ImportFailed(f"{path} needs pyarrow to be read; install it with: pip install 'mopd[parquet]'") from error
    return pyarrow


def _parquet_rows(path: pathlib.Path, progress: Callable[[int], None] | None) -> Iterator[Row]:
    arrow = _pyarrow(path)
    try:
        number, size = 0, path.stat().st_size
        with arrow.parquet.ParquetFile(path) as file:
            total = max(file.metadata.num_rows, 1)
            for batch in file.iter_batches(batch_size=64):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(number, without_none(value))
                if progress:
                    progress(size * number // total)
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:  # ValueError: text that is not UTF-8
        if isinstance(error, FileNotFoundError | PermissionError):
            raise
        raise ImportFailed(f"{path} is not a Parquet file that can be read: {error}") from error


def without_none(value: Any) -> Any:
    """A value of a Parquet row without the Nones that its columns' common type puts into every object."""
    if isinstance(value, dict):
        return {key: without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_none(item) for item in value]
    return value


# ---------------------------------------------------------------------------------------------------------------
# JSON


def _json_rows(file: Any) -> Iterator[Row]:
    """Rows of a JSON file: an array's elements, a single object, or an object per line; told by how it begins."""
    head = bytearray()
    while not head.strip() and (more := file.read(CHUNK)):
        head += more
    head = head.removeprefix(codecs.BOM_UTF8)
    rest = _Joined(bytes(head), file)
    start = head.lstrip()[:1]
    if start == b"[":
        yield from _array_rows(rest)
        return
    first, closed = _first_line(rest)
    if _parse(first)[1] == "" or closed is None or not _one_object(rest, first):
        yield from _line_rows(rest)
    else:
        yield from _object_rows(rest)


class _Joined:
    """What was read ahead, then the rest of the file."""

    def __init__(self, head: bytes, file: Any):
        self.head, self.file = head, file

    def read(self, size: int) -> bytes:
        if self.head:
            data, self.head = self.head[:size], self.head[size:]
            return data
        return self.file.read(size)

    def more(self) -> bool:
        """Read another chunk ahead; False at the end of the file."""
        data = self.file.read(max(CHUNK, len(self.head)))
        self.head += data
        return bool(data)


def _first_line(rest: _Joined) -> tuple[bytes, int | None]:
    """The first line that is not blank, read ahead, and where it ends; None where the file ends without a break."""
    while True:
        skip = len(rest.head) - len(rest.head.lstrip())
        end = rest.head.find(b"\n", skip)
        if end >= 0:
            return rest.head[skip:end], end
        if not rest.more():
            return rest.head[skip:], None


def _one_object(rest: _Joined, first: bytes) -> bool:
    """Whether the file begins with a JSON value that goes on behind its first line; reads it ahead."""
    line = len(first.decode("utf-8", errors="replace"))
    while True:
        text = codecs.getincrementaldecoder("utf-8")(errors="replace").decode(rest.head).lstrip(_SPACE)
        try:
            return _DECODER.raw_decode(text)[1] > line
        except RecursionError:
            return False
        except ValueError as error:
            if not _unfinished(error, text):
                return False
            if not rest.more():
                # Cut off: one broken object, if it was written over lines as an object is.
                return True


def _unfinished(error: ValueError, text: str) -> bool:
    """Whether JSON failed for want of more text, not because it is wrong."""
    position = getattr(error, "pos", None)
    if position is None:
        return False
    return "Unterminated string" in str(error) or position >= len(text) - 16


def _parse(data: bytes) -> tuple[Any, str]:
    """The JSON value of a line, and "" or what is wrong with it."""
    try:
        return json.loads(data), ""
    except (ValueError, RecursionError) as error:
        return None, str(error) or type(error).__name__


def _line_rows(rest: _Joined) -> Iterator[Row]:
    buffer, line = b"", 0
    while True:
        data = rest.read(CHUNK)
        lines = (buffer + data).split(b"\n")
        buffer = lines.pop()
        if not data and buffer:
            lines, buffer = [*lines, buffer], b""
        for one in lines:
            line += 1
            if one.strip():
                value, error = _parse(one)
                yield Row(line, value, error)
        if not data:
            return


def _object_rows(rest: _Joined) -> Iterator[Row]:
    data = bytearray()
    while more := rest.read(CHUNK):
        data += more
    value, error = _parse(bytes(data))
    yield Row(1, value, error)


def _array_rows(rest: _Joined) -> Iterator[Row]:
    """Elements of a JSON array as they are read, and of further arrays behind it. An array of messages is one row by itself:
    a trajectory saved as its list of messages. After what is not JSON nothing can be told apart any more: one row says so."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="strict")
    text, at, number, ended, error = "", 0, 0, False, ""
    inside, begun = False, False  # in an array; has it an element
    messages: list[Any] | None = None

    def more() -> bool:
        nonlocal text, at, ended
        data = rest.read(max(CHUNK, len(text) - at))
        text, at = text[at:] + decoder.decode(data, final=not data), 0
        ended = not data
        return not ended

    try:
        while True:
            while text[at : at + 1] and text[at] in (_BETWEEN if inside else _SPACE):
                at += 1
            if at == len(text):
                if more():
                    continue
                error = "the array has no end" if inside else ""
                break
            if not inside:
                if text[at] != "[":
                    error = "something stands behind the end of the array"
                    break
                inside, begun, at = True, False, at + 1
                continue
            if text[at] == "]":
                inside, at = False, at + 1
                if messages is not None:
                    number += 1
                    yield Row(number, {"messages": messages})
                    messages = None
                continue
            try:
                value, end = _DECODER.raw_decode(text, at)
                length = end - at
                if end == len(text) and more():
                    continue  # a number may go on
            except RecursionError as failure:
                error = str(failure)
                break
            except ValueError as failure:
                if _unfinished(failure, text) and not ended and more():
                    continue
                error = str(failure)
                break
            at += length  # `more` moves what is left to the front, so `end` no longer holds
            if not begun and _is_message(value):
                messages = []
            begun = True
            if messages is None:
                number += 1
                yield Row(number, value)
            else:
                messages.append(value)
    except UnicodeDecodeError as failure:
        error = str(failure)
    if messages is not None:
        yield Row(number + 1, {"messages": messages}, error)
    elif error:
        yield Row(number + 1, None, f"{error}; what follows cannot be read")


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value and "messages" not in value
