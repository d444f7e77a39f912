"""`mopd` on sampled tokens: reference cases, missing scores, and an enumeration that shows what its gradient means."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import candidate_logprob, divergence, policy_gradient, sampled_kl

FOLDER = Path(__file__).parents[2] / "cases"
CASES = json.loads((FOLDER / "policy_gradient.json").read_text())
REPLAY = json.loads((FOLDER / "candidate_replay.json").read_text())
KL = json.loads((FOLDER / "divergence.json").read_text())


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def label(case):
    return f"{case['correction']}-{case['alpha']}-{case['advantage_clip']}"


@pytest.mark.parametrize("case", CASES["cases"], ids=label)
def test_reference_cases(case):
    student = tensor(CASES["logp_student"]).requires_grad_()
    result = policy_gradient(
        student,
        tensor(CASES["logp_teacher"]),
        tensor(CASES["logp_behaviour"]),
        bounds=tuple(case["bounds"]),
        correction=case["correction"],
        outcome_advantage=tensor(CASES["outcome_advantage"]),
        alpha=case["alpha"],
        advantage_clip=case["advantage_clip"],
    )
    result.loss.sum().backward()
    for name, found in (("loss", result.loss), ("advantage", result.advantage), ("weight", result.weight)):
        torch.testing.assert_close(found.detach(), tensor(case[name]), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(student.grad, tensor(case["grad_wrt_logp_student"]), rtol=1e-12, atol=1e-12)
    assert not (result.advantage.requires_grad or result.weight.requires_grad)
    assert result.masked.tolist() == [case["correction"] == "mask" and w == 0 for w in case["weight"]]


def test_clipped_tokens_are_marked():
    result = policy_gradient(
        tensor([-1.0, -1.0, -1.0]), tensor([-9.0, -2.0, -1.0]), tensor([-1.0] * 3), advantage_clip=(-5, 5)
    )
    assert result.clipped.tolist() == [True, False, False] and result.advantage.tolist() == [-5.0, -1.0, 0.0]
    result = policy_gradient(tensor([-1.0, -1.0]), tensor([-1.0, -1.0]), tensor([-9.0, -1.0]), correction="truncate")
    assert result.clipped.tolist() == [True, False]


def test_snapshot_takes_the_students_place_in_the_advantage_only():
    student, snapshot = tensor([-1.0, -2.0]), tensor([-1.5, -1.0])
    result = policy_gradient(student, tensor([-3.0, -3.0]), student, logp_snapshot=snapshot)
    assert result.advantage.tolist() == [-1.5, -2.0] and result.weight.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("correction", ("mask", "truncate", "none"))
@pytest.mark.parametrize("alpha", (0.0, 0.5))
def test_missing_scores_are_masked_and_never_read_as_certainty(correction, alpha):
    nan, inf = math.nan, math.inf
    student = tensor([-1.0, -1.0, -1.0, -inf, -1.0]).requires_grad_()
    teacher = tensor([nan, -inf, -2.0, -2.0, -2.0])
    behaviour = tensor([-1.0, -1.0, nan, -1.0, -1.0])
    result = policy_gradient(
        student, teacher, behaviour, correction=correction, alpha=alpha, outcome_advantage=torch.ones(5)
    )
    result.loss.sum().backward()
    missing = [True, True, correction != "none", True, False]
    assert result.unscored.tolist() == missing
    for found in (result.loss, result.weight, result.advantage, student.grad):
        assert torch.isfinite(found).all() and (found[torch.tensor(missing)] == 0).all() and found[4] != 0
    assert not result.masked.any()


def test_teachers_minus_infinity_counts_where_the_clip_bounds_it():
    result = policy_gradient(tensor([-1.0]), tensor([-math.inf]), tensor([-1.0]), advantage_clip=(-5.0, 5.0))
    assert result.advantage.tolist() == [-5.0] and not result.unscored.any()


def test_a_broken_student_is_not_hidden():
    assert torch.isnan(policy_gradient(tensor([math.nan]), tensor([-1.0]), tensor([-1.0])).loss).all()


def test_outcome_advantage_keeps_its_value_when_the_distillation_part_is_clipped():
    result = policy_gradient(
        tensor([-1.0]), tensor([-9.0]), tensor([-1.0]), advantage_clip=(-1.0, 1.0), alpha=0.5, outcome_advantage=8.0
    )
    assert result.advantage.tolist() == [3.0]


@pytest.mark.parametrize(
    "options,word",
    [
        ({"correction": "clip"}, "truncate"),
        ({"bounds": (5.0, 0.2)}, "low < high"),
        ({"alpha": 0.5}, "outcome_advantage"),
    ],
)
def test_wrong_options_are_refused(options, word):
    with pytest.raises(ValueError, match=word):
        policy_gradient(tensor([-1.0]), tensor([-1.0]), tensor([-1.0]), **options)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match="logp_teacher"):
        policy_gradient(tensor([-1.0]), tensor([-1.0, -2.0]), tensor([-1.0]))


def test_no_tokens():
    empty = torch.zeros(0, requires_grad=True)
    policy_gradient(empty, torch.zeros(0), torch.zeros(0)).loss.sum().backward()
    assert empty.grad.shape == (0,)


# --- what the gradients mean: every sequence of two tokens over four, weighted by its probability -----------------


class Enumeration:
    """A policy over two-token sequences: first-token logits [4], second-token logits [4, 4] given the first."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.randn(4, generator=generator, dtype=torch.float64) * 1.5
        self.second = torch.randn(4, 4, generator=generator, dtype=torch.float64) * 1.5

    def leaves(self):
        return self.first.clone().requires_grad_(), self.second.clone().requires_grad_()


def sequence_logprobs(first, second):
    """log π(y_1), log π(y_2|y_1) for all 16 sequences: [16, 2]."""
    one, two = torch.log_softmax(first, -1), torch.log_softmax(second, -1)
    return torch.stack([one.repeat_interleave(4), two.reshape(-1)], -1)


def gradients(student, function):
    first, second = student.leaves()
    function(first, second).backward()
    return torch.cat([first.grad, second.grad.reshape(-1)])


STUDENT, TEACHER, OTHER = Enumeration(1), Enumeration(2), Enumeration(3)


def expected_over_samples(per_token):
    """E_{y ~ sg[π]} Σ_t per_token(log π_θ, log π_T)."""

    def total(teacher):
        def run(first, second):
            logp = sequence_logprobs(first, second)
            target = sequence_logprobs(teacher.first, teacher.second)
            probability = logp.detach().sum(-1).exp()
            losses = per_token(logp.reshape(-1), target.reshape(-1)).reshape(16, 2)
            return (probability * losses.sum(-1)).sum()

        return run

    return total


def token_level_kl(teacher, kind="reverse_kl"):
    """Σ_t E_{c_t ~ sg[π]} of the per-token divergence, exactly."""

    def run(first, second):
        visits = torch.softmax(first.detach(), -1)
        at_first = divergence(first[None], teacher.first[None], kind=kind).sum()
        return at_first + (visits * divergence(second, teacher.second, kind=kind)).sum()

    return run


def sequence_level_kl(first, second):
    logp, target = sequence_logprobs(first, second), sequence_logprobs(TEACHER.first, TEACHER.second)
    return (logp.sum(-1).exp() * (logp - target).sum(-1)).sum()


def mopd(logp, target):
    return policy_gradient(logp, target, logp.detach()).loss


def test_mopd_is_the_gradient_of_the_token_level_kl():
    ours = gradients(STUDENT, expected_over_samples(mopd)(TEACHER))
    torch.testing.assert_close(ours, gradients(STUDENT, token_level_kl(TEACHER)), rtol=1e-10, atol=1e-12)


def test_mopd_is_not_the_gradient_of_the_sequence_level_kl():
    """The first token is not credited with the log-ratio of the second, which it leads to; with that credit it is."""
    ours = gradients(STUDENT, expected_over_samples(mopd)(TEACHER))
    whole = gradients(STUDENT, sequence_level_kl)
    assert (ours[:4] - whole[:4]).abs().max() > 0.05
    torch.testing.assert_close(ours[4:], whole[4:])

    def with_later_ratios(logp, target):
        ratio = (target - logp).detach().reshape(16, 2)
        credit = ratio.flip(-1).cumsum(-1).flip(-1)
        return -credit.reshape(-1) * logp

    torch.testing.assert_close(gradients(STUDENT, expected_over_samples(with_later_ratios)(TEACHER)), whole)


def test_importance_weights_make_the_same_gradient_from_another_behaviour():
    """Samples from µ = a third policy, no mask in reach: ρ_t restores the first token's gradient exactly."""

    def run(first, second):
        logp, target = sequence_logprobs(first, second), sequence_logprobs(TEACHER.first, TEACHER.second)
        behaviour = sequence_logprobs(OTHER.first, OTHER.second)
        loss = policy_gradient(
            logp.reshape(-1), target.reshape(-1), behaviour.reshape(-1), bounds=(0.0, 1e9)
        ).loss.reshape(16, 2)
        return (behaviour.sum(-1).exp() * loss[:, 0]).sum()

    first, second = STUDENT.leaves()
    run(first, second).backward()
    torch.testing.assert_close(first.grad, gradients(STUDENT, token_level_kl(TEACHER))[:4], rtol=1e-9, atol=1e-11)


def test_swapping_the_teacher_changes_the_gradient():
    for loss in (mopd, lambda s, t: sampled_kl(s, t, estimator="k2", loss=True)):
        found = [gradients(STUDENT, expected_over_samples(loss)(teacher)) for teacher in (TEACHER, OTHER)]
        assert (found[0] - found[1]).abs().max() > 0.05


def test_k2_has_the_reverse_and_k3_the_forward_gradient():
    k2 = expected_over_samples(lambda s, t: sampled_kl(s, t, estimator="k2", loss=True))
    k3 = expected_over_samples(lambda s, t: sampled_kl(s, t, estimator="k3", loss=True))
    torch.testing.assert_close(gradients(STUDENT, k2(TEACHER)), gradients(STUDENT, token_level_kl(TEACHER)))
    torch.testing.assert_close(
        gradients(STUDENT, k3(TEACHER)), gradients(STUDENT, token_level_kl(TEACHER, "forward_kl"))
    )


def test_k1_as_a_loss_knows_no_teacher_and_is_refused():
    for teacher in (TEACHER, OTHER):
        k1 = expected_over_samples(lambda s, t: s - t.detach())
        assert gradients(STUDENT, k1(teacher)).abs().max() < 1e-12
    with pytest.raises(ValueError, match="expectation .* is zero for every teacher"):
        sampled_kl(tensor([-1.0]), tensor([-2.0]), estimator="k1", loss=True)


def test_unbiased_in_value():
    logp, target = (sequence_logprobs(x.first, x.second)[:, 0] for x in (STUDENT, TEACHER))
    one, two = logp[::4], target[::4]
    exact = divergence(STUDENT.first[None], TEACHER.first[None]).item()
    for estimator, unbiased in (("k1", True), ("k2", False), ("k3", True)):
        mean = (one.exp() * sampled_kl(one, two, estimator=estimator)).sum().item()
        assert (abs(mean - exact) < 1e-12) == unbiased


@pytest.mark.parametrize("estimator", ("k1", "k2", "k3"))
def test_estimators_against_the_cases(estimator):
    ids = torch.tensor(KL["sampled"])[:, None]
    student, teacher = (tensor(KL[f"{who}_logprobs"]).gather(-1, ids)[:, 0] for who in ("student", "teacher"))
    value = sampled_kl(student.requires_grad_(), teacher, estimator=estimator)
    assert not value.requires_grad
    torch.testing.assert_close(value, tensor(KL[estimator]), rtol=1e-12, atol=1e-12)


def test_unknown_estimator():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        sampled_kl(tensor([-1.0]), tensor([-1.0]), estimator="k4")


# --- candidate replay -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ("student", "teacher"))
def test_replay_cases(who):
    logits = tensor(REPLAY[f"{who}_logprobs"])
    value = candidate_logprob(logits, torch.tensor(REPLAY["sampled"]), REPLAY["candidates"])
    torch.testing.assert_close(value, tensor(REPLAY[who]), rtol=1e-12, atol=1e-12)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), k=st.integers(1, 6), temperature=st.sampled_from([0.5, 1.0, 1.7]))
def test_replay_makes_the_ratio_one_with_unchanged_weights(seed, k, temperature):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, 6, generator=generator, dtype=torch.float64) * 5
    kept = logits.topk(k, -1).indices
    behaviour = torch.log_softmax(logits.gather(-1, kept) / temperature, -1)
    choice = torch.randint(k, (5,), generator=generator)[:, None]
    student = candidate_logprob(logits, kept.gather(-1, choice)[:, 0], kept.tolist(), temperature=temperature)
    result = policy_gradient(student, student, behaviour.gather(-1, choice)[:, 0])
    torch.testing.assert_close(result.ratio, torch.ones(5, dtype=torch.float64))


def test_replay_gradient_stays_inside_the_set():
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    sets = [[0, 3], None]
    candidate_logprob(logits, torch.tensor([3, 1]), sets).sum().backward()
    assert (logits.grad[0, [1, 2, 4]] == 0).all() and (logits.grad[0, [0, 3]] != 0).all()
    assert (logits.grad[1] != 0).all()
    assert torch.autograd.gradcheck(lambda z: candidate_logprob(z, torch.tensor([3, 1]), sets), (logits,))


def test_a_sampled_id_outside_its_set_is_refused_with_its_position():
    logits = torch.zeros(2, 5)
    with pytest.raises(ValueError, match="position 1: sampled id 4"):
        candidate_logprob(logits, torch.tensor([0, 4]), [[0, 1], [0, 1]])
    with pytest.raises(ValueError, match="position 0"):
        candidate_logprob(logits, torch.tensor([0, 0]), [[], [0]])
    with pytest.raises(ValueError, match="position 1: candidate ids"):
        candidate_logprob(logits, torch.tensor([0, 0]), [[0], [0, 7]])
    with pytest.raises(ValueError, match="do not match"):
        candidate_logprob(logits, torch.tensor([0, 0]), [[0]])
