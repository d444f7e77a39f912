"""What a nat of reverse KL costs: whole rollouts against fresh turns behind stored prefixes (and both mixed).

    python benchmarks/bench_modes.py [--run runs/demo] [--steps 60] [--every 20] [--episodes 24] [--seeds 1] [--json FILE]

Each arm trains the demo's base from a finished `mopd demo` (or `--run` with base, teachers and store), nothing but
`train.prefix_fraction` differs. At the base and every `--every` steps the student plays the same development tasks at
temperature 1, and KL(student ‖ teacher of the domain) over the whole vocabulary is averaged over the tokens that it wrote,
then over domains: the same states for no two arms, those that each student itself comes to, as the objective has it. Costs
are those of training alone: sampled tokens, wall and CPU seconds (one core, one thread), environment steps. "Per nat" is the
cost of the whole run over the decrease from base to end; "to the common level" is the cost up to where an arm comes down to
the higher one of all arms' ends, on a straight line between two measurements. What the store's trajectories cost once is
told beside it. Figures: docs/performance.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.config import load_config  # noqa: E402
from mopd.domains import close_domains, open_domains  # noqa: E402
from mopd.learner.model import load_model  # noqa: E402
from mopd.sampling.hf import HFEngine  # noqa: E402
from mopd.sampling.play import play_tasks  # noqa: E402
from mopd.sampling.rendering import ChatRenderer, load_tokenizer  # noqa: E402
from prefix_store import PrefixStore  # noqa: E402

ARMS = {"rollouts": "0", "prefixes": "1", "mixed": ""}
COSTS = {"sampled tokens": lambda r: r["tokens"]["sampled"], "seconds": lambda r: r["seconds"]["total"],
         "CPU seconds": lambda r: r["seconds"]["cpu"], "environment steps": lambda r: r["environment_steps"]}


def train(demo: Path, place: Path, arm: str, seed: int, arguments) -> tuple[list[dict], Path]:
    """Train one arm; its metrics of each step, and the student's folder with its checkpoints."""
    config = load_config(ROOT / "configs/demo.yaml", [f"run={demo}"])
    fraction = [f"train.prefix_fraction={ARMS[arm]}"] if ARMS[arm] else []
    command = ["taskset", "-c", "0", sys.executable, "-m", "mopd.cli", "train", str(ROOT / "configs/demo.yaml"),
               f"run={place}", f"store={demo}/store", f"student.model={demo}/base", f"seed={seed}",
               f"train.steps={arguments.steps}", f"train.checkpoint_every={arguments.every}",
               f"train.keep_every={arguments.every}", "threads=1", "train.selftest=false", "consistency.points=0", *fraction,
               *(f"teachers.{name}.model={demo}/teachers/{name}" for name in config.teachers)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    student = place / "students" / "student_mixed" / f"seed-{seed}"
    return [json.loads(line) for line in (student / "metrics.jsonl").read_text().splitlines()], student


def exported(student: Path, step: int, out: Path) -> Path:
    """The folder `out` with the student of one checkpoint."""
    done = subprocess.run([sys.executable, "-m", "mopd.cli", "export", str(student), "--step", str(step), "--out", str(out)],
                          cwd=ROOT, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    if done.returncode:
        sys.exit(done.stderr[-3000:])
    return out


@torch.inference_mode()
def divergence(student, teacher, sequence) -> tuple[float, int]:
    """Σ KL(student ‖ teacher) over the tokens of a sequence that the student wrote, and how many these are."""
    total, count = 0.0, 0
    for context in sequence.contexts:
        written = torch.zeros(len(context.tokens), dtype=torch.bool)
        for segment in context.segments:
            if segment.kind == "action":
                written[segment.start:segment.end] = True
        ids = torch.tensor(context.tokens.astype("int64"))[None]
        own, its = (model(input_ids=ids).logits[0, :-1].double().log_softmax(-1)[written[1:]] for model in (student, teacher))
        total += float((own.exp() * (own - its)).sum())
        count += int(written[1:].sum())
    return total, count


def measure(folder: Path, demo: Path, arguments) -> dict[str, float]:
    """Reverse KL per token of each domain, and their mean, on the student's own development episodes."""
    config = load_config(ROOT / "configs/demo.yaml", [f"run={demo}"])
    model, renderer = load_model(str(folder)), ChatRenderer(load_tokenizer(str(folder)))
    engine, opened = HFEngine(model, max_batch=32), open_domains(config, list(config.domains))
    found = {}
    try:
        for name, domain in opened.items():
            teacher = load_model(str(demo / "teachers" / name)).eval()
            played = play_tasks(engine, domain.pool, name, domain.spread("development", arguments.episodes), renderer,
                                domain.harnesses, temperature=1.0, seed=7)
            parts = [divergence(model.eval(), teacher, p.sequence) for p in played if not p.failure]
            found[name] = sum(total for total, _ in parts) / sum(count for _, count in parts)
    finally:
        close_domains(opened)
    return found | {"mean": statistics.fmean(found.values())}


def cost_at(records: list[dict], step: float) -> dict[str, float]:
    """What the first `step` steps cost; a part of a step costs its part."""
    whole = int(step)
    return {name: sum(map(of, records[:whole])) + ((step - whole) * of(records[whole]) if whole < len(records) else 0.0)
            for name, of in COSTS.items()}


def reached(curve: dict[int, float], level: float) -> float:
    """The step at which a curve first comes down to `level`."""
    steps = sorted(curve)
    for before, after in zip(steps, steps[1:], strict=False):
        if curve[after] <= level:
            return before + (after - before) * (curve[before] - level) / (curve[before] - curve[after])
    return float(steps[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=ROOT / "runs/demo", help="a finished demo")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=24, help="development episodes of each domain at each measurement")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.steps % arguments.every:
        parser.error("--steps must be a multiple of --every")
    demo = arguments.run.absolute()
    torch.set_num_threads(1)
    base = measure(demo / "base", demo, arguments)
    print("base: " + ", ".join(f"{name} {value:.3f}" for name, value in base.items()), flush=True)
    found = []
    for seed in range(1, arguments.seeds + 1):
        for arm in ARMS:
            with tempfile.TemporaryDirectory() as place:
                records, student = train(demo, Path(place), arm, seed, arguments)
                values = {0: base}
                for step in range(arguments.every, arguments.steps + 1, arguments.every):
                    last = step == arguments.steps
                    folder = student / "model" if last else exported(student, step, Path(place) / f"step-{step}")
                    values[step] = measure(folder, demo, arguments)
            curve = {step: value["mean"] for step, value in values.items()}
            found.append({"arm": arm, "seed": seed, "reverse_kl": values, "curve": curve, "steps": records,
                          "costs": cost_at(records, arguments.steps)})
            print(f"{arm}, seed {seed}: " + ", ".join(f"{step}: {value:.3f}" for step, value in curve.items()), flush=True)
    level = max(run["curve"][arguments.steps] for run in found)
    print(f"\n| arm | seed | reverse KL, {arguments.steps} steps | " + " | ".join(f"{c} per nat" for c in COSTS)
          + f" | steps to {level:.3f} | " + " | ".join(f"{c} to {level:.3f}" for c in COSTS) + " |")
    print("| --- |" + " ---: |" * (3 + 2 * len(COSTS)))
    for run in found:
        decrease = base["mean"] - run["curve"][arguments.steps]
        step = reached(run["curve"], level)
        run |= {"level": level, "steps to level": step, "costs to level": cost_at(run.pop("steps"), step),
                "per nat": {name: cost / decrease if decrease > 0 else float("inf") for name, cost in run["costs"].items()}}
        print(f"| {run['arm']} | {run['seed']} | {run['curve'][arguments.steps]:.3f} | "
              + " | ".join(f"{value:,.0f}" for value in run["per nat"].values()) + f" | {step:.0f} | "
              + " | ".join(f"{value:,.0f}" for value in run["costs to level"].values()) + " |")
    with PrefixStore.open(demo / "store") as store:
        info = store.info()
    print(f"\nthe store: {info['sequences']:,} trajectories, {info['decision_points']:,} turns in environments, played once")
    print("load:", " ".join(f"{x:.1f}" for x in os.getloadavg()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"base": base, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
