"""The prefix study on tiny models: a budget of sampled tokens, runs that go on where they stopped, one table for all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mopd import study_prefix
from mopd.config import ConfigError, load_config
from mopd.evaluate import evaluate_models
from mopd.learner.engine import LearnerConfig, learning_rate_at
from mopd.report import build_results, markdown_table, write_report
from mopd.report_factors import STUDY_FILE
from mopd.run import train
from tests.tiny_run import records, same_weights

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]
PREFIX = ["train.prefix_fraction=1", "selection.points_per_sequence=1", "train.domain_schedule=static"]
BUDGET = [*PREFIX, "train.sampled_tokens=120", "train.steps=40", "train.samples_per_step=4", "train.checkpoint_every=2",
          "train.optimizer.schedule=linear", "train.optimizer.final_fraction=0", "train.optimizer.warmup_steps=1"]


class Killed(Exception):
    """Stands for a process that is gone between two steps."""


def killed_after(monkeypatch, step: int) -> None:
    """Training stops dead once `step` steps are recorded."""
    from mopd.metrics import MetricsLog

    write = MetricsLog.write

    def stop(self, record):
        write(self, record)
        if record["step"] == step - 1:
            raise Killed
    monkeypatch.setattr(MetricsLog, "write", stop)


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """A run to its budget, not interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return train(tiny_run.config(f"run={folder}", *BUDGET)).parent


def test_a_run_ends_with_the_step_that_reaches_the_budget(whole):
    sampled = [r["tokens"]["sampled"] for r in records(whole)]
    assert sum(sampled) >= 120 > sum(sampled[:-1]) and len(sampled) < 40
    manifest = json.loads((whole / "model" / "manifest.json").read_text())
    assert manifest["sampled_tokens"] == sum(sampled) and manifest["steps"] == len(sampled)


def test_the_learning_rate_falls_by_what_was_sampled(whole):
    lines = records(whole)
    before = 0
    for line in lines:
        step = line["step"]
        expected = 2e-3 / 2 if step == 0 else 2e-3 * (1 - (max(step, 40 * before / 120) - 1) / 39)
        assert line["learning_rate"] == pytest.approx(expected, rel=1e-9), step
        before += line["tokens"]["sampled"]
    assert lines[-1]["learning_rate"] < 0.35 * 2e-3, "the schedule ends although most of train.steps was never made"


def test_the_steps_count_where_they_are_further_on():
    config = LearnerConfig(learning_rate=1.0, schedule="linear", warmup_steps=0)
    assert learning_rate_at(30, config, 40, 0.5) == learning_rate_at(30, config, 40) == pytest.approx(0.25)
    assert learning_rate_at(10, config, 40, 0.5) == pytest.approx(0.5)
    assert learning_rate_at(10, config, 40, 1.3) == 0.0, "a last step that goes past the budget is the schedule's end"
    assert learning_rate_at(0, LearnerConfig(learning_rate=1.0, warmup_steps=3), 40, 0.9) == 0.25, "warm-up is by steps"


def test_a_killed_run_goes_on_to_the_same_end(tiny_run, tmp_path, whole, monkeypatch):
    config = tiny_run.config(f"run={tmp_path}", *BUDGET)
    with monkeypatch.context() as patch:
        killed_after(patch, 3)  # one step after a checkpoint, so that this step's tokens are sampled a second time
        with pytest.raises(Killed):
            train(config)
    model = train(config)
    assert records(model.parent) == records(whole)
    manifests = [json.loads((folder / "model" / "manifest.json").read_text()) for folder in (whole, model.parent)]
    assert manifests[0]["sampled_tokens"] == manifests[1]["sampled_tokens"]
    assert same_weights(whole / "model", model)


# The study


STUDY = """
include: [{tiny}]
study_prefix:
  seeds: [1]
  common: [train.prefix_fraction=1, selection.points_per_sequence=1, train.domain_schedule=static, train.sampled_tokens=40,
           train.steps=20, train.checkpoint_every=100]
  factors:
    turns:
      n1: [train.fresh_turns=1, train.samples_per_step=4]
      n2: [train.fresh_turns=2, train.samples_per_step=2]
  evaluation: [domains.embodied.evaluation_episodes=6, domains.game.evaluation_episodes=3]
"""


@pytest.fixture
def study(tiny_run, tmp_path):
    """(path of the recipe, overrides, the study's folder): a study whose runs lie beside the shared tiny run."""
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.format(tiny=tiny_run.path))
    return path, [f"run={tmp_path / 'run'}"], tmp_path / "run" / study_prefix.FOLDER


def named(path: Path, overrides: list[str]) -> list[str]:
    config = load_config(path, overrides)
    arms = study_prefix.plan_arms(config.study_prefix)
    configs = study_prefix.arm_configs(path, overrides, arms)
    return [f"{run.name}={run.key}" for run in study_prefix.plan_runs(configs, arms, config.study_prefix.seeds, [])]


def test_a_study_goes_on_where_it_stopped_and_makes_its_tables(study, monkeypatch):
    path, overrides, out = study
    runs = named(path, overrides)
    marker = out / "jobs" / "0.json"
    trained = []

    def counted(config):
        trained.append(config.train.name)
        if len(trained) == 2:
            raise Killed
        return train(config)
    monkeypatch.setattr("mopd.run.train", counted)
    with pytest.raises(Killed):
        study_prefix.run_arms(path, overrides, runs, marker)
    assert not marker.exists()
    study_prefix.run_arms(path, overrides, runs, marker)
    assert trained == ["n1", "n2", "n2"], "a run that is there is not made again"
    assert marker.exists()
    played = {p: p.stat().st_mtime_ns for p in (out / "eval").iterdir()}
    assert len(played) == 4 and not (out.parent / "students").exists()
    study_prefix.run_arms(path, overrides, runs, marker)
    assert len(trained) == 3 and played == {p: p.stat().st_mtime_ns for p in (out / "eval").iterdir()}
    # Play that is missing is played again, and nothing else; another key makes the run anew.
    (out / "eval" / "n2@1.game.json").unlink()
    study_prefix.run_arms(path, overrides, runs, marker)
    again = {p for p in played if p.stat().st_mtime_ns != played[p]}
    assert len(trained) == 3 and again == {out / "eval" / "n2@1.game.json"}
    study_prefix.run_arms(path, overrides, [runs[0], "n2@1=other"], marker)
    assert trained[3:] == ["n2"]

    config = load_config(path, overrides)
    references = {"base": config.student.model, **{f"teacher_{d}": config.teachers[d].model for d in config.domains}}
    evaluated = load_config(path, [*overrides, *config.study_prefix.evaluation, f"evaluate.out={out / 'eval'}"])
    evaluate_models(evaluated, references, list(config.domains))
    arms = study_prefix.plan_arms(config.study_prefix)
    (out / STUDY_FILE).write_text(json.dumps(study_prefix.plan_of(
        config.study_prefix, arms, study_prefix.arm_configs(path, overrides, arms))))
    results = build_results(out)
    for name, arm in results["study"]["arms"].items():
        lines = records(out / "students" / name / "seed-1")
        assert arm["sampled_tokens"] == sum(line["tokens"]["sampled"] for line in lines) >= 40
        assert arm["steps"] == len(lines) and arm["cpu_seconds"] > 0
        depths = [(int(d), n) for line in lines for part in line["domains"].values() for d, n in part["depth"].items()]
        assert arm["depth"] == pytest.approx(sum(d * n for d, n in depths) / sum(n for _, n in depths))
        assert sum(n for _, n in depths) == 4 * len(lines), "points × fresh turns is the same in every arm"
    text = markdown_table(results)
    assert "**turns** (" in text and "| `n1` |" in text and "CPU seconds" in text and "environment steps" not in text
    page = write_report(out).read_text()
    assert "Main effects" in page and "<th scope=row>n2</th>" in page


def test_a_run_of_another_study_is_refused(study):
    path, overrides, out = study
    for wrong in ("n3@1=k", "n1@1", "n1=k"):
        with pytest.raises(ConfigError, match="write ARM@SEED=KEY with an arm of this config: n1, n2"):
            study_prefix.run_arms(path, overrides, [wrong], out / "marker.json")
    assert not out.exists()
