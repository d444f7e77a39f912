"""Environments of Prime Intellect's `verifiers` (0.4): a taskset with its rewards, and the environment that plays it.

An environment's own `run` plays one episode here, with its agent's words coming from the model under training instead of from
a server: each user turn that it gives becomes an observation, the next action is the reply. Nothing of verifiers' sampling,
harnesses, sandboxes or tool servers is used.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import itertools
import json
import queue
import threading
from collections.abc import Mapping
from typing import Any

from mopd.environments.base import SPLITS, EnvironmentFailure, Observation, Task
from mopd.environments.single_turn import checked_sizes, require_split

DEFAULT_SIZES = {"train": 1_000, "development": 100, "test": 100}
# Of ten tasks in a row, where a taskset has no splits of its own.
PLACES = {"train": range(8), "development": (8,), "test": (9,)}


class VerifiersFamily:
    """Tasks of an installed verifiers taskset.

    taskset      its id: an installed package that exports a Taskset
    options      of its config
    splits       split → further options, where the taskset has splits of its own, such as {test: {split: test}}: such a split
                 takes the first tasks of its own taskset. Where no split is named here, every ninth task of ten goes to
                 development, every tenth to test
    env          id of the environment that plays it; by default the taskset's own, else single-turn
    sizes        most tasks of each split
    full_reward  an episode's rewards of this sum are a score of 1 (a score is within [0, 1])
    success_at   a sum of rewards of at least this is a success; by default `full_reward`
    errors_are   what an exception of the environment or a reward is once the model has spoken: `infra` (played again,
                 then left out and counted) or `model` (the reply was no good: score 0, malformed)
    timeout_s    seconds for an answer of the environment

    Refused: environments with several agents, tasks that need a container, tools or a runtime for their reward.
    """

    def __init__(self, *, taskset: str, options: Mapping[str, Any] | None = None,
                 splits: Mapping[str, Mapping[str, Any]] | None = None, env: str = "", sizes: Mapping[str, int] | None = None,
                 full_reward: float = 1.0, success_at: float | None = None, errors_are: str = "infra",
                 timeout_s: float = 120.0):
        import verifiers.v1 as vf

        for split in splits or {}:
            if split not in SPLITS:
                raise ValueError(f"verifiers: `splits` names the split {split!r}; splits are {', '.join(SPLITS)}")
        if errors_are not in ("infra", "model"):
            raise ValueError(f"verifiers: errors_are is {errors_are!r}; it must be infra or model")
        for key, value in (("full_reward", full_reward), ("timeout_s", timeout_s)):
            if not value > 0:
                raise ValueError(f"verifiers: {key} is {value}; it must be above 0")
        self.vf, self.taskset, self.env_id = vf, taskset, env
        self.options, self.splits = dict(options or {}), {k: dict(v or {}) for k, v in (splits or {}).items()}
        self.sizes = checked_sizes("verifiers", sizes, DEFAULT_SIZES, 10**7)
        self.full_reward = float(full_reward)
        self.success_at = self.full_reward if success_at is None else float(success_at)
        self.errors_are, self.timeout_s = errors_are, timeout_s
        self._envs: dict[str, Any] = {}
        self._tasks: dict[str, list[Any]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        seats = self._seats(self.env("train"))
        if len(seats) != 1:
            raise ValueError(f"verifiers: {taskset!r} is played by the agents {', '.join(seats)}; one alone can be played "
                             "here")
        self.seat = seats[0]
        self.name = "verifiers"
        made = json.dumps([taskset, env, self.options, self.splits], sort_keys=True, default=str)
        self.version = f"verifiers {importlib.metadata.version('verifiers')}, {_version_of(taskset)}, {made}"
        self.system_prompt = ""

    def env(self, split: str) -> Any:
        """The environment that plays a split, with its taskset. Raises ValueError for a taskset that is not installed, or
        options that it refuses."""
        own = split if split in self.splits else ""
        if own not in self._envs:
            data = {"id": self.env_id, "taskset": {"id": self.taskset, **self.options, **self.splits.get(own, {})}}
            try:
                from verifiers.v1.utils.loaders import env_config_type

                config = env_config_type(self.taskset, self.env_id).model_validate(data)
                self._envs[own] = self.vf.load_environment(config)
            except Exception as error:  # noqa: BLE001 - a package of somebody else's, with checks of its own
                raise ValueError(f"verifiers: taskset {self.taskset!r} with {data['taskset']} cannot be loaded: "
                                 f"{type(error).__name__}: {error}") from error
        return self._envs[own]

    def tasks(self, split: str) -> list[Task]:
        require_split(split)
        return [Task(str(task.data.name or self.taskset), number, split) for number, task in enumerate(self._loaded(split))]

    def create(self) -> VerifiersEnvironment:
        return VerifiersEnvironment(self)

    def close(self) -> None:
        """End the thread in which episodes run."""
        with self._lock:
            loop, self._loop = self._loop, None
        if loop is not None:
            asyncio.run_coroutine_threadsafe(_end_all(), loop)

    def task(self, task: Task) -> Any:
        """The verifiers task behind a task. Raises ValueError where there is none."""
        loaded = self._loaded(task.split)
        if not 0 <= task.seed < len(loaded):
            raise ValueError(f"verifiers: split {task.split} has {len(loaded)} tasks, none with the number {task.seed}")
        return loaded[task.seed]

    def run(self, coroutine: Any) -> Any:
        """Begin a coroutine in the family's event loop, which starts with the first; returns its future."""
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                threading.Thread(target=loop.run_forever, daemon=True, name="verifiers").start()
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _seats(self, env: Any) -> list[str]:
        from verifiers.v1.configs.agent import agent_config_fields

        return list(agent_config_fields(env.config))

    def _loaded(self, split: str) -> list[Any]:
        with self._lock:
            if split not in self._tasks:
                taskset = iter(self.env(split).taskset)
                if not self.splits:
                    taskset = (task for number, task in enumerate(taskset) if number % 10 in PLACES[split])
                found = list(itertools.islice(taskset, self.sizes[split]))
                for task in found:
                    self._check(task)
                self._tasks[split] = found
            return self._tasks[split]

    def _check(self, task: Any) -> None:
        import inspect

        kind, name = type(task), task.data.name or task.data.idx
        if kind.NEEDS_CONTAINER:
            raise ValueError(f"verifiers: task {name} of {self.taskset!r} needs a container; such tasks cannot be played "
                             "here")
        if kind.toolsets(task.config) or self.env("train").taskset.toolsets(self.env("train").taskset.config):
            raise ValueError(f"verifiers: {self.taskset!r} gives its agent tools; only conversations can be played here")
        for reward in task.hooks("reward"):
            parameter = inspect.signature(reward).parameters.get("runtime")
            if parameter is not None and parameter.default is inspect.Parameter.empty:
                raise ValueError(f"verifiers: reward {reward.__name__} of {self.taskset!r} needs a runtime (a sandbox); such "
                                 "tasks cannot be played here")


class VerifiersEnvironment:
    """One episode at a time: an environment's `run` waits for a reply at each of its user turns."""

    def __init__(self, family: VerifiersFamily):
        self._family = family
        self._future: Any = None
        self._seat: _Seat | None = None
        self._spoken = False

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        self.close()
        family = self._family
        mine = family.task(task)
        self._seat, self._spoken = _Seat(family), False
        self._future = family.run(self._episode(family.env(task.split), mine, self._seat))
        first = self._wait()
        return Observation(first.text, str(mine.data.system_prompt or ""), first.score, first.done, first.success)

    def step(self, action: str) -> Observation:
        if self._seat is None or self._future is None or self._seat.reply is None:
            raise EnvironmentFailure("not_reset", "verifiers: step before reset, or after the episode's end")
        self._spoken = True
        self._seat.answer(action)
        return self._wait()

    def expert_action(self) -> str | None:
        return None

    def close(self) -> None:
        future, self._future, self._seat = self._future, None, None
        if future is not None:
            future.cancel()

    async def _episode(self, env: Any, task: Any, seat: _Seat) -> None:
        """Play the environment's own `run`; what happens goes to the seat's queue."""
        from verifiers.v1.episode import EnvInfo, Episode
        from verifiers.v1.trace import TraceTask

        try:
            await env.run(task, _Agents({self._family.seat: seat}))
            episode = Episode(env=EnvInfo(id=env.config.env_id), task=TraceTask(
                type=type(task).__name__, data=task.data, key=task.key, hash=task.hash))
            episode.traces.extend(seat.traces)
            await env.finalize(task, episode)
            seat.said.put(("over", sum(trace.reward for trace in seat.traces)))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - told to whoever waits
            seat.said.put(("error", error))

    def _wait(self) -> Observation:
        family, seat = self._family, self._seat
        try:
            kind, what = seat.said.get(timeout=family.timeout_s)
        except queue.Empty:
            self.close()
            said = f"{family.taskset} gave no answer in {family.timeout_s:g} s"
            raise EnvironmentFailure("verifiers_timeout", said) from None
        if kind == "asks":
            return Observation(what)
        self._future = None
        if kind == "error":
            if family.errors_are == "model" and self._spoken:
                return Observation(f"{type(what).__name__}: {what}", done=True, malformed=True)
            raise EnvironmentFailure("verifiers_error", f"{family.taskset}: {type(what).__name__}: {what}") from what
        return Observation("", score=min(1.0, max(0.0, what / family.full_reward)), done=True,
                           success=what >= family.success_at)


class _Agents:
    """What an environment's `run` gets: its one agent by name."""

    def __init__(self, seats: Mapping[str, Any]):
        self.__dict__.update(seats)


class _Seat:
    """An agent whose words come from outside: `said` tells what it is asked ("asks", text), of the end ("over", reward) and
    of exceptions ("error", …); `answer` gives its reply."""

    def __init__(self, family: VerifiersFamily):
        self.family = family
        self.said: queue.Queue = queue.Queue()
        self.reply: asyncio.Future | None = None
        self.traces: list[Any] = []
        self.trainable = True

    def answer(self, text: str) -> None:
        reply, self.reply = self.reply, None
        reply.get_loop().call_soon_threadsafe(lambda: reply.done() or reply.set_result(text))

    async def ask(self, text: str) -> str:
        self.reply = asyncio.get_running_loop().create_future()
        self.said.put(("asks", text))
        return await self.reply

    async def run(self, task: Any, **_: Any) -> Any:
        """A whole run on a task that asks for itself: its prompt, one reply."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return talk.trace

    @contextlib.asynccontextmanager
    async def interaction(self, task: Any, **_: Any):
        """The turns of one run; with its end the task judges it."""
        talk = _Interaction(self, task)
        await _call(task.setup, talk.trace)
        yield talk
        talk.trace.is_completed = talk.trace.ok = True
        await _call(task.finalize, talk.trace)
        await task.score(talk.trace)
        self.traces.append(talk.trace)


class _Interaction:
    """User turns in, replies out, both written into a trace as verifiers keeps it."""

    def __init__(self, seat: _Seat, task: Any):
        from verifiers.v1.trace import AgentInfo, Trace, TraceTask

        vf = seat.family.vf
        self._seat, self._task, self._begun = seat, task, False
        self.trace = Trace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            agent=AgentInfo(config=vf.AgentConfig(), name=seat.family.seat), state=_state_of(type(task))())
        if task.data.system_prompt:
            self._write({"role": "system", "content": task.data.system_prompt})

    async def turn(self, message: Any = None) -> Any:
        """One user turn and the reply to it; without a message the task's own prompt. Raises ValueError where there is
        neither, or both."""
        from verifiers.v1.agent import Segment
        from verifiers.v1.types import content_text

        own = None if self._begun else self._task.data.prompt
        if (message is None) == (own is None):
            raise ValueError("a turn needs a message, and the first of a task with a prompt has none")
        self._begun = True
        if await self._stopped():
            return Segment(messages=[], terminated=True)
        given = own if message is None else message
        before = len(self.trace.nodes)
        for one in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            self._write(one)
        shown = [content_text(node.message.content) for node in self.trace.nodes[before:]]
        reply = await self._seat.ask("\n\n".join(text for text in shown if text))
        self._write({"role": "assistant", "content": reply}, sampled=True)
        return Segment(messages=[self.trace.nodes[-1].message])

    async def _stopped(self) -> bool:
        from verifiers.v1.trace import Trace
        from verifiers.v1.utils.decorators import invoke

        for predicate in self._task.hooks("stop"):
            if await _awaited(invoke(predicate, {"trace": self.trace, "task": self._task.data, Trace: self.trace})):
                self.trace.stop_condition = predicate.__name__
                return True
        return False

    def _write(self, message: Any, *, sampled: bool = False) -> None:
        from verifiers.v1.dialects import parse_message
        from verifiers.v1.graph import MessageNode

        typed = parse_message(message) if isinstance(message, dict) else message
        parent = len(self.trace.nodes) - 1 if self.trace.nodes else None
        self.trace.nodes.append(MessageNode(parent=parent, message=typed, sampled=sampled))


def _state_of(kind: type) -> type:
    """The class of a task's state, verifiers' plain one where it names none."""
    from verifiers.v1.state import State
    from verifiers.v1.utils.generic import concrete_type

    return concrete_type(kind, State) or State


async def _end_all() -> None:
    """Cancel the episodes of this event loop, and stop it."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)
    asyncio.get_running_loop().stop()


async def _call(hook: Any, trace: Any) -> None:
    """A task's `setup` or `finalize`, with what of its parameters there is."""
    from verifiers.v1.utils.decorators import invoke

    await _awaited(invoke(hook, {"trace": trace, "runtime": None}))


async def _awaited(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) or isinstance(value, asyncio.Future) else value


def _version_of(taskset: str) -> str:
    """The installed version of a taskset's package, else its name alone."""
    name = taskset.rsplit("/", 1)[-1].split("@", 1)[0]
    try:
        return f"{name} {importlib.metadata.version(name)}"
    except importlib.metadata.PackageNotFoundError:
        return name
