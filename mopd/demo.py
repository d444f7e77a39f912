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

from mopd.config import Config, ConfigError, DomainConfig, load_config
from mopd.config_domains import played_otherwise
from mopd.config_sampling import sampling_identity
from mopd.pipeline import Job, Pipeline
from mopd.progress import human_seconds

QUICK = Path(__file__).resolve().parent.parent / "configs" / "demo_quick.yaml"

# Seconds per unit of work, measured on two cores of an AVX2 server processor while two jobs run side by side.
SECONDS = {"start": 8.0, "episode": {"scienceworld": 0.14}, "other_episode": 0.006, "base_step": 1.1, "sft_step": 0.3,
           "teacher_episode": {"scienceworld": 0.12}, "other_teacher_episode": 0.02, "train_step": 1.9,
           "prefix_step": 0.7, "evaluation": {"scienceworld": 0.13}, "other_evaluation": 0.035}


def run_demo(path: Path, overrides: list[str], *, quick: bool, fresh: bool, console: Console | None = None) -> dict:
    """Run the demo and return its results; `quick` takes configs/demo_quick.yaml, `fresh` forgets an earlier run."""
    console = console or Console(stderr=True, highlight=False)
    path = QUICK if quick else path
    config = load_config(path, overrides)
    run = Path(config.run)
    if fresh:
        _forget(run)
    console.print(f"[bold]MOPD²[/bold]: {len(config.domains)} teachers ({', '.join(config.domains)}) are merged into one "
                  f"student. Everything goes to {run}/.")
    stages = Stages(path, overrides, config)
    jobs = [*stages.foundation(), *stages.student(config.train.name, [], config.seeds)]
    jobs += stages.evaluation(run, [f"{config.train.name}@{seed}" for seed in config.seeds], [])
    return finish_run(run, Pipeline(run, jobs, console=console), console)


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
    stages = Stages(path, overrides, config)
    jobs = stages.foundation()
    for seed in config.study.seeds:  # seed by seed, so that a study stopped early has whole comparisons
        for name, changes in config.study.arms.items():
            jobs += stages.student(name, list(changes), [seed])
        if config.study.off_policy_sft:
            jobs.append(stages.off_policy(seed))
    names = [f"{name}@{seed}" for name in arm_names for seed in config.study.seeds]
    jobs += stages.evaluation(out, names, list(config.study.evaluation))
    return finish_run(out, Pipeline(run, jobs, console=console), console, students=run / "students")


def finish_run(run: Path, pipeline: Pipeline, console: Console, students: Path | None = None) -> dict:
    """Run the jobs, then write and print the report of the folder `run`; returns its results. `students`: where the
    students are, if not in RUN/students."""
    from mopd.report import print_results, write_report

    start = time.monotonic()
    seconds = pipeline.run()
    # The whole run's time, also where an earlier call did a part of it.
    timings = {"stages": seconds, "wall_seconds": pipeline.wall_seconds}
    (run / "timings.json").write_text(json.dumps(timings, indent=1))
    page = write_report(run, students=students)
    results = json.loads((run / "results.json").read_text())
    print_results(results, Console(highlight=False))
    console.print(f"Done in {human_seconds(time.monotonic() - start)}. Report: {page}   Numbers: {run / 'results.json'}",
                  soft_wrap=True)
    return results


def _forget(run: Path) -> None:
    """Delete the folder of an earlier run; refuses what does not look like one."""
    if not run.exists():
        return
    if not (run / "jobs").is_dir() or Path.cwd().resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"run: {run} is not the folder of an earlier run (it holds no jobs/, or you stand in it), so "
                          "it is not deleted; name another with run=FOLDER")
    shutil.rmtree(run)


class Stages:
    """Builds the jobs of one configuration. A base or teacher outside the run's folder is the user's own: it is taken as
    it is, and the stage that would make it is left out."""

    def __init__(self, path: Path, overrides: list[str], config: Config):
        self.path, self.overrides, self.config = path, overrides, config
        self.run = Path(config.run)
        self.makes_base = self._inside(config.student.model)
        self.base_needs = ["base"] if self.makes_base else []

    def _inside(self, model: str) -> bool:
        return Path(model).is_relative_to(self.run)

    def command(self, *words: str, changes: list[str] | None = None, options: list[str] | None = None) -> list[str]:
        return [*words, str(self.path), *self.overrides, *(changes or []), *(options or [])]

    def foundation(self) -> list[Job]:
        """Environments, base model, demonstrations in the store, teachers, and what the teachers play."""
        demonstrations = [self._demonstrations(name) for name in self.config.domains]
        transcripts = [job.outputs[0] for job in demonstrations]
        needs = [job.name for job in demonstrations]
        # The most expensive environment first: it decides how long this stage takes.
        jobs = sorted(demonstrations, key=lambda job: -job.seconds)
        if self.makes_base:
            jobs.append(self._base(transcripts, needs))
        jobs.append(self._import(transcripts, needs))
        jobs += self._teachers()
        jobs += self._collections()
        teachers = self._teacher_models()
        if all(map(self._inside, teachers)):
            jobs.append(Job("average", "Baseline: the parameter average of the teachers.",
                            ["export", "--average", *teachers, "--out", str(self.run / "parameter_average")],
                            [self.run / "parameter_average" / "config.json"], seconds=SECONDS["start"],
                            needs=[job.name for job in self._teachers()]))
        return jobs

    def _teacher_models(self) -> list[str]:
        return list(dict.fromkeys(self.config.teachers[d.teacher].model for d in self.config.domains.values()))

    def _demonstrations(self, name: str) -> Job:
        config, domain = self.config, self.config.domains[name]
        out = self.run / "transcripts" / f"{name}.jsonl"
        episodes = domain.demonstrations + domain.novice_episodes
        return Job(
            f"demonstrate_{name}", f"Environments: the expert of '{name}' ({domain.environment}) plays "
            f"{domain.demonstrations} tasks, a novice {domain.novice_episodes}.",
            self.command("demonstrate", options=["--domain", name, "--out", str(out)]), [out],
            seconds=5 + episodes * SECONDS["episode"].get(domain.environment, SECONDS["other_episode"]),
            reads=[{k: getattr(domain, k) for k in ("environment", "options", "system_prompt", "max_turns",
                                                    "demonstrations", "novice_episodes")},
                   _plain(config.novice), config.seed])

    def _base(self, transcripts: list[Path], needs: list[str]) -> Job:
        config = self.config
        base = Path(config.student.model)
        return Job(
            "base", f"Base model: a tokenizer of {config.base.vocabulary} and a Mixture-of-Experts model pre-trained for "
            f"{config.base.steps} steps on the text of all domains.",
            self.command("base", options=[x for t in transcripts for x in ("--transcripts", str(t))] + ["--out", str(base)]),
            [base / "config.json"], needs=needs, exclusive=True,
            seconds=SECONDS["start"] + config.base.steps * SECONDS["base_step"],
            reads=[_plain(config.base), _plain(config.deepspeed), self._shares(), config.seed])

    def _import(self, transcripts: list[Path], needs: list[str]) -> Job:
        config = self.config
        return Job(
            "import", "Store: the experts' demonstrations become token-exact sequences in the prefix store.",
            self.command("import", options=[x for t in transcripts for x in ("--file", str(t))]),
            [Path(config.store)], needs=self.base_needs or needs, seconds=SECONDS["start"] + 10,
            # What later stages add to the store counts too: another teacher's play must not lie beside this one's.
            reads=[config.student.model, self._contexts(), [job.reads for job in self._teachers()],
                   [job.reads for job in self._collections()]])

    def _teachers(self) -> list[Job]:
        """One job per teacher; it learns from the demonstrations of all domains that it serves."""
        config, jobs = self.config, []
        for teacher in dict.fromkeys(d.teacher for d in config.domains.values()):
            folder = Path(config.teachers[teacher].model)
            if not self._inside(config.teachers[teacher].model):
                continue
            served = [name for name, d in config.domains.items() if d.teacher == teacher]
            sft = config.sft_domains.get(served[0], config.sft) if len(served) == 1 else config.sft
            jobs.append(Job(
                f"teacher_{teacher}", f"Teacher of {' and '.join(map(repr, served))}: supervised training on the expert's "
                f"demonstrations, {sft.steps} steps, router frozen.",
                self.command("teacher", "sft", options=[x for d in served for x in ("--domain", d)] + ["--out", str(folder)]),
                [folder / "config.json"], needs=["import"], seconds=SECONDS["start"] + sft.steps * SECONDS["sft_step"],
                reads=[_plain(sft), served, self._shares(), self._contexts(), _plain(config.student),
                       _plain(config.deepspeed), config.seed]))
        return jobs

    def _collections(self) -> list[Job]:
        config, jobs = self.config, []
        for name, domain in config.domains.items():
            teacher = config.teachers[domain.teacher]
            each = SECONDS["teacher_episode"].get(domain.environment, SECONDS["other_teacher_episode"])
            jobs.append(Job(
                f"collect_{name}", f"Store: the teacher of '{name}' plays {domain.teacher_episodes} training tasks.",
                self.command("collect", options=["--domain", name]), [self.run / "collected" / f"{name}.json"],
                needs=[f"teacher_{domain.teacher}" if self._inside(teacher.model) else "import"],
                seconds=SECONDS["start"] + domain.teacher_episodes * each,
                reads=[_play(domain), domain.teacher_episodes, _plain(teacher), _plain(config.collect), config.seed]))
        return jobs

    def _shares(self) -> dict[str, float]:
        return {name: domain.share for name, domain in self.config.domains.items()}

    def _contexts(self) -> dict[str, int]:
        return {name: domain.max_context_tokens for name, domain in self.config.domains.items()}

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
                reads=[*student_reads(config), seed]))
        return jobs

    def off_policy(self, seed: int) -> Job:
        """Supervised training on the union of the demonstrations, the off-policy baseline."""
        config = self.config
        folder = self.run / "students" / "off_policy_sft" / f"seed-{seed}"
        steps = config.off_policy.steps
        return Job(f"off_policy_sft_{seed}", f"Baseline: supervised training on all demonstrations, {steps} steps "
                   f"(training seed {seed}).",
                   self.command("teacher", "sft", changes=[f"seed={seed}"],
                                options=["--out", str(folder / "model"), "--baseline"]),
                   [folder / "model" / "config.json"], needs=["import"],
                   seconds=SECONDS["start"] + steps * SECONDS["sft_step"],
                   reads=[_plain(config.off_policy), self._shares(), self._contexts(), _plain(config.student),
                          _plain(config.deepspeed), seed])

    def evaluation(self, out: Path, students: list[str], changes: list[str]) -> list[Job]:
        """Held-out evaluation of base, every teacher in every domain, the parameter average and the students."""
        config, run = self.config, self.run
        fixed = {"base": config.student.model,
                 **{f"teacher_{name}": config.teachers[d.teacher].model for name, d in config.domains.items()}}
        made = [*self.base_needs, *(job.name for job in self._teachers())]
        if all(map(self._inside, self._teacher_models())):
            fixed["parameter_average"] = str(run / "parameter_average")
            made.append("average")
        trained = {name: str(run / "students" / name.split("@")[0] / f"seed-{name.split('@')[1]}" / "model")
                   for name in students}
        evaluated = load_config(self.path, [*self.overrides, *changes])
        groups = _two_groups({n: evaluation_seconds(d) for n, d in evaluated.domains.items()})
        jobs = []
        for models, label, needs in ((fixed, "base, teachers and average", made or ["import"]),
                                     (trained, "the student(s)", [f"{n.split('@')[0]}_{n.split('@')[1]}" for n in students])):
            for domains in groups if models else ():
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
                    seconds=SECONDS["start"] + len(models) * sum(evaluation_seconds(evaluated.domains[d]) for d in domains),
                    reads=[models, *evaluation_reads(evaluated, domains)]))
        return jobs


def student_reads(config: Config) -> list:
    """What a MOPD² run of this config depends on beside its seed and the stages before it, as JSON values."""
    parts = [_plain(getattr(config, part)) for part in ("train", "selection", "student", "deepspeed", "teachers")]
    return parts + [sampling_identity(config.sampling),
                    {n: [_play(d), d.share, d.prefix_fraction, d.resume_turns, d.teacher_weights, d.teacher_mixture]
                     for n, d in config.domains.items()}]


def evaluation_reads(config: Config, domains: list[str]) -> list:
    """What held-out play in these domains depends on beside the models, as JSON values."""
    return [config.evaluate.split, config.evaluate.temperature, config.evaluate.batch,
            {d: [_play(config.domains[d]), config.domains[d].evaluation_episodes] for d in domains}, config.seed]


def _play(domain: DomainConfig) -> dict:
    """What decides how an episode of a domain goes (not how many are played, nor how fast)."""
    found = {key: getattr(domain, key) for key in ("environment", "options", "system_prompt", "teacher", "max_turns",
                                                   "max_turn_tokens", "max_context_tokens")}
    return found | played_otherwise(domain)


def _plain(part) -> dict:
    """A part of the config as JSON values."""
    if dataclasses.is_dataclass(part):
        return dataclasses.asdict(part)
    return {name: dataclasses.asdict(value) for name, value in part.items()}


def evaluation_seconds(domain: DomainConfig) -> float:
    """A guess of the seconds that one model's held-out play in a domain takes."""
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
