"""A model in this process behind the requests that servers answer: for cross-checks, probes and collecting scores.

The learner itself asks an in-process teacher by micro-batches (`hf.py`), where decision points share their prefix.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mopd.learner.packing import pack
from mopd.rows import Action, Row
from teachers.scoring.hf import HFTeacher
from teachers.scoring.requests import ScoreAnswer, ScoreRequest


class HFBackend:
    """A ScoringBackend over an HFTeacher.

    inner         the teacher; several threads may ask, it works for one at a time
    told          what `identity` says
    batch_tokens  padded tokens of one forward pass
    """

    gives = frozenset({"sampled", "top_k", "hidden", "full"})

    def __init__(self, inner: HFTeacher, *, told: dict[str, Any] | None = None, batch_tokens: int = 4096):
        self.inner, self.teacher, self.batch_tokens = inner, inner.teacher, batch_tokens
        self.ids, self.max_k = inner.ids, inner.ids
        self.told = dict(told or {})
        self.max_tokens = self.told.get("context_tokens")
        self._lock = threading.Lock()

    @property
    def head(self):
        """The output head that turns hidden states into logits, or None where the family has one of its own kind."""
        return self.inner.head

    def identity(self) -> dict[str, Any]:
        """See ScoringBackend."""
        return {**self.told, "capabilities": {"sampled": True, "max_k": self.max_k, "flat": True, "start_offset": True,
                                              "chosen_ids": True, "hidden": self.head is not None, "full": True,
                                              "temperature": True}}

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """See ScoringBackend; requests of one kind and temperature share forward passes."""
        answers: list[ScoreAnswer | None] = [None] * len(requests)
        groups: dict[tuple, list[int]] = {}
        for number, request in enumerate(requests):
            if self.max_tokens is not None and request.stop > self.max_tokens:
                answers[number] = ScoreAnswer.nothing(self.teacher, request,
                                                      f"context longer than the model's {self.max_tokens} tokens")
                continue
            groups.setdefault((request.what, request.k, request.temperature), []).append(number)
        with self._lock:
            for (what, k, temperature), numbers in groups.items():
                chains = _chains(requests, numbers)
                need = what if what in ("hidden", "sampled") else "full"
                for batch in pack([_row(requests, chain) for chain in chains], token_budget=self.batch_tokens, pad_id=0,
                                  domains=("any",), streams=("rollout",)):
                    scores = self.inner(batch, need=need, temperature=temperature)
                    for place in sorted(set(batch.row.tolist())):
                        for action, number in enumerate(chains[place]):
                            mine = ((batch.row == place) & (batch.action == action)).nonzero()[:, 0]
                            answers[number] = self._answer(requests[number], scores, mine, k, temperature)
        return answers

    def _answer(self, request: ScoreRequest, scores, mine: torch.Tensor, k: int, temperature: float) -> ScoreAnswer:
        labels = request.labels.astype(np.int32)
        if request.what == "hidden":
            hidden = scores.hidden[mine].float().cpu().numpy()
            return ScoreAnswer(self.teacher, np.full(len(mine), np.nan, np.float32), hidden=hidden, labels=labels)
        logprob = scores.logprob[mine].float().cpu().numpy()
        lost = int((~np.isfinite(logprob)).sum())
        missing = {", ".join(sorted(scores.missing)): lost} if lost else {}
        if request.what == "sampled":
            return ScoreAnswer(self.teacher, logprob, missing=missing, labels=labels)
        every = torch.log_softmax(scores.logits[mine].float() / temperature, dim=-1)
        top = every.topk(k or every.shape[-1], dim=-1)
        return ScoreAnswer(self.teacher, logprob, top.indices.int().cpu().numpy(), top.values.cpu().numpy(),
                           missing=missing, labels=labels)

    def rest(self) -> None:
        """Its device memory may be given back until it is asked again."""
        self.inner.rest()

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the weights are not what they were."""
        self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


def _chains(requests: Sequence[ScoreRequest], numbers: Sequence[int]) -> list[list[int]]:
    """Numbers of requests that go on from one another (the turns of a played sequence): one pass over the last one's
    context scores them all."""
    chains: list[list[int]] = []
    for number in numbers:
        last, request = requests[chains[-1][-1]] if chains else None, requests[number]
        if last is not None and request.start >= last.stop and np.array_equal(request.tokens[:last.stop],
                                                                              last.tokens[:last.stop]):
            chains[-1].append(number)
        else:
            chains.append([number])
    return chains


def _row(requests: Sequence[ScoreRequest], chain: Sequence[int]) -> Row:
    whole = requests[chain[-1]]
    actions = tuple(Action(
        at=requests[n].start, tokens=requests[n].labels, behaviour_logprob=np.full(len(requests[n]), np.nan, np.float32),
        version=np.full(len(requests[n]), -1, np.int32), branch=False, turn=0, sequence=0, group=0,
        candidates=requests[n].candidates) for n in chain)
    return Row("any", "rollout", whole.tokens[:whole.stop], actions, origin="request")
