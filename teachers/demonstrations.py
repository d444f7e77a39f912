"""Where a teacher's demonstrations come from: files, a prefix store, or a domain's expert that plays; as rows to train on.

What is left out is counted with its reason. Text is rendered once, by the tokenizer and chat template of the model that
will learn from it.
"""

from __future__ import annotations

import collections
import dataclasses
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from mopd.config import Config, ConfigError
from mopd.config_domains import words_of
from mopd.config_supervised import SFTConfig
from mopd.domains import open_domain
from mopd.environments.demonstrations import demonstrate, write_transcripts
from mopd.learner.supervised import rows_of_sequence
from mopd.progress import Progress
from mopd.rows import Row
from mopd.sampling.harness import Harness
from mopd.sampling.rendering import ChatRenderer, transcript_messages
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.importers import import_file
from prefix_store.store import StoreNotFound, check_fingerprint
from prefix_store.trajectory import Sequence as Trajectory
from prefix_store.trajectory import content_hash


class NoDemonstrations(ValueError):
    """There is nothing to learn a domain from; the message names the domain, where was looked and what was left out."""


@dataclasses.dataclass
class DomainRows:
    """A domain's demonstrations: `rows` to train on, `held_out` rows for a loss, how many `sequences` they are of, and
    `left_out` (reason → how many). `splits` counts the sequences by the split of their task."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    held_out: list[Row] = dataclasses.field(default_factory=list)
    sequences: int = 0
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    splits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


@dataclasses.dataclass
class Demonstrations:
    """By domain; `places` says in words where they come from, `store_version` which version of a store was read, `left_out`
    counts rows of files that belong to no domain of this training."""

    domains: dict[str, DomainRows]
    places: list[str]
    store_version: str | None = None
    left_out: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    @property
    def rows(self) -> list[Row]:
        """Rows to train on, domain after domain."""
        return [row for part in self.domains.values() for row in part.rows]

    @property
    def held_out(self) -> list[Row]:
        return [row for part in self.domains.values() for row in part.held_out]

    def describe(self) -> list[str]:
        """One line per domain: how many, and what was left out."""
        lines = []
        for name, part in self.domains.items():
            held = f", {len(part.held_out)} rows held out" if part.held_out else ""
            lost = "".join(f"; {count} left out: {reason}" for reason, count in sorted(part.left_out.items()))
            lines.append(f"{name}: {part.sequences} demonstrations, {len(part.rows)} rows with "
                         f"{sum(row.loss_tokens for row in part.rows)} trained tokens{held}{lost}")
        return lines + [f"files: {count} rows left out: {reason}" for reason, count in sorted(self.left_out.items())]


def read_demonstrations(config: Config, options: SFTConfig, domains: Sequence[str], renderer: ChatRenderer) -> Demonstrations:
    """The demonstrations of `domains` from what `options` names: `files`, `experts`, and a store (the run's where nothing
    else is named).

    Raises NoDemonstrations for every domain of which there is nothing to train on, ConfigError for a file or store that is
    not there, and what the importers and the store raise.
    """
    found, sequences = gather_demonstrations(config, options, domains, renderer)
    for name, part in found.domains.items():
        _make_rows(part, name, sorted(sequences[name].items()), config, options)
    _refuse_empty(found)
    return found


def gather_demonstrations(config: Config, options: SFTConfig, domains: Sequence[str],
                          renderer: ChatRenderer) -> tuple[Demonstrations, dict[str, dict[str, Trajectory]]]:
    """What `options` names, without rows yet, and by domain the sequences by the hash of their content. Raises ConfigError
    and what importers and store raise."""
    found = Demonstrations({name: DomainRows() for name in domains}, [])
    stored = options.store or ("" if options.files or options.experts else config.store)
    # By domain in the order of their content's hash, so that no order of files or threads has a say.
    sequences: dict[str, dict[str, Trajectory]] = {name: {} for name in domains}

    def take(name: str, identity: str, sequence: Trajectory) -> None:
        if identity in sequences[name]:
            found.domains[name].left_out["there twice"] += 1
        sequences[name][identity] = sequence

    if options.files:
        found.places.append(", ".join(options.files))
        _from_files(config, options, domains, renderer, found, take)
    if options.experts:
        found.places.append("the domains' experts")
        for name in domains:
            for sequence in _from_expert(config, name, renderer, found.domains[name]):
                take(name, content_hash(sequence), sequence)
    if stored:
        found.places.append(f"the prefix store {stored}")
        found.store_version = _from_store(stored, options, domains, renderer, found, take)
    return found, sequences


def _from_files(config: Config, options: SFTConfig, domains: Sequence[str], renderer: ChatRenderer, found: Demonstrations,
                take) -> None:
    only = domains[0] if len(domains) == 1 else None
    for path in options.files:
        if not Path(path).exists():
            raise ConfigError(f"sft.files: {path}: no such file or folder")

        def sink(sequence: Trajectory) -> None:
            if sequence.domain in found.domains:
                take(sequence.domain, content_hash(sequence), sequence)
            else:
                found.left_out[f"of domain {sequence.domain!r}"] += 1

        result = import_file(path, renderer, sink, options.format, domain=only, messages_of=words_of(config.domains),
                             expert_only=True, max_context_tokens=None)
        for reason, places in result.refused.items():
            found.left_out[f"{reason} (e.g. {result.examples[reason]})"] += len(places)


def _from_expert(config: Config, name: str, renderer: ChatRenderer, part: DomainRows) -> Iterator[Trajectory]:
    options = config.domains[name]
    if not options.environment:
        raise ConfigError(f"sft.experts: domain {name!r} has no environment, so no expert can play; set "
                          f"domains.{name}.environment, or name files or a store")
    if not options.demonstrations:
        raise ConfigError(f"domains.{name}.demonstrations: 0, so its expert would play nothing; set how many tasks it plays")
    domain = open_domain(config, name)
    try:
        tasks = domain.spread("train", options.demonstrations)
        progress = Progress(f"expert of {name}", len(tasks))
        played = demonstrate(domain.family, name, tasks, seed=stable_seed(config.seed, name, "expert"),
                             max_turns=options.max_turns, workers=options.workers, source_id=f"{name}-expert",
                             progress=lambda done, _: progress.update(done))
    finally:
        domain.close()
    for reason, count in played.counts.items():
        if reason != "kept":
            part.left_out[f"expert: {reason}"] += count
    # What the rollouts will be told, not the environment's own words.
    yield from render_transcripts([t | {"system": domain.harness.system_prompt} for t in played.transcripts], renderer, part,
                                  harness=domain.harness)


def render_transcripts(transcripts: list[dict], renderer: ChatRenderer, part: DomainRows | None = None,
                       max_tokens: int | None = None, harness: Harness | None = None) -> list[Trajectory]:
    """Transcripts of played episodes token by token, as `mopd import` makes them, in the words of `harness`; what it refuses
    is counted in `part`."""
    harness = harness or Harness()
    sequences: list[Trajectory] = []
    if not transcripts:
        return sequences
    with tempfile.TemporaryDirectory(prefix="mopd-demonstrations-") as folder:
        path = Path(folder) / "transcripts.jsonl"
        write_transcripts(path, transcripts)
        result = import_file(path, harness.renderer(renderer), sequences.append, "transcripts",
                             messages_of=lambda t: transcript_messages(t, harness.words), max_context_tokens=max_tokens)
    for reason, places in result.refused.items():
        if part is not None:
            part.left_out[reason] += len(places)
    return sequences


def _from_store(place: str, options: SFTConfig, domains: Sequence[str], renderer: ChatRenderer, found: Demonstrations,
                take) -> str | None:
    try:
        opened = PrefixStore.open(place)
    except StoreNotFound:
        raise ConfigError(f"store: there is no prefix store at {place}; `mopd import` makes one") from None
    with opened as store:
        check_fingerprint(store, renderer.fingerprint())
        for name in domains:
            others = {p.sequence for p in store.decision_points(name)}
            for identity in dict.fromkeys(p.sequence for p in store.decision_points(name, sources=options.sources)):
                others.discard(identity)
                take(name, identity, store.sequence(identity))
            if others:
                found.domains[name].left_out[f"not of sources {', '.join(options.sources)}"] += len(others)
        return store.version


def _make_rows(part: DomainRows, name: str, sequences: list[tuple[str, Trajectory]], config: Config,
               options: SFTConfig) -> None:
    """Fill a domain's rows from its sequences, which stand in the order of their hashes."""
    limit = config.domains[name].max_context_tokens
    chosen: list[tuple[list[Row], str]] = []
    for identity, sequence in sequences:
        if options.success_only and not sequence.outcome.success:
            part.left_out["not successful"] += 1
            continue
        rows = rows_of_sequence(sequence, origin=identity, max_tokens=limit)
        actions = sum(1 for context in sequence.contexts for s in context.actions() if s.start >= max(1, context.fork))
        kept = sum(len(row.actions) for row in rows)
        if not rows:
            part.left_out[f"no action within domains.{name}.max_context_tokens={limit}" if actions else
                          "no assistant tokens"] += 1
            continue
        if kept < actions:
            part.left_out[f"turns behind domains.{name}.max_context_tokens={limit}"] += actions - kept
        part.sequences += 1
        part.splits[sequence.split] += 1
        chosen.append((rows, identity))
    held = set()
    if options.held_out_fraction > 0 and len(chosen) > 1:
        count = min(max(1, round(options.held_out_fraction * len(chosen))), len(chosen) - 1)
        order = np.random.default_rng(stable_seed(config.seed, name, "held out")).permutation(len(chosen))
        held = set(order[:count].tolist())
    for number, (rows, _) in enumerate(chosen):
        (part.held_out if number in held else part.rows).extend(rows)


def _refuse_empty(found: Demonstrations) -> None:
    lacking = []
    for name, part in found.domains.items():
        if part.rows:
            continue
        reasons = "".join(f"; {count} left out: {reason}"
                          for reason, count in sorted((part.left_out + found.left_out).items()))
        lacking.append(f"there is no demonstration to learn domain {name!r} from in {' and '.join(found.places)}{reasons}")
    if lacking:
        raise NoDemonstrations(". ".join(lacking) + ". Import some with `mopd import`, name files (sft.files) or let the "
                               "expert play (sft.experts=true)")
