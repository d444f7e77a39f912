"""A run's score: smoothed, of every domain alike, the same after a restart."""

from __future__ import annotations

import json

import pytest

from mopd.learner.best import RunScore


def record(**values) -> dict:
    return {"domains": {name: {"reverse_kl_exact": exact, "reverse_kl_k3": k3, "success": success}
                        for name, (exact, k3, success) in values.items()}}


def test_the_mean_over_domains_of_smoothed_values_and_lower_divergence_is_better():
    score = RunScore("reverse_kl")
    assert score.score is None
    score.observe(record(game=(1.0, 9.0, None), science=(None, 3.0, None)))
    assert score.score == -2.0, "the exact one where it is there"
    score.observe(record(game=(2.0, 9.0, None), science=(None, None, None)))
    game = (0.9 * 1.0 + 2.0) / (0.9 + 1.0)
    assert score.score == pytest.approx(-(game + 3.0) / 2)
    score.observe(record(game=(float("nan"), 1.0, None)))
    assert score.score == pytest.approx(-(game + 3.0) / 2), "what is not finite is left out"


def test_success_is_the_higher_the_better_and_survives_a_restart():
    score, again = RunScore("success"), RunScore("success")
    for success in (0.25, 0.5, 1.0):
        score.observe(record(game=(None, None, success)))
    again.load_state_dict(json.loads(json.dumps(score.state_dict())))
    assert again.score == score.score > 0.5
    again.observe(record(game=(None, None, 0.0)))
    assert again.score < score.score, "a copy"
    other = RunScore("reverse_kl")
    other.load_state_dict(score.state_dict())
    assert other.score is None, "another metric begins anew"


def test_without_a_name_nothing_is_observed():
    score = RunScore("")
    score.observe(record(game=(1.0, 1.0, 1.0)))
    assert score.score is None
    with pytest.raises(ValueError, match="reverse_kl, success, reward"):
        RunScore("loss")
