"""Index files: the same index however it came about, in bounded pieces, and made again where one is lost or damaged."""

import os
import shutil

import numpy as np
import pytest
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore, merged
from prefix_store.index import KnownIds
from prefix_store.merged import COLUMNS, cover, found_indexes, load_rows, stale_indexes
from prefix_store.trajectory import decision_points_of, example_sequence


def fill(path, parts, *, start=0):
    """One commit per part, each of as many sequences as it says; what there is then by id."""
    out, seed = {}, start
    with PrefixStore.open(path, "a") as store:
        for count in parts:
            for _ in range(count):
                seq = example_sequence(seed)
                out[store.append(seq)] = seq
                seed += 1
            store.commit()
    return out


def check_reads(path, sequences):
    """Every point of every sequence, in order, and every prefix."""
    store = PrefixStore.open(path)
    expected = [point for i in sorted(sequences) for point in decision_points_of(sequences[i], i)]
    points = store.decision_points()
    assert list(points) == expected and store.ids() == sorted(sequences)
    for point in expected[:: max(1, len(expected) // 25)]:
        seq = sequences[point.sequence]
        segment = next(s for s in seq.contexts[point.context].segments if s.kind == "action" and s.turn == point.turn)
        tokens = seq.contexts[point.context].tokens
        assert np.array_equal(store.prefix(point), tokens[: segment.start])
        assert np.array_equal(store.continuation(point), tokens[segment.start : segment.end])
    return store


def columns(part):
    return {name: np.asarray(part.column(name)) for name in COLUMNS}


def folders(path):
    return sorted(name for name in os.listdir(path / "index") if name != "zarr.json") if (path / "index").exists() else []


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Nothing here is about power cuts: without flushing, forty commits take a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="module")
def many(tmp_path_factory, quick):
    """40 commits of one or two sequences with small tiers: every file that a large store has."""
    path = tmp_path_factory.mktemp("index") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged, "FAN", 3)
        sequences = fill(path, [1 + n % 2 for n in range(40)])
    return path, sequences


@pytest.fixture(autouse=True)
def save_small_ones(monkeypatch):
    monkeypatch.setattr(merged, "SAVED_PARTS", 2)


@pytest.fixture
def copy(many, tmp_path):
    shutil.copytree(many[0], tmp_path / "store")
    return tmp_path / "store", many[1]


def test_tiers_cover_a_store_of_many_commits_with_few_parts(many):
    path, _ = many
    store = PrefixStore.open(path)
    names = store._names()
    parts = cover(store.storage, names)
    assert len(names) == 40 and [p.start for p in parts[1:]] == [p.stop for p in parts[:-1]] and parts[-1].stop == 40
    assert len(parts) <= 2 * 4 + 2 and all(name.startswith("tier-") for name in folders(path))
    assert {p.name for p in parts if p.name} == set(folders(path))  # what was merged is gone


def test_every_way_to_an_index_gives_the_same(copy, monkeypatch):
    path, sequences = copy
    store = check_reads(path, sequences)
    assert not os.listdir(path / "tmp") and store.verify().ok
    assert sum(name.startswith("whole-") for name in folders(path)) == 1
    mapped = columns(load_rows(store.storage, *store._list()))
    assert not store.index().turn.flags.writeable
    shutil.rmtree(path / "index")
    in_memory = columns(load_rows(store.storage, *store._list(), save=False))
    assert not (path / "index").exists()
    monkeypatch.setattr(merged, "BLOCK_POINTS", 7)
    monkeypatch.setattr(merged, "GROUP_POINTS", 20)
    small_pieces = columns(load_rows(store.storage, *store._list()))
    for other in (in_memory, small_pieces):
        assert all(np.array_equal(mapped[name], other[name]) and mapped[name].dtype == other[name].dtype for name in COLUMNS)
    check_reads(path, sequences)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 3), min_size=1, max_size=14), st.integers(2, 4), st.integers(1, 30))
def test_any_commits_tiers_and_blocks(tmp_path_factory, parts, fan, block):
    path = tmp_path_factory.mktemp("any") / "store"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merged, "FAN", fan)
        patch.setattr(merged, "BLOCK_POINTS", block)
        check_reads(path, fill(path, parts))


def test_a_sequence_in_two_segments_counts_once(tmp_path):
    """Commits see to that; an index holds it even where two segments of a list bring the same."""
    fill(tmp_path / "a", [5, 5])
    store = PrefixStore.open(tmp_path / "a")
    names, segments = store._list()
    twice = load_rows(store.storage, names + names, lambda n: segments(n % 2), save=False)
    once = columns(load_rows(store.storage, names, segments))
    assert all(np.array_equal(twice.column(name), once[name]) for name in COLUMNS)


@pytest.mark.parametrize("victim", ["zarr.json", "turn/c.0", "ids/c.0.0", "first/c.0", "success/c.0"])
def test_a_damaged_index_is_noticed_and_made_again(copy, victim, caplog):
    path, sequences = copy
    check_reads(path, sequences)
    (whole,) = (name for name in folders(path) if name.startswith("whole-"))
    file = path / "index" / whole / victim
    before = file.read_bytes()
    for damage in (before[:-1], before[:20] + bytes([before[20] ^ 4]) + before[21:]):
        file.write_bytes(damage)
        check_reads(path, sequences)
        assert file.read_bytes() == before and "is made again" in caplog.text
    file.unlink()
    check_reads(path, sequences)


def test_every_index_file_is_readable_by_stock_zarr(copy):
    path, sequences = copy
    store = check_reads(path, sequences)
    root = zarr.open_group(path, mode="r")
    assert folders(path)
    for folder in folders(path):  # tiers, and at last the whole one
        group = root[f"index/{folder}"]
        assert sorted(name for name, _ in group.arrays()) == sorted(COLUMNS)
    points = store.index()
    for name in COLUMNS:
        if hasattr(points, name):
            assert np.array_equal(group[name][:], getattr(points, name)) and group[name].dtype == getattr(points, name).dtype


def test_a_store_that_cannot_be_written_is_read_all_the_same(copy, monkeypatch):
    path, sequences = copy

    def refuse(self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("prefix_store.storage.LocalStorage.scratch", refuse)
    before = folders(path)
    check_reads(path, sequences)
    shutil.rmtree(path / "index")
    check_reads(path, sequences)
    assert before and not (path / "index").exists()


def test_a_full_disk_while_writing_the_index_costs_nothing(copy, monkeypatch):
    path, sequences = copy

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(merged, "_write", full)
    check_reads(path, sequences)
    more = fill(path, [1] * 20, start=1000)  # commits that would make tiers
    check_reads(path, sequences | more)
    assert not [name for name in folders(path) if name.startswith("whole-")]


def test_readers_keep_what_they_mapped_when_it_is_deleted(copy):
    path, sequences = copy
    store = check_reads(path, sequences)
    shutil.rmtree(path / "index")
    assert list(store.decision_points()) == list(PrefixStore.open(path, skip_damaged=True).decision_points())


def test_old_versions_and_stale_indexes(copy):
    path, sequences = copy
    lists = [PrefixStore.open(path, version=v)._names() for v in PrefixStore.open(path).versions()]
    old = PrefixStore.open(path, version=20)
    assert len(old.decision_points()) == sum(sequences[i].turns for i in old.ids())
    check_reads(path, sequences)
    storage = old.storage
    wholes = [found for names in lists for found in found_indexes(storage, names) if found.whole]
    assert {(f.start, f.stop) for f in wholes} == {(0, 20), (0, 40)} and stale_indexes(storage, lists) == []
    assert set(stale_indexes(storage, lists[19:20])) == {n for n in folders(path) if not n.endswith(wholes[0].name[-32:])} - {
        f.name for f in found_indexes(storage, lists[19])
    }
    (path / "index" / "whole-0-3-" ).mkdir()
    assert stale_indexes(storage, lists) == ["whole-0-3-"]


def test_a_writer_knows_what_is_there_without_reading_every_segment(copy, monkeypatch):
    path, sequences = copy
    store = PrefixStore.open(path)
    names, segments = store._list()
    read = []
    known = KnownIds(store.storage, names, lambda n: read.append(n) or segments(n))
    assert len(read) < 6 and all(bytes.fromhex(i) in known for i in sequences)
    assert bytes(32) not in known and b"\xff" * 32 not in known
    known.update([bytes(32)])
    assert bytes(32) in known
    with PrefixStore.open(path, "a") as again:
        for seq in sequences.values():
            again.append(seq)
        assert again.duplicates == len(sequences) and again.commit() == "v000040"


def test_memory_and_descriptors_stay_bounded(many, monkeypatch):
    """With few readers and maps allowed, reading everything opens no more than that at once."""
    from prefix_store import reading, storage

    path, sequences = many
    monkeypatch.setattr(reading, "OPEN_SEGMENTS", 4)
    monkeypatch.setattr(storage, "OPEN_MAPS", 5)
    store = PrefixStore.open(path)
    for point in store.decision_points():
        store.prefix(point)
    assert len(store._readers) <= 4
    assert sum(bool(file._map) for file in store.storage._maps) <= 5
