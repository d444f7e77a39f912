"""Aggregation: reference cases, and weights that make micro-batches, ranks and orders add up to the same gradient."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import aggregate, aggregation_schedule, aggregation_weights, cell_weights, divergence, step_weights

CASE = json.loads((Path(__file__).parents[2] / "cases" / "aggregate.json").read_text())
MODES = ("token_mean", "sequence_mean", "prompt_mean", "turn_mean")
IDS = {name: torch.tensor(CASE[name]) for name in ("sequence", "group", "turn")}
VALUES = torch.tensor(CASE["per_token"], dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
def test_reference(mode):
    assert aggregate(VALUES, mode=mode, **IDS).item() == pytest.approx(CASE[mode], rel=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_is_the_weights(mode):
    values = VALUES.clone().requires_grad_()
    aggregate(values, mode=mode, **IDS).backward()
    weights = aggregation_weights(mode, *IDS.values())
    assert weights.sum() == pytest.approx(1.0)
    torch.testing.assert_close(values.grad, torch.from_numpy(weights))


def test_schedule_moves_linearly():
    assert aggregation_schedule("turn_mean", "token_mean", 0, 10) == {"turn_mean": 1.0, "token_mean": 0.0}
    halfway = aggregation_schedule("turn_mean", "token_mean", 5, 10)
    expected = (CASE["turn_mean"] + CASE["token_mean"]) / 2
    assert aggregate(VALUES, mode=halfway, **IDS).item() == pytest.approx(expected)
    assert aggregation_schedule("turn_mean", "token_mean", 99, 10) == {"turn_mean": 0.0, "token_mean": 1.0}
    assert aggregation_schedule("turn_mean", "turn_mean", 3, 10) == {"turn_mean": 1.0}
    with pytest.raises(ValueError, match="at least 1"):
        aggregation_schedule("turn_mean", "token_mean", 0, 0)


@pytest.mark.parametrize("mode", MODES)
def test_left_out_tokens_leave_the_denominators_and_may_be_nan(mode):
    include = torch.ones(len(VALUES), dtype=torch.bool)
    include[[0, 3, 17, 28]] = False
    values = torch.where(include, VALUES, torch.nan).requires_grad_()
    found = aggregate(values, mode=mode, include=include, **IDS)
    kept = {name: ids[include] for name, ids in IDS.items()}
    assert found.item() == pytest.approx(aggregate(VALUES[include], mode=mode, **kept).item())
    found.backward()
    assert torch.isfinite(values.grad).all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_gives_zero_with_a_graph(mode):
    values = torch.zeros(3, requires_grad=True)
    ids = torch.zeros(3, dtype=torch.long)
    loss = aggregate(values, mode=mode, sequence=ids, group=ids, turn=ids, include=torch.zeros(3, dtype=torch.bool))
    loss.backward()
    assert loss.item() == 0.0 and (values.grad == 0).all()
    assert aggregation_weights(mode, ids[:0], ids[:0], ids[:0]).shape == (0,)


def test_errors():
    with pytest.raises(ValueError, match="token_mean"):
        aggregate(VALUES, mode="mean", **IDS)
    with pytest.raises(ValueError, match="must agree"):
        aggregation_weights("token_mean", [0, 0], [0], [0])


def random_step(seed, tokens=60):
    rng = np.random.default_rng(seed)
    return {
        "sequence": rng.integers(0, 9, tokens),
        "group": rng.integers(0, 4, tokens),
        "turn": rng.integers(0, 3, tokens),
        "domain": rng.integers(0, 3, tokens),
        "stream": rng.integers(0, 2, tokens),
    }


SHARES = {
    "domains": ("game", "science", "embodied"),
    "streams": ("rollout", "teacher_prefix"),
    "domain_share": {"game": 0.5, "science": 0.2, "embodied": 0.3},
    "stream_share": {"rollout": 0.6, "teacher_prefix": 0.4},
}


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES), tokens=st.integers(1, 60))
def test_cell_by_cell_reference(seed, mode, tokens):
    """The whole loss equals Σ ω · aggregate over each cell's own tokens."""
    step = random_step(seed, tokens)
    losses = torch.from_numpy(np.random.default_rng(seed + 1).normal(size=tokens))
    weights, omega = step_weights(mode, **step, **SHARES)
    expected = 0.0
    for (domain, stream), share in omega.items():
        d, s = SHARES["domains"].index(domain), SHARES["streams"].index(stream)
        own = torch.from_numpy((step["domain"] == d) & (step["stream"] == s))
        ids = {name: torch.from_numpy(step[name])[own] for name in ("sequence", "group", "turn")}
        expected += share * aggregate(losses[own], mode=mode, **ids).item()
    assert (torch.from_numpy(weights) * losses).sum().item() == pytest.approx(expected, abs=1e-12)
    assert weights.sum() == pytest.approx(1.0) and sum(omega.values()) == pytest.approx(1.0)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), mode=st.sampled_from(MODES), parts=st.sampled_from([1, 2, 4, 8]))
def test_splits_and_orders_give_one_gradient(seed, mode, parts):
    """One batch, n micro-batches and a permutation: the same gradient of a real model's parameters."""
    step = random_step(seed, 48)
    generator = torch.Generator().manual_seed(seed % 1000)
    inputs = torch.randn(48, 5, generator=generator, dtype=torch.float64)
    teacher = torch.randn(48, 7, generator=generator, dtype=torch.float64)
    weight = torch.randn(7, 5, generator=generator, dtype=torch.float64)

    def run(order, count):
        ids = {name: values[order] for name, values in step.items()}
        weights = torch.from_numpy(step_weights(mode, **ids, **SHARES)[0])
        leaf = weight.clone().requires_grad_()
        for rows in np.array_split(np.arange(48), count):
            chosen = order[rows]
            (weights[rows] * divergence(inputs[chosen] @ leaf.t(), teacher[chosen])).sum().backward()
        return leaf.grad

    straight = np.arange(48)
    shuffled = np.random.default_rng(seed).permutation(48)
    whole = run(straight, 1)
    for other in (run(straight, parts), run(shuffled, 1), run(shuffled, parts)):
        torch.testing.assert_close(other, whole, rtol=1e-11, atol=1e-13)


def test_a_mean_per_micro_batch_would_fail_that_test():
    sizes = ([0] * 12, [1] * 28)
    per_part = np.mean([VALUES[:12].mean().item(), VALUES[12:].mean().item()])
    assert len(sizes[0]) + len(sizes[1]) == len(VALUES)
    assert abs(per_part - CASE["token_mean"]) > 1e-3


def test_omega_is_renormalised_over_cells_that_have_tokens():
    shares = {"game": 0.5, "science": 0.5}
    streams = {"game": {"rollout": 1.0, "sft_prefix": 0.0}, "science": {"rollout": 0.5, "sft_prefix": 0.5}}
    everything = cell_weights(shares, streams, [("game", "rollout"), ("science", "rollout"), ("science", "sft_prefix")])
    assert everything == {("game", "rollout"): 0.5, ("science", "rollout"): 0.25, ("science", "sft_prefix"): 0.25}
    some = cell_weights(shares, streams, [("game", "rollout"), ("science", "rollout")])
    assert some == pytest.approx({("game", "rollout"): 2 / 3, ("science", "rollout"): 1 / 3})
    balanced = cell_weights(shares, streams, [("game", "rollout")], balance={"game": 4.0})
    assert balanced == {("game", "rollout"): 4.0}
    assert cell_weights(shares, streams, []) == {}


def test_a_cell_without_a_share_is_an_error():
    with pytest.raises(ValueError, match="domain 'maths'"):
        cell_weights({"game": 1.0}, {"rollout": 1.0}, [("maths", "rollout")])
    with pytest.raises(ValueError, match="stream 'sft_prefix'"):
        cell_weights({"game": 1.0}, {"rollout": 1.0}, [("game", "sft_prefix")])
    with pytest.raises(ValueError, match="share 0"):
        cell_weights({"game": 0.0}, {"rollout": 1.0}, [("game", "rollout")])


def test_long_rollouts_do_not_drown_short_turns():
    """One 1000-token rollout beside ten 1-token prefixes: each cell still weighs its share."""
    stream = np.array([0] * 1000 + [1] * 10)
    zeros = np.zeros(1010, int)
    weights, _ = step_weights(
        "token_mean", zeros, zeros, zeros, zeros, stream, domains=("game",), streams=("rollout", "teacher_prefix"),
        domain_share={"game": 1.0}, stream_share={"rollout": 0.5, "teacher_prefix": 0.5},
    )  # fmt: skip
    assert weights[:1000].sum() == pytest.approx(0.5) and weights[1000:].sum() == pytest.approx(0.5)
