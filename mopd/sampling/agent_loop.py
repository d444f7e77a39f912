"""Plays whole tasks: the engine writes actions, environments answer, until every episode has an outcome.

All live episodes take their next turn as one batch; environments step beside each other in threads. What is sampled
depends on the episodes and their seeds alone, never on which environment answered first.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any, Protocol

import numpy as np

from mopd.environments.base import Observation, Task
from mopd.environments.replay import HASHES, observation_hash
from mopd.sampling.base import Completion, Request, SamplingEngine, SamplingOptions
from mopd.sampling.contexts import ContextBuilder
from mopd.sampling.rendering import ChatRenderer, first_message
from mopd.seeds import stable_seed
from prefix_store.trajectory import Fingerprint, Outcome, Sequence, Source

RETRY_PAUSE_S = 0.2
# first pause before an episode is played again after an infrastructure failure; doubles with every attempt
ENVIRONMENT_THREADS = 8


class Start(Protocol):
    """Where an episode begins that does not begin at its task's start: before turn `turn`, after the tokens `prefix`
    uint32 [T]. At most `turns` actions are played from there."""

    prefix: np.ndarray
    turn: int
    turns: int

    def open(self) -> Any:
        """The environment in that state, or on its way to it: `step`, `broken` and `give_back`."""

    def messages(self, environment: Any) -> list[dict[str, str]]:
        """The conversation up to a user message, with what `open` gave; asked for once that has answered an action."""


@dataclasses.dataclass(frozen=True)
class EpisodeSpec:
    """What to play. `seed` decides every draw; `group` and `sequence` are the numbers within the step. With `start` the
    episode goes on from there: its first action is drawn by `seed` itself, as a fresh turn is."""

    domain: str
    task: Task
    seed: int
    group: int = 0
    sequence: int = 0
    start: Start | None = None


@dataclasses.dataclass(frozen=True)
class Harness:
    """How a domain's tasks are played.

    system_prompt        told once, before the instruction; empty for none
    max_turns            actions per episode
    max_turn_tokens      tokens per action, the end token among them
    max_context_tokens   tokens of a context; an episode that would need more ends
    max_malformed        end an episode after so many actions that the environment did not understand; 0: never
    """

    system_prompt: str = ""
    max_turns: int = 32
    max_turn_tokens: int = 32
    max_context_tokens: int = 1024
    max_malformed: int = 0


@dataclasses.dataclass
class Episode:
    """How an episode went.

    sequence             token by token; None after an infrastructure failure
    failure              category of the infrastructure failure that ended it, or ""; `failure_text` says more, and
                         `failure_record` in plain values where the failure has some (a replay that diverged)
    score, success       the environment's last word
    turns, malformed     actions played, and how many of them were not understood
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
    attempts: int = 1
    ended: str = ""
    environment_seconds: float = 0.0
    sampling_seconds: float = 0.0


@dataclasses.dataclass
class _Playing:
    """An episode under way."""

    number: int
    episode: Episode
    environment: Any = None
    builder: ContextBuilder | None = None
    messages: list[dict[str, str]] = dataclasses.field(default_factory=list)
    actions: list[str] = dataclasses.field(default_factory=list)
    finishes: list[str] = dataclasses.field(default_factory=list)
    seen: list[str] = dataclasses.field(default_factory=list)
    observation: Observation | None = None

    @property
    def session(self) -> str:
        return f"episode-{self.number}-{self.episode.attempts}"


def play_episodes(
    engine: SamplingEngine,
    pools: Mapping[str, Any],
    episodes: ListLike[EpisodeSpec],
    renderer: ChatRenderer,
    harnesses: Mapping[str, Harness],
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    fingerprint: Fingerprint | None = None,
    source: Source | None = None,
    max_live: int | None = None,
    retries: int = 2,
    progress: Callable[[int], None] | None = None,
    ended: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Play all `episodes`; returns their results in the same order.

    pools        domain → EnvironmentPool (`acquire`, `release`, `family`)
    harnesses    domain → Harness
    fingerprint  of tokenizer, template and model, for the stored sequences; by default the renderer's, without a model
    source       who plays; by default a nameless student
    max_live     episodes that play at once; by default the engine's batch, and of a domain at most its pool's `size`
    retries      how often an episode is played again, from its start, after an environment failed under it
    progress     called with the number of episodes that are over, after every turn in which some ended
    ended        called with every episode that has its sequence, as soon as it has it

    A limit that is reached, or an action that is not understood, is an outcome like any other. An environment's failure
    gives no reward: after the retries the episode has a `failure` and no sequence; so has one whose first prompt alone
    fills the context (`prompt_too_long`). Every episode without a `failure` has a sequence; that of an episode with a
    `start` holds only what was played from there, behind a prompt, and is no trajectory for a store. Raises ValueError before
    anything is played where a domain has no pool or harness, or a context limit exceeds the engine's positions.
    """
    loop = _Loop(engine, pools, renderer, harnesses, fingerprint, source, retries, ended)
    loop.check(episodes)
    options = SamplingOptions(
        temperature, top_p, top_k, max((h.max_turn_tokens for h in harnesses.values()), default=1), renderer.stop_ids
    )
    results = [Episode(spec) for spec in episodes]
    waiting = [_Playing(number, episode) for number, episode in enumerate(results)][::-1]
    live: list[_Playing] = []
    limit = max_live or getattr(engine, "max_batch", 64)
    over = 0
    try:
        while waiting or live:
            entering = loop.room_for(waiting, live, limit)
            # In the order of the list, whoever entered when.
            live = sorted(live + entering, key=lambda p: p.number)
            loop.enter(entering)
            loop.turn([p for p in live if p.environment is not None], options)
            again = [p for p in live if p.environment is None and not p.episode.ended and not p.episode.failure]
            waiting += again[::-1]
            still = [p for p in live if p.environment is not None]
            ended = len(live) - len(still) - len(again)
            live = still
            if ended:
                over += ended
                if progress is not None:
                    progress(over)
    finally:
        loop.close(live)
    return results


class _Loop:
    """What a run of the loop shares: engine, pools, threads."""

    def __init__(self, engine, pools, renderer, harnesses, fingerprint, source, retries, ended=None):
        self.engine, self.pools, self.renderer, self.harnesses = engine, pools, renderer, harnesses
        self.fingerprint = fingerprint or renderer.fingerprint()
        self.source = source or Source("student", "")
        self.retries, self.ended = retries, ended
        self.threads = concurrent.futures.ThreadPoolExecutor(ENVIRONMENT_THREADS, thread_name_prefix="environments")

    def check(self, episodes: ListLike[EpisodeSpec]) -> None:
        for name in dict.fromkeys(spec.domain for spec in episodes):
            for what, known in (("environment pool", self.pools), ("harness", self.harnesses)):
                if name not in known:
                    there = ", ".join(sorted(known)) or "no domain"
                    raise ValueError(f"domain {name!r} has no {what}; there is one for {there}")
            harness, positions = self.harnesses[name], getattr(self.engine, "max_positions", None)
            if positions is not None and harness.max_context_tokens > positions:
                raise ValueError(
                    f"domain {name!r}: max_context_tokens {harness.max_context_tokens} exceeds the model's {positions} "
                    "positions"
                )
            for key in ("max_turns", "max_turn_tokens", "max_context_tokens"):
                if getattr(harness, key) < 1:
                    raise ValueError(f"domain {name!r}: {key} is {getattr(harness, key)}; it must be at least 1")

    def room_for(self, waiting: list[_Playing], live: list[_Playing], limit: int) -> list[_Playing]:
        """Take from the end of `waiting` what may enter: `limit` episodes live at once, and of a domain no more than its
        pool keeps environments for."""
        counts = Counter(p.episode.spec.domain for p in live)
        entering: list[_Playing] = []
        for number in range(len(waiting) - 1, -1, -1):
            if len(live) + len(entering) >= limit:
                break
            domain = waiting[number].episode.spec.domain
            if counts[domain] < getattr(self.pools[domain], "size", limit):
                counts[domain] += 1
                entering.append(waiting.pop(number))
        return entering

    def enter(self, entering: list[_Playing]) -> None:
        """Bring environments to the start of their tasks and render the first prompts."""

        def acquire(playing: _Playing):
            if playing.episode.attempts > 1:
                time.sleep(RETRY_PAUSE_S * 2 ** (playing.episode.attempts - 2))
            if playing.episode.spec.start is not None:
                return playing.episode.spec.start.open(), None
            return self.pools[playing.episode.spec.domain].acquire(playing.episode.spec.task)

        for playing, answer in self._beside(entering, acquire):
            if answer is None:
                continue
            playing.environment, playing.observation = answer
            playing.messages, playing.actions, playing.finishes, playing.seen = [], [], [], []
            if (start := playing.episode.spec.start) is not None:
                playing.builder = ContextBuilder(start.prefix, turn=start.turn)
                continue
            system = self.harnesses[playing.episode.spec.domain].system_prompt
            view = playing.observation
            playing.messages = [{"role": "system", "content": system}] if system else []
            playing.messages.append({"role": "user", "content": first_message(view.instruction, view.text)})
            playing.builder = ContextBuilder(self.renderer.start(playing.messages))
            playing.seen = [observation_hash(view, first=True)]
            harness = self.harnesses[playing.episode.spec.domain]
            if len(playing.builder.tokens) >= harness.max_context_tokens:
                # No model could act here: neither an outcome nor worth another try.
                task = playing.episode.spec.task
                playing.episode.failure = "prompt_too_long"
                playing.episode.failure_text = (
                    f"task {task.name} {task.split} {task.seed} of {playing.episode.spec.domain!r} starts with "
                    f"{len(playing.builder.tokens)} tokens; max_context_tokens is {harness.max_context_tokens}"
                )
                self._release(playing)

    def turn(self, live: list[_Playing], options: SamplingOptions) -> None:
        """One action for every live episode, and the environments' answers."""
        if not live:
            return
        requests = []
        for playing in live:
            spec, harness = playing.episode.spec, self.harnesses[playing.episode.spec.domain]
            room = harness.max_context_tokens - len(playing.builder.tokens)
            seed = stable_seed(spec.seed, "turn", playing.builder.turns)
            if spec.start is not None and not playing.actions:
                # The very turn that would be written here without an environment.
                seed, room = spec.seed, harness.max_turn_tokens
            requests.append(
                Request(playing.builder.tokens, seed, playing.session, max_tokens=min(harness.max_turn_tokens, room))
            )
        started = time.perf_counter()
        completions = self.engine.generate(requests, options)
        seconds = time.perf_counter() - started
        total = sum(len(c.tokens) for c in completions)
        for playing, completion in zip(live, completions, strict=True):
            playing.episode.sampling_seconds += seconds * len(completion.tokens) / total
            self._write(playing, completion)
        for playing, observation in self._beside(live, lambda p: p.environment.step(p.actions[-1])):
            if observation is not None:
                self._answer(playing, observation)

    def _write(self, playing: _Playing, completion: Completion) -> None:
        playing.builder.act(completion.tokens, completion.logprob, completion.version, self.source.kind,
                            completion.candidates)
        text = self.renderer.action_text(completion.tokens)
        playing.messages.append({"role": "assistant", "content": text})
        playing.actions.append(text.strip())
        playing.finishes.append(completion.finish)
        playing.episode.turns += 1

    def _answer(self, playing: _Playing, observation: Observation) -> None:
        start = playing.episode.spec.start
        if start is not None and len(playing.actions) == 1:
            playing.messages = [*start.messages(playing.environment), *playing.messages]
        playing.observation = observation
        playing.seen.append(observation_hash(observation))
        playing.episode.malformed += observation.malformed
        if observation.done:
            self._finish(playing, "done")
            return
        playing.messages.append({"role": "user", "content": observation.text})
        playing.builder.observe(self.renderer.extend(playing.messages, playing.builder.tokens))
        self._apply_limits(playing)

    def _apply_limits(self, playing: _Playing) -> None:
        harness, episode = self.harnesses[playing.episode.spec.domain], playing.episode
        start = episode.spec.start
        if playing.builder.turns >= harness.max_turns:
            self._finish(playing, "turn_limit")
        elif len(playing.builder.tokens) >= harness.max_context_tokens:
            self._finish(playing, "context_limit")
        elif 0 < harness.max_malformed <= episode.malformed:
            self._finish(playing, "malformed_limit")
        elif start is not None and episode.turns >= start.turns:
            self._finish(playing, "resume_limit")

    def _finish(self, playing: _Playing, ended: str) -> None:
        """Write the outcome and give the environment back."""
        episode, spec, view = playing.episode, playing.episode.spec, playing.observation
        pool = self.pools[spec.domain]
        episode.ended, episode.score, episode.success = ended, float(view.score), bool(view.success)
        category = "" if episode.success else "task_failed" if ended == "done" else ended
        outcome = Outcome(
            reward=episode.score, true_reward=episode.score, success=episode.success, error_category=category,
            metadata={"ended": ended, "malformed": episode.malformed},
        )
        episode.sequence = Sequence(
            domain=spec.domain, task=spec.task.name, environment=pool.family.name,
            environment_version=str(pool.family.version), seed=int(spec.task.seed), split=spec.task.split,
            contexts=playing.builder.build(), actions=tuple(playing.actions), outcome=outcome, source=self.source,
            fingerprint=self.fingerprint,
            metadata={"episode_seed": int(spec.seed), "cut_actions": playing.finishes.count("length")}
            | ({HASHES: playing.seen} if spec.start is None else {"begins_at_turn": spec.start.turn}),
        )
        self._release(playing)
        if self.ended is not None:
            self.ended(episode)

    def _release(self, playing: _Playing) -> None:
        self.engine.end_sessions([playing.session])
        environment, playing.environment = playing.environment, None
        playing.builder = None
        if environment is not None and playing.episode.spec.start is not None:
            environment.give_back()
        elif environment is not None:
            self.pools[playing.episode.spec.domain].release(environment)

    def _fail(self, playing: _Playing, error: Exception) -> None:
        """An environment failed: play the episode again, or give it up with the failure's category."""
        if playing.environment is not None:
            # Whatever it raised, its state is not to be trusted.
            playing.environment.broken = True
        self._release(playing)
        episode = playing.episode
        if episode.attempts > self.retries or getattr(error, "final", False):
            episode.failure_record = getattr(error, "record", {})
            episode.failure = getattr(error, "category", "") or "environment_exception"
            episode.failure_text = f"{type(error).__name__}: {error}"
            return
        episode.attempts += 1
        episode.turns = episode.malformed = 0

    def _beside(self, playing: list[_Playing], call: Callable[[_Playing], Any]) -> list[tuple[_Playing, Any]]:
        """Run `call` for each in threads; answers in the order of the list, None where the environment failed.

        The wall-clock time goes to the episodes by what each took itself.
        """

        def timed(one: _Playing):
            started = time.perf_counter()
            try:
                return call(one), None, time.perf_counter() - started
            except Exception as error:  # noqa: BLE001 - whatever an environment raises is its failure, not the model's
                return None, error, time.perf_counter() - started

        started = time.perf_counter()
        answers = list(self.threads.map(timed, playing))
        seconds = time.perf_counter() - started
        total = sum(own for _, _, own in answers) or 1.0
        for one, (_, _, own) in zip(playing, answers, strict=True):
            one.episode.environment_seconds += seconds * own / total
        for one, (_, error, _) in zip(playing, answers, strict=True):
            if error is not None:
                self._fail(one, error)
        return [(one, answer) for one, (answer, _, _) in zip(playing, answers, strict=True)]

    def close(self, live: list[_Playing]) -> None:
        """Give back what is still out (an exception ended the run)."""
        for playing in live:
            self._release(playing)
        self.threads.shutdown(wait=True)
