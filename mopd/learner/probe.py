"""Whether a sampling engine has the learner's weights: the log-probabilities that both give to a few fixed tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mopd.learner.engine import Learner
from mopd.learner.packing import pack
from mopd.losses.objectives import label_logprob
from mopd.rows import STREAMS, Action, Row
from mopd.sampling.weight_folder import Probe, WeightsDiffer

__all__ = ["LIMIT", "LOW_PRECISION_LIMIT", "TOKENS", "WeightsDiffer", "check_weights", "learner_logprobs", "make_probe"]

TOKENS = 24
LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_LIMIT = 0.2
# Largest difference in nats. The two compute in other orders, in bfloat16 with other roundings; a weight that did not
# come gives tenths of nats to whole ones.


def make_probe(learner: Learner, *, seed: int = 0) -> Probe:
    """Tokens drawn by `seed` alone with the learner's log-probabilities and the tolerance of its dtype. Every rank must call
    it; it costs one forward pass over TOKENS tokens."""
    vocabulary = int(learner.model.config.get_text_config().vocab_size)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, TOKENS).astype(np.uint32)
    limit = LIMIT.get(next(learner.model.parameters()).dtype, LOW_PRECISION_LIMIT)
    return Probe(tokens, learner_logprobs(learner, tokens), limit)


def check_weights(learner: Learner, score: Callable[[np.ndarray], np.ndarray], *, seed: int = 0) -> float:
    """Compare the engine's `score` (tokens uint32 [T] -> log-probabilities float32 [T - 1], of each token given those
    before it) with the learner's own; returns the largest difference in nats. Every rank must call it.

    Raises WeightsDiffer where it is above what rounding explains.
    """
    probe = make_probe(learner, seed=seed)
    return probe.check(score(probe.tokens), version=learner.step)


def learner_logprobs(learner: Learner, tokens: np.ndarray) -> np.ndarray:
    """The learner's log-probabilities float32 [T - 1] of tokens uint32 [T], of each given those before it. Every rank must
    call it with the same tokens."""
    known = len(tokens) - 1
    action = Action(at=1, tokens=tokens[1:], behaviour_logprob=np.zeros(known, np.float32),
                    version=np.zeros(known, np.int32), branch=False, turn=0, sequence=0, group=0)
    batches = pack([Row("probe", STREAMS[0], tokens, (action,), "a probe of the weights")], token_budget=len(tokens),
                   pad_id=learner.pad_id, domains=("probe",), streams=STREAMS,
                   prefix_gradient=learner.config.prefix_gradient)
    (own,) = learner.forward_only(batches, lambda logits, part: label_logprob(logits, part.label, 1.0))
    return own.float().cpu().numpy()
