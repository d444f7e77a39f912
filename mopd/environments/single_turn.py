"""Single-turn tasks: a question, one answer, a checker's score. What reasoning_gym and jsonl_tasks share."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

from mopd.environments.base import SPLITS, EnvironmentFailure, Observation, Task

Checker = Callable[[str], float]
"""An answer as the model gave it → its score in [0, 1]. See SingleTurnEnvironment for what it raises."""


@dataclasses.dataclass(frozen=True)
class Question:
    """`text` is what the model is asked, `check` scores an answer, `answer` is one that is right where one is known."""

    text: str
    check: Checker
    answer: str | None = None
    instruction: str = ""


class SingleTurnEnvironment:
    """Asks one question and is done with the first answer. An empty answer is `malformed` and scores as the checker says.

    ask         Task → Question
    success_at  a score of at least this is a success

    A checker that raises has met an answer that it cannot read, which is `malformed` with score 0, where it takes the right
    answer without raising; else, and where no right answer is known, it is itself at fault: EnvironmentFailure
    `checker_failed`, as for a score outside [0, 1].
    """

    def __init__(self, ask: Callable[[Task], Question], *, success_at: float = 1.0):
        self._ask, self._success_at = ask, success_at
        self._question: Question | None = None

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        self._question = self._ask(task)
        return Observation(self._question.text, self._question.instruction)

    def step(self, action: str) -> Observation:
        if self._question is None:
            raise EnvironmentFailure("not_reset", "step before reset, or after the answer")
        question, self._question = self._question, None
        malformed = not action.strip()
        try:
            score = float(question.check(action))
        except Exception as error:  # noqa: BLE001 - checkers raise whatever reading a wrong answer raises
            if not self._takes_the_right_answer(question):
                said = f"{type(error).__name__}: {error}; the answer was {action[:200]!r}"
                raise EnvironmentFailure("checker_failed", said) from error
            score, malformed = 0.0, True
        if not 0.0 <= score <= 1.0:
            raise EnvironmentFailure("checker_failed", f"the checker gave {score}, which is not between 0 and 1")
        return Observation("", score=score, done=True, success=score >= self._success_at, malformed=malformed)

    @staticmethod
    def _takes_the_right_answer(question: Question) -> bool:
        if question.answer is None:
            return False
        try:
            question.check(question.answer)
        except Exception:  # noqa: BLE001 - it is broken, whatever it raises
            return False
        return True

    def expert_action(self) -> str | None:
        return None if self._question is None else self._question.answer

    def close(self) -> None:
        self._question = None


def checked_sizes(name: str, sizes: Mapping[str, int] | None, usual: Mapping[str, int], room: int) -> dict[str, int]:
    """`sizes` over the usual ones. Raises ValueError for unknown splits and for sizes outside [1, room]."""
    found = {**usual, **dict(sizes or {})}
    for split, size in found.items():
        if split not in SPLITS:
            raise ValueError(f"{name}: `sizes` names the split {split!r}; splits are {', '.join(SPLITS)}")
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= room:
            raise ValueError(f"{name}: sizes.{split} is {size!r}; it must be a whole number from 1 to {room}")
    return found


def require_split(split: str) -> None:
    """Raises ValueError for what is no split."""
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; splits are {', '.join(SPLITS)}")


def named(key: str, path: str) -> Any:
    """What a dotted path (`package.module:name`, also `package.module.name`) of an option `key` names. Raises ValueError."""
    module_name, separator, attribute = path.partition(":") if ":" in path else path.rpartition(".")
    if not separator:
        raise ValueError(f"{key}: {path!r} is no dotted path; write package.module:name")
    try:
        found: Any = importlib.import_module(module_name)
        for part in attribute.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{key}: {path!r} cannot be found: {error}") from error
    return found
