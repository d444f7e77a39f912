"""Kill a training run at random instants and go on, again and again; then look whether it is the uninterrupted run.

    OMP_NUM_THREADS=1 python scripts/kill_train.py --rounds 50 --seed 0 [--minutes 30] [--folder FOLDER] [--markdown]

Trains the tests' tiny recipe once without a kill. Then each round starts the same command, kills it with SIGKILL (in every
second round while it writes a checkpoint, else at a random time after its start) and notes what lay on the disk. A run that
ended before it could be killed is compared and begun anew. At the end the last run is led to its end and compared too: every
step once in metrics.jsonl, every number of every step equal to the bit (but for clocks), all weights equal. Prints a table
(--markdown: for documents) and a summary; exit status 1 where anything differs. About half a minute a round on two cores;
after --minutes no further round begins.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from mopd.learner.checkpoint import checkpoints, damage  # noqa: E402
from tests.tiny_run import TinyRun, make_tiny_run, mopd, records, same_weights, start_mopd  # noqa: E402

CHANGES = ["train.checkpoint_every=1", "train.group_size=2", "train.fresh_turns=2", "consistency.points=0",
           "train.selftest=false"]


class Lost(AssertionError):
    """A run that was killed is not the uninterrupted one; the message says where."""


def command(tiny: TinyRun, run: Path, changes: list[str]) -> list:
    return ["train", tiny.path, f"run={run}", *changes]


def student(run: Path) -> Path:
    return run / "students" / "student_mixed" / "seed-1"


def straight(tiny: TinyRun, run: Path, changes: list[str]) -> float:
    """The run that nobody kills; returns its wall seconds."""
    start = time.monotonic()
    done = mopd(*command(tiny, run, changes))
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return time.monotonic() - start


def round_of(tiny: TinyRun, run: Path, changes: list[str], draws: random.Random, seconds: float, saving: bool) -> dict:
    """Start, kill, and look. `seconds`: what the whole run takes, for the instant; `saving`: kill it while it saves."""
    before = _state(run)
    process = start_mopd(*command(tiny, run, changes), log=run.with_suffix(".log"))
    began = time.time()  # what an earlier kill left is older
    start, wait = time.monotonic(), draws.uniform(0.1, 1.0) * seconds
    skip, extra = draws.randrange(3), draws.uniform(0, 0.02)  # which save of this process, and how far into it
    seen, inside = 0, False
    while process.poll() is None and time.monotonic() - start < (600 if saving else wait):
        if saving:
            writing = any(_newer(path, began) for path in student(run).glob("checkpoints/*/.step-*.writing"))
            seen, inside = seen + (writing and not inside), writing
            if seen > skip:
                time.sleep(extra)
                break
            time.sleep(0.0005)
        else:
            time.sleep(0.005)
    process.kill()
    ended = process.wait()
    after = _state(run)
    return {"killed": ended == -signal.SIGKILL, "ended": ended, "seconds": time.monotonic() - start, "saving": saving,
            "went on from": before["checkpoint"], "written": after["written"], "half": after["half"],
            "checkpoint": after["checkpoint"]}


def _newer(path: Path, began: float) -> bool:
    try:
        return path.stat().st_ctime > began
    except FileNotFoundError:  # it has got its name, or is removed
        return False


def _state(run: Path) -> dict:
    """What lies there when a process is dead: steps in the metrics, the newest checkpoint, half-written ones (also of kills
    before)."""
    folder = student(run)
    sound = [(step, path) for own in folder.glob("checkpoints/[!.]*") for step, path in checkpoints(own)]
    for step, path in sound:
        if words := damage(path):
            raise Lost(f"the checkpoint of step {step} has its name and is damaged: {words}")
    return {"written": len(records(folder)) if (folder / "metrics.jsonl").is_file() else 0,
            "half": len(list(folder.glob("checkpoints/*/.step-*"))), "checkpoint": max((s for s, _ in sound), default=0)}


def compare(first: Path, second: Path) -> None:
    """Raise Lost where two finished runs differ."""
    one, other = records(student(first)), records(student(second))
    if [record["step"] for record in other] != list(range(len(one))):
        raise Lost(f"metrics.jsonl has the steps {[record['step'] for record in other]}")
    for a, b in zip(one, other, strict=True):
        if a != b:
            keys = [key for key in a if a[key] != b.get(key)]
            raise Lost(f"step {a['step']} differs in {keys}: {a[keys[0]]} and {b.get(keys[0])}")
    if not same_weights(student(first) / "model", student(second) / "model"):
        raise Lost("the weights differ")


def rounds(tiny: TinyRun, folder: Path, *, number: int, seed: int, changes: list[str], say=print,
           uninterrupted: tuple[Path, float] | None = None, minutes: float = float("inf")) -> dict:
    """All of it, with the recipe's `changes`; `uninterrupted` is a run that was not killed and its wall seconds, if it was
    made already; no round begins after `minutes`. Returns {"rounds": [of round_of], "runs": finished and compared}. Raises
    Lost."""
    draws = random.Random(seed)
    whole, seconds = uninterrupted or (folder / "straight", straight(tiny, folder / "straight", changes))
    say(f"the uninterrupted run: {seconds:.0f} s")
    done: list[dict] = []
    runs = 0
    run = folder / "run-0"
    until = time.monotonic() + 60 * minutes
    while len(done) < number and time.monotonic() < until:
        found = round_of(tiny, run, changes, draws, seconds, saving=len(done) % 2 == 1)
        if found["killed"]:
            done.append(found)
            say(f"round {len(done)}: {json.dumps(found)}")
            continue
        if found["ended"]:
            raise Lost(f"a resumed run ended with status {found['ended']}: {run.with_suffix('.log').read_text()[-3000:]}")
        compare(whole, run)
        runs += 1
        shutil.rmtree(run)
        run = folder / f"run-{runs}"
    last = mopd(*command(tiny, run, changes))
    if last.returncode:
        raise Lost(f"the last start ended with status {last.returncode}: {last.stderr[-3000:]}")
    compare(whole, run)
    return {"rounds": done, "runs": runs + 1}


def table(result: dict) -> str:
    lines = ["| round | went on from step | killed after | while | steps in the metrics | newest checkpoint | half-written |",
             "| ---: | ---: | ---: | --- | ---: | ---: | ---: |"]
    for number, r in enumerate(result["rounds"], 1):
        lines.append(f"| {number} | {r['went on from']} | {r['seconds']:.1f} s | {'saving' if r['saving'] else 'anything'} | "
                     f"{r['written']} | {r['checkpoint']} | {r['half']} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=float("inf"))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where the runs are kept; by default a temporary folder")
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        (folder / "tiny").mkdir(parents=True)
        tiny = make_tiny_run(folder / "tiny")
        try:
            result = rounds(tiny, folder, number=options.rounds, seed=options.seed,
                            changes=[*CHANGES, f"train.steps={options.steps}"], minutes=options.minutes,
                            say=lambda text: print(text, file=sys.stderr, flush=True))
        except Lost as lost:
            print(f"FAILED: {lost}")
            return 1
    half = sum(r["half"] > 0 for r in result["rounds"])
    print(table(result) if options.markdown else json.dumps(result["rounds"], indent=1))
    kills, runs = len(result["rounds"]), result["runs"]
    print(f"{kills} kills, {half} of them with a half-written checkpoint on the disk; {runs} run(s) of "
          f"{options.steps} steps led to their end, all equal to the uninterrupted run (Python {platform.python_version()})")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
