"""What a training run is built of, what its result depends on, and what it leaves behind.

`mopd.run` puts these parts together; nothing here loops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from mopd.check import Launch, open_launch
from mopd.config import Config, ConfigError, learner_config, resume_turns, stream_shares, to_dict
from mopd.config_domains import WORKER_KEYS
from mopd.config_sampling import sampling_identity
from mopd.export_model import whole_student
from mopd.learner.checkpoint import FINISHED, close_folder, folder_of, own_folder
from mopd.learner.engine import Learner
from mopd.learner.model import load_model, save_model
from mopd.learner.step import LearnerStep, StepConfig
from mopd.locks import only_process
from mopd.metrics import MetricsBusy
from mopd.ranks import Ranks, digest
from mopd.rollback import roll_back
from mopd.run_records import scored_episodes, write_selection
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.base import SamplingEngine
from mopd.sampling.engines import make_engine, student_config
from mopd.sampling.hf import HFEngine
from mopd.sampling.streams import Streams
from mopd.selftest import Check, selftest
from mopd.set_aside import set_aside
from mopd.sources import Ahead, OnPolicy, Source
from teachers.consistency import measure_distances, print_distances
from teachers.grading import centre, has_spread
from teachers.watch import TeacherWatch

FINISHED_RUN = "finished.json"  # in a student's folder: which run is over
# keys of the section deepspeed that say where and in which pieces things are computed: results differ by rounding alone
LAYOUT = ("zero_stage", "autoep_size", "autoep_preset", "sequence_parallel_size", "split_on_imbalance", "offload_optimizer",
          "offload_parameters", "gradient_checkpointing", "logits_mib")


def check_ranks(config: Config, ranks: Ranks) -> None:
    """Raise RanksDiffer where a rank has another config, ConfigError where this number of ranks does not go with it."""
    values = {}
    for section, part in to_dict(config).items():
        values |= {f"{section}.{key}": value for key, value in part.items()} if isinstance(part, dict) else {section: part}
    values.pop("threads")
    ranks.agree("its configuration", values)
    experts = config.deepspeed.autoep_size
    if experts > 1 and ranks.size % experts:
        error = (f"deepspeed.autoep_size: experts spread over {experts} ranks need a multiple of {experts} ranks, and this "
                 f"job has {ranks.size}; start it with `mopd train CONFIG --ranks {experts}` or another launcher, or set 0")
        raise ConfigError(error, [error])
    columns = config.deepspeed.sequence_parallel_size
    if ranks.size % columns:
        error = (f"deepspeed.sequence_parallel_size: {columns} ranks share a micro-batch's columns, which needs a multiple "
                 f"of {columns} ranks, and this job has {ranks.size}; start it with `mopd train CONFIG --ranks {columns}` or "
                 "another launcher, or set 1")
        raise ConfigError(error, [error])


def take_folder(folder: Path, ranks: Ranks, held: contextlib.ExitStack) -> None:
    """Rank 0 makes the run's folder and keeps other jobs out of it until `held` is closed."""
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(only_process(folder / ".lock", MetricsBusy.at(folder)))


def find_checkpoints(config: Config, launch: Launch, folder: Path, resume: bool, rollback: int, ranks: Ranks) -> Path:
    """Where this run's checkpoints are, after what was asked for is done to those that are there."""
    place, identical = folder / "checkpoints", identity(config, launch)

    def tidy() -> None:
        if not ranks.first:
            return
        if rollback:
            print(roll_back(folder, folder_of(place, identical), rollback), file=sys.stderr)
        elif resume and (said := set_aside(folder, folder_of(place, identical), to_dict(config))):
            print(said, file=sys.stderr)
        (folder / FINISHED_RUN).unlink(missing_ok=True)
        own_folder(place, identical, resume=resume)
        (aside := folder / ".config.json").write_text(json.dumps(to_dict(config), indent=1))
        aside.replace(folder / "config.json")

    ranks.together("looking at the checkpoints", tidy)
    return folder_of(place, identical)


def run_digest(config: Config, launch: Launch) -> str:
    """Of all that a whole run's result depends on: `identity`, and the teachers that serve it from the start."""
    served = {name: {key: value for key, value in dataclasses.asdict(teacher).items() if key != "urls"}
              for name, teacher in config.teachers.items()}
    found = {name: {key: value for key, value in entry.items() if key != "urls"}
             for name, entry in launch.manifest["teachers"].items()}
    mixed = {name: [part.teacher, part.teacher_weights, part.teacher_mixture] for name, part in config.domains.items()}
    return digest([identity(config, launch), served, found, mixed])


def finished_run(config: Config, launch: Launch, folder: Path) -> str:
    """In words that this very run is over and its student is there, "" where it is not. To be called before training: what a
    kill at the end left to do is done."""
    try:
        record = json.loads((folder / FINISHED_RUN).read_text())
        steps, run = record["steps"], record["run"]
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{folder / FINISHED_RUN} cannot be read ({type(error).__name__}: {error}), so it is not known whether this "
              "run is finished", file=sys.stderr)
        return ""
    model = folder / "model"
    if run != run_digest(config, launch) or not all(
            (model / name).is_file() for name in ("config.json", "manifest.json")):
        return ""
    _close_checkpoints(folder, config.train.keep_every)
    return (f"result: {config.train.name} (seed {config.seed}): finished before, with {steps} steps of this very "
            f"configuration, student, store and teachers; nothing was trained now. To train it anew: --resume never\n"
            f"model: {model}")


def identity(config: Config, launch: Launch) -> list:
    """Everything that a run's result depends on but its teachers: a checkpoint of another one is not gone on from. Teachers
    may change when a run resumes; its manifest keeps who served from which step on (teacher_history)."""
    parts = ("seed", "domains", "student", "selection", "train", "deepspeed")
    chosen = {name: value for name, value in to_dict(config).items() if name in parts}
    for name in ("selftest", "tensorboard", "checkpoint_every", "keep_checkpoints", "keep_every", "keep_best",
                 "async_checkpoints", "router_drift_alert", "stop_within_s",
                 "ranks_timeout", "ranks_warn_s", "straggler_alert", "max_unscored_share",
                 "teacher_wait_s", "score_cache_mib", "probe_every", "probe_tolerance",
                 "routing_similarity_every"):
        chosen["train"].pop(name)  # no result depends on these
    for name in LAYOUT:
        chosen["deepspeed"].pop(name)
    for domain in chosen["domains"].values():
        for name in ("teacher", "teacher_weights", "teacher_mixture", *WORKER_KEYS):
            domain.pop(name)
    if sampling := sampling_identity(config.sampling):
        chosen["sampling"] = sampling
    return [chosen, {name: value for name, value in launch.manifest.items()
                     if name not in ("teachers", "teacher_history", "unused", "mixtures", "warnings")}]


def budget_spent(config: Config, totals: Mapping[str, int]) -> float:
    """Share of `train.sampled_tokens` that the run has sampled, at 1 or above when it is over; 0 without such a budget.
    A checkpoint keeps the count (`Source.totals`), so it is the same after a restart."""
    budget = config.train.sampled_tokens
    return totals["sampled_tokens"] / budget if budget else 0.0


def build_learner(config: Config, launch: Launch, folder: Path, ranks: Ranks | None = None) -> tuple[Learner, LearnerStep]:
    """The student under DeepSpeed, and its step against the domains' teachers."""
    ranks = ranks or Ranks()
    model = ranks.together("loading the student", lambda: load_model(
        config.student.model, attention=config.student.attention, trust_remote_code=config.student.trust_remote_code))
    pad = launch.tokenizer.pad_token_id
    train = config.train
    columns = config.deepspeed.sequence_parallel_size if ranks.size > 1 else 1  # `mopd selftest` has one process
    log = "deepspeed.log" if ranks.first else f"deepspeed.rank-{ranks.rank}.log"
    learner = Learner(model, config=learner_config(train.optimizer, config, log_file=str(folder / log),
                                                   prefix_gradient=train.prefix_gradient,
                                                   routing_replay=train.routing_replay,
                                                   sequence_parallel_size=columns),
                      total_steps=train.steps, pad_id=launch.renderer.end_id if pad is None else pad)
    step = StepConfig(
        objective=train.objective, objective_options=train.objective_options, aggregation=train.aggregation,
        aggregation_to=train.aggregation_to, max_staleness=train.max_staleness, staleness_decay=train.staleness_decay,
        balance=train.balance, balance_weights=train.balance_weights, temperature=train.temperature,
        stream_share={name: stream_shares(config, name) for name in config.domains},
        token_budget=train.micro_batch_tokens, peak_alert=train.peak_alert, cold_alert=train.cold_alert,
        router_drift_alert=train.router_drift_alert, routing_similarity_every=train.routing_similarity_every,
        turn_scores=launch.selector is not None and launch.selector.wants_scores)
    return learner, LearnerStep(learner, domains=list(config.domains), scorers=launch.registry.scorers(), config=step)


def build_watch(config: Config, launch: Launch, trainer: LearnerStep, folder: Path, ranks: Ranks) -> TeacherWatch:
    """What looks after the run's teachers."""
    special = set(launch.tokenizer.all_special_ids)
    return TeacherWatch(config, launch.registry, trainer.scorers, need=trainer.objective.needs, top_k=trainer.top_k,
                        temperature=trainer.temperature, store=launch.store,
                        ids=[i for i in range(len(launch.tokenizer)) if i not in special], folder=folder, ranks=ranks)


def build_source(config: Config, launch: Launch, learner: Learner, folder: Path, ranks: Ranks) -> Source:
    """Where the run's samples come from: this process, in turn with training, or samplers that run ahead of it."""
    if config.sampling.overlap > 0:
        return ranks.together("preparing the samplers", lambda: Ahead(
            config, launch, learner, folder, ranks, advantage=group_advantage(config)))
    engine = ranks.together("loading the engine", lambda: build_engine(config, learner, ranks))
    return OnPolicy(config, learner, build_streams(config, launch, engine, ranks), ranks, folder)


def build_engine(config: Config, learner: Learner, ranks: Ranks | None = None) -> SamplingEngine:
    """This process's engine, on a whole copy of the student: the learner's, or where its weights are split over ranks one
    that is read again (the weights of a checkpoint come with the next hand-over)."""
    ranks = ranks or Ranks()
    return make_engine(config, learner.model if learner.whole else None, number=ranks.rank, of=ranks.size)


def build_streams(config: Config, launch: Launch, engine: SamplingEngine, ranks: Ranks | None = None) -> Streams:
    """What samples a plan's streams with `engine`, shared out over the ranks."""
    train = config.train
    model = getattr(engine, "model", None)
    fingerprint = launch.renderer.fingerprint(student_config(config) if model is None else model.config)
    return Streams(
        domains=launch.domains, store=launch.store, selector=launch.selector, engine=engine, renderer=launch.renderer,
        fingerprint=fingerprint, seed=config.seed, student=train.name,
        temperature=train.temperature, top_p=train.top_p, top_k=train.top_k, group_size=train.group_size,
        fresh_turns=train.fresh_turns,
        resume_turns={name: resume_turns(config, name) for name in config.domains},
        demonstration_fraction=train.demonstration_fraction, advantage=group_advantage(config), ranks=ranks)


def group_advantage(config: Config) -> GroupAdvantage:
    """How the rewards of a group become outcome advantages: centred, None where they have no spread."""
    def advantage(rewards):
        return centre(rewards, std_normalise=config.train.outcome_std_normalise) if has_spread(rewards) else None

    return advantage


def prove(config: Config, launch: Launch, learner: Learner, trainer: LearnerStep) -> list[Check]:
    """The self-test of this run's own student, teachers and objective."""
    special = set(launch.tokenizer.all_special_ids)
    return selftest(learner, trainer, ids=[i for i in range(len(launch.tokenizer)) if i not in special], seed=config.seed)


def selftest_run(config: Config) -> list[Check]:
    """`mopd selftest`: what a training launch of this config proves first. Trains and writes nothing."""
    launch = open_launch(config)
    try:
        with tempfile.TemporaryDirectory() as folder:
            learner, trainer = build_learner(config, launch, Path(folder))
            try:
                return prove(config, launch, learner, trainer)
            finally:
                learner.close()
    finally:
        launch.close()


def say_distances(config: Config, launch: Launch, folder: Path, learner: Learner, ranks: Ranks) -> None:
    """How far every teacher is from the student's start (`teachers.consistency`), to stderr and consistency.json, by rank 0.
    Where the learner's weights are split over ranks, `mopd teacher compare` says it."""
    if not config.consistency.points or not ranks.first or not learner.whole:
        return
    engine = HFEngine(learner.model, max_batch=config.train.sampling_batch)
    found = measure_distances(config, list(config.domains), learner.model, engine, launch.registry.scorers(), launch.renderer,
                              launch.store, demonstrations=False)
    (folder / "consistency.json").write_text(json.dumps([distance.as_json() for distance in found]))
    print_distances(found, Console(stderr=True, highlight=False))


def finish(config: Config, launch: Launch, folder: Path, learner: Learner, source: Source, ranks: Ranks) -> Path:
    """Prove that router and teachers stayed as they were; write the student and a few scored episodes, at last that the run
    is over."""
    learner.check_routers()
    launch.registry.check_unchanged()
    model = folder / "model"
    student = learner.model if learner.whole else whole_student(config, learner, ranks)
    if ranks.first:
        save_model(student, model, tokenizer=launch.tokenizer,
                   manifest={**launch.manifest, "steps": learner.step, "router_hash": learner.router_hash,
                             "sampled_tokens": source.totals["sampled_tokens"]})
        summary = source.summary()
        if launch.selector is not None:
            write_selection(folder, launch.selector)
        # These episodes are rank 0's alone, sampled as a step of it would be.
        streams = build_streams(config, launch, HFEngine(student, max_batch=config.train.sampling_batch))
        (folder / "episodes.json").write_text(json.dumps(scored_episodes(streams, learner.step, student, launch)))
    ranks.gather(None)  # the others wait for what rank 0 writes
    learner.close()
    if ranks.first:
        over = {"run": run_digest(config, launch), "steps": learner.step}
        (aside := folder / f".{FINISHED_RUN}").write_text(json.dumps(over))
        aside.replace(folder / FINISHED_RUN)
        _close_checkpoints(folder, config.train.keep_every)
        print(f"result: {config.train.name} (seed {config.seed}): {learner.step} steps; {summary}")
        print(f"model: {model}")
    return model


def _close_checkpoints(folder: Path, keep_every: int) -> None:
    for checkpoints in (folder / "checkpoints").glob("*"):  # once the run is over none of them is gone on from
        if not (checkpoints / FINISHED).exists():
            close_folder(checkpoints, keep_every)
    with contextlib.suppress(OSError):
        (folder / "checkpoints").rmdir()
