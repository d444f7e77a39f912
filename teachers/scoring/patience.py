"""Waiting for a teacher that does not answer: said, with growing pauses, for as long as the run allows."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

LONGEST_PAUSE_S = 30.0
SAY_AGAIN_S = 300.0


class TeacherGone(RuntimeError):
    """A teacher has not answered for as long as the run waits; the message names it, what it said last, and what to do."""


def _to_stderr(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


class Patience:
    """How long a run waits for a teacher.

    wait_s             seconds; 0: not at all
    max_unscored_share where more of a teacher's tokens of a step have no score, the run waits for it
    say                where what happens is told; clock and sleep in seconds, for tests
    """

    def __init__(self, wait_s: float = 0.0, max_unscored_share: float = 1.0, *, say: Callable[[str], None] = _to_stderr,
                 clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep):
        self.wait_s, self.max_unscored_share = wait_s, max_unscored_share
        self.say, self.clock, self.sleep = say, clock, sleep

    def begin(self, teacher: str) -> Wait:
        """A wait for one teacher; nothing happens before its first `pause`."""
        return Wait(self, teacher)


class Wait:
    """One wait for one teacher, from the first answer that did not come to the one that does."""

    def __init__(self, patience: Patience, teacher: str):
        self.patience, self.teacher = patience, teacher
        self.pauses = 0
        self._since: float | None = None
        self._told = 0.0

    @property
    def seconds(self) -> float:
        """Since the first pause; 0 where there was none."""
        return 0.0 if self._since is None else self.patience.clock() - self._since

    def pause(self, said: str) -> None:
        """The teacher did not answer, or not well enough; `said` is what it said. Returns after a pause. Raises TeacherGone
        where the run has waited long enough."""
        patience = self.patience
        now = patience.clock()
        if self._since is None:
            self._since, self._told, self._at = now, now, time.strftime("%H:%M:%S")
            if patience.wait_s > 0:
                patience.say(f"teacher {self.teacher!r} since {self._at}: {said}. The run waits and asks again for up to "
                             f"{patience.wait_s:g} s (train.teacher_wait_s); nothing is lost meanwhile, and it goes on as "
                             "soon as the teacher answers")
        elif now - self._told >= SAY_AGAIN_S:
            self._told = now
            patience.say(f"teacher {self.teacher!r} still does not answer, since {self._at}: {said}")
        left = patience.wait_s - (now - self._since)
        if left <= 0:
            waited = f"after {now - self._since:.0f} s of waiting" if patience.wait_s > 0 else "and train.teacher_wait_s is 0"
            raise TeacherGone(f"teacher {self.teacher!r}: {said}, {waited}. Start the teacher again (or mend teachers."
                              f"{self.teacher}) and run the same command again: it goes on from the last checkpoint")
        patience.sleep(min(2.0 ** self.pauses, LONGEST_PAUSE_S, left))
        self.pauses += 1

    def over(self) -> None:
        """The teacher answers; says so where the run had to wait."""
        if self._since is not None:
            self.patience.say(f"teacher {self.teacher!r} answers again after {self.seconds:.0f} s; the run goes on")
