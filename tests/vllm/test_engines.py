"""The student in a real vLLM on the CPU, in process and behind servers: numbers, versions, routing, faults."""

from __future__ import annotations

import time

import httpx2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mopd.domains import open_domain
from mopd.learner.model import load_model
from mopd.mixer_events import GroupId
from mopd.sampling.base import Completion, EngineTrouble, Request, SamplingOptions, StreamingEngine
from mopd.sampling.continuous import ContinuousLoop
from mopd.sampling.draws import kept_ids
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.stop_strings import StopStrings
from mopd.sampling.vllm_engine import EngineUnreachable
from mopd.sampling.vllm_fleet import VLLMFleet, WrongServer
from mopd.sampling.vllm_local import VLLMEngine
from mopd.sampling.weight_folder import WeightFolder
from mopd.sampling.work import Work
from mopd.sampling.works import Works
from tests.vllm.conftest import student_servers

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def pair(models, tmp_path_factory):
    """Two servers of one student, the model "game"."""
    with student_servers(models["game"], tmp_path_factory.mktemp("students")) as found:
        yield found


@pytest.fixture(scope="module")
def local(models):
    engine = VLLMEngine(models["game"], dtype="float32", max_batch=16, max_model_len=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def fleet(pair, tiny_run):
    engine = VLLMFleet([server.url for server in pair], vocabulary=len(tiny_run.tokenizer()), patience_s=60).connect()
    yield engine
    engine.close()


@pytest.fixture(params=["vllm", "server"])
def engine(request):
    """Each of the two, with the weights of "game"."""
    return request.getfixturevalue({"vllm": "local", "server": "fleet"}[request.param])


def prompts(rows: int, count: int = 6) -> list[Request]:
    draw = np.random.default_rng(5)
    return [Request(draw.integers(0, rows, draw.integers(4, 60)).astype(np.uint32), seed=2**63 + 11 * i,
                    session=f"s{i}", max_tokens=3 if i == 2 else None) for i in range(count)]


def test_a_server_that_goes_away_while_it_scores_is_left_to_another(fleet, models, monkeypatch):
    """As where one is killed between its new weights and their probe."""
    text, broken, real = np.arange(3, 40, dtype=np.uint32), [], fleet._weights.logprobs

    def breaking(url, tokens):
        if not broken:
            broken.append(url)
            raise httpx2.ReadError("connection reset by peer")
        assert url != broken[0], "it is left alone for a while"
        return real(url, tokens)

    monkeypatch.setattr(fleet._weights, "logprobs", breaking)
    np.testing.assert_allclose(fleet.score(text), HFEngine(load_model(models["game"]).eval()).score(text), atol=TOLERANCE)
    assert "ReadError connection reset" in fleet.servers()[broken[0]]
    monkeypatch.undo()
    deadline = time.monotonic() + 60
    while set(fleet.servers().values()) != {"answers"}:  # it is greeted again
        assert time.monotonic() < deadline, fleet.servers()
        fleet.score(text)
        time.sleep(0.2)


def logits_of(model, request, done) -> torch.Tensor:
    """[n, V] from which Transformers would draw the tokens of `done`."""
    ids = torch.from_numpy(np.concatenate([request.tokens, done.tokens]).astype(np.int64))[None]
    with torch.no_grad():
        return model(ids).logits[0, len(request.tokens) - 1:-1].float()


def own(logits: torch.Tensor, tokens: np.ndarray) -> np.ndarray:
    return torch.log_softmax(logits, -1).numpy()[np.arange(len(tokens)), tokens.astype(int)]


def test_an_engine_writes_what_transformers_write(engine, models, tiny_run):
    model = load_model(models["game"]).eval()
    assert isinstance(engine, StreamingEngine) and engine.max_positions == 512
    requests, here = prompts(engine.vocabulary), HFEngine(model)
    text = np.arange(3, 60, dtype=np.uint32)
    np.testing.assert_allclose(engine.score(text), here.score(text), atol=TOLERANCE)
    greedy = SamplingOptions(temperature=0.0, max_tokens=12)
    stop = int(here.generate(requests[:1], greedy)[0].tokens[4])
    text = tiny_run.tokenizer().decode(here.generate(requests[:1], greedy)[0].tokens[4:6].tolist())
    strings = StopStrings([text], tiny_run.tokenizer())
    for options in (greedy, SamplingOptions(temperature=0.0, max_tokens=12, stop_strings=strings),
                    SamplingOptions(temperature=0.0, max_tokens=12, stop_ids=(stop,))):
        told: list[int] = []
        found = engine.generate(requests, options, ended=lambda number, done, told=told: told.append(number))
        assert sorted(told) == list(range(len(requests)))
        for one, other in zip(found, here.generate(requests, options), strict=True):
            assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish and one.version == 0
            assert one.tokens.dtype == np.uint32 and one.candidates is None
            np.testing.assert_allclose(one.logprob, other.logprob, atol=TOLERANCE)
        assert (found[0].finish == "stop") == (options is not greedy) and len(found[2].tokens) <= 3
    assert len(found[2].tokens) == 3
    for temperature in (1.0, 0.7):
        options = SamplingOptions(temperature, max_tokens=12)
        drawn = engine.generate(requests, options)
        for request, done in zip(requests, drawn, strict=True):
            np.testing.assert_allclose(done.logprob, own(logits_of(model, request, done) / temperature, done.tokens),
                                       atol=TOLERANCE)
        again = engine.generate(requests[::-1], options)[::-1]
        assert [c.tokens.tolist() for c in again] == [c.tokens.tolist() for c in drawn], "draws depend on more than the seed"


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_candidate_sets_are_those_of_the_policy_that_sampled(top_p, engine, models):
    model = load_model(models["game"]).eval()
    requests = prompts(engine.vocabulary)
    for request, done in zip(requests, engine.generate(
            requests, SamplingOptions(0.8, top_p=top_p, top_k=4, max_tokens=8)), strict=True):
        logits = logits_of(model, request, done) / 0.8
        kept = kept_ids(logits, top_p, 4)
        for row, mine, ids in zip(logits, kept, done.candidates, strict=True):
            assert ids.dtype == np.int32 and ids.tolist() == np.nonzero(mine.numpy())[0].tolist()
            row[~mine] = -torch.inf
        np.testing.assert_allclose(done.logprob, own(logits, done.tokens), atol=TOLERANCE)


def test_what_cannot_be_told_exactly_is_refused(local, fleet):
    request = Request(np.arange(3, 9, dtype=np.uint32), 1)
    with pytest.raises(ValueError, match="tells of 20 ids a token, and it takes 31"):
        fleet.submit(0, request, SamplingOptions(top_k=30))
    with pytest.raises(ValueError, match="top_p 0.9: which ids it leaves is known only where"):
        fleet.submit(0, request, SamplingOptions(top_p=0.9))
    [done] = local.generate([request], SamplingOptions(top_p=0.9, max_tokens=3))  # it tells of all ids
    assert len(done.candidates) == 3
    for engine in (local, fleet):
        for wrong, options, said in (
                (Request(request.tokens[:0], 1), SamplingOptions(), "has 0 tokens"),
                (Request(np.array([10**6], np.uint32), 1), SamplingOptions(), "written with another tokenizer"),
                (Request(np.zeros(510, np.uint32), 1), SamplingOptions(max_tokens=9), "exceed the 512 that the engine reads"),
                (request, SamplingOptions(temperature=0.001), "from 0.01 on")):
            with pytest.raises(ValueError, match=said):
                engine.submit(0, wrong, options)
        assert engine.under_way == 0


def finish(engine, found=None) -> dict:
    found = {} if found is None else found
    while engine.under_way:
        found |= dict(engine.poll(0.2))
    return found


def test_turns_under_way_go_on_under_new_weights(engine, models, tmp_path):
    """Each token's log-probability is that of the weights that its version names; new weights in mid-turn, twice."""
    by_version = {0: load_model(models["game"]).eval(), 1: load_model(models["embodied"]).eval()}
    by_version[2] = by_version[0]
    place = WeightFolder(tmp_path / "weights")
    requests = [Request(r.tokens, r.seed, r.session) for r in prompts(engine.vocabulary)]
    for i, request in enumerate(requests):
        engine.submit(i, request, SamplingOptions(max_tokens=400))
    found = {}
    for version, model in ((1, "embodied"), (2, "game")):
        end = time.monotonic() + 0.15
        while time.monotonic() < end:
            found |= dict(engine.poll(0.05))
        made = place.write(load_file(models[model] / "model.safetensors").items(), version, layout="checkpoint")
        engine.load_folder(made.path, version)
        text = np.arange(3, 60, dtype=np.uint32)
        np.testing.assert_allclose(engine.score(text), HFEngine(by_version[version]).score(text), atol=TOLERANCE)
    finish(engine, found)
    seen = set()
    for i, done in found.items():
        assert len(done.tokens) == 400
        versions = np.broadcast_to(done.version, 400)
        assert (np.diff(versions) >= 0).all()
        for version in set(versions.tolist()):
            at = np.nonzero(versions == version)[0]
            seen.add(version)
            want = own(logits_of(by_version[version], requests[i], done), done.tokens)
            np.testing.assert_allclose(done.logprob[at], want[at], atol=TOLERANCE)
    assert seen == {0, 1, 2} and any(isinstance(done.version, np.ndarray) for done in found.values())


def test_whole_tasks_are_played_without_rounds_as_transformers_play_them(engine, models, tiny_run):
    """The continuous loop on this engine and on hf, greedily (both have the weights of "game" here)."""
    config = tiny_run.config()
    works = [Work(GroupId("embodied/rollout", number), 0) for number in range(8)]
    renderer, domain = ChatRenderer(tiny_run.tokenizer()), open_domain(config, "embodied")
    played = []
    for one in (engine, HFEngine(load_model(models["game"]))):
        loop = ContinuousLoop(one, Works(domains={"embodied": domain}, store=None, renderer=renderer, student="s", seed=1,
                                         fingerprint=renderer.fingerprint(), temperature=0.0))
        loop.give(works)
        played.append({})
        while loop.in_flight:
            played[-1] |= {news.work: news for news in loop.turn(0.2)}
        loop.close()
        assert one.under_way == 0
    domain.close()
    here, there = ([[a.tokens.tolist() for row in found[work].rows for a in row.actions] for work in works]
                   for found in played)
    assert here == there and max(map(len, here)) > 1 and played[0][works[0]].record["sampled_tokens"] > 0


def test_aborted_turns_are_not_heard_of_again(engine):
    options = SamplingOptions(max_tokens=60)
    requests = prompts(engine.vocabulary)
    for i, request in enumerate(requests):
        engine.submit(i, request, options)
    with pytest.raises(ValueError, match="key 0 is under way"):
        engine.submit(0, requests[0], options)
    engine.abort([0, 3, "unknown"])
    assert engine.under_way == 4
    engine.submit(0, requests[0], options)
    assert sorted(finish(engine)) == [0, 1, 2, 4, 5] and engine.poll(0.0) == []


def test_a_server_without_what_sampling_needs_is_named(servers, models):
    """A teacher's server serves ids and log-probabilities well, under its own name and key."""
    url = servers["game"].url
    with pytest.raises((WrongServer, EngineUnreachable),
                       match="serves game, not student; name the right one as sampling.served_model"):
        VLLMFleet([url], vocabulary=300, served_model="student", patience_s=0).connect()
    fleet = VLLMFleet([servers["embodied"].url], vocabulary=300, patience_s=0)
    with pytest.raises((WrongServer, EngineUnreachable), match="HTTP 401: asks for a key; .* sampling.api_key_env"):
        fleet.connect()
    fleet.close()


def test_sessions_stay_where_they_are_and_a_killed_server_is_routed_around_until_it_has_the_weights(
        fleet, pair, models, tmp_path):
    """Last in this file: one of the servers dies, and comes back with the weights that it was started with."""
    options = SamplingOptions(max_tokens=200)
    requests = prompts(fleet.vocabulary, 8)
    fleet.generate(requests, SamplingOptions(max_tokens=2))
    homes = dict(fleet._home)
    assert set(homes.values()) == {server.url for server in pair}
    fleet.generate(requests[::-1], SamplingOptions(max_tokens=2))
    assert fleet._home == homes
    made = WeightFolder(tmp_path / "weights").write(load_file(models["embodied"] / "model.safetensors").items(), 7,
                                                    layout="checkpoint")
    fleet.load_folder(made.path, 7)
    for i, request in enumerate(requests):
        fleet.submit(i, request, options)
    time.sleep(0.1)
    pair[0].kill()
    found = finish(fleet)
    assert len(found) == 8 and all(isinstance(done, Completion) for done in found.values())
    fleet.generate(requests, SamplingOptions(max_tokens=2))  # also those that had ended before
    assert set(fleet._home.values()) == {pair[1].url} and fleet.faults
    model = load_model(models["embodied"]).eval()
    for i, done in found.items():
        assert done.version == 7
        np.testing.assert_allclose(done.logprob, own(logits_of(model, requests[i], done), done.tokens), atol=TOLERANCE)
    pair[0].start()
    pair[0].wait()
    fleet.end_sessions(homes)
    served, end = fleet.requests_by_server[pair[0].url], time.monotonic() + 60
    while fleet.requests_by_server[pair[0].url] < served + 4:
        assert time.monotonic() < end, fleet.servers()
        for request, done in zip(requests, fleet.generate(requests, SamplingOptions(max_tokens=3)), strict=True):
            assert done.version == 7
            np.testing.assert_allclose(done.logprob, own(logits_of(model, request, done), done.tokens), atol=TOLERANCE)
        fleet.end_sessions(homes)
        time.sleep(0.2)
    for server in pair:
        server.kill()
    fleet.retries, fleet.patience_s = 1, 0.0
    fleet.submit("gone", requests[0], options)
    [(key, trouble)] = finish(fleet).items()
    assert key == "gone" and isinstance(trouble, EngineTrouble) and trouble.reason == "engine_down"
    with pytest.raises(EngineUnreachable, match="engine_down"):
        fleet.generate(requests[:1], options)
