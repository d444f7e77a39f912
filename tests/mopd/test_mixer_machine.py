"""The mixer as a loop drives it: exact batches whatever the speeds, bounds kept, the same future from any saved state."""

from __future__ import annotations

import heapq
import json
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.mixer import DomainSchedule
from mopd.mixer_drift import DriftOptions, PrefixDrift
from mopd.mixer_estimates import Prior
from mopd.mixer_events import (
    Batch,
    Cancel,
    Completed,
    Discard,
    EngineChanged,
    Failed,
    Finished,
    GroupId,
    Judged,
    Launch,
    Measured,
    Restarted,
    Say,
    TrainerReady,
)
from mopd.mixer_machine import Mixer, MixerOptions, NothingAccepted, SourceOptions

DOCS = Path(__file__).parents[2] / "docs" / "mixer.md"
SHARES = {"game": 0.5, "science": 0.3, "embodied": 0.2}
STREAMS = {"game": {"rollout": 0.5, "sft_prefix": 0.5}, "science": {"rollout": 1.0}, "embodied": {"rollout": 1.0}}
SLOW = "science/rollout"
SOURCES = {SLOW: SourceOptions(group_size=2, max_in_flight=6), "game/sft_prefix": SourceOptions(group_size=3)}


def new_mixer(**options) -> Mixer:
    return Mixer(SHARES, STREAMS, MixerOptions(**({"groups_per_step": 7} | options)), SOURCES)


class Loop:
    """A loop with real engines, but for the engines: durations, lengths and verdicts are functions of the group alone."""

    def __init__(self, mixer: Mixer, engines=(("a", 6, 4000.0), ("b", 3, 9000.0)), scale=None):
        self.mixer, self.engines, self.scale = mixer, engines, scale or {SLOW: 40.0}
        self.heap, self.time, self.ended, self.history, self.batches, self.started = [], 0.0, Counter(), [], [], {}
        self.slots, self.kept_for = Counter(), {}

    def begin(self, restarted: Restarted | None = None):
        if restarted is not None:
            self.heap, self.time, self.started = [], restarted.time, {}
            self.slots.clear()
            self.offer(restarted)
        for engine in self.engines:
            self.offer(EngineChanged(self.time, *engine))
        self.offer(TrainerReady(self.time))

    def work(self, group: GroupId, member: int) -> tuple[float, int]:
        rng = np.random.default_rng([len(group.source), sum(map(ord, group.source)), group.number, member])
        return float(rng.lognormal(0, 0.8) * self.scale.get(group.source, 1.0)), int(rng.integers(50, 500))

    def accepted(self, group: GroupId) -> bool:
        return (group.number * 7 + len(group.source)) % 3 != 0

    def offer(self, event):
        for action in self.mixer.offer(event):
            self.history.append(repr(action))
            if isinstance(action, Launch):
                source = action.group.source
                assert len(self.mixer.groups[source]) - self.mixer._pending[source] <= max(
                    self.mixer.bound[source], self.kept_for.get(source, 0))
                self.slots[action.engine] += 1
                assert self.slots[action.engine] <= dict((n, s) for n, s, _ in self.engines)[action.engine]
                assert all(free >= -1e-6 for free in self.mixer.dispatch.free_kv.values())
                # What was played before a restart need not be played again where its tokens were kept.
                played = self.mixer.groups[source][action.group.number].active if action.resume else 0.0
                heapq.heappush(self.heap, (self.time + max(self.work(*action[:2] if isinstance(action, tuple) else (
                    action.group, action.member))[0] - played, 1e-3), action.group, action.member, action.engine))
                self.started[action.group, action.member] = action.engine
            elif isinstance(action, Batch):
                self.batches.append(action)
                counts = Counter(tuple(g.source.split("/")) for g in action.groups)
                assert counts == action.plan.cells, "a batch holds exactly what was planned"
            elif isinstance(action, Cancel):
                self.slots[action.engine] -= 1
                del self.started[action.group, action.member]

    def step(self):
        """The next sequence ends; its group is judged with its last."""
        while True:
            self.time, group, member, engine = heapq.heappop(self.heap)
            if self.started.get((group, member)) == engine:
                break
        del self.started[group, member]
        self.slots[engine] -= 1
        before = len(self.batches)
        self.offer(Finished(self.time, group, member, self.work(group, member)[1]))
        known = self.mixer.groups[group.source].get(group.number)
        if known is not None and known.ended:
            self.offer(Judged(self.time, group, self.accepted(group)))
        while len(self.batches) > before:  # the next batch may lie ready
            before = len(self.batches)
            self.offer(TrainerReady(self.time))

    def until(self, batches: int, limit=100_000):
        for _ in range(limit):
            if len(self.batches) >= batches:
                return self
            self.step()
        raise AssertionError(f"{limit} ends, and only {len(self.batches)} batches: somebody starves")


def test_batches_are_exact_over_a_thousand_steps_with_random_durations():
    loop = Loop(new_mixer(groups_per_step=5), engines=(("a", 12, 1e6),))
    loop.begin()
    loop.until(1000)
    counts = Counter(g.source for batch in loop.batches[:1000] for g in batch.groups)
    assert counts == {"game/rollout": 1250, "game/sft_prefix": 1250, SLOW: 1500, "embodied/rollout": 1000}
    used = [g for batch in loop.batches for g in batch.groups]
    assert len(set(used)) == len(used), "no group is trained on twice"
    assert all(loop.accepted(g) for g in used)


@settings(max_examples=20, deadline=None)
@given(alpha=st.sampled_from([0.0, 0.3, 0.5, 1.0]), ahead=st.sampled_from([0.0, 0.5, 2.0]), carry=st.booleans(),
       groups=st.integers(1, 9), cut=st.integers(1, 40), kv=st.sampled_from([600.0, 2000.0, 1e5]),
       bypass=st.integers(0, 4), age=st.sampled_from([None, 0, 2]), seconds=st.sampled_from([0.2, 3.0, 40.0]))
def test_bounds_hold_nobody_starves_and_a_saved_state_has_the_same_future(alpha, ahead, carry, groups, cut, kv, bypass, age,
                                                                        seconds):
    def made():
        return Mixer(SHARES, STREAMS, MixerOptions(groups, alpha=alpha, ahead=ahead, carry=carry, bypass=bypass, max_age=age,
                                                   memory=16), SOURCES)

    loop = Loop(made(), engines=(("a", 3, kv), ("b", 2, 2 * kv)), scale={SLOW: seconds})
    # A bound may fall below what is in flight; nothing new starts then, but what waits for a slot still does.
    loop.kept_for = dict.fromkeys(loop.mixer.sources, 10**9)
    loop.begin()
    for _ in range(cut):
        loop.step()
    saved = json.loads(json.dumps(loop.mixer.state_dict()))
    other = Loop(made(), engines=loop.engines, scale=loop.scale)
    other.mixer.load_state_dict(saved)
    other.heap, other.time, other.started = list(loop.heap), loop.time, dict(loop.started)
    other.slots, other.kept_for = Counter(loop.slots), loop.kept_for
    at, batches = len(loop.history), len(loop.batches)
    for _ in range(30):
        loop.step(), other.step()
    assert loop.history[at:] == other.history
    assert loop.mixer.state_dict() == other.mixer.state_dict()
    loop.until(batches + 8, limit=20_000)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), mean=st.sampled_from([None, 0.0, 0.7]))
def test_new_groups_start_within_every_bound(seed, mean):
    """Checked against the mixer's own state just before and after each event, with failures and engines that come and go."""
    rng = np.random.default_rng(seed)
    mixer = new_mixer(oversampling_mean=mean, ahead=1.0)
    time, running, engines = 0.0, [], {}
    mixer.offer(TrainerReady(0.0))
    for _ in range(120):
        time += float(rng.exponential())
        before = dict(mixer.next_number)
        kind = rng.random()
        if not engines or kind < 0.05:
            name, slots = f"e{int(rng.integers(3))}", int(rng.integers(1, 6))
            if name in engines and slots < sum(e == name for _, _, e in running):
                continue
            engines[name] = slots
            actions = mixer.offer(EngineChanged(time, name, slots, 5000.0))
        elif kind < 0.08:
            name = sorted(engines)[0]
            del engines[name]
            running = [r for r in running if r[2] != name]
            actions = mixer.offer(EngineChanged(time, name, 0, 0.0))
        elif running:
            group, member, _ = running.pop(int(rng.integers(len(running))))
            failed = rng.random() < 0.2
            actions = mixer.offer(Failed(time, group, member, "crash") if failed else Finished(time, group, member, 100))
            if (known := mixer.groups[group.source].get(group.number)) is not None and known.ended:
                actions += mixer.offer(Judged(time, group, bool(rng.random() < 0.7)))
        else:
            actions = []
        running += [(a.group, a.member, a.engine) for a in actions if isinstance(a, Launch)]
        if any(isinstance(a, Batch) for a in actions):
            actions = mixer.offer(TrainerReady(time))
            running += [(a.group, a.member, a.engine) for a in actions if isinstance(a, Launch)]
        for source, numbers in mixer.numbers().items():
            if mixer.next_number[source] > before[source]:
                assert numbers["in_flight"] <= numbers["bound"]
                stock = numbers["ready"] + max(numbers["acceptance"], 0.02) * (numbers["in_flight"] + numbers["unjudged"] - 1)
                beyond = (1.0 + numbers["oversampling"]) * numbers["target"]
                # The last one may start while less than that is to be expected, so at most one group is above it.
                assert stock <= numbers["quota"] + beyond + 1 + 1e-6
            assert mixer._open[source] <= (SOURCES.get(source, SourceOptions()).max_in_flight or 10**9)
        for name, slots in engines.items():
            assert sum(e == name for _, _, e in running) <= slots
    derived = mixer._pending, mixer._open
    mixer._derive()
    assert derived == (mixer._pending, mixer._open), "the running counts are what the groups say"


def one_source(**options) -> Mixer:
    return Mixer({"d": 1.0}, {"d": {"rollout": 1.0}}, MixerOptions(**({"groups_per_step": 4, "memory": 2000} | options)))


def play_lives(mixer: Mixer, work, life: float, lives: int, kept) -> None:
    """Kill and restart the loop every `life` seconds."""
    loop = Loop(mixer, engines=(("a", 8, 1e9),))
    loop.work, loop.accepted, loop.kept_for = work, lambda group: True, {"d/rollout": 10**9}
    for number in range(lives):
        loop.begin(Restarted(0.0, kept=kept) if number else None)
        while loop.heap and loop.heap[0][0] < life:
            loop.step()
        mixer.load_state_dict(json.loads(json.dumps(mixer.state_dict())))


def mean_of_finished_work(lengths, life: float, lives: int, slots: int = 8) -> float:
    """What averaging whatever ends would find, in lives that begin with new work."""
    draws, ended = iter(lengths), []
    for _ in range(lives * slots):
        time = 0.0
        while (time := time + (length := float(next(draws)))) < life:
            ended.append(length)
    return float(np.mean(ended))


@pytest.mark.parametrize("tokens_kept", [True, False])
def test_restarts_do_not_bias_the_mean_duration(tokens_kept):
    """Lives are so short that mostly short work ends in them. A mean of what ended is far off; the mixer's is not."""
    rng = np.random.default_rng(3)
    lengths = rng.lognormal(1.5, 0.9, 8000) if tokens_kept else rng.choice([1.0, 9.5], 8000, p=[0.7, 0.3])
    mixer = one_source()
    play_lives(mixer, lambda group, member: (float(lengths[group.number]), 10), 10.0, 120,
               None if tokens_kept else frozenset())
    mean = mixer.means["d/rollout"]
    true = lengths[:mean.entered].mean()
    assert mean.entered > 350
    assert mean.seconds == pytest.approx(true, rel=0.12)
    assert mean_of_finished_work(lengths, 10.0, 120) < 0.75 * lengths.mean()


def test_completed_work_is_replayed_for_slow_sources_and_the_first_collection_only():
    mixer = Mixer(SHARES, STREAMS, MixerOptions(10), {SLOW: SourceOptions(prior=Prior(seconds=50.0))})
    done = {GroupId(SLOW, n): Completed(60.0, 300, True) for n in (1, 2, 4, 6, 7)}
    fast = {GroupId("embodied/rollout", 0): Completed(1.0, 20, True)}
    actions = mixer.offer(Restarted(0.0, completed=done | fast))
    said = {(a.group.source, a.group.number): a.reason for a in actions if isinstance(a, Discard)}
    assert sorted(mixer.ready[SLOW]) == [1, 2, 4] and mixer.quota[SLOW] == 3 and mixer.holes[SLOW] == [0, 3]
    assert said == {("embodied/rollout", 0): "not replayed: a fast source",
                    (SLOW, 6): "not replayed: the first collection has enough",
                    (SLOW, 7): "not replayed: the first collection has enough"}
    assert mixer.means[SLOW].entered == 0, "launch 0 has not ended, so nothing enters the means before it"
    loop = Loop(mixer, engines=(("a", 40, 1e6),))
    loop.begin()
    loop.until(2)
    first, second = ([g.number for g in b.groups if g.source == SLOW] for b in loop.batches[:2])
    assert first == [1, 2, 4] and not set(second) & {1, 2, 4}
    launched = [line for line in loop.history if f"source='{SLOW}'" in line and line.startswith("Launch")]
    assert any("number=0)" in line for line in launched) and any("number=3)" in line for line in launched)
    again = mixer.offer(Restarted(0.0, completed={GroupId(SLOW, 1): Completed(60.0, 300)}))
    assert any(isinstance(a, Discard) and "used before" in a.reason for a in again)


def test_a_lost_engines_sequences_start_again_elsewhere_and_first():
    mixer = one_source(groups_per_step=6)
    mixer.offer(TrainerReady(0.0))
    first = [a for a in mixer.offer(EngineChanged(0.0, "a", 3, 100.0)) if isinstance(a, Launch)]
    assert [a.engine for a in first] == ["a"] * 3
    actions = mixer.offer(EngineChanged(5.0, "a", 0, 0.0))
    assert [type(a) for a in actions] == [Say] and "3 sequences" in actions[0].sentence
    again = [a for a in mixer.offer(EngineChanged(9.0, "b", 4, 100.0)) if isinstance(a, Launch)]
    assert [(a.group, a.engine, a.resume) for a in again[:3]] == [(a.group, "b", True) for a in first]
    assert [a.resume for a in again[3:]] == [False]
    mixer.offer(Finished(11.0, first[0].group, 0, 50))
    mixer.offer(Judged(11.0, first[0].group, True))
    assert mixer.means["d/rollout"].seconds == pytest.approx((1.0 + 7.0) / 2), "5 s on a and 2 s on b, not the 4 s between"


def test_strictly_on_policy_a_batch_ends_all_that_is_in_flight():
    loop = Loop(new_mixer(carry=False))
    launched: dict[GroupId, int] = {}
    offer = loop.mixer.offer

    def watched(event):
        actions = offer(event)
        step = len(loop.batches)
        for action in actions:
            if isinstance(action, Launch):
                launched[action.group] = step
            elif isinstance(action, Batch):
                assert {launched[group] for group in action.groups} == {step}, "only work of this step's weights"
                step += 1
        return actions

    loop.mixer.offer = watched
    loop.begin()
    loop.until(40)
    cancelled = sum(counts["cancelled"] for counts in loop.mixer.counts.values())
    assert cancelled > 0 and any(line.startswith("Cancel") for line in loop.history)
    for source, mean in loop.mixer.means.items():
        assert mean.entered > 0 and len(loop.mixer.holes[source]) <= loop.mixer.bound[source]


def test_what_cannot_be_is_refused():
    mixer = one_source()
    with pytest.raises(ValueError, match="not running"):
        mixer.offer(Finished(0.0, GroupId("d/rollout", 0), 0, 5))
    with pytest.raises(ValueError, match="cannot be judged"):
        mixer.offer(Judged(1.0, GroupId("d/rollout", 0), True))
    with pytest.raises(ValueError, match="comes after"):
        mixer.offer(TrainerReady(0.5))
    with pytest.raises(ValueError, match="unknown source"):
        Mixer(SHARES, STREAMS, MixerOptions(4), {"maths/rollout": SourceOptions()})
    with pytest.raises(ValueError, match="the saved mixer has sources"):
        mixer.load_state_dict(new_mixer().state_dict())
    for options in ({"oversampling_mean": 20.0}, {"alpha": 2.0}, {"ahead": -1.0}, {"max_age": -1}, {"headroom": 0.5}):
        with pytest.raises(ValueError):
            MixerOptions(4, **options)
    with pytest.raises(ValueError, match="no room for a group"):
        SourceOptions(group_size=4, max_in_flight=3)


def test_a_source_that_is_always_refused_stops_the_run_with_its_name():
    loop = Loop(one_source(max_rejected=20), engines=(("a", 4, 1e6),))
    loop.accepted, loop.kept_for = lambda group: False, {"d/rollout": 10**9}
    loop.begin()
    with pytest.raises(NothingAccepted, match="source d/rollout: the last 20 groups"):
        loop.until(1)


def test_measurements_move_shares_and_prefix_fractions_and_say_so():
    schedule = DomainSchedule({"game": 1, "science": 1}, smoothing=0.0, kl_smoothing=0.0)
    drift = PrefixDrift({"game": 0.5, "science": 0.5}, DriftOptions(patience=2, smoothing=0.0))
    streams = {d: {"rollout": 0.5, "teacher_prefix": 0.25, "sft_prefix": 0.25} for d in ("game", "science")}
    mixer = Mixer({"game": 1, "science": 1}, streams, MixerOptions(8), schedule=schedule, drift=drift)
    said = []
    for _ in range(2):
        said += mixer.offer(Measured(1.0, {"game": 3.0, "science": 1.0}, {"game": (4.0, 1.0), "science": (1.0, 1.0)}))
    assert [type(a) for a in said] == [Say] and "prefix fraction rises from 0.50 to 0.60" in said[0].sentence
    loop = Loop(mixer, engines=(("a", 16, 1e6),))
    loop.time = 1.0
    loop.begin()
    loop.until(11)
    counts = Counter(tuple(g.source.split("/")) for b in loop.batches[1:11] for g in b.groups)
    assert counts["game", "rollout"] == 24 and counts["game", "teacher_prefix"] == counts["game", "sft_prefix"] == 18
    assert sum(n for (d, _), n in counts.items() if d == "science") == 20


def test_the_documented_loop_runs():
    """The example of docs/mixer.md, as it stands there."""
    code = re.search(r"```python\n(.*?)```", DOCS.read_text(), flags=re.S).group(1)
    names: dict = {}
    exec(compile(code, str(DOCS), "exec"), names)
    assert names["trained"] == 20
