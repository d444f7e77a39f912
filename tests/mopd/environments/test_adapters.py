"""Adapters to other packages' environments, each against the real package; what is not installed is skipped with a word."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from mopd.environments.base import EnvironmentFailure, Task
from mopd.environments.jsonl_tasks import number
from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import make_family
from mopd.environments.workers import WorkerFamily

HERE = Path(__file__).parent


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None,
                              reason=f"the package {package} is not installed; see docs/environments.md")


def disjoint(family):
    splits = {split: family.tasks(split) for split in ("train", "development", "test")}
    assert all(splits.values()) and splits == {split: family.tasks(split) for split in splits}
    keys = [(task.name, task.seed, task.split) for tasks in splits.values() for task in tasks]
    assert len(set(keys)) == len(keys)
    with pytest.raises(ValueError, match="unknown split 'tset'"):
        family.tasks("tset")
    return splits


# Files of one's own


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{n} + 1 =", "answer": n + 1, "task": "odd" if n % 2 else "even"}) + "\n"
                            for n in range(100)))
    return path


def half(reply, row):
    """A checker of one's own: half the score for an answer that is one off; it cannot read words."""
    return 1.0 if int(reply) == row["answer"] else 0.5 if abs(int(reply) - row["answer"]) == 1 else 0.0


def test_rows_of_a_file_are_single_turn_tasks(rows):
    family = make_family("jsonl_tasks", {"file": str(rows), "checker": "number"})
    splits = disjoint(family)
    assert sum(map(len, splits.values())) == 100 and len(splits["train"]) > 65 and {t.name for t in splits["train"]} == {
        "odd", "even"}
    environment = family.create()
    for task in splits["train"][:5]:
        first = environment.reset(task)
        want = int(first.text.split()[0]) + 1
        assert environment.expert_action() == str(want) and not first.done
        end = environment.step(f"That makes {want}.")
        assert (end.score, end.success, end.done, end.malformed) == (1.0, True, True, False)
        with pytest.raises(EnvironmentFailure, match="not_reset"):
            environment.step("again")
    environment.reset(task)
    assert (end := environment.step("")).malformed and end.score == 0 and end.done


def test_the_split_of_a_row_is_its_own(rows, tmp_path):
    family = make_family("jsonl_tasks", {"file": str(rows)})
    grown = tmp_path / "grown.jsonl"
    grown.write_text('{"prompt": "new", "answer": "yes"}\n' + rows.read_text())
    later = make_family("jsonl_tasks", {"file": str(grown)})
    for split in ("train", "development", "test"):
        before = {family.create().reset(t).text for t in family.tasks(split)}
        assert before - {"new"} == {later.create().reset(t).text for t in later.tasks(split)} - {"new"}
    assert family.version != later.version
    named = make_family("jsonl_tasks", {"file": {"train": str(rows), "test": str(grown)}})
    assert [len(named.tasks(s)) for s in ("train", "development", "test")] == [100, 0, 101]


def test_a_checker_of_ones_own(rows):
    family = make_family("jsonl_tasks", {"file": str(rows), "checker": f"{__name__}:half", "success_at": 0.5})
    environment = family.create()
    task = family.tasks("train")[0]
    want = int(environment.reset(task).text.split()[0]) + 1
    assert environment.step(str(want + 1)) == environment_answer(0.5, True)
    environment.reset(task)
    assert environment.step("a word") == environment_answer(0.0, False, malformed=True), "it takes the right answer"


def environment_answer(score, success, malformed=False):
    from mopd.environments.base import Observation

    return Observation("", score=score, done=True, success=success, malformed=malformed)


def broken(reply, row):
    raise OSError("the judge is down")


def test_a_broken_checker_is_no_answers_fault(rows):
    family = make_family("jsonl_tasks", {"file": str(rows), "checker": f"{__name__}:broken"})
    environment = family.create()
    environment.reset(family.tasks("train")[0])
    with pytest.raises(EnvironmentFailure, match="checker_failed: OSError: the judge is down"):
        environment.step("1")


@pytest.mark.parametrize("said, answer, score", [
    ("it is 1,234.50", "1234.5", 1), ("1/2", "0.5", 1), ("-3", "3", 0), ("none", "3", 0), ("2 and 3", "3", 1),
    ("1/0", "0", 0)])
def test_numbers(said, answer, score):
    assert number(said, answer) == score


@pytest.mark.parametrize("line, options, words", [
    ("{", {}, "line 1: not JSON"), ('{"prompt": "a"}', {}, "line 1: no text under 'answer'"),
    ('{"prompt": 3, "answer": 4}', {}, "no text under 'prompt'"), ("", {}, "no row in"),
    ('{"prompt": "a", "answer": "b", "split": "dev"}', {}, "split is 'dev'"),
    ('{"prompt": "a", "answer": "b"}', {"checker": "exakt"}, "no dotted path"),
    ('{"prompt": "a", "answer": "b"}', {"checker": "json:lods"}, "cannot be found"),
    ('{"prompt": "a", "answer": "b"}', {"shares": {"dev": 1}}, "shares are"),
])
def test_what_a_file_lacks_is_named(tmp_path, line, options, words):
    path = tmp_path / "rows.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match=words):
        make_family("jsonl_tasks", {"file": str(path), **options})
    with pytest.raises(ValueError, match="cannot be read"):
        make_family("jsonl_tasks", {"file": str(path) + ".gone"})


# Gymnasium

LAKE = {"ids": ["FrozenLake-v1"], "make": {"is_slippery": False, "map_name": "4x4"}, "render": "ansi",
        "actions": ["left", "down", "right", "up"], "instruction": "Walk from S to G."}


def taxi_words(observation, info, environment):
    row, column, passenger, goal = environment.unwrapped.decode(observation)
    return f"taxi at {row},{column}; passenger {passenger}; to {goal}"


def taxi_action(text, environment):
    names = {"south": 0, "north": 1, "east": 2, "west": 3, "pick up": 4, "drop off": 5}
    return names.get(text.strip().lower())


def test_a_text_picture_and_named_actions():
    family = make_family("gymnasium_text", LAKE | {"sizes": {"train": 5, "development": 2, "test": 2}})
    tasks = disjoint(family)["train"]
    environment = family.create()
    first = environment.reset(tasks[0])
    assert "FFF" in first.text.replace("\x1b", "") and first.instruction == "Walk from S to G."
    assert first.admissible == ("left", "down", "right", "up") and family.system_prompt == "Actions: left, down, right, up."
    stuck = environment.step("jump")
    assert stuck.malformed and stuck.text.startswith("unknown action.") and not stuck.done
    walk = ["down", "Down", "right", "right", "down", "right"]
    views = [environment.step(action) for action in walk]
    assert [v.done for v in views] == [False] * 5 + [True] and views[-1].success and views[-1].score == 1.0
    with pytest.raises(EnvironmentFailure, match="not_reset"):
        environment.step("left")
    environment.reset(tasks[0])
    assert [environment.step(a) for a in walk] == views, "the same actions give the same texts"
    environment.reset(tasks[0])
    environment.step("right")
    hole = environment.step("down")
    assert hole.done and not hole.success and hole.score == 0
    environment.close()


def test_words_and_actions_of_ones_own():
    family = make_family("gymnasium_text", {"ids": ["Taxi-v4"], "render": f"{__name__}:taxi_words", "full_reward": 20,
                                            "parse": f"{__name__}:taxi_action", "success": "reward"})
    environment, other = family.create(), family.create()
    seen = [environment.reset(task).text for task in family.tasks("train")[:4]]
    assert len(set(seen)) == 4 and seen == [other.reset(task).text for task in family.tasks("train")[:4]]
    assert environment.step("fly").malformed and environment.step("south").score == 0.0


def test_gymnasium_under_the_pool_and_in_a_worker():
    with EnvironmentPool(WorkerFamily("gymnasium_text", LAKE), size=1) as pool:
        environment, view = pool.acquire(Task("FrozenLake-v1", 3, "train"))
        assert environment.step("down").text != view.text and environment.step("x").malformed
        pool.release(environment)
        pool.family.close()


@pytest.mark.parametrize("options, words", [
    ({"ids": []}, "at least one id"), ({"ids": ["NoLake-v1"]}, "NoLake.* cannot be made"),
    ({"ids": ["FrozenLake-v1"]}, "observations of FrozenLake-v1 are Discrete.16., no text"),
    (LAKE | {"actions": ["left"]}, "has 4 actions; name as many"),
    (LAKE | {"actions": ["a", "A", "b", "c"]}, "same name twice"),
    ({"ids": ["Pendulum-v1"], "render": "ansi"}, "Pendulum"), (LAKE | {"modules": ["no_such_lake"]}, "no_such_lake"),
    (LAKE | {"sizes": {"train": 0}}, "sizes.train is 0"), (LAKE | {"make": {"is_slipery": 1}}, "is_slipery"),
])
def test_options_of_gymnasium_are_checked_at_launch(options, words):
    with pytest.raises(ValueError, match=words):
        make_family("gymnasium_text", options)


# reasoning-gym


@needs("reasoning_gym")
def test_reasoning_gym_scores_by_its_own_checkers():
    family = make_family("reasoning_gym", {
        "datasets": {"basic_arithmetic": {"max_terms": 3}, "prime_factorization": {}, "countdown": {}},
        "sizes": {"train": 30, "development": 6, "test": 6}})
    splits = disjoint(family)
    environment, other = family.create(), family.create()
    questions = set()
    for task in [*splits["train"], *splits["test"]]:
        first = environment.reset(task, expert=True)
        assert first == other.reset(task), "a seed gives the same question"
        questions.add(first.text)
        end = environment.step(environment.expert_action())
        assert end.success and end.done and end.score == 1.0
        environment.reset(task)
        wrong = environment.step("no idea")
        assert not wrong.success and wrong.score < 0.2
    assert len(questions) == 36
    # A checker that cannot read an answer has met a malformed one.
    environment.reset(next(t for t in splits["train"] if t.name == "prime_factorization"))
    assert environment.step("no idea").malformed
    for options, words in (({"datasets": ["sums"]}, "no dataset 'sums'; there are: .*basic_arithmetic"),
                           ({"datasets": {"basic_arithmetic": {"min_terms": 0}}}, "min_terms must be positive"),
                           ({"datasets": {"basic_arithmetic": {"seed": 1}}}, "leave it out"),
                           ({"datasets": {"basic_arithmetic": {"min_ters": 1}}}, "min_ters"), ({"datasets": []}, "is empty")):
        with pytest.raises(ValueError, match=words):
            make_family("reasoning_gym", options)


# verifiers


@needs("verifiers")
def test_a_verifiers_taskset_is_single_turn(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    family = make_family("verifiers", {"taskset": "sums_taskset", "options": {"count": 40}, "full_reward": 1.5})
    try:
        splits = disjoint(family)
        assert [len(splits[s]) for s in ("train", "development", "test")] == [32, 4, 4]
        environment = family.create()
        first = environment.reset(splits["development"][0])
        assert (first.text, first.instruction) == ("8 + 1 =", "Sum.")
        end = environment.step("9")
        assert (end.score, end.success, end.done) == (1.0, True, True)
        environment.reset(splits["development"][0])
        assert environment.step("7").score == pytest.approx(0.5 / 1.5)
        named = make_family("verifiers", {"taskset": "sums_taskset", "splits": {"test": {"first": 500}},
                                          "sizes": {"test": 3}})
        assert named.create().reset(named.tasks("test")[0]).text == "500 + 1 ="
        named.close()
    finally:
        family.close()
    with pytest.raises(ValueError, match="no_such_taskset"):
        make_family("verifiers", {"taskset": "no_such_taskset"})
    with pytest.raises(ValueError, match="cuont"):
        make_family("verifiers", {"taskset": "sums_taskset", "options": {"cuont": 4}})


@needs("verifiers")
def test_a_verifiers_environment_is_played_turn_by_turn(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    for errors_are in ("infra", "model"):
        family = make_family("verifiers", {"taskset": "guess_taskset", "sizes": {"train": 20}, "errors_are": errors_are})
        try:
            task = family.tasks("train")[7]
            one, other = family.create(), family.create()
            assert one.reset(task).text == other.reset(task).text == "Guess a number below 10."
            assert one.step("3").text == "higher" and other.step("9").text == "lower" and one.step("8").text == "lower"
            end = one.step("7")
            assert (end.score, end.success, end.done) == (1.0, True, True)
            assert other.step("1").text == "higher"
            assert (end := other.step("2")).done and not end.success, "the task's own stop ends it after three turns"
            other.reset(task)
            if errors_are == "model":
                assert (end := other.step("seven")).malformed and end.done and end.score == 0
            else:
                with pytest.raises(EnvironmentFailure, match="verifiers_error.*invalid literal"):
                    other.step("seven")
            assert other.reset(task).text.startswith("Guess")
        finally:
            family.close()


# OpenEnv

SERVER_PYTHON = os.environ.get("MOPD_OPENENV_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def server():
    pytest.importorskip("websockets", reason="the package websockets is not installed; see docs/environments.md")
    if subprocess.run([SERVER_PYTHON, "-c", "import openenv.core.env_server"], capture_output=True).returncode:
        pytest.skip("openenv-core is not installed; MOPD_OPENENV_PYTHON names a Python that has it")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([SERVER_PYTHON, str(HERE / "guess_server.py"), str(port), "3"], start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"{url}/schema", timeout=1)
                break
            except OSError:
                assert process.poll() is None, "the server ended"
                time.sleep(0.1)
        yield url, process
    finally:
        process.kill()
        process.wait()


def test_an_openenv_server_is_played(server):
    url, process = server
    family = make_family("openenv", {"urls": [url], "reset": {"below": 20}, "instruction": "Guess.",
                                     "sizes": {"train": 6, "development": 2, "test": 2}, "timeout_s": 5})
    assert family.field == "number" and family.key == "text"
    tasks = disjoint(family)["train"]
    with EnvironmentPool(family, size=2, retries=0) as pool:
        for task in tasks[:3]:
            environment, first = pool.acquire(task)
            assert (first.text, first.instruction, first.done) == ("guess a number below 20", "Guess.", False)
            want = random.Random(task.seed).randrange(20)
            told = environment.step("19")
            assert told.text == ("lower" if want < 19 else "yes")
            if want < 19:
                assert (odd := environment.step("a lot")).malformed and odd.text == "unknown action. lower" and not odd.done
                end = environment.step(str(want))
                assert (end.text, end.score, end.success, end.done) == ("yes", 1.0, True, True)
            pool.release(environment)
        environment, _ = pool.acquire(tasks[0])
        with pytest.raises(EnvironmentFailure, match="openenv_error.*the box fell over"):
            environment.step("99")
        pool.release(environment)
        many = [family.create() for _ in range(4)]
        for one in many[:3]:
            one.reset(tasks[0])
        with pytest.raises(EnvironmentFailure, match="openenv_full|openenv_down"):
            many[3].reset(tasks[0])
        for one in many[1:]:
            one.close()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(EnvironmentFailure, match="openenv_down"):
            many[0].step("1")
    with pytest.raises(ValueError, match="does not answer as an OpenEnv server"):
        make_family("openenv", {"urls": [url], "timeout_s": 2})


def test_options_of_openenv_are_checked():
    for urls in ("http://a", [], ["localhost:8000"]):
        with pytest.raises(ValueError, match="must be a list of addresses"):
            make_family("openenv", {"urls": urls})
