"""Shared prefixes are exact: loss and every gradient equal to repeating the prefix, in float64, for several families."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd.learner import attention
from mopd.learner.attention import EAGER, SDPA, attention_argument, block_mask
from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.forward import PackedLM
from mopd.learner.packing import computed_length, pack
from mopd.losses import divergence
from mopd.rows import STREAMS, Row
from tests.mopd.learner.tiny import (
    branch_row,
    detached_prefix_logits,
    make_model,
    random_action,
    repeated_prefix_logits,
    rollout_row,
)

FAMILIES = ("qwen3", "qwen3_moe", "llama", "mistral_window", "gemma2", "deepseek_v3", "mimo_v2_flash")


def rows_of(seed=3):
    """Several decision points with several turns each, turns of one token, a turn that starts at token 1."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(2, 61, 22).astype(np.uint32)
    places = [(1, 3), (1, 1), (9, 4), (9, 6), (9, 1), (22, 5)]
    actions = tuple(random_action(rng, at, n, branch=True, sequence=i) for i, (at, n) in enumerate(places))
    return [Row("game", "teacher_prefix", trunk, actions, "own"), branch_row(rng, size=17, branches=2, points=2, group=1),
            branch_row(rng, size=30, branches=3, points=1, group=2)]


def packed(rows, budget, **options):
    return pack(rows, token_budget=budget, pad_id=0, domains=("game",), streams=STREAMS, **options)


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def loss_of(logits, teacher):
    return divergence(logits.double(), teacher, kind="jsd").sum()


def packed_loss(model, batches, teacher, rows):
    """The same loss from packed rows; `teacher` [N, V] is in the order of rows and actions."""
    starts, total = {}, 0
    for i, row in enumerate(rows):
        for a, action in enumerate(row.actions):
            starts[i, a] = total
            total += len(action.tokens)
    values = []
    for batch in batches:
        logits = PackedLM(model)(batch)
        index, before, offset = [], None, 0
        for key in zip(batch.row.tolist(), batch.action.tolist(), strict=True):
            offset = offset + 1 if key == before else 0
            index.append(starts[key] + offset)
            before = key
        values.append(loss_of(logits, teacher[index]))
    return sum(values)


@pytest.mark.parametrize("prefix_gradient", ["full", "none"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_repeated_prefixes(family, checkpointing, prefix_gradient):
    rows = rows_of()
    model = make_model(family).double().train()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # grouped products know no float64
    logits = (repeated_prefix_logits if prefix_gradient == "full" else detached_prefix_logits)(model, rows)
    teacher = torch.randn(logits.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = loss_of(logits, teacher)
    expected.backward()
    theirs = gradients(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batches = packed(rows, 80, prefix_gradient=prefix_gradient)
    assert any(len(b.input_ids) > 1 for b in batches) and len(batches) > 1
    found = packed_loss(model, batches, teacher, rows)
    # Logits and rotary angles are made in float32 here and there, also in a float64 model.
    assert found.item() == pytest.approx(expected.item(), rel=3e-6)
    found.backward()
    mine = gradients(model)
    assert mine.keys() == theirs.keys()
    largest = max(g.abs().max() for g in theirs.values())
    for name in theirs:
        if "kv_b_proj" in name and prefix_gradient == "none":
            continue  # Transformers' cache holds MLA's latents, so there this matrix has a graph behind the prefix too
        assert (mine[name] - theirs[name]).abs().max() < 2e-5 * largest, name
    assert model.config._attn_implementation in (SDPA, EAGER)


def test_no_gradient_reaches_the_prefix_with_none():
    """Only the branch-point token and the turns may change an input embedding's gradient."""
    rng = np.random.default_rng(0)
    trunk = np.arange(10, 30).astype(np.uint32)
    action = dataclasses.replace(random_action(rng, 15, 4, branch=True), tokens=np.arange(40, 44).astype(np.uint32))
    row = Row("game", "teacher_prefix", trunk, (action,), "")
    model = make_model("qwen3", tie_word_embeddings=False)
    for kind, expected in (("none", {24, 40, 41, 42}), ("full", set(range(10, 25)) | {40, 41, 42})):
        (batch,) = packed([row], 100, prefix_gradient=kind)
        PackedLM(model)(batch).square().sum().backward()
        grad = model.get_input_embeddings().weight.grad
        assert set(grad.abs().sum(1).nonzero()[:, 0].tolist()) == expected, kind
        model.zero_grad()


def test_layout_of_a_detached_prefix():
    (row, *_) = rows_of()
    (batch,) = packed([row], 1000, prefix_gradient="none")
    assert batch.prefix_ids.tolist() == [row.trunk[:21].tolist()] and batch.prefix_valid.all()
    assert batch.tokens == batch.padded_tokens == computed_length(row, "none")
    assert batch.input_ids.shape == (1, 3 + sum(len(a.tokens) - 1 for a in row.actions))
    assert torch.equal(batch.label, torch.from_numpy(np.concatenate([a.tokens for a in row.actions]).astype(np.int64)))
    source = batch.position_ids[0, batch.source_index].tolist()
    assert source == [a.at - 1 + i for a in row.actions for i in range(len(a.tokens))]


def test_rollouts_keep_their_graph_and_micro_batches_may_mix():
    rng = np.random.default_rng(1)
    rows = [rollout_row(rng, size=25, turns=3, group=0), branch_row(rng, size=24, branches=1, points=2, group=1)]
    model = make_model("qwen3_moe").eval()
    (batch,) = packed(rows, 200, prefix_gradient="none")
    expected = torch.cat([repeated_prefix_logits(model, [rows[i]]) for i in dict.fromkeys(batch.row.tolist())])
    torch.testing.assert_close(PackedLM(model)(batch), expected, rtol=1e-4, atol=3e-5)


def test_other_attention_is_refused_with_none_and_used_as_it_is_with_full():
    model = make_model("qwen3")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(ValueError, match="prefix_gradient 'none' needs sdpa or eager"):
        PackedLM(model)(packed(rows_of(), 200, prefix_gradient="none")[0])


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_learner_trains_and_counts_loads_with_none(zero_stage):
    rows, reports = rows_of(), {}
    for kind in ("full", "none"):
        learner = Learner(make_model("qwen3_moe"), total_steps=3, config=LearnerConfig(
            learning_rate=1e-3, zero_stage=zero_stage, prefix_gradient=kind))
        batches = packed(rows, 100, prefix_gradient=kind)
        for batch in batches:
            batch.weight.fill_(0.1)
        reports[kind] = learner.train_step(batches, lambda logits, b: (
            (torch.nn.functional.cross_entropy(logits, b.label, reduction="none") * b.weight).sum(), {}))
        learner.close()
    full, none = reports["full"], reports["none"]
    assert none.loss == pytest.approx(full.loss, rel=1e-5) and none.gradient_norm != pytest.approx(full.gradient_norm)
    for report in reports.values():  # 2 layers, 2 experts per token
        assert int(report.expert_counts.sum()) == 2 * 2 * report.tokens


def test_block_mask_says_what_the_dense_mask_says():
    (batch, *_) = packed(rows_of(), 80)
    mask = batch.attention
    blocks = block_mask(mask)
    rows, _, queries, keys = mask.shape
    b, q, k = torch.meshgrid(torch.arange(rows), torch.arange(queries), torch.arange(keys), indexing="ij")
    assert torch.equal(blocks.mask_mod(b, 0, q, k), mask[:, 0])
    config = make_model("qwen3").config
    config._attn_implementation_internal = "flex_attention"
    with torch.no_grad():
        assert type(attention_argument(config, batch, torch.float32)).__name__ == "BlockMask"


@pytest.mark.parametrize("family", ["qwen3_moe", "mistral_window"])
def test_flex_attention_is_exact_too(family, monkeypatch):
    """Transformers' FlexAttention with our block masks, logits and gradients, by torch's uncompiled form of it, which runs on
    a CPU; the compiled one has no backward pass there, so it is refused."""
    from torch.nn.attention import flex_attention

    rows = rows_of()
    model = make_model(family).train()
    expected = repeated_prefix_logits(model, rows)
    expected.square().sum().backward()
    theirs = gradients(model)
    model.set_attn_implementation("flex_attention")
    batches = packed(rows, 80)
    assert len(batches) > 1
    with pytest.raises(ValueError, match="no backward pass on a CPU; take student.attention=auto"):
        PackedLM(model)(batches[0])
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(attention, "_has_backward", lambda *_: True)
    torch.compiler.set_stance("force_eager")
    try:
        found = torch.cat([PackedLM(model)(batch) for batch in batches])
        found.square().sum().backward()
    finally:
        torch.compiler.set_stance("default")
    key = torch.cat([batch.row for batch in batches]) * 100 + torch.cat([batch.action for batch in batches])
    torch.testing.assert_close(found[torch.argsort(key, stable=True)], expected, rtol=1e-4, atol=2e-5)
    mine = gradients(model)
    largest = max(g.abs().max() for g in theirs.values())
    assert all((mine[name] - theirs[name]).abs().max() < 1e-5 * largest for name in theirs)
