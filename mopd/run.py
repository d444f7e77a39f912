"""One MOPD² run: sample, score, train, hand the new weights to the sampling engine; again.

    schedule ─▶ streams ─▶ teachers ─▶ learner ─▶ weights to the engine
    (what next)  (student tokens)  (scores)  (DeepSpeed)
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

from mopd.check import Launch, open_launch
from mopd.config import Config, learner_config, stream_shares, to_dict
from mopd.learner.checkpoint import latest, load_checkpoint, own_folder, save_checkpoint
from mopd.learner.engine import Learner
from mopd.learner.model import load_model, save_model
from mopd.learner.step import LearnerStep, StepConfig
from mopd.learner.weights import named_weights
from mopd.metrics import MetricsLog
from mopd.progress import Progress
from mopd.run_records import scored_episodes, step_record
from mopd.sampling.hf import HFEngine
from mopd.sampling.streams import StepSamples, Streams
from mopd.schedule import Plan, Schedule


class TooManyFailures(RuntimeError):
    """Infrastructure failures took more of a step than `train.max_infra_failure_share` allows."""


def train(config: Config, *, resume: bool = True) -> Path:
    """Train one student as `config.train` says; returns the folder of the finished student.

    Writes RUN/students/NAME/seed-S/{config.json, manifest.json, metrics.jsonl, checkpoints/, model/, episodes.json}.
    Raises ConfigError for everything that can be known to be wrong before the start, TooManyFailures in between.
    """
    launch = open_launch(config)
    folder = Path(config.run) / "students" / config.train.name / f"seed-{config.seed}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(to_dict(config), indent=1))
        (folder / "manifest.json").write_text(json.dumps(launch.manifest, indent=1))
        checkpoints = own_folder(folder / "checkpoints", identity(config, launch), resume=resume)
        learner, trainer = build_learner(config, launch, folder)
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
        progress = Progress(f"{config.train.name} (seed {config.seed})", config.train.steps)
        with MetricsLog(folder / "metrics.jsonl", first_step=learner.step, tensorboard=config.train.tensorboard) as log:
            while learner.step < config.train.steps:
                step, start = learner.step, time.perf_counter()
                samples = streams.sample(plan)
                following = schedule.next()
                streams.prefetch(following)  # its environments start while the learner works
                refuse_failures(config, step, samples)
                report = trainer(samples.rows, shares=plan.shares)
                engine.load_weights(named_weights(learner), version=learner.step)
                notes = schedule.observe(report.reverse_kl)
                log.write(step_record(plan, samples, report, notes, time.perf_counter() - start))
                plan = following
                progress.update(learner.step, f"loss {report.loss:.3f}")
                if learner.step % config.train.checkpoint_every == 0 and learner.step < config.train.steps:
                    save_checkpoint(learner, checkpoints, {
                        "schedule": schedule.state_dict(), "streams": streams.state_dict(), "plan": plan.to_json(),
                    }, keep=config.train.keep_checkpoints)
        return finish(config, launch, folder, learner, streams, plan)
    finally:
        launch.close()


def identity(config: Config, launch: Launch) -> list:
    """Everything that a run's result depends on: a checkpoint of another one is not gone on from."""
    parts = ("seed", "domains", "student", "selection", "train", "deepspeed")
    return [{name: value for name, value in to_dict(config).items() if name in parts}, launch.manifest]


def build_learner(config: Config, launch: Launch, folder: Path) -> tuple[Learner, LearnerStep]:
    """The student under DeepSpeed, and its step against the domains' teachers."""
    model = load_model(config.student.model, trust_remote_code=config.student.trust_remote_code)
    pad = launch.tokenizer.pad_token_id
    train = config.train
    learner = Learner(model, config=learner_config(train.optimizer, config, log_file=str(folder / "deepspeed.log")),
                      total_steps=train.steps, pad_id=launch.renderer.end_id if pad is None else pad)
    step = StepConfig(
        objective=train.objective, objective_options=train.objective_options, aggregation=train.aggregation,
        balance=train.balance, balance_weights=train.balance_weights, temperature=train.temperature,
        stream_share={name: stream_shares(config, name) for name in config.domains},
        token_budget=train.micro_batch_tokens, peak_alert=train.peak_alert, cold_alert=train.cold_alert)
    return learner, LearnerStep(learner, domains=list(config.domains), scorers=launch.registry.scorers(), config=step)


def build_streams(config: Config, launch: Launch, engine: HFEngine) -> Streams:
    """What samples a plan's streams with `engine`."""
    train = config.train
    return Streams(
        domains=launch.domains, store=launch.store, selector=launch.selector, engine=engine, renderer=launch.renderer,
        fingerprint=launch.renderer.fingerprint(engine.model.config), seed=config.seed, student=train.name,
        temperature=train.temperature, group_size=train.group_size, fresh_turns=train.fresh_turns,
        demonstration_fraction=train.demonstration_fraction)


def refuse_failures(config: Config, step: int, samples: StepSamples) -> None:
    """Stop where the environments are down, instead of training on what is left."""
    failed = sum(sum(counts.values()) for counts in samples.failures.values())
    if samples.episodes and failed > config.train.max_infra_failure_share * len(samples.episodes):
        said = "; ".join(f"{name}: {dict(counts)}" for name, counts in samples.failures.items())
        words = next(e.failure_text for e in samples.episodes if e.failure)
        raise TooManyFailures(
            f"step {step}: {failed} of {len(samples.episodes)} rollouts failed for reasons of infrastructure ({said}); "
            f"the first said: {words}. Mend the environment and run the same command again: it goes on from the last "
            "checkpoint. train.max_infra_failure_share sets the limit")


def finish(config: Config, launch: Launch, folder: Path, learner: Learner, streams: Streams, plan: Plan) -> Path:
    """Prove that router and teachers stayed as they were; write the student and a few scored episodes."""
    learner.check_routers()
    launch.registry.check_unchanged()
    model = save_model(learner.model, folder / "model", tokenizer=launch.tokenizer,
                       manifest={**launch.manifest, "steps": learner.step, "router_hash": learner.router_hash})
    summary = streams.summary()
    (folder / "episodes.json").write_text(json.dumps(scored_episodes(streams, plan, learner.model, launch)))
    learner.close()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # a second run of the same name starts anew
    print(f"result: {config.train.name} (seed {config.seed}): {config.train.steps} steps; {summary}")
    return model
