"""The prefix study without models: which arms there are, what is run again, and main effects computed by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config import ConfigError, StudyPrefixConfig, load_config
from mopd.demo import Stages
from mopd.report_factors import STUDY_FILE, effect_rows, effects_markdown, main_effects, planned, read_plan, study_results
from mopd.statistics import mean_interval, t_quantile
from mopd.study_prefix import (
    QUICK,
    RECIPE,
    Run,
    _job,
    _parts,
    _record,
    arm_configs,
    plan_arms,
    plan_of,
    plan_runs,
    study_folder,
)
from prefix_store.selection import make_strategy

FACTORS = {"strategy": {"uniform": ["a=1"], "kappa0.7": ["a=2", "b=2"]}, "turns": {"n1": ["c=1"], "n4": ["c=4"]}}


# Arms


def test_every_combination_is_an_arm_with_common_overrides_first():
    arms = plan_arms(StudyPrefixConfig(factors=FACTORS, common=["x=0"]))
    assert [arm.name for arm in arms] == ["uniform-n1", "uniform-n4", "kappa0.7-n1", "kappa0.7-n4"]
    assert arms[3].levels == {"strategy": "kappa0.7", "turns": "n4"}
    assert arms[3].overrides == ("x=0", "a=2", "b=2", "c=4")


def test_only_keeps_the_arms_that_fit_and_names_a_pattern_that_fits_none():
    study = StudyPrefixConfig(factors=FACTORS, only=["*-n4", "uniform-*"])
    assert [arm.name for arm in plan_arms(study)] == ["uniform-n1", "uniform-n4", "kappa0.7-n4"]
    with pytest.raises(ConfigError, match="no arm fits 'n4'; there is uniform-n1, uniform-n4"):
        plan_arms(StudyPrefixConfig(factors=FACTORS, only=["n4"]))


@pytest.mark.parametrize("factors, words", [
    ({}, "factors: empty"),
    ({"turns": {}}, "factors.turns: has no levels"),
    ({"turns": {"../n1": []}}, "level '../n1' needs a name of letters"),
    ({"turns": {"n@1": []}}, "level 'n@1' needs a name"),
    ({"turns": {"a-b": []}}, "level 'a-b' needs a name"),
    ({"turns": {"": []}}, "level '' needs a name"),
])
def test_factors_that_make_no_arms_are_refused(factors, words):
    with pytest.raises(ConfigError, match="study_prefix") as caught:
        plan_arms(StudyPrefixConfig(factors=factors))
    assert words in str(caught.value)


def test_an_arm_whose_overrides_do_not_fit_is_named(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(f"include: [{RECIPE}]\nstudy_prefix: {{factors: {{turns: {{n9: [train.fresh_turnz=9]}}}}}}\n")
    arms = plan_arms(load_config(path, ['study_prefix.only=["uniform-n9-teacher"]']).study_prefix)
    with pytest.raises(ConfigError, match="(?s)arm uniform-n9-teacher: .*did you mean fresh_turns") as caught:
        arm_configs(path, [], arms)
    assert len(caught.value.errors) == 1


def test_the_recipes_arms_differ_in_their_factors_alone():
    config = load_config(RECIPE)
    arms = plan_arms(config.study_prefix)
    assert len(arms) == 9 * 2 * 2 and len(config.study_prefix.seeds) == 2
    # A configuration takes its time to read: one arm of every strategy, and every arm of one of them.
    arms = [arm for arm in arms if arm.name.endswith("n1-teacher") or arm.levels["strategy"] == "pivot"]
    configs = arm_configs(RECIPE, [], arms)
    for arm in arms:
        own = configs[arm.name]
        train, selection = own.train, own.selection
        assert train.fresh_turns * train.samples_per_step == 36 and train.samples_per_step % len(own.domains) == 0
        assert train.prefix_fraction == 1 and train.demonstration_fraction == 0 and train.sampled_tokens
        assert train.teacher_prefix_share == {"teacher": 1, "expert": 0}[arm.levels["source"]]
        assert selection.points_per_sequence == 1 and train.domain_schedule == "static"
        make_strategy(selection.strategy, selection.options, steps=train.steps)  # refuses options that do not fit
    varied = {"name", "fresh_turns", "samples_per_step", "teacher_prefix_share"}
    assert len({json.dumps({k: v for k, v in vars(c.train).items() if k not in varied}, default=vars)
                for c in configs.values()}) == 1
    assert len({json.dumps(vars(c.selection)) for c in configs.values()}) == 9
    plan = plan_of(config.study_prefix, arms, configs)
    assert plan["factors"]["turns"] == ["n1", "n4"] and len(plan["factors"]["strategy"]) == 9 and plan["seeds"] == [1, 2]
    assert plan_of(config.study_prefix, arms[:1], configs)["factors"]["strategy"] == ["uniform"], "levels that are there"
    quick = load_config(QUICK)
    assert len(plan_arms(quick.study_prefix)) == 8 and quick.run == "runs/demo-quick"
    assert quick.base.steps < config.base.steps, "the teachers of `make demo QUICK=1`"
    assert all(c.train.sampled_tokens < 2000 for c in arm_configs(QUICK, [], plan_arms(quick.study_prefix)[:1]).values())


# What is run again


def keys(*overrides: str, reads=()) -> dict[str, str]:
    fixed = ['study_prefix.only=["uniform-n1-expert", "pivot-n1-expert"]', *overrides]
    config = load_config(RECIPE, fixed)
    arms = plan_arms(config.study_prefix)
    runs = plan_runs(arm_configs(RECIPE, fixed, arms), arms, config.study_prefix.seeds, list(reads))
    assert [run.seed for run in runs] == sorted(run.seed for run in runs), "seed by seed"
    return {run.name: run.key for run in runs}


def test_a_changed_arm_alone_is_run_again():
    before = keys()
    assert len(before) == len(set(before.values())) == 4
    changed = keys('study_prefix.factors.strategy.pivot=[selection.strategy=pivot,"selection.options={quantile: 0.5}"]')
    assert {name for name in before if changed[name] != before[name]} == {"pivot-n1-expert@1", "pivot-n1-expert@2"}
    more = keys("study_prefix.seeds=[1, 2, 3]")
    assert before.items() <= more.items() and len(more) == 6
    for everything in ("train.objective=jsd", "domains.game.max_turn_tokens=5"):
        assert not set(before.values()) & set(keys(everything).values()), everything
    assert not set(before.values()) & set(keys(reads=["other teachers"]).values())


def test_a_process_trains_runs_of_one_seed(tmp_path):
    config = load_config(RECIPE, ["study_prefix.seeds=[1, 2]"])
    arms = plan_arms(config.study_prefix)[:5]
    runs = [Run(arm, seed, f"{seed}{arm.name}") for seed in (1, 2) for arm in arms]
    parts = _parts(runs, 3)
    assert [len(part) for part in parts] == [3, 2, 3, 2] and [run for part in parts for run in part] == runs
    overrides = [f"run={tmp_path}"]
    stages = Stages(RECIPE, overrides, load_config(RECIPE, overrides))
    out = study_folder(stages.config)
    job = _job(stages, out, 0, parts[0], ["collect_game"], 5.0)
    assert job.arguments.count("--run") == 3 and f"{runs[0].name}={runs[0].key}" in job.arguments
    assert job.outputs == [out / "jobs" / "0.json"], "a job that starts again removes its outputs, not its students"


def test_a_marker_goes_when_a_run_of_its_job_is_not_there_any_more(tmp_path):
    overrides = [f"run={tmp_path}"]
    stages = Stages(RECIPE, overrides, load_config(RECIPE, overrides))
    out, domains = study_folder(stages.config), list(stages.config.domains)
    run = Run(plan_arms(stages.config.study_prefix)[0], 1, "k")
    folder = out / "students" / run.arm.name / "seed-1"
    for path in (folder / "model" / "config.json", *(out / "eval" / f"{run.name}.{d}.json" for d in domains),
                 out / "jobs" / "0.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    (folder / "run.json").write_text(json.dumps({"key": "k", "trained": 1.0, "evaluated": domains}))
    (marker,) = _job(stages, out, 0, [run], [], 1.0).outputs
    assert marker.exists()
    assert _record(out, Run(run.arm, 1, "another")) == {}, "what another config made does not count"
    (out / "eval" / f"{run.name}.game.json").unlink()
    assert _record(out, run)["evaluated"] == [d for d in domains if d != "game"]
    _job(stages, out, 0, [run], [], 1.0)
    assert not marker.exists()


# Main effects


CELLS = {  # (strategy, turns, seed) → normalised
    ("u", "n1", "1"): 0.50, ("u", "n1", "2"): 0.54, ("u", "n4", "1"): 0.40, ("u", "n4", "2"): 0.46,
    ("g", "n1", "1"): 0.60, ("g", "n1", "2"): 0.58, ("g", "n4", "1"): 0.42, ("g", "n4", "2"): 0.52}
LEVELS = {"strategy": ["u", "g"], "turns": ["n1", "n4"]}


def test_main_effects_are_those_computed_by_hand():
    cells = {key: {"normalised": value, "sampled_tokens": 100 + i} for i, (key, value) in enumerate(CELLS.items())}
    effects = main_effects(cells, LEVELS)
    strategy = effects["strategy"]
    assert (strategy["reference"], strategy["blocks"], strategy["left_out"]) == ("u", 4, 0)
    first, second = strategy["levels"]
    assert first["level"] == "u" and "difference" not in first
    assert first["means"] == pytest.approx({"normalised": 1.90 / 4, "sampled_tokens": 101.5})
    assert second["means"]["normalised"] == pytest.approx(2.12 / 4)
    # Pairs 0.10, 0.04, 0.02, 0.06: mean 0.055, s² = (0.045² + 0.015² + 0.035² + 0.005²) / 3, t(3) = 3.1824
    half = 3.18244630528371 * math.sqrt((0.045**2 + 0.015**2 + 0.035**2 + 0.005**2) / 3) / 2
    assert second["difference"] == pytest.approx(0.055)
    assert (second["low"], second["high"]) == pytest.approx((0.055 - half, 0.055 + half))
    assert second["ahead"] == 4
    turns = effects["turns"]["levels"][1]
    # n4 − n1: −0.10, −0.08, −0.18, −0.06
    assert turns["difference"] == pytest.approx(-0.105) and turns["ahead"] == 0


def test_a_block_without_one_of_the_levels_is_left_out():
    cells = {key: {"normalised": value} for key, value in CELLS.items() if key != ("g", "n4", "2")}
    cells["g", "n1", "2"]["normalised"] = math.nan
    strategy = main_effects(cells, LEVELS)["strategy"]
    assert (strategy["blocks"], strategy["left_out"]) == (2, 2)
    assert strategy["levels"][0]["means"]["normalised"] == pytest.approx(0.45), "both levels over the same blocks"
    assert strategy["levels"][1]["difference"] == pytest.approx(0.06)
    assert set(main_effects(cells, {**LEVELS, "turns": ["n1"]})) == {"strategy"}, "one level has no effect to show"
    nothing = main_effects({}, LEVELS)["turns"]
    assert nothing["blocks"] == 0 and math.isnan(nothing["levels"][1]["difference"])


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4), st.integers(1, 3), st.integers(2, 3), st.integers(0, 99))
def test_a_balanced_additive_study_gives_back_its_effects(first, second, seeds, number):
    rng = np.random.default_rng(number)
    effect, other, luck = rng.normal(size=first), rng.normal(size=second), rng.normal(size=seeds)
    levels = {"f": [f"f{i}" for i in range(first)], "g": [f"g{i}" for i in range(second)]}
    cells = {(f"f{i}", f"g{j}", str(s)): {"normalised": effect[i] + other[j] + luck[s]}
             for i in range(first) for j in range(second) for s in range(seeds)}
    for row, value in zip(main_effects(cells, levels)["f"]["levels"][1:], effect[1:], strict=True):
        assert (row["difference"], row["low"], row["high"]) == pytest.approx((value - effect[0],) * 3, abs=1e-9)


def test_student_t():
    # Fisher and Yates' table, two-sided 5%
    for degrees, value in ((1, 12.7062), (2, 4.3027), (3, 3.1824), (7, 2.3646), (8, 2.3060), (30, 2.0423), (35, 2.0301)):
        assert t_quantile(0.975, degrees) == pytest.approx(value, abs=6e-5)
    assert t_quantile(0.5, 4) == pytest.approx(0, abs=1e-9) and t_quantile(0.95, 10) == pytest.approx(1.8125, abs=6e-5)
    assert mean_interval(np.array([1.0, 3.0])) == pytest.approx((2.0, 2 - 12.7062047, 2 + 12.7062047))
    assert mean_interval(np.array([2.0]))[0] == 2.0 and math.isnan(mean_interval(np.array([2.0]))[1])
    for wrong in (lambda: t_quantile(0.2, 3), lambda: t_quantile(0.9, 0), lambda: mean_interval(np.array([math.nan, 1]))):
        with pytest.raises(ValueError):
            wrong()


# Plans and tables


def test_a_plan_is_read_back_and_a_broken_one_becomes_a_note(tmp_path):
    notes: list[str] = []
    assert read_plan(tmp_path, notes) is None and notes == []
    (tmp_path / STUDY_FILE).write_text(json.dumps({
        "factors": {"turns": ["n1", "n4"]}, "seeds": [1, 2],
        "arms": {n: {"levels": {"turns": n}, "budget": 9} for n in ("n1", "n4")}}))
    plan = read_plan(tmp_path, notes)
    assert plan["arms"] == {"n1": {"turns": "n1"}, "n4": {"turns": "n4"}} and plan["seeds"] == ["1", "2"]
    kept = planned(plan, {"base": {"": {}}, "n1": {"1": {}, "3": {}}, "old": {"1": {}}})
    assert kept == {"base": {"": {}}, "n1": {"1": {}}}, "runs of an earlier plan are left out"
    for broken in ("{", "[]", '{"factors": {}}', '{"factors": {"turns": ["n1"]}, "seeds": [1], "arms": {"n1": {}}}'):
        (tmp_path / STUDY_FILE).write_text(broken)
        notes.clear()
        assert read_plan(tmp_path, notes) is None and len(notes) == 1, broken


def test_what_is_missing_is_said_and_the_rest_is_shown():
    plan = {"factors": {"turns": ["n1", "n4"]}, "seeds": ["1", "2"], "budget": {"n1": 9, "n4": 9},
            "arms": {n: {"turns": n} for n in ("n1", "n4")}}
    step = {"tokens": {"sampled": 10}, "seconds": {"cpu": 0.5}, "domains": {"game": {"depth": {"0": 3, "2": 1}}}}
    trained = {"n1": {"1": [step, step]}, "n4": {"1": [step], "2": [step]}}
    seeds = {"n1": {"1": {"normalised": 0.4, "scores": {"game": 0.5}}},
             "n4": {"1": {"normalised": 0.3, "scores": {"game": 0.25}}, "2": {"normalised": None, "scores": {"game": 0.1}}}}
    notes: list[str] = []
    study = study_results(plan, {"seeds": seeds}, trained, notes)
    assert study["arms"]["n1"] == {"levels": {"turns": "n1"}, "budget": 9, "seeds": 1, "steps": 2, "sampled_tokens": 20,
                                   "cpu_seconds": 1.0, "depth": 0.5}
    assert notes == ["2 of 4 runs have no normalised score yet: n1@2, n4@2.",
                     "Main effect of turns: 1 of 2 blocks are left out, a level of theirs is missing."]
    titles, rows = effect_rows(study["effects"]["turns"], ["game"], str)
    assert titles[:5] == ["level", "game", "normalised", "against n1", "ahead in"]
    assert rows[0][:5] == ["n1", "0.50", "0.40", "—", "—"] and rows[1][:3] == ["n4", "0.25", "0.30"]
    assert rows[1][3].startswith("-0.100") and rows[1][4] == "0 of 1" and rows[1][-1] == "0.50"
    assert "| `n4` | 0.25 | 0.30 |" in effects_markdown(study, ["game"], str)


def test_the_page_and_the_recipe_name_the_same_factors():
    page = (Path(RECIPE).parents[1] / "docs" / "prefix_sampling.md").read_text()
    for levels in load_config(RECIPE).study_prefix.factors.values():
        assert all(f"`{level}`" in page for level in levels)
