"""The continuous loop: the tokens of the loop in rounds, nobody waits for the slow, failures stay with their own."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from mopd.config import DomainConfig
from mopd.domains import Domain
from mopd.environments.base import Task
from mopd.mixer_events import GroupId
from mopd.sampling import continuous
from mopd.sampling.agent_loop import EpisodeSpec, play_episodes
from mopd.sampling.base import EngineTrouble, SamplingOptions
from mopd.sampling.continuous import ContinuousLoop
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.fresh_turn import FreshTurnPoint, sample_fresh_turns
from mopd.sampling.harness import Harnesses, Talk, harnesses_of
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Resumer
from mopd.sampling.sharing import rows_equal
from mopd.sampling.work import Done, GaveUp, Work
from mopd.sampling.works import Works, renumber, seed_of
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.trajectory import DecisionPoint, Source
from tests.mopd.sampling.corridor import Corridor
from tests.mopd.sampling.tiny import make

FAMILY = "tests.mopd.sampling.corridor:CorridorFamily"
SEED = 11


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["walk to the end. place 0 of 3", "forward", "back", "unknown. Say forward or back."]
    return train_tokenizer(texts * 4, 300)


@pytest.fixture(scope="module")
def model(tokenizer):
    torch.set_num_threads(1)
    return make("qwen3_moe", len(tokenizer))


@pytest.fixture
def engine(model):
    return HFEngine(model, max_batch=6, verify=False)


@pytest.fixture(scope="module")
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


@pytest.fixture
def domains():
    """name → Domain of corridors; made by `domains(walk={}, slow={"delays": …})`, closed at the end."""
    made = {}

    def make_domains(environments=8, **families):
        for name, options in families.items():
            made[name] = Domain(name, DomainConfig(environment=FAMILY, options=options, max_turns=5, max_turn_tokens=5,
                                                   max_context_tokens=300, environments=environments))
        return made

    yield make_domains
    for domain in made.values():
        domain.close()


@pytest.fixture(scope="module")
def store(renderer, model, tmp_path_factory):
    """What the tiny model played as a teacher."""
    part = Domain("walk", DomainConfig(environment=FAMILY, max_turns=5, max_turn_tokens=5, max_context_tokens=400))
    specs = [EpisodeSpec("walk", Task("walk", n, "train"), 100 + i, i, i) for i, n in enumerate((7, 8, 6))]
    episodes = play_episodes(HFEngine(model, verify=False), {"walk": part.pool}, specs, renderer, {"walk": part.harness},
                             source=Source("teacher", "walker"))
    part.close()
    store = PrefixStore.open(tmp_path_factory.mktemp("walks") / "store", "w")
    for episode in episodes:
        store.append(episode.sequence)
    store.commit("walks")
    return store


def works_of(domains, renderer, store=None, **options):
    return Works(domains=domains, store=store, renderer=renderer, fingerprint=renderer.fingerprint(), seed=SEED,
                 student="s", **options)


def rollouts(count, members=1, domain="walk", first=0):
    return [Work(GroupId(f"{domain}/rollout", first + n), m) for n in range(count) for m in range(members)]


def points_of(store, count=6):
    index = store.index()
    return [index.point(row) for row in range(min(count, len(index)))]


def run(loop, works, timeout=20.0, *, between=None):
    """Everything that the loop tells of `works`, as work → news."""
    loop.give(works)
    found, deadline = {}, time.monotonic() + timeout
    while len(found) < len(works):
        assert time.monotonic() < deadline, f"{len(works) - len(found)} of {len(works)} works did not end"
        for news in loop.turn(0.05):
            assert news.work not in found
            found[news.work] = news
        if between is not None:
            between()
    return found


def in_rounds(engine, domains, renderer, works):
    """The same works played by `play_episodes`."""
    specs = [EpisodeSpec((name := w.group.source.split("/")[0]),
                         domains[name].draw("train", SEED, w.group.source, w.group.number), seed_of(SEED, w), 0, w.member)
             for w in works]
    return play_episodes(engine, {n: d.pool for n, d in domains.items()}, specs, renderer,
                         {n: d.harnesses for n, d in domains.items()})


def tokens_of(done):
    return [(a.at, a.turn, a.tokens.tolist()) for row in done.rows for a in row.actions]


def test_whole_tasks_get_the_tokens_of_the_loop_in_rounds(engine, model, domains, renderer):
    parts = domains(walk={}, other={}, environments=3)
    works = rollouts(4, 2) + rollouts(3, domain="other")
    loop = ContinuousLoop(engine, works_of(parts, renderer))
    found = run(loop, works)
    expected = in_rounds(HFEngine(model, max_batch=6, verify=False), parts, renderer, works)
    for work, episode in zip(works, expected, strict=True):
        done = found[work]
        context = episode.sequence.contexts[-1]
        assert tokens_of(done) == [(s.start, s.turn, context.tokens[s.start:s.end].tolist()) for s in context.actions()]
        logprob = np.concatenate([context.behaviour_logprob[s.start:s.end] for s in context.actions()])
        np.testing.assert_allclose(np.concatenate([a.behaviour_logprob for a in done.rows[0].actions]), logprob, atol=1e-4)
        assert (done.record["reward"], done.record["turns"], done.record["ended"]) == (
            episode.score, episode.turns, episode.ended)
        assert done.tokens == len(context.tokens) and done.episode.sequence is None
        assert done.episode.spec.task == episode.spec.task and done.record["environment_steps"] == episode.turns
    assert loop.in_flight == 0 and engine.under_way == 0 and not engine._session_slot
    assert len({tuple(map(str, tokens_of(d))) for d in found.values()}) > 4
    loop.close()


def test_a_work_is_the_same_whatever_is_beside_it(engine, model, domains, renderer, store):
    parts = domains(walk={})
    work = rollouts(1, first=3)[0]
    fresh = Work(GroupId("walk/teacher_prefix", 2), 1, points_of(store)[3])
    others = [*rollouts(6, 2, first=10),
              *(Work(GroupId("walk/teacher_prefix", 9), n, point) for n, point in enumerate(points_of(store)))]
    crowded = run(ContinuousLoop(engine, works_of(parts, renderer, store)), [*others[:5], work, *others[5:], fresh])
    alone = run(ContinuousLoop(HFEngine(model, max_batch=2, verify=False), works_of(parts, renderer, store)), [work, fresh])
    for one in (work, fresh):
        assert tokens_of(crowded[one]) == tokens_of(alone[one])
    again = dataclasses.replace(work, attempt=1)
    assert tokens_of(run(ContinuousLoop(engine, works_of(parts, renderer)), [again])[again]) == tokens_of(alone[work])


def test_fresh_turns_are_those_of_sample_fresh_turns(engine, model, domains, renderer, store):
    parts = domains(walk={})
    group = GroupId("walk/teacher_prefix", 4)
    works = [Work(group, 2 * n + m, point) for n, point in enumerate(points_of(store)) for m in range(2)]
    found = run(ContinuousLoop(engine, works_of(parts, renderer, store)), works)
    points = [FreshTurnPoint("walk", "teacher_prefix", n, store.prefix(w.point), w.point.turn,
                             (stable_seed(SEED, group.source, group.number, w.point.turn, w.member),), 0, 0)
              for n, w in enumerate(works)]
    options = SamplingOptions(max_tokens=5, stop_ids=renderer.stop_ids)
    rows = sample_fresh_turns(HFEngine(model, verify=False), points, options)
    for work, row in zip(works, rows, strict=True):
        done = found[work]
        assert tokens_of(done) == [(a.at, a.turn, a.tokens.tolist()) for a in row.actions]
        assert done.rows[0].trunk.tolist() == row.trunk.tolist() and done.rows[0].actions[0].branch
        assert done.episode is None and done.record["environment_steps"] == 0
    numbered = renumber(found[works[0]].rows, group=7, sequence=9, outcome_advantage=0.5)
    assert [(a.group, a.sequence, a.outcome_advantage) for r in numbered for a in r.actions] == [(7, 9, 0.5)]
    assert rows_equal(renumber(numbered, group=0, sequence=0)[0], found[works[0]].rows[0])


def test_sequences_go_on_from_stored_points_as_the_resumer_plays_them(engine, model, domains, renderer, store):
    parts = domains(walk={})
    group = GroupId("walk/teacher_prefix", 1)
    works = [Work(group, n, point) for n, point in enumerate(points_of(store, 5))]
    loop = ContinuousLoop(engine, works_of(parts, renderer, store, resume_turns={"walk": 3}))
    found = run(loop, works)
    resumer = Resumer(domains=parts, store=store, renderer=renderer, turns={"walk": 3})
    points = [FreshTurnPoint("walk", "teacher_prefix", n, store.prefix(w.point), w.point.turn, (seed_of(SEED, w),), n, n,
                             at=w.point) for n, w in enumerate(works)]
    for work, episode in zip(works, resumer.play(HFEngine(model, verify=False), points, temperature=1.0), strict=True):
        done, context = found[work], episode.sequence.contexts[-1]
        assert tokens_of(done) == [(s.start, s.turn, context.tokens[s.start:s.end].tolist()) for s in context.actions()]
        assert done.rows[0].stream == "teacher_prefix" and done.episode.spec.start.turn == work.point.turn
        assert done.record["environment_steps"] == work.point.turn + episode.turns
    assert max(d.record["turns"] for d in found.values()) > 1
    loop.close()


def test_a_slow_environment_holds_up_nobody_else(engine, domains, renderer, monkeypatch):
    parts = domains(walk={}, crawl={})
    gate, asleep = threading.Event(), []
    step = Corridor.step

    def crawl(self, action):
        if self.family is parts["crawl"].family:
            asleep.append(self)
            gate.wait(30)
        return step(self, action)

    monkeypatch.setattr(Corridor, "step", crawl)
    loop = ContinuousLoop(engine, works_of(parts, renderer))
    late = rollouts(4, domain="crawl")
    loop.give(late)
    found = run(loop, rollouts(30))
    assert {work.group.source for work in found} == {"walk/rollout"} and loop.in_flight == 4
    assert len(set(map(id, asleep))) == 4  # all of them wait beside each other
    gate.set()
    while loop.in_flight:
        found |= {news.work: news for news in loop.turn(0.05)}
    assert all(isinstance(found[work], Done) for work in late)
    loop.close()


def test_new_weights_in_mid_episode_keep_versions_and_log_probabilities(model, domains, renderer, tokenizer):
    """Every token's log-probability is that of the weights of its own version, read over the whole context."""
    parts = domains(walk={})
    engine = HFEngine(model, max_batch=6, verify=False)
    other = make("qwen3_moe", len(tokenizer), seed=5)
    loop = ContinuousLoop(engine, works_of(parts, renderer))
    polls = 0

    def change():
        nonlocal polls
        polls += 1
        if polls == 6:
            engine.load_weights(other.state_dict().items(), version=1)

    works = rollouts(8, 2)
    loop.give(works)
    found = {}
    while loop.in_flight:  # a token at a time
        for news in loop.turn(0.0):
            found[news.work] = news
        change()
    models = [model, other]
    seen = collections.Counter()
    for done in found.values():
        for row in done.rows:
            ids = torch.from_numpy(row.trunk.astype(np.int64))[None]
            with torch.no_grad():
                logprobs = [torch.log_softmax(m(input_ids=ids).logits[0].float(), -1) for m in models]
            for action in row.actions:
                assert action.version.dtype == np.int32 and (np.diff(action.version) >= 0).all()
                seen[tuple(sorted(set(action.version.tolist())))] += 1
                for n, (token, version) in enumerate(zip(action.tokens.tolist(), action.version.tolist(), strict=True)):
                    place = action.at + n - 1
                    assert action.behaviour_logprob[n] == pytest.approx(logprobs[version][place, token].item(), abs=1e-4)
    assert seen[(0,)] and seen[(1,)] and seen[(0, 1)], seen
    loop.close()


def test_failures_are_tried_again_and_then_given_up_with_their_category(engine, domains, renderer, monkeypatch):
    monkeypatch.setattr(continuous, "RETRY_PAUSE_S", 0.001)
    parts = domains(walk={})
    works = rollouts(12)
    tasks = {w: parts["walk"].draw("train", SEED, w.group.source, w.group.number).seed for w in works}
    once, always, bug = list(dict.fromkeys(tasks.values()))[:3]
    parts["walk"].family.failures |= {(once, "step"): 1, (always, "step"): 10**6, (bug, "crash"): 10**6}
    loop = ContinuousLoop(engine, works_of(parts, renderer))
    found = run(loop, works)
    for work, news in found.items():
        if tasks[work] == always:
            assert isinstance(news, GaveUp) and news.reason == "lost_process" and news.record["attempts"] == 3
        elif tasks[work] == bug:
            assert isinstance(news, GaveUp) and news.reason == "environment_exception" and "a bug" in news.words
        else:
            assert isinstance(news, Done)
    assert [n.record["attempts"] for w, n in found.items() if tasks[w] == once].count(2) == 1
    settle(loop)
    assert all(corridor.closed for corridor in parts["walk"].family.made[:1] if corridor.task.seed == always)
    loop.close()


def test_a_worker_process_that_is_killed_costs_a_try_and_no_work(engine, renderer, monkeypatch):
    monkeypatch.setattr(continuous, "RETRY_PAUSE_S", 0.001)
    config = DomainConfig(environment=FAMILY, options={"delays": {length: 0.02 for length in range(1, 9)}}, max_turns=5,
                          max_turn_tokens=5, max_context_tokens=300, environments=8, worker_processes=1)
    with contextlib.closing(Domain("walk", config)) as domain:
        loop = ContinuousLoop(engine, works_of({"walk": domain}, renderer))
        works, found, killed = rollouts(10), {}, False
        loop.give(works)
        while loop.in_flight:
            found |= {news.work: news for news in loop.turn(0.05)}
            if found and not killed:
                killed = True
                os.kill(domain.family.pids()[0], signal.SIGKILL)
        assert all(isinstance(news, Done) for news in found.values()) and len(found) == 10
        assert max(done.record["attempts"] for done in found.values()) == 2
        assert domain.pool.stats.failures["worker_died"] > 0 and domain.family.counts["died"] == 1
        loop.close()


def settle(loop):
    """Wait until environments have gone back to their pools."""
    deadline = time.monotonic() + 5
    while len(loop._callers) and time.monotonic() < deadline:
        loop.turn(0.01)
    assert not len(loop._callers)


def test_an_environment_that_hangs_costs_its_own_work_alone(engine, domains, renderer, monkeypatch):
    monkeypatch.setattr(continuous, "RETRY_PAUSE_S", 0.001)
    monkeypatch.setattr(continuous, "LOOK_S", 0.02)
    parts = domains(walk={})
    works = rollouts(10)
    tasks = {w: parts["walk"].draw("train", SEED, w.group.source, w.group.number).seed for w in works}
    hung = tasks[works[0]]
    awake = threading.Event()
    step = Corridor.step

    def hang(self, action):
        if self.task.seed == hung:
            awake.wait(20)
        return step(self, action)

    monkeypatch.setattr(Corridor, "step", hang)
    loop = ContinuousLoop(engine, works_of(parts, renderer), retries=1, environment_limit=0.15)
    found = run(loop, works)
    for work, news in found.items():
        if tasks[work] == hung:
            assert isinstance(news, GaveUp) and news.reason == "environment_timeout", news
        else:
            assert isinstance(news, Done)
    assert parts["walk"].pool.stats.failures["environment_timeout"] == 2 * sum(t == hung for t in tasks.values())
    awake.set()
    loop.close()


class Troubled:
    """A real engine whose turns fail as `fails(number of the request)` says, once it has been asked for them."""

    def __init__(self, engine, fails):
        self.engine, self.fails, self.asked, self._bad = engine, fails, collections.Counter(), []

    def submit(self, key, request, options):
        self.asked[key] += 1
        if self.fails(key, self.asked[key]):
            self._bad.append(key)
        else:
            self.engine.submit(key, request, options)

    def poll(self, timeout=0.0):
        bad, self._bad = self._bad, []
        return [(key, EngineTrouble("engine_down", "no server answers")) for key in bad] + self.engine.poll(timeout)

    @property
    def under_way(self):
        return len(self._bad) + self.engine.under_way

    def __getattr__(self, name):
        return getattr(self.engine, name)


def test_a_turn_that_the_engine_did_not_write_is_asked_for_again(engine, model, domains, renderer, monkeypatch):
    monkeypatch.setattr(continuous, "ENGINE_PAUSE_S", 0.001)
    parts = domains(walk={})
    works = rollouts(6)
    down = Troubled(engine, lambda key, count: key == 2 or (key == 3 and count in (1, 3)))
    loop = ContinuousLoop(down, works_of(parts, renderer), engine_tries=4)
    found = run(loop, works)
    lost = found[works[1]]
    assert isinstance(lost, GaveUp) and lost.reason == "engine_down" and "no server answers" in lost.words
    assert not loop.engine_trouble and down.asked[2] == 4 and loop.counts["turns_again: engine_down"] == 5
    whole = in_rounds(HFEngine(model, verify=False), parts, renderer, works)
    for n, work in enumerate(works):
        if n != 1:
            assert found[work].record["turns"] == whole[n].turns
            assert tokens_of(found[work])[-1][2] == whole[n].sequence.contexts[-1].tokens[
                found[work].rows[0].actions[-1].at:][:len(tokens_of(found[work])[-1][2])].tolist()
    loop.close()


def test_what_cannot_be_shown_to_the_model_costs_its_own_sequence(engine, domains, renderer, monkeypatch, capsys):
    parts = domains(walk={})
    works = rollouts(6)
    hear = Talk.hear

    def refuse(self, view, context_tokens):
        if self is loop._lives[works[2]].playing.talk if works[2] in loop._lives else False:
            raise ValueError("this template takes no second user message")
        return hear(self, view, context_tokens)

    monkeypatch.setattr(Talk, "hear", refuse)
    loop = ContinuousLoop(engine, works_of(parts, renderer))
    found = run(loop, works)
    assert [isinstance(found[work], Done) for work in works] == [True, True, False, True, True, True]
    assert found[works[2]].reason == "sequence_error" and "no second user message" in found[works[2]].words
    assert "in refuse" in capsys.readouterr().err
    loop.close()


def test_damaged_turns_are_not_taken(engine, domains, renderer, monkeypatch):
    monkeypatch.setattr(continuous, "ENGINE_PAUSE_S", 0.001)
    parts = domains(walk={})

    class Broken(Troubled):
        def poll(self, timeout=0.0):
            return [(key, dataclasses.replace(turn, logprob=turn.logprob * np.nan) if key == 1 else turn)
                    for key, turn in super().poll(timeout)]

    works = rollouts(2)
    found = run(ContinuousLoop(Broken(engine, lambda *_: False), works_of(parts, renderer), engine_tries=2), works)
    lost = found[works[0]]
    assert isinstance(lost, GaveUp) and lost.reason == "damaged_turn" and "nan" in lost.words
    assert isinstance(found[works[1]], Done)


def test_cancelled_works_are_not_heard_of_and_leave_nothing_behind(engine, domains, renderer, store):
    parts = domains(walk={}, crawl={"delays": {length: 0.1 for length in range(1, 9)}}, environments=4)
    loop = ContinuousLoop(engine, works_of(parts, renderer, store))
    fresh = [Work(GroupId("walk/teacher_prefix", 0), n, p) for n, p in enumerate(points_of(store))]
    gone = [*rollouts(6, domain="crawl"), *rollouts(8), *fresh[:3]]
    stay = [*rollouts(3, first=50), *fresh[3:]]
    loop.give([*gone, *stay])
    loop.turn(0.0)
    time.sleep(0.05)
    loop.cancel([*gone, *gone, *rollouts(1, first=99)])
    found = []
    while loop.in_flight:
        found += [news.work for news in loop.turn(0.05)]
    heard_before = set(found) - set(stay)
    assert set(stay) <= set(found) and len(heard_before) <= 3
    settle(loop)
    assert engine.under_way == 0 and not engine._session_slot
    for domain in parts.values():  # every environment is back, and a new work finds room
        assert len(domain.pool._idle) == len(domain.family.made) - sum(e.closed for e in domain.family.made)
        assert loop._room[domain.name] == 4
    assert isinstance(run(loop, gone[:1])[gone[0]], Done)
    loop.close()


def test_what_nobody_could_play_is_refused_by_name(engine, domains, renderer, store):
    loop = ContinuousLoop(engine, works_of(domains(walk={}), renderer))
    point = points_of(store)[0]
    for work, words in ((Work(GroupId("sea/rollout", 1), 0), "no domain 'sea'"),
                        (Work(GroupId("walk/rollout", 1), 0, point), "has no decision point"),
                        (Work(GroupId("walk/sft_prefix", 1), 0), "needs decision point"),
                        (Work(GroupId("walk/sft_prefix", 1), 0, point), "no prefix store is open")):
        with pytest.raises(ValueError, match=words):
            loop.give([work])
    loop.give(rollouts(1))
    with pytest.raises(ValueError, match="under way already"):
        loop.give(rollouts(1))
    loop.close()


def test_the_sequences_of_a_group_are_played_by_one_harness(engine, domains, renderer):
    parts = domains(walk={})
    harness = parts["walk"].harness
    parts["walk"].harnesses = Harnesses({"short": dataclasses.replace(harness, max_turns=1), "long": harness},
                                        {"short": 1.0, "long": 1.0})
    found = run(ContinuousLoop(engine, works_of(parts, renderer)), rollouts(10, 2))
    by_group = collections.defaultdict(set)
    for work, done in found.items():
        by_group[work.group].add(done.episode.harness)
        assert done.record["turns"] == 1 or done.episode.harness == "long"
    assert all(len(names) == 1 for names in by_group.values()) and len(set.union(*by_group.values())) == 2


def test_a_point_that_the_store_does_not_have_is_given_up(engine, domains, renderer, store):
    parts = domains(walk={})
    works = [Work(GroupId("walk/teacher_prefix", 1), 0, DecisionPoint("0" * 64, 0, 0)),
             Work(GroupId("walk/teacher_prefix", 1), 1, points_of(store)[0])]
    for turns in (1, 2):
        loop = ContinuousLoop(engine, works_of(parts, renderer, store, resume_turns={"walk": turns}))
        found = run(loop, works)
        assert isinstance(found[works[0]], GaveUp) and found[works[0]].reason == "stored_prefix"
        assert isinstance(found[works[1]], Done)
        loop.close()


def test_limits_end_sequences_and_a_prompt_that_fills_the_context_is_given_up(engine, domains, renderer):
    parts = domains(walk={})
    harness = parts["walk"].harness
    parts["walk"].harnesses = harnesses_of(dataclasses.replace(harness, max_context_tokens=8))
    work = rollouts(1)[0]
    news = run(ContinuousLoop(engine, works_of(parts, renderer)), [work])[work]
    assert isinstance(news, GaveUp) and news.reason == "prompt_too_long"
    parts["walk"].harnesses = harnesses_of(dataclasses.replace(harness, max_malformed=2))
    found = run(ContinuousLoop(engine, works_of(parts, renderer)), rollouts(8))
    assert {d.record["ended"] for d in found.values()} <= {"malformed_limit", "done", "turn_limit"}
    assert any(d.record["ended"] == "malformed_limit" and d.record["malformed"] == 2 for d in found.values())
    assert all(isinstance(d, Done) for d in found.values())


