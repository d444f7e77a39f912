"""Chunked heads: the unchunked values and gradients, and never more than one chunk of logits of either model alive."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mopd.losses import chunked_divergence, chunked_logprob, divergence
from mopd.losses.chunked import chunk_rows

T, H, G, V = 23, 8, 12, 101


def models(dtype=torch.float64, seed=0, rows=T, scale=1.0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)

    return draw(rows, H), draw(V, H), draw(V), draw(rows, G), draw(V, G), draw(V)


def head(hidden, weight, bias, cap, scale):
    logits = (hidden @ weight.t() + bias) * scale
    return torch.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize("kind", ("reverse_kl", "forward_kl", "jsd"))
@pytest.mark.parametrize("options", [{}, {"support": "top_k", "k": 5}, {"support": "top_k", "k": 5, "tail": "drop"}])
@pytest.mark.parametrize("chunk", (1, 7, 23, 1000, None))
@pytest.mark.parametrize("cap", (None, 3.0))
def test_same_values_and_gradients(kind, options, chunk, cap):
    sh, sw, sb, th, tw, tb = models()
    upstream = torch.linspace(-1, 1, T, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    plain = divergence(
        head(*leaves, cap, 1.5), head(th, tw, tb, cap, 0.5), kind=kind, beta=0.3, temperature=0.8, **options
    )
    plain.backward(upstream)
    chunked_leaves = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    teacher = [x.clone().requires_grad_() for x in (th, tw, tb)]
    value = chunked_divergence(
        chunked_leaves[0], chunked_leaves[1], teacher[0], teacher[1], kind=kind, beta=0.3, temperature=0.8, chunk=chunk,
        student_bias=chunked_leaves[2], teacher_bias=teacher[2], student_softcap=cap, teacher_softcap=cap,
        student_scale=1.5, teacher_scale=0.5, **options,
    )  # fmt: skip
    value.backward(upstream)
    torch.testing.assert_close(value, plain, rtol=1e-11, atol=1e-13)
    for ours, theirs in zip(chunked_leaves, leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)
    assert all(x.grad is None for x in teacher)


@pytest.mark.parametrize("chunk", (1, 6, None))
@pytest.mark.parametrize("cap", (None, 2.0))
def test_logprob(chunk, cap):
    sh, sw, sb, *_ = models()
    labels = torch.arange(T) * 4
    leaves = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    plain = torch.log_softmax(head(*leaves, cap, 1.5) / 0.7, -1).gather(-1, labels[:, None])[:, 0]
    plain.square().sum().backward()
    others = [x.clone().requires_grad_() for x in (sh, sw, sb)]
    value = chunked_logprob(
        others[0], others[1], labels, bias=others[2], softcap=cap, scale=1.5, temperature=0.7, chunk=chunk
    )
    value.square().sum().backward()
    torch.testing.assert_close(value, plain, rtol=1e-11, atol=1e-13)
    for ours, theirs in zip(others, leaves, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", ("reverse_kl", "forward_kl", "jsd"))
@pytest.mark.parametrize("dtype,tolerance", ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)))
def test_low_precision_accumulates_in_float32(kind, dtype, tolerance):
    sh, sw, _, th, tw, _ = models(dtype)
    exact = [sh.double().requires_grad_(), sw.double().requires_grad_()]
    expected = divergence(exact[0] @ exact[1].t(), th.double() @ tw.double().t(), kind=kind)
    expected.sum().backward()
    leaves = [sh.clone().requires_grad_(), sw.clone().requires_grad_()]
    value = chunked_divergence(leaves[0], leaves[1], th, tw, kind=kind, chunk=5)
    value.sum().backward()
    assert value.dtype == torch.float32 and leaves[0].grad.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(leaves, exact, strict=True):
        assert (ours.grad.double() - theirs.grad).norm() / theirs.grad.norm() < tolerance


def test_tied_head_collects_both_uses():
    sh, sw, _, th, tw, _ = models()
    tied = sw.clone().requires_grad_()
    ids = torch.arange(T)
    chunked_divergence(tied[ids] * 2, tied, th, tw, kind="jsd", chunk=4).sum().backward()
    plain = sw.clone().requires_grad_()
    divergence((plain[ids] * 2) @ plain.t(), th @ tw.t(), kind="jsd").sum().backward()
    torch.testing.assert_close(tied.grad, plain.grad)


def test_frozen_head_and_frozen_hidden():
    sh, sw, _, th, tw, _ = models()
    hidden = sh.clone().requires_grad_()
    chunked_divergence(hidden, sw, th, tw, chunk=4).sum().backward()
    weight = sw.clone().requires_grad_()
    chunked_divergence(sh, weight, th, tw, chunk=4).sum().backward()
    assert hidden.grad.abs().sum() > 0 and weight.grad.abs().sum() > 0 and sw.grad is None


def test_no_positions_still_take_part_in_backward():
    sh, sw, _, th, tw, _ = models(rows=0)
    sh.requires_grad_(), sw.requires_grad_()
    chunked_divergence(sh, sw, th, tw).sum().backward()
    assert (sw.grad == 0).all() and sh.grad.shape == (0, H)
    chunked_logprob(sh, sw, torch.zeros(0, dtype=torch.long)).sum().backward()


def test_shared_ids_cut_both_heads():
    sh, sw, _, th, tw, _ = models()
    wide = torch.cat([tw, torch.ones(5, G, dtype=torch.float64)])
    ids = torch.tensor([0, 9, 40])
    expected = chunked_divergence(sh, sw, th, tw, chunk=4)
    torch.testing.assert_close(chunked_divergence(sh, sw, th, wide, shared_ids=V, chunk=4), expected)
    weight = sw.clone().requires_grad_()
    value = chunked_divergence(sh, weight, th, wide, shared_ids=ids, chunk=4)
    torch.testing.assert_close(value, divergence(sh @ sw[ids].t(), th @ tw[ids].t()))
    value.sum().backward()
    assert (weight.grad[1:9] == 0).all() and (weight.grad[ids] != 0).any()
    with pytest.raises(ValueError, match="shared_ids"):
        chunked_divergence(sh, sw, th, wide)


def test_wrong_shapes_are_refused():
    sh, sw, sb, th, tw, _ = models()
    with pytest.raises(ValueError, match="student hidden"):
        chunked_divergence(th, sw, th, tw)
    with pytest.raises(ValueError, match="positions"):
        chunked_divergence(sh[:3], sw, th, tw)
    with pytest.raises(ValueError, match="bias"):
        chunked_divergence(sh, sw, th, tw, student_bias=sb[:4])
    with pytest.raises(ValueError, match="chunk"):
        chunked_divergence(sh, sw, th, tw, chunk=0)


def test_chunk_rows_fit_the_budget():
    assert chunk_rows(151_936, budget_bytes=2**28) * 151_936 * 4 * 4 <= 2**28
    assert chunk_rows(10**9) == 1


class LiveRows(TorchDispatchMode):
    """Rows of [rows, V] tensors that operations make (views and in-place results aside): largest, and peak alive."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.largest, self.peak, self.alive = vocabulary, 0, 0, {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if not isinstance(tensor, torch.Tensor) or tensor.shape[-1:] != (self.vocabulary,) or tensor.dim() != 2:
                continue
            if tensor.untyped_storage().data_ptr() in given:
                continue
            self.alive[id(tensor)] = len(tensor)
            weakref.finalize(tensor, self.alive.pop, id(tensor), None)
            self.largest = max(self.largest, len(tensor))
        self.peak = max(self.peak, sum(self.alive.values()))
        return out


@pytest.mark.parametrize("kind", ("reverse_kl", "forward_kl", "jsd"))
@pytest.mark.parametrize("options", [{}, {"support": "top_k", "k": 5}])
def test_memory_is_one_chunk_whatever_the_length(kind, options):
    def measure(rows):
        sh, sw, _, th, tw, _ = models(torch.float32, rows=rows)
        sh.requires_grad_(), sw.requires_grad_()
        saved = []
        with (
            LiveRows(V) as live,
            torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(tuple(x.shape)), x)[1], lambda x: x),
        ):
            chunked_divergence(sh, sw, th, tw, kind=kind, chunk=4, **options).sum().backward()
        assert (rows, V) not in saved and live.largest <= 4
        return live.peak

    assert measure(32) == measure(96) > 0


def test_plain_divergence_would_fail_the_memory_test():
    with LiveRows(V) as live:
        sh, sw, _, th, tw, _ = models(torch.float32)
        divergence(sh @ sw.t(), th @ tw.t())
    assert live.largest == T
