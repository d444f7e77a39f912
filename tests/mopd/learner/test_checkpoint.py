"""A resumed run goes on bit for bit; what is half-written or foreign is never loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from mopd.learner.checkpoint import CheckpointError, Checkpoints, checkpoints, latest, load_checkpoint, read_state
from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.packing import pack
from mopd.rows import STREAMS
from tests.mopd.learner.tiny import make_model, mixed_rows


def train(learner, first, last):
    losses = []
    for step in range(first, last):
        rows = mixed_rows(np.random.default_rng(step), 4)
        batches = pack(rows, token_budget=100, pad_id=0, domains=("game", "science"), streams=STREAMS)
        for batch in batches:
            batch.weight.fill_(0.02)
        report = learner.train_step(
            batches,
            lambda logits, b: (
                (torch.nn.functional.cross_entropy(logits, b.label, reduction="none") * b.weight).sum(),
                {},
            ),
        )
        losses.append((report.loss, report.gradient_norm, report.learning_rate))
    return losses


def learner_of(stage=1, model=None, **changes):
    config = LearnerConfig(learning_rate=5e-3, weight_decay=0.01, warmup_steps=2, zero_stage=stage, **changes)
    return Learner(model or make_model("qwen3_moe"), config=config, total_steps=6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resume_is_bit_equal(tmp_path, stage):
    straight = learner_of(stage)
    expected = train(straight, 0, 6)
    final = {n: p.detach().clone() for n, p in straight.model.named_parameters()}
    straight.close()

    kept = Checkpoints(tmp_path, keep=2)
    first = learner_of(stage)
    found = train(first, 0, 3)
    kept.save(first, 3, {"cursor": 17})
    train(first, 3, 4)  # work that is lost
    first.close()
    second = learner_of(stage, make_model("qwen3_moe", seed=5))
    assert kept.load(second) == (3, {"cursor": 17})
    found += train(second, 3, 6)
    assert found == expected
    assert all(torch.equal(final[n], p) for n, p in second.model.named_parameters())
    second.close()


def test_dropout_is_drawn_again_after_a_resume(tmp_path):
    def model():
        return make_model("qwen3", attention_dropout=0.3)

    straight = learner_of(model=model())
    expected = train(straight, 0, 3)
    straight.close()
    first = learner_of(model=model())
    train(first, 0, 2)
    Checkpoints(tmp_path).save(first, 2, {})
    first.close()
    torch.manual_seed(123)
    second = learner_of(model=model())
    Checkpoints(tmp_path).load(second)
    assert train(second, 2, 3) == expected[2:]
    second.close()


def test_half_written_and_foreign_checkpoints(tmp_path):
    assert latest(tmp_path) is None and Checkpoints(tmp_path / "none").load(None) is None
    learner = learner_of()
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        train(learner, step - 1, step)
        kept.save(learner, step, {"step": step})
    assert [s for s, _ in checkpoints(tmp_path)] == [2, 3] and read_state(latest(tmp_path)) == {"step": 3}
    with pytest.raises(ValueError, match="has made 3 steps"):
        kept.save(learner, 4, {})

    (tmp_path / ".step-9.writing" / "engine").mkdir(parents=True)  # a killed writer's
    (tmp_path / "step-8").mkdir()
    assert latest(tmp_path).name == "step-3"
    with pytest.raises(CheckpointError, match="step-8 is not a complete checkpoint"):
        load_checkpoint(learner, tmp_path / "step-8")

    other = learner_of(stage=2)
    with pytest.raises(CheckpointError, match="zero_stage 1, this run has 2"):
        load_checkpoint(other, latest(tmp_path))
    other.close()
    record = json.loads((tmp_path / "step-3" / "state.json").read_text())
    record["router_hash"] = "0" * 64
    (tmp_path / "step-3" / "state.json").write_text(json.dumps(record))
    with pytest.raises(RuntimeError, match="router changed"):
        load_checkpoint(learner, tmp_path / "step-3")
    train(learner, 3, 4)
    learner.router_hash = learner.router_hash.replace("0" * 64, "")
    learner.close()


def test_a_killed_save_leaves_no_trace_for_the_next(tmp_path):
    learner = learner_of()
    (tmp_path / ".step-0.writing").mkdir(parents=True)
    Checkpoints(tmp_path).save(learner, 0, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-0"]
    learner.close()
