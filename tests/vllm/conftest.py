"""Two real vLLM servers on the CPU, started once for all tests of this folder, and the models that they serve."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import socket
import subprocess
from pathlib import Path

import numpy as np
import pytest

from teachers.serve_student import student_options
from tests.vllm.proxy import Proxy

HERE = Path(__file__).parent
KEY, KEY_NAME = "a-key-of-the-tests", "MOPD_TESTS_TEACHER_KEY"
MODELS = ("embodied", "game")


def pytest_collection_modifyitems(items):
    """Starting servers takes longer than pytest's usual limit on a busy machine; without vLLM there is nothing to test."""
    missing = importlib.util.find_spec("vllm") is None
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.timeout(1200))
            if missing:
                item.add_marker(pytest.mark.skip(
                    reason="vLLM is not installed: make test-vllm installs its CPU build and runs these"))


def make_model(tokenizer, folder: Path, seed: int) -> Path:
    """The demo's architecture at two layers: vLLM's kernels need heads of 32. Large weights, so that tokens matter."""
    from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model

    shape = TinyMoEConfig(hidden_size=64, layers=2, heads=2, key_value_heads=1, head_dim=32, experts=4, expert_size=32,
                          max_positions=1024, initializer_range=0.2)
    model = new_tiny_moe(shape, vocabulary=len(tokenizer), seed=seed, pad_id=tokenizer.pad_token_id, bos_id=None,
                         eos_id=tokenizer.eos_token_id)
    return save_model(model, folder, tokenizer=tokenizer)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclasses.dataclass
class Server:
    """A served model that can be killed and started again at the same address."""

    options: object
    log: Path
    process: subprocess.Popen | None = None

    @property
    def url(self) -> str:
        return self.options.url

    def start(self) -> None:
        from teachers import serve

        self.process = serve.start(self.options, log=self.log)

    def wait(self) -> None:
        from teachers import serve

        serve.wait_until_ready(self.process, self.options, seconds=900, log=self.log)

    def kill(self) -> None:
        """SIGKILL to all of its processes, as a machine that goes away."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        from teachers import serve

        if self.process is not None:
            serve.stop(self.process)


@pytest.fixture(scope="session")
def models(tiny_run, tmp_path_factory) -> dict[str, Path]:
    """Model folders by name, with the tokenizer of the tiny run."""
    folder, tokenizer = tmp_path_factory.mktemp("served"), tiny_run.tokenizer()
    return {name: make_model(tokenizer, folder / name, seed) for seed, name in enumerate(MODELS, 10)}


@pytest.fixture(scope="session")
def servers(models, tmp_path_factory):
    """name -> Server; the first asks for a key. Both start at once."""
    from teachers.serve import ServeOptions

    os.environ[KEY_NAME] = KEY
    logs = tmp_path_factory.mktemp("logs")
    found = {}
    for name, folder in models.items():
        options = ServeOptions(str(folder), name, port=free_port(), dtype="float32", max_model_len=512,
                               api_key_env=KEY_NAME if name == MODELS[0] else "", extra=("--max-num-seqs", "16"))
        found[name] = Server(options, logs / f"{name}.log")
    try:
        for server in found.values():
            server.start()
        for server in found.values():
            server.wait()
        yield found
    finally:
        for server in found.values():
            server.stop()


@pytest.fixture(scope="session")
def proxy(servers):
    """A proxy in front of the server without a key; `proxy.damage` says what goes wrong."""
    made = Proxy(servers["game"].url)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def undamaged(request):
    yield
    if "proxy" in request.fixturenames:
        request.getfixturevalue("proxy").reset()


@contextlib.contextmanager
def student_servers(model, logs, count: int = 2):
    """So many servers of one student, all answering; their logs lie in the folder `logs`."""
    found = [Server(student_options(str(model), port=free_port(), dtype="float32", max_model_len=512,
                                    extra=("--max-num-seqs", "16")), logs / f"{i}.log") for i in range(count)]
    try:
        for server in found:
            server.start()
        for server in found:
            server.wait()
        yield found
    finally:
        for server in found:
            server.stop()


@pytest.fixture
def connect(servers):
    """connect(name) or connect(urls, …) -> VLLMServers; closed at the end."""
    from teachers.scoring.vllm_server import VLLMServers

    made = []

    def make(name: str = "game", *, urls=None, **options):
        if name == MODELS[0]:
            options.setdefault("api_key_env", KEY_NAME)
        options = {"timeout_s": 60.0, "retries": 2} | options
        made.append(VLLMServers(urls or [servers[name].url], teacher=name, **options))
        return made[-1]

    yield make
    for backend in made:
        backend.close()


def questions(vocabulary: int, *, count: int = 6, longest: int = 60, seed: int = 3, what: str = "sampled", k: int = 0):
    """Requests of different lengths, spans at the front, in the middle and at the end, one inside another."""
    from teachers.scoring.requests import ScoreRequest

    draw = np.random.default_rng(seed)
    found = []
    for i in range(count):
        tokens = draw.integers(0, vocabulary, draw.integers(5, longest)).astype(np.uint32)
        start = 1 if i == 0 else int(draw.integers(1, len(tokens) - 2))
        found.append(ScoreRequest(tokens, start, len(tokens), what, k))
    first = found[1]
    return [*found, ScoreRequest(first.tokens[:-2], 1, 2, what, k)]


def hf_scores(folder: Path, requests) -> list[np.ndarray]:
    """log π [n, V] of every request from Transformers in fp32, one sequence at a time."""
    import torch

    from mopd.learner.model import load_model

    model = load_model(folder).eval()
    found = []
    with torch.no_grad():
        for request in requests:
            logits = model(torch.from_numpy(request.tokens.astype(np.int64))[None]).logits[0]
            found.append(torch.log_softmax(logits, -1)[request.start - 1:request.stop - 1].numpy())
    return found
