"""forward_kl from a teacher's likeliest ids alone is the one from its whole distribution, value and gradient."""

from __future__ import annotations

import math

import pytest
import torch

from mopd.losses import make_objective
from mopd.losses.distribution import DivergenceSpec, TopK, divergence, divergence_and_numbers

T, V, K = 7, 40, 5
TAILS = ("bucket", "renormalise", "drop")


def logits(seed: int, dtype=torch.float64, width: int = V) -> torch.Tensor:
    return torch.randn(T, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).mul(2.5).to(dtype)


def told(teacher: torch.Tensor, k: int = K) -> TopK:
    """What a server tells of these logits."""
    best = torch.log_softmax(teacher, -1).topk(k, dim=-1)
    return TopK(best.indices, best.values)


def reference(student: torch.Tensor, top: TopK, tail: str) -> torch.Tensor:
    """Written out in float64 for autograd: Σ_o Q_o (log Q_o − log P_o) over the ids (and the rest)."""
    p, q = torch.log_softmax(student, -1).exp(), top.logprob.exp()
    p = p.gather(-1, top.ids)
    if tail == "bucket":
        p, q = (torch.cat([x, 1 - x.sum(-1, keepdim=True)], -1) for x in (p, q))
    elif tail == "renormalise":
        p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return (q * (q.log() - p.log())).sum(-1)


def both(make, student: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [T] and the gradient of a weighted sum of them."""
    own = student.clone().requires_grad_()
    value = make(own)
    (value * torch.arange(1, T + 1, dtype=value.dtype)).sum().backward()
    return value.detach(), own.grad


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("dtype,tolerance", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_value_and_gradient_are_those_of_the_whole_distribution(tail, dtype, tolerance):
    student, teacher = logits(1, dtype), logits(2, dtype)
    top = told(teacher.to(torch.float64 if dtype == torch.float64 else torch.float32))
    spec = DivergenceSpec("forward_kl", support="top_k", k=K, tail=tail)
    label = torch.zeros(T, dtype=torch.long)
    value, gradient = both(lambda own: divergence_and_numbers(own, top, label, spec)[0], student)
    whole = both(lambda own: divergence(own, teacher, kind="forward_kl", support="top_k", k=K, tail=tail), student)
    exact = both(lambda own: reference(own, TopK(top.ids, top.logprob.double()), tail), student.double())
    for found in (whole, exact):
        torch.testing.assert_close(value.double(), found[0].double(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient.double(), found[1].double(), rtol=tolerance, atol=T * tolerance)
    assert tail == "drop" or bool((value > 0).all())


def test_a_teacher_that_is_the_student_gives_neither_loss_nor_gradient():
    student = logits(3)
    spec = DivergenceSpec("forward_kl", support="top_k", k=K)
    value, gradient = both(lambda own: divergence_and_numbers(own, told(student), torch.zeros(T, dtype=torch.long), spec)[0],
                           student)
    assert float(value.abs().max()) < 1e-12 and float(gradient.abs().max()) < 1e-12


def test_ids_that_the_student_lacks_count_to_the_rest():
    student, teacher = logits(4), logits(5, width=V + 6)
    teacher[:, V:] += 3.0  # certainly among the likeliest
    top, spec = told(teacher), DivergenceSpec("forward_kl", support="top_k", k=K)
    assert bool((top.ids >= V).any())
    p, q = torch.log_softmax(student, -1), torch.log_softmax(teacher, -1)
    found = divergence_and_numbers(student, top, torch.zeros(T, dtype=torch.long), spec)[0]
    for row in range(T):
        ids = top.ids[row][top.ids[row] < V]
        inside, mass = p[row, ids].exp(), q[row, ids].exp()
        rest = (1 - mass.sum()) * ((1 - mass.sum()) / (1 - inside.sum())).log()
        assert float(found[row]) == pytest.approx(float((mass * (mass / inside).log()).sum() + rest), abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_certainty_and_mass_that_rounds_above_one(dtype):
    student = logits(6, dtype)
    certain = torch.full((T, K), -math.inf, dtype=dtype)
    certain[:, 0] = 1e-7  # as a server's rounding may give
    top = TopK(torch.arange(K).expand(T, K), certain)
    spec = DivergenceSpec("forward_kl", support="top_k", k=K)
    value, gradient = both(lambda own: divergence_and_numbers(own, top, torch.zeros(T, dtype=torch.long), spec)[0], student)
    torch.testing.assert_close(value, -torch.log_softmax(student, -1)[:, 0], rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(gradient).all())


def test_the_objective_takes_them_and_says_what_it_does_not_know():
    objective = make_objective("forward_kl", {"support": "top_k", "k": K})
    assert objective.top_k == K and make_objective("forward_kl").top_k == 0
    assert make_objective("jsd", {"support": "top_k", "k": K}).top_k == 0
    student, teacher = logits(7, torch.float32).requires_grad_(), logits(8, torch.float32)
    label = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(0))
    label[0] = int(teacher[0].argmax())
    top, sampled = told(teacher), torch.log_softmax(teacher, -1).gather(-1, label[:, None])[:, 0]
    top.logprob[2] = torch.nan  # missing
    sampled[3] = torch.nan  # ruled out by the teacher: its likeliest ids are there all the same
    shared = dict(student_logits=student, label=label, behaviour_logprob=torch.zeros(T))
    result = objective(**shared, teacher_logits=None, teacher_logprob=sampled, teacher_top_ids=top.ids,
                       teacher_top_logprob=top.logprob)
    whole = objective(**shared, teacher_logits=teacher, teacher_logprob=None)
    known = torch.arange(T) != 2
    torch.testing.assert_close(result.loss[known], whole.loss[known], rtol=1e-5, atol=1e-6)
    assert float(result.loss[2].detach()) == 0.0 and result.diagnostics["unscored"].tolist() == (~known).tolist()
    (gradient,) = torch.autograd.grad(result.loss.sum(), student)
    assert bool(torch.isfinite(gradient).all()) and not bool(gradient[2].any()) and bool(gradient[3].any())
    for name in ("student_entropy", "student_logprob"):
        torch.testing.assert_close(result.diagnostics[name], whole.diagnostics[name])
    torch.testing.assert_close(result.diagnostics["agreement"][known], whole.diagnostics["agreement"][known])
    assert result.diagnostics["agreement"][0] == 1.0 and math.isnan(result.diagnostics["k1"][3])
    assert bool((result.diagnostics["forward_kl"][known] <= whole.diagnostics["forward_kl"][known] + 1e-6).all())
    assert not {"reverse_kl", "teacher_entropy"} & set(result.diagnostics)
    with pytest.raises(ValueError, match="forward_kl with support='top_k'"):
        divergence_and_numbers(student, top, label, DivergenceSpec("reverse_kl", support="top_k", k=K))
