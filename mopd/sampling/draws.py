"""From logits to tokens: temperature, top-k, top-p with what they leave, and inverse-CDF draws from given uniforms."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from mopd.sampling.base import SamplingOptions


def uniforms(seed: int, count: int) -> np.ndarray:
    """float64 [count] in [0, 1): the draws of a request, by token position, from its seed alone (Philox)."""
    drawn = np.random.Generator(np.random.Philox(key=int(seed))).random(count)
    # Below 1 by more than a rounding: a product with the total mass can then not reach it and pick an excluded token.
    return np.minimum(drawn, 1 - 2.0**-40, out=drawn)


def check_options(options: SamplingOptions) -> None:
    """Raise ValueError naming every option that makes no sense."""
    wrong = []
    if not (options.temperature >= 0 and np.isfinite(options.temperature)):
        wrong.append(f"temperature {options.temperature} (must be 0 or more)")
    if not 0 < options.top_p <= 1:
        wrong.append(f"top_p {options.top_p} (must be in (0, 1])")
    if options.top_k < 0:
        wrong.append(f"top_k {options.top_k} (must be 0, meaning all, or more)")
    if options.max_tokens < 1:
        wrong.append(f"max_tokens {options.max_tokens} (must be 1 or more)")
    if wrong:
        raise ValueError("sampling options: " + "; ".join(wrong))


@dataclasses.dataclass(frozen=True)
class Drawn:
    """One token per row, B rows.

    ids      int64 [B]
    logprob  float32 [B], of the policy that sampled; at temperature 0 the model's own, see `draw`
    kept     bool [B, V], the ids that top-k and top-p left, or None where neither was on
    """

    ids: torch.Tensor
    logprob: torch.Tensor
    kept: torch.Tensor | None = None

    def candidates(self) -> list[np.ndarray | None]:
        """Per row the ids over which the policy was renormalised, int32 ascending; None where nothing was cut off."""
        if self.kept is None:
            return [None] * len(self.ids)
        kept = self.kept.cpu().numpy()
        counts = kept.sum(axis=1)
        ids = np.split(np.nonzero(kept)[1].astype(np.int32), np.cumsum(counts)[:-1])
        return [row if count < kept.shape[1] else None for row, count in zip(ids, counts.tolist(), strict=True)]


def draw(logits: torch.Tensor, uniform: torch.Tensor, options: SamplingOptions) -> Drawn:
    """One token per row.

    logits [B, V]; uniform float64 [B]. The policy is the softmax after temperature, then top-k, then top-p, renormalised
    over what is left (see `kept_ids`). At temperature 0 (the arg max) nothing is cut and the log-probability is the
    model's own at temperature 1, since the policy's, 0, would say nothing.
    """
    logits = logits.float()
    if options.temperature == 0:
        ids = logits.argmax(dim=-1, keepdim=True)
        return Drawn(ids[:, 0], torch.log_softmax(logits, dim=-1).gather(1, ids)[:, 0])
    if options.temperature != 1:
        logits = logits / options.temperature
    kept = kept_ids(logits, options.top_p, options.top_k)
    if kept is not None:
        logits = logits.masked_fill(~kept, -torch.inf)
    probability = torch.softmax(logits, dim=-1)
    # float64: over a large vocabulary a float32 running sum is off by more than the probability of a rare token.
    cumulative = torch.cumsum(probability, dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=probability.shape[-1] - 1)
    return Drawn(ids[:, 0], probability.gather(1, ids).log()[:, 0], kept)


def kept_ids(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor | None:
    """Which ids of logits[B, V] (after temperature) top-k and then top-p leave, bool [B, V]; None where both are off.

    As vLLM does it: top-k leaves every id that is at least as likely as the k-th, so more than k where several tie with it;
    top-p, on what top-k left and renormalised, leaves an id while those above it hold less than `top_p`, so the likeliest
    one always. Of ids that tie where top-p cuts, those with the lower numbers stay (vLLM leaves that open). A row's answer
    does not depend on the other rows.
    """
    kept = None
    if 0 < top_k < logits.shape[-1]:
        kept = logits >= logits.topk(top_k, dim=-1).values[:, -1:]
        if top_p < 1:
            logits = logits.masked_fill(~kept, -torch.inf)
    return kept if top_p == 1 else _likeliest(logits, top_p)


# The likeliest ids that top-p looks at first. Most distributions are decided within them, and sorting a large vocabulary
# costs many times the draw itself.
FIRST_LOOK = 128


def _likeliest(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """bool [B, V]: the ids above which there is less than `top_p` of the mass. Rows whose answer does not show within the
    first few likeliest ids are looked at again with more of them."""
    vocabulary, width = logits.shape[-1], FIRST_LOOK
    mass = (logits - logits.amax(dim=-1, keepdim=True)).exp()
    limit = top_p * mass.sum(dim=-1, keepdim=True, dtype=torch.float64)
    kept = torch.zeros_like(logits, dtype=torch.bool)
    rows = torch.arange(len(logits), device=logits.device)
    while len(rows):
        part = logits[rows]
        if width < vocabulary:
            ids = part.topk(width, dim=-1).indices.sort(dim=-1).values  # ascending, for a stable order among equals
            ordered, order = part.gather(1, ids).sort(dim=-1, descending=True, stable=True)
            ids = ids.gather(1, order)
        else:
            ordered, ids = part.sort(dim=-1, descending=True, stable=True)
        own = mass[rows].gather(1, ids).double()
        left = own.cumsum(dim=-1) - own < limit[rows]
        # Decided where the last id that stays is likelier than the last one looked at: none that ties with it is missing.
        last = ordered.gather(1, (left.sum(dim=-1, keepdim=True) - 1).clamp_(min=0))
        decided = (ordered[:, -1:] < last)[:, 0] | (width >= vocabulary)
        kept[rows[decided]] = torch.zeros_like(part[decided], dtype=torch.bool).scatter(1, ids[decided], left[decided])
        rows, width = rows[~decided], width * 8
    return kept
