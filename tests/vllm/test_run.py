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

from mopd.check import check_launch
from mopd.learner.model import load_model
from mopd.run import train
from mopd.sampling.demo_tokenizer import train_tokenizer
from teachers.scoring.alignment import UNALIGNED
from tests.tiny_run import REPOSITORY, environment, mopd, records, start_mopd, tiny_model
from tests.vllm.conftest import KEY_NAME, MODELS, free_port

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
            servers["game"].start()  # for the tests that follow
    assert status == 0 and left and not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left)
    assert "connection refused" in log.read_text() or "connection broke" in log.read_text()
    same_run(records(undisturbed), records(student))
    for one, other in zip(weights(undisturbed), weights(student), strict=True):
        torch.testing.assert_close(one, other, atol=2e-4, rtol=0)
    servers["game"].wait()


def test_forward_kl_from_a_server_s_likeliest_ids_trains_as_from_the_model(tiny_run, servers, models, tmp_path):
    """Against the same teacher in this process, of which the whole distribution is there."""
    options = ("train.objective=forward_kl", "train.objective_options={support: top_k, k: 8}", "train.steps=2",
               "train.domain_schedule=static", "domains.game.max_context_tokens=480", "consistency.points=0",
               f"teachers.game.model={models['game']}")
    at = ("teachers.game.backend=server", f"teachers.game.urls=[{servers['game'].url}]")
    for name, more in (("far", at), ("near", ())):
        train(tiny_run.config(f"run={tmp_path / name}", *options, *more))
    far, near = (records(tmp_path / name / "students" / "student_mixed" / "seed-1") for name in ("far", "near"))
    assert len(far) == len(near) == 2 and not far[0]["missing"]
    assert far[0]["loss"] == pytest.approx(near[0]["loss"], rel=1e-4)
    assert far[0]["gradient_norm"] == pytest.approx(near[0]["gradient_norm"], rel=1e-3)
    game, whole = (step["domains"]["game"] for step in (far[0], near[0]))
    assert game["tokens"] == whole["tokens"] > 0 and game["unscored_share"] == 0.0
    assert 0 < game["forward_kl"] <= whole["forward_kl"] and game["reverse_kl_exact"] is None
    [error] = check_launch(tiny_run.config(*options, *at, "train.objective_options.k=21"))["errors"]
    assert "no more than 20 likeliest ids" in error and "--max-logprobs 21" in error


def test_a_server_with_another_tokenizer_scores_a_whole_run_by_text(tiny_run, servers, models, tmp_path):
    """The student has a tokenizer of its own; one teacher is behind a server, the other in this process."""
    texts = [turn["action"] + " " + turn["observation"] for name in MODELS
             for line in (tiny_run.folder / f"{name}.jsonl").read_text().splitlines() for turn in json.loads(line)["turns"]]
    own = train_tokenizer(texts, 330)
    assert own.get_vocab() != tiny_run.tokenizer().get_vocab()
    student = tiny_model(own, tmp_path / "student", 5)
    train(tiny_run.config(
        f"run={tmp_path}", f"student.model={student}", "train.steps=2", "train.prefix_fraction=0", "train.objective=mopd",
        "train.domain_schedule=static", "consistency.points=0", f"teachers.game.model={models['game']}",
        "teachers.game.backend=server", f"teachers.game.urls=[{servers['game'].url}]", "teachers.game.cross_tokenizer=true",
        "teachers.embodied.cross_tokenizer=true"))
    found = records(tmp_path / "students" / "student_mixed" / "seed-1")
    assert len(found) == 2
    for step in found:
        for name in MODELS:
            domain = step["domains"][name]
            assert domain["tokens"] > 0 and domain["unscored_share"] < 0.6 and domain["reverse_kl_k3"] > 0
        reasons = {reason for counts in step["missing"].values() for reason in counts}
        assert reasons <= UNALIGNED, reasons


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
    """Also one whose server is gone, without losing the others."""
    assert os.environ[KEY_NAME]
    done = mopd("check", recipe)
    assert done.returncode == 0 and all(name in done.stdout for name in ("embodied", "game", "local")), done.stderr
    done = mopd("check", recipe, f"teachers.game.urls=[http://127.0.0.1:{free_port()}]")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 2 and "game" in said and "connection refused" in said
