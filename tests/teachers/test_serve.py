"""`mopd teacher serve` before any server starts: flags, what is refused, and what is printed."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from mopd.config import load_config
from mopd.learner.model import ModelNotFound
from teachers import serve
from teachers.scoring.requests import TeacherError

CONFIG = """
seed: 7
student: {model: somewhere}
teachers:
  expert: {backend: server, model: folder/expert, urls: ["http://127.0.0.1:8123"], dtype: bfloat16, api_key_env: THE_KEY,
           served_model: chosen}
  bare: {backend: server, urls: ["http://127.0.0.1:8124"]}
domains:
  one: {environment: babyai, teacher: expert}
"""


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return load_config(path, ["train.domain_schedule=static", "train.objective_options.k=64"])


def test_a_teacher_of_a_configuration_is_served_as_the_run_will_ask_for_it(config):
    options = serve.options_from_config(config, "expert", dtype=None, max_model_len=512)
    assert options.url == "http://127.0.0.1:8123" and options.name == "chosen"
    words = serve.command(options, on_cpu=True)
    flags = dict(zip(words, words[1:], strict=False))
    assert flags["--model"] == "folder/expert" and flags["--served-model-name"] == "chosen"
    assert flags["--host"] == "127.0.0.1" and flags["--port"] == "8123" and flags["--dtype"] == "bfloat16"
    assert flags["--max-model-len"] == "512" and flags["--max-logprobs"] == "64" and flags["--seed"] == "7"
    assert "--enforce-eager" in words and "--enforce-eager" not in serve.command(options, on_cpu=False)
    assert flags["--logprobs-mode"] == "processed_logprobs"  # of a turn: what the policy gave it, at its temperature
    assert "--trust-remote-code" not in words and "--enable-scale-out" in words
    pasted = serve.config_lines(options)
    assert 'urls: ["http://127.0.0.1:8123"]' in pasted
    assert "api_key_env: THE_KEY" in pasted and "served_model: chosen" in pasted


def test_the_key_is_in_the_environment_of_the_server_only(config, monkeypatch):
    monkeypatch.setenv("THE_KEY", "secret-value")
    options = serve.options_from_config(config, "expert")
    assert "secret-value" not in " ".join(serve.command(options, on_cpu=False)) + serve.config_lines(options)


def test_an_unknown_teacher_and_one_without_a_model_are_refused(config):
    with pytest.raises(TeacherError, match="no teacher 'nobody' under teachers; there are expert, bare"):
        serve.options_from_config(config, "nobody")
    with pytest.raises(TeacherError, match="teachers.bare.model: missing"):
        serve.options_from_config(config, "bare")


def test_without_vllm_the_error_says_how_to_install_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else real(name, *more))
    with pytest.raises(TeacherError, match=r"scripts/install_vllm_cpu\.sh"):
        serve.start(serve.ServeOptions("folder", "name"))


@pytest.fixture
def pretend_vllm(monkeypatch):
    monkeypatch.setattr(serve, "need_vllm", lambda asked_by: "0")


def test_a_taken_port_is_found_before_a_model_is_loaded(pretend_vllm):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TeacherError, match=f"nothing can listen at 127.0.0.1:{port}"):
            serve.start(serve.ServeOptions("folder", "name", port=port))


def test_a_folder_that_is_no_model_is_refused_before_vllm_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "start", lambda *_, **__: pytest.fail("vLLM was started"))
    with pytest.raises(ModelNotFound, match="there is no model folder at .*nowhere"):
        serve.serve(serve.ServeOptions(str(tmp_path / "nowhere"), "name"))
    with pytest.raises(ModelNotFound, match="has no config.json, so it is not a Hugging Face model folder"):
        serve.serve(serve.ServeOptions(str(tmp_path), "name"))


def test_a_key_that_is_not_set_is_found_before_a_model_is_loaded(pretend_vllm, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TeacherError, match="NOT_SET"):
        serve.start(serve.ServeOptions("folder", "name", port=port, api_key_env="NOT_SET"))


def test_the_users_own_settings_of_vllm_win(monkeypatch):
    monkeypatch.setattr("mopd.sampling.vllm_presence.vllm_runs_on_cpu", lambda: True)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    found = os.environ | serve.vllm_environment(2)
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "7" and found["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_server_that_ends_before_it_answers_is_an_error_and_nothing_is_left(tmp_path, monkeypatch, pretend_vllm):
    """A real process that ends at once stands for a model that vLLM does not take."""
    monkeypatch.setattr(serve, "command", lambda options, on_cpu: ["sh", "-c", "echo cannot; exit 3"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(serve.ServerFailed, match=r"ended with status 3 .* its words are in"), serve.running(
            serve.ServeOptions("folder", "name", port=port), log=tmp_path / "log"):
        raise AssertionError("it does not answer")
    assert (tmp_path / "log").read_text() == "cannot\n"


HEALTHY = """
import http.server, sys
class Server(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        self.send_response(500); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Server).serve_forever()
"""


def test_a_server_that_says_it_is_ready_and_cannot_score_is_an_error(tmp_path, monkeypatch, pretend_vllm):
    """As vLLM's CPU build does with head sizes that it does not know: the engine dies at the first score."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setattr(serve, "command", lambda options, on_cpu: [sys.executable, "-c", HEALTHY, str(port)])
    with pytest.raises(serve.ServerFailed, match=r"its first score failed .HTTP 500.: .* its words are in"), serve.running(
            serve.ServeOptions("folder", "name", port=port), log=tmp_path / "log"):
        raise AssertionError("it cannot score")


def test_stopping_ends_a_process_that_does_not_listen_and_its_children(tmp_path, monkeypatch, pretend_vllm):
    monkeypatch.setattr(serve, "command", lambda options, on_cpu: [
        "sh", "-c", "trap '' TERM; sh -c 'trap \"\" TERM; while :; do sleep 0.1; done' & echo $! > child; "
        "while :; do sleep 0.1; done"])
    monkeypatch.setattr(serve, "STOP_SECONDS", 0.5)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = serve.start(serve.ServeOptions("folder", "name", port=port), log=tmp_path / "log")
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        pass
    assert len(serve.group_members(process.pid)) >= 2
    serve.stop(process)
    assert serve.group_members(process.pid) == []


def test_a_server_that_still_loads_is_ended_at_once_with_all_that_it_left(tmp_path, monkeypatch, pretend_vllm):
    """A real process with shared memory that does not listen to SIGTERM stands for vLLM while it loads a model."""
    code = ("import signal, time; from multiprocessing import shared_memory; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
            "made = shared_memory.SharedMemory(create=True, size=64); print(made.name, flush=True); time.sleep(100)")
    monkeypatch.setattr(serve, "command", lambda options, on_cpu: [sys.executable, "-c", code])
    log, began = tmp_path / "log", []

    def interrupted(url):
        if log.read_text():
            began.append(time.monotonic())
            raise KeyboardInterrupt
        return False

    monkeypatch.setattr(serve, "answers", interrupted)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(KeyboardInterrupt), serve.running(serve.ServeOptions("folder", "name", port=port), log=log):
        raise AssertionError("it does not answer")
    assert time.monotonic() - began[0] < 20
    assert not (Path("/dev/shm") / log.read_text().split()[0].strip("/")).exists()
