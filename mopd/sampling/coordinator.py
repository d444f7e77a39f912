"""Samples for the learner while it learns: the mixer decides, samplers sample, a step takes what is finished.

    learner ── take ──▶ Coordinator ── works ──▶ samplers (processes of their own)
       ▲                  │  mixer ◀── events ── news ◀──┘
       └── StepSamples ◀──┘

A thread of the learner's process (of rank 0) hears the samplers, tells the mixer and does what it asks, so that samplers go
on while the learner's step runs. The thread only moves records about; tokens are made elsewhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import queue
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

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
from mopd.mixer_machine import Mixer, NothingAccepted
from mopd.rows import Row
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.assemble import Assembly, EndedGroup, group_from_text, group_to_text, judge, ranges, staleness
from mopd.sampling.balance import ANSWERS
from mopd.sampling.base import EngineUnreachable
from mopd.sampling.failures import FailureLimit
from mopd.sampling.point_draws import PointDraws, points_from_plain, points_to_plain
from mopd.sampling.samplers import Samplers
from mopd.sampling.streams import StepSamples
from mopd.sampling.work import Done, GaveUp, Lost, News, Ready, TookWeights, Work
from mopd.schedule import Plan, plan_of
from prefix_store.trajectory import DecisionPoint

LISTEN_S = 0.5
# longest wait for news before the thread looks at what has a time of its own (silent samplers, replacements)
SAY_AFTER_S = 60.0
# a step that waits for samples says so after this time, and again whenever it has doubled
AWAY_S = 5.0
# engines that do not answer are told of after this time
BUSY_S = 5.0
# samplers tell how busy they were every second; their share is taken over at least this time
SHOWN = ("seconds", "tokens", "acceptance", "oversampling", "in_flight", "ready")
# of the mixer's numbers by source, in a step's record


@dataclasses.dataclass
class _Open:
    """A launched group of which sequences are under way. The mixer launches `size` members; a stored trajectory is one of
    them, and all its fresh turns are works of that one.

    out      work → (launched member, sampler)
    done, failed   by the work's member
    """

    size: int
    out: dict[Work, tuple[int, str]] = dataclasses.field(default_factory=dict)
    member_of: dict[int, int] = dataclasses.field(default_factory=dict)
    done: dict[int, Done] = dataclasses.field(default_factory=dict)
    failed: dict[int, GaveUp] = dataclasses.field(default_factory=dict)
    ended: set[int] = dataclasses.field(default_factory=set)


class Coordinator:
    """`take` gives the samples of one step after the other; between two, samplers go on.

    mixer          of the run's domains and streams
    samplers       not started yet
    assembly       makes a step's samples of groups
    draws          decision points of stored prefixes; None where no stream has any
    fresh_turns    per decision point
    advantage      a group's rewards → outcome advantages (see judge)
    needs_spread   a group without spread is refused
    limit          when failures of environments end the run
    engine_wait_s  how long a step waits for engines of which none answers
    moving         prefix fractions move, so plans carry their stream shares
    ended          told every sequence's rows as soon as it has ended (teachers begin to score)

    Raises in `take` EngineUnreachable after that, and whatever ended the thread: SamplersGone, SamplerFault, NothingAccepted,
    TooManyFailures, NothingToSelect.
    """

    def __init__(self, mixer: Mixer, samplers: Samplers, assembly: Assembly, *, draws: PointDraws | None = None,
                 fresh_turns: int = 1, advantage: GroupAdvantage | None = None, needs_spread: bool = False,
                 limit: FailureLimit | None = None, engine_wait_s: float = math.inf, moving: bool = False,
                 quiet: bool = False):
        self.mixer, self.samplers, self.assembly, self.draws = mixer, samplers, assembly, draws
        self.fresh_turns, self.advantage, self.needs_spread = fresh_turns, advantage, needs_spread
        self.limit, self.moving, self.quiet = limit or FailureLimit(1.0), moving, quiet
        self.engine_wait_s = engine_wait_s
        self.ended: Callable[[list[Row]], None] | None = None
        self.may_break: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.totals: Counter[str] = Counter()
        self.trained_groups: Counter[str] = Counter()
        self.dropped: dict[str, Counter[str]] = defaultdict(Counter)
        self.begun_again: Counter[str] = Counter()
        """Sequences that were begun again, by why: cancelled, sampler lost, engine trouble."""
        self._points: dict[GroupId, list[DecisionPoint]] = {}
        self._open: dict[GroupId, _Open] = {}
        self._ready: dict[GroupId, EndedGroup] = {}
        self._failed_whole: dict[GroupId, EndedGroup] = {}
        self._batch: tuple[Batch, list[EndedGroup]] | None = None
        """What the mixer handed out and is not trained yet."""
        self._dropped_now: list[tuple[EndedGroup, str]] = []
        self._notes: list[str] = []
        self._to_give: dict[str, list[Work]] = {}
        self._attempt = 0
        self._lock = threading.RLock()
        self._signals: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        """None: the batch is there. A lock of Python's own would not survive an exception out of a signal's handler."""
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._looks = deque([(time.monotonic(), 0.0)])
        self._away: dict[str, tuple[float, bool]] = {}  # server → since when it does not answer, and whether that was said

    # The learner's side

    def start(self, folder: Any, version: int) -> None:
        """Start samplers with the weights of `version` in `folder` (None: the student's model as it is)."""
        self._looks = deque([(time.monotonic(), 0.0)])
        self.limit.begin(self._sequences_of_a_step())
        self.samplers.start(folder, version)
        self._thread = threading.Thread(target=self._listen, name="coordinator", daemon=True)
        self._thread.start()

    def take(self, version: int) -> tuple[Plan, StepSamples, dict[str, Any]]:
        """The next step's plan, its samples, exactly as many groups of each source as the plan says, and what is to be told
        of it: waited_s, busy_share, staleness, in_flight, ready, dropped, groups, weights. `version`: the learner's.

        Waits for them inside `may_break`; after BrokenOff call `put_back`. Call `trained` before the next `take`.
        """
        began = time.monotonic()
        with self._lock:
            self._offer(TrainerReady(time.monotonic()))
        with self.may_break():
            self._wait(began)
        with self._lock:
            (batch, chosen), dropped, self._dropped_now = self._batch, self._dropped_now, []
            samples = self.assembly.samples(chosen, [one for one, _ in dropped])
            plan = plan_of(batch.plan, moving=self.moving)
            if self.draws is not None:
                points = {one.group.source: [] for one in chosen if one.group in self._points}
                for one in chosen:
                    points.get(one.group.source, []).extend(self._points.get(one.group, []))
                samples.selection = self.draws.drawn(plan.step, points)
            told = self._told(plan, samples, chosen, dropped, version, time.monotonic() - began)
            samples.seconds = {"sampling": told.pop("busy_s"), "environments": samples.seconds["environments"]}
            self.totals.update(sampled_tokens=samples.sampled_tokens, environment_steps=samples.environment_steps)
            for name, counts in samples.failures.items():
                self.totals.update({f"{name}: {category}": number for category, number in counts.items()})
            self.limit.begin(self._sequences_of_a_step())
        return plan, samples, told

    def trained(self, plan: Plan, samples: StepSamples, turn_scores: Mapping[tuple[int, int], Mapping[str, float]],
                reverse_kl: Mapping[str, float], by_stream: Mapping[str, tuple[float | None, float | None]]) -> list[str]:
        """The step that was taken is trained, and measured this (see Measured, PointDraws.observe). Returns sentences for the
        log, those of the mixer since the last call among them."""
        with self._lock:
            if self.mixer.schedule is not None:
                self._notes += [f"domain {domain}: no finite reverse KL this step, so its share does not follow it"
                                for domain, value in reverse_kl.items() if not math.isfinite(value)]
            for one in self._batch[1]:
                self.trained_groups[one.group.source] += 1
                self._points.pop(one.group, None)
            self._batch = None
            if self.draws is not None:
                self.draws.observe(plan.step, samples.points, turn_scores)
            self._offer(Measured(time.monotonic(), dict(reverse_kl), dict(by_stream)))
            notes, self._notes = self._notes, []
        return notes

    def take_weights(self, folder: Any, version: int) -> None:
        """New weights for all samplers; sequences under way go on with them."""
        with self._lock:
            self.samplers.take_weights(folder, version)

    def put_back(self) -> None:
        """The run ends with a step's samples in hand, or while it waits for some: they count as not taken. Samplers are not
        heard any more; only `state_dict` and `close` may follow."""
        self._end_thread()
        with self._lock:
            if self._batch is not None:
                (batch, chosen), self._batch = self._batch, None
                self._ready |= {one.group: one for one in chosen}
                self.mixer.offer(Returned(time.monotonic(), batch))

    def accounts(self) -> dict[str, dict[str, Any]]:
        """Source → what became of its launched groups: launched = trained + Σ dropped + left (in flight, finished, to be
        launched again)."""
        with self._lock:
            return {s: {"launched": self.mixer.next_number[s], "trained": self.trained_groups[s],
                        "dropped": dict(self.dropped[s]),
                        "left": len(self.mixer.groups[s]) + len(self.mixer.ready[s]) + len(self.mixer.holes[s])}
                    for s in self.mixer.sources}

    def summary(self) -> str:
        """What was sampled so far, in words."""
        failures = {k: v for k, v in self.totals.items() if ": " in k}
        dropped = Counter()
        for counts in self.dropped.values():
            dropped.update(counts)
        words = ", ".join(f"{number} {reason}" for reason, number in dropped.items()) or "none"
        return (f"{self.totals['sampled_tokens']} sampled tokens, {self.totals['environment_steps']} environment steps, "
                f"infrastructure failures {failures or 'none'}, groups dropped: {words}")

    def state_dict(self) -> dict[str, Any]:
        """As JSON values, between `trained` and the next `take`: the mixer, what was drawn, counts, and the finished groups
        of slow sources. What is in flight is kept as numbers and begins again."""
        with self._lock:
            if self._batch is not None:
                raise RuntimeError("a step's samples are in hand; call `trained` or `put_back` first")
            slow = self.mixer.slow_sources()
            known = {GroupId(s, n) for s in self.mixer.sources
                     for n in (*self.mixer.groups[s], *self.mixer.ready[s], *self.mixer.holes[s])}
            return {"mixer": self.mixer.state_dict(), "draws": self.draws.state_dict() if self.draws else None,
                    "points": [[*group, points_to_plain(points)] for group, points in sorted(self._points.items())
                               if group in known],
                    "finished": [group_to_text(one) for one in self._ready.values() if one.group.source in slow],
                    "totals": dict(self.totals), "trained": dict(self.trained_groups),
                    "dropped": {source: dict(counts) for source, counts in self.dropped.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, before `start`."""
        self.mixer.load_state_dict(state["mixer"])
        if self.draws is not None:
            self.draws.load_state_dict(state["draws"])
        self._points = {GroupId(source, number): points_from_plain(points) for source, number, points in state["points"]}
        self.totals, self.trained_groups = Counter(state["totals"]), Counter(state["trained"])
        self.dropped = defaultdict(Counter, {source: Counter(counts) for source, counts in state["dropped"].items()})
        finished = {one.group: one for one in map(group_from_text, state["finished"])}
        self._ready = dict(finished)
        self._offer(Restarted(time.monotonic(), frozenset(), {
            group: Completed(0.0, sum(d.tokens for d in one.done) / len(one.done), True, one.version)
            for group, one in finished.items()}))

    def close(self) -> None:
        """End the samplers and everything they started; safe to call twice."""
        self._end_thread()
        self.samplers.close()

    def _end_thread(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self.samplers.wake()
            self._thread.join()
            self._thread = None

    def _wait(self, began: float) -> None:
        """Until the batch is there. Raises what ended the thread."""
        say, down = SAY_AFTER_S, False
        while True:
            with contextlib.suppress(queue.Empty):
                found = self._signals.get(timeout=min(1.0, say / 4))
                if found is not None:
                    self._signals.put(found)  # for whoever asks again
                    raise found
                return
            waited, engines_down = time.monotonic() - began, self.samplers.engines_down_s()
            if waited > say or engines_down > AWAY_S and not down:
                say, down = say * 2 if waited > say else say, engines_down > AWAY_S
                self._say(f"waiting for samples for {waited:.0f} s: {self._lacking()}")
            if min(waited, engines_down) > self.engine_wait_s:
                raise EngineUnreachable(f"{'; '.join(self.samplers.troubles())}. A step waits for {self.engine_wait_s:g} s "
                                        "(sampling.engine_wait_s); the same command goes on from the last checkpoint")

    def _lacking(self) -> str:
        with self._lock:
            parts = [f"{s} has {n['ready']} of {n['quota']} groups, {n['in_flight']} in flight"
                     for s, n in self.mixer.numbers().items() if n["ready"] < n["quota"]]
            return "; ".join([*parts, *self.samplers.troubles()])

    def _told(self, plan: Plan, samples: StepSamples, chosen: list[EndedGroup], dropped: list[tuple[EndedGroup, str]],
              version: int, waited: float) -> dict[str, Any]:
        now, busy = time.monotonic(), self.samplers.busy_seconds
        worked = max(busy - self._looks[-1][1], 0.0)
        while len(self._looks) > 1 and now - self._looks[1][0] >= BUSY_S:
            self._looks.popleft()
        since, before = self._looks[0]
        share = max(busy - before, 0.0) / max((now - since) * self.samplers.count, 1e-9)
        self._looks.append((now, busy))
        mean, oldest = staleness(samples.rows, version)
        numbers, by_reason = defaultdict(list), defaultdict(lambda: defaultdict(list))
        for one in chosen:
            numbers[one.group.source].append(one.group.number)
        for one, reason in dropped:
            by_reason[one.group.source][reason].append(one.group.number)
        taken, self.samplers.weights = self.samplers.weights, []
        gaps = [t.gap for t in taken if math.isfinite(t.gap)]
        state = self.mixer.numbers()
        return {
            "waited_s": waited, "busy_s": worked, "busy_share": min(share, 1.0),
            "staleness_mean": mean, "staleness_max": oldest, "in_flight": sum(n["in_flight"] for n in state.values()),
            "ready": sum(n["ready"] for n in state.values()), "versions": self.samplers.versions,
            "samplers_replaced": self.samplers.replaced, "begun_again": dict(self.begun_again),
            "weights": {"taken": len(taken), "seconds": max((t.seconds for t in taken), default=None),
                        "gap": max(gaps, default=None)},
            "groups": {source: ranges(n) for source, n in numbers.items()},
            "dropped": {reason: sum(len(parts.get(reason, ())) for parts in by_reason.values())
                        for reason in {r for parts in by_reason.values() for r in parts}},
            "dropped_groups": {source: {reason: ranges(n) for reason, n in parts.items()}
                               for source, parts in by_reason.items()},
            "sources": {source: {key: n[key] for key in SHOWN} for source, n in state.items()}}

    def _sequences_of_a_step(self) -> int:
        return sum(count * self.mixer.source_options[source].group_size
                   for source, count in self.mixer.quota.items() if source.endswith("/rollout"))

    # The samplers' side

    def _listen(self) -> None:
        try:
            while not self._stop.is_set():
                self.samplers.wait(LISTEN_S)
                with self._lock:
                    for name, news in self.samplers.news():
                        self._heard(name, news)
                    self._look_at_servers(time.monotonic())
        except Exception as error:  # noqa: BLE001 - the learner's thread raises it
            self._signals.put(error)

    def _heard(self, name: str, news: News) -> None:
        if isinstance(news, Done | GaveUp):
            self._work_ended(news)
        elif isinstance(news, Ready):
            self._offer(EngineChanged(time.monotonic(), name, news.slots, news.kv_tokens))
        elif isinstance(news, TookWeights):
            pass  # the samplers keep the book of versions
        elif isinstance(news, Lost):
            lost = 0
            for group in self._open.values():
                there = [work for work, (_, where) in group.out.items() if where == name]
                lost += len(there)
                for work in there:
                    del group.out[work]
            self.begun_again["sampler lost"] += lost
            self._say(f"{name} is gone ({news.words}); {lost} sequences begin again, and it is replaced")
            self._offer(EngineChanged(time.monotonic(), name, 0, 0.0))

    def _look_at_servers(self, now: float) -> None:
        """Say which of the engines' servers are away for more than a moment, and which are back."""
        for url, said in self.samplers.servers().items():
            since, told = self._away.pop(url, (now, False))
            if said == ANSWERS:
                if told:
                    self._say(f"{url} answers again")
                continue
            if not told and now - since > AWAY_S:
                told = True
                self._say(f"{url} does not answer ({said}); it is asked for nothing until it does")
            self._away[url] = since, told

    def _work_ended(self, news: Done | GaveUp) -> None:
        work = news.work
        group = self._open.get(work.group)
        if group is None or work not in group.out:
            return  # cancelled, or given again elsewhere: its news was on the way
        member, name = group.out.pop(work)
        if isinstance(news, GaveUp) and news.reason.startswith("engine"):
            # No fault of the environment's: the sequence waits for its engine as a run waits for a teacher.
            self.begun_again["engine trouble"] += 1
            self._give(group, member, name, [work])
            self._flush()
            return
        if isinstance(news, Done):
            group.done[work.member] = news
            if news.episode is not None:
                self.limit.played(work)
            if self.ended is not None and news.rows:
                self.ended(list(news.rows))
        else:
            group.failed[work.member] = news
            self.limit.failed(work, news)
        if any(out == member for out, _ in group.out.values()):
            return
        group.ended.add(member)
        done = [d for m, d in group.done.items() if group.member_of[m] == member]
        now = time.monotonic()
        over = Finished(now, work.group, member, sum(d.tokens for d in done)) if done else Failed(
            now, work.group, member, group.failed[work.member].reason)
        if len(group.ended) < group.size:
            self._offer(over)
            return
        del self._open[work.group]
        one = judge(work.group, group.done.values(), group.failed.values(), advantage=self.advantage,
                    needs_spread=self.needs_spread)
        if not one.done:
            self._failed_whole[work.group] = one  # the mixer discards it
            self._offer(over)
            return
        self._offer(over)
        if one.accepted:
            self._ready[work.group] = one
        else:
            self._drop(one, one.reason)
        self._offer(Judged(now, work.group, one.accepted, one.version))

    def _drop(self, one: EndedGroup, reason: str) -> None:
        self.dropped[one.group.source][reason] += 1
        self._dropped_now.append((one, reason))
        self._points.pop(one.group, None)

    # What the mixer asks

    def _offer(self, event: Event) -> None:
        try:
            actions = self.mixer.offer(event)
        except NothingAccepted as error:
            reasons = ", ".join(f"{number} {reason}" for reason, number in self.dropped[error.source].items())
            raise NothingAccepted(f"{error} (sampling.mixer.max_rejected). Dropped of it so far: {reasons}",
                                  error.source) from error
        for action in actions:
            self._do(action)
        self._flush()

    def _do(self, action: Action) -> None:
        if isinstance(action, Launch):
            size = self.mixer.source_options[action.group.source].group_size
            group = self._open.setdefault(action.group, _Open(size))
            self._give(group, action.member, action.engine, self._works(action.group, action.member, group))
        elif isinstance(action, Cancel):
            if (group := self._open.pop(action.group, None)) is not None:
                by_sampler = defaultdict(list)
                for work, (_, name) in group.out.items():
                    by_sampler[name].append(work)
                for name, works in by_sampler.items():
                    self.samplers.cancel(name, works)
                self.begun_again["cancelled"] += len(group.out) + len(group.done)
        elif isinstance(action, Batch):
            self._batch = action, [self._ready.pop(group) for group in action.groups]
            self._signals.put(None)
        elif isinstance(action, Discard):
            self._discard(action)
        elif isinstance(action, Say):
            self._notes.append(action.sentence)

    def _discard(self, action: Discard) -> None:
        if (one := self._failed_whole.pop(action.group, None)) is not None:
            self._drop(one, "failed")
        elif action.reason.startswith("stale") and action.group in self._ready:
            self._drop(self._ready.pop(action.group), "stale")
        else:  # it begins again under its number: cancelled, or finished by an earlier process and not needed now
            self._open.pop(action.group, None)
            self._ready.pop(action.group, None)

    def _works(self, group_id: GroupId, member: int, group: _Open) -> list[Work]:
        """The works of a launched member that have not ended."""
        if group_id.source.endswith("/rollout"):
            works = [Work(group_id, member)]
        else:
            if group_id not in self._points:
                size = max(1, round(self.mixer.target[group_id.source]))
                self._points[group_id] = self.draws.take(group_id.source, self.mixer.plan.step, size)
            points = [point for point in self._points[group_id] for _ in range(self.fresh_turns)]
            works = [Work(group_id, number, point) for number, point in enumerate(points)]
        return [work for work in works if work.member not in group.done and work.member not in group.failed]

    def _give(self, group: _Open, member: int, name: str, works: Iterable[Work]) -> None:
        for work in works:
            self._attempt += 1
            work = dataclasses.replace(work, attempt=self._attempt)
            group.out[work], group.member_of[work.member] = (member, name), member
            self._to_give.setdefault(name, []).append(work)

    def _flush(self) -> None:
        given, self._to_give = self._to_give, {}
        for name, works in given.items():
            self.samplers.give(name, works)

    def _say(self, words: str) -> None:
        self._notes.append(words)
        if not self.quiet:
            print(f"sampling: {words}", file=sys.stderr, flush=True)
