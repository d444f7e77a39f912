"""Micro-batches that would overfill an expert-parallel rank are halved: the same step, in pieces that fit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, start_processes
from mopd.learner.forward import PackedLM
from mopd.learner.imbalance import halves
from mopd.learner.moe import find_routers
from mopd.learner.packing import pack
from mopd.rows import STREAMS
from tests.mopd.learner.test_engine import DOMAINS, batches_of, constant, weighted_cross_entropy
from tests.mopd.learner.tiny import make_model, mixed_rows

STAGES = (1, 3)
BUDGET = 160


@pytest.mark.parametrize("prefix_gradient", ["full", "none"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral_window"])
def test_halves_are_the_same_rows(family, prefix_gradient):
    model = make_model(family)
    rows = mixed_rows(np.random.default_rng(3), 5)
    (batch,) = pack(rows, token_budget=5000, pad_id=0, domains=DOMAINS, streams=STREAMS, by_domain=False,
                    prefix_gradient=prefix_gradient)
    batch.extra["scores"] = torch.arange(batch.loss_tokens * 2).view(-1, 2)
    parts = halves(batch)
    assert sum(part.tokens for part in parts) == batch.tokens and parts[1].padded_tokens < batch.padded_tokens / 2
    for name in ("label", "row", "action", "sequence", "weight"):
        assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(batch, name))
    assert torch.equal(torch.cat([part.extra["scores"] for part in parts]), batch.extra["scores"])
    whole = PackedLM(model)(batch)
    torch.testing.assert_close(torch.cat([PackedLM(model)(part) for part in parts]), whole, rtol=1e-4, atol=1e-5)


def skewed():
    """A model whose router sends every token to experts 0 and 1, which the first of two ranks has: its bias sees to it."""
    model = make_model("deepseek_v3")
    (router,) = find_routers(model)
    router.module.e_score_correction_bias[:2] += 10.0
    return model


def steps(rank: int = 0, size: int = 1, **changes) -> dict:
    """Three steps; in the last one the other rank has no row."""
    learner = Learner(skewed(), config=constant(gradient_clipping=0.3, **changes), total_steps=3)
    found: dict = {name: [] for name in ("loss", "norm", "counts", "micro_batches", "details", "splits")}
    for step, split in enumerate((3, 5, 7)):
        rows = mixed_rows(np.random.default_rng(step), 7)
        mine = rows if size == 1 else rows[:split] if rank == 0 else rows[split:]
        batches = batches_of(mine, budget=300)
        report = learner.train_step(batches, weighted_cross_entropy)
        assert [len(d.get("losses", ())) for d in report.details] == [batch.loss_tokens for batch in batches]
        found["loss"].append(report.loss)
        found["norm"].append(report.gradient_norm)
        found["counts"].append(report.expert_counts.tolist())
        found["micro_batches"].append(report.micro_batches)
        found["details"].append([sum(float(d["losses"].sum()) for d in report.details if "losses" in d)])
        found["splits"].append(None if report.splits is None else vars(report.splits))
    learner.check_routers()
    learner.close()
    return found


def ranks_main(place: str) -> None:
    rank, size = start_processes()
    found = {f"{stage} {budget}": steps(rank, size, zero_stage=stage, autoep_size=2, split_on_imbalance=budget,
                                        gradient_checkpointing=stage == 1)
             for stage in STAGES for budget in (0, BUDGET, 10)}
    every = [None] * size
    torch.distributed.all_gather_object(every, found)
    if rank == 0:
        (Path(place) / "imbalance.json").write_text(json.dumps(every))


@pytest.fixture(scope="module")
def two(two_ranks):
    return json.loads((two_ranks / "imbalance.json").read_text())


@pytest.mark.parametrize("stage", STAGES)
def test_a_planted_skew_is_split_on_all_ranks_and_trains_as_before(two, stage):
    alone = steps(zero_stage=0)
    whole, cut = (two[0][f"{stage} {budget}"] for budget in (0, BUDGET))
    for found in (whole, cut):
        assert found["loss"] == pytest.approx(alone["loss"], rel=2e-5)
        assert found["norm"] == pytest.approx(alone["norm"], rel=1e-4)
        assert found["counts"] == alone["counts"], "passes that were given up count nothing"
    assert all(tokens == 0 for layer in alone["counts"][0] for tokens in layer[2:]), "the skew is there"
    assert whole["splits"] == [None] * 3
    for here, there in zip(two[0][f"{stage} {BUDGET}"]["splits"], two[1][f"{stage} {BUDGET}"]["splits"], strict=True):
        assert here == there and here["splits"] >= here["passes"] > 0 == here["over_budget"]
        assert BUDGET / 4 < here["busiest"] <= BUDGET
    for rank in two:  # each rank's own tokens have their losses in their order
        cut, whole = (rank[f"{stage} {budget}"]["details"] for budget in (BUDGET, 0))
        for one, other in zip(cut, whole, strict=True):
            assert one == pytest.approx(other, rel=1e-4)


def test_a_single_row_that_is_too_large_is_trained_and_counted(two):
    for found in (two[0]["1 10"], two[0]["3 10"]):
        assert found["loss"] == pytest.approx(two[0]["1 0"]["loss"], rel=2e-5)
        assert all(one["over_budget"] == 7 and one["passes"] == 0 and one["busiest"] > 10 for one in found["splits"])


def test_on_one_rank_the_size_is_known_before_any_pass():
    found = steps(zero_stage=2, autoep_size=1, split_on_imbalance=200)
    assert found["loss"] == pytest.approx(steps()["loss"], rel=2e-5)
    assert all(one["splits"] > 0 == one["passes"] for one in found["splits"])


def test_it_needs_spread_experts():
    with pytest.raises(ValueError, match="split_on_imbalance must be 0 or more and needs autoep_size, got 5"):
        Learner(make_model("qwen3_moe"), config=constant(split_on_imbalance=5), total_steps=1)
