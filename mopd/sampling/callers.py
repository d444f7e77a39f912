"""Calls that may take long, beside each other and beside the caller, each in a thread of its own while it lasts."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Call:
    """One call. When it is over: `value`, or `error`, and the `seconds` that it took. `owner` is whoever it was for, `then`
    what is to be done about it where they wait no longer; it `began` at, and is `due` by, moments of time.monotonic."""

    owner: Any
    function: Callable[[], Any]
    began: float = 0.0
    due: float = float("inf")
    value: Any = None
    error: Exception | None = None
    seconds: float = 0.0
    then: Callable[[Call], Any] | None = None


class Callers:
    """Threads for calls: as many as calls are under way, so that none waits for another. They are daemons: one that hangs
    for ever does not keep the process from its end."""

    def __init__(self, name: str):
        self.name = name
        self._calls: dict[int, Call] = {}
        self._todo: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._over: queue.SimpleQueue[Call] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads = 0

    def start(self, owner: Any, function: Callable[[], Any], *, limit: float | None = None) -> Call:
        """Begin a call; `limit` seconds set its `due`."""
        call = Call(owner, function, time.monotonic())
        if limit is not None:
            call.due = call.began + limit
        self._calls[id(call)] = call
        if not self._idle.acquire(blocking=False):
            self._threads += 1
            threading.Thread(target=self._work, daemon=True, name=f"{self.name}-{self._threads}").start()
        self._todo.put(call)
        return call

    def over(self, timeout: float = 0.0) -> list[Call]:
        """Calls that are over; waits at most `timeout` seconds for the first."""
        found = []
        try:
            found.append(self._over.get(timeout=timeout) if timeout > 0 else self._over.get_nowait())
            while True:
                found.append(self._over.get_nowait())
        except queue.Empty:
            pass
        for call in found:
            del self._calls[id(call)]
        return found

    def __len__(self) -> int:
        """Calls under way, or over and not asked for."""
        return len(self._calls)

    def __iter__(self):
        return iter(list(self._calls.values()))

    def close(self) -> None:
        """End idle threads, and the others when their calls are over."""
        for _ in range(self._threads):
            self._todo.put(None)

    def _work(self) -> None:
        while (call := self._todo.get()) is not None:
            started = time.perf_counter()
            try:
                call.value = call.function()
            except Exception as error:  # noqa: BLE001 - whoever asked is told, whatever it is
                call.error = error
            call.seconds = time.perf_counter() - started
            self._idle.release()
            self._over.put(call)
