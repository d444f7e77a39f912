"""The registry of training objectives: name or dotted path + options → an object that gives a loss per token.

To add one, write in a file of your own::

    class MyObjective:
        needs = "full"                      # or "sampled": what the teacher must deliver
        def __init__(self, weight=1.0): ...
        def __call__(self, *, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob,
                     outcome_advantage, candidates=None): return ObjectiveResult(loss, {"my_number": ...})

(`candidates` only where it reads them, see Objective) and name it ``my_package.my_module:MyObjective`` in the
configuration; its keyword arguments are its options.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mopd.losses.candidates import CandidateSets
from mopd.losses.distribution import (
    DivergenceSpec,
    TopK,
    block_rows,
    divergence_and_numbers,
    token_numbers,
)
from mopd.losses.policy import (
    CORRECTIONS,
    ESTIMATORS,
    K1_REFUSED,
    LabelLogprob,
    candidate_logprob,
    policy_gradient,
    sampled_kl,
)

NEEDS = ("sampled", "full")


@dataclasses.dataclass(frozen=True)
class ObjectiveResult:
    """loss [N] with graph, 0 where a token carries none; diagnostics {name: [N] detached}.

    Every built-in objective gives, float with NaN where unknown: ``k1`` (log π_θ − log π_T of the sampled token),
    ``k3``, ``student_entropy`` (nats), and with teacher logits ``teacher_entropy``, ``agreement`` (1 where the
    sampled token is the teacher's most likely), ``reverse_kl`` and ``forward_kl`` (exact); bool: ``unscored`` (the
    teacher's score is missing or not usable: loss 0, count it and ask again), ``infinite`` (the divergence is
    infinite: loss 0), ``masked`` (ρ outside the bounds) and ``clipped``.
    """

    loss: Tensor
    diagnostics: dict[str, Tensor]


class Objective(Protocol):
    """What the learner calls. N loss positions, V vocabulary; `student_logits` carries the graph, nothing else does.

    needs               "sampled" (teacher_logprob is enough) or "full" (teacher_logits [N, V] must be there)
    top_k               optional: k > 0 where `needs` is "full" and the k likeliest ids of a teacher that gives no logits do
                        as well. The call then has teacher_logits None, teacher_top_ids long [N, k], likeliest first, and
                        teacher_top_logprob [N, k] (a row with NaN is a missing score)
    student_logits      [N, V] the rows that predict the labels
    teacher_logits      [N, V] or None; a row with a NaN is a missing score
    teacher_logprob     [N] or None, log π_T of the label at the sampling temperature; NaN is a missing score
    label               [N] long, the sampled tokens
    behaviour_logprob   [N], log µ at the sampling temperature; NaN where unknown
    outcome_advantage   [N] or None

    Under top-p or top-k sampling the call has a further `candidates`, N CandidateSets, if it names that parameter:
    behaviour_logprob and teacher_logprob are then renormalised over them, and what is compared with these must be too
    (`label_logprob`). Otherwise the parameter is left out. An objective without it that reads sampled log-probabilities
    cannot be used with such samples (`takes_candidates`).
    """

    needs: str

    def __call__(
        self,
        *,
        student_logits: Tensor,
        teacher_logits: Tensor | None,
        teacher_logprob: Tensor | None,
        label: Tensor,
        behaviour_logprob: Tensor,
        outcome_advantage: Tensor | None,
    ) -> ObjectiveResult: ...


class MopdObjective:
    """`mopd`: see policy_gradient for formula, source and what its gradient means. Needs the sampled token's score
    only.

    advantage_student "snapshot" reads the policy at the start of the step from the call's `snapshot_logprob` [N].
    A call's `candidates` (see candidate_logprob) renormalise the student, and the teacher where its logits
    are there; a teacher_logprob must then have been renormalised by whoever scored it. The expected gradient is then
    that of the reverse KL between both restricted to the set, the set held fixed: ids that top-p or top-k cut off are
    neither rewarded nor punished.
    """

    needs = "sampled"

    def __init__(
        self,
        bounds: Sequence[float] = (0.2, 5.0),
        correction: str = "mask",
        alpha: float = 0.0,
        advantage_clip: Sequence[float] | None = None,
        advantage_student: str = "current",
        temperature: float = 1.0,
    ):
        if correction not in CORRECTIONS:
            raise ValueError(f"unknown correction {correction!r}; there are: {', '.join(CORRECTIONS)}")
        if advantage_student not in ("current", "snapshot"):
            raise ValueError(f"advantage_student must be 'current' or 'snapshot', got {advantage_student!r}")
        self.bounds = _interval("bounds", bounds, least=0.0)
        self.correction, self.alpha, self.advantage_student = correction, _number("alpha", alpha), advantage_student
        self.advantage_clip = None if advantage_clip is None else _interval("advantage_clip", advantage_clip)
        self.temperature = _positive(temperature)

    def leaves_out(self, student_logprob: Tensor, behaviour_logprob: Tensor) -> Tensor:
        """bool [N]: the tokens that `correction: mask` leaves out, or whose log µ is not known."""
        if self.correction != "mask":
            return torch.zeros_like(student_logprob, dtype=torch.bool)
        ratio = (student_logprob - behaviour_logprob.to(student_logprob.dtype)).exp()
        return ~((ratio >= self.bounds[0]) & (ratio <= self.bounds[1]))

    def __call__(
        self,
        *,
        student_logits: Tensor,
        teacher_logits: Tensor | None,
        teacher_logprob: Tensor | None,
        label: Tensor,
        behaviour_logprob: Tensor,
        outcome_advantage: Tensor | None = None,
        snapshot_logprob: Tensor | None = None,
        candidates: CandidateSets | Sequence[Any] | None = None,
    ) -> ObjectiveResult:
        student = label_logprob(student_logits, label, self.temperature, candidates)
        teacher = _teacher_logprob(teacher_logits, teacher_logprob, label, self.temperature, candidates)
        if self.advantage_student == "snapshot" and snapshot_logprob is None:
            raise ValueError("advantage_student 'snapshot' needs snapshot_logprob, the policy at the start of the step")
        result = policy_gradient(
            student,
            teacher,
            behaviour_logprob,
            bounds=self.bounds,
            correction=self.correction,
            outcome_advantage=outcome_advantage,
            alpha=self.alpha,
            advantage_clip=self.advantage_clip,
            logp_snapshot=snapshot_logprob if self.advantage_student == "snapshot" else None,
        )
        found = diagnose(student_logits, teacher_logits, label, student, teacher, self.temperature)
        found.update(
            unscored=result.unscored, masked=result.masked, clipped=result.clipped, ratio=result.ratio,
            advantage=torch.where(result.unscored, torch.nan, result.advantage),
            infinite=torch.zeros_like(result.unscored),
        )  # fmt: skip
        return ObjectiveResult(result.loss, found)


class DivergenceObjective:
    """`reverse_kl`, `forward_kl`, `jsd`: exact per position, see divergence. Needs the teacher's whole distribution.

    The sampled token decides where the loss is taken, never what it is; µ does not enter, so stale tokens give the
    exact divergence on slightly stale histories. So it is with samples of a truncated policy (top-p, top-k): the
    divergence stays that of the whole distributions, at histories that the truncated policy visits, and has no
    importance weights. Ids that sampling cut off are trained like all others; that is what a student needs that shall
    later be sampled without the cut. A call's `candidates` renormalise only what compares sampled tokens: the
    diagnostics student_logprob, teacher_logprob, k1 and k3.
    """

    needs = "full"

    def __init__(
        self,
        kind: str,
        beta: float = 0.5,
        support: str = "full",
        k: int | None = None,
        tail: str = "bucket",
        temperature: float = 1.0,
    ):
        if k is not None and (isinstance(k, bool) or not isinstance(k, int)):
            raise ValueError(f"k must be a whole number, got {k!r}")
        self.spec = DivergenceSpec(kind, _number("beta", beta), support, k, tail, _positive(temperature))

    @property
    def top_k(self) -> int:
        """How many of the teacher's likeliest ids are as good as its logits; 0: none are."""
        return self.spec.k if self.spec.kind == "forward_kl" and self.spec.support == "top_k" else 0

    def _from_top_k(self, student_logits: Tensor, teacher: TopK, teacher_logprob: Tensor | None, label: Tensor
                    ) -> ObjectiveResult:
        """The call's result from the teacher's likeliest ids; see divergence_and_numbers."""
        scored = ~torch.isnan(teacher.logprob).any(dim=-1)
        # A position without them has no value and, by the kernel, a gradient of exactly zero.
        value, found = divergence_and_numbers(student_logits, teacher, label, self.spec)
        infinite = scored & torch.isinf(value.detach())
        loss = torch.where(scored & ~infinite, value, 0.0)
        found = _completed({name: number.float() for name, number in found.items()}, None, teacher_logprob)
        none = torch.zeros_like(scored)
        found.update(unscored=~scored, infinite=infinite, masked=none, clipped=none)
        return ObjectiveResult(loss, found)

    def __call__(
        self,
        *,
        student_logits: Tensor,
        teacher_logits: Tensor | None,
        teacher_logprob: Tensor | None,
        label: Tensor,
        behaviour_logprob: Tensor,
        outcome_advantage: Tensor | None = None,
        candidates: CandidateSets | Sequence[Any] | None = None,
        teacher_top_ids: Tensor | None = None,
        teacher_top_logprob: Tensor | None = None,
    ) -> ObjectiveResult:
        if teacher_logits is None and teacher_top_logprob is not None and self.top_k:
            return self._from_top_k(student_logits, TopK(teacher_top_ids, teacher_top_logprob), teacher_logprob, label)
        if teacher_logits is None:
            raise ValueError(
                f"objective {self.spec.kind!r} needs the teacher's logits; this teacher gives sampled scores only: "
                "take 'mopd' or 'sampled_kl', or a teacher that answers with logits or hidden states"
            )
        teacher_logits = teacher_logits.detach()
        # The largest logit is NaN if any is, and −inf if no id has mass.
        scored = torch.isfinite(teacher_logits.amax(dim=-1))
        filled = teacher_logits
        if not bool(scored.all()):
            # Select before arithmetic: a missing row becomes the student's own, which has neither loss nor gradient.
            own = student_logits.detach().to(teacher_logits.dtype)
            filled = torch.where(scored.unsqueeze(-1), teacher_logits, own)
        value, found = divergence_and_numbers(student_logits, filled, label, self.spec)
        infinite = scored & torch.isinf(value.detach())
        loss = torch.where(scored & ~infinite, value, 0.0)
        for name in found:
            known = found[name] if name.startswith("student") else torch.where(scored, found[name], torch.nan)
            found[name] = known.float()
        if candidates is None:
            found = _completed(found, None, teacher_logprob)
        else:
            found = over_candidates(found, student_logits, teacher_logits, teacher_logprob, label, self.spec.temperature,
                                    candidates)
        none = torch.zeros_like(scored)
        found.update(unscored=~scored, infinite=infinite, masked=none, clipped=none)
        return ObjectiveResult(loss, found)


class SampledKLObjective:
    """`sampled_kl`: k2 (unbiased gradient of the reverse KL) or k3 (gradient of the forward KL) as a loss; see
    sampled_kl.

    Its statements hold for tokens sampled by the very policy that is trained. It has no importance weights: with stale
    tokens take `mopd`. k1 is refused, with the reason. Under top-p or top-k that policy is the one restricted to a call's
    `candidates`, and the KL that is estimated is the one between both models restricted to them.
    """

    needs = "sampled"

    def __init__(self, estimator: str = "k2", temperature: float = 1.0):
        if estimator == "k1":
            raise ValueError(K1_REFUSED)
        if estimator not in ESTIMATORS:
            raise ValueError(f"unknown estimator {estimator!r}; as a loss there are: k2, k3")
        self.estimator, self.temperature = estimator, _positive(temperature)

    def __call__(
        self,
        *,
        student_logits: Tensor,
        teacher_logits: Tensor | None,
        teacher_logprob: Tensor | None,
        label: Tensor,
        behaviour_logprob: Tensor,
        outcome_advantage: Tensor | None = None,
        candidates: CandidateSets | Sequence[Any] | None = None,
    ) -> ObjectiveResult:
        student = label_logprob(student_logits, label, self.temperature, candidates)
        teacher = _teacher_logprob(teacher_logits, teacher_logprob, label, self.temperature, candidates)
        scored = torch.isfinite(teacher) & ~torch.isinf(student.detach())
        # Select before arithmetic: the gradient of an infinite value is infinite too, and 0 · inf would be NaN.
        infinite = scored & torch.isinf(sampled_kl(student, teacher, estimator=self.estimator))
        kept = scored & ~infinite
        value = sampled_kl(torch.where(kept, student, 0.0), torch.where(kept, teacher, 0.0),
                           estimator=self.estimator, loss=True)
        loss = torch.where(kept, value, 0.0)
        found = diagnose(student_logits, teacher_logits, label, student, teacher, self.temperature)
        none = torch.zeros_like(scored)
        found.update(unscored=~scored, infinite=infinite, masked=none, clipped=none)
        return ObjectiveResult(loss, found)


def reverse_kl(support: str = "full", k: int | None = None, tail: str = "bucket", temperature: float = 1.0):
    """The `reverse_kl` objective."""
    return DivergenceObjective("reverse_kl", support=support, k=k, tail=tail, temperature=temperature)


def forward_kl(support: str = "full", k: int | None = None, tail: str = "bucket", temperature: float = 1.0):
    """The `forward_kl` objective."""
    return DivergenceObjective("forward_kl", support=support, k=k, tail=tail, temperature=temperature)


def jsd(beta: float = 0.5, support: str = "full", k: int | None = None, tail: str = "bucket", temperature: float = 1.0):
    """The `jsd` objective."""
    return DivergenceObjective("jsd", beta=beta, support=support, k=k, tail=tail, temperature=temperature)


OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "mopd": MopdObjective,
    "reverse_kl": reverse_kl,
    "forward_kl": forward_kl,
    "jsd": jsd,
    "sampled_kl": SampledKLObjective,
}


def make_objective(name: str, options: Mapping[str, Any] | None = None) -> Objective:
    """The objective called `name` (a built-in, or ``package.module:factory``), built with `options` as keyword
    arguments.

    Raises ValueError, naming what exists, for an unknown name, module, factory or option, for a value that the
    objective refuses, and for a factory whose product has no `needs` of "sampled" or "full".
    """
    factory = _factory(name)
    given = dict(options or {})
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"objective {name!r}: cannot read its signature ({error})") from error
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unknown = sorted(set(given) - set(known))
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        raise ValueError(
            f"objective {name!r} has no option {', '.join(map(repr, unknown))}; it has: {', '.join(known) or 'none'}"
        )
    try:
        objective = factory(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"objective {name!r}: {error}") from error
    if not callable(objective) or getattr(objective, "needs", None) not in NEEDS:
        raise ValueError(
            f"objective {name!r} made {type(objective).__name__}, which must be callable and have needs = 'sampled' "
            "or 'full'"
        )
    return objective


def checked_result(result: Any, name: str, tokens: int) -> ObjectiveResult:
    """What objective `name` answered for `tokens` tokens, its diagnostics without a graph.

    Raises ValueError where it is no ObjectiveResult of one loss per token that the student's logits reach (where a
    gradient is wanted), with one number per token in every diagnostic: a loss of another shape would be spread over the
    tokens silently.
    """
    def bad(what: str) -> ValueError:
        return ValueError(f"train.objective: {name} {what} (see docs/architecture.md, \"An objective\")")

    loss = getattr(result, "loss", None)
    if not isinstance(result, ObjectiveResult) or not isinstance(loss, Tensor):
        raise bad(f"answered with {type(result).__name__}; it must be ObjectiveResult(loss, diagnostics), with tensors")
    if loss.shape != (tokens,):
        raise bad(f"gave a loss of shape {tuple(loss.shape)} for {tokens} tokens; it must be one number per token "
                  f"({tokens},), neither averaged nor weighted")
    if torch.is_grad_enabled() and not loss.requires_grad:
        raise bad("gave a loss that does not depend on student_logits (no gradient), so nothing would be trained; look for "
                  "detach(), argmax, no_grad() or numpy in it")
    for key, value in result.diagnostics.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != tokens:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise bad(f"gave the diagnostic {key!r} as {shape} for {tokens} tokens; it must be one number per token")
    return ObjectiveResult(loss, {key: value.detach() for key, value in result.diagnostics.items()})


def takes_candidates(objective: Objective) -> bool:
    """Whether calls of `objective` may name `candidates`."""
    parameters = inspect.signature(objective).parameters.values()
    return any(p.name == "candidates" or p.kind is p.VAR_KEYWORD for p in parameters)


def _factory(name: str) -> Callable[..., Objective]:
    if name in OBJECTIVES:
        return OBJECTIVES[name]
    if ":" not in name:
        raise ValueError(
            f"unknown objective {name!r}; there are: {', '.join(OBJECTIVES)}, or your own as 'package.module:factory'"
        )
    module_name, attribute = name.split(":", 1)
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"objective {name!r}: cannot import {module_name!r} ({error}); is its package installed?"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"objective {name!r}: module {module_name!r} has no {attribute!r}")
    factory = getattr(module, attribute)
    if not callable(factory):
        raise ValueError(f"objective {name!r} is a {type(factory).__name__}, which cannot be called")
    return factory


def label_logprob(
    logits: Tensor, label: Tensor, temperature: float = 1.0, candidates: CandidateSets | Sequence[Any] | None = None
) -> Tensor:
    """log softmax(logits[N, V]/temperature) of label[N] -> [N] with graph, in float32 or better; over candidates if
    given."""
    if candidates is not None:
        return candidate_logprob(logits, label, candidates, temperature=temperature)
    return LabelLogprob.apply(logits, label.long(), temperature, None)


def _teacher_logprob(
    teacher_logits: Tensor | None,
    teacher_logprob: Tensor | None,
    label: Tensor,
    temperature: float,
    candidates: CandidateSets | Sequence[Any] | None = None,
) -> Tensor:
    """[N], NaN where missing: the given scores, or the label's entry of the given logits."""
    with torch.no_grad():
        if teacher_logprob is not None:
            return teacher_logprob.detach()
        if teacher_logits is None:
            raise ValueError("the teacher gave neither logits nor the sampled tokens' log-probabilities")
        return label_logprob(teacher_logits, label, temperature, candidates)


@torch.no_grad()
def diagnose(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    label: Tensor,
    student_logprob: Tensor | None = None,
    teacher_logprob: Tensor | None = None,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """The per-token numbers that every objective reports (see ObjectiveResult), [N] each, detached, NaN where unknown.

    A label's log-probability is read from the logits where it is not given.
    """
    found: dict[str, Tensor] = {}
    step = block_rows(student_logits)
    for start in range(0, max(len(label), 1), step):
        rows = slice(start, start + step)
        student = torch.log_softmax(student_logits[rows].detach().float() / temperature, dim=-1)
        teacher = None if teacher_logits is None else torch.log_softmax(
            teacher_logits[rows].detach().float() / temperature, dim=-1)
        for name, part in token_numbers(student, teacher, label[rows]).items():
            # Made once: a small tensor kept per block would scatter the heap that the blocks come from.
            found.setdefault(name, part.new_empty(len(label)))[rows] = part
    return _completed(found, student_logprob, teacher_logprob)


@torch.no_grad()
def over_candidates(
    found: dict[str, Tensor],
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    teacher_logprob: Tensor | None,
    label: Tensor,
    temperature: float,
    candidates: CandidateSets | Sequence[Any],
) -> dict[str, Tensor]:
    """`found` with what it says of the sampled tokens (student_logprob, teacher_logprob, k1, k3) renormalised over their
    candidate sets; a given teacher_logprob [N] already is."""
    student = label_logprob(student_logits.detach(), label, temperature, candidates)
    return _completed(found, student, _teacher_logprob(teacher_logits, teacher_logprob, label, temperature, candidates))


def _completed(found: dict[str, Tensor], student_logprob: Tensor | None, teacher_logprob: Tensor | None
               ) -> dict[str, Tensor]:
    """Numbers with the log-probabilities that were given in place of the computed ones, and k1 and k3 of them."""
    for name, given in (("student_logprob", student_logprob), ("teacher_logprob", teacher_logprob)):
        if given is not None:
            found[name] = given.detach().float()
    if "teacher_logprob" not in found:
        raise ValueError("the teacher gave neither logits nor the sampled tokens' log-probabilities")
    for estimator in ("k1", "k3"):
        found[estimator] = sampled_kl(found["student_logprob"], found["teacher_logprob"], estimator=estimator)
    return found


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise ValueError(f"{name} must be a number, got {value!r}")
    return float(value)


def _interval(name: str, value: Any, least: float = -math.inf) -> tuple[float, float]:
    """[low, high] with low < high, neither below `least`."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise ValueError(f"{name} must be [low, high], got {value!r}")
    low, high = (_number(name, part) for part in value)
    if not least <= low < high:
        raise ValueError(f"{name} must be [low, high] with {f'{least:g} <= ' if math.isfinite(least) else ''}low < high, got "
                         f"{list(value)}")
    return low, high


def _positive(temperature: float) -> float:
    if not 0 < _number("temperature", temperature) < math.inf:
        raise ValueError(f"temperature must be positive and finite, got {temperature}")
    return float(temperature)
