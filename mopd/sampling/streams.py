"""The student's tokens of one step: whole tasks played, and fresh turns at stored decision points.

Turns a plan (samples by domain and stream) into rows. Which task, which trajectory, which decision points and which
random draws are functions of (seed, step, domain, stream, group, member) alone. Continuations of stored turns are read
for the demonstration stream only.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Mapping

from mopd.domains import Domain
from mopd.rows import Row
from mopd.sampling.agent_loop import Episode, EpisodeSpec, play_episodes
from mopd.sampling.base import SamplingEngine, SamplingOptions
from mopd.sampling.fresh_turn import FreshTurnPoint, demonstration_rows, rows_from_sequence, sample_fresh_turns
from mopd.sampling.rendering import ChatRenderer
from mopd.schedule import Plan
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.selection import STREAM_SOURCES, Selector
from prefix_store.trajectory import Fingerprint, Source


class NothingToSample(RuntimeError):
    """A step cannot be sampled at all; the message says what is missing and what to do."""


@dataclasses.dataclass
class StepSamples:
    """What one step sampled. Seconds are wall-clock; failures count infrastructure failures by domain and category."""

    rows: list[Row]
    episodes: list[Episode]
    sampled_tokens: int = 0
    environment_steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: {"sampling": 0.0, "environments": 0.0})
    failures: dict[str, Counter] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    groups: int = 0
    dropped_groups: int = 0


class Streams:
    """Samples all streams with one engine.

    domains   name → Domain with its pool and harness
    store     the prefix store, opened at a fixed version
    selector  draws decision points of stored trajectories
    """

    def __init__(self, *, domains: Mapping[str, Domain], store: PrefixStore | None, selector: Selector | None,
                 engine: SamplingEngine, renderer: ChatRenderer, fingerprint: Fingerprint, seed: int, student: str,
                 temperature: float, group_size: int, fresh_turns: int, demonstration_fraction: float):
        self.domains, self.store, self.selector = domains, store, selector
        self.engine, self.renderer, self.fingerprint = engine, renderer, fingerprint
        self.seed, self.student, self.temperature = seed, student, temperature
        self.group_size, self.fresh_turns, self.demonstration = group_size, fresh_turns, demonstration_fraction
        self.totals: Counter = Counter()

    def episodes_of(self, plan: Plan) -> list[EpisodeSpec]:
        """The tasks that this plan's rollouts play: a pure function of (seed, plan)."""
        specs, group = [], 0
        for name, counts in plan.counts.items():
            for sample in range(counts.get("rollout", 0)):
                task = self.domains[name].draw("train", self.seed, plan.step, sample)
                for member in range(self.group_size):
                    seed = stable_seed(self.seed, plan.step, name, "rollout", sample, member)
                    specs.append(EpisodeSpec(name, task, seed, group, len(specs)))
                group += 1
        return specs

    def prefetch(self, plan: Plan) -> None:
        """Start resetting the environments of `plan` in the background."""
        by_domain = defaultdict(list)
        for spec in self.episodes_of(plan):
            by_domain[spec.domain].append(spec.task)
        for name, tasks in by_domain.items():
            self.domains[name].pool.prefetch(tasks)

    def sample(self, plan: Plan) -> StepSamples:
        """Play and write everything that `plan` asks for."""
        result = StepSamples([], [])
        self._rollouts(plan, result)
        self._fresh_turns(plan, result)
        self.totals.update(sampled_tokens=result.sampled_tokens, environment_steps=result.environment_steps)
        for name, counts in result.failures.items():
            self.totals.update({f"{name}: {category}": number for category, number in counts.items()})
        return result

    def summary(self) -> str:
        """What this process sampled so far, in words."""
        failures = {k: v for k, v in self.totals.items() if ": " in k}
        return (f"{self.totals['sampled_tokens']} sampled tokens, {self.totals['environment_steps']} environment steps, "
                f"infrastructure failures {failures or 'none'}")

    def state_dict(self) -> dict:
        """What the following draws depend on besides the plan, as JSON values."""
        return {"selector": self.selector.state_dict() if self.selector else None, "totals": dict(self.totals)}

    def load_state_dict(self, state: dict) -> None:
        self.totals = Counter(state["totals"])
        if self.selector and state["selector"]:
            self.selector.load_state_dict(state["selector"])

    def _rollouts(self, plan: Plan, result: StepSamples) -> None:
        specs = self.episodes_of(plan)
        if not specs:
            return
        start = time.perf_counter()
        episodes = play_episodes(
            self.engine, {n: d.pool for n, d in self.domains.items()}, specs, self.renderer,
            {n: d.harness for n, d in self.domains.items()}, temperature=self.temperature,
            fingerprint=self.fingerprint, source=Source("student", f"{self.student}@{plan.step}"))
        wall = time.perf_counter() - start
        groups = {spec.group for spec in specs}
        alive = set()
        environments = 0.0
        for episode in episodes:
            environments += episode.environment_seconds
            if episode.failure:
                result.failures[episode.spec.domain][episode.failure] += 1
                continue
            alive.add(episode.spec.group)
            result.environment_steps += episode.turns
            rows = rows_from_sequence(episode.sequence, domain=episode.spec.domain, stream="rollout",
                                      group=episode.spec.group, sequence_number=episode.spec.sequence)
            result.sampled_tokens += sum(row.loss_tokens for row in rows)
            result.rows += rows
        result.episodes = episodes
        result.groups += len(groups)
        result.dropped_groups += len(groups - alive)
        environments = min(environments, wall)
        result.seconds["environments"] += environments
        result.seconds["sampling"] += wall - environments

    def _fresh_turns(self, plan: Plan, result: StepSamples) -> None:
        wanted = {(name, stream): counts[stream] for name, counts in plan.counts.items()
                  for stream in STREAM_SOURCES if counts.get(stream)}
        if not wanted:
            return
        if self.store is None or self.selector is None:
            raise NothingToSample("the plan asks for stored prefixes, but no prefix store is open; set store, or "
                                  "train.prefix_fraction=0")
        start = time.perf_counter()
        points, stored = [], {}
        # Numbers of groups and sequences continue after the rollouts' so that they are unique within the step.
        group = sequence = sum(counts.get("rollout", 0) for counts in plan.counts.values()) * max(self.group_size, 1)
        for (name, stream), count in wanted.items():
            for number, chosen in enumerate(self.selector.select_sequences(plan.step, name, stream, count)):
                for point in chosen:
                    key = (stream, number, point.sequence, point.context)
                    seeds = [stable_seed(self.seed, plan.step, name, stream, number, point.turn, member)
                             for member in range(self.fresh_turns)]
                    points.append(FreshTurnPoint(
                        domain=name, stream=stream, row=key, prefix=self.store.prefix(point), turn=point.turn,
                        seeds=tuple(seeds), group=group, sequence=sequence))
                    stored.setdefault((name, *key), []).append((point, group, sequence))
                    group += 1
                    sequence += len(seeds)
        options = {name: SamplingOptions(temperature=self.temperature, max_tokens=d.harness.max_turn_tokens,
                                         stop_ids=self.renderer.stop_ids) for name, d in self.domains.items()}
        rows = sample_fresh_turns(self.engine, points, options)
        result.sampled_tokens += sum(row.loss_tokens for row in rows)
        result.rows += rows
        if self.demonstration > 0:
            result.rows += demonstration_rows(self.store, stored, first_group=group, first_sequence=sequence)
        result.groups += len(points)
        result.seconds["sampling"] += time.perf_counter() - start
