"""Environments behind OpenEnv servers, spoken to over their WebSocket sessions: one session is one environment.

Only JSON crosses the connection, and nothing of OpenEnv itself is needed here: its package pulls in what a server needs.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mopd.environments.base import EnvironmentFailure, Observation, Task
from mopd.environments.single_turn import checked_sizes, named, require_split

SPLIT_START = {"train": 0, "development": 1_000_000, "test": 2_000_000}
SPLIT_ROOM = 1_000_000
DEFAULT_SIZES = {"train": 10_000, "development": 500, "test": 500}
BIGGEST = 100 * 2**20
# bytes of one message


class OpenEnvFamily:
    """An environment served at one address or several (the same at each; sessions are spread evenly).

    urls            addresses, such as http://127.0.0.1:8000
    field           the field of the action that a turn's text becomes; by default the action's only required field. Where
                    neither is there, a turn is the whole action as a JSON object
    shown           the field of the observation that the model reads, or a dotted path to (observation) → text; by default
                    its only text field, else the whole observation as JSON
    instruction     the task in words
    reset           further arguments of every reset; each task gives its own `seed`, which an environment may or may not
                    take: one that does not has only one task, as often as you like
    success         `reward` (all rewards together reach `full_reward`), or a dotted path to (total reward, observation) →
                    bool
    full_reward     rewards of this sum are a score of 1; the score is the sum so far over it, within [0, 1]
    system_prompt   what the model is told once
    sizes           tasks of each split; seeds start at 0 (train), 1,000,000 (development), 2,000,000 (test)
    timeout_s       seconds for one answer

    An action that does not fit the server's schema is `malformed`. The servers must allow as many sessions
    (max_concurrent_envs) as the domain keeps `environments`.
    """

    def __init__(self, *, urls: Sequence[str], field: str | None = None, shown: str | None = None, instruction: str = "",
                 reset: Mapping[str, Any] | None = None, success: str = "reward", full_reward: float = 1.0,
                 system_prompt: str = "Answer with one action.", sizes: Mapping[str, int] | None = None,
                 timeout_s: float = 60.0):
        if isinstance(urls, str) or not urls or not all(str(url).startswith(("http://", "https://")) for url in urls):
            raise ValueError(f"openenv: urls is {urls!r}; it must be a list of addresses such as http://127.0.0.1:8000")
        for key, value in (("full_reward", full_reward), ("timeout_s", timeout_s)):
            if not value > 0:
                raise ValueError(f"openenv: {key} is {value}; it must be above 0")
        import websockets.sync.client  # noqa: F401 - said at launch where it is not installed

        self.urls = [str(url).rstrip("/") for url in urls]
        self.instruction, self.given, self.timeout_s = instruction, dict(reset or {}), float(timeout_s)
        self.full_reward = float(full_reward)
        self.success: Callable[..., bool] | None = None if success == "reward" else named("openenv: success", success)
        self.sizes = checked_sizes("openenv", sizes, DEFAULT_SIZES, SPLIT_ROOM)
        schema, about = self._ask("schema"), self._ask("metadata")
        required = list(schema.get("action", {}).get("required", []))
        known = schema.get("action", {}).get("properties", {})
        if field is not None and field not in known:
            raise ValueError(f"openenv: actions at {self.urls[0]} have no field {field!r}; there is {', '.join(known)}")
        self.field = field if field is not None else required[0] if len(required) == 1 else None
        seen = {key: value for key, value in schema.get("observation", {}).get("properties", {}).items()
                if key not in ("done", "reward", "metadata")}
        texts = [key for key, value in seen.items() if value.get("type") == "string"]
        self.key: str | None = None
        self.render: Callable[[Any], str] | None = None
        if shown is None:
            self.key = texts[0] if len(texts) == 1 else None
        elif shown in seen:
            self.key = shown
        elif ":" in shown or "." in shown:
            self.render = named("openenv: shown", shown)
        else:
            raise ValueError(f"openenv: observations at {self.urls[0]} have no field {shown!r}; there is {', '.join(seen)}")
        self.name = "openenv"
        options = json.dumps([self.given, self.field, shown, instruction, self.full_reward], sort_keys=True, default=str)
        self.version = f"{about.get('name', 'environment')} {about.get('version') or 'without version'}, {options}"
        self.system_prompt = system_prompt
        self._turn = itertools.count()

    def tasks(self, split: str) -> list[Task]:
        require_split(split)
        return [Task("episode", SPLIT_START[split] + i, split) for i in range(self.sizes[split])]

    def create(self) -> OpenEnvEnvironment:
        return OpenEnvEnvironment(self, self.urls[next(self._turn) % len(self.urls)])

    def close(self) -> None:
        """Sessions belong to their environments."""

    def _ask(self, what: str) -> dict[str, Any]:
        """GET an address of the first server. Raises ValueError where none answers as an OpenEnv server does."""
        import httpx2

        try:
            answer = httpx2.get(f"{self.urls[0]}/{what}", timeout=self.timeout_s)
            answer.raise_for_status()
            found = answer.json()
        except (httpx2.HTTPError, ValueError) as error:
            raise ValueError(f"openenv: {self.urls[0]}/{what} does not answer as an OpenEnv server does: {error}") from error
        if not isinstance(found, dict):
            raise ValueError(f"openenv: {self.urls[0]}/{what} answers {str(found)[:100]}, no object")
        return found


class OpenEnvEnvironment:
    """One session; it is opened with the first reset and again where it was lost."""

    def __init__(self, family: OpenEnvFamily, url: str):
        self._family, self._url = family, url
        self._session: Any = None
        self._lock = threading.Lock()
        self._view, self._reward, self._over = "", 0.0, True

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        self._reward, self._over = 0.0, False
        data = self._say("reset", {**self._family.given, "seed": task.seed})
        return self._observe(data)

    def step(self, action: str) -> Observation:
        if self._over:
            raise EnvironmentFailure("not_reset", "openenv: step before reset, or after the episode's end")
        written = self._written(action)
        data = None if written is None else self._say("step", written)
        if data is None:
            return Observation(f"unknown action. {self._view}", self._family.instruction, self._score, malformed=True)
        return self._observe(data)

    def expert_action(self) -> str | None:
        return None

    def close(self) -> None:
        session, self._session, self._over = self._session, None, True
        if session is not None:
            session.close()

    @property
    def _score(self) -> float:
        return min(1.0, max(0.0, self._reward / self._family.full_reward))

    def _written(self, action: str) -> dict[str, Any] | None:
        if self._family.field is not None:
            return {self._family.field: action} if action.strip() else None
        try:
            found = json.loads(action)
        except ValueError:
            return None
        return found if isinstance(found, dict) else None

    def _observe(self, data: Mapping[str, Any]) -> Observation:
        seen = data.get("observation") or {}
        self._reward += float(data.get("reward") or 0.0)
        self._over = bool(data.get("done"))
        family = self._family
        if family.render is not None:
            text = family.render(seen)
        else:
            text = seen.get(family.key, "") if family.key is not None else json.dumps(seen, ensure_ascii=False)
        self._view = str(text).strip()
        won = self._reward >= family.full_reward if family.success is None else bool(family.success(self._reward, seen))
        return Observation(self._view, family.instruction, self._score, self._over, won and self._over)

    def _say(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any] | None:
        """Send a message and take the answer; None where the server does not accept the action. Raises EnvironmentFailure
        `openenv_down`, `openenv_timeout`, `openenv_full` or `openenv_error`."""
        import websockets.exceptions
        from websockets.sync.client import connect

        place = f"openenv: {self._url}"
        with self._lock:
            try:
                if self._session is None:
                    if kind != "reset":
                        raise EnvironmentFailure("openenv_down", f"{place}: the session is lost")
                    address = "ws" + self._url.removeprefix("http") + "/ws"
                    self._session = connect(address, open_timeout=self._family.timeout_s, max_size=BIGGEST)
                self._session.send(json.dumps({"type": kind, "data": dict(data)}))
                answer = json.loads(self._session.recv(timeout=self._family.timeout_s))
            except TimeoutError:
                self.close()
                raise EnvironmentFailure("openenv_timeout", f"{place} did not answer `{kind}` in "
                                                            f"{self._family.timeout_s:g} s") from None
            except (OSError, ValueError, websockets.exceptions.WebSocketException) as error:
                self.close()
                raise EnvironmentFailure("openenv_down", f"{place}: {type(error).__name__}: {error}") from error
        found = answer.get("data") or {}
        if answer.get("type") != "error":
            return found
        code = str(found.get("code", ""))
        if code == "VALIDATION_ERROR" and kind == "step":
            return None
        self.close()
        if code == "CAPACITY_REACHED":
            raise EnvironmentFailure("openenv_full", f"{place} has no room for another session: {found.get('message')}; set "
                                                     "its max_concurrent_envs to the domain's `environments` or more")
        raise EnvironmentFailure("openenv_error", f"{place}: {found.get('message')} ({code})")
