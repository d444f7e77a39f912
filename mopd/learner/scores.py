"""What a teacher says about a micro-batch, and how the learner asks for it. Implementations live with the teachers."""

from __future__ import annotations

import collections
import dataclasses
from typing import Protocol

import torch

from mopd.learner.packing import MicroBatch
from mopd.losses.chunked import Head


@dataclasses.dataclass
class Scores:
    """A teacher's scores of a micro-batch's N loss tokens, without any graph.

    teacher   id of the teacher that scored
    logprob   float32 [N], log π_T of the label at the asked temperature; NaN where missing. None where hidden states
              say it
    logits    float32 [N, V] or None, unscaled; a missing row is NaN throughout
    hidden    [N, H] or None: with `head` they stand for the logits, which are then made next to the loss, a chunk at a
              time; a missing row is NaN throughout
    head      the teacher's output head, cut to the ids that teacher and student share
    missing   how many tokens have no usable score, by reason
    over_candidates   `logprob` was renormalised over the micro-batch's candidate sets; a scorer that cannot leaves it
                      False, and is of use for such tokens only by its logits or hidden states
    """

    teacher: str
    logprob: torch.Tensor | None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    head: Head | None = None
    missing: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    over_candidates: bool = False

    def scored(self) -> torch.Tensor:
        """bool [N]: which tokens have a usable score."""
        if self.logprob is not None:
            return torch.isfinite(self.logprob)
        return torch.isfinite(self.hidden).all(dim=-1)


class Scorer(Protocol):
    """Scores a micro-batch. `need` is "full" (logits wanted), "sampled" (the label's log-probability is enough), or
    "hidden" (hidden states and head), which only a scorer whose `gives` has it is asked for. Where the micro-batch has
    candidates, log-probabilities are renormalised over them (`over_candidates`); logits and hidden states stay whole."""

    def __call__(self, batch: MicroBatch, *, need: str, temperature: float) -> Scores: ...
