"""Whether a sampling engine has the learner's weights: the log-probabilities that both give to a few fixed tokens."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from mopd.learner.engine import Learner
from mopd.learner.packing import pack
from mopd.losses.objectives import label_logprob
from mopd.rows import STREAMS, Action, Row

TOKENS = 24
LIMIT = {torch.float32: 1e-3, torch.float64: 1e-3}
LOW_PRECISION_LIMIT = 0.2
# Largest difference in nats. The two compute in other orders, in bfloat16 with other roundings; a weight that did not
# come gives tenths of nats to whole ones.


class WeightsDiffer(RuntimeError):
    """The engine samples with other weights than the learner trains; the message has both numbers."""


def check_weights(learner: Learner, score: Callable[[np.ndarray], np.ndarray], *, seed: int = 0) -> float:
    """Compare the engine's `score` (tokens uint32 [T] -> log-probabilities float32 [T - 1], of each token given those
    before it) with the learner's own; returns the largest difference in nats. Every rank must call it.

    Raises WeightsDiffer where it is above what rounding explains.
    """
    vocabulary = int(learner.model.config.get_text_config().vocab_size)
    tokens = np.random.default_rng(seed).integers(0, vocabulary, TOKENS).astype(np.uint32)
    own, given = learner_logprobs(learner, tokens), np.asarray(score(tokens), np.float32)
    gaps = np.abs(own - given)
    worst = int(np.argmax(np.where(np.isfinite(gaps), gaps, np.inf)))
    limit = LIMIT.get(next(learner.model.parameters()).dtype, LOW_PRECISION_LIMIT)
    if not gaps[worst] <= limit:
        raise WeightsDiffer(
            f"after step {learner.step} the engine gives token {worst + 1} of a fixed text the log-probability "
            f"{given[worst]:.5f}, the learner {own[worst]:.5f} (they may differ by {limit:g}): the engine does not have the "
            "learner's weights, so nothing that it samples can be trusted. Start anew, and with deepspeed.zero_stage=1 if it "
            "happens again")
    return float(gaps[worst])


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
