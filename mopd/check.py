"""Everything that can be known to be wrong before a run starts, found before any work is done.

`open_launch` builds the parts that a run stands on and raises all errors at once; `check_launch` only reports.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

from mopd.config import Config, ConfigError, stream_shares
from mopd.domains import Domain, close_domains
from mopd.losses import make_objective
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from prefix_store import PrefixStore
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.store import check_fingerprint
from teachers.registry import TeacherRegistry, TeacherSpec


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
        except (ValueError, OSError, RuntimeError) as error:
            errors.append(f"{key}: {error}")
            return None

    from mopd.learner.model import check_model_source

    specs = [TeacherSpec(id=i, model=t.model, trust_remote_code=t.trust_remote_code, dtype=config.deepspeed.dtype)
             for i, t in config.teachers.items()]
    registry = attempt("teachers", lambda: TeacherRegistry(specs, {n: d.teacher for n, d in config.domains.items()}))
    if attempt("student.model", lambda: check_model_source(config.student.model) or True):
        found["tokenizer"] = attempt("student.model", lambda: load_tokenizer(config.student.model))
    if found.get("tokenizer") is not None:
        found["renderer"] = attempt("student.model", lambda: ChatRenderer(found["tokenizer"]))
        if registry is not None:
            attempt("teachers", lambda: registry.handshake(found["tokenizer"]))
    elif registry is not None:
        attempt("teachers", registry.check_sources)
    train = config.train
    attempt("train.objective", lambda: make_objective(train.objective, train.objective_options))
    wanted = {(name, stream) for name in config.domains for stream, share in stream_shares(config, name).items()
              if share > 0 and stream not in ("rollout", "demonstration")}
    if wanted:
        found["store"] = attempt("store", lambda: PrefixStore.open(config.store))
    if found["store"] is not None:
        if found.get("renderer") is not None:
            attempt("store", lambda: check_fingerprint(found["store"], found["renderer"].fingerprint()))
        found["selector"] = attempt("selection", lambda: Selector(
            found["store"], SelectionOptions(
                strategy=config.selection.strategy, options=config.selection.options,
                points_per_sequence=config.selection.points_per_sequence, success_only=config.selection.success_only,
                draw=config.selection.draw), seed=config.seed))
        if found["selector"] is not None:
            for name, stream in sorted(wanted):
                attempt(f"domains.{name}: stream {stream}", lambda n=name, s=stream: _available(found["selector"], n, s))
    for name, domain in config.domains.items():
        built = attempt(f"domains.{name}.environment", lambda n=name, d=domain: Domain(n, d))
        if built is not None:
            found["domains"][name] = built
            attempt(f"domains.{name}.options", lambda b=built: b.tasks("train"))
    if errors:
        close_domains(found["domains"])
        if found["store"] is not None:
            found["store"].close()
        raise ConfigError(f"{len(errors)} error(s) before the start:\n" + "\n".join(f"  {e}" for e in errors))
    manifest = {**registry.manifest(), "student": config.student.model,
                "store": None if found["store"] is None else {"path": config.store, "version": found["store"].version},
                "fingerprint": dataclasses.asdict(found["renderer"].fingerprint()), "warnings": said}
    return Launch(config, found["tokenizer"], found["renderer"], registry, found["domains"], found["store"],
                  found["selector"], manifest, said)


def _available(selector: Selector, domain: str, stream: str) -> None:
    selector.select_sequences(0, domain, stream, 1)
    selector.reset_statistics() if hasattr(selector, "reset_statistics") else None


def check_launch(config: Config) -> dict[str, Any]:
    """What `mopd check` says: {"errors", "warnings", "teachers", "domains", "store"}. Loads no weights."""
    try:
        launch = open_launch(config)
    except ConfigError as error:
        return {"errors": str(error).splitlines()[1:] or [str(error)], "warnings": [], "domains": {}, "teachers": {}}
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
        console.print(f"[red]error[/red] {error.strip()}", soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"[yellow]warning[/yellow] {warning}", soft_wrap=True)
    if not result["errors"]:
        table = Table("domain", "environment", "teacher", "revision", "share", "tasks (train/dev/test)", "streams", "stored")
        for name, domain in result["domains"].items():
            table.add_row(
                name, domain["environment"], domain["teacher"],
                result["teachers"][domain["teacher"]]["revision"][:12], f"{domain['share']:g}",
                "/".join(str(n) for n in domain["tasks"].values()),
                ", ".join(f"{s} {w:.0%}" for s, w in domain["streams"].items() if w),
                ", ".join(f"{s}: {v}" for s, v in domain["stored"].items()))
        console.print(table)
        console.print("Nothing stands in the way of this run.")
