"""Divergences and log-probabilities straight from hidden states and head weights, a chunk of positions at a time.

A [T, V] tensor is never formed: one chunk of logits of each model is alive at once, in the forward and in the
backward pass (which computes the chunk again), so memory is flat in T·V. Values and gradients equal those of the
unchunked functions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.candidates import CandidateSets, cut_to
from mopd.losses.distribution import DivergenceSpec, compute_dtype, divergence_kernel, select_ids

# Alive at once: the chunk's logits of both models and the gradient, and within the kernel a block of rows, which is
# small. 256 MiB for them leaves room on small machines.
CHUNK_BYTES = 256 * 2**20
_LIVE_TENSORS = 4


def chunk_rows(vocabulary: int, *, budget_bytes: int = CHUNK_BYTES, itemsize: int = 4) -> int:
    """Positions per chunk so that a chunk's working tensors fit `budget_bytes`; at least 1."""
    return max(1, budget_bytes // (_LIVE_TENSORS * itemsize * vocabulary))


@dataclasses.dataclass(frozen=True)
class HeadSpec:
    """What a family does between its head's product and the softmax: logits = cap·tanh(scale·(h Wᵀ + b)/cap).

    scale    a factor on the raw logits (Cohere's logit_scale, one over Granite's logits_scaling); 1 for most
    softcap  Gemma 2's final_logit_softcapping; None for most
    """

    scale: float = 1.0
    softcap: float | None = None


@dataclasses.dataclass(frozen=True)
class Head:
    """A model's output head as tensors: weight [V, H], bias [V] or None, and what follows their product."""

    weight: Tensor
    bias: Tensor | None = None
    spec: HeadSpec = HeadSpec()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden[N, H] in float32 (float64 if an input is), without a graph."""
        return _logits(hidden, self.weight, self.bias, self.spec)

    def cut(self, vocabulary: int | None) -> Head:
        """The head of the first `vocabulary` ids (None: all of them)."""
        if vocabulary is None or vocabulary >= len(self.weight):
            return self
        return Head(*_cut(self.weight, self.bias, vocabulary), self.spec)

    def to(self, device: torch.device | str) -> Head:
        """The same head with its tensors on `device`."""
        return Head(self.weight.to(device), None if self.bias is None else self.bias.to(device), self.spec)


# (logits [n, V] with a graph, which rows these are) -> (scalar, {name: [n, ...] detached}).
ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, dict[str, Tensor]]]


def chunked_loss(hidden: Tensor, head: Head, function: ChunkLoss, *, rows: int) -> tuple[Tensor, dict[str, Tensor]]:
    """The sum of `function` over chunks of `rows` positions of hidden[N, H], and its details joined along them.

    Value and gradients (hidden states, head weight, bias) are those of ``function(all logits, slice(0, N))`` for any
    function whose scalar is a sum over positions. Each chunk's logits, loss and gradient are made and dropped before
    the next one's, in the forward pass; the backward pass only multiplies. So one chunk of logits and its graph is
    alive at a time, nothing is computed twice, and the head's weights are not needed in the backward pass. N = 0 gives
    zero with a full graph and no details.

    Low-precision inputs are multiplied with float32 results and accumulators. Only the student's side has a gradient:
    a teacher's logits are the function's business.
    """
    _check(hidden, head.weight, head.bias, "model")
    details: list[dict[str, Tensor]] = []
    gradient = torch.is_grad_enabled()  # inside the function it never is
    loss = _ChunkedLoss.apply(hidden, head.weight, head.bias, head.spec, function, _rows(rows, head.weight), details,
                              gradient)
    return loss, join_details(details)


def join_details(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Per-position tensors of several chunks as one dict. Raises ValueError where the chunks do not name the same."""
    if len(parts) < 2:
        return parts[0] if parts else {}
    if any(part.keys() != parts[0].keys() for part in parts):
        raise ValueError("a loss function named other details for one chunk of tokens than for another: "
                         f"{sorted({name for part in parts for name in part})}")
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def chunked_divergence(
    student_hidden: Tensor,
    student_head: Tensor,
    teacher_hidden: Tensor,
    teacher_head: Tensor,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    support: str = "full",
    k: int | None = None,
    tail: str = "bucket",
    temperature: float = 1.0,
    chunk: int | None = None,
    student_bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    student_softcap: float | None = None,
    teacher_softcap: float | None = None,
    student_scale: float = 1.0,
    teacher_scale: float = 1.0,
    shared_ids: int | Tensor | None = None,
) -> Tensor:
    """`divergence` of two models given by hidden states [T, H], [T, G] and heads [V, H], [V, G] -> [T], no reduction.

    Same values, meaning of the options and gradients as ``divergence(student_hidden @ student_head.T, …)``; gradients
    reach the student's hidden states, head and bias (tied or not: a head is just a tensor), never the teacher's.
    bfloat16 and float16 inputs are multiplied with float32 results and accumulators. `chunk` is the number of
    positions per chunk (None: from a memory budget). `*_bias` [V]; `*_softcap` and `*_scale` as in HeadSpec. With
    shared ids both heads are cut to them first. T = 0 gives an empty tensor that is still part of the graph, so that
    a rank without tokens takes part in the backward pass. Teacher hidden states with a local head follow MOPD's
    remote scoring (a hidden state is far smaller than a row of logits).

    Raises ValueError for options as in `divergence`, and for shapes that do not fit.
    """
    spec = DivergenceSpec(kind, beta, support, k, tail, temperature)
    if shared_ids is not None:
        student_head, student_bias = _cut(student_head, student_bias, shared_ids)
        teacher_head, teacher_bias = _cut(teacher_head, teacher_bias, shared_ids)
    _check(student_hidden, student_head, student_bias, "student")
    _check(teacher_hidden, teacher_head, teacher_bias, "teacher")
    if len(student_hidden) != len(teacher_hidden):
        raise ValueError(f"{len(student_hidden)} student positions and {len(teacher_hidden)} teacher positions differ")
    if len(student_head) != len(teacher_head):
        raise ValueError(
            f"the heads have {len(student_head)} (student) and {len(teacher_head)} (teacher) rows; "
            "name the ids that both vocabularies have with shared_ids"
        )
    return _ChunkedDivergence.apply(
        student_hidden, student_head, student_bias,
        teacher_hidden.detach(), teacher_head.detach(), None if teacher_bias is None else teacher_bias.detach(),
        spec, HeadSpec(student_scale, student_softcap), HeadSpec(teacher_scale, teacher_softcap), _rows(chunk,
        student_head),
    )  # fmt: skip


def chunked_logprob(
    hidden: Tensor,
    head: Tensor,
    labels: Tensor,
    *,
    temperature: float = 1.0,
    chunk: int | None = None,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    candidates: CandidateSets | None = None,
) -> Tensor:
    """log softmax(logits/temperature) of labels[T], from hidden states [T, H] and a head [V, H] -> [T], no reduction.

    Gradients into hidden states, head and bias; memory and options as in `chunked_divergence`. With `candidates` (T
    sets) the softmax runs over each token's set alone, as in `candidate_logprob`: values, gradients and errors are its.
    """
    _check(hidden, head, bias, "model")
    if labels.shape != (len(hidden),):
        raise ValueError(f"labels {tuple(labels.shape)} do not match {len(hidden)} positions")
    if candidates is not None:
        candidates.check(labels, len(head))
    return _ChunkedLogprob.apply(
        hidden, head, bias, labels.long(), temperature, HeadSpec(scale, softcap), _rows(chunk, head), candidates
    )


def _rows(chunk: int | None, head: Tensor) -> int:
    if chunk is None:
        return chunk_rows(len(head), itemsize=compute_dtype(head).itemsize)
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, got {chunk}")
    return chunk


def _cut(head: Tensor, bias: Tensor | None, ids: int | Tensor) -> tuple[Tensor, Tensor | None]:
    return select_ids(head.t(), ids).t(), None if bias is None else select_ids(bias, ids)


def _check(hidden: Tensor, head: Tensor, bias: Tensor | None, who: str) -> None:
    if hidden.dim() != 2 or head.dim() != 2 or hidden.shape[1] != head.shape[1]:
        raise ValueError(
            f"{who} hidden states {tuple(hidden.shape)} and head {tuple(head.shape)} do not fit [T, H] and [V, H]"
        )
    if bias is not None and bias.shape != head.shape[:1]:
        raise ValueError(f"{who} head bias {tuple(bias.shape)} does not fit {len(head)} rows")


# Rows of a low-precision head that are widened at once where the device has no product with wide results.
_HEAD_BLOCK = 8192


def _matmul(left: Tensor, right: Tensor) -> Tensor:
    """left[N, K] @ right[K, M] with float32 (or float64) accumulation and result, without a wide copy of all of
    `right`."""
    dtype = compute_dtype(left, right)
    if left.dtype == right.dtype == dtype:
        return left @ right
    if left.is_cuda and left.dtype == right.dtype and dtype == torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    wide = left.to(dtype)
    if right.dtype == dtype:
        return wide @ right
    out = torch.empty(left.shape[0], right.shape[1], dtype=dtype, device=left.device)
    for start in range(0, right.shape[1], _HEAD_BLOCK):
        block = slice(start, start + _HEAD_BLOCK)
        torch.mm(wide, right[:, block].to(dtype), out=out[:, block])
    return out


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, spec: HeadSpec) -> Tensor:
    logits = _matmul(hidden, head.t())
    if bias is not None:
        logits = logits.add_(bias)
    if spec.scale != 1.0:
        logits = logits.mul_(spec.scale)
    if spec.softcap is not None:
        logits = logits.div_(spec.softcap).tanh_().mul_(spec.softcap)
    return logits


class _HeadGradients:
    """Accumulates the gradients of hidden states, head and bias from chunks of ∂/∂logits, in float32 or float64."""

    def __init__(
        self, hidden: Tensor, head: Tensor, bias: Tensor | None, spec: HeadSpec, needed: tuple[bool, bool, bool]
    ):
        self.source, self.weight, self.spec = hidden, head, spec
        dtype = compute_dtype(hidden, head)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.head = torch.zeros_like(head, dtype=dtype) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=dtype) if needed[2] else None
        self.head_dtype, self.bias_dtype = head.dtype, None if bias is None else bias.dtype

    def add(self, rows: slice, gradient: Tensor, logits: Tensor) -> None:
        """gradient: ∂loss/∂logits [rows, V]; consumed in place."""
        if self.spec.softcap is not None:  # d cap·tanh(x/cap)/dx = 1 − (logits/cap)²
            gradient = gradient.mul_(1.0 - (logits / self.spec.softcap).square_())
        if self.spec.scale != 1.0:
            gradient = gradient.mul_(self.spec.scale)
        if self.hidden is not None:
            self.hidden[rows] = _wide_times_head(gradient, self.weight).to(self.hidden.dtype)
        if self.head is not None:
            self.head.addmm_(gradient.t(), self.source[rows].to(gradient.dtype))
        if self.bias is not None:
            self.bias += gradient.sum(0)

    def result(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        head = None if self.head is None else self.head.to(self.head_dtype)
        return self.hidden, head, None if self.bias is None else self.bias.to(self.bias_dtype)


def _wide_times_head(gradient: Tensor, head: Tensor) -> Tensor:
    """gradient[N, V] @ head[V, H] in the gradient's type, widening a low-precision head block by block."""
    if head.dtype == gradient.dtype:
        return gradient @ head
    out = torch.zeros(gradient.shape[0], head.shape[1], dtype=gradient.dtype, device=head.device)
    for start in range(0, head.shape[0], _HEAD_BLOCK):
        block = slice(start, start + _HEAD_BLOCK)
        out.addmm_(gradient[:, block], head[block].to(gradient.dtype))
    return out


def _slices(count: int, chunk: int) -> list[slice]:
    return [slice(start, min(start + chunk, count)) for start in range(0, count, chunk)]


class _ChunkedDivergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, bias, teacher_hidden, teacher_head, teacher_bias, spec, own, other, chunk):
        ctx.save_for_backward(hidden, head, bias, teacher_hidden, teacher_head, teacher_bias)
        ctx.options = (spec, own, other, chunk)
        values = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden, head, teacher_hidden, teacher_head))
        for rows in _slices(len(hidden), chunk):
            values[rows], _ = divergence_kernel(
                _logits(hidden[rows], head, bias, own),
                _logits(teacher_hidden[rows], teacher_head, teacher_bias, other),
                spec, False,
            )  # fmt: skip
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, head, bias, teacher_hidden, teacher_head, teacher_bias = ctx.saved_tensors
        spec, own, other, chunk = ctx.options
        gradients = _HeadGradients(hidden, head, bias, own, ctx.needs_input_grad[:3])
        for rows in _slices(len(hidden), chunk):
            logits = _logits(hidden[rows], head, bias, own)
            _, gradient = divergence_kernel(
                logits, _logits(teacher_hidden[rows], teacher_head, teacher_bias, other), spec, True
            )
            gradients.add(rows, gradient.mul_(upstream[rows].unsqueeze(-1)), logits)
            del logits, gradient  # before the next chunk's are made
        return *gradients.result(), None, None, None, None, None, None, None


class _ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, bias, labels, temperature, own, chunk, candidates):
        ctx.save_for_backward(hidden, head, bias, labels)
        ctx.options = (temperature, own, chunk, candidates)
        values = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden, head))
        for rows in _slices(len(hidden), chunk):
            logits = _tempered(_logits(hidden[rows], head, bias, own), temperature, candidates, rows)
            picked = logits.gather(-1, labels[rows].unsqueeze(-1)).squeeze(-1)
            values[rows] = picked - torch.logsumexp(logits, dim=-1)
        return values

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, head, bias, labels = ctx.saved_tensors
        temperature, own, chunk, candidates = ctx.options
        gradients = _HeadGradients(hidden, head, bias, own, ctx.needs_input_grad[:3])
        for rows in _slices(len(hidden), chunk):
            logits = _logits(hidden[rows], head, bias, own)
            gradient = -torch.softmax(_tempered(logits, temperature, candidates, rows), dim=-1)
            ones = gradient.new_ones(gradient.shape[0], 1)
            gradient.scatter_add_(-1, labels[rows].unsqueeze(-1), ones)
            gradients.add(rows, gradient.mul_(upstream[rows].unsqueeze(-1) / temperature), logits)
            del logits, gradient
        return *gradients.result(), None, None, None, None, None


def _tempered(logits: Tensor, temperature: float, candidates: CandidateSets | None, rows: slice) -> Tensor:
    """A chunk's logits as they go into the softmax; `candidates` are those of all positions, `rows` the chunk's."""
    logits = logits / temperature
    return logits if candidates is None else cut_to(logits, candidates[rows])


class _ChunkedLoss(torch.autograd.Function):
    """Forward makes value and gradients chunk by chunk; see chunked_loss."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, spec, function, chunk, details, gradient):
        needed = ctx.needs_input_grad[:3] if gradient else (False, False, False)
        gradients = _HeadGradients(hidden, weight, bias, spec, needed)
        total = hidden.new_zeros((), dtype=compute_dtype(hidden, weight))
        for rows in _slices(len(hidden), chunk):
            logits = _logits(hidden[rows], weight, bias, spec)
            if any(needed):
                with torch.enable_grad():
                    loss, detail = function(logits.requires_grad_(), rows)
                    (gradient,) = torch.autograd.grad(loss, logits, materialize_grads=True)
                # An expanded gradient (that of a plain sum) cannot be changed in place.
                gradients.add(rows, gradient.to(logits.dtype).contiguous(), logits.detach())
                del gradient
            else:
                loss, detail = function(logits, rows)
            total += loss.detach()
            details.append(detail)
            del logits, loss  # before the next chunk's are made
        ctx.gradients = gradients.result()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError("a chunked loss keeps its gradients for one backward pass only; compute the loss again")
        # In place: a second copy of the head's gradient would be the largest tensor of all.
        found = [None if g is None else g.mul_(upstream.to(g.dtype)) for g in ctx.gradients]
        ctx.gradients = None
        return *found, None, None, None, None, None
