"""Compaction, garbage collection and quarantine: what they do, and that nothing is lost whatever happens meanwhile."""

import json
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from prefix_store import DamagedData, PrefixStore, StoreError
from prefix_store.compact import plan_bins
from prefix_store.trajectory import content_hash, example_sequence, sequences_equal


def grown(path, commits=4, each=2):
    """A store with a few commits; sequence n is example_sequence(n)."""
    store = PrefixStore.open(path, "a")
    for number in range(commits):
        for seed in range(each):
            store.append(example_sequence(each * number + seed))
        store.commit(f"commit {number}")
    return store


def flip(store, number, name, at=20):
    """Flip a bit of a file of the version's segment `number`; the segment's name."""
    segment = store._manifest["segments"][number]["name"]
    file = store.path / "segments" / segment / name
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    return segment


def folders(store):
    return sorted(p.name for p in (store.path / "segments").iterdir() if p.is_dir())


def test_compact_keeps_content_and_versions(tmp_path):
    store = grown(tmp_path / "s")
    ids, points = store.ids(), list(store.decision_points())
    prefixes = [store.prefix(point) for point in points]
    assert store.compact(message="tidy") == "v000005" == store.version
    report = store.compaction
    assert (report.merged, report.made, report.sequences, report.left, report.given_up) == (4, 1, 8, {}, 0)
    assert store.ids() == ids and list(store.decision_points()) == points
    assert all(np.array_equal(store.prefix(p), q) for p, q in zip(points, prefixes, strict=True))
    assert store.history()[-1]["kind"] == "compact" and store.history()[-1]["segments"] == 1
    for number in range(1, 5):
        old = PrefixStore.open(store.path, version=number)
        assert len(old) == 2 * number and old.verify().ok
    assert store.compact() == "v000005" and store.compaction.merged == 0  # nothing is left to do
    store.append(example_sequence(3))
    assert store.pending == 0 and store.duplicates == 1  # it knows what the merged segment holds
    with pytest.raises(StoreError, match="open for reading"):
        PrefixStore.open(store.path).compact()
    with pytest.raises(ValueError, match="target_tokens is 0"):
        store.compact(target_tokens=0)


def test_bins_are_bounded_and_stable():
    rng = np.random.default_rng(0)
    for _ in range(50):
        entries = [{"name": str(n), "tokens": int(t)} for n, t in enumerate(rng.integers(1, 150, rng.integers(0, 30)))]
        bins = plan_bins(entries, 100)
        assert all(len(some) > 1 and sum(e["tokens"] for e in some) <= 100 for some in bins)
        merged = {e["name"] for some in bins for e in some}
        after = [e for e in entries if e["name"] not in merged]
        after += [{"name": "m", "tokens": sum(e["tokens"] for e in some)} for some in bins]
        assert sum(len(some) for some in plan_bins(after, 100)) <= sum(len(some) for some in bins)
    small = [{"name": str(n), "tokens": 10} for n in range(25)]
    assert [len(some) for some in plan_bins(small, 100)] == [10, 10, 5]


def test_compact_leaves_damaged_segments_and_names_them(tmp_path):
    store = grown(tmp_path / "s")
    bad = flip(store, 1, "tokens/c.0")
    store.compact()
    assert list(store.compaction.left) == [bad] and "tokens" in store.compaction.left[bad] and bad in str(store.compaction)
    assert [entry["name"] for entry in store._manifest["segments"]][0] == bad
    assert len(store._manifest["segments"]) == 2 and len(store) == 8
    assert store.verify().damaged_segments() == [bad]


def test_gc_removes_what_no_version_names(tmp_path):
    store, abandoned = grown(tmp_path / "s"), "ab" * 16
    (store.path / "segments" / abandoned).mkdir()
    (store.path / "segments" / abandoned / "file").write_bytes(b"x" * 1000)
    report = store.gc()
    assert report.segments == () and report.young == (abandoned,) and store.version == "v000004"  # too young
    report = store.gc(min_age_seconds=0, dry_run=True)
    assert report.segments == (abandoned,) and report.bytes >= 1000 and "would remove" in str(report)
    assert abandoned in folders(store) and store.versions()[-1] == "v000004"
    report = store.gc(min_age_seconds=0)
    assert report.segments == (abandoned,) and report.bytes >= 1000 and abandoned not in folders(store)
    assert store.version == "v000005" and store.history()[-1]["kind"] == "gc" and len(store) == 8
    assert store.gc(min_age_seconds=0).segments == () and store.version == "v000005"  # nothing to do makes no version
    assert json.dumps(report.to_dict())


def test_gc_with_keep_versions(tmp_path):
    store = grown(tmp_path / "s")
    store.compact()
    old = PrefixStore.open(store.path, version=4)
    assert store.gc(keep_versions=2, min_age_seconds=0).versions == ("v000001", "v000002", "v000003")
    assert store.versions() == ["v000004", "v000005", "v000006"] and len(folders(store)) == 5
    assert store.gc(keep_versions=2, min_age_seconds=0).versions == ()
    report = store.gc(keep_versions=1, min_age_seconds=0)
    assert report.versions == ("v000004",) and len(report.segments) == 4 and len(folders(store)) == 1
    assert store.verify().ok and len(store) == 8
    with pytest.raises(ValueError, match="no longer: gc removed it; it has v000005 to v000007"):
        PrefixStore.open(store.path, version="v000002")
    with pytest.raises(DamagedData, match=r"gc has removed v000004 while this handle read it; `refresh\(\)`"):
        for identity in store.ids():
            old.sequence(identity)
    assert old.refresh() == "v000007" and [old.sequence(i) for i in old.ids()]
    with pytest.raises(ValueError, match="keep_versions is 0"):
        store.gc(keep_versions=0)
    # numbers are never given again, so a handle that has slept through it all cannot take one of them
    stale = PrefixStore(store.storage, "a", PrefixStore.open(store.path)._manifest, False)
    stale._manifest = {"version": "v000001", "number": 1, "message": "", "committed_at": "", "segments": []}
    stale.append(example_sequence(99))
    assert stale.commit() == "v000008" and len(stale) == 9


class Interrupted:
    """A storage that does something else just before its call number `at`."""

    def __init__(self, storage, at, action):
        self._storage, self._at, self._action, self.calls = storage, at, action, 0

    def __getattr__(self, name):
        value = getattr(self._storage, name)
        if name not in ("read", "file", "names", "create", "replace", "put_folder", "delete_folder", "usage"):
            return value

        def call(*arguments):
            self.calls += 1
            if self.calls == self._at:
                self._action()
            return value(*arguments)

        return call


def commit(store):
    store.commit("mine")


def compact(store):
    store.compact()


def collect(store):
    store.gc(keep_versions=1, min_age_seconds=0)


def quarantine(store):
    store.quarantine()


def others(path):
    """What other processes do meanwhile: commit, compact, and collect all rubbish."""
    with PrefixStore.open(path, "a") as store:
        store.append(example_sequence(500))
        store.append(example_sequence(101))  # the writer has it too
        store.commit("theirs")
        store.compact()
        store.gc(keep_versions=1, min_age_seconds=0)


@pytest.mark.parametrize("action", [commit, compact, collect, quarantine])
def test_whatever_others_do_in_between(tmp_path, action):
    """Every call to the storage is interrupted, one after another, by a commit, a compaction and a gc without age limit."""
    at, done = 1, False
    while not done:
        path = tmp_path / str(at)
        grown(path, commits=2).close()
        store = PrefixStore.open(path, "a")
        new = {store.append(example_sequence(seed)) for seed in (100, 101)} if action is commit else set()
        store.storage = Interrupted(store.storage, at, lambda path=path: others(path))
        action(store)
        done = store.storage.calls < at
        if not done:
            expected = {content_hash(example_sequence(seed)) for seed in (0, 1, 2, 3, 101, 500)} | new
            fresh = PrefixStore.open(path)
            assert set(fresh.ids()) == expected and len(fresh) == len(expected), f"call {at}"
            report = fresh.verify()
            assert report.ok, f"call {at}: {report}"
            assert store.refresh() == fresh.version and set(store.ids()) == expected
            with PrefixStore.open(path, "a") as last:
                last.gc(min_age_seconds=0)
                assert set(folders(last)) == {
                    entry["name"]
                    for v in last.versions()
                    for entry in PrefixStore.open(path, version=v)._manifest["segments"]
                }
        at += {commit: 1, quarantine: 15}.get(action, 3)
    assert at > 4


def test_quarantine_saves_what_is_sound(tmp_path, monkeypatch):
    monkeypatch.setattr("prefix_store.building.TOKEN_ROWS", 64)
    monkeypatch.setattr(
        "prefix_store.building.CHUNK_ROWS",
        dict.fromkeys(
            (
                "tokens",
                "behaviour_logprob",
                "weights_version",
                "contexts",
                "segments",
                "points",
                "sequences",
                "ids",
                "records",
            ),
            64,
        ),
    )
    store = grown(tmp_path / "s", commits=2, each=10)
    ids = store.ids()
    bad = flip(store, 1, "tokens/c.0")
    damaged = set(store.verify().damaged_sequences())
    victim = next(p for p in store.decision_points() if p.sequence in damaged)
    fresh = PrefixStore.open(store.path, "a")
    with pytest.raises(DamagedData) as error:
        for point in fresh.decision_points():
            fresh.continuation(point), fresh.prefix(point)
    assert any(f"sequence {i}, turn " in str(error.value) for i in damaged) and "`quarantine()`" in str(error.value)
    with pytest.raises(ValueError, match="names no segment 'x'"):
        fresh.quarantine(["x"])
    report = fresh.quarantine(fresh.verify(), message="bits rot")
    (entry,) = report.segments
    assert entry["name"] == bad and set(report.lost) == damaged and entry["unknown"] == 0
    assert 0 < len(damaged) < 10 and entry["saved"] == 10 - len(damaged)
    assert set(fresh.ids()) == set(ids) - damaged and fresh.verify().ok and fresh.quarantined() == [entry]
    assert all(
        sequences_equal(fresh.sequence(content_hash(s)), s)
        for s in map(example_sequence, range(20))
        if content_hash(s) not in damaged
    )
    assert fresh.history()[-1]["message"] == "bits rot" and fresh.info()["quarantined"] == [entry]
    assert fresh.gc(keep_versions=1, min_age_seconds=0) and bad in folders(fresh)  # kept to be looked at
    again = PrefixStore.open(store.path)
    assert again.quarantined() == [entry] and str(len(damaged)) in str(again.verify())
    seed = next(s for s in range(20) if content_hash(example_sequence(s)) == victim.sequence)
    fresh.append(example_sequence(seed))  # what was lost may come again
    fresh.commit()
    assert victim.sequence in fresh and fresh.quarantine().segments == ()


@pytest.mark.parametrize(
    "name", ["zarr.json", "ids/c.0.0", "points/c.0.0", "sequences/c.0.0", "records/c.0", "tokens/zarr.json"]
)
def test_quarantine_of_every_kind_of_damage(tmp_path, name):
    store = grown(tmp_path / "s", commits=2, each=3)
    ids = store.ids()
    sound = {row.tobytes().hex() for row in store._reader(store._manifest["segments"][1]["name"]).ids()}
    bad = flip(store, 0, name, at=30)
    fresh = PrefixStore.open(store.path, "a")
    report = fresh.quarantine([bad])
    (entry,) = report.segments
    assert entry["saved"] + len(entry["lost"]) + entry["unknown"] == 3
    assert sound <= set(fresh.ids()) <= set(ids) and len(fresh) == 3 + entry["saved"] and fresh.verify().ok
    if name in ("points/c.0.0", "ids/c.0.0"):
        assert entry["saved"] == 3  # neither is needed to read a sequence


def test_a_handles_own_scratch_is_no_other_writer(tmp_path):
    with PrefixStore.open(tmp_path / "store", "w") as store:
        store.append(example_sequence(0))
        store.commit()
        assert store.storage.scratch().is_dir()
        assert store.info()["writers"] == []
        assert len(PrefixStore.open(tmp_path / "store").info()["writers"]) == 1


def test_a_scratch_folder_whose_maker_died_before_locking_it_is_a_leftover(tmp_path):
    with PrefixStore.open(tmp_path / "store", "w") as store:
        gone = subprocess.Popen([sys.executable, "-c", ""])
        gone.wait()
        for pid in (gone.pid, os.getpid()):
            (tmp_path / "store" / "tmp" / f"{socket.gethostname()}.{pid}.0123456789ab").mkdir(parents=True)
        info = store.info()
        assert [name.split(".")[-2] for name in info["leftovers"]] == [str(gone.pid)]
        assert [name.split(".")[-2] for name in info["writers"]] == [str(os.getpid())]


def test_files_of_others_are_left_alone(tmp_path):
    """What a file browser or a person puts into a store's folders neither stops gc nor is removed by it."""
    path, fresh = tmp_path / "store", example_sequence(0)
    with PrefixStore.open(path, "a") as store:
        store.append(fresh)
        store.commit()
        store.index()
    strange = [path / folder / name for folder in ("segments", "index", "versions") for name in (".DS_Store", "notes")]
    for place in strange:
        place.parent.mkdir(exist_ok=True)
        place.mkdir() if place.name == "notes" else place.write_text("x")
    with PrefixStore.open(path, "a") as store:
        report = store.gc(min_age_seconds=0)
        assert report.segments == () and store.info()["unreferenced"] == [] and store.verify().ok
        assert store.compact() and store.sequence(store.ids()[0]).task == fresh.task
    assert all(place.exists() for place in strange)


def test_what_cannot_be_read_or_made_is_named(tmp_path):
    with PrefixStore.open(tmp_path / "store", "a") as store:
        store.commit()
    newest = tmp_path / "store" / "versions" / "v000001.json"
    newest.unlink()
    newest.mkdir()
    with pytest.raises(DamagedData, match="v000001.json cannot be read: Is a directory"):
        PrefixStore.open(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(StoreError, match="no store can be made at .*link: File exists"):
        PrefixStore.open(tmp_path / "link", "a")


FORBIDDEN = """
import os, sys, tempfile
from prefix_store import PrefixStore, StoreError
from prefix_store.trajectory import example_sequence
fresh = example_sequence(9)
with tempfile.TemporaryDirectory() as folder, PrefixStore.open(folder, "a") as store:
    for seed in range(2):  # what is imported late is imported before the rights are gone
        store.append(example_sequence(seed))
        store.commit()
    assert store.compact() and store.verify().ok
os.chdir(sys.argv[1])  # the way here may be closed to others
if os.geteuid() == 0:
    os.setuid(65534)
reader = PrefixStore.open("store")
assert len(reader) == 2 and len(reader.prefix(reader.decision_points()[0])) and reader.verify().ok and reader.info()
writer = PrefixStore.open("store", "a")
writer.append(fresh)
for what in (writer.commit, writer.compact, lambda: PrefixStore.open("new", "a")):
    try:
        what()
        raise SystemExit("it was written")
    except StoreError as error:
        print(error)
"""


def test_a_folder_that_may_only_be_read(tmp_path):
    """Reading needs no right to write; writing says what it may not, and where."""
    with PrefixStore.open(tmp_path / "store", "a") as store:
        for seed in range(2):
            store.append(example_sequence(seed))
            store.commit()
    places = [tmp_path, *(tmp_path / "store").rglob("*"), tmp_path / "store"]
    for place in places:
        place.chmod(0o555 if place.is_dir() else 0o444)
    try:
        done = subprocess.run([sys.executable, "-c", FORBIDDEN, tmp_path], capture_output=True, text=True)
    finally:
        for place in places:
            place.chmod(0o755)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 3 and all("cannot be written: Permission denied: store" in line for line in lines[:2])
    assert lines[2] == "no store can be made at new: Permission denied"
