"""Candidate sets: ragged indexing, renormalised log-probabilities chunk by chunk, and what objectives do with them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import candidate_logprob, chunked_logprob, make_objective
from mopd.losses.candidates import CandidateSets, cut_to, join_candidates
from mopd.losses.objectives import takes_candidates

REPLAY = json.loads((Path(__file__).parents[2] / "cases" / "candidate_replay.json").read_text())
V, H = 13, 5


def some_sets(rng, label, vocabulary=V):
    """A set around each label, or None for about a third of them."""
    sets = []
    for own in label:
        size = int(rng.integers(1, vocabulary))
        ids = set(rng.choice(vocabulary, size, replace=False).tolist()) | {int(own)}
        sets.append(None if rng.random() < 0.3 else np.array(sorted(ids), np.int32))
    return sets


def same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert (a is None) == (b is None) and (a is None or np.array_equal(a, b))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 9))
def test_ragged_sets_index_like_a_list(seed, count):
    rng = np.random.default_rng(seed)
    label = rng.integers(0, V, count)
    lists = some_sets(rng, label)
    sets = CandidateSets.of(lists)
    same(sets.sets(), lists)
    assert len(sets) == count and sets.counts.tolist() == [0 if ids is None else len(ids) for ids in lists]
    start, stop = sorted(rng.integers(0, count + 1, 2).tolist())
    same(sets[start:stop].sets(), lists[start:stop])
    chosen = rng.integers(0, count, 4 if count else 0)
    for rows in (torch.from_numpy(chosen), (torch.from_numpy(chosen),)):
        same(sets[rows].sets(), [lists[i] for i in chosen])
    width = int(max(label, default=0)) + 1
    same(sets.below(width).sets(), [None if ids is None else ids[ids < width] for ids in lists])
    outside = sets.outside(V)
    for row, ids in zip(outside, lists, strict=True):
        assert row.nonzero()[:, 0].tolist() == ([] if ids is None else sorted(set(range(V)) - set(ids.tolist())))
    sets.check(torch.from_numpy(label), V)


def test_joined_runs_keep_their_places():
    first = (np.array([1, 2], np.int32), None)
    same(join_candidates([first, None, (np.array([5], np.int32),)], [2, 3, 1]).sets(), [first[0], *[None] * 4, [5]])
    assert join_candidates([None, None], [2, 1]) is None and join_candidates([], []) is None
    with pytest.raises(ValueError, match="position 1: the candidate set is empty"):
        CandidateSets.of([None, []])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 7), st.sampled_from([1.0, 0.7]), st.sampled_from([1.0, 1e4]))
def test_renormalised_values_and_gradients_are_those_of_the_set_alone(seed, count, temperature, scale):
    """Against a float64 softmax of each set's own logits, which are all that a gradient may reach."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(count, V)) * scale).requires_grad_()
    label = torch.from_numpy(rng.integers(0, V, count))
    lists = some_sets(rng, label)
    value = candidate_logprob(logits, label, CandidateSets.of(lists), temperature=temperature)
    expected, gradient = [], torch.zeros_like(logits)
    for i, ids in enumerate(lists):
        ids = torch.arange(V) if ids is None else torch.from_numpy(ids).long()
        own = logits.detach()[i, ids].requires_grad_()
        expected.append(torch.log_softmax(own / temperature, -1)[ids == label[i]].sum())
        gradient[i, ids] = torch.autograd.grad(expected[-1], own)[0]
    torch.testing.assert_close(value, torch.stack(expected).detach(), rtol=1e-12, atol=1e-12)
    value.sum().backward()
    torch.testing.assert_close(logits.grad, gradient, rtol=1e-12, atol=1e-12)
    narrow = candidate_logprob(logits.detach().float(), label, lists, temperature=temperature)
    torch.testing.assert_close(narrow.double(), value.detach(), rtol=1e-4, atol=1e-5 * scale)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 8), st.integers(1, 5), st.booleans(), st.sampled_from([None, 3.0]))
def test_chunked_equals_unchunked(seed, count, chunk, biased, softcap):
    rng = np.random.default_rng(seed)
    hidden, head, bias = (torch.from_numpy(rng.normal(size=s)).requires_grad_() for s in ((count, H), (V, H), (V,)))
    label = torch.from_numpy(rng.integers(0, V, count))
    sets = CandidateSets.of(some_sets(rng, label))
    upstream = torch.from_numpy(rng.normal(size=count))
    leaves = (hidden, head, bias) if biased else (hidden, head)
    logits = hidden @ head.T * 1.5 + (1.5 * bias if biased else 0.0)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    plain = candidate_logprob(logits, label, sets, temperature=0.7)
    wanted = torch.autograd.grad((plain * upstream).sum(), leaves)
    value = chunked_logprob(hidden, head, label, temperature=0.7, chunk=chunk, bias=bias if biased else None,
                            softcap=softcap, scale=1.5, candidates=sets)
    found = torch.autograd.grad((value * upstream).sum(), leaves)
    torch.testing.assert_close(value, plain)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_chunks_of_bf16_states_accumulate_in_float32():
    rng = np.random.default_rng(0)
    hidden, head = (torch.from_numpy(rng.normal(size=s)).bfloat16() for s in ((9, H), (V, H)))
    label = torch.from_numpy(rng.integers(0, V, 9))
    sets = CandidateSets.of(some_sets(rng, label))
    exact = candidate_logprob(hidden.double() @ head.double().T, label, sets)
    found = chunked_logprob(hidden, head, label, chunk=2, candidates=sets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


def test_refusals_name_the_position():
    head, hidden = torch.zeros(V, H), torch.zeros(2, H)
    with pytest.raises(ValueError, match="position 1: sampled id 4 is not in its candidate set of 2 ids"):
        chunked_logprob(hidden, head, torch.tensor([0, 4]), candidates=CandidateSets.of([None, [0, 1]]))
    with pytest.raises(ValueError, match=r"position 0: candidate ids must lie in \[0, 13\), got 13"):
        chunked_logprob(hidden, head, torch.tensor([0, 4]), candidates=CandidateSets.of([[0, 13], None]))
    with pytest.raises(ValueError, match="1 candidate sets"):
        chunked_logprob(hidden, head, torch.tensor([0, 4]), candidates=CandidateSets.of([[0]]))
    with pytest.raises(ValueError, match="takes no step"):
        CandidateSets.of([[0], [1]])[::2]


# --- objectives ---------------------------------------------------------------------------------------------------


def replay_arguments():
    student = torch.tensor(REPLAY["student_logprobs"], dtype=torch.float64)
    teacher = torch.tensor(REPLAY["teacher_logprobs"], dtype=torch.float64)
    return dict(
        student_logits=student.requires_grad_(), teacher_logits=teacher, teacher_logprob=None,
        label=torch.tensor(REPLAY["sampled"]), behaviour_logprob=torch.tensor(REPLAY["student"], dtype=torch.float64))


@pytest.mark.parametrize("name", ["mopd", "sampled_kl", "reverse_kl", "forward_kl", "jsd"])
def test_the_cases_through_every_objective(name):
    """µ is the restricted student itself: what is said of sampled tokens is that of the cases, the ratio is 1."""
    given_ = replay_arguments()
    objective = make_objective(name)
    assert takes_candidates(objective)
    result = objective(**given_, candidates=CandidateSets.of(REPLAY["candidates"]))
    student, teacher = (torch.tensor(REPLAY[who]) for who in ("student", "teacher"))
    found = result.diagnostics
    torch.testing.assert_close(found["student_logprob"], student)
    torch.testing.assert_close(found["teacher_logprob"], teacher)
    torch.testing.assert_close(found["k1"], student - teacher, rtol=1e-4, atol=1e-5)
    plain = objective(**given_)
    for kept in ("student_entropy", "teacher_entropy", "reverse_kl", "forward_kl", "agreement"):
        torch.testing.assert_close(found[kept], plain.diagnostics[kept])
    if name == "mopd":
        torch.testing.assert_close(found["ratio"], torch.ones(len(student), dtype=torch.float64))
        torch.testing.assert_close(found["advantage"].float(), teacher - student)
        assert (plain.diagnostics["ratio"] - 1).abs().max() > 0.05
    elif name in ("reverse_kl", "forward_kl", "jsd"):  # the loss is that of the whole vocabulary
        torch.testing.assert_close(result.loss, plain.loss)
    else:
        torch.testing.assert_close(result.loss.float(), 0.5 * (student - teacher) ** 2)


def test_the_expected_gradient_is_that_of_the_restricted_reverse_kl():
    """Every id of the set drawn once, weighed by µ: `mopd` and k2 give ∇KL between both models restricted to the set."""
    rng = np.random.default_rng(3)
    logits, teacher = (torch.from_numpy(rng.normal(size=V) * 2) for _ in range(2))
    ids = torch.tensor([1, 4, 5, 9])
    exact = logits.clone().requires_grad_()
    p, q = (torch.log_softmax(x[ids], -1) for x in (exact, teacher))
    (p.exp() * (p - q)).sum().backward()
    sets = CandidateSets.of([ids.numpy()] * len(ids))
    mu = torch.log_softmax(logits[ids], -1)
    for name in ("mopd", "sampled_kl"):
        own = logits.expand(len(ids), -1).clone().requires_grad_()
        result = make_objective(name)(
            student_logits=own, teacher_logits=teacher.expand(len(ids), -1), teacher_logprob=None, label=ids,
            behaviour_logprob=mu, candidates=sets)
        (result.loss * mu.exp()).sum().backward()
        torch.testing.assert_close(own.grad.sum(0), exact.grad, rtol=1e-9, atol=1e-12)


def test_a_missing_score_stays_missing_and_a_ruled_out_id_is_minus_infinity():
    given_ = replay_arguments()
    given_["teacher_logits"][2] = math.nan
    label = int(given_["label"][4])
    given_["teacher_logits"][4, label] = -math.inf
    for name in ("mopd", "sampled_kl", "forward_kl"):
        result = make_objective(name)(**given_, candidates=CandidateSets.of(REPLAY["candidates"]))
        assert result.diagnostics["unscored"][2] and torch.isnan(result.diagnostics["k1"][2])
        assert result.diagnostics["teacher_logprob"][4] == -math.inf
        assert torch.isfinite(result.loss).all() and result.loss[2] == 0


def test_which_objectives_take_candidates():
    def unaware(*, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob, outcome_advantage=None):
        raise AssertionError

    def open_to_all(**arguments):
        raise AssertionError

    assert not takes_candidates(unaware) and takes_candidates(open_to_all)


def test_cut_logits_are_the_sets_own():
    logits = torch.arange(8.0).reshape(2, 4)
    cut = cut_to(logits, CandidateSets.of([[1, 3], None]))
    assert cut.tolist() == [[-math.inf, 1.0, -math.inf, 3.0], [4.0, 5.0, 6.0, 7.0]]
