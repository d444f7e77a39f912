"""A learner's step with a teacher that tells its likeliest ids alone, beside one in this process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mopd import selftest as st
from teachers.scoring import HFTeacher
from teachers.scoring.cache import ScoreCache
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.remote import RemoteTeacher
from tests.mopd.learner.test_step import SHARES, build, rows_of
from tests.mopd.learner.tiny import VOCABULARY, make_model
from tests.teachers.scoring import faults


def near(seed: int) -> HFTeacher:
    return HFTeacher(make_model("qwen3_moe", seed=seed), teacher=f"t{seed}")


def far(seed: int, fault=None) -> RemoteTeacher:
    planted = faults.Planted(HFBackend(near(seed)), fault)
    planted.gives = frozenset({"sampled", "top_k"})  # as a server
    return RemoteTeacher(planted, revision=str(seed), cache=ScoreCache(1 << 20), again=0)


def stepped(scorers, tail: str, k: int = 6):
    step = build(scorers=scorers, objective="forward_kl", objective_options={"support": "top_k", "k": k, "tail": tail},
                 turn_scores=True)
    try:
        return step(rows_of(), shares=SHARES), step
    finally:
        step.learner.close()


@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop"])
def test_loss_and_gradient_are_those_of_the_teacher_in_process(tail):
    whole, _ = stepped({"game": near(7), "science": near(8)}, tail)
    found, step = stepped({"game": far(7), "science": near(8)}, tail)
    assert step.asks_top_k and found.loss == pytest.approx(whole.loss, rel=2e-6)
    assert found.metrics["gradient_norm"] == pytest.approx(whole.metrics["gradient_norm"], rel=1e-5)
    game, exact = found.metrics["domains"]["game"], whole.metrics["domains"]["game"]
    for name in ("k1", "k3", "student_entropy", "agreement", "loss"):
        assert game[name] == pytest.approx(exact[name], rel=1e-4, abs=1e-6)
    assert 0 < game["forward_kl"] < exact["forward_kl"] and "reverse_kl" not in game and "teacher_entropy" not in game
    assert found.reverse_kl["game"] == pytest.approx(exact["k3"], rel=1e-4) and not found.metrics["missing"]
    assert found.reverse_kl["science"] == pytest.approx(whole.reverse_kl["science"], rel=1e-6)
    assert found.turn_scores.keys() == whole.turn_scores.keys()


def test_tokens_without_likeliest_ids_are_left_out_and_counted():
    def lose(request, answer, number):
        values = answer.top_logprob.copy()
        values[0] = np.nan
        return dataclasses.replace(answer, top_logprob=values)

    whole, _ = stepped({"game": near(7), "science": near(8)}, "bucket")
    found, _ = stepped({"game": far(7, lose), "science": near(8)}, "bucket")
    (lost,) = found.metrics["missing"]["t7"].values()
    assert found.metrics["domains"]["game"]["unscored_tokens"] == lost > 0
    assert found.loss != pytest.approx(whole.loss, rel=1e-4)


def test_the_self_test_proves_it_on_the_run_s_own_parts():
    step = build(scorers={"game": far(7), "science": near(8)}, objective="forward_kl",
                 objective_options={"support": "top_k", "k": 6})
    try:
        checks = st.selftest(step.learner, step, ids=range(2, VOCABULARY), seed=3)
    finally:
        step.learner.close()
    assert not [c for c in checks if c.passed is False] and {"identity", "signal"} <= {c.name for c in checks}
