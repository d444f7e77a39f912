"""Kill writers of a prefix store at random instants and look whether anything was lost, again and again.

    python scripts/kill_store.py --kills 200 --seed 0

Several processes append and commit and now and then compact, one more runs gc without any age limit; they are killed with
SIGKILL one after another, in the midst of what they do, and started anew. Then every sequence whose commit had returned
must be there and equal, every commit must be there whole or not at all, no sequence twice, every version must be sound,
and what the dead have left must be gone after one more gc. Prints what was done as JSON; exit status 1 if it fails.

Works on a local folder (a temporary one by default) and on an object store: `--location s3://bucket/prefix` with the
environment's credentials.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback

from prefix_store import PrefixStore, writer
from prefix_store.trajectory import content_hash, example_sequence, sequences_equal

PHASES = ("start", "append", "commit", "compact", "gc")
SHARED_SEEDS = 40
# sequences that every writer brings again and again, to be stored once
CHECK_EVERY = 50


def work(location: str, number: int, life: int, seed: int, log: pathlib.Path, phase: mmap.mmap) -> None:
    """A writer: append and commit for ever, and compact now and then. Says in the log what it is about to commit
    (unique seeds and shared seeds), and what it has committed."""
    draws = random.Random(f"{seed}/{number}/{life}")
    if life % 2:
        writer.SPILL_TOKENS = 300  # writes segments aside while it appends
    out = os.open(log / f"{number}.{life}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    store, commits = None, 0
    while True:
        phase[number] = PHASES.index("append")
        if store is None or draws.random() < 0.3:
            store = PrefixStore.open(location, "a")
        if draws.random() < 0.25:
            phase[number] = PHASES.index("compact")
            store.compact(target_tokens=draws.choice((500, 2000, 20_000)))
            continue
        first = ((number * 10_000 + life) * 1000 + commits) * 10 + SHARED_SEEDS
        own, shared = [first + n for n in range(draws.randint(1, 6))], draws.sample(range(SHARED_SEEDS), 2)
        for each in (*own, *shared):
            store.append(example_sequence(each))
        os.write(out, json.dumps(["begin", own, shared]).encode() + b"\n")
        phase[number] = PHASES.index("commit")
        store.commit(f"writer {number}, life {life}")
        os.write(out, b'["done"]\n')
        commits += 1


def tidy(location: str, number: int, life: int, seed: int, log: pathlib.Path, phase: mmap.mmap) -> None:
    """Run gc for ever, with the writers in the middle of their work; sometimes older versions go too."""
    draws = random.Random(f"{seed}/gc/{life}")
    while True:
        phase[number] = PHASES.index("gc")
        PrefixStore.open(location, "a").gc(keep_versions=30 if draws.random() < 0.2 else None, min_age_seconds=0)
        time.sleep(draws.random() * 0.1)


def check(location: str, log: pathlib.Path, thorough: bool) -> dict:
    """Raise AssertionError unless the store holds what the logs promise. Counts what was found."""
    promised, batches = set(), []
    for file in sorted(log.iterdir()):
        # a line is written by one call, so that only the last can be cut by a kill
        lines = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
        begun = [line for line in lines if line[0] == "begin"]
        done = sum(line[0] == "done" for line in lines)
        batches += [own for _, own, _ in begun]
        promised.update(each for _, own, shared in begun[:done] for each in own + shared)
    store = PrefixStore.open(location)
    ids = store.ids()
    assert len(set(ids)) == len(ids) == len(store), f"{len(store)} sequences, {len(set(ids))} different ones"
    present = set(ids)
    identities = {each: content_hash(example_sequence(each)) for each in {s for own in batches for s in own} | promised}
    missing = [each for each in promised if identities[each] not in present]
    assert not missing, f"committed and lost: example_sequence of {missing}"
    for own in batches:
        found = [identities[each] in present for each in own]
        assert all(found) or not any(found), f"a commit is there in half: {own}"
    report = store.verify()
    assert report.ok, str(report)
    if thorough:
        for each in promised:
            assert sequences_equal(store.sequence(identities[each]), example_sequence(each)), f"{each} has changed"
        before: set[str] = set()
        for version in store.versions():
            old = PrefixStore.open(location, version=version)
            now = set(old.ids())
            assert before <= now and len(now) == len(old) and old.verify().ok, f"{version} is not what it was"
            before = now
        with PrefixStore.open(location, "a") as last:
            last.gc(min_age_seconds=0)
            info = last.info()
        assert not info["leftovers"] and not info["unreferenced"] and not info["writers"], str(info)
    return {"sequences": len(ids), "committed": len(promised), "commits": len(batches), "newest": store.version}


def forked(function, *arguments) -> int:
    """Run the function in a child process, which ends with it; its process id. The parent touches no store itself."""
    pid = os.fork()
    if pid == 0:
        try:
            function(*arguments)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
    return pid


def checked(location: str, log: pathlib.Path, thorough: bool, answer: pathlib.Path) -> None:
    """`check` in a child process."""
    pid = forked(lambda: answer.write_text(json.dumps(check(location, log, thorough))))
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        raise SystemExit(f"the store at {location} is not what was committed (see above); the logs are in {log}")


def run(location: str, kills: int, seed: int, log: pathlib.Path, *, writers: int = 3, longest: float = 0.3) -> dict:
    """Kill writers `kills` times, at most `longest` seconds after each other, and the collector beside them now and then.
    Raises SystemExit if the store is not what it must be, or if a process fails by itself."""
    started, draws = time.monotonic(), random.Random(seed)
    log.mkdir(parents=True, exist_ok=True)
    answer = log.parent / f"{log.name}.answer"
    phase = mmap.mmap(-1, writers + 1)
    lives, pids = [0] * (writers + 1), {}

    def start(number: int) -> None:
        phase[number] = 0
        function = tidy if number == writers else work
        pids[number] = forked(function, location, number, lives[number], seed, log, phase)
        lives[number] += 1

    counts = dict.fromkeys(PHASES, 0)
    try:
        for number in range(writers + 1):
            start(number)
        done = 0
        while done < kills:
            time.sleep(draws.random() * longest)
            number = draws.randrange(writers + 1)
            os.kill(pids[number], signal.SIGKILL)
            end = os.waitstatus_to_exitcode(os.waitpid(pids.pop(number), 0)[1])
            if end != -signal.SIGKILL:
                raise SystemExit(f"process {number} failed by itself (see above); the logs are in {log}")
            counts[PHASES[phase[number]]] += 1
            done += number < writers
            start(number)
            if number < writers and done % CHECK_EVERY == 0 and done < kills:
                checked(location, log, False, answer)
    finally:
        for pid in pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    checked(location, log, True, answer)
    found = json.loads(answer.read_text())
    return {"kills": kills, "seed": seed, "killed_in": counts, "seconds": round(time.monotonic() - started, 1)} | found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--location", help="folder or URL of a new store (default: a temporary folder)")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--writers", type=int, default=3)
    parser.add_argument("--longest", type=float, default=0.3, help="seconds between two kills, at most")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        location = options.location or f"{folder}/store"
        log = pathlib.Path(folder) / "log"
        print(json.dumps(run(location, options.kills, options.seed, log, writers=options.writers, longest=options.longest)))


if __name__ == "__main__":
    main()
