"""Extras: ragged values beside the tokens, stored once with the context that owns them, read over any prefix."""

import dataclasses
import json

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore
from prefix_store.extras import EXTRA_DTYPES, Extra
from prefix_store.trajectory import (
    InvalidSequence,
    check_sequence,
    content_hash,
    decision_points_of,
    example_sequence,
    sequence_record,
)

NAMES = ["candidates", "routed_experts", "teacher_topk_ids", "teacher_topk_logprobs"]


def equal(a: Extra, b: Extra) -> bool:
    same = np.array_equal(a.counts, b.counts) and a.values.dtype == b.values.dtype and a.values.shape == b.values.shape
    return same and np.array_equal(a.values, b.values, equal_nan=a.values.dtype.kind == "f")


def with_extras(seq, extras, number=0):
    contexts = list(seq.contexts)
    contexts[number] = dataclasses.replace(contexts[number], extras=extras)
    return dataclasses.replace(seq, contexts=tuple(contexts))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.booleans()), min_size=1, max_size=8, unique_by=lambda t: t[0]))
def test_round_trip_beside_sequences_without(tmp_path_factory, seeds):
    path = tmp_path_factory.mktemp("extras") / "store"
    sequences = {}
    with PrefixStore.open(path, "w") as store:
        for seed, extras in seeds:
            seq = example_sequence(seed, extras=extras)
            sequences[store.append(seq)] = seq
        store.commit()
    store = PrefixStore.open(path)
    assert [e["name"] for e in store.extras()] == (NAMES if any(extras for _, extras in seeds) else [])
    for identity, seq in sequences.items():
        back = store.sequence(identity)
        assert content_hash(back) == identity
        for number, (mine, theirs) in enumerate(zip(seq.contexts, back.contexts, strict=True)):
            assert set(mine.extras) == set(theirs.extras)
            for name, extra in mine.extras.items():
                assert equal(extra, theirs.extras[name]) and equal(extra, store.extra(name, identity, number))
        for point in decision_points_of(seq, identity):
            length = len(store.prefix(point))
            for name, extra in seq.contexts[point.context].extras.items():
                assert equal(store.extra(name, point), extra.cut(0, length))
    assert store.verify().ok


def test_the_four_usual_kinds_in_stock_zarr_and_shared_tokens_once(tmp_path):
    seq = next(s for s in (example_sequence(i, turns=4, fork=True, extras=True) for i in range(50)) if s.contexts[1].fork > 8)
    with PrefixStore.open(tmp_path / "store", "w") as store:
        store.append(seq)
        store.commit()
    group = zarr.open_group(tmp_path / "store", mode="r")[f"segments/{store.info()['segment_names'][0]}"]
    own = sum(len(c.tokens) - c.fork for c in seq.contexts)
    assert own < sum(len(c.tokens) for c in seq.contexts)
    assert sorted(name for name, _ in group["extras"].groups()) == NAMES
    for name in NAMES:
        offsets, values = group[f"extras/{name}/offsets"][:], group[f"extras/{name}/values"][:]
        parts = [c.extras[name].cut(c.fork, len(c.tokens)) for c in seq.contexts]
        assert len(offsets) == own + 1 and offsets[-1] == len(values) == sum(len(p.values) for p in parts)
        assert np.array_equal(np.diff(offsets), np.concatenate([p.counts for p in parts]))
        assert np.array_equal(values, np.concatenate([p.values for p in parts]))
    kinds = {e["name"]: (e["dtype"], e["tail"]) for e in group.attrs["prefix_store"]["extras"]}
    assert kinds == {
        "candidates": ("uint32", []),
        "routed_experts": ("uint8", [2, 2]),
        "teacher_topk_ids": ("uint32", [4]),
        "teacher_topk_logprobs": ("float32", [4]),
    }


def test_reading_over_a_prefix_reads_no_other_chunks(tmp_path, monkeypatch):
    """A long context: the values of a short prefix come from the first chunks alone."""
    from prefix_store import chunked

    seq = example_sequence(1, turns=3, source="expert", fork=False)
    c = seq.contexts[0]
    length = 20_000 - len(c.tokens)
    tail = dataclasses.replace(c.segments[-1], end=20_000)
    big = dataclasses.replace(
        c,
        tokens=np.concatenate([c.tokens, np.zeros(length, np.uint32)]),
        behaviour_logprob=np.concatenate([c.behaviour_logprob, np.full(length, np.nan, np.float32)]),
        weights_version=np.concatenate([c.weights_version, np.full(length, -1, np.int32)]),
        segments=(*c.segments[:-1], tail),
        extras={"experts": Extra.per_token(np.arange(20_000 * 8, dtype=np.uint16).reshape(-1, 4, 2))},
    )
    with PrefixStore.open(tmp_path / "store", "w") as store:
        identity = store.append(dataclasses.replace(seq, contexts=(big,)))
        store.commit()
    read = []
    original = chunked.ArrayReader.chunk
    monkeypatch.setattr(
        chunked.ArrayReader, "chunk", lambda self, n: read.append((self.key.split("/")[-1], n)) or original(self, n)
    )
    store = PrefixStore.open(tmp_path / "store")
    point = store.decision_points()[0]
    extra = store.extra("experts", point)
    assert len(extra) == len(store.prefix(point)) and np.array_equal(extra.at(3), big.extras["experts"].at(3)[0:1])
    assert {n for name, n in read if name in ("offsets", "values")} == {0}
    assert len(store.extra("experts", identity)) == 20_000


def test_the_hash_sees_extras_and_only_then_changes():
    plain, rich = example_sequence(3), example_sequence(3, extras=True)
    assert "extras" not in sequence_record(plain) and sorted(sequence_record(rich)["extras"]) == NAMES
    extra = rich.contexts[0].extras["candidates"]
    values = extra.values.copy()
    values[0] += 1
    counts = extra.counts.copy()
    a, b = np.flatnonzero(counts)[0], np.flatnonzero(counts)[0] + 1
    counts[a] -= 1
    counts[b] += 1
    variants = [
        rich.contexts[0].extras | {"candidates": Extra(extra.counts, values)},
        rich.contexts[0].extras | {"candidates": Extra(counts, extra.values)},
        rich.contexts[0].extras | {"candidates": Extra(extra.counts, extra.values.astype(np.int64))},
        {name.replace("candidates", "others"): e for name, e in rich.contexts[0].extras.items()},
    ]
    one = dataclasses.replace(rich, contexts=rich.contexts[:1])
    hashes = {content_hash(with_extras(one, v)) for v in [one.contexts[0].extras, {}, *variants]}
    assert len(hashes) == 6


def test_one_name_with_two_types_in_one_segment(tmp_path):
    """Runs with another k or another model may fill one store; each sequence keeps what it had."""
    base = [example_sequence(i, turns=2, fork=False) for i in range(3)]
    made = []
    for seq, dtype, tail in zip(base, ("uint8", "uint8", "int32"), ((2, 2), (3, 2), ()), strict=True):
        values = np.ones((len(seq.contexts[0].tokens), *tail), dtype=dtype)
        made.append(with_extras(seq, {"routed": Extra.per_token(values), "routed.2": Extra.per_token(values[:, None])}))
    with PrefixStore.open(tmp_path / "store", "w") as store:
        ids = [store.append(seq) for seq in made]
        store.commit()
        for identity, seq in zip(ids, made, strict=True):
            assert content_hash(store.sequence(identity)) == identity
            assert equal(store.extra("routed", identity), seq.contexts[0].extras["routed"])
        assert len(store.extras()) == 6 and store.verify().ok
        json.dumps(store.extras())


@pytest.mark.parametrize("dtype", EXTRA_DTYPES)
def test_every_type_comes_back(tmp_path, dtype):
    seq = example_sequence(0, turns=1)
    length = len(seq.contexts[0].tokens)
    extra = Extra.ragged([np.arange(t % 3) for t in range(length)], dtype)
    none = Extra(np.zeros(length, np.int32), np.zeros((0, 5), dtype))
    with PrefixStore.open(tmp_path / "store", "w") as store:
        identity = store.append(with_extras(seq, {"x": extra, "none": none}))
        store.commit()
        assert equal(store.extra("x", identity), extra) and equal(store.extra("none", identity), none)
        assert content_hash(store.sequence(identity)) == identity


def test_what_is_not_there_is_named(tmp_path):
    with PrefixStore.open(tmp_path / "store", "w") as store:
        plain = store.append(example_sequence(0, turns=1))
        rich = store.append(example_sequence(1, turns=1, extras=True))
        store.commit()
        with pytest.raises(KeyError, match="has no extra 'candidates'; it has none"):
            store.extra("candidates", plain)
        with pytest.raises(KeyError, match="has no extra 'x'; it has candidates, routed_experts"):
            store.extra("x", rich)
        with pytest.raises(KeyError, match="has no context 1"):
            store.extra("candidates", rich, 1)
        with pytest.raises(KeyError, match="holds no sequence"):
            store.extra("candidates", "0" * 64)


FORKED = next(
    seq
    for seq in (example_sequence(i, turns=3, fork=True, extras=True) for i in range(99))
    if len(seq.contexts[1].extras["candidates"].cut(0, seq.contexts[1].fork).values)  # the child shares some
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: {"candidates": Extra(e.counts[:-1], e.values)}, "counts is int32 .*, not an int32 vector of"),
        (lambda e: {"candidates": Extra(e.counts.astype(np.int64), e.values)}, "counts is int64"),
        (lambda e: {"candidates": Extra(e.counts, e.values[:-1])}, "values, but the counts add up to"),
        (lambda e: {"candidates": Extra(e.counts, e.values.astype(np.int8))}, "in the sequence's first context"),
        (lambda e: {"candidates": Extra(e.counts, e.values.astype(complex))}, "of type complex128 cannot be kept"),
        (lambda e: {"candidates": Extra(-e.counts, e.values)}, "is below 0"),
        (lambda e: {"candidates": e.values}, "is ndarray, not an Extra"),
        (lambda e: {"more": e}, "'more' is not in every context"),
        (lambda e: {"candidates": Extra(e.counts, e.values + 1)}, "'candidates' differs from parent context 0"),
    ],
)
def test_bad_extras_do_not_go_in(change, message):
    check_sequence(FORKED)
    extras = FORKED.contexts[1].extras
    with pytest.raises(InvalidSequence, match=message):
        check_sequence(with_extras(FORKED, dict(extras) | change(extras["candidates"]), 1))


def test_a_bad_name_is_refused():
    seq = example_sequence(2, turns=1)
    extra = Extra.per_token(np.zeros(len(seq.contexts[0].tokens), np.uint8))
    for name in ("", "a/b", "..", "1x", "x" * 101):
        with pytest.raises(InvalidSequence, match="use a letter and then"):
            check_sequence(with_extras(seq, {name: extra}))
    with pytest.raises(ValueError, match="3 values for 2 tokens"):
        Extra.per_token(np.zeros(3), np.array([True, True, False]))


def test_a_name_is_no_file_of_the_group(tmp_path):
    """An extra `zarr.json` would lie where the description of the extras' group lies, and the segment would be lost."""
    seq = example_sequence(5, turns=2, fork=False)
    context = seq.contexts[0]
    extras = {"zarr.json": Extra.per_token(np.zeros(len(context.tokens), np.float32))}
    with PrefixStore.open(tmp_path / "store", "a") as store:
        with pytest.raises(InvalidSequence, match="not zarr.json"):
            store.append(dataclasses.replace(seq, contexts=(dataclasses.replace(context, extras=extras),)))
