"""Everything that can be known to be wrong before a run starts, found before any work is done.

`open_launch` builds the parts that a run stands on and raises all errors at once; `check_launch` only reports.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.markup import escape

from mopd.config import Config, ConfigError, learner_config, stream_shares
from mopd.domains import Domain, close_domains
from mopd.losses import aggregation_schedule, make_objective
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from mopd.schedule import Schedule
from prefix_store import PrefixStore
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.store import check_fingerprint
from teachers.registry import TeacherRegistry, TeacherSpec, model_revision


@dataclasses.dataclass
class Launch:
    """The checked parts of a run. No model weights are loaded yet."""

    config: Config
    tokenizer: Any
    renderer: ChatRenderer
    registry: TeacherRegistry
    domains: dict[str, Domain]
    store: PrefixStore | None
    selector: Selector | None
    manifest: dict[str, Any]
    warnings: list[str]

    def close(self) -> None:
        self.registry.close()
        close_domains(self.domains)
        if self.store is not None:
            self.store.close()


def open_launch(config: Config) -> Launch:
    """Check and build what `config` names: teachers, tokenizers, store, selection, objective, environments.

    Raises ConfigError with every error found, each with its key.
    """
    errors: list[str] = []
    found: dict[str, Any] = {"domains": {}, "store": None, "selector": None}
    said: list[str] = []

    def attempt(key: str, build: Callable[[], Any]) -> Any:
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", UserWarning)
                result = build()
            said.extend(str(w.message) for w in caught if issubclass(w.category, UserWarning))
            return result
        except (ValueError, OSError, RuntimeError, ImportError) as error:
            errors.append(f"{key}: {error}")
            return None

    from mopd.learner.model import check_model_source

    specs = [TeacherSpec(id=i, model=t.model, trust_remote_code=t.trust_remote_code, dtype=config.deepspeed.dtype)
             for i, t in config.teachers.items()]
    registry = attempt("teachers", lambda: TeacherRegistry(specs, {n: d.teacher for n, d in config.domains.items()}))
    positions = None
    if attempt("student.model", lambda: check_model_source(config.student.model) or True):
        found["tokenizer"] = attempt("student.model", lambda: load_tokenizer(config.student.model))
        if found["tokenizer"] is not None:
            positions = attempt("student.model", lambda: _positions(config))
    if found.get("tokenizer") is not None:
        found["renderer"] = attempt("student.model", lambda: ChatRenderer(found["tokenizer"]))
    if registry is not None:
        there = [attempt(f"teachers.{t.id}.model", lambda t=t: check_model_source(t.model) or True)
                 for t in registry.route.teachers]
        if all(there) and found.get("tokenizer") is not None:
            attempt("teachers", lambda: registry.handshake(found["tokenizer"]))
    train = config.train
    attempt("train.objective", lambda: make_objective(train.objective, train.objective_options))
    attempt("train.aggregation", lambda: aggregation_schedule(train.aggregation, train.aggregation, 0, 1))
    attempt("train.optimizer", lambda: _check_optimizer(config))
    attempt("train.domain_schedule", lambda: Schedule(config))
    wanted = {(name, stream) for name in config.domains for stream, share in stream_shares(config, name).items()
              if share > 0 and stream not in ("rollout", "demonstration")}
    if wanted:
        found["store"] = attempt("store", lambda: PrefixStore.open(config.store))
    if found["store"] is not None and not len(found["store"]):
        errors.append(f"store: the prefix store {config.store} is empty, so there is no prefix to go on from; fill it with "
                      "`mopd import` and `mopd collect`, or set train.prefix_fraction=0")
    elif found["store"] is not None:
        if found.get("renderer") is not None:
            attempt("store", lambda: check_fingerprint(found["store"], found["renderer"].fingerprint()))
        found["selector"] = attempt("selection", lambda: Selector(
            found["store"], SelectionOptions(
                strategy=config.selection.strategy, options=config.selection.options,
                points_per_sequence=config.selection.points_per_sequence, success_only=config.selection.success_only,
                draw=config.selection.draw), seed=config.seed))
        if found["selector"] is not None:
            for name, stream in sorted(wanted):
                attempt(f"domains.{name}: stream {stream}", lambda n=name, s=stream: found["selector"].require(n, s))
    for name, domain in config.domains.items():
        built = attempt(f"domains.{name}.environment", lambda n=name, d=domain: Domain(n, d))
        if built is not None:
            found["domains"][name] = built
            if stream_shares(config, name)["rollout"] > 0:
                if attempt(f"domains.{name}.options", lambda b=built: b.tasks("train")):
                    attempt(f"domains.{name}.environment", built.probe)
            if positions is not None and domain.max_context_tokens > positions:
                errors.append(f"domains.{name}.max_context_tokens: {domain.max_context_tokens} is more than the "
                              f"{positions} positions of the model {config.student.model}")
    if errors:
        close_domains(found["domains"])
        if found["store"] is not None:
            found["store"].close()
        raise ConfigError(f"{len(errors)} error(s) before the start:\n" + "\n".join(f"  {e}" for e in errors), errors)
    manifest = {**registry.manifest(),
                "student": {"model": config.student.model, "revision": model_revision(config.student.model)},
                "store": None if found["store"] is None else {"path": config.store, "version": found["store"].version},
                "fingerprint": dataclasses.asdict(found["renderer"].fingerprint()), "warnings": said}
    return Launch(config, found["tokenizer"], found["renderer"], registry, found["domains"], found["store"],
                  found["selector"], manifest, said)


def _check_optimizer(config: Config) -> None:
    if found := learner_config(config.train.optimizer, config).errors():
        raise ValueError("; ".join(found))


def _positions(config: Config) -> int | None:
    """How many tokens the student's model can hold; None where its config does not say."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(config.student.model, trust_remote_code=config.student.trust_remote_code)
    return getattr(shape.get_text_config(), "max_position_embeddings", None)


def check_launch(config: Config) -> dict[str, Any]:
    """What `mopd check` says: {"errors", "warnings", "teachers", "domains", "store"}. Loads no weights."""
    try:
        launch = open_launch(config)
    except ConfigError as error:
        return {"errors": error.errors, "warnings": [], "domains": {}, "teachers": {}}
    try:
        domains = {}
        for name, domain in launch.domains.items():
            points = {}
            if launch.selector is not None:
                points = {s: launch.selector.available(name, s) for s in ("teacher_prefix", "sft_prefix")
                          if stream_shares(config, name)[s] > 0}
            domains[name] = {
                "environment": domain.config.environment, "teacher": domain.config.teacher, "share": domain.config.share,
                "tasks": {split: len(domain.family.tasks(split)) for split in ("train", "development", "test")},
                "streams": stream_shares(config, name), "stored": points}
        return {"errors": [], "warnings": launch.warnings, "teachers": launch.manifest["teachers"], "domains": domains,
                "store": launch.manifest["store"], "objective": config.train.objective}
    finally:
        launch.close()


def print_check(result: dict[str, Any]) -> None:
    """Show the result of `check_launch`."""
    console = Console(highlight=False)
    for error in result["errors"]:
        console.print(f"[red]error[/red] {escape(error)}", soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)
    if result["errors"]:
        return
    for name, domain in result["domains"].items():
        tasks = ", ".join(f"{n} {split}" for split, n in domain["tasks"].items())
        console.print(f"[bold]{name}[/bold]: share {domain['share']:g}, environment {domain['environment']} ({tasks} tasks), "
                      f"teacher {domain['teacher']} {result['teachers'][domain['teacher']]['revision'][:12]}", soft_wrap=True)
        for stream, weight in domain["streams"].items():
            if weight:
                stored = domain["stored"].get(stream)
                console.print(f"    {weight:.0%} {stream}" + (
                    "" if stored is None else f", from {stored['sequences']} stored sequences with "
                    f"{stored['decision_points']} decision points"), soft_wrap=True)
    console.print("Nothing stands in the way of this run.")
