"""What happens to one episode: a state machine without engine, environment or clock of its own.

begin → request → write → answer → request → … until `answer` says that it is over. Whoever drives it samples the requests,
plays the actions in an environment and lets any number of episodes go beside each other (agent_loop.py, continuous.py).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import numpy as np

from mopd.environments.base import EnvironmentFamily, Observation, Task
from mopd.environments.replay import HASHES, observation_hash
from mopd.sampling.base import Completion, Request
from mopd.sampling.contexts import ContextBuilder
from mopd.sampling.harness import Harness, Harnesses, Talk, harnesses_of
from mopd.sampling.rendering import ChatRenderer
from mopd.seeds import stable_seed
from prefix_store.trajectory import Fingerprint, Outcome, Sequence, Source

HARNESS = "harness"
# key of a sequence's metadata: the name of the harness that it was played by, where its domain has several
RETRY_PAUSE_S = 0.2
# first pause before an episode is played again after an infrastructure failure; doubles with every attempt


class Start(Protocol):
    """Where an episode begins that does not begin at its task's start: before turn `turn`, after the tokens `prefix`
    uint32 [T]. At most `turns` actions are played from there."""

    prefix: np.ndarray
    turn: int
    turns: int

    def open(self) -> Any:
        """The environment in that state, or on its way to it: `step`, `broken` and `give_back`."""

    def resume(self, environment: Any, talk: Talk) -> None:
        """Tell `talk` the conversation up to the view before `turn` (Talk.resume), with what `open` gave; asked for once that
        has answered an action."""


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """What to play. `seed` decides every draw; `group` and `sequence` are the numbers within the step. With `start` the
    episode goes on from there: its first action is drawn by `seed` itself, as a fresh turn is. `harness` names one of the
    domain's (see `harness_for`)."""

    domain: str
    task: Task
    seed: int
    group: int = 0
    sequence: int = 0
    start: Start | None = None
    harness: str | None = None


def harness_for(given: Harness | Harnesses, spec: EpisodeSpec) -> tuple[str, Harness]:
    """By which of its domain's harnesses an episode is played, and its name: the one that `spec` names, else the one that its
    seed picks. Raises ValueError for a name that is not there."""
    harnesses = harnesses_of(given)
    name = harnesses.pick(spec.seed) if spec.harness is None else spec.harness
    if name not in harnesses:
        raise ValueError(f"domain {spec.domain!r} has no harness {name!r}; there is {', '.join(map(repr, harnesses))}")
    return name, harnesses[name]


@dataclasses.dataclass
class Episode:
    """How an episode went.

    sequence             token by token; None after an infrastructure failure
    failure              category of the infrastructure failure that ended it, or ""; `failure_text` says more, and
                         `failure_record` in plain values where the failure has some (a replay that diverged)
    score, success       the environment's last word
    turns, malformed     actions played, and how many of them were not understood (turns without an action among them)
    harness              the name of the harness that it was played by; "" where its domain has one only
    attempts             1, and one more for every time it was played again
    ended                "done", or the limit that ended it: turn_limit, context_limit, malformed_limit, resume_limit
    environment_seconds  its share of the wall-clock time spent on environments (resets, steps)
    sampling_seconds     its share of the wall-clock time spent in the engine
    """

    spec: EpisodeSpec
    sequence: Sequence | None = None
    failure: str = ""
    failure_text: str = ""
    failure_record: dict[str, Any] = dataclasses.field(default_factory=dict)
    score: float = 0.0
    success: bool = False
    turns: int = 0
    malformed: int = 0
    harness: str = ""
    attempts: int = 1
    ended: str = ""
    environment_seconds: float = 0.0
    sampling_seconds: float = 0.0


class Playing:
    """An episode under way.

    spec            what is played
    harness         how: the domain's, of which `harness_for` takes one
    renderer        turns messages into tokens
    family          of the environments that it is played in (their name and version are stored)
    source, fingerprint   who plays, and with which tokenizer, template and model
    number          tells episodes of one engine apart

    `episode` is its record, `environment` what it is played in now: whoever drives it puts it there (`begin`) and takes it
    back when `over` or `fail`ed. `builder` has the tokens so far.
    """

    def __init__(self, spec: EpisodeSpec, harness: Harness | Harnesses, renderer: ChatRenderer, *,
                 family: EnvironmentFamily, source: Source, fingerprint: Fingerprint, number: int = 0):
        self.spec, self.family = spec, family
        self.source, self.fingerprint, self.number = source, fingerprint, number
        name, self.harness = harness_for(harness, spec)
        self.talk = Talk(self.harness, renderer)
        self.episode = Episode(spec, harness=name)
        self.environment: Any = None
        self.builder: ContextBuilder | None = None
        self.actions: list[str] = []
        self.finishes: list[str] = []
        self.seen: list[str] = []
        self.observation: Observation | None = None
        self._no_action = False

    @property
    def session(self) -> str:
        """Names its growing sequence to the engine; another try is another one."""
        return f"episode-{self.number}-{self.episode.attempts}"

    @property
    def over(self) -> bool:
        """Whether it has an outcome, or was given up."""
        return bool(self.episode.ended or self.episode.failure)

    def begin(self, environment: Any, view: Observation | None) -> None:
        """Take the environment and what it shows first: `view`, or None with a `spec.start`, whose environment may still be
        on its way. An episode whose first prompt alone fills the context is over (`prompt_too_long`): no model could act
        there, so it is neither an outcome nor worth another try."""
        self.environment, self.observation = environment, view
        self.actions, self.finishes, self.seen, self._no_action = [], [], [], False
        self.talk.views, self.talk.said = [], []
        if (start := self.spec.start) is not None:
            self.builder = ContextBuilder(start.prefix, turn=start.turn)
            return
        harness = self.harness
        self.builder = ContextBuilder(self.talk.start(view.instruction, view.text))
        self.seen = [observation_hash(view, first=True)]
        if len(self.builder.tokens) >= harness.max_context_tokens:
            task = self.spec.task
            self.episode.failure = "prompt_too_long"
            self.episode.failure_text = (
                f"task {task.name} {task.split} {task.seed} of {self.spec.domain!r} starts with "
                f"{len(self.builder.tokens)} tokens; max_context_tokens is {harness.max_context_tokens}")

    def request(self) -> Request:
        """What the engine is to write next: at most a turn's tokens, and no more than the context has room for."""
        harness = self.harness
        room = harness.max_context_tokens - len(self.builder.tokens)
        seed = stable_seed(self.spec.seed, "turn", self.builder.turns)
        if self.spec.start is not None and not self.actions:
            # The very turn that would be written here without an environment.
            seed, room = self.spec.seed, harness.max_turn_tokens
        return Request(self.builder.tokens, seed, self.session, max_tokens=min(harness.max_turn_tokens, room))

    def write(self, completion: Completion) -> str:
        """Take what the engine wrote; returns the action for the environment: "" where the turn has none."""
        self.builder.act(completion.tokens, completion.logprob, completion.version, self.source.kind,
                         completion.candidates, completion.experts)
        action = self.harness.action(self.talk.say(completion.tokens))
        self._no_action = action is None
        self.actions.append(action or "")
        self.finishes.append(completion.finish)
        self.episode.turns += 1
        return self.actions[-1]

    def answer(self, observation: Observation) -> bool:
        """Take the environment's answer to the last action; returns whether the episode is over, with its outcome then."""
        if self.spec.start is not None and len(self.actions) == 1:
            said = self.talk.said
            self.spec.start.resume(self.environment, self.talk)
            self.talk.said += said
        self.observation = observation
        self.seen.append(observation_hash(observation))
        self.episode.malformed += observation.malformed or self._no_action
        ended = "done"
        if not observation.done:
            self.builder.observe(self.talk.hear(observation.text, self.builder.tokens))
            ended = self._limit()
        if ended:
            self._finish(ended)
        return self.over

    def fail(self, error: Exception, retries: int) -> bool:
        """Its environment (or engine) failed: returns whether it is to be played again, from its start, after `pause`.
        Otherwise it is given up with the failure's category. `retries` is how often it may be played again."""
        self.builder, episode = None, self.episode
        if episode.attempts > retries or getattr(error, "final", False):
            episode.failure_record = getattr(error, "record", {})
            episode.failure = getattr(error, "category", "") or "environment_exception"
            episode.failure_text = f"{type(error).__name__}: {error}"
            return False
        episode.attempts += 1
        episode.turns = episode.malformed = 0
        return True

    def pause(self, first: float = RETRY_PAUSE_S) -> float:
        """Seconds to wait before this attempt: none before the first, then `first`, doubling."""
        return first * 2 ** (self.episode.attempts - 2) if self.episode.attempts > 1 else 0.0

    def _limit(self) -> str:
        harness, start = self.harness, self.spec.start
        if self.builder.turns >= harness.max_turns:
            return "turn_limit"
        if len(self.builder.tokens) >= harness.max_context_tokens:
            return "context_limit"
        if 0 < harness.max_malformed <= self.episode.malformed:
            return "malformed_limit"
        return "resume_limit" if start is not None and self.episode.turns >= start.turns else ""

    def _finish(self, ended: str) -> None:
        """Write down the outcome and the whole sequence."""
        episode, spec, view = self.episode, self.spec, self.observation
        episode.ended, episode.score, episode.success = ended, float(view.score), bool(view.success)
        category = "" if episode.success else "task_failed" if ended == "done" else ended
        outcome = Outcome(
            reward=episode.score, true_reward=episode.score, success=episode.success, error_category=category,
            metadata={"ended": ended, "malformed": episode.malformed},
        )
        episode.sequence = Sequence(
            domain=spec.domain, task=spec.task.name, environment=self.family.name,
            environment_version=str(self.family.version), seed=int(spec.task.seed), split=spec.task.split,
            contexts=self.builder.build(), actions=tuple(self.actions), outcome=outcome, source=self.source,
            fingerprint=self.fingerprint,
            metadata={"episode_seed": int(spec.seed), "cut_actions": self.finishes.count("length")}
            | ({HARNESS: self.episode.harness} if self.episode.harness else {})
            | ({HASHES: self.seen} if spec.start is None else {"begins_at_turn": spec.start.turn}),
        )
