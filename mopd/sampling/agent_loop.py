"""Plays whole tasks: the engine writes actions, environments answer, until every episode has an outcome.

All live episodes take their next turn as one batch; environments step beside each other in threads. What is sampled
depends on the episodes and their seeds alone, never on which environment answered first. What happens to one episode
stands in episode.py.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any

from mopd.sampling.base import SamplingEngine, SamplingOptions
from mopd.sampling.episode import RETRY_PAUSE_S, Episode, EpisodeSpec, Playing, Start
from mopd.sampling.harness import Harness, Harnesses, harnesses_of
from mopd.sampling.rendering import ChatRenderer
from prefix_store.trajectory import Fingerprint, Source

__all__ = ["Episode", "EpisodeSpec", "Harness", "Harnesses", "Start", "check_episodes", "play_episodes"]

ENVIRONMENT_THREADS = 8


def play_episodes(
    engine: SamplingEngine,
    pools: Mapping[str, Any],
    episodes: ListLike[EpisodeSpec],
    renderer: ChatRenderer,
    harnesses: Mapping[str, Harness | Harnesses],
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
    harnesses    domain → Harness, or several of which each episode is played by one (`harness_for`)
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
    check_episodes(engine, pools, episodes, harnesses)
    fingerprint, source = fingerprint or renderer.fingerprint(), source or Source("student", "")
    loop = _Loop(engine, pools, retries, ended)
    options = SamplingOptions(
        temperature, top_p, top_k,
        max((h.max_turn_tokens for given in harnesses.values() for h in harnesses_of(given).values()), default=1),
        renderer.stop_ids, renderer.stop_strings,
    )
    playing = [Playing(spec, harnesses[spec.domain], renderer, family=pools[spec.domain].family, source=source,
                       fingerprint=fingerprint, number=number) for number, spec in enumerate(episodes)]
    waiting = playing[::-1]
    live: list[Playing] = []
    limit = max_live or getattr(engine, "max_batch", 64)
    over = 0
    try:
        while waiting or live:
            entering = loop.room_for(waiting, live, limit)
            # In the order of the list, whoever entered when.
            live = sorted(live + entering, key=lambda p: p.number)
            loop.enter(entering)
            loop.turn([p for p in live if p.environment is not None], options)
            again = [p for p in live if p.environment is None and not p.over]
            waiting += again[::-1]
            still = [p for p in live if p.environment is not None]
            gone = len(live) - len(still) - len(again)
            live = still
            if gone:
                over += gone
                if progress is not None:
                    progress(over)
    finally:
        loop.close(live)
    return [p.episode for p in playing]


def check_episodes(engine: SamplingEngine, pools: Mapping[str, Any], episodes: ListLike[EpisodeSpec],
                   harnesses: Mapping[str, Harness | Harnesses]) -> None:
    """Raise ValueError where a domain of `episodes` has no pool or harness, or a harness's values that cannot be."""
    for name in dict.fromkeys(spec.domain for spec in episodes):
        for what, known in (("environment pool", pools), ("harness", harnesses)):
            if name not in known:
                there = ", ".join(sorted(known)) or "no domain"
                raise ValueError(f"domain {name!r} has no {what}; there is one for {there}")
        positions = getattr(engine, "max_positions", None)
        for harness in harnesses_of(harnesses[name]).values():
            if positions is not None and harness.max_context_tokens > positions:
                raise ValueError(
                    f"domain {name!r}: max_context_tokens {harness.max_context_tokens} exceeds the model's {positions} "
                    "positions"
                )
            if wrong := harness.errors():
                raise ValueError(f"domain {name!r}: {'; '.join(wrong)}")


class _Loop:
    """What a run of the loop shares: engine, pools, threads."""

    def __init__(self, engine, pools, retries, ended=None):
        self.engine, self.pools, self.retries, self.ended = engine, pools, retries, ended
        self.threads = concurrent.futures.ThreadPoolExecutor(ENVIRONMENT_THREADS, thread_name_prefix="environments")

    def room_for(self, waiting: list[Playing], live: list[Playing], limit: int) -> list[Playing]:
        """Take from the end of `waiting` what may enter: `limit` episodes live at once, and of a domain no more than its
        pool keeps environments for."""
        counts = Counter(p.spec.domain for p in live)
        entering: list[Playing] = []
        for number in range(len(waiting) - 1, -1, -1):
            if len(live) + len(entering) >= limit:
                break
            domain = waiting[number].spec.domain
            if counts[domain] < getattr(self.pools[domain], "size", limit):
                counts[domain] += 1
                entering.append(waiting.pop(number))
        return entering

    def enter(self, entering: list[Playing]) -> None:
        """Bring environments to the start of their tasks and render the first prompts."""

        def acquire(playing: Playing):
            if pause := playing.pause(RETRY_PAUSE_S):
                time.sleep(pause)
            if playing.spec.start is not None:
                return playing.spec.start.open(), None
            return self.pools[playing.spec.domain].acquire(playing.spec.task)

        for playing, answer in self._beside(entering, acquire):
            if answer is None:
                continue
            playing.begin(*answer)
            if playing.over:
                self._release(playing)

    def turn(self, live: list[Playing], options: SamplingOptions) -> None:
        """One action for every live episode, and the environments' answers."""
        if not live:
            return
        requests = [playing.request() for playing in live]
        started = time.perf_counter()
        completions = self.engine.generate(requests, options)
        seconds = time.perf_counter() - started
        total = sum(len(c.tokens) for c in completions)
        for playing, completion in zip(live, completions, strict=True):
            playing.episode.sampling_seconds += seconds * len(completion.tokens) / total
            playing.write(completion)
        for playing, observation in self._beside(live, lambda p: p.environment.step(p.actions[-1])):
            if observation is not None and playing.answer(observation):
                self._release(playing)
                if self.ended is not None:
                    self.ended(playing.episode)

    def _release(self, playing: Playing) -> None:
        self.engine.end_sessions([playing.session])
        environment, playing.environment, playing.builder = playing.environment, None, None
        if environment is not None and playing.spec.start is not None:
            environment.give_back()
        elif environment is not None:
            self.pools[playing.spec.domain].release(environment)

    def _fail(self, playing: Playing, error: Exception) -> None:
        """An environment failed: play the episode again, or give it up with the failure's category."""
        if playing.environment is not None:
            # Whatever it raised, its state is not to be trusted.
            playing.environment.broken = True
        self._release(playing)
        playing.fail(error, self.retries)

    def _beside(self, playing: list[Playing], call: Callable[[Playing], Any]) -> list[tuple[Playing, Any]]:
        """Run `call` for each in threads; answers in the order of the list, None where the environment failed.

        The wall-clock time goes to the episodes by what each took itself.
        """

        def timed(one: Playing):
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

    def close(self, live: list[Playing]) -> None:
        """Give back what is still out (an exception ended the run)."""
        for playing in live:
            self._release(playing)
        self.threads.shutdown(wait=True)
