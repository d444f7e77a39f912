"""Replay of stored decision points: every turn of every family, every kind of tampering, and environments ahead of need."""

from __future__ import annotations

import dataclasses
import json
import threading
import time

import numpy as np
import pytest

from mopd.environments.base import EnvironmentFailure, Task
from mopd.environments.pool import EnvironmentPool
from mopd.environments.replay import (
    HASHES,
    SHOWN,
    Recording,
    ReplayDiverged,
    Replayer,
    ReplayJob,
    ReplayRefused,
    restore,
    restore_point,
)
from mopd.sampling.agent_loop import EpisodeSpec, Harness, play_episodes
from mopd.sampling.base import Completion
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Conversation
from prefix_store import PrefixStore
from prefix_store.trajectory import check_sequence
from tests.mopd.sampling.corridor import CorridorFamily


class Reciting:
    """An engine that writes the given actions of each episode, one after the other."""

    version, max_batch = 0, 8

    def __init__(self, renderer, actions):
        self.renderer, self.actions, self.at = renderer, actions, {}

    def generate(self, requests, options):
        done = []
        for request in requests:
            turn = self.at.get(request.session, 0)
            self.at[request.session] = turn + 1
            tokens = self.renderer.action_tokens(self.actions[int(request.session.split("-")[1])][turn])
            done.append(Completion(tokens, np.full(len(tokens), -0.5, np.float32), "stop", 0))
        return done

    def end_sessions(self, sessions):
        pass


def record(family, tasks, actions, renderer):
    """Sequences of these actions as the agent loop stores them."""
    harness = Harness(family.system_prompt, max_turns=max(map(len, actions)), max_turn_tokens=99, max_context_tokens=9999)
    with EnvironmentPool(family, size=4) as pool:
        specs = [EpisodeSpec("play", task, n, n, n) for n, task in enumerate(tasks)]
        episodes = play_episodes(Reciting(renderer, actions), {"play": pool}, specs, renderer, {"play": harness})
    assert all(not e.failure for e in episodes), [e.failure_text for e in episodes]
    for episode in episodes:
        check_sequence(episode.sequence)
    return [e.sequence for e in episodes]


@pytest.fixture(scope="module")
def renderer():
    return ChatRenderer(train_tokenizer(["go forward, look around. the end", "You see a red ball 2 ahead."] * 4, 300))


@pytest.fixture(scope="module")
def expert_play(families, renderer):
    """name → (family, sequences of one or two tasks that the expert solves, one word that is no action among its moves)."""
    made = {}
    for name, family in families.items():
        plays = []
        for task in family.tasks("train")[:20]:
            environment = family.create()
            observation, played = environment.reset(task, expert=True), []
            while not observation.done:
                action = environment.expert_action()
                if len(played) == 1:
                    environment.step("sing")
                    played.append("sing")
                observation = environment.step(action)
                played.append(action)
            if len(played) > 3:
                plays.append((task, played))
            if len(plays) == (1 if name == "scienceworld" else 2):  # a start there costs a quarter of a second
                break
        made[name] = family, record(family, *zip(*plays, strict=True), renderer)
    return made


@pytest.mark.parametrize("name", ["textworld_express", "scienceworld", "babyai"])
def test_every_turn_is_restored_with_what_was_seen(name, expert_play, renderer, tmp_path):
    family, sequences = expert_play[name]
    store = PrefixStore.open(tmp_path / "store", "w")
    for sequence in sequences:
        assert sequence.outcome.success and "sing" in sequence.actions
        store.append(sequence)
    store.commit("expert")
    conversations = {i: Conversation(i, store.sequence(i), renderer, Harness(family.system_prompt)) for i in store.ids()}
    with EnvironmentPool(family, size=2) as pool:
        points = list(store.decision_points("play"))
        assert len(points) == sum(s.turns for s in sequences)
        for number, point in enumerate(points):
            witness = conversations[point.sequence].witness if number % 2 else None  # tokens, or the stored hashes
            found = restore_point(store, point, pool, witness=witness)
            assert found.steps == point.turn and len(found.views) == point.turn + 1 and found.views[-1] is found.observation
            actions = store.sequence(point.sequence).actions
            observation = found.observation
            for action in actions[point.turn:]:
                assert not observation.done
                observation = found.environment.step(action)
            assert observation.done and observation.success
            pool.release(found.environment)
        assert pool.stats.failures == {} and pool.stats.resets == len(points)


def changed_token(sequence, turn):
    """The sequence with another token at the end of the text of the observation before `turn`."""
    context = sequence.contexts[0]
    tokens = context.tokens.copy()
    at = next(s for s in context.actions() if s.turn == turn).start - 4
    tokens[at] = tokens[at] + 1
    return dataclasses.replace(sequence, contexts=(dataclasses.replace(context, tokens=tokens),))


@pytest.mark.parametrize("name", ["textworld_express", "scienceworld", "babyai"])
def test_what_was_tampered_with_is_named(name, expert_play, renderer):
    family, (sequence, *_) = expert_play[name]
    last = sequence.turns - 1
    hashes = sequence.metadata[HASHES]
    cases = {
        "seed": (dataclasses.replace(sequence, seed=sequence.seed + 1), 0),
        # An action that is no action, where there was one that changed the view.
        "action": (dataclasses.replace(sequence, actions=("dance", *sequence.actions[1:])), 1),
        "hash": (dataclasses.replace(sequence, metadata={HASHES: [*hashes[:-2], "0" * 16, hashes[-1]]}), last),
        "observation": (changed_token(sequence, last), last),
    }
    with EnvironmentPool(family, size=2) as pool:
        for what, (changed, turn) in cases.items():
            conversation = Conversation("f" * 64, changed, renderer, Harness(family.system_prompt))
            witness = conversation.witness if what in ("seed", "action", "observation") else None
            with pytest.raises(ReplayDiverged) as caught:
                restore(Recording.of("f" * 64, changed), last, pool, witness=witness)
                pytest.fail(f"the other {what} was not noticed")
            error = caught.value
            assert error.category == "replay_diverged", what
            wanted = error.divergence
            assert (wanted.sequence, wanted.domain, wanted.turn) == ("f" * 64, "play", turn), what
            assert wanted.expected != wanted.found and max(len(wanted.expected), len(wanted.found)) <= SHOWN + 2
            assert json.loads(json.dumps(error.record)) == error.record
            assert f"turn {turn}" in str(error) and "ffff" in str(error) and repr(wanted.found) in str(error)
        # Tried twice each, and nothing that diverged is used again.
        assert pool.stats.resets == 2 * len(cases) and not pool._idle


def corridor(renderer, actions=("forward", "back", "forward", "forward", "forward"), length=3):
    return record(CorridorFamily(), [Task("walk", length, "train")], [list(actions)], renderer)[0]


def test_an_episode_that_ends_too_early_diverges(renderer):
    sequence = corridor(renderer)
    short = dataclasses.replace(sequence, actions=("forward",) * sequence.turns)
    with EnvironmentPool(CorridorFamily(), size=1) as pool:
        with pytest.raises(ReplayDiverged, match="before turn 3: expected 'a turn that was played'.*the episode's end"):
            restore(Recording.of("a", short), 4, pool, witness=lambda turn, observation: None)


def test_a_divergence_that_a_second_try_mends_is_counted(renderer):
    sequence, seen = corridor(renderer), []
    with EnvironmentPool(CorridorFamily(), size=1) as pool:
        def witness(turn, observation):
            seen.append(turn)
            return ("another view", observation.text) if len(seen) == 2 else None
        restored = restore(Recording.of("a", sequence), 2, pool, witness=witness)
        pool.release(restored.environment)
        assert seen == [0, 1, 0, 1, 2] and pool.stats.failures == {"replay_diverged": 1}


@pytest.mark.parametrize("changes, words", [
    ({"environment": ""}, "static demonstration: it names no environment"),
    ({"environment": "cave"}, "was played in environment 'cave', the domain has 'corridor'"),
    ({"environment_version": "0"}, "version '0', here is version '1'; collect or import it again"),
    ({"metadata": {}}, "carries no hashes of its observations .* hand in a witness"),
])
def test_what_cannot_be_replayed_is_refused_before_anything_is_played(renderer, changes, words):
    sequence = dataclasses.replace(corridor(renderer), **changes)
    family = CorridorFamily()
    with EnvironmentPool(family, size=1) as pool, pytest.raises(ReplayRefused, match=words) as caught:
        restore(Recording.of("a" * 64, sequence), 1, pool)
    assert caught.value.category == "replay_refused" and not family.made


def test_another_system_prompt_is_no_divergence(renderer):
    sequence = corridor(renderer)
    conversation = Conversation("a" * 64, sequence, renderer, Harness("Say something else."))
    with EnvironmentPool(CorridorFamily(), size=1) as pool:
        with pytest.raises(ReplayRefused, match="with other words around it.*set domains.play.system_prompt"):
            restore(conversation.recording, 1, pool, witness=conversation.witness)
        with pytest.raises(ValueError, match="has turns 0 to 4, not 5"):
            restore(conversation.recording, 5, pool)


def test_a_failing_environment_is_closed_and_its_failure_passed_on(renderer):
    family = CorridorFamily({(3, "step"): 1})
    sequence = corridor(renderer)
    with EnvironmentPool(family, size=1) as pool:
        with pytest.raises(EnvironmentFailure, match="lost_process"):
            restore(Recording.of("a", sequence), 2, pool)
        assert family.made[0].closed and pool.stats.failures == {"lost_process": 1}
        pool.release(restore(Recording.of("a", sequence), 2, pool).environment)


def jobs_of(sequence, turns, loads=None):
    recording = Recording.of("a" * 64, sequence)

    def load():
        if loads is not None:
            loads.append(threading.current_thread().name)
        return recording, None
    return [ReplayJob(recording.sequence, turn, load) for turn in turns]


def test_replays_begin_ahead_and_never_hold_more_than_the_room(renderer):
    sequence, family, loads = corridor(renderer), CorridorFamily(), []
    with EnvironmentPool(family, size=3) as pool:
        replayer = Replayer(pool, workers=2)
        jobs = jobs_of(sequence, [4, 1, 1, 2, 3, 0], loads)
        replayer.expect(jobs, room=2)
        until(lambda: len(loads) == 2)
        time.sleep(0.02)
        assert len(family.made) == 2 and all("corridor-replay" in name for name in loads)
        replayer.expect(jobs)  # the pool's size: one more begins, and none again
        until(lambda: len(family.made) == 3)
        taken = [replayer.take(job) for job in jobs]  # whoever takes may hold more
        assert [t.restored().steps for t in taken] == [4, 1, 1, 2, 3, 0] and len(loads) == 6
        assert len({id(t.restored().environment) for t in taken}) == 6
        assert taken[0].step("forward").done and not taken[1].step("back").done
        taken[2].broken = True
        for one in taken:
            one.give_back()
            one.give_back()
        until(lambda: replayer._held == 0)
        assert len(pool._idle) == 3 and sum(e.closed for e in family.made) == 3
        replayer.close()
        with pytest.raises(RuntimeError, match="closed"):
            replayer.expect(jobs)


def test_what_is_no_longer_expected_is_given_back(renderer):
    sequence, family = corridor(renderer), CorridorFamily(delays={3: 0.01})
    with EnvironmentPool(family, size=4) as pool:
        replayer = Replayer(pool, workers=2)
        replayer.expect(jobs_of(sequence, [1, 2, 2, 3]))
        replayer.expect(jobs_of(sequence, [2, 4]))
        one = replayer.take(jobs_of(sequence, [2])[0])
        assert one.restored().steps == 2
        replayer.expect(())
        one.give_back()
        until(lambda: replayer._held == 0)
        replayer.expect(jobs_of(sequence, [4, 4]))
        replayer.close()
        assert replayer._held == 0 and len(pool._idle) <= 4
    assert all(e.closed for e in family.made)


def test_a_failed_replay_is_raised_where_it_is_taken(renderer):
    sequence = dataclasses.replace(corridor(renderer), actions=("back",) * 5)
    with EnvironmentPool(CorridorFamily(), size=1) as pool:
        replayer = Replayer(pool)
        (job,) = jobs_of(sequence, [3])
        replayer.expect([job])
        replay = replayer.take(job)
        with pytest.raises(ReplayDiverged, match="before turn 1"):
            replay.step("forward")
        replay.give_back()
        until(lambda: replayer._held == 0)
        replayer.close()


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.002)
