"""Playing on from stored points: the first turn is the fresh turn, the rest is real play, failures stay with their own."""

from __future__ import annotations

import contextlib
import copy
import dataclasses

import numpy as np
import pytest
import torch

from mopd.config import DomainConfig
from mopd.domains import Domain
from mopd.environments.base import Task
from mopd.environments.replay import ReplayDiverged, ReplayRefused, restore
from mopd.sampling import agent_loop
from mopd.sampling.agent_loop import EpisodeSpec, Harness, play_episodes
from mopd.sampling.base import SamplingOptions
from mopd.sampling.contexts import ContextBuilder
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.fresh_turn import FreshTurnPoint, sample_fresh_turns
from mopd.sampling.harness import Talk
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Conversation, check_replays
from mopd.sampling.streams import StepSamples, Streams
from mopd.schedule import Plan
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.trajectory import Source
from tests.mopd.sampling.test_agent_loop import WINDOW, confirm, plain_model
from tests.mopd.sampling.tiny import make

FAMILY = "tests.mopd.sampling.corridor:CorridorFamily"
LENGTHS = (7, 8, 4, 8)
PLAN = Plan(0, {"walk": {"teacher_prefix": 3}}, {"walk": 1.0})


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["walk to the end. place 0 of 3", "forward", "back", "unknown. Say forward or back."]
    return train_tokenizer(texts * 4, 300)


@pytest.fixture(scope="module")
def engine(tokenizer):
    torch.set_num_threads(1)
    return HFEngine(make("qwen3_moe", len(tokenizer)), max_batch=8)


BOTH = pytest.mark.parametrize("renderer", ["plain", "window"], indirect=True)


@pytest.fixture
def renderer(request, tokenizer):
    """Of a template that keeps everything, or of one that rewrites history at every turn ("window")."""
    if getattr(request, "param", "plain") == "plain":
        return ChatRenderer(tokenizer)
    windowed = copy.deepcopy(tokenizer)
    windowed.chat_template = WINDOW
    return ChatRenderer(windowed)


def domain(**options):
    config = DomainConfig(environment=FAMILY, options=options, max_turns=7, max_turn_tokens=5, max_context_tokens=500,
                          environments=3)
    return Domain("walk", config)


@pytest.fixture
def store(renderer, engine, tmp_path):
    """What a teacher (the tiny model itself) played."""
    part = domain()
    harness = dataclasses.replace(part.harness, max_turns=5)
    specs = [EpisodeSpec("walk", Task("walk", n, "train"), 100 + i, i, i) for i, n in enumerate(LENGTHS)]
    episodes = play_episodes(engine, {"walk": part.pool}, specs, renderer, {"walk": harness},
                             source=Source("teacher", "walker"))
    part.close()
    store = PrefixStore.open(tmp_path / "store", "w")
    for episode in episodes:
        store.append(episode.sequence)
    store.commit("walks")
    return store


def streams(part, store, engine, renderer, turns, *, points=2, fresh_turns=2, draw="replacement"):
    selector = Selector(store, SelectionOptions(points_per_sequence=points, draw=draw), seed=5)
    return Streams(
        domains={"walk": part}, store=store, selector=selector, engine=engine, renderer=renderer,
        fingerprint=renderer.fingerprint(), seed=3, student="s", temperature=1.0, group_size=1, fresh_turns=fresh_turns,
        demonstration_fraction=0.0, resume_turns={"walk": turns})


def sample(store, engine, renderer, turns, plan=PLAN, ahead=False, **options):
    family = {key: options.pop(key) for key in ("failures", "delays") if key in options}
    part = domain(**family)
    try:
        made = streams(part, store, engine, renderer, turns, **options)
        if ahead:
            made.prefetch(plan)
        found = made.sample(plan)
        return found, made, part.pool.stats
    finally:
        part.close()


def actions_of(found):
    return sorted((a.sequence, a.turn, a.group, tuple(a.tokens.tolist())) for row in found.rows for a in row.actions)


def same(first, second):
    assert len(first.rows) == len(second.rows) > 0
    for one, other in zip(first.rows, second.rows, strict=True):
        assert (one.domain, one.stream, one.origin) == (other.domain, other.stream, other.origin)
        np.testing.assert_array_equal(one.trunk, other.trunk)
        for a, b in zip(one.actions, other.actions, strict=True):
            assert dataclasses.replace(a, tokens=0, behaviour_logprob=0, version=0) == dataclasses.replace(
                b, tokens=0, behaviour_logprob=0, version=0)
            np.testing.assert_array_equal(a.tokens, b.tokens)
            np.testing.assert_array_equal(a.behaviour_logprob, b.behaviour_logprob)


@BOTH
def test_every_turn_of_a_resumed_sequence_is_trained_and_the_first_is_the_fresh_turn(store, engine, renderer):
    one, _, untouched = sample(store, engine, renderer, 1)
    assert not one.resumed and untouched.resets == untouched.steps == 0
    three, made, stats = sample(store, engine, renderer, 3)
    assert len(three.resumed) == 12 and all(e.failure == "" for e in three.resumed)
    by_sequence = {}
    for sequence, turn, group, tokens in actions_of(three):
        by_sequence.setdefault((sequence, group), []).append((turn, tokens))
    first = {(sequence, group): [(turn, tokens)] for sequence, turn, group, tokens in actions_of(one)}
    assert {key: turns[:1] for key, turns in by_sequence.items()} == first
    for episode in three.resumed:
        start = episode.spec.start
        turns = [turn for turn, _ in by_sequence[episode.spec.sequence, episode.spec.group]]
        assert turns == list(range(start.turn, start.turn + episode.turns))
        assert episode.ended == ("done" if episode.success else
                                 "turn_limit" if start.turn + episode.turns == 7 else "resume_limit")
        assert episode.turns == 3 or episode.ended != "resume_limit"
    assert {e.ended for e in three.resumed} >= {"resume_limit"} and len({e.spec.start.turn for e in three.resumed}) > 2
    assert {r.stream for r in three.rows} == {"teacher_prefix"}
    # Tokens and log-probabilities are those of plain forward passes; nothing before the point carries loss.
    confirm(plain_model(engine), three.rows)
    assert min(a.at for r in three.rows for a in r.actions) >= min(len(e.spec.start.prefix) for e in three.resumed)
    assert all((a.version == engine.version).all() and not a.branch for r in three.rows for a in r.actions)
    # Every environment was walked to its point and played on from there, and that is what is counted.
    walked = sum(e.spec.start.turn for e in three.resumed)
    assert three.environment_steps == stats.steps == walked + sum(e.turns for e in three.resumed)
    assert len(made.domains["walk"].family.made) <= 3, "more environments at once than the domain's `environments`"
    assert stats.resets == 12 and three.seconds["environments"] > 0 and three.groups == 6 and three.dropped_groups == 0
    assert three.sampled_tokens == sum(r.loss_tokens for r in three.rows)
    assert f"{three.environment_steps} environment steps" in made.summary()


def test_one_turn_is_sampled_as_it_always_was(store, engine, renderer, monkeypatch):
    """Bit for bit the fresh turns at the selector's points, drawn by the step's own seeds; no sequence is read."""
    monkeypatch.setattr(PrefixStore, "sequence", None)
    plan = Plan(4, {"walk": {"teacher_prefix": 2, "sft_prefix": 0}}, {"walk": 1.0})
    found, made, _ = sample(store, engine, renderer, 1, plan=plan)
    assert made.resumer is None
    points = []
    selector = Selector(store, SelectionOptions(points_per_sequence=2), seed=5)
    for number, chosen in enumerate(selector.select_sequences(4, "walk", "teacher_prefix", 2)):
        for point in chosen:
            seeds = tuple(stable_seed(3, 4, "walk", "teacher_prefix", number, point.turn, member) for member in range(2))
            row = ("teacher_prefix", number, point.sequence, point.context)
            points.append(FreshTurnPoint("walk", "teacher_prefix", row, store.prefix(point), point.turn, seeds,
                                         group=len(points), sequence=2 * len(points)))
    rows = sample_fresh_turns(engine, points, SamplingOptions(max_tokens=5, stop_ids=renderer.stop_ids))
    same(found, StepSamples(rows, []))


@BOTH
def test_observations_are_rendered_as_in_play(store, engine, renderer):
    """Who resumes and repeats what was played has token for token what was stored."""
    part = domain()
    points = {(p.sequence, p.turn): p for p in store.decision_points("walk")}
    try:
        for (identity, turn), point in points.items():
            if turn not in (0, 2):
                continue
            sequence = store.sequence(identity)
            conversation = Conversation(identity, sequence, renderer, part.harnesses)
            found = restore(conversation.recording, turn, part.pool, witness=conversation.witness)
            talk = Talk(part.harness, renderer)
            conversation.tell(talk, found.views)
            builder = ContextBuilder(store.prefix(point), turn=turn)
            for later in range(turn, sequence.turns - 1):
                played = store.continuation(points[identity, later])
                builder.act(played, -0.5, 0, "student")
                talk.say(played)
                builder.observe(talk.hear(found.environment.step(sequence.actions[later]).text, builder.tokens))
                assert builder.tokens.tolist() == store.prefix(points[identity, later + 1]).tolist()
            part.pool.release(found.environment)
    finally:
        part.close()


def test_nothing_but_the_seed_decides(store, engine, renderer):
    plain, _, _ = sample(store, engine, renderer, 2)
    slow, _, _ = sample(store, engine, renderer, 2, delays={7: 0.004, 8: 0.001})
    ahead, _, stats = sample(store, engine, renderer, 2, ahead=True)
    same(plain, slow)
    same(plain, ahead)
    assert stats.resets == 12, "what was begun ahead was used"
    other, _, _ = sample(store, engine, renderer, 2, plan=Plan(1, PLAN.counts, PLAN.shares))
    assert actions_of(other) != actions_of(plain)


def test_looking_ahead_draws_nothing(store, engine, renderer):
    part = domain()
    try:
        made = streams(part, store, engine, renderer, 2, draw="epoch")
        before = made.state_dict()
        made.prefetch(PLAN)
        assert made.state_dict() == before and part.replayer._started
        made.sample(PLAN)
        assert made.state_dict() != before and not part.replayer._started
    finally:
        part.close()
    assert all(e.closed for e in part.family.made)


def tampered(store, path, which):
    """A copy of the store in which the sequences of these places took other first actions than they say."""
    copied = PrefixStore.open(path, "w")
    for number, sequence in enumerate(store):
        if number in which:
            actions = ["forward" if "forward" != sequence.actions[0] else "back", *sequence.actions[1:]]
            sequence = dataclasses.replace(sequence, actions=tuple(actions))
        copied.append(sequence)
    copied.commit("tampered")
    return copied


def test_a_replay_that_fails_costs_its_own_sequence_only(store, engine, renderer, tmp_path, monkeypatch):
    monkeypatch.setattr(agent_loop, "RETRY_PAUSE_S", 0.001)
    broken = tampered(store, tmp_path / "broken", {0, 2})
    found, made, _ = sample(broken, engine, renderer, 2, plan=Plan(0, {"walk": {"teacher_prefix": 6}}, {"walk": 1.0}))
    failed = [e for e in found.resumed if e.failure]
    ids = {i: broken.sequence(i) for i in broken.ids()}
    assert {e.failure for e in failed} == {"replay_diverged"} and 0 < len(failed) < len(found.resumed)
    assert found.failures["walk"]["replay_diverged"] == len(failed) == made.totals["walk: replay_diverged"]
    for episode in failed:
        record = episode.failure_record
        assert record["sequence"] in ids and record["turn"] == 1 and "place" in record["expected"] + record["found"]
        assert episode.sequence is None and episode.attempts == 1
    # A point before the change is restored; a group without any member left is counted.
    assert all(e.spec.start.turn == 0 or e.failure_record == {} for e in found.resumed if not e.failure)
    numbers = {a.sequence for r in found.rows for a in r.actions}
    assert numbers == {e.spec.sequence for e in found.resumed if not e.failure}
    assert found.dropped_groups == len({e.spec.group for e in failed})
    # An environment that fails under a sequence is replayed and played again with the same draws.
    flaky, _, stats = sample(store, engine, renderer, 2, failures={(8, "step"): 3})
    assert stats.failures == {"lost_process": 3} and not flaky.failures
    assert actions_of(flaky) == actions_of(sample(store, engine, renderer, 2)[0])
    assert max(e.attempts for e in flaky.resumed) > 1


def test_a_launch_tries_one_sequence_of_each_source(store, engine, renderer, tmp_path):
    part = domain()

    def check(stored, stream="teacher_prefix"):
        return check_replays(part, stored, Selector(stored), renderer, stream)
    try:
        assert check(store) == [] and check(store, "sft_prefix") == [] and part.pool.stats.resets == 1
        said = []
        for sound in range(4):
            broken = tampered(store, tmp_path / f"but-{sound}", {0, 1, 2, 3} - {sound})
            with contextlib.suppress(ReplayDiverged):  # three of four are tried
                said += check(broken)
        assert said and all("a stored sequence of source teacher does not replay (replay_diverged" in text for text in said)
        with pytest.raises(ReplayDiverged):
            check(tampered(store, tmp_path / "all", {0, 1, 2, 3}))
        part.harness = dataclasses.replace(part.harness, system_prompt="Fly.")
        with pytest.raises(ReplayRefused, match="other words around it"):
            check(store)
    finally:
        part.close()


def test_a_full_context_ends_after_the_fresh_turn(store, engine, renderer):
    part = domain()
    part.harness = Harness(part.harness.system_prompt, 7, 5, 30)
    try:
        found = streams(part, store, engine, renderer, 3).sample(PLAN)
    finally:
        part.close()
    assert {e.ended for e in found.resumed} <= {"context_limit", "done", "turn_limit"}
    assert all(e.turns == 1 for e in found.resumed if e.ended == "context_limit")
    assert [e.ended for e in found.resumed].count("context_limit") > 3
