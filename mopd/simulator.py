"""A discrete-event simulation of sampling: engines, environments, teachers and a trainer under a scheduler, in no real time.

The scheduler under test is the mixer itself, driven by the events that a real loop would send. Not modelled: engines that
slow down when full, preemption, network. KV memory grows linearly over a sequence; where the sum outgrows an engine this
is measured, not punished.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np

from mopd.mixer_events import (
    Action,
    Batch,
    Cancel,
    Discard,
    EngineChanged,
    Event,
    Finished,
    GroupId,
    Judged,
    Launch,
    Say,
    TrainerReady,
)
from mopd.simulator_traces import Work


class Scheduler(Protocol):
    """What is simulated: the mixer, or another that answers events with actions."""

    def offer(self, event: Event) -> list[Action]: ...


@dataclasses.dataclass(frozen=True)
class Cluster:
    """engines of `slots` sequences and `kv_tokens` tokens of KV memory each; teacher_servers, each scoring
    `teacher_tokens_per_second` (0 servers: scoring takes no time); a step takes the trainer `trainer_seconds` and a second
    more for every `trainer_tokens_per_second` tokens (0: none)."""

    engines: int = 4
    slots: int = 64
    kv_tokens: float = 1e6
    teacher_servers: int = 0
    teacher_tokens_per_second: float = 50_000.0
    trainer_seconds: float = 0.0
    trainer_tokens_per_second: float = 0.0

    @property
    def all_slots(self) -> int:
        return self.engines * self.slots


@dataclasses.dataclass
class Simulation:
    """What happened. Times in seconds from the start; `first` is when the first step's batch was complete.

    collected [steps, sources] counts of the batches; ready_at [steps] when each batch was handed out; trainer_idle seconds
    waited for a batch after the first step; edges [n], busy [n]: slots busy from edges[i] on; open [n] likewise by domain
    """

    sources: tuple[str, ...]
    slots: int
    steps: int = 0
    first: float = 0.0
    end: float = 0.0
    ready_at: list[float] = dataclasses.field(default_factory=list)
    collected: list[list[int]] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)
    edges: list[float] = dataclasses.field(default_factory=list)
    busy: list[int] = dataclasses.field(default_factory=list)
    open_peak: dict[str, int] = dataclasses.field(default_factory=dict)
    teacher_seconds: float = 0.0
    teacher_queue_peak: int = 0
    trainer_busy: float = 0.0
    used_seconds: float = 0.0
    lost_seconds: float = 0.0
    kv_peak: float = 0.0
    kv_over_share: float = 0.0
    discarded: int = 0
    age_sum: int = 0
    groups_used: int = 0
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def span(self) -> float:
        """Seconds from the first batch to the last."""
        return max(self.end - self.first, 1e-12)

    @property
    def occupancy(self) -> float:
        """Busy slot-seconds over slots × seconds, after the first step."""
        return float(np.sum(self.busy_seconds(self.first, self.end))) / (self.slots * self.span)

    def busy_seconds(self, start: float, end: float, bins: int = 1) -> np.ndarray:
        """Busy slot-seconds in each of `bins` equal parts of [start, end]."""
        times = np.append(np.asarray(self.edges), max(end, self.edges[-1] if self.edges else end))
        total = np.concatenate([[0.0], np.cumsum(np.diff(times) * np.asarray(self.busy, float))])
        return np.diff(np.interp(np.linspace(start, end, bins + 1), times, total))

    @property
    def step_seconds(self) -> float:
        """Mean seconds of a step, after the first."""
        return self.span / max(self.steps - 1, 1)

    @property
    def trainer_idle_share(self) -> float:
        return sum(self.waits[1:]) / self.span

    def settled(self) -> tuple[float, float, float]:
        """(share of the time that the trainer waited, occupancy, seconds of a step) in the second half of the steps, when
        the slow work that the first steps waited for has long been under way."""
        half = max(self.steps // 2, 1)
        start = self.ready_at[half - 1]
        span = max(self.end - start, 1e-12)
        return (sum(self.waits[half:]) / span, float(self.busy_seconds(start, self.end)[0]) / (self.slots * span),
                span / max(self.steps - half, 1))

    @property
    def useful_share(self) -> float:
        """Of the seconds in slots of groups that are over, the share of those that went into a batch or were refused by
        judgement, which no schedule avoids; the rest was discarded."""
        return self.used_seconds / max(self.used_seconds + self.lost_seconds, 1e-12)

    @property
    def mean_age(self) -> float:
        """Steps between the end of a group and the step that it is used in, mean over all groups of all batches."""
        return self.age_sum / max(self.groups_used, 1)

    def numbers(self) -> dict[str, float]:
        """For a table or JSON."""
        return {"steps": self.steps, "seconds": self.end, "step_seconds": self.step_seconds, "occupancy": self.occupancy,
                "useful_share": self.useful_share, "mean_age": self.mean_age, "trainer_idle_share": self.trainer_idle_share,
                "teacher_seconds": self.teacher_seconds, "teacher_queue_peak": self.teacher_queue_peak,
                "kv_peak": self.kv_peak, "kv_over_share": self.kv_over_share, "discarded": self.discarded,
                "environments_peak": sum(self.open_peak.values())}


class Simulator:
    """Runs `scheduler` on `cluster` with `work` until `steps` batches are handed out."""

    def __init__(self, scheduler: Scheduler, cluster: Cluster, work: Work, steps: int, *,
                 progress: Callable[[int], None] | None = None):
        self.scheduler, self.cluster, self.work, self.steps = scheduler, cluster, work, steps
        self.progress = progress or (lambda step: None)
        self.sources = tuple(work.models)
        self.result = Simulation(self.sources, cluster.all_slots)
        self.time, self._count = 0.0, 0
        self._heap: list[tuple[float, int, str, object]] = []
        self._left: dict[GroupId, int] = {}
        self._tokens: dict[GroupId, int] = {}
        self._took: dict[GroupId, float] = {}
        self._judged_at: dict[GroupId, int] = {}
        self._scoring: deque[tuple[GroupId, int]] = deque()
        self._teachers_busy = 0
        self._busy, self._open = 0, dict.fromkeys(self.sources, 0)
        self._waiting_since: float | None = None
        # KV by engine: Σ tokens·(t − start)/seconds = slope·t − offset
        self._kv: dict[str, list[float]] = {}
        self._running: dict[tuple[GroupId, int], tuple[str, float, float, int, int]] = {}
        self._dropped: dict[GroupId, int] = {}
        self._over = self._watched = 0.0

    def run(self, limit: int = 100_000_000) -> Simulation:
        """Raises RuntimeError if nothing can happen any more (a scheduler that waits for ever), or after `limit` events."""
        for i in range(self.cluster.engines):
            name = f"engine{i}"
            self._kv[name] = [0.0, 0.0]
            self._offer(EngineChanged(0.0, name, self.cluster.slots, self.cluster.kv_tokens))
        self._trainer_ready()
        for _ in range(limit):
            if self.result.steps >= self.steps:
                break
            if not self._heap:
                raise RuntimeError(f"at {self.time:.1f} s nothing runs, and step {self.result.steps} is not complete: the "
                                   "scheduler launches nothing more")
            time, _, kind, what = heapq.heappop(self._heap)
            self.time = time
            getattr(self, f"_{kind}")(*what)
        else:
            raise RuntimeError(f"{limit} events, and only {self.result.steps} of {self.steps} steps are complete")
        result = self.result
        result.first, result.end = result.ready_at[0], result.ready_at[-1]
        result.kv_over_share = self._over / max(self._watched, 1e-12)
        return result

    def _push(self, time: float, kind: str, *what: object) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, kind, what))

    def _offer(self, event: Event) -> None:
        for action in self.scheduler.offer(event):
            if isinstance(action, Launch):
                self._start(action)
            elif isinstance(action, Batch):
                self._train(action)
            elif isinstance(action, Cancel):
                self._stop(action.group, action.member)
                self._forget(action.group)
            elif isinstance(action, Discard):
                self.result.discarded += 1
                self._forget(action.group)
            elif isinstance(action, Say):
                self.result.said.append(f"{self.time:.1f} s: {action.sentence}")
            else:
                raise RuntimeError(f"the simulator does not know the action {action}")

    def _slots(self, source: str, more: int) -> None:
        self._busy += more
        self._open[source] += more
        self.result.open_peak[source] = max(self.result.open_peak.get(source, 0), self._open[source])
        if self.result.edges and self.result.edges[-1] == self.time:
            self.result.busy[-1] = self._busy
        else:
            self.result.edges.append(self.time)
            self.result.busy.append(self._busy)

    def _start(self, action: Launch) -> None:
        group, member = action.group, action.member
        seconds, tokens = self.work.sequence(group.source, group.number, member)
        self._left.setdefault(group, self.work.models[group.source].group_size)
        self._count += 1
        self._running[group, member] = (action.engine, self.time, seconds, tokens, self._count)
        kv = self._kv[action.engine]
        kv[0], kv[1] = kv[0] + tokens / seconds, kv[1] + tokens / seconds * self.time
        self._slots(group.source, 1)
        self._push(self.time + seconds, "finish", group, member, self._count)

    def _stop(self, group: GroupId, member: int) -> int:
        """A sequence leaves its engine; returns its whole number of tokens."""
        engine, start, seconds, tokens, _ = self._running.pop((group, member))
        kv = self._kv[engine]
        held = kv[0] * self.time - kv[1]  # between two ends on an engine it only grows, so its peaks are here
        self.result.kv_peak = max(self.result.kv_peak, held)
        self._watched += 1
        self._over += held > self.cluster.kv_tokens
        kv[0], kv[1] = kv[0] - tokens / seconds, kv[1] - tokens / seconds * start
        self._slots(group.source, -1)
        self._took[group] = self._took.get(group, 0.0) + self.time - start
        return tokens

    def _forget(self, group: GroupId) -> None:
        """What was spent on a group is lost; it may be launched again."""
        self.result.lost_seconds += self._took.pop(group, 0.0)
        for table in (self._tokens, self._left, self._judged_at):
            table.pop(group, None)
        self._dropped[group] = self._dropped.get(group, 0) + 1

    def _finish(self, group: GroupId, member: int, launch: int) -> None:
        if self._running.get((group, member), (0,) * 5)[4] != launch:
            return  # it was cancelled
        tokens = self._stop(group, member)
        self._tokens[group] = self._tokens.get(group, 0) + tokens
        self._left[group] -= 1
        self._offer(Finished(self.time, group, member, tokens))
        if not self._left[group]:
            del self._left[group]
            self._scoring.append((group, self._dropped.get(group, 0)))
            self._score()

    def _score(self) -> None:
        """Start what waits for a teacher and finds one."""
        servers = self.cluster.teacher_servers
        while self._scoring and (not servers or self._teachers_busy < servers):
            group, life = self._scoring.popleft()
            if not servers:
                self._judge(group, life)
                continue
            seconds = self._tokens.get(group, 0) / self.cluster.teacher_tokens_per_second
            self._teachers_busy += 1
            self.result.teacher_seconds += seconds
            self._push(self.time + seconds, "scored", group, life)
        self.result.teacher_queue_peak = max(self.result.teacher_queue_peak, len(self._scoring))

    def _scored(self, group: GroupId, life: int) -> None:
        self._teachers_busy -= 1
        self._judge(group, life)
        self._score()

    def _judge(self, group: GroupId, life: int) -> None:
        if self._dropped.get(group, 0) != life:
            return  # it was discarded while it was scored
        accepted = self.work.accepted(group.source, group.number)
        if accepted:
            self._judged_at[group] = self.result.steps
        else:
            self.result.used_seconds += self._took.pop(group)
            del self._tokens[group]
        self._offer(Judged(self.time, group, accepted))

    def _trainer_ready(self) -> None:
        self._waiting_since = self.time
        self._offer(TrainerReady(self.time))

    def _train(self, batch: Batch) -> None:
        result = self.result
        result.steps += 1
        result.ready_at.append(self.time)
        result.waits.append(self.time - self._waiting_since)
        counts = dict.fromkeys(self.sources, 0)
        tokens = 0
        for group in batch.groups:
            counts[group.source] += 1
            tokens += self._tokens.pop(group)
            result.age_sum += result.steps - 1 - self._judged_at.pop(group)
            result.groups_used += 1
            result.used_seconds += self._took.pop(group)
        result.collected.append([counts[s] for s in self.sources])
        rate = self.cluster.trainer_tokens_per_second
        seconds = self.cluster.trainer_seconds + (tokens / rate if rate else 0.0)
        result.trainer_busy += seconds
        self.progress(result.steps)
        self._push(self.time + seconds, "trainer_ready")


def bound_step_seconds(work: Work, target: Mapping[str, float], slots: int) -> float:
    """No schedule makes steps faster than this on average: Σ over sources of a step's groups, those that will be refused
    too, times their mean slot-seconds, over the slots. (Little's law: with all slots busy, throughput is slots over time.)"""
    total = 0.0
    for source, groups in target.items():
        seconds, _, accepted = work.block(source, 0)
        total += groups / max(float(accepted.mean()), 1e-9) * float(seconds.sum(axis=1).mean())
    return total / slots
