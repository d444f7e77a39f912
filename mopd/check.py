"""Everything that can be known to be wrong before a run starts, found before any work is done.

`open_launch` builds the parts that a run stands on and raises all errors at once; `check_launch` only reports.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from mopd.check_estimate import estimate_record, print_estimate
from mopd.config import (
    Config,
    ConfigError,
    StudentConfig,
    TeacherConfig,
    learner_config,
    resume_turns,
    stream_shares,
)
from mopd.config_domains import say_harnesses, say_workers
from mopd.domains import Domain, close_domains
from mopd.fits import misfits
from mopd.losses import aggregation_schedule, make_objective
from mopd.sampling.engines import describe_engine, engine_known
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from mopd.sampling.resume import check_replays
from mopd.schedule import Schedule
from prefix_store import PrefixStore
from prefix_store.scores import MEASURED, NEED_DISTRIBUTION, read_scores
from prefix_store.selection import NothingToSelect, SelectionOptions, Selector
from prefix_store.store import StoreNotFound, check_fingerprint
from teachers.consistency import Distance, measure_distances
from teachers.handshake import folder_identity
from teachers.registry import Mixture, TeacherRegistry, TeacherSpec, model_revision
from teachers.scoring.hf import HFTeacher


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
        except (ValueError, OSError, RuntimeError, ImportError, TypeError) as error:
            errors.append(f"{key}: {error}")
            return None

    from mopd.learner.model import check_model_source

    attempt("run", lambda: _check_place(config.run))
    specs = [TeacherSpec.from_config(name, t, dtype=config.deepspeed.dtype) for name, t in config.teachers.items()]
    registry = attempt("teachers", lambda: TeacherRegistry(
        specs, {n: d.teacher for n, d in config.domains.items()},
        mixtures={n: Mixture(d.teacher_weights, d.teacher_mixture) for n, d in config.domains.items() if d.teacher_weights},
        device=_device(), devices={n: place.device for n, place in config.placement.teachers.items()},
        cache_bytes=int(config.train.score_cache_mib * 2**20)))
    positions = None
    if attempt("student.model", lambda: check_model_source(config.student.model) or True):
        found["tokenizer"] = attempt("student.model", lambda: load_tokenizer(
            config.student.model, trust_remote_code=config.student.trust_remote_code))
        if found["tokenizer"] is not None:
            positions = attempt("student.model", lambda: _positions(config.student))
    if found.get("tokenizer") is not None:
        found["renderer"] = attempt("student.model", lambda: ChatRenderer(
            found["tokenizer"], stop_strings=config.sampling.stop_strings))
    train = config.train
    objective = attempt("train.objective", lambda: make_objective(train.objective, train.objective_options))
    if registry is not None:
        there = [attempt(f"teachers.{t.id}.model", lambda t=t: check_model_source(t.model) or True)
                 for t in registry.route.teachers if t.model]
        if all(there) and found.get("tokenizer") is not None:
            if attempt("teachers", lambda: _handshake(config, registry, found, objective)) is not None:
                errors += _short_teachers(config, positions)
    if objective is not None:
        errors += misfits(config, objective, given(config) | (registry.gives() if registry else {}))
    attempt("train.aggregation", lambda: aggregation_schedule(train.aggregation, train.aggregation, 0, 1))
    if train.aggregation_to is not None:
        attempt("train.aggregation_to", lambda: aggregation_schedule(train.aggregation_to, train.aggregation_to, 0, 1))
    attempt("train.optimizer", lambda: _check_optimizer(config))
    if config.deepspeed.sequence_parallel_size > 1:
        attempt("deepspeed.sequence_parallel_size", lambda: _check_columns(config))
    attempt("train.domain_schedule", lambda: Schedule(config))
    attempt("sampling.engine", lambda: engine_known(config))
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
            found["store"], selection_options(config), seed=config.seed, steps=train.steps,
            supplied=read_scores(config.selection.scores) if config.selection.scores else None))
        if found["selector"] is not None:
            if found["selector"].reads:
                attempt("selection.options", lambda: found["selector"].require_scores(measured_scores(config)))
            for what, words in (("unknown", "decision points that this version of the store does not have"),
                                ("not_finite", "scores that are not finite numbers")):
                if count := found["selector"].supplied.get(what):
                    said.append(f"selection.scores: {config.selection.scores} has {count} {words}; they are passed over")
            for name, stream in sorted(wanted):
                attempt(f"domains.{name}: stream {stream}",
                        lambda n=name, s=stream: _something_to_draw(found["selector"], n, s))
    for name, domain in config.domains.items():
        built = attempt(f"domains.{name}.environment", lambda n=name, d=domain: Domain(n, d))
        if built is not None:
            found["domains"][name] = built
            if stream_shares(config, name)["rollout"] > 0:
                if attempt(f"domains.{name}.options", lambda b=built: b.tasks("train")):
                    attempt(f"domains.{name}.environment", built.probe)
            errors += _unread_thinking(name, built, found.get("renderer"))
            if positions is not None and domain.max_context_tokens > positions:
                errors.append(f"domains.{name}.max_context_tokens: {domain.max_context_tokens} is more than the "
                              f"{positions} positions of the model {config.student.model}")
            if resume_turns(config, name) > 1 and found["selector"] is not None and found.get("renderer") is not None:
                for stream in sorted(s for n, s in wanted if n == name and found["selector"].available(n, s)["sequences"]):
                    if problem := _replay_problem(config, built, stream, found, said):
                        errors.append(problem)
    supplied = None if found["selector"] is None else found["selector"].digest
    if errors:
        close_domains(found["domains"])
        if found["store"] is not None:
            found["store"].close()
        raise ConfigError(f"{len(errors)} error(s) before the start:\n" + "\n".join(f"  {e}" for e in errors), errors)
    manifest = {**registry.manifest(),
                "student": {"model": config.student.model, "revision": model_revision(config.student.model)},
                "store": None if found["store"] is None else {"path": config.store, "version": found["store"].version},
                "fingerprint": dataclasses.asdict(found["renderer"].fingerprint()), "warnings": said}
    if supplied:
        manifest["selection"] = {"scores": config.selection.scores, "sha256": supplied}
    return Launch(config, found["tokenizer"], found["renderer"], registry, found["domains"], found["store"],
                  found["selector"], manifest, said)


def compare_teachers(config: Config, domains: list[str]) -> list[Distance]:
    """`mopd teacher compare`: the reverse KL of the student's start to every teacher, see `teachers.consistency`. Raises
    ConfigError for what a launch would refuse."""
    from mopd.learner.model import load_model
    from mopd.sampling.hf import HFEngine

    launch = open_launch(config)
    store = launch.store
    try:
        if store is None:
            with contextlib.suppress(StoreNotFound):
                store = PrefixStore.open(config.store)
        student = load_model(config.student.model, dtype=config.deepspeed.dtype,
                             trust_remote_code=config.student.trust_remote_code)
        return measure_distances(config, domains, student, HFEngine(student, max_batch=config.train.sampling_batch),
                                 launch.registry.scorers(), launch.renderer, store)
    finally:
        launch.close()
        if store is not None:
            store.close()


def selection_options(config: Config) -> SelectionOptions:
    """`config.selection` as the selector takes it. Raises ValueError for values that it refuses."""
    given = config.selection
    plain = {name: getattr(given, name) for name in (
        "strategy", "options", "points_per_sequence", "success_only", "max_prefix_tokens", "min_turns_from_end",
        "max_turns_from_end", "quotas", "draw", "update_scores", "record_scores", "score_smoothing")}
    return SelectionOptions(**plain, sources=tuple(given.sources) or None, splits=tuple(given.splits) or None)


def measured_scores(config: Config) -> tuple[str, ...]:
    """The scores that a run of this config measures at decision points: where teachers give less than their whole
    distribution, nothing is known of what needs it."""
    objective = make_objective(config.train.objective, config.train.objective_options)
    teachers = {t for d in config.domains.values() for t in d.teacher_weights or (d.teacher,)}
    whole = objective.needs == "full" and all("full" in gives for t, gives in given(config).items() if t in teachers)
    return MEASURED if whole else tuple(n for n in MEASURED if n not in NEED_DISTRIBUTION)


def _replay_problem(config: Config, domain: Domain, stream: str, found: dict[str, Any], said: list[str]) -> str:
    """Why the student cannot play on from the stored sequences of a domain's stream, "" where it can; warnings go to
    `said`."""
    turns = resume_turns(config, domain.name)
    try:
        said += check_replays(domain, found["store"], found["selector"], found["renderer"], stream)
        return ""
    except Exception as error:  # noqa: BLE001 - whatever an environment raises, the launch says it with the others
        return (f"domains.{domain.name}: {turns} turns are to be played on from stored points of stream {stream}, but the "
                f"environment there cannot be restored: {error}. Set domains.{domain.name}.resume_turns=1 (one fresh turn "
                "needs no environment), or give this stream no share (train.teacher_prefix_share)")


def _unread_thinking(name: str, domain: Domain, renderer: ChatRenderer | None) -> list[str]:
    """Harnesses without thinking under a chat template that does not know of it: the model would think all the same."""
    if renderer is None or renderer.reads_option("enable_thinking"):
        return []
    return [f"domains.{name}.{f'harnesses.{one}.' if one else ''}thinking: false does nothing, because the student's chat "
            "template does not read enable_thinking; leave it out, or take a template that does"
            for one, harness in domain.harnesses.items() if harness.thinking is False]


def _something_to_draw(selector: Selector, domain: str, stream: str) -> None:
    """Raise ValueError where a stream has no decision point to draw, with the key that gives it no share."""
    try:
        selector.require(domain, stream)
    except NothingToSelect as error:
        share = 0 if stream == "teacher_prefix" else 1
        key = f" (train.teacher_prefix_share={share})" if str(error).endswith("no share") else ""
        raise ValueError(f"{error}{key}") from None


def _check_place(run: str) -> None:
    """Raise ValueError where the run's folder cannot be made or written to."""
    place = Path(run).absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{run} cannot be a folder, because {place} is a file; name another with run=FOLDER")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ValueError(f"nothing can be written to {place}; name another folder with run=FOLDER")


def _check_columns(config: Config) -> None:
    from transformers import AutoConfig

    from mopd.learner.sequence_parallel import sequence_parallel_errors

    model = AutoConfig.from_pretrained(config.student.model, trust_remote_code=config.student.trust_remote_code)
    if found := sequence_parallel_errors(model.get_text_config(), config.deepspeed.sequence_parallel_size):
        raise ValueError(f"the attention of {config.student.model} cannot be split over so many ranks: {'; '.join(found)}")


def _check_optimizer(config: Config) -> None:
    if found := learner_config(config.train.optimizer, config, prefix_gradient=config.train.prefix_gradient,
                               sequence_parallel_size=config.deepspeed.sequence_parallel_size).errors():
        raise ValueError("; ".join(found))


def _positions(given: StudentConfig | TeacherConfig) -> int | None:
    """How many tokens a model can hold; None where its config does not say."""
    from transformers import AutoConfig

    shape = AutoConfig.from_pretrained(given.model, trust_remote_code=given.trust_remote_code)
    return getattr(shape.get_text_config(), "max_position_embeddings", None)


def given(config: Config) -> dict[str, frozenset[str]]:
    """What each teacher can deliver to the learner by its back end alone."""
    far = frozenset({"sampled", "top_k"})
    return {name: frozenset({"sampled"}) if t.cross_tokenizer else HFTeacher.gives if t.backend == "hf" else far
            for name, t in config.teachers.items()}


def _handshake(config: Config, registry: TeacherRegistry, found: dict[str, Any], objective: Any) -> int:
    """Introduce the teachers to the student; returns the number of ids that they share. Raises TeacherError."""
    longest: dict[str, int] = {}
    for domain in config.domains.values():
        for teacher in domain.teacher_weights or (domain.teacher,):
            if config.teachers[teacher].backend != "hf":
                longest[teacher] = max(longest.get(teacher, 0), domain.max_context_tokens)
    renderer = found.get("renderer")
    return registry.handshake(
        found["tokenizer"], student=folder_identity(config.student.model, trust_remote_code=config.student.trust_remote_code),
        stop_ids=() if renderer is None else renderer.stop_ids, longest=longest,
        stop_strings=config.sampling.stop_strings, top_k=int(getattr(objective, "top_k", 0)))


def _device() -> str:
    """Where in-process teachers score: beside the student."""
    import torch

    if os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"


def _short_teachers(config: Config, students: int | None) -> list[str]:
    """Domains whose episodes fit the student's positions but may grow longer than their teacher can read: it would score
    them all the same, wrongly."""
    errors = []
    for name, domain in config.domains.items():
        for teacher in domain.teacher_weights or (domain.teacher,):
            if config.teachers[teacher].backend != "hf":
                continue  # its back end says what it reads, in the handshake
            positions = _positions(config.teachers[teacher])
            if positions is not None and positions < domain.max_context_tokens <= (students or float("inf")):
                errors.append(f"domains.{name}.max_context_tokens: {domain.max_context_tokens} is more than the {positions} "
                              f"positions of its teacher '{teacher}' ({config.teachers[teacher].model})")
    return errors


def check_launch(config: Config) -> dict[str, Any]:
    """What `mopd check` says: {"errors", "warnings", "teachers", "domains", "store"}. Loads no weights."""
    try:
        launch = open_launch(config)
    except ConfigError as error:
        return {"errors": error.errors, "warnings": [], "domains": {}, "teachers": {}}
    engine, wrong = {}, []
    try:
        engine = describe_engine(config)
    except (ValueError, RuntimeError, OSError) as error:
        wrong = [f"sampling.engine: {error}"]
    try:
        domains = {}
        for name, domain in launch.domains.items():
            points = {}
            if launch.selector is not None:
                points = {s: launch.selector.available(name, s) for s in ("teacher_prefix", "sft_prefix")
                          if stream_shares(config, name)[s] > 0}
            domains[name] = {
                "environment": domain.config.environment, "teacher": domain.config.teacher, "share": domain.config.share,
                "mixture": launch.manifest.get("mixtures", {}).get(name),
                "tasks": {split: len(domain.family.tasks(split)) for split in ("train", "development", "test")},
                "streams": stream_shares(config, name), "stored": points, "resume_turns": resume_turns(config, name),
                "workers": say_workers(domain.config), "harnesses": say_harnesses(domain.harnesses)}
        selection = None if launch.selector is None else say_selection(launch.selector, config)
        return {"errors": wrong, "warnings": launch.warnings, "teachers": launch.manifest["teachers"], "domains": domains,
                "engine": engine,
                "handshake": {name: found.facts for name, found in launch.registry.agreements.items()},
                "store": launch.manifest["store"], "objective": config.train.objective, "selection": selection,
                "estimate": estimate_record(config)}
    finally:
        launch.close()


def say_selection(selector: Selector, config: Config) -> str:
    """How decision points are drawn, in words: "geometric (kappa 0.6), draw distinct, at most 2 points of a trajectory"."""
    options = selector.options
    given = ", ".join(f"{name} {value}" for name, value in sorted(options.options.items()))
    said = [options.strategy + (f" ({given})" if given else ""), f"draw {options.draw}"]
    if config.selection.points_per_sequence:
        said.append(f"at most {config.selection.points_per_sequence} points of a trajectory")
    if selector.reads:
        source = [f"{selector.supplied['points']} decision points scored by {config.selection.scores}"] if selector.supplied \
            else []
        measured = selector.wants_scores and set(selector.reads) & set(MEASURED)
        source += ["measured in training"] if measured else ["fixed"]
        said.append(f"by the score {', '.join(selector.reads)} ({', '.join(source)})")
    said += [f"at most {quota} points of {domain} a step and stream" for domain, quota in options.quotas.items()]
    return ", ".join(said)


def _say_teachers(domain: dict[str, Any], teachers: dict[str, Any]) -> str:
    """Who scores a domain: "teacher game 0123456789ab", or the parts of a mixture."""
    if not (mixture := domain["mixture"]):
        return f"teacher {domain['teacher']} {teachers[domain['teacher']]['revision'][:12]}"
    total = sum(mixture["weights"].values())
    parts = [f"{weight / total:.3g} {name} {teachers[name]['revision'][:12]}" for name, weight in mixture["weights"].items()]
    return f"teachers {', '.join(parts)}, mixed in {mixture['kind'].replace('_', ' ')}"


def handshake_table(handshake: dict[str, dict[str, Any]]) -> Table:
    """What each teacher told, a line each (see teachers.handshake.Agreement.facts)."""
    table = Table(title="teachers", title_justify="left")
    for column in ("teacher", "back end", "model", "revision", "tokens", "ends", "template", "context", "gives"):
        table.add_column(column, overflow="fold")
    for name, facts in handshake.items():
        rows = f", {facts['rows']} rows" if facts["rows"] not in (None, facts["ids"]) else ""
        gives = [key.replace("_", " ") + ("" if value is True else f" {value}")
                 for key, value in facts["gives"].items() if value]
        ends = [*map(str, facts["ends"] or ["not told"]), *map(repr, facts["stop_strings"])]
        same = "same" if facts["same_template"] else f"other ({facts['template']})"
        template = same if facts["template"] else "not told"
        table.add_row(*map(escape, (
            name, facts["backend"], str(facts["model"] or ""), str(facts["revision"] or "")[:12],
            f"{facts['tokens']} ({facts['ids']} ids{rows})", ", ".join(ends), template,
            "not told" if facts["context_tokens"] is None else str(facts["context_tokens"]),
            ", ".join(gives) or "sampled, full, hidden")))
    return table


def print_check(result: dict[str, Any]) -> None:
    """Show the result of `check_launch`."""
    console = Console(highlight=False)
    for error in result["errors"]:
        console.print(f"[red]error[/red] {escape(error)}", soft_wrap=True)
    for warning in result["warnings"]:
        console.print(f"[yellow]warning[/yellow] {escape(warning)}", soft_wrap=True)
    if result["errors"]:
        return
    if result["handshake"]:
        console.print(handshake_table(result["handshake"]))
    for name, domain in result["domains"].items():
        tasks = ", ".join(f"{n} {split}" for split, n in domain["tasks"].items())
        console.print(f"[bold]{name}[/bold]: share {domain['share']:g}, environment {domain['environment']} ({tasks} tasks), "
                      + _say_teachers(domain, result["teachers"]), soft_wrap=True)
        for said in filter(None, (domain["workers"], *domain["harnesses"])):
            console.print(f"    {escape(said)}", soft_wrap=True)
        for stream, weight in domain["streams"].items():
            if weight:
                stored = domain["stored"].get(stream)
                console.print(f"    {weight:.0%} {stream}" + (
                    "" if stored is None else f", from {stored['sequences']} stored sequences with "
                    f"{stored['decision_points']} decision points" + (
                        f", {domain['resume_turns']} turns from each in a restored environment (tried)"
                        if domain["resume_turns"] > 1 else "")), soft_wrap=True)
    if engine := result.get("engine"):
        console.print(f"The student is sampled by [bold]{escape(engine['engine'])}[/bold] ({escape(engine['where'])}): "
                      + escape("; ".join(engine["can"])), soft_wrap=True)
    if result.get("selection"):
        console.print(f"Decision points are drawn by {escape(result['selection'])}.", soft_wrap=True)
    print_estimate(result["estimate"], console)
    console.print("Nothing stands in the way of this run.")
