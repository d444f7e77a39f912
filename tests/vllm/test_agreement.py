"""A server, vLLM in this process and Transformers say the same about the same tokens."""

from __future__ import annotations

import threading
import time
import urllib.request

import numpy as np
import pytest

from teachers.registry import model_revision
from teachers.scoring.requests import ScoreRequest
from tests.vllm.conftest import MODELS, hf_scores, questions

TOLERANCE = 1e-4


def check_against_hf(folder, requests, answers, k=0):
    for request, answer, exact in zip(requests, answers, hf_scores(folder, requests), strict=True):
        assert not answer.missing
        labels = request.labels.astype(np.int64)
        np.testing.assert_allclose(answer.logprob, exact[np.arange(len(labels)), labels], atol=TOLERANCE)
        assert answer.labels.tolist() == labels.tolist()
        if k:
            best = np.sort(exact, axis=1)[:, ::-1][:, :k]
            np.testing.assert_allclose(answer.top_logprob, best, atol=TOLERANCE)
            np.testing.assert_allclose(np.take_along_axis(exact, answer.top_ids.astype(np.int64), 1), best, atol=TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_a_server_agrees_with_transformers(name, connect, models, tiny_run):
    vocabulary, backend = len(tiny_run.tokenizer()), connect(name)
    requests = questions(vocabulary)
    check_against_hf(models[name], requests, backend.score(requests))
    requests = questions(vocabulary, what="top_k", k=5)
    check_against_hf(models[name], requests, backend.score(requests), k=5)
    assert backend.computed_tokens < sum(r.stop for r in requests) * 2  # what is inside another context costs nothing


def test_both_ways_of_asking_give_the_same(connect, tiny_run):
    """Ids in and out, as `mopd teacher serve` offers, and the completions of every vLLM."""
    backend = connect()
    requests = questions(len(tiny_run.tokenizer()))
    first = backend.score(requests)
    assert set(backend._ways.values()) == {"tokens"}
    older = connect()
    older.ways = ("completions",)
    second = older.score(requests)
    assert set(older._ways.values()) == {"completions"}
    for one, other in zip(first, second, strict=True):
        np.testing.assert_allclose(one.logprob, other.logprob, atol=TOLERANCE)


def test_what_a_server_says_of_itself(connect, servers, models, tiny_run):
    backend = connect()
    found, tokenizer = backend.identity(), tiny_run.tokenizer()
    assert found["model"] == "game" and found["root"] == str(models["game"])
    assert found["revision"] == model_revision(models["game"]) and found["tokenizer"] == str(models["game"])
    assert found["context_tokens"] == backend.max_tokens == 511 and found["rows"] == len(tokenizer)
    assert found["capabilities"] == {"sampled": True, "max_k": 20, "flat": True, "start_offset": False, "chosen_ids": False,
                                     "hidden": False, "full": False, "temperature": False}
    for text, ids in found["tokenized"].items():
        assert ids == tokenizer(text, add_special_tokens=False)["input_ids"]
    assert found["servers"] == {servers["game"].url: "answers"}


def test_a_context_at_the_limit_is_scored_and_one_beyond_it_is_missing(connect, tiny_run):
    backend = connect()
    longest = backend.identity()["context_tokens"]
    tokens = np.resize(np.arange(5, 25, dtype=np.uint32), longest + 1)
    fits, too_long = backend.score([ScoreRequest(tokens[:longest], 1, longest), ScoreRequest(tokens, 1, longest + 1)])
    assert not fits.missing and np.isfinite(fits.logprob).all()
    assert too_long.missing == {"context longer than the server's 511 tokens": longest}


def test_requests_are_bounded_and_spread_over_the_servers(connect, servers, proxy, tiny_run):
    backend = connect(urls=[servers["game"].url, proxy.url], concurrency=4, max_request_tokens=100)
    most, lock = {"requests": 0, "tokens": 0, "now": 0}, threading.Lock()
    ask = backend._ask_until

    async def watched(prompt):
        with lock:
            most["now"] += 1
            most["requests"] = max(most["requests"], most["now"])
            most["tokens"] = max(most["tokens"], backend._tokens_under_way)
        try:
            return await ask(prompt)
        finally:
            with lock:
                most["now"] -= 1

    backend._ask_until = watched
    requests = questions(len(tiny_run.tokenizer()), count=24)
    check = [a.missing for a in backend.score(requests)]
    assert not any(check)
    assert 2 <= most["requests"] <= 4 and most["tokens"] <= 100
    served = [e.served for e in backend._balance.endpoints]
    assert min(served) >= 6, served


def running_requests(url: str) -> float:
    text = urllib.request.urlopen(f"{url}/metrics", timeout=20).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines()
               if line.startswith(("vllm:num_requests_running", "vllm:num_requests_waiting{")))


def test_closing_ends_the_requests_under_way_here_and_at_the_server(connect, servers, tiny_run):
    backend = connect()
    requests = questions(len(tiny_run.tokenizer()), count=300, longest=500)
    said = []

    def ask():
        try:
            backend.score(requests)
        except RuntimeError as error:
            said.append(str(error))

    asking = threading.Thread(target=ask)
    asking.start()
    end = time.monotonic() + 60
    while running_requests(servers["game"].url) == 0 and time.monotonic() < end:
        pass
    backend.close()
    asking.join(20)
    assert not asking.is_alive() and said == ["the connection to teacher 'game' was closed while it was asked"]
    end = time.monotonic() + 60
    while running_requests(servers["game"].url) and time.monotonic() < end:
        time.sleep(0.1)
    assert running_requests(servers["game"].url) == 0
    assert not any(t.name == "teacher-game" for t in threading.enumerate())
    with pytest.raises(RuntimeError, match="closed"):
        backend.score(requests[:1])


def test_vllm_in_this_process_agrees_with_transformers(models, tiny_run):
    """Last in this file: the engine takes memory until it is closed."""
    from teachers.scoring.vllm_local import VLLMLocal

    vocabulary, folder = len(tiny_run.tokenizer()), str(models["game"])
    backend = VLLMLocal(folder, teacher="game", dtype="float32", max_model_len=512, max_request_tokens=200)
    try:
        found = backend.identity()
        assert found["revision"] == model_revision(folder) and found["rows"] == vocabulary
        assert found["dtype"] == "float32" and found["context_tokens"] == backend.max_tokens == 511
        requests = questions(vocabulary)
        check_against_hf(models["game"], requests, backend.score(requests))
        requests = questions(vocabulary, what="top_k", k=5)
        check_against_hf(models["game"], requests, backend.score(requests), k=5)
        long = np.resize(np.arange(5, 25, dtype=np.uint32), 600)
        assert backend.score([ScoreRequest(long, 1, 600)])[0].missing == {"context longer than the model's 511 tokens": 599}
        with pytest.raises(ValueError, match="temperature"):
            backend.score([ScoreRequest(long[:9], 1, 9, temperature=0.5)])
    finally:
        backend.close()
