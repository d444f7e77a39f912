"""What a teacher says about a micro-batch, and how the learner asks for it. Implementations live with the teachers."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection
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
    top_ids   long [N, k] or None: the teacher's likeliest ids, and top_logprob float32 [N, k] their log π_T; a missing row
              is NaN throughout. `logprob` may then be NaN where the teacher rules the label out
    over_candidates   `logprob` was renormalised over the micro-batch's candidate sets; a scorer that cannot leaves it
                      False, and is of use for such tokens only by its logits or hidden states
    """

    teacher: str
    logprob: torch.Tensor | None
    logits: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    head: Head | None = None
    missing: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    top_ids: torch.Tensor | None = None
    top_logprob: torch.Tensor | None = None
    over_candidates: bool = False

    def scored(self) -> torch.Tensor:
        """bool [N]: which tokens have a usable score."""
        if self.top_logprob is not None:
            return ~torch.isnan(self.top_logprob).any(dim=-1)
        if self.logprob is not None:
            return torch.isfinite(self.logprob)
        return torch.isfinite(self.hidden).all(dim=-1)


def what_to_ask(gives: Collection[str], needs: str, top_k: int = 0) -> tuple[str, int]:
    """(need, k) to ask a scorer for that gives this much, for an objective's `needs` and `top_k`.

    Hidden states rather than logits, which are then made a chunk at a time next to the student's; the likeliest ids only
    from a scorer that has neither."""
    if needs != "full" or "hidden" in gives:
        return ("hidden" if needs == "full" else needs), 0
    return ("top_k", top_k) if top_k and "full" not in gives and "top_k" in gives else ("full", 0)


class Scorer(Protocol):
    """Scores a micro-batch. `need` is "full" (logits wanted), "sampled" (the label's log-probability is enough), "hidden"
    (hidden states and head) or "top_k" (with a further `k`: that many likeliest ids), and a scorer is asked for the last two
    only where its `gives` has them. Where the micro-batch has
    candidates, log-probabilities are renormalised over them (`over_candidates`); logits and hidden states stay whole."""

    def __call__(self, batch: MicroBatch, *, need: str, temperature: float) -> Scores: ...
