"""Any head in chunks: tied or not, biased, scaled, soft-capped, in float64, float32 or bfloat16, against float64 at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import chunked_divergence, chunked_logprob, make_objective
from mopd.losses.chunked import Head, HeadSpec, chunked_loss
from tests.mopd.losses.test_extremes import reference

# Largest relative error of a gradient that is rounded to its type once, after sums in float32 (float64 for float64).
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 8e-3}
TOP = {"support": "top_k", "k": 3}
FUNCTIONS = [("reverse_kl", {}), ("forward_kl", {}), ("jsd", {"beta": 0.01}), ("jsd", {"beta": 0.5}), ("reverse_kl", TOP),
             ("forward_kl", {**TOP, "tail": "renormalise"}), ("jsd", {**TOP, "tail": "drop"}), ("logprob", {})]


@st.composite
def models(draw):
    """(hidden, weight, bias or None, HeadSpec) of a student, whose hidden states are rows of its weight where it is tied,
    and of a teacher of another width; chunk; upstream gradient."""
    count, vocabulary = draw(st.integers(0, 6)), draw(st.integers(3, 20))
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    def side(width):
        bias = random(vocabulary) if draw(st.booleans()) else None
        spec = HeadSpec(draw(st.sampled_from([1.0, 0.25, 1.5])), draw(st.sampled_from([None, 4.0])))
        return [random(count, width), random(vocabulary, width), bias, spec]

    return side(4), side(7), draw(st.booleans()), draw(st.integers(1, 8)), random(count).float()


def logits_of(hidden, weight, bias, spec):
    z = hidden @ weight.t() + (0.0 if bias is None else bias)
    z = z * spec.scale
    return z if spec.softcap is None else torch.tanh(z / spec.softcap) * spec.softcap


@settings(max_examples=40, deadline=None)
@given(case=models(), which=st.sampled_from(FUNCTIONS))
def test_value_and_gradients_of_any_head(case, which):
    (own, other, tied, chunk, upstream), (name, options) = case, which
    hidden, weight, bias, spec = own
    labels = torch.arange(len(hidden)) % len(weight)
    found = []
    for exact in (True, False):
        kind = torch.float64 if exact else weight.dtype
        leaves = [x.to(kind, copy=True).requires_grad_() for x in (hidden, weight)]
        # Tied: the input embeddings are the head's rows, so the head's gradient has two sources.
        states = leaves[0] + leaves[1][labels] if tied else leaves[0]
        b = None if bias is None else bias.to(kind, copy=True).requires_grad_()
        if exact:
            rounded = states.detach().to(weight.dtype).double() - states.detach() + states  # what the chunks are given
            mine = logits_of(rounded, leaves[1], b, spec)
            theirs = logits_of(*(x if x is None or isinstance(x, HeadSpec) else x.double() for x in other))
            if name == "logprob":
                value = torch.log_softmax(mine / 0.8, -1).gather(-1, labels[:, None])[:, 0]
            else:
                value = torch.stack([reference(s, t, name, 0.8, **options) for s, t in zip(mine, theirs, strict=True)]) \
                    if len(mine) else mine.sum(-1)
        elif name == "logprob":
            value = chunked_logprob(states, leaves[1], labels, temperature=0.8, chunk=chunk, bias=b, softcap=spec.softcap,
                                    scale=spec.scale)
        else:
            value = chunked_divergence(
                states, leaves[1], other[0], other[1], kind=name, temperature=0.8, chunk=chunk, student_bias=b,
                teacher_bias=other[2], student_scale=spec.scale, student_softcap=spec.softcap, teacher_scale=other[3].scale,
                teacher_softcap=other[3].softcap, **options)
        value.backward(upstream.to(value.dtype))
        found.append([value.detach(), *(x.grad for x in (*leaves, b) if x is not None)])
    (expected, *exact), (value, *gradients) = found
    assert value.dtype == (torch.float64 if weight.dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=2e-5)
    for mine, want in zip(gradients, exact, strict=True):
        assert mine.dtype == weight.dtype
        scale = max(float(g.norm()) for g in exact) if len(hidden) else 1.0
        assert (mine.double() - want).norm() <= TOLERANCE[weight.dtype] * max(scale, 1e-6)


@pytest.mark.parametrize("name,options", [
    ("mopd", {"correction": "none"}), ("sampled_kl", {"estimator": "k3"}), ("jsd", {"beta": 1e-4})])
@pytest.mark.parametrize("count,weight", [(0, 1.0), (1, 1.0), (5, 0.0)])
def test_no_token_one_token_and_tokens_without_weight(name, options, count, weight):
    """Every case has a value and a full graph, so a rank without work takes part in the backward pass."""
    generator = torch.Generator().manual_seed(0)
    hidden, other = (torch.randn(count, 4, generator=generator) for _ in range(2))
    matrix, teacher = (torch.randn(9, 4, generator=generator) for _ in range(2))
    hidden.requires_grad_(), matrix.requires_grad_()
    label, objective = torch.arange(count), make_objective(name, options)

    def function(logits, rows):
        theirs = Head(teacher).logits(other[rows])
        result = objective(student_logits=logits, teacher_logits=theirs, teacher_logprob=None, label=label[rows],
                           behaviour_logprob=torch.full((len(logits),), -2.0), outcome_advantage=None)
        return (torch.where(torch.tensor(weight != 0), result.loss, 0.0) * weight).sum(), result.diagnostics

    value, _ = chunked_loss(hidden, Head(matrix), function, rows=2)
    value.backward()
    assert torch.isfinite(value) and bool(value != 0) == bool(matrix.grad.any()) == (count == 1)
