"""One process at a time: a lock on an open file, which the end of the process gives back whatever ends it."""

from __future__ import annotations

import contextlib
import fcntl
import warnings
from collections.abc import Iterator
from pathlib import Path


def lock_alone(descriptor: int) -> bool:
    """Lock an open file until it is closed; False where another process holds it. A file system without locks cannot tell:
    True, with a warning."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        warnings.warn(f"this file system has no locks ({error.strerror or error}), so nothing keeps a second process out of "
                      "the same folder; start one at a time, or put the folder on a local disk", stacklevel=2)
    return True


@contextlib.contextmanager
def only_process(lock: Path, busy: Exception) -> Iterator[None]:
    """Hold the lock file while the block runs. Raises `busy` where another process holds it."""
    with open(lock, "ab") as file:
        if not lock_alone(file.fileno()):
            raise busy
        yield
