"""A teacher in this process: a frozen Transformers model that scores the student's packed rows.

It sees the very rows that the learner trains on, so all decision points of a trajectory cost one forward. Nothing of
the student's settings reaches it, and no graph leaves it.
"""

from __future__ import annotations

import torch
from torch import nn

from mopd.learner.forward import apply_head, hidden_at_loss_tokens
from mopd.learner.moe import weights_hash
from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores


class HFTeacher:
    """A frozen causal LM as a scorer.

    teacher      its id
    vocabulary   number of ids that teacher and student share; logits behind them (padding of the output matrix) are
                 cut off, so that the softmax runs over real ids only. None keeps all
    """

    gives = frozenset({"sampled", "full", "hidden"})

    def __init__(self, model: nn.Module, *, teacher: str, vocabulary: int | None = None):
        self.model = model.eval().requires_grad_(False)
        self.teacher, self.vocabulary = teacher, vocabulary
        self.device = next(model.parameters()).device
        self.weights_hash = weights_hash(model)
        self.scored_tokens = 0

    @torch.no_grad()
    def __call__(self, batch: MicroBatch, *, need: str = "full", temperature: float = 1.0,
                 hidden: bool = False) -> Scores:
        """Scores of the micro-batch's N loss tokens on its own device. Raises ValueError for an unknown `need`, a
        temperature that is not positive, or a label that the teacher has no id for."""
        if need not in ("full", "sampled"):
            raise ValueError(f"need must be 'full' or 'sampled', got {need!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        moved = batch.to(self.device)
        states = hidden_at_loss_tokens(self.model, moved)
        logits = apply_head(self.model, states)[:, :self.vocabulary]
        if batch.loss_tokens and int(moved.label.max()) >= logits.shape[1]:
            raise ValueError(f"teacher {self.teacher!r} has {logits.shape[1]} ids, but the student wrote id "
                             f"{int(moved.label.max())}; their tokenizers differ")
        logprob = torch.log_softmax(logits / temperature, dim=-1).gather(1, moved.label[:, None])[:, 0]
        broken = ~torch.isfinite(logits).all(dim=1)
        unlikely = torch.isneginf(logprob) & ~broken
        scores = Scores(self.teacher, torch.where(broken | unlikely, torch.nan, logprob).to(batch.label.device))
        # Missing is NaN, never 0.0 (which would be certainty); each reason is counted.
        for reason, count in (("non-finite logits", int(broken.sum())), ("log-probability -inf", int(unlikely.sum()))):
            if count:
                scores.missing[reason] = count
        if need == "full":
            scores.logits = torch.where(broken[:, None], torch.nan, logits).to(batch.label.device)
        if hidden:
            scores.hidden = states.to(batch.label.device)
        self.scored_tokens += batch.loss_tokens
        return scores

    def check_unchanged(self) -> None:
        if weights_hash(self.model) != self.weights_hash:
            raise RuntimeError(f"the weights of teacher {self.teacher!r} changed during the run; something trains it")

    def close(self) -> None:
        """The model is forgotten; nothing else is held."""
        self.model = None
