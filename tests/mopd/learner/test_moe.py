"""Routers are found in every family, stay frozen, and loads count the training forward's real tokens only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.forward import hidden_at_loss_tokens
from mopd.learner.moe import ExpertLoadCounter, find_routers, freeze_routers, router_hash, weights_hash
from mopd.learner.packing import pack
from mopd.learner.router_drift import drift_alerts
from mopd.learner.weights import named_weights
from mopd.rows import STREAMS
from tests.mopd.learner.tiny import make_model, mixed_rows


def batches_of(rows):
    batches = pack(rows, token_budget=300, pad_id=0, domains=("game", "science"), streams=STREAMS)
    for batch in batches:
        batch.weight.fill_(0.01)
    return batches


def loss(logits, batch):
    return (torch.nn.functional.cross_entropy(logits, batch.label, reduction="none") * batch.weight).sum(), {}


@pytest.mark.parametrize(
    "family, layers",
    [("qwen3_moe", 2), ("mixtral", 2), ("olmoe", 2), ("qwen2_moe", 2), ("deepseek_v3", 1), ("llama", 0), ("qwen3", 0)],
)
def test_routers_are_found_and_frozen(family, layers):
    model = make_model(family)
    routers = find_routers(model)
    assert len(routers) == layers and all(r.num_experts == 4 for r in routers)
    names = freeze_routers(model)
    frozen = {n.rpartition(".")[0] for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == set(names)
    freeze_routers(model, frozen=False)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_counts_are_the_chosen_experts_of_real_tokens(family):
    model = make_model(family)
    counter = ExpertLoadCounter(model)
    batch = max(batches_of(mixed_rows(np.random.default_rng(0), 6)), key=lambda b: b.padded_tokens - b.tokens)
    assert batch.padded_tokens > batch.tokens
    expected = torch.zeros_like(counter.counts)
    chosen = {}
    for layer, router in enumerate(counter.routers):
        router.experts.register_forward_hook(lambda m, a, o, layer=layer: chosen.__setitem__(layer, a[1].detach()))
    with counter.counting(batch.valid):
        hidden_at_loss_tokens(model, batch)
    valid = batch.valid.reshape(-1).tolist()
    for layer, indices in chosen.items():
        for token, experts in enumerate(indices.tolist()):
            for expert in experts:
                expected[layer, expert] += valid[token]
    counts = counter.take()
    assert torch.equal(counts, expected) and counts.sum(1).tolist() == [2 * batch.tokens] * len(counter.routers)
    hidden_at_loss_tokens(model, batch)  # not the training forward
    assert counter.take().sum() == 0


def test_router_keeps_its_bytes_in_training_and_expert_bias_belongs_to_it():
    model = make_model("deepseek_v3")
    before, weights = router_hash(model), weights_hash(model)
    learner = Learner(model, config=LearnerConfig(learning_rate=1e-2), total_steps=2)
    batches = batches_of(mixed_rows(np.random.default_rng(0), 4))
    report = learner.train_step(batches, loss)
    learner.forward_only(batches, lambda logits, b: None)
    assert int(report.expert_counts.sum()) == 2 * report.tokens
    assert learner.expert_loads.take().sum() == 0
    learner.check_routers()
    learner.close()
    assert router_hash(model) == before and weights_hash(model) != weights
    find_routers(model)[0].module.e_score_correction_bias.add_(1.0)
    assert router_hash(model) != before
    learner.router_hash = before
    with pytest.raises(RuntimeError, match="router changed"):
        learner.check_routers()


@pytest.mark.parametrize("stage, experts", [(0, 0), (2, 0), (3, 0), (1, 1), (3, 1)])
def test_frozen_routers_are_in_no_optimizer_group(stage, experts):
    learner = Learner(make_model("qwen3_moe"), config=LearnerConfig(zero_stage=stage, autoep_size=experts), total_steps=2)
    routers = {p for router in find_routers(learner.model) for p in router.module.parameters()}
    # ZeRO puts flat buffers into the groups and keeps the parameters that they are made of beside them.
    names = {0: "param_groups", 3: "fp16_groups"}
    groups = getattr(learner.optimizer, names.get(stage, "bit16_groups"))
    trained = {p for group in groups for p in (group["params"] if stage == 0 else group)}
    assert routers and not routers & trained
    assert trained == {p for p in learner.model.parameters() if p.requires_grad} and len(trained) > 10
    learner.close()


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("experts", [0, 1])
def test_recomputation_under_checkpointing_counts_nothing(family, experts):
    batches, found = batches_of(mixed_rows(np.random.default_rng(0), 5)), []
    for checkpointing in (False, True):
        model = make_model(family)
        calls = [0]
        find_routers(model)[-1].module.register_forward_hook(lambda *_, calls=calls: calls.__setitem__(0, calls[0] + 1))
        learner = Learner(model, config=LearnerConfig(zero_stage=1, gradient_checkpointing=checkpointing,
                                                      autoep_size=experts), total_steps=2)
        report = learner.train_step(batches, loss)
        found.append((report.expert_counts.tolist(), calls[0]))
        assert int(report.expert_counts.sum()) == 2 * report.tokens * len(report.expert_counts)
        learner.close()
    assert found[0][0] == found[1][0]
    assert experts or found[1][1] == 2 * found[0][1] > 0, "it was computed twice"


@pytest.mark.parametrize("stage, experts", [(0, 0), (3, 0), (2, 1)])
def test_a_router_may_be_trained_and_its_drift_is_shown(stage, experts):
    model = make_model("qwen3_moe")
    routers = [router.module for router in find_routers(model)]
    start = [router.weight.detach().clone() for router in routers]
    inputs = {}

    def seen(layer, given):
        inputs.setdefault(layer, given.detach().clone())  # of the probe, which comes first

    for layer, router in enumerate(routers):
        router.register_forward_pre_hook(lambda m, a, layer=layer: seen(layer, a[0]))
    config = LearnerConfig(learning_rate=2e-2, freeze_router=False, zero_stage=stage, autoep_size=experts)
    learner = Learner(model, config=config, total_steps=8)
    reports = [learner.train_step(batches_of(mixed_rows(np.random.default_rng(step), 4)), loss) for step in range(3)]
    now = [tensor for name, tensor in named_weights(learner) if name.endswith("mlp.gate.weight")]
    drift = reports[-1].router_drift
    assert all(a < b for a, b in zip(reports[0].router_drift.relative_l2, drift.relative_l2, strict=True))
    for layer, (before, after) in enumerate(zip(start, now, strict=True)):
        assert drift.relative_l2[layer] == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-5)
        old, new = ((inputs[layer] @ weight.T).topk(2).indices.tolist() for weight in (before, after))
        same = sum(len(set(a) & set(b)) for a, b in zip(old, new, strict=True))
        assert drift.changed[layer] == pytest.approx(1 - same / (2 * len(old))) and drift.changed[layer] > 0
    assert drift_alerts(drift, 0.0)[1].startswith("MoE layer 1: ") and not drift_alerts(drift, 1.0)
    learner.close()


def test_no_drift_is_measured_where_there_is_none():
    for family, frozen in (("qwen3_moe", True), ("qwen3", False)):
        learner = Learner(make_model(family), config=LearnerConfig(freeze_router=frozen), total_steps=2)
        assert learner.train_step(batches_of(mixed_rows(np.random.default_rng(0), 2)), loss).router_drift is None
        learner.close()
