"""Whoever scores is told of each turn as soon as it is written, with just what the call returns at its end."""

from __future__ import annotations

import numpy as np

from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.fresh_turn import FreshTurnPoint, sample_fresh_turns
from mopd.sampling.hf import HFEngine
from tests.mopd.learner.tiny import make_model

OPTIONS = SamplingOptions(max_tokens=6, stop_ids=(1, 2, 3, 4, 5, 6, 7))


def test_every_turn_is_told_once_while_others_are_written():
    engine = HFEngine(make_model("qwen3"), max_batch=3)
    rng = np.random.default_rng(0)
    requests = [Request(rng.integers(8, 60, 5).astype(np.uint32), seed) for seed in range(8)]
    told = {}

    def ended(number, completion):
        assert number not in told
        told[number] = completion

    found = engine.generate(requests, OPTIONS, ended=ended)
    assert sorted(told) == list(range(8)) and list(told) != sorted(told), "in the order in which they ended"
    for number, completion in enumerate(found):
        assert np.array_equal(told[number].tokens, completion.tokens)
        assert np.array_equal(told[number].logprob, completion.logprob) and told[number].finish == completion.finish


def test_fresh_turns_are_told_as_rows_with_the_same_actions():
    engine = HFEngine(make_model("qwen3"), max_batch=3)
    trunk = np.random.default_rng(1).integers(8, 60, 9).astype(np.uint32)
    points = [FreshTurnPoint("game", "teacher_prefix", "row", trunk[:at], turn, (at, at + 50), turn, 2 * turn)
              for turn, at in enumerate((4, 9))]
    told = []
    rows = sample_fresh_turns(engine, points, OPTIONS, ended=told.extend)
    expected = {(a.sequence, a.at): a.tokens.tolist() for row in rows for a in row.actions}
    assert {(r.actions[0].sequence, r.actions[0].at): r.actions[0].tokens.tolist() for r in told} == expected
    assert len(told) == len(expected) == 4 and all(np.array_equal(r.trunk, trunk[:r.actions[0].at]) for r in told)
