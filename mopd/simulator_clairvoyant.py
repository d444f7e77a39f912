"""A scheduler that knows how long every sequence will take and which groups will be accepted: what no real one can be, the
bound that the mixer is measured against."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping

from mopd.mixer import Composer, StepPlan
from mopd.mixer_dispatch import Dispatch
from mopd.mixer_events import Action, Batch, EngineChanged, Event, Finished, GroupId, Judged, Launch, TrainerReady
from mopd.simulator import Cluster, bound_step_seconds
from mopd.simulator_traces import Work

LOOK_PAST = 64
# jobs tried where the most urgent one fits no engine


class Clairvoyant:
    """Backward scheduling with full knowledge. Each launch of each source belongs to the step that will use it; it should
    start its own duration before that step is due, steps being due at the pace that all slots busy allow. The launch whose
    latest start is nearest goes first, and none more than `ahead` steps before it (by default any number: a bound). KV
    needs are known too, so there is no safety multiple. Tasks cannot be skipped: groups that will be refused are played.
    """

    def __init__(self, shares: Mapping[str, float], streams: Mapping[str, Mapping[str, float]], groups_per_step: int,
                 cluster: Cluster, work: Work, *, steps: int, ahead: float = math.inf, margin: int = 40):
        composer = Composer(tuple(shares), groups_per_step, streams)
        target = {f"{d}/{s}": shares[d] / sum(shares.values()) * w * groups_per_step
                  for d, parts in composer.streams.items() for s, w in parts.items()}
        self.pace = max(bound_step_seconds(work, target, cluster.all_slots), cluster.trainer_seconds, 1e-9)
        self.work, self.ahead, self.dispatch = work, ahead, Dispatch(safety=1.0)
        self.plans: list[StepPlan] = []
        self.due: dict[GroupId, int] = {}
        self.missing: list[int] = []
        self.members: dict[int, list[GroupId]] = {}
        self.jobs: list[tuple[float, str, int, int]] = []
        number: Counter[str] = Counter()
        for step in range(steps + margin):  # beyond the last step there is work as well: no run ends with empty slots
            plan = composer.next(shares)
            self.plans.append(plan)
            self.missing.append(plan.total)
            self.members[step] = []
            for (domain, stream), count in plan.cells.items():
                source = f"{domain}/{stream}"
                while count:
                    group = GroupId(source, number[source])
                    number[source] += 1
                    self.due[group] = step
                    lengths = [work.sequence(*group, member)[0] for member in range(work.models[source].group_size)]
                    if work.accepted(*group):
                        count -= 1
                        self.members[step].append(group)
                    for member, seconds in enumerate(lengths):
                        self.jobs.append(((step + 1) * self.pace - seconds, source, group.number, member))
        heapq.heapify(self.jobs)
        self.step, self.ready = 0, False

    def offer(self, event: Event) -> list[Action]:
        """As the mixer's, for the events of a simulation."""
        actions: list[Action] = []
        if isinstance(event, EngineChanged):
            self.dispatch.set_engine(event.engine, event.slots, event.kv_tokens)
        elif isinstance(event, Finished):
            self.dispatch.release(f"{event.group}.{event.member}")
        elif isinstance(event, Judged):
            self.missing[self.due[event.group]] -= event.accepted
        elif isinstance(event, TrainerReady):
            self.ready = True
        if self.ready and self.missing[self.step] == 0:
            actions.append(Batch(self.plans[self.step], tuple(self.members[self.step])))
            self.step, self.ready = self.step + 1, False
        passed = []
        while self.jobs and self.dispatch.total_free and len(passed) < LOOK_PAST:
            if self.jobs[0][0] > (self.step + 1 + self.ahead) * self.pace:
                break
            job = heapq.heappop(self.jobs)
            _, source, number, member = job
            group = GroupId(source, number)
            engine = self.dispatch.place(f"{group}.{member}", max(self.work.sequence(source, number, member)[1], 1))
            if engine is None:
                passed.append(job)
            else:
                actions.append(Launch(group, member, engine))
        for job in passed:
            heapq.heappush(self.jobs, job)
        return actions
