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
from prefix_store import PrefixStore, chunked, disk, segment
from prefix_store.trajectory import example_sequence
base, work, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])

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
    for name in ("rename", "link", "mkdir", "unlink"):
        setattr(os, name, lethal(getattr(os, name), False))
    for module in (chunked, disk, segment):
        module.write_file = lethal(module.write_file, True)
    with PrefixStore.open(path, "a") as store:
        for seed in (101, 102):
            store.append(example_sequence(seed))
        store.commit("more")
    os._exit(0)

for fatal in range(1, limit):
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


def test_killed_at_every_step_of_a_commit(tmp_path):
    """The commit is killed before each folder, rename and link, and in the middle of each file, one after another."""
    base, work = tmp_path / "base", tmp_path / "work"
    with PrefixStore.open(base, "w") as store:
        old = {store.append(example_sequence(seed)) for seed in range(3)}
        store.commit()
    new = {content_hash(example_sequence(seed)) for seed in (101, 102)}
    work.mkdir()
    command = [sys.executable, "-c", KILLED, base, work, "100"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [[int(v) for v in line.split()] for line in answer.stdout.splitlines()]
    assert len(rows) > 30 and rows[-1][1] == 0 and all(end == -signal.SIGKILL for _, end in rows[:-1])
    happened = []
    for number, _ in rows[:-1]:
        store = PrefixStore.open(work / str(number))
        ids = set(store.ids())
        assert ids in (old, old | new)
        report = store.verify()
        assert report.ok, str(report)
        happened.append(ids == old | new)
        if number % 7 == 0:  # and life goes on
            with PrefixStore.open(work / str(number), "a") as again:
                for seed in (101, 102):
                    again.append(example_sequence(seed))
                again.commit()
                assert set(again.ids()) == old | new
    assert any(happened) and not all(happened)
    assert happened == sorted(happened)  # there is one instant at which the commit happens


def test_leftovers_are_ignored_and_named(tmp_path):
    path = tmp_path / "store"
    with PrefixStore.open(path, "w") as store:
        store.append(example_sequence(0))
        store.commit()
    code = "import sys, os; from prefix_store import PrefixStore as P; from prefix_store.trajectory import *;"
    code += "import prefix_store.store as s; s.SPILL_TOKENS = 1; store = P.open(sys.argv[1], 'a');"
    code += "store.append(example_sequence(1)); os.kill(os.getpid(), 9)"
    subprocess.run([sys.executable, "-c", code, path])
    shutil.copytree(next(p for p in (path / "segments").iterdir() if p.is_dir()), path / "segments" / "f")
    store = PrefixStore.open(path)
    info, report = store.info(), store.verify()
    assert len(info["leftovers"]) == 1 == len(report.leftovers) and info["writers"] == []
    assert report.ok and report.unreferenced == ("f",) and len(store) == 1


FULL = """
import pathlib, resource, sys
from prefix_store import PrefixStore, StoreError
from prefix_store.trajectory import example_sequence
store = PrefixStore.open(sys.argv[1], "a")
for seed in range(400):
    store.append(example_sequence(seed))
unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, unlimited[1]))
try:
    store.commit()
except StoreError as error:
    print(error)
print(len(store), store.pending, sum(p.is_file() for p in pathlib.Path(sys.argv[1], "tmp").rglob("*")))
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
