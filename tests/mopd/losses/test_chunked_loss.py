"""chunked_loss: any per-token loss in chunks gives the value, gradients and details of the whole, in one chunk's memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import chunked, distribution, divergence, make_objective
from mopd.losses.candidates import CandidateSets
from mopd.losses.chunked import Head, HeadSpec, chunked_loss
from mopd.losses.mixture import MixtureHead
from tests.mopd.losses.test_chunked import LiveRows, head, models

OBJECTIVES = {
    "mopd": {}, "reverse_kl": {}, "forward_kl": {}, "jsd": {"beta": 0.3}, "sampled_kl": {},
    "top_k": {"support": "top_k", "k": 5}, "drop": {"support": "top_k", "k": 5, "tail": "drop"},
}  # fmt: skip


def objective_of(name, temperature=0.8):
    kind = "reverse_kl" if name in ("top_k", "drop") else name
    return make_objective(kind, {**OBJECTIVES[name], "temperature": temperature})


def loss_function(objective, teacher: Head, teacher_hidden, weight):
    """The step's form: teacher logits of the chunk, the objective, weights; all per-token fields cut by rows."""
    count = len(weight)
    label, behaviour = torch.arange(count) % len(teacher.weight), torch.linspace(-6, -3, count, dtype=torch.float64)

    def function(logits, rows):
        theirs = teacher.logits(teacher_hidden[rows])
        score = torch.log_softmax(theirs / 0.8, -1).gather(-1, label[rows][:, None])[:, 0]
        result = objective(student_logits=logits, teacher_logits=theirs, teacher_logprob=score, label=label[rows],
                           behaviour_logprob=behaviour[rows], outcome_advantage=None)
        kept = torch.where(weight[rows] != 0, result.loss, 0.0)
        return (kept * weight[rows]).sum(), {"loss": kept.detach(), **result.diagnostics}

    return function


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("cap", [None, 3.0])
def test_every_objective_in_chunks_equals_the_whole(name, chunk, cap):
    sh, sw, sb, th, tw, tb = models()
    weight = torch.linspace(-1, 1, len(sh), dtype=torch.float64)
    weight[4] = 0.0
    function = loss_function(objective_of(name), Head(tw, tb, HeadSpec(0.5, cap)), th, weight)
    whole = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    expected, numbers = function(head(*whole, cap, 1.5), slice(0, len(sh)))
    (3 * expected).backward()
    leaves = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    value, found = chunked_loss(leaves[0], Head(leaves[1], leaves[2], HeadSpec(1.5, cap)), function, rows=chunk)
    (3 * value).backward()
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    for ours, theirs in zip(leaves, whole, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-8, atol=1e-12)
    assert found.keys() == numbers.keys()
    for key in numbers:
        torch.testing.assert_close(found[key], numbers[key], rtol=1e-5, atol=1e-6, equal_nan=True, msg=key)


@given(st.integers(0, 9), st.integers(1, 12), st.integers(2, 40), st.sampled_from([1.0, 50.0, 1e4]),
       st.sampled_from(sorted(OBJECTIVES)), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_any_shape_and_extreme_logits_stay_finite_and_equal(count, chunk, vocabulary, scale, name, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, other = (torch.randn(count, 4, generator=generator, dtype=torch.float64) * scale for _ in range(2))
    matrix, theirs = (torch.randn(vocabulary, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    weight = torch.rand(count, generator=generator, dtype=torch.float64)
    function = loss_function(objective_of(name), Head(theirs), other, weight)
    found = []
    for rows in (chunk, 1000):
        leaves = [x.clone().requires_grad_() for x in (hidden, matrix)]
        value, _ = chunked_loss(leaves[0], Head(leaves[1]), function, rows=rows)
        value.backward()
        assert torch.isfinite(value) and all(torch.isfinite(x.grad).all() for x in leaves)
        found.append([value.detach(), *(x.grad for x in leaves)])
    for ours, whole in zip(*found, strict=True):
        torch.testing.assert_close(ours, whole, rtol=1e-8, atol=1e-9 * scale)


def test_masked_and_missing_tokens_leave_no_gradient():
    sh, sw, _, th, tw, _ = models()
    th[3] = torch.nan
    for weight in (torch.zeros(len(sh), dtype=torch.float64), torch.ones(len(sh), dtype=torch.float64)):
        leaves = [x.clone().requires_grad_() for x in (sh, sw)]
        value, found = chunked_loss(leaves[0], Head(leaves[1]), loss_function(objective_of("forward_kl"), Head(tw), th,
                                                                             weight), rows=5)
        value.backward()
        assert found["unscored"].tolist() == [i == 3 for i in range(len(sh))]
        assert (leaves[0].grad[3] == 0).all() and torch.isfinite(leaves[1].grad).all()
        if not weight.any():
            assert value == 0 and not any(x.grad.any() for x in leaves)


def test_without_a_graph_no_gradient_is_made_and_without_positions_all_is_zero():
    sh, sw, sb, th, tw, _ = models()
    sh.requires_grad_(), sw.requires_grad_(), sb.requires_grad_()
    seen = []

    def function(logits, rows):
        seen.append(logits.requires_grad)
        return logits.sum(), {"first": logits[:, 0].detach()}

    with torch.no_grad():
        value, found = chunked_loss(sh, Head(sw, sb), function, rows=10)
    assert not value.requires_grad and seen == [False] * 3 and found["first"].shape == (len(sh),)
    value, found = chunked_loss(sh[:0], Head(sw, sb), function, rows=10)
    value.backward()
    assert value == 0 and found == {} and (sw.grad == 0).all() and (sb.grad == 0).all()


def test_a_plain_sum_with_a_soft_cap_and_a_second_backward():
    """The gradient of a sum is one expanded number, which must not be changed in place."""
    sh, sw, *_ = models()
    leaves = [x.clone().requires_grad_() for x in (sh, sw)]
    head(leaves[0], leaves[1], torch.zeros(len(sw), dtype=torch.float64), 2.0, 1.0).sum().backward()
    others = [x.clone().requires_grad_() for x in (sh, sw)]
    value, _ = chunked_loss(others[0], Head(others[1], None, HeadSpec(1.0, 2.0)), lambda x, rows: (x.sum(), {}), rows=4)
    value.backward(retain_graph=True)
    for ours, theirs in zip(others, leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    with pytest.raises(RuntimeError, match="one backward pass only"):
        value.backward()


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_low_precision_accumulates_in_float32(dtype, tolerance):
    sh, sw, _, th, tw, _ = models(dtype)
    exact = [x.double().requires_grad_() for x in (sh, sw)]
    expected = divergence(exact[0] @ exact[1].t(), th.double() @ tw.double().t(), kind="reverse_kl").sum()
    expected.backward()
    leaves = [x.clone().requires_grad_() for x in (sh, sw)]
    teacher = Head(tw)
    value, _ = chunked_loss(leaves[0], Head(leaves[1]), lambda logits, rows: (
        divergence(logits, teacher.logits(th[rows]), kind="reverse_kl").sum(), {}), rows=5)
    value.backward()
    assert value.dtype == torch.float32 and leaves[1].grad.dtype == dtype
    assert value.item() == pytest.approx(expected.item(), rel=1e-4)
    for ours, theirs in zip(leaves, exact, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm() < tolerance


def test_details_that_differ_between_chunks_are_refused():
    sh, sw, *_ = models()
    with pytest.raises(ValueError, match="other details"):
        chunked_loss(sh, Head(sw), lambda logits, rows: (logits.sum(), {str(rows.start): logits[:, 0]}), rows=5)


@pytest.mark.parametrize("name", ["forward_kl", "mopd"])
def test_one_chunk_of_logits_is_alive_whatever_the_length(name):
    def measure(rows):
        sh, sw, _, th, tw, _ = models(torch.float32, rows=rows)
        sh.requires_grad_(), sw.requires_grad_()
        function = loss_function(objective_of(name), Head(tw), th, torch.ones(rows))
        with LiveRows(len(sw)) as live:
            value, _ = chunked_loss(sh, Head(sw), function, rows=4)
            value.backward()
        assert live.largest <= 4
        return live.peak

    assert measure(32) == measure(96) > 0


@pytest.mark.parametrize("name", [*OBJECTIVES, "mixture of three"])
@pytest.mark.parametrize("cut", [False, True])
def test_no_objective_holds_more_of_a_chunk_than_the_budget_counts(name, cut, monkeypatch):
    """Tensors of a chunk's logits alive at once, the blocks of rows (here one each) that the work is done in among them."""
    monkeypatch.setitem(distribution._BLOCK_BYTES, "cpu", 1)
    rows, (sh, sw, _, th, tw, _) = 40, models(torch.float32, rows=80)
    sh.requires_grad_(), sw.requires_grad_()
    objective, teacher = objective_of("forward_kl" if name.startswith("mixture") else name), Head(tw)
    if name.startswith("mixture"):
        teacher, th = MixtureHead((teacher,) * 3, (0.5, 0.3, 0.2), "log_space", 0.8), th.repeat(1, 3)
    label = torch.arange(80) % len(sw)
    sets = CandidateSets.of([[i, (i + 1) % len(sw)] for i in label.tolist()]) if cut else None

    def function(logits, part):
        given = {} if sets is None else {"candidates": sets[part]}
        theirs = teacher.logits(th[part]) if objective.needs == "full" else None
        score = None if theirs is not None else torch.full((len(logits),), -3.0)
        result = objective(student_logits=logits, teacher_logits=theirs, teacher_logprob=score, label=label[part],
                           behaviour_logprob=torch.full((len(logits),), -4.0), outcome_advantage=None, **given)
        return result.loss.sum(), result.diagnostics

    with LiveRows(len(sw)) as live:
        chunked_loss(sh, Head(sw), function, rows=rows)[0].backward()
    blocks = 10  # single rows
    assert rows < live.peak <= chunked._LIVE_TENSORS * rows + blocks
    assert live.peak <= {"full": 3, "sampled": 2}[objective.needs] * rows + 2 * blocks
