"""Finds and ends processes that another process left, by what they have in common. Where a system has no /proc, none is
found."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

ROUNDS, PAUSE_S = 20, 0.01


def known() -> bool:
    """Whether this system tells of its processes."""
    return Path("/proc/self/stat").exists()


def of_session(leader: int) -> list[int]:
    """The living processes of the session that `leader` began, itself among them: Java and what else it started, whatever
    process group they put themselves into."""
    def belongs(entry: Path) -> bool:
        fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return int(fields[3]) == leader and fields[0] not in "ZX"

    return _those(belongs)


def marked(variable: str, value: str) -> list[int]:
    """The processes that were started with this environment variable, whatever session they put themselves into."""
    wanted = f"{variable}={value}".encode()
    return _those(lambda entry: wanted in (entry / "environ").read_bytes().split(b"\0"))


def kill_session(leader: int, *, spare: int = 0) -> None:
    """SIGKILL to `of_session(leader)` but `spare`. Where the system does not tell of its processes, to the leader's own
    process group."""
    if known():
        _kill(lambda: of_session(leader), spare)
    elif not spare:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)


def kill_marked(variable: str, value: str, *, spare: int = 0) -> None:
    """SIGKILL to `marked(variable, value)` but `spare`."""
    _kill(lambda: marked(variable, value), spare)


def _kill(find: Callable[[], list[int]], spare: int) -> None:
    for _ in range(ROUNDS):  # what is killed may be starting another at this moment
        found = [process for process in find() if process != spare]
        if not found:
            return
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(PAUSE_S)


def _those(belongs: Callable[[Path], bool]) -> list[int]:
    found = []
    for entry in os.scandir("/proc") if known() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if belongs(Path(entry.path)):
                    found.append(int(entry.name))
    return found
