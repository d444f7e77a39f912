"""A few seconds of proof, on the user's own student, teachers and objective, that the training signal is what it should be.

    alignment    the packed forward gives every action token the score that the model's plain forward gives it
    shift        planting an improbable token moves its own score and none before it, at every position of a turn
    split        the scores do not depend on how rows are cut into micro-batches
    mask         exactly the action tokens carry loss, whatever a missing score holds
    identity     where student and teacher agree, loss and gradient are zero
    signal       another teacher gives another gradient
    enumeration  over a 4-id vocabulary the expected `mopd` gradient is that of the per-token reverse KLs

`mopd selftest` runs it alone; every training launch runs it first unless train.selftest=false. It changes nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.markup import escape

from mopd.learner.engine import Learner
from mopd.learner.packing import MicroBatch, pack
from mopd.learner.step import LearnerStep
from mopd.losses import policy_gradient
from mopd.losses.objectives import OBJECTIVES, checked_result, label_logprob
from mopd.rows import STREAMS, Action, Row

# Largest mean difference in log-probability (nats) between two ways to compute it. A shift or a leak gives whole nats.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-6}
LOW_PRECISION_TOLERANCE = 0.1
TRUNK, TURN, PLANTED = 40, 6, 4


class SelftestFailed(RuntimeError):
    """A check failed: training would learn something else than the configuration says."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the result. `measured` is compared with `limit` as `words` say; `passed` None: not applicable."""

    name: str
    subject: str
    passed: bool | None
    measured: float
    limit: float
    words: str


def selftest(learner: Learner, step: LearnerStep, *, ids: Sequence[int], seed: int = 0) -> list[Check]:
    """Run every check. Each rank of a distributed run must call it.

    ids   token ids that the probe rows are drawn from (leave special ids out); at least 8
    Nothing is trained, and expert loads, weights and random state stay as they were.
    """
    rows = probe_rows(step.domains, ids, seed)
    dtype = next(learner.model.parameters()).dtype
    tolerance = TOLERANCE.get(dtype, LOW_PRECISION_TOLERANCE)
    layout = (step.domains, learner.pad_id, learner.config.prefix_gradient)
    student = Subject("student", lambda batch: learner.forward_only(
        [batch], lambda logits, part: label_logprob(logits, part.label, step.temperature))[0].float().cpu(), *layout)
    # Under ZeRO-3 no rank has the student whole.
    plain = None if learner.config.zero_stage == 3 else _plain(learner.model, step.temperature)
    checks = [enumeration(), *agreement(student, rows, tolerance, plain)]
    if learner.sequence is not None:
        parts = Subject(f"student over {learner.sequence.size} ranks",
                        lambda batch: _split_scores(learner, step, batch), *layout)
        checks += agreement(parts, rows, tolerance, plain)
    for scorer, domains in _scorers(step).items():
        if getattr(scorer, "by_text", False):  # random ids are no text that another tokenizer could read
            checks.append(Check("alignment", f"teacher {scorer.teacher}", None, 0.0, 0.0,
                                "not tested, since it scores texts in a tokenizer of its own"))
            continue

        def scores(batch: MicroBatch, scorer=scorer) -> torch.Tensor:
            return scorer(batch, need="sampled", temperature=step.temperature).logprob.float().cpu()
        subject = Subject(f"teacher {getattr(scorer, 'teacher', '/'.join(domains))}", scores, *layout)
        # Of a teacher in this process; one that is split over ranks is nowhere whole.
        model = None if getattr(scorer, "collective", False) else getattr(scorer, "model", None)
        plain = _plain(model, step.temperature, getattr(scorer, "vocabulary", None)) if isinstance(model, torch.nn.Module) \
            else None
        checks += agreement(subject, [row for row in rows if row.domain in domains], tolerance, plain)
    checks += objective_checks(learner, step, rows)
    return checks


def _split_scores(learner: Learner, step: LearnerStep, batch: MicroBatch) -> torch.Tensor:
    """The student's scores [N] with the columns spread over the ranks of its group (deepspeed.sequence_parallel_size)."""
    own = learner.forward_only([learner.sequence.mine(batch)], lambda logits, part: label_logprob(
        logits, part.label, step.temperature), split=True)[0]
    return learner.sequence.join(batch, own, learner.device).float().cpu()


def require(checks: Sequence[Check]) -> None:
    """Raise SelftestFailed naming every failed check."""
    failed = [check for check in checks if check.passed is False]
    if failed:
        raise SelftestFailed(
            f"{len(failed)} of {len(checks)} self-tests failed:\n" + "\n".join(f"  {sentence(c)}" for c in failed)
            + "\nTraining would not learn what the configuration says; `mopd selftest CONFIG` shows every check")


def sentence(check: Check) -> str:
    """A check in words."""
    return f"{check.name} ({check.subject}): {check.words} ({check.measured:.2g}, limit {check.limit:.2g})"


# ---------------------------------------------------------------------------------------------------------------
# Probe rows

def probe_rows(domains: Sequence[str], ids: Sequence[int], seed: int) -> list[Row]:
    """Per domain a trunk with two decision points and fresh turns of 1 and TURN tokens at each, and a trunk with two
    actions inside it. Raises ValueError for fewer than 8 ids."""
    ids = np.asarray(sorted(set(ids)), dtype=np.uint32)
    if len(ids) < 8:
        raise ValueError(f"the self-test needs at least 8 token ids, got {len(ids)}")
    rng = np.random.default_rng(seed)
    rows = []
    for number, domain in enumerate(domains):
        trunk = rng.choice(ids, TRUNK)
        branches = tuple(
            _action(at, rng.choice(ids, size), branch=True, turn=turn, number=10 * number + 2 * turn + k)
            for turn, at in enumerate((TRUNK // 2, TRUNK)) for k, size in enumerate((1, TURN)))
        rows.append(Row(domain, "teacher_prefix", trunk, branches, f"self-test of {domain}"))
        trunk = rng.choice(ids, TRUNK)
        inside = tuple(_action(at, trunk[at : at + size], branch=False, turn=turn, number=10 * number + 8)
                       for turn, (at, size) in enumerate(((5, 1), (TRUNK - TURN - 2, TURN))))
        rows.append(Row(domain, "rollout", trunk, inside, f"self-test of {domain}"))
    return rows


def _action(at: int, tokens: np.ndarray, *, branch: bool, turn: int, number: int) -> Action:
    size = len(tokens)
    return Action(at=at, tokens=tokens, behaviour_logprob=np.zeros(size, np.float32), version=np.zeros(size, np.int32),
                  branch=branch, turn=turn, sequence=number, group=number)


def alone(row: Row, action: Action) -> Row:
    """The action by itself behind its prefix: no branch, no other action, nothing shared."""
    trunk = np.concatenate([row.trunk[: action.at], action.tokens])
    return dataclasses.replace(row, trunk=trunk, actions=(dataclasses.replace(action, branch=False),))


# ---------------------------------------------------------------------------------------------------------------
# Scores: of the student and of every teacher

@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that scores micro-batches, laid out as the run lays them out: `scores` gives the labels' log-probabilities
    [N]."""

    name: str
    scores: Callable[[MicroBatch], torch.Tensor]
    domains: tuple[str, ...]
    pad_id: int
    prefix_gradient: str = "full"

    def by_action(self, rows: Sequence[Row], token_budget: int) -> dict[tuple[int, int], np.ndarray]:
        """(row, action) -> float32 [n]."""
        found: dict[tuple[int, int], list[float]] = {}
        for batch in pack(rows, token_budget=token_budget, pad_id=self.pad_id, domains=self.domains, streams=STREAMS,
                          prefix_gradient=self.prefix_gradient):
            for row, action, value in zip(batch.row.tolist(), batch.action.tolist(), self.scores(batch).tolist(),
                                          strict=True):
                found.setdefault((row, action), []).append(value)
        return {key: np.asarray(values, np.float32) for key, values in found.items()}


def agreement(subject: Subject, rows: Sequence[Row], tolerance: float, plain: Callable | None = None) -> list[Check]:
    """The checks `mask`, `split`, `alignment` and `shift` of one model."""
    packed = subject.by_action(rows, token_budget=100_000)
    actions = {(r, a): action for r, row in enumerate(rows) for a, action in enumerate(row.actions)}
    wrong = sum(len(packed.get(key, ())) != len(action.tokens) for key, action in actions.items())
    checks = [Check("mask", subject.name, not wrong and set(packed) == set(actions), wrong, 0,
                    "actions whose tokens do not each carry exactly one score")]
    apart = subject.by_action(rows, token_budget=1)
    checks.append(_difference("split", subject.name, packed, apart, tolerance,
                              "mean difference between one micro-batch and one per row"))
    if plain is None:
        nothing = np.zeros(0, np.float32)
        lone = {key: subject.by_action([alone(rows[key[0]], action)], token_budget=1).get((0, 0), nothing)
                for key, action in actions.items()}
    else:
        lone = {key: plain(alone(rows[key[0]], action), action) for key, action in actions.items()}
    checks.append(_difference("alignment", subject.name, packed, lone, tolerance,
                              "mean difference from every action alone behind its whole prefix"))
    checks.append(shift(subject, rows[0], tolerance))
    return checks


def shift(subject: Subject, row: Row, tolerance: float) -> Check:
    """Replace the tokens of one turn one by one, each by a few others, since one of them may happen to be as likely: the
    score of the replaced token must move, none before it."""
    original = max(row.actions, key=lambda action: len(action.tokens))
    others = [token for token in dict.fromkeys(row.trunk.tolist()) if token not in original.tokens][:PLANTED]
    size, variants = len(original.tokens), [original]
    for place, other in itertools.product(range(size), others):
        tokens = original.tokens.copy()
        tokens[place] = other
        variants.append(dataclasses.replace(original, tokens=tokens))
    scores = subject.by_action([dataclasses.replace(row, actions=tuple(variants))], token_budget=100_000)
    found = [scores.get((0, number), np.zeros(0)) for number in range(len(variants))]
    wrong = 0
    for place in range(size):
        planted = found[1 + place * len(others) :][: len(others)]
        if any(len(one) != size for one in (found[0], *planted)):
            wrong += 1
            continue
        change = np.abs(np.stack(planted) - found[0])
        wrong += bool((change[:, :place] > tolerance).any() or not (change[:, place] > tolerance).any())
    return Check("shift", subject.name, wrong == 0, wrong, 0,
                 f"of {size} planted tokens, those whose score is found at another place")


def _difference(name: str, subject: str, left: dict, right: dict, tolerance: float, words: str) -> Check:
    # An action that has other tokens on one side (a fault of the mask) differs without bound.
    gaps = [np.abs(left[key] - right[key]) if key in left and key in right and len(left[key]) == len(right[key])
            else np.full(1, np.inf) for key in left.keys() | right.keys()]
    gap = float(np.concatenate(gaps).mean()) if gaps else 0.0
    return Check(name, subject, bool(gap <= tolerance), gap, tolerance, words)


def _plain(model: torch.nn.Module, temperature: float, vocabulary: int | None = None) -> Callable:
    """A plain forward of a Hugging Face model, which shares no code with the packed one."""
    @torch.no_grad()
    def scores(row: Row, action: Action) -> np.ndarray:
        was_training, device = model.training, next(model.parameters()).device
        model.eval()
        ids = torch.from_numpy(row.trunk.astype(np.int64))[None].to(device)
        logits = model(input_ids=ids, use_cache=False).logits[0, action.at - 1 : action.at - 1 + len(action.tokens)]
        model.train(was_training)
        return label_logprob(logits[:, :vocabulary], ids[0, action.at :], temperature).float().cpu().numpy()

    return scores


def _scorers(step: LearnerStep) -> dict[Any, list[str]]:
    found: dict[Any, list[str]] = {}
    for domain in step.domains:
        found.setdefault(step.scorers[domain], []).append(domain)
    return found


# ---------------------------------------------------------------------------------------------------------------
# The objective

def objective_checks(learner: Learner, step: LearnerStep, rows: Sequence[Row]) -> list[Check]:
    """`identity`, `signal` and `mask` (of missing scores) of the configured objective on the student's own logits."""
    name = step.config.objective
    own = {"loss": 0.0, "gradient": 0.0, "moved": 0.0, "scale": 0.0, "leak": 0.0}

    def probe(logits: torch.Tensor, part: MicroBatch) -> torch.Tensor:
        loss, gradient = _objective(step, logits, part, logits)
        own["loss"] = max(own["loss"], float(loss.abs().max()))
        own["gradient"] = max(own["gradient"], float(gradient.abs().max()))
        _, first = _objective(step, logits, part, logits.roll(1, dims=-1))
        _, second = _objective(step, logits, part, logits.roll(2, dims=-1))
        own["moved"] = max(own["moved"], float((first - second).abs().max()))
        own["scale"] = max(own["scale"], float(first.abs().max()), float(second.abs().max()))
        lost = logits.clone()
        lost[0] = torch.nan
        loss, gradient = _objective(step, logits, part, lost)
        finite = bool(torch.isfinite(loss).all() and torch.isfinite(gradient).all())
        own["leak"] += float(loss[0].abs() + gradient[0].abs().max()) if finite else float("inf")
        return torch.zeros(len(part.label))

    batches = pack(rows, token_budget=100_000, pad_id=learner.pad_id, domains=step.domains, streams=STREAMS,
                   prefix_gradient=learner.config.prefix_gradient)
    learner.forward_only(batches, probe)
    built_in = name in OBJECTIVES
    # A dropped tail leaves no divergence: the mass inside and outside the k ids is pulled apart even between equal models.
    zero_at_equality = built_in and step.config.objective_options.get("tail") != "drop"
    identical = max(own["loss"], own["gradient"])
    return [
        # an objective of one's own may well have further terms
        Check("identity", name, identical <= 1e-4 if zero_at_equality else None, identical, 1e-4,
              "largest loss or gradient of a token where student and teacher are the same model"),
        Check("signal", name, own["moved"] > 1e-3 * own["scale"] > 0, own["moved"] / (own["scale"] or 1.0), 1e-3,
              "change of the gradient with another teacher, relative; it must be above the limit"),
        # an objective of one's own is never shown such a token
        Check("mask", name, own["leak"] == 0.0 if built_in else None, own["leak"], 0.0,
              "loss and gradient of a token whose score is missing"),
    ]


def _objective(step: LearnerStep, logits: torch.Tensor, part: MicroBatch, teacher: torch.Tensor):
    """(loss [n], gradient in the logits [n, V]) against a teacher with these logits, on samples of this very policy."""
    with torch.enable_grad():
        own = logits.detach().float().requires_grad_()
        now = label_logprob(own.detach(), part.label, step.temperature)
        scores = label_logprob(teacher.detach().float(), part.label, step.temperature)
        arguments = dict(
            student_logits=own, teacher_logits=teacher.detach().float() if step.objective.needs == "full" else None,
            teacher_logprob=scores, label=part.label, behaviour_logprob=now, outcome_advantage=torch.zeros_like(now))
        if step.asks_top_k:
            best = torch.log_softmax(teacher.detach().float() / step.temperature, dim=-1).topk(
                min(step.top_k, teacher.shape[-1]), dim=-1)
            arguments |= {"teacher_logits": None, "teacher_top_ids": best.indices, "teacher_top_logprob": best.values}
        if getattr(step.objective, "advantage_student", "") == "snapshot":
            arguments["snapshot_logprob"] = now
        loss = checked_result(step.objective(**arguments), step.config.objective, len(own)).loss
        gradient = torch.autograd.grad(loss.sum(), own, allow_unused=True)[0] if loss.requires_grad else None
    return loss.detach(), torch.zeros_like(own) if gradient is None else gradient


def enumeration(seed: int = 0) -> Check:
    """Every sequence of 2 tokens over 4 ids, float64: the expected gradient of `mopd` for µ = π, alpha = 0 and summed
    tokens against that of Σ_t E_{c_t ~ sg[π]} KL(π(·|c_t) ‖ π_T(·|c_t)) (METHOD section 3)."""
    generator = torch.Generator().manual_seed(seed)
    first = torch.randn(4, generator=generator, dtype=torch.float64, requires_grad=True)
    second = torch.randn(4, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = [torch.randn(*shape, generator=generator, dtype=torch.float64).log_softmax(-1) for shape in ((4,), (4, 4))]
    own = [first.log_softmax(-1), second.log_softmax(-1)]
    expected = torch.zeros((), dtype=torch.float64)
    for a, b in itertools.product(range(4), repeat=2):
        student = torch.stack([own[0][a], own[1][a, b]])
        loss = policy_gradient(student, torch.stack([teacher[0][a], teacher[1][a, b]]), student.detach()).loss.sum()
        expected = expected + student.detach().sum().exp() * loss
    kl = [(p.exp() * (p - q)).sum(-1) for p, q in zip(own, teacher, strict=True)]
    exact = kl[0] + (own[0].detach().exp() * kl[1]).sum()
    leaves = (first, second)
    pairs = zip(torch.autograd.grad(expected, leaves, retain_graph=True), torch.autograd.grad(exact, leaves), strict=True)
    gap = max(float((left - right).abs().max()) for left, right in pairs)
    return Check("enumeration", "mopd", gap <= 1e-12, gap, 1e-12,
                 "difference between the expected gradient and that of the per-token reverse KLs")


def print_checks(checks: Sequence[Check]) -> None:
    """One line per check."""
    console = Console(highlight=False)
    for check in checks:
        mark = {True: "[green]passed[/green]", False: "[red]FAILED[/red]", None: "[yellow]for information[/yellow]"}
        console.print(f"{mark[check.passed]} {escape(sentence(check))}", soft_wrap=True)
    if failed := sum(check.passed is False for check in checks):
        console.print(f"{failed} of {len(checks)} checks failed.")
    else:
        console.print("No check failed.")
