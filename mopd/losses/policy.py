"""The sampled-token objective `mopd`, sampled estimators of the reverse KL, and candidate replay. [T] tensors in and
out.

Nothing here sees a vocabulary except `LabelLogprob` and what calls it, and nothing reduces over tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mopd.losses.candidates import CandidateSets, cut_to
from mopd.losses.distribution import block_rows, compute_dtype

CORRECTIONS = ("mask", "truncate", "none")
ESTIMATORS = ("k1", "k2", "k3")

K1_REFUSED = (
    "k1 = log p − log q cannot be a loss: its gradient is ∇ log p(y), whose expectation under y ~ p is zero for every "
    "teacher, so the teacher is not in it at all. Use 'k2' (unbiased gradient of the reverse KL), the 'mopd' objective "
    "(the same gradient as a policy gradient) or 'reverse_kl' over the whole vocabulary; k1 is fine as a metric"
)


@dataclasses.dataclass(frozen=True)
class PolicyGradient:
    """Per token, all [T]: `loss` carries the graph, the rest is detached.

    advantage  Â_t, the clip and the outcome part included; 0 where the token is unscored
    weight     w_t; 0 where the token is masked or unscored
    ratio      ρ_t = π_θ/µ
    masked     bool: scored, but ρ_t lies outside the bounds and the correction is "mask"
    clipped    bool: the distillation part was bounded by advantage_clip, or ρ_t by the correction "truncate"
    unscored   bool: a log-probability that the formula needs is missing (NaN) or not finite
    """

    loss: Tensor
    advantage: Tensor
    weight: Tensor
    ratio: Tensor
    masked: Tensor
    clipped: Tensor
    unscored: Tensor


def policy_gradient(
    logp_student: Tensor,
    logp_teacher: Tensor,
    logp_behaviour: Tensor,
    *,
    bounds: tuple[float, float] = (0.2, 5.0),
    correction: str = "mask",
    outcome_advantage: Tensor | float | None = None,
    alpha: float = 0.0,
    advantage_clip: tuple[float, float] | None = None,
    logp_snapshot: Tensor | None = None,
) -> PolicyGradient:
    """The `mopd` objective on sampled tokens: loss_t = −w_t Â_t log π_θ(y_t|c_t), [T] each, no reduction.

        Â_t = sg[log π_T − log π_θ] (bounded by advantage_clip) + alpha · outcome_advantage
        w_t = sg[ρ_t] if low ≤ ρ_t ≤ high else 0,   ρ_t = π_θ/µ

    Source: MiMo-V2-Flash report (arXiv 2601.02780), Eq. 7, and the MOPD paper (arXiv 2606.30406); the mask is IcePop's.
    ``correction``: ``mask`` as above, ``truncate`` bounds ρ_t to [low, high], ``none`` sets w_t = 1.
    ``logp_snapshot`` takes the place of log π_θ inside the advantage (`advantage_student: snapshot`, the policy at
    the start of the step).

    Gradient: −w_t Â_t ∇log π_θ. With µ = π_θ, alpha = 0, no clip and tokens summed over a sequence, its expectation
    over sampled sequences is the gradient of Σ_t E_{c_t ~ sg[π]} KL(π_θ(·|c_t) ‖ π_T(·|c_t)): the sum of per-token
    reverse KLs on the histories that the student visits, the histories themselves held fixed. It is *not* the
    gradient of the sequence-level KL(π_θ(y) ‖ π_T(y)), which would also credit a token with the later log-ratios that
    it leads to (that is, with Σ_{s≥t} of them). Nor is the value an estimate of any KL: only the gradient has a
    meaning.

    Missing scores: a token whose teacher, behaviour (unless the correction is "none") or outcome number is NaN or not
    finite, or whose student gives it no probability at all, is `unscored`: weight, advantage and loss 0, no gradient.
    A missing score is never read as 0.0. A teacher's −inf counts as scored where advantage_clip bounds it. A NaN of the
    student itself is not a missing score but a broken model: the loss is NaN there, for the caller to stop at.

    Use it with thousands of sequences a step; on tens its variance wins over its signal (then take a distribution
    form). Raises ValueError for unknown options, bounds out of order, an alpha without outcome advantages, or shapes
    that differ.
    """
    if correction not in CORRECTIONS:
        raise ValueError(f"unknown correction {correction!r}; there are: {', '.join(CORRECTIONS)}")
    low, high = bounds
    if not 0.0 <= low < high:
        raise ValueError(f"bounds must satisfy 0 <= low < high, got {bounds}")
    if alpha != 0.0 and outcome_advantage is None:
        raise ValueError(f"alpha={alpha} needs outcome_advantage; pass it or set alpha to 0")
    for name, other in (("logp_teacher", logp_teacher), ("logp_behaviour", logp_behaviour)):
        if other.shape != logp_student.shape:
            raise ValueError(
                f"{name} {tuple(other.shape)} and logp_student {tuple(logp_student.shape)} differ in shape"
            )
    dtype = torch.float64 if logp_student.dtype == torch.float64 else torch.float32
    student = logp_student.to(dtype)
    with torch.no_grad():
        now = student.detach()
        teacher, behaviour = logp_teacher.detach().to(dtype), logp_behaviour.detach().to(dtype)
        reference = now if logp_snapshot is None else logp_snapshot.detach().to(dtype)
        # A student that gives its own sample no probability has no usable ratio, advantage or log π_θ.
        usable = torch.isfinite(now) & torch.isfinite(reference) & (teacher < math.inf)
        distillation = torch.where(usable, teacher, 0.0) - torch.where(usable, reference, 0.0)
        clipped = torch.zeros_like(usable)
        if advantage_clip is not None:
            bounded = distillation.clamp(advantage_clip[0], advantage_clip[1])
            clipped = usable & (bounded != distillation)
            distillation = bounded
        advantage = distillation
        if alpha != 0.0:
            outcome = torch.as_tensor(outcome_advantage, dtype=dtype, device=now.device).detach()
            advantage = advantage + alpha * outcome
        usable = usable & torch.isfinite(advantage)
        known = torch.isfinite(behaviour)
        if correction != "none":
            usable = usable & known
        log_ratio = torch.where(usable & known, now, 0.0) - torch.where(usable & known, behaviour, 0.0)
        ratio = log_ratio.exp()
        masked = torch.zeros_like(usable)
        if correction == "mask":
            masked = usable & ~((ratio >= low) & (ratio <= high))
            weight = torch.where(masked, 0.0, ratio)
        elif correction == "truncate":
            weight = ratio.clamp(low, high)
            clipped = clipped | (usable & (weight != ratio))
        else:
            weight = torch.ones_like(ratio)
        weight = torch.where(usable, weight, 0.0)
        advantage = torch.where(usable, advantage, 0.0)
        clipped = clipped & usable
        ratio = torch.where(usable & known, ratio, math.nan)
    # Select before arithmetic: 0 · (−inf) in the loss, or 0 · inf in its gradient, is never formed.
    loss = -(weight * advantage) * torch.where(usable | torch.isnan(student), student, 0.0)
    return PolicyGradient(loss, advantage, weight, ratio, masked, clipped, ~usable)


def sampled_kl(logp_student: Tensor, logp_teacher: Tensor, *, estimator: str = "k3", loss: bool = False) -> Tensor:
    """Estimators of KL(p‖q) = reverse KL from sampled tokens y ~ p, [T] -> [T], no reduction. Source: J. Schulman,
    "Approximating KL divergence" (2020); p student, q teacher, r = q/p.

    k1 = −log r          unbiased in value, high variance, may be negative. Its gradient ∇log p is zero in expectation.
    k2 = ½ (log r)²      biased in value, low variance. Its gradient log(p/q) ∇log p is unbiased for the reverse KL's.
    k3 = r − 1 − log r   unbiased in value where q > 0 implies p > 0, never negative. Its gradient (1 − r) ∇log p has
                         the expectation −Σ q ∇log p: that of the *forward* KL(q‖p), heavy-tailed where q ≫ p.

    All statements need y ~ p, the distribution that is differentiated. ``loss=False`` gives detached metrics;
    ``loss=True`` keeps the graph and refuses k1 with the reason. A NaN score gives NaN: mask it before reducing.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown estimator {estimator!r}; there are: {', '.join(ESTIMATORS)}")
    if loss and estimator == "k1":
        raise ValueError(K1_REFUSED)
    student = logp_student if loss else logp_student.detach()
    dtype = torch.float64 if student.dtype == torch.float64 else torch.float32
    log_ratio = logp_teacher.detach().to(dtype) - student.to(dtype)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def candidate_logprob(
    logits: Tensor,
    sampled: Tensor,
    candidates: CandidateSets | Sequence[Any | None],
    *,
    temperature: float = 1.0,
) -> Tensor:
    """log-probability of sampled[T] under softmax(logits[T, V]/temperature) renormalised over a candidate set per
    token, [T].

    Candidate replay: under top-p or top-k sampling µ renormalises over such a set, and student and
    teacher must do the same over the *same* set, so that with unchanged weights ρ_t = 1. ``candidates`` are
    CandidateSets, or one list of ids per token with ``None`` where nothing was cut off (the whole vocabulary).

    Gradient: that of log softmax restricted to the set; logits outside it get exactly zero.
    Raises ValueError, naming the position, if a sampled id is not in its set, or an id does not fit the vocabulary.
    """
    positions, vocabulary = logits.shape
    if len(candidates) != positions or sampled.shape != (positions,):
        raise ValueError(
            f"{positions} rows of logits, {tuple(sampled.shape)} sampled ids and {len(candidates)} candidate sets "
            "do not match"
        )
    if not isinstance(candidates, CandidateSets):
        candidates = CandidateSets.of(candidates).to(logits.device)
    candidates.check(sampled, vocabulary)
    return LabelLogprob.apply(logits, sampled.long(), temperature, candidates)


class LabelLogprob(torch.autograd.Function):
    """log softmax(logits[N, V] / temperature) of label[N] -> [N], in float32 or better, over candidate sets if given.

    Beyond `logits` and, in the backward pass, their gradient it holds a block of rows at a time: neither the log-softmax
    nor anything else of the logits' size is kept (each softmax is formed once forward and once backward, as
    torch.log_softmax does).
    """

    @staticmethod
    def forward(ctx, logits: Tensor, label: Tensor, temperature: float, candidates: CandidateSets | None) -> Tensor:
        ctx.save_for_backward(logits, label)
        ctx.options = (temperature, candidates)
        found = logits.new_empty(len(logits), dtype=compute_dtype(logits))
        for rows in _blocks(logits):
            scores = torch.log_softmax(_scores(logits, rows, temperature, candidates), dim=-1)
            found[rows] = scores.gather(-1, label[rows].unsqueeze(-1)).squeeze(-1)
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        logits, label = ctx.saved_tensors
        temperature, candidates = ctx.options
        gradient = torch.empty_like(logits)
        for rows in _blocks(logits):
            scale = (upstream[rows] / temperature).unsqueeze(-1)
            part = torch.softmax(_scores(logits, rows, temperature, candidates), dim=-1).mul_(-scale)
            gradient[rows] = part.scatter_add_(-1, label[rows].unsqueeze(-1), scale)
        return gradient, None, None, None


def _blocks(logits: Tensor) -> list[slice]:
    step = block_rows(logits)
    return [slice(start, start + step) for start in range(0, len(logits), step)]


def _scores(logits: Tensor, rows: slice, temperature: float, candidates: CandidateSets | None) -> Tensor:
    """What a block of rows puts into the softmax."""
    scores = logits[rows].to(compute_dtype(logits))
    if temperature != 1.0:
        scores = scores / temperature
    return scores if candidates is None else cut_to(scores, candidates[rows])
