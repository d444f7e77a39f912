"""The process in which environments of one family live: answers calls that come over a pipe, one thread per call.

Started by mopd.environments.workers, which also holds the other end. Nothing of it outlives the process that started it:
it looks for that process and ends itself with everything that it started (Java too).
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mopd.environments.base import EnvironmentFailure
from mopd.processes import kill_session

THREADS = 256
# calls at a time; each environment is asked one thing at a time, so this bounds the environments that are busy together
LOOK_S = 2.0
# seconds between two looks for the process that started this one
LISTING = "possible_actions"
# a method that only some environments have


@dataclasses.dataclass(frozen=True)
class Begin:
    """The first thing that is said to a worker: which family to build (see registry.make_family), and after how many
    seconds without a sign of life of its own it must end itself."""

    environment: str
    options: dict[str, Any]
    patience_s: float


@dataclasses.dataclass(frozen=True)
class Call:
    """Call `method` of an environment by its number, or of the family itself where `environment` is 0. The methods `create`
    and `close` make and end the environment with that number."""

    number: int
    environment: int
    method: str
    arguments: tuple = ()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Trouble:
    """What a call raised. `kind` is the exception's class by name; category, final and record are those of an
    EnvironmentFailure (see mopd.environments.base and replay); `trace` the traceback as text."""

    kind: str
    message: str
    category: str = ""
    final: bool = False
    record: dict[str, Any] = dataclasses.field(default_factory=dict)
    trace: str = ""


@dataclasses.dataclass(frozen=True)
class Answer:
    """What Call `number` gave (0: what Begin gave, a Description). `memory_mib` is that of the worker and all processes under
    it, given with resets."""

    number: int
    value: Any = None
    trouble: Trouble | None = None
    memory_mib: float = 0.0


@dataclasses.dataclass(frozen=True)
class Description:
    """A family's own words about itself."""

    name: str
    version: str
    system_prompt: str


def main() -> None:
    """Serve the pipe whose file descriptor is the first argument, until its other end closes."""
    descriptor, parent = int(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        begin = connection.recv()
    except (EOFError, OSError):
        return
    _Worker(connection, parent, begin).serve()


class _Worker:
    def __init__(self, connection: Connection, parent: int, begin: Begin):
        self.connection, self.parent, self.begin = connection, parent, begin
        self.family: Any = None
        self.environments: dict[int, Any] = {}
        self.sending = threading.Lock()
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="environment")

    def serve(self) -> None:
        """Build the family in a thread, so that the pipe is watched from the start, and answer calls."""
        self.threads.submit(self._answer, 0, self._build)
        try:
            while True:
                # A thread of the C library, which needs no interpreter: it ends a worker that an environment blocks for good.
                faulthandler.dump_traceback_later(self.begin.patience_s, exit=True)
                if not self.connection.poll(LOOK_S):
                    if os.getppid() != self.parent:
                        break
                    continue
                call = self.connection.recv()
                if call.method == "end":
                    self._end()
                    break
                self.threads.submit(self._answer, call.number, lambda c=call: self._call(c), call.method == "reset")
        except (EOFError, OSError):
            pass
        finally:
            kill_session(os.getpid(), spare=os.getpid())
            os._exit(0)

    def _end(self) -> None:
        for environment in list(self.environments.values()):
            with contextlib.suppress(Exception):
                environment.close()
        if self.family is not None:
            with contextlib.suppress(Exception):
                self.family.close()

    def _build(self) -> Description:
        from mopd.environments.registry import make_family

        self.family = make_family(self.begin.environment, self.begin.options)
        return Description(self.family.name, str(self.family.version), self.family.system_prompt)

    def _call(self, call: Call) -> Any:
        if call.environment == 0:
            return getattr(self.family, call.method)(*call.arguments, **call.options)
        if call.method == "create":
            made = self.environments[call.environment] = self.family.create()
            return hasattr(made, LISTING)
        if call.method == "close":
            environment = self.environments.pop(call.environment, None)
            return None if environment is None else environment.close()
        return getattr(self.environments[call.environment], call.method)(*call.arguments, **call.options)

    def _answer(self, number: int, work: Callable[[], Any], weigh: bool = False) -> None:
        try:
            answer = Answer(number, work(), memory_mib=memory_mib(os.getpid()) if weigh else 0.0)
        except EnvironmentFailure as failure:
            answer = Answer(number, trouble=Trouble(
                type(failure).__name__, _words(failure), failure.category, bool(getattr(failure, "final", False)),
                dict(getattr(failure, "record", {}) or {})))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told to whoever asked
            answer = Answer(number, trouble=Trouble(type(error).__name__, str(error), trace=traceback.format_exc()))
        with self.sending:
            try:
                self.connection.send(answer)
            except OSError:
                pass  # nobody listens any more; the reading thread sees it too and ends the process
            except Exception as error:  # noqa: BLE001 - an answer that cannot be pickled
                self.connection.send(Answer(number, trouble=Trouble(
                    type(error).__name__, f"the environment's answer cannot be sent to another process: {error}")))


def _words(failure: EnvironmentFailure) -> str:
    """The message without the category in front, which EnvironmentFailure puts there."""
    return str(failure).removeprefix(f"{failure.category}: ")


def memory_mib(process: int) -> float:
    """Resident memory of a process and everything under it in MiB; 0 where the system has no /proc."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, left = 0, [process]
    while left:
        one = left.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            total += int(Path(f"/proc/{one}/statm").read_text().split()[1]) * page
            for children in Path(f"/proc/{one}/task").glob("*/children"):
                left += [int(child) for child in children.read_text().split()]
    return total / 2**20
