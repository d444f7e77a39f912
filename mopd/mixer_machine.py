"""The sample mixer: what to launch next, where, and which finished groups make up the next step's batch.

A pure state machine: `offer(event)` gives actions. It owns no clients and no clock (time comes with events), draws
nothing at random, and saves and loads itself at any point. docs/mixer.md explains it; the formulas stand in mixer.py.
Source: MiMo-V2.6 technical report, section 6.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from mopd.mixer import Composer, DomainSchedule, StepPlan, launch_weights, next_launch, oversampling
from mopd.mixer_dispatch import Dispatch
from mopd.mixer_drift import PrefixDrift, with_prefix_fraction
from mopd.mixer_estimates import LaunchOrderMeans, Prior
from mopd.mixer_events import (
    Action,
    Batch,
    Cancel,
    Completed,
    Discard,
    EngineChanged,
    Event,
    Failed,
    Finished,
    GroupId,
    Judged,
    Launch,
    Measured,
    Restarted,
    Returned,
    Say,
    TrainerReady,
)

REFRESH_EVERY = 16
# groups that end between two computations of the bounds in flight; they also follow every step and every change of engines
PERIOD_MEMORY = 8
# steps over which the mean of the trainer's own seconds reaches back


class NothingAccepted(RuntimeError):
    """A source has had group after group refused; the message names it."""

    def __init__(self, message: str, source: str):
        super().__init__(message)
        self.source = source


@dataclasses.dataclass(frozen=True)
class MixerOptions:
    """groups_per_step     groups of one step's batch, over all domains and streams
    alpha                share of the steady mix in the launch weights; the rest follows what the step still lacks
    oversampling_mean    p̄ of METHOD's in-flight bound (1 + p_i) m_i; None: what gives all slots work, `headroom` times over
    oversampling_minimum, oversampling_maximum   bounds of p_i
    headroom             bounds in flight summed over the slots, where p̄ is None: Little's law needs 1, noise some more
    pace                 where p̄ is None it is what keeps the trainer supplied, if that is less: 1 + p_i = t_i / T with T the
                         trainer's own seconds from a batch to its next TrainerReady (as if it never waited)
    ahead                steps' worth of groups that may be finished, or expected to be, beyond the step that is collected
    max_age              steps after its version (see Judged) that a finished group may wait for; later it is discarded.
                         None: for ever
    carry                unfinished groups go on in the next step (partial rollouts); False: strictly on-policy, a step's
                         batch ends all that is in flight, and it is launched again
    kv_safety            a sequence is admitted where this many times its predicted KV need is free
    bypass               sequences that may overtake one that fits nowhere, before all others wait for it
    memory               launches over which the running means reach back
    minimum_acceptance   demand is computed with at least this acceptance
    max_rejected         groups of one source refused in a row after which the mixer gives up
    """

    groups_per_step: int
    alpha: float = 0.5
    oversampling_mean: float | None = None
    oversampling_minimum: float = 0.0
    oversampling_maximum: float = 16.0
    headroom: float = 2.0
    pace: bool = False
    ahead: float = 2.0
    max_age: int | None = None
    carry: bool = True
    kv_safety: float = 1.5
    bypass: int = 32
    memory: int = 128
    minimum_acceptance: float = 0.02
    max_rejected: int = 500

    def __post_init__(self) -> None:
        low, high = self.oversampling_minimum, self.oversampling_maximum
        if not 0 <= low <= high:
            raise ValueError(f"oversampling_minimum {low} must not be negative, nor above oversampling_maximum {high}")
        if self.oversampling_mean is not None and not low <= self.oversampling_mean <= high:
            raise ValueError(f"oversampling_mean {self.oversampling_mean} must lie between {low} and {high}")
        for name, least in (("groups_per_step", 1), ("alpha", 0), ("headroom", 1), ("ahead", 0), ("kv_safety", 1),
                            ("bypass", 0), ("memory", 2), ("max_rejected", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if self.alpha > 1 or not 0 < self.minimum_acceptance <= 1:
            raise ValueError(f"alpha {self.alpha} and minimum_acceptance {self.minimum_acceptance} must be at most 1, the "
                             "second above 0")
        if self.max_age is not None and self.max_age < 0:
            raise ValueError(f"max_age must not be negative, got {self.max_age}")


@dataclasses.dataclass(frozen=True)
class SourceOptions:
    """group_size: sequences of one group; max_in_flight: sequences that may be open at a time (environments; None: any
    number); prior: what is believed before anything has ended."""

    group_size: int = 1
    max_in_flight: int | None = None
    prior: Prior = Prior()

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ValueError(f"group_size must be at least 1, got {self.group_size}")
        if self.max_in_flight is not None and self.max_in_flight < self.group_size:
            raise ValueError(f"max_in_flight {self.max_in_flight} has no room for a group of {self.group_size}")


@dataclasses.dataclass
class _Group:
    """A launched group that has not been judged. members: "waiting", "running" or "ended" each; active: seconds in flight
    up to `since`, from where it has been running; counted: it is in the means already."""

    members: list[str]
    resume: bool = False
    active: float = 0.0
    since: float | None = None
    tokens: float = 0.0
    finished: int = 0
    counted: bool = False

    @property
    def ended(self) -> bool:
        return all(m == "ended" for m in self.members)


class Mixer:
    """shares    domain → share of every batch (normalised)
    streams   domain → {stream: share of the domain's groups}; a source is "domain/stream"
    sources   options of sources that differ from SourceOptions()
    schedule, drift   adaptive domain shares and prefix fractions, fed by Measured; without them shares stay
    """

    def __init__(self, shares: Mapping[str, float], streams: Mapping[str, Mapping[str, float]], options: MixerOptions,
                 sources: Mapping[str, SourceOptions] | None = None, *, schedule: DomainSchedule | None = None,
                 drift: PrefixDrift | None = None):
        self.options, self.schedule, self.drift = options, schedule, drift
        self.composer = Composer(tuple(shares), options.groups_per_step, streams)
        self._base_streams = {d: dict(s) for d, s in self.composer.streams.items()}
        total = math.fsum(shares.values())
        self._static = {d: s / total for d, s in shares.items()}
        self.sources = tuple(f"{d}/{s}" for d, parts in self.composer.streams.items() for s in parts)
        unknown = set(sources or {}) - set(self.sources)
        if unknown:
            raise ValueError(f"unknown source {', '.join(sorted(unknown))}; there are: {', '.join(self.sources)}")
        for name, made in (("schedule", schedule), ("drift", drift)):
            if made is not None and set(made.base) != set(shares):
                raise ValueError(f"the {name} is for domains {sorted(made.base)}, the mixer has {sorted(shares)}")
        self.source_options = {s: (sources or {}).get(s, SourceOptions()) for s in self.sources}
        self.means = {s: LaunchOrderMeans(self.source_options[s].prior, options.memory) for s in self.sources}
        self.dispatch = Dispatch(options.kv_safety)
        self.time, self.trainer_ready, self.passed, self._ended = -math.inf, False, 0, 0
        self.period: float | None = None
        self._batch_at: float | None = None
        self._before: dict[str, Any] = {}
        self.credit = [0.0] * len(self.sources)
        self.next_number = dict.fromkeys(self.sources, 0)
        self.holes: dict[str, list[int]] = {s: [] for s in self.sources}
        self.groups: dict[str, dict[int, _Group]] = {s: {} for s in self.sources}
        self.ready: dict[str, dict[int, int]] = {s: {} for s in self.sources}
        self.waiting: list[tuple[GroupId, int]] = []
        self.rejected_run = dict.fromkeys(self.sources, 0)
        self.counts: dict[str, Counter] = {s: Counter() for s in self.sources}
        self._plan_step()

    def offer(self, event: Event) -> list[Action]:
        """Take one event; returns what to do now, in order. Raises ValueError for an event that cannot be (a clock that
        runs backwards, a sequence that is not running), and NothingAccepted."""
        actions: list[Action] = []
        if isinstance(event, Restarted):
            self._restarted(event, actions)
        else:
            if event.time < self.time:
                raise ValueError(f"{type(event).__name__} at {event.time} comes after time {self.time}")
            self.time = event.time
            self._HANDLERS[type(event)](self, event, actions)
        self._collect(actions)
        self._launch(actions)
        return actions

    def numbers(self) -> dict[str, dict[str, float]]:
        """For the log: by source its means, its target per step, its bound in flight, what it has in flight and ready."""
        return {s: {"seconds": self.means[s].seconds, "tokens": self.means[s].tokens, "acceptance": self.means[s].acceptance,
                    "target": self.target[s], "bound": self.bound[s], "oversampling": self.extra[s],
                    "in_flight": self._unfinished(s), "unjudged": self._pending[s], "ready": len(self.ready[s]),
                    "quota": self.quota[s]} for s in self.sources}

    def slow_sources(self) -> set[str]:
        """Sources whose mean duration is not below the mean over demand: what may be replayed after a start is theirs."""
        demand = {s: self._demand(s) for s in self.sources}
        mean = math.fsum(demand[s] * self._duration(s) for s in self.sources) / max(math.fsum(demand.values()), 1e-12)
        return {s for s in self.sources if self.target[s] > 0 and self._duration(s) >= mean * (1 - 1e-9)}

    # What is wanted: a step's plan, and bounds in flight.

    def _plan_step(self) -> None:
        shares = self.schedule.shares if self.schedule else self._static
        self._before = self.composer.state_dict()
        self.plan = self.composer.next(shares)
        self._derive()
        self._refresh()

    def _derive(self) -> None:
        """Numbers that follow from the rest of the state."""
        shares = self.schedule.shares if self.schedule else self._static
        total = math.fsum(shares.values())
        self.quota = {s: 0 for s in self.sources} | {f"{d}/{s}": n for (d, s), n in self.plan.cells.items()}
        self.target = {f"{d}/{s}": shares[d] / total * w * self.options.groups_per_step
                       for d, parts in self.composer.streams.items() for s, w in parts.items()}
        self._pending = {s: sum(g.ended for g in self.groups[s].values()) for s in self.sources}
        self._open = {s: sum(m != "ended" for g in self.groups[s].values() for m in g.members) for s in self.sources}

    def _acceptance(self, source: str) -> float:
        return max(self.means[source].acceptance, self.options.minimum_acceptance)

    def _demand(self, source: str) -> float:
        """m_i = B_i / r_i, groups launched per step."""
        return self.target[source] / self._acceptance(source)

    def _duration(self, source: str) -> float:
        mean = self.means[source]
        head = self.groups[source].get(mean.entered)
        running = 0.0 if head is None or head.counted else head.active + (
            self.time - head.since if head.since is not None else 0.0)
        return mean.duration(running)

    def _refresh(self) -> None:
        """Bounds in flight (1 + p_i) m_i; demands are weighed in sequences, which is what fills slots."""
        options, wanted = self.options, [s for s in self.sources if self.target[s] > 0]
        demand = [self._demand(s) * self.source_options[s].group_size for s in wanted]
        low, high = options.oversampling_minimum, options.oversampling_maximum
        mean = options.oversampling_mean
        if mean is None:
            mean = options.headroom * self.dispatch.total_slots / math.fsum(demand) - 1.0
            if options.pace:
                mean = min(mean, self._pace(demand, [self._duration(s) for s in wanted]))
            mean = min(max(mean, low), high)
        extra = oversampling(demand, [self._duration(s) for s in wanted], mean=mean, minimum=low, maximum=high)
        self.extra = dict.fromkeys(self.sources, 0.0) | dict(zip(wanted, extra, strict=True))
        self.bound = {s: max(1, math.ceil((1 + self.extra[s]) * self._demand(s) - 1e-9)) for s in self.sources}
        self._ended = 0

    def _pace(self, demand: list[float], duration: list[float]) -> float:
        """Σ m_i p_i / Σ m_i with p_i = clip(t_i / T − 1, p_min, p_max): Little's law at a step every T seconds."""
        low, high = self.options.oversampling_minimum, self.options.oversampling_maximum
        if self.period is None:
            return low
        return math.fsum(m * min(max(t / self.period - 1.0, low), high)
                         for m, t in zip(demand, duration, strict=True)) / math.fsum(demand)

    # What happens.

    def _engine_changed(self, event: EngineChanged, actions: list[Action]) -> None:
        if event.slots > 0:
            self.dispatch.set_engine(event.engine, event.slots, event.kv_tokens)
        else:
            lost = set(self.dispatch.remove_engine(event.engine))
            again = [(GroupId(s, number), member) for s in self.sources for number, group in self.groups[s].items()
                     for member in range(len(group.members)) if _key(GroupId(s, number), member) in lost]
            for group_id, member in again:
                self._stop(group_id, member, "waiting")
                self.groups[group_id.source][group_id.number].resume = True
            self.waiting = again + self.waiting
            if again:
                actions.append(Say(f"engine {event.engine} is gone; {len(again)} sequences that ran there start again"))
        self._refresh()

    def _stop(self, group_id: GroupId, member: int, state: str) -> _Group:
        """A running sequence runs no more; its group's clock stops with its last one."""
        group = self.groups[group_id.source][group_id.number]
        group.members[member] = state
        if group.since is not None and "running" not in group.members:
            group.active, group.since = group.active + self.time - group.since, None
        return group

    def _left(self, event: Finished | Failed) -> _Group:
        source, number = event.group
        group = self.groups.get(source, {}).get(number)
        if group is None or event.member >= len(group.members) or group.members[event.member] != "running":
            raise ValueError(f"sequence {event.member} of group {GroupId(source, number)} is not running")
        self.dispatch.release(_key(event.group, event.member))
        self._open[source] -= 1
        self._stop(event.group, event.member, "ended")
        if group.ended:
            self._pending[source] += 1
        return group

    def _finished(self, event: Finished, actions: list[Action]) -> None:
        group = self._left(event)
        group.finished, group.tokens = group.finished + 1, group.tokens + event.tokens

    def _failed(self, event: Failed, actions: list[Action]) -> None:
        group = self._left(event)
        self.counts[event.group.source][f"failed: {event.reason}"] += 1
        if group.ended and not group.finished:
            actions.append(Discard(event.group, "every sequence of it failed"))
            self._judged(Judged(event.time, event.group, False), actions)

    def _judged(self, event: Judged, actions: list[Action]) -> None:
        source, number = event.group
        group = self.groups.get(source, {}).get(number)
        if group is None or not group.ended:
            raise ValueError(f"group {GroupId(source, number)} cannot be judged: it is unknown or has not ended")
        del self.groups[source][number]
        self._pending[source] -= 1
        tokens = group.tokens / group.finished if group.finished else None
        self._end(event.group, Completed(group.active, tokens, event.accepted, event.version), counted=group.counted)

    def _end(self, group_id: GroupId, how: Completed, *, counted: bool = False) -> None:
        """A group is over: it enters the means, and what waits for its batch if it was accepted."""
        source, number = group_id
        if not counted:
            self.means[source].end(number, seconds=how.seconds, tokens=how.tokens, accepted=how.accepted)
        self.counts[source]["accepted" if how.accepted else "rejected"] += 1
        if how.accepted:
            self.ready[source][number] = self.plan.step if how.version is None else how.version
            self.rejected_run[source] = 0
        else:
            self.rejected_run[source] += 1
            if self.rejected_run[source] >= self.options.max_rejected:
                raise NothingAccepted(
                    f"source {source}: the last {self.rejected_run[source]} groups were all refused "
                    f"({dict(self.counts[source])}), so no step can be filled. Look at why (tasks that are always or never "
                    "solved, a teacher without scores), take the domain out, or raise max_rejected", source)
        self._ended += 1
        if self._ended >= REFRESH_EVERY:
            self._refresh()

    def _trainer_ready(self, event: TrainerReady, actions: list[Action]) -> None:
        self.trainer_ready = True
        if self._batch_at is not None:
            took, self._batch_at = max(event.time - self._batch_at, 1e-6), None
            self.period = took if self.period is None else self.period + (took - self.period) / PERIOD_MEMORY

    def _returned(self, event: Returned, actions: list[Action]) -> None:
        if event.batch.plan.step != self.plan.step - 1:
            raise ValueError(f"the batch of step {event.batch.plan.step} is not the last one; that is {self.plan.step - 1}")
        self.composer.load_state_dict(self._before)
        self.plan, self._batch_at, self.trainer_ready = event.batch.plan, None, False
        for source, number in event.batch.groups:
            self.ready[source][number] = self.plan.step
        self._before = {}
        self._derive()
        self._refresh()

    def _measured(self, event: Measured, actions: list[Action]) -> None:
        if self.schedule:
            known = {d: max(v, 0.0) for d, v in event.reverse_kl.items() if math.isfinite(v)}
            actions += [Say(sentence) for sentence in self.schedule.update(known)[1]]
        if self.drift:
            fractions, said = self.drift.update(event.by_stream)
            actions += [Say(sentence) for sentence in said]
            if said:
                self.composer.set_streams({d: with_prefix_fraction(self._base_streams[d], f) for d, f in fractions.items()})

    def _restarted(self, event: Restarted, actions: list[Action]) -> None:
        self.dispatch.clear()
        again: list[tuple[GroupId, int]] = []
        for s in self.sources:
            for number in [n for n in self.ready[s] if event.kept is not None and GroupId(s, n) not in event.kept]:
                del self.ready[s][number]  # its tokens are gone; its number is in the means already
                self.groups[s][number] = _Group(["waiting"] * self.source_options[s].group_size, counted=True)
            for number in sorted(self.groups[s]):
                group, group_id = self.groups[s][number], GroupId(s, number)
                if event.kept is not None and group_id not in event.kept:
                    self.groups[s][number] = group = _Group(["waiting"] * len(group.members), counted=group.counted)
                elif group.since is not None:
                    group.active, group.since = group.active + self.time - group.since, None
                    group.resume = True
                group.members = ["ended" if m == "ended" else "waiting" for m in group.members]
                again += [(group_id, m) for m, state in enumerate(group.members) if state == "waiting"]
        self.waiting, self.passed, self.trainer_ready, self.time = again, 0, False, event.time
        self._batch_at = None  # by another clock
        self._derive()
        self._refresh()
        self._replay(event.completed, actions)

    def _replay(self, completed: Mapping[GroupId, Completed], actions: list[Action]) -> None:
        """Take over completed groups of slow sources, as far as the step that is collected now needs them, and no later
        step: under their numbers, so that the means see every launch once."""
        slow = self.slow_sources()
        for group_id in sorted(completed):
            source, number = group_id
            how, known = completed[group_id], self.groups.get(source, {}).get(number)
            fresh = source in slow and (number >= self.next_number[source] or number in self.holes[source])
            if source not in slow or not (known is not None or fresh) or len(self.ready[source]) >= self.quota[source]:
                why = ("an unknown source" if source not in self.groups else "a fast source" if source not in slow else
                       "the first collection has enough" if known is not None or fresh else "it was used before")
                actions.append(Discard(GroupId(*group_id), f"not replayed: {why}"))
                self.counts[source]["not replayed"] += source in self.groups
                continue
            if known is not None:
                del self.groups[source][number]
                self.waiting = [(g, m) for g, m in self.waiting if g != group_id]
            elif number in self.holes[source]:
                self.holes[source].remove(number)
            else:
                self.holes[source] += range(self.next_number[source], number)
                self.next_number[source] = number + 1
            self.counts[source]["replayed"] += 1
            self._end(GroupId(source, number), how, counted=known is not None and known.counted)
        self._derive()

    _HANDLERS = {EngineChanged: _engine_changed, Finished: _finished, Failed: _failed, Judged: _judged,
                 TrainerReady: _trainer_ready, Returned: _returned, Measured: _measured}

    # What follows.

    def _collect(self, actions: list[Action]) -> None:
        """Hand out the step's batch once the trainer is ready and every source has its exact number; plan the next."""
        if not self.trainer_ready or any(len(self.ready[s]) < n for s, n in self.quota.items()):
            return
        chosen = []
        for source, count in self.quota.items():
            for number in sorted(self.ready[source])[:count]:
                del self.ready[source][number]
                chosen.append(GroupId(source, number))
        actions.append(Batch(self.plan, tuple(chosen)))
        self.trainer_ready, self._batch_at = False, self.time
        if not self.options.carry:
            self._cancel(actions)
        self._plan_step()
        for source in self.sources:
            for number, step in sorted(self.ready[source].items()):
                old = self.options.max_age is not None and self.plan.step - step > self.options.max_age
                if old or not self.options.carry:
                    del self.ready[source][number]
                    self.counts[source]["stale"] += 1
                    actions.append(Discard(GroupId(source, number), "stale: newer weights have come since it was written"))

    def _cancel(self, actions: list[Action]) -> None:
        """End all that is in flight; the numbers are launched again, so that no length is favoured in the means."""
        for source in self.sources:
            for number, group in self.groups[source].items():
                group_id = GroupId(source, number)
                for member, state in enumerate(group.members):
                    if state == "running":
                        actions.append(Cancel(group_id, member, self.dispatch.release(_key(group_id, member))))
                if "ended" in group.members:
                    actions.append(Discard(group_id, "cancelled: it was not ready for its step"))
                if group.counted:  # a new number would be due; this one's length is known
                    continue
                bisect.insort(self.holes[source], number)
                self.counts[source]["cancelled"] += 1
            self.groups[source] = {}
        self.waiting, self.passed = [], 0

    def _launch(self, actions: list[Action]) -> None:
        self._place(actions)
        while self.dispatch.total_free > 0 and (not self.waiting or self.passed < self.options.bypass):
            source = self._choose()
            if source is None:
                return
            if self.holes[source]:
                number = self.holes[source].pop(0)
            else:
                number, self.next_number[source] = self.next_number[source], self.next_number[source] + 1
            size = self.source_options[source].group_size
            self.groups[source][number] = _Group(["waiting"] * size)
            self._open[source] += size
            self.counts[source]["launched"] += 1
            self.waiting += [(GroupId(source, number), member) for member in range(size)]
            self._place(actions)

    def _place(self, actions: list[Action]) -> None:
        """Give waiting sequences a slot, in order. Past one that fits nowhere others may go on, `bypass` of them in all."""
        still: list[tuple[GroupId, int]] = []
        for at, (group_id, member) in enumerate(self.waiting):
            if self.dispatch.total_free == 0 or (still and self.passed >= self.options.bypass):
                still += self.waiting[at:]
                break
            engine = self.dispatch.place(_key(group_id, member), max(self.means[group_id.source].tokens, 1.0))
            if engine is None:
                still.append((group_id, member))
                continue
            self.passed = self.passed + 1 if still else 0
            group = self.groups[group_id.source][group_id.number]
            group.members[member] = "running"
            group.since = self.time if group.since is None else group.since
            actions.append(Launch(group_id, member, engine, group.resume))
        self.waiting = still

    def _unfinished(self, source: str) -> int:
        return len(self.groups[source]) - self._pending[source]

    def _eligible(self, source: str) -> bool:
        """Within its bound in flight, its environments, and the stock that may be expected beyond the step's batch."""
        options = self.source_options[source]
        if self._unfinished(source) >= self.bound[source]:
            return False
        open_now = self._open[source]
        if options.max_in_flight is not None and open_now and open_now + options.group_size > options.max_in_flight:
            return False
        stock = len(self.ready[source]) + self._acceptance(source) * len(self.groups[source])
        beyond = (self.options.ahead + self.extra[source]) * self.target[source] if self.options.carry else 0.0
        if self.options.pace:  # what is launched too early is too old when it is needed, so parts of a group do not count
            beyond = round(beyond)
        return stock < self.quota[source] + beyond - 1e-9

    def _choose(self) -> str | None:
        """Smooth weighted round-robin among the sources that may launch; None if none may."""
        held = {group_id.source for group_id, _ in self.waiting}
        able = [s not in held and self._eligible(s) for s in self.sources]
        if not any(able):
            return None
        alpha, acceptance = self.options.alpha, [self._acceptance(s) for s in self.sources]
        # B_i of the steady part is the mean target, that of the missing part the step's whole number.
        steady = launch_weights([self.target[s] or float(self.quota[s]) for s in self.sources], acceptance,
                                [0.0] * len(acceptance), alpha=1.0)
        missing = launch_weights([self.quota[s] for s in self.sources], acceptance,
                                 [len(self.ready[s]) for s in self.sources], alpha=0.0)
        weights = [alpha * a + (1 - alpha) * b if may else 0.0 for a, b, may in zip(steady, missing, able, strict=True)]
        if not any(weights):
            return None
        chosen, self.credit = next_launch(weights, self.credit)
        return self.sources[chosen]

    # State.

    def state_dict(self) -> dict[str, Any]:
        """Everything that the future depends on, as JSON values; options and sources are the constructor's."""
        return {
            "time": self.time if math.isfinite(self.time) else None, "trainer_ready": self.trainer_ready,
            "passed": self.passed, "ended": self._ended, "period": self.period, "batch_at": self._batch_at,
            "before": self._before, "credit": list(self.credit), "composer": self.composer.state_dict(),
            "plan": {"step": self.plan.step, "groups": dict(self.plan.groups), "shares": dict(self.plan.shares),
                     "streams": {d: dict(parts) for d, parts in self.plan.streams.items()},
                     "cells": [[d, s, n] for (d, s), n in self.plan.cells.items()]},
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "drift": self.drift.state_dict() if self.drift else None,
            "dispatch": self.dispatch.state_dict(), "waiting": [[*g, m] for g, m in self.waiting],
            "sources": {s: {
                "means": self.means[s].state_dict(), "next": self.next_number[s], "holes": list(self.holes[s]),
                "groups": [[number, dataclasses.asdict(group)] for number, group in self.groups[s].items()],
                "ready": [[number, step] for number, step in self.ready[s].items()], "target": self.target[s],
                "extra": self.extra[s], "bound": self.bound[s], "rejected": self.rejected_run[s],
                "counts": dict(self.counts[s])} for s in self.sources},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. A new process offers Restarted next. Raises ValueError for a state of other sources."""
        if set(state["sources"]) != set(self.sources):
            raise ValueError(f"the saved mixer has sources {sorted(state['sources'])}, this run {sorted(self.sources)}")
        for name, made in (("schedule", self.schedule), ("drift", self.drift)):
            if (made is None) != (state[name] is None):
                raise ValueError(f"the saved mixer was made {'without' if made else 'with'} a {name}; this run is not")
            if made is not None:
                made.load_state_dict(state[name])
        self.time = -math.inf if state["time"] is None else state["time"]
        self.trainer_ready, self.passed, self._ended = state["trainer_ready"], state["passed"], state["ended"]
        self.period, self._batch_at, self._before = state["period"], state["batch_at"], state["before"]
        self.credit, plan = list(state["credit"]), state["plan"]
        self.composer.load_state_dict(state["composer"])
        self.plan = StepPlan(plan["step"], dict(plan["groups"]), {(d, s): n for d, s, n in plan["cells"]},
                             dict(plan["shares"]), {d: dict(parts) for d, parts in plan["streams"].items()})
        self.dispatch.load_state_dict(state["dispatch"])
        self.waiting = [(GroupId(s, number), member) for s, number, member in state["waiting"]]
        for s in self.sources:
            own = state["sources"][s]
            self.means[s].load_state_dict(own["means"])
            self.next_number[s], self.holes[s] = own["next"], list(own["holes"])
            self.groups[s] = {number: _Group(**group) for number, group in own["groups"]}
            self.ready[s] = {number: step for number, step in own["ready"]}
            self.rejected_run[s], self.counts[s] = own["rejected"], Counter(own["counts"])
        self._derive()
        for name in ("target", "extra", "bound"):
            setattr(self, name, {s: state["sources"][s][name] for s in self.sources})


def _key(group_id: GroupId, member: int) -> str:
    """A sequence's name in the dispatcher's book."""
    return f"{group_id.source}#{group_id.number}.{member}"
