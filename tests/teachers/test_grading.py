"""Reward and advantage edits against the reference cases, and the invariants that each one keeps."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from teachers.grading import (
    centre,
    has_spread,
    length_penalty,
    redistribute,
    rubric_reward,
    segment_penalty,
    zero_hacks,
)

CASE = json.loads((Path(__file__).parents[1] / "cases" / "advantage_edits.json").read_text())
PASSED = CASE["after_hack_zeroing"]


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_hacks_are_zeroed_before_the_mean():
    close(zero_hacks(CASE["test_reward"], CASE["hack"]), PASSED)
    close(centre(zero_hacks(CASE["test_reward"], CASE["hack"])), CASE["centred"])
    assert not np.allclose(centre(CASE["test_reward"]), CASE["centred"])


def test_rubric():
    close(rubric_reward(PASSED, CASE["solution_score"], CASE["behaviour_score"]), CASE["grs_reward"])
    with pytest.raises(ValueError, match="solution_score"):
        rubric_reward([1.0], [1.2], [0.5])


def test_length_penalty_case_and_gate():
    options = {k: v for k, v in CASE["length_penalty"].items() if k not in ("reward", "gate_closed_A0.99")}
    close(length_penalty(PASSED, CASE["length"], CASE["passing"], **options), CASE["length_penalty"]["reward"])
    closed = length_penalty(PASSED, CASE["length"], CASE["passing"], **(options | {"A": 0.99}))
    close(closed, CASE["length_penalty"]["gate_closed_A0.99"])
    exactly_at_the_gate = length_penalty(PASSED, CASE["length"], CASE["passing"], **(options | {"A": 0.5}))
    close(exactly_at_the_gate, PASSED)


def test_length_penalty_edges():
    close(length_penalty([0.0, 0.0], [5, 9], [False, False], A=0.0), [0.0, 0.0])
    close(length_penalty([1.0, 1.0, 0.0], [10, 1000, 10_000], [True, True, False], A=0.0, B=0.0), [1.0, 0.8, 0.0])
    for options, word in (({"s": 0.1, "delta": 0.1}, "s > delta"), ({"B": 101}, "percent"), ({"gamma": 0}, "gamma")):
        with pytest.raises(ValueError, match=word):
            length_penalty([1.0], [1.0], [True], **options)
    with pytest.raises(ValueError, match="lengths"):
        length_penalty([1.0], [0.0], [True], A=0.0)


def test_centre():
    close(centre(PASSED), CASE["centred"])
    close(centre([1.0, 0.0], std_normalise=True), [1.0, -1.0])
    for flat in ([1.0, 1.0, 1.0], [0.3], []):
        close(centre(flat, std_normalise=True), np.zeros(len(flat)))
        assert not has_spread(flat)
    assert has_spread([0.0, 1.0])


@pytest.mark.parametrize("case", CASE["gar"], ids=lambda c: f"lambda_max{c['lambda_max']:g}")
def test_redistribute_cases(case):
    found = redistribute(CASE["centred"], CASE["quality"], CASE["passing"], lambda_max=case["lambda_max"])
    close(found, case["advantage"])


@pytest.mark.parametrize("quality", ([np.nan, 0.5, 1.0], [0.0, 0.5, 1.0], [1.5, 0.5, 1.0], [-1.0, 0.5, 1.0]))
def test_unusable_grades_change_nothing(quality):
    close(redistribute([1.0, -2.0, 1.0], quality, [True, False, True]), [1.0, -2.0, 1.0])


def test_redistribute_without_a_passing_set_or_positive_mass():
    close(redistribute([0.5, -0.5], [1.0, 1.0], [False, False]), [0.5, -0.5])
    close(redistribute([0.5, -0.5], [1.0, 1.0], [False, True]), [0.5, -0.5])
    # a grade that is missing off the passing set does not matter: λ = min(2, 1/0.4), then minus the mean −0.05
    close(redistribute([0.5, -0.5], [0.4, np.nan], [True, False], lambda_max=2.0), [0.45, -0.45])


@settings(max_examples=60, deadline=None)
@given(
    quality=hnp.arrays(float, 6, elements=st.floats(0.01, 1.0)),
    passing=hnp.arrays(bool, 6),
    lambda_max=st.floats(1.0, 50.0),
)
def test_redistribute_keeps_the_group_mean_at_zero_and_the_order_of_grades(quality, passing, lambda_max):
    advantage = centre(passing.astype(float))
    found = redistribute(advantage, quality, passing, lambda_max=lambda_max)
    assert abs(found.mean()) < 1e-9
    graded = found[passing][np.argsort(quality[passing], kind="stable")]
    assert (np.diff(graded) >= -1e-12).all()


def test_segment_penalty_case():
    case = CASE["segment_penalty"]
    found = segment_penalty(
        CASE["centred"], case["token_sequence"], case["flag"], kappa=case["kappa"], alpha_max=case["alpha_max"],
        beta_min=case["beta_min"],
    )  # fmt: skip
    close(found, case["token_advantage"])


@settings(max_examples=80, deadline=None)
@given(
    advantage=hnp.arrays(float, 5, elements=st.floats(-2.0, 2.0)),
    tokens=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=40),
)
def test_segment_penalty_conserves_both_sums_when_nothing_is_bounded(advantage, tokens):
    owner, flag = np.array([t[0] for t in tokens], int), np.array([t[1] for t in tokens], bool)
    plain = advantage[owner]
    found = segment_penalty(advantage, owner, flag, kappa=2.0, alpha_max=1e12, beta_min=-1e12)
    for sign in (1, -1):
        side = plain * sign > 0
        if np.abs(plain[side & ~flag]).sum() > 1e-6:
            assert found[side].sum() == pytest.approx(plain[side].sum(), rel=1e-6, abs=1e-6)
    assert (found[flag & (plain > 0)] == 0).all()
    close(found[flag & (plain < 0)], 2.0 * plain[flag & (plain < 0)])


def test_segment_penalty_edges():
    close(segment_penalty([1.0, -1.0], [0, 1], [True, True], kappa=3.0), [0.0, -3.0])
    close(segment_penalty([1.0, -1.0, 0.0], [0, 1, 2], [False, False, True]), [1.0, -1.0, 0.0])
    assert segment_penalty([1.0], [], []).shape == (0,)
    with pytest.raises(ValueError, match="token_sequence"):
        segment_penalty([1.0], [1], [False])
    with pytest.raises(ValueError, match="both be"):
        segment_penalty([1.0], [0, 0], [False])


def test_a_failure_that_slipped_in_is_refused_by_name():
    with pytest.raises(ValueError, match="reward must be finite"):
        centre([1.0, np.nan])
    with pytest.raises(ValueError, match="one length"):
        zero_hacks([1.0, 0.0], [True])
