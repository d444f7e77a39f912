"""An SFT teacher: supervised training on a domain's stored demonstrations, from the base, router frozen.

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
from mopd.learner.checkpoint import own_folder
from mopd.learner.model import check_model_source, load_model, save_model
from mopd.learner.moe import router_hash
from mopd.learner.supervised import Progress as Step
from mopd.learner.supervised import SupervisedConfig, SupervisedResult, rows_of_sequence, train_supervised
from mopd.metrics import MetricsLog
from mopd.progress import Progress
from mopd.rows import Row
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from prefix_store import PrefixStore
from prefix_store.store import StoreNotFound, check_fingerprint
from teachers.registry import model_revision

DEMONSTRATION_SOURCES = ("expert", "demonstration")


class NoDemonstrations(ValueError):
    """The store holds nothing to learn a domain from; the message names both."""


def demonstration_rows(store: PrefixStore, domain: str, *, max_tokens: int | None = None) -> list[Row]:
    """Rows that train the action segments of every demonstration of `domain`, in the order of sequence ids. Raises
    NoDemonstrations where there is none."""
    points = store.decision_points(domain, sources=DEMONSTRATION_SOURCES)
    ids = dict.fromkeys(point.sequence for point in points)
    rows: list[Row] = []
    for sequence_id in ids:
        rows += rows_of_sequence(store.sequence(sequence_id), origin=sequence_id, max_tokens=max_tokens)
    if not rows:
        raise NoDemonstrations(f"the prefix store holds no demonstration of domain {domain!r} (sources "
                               f"{' or '.join(DEMONSTRATION_SOURCES)}); import some with `mopd import`")
    return rows


def sft_teacher(*, base: str | Path, rows: Sequence[Row], out: str | Path, config: SupervisedConfig,
                name: str, provenance: dict[str, Any] | None = None, trust_remote_code: bool = False,
                progress: Callable[[Step], None] | None = None,
                checkpoint_folder: str | Path | None = None) -> SupervisedResult:
    """Train the model in `base` on `rows` and write it to `out` with base's tokenizer and a manifest.

    The router stays as it is in `base` when `config.learner.freeze_router` is set (the default); the manifest holds
    its hash before and after."""
    check_model_source(base)
    tokenizer = load_tokenizer(str(base))
    model = load_model(base, trust_remote_code=trust_remote_code)
    before = router_hash(model)
    result = train_supervised(model, rows, config, pad_id=_pad_id(tokenizer), progress=progress,
                              checkpoint_folder=checkpoint_folder)
    manifest = {
        "kind": "supervised", "name": name, "base": Path(base).name, "base_revision": model_revision(base),
        "domains": sorted({row.domain for row in rows}), "rows": len(rows), "steps": result.steps,
        "loss_tokens": result.loss_tokens, "tokens": result.tokens, "seconds": round(result.seconds, 3),
        "first_loss": result.losses[0] if result.losses else None,
        "last_loss": result.losses[-1] if result.losses else None,
        "router_hash_before": before, "router_hash_after": router_hash(model),
        "config": json.loads(json.dumps(dataclasses.asdict(config), default=str)), **(provenance or {})}
    manifest["config"]["learner"].pop("log_file", None)
    save_model(model, out, tokenizer=tokenizer, manifest=manifest)
    return result


def run_sft(config: Config, domains: Sequence[str], out: str | Path, *, baseline: bool = False) -> SupervisedResult:
    """`mopd teacher sft`: train on the stored demonstrations of `domains` with config section `sft` (and
    `sft_domains.NAME`), or `off_policy` for the baseline. Several domains are mixed by their shares. Beside the baseline's
    folder a metrics.jsonl is written, as an MOPD² run writes one, so that their costs can be compared."""
    unknown = [d for d in domains if d not in config.domains]
    if unknown:
        raise ConfigError(f"unknown domain {', '.join(unknown)}; the config has {', '.join(config.domains)}")
    options = config.off_policy if baseline else config.sft
    if not baseline and len(domains) == 1:
        options = config.sft_domains.get(domains[0], options)
    base, out = config.student.model, Path(out)
    check_model_source(base)
    try:
        opened = PrefixStore.open(config.store)
    except StoreNotFound:
        raise ConfigError(f"store: there is no prefix store at {config.store}; `mopd import` makes one") from None
    renderer = ChatRenderer(load_tokenizer(base))
    rows: list[Row] = []
    with opened as store:
        check_fingerprint(store, renderer.fingerprint())
        for name in domains:
            rows += demonstration_rows(store, name, max_tokens=config.domains[name].max_context_tokens)
        version = store.version
    label = "off-policy baseline" if baseline else f"teacher of {', '.join(domains)}"
    supervised = SupervisedConfig(
        steps=options.steps, batch_rows=options.rows_per_step, token_budget=options.micro_batch_tokens,
        seed=config.seed,
        mixture={d: config.domains[d].share for d in domains} if len(domains) > 1 else {},
        save_every=options.checkpoint_every,
        learner=learner_config(options.optimizer, config, log_file=f"{out}.deepspeed.log"))
    bar = Progress(label, options.steps)
    log = _StepLog(out.parent / "metrics.jsonl") if baseline else None

    def progress(step: Step) -> None:
        bar.update(step.step, f"loss {step.loss:.3f}")
        if log is not None:
            log(step)

    trained_on = hashlib.sha256()
    for row in rows:
        trained_on.update(row.trunk.tobytes())
    identity = [dataclasses.asdict(supervised), model_revision(base), trained_on.hexdigest()]
    try:
        result = sft_teacher(base=base, rows=rows, out=out, config=supervised, name=label,
                             provenance={"store_version": version}, trust_remote_code=config.student.trust_remote_code,
                             progress=progress, checkpoint_folder=own_folder(f"{out}.checkpoints", identity))
    finally:
        if log is not None:
            log.close()
    # A second call with the same config must train anew, so nothing to resume from is left behind.
    shutil.rmtree(Path(f"{out}.checkpoints"), ignore_errors=True)
    print(f"result: {label}: {len(rows)} demonstrations, {result.steps} steps, "
          f"{result.tokens / max(result.seconds, 1e-9):.0f} tokens/s"
          + (f", loss {result.losses[0]:.3f} → {result.losses[-1]:.3f}" if result.losses else ""))
    return result


class _StepLog:
    """The metrics file of a supervised run, under the names that a report reads; a resumed run goes on in it."""

    def __init__(self, path: Path):
        self.path, self.log = path, None

    def __call__(self, step: Step) -> None:
        report = step.report
        if self.log is None:
            self.log = MetricsLog(self.path, first_step=report.step)
        self.log.write({
            "step": report.step, "loss": report.loss, "gradient_norm": report.gradient_norm,
            "learning_rate": report.learning_rate,
            "seconds": {"training": report.seconds, "sampling": 0.0, "scoring": 0.0, "environments": 0.0,
                        "total": report.seconds},
            "tokens": {"sampled": 0, "trained": report.loss_tokens, "computed": report.tokens}, "environment_steps": 0})

    def close(self) -> None:
        if self.log is not None:
            self.log.close()


def _pad_id(tokenizer) -> int:
    for value in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if value is not None:
            return int(value)
    return 0
