"""reasoning-gym's procedural tasks: a question, one answer, scored by the dataset's own checker."""

from __future__ import annotations

import functools
import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

from mopd.environments.base import Task
from mopd.environments.single_turn import Question, SingleTurnEnvironment, checked_sizes, require_split

SPLIT_START = {"train": 0, "development": 100_000_000, "test": 200_000_000}
SPLIT_ROOM = 100_000_000
DEFAULT_SIZES = {"train": 10_000, "development": 500, "test": 500}


class ReasoningGymFamily:
    """Datasets by their names in reasoning-gym.

    datasets    names, or name → the dataset's own options; a split's tasks take the datasets in turn
    sizes       tasks of each split; task i of a dataset's split s has the seed SPLIT_START[s] + i, so splits are disjoint in
                seeds (a dataset with few different questions may still repeat one)
    success_at  a score of at least this is a success; many checkers give part of the score for an answer in the wrong form
    The expert gives the dataset's answer; a dataset without one has no expert for that task.
    """

    def __init__(self, *, datasets: Sequence[str] | Mapping[str, Mapping[str, Any]] = ("basic_arithmetic",),
                 sizes: Mapping[str, int] | None = None, success_at: float = 1.0):
        import reasoning_gym
        from reasoning_gym.factory import DATASETS

        if isinstance(datasets, str):
            raise ValueError(f"reasoning_gym: `datasets` is {datasets!r}; it must be a list of names or a mapping")
        given = datasets if isinstance(datasets, Mapping) else dict.fromkeys(datasets)
        self.datasets = {str(name): dict(options or {}) for name, options in given.items()}
        if not self.datasets:
            raise ValueError("reasoning_gym: `datasets` is empty; name at least one, for instance basic_arithmetic")
        for name, options in self.datasets.items():
            if name not in DATASETS:
                raise ValueError(f"reasoning_gym: no dataset {name!r}; there are: {', '.join(sorted(DATASETS))}")
            for key in ("seed", "size"):
                if key in options:
                    raise ValueError(f"reasoning_gym: datasets.{name}.{key} is set by `sizes` and the split; leave it out")
        self.sizes = checked_sizes("reasoning_gym", sizes, DEFAULT_SIZES, SPLIT_ROOM)
        if not 0 < success_at <= 1:
            raise ValueError(f"reasoning_gym: success_at is {success_at}; it must be above 0, at most 1")
        self.success_at = success_at
        self._create = reasoning_gym.create_dataset
        for name in self.datasets:
            self._dataset(name, "test")  # its own options are checked by making it
        self.name = "reasoning_gym"
        written = "; ".join(f"{name} {sorted(options.items())}" for name, options in self.datasets.items() if options)
        self.version = f"reasoning-gym {importlib.metadata.version('reasoning-gym')}" + (f", {written}" if written else "")
        self.system_prompt = "Give the answer alone."

    def tasks(self, split: str) -> list[Task]:
        require_split(split)
        names = list(self.datasets)
        return [Task(names[i % len(names)], SPLIT_START[split] + i // len(names), split) for i in range(self.sizes[split])]

    def create(self) -> SingleTurnEnvironment:
        return SingleTurnEnvironment(self._ask, success_at=self.success_at)

    def close(self) -> None:
        """Nothing is held."""

    def _ask(self, task: Task) -> Question:
        if task.name not in self.datasets:
            raise ValueError(f"reasoning_gym: task {task.name!r} is not among the configured datasets: "
                             f"{', '.join(self.datasets)}")
        dataset = self._dataset(task.name, task.split)
        entry = dataset[task.seed - SPLIT_START[task.split]]
        answer = entry.get("answer")
        return Question(entry["question"], lambda said: dataset.score_answer(said, entry),
                        None if answer is None else str(answer))

    @functools.cache  # noqa: B019 - one family lives as long as its datasets
    def _dataset(self, name: str, split: str) -> Any:
        try:
            return self._create(name, seed=SPLIT_START[split], size=-(-self.sizes[split] // len(self.datasets)),
                                **self.datasets[name])
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"reasoning_gym: dataset {name!r} refuses its options {self.datasets[name]}: "
                             f"{str(error) or type(error).__name__}") from error
