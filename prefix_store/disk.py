"""How bytes reach the disk for good: flushed files, folders published by rename, names only one writer can take."""

from __future__ import annotations

import concurrent.futures
import errno
import os
import pathlib
import uuid

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
SYNC_THREADS = 8
# flushes that wait at the same time share the file system's journal commits: 30 files in 5 ms instead of 90


class StoreError(RuntimeError):
    """The store cannot do what was asked; the message names the path and the remedy."""


def write_file(path: pathlib.Path, data: bytes) -> None:
    """Write a new file, not yet flushed to the device. Raises FileExistsError where it exists."""
    with open(path, "xb") as file:
        file.write(data)


def sync_file(path: pathlib.Path) -> None:
    """Flush a file's bytes to the device."""
    _sync(os.fspath(path))


def sync_folder(path: pathlib.Path) -> None:
    """Flush a folder's entries, so that names made or moved in it survive a power cut."""
    _sync(os.fspath(path))


def sync_tree(path: pathlib.Path) -> None:
    """Flush every file and folder below `path`, and itself. Raises OSError as the device gives it."""
    paths = [name for folder, _, files in os.walk(path) for name in [folder, *(os.path.join(folder, f) for f in files)]]
    with concurrent.futures.ThreadPoolExecutor(SYNC_THREADS) as pool:
        list(pool.map(_sync, paths))


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def publish_folder(aside: pathlib.Path, target: pathlib.Path) -> None:
    """Flush a finished folder and give it its name: it appears whole or not at all, whenever the process is killed."""
    sync_tree(aside)
    os.rename(aside, target)
    sync_folder(target.parent)


def publish_file(target: pathlib.Path, data: bytes, scratch: pathlib.Path) -> bool:
    """Create `target` with `data`, whole, if nobody has: True if this call made it, False if it was there.

    The data are written aside in `scratch` and linked to the name, which fails where the name is taken; of any number
    of processes exactly one gets True. Raises StoreError on a file system without hard links.
    """
    aside = scratch / f"{target.name}.{os.getpid()}.{uuid.uuid4().hex}"
    try:
        write_file(aside, data)
        _sync(os.fspath(aside))
        os.link(aside, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
            raise StoreError(
                f"the file system of {target.parent} has no hard links, which commits need; "
                "put the store on a local file system such as ext4, xfs or tmpfs"
            ) from error
        raise
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(target.parent)
    return True
