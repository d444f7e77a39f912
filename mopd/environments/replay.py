"""Restores the environment of a stored decision point: reset, the recorded actions, and a look at every observation.

Knows environments and stored sequences; no tokens, models or templates. Whether an observation is the one that was seen
when the sequence was played is for a *witness* to say, by default the hashes of observations that a sequence carries.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from mopd.environments.base import EnvironmentFailure, EnvironmentFamily, Observation, Task
from mopd.environments.pool import EnvironmentPool, PooledEnvironment
from prefix_store.trajectory import DecisionPoint, Sequence

HASHES = "observations"
"""Key of a sequence's metadata: `observation_hash` of the view before each turn, and of the last view."""
SHOWN = 160
# characters of an observation that a message or record shows

Witness = Callable[[int, Observation], tuple[str, str] | None]
"""(turn, the observation before it) → None where that is what was seen, else (expected text, found text)."""


class ReplayRefused(EnvironmentFailure):
    """A sequence that no environment of this family can replay, which is known before anything is played."""

    final = True
    """Another try cannot help."""

    def __init__(self, message: str):
        super().__init__("replay_refused", message)


@dataclasses.dataclass(frozen=True)
class Divergence:
    """Where a replay left its recording: `turn` is the turn before which `found` was seen instead of `expected`, both cut
    around the first character that differs."""

    sequence: str
    domain: str
    task: str
    turn: int
    expected: str
    found: str


class ReplayDiverged(EnvironmentFailure):
    """The same actions gave another observation, or another end, than when the sequence was stored."""

    final = True

    def __init__(self, recording: Recording, turn: int, expected: str, found: str):
        expected, found = _around_difference(expected, found)
        task = recording.task
        name = f"{task.name} {task.split} {task.seed}"
        self.divergence = Divergence(recording.sequence, recording.domain, name, turn, expected, found)
        super().__init__("replay_diverged", f"sequence {recording.sequence[:16]} of {recording.domain!r} ({name}), before "
                                            f"turn {turn}: expected {expected!r}, found {found!r}")

    @property
    def record(self) -> dict[str, Any]:
        """The divergence as plain JSON values."""
        return dataclasses.asdict(self.divergence)


@dataclasses.dataclass(frozen=True)
class Recording:
    """What of a stored sequence its environment needs: where it was played, which task, which actions in order.

    seen   observation hashes (see HASHES) where the sequence carries them, else empty
    """

    sequence: str
    domain: str
    environment: str
    environment_version: str
    task: Task
    actions: tuple[str, ...]
    seen: tuple[str, ...] = ()

    @classmethod
    def of(cls, identity: str, sequence: Sequence) -> Recording:
        """The recording of `sequence`, whose id in the store is `identity`."""
        return cls(identity, sequence.domain, sequence.environment, sequence.environment_version,
                   Task(sequence.task, int(sequence.seed), sequence.split), tuple(sequence.actions),
                   tuple(sequence.metadata.get(HASHES, ())))

    def check(self, family: EnvironmentFamily) -> None:
        """Raise ReplayRefused unless environments of `family` are what this sequence was played in."""
        short = f"sequence {self.sequence[:16]} of domain {self.domain!r}"
        if not self.environment:
            raise ReplayRefused(f"{short} is a static demonstration: it names no environment that could be played again")
        if self.environment != family.name:
            raise ReplayRefused(f"{short} was played in environment {self.environment!r}, the domain has {family.name!r}")
        if self.environment_version != str(family.version):
            raise ReplayRefused(f"{short} was played in {self.environment} version {self.environment_version!r}, here is "
                                f"version {str(family.version)!r}; collect or import it again with this one")

    def witness(self, turn: int, observation: Observation) -> tuple[str, str] | None:
        """Compare with the hashes that the sequence carries; see Witness."""
        found = observation_hash(observation, first=turn == 0)
        if turn < len(self.seen) and found == self.seen[turn]:
            return None
        expected = f"an observation with hash {self.seen[turn]}" if turn < len(self.seen) else "the end of the recording"
        return expected, f"{found}: {observation.text}"


@dataclasses.dataclass(frozen=True)
class Restored:
    """A live environment at a decision point, on loan from its pool.

    observation   what the player sees there
    views         the observations before turns 0, 1, …, the point's own (which is `observation`)
    steps         actions played to get there
    seconds       wall-clock, waiting for nothing but environments
    """

    environment: PooledEnvironment
    observation: Observation
    views: tuple[Observation, ...]
    steps: int
    seconds: float


def observation_hash(observation: Observation, *, first: bool = False) -> str:
    """16 hexadecimal digits of sha256 over what a player reads: the text, before the first turn with the instruction."""
    text = f"{observation.instruction}\n{observation.text}" if first else observation.text
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def restore(recording: Recording, turn: int, pool: EnvironmentPool, *, witness: Witness | None = None) -> Restored:
    """The environment as it was when the recording's player was about to write turn `turn`.

    An environment of `pool` is reset to the task and given the recorded actions 0 … turn - 1; each observation on the way,
    the one before `turn` among them, must satisfy `witness` (by default the recording's hashes). A divergence is tried once
    more in another environment. The caller releases `.environment` to the pool.

    Raises ReplayRefused where the recording cannot be replayed here or nothing is known of what was seen, ReplayDiverged
    with the turn, what was expected and what was found, ValueError for a turn that the recording does not have, and whatever
    else the environment raises; the environment then has gone back to the pool as broken.
    """
    if not 0 <= turn < len(recording.actions):
        raise ValueError(f"sequence {recording.sequence[:16]} has turns 0 to {len(recording.actions) - 1}, not {turn}")
    recording.check(pool.family)
    if witness is None:
        if not recording.seen:
            raise ReplayRefused(f"sequence {recording.sequence[:16]} carries no hashes of its observations (it was stored "
                                "without them); hand in a witness, such as that of mopd.sampling.resume.Conversation")
        witness = recording.witness
    try:
        return _walk(recording, turn, pool, witness)
    except ReplayDiverged as failure:
        pool.count_failure(failure.category)
        return _walk(recording, turn, pool, witness)


def restore_point(store: Any, point: DecisionPoint, pool: EnvironmentPool, *, witness: Witness | None = None) -> Restored:
    """`restore` for a decision point of `store` (a PrefixStore). Raises KeyError for a point that is not there, too."""
    return restore(Recording.of(point.sequence, store.sequence(point.sequence)), point.turn, pool, witness=witness)


def _walk(recording: Recording, turn: int, pool: EnvironmentPool, witness: Witness) -> Restored:
    start = time.perf_counter()
    environment, observation = pool.acquire(recording.task)
    views = [observation]
    try:
        for number in range(turn + 1):
            if number:
                observation = environment.step(recording.actions[number - 1])
                views.append(observation)
            if observation.done:
                raise ReplayDiverged(recording, number, "a turn that was played", f"the episode's end: {observation.text}")
            if differs := witness(number, observation):
                raise ReplayDiverged(recording, number, *differs)
    except BaseException:
        environment.broken = True
        pool.release(environment)
        raise
    return Restored(environment, observation, tuple(views), turn, time.perf_counter() - start)


def _around_difference(expected: str, found: str) -> tuple[str, str]:
    """Both texts, at most SHOWN characters each, from shortly before the first one that differs."""
    same = next((i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
                min(len(expected), len(found)))
    start = max(0, same - SHOWN // 4) if max(len(expected), len(found)) > SHOWN else 0
    end = start + SHOWN
    return tuple(("…" if start else "") + t[start:end] + ("…" if len(t) > end else "") for t in (expected, found))


# ---------------------------------------------------------------------------------------------------------------
# Ahead of need


@dataclasses.dataclass(frozen=True)
class ReplayJob:
    """Which decision point to restore: two jobs of one point are alike, and each gets an environment of its own.

    load   () → (Recording, Witness), called in a thread; may be shared between jobs
    """

    sequence: str
    turn: int
    load: Callable[[], tuple[Recording, Witness | None]] = dataclasses.field(compare=False, repr=False)


class ReplayedEnvironment:
    """An environment that may still be on its way to a decision point: what is asked of it waits until it is there."""

    def __init__(self, replayer: Replayer, future: concurrent.futures.Future[Restored]):
        self._replayer, self._future = replayer, future
        self._returned = False
        self.broken = False

    def restored(self) -> Restored:
        """Wait for the replay. Raises what `restore` raised."""
        return self._future.result()

    def step(self, action: str) -> Observation:
        """Play one action from the decision point on."""
        return self.restored().environment.step(action)

    def give_back(self) -> None:
        """Return the environment to its pool, as soon as the replay is over. More than once does nothing."""
        if not self._returned:
            self._returned = True
            self._future.cancel()
            self._future.add_done_callback(self._release)

    def _release(self, future: concurrent.futures.Future[Restored]) -> None:
        if not future.cancelled() and future.exception() is None:
            environment = future.result().environment
            environment.broken |= self.broken
            self._replayer.pool.release(environment)
        self._replayer._one_back()


class Replayer:
    """Replays decision points of one pool's environments in background threads, at most so many environments at once.

    pool      where environments come from; `room`, how many this holds at most, is the pool's size until `expect` says less
    workers   threads
    What is asked for and when changes the time that it takes, never the result.
    """

    def __init__(self, pool: EnvironmentPool, *, workers: int = 2):
        self.pool = pool
        self._room = pool.size
        self._held = 0
        self._lock = threading.RLock()
        self._queue: collections.deque[ReplayJob] = collections.deque()
        self._started: dict[ReplayJob, collections.deque[ReplayedEnvironment]] = {}
        self._closed = False
        self._threads = concurrent.futures.ThreadPoolExecutor(workers, thread_name_prefix=f"{pool.family.name}-replay")

    def expect(self, jobs: Iterable[ReplayJob], *, room: int | None = None) -> None:
        """These replays are going to be taken, in this order: begin as many as `room` (by default the pool's size) allows.
        Replaces what was expected before; of that, what was begun and is not among these is given back."""
        jobs = list(jobs)
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the replays of {self.pool.family.name} environments are closed")
            self._room = self.pool.size if room is None else room
            wanted = collections.Counter(jobs)
            unwanted = []
            for job, begun in list(self._started.items()):
                while len(begun) > wanted[job]:
                    unwanted.append(begun.pop())
                wanted[job] -= len(begun)
                if not begun:
                    del self._started[job]
            self._queue.clear()
            for job in jobs[::-1]:  # from the end: the begun ones were the first of their kind
                if wanted[job] > 0:
                    wanted[job] -= 1
                    self._queue.appendleft(job)
        for replay in unwanted:
            replay.give_back()
        self._fill()

    def take(self, job: ReplayJob) -> ReplayedEnvironment:
        """An environment for this job alone: one that was begun, else one that begins now, room or not."""
        with self._lock:
            begun = self._started.get(job)
            if begun:
                replay = begun.popleft()
                if not begun:
                    del self._started[job]
                return replay
            if job in self._queue:
                self._queue.remove(job)
            return self._start(job)

    def close(self) -> None:
        """Give back what was begun and not taken, and end the threads. The pool stays open."""
        if not self._closed:
            self.expect(())
            with self._lock:
                self._closed = True
            self._threads.shutdown(wait=True)

    def _fill(self) -> None:
        with self._lock:
            while self._queue and self._held < self._room and not self._closed:
                job = self._queue.popleft()
                self._started.setdefault(job, collections.deque()).append(self._start(job))

    def _start(self, job: ReplayJob) -> ReplayedEnvironment:
        self._held += 1
        return ReplayedEnvironment(self, self._threads.submit(self._replay, job))

    def _replay(self, job: ReplayJob) -> Restored:
        recording, witness = job.load()
        return restore(recording, job.turn, self.pool, witness=witness)

    def _one_back(self) -> None:
        with self._lock:
            self._held -= 1
        self._fill()
