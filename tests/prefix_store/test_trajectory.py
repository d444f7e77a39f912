"""The data model: what is valid, what identifies a sequence, where its decision points are."""

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore, validity
from prefix_store.trajectory import (
    SOURCE_KINDS,
    Context,
    InvalidSequence,
    Outcome,
    Segment,
    check_sequence,
    content_hash,
    continuation_of,
    decision_points_of,
    example_sequence,
    own_actions,
    prefix_of,
)

seeds = st.integers(0, 2**32 - 1)


@settings(max_examples=150, deadline=None)
@given(seeds, st.sampled_from([None, *SOURCE_KINDS]), st.sampled_from([None, True, False]))
def test_examples_are_valid_and_repeatable(seed, source, fork):
    seq = example_sequence(seed, source=source, fork=fork)
    check_sequence(seq)
    assert content_hash(seq) == content_hash(example_sequence(np.random.default_rng(seed), source=source, fork=fork))
    assert fork is None or len(seq.contexts) == (2 if fork and seq.turns > 1 else 1)
    points = decision_points_of(seq)
    assert [p.turn for p in points] == list(range(seq.turns))
    for p in points:
        prefix, action = prefix_of(seq, p.context, p.turn), continuation_of(seq, p.context, p.turn)
        tokens = seq.contexts[p.context].tokens
        assert len(prefix) > 0 and len(action) > 0
        assert np.array_equal(np.concatenate([prefix, action]), tokens[: len(prefix) + len(action)])


def test_a_shared_turn_belongs_to_the_parent_alone():
    for seed in range(200):
        seq = example_sequence(seed, turns=4, fork=True)
        shared = [s for s in seq.contexts[1].actions() if s.end <= seq.contexts[1].fork]
        if shared and shared[0] in seq.contexts[0].actions():
            break
    points = decision_points_of(seq)
    assert len(points) == seq.turns == 4 < sum(len(c.actions()) for c in seq.contexts)
    assert {p.context for p in points if p.turn in {s.turn for s in shared}} == {0}
    with pytest.raises(KeyError, match="context 1 has no decision point at turn 0"):
        prefix_of(seq, 1, 0)


def _context(seq, number=0, **changes):
    contexts = list(seq.contexts)
    contexts[number] = dataclasses.replace(contexts[number], **changes)
    return dataclasses.replace(seq, contexts=tuple(contexts))


def _array(seq, name, at, value, number=0):
    array = getattr(seq.contexts[number], name).copy()
    array[at] = value
    return _context(seq, number, **{name: array})


def _segment(seq, which, number=0, **changes):
    segments = list(seq.contexts[number].segments)
    segments[which] = dataclasses.replace(segments[which], **changes)
    return _context(seq, number, segments=tuple(segments))


PLAYED = example_sequence(5, turns=3, source="teacher", fork=False)
SHOWN = next(s for s in (example_sequence(i, turns=3, source="expert", fork=False) for i in range(99))
             if len(continuation_of(s, 0, 0)) > 1)  # fmt: skip
FORKED = next(s for s in (example_sequence(i, turns=4, source="teacher", fork=True) for i in range(99))
              if s.contexts[1].fork > s.contexts[0].actions()[0].end)  # fmt: skip
FIRST = PLAYED.contexts[0].actions()[0]
BROKEN = {
    "no contexts": (dataclasses.replace(PLAYED, contexts=()), "no context"),
    "signed tokens": (_context(PLAYED, tokens=PLAYED.contexts[0].tokens.astype(np.int64)), "tokens is int64"),
    "list": (_context(PLAYED, tokens=[1, 2]), "tokens is list"),
    "double": (_context(PLAYED, behaviour_logprob=np.zeros(3)), "behaviour_logprob is float64"),
    "short": (_context(PLAYED, weights_version=np.zeros(3, np.int32)), "weights_version has 3 entries for"),
    "gap": (_segment(PLAYED, 1, start=FIRST.start + 1, end=FIRST.end), "gap after token"),
    "overlap": (_segment(PLAYED, 1, start=FIRST.start - 1), "overlap after token"),
    "empty action": (_segment(PLAYED, 1, end=FIRST.start), "empty segment"),
    "uncovered": (_context(PLAYED, segments=PLAYED.contexts[0].segments[:-1]), "segments end at token"),
    "kind": (_segment(PLAYED, 0, kind="thought"), "kind is none of"),
    "turn": (_segment(PLAYED, 1, turn=1), r"segment 1 \(action .*\): turn 1, expected 0"),
    "early observation": (_segment(PLAYED, 2, turn=2), "turn 2 has not been played"),
    "prompt with turn": (_segment(PLAYED, 0, turn=0), "a prompt has turn -1"),
    "action first": (_segment(PLAYED, 0, kind="action", turn=0, writer="x"), "begins with an action"),
    "missing logprob": (_array(PLAYED, "behaviour_logprob", FIRST.start, np.nan), "has no log-prob"),
    "zero for absent": (_array(PLAYED, "behaviour_logprob", 0, 0.0), "token 0 has a log-probability, but no model"),
    "positive": (_array(PLAYED, "behaviour_logprob", FIRST.start, 0.5), r"log-probability of token \d+ is 0.5"),
    "infinite": (_array(PLAYED, "behaviour_logprob", FIRST.start, -np.inf), "is -inf"),
    "half known": (_array(SHOWN, "behaviour_logprob", SHOWN.contexts[0].actions()[0].start, -1.0), "all or none"),
    "no domain": (dataclasses.replace(SHOWN, domain=""), "domain is empty"),
    "version outside": (_array(PLAYED, "weights_version", 0, 3), "has a weights version"),
    "texts": (dataclasses.replace(PLAYED, actions=PLAYED.actions[:-1]), "2 action texts for 3 turns"),
    "text type": (dataclasses.replace(PLAYED, actions=(1, *PLAYED.actions[1:])), "action text of turn 0"),
    "reward": (dataclasses.replace(PLAYED, outcome=Outcome(float("nan"), 0.0)), "outcome.reward is nan"),
    "source": (dataclasses.replace(PLAYED, source=dataclasses.replace(PLAYED.source, kind="oracle")), "none of"),
    "metadata": (dataclasses.replace(PLAYED, metadata={"a": {1, 2}}), "metadata cannot be written as JSON"),
    "metadata nan": (dataclasses.replace(PLAYED, metadata={"a": float("nan")}), "metadata cannot be written"),
    "fingerprint": (dataclasses.replace(PLAYED, fingerprint=dataclasses.replace(PLAYED.fingerprint, tokenizer="")),
                    "names no tokenizer"),
    "orphan fork": (_context(PLAYED, fork=2), "fork is 2 but it has no parent"),
    "second root": (_context(FORKED, 1, parent=None, fork=0), "only context 0 may have no parent"),
    "later parent": (_context(FORKED, 1, parent=1), "parent 1 is not an earlier context"),
    "long fork": (_context(FORKED, 1, fork=10**6), "fork 1000000 is outside"),
    "changed history": (_array(FORKED, "tokens", 1, 767 - FORKED.contexts[1].tokens[1], 1), "tokens differs"),
    "disowned action": (_segment(FORKED, 1, 1, writer="student"), "its actions before the fork"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_sequences_are_refused_and_the_place_is_named(name):
    seq, message = BROKEN[name]
    with pytest.raises(InvalidSequence, match=message):
        check_sequence(seq)


def test_a_sequence_needs_a_turn_and_a_maximal_run():
    tokens = np.arange(4, dtype=np.uint32)
    blank = np.full(4, np.nan, np.float32), np.full(4, -1, np.int32)
    quiet = dataclasses.replace(PLAYED, contexts=(Context(tokens, *blank, (Segment("prompt", 0, 4, -1),)),), actions=())
    with pytest.raises(InvalidSequence, match="no action segment"):
        check_sequence(quiet)
    halves = (Segment("prompt", 0, 2, -1), Segment("prompt", 2, 4, -1))
    with pytest.raises(InvalidSequence, match="maximal run"):
        check_sequence(_context(quiet, segments=halves))


def test_the_hash_is_the_same_in_every_process_and_sees_every_field():
    code = "from prefix_store.trajectory import *; print(content_hash(example_sequence(3)))"
    seq = example_sequence(3)
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == content_hash(seq)
    assert content_hash(dataclasses.replace(seq, metadata={"b": 1, "a": (2,)})) == content_hash(
        dataclasses.replace(seq, metadata={"a": [np.int64(2)], "b": 1})
    )
    other = {
        "domain": "x", "task": "x", "environment": "x", "environment_version": "x", "seed": -1, "split": "x",
        "actions": ("x",), "metadata": {"x": 1}, "outcome": dataclasses.replace(seq.outcome, hack=True),
        "source": dataclasses.replace(seq.source, revision="x"),
        "fingerprint": dataclasses.replace(seq.fingerprint, model_config="x"),
    }  # fmt: skip
    variants = [dataclasses.replace(seq, **{name: value}) for name, value in other.items()]
    action = own_actions(seq.contexts[0])[0]
    variants.append(_array(seq, "tokens", 0, 5000))
    variants.append(_array(seq, "weights_version", action.start, 5000))
    variants.append(_array(seq, "behaviour_logprob", action.start, -77.0))
    variants.append(_segment(seq, 0, writer="x"))
    hashes = {content_hash(v) for v in [seq, *variants]}
    assert len(hashes) == len(variants) + 1


def test_the_payload_of_a_nan_does_not_matter():
    seq = example_sequence(3)
    logprob = seq.contexts[0].behaviour_logprob.copy()
    logprob.view(np.uint32)[0] = 0x7FC00001
    assert np.isnan(logprob[0])
    assert content_hash(_context(seq, behaviour_logprob=logprob)) == content_hash(seq)


@settings(max_examples=200, deadline=None)
@given(seeds, st.data())
def test_the_quick_look_never_passes_what_the_close_look_refuses(seed, data):
    seq = example_sequence(seed)
    number = data.draw(st.integers(0, len(seq.contexts) - 1))
    name, values = data.draw(
        st.sampled_from([("behaviour_logprob", [np.nan, -1.0, 0.0, 1.0, np.inf, -np.inf]),
                         ("weights_version", [-2, -1, 0, 3]),
                         ("segments", ["kind", "start", "end", "turn", "writer"])])
    )  # fmt: skip
    if name == "segments":
        which = data.draw(st.integers(0, len(seq.contexts[number].segments) - 1))
        field = data.draw(st.sampled_from(values))
        odd = {"kind": ["prompt", "action", "x"], "writer": ["student@3", "expert"]}.get(field, [-2, -1, 0, 1, 9, 50])
        seq = _segment(seq, which, number, **{field: data.draw(st.sampled_from(odd))})
    else:
        at = data.draw(st.integers(0, len(seq.contexts[number].tokens) - 1))
        seq = _array(seq, name, at, data.draw(st.sampled_from(values)), number)

    def verdict():
        try:
            check_sequence(seq)
        except InvalidSequence as error:
            return str(error)
        return ""

    quick = verdict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validity, "_look_over", lambda *_: None)
        assert verdict() == quick


def test_the_quick_look_is_enough_for_what_models_wrote(monkeypatch):
    monkeypatch.setattr(validity, "_check_values", lambda *_: pytest.fail("took the close look"))
    for seed in range(20):
        check_sequence(example_sequence(seed, source="teacher"))
        check_sequence(example_sequence(seed, source="student", turns=3, fork=True))


def test_wrong_types_are_refused_at_append_and_spoil_no_commit(tmp_path):
    """Whatever `append` takes can be committed, reads back equal and verifies."""
    seq = example_sequence(1, turns=3, fork=True)
    first, child = seq.contexts
    change = dataclasses.replace

    def outcome(**fields):
        return change(seq, outcome=change(seq.outcome, **fields))

    deep: list = []
    for _ in range(5000):
        deep = [deep]
    wrong = [
        None, {}, change(seq, contexts=(None,)), change(seq, contexts=None), change(seq, actions="abc"),
        change(seq, actions=None),
        change(seq, outcome=None), change(seq, source=None), change(seq, fingerprint=None), outcome(success="no"),
        outcome(is_infra=None), outcome(error_category=None), change(seq, source=change(seq.source, id=3)),
        change(seq, fingerprint=change(seq.fingerprint, tokenizer=["x"])), change(seq, metadata={"deep": deep}),
        change(seq, contexts=(first, change(child, parent=False))), change(seq, contexts=(first, change(child, parent="0"))),
        change(seq, contexts=(first, change(child, fork=float(child.fork)))),
        change(seq, contexts=(change(first, segments=None), child)),
        change(seq, contexts=(change(first, segments=tuple(change(s, writer=None) for s in first.segments)), child)),
    ]  # fmt: skip
    with PrefixStore.open(tmp_path / "store", "a") as store:
        store.append(seq)
        for bad in wrong:
            with pytest.raises(InvalidSequence):
                store.append(bad)
        store.commit()
        assert store.pending == 0 and len(store) == 1 and store.verify().ok
