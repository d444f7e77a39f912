"""The in-process engine against plain forward passes: values, caches, sharing, draws, weights, refusals."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mopd.sampling.base import Request, SamplingEngine, SamplingOptions
from mopd.sampling.hf import HFEngine
from tests.mopd.sampling.tiny import VOCABULARY, make

STOPS = tuple(range(5, 13))
KINDS = ("qwen3_moe", "qwen3", "llama", "mistral")


@pytest.fixture(scope="module")
def models():
    torch.set_num_threads(1)
    return {kind: make(kind) for kind in KINDS}


def tokens(rng, count):
    return rng.integers(0, VOCABULARY, count).astype(np.uint32)


def check(model, requests, completions, temperature):
    """Every completion's log-probabilities are those of a plain forward pass; greedy ones take the arg max."""
    for request, done in zip(requests, completions, strict=True):
        ids = torch.from_numpy(np.concatenate([request.tokens, done.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0].float()
        rows = logits[len(request.tokens) - 1 : -1]
        want = torch.log_softmax(rows / (temperature or 1.0), dim=-1).gather(1, ids[0, len(request.tokens) :, None])
        np.testing.assert_allclose(done.logprob, want[:, 0].numpy(), atol=1e-4)
        if temperature == 0:
            assert (rows.argmax(-1).numpy() == done.tokens).all()


def mixed_requests(rng):
    """Fresh prompts, prompts that share beginnings, prefixes of each other, equal ones; half of them sessions."""
    base = tokens(rng, 40)
    requests = []
    for i in range(18):
        own = base[: 20 + i] if i % 3 == 0 else np.concatenate([base[: rng.integers(0, 40)], tokens(rng, 1 + i % 7)])
        requests.append(Request(own, seed=i, session=f"s{i}" if i % 2 else None))
    return requests + [Request(requests[3].tokens, seed=99), Request(requests[0].tokens, seed=98)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", (0, 0.7))
def test_turns_match_plain_forward(models, kind, temperature):
    engine = HFEngine(models[kind], max_batch=7)
    assert isinstance(engine, SamplingEngine)
    rng = np.random.default_rng(1)
    requests = mixed_requests(rng)
    options = SamplingOptions(temperature=temperature, max_tokens=9, stop_ids=STOPS)
    for turn in range(3):
        done = engine.generate(requests, options)
        check(models[kind], requests, done, temperature)
        for one in done:
            assert 1 <= len(one.tokens) <= 9
            assert (one.tokens[-1] in STOPS) == (one.finish == "stop")
            assert not set(one.tokens[:-1].tolist()) & set(STOPS)
        requests = [
            Request(np.concatenate([r.tokens, d.tokens, tokens(rng, 1 + i % 5)]), 50 * turn + i, r.session)
            for i, (r, d) in enumerate(zip(requests, done, strict=True))
        ]
    engine.end_sessions(r.session for r in requests if r.session)
    assert len(engine._free) == engine._cache.slots and not engine._session_slot


@pytest.mark.parametrize("kind", ("qwen3_moe", "llama"))
def test_greedy_equals_generate(models, kind):
    prompt = tokens(np.random.default_rng(2), 17)
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    want = models[kind].generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=STOPS[0], pad_token_id=0)
    got = HFEngine(models[kind]).generate([Request(prompt, 0)], SamplingOptions(0, max_tokens=12, stop_ids=STOPS[:1]))
    assert got[0].tokens.tolist() == want[0, 17:].tolist()


def test_grouped_experts_give_the_same(models):
    requests = mixed_requests(np.random.default_rng(3))
    engine = HFEngine(models["qwen3_moe"], experts_implementation="grouped_mm")
    check(models["qwen3_moe"], requests, engine.generate(requests, SamplingOptions(max_tokens=8)), 1.0)


def test_draws_depend_on_the_seed_alone(models):
    requests = mixed_requests(np.random.default_rng(4))
    options = SamplingOptions(max_tokens=10, stop_ids=STOPS)
    together = HFEngine(models["qwen3_moe"], max_batch=32).generate(requests, options)
    order = np.random.default_rng(0).permutation(len(requests))
    shuffled = HFEngine(models["qwen3_moe"], max_batch=5).generate([requests[i] for i in order], options)
    single = HFEngine(models["qwen3_moe"])
    for place, i in enumerate(order):
        alone = single.generate([requests[i]], options)[0]
        assert together[i].tokens.tolist() == shuffled[place].tokens.tolist() == alone.tokens.tolist()
        np.testing.assert_allclose(together[i].logprob, alone.logprob, atol=1e-5)
    other = HFEngine(models["qwen3_moe"]).generate([Request(r.tokens, r.seed + 1000) for r in requests], options)
    assert sum(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(together, other, strict=True)) > 15


def test_same_calls_give_the_same_bits(models):
    requests = mixed_requests(np.random.default_rng(5))
    options = SamplingOptions(max_tokens=10)
    first, second = (HFEngine(models["qwen3_moe"], max_batch=9).generate(requests, options) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes() and a.logprob.tobytes() == b.logprob.tobytes()


def test_only_the_new_tokens_of_a_session_are_computed(models):
    rng = np.random.default_rng(6)
    engine = HFEngine(models["qwen3"])
    options = SamplingOptions(max_tokens=6)
    first = Request(tokens(rng, 30), 1, "a")
    done = engine.generate([first], options)[0]
    before = engine.stats["prefill_tokens"]
    grown = Request(np.concatenate([first.tokens, done.tokens, tokens(rng, 5)]), 2, "a")
    engine.generate([grown], options)
    assert engine.stats["prefill_tokens"] - before == 1 + 5  # the last sampled token was never fed
    rewritten = Request(np.concatenate([first.tokens[:20], tokens(rng, 8)]), 3, "a")
    before = engine.stats["prefill_tokens"]
    again = engine.generate([rewritten], options)
    assert engine.stats["prefill_tokens"] - before == 8
    check(models["qwen3"], [rewritten], again, 1.0)
    shrunk = Request(rewritten.tokens[:12], 4, "a")
    before = engine.stats["prefill_tokens"]
    check(models["qwen3"], [shrunk], engine.generate([shrunk], options), 1.0)
    assert engine.stats["prefill_tokens"] - before == 1


def test_shared_tokens_are_computed_once(models):
    rng = np.random.default_rng(7)
    trunk, other = tokens(rng, 60), tokens(rng, 50)
    other[:20] = trunk[:20]
    points = [Request(trunk[:n], seed) for n in (30, 45, 60) for seed in (n, n + 1)] + [Request(other, 7)]
    engine = HFEngine(models["qwen3_moe"])
    done = engine.generate(points, SamplingOptions(max_tokens=5))
    check(models["qwen3_moe"], points, done, 1.0)
    assert engine.stats["prefill_tokens"] == 60 + 30
    assert engine.stats["shared_tokens"] == sum(len(p.tokens) for p in points) - 90


def test_thin_batches_are_compacted_and_idle_sessions_survive(models):
    rng = np.random.default_rng(8)
    engine = HFEngine(models["qwen3_moe"], max_batch=64)
    short = [Request(tokens(rng, 12), i, f"short{i}" if i % 2 else None, max_tokens=1 + i % 2) for i in range(30)]
    long = [Request(tokens(rng, 12), 40 + i, f"long{i}" if i % 2 else None) for i in range(4)]
    # Slots follow the order of the tokens: the long ones must lie far apart.
    for i, request in enumerate(long):
        request.tokens[0] = i * (VOCABULARY - 1) // 3
    swapped = []
    engine._cache.exchange = lambda *a: (swapped.append(a), type(engine._cache).exchange(engine._cache, *a))
    requests = short + long
    done = engine.generate(requests, SamplingOptions(max_tokens=30))
    assert swapped
    check(models["qwen3_moe"], requests, done, 1.0)
    sessions = [
        Request(np.concatenate([r.tokens, d.tokens, tokens(rng, 4)]), 7, r.session)
        for r, d in zip(requests, done, strict=True) if r.session
    ]
    before = engine.stats["prefill_tokens"]
    check(models["qwen3_moe"], sessions, engine.generate(sessions, SamplingOptions(max_tokens=5)), 1.0)
    assert engine.stats["prefill_tokens"] - before == 5 * len(sessions)
    engine.end_sessions([r.session for r in sessions])
    assert sorted(engine._free) == list(range(engine._cache.slots))


def test_idle_sessions_give_way_when_memory_is_short(models):
    rng = np.random.default_rng(9)
    roomy, tight = HFEngine(models["qwen3"], max_batch=4), HFEngine(models["qwen3"], max_batch=4, max_cache_bytes=1)
    requests = [Request(tokens(rng, 20), i, f"s{i}") for i in range(12)]
    options = SamplingOptions(max_tokens=4)
    for _ in range(2):
        want, got = roomy.generate(requests, options), tight.generate(requests, options)
        assert [w.tokens.tolist() for w in want] == [g.tokens.tolist() for g in got]
        requests = [
            Request(np.concatenate([r.tokens, d.tokens, tokens(rng, 3)]), r.seed, r.session)
            for r, d in zip(requests, got, strict=True)
        ]
    assert roomy.stats["evicted_sessions"] == 0 and roomy._cache.slots == 12
    tight.generate([Request(tokens(rng, 20), i) for i in range(12)], options)
    assert tight.stats["evicted_sessions"] > 0


def test_top_p_and_top_k_log_probabilities_are_renormalised(models):
    rng = np.random.default_rng(10)
    requests = [Request(tokens(rng, 15), i) for i in range(20)]
    done = HFEngine(models["llama"]).generate(requests, SamplingOptions(0.8, top_p=0.7, top_k=9, max_tokens=4))
    for request, one in zip(requests, done, strict=True):
        ids = torch.from_numpy(np.concatenate([request.tokens, one.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = models["llama"](ids).logits[0, len(request.tokens) - 1 : -1].double().numpy() / 0.8
        for row, token, logprob in zip(logits, one.tokens, one.logprob, strict=True):
            order = np.argsort(-row, kind="stable")[:9]
            mass = np.exp(row[order] - row[order[0]])
            mass /= mass.sum()
            kept = np.concatenate([[0], np.cumsum(mass)[:-1]]) < 0.7
            place = order.tolist().index(token)
            assert kept[place]
            assert logprob == pytest.approx(np.log(mass[place] / mass[kept].sum()), abs=1e-4)


def test_a_request_may_lower_the_limit(models):
    rng = np.random.default_rng(11)
    requests = [Request(tokens(rng, 9), i, max_tokens=limit) for i, limit in enumerate((1, 3, None, 50))]
    done = HFEngine(models["qwen3"]).generate(requests, SamplingOptions(max_tokens=7))
    assert [len(d.tokens) for d in done] == [1, 3, 7, 7] and {d.finish for d in done} == {"length"}


def test_new_weights_are_taken_and_stamped(models, tmp_path):
    new = make("qwen3_moe", seed=5)
    engine = HFEngine(models["qwen3_moe"])
    requests = [Request(tokens(np.random.default_rng(12), 20), 3, "a")]
    options = SamplingOptions(max_tokens=8)
    old = engine.generate(requests, options)[0]
    assert old.version == 0
    engine.load_weights(new.named_parameters(), version=4)
    done = engine.generate(requests, options)
    assert done[0].version == 4 and done[0].tokens.tolist() != old.tokens.tolist()
    check(new, requests, done, 1.0)
    # The names of a saved folder, where every expert stands alone.
    models["qwen3_moe"].save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert any(".experts.3.up_proj" in name for name in saved)
    engine.load_weights(saved.items(), version=5)
    assert engine.generate(requests, options)[0].tokens.tolist() == old.tokens.tolist()
    again = HFEngine.from_pretrained(tmp_path, version=9).generate(requests, options)[0]
    assert again.version == 9 and again.tokens.tolist() == old.tokens.tolist()


def test_training_the_original_changes_nothing(models):
    model = make("qwen3", seed=3)
    engine = HFEngine(model)
    requests, options = [Request(tokens(np.random.default_rng(13), 20), 3)], SamplingOptions(max_tokens=8)
    before = engine.generate(requests, options)[0].tokens.tolist()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.5)
    assert engine.generate(requests, options)[0].tokens.tolist() == before
    assert model.config._attn_implementation != engine.model.config._attn_implementation


def test_wrong_weights_are_named(models):
    engine = HFEngine(models["qwen3"])
    weights = dict(models["qwen3"].named_parameters())
    with pytest.raises(ValueError, match="'model.layers.9.mlp.weight'"):
        engine.load_weights([("model.layers.9.mlp.weight", torch.zeros(1))], 1)
    with pytest.raises(ValueError, match=r"model.norm.weight: shape \(3,\)"):
        engine.load_weights((weights | {"model.norm.weight": torch.zeros(3)}).items(), 1)
    del weights["model.norm.weight"]
    with pytest.raises(ValueError, match="lack 1 .*model.norm.weight"):
        engine.load_weights(weights.items(), 1)
    moe = HFEngine(models["qwen3_moe"])
    pieces = {n: p for n, p in models["qwen3_moe"].named_parameters() if not n.endswith("0.mlp.experts.gate_up_proj")}
    half = models["qwen3_moe"].model.layers[0].mlp.experts.gate_up_proj.chunk(2, dim=1)[0]
    pieces |= {f"model.layers.0.mlp.experts.{e}.gate_proj.weight": half[e] for e in range(8)}
    with pytest.raises(ValueError, match="lack 1 .*layers.0.mlp.experts.gate_up_proj"):
        moe.load_weights(pieces.items(), 1)


@pytest.mark.parametrize(
    "requests, message",
    [
        ([Request(np.empty(0, np.uint32), 0)], "request 0 .*has no tokens"),
        ([Request(np.array([1, VOCABULARY], np.uint32), 0)], "request 0 .*token id 300"),
        ([Request(np.ones(510, np.uint32), 0)], "exceed the model's 512 positions"),
        ([Request(np.ones(3, np.uint32), 0, "a"), Request(np.ones(4, np.uint32), 0, "a")], "session 'a' .*twice"),
        ([Request(np.ones(3, np.uint32), 0, max_tokens=0)], "asks for 0 tokens"),
    ],
)
def test_bad_requests_are_refused(models, requests, message):
    with pytest.raises(ValueError, match=message):
        HFEngine(models["qwen3"], verify=False).generate(requests, SamplingOptions(max_tokens=8))


def test_a_wrong_cache_is_noticed(models, monkeypatch):
    from mopd.sampling import slot_cache

    real = slot_cache.Plan.mask
    monkeypatch.setattr(slot_cache.Plan, "mask", lambda self, window, dtype: real(self, 2, dtype))
    with pytest.raises(RuntimeError, match="differs from its plain forward pass"):
        HFEngine(models["qwen3"])


def test_an_error_inside_leaves_no_stale_cache(models, monkeypatch):
    rng = np.random.default_rng(14)
    engine, options = HFEngine(models["qwen3"]), SamplingOptions(max_tokens=5)
    first = Request(tokens(rng, 20), 1, "a")
    done = engine.generate([first], options)[0]
    grown = [Request(np.concatenate([first.tokens, done.tokens, tokens(rng, 4)]), 2, "a")]
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda **_: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            engine.generate(grown, options)
    check(models["qwen3"], grown, engine.generate(grown, options), 1.0)
