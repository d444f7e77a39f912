"""The prefix study: every combination of the levels of some factors, trained on stored prefixes and evaluated.

    factors × seeds ─▶ runs ─▶ a few processes, each: train run after run, then let the new students play ─▶ tables

A run (an arm with a seed) that is done is not made again. Says which runs there are and in which order; training is
`mopd.run`, held-out play is `mopd.evaluate`, the tables are `mopd.report_factors`.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import gc
import hashlib
import itertools
import json
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from mopd.config import Config, ConfigError, StudyPrefixConfig, load_config
from mopd.demo import SECONDS, Stages, evaluation_reads, evaluation_seconds, finish_run, student_reads
from mopd.pipeline import Job, Pipeline
from mopd.report_factors import STUDY_FILE

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
RECIPE, QUICK = CONFIGS / "study_prefix.yaml", CONFIGS / "study_prefix_quick.yaml"
FOLDER = "study-prefix"
# Part of a run's key: raise it when what a run does changes without any key of the config.
VERSION = 1


@dataclasses.dataclass(frozen=True)
class Arm:
    """One combination: its name, its level of every factor, and the overrides that make it."""

    name: str
    levels: dict[str, str]
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Run:
    """An arm with a training seed. `key` stands for everything that its result depends on."""

    arm: Arm
    seed: int
    key: str

    @property
    def name(self) -> str:
        """As evaluations and tables know it: ARM@SEED."""
        return f"{self.arm.name}@{self.seed}"


def plan_arms(study: StudyPrefixConfig) -> list[Arm]:
    """All combinations of one level of each factor, the last factor's level changing fastest, of those that fit
    `study.only`. Raises ConfigError for factors without levels, names that no folder can have or that two arms share, and
    patterns that fit no arm."""
    errors = [f"study_prefix.factors.{name}: has no levels; write LEVEL: [key=value, ...]"
              for name, levels in study.factors.items() if not levels]
    if not study.factors:
        errors.append("study_prefix.factors: empty; write FACTOR: {LEVEL: [key=value, ...]}, or include study_prefix.yaml")
    for factor, levels in study.factors.items():
        # Names of arms become folders, and ARM@SEED.DOMAIN.json.
        errors += [f"study_prefix.factors.{factor}: level {level!r} needs a name of letters, digits, '_' and '.'"
                   for level in levels if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.]*", level)]
    if errors:
        raise ConfigError("; ".join(errors), errors)
    arms = []
    for levels in itertools.product(*study.factors.values()):
        chosen = dict(zip(study.factors, levels, strict=True))
        own = [item for factor, level in chosen.items() for item in study.factors[factor][level]]
        arms.append(Arm("-".join(levels), chosen, (*study.common, *own)))
    names = [arm.name for arm in arms]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        errors.append(f"study_prefix.factors: several arms would be called {', '.join(twice)}; rename levels")
    errors += [f"study_prefix.only: no arm fits {pattern!r}; there is {', '.join(names)}"
               for pattern in study.only if not fnmatch.filter(names, pattern)]
    if errors:
        raise ConfigError("; ".join(errors), errors)
    return [arm for arm in arms if not study.only or any(fnmatch.fnmatchcase(arm.name, p) for p in study.only)]


def run_study_prefix(path: Path | None, overrides: list[str], *, quick: bool, fresh: bool,
                     console: Console | None = None) -> dict:
    """Train and evaluate every arm of `study_prefix` on the demo's base, teachers and store; returns the results, which
    are in RUN/study-prefix. What is there already is reused; `fresh` forgets the study's own runs (not the demo's)."""
    console = console or Console(stderr=True, highlight=False)
    path = path or (QUICK if quick else RECIPE)
    config = load_config(path, overrides)
    study, out = config.study_prefix, study_folder(config)
    arms = plan_arms(study)
    if fresh:
        shutil.rmtree(out, ignore_errors=True)
    stages = Stages(path, overrides, config)
    foundation = stages.foundation()
    jobs = [*foundation, *stages.evaluation(out, [], list(study.evaluation))]
    needs = [f"collect_{domain}" for domain in config.domains]
    made = Pipeline(Path(config.run), foundation).keys
    configs = arm_configs(path, overrides, arms)
    evaluated = load_config(path, [*overrides, *study.evaluation])
    runs = plan_runs(configs, arms, study.seeds, [[made[name] for name in needs],
                                                  evaluation_reads(evaluated, list(config.domains))])
    play = sum(map(evaluation_seconds, evaluated.domains.values()))
    jobs += [_job(stages, out, number, part, needs, SECONDS["start"] + sum(
        play + configs[run.arm.name].train.steps * SECONDS["prefix_step"] for run in part))
        for number, part in enumerate(_parts(runs, study.runs_per_process))]
    console.print(f"[bold]Prefix study[/bold]: {len(arms)} arms ({' × '.join(study.factors)}), {len(study.seeds)} training "
                  f"seed(s) each. Everything goes to {out}/; `mopd report {out}` shows what is there so far.",
                  soft_wrap=True)
    _write(out / STUDY_FILE, plan_of(study, arms, configs))
    for run in runs:
        if not _record(out, run):
            _forget_play(out, run)  # of an earlier config: not to be shown beside new results
    return finish_run(out, Pipeline(Path(config.run), jobs, console=console), console)


def plan_of(study: StudyPrefixConfig, arms: Sequence[Arm], configs: dict[str, Config]) -> dict:
    """What the tables need to know, as JSON values: factors with the levels that some arm has, seeds, arms."""
    used = {(factor, level) for arm in arms for factor, level in arm.levels.items()}
    return {"factors": {f: [level for level in levels if (f, level) in used] for f, levels in study.factors.items()},
            "seeds": list(study.seeds),
            "arms": {a.name: {"levels": a.levels, "budget": configs[a.name].train.sampled_tokens} for a in arms}}


def study_folder(config: Config) -> Path:
    return Path(config.run) / FOLDER


def arm_configs(path: Path, overrides: list[str], arms: Sequence[Arm]) -> dict[str, Config]:
    """Each arm's whole configuration, by its name. Raises ConfigError where an arm's overrides do not fit, naming it."""
    configs = {}
    for arm in arms:
        try:
            configs[arm.name] = load_config(path, [*overrides, *arm.overrides, f"train.name={arm.name}"])
        except ConfigError as error:
            raise ConfigError(f"study_prefix, arm {arm.name}: {error}", error.errors) from error
    return configs


def plan_runs(configs: dict[str, Config], arms: Sequence[Arm], seeds: Sequence[int], reads: list) -> list[Run]:
    """Every arm with every seed, seed by seed, so that a study stopped early holds whole comparisons. `reads` is what all
    of them depend on beside their configuration, as JSON values."""
    runs = []
    for seed in seeds:
        for arm in arms:
            content = [VERSION, student_reads(configs[arm.name]), seed, reads]
            key = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]
            runs.append(Run(arm, seed, key))
    return runs


def _parts(runs: Sequence[Run], size: int) -> list[list[Run]]:
    """Runs of one process, of one seed each."""
    by_seed = [list(group) for _, group in itertools.groupby(runs, key=lambda run: run.seed)]
    return [group[at:at + size] for group in by_seed for at in range(0, len(group), size)]


def _job(stages: Stages, out: Path, number: int, runs: list[Run], needs: list[str], seconds: float) -> Job:
    """One process for `runs`. Its only output is a marker: what its runs made is kept when the job starts again."""
    marker = out / "jobs" / f"{number}.json"
    if not all(_done(out, run, list(stages.config.domains)) for run in runs):
        marker.unlink(missing_ok=True)
    names = ", ".join(run.arm.name for run in runs)
    return Job(f"study_prefix_{number}", f"Prefix study, training seed {runs[0].seed}: {names}.",
               stages.command("study-prefix-runs", options=[
                   "--marker", str(marker), *(x for run in runs for x in ("--run", f"{run.name}={run.key}"))]),
               [marker], needs=needs, reads=[[run.name, run.key] for run in runs], seconds=seconds)


def run_arms(path: Path, overrides: list[str], named: Sequence[str], marker: Path) -> None:
    """The runs `named` (ARM@SEED=KEY), one after the other in this process: train those that are not there, then let
    their students play the held-out tasks; writes `marker` at the end.

    Each step is recorded in students/ARM/seed-S/run.json with the key once it is done, so an interrupted call goes on
    where it stopped (inside a training at its last checkpoint). Raises ConfigError for a run that the config does not have.
    """
    from mopd.evaluate import evaluate_models
    from mopd.run import train

    config = load_config(path, overrides)
    out, domains = study_folder(config), list(config.domains)
    runs = [_named(plan_arms(config.study_prefix), text) for text in named]
    for run in runs:
        record = _record(out, run)
        if not record.get("trained"):
            start = time.monotonic()
            _forget_play(out, run)
            shutil.rmtree(_student(out, run) / "model", ignore_errors=True)
            own = load_config(path, [*overrides, *run.arm.overrides, f"train.name={run.arm.name}", f"seed={run.seed}"])
            train(dataclasses.replace(own, run=str(out)))
            _write(_student(out, run) / "run.json", {"key": run.key, "trained": round(time.monotonic() - start, 2)})
            gc.collect()  # a finished run's optimizer hangs in cycles
    evaluated = load_config(path, [*overrides, *config.study_prefix.evaluation, f"evaluate.out={out / 'eval'}"])
    scores: dict[str, dict] = {}
    for domain in domains:  # the environments of a domain serve all students of this process
        waiting = [run for run in runs if domain not in _record(out, run).get("evaluated", [])]
        models = {run.name: str(_student(out, run) / "model") for run in waiting}
        if models:
            for name, found in evaluate_models(evaluated, models, [domain], report=False).items():
                scores.setdefault(name, {}).update(found)
        for run in waiting:
            record = _record(out, run)
            _write(_student(out, run) / "run.json", record | {"evaluated": [*record.get("evaluated", []), domain]})
    for name, found in scores.items():
        print(f"result: {name}: " + ", ".join(
            f"{d} {s['score']:.2f} of {s['n']}" if s["n"] else f"{d} not measured" for d, s in found.items()))
    _write(marker, {"runs": list(named)})


def _named(arms: Sequence[Arm], text: str) -> Run:
    name, _, key = text.partition("=")
    arm, _, seed = name.partition("@")
    for candidate in arms:
        if candidate.name == arm and seed.isdigit() and key:
            return Run(candidate, int(seed), key)
    raise ConfigError(f"--run {text}: write ARM@SEED=KEY with an arm of this config: {', '.join(a.name for a in arms)}")


def _student(out: Path, run: Run) -> Path:
    return out / "students" / run.arm.name / f"seed-{run.seed}"


def _record(out: Path, run: Run) -> dict:
    """What is done of this very run; empty where nothing is, or where another config made it."""
    folder = _student(out, run)
    try:
        record = json.loads((folder / "run.json").read_text())
    except (OSError, ValueError):
        return {}
    if record.get("key") != run.key or not (folder / "model" / "config.json").is_file():
        return {}
    there = [d for d in record.get("evaluated", []) if (out / "eval" / f"{run.name}.{d}.json").is_file()]
    return record | {"evaluated": there}


def _done(out: Path, run: Run, domains: Sequence[str]) -> bool:
    record = _record(out, run)
    return bool(record.get("trained")) and set(domains) <= set(record["evaluated"])


def _forget_play(out: Path, run: Run) -> None:
    for path in (out / "eval").glob(f"{run.name}.*.json"):
        path.unlink()


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    temporary.replace(path)
