"""Connections to several servers that do the same: calls with a key, pauses, and a look at those that were away.

Which of them is asked is balance.py's business, what is said to them is that of whoever holds a `Servers`. Everything
asynchronous runs on one event loop, that of `open`.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx2

from mopd.addresses import takes_proxy
from mopd.sampling.balance import Balance, Endpoint
from mopd.sampling.vllm_wire import BadAnswer, Refused, error_text, parse_json

# Seconds before a try is repeated: doubled each time, with a random half so that callers do not come back together.
BACKOFF, LONGEST_BACKOFF = 0.25, 8.0
CONNECT_SECONDS = 10.0


class Unavailable(Exception):
    """A server did not answer, or not now. `reason` is short, to be counted; the text may say more. `down`: further requests
    would fail too."""

    def __init__(self, reason: str, words: str = "", *, down: bool = False):
        super().__init__(words or reason)
        self.reason, self.down = reason, down


class Unfit(Exception):
    """A server answers, but it is not the one that is wanted, or lets nobody in; the text is for the user."""


class Servers:
    """Clients of the servers of a Balance.

    headers      of every request (`key_headers`)
    key_setting  the key of the configuration that names the variable with the key, and `key_variable` its name, for messages
    timeout_s    of a request, unless one says otherwise
    connections  most of them to one server; None: any number
    look         looks at one server and has it marked as live (Balance.greeted); may raise Unfit, Unavailable, BadAnswer,
                 Refused and what httpx2 raises

    `faults` counts what went wrong, by reason, whether a later try mended it or not.
    """

    def __init__(self, balance: Balance, *, headers: dict[str, str], key_setting: str, key_variable: str, timeout_s: float,
                 connections: int | None, look: Callable[[Endpoint], Awaitable[None]], seed: int | str = 0):
        self.balance, self.headers, self.timeout_s, self.connections = balance, headers, timeout_s, connections
        self.faults: collections.Counter[str] = collections.Counter()
        self.clients: dict[str, httpx2.AsyncClient] = {}
        self._key_setting, self._key_variable, self._look = key_setting, key_variable, look
        self._jitter = random.Random(seed)
        self._greetings: dict[str, asyncio.Task] = {}

    async def open(self) -> None:
        """Make the clients, on the loop that runs."""
        limits = httpx2.Limits(max_connections=self.connections, max_keepalive_connections=self.connections or 256)
        for endpoint in self.balance.endpoints:
            self.clients[endpoint.url] = httpx2.AsyncClient(
                base_url=endpoint.url, headers=self.headers, trust_env=takes_proxy(endpoint.url), limits=limits,
                timeout=httpx2.Timeout(self.timeout_s, connect=min(CONNECT_SECONDS, self.timeout_s)))

    async def finish(self) -> None:
        """Cancel whatever else runs on the loop, so that connections close and servers drop the work."""
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for client in self.clients.values():
            await client.aclose()

    def counted(self, reason: str) -> str:
        """The reason, counted."""
        self.faults[reason] += 1
        return reason

    async def call(self, endpoint: Endpoint, method: str, path: str, seconds: float, **more: Any) -> tuple[int, bytes]:
        """Status and content; raises Unavailable. The time is that of the whole call: a server that trickles counts too."""
        try:
            async with asyncio.timeout(seconds):
                response = await self.clients[endpoint.url].request(method, path, **more)
                return response.status_code, response.content
        except (TimeoutError, httpx2.TimeoutException):
            raise Unavailable(f"no answer within {seconds:g} s") from None
        except httpx2.ConnectError:
            raise Unavailable("connection refused", down=True) from None
        except httpx2.HTTPError as error:
            raise Unavailable(f"connection broke ({type(error).__name__})") from None

    async def post(self, endpoint: Endpoint, path: str, body: Any, seconds: float) -> tuple[int, bytes]:
        """`call` with a body as JSON."""
        return await self.call(endpoint, "POST", path, seconds, content=json.dumps(body, separators=(",", ":")).encode(),
                               headers={"Content-Type": "application/json"})

    async def ask(self, endpoint: Endpoint, path: str, body: Any) -> bytes:
        """The content of a good answer. Raises Unavailable, and Refused where asking again would not help."""
        status, content = await self.post(endpoint, path, body, self.timeout_s)
        words = f"HTTP {status}: {error_text(content)}"
        if status in (401, 403):
            raise Unavailable(self.key_refused(status), down=True)
        if status in (404, 408, 409, 425, 429) or status >= 500:
            raise Unavailable(words if status == 404 else f"HTTP {status}", words, down=status == 404)
        if status != 200:
            raise Refused(words)
        return content

    async def card(self, endpoint: Endpoint, wanted: str, met: str, setting: str, seconds: float) -> dict[str, Any]:
        """What a server says of the model that it serves under the name `wanted`, or where none is wanted under `met` or
        else as its only one. Raises Unfit, naming the `setting` for the name."""
        status, content = await self.call(endpoint, "GET", "/v1/models", seconds)
        if status in (401, 403):
            raise Unfit(self.key_refused(status))
        if status != 200:
            raise Unavailable(f"HTTP {status}")
        cards = {c["id"]: c for c in parse_json(content).get("data") or ()
                 if isinstance(c, dict) and isinstance(c.get("id"), str)}
        name = wanted or met or next(iter(cards), "")
        if name not in cards or (not wanted and not met and len(cards) > 1):
            raise Unfit(f"serves {', '.join(cards) or 'nothing'}" + (f", not {name}" if name else "")
                        + f"; name the right one as {setting}")
        return cards[name]

    async def pause(self, attempt: int) -> None:
        """Before try `attempt` of a request, from 0 (no pause)."""
        if attempt:
            longest = min(LONGEST_BACKOFF, BACKOFF * 2 ** (attempt - 1))
            await asyncio.sleep(longest * (0.5 + self._jitter.random() / 2))

    async def choose(self, prefer: str = "") -> Endpoint | None:
        """A live server, after a look at those that are due: waited for only where no other can be asked. None: there is
        none."""
        for down in self.balance.due(time.monotonic()):
            self._greeting_of(down)
        if (endpoint := self.balance.choose(prefer)) is None:
            await self.greet()
            endpoint = self.balance.choose()
        return endpoint

    async def greet(self, *, force: bool = False) -> None:
        """Look at the servers that are down and due (`force`: at all of them), at once, and wait for it."""
        due = self.balance.endpoints if force else self.balance.due(time.monotonic())
        if due:  # who is cancelled here leaves the greeting to the others that wait for it
            await asyncio.wait([self._greeting_of(endpoint) for endpoint in due])

    def _greeting_of(self, endpoint: Endpoint) -> asyncio.Task:
        """The greeting that is under way, or a new one."""
        task = self._greetings.get(endpoint.url)
        if task is None or task.done():
            task = self._greetings[endpoint.url] = asyncio.get_running_loop().create_task(self._greet_one(endpoint))
        return task

    async def _greet_one(self, endpoint: Endpoint) -> None:
        try:
            await self._look(endpoint)
        except Unfit as unfit:
            self.counted("a server was turned away")
            self.balance.failed(endpoint, time.monotonic(), str(unfit), down=True, unfit=True)
        except (Unavailable, BadAnswer, Refused, httpx2.HTTPError) as failed:
            self.balance.failed(endpoint, time.monotonic(), str(failed), down=True)

    def key_refused(self, status: int) -> str:
        """What is to be done about a server that wants a key, or another one."""
        if not self.headers:
            return f"HTTP {status}: asks for a key; put it into an environment variable and name that in {self._key_setting}"
        return f"HTTP {status}: refuses the key in the environment variable {self._key_variable}"


def key_headers(key: str) -> dict[str, str]:
    """Headers of every request with this key; none without."""
    return {"Authorization": f"Bearer {key}"} if key else {}
