"""What a teacher says about a micro-batch, and how the learner asks for it. Implementations live with the teachers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

import torch

from mopd.learner.packing import MicroBatch


@dataclasses.dataclass
class Scores:
    """A teacher's scores of a micro-batch's N loss tokens, without any graph.

    teacher   id of the teacher that scored
    logprob   float32 [N], log π_T of the label at the asked temperature; NaN where missing
    logits    float32 [N, V] or None, unscaled; a missing row is NaN throughout
    hidden    [N, H] or None
    missing   how many tokens have no usable score, by reason
    """

    teacher: str
    logprob: torch.Tensor
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    missing: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class Scorer(Protocol):
    """Scores a micro-batch. `need` is "full" (logits wanted) or "sampled" (the label's log-probability is enough)."""

    def __call__(self, batch: MicroBatch, *, need: str, temperature: float) -> Scores: ...
