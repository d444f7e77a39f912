"""What moves a token's weight from step to step: the aggregation schedule, and the age of what sampled it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd.learner.forward import PackedLM
from mopd.losses import aggregation_weights
from tests.mopd.learner.test_step import SHARES, build, rows_of


class Stopped(Exception):
    """Raised in place of the update, with what would have been trained on."""


def look(step, rows, version=0):
    """(loss, gradients by name, micro-batches) of a step on `rows`, without its update."""
    model = step.learner.model
    kept = step.learner.train_step

    def train_step(batches, loss_function):
        model.zero_grad()
        total = 0.0
        for batch in batches:
            loss, _ = PackedLM(model)(batch, loss_function)
            loss.backward()
            total += loss.item()
        raise Stopped(total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}, batches)

    step.learner.train_step = train_step
    try:
        with pytest.raises(Stopped) as found:
            step(rows, shares=SHARES, step=version)
    finally:
        step.learner.train_step = kept
        model.zero_grad()
    return found.value.args


def weights_of(batches):
    """{(row, action, place): weight} in float64, and the same of any other per-token field."""
    found = {}
    for batch in batches:
        for row, action, source, weight in zip(batch.row.tolist(), batch.action.tolist(), batch.source_index.tolist(),
                                               batch.weight.double().tolist(), strict=True):
            found[row, action, source] = weight
    return found


def test_the_aggregation_moves_with_steps_or_with_the_token_budget():
    rows = [r for r in rows_of() if r.domain == "game" and r.stream == "rollout"]
    step = build(aggregation="token_mean", aggregation_to="turn_mean")  # of 5 steps
    for version, spent, share in ((0, 0.0, 0.0), (2, 0.0, 0.4), (2, 0.6, 0.6), (5, 0.0, 1.0)):
        step.learner.spent = spent
        assert step._aggregation(version) == pytest.approx({"token_mean": 1 - share, "turn_mean": share})
        step.config.max_staleness = 99
        _, _, batches = look(step, rows, version)
        ids = [np.concatenate([getattr(b, n).numpy() for b in batches]) for n in ("sequence", "group", "turn")]
        token, turn = (aggregation_weights(mode, *ids) for mode in ("token_mean", "turn_mean"))
        found = np.concatenate([b.weight.numpy() for b in batches])
        np.testing.assert_allclose(found, (1 - share) * token + share * turn, rtol=1e-5)
        assert abs(token - turn).max() > 1e-3
    step.learner.spent = 0.6
    report = step(rows, shares=SHARES, step=1)
    assert report.metrics["aggregation"] == pytest.approx({"token_mean": 0.4, "turn_mean": 0.6})
    step.learner.close()
    fixed = build(aggregation="turn_mean")
    assert fixed(rows, shares=SHARES).metrics["aggregation"] == {"turn_mean": 1.0}
    fixed.learner.close()


def test_old_tokens_weigh_less_and_move_no_others():
    """Value and gradient are those of Σ weight · decay^age · loss: linear in the factor of each age."""
    rows = [dataclasses.replace(r, actions=tuple(dataclasses.replace(a, version=np.full_like(a.version, 3 - 2 * (n % 2)))
                                                 for n, a in enumerate(r.actions))) for r in rows_of()]
    model = None
    found = {}
    for decay in (1.0, 0.5, 0.0):
        step = build(model=model, staleness_decay=decay, objective="reverse_kl")
        model = step.learner.model
        found[decay] = look(step, rows, version=3)
    whole, half, fresh = found[1.0], found[0.5], found[0.0]  # 0 ** 0 is 1: fresh tokens alone
    ages = {key: 3 - version for batch in whole[2] for key, version in zip(
        zip(batch.row.tolist(), batch.action.tolist(), batch.source_index.tolist(), strict=True), batch.version.tolist(),
        strict=True)}
    assert set(ages.values()) == {0, 2}
    before, after = weights_of(whole[2]), weights_of(half[2])
    for key, age in ages.items():
        assert after[key] == pytest.approx(before[key] * 0.5**age, rel=1e-6)
    assert fresh[0] != pytest.approx(whole[0], rel=1e-2)
    assert half[0] == pytest.approx(fresh[0] + 0.25 * (whole[0] - fresh[0]), rel=1e-5)
    for name, gradient in half[1].items():
        want = fresh[1][name] + 0.25 * (whole[1][name] - fresh[1][name])
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-6)
    assert any(not torch.allclose(half[1][n], whole[1][n], rtol=1e-2) for n in half[1])
    step.learner.close()


def test_stored_turns_have_no_age():
    from tests.mopd.learner.tiny import branch_row

    rng = np.random.default_rng(0)
    stored = branch_row(rng, size=12, branches=2, stream="sft_prefix", domain="science", group=20)
    stored = dataclasses.replace(stored, actions=tuple(
        dataclasses.replace(a, version=np.full_like(a.version, -1)) for a in stored.actions))
    step = build(staleness_decay=0.5)
    _, _, batches = look(step, [stored], version=3)
    assert sum(float(b.weight.sum()) for b in batches) == pytest.approx(1.0)
    step.learner.close()
