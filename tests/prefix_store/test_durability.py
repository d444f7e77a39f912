"""Real processes write at once, are killed, and run out of room; the store is never less than what was committed."""

import json
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from prefix_store import PrefixStore
from prefix_store.trajectory import content_hash, example_sequence

WRITER = """
import sys, json
from prefix_store import PrefixStore
from prefix_store.trajectory import example_sequence
path, first, commits = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
for number in range(commits):
    with PrefixStore.open(path, "a") as store:
        ids = [store.append(example_sequence(first + 3 * number + i)) for i in range(3)]
        version = store.commit(f"writer {first}")
    print(json.dumps([version, ids]), flush=True)
"""


def start_writer(path, first, commits):
    command = [sys.executable, "-c", WRITER, str(path), str(first), str(commits)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def reported(process):
    """What a writer said it had committed, the last line dropped if the kill cut it."""
    lines = process.communicate()[0].splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def check_whole(path, expected):
    """Every expected id is there and equal, no sequence is there twice, and every version is sound."""
    store = PrefixStore.open(path)
    ids = store.ids()
    assert set(expected) <= set(ids) and len(set(ids)) == len(ids) == len(store)
    report = store.verify()
    assert report.ok, str(report)
    for version in store.versions():
        old = PrefixStore.open(path, version=version)
        assert set(old.ids()) <= set(ids) and len(old.ids()) == len(old)
    return store


@pytest.mark.parametrize("writers", [2, 4])
def test_writers_at_once_lose_nothing(tmp_path, writers):
    path = tmp_path / "store"  # none of them finds it there: making it is a race too
    processes = [start_writer(path, 1000 * n, 4) for n in range(writers)]
    commits = [commit for p in processes for commit in reported(p)]
    assert all(p.returncode == 0 for p in processes) and len(commits) == 4 * writers
    versions = [version for version, _ in commits]
    assert sorted(versions) == [f"v{n:06d}" for n in range(1, 4 * writers + 1)]  # no name was won twice
    store = check_whole(path, [i for _, ids in commits for i in ids])
    assert len(store) == 12 * writers and store.verify().unreferenced == ()
    for version, ids in commits:
        assert set(ids) <= set(PrefixStore.open(path, version=version).ids())


def test_writers_of_the_same_sequences_store_them_once(tmp_path):
    path = tmp_path / "store"
    processes = [start_writer(path, 0, 4) for _ in range(3)]
    ids = {i for p in processes for _, ids in reported(p) for i in ids}
    assert all(p.returncode == 0 for p in processes) and len(ids) == 12
    assert len(check_whole(path, ids)) == 12


def test_killed_writers_leave_the_store_as_it_was(tmp_path):
    path, draws = tmp_path / "store", random.Random(7)
    committed, kills, sure = [], 0, []
    for number in range(4):
        processes = [start_writer(path, 10_000 * number + 1000 * n, 500) for n in range(2)]
        while not (path / "versions" / f"v{len(sure) + 1:06d}.json").exists():
            time.sleep(0.01)
        time.sleep(draws.random() * 0.25)
        for p in processes:
            p.send_signal(signal.SIGKILL)
            kills += 1
        for p in processes:
            committed += [i for _, ids in reported(p) for i in ids]
            assert p.returncode == -signal.SIGKILL
        store = check_whole(path, committed)
        sure = store.versions()
        assert all(entry["sequences"] == 3 for entry in store._manifest["segments"])  # a commit is all or nothing
    assert kills == 8 and len(committed) >= 12
    with PrefixStore.open(path, "a") as store:
        store.append(example_sequence(99_999_999))
        store.commit("after the storm")
    assert content_hash(example_sequence(99_999_999)) in check_whole(path, committed)


KILLED = """
import os, signal, shutil, sys
from prefix_store import PrefixStore, building, disk, storage
from prefix_store.trajectory import example_sequence
base, work, limit, action = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]

def child(path, fatal):
    calls = 0
    def lethal(function, write):
        def call(target, *args, **options):
            nonlocal calls
            calls += 1
            if calls == fatal:
                if write:
                    function(target, args[0][: len(args[0]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(target, *args, **options)
        return call
    for name in ("rename", "replace", "link", "mkdir", "unlink", "rmdir"):
        setattr(os, name, lethal(getattr(os, name), False))
    for module in (building, disk, storage):
        module.write_file = lethal(module.write_file, True)
    with PrefixStore.open(path, "a") as store:
        if action == "compact":
            store.compact()
        elif action == "gc":
            store.gc(keep_versions=1, min_age_seconds=0)
        elif action == "quarantine":
            store.quarantine()
        else:
            for seed in (101, 102):
                store.append(example_sequence(seed))
            store.commit("more")
    os._exit(0)

for fatal in range(int(sys.argv[5]), limit, int(sys.argv[5])):
    path = f"{work}/{fatal}"
    shutil.copytree(base, path)
    pid = os.fork()
    if pid == 0:
        child(path, fatal)
    end = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(fatal, end, flush=True)
    if end == 0:
        break
"""


def killed_at_every_step(base, work, action, stride=1):
    """Copies of `base` on which the action was killed before its first, second, … change of the disk (with a stride only
    at every so manieth)."""
    work.mkdir()
    command = [sys.executable, "-c", KILLED, base, work, "400", action, str(stride)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [[int(v) for v in line.split()] for line in answer.stdout.splitlines()]
    assert len(rows) > 5 and rows[-1][1] == 0 and all(end == -signal.SIGKILL for _, end in rows[:-1]), answer.stderr
    return [work / str(number) for number, _ in rows[:-1]]


def test_killed_at_every_step_of_a_commit(tmp_path):
    """The commit is killed before each folder, rename and link, and in the middle of each file, one after another."""
    base, work = tmp_path / "base", tmp_path / "work"
    with PrefixStore.open(base, "w") as store:
        old = {store.append(example_sequence(seed)) for seed in range(3)}
        store.commit()
    new = {content_hash(example_sequence(seed)) for seed in (101, 102)}
    happened = []
    for number, path in enumerate(killed_at_every_step(base, work, "commit")):
        store = PrefixStore.open(path)
        ids = set(store.ids())
        assert ids in (old, old | new)
        report = store.verify()
        assert report.ok, str(report)
        happened.append(ids == old | new)
        if number % 7 == 0:  # and life goes on
            with PrefixStore.open(path, "a") as again:
                for seed in (101, 102):
                    again.append(example_sequence(seed))
                again.commit()
                assert set(again.ids()) == old | new
    assert any(happened) and not all(happened)
    assert happened == sorted(happened)  # there is one instant at which the commit happens


@pytest.mark.parametrize("action", ["compact", "gc", "quarantine"])
def test_killed_at_every_step_of_tidying(tmp_path, action):
    base = tmp_path / "base"
    with PrefixStore.open(base, "w") as store:
        for number in range(3):
            for seed in range(2):
                store.append(example_sequence(2 * number + seed))
            store.commit()
        old = set(store.ids())
        if action == "gc":
            store.compact()
        elif action == "quarantine":
            victim = base / "segments" / store._manifest["segments"][0]["name"]
            lost = {row.tobytes().hex() for row in store._reader(victim.name).ids()}
            flip(victim / "tokens" / "c.0")
    stride = {"compact": 8, "gc": 4, "quarantine": 1}[action]
    for path in killed_at_every_step(base, tmp_path / "work", action, stride):
        store = PrefixStore.open(path)
        if action == "quarantine":
            assert set(store.ids()) in (old, old - lost)
            with PrefixStore.open(path, "a") as again:
                again.quarantine()
                assert set(again.ids()) == old - lost and again.verify().ok
            continue
        assert set(store.ids()) == old
        for version in {store.versions()[0], store.version}:
            report = PrefixStore.open(path, version=version).verify()
            assert report.ok, str(report)
    with PrefixStore.open(path, "a") as store:
        store.gc(keep_versions=1, min_age_seconds=0)
        report = store.verify()
        assert report.ok and not report.unreferenced and not report.leftovers
        assert len([p for p in (path / "segments").iterdir() if p.is_dir()]) <= 3


def flip(file, at=20):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_leftovers_are_ignored_and_named(tmp_path):
    path = tmp_path / "store"
    with PrefixStore.open(path, "w") as store:
        store.append(example_sequence(0))
        store.commit()
    code = "import sys, os; from prefix_store import PrefixStore as P; from prefix_store.trajectory import *;"
    code += "import prefix_store.writer as s; s.SPILL_TOKENS = 1; store = P.open(sys.argv[1], 'a');"
    code += "store.append(example_sequence(1)); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, path])
    shutil.copytree(next(p for p in (path / "segments").iterdir() if p.is_dir()), path / "segments" / ("f" * 32))
    store = PrefixStore.open(path)
    info, report = store.info(), store.verify()
    assert len(info["leftovers"]) == 1 == len(report.leftovers) and info["writers"] == []
    assert report.ok and report.unreferenced == ("f" * 32,) and len(store) == 1


FULL = """
import pathlib, resource, sys
from prefix_store import PrefixStore, StoreError
from prefix_store.trajectory import example_sequence
store = PrefixStore.open(sys.argv[1], "a")
for seed in range(400):
    store.append(example_sequence(seed))
files_before = sum(p.is_file() for p in pathlib.Path(sys.argv[1]).rglob("*"))
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
try:
    store.commit()
except StoreError as error:
    print(error)
files = [p.name for p in pathlib.Path(sys.argv[1]).rglob("*") if p.is_file()]
print(len(store), store.pending, sum(name != "lock" for name in files) - files_before)
resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
print(store.commit(), len(store))
"""


def test_a_full_disk_is_said_and_harms_nothing(tmp_path):
    path = tmp_path / "store"
    with PrefixStore.open(path, "w") as store:
        store.append(example_sequence(10_000))
        store.commit()
    answer = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True)
    error, state, after = answer.stdout.splitlines()
    assert "no room left on the device" in error and "nothing was committed and the store is as before" in error
    assert state == "1 400 0" and after == "v000002 401"
    assert PrefixStore.open(path).verify().ok


NO_ROOM = """
import os, pathlib, sys
from prefix_store import PrefixStore, StoreError
from prefix_store.trajectory import example_sequence
path = pathlib.Path(sys.argv[1], "store")
store = PrefixStore.open(path, "w")
for number in range(4):
    store.append(example_sequence(number))
    store.commit()
filler = open(pathlib.Path(sys.argv[1], "filler"), "wb", buffering=0)
try:
    while True:
        filler.write(bytes(4096))
except OSError:
    filler.truncate(filler.tell() - 40_960)  # ten pages are free, a segment has twenty files
store.append(example_sequence(4))
for attempt in (store.commit, store.compact):
    try:
        attempt()
    except StoreError as error:
        print(error)
    report = PrefixStore.open(path).verify()
    print(report.ok, len(store), store.pending, store.version, len(report.unreferenced), flush=True)
filler.truncate(0)
print(store.commit(), store.compact(), len(store), store.verify().ok, len(store.info()["segment_names"]))
"""


def test_no_room_on_a_real_file_system(tmp_path):
    """A file system of 1 MB that is full: neither a commit nor a compaction harms anything, and both work afterwards."""
    inner = f"mount -t tmpfs -o size=1m tmpfs {tmp_path} && exec {sys.executable} -c '{NO_ROOM}' {tmp_path}"
    if subprocess.run(["unshare", "-Urm", "sh", "-c", f"mount -t tmpfs -o size=1m tmpfs {tmp_path}"]).returncode != 0:
        pytest.skip("no small file system can be mounted here")
    answer = subprocess.run(["unshare", "-Urm", "sh", "-c", inner], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    first, after_commit, second, after_compact, end = answer.stdout.splitlines()
    for error in (first, second):
        assert "no room left on the device (No space left on device); nothing was committed" in error
    assert after_commit == after_compact == "True 4 1 v000004 0"
    assert end == "v000005 v000006 5 True 1"


KILL_STORE = pathlib.Path(__file__).parents[2] / "scripts" / "kill_store.py"


def test_kills_at_random_instants(tmp_path):
    """Three writers that append, commit and compact, beside a collector: the script in small."""
    options = ["--kills", "12", "--seed", "3", "--longest", "0.3", "--location", tmp_path / "store"]
    answer = subprocess.run([sys.executable, KILL_STORE, *options], capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert found["kills"] == 12 and found["committed"] > 0 and sum(found["killed_in"].values()) >= 12


def test_a_reader_sees_whole_commits_only(tmp_path):
    path = tmp_path / "store"
    PrefixStore.open(path, "w").close()
    process = start_writer(path, 0, 25)
    seen = set()
    while process.poll() is None:
        store = PrefixStore.open(path)
        ids = store.ids()
        assert len(ids) == len(store) and len(store) % 3 == 0
        for point in store.decision_points()[:5]:
            assert len(store.prefix(point))
        seen.add(len(store))
    assert process.returncode == 0 and len(PrefixStore.open(path)) == 75 and len(seen) > 3
    process.communicate()


def test_a_commit_that_failed_after_publishing_is_not_repeated(tmp_path, monkeypatch):
    """The name was won, then the device failed: the next try finds its own version and keeps its files."""
    from prefix_store import disk

    path = tmp_path / "store"
    store = PrefixStore.open(path, "w")
    identity = store.append(example_sequence(0))
    real = disk.sync_folder

    def fail(folder: pathlib.Path) -> None:
        if folder.name == "versions":
            raise OSError(5, "Input/output error")
        real(folder)

    monkeypatch.setattr(disk, "sync_folder", fail)
    with pytest.raises(OSError, match="Input/output error"):
        store.commit()
    monkeypatch.undo()
    assert store.commit() == "v000001" and store.ids() == [identity] and store.pending == 0
    assert store.verify().ok and PrefixStore.open(path).versions() == ["v000001"]
