"""Where a store's bytes lie: a handful of operations that a local folder and an object store both have.

Keys are relative names joined by "/", such as "segments/NAME/tokens/c.0". Nothing that was published is ever written
again: `create` makes a small file that only one process can make, `put_folder` makes a folder of files, and both are
durable when they return. What the store needs beyond that (versions, transactions) is built on these two in store.py.
"""

from __future__ import annotations

import collections
import errno
import fcntl
import mmap
import os
import pathlib
import re
import shutil
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from prefix_store.disk import StoreError, publish_file, publish_folder, sync_file, sync_folder, write_file

OPEN_MAPS = 256
# each mapped file holds a descriptor, of which a process has 1,024 on most machines
UNLOCKED_SECONDS = 60
# a folder in tmp/ without a lock file is a writer's that has just begun, or was killed just then; the writer copes with
# losing it, so this only spares it the trouble


class RangeFile(Protocol):
    """One immutable file of a storage; safe to use from several threads."""

    size: int

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """Bytes [start, stop), 0 ≤ start ≤ stop ≤ size, to read only. Raises OSError as the storage gives it."""
        ...


@runtime_checkable
class Storage(Protocol):
    """What a store asks of the place where it lies. `location` names it in messages and holds no secrets."""

    location: str

    def read(self, key: str) -> bytes:
        """The whole file. Raises FileNotFoundError where it is absent."""
        ...

    def file(self, key: str) -> RangeFile:
        """The file for reading parts of it. Raises FileNotFoundError where it is absent."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Names of files and folders directly inside the folder `prefix` ("" is the top), sorted; [] if it is absent."""
        ...

    def create(self, key: str, data: bytes) -> bool:
        """Make the file whole and durable, if nobody has: True only for the one call that made it."""
        ...

    def replace(self, key: str, data: bytes) -> None:
        """Put other bytes into the place of a file at once: a reader finds the old or the new ones."""
        ...

    def put_folder(self, prefix: str, files: Mapping[str, bytes | pathlib.Path]) -> None:
        """Make the folder with these files (by relative name: their bytes, or a local file to take them from), durable
        on return. `prefix` is a name that nobody else uses; doing it again with the same files is harmless."""
        ...

    def delete_folder(self, prefix: str) -> None:
        """Remove the folder and what is in it, if it is there."""
        ...

    def delete(self, key: str) -> None:
        """Remove the file, if it is there."""
        ...

    def usage(self, prefix: str) -> tuple[int, float]:
        """Bytes in the folder and seconds since the newest file in it was written (by this machine's clock)."""
        ...

    def scratch(self) -> pathlib.Path:
        """This object's own local folder for files that are not published yet, made when first asked for."""
        ...

    def asides(self) -> tuple[list[str], list[str]]:
        """Names of scratch folders: leftovers of processes that are gone, and those in use by others."""
        ...

    def remove_leftovers(self, min_age_seconds: float, dry_run: bool) -> tuple[list[str], int]:
        """Remove (or only count) scratch folders of processes that are gone; their names and bytes."""
        ...

    def close(self) -> None:
        """Remove the scratch folder. Reading goes on working, and a new one is made where one is needed again."""
        ...


def storage_for(location: str | os.PathLike, options: Mapping[str, Any] | None = None) -> Storage:
    """The storage of a location: an object store for a URL ("s3://bucket/prefix"), else a local folder.

    options go to the object store (see ObjectStorage). Raises ValueError for options with a local folder.
    """
    text = os.fspath(location)
    scheme = re.match(r"([a-z][a-z0-9+.-]*)://", text) if isinstance(text, str) else None
    if scheme and scheme[1] != "file":
        from prefix_store.object_storage import ObjectStorage

        return ObjectStorage(text, options)
    if options:
        raise ValueError(f"storage options {', '.join(sorted(options))} given for the local folder {text}; leave them out")
    return LocalStorage(text.removeprefix("file://") if scheme else text)


class LocalStorage:
    """A folder of a local file system with hard links and atomic renames (ext4, xfs, btrfs, tmpfs, …)."""

    def __init__(self, path: str | os.PathLike):
        self.path = pathlib.Path(path)
        self.location = str(path)
        self._lock = threading.Lock()
        self._maps: collections.deque[LocalFile] = collections.deque()
        self._scratch: Scratch | None = None

    def __repr__(self) -> str:
        return f"LocalStorage({self.location!r})"

    def read(self, key: str) -> bytes:
        return self._at(key).read_bytes()

    def file(self, key: str) -> LocalFile:
        return LocalFile(self, self._at(key))

    def names(self, prefix: str) -> list[str]:
        try:
            return sorted(os.listdir(self._at(prefix)))
        except FileNotFoundError:
            return []

    def create(self, key: str, data: bytes) -> bool:
        target = self._at(key)
        if not target.parent.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            sync_folder(target.parent.resolve().parent)
        return publish_file(target, data, self.scratch())

    def replace(self, key: str, data: bytes) -> None:
        aside = self.scratch() / f"replace-{uuid.uuid4().hex}"
        write_file(aside, data)
        sync_file(aside)
        os.replace(aside, self._at(key))

    def put_folder(self, prefix: str, files: Mapping[str, bytes | pathlib.Path]) -> None:
        """The folder appears by one rename: whole or not at all. Local files are taken by hard link."""
        target = self._at(prefix)
        if target.exists():  # an earlier try moved it there and failed only afterwards
            sync_folder(target.parent)
            return
        aside = self.scratch() / f"publish-{uuid.uuid4().hex}"
        try:
            for name, data in files.items():
                file = aside / name
                file.parent.mkdir(parents=True, exist_ok=True)
                if isinstance(data, os.PathLike):
                    os.link(data, file)
                else:
                    write_file(file, data)
            publish_folder(aside, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # those: somebody has published the same just now
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)

    def delete_folder(self, prefix: str) -> None:
        """The folder disappears by one rename, so that nobody sees half of it."""
        aside = self.scratch() / f"delete-{uuid.uuid4().hex}"
        try:
            os.rename(self._at(prefix), aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside)

    def delete(self, key: str) -> None:
        self._at(key).unlink(missing_ok=True)

    def usage(self, prefix: str) -> tuple[int, float]:
        return _usage(self._at(prefix))

    def scratch(self) -> pathlib.Path:
        with self._lock:
            if self._scratch is None:
                self._scratch = Scratch(self.path / "tmp")
            return self._scratch.path

    def asides(self) -> tuple[list[str], list[str]]:
        leftovers, used = asides(self.path / "tmp")
        own = None if self._scratch is None else self._scratch.path.name
        return leftovers, [name for name in used if name != own]

    def remove_leftovers(self, min_age_seconds: float, dry_run: bool) -> tuple[list[str], int]:
        return remove_leftovers(self.path / "tmp", min_age_seconds, dry_run)

    def close(self) -> None:
        with self._lock:
            if self._scratch is not None:
                self._scratch.close()
                self._scratch = None

    def _at(self, key: str) -> pathlib.Path:
        if ".." in key.split("/") or key.startswith("/"):
            raise ValueError(f"{self.location}: {key!r} is not a name inside the store")
        return self.path / key if key else self.path

    def _opened(self, file: LocalFile) -> None:
        """Keep the number of mapped files bounded: the one mapped longest ago is let go, and mapped again when used."""
        with self._lock:
            self._maps.append(file)
            if len(self._maps) > OPEN_MAPS:
                self._maps.popleft()._map = None


class LocalFile:
    """A file that is mapped while it is in use; `read` gives views of the map, which hold it as long as they live."""

    def __init__(self, storage: LocalStorage, path: pathlib.Path):
        self._storage, self._path, self._map = storage, path, None
        self.size = os.stat(path).st_size

    def read(self, start: int, stop: int) -> memoryview:
        view = self._map
        if view is None:
            if self.size == 0:
                return memoryview(b"")
            with open(self._path, "rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._map = view
            self._storage._opened(self)
        return view[start:stop]


# ---------------------------------------------------------------------------------------------------------------
# Scratch folders: each is locked by the process that made it, and the kernel lets go of the lock when that dies.


class Scratch:
    """A folder of one process's own inside `parent`, with a lock file in it that is held as long as the process lives.

    `close()` removes it; so does the end of the process, where that is not killed.
    """

    def __init__(self, parent: pathlib.Path):
        """Makes the folder. Raises OSError as the device gives it."""
        while True:
            self.path = parent / f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:12]}"
            self.path.mkdir(parents=True)
            try:
                self._descriptor = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR, 0o600)
            except FileNotFoundError:
                continue  # taken for a leftover before it had its lock; take another name
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.stat(self.path / "lock").st_ino == os.fstat(self._descriptor).st_ino:
                    # for handles that nobody closes
                    self.close = weakref.finalize(self, _clear, self.path, self._descriptor, os.getpid())
                    return
            except (BlockingIOError, FileNotFoundError):
                pass
            os.close(self._descriptor)


def _clear(path: pathlib.Path, descriptor: int, process: int) -> None:
    """Remove a scratch folder and let go of its lock; a forked child, which has the handle too, leaves both alone."""
    if os.getpid() == process:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _abandoned(folder: pathlib.Path) -> int | None:
    """Whether the maker of a scratch folder is gone: then its lock (a descriptor, -1 where it has none), else None."""
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR)
    except FileNotFoundError:
        if _maker_is_gone(folder.name):  # killed before it had its lock
            return -1
        try:
            return -1 if time.time() - folder.stat().st_mtime > UNLOCKED_SECONDS else None
        except FileNotFoundError:
            return None
    except NotADirectoryError:
        return -1
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _maker_is_gone(name: str) -> bool:
    """Whether a scratch folder's name is that of a process of this machine that does not run any more."""
    host, _, rest = name.rpartition(".")[0].rpartition(".")
    if host != socket.gethostname() or not rest.isdigit():
        return False
    try:
        os.kill(int(rest), 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def asides(parent: pathlib.Path) -> tuple[list[str], list[str]]:
    """Names in `parent`: scratch folders whose processes are gone, and those still in use."""
    leftovers, writers = [], []
    for name in sorted(os.listdir(parent)) if parent.is_dir() else []:
        lock = _abandoned(parent / name)
        (writers if lock is None else leftovers).append(name)
        if lock not in (None, -1):
            os.close(lock)
    return leftovers, writers


def remove_leftovers(parent: pathlib.Path, min_age_seconds: float = 0, dry_run: bool = False) -> tuple[list[str], int]:
    """Remove what processes that are gone have left in `parent` (with dry_run: only say so); names and bytes."""
    removed, size = [], 0
    for name in sorted(os.listdir(parent)) if parent.is_dir() else []:
        folder = parent / name
        lock = _abandoned(folder)
        if lock is None:
            continue
        try:
            used, age = _usage(folder)
            if age >= min_age_seconds:
                if not dry_run:
                    shutil.rmtree(folder, ignore_errors=True) if folder.is_dir() else folder.unlink(missing_ok=True)
                removed.append(name)
                size += used
        finally:
            if lock != -1:
                os.close(lock)
    return removed, size


def _usage(folder: pathlib.Path) -> tuple[int, float]:
    size, newest = 0, 0.0
    try:
        newest = folder.stat().st_mtime
        for place, _, files in os.walk(folder):
            for name in files:
                status = os.stat(os.path.join(place, name))
                size, newest = size + status.st_size, max(newest, status.st_mtime)
    except FileNotFoundError:  # removed by another process meanwhile
        pass
    return size, time.time() - newest


__all__ = ["LocalFile", "LocalStorage", "RangeFile", "Scratch", "Storage", "StoreError", "storage_for"]
