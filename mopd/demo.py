"""The main job as a list of stages, and the study that repeats its last part in several variants.

Every stage is a command of its own (`mopd base`, `mopd teacher sft`, `mopd train`, …); this file only says which
commands, in which order, on which inputs. Seconds are guesses for two quiet CPU cores and correct themselves on the way.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from pathlib import Path

from rich.console import Console

from mopd.config import Config, ConfigError, load_config
from mopd.pipeline import Job, Pipeline
from mopd.progress import human_seconds

QUICK = Path(__file__).resolve().parent.parent / "configs" / "demo_quick.yaml"

# Seconds per unit of work, measured on two cores of an AVX2 server processor while two jobs run side by side.
SECONDS = {"start": 8.0, "episode": {"scienceworld": 0.35}, "other_episode": 0.03, "base_step": 0.9, "sft_step": 0.35,
           "teacher_episode": {"scienceworld": 0.4}, "other_teacher_episode": 0.1, "train_step": 3.0,
           "evaluation": {"scienceworld": 0.35}, "other_evaluation": 0.12}


def run_demo(path: Path, overrides: list[str], *, quick: bool, fresh: bool, console: Console | None = None) -> dict:
    """Run the demo and return its results; `quick` takes configs/demo_quick.yaml, `fresh` forgets an earlier run."""
    console = console or Console(stderr=True, highlight=False)
    path = QUICK if quick else path
    config = load_config(path, overrides)
    run = Path(config.run)
    if fresh and run.exists():
        shutil.rmtree(run)
    start = time.monotonic()
    console.print(f"[bold]MOPD²[/bold]: {len(config.domains)} teachers ({', '.join(config.domains)}) are merged into one "
                  f"student. Everything goes to {run}/.")
    stages = Stages(path, overrides, config)
    jobs = [*stages.foundation(), *stages.student(config.train.name, [], config.seeds)]
    jobs += stages.evaluation(run, [f"{config.train.name}@{seed}" for seed in config.seeds], [])
    pipeline = Pipeline(run, jobs, console=console)
    seconds = pipeline.run()
    return _finish(run, seconds, time.monotonic() - start, console)


def run_study(path: Path, overrides: list[str], *, quick: bool, fresh: bool, console: Console | None = None) -> dict:
    """Run the arms of `study.arms` on the demo's teachers, `study.seeds` each; results are in RUN/study.

    What the demo made already (base, teachers, store, students of the same config) is reused; `fresh` forgets the arms.
    """
    console = console or Console(stderr=True, highlight=False)
    path = QUICK if quick else path
    config = load_config(path, overrides)
    if not config.study.arms:
        raise ConfigError(f"{path}: study.arms is empty; write name: [key=value, ...] for every arm")
    run, out = Path(config.run), Path(config.run) / "study"
    arm_names = [*config.study.arms, *(["off_policy_sft"] if config.study.off_policy_sft else [])]
    if fresh:
        for folder in (out, *(run / "students" / name for name in arm_names)):
            shutil.rmtree(folder, ignore_errors=True)
    start = time.monotonic()
    stages = Stages(path, overrides, config)
    jobs = stages.foundation()
    for seed in config.study.seeds:  # seed by seed, so that a study stopped early has whole comparisons
        for name, changes in config.study.arms.items():
            jobs += stages.student(name, list(changes), [seed])
        if config.study.off_policy_sft:
            jobs.append(stages.off_policy(seed))
    names = [f"{name}@{seed}" for name in arm_names for seed in config.study.seeds]
    jobs += stages.evaluation(out, names, list(config.study.evaluation))
    pipeline = Pipeline(run, jobs, console=console)
    seconds = pipeline.run()
    return _finish(out, seconds, time.monotonic() - start, console, students=run / "students")


def _finish(run: Path, seconds: dict[str, float], wall: float, console: Console, students: Path | None = None) -> dict:
    from mopd.report import print_results, write_report

    (run / "timings.json").write_text(json.dumps({"stages": seconds, "wall_seconds": wall}, indent=1))
    page = write_report(run, students=students)
    results = json.loads((run / "results.json").read_text())
    print_results(results, Console(highlight=False))
    console.print(f"Done in {human_seconds(wall)}. Report: {page}   Numbers: {run / 'results.json'}")
    return results


class Stages:
    """Builds the jobs of one configuration."""

    def __init__(self, path: Path, overrides: list[str], config: Config):
        self.path, self.overrides, self.config = path, overrides, config
        self.run = Path(config.run)

    def command(self, *words: str, changes: list[str] | None = None, options: list[str] | None = None) -> list[str]:
        return [*words, str(self.path), *self.overrides, *(changes or []), *(options or [])]

    def foundation(self) -> list[Job]:
        """Environments, base model, demonstrations in the store, teachers, and what the teachers play."""
        config, run = self.config, self.run
        domains = {name: dataclasses.asdict(domain) for name, domain in config.domains.items()}
        jobs = []
        transcripts = []
        for name, domain in config.domains.items():
            out = run / "transcripts" / f"{name}.jsonl"
            transcripts.append(out)
            episodes = domain.demonstrations + domain.novice_episodes
            jobs.append(Job(
                f"demonstrate_{name}", f"Environments: the expert of '{name}' ({domain.environment}) plays "
                f"{domain.demonstrations} tasks, a novice {domain.novice_episodes}.",
                self.command("demonstrate", options=["--domain", name, "--out", str(out)]), [out],
                seconds=5 + episodes * SECONDS["episode"].get(domain.environment, SECONDS["other_episode"]),
                reads=[_environment_part(domains[name]), dataclasses.asdict(config.novice), config.seed]))
        # The most expensive environment first: it decides how long this stage takes.
        jobs.sort(key=lambda job: -job.seconds)
        steps = config.base.steps
        base = run / "base"
        jobs.append(Job(
            "base", f"Base model: a tokenizer of {config.base.vocabulary} and a Mixture-of-Experts model pre-trained for "
            f"{steps} steps on the text of all domains.",
            self.command("base", options=[x for t in transcripts for x in ("--transcripts", str(t))] + ["--out", str(base)]),
            [base / "config.json"], needs=[job.name for job in jobs], exclusive=True,
            seconds=SECONDS["start"] + steps * SECONDS["base_step"],
            reads=[dataclasses.asdict(config.base), config.seed]))
        jobs.append(Job(
            "import", "Store: the experts' demonstrations become token-exact sequences in the prefix store.",
            self.command("import", options=[x for t in transcripts for x in ("--file", str(t))]),
            [Path(config.store)], needs=["base"], seconds=SECONDS["start"] + 10))
        for name, domain in config.domains.items():
            sft = config.sft_domains.get(name, config.sft)
            folder = Path(config.teachers[domain.teacher].model)
            jobs.append(Job(
                f"teacher_{name}", f"Teacher of '{name}': supervised training on its expert's demonstrations, "
                f"{sft.steps} steps, router frozen.",
                self.command("teacher", "sft", options=["--domain", name, "--out", str(folder)]),
                [folder / "config.json"], needs=["import"], seconds=SECONDS["start"] + sft.steps * SECONDS["sft_step"],
                reads=[dataclasses.asdict(sft), config.seed]))
        for name, domain in config.domains.items():
            record = run / "collected" / f"{name}.json"
            each = SECONDS["teacher_episode"].get(domain.environment, SECONDS["other_teacher_episode"])
            jobs.append(Job(
                f"collect_{name}", f"Store: the teacher of '{name}' plays {domain.teacher_episodes} training tasks.",
                self.command("collect", options=["--domain", name]), [record], needs=[f"teacher_{name}"],
                seconds=SECONDS["start"] + domain.teacher_episodes * each,
                reads=[domain.teacher_episodes, dataclasses.asdict(config.collect)]))
        teachers = [config.teachers[d.teacher].model for d in config.domains.values()]
        jobs.append(Job("average", "Baseline: the parameter average of the teachers.",
                        ["average", *teachers, "--out", str(run / "parameter_average")],
                        [run / "parameter_average" / "config.json"], seconds=SECONDS["start"],
                        needs=[f"teacher_{name}" for name in config.domains]))
        return jobs

    def student(self, name: str, changes: list[str], seeds: list[int]) -> list[Job]:
        """One MOPD² run per seed."""
        jobs = []
        for seed in seeds:
            own = [*changes, f"train.name={name}", f"seed={seed}"]
            config = load_config(self.path, [*self.overrides, *own])
            folder = self.run / "students" / name / f"seed-{seed}"
            jobs.append(Job(
                f"{name}_{seed}", f"MOPD²: '{name}' (training seed {seed}), {config.train.steps} steps through DeepSpeed, "
                f"objective {config.train.objective}.",
                self.command("train", changes=own), [folder / "model" / "config.json"],
                needs=[f"collect_{d}" for d in self.config.domains],
                seconds=SECONDS["start"] + config.train.steps * SECONDS["train_step"],
                reads=[dataclasses.asdict(getattr(config, part)) for part in ("train", "selection", "student", "deepspeed")]
                + [{d: dataclasses.asdict(c) for d, c in config.domains.items()}]))
        return jobs

    def off_policy(self, seed: int) -> Job:
        """Supervised training on the union of the demonstrations, the off-policy baseline."""
        folder = self.run / "students" / "off_policy_sft" / f"seed-{seed}"
        steps = self.config.off_policy.steps
        return Job(f"off_policy_sft_{seed}", f"Baseline: supervised training on all demonstrations, {steps} steps "
                   f"(training seed {seed}).",
                   self.command("teacher", "sft", changes=[f"seed={seed}"],
                                options=["--out", str(folder / "model"), "--baseline"]),
                   [folder / "model" / "config.json"], needs=["import"],
                   seconds=SECONDS["start"] + steps * SECONDS["sft_step"],
                   reads=[dataclasses.asdict(self.config.off_policy)])

    def evaluation(self, out: Path, students: list[str], changes: list[str]) -> list[Job]:
        """Held-out evaluation of base, every teacher in every domain, the parameter average and the students."""
        config, run = self.config, self.run
        fixed = {"base": config.student.model,
                 **{f"teacher_{name}": config.teachers[d.teacher].model for name, d in config.domains.items()},
                 "parameter_average": run / "parameter_average"}
        trained = {name: run / "students" / name.split("@")[0] / f"seed-{name.split('@')[1]}" / "model" for name in students}
        evaluated = load_config(self.path, [*self.overrides, *changes])
        groups = _two_groups({n: _evaluation_seconds(d) for n, d in evaluated.domains.items()})
        jobs = []
        for models, label, needs in ((fixed, "base, teachers and average", ["average", "base"]),
                                     (trained, "the student(s)", [f"{n.split('@')[0]}_{n.split('@')[1]}" for n in students])):
            for domains in groups:
                tag = "_".join(domains)
                where = "eval" if out == run else f"eval_{out.name}"
                options = [x for n, f in models.items() for x in ("--model", f"{n}={f}")]
                options += [x for d in domains for x in ("--domain", d)]
                outputs = [out / "eval" / f"{model}.{domain}.json" for model in models for domain in domains]
                jobs.append(Job(
                    f"{where}_{'students' if models is trained else 'teachers'}_{tag}",
                    f"Result: {label} play the held-out tasks of {', '.join(domains)}.",
                    self.command("eval", changes=[*changes, f"evaluate.out={out / 'eval'}"], options=options),
                    outputs, needs=needs,
                    seconds=SECONDS["start"] + len(models) * sum(_evaluation_seconds(evaluated.domains[d]) for d in domains),
                    reads=[dataclasses.asdict(evaluated.evaluate),
                           {d: dataclasses.asdict(evaluated.domains[d]) for d in domains}]))
        return jobs


def _environment_part(domain: dict) -> dict:
    return {k: domain[k] for k in ("environment", "options", "system_prompt", "max_turns", "demonstrations",
                                   "novice_episodes")}


def _evaluation_seconds(domain) -> float:
    episodes = domain.evaluation_episodes or 150
    return episodes * SECONDS["evaluation"].get(domain.environment, SECONDS["other_evaluation"])


def _two_groups(seconds: dict[str, float]) -> list[list[str]]:
    """Split domains into two groups of about equal cost, so that two jobs end at about the same time."""
    groups: list[list[str]] = [[], []]
    loads = [0.0, 0.0]
    for name in sorted(seconds, key=lambda n: (-seconds[n], n)):
        smaller = 0 if loads[0] <= loads[1] else 1
        groups[smaller].append(name)
        loads[smaller] += seconds[name]
    return [g for g in groups if g]
