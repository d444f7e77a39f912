"""The registry: built-in objectives, missing teacher scores, diagnostics, and an objective from a foreign file."""

import math
import sys

import pytest
import torch

from mopd.losses import candidate_logprob, divergence, make_objective, policy_gradient
from mopd.losses.objectives import OBJECTIVES, ObjectiveResult

N, V = 6, 11
EVERY = list(OBJECTIVES)


def inputs(seed=0, full=True, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    student = (torch.randn(N, V, generator=generator) * 2).to(dtype).requires_grad_()
    teacher = (torch.randn(N, V, generator=generator) * 2).to(dtype)
    label = torch.randint(V, (N,), generator=generator)
    picked = torch.log_softmax(teacher.float(), -1).gather(-1, label[:, None])[:, 0]
    behaviour = torch.log_softmax(student.detach().float(), -1).gather(-1, label[:, None])[:, 0]
    return {
        "student_logits": student,
        "teacher_logits": teacher if full else None,
        "teacher_logprob": None if full else picked,
        "label": label,
        "behaviour_logprob": behaviour,
        "outcome_advantage": None,
    }


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_every_objective_gives_a_loss_and_its_diagnostics_per_token(name, dtype):
    given = inputs(dtype=dtype)
    objective = make_objective(name)
    result = objective(**given)
    assert isinstance(result, ObjectiveResult) and result.loss.shape == (N,)
    result.loss.sum().backward()
    assert (given["student_logits"].grad.abs().sum(-1) > 0).all()
    names = {"k1", "k3", "student_entropy", "teacher_entropy", "agreement", "reverse_kl", "forward_kl"}
    names |= {"unscored", "infinite", "masked", "clipped"}
    assert names <= set(result.diagnostics)
    for value in result.diagnostics.values():
        assert value.shape == (N,) and not value.requires_grad and not torch.isnan(value.float()).any()


def test_diagnostics_are_what_they_say():
    given = inputs()
    found = make_objective("reverse_kl")(**given).diagnostics
    student = torch.log_softmax(given["student_logits"].detach(), -1)
    teacher = torch.log_softmax(given["teacher_logits"], -1)
    label = given["label"][:, None]
    k1 = (student - teacher).gather(-1, label)[:, 0]
    torch.testing.assert_close(found["k1"], k1)
    torch.testing.assert_close(found["k3"], (-k1).exp() - 1 + k1)
    torch.testing.assert_close(found["student_entropy"], torch.distributions.Categorical(logits=student).entropy())
    torch.testing.assert_close(found["teacher_entropy"], torch.distributions.Categorical(logits=teacher).entropy())
    torch.testing.assert_close(found["reverse_kl"], divergence(student, teacher, kind="reverse_kl"))
    torch.testing.assert_close(found["forward_kl"], divergence(student, teacher, kind="forward_kl"))
    assert found["agreement"].tolist() == (teacher.argmax(-1) == given["label"]).float().tolist()


@pytest.mark.parametrize("name", ("reverse_kl", "forward_kl", "jsd"))
def test_distribution_objectives_are_the_divergence(name):
    given = inputs()
    options = {"support": "top_k", "k": 4, "temperature": 0.7}
    result = make_objective(name, options)(**given)
    expected = divergence(given["student_logits"], given["teacher_logits"], kind=name, **options)
    torch.testing.assert_close(result.loss, expected)


def test_mopd_is_the_policy_gradient_from_logits_or_scores():
    options = {"bounds": [0.5, 2.0], "correction": "truncate", "advantage_clip": [-1.0, 1.0], "alpha": 0.3}
    given, scores = inputs(), inputs(full=False)
    outcome = torch.linspace(-1, 1, N)
    given["outcome_advantage"] = scores["outcome_advantage"] = outcome
    behaviour = given["behaviour_logprob"] + torch.linspace(-2, 2, N)
    given["behaviour_logprob"] = scores["behaviour_logprob"] = behaviour
    objective = make_objective("mopd", options)
    assert objective.needs == "sampled"
    result, other = objective(**given), objective(**scores)
    student = torch.log_softmax(given["student_logits"], -1).gather(-1, given["label"][:, None])[:, 0]
    expected = policy_gradient(
        student, scores["teacher_logprob"], behaviour, bounds=(0.5, 2.0), correction="truncate",
        advantage_clip=(-1.0, 1.0), alpha=0.3, outcome_advantage=outcome,
    )  # fmt: skip
    torch.testing.assert_close(result.loss, expected.loss)
    torch.testing.assert_close(other.loss, expected.loss)
    assert result.diagnostics["clipped"].tolist() == expected.clipped.tolist()
    assert "teacher_entropy" not in other.diagnostics and "student_entropy" in other.diagnostics


def test_mopd_counts_what_it_masks():
    given = inputs()
    given["behaviour_logprob"] = given["behaviour_logprob"] + torch.tensor([0.0, 5.0, -5.0, 0.0, 0.0, 0.0])
    result = make_objective("mopd")(**given)
    assert result.diagnostics["masked"].tolist() == [False, True, True, False, False, False]
    assert (result.loss[1:3] == 0).all()


def test_mopd_snapshot_and_candidates():
    given = inputs()
    objective = make_objective("mopd", {"advantage_student": "snapshot"})
    with pytest.raises(ValueError, match="snapshot_logprob"):
        objective(**given)
    snapshot = given["behaviour_logprob"] - 1.0
    result = objective(**given, snapshot_logprob=snapshot)
    plain = make_objective("mopd")(**given)
    torch.testing.assert_close(result.diagnostics["advantage"], plain.diagnostics["advantage"] + 1.0)
    sets = [[int(label), (int(label) + 1) % V] for label in given["label"]]
    given["behaviour_logprob"] = candidate_logprob(given["student_logits"].detach(), given["label"], sets)
    replayed = make_objective("mopd")(**given, candidates=sets)
    torch.testing.assert_close(replayed.diagnostics["ratio"], torch.ones(N))


@pytest.mark.parametrize(
    "name,full", [(name, True) for name in EVERY] + [(name, False) for name in ("mopd", "sampled_kl")]
)
def test_missing_scores_carry_no_loss_no_gradient_and_are_flagged(name, full):
    given = inputs(full=full)
    if full:
        given["teacher_logits"][2] = math.nan
        given["teacher_logits"][4, 3] = math.nan
    else:
        given["teacher_logprob"][[2, 4]] = math.nan
    result = make_objective(name)(**given)
    result.loss.sum().backward()
    gradient = given["student_logits"].grad
    assert result.diagnostics["unscored"].tolist() == [False, False, True, False, True, False]
    assert (result.loss[[2, 4]] == 0).all() and (gradient[[2, 4]] == 0).all()
    assert torch.isfinite(gradient).all() and (gradient[[0, 1, 3, 5]].abs().sum(-1) > 0).all()
    assert torch.isnan(result.diagnostics["k1"][[2, 4]]).all()
    clean = inputs(full=full)
    make_objective(name)(**clean).loss[[0, 1, 3, 5]].sum().backward()
    torch.testing.assert_close(gradient, clean["student_logits"].grad)


def test_infinite_divergence_is_flagged_and_carries_no_loss():
    given = inputs()
    given["teacher_logits"][1, 0] = -math.inf
    result = make_objective("reverse_kl")(**given)
    result.loss.sum().backward()
    assert result.diagnostics["infinite"].tolist() == [False, True, False, False, False, False]
    assert result.loss[1] == 0 and torch.isfinite(given["student_logits"].grad).all()
    assert torch.isfinite(make_objective("forward_kl")(**given).loss).all()


@pytest.mark.parametrize("name", ("reverse_kl", "forward_kl", "jsd"))
def test_a_broken_student_is_not_hidden(name):
    given = inputs()
    given["student_logits"] = torch.full((N, V), math.nan, requires_grad=True)
    assert torch.isnan(make_objective(name)(**given).loss).all()


@pytest.mark.parametrize("name", EVERY)
def test_no_positions(name):
    given = inputs()
    given = {k: v[:0] if isinstance(v, torch.Tensor) else v for k, v in given.items()}
    result = make_objective(name)(**given)
    result.loss.sum().backward()
    assert all(len(v) == 0 for v in result.diagnostics.values())


@pytest.mark.parametrize("name", EVERY)
def test_swapping_the_teacher_changes_the_gradient(name):
    first, second = inputs(), inputs()
    second["teacher_logits"] = second["teacher_logits"].flip(-1)
    for given in (first, second):
        make_objective(name)(**given).loss.sum().backward()
    assert (first["student_logits"].grad - second["student_logits"].grad).abs().max() > 1e-2


@pytest.mark.parametrize(
    "name,options,word",
    [
        ("reverse", {}, "reverse_kl, forward_kl"),
        ("reverse_kl", {"beta": 0.5}, "it has: support, k, tail, temperature"),
        ("jsd", {"beta": 2.0}, "beta"),
        ("mopd", {"correction": "clip"}, "truncate"),
        ("mopd", {"bounds": [5, 0.2]}, "bounds"),
        ("mopd", {"bounds": 3}, r"bounds must be \[low, high\], got 3"),
        ("mopd", {"bounds": ["a", "b"]}, "bounds must be a number, got 'a'"),
        ("mopd", {"advantage_clip": 5}, r"advantage_clip must be \[low, high\], got 5"),
        ("mopd", {"advantage_clip": [float("nan"), 1]}, "advantage_clip must be a number"),
        ("mopd", {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ("mopd", {"temperature": float("inf")}, "positive and finite"),
        ("mopd", {"alpha": None}, "alpha must be a number"),
        ("reverse_kl", {"support": "top_k", "k": 2.5}, "k must be a whole number, got 2.5"),
        ("reverse_kl", {"support": "top_k", "k": True}, "k must be a whole number"),
        ("jsd", {"beta": "half"}, "beta must be a number, got 'half'"),
        ("mopd", {"advantage_student": "old"}, "snapshot"),
        ("mopd", {"advantage_clip": [5, -5]}, "advantage_clip"),
        ("sampled_kl", {"estimator": "k1"}, "the teacher is not in it"),
        ("sampled_kl", {"estimator": "k9"}, "k2, k3"),
        ("sampled_kl", {"temperature": 0}, "temperature"),
        ("no_such_package.objectives:Mine", {}, "cannot import"),
        ("mopd.losses.objectives:Nothing", {}, "has no 'Nothing'"),
        ("builtins:dict", {}, "signature"),
        ("math:pi", {}, "cannot be called"),
        ("fractions:Fraction", {}, "needs = 'sampled' or 'full'"),
    ],
)
def test_mistakes_are_named(name, options, word):
    with pytest.raises(ValueError, match=word):
        make_objective(name, options)


def test_distribution_objective_refuses_a_teacher_of_sampled_scores():
    with pytest.raises(ValueError, match="gives sampled scores only"):
        make_objective("jsd")(**inputs(full=False))


def test_an_objective_from_a_package_outside(tmp_path, monkeypatch):
    package = tmp_path / "their_losses"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "huber.py").write_text(
        "import torch\n"
        "from mopd.losses import ObjectiveResult\n"
        "class LogitMatching:\n"
        "    needs = 'full'\n"
        "    def __init__(self, scale=1.0):\n"
        "        self.scale = scale\n"
        "    def __call__(self, *, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob,\n"
        "                 outcome_advantage):\n"
        "        gap = (student_logits - teacher_logits.detach()).square().mean(-1)\n"
        "        return ObjectiveResult(self.scale * gap, {'gap': gap.detach()})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = inputs()
    result = make_objective("their_losses.huber:LogitMatching", {"scale": 2.0})(**given)
    torch.testing.assert_close(result.loss, 2.0 * result.diagnostics["gap"])
    with pytest.raises(ValueError, match="no option 'size'; it has: scale"):
        make_objective("their_losses.huber:LogitMatching", {"size": 2.0})
    sys.modules.pop("their_losses.huber"), sys.modules.pop("their_losses")
