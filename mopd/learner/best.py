"""Evaluations of a run while it trains: which was the best, its weights, and when to stop.

The weights of the best evaluation lie in one safetensors file (only what trains), the history goes into the run's
checkpoints, so that a run that was killed goes on with the same history.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mopd.learner.moe import gathered


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What one evaluation found.

    rank    how good it is: higher is better, compared part by part (success share, then mean score)
    record  what to show and to write down, JSON values
    """

    rank: tuple[float, ...]
    record: dict[str, Any]


class Evaluations:
    """The evaluations of one run in order: `history` [(step, Evaluation)].

    model     whose trainable weights are kept at the best one
    folder    where they are kept; None keeps them in memory, which no restart survives
    patience  evaluations without a new best after which the run is `over`; 0: never
    writes    whether this process writes files (rank 0)
    """

    def __init__(self, model: nn.Module, folder: Path | None, *, patience: int = 0, writes: bool = True):
        self.model, self.folder, self.patience, self.writes = model, folder, patience, writes
        self.history: list[tuple[int, Evaluation]] = []
        self._memory: dict[str, torch.Tensor] = {}

    @property
    def best(self) -> tuple[int, Evaluation] | None:
        """The first of the evaluations with the highest rank."""
        return max(self.history, key=lambda one: (one[1].rank, -one[0]), default=None)

    @property
    def over(self) -> bool:
        """Whether the last `patience` evaluations brought no new best."""
        if not self.patience or not self.history:
            return False
        steps = [step for step, _ in self.history]
        return len(steps) - 1 - steps.index(self.best[0]) >= self.patience

    def add(self, step: int, evaluation: Evaluation) -> None:
        """Take in the evaluation after `step` steps; a new best's weights are kept. Every rank must call it."""
        self.history.append((step, evaluation))
        if self.best[0] != step:
            return
        weights = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                with gathered(parameter):
                    weights[name] = parameter.detach().cpu().clone().contiguous()
        if self.folder is None:
            self._memory = weights
        elif self.writes:
            from safetensors.torch import save_file

            self.folder.mkdir(parents=True, exist_ok=True)
            aside = self.folder / f".{self._file(step).name}.writing"
            save_file(weights, aside)
            with open(aside, "rb") as file:
                os.fsync(file.fileno())
            aside.replace(self._file(step))

    def tidy(self) -> None:
        """Remove the weights that no checkpoint can ask for any more; call it when one with the history was written."""
        if self.folder is None or not self.writes or not self.history:
            return
        for file in self.folder.glob("*.safetensors*"):
            if file != self._file(self.best[0]):
                file.unlink()

    def restore(self, model: nn.Module) -> None:
        """Put the best evaluation's weights into `model`. Raises FileNotFoundError where their file is gone."""
        if self.best is None:
            return
        weights = self._memory
        if self.folder is not None:
            from safetensors.torch import load_file

            weights = load_file(self._file(self.best[0]))
        named = dict(model.named_parameters())
        with torch.no_grad():
            for name, tensor in weights.items():
                named[name].copy_(tensor)

    def state(self) -> list:
        """The history as JSON values."""
        return [[step, list(one.rank), one.record] for step, one in self.history]

    def load(self, state: list) -> None:
        """Take the history of a checkpoint."""
        self.history = [(int(step), Evaluation(tuple(rank), record)) for step, rank, record in state]

    def _file(self, step: int) -> Path:
        return self.folder / f"step-{step}.safetensors"
