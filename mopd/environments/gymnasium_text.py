"""Any Gymnasium environment as text: observations and actions that are text, or made so by functions of one's own."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mopd.environments.base import EnvironmentFailure, Observation, Task
from mopd.environments.single_turn import checked_sizes, named, require_split

SPLIT_START = {"train": 0, "development": 1_000_000, "test": 2_000_000}
SPLIT_ROOM = 1_000_000
DEFAULT_SIZES = {"train": 10_000, "development": 500, "test": 500}


class GymnasiumTextFamily:
    """Gymnasium environments by id. A task is an id and the seed that its `reset` gets.

    ids             ids as gymnasium.make takes them; a split's tasks take them in turn
    make            keyword arguments of gymnasium.make
    modules         modules to import first, which register the ids
    render          what the model reads: `observation` (text observations), `ansi` (the environment's own text picture, with
                    render_mode "ansi"), or a dotted path to (observation, info, environment) → text
    actions         names of a discrete space's actions, in the order of their numbers: a turn is one of these names
    parse           dotted path to (text, environment) → action, None where the text is no action. By default the text itself
                    for a text space (of its own characters and length), the name's number for a discrete one
    instruction     the task in words
    success         `terminated` (the episode ended by itself with a reward above 0 in all), `reward` (all rewards together
                    reach `full_reward`), or a dotted path to (total reward, terminated, info) → bool
    full_reward     rewards of this sum are a score of 1; the score is the sum so far over it, within [0, 1]
    expert          dotted path to (environment) → the expert's next action as text, None where it has none
    system_prompt   by default the names of the actions
    sizes           tasks of each split; seeds start at 0 (train), 1,000,000 (development), 2,000,000 (test)
    """

    def __init__(self, *, ids: Sequence[str], make: Mapping[str, Any] | None = None, modules: Sequence[str] = (),
                 render: str = "observation", actions: Sequence[str] | None = None, parse: str | None = None,
                 instruction: str = "", success: str = "terminated", full_reward: float = 1.0, expert: str | None = None,
                 system_prompt: str | None = None, sizes: Mapping[str, int] | None = None):
        import gymnasium

        key = "gymnasium_text"
        if isinstance(ids, str) or not ids:
            raise ValueError(f"{key}: ids is {ids!r}; it must be a list of at least one id, such as [FrozenLake-v1]")
        for module in modules:
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise ValueError(f"{key}: modules: {module!r} cannot be imported: {error}") from error
        self.ids, self.instruction = tuple(ids), instruction
        self.make = dict(make or {}) | ({"render_mode": "ansi"} if render == "ansi" else {})
        self.actions = None if actions is None else tuple(str(action) for action in actions)
        if self.actions is not None and len({a.casefold() for a in self.actions}) < len(self.actions):
            raise ValueError(f"{key}: actions: {list(self.actions)} has the same name twice")
        if not full_reward > 0:
            raise ValueError(f"{key}: full_reward is {full_reward}; it must be above 0")
        self.full_reward = float(full_reward)
        own = render not in ("observation", "ansi")
        self.render: Callable[..., str] | None = named(f"{key}: render", render) if own else None
        self.ansi = render == "ansi"
        self.parse: Callable[..., Any] | None = None if parse is None else named(f"{key}: parse", parse)
        self.success = success if success in ("terminated", "reward") else named(f"{key}: success", success)
        self.expert: Callable[..., str | None] | None = None if expert is None else named(f"{key}: expert", expert)
        self.sizes = checked_sizes(key, sizes, DEFAULT_SIZES, SPLIT_ROOM)
        self._spaces = gymnasium.spaces
        specs = [self._try(name) for name in self.ids]
        self.name = key
        written = json.dumps([self.make, render, self.actions, parse, instruction, self.full_reward], default=str)
        self.version = f"gymnasium {importlib.metadata.version('gymnasium')}, {', '.join(map(str, specs))}, {written}"
        self.system_prompt = system_prompt if system_prompt is not None else (
            f"Actions: {', '.join(self.actions)}." if self.actions else "Answer with one action.")

    def tasks(self, split: str) -> list[Task]:
        require_split(split)
        return [Task(self.ids[i % len(self.ids)], SPLIT_START[split] + i, split) for i in range(self.sizes[split])]

    def create(self) -> GymnasiumTextEnvironment:
        return GymnasiumTextEnvironment(self)

    def close(self) -> None:
        """Nothing is shared."""

    def world(self, name: str) -> Any:
        """A fresh environment of an id. Raises ValueError where gymnasium cannot make it."""
        import gymnasium

        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return gymnasium.make(name, disable_env_checker=True, **self.make)
        except (gymnasium.error.Error, TypeError, ImportError) as error:
            raise ValueError(f"gymnasium_text: {name} with {self.make or 'no arguments'} cannot be made: {error}") from error

    def _try(self, name: str) -> str:
        """Make an environment once and see that its observations and actions can be text. Returns its id with version."""
        world = self.world(name)
        try:
            if self.render is None and not self.ansi and not isinstance(world.observation_space, self._spaces.Text):
                raise ValueError(f"gymnasium_text: observations of {name} are {world.observation_space}, no text; set render "
                                 "to a function that writes them, or to ansi")
            space = world.action_space
            if self.parse is None and isinstance(space, self._spaces.Discrete):
                if self.actions is None or len(self.actions) != int(space.n):
                    raise ValueError(f"gymnasium_text: {name} has {int(space.n)} actions; name as many in actions "
                                     f"({len(self.actions or ())} given), or set parse")
            elif self.parse is None and not isinstance(space, self._spaces.Text):
                raise ValueError(f"gymnasium_text: actions of {name} are {space}, no text and no discrete set; set parse to "
                                 "a function that reads them")
            return world.spec.id
        finally:
            world.close()


class GymnasiumTextEnvironment:
    """One episode at a time. A text that is no action is `malformed`: the world stands still, the turn counts."""

    def __init__(self, family: GymnasiumTextFamily):
        self._family = family
        self._worlds: dict[str, Any] = {}
        self._world: Any = None
        self._view, self._reward, self._over = "", 0.0, True

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        if task.name not in self._family.ids:
            raise ValueError(f"gymnasium_text: task {task.name!r} is not among the configured ids: "
                             f"{', '.join(self._family.ids)}")
        if task.name not in self._worlds:
            self._worlds[task.name] = self._family.world(task.name)
        self._world = self._worlds[task.name]
        # What an environment draws besides its own generator comes from the spaces.
        self._world.action_space.seed(task.seed)
        self._world.observation_space.seed(task.seed)
        observation, info = self._world.reset(seed=task.seed)
        self._reward, self._over = 0.0, False
        return self._observe(observation, info)

    def step(self, action: str) -> Observation:
        if self._over:
            raise EnvironmentFailure("not_reset", "gymnasium_text: step before reset, or after the episode's end")
        read = self._read(action)
        if read is None:
            return Observation(f"unknown action. {self._view}", self._family.instruction, self._score, admissible=self._names,
                               malformed=True)
        observation, reward, terminated, truncated, info = self._world.step(read)
        self._reward += float(reward)
        self._over = bool(terminated or truncated)
        success = self._succeeded(bool(terminated), info)
        return self._observe(observation, info, success=success)

    def expert_action(self) -> str | None:
        return None if self._family.expert is None or self._over else self._family.expert(self._world)

    def close(self) -> None:
        for world in self._worlds.values():
            world.close()
        self._worlds.clear()
        self._world, self._over = None, True

    @property
    def _names(self) -> tuple[str, ...] | None:
        return self._family.actions

    @property
    def _score(self) -> float:
        return min(1.0, max(0.0, self._reward / self._family.full_reward))

    def _read(self, action: str) -> Any:
        family, space = self._family, self._world.action_space
        if not action.strip():
            return None
        if family.parse is not None:
            return family.parse(action, self._world)
        if family.actions is not None:
            names = [name.casefold() for name in family.actions]
            said = action.strip().casefold()
            if said not in names:
                return None
            number = names.index(said)
            return int(space.start) + number if isinstance(space, family._spaces.Discrete) else family.actions[number]
        return action if action in space else None

    def _succeeded(self, terminated: bool, info: Mapping[str, Any]) -> bool:
        rule = self._family.success
        if rule == "terminated":
            return terminated and self._reward > 0
        if rule == "reward":
            return self._reward >= self._family.full_reward
        return bool(rule(self._reward, terminated, info))

    def _observe(self, observation: Any, info: Mapping[str, Any], *, success: bool = False) -> Observation:
        if self._family.render is not None:
            text = self._family.render(observation, info, self._world)
        else:
            text = self._world.render() if self._family.ansi else observation
        if not isinstance(text, str):
            raise EnvironmentFailure("no_text", f"gymnasium_text: what is to be shown is a {type(text).__name__}, no text")
        self._view = text.strip()
        return Observation(self._view, self._family.instruction, self._score, self._over, success, self._names)
