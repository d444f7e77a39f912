"""Candidate sets from the real engine through rows and micro-batches to the learner, where the ratio is then 1."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd.learner.packing import InvalidRow, check_row, pack
from mopd.learner.scores import Scores
from mopd.losses.objectives import ObjectiveResult, diagnose, label_logprob
from mopd.rows import STREAMS
from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.contexts import ContextBuilder
from mopd.sampling.fresh_turn import FreshTurnPoint, rows_from_sequence, sample_fresh_turns
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import Extension
from prefix_store.trajectory import Outcome, Sequence, Source
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
from tests.mopd.learner.test_step import DOMAINS, SHARES, build
from tests.mopd.learner.tiny import VOCABULARY, branch_row, make_model, repeated_prefix_logits

TEMPERATURE = 0.7
CUTS = {"top-p": (0.8, 0), "top-k": (1.0, 5), "both": (0.8, 5)}


@pytest.fixture(scope="module")
def engine():
    return HFEngine(make_model("qwen3_moe"), verify=False)


def sampled_rows(engine, top_p, top_k, temperature=TEMPERATURE):
    """Fresh turns at two points of a trunk in each domain, and a rollout of two turns in the first."""
    rng = np.random.default_rng(5)
    options = SamplingOptions(temperature, top_p, top_k, max_tokens=5)
    points, number = [], 0
    for domain in DOMAINS:
        trunk = rng.integers(2, VOCABULARY, 14).astype(np.uint32)
        for turn, at in enumerate((9, 14)):
            points.append(FreshTurnPoint(domain, "teacher_prefix", domain, trunk[:at], turn, (number, number + 1), number,
                                         10 * number))
            number += 1
    rows = sample_fresh_turns(engine, points, options)
    builder = ContextBuilder(rng.integers(2, VOCABULARY, 6).astype(np.uint32))
    for turn in range(2):
        done = engine.generate([Request(builder.tokens, seed=turn)], options)[0]
        builder.act(done.tokens, done.logprob, done.version, "student", done.candidates)
        builder.observe(Extension("append", rng.integers(2, VOCABULARY, 3).astype(np.uint32), 0))
    sequence = Sequence(domain="game", task="t", environment="e", environment_version="1", seed=1, split="train",
                        contexts=builder.build(), actions=("a", "b"), outcome=Outcome(0.0, 0.0, False, "", metadata={}),
                        source=Source("student", "s"), fingerprint=None, metadata={})
    return rows + rows_from_sequence(sequence, domain="game", stream="rollout", group=90, sequence_number=900)


def without_sets(rows):
    return [dataclasses.replace(r, actions=tuple(dataclasses.replace(a, candidates=None) for a in r.actions)) for r in rows]


@pytest.mark.parametrize("cut", CUTS)
def test_with_unchanged_weights_the_ratio_is_one(engine, cut):
    rows = sampled_rows(engine, *CUTS[cut])
    assert all(any(ids is not None for a in row.actions for ids in a.candidates) for row in rows)
    step = build(objective="mopd", temperature=TEMPERATURE)
    found = step(rows, shares=SHARES).metrics["domains"]
    step.learner.close()
    for numbers in found.values():
        assert numbers["mismatch_max"] < 1e-5 and numbers["masked_share"] == 0 and numbers["unscored_share"] == 0
        assert numbers["effective_sample_size"] == pytest.approx(1, abs=1e-6)
    sizes = {d: [len(ids) for r in rows if r.domain == d for a in r.actions for ids in a.candidates if ids is not None]
             for d in DOMAINS}
    for domain, numbers in found.items():
        tokens = sum(r.loss_tokens for r in rows if r.domain == domain)
        assert numbers["cut_share"] == pytest.approx(len(sizes[domain]) / tokens)
        assert numbers["candidates_mean"] == pytest.approx(np.mean(sizes[domain]))


def test_the_gauges_are_right_whatever_the_objective_and_wrong_without_sets(engine):
    rows = sampled_rows(engine, *CUTS["both"])
    for objective, options in (("sampled_kl", {}), ("forward_kl", {}), ("tests.mopd.learner.test_candidates:Unaware", {})):
        step = build(objective=objective, objective_options=options, temperature=TEMPERATURE)
        found = step(rows, shares=SHARES).metrics["domains"]
        assert all(numbers["mismatch_max"] < 1e-5 for numbers in found.values())
        step.learner.close()
    step = build(objective="mopd", temperature=TEMPERATURE)
    found = step(without_sets(rows), shares=SHARES).metrics["domains"]
    step.learner.close()
    assert all(n["mismatch_mean"] > 0.05 and n["cut_share"] == 0 and "candidates_mean" not in n for n in found.values())


def test_the_loss_is_the_plain_formula_and_splits_change_nothing(engine):
    """w Â log π over repeated prefixes, both models renormalised by hand; any order and any micro-batches give the same."""
    rows = [row for row in sampled_rows(engine, *CUTS["both"]) if row.stream == "teacher_prefix" and row.domain == "game"]
    label = torch.from_numpy(np.concatenate([a.tokens for r in rows for a in r.actions]).astype(np.int64))
    sets = [ids for r in rows for a in r.actions for ids in a.candidates]
    loss = []
    with torch.no_grad():
        student, teacher = (label_logprob(repeated_prefix_logits(make_model("qwen3_moe", seed=seed), rows), label,
                                          TEMPERATURE, sets) for seed in (0, 7))
        loss = -((teacher - student) * student).mean()
    step = build(objective="mopd", temperature=TEMPERATURE)
    assert step(rows, shares=SHARES).loss == pytest.approx(loss.item(), rel=1e-4)
    step.learner.close()
    rows = sampled_rows(engine, *CUTS["top-p"])
    reports = []
    for budget, order in ((10_000, rows), (1, rows[::-1])):
        turned = [dataclasses.replace(r, actions=r.actions[::-1]) for r in order] if budget == 1 else order
        step = build(objective="mopd", temperature=TEMPERATURE, token_budget=budget, balance="normalised",
                     training={"logits_mib": 1e-9} if budget == 1 else None)
        reports.append(step(turned, shares=SHARES).metrics)
        step.learner.close()
    whole, split = reports
    assert split["micro_batches"] > whole["micro_batches"]
    for name in ("loss", "gradient_norm"):
        assert split[name] == pytest.approx(whole[name], rel=1e-4)
    for name, factor in whole["balance"].items():
        assert split["balance"][name] == pytest.approx(factor, rel=1e-4)
    for domain in DOMAINS:
        for name in ("k1", "k3", "cut_share", "candidates_mean"):
            assert split["domains"][domain][name] == pytest.approx(whole["domains"][domain][name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("prefix_gradient", ["full", "none"])
def test_every_label_lies_beside_its_own_set_in_both_layouts(engine, prefix_gradient):
    rows = sampled_rows(engine, *CUTS["top-p"])
    bare = branch_row(np.random.default_rng(0), size=9, branches=2, domain="game")
    for batch in pack([*rows, bare], token_budget=60, pad_id=0, domains=DOMAINS, streams=STREAMS,
                      prefix_gradient=prefix_gradient):
        place: dict[tuple[int, int], int] = {}
        sets = batch.candidates.sets() if batch.candidates is not None else [None] * batch.loss_tokens
        for i, (row, action) in enumerate(zip(batch.row.tolist(), batch.action.tolist(), strict=True)):
            number = place[row, action] = place.get((row, action), -1) + 1
            own = [*rows, bare][row].actions[action]
            expected = None if own.candidates is None else own.candidates[number]
            assert own.tokens[number] == int(batch.label[i])
            assert (expected is None) == (sets[i] is None) and (expected is None or np.array_equal(expected, sets[i]))
        if batch.candidates is not None:
            part = batch.to("cpu").chosen(slice(2, 7))
            assert [None if s is None else s.tolist() for s in part.candidates.sets()] == \
                [None if s is None else s.tolist() for s in sets[2:7]]


def test_rows_whose_sets_are_not_theirs_are_refused(engine):
    row = sampled_rows(engine, 1.0, 3)[0]
    action = row.actions[0]
    other = np.setdiff1d(np.arange(VOCABULARY, dtype=np.int32), [action.tokens[0]])[:3]
    wrong = dataclasses.replace(action, candidates=(other, *action.candidates[1:]))
    with pytest.raises(InvalidRow, match="token 0, id .* is not in its candidate set of 3 ids"):
        check_row(dataclasses.replace(row, actions=(wrong,)))
    short = dataclasses.replace(action, candidates=action.candidates[1:])
    with pytest.raises(InvalidRow, match="candidate sets"):
        check_row(dataclasses.replace(row, actions=(short,)))


def one_batch(engine, cut="both"):
    rows = [row for row in sampled_rows(engine, *CUTS[cut]) if row.domain == "game"]
    (batch,) = pack(rows, token_budget=10_000, pad_id=0, domains=DOMAINS, streams=STREAMS)
    return batch


@pytest.mark.parametrize("kind", ["probability", "log_space"])
def test_teachers_and_mixtures_renormalise_over_the_sets(engine, kind):
    """By every way of asking; a mixture is cut after it was mixed, not before."""
    batch = one_batch(engine)
    members = [HFTeacher(make_model("qwen3_moe", seed=seed), teacher=f"t{seed}") for seed in (7, 8)]
    for scorer in (members[0], MixtureScorer(members, [1, 3], kind)):
        logits = scorer(batch, need="full", temperature=TEMPERATURE).logits
        want = label_logprob(logits, batch.label, TEMPERATURE, batch.candidates)
        for need in ("full", "sampled"):
            scores = scorer(batch, need=need, temperature=TEMPERATURE)
            assert scores.over_candidates and not scores.missing
            torch.testing.assert_close(scores.logprob, want, rtol=1e-4, atol=1e-5)
        hidden = scorer(batch, need="hidden", temperature=TEMPERATURE)
        assert hidden.logprob is None
        torch.testing.assert_close(hidden.head.logits(hidden.hidden), logits, rtol=1e-4, atol=1e-5)
    apart = torch.stack([m(batch, need="sampled", temperature=TEMPERATURE).logprob for m in members])
    cut_before = torch.logsumexp(apart + torch.tensor([0.25, 0.75]).log()[:, None], 0)
    assert kind == "log_space" or (cut_before - want).abs().max() > 0.01


def test_ids_that_a_teacher_lacks_get_none_of_its_probability(engine):
    batch = one_batch(engine, "top-k")
    ids = int(batch.label.max()) + 1
    small = HFTeacher(make_model("qwen3_moe", seed=7), teacher="small", vocabulary=ids)
    whole = HFTeacher(make_model("qwen3_moe", seed=7), teacher="whole")(batch, need="full").logits
    sets = [None if s is None else s[s < ids] for s in batch.candidates.sets()]
    want = label_logprob(whole[:, :ids], batch.label, 1.0, sets)
    torch.testing.assert_close(small(batch, need="sampled").logprob, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(small(batch, need="full").logprob, want, rtol=1e-4, atol=1e-5)


class Narrow:
    """A teacher whose answers say the sampled token's score over all ids, as a server's prompt log-probabilities do."""

    teacher, gives = "narrow", frozenset({"sampled"})

    def __init__(self, logits=False):
        self.inner, self.logits = HFTeacher(make_model("qwen3_moe", seed=7), teacher="inner"), logits

    def __call__(self, batch, *, need, temperature=1.0):
        full = self.inner(dataclasses.replace(batch, candidates=None), need="full", temperature=temperature)
        return Scores(self.teacher, full.logprob, full.logits if self.logits else None)


class Unaware:
    """An objective of one's own that knows nothing of candidates."""

    def __init__(self, needs="full", temperature=1.0):
        self.needs, self.temperature = needs, temperature

    def __call__(self, *, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob, outcome_advantage=None):
        found = diagnose(student_logits, teacher_logits, label, None, teacher_logprob, temperature=self.temperature)
        loss = (label_logprob(student_logits, label, self.temperature) - found["teacher_logprob"]) ** 2
        return ObjectiveResult(loss, found | {"unscored": torch.zeros(len(label), dtype=torch.bool)})


def test_what_cannot_be_renormalised_is_refused_with_what_can_be_done(engine):
    rows = [row for row in sampled_rows(engine, *CUTS["both"]) if row.domain == "game"]
    cases = [
        ("mopd", Narrow(), "teacher 'narrow' of 'game' .* cannot be renormalised over the candidate sets.*train.top_p=1"),
        ("tests.mopd.learner.test_candidates:Unaware", None, "takes no `candidates`.*train.top_p=1"),
    ]
    for objective, scorer, words in cases:
        options = {"needs": "sampled"} if ":" in objective else {}
        step = build(scorers=scorer and dict.fromkeys(DOMAINS, scorer), objective=objective, objective_options=options)
        with pytest.raises(ValueError, match=words):
            step(rows, shares=SHARES)
        step.learner.close()
    members = [Narrow(), HFTeacher(make_model("qwen3_moe", seed=8), teacher="t8")]
    mixture = MixtureScorer(members[:1], [1])
    with pytest.raises(ValueError, match="mixture 1 narrow cannot be renormalised over candidate sets"):
        mixture(one_batch(engine), need="sampled")


def test_logits_replace_a_score_over_all_ids(engine):
    """A teacher that gives both is asked for nothing more: the step renormalises its logits itself."""
    rows = [row for row in sampled_rows(engine, *CUTS["both"]) if row.domain == "game"]
    found = []
    for scorer in (Narrow(logits=True), HFTeacher(make_model("qwen3_moe", seed=7), teacher="t")):
        step = build(scorers=dict.fromkeys(DOMAINS, scorer), objective="mopd", temperature=TEMPERATURE)
        found.append(step(rows, shares=SHARES))
        step.learner.close()
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-5)
    assert found[0].metrics["domains"]["game"]["k1"] == pytest.approx(found[1].metrics["domains"]["game"]["k1"], rel=1e-5)
