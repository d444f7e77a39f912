"""A teacher that vLLM runs plays as one in this process does: same greedy tokens, log-probabilities of what it sampled."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from mopd.learner.model import load_model
from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.hf import HFEngine
from prefix_store import PrefixStore
from teachers.collect import collect_domain
from teachers.playing import VLLMEngine
from teachers.scoring.requests import ScoreRequest, TeacherError, TeacherUnreachable
from tests.vllm.conftest import KEY_NAME, free_port, hf_scores

TOLERANCE = 1e-4


def prompts(vocabulary: int, count: int = 6) -> list[Request]:
    draw = np.random.default_rng(5)
    return [Request(draw.integers(0, vocabulary, draw.integers(4, 60)).astype(np.uint32), seed=2**63 + 11 * i,
                    session=f"s{i}", max_tokens=3 if i == 2 else None) for i in range(count)]


def rescored(folder, requests, found, temperature: float) -> None:
    """What an engine said of its own tokens is what Transformers gives at this temperature."""
    whole = [ScoreRequest(np.concatenate([r.tokens, c.tokens]), len(r.tokens), len(r.tokens) + len(c.tokens))
             for r, c in zip(requests, found, strict=True)]
    for exact, done in zip(hf_scores(folder, whole), found, strict=True):
        tempered = exact / (temperature or 1.0)
        tempered -= np.log(np.exp(tempered).sum(-1, keepdims=True))
        own = tempered[np.arange(len(done.tokens)), done.tokens.astype(int)]
        np.testing.assert_allclose(done.logprob, own, atol=TOLERANCE)


def play_as_transformers_do(engine, folder, vocabulary) -> None:
    requests = prompts(vocabulary)
    greedy = SamplingOptions(temperature=0.0, max_tokens=12)
    expected = HFEngine(load_model(folder)).generate(requests, greedy)
    found = engine.generate(requests, greedy)
    for one, other in zip(found, expected, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish == "length"
        assert one.candidates is None and one.version == 0 and one.tokens.dtype == np.uint32
        np.testing.assert_allclose(one.logprob, other.logprob, atol=TOLERANCE)
    assert len(found[2].tokens) == 3
    for temperature in (1.0, 0.7):
        options = SamplingOptions(temperature=temperature, max_tokens=12)
        drawn = engine.generate(requests, options)
        rescored(folder, requests, drawn, temperature)
        assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(drawn, found, strict=True))
        again = engine.generate(requests[::-1], options)[::-1]
        assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in drawn], "draws depend on more than the seed"
    stop = int(expected[0].tokens[4])
    options = SamplingOptions(temperature=0.0, max_tokens=12, stop_ids=(stop,))
    stopped, theirs = engine.generate(requests, options), HFEngine(load_model(folder)).generate(requests, options)
    assert stopped[0].finish == "stop" and stopped[0].tokens[-1] == stop and stop not in stopped[0].tokens[:-1]
    for one, other in zip(stopped, theirs, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish


@pytest.mark.parametrize("ways", [("tokens",), ("completions",)])
def test_a_server_writes_what_transformers_write(ways, connect, models, tiny_run):
    backend = connect()
    backend.ways = ways
    play_as_transformers_do(VLLMEngine(backend), models["game"], len(tiny_run.tokenizer()))
    assert set(backend._ways.values()) == set(ways) and not backend.faults


def test_requests_are_spread_and_a_damaged_answer_is_asked_again(connect, servers, proxy, tiny_run):
    backend, damaged = connect(urls=[servers["game"].url, proxy.url], concurrency=4), []
    requests = prompts(len(tiny_run.tokenizer()), 16)
    options = SamplingOptions(temperature=1.0, max_tokens=4)
    expected = VLLMEngine(connect()).generate(requests, options)

    def after(asked, status, content):
        if asked.path == "/inference/v1/generate" and b'"seed":11' in asked.content and not damaged:
            found = json.loads(content)
            found["choices"][0]["token_ids"].pop()
            damaged.append(1)
            return status, json.dumps(found).encode()
        return status, content

    proxy.after = after
    found = VLLMEngine(backend).generate(requests, options)
    assert [c.tokens.tolist() for c in found] == [c.tokens.tolist() for c in expected]
    assert min(e.served for e in backend._balance.endpoints) >= 3
    assert sum(backend.faults.values()) == len(damaged)


def test_a_server_that_hides_its_policy_may_not_sample_at_other_temperatures(connect, proxy, tiny_run):
    """Log-probabilities before temperature, as vLLM gives them without the flag, are told by a look of their own."""
    backend = connect(urls=[proxy.url])
    engine = VLLMEngine(backend)

    def after(asked, status, content):
        if b"allowed_token_ids" in asked.content:
            found = json.loads(content)
            found["choices"][0]["logprobs"]["content"][0]["logprob"] = -3.2
            content = json.dumps(found).encode()
        return status, content

    proxy.after = after
    requests = prompts(len(tiny_run.tokenizer()), 2)
    engine.generate(requests, SamplingOptions(temperature=1.0, max_tokens=2))
    with pytest.raises(TeacherError, match="before temperature.*--logprobs-mode processed_logprobs"):
        engine.generate(requests, SamplingOptions(temperature=0.5, max_tokens=2))


def test_no_server_and_too_long_a_context_are_told(connect, servers, tiny_run):
    url = f"http://127.0.0.1:{free_port()}"
    requests = prompts(len(tiny_run.tokenizer()), 2)
    with pytest.raises(TeacherUnreachable, match=f"teacher 'game' does not answer: {url}: connection refused"):
        VLLMEngine(connect(urls=[url], retries=1)).generate(requests, SamplingOptions(max_tokens=2))
    engine = VLLMEngine(connect())
    long = Request(np.resize(np.arange(5, 25, dtype=np.uint32), 510), seed=1)
    assert len(engine.generate([long], SamplingOptions(temperature=0.0, max_tokens=2))[0].tokens) == 2
    assert engine.max_positions == 512
    with pytest.raises(TeacherError, match="wrote no turn for request 0 .* longer than the server's 511 tokens"):
        engine.generate([long], SamplingOptions(max_tokens=3))


def collected(tiny_run, folder, name, *overrides):
    shutil.copytree(tiny_run.folder / "store", folder / name / "store")
    config = tiny_run.config(f"run={folder / name}", f"store={folder / name / 'store'}", "seed=7", *overrides,
                             "domains.embodied.teacher_episodes=6", "domains.embodied.max_context_tokens=480")
    with PrefixStore.open(config.store) as store:
        before = set(store.ids())
    record = collect_domain(config, "embodied", quiet=True)
    with PrefixStore.open(config.store) as store:
        new = {i: store.sequence(i) for i in sorted(set(store.ids()) - before)}
    return record, new


@pytest.fixture
def served(servers, models):
    """Overrides that put the embodied teacher behind its server."""
    return (f"teachers.embodied.model={models['embodied']}", "teachers.embodied.backend=server",
            f"teachers.embodied.urls=[{servers['embodied'].url}]", f"teachers.embodied.api_key_env={KEY_NAME}")


def episodes(sequences):
    return sorted(((s.task, s.seed, s.actions, [c.tokens.tolist() for c in s.contexts], s.fingerprint, s.source)
                   for s in sequences.values()), key=repr)


@pytest.mark.parametrize("backend", ["server", "vllm"])
def test_collect_plays_the_greedy_episodes_of_transformers(backend, tiny_run, served, tmp_path):
    _, here = collected(tiny_run, tmp_path, "hf", served[0], "collect.temperature=0")
    how = served if backend == "server" else (served[0], "teachers.embodied.backend=vllm", "teachers.embodied.dtype=float32")
    record, there = collected(tiny_run, tmp_path, backend, *how, "collect.temperature=0")
    assert record["kept"] == len(there) > 0 and record["tokens"] > 0
    assert episodes(there) == episodes(here)


def test_the_same_config_draws_the_same_episodes_at_a_server(tiny_run, served, tmp_path):
    one, first = collected(tiny_run, tmp_path, "one", *served, "collect.temperature=0.8")
    _, second = collected(tiny_run, tmp_path, "two", *served, "collect.temperature=0.8")
    assert one["temperature"] == 0.8 and first and episodes(first) == episodes(second)
    _, other = collected(tiny_run, tmp_path, "other", *served, "collect.temperature=1.2")
    assert episodes(other) != episodes(first)


def test_collect_names_a_server_that_does_not_answer(tiny_run, models, tmp_path):
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(TeacherError, match=f"'embodied' does not answer: {url}: connection refused"):
        collected(tiny_run, tmp_path, "dead", f"teachers.embodied.model={models['embodied']}",
                  "teachers.embodied.backend=server", f"teachers.embodied.urls=[{url}]", "teachers.embodied.retries=0")


def test_vllm_in_this_process_writes_what_transformers_write(models, tiny_run):
    """Last in this file: the engine takes memory until it is closed."""
    from teachers.scoring.vllm_local import VLLMLocal

    engine = VLLMEngine(VLLMLocal(str(models["game"]), teacher="game", dtype="float32", max_model_len=512,
                                  max_request_tokens=200))
    try:
        play_as_transformers_do(engine, models["game"], len(tiny_run.tokenizer()))
    finally:
        engine.close()
