"""One MOPD² run: sample, score, train, hand the new weights to the sampling engine; again.

    schedule ─▶ streams ─▶ teachers ─▶ learner ─▶ weights to the engine
    (what next)  (student tokens)  (scores)  (DeepSpeed)
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from rich.console import Console

from mopd.check import Launch, open_launch
from mopd.config import Config, ConfigError, learner_config, resume_turns, stream_shares, to_dict
from mopd.export_model import whole_student
from mopd.learner.checkpoint import close_folder, folder_of, latest, load_checkpoint, own_folder, save_checkpoint, sound
from mopd.learner.engine import Learner
from mopd.learner.model import load_model, save_model
from mopd.learner.packing import row_cost
from mopd.learner.probe import check_weights
from mopd.learner.step import LearnerStep, StepConfig
from mopd.learner.weights import named_weights
from mopd.locks import only_process
from mopd.metrics import MetricsBusy, MetricsLog
from mopd.progress import Progress
from mopd.ranks import Ranks
from mopd.rollback import roll_back
from mopd.run_records import Notices, add_processes, scored_episodes, step_record, write_selection
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.hf import HFEngine
from mopd.sampling.sharing import share_of
from mopd.sampling.streams import StepSamples, Streams
from mopd.schedule import Plan, Schedule
from mopd.selftest import Check, require, selftest
from mopd.signals import BrokenOff, Stop, Stopped
from teachers.consistency import measure_distances, print_distances
from teachers.grading import centre, has_spread
from teachers.watch import TeacherWatch


class TooManyFailures(RuntimeError):
    """Infrastructure failures took more of a step than `train.max_infra_failure_share` allows."""


def train(config: Config, *, resume: bool = True, rollback: int = 0) -> Path:
    """Train one student as `config.train` says; returns the folder of the finished student. Goes on from the last checkpoint
    of this very run if there is one; without `resume` it starts anew, with `rollback` it goes that many steps back first.

    Writes RUN/students/NAME/seed-S/{config.json, manifest.json, metrics.jsonl, checkpoints/, model/, episodes.json}, with
    stored prefixes selection.json (what was drawn) and, where scores were measured, scores.json.
    On several ranks every one calls it with the same config (docs/distributed.md); the files are rank 0's.
    Raises ConfigError for everything that can be known to be wrong before the start, MetricsBusy where another process
    trains in the same folder, CannotRollBack, SelftestFailed, and TooManyFailures and NothingScored in between; Stopped (an
    exit) after SIGTERM or SIGINT, when a checkpoint is saved (docs/reliability.md).
    """
    ranks = Ranks.start(timeout=config.train.ranks_timeout)
    with ranks.reporting():
        _check_ranks(config, ranks)
        launch = ranks.together("opening what the run stands on", lambda: open_launch(config))
        folder = Path(config.run) / "students" / config.train.name / f"seed-{config.seed}"
        try:
            ranks.agree("what it found (teachers, store, tokenizer)", launch.manifest)
            with contextlib.ExitStack() as held:
                ranks.together("taking the run's folder", lambda: _take(folder, ranks, held))
                checkpoints = _checkpoints(config, launch, folder, resume, rollback, ranks)
                model = _train(config, launch, folder, checkpoints, ranks)
        finally:
            launch.close()
    return model


def _check_ranks(config: Config, ranks: Ranks) -> None:
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


def _take(folder: Path, ranks: Ranks, held: contextlib.ExitStack) -> None:
    """Rank 0 makes the run's folder and keeps other jobs out of it until `held` is closed."""
    if ranks.first:
        folder.mkdir(parents=True, exist_ok=True)
        held.enter_context(only_process(folder / ".lock", MetricsBusy.at(folder)))


def _checkpoints(config: Config, launch: Launch, folder: Path, resume: bool, rollback: int, ranks: Ranks) -> Path:
    """Where this run's checkpoints are, after what was asked for is done to those that are there."""
    place, identical = folder / "checkpoints", identity(config, launch)

    def tidy() -> None:
        if not ranks.first:
            return
        if rollback:
            print(roll_back(folder, folder_of(place, identical), rollback), file=sys.stderr)
        own_folder(place, identical, resume=resume)
        (aside := folder / ".config.json").write_text(json.dumps(to_dict(config), indent=1))
        aside.replace(folder / "config.json")

    ranks.together("looking at the checkpoints", tidy)
    return folder_of(place, identical)


def _train(config: Config, launch: Launch, folder: Path, checkpoints: Path, ranks: Ranks) -> Path:
    if ranks.first and (folder / "model").is_dir() and not latest(checkpoints):
        print(f"{folder} holds a finished student; it is trained anew and replaced at the end. Export it first, or give this "
              "run another train.name, if it should stay", file=sys.stderr)
    learner, trainer = build_learner(config, launch, folder, ranks)
    if config.train.selftest:
        require(prove(config, launch, learner, trainer))
    engine = ranks.together("loading the engine", lambda: build_engine(config, learner))
    streams, schedule = build_streams(config, launch, engine, ranks), Schedule(config)
    watch, state = build_watch(config, launch, trainer, folder, ranks), {}
    if found := sound(checkpoints, ranks):
        state = load_checkpoint(learner, found)
        if ranks.first:
            print(f"{config.train.name} (seed {config.seed}) goes on from step {learner.step}", file=sys.stderr)
        schedule.load_state_dict(state["schedule"])
        streams.load_state_dict(state["streams"])
        plan = Plan(**state["plan"])
        engine.load_weights(named_weights(learner), version=learner.step)
    else:
        plan = schedule.next()
        ranks.together("measuring how far the teachers are",
                       lambda: say_distances(config, launch, folder, learner, engine, ranks))
    watch.launch(learner.step, state.get("teachers"))
    watch.write_manifest(launch.manifest)
    streams.ended = watch.scoring.expect  # teachers behind servers score while the rest is sampled
    hidden = learner.model.config.get_text_config().hidden_size
    probed = False
    progress = Progress(f"{config.train.name} (seed {config.seed})", config.train.steps) if ranks.first else None
    notices = Notices(quiet=not ranks.first)
    saved, saving, stopping = learner.step, 0.0, 0

    def save() -> None:
        nonlocal saved, saving
        began = time.perf_counter()
        ranks.at(f"step {learner.step - 1}, saving a checkpoint")
        if ranks.first:
            log.flush()
        save_checkpoint(learner, checkpoints, {
            "schedule": schedule.state_dict(), "streams": streams.state_dict(), "plan": plan.to_json(),
            "teachers": watch.state_dict(),
        }, keep=config.train.keep_checkpoints, keep_every=config.train.keep_every)
        watch.write_manifest(launch.manifest)
        saved, saving = learner.step, time.perf_counter() - began

    with Stop(config.train.stop_within_s, quiet=not ranks.first) as stop, (
            MetricsLog(folder / "metrics.jsonl", first_step=learner.step, tensorboard=config.train.tensorboard)
            if ranks.first else contextlib.nullcontext()) as log:
        streams.may_break = stop.may_break
        while not stopping and learner.step < config.train.steps and (spent := budget_spent(config, streams)) < 1:
            step, start, cpu = learner.step, time.perf_counter(), time.process_time()
            learner.spent = spent  # before this step, as the step's number is
            standing = schedule.state_dict(), Counter(streams.totals)
            ranks.at(f"step {step}, sampling")
            try:
                samples = streams.sample(plan)
                following = schedule.next()
                streams.prefetch(following)  # its environments start while the learner works
                refuse_failures(config, step, samples)
                ranks.at(f"step {step}, waiting for scores")
                # On several ranks this wait is an exchange, which no rank may leave alone.
                with stop.may_break() if ranks.size == 1 else contextlib.nullcontext():
                    scoring = watch.before(step, samples.rows)
            except BrokenOff:
                schedule.load_state_dict(standing[0])
                streams.totals = standing[1]
                stopping = max(ranks.gather(stop.asked))
                break
            ranks.at(f"step {step}, training")
            trains = time.perf_counter()
            # Attention costs as much as the products of weights at about 12 hidden sizes of context.
            costs = [row_cost(row, even_length=12 * hidden) for row in samples.rows]
            report = trainer(share_of(samples.rows, costs, ranks), shares=plan.shares)
            ranks.at(f"step {step}, handing weights to the engine")
            engine.load_weights(named_weights(learner), version=learner.step)
            if not probed:
                ranks.together("checking the engine's weights", lambda: check_weights(learner, engine.score))
                probed = True
            notes = schedule.observe(report.reverse_kl)
            streams.observe(plan.step, samples, report.turn_scores)
            watch.after(report.metrics)
            record = step_record(plan, samples, report, notes, time.perf_counter() - start, scoring)
            # CPU seconds of all processes are steady on a busy machine too.
            processes = ranks.gather({
                "cpu": time.process_time() - cpu, "asked": stop.asked,
                "failures": {name: dict(domain.pool.stats.failures) for name, domain in launch.domains.items()}})
            add_processes(record, processes)
            stopping = max(part["asked"] for part in processes)  # all ranks agree
            notices.say(step, report.metrics)
            plan = following
            if ranks.first:
                log.write(record)
                done = max(learner.step, round(budget_spent(config, streams) * config.train.steps))
                progress.update(min(done, config.train.steps), f"loss {report.loss:.3f}")
            if learner.step % config.train.checkpoint_every == 0 and learner.step < config.train.steps:
                save()
            stop.rest_s = time.perf_counter() - trains + (0.0 if saved == learner.step else saving)
        if stopping and saved < learner.step:
            save()
    if stopping:
        if ranks.first:
            print(_how_it_stopped(stopping, learner.step, saved, config.train.steps), file=sys.stderr)
        raise Stopped(stopping)
    ranks.at("the end")
    launch.manifest |= watch.write_manifest(launch.manifest)
    return finish(config, launch, folder, learner, streams, plan, ranks)


def _how_it_stopped(number: int, step: int, saved: int, steps: int) -> str:
    where = "its checkpoint is saved and the same command goes on from there" if saved else "no step was made"
    return f"stopped by {signal.Signals(number).name} after {step} of {steps} steps: {where} (exit status {128 + number})"


def say_distances(config: Config, launch: Launch, folder: Path, learner: Learner, engine: HFEngine, ranks: Ranks) -> None:
    """How far every teacher is from the student's start (`teachers.consistency`), to stderr and consistency.json, by rank 0.
    Where the learner's weights are split over ranks, `mopd teacher compare` says it."""
    if not config.consistency.points or not ranks.first or not learner.whole:
        return
    found = measure_distances(config, list(config.domains), learner.model, engine, launch.registry.scorers(), launch.renderer,
                              launch.store, demonstrations=False)
    (folder / "consistency.json").write_text(json.dumps([distance.as_json() for distance in found]))
    print_distances(found, Console(stderr=True, highlight=False))


def identity(config: Config, launch: Launch) -> list:
    """Everything that a run's result depends on but its teachers: a checkpoint of another one is not gone on from. Teachers
    may change when a run resumes; its manifest keeps who served from which step on (teacher_history)."""
    parts = ("seed", "domains", "student", "selection", "train", "deepspeed")
    chosen = {name: value for name, value in to_dict(config).items() if name in parts}
    for name in ("selftest", "tensorboard", "checkpoint_every", "keep_checkpoints", "keep_every", "stop_within_s",
                 "ranks_timeout", "max_unscored_share",
                 "teacher_wait_s", "score_cache_mib", "probe_every", "probe_tolerance"):
        chosen["train"].pop(name)  # no result depends on these
    for domain in chosen["domains"].values():
        for name in ("teacher", "teacher_weights", "teacher_mixture"):
            domain.pop(name)
    return [chosen, {name: value for name, value in launch.manifest.items()
                     if name not in ("teachers", "unused", "mixtures", "warnings")}]


def budget_spent(config: Config, streams: Streams) -> float:
    """Share of `train.sampled_tokens` that the run has sampled, at 1 or above when it is over; 0 without such a budget.
    A checkpoint keeps the count (with the streams' state), so it is the same after a restart."""
    budget = config.train.sampled_tokens
    return streams.totals["sampled_tokens"] / budget if budget else 0.0


def build_learner(config: Config, launch: Launch, folder: Path, ranks: Ranks | None = None) -> tuple[Learner, LearnerStep]:
    """The student under DeepSpeed, and its step against the domains' teachers."""
    ranks = ranks or Ranks()
    model = ranks.together("loading the student", lambda: load_model(
        config.student.model, attention=config.student.attention, trust_remote_code=config.student.trust_remote_code))
    pad = launch.tokenizer.pad_token_id
    train = config.train
    log = "deepspeed.log" if ranks.first else f"deepspeed.rank-{ranks.rank}.log"
    learner = Learner(model, config=learner_config(train.optimizer, config, log_file=str(folder / log),
                                                   prefix_gradient=train.prefix_gradient),
                      total_steps=train.steps, pad_id=launch.renderer.end_id if pad is None else pad)
    step = StepConfig(
        objective=train.objective, objective_options=train.objective_options, aggregation=train.aggregation,
        aggregation_to=train.aggregation_to, max_staleness=train.max_staleness, staleness_decay=train.staleness_decay,
        balance=train.balance, balance_weights=train.balance_weights, temperature=train.temperature,
        stream_share={name: stream_shares(config, name) for name in config.domains},
        token_budget=train.micro_batch_tokens, peak_alert=train.peak_alert, cold_alert=train.cold_alert,
        turn_scores=launch.selector is not None and launch.selector.wants_scores)
    return learner, LearnerStep(learner, domains=list(config.domains), scorers=launch.registry.scorers(), config=step)


def build_watch(config: Config, launch: Launch, trainer: LearnerStep, folder: Path, ranks: Ranks) -> TeacherWatch:
    """What looks after the run's teachers."""
    special = set(launch.tokenizer.all_special_ids)
    return TeacherWatch(config, launch.registry, trainer.scorers, need=trainer.objective.needs,
                        temperature=trainer.temperature, store=launch.store,
                        ids=[i for i in range(len(launch.tokenizer)) if i not in special], folder=folder, ranks=ranks)


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


def build_engine(config: Config, learner: Learner) -> HFEngine:
    """The engine of this process, on a whole copy of the student: the learner's, or where its weights are split over ranks
    one that is read again (the weights of a checkpoint come with the next hand-over)."""
    model = learner.model if learner.whole else load_model(
        config.student.model, dtype=config.deepspeed.dtype, attention=config.student.attention,
        trust_remote_code=config.student.trust_remote_code)
    return HFEngine(model, max_batch=config.train.sampling_batch)


def build_streams(config: Config, launch: Launch, engine: HFEngine, ranks: Ranks | None = None) -> Streams:
    """What samples a plan's streams with `engine`, shared out over the ranks."""
    train = config.train
    return Streams(
        domains=launch.domains, store=launch.store, selector=launch.selector, engine=engine, renderer=launch.renderer,
        fingerprint=launch.renderer.fingerprint(engine.model.config), seed=config.seed, student=train.name,
        temperature=train.temperature, top_p=train.top_p, top_k=train.top_k, group_size=train.group_size,
        fresh_turns=train.fresh_turns,
        resume_turns={name: resume_turns(config, name) for name in config.domains},
        demonstration_fraction=train.demonstration_fraction, advantage=group_advantage(config), ranks=ranks)


def group_advantage(config: Config) -> GroupAdvantage:
    """How the rewards of a group become outcome advantages: centred, None where they have no spread."""
    def advantage(rewards):
        return centre(rewards, std_normalise=config.train.outcome_std_normalise) if has_spread(rewards) else None

    return advantage


def refuse_failures(config: Config, step: int, samples: StepSamples) -> None:
    """Stop where the environments are down, instead of training on what is left."""
    failed = sum(sum(counts.values()) for counts in samples.failures.values())
    played = samples.episodes + samples.resumed
    if played and failed > config.train.max_infra_failure_share * len(played):
        said = "; ".join(f"{name}: {dict(counts)}" for name, counts in samples.failures.items())
        words = next(e.failure_text for e in played if e.failure)
        what = "rollouts and resumed sequences" if samples.resumed else "rollouts"
        raise TooManyFailures(
            f"step {step}: {failed} of {len(played)} {what} failed for reasons of infrastructure ({said}); "
            f"the first said: {words}. Mend the environment and run the same command again: it goes on from the last "
            "checkpoint. train.max_infra_failure_share sets the limit")


def finish(config: Config, launch: Launch, folder: Path, learner: Learner, streams: Streams, plan: Plan,
           ranks: Ranks) -> Path:
    """Prove that router and teachers stayed as they were; write the student and a few scored episodes."""
    learner.check_routers()
    launch.registry.check_unchanged()
    model = folder / "model"
    student = learner.model if learner.whole else whole_student(config, learner, ranks)
    if ranks.first:
        save_model(student, model, tokenizer=launch.tokenizer,
                   manifest={**launch.manifest, "steps": learner.step, "router_hash": learner.router_hash,
                             "sampled_tokens": streams.totals["sampled_tokens"]})
        summary = streams.summary()
        if launch.selector is not None:
            write_selection(folder, launch.selector)
        streams.ranks = Ranks()  # these episodes are rank 0's alone
        (folder / "episodes.json").write_text(json.dumps(scored_episodes(streams, plan, student, launch)))
    ranks.gather(None)  # the others wait for what rank 0 writes
    learner.close()
    if ranks.first:
        for checkpoints in (folder / "checkpoints").glob("*"):  # a second run of the same name starts anew
            close_folder(checkpoints, config.train.keep_every)
        with contextlib.suppress(OSError):
            (folder / "checkpoints").rmdir()
        print(f"result: {config.train.name} (seed {config.seed}): {learner.step} steps; {summary}")
        print(f"model: {model}")
    return model
