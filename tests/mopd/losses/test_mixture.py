"""Mixtures of teachers: value and gradient against float64 references, and what is not exact is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import divergence
from mopd.losses.chunked import Head, HeadSpec
from mopd.losses.mixture import MixtureHead, mixture_logits, mixture_logprob

WEIGHTS = (0.2, 0.5, 0.3)


def make(seed=0, tokens=5, vocabulary=11, teachers=3, scale=3.0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(tokens, vocabulary, generator=generator, dtype=dtype) * scale for _ in range(teachers + 1)]
    return draw[0].requires_grad_(), draw[1:]


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_formulas(temperature):
    """Written out with probabilities, products and sums."""
    _, logits = make()
    probabilities = [(z / temperature).exp() / (z / temperature).exp().sum(-1, keepdim=True) for z in logits]
    arithmetic = sum(w * p for w, p in zip(WEIGHTS, probabilities, strict=True))
    geometric = math.prod(p**w for w, p in zip(WEIGHTS, probabilities, strict=True))
    geometric = geometric / geometric.sum(-1, keepdim=True)
    for kind, want in (("probability", arithmetic), ("log_space", geometric)):
        found = mixture_logits(logits, WEIGHTS, kind, temperature)
        torch.testing.assert_close((found / temperature).softmax(-1), want, rtol=1e-12, atol=1e-14)
    label = torch.arange(5)
    sampled = [p.log()[label, label] for p in probabilities]
    torch.testing.assert_close(mixture_logprob(sampled, WEIGHTS), arithmetic.log()[label, label], rtol=1e-12, atol=0)
    assert not torch.allclose(arithmetic, geometric, rtol=1e-2)


def test_the_kls_to_a_mixture_are_weighted_sums_of_the_teachers_up_to_a_constant():
    """So their gradients are equal: forward KL to the mixture in probability, reverse KL to the one in log space."""
    for kind, mixture in (("forward_kl", "probability"), ("reverse_kl", "log_space")):
        student, logits = make(1)
        mixed = divergence(student, mixture_logits(logits, WEIGHTS, mixture), kind=kind)
        summed = sum(w * divergence(student, z, kind=kind) for w, z in zip(WEIGHTS, logits, strict=True))
        (found,), (want,) = (torch.autograd.grad(x.sum(), student, retain_graph=True) for x in (mixed, summed))
        torch.testing.assert_close(found, want, rtol=1e-10, atol=1e-12)
        assert (summed - mixed > 1e-3).all()  # the constant: how far the teachers are apart
        swapped = "log_space" if mixture == "probability" else "probability"
        other = divergence(student, mixture_logits(logits, WEIGHTS, swapped), kind=kind)
        assert not torch.allclose(torch.autograd.grad(other.sum(), student)[0], want, rtol=1e-2)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 4), st.integers(1, 6), st.integers(1, 3), st.sampled_from([1e-3, 1.0, 1e4]), st.integers(0, 99),
       st.sampled_from(["probability", "log_space"]))
def test_any_shape_and_scale_is_a_distribution_and_one_teacher_stays_itself(tokens, vocabulary, teachers, scale, seed, kind):
    _, logits = make(seed, tokens, vocabulary, teachers, scale, torch.float32)
    weights = [1 / teachers] * teachers
    found = mixture_logits(logits, weights, kind, 0.7)
    torch.testing.assert_close((found / 0.7).exp().sum(-1), torch.ones(tokens), rtol=1e-4, atol=1e-5)
    alone = mixture_logits(logits[:1], [1.0], kind, 0.7)
    torch.testing.assert_close(alone, 0.7 * (logits[0] / 0.7).log_softmax(-1), rtol=1e-5, atol=1e-3)
    order = mixture_logits(logits[::-1], weights[::-1], kind, 0.7)
    torch.testing.assert_close(order, found, rtol=1e-4, atol=1e-3)


def test_a_row_that_one_teacher_cannot_score_is_missing_and_nothing_else():
    _, logits = make()
    logits[1][2, 3] = math.nan
    for kind in ("probability", "log_space"):
        found = mixture_logits(logits, WEIGHTS, kind)
        assert torch.isnan(found[2]).all() and torch.isfinite(found[[0, 1, 3, 4]]).all()
    scores = [torch.tensor([-1.0, math.nan]), torch.tensor([-2.0, -2.0]), torch.tensor([-math.inf, -1.0])]
    found = mixture_logprob(scores, WEIGHTS)
    assert torch.isnan(found[1])  # a teacher that rules the first id out takes its share away, no more
    assert found[0].item() == pytest.approx(math.log(0.2 * math.exp(-1) + 0.5 * math.exp(-2)))


def test_hidden_states_side_by_side_say_the_same_a_chunk_at_a_time():
    generator = torch.Generator().manual_seed(0)
    shapes, spec = (4, 7), (HeadSpec(), HeadSpec(scale=0.5, softcap=3.0))
    heads = [Head(torch.randn(9, h, generator=generator), torch.randn(9, generator=generator), s)
             for h, s in zip(shapes, spec, strict=True)]
    hidden = [torch.randn(6, h, generator=generator) for h in shapes]
    for kind in ("probability", "log_space"):
        head = MixtureHead(tuple(heads), (0.25, 0.75), kind, 0.8).to("cpu")
        want = mixture_logits([h.logits(x) for h, x in zip(heads, hidden, strict=True)], (0.25, 0.75), kind, 0.8)
        joined = torch.cat(hidden, dim=-1)
        torch.testing.assert_close(head.logits(joined), want)
        torch.testing.assert_close(torch.cat([head.logits(joined[i:i + 2]) for i in range(0, 6, 2)]), want)


def test_what_cannot_be_had_is_refused():
    _, logits = make()
    with pytest.raises(ValueError, match="needs every teacher's whole distribution"):
        mixture_logprob([z[:, 0] for z in logits], WEIGHTS, "log_space")
    with pytest.raises(ValueError, match="unknown mixture 'sum'; there are: probability, log_space"):
        mixture_logits(logits, WEIGHTS, "sum")
    for weights in ((0.5, 0.6, 0.3), (1.2, -0.4, 0.2)):
        with pytest.raises(ValueError, match="must be positive and sum to 1"):
            mixture_logits(logits, weights, "probability")
    with pytest.raises(ValueError, match="3 weights for scores of the shapes"):
        mixture_logits(logits[:2], WEIGHTS, "probability")
