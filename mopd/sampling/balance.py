"""Which of several servers gets the next request, and when one that failed is looked at again. No clock, no network."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

# Seconds until a server that failed is looked at again: the first and the longest pause; each failure doubles it.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
# A busy server may drop a connection now and then; after this many failures in a row it counts as down.
FAILURES_ALLOWED = 2
# No vLLM starts within this many seconds, so one heard from more lately is still the same process.
SILENCE = 5.0
ANSWERS = "answers"
# what is told of a server that is well


@dataclasses.dataclass(eq=False)
class Endpoint:
    """One server.

    live        answers, and has been checked since it last failed
    in_flight   requests under way
    served      requests answered
    failures    in a row
    retry_at    when it may be looked at again, on the caller's clock
    heard_at    when it answered last, on the caller's clock
    said        what it met last, for a message
    unfit       it answers, but it is another server than is wanted, or lets nobody in
    missed      it failed or was turned away since it was live: the next time it is, it came back
    """

    url: str
    live: bool = False
    in_flight: int = 0
    served: int = 0
    failures: int = 0
    retry_at: float = 0.0
    heard_at: float = 0.0
    said: str = "not asked yet"
    unfit: bool = False
    missed: bool = False


class Balance:
    """Least requests under way first; a server that fails is left alone for a while that doubles."""

    def __init__(self, urls: Sequence[str]):
        if not urls:
            raise ValueError("at least one address of a server is needed")
        self.endpoints = [Endpoint(url.rstrip("/")) for url in urls]

    def choose(self, prefer: str = "") -> Endpoint | None:
        """The live server with the fewest requests under way, or None; the one at `prefer` while it is live."""
        live = [e for e in self.endpoints if e.live]
        if prefer and (own := [e for e in live if e.url == prefer]):
            return own[0]
        return min(live, key=lambda e: (e.in_flight, e.served), default=None)

    def due(self, now: float) -> list[Endpoint]:
        """Servers that are down and may be looked at now."""
        return [e for e in self.endpoints if not e.live and now >= e.retry_at]

    def doubt(self, now: float) -> None:
        """A server not heard from for a while may have been started again with something else: it is to be greeted again."""
        for endpoint in self.endpoints:
            if endpoint.live and not endpoint.in_flight and now - endpoint.heard_at > SILENCE:
                endpoint.live, endpoint.retry_at = False, now

    def answered(self, endpoint: Endpoint, now: float) -> None:
        endpoint.failures, endpoint.served, endpoint.heard_at = 0, endpoint.served + 1, now

    def failed(self, endpoint: Endpoint, now: float, said: str, *, down: bool, unfit: bool = False) -> None:
        """A request failed; `down`: further ones would fail too; `unfit`: it is another server than is wanted."""
        endpoint.failures, endpoint.said, endpoint.unfit = endpoint.failures + 1, said, unfit
        if down or endpoint.failures >= FAILURES_ALLOWED:
            endpoint.missed = endpoint.missed or endpoint.heard_at > 0
            endpoint.live = False
            endpoint.retry_at = now + min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** min(endpoint.failures - 1, 10))

    def greeted(self, endpoint: Endpoint, now: float) -> bool:
        """It was looked at and is well; True where it came back."""
        again, endpoint.missed = endpoint.missed, False
        endpoint.live, endpoint.unfit, endpoint.failures, endpoint.said, endpoint.heard_at = True, False, 0, ANSWERS, now
        return again

    def said(self) -> str:
        """What every server met last, in one line."""
        return "; ".join(f"{e.url}: {e.said}" for e in self.endpoints)
