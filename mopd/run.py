"""One MOPD² run: sample, score, train, hand the new weights to the sampling engine; again.

    schedule ─▶ streams ─▶ teachers ─▶ learner ─▶ weights to the engine
    (what next)  (student tokens)  (scores)  (DeepSpeed)
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from pathlib import Path

from mopd.check import Launch, open_launch
from mopd.config import Config, learner_config, resume_turns, stream_shares, to_dict
from mopd.learner.checkpoint import latest, load_checkpoint, own_folder, save_checkpoint
from mopd.learner.engine import Learner
from mopd.learner.model import load_model, save_model
from mopd.learner.step import LearnerStep, StepConfig
from mopd.learner.weights import named_weights
from mopd.locks import only_process
from mopd.metrics import MetricsBusy, MetricsLog
from mopd.progress import Progress
from mopd.run_records import Notices, scored_episodes, step_record, write_selection
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.hf import HFEngine
from mopd.sampling.streams import StepSamples, Streams
from mopd.schedule import Plan, Schedule
from mopd.selftest import Check, require, selftest
from teachers.grading import centre, has_spread


class TooManyFailures(RuntimeError):
    """Infrastructure failures took more of a step than `train.max_infra_failure_share` allows."""


def train(config: Config, *, resume: bool = True) -> Path:
    """Train one student as `config.train` says; returns the folder of the finished student.

    Writes RUN/students/NAME/seed-S/{config.json, manifest.json, metrics.jsonl, checkpoints/, model/, episodes.json}, with
    stored prefixes selection.json (what was drawn) and, where scores were measured, scores.json.
    Raises ConfigError for everything that can be known to be wrong before the start, MetricsBusy where another process
    trains in the same folder, SelftestFailed, and TooManyFailures and NothingScored in between.
    """
    launch = open_launch(config)
    folder = Path(config.run) / "students" / config.train.name / f"seed-{config.seed}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with only_process(folder / ".lock", MetricsBusy.at(folder)):
            return _train(config, launch, folder, resume)
    finally:
        launch.close()


def _train(config: Config, launch: Launch, folder: Path, resume: bool) -> Path:
    (folder / "config.json").write_text(json.dumps(to_dict(config), indent=1))
    (folder / "manifest.json").write_text(json.dumps(launch.manifest, indent=1))
    checkpoints = own_folder(folder / "checkpoints", identity(config, launch), resume=resume)
    learner, trainer = build_learner(config, launch, folder)
    if config.train.selftest:
        require(prove(config, launch, learner, trainer))
    engine = HFEngine(learner.model, max_batch=config.train.sampling_batch)
    streams, schedule = build_streams(config, launch, engine), Schedule(config)
    if found := latest(checkpoints):
        state = load_checkpoint(learner, found)
        schedule.load_state_dict(state["schedule"])
        streams.load_state_dict(state["streams"])
        plan = Plan(**state["plan"])
        engine.load_weights(named_weights(learner), version=learner.step)
    else:
        plan = schedule.next()
    progress, notices = Progress(f"{config.train.name} (seed {config.seed})", config.train.steps), Notices()
    with MetricsLog(folder / "metrics.jsonl", first_step=learner.step, tensorboard=config.train.tensorboard) as log:
        while learner.step < config.train.steps and (spent := budget_spent(config, streams)) < 1:
            step, start, cpu = learner.step, time.perf_counter(), time.process_time()
            learner.spent = spent  # before this step, as the step's number is
            samples = streams.sample(plan)
            following = schedule.next()
            streams.prefetch(following)  # its environments start while the learner works
            refuse_failures(config, step, samples)
            report = trainer(samples.rows, shares=plan.shares)
            engine.load_weights(named_weights(learner), version=learner.step)
            notes = schedule.observe(report.reverse_kl)
            streams.observe(plan.step, samples, report.turn_scores)
            record = step_record(plan, samples, report, notes, time.perf_counter() - start)
            for name, domain in launch.domains.items():
                record["domains"][name]["environment_failures"] = dict(domain.pool.stats.failures)
            record["seconds"]["cpu"] = time.process_time() - cpu  # of this process: steady on a busy machine too
            log.write(record)
            notices.say(step, report.metrics)
            plan = following
            done = max(learner.step, round(budget_spent(config, streams) * config.train.steps))
            progress.update(min(done, config.train.steps), f"loss {report.loss:.3f}")
            if learner.step % config.train.checkpoint_every == 0 and learner.step < config.train.steps:
                save_checkpoint(learner, checkpoints, {
                    "schedule": schedule.state_dict(), "streams": streams.state_dict(), "plan": plan.to_json(),
                }, keep=config.train.keep_checkpoints)
    return finish(config, launch, folder, learner, streams, plan)


def identity(config: Config, launch: Launch) -> list:
    """Everything that a run's result depends on: a checkpoint of another one is not gone on from."""
    parts = ("seed", "domains", "student", "selection", "train", "deepspeed")
    chosen = {name: value for name, value in to_dict(config).items() if name in parts}
    for name in ("selftest", "tensorboard", "checkpoint_every", "keep_checkpoints"):
        chosen["train"].pop(name)  # no result depends on these
    return [chosen, launch.manifest]


def budget_spent(config: Config, streams: Streams) -> float:
    """Share of `train.sampled_tokens` that the run has sampled, at 1 or above when it is over; 0 without such a budget.
    A checkpoint keeps the count (with the streams' state), so it is the same after a restart."""
    budget = config.train.sampled_tokens
    return streams.totals["sampled_tokens"] / budget if budget else 0.0


def build_learner(config: Config, launch: Launch, folder: Path) -> tuple[Learner, LearnerStep]:
    """The student under DeepSpeed, and its step against the domains' teachers."""
    model = load_model(config.student.model, trust_remote_code=config.student.trust_remote_code)
    pad = launch.tokenizer.pad_token_id
    train = config.train
    learner = Learner(model, config=learner_config(train.optimizer, config, log_file=str(folder / "deepspeed.log"),
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


def build_streams(config: Config, launch: Launch, engine: HFEngine) -> Streams:
    """What samples a plan's streams with `engine`."""
    train = config.train
    return Streams(
        domains=launch.domains, store=launch.store, selector=launch.selector, engine=engine, renderer=launch.renderer,
        fingerprint=launch.renderer.fingerprint(engine.model.config), seed=config.seed, student=train.name,
        temperature=train.temperature, group_size=train.group_size, fresh_turns=train.fresh_turns,
        resume_turns={name: resume_turns(config, name) for name in config.domains},
        demonstration_fraction=train.demonstration_fraction, advantage=group_advantage(config))


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


def finish(config: Config, launch: Launch, folder: Path, learner: Learner, streams: Streams, plan: Plan) -> Path:
    """Prove that router and teachers stayed as they were; write the student and a few scored episodes."""
    learner.check_routers()
    launch.registry.check_unchanged()
    model = save_model(learner.model, folder / "model", tokenizer=launch.tokenizer,
                       manifest={**launch.manifest, "steps": learner.step, "router_hash": learner.router_hash,
                                 "sampled_tokens": streams.totals["sampled_tokens"]})
    summary = streams.summary()
    if launch.selector is not None:
        write_selection(folder, launch.selector)
    (folder / "episodes.json").write_text(json.dumps(scored_episodes(streams, plan, learner.model, launch)))
    learner.close()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a second run of the same name starts anew
    print(f"result: {config.train.name} (seed {config.seed}): {learner.step} steps; {summary}")
    print(f"model: {model}")
    return model
