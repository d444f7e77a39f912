"""Turns submitted one by one: the tokens that `generate` gives, whatever is in between; new weights; abort; refusals."""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mopd.sampling.base import Request, SamplingOptions, StreamingEngine
from mopd.sampling.hf import HFEngine
from tests.mopd.sampling.tiny import VOCABULARY, make

STOPS = tuple(range(5, 13))
OPTIONS = (SamplingOptions(max_tokens=9, stop_ids=STOPS), SamplingOptions(0, max_tokens=6, stop_ids=STOPS[:1]),
           SamplingOptions(0.7, top_p=0.9, top_k=12, max_tokens=14))


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {"qwen3_moe": make("qwen3_moe"), "mistral": make("mistral"), "new": make("qwen3_moe", seed=5)}


@pytest.fixture(scope="module")
def requests():
    """Prompts that share beginnings, equal ones, sessions and none, with options of their own."""
    rng = np.random.default_rng(1)
    base, found = tokens(rng, 40), []
    for i in range(14):
        own = base[:20 + i] if i % 3 == 0 else np.concatenate([base[:rng.integers(0, 40)], tokens(rng, 1 + i % 7)])
        found.append(Request(own, i, f"s{i}" if i % 2 else None, 2 if i == 4 else None))
    return [(r, OPTIONS[i % 3]) for i, r in enumerate([*found, Request(found[3].tokens, 99)])]


@pytest.fixture(scope="module")
def expected(models, requests):
    """What `generate` gives, and what a second turn of each session gives behind it."""
    engine = HFEngine(models["qwen3_moe"], max_batch=3)
    first = [engine.generate([request], options)[0] for request, options in requests]
    second = [engine.generate([grown(request, done)], options)[0] if request.session else None
              for (request, options), done in zip(requests, first, strict=True)]
    return first, second


def tokens(rng, count):
    return rng.integers(0, VOCABULARY, count).astype(np.uint32)


def grown(request, done):
    return Request(np.concatenate([request.tokens, done.tokens, request.tokens[:4]]), request.seed + 50, request.session)


def same(one, other):
    assert one.tokens.tolist() == other.tokens.tolist() and one.finish == other.finish and one.version == other.version
    np.testing.assert_allclose(one.logprob, other.logprob, atol=2e-5)
    assert (one.candidates is None) == (other.candidates is None)
    for a, b in zip(one.candidates or (), other.candidates or (), strict=True):
        assert (a is None and b is None) or a.tolist() == b.tolist()


def plain(model, context):
    """Log-probabilities [T - 1, V] of a plain forward pass."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.from_numpy(context.astype(np.int64))[None]).logits[0, :-1].float(), -1).numpy()


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(15)), polls=st.lists(st.integers(0, 3), min_size=15, max_size=15),
       batch=st.sampled_from((2, 5, 32)))
def test_turns_are_those_of_generate_in_whatever_order_they_come(models, requests, expected, order, polls, batch):
    engine = HFEngine(models["qwen3_moe"], max_batch=batch, verify=False)
    assert isinstance(engine, StreamingEngine)
    first, second, found = *expected, {}

    def heard(ended):
        for key, done in ended:
            found[key] = done
            number, turn = key
            if turn == 0 and requests[number][0].session:  # the next turn enters while others are under way
                engine.submit((number, 1), grown(requests[number][0], done), requests[number][1])

    for number, count in zip(order, polls, strict=True):
        engine.submit((number, 0), *requests[number])
        for _ in range(count):
            heard(engine.poll())
    while engine.under_way:
        heard(engine.poll(0.005))
    assert len(found) == len(requests) + sum(done is not None for done in second)
    for (number, turn), done in found.items():
        same(done, (first, second)[turn][number])
    engine.end_sessions([r.session for r, _ in requests if r.session])
    assert sorted(engine._free) == list(range(engine._cache.slots)) and not engine._stream.rows.names


def test_one_poll_writes_a_token_of_every_row_and_returns_what_ended(models):
    engine, rng = HFEngine(models["qwen3_moe"], verify=False), np.random.default_rng(2)
    for i in range(6):
        engine.submit(i, Request(tokens(rng, 9), i, max_tokens=3 if i == 2 else 20), SamplingOptions(max_tokens=20))
    before = engine.stats["sampled_tokens"]
    assert engine.poll() == [] and engine.stats["sampled_tokens"] - before == 12 and engine.under_way == 6
    [(key, done)] = engine.poll(60)  # returns as soon as something ends, not after a minute
    assert key == 2 and len(done.tokens) == 3 and engine.under_way == 5


@pytest.mark.parametrize("kind", ["qwen3_moe", "mistral"])
def test_turns_under_way_go_on_under_new_weights(models, kind):
    """Each token's log-probability is that of the weights that its version names, on the whole context before it."""
    old, new = models[kind], make(kind, seed=5)
    newest = make(kind, seed=6)
    engine, rng = HFEngine(old, max_batch=4, verify=False), np.random.default_rng(3)
    requests = [Request(tokens(rng, 9 + i), i, f"s{i}" if i % 2 else None) for i in range(7)]
    options = SamplingOptions(max_tokens=12)
    for i, request in enumerate(requests):
        engine.submit(i, request, options)
    assert not engine.poll() and not engine.poll()
    engine.load_weights(new.named_parameters(), version=4)
    text = tokens(rng, 30)
    np.testing.assert_allclose(engine.score(text), plain(new, text)[np.arange(29), text[1:].astype(int)], atol=1e-4)
    assert not engine.poll()
    engine.load_weights(newest.named_parameters(), version=5)
    found = {}
    while engine.under_way:
        found |= dict(engine.poll(0.01))
    assert len(found) == 7
    by_version = {0: old, 4: new, 5: newest}
    for i, done in found.items():
        context = np.concatenate([requests[i].tokens, done.tokens])
        versions = np.broadcast_to(done.version, len(done.tokens))
        for version in set(versions.tolist()):
            want = plain(by_version[version], context)[len(requests[i].tokens) - 1:]
            at = np.nonzero(versions == version)[0]
            np.testing.assert_allclose(done.logprob[at], want[at, done.tokens[at].astype(int)], atol=1e-4)
    early, late = found[0].version, found[6].version
    assert early.dtype == np.int32 and early.tolist() == [0] * 3 + [4] * 2 + [5] * 7  # one with entering, one a poll
    assert late == 5 and isinstance(late, int)  # waited until the last weights were there
    again = engine.generate([Request(np.concatenate([requests[1].tokens, found[1].tokens[:3]]), 1, "s1")], options)
    assert again[0].version == 5


def test_draws_are_by_position_whatever_the_weights(models):
    """The same weights loaded again in mid-turn change no token."""
    options, rng = SamplingOptions(max_tokens=15), np.random.default_rng(4)
    requests = [Request(tokens(rng, 12), i) for i in range(5)]
    calm, disturbed = (HFEngine(models["qwen3_moe"], verify=False) for _ in range(2))
    expected = calm.generate(requests, options)
    for i, request in enumerate(requests):
        disturbed.submit(i, request, options)
    found, version = {}, 0
    while disturbed.under_way:
        found |= dict(disturbed.poll())
        version += 1
        disturbed.load_weights(models["qwen3_moe"].named_parameters(), version)
    for i, done in found.items():
        assert done.tokens.tolist() == expected[i].tokens.tolist()
        np.testing.assert_allclose(done.logprob, expected[i].logprob, atol=2e-5)
        assert (np.diff(done.version) >= 0).all() and done.version[0] == 0


def test_aborted_turns_are_not_heard_of_again_and_leave_their_room(models):
    engine, rng = HFEngine(models["qwen3_moe"], max_batch=3, verify=False), np.random.default_rng(5)
    options = SamplingOptions(max_tokens=10)
    requests = [Request(tokens(rng, 12), i, f"s{i}") for i in range(7)]
    for i, request in enumerate(requests):
        engine.submit(i, request, options)
    engine.poll()
    engine.abort([1, 5, "unknown"])  # one in the batch, one that waits
    assert engine.under_way == 5
    engine.load_weights(models["qwen3_moe"].named_parameters(), 1)
    engine.abort([2])  # one that was to be read again
    found = {}
    while engine.under_way:
        found |= dict(engine.poll(0.01))
    assert sorted(found) == [0, 3, 4, 6]
    fresh = HFEngine(models["qwen3_moe"], verify=False)
    for i, done in found.items():
        assert done.tokens.tolist() == fresh.generate([requests[i]], options)[0].tokens.tolist()
    engine.submit(1, requests[1], options)  # key and session may be used again
    assert dict(engine.poll(60))[1].tokens.tolist() == fresh.generate([requests[1]], options)[0].tokens.tolist()
    engine.end_sessions(r.session for r in requests)
    assert sorted(engine._free) == list(range(engine._cache.slots))


def test_what_cannot_be_is_refused(models):
    engine, rng = HFEngine(models["qwen3_moe"], verify=False), np.random.default_rng(6)
    options = SamplingOptions(max_tokens=5)
    request = Request(tokens(rng, 9), 0, "a")
    engine.submit("key", request, options)
    with pytest.raises(ValueError, match="key 'key' is under way"):
        engine.submit("key", Request(request.tokens, 0), options)
    with pytest.raises(ValueError, match="session 'a' has a turn under way"):
        engine.submit("other", request, options)
    with pytest.raises(ValueError, match="no tokens"):
        engine.submit("other", Request(request.tokens[:0], 0), options)
    with pytest.raises(ValueError, match="written with another tokenizer"):
        engine.submit("other", Request(np.array([VOCABULARY], np.uint32), 0), options)
    with pytest.raises(ValueError, match="top_p 0"):
        engine.submit("other", Request(request.tokens, 0), SamplingOptions(top_p=0))
    with pytest.raises(ValueError, match="'a' has a turn under way; abort it"):
        engine.end_sessions(["a"])
    with pytest.raises(RuntimeError, match="1 submitted turns are under way"):
        engine.generate([Request(request.tokens, 0)], options)
    assert engine.under_way == 1 and [key for key, _ in engine.poll(60)] == ["key"] and engine.poll() == []


def test_a_failing_pass_forgets_the_turns_and_leaves_a_working_engine(models, monkeypatch):
    engine, rng = HFEngine(models["qwen3_moe"], verify=False), np.random.default_rng(7)
    options = SamplingOptions(max_tokens=5)
    request = Request(tokens(rng, 9), 0, "a")
    engine.submit("key", request, options)
    engine.poll()
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_forward", lambda *_: (_ for _ in ()).throw(MemoryError("no room")))
        with pytest.raises(MemoryError):
            engine.poll()
    assert engine.under_way == 0 and engine.poll() == []
    same(engine.generate([request], options)[0], HFEngine(models["qwen3_moe"]).generate([request], options)[0])
