"""The student behind any number of vLLM servers: token ids in and out, sessions stay where their prefix is cached.

All network work runs on one event loop in a thread of its own. A turn goes to its session's server while that one is live, a
new session to the server with the least under way; a server that goes down is routed around, and one that comes back gets
the newest weights before it is asked for anything.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import math
import os
import queue
import sys
import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from mopd.sampling import vllm_wire as wire
from mopd.sampling.balance import ANSWERS, Balance, Endpoint
from mopd.sampling.base import Completion, EngineTrouble, EngineUnreachable
from mopd.sampling.servers import Servers, Unavailable, Unfit, key_headers
from mopd.sampling.vllm_engine import TurnEngine
from mopd.sampling.vllm_turns import MODE, MODE_FLAG, Piece, Turn, Writing
from mopd.sampling.vllm_weights import ServerWeights
from mopd.sampling.weight_folder import WeightsDiffer

CHECK_SECONDS = 30.0  # of one question to a server that is being greeted
SAY_AFTER_S = 5.0  # servers of which none answers are waited for without a word for so long
PROBE = np.array([2, 3], np.uint32)  # any model has these ids


class WrongServer(ValueError):
    """A server answers, but cannot serve this student; the message has its address, what is wrong and the remedy."""


class VLLMFleet(TurnEngine):
    """A StreamingEngine over vLLM servers that serve one student (`mopd serve` starts such a server).

    urls          addresses without a path
    vocabulary    rows of the student's output
    served_model  the name under which they serve it; none: the only one that they serve
    api_key_env   name of the environment variable that holds the key
    timeout_s     of one request, that is of one turn
    retries       of one turn, each at the server that is least busy then, before it ends with EngineTrouble
    max_batch     turns that are worth having under way at once, over all servers
    patience_s    how long `generate`, `connect` and `load_folder` wait for a server that answers
    version       weights version that servers hold which were given none

    `faults` counts what went wrong, by reason, whether a later try mended it or not.
    """

    def __init__(self, urls: Sequence[str], *, vocabulary: int, served_model: str = "", api_key_env: str = "",
                 timeout_s: float = 600.0, retries: int = 4, max_batch: int = 64, patience_s: float = 600.0,
                 version: int = 0):
        super().__init__(max_batch=max_batch, version=version, patience_s=patience_s)
        self.vocabulary, self.served_model, self.api_key_env = vocabulary, served_model, api_key_env
        self.retries = retries
        self.max_positions: int | None = None
        self.max_logprobs = 0
        self.served = ""
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        if api_key_env and not key:
            raise WrongServer(f"sampling.api_key_env: the environment variable {api_key_env} is not set; export it, or leave "
                              "the key out")
        headers = key_headers(key)
        self._balance = Balance(urls)
        self._servers = Servers(self._balance, headers=headers, key_setting="sampling.api_key_env", key_variable=api_key_env,
                                timeout_s=timeout_s, connections=None, look=self._look)
        self.faults = self.stats["faults"] = self._servers.faults
        self._home: dict[str, str] = {}  # session → url
        self._first_version, self._folder = version, None
        self._weights = ServerWeights([e.url for e in self._balance.endpoints], headers=headers)
        self._heard: queue.SimpleQueue[tuple[Hashable, Writing, Any]] = queue.SimpleQueue()
        self._futures: dict[Hashable, concurrent.futures.Future] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-fleet", daemon=True)
        self._thread.start()
        self._closed = False
        self._run(self._open())

    # What the rest of the program calls.

    def connect(self) -> VLLMFleet:
        """Greet all servers and return when one answers. Raises WrongServer where one cannot serve this student,
        EngineUnreachable where none answers for `patience_s`."""
        unreachable = None
        try:
            self._run(self._until_live(force=True))
        except EngineUnreachable as error:
            unreachable = error
        if wrong := [e for e in self._balance.endpoints if e.unfit]:
            raise WrongServer("; ".join(f"{e.url}: {e.said}" for e in wrong))
        if unreachable is not None:
            raise unreachable
        return self

    def servers(self) -> dict[str, str]:
        """url → "answers" where all is well, else what it met last."""
        return {e.url: ANSWERS if e.live else e.said for e in self._balance.endpoints}

    @property
    def requests_by_server(self) -> dict[str, int]:
        """url → requests that it has answered."""
        return {e.url: e.served for e in self._balance.endpoints}

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Their next turns may go anywhere; the servers drop what they have cached when they need the room."""
        for session in sessions:
            self._home.pop(session, None)

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """See TurnEngine; by the live server that is least busy, by another where that one goes away meanwhile."""
        while True:
            endpoint = self._run(self._until_live())
            try:
                return self._weights.logprobs(endpoint.url, np.asarray(tokens))
            except httpx2.HTTPError as error:
                self._run(self._went_away(endpoint, f"{type(error).__name__} {error}".strip()))

    async def _went_away(self, endpoint: Endpoint, words: str) -> None:
        self._servers.counted("a server went away while it scored")
        self._balance.failed(endpoint, time.monotonic(), words, down=True)

    def close(self) -> None:
        """End the requests under way and the thread; may be called twice."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._servers.finish(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._weights.close()
        self._writing.clear()

    def _run(self, work: Any) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    # For TurnEngine.

    def _check(self, request, options) -> int:
        if not self.served:
            self.connect()  # what the servers can do is known from here on
        return super()._check(request, options)

    def _begin(self, key: Hashable, writing: Writing) -> None:
        self._futures[key] = asyncio.run_coroutine_threadsafe(self._write(key, writing), self._loop)

    def _end(self, keys: list[Hashable]) -> None:
        for key in keys:
            if (future := self._futures.pop(key, None)) is not None:
                future.cancel()  # the connection closes, and the server drops the work

    def _hear(self, timeout: float) -> list[tuple[Hashable, Completion | EngineTrouble]]:
        found, end = [], time.monotonic() + timeout
        while True:
            try:
                left = end - time.monotonic()
                wait = not found and left > 0
                key, writing, what = self._heard.get(timeout=left) if wait else self._heard.get_nowait()
            except queue.Empty:
                return found
            if self._writing.get(key) is writing:  # else it was aborted in the meantime
                self._futures.pop(key, None)
                found.append((key, what))

    def _take(self, folder: Path, version: int) -> None:
        self._run(self._give(folder, version))

    # On the loop.

    async def _open(self) -> None:
        self._giving = asyncio.Lock()
        await self._servers.open()

    async def _write(self, key: Hashable, writing: Writing) -> None:
        """Write one turn to its end, piece by piece, and tell of it."""
        try:
            what: Completion | EngineTrouble | None = None
            empty = 0
            while what is None:
                piece = await self._ask(writing.turn(), writing.request.session)
                what = writing.add(piece)
                empty = 0 if len(piece.tokens) else empty + 1
                if what is None and empty > self.retries:
                    what = EngineTrouble("engine_answer", "the server broke the turn off again and again")
        except (Unavailable, wire.BadAnswer, wire.Refused) as failed:
            reason = "engine_down" if isinstance(failed, Unavailable) else "engine_answer"
            what = EngineTrouble(reason, str(failed))
        except Exception as error:  # noqa: BLE001 - a turn that is never heard of again would hang the run
            what = EngineTrouble("engine_error", f"{type(error).__name__}: {error}")
        self._heard.put((key, writing, what))

    async def _ask(self, turn: Turn, session: str | None) -> Piece:
        """One question with retries. Raises Unavailable, BadAnswer or Refused."""
        last: Exception = Unavailable("no server answers")
        for attempt in range(self.retries + 1):
            await self._servers.pause(attempt)
            endpoint = await self._servers.choose(self._home.get(session, "") if session else "")
            if endpoint is None:
                last = Unavailable(f"no server answers: {self._balance.said()}")
                continue
            if session is not None:
                self._home[session] = endpoint.url
            try:
                return await self._exchange(endpoint, turn)
            except wire.Refused as refused:
                raise wire.Refused(f"{endpoint.url} refuses the request: {refused}") from None
            except wire.BadAnswer as bad:
                last = bad
                self._servers.counted(str(bad))
                if "weights" in str(bad):  # it began anew with those that it was started with, or others give it theirs
                    self._balance.failed(endpoint, time.monotonic(), str(bad), down=True)
            except Unavailable as failed:
                last = Unavailable(f"{endpoint.url}: {failed}")
                self._servers.counted(failed.reason)
                self._balance.failed(endpoint, time.monotonic(), str(failed), down=failed.down)
        raise last

    async def _exchange(self, endpoint: Endpoint, turn: Turn) -> Piece:
        endpoint.in_flight += 1
        try:
            # A server that was given weights and says "default" began anew with others.
            names = {} if self._folder is not None else {wire.UNLABELLED: self._first_version}
            content = await self._servers.ask(endpoint, wire.PATH, wire.body(self.served, turn))
            piece = wire.read_piece(self.served, turn, content, versions=names, vocabulary=self.vocabulary)
            self._balance.answered(endpoint, time.monotonic())
            return piece
        finally:
            endpoint.in_flight -= 1

    # Greeting: is a server there, can it serve this student, and has it the newest weights?

    async def _until_live(self, *, force: bool = False) -> Endpoint:
        """A live server; raises EngineUnreachable after `patience_s` without one. `force`: greet all of them first."""
        end, say = time.monotonic() + self.patience_s, time.monotonic() + SAY_AFTER_S
        await self._servers.greet(force=force)
        while (endpoint := self._balance.choose()) is None:
            if time.monotonic() >= end or any(e.unfit for e in self._balance.endpoints):
                raise EngineUnreachable(f"no server of the student answers: {self._balance.said()}; start one with "
                                        "`mopd serve`, or mend sampling.urls")
            if say < time.monotonic() < end:
                say = math.inf
                print(f"sampling: no server of the student answers: {self._balance.said()}; waiting up to "
                      f"{self.patience_s:g} s (sampling.engine_wait_s)", file=sys.stderr, flush=True)
            await asyncio.sleep(0.5)
            await self._servers.greet()
        return endpoint

    async def _look(self, endpoint: Endpoint) -> None:
        try:
            await self._look_at(endpoint)
            async with self._giving:  # weights that are given just now are waited for
                await self._freshen(endpoint)
                if self._balance.greeted(endpoint, time.monotonic()):
                    print(f"sampling: {endpoint.url} answers again", file=sys.stderr, flush=True)
        except WeightsDiffer as wrong:
            raise Unfit(str(wrong)) from wrong

    async def _look_at(self, endpoint: Endpoint) -> None:
        """Raises Unfit where it serves something else, does not take ids, or tells other log-probabilities."""
        card = await self._servers.card(endpoint, self.served_model, self.served, "sampling.served_model", CHECK_SECONDS)
        model = card["id"]
        limit = await self._told_limit(endpoint, model)
        for token in (3, 5):  # one allowed id has all of the policy's probability, and not all of the model's
            turn = Turn(PROBE, 1, 1.0, 0, only=(token,))
            status, content = await self._servers.post(endpoint, wire.PATH, wire.body(model, turn), self._servers.timeout_s)
            if status == 404:
                raise Unfit(f"knows no {wire.PATH}, which takes and gives token ids; start it with --enable-scale-out, "
                                  "as `mopd serve` does")
            if status != 200:
                raise Unavailable(f"HTTP {status}: {wire.error_text(content)}")
            piece = wire.read_piece(model, turn, content, versions=_AnyName(), vocabulary=self.vocabulary)
            if not abs(float(piece.logprob[0])) < 1e-4:
                raise Unfit("tells log-probabilities from before temperature, top-p and top-k, which are not those of "
                                  f"the policy that samples; start it with {MODE_FLAG} {MODE}, as `mopd serve` does")
        positions = card.get("max_model_len")
        if positions:
            self.max_positions = min(positions, self.max_positions or positions)
        self.max_logprobs = min(limit, self.max_logprobs) if self.served else limit
        self.served = model

    async def _told_limit(self, endpoint: Endpoint, model: str) -> int:
        """Most ids that it tells of each token: what it says when it is asked for too many; 0 where it does not say."""
        question = {"model": model, "prompt": PROBE.tolist(), "max_tokens": 1, "logprobs": 1_000_000_000,
                    "temperature": 0.0, "add_special_tokens": False}
        status, content = await self._servers.post(endpoint, "/v1/completions", question, CHECK_SECONDS)
        if status in (401, 403):
            raise Unfit(self._servers.key_refused(status))
        return (wire.largest_k(content) or 0) if status == 400 else 0

    async def _freshen(self, endpoint: Endpoint) -> None:
        """Give a server that came back the newest weights, unless it has them."""
        if self._folder is None:
            return
        status, content = await self._servers.call(endpoint, "GET", "/weight_info", CHECK_SECONDS)
        told = wire.parse_json(content).get("weight_version") if status == 200 else None
        if told != str(self._folder[1]):
            found = await asyncio.to_thread(self._weights.take, *self._folder, keep=True, only=[endpoint.url])
            if words := found[endpoint.url].words:
                raise Unavailable(words)

    async def _give(self, folder: Path, version: int) -> None:
        """Give all live servers a folder; those that fail are down until they have taken it. Raises WeightsDiffer where one
        shows other weights, EngineUnreachable where none took it for `patience_s`."""
        end = time.monotonic() + self.patience_s
        while True:
            await self._until_live()
            async with self._giving:
                self._folder = (folder, version)  # who comes back meanwhile gets these
                live = [e for e in self._balance.endpoints if e.live]
                found = await asyncio.to_thread(self._weights.take, folder, version, keep=True, only=[e.url for e in live])
                took = 0
                for endpoint in live:
                    words = found[endpoint.url].words
                    took += not words
                    if words:
                        self._servers.counted("a server did not take new weights")
                        self._balance.failed(endpoint, time.monotonic(), words, down=True)
                        print(f"sampling: {words}; it is asked for nothing until it has them", file=sys.stderr, flush=True)
            if took:
                return
            if time.monotonic() >= end:
                raise EngineUnreachable(f"no server took the weights of step {version}: {self._balance.said()}")
            await asyncio.sleep(0.5)


class _AnyName(dict):
    """Any name of weights is as good as another."""

    def get(self, name: str, default: Any = None) -> int:
        return 0
