"""Routing replay: what the engine tells of experts is what training uses, whatever the learner's own router would choose."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from mopd.config import Config
from mopd.fits import misfits
from mopd.learner.engine import Learner
from mopd.learner.forward import PackedLM
from mopd.learner.moe import find_routers
from mopd.learner.packing import InvalidRow, pack
from mopd.learner.route_similarity import RouteSimilarity
from mopd.learner.routing import CannotReplay, Choices, GateRule, RoutingReplay, gate_rules, moe_layers, overlap
from mopd.losses import make_objective
from mopd.losses.objectives import label_logprob
from mopd.rows import STREAMS, Action, Row
from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.contexts import EXPERTS, ContextBuilder
from mopd.sampling.fresh_turn import FreshTurnPoint, rows_from_sequence, sample_fresh_turns
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import Extension
from prefix_store.trajectory import Fingerprint, Outcome, Sequence, Source
from tests.mopd.learner.test_engine import constant, weighted_cross_entropy
from tests.mopd.learner.test_step import DOMAINS, SHARES, build, rows_of
from tests.mopd.learner.tiny import VOCABULARY, make_model

LEFT_OUT = 3
# an expert that the engine's router never takes and the learner's would
OPTIONS = SamplingOptions(max_tokens=6, stop_ids=(1,))


def models():
    """(engine's model, the same with other ideas): their routers differ only in the row of one expert, which the first never
    chooses. So the gate weights of what the first chose are the same in both, and the second would choose otherwise."""
    config = copy.deepcopy(make_model("qwen3_moe").config)
    config.num_experts = 16
    torch.manual_seed(0)
    first = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter in first.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.3)
    second = copy.deepcopy(first)
    for layer, (a, b) in enumerate(zip(find_routers(first), find_routers(second), strict=True)):
        a.module.weight.data[LEFT_OUT] = 0.0
        b.module.weight.data[LEFT_OUT] = torch.randn(32, generator=torch.Generator().manual_seed(layer))
    return first, second


def rollout(engine: HFEngine, seed: int, *, fork: bool = False) -> Sequence:
    """Three turns with observations between them; with `fork` history is rewritten after the second."""
    rng = np.random.default_rng(seed)
    builder = ContextBuilder(rng.integers(2, VOCABULARY, 9).astype(np.uint32))
    for turn in range(3):
        (done,) = engine.generate([Request(builder.tokens, 10 * seed + turn, f"s{seed}")], OPTIONS)
        assert done.experts.shape[0] == len(builder.tokens) + len(done.tokens) - 1
        builder.act(done.tokens, done.logprob, done.version, "student", done.candidates, done.experts)
        heard = rng.integers(2, VOCABULARY, 5).astype(np.uint32)
        if fork and turn == 1:
            builder.observe(Extension("rewrite", np.concatenate([builder.tokens[:10], heard]), 10))
        else:
            builder.observe(Extension("append", heard))
    engine.end_sessions([f"s{seed}"])
    return Sequence(domain="game", task="t", environment="e", environment_version="1", seed=seed, split="train",
                    contexts=builder.build(), actions=("a", "b", "c"), outcome=Outcome(reward=0.0, true_reward=0.0),
                    source=Source("student", "s"), fingerprint=Fingerprint("t", "c"))


@pytest.fixture(scope="module")
def played():
    """(the engine's model, one with other ideas, rows of rollouts and fresh turns that the engine sampled)."""
    first, second = models()
    engine = HFEngine(first, report_experts=True, max_batch=4, prefill_tokens=64)
    rows = [row for seed in (1, 2) for row in rows_from_sequence(
        rollout(engine, seed, fork=seed == 2), domain="game", stream="rollout", group=seed, sequence_number=seed)]
    trunk = np.random.default_rng(5).integers(2, VOCABULARY, 40).astype(np.uint32)
    points = [FreshTurnPoint("game", "teacher_prefix", "r", trunk[:at], turn, (7 * at, 7 * at + 1), 10 + turn, 20 + 2 * turn)
              for turn, at in enumerate((22, 31, 40))]
    rows += sample_fresh_turns(engine, points, OPTIONS)
    return first, second, rows


def without_routes(rows):
    return [dataclasses.replace(row, actions=tuple(dataclasses.replace(action, experts=None) for action in row.actions))
            for row in rows]


def logprobs(model, rows, **options):
    """(log π of every loss token in the order of the micro-batches, µ of the same)."""
    batches = pack(rows, token_budget=120, pad_id=0, domains=("game",), streams=STREAMS, **options)
    found = [PackedLM(model).per_token(batch, lambda logits, part: label_logprob(logits, part.label, 1.0))
             for batch in batches]
    return torch.cat(found), torch.cat([batch.behaviour_logprob for batch in batches])


@pytest.mark.parametrize("prefix_gradient", ["full", "none"])
def test_replayed_routes_reproduce_the_engine_also_where_the_router_would_choose_otherwise(played, prefix_gradient):
    first, second, rows = played
    chosen = np.concatenate([a.experts.reshape(-1) for row in rows for a in row.actions])
    assert len(chosen) > 300 and not (chosen == LEFT_OUT).any()
    replayed = copy.deepcopy(second)
    replay = RoutingReplay(replayed, gate_rules(replayed))
    for model in (first, replayed):
        own, said = logprobs(model, rows, prefix_gradient=prefix_gradient)
        torch.testing.assert_close(own, said, rtol=0, atol=2e-5)
    free, said = logprobs(second, rows, prefix_gradient=prefix_gradient)
    assert (free - said).abs().mean() > 0.05
    # No routes: the router is free again, also right after a pass that had some.
    unknown, _ = logprobs(replayed, without_routes(rows), prefix_gradient=prefix_gradient)
    torch.testing.assert_close(unknown, free, rtol=0, atol=1e-6)
    replay.close()


def forced(model, routes: torch.Tensor):
    """Hooks that make a plain model take routes [T, L, k], -1: free; the formula of R3 written down once more."""
    def hook(layer):
        def change(module, arguments, answer):
            logits, weights, chosen = answer
            given = torch.where(routes[:, layer] >= 0, routes[:, layer].long(), chosen)
            gate = [torch.exp(row[ids]) / torch.exp(row[ids]).sum() for row, ids in zip(logits, given, strict=True)]
            return logits, torch.stack(gate), given
        return change
    return [router.module.register_forward_hook(hook(layer)) for layer, router in enumerate(find_routers(model))]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_values_and_gradients_are_those_of_a_plain_model_with_the_routes_forced(played, checkpointing):
    _, second, rows = played
    plain, packed = copy.deepcopy(second), copy.deepcopy(second)
    expected, losses = 0.0, []
    for row in rows:
        for action in row.actions:
            ids = np.concatenate([row.trunk[:action.at], action.tokens])[:action.at + len(action.tokens)].astype(np.int64)
            routes = np.full((len(ids), *action.experts.shape[1:]), -1, np.int16)
            for other in row.actions:  # what earlier actions of a rollout know of the tokens before
                if not action.branch and other.at <= action.at:
                    end = other.at + len(other.tokens) - 1
                    routes[end - len(other.experts):end] = other.experts
            if action.branch:
                routes[:len(ids) - 1] = action.experts
            handles = forced(plain, torch.from_numpy(routes))
            logits = plain(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, action.at - 1:-1]
            for handle in handles:
                handle.remove()
            losses.append(torch.nn.functional.cross_entropy(
                logits, torch.from_numpy(action.tokens.astype(np.int64)), reduction="sum"))
    expected = torch.stack(losses).sum()
    expected.backward()
    if checkpointing:
        packed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    packed.train()
    replay = RoutingReplay(packed, gate_rules(packed))
    total = 0.0
    for batch in pack(rows, token_budget=120, pad_id=0, domains=("game",), streams=STREAMS):
        batch.weight = torch.ones(batch.loss_tokens)
        with replay.counting():
            loss, _ = PackedLM(packed)(batch, weighted_cross_entropy)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), rel=1e-5)
    for (name, parameter), (_, other) in zip(plain.named_parameters(), packed.named_parameters(), strict=True):
        torch.testing.assert_close(other.grad, parameter.grad, rtol=1e-3, atol=2e-4, msg=name)
    known, other = replay.take()
    assert (known == known[0]).all() and known[0] > 100 and (other > 0.1 * known).all() and (other < known).all()
    replay.close()


@pytest.mark.parametrize("options", [
    {"zero_stage": 0}, {"zero_stage": 3, "gradient_checkpointing": True, "prefix_gradient": "none"},
    {"zero_stage": 2, "autoep_size": 1}])
def test_the_learner_replays_and_counts_where_its_own_router_differs(played, options):
    first, second, rows = played
    found = []
    for model in (first, second):
        learner = Learner(copy.deepcopy(model), config=constant(routing_replay=True, **options), total_steps=1)
        batches = pack(rows, token_budget=150, pad_id=0, domains=("game",), streams=STREAMS,
                       prefix_gradient=learner.config.prefix_gradient)
        for batch in batches:
            batch.weight = torch.ones(batch.loss_tokens) / 50
        report = learner.train_step(batches, weighted_cross_entropy)
        found.append((report.loss, report.replayed))
        assert report.expert_counts[:, LEFT_OUT].sum() == 0 or model is second  # free tokens only
        learner.close()
    (loss, same), (other_loss, differs) = found
    assert other_loss == pytest.approx(loss, rel=1e-5)
    assert same.other.sum() == 0 and torch.equal(same.tokens, differs.tokens) and (differs.other > 0).all()
    record = differs.record()
    assert len(record["other_share"]) == 2 and all(0 < share < 1 for share in record["other_share"])


def test_what_the_engine_tells_survives_the_contexts_and_the_store(tmp_path):
    from prefix_store import PrefixStore

    first, _ = models()
    sequence = rollout(HFEngine(first, report_experts=True), 3, fork=True)
    parent, child = sequence.contexts
    assert child.parent == 0 and child.fork == 10
    assert (child.extras[EXPERTS].cut(0, 10).values == parent.extras[EXPERTS].cut(0, 10).values).all()
    store = PrefixStore.open(tmp_path / "s", mode="w")
    number = store.append(sequence)
    store.commit("one")
    kept = store.sequence(number)
    rows = [rows_from_sequence(s, domain="game", stream="rollout", group=0, sequence_number=0) for s in (sequence, kept)]
    for one, other in zip(rows[0], rows[1], strict=True):
        for a, b in zip(one.actions, other.actions, strict=True):
            assert a.experts.dtype == np.int16 and np.array_equal(a.experts, b.experts)
    stored = rows_from_sequence(kept, domain="game", stream="demonstration", group=0, sequence_number=0)
    assert stored[0].actions[0].experts is None


def test_turns_that_outlive_their_weights_tell_the_experts_of_their_last_reading():
    first, second = models()
    engine = HFEngine(first, report_experts=True)
    prompt = np.arange(2, 20, dtype=np.uint32)
    engine.submit("a", Request(prompt, 4), SamplingOptions(max_tokens=8))
    for _ in range(3):
        engine.poll()
    engine.load_weights(second.named_parameters(), version=1)
    done = None
    while done is None:
        done = next((completion for _, completion in engine.poll(1.0)), None)
    assert list(done.version) == sorted(done.version) and done.version[-1] == 1
    choices = Choices(second)
    with choices.noting(), torch.no_grad():
        second(input_ids=torch.from_numpy(np.concatenate([prompt, done.tokens[:-1]]).astype(np.int64))[None])
    told = torch.from_numpy(done.experts).sort(-1).values
    assert torch.equal(told, torch.stack(choices.last, dim=1).sort(-1).values)


@pytest.mark.parametrize("family, rule", [
    ("qwen3_moe", GateRule("softmax", True)), ("mixtral", GateRule("softmax", True)), ("olmoe", GateRule("softmax", False)),
    ("qwen2_moe", GateRule("softmax", False)), ("deepseek_v3", GateRule("sigmoid", True, 2.5)),
    ("mimo_v2_flash", GateRule("sigmoid", True))])
def test_the_rule_of_a_family_is_found_by_asking_its_router(family, rule):
    model = make_model(family)
    found = gate_rules(model)
    assert len(found) == len(find_routers(model))
    assert {(r.score, r.normalised) for r in found} == {(rule.score, rule.normalised)}
    assert found[0].scale == pytest.approx(rule.scale, rel=1e-3)


def test_the_layers_that_have_routers_are_known_without_weights():
    config = make_model("deepseek_v3").config
    config.num_hidden_layers, config.first_k_dense_replace, config.mlp_layer_types = 5, 2, ["dense"] * 2 + ["sparse"] * 3
    assert moe_layers(config) == [2, 3, 4] and moe_layers(make_model("qwen3_moe").config) == [0, 1]
    with pytest.raises(CannotReplay, match="Qwen3ForCausalLM"):
        moe_layers(make_model("qwen3").config)


def test_what_cannot_be_replayed_is_refused_by_name(played):
    with pytest.raises(CannotReplay, match="Qwen3ForCausalLM has no router over experts"):
        HFEngine(make_model("qwen3"), report_experts=True)
    odd = make_model("qwen3_moe")
    gate = odd.model.layers[1].mlp.gate
    forward = gate.forward
    gate.forward = lambda hidden: (forward(hidden)[0], forward(hidden)[1] ** 2, forward(hidden)[2])
    with pytest.raises(CannotReplay, match="layers.1.mlp.gate of Qwen3MoeForCausalLM is a Qwen3MoeTopKRouter, whose gate"):
        gate_rules(odd)
    rows, other = played[2], make_model("mixtral")
    for router in find_routers(other):
        router.module.top_k = 1
    RoutingReplay(other, gate_rules(other))
    with pytest.raises(ValueError, match=r"chooses \(\d+, 1\) experts, the routes to replay are \(\d+, 2\)"):
        logprobs(other, rows)
    trunk = np.arange(2, 12, dtype=np.uint32)
    zeros = np.zeros(2, np.float32)
    action = Action(4, trunk[4:6], zeros, zeros.astype(np.int32), False, 0, 0, 0, experts=np.zeros((6, 2, 2), np.int16))
    with pytest.raises(InvalidRow, match=r"experts of shape \(6, 2, 2\)"):
        pack([Row("game", "rollout", trunk, (action,))], token_budget=50, pad_id=0, domains=("game",), streams=STREAMS)


def test_a_launch_refuses_replay_for_a_student_without_routes(tmp_path):
    dense = "train.routing_replay: Qwen3ForCausalLM has no router over experts"
    for family, said in {"qwen3": [dense], "mixtral": []}.items():
        config = Config()
        config.student.model, config.train.routing_replay = str(tmp_path / family), True
        make_model(family).config.save_pretrained(config.student.model)
        errors = misfits(config, make_objective("mopd", {}), {})
        assert len(errors) == len(said) and all(e.startswith(s) for e, s in zip(errors, said, strict=True))


def test_the_overlap_of_teacher_and_student_by_domain():
    assert overlap(torch.tensor([[0, 1], [0, 1], [0, 1]]), torch.tensor([[1, 0], [1, 2], [2, 3]])).tolist() == [
        1.0, pytest.approx(1 / 3), 0.0]
    from teachers.scoring.hf import HFTeacher

    scorers = {"game": HFTeacher(make_model("qwen3_moe"), teacher="same"),
               "science": HFTeacher(make_model("qwen3_moe", seed=5), teacher="other")}
    step = build(scorers, routing_similarity_every=2)
    first, second, third = (step(rows_of(), shares=SHARES).metrics["expert_load"] for _ in range(3))
    found = first["similarity"]
    assert set(found) == set(DOMAINS) and found["game"]["overlap"] == 1.0 and found["game"]["tokens"] > 20
    assert 0.1 < found["science"]["overlap"] < 0.9 and len(found["science"]["by_layer"]) == 2
    assert "similarity" not in second and third["similarity"]["game"]["overlap"] <= 1.0
    dense = {"game": scorers["game"], "science": HFTeacher(make_model("qwen3"), teacher="dense")}
    assert RouteSimilarity(step.learner, dense, 1).domains == ("game",)
