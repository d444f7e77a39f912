"""Several weighted teachers that score as one: a scorer made of scorers (the formulas stand in mopd/losses/mixture.py)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores
from mopd.losses.chunked import chunk_rows
from mopd.losses.mixture import KINDS, MixtureHead, mixture_logits, mixture_logprob
from mopd.losses.objectives import label_logprob
from teachers.scoring.base import TeacherScorer


class MixtureScorer:
    """A weighted mixture of teachers on every sample.

    members   the teachers' scorers; they stay their owner's, who closes them
    weights   one per member, positive; they are scaled to the sum 1
    kind      "probability" (Σ w_i π_i) or "log_space" (Π π_i^w_i / Z)

    A token that one member has no score for has none in the mixture: without it the weights would mean something else. It
    is counted once, under the first such member. Where the micro-batch has candidates, the mixture is renormalised over
    them (a mixture of renormalised teachers would be another distribution), which needs every member's whole
    distribution. Raises ValueError for a kind, weights or members that do not fit: a mixture in log space of teachers
    that give the sampled token's score alone cannot be had exactly.
    """

    def __init__(self, members: Sequence[TeacherScorer], weights: Sequence[float], kind: str = "probability"):
        if kind not in KINDS:
            raise ValueError(f"unknown mixture {kind!r}; there are: {', '.join(KINDS)}")
        if len(members) != len(weights) or not members or not all(0 < w < float("inf") for w in weights):
            raise ValueError(f"a mixture needs one positive weight per teacher, got {list(weights)} for {len(members)}")
        self.members, self.kind = tuple(members), kind
        self.weights = tuple(float(w) / sum(weights) for w in weights)
        self.teacher = " + ".join(f"{w:.3g} {m.teacher}" for w, m in zip(self.weights, self.members, strict=True))
        self.collective = any(getattr(m, "collective", False) for m in self.members)
        whole = all("full" in m.gives for m in self.members)
        if kind == "log_space" and not whole:
            lacking = ", ".join(m.teacher for m in self.members if "full" not in m.gives)
            raise ValueError(f"the mixture in log space needs whole distributions, and {lacking} gives the sampled token's "
                             "score only; take the mixture 'probability', or teachers in this process")
        if whole and len({getattr(m, "ids", None) for m in self.members}) > 1:
            sizes = ", ".join(f"{m.teacher} {getattr(m, 'ids', None)}" for m in self.members)
            raise ValueError(f"the teachers of a mixture score different numbers of ids ({sizes}); their softmaxes would not "
                             "be over the same ids")
        hidden = all("hidden" in m.gives and getattr(m, "head", None) is not None for m in self.members)
        self.gives = frozenset({"sampled"} | ({"full"} if whole else set()) | ({"hidden"} if hidden else set()))

    @torch.no_grad()
    def __call__(self, batch: MicroBatch, *, need: str = "full", temperature: float = 1.0) -> Scores:
        """See `mopd.learner.scores.Scorer`. With "sampled" the mixture in log space, and every mixture over candidates, reads
        whole distributions all the same, a chunk of tokens at a time where the teachers can say them by hidden states.
        Raises ValueError for candidates where a member gives the sampled token's score only."""
        if need not in ("full", "sampled", "hidden"):
            raise ValueError(f"need must be 'full', 'sampled' or 'hidden', got {need!r}")
        ask = need
        if need == "hidden" and "hidden" not in self.gives:
            ask = "full"
        elif need == "sampled" and (self.kind == "log_space" or batch.candidates is not None):
            ask = "hidden" if "hidden" in self.gives else "full"
        if batch.candidates is not None and ask not in self.gives:
            raise ValueError(f"the mixture {self.teacher} cannot be renormalised over candidate sets (train.top_p, "
                             "train.top_k): it needs whole distributions, and a member gives the sampled token's score only")
        found = [member(batch, need=ask, temperature=temperature) for member in self.members]
        scores = self._mixed(found, ask, need, batch, temperature)
        taken = torch.zeros(batch.loss_tokens, dtype=torch.bool, device=batch.label.device)
        for part in found:
            lost = ~part.scored() & ~taken
            taken |= lost
            if count := int(lost.sum()):
                scores.missing[f"{part.teacher}: {', '.join(sorted(part.missing)) or 'no score'}"] = count
        return scores

    def _mixed(self, found: list[Scores], ask: str, need: str, batch: MicroBatch, temperature: float) -> Scores:
        if ask == "hidden":
            head = MixtureHead(tuple(part.head for part in found), self.weights, self.kind, temperature)
            hidden = torch.cat([part.hidden for part in found], dim=-1)
            # A missing row is NaN throughout, whichever part of it is.
            hidden = hidden.masked_fill(~torch.isfinite(hidden).all(dim=-1, keepdim=True), torch.nan)
            if need == "hidden":
                return Scores(self.teacher, None, hidden=hidden, head=head)
            head, step = head.to(hidden.device), chunk_rows(self._width(found))
            parts = [slice(i, i + step) for i in range(0, max(len(hidden), 1), step)]
            logprob = [_label(head.logits(hidden[rows]), batch.chosen(rows), temperature) for rows in parts]
            return Scores(self.teacher, torch.cat(logprob), over_candidates=True)
        if ask == "sampled":
            # Without candidates every member's score is over all ids, and so is this one.
            return Scores(self.teacher, mixture_logprob([part.logprob for part in found], self.weights),
                          over_candidates=batch.candidates is None)
        logits = mixture_logits([part.logits for part in found], self.weights, self.kind, temperature)
        return Scores(self.teacher, _label(logits, batch, temperature), None if need == "sampled" else logits,
                      over_candidates=True)

    @staticmethod
    def _width(found: list[Scores]) -> int:
        return sum(len(part.head.weight) for part in found)

    def rest(self) -> None:
        """The step's scoring is over."""
        for member in self.members:
            member.rest()

    def check_unchanged(self) -> None:
        """Raise RuntimeError where a member's weights are not what they were when it was loaded."""
        for member in self.members:
            member.check_unchanged()

    def close(self) -> None:
        """The members are their owner's."""


def _label(logits: torch.Tensor, batch: MicroBatch, temperature: float) -> torch.Tensor:
    """log softmax(logits[n, V] / temperature) of the labels of n loss tokens, over their candidates, [n]; NaN where the row
    is."""
    candidates = None if batch.candidates is None else batch.candidates.below(logits.shape[-1])
    return label_logprob(logits, batch.label, temperature, candidates)
