"""The samplers of a run: started, listened to, given the newest weights, and replaced when they are lost.

Knows processes and their news; what is sampled is the coordinator's business.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Protocol

from mopd.counts import summed
from mopd.sampling.engines import engine_faults
from mopd.sampling.weight_folder import WeightFolder
from mopd.sampling.work import Lost, News, TookWeights, Work

RESTART_WINDOW_S = 3600.0
# `sampling.sampler_restarts` counts replacements within this time
STARTS_AGAIN_S = (0.0, 1.0, 5.0, 20.0, 60.0)
# pause before a replacement, by how many there were lately: what kills one at once may pass by itself


class SamplersGone(RuntimeError):
    """Samplers were lost more often than they may be replaced; the message has the last words of one."""


class SamplerHandle(Protocol):
    """One sampler process, as mopd.sampling.sampler.Sampler."""

    slots: int
    kv_tokens: float
    version: int
    busy_seconds: float
    in_flight: int
    stats: dict[str, Any]

    def start(self) -> None: ...
    def fileno(self) -> int: ...
    def poll(self, timeout: float = 0.0) -> list[News]: ...
    def give(self, works: Sequence[Work]) -> None: ...
    def cancel(self, works: Sequence[Work]) -> None: ...
    def take_weights(self, folder: Path, version: int) -> None: ...
    def kill(self) -> None: ...
    def close(self, timeout: float = 10.0) -> None: ...


def counts_of(stats: dict[str, Any]) -> dict[str, Any]:
    """`mopd.sources.Source.counts` of what a sampler told of itself."""
    return {"environments": stats.get("environments", {}), "engine": engine_faults(stats), "again": stats.get("counts", {})}


class Samplers:
    """`count` samplers by name, "sampler-0", "sampler-1", …

    make       (number, folder of weights or None, version) → a sampler that was not started
    place      where versions of the weights lie; None where nobody hands any over
    restarts   replacements within an hour; one more raises SamplersGone

    Not safe to call from two threads at once, but for `wait` and `wake`.
    """

    def __init__(self, make: Callable[[int, Path | None, int], SamplerHandle], count: int, *,
                 place: WeightFolder | None = None, restarts: int = 5):
        self._make, self.count, self.place, self.restarts = make, count, place, restarts
        self.newest: tuple[Path | None, int] = (None, 0)
        self.replaced = 0
        self.weights: list[TookWeights] = []
        """What samplers told of new weights since this was last emptied."""
        self._live: dict[str, SamplerHandle] = {}
        self._due: dict[str, float] = {}  # name → when its replacement starts
        self._lost: deque[float] = deque()
        self._busy_before, self._counts_before = 0.0, {}  # of samplers that are gone
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)

    def start(self, folder: Path | None, version: int) -> None:
        """Start all of them with the weights of `version` (None: as the student's model begins). They tell Ready."""
        self.newest = folder, version
        for number in range(self.count):
            self._begin(f"sampler-{number}")

    def _begin(self, name: str) -> None:
        sampler = self._make(int(name.rpartition("-")[2]), *self.newest)
        self._live[name] = sampler
        if self.place is not None:
            self.place.join(name)
        sampler.start()

    def wake(self) -> None:
        """End a `wait` of another thread."""
        with contextlib.suppress(BlockingIOError):  # it is full of such words already
            os.write(self._write, b"!")

    def wait(self, timeout: float) -> None:
        """Until a sampler has news, somebody calls `wake`, or `timeout` seconds have passed."""
        wait([*list(self._live.values()), self._read], timeout)
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def news(self) -> Iterator[tuple[str, News]]:
        """What there is, with the sampler's name. Lost ones are replaced, in the end with SamplersGone; what a sampler says
        is wrong beyond replacing (mopd.sampling.sampler.SamplerFault) is raised."""
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due <= now]:
            del self._due[name]
            self._begin(name)
        for name, sampler in list(self._live.items()):
            for news in sampler.poll(0.0):
                if isinstance(news, TookWeights):
                    self.weights.append(news)
                    if self.place is not None:
                        self.place.took(name, news.version)
                elif isinstance(news, Lost):
                    self._gone(name, sampler, news, now)
                yield name, news

    def _gone(self, name: str, sampler: SamplerHandle, news: Lost, now: float) -> None:
        del self._live[name]
        self._busy_before += sampler.busy_seconds
        self._counts_before = summed([self._counts_before, counts_of(sampler.stats)])
        sampler.close(timeout=0.0)
        if self.place is not None:
            self.place.forget(name)
        while self._lost and now - self._lost[0] > RESTART_WINDOW_S:
            self._lost.popleft()
        self._lost.append(now)
        if len(self._lost) > self.restarts:
            raise SamplersGone(
                f"{name} is gone ({news.words}), and {len(self._lost) - 1} samplers were replaced within the last hour "
                f"already. See what ends them ({name}.log in the run's folder, memory above all), and run the same command "
                "again: it goes on from the last checkpoint. sampling.sampler_restarts sets the limit")
        self.replaced += 1
        self._due[name] = now + STARTS_AGAIN_S[min(len(self._lost) - 1, len(STARTS_AGAIN_S) - 1)]

    def give(self, name: str, works: Sequence[Work]) -> None:
        """Have `name` sample works; unknown names (one that has just gone) are passed over, their works come again."""
        if name in self._live:
            self._live[name].give(works)

    def cancel(self, name: str, works: Iterable[Work]) -> None:
        if name in self._live:
            self._live[name].cancel(list(works))

    def take_weights(self, folder: Path, version: int) -> None:
        """All samplers take these weights as soon as they can; those that start later begin with them."""
        self.newest = folder, version
        for sampler in self._live.values():
            sampler.take_weights(folder, version)

    @property
    def busy_seconds(self) -> float:
        """Seconds in which a sampler had a turn under way, summed over all that there ever were."""
        return self._busy_before + sum(sampler.busy_seconds for sampler in self._live.values())

    @property
    def versions(self) -> dict[str, int]:
        return {name: sampler.version for name, sampler in self._live.items()}

    @property
    def in_flight(self) -> int:
        return sum(sampler.in_flight for sampler in self._live.values())

    def stats(self) -> dict[str, dict[str, Any]]:
        """What each sampler told of itself lately."""
        return {name: dict(sampler.stats) for name, sampler in self._live.items()}

    def counts(self) -> dict[str, Any]:
        """What went wrong in all samplers that there ever were, as of their last words (see mopd.sources.Source.counts)."""
        return summed([self._counts_before, *(counts_of(sampler.stats) for sampler in self._live.values())])

    def servers(self) -> dict[str, str]:
        """Address of every server that a sampler asks → "answers", or what it met last."""
        return {url: said for stats in self.stats().values() for url, said in (stats.get("servers") or {}).items()}

    def engines_down_s(self) -> float:
        """For how many seconds no sampler's engine has answered; 0 while one does, or nobody knows."""
        return min(((stats.get("engine_trouble") or {}).get("since_s", 0.0) for stats in self.stats().values()), default=0.0)

    def troubles(self) -> list[str]:
        """Why samplers do not get on, in words: replacements on their way, engines that do not answer."""
        said = [f"{name} is being replaced" for name in self._due]
        for name, stats in self.stats().items():
            trouble = stats.get("engine_trouble") or {}
            if trouble.get("since_s", 0.0) > 0:
                said.append(f"{name}: its engine has not answered for {trouble['since_s']:.0f} s "
                            f"({trouble.get('words', '')})")
        return said

    def close(self) -> None:
        """End all of them; safe to call twice."""
        live, self._live = list(self._live.values()), {}
        self._due.clear()
        for sampler in live:
            sampler.close()
        for end in (self._read, self._write):
            with contextlib.suppress(OSError):
                os.close(end)
        self._read = self._write = -1
