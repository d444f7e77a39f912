"""What goes into a store comes out again, at every version, and nothing else does."""

import ast
import dataclasses
import inspect
import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefix_store.selection
from prefix_store import ForeignFingerprint, PrefixStore, StoreError, StoreExists, StoreNotFound, check_fingerprint
from prefix_store import building as building_module
from prefix_store import writer as writer_module
from prefix_store.segment import CHUNK_ROWS
from prefix_store.storage import LocalStorage
from prefix_store.trajectory import (
    SOURCE_KINDS,
    DecisionPoint,
    Fingerprint,
    InvalidSequence,
    content_hash,
    continuation_of,
    decision_points_of,
    example_sequence,
    prefix_of,
    sequences_equal,
)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "store"


def fill(path, seeds, mode="a", **options):
    with PrefixStore.open(path, mode) as store:
        ids = [store.append(example_sequence(seed, **options)) for seed in seeds]
        store.commit("fill")
    return ids


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=12, unique=True), st.integers(1, 3))
def test_round_trip(tmp_path_factory, seeds, parts):
    path = tmp_path_factory.mktemp("round") / "store"
    sequences = {}
    for part in range(parts):
        with PrefixStore.open(path, "a") as store:
            for seed in seeds[part::parts]:
                seq = example_sequence(seed)
                sequences[store.append(seq)] = seq
            store.commit()
    store = PrefixStore.open(path)
    assert len(store) == len(sequences) and store.ids() == sorted(sequences)
    expected = []
    for identity in sorted(sequences):
        seq, back = sequences[identity], store.sequence(identity)
        assert content_hash(back) == identity == content_hash(seq)
        assert back.contexts[0].segments == seq.contexts[0].segments and back.outcome == seq.outcome
        assert all(a.tokens.dtype == np.uint32 and a.behaviour_logprob.dtype == np.float32 for a in back.contexts)
        expected += decision_points_of(seq, identity)
    points = store.decision_points()
    assert list(points) == expected and len(points) == len(expected) and points[-1] == expected[-1]
    for p in points:
        seq = sequences[p.sequence]
        assert np.array_equal(store.prefix(p), prefix_of(seq, p.context, p.turn))
        assert np.array_equal(store.continuation(p), continuation_of(seq, p.context, p.turn))
        assert store.prefix(p).dtype == np.uint32
    assert store.verify().ok


def test_long_contexts_span_chunks(path):
    rng = np.random.default_rng(0)
    seq = example_sequence(1, turns=2, fork=True)
    big = rng.integers(0, 2**32, 10_000, dtype=np.uint32)  # every id that uint32 can hold
    first = seq.contexts[0]
    extra = dataclasses.replace(
        first,
        tokens=np.concatenate([big, first.tokens]),
        behaviour_logprob=np.concatenate([np.full(len(big), np.nan, np.float32), first.behaviour_logprob]),
        weights_version=np.concatenate([np.full(len(big), -1, np.int32), first.weights_version]),
        segments=tuple(
            dataclasses.replace(s, start=s.start + len(big) if n else 0, end=s.end + len(big))
            for n, s in enumerate(first.segments)
        ),
    )
    long = dataclasses.replace(seq, contexts=(extra,), actions=seq.actions[: len(extra.actions())])
    with PrefixStore.open(path, "w") as store:
        identity = store.append(long)
        fill_id = store.append(seq)
        store.commit()
        assert content_hash(store.sequence(identity)) == identity and content_hash(store.sequence(fill_id)) == fill_id
        p = store.decision_points()[0 if store.ids()[0] == identity else -1]
        assert np.array_equal(store.prefix(p), prefix_of(store.sequence(p.sequence), p.context, p.turn))


def test_appended_sequences_are_visible_only_after_commit(path):
    writer = PrefixStore.open(path, "w")
    reader = PrefixStore.open(path)
    identity = writer.append(example_sequence(0))
    assert len(writer) == len(reader) == len(PrefixStore.open(path)) == 0
    assert writer.pending == 1 and identity not in writer and list(writer.decision_points()) == []
    assert writer.commit("first") == "v000001" == writer.version
    assert len(writer) == 1 and writer.pending == 0 and identity in writer
    assert len(reader) == 0 and reader.version is None
    assert reader.refresh() == "v000001" and len(reader) == 1
    assert writer.commit("nothing new") == "v000001"


def test_what_was_not_committed_is_gone_and_leaves_nothing(path, monkeypatch):
    monkeypatch.setattr(writer_module, "SPILL_TOKENS", 50)
    fill(path, [0])
    with PrefixStore.open(path, "a") as store:
        for seed in range(10, 20):
            store.append(example_sequence(seed))
        assert any((path / "tmp").iterdir())  # the buffer was written aside
    assert not any((path / "tmp").iterdir())
    assert len(PrefixStore.open(path)) == 1


def test_a_large_append_is_written_aside_and_committed_whole(path, monkeypatch):
    monkeypatch.setattr(writer_module, "SPILL_TOKENS", 300)
    ids = fill(path, range(30))
    store = PrefixStore.open(path)
    assert store.ids() == sorted(ids) and store.info()["segments"] > 3 and store.versions() == ["v000001"]


def test_the_same_sequence_is_stored_once(path):
    store = PrefixStore.open(path, "w")
    ids = [store.append(example_sequence(seed)) for seed in (1, 2, 1)]
    assert ids[0] == ids[2] and store.duplicates == 1
    store.commit()
    assert store.append(example_sequence(2)) == ids[1] and store.duplicates == 2
    with PrefixStore.open(path, "a") as other:
        other.append(example_sequence(1))
        assert other.duplicates == 1 and other.commit() == "v000001"
    assert len(store) == 2


def test_two_handles_that_bring_the_same_store_it_once(path):
    a, b = PrefixStore.open(path, "w"), PrefixStore.open(path, "a")
    for seed in (1, 2):
        a.append(example_sequence(seed))
    for seed in (2, 3):
        b.append(example_sequence(seed))
    assert a.commit("a") == "v000001" and b.commit("b") == "v000002"
    assert b.duplicates == 1 and len(b) == 3 == len(set(b.ids()))
    a.append(example_sequence(3))
    assert a.commit() == "v000002" and a.duplicates == 1
    assert [h["sequences"] for h in a.history()] == [2, 3] and a.verify().ok and a.verify().unreferenced == ()


def test_an_old_version_stays_as_it_was(path):
    ids = fill(path, range(5))
    old = PrefixStore.open(path, version="v000001")
    before = [(p, old.prefix(p).tobytes()) for p in old.decision_points()]
    for n in range(3):
        fill(path, range(10 * n + 10, 10 * n + 14))
    again = PrefixStore.open(path, version=1)
    assert again.ids() == sorted(ids) and [(p, again.prefix(p).tobytes()) for p in again.decision_points()] == before
    assert len(PrefixStore.open(path)) == 17 and again.versions() == [f"v{n:06d}" for n in (1, 2, 3, 4)]
    with pytest.raises(ValueError, match="has no version 'v000009'; it has v000001 to v000004"):
        PrefixStore.open(path, version="v000009")
    with pytest.raises(ValueError, match="older version can only be read"):
        PrefixStore.open(path, "a", version=1)


def test_the_order_of_points_does_not_depend_on_the_order_of_commits(tmp_path):
    for name, seeds in (("a", (1, 2, 3)), ("b", (3, 1, 2))):
        for seed in seeds:
            fill(tmp_path / name, [seed])
    a, b = (list(PrefixStore.open(tmp_path / name).decision_points()) for name in "ab")
    assert a == b and len(a) > 3


def test_filters(path):
    fill(path, range(60))
    store = PrefixStore.open(path)
    everything = {i: store.sequence(i) for i in store.ids()}

    def expect(condition):
        points = [p for i in sorted(everything) for p in decision_points_of(everything[i], i)]
        return [p for p in points if condition(everything[p.sequence], p)]

    assert list(store.decision_points("game")) == expect(lambda s, p: s.domain == "game")
    assert list(store.decision_points(sources=["teacher"])) == expect(lambda s, p: s.source.kind == "teacher")
    assert list(store.decision_points(sources="expert", success_only=True)) == expect(
        lambda s, p: s.source.kind == "expert" and s.outcome.success
    )
    short = store.decision_points("science", max_prefix_tokens=40)
    assert list(short) == expect(lambda s, p: s.domain == "science" and len(prefix_of(s, p.context, p.turn)) <= 40)
    assert len(short) and list(store.decision_points("unknown")) == []
    assert list(short[2:4]) == list(short)[2:4]
    with pytest.raises(ValueError, match="source kind 'oracle' is none of"):
        store.decision_points(sources=["oracle"])
    assert sum(v["sequences"] for d in store.info()["domains"].values() for v in d.values()) == 60
    json.dumps(store.info())


def test_only_continuation_reads_what_was_played(path, monkeypatch):
    """Two trajectories that differ in their actions only: no prefix before the first difference tells them apart, and
    reading prefixes and selecting never go through `continuation`."""
    seq = example_sequence(4, turns=3, source="expert", domain="game", fork=False)
    segment = seq.contexts[0].actions()[-1]
    tokens = seq.contexts[0].tokens.copy()
    tokens[segment.start :] = 7
    twin = dataclasses.replace(seq, contexts=(dataclasses.replace(seq.contexts[0], tokens=tokens),))
    with PrefixStore.open(path, "w") as store:
        ids = [store.append(seq), store.append(twin)]
        store.commit()

    def refuse(*_):
        raise AssertionError("something read a continuation")

    store = PrefixStore.open(path)
    monkeypatch.setattr(PrefixStore, "continuation", refuse)
    monkeypatch.setattr(PrefixStore, "sequence", refuse)
    for turn in range(3):
        a, b = (store.prefix(DecisionPoint(i, 0, turn)) for i in ids)
        assert np.array_equal(a, b) and len(a) == seq.contexts[0].actions()[turn].start
        assert not np.shares_memory(a, b) and a.base is None  # a copy: nothing lies behind its end
    selector = prefix_store.selection.Selector(store, seed=1)
    assert len(selector.select(0, "game", "sft_prefix", 5)) == 5
    assert all(len(points) == 3 for points in selector.select_sequences(0, "game", "sft_prefix", 5))
    assert "continuation" not in inspect.getsource(prefix_store.selection)


def test_one_function_of_the_trainer_asks_for_continuations():
    """Beside the runs that tests/integration/test_prefix_mode.py watches: no other line of mopd or teachers names them."""
    found = []
    for folder in ("mopd", "teachers"):
        for file in sorted((pathlib.Path(__file__).parents[2] / folder).rglob("*.py")):
            for part in ast.walk(ast.parse(file.read_text())):
                if isinstance(part, ast.FunctionDef):
                    names = {getattr(n, "attr", getattr(n, "id", "")) for n in ast.walk(part)}
                    if names & {"continuation", "continuation_of"}:
                        found.append((file.name, part.name))
    assert found == [("fresh_turn.py", "demonstration_rows")]


def test_unknown_points_are_refused(path):
    (identity,) = fill(path, [0], turns=2, fork=False)
    store = PrefixStore.open(path)
    for point in (DecisionPoint(identity, 0, 2), DecisionPoint(identity, 1, 0), DecisionPoint(identity, 0, -1)):
        with pytest.raises(KeyError, match="has no decision point at context"):
            store.prefix(point)
    for wrong in ("0" * 64, "xyz", "", identity[:-1]):
        with pytest.raises(KeyError, match="holds no sequence"):
            store.prefix(DecisionPoint(wrong, 0, 0))
        assert wrong not in store


def test_opening_what_is_not_there_says_what_to_do(tmp_path):
    with pytest.raises(StoreNotFound, match=r"nowhere does not exist; make a store there with PrefixStore.open"):
        PrefixStore.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(StoreNotFound, match="is an empty folder"):
        PrefixStore.open(tmp_path / "empty")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(StoreNotFound, match="holds no prefix store"):
        PrefixStore.open(tmp_path / "other")
    for mode in "aw":
        with pytest.raises(StoreExists, match="other is"):
            PrefixStore.open(tmp_path / "other", mode)
    zarr.open_group(tmp_path / "group", mode="w")
    with pytest.raises(StoreNotFound, match="is not a prefix store"):
        PrefixStore.open(tmp_path / "group", "a")
    with pytest.raises(ValueError, match="mode 'x'"):
        PrefixStore.open(tmp_path / "x", "x")


def test_w_makes_a_new_store_and_refuses_one_that_is_there(path):
    PrefixStore.open(path, "w").close()
    for _ in range(2):
        with pytest.raises(StoreExists, match="is there already; open it with mode 'a'"):
            PrefixStore.open(path, "w")
        fill(path, [1])
    assert len(PrefixStore.open(path)) == 1


def test_an_empty_store_is_readable(path):
    PrefixStore.open(path, "w").close()
    store = PrefixStore.open(path)
    assert len(store) == 0 and store.version is None and store.versions() == [] and list(store.decision_points()) == []
    assert len(store.index()) == 0 and store.verify().ok
    assert store.info()["domains"] == {} and store.fingerprints() == []
    assert PrefixStore.open(path, "a").commit("nothing") == "v000001"
    assert len(PrefixStore.open(path)) == 0
    with pytest.raises(prefix_store.selection.NothingToSelect, match="0 decision points in the store"):
        prefix_store.selection.Selector(store).select(0, "game", "teacher_prefix", 1)


def test_a_reader_cannot_write_and_bad_sequences_do_not_enter(path):
    fill(path, [0])
    reader = PrefixStore.open(path)
    with pytest.raises(StoreError, match="open for reading; open it with mode 'a'"):
        reader.append(example_sequence(1))
    with pytest.raises(StoreError, match="open for reading"):
        reader.commit()
    with PrefixStore.open(path, "a") as store:
        with pytest.raises(InvalidSequence, match="0 action texts"):
            store.append(dataclasses.replace(example_sequence(1), actions=()))
        assert store.pending == 0


def test_what_is_committed_is_what_was_appended(path):
    seq = example_sequence(0)
    with PrefixStore.open(path, "w") as store:
        identity = store.append(seq)
        seq.contexts[0].tokens[:] = 0
        store.commit()
        assert content_hash(store.sequence(identity)) == identity


def test_another_tokenizer_is_refused(path):
    fill(path, [0])
    store = PrefixStore.open(path)
    mine = Fingerprint("example-tokenizer", "example-template", "some model")
    assert store.fingerprints() == [Fingerprint("example-tokenizer", "example-template", "")]
    check_fingerprint(store, mine)
    with pytest.raises(ForeignFingerprint, match="tokenizer example-tokenizer, the model has mine.*Collect or import"):
        check_fingerprint(store, dataclasses.replace(mine, tokenizer="mine"))
    other = dataclasses.replace(mine, chat_template="mine")
    with pytest.raises(ForeignFingerprint, match="chat template example-template, the model has mine"):
        check_fingerprint(store, other)
    check_fingerprint(store, other, chat_template=False)


def test_every_array_is_readable_by_stock_zarr(path):
    fill(path, range(40))
    fill(path, range(40, 45))
    root = zarr.open_group(path, mode="r")
    assert root.attrs["prefix_store"] == {"layout": 1}
    store = PrefixStore.open(path)
    for reader in store._segments():
        group = root[f"segments/{reader.name}"]
        assert sorted(name for name, _ in group.arrays()) == sorted(CHUNK_ROWS)
        for name in CHUNK_ROWS:
            assert group[name].dtype == reader.array(name).dtype
            assert np.array_equal(group[name][:], reader.array(name).all(), equal_nan=name == "behaviour_logprob")
    # a prefix by hand, as docs/prefix_store.md describes it
    group = root[f"segments/{next(store._segments()).name}"]
    columns = group.attrs["prefix_store"]["columns"]
    sequence, context, turn, prefix_tokens, _ = (int(v) for v in group["points"][0])
    assert columns["points"] == ["sequence", "context", "turn", "prefix_tokens", "action_tokens"]
    first = dict(zip(columns["contexts"], group["contexts"][0].tolist(), strict=True))
    identity = bytes(group["ids"][sequence]).hex()
    tokens = group["tokens"][first["token_start"] : first["token_start"] + prefix_tokens]
    assert np.array_equal(tokens, store.prefix(DecisionPoint(identity, context, turn)))


def test_the_package_is_light():
    code = "import sys, prefix_store; print(sorted({m.split('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert not any(f"'{name}'" in modules for name in ("torch", "transformers", "mopd", "teachers", "zarr"))


def test_all_source_kinds_are_kept_apart(path):
    with PrefixStore.open(path, "w") as store:
        for number, kind in enumerate(SOURCE_KINDS):
            store.append(example_sequence(number, source=kind, domain="game"))
        store.commit()
        assert {k: v["sequences"] for k, v in store.info()["domains"]["game"].items()} == dict.fromkeys(SOURCE_KINDS, 1)


def test_an_append_that_was_interrupted_leaves_a_sound_buffer(path, monkeypatch):
    """A key press in the middle of an append: what is committed then is whole all the same."""
    monkeypatch.setattr(building_module, "PACKED_RUN", 64)
    for name in building_module.TOKEN_COLUMNS:
        monkeypatch.setitem(CHUNK_ROWS, name, 16)
    with PrefixStore.open(path, "w") as store:
        ids = [store.append(example_sequence(seed)) for seed in range(4)]
        with monkeypatch.context() as patch:
            # after the tokens of the sequence have been copied, before it is there
            patch.setattr(building_module, "_Row", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                store.append(example_sequence(9))
        ids += [store.append(example_sequence(seed)) for seed in range(4, 8)]
        store.commit()
    store = PrefixStore.open(path)
    assert set(ids) <= set(store.ids()) and store.verify().ok
    assert all(content_hash(seq) == identity for identity, seq in zip(store.ids(), store, strict=True))


def test_chunks_of_another_size_read_the_same(path, monkeypatch):
    """Each array says how its chunks are cut: a store may hold segments that were written with other sizes."""
    with PrefixStore.open(path, "w") as store:
        for rows in (4096, 16384, 512):
            with monkeypatch.context() as patch:
                for name in building_module.TOKEN_COLUMNS:
                    patch.setitem(CHUNK_ROWS, name, rows)
                for seed in range(rows, rows + 3):
                    store.append(example_sequence(seed))
                store.commit()
    store = PrefixStore.open(path, "a")
    sequences = [example_sequence(seed) for rows in (4096, 16384, 512) for seed in range(rows, rows + 3)]
    want = {content_hash(seq): seq for seq in sequences}
    for _ in range(2):
        assert store.ids() == sorted(want) and store.verify().ok
        assert all(sequences_equal(store.sequence(identity), seq) for identity, seq in want.items())
        store.compact()


def test_what_is_appended_is_what_was_checked(path):
    """An array that changes after the append, and values of another type, never reach the store."""
    seq = example_sequence(3)
    tokens = seq.contexts[0].tokens
    with PrefixStore.open(path, "w") as store:
        identity = store.append(seq)
        tokens[:] = 7
        with pytest.raises(InvalidSequence, match="tokens is int64"):
            store.append(with_tokens(seq, tokens.astype(np.int64)))
        with pytest.raises(InvalidSequence, match="tokens is list"):
            store.append(with_tokens(seq, tokens.tolist()))
        with pytest.raises(InvalidSequence, match="not made of the data model's types"):
            store.append(dataclasses.replace(seq, contexts=(None,)))
        store.commit()
        assert store.ids() == [identity] and content_hash(store.sequence(identity)) == identity


def with_tokens(seq, tokens):
    return dataclasses.replace(seq, contexts=(dataclasses.replace(seq.contexts[0], tokens=tokens), *seq.contexts[1:]))


def test_a_failed_stage_keeps_the_buffer_and_takes_more(path, monkeypatch):
    monkeypatch.setattr(building_module, "PACKED_RUN", 64)
    for name in building_module.TOKEN_COLUMNS:
        monkeypatch.setitem(CHUNK_ROWS, name, 16)
    with PrefixStore.open(path, "w") as store:
        ids = [store.append(example_sequence(seed)) for seed in range(5)]
        with monkeypatch.context() as patch:
            full = OSError(28, "No space left on device")
            patch.setattr(LocalStorage, "put_folder", lambda *_: (_ for _ in ()).throw(full))
            with pytest.raises(StoreError, match="no room left"):
                store.commit()
        ids += [store.append(example_sequence(seed)) for seed in range(5, 9)]
        store.commit()
        assert sorted(ids) == store.ids() and store.verify().ok
