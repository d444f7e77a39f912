"""What the engine records of the sets that it sampled from, and how they travel with played sequences into the store."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from mopd.losses import candidate_logprob
from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.contexts import CANDIDATES, ContextBuilder, candidates_of
from mopd.sampling.fresh_turn import rows_from_sequence
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import Extension
from prefix_store import PrefixStore
from prefix_store.trajectory import check_sequence, content_hash, example_sequence
from tests.mopd.sampling.tiny import VOCABULARY, make

STOPS = tuple(range(5, 13))
CUTS = {"top-p": (0.8, 0), "top-k": (1.0, 5), "both": (0.7, 9)}


@pytest.fixture(scope="module")
def engine():
    return HFEngine(make("llama"), max_batch=7, verify=False)


def requests(count=9, session=False):
    rng = np.random.default_rng(1)
    return [Request(rng.integers(0, VOCABULARY, 6 + i % 4).astype(np.uint32), i, f"s{i}" if session else None)
            for i in range(count)]


@pytest.mark.parametrize("cut", CUTS)
def test_log_probabilities_are_those_over_the_recorded_sets(engine, cut):
    asked = requests()
    done = engine.generate(asked, SamplingOptions(0.7, *CUTS[cut], max_tokens=6, stop_ids=STOPS))
    model = make("llama")
    sizes = []
    for request, one in zip(asked, done, strict=True):
        assert len(one.candidates) == len(one.tokens)
        sizes += [len(ids) for ids in one.candidates]
        ids = torch.from_numpy(np.concatenate([request.tokens, one.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(request.tokens) - 1 : -1]
        again = candidate_logprob(logits, ids[0, len(request.tokens) :], one.candidates, temperature=0.7)
        np.testing.assert_allclose(one.logprob, again.numpy(), atol=1e-5)
    if cut == "top-k":
        assert set(sizes) == {5}
    else:
        assert len(set(sizes)) > 2 and (cut == "top-p" or max(sizes) <= 9)


def test_sets_belong_to_the_request_whatever_else_is_in_the_batch(engine):
    options = SamplingOptions(0.7, *CUTS["both"], max_tokens=6, stop_ids=STOPS)
    together = engine.generate(requests(session=True), options)
    engine.end_sessions(r.session for r in requests(session=True))
    for request, one in zip(requests(), together, strict=True):
        alone = engine.generate([request], options)[0]
        assert alone.tokens.tolist() == one.tokens.tolist()
        assert [s.tolist() for s in alone.candidates] == [s.tolist() for s in one.candidates]


@pytest.mark.parametrize("options", [SamplingOptions(max_tokens=3), SamplingOptions(0.0, 0.5, 3, max_tokens=3),
                                     SamplingOptions(1.0, 1.0, VOCABULARY, max_tokens=3)])
def test_where_nothing_is_cut_nothing_is_recorded(engine, options):
    assert all(one.candidates is None for one in engine.generate(requests(3), options))


def test_a_token_whose_policy_had_all_ids_has_no_set(engine):
    """Under a top-p that cuts some rows and spares others (the flat ones of a small vocabulary)."""
    flat = make("llama", vocabulary=8)
    done = HFEngine(flat, verify=False).generate(
        [Request(np.array([i % 8, 3], np.uint32), i) for i in range(40)], SamplingOptions(2.0, 0.99, max_tokens=4))
    sets = [ids for one in done for ids in one.candidates or [None] * len(one.tokens)]
    assert any(ids is None for ids in sets) and any(ids is not None and len(ids) < 8 for ids in sets)


def played(engine, *, cut=True):
    """Two turns with an observation between them, and a rewritten history that keeps the first of them."""
    options = SamplingOptions(0.7, *(CUTS["top-p"] if cut else ()), max_tokens=4)
    rng = np.random.default_rng(2)
    builder, said = ContextBuilder(rng.integers(0, VOCABULARY, 5).astype(np.uint32)), []
    for turn in range(3):
        said.append(engine.generate([Request(builder.tokens, turn)], options)[0])
        builder.act(said[-1].tokens, said[-1].logprob, 0, "teacher", said[-1].candidates)
        own = rng.integers(0, VOCABULARY, 3).astype(np.uint32)
        if turn == 1:
            kept = builder.tokens[:-2]  # the fork lies inside the second action
            builder.observe(Extension("fork", np.concatenate([kept, own]), fork=len(kept)))
        else:
            builder.observe(Extension("append", own))
    base = example_sequence(0, turns=3, source="teacher", fork=False)
    return dataclasses.replace(base, contexts=builder.build(), actions=("a", "b", "c")), said


def same(left, right):
    assert (left is None) == (right is None)
    for a, b in zip(left or (), right or (), strict=True):
        assert (a is None and b is None) or np.array_equal(a, b)


def test_sets_travel_with_the_sequence_into_rows_and_through_the_store(engine, tmp_path):
    sequence, said = played(engine)
    check_sequence(sequence)
    rows = rows_from_sequence(sequence, domain="d", stream="rollout", group=0, sequence_number=0)
    actions = [action for row in rows for action in row.actions]
    assert [a.tokens.tolist() for a in actions] == [one.tokens.tolist() for one in said]
    for action, one in zip(actions, said, strict=True):
        same(action.candidates, one.candidates)
    for row in rows_from_sequence(sequence, domain="d", stream="demonstration", group=0, sequence_number=0):
        assert all(action.candidates is None for action in row.actions)
    with PrefixStore.open(tmp_path / "store", "w") as store:
        identity = store.append(sequence)
        store.commit()
    with PrefixStore.open(tmp_path / "store") as store:
        assert [(e["name"], e["dtype"]) for e in store.extras()] == [(CANDIDATES, "uint32")]
        back = store.sequence(identity)
    assert content_hash(back) == identity
    for number, context in enumerate(back.contexts):
        for segment in context.actions():
            part = segment.start, segment.end
            same(candidates_of(context, *part), candidates_of(sequence.contexts[number], *part))
    prompt = back.contexts[0].segments[0]
    assert candidates_of(back.contexts[0], prompt.start, prompt.end) is None


def test_a_sequence_of_which_nothing_was_cut_is_as_it_was(engine):
    sequence, _ = played(engine, cut=False)
    assert all(context.extras == {} for context in sequence.contexts)
    (row, *_) = rows_from_sequence(sequence, domain="d", stream="rollout", group=0, sequence_number=0)
    assert all(action.candidates is None for action in row.actions)
