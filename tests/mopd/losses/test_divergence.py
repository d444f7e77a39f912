"""Divergences against float64 references: value, gradient, tails, extreme logits, vocabularies of two sizes."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import divergence

CASES = json.loads((Path(__file__).parents[2] / "cases" / "divergence.json").read_text())
KINDS = ("reverse_kl", "forward_kl", "jsd")
TOP_K = [{"support": "top_k", "k": 3, "tail": tail} for tail in ("bucket", "renormalise", "drop")]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


STUDENT, TEACHER = tensor(CASES["student_logprobs"]), tensor(CASES["teacher_logprobs"])


def reference(student, teacher, kind, beta=0.5):
    """The definitions, written with autograd operations in float64 (finite logits only)."""
    lp, lq = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    p, q = lp.exp(), lq.exp()
    if kind == "reverse_kl":
        return (p * (lp - lq)).sum(-1)
    if kind == "forward_kl":
        return (q * (lq - lp)).sum(-1)
    m = beta * q + (1 - beta) * p
    return beta * (q * (lq - m.log())).sum(-1) + (1 - beta) * (p * (lp - m.log())).sum(-1)


def top_k_reference(student, teacher, kind, k, tail, beta=0.5):
    """One position at a time, with plain sums over the chosen ids."""
    values = []
    for z, w in zip(student, teacher, strict=True):
        p, q = torch.softmax(z, -1), torch.softmax(w, -1)
        own, other = set(z.topk(k).indices.tolist()), set(w.topk(k).indices.tolist())
        ids = sorted({"reverse_kl": own, "forward_kl": other, "jsd": own | other}[kind])
        a, b = p[ids], q[ids]
        if tail == "bucket" and len(ids) < len(z):
            rest = [i for i in range(len(z)) if i not in ids]
            a, b = torch.cat([a, p[rest].sum()[None]]), torch.cat([b, q[rest].sum()[None]])
        elif tail == "renormalise":
            a, b = a / a.sum(), b / b.sum()
        if kind == "reverse_kl":
            values.append((a * (a / b).log()).sum())
        elif kind == "forward_kl":
            values.append((b * (b / a).log()).sum())
        else:
            m = beta * b + (1 - beta) * a
            values.append(beta * (b * (b / m).log()).sum() + (1 - beta) * (a * (a / m).log()).sum())
    return torch.stack(values)


def gradient(function, logits, upstream=None):
    leaf = logits.detach().clone().requires_grad_()
    value = function(leaf)
    value.backward(torch.ones_like(value) if upstream is None else upstream)
    return leaf.grad


@pytest.mark.parametrize("kind", ("reverse_kl", "forward_kl"))
def test_reference_values(kind):
    torch.testing.assert_close(divergence(STUDENT, TEACHER, kind=kind), tensor(CASES[kind]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("beta", list(CASES["jsd"]))
def test_reference_jsd(beta):
    value = divergence(STUDENT, TEACHER, kind="jsd", beta=float(beta))
    torch.testing.assert_close(value, tensor(CASES["jsd"][beta]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", list(CASES["top_k_bucket"]))
def test_reference_top_k(name):
    kind, k = name.rsplit("_", 1)
    value = divergence(STUDENT, TEACHER, kind=kind, support="top_k", k=int(k))
    torch.testing.assert_close(value, tensor(CASES["top_k_bucket"][name]), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beta", (0.1, 0.5, 0.9))
def test_full_gradient_is_autograds(kind, beta):
    upstream = torch.linspace(-1.0, 2.0, len(STUDENT), dtype=torch.float64)
    ours = gradient(lambda z: divergence(z, TEACHER, kind=kind, beta=beta), STUDENT, upstream)
    theirs = gradient(lambda z: reference(z, TEACHER, kind, beta), STUDENT, upstream)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tail", ("bucket", "renormalise", "drop"))
@pytest.mark.parametrize("k", (1, 4, 13))
def test_top_k_value_and_gradient(kind, tail, k):
    def run(z):
        return divergence(z, TEACHER, kind=kind, support="top_k", k=k, tail=tail, beta=0.3)

    def expected(z):
        return top_k_reference(z, TEACHER, kind, k, tail, beta=0.3)

    torch.testing.assert_close(run(STUDENT), expected(STUDENT), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(gradient(run, STUDENT), gradient(expected, STUDENT), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_of_everything_is_the_full_divergence(kind):
    full = divergence(STUDENT, TEACHER, kind=kind)
    for k in (13, 99):
        torch.testing.assert_close(divergence(STUDENT, TEACHER, kind=kind, support="top_k", k=k), full)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, *TOP_K])
def test_gradcheck_with_temperature(kind, options):
    logits = STUDENT[:4].clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda z: divergence(z, TEACHER[:4], kind=kind, temperature=0.7, beta=0.3, **options), (logits,)
    )


def test_temperature_divides_both_sides():
    torch.testing.assert_close(divergence(STUDENT, TEACHER, temperature=2.0), divergence(STUDENT / 2, TEACHER / 2))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 5),
    vocabulary=st.integers(2, 9),
    scale=st.sampled_from([0.1, 1.0, 30.0, 1e4]),
    kind=st.sampled_from(KINDS),
    k=st.integers(1, 9),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_bucket_is_between_zero_and_full(rows, vocabulary, scale, kind, k, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    student = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype)
    teacher = (torch.randn(rows, vocabulary, generator=generator) * scale).to(dtype)
    full = divergence(student, teacher, kind=kind)
    bucket = divergence(student, teacher, kind=kind, support="top_k", k=k)
    slack = 1e-4 * (1 + full.abs())
    assert full.shape == (rows,) and torch.isfinite(full).all()
    assert (bucket >= -slack).all() and (bucket <= full + slack).all()
    assert torch.isfinite(gradient(lambda z: divergence(z, teacher, kind=kind), student)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, *TOP_K])
@pytest.mark.parametrize("dtype", (torch.float64, torch.float32))
def test_ids_without_mass_on_either_side(kind, options, dtype):
    """−inf on the side that only weighs, or on both: value and gradient as if the ids were not there."""
    banned = [2, 5, 11]
    kept = [v for v in range(13) if v not in banned]
    student, teacher = STUDENT.to(dtype).clone(), TEACHER.to(dtype).clone()
    student[:, banned] = teacher[:, banned] = -math.inf
    value = divergence(student, teacher, kind=kind, **options)
    torch.testing.assert_close(value, divergence(student[:, kept], teacher[:, kept], kind=kind, **options))
    found = gradient(lambda z: divergence(z, teacher, kind=kind, **options), student)
    assert (found[:, banned] == 0).all()
    short = gradient(lambda z: divergence(z, teacher[:, kept], kind=kind, **options), student[:, kept])
    torch.testing.assert_close(found[:, kept], short)


def test_one_sided_support():
    """p = 0 where q > 0 costs reverse_kl nothing, q = 0 where p > 0 costs forward_kl nothing, and jsd bears both."""
    student, teacher = STUDENT.clone(), TEACHER.clone()
    student[:, 0] = -math.inf
    teacher[:, 1] = -math.inf
    assert torch.isfinite(divergence(student, TEACHER, kind="reverse_kl")).all()
    assert torch.isfinite(divergence(STUDENT, teacher, kind="forward_kl")).all()
    both = divergence(student, teacher, kind="jsd", beta=0.25)
    bound = 0.25 * math.log(1 / 0.25) + 0.75 * math.log(1 / 0.75)
    assert ((both > 0) & (both <= bound)).all()
    for kind, s, t in (
        ("reverse_kl", student, TEACHER),
        ("forward_kl", STUDENT, teacher),
        ("jsd", student, teacher),
    ):
        assert torch.isfinite(gradient(lambda z, k=kind, t=t: divergence(z, t, kind=k), s)).all()


@pytest.mark.parametrize("kind,side", (("reverse_kl", "teacher"), ("forward_kl", "student")))
def test_infinite_value_is_reported_and_harms_no_other_position(kind, side):
    student, teacher = STUDENT.clone(), TEACHER.clone()
    (teacher if side == "teacher" else student)[3, 0] = -math.inf
    value = divergence(student, teacher, kind=kind)
    assert torch.isposinf(value[3]) and torch.isfinite(value[[0, 1, 2, 4]]).all()
    found = gradient(lambda z: divergence(z, teacher, kind=kind), student)
    assert (found[3] == 0).all()
    torch.testing.assert_close(found[:3], gradient(lambda z: divergence(z, TEACHER[:3], kind=kind), STUDENT[:3]))


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
@pytest.mark.parametrize("kind", KINDS)
def test_huge_logits(kind, dtype):
    student = torch.tensor([[1e4, -1e4, 0.0, 1.0], [0.0, 0.0, 1e4, 1e4], [-1e4, -1e4, -1e4, -1e4]], dtype=dtype)
    teacher = torch.tensor([[-1e4, 1e4, 0.0, 1.0], [0.0, 0.0, 1e4, 1e4], [1e4, 1e4, 1e4, 1e4]], dtype=dtype)
    value = divergence(student, teacher, kind=kind)
    expected = {"reverse_kl": 2e4, "forward_kl": 2e4, "jsd": math.log(2)}[kind]
    assert value[0].item() == pytest.approx(expected)
    assert value[1:].tolist() == [0.0, 0.0]
    assert torch.isfinite(gradient(lambda z: divergence(z, teacher, kind=kind), student)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"support": "top_k", "k": 3}])
def test_equal_models_give_exactly_zero(kind, options):
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 4
    value = divergence(logits, logits.clone(), kind=kind, beta=0.3, **options)
    found = gradient(lambda z: divergence(z, logits.clone(), kind=kind, beta=0.3, **options), logits)
    assert (value == 0).all()
    assert found.abs().max() < 1e-6 if kind == "forward_kl" and options else (found == 0).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)))
def test_low_precision_against_float64_on_the_same_inputs(kind, dtype, tolerance):
    generator = torch.Generator().manual_seed(1)
    student = (torch.randn(16, 300, generator=generator) * 3).to(dtype)
    teacher = (torch.randn(16, 300, generator=generator) * 3).to(dtype)
    value = divergence(student, teacher, kind=kind)
    assert value.dtype == torch.float32
    torch.testing.assert_close(
        value.double(), reference(student.double(), teacher.double(), kind), rtol=1e-5, atol=1e-6
    )
    found = gradient(lambda z: divergence(z, teacher, kind=kind), student)
    expected = gradient(lambda z: reference(z, teacher.double(), kind), student.double())
    assert ((found.double() - expected).norm() / expected.norm()) < tolerance


def test_jsd_limits():
    """jsd(β)/β → forward KL and jsd(β)/(1−β) → reverse KL, as the docstring says."""
    small = 1e-7
    low = divergence(STUDENT, TEACHER, kind="jsd", beta=small) / small
    high = divergence(STUDENT, TEACHER, kind="jsd", beta=1 - small) / small
    torch.testing.assert_close(low, tensor(CASES["forward_kl"]), rtol=1e-4, atol=0)
    torch.testing.assert_close(high, tensor(CASES["reverse_kl"]), rtol=1e-4, atol=0)


def test_teacher_gets_no_gradient_and_decides_the_students():
    teacher = TEACHER.clone().requires_grad_()
    student = STUDENT.clone().requires_grad_()
    divergence(student, teacher).sum().backward()
    assert teacher.grad is None
    other = gradient(lambda z: divergence(z, TEACHER.flip(-1)), STUDENT)
    assert (student.grad - other).abs().max() > 1e-2


def test_shared_ids():
    wide = torch.cat([TEACHER, torch.full((11, 4), 3.0, dtype=torch.float64)], -1)
    torch.testing.assert_close(divergence(STUDENT, wide, shared_ids=13), divergence(STUDENT, TEACHER))
    ids = torch.tensor([1, 4, 7])
    torch.testing.assert_close(divergence(STUDENT, wide, shared_ids=ids), divergence(STUDENT[:, ids], TEACHER[:, ids]))
    with pytest.raises(ValueError, match="shared_ids"):
        divergence(STUDENT, wide)


def test_more_dimensions_and_no_positions():
    value = divergence(STUDENT[:10].reshape(2, 5, 13), TEACHER[:10].reshape(2, 5, 13))
    torch.testing.assert_close(value, divergence(STUDENT[:10], TEACHER[:10]).reshape(2, 5))
    empty = torch.zeros(0, 13, requires_grad=True)
    divergence(empty, torch.zeros(0, 13)).sum().backward()
    assert empty.grad.shape == (0, 13)


def test_nan_stays_visible():
    teacher = TEACHER.clone()
    teacher[2] = math.nan
    for kind in KINDS:
        value = divergence(STUDENT, teacher, kind=kind)
        assert torch.isnan(value).nonzero().tolist() == [[2]]


@pytest.mark.parametrize(
    "options,word",
    [
        ({"kind": "kl"}, "reverse_kl"),
        ({"kind": "jsd", "beta": 1.0}, "beta"),
        ({"support": "top_k"}, "k >= 1"),
        ({"support": "nucleus"}, "top_k"),
        ({"k": 3}, "support"),
        ({"support": "top_k", "k": 2, "tail": "clip"}, "bucket"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_unknown_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        divergence(STUDENT, TEACHER, **options)
