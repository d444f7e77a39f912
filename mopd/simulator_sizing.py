"""How many engines, environments and teacher servers a mix needs so that the trainer does not wait: Little's law first, then
a simulation that grows whatever is scarce until it is enough."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from mopd.simulator import Cluster, Simulation, Simulator
from mopd.simulator_traces import Work

GROWTH = (1.08, 1.5)
# bounds of the factor by which what is scarce grows between two tries, 1 / (1 − idle share) in between


@dataclasses.dataclass(frozen=True)
class Need:
    """Averages by Little's law (in flight = rate × time) at one step per `step_seconds`.

    slots and kv_tokens: sequences and tokens in flight; environments by source; teacher_load and trainer_load: servers
    and trainers busy; tokens of a step's batch, and of all that is sampled for it
    """

    step_seconds: float
    slots: float
    kv_tokens: float
    environments: dict[str, float]
    teacher_load: float
    tokens: float
    sampled_tokens: float


def little(work: Work, target: Mapping[str, float], cluster: Cluster, step_seconds: float) -> Need:
    """What the mix `target` (groups by source and step) keeps busy when a step takes `step_seconds` > 0.

    KV of a sequence grows linearly, so half its length is held on average; of lengths weighed by time, as long sequences
    are met more often. Means are over the first block of `work`.
    """
    slots = kv = tokens = sampled = 0.0
    environments = {}
    for source, groups in target.items():
        seconds, lengths, accepted = work.block(source, 0)
        launched = groups / max(float(accepted.mean()), 1e-9)
        environments[source] = launched * float(seconds.sum(axis=1).mean()) / step_seconds
        slots += environments[source]
        kv += launched * float((seconds * lengths).sum(axis=1).mean()) / 2 / step_seconds
        tokens += groups * float(lengths.sum(axis=1).mean())
        sampled += launched * float(lengths.sum(axis=1).mean())
    teachers = sampled / cluster.teacher_tokens_per_second / step_seconds
    return Need(step_seconds, slots, kv, environments, teachers, tokens, sampled)


@dataclasses.dataclass(frozen=True)
class Try:
    """One simulated size and how it did in the second half of its steps; `scarce`: what bounds it, "trainer" where that is
    fed."""

    cluster: Cluster
    idle_share: float
    occupancy: float
    step_seconds: float
    scarce: str
    simulation: Simulation


def size_cluster(make: Callable[[Cluster], Any], work: Work, target: Mapping[str, float], cluster: Cluster, *, steps: int,
                 idle_share: float = 0.05, tries: int = 12, progress: Callable[[int], None] | None = None) -> list[Try]:
    """Simulated sizes, from Little's law's on, the last of which keeps the trainer idle for at most `idle_share` of the
    time, unless `tries` were not enough. `make(cluster)` gives a scheduler; `cluster` fixes one engine's slots and KV and the
    speeds. Raises ValueError if the trainer takes no time, as no cluster is then large enough."""
    first = little(work, target, cluster, 1.0)
    rate = cluster.trainer_tokens_per_second
    step_seconds = cluster.trainer_seconds + (first.tokens / rate if rate else 0.0)
    if step_seconds <= 0:
        raise ValueError("cluster.trainer_seconds: a cluster is sized to a trainer's pace; say how long a step trains "
                         "(trainer_seconds), or how many tokens a second (trainer_tokens_per_second)")
    need = little(work, target, cluster, step_seconds)
    engines = max(1, math.ceil(need.slots / cluster.slots), math.ceil(need.kv_tokens / cluster.kv_tokens))
    now = dataclasses.replace(cluster, engines=engines, teacher_servers=max(1, math.ceil(need.teacher_load)))
    done: list[Try] = []
    while len(done) < tries:
        found = Simulator(make(now), now, work, steps).run()
        scarce = _scarce(found, now)
        idle, occupancy, seconds = found.settled()
        fed = idle <= idle_share
        done.append(Try(now, idle, occupancy, seconds, "trainer" if fed else scarce, found))
        if progress:
            progress(len(done))
        if fed:
            break
        name = "teacher_servers" if scarce == "teachers" else "engines"
        factor = min(max(1 / (1 - min(idle, 0.9)), GROWTH[0]), GROWTH[1])
        more = max(getattr(now, name) + 1, math.ceil(getattr(now, name) * factor))
        now = dataclasses.replace(now, **{name: more})
    return done


def _scarce(found: Simulation, cluster: Cluster) -> str:
    """Teachers where they are busier than the engines' slots, else engines."""
    teachers = found.teacher_seconds / max(found.end, 1e-12) / max(cluster.teacher_servers, 1)
    return "teachers" if cluster.teacher_servers and teachers > found.occupancy else "engines"


def bounds(work: Work, target: Mapping[str, float], cluster: Cluster) -> dict[str, float]:
    """Seconds of a step that each part of `cluster` allows at best; the largest is what bounds the run."""
    need = little(work, target, cluster, 1.0)
    rate = cluster.trainer_tokens_per_second
    parts = {"engine slots": need.slots / cluster.all_slots,
             "KV memory": need.kv_tokens / (cluster.engines * cluster.kv_tokens),
             "trainer": cluster.trainer_seconds + (need.tokens / rate if rate else 0.0)}
    if cluster.teacher_servers:
        parts["teachers"] = need.teacher_load / cluster.teacher_servers
    return parts
