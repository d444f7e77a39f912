"""Columns of micro-batches split over two real processes: the same training as on one process."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.packing import pack
from mopd.learner.sequence_parallel import SequenceParallel
from mopd.learner.weights import named_weights
from mopd.rows import STREAMS
from tests.mopd.learner.configurations import (
    DOMAINS,
    TOLERANCE,
    Row,
    batches_of,
    reference_of,
    results_of_two,
    tell,
    weighted_cross_entropy,
)
from tests.mopd.learner.tiny import make_model, mixed_rows

pytestmark = pytest.mark.timeout(600)
STEPS, COUNT = 3, 7
PLAIN = Row("qwen3", 0, 0, "float32", "several", False, "", "full")
ROWS = [PLAIN, dataclasses.replace(PLAIN, stage=3, dtype="bfloat16", batches="one"),
        dataclasses.replace(PLAIN, family="qwen3_moe", stage=1, checkpointing=True),
        dataclasses.replace(PLAIN, family="qwen3_moe", stage=3, batches="one"),
        dataclasses.replace(PLAIN, family="qwen3_moe", stage=2, experts=2),
        dataclasses.replace(PLAIN, family="deepseek_v3", stage=1, experts=2, batches="one")]


def trained(row: Row, size: int) -> dict:
    """Three steps; with `size` 2 each rank has half of every micro-batch's columns."""
    config = dataclasses.replace(row.config(), sequence_parallel_size=size)
    learner = Learner(make_model(row.family), config=config, total_steps=STEPS)
    found: dict = {"loss": [], "norm": [], "tokens": [], "counts": []}
    for step in range(STEPS):
        batches = batches_of(mixed_rows(np.random.default_rng(step), COUNT), row)
        if learner.sequence is not None:
            batches = [learner.sequence.mine(batch) for batch in batches]
        report = learner.train_step(batches, weighted_cross_entropy)
        for name, value in (("loss", report.loss), ("norm", report.gradient_norm), ("tokens", report.tokens),
                            ("counts", report.expert_counts.tolist())):
            found[name].append(value)
    found["weights"] = {name: float(tensor.double().square().sum()) for name, tensor in named_weights(learner)}
    learner.close()
    return found


def ranks_main() -> None:
    from mopd.learner.engine import start_processes

    start_processes()
    tell([trained(row, 2) for row in ROWS])


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return results_of_two("tests.mopd.learner.test_sequence_parallel", ROWS, tmp_path_factory.mktemp("two"), timeout=500)


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_half_of_the_columns_on_each_rank_train_as_one_process(row, two):
    mine, theirs = trained(reference_of(row), 1), two[row]
    loss, norm = TOLERANCE[row.dtype]
    np.testing.assert_allclose(theirs["loss"], mine["loss"], rtol=loss)
    np.testing.assert_allclose(theirs["norm"], mine["norm"], rtol=norm)
    assert theirs["tokens"] == mine["tokens"]
    if row.dtype == "float32":
        assert theirs["counts"] == mine["counts"]
        for name, value in mine["weights"].items():
            assert theirs["weights"][name] == pytest.approx(value, rel=1e-4), name


@dataclasses.dataclass
class Place(SequenceParallel):
    """A rank's place without a group: what it computes of a micro-batch."""

    size: int
    place: int
    pad_id: int = 0


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("by_domain", [False, True])
def test_the_parts_of_all_ranks_are_the_micro_batch(size, by_domain):
    rows = mixed_rows(np.random.default_rng(3), COUNT)
    for batch in pack(rows, token_budget=200, pad_id=0, domains=DOMAINS, streams=STREAMS, by_domain=by_domain):
        batch.extra["score"] = torch.arange(batch.loss_tokens)
        places = [Place(size, place) for place in range(size)]
        mine = [place.mine(batch) for place in places]
        parts = [place.columns(part) for place, part in zip(places, mine, strict=True)]
        order = torch.cat([part.extra["score"] for part in mine])
        assert sorted(order.tolist()) == list(range(batch.loss_tokens))
        assert torch.equal(torch.cat([part.label for part in mine]), batch.label[order])
        actions = set(zip(batch.row.tolist(), batch.action.tolist(), strict=True))
        assert sum(int(part.extra["begins"].sum()) for part in mine) == len(actions)
        total = batch.input_ids.shape[1]
        for name in ("input_ids", "position_ids", "valid"):
            whole = torch.cat([getattr(part, name) for part in parts], dim=1)
            assert torch.equal(whole[:, :total], getattr(batch, name)) and not (name == "valid" and whole[:, total:].any())
        assert sum(part.tokens for part in parts) == batch.tokens
        for place, part, whole in zip(places, parts, mine, strict=True):
            width = part.input_ids.shape[1]
            row, column = part.source_index // width, part.source_index % width
            assert torch.equal(row * total + column + place.place * width, whole.source_index)
            if batch.attention is not None:
                assert part.attention.shape[-2:] == (width * size, width * size)
                assert torch.equal(part.attention[..., :total, :total], batch.attention)
                assert part.attention.any(-1).all(), "a query that sees nothing would be NaN"
                assert not part.attention[..., :total, total:].any()


@pytest.mark.parametrize(("family", "changes", "words"), [
    ("mimo_v2_flash", {}, "sliding window"),
    ("qwen3", {"num_key_value_heads": 1}, "each rank of 2 takes as many"),
    ("qwen3", {"_attn_implementation": "eager"}, "only sdpa is computed in parts"),
])
def test_a_model_that_cannot_be_split_is_refused_with_the_reason(family, changes, words):
    model = make_model(family)
    for name, value in changes.items():
        setattr(model.config, name, value)
    with pytest.raises(ValueError, match=words):
        SequenceParallel(model, 2, rank=0, world_size=2, pad_id=0)


def test_ranks_that_make_no_groups_and_settings_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="3 ranks make no whole groups"):
        SequenceParallel(make_model("qwen3"), 2, rank=0, world_size=3, pad_id=0)
    errors = LearnerConfig(sequence_parallel_size=2, prefix_gradient="none", split_on_imbalance=9, autoep_size=1).errors()
    assert sum("sequence_parallel_size" in error for error in errors) == 2
    assert any("must be 1" in error for error in LearnerConfig(sequence_parallel_size=0).errors())
    assert any("deepspeed.sequence_parallel_size" in error
               for error in LearnerConfig(deepspeed={"sequence_parallel_size": 2}).errors())
