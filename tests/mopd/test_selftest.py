"""The self-test passes on sound parts, and each of its checks fails on the fault that it is there for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd import selftest as st
from mopd.learner.forward import PackedLM
from mopd.losses.objectives import ObjectiveResult, label_logprob
from mopd.losses.policy import sampled_kl
from teachers.scoring.hf import HFTeacher
from tests.mopd.learner.test_step import DOMAINS, build
from tests.mopd.learner.tiny import VOCABULARY, make_model

IDS = range(2, VOCABULARY)


def failed(checks):
    return {(c.name, c.subject.split()[0]) for c in checks if c.passed is False}


def run(**changes):
    step = build(**changes)
    try:
        return st.selftest(step.learner, step, ids=IDS, seed=3)
    finally:
        step.learner.close()


@pytest.mark.parametrize("objective", [
    ("forward_kl", {}), ("jsd", {"beta": 0.3}), ("mopd", {"advantage_student": "snapshot"}), ("sampled_kl", {}),
    ("reverse_kl", {"support": "top_k", "k": 8}),
])
def test_sound_parts_pass(objective):
    checks = run(objective=objective[0], objective_options=objective[1])
    assert not failed(checks)
    assert {c.name for c in checks} == {"alignment", "shift", "split", "mask", "identity", "signal", "enumeration"}
    st.require(checks)


class ShiftedTeacher(HFTeacher):
    """Its scores come one token too late."""

    def __call__(self, batch, **options):
        scores = super().__call__(batch, **options)
        return dataclasses.replace(scores, logprob=scores.logprob.roll(1)) if scores.logprob is not None else scores


def test_a_teacher_whose_scores_are_shifted_by_one_is_found():
    scorers = {d: kind(make_model("qwen3_moe", seed=7), teacher=f"t_{d}")
               for d, kind in zip(DOMAINS, (HFTeacher, ShiftedTeacher), strict=True)}
    checks = run(scorers=scorers, objective="mopd")
    assert ("shift", "teacher") in failed(checks)
    assert {c.subject for c in checks if c.passed is False} == {"teacher t_science"}
    with pytest.raises(st.SelftestFailed, match="t_science"):
        st.require(checks)


def test_a_branch_that_sees_its_neighbour_is_found(monkeypatch):
    real = PackedLM.forward

    def leaky(self, batch, loss_function=None):
        if batch.attention is not None:
            size = batch.attention.shape[-1]
            batch = dataclasses.replace(batch, attention=torch.ones_like(batch.attention).tril_() if size else None)
        return real(self, batch, loss_function)

    monkeypatch.setattr(PackedLM, "forward", leaky)
    assert ("alignment", "student") in failed(run())


class K1:
    """The classical fault: the back-propagated k1, whose gradient has no teacher in it."""

    needs = "sampled"

    def __call__(self, *, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob, outcome_advantage):
        student = label_logprob(student_logits, label)
        return ObjectiveResult(student - teacher_logprob, {"k1": sampled_kl(student, teacher_logprob, estimator="k1")})


def test_an_objective_without_the_teacher_in_its_gradient_is_found():
    checks = run(objective="tests.mopd.test_selftest:K1")
    assert ("signal", "tests.mopd.test_selftest:K1") in failed(checks)


def test_nothing_is_changed_by_it():
    step = build()
    before = {name: p.detach().clone() for name, p in step.learner.model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    st.selftest(step.learner, step, ids=IDS)
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, before[name]) for name, p in step.learner.model.named_parameters())
    assert step.learner.step == 0 and not step.learner.expert_loads.take().any()
    step.learner.close()


def test_enumeration_fails_for_another_gradient(monkeypatch):
    real = st.policy_gradient

    def with_later_tokens(student, teacher, behaviour):
        """The sequence-level KL's gradient: a token is credited with the later log-ratios too."""
        result = real(student, teacher, behaviour)
        advantage = result.advantage.flip(0).cumsum(0).flip(0)
        return dataclasses.replace(result, loss=-advantage * student)

    assert st.enumeration().passed
    monkeypatch.setattr(st, "policy_gradient", with_later_tokens)
    assert not st.enumeration().passed


def test_too_few_ids_are_refused():
    with pytest.raises(ValueError, match="at least 8"):
        st.probe_rows(("game",), np.arange(5), 0)
