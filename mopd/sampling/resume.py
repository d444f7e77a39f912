"""Goes on from stored decision points for several turns, each fresh sequence in a restored environment of its own.

Compares what a restored environment shows with the tokens that the acting model saw, through the same rendering as
rollouts. Of a stored sequence it uses what stands before the point and the action texts that lead there, nothing after it.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from mopd.domains import Domain
from mopd.environments.base import EnvironmentFailure, Observation
from mopd.environments.replay import (
    Recording,
    ReplayedEnvironment,
    Replayer,
    ReplayJob,
    ReplayRefused,
    restore,
)
from mopd.sampling.agent_loop import play_episodes
from mopd.sampling.base import SamplingEngine
from mopd.sampling.episode import HARNESS, Episode, EpisodeSpec
from mopd.sampling.fresh_turn import FreshTurnPoint
from mopd.sampling.harness import Harness, Harnesses, Talk, harnesses_of
from mopd.sampling.rendering import ChatRenderer, first_message
from prefix_store.selection import Selector
from prefix_store.trajectory import (
    SOURCE_KINDS,
    DecisionPoint,
    Fingerprint,
    Sequence,
    Source,
    decision_points_of,
    own_actions,
)

KEPT_CONVERSATIONS = 512
# stored sequences whose texts are remembered between steps: a few kilobytes each


class Conversation:
    """A stored sequence turn by turn: the tokens that its player had seen and written, and with views as messages.

    renderer        with the tokenizer and template that the sequence was stored with
    harness         by which its domain's tasks are played: it shows views to players as it did then
    Safe to use from several threads, one of which renders at a time (`lock`).
    """

    def __init__(self, identity: str, sequence: Sequence, renderer: ChatRenderer, harness: Harness | Harnesses, *,
                 lock: contextlib.AbstractContextManager | None = None):
        self.recording = Recording.of(identity, sequence)
        self.harness_name = str(sequence.metadata.get(HARNESS, ""))
        harnesses = harnesses_of(harness)
        if self.harness_name not in harnesses:
            self.harness_name = harnesses.main  # what it was not played by shows itself in its tokens
        self._harness, self._renderer = harnesses[self.harness_name], renderer
        self._lock = lock or threading.Lock()
        self._prefixes, self._actions = [], []
        for point in decision_points_of(sequence):
            context = sequence.contexts[point.context]
            action = next(s for s in own_actions(context) if s.turn == point.turn)
            self._prefixes.append(context.tokens[:action.start])
            self._actions.append(context.tokens[action.start:action.end])
        self._said = [renderer.action_text(tokens) for tokens in self._actions]
        self._views: dict[int, str] = {}  # turn → the view before it, once it was found to be the stored one
        self._instruction = ""

    def witness(self, turn: int, observation: Observation) -> tuple[str, str] | None:
        """Whether `observation` gives the very tokens that were seen before `turn` (see mopd.environments.replay.Witness).

        Turns are asked for in order. Raises ReplayRefused where the observation is the stored one, but the system prompt or
        the template around it is another.
        """
        text = observation.text if turn else first_message(observation.instruction, observation.text)
        with self._lock:
            known = self._views.get(turn)
            if known is not None:
                if turn == 0:
                    known = first_message(self._instruction, known)
                return None if text == known else (known, text)
            differs = self._compare(turn, observation)
            if differs is None:
                self._views[turn] = observation.text
                if turn == 0:
                    self._instruction = observation.instruction
            return differs

    def tell(self, talk: Talk, views: ListLike[Observation]) -> None:
        """Tell `talk` the conversation up to the last of `views`, the observations before turns 0, 1, … of a replay."""
        talk.resume(views[0].instruction, [view.text for view in views], self._said[: len(views) - 1])

    def _compare(self, turn: int, observation: Observation) -> tuple[str, str] | None:
        talk, text = Talk(self._harness, self._renderer), observation.text
        decode = self._renderer.tokenizer.decode
        stored = self._prefixes[turn]
        if turn == 0:
            rendered, start = talk.start(observation.instruction, text), 0
        else:
            talk.resume(self._instruction, [self._views[earlier] for earlier in range(turn)], self._said[:turn])
            context = np.concatenate([self._prefixes[turn - 1], self._actions[turn - 1]])
            step = talk.hear(text, context)
            whole = step.kind == "fork"
            rendered, start = (step.tokens, 0) if whole else (np.concatenate([context, step.tokens]), len(context))
        if np.array_equal(rendered, stored):
            return None
        expected, found = decode(stored[start:]), decode(rendered[start:])
        if turn == 0 and self._renderer.sanitise(text) in expected:
            raise ReplayRefused(
                f"sequence {self.recording.sequence[:16]} of domain {self.recording.domain!r} begins with the observation "
                f"that its environment shows now, but with other words around it: {expected[:120]!r}, where this run would "
                f"write {found[:120]!r}; set domains.{self.recording.domain}.system_prompt (and what else it was played "
                "with: thinking, harnesses)")
        return expected, found


@dataclasses.dataclass(frozen=True)
class Resumption:
    """How an episode of the agent loop begins at a stored decision point (a Start of mopd.sampling.agent_loop)."""

    prefix: np.ndarray
    turn: int
    turns: int
    conversation: Conversation
    replayer: Replayer

    def open(self) -> ReplayedEnvironment:
        """The environment at the point; it may still be on its way."""
        recording, witness = self.conversation.recording, self.conversation.witness
        return self.replayer.take(ReplayJob(recording.sequence, self.turn, lambda: (recording, witness)))

    def resume(self, environment: ReplayedEnvironment, talk: Talk) -> None:
        """Tell `talk` the conversation up to the point."""
        self.conversation.tell(talk, environment.restored().views)


class Resumer:
    """Plays on from stored decision points.

    domains    name → Domain, with its pool, its harness and the Replayer of its pool
    store      a PrefixStore at a fixed version
    renderer   the student's; a copy of it renders what replays show, beside the main thread
    turns      domain → how many turns are played from a point (2 or more)
    """

    def __init__(self, *, domains: Mapping[str, Domain], store: Any, renderer: ChatRenderer, turns: Mapping[str, int]):
        self.domains, self.store, self.turns = domains, store, dict(turns)
        self.renderer = renderer
        self._copy = copy.deepcopy(renderer)
        self._lock = threading.RLock()
        self._known: collections.OrderedDict[tuple[str, str], Conversation] = collections.OrderedDict()

    def conversation(self, domain: str, sequence: str) -> Conversation:
        """The stored sequence, read once; safe from any thread. Raises KeyError and DamagedData as the store does."""
        with self._lock:
            key = (domain, sequence)
            if key not in self._known:
                self._known[key] = Conversation(sequence, self.store.sequence(sequence), self._copy,
                                                self.domains[domain].harnesses, lock=self._lock)
                if len(self._known) > KEPT_CONVERSATIONS:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def expect(self, points: Iterable[tuple[str, DecisionPoint, int]], *, busy: Mapping[str, int] | None = None) -> None:
        """Begin restoring environments in the background: (domain, point, how many), in the order in which they will be
        asked for. `busy` says by domain how many environments of the pool others need meanwhile."""
        jobs: dict[str, list[ReplayJob]] = {name: [] for name in self.turns}
        for name, point, count in points:
            def load(name=name, point=point):
                conversation = self.conversation(name, point.sequence)
                return conversation.recording, conversation.witness
            jobs[name] += [ReplayJob(point.sequence, point.turn, load)] * count
        for name, wanted in jobs.items():
            domain = self.domains[name]
            domain.replayer.expect(wanted, room=max(0, domain.pool.size - (busy or {}).get(name, 0)))

    def play(self, engine: SamplingEngine, points: ListLike[FreshTurnPoint], *, temperature: float, top_p: float = 1.0,
             top_k: int = 0, fingerprint: Fingerprint | None = None, source: Source | None = None,
             ended: Callable[[Episode], None] | None = None) -> list[Episode]:
        """Every fresh sequence of `points` (which name their decision point, `at`), played by the student; `ended` is told
        each as soon as it is over.

        Returns one Episode per seed, in order. The first action is drawn as `sample_fresh_turns` draws it; a replay that
        fails is a `failure` of its episode and of nothing else.
        """
        self.expect((p.domain, p.at, len(p.seeds)) for p in points)
        specs = []
        for point in points:
            conversation = self.conversation(point.domain, point.at.sequence)
            start = Resumption(point.prefix, point.turn, self.turns[point.domain], conversation,
                               self.domains[point.domain].replayer)
            task = conversation.recording.task
            specs += [EpisodeSpec(point.domain, task, seed, point.group, point.sequence + member, start,
                                  conversation.harness_name)
                      for member, seed in enumerate(point.seeds)]
        return play_episodes(
            engine, {n: d.pool for n, d in self.domains.items()}, specs, self.renderer,
            {n: d.harnesses for n, d in self.domains.items()}, temperature=temperature, top_p=top_p, top_k=top_k,
            fingerprint=fingerprint, source=source, ended=ended)


def check_replays(domain: Domain, store: Any, selector: Selector, renderer: ChatRenderer, stream: str, *,
                  samples: int = 3) -> list[str]:
    """Replay stored sequences that a domain's stream can draw: one of each kind of source, up to `samples` where the first
    diverge.

    Returns a warning for each that diverged or failed where another of its kind did not. Raises ReplayRefused where a kind's
    sequence cannot be replayed in this environment at all, and EnvironmentFailure where none of the tried ones could.
    """
    index, said = selector.index, []
    candidates = selector.candidates(domain.name, stream)
    for number in np.unique(index.source[candidates]):
        rows, kind = candidates[index.source[candidates] == number], SOURCE_KINDS[number]
        last = rows[np.flatnonzero(np.diff(index.sequence[rows], append=-1))]  # the deepest point of each sequence
        tried = dict.fromkeys(int(last[i * (len(last) - 1) // max(1, samples - 1)]) for i in range(samples))
        failures: list[EnvironmentFailure] = []
        for row in tried:
            point = index.point(row)
            stored = Conversation(point.sequence, store.sequence(point.sequence), renderer, domain.harnesses)
            try:
                found = restore(stored.recording, point.turn, domain.pool, witness=stored.witness)
            except ReplayRefused:
                raise
            except EnvironmentFailure as failure:
                failures.append(failure)
            else:
                domain.pool.release(found.environment)
                break
        else:
            raise failures[0]
        said += [f"domains.{domain.name}: a stored sequence of source {kind} does not replay ({failure}); such sequences are "
                 "left out and counted while training" for failure in failures]
    return said
