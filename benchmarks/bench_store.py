"""How fast and how large is the prefix store, beside Parquet, LMDB and one growing Zarr array? All in one run.

    pip install -c constraints.txt -e ".[benchmarks]"
    python benchmarks/bench_store.py --quick                  # less than a minute
    python benchmarks/bench_store.py --full --json bench.json # a million decision points; some 10 GB of disk for a while

Every back end gets the same sequences and is asked for the same prefixes, in turn, so that what else the machine does hurts
all of them alike; read the ratios rather than the figures. Beside the time that passed stands the CPU time of the process,
all its threads together, which a busy machine changes less. The store checks, hashes, checksums and flushes what it
takes, and keeps segments, records and an index; the others only store what they are given. Each is flushed to the device at
every commit, as the store is:

- Parquet: a file per commit, zstd, row groups of 32 sequences; a read takes one row group of the column `tokens`
- LMDB: one environment, a key per sequence and column, raw bytes; a transaction per commit
- Zarr: one growing array per column, packed as the store packs it and flushed by as many threads, appended to at each
  commit; chunks of 32,768 tokens; where a sequence begins is kept in memory only
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import numpy as np

from prefix_store import PrefixStore
from prefix_store.building import CODECS
from prefix_store.disk import SYNC_THREADS
from prefix_store.trajectory import Context, DecisionPoint, Fingerprint, Outcome, Segment, Sequence, Source

TURNS, ACTION_TOKENS, VOCABULARY = 8, 50, 50_000
ROW_GROUP = 32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """append: sequences of the append test, `tokens` each, in commits of `commit`; points: the numbers of decision points to
    read from, in sequences of `read_tokens`; reads: prefixes read; segments: commits of the opening test; writers: sequences
    of the test with several writers."""

    append: int
    tokens: int
    commit: int
    points: tuple[int, ...]
    read_tokens: int
    reads: int
    segments: int
    writers: int


SIZES = {
    "tiny": Sizes(20, 200, 10, (80, 160), 200, 10, 20, 8),
    "quick": Sizes(1_000, 2_000, 250, (2_000, 20_000), 1_000, 300, 100, 400),
    "full": Sizes(10_000, 2_000, 500, (10_000, 1_000_000), 1_000, 2_000, 1_000, 4_000),
}


def make_sequences(count: int, tokens: int, seed: int) -> list[Sequence]:
    """`count` sequences of `tokens` tokens with TURNS turns; ids are Zipf-distributed as those of text are."""
    rng = np.random.default_rng(seed)
    prompt = tokens // 5
    turn = (tokens - prompt) // TURNS
    action = min(ACTION_TOKENS, turn // 2)
    segments = [Segment("prompt", 0, prompt, -1)]
    written = np.zeros(tokens, dtype=bool)
    for number in range(TURNS):
        start = prompt + number * turn
        end = tokens if number == TURNS - 1 else start + turn
        segments += [Segment("action", start, start + action, number, "teacher")]
        segments += [Segment("observation", start + action, end, number)]
        written[start : start + action] = True
    out = []
    for number in range(count):
        ids = ((rng.zipf(1.2, tokens) - 1) % VOCABULARY).astype(np.uint32)
        logprob = np.where(written, -rng.exponential(0.5, tokens), np.nan).astype(np.float32)
        context = Context(ids, logprob, np.where(written, 3, -1).astype(np.int32), tuple(segments))
        actions = tuple(f"go to object {number} in room {t}" for t in range(TURNS))
        source, fingerprint = Source("teacher", "bench_teacher", "r1"), Fingerprint("bench", "bench", "bench")
        outcome = Outcome(1.0, 1.0, True)
        fields = ("game", f"task-{number % 100}", "bench", "1.0", seed * 1_000_000 + number, "train")
        out.append(Sequence(*fields, (context,), actions, outcome, source, fingerprint))
    return out


def batches(count: int, tokens: int, commit: int, base: int = 2_000) -> Iterator[list[Sequence]]:
    """`count` sequences in lists of `commit`: `base` different ones, and then those again with one token changed."""
    made = make_sequences(min(count, base), tokens, 1)
    for start in range(0, count, commit):
        batch = []
        for number in range(start, min(start + commit, count)):
            seq = made[number % len(made)]
            if number >= len(made):
                context = seq.contexts[0]
                ids = context.tokens.copy()
                ids[number % tokens] = number // len(made)
                seq = dataclasses.replace(seq, contexts=(dataclasses.replace(context, tokens=ids),), seed=number)
            batch.append(seq)
        yield batch


def action_starts(seq: Sequence) -> list[int]:
    return [s.start for s in seq.contexts[0].segments if s.kind == "action"]


# ---------------------------------------------------------------------------------------------------------------
# Back ends: add a batch and make it durable; read the first `stop` tokens of sequence `number`.


class Store:
    name = "prefix store"

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self.store = PrefixStore.open(folder, "w")
        self.ids: list[str] = []

    def add(self, batch: list[Sequence]) -> None:
        self.ids += [self.store.append(seq) for seq in batch]
        self.store.commit()

    def reader(self) -> Store:
        self.store.close()
        self.store = PrefixStore.open(self.folder)
        self.store.index()
        return self

    def prefix(self, number: int, turn: int, stop: int) -> np.ndarray:
        return self.store.prefix(DecisionPoint(self.ids[number], 0, turn))


class Parquet:
    name = "Parquet, zstd"

    def __init__(self, folder: pathlib.Path):
        import pyarrow
        import pyarrow.parquet

        self.arrow, self.parquet, self.folder = pyarrow, pyarrow.parquet, folder
        folder.mkdir()
        self.commit, self.files = 0, {}

    def add(self, batch: list[Sequence]) -> None:
        pa = self.arrow
        contexts = [seq.contexts[0] for seq in batch]
        offsets = np.concatenate([[0], np.cumsum([len(c.tokens) for c in contexts])]).astype(np.int32)

        def column(name: str) -> object:
            return pa.ListArray.from_arrays(offsets, pa.array(np.concatenate([getattr(c, name) for c in contexts])))

        starts = pa.array([action_starts(seq) for seq in batch], pa.list_(pa.int32()))
        columns = {name: column(name) for name in ("tokens", "behaviour_logprob", "weights_version")}
        table = pa.table(columns | {"actions": pa.array([list(seq.actions) for seq in batch]), "starts": starts})
        path = self.folder / f"{len(os.listdir(self.folder)):06d}.parquet"
        self.parquet.write_table(table, path, compression="zstd", row_group_size=ROW_GROUP)
        _flush(path)
        self.commit = max(self.commit, len(batch))

    def reader(self) -> Parquet:
        return self

    def prefix(self, number: int, turn: int, stop: int) -> np.ndarray:
        file, row = divmod(number, self.commit)
        if file not in self.files:
            self.files[file] = self.parquet.ParquetFile(self.folder / f"{file:06d}.parquet", memory_map=True)
        group, row = divmod(row, ROW_GROUP)
        table = self.files[file].read_row_group(group, columns=["tokens"], use_threads=False)
        return table.column(0).chunk(0)[row].values.to_numpy()[:stop]


class Lmdb:
    name = "LMDB"

    def __init__(self, folder: pathlib.Path):
        import lmdb

        self.environment = lmdb.open(str(folder), map_size=1 << 36, max_dbs=4)
        names = ("tokens", "behaviour_logprob", "weights_version", "about")
        self.tables = {name: self.environment.open_db(name.encode()) for name in names}
        self.count = 0

    def add(self, batch: list[Sequence]) -> None:
        with self.environment.begin(write=True) as transaction:
            for seq in batch:
                key = self.count.to_bytes(8, "big")
                for name in ("tokens", "behaviour_logprob", "weights_version"):
                    transaction.put(key, getattr(seq.contexts[0], name).tobytes(), db=self.tables[name], append=True)
                about = json.dumps([seq.actions, action_starts(seq)]).encode()
                transaction.put(key, about, db=self.tables["about"], append=True)
                self.count += 1

    def reader(self) -> Lmdb:
        self.transaction = self.environment.begin(db=self.tables["tokens"], buffers=True)
        return self

    def prefix(self, number: int, turn: int, stop: int) -> np.ndarray:
        value = self.transaction.get(number.to_bytes(8, "big"))
        return np.frombuffer(value, dtype=np.uint32, count=stop).copy()


class GrowingZarr:
    name = "growing Zarr array"

    def __init__(self, folder: pathlib.Path):
        import zarr

        group = zarr.open_group(folder, mode="w")
        types = {"tokens": np.uint32, "behaviour_logprob": np.float32, "weights_version": np.int32}
        self.arrays = {}
        for name, dtype in types.items():
            codec = zarr.codecs.BloscCodec(cname=CODECS.get(name, "zstd"), clevel=1, shuffle="shuffle")
            self.arrays[name] = group.create_array(name, shape=(0,), chunks=(32_768,), dtype=dtype, compressors=[codec])
        self.folder, self.starts = folder, [0]

    def add(self, batch: list[Sequence]) -> None:
        before = self.starts[-1]
        for name, array in self.arrays.items():
            array.append(np.concatenate([getattr(seq.contexts[0], name) for seq in batch]))
        self.starts += [before + int(n) for n in np.cumsum([len(seq.contexts[0].tokens) for seq in batch])]
        chunks = range(before // 32_768, self.starts[-1] // 32_768 + 1)
        files = [self.folder / name / "c" / str(chunk) for name in self.arrays for chunk in chunks]
        files += [self.folder / name / "zarr.json" for name in self.arrays]
        with concurrent.futures.ThreadPoolExecutor(SYNC_THREADS) as pool:
            list(pool.map(_flush, files))

    def reader(self) -> GrowingZarr:
        return self

    def prefix(self, number: int, turn: int, stop: int) -> np.ndarray:
        return self.arrays["tokens"][self.starts[number] : self.starts[number] + stop]


BACKENDS = (Store, Parquet, Lmdb, GrowingZarr)


def _flush(path: pathlib.Path) -> None:
    if not path.exists():
        return
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def bytes_of(folder: pathlib.Path) -> int:
    """Bytes that the files take on the device (LMDB's file has holes)."""
    return sum(512 * f.stat().st_blocks for f in folder.rglob("*") if f.is_file())


# ---------------------------------------------------------------------------------------------------------------
# Tests


def _clocks() -> np.ndarray:
    """Seconds that passed, and CPU seconds of this process."""
    return np.array([time.perf_counter(), time.process_time()])


def fill(folder: pathlib.Path, count: int, tokens: int, commit: int) -> tuple[list, dict[str, np.ndarray], list[int]]:
    """Every back end with the same sequences, filled in turn; both clocks by name, and where the actions of one begin."""
    folder.mkdir(parents=True)
    backends = [make(folder / make.__name__) for make in BACKENDS]
    seconds = {b.name: np.zeros(2) for b in backends}
    starts: list[int] = []
    for number, batch in enumerate(batches(count, tokens, commit)):
        starts = starts or action_starts(batch[0])
        for backend in backends[number % 4 :] + backends[: number % 4]:
            begin = _clocks()
            backend.add(batch)
            seconds[backend.name] += _clocks() - begin
    return backends, seconds, starts


def bench_append(folder: pathlib.Path, sizes: Sizes) -> dict:
    backends, seconds, _ = fill(folder, sizes.append, sizes.tokens, sizes.commit)
    payload = 4 * sizes.append * sizes.tokens
    rates = {name: payload / spent / 1e6 for name, spent in seconds.items()}
    out: dict = {name: {"MB_per_s": float(r[0]), "MB_per_cpu_s": float(r[1])} for name, r in rates.items()}
    for backend, make in zip(backends, BACKENDS, strict=True):
        out[backend.name]["bytes"] = bytes_of(folder / make.__name__)
    return {"payload_bytes": payload, "sequences": sizes.append, "tokens": sizes.tokens, "by": out}


def bench_reads(folder: pathlib.Path, points: int, sizes: Sizes) -> dict:
    count = points // TURNS
    backends, _, starts = fill(folder, count, sizes.read_tokens, sizes.commit)
    readers = [backend.reader() for backend in backends]
    rng = np.random.default_rng(7)
    times: dict[str, list[np.ndarray]] = {b.name: [] for b in readers}
    for number in range(-20, sizes.reads):  # the first ones warm up
        sequence, turn = int(rng.integers(count)), int(rng.integers(TURNS))
        answers = []
        for reader in readers[number % 4 :] + readers[: number % 4]:
            begin = _clocks()
            answers.append(reader.prefix(sequence, turn, starts[turn]))
            if number >= 0:
                times[reader.name].append(_clocks() - begin)
        assert all(np.array_equal(answers[0], other) for other in answers[1:]), (sequence, turn)
    by: dict = {}
    for name, spent in times.items():
        (p50, cpu50), (p95, cpu95) = (1e6 * np.quantile(spent, q, axis=0) for q in (0.5, 0.95))
        by[name] = {"p50_us": float(p50), "p95_us": float(p95), "p50_cpu_us": float(cpu50), "p95_cpu_us": float(cpu95)}
    for backend, make in zip(backends, BACKENDS, strict=True):
        by[backend.name]["bytes"] = bytes_of(folder / make.__name__)
    store = folder / Store.__name__
    return {"points": count * TURNS, "tokens": sizes.read_tokens, "by": by, "reader": run_worker("read", store, sizes.reads)}


def bench_open(folder: pathlib.Path, sizes: Sizes) -> dict:
    """Open a store of many segments and read a first prefix: just after its last commit, and then again."""
    with PrefixStore.open(folder, "w") as store:
        for seed in range(sizes.segments):
            for seq in make_sequences(2, 200, 10 + seed):
                store.append(seq)
            store.commit()
    times = []
    for _ in range(8):
        begin = _clocks()
        store = PrefixStore.open(folder)
        store.prefix(store.decision_points()[-1])
        times.append(1e3 * (_clocks() - begin))
    (first, first_cpu), (later, later_cpu) = times[0], np.median(times[1:], axis=0)
    out = {"first_ms": float(first), "first_cpu_ms": float(first_cpu), "ms": float(later), "cpu_ms": float(later_cpu)}
    return {"segments": store.info()["segments"]} | out


def bench_writers(folder: pathlib.Path, sizes: Sizes) -> dict:
    out = {}
    for writers in (1, 2, 4):
        path = folder / f"writers-{writers}"
        PrefixStore.open(path, "w").close()
        share = sizes.writers // writers
        processes = [_worker("write", path, share, sizes.tokens, n) for n in range(writers)]
        for process in processes:
            process.stdout.readline()
        begin = time.perf_counter()
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in processes:
            process.communicate()
            assert process.returncode == 0
        seconds = time.perf_counter() - begin
        assert len(PrefixStore.open(path)) == writers * share
        out[str(writers)] = {"seconds": seconds, "MB_per_s": 4 * writers * share * sizes.tokens / seconds / 1e6}
    return out


# ---------------------------------------------------------------------------------------------------------------
# Processes


def _worker(what: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, __file__, "--worker", what, *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def run_worker(what: str, *arguments: object) -> dict:
    out, _ = (process := _worker(what, *arguments)).communicate()
    assert process.returncode == 0
    return json.loads(out)


def worker_write(path: str, count: str, tokens: str, seed: str) -> None:
    """Append `count` sequences in commits of 250, when told to."""
    sequences = make_sequences(int(count), int(tokens), 100 + int(seed))
    print("ready", flush=True)
    sys.stdin.readline()
    with PrefixStore.open(path, "a") as store:
        for start in range(0, len(sequences), 250):
            for seq in sequences[start : start + 250]:
                store.append(seq)
            store.commit()


def worker_read(path: str, count: str) -> None:
    """Read random prefixes; say how much memory that took (MiB), and how much of it is not mapped files."""
    before = _memory()
    store = PrefixStore.open(path)
    points = store.decision_points()
    rng = np.random.default_rng(3)
    for row in rng.integers(0, len(points), int(count)):
        store.prefix(points[int(row)])
    now = _memory()
    print(json.dumps({"peak_MiB": now["VmHWM"], "after_import_MiB": before["VmHWM"], "unmapped_MiB": now["RssAnon"]}))


def _memory() -> dict[str, float]:
    """This process's peak and present memory in MiB, as Linux tells them."""
    lines = (line.split() for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return {words[0][:-1]: int(words[1]) / 1024 for words in lines if words[0] in ("VmHWM:", "RssAnon:")}


# ---------------------------------------------------------------------------------------------------------------
# Report


def machine() -> dict:
    """What it ran on."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor()
    import lmdb
    import pyarrow
    import zarr

    versions = {"python": platform.python_version(), "numpy": np.__version__, "zarr": zarr.__version__}
    versions |= {"pyarrow": pyarrow.__version__, "lmdb": lmdb.__version__}
    load = os.getloadavg()[0]
    return {"cpu": cpu, "cores": os.cpu_count(), "load": load, "system": platform.system(), "versions": versions}


def table(result: dict) -> str:
    """The result as Markdown."""
    here = result["machine"]
    lines = [f"{here['cpu']}, {here['cores']} cores, load {here['load']:.1f} at the start", ""]
    names = [make.name for make in BACKENDS]
    lines += ["| | " + " | ".join(names) + " |", "| --- " * (1 + len(names)) + "|"]
    append = result["append"]
    what = f"append {append['sequences']:,} × {append['tokens']:,} tokens, MB/s of token ids"
    for title, rate in ((what, "MB_per_s"), ("… per second of CPU time", "MB_per_cpu_s")):
        lines.append(f"| {title} | " + " | ".join(f"{append['by'][n][rate]:.1f}" for n in names) + " |")
        wide = "… with log-probabilities and versions (12 bytes a token)"
        lines.append(f"| {wide} | " + " | ".join(f"{3 * append['by'][n][rate]:.1f}" for n in names) + " |")
    raw = 3 * append["payload_bytes"]
    sizes = (f"{append['by'][n]['bytes'] / raw:.3f}" for n in names)
    lines.append("| … bytes on disk / raw bytes | " + " | ".join(sizes) + " |")
    for reads in result["reads"]:
        what = f"prefix from {reads['points']:,} points, p50 / p95 µs"
        for title, p50, p95 in ((what, "p50_us", "p95_us"), ("… CPU time, µs", "p50_cpu_us", "p95_cpu_us")):
            cells = (f"{reads['by'][n][p50]:.0f} / {reads['by'][n][p95]:.0f}" for n in names)
            lines.append(f"| {title} | " + " | ".join(cells) + " |")
        lines.append("| … MB on disk | " + " | ".join(f"{reads['by'][n]['bytes'] / 1e6:.1f}" for n in names) + " |")
    lines.append("")
    opened = result["open"]
    lines.append(f"- open {opened['segments']:,} segments and read a first prefix: {opened['ms']:.1f} ms "
                 f"({opened['cpu_ms']:.1f} of CPU time); the first reader after the last commit: {opened['first_ms']:.1f} "
                 f"({opened['first_cpu_ms']:.1f})")  # fmt: skip
    rates = ", ".join(f"{n}: {w['MB_per_s']:.1f} MB/s" for n, w in result["writers"].items())
    lines.append(f"- writer processes at once: {rates}")
    for reads in result["reads"]:
        r = reads["reader"]
        lines.append(f"- reader of {reads['points']:,} points: peak {r['peak_MiB']:.0f} MiB ({r['after_import_MiB']:.0f} "
                     f"after importing), {r['unmapped_MiB']:.0f} MiB of it without mapped files")  # fmt: skip
    return "\n".join(lines)


def run(sizes: Sizes, folder: pathlib.Path, say: Callable[[str], None], save: Callable[[dict], None]) -> dict:
    """All tests in a folder, which is emptied after each; plain JSON data, given to `save` after each test too."""
    result: dict = {"machine": machine(), "sizes": dataclasses.asdict(sizes), "reads": []}
    tests = [("append", lambda at: bench_append(at, sizes))]
    tests += [("open", lambda at: bench_open(at, sizes)), ("writers", lambda at: bench_writers(at, sizes))]
    tests += [(f"reads-{n}", lambda at, n=n: bench_reads(at, n, sizes)) for n in sizes.points]
    for name, test in tests:
        begin = time.perf_counter()
        at = folder / name
        try:
            found = test(at)
        finally:
            shutil.rmtree(at, ignore_errors=True)
        if name.startswith("reads-"):
            result["reads"].append(found)
        else:
            result[name] = found
        say(f"{name}: {time.perf_counter() - begin:.1f} s")
        save(result)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for size in SIZES:
        parser.add_argument(f"--{size}", dest="size", action="store_const", const=size)
    parser.add_argument("--json", type=pathlib.Path, help="write the result there too")
    parser.add_argument("--folder", type=pathlib.Path, help="where to work (a folder of its own is made in it)")
    parser.set_defaults(size="quick")
    arguments = parser.parse_args()

    def save(result: dict) -> None:
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="bench_store-", dir=arguments.folder) as folder:
        result = run(SIZES[arguments.size], pathlib.Path(folder), say, save)
    print(table(result))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        {"write": worker_write, "read": worker_read}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
