"""A teacher behind any number of vLLM servers: requests are spread, bounded, tried again and their answers checked.

All network work runs on one event loop in a thread of its own, so that callers may be many threads, and ending a call ends
its requests: the connection closes and the server drops the work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.addresses import loopback_url
from mopd.sampling.balance import Balance, Endpoint
from mopd.sampling.base import Completion
from mopd.sampling.servers import Servers, Unavailable, Unfit, key_headers
from teachers.scoring import vllm_http as wire
from teachers.scoring.prompts import Prompt, PromptScores, answers_of, prompts_of
from teachers.scoring.requests import ScoreAnswer, ScoreRequest, TeacherError, TeacherUnreachable
from teachers.scoring.turns import MODE, MODE_FLAG, Turn

# Scored whenever a server is greeted, to see whether it is still the one from the launch. Any model has these ids.
CANARY = np.array([(7 * i) % 29 for i in range(24)], np.uint32)
# Same weights differ by rounding, more so in bfloat16; other weights differ by far more somewhere in the text.
CANARY_TOLERANCE = 0.25
# Texts whose ids show whether a server reads text as the student does.
SAMPLES = ("You see a red door, 2 keys and a box.", " naïve 漢字 → ok\n\tEnd", "<|im_start|>user\nhi<|im_end|>")
CHECK_SECONDS = 10.0  # of one question to a server that is being greeted


class VLLMServers:
    """ScoringBackend over vLLM servers that serve one teacher.

    urls                addresses without a path; the least busy one is asked
    served_model        the name under which they serve it; none: the only one that they serve
    model               folder or hub id of the same model, where it can be read here: for the handshake
    api_key_env         name of the environment variable that holds the key
    timeout_s, retries  of one request
    concurrency         requests under way at once, over all servers
    max_request_tokens  tokens under way at once; a longer context goes alone

    faults counts what went wrong, by reason, whether a later try mended it or not; returns how often a server came back after
    it had been down: a probe is due when that number grows.
    """

    gives = frozenset({"sampled", "top_k"})
    ways = wire.WAYS  # of asking a server, in the order in which they are tried when it is greeted

    def __init__(self, urls: Sequence[str], *, teacher: str, served_model: str = "", model: str = "", api_key_env: str = "",
                 timeout_s: float = 120.0, retries: int = 4, concurrency: int = 16, max_request_tokens: int = 65536):
        self.teacher, self.model, self.served_model, self.api_key_env = teacher, model, served_model, api_key_env
        self.retries, self.concurrency = retries, max(1, concurrency)
        self.max_request_tokens = max_request_tokens
        self.returns = 0
        self.scored_tokens = self.computed_tokens = 0
        self._balance = Balance(urls)
        self._ways: dict[str, str] = {}
        self._tells_policy: dict[str, bool] = {}  # url -> whether its log-probabilities know of temperatures
        self._card: dict[str, Any] | None = None
        self._canary: np.ndarray | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        key = os.environ.get(api_key_env, "") if api_key_env else ""
        if api_key_env and not key:
            raise TeacherError(f"teacher {teacher!r}: the environment variable {api_key_env}, which should hold its key, is "
                               f"not set; export it, or leave teachers.{teacher}.api_key_env out")
        self._servers = Servers(self._balance, headers=key_headers(key), key_setting=f"teachers.{teacher}.api_key_env",
                                key_variable=api_key_env, timeout_s=timeout_s, connections=self.concurrency + 2,
                                look=self._look, seed=teacher)
        self.faults = self._servers.faults

    @classmethod
    def from_spec(cls, spec: Any) -> VLLMServers:
        """From a teachers.registry.TeacherSpec."""
        return cls(spec.urls, teacher=spec.id, served_model=spec.served_model, model=str(spec.model),
                   api_key_env=spec.api_key_env, timeout_s=spec.timeout_s, retries=spec.retries, concurrency=spec.concurrency,
                   max_request_tokens=spec.max_request_tokens)

    # What the rest of the program calls, from any thread.

    @property
    def max_tokens(self) -> int | None:
        """Longest context: the server's limit less the one token that it insists on writing."""
        limit = (self._card or {}).get("max_model_len")
        return limit - 1 if limit else None

    @property
    def max_k(self) -> int:
        """The servers' limit of "top_k"; vLLM's own default until one was asked."""
        return (self._card or {}).get("max_k", 20)

    def identity(self) -> dict[str, Any]:
        """See ScoringBackend. Besides: `servers` url -> what it said, `tokenized` text -> ids as the server reads it (None
        where it does not say). Raises TeacherError where a server is another teacher or refuses the key, TeacherUnreachable
        where none answers."""
        return self._run(self._identity())

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """See ScoringBackend. Raises ValueError for requests that no prompt log-probability answers (temperature, candidates,
        hidden states)."""
        requests = list(requests)
        if not prompts_of(requests):  # raises before anything is sent
            return []
        prompts, scores = self._run(self._score(requests))
        with self._lock:
            self.scored_tokens += sum(map(len, requests))
            self.computed_tokens += sum(map(len, prompts))
        return answers_of(requests, prompts, scores, self.teacher)

    def write(self, turns: Sequence[Turn]) -> list[Completion | str]:
        """Turns in the order asked, or the reason why there is none. Raises TeacherUnreachable where some found no server
        that answers."""
        return self._run(self._write(list(turns))) if turns else []

    def close(self) -> None:
        """End the requests under way and the thread; may be called twice."""
        with self._lock:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is None:
            return
        asyncio.run_coroutine_threadsafe(self._servers.finish(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        self._thread.join()
        loop.close()

    def _run(self, work: Any) -> Any:
        """Run a coroutine on the loop and wait. Whatever ends the wait (an interrupt too) ends the requests."""
        with self._lock:
            if self._closed:
                work.close()
                raise RuntimeError(f"the connection to teacher {self.teacher!r} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._loop.run_forever, name=f"teacher-{self.teacher}", daemon=True)
                self._thread.start()
                asyncio.run_coroutine_threadsafe(self._begin(), self._loop).result()
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            raise RuntimeError(f"the connection to teacher {self.teacher!r} was closed while it was asked") from None
        except BaseException:
            future.cancel()
            raise

    # On the loop.

    async def _begin(self) -> None:
        self._slots = asyncio.Semaphore(self.concurrency)
        self._room = asyncio.Condition()
        self._tokens_under_way = 0
        self._comparing = asyncio.Lock()
        self._looking = asyncio.Lock()
        await self._servers.open()

    async def _score(self, requests: list[ScoreRequest]) -> tuple[list[Prompt], list[PromptScores | str]]:
        """Prompts with their scores, or the reasons why there are none. Raises TeacherUnreachable where nothing answered."""
        self._balance.doubt(time.monotonic())
        await self._servers.greet()
        prompts = prompts_of(requests, self.max_tokens)
        async with asyncio.TaskGroup() as group:  # ending this call ends all of its requests
            tasks = [group.create_task(self._ask(prompt)) for prompt in prompts]
        found = [task.result() for task in tasks]
        if all(isinstance(f, Unavailable) for f in found):
            raise TeacherUnreachable(self.teacher, self._balance.said())
        return prompts, [f"no answer: {f.reason}" if isinstance(f, Unavailable) else f for f in found]

    async def _write(self, turns: list[Turn]) -> list[Completion | str]:
        self._balance.doubt(time.monotonic())
        await self._servers.greet()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._ask(turn)) for turn in turns]
        found = [task.result() for task in tasks]
        if any(isinstance(f, Unavailable) for f in found):
            raise TeacherUnreachable(self.teacher, self._balance.said())
        return found

    async def _ask(self, prompt: Prompt | Turn) -> PromptScores | Completion | str | Unavailable:
        if self.max_tokens is not None and len(prompt) > self.max_tokens:
            return self._servers.counted(f"context longer than the server's {self.max_tokens} tokens")
        async with self._slots:
            tokens = min(len(prompt), self.max_request_tokens)
            async with self._room:
                await self._room.wait_for(lambda: self._tokens_under_way + tokens <= self.max_request_tokens)
                self._tokens_under_way += tokens
            try:
                return await self._ask_until(prompt)
            finally:
                self._tokens_under_way -= tokens
                async with self._room:
                    self._room.notify_all()

    async def _ask_until(self, prompt: Prompt | Turn) -> PromptScores | Completion | str | Unavailable:
        """One question with retries, each at the server that is least busy then."""
        last: str | Unavailable = ""
        for attempt in range(self.retries + 1):
            await self._servers.pause(attempt)
            endpoint = await self._servers.choose()
            if endpoint is None:
                last = Unavailable("no server answers")
                continue
            try:
                return await self._send(endpoint, prompt)
            except wire.Refused as refused:
                return self._servers.counted(f"refused: {refused}")
            except wire.BadAnswer as bad:
                last = self._servers.counted(str(bad))
                endpoint.said = str(bad)
            except Unavailable as failed:
                self._servers.counted(failed.reason)
                self._balance.failed(endpoint, time.monotonic(), failed.reason, down=failed.down)
                last = failed
        return last

    async def _send(self, endpoint: Endpoint, prompt: Prompt | Turn) -> PromptScores | Completion:
        way = self._ways[endpoint.url]
        if way == "chosen" and (isinstance(prompt, Turn) or prompt.k):
            way = "tokens"
        if isinstance(prompt, Turn) and prompt.tempered:
            await self._need_policy(endpoint, way)
        return await self._exchange(endpoint, way, prompt)

    async def _need_policy(self, endpoint: Endpoint, way: str) -> None:
        """Raises wire.Refused for a server whose log-probabilities are those before temperature. Where only one id may be
        written, the policy gives it all the probability, and the model before it does not."""
        async with self._looking:  # asked once, whoever else waits for it
            if endpoint.url not in self._tells_policy:
                looked = [await self._exchange(endpoint, way, Turn(CANARY, 1, 1.0, 0, only=(token,))) for token in (3, 5)]
                self._tells_policy[endpoint.url] = all(abs(float(turn.logprob[0])) < 1e-4 for turn in looked)
        if not self._tells_policy[endpoint.url]:
            raise wire.Refused(f"the log-probabilities of {endpoint.url} are those before temperature, so it can sample at "
                               f"temperatures 0 and 1 only; start it with {MODE_FLAG} {MODE}, as `mopd teacher serve` does")

    async def _exchange(self, endpoint: Endpoint, way: str, prompt: Prompt | Turn) -> PromptScores | Completion:
        endpoint.in_flight += 1
        try:
            name = self._card["id"]
            content = await self._servers.ask(endpoint, wire.PATHS[way], wire.body(way, name, prompt))
            scores = wire.read_answer(way, name, prompt, content)
            self._balance.answered(endpoint, time.monotonic())
            return scores
        finally:
            endpoint.in_flight -= 1

    # Greeting: is a server there, is it this teacher, and how is it best asked?

    async def _look(self, endpoint: Endpoint) -> None:
        await self._check(endpoint)
        if self._balance.greeted(endpoint, time.monotonic()):
            self.returns += 1

    async def _check(self, endpoint: Endpoint) -> None:
        """Raises Unfit for another model than the one that was met first."""
        told = await self._servers.card(endpoint, self.served_model, (self._card or {}).get("id", ""),
                                        f"teachers.{self.teacher}.served_model", CHECK_SECONDS)
        card = {name: told.get(name) for name in ("id", "root", "max_model_len")}
        way, max_k, canary = await self._ways_of(endpoint, card)
        async with self._comparing:  # of several servers one is first, and the others are compared with it
            if self._card is None:
                self._card, self._canary = card | {"max_k": max_k}, canary
            else:
                self._compare(card, canary)
                self._card["max_k"] = min(self._card["max_k"], max_k)
        self._ways[endpoint.url] = way
        self._tells_policy.pop(endpoint.url, None)

    def _compare(self, card: dict[str, Any], canary: np.ndarray) -> None:
        for name, what in (("root", "serves the model"), ("id", "serves it under the name"),
                           ("max_model_len", "reads contexts of")):
            if card[name] != self._card[name]:
                raise Unfit(f"{what} {card[name]}, but {self._card[name]} was met at first")
        moved = float(np.abs(canary - self._canary).max())
        if not moved <= CANARY_TOLERANCE:
            raise Unfit("has other weights than were met at first: its scores of a fixed text differ by up to "
                         f"{moved:.3g} nats; serve the same checkpoint, or start the run anew with this one")

    async def _ways_of(self, endpoint: Endpoint, card: dict[str, Any]) -> tuple[str, int, np.ndarray]:
        """The cheapest way in which the server answers, its limit of k, and its scores of the canary."""
        text = Prompt(CANARY, 1, 0, (0,))
        for way in self.ways:
            status, content = await self._servers.post(endpoint, wire.PATHS[way], wire.body(way, card["id"], text),
                                                       self._servers.timeout_s)
            if status == 200:
                try:
                    scores = wire.read_answer(way, card["id"], text, content)
                except wire.BadAnswer as bad:
                    if way != "completions":
                        continue
                    raise Unfit(f"gives no usable prompt log-probabilities: {bad}") from None
                if not np.isfinite(scores.logprob).all():
                    reasons = ", ".join(sorted(set(scores.why) - {""}))
                    raise Unfit(f"gives no usable prompt log-probabilities: {reasons}")
                return way, await self._limit_of_k(endpoint, card), scores.logprob
            if status in (401, 403):
                raise Unfit(self._servers.key_refused(status))
            if status == 429 or status >= 500 and way == "completions":
                raise Unavailable(f"HTTP {status}")
            if way == "completions":
                raise Unfit(f"refuses to score: HTTP {status}: {wire.error_text(content)}")
        raise AssertionError("unreachable")

    async def _limit_of_k(self, endpoint: Endpoint, card: dict[str, Any]) -> int:
        question = wire.body("completions", card["id"], Prompt(CANARY[:2], 1, 1_000_000_000, (0,)))
        status, content = await self._servers.post(endpoint, wire.PATHS["completions"], question, self._servers.timeout_s)
        return (wire.largest_k(content) or 0) if status == 400 else 0

    async def _identity(self) -> dict[str, Any]:
        await self._servers.greet(force=True)
        endpoints = self._balance.endpoints
        unfit = [e for e in endpoints if e.unfit]
        if unfit:
            raise TeacherError(f"teacher {self.teacher!r}: " + "; ".join(f"{e.url} {e.said}" for e in unfit))
        live = self._balance.choose()
        if live is None:
            raise TeacherUnreachable(self.teacher, self._balance.said())
        card, root = self._card, str(self._card["root"] or "")
        here = root if Path(root).is_dir() and all(loopback_url(e.url) for e in endpoints) else ""
        folder = self.model or here
        config = Path(folder, "config.json") if folder else None
        details = json.loads(config.read_text()) if config and config.is_file() else {}
        return {
            "model": card["id"], "root": root, "revision": self._revision(here or folder), "dtype": None,
            "tokenizer": folder or None,
            "rows": details.get("vocab_size"), "context_tokens": self.max_tokens,
            "servers": {e.url: e.said for e in endpoints},
            "tokenized": {text: await self._tokenize(live, text) for text in SAMPLES},
            "capabilities": {
                "sampled": True, "max_k": self.max_k, "flat": self._ways[live.url] != "completions",
                "start_offset": self._ways[live.url] == "chosen", "chosen_ids": self._ways[live.url] == "chosen",
                "hidden": False, "full": False, "temperature": False}}

    @staticmethod
    def _revision(folder: str) -> str | None:
        from teachers.registry import model_revision

        return model_revision(folder) if folder else None

    async def _tokenize(self, endpoint: Endpoint, text: str) -> list[int] | None:
        question = {"model": self._card["id"], "prompt": text, "add_special_tokens": False}
        try:
            status, content = await self._servers.post(endpoint, "/tokenize", question, CHECK_SECONDS)
            tokens = wire.parse_json(content).get("tokens") if status == 200 else None
        except (Unavailable, wire.BadAnswer):
            return None
        return tokens if isinstance(tokens, list) else None
