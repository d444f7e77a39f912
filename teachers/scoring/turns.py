"""Turns that vLLM writes: what is asked, what is answered, and what makes an answer one. Pure: no network, no vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mopd.sampling.base import Completion, Request, SamplingOptions
from mopd.sampling.draws import check_options
from teachers.scoring.prompts import ABOVE_ZERO, CLAMPED

# vLLM raises temperatures between 0 and this one without a word.
LOWEST_TEMPERATURE = 0.01
# The flag and the value that make a server's log-probabilities those of the policy that it sampled from.
MODE_FLAG, MODE = "--logprobs-mode", "processed_logprobs"


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One turn to be written behind `tokens` uint32 [T].

    limit        most tokens that it may have
    temperature  0 is greedy
    seed         of its draws, 0 ≤ seed < 2**63
    stop_ids     each ends it and is kept as its last token
    only         ids that may be written; none: all
    """

    tokens: np.ndarray
    limit: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    only: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Tokens that are read at most: the last one that is written never is."""
        return len(self.tokens) + self.limit - 1

    @property
    def tempered(self) -> bool:
        """Whether its policy is another than the model's own at temperature 1."""
        return self.temperature not in (0.0, 1.0)

    def sampling(self) -> dict[str, object]:
        """Its vLLM sampling parameters. All that may have other defaults at a server are named; `logprobs` 0 asks for those
        of the sampled tokens alone. Of ends only `stop_ids` count, not the checkpoint's own."""
        found = {"max_tokens": self.limit, "temperature": self.temperature, "seed": self.seed, "top_p": 1.0, "top_k": -1,
                 "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "logprobs": 0,
                 "stop_token_ids": list(self.stop_ids), "ignore_eos": True}
        return found | ({"allowed_token_ids": list(self.only)} if self.only else {})


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


def written(turn: Turn, tokens: Sequence[int], logprob: Sequence[float], *, version: int = 0) -> Completion:
    """The answer to `turn`, checked; raises ValueError saying why it is none.

    tokens [n], 1 ≤ n ≤ limit, a stop id at the end only and there unless n = limit; logprob [n] finite, at most 0 but for
    rounding."""
    ids, values = np.asarray(tokens, np.int64), np.asarray(logprob, np.float32)
    if len(ids) != len(values):
        raise ValueError("log-probabilities of another number of tokens")
    if not 1 <= len(ids) <= turn.limit:
        raise ValueError(f"a turn of {len(ids)} tokens, not of 1 to {turn.limit}")
    if (ids < 0).any() or (ids >= 2**32).any():
        raise ValueError("a turn of ids that are none")
    if turn.only and not np.isin(ids, turn.only).all():
        raise ValueError("a turn of ids that were not allowed")
    stops = np.isin(ids, turn.stop_ids)
    if stops[:-1].any():
        raise ValueError("a turn that goes on behind its end")
    if not stops[-1] and len(ids) < turn.limit:
        raise ValueError("a turn that breaks off before its end")
    if not np.isfinite(values).all() or (values <= CLAMPED).any():
        raise ValueError("non-finite log-probability")
    if (values > ABOVE_ZERO).any():
        raise ValueError("log-probability above 0")
    return Completion(ids.astype(np.uint32), np.minimum(values, 0.0), "stop" if stops[-1] else "length", version)
