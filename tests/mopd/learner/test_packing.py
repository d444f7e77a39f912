"""Packed rows give what separately forwarded sequences give: logits, gradients, and labels in the right place."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.learner.forward import PackedLM
from mopd.learner.packing import (
    InvalidRow,
    computed_length,
    empty_micro_batch,
    micro_batch_plan,
    pack,
    row_cost,
    spread,
)
from mopd.rows import STREAMS, Row
from tests.mopd.learner.tiny import (
    VOCABULARY,
    branch_row,
    make_model,
    mixed_rows,
    random_action,
    repeated_prefix_logits,
    rollout_row,
)

DOMAINS = ("game", "science")


def packed(rows, budget=200, **options):
    return pack(rows, token_budget=budget, pad_id=0, domains=DOMAINS, streams=STREAMS, **options)


def in_row_order(batches, values):
    """Concatenate per-loss-token values [N, …] of micro-batches in the order of rows, actions, tokens."""
    row = torch.cat([b.row for b in batches])
    action = torch.cat([b.action for b in batches])
    key = row * 10_000 + action
    return torch.cat(values)[torch.argsort(key, stable=True)]


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3", "llama", "mistral_window", "gemma2", "deepseek_v3"])
def test_packed_rows_equal_repeated_prefixes(family):
    rng = np.random.default_rng(3)
    rows = mixed_rows(rng, 6) + [branch_row(rng, size=20, branches=3, points=3, group=9)]
    model = make_model(family).eval()
    expected = repeated_prefix_logits(model, rows)
    target = torch.from_numpy(rng.normal(size=tuple(expected.shape)).astype(np.float32))
    (expected * target).sum().backward()
    gradient = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    batches = packed(rows, 110)
    assert len(batches) > 2 and any(b.attention is not None for b in batches)
    found = in_row_order(batches, [PackedLM(model)(b) for b in batches])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=3e-5)
    (found * target).sum().backward()
    for name, parameter in model.named_parameters():
        if name in gradient:
            scale = gradient[name].abs().max().clamp_min(1e-6)
            assert (parameter.grad - gradient[name]).abs().max() / scale < 2e-4, name


def test_eager_attention_sees_the_same_mask():
    rng = np.random.default_rng(0)
    rows = [branch_row(rng, size=15, branches=3, points=2)]
    model = make_model("qwen3_moe").eval()
    expected = repeated_prefix_logits(model, rows)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(PackedLM(model)(packed(rows)[0]), expected, rtol=1e-4, atol=3e-5)


def test_nothing_without_loss_is_computed():
    rng = np.random.default_rng(1)
    trunk = rng.integers(2, VOCABULARY, 30).astype(np.uint32)
    row = Row(
        "game", "teacher_prefix", trunk, tuple(random_action(rng, 10, n, branch=True, sequence=n) for n in (1, 4)), ""
    )
    batch = packed([row])[0]
    assert computed_length(row) == 10 + 0 + 3 == batch.tokens == batch.padded_tokens
    assert batch.source_index.tolist() == [9, 9, 10, 11, 12]
    assert batch.position_ids[0].tolist() == [*range(10), 10, 11, 12]


def test_a_planted_token_is_found_at_every_position():
    """A model that predicts token + 1 gives every label log-probability 0 exactly where labels count upwards."""
    rng = np.random.default_rng(2)
    trunk = (np.arange(20) + 2).astype(np.uint32)
    actions = []
    for number, (at, n) in enumerate([(5, 1), (5, 4), (12, 3), (20, 1)]):
        tokens = (trunk[at - 1] + 1 + np.arange(n)).astype(np.uint32)
        actions.append(dataclasses.replace(random_action(rng, at, n, branch=True, sequence=number), tokens=tokens))
    inside = Row(
        "game",
        "rollout",
        trunk,
        (random_action(rng, 3, 6, branch=False, trunk=trunk), random_action(rng, 17, 3, branch=False, trunk=trunk)),
    )
    for batch in packed([Row("game", "teacher_prefix", trunk, tuple(actions)), inside, inside], 1000):
        source = batch.input_ids.reshape(-1)[batch.source_index]
        assert (batch.label == source + 1).all()


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40), st.integers(1, 900), st.sampled_from([None, 1, 3]))
@settings(max_examples=60, deadline=None)
def test_plan_keeps_the_budget_and_every_row(lengths, budget, most):
    plan = micro_batch_plan(lengths, budget, most)
    flat = [i for part in plan for i in part]
    assert sorted(flat) == list(range(len(lengths)))
    assert all((-lengths[a], a) < (-lengths[b], b) for a, b in itertools.pairwise(flat))
    for part in plan:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= budget
        assert most is None or len(part) <= most


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(300, 4000))
@settings(max_examples=40, deadline=None)
def test_plan_is_the_cheapest_cut_of_the_sorted_rows(lengths, budget):
    def cost(parts):
        return sum(len(p) * p[0] + max(96, budget // 16) for p in parts)

    ordered = sorted(lengths, reverse=True)
    cuts = []
    for choice in itertools.product([False, True], repeat=len(ordered) - 1):
        edges = [0, *(i + 1 for i, cut in enumerate(choice) if cut), len(ordered)]
        parts = [ordered[a:b] for a, b in itertools.pairwise(edges)]
        if all(len(p) == 1 or len(p) * p[0] <= budget for p in parts):
            cuts.append(cost(parts))
    assert cost([[lengths[i] for i in part] for part in micro_batch_plan(lengths, budget)]) == min(cuts)


@given(st.integers(0, 2**31), st.integers(40, 400))
@settings(max_examples=15, deadline=None)
def test_repacking_and_shuffling_change_no_token(seed, budget):
    rng = np.random.default_rng(seed)
    rows = mixed_rows(rng, 7)
    order = rng.permutation(len(rows))

    def table(batches, names):
        fields = ("label", "behaviour_logprob", "domain", "stream", "group", "sequence", "turn", "version")
        result = []
        for b in batches:
            source = b.input_ids.reshape(-1)[b.source_index]
            position = b.position_ids.reshape(-1)[b.source_index]
            for i in range(b.loss_tokens):
                result.append(
                    (
                        names[int(b.row[i])],
                        int(b.action[i]),
                        int(position[i]),
                        int(source[i]),
                        *(float(getattr(b, f)[i]) for f in fields),
                    )
                )
        return sorted(result)

    first = table(packed(rows, 200), list(range(len(rows))))
    second = table(packed([rows[i] for i in order], budget, by_domain=False), order.tolist())
    assert first == second
    assert len(first) == sum(r.loss_tokens for r in rows)


@given(st.lists(st.integers(1, 500), max_size=30), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_rows_are_spread_evenly_and_completely(costs, ranks):
    parts = spread(costs, ranks)
    assert sorted(i for part in parts for i in part) == list(range(len(costs))) and len(parts) == ranks
    loads = [sum(costs[i] for i in part) for part in parts]
    assert max(loads) - min(loads) <= max(costs, default=0)
    assert spread(costs, ranks) == parts
    with pytest.raises(ValueError, match="ranks must be at least 1"):
        spread(costs, 0)


def test_long_rows_cost_more_than_their_tokens():
    rng = np.random.default_rng(0)
    short, long = (branch_row(rng, size=n, branches=1, points=1) for n in (10, 30))
    assert row_cost(long) == computed_length(long)
    assert row_cost(long, even_length=100) / row_cost(short, even_length=100) > row_cost(long) / row_cost(short)


def test_micro_batches_hold_one_domain_each():
    rows = mixed_rows(np.random.default_rng(5), 8)
    assert all(len(set(b.domain.tolist())) == 1 for b in packed(rows, 500))
    assert any(len(set(b.domain.tolist())) == 2 for b in packed(rows, 500, by_domain=False))


def test_malformed_rows_are_refused_by_name():
    rng = np.random.default_rng(0)
    good = rollout_row(rng, size=10, turns=2)
    action = good.actions[0]
    cases = [
        (dataclasses.replace(good, actions=()), "no action"),
        (dataclasses.replace(good, actions=(dataclasses.replace(action, at=0),)), "starts after 0"),
        (dataclasses.replace(good, actions=(dataclasses.replace(action, at=9),)), "covers"),
        (dataclasses.replace(good, actions=(dataclasses.replace(action, tokens=action.tokens + 1),)), "differ"),
        (dataclasses.replace(good, actions=(dataclasses.replace(action, version=action.version[:1]),)), "versions"),
        (dataclasses.replace(good, actions=(dataclasses.replace(action, tokens=action.tokens[:0]),)), "no tokens"),
    ]
    for row, words in cases:
        with pytest.raises(InvalidRow, match=f"rollout row 0.*{words}"):
            packed([row])
    with pytest.raises(ValueError, match="domain 'math' is not one of"):
        packed([dataclasses.replace(good, domain="math")])
    with pytest.raises(ValueError, match="stream 'other'"):
        packed([dataclasses.replace(good, stream="other")])
    with pytest.raises(ValueError, match="token_budget"):
        packed([good], 0)


def test_an_empty_micro_batch_runs_and_weighs_nothing():
    model = make_model("qwen3_moe")
    loss, details = PackedLM(model)(empty_micro_batch(0), lambda *_: pytest.fail("no token, no loss"))
    loss.backward()
    assert loss.item() == 0.0 and details == {}
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
