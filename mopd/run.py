"""One MOPD² run: sample, score, train, hand the new weights to whoever samples; again.

    source ─────▶ teachers ─▶ learner ─▶ weights to the source
    (what next,   (scores)   (DeepSpeed)  (sampled in turn, or ahead by samplers of their own)
     student tokens)

The source is one of two (mopd/sources.py); what else a run is built of stands in mopd/run_parts.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from pathlib import Path

from mopd.check import Launch, open_launch
from mopd.config import Config
from mopd.learner.best import RunScore
from mopd.learner.checkpoint import finish_saving, latest, load_checkpoint, reading, save_checkpoint, settle_saving, sound
from mopd.learner.packing import row_cost
from mopd.metrics import MetricsLog
from mopd.progress import Progress
from mopd.ranks import Ranks
from mopd.relayout import portable_copy
from mopd.run_parts import (
    budget_spent,
    build_learner,
    build_source,
    build_watch,
    check_ranks,
    find_checkpoints,
    finish,
    finished_run,
    prove,
    say_distances,
    selftest_run,
    take_folder,
)
from mopd.run_records import Notices, add_processes, progress_words, step_record
from mopd.sampling.failures import TooManyFailures
from mopd.sampling.sharing import share_of
from mopd.schedule import loss_streams
from mopd.selftest import require
from mopd.signals import BrokenOff, Stop, Stopped

__all__ = ["TooManyFailures", "selftest_run", "train"]


def train(config: Config, *, resume: bool = True, rollback: int = 0) -> Path:
    """Train one student as `config.train` says; returns the folder of the finished student. Goes on from the last checkpoint
    of this very run if there is one, and does nothing where it is finished; without `resume` it starts anew, with `rollback`
    it goes that many steps back first.

    Writes RUN/students/NAME/seed-S/{config.json, manifest.json, metrics.jsonl, checkpoints/, model/, episodes.json,
    finished.json}, with
    stored prefixes selection.json (what was drawn) and, where scores were measured, scores.json; with samplers that run
    ahead accounts.json (what became of every launched group) and a log of each.
    On several ranks every one calls it with the same config (docs/distributed.md); the files are rank 0's.
    Raises ConfigError for everything that can be known to be wrong before the start, MetricsBusy where another process
    trains in the same folder, CannotRollBack, SelftestFailed, and TooManyFailures and NothingScored in between; Stopped (an
    exit) after SIGTERM or SIGINT, when a checkpoint is saved (docs/reliability.md).
    """
    ranks = Ranks.start(timeout=config.train.ranks_timeout, warn_after=config.train.ranks_warn_s)
    with ranks.reporting():
        check_ranks(config, ranks)
        launch = ranks.together("opening what the run stands on", lambda: open_launch(config))
        folder = Path(config.run) / "students" / config.train.name / f"seed-{config.seed}"
        try:
            ranks.agree("what it found (teachers, store, tokenizer)", launch.manifest)
            with contextlib.ExitStack() as held:
                ranks.together("taking the run's folder", lambda: take_folder(folder, ranks, held))
                if resume and not rollback and (words := ranks.of_first(lambda: finished_run(config, launch, folder))):
                    if ranks.first:
                        print(words)
                    return folder / "model"
                checkpoints = find_checkpoints(config, launch, folder, resume, rollback, ranks)
                model = _train(config, launch, folder, checkpoints, ranks)
        finally:
            launch.close()
    return model


def _train(config: Config, launch: Launch, folder: Path, checkpoints: Path, ranks: Ranks) -> Path:
    if ranks.first and (folder / "model").is_dir() and not latest(checkpoints):
        print(f"{folder} holds a finished student; it is trained anew and replaced at the end. Export it first, or give this "
              "run another train.name, if it should stay", file=sys.stderr)
    learner, trainer = build_learner(config, launch, folder, ranks)
    if config.train.selftest:
        require(prove(config, launch, learner, trainer))
    source = build_source(config, launch, learner, folder, ranks)
    with contextlib.closing(source):
        try:
            return _loop(config, launch, folder, checkpoints, ranks, learner, trainer, source)
        except BaseException:
            ranks.ending()
            settle_saving(learner)
            raise


def _loop(config: Config, launch: Launch, folder: Path, checkpoints: Path, ranks: Ranks, learner, trainer, source) -> Path:
    watch, state, score = build_watch(config, launch, trainer, folder, ranks), {}, RunScore(config.train.keep_best)
    if found := sound(checkpoints, ranks):
        state = load_checkpoint(learner, found, convert=lambda path: portable_copy(path, folder, ranks))
        with reading(found):
            score.load_state_dict(state["score"])
        if ranks.first:
            print(f"{config.train.name} (seed {config.seed}) goes on from step {learner.step}", file=sys.stderr)
    else:
        ranks.together("measuring how far the teachers are", lambda: say_distances(config, launch, folder, learner, ranks))
    with reading(found):
        source.begin(state)
        watch.launch(learner.step, state.get("teachers"))
    watch.write_manifest(launch.manifest)
    hidden = learner.model.config.get_text_config().hidden_size
    progress = Progress(f"{config.train.name} (seed {config.seed})", config.train.steps) if ranks.first else None
    notices = Notices(quiet=not ranks.first)
    saved, saving, stopping = learner.step, 0.0, 0

    def save() -> None:
        nonlocal saved, saving
        began = time.perf_counter()
        ranks.at(f"step {learner.step - 1}, saving a checkpoint")
        if ranks.first:
            log.flush()
        save_checkpoint(learner, checkpoints,
                        source.state_dict() | {"teachers": watch.state_dict(), "score": score.state_dict()},
                        keep=config.train.keep_checkpoints, keep_every=config.train.keep_every, score=score.score,
                        background=config.train.async_checkpoints)
        watch.write_manifest(launch.manifest)
        saved, saving = learner.step, max(time.perf_counter() - began, learner.saving_seconds)

    with Stop(config.train.stop_within_s, quiet=not ranks.first) as stop, (
            MetricsLog(folder / "metrics.jsonl", first_step=learner.step, tensorboard=config.train.tensorboard)
            if ranks.first else contextlib.nullcontext()) as log:
        source.listen(watch.scoring.expect, stop.may_break)  # teachers behind servers score while the rest is sampled
        while not stopping and learner.step < config.train.steps and (spent := budget_spent(config, source.totals)) < 1:
            step, start, cpu = learner.step, time.perf_counter(), time.process_time()
            learner.spent = spent  # before this step, as the step's number is
            ranks.take_waited()  # what was before the step
            try:
                ranks.at(f"step {step}, sampling")
                plan, samples, told = source.take(step)
                sampled = time.process_time() - cpu
                waited = ranks.take_waited()
                if config.sampling.overlap:
                    waited = 0.0  # all ranks wait for the samplers through rank 0
                ranks.at(f"step {step}, waiting for scores")
                # On several ranks this wait is an exchange, which no rank may leave alone.
                with stop.may_break() if ranks.size == 1 else contextlib.nullcontext():
                    scoring = watch.before(step, samples.rows)
            except BrokenOff:
                source.put_back()
                stopping = max(ranks.gather(stop.asked))
                break
            ranks.take_waited()  # that was for teachers, whose wait is told elsewhere
            ranks.at(f"step {step}, training")
            trains = time.perf_counter()
            # Attention costs as much as the products of weights at about 12 hidden sizes of context.
            costs = [row_cost(row, even_length=12 * hidden) for row in samples.rows]
            if plan.streams is not None:
                streams = {name: loss_streams(config, name, parts) for name, parts in plan.streams.items()}
                trainer.config = dataclasses.replace(trainer.config, stream_share=streams)
            report = trainer(share_of(samples.rows, costs, ranks, together=config.deepspeed.sequence_parallel_size),
                             shares=plan.shares)
            ranks.at(f"step {step}, handing weights to the engine")
            weights = source.hand_over()
            notes = source.trained(plan, samples, report)
            watch.after(report.metrics)
            record = step_record(plan, samples, report, notes, time.perf_counter() - start, scoring, told, weights)
            # CPU seconds of all processes are steady on a busy machine too.
            processes = ranks.gather({
                "cpu": time.process_time() - cpu, "cpu_sampling": sampled, "asked": stop.asked,
                "waited": waited + ranks.take_waited() + learner.waited,
                "counts": source.counts()})
            add_processes(record, processes, report.metrics, config.train.straggler_alert)
            score.observe(record)
            stopping = max(part["asked"] for part in processes)  # all ranks agree
            notices.say(step, report.metrics)
            if ranks.first:
                log.write(record)
                done = max(learner.step, round(budget_spent(config, source.totals) * config.train.steps))
                progress.update(min(done, config.train.steps), progress_words(record))
            if learner.step % config.train.checkpoint_every == 0 and learner.step < config.train.steps:
                save()
            stop.rest_s = time.perf_counter() - trains + (0.0 if saved == learner.step else saving)
        if (stopping or config.train.keep_best) and saved < learner.step:  # the end may be the best
            save()
        finish_saving(learner)
    if stopping:
        if ranks.first:
            print(_how_it_stopped(stopping, learner.step, saved, config.train.steps), file=sys.stderr)
        raise Stopped(stopping)
    ranks.at("the end")
    source.close()
    launch.manifest |= watch.write_manifest(launch.manifest)
    return finish(config, launch, folder, learner, source, ranks)


def _how_it_stopped(number: int, step: int, saved: int, steps: int) -> str:
    where = "its checkpoint is saved and the same command goes on from there" if saved else "no step was made"
    return f"stopped by {signal.Signals(number).name} after {step} of {steps} steps: {where} (exit status {128 + number})"
