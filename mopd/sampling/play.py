"""Plays a list of tasks once each and reports the scores. The same tasks and seed give every model the same draws."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import Any

from mopd.environments.base import Task
from mopd.sampling.agent_loop import EpisodeSpec, Harness, Harnesses, play_episodes
from mopd.sampling.base import SamplingEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.seeds import stable_seed
from prefix_store.trajectory import Fingerprint, Sequence, Source


@dataclasses.dataclass(frozen=True)
class PlayedTask:
    """One task's result. `failure` names an infrastructure failure, and then nothing else counts. `harness` is the name of
    the one that it was played by, "" where there is only one."""

    task: Task
    success: bool
    score: float
    turns: int
    malformed: int
    ended: str
    failure: str
    sequence: Sequence | None
    harness: str = ""


def play_tasks(
    engine: SamplingEngine,
    pool: Any,
    domain: str,
    tasks: ListLike[Task],
    renderer: ChatRenderer,
    harness: Harness | Harnesses,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    fingerprint: Fingerprint | None = None,
    source: Source | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[PlayedTask]:
    """Play each task (greedily by default) and return the results in the order of the tasks.

    A task's draws depend on `seed`, the domain and the task; where a task stands in the list several times, also on
    which time it is. `progress` is called with the number of tasks that are over.
    """
    seen: Counter[Task] = Counter()
    specs = []
    for number, task in enumerate(tasks):
        own = stable_seed(seed, domain, task.name, task.split, task.seed, seen[task])
        specs.append(EpisodeSpec(domain, task, own, number, number))
        seen[task] += 1
    pool.prefetch(tasks)
    try:
        episodes = play_episodes(
            engine, {domain: pool}, specs, renderer, {domain: harness}, temperature=temperature, top_p=top_p,
            top_k=top_k, fingerprint=fingerprint, source=source, progress=progress,
        )
    finally:
        # Nothing is left of it unless an exception ended the play.
        pool.drop_prefetched()
    return [
        PlayedTask(e.spec.task, e.success, e.score, e.turns, e.malformed, e.ended, e.failure, e.sequence, e.harness)
        for e in episodes
    ]
