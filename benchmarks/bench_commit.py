"""What a commit, opening, info() and gc cost in a store of many segments and versions.

    python benchmarks/bench_commit.py --segments 1000

Seconds on the clock (median) and of the processor, since a commit mostly waits for the device.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable

from prefix_store import PrefixStore
from prefix_store.building import SegmentBuilder, prepare
from prefix_store.trajectory import example_sequence
from prefix_store.versions import manifest_bytes, next_manifest, read_version
from prefix_store.writer import Change, Staged, transact


def timed(function: Callable[[], object], times: int = 1) -> dict[str, float]:
    """Median milliseconds of a call, by the clock and of the processor."""
    wall, cpu = [], []
    for _ in range(times):
        a, b = time.perf_counter(), time.process_time()
        function()
        wall.append(time.perf_counter() - a)
        cpu.append(time.process_time() - b)
    return {"ms": round(1000 * statistics.median(wall), 1), "cpu_ms": round(1000 * statistics.median(cpu), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--segments", type=int, default=1000)
    parser.add_argument("--commits", type=int, default=10, help="commits to time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "store"
        store = PrefixStore.open(path, "w")
        made = 0
        while made < options.segments:  # some at a time: only the version's file costs what many commits would have cost
            some = min(25, options.segments - made)
            staged = []
            for seed in range(made, made + some):
                building = SegmentBuilder()
                building.add(prepare(example_sequence(seed)))
                staged.append(Staged.of(building))
            transact(store, lambda base, staged=staged: Change(staged, "filling"))
            made += some

        seeds = iter(range(10**6, 10**7))
        store = PrefixStore.open(path, "a")
        store.append(example_sequence(next(seeds)))

        def commit() -> None:
            store.append(example_sequence(next(seeds)))
            store.commit()

        print(json.dumps({"segments": options.segments, "versions": len(store.versions())}))
        manifest = read_version(store.storage, None)
        print("write a manifest", json.dumps(timed(lambda: manifest_bytes(next_manifest(manifest, added=[], message="")), 5)))
        print("read a manifest", json.dumps(timed(lambda: read_version(store.storage, None), 5)))
        print("commit", json.dumps(timed(commit, options.commits)))
        print("open", json.dumps(timed(lambda: PrefixStore.open(path), 5)))
        print("first index", json.dumps(timed(lambda: PrefixStore.open(path).index())))
        print("open and index", json.dumps(timed(lambda: PrefixStore.open(path).index(), 5)))
        print("info", json.dumps(timed(lambda: PrefixStore.open(path).info(), 3)))
        print("gc, dry run", json.dumps(timed(lambda: store.gc(dry_run=True), 3)))
        print("compact", json.dumps(timed(store.compact)), json.dumps(store.compaction.to_dict()))
        print("gc to one version", json.dumps(timed(lambda: store.gc(keep_versions=1, min_age_seconds=0))))
        size = (path / "versions" / f"{store.version}.json").stat().st_size
        print(json.dumps({"segments": len(store.info()["segment_names"]), "bytes of the newest version's file": size}))


if __name__ == "__main__":
    main()
