"""`mopd train` with one teacher in process and two behind real servers; one of them dies in the middle and comes back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from mopd.learner.model import load_model
from tests.tiny_run import REPOSITORY, environment, mopd, records, start_mopd
from tests.vllm.conftest import KEY_NAME

STEPS = 6
CONFIG = """
include: [{tiny}]
teachers:
  embodied: {{backend: server, model: {embodied}, urls: ["{embodied_url}"], api_key_env: {key}}}
  game: {{backend: server, model: {game}, urls: ["{game_url}"], served_model: game, dtype: float32, retries: 1}}
  local: {{model: {local}}}
domains:
  embodied: {{max_context_tokens: 480}}   # what the servers read
  game: {{max_context_tokens: 480}}
  third:
    environment: babyai
    options: {{sizes: {{train: 60, development: 20, test: 20}}}}
    teacher: local
    prefix_fraction: 0.0
    max_turns: 4
    max_turn_tokens: 6
    environments: 8
train:
  steps: {steps}
  samples_per_step: 9
  objective: mopd
  temperature: 1.0
  domain_schedule: static
  teacher_wait_s: 900
"""


@pytest.fixture(scope="module")
def recipe(tiny_run, servers, models, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "three_teachers.yaml"
    path.write_text(CONFIG.format(
        tiny=tiny_run.path, embodied=models["embodied"], game=models["game"], embodied_url=servers["embodied"].url,
        game_url=servers["game"].url, key=KEY_NAME, local=tiny_run.folder / "teachers" / "embodied", steps=STEPS))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe, tmp_path_factory) -> Path:
    """The folder of the student of a run to which nothing happened."""
    folder = tmp_path_factory.mktemp("undisturbed")
    done = mopd("train", recipe, f"run={folder}", "train.name=whole")
    assert done.returncode == 0, done.stderr
    return folder / "students" / "whole" / "seed-1"


def test_every_token_of_every_domain_is_scored(undisturbed):
    steps = records(undisturbed)
    assert len(steps) == STEPS
    for step in steps:
        assert not step["missing"] and step["tokens"]["trained"] > 0
        for name in ("embodied", "game", "third"):
            assert step["domains"][name]["unscored_share"] == 0.0
    assert {n for s in steps for n, d in s["domains"].items() if d["tokens"]} == {"embodied", "game", "third"}


def test_a_server_that_is_killed_and_comes_back_costs_no_step_and_no_token(undisturbed, recipe, servers, tmp_path):
    """SIGKILL in mid-run; `mopd teacher serve` starts it again at the same address, and ends without a trace."""
    log = tmp_path / "log"
    student = tmp_path / "students" / "whole" / "seed-1"
    run = start_mopd("train", recipe, f"run={tmp_path}", "train.name=whole", "train.selftest=false", log=log)
    serving = None
    try:
        wait_for(lambda: (student / "metrics.jsonl").exists() and len(records(student)) >= 2, run, log)
        servers["game"].kill()
        wait_for(lambda: "The run waits" in log.read_text(), run, log)
        before = len(records(student))
        assert before < STEPS
        serving = subprocess.Popen(
            [sys.executable, "-m", "mopd.cli", "teacher", "serve", str(recipe), "game", "--json", "--max-model-len", "512",
             "--vllm=--max-num-seqs=16"], stdout=subprocess.PIPE, stderr=open(tmp_path / "serve.log", "w"),  # noqa: SIM115
            text=True, cwd=REPOSITORY, env=environment())
        said = json.loads(serving.stdout.readline())
        assert said["url"] == servers["game"].url and said["served_model"] == "game"
        assert run.wait(600) == 0, log.read_text()
    finally:
        run.kill()
        if serving is not None:
            left = psutil.Process(serving.pid).children(recursive=True)
            serving.send_signal(signal.SIGTERM)
            status = serving.wait(60)
    assert status == 0 and left and not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left)
    assert "connection refused" in log.read_text() or "connection broke" in log.read_text()
    same_run(records(undisturbed), records(student))
    for one, other in zip(weights(undisturbed), weights(student), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)


def wait_for(what, run, log: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert run.poll() is None, log.read_text()
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.1)


def same_run(one: list[dict], other: list[dict]) -> None:
    """Step by step the same tokens, all of them scored; numbers to the rounding of scores."""
    assert len(one) == len(other) == STEPS
    for first, second in zip(one, other, strict=True):
        assert first["tokens"]["sampled"] == second["tokens"]["sampled"]
        assert first["tokens"]["trained"] == second["tokens"]["trained"]
        assert not second["missing"]
        for name, domain in first["domains"].items():
            assert second["domains"][name]["unscored_share"] == 0.0
            assert second["domains"][name]["reverse_kl"] == pytest.approx(domain["reverse_kl"], abs=1e-3)


def weights(student: Path):
    return [parameter.detach() for _, parameter in sorted(load_model(student / "model").named_parameters())]


def test_check_shows_all_three_teachers(recipe, servers):
    """After the run: the server that was started above is gone, and `mopd check` says so without losing the others."""
    assert os.environ[KEY_NAME]
    done = mopd("check", recipe)
    said = " ".join((done.stdout + done.stderr).split())
    assert "game" in said and "connection refused" in said
