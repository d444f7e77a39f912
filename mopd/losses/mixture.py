"""Several teachers as one distribution, in probability or in log space. Pure functions on tensors, no graph.

A mixture is said in logits, so that every objective takes it as it takes one teacher. m teachers with weights w_i that sum
to 1, π_i = softmax(z_i / T) at the temperature T at which the objective compares:

    probability   π = Σ_i w_i π_i                      whatever one of the teachers would say stays likely
    log_space     π = Π_i π_i^w_i / Z (normalised)     what the teachers agree on; one that rules an id out rules it out

What they mean for the two KLs, up to a constant in the student p: forward KL to the first is Σ_i w_i KL(π_i ‖ p), reverse
KL to the second is Σ_i w_i KL(p ‖ π_i) (log-linear and linear opinion pools, Genest and Zidek 1986).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from mopd.losses.chunked import Head
from mopd.losses.distribution import block_rows, compute_dtype

KINDS = ("probability", "log_space")


@torch.no_grad()
def mixture_logits(logits: Sequence[Tensor], weights: Sequence[float], kind: str, temperature: float = 1.0) -> Tensor:
    """m × [N, V] -> [N, V]: T · log π, so that softmax(result / T) is the mixture. A row with a NaN of any teacher is NaN.

    Raises ValueError for an unknown kind, shapes that differ, or weights that are not positive with the sum 1.
    """
    _check([z.shape for z in logits], weights, kind)
    return _mixed(logits, weights, kind, temperature)


def _mixed(logits: Iterable[Tensor], weights: Sequence[float], kind: str, temperature: float) -> Tensor:
    """mixture_logits of logits that are taken one teacher at a time: one sum is kept, and blocks of rows are worked on, so
    two tensors of their size are alive however many teachers there are."""
    total: Tensor | None = None
    given = iter(logits)
    for weight in weights:  # not zip: it would keep each teacher's logits until the next one's are made
        z = next(given)
        first, total = total is None, torch.empty_like(z, dtype=compute_dtype(z)) if total is None else total
        for rows in _blocks(z):
            part = torch.log_softmax(z[rows].to(total.dtype) / temperature, dim=-1)
            part = part + math.log(weight) if kind == "probability" else part * weight
            # NaN in a row of logits makes all of that row's log-softmax NaN, and so the sum's.
            total[rows] = part if first else torch.logaddexp(total[rows], part) if kind == "probability" \
                else total[rows] + part
        del z  # before the next one's are made
    for rows in _blocks(total):
        mixed = total[rows] if kind == "probability" else torch.log_softmax(total[rows], dim=-1)
        total[rows] = mixed * temperature
    return total


def _blocks(logits: Tensor) -> list[slice]:
    step = block_rows(logits)
    return [slice(start, start + step) for start in range(0, len(logits), step)]


@torch.no_grad()
def mixture_logprob(logprobs: Sequence[Tensor], weights: Sequence[float], kind: str = "probability") -> Tensor:
    """m × [N] -> [N]: log π of one id from log π_i of it; NaN where one is.

    Only the mixture in probability can be known from that: in log space the id's log-probability also needs Z, a sum over
    the whole vocabulary, and ValueError says so.
    """
    _check([logprob.shape for logprob in logprobs], weights, kind)
    if kind == "log_space":
        raise ValueError("a mixture in log space needs every teacher's whole distribution (its Z is a sum over all ids); "
                         "from the sampled ids' scores alone only the mixture 'probability' is exact")
    return _logsumexp(logprobs, weights)


@dataclasses.dataclass(frozen=True)
class MixtureHead:
    """The heads of m teachers as one: it takes their hidden states side by side, [N, H_1 + … + H_m], and says the mixture's
    logits (see mixture_logits). The teachers' logits are made and added one after the other.

    Raises ValueError for weights that are not positive with the sum 1, and heads over different numbers of ids.
    """

    heads: tuple[Head, ...]
    weights: tuple[float, ...]
    kind: str
    temperature: float = 1.0

    def __post_init__(self) -> None:
        _check([head.weight.shape[:1] for head in self.heads], self.weights, self.kind)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] without a graph."""
        sizes = [head.weight.shape[1] for head in self.heads]
        parts = hidden.split(sizes, dim=-1)
        made = (head.logits(part) for head, part in zip(self.heads, parts, strict=True))
        return _mixed(made, self.weights, self.kind, self.temperature)

    def to(self, device: torch.device | str) -> MixtureHead:
        """The same with its tensors on `device`."""
        return dataclasses.replace(self, heads=tuple(head.to(device) for head in self.heads))


def _logsumexp(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.logsumexp(torch.stack([part + math.log(w) for w, part in zip(weights, parts, strict=True)]), dim=0)


def _check(shapes: Sequence[Sequence[int]], weights: Sequence[float], kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown mixture {kind!r}; there are: {', '.join(KINDS)}")
    shapes = [tuple(shape) for shape in shapes]
    if len(shapes) != len(weights) or len(set(shapes)) != 1:
        raise ValueError(f"{len(weights)} weights for scores of the shapes {shapes}; they must agree")
    if not all(w > 0 for w in weights) or abs(sum(weights) - 1.0) > 1e-6:
        raise ValueError(f"the weights of a mixture must be positive and sum to 1, got {list(weights)}")
