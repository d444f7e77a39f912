"""Teachers play their domain's training tasks; every sequence goes into the prefix store."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from mopd.config import Config, ConfigError
from mopd.domains import close_domains, open_domains
from mopd.learner.model import check_model_source, load_model
from mopd.progress import Progress
from mopd.sampling.agent_loop import EpisodeSpec, play_episodes
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.store import StoreNotFound
from prefix_store.trajectory import Source
from teachers.registry import model_revision


class NothingCollected(RuntimeError):
    """No episode of a teacher can be kept; the message counts why."""


def collect_domain(config: Config, name: str) -> dict:
    """Let the teacher of domain `name` play `teacher_episodes` training tasks at `collect.temperature`.

    Writes RUN/collected/NAME.json with what was kept and why the rest was not; returns the same. Raises NothingCollected
    where nothing was kept.
    """
    domain = config.domains[name]
    teacher = config.teachers[domain.teacher]
    check_model_source(teacher.model)
    try:
        PrefixStore.open(config.store).close()  # a folder or a URL; "a" below would make one
    except StoreNotFound:
        raise ConfigError(f"store: there is no prefix store at {config.store}; `mopd import` makes one") from None
    opened = open_domains(config, [name])
    counts: Counter = Counter()
    try:
        part = opened[name]
        tokenizer = load_tokenizer(teacher.model)
        renderer = ChatRenderer(tokenizer)
        model = load_model(teacher.model, trust_remote_code=teacher.trust_remote_code)
        engine = HFEngine(model, max_batch=config.collect.batch)
        tasks = part.spread("train", domain.teacher_episodes)
        # Where a split has fewer tasks than episodes are wanted, tasks are played again with other draws.
        specs = [EpisodeSpec(name, tasks[i % len(tasks)], stable_seed(config.seed, name, "collect", i), i, i)
                 for i in range(domain.teacher_episodes)]
        progress = Progress(f"teacher of {name} plays", len(specs))
        source = Source("teacher", domain.teacher, model_revision(teacher.model))
        with PrefixStore.open(config.store, "a") as store:
            for start in range(0, len(specs), config.collect.batch):
                part_specs = specs[start:start + config.collect.batch]
                part.pool.prefetch([s.task for s in part_specs])
                episodes = play_episodes(engine, {name: part.pool}, part_specs, renderer, {name: part.harness},
                                         temperature=config.collect.temperature, source=source,
                                         fingerprint=renderer.fingerprint(model.config))
                for episode in episodes:
                    if episode.failure:
                        counts[f"infrastructure: {episode.failure}"] += 1
                    elif config.collect.success_only and not episode.success:
                        counts["not successful, left out"] += 1
                    else:
                        store.append(episode.sequence)
                        counts["kept"] += 1
                        counts["successful"] += episode.success
                progress.update(start + len(part_specs), f"{counts['successful']} solved")
            if specs and not counts["kept"]:
                raise NothingCollected(f"domains.{name}: nothing of what teacher '{domain.teacher}' played can be kept: "
                                       f"{dict(counts)}")
            version = store.commit(f"teacher {domain.teacher} plays {name}")
    finally:
        close_domains(opened)
    record = {"domain": name, "teacher": domain.teacher, "revision": source.revision, "version": version,
              "counts": dict(counts)}
    path = Path(config.run) / "collected" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))
    print(f"result: {counts['kept']} sequences of '{domain.teacher}' in the store, {counts['successful']} of them solved "
          f"their task" + "".join(f"; {v} {k}" for k, v in counts.items() if k not in ("kept", "successful")))
    return record
