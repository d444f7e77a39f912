"""The small interface behind which every environment stands.

A *family* (registered by name, or brought by dotted path) owns what its environments share, such as one Java process,
and lists tasks by split; an *environment* plays one task at a time. Trouble that is not the model's raises
EnvironmentFailure, which becomes an infrastructure failure and never a reward.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

SPLITS = ("train", "development", "test")


class EnvironmentFailure(RuntimeError):
    """The environment itself failed (crashed, hung, could not start, replay diverged). `category` is counted."""

    def __init__(self, category: str, message: str):
        super().__init__(f"{category}: {message}")
        self.category = category


@dataclasses.dataclass(frozen=True)
class Task:
    """One playable task. `name` groups tasks of a kind (`coin`, `find-plant`, a BabyAI level); `seed` picks the one
    (seed or variation number); the pair with `split` is unique in a family and enough to restore the same start."""

    name: str
    seed: int
    split: str


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a player sees. `text` is what the model reads; after reset it is the first view, `instruction` the task in
    words. `score` in [0, 1] is the task's progress so far, `success` its completion; `admissible` is None where the
    environment cannot list actions. `malformed` says that the last action was not understood (a model failure)."""

    text: str
    instruction: str = ""
    score: float = 0.0
    done: bool = False
    success: bool = False
    admissible: tuple[str, ...] | None = None
    malformed: bool = False
    info: dict[str, Any] = dataclasses.field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        """Start `task`; with `expert=True` also prepare `expert_action` (this may cost seconds)."""

    def step(self, action: str) -> Observation:
        """Play one action text. Raises EnvironmentFailure when the environment, not the action, is at fault."""

    def expert_action(self) -> str | None:
        """The expert's next action in the present state; None when the expert has no way on from here."""

    def close(self) -> None: ...


@runtime_checkable
class EnvironmentFamily(Protocol):
    name: str
    version: str
    system_prompt: str
    """What the model is told once, before the instruction: the format of actions, in a few words."""

    def tasks(self, split: str) -> list[Task]:
        """All tasks of a split in a fixed order; the splits are disjoint."""

    def create(self) -> Environment:
        """A fresh environment. Cheap where several can share one process; safe to use from one thread each."""

    def close(self) -> None: ...
