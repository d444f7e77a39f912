"""A flipped bit anywhere is found, the sequences it hurts are named, and damaged tokens are never handed out."""

import json

import numpy as np
import pytest

from prefix_store import DamagedData, PrefixStore
from prefix_store.trajectory import content_hash, example_sequence


@pytest.fixture
def store_path(tmp_path):
    """Two segments; the first holds 80 sequences whose tokens fill more than one chunk."""
    path = tmp_path / "store"
    for seeds in (range(80), range(80, 84)):
        with PrefixStore.open(path, "a") as store:
            for seed in seeds:
                store.append(example_sequence(seed))
            store.commit()
    return path


def segment_folders(path):
    return [path / "segments" / e["name"] for e in PrefixStore.open(path)._manifest["segments"]]


def flip(file, at, bit=0):
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << bit
    file.write_bytes(data)


def ids_of(seeds):
    return sorted(content_hash(example_sequence(seed)) for seed in seeds)


def test_a_sound_store_has_no_problems(store_path):
    report = PrefixStore.open(store_path).verify()
    assert report.ok and report.problems == () and report.sequences == 84 and report.segments == 2
    assert "all sound" in str(report) and json.loads(json.dumps(report.to_dict()))["ok"] is True


def test_a_flipped_bit_in_any_file_is_found_and_blamed_on_sequences_of_its_segment(store_path):
    rng = np.random.default_rng(0)
    folder = segment_folders(store_path)[1]
    ids = ids_of(range(80, 84))
    files = sorted(p for p in folder.rglob("*") if p.is_file())
    assert len(files) == 19
    for file in files:
        before = file.read_bytes()
        for _ in range(3):
            flip(file, int(rng.integers(len(before))), int(rng.integers(8)))
            report = PrefixStore.open(store_path).verify()
            assert not report.ok, file
            assert report.damaged_sequences() and set(report.damaged_sequences()) <= set(ids), (file, str(report))
            assert all(folder.name in p.place for p in report.problems)
            file.write_bytes(before)
    assert PrefixStore.open(store_path).verify().ok


@pytest.mark.parametrize("key", ["zarr.json", "segments/zarr.json"])
def test_damaged_group_files_are_found(store_path, key):
    store = PrefixStore.open(store_path)  # its own file is read when a store is opened
    (store_path / key).write_text('{"zarr_format": 3, "node_type": "array"}')
    assert [p.place for p in store.verify().problems] == [key]
    (store_path / key).unlink()
    (problem,) = store.verify().problems
    assert problem.place == key and "cannot be read" in problem.message and len(store) == 84


def test_exactly_the_sequences_in_the_damaged_chunk_are_named_and_refused(store_path):
    folder = segment_folders(store_path)[0]
    flip(folder / "tokens" / "c.0", 100)  # inside the first chunk of 4096 tokens
    at, inside = 0, set()
    for seed in range(80):
        seq = example_sequence(seed)
        if at < 4096:
            inside.add(content_hash(seq))
        at += sum(len(c.tokens) - c.fork for c in seq.contexts)
    assert 0 < len(inside) < 80 and at > 4096
    store = PrefixStore.open(store_path)
    report = store.verify()
    assert set(report.damaged_sequences()) == inside
    assert any("tokens: rows 0 to 4096 fail their checksum" in str(p) for p in report.problems)
    for identity in store.ids():
        if identity in inside:
            with pytest.raises(DamagedData, match="fail their checksum"):
                store.sequence(identity)
        else:
            assert content_hash(store.sequence(identity)) == identity
    for point in store.decision_points():
        if point.sequence in inside:
            with pytest.raises(DamagedData):
                store.prefix(point)
        else:
            assert len(store.prefix(point))


@pytest.mark.parametrize("victim", ["zarr.json", "points/c.0.0", "ids/c.0.0", "sequences/zarr.json"])
def test_a_damaged_table_stops_the_store_unless_the_rest_is_asked_for(store_path, victim):
    first, second = segment_folders(store_path)
    flip(second / victim, 40)
    with pytest.raises(DamagedData, match=rf"{second.name}.*skip_damaged=True\) opens what"):
        PrefixStore.open(store_path).index()
    store = PrefixStore.open(store_path, skip_damaged=True)
    assert len(store) == 80 and store.ids() == ids_of(range(80)) and list(store.damaged) == [second.name]
    assert store.info()["damaged"] == store.damaged


@pytest.mark.parametrize("cut", [0, 10, -1])
def test_a_truncated_or_missing_file_is_found(store_path, cut):
    folder = segment_folders(store_path)[1]
    shard = folder / "behaviour_logprob" / "c.0"
    shard.write_bytes(shard.read_bytes()[:cut])
    report = PrefixStore.open(store_path).verify()
    assert report.damaged_sequences() == ids_of(range(80, 84))
    shard.unlink()
    assert PrefixStore.open(store_path).verify().damaged_sequences() == ids_of(range(80, 84))
    assert len(PrefixStore.open(store_path).decision_points())  # what does not need it goes on


def test_a_damaged_version_is_named_and_others_open(store_path):
    file = store_path / "versions" / "v000002.json"
    flip(file, 60)
    with pytest.raises(DamagedData, match=r"v000002.json fails its checksum"):
        PrefixStore.open(store_path)
    old = PrefixStore.open(store_path, version="v000001")
    assert len(old) == 80
    assert [p.place for p in old.verify().problems] == ["versions/v000002.json"]


@pytest.mark.parametrize("stone", [b'{"number": 3, "removed_by": "v000004"}', b"[]", b"\xff"])
def test_a_newest_version_that_is_rubbish_is_said_at_once(store_path, stone):
    numbers = sorted((store_path / "versions").iterdir())
    newest = numbers[-1]
    newest.write_bytes(stone.replace(b"3", str(len(numbers)).encode()))
    for mode in "ra":
        with pytest.raises(DamagedData, match="fails its checksum"):
            PrefixStore.open(store_path, mode)
