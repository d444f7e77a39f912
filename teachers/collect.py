"""Teachers or experts play their domain's training tasks; what passes the filters goes into the prefix store.

Episodes are played in batches, and every batch is committed before the next begins. RUN/collected/NAME.partial.json says
which are in, so that a collection that was killed goes on behind them, and ends with the same sequences.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mopd.config import Config, ConfigError
from mopd.config_domains import played_otherwise
from mopd.config_supervised import play_errors
from mopd.domains import Domain, close_domains, open_domains
from mopd.environments.base import Task
from mopd.environments.demonstrations import demonstrate
from mopd.learner.model import check_model_source, load_model
from mopd.locks import only_process
from mopd.pipeline import Job, Pipeline
from mopd.progress import Progress
from mopd.sampling.agent_loop import EpisodeSpec, Harnesses, play_episodes
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.store import StoreNotFound, check_fingerprint
from prefix_store.trajectory import Sequence as Trajectory
from prefix_store.trajectory import Source
from teachers.demonstrations import DomainRows, render_transcripts
from teachers.playing import VLLMEngine
from teachers.registry import TeacherRegistry, TeacherSpec, model_revision
from teachers.scoring.requests import TeacherUnreachable


class NothingCollected(RuntimeError):
    """No episode of a player can be kept; the message counts why."""


class CollectBusy(RuntimeError):
    """Another process collects this domain here; the message names the place."""


@dataclasses.dataclass
class Batch:
    """What one batch of episodes came to: `ids` of what is in the store, `dropped` by reason; turns and tokens (those that
    the player wrote) are of what was kept, `successful` and `episodes` of all that was played to an end or a limit."""

    episodes: int = 0
    successful: int = 0
    turns: int = 0
    tokens: int = 0
    retried: int = 0
    seconds: float = 0.0
    ids: list[str] = dataclasses.field(default_factory=list)
    dropped: dict[str, int] = dataclasses.field(default_factory=dict)

    def drop(self, reason: str, count: int = 1) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + count


class TeacherPlayer:
    """The teacher of a domain at its temperature, whatever back end it has: a model or vLLM in this process, or servers.
    Raises ConfigError for a teacher that cannot sample what the store takes."""

    def __init__(self, config: Config, name: str):
        options = config.domains[name]
        self.id, self.name, self.config = options.teacher, name, config
        self.teacher = config.teachers[self.id]
        if self.teacher.cross_tokenizer:
            raise ConfigError(f"domains.{name}.teacher: '{self.id}' has another tokenizer than the student "
                              f"(teachers.{self.id}.cross_tokenizer), so what it writes cannot be stored in the student's "
                              "tokens; let experts play (collect.player=expert), or import its transcripts (`mopd import`)")
        if not self.teacher.model:
            raise ConfigError(f"teachers.{self.id}.model: missing; to play domain {name} it takes the folder or hub id of "
                              "what its servers serve, for its tokenizer and chat template")
        if errors := play_errors(config.collect, name, self.id, self.teacher.backend):
            raise ConfigError("; ".join(errors))
        check_model_source(self.teacher.model)
        self.spec = TeacherSpec.from_config(self.id, self.teacher, dtype="float32")
        self.revision = model_revision(self.teacher.model)
        self.source = Source("teacher", self.id, self.revision)
        self.temperature = config.collect.temperatures.get(name, self.teacher.temperature)
        if self.temperature is None:
            self.temperature = config.collect.temperature
        self.renderer = ChatRenderer(load_tokenizer(self.teacher.model, trust_remote_code=self.teacher.trust_remote_code),
                                     stop_strings=config.sampling.stop_strings)
        self._engine: HFEngine | VLLMEngine | None = None
        self._model_config: Any = None

    @property
    def engine(self) -> HFEngine | VLLMEngine:
        """Loaded or connected when the first batch is played: a collection that is whole needs neither weights nor servers.
        Raises TeacherError, TokenizerMismatch or TeacherUnreachable where vLLM's teacher does not fit or answer."""
        if self._engine is None and self.teacher.backend == "hf":
            model = load_model(self.teacher.model, dtype=self.spec.dtype, trust_remote_code=self.teacher.trust_remote_code)
            self._engine, self._model_config = HFEngine(model, max_batch=self.config.collect.batch), model.config
        elif self._engine is None:
            from transformers import AutoConfig

            self._model_config = AutoConfig.from_pretrained(self.teacher.model,
                                                            trust_remote_code=self.teacher.trust_remote_code)
            self._engine = VLLMEngine(self._introduced(), max_batch=self.config.collect.batch)
        return self._engine

    def _introduced(self) -> Any:
        """Its back end, once it is known to be the teacher that the student and the store speak with."""
        student = self.config.student
        tokenizer = load_tokenizer(student.model, trust_remote_code=student.trust_remote_code)
        registry = TeacherRegistry([self.spec], {self.name: self.id})
        try:
            registry.handshake(tokenizer, stop_ids=self.renderer.stop_ids,
                               stop_strings=self.config.sampling.stop_strings,
                               longest={self.id: self.config.domains[self.name].max_context_tokens})
        except BaseException:
            registry.close()
            raise
        return registry.backend(self.spec)

    def close(self) -> None:
        """Give the connection, or vLLM's memory, back."""
        if isinstance(self._engine, VLLMEngine):
            self._engine.close()

    def play(self, domain: Domain, specs: list[EpisodeSpec], batch: Batch) -> list[Trajectory]:
        """Play `specs`; failures and retries are counted in `batch`."""
        harness = domain.harnesses
        if self.teacher.max_tokens is not None:
            harness = Harnesses({name: dataclasses.replace(one, max_turn_tokens=self.teacher.max_tokens)
                                 for name, one in harness.items()}, harness.shares)
        engine = self.engine
        domain.pool.prefetch([s.task for s in specs])
        episodes = play_episodes(engine, {self.name: domain.pool}, specs, self.renderer, {self.name: harness},
                                 temperature=self.temperature, top_p=self.config.collect.top_p,
                                 top_k=self.config.collect.top_k, source=self.source, retries=self.config.collect.retries,
                                 fingerprint=self.renderer.fingerprint(self._model_config))
        for episode in episodes:
            batch.retried += episode.attempts - 1
            if episode.failure:
                batch.drop(f"infrastructure: {episode.failure}")
        return [episode.sequence for episode in episodes if not episode.failure]


class ExpertPlayer:
    """The expert of a domain's environment; its text is rendered by the student's tokenizer and template."""

    temperature = None

    def __init__(self, config: Config, name: str):
        self.id, self.name, self.config = f"{name}-expert", name, config
        check_model_source(config.student.model)
        self.renderer = ChatRenderer(load_tokenizer(config.student.model, trust_remote_code=config.student.trust_remote_code))
        self.revision = ""

    def close(self) -> None:
        """Nothing is held."""

    def play(self, domain: Domain, specs: list[EpisodeSpec], batch: Batch) -> list[Trajectory]:
        tasks, found = [spec.task for spec in specs], {}
        for attempt in range(self.config.collect.retries + 1):
            left = [task for task in dict.fromkeys(tasks) if task not in found]
            played = demonstrate(domain.family, self.name, left, seed=stable_seed(self.config.seed, self.name, "expert"),
                                 max_turns=domain.config.max_turns, workers=domain.config.workers, keep="all",
                                 source_id=self.id)
            # What the rollouts will be told, not the environment's own words.
            found |= {Task(name=t["task"], seed=t["seed"], split=t["split"]): t | {"system": domain.harness.system_prompt}
                      for t in played.transcripts}
            failures = {k: n for k, n in played.counts.items() if k.startswith("infra:")}
            if not failures or attempt == self.config.collect.retries:
                break
            batch.retried += sum(failures.values())
            time.sleep(0.2 * 2**attempt)
        for reason, count in played.counts.items():
            if reason.startswith("infra:"):
                batch.drop(f"infrastructure: {reason.removeprefix('infra:')}", count)
            elif reason != "kept":
                batch.drop(f"the expert did nothing: {reason}", count)
        counted = DomainRows()
        sequences = render_transcripts([found[t] for t in dict.fromkeys(tasks) if t in found], self.renderer, counted,
                                       max_tokens=domain.config.max_context_tokens, harness=domain.harness)
        for reason, count in counted.left_out.items():
            batch.drop(reason, count)
        if again := len(tasks) - len(set(tasks)):
            batch.drop("played the same way before", again)
        return sequences


def collect_domain(config: Config, name: str, *, quiet: bool = False) -> dict[str, Any]:
    """Let the teacher (or expert, `collect.player`) of domain `name` play `teacher_episodes` training tasks into the store.

    Writes RUN/collected/NAME.json with what was kept and why the rest was not; returns the same. What an earlier call with
    the same config committed is not played again. Raises NothingCollected where nothing was kept, ConfigError for a player,
    store or environment that is not there, CollectBusy where another process is at it, TeacherUnreachable where no server of
    the teacher answers, TeacherError where one is not this teacher.
    """
    player = (ExpertPlayer if config.collect.player == "expert" else TeacherPlayer)(config, name)
    try:
        with PrefixStore.open(config.store) as store:  # a folder or a URL; "a" below would make one
            if len(store):
                check_fingerprint(store, player.renderer.fingerprint())
    except StoreNotFound:
        if config.collect.player == "teacher":
            raise ConfigError(f"store: there is no prefix store at {config.store}; `mopd import` makes one") from None
    folder = Path(config.run) / "collected"
    folder.mkdir(parents=True, exist_ok=True)
    busy = CollectBusy(f"another process collects domain {name} in {folder}; wait for it, or give this one a folder of its "
                       "own with run=FOLDER")
    with only_process(folder / f".{name}.lock", busy):
        opened = open_domains(config, [name])
        try:
            record = _collect(config, opened[name], player, folder)
        finally:
            player.close()
            close_domains(opened)
    if not quiet:
        print(f"result: {say(record)}")
    return record


def _collect(config: Config, domain: Domain, player: Any, folder: Path) -> dict[str, Any]:
    name, options = domain.name, config.collect
    specs = episode_specs(config, domain)
    ledger = _Ledger(folder, name, _identity(config, name, player, specs))
    with PrefixStore.open(config.store, "a") as store:
        done = ledger.read(store)
        progress = Progress(f"{player.id} plays {name}", len(specs))
        for number, start in enumerate(range(0, len(specs), options.batch)):
            part = specs[start:start + options.batch]
            if number < len(done):
                progress.update(start + len(part), "is in the store already")
                continue
            if number == len(done) and Path(config.store).is_dir() and not os.access(config.store, os.W_OK):
                raise ConfigError(f"store: nothing can be written to {config.store}; give yourself the right to, or name "
                                  "another store")
            began, batch = time.perf_counter(), Batch()
            seen = {identity for b in done for identity in b.ids}
            try:
                played = player.play(domain, part, batch)
            except TeacherUnreachable as gone:
                raise TeacherUnreachable(gone.teacher, f"{gone.said}. {len(done)} batches are in the store; start the "
                                         "teacher again and run the same command: it goes on behind them") from None
            for sequence in played:
                _take(sequence, options, store, batch, seen)
            store.commit(f"{player.id} plays {name}, batch {number + 1}")
            batch.seconds = time.perf_counter() - began
            done.append(batch)
            ledger.write(done)
            progress.update(start + len(part), f"{sum(b.successful for b in done)} solved")
        version = store.version
    record = _summary(name, player, done, len(specs), version, options.player)
    if specs and not record["kept"]:
        ledger.forget()  # so that the next call plays, once what was wrong is mended
        raise NothingCollected(f"domains.{name}: nothing of what '{player.id}' played can be kept: {record['dropped']}")
    ledger.finish(record, done)
    return record


def episode_specs(config: Config, domain: Domain) -> list[EpisodeSpec]:
    """What is played: `teacher_episodes` in all, each task `collect.samples_per_task` times with draws of its own, evenly
    over the training split. Where the split has fewer tasks, they are played again."""
    count, each = domain.config.teacher_episodes, config.collect.samples_per_task
    if not count:
        return []
    tasks = domain.spread("train", -(-count // each))
    return [EpisodeSpec(domain.name, tasks[i // each % len(tasks)], stable_seed(config.seed, domain.name, "collect", i),
                        i // each, i) for i in range(count)]


def _take(sequence: Trajectory, options: Any, store: PrefixStore, batch: Batch, seen: set[str]) -> None:
    """Append a sequence that passes the filters; count it either way. `seen` are the ids of this collection so far."""
    batch.episodes += 1
    batch.successful += bool(sequence.outcome.success)
    if options.success_only and not sequence.outcome.success:
        batch.drop("not successful")
    elif options.min_score is not None and sequence.outcome.reward < options.min_score:
        batch.drop(f"score below {options.min_score:g}")
    elif (identity := store.append(sequence)) in seen:
        batch.drop("played the same way before")
    else:
        seen.add(identity)
        batch.ids.append(identity)
        own = [s for c in sequence.contexts for s in c.actions() if s.start >= c.fork]
        batch.turns += len(own)
        batch.tokens += sum(s.end - s.start for s in own)


def _identity(config: Config, name: str, player: Any, specs: list[EpisodeSpec]) -> str:
    """A hash of everything that the episodes depend on."""
    domain, options = config.domains[name], config.collect
    parts = [player.id, player.revision, player.temperature, dataclasses.asdict(player.renderer.fingerprint()), config.seed,
             options.player, options.top_p, options.top_k, options.batch, options.success_only, options.min_score,
             {key: getattr(domain, key) for key in ("environment", "options", "system_prompt", "max_turns", "max_turn_tokens",
                                                    "max_context_tokens")} | played_otherwise(domain),
             *(getattr(getattr(player, "teacher", None), key, None) for key in ("max_tokens", "backend")),
             [[s.task.name, s.task.split, s.task.seed, s.seed] for s in specs]]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()


def _say(words: str) -> None:
    print(words, file=sys.stderr)


class _Ledger:
    """Which batches of a collection are committed, in a file that is replaced whole."""

    def __init__(self, folder: Path, name: str, identity: str):
        self.partial, self.final, self.identity = folder / f"{name}.partial.json", folder / f"{name}.json", identity

    def read(self, store: PrefixStore) -> list[Batch]:
        """The batches that an earlier call committed and that are still in `store`, from the first on."""
        for path in (self.final, self.partial):
            try:
                content = json.loads(path.read_text())
                if content["identity"] != self.identity:
                    _say(f"{path} is of a collection with other settings, or another teacher; this one begins anew")
                    continue
                batches = [Batch(**batch) for batch in content["batches"]]
            except FileNotFoundError:
                continue
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                _say(f"{path} cannot be read ({error!r}); what it counted is played again")
                continue
            there = [all(identity in store for identity in batch.ids) for batch in batches]
            if False in there:
                _say(f"{store.path} does not hold all of what {path} counts; batch {there.index(False) + 1} and what follows "
                     "are played again")
            return batches[:there.index(False) if False in there else len(there)]
        return []

    def write(self, batches: list[Batch]) -> None:
        self._replace(self.partial, {"identity": self.identity, "batches": [dataclasses.asdict(b) for b in batches]})

    def finish(self, record: dict[str, Any], batches: list[Batch]) -> None:
        self._replace(self.final, record | {"identity": self.identity, "batches": [dataclasses.asdict(b) for b in batches]})
        self.partial.unlink(missing_ok=True)

    def forget(self) -> None:
        self.partial.unlink(missing_ok=True)

    @staticmethod
    def _replace(path: Path, content: dict[str, Any]) -> None:
        aside = path.with_suffix(".tmp")
        with open(aside, "w") as file:
            json.dump(content, file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)


def _summary(name: str, player: Any, batches: list[Batch], wanted: int, version: str | None, kind: str) -> dict[str, Any]:
    dropped: collections.Counter[str] = collections.Counter()
    for batch in batches:
        dropped.update(batch.dropped)
    total = {key: sum(getattr(b, key) for b in batches) for key in ("episodes", "successful", "turns", "tokens", "retried")}
    return {"domain": name, "player": kind, "teacher": player.id, "revision": player.revision, "version": version,
            "temperature": player.temperature, "wanted": wanted, **total, "kept": sum(len(b.ids) for b in batches),
            "dropped": dict(sorted(dropped.items())), "seconds": round(sum(b.seconds for b in batches), 3)}


def say(record: dict[str, Any]) -> str:
    """A collection in one line."""
    if not record["wanted"]:
        return (f"nothing to play for domain {record['domain']}: domains.{record['domain']}.teacher_episodes is 0; the store "
                "stays as it is")
    return (f"{record['kept']} sequences of '{record['teacher']}' in the store; {record['successful']} of "
            f"{record['episodes']} episodes solved their task" + "".join(
                f"; {count} left out: {reason}" for reason, count in record["dropped"].items())
            + (f"; {record['retried']} played again after a failure" if record["retried"] else ""))


def collect(config: Config, domains: Sequence[str], command: Callable[[str], list[str]], *,
            quiet: bool = False) -> list[dict[str, Any]]:
    """Collect several domains: side by side in processes where `collect.processes` and the cores allow it, else in turn.

    command  domain → arguments of `mopd` that collect it alone
    Returns their records in the order of `domains`; raises what `collect_domain` raises, or JobFailed with its words.
    """
    slots = min(config.collect.processes or min(len(os.sched_getaffinity(0)), 4), len(domains))
    if slots <= 1:
        return [collect_domain(config, name, quiet=quiet) for name in domains]
    jobs = [Job(f"collect_{name}", f"The {config.collect.player} of '{name}' plays {config.domains[name].teacher_episodes} "
                "training tasks.", command(name), []) for name in domains]
    pipeline = Pipeline(Path(config.run) / "collected", jobs, slots=slots)
    for job in jobs:  # each knows itself what it has done already
        (pipeline.folder / f"{job.name}.json").unlink(missing_ok=True)
    pipeline.run()
    return [json.loads((Path(config.run) / "collected" / f"{name}.json").read_text()) for name in domains]


def public(record: dict[str, Any]) -> dict[str, Any]:
    """A record without what only the next call needs."""
    return {key: value for key, value in record.items() if key not in ("identity", "batches")}


def print_summary(records: Sequence[dict[str, Any]]) -> None:
    """The table at the end of a collection."""
    table = Table("domain", "player", "episodes", "solved", "kept", "turns", "tokens", "left out", "again", "seconds")
    for r in records:
        share = f" ({r['successful'] / r['episodes']:.0%})" if r["episodes"] else ""
        lost = ", ".join(f"{count} {reason}" for reason, count in r["dropped"].items()) or "-"
        table.add_row(r["domain"], r["teacher"], str(r["episodes"]), f"{r['successful']}{share}", str(r["kept"]),
                      str(r["turns"]), str(r["tokens"]), lost, str(r["retried"]), f"{r['seconds']:.1f}")
    Console(highlight=False).print(table)
