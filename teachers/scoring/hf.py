"""A teacher in this process: a frozen Transformers model that scores the student's packed rows.

It sees the very rows that the learner trains on, so all decision points of a trajectory cost one forward. Nothing of
the student's settings reaches it, and no graph leaves it.
"""

from __future__ import annotations

import torch
from torch import nn

from mopd.learner.forward import apply_head, head_of, hidden_at_loss_tokens
from mopd.learner.moe import weights_hash
from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores
from mopd.losses.chunked import Head, chunked_logprob
from mopd.losses.objectives import label_logprob


class HFTeacher:
    """A frozen causal LM as a scorer.

    teacher      its id
    vocabulary   number of ids that teacher and student share; logits behind them (padding of the output matrix) are
                 cut off, so that the softmax runs over real ids only. None keeps all
    device       where it scores; by default where the model lies
    offload      between uses the weights lie in the host's memory (pinned, where `device` is a GPU); the first call after
                 a `rest` brings them back. They are frozen, so nothing is ever copied the other way
    """

    gives = frozenset({"sampled", "full", "hidden"})
    collective = False  # whether every rank must make every call

    def __init__(self, model: nn.Module, *, teacher: str, vocabulary: int | None = None,
                 device: torch.device | str | None = None, offload: bool = False):
        self.model = model.eval().requires_grad_(False)
        self.teacher, self.vocabulary = teacher, vocabulary
        self.device = torch.device(device) if device is not None else next(model.parameters()).device
        self.offloaded = Offloaded(self.model, self.device) if offload else None
        if not offload:
            self.model.to(self.device)
        self.weights_hash = self._hash()
        self.scored_tokens = 0
        self.head = self._cut_head()
        weight = model.get_output_embeddings().weight
        if torch.isnan(weight).any():
            raise ValueError(f"the output matrix of teacher {teacher!r} has NaN entries; its checkpoint is damaged")
        self.ids = len(weight) if vocabulary is None else min(vocabulary, len(weight))

    def _cut_head(self) -> Head | None:
        """The output head of the shared ids, where the weights lie now; None for a family with one of its own kind."""
        head = head_of(self.model)
        return None if head is None else head.cut(self.vocabulary)

    def _states(self, batch: MicroBatch) -> torch.Tensor:
        """Hidden states of the micro-batch's loss tokens, [N, H]."""
        return hidden_at_loss_tokens(self.model, batch)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Logits float32 [N, V] of hidden states."""
        return apply_head(self.model, states)

    def _hash(self) -> str:
        return weights_hash(self.model)

    @torch.no_grad()
    def __call__(self, batch: MicroBatch, *, need: str = "full", temperature: float = 1.0) -> Scores:
        """Scores of the micro-batch's N loss tokens on its own device: logits and log-probabilities ("full"),
        log-probabilities alone ("sampled", never more than a chunk of logits at once), or hidden states with the head
        ("hidden", no logits at all). Where the micro-batch has candidates, log-probabilities are renormalised over them;
        ids that this teacher does not have get none of its probability. Raises ValueError for an unknown `need`, a
        temperature that is not positive, or a label that the teacher has no id for."""
        if need not in ("full", "sampled", "hidden"):
            raise ValueError(f"need must be 'full', 'sampled' or 'hidden', got {need!r}")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        moved = batch.to(self.device)
        if batch.loss_tokens and int(moved.label.max()) >= self.ids:
            raise ValueError(f"teacher {self.teacher!r} has {self.ids} ids, but the student wrote id "
                             f"{int(moved.label.max())}; their tokenizers differ")
        self.scored_tokens += batch.loss_tokens
        if self.offloaded is not None and self.offloaded.bring():
            self.head = self._cut_head()
        candidates = None if moved.candidates is None else moved.candidates.below(self.ids)
        states = self._states(moved)
        device = batch.label.device
        # Missing is NaN, never 0.0 (which would be certainty); each reason is counted.
        if need == "hidden" and self.head is not None:
            broken = ~torch.isfinite(states).all(dim=1)
            states = states.masked_fill(broken[:, None], torch.nan)
            return self._counted(Scores(self.teacher, None, hidden=states.to(device), head=self.head), broken, None)
        if need == "sampled" and self.head is not None:
            head = self.head
            logprob = chunked_logprob(states, head.weight, moved.label, bias=head.bias, temperature=temperature,
                                      scale=head.spec.scale, softcap=head.spec.softcap, candidates=candidates)
            logits, broken = None, ~torch.isfinite(states).all(dim=1) | torch.isnan(logprob)
        else:
            logits = self._logits(states)[:, :self.vocabulary]
            logprob = label_logprob(logits, moved.label, temperature, candidates)
            broken = ~torch.isfinite(logits).all(dim=1)
        unlikely = torch.isneginf(logprob) & ~broken
        scores = Scores(self.teacher, torch.where(broken | unlikely, torch.nan, logprob).to(device), over_candidates=True)
        if need != "sampled":
            scores.logits = torch.where(broken[:, None], torch.nan, logits).to(device)
        return self._counted(scores, broken, unlikely)

    @staticmethod
    def _counted(scores: Scores, broken: torch.Tensor, unlikely: torch.Tensor | None) -> Scores:
        for reason, lost in (("non-finite logits", broken), ("log-probability -inf", unlikely)):
            if lost is not None and (count := int(lost.sum())):
                scores.missing[reason] = count
        return scores

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the weights are not what they were when they were loaded."""
        if self._hash() != self.weights_hash:
            raise RuntimeError(f"the weights of teacher {self.teacher!r} changed during the run; something trains it")

    def rest(self) -> None:
        """The step's scoring is over: with `offload` the weights leave the device."""
        if self.offloaded is not None and self.model is not None:
            self.offloaded.send()
            self.head = self._cut_head()

    def close(self) -> None:
        """The model is forgotten; nothing else is held."""
        self.model = self.offloaded = None


class Offloaded:
    """A frozen model whose weights are on their device only between `bring` and `send`.

    The host's copies are made once (pinned where the device is a GPU, so that they come back at the bus's speed);
    `send` drops the device's. On a CPU both are one and nothing moves. `moves` counts how often they were brought.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.device, self.moves, self.here = device, 0, False
        self._tensors = list(dict.fromkeys([*model.parameters(), *model.buffers()]))
        pinned = device.type == "cuda"
        self._host = [t.detach().cpu().pin_memory() if pinned else t.detach().cpu() for t in self._tensors]
        self.send()

    def bring(self) -> bool:
        """Put the weights on the device; whether they had to be moved."""
        if self.here:
            return False
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host.to(self.device, non_blocking=True)
        self.here, self.moves = True, self.moves + 1
        return True

    def send(self) -> None:
        """Leave only the host's copy."""
        for tensor, host in zip(self._tensors, self._host, strict=True):
            tensor.data = host
        self.here = False
