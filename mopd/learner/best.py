"""What was best in a run while it trains: evaluations with their weights, or a smoothed metric of its steps.

The weights of the best evaluation lie in one safetensors file (only what trains), the history goes into the run's
checkpoints, so that a run that was killed goes on with the same history.
"""

from __future__ import annotations

import dataclasses
import math
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


RUN_SCORES = ("reverse_kl", "success", "reward")
_SMOOTHING = 0.9  # weight of the past per step: about ten steps' mean


class RunScore:
    """How good a run is while it trains, for `train.keep_best`: a metric of each domain smoothed over the steps that have it,
    and the plain mean over domains, so that shares which change move nothing.

    name  one of RUN_SCORES, of what the student itself sampled: the reverse KL to the teacher (the lower the better), success
          share, score; empty: nothing is observed
    """

    def __init__(self, name: str):
        if name and name not in RUN_SCORES:
            raise ValueError(f"a run's score is one of {', '.join(RUN_SCORES)}, got {name!r}")
        self.name = name
        self._means: dict[str, list[float]] = {}  # domain -> [smoothed sum, smoothed count]

    def observe(self, record: dict[str, Any]) -> None:
        """Take in a step's record (mopd.run_records.step_record)."""
        if not self.name:
            return
        for domain, numbers in record["domains"].items():
            keys = ("reverse_kl_exact", "reverse_kl_k3") if self.name == "reverse_kl" else (self.name,)
            value = next((numbers[key] for key in keys if numbers.get(key) is not None), None)
            if value is None or not math.isfinite(value):
                continue
            total, count = self._means.get(domain, [0.0, 0.0])
            self._means[domain] = [_SMOOTHING * total + value, _SMOOTHING * count + 1.0]

    @property
    def score(self) -> float | None:
        """The higher the better; None before anything was observed."""
        if not self._means:
            return None
        mean = sum(total / count for total, count in self._means.values()) / len(self._means)
        return -mean if self.name == "reverse_kl" else mean

    def state_dict(self) -> dict[str, Any]:
        return {"name": self.name, "means": self._means}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Another metric's state, or none, is left alone: the smoothing then begins here."""
        if state.get("name") == self.name:
            self._means = {domain: list(pair) for domain, pair in state["means"].items()}
