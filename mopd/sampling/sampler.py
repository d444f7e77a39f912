"""A sampler process as the learner's side sees it: works and weights go in, news come out, and its end is news too.

Nothing here waits: one thread starts the process and listens to it, another speaks to it. The process itself is
sampler_process.py.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import multiprocessing.connection
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mopd.processes import kill_marked
from mopd.progress import human_seconds
from mopd.sampling import sampler_process
from mopd.sampling.sampler_process import MARK, Beat, Cancel, End, Give, Hello, SamplerSpec, Told, Trouble, Weights
from mopd.sampling.work import Done, GaveUp, Lost, News, Ready, TookWeights, Work

__all__ = ["Sampler", "SamplerFault", "SamplerSpec", "wait_ready"]

START_S = 1800.0
# seconds for importing and loading, where sampling.sampler_timeout is shorter
CLOSE_S = 10.0
LOOK_S = 0.5
DUMP_S = 0.3
# seconds for a sampler that hangs to write where it hangs, before it is killed
_OPEN: weakref.WeakSet[Sampler] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    # Registered after multiprocessing's own, so called before it: that one waits for processes that still live.
    for sampler in list(_OPEN):
        sampler.kill()


class SamplerFault(RuntimeError):
    """A sampler ended for a reason that another one would meet too: a wrong option, a missing model, weights that are not the
    learner's. The message is what it said."""


class Sampler:
    """One sampler process.

    All calls return at once, from any thread. `poll` gives news; the sampler itself may be waited for like a connection
    (`multiprocessing.connection.wait([a, b], timeout)`), as it has a `fileno` that is readable where there are some. After
    Lost, or a SamplerFault, nothing more comes: the process and everything that it started are gone.

    ready, slots, kv_tokens   once it has its engine and environments
    doing                     what it does, in words
    version                   of the weights that it has
    stats                     as of its last word (every second): numbers of its engine, `counts` of what was tried again,
                              `environments` by domain (Domain.counts), `engine_trouble` (see ContinuousLoop)
    busy_seconds              time in which turns were under way
    in_flight, works          what was given and has not ended
    """

    def __init__(self, spec: SamplerSpec):
        self.spec, self.name = spec, f"sampler {spec.number}"
        self.timeout = float(spec.config.sampling.sampler_timeout)
        self.ready, self.slots, self.kv_tokens = False, 0, 0.0
        self.doing, self.version, self.stats = "starting", spec.version, {}
        self._process: Any = None
        self._mark = secrets.token_hex(8)
        self._works: dict[Work, None] = {}
        self._lock = threading.RLock()
        self._news: list[News] = []
        self._fault: SamplerFault | None = None
        self._over = False  # its last news is told
        self._closing = False
        self._heard, self._silent = time.monotonic(), 0.0
        self._words = ""
        self._outbox: queue.SimpleQueue = queue.SimpleQueue()
        self._bell, self._ring = socket.socketpair()
        for end in (self._bell, self._ring):
            end.setblocking(False)
        self._gone = threading.Event()
        self._threads: list[threading.Thread] = []
        _OPEN.add(self)

    def start(self) -> Sampler:
        """Begin to start the process."""
        # The thread that starts it stays with it to the end: the system ends the process with that thread.
        self._heard = time.monotonic()
        attend = threading.Thread(target=self._attend, daemon=True, name=self.name)
        self._threads.append(attend)
        attend.start()
        return self

    # What it is told

    def give(self, works: Iterable[Work]) -> None:
        """Begin these works. Raises ValueError for one that was given and has not ended."""
        works = tuple(works)
        with self._lock:
            for work in works:
                if work in self._works:
                    raise ValueError(f"{work.group}, sequence {work.member}, was given to {self.name} before")
                self._works[work] = None
            if works:
                self._outbox.put(Give(works))

    def cancel(self, works: Iterable[Work]) -> None:
        """Forget these works: nothing more is heard of them. Unknown ones are passed over."""
        with self._lock:
            works = tuple(work for work in works if work in self._works)
            for work in works:
                del self._works[work]
            if works:
                self._outbox.put(Cancel(works))

    def take_weights(self, folder: Path, version: int) -> None:
        """Take a published folder of weights, unless a newer one is asked for first; works under way go on. Told as
        TookWeights."""
        self._outbox.put(Weights(Path(folder), version))

    # What it tells

    def fileno(self) -> int:
        """Readable where there is news."""
        return self._bell.fileno()

    def poll(self, timeout: float = 0.0) -> list[News]:
        """News since the last call; waits at most `timeout` seconds for some. Raises SamplerFault."""
        self._look()
        if timeout > 0 and not self._news and self._fault is None:
            with contextlib.suppress(OSError, ValueError):
                select.select([self._bell], [], [], timeout)
            self._look()
        with contextlib.suppress(OSError):
            self._bell.recv(1 << 16)
        with self._lock:
            found, self._news = self._news, []
            fault, self._fault = self._fault, None
        if fault is not None:
            self.kill()
            raise fault
        return found

    @property
    def in_flight(self) -> int:
        return len(self._works)

    @property
    def works(self) -> tuple[Work, ...]:
        with self._lock:
            return tuple(self._works)

    @property
    def busy_seconds(self) -> float:
        return float(self.stats.get("busy_seconds", 0.0))

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def exitcode(self) -> int | None:
        """As multiprocessing gives it: minus the signal's number where a signal ended it."""
        return None if self._process is None else self._process.exitcode

    @property
    def alive(self) -> bool:
        """Whether news may still come."""
        return bool(self._threads) and not self._gone.is_set()

    # Its end

    def close(self, timeout: float = CLOSE_S) -> None:
        """End it in order, and kill what has not ended within `timeout` seconds. More than once does nothing."""
        self._closing = True
        if self.alive:
            self._outbox.put(End())
            self._gone.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """End it and everything that it started at once."""
        self._closing = True
        self._destroy()
        if self._threads:
            self._gone.wait(CLOSE_S)
        self._outbox.put(None)
        with contextlib.suppress(OSError):
            self._ring.close()
            self._bell.close()
        _OPEN.discard(self)

    def _destroy(self) -> None:
        """SIGKILL to the process, its group, and whatever carries its mark."""
        process = self._process
        if process is not None and process.pid is not None and not self._gone.is_set():
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
            with contextlib.suppress(OSError, ValueError):
                process.kill()
        kill_marked(MARK, self._mark)

    def _look(self) -> None:
        """Whether it still lives; one that hangs writes down where, and is killed."""
        if self._over or self._closing or not self._threads:
            return
        silent = time.monotonic() - self._heard
        limit = self.timeout if self.ready else max(self.timeout, START_S)
        if max(silent, self._silent) <= limit:
            return
        with self._lock:
            if self._words:
                return
            self._words = (f"said nothing for {silent:.0f} s and was killed" if silent > limit else
                           f"stood still for {self._silent:.0f} s ({self.doing}) and was killed")
        with contextlib.suppress(OSError, TypeError):
            os.kill(self.pid, signal.SIGUSR1)
            time.sleep(DUMP_S)
        self._destroy()

    # Threads

    def _attend(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        try:
            self._process = context.Process(
                target=sampler_process.main, args=(theirs, self.spec, os.getpid(), self._mark), name=self.name)
            self._process.start()
        except Exception as error:  # noqa: BLE001 - told as the sampler's end
            theirs.close()
            ours.close()
            self._process = None
            self._end(f"could not be started: {type(error).__name__}: {error}")
            return
        theirs.close()
        if self._closing:
            self._destroy()
        try:
            while True:
                multiprocessing.connection.wait([ours, self._process.sentinel], LOOK_S)
                if not self._hear(ours):
                    break
                self._look()
        finally:
            self._process.join()
            kill_marked(MARK, self._mark)
            self._outbox.put(None)
            ours.close()
            self._end(self._words or _how_it_ended(self._process.exitcode))

    def _hear(self, connection: Any) -> bool:
        """Take what has been said; False where it has ended and all is said."""
        try:
            while connection.poll():
                self._take(connection.recv(), connection)
        except (EOFError, OSError):
            return False
        except Exception as error:  # noqa: BLE001 - half a message: it was killed while it spoke
            self._words = self._words or f"said something that cannot be read ({type(error).__name__}: {error})"
            self._destroy()
            return False
        return self._process.exitcode is None

    def _take(self, message: Any, connection: Any) -> None:
        self._heard = time.monotonic()
        if isinstance(message, Beat):
            self.doing, self._silent, self.stats = message.doing, message.silent_s, message.stats
        elif isinstance(message, Hello):
            speak = threading.Thread(target=self._speak, args=(connection,), daemon=True, name=f"{self.name} to it")
            self._threads.append(speak)
            speak.start()
        elif isinstance(message, Trouble):
            with self._lock:
                self._words = self._words or message.words
                if message.final and not self._closing:
                    self._fault = SamplerFault(f"{self.name} {message.words}")
            self._push(())
        elif isinstance(message, Told):
            self._silent = 0.0
            self._push(message.news)

    def _push(self, told: Sequence[News]) -> None:
        with self._lock:
            for news in told:
                if isinstance(news, Done | GaveUp):
                    if news.work not in self._works:  # cancelled while it was told
                        continue
                    del self._works[news.work]
                elif isinstance(news, Ready):
                    self.ready, self.slots, self.kv_tokens, self.doing = True, news.slots, news.kv_tokens, "sampling"
                elif isinstance(news, TookWeights):
                    self.version = news.version
                self._news.append(news)
        with contextlib.suppress(OSError):
            self._ring.send(b"\0")

    def _end(self, words: str) -> None:
        with self._lock:
            told = [] if self._closing or self._fault is not None else [
                Lost(f"{self.name} {words}; its log is {self.spec.log}", tuple(self._works))]
            self._works.clear()
            self.ready, self._over = False, True
        self._gone.set()
        self._push(told)

    def _speak(self, connection: Any) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                connection.send(message)
            except (OSError, ValueError):
                return  # it has ended, which the listening thread sees


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            name = signal.Signals(-code).name
            hint = " (out of memory, or somebody killed it)" if -code == signal.SIGKILL else ""
            return f"was ended by {name}{hint}"
    return f"ended with exit status {code}"


def wait_ready(samplers: Sequence[Sampler], *, quiet: bool = False, interval: float = 5.0) -> None:
    """Wait until all are ready or gone, and say on stderr what they do meanwhile. News stay where they are; raises
    SamplerFault."""
    began, said, at = time.monotonic(), "", -math.inf
    while waiting := [s for s in samplers if s.alive and not s.ready]:
        for sampler in samplers:
            sampler._look()
            if sampler._fault is not None:
                sampler.poll()
        doing = "; ".join(dict.fromkeys(s.doing for s in waiting))
        now = time.monotonic()
        if not quiet and (doing != said and now - at > 1.0 or now - at > interval):
            said, at = doing, now
            print(f"{len(waiting)} of {len(samplers)} samplers: {doing} ({human_seconds(now - began)})", file=sys.stderr,
                  flush=True)
        time.sleep(0.05)
    for sampler in samplers:
        if sampler._fault is not None:
            sampler.poll()
