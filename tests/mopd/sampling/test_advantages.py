"""Outcome advantages: of what is left of a group, of nothing else, and on every token of a rollout."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd.config import Config, DomainConfig, TrainConfig
from mopd.domains import Domain
from mopd.environments.base import Task
from mopd.run_parts import group_advantage
from mopd.sampling.advantages import outcome_advantages
from mopd.sampling.agent_loop import Episode, EpisodeSpec
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.streams import Streams
from mopd.schedule import Plan
from tests.mopd.sampling.tiny import make

PLAIN = group_advantage(Config())
NORMALISED = group_advantage(Config(train=TrainConfig(outcome_std_normalise=True)))


def episode(group, sequence, reward, failure="", domain="walk"):
    spec = EpisodeSpec(domain, Task("walk", 1, "train"), 0, group, sequence)
    outcome = SimpleNamespace(outcome=SimpleNamespace(reward=reward, true_reward=99.0))
    return Episode(spec, sequence=None if failure else outcome, failure=failure)


def test_failures_leave_their_group_before_the_mean():
    episodes = [episode(0, 0, 1.0), episode(0, 1, 0.0), episode(0, 2, 0.5), episode(0, 3, None, "lost_process"),
                episode(1, 4, 1.0), episode(1, 5, None, "lost_process"),  # nothing left to compare with
                episode(2, 6, 0.3), episode(2, 7, 0.3),  # all alike
                episode(3, 8, None, "timeout"), episode(3, 9, None, "timeout"),
                episode(4, 10, 0.0, domain="other"), episode(4, 11, 1.0, domain="other")]
    found, counts = outcome_advantages(episodes, PLAIN)
    assert found == pytest.approx({0: 0.5, 1: -0.5, 2: 0.0, 4: 0.0, 6: 0.0, 7: 0.0, 10: -0.5, 11: 0.5})
    assert counts == {"walk": {"groups": 3, "no_spread": 1, "single": 1}, "other": {"groups": 1, "no_spread": 0, "single": 0}}
    scaled, _ = outcome_advantages(episodes, NORMALISED)
    assert scaled[0] == pytest.approx(0.5 / np.std([1.0, 0.0, 0.5])) and scaled[6] == 0.0


@given(st.lists(st.lists(st.one_of(st.none(), st.floats(-5, 5)), min_size=1, max_size=5), max_size=4), st.randoms())
def test_every_survivor_has_one_and_groups_are_centred(rewards, order: random.Random):
    episodes = []
    for group, members in enumerate(rewards):
        for reward in members:
            episodes.append(episode(group, len(episodes), reward, "" if reward is not None else "timeout"))
    found, _ = outcome_advantages(episodes, PLAIN)
    assert set(found) == {e.spec.sequence for e in episodes if not e.failure}
    for group in range(len(rewards)):
        total = sum(found[e.spec.sequence] for e in episodes if e.spec.group == group and not e.failure)
        assert total == pytest.approx(0, abs=1e-9)
    order.shuffle(episodes)
    assert outcome_advantages(episodes, PLAIN)[0] == found


def test_rollouts_carry_the_advantage_of_their_group():
    torch.set_num_threads(1)
    texts = ["walk to the end. place 0 of 3", "forward", "back", "unknown. Say forward or back."]
    tokenizer = train_tokenizer(texts * 4, 300)
    renderer = ChatRenderer(tokenizer)
    engine = HFEngine(make("qwen3_moe", len(tokenizer)), max_batch=8)
    part = Domain("walk", DomainConfig(environment="tests.mopd.sampling.corridor:CorridorFamily", max_turns=3,
                                       max_turn_tokens=3, max_context_tokens=300, environments=4))
    scores = iter(np.linspace(0, 1, 8))
    try:
        def made(group_size, advantage):
            return Streams(domains={"walk": part}, store=None, selector=None, engine=engine, renderer=renderer,
                           fingerprint=renderer.fingerprint(), seed=3, student="s", temperature=1.0, group_size=group_size,
                           fresh_turns=1, demonstration_fraction=0.0, advantage=advantage)

        plan = Plan(0, {"walk": {"rollout": 2}}, {"walk": 1.0})
        seen = []

        def advantage(rewards):  # the tiny model earns nothing: any rewards of the right number will do
            seen.append(len(rewards))
            return PLAIN([next(scores) for _ in rewards])

        found = made(4, advantage).sample(plan)
        assert seen == [4, 4] and found.outcome_groups == {"walk": {"groups": 2, "no_spread": 0, "single": 0}}
        want = np.concatenate([x - x.mean() for x in np.linspace(0, 1, 8).reshape(2, 4)])
        carried = {a.sequence: a.outcome_advantage for row in found.rows for a in row.actions}
        assert [carried[i] for i in range(8)] == pytest.approx(want.tolist())
        alone = made(1, advantage).sample(plan)
        assert seen == [4, 4] and alone.outcome_groups == {}
        assert all(a.outcome_advantage == 0 for row in alone.rows for a in row.actions)
    finally:
        part.close()
