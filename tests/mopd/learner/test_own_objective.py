"""An objective of the user's own inside a LearnerStep: what it answers is checked, its own numbers are reported."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.losses import ObjectiveResult
from mopd.losses.objectives import make_objective
from mopd.selftest import objective_checks, probe_rows
from tests.mopd.learner.test_step import SHARES, build
from tests.mopd.learner.tiny import rollout_row

ROWS = [rollout_row(np.random.default_rng(i), size=20, turns=2, group=i) for i in range(2)]
HERE = "tests.mopd.learner.test_own_objective:Own"


class Own:
    """A forward KL with one fault."""

    needs = "full"

    def __init__(self, fault: str = ""):
        self.fault = fault

    def __call__(self, *, student_logits, teacher_logits, **_):
        p, q = student_logits.log_softmax(-1), teacher_logits.log_softmax(-1)
        loss = (q.exp() * (q - p)).sum(-1)
        numbers = {"peak": p.exp().amax(-1), "loss": torch.zeros_like(loss), "many": torch.zeros(len(loss), 3)}
        if self.fault == "raises":
            raise KeyError("their own fault")
        if self.fault == "nan":
            loss = loss * torch.where(torch.arange(len(loss)) == 1, torch.nan, 1.0)
        if self.fault == "diagnostic":
            numbers["peak"] = numbers["peak"].mean()
        answer = {"scalar": loss.mean(), "column": loss[:, None], "too many": torch.cat([loss, loss]),
                  "no gradient": loss.detach()}.get(self.fault, loss)
        return answer if self.fault == "tensor" else ObjectiveResult(answer, numbers)


@pytest.fixture
def made():
    steps = []

    def make(fault=""):
        steps.append(build(objective=HERE, objective_options={"fault": fault} if fault else {}))
        return steps[-1]
    yield make
    for step in steps:
        step.learner.close()


@pytest.mark.parametrize("fault, words", [
    ("scalar", r"a loss of shape \(\) for 10 tokens; it must be one number per token"),
    ("column", r"a loss of shape \(10, 1\) for 10 tokens"),
    ("too many", r"a loss of shape \(20,\) for 10 tokens"),
    ("no gradient", "does not depend on student_logits"),
    ("tensor", "answered with Tensor; it must be ObjectiveResult"),
    ("diagnostic", r"the diagnostic 'peak' as \(\) for 10 tokens"),
])
def test_what_an_objective_answers_is_checked(made, fault, words):
    """A scalar or a column would be spread over the tokens and train something else without a word."""
    with pytest.raises(ValueError, match=f"train.objective: {HERE} .*{words}"):
        made(fault)(ROWS, shares=SHARES)


def test_a_loss_that_is_not_finite_names_objective_and_domain_and_moves_nothing(made):
    step = made("nan")
    before = [p.detach().clone() for p in step.learner.model.parameters()]
    with pytest.raises(FloatingPointError, match=f"step 0: the loss is nan.*{HERE} .*not finite for 1 tokens of game"):
        step(ROWS, shares=SHARES)
    assert all(torch.equal(a, b) for a, b in zip(before, step.learner.model.parameters(), strict=True))


def test_its_own_error_comes_through(made):
    with pytest.raises(KeyError, match="their own fault"):
        made("raises")(ROWS, shares=SHARES)


def test_its_numbers_are_reported_and_cannot_take_the_place_of_the_loss(made):
    step = made()
    report = step(ROWS, shares=SHARES)
    cell = report.metrics["streams"]["game/rollout"]
    assert cell["loss"] == pytest.approx(report.loss, rel=1e-5) and report.loss > 0
    assert set(cell["diagnostics"]) == {"peak"} and 1 / 61 < cell["diagnostics"]["peak"] < 1
    assert set(report.metrics["domains"]["game"]["diagnostics"]) == {"peak"}


@pytest.mark.parametrize("fault", ["scalar", "column", "tensor", "no gradient"])
def test_the_self_test_says_the_same_before_a_launch(made, fault):
    step = made(fault)
    with pytest.raises(ValueError, match=f"train.objective: {HERE} "):
        objective_checks(step.learner, step, probe_rows(step.domains, range(2, 30), 0))


def test_an_option_that_it_does_not_have_is_refused():
    with pytest.raises(ValueError, match="has no option 'strength'; it has: fault"):
        make_objective(HERE, {"strength": 1})
