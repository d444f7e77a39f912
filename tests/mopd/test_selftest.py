"""The self-test passes on sound parts, and each of its checks fails on the fault that it is there for."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd import selftest as st
from mopd.learner.forward import PackedLM
from mopd.learner.packing import TOKEN_FIELDS
from mopd.losses import make_objective
from mopd.losses.objectives import OBJECTIVES, ObjectiveResult, label_logprob
from mopd.losses.policy import sampled_kl
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
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
    ("reverse_kl", {"support": "top_k", "k": 8}), ("forward_kl", {"support": "top_k", "k": 8, "tail": "renormalise"}),
])
def test_sound_parts_pass(objective):
    checks = run(objective=objective[0], objective_options=objective[1])
    assert not failed(checks)
    assert {c.name for c in checks} == {"alignment", "shift", "split", "mask", "identity", "signal", "enumeration"}
    st.require(checks)


def test_a_dropped_tail_has_a_gradient_between_equal_models_and_is_launched_all_the_same():
    checks = run(objective="reverse_kl", objective_options={"support": "top_k", "k": 8, "tail": "drop"})
    assert not failed(checks)
    [identity] = [c for c in checks if c.name == "identity"]
    assert identity.passed is None and identity.measured > 1e-3


@pytest.mark.parametrize("kind,objective", [("probability", "mopd"), ("log_space", "mopd"), ("log_space", "jsd")])
def test_a_mixture_is_tested_as_the_one_teacher_that_it_is(kind, objective):
    parts = [HFTeacher(make_model("qwen3_moe", seed=7 + i), teacher=f"t{i}") for i in range(2)]
    mixture = MixtureScorer(parts, [1, 3], kind)
    checks = run(scorers=dict.fromkeys(DOMAINS, mixture), objective=objective)
    assert not failed(checks)
    assert {c.name for c in checks if c.subject == "teacher 0.25 t0 + 0.75 t1"} == {"mask", "split", "alignment", "shift"}


@pytest.mark.parametrize("family,tied,prefix_gradient", [
    ("qwen3", True, "none"), ("gemma2", False, "none"), ("mistral_window", True, "full"), ("mimo_v2_flash", False, "full")])
def test_heads_families_and_layouts(family, tied, prefix_gradient):
    """Tied and untied heads, soft caps, windows, sinks, and prefixes without a graph, as the run would lay them out."""
    checks = run(model=make_model(family, tie_word_embeddings=tied) if family != "mimo_v2_flash" else make_model(family),
                 training={"prefix_gradient": prefix_gradient})
    assert not failed(checks)


def label_shift(batch):
    return dataclasses.replace(batch, label=batch.label.roll(1))


def source_one_late(batch):
    """Every token is read from the row after the one that predicts it."""
    return dataclasses.replace(batch, source_index=(batch.source_index + 1).clamp(max=batch.input_ids.numel() - 1))


def mask_one_short(batch):
    """The last token of every action carries no loss, as where a mask is cut with the labels' shift."""
    key = batch.row * 100 + batch.action
    last = torch.ones(len(key), dtype=torch.bool)
    last[:-1] = key[1:] != key[:-1]
    return batch_of(batch, ~last)


def mask_one_early(batch):
    """The token before every action in its place: what the environment said is trained."""
    flat = batch.input_ids.reshape(-1)
    return dataclasses.replace(batch, label=flat[batch.source_index], source_index=(batch.source_index - 1).clamp(min=0))


def masks_of_other_rows(batch):
    return batch if batch.attention is None else dataclasses.replace(batch, attention=batch.attention.roll(1, 0))


def batch_of(batch, kept):
    fields = {name: getattr(batch, name)[kept] for name in TOKEN_FIELDS}
    return dataclasses.replace(batch, **fields)


@pytest.mark.parametrize("fault,check", [
    (label_shift, "alignment"), (label_shift, "shift"), (source_one_late, "alignment"), (mask_one_short, "mask"),
    (mask_one_early, "alignment"), (masks_of_other_rows, "split")])
def test_a_fault_in_the_layout_is_found_in_student_and_teachers(fault, check, monkeypatch):
    real = st.pack
    monkeypatch.setattr(st, "pack", lambda *args, **options: [fault(batch) for batch in real(*args, **options)])
    found = failed(run())
    assert (check, "student") in found and (check, "teacher") in found


def test_a_missing_score_that_is_read_as_certainty_is_found(monkeypatch):
    def certain(**given):
        given["teacher_logits"] = torch.nan_to_num(given["teacher_logits"], nan=0.0)
        return make_objective("forward_kl")(**given)

    certain.needs = "full"
    monkeypatch.setitem(OBJECTIVES, "certain", lambda: certain)
    assert failed(run(objective="certain")) == {("mask", "certain")}


def test_a_divergence_that_is_not_zero_between_equal_models_is_found(monkeypatch):
    def hot(**given):
        return make_objective("forward_kl")(**{**given, "student_logits": given["student_logits"] / 1.1})

    hot.needs = "full"
    monkeypatch.setitem(OBJECTIVES, "hot", lambda: hot)
    assert failed(run(objective="hot")) == {("identity", "hot")}


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


def test_a_planted_token_that_is_as_likely_by_chance_is_no_fault():
    """In bfloat16 the limit is a tenth of a nat, and two tokens are often nearer than that to each other."""
    likely = np.full(VOCABULARY, -5.0)
    row = st.probe_rows(["a"], IDS, 0)[0]
    original = max(row.actions, key=lambda action: len(action.tokens))
    others = [int(token) for token in row.trunk if token not in original.tokens]
    likely[others[0]] = likely[original.tokens] = -2.0  # the first that is planted is as likely as what it replaces

    def subject(label):
        return st.Subject("student", lambda batch: torch.from_numpy(likely)[label(batch)], ("a",), 0)
    assert st.shift(subject(lambda batch: batch.label), row, 0.1).passed
    assert not st.shift(subject(lambda batch: batch.label.roll(1)), row, 0.1).passed


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
