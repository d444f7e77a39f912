"""A whole LearnerStep against float64, and against itself: other orders, other micro-batches, and steps with nothing in
them. Gradients are those that the optimizer is given."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
from tests.mopd.learner.test_step import DOMAINS, SHARES, build, rows_of
from tests.mopd.learner.tiny import branch_row, make_model, repeated_prefix_logits, rollout_row
from tests.mopd.losses.test_extremes import reference

TOP = {"support": "top_k", "k": 5}


def teachers(kind="single"):
    """domain -> one teacher, or the same two mixed."""
    made = [HFTeacher(make_model("qwen3", seed=7 + i), teacher=f"t{i}") for i in range(2)]
    if kind == "single":
        return dict(zip(DOMAINS, made, strict=True))
    return dict.fromkeys(DOMAINS, MixtureScorer(made, [1, 3], kind))


def trained(rows, *, scorers=None, **changes):
    """(report, {parameter: gradient that the optimizer got}) of one step over `rows`."""
    training = {"zero_stage": 0, **changes.pop("training", {})}
    step = build(scorers or teachers(), make_model("qwen3", tie_word_embeddings=True), training=training, **changes)
    found = {}

    def keep(*_):
        found.update({name: p.grad.clone() for name, p in step.learner.model.named_parameters() if p.grad is not None})
    step.learner.optimizer.register_step_pre_hook(keep)
    try:
        return step(rows, shares=SHARES, step=0), found
    finally:
        step.learner.close()


def distance(mine, theirs):
    """Largest difference of two gradients over the largest entry."""
    assert mine.keys() == theirs.keys() and mine
    largest = max(float(g.abs().max()) for g in theirs.values())
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine) / largest


@pytest.mark.parametrize("objective,options,kind", [
    ("forward_kl", {}, "probability"), ("reverse_kl", TOP, "single"), ("jsd", {**TOP, "beta": 0.02}, "log_space"),
    ("mopd", {"correction": "truncate"}, "log_space"), ("sampled_kl", {"estimator": "k3"}, "probability")])
def test_order_and_micro_batches_change_nothing(objective, options, kind):
    rows = rows_of()
    given = dict(objective=objective, objective_options=options, scorers=teachers(kind), aggregation="turn_mean")
    whole, gradient = trained(rows, token_budget=5000, **given)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    for order, budget in ((shuffled, 5000), (rows, 50), (shuffled, 90)):
        report, other = trained(order, token_budget=budget, training={"logits_mib": 0.01}, **given)
        assert report.metrics["micro_batches"] > whole.metrics["micro_batches"] or budget == 5000
        assert report.loss == pytest.approx(whole.loss, rel=1e-5)
        assert report.reverse_kl == pytest.approx(whole.reverse_kl, rel=1e-4)
        assert distance(other, gradient) < 1e-4


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl", "jsd"])
@pytest.mark.parametrize("tail", ["bucket", "renormalise", "drop", "full"])
def test_top_k_through_a_step_is_the_definition_in_float64(name, tail):
    """Loss and every parameter's gradient, from repeated prefixes in float64, one position at a time."""
    rows = [branch_row(np.random.default_rng(i), size=14, branches=2, points=2, group=i) for i in range(2)]
    student, teacher = (make_model("qwen3", seed=s, tie_word_embeddings=True).double() for s in (0, 7))
    logits = repeated_prefix_logits(student, rows).double()
    with torch.no_grad():
        target = repeated_prefix_logits(teacher, rows).double()
    options = ({} if tail == "full" else {**TOP, "tail": tail}) | ({"beta": 0.02} if name == "jsd" else {})
    each = [reference(z, w, name, 0.9, **options) for z, w in zip(logits, target, strict=True)]
    expected = torch.stack(each).mean()
    expected.backward()
    want = {n: p.grad.float() for n, p in student.named_parameters() if p.grad is not None}
    own = HFTeacher(make_model("qwen3", seed=7, tie_word_embeddings=True), teacher="t")
    report, found = trained(rows, scorers=dict.fromkeys(DOMAINS, own), objective=name, objective_options=options,
                            temperature=0.9, training={"logits_mib": 0.01})
    assert report.loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6)
    assert distance(found, want) < 2e-4


@pytest.mark.parametrize("objective", ["forward_kl", "mopd", "sampled_kl"])
def test_one_token_and_a_domain_without_rows(objective):
    """The other domain's share goes to what is there."""
    row = branch_row(np.random.default_rng(0), size=9, branches=1)
    action = row.actions[0]
    short = dataclasses.replace(action, tokens=action.tokens[:1], behaviour_logprob=np.float32([np.log(1 / 61)]),
                                version=action.version[:1])
    report, gradient = trained([dataclasses.replace(row, actions=(short,))], objective=objective,
                               objective_options={"bounds": [0.0, 1e9]} if objective == "mopd" else {})
    assert report.metrics["loss_tokens"] == 1 and np.isfinite(report.loss) and report.metrics["gradient_norm"] > 0
    assert report.metrics["omega"] == {"game/teacher_prefix": 1.0}
    assert all(torch.isfinite(g).all() for g in gradient.values())


def test_a_step_whose_tokens_are_all_masked_moves_nothing_and_says_so():
    row = rollout_row(np.random.default_rng(0), size=20, turns=3)
    far = dataclasses.replace(row, actions=tuple(
        dataclasses.replace(a, behaviour_logprob=np.full(len(a.tokens), -60, np.float32)) for a in row.actions))
    report, gradient = trained([far], objective="mopd")
    assert report.loss == 0 and report.metrics["gradient_norm"] == 0 and not any(g.any() for g in gradient.values())
    assert report.metrics["domains"]["game"]["masked_share"] == 1
