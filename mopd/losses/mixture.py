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
from collections.abc import Sequence

import torch
from torch import Tensor

from mopd.losses.chunked import Head

KINDS = ("probability", "log_space")


@torch.no_grad()
def mixture_logits(logits: Sequence[Tensor], weights: Sequence[float], kind: str, temperature: float = 1.0) -> Tensor:
    """m × [N, V] -> [N, V]: T · log π, so that softmax(result / T) is the mixture. A row with a NaN of any teacher is NaN.

    Raises ValueError for an unknown kind, shapes that differ, or weights that are not positive with the sum 1.
    """
    _check(logits, weights, kind)
    parts = [torch.log_softmax(z / temperature, dim=-1) for z in logits]
    if kind == "probability":
        mixed = _logsumexp(parts, weights)
    else:
        mixed = torch.log_softmax(sum(w * part for w, part in zip(weights, parts, strict=True)), dim=-1)
    broken = torch.stack([torch.isnan(part).any(dim=-1) for part in parts]).any(dim=0)
    return mixed.masked_fill(broken[..., None], math.nan) * temperature


@torch.no_grad()
def mixture_logprob(logprobs: Sequence[Tensor], weights: Sequence[float], kind: str = "probability") -> Tensor:
    """m × [N] -> [N]: log π of one id from log π_i of it; NaN where one is.

    Only the mixture in probability can be known from that: in log space the id's log-probability also needs Z, a sum over
    the whole vocabulary, and ValueError says so.
    """
    _check(logprobs, weights, kind)
    if kind == "log_space":
        raise ValueError("a mixture in log space needs every teacher's whole distribution (its Z is a sum over all ids); "
                         "from the sampled ids' scores alone only the mixture 'probability' is exact")
    return _logsumexp(logprobs, weights)


@dataclasses.dataclass(frozen=True)
class MixtureHead:
    """The heads of m teachers as one: it takes their hidden states side by side, [N, H_1 + … + H_m], and says the mixture's
    logits (see mixture_logits), so that never more than a chunk of logits of each teacher is alive."""

    heads: tuple[Head, ...]
    weights: tuple[float, ...]
    kind: str
    temperature: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, V] without a graph."""
        sizes = [head.weight.shape[1] for head in self.heads]
        parts = hidden.split(sizes, dim=-1)
        return mixture_logits([head.logits(part) for head, part in zip(self.heads, parts, strict=True)], self.weights,
                              self.kind, self.temperature)

    def to(self, device: torch.device | str) -> MixtureHead:
        """The same with its tensors on `device`."""
        return dataclasses.replace(self, heads=tuple(head.to(device) for head in self.heads))


def _logsumexp(parts: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    return torch.logsumexp(torch.stack([part + math.log(w) for w, part in zip(weights, parts, strict=True)]), dim=0)


def _check(parts: Sequence[Tensor], weights: Sequence[float], kind: str) -> None:
    if kind not in KINDS:
        raise ValueError(f"unknown mixture {kind!r}; there are: {', '.join(KINDS)}")
    if len(parts) != len(weights) or len({part.shape for part in parts}) != 1:
        raise ValueError(f"{len(weights)} weights for scores of the shapes {[tuple(part.shape) for part in parts]}; they "
                         "must agree")
    if not all(w > 0 for w in weights) or abs(sum(weights) - 1.0) > 1e-6:
        raise ValueError(f"the weights of a mixture must be positive and sum to 1, got {list(weights)}")
