"""The coordinator with real samplers: exact steps while they go on, a killed one, a saved state; and its parts."""

from __future__ import annotations

import os
import signal
import socket
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd.check import open_launch
from mopd.mixer_events import EngineChanged, GroupId, TrainerReady
from mopd.mixer_machine import NothingAccepted
from mopd.rows import Action, Row
from mopd.sampling.assemble import (
    Assembly,
    group_from_text,
    group_to_text,
    judge,
    numbers_of,
    ranges,
    staleness,
)
from mopd.sampling.base import EngineUnreachable
from mopd.sampling.coordinator import Coordinator
from mopd.sampling.failures import FailureLimit, TooManyFailures
from mopd.sampling.point_draws import PointDraws
from mopd.sampling.sampler import Sampler, SamplerSpec
from mopd.sampling.samplers import Samplers, SamplersGone
from mopd.sampling.sharing import rows_equal
from mopd.sampling.work import Done, GaveUp, Work
from mopd.schedule import mixer_of
from prefix_store.trajectory import DecisionPoint


def coordinator(launch, folder, *, count=1, restarts=5) -> Coordinator:
    config = launch.config

    def make(number, weights, version):
        return Sampler(SamplerSpec(config, number, folder / f"sampler-{number}.log", weights, version, launch.store.version))

    return Coordinator(mixer_of(config), Samplers(make, count, restarts=restarts),
                       Assembly(store=launch.store, demonstration=config.train.demonstration_fraction),
                       draws=PointDraws(launch.selector), fresh_turns=config.train.fresh_turns)


def steps_of(made: Coordinator, first: int, number: int) -> list[tuple]:
    found = []
    for step in range(first, first + number):
        plan, samples, told = made.take(step)
        assert plan.step == step
        made.trained(plan, samples, {}, {}, {})
        found.append((plan, samples, told))
    return found


@pytest.mark.timeout(300)
def test_steps_are_exact_a_killed_sampler_is_replaced_and_a_saved_state_goes_on(tiny_run, tmp_path):
    config = tiny_run.config("sampling.overlap=2", "train.group_size=2", "train.fresh_turns=2",
                             "train.domain_schedule=static", "train.demonstration_fraction=0.3", "sampling.samplers=2",
                             "sampling.sampler_timeout=120")
    told_rows: list[Row] = []
    launch = open_launch(config)
    made = coordinator(launch, tmp_path, count=2)
    made.ended = told_rows.extend
    try:
        made.start(None, 0)
        taken = steps_of(made, 0, 2)
        os.kill(next(iter(made.samplers._live.values())).pid, signal.SIGKILL)
        taken += steps_of(made, 2, 2)
        state, accounts = made.state_dict(), made.accounts()
        assert made.samplers.replaced == 1, "the loss of a sampler was not noticed"
    finally:
        made.close()
        launch.close()
    for plan, samples, told in taken:
        assert {s: len(numbers_of(n)) for s, n in told["groups"].items()} == {
            f"{d}/{s}": n for d, streams in plan.counts.items() for s, n in streams.items()}
        streams = Counter(row.stream for row in samples.rows)
        assert streams["rollout"] == 2 * sum(c["rollout"] for c in plan.counts.values()) == len(samples.episodes)
        actions = [(row, action) for row in samples.rows for action in row.actions]
        owner = {}
        for row, action in actions:
            assert owner.setdefault(action.sequence, (row.domain, row.stream, action.group)) == (
                row.domain, row.stream, action.group), "a sequence number was given twice"
        fresh = [(row, action) for row, action in actions if action.branch]
        by_group = Counter(action.group for _, action in fresh)
        assert set(by_group.values()) == {2} and set(by_group) == set(samples.points), "fresh_turns turns at every point"
        assert all(samples.points[a.group].turn == a.turn and a.at <= len(r.trunk) for r, a in fresh)
        trajectories = sum(n for c in plan.counts.values() for s, n in c.items() if s != "rollout")
        assert streams["teacher_prefix"] + streams["sft_prefix"] == trajectories, "points of one trajectory share a trunk"
        assert streams["demonstration"] == trajectories and samples.sampled_tokens > 0
        assert sum(part["points"] for part in samples.selection.values()) == len(samples.points)
    numbers = Counter((s, n) for _, _, told in taken for s, words in told["groups"].items() for n in numbers_of(words))
    assert set(numbers.values()) == {1}
    for account in accounts.values():
        assert account["launched"] == account["trained"] + sum(account["dropped"].values()) + account["left"]
    assert told_rows and all(a.group == 0 for row in told_rows for a in row.actions), "told before it is numbered"

    launch = open_launch(config)  # a selector that has trained nothing
    again = coordinator(launch, tmp_path)
    try:
        again.load_state_dict(state)
        again.start(None, 0)
        later = steps_of(again, 4, 1)
        again.take(5)
        again.put_back()
        kept = again.state_dict()
    finally:
        again.close()
        launch.close()
    numbers.update((s, n) for _, _, told in later for s, words in told["groups"].items() for n in numbers_of(words))
    assert set(numbers.values()) == {1}, "a group that was trained before the state was saved was trained again"
    assert kept["mixer"]["plan"]["step"] == 5 and not kept["mixer"]["trainer_ready"]
    assert sum(kept["trained"].values()) == 5 * config.train.samples_per_step


@pytest.mark.timeout(120)
def test_samplers_that_die_again_and_again_end_the_run(tiny_run, tmp_path):
    """A sampler that cannot live (its process is killed while it starts) is replaced as often as it may be."""
    launch = open_launch(tiny_run.config("sampling.overlap=1"))
    made = coordinator(launch, tmp_path, restarts=0)
    try:
        made.start(None, 0)
        while (pid := next(iter(made.samplers._live.values())).pid) is None:
            pass
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SamplersGone, match="sampling.sampler_restarts"):
            made.take(0)
    finally:
        made.close()
        launch.close()


@pytest.mark.timeout(120)
def test_servers_that_do_not_answer_are_waited_for_told_and_in_the_end_end_the_run(tiny_run, tmp_path, capsys):
    """No fault of the sampler's, which waits with them: it is not replaced."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # nobody listens there
    launch = open_launch(tiny_run.config("sampling.overlap=1", "sampling.engine=server", "sampling.engine_retries=0",
                                         f"sampling.urls=[http://127.0.0.1:{port}]", "sampling.sampler_timeout=2"))
    made = coordinator(launch, tmp_path, restarts=0)
    made.engine_wait_s = 8.0
    try:
        made.start(None, 0)
        with pytest.raises(EngineUnreachable) as raised:
            made.take(0)
    finally:
        made.close()
        launch.close()
    for words in (str(raised.value), capsys.readouterr().err):
        assert "sampler-0: its engine has not answered for " in words and f"127.0.0.1:{port}: connection refused" in words
    assert "sampling.engine_wait_s" in str(raised.value) and made.samplers.replaced == 0


def test_one_server_of_several_that_is_away_is_told_of_once_and_when_it_is_back(capsys):
    samplers, said = Samplers(None, 1), {"http://a": "answers", "http://b": "connection refused"}
    samplers._live["sampler-0"] = SimpleNamespace(stats={"servers": said}, close=lambda: None)
    mixer = SimpleNamespace(schedule=None)
    made = Coordinator(mixer, samplers, Assembly())
    for now in (0.0, 3.0, 7.0, 8.0):
        made._look_at_servers(now)
    said["http://b"] = "answers"
    made._look_at_servers(9.0)
    assert capsys.readouterr().err.splitlines() == [
        "sampling: http://b does not answer (connection refused); it is asked for nothing until it does",
        "sampling: http://b answers again"]
    samplers.close()


def test_groups_that_are_all_refused_end_the_run_with_the_reason(tiny_run):
    """Not one of their rewards differs from another."""
    config = tiny_run.config("sampling.overlap=1", "train.prefix_fraction=0", "train.group_size=2",
                             "sampling.mixer.max_rejected=1")
    samplers = Samplers(None, 1)
    made = Coordinator(mixer_of(config), samplers, Assembly(), advantage=centred, needs_spread=True)
    given = []
    samplers.give = lambda name, works: given.extend(works)
    made._offer(EngineChanged(0.0, "sampler-0", 8, 1e6))
    made._offer(TrainerReady(0.0))
    work = given[0]
    pair = [one for one in given if one.group == work.group]
    assert len(pair) == 2
    made._heard("sampler-0", Done(pair[0], (turn(branch=False),), 6, {"reward": 0.0, "sampled_tokens": 2}))
    with pytest.raises(NothingAccepted, match=r"sampling.mixer.max_rejected\). Dropped of it so far: 1 no spread"):
        made._heard("sampler-0", Done(pair[1], (turn(branch=False),), 6, {"reward": 0.0, "sampled_tokens": 2}))
    samplers.close()


# Parts


def turn(version=3, at=4, turn=1, tokens=2, trunk=None, branch=True) -> Row:
    trunk = np.arange(at, dtype=np.uint32) if trunk is None else trunk
    action = Action(at, np.arange(tokens, dtype=np.uint32), np.zeros(tokens, np.float32), np.full(tokens, version, np.int32),
                    branch, turn, 0, 0)
    return Row("game", "sft_prefix" if branch else "rollout", trunk, (action,))


def done(member, reward, *, stream="rollout", point=None, version=3, **row) -> Done:
    work = Work(GroupId(f"game/{stream}", 7), member, point)
    return Done(work, (turn(version, branch=point is not None, **row),), 6, {"reward": reward, "sampled_tokens": 2})


def centred(rewards):
    mean = sum(rewards) / len(rewards)
    return [r - mean for r in rewards] if max(rewards) > min(rewards) else None


@pytest.mark.parametrize(("rewards", "failed", "accepted", "reason", "values", "counted"), [
    ((1.0, 0.0, 0.5), 0, True, "", (0.5, -0.5, 0.0), {"groups": 1, "no_spread": 0, "single": 0}),
    ((1.0, 1.0), 0, False, "no spread", (0.0, 0.0), {"groups": 1, "no_spread": 1, "single": 0}),
    ((1.0,), 2, True, "", (0.0,), {"groups": 1, "no_spread": 0, "single": 1}),
    ((1.0, 0.0), 1, True, "", (0.5, -0.5), {"groups": 1, "no_spread": 0, "single": 0}),
    ((), 3, False, "every sequence failed", (), None),
])
def test_groups_are_judged_after_failures_have_left_them(rewards, failed, accepted, reason, values, counted):
    ended = [done(member, reward) for member, reward in enumerate(rewards)][::-1]
    gave_up = [GaveUp(Work(GroupId("game/rollout", 7), 10 + n), "crashed", "it crashed") for n in range(failed)]
    one = judge(GroupId("game/rollout", 7), ended, gave_up, advantage=centred, needs_spread=True)
    assert (one.accepted, one.reason, one.advantages, one.verdict) == (accepted, reason, values, counted)
    assert judge(GroupId("game/rollout", 7), ended, gave_up, advantage=centred, needs_spread=False).accepted == bool(rewards)


def test_a_group_is_as_old_as_its_newest_token():
    ended = [done(0, 1.0, version=2), done(1, 0.0, version=5)]
    assert judge(GroupId("game/rollout", 7), ended, [], advantage=None, needs_spread=True).version == 5
    rows = [row for one in ended for row in one.rows]
    assert staleness(rows, 6) == (2.5, 4) and staleness([], 6) == (0.0, 0)


def test_fresh_turns_of_one_trajectory_share_its_longest_prefix_and_failures_are_seen():
    early, late = DecisionPoint("s", 0, 1), DecisionPoint("s", 0, 3)
    group = GroupId("game/sft_prefix", 7)
    ended = [done(2, 0.0, stream="sft_prefix", point=late, at=9, turn=3), done(0, 0.0, stream="sft_prefix", point=early)]
    failed = [GaveUp(Work(group, 1, early), "replay_diverged", "another room", {"attempts": 3, "turn": 2})]
    one = judge(group, ended, failed, advantage=centred, needs_spread=True)
    assert one.accepted and one.verdict is None, "fresh turns have no outcome to compare"
    samples = Assembly().samples([one])
    (row,) = samples.rows
    assert len(row.trunk) == 9 and [(a.turn, a.at, a.group, a.sequence) for a in row.actions] == [(1, 4, 0, 0), (3, 9, 1, 1)]
    assert samples.points == {0: early, 1: late} and samples.groups == 2 and samples.dropped_groups == 0
    assert samples.failures["game"] == {"replay_diverged": 1} and samples.resumed[0].failure_record == {"turn": 2}
    other = done(2, 0.0, stream="sft_prefix", point=late, at=9, turn=3, trunk=np.arange(100, 109, dtype=np.uint32))
    with pytest.raises(ValueError, match="do not extend"):
        Assembly().samples([judge(group, [other, ended[1]], [], advantage=None, needs_spread=False)])


def test_a_dropped_group_is_counted_in_the_step_that_did_not_use_it():
    good = judge(GroupId("game/rollout", 7), [done(0, 1.0), done(1, 0.0)], [], advantage=centred, needs_spread=True)
    flat = judge(GroupId("game/rollout", 8), [done(0, 1.0), done(1, 1.0)], [], advantage=centred, needs_spread=True)
    samples = Assembly().samples([good], [flat])
    assert samples.outcome_groups == {"game": {"groups": 2, "no_spread": 1, "single": 0}}
    assert (samples.groups, samples.dropped_groups, samples.sampled_tokens) == (2, 1, 8)
    assert [a.outcome_advantage for row in samples.rows for a in row.actions] == [0.5, -0.5]


def test_an_ended_group_survives_a_checkpoint_to_the_bit():
    point = DecisionPoint("s", 0, 1)
    for one in (judge(GroupId("game/rollout", 7), [done(0, 1.0), done(1, 0.0)], [], advantage=centred, needs_spread=True),
                judge(GroupId("game/sft_prefix", 2), [done(0, 0.0, stream="sft_prefix", point=point)], [],
                      advantage=None, needs_spread=False)):
        back = group_from_text(group_to_text(one))
        assert (back.group, back.advantages, back.verdict, back.version, back.accepted) == (
            one.group, one.advantages, one.verdict, one.version, True)
        for mine, theirs in zip(one.done, back.done, strict=True):
            assert mine.work == theirs.work and mine.record == theirs.record and rows_equal(mine.rows[0], theirs.rows[0])


@given(st.sets(st.integers(0, 60)))
def test_numbers_in_words_are_those_numbers(numbers):
    assert numbers_of(ranges(numbers)) == sorted(numbers)


def test_environments_that_are_down_end_a_run_whose_batch_is_never_whole():
    limit, work = FailureLimit(0.5), Work(GroupId("game/rollout", 0), 0)
    limit.begin(expected=4)
    limit.played(work)
    for _ in range(2):
        limit.failed(work, GaveUp(work, "crashed", "no Java"))
    limit.begin(expected=4)
    for _ in range(2):
        limit.failed(work, GaveUp(work, "crashed", "no Java"))
    with pytest.raises(TooManyFailures, match="no Java.*max_infra_failure_share"):
        limit.failed(work, GaveUp(work, "crashed", "no Java"))


def test_draws_go_on_where_they_were_saved_and_repeat_nothing_within_a_draw(tiny_run):
    config = tiny_run.config("sampling.overlap=1")
    first, second = open_launch(config), open_launch(config)
    try:
        one, other = PointDraws(first.selector), PointDraws(second.selector)
        before = [one.take("game/sft_prefix", step=0, size=3) for _ in range(4)]
        trajectories = [points[0].sequence for points in before[:3]]
        assert len(set(trajectories)) == 3, "drawn without repetition, a step's worth at a time"
        other.load_state_dict(one.state_dict())
        after = [one.take("game/sft_prefix", step=2, size=3) for _ in range(5)]
        assert after == [other.take("game/sft_prefix", step=2, size=3) for _ in range(5)]
        shown = one.drawn(2, {"game/sft_prefix": after[0]})["game"]
        assert shown["points"] == len(after[0]) == sum(shown["depth"].values())
        assert shown["sources"] == {"expert": len(after[0])}
    finally:
        first.close()
        second.close()
