"""An SFT teacher: supervised training on a domain's demonstrations, from the base, router frozen.

The same on several domains at once is the off-policy baseline. The result is an ordinary Hugging Face folder with a
manifest.json that says what it was made from.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mopd.config import Config, ConfigError, learner_config
from mopd.config_supervised import LoRAConfig, SFTConfig
from mopd.learner.best import Evaluation
from mopd.learner.checkpoint import folder_of, own_folder
from mopd.learner.engine import start_processes
from mopd.learner.model import check_model_source, load_model, save_model
from mopd.learner.moe import router_hash
from mopd.learner.supervised import Progress as Step
from mopd.learner.supervised import SupervisedConfig, SupervisedResult, train_supervised
from mopd.metrics import MetricsLog
from mopd.progress import Progress
from mopd.ranks import Ranks
from mopd.rows import Row
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from teachers.demonstrations import Demonstrations, read_demonstrations
from teachers.lora import adapted, add_lora, check_lora, check_targets, label_logprobs, merge_lora, require_equal
from teachers.registry import model_revision
from teachers.sft_evaluation import TeacherEvaluation, check_evaluation, say

COMPARED_ROWS = 8
# rows on which merged adapters are compared with the adapters themselves


def sft_teacher(*, base: str | Path, rows: Sequence[Row], out: str | Path, config: SupervisedConfig,
                name: str, provenance: dict[str, Any] | None = None, trust_remote_code: bool = False,
                lora: LoRAConfig | None = None, section: str = "sft",
                make_evaluation: Callable[[Any], TeacherEvaluation] | None = None,
                progress: Callable[[Step], None] | None = None,
                checkpoint_folder: str | Path | None = None) -> SupervisedResult:
    """Train the model in `base` on `rows` and write it to `out` with base's tokenizer and a manifest.

    The router stays as it is in `base` when `config.learner.freeze_router` is set (the default) and under LoRA; the manifest
    holds its hash before and after.

    section          the configuration's that asks for this, for messages
    lora             adapters in place of whole matrices; merged on export, and the merged model compared with them
    make_evaluation  called with the model before the training; what it gives is called every `config.evaluate_every` steps
                     and at the end, and the best evaluation's weights are what is written
    Raises ConfigError for LoRA targets that are not there, MergeMismatch, and what training and evaluation raise.
    """
    check_model_source(base)
    tokenizer = load_tokenizer(str(base), trust_remote_code=trust_remote_code)
    model = load_model(base, trust_remote_code=trust_remote_code)
    before, pad = router_hash(model), _pad_id(tokenizer)
    tuner = None
    if lora is not None and lora.rank:
        tuner = add_lora(model, lora, seed=config.seed, section=section)
        on = sorted({".".join(target.split(".")[-2:]) for target in adapted(model)})
        config = dataclasses.replace(config, learner=dataclasses.replace(config.learner, freeze_router=True))
    rank, _ = start_processes(shm_build=config.learner.shm_build, log_file=config.learner.log_file)
    evaluation = make_evaluation(model) if make_evaluation is not None and rank == 0 else None
    try:
        result = train_supervised(model, rows, config, pad_id=pad, progress=progress,
                                  evaluate=None if make_evaluation is None else evaluation or _on_rank_0,
                                  checkpoint_folder=checkpoint_folder)
    finally:
        if evaluation is not None:
            evaluation.close()
    if rank:
        return result
    manifest = {
        "kind": "supervised", "name": name, "base": Path(base).name, "base_revision": model_revision(base),
        "domains": sorted({row.domain for row in rows}), "rows": len(rows), "steps": result.steps,
        "loss_tokens": result.loss_tokens, "tokens": result.tokens, "seconds": round(result.seconds, 3),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "router_hash_before": before,
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)), **(provenance or {})}
    if result.best is not None:
        manifest |= {"best_step": result.best[0], "best": result.best[1].record, "stopped_early": result.stopped_early,
                     "evaluations": [{"step": step, **one.record} for step, one in result.evaluations]}
    manifest["config"]["learner"].pop("log_file", None)
    sample = list(rows[:COMPARED_ROWS])
    if tuner is not None:
        adapters = label_logprobs(model, sample, pad_id=pad, token_budget=config.token_budget)
        model = merge_lora(tuner)
        merged = label_logprobs(model, sample, pad_id=pad, token_budget=config.token_budget)
        manifest["lora"] = {**dataclasses.asdict(lora), "on": on,
                            "merged_difference": require_equal(adapters, merged, model.dtype)}
    manifest["router_hash_after"] = router_hash(model)
    save_model(model, out, tokenizer=tokenizer, manifest=manifest)
    if tuner is not None:
        written = load_model(out, trust_remote_code=trust_remote_code)
        require_equal(adapters, label_logprobs(written, sample, pad_id=pad, token_budget=config.token_budget), model.dtype)
    return result


def _on_rank_0(step: int) -> Evaluation:
    raise AssertionError(f"the evaluation after step {step} is rank 0's")


def check_layout(config: Config) -> None:
    """Raise ConfigError for a layout in which no rank has the whole teacher to write."""
    if config.deepspeed.autoep_size > 1:
        raise ConfigError(f"deepspeed.autoep_size: {config.deepspeed.autoep_size} spreads experts over ranks, and a teacher "
                          "has all of them on every rank; take deepspeed.autoep_size=0 for this command, and "
                          "deepspeed.zero_stage=3 to split the weights")
    if config.deepspeed.sequence_parallel_size > 1:
        raise ConfigError(f"deepspeed.sequence_parallel_size: {config.deepspeed.sequence_parallel_size} ranks share columns "
                          "in `mopd train` alone; take 1 for this command")


def run_sft(config: Config, domains: Sequence[str], out: str | Path, *, baseline: bool = False) -> SupervisedResult:
    """`mopd teacher sft`: train on the demonstrations of `domains` with config section `sft` (and `sft_domains.NAME`), or
    `off_policy` for the baseline. Several domains are mixed by their shares.

    Beside the folder OUT a file OUT.metrics.jsonl is written, one line per step with what an evaluation found; beside the
    baseline's folder it is metrics.jsonl, as an MOPD² run writes one, so that their costs can be compared. Checkpoints lie in
    OUT.checkpoints until the teacher is written: the same command goes on from them, whatever ended it.
    On several ranks every one calls it with the same config; each trains on its share of every batch, and rank 0 evaluates
    and writes. Raises ConfigError for what can be known to be wrong before weights are loaded, mopd.ranks.RanksDiffer and
    RankFailed where another rank has other demonstrations or is lost.
    """
    check_layout(config)
    ranks = Ranks.start(timeout=config.train.ranks_timeout)
    with ranks.reporting():
        return _run(config, domains, Path(out), baseline, ranks)


def _run(config: Config, domains: Sequence[str], out: Path, baseline: bool, ranks: Ranks) -> SupervisedResult:
    unknown = [d for d in domains if d not in config.domains]
    if unknown:
        raise ConfigError(f"unknown domain {', '.join(unknown)}; the config has {', '.join(config.domains)}")
    key, options = ("off_policy", config.off_policy) if baseline else ("sft", config.sft)
    if not baseline and len(domains) == 1 and domains[0] in config.sft_domains:
        key, options = f"sft_domains.{domains[0]}", config.sft_domains[domains[0]]
    base = config.student.model
    check_model_source(base)
    if options.lora.rank:
        check_lora(key)
        check_targets(base, options.lora, key, trust_remote_code=config.student.trust_remote_code)
    renderer = ChatRenderer(load_tokenizer(base, trust_remote_code=config.student.trust_remote_code),
                            stop_strings=config.sampling.stop_strings)
    found = ranks.together("reading the demonstrations", lambda: read_demonstrations(config, options, domains, renderer))
    if options.evaluate_every:
        check_evaluation(config, key, options, domains, found.held_out)
    label = "off-policy baseline" if baseline else f"teacher of {', '.join(domains)}"
    supervised = SupervisedConfig(
        steps=options.steps, batch_rows=options.rows_per_step, token_budget=options.micro_batch_tokens,
        seed=config.seed,
        mixture={d: config.domains[d].share for d in domains} if len(domains) > 1 else {},
        save_every=options.checkpoint_every, evaluate_every=options.evaluate_every, patience=options.patience,
        learner=learner_config(options.optimizer, config, log_file=f"{out}.deepspeed.log"))
    rows = found.rows
    identity = _identity(config, options, supervised, found, base)
    ranks.agree("what it trains on", dict(zip(("settings", "base", "demonstrations", "and more"),
                                              [*identity[:3], identity[3:]], strict=True)))
    folder = Path(f"{out}.checkpoints")
    ranks.together("looking at the checkpoints", lambda: own_folder(folder, identity) if ranks.first else None)
    checkpoints = folder_of(folder, identity)
    rank, _ = start_processes(log_file=f"{out}.deepspeed.log")
    if rank == 0:
        for line in [*found.describe(), *_split_notes(options, found)]:
            print(line)
    bar = Progress(label, options.steps) if rank == 0 else None
    log = _StepLog(out.parent / "metrics.jsonl" if baseline else Path(f"{out}.metrics.jsonl"))

    def progress(step: Step) -> None:
        bar.update(step.step, f"loss {step.loss:.3f}")
        if step.evaluation is not None:
            print(f"after step {step.step}: {say(step.evaluation)}", flush=True)
        log(step)

    def make_evaluation(model: Any) -> TeacherEvaluation:
        return TeacherEvaluation(config, options, domains, model, renderer, found.held_out,
                                 pad_id=_pad_id(renderer.tokenizer))

    try:
        result = sft_teacher(
            base=base, rows=rows, out=out, config=supervised, name=label,
            provenance={"store_version": found.store_version, "demonstrations": _counts(found)},
            trust_remote_code=config.student.trust_remote_code, lora=options.lora, section=key,
            make_evaluation=make_evaluation if options.evaluate_every else None, progress=progress,
            checkpoint_folder=checkpoints)
    finally:
        log.close()
    if rank:
        return result
    # A second call with the same config must train anew, so nothing to resume from is left behind.
    shutil.rmtree(Path(f"{out}.checkpoints"), ignore_errors=True)
    best = ""
    if result.best is not None:
        best = (f"; the best of {len(result.evaluations)} evaluations is that after step {result.best[0]} "
                f"({say(result.best[1])}), which is written" + (", stopped early" if result.stopped_early else ""))
    print(f"result: {label}: {len(rows)} demonstrations, {result.steps} steps, "
          f"{result.tokens / max(result.seconds, 1e-9):.0f} tokens/s"
          + (f", loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}" if result.losses else "") + best)
    return result


def _identity(config: Config, options: SFTConfig, supervised: SupervisedConfig, found: Demonstrations, base: str) -> list:
    """What this training's result depends on, as JSON values: settings, base, demonstrations, and what else there is."""
    trained_on = hashlib.sha256()
    for row in [*found.rows, *found.held_out]:
        trained_on.update(row.trunk.tobytes())
    identity = [dataclasses.asdict(supervised), model_revision(base), trained_on.hexdigest()]
    if options.lora.rank:
        identity.append(dataclasses.asdict(options.lora))
    if options.evaluate_every:
        identity += [options.evaluation_episodes, options.evaluation_split, config.evaluate.temperature,
                     {name: dataclasses.asdict(config.domains[name]) for name in found.domains}]
    return identity


def _split_notes(options: SFTConfig, found: Demonstrations) -> list[str]:
    """A warning where demonstrations are of tasks that evaluation plays too."""
    if not options.evaluate_every:
        return []
    return [f"warning: {part.splits[options.evaluation_split]} demonstrations of {name} are of tasks of the split "
            f"{options.evaluation_split}, on which the teacher is evaluated" for name, part in found.domains.items()
            if part.splits[options.evaluation_split]]


def _counts(found: Demonstrations) -> dict[str, Any]:
    """What was read and left out, for the manifest. Words of files are left out with their places."""
    return {name: {"sequences": part.sequences, "rows": len(part.rows), "held_out_rows": len(part.held_out),
                   "left_out": dict(part.left_out)} for name, part in found.domains.items()}


class _StepLog:
    """The metrics file of a supervised run, under the names that a report reads; a resumed run goes on in it."""

    def __init__(self, path: Path):
        self.path, self.log = path, None

    def __call__(self, step: Step) -> None:
        report = step.report
        if self.log is None:
            self.log = MetricsLog(self.path, first_step=report.step)
        record = {
            "step": report.step, "loss": report.loss, "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "seconds": {"training": report.seconds, "sampling": 0.0, "scoring": 0.0, "environments": 0.0,
                        "total": report.seconds},
            "tokens": {"sampled": 0, "trained": report.loss_tokens, "computed": report.tokens}, "environment_steps": 0}
        if step.evaluation is not None:
            record["evaluation"] = step.evaluation.record
        self.log.write(record)

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def _pad_id(tokenizer) -> int:
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0
