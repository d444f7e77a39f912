"""MiniGrid's BabyAI levels as text: what the agent sees in front of it, and six actions in words.

The text view is written here from the agent's own 7 x 7 egocentric view; nothing that the agent cannot see enters it.
"""

from __future__ import annotations

import importlib.metadata
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mopd.environments.base import SPLITS, EnvironmentFailure, Observation, Task

ACTIONS = {"turn left": 0, "turn right": 1, "go forward": 2, "pick up": 3, "drop": 4, "toggle": 5}
SPLIT_START = {"train": 0, "development": 100_000, "test": 200_000}
SPLIT_ROOM = 100_000
DEFAULT_SIZES = {"train": 20_000, "development": 1_000, "test": 1_000}
VIEW_VERSION = "1"


class BabyAIFamily:
    """BabyAI levels by their gymnasium ids.

    levels   ids such as `BabyAI-GoToLocalS6N4-v0`; a split's tasks take them in turn
    sizes    tasks of each split; the seeds of split s are SPLIT_START[s] … + size, so splits are disjoint
    """

    def __init__(self, *, levels: Sequence[str] = ("BabyAI-GoToLocalS6N4-v0",), sizes: Mapping[str, int] | None = None):
        _quiet_minigrid()
        import gymnasium

        self.levels = tuple(levels)
        self.sizes = {**DEFAULT_SIZES, **dict(sizes or {})}
        if not self.levels:
            raise ValueError("babyai: `levels` is empty; name at least one, for instance BabyAI-GoToLocalS6N4-v0")
        known = sorted(name for name in gymnasium.registry if name.startswith("BabyAI-"))
        for level in self.levels:
            if level not in known:
                raise ValueError(f"babyai: no level {level!r}; known levels: {', '.join(known)}")
        for split, size in self.sizes.items():
            if split not in SPLITS:
                raise ValueError(f"babyai: `sizes` names the split {split!r}; splits are {', '.join(SPLITS)}")
            if not 0 < size <= SPLIT_ROOM:
                raise ValueError(f"babyai: sizes.{split} is {size}; it must be 1 to {SPLIT_ROOM}")
        self.name = "babyai"
        self.version = f"minigrid {importlib.metadata.version('minigrid')}, view {VIEW_VERSION}"
        self.system_prompt = f"Actions: {', '.join(ACTIONS)}."

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; splits are {', '.join(SPLITS)}")
        start = SPLIT_START[split]
        return [Task(self.levels[i % len(self.levels)], start + i, split) for i in range(self.sizes[split])]

    def create(self) -> BabyAIEnvironment:
        return BabyAIEnvironment()

    def close(self) -> None:
        """Nothing is shared."""


class BabyAIEnvironment:
    """One level at a time. Every text that is no action is `malformed`: the world stands still, the turn counts."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}
        self._world: Any = None
        self._bot: Any = None
        self._last_action: int | None = None
        self._mission = ""

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        import gymnasium
        from minigrid.utils.baby_ai_bot import BabyAIBot

        if task.name not in self._made:
            self._made[task.name] = gymnasium.make(task.name, disable_env_checker=True).unwrapped
        self._world = self._made[task.name]
        raw, _ = self._world.reset(seed=task.seed)
        self._mission = raw["mission"]
        self._bot = BabyAIBot(self._world) if expert else None
        self._last_action = None
        return self._observe(raw["image"])

    def step(self, action: str) -> Observation:
        if self._world is None:
            raise EnvironmentFailure("not_reset", "babyai: step before reset")
        number = ACTIONS.get(action.strip().lower())
        if number is None:
            self._world.step_count += 1
            return self._observe(
                self._world.gen_obs()["image"], malformed=True, done=self._world.step_count >= self._world.max_steps
            )
        raw, reward, terminated, truncated, _ = self._world.step(number)
        self._last_action = number
        return self._observe(raw["image"], success=reward > 0, done=terminated or truncated)

    def expert_action(self) -> str | None:
        """BabyAIBot's next action; it replans after the last action. Ask before every step, or not at all."""
        if self._bot is None:
            return None
        try:
            number = int(self._bot.replan(self._last_action))
        except Exception:  # the bot signals every dead end by an exception of its own, or an assertion
            self._bot = None
            return None
        self._last_action = None
        return next((text for text, code in ACTIONS.items() if code == number), None)

    def close(self) -> None:
        for world in self._made.values():
            world.close()
        self._made.clear()
        self._world = self._bot = None

    def _observe(
        self, image: Any, *, success: bool = False, done: bool = False, malformed: bool = False
    ) -> Observation:
        carrying = self._world.carrying
        text = describe_view(image, None if carrying is None else f"{carrying.color} {carrying.type}")
        if malformed:
            text = f"unknown action. {text}"
        return Observation(text, self._mission, 1.0 if success else 0.0, done, success, tuple(ACTIONS), malformed)


def describe_view(image: Any, carrying: str | None) -> str:
    """Words for an egocentric view.

    image     uint8 [W, H, 3]: (object type, colour, state) by column and row; the agent stands in the middle of the
              last row and looks towards row 0; type 0 is a cell that is out of sight
    carrying  what the agent holds, shown only if something

    First the cell ahead and walls at the sides, then every object in sight, nearest first (steps, then left to right).
    """
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    width, height, _ = image.shape
    column, row = width // 2, height - 1

    def cell(x: int, y: int) -> str:
        if not (0 <= x < width and 0 <= y < height):
            return "unseen"
        kind, colour, state = (int(v) for v in image[x, y])
        name = IDX_TO_OBJECT[kind]
        if name in ("empty", "floor"):
            return "clear"
        if name in ("unseen", "wall", "lava", "goal"):
            return name
        if name == "door":
            return f"{('open', 'closed', 'locked')[state]} {IDX_TO_COLOR[colour]} door"
        return f"{IDX_TO_COLOR[colour]} {name}"

    def short(text: str) -> str:
        return text if text in ("clear", "wall", "unseen", "lava", "goal") else text.split()[-1]

    parts = [f"ahead {short(cell(column, row - 1))}."]
    parts += [f"{side} wall." for side, x in (("left", column - 1), ("right", column + 1)) if cell(x, row) == "wall"]
    seen = []
    for x in range(width):
        for y in range(height):
            what = cell(x, y)
            if (x, y) == (column, row) or what in ("clear", "wall", "unseen"):
                continue
            ahead, side = row - y, x - column
            place = [f"{ahead} ahead"] if ahead else []
            if side:
                place.append(f"{abs(side)} {'left' if side < 0 else 'right'}")
            seen.append((ahead + abs(side), side, f"{what} {' '.join(place)}."))
    parts += [text for _, _, text in sorted(seen)]
    if carrying:
        parts.append(f"carrying {carrying}.")
    return " ".join(parts)


def _quiet_minigrid() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import minigrid  # noqa: F401  registers the levels
        from minigrid.envs.babyai.core import roomgrid_level
    # Level generation prints each rejected sample; only that module's print is silenced.
    roomgrid_level.print = lambda *_, **__: None
