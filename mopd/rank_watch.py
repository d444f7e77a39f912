"""Which process of a job the others wait for: said while they wait, and by step in the metrics."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any


class RankWatch:
    """Says on stderr, once for each place, which ranks this one waits for when it has waited `after` seconds.

    Every rank notes in the job's common store how many places of a run it has passed and the last one's name; a rank that
    others are behind is waiting for them. One that has been in an exchange for long notes its number too: whoever is at the
    same place and has not is waited for. Of the waiting ranks the lowest speaks.
    """

    def __init__(self, store: Any, rank: int, size: int, *, after: float):
        self._store, self._rank, self._size, self._after = store.clone(), rank, size, after
        self._count, self._since, self._said = 0, time.monotonic(), -1
        self._exchange, self._entered, self._noted = 0, 0.0, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="rank-watch", daemon=True)
        self._thread.start()

    def at(self, count: int) -> None:
        """This rank has reached another place."""
        self._count, self._since = count, time.monotonic()

    def exchanging(self, number: int) -> None:
        """This rank is in the exchange of this number, counted from the start of the job by every rank alike; 0: in none."""
        self._entered, self._exchange = time.monotonic(), number

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=2.0)

    def _look(self) -> None:
        while not self._over.wait(min(5.0, self._after / 4)):
            waited, exchange = time.monotonic() - self._since, self._exchange
            inside = exchange and time.monotonic() - self._entered > self._after / 2
            try:
                if inside and self._noted != exchange:
                    self._store.set(f"mopd/exchange/{self._rank}", str(exchange))
                    self._noted = exchange
                if waited < self._after or self._said == self._count:
                    continue
                places = [place_of(self._store, rank) for rank in range(self._size)]
                elsewhere = [rank for rank in range(self._size) if inside and self._after < time.monotonic() - self._entered
                             and exchange_of(self._store, rank) < exchange]
            except RuntimeError:  # the process that keeps the store is gone: the next exchange says so
                return
            behind = [rank for rank, (count, _) in enumerate(places)
                      if count < self._count or count == self._count and rank in elsewhere]
            waiting = [rank for rank in range(self._size) if rank not in behind]
            if behind and waiting and waiting[0] == self._rank:
                self._said = self._count
                who = ", ".join(f"rank {rank} (at {places[rank][1]})" for rank in behind[:8]) + " …" * (len(behind) > 8)
                print(f"rank {self._rank} of {self._size} has been at {places[self._rank][1]} for {waited:.0f} s and waits "
                      f"for {who}", file=sys.stderr, flush=True)


def place_of(store: Any, rank: int) -> tuple[int, str]:
    """(how many places a rank has passed, the name of the last) as `Ranks.at` noted it."""
    key = f"mopd/place/{rank}"
    if not store.check([key]):
        return 0, "the start"
    count, _, place = store.get(key).decode().partition(" ")
    return int(count), place


def exchange_of(store: Any, rank: int) -> int:
    """The last exchange in which a rank noted that it waits; 0: in none yet."""
    key = f"mopd/exchange/{rank}"
    return int(store.get(key)) if store.check([key]) else 0


def straggling(waited: list[float], seconds: float, limit: float) -> tuple[dict[str, Any], str]:
    """(what a step's record says of its ranks, an alert or "") from the seconds that each waited for the others in it.

    The rank that waited least is the one that the others waited for; `lag` is how much longer the median rank waited than
    it. An alert where that is more than the share `limit` of the step's `seconds`.
    """
    least = min(range(len(waited)), key=waited.__getitem__)
    others = sorted(value for rank, value in enumerate(waited) if rank != least)
    lag = others[(len(others) - 1) // 2] - waited[least] if others else 0.0
    record = {"waited": waited, "slowest": least, "lag": lag}
    if lag <= limit * seconds:
        return record, ""
    return record, (f"rank {least} held the others up for {lag:.1f} of the step's {seconds:.1f} s (train.straggler_alert="
                    f"{limit:g})")
