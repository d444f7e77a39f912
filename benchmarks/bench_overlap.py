"""What sampling beside training is worth on two cores, and whether a slow domain costs throughput.

    python benchmarks/bench_overlap.py speed    step time on two cores against max(sampling, training), each alone on one
    python benchmarks/bench_overlap.py mix      a domain whose environments are 60 times slower: exact shares, time, bound

Both train the demo's student from a finished `mopd demo` (or `--run` with base, teachers and store). Every process has one
thread; "alone" is a run without overlap on one core, whose step is its sampling (training stands still) and the rest.
Medians of `--steps` steps after `--warm` others. Where others use the machine too, its wall times say little: the CPU
seconds of the learner's process and the share of time in which it waited do. Figures: docs/performance.md, docs/mixer.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.config import load_config  # noqa: E402
from mopd.sampling.assemble import numbers_of  # noqa: E402


def run(demo: Path, place: Path, steps: int, cores: str, *changes: str) -> list[dict]:
    """Train `steps` steps on `cores`; the metrics of each."""
    config = load_config(ROOT / "configs/demo.yaml", [f"run={demo}"])
    command = ["taskset", "-c", cores, sys.executable, "-m", "mopd.cli", "train", str(ROOT / "configs/demo.yaml"),
               f"run={place}", f"store={demo}/store", f"student.model={demo}/base", f"train.steps={steps}", "threads=1",
               "train.checkpoint_every=1000", "train.selftest=false", "consistency.points=0",
               *(f"teachers.{name}.model={demo}/teachers/{name}" for name in config.teachers), *changes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {
        "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)})
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    metrics = place / "students" / "student_mixed" / "seed-1" / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()]


def median(records: list[dict], number) -> float:
    return statistics.median(number(record) for record in records)


def alone(demo: Path, place: Path, arguments) -> dict[str, float]:
    records = run(demo, place, arguments.warm + arguments.steps, "0")[arguments.warm:]
    return {"sampling": median(records, lambda r: r["seconds"]["idle"]),
            "training": median(records, lambda r: r["seconds"]["total"] - r["seconds"]["idle"]),
            "training CPU": median(records, lambda r: r["seconds"]["cpu"] - r["seconds"]["cpu_sampling"]),
            "step": median(records, lambda r: r["seconds"]["total"])}


def speed(demo: Path, arguments) -> dict:
    """Step time with overlap on two cores against the slower of its two parts, each alone on one core."""
    with tempfile.TemporaryDirectory() as place:
        one = alone(demo, Path(place) / "alone", arguments)
        records = run(demo, Path(place) / "beside", arguments.warm + arguments.steps, "0,1",
                      f"sampling.overlap={arguments.overlap}", *arguments.set)[arguments.warm:]
    step, slower = median(records, lambda r: r["seconds"]["total"]), max(one["sampling"], one["training"])
    return {**{f"{name} alone": value for name, value in one.items()}, "step with overlap": step,
            "over max(sampling, training)": step / slower, "of the step without overlap": step / one["step"],
            "CPU of the learner's process over that of training alone":
                median(records, lambda r: r["seconds"]["cpu"]) / one["training CPU"],
            "trainer idle": median(records, lambda r: r["seconds"]["idle"] / r["seconds"]["total"]),
            "samplers busy": median(records, lambda r: r["sampling"]["busy_share"]),
            "staleness": statistics.fmean(r["sampling"]["staleness_mean"] for r in records),
            "oldest token": max(r["sampling"]["staleness_max"] for r in records),
            "groups dropped": sum(sum(r["sampling"]["dropped"].values()) for r in records)}


def mix(demo: Path, arguments) -> dict:
    """One domain's environments `factor` times slower. The bound of a step: training alone, sampling alone, and by Little's
    law what the slow domain's groups take, spread over the steps that they may be in flight."""
    name = arguments.slow
    own = load_config(ROOT / "configs/demo.yaml", [f"run={demo}"]).domains[name]
    changes = [f"sampling.overlap={arguments.overlap}", f"train.max_staleness={max(4, arguments.overlap)}",
               "train.domain_schedule=static", *arguments.set]
    with tempfile.TemporaryDirectory() as place:
        one = alone(demo, Path(place) / "alone", arguments)
        records = {}
        for which, more in (("as it is", []), ("slowed", [
                f"domains.{name}.environment=benchmarks.slow_environment:family",
                f"domains.{name}.options.environment={own.environment}",
                f"domains.{name}.options.factor={arguments.factor}"])):
            records[which] = run(demo, Path(place) / which.replace(" ", "-"), arguments.warm + arguments.steps, "0,1",
                                 *changes, *more)[arguments.warm:]
    found = {}
    for which, part in records.items():
        for record in part:
            for source, words in record["sampling"]["groups"].items():
                domain, stream = source.split("/")
                if len(numbers_of(words)) != record["domains"][domain]["samples"][stream]:
                    sys.exit(f"step {record['step']}: {source} has not its share")
        seconds = statistics.fmean(r["sampling"]["sources"][f"{name}/rollout"]["seconds"] for r in part)
        bound = max(one["training"], one["sampling"], seconds / (1 + arguments.overlap))
        step = statistics.fmean(r["seconds"]["total"] for r in part)
        found[which] = {"step": step, f"a group of {name}": seconds, "bound": bound, "lost": 1 - bound / step,
                        "exact shares": True, "oldest token": max(r["sampling"]["staleness_max"] for r in part),
                        "groups dropped": sum(sum(r["sampling"]["dropped"].values()) for r in part)}
    slowed, bound = found["slowed"], max(found["as it is"]["step"], found["slowed"]["bound"])
    slowed["lost against the same run as it is, or its bound"] = 1 - bound / slowed["step"]
    return {"alone": one, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "mix"))
    parser.add_argument("--run", type=Path, default=ROOT / "runs/demo", help="a finished demo")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--overlap", type=int, default=1)
    parser.add_argument("--slow", default="embodied", help="the domain whose environments are slowed")
    parser.add_argument("--factor", type=float, default=60.0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrides of runs with overlap")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = {"speed": speed, "mix": mix}[arguments.what](arguments.run.absolute(), arguments)
    for name, value in found.items():
        shown = value if isinstance(value, dict) else {"": value}
        print(name + ": " + ", ".join(f"{key} {number:.3f}".strip() if isinstance(number, float) and math.isfinite(number)
                                      else f"{key} {number}".strip() for key, number in shown.items()))
    print("load:", " ".join(f"{x:.1f}" for x in os.getloadavg()))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
