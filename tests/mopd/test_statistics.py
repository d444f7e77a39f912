"""Intervals and normalised scores against values worked out by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd.statistics import (
    bootstrap_interval,
    normalised_score,
    paired_bootstrap,
    paired_difference,
    wilson_interval,
)


def test_wilson_matches_the_formula_worked_by_hand():
    # p = 0.8, n = 10, z = 1.959964: centre (0.8 + 0.192073) / 1.384146, half width 0.226738.
    low, high = wilson_interval(8, 10)
    assert (low, high) == pytest.approx((0.490162, 0.943318), abs=1e-5)


@given(n=st.integers(1, 400), data=st.data())
def test_wilson_holds_the_share_and_stays_in_bounds(n, data):
    k = data.draw(st.integers(0, n))
    low, high = wilson_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    assert high - low > 0
    other = wilson_interval(n - k, n)
    assert (1 - other[1], 1 - other[0]) == pytest.approx((low, high), abs=1e-12)


def test_wilson_at_the_edges():
    assert wilson_interval(0, 10)[0] == 0 and wilson_interval(10, 10)[1] == 1
    assert all(math.isnan(x) for x in wilson_interval(0, 0))
    for bad in ((-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="successes"):
            wilson_interval(*bad)
    with pytest.raises(ValueError, match="confidence"):
        wilson_interval(1, 5, confidence=95)


def test_bootstrap_of_a_mean_is_close_to_the_normal_interval_and_repeatable():
    values = np.random.default_rng(0).normal(2.0, 1.0, 400)
    low, high = bootstrap_interval(values, seed=3)
    half = 1.96 * values.std() / 20
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.015)
    assert (low, high) == bootstrap_interval(values, seed=3)
    assert (low, high) != bootstrap_interval(values, seed=4)
    assert bootstrap_interval(np.ones(5)) == (1.0, 1.0)
    assert math.isnan(bootstrap_interval(np.array([]))[0])
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(np.array([1.0, math.nan]))


def test_normalised_score_by_hand():
    student, base, teacher = {"game": 0.6, "science": 0.3}, {"game": 0.2, "science": 0.1}, {"game": 0.7, "science": 0.5}
    score = normalised_score(student, base, teacher)
    assert score.by_domain == pytest.approx({"game": 0.8, "science": 0.5})
    assert score.mean == pytest.approx(0.65) and score.words == ()


def test_a_teacher_not_above_the_base_gives_nan_and_words():
    student, base, teacher = {"game": 0.6, "science": 0.3}, {"game": 0.2, "science": 0.5}, {"game": 0.7, "science": 0.5}
    score = normalised_score(student, base, teacher)
    assert math.isnan(score.mean) and math.isnan(score.by_domain["science"])
    assert score.by_domain["game"] == pytest.approx(0.8)
    assert score.words == ("science: no normalised score, the teacher (0.500) is not above the base (0.500)",)
    with pytest.raises(ValueError, match="same domains"):
        normalised_score({"game": 0.6}, {"science": 0.1}, {"game": 0.7})
    with pytest.raises(ValueError, match="same domains"):
        normalised_score({}, {}, {})


def test_paired_bootstrap_by_hand():
    """Two tasks: a resample is (a, a), (a, b), (b, a) or (b, b), each a quarter; jointly they can be listed by hand."""
    student, base, teacher = np.array([[1.0, 0.0], [1.0, 1.0]]), np.array([0.0, 0.0]), np.array([1.0, 1.0])
    # Mean over the two training seeds by task: a 1, b 0.5. Resampled means 1, 0.75, 0.75, 0.5, over (1 − 0).
    result = paired_bootstrap({"game": student}, {"game": base}, {"game": teacher}, resamples=4000)
    assert result.value == 0.75
    values, counts = np.unique(result.samples, return_counts=True)
    assert values.tolist() == [0.5, 0.75, 1.0]
    assert counts / 4000 == pytest.approx([0.25, 0.5, 0.25], abs=0.03)
    assert (result.low, result.high) == (0.5, 1.0)
    assert result.by_domain_interval["game"] == (0.5, 1.0) and result.undefined == 0


def test_tasks_are_resampled_jointly():
    """A student that equals its teacher on every task has 1 in every resample; unpaired drawing would spread."""
    rng = np.random.default_rng(1)
    teacher = (rng.random(200) < 0.7).astype(float)
    base = teacher * (rng.random(200) < 0.5)
    same = paired_bootstrap({"d": teacher}, {"d": base}, {"d": teacher})
    assert np.allclose(same.samples, 1) and (same.low, same.high) == pytest.approx((1, 1))
    nothing = paired_bootstrap({"d": base}, {"d": base}, {"d": teacher})
    assert np.allclose(nothing.samples, 0)
    assert paired_difference(same, nothing) == pytest.approx((1, 1, 1))


def test_interval_against_every_resample_listed():
    """Three tasks, two domains: the samples spread as all 27 × 27 resamples listed, undefined ones left out, do."""
    data = {"x": ([1, 0, 1], [0, 0, 1], [1, 1, 1]), "y": ([0.5, 0, 1], [0, 0, 0], [1, 1, 0.5])}
    result = paired_bootstrap(*({d: np.array(v[i], float) for d, v in data.items()} for i in range(3)), resamples=20000)
    draws = [list(i) for i in itertools.product(range(3), repeat=3)]
    by_domain = {}
    for d, (s, b, t) in data.items():
        means = [[np.mean([row[j] for j in i]) for row in (s, b, t)] for i in draws]
        by_domain[d] = [(s - b) / (t - b) if t > b else np.nan for s, b, t in means]
    listed = np.array([(a + b) / 2 for a in by_domain["x"] for b in by_domain["y"]])
    assert result.undefined == pytest.approx(np.isnan(listed).mean(), abs=0.01) and result.undefined > 0
    assert result.value == pytest.approx((0.5 + 0.6) / 2)
    assert np.nanmean(result.samples) == pytest.approx(np.nanmean(listed), abs=0.01)
    drawn, listed = (np.sort(x[~np.isnan(x)]) for x in (result.samples, listed))
    at = np.linspace(-0.51, 1.51, 40)
    below = [np.searchsorted(x, at) / len(x) for x in (drawn, listed)]
    assert np.abs(below[0] - below[1]).max() < 0.02
    assert (result.low, result.high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])))


def test_too_many_undefined_resamples_give_no_interval_but_words():
    teacher, base = np.array([1.0, 0, 0, 0]), np.array([0.0, 0, 0, 0])
    result = paired_bootstrap({"d": teacher}, {"d": base}, {"d": teacher})
    assert result.value == 1 and result.undefined == pytest.approx(0.75**4, abs=0.03)
    assert math.isnan(result.low) and "evaluate on more tasks" in result.words[0]


def test_resamples_do_not_depend_on_the_other_domains():
    rng = np.random.default_rng(2)
    one = {d: [(rng.random(50) < p).astype(float) for p in (0.5, 0.1, 0.8)] for d in "ab"}
    both = paired_bootstrap(*({d: v[i] for d, v in one.items()} for i in range(3)))
    turned = paired_bootstrap(*({d: one[d][i] for d in "ba"} for i in range(3)))
    alone = paired_bootstrap(*({"a": one["a"][i]} for i in range(3)))
    assert both.by_domain_interval["a"] == alone.by_domain_interval["a"]
    assert np.allclose(both.samples, turned.samples, equal_nan=True)


def test_tasks_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match="game needs the same tasks"):
        paired_bootstrap({"game": np.ones(3)}, {"game": np.ones(4)}, {"game": np.ones(3)})
    a, b = (paired_bootstrap({"d": np.ones(9)}, {"d": np.zeros(9)}, {"d": np.ones(9)}, resamples=r) for r in (10, 20))
    with pytest.raises(ValueError, match="different numbers"):
        paired_difference(a, b)
