"""Turns of the hf engine that come and end one by one, while others are under way."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Hashable, Iterable
from typing import TYPE_CHECKING

from mopd.sampling.base import Completion, Request, SamplingOptions
from mopd.sampling.hf_rows import Rows

if TYPE_CHECKING:
    from mopd.sampling.hf import HFEngine

REFILL = 1 / 8
# where more turns wait than there is room for, this share of the batch enters together: a pass for each row alone costs
# nearly as much as one for all


REFILL, HOLD_ROUNDS = 0.25, 3
# prompts are read in waves of at least this share of the rows that decode, unless they have waited for so many rounds: one by
# one they took a seventh of the throughput


@dataclasses.dataclass(eq=False)
class _Turn:
    """A turn under way; `place` among the rows once it has one."""

    key: Hashable
    request: Request
    options: SamplingOptions
    place: int = -1


class Stream:
    """The turns under way in an engine: `max_batch` of them decode, the others wait in the order of their arrival. Callers
    check requests. `turns` by key; `sessions` are those with a turn under way."""

    def __init__(self, engine: HFEngine):
        self.engine = engine
        self.rows = Rows(engine, engine.max_batch, 32)
        self.turns: dict[Hashable, _Turn] = {}
        self._waiting: collections.deque[_Turn] = collections.deque()
        self._again: list[int] = []  # places whose rows were unseated by new weights
        self._free = list(range(engine.max_batch))[::-1]
        self._at: dict[int, _Turn] = {}
        self.sessions: set[str | None] = set()
        self._held = 0  # rounds for which those that wait were held back

    def submit(self, key: Hashable, request: Request, options: SamplingOptions) -> None:
        """Put a turn behind those that wait."""
        turn = self.turns[key] = _Turn(key, request, options)
        self._waiting.append(turn)
        self.sessions.add(request.session)

    def poll(self, seconds: float) -> list[tuple[Hashable, Completion]]:
        """Rounds of one token for every row, with new rows before each, until a turn has ended or `seconds` have passed; at
        least one round."""
        begin = time.perf_counter()
        while self.turns:
            self._enter()
            started = time.perf_counter()
            if self.rows.live:
                self.rows.step(compact=not self._waiting)
            now = time.perf_counter()
            self.engine.stats["decode_seconds"] += now - started
            if self.rows.over or now - begin >= seconds:
                break
        over, self.rows.over = self.rows.over, []
        return [self._ended(place) for place in over]

    def _enter(self) -> None:
        """Whoever has room enters the batch: unseated rows first, then those that wait."""
        if not self._again and self._hold():
            return
        wave, self._again = self._again, []
        few = len(self._free) < min(REFILL * self.engine.max_batch, len(self._waiting))
        while self._waiting and self._free and not (few and self.rows.live):
            turn = self._waiting.popleft()
            turn.place = self._free.pop()
            self._at[turn.place] = turn
            self.rows.put(turn.place, turn.request, turn.options)
            wave.append(turn.place)
        if wave:
            started = time.perf_counter()
            self.rows.admit(wave)
            self.engine.stats["prefill_seconds"] += time.perf_counter() - started

    def _hold(self) -> bool:
        """Whether nobody enters in this round: a few prompts wait for others to be read with, as long as many rows decode."""
        entering = min(len(self._waiting), len(self._free))
        if entering and (entering >= REFILL * len(self.rows.live) or self._held == HOLD_ROUNDS):
            self._held = 0
            return False
        self._held += entering > 0
        return True

    def _ended(self, place: int) -> tuple[Hashable, Completion]:
        turn = self._at.pop(place)
        self._free.append(place)
        del self.turns[turn.key]
        self.sessions.discard(turn.request.session)
        return turn.key, self.rows.take(place)

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Forget these turns; their places are free at once."""
        gone = [turn for key in keys if (turn := self.turns.pop(key, None)) is not None]
        for turn in gone:
            self.sessions.discard(turn.request.session)
            if turn.place < 0:
                self._waiting.remove(turn)
                continue
            if turn.place in self._again:
                self._again.remove(turn.place)
            self.rows.drop(turn.place)
            self._free.append(turn.place)
            del self._at[turn.place]

    def unseat(self) -> None:
        """All caches are about to go: rows keep their tokens and are read again before they go on."""
        self._again += self.rows.unseat()
