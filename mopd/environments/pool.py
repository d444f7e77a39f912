"""Keeps environments of one family ready: resets ahead of time, retries of infrastructure failures, counts.

What a task looks like never depends on which environment plays it or when it was prepared, only on the task.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import math
import numbers
import threading
import time
from collections.abc import Iterable

from mopd.environments.base import Environment, EnvironmentFailure, EnvironmentFamily, Observation, Task

BACKOFF_S = 0.1


@dataclasses.dataclass
class PoolStats:
    """Running totals. `reset_seconds` and `step_seconds` are spent inside environments (resets mostly beside other
    work), `waited_seconds` is what callers of `acquire` waited; `failures` counts EnvironmentFailure by category, those
    that were tried again too."""

    resets: int = 0
    steps: int = 0
    reset_seconds: float = 0.0
    step_seconds: float = 0.0
    waited_seconds: float = 0.0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return self.reset_seconds + self.step_seconds


class PooledEnvironment:
    """An environment on loan: counts its steps and remembers whether it broke."""

    def __init__(self, environment: Environment, pool: EnvironmentPool):
        self._environment = environment
        self._pool = pool
        self.broken = False

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        return self._timed("reset", lambda: self._checked(self._environment.reset(task, expert=expert)))

    def step(self, action: str) -> Observation:
        return self._timed("step", lambda: self._checked(self._environment.step(action)))

    def expert_action(self) -> str | None:
        return self._guarded(self._environment.expert_action)

    def possible_actions(self) -> tuple[str, ...] | None:
        """Actions worth trying now, for environments that list them only on request; None where they cannot."""
        listing = getattr(self._environment, "possible_actions", None)
        return None if listing is None else tuple(self._guarded(listing))

    def rest(self) -> None:
        """Its episode is over. Environments that want to know have a method `rest`."""
        getattr(self._environment, "rest", lambda: None)()

    def close(self) -> None:
        self._environment.close()

    def _checked(self, observation: Observation) -> Observation:
        """What the environment answered; what nobody could show to a model or count as a reward is its failure."""
        wrong = ""
        if not isinstance(observation, Observation):
            wrong = f"a {type(observation).__name__} instead of an Observation"
        elif not (isinstance(observation.text, str) and isinstance(observation.instruction, str)):
            kinds = f"{type(observation.text).__name__} and {type(observation.instruction).__name__}"
            wrong = f"an Observation whose text and instruction are {kinds}, not strings"
        elif not (isinstance(observation.score, numbers.Real) and math.isfinite(observation.score)):
            wrong = f"an Observation whose score is {observation.score!r}, not a finite number"
        if wrong:
            raise EnvironmentFailure("bad_observation", f"environment {self._pool.family.name!r} answered with {wrong}")
        return observation

    def _timed(self, kind: str, call):
        start = time.perf_counter()
        try:
            return self._guarded(call)
        finally:
            self._pool._count(kind, time.perf_counter() - start)

    def _guarded(self, call):
        try:
            return call()
        except EnvironmentFailure as failure:
            self.broken = True
            self._pool.count_failure(failure.category)
            raise


class EnvironmentPool:
    """Environments of one family, handed out ready to play. Safe to use from several threads.

    family    where environments come from; the pool does not close it
    size      environments kept between uses, and the most resets that are done ahead
    workers   threads that reset ahead
    retries   how often a reset that failed for reasons of infrastructure is tried again, with growing pauses
    """

    def __init__(self, family: EnvironmentFamily, *, size: int, workers: int = 2, retries: int = 2):
        if size < 1 or workers < 1 or retries < 0:
            raise ValueError(f"size {size} and workers {workers} must be at least 1, retries {retries} at least 0")
        self.family = family
        self.stats = PoolStats()
        self._size = size
        self._retries = retries
        self._lock = threading.Lock()
        self._idle: list[PooledEnvironment] = []
        self._wanted: collections.deque[tuple[Task, bool]] = collections.deque()
        self._ready: dict[tuple[Task, bool], collections.deque[concurrent.futures.Future]] = {}
        self._ahead = 0
        self._closed = False
        self._executor = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix=f"{family.name}-reset")

    @property
    def size(self) -> int:
        """How many environments it is made for at a time; who plays more at once pays for new ones in time and memory."""
        return self._size

    def prefetch(self, tasks: Iterable[Task], *, expert: bool = False) -> None:
        """Have these tasks reset in the background, in this order, as room permits. Tasks may repeat."""
        with self._lock:
            self._check_open()
            self._wanted.extend((task, expert) for task in tasks)
        self._start_ahead()

    def acquire(self, task: Task, *, expert: bool = False) -> tuple[PooledEnvironment, Observation]:
        """An environment at the start of `task`, with the first observation: a prefetched one, else reset now.

        Never waits for another environment to be released. Raises EnvironmentFailure when all retries failed.
        """
        start = time.perf_counter()
        key = (task, expert)
        with self._lock:
            self._check_open()
            future = None
            if self._ready.get(key):
                future = self._ready[key].popleft()
                if not self._ready[key]:
                    del self._ready[key]
                self._ahead -= 1
            elif key in self._wanted:
                self._wanted.remove(key)
        try:
            result = future.result() if future is not None else self._prepare(task, expert)
        finally:
            with self._lock:
                self.stats.waited_seconds += time.perf_counter() - start
        self._start_ahead()
        return result

    def release(self, environment: PooledEnvironment) -> None:
        """Give an environment back, whatever its state; one that broke is closed."""
        if not environment.broken:
            environment.rest()
        with self._lock:
            keep = not (environment.broken or self._closed or len(self._idle) >= self._size)
            if keep:
                self._idle.append(environment)
        if not keep:
            environment.close()

    def drop_prefetched(self) -> None:
        """Forget what was prefetched and not acquired."""
        with self._lock:
            self._wanted.clear()
            futures = [future for queue in self._ready.values() for future in queue]
            self._ready.clear()
            self._ahead = 0
        for future in futures:
            if not future.cancel():
                try:
                    self.release(future.result()[0])
                except EnvironmentFailure:
                    pass  # already counted when it failed

    def close(self) -> None:
        """Close all environments that are not on loan. The family stays open."""
        with self._lock:
            if self._closed:
                return
        self.drop_prefetched()
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        self._executor.shutdown(wait=True)
        for environment in idle:
            environment.close()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start_ahead(self) -> None:
        with self._lock:
            while self._wanted and self._ahead < self._size and not self._closed:
                task, expert = self._wanted.popleft()
                future = self._executor.submit(self._prepare, task, expert)
                self._ready.setdefault((task, expert), collections.deque()).append(future)
                self._ahead += 1

    def _prepare(self, task: Task, expert: bool) -> tuple[PooledEnvironment, Observation]:
        for attempt in range(self._retries + 1):
            with self._lock:
                environment = self._idle.pop() if self._idle else None
            try:
                if environment is None:
                    environment = self._create()
                return environment, environment.reset(task, expert=expert)
            except EnvironmentFailure:
                if environment is not None:
                    environment.close()
                if attempt == self._retries:
                    raise
                time.sleep(BACKOFF_S * 2**attempt)
        raise AssertionError("unreachable")

    def _create(self) -> PooledEnvironment:
        try:
            return PooledEnvironment(self.family.create(), self)
        except EnvironmentFailure as failure:
            self.count_failure(failure.category)
            raise

    def _count(self, kind: str, seconds: float) -> None:
        with self._lock:
            if kind == "reset":
                self.stats.resets += 1
                self.stats.reset_seconds += seconds
            else:
                self.stats.steps += 1
                self.stats.step_seconds += seconds

    def count_failure(self, category: str) -> None:
        """Count one more failure of this category, whether it is tried again or not."""
        with self._lock:
            self.stats.failures[category] = self.stats.failures.get(category, 0) + 1

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"the pool of {self.family.name} environments is closed")
