"""A training run that is asked to end (SIGTERM, SIGINT): it finishes its step, or breaks off sampling when time runs out.

Nothing here knows what a step is: the run asks `asked` between steps and marks what may be broken off.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import threading
import time
from collections.abc import Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = 1.0
# a second Ctrl-C this long after the first ends at once: one that launcher and terminal both send is one
NUDGE_S, RAISE_AGAIN_S = 0.25, 2.0


class BrokenOff(BaseException):
    """Raised inside `Stop.may_break` when time has run out. No Exception: what retries failures must not take it for one."""


class Stopped(SystemExit):
    """The run ended because it was asked to. `code` is the exit status, 128 + the signal's number, as shells, Slurm and
    Kubernetes report a process that a signal ended: 143 after SIGTERM, 130 after SIGINT."""

    def __init__(self, number: int):
        super().__init__(128 + number)


class Stop:
    """Between `with Stop(…)` and its end the first SIGTERM or SIGINT only sets `asked` to the signal's number.

    within_s   seconds from the signal until the run should have ended
    rest_s     to be set by the run: how many of them it needs for what cannot be broken off (a training step, saving)

    When within_s − rest_s seconds have passed, code inside `may_break` is left with BrokenOff. A SIGINT more than a second
    after the first signal is an ordinary KeyboardInterrupt. A SIGINT that was ignored stays ignored, as for what a shell puts
    in the background. In a thread that is not the main one signals stay as they are and `asked` stays 0.
    """

    def __init__(self, within_s: float, *, quiet: bool = False):
        self.within_s, self.quiet = within_s, quiet
        self.rest_s = 0.0
        self.asked = 0
        self._since, self._raised = 0.0, -math.inf
        self._previous: dict[int, object] = {}
        self._breakable = False
        self._late = False
        self._over = threading.Event()
        self._main = threading.get_ident()

    def __enter__(self) -> Stop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in SIGNALS
                              if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN}
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}

    @contextlib.contextmanager
    def may_break(self) -> Iterator[None]:
        """What runs inside may be left with BrokenOff at any point, and its work is then thrown away."""
        self._breakable = True
        try:
            yield
        finally:
            self._breakable = False

    def _handle(self, number: int, _: object) -> None:
        if not self.asked:
            self.asked, self._since = number, time.monotonic()
            name = signal.Signals(number).name
            if not self.quiet:
                os.write(2, f"\n{name}: finishing this step and saving a checkpoint, within about {self.within_s:g} s"
                         f"{'; Ctrl-C again ends at once' if number == signal.SIGINT else ''}\n".encode())
            threading.Thread(target=self._watch, daemon=True, name="stop").start()
        elif self._late and self._breakable and time.monotonic() - self._raised > RAISE_AGAIN_S:
            self._raised = time.monotonic()
            raise BrokenOff
        elif number == signal.SIGINT and time.monotonic() - self._since > AGAIN_S:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        if self._over.wait(max(self.within_s - self.rest_s, 0.0)):
            return
        self._late = True
        # Again and again: Python drops an exception that a handler raises inside a finaliser.
        while not self._over.wait(NUDGE_S):
            if self._breakable:
                signal.pthread_kill(self._main, signal.SIGTERM)
