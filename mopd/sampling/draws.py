"""From logits to tokens: temperature, top-k, top-p and inverse-CDF draws from given uniforms."""

from __future__ import annotations

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


def draw(logits: torch.Tensor, uniform: torch.Tensor, options: SamplingOptions) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row.

    logits [B, V]; uniform float64 [B]. Returns ids int64 [B] and float32 [B] log-probabilities of the policy that
    sampled: after temperature, then top-k, then top-p, renormalised over what is left. At temperature 0 (the arg max)
    the log-probability is the model's own at temperature 1, since the policy's, 0, would say nothing.
    """
    logits = logits.float()
    if options.temperature == 0:
        ids = logits.argmax(dim=-1, keepdim=True)
        return ids[:, 0], torch.log_softmax(logits, dim=-1).gather(1, ids)[:, 0]
    if options.temperature != 1:
        logits = logits / options.temperature
    vocabulary = logits.shape[-1]
    order = None
    if 0 < options.top_k < vocabulary or options.top_p < 1:
        # Stable, so that equal logits stand in the order of their ids.
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        if 0 < options.top_k < vocabulary:
            logits, order = logits[:, : options.top_k], order[:, : options.top_k]
        if options.top_p < 1:
            probability = torch.softmax(logits, dim=-1)
            before = torch.cumsum(probability, dim=-1, dtype=torch.float64) - probability
            before[:, 0] = 0
            logits = logits.masked_fill(before >= options.top_p, -torch.inf)
    probability = torch.softmax(logits, dim=-1)
    # float64: over a large vocabulary a float32 running sum is off by more than the probability of a rare token.
    cumulative = torch.cumsum(probability, dim=-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    ids = torch.searchsorted(cumulative, target, right=True).clamp_(max=probability.shape[-1] - 1)
    logprob = probability.gather(1, ids).log()[:, 0]
    if order is not None:
        ids = order.gather(1, ids)
    return ids[:, 0], logprob
