"""How much teacher and student agree on experts: the overlap of those that both send the action tokens to.

Of teachers in this process that are Mixture-of-Experts models with as many MoE layers and experts as the student.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mopd.learner.engine import Learner
from mopd.learner.moe import find_routers
from mopd.learner.packing import MicroBatch
from mopd.learner.routing import Choices, overlap

TOLD = "teacher_experts"
# of a micro-batch's `extra`: int16 [N, L, k]


class RouteSimilarity:
    """Measures at every `every`-th step, at the positions that predict the action tokens.

    scorers  domain → its teacher; those are compared that have a `model` with as many MoE layers and experts as the student
    `domains` are the domains that are compared; without any, nothing is ever measured.
    """

    def __init__(self, learner: Learner, scorers: Mapping[str, Any], every: int):
        self.learner, self.every = learner, every
        own = [router.num_experts for router in find_routers(learner.model)]
        models = {domain: model for domain, scorer in scorers.items()
                  if own and (model := getattr(scorer, "model", None)) is not None
                  and [router.num_experts for router in find_routers(model)] == own}
        self.domains = tuple(models)
        self._of: dict[int, Choices] = {}
        if every and models:
            self._student = Choices(learner.model)
            self._of = {id(model): Choices(model) for model in {id(m): m for m in models.values()}.values()}

    def due(self, step: int) -> bool:
        return bool(self._of) and step % self.every == 0

    @contextlib.contextmanager
    def noting(self, scorer: Any, batch: MicroBatch):
        """Around a teacher's pass over a micro-batch: its experts go into the micro-batch's `extra`."""
        choices = self._of.get(id(getattr(scorer, "model", None)))
        if choices is None or not batch.loss_tokens:
            yield
            return
        with choices.noting():
            yield
        at = batch.source_index.to(choices.last[0].device)
        batch.extra[TOLD] = torch.stack([layer[at] for layer in choices.last], dim=1).to(batch.label.device)

    def measure(self, batches: Sequence[MicroBatch], names: Sequence[str]) -> dict[str, list[float]]:
        """Sums of the overlap by layer and, last, the number of tokens, by domain; of this rank's micro-batches that have a
        teacher's experts. `names`: the domains by number. Costs a forward pass of the student; every rank must call it."""
        def chosen(logits: torch.Tensor, part: MicroBatch) -> torch.Tensor:
            return torch.stack([layer[part.source_index] for layer in self._student.last], dim=1)

        with self._student.noting():
            found = self.learner.forward_only(batches, chosen)
        sums: dict[str, list[float]] = {}
        for batch, own in zip(batches, found, strict=True):
            if TOLD not in batch.extra:
                continue
            theirs = batch.extra[TOLD].to(own.device)
            shared = [float(overlap(own[:, layer], theirs[:, layer]).double().sum()) for layer in range(own.shape[1])]
            name = names[int(batch.domain[0])]
            before = sums.get(name, [0.0] * (len(shared) + 1))
            sums[name] = [a + b for a, b in zip(before, [*shared, float(len(own))], strict=True)]
        return sums

    @staticmethod
    def record(parts: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, dict[str, Any]]:
        """Mean Jaccard overlap by domain, over all layers (`overlap`) and by layer, from every rank's sums."""
        found = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            *layers, tokens = (sum(column) for column in zip(*(part[name] for part in parts if name in part), strict=True))
            means = [layer / tokens for layer in layers]
            found[name] = {"overlap": sum(means) / len(means), "by_layer": means, "tokens": int(tokens)}
        return found
