"""Samples works beside each other without rounds: every sequence takes its next turn as soon as it can.

A finished turn goes to its environment at once, an answer to the engine at once; an environment that is slow or hangs
holds up its own sequence only. New weights may come to the engine at any time: what is under way goes on. What a work
plays depends on the work and on the weights that wrote it, never on what was beside it (works.py, episode.py).
"""

from __future__ import annotations

import collections
import dataclasses
import time
import traceback
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from mopd.environments.base import EnvironmentFailure
from mopd.rows import Row
from mopd.sampling.base import Completion, EngineTrouble, Request, StreamingEngine
from mopd.sampling.callers import Call, Callers
from mopd.sampling.episode import RETRY_PAUSE_S, Playing
from mopd.sampling.fresh_turn import FreshTurnPoint, fresh_action, rows_from_sequence
from mopd.sampling.work import Done, GaveUp, News, Work
from mopd.sampling.works import Works, source_of, without_tokens

SLICE_S = 0.01
# the engine is left alone for so long while environments are at work; then they are heard
GRACE_S = 0.002
# a quick environment's answer is waited for so long, so that its sequence misses no token of the batch
ENVIRONMENT_LIMIT_S = 900.0
ENGINE_PAUSE_S, ENGINE_PAUSE_MAX_S = 0.5, 30.0
# before a turn that the engine did not write is asked for again; doubles with every try
LOOK_S = 0.2
# between two looks for calls that take too long


@dataclasses.dataclass(eq=False)
class _Live:
    """A work under way: an episode (`playing`) or a fresh turn (`point`). It waits for room, for a moment (`at`), for its
    `call`, or for the engine, of which it was refused its turn `tries` times since `failing`."""

    work: Work
    domain: str
    number: int
    began: float
    playing: Playing | None = None
    point: FreshTurnPoint | None = None
    entered: bool = False
    call: Call | None = None
    at: float | None = None
    tries: int = 0
    failing: float = 0.0
    sampling_seconds: float = 0.0


class ContinuousLoop:
    """Plays works on any engine that writes turns while others are asked for.

    engine             a StreamingEngine; nobody else asks it for turns meanwhile
    works              what works are
    retries            how often an episode is played again after its environment failed
    engine_tries, engine_wait   a turn that the engine does not write is asked for at least so often, and for at least so
                       many seconds, before its work is given up
    environment_limit  seconds after which a call of an environment counts as hung (its thread is left behind): for those
                       that know no limits of their own. What a stored point's replay takes is not counted

    Of a domain at most its pool's `size` episodes play at a time; the others wait in the order in which they were given.
    `counts` says how often what was tried again; `busy_seconds` the time in which turns were under way.
    """

    def __init__(self, engine: StreamingEngine, works: Works, *, retries: int = 2, engine_tries: int = 6,
                 engine_wait: float = 0.0, environment_limit: float = ENVIRONMENT_LIMIT_S):
        self.engine, self.works, self.retries = engine, works, retries
        self.engine_tries, self.engine_wait, self.environment_limit = engine_tries, engine_wait, environment_limit
        self.counts: Counter[str] = Counter()
        self.busy_seconds = 0.0
        self._trouble: tuple[float, str] | None = None  # since when the engine has written nothing, and why
        self._lives: dict[Work, _Live] = {}
        self._waiting: dict[str, collections.deque[_Live]] = {name: collections.deque() for name in works.domains}
        self._room = {name: domain.pool.size for name, domain in works.domains.items()}
        self._asked: dict[int, _Live] = {}
        self._paused: list[_Live] = []
        self._callers = Callers("environment")
        self._quick: set[int] = set()  # calls that have just begun
        self._unpaid = 0.0  # engine seconds that no turn has been charged with
        self._looked = 0.0
        self._numbers = 0
        self._news: list[News] = []

    # What a loop is told

    def give(self, works: Iterable[Work]) -> None:
        """Begin these works, in this order as far as there is room. Raises ValueError for one that is under way already, or
        that nobody could play here; those before it have begun."""
        for work in works:
            self.works.check(work)
            if work in self._lives:
                raise ValueError(f"{work.group}, sequence {work.member}, is under way already (attempt {work.attempt})")
            self._numbers += 1
            live = _Live(work, source_of(work.group)[0], self._numbers, time.monotonic())
            self._lives[work] = live
            if self.works.plays(work):
                self._waiting[live.domain].append(live)
            else:
                self._begin_fresh(live)

    def cancel(self, works: Iterable[Work]) -> None:
        """Forget works and throw away what they have; nothing more is heard of them. Unknown ones are passed over."""
        for work in works:
            live = self._lives.get(work)
            if live is not None:
                if not live.entered:
                    self._waiting[live.domain].remove(live)
                self._drop(live)

    @property
    def in_flight(self) -> int:
        """Works that were given and have not ended."""
        return len(self._lives)

    @property
    def engine_trouble(self) -> dict[str, Any]:
        """{"since_s", "words"} where the engine has failed to write turns and has not written any since; empty otherwise."""
        trouble = self._trouble
        return {} if trouble is None else {"since_s": time.monotonic() - trouble[0], "words": trouble[1]}

    def turn(self, timeout: float = 0.0) -> list[News]:
        """Go on until something has ended, at most `timeout` seconds (and at least one token of every row of an engine in
        this process). Returns what has ended since the last call. Raises what the engine raises where it is at fault."""
        deadline = time.monotonic() + timeout
        while True:
            self._hear()
            now = time.monotonic()
            self._wake(now)
            self._enter()
            left = max(0.0, deadline - now)
            if self.engine.under_way:
                self._poll(min(left, SLICE_S) if len(self._callers) or self._paused else left)
            elif not self._news and left > 0:
                for call in self._callers.over(min(left, self._next_moment(now))):
                    self._arrived(call)
            if self._news or time.monotonic() >= deadline:
                break
        found, self._news = self._news, []
        return found

    def close(self, timeout: float = 5.0) -> None:
        """Forget all works, and give environments back as far as their calls end within `timeout` seconds."""
        self.cancel(list(self._lives))
        deadline = time.monotonic() + timeout
        while len(self._callers) and (left := deadline - time.monotonic()) > 0:
            for call in self._callers.over(left):
                self._arrived(call)
        self._callers.close()

    # Environments

    def _enter(self) -> None:
        for domain, waiting in self._waiting.items():
            while waiting and self._room[domain] > 0:
                live = waiting.popleft()
                try:
                    live.playing = self.works.playing(live.work, live.number)
                except (KeyError, ValueError, OSError) as error:
                    self._refused(live, error)
                    continue
                live.entered = True
                self._room[domain] -= 1
                self._open(live)

    def _open(self, live: _Live) -> None:
        """Bring an environment to where the episode begins."""
        playing, pool = live.playing, self.works.domains[live.domain].pool
        if playing.spec.start is None:
            self._call(live, lambda: pool.acquire(playing.spec.task))
            return
        try:
            environment = playing.spec.start.open()
        except Exception as error:  # noqa: BLE001 - whatever an environment raises is its failure, not the model's
            self._failed(live, error)
            return
        playing.begin(environment, None)
        self._ask(live)

    def _call(self, live: _Live, function, *, limited: bool = True) -> None:
        live.call = self._callers.start(live, function, limit=self.environment_limit if limited else None)
        self._quick.add(id(live.call))

    def _hear(self) -> None:
        """Take the answers that are there, and wait a moment for those of quick environments."""
        wait = GRACE_S if self._quick else 0.0
        until = time.monotonic() + wait
        while calls := self._callers.over(wait):
            for call in calls:
                self._arrived(call)
            wait = max(0.0, until - time.monotonic()) if self._quick else 0.0
        self._quick.clear()
        if (now := time.monotonic()) - self._looked > LOOK_S:
            self._looked = now
            for call in self._callers:
                if call.due < now and call.owner is not None and call.owner.call is call:
                    self._hung(call.owner)

    def _arrived(self, call: Call) -> None:
        live: _Live | None = call.owner
        if live is None:  # an environment has gone back to its pool
            if call.error is not None:
                self.counts["environments_not_closed"] += 1
            return
        self._quick.discard(id(call))
        if live.call is not call:  # cancelled, or given up as hung
            if call.then is not None:
                call.then(call)
            return
        live.call, playing = None, live.playing
        playing.episode.environment_seconds += call.seconds
        if call.error is not None:
            self._failed(live, call.error)
            return
        try:
            if playing.environment is None:
                playing.begin(*call.value)
            else:
                playing.answer(call.value)
        except Exception as error:  # noqa: BLE001 - what cannot be shown to the model costs its own sequence only
            self._faulty(live, error)
            return
        if playing.episode.failure:
            self._give_up(live, playing.episode.failure, playing.episode.failure_text)
        elif playing.over:
            self._done(live)
        else:
            self._ask(live)

    def _faulty(self, live: _Live, error: Exception) -> None:
        traceback.print_exception(error)
        self._give_up(live, "sequence_error", f"{type(error).__name__}: {error}")

    def _hung(self, live: _Live) -> None:
        call = self._abandon(live)
        self.works.domains[live.domain].pool.count_failure("environment_timeout")
        live.playing.episode.environment_seconds += time.monotonic() - call.began
        self._failed(live, EnvironmentFailure(
            "environment_timeout", f"an environment of {live.domain!r} did not answer within {self.environment_limit:g} s"))

    def _abandon(self, live: _Live) -> Call:
        """Wait no longer for the call under way; an environment that it brings goes back."""
        call, live.call = live.call, None

        def give_back(over: Call) -> None:
            if over.error is None and isinstance(over.value, tuple):
                self._give_back(live.domain, over.value[0])

        call.then = give_back
        return call

    def _failed(self, live: _Live, error: Exception) -> None:
        """The environment failed: the episode is played again, or the work is given up."""
        playing = live.playing
        self._leave(live, broken=True)
        if playing.fail(error, self.retries):
            self.counts["episodes_again"] += 1
            self._pause(live, playing.pause(RETRY_PAUSE_S))
        else:
            self._give_up(live, playing.episode.failure, playing.episode.failure_text)

    def _leave(self, live: _Live, *, broken: bool = False) -> None:
        """The episode's environment goes back, and the engine forgets its session."""
        playing = live.playing
        self.engine.end_sessions([playing.session])
        environment, playing.environment = playing.environment, None
        if environment is not None:
            environment.broken |= broken
            self._give_back(live.domain, environment)

    def _give_back(self, domain: str, environment) -> None:
        """In a thread: closing an environment may take its time."""
        pool = self.works.domains[domain].pool
        give_back = environment.give_back if hasattr(environment, "give_back") else lambda: pool.release(environment)
        self._callers.start(None, give_back)

    # The engine

    def _begin_fresh(self, live: _Live) -> None:
        live.entered = True
        try:
            live.point = self.works.fresh_turn(live.work)
        except (KeyError, ValueError, OSError) as error:
            self._refused(live, error)
            return
        self._ask(live)

    def _ask(self, live: _Live) -> None:
        """The next turn of an episode, or the one turn of a point."""
        if live.playing is not None:
            request = live.playing.request()
        else:
            request = Request(live.point.prefix, live.point.seeds[0], max_tokens=self.works.turn_tokens(live.domain))
        try:
            self.engine.submit(live.number, request, self.works.options)
        except ValueError as error:
            self._give_up(live, "request_refused", str(error))
            return
        self._asked[live.number] = live

    def _poll(self, seconds: float) -> None:
        started = time.perf_counter()
        found = self.engine.poll(seconds)
        spent = time.perf_counter() - started
        self.busy_seconds += spent
        self._unpaid += spent
        written = sum(len(turn.tokens) for _, turn in found if isinstance(turn, Completion))
        for key, turn in found:
            live = self._asked.pop(key)
            damage = None if isinstance(turn, EngineTrouble) else _damage_of(turn)
            if damage is not None:
                self._not_written(live, damage, wait=0.0)
                continue
            if isinstance(turn, EngineTrouble):
                self._not_written(live, turn, wait=self.engine_wait)
                continue
            live.tries, self._trouble = 0, None
            seconds_of_turn = self._unpaid * len(turn.tokens) / written
            if live.playing is None:
                live.sampling_seconds += seconds_of_turn
                self._done_fresh(live, turn)
                continue
            playing = live.playing
            playing.episode.sampling_seconds += seconds_of_turn
            try:
                action, environment = playing.write(turn), playing.environment
            except Exception as error:  # noqa: BLE001 - as in `_arrived`
                self._faulty(live, error)
                continue
            # The first answer of a restored environment waits for its replay, whose calls have their own limits.
            replays = playing.spec.start is not None and len(playing.actions) == 1
            self._call(live, lambda environment=environment, action=action: environment.step(action), limited=not replays)
        if written:
            self._unpaid = 0.0

    def _not_written(self, live: _Live, trouble: EngineTrouble, *, wait: float) -> None:
        now = time.monotonic()
        live.tries += 1
        live.failing = now if live.tries == 1 else live.failing
        self._trouble = (self._trouble or (now,))[0], f"{trouble.reason}: {trouble.words}"
        if live.tries >= self.engine_tries and now - live.failing >= wait:
            self._give_up(live, trouble.reason, f"{trouble.words} (asked {live.tries} times)")
            return
        self.counts[f"turns_again: {trouble.reason}"] += 1
        self._pause(live, min(ENGINE_PAUSE_S * 2 ** (live.tries - 1), ENGINE_PAUSE_MAX_S))

    # Moments

    def _pause(self, live: _Live, seconds: float) -> None:
        live.at = time.monotonic() + seconds
        self._paused.append(live)

    def _wake(self, now: float) -> None:
        due = [live for live in self._paused if live.at <= now]
        if due:
            self._paused = [live for live in self._paused if live.at > now]
        for live in due:
            live.at = None
            if live.playing is not None and live.playing.environment is None:
                self._open(live)
            else:
                self._ask(live)

    def _next_moment(self, now: float) -> float:
        """Seconds until something is to be done that no answer brings."""
        return max(0.0, min([LOOK_S, *(live.at - now for live in self._paused)]))

    # Ends

    def _drop(self, live: _Live) -> None:
        """Out of all tables; its environment goes back when its call is over."""
        del self._lives[live.work]
        if self._asked.pop(live.number, None) is not None:
            self.engine.abort([live.number])
        if live.at is not None:
            self._paused.remove(live)
        if live.playing is None or not live.entered:
            return
        self._room[live.domain] += 1
        environment = live.playing.environment
        if live.call is not None:
            call = self._abandon(live)
            if environment is not None:  # it is in the middle of a step, which ends first
                live.playing.environment, call.then = None, lambda _: self._give_back(live.domain, environment)
        self._leave(live)

    def _give_up(self, live: _Live, reason: str, words: str) -> None:
        record = {}
        if live.playing is not None:
            record = {"attempts": live.playing.episode.attempts} | live.playing.episode.failure_record
        self._drop(live)
        self._news.append(GaveUp(live.work, reason, words, record))

    def _refused(self, live: _Live, error: Exception) -> None:
        """The store does not give what the work goes on from."""
        self._give_up(live, getattr(error, "category", "") or "stored_prefix", f"{type(error).__name__}: {error}")

    def _done(self, live: _Live) -> None:
        episode, stream = live.playing.episode, source_of(live.work.group)[1]
        rows = rows_from_sequence(episode.sequence, domain=live.domain, stream=stream, group=0, sequence_number=0)
        start = episode.spec.start
        steps = episode.turns + (0 if start is None else start.turn)
        tokens = max(len(context.tokens) for context in episode.sequence.contexts)
        record = {name: getattr(episode, name) for name in ("success", "turns", "malformed", "attempts", "ended",
                                                            "environment_seconds", "sampling_seconds")}
        self._end(live, rows, tokens, record | {"reward": episode.score, "environment_steps": steps})

    def _done_fresh(self, live: _Live, turn: Completion) -> None:
        point = live.point
        row = Row(point.domain, point.stream, point.prefix, (fresh_action(point, 0, turn),), origin=str(point.row))
        self._end(live, [row], len(point.prefix) + len(turn.tokens), {
            "reward": None, "success": None, "turns": 1, "malformed": 0, "attempts": 1, "ended": turn.finish,
            "environment_steps": 0, "environment_seconds": 0.0, "sampling_seconds": live.sampling_seconds})

    def _end(self, live: _Live, rows: list[Row], tokens: int, record: dict) -> None:
        episode = None if live.playing is None else without_tokens(live.playing.episode)
        self._drop(live)
        record |= {"sampled_tokens": sum(row.loss_tokens for row in rows), "seconds": time.monotonic() - live.began}
        self._news.append(Done(live.work, tuple(rows), tokens, record, episode))


def _damage_of(turn: Completion) -> EngineTrouble | None:
    """What no sampling policy gives: a turn without tokens, a log-probability too few or one that is not finite."""
    if len(turn.tokens) == 0 or len(turn.logprob) != len(turn.tokens):
        return EngineTrouble("damaged_turn", f"{len(turn.tokens)} tokens with {len(turn.logprob)} log-probabilities")
    if not np.isfinite(turn.logprob).all():
        return EngineTrouble("damaged_turn", f"a log-probability of {turn.logprob[~np.isfinite(turn.logprob)][0]}")
    return None
