"""Candidate sets: over which ids the behaviour policy renormalised each token (top-k, top-p). A ragged list as tensors.

Under top-p or top-k µ is the softmax restricted to a set. Student and teacher are renormalised over the *same* set, so
that with unchanged weights ρ_t = π_θ/µ = 1 to rounding (candidate replay).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class CandidateSets:
    """One set of ids per token, N tokens.

    ids      int32 [M], the sets one after another, without repeats inside a set
    offsets  int64 [N + 1]: token i's set is ids[offsets[i] : offsets[i + 1]]. An empty one means that nothing was cut
             there: the whole vocabulary (a set from which a token was drawn cannot be empty)
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, sets: Iterable[Any | None]) -> CandidateSets:
        """From one array-like of ids per token, None where nothing was cut. Raises ValueError for an empty set."""
        arrays = [None if ids is None else np.asarray(ids, dtype=np.int32).reshape(-1) for ids in sets]
        for position, ids in enumerate(arrays):
            if ids is not None and not len(ids):
                raise ValueError(f"position {position}: the candidate set is empty; None means that nothing was cut off")
        counts = np.array([0 if ids is None else len(ids) for ids in arrays], dtype=np.int64)
        listed = [ids for ids in arrays if ids is not None]
        ids = np.concatenate(listed) if listed else np.zeros(0, np.int32)
        return cls(torch.from_numpy(ids), torch.from_numpy(np.concatenate([[0], np.cumsum(counts)])))

    def __len__(self) -> int:
        """N."""
        return len(self.offsets) - 1

    @property
    def counts(self) -> Tensor:
        """int64 [N]: sizes of the sets, 0 where nothing was cut."""
        return self.offsets.diff()

    def sets(self) -> list[np.ndarray | None]:
        """One int32 array per token, None where nothing was cut: the form that `of` takes."""
        ids, offsets = self.ids.cpu().numpy(), self.offsets.tolist()
        return [ids[a:b] if b > a else None for a, b in zip(offsets, offsets[1:], strict=False)]

    def owner(self) -> Tensor:
        """int64 [M]: the token to which each of `ids` belongs."""
        return torch.repeat_interleave(torch.arange(len(self), device=self.ids.device), self.counts)

    def __getitem__(self, rows: slice | Tensor | tuple[Tensor]) -> CandidateSets:
        """Those of some tokens: a slice without a step, or int64 [n] numbers (also as the 1-tuple that indexes tensors)."""
        if isinstance(rows, slice):
            start, stop, step = rows.indices(len(self))
            if step != 1:
                raise ValueError(f"a slice of candidate sets takes no step, got {rows}")
            offsets = self.offsets[start : max(stop, start) + 1]
            return CandidateSets(self.ids[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        chosen = rows[0] if isinstance(rows, tuple) else rows
        counts = self.counts[chosen]
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        # Place j of the result is j − (where its set begins there) + (where its set begins here).
        shift = torch.repeat_interleave(self.offsets[:-1][chosen] - offsets[:-1], counts)
        return CandidateSets(self.ids[torch.arange(len(shift), device=self.ids.device) + shift], offsets)

    def below(self, vocabulary: int) -> CandidateSets:
        """Without ids of `vocabulary` and above, to which a model with fewer ids gives no probability. The sampled ids must
        lie below it, so that no set becomes empty (which would mean the whole vocabulary)."""
        kept = self.ids < vocabulary
        total = torch.cat([self.offsets.new_zeros(1), kept.long().cumsum(0)])
        return CandidateSets(self.ids[kept], total[self.offsets])

    def check(self, label: Tensor, vocabulary: int) -> None:
        """Raise ValueError, naming the position, where a label [N] is not in its set, or an id is not in [0, vocabulary)."""
        if label.shape != (len(self),):
            raise ValueError(f"{len(self)} candidate sets and {tuple(label.shape)} sampled ids do not match")
        owner, counts = self.owner(), self.counts
        foreign = (self.ids < 0) | (self.ids >= vocabulary)
        hit = torch.zeros(len(self), dtype=torch.int64, device=self.ids.device)
        hit.index_add_(0, owner, (self.ids == label[owner]).long())
        lost = (counts > 0) & (hit == 0)
        if not bool(foreign.any() | lost.any()):
            return
        if bool(foreign.any()):
            place = int(foreign.nonzero()[0])
            raise ValueError(f"position {int(owner[place])}: candidate ids must lie in [0, {vocabulary}), got "
                             f"{int(self.ids[place])}")
        position = int(lost.nonzero()[0])
        raise ValueError(f"position {position}: sampled id {int(label[position])} is not in its candidate set of "
                         f"{int(counts[position])} ids; the set that is replayed must be the one that was sampled from")

    def outside(self, vocabulary: int) -> Tensor:
        """bool [N, V]: the ids that are not in their token's set; all False where nothing was cut."""
        owner, counts = self.owner(), self.counts
        found = (counts > 0)[:, None].expand(-1, vocabulary).contiguous()
        found[owner, self.ids.long()] = False
        return found

    def to(self, device: torch.device | str) -> CandidateSets:
        """The same on `device`."""
        return CandidateSets(self.ids.to(device, non_blocking=True), self.offsets.to(device, non_blocking=True))


def cut_to(logits: Tensor, candidates: CandidateSets) -> Tensor:
    """logits [N, V] with −inf outside the candidate sets: their softmax is renormalised over the sets, and the gradient
    of what is outside is exactly zero."""
    return logits.masked_fill(candidates.outside(logits.shape[-1]), -math.inf)


def join_candidates(parts: Sequence[Sequence[Any | None] | None], counts: Sequence[int]) -> CandidateSets | None:
    """The sets of several runs of tokens (an action's, or None for all of its `count` tokens) as one; None where nothing was
    cut anywhere."""
    if all(part is None for part in parts):
        return None
    return CandidateSets.of(ids for part, count in zip(parts, counts, strict=True)
                            for ids in (part if part is not None else (None,) * count))
