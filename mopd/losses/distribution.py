"""Divergences between two next-token distributions, exact over the vocabulary or over top-k ids with a tail.

Pure tensor functions with closed-form gradients; knows nothing about hidden states, batches or aggregation.

Numerics: every product p·log(p/q) is formed only where p is positive (select before arithmetic), so logits of −inf or
±1e4 give neither NaN nor a lost gradient. float16/bfloat16 inputs are computed in float32, float64 in float64.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

KINDS = ("reverse_kl", "forward_kl", "jsd")
SUPPORTS = ("full", "top_k")
TAILS = ("bucket", "renormalise", "drop")


@dataclasses.dataclass(frozen=True)
class DivergenceSpec:
    """Which divergence: checked once, then handed to the kernels. `temperature` divides both models' logits."""

    kind: str = "reverse_kl"
    beta: float = 0.5
    support: str = "full"
    k: int | None = None
    tail: str = "bucket"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"unknown divergence kind {self.kind!r}; there are: {', '.join(KINDS)}")
        if self.kind == "jsd" and not 0.0 < self.beta < 1.0:
            raise ValueError(
                f"jsd needs 0 < beta < 1, got {self.beta}; its limits are forward_kl (0) and reverse_kl (1)"
            )
        if self.support not in SUPPORTS:
            raise ValueError(f"unknown support {self.support!r}; there are: {', '.join(SUPPORTS)}")
        if self.support == "top_k" and (self.k is None or self.k < 1):
            raise ValueError(f"support 'top_k' needs k >= 1, got k={self.k}")
        if self.support == "full" and self.k is not None:
            raise ValueError(f"k={self.k} has no meaning on full support; set support='top_k' or leave k out")
        if self.tail not in TAILS:
            raise ValueError(f"unknown tail {self.tail!r}; there are: {', '.join(TAILS)}")
        if not (self.temperature > 0.0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, got {self.temperature}")


def divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    kind: str = "reverse_kl",
    beta: float = 0.5,
    support: str = "full",
    k: int | None = None,
    tail: str = "bucket",
    temperature: float = 1.0,
    shared_ids: int | Tensor | None = None,
) -> Tensor:
    """Divergence per position, [T, V] and [T, V] -> [T], no reduction (any leading shape works in place of T).

    With p = softmax(student/temperature), q = softmax(teacher/temperature):

    * ``reverse_kl``  Σ p (log p − log q)   mode seeking (MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649)
    * ``forward_kl``  Σ q (log q − log p)   mass covering, the classical distillation loss (Hinton et al., arXiv 1503.02531)
    * ``jsd``         β KL(q‖m) + (1−β) KL(p‖m) with m = β q + (1−β) p, 0 < β < 1: the generalised Jensen–Shannon
      divergence of GKD (arXiv 2306.13649, section 2), *not* divided by anything. For β → 0 it vanishes like
      β·KL(q‖p), for β → 1 like (1−β)·KL(p‖q): jsd/β and jsd/(1−β) tend to forward_kl and reverse_kl.

    Gradient: flows through the student's logits only, and is the exact derivative of the value (the position's
    distribution is differentiated, the choice of the position and of the top-k ids is not). The teacher never gets one.

    ``support="top_k"`` looks at k ids per position, chosen by the student (reverse_kl), the teacher (forward_kl) or
    both (jsd: the union). ``tail``: ``bucket`` adds one outcome with the remaining mass 1 − Σ_topk of each side,
    which is a true divergence of the coarsened distributions, never negative and never above the full value;
    ``renormalise`` conditions both sides on the ids; ``drop`` leaves the rest out, and so may be negative and is no
    divergence.

    Not for: an advantage (the value is that of a position, the same for every token that might be sampled there, so
    multiplied with log π it trains nothing); ``reverse_kl`` towards a teacher that rules out what the student says
    (infinite there, so just these positions teach nothing; ``jsd`` bears it); ``renormalise`` with one id, or with ids
    that hold little of either side's mass: what lies outside has no influence at all.

    ``shared_ids``: the first n ids (int) or these ids (long [n]) are what both vocabularies share; the softmax of
    either side is taken over them alone. Needed when the two have different numbers of rows.

    An infinite value is reported as +inf (p > 0 where q = 0 for reverse_kl, and the mirror image) and gives its
    position a gradient of zero, because the true one does not exist; the caller masks and counts it. A position with
    NaN logits gives NaN.

    Raises ValueError for an unknown option or for shapes that do not fit.
    """
    spec = DivergenceSpec(kind, beta, support, k, tail, temperature)
    if shared_ids is not None:
        student_logits = select_ids(student_logits, shared_ids)
        teacher_logits = select_ids(teacher_logits, shared_ids)
    if student_logits.shape != teacher_logits.shape:
        raise ValueError(
            f"student logits {tuple(student_logits.shape)} and teacher logits {tuple(teacher_logits.shape)} differ in "
            "shape; with two vocabulary sizes name the ids that both have with shared_ids"
        )
    vocabulary = student_logits.shape[-1]
    flat = _Divergence.apply(
        student_logits.reshape(-1, vocabulary), teacher_logits.detach().reshape(-1, vocabulary), spec
    )
    return flat.reshape(student_logits.shape[:-1])


@dataclasses.dataclass(frozen=True)
class TopK:
    """What is known of a teacher that tells its likeliest ids alone, at T positions.

    ids      long [T, k], likeliest first, no id twice in a row; one that the student does not have counts to the rest
    logprob  [T, k] their log-probabilities under its whole softmax, at the temperature of the DivergenceSpec; a row with NaN
             is a missing answer
    """

    ids: Tensor
    logprob: Tensor

    def __getitem__(self, rows: slice) -> TopK:
        return TopK(self.ids[rows], self.logprob[rows])


def divergence_and_numbers(
    student_logits: Tensor, teacher: Tensor | TopK, label: Tensor, spec: DivergenceSpec
) -> tuple[Tensor, dict[str, Tensor]]:
    """`divergence` of [T, V] logits -> [T], and the `token_numbers` of the same rows from the same log-softmaxes.

    Of a teacher that tells its TopK alone forward_kl over these ids is the same number, value and gradient, as from its
    logits: the tail's mass is 1 − Σ of the ids'. Its numbers lack what needs the whole distribution, and `forward_kl` is
    the divergence of the distributions coarsened to these ids and the rest, a lower bound. Raises ValueError for another
    kind or support, whose ids are not the teacher's (METHOD section 3)."""
    numbers: dict[str, Tensor] = {}
    if isinstance(teacher, TopK):
        if spec.kind != "forward_kl" or spec.support != "top_k":
            raise ValueError(f"{spec.kind} over {spec.support} support cannot be had from the teacher's likeliest ids alone; "
                             "take forward_kl with support='top_k'")
        teacher = TopK(teacher.ids.long(), teacher.logprob.detach())
    else:
        teacher = teacher.detach()
    return _Divergence.apply(student_logits, teacher, spec, label, numbers), numbers


@torch.no_grad()
def token_numbers(student: Tensor, teacher: Tensor | None, label: Tensor) -> dict[str, Tensor]:
    """What every objective reports of a token, [T] each, from log-probabilities [T, V] of both models: entropies, the
    label's log-probabilities, both exact KLs, and whether the label is the teacher's most likely token (NaN rows stay
    NaN). Without a teacher only the student's numbers."""
    ids, p = label.unsqueeze(-1), student.exp()
    own = _weighted(p, student)
    found = {"student_entropy": -own, "student_logprob": student.gather(-1, ids).squeeze(-1)}
    if teacher is None:
        return found
    q = teacher.exp()
    theirs = _weighted(q, teacher)
    top = (teacher.argmax(-1) == label).float()
    return found | {
        "teacher_entropy": -theirs, "teacher_logprob": teacher.gather(-1, ids).squeeze(-1),
        "reverse_kl": own - _weighted(p, teacher), "forward_kl": theirs - _weighted(q, student),
        "agreement": torch.where(torch.isnan(theirs), torch.nan, top),
    }  # fmt: skip


def _weighted(mass: Tensor, log_mass: Tensor) -> Tensor:
    """Σ_v mass · log_mass where there is mass; NaN rows stay NaN."""
    return log_mass.masked_fill(mass == 0, 0.0).mul_(mass).sum(-1)


def select_ids(logits: Tensor, ids: int | Tensor) -> Tensor:
    """The columns of logits[..., V] that two vocabularies share: the first `ids` of them, or the listed ones."""
    if isinstance(ids, int):
        if not 0 < ids <= logits.shape[-1]:
            raise ValueError(f"shared_ids={ids} does not fit a vocabulary of {logits.shape[-1]} rows")
        return logits[..., :ids]
    return logits.index_select(-1, ids)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """float64 if any input is float64, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


class _Divergence(torch.autograd.Function):
    """Closed-form gradient computed with the value: one [T, V] tensor is kept for the backward pass, nothing else."""

    @staticmethod
    def forward(
        ctx, student_logits: Tensor, teacher: Tensor | TopK, spec: DivergenceSpec, label: Tensor | None = None,
        numbers: dict[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        value, gradient = divergence_kernel(
            student_logits, teacher, spec, ctx.needs_input_grad[0], student_logits.dtype, label, numbers
        )
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream.unsqueeze(-1)).to(gradient.dtype), None, None, None, None


# Rows are worked through in blocks, so that intermediate tensors stay in a CPU's cache (and out of a GPU's way): on one
# core at [2048, 8192] that is several times faster than whole tensors, which wait for fresh memory pages.
_BLOCK_BYTES = {"cpu": 2**19, "other": 2**27}


def block_rows(logits: Tensor) -> int:
    """Rows of logits[T, V] to work on at once."""
    budget = _BLOCK_BYTES.get(logits.device.type, _BLOCK_BYTES["other"])
    return max(1, budget // (4 * max(logits.shape[-1], 1)))


@torch.no_grad()
def divergence_kernel(
    student_logits: Tensor,
    teacher: Tensor | TopK,
    spec: DivergenceSpec,
    with_gradient: bool,
    gradient_dtype: torch.dtype | None = None,
    label: Tensor | None = None,
    numbers: dict[str, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """value[T] and d value / d student_logits [T, V] (None unless asked for), of logits [T, V] (or the teacher's TopK),
    without autograd. With label[T] `numbers` is filled with the token_numbers.

    Beyond its results it holds a block of rows at a time (see block_rows).
    """
    top = isinstance(teacher, TopK)
    dtype = compute_dtype(student_logits, teacher.logprob if top else teacher)
    value = student_logits.new_empty(len(student_logits), dtype=dtype)
    gradient = torch.empty_like(student_logits, dtype=gradient_dtype or dtype) if with_gradient else None
    step = block_rows(student_logits)
    for start in range(0, max(len(student_logits), 1), step):
        rows = slice(start, start + step)
        student = _log_softmax(student_logits[rows], dtype, spec.temperature)
        theirs = teacher[rows] if top else _log_softmax(teacher[rows], dtype, spec.temperature)
        if numbers is not None:
            made = _top_numbers(student, theirs, label[rows], spec) if top else token_numbers(student, theirs, label[rows])
            for name, found in made.items():
                # Made once: a small tensor kept per block would scatter the heap that the blocks come from.
                numbers.setdefault(name, torch.empty_like(value))[rows] = found
        value[rows], part = _block(student, theirs, spec, with_gradient)
        if gradient is not None:
            gradient[rows] = part
    return value, gradient


def _log_softmax(logits: Tensor, dtype: torch.dtype, temperature: float) -> Tensor:
    logits = logits.to(dtype)
    return torch.log_softmax(logits if temperature == 1.0 else logits / temperature, dim=-1)


def _block(
    student: Tensor, teacher: Tensor | TopK, spec: DivergenceSpec, with_gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """divergence_kernel on a block of rows of log-probabilities, which are consumed in place.

    Derivation: over outcomes o with student log-mass l_o (single ids, and the tail bucket) let g_o = ∂value/∂l_o. Since
    ∂l_v/∂z_u = 1[u=v] − p_u for an id and p_u 1[u∈tail]/P_tail − p_u for the bucket,
    ∂value/∂z_u = g_u 1[u∈ids] + g_tail p_u/P_tail 1[u∈tail] − p_u Σ_o g_o.
    """
    if spec.support == "full":
        value, gradient = _full(student, teacher, spec, with_gradient)
    elif isinstance(teacher, TopK):
        value, gradient = _given_top_k(student, teacher, spec, with_gradient)
    else:
        value, gradient = _top_k(student, teacher, spec, with_gradient)
    if gradient is not None:
        if spec.temperature != 1.0:
            gradient = gradient / spec.temperature
        gradient = gradient.masked_fill_(~torch.isfinite(value).unsqueeze(-1), 0.0)
    return value, gradient


def _full(student: Tensor, teacher: Tensor, spec: DivergenceSpec, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    value, outcome_gradient, total = _outcomes(student, teacher, spec, normalised=True)
    if not with_gradient:
        return value, None
    return value, outcome_gradient.sub_(student.exp_().mul_(total.unsqueeze(-1)))


def _outcomes(
    student: Tensor, teacher: Tensor, spec: DivergenceSpec, *, normalised: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sum of the terms over outcomes, their gradients g_o in the student's log-mass, and Σ_o g_o.

    student, teacher: log-masses [T, O]. With `normalised` (Σ_o P_o = Σ_o Q_o = 1) a part of g proportional to P cancels
    against −p Σ g; it is left out on both sides, so that equal models give a gradient of exactly zero.
    """
    p, q = student.exp(), teacher.exp()
    if spec.kind == "reverse_kl":
        terms = _difference(student, teacher, p == 0).mul_(p)
        gradient = terms if normalised else terms + p
        return terms.sum(-1), gradient, gradient.sum(-1)
    if spec.kind == "forward_kl":
        terms = _difference(teacher, student, q == 0).mul_(q)
        total = -torch.ones_like(q[..., 0]) if normalised else -q.sum(-1)
        return terms.sum(-1), q.neg_(), total
    # jsd: with δ = log q − log p and c = β for δ ≤ 0, 1 − β for δ > 0, the larger of log(p/m) and log(q/m) is
    # l = −log1p(c · expm1(−|δ|)) and the smaller one l − |δ|. Exactly zero at δ = 0, without overflow anywhere; a
    # mixture formed with logaddexp would leave rounding noise where the models agree. Where β is next to 0 or 1 that
    # difference cancels, and the smaller one is written out: −log1p((1 − c) · expm1(|δ|)), as far as expm1 reaches.
    ratio = _difference(teacher, student, (p == 0) & (q == 0))
    teacher_below, gap = ratio <= 0, ratio.abs()
    share = torch.where(teacher_below, p.new_tensor(spec.beta), p.new_tensor(1.0 - spec.beta))
    larger = torch.expm1(-gap).mul_(share).log1p_().neg_()
    smaller = larger - gap
    if min(spec.beta, 1.0 - spec.beta) < 0.05:
        rest = torch.where(teacher_below, p.new_tensor(1.0 - spec.beta), p.new_tensor(spec.beta))
        written_out = torch.expm1(gap.clamp(max=80.0)).mul_(rest).log1p_().neg_()
        smaller = torch.where(gap < 80.0, written_out, smaller)
    student_terms = torch.where(teacher_below, larger, smaller).masked_fill_(p == 0, 0.0).mul_(p).mul_(1.0 - spec.beta)
    teacher_terms = torch.where(teacher_below, smaller, larger).masked_fill_(q == 0, 0.0).mul_(q).mul_(spec.beta)
    # ∂/∂l of both terms together is (1−β) p log(p/m): what comes from ∂m/∂l cancels the +1 of the product rule.
    total = student_terms.sum(-1)
    return total + teacher_terms.sum(-1), student_terms, total


def _difference(left: Tensor, right: Tensor, without_mass: Tensor) -> Tensor:
    """left − right, and 0 where there is no mass to weigh it (−inf minus −inf among them). NaN logits stay NaN."""
    return (left - right).masked_fill_(without_mass, 0.0)


def _top_k(student: Tensor, teacher: Tensor, spec: DivergenceSpec, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    ids, valid = top_k_ids(student, teacher, spec.kind, spec.k)
    inside = torch.zeros_like(student, dtype=torch.bool).scatter(-1, ids, True)
    tail = torch.logsumexp(teacher.masked_fill(inside, -math.inf), dim=-1, keepdim=True) if spec.tail == "bucket" else None
    return _on_ids(student, teacher.gather(-1, ids), tail, ids, valid, inside, spec, with_gradient)


def _given_top_k(student: Tensor, teacher: TopK, spec: DivergenceSpec, with_gradient: bool
                 ) -> tuple[Tensor, Tensor | None]:
    """_top_k where the teacher's ids and their log-probabilities are all that is known of it."""
    valid = teacher.ids < student.shape[-1]
    ids, t = teacher.ids.masked_fill(~valid, 0), teacher.logprob.to(student.dtype)
    # Another place may stand for an id that the student lacks, so the mask is added up.
    inside = torch.zeros_like(student, dtype=torch.int8).scatter_add(-1, ids, valid.to(torch.int8)) > 0
    # In float64: of mass next to 1 too little would be left in float32. Rounding may put the sum above 1.
    mass = teacher.logprob.double().masked_fill(~valid, -math.inf).exp().sum(-1, keepdim=True)
    tail = torch.log1p(-mass.clamp(max=1.0)).to(student.dtype) if spec.tail == "bucket" else None
    return _on_ids(student, t, tail, ids, valid, inside, spec, with_gradient)


def _top_numbers(student: Tensor, teacher: TopK, label: Tensor, spec: DivergenceSpec) -> dict[str, Tensor]:
    """token_numbers as far as the teacher's likeliest ids say them."""
    coarse, _ = _given_top_k(student, teacher, dataclasses.replace(spec, tail="bucket"), False)
    known = ~torch.isnan(teacher.logprob).any(-1)
    return token_numbers(student, None, label) | {
        "forward_kl": coarse, "agreement": torch.where(known, (teacher.ids[:, 0] == label).to(coarse.dtype), torch.nan)}


def _on_ids(student: Tensor, t: Tensor, t_tail: Tensor | None, ids: Tensor, valid: Tensor, inside: Tensor,
            spec: DivergenceSpec, with_gradient: bool) -> tuple[Tensor, Tensor | None]:
    """The divergence over chosen ids: t [T, K] the teacher's log-mass of ids [T, K] as far as `valid`, t_tail [T, 1] that of
    the rest (for a bucket), inside [T, V] which ids these are."""
    minus_inf, count = -math.inf, ids.shape[-1]
    s = student.gather(-1, ids).masked_fill(~valid, minus_inf)
    t = t.masked_fill(~valid, minus_inf)
    if spec.tail == "bucket":
        s_tail = torch.logsumexp(student.masked_fill(inside, minus_inf), dim=-1, keepdim=True)
        s, t = torch.cat([s, s_tail], -1), torch.cat([t, t_tail], -1)
    elif spec.tail == "renormalise":
        s, t = _normalise(s), _normalise(t)
    value, g, total = _outcomes(s, t, spec, normalised=spec.tail != "drop")
    if not with_gradient:
        return value, None
    if spec.tail == "renormalise":  # a softmax over the ids alone: nothing reaches the other logits
        return value, torch.zeros_like(student).scatter_add(-1, ids, g - s.exp() * total.unsqueeze(-1))
    gradient = (-student.exp() * total.unsqueeze(-1)).scatter_add(-1, ids, g[..., :count])
    if spec.tail == "bucket":
        share = torch.where(inside | (student == minus_inf), minus_inf, student - _finite(s_tail)).exp()
        gradient = gradient + share * g[..., count:]
    return value, gradient


def _normalise(log_mass: Tensor) -> Tensor:
    return log_mass - _finite(torch.logsumexp(log_mass, dim=-1, keepdim=True))


def _finite(log_mass: Tensor) -> Tensor:
    """−inf (an empty set of outcomes) replaced by 0, so that subtracting it leaves the −inf of its members."""
    return torch.where(log_mass == -math.inf, 0.0, log_mass)


def top_k_ids(student: Tensor, teacher: Tensor, kind: str, k: int) -> tuple[Tensor, Tensor]:
    """ids[T, K] that a top-k divergence looks at, and valid[T, K] which marks each id's first mention.

    K = min(k, V); for jsd the student's ids followed by the teacher's, so up to twice that, duplicates not valid.
    """
    k = min(k, student.shape[-1])
    if kind == "reverse_kl":
        ids = student.topk(k, dim=-1).indices
        return ids, torch.ones_like(ids, dtype=torch.bool)
    if kind == "forward_kl":
        ids = teacher.topk(k, dim=-1).indices
        return ids, torch.ones_like(ids, dtype=torch.bool)
    of_student, of_teacher = student.topk(k, dim=-1).indices, teacher.topk(k, dim=-1).indices
    seen = torch.zeros_like(student, dtype=torch.bool).scatter(-1, of_student, True)
    new = ~seen.gather(-1, of_teacher)
    return torch.cat([of_student, of_teacher], -1), torch.cat([torch.ones_like(new), new], -1)
