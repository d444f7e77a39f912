"""Every objective at its edges: any shape, logits of ±1e4 and −inf, missing rows, no token at all, mixtures of teachers.

Values and gradients are compared with references in float64 that are written out over the ids that have mass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import divergence, make_objective
from mopd.losses.mixture import mixture_logits, mixture_logprob

KLS = ("reverse_kl", "forward_kl", "jsd")
DIVERGENCES = [(kind, {}) for kind in KLS] + [("jsd", {"beta": b}) for b in (1e-6, 0.02, 0.98, 1 - 1e-6)] + [
    (kind, {"support": "top_k", "k": k, "tail": tail}) for kind in KLS for k in (1, 3)
    for tail in ("bucket", "renormalise", "drop")]
SAMPLED = [("mopd", {}), ("mopd", {"correction": "truncate", "bounds": [0.5, 2.0]}), ("mopd", {"correction": "none"}),
           ("mopd", {"advantage_clip": [-5.0, 5.0], "alpha": 0.5}), ("sampled_kl", {"estimator": "k2"}),
           ("sampled_kl", {"estimator": "k3"})]
EVERY = DIVERGENCES + SAMPLED
WEIGHTS = (0.25, 0.75)


@st.composite
def cases(draw):
    """Logits of a student and of two teachers, float64, as they look after rounding to the drawn type."""
    rows, vocabulary = draw(st.integers(0, 4)), draw(st.integers(1, 8))
    scale, dtype = draw(st.sampled_from([0.1, 1.0, 30.0, 1e4])), draw(st.sampled_from(["float64", "float32", "bfloat16"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    sides = []
    for without in (draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([0.0, 0.3])), 0.0):
        z = torch.randn(rows, vocabulary, generator=generator, dtype=torch.float64) * scale
        banned = torch.rand(rows, vocabulary, generator=generator) < without
        banned[:, draw(st.integers(0, vocabulary - 1))] = False  # some id has mass
        sides.append(z.masked_fill(banned, -math.inf).to(getattr(torch, dtype)))
    label = torch.randint(vocabulary, (rows,), generator=generator)
    missing = torch.rand(rows, generator=generator) < draw(st.sampled_from([0.0, 0.4]))
    kind = draw(st.sampled_from(["single", "probability", "log_space"]))
    return *sides, label, missing, kind, draw(st.sampled_from([1.0, 0.7]))


def teacher_of(first, second, kind, temperature):
    return first if kind == "single" else mixture_logits([first, second], WEIGHTS, kind, temperature)


def run(name, options, student, teacher, label, missing, temperature, *, sampled=False):
    """The objective on one micro-batch: (result, gradient in the student's logits)."""
    leaf = student.clone().requires_grad_()
    teacher = teacher.masked_fill(missing[:, None], math.nan)
    score = torch.log_softmax(teacher.to(torch.promote_types(teacher.dtype, torch.float32)) / temperature, -1)
    own = torch.log_softmax(student.to(score.dtype) / temperature, -1).gather(-1, label[:, None])[:, 0]
    result = make_objective(name, {**options, "temperature": temperature})(
        student_logits=leaf, teacher_logits=None if sampled else teacher,
        teacher_logprob=score.gather(-1, label[:, None])[:, 0] if sampled else None, label=label,
        behaviour_logprob=own.where(torch.isfinite(own), torch.tensor(-3.0)), outcome_advantage=torch.ones(len(label)))
    result.loss.sum().backward()
    return result, leaf.grad


@settings(max_examples=150, deadline=None)
@given(case=cases(), which=st.sampled_from(EVERY), sampled=st.booleans())
def test_no_edge_gives_nan_and_what_is_missing_gives_nothing(case, which, sampled):
    student, first, second, label, missing, kind, temperature = case
    name, options = which
    teacher = teacher_of(first, second, kind, temperature)
    result, gradient = run(name, options, student, teacher, label, missing, temperature,
                           sampled=sampled and name in ("mopd", "sampled_kl"))
    found = result.diagnostics
    assert result.loss.shape == label.shape and torch.isfinite(result.loss).all()
    assert torch.isfinite(gradient).all(), (name, options)
    assert found["unscored"][missing].all()
    nothing = found["unscored"] | found["infinite"]
    assert not result.loss[nothing].any() and not gradient[nothing].any()
    assert not gradient[torch.isneginf(student)].any(), "an id without mass has no gradient"
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(1))
    again, shuffled = run(name, options, student[order], teacher[order], label[order], missing[order], temperature,
                          sampled=sampled and name in ("mopd", "sampled_kl"))
    torch.testing.assert_close(again.loss, result.loss[order])
    torch.testing.assert_close(shuffled, gradient[order])


def reference(student, teacher, kind, temperature, beta=0.5, support="full", k=None, tail="bucket"):
    """One position in float64: sums over the outcomes that have mass, as the definitions say; +inf where it is infinite."""
    lp, lq = torch.log_softmax(student / temperature, -1), torch.log_softmax(teacher / temperature, -1)
    if support == "top_k":
        own, other = (set(x.topk(min(k, len(x))).indices.tolist()) for x in (lp, lq))
        ids = sorted({"reverse_kl": own, "forward_kl": other, "jsd": own | other}[kind])
        rest = [i for i in range(len(lp)) if i not in ids]
        tails = [torch.logsumexp(x[rest], 0)[None] if rest else x.new_full((1,), -math.inf) for x in (lp, lq)]
        lp, lq = lp[ids], lq[ids]
        if tail == "bucket":
            lp, lq = torch.cat([lp, tails[0]]), torch.cat([lq, tails[1]])
        elif tail == "renormalise":
            lp, lq = lp - torch.logsumexp(lp, 0), lq - torch.logsumexp(lq, 0)

    some = (lp.exp() > 0) | (lq.exp() > 0)
    lp, lq = lp[some], lq[some]

    def kl(a, b):
        some = a.exp() > 0
        return (a[some].exp() * (a[some] - b[some])).sum()

    if kind == "reverse_kl":
        return kl(lp, lq)
    if kind == "forward_kl":
        return kl(lq, lp)
    m = torch.logaddexp(lq + math.log(beta), lp + math.log1p(-beta))
    return beta * kl(lq, m) + (1 - beta) * kl(lp, m)


@settings(max_examples=150, deadline=None)
@given(case=cases(), which=st.sampled_from(DIVERGENCES))
def test_values_are_the_definitions_wherever_they_are_finite(case, which):
    student, first, second, label, missing, kind, temperature = case
    name, options = which
    teacher = teacher_of(first, second, kind, temperature)
    result, _ = run(name, options, student, teacher, label, missing, temperature)
    for row in range(len(label)):
        if missing[row]:
            continue
        want = reference(student[row].double(), teacher[row].double(), name, temperature, **options)
        if torch.isfinite(want):
            # float32 logits of 1e4 are known to 1e-3 alone
            loose = 1e-9 if student.dtype == torch.float64 and teacher.dtype == torch.float64 else 2e-3
            assert result.loss[row].item() == pytest.approx(want.item(), rel=max(loose, 1e-9), abs=loose)
        elif not torch.isnan(want):
            assert result.diagnostics["infinite"][row]


@pytest.mark.parametrize("name,options", DIVERGENCES)
@pytest.mark.parametrize("mixture", ["single", "probability", "log_space"])
def test_gradients_are_autograds_of_the_definition(name, options, mixture):
    """Moderate logits with ids that nobody has mass on, float64, at a temperature."""
    generator = torch.Generator().manual_seed(3)
    student, first, second = (torch.randn(6, 9, generator=generator, dtype=torch.float64) * 3 for _ in range(3))
    for side in (student, first, second):
        side[:, 4] = -math.inf
    teacher = teacher_of(first, second, mixture, 0.7)
    leaf = student.clone().requires_grad_()
    torch.stack([reference(leaf[i], teacher[i], name, 0.7, **options) for i in range(6)]).sum().backward()
    none = torch.zeros(6, dtype=torch.long)
    result, found = run(name, options, student, teacher, none, none.bool(), 0.7)
    torch.testing.assert_close(found, torch.nan_to_num(leaf.grad), rtol=1e-8, atol=1e-11)
    assert not result.diagnostics["unscored"].any()


@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-4), (torch.float32, 2e-4)])
@pytest.mark.parametrize("beta", [1e-12, 1e-6, 1 - 1e-6])
def test_jsd_next_to_its_ends_keeps_value_and_gradient(beta, dtype, tolerance):
    """jsd/β → forward KL and jsd/(1−β) → reverse KL, in float32 too: a mixture that is one of its sides to rounding must
    not leave rounding noise in place of the divergence."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 40, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    kind, scale = ("forward_kl", beta) if beta < 0.5 else ("reverse_kl", 1 - beta)
    found = []
    for name, options, divisor in (("jsd", {"beta": beta}, scale), (kind, {}, 1.0)):
        leaf = student.clone().requires_grad_()
        value = divergence(leaf, teacher, kind=name, **options) / divisor
        value.sum().backward()
        found.append((value.detach(), leaf.grad))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=tolerance, atol=0)
    assert (found[0][1] - found[1][1]).norm() / found[1][1].norm() < tolerance


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_estimators_of_a_mixture_are_those_of_its_distribution(estimator):
    """From two teachers' sampled scores alone, and from their whole distributions."""
    generator = torch.Generator().manual_seed(0)
    student, first, second = (torch.randn(5, 7, generator=generator, dtype=torch.float64) for _ in range(3))
    label = torch.arange(5)
    scores = [torch.log_softmax(z, -1).gather(-1, label[:, None])[:, 0] for z in (first, second)]
    found = []
    for logits, score in ((mixture_logits([first, second], WEIGHTS, "probability"), None),
                          (None, mixture_logprob(scores, WEIGHTS))):
        leaf = student.clone().requires_grad_()
        result = make_objective("sampled_kl", {"estimator": estimator})(
            student_logits=leaf, teacher_logits=logits, teacher_logprob=score, label=label,
            behaviour_logprob=torch.zeros(5), outcome_advantage=None)
        result.loss.sum().backward()
        found.append((result.loss.detach(), leaf.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_tokens_that_are_all_masked_give_nothing():
    student = torch.randn(4, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    result = make_objective("mopd")(
        student_logits=student, teacher_logits=torch.zeros(4, 5), teacher_logprob=None, label=torch.arange(4),
        behaviour_logprob=torch.full((4,), -40.0), outcome_advantage=None)
    result.loss.sum().backward()
    assert result.diagnostics["masked"].all() and not result.loss.any() and not student.grad.any()


@pytest.mark.parametrize("estimator,gap", [("k3", 1e4), ("k2", 1e30)])
def test_an_infinite_estimate_is_flagged_and_its_gradient_is_not_nan(estimator, gap):
    """exp(1e4) and (1e30)² are infinite in float32, and so are their derivatives."""
    student = torch.tensor([[0.0, gap, 0.0], [0.3, 0.1, 0.2]], requires_grad=True)
    teacher = torch.tensor([[gap, 0.0, 0.0], [0.1, 0.4, 0.2]])
    result = make_objective("sampled_kl", {"estimator": estimator})(
        student_logits=student, teacher_logits=teacher, teacher_logprob=None, label=torch.tensor([0, 1]),
        behaviour_logprob=torch.zeros(2), outcome_advantage=None)
    result.loss.sum().backward()
    assert result.diagnostics["infinite"].tolist() == [True, False] and result.loss[0] == 0
    assert not student.grad[0].any() and student.grad[1].abs().sum() > 0 and torch.isfinite(student.grad).all()
