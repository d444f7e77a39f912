"""Finds and ends processes that another process left, by what they have in common. Where a system has no /proc, none is
found."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import resource_tracker
from pathlib import Path

ROUNDS, PAUSE_S, WATCH_S = 20, 0.01, 0.5
_STARTED = 19  # of the fields behind the name in /proc/PID/stat: when the process was started


def known() -> bool:
    """Whether this system tells of its processes."""
    return Path("/proc/self/stat").exists()


def of_session(leader: int) -> list[int]:
    """The living processes of the session that `leader` began, itself among them: Java and what else it started, whatever
    process group they put themselves into."""
    def belongs(entry: Path) -> bool:
        fields = _stat(entry)
        return int(fields[3]) == leader and fields[0] not in "ZX"

    return _those(belongs)


def marked(variable: str, value: str) -> list[int]:
    """The processes that were started with this environment variable, whatever session they put themselves into."""
    wanted = f"{variable}={value}".encode()
    return _those(lambda entry: wanted in (entry / "environ").read_bytes().split(b"\0"))


def children() -> set[int]:
    """The living children of this process."""
    return set(_those(lambda entry: _stat(entry)[1] == str(os.getpid()) and _stat(entry)[0] not in "ZX"))


def end_with_this(processes: Iterable[int]) -> subprocess.Popen | None:
    """Have `processes` killed when this process is gone, however it ended; None where there are none. A small process of
    its own sees to it (they may be of a library that does not), which ends with the last of them, or when it is killed."""
    named = []
    for process in set(processes) - {resource_tracker._resource_tracker._pid}:  # that one tidies up after the others
        with contextlib.suppress(OSError):
            named.append(f"{process}:{_stat(Path('/proc') / str(process))[_STARTED]}")
    if not named:
        return None
    return subprocess.Popen([sys.executable, "-I", "-S", __file__, str(os.getpid()), *named], start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _watch(parent: int, named: list[str]) -> None:
    wanted = [(int(process), started) for process, _, started in (name.partition(":") for name in named)]
    while found := [process for process, started in wanted if _lives(process, started)]:
        if os.getppid() != parent:
            for process in found:
                with contextlib.suppress(OSError):
                    os.kill(process, signal.SIGKILL)
        time.sleep(WATCH_S)


def _lives(process: int, started: str) -> bool:
    try:
        fields = _stat(Path("/proc") / str(process))
    except OSError:
        return False
    return fields[_STARTED] == started and fields[0] not in "ZX"


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


def _stat(entry: Path) -> list[str]:
    """The fields of /proc/PID/stat behind the name: state, parent, group, session, …"""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


def _those(belongs: Callable[[Path], bool]) -> list[int]:
    found = []
    for entry in os.scandir("/proc") if known() else ():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
                if belongs(Path(entry.path)):
                    found.append(int(entry.name))
    return found


if __name__ == "__main__":
    _watch(int(sys.argv[1]), sys.argv[2:])
