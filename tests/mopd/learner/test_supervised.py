"""Supervised training: the right tokens, reproducible batches, mixtures, resume, and a loss that falls."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from mopd.learner.best import Evaluation
from mopd.learner.engine import LearnerConfig
from mopd.learner.moe import router_hash
from mopd.learner.packing import pack
from mopd.learner.supervised import (
    BatchPlan,
    SupervisedConfig,
    cross_entropy,
    mean_cross_entropy,
    row_of_text,
    rows_of_sequence,
    train_supervised,
)
from prefix_store.trajectory import Context, Fingerprint, Outcome, Segment, Sequence, Source, example_sequence
from tests.mopd.learner.tiny import VOCABULARY, make_model


def texts(rng, count, domain="game", period=5):
    """Learnable text: token t+1 follows from token t."""
    return [
        row_of_text(
            (int(rng.integers(0, period)) + np.arange(int(rng.integers(8, 30)))) % period + 2,
            domain=domain,
            origin=f"{domain} {i}",
        )
        for i in range(count)
    ]


def config(**changes):
    learner = changes.pop("learner", {})
    return SupervisedConfig(
        **{"batch_rows": 6, "token_budget": 200, "steps": 6, **changes},
        learner=LearnerConfig(**{"learning_rate": 1e-2, **learner}),
    )


def test_loss_is_the_mean_over_the_steps_tokens_and_falls():
    rng = np.random.default_rng(0)
    rows = texts(rng, 20)
    model = make_model("qwen3_moe")
    start = mean_cross_entropy(model, rows, pad_id=0)["game"]
    first = BatchPlan(rows, config()).rows_at(0)
    by_hand = mean_cross_entropy(model, [rows[i] for i in first], pad_id=0)["game"]
    before = router_hash(model)
    seen, evaluated = [], []
    result = train_supervised(
        model,
        rows,
        config(steps=12, evaluate_every=5),
        pad_id=0,
        progress=seen.append,
        evaluate=lambda step: evaluated.append(step) or Evaluation((step,), {}),
    )
    assert result.losses[0] == pytest.approx(by_hand, rel=1e-5)
    assert mean_cross_entropy(model, rows, pad_id=0)["game"] < 0.5 * start
    assert router_hash(model) == before
    assert [p.step for p in seen] == list(range(1, 13)) and seen[-1].seconds_left == 0 and seen[0].total == 12
    assert evaluated == [5, 10, 12] and [s for s, _ in result.evaluations] == evaluated and result.best[0] == 12
    assert not model.training
    trained = train_supervised(model, rows, config(steps=1, learner={"freeze_router": False}), pad_id=0)
    assert router_hash(model) != before and trained.steps == 1


def test_only_actions_train_and_shared_tokens_once():
    tokens = np.arange(2, 22).astype(np.uint32)

    def context(segments, **more):
        n = segments[-1].end
        return Context(tokens[:n], np.full(n, np.nan, np.float32), np.full(n, -1, np.int32), tuple(segments), **more)

    parent = context(
        [
            Segment("prompt", 0, 4, -1),
            Segment("action", 4, 7, 0),
            Segment("observation", 7, 10, 0),
            Segment("action", 10, 12, 1),
        ]
    )
    child = context(
        [
            Segment("prompt", 0, 4, -1),
            Segment("action", 4, 7, 0),
            Segment("observation", 7, 12, 0),
            Segment("action", 12, 15, 2),
        ],
        parent=0,
        fork=7,
    )
    sequence = Sequence(
        "game",
        "t",
        "e",
        "1",
        0,
        "train",
        (parent, child),
        ("a", "b", "c"),
        Outcome(1.0, 1.0),
        Source("expert", "x"),
        Fingerprint("a", "b"),
    )
    rows = rows_of_sequence(sequence, origin="s")
    assert [[(a.at, len(a.tokens), a.turn) for a in r.actions] for r in rows] == [[(4, 3, 0), (10, 2, 1)], [(12, 3, 2)]]
    assert [r.origin for r in rows] == ["s[0]", "s[1]"]
    cut = rows_of_sequence(sequence, max_tokens=11)
    assert [[a.at for a in r.actions] for r in cut] == [[4]] and len(cut[0].trunk) == 11
    everything = rows_of_sequence(sequence, all_tokens=True)
    assert [[(a.at, len(a.tokens)) for a in r.actions] for r in everything] == [[(1, 11)], [(7, 8)]]
    pack(rows + everything, token_budget=100, pad_id=0, domains=("game",), streams=("demonstration",))
    example = example_sequence(np.random.default_rng(0))
    assert sum(len(r.actions) for r in rows_of_sequence(example)) == example.turns


def test_batches_are_a_function_of_seed_and_step_and_cover_an_epoch():
    rows = texts(np.random.default_rng(0), 24)
    plan, again = BatchPlan(rows, config(steps=0, epochs=2.0)), BatchPlan(rows, config(steps=0, epochs=2.0))
    assert plan.steps == 8
    whole = [plan.rows_at(s) for s in range(8)]
    assert [again.rows_at(s) for s in (7, 3)] == [whole[7], whole[3]]
    first, second = sum(whole[:4], []), sum(whole[4:], [])
    assert sorted(first) == sorted(second) == list(range(24)) and first != second
    assert BatchPlan(rows, config(steps=8, seed=1)).rows_at(0) != whole[0]


def test_mixture_shares():
    rng = np.random.default_rng(0)
    rows = texts(rng, 30, "game") + texts(rng, 4, "science") + texts(rng, 3, "embodied")
    plan = BatchPlan(rows, config(mixture={"game": 1, "science": 3, "embodied": 0}, steps=10, batch_rows=6))
    counts = collections.Counter(rows[i].domain for s in range(10) for i in plan.rows_at(s))
    assert counts == {"game": 15, "science": 45}
    science = collections.Counter(i for s in range(10) for i in plan.rows_at(s) if rows[i].domain == "science")
    assert max(science.values()) - min(science.values()) <= 1
    with pytest.raises(ValueError, match=r"names \['math'\]"):
        BatchPlan(rows, config(mixture={"math": 1.0}))
    with pytest.raises(ValueError, match="no rows"):
        BatchPlan([], config())


def test_resume_gives_the_same_losses(tmp_path):
    rows = texts(np.random.default_rng(0), 20)
    straight = train_supervised(make_model("qwen3_moe"), rows, config(), pad_id=0)

    def stop(progress):
        if progress.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_supervised(
            make_model("qwen3_moe"), rows, config(save_every=2), pad_id=0, progress=stop, checkpoint_folder=tmp_path
        )
    model = make_model("qwen3_moe", seed=9)
    resumed = train_supervised(model, rows, config(save_every=2), pad_id=0, checkpoint_folder=tmp_path)
    assert resumed.first_step == 4 and resumed.losses == straight.losses[4:]


def test_text_of_one_token_is_refused():
    with pytest.raises(ValueError, match="one has 1 tokens"):
        row_of_text(np.array([3]), domain="game", origin="one")


def test_cross_entropy_selects_by_weight():
    rng = np.random.default_rng(0)
    (batch,) = pack(texts(rng, 2), token_budget=1000, pad_id=0, domains=("game",), streams=("demonstration",))
    batch.weight[:] = 0
    batch.weight[3] = 2.0
    logits = torch.randn(batch.loss_tokens, VOCABULARY)
    value, _ = cross_entropy(logits, batch)
    assert value.item() == pytest.approx(-2 * torch.log_softmax(logits[3], -1)[batch.label[3]].item(), rel=1e-5)
