"""Turns that a teacher writes in vLLM: what requests ask for. mopd/sampling/vllm_turns.py says what makes an answer one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.draws import check_options
from mopd.sampling.vllm_turns import LOWEST_TEMPERATURE, MODE, MODE_FLAG, Turn, written

__all__ = ["MODE", "MODE_FLAG", "Turn", "turns_of", "written"]


def turns_of(requests: Sequence[Request], options: SamplingOptions, *, teacher: str) -> list[Turn]:
    """What vLLM is asked for `requests`. Raises ValueError for options that make no sense, for a request without tokens or
    room, and for what vLLM cannot do exactly: top-p and top-k (it does not tell which ids they left, and without these
    no log-probability can be compared with another model's) and temperatures between 0 and 0.01."""
    check_options(options)
    if options.top_p < 1 or options.top_k:
        raise ValueError(f"teacher {teacher!r}: vLLM does not tell which ids top-p and top-k left, so what it writes under "
                         "them has no log-probabilities that could be used; sample from all ids (top_p 1, top_k 0), or let "
                         "it play in this process with the back end hf")
    if 0 < options.temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"teacher {teacher!r}: temperature {options.temperature:g}; vLLM samples at 0 (greedy) or from "
                         f"{LOWEST_TEMPERATURE} on")
    found = []
    for number, request in enumerate(requests):
        limit = options.max_tokens if request.max_tokens is None else min(request.max_tokens, options.max_tokens)
        if not len(request.tokens) or limit < 1:
            raise ValueError(f"request {number} (session {request.session!r}) has {len(request.tokens)} tokens and asks for "
                             f"{limit}; both must be at least 1")
        found.append(Turn(np.asarray(request.tokens), limit, float(options.temperature), int(request.seed) % 2**63,
                          tuple(options.stop_ids)))
    return found
