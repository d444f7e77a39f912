"""What a step measures at each decision point: means over the tokens of its fresh turns, however the step was split."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.learner.step_metrics import TurnSums
from tests.mopd.learner.test_step import DOMAINS, SHARES, build
from tests.mopd.learner.tiny import branch_row, make_model, repeated_prefix_logits, rollout_row

NAMES = {"reverse_kl", "k1", "teacher_entropy", "student_entropy", "disagreement"}


def rows_of():
    """Decision points with two or three fresh turns each, and a rollout, which has no scores of its own."""
    rng = np.random.default_rng(3)
    streams = ("teacher_prefix", "sft_prefix", "teacher_prefix")
    rows = [branch_row(rng, size=12 + 3 * i, branches=2 + i % 2, points=1 + i % 2, stream=stream, domain=DOMAINS[i % 2],
                       group=30 + i) for i, stream in enumerate(streams)]
    return rows + [rollout_row(rng, size=20, turns=2, group=50)]


def expected(model, rows):
    """By the plain formulas: every branch behind its whole prefix, alone."""
    sums = {}
    with torch.no_grad():
        for row in rows[:3]:
            teacher = make_model("qwen3_moe", seed=7 + DOMAINS.index(row.domain))
            mine, theirs = (torch.log_softmax(repeated_prefix_logits(m, [row]), -1).double() for m in (model, teacher))
            label = torch.from_numpy(np.concatenate([a.tokens for a in row.actions]).astype(np.int64))
            at = torch.arange(len(label)), label
            values = {"reverse_kl": (mine.exp() * (mine - theirs)).sum(-1), "k1": mine[at] - theirs[at],
                      "teacher_entropy": -(theirs.exp() * theirs).sum(-1), "student_entropy": -(mine.exp() * mine).sum(-1),
                      "disagreement": (theirs.argmax(-1) != label).double()}
            start = 0
            for action in row.actions:
                for name, value in values.items():
                    key = (action.group, action.turn)
                    sums.setdefault(key, {}).setdefault(name, []).append(value[start:start + len(action.tokens)])
                start += len(action.tokens)
    return {key: {name: torch.cat(parts).mean().item() for name, parts in named.items()} for key, named in sums.items()}


@pytest.mark.parametrize("budget", [40, 1000])
def test_every_decision_point_gets_its_own_means(budget):
    rows = rows_of()
    step = build(turn_scores=True, token_budget=budget)
    wanted = expected(step.learner.model, rows)
    report = step(rows, shares=SHARES)
    assert len(wanted) == 4 and report.turn_scores.keys() == wanted.keys()
    for key, found in report.turn_scores.items():
        assert set(found) == NAMES
        assert found == pytest.approx(wanted[key], rel=1e-3, abs=1e-5)
    step.learner.close()


def test_sampled_scores_alone_give_the_estimate_and_nothing_of_the_distribution():
    rows = rows_of()
    step = build(turn_scores=True, objective="mopd")
    wanted = expected(step.learner.model, rows)
    for key, found in step(rows, shares=SHARES).turn_scores.items():
        assert set(found) == NAMES - {"teacher_entropy", "disagreement"}
        assert found["k1"] == pytest.approx(wanted[key]["k1"], rel=1e-3, abs=1e-5) and found["reverse_kl"] >= 0
    step.learner.close()


def test_a_run_that_asks_for_none_measures_none():
    step = build()
    assert step(rows_of(), shares=SHARES).turn_scores == {}
    step.learner.close()


def test_sums_do_not_depend_on_order_or_ranks():
    rng = np.random.default_rng(0)
    group, turn = rng.integers(0, 5, 400), rng.integers(0, 2, 400)
    sequence = group * 10 + rng.integers(0, 3, 400)
    values = {name: torch.from_numpy(rng.normal(size=400)) for name in ("k1", "k3", "agreement")}
    values["k1"][::7] = torch.nan
    chosen = rng.random(400) < 0.8

    def add(sums, rows):
        tokens = {"group": group[rows], "turn": turn[rows], "sequence": sequence[rows]}
        sums.add(tokens, {name: v[torch.from_numpy(rows)] for name, v in values.items()}, chosen[rows])
        return sums

    whole = add(TurnSums(), np.arange(400))
    # Whole actions in other batches, in another order, on other ranks.
    actions = np.unique(sequence * 2 + turn)
    parts = [np.flatnonzero(np.isin(sequence * 2 + turn, some)) for some in np.array_split(rng.permutation(actions), 4)]
    ranks = [add(add(TurnSums(), parts[3]), parts[0]), add(add(TurnSums(), parts[2]), parts[1])]
    split = TurnSums()
    for rank in ranks:
        split.merge(rank)
    assert split.scores() == whole.scores() and len(whole.scores()) == 10
    here = chosen & (group == 2) & (turn == 1)
    k1 = values["k1"].numpy()[here]
    assert whole.scores()[2, 1]["k1"] == pytest.approx(k1[~np.isnan(k1)].mean())
    assert whole.scores()[2, 1]["disagreement"] == pytest.approx(1 - values["agreement"].numpy()[here].mean())
    assert whole.scores()[2, 1]["reverse_kl"] == pytest.approx(values["k3"].numpy()[here].mean())
    empty = TurnSums()
    empty.add({name: np.zeros(3, int) for name in ("group", "turn", "sequence")}, {}, np.zeros(3, bool))
    assert empty.scores() == {}
