"""The student's tokens of one step: whole tasks played, and fresh turns at stored decision points.

Turns a plan (samples by domain and stream) into rows. Which task, which trajectory, which decision points and which
random draws are functions of (seed, step, domain, stream, group, member) alone. Continuations of stored turns are read
for the demonstration stream only; who goes on from a point for several turns reads the actions that lead there (resume.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from mopd.domains import Domain
from mopd.ranks import Ranks
from mopd.rows import Row
from mopd.sampling.advantages import GroupAdvantage, outcome_advantages
from mopd.sampling.agent_loop import Episode, EpisodeSpec, play_episodes
from mopd.sampling.base import SamplingEngine, SamplingOptions
from mopd.sampling.fresh_turn import FreshTurnPoint, demonstration_rows, rows_from_sequence, sample_fresh_turns
from mopd.sampling.point_draws import measured
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Resumer
from mopd.sampling.sharing import merge, own
from mopd.schedule import Plan
from mopd.seeds import stable_seed
from mopd.signals import BrokenOff
from prefix_store import PrefixStore
from prefix_store.selection import STREAM_SOURCES, NothingToSelect, Selector
from prefix_store.trajectory import DecisionPoint, Fingerprint, Source


class NothingToSample(RuntimeError):
    """A step cannot be sampled at all; the message says what is missing and what to do."""


@dataclasses.dataclass
class StepSamples:
    """What one step sampled. Seconds are wall-clock; failures count infrastructure failures by domain and category.

    episodes            the rollouts
    resumed             sequences that went on from a stored point for more than one turn
    environment_steps   of rollouts and resumed sequences, and those that led to the stored points
    points              group number → the stored decision point whose fresh turns it holds
    selection           what was drawn, by domain (`Selector.drawn`), with `streams`: what each draw chose from
    outcome_groups      how many groups of rollouts there were and how many taught nothing, by domain (see advantages.py);
                        empty where a task is played once only
    """

    rows: list[Row]
    episodes: list[Episode]
    resumed: list[Episode] = dataclasses.field(default_factory=list)
    sampled_tokens: int = 0
    environment_steps: int = 0
    seconds: dict[str, float] = dataclasses.field(default_factory=lambda: {"sampling": 0.0, "environments": 0.0})
    failures: dict[str, Counter] = dataclasses.field(default_factory=lambda: defaultdict(Counter))
    groups: int = 0
    dropped_groups: int = 0
    points: dict[int, DecisionPoint] = dataclasses.field(default_factory=dict)
    selection: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    outcome_groups: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)


class Streams:
    """Samples all streams with one engine.

    domains   name → Domain with its pool and harness
    store     the prefix store, opened at a fixed version
    selector  draws decision points of stored trajectories
    resume_turns   domain → turns that the student plays on from a decision point; 1, as where none is given, takes no
                   environment
    advantage      a group's rewards → its outcome advantages; without it all are 0. Fresh turns have no outcome, and
                   sequences that go on from a stored point mostly stop before theirs: both always carry 0
    ranks          the processes that share out the sampling; every one has all samples after `sample`

    `ended`, which may be set, is told every sequence's rows as soon as this process has them (their outcome advantages are
    not known then): teachers begin to score while the others are still sampled. `may_break`, which may be set, makes the
    context in which this process's own sampling can be broken off (`mopd.signals.Stop`).
    """

    def __init__(self, *, domains: Mapping[str, Domain], store: PrefixStore | None, selector: Selector | None,
                 engine: SamplingEngine, renderer: ChatRenderer, fingerprint: Fingerprint, seed: int, student: str,
                 temperature: float, group_size: int, fresh_turns: int, demonstration_fraction: float,
                 resume_turns: Mapping[str, int] | None = None, advantage: GroupAdvantage | None = None,
                 ranks: Ranks | None = None, top_p: float = 1.0, top_k: int = 0):
        self.domains, self.store, self.selector = domains, store, selector
        self.engine, self.renderer, self.fingerprint = engine, renderer, fingerprint
        self.seed, self.student, self.temperature = seed, student, temperature
        self.top_p, self.top_k = top_p, top_k
        self.group_size, self.fresh_turns, self.demonstration = group_size, fresh_turns, demonstration_fraction
        self.advantage, self.ranks = advantage, ranks or Ranks()
        self.ended: Callable[[list[Row]], None] | None = None
        self.may_break: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext
        self.totals: Counter = Counter()
        turns = {name: number for name, number in (resume_turns or {}).items() if number > 1}
        self.resumer = Resumer(domains=domains, store=store, renderer=renderer, turns=turns) if turns and store else None

    def episodes_of(self, plan: Plan) -> list[EpisodeSpec]:
        """The tasks that this plan's rollouts play: a pure function of (seed, plan)."""
        specs, group = [], 0
        for name, counts in plan.counts.items():
            for sample in range(counts.get("rollout", 0)):
                task = self.domains[name].draw("train", self.seed, plan.step, sample)
                harness = self.domains[name].harnesses.pick(self.seed, plan.step, name, sample)  # one for the whole group
                for member in range(self.group_size):
                    seed = stable_seed(self.seed, plan.step, name, "rollout", sample, member)
                    specs.append(EpisodeSpec(name, task, seed, group, len(specs), harness=harness))
                group += 1
        return specs

    def _own_episodes(self, plan: Plan) -> list[EpisodeSpec]:
        return [spec for spec in self.episodes_of(plan) if own(spec.group, self.ranks)]

    def prefetch(self, plan: Plan) -> None:
        """Start resetting the environments of `plan` in the background, and restoring those at stored points."""
        by_domain = defaultdict(list)
        for spec in self._own_episodes(plan):
            by_domain[spec.domain].append(spec.task)
        for name, tasks in by_domain.items():
            self.domains[name].pool.prefetch(tasks)
        if self.resumer is not None and self.selector is not None:
            # A look ahead: the draw itself comes with `sample`, and may differ where scores have moved meanwhile.
            with self.selector.looking_ahead(), contextlib.suppress(NothingToSelect):  # `sample` says so, if it comes to that
                points = [(name, point, self.fresh_turns) for name, _, _, chosen, mine in self._drawn(plan)
                          for point in chosen if mine and name in self.resumer.turns]
                self.resumer.expect(points, busy={name: len(tasks) for name, tasks in by_domain.items()})

    def sample(self, plan: Plan) -> StepSamples:
        """Play and write everything that `plan` asks for. Every rank does its share and returns the whole; every rank must
        call it. Raises BrokenOff on all ranks where one of them was told to break off."""
        result, broken = StepSamples([], []), False
        try:
            with self.may_break():
                self._rollouts(plan, result)
                self._fresh_turns(plan, result)
        except BrokenOff:
            broken = True
        if any(self.ranks.gather(broken)):
            raise BrokenOff
        if self.ranks.size > 1:
            self.ranks.agree(f"what step {plan.step} samples", {
                "the plan": plan.to_json(), "the decision points": sorted((g, str(p)) for g, p in result.points.items()),
                "the tasks": [str(spec) for spec in self.episodes_of(plan)]})
            merge(self.ranks, result)
        self.totals.update(sampled_tokens=result.sampled_tokens, environment_steps=result.environment_steps)
        for name, counts in result.failures.items():
            self.totals.update({f"{name}: {category}": number for category, number in counts.items()})
        return result

    def observe(self, step: int, samples: StepSamples, turn_scores: Mapping[tuple[int, int], Mapping[str, float]]) -> None:
        """Step `step` was trained on `samples`; turn_scores is what it measured, (group, turn) → {name: mean}.

        Of a sequence that went on from a point for several turns, the first is the point's own.
        """
        if self.selector is None:
            return
        self.selector.observe(step, measured(samples.points, turn_scores))

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
        specs = self._own_episodes(plan)
        if not specs:
            return
        start = time.perf_counter()
        episodes = play_episodes(
            self.engine, {n: d.pool for n, d in self.domains.items()}, specs, self.renderer,
            {n: d.harnesses for n, d in self.domains.items()}, temperature=self.temperature, top_p=self.top_p,
            top_k=self.top_k, fingerprint=self.fingerprint, source=Source("student", f"{self.student}@{plan.step}"),
            ended=self._tell(lambda spec: "rollout"))
        wall = time.perf_counter() - start
        groups = {spec.group for spec in specs}
        alive = set()
        environments = 0.0
        advantages: dict[int, float] = {}
        if self.advantage is not None and self.group_size > 1:
            advantages, result.outcome_groups = outcome_advantages(episodes, self.advantage)
        for episode in episodes:
            environments += episode.environment_seconds
            if episode.failure:
                result.failures[episode.spec.domain][episode.failure] += 1
                continue
            alive.add(episode.spec.group)
            result.environment_steps += episode.turns
            rows = rows_from_sequence(episode.sequence, domain=episode.spec.domain, stream="rollout",
                                      group=episode.spec.group, sequence_number=episode.spec.sequence,
                                      outcome_advantage=advantages.get(episode.spec.sequence, 0.0))
            result.sampled_tokens += sum(row.loss_tokens for row in rows)
            result.rows += rows
        result.episodes = episodes
        result.groups += len(groups)
        result.dropped_groups += len(groups - alive)
        environments = min(environments, wall)
        result.seconds["environments"] += environments
        result.seconds["sampling"] += wall - environments

    def _drawn(self, plan: Plan):
        """Yields (domain, stream, number, decision points, whether this rank samples there) of each stored trajectory that
        `plan` goes on from."""
        place = 0
        for name, counts in plan.counts.items():
            for stream in STREAM_SOURCES:
                if counts.get(stream):
                    chosen = self.selector.select_sequences(plan.step, name, stream, counts[stream])
                    for number, points in enumerate(chosen):
                        yield name, stream, number, points, own(place, self.ranks)
                        place += 1

    def _selection(self, plan: Plan) -> dict[str, dict[str, Any]]:
        found = self.selector.drawn(plan.step)
        for name, counts in plan.counts.items():
            for stream in STREAM_SOURCES:
                if counts.get(stream):
                    part = found.setdefault(name, {"points": 0, "sources": {}, "depth": {}})
                    part.setdefault("streams", {})[stream] = self.selector.describe(plan.step, name, stream)
        return found

    def _fresh_turns(self, plan: Plan, result: StepSamples) -> None:
        if not any(counts.get(stream) for counts in plan.counts.values() for stream in STREAM_SOURCES):
            return
        if self.store is None or self.selector is None:
            raise NothingToSample("the plan asks for stored prefixes, but no prefix store is open; set store, or "
                                  "train.prefix_fraction=0")
        start = time.perf_counter()
        points, stored, mine = [], {}, set()
        # Numbers of groups and sequences continue after the rollouts' so that they are unique within the step.
        group = sequence = sum(counts.get("rollout", 0) for counts in plan.counts.values()) * max(self.group_size, 1)
        for name, stream, number, chosen, here in self._drawn(plan):
            for point in chosen:
                key = (stream, number, point.sequence, point.context)
                seeds = [stable_seed(self.seed, plan.step, name, stream, number, point.turn, member)
                         for member in range(self.fresh_turns)]
                if here:
                    points.append(FreshTurnPoint(
                        domain=name, stream=stream, row=key, prefix=self.store.prefix(point), turn=point.turn,
                        seeds=tuple(seeds), group=group, sequence=sequence, at=point))
                    mine.add((name, *key))
                stored.setdefault((name, *key), []).append((point, group, sequence))
                result.points[group] = point
                group += 1
                sequence += len(seeds)
        result.selection = self._selection(plan)
        options = {name: SamplingOptions(self.temperature, self.top_p, self.top_k, max_tokens=d.harness.max_turn_tokens,
                                         stop_ids=self.renderer.stop_ids,
                                         stop_strings=self.renderer.stop_strings) for name, d in self.domains.items()}
        further = self.resumer.turns if self.resumer is not None else {}
        resumed = [p for p in points if p.domain in further]
        rows = sample_fresh_turns(self.engine, [p for p in points if p.domain not in further], options, ended=self.ended)
        result.sampled_tokens += sum(row.loss_tokens for row in rows)
        result.rows += rows
        if self.demonstration > 0:
            demonstrations = demonstration_rows(self.store, stored, first_group=group, first_sequence=sequence, only=mine)
            if self.ended is not None:
                self.ended(demonstrations)
            result.rows += demonstrations
        result.groups += len(points)
        result.seconds["sampling"] += time.perf_counter() - start
        if resumed:
            self._resume(plan, resumed, result)

    def _tell(self, stream: Callable[[EpisodeSpec], str]) -> Callable[[Episode], None] | None:
        """What tells `ended` of an episode that is over; None where nobody listens."""
        if self.ended is None:
            return None

        def tell(episode: Episode) -> None:
            spec = episode.spec
            self.ended(rows_from_sequence(episode.sequence, domain=spec.domain, stream=stream(spec), group=spec.group,
                                          sequence_number=spec.sequence))

        return tell

    def _resume(self, plan: Plan, points: list[FreshTurnPoint], result: StepSamples) -> None:
        point_of = {point.group: point for point in points}
        start = time.perf_counter()
        result.resumed = self.resumer.play(
            self.engine, points, temperature=self.temperature, top_p=self.top_p, top_k=self.top_k,
            fingerprint=self.fingerprint, source=Source("student", f"{self.student}@{plan.step}"),
            ended=self._tell(lambda spec: point_of[spec.group].stream))
        wall = time.perf_counter() - start
        alive = set()
        for episode in result.resumed:
            spec, point = episode.spec, point_of[episode.spec.group]
            if episode.failure:
                result.failures[spec.domain][episode.failure] += 1
                continue
            alive.add(spec.group)
            result.environment_steps += point.turn + episode.turns
            rows = rows_from_sequence(episode.sequence, domain=spec.domain, stream=point.stream, group=spec.group,
                                      sequence_number=spec.sequence)
            result.sampled_tokens += sum(row.loss_tokens for row in rows)
            result.rows += rows
        result.dropped_groups += len(point_of) - len(alive)
        environments = min(sum(e.environment_seconds for e in result.resumed), wall)
        result.seconds["environments"] += environments
        result.seconds["sampling"] += wall - environments
