"""Runs whose objective has an outcome part and a schedule, and whose domain has two teachers: what is refused, said, kept."""

from __future__ import annotations

import json

import pytest

from mopd.check import check_launch, print_check
from mopd.run import train
from tests.tiny_run import records

pytestmark = pytest.mark.timeout(900)
MIXED = ("domains.game.teacher_weights={game: 1, embodied: 3}", "domains.game.teacher_mixture=log_space")


def test_a_launch_says_who_scores_together(tiny_run, capsys):
    answer = check_launch(tiny_run.config(*MIXED))
    assert answer["errors"] == [] and answer["warnings"] == []
    assert answer["domains"]["game"]["mixture"] == {"kind": "log_space", "weights": {"game": 1.0, "embodied": 3.0}}
    assert answer["teachers"]["embodied"]["domains"] == ["embodied", "game"]
    assert answer["domains"]["embodied"]["mixture"] is None
    print_check(answer)
    said = capsys.readouterr().out
    assert "teachers 0.25 game" in said and "0.75 embodied" in said and "mixed in log space" in said
    errors = check_launch(tiny_run.config("train.aggregation_to=word_mean"))["errors"]
    assert len(errors) == 1 and errors[0].startswith("train.aggregation_to: unknown aggregation mode 'word_mean'")


def test_outcomes_schedule_and_mixture_in_one_run(tiny_run, tmp_path):
    train(tiny_run.config(f"run={tmp_path}", *MIXED, "train.objective=mopd", "train.objective_options={alpha: 0.5}",
                          "train.group_size=2", "train.aggregation_to=turn_mean", "train.steps=2",
                          "train.samples_per_step=4"))
    folder = tmp_path / "students" / "student_mixed" / "seed-1"
    lines = records(folder)
    assert [line["aggregation"] for line in lines] == [{"token_mean": 1.0, "turn_mean": 0.0},
                                                       {"token_mean": 0.5, "turn_mean": 0.5}]
    for line in lines:
        for numbers in line["domains"].values():
            groups, rollouts = numbers["outcome_groups"], numbers["samples"].get("rollout", 0)
            assert (groups is None) == (rollouts == 0)
            assert groups is None or groups["groups"] == rollouts and set(groups) == {"groups", "no_spread", "single"}
            assert numbers["unscored_share"] == 0
    assert any(n["outcome_groups"] for line in lines for n in line["domains"].values())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["mixtures"]["game"]["weights"] == {"game": 1.0, "embodied": 3.0}
