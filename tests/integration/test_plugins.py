"""A domain with its environment, an objective and a selection strategy from a package outside the repository."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.tiny_run import mopd

pytestmark = pytest.mark.timeout(900)
PACKAGE = '''
"""Somebody's own package: it knows the small interfaces of mopd and nothing of its inside."""

from __future__ import annotations

import numpy as np

from mopd.environments.base import Observation, Task
from mopd.losses import ObjectiveResult, divergence


def note(trace, what):
    with open(trace, "a") as file:
        file.write(what + "\\n")


class Counting:
    """Count up to the task's number: say the next number in words."""

    WORDS = ("one", "two", "three", "four", "five")

    def __init__(self, trace):
        self.trace, self.at, self.task = trace, 0, None

    def reset(self, task, *, expert=False):
        self.task, self.at = task, 0
        note(self.trace, "reset")
        return Observation("at zero", instruction=f"count to {self.WORDS[task.seed % 5]}")

    def step(self, action):
        right = action == self.WORDS[self.at]
        self.at += right
        done = self.at > self.task.seed % 5
        text = f"at {self.WORDS[self.at - 1]}" if self.at else "at zero"
        return Observation(text, score=float(done), done=done, success=done, malformed=action not in self.WORDS)

    def expert_action(self):
        return self.WORDS[self.at]

    def close(self):
        pass


class Family:
    name, version, system_prompt = "counting", "1", "Say a number."

    def __init__(self, trace):
        self.trace = trace

    def tasks(self, split):
        start = ("train", "development", "test").index(split) * 100
        return [Task("count", start + i, split) for i in range(20)]

    def create(self):
        return Counting(self.trace)

    def close(self):
        pass


def family(*, trace):
    return Family(trace)


class HalfAndHalf:
    """The mean of both KLs."""

    needs = "full"

    def __init__(self, trace, weight=0.5):
        self.trace, self.weight = trace, weight

    def __call__(self, *, student_logits, teacher_logits, **_):
        note(self.trace, "objective")
        loss = (self.weight * divergence(student_logits, teacher_logits, kind="reverse_kl")
                + (1 - self.weight) * divergence(student_logits, teacher_logits, kind="forward_kl"))
        return ObjectiveResult(loss, {})


class LastTurns:
    """Only the last decision point of each trajectory."""

    by_step = False

    def __init__(self, trace):
        self.trace = trace

    def __call__(self, index, rows, step):
        note(self.trace, "strategy")
        return (index.turn[rows] == index.turns[rows] - 1).astype(np.float64)
'''

CONFIG = """
run: {run}
threads: 1
student: {{model: {base}}}
teachers: {{counting: {{model: {teacher}}}}}
domains:
  counting:
    environment: their_package.things:family
    options: {{trace: {trace}}}
    teacher: counting
    max_turns: 5
    max_turn_tokens: 5
    demonstrations: 12
    novice_episodes: 0
selection: {{strategy: "their_package.things:LastTurns", options: {{trace: {trace}}}}}
train:
  steps: 3
  samples_per_step: 6
  teacher_prefix_share: 0
  objective: their_package.things:HalfAndHalf
  objective_options: {{trace: {trace}, weight: 0.3}}
"""


@pytest.fixture
def outside(tmp_path, tiny_run):
    package = tmp_path / "elsewhere" / "their_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(PACKAGE)
    (tmp_path / "mine.yaml").write_text(CONFIG.format(
        run=tmp_path / "run", base=tiny_run.folder / "base", teacher=tiny_run.folder / "teachers" / "game",
        trace=tmp_path / "trace"))
    return tmp_path


def test_a_domain_an_objective_and_a_strategy_from_outside(outside):
    def run(*arguments):
        done = mopd(*arguments, PYTHONPATH=str(outside / "elsewhere"), cwd=outside)
        assert done.returncode == 0, done.stderr
        return done.stdout
    config = outside / "mine.yaml"
    transcripts = outside / "counting.jsonl"
    run("demonstrate", config, "--domain", "counting", "--out", transcripts)
    assert "12 demonstrations" in run("import", config, "--file", transcripts)
    (outside / "trace").write_text("")
    assert "3 steps" in run("train", config)
    used = Counter((outside / "trace").read_text().split())
    assert used["objective"] >= 3 and used["strategy"] == 1 and used["reset"] >= 3 * 3
    student = outside / "run" / "students" / "student_mixed" / "seed-1"
    for line in (student / "metrics.jsonl").read_text().splitlines():
        domain = json.loads(line)["domains"]["counting"]
        assert domain["streams"]["rollout"]["tokens"] > 0
        assert domain["streams"]["sft_prefix"]["sequences"] == 3, "the strategy leaves one point of each trajectory"
    assert (student / "model" / "model.safetensors").is_file()


def test_a_package_that_is_not_there_is_named(outside):
    done = mopd("check", outside / "mine.yaml", "store=" + str(outside / "none"), "--json")
    assert done.returncode == 2
    errors = json.loads(done.stdout)["errors"]
    for key in ("domains.counting.environment", "train.objective"):
        (error,) = [e for e in errors if e.startswith(key)]
        assert "their_package" in error
