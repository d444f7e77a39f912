"""Routers are found in every family, stay frozen, and loads count the training forward's real tokens only."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.forward import hidden_at_loss_tokens
from mopd.learner.moe import ExpertLoadCounter, find_routers, freeze_routers, router_hash, weights_hash
from mopd.learner.packing import pack
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


def test_a_router_may_be_trained():
    model = make_model("qwen3_moe")
    before = router_hash(model)
    learner = Learner(model, config=LearnerConfig(learning_rate=1e-2, freeze_router=False), total_steps=2)
    learner.train_step(batches_of(mixed_rows(np.random.default_rng(0), 4)), loss)
    learner.close()
    assert router_hash(model) != before
