"""Environments of any family in processes of their own, behind the same interface as in this one.

A worker process that crashes, is killed or hangs costs exactly the episodes that it hosted: they fail for reasons of
infrastructure, and another worker takes its place. See worker_process for the other end of the pipe.
"""

from __future__ import annotations

import atexit
import builtins
import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from mopd.environments.base import EnvironmentFailure, Observation, Task
from mopd.environments.registry import EnvironmentConfigError
from mopd.environments.worker_process import Answer, Begin, Call, Description, Trouble
from mopd.processes import kill_session

CLOSE_S = 5.0
# seconds that a worker has to end its environments before it is killed
LAST_WORDS = 4096
# bytes of a worker's output that are kept
_PROGRAM = "from mopd.environments.worker_process import main; main()"

_OPEN: weakref.WeakSet[WorkerFamily] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for family in list(_OPEN):
        family.close()


class WorkerError(RuntimeError):
    """An environment in a worker process raised an exception that is not built into Python; the message has its name."""


@dataclasses.dataclass(frozen=True)
class WorkerOptions:
    """How a family's environments are spread over processes.

    processes        worker processes; environments are spread evenly over them
    step_timeout_s   seconds for a step, or for an expert's word
    reset_timeout_s  seconds for a reset, and for the start of a process
    recycle_after    a worker is replaced after so many resets, when the episodes that it hosts have ended; 0: never
    memory_mib       … or when it holds more memory than this, all processes under it together; 0: no limit
    """

    processes: int = 1
    step_timeout_s: float = 120.0
    reset_timeout_s: float = 300.0
    recycle_after: int = 0
    memory_mib: float = 0.0

    def errors(self) -> list[str]:
        """What is wrong with these values, each beginning with its name."""
        found = [f"{key}: {getattr(self, key)} must be above 0" for key in ("processes", "step_timeout_s", "reset_timeout_s")
                 if not getattr(self, key) > 0]
        return found + [f"{key}: {getattr(self, key)} must be at least 0" for key in ("recycle_after", "memory_mib")
                        if not getattr(self, key) >= 0]


class WorkerFamily:
    """An environment family whose environments live in worker processes.

    environment  a registered name or dotted path, and its options, as registry.make_family takes them
    options
    workers      see WorkerOptions

    The first worker is started here and says the family's name, version and system prompt. Raises what building the family
    raises, as in this process (EnvironmentConfigError, ValueError), and EnvironmentFailure where no worker comes up.

    An environment that is between two episodes moves to another worker when its own has ended: only episodes that were under
    way fail, with category `worker_died`, or `worker_timeout` where the worker was killed because it did not answer in time.
    `counts` says how many workers were started, died, timed out, and were recycled for their age or their memory.
    """

    def __init__(self, environment: str, options: Mapping[str, Any] | None = None, *, workers: WorkerOptions | None = None):
        self.environment, self.options = environment, dict(options or {})
        self.workers = workers or WorkerOptions()
        if wrong := self.workers.errors():
            raise ValueError("; ".join(wrong))
        self.counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._slots = [_Slot() for _ in range(self.workers.processes)]
        self._retired: set[_Worker] = set()
        self._numbers = itertools.count(1)
        self._tasks: dict[str, list[Task]] = {}
        self._closed = False
        _OPEN.add(self)
        try:
            told = self._running(self._slots[0]).description
        except BaseException:
            self.close()
            raise
        self.name, self.version, self.system_prompt = told.name, told.version, told.system_prompt

    def tasks(self, split: str) -> list[Task]:
        if split not in self._tasks:
            worker = self._running(self._slots[0])
            self._tasks[split] = worker.ask(Call(next(self._numbers), 0, "tasks", (split,)), self.workers.reset_timeout_s)
        return list(self._tasks[split])

    def create(self) -> WorkerEnvironment:
        """A fresh environment in the worker that has the fewest. Raises EnvironmentFailure where none comes up, else what the
        family's own `create` raises."""
        worker, number = self._host()
        return (ListingEnvironment if worker.listing else WorkerEnvironment)(self, worker, number)

    def pids(self) -> list[int]:
        """Process ids of the workers that are alive, retired ones among them."""
        with self._lock:
            workers = [slot.worker for slot in self._slots if slot.worker is not None] + list(self._retired)
        return [worker.process.pid for worker in workers if worker.ended is None]

    def close(self) -> None:
        """End all workers and everything under them."""
        with self._lock:
            self._closed = True
            workers = [slot.worker for slot in self._slots if slot.worker is not None] + list(self._retired)
            self._retired.clear()
            for slot in self._slots:
                slot.worker = None
        closing = [threading.Thread(target=worker.close) for worker in workers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    # Workers

    def _host(self) -> tuple[_Worker, int]:
        """Make an environment in the worker with the fewest, starting it where it is not there."""
        with self._lock:
            slot = min(self._slots, key=lambda s: s.hosted)
            slot.coming += 1
        number = next(self._numbers)
        try:
            while True:
                worker = self._running(slot)
                with self._lock:
                    if not worker.retired:
                        # Before it is made, so that a worker which is retired meanwhile waits for it.
                        worker.hosts.add(number)
                        worker.playing.add(number)
                        break
            try:
                worker.listing = worker.ask(Call(next(self._numbers), number, "create"), self.workers.reset_timeout_s)
            except BaseException:
                self._out(worker, number)
                raise
            return worker, number
        finally:
            with self._lock:
                slot.coming -= 1

    def _running(self, slot: _Slot) -> _Worker:
        """The living worker of a slot, started if need be; who comes meanwhile waits for it."""
        with slot.starting:
            worker = slot.worker
            if worker is not None and worker.ended is None and not worker.retired:
                return worker
            if self._closed:
                raise EnvironmentFailure("worker_died", f"the {self.environment} environments are closed")
            worker = _Worker(self)
            with self._lock:
                self.counts["started"] += 1
                slot.worker = worker
            try:
                worker.description = worker.first.result(timeout=self.workers.reset_timeout_s)
            except concurrent.futures.TimeoutError:
                worker.end("worker_timeout", f"did not start in {self.workers.reset_timeout_s:g} s")
                raise worker.failure() from None
            except BaseException:
                worker.close()
                raise
            if self._closed:
                worker.close()
                raise EnvironmentFailure("worker_died", f"the {self.environment} environments are closed")
            return worker

    def _after_reset(self, worker: _Worker, memory_mib: float) -> None:
        """Retire a worker that is old or has grown: it takes no more resets and ends with its last episode."""
        worker.resets += 1
        limits = self.workers
        why = "recycled_age" if 0 < limits.recycle_after <= worker.resets else \
            "recycled_memory" if 0 < limits.memory_mib < memory_mib else ""
        with self._lock:
            if not why or worker.retired or worker.ended is not None:
                return
            worker.retired = True
            self.counts[why] += 1
            self._retired.add(worker)
            for slot in self._slots:
                if slot.worker is worker:
                    slot.worker = None

    def _enter(self, worker: _Worker, number: int) -> bool:
        """An environment's next episode begins in its worker; False where that takes no more."""
        with self._lock:
            stays = not worker.retired and worker.ended is None
            if stays:
                worker.playing.add(number)
            return stays

    def _out(self, worker: _Worker, number: int, *, leaves: bool = True) -> None:
        """An environment's episode is over; with `leaves` it lives in the worker no longer."""
        with self._lock:
            worker.playing.discard(number)
            if leaves:
                worker.hosts.discard(number)
            over = worker in self._retired and not worker.playing
            if over:
                self._retired.discard(worker)
        if over:
            threading.Thread(target=worker.close, daemon=True).start()  # nobody needs to wait for its end

    def _ended(self, worker: _Worker, category: str) -> None:
        with self._lock:
            self._retired.discard(worker)
            if not self._closed and category:
                self.counts["timed_out" if category == "worker_timeout" else "died"] += 1


class _Slot:
    """A place for one worker. `coming`: environments that are being made there."""

    def __init__(self) -> None:
        self.worker: _Worker | None = None
        self.starting = threading.Lock()
        self.coming = 0

    @property
    def hosted(self) -> int:
        worker = self.worker
        return self.coming + (0 if worker is None or worker.ended is not None else len(worker.hosts))


class _Worker:
    """One worker process and this end of its pipe. `ended` is None while it serves, then (category, words); `hosts` are the
    numbers of its environments, `playing` of those that are in an episode; `listing` says that they can list actions."""

    def __init__(self, family: WorkerFamily):
        self.family = family
        self.description: Description | None = None
        self.listing = False
        self.hosts: set[int] = set()
        self.playing: set[int] = set()
        self.resets = 0
        self.retired = False
        self.ended: tuple[str, str] | None = None
        self.first: concurrent.futures.Future = concurrent.futures.Future()
        self._waiting: dict[int, concurrent.futures.Future] = {0: self.first}
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._said = b""
        limits = family.workers
        ours, theirs = socket.socketpair()
        try:
            # A worker that reads no more must not hold up whoever writes to it.
            seconds = max(1.0, limits.step_timeout_s)
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(seconds), 0))
            environment = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            self.process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), str(os.getpid())], stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, pass_fds=(theirs.fileno(),), start_new_session=True,
                env=environment)
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._connection = Connection(ours.detach())
        self._listener = threading.Thread(target=self._listen, daemon=True, name=f"worker-{self.process.pid}")
        self._drain = threading.Thread(target=self._drain_output, daemon=True, name=f"worker-{self.process.pid}-output")
        self._listener.start()
        self._drain.start()
        patience = max(limits.step_timeout_s, limits.reset_timeout_s) + 30.0
        self._send(Begin(family.environment, family.options, patience))

    def ask(self, call: Call, timeout_s: float, *, whole: bool = False) -> Any:
        """The answer to a call (its value, with `whole` the Answer). Raises what the call raised there, or EnvironmentFailure
        `worker_died` or `worker_timeout`; a worker that does not answer in time is killed."""
        future: concurrent.futures.Future = concurrent.futures.Future()
        with self._lock:
            if self.ended is not None:
                raise self.failure()
            self._waiting[call.number] = future
        self._send(call)
        try:
            answer = future.result(timeout=timeout_s)
        except concurrent.futures.TimeoutError:
            self.end("worker_timeout", f"did not answer `{call.method}` in {timeout_s:g} s and was killed")
            raise self.failure() from None
        return answer if whole else answer.value

    def failure(self) -> EnvironmentFailure:
        """What this worker's end means for an episode that it hosted."""
        category, words = self.ended or ("worker_died", "ended")
        return EnvironmentFailure(category, f"the worker process of {self.family.environment} {words}")

    def end(self, category: str, words: str) -> None:
        """Kill the process with everything under it; calls under way fail. The first reason counts."""
        with self._lock:
            first = self.ended is None
            if first:
                self.ended = (category or "worker_died", words)
            waiting = list(self._waiting.values())
            self._waiting.clear()
        if first:
            self.family._ended(self, category)
        kill_session(self.process.pid)
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for future in waiting:
            if not future.done():
                future.set_exception(self.failure())

    def close(self) -> None:
        """End the process in order: its environments are closed first, if they take no longer than CLOSE_S."""
        with self._lock:
            orderly = self.ended is None
            if orderly:
                self.ended = ("worker_died", "was closed")
        if orderly:
            with contextlib.suppress(OSError, ValueError), self._sending:
                self._connection.send(Call(0, 0, "end"))
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_S)
        self.end("", "was closed")
        if threading.current_thread() is not self._listener:
            self._listener.join(CLOSE_S)
            self._drain.join(CLOSE_S)

    def _send(self, message: Begin | Call) -> None:
        try:
            with self._sending:
                self._connection.send(message)
        except BlockingIOError:
            self.end("worker_timeout", "reads no more calls and was killed")
        except (OSError, ValueError):
            pass  # it has ended, which the listening thread sees

    def _listen(self) -> None:
        try:
            while True:
                answer: Answer = self._connection.recv()
                with self._lock:
                    future = self._waiting.pop(answer.number, None)
                if future is None:
                    continue
                if answer.trouble is not None:
                    future.set_exception(_raised(answer.trouble))
                else:
                    future.set_result(answer if answer.number else answer.value)
        except Exception as error:  # noqa: BLE001 - its end, or an answer that cannot be read: both end it
            ended = isinstance(error, EOFError | OSError)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1.0 if ended else 0.0)
            self._drain.join(0.5)
            status = self.process.poll()
            how = "gave an answer that cannot be read" if not ended else "closed its pipe" if status is None else \
                f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
            self.end("worker_died", how + self._last_words())
        finally:
            self._connection.close()

    def _drain_output(self) -> None:
        """Read what the process prints, so that it never waits for a reader, and keep its end."""
        with contextlib.suppress(OSError, ValueError):
            while part := os.read(self.process.stdout.fileno(), 1 << 16):
                self._said = (self._said + part)[-LAST_WORDS:]
        with contextlib.suppress(OSError):
            self.process.stdout.close()

    def _last_words(self) -> str:
        lines = [line.strip() for line in self._said.decode("utf-8", "replace").splitlines() if line.strip()]
        return f" (its last words: {' | '.join(lines[-3:])[-500:]})" if lines else ""


class WorkerEnvironment:
    """An environment in a worker process, one task at a time, as mopd.environments.base has it."""

    def __init__(self, family: WorkerFamily, worker: _Worker, number: int):
        self._family, self._worker, self._number = family, worker, number
        self._closed = False

    @property
    def pid(self) -> int:
        """Process id of its present worker."""
        return self._worker.process.pid

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        if not self._family._enter(self._worker, self._number):
            # Its last episode is over, so nothing is lost: it lives on in another worker.
            self._leave()
            self._worker, self._number = self._family._host()
        worker = self._worker
        answer = worker.ask(self._call("reset", task, expert=expert), self._family.workers.reset_timeout_s, whole=True)
        self._family._after_reset(worker, answer.memory_mib)
        return answer.value

    def step(self, action: str) -> Observation:
        return self._worker.ask(self._call("step", action), self._family.workers.step_timeout_s)

    def expert_action(self) -> str | None:
        return self._worker.ask(self._call("expert_action"), self._family.workers.step_timeout_s)

    def rest(self) -> None:
        """Its episode is over, whatever state it is in: a worker that is to be recycled need not wait for it."""
        self._family._out(self._worker, self._number, leaves=False)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._leave()

    def _call(self, method: str, *arguments: Any, **options: Any) -> Call:
        return Call(next(self._family._numbers), self._number, method, arguments, options)

    def _leave(self) -> None:
        worker = self._worker
        if self._number in worker.hosts:
            if worker.ended is None:
                worker._send(self._call("close"))  # nothing to wait for
            self._family._out(worker, self._number)


class ListingEnvironment(WorkerEnvironment):
    """One that lists actions worth trying on request."""

    def possible_actions(self) -> tuple[str, ...]:
        return tuple(self._worker.ask(self._call("possible_actions"), self._family.workers.step_timeout_s))


def _raised(trouble: Trouble) -> Exception:
    """The exception that a worker told of, with its traceback there as a note."""
    if trouble.category:
        failure = EnvironmentFailure(trouble.category, trouble.message)
        if trouble.final:
            failure.final = True
        if trouble.record:
            failure.record = trouble.record
        return failure
    kind = EnvironmentConfigError if trouble.kind == "EnvironmentConfigError" else getattr(builtins, trouble.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError | KeyError):
        found: Exception = WorkerError(f"{trouble.kind}: {trouble.message}")
    else:
        found = kind(trouble.message)
    if trouble.trace:
        found.add_note(f"in a worker process:\n{trouble.trace}")
    return found
