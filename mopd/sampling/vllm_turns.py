"""Turns that vLLM writes: what is asked, what is answered, and what makes an answer one. Pure: no network, no vLLM.

A turn may come in *pieces*: where a server's work is broken off (new weights, a server that goes away with a word), what it
has written counts and the rest is asked for behind it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from mopd.sampling.base import Completion, Request, SamplingOptions, stopped
from mopd.sampling.draws import check_options
from mopd.seeds import stable_seed

# vLLM raises temperatures between 0 and this one without a word.
LOWEST_TEMPERATURE = 0.01
# The flag and the value that make a server's log-probabilities those of the policy that it sampled from.
MODE_FLAG, MODE = "--logprobs-mode", "processed_logprobs"
# vLLM writes -9999 where JSON cannot carry -inf.
CLAMPED = -9000.0
# Rounding may leave the most certain token a little above 0; more than this is no log-probability.
ABOVE_ZERO = 1e-3
# Ids that may tie with the k-th likeliest, which top-k leaves too: so many more are asked for, to see that none is missing.
TIES = 16


@dataclasses.dataclass(frozen=True, eq=False)
class Turn:
    """One turn to be written behind `tokens` uint32 [T].

    limit         most tokens that it may have
    temperature   0 is greedy
    seed          of its draws, 0 ≤ seed < 2**63
    stop_ids      each ends it and is kept as its last token
    only          ids that may be written; none: all
    top_p, top_k  as in SamplingOptions
    told          likeliest ids whose log-probabilities are asked for besides the sampled one's
    """

    tokens: np.ndarray
    limit: int
    temperature: float
    seed: int
    stop_ids: tuple[int, ...] = ()
    only: tuple[int, ...] = ()
    top_p: float = 1.0
    top_k: int = 0
    told: int = 0

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
        found = {"max_tokens": self.limit, "temperature": self.temperature, "seed": self.seed, "top_p": self.top_p,
                 "top_k": self.top_k or -1, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
                 "frequency_penalty": 0.0, "logprobs": self.told, "stop_token_ids": list(self.stop_ids), "ignore_eos": True}
        return found | ({"allowed_token_ids": list(self.only)} if self.only else {})


def written(turn: Turn, tokens: Sequence[int], logprob: Sequence[float], *, version: int = 0) -> Completion:
    """The whole answer to `turn`, checked; raises ValueError saying why it is none.

    tokens [n], 1 ≤ n ≤ limit, a stop id at the end only and there unless n = limit; logprob [n] finite, at most 0 but for
    rounding."""
    if not len(tokens) and not len(logprob):
        raise ValueError(f"a turn of 0 tokens, not of 1 to {turn.limit}")
    piece = piece_of(turn, tokens, logprob, version=version)
    if not piece.ended:
        raise ValueError("a turn that breaks off before its end")
    return Completion(piece.tokens, piece.logprob, piece.finish, version)


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """What was written of a turn, perhaps nothing.

    tokens      uint32 [n]
    logprob     float32 [n]
    versions    int32 [n], of the weights that sampled each
    finish      "stop", "length", or "" where it broke off before its end
    candidates  as in Completion, or None
    experts     int16 [T + n - 1, L, k] of what was read for it, or None
    """

    tokens: np.ndarray
    logprob: np.ndarray
    versions: np.ndarray
    finish: str
    candidates: tuple[np.ndarray | None, ...] | None = None
    experts: np.ndarray | None = None

    @property
    def ended(self) -> bool:
        return bool(self.finish)


def piece_of(turn: Turn, tokens: Sequence[int], logprob: Sequence[float], *, version: int | np.ndarray = 0,
             likeliest: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None, vocabulary: int = 0) -> Piece:
    """What was written of `turn`, checked; raises ValueError saying why it is not that.

    likeliest   per token the ids that the engine told of and their log-probabilities, the sampled one among them; those that
                were cut off have -inf (or what JSON carries for it)
    vocabulary  rows of the model's output
    """
    ids, values = np.asarray(tokens, np.int64).reshape(-1), np.asarray(logprob, np.float32).reshape(-1)
    if len(ids) != len(values):
        raise ValueError("log-probabilities of another number of tokens")
    if len(ids) > turn.limit:
        raise ValueError(f"a turn of {len(ids)} tokens, not of 1 to {turn.limit}")
    if (ids < 0).any() or (ids >= 2**32).any():
        raise ValueError("a turn of ids that are none")
    if turn.only and not np.isin(ids, turn.only).all():
        raise ValueError("a turn of ids that were not allowed")
    stops = np.isin(ids, turn.stop_ids)
    if stops[:-1].any():
        raise ValueError("a turn that goes on behind its end")
    if not np.isfinite(values).all() or (values <= CLAMPED).any():
        raise ValueError("non-finite log-probability")
    if (values > ABOVE_ZERO).any():
        raise ValueError("log-probability above 0")
    finish = "stop" if len(ids) and stops[-1] else "length" if len(ids) == turn.limit else ""
    sets = None
    if turn.told and len(ids):
        if likeliest is None or len(likeliest) != len(ids):
            raise ValueError("candidates of another number of tokens")
        sets = tuple(_candidates(turn, int(token), *told, vocabulary) for token, told in zip(ids, likeliest, strict=True))
    versions = np.broadcast_to(np.asarray(version, np.int32), ids.shape)
    return Piece(ids.astype(np.uint32), np.minimum(values, 0.0), versions, finish, sets)


def _candidates(turn: Turn, token: int, ids: Sequence[int], logprob: Sequence[float], vocabulary: int) -> np.ndarray | None:
    """int32 ascending: the ids that top-k and top-p left, or None where they left all. The set is whole where one of those
    told of was cut off, or where all ids were told of."""
    told, first = np.unique(np.asarray(ids, np.int64), return_index=True)
    kept = told[np.asarray(logprob, np.float64)[first] > CLAMPED]
    if len(kept) == vocabulary:
        return None
    if len(kept) == len(told) and len(told) < vocabulary:
        raise ValueError(f"more ids tie with the {turn.top_k}-th likeliest than the engine tells of" if turn.top_k else
                         "top-p leaves more ids than the engine tells of")
    if token not in kept:
        raise ValueError("a token that is none of its candidates")
    return kept.astype(np.int32)


def told_of(options: SamplingOptions, limit: int, vocabulary: int) -> int:
    """How many of the likeliest ids an engine must tell of each token, so that its candidate set is known exactly; 0 where
    nothing is cut off. Raises ValueError where it cannot be known.

    limit  most that the engine tells of (`--max-logprobs`; -1: all)
    """
    if options.temperature == 0 or (options.top_p == 1 and not 0 < options.top_k < vocabulary):
        return 0
    limit = vocabulary if limit < 0 else min(limit, vocabulary)
    if 0 < options.top_k < vocabulary:
        if limit > options.top_k:
            return min(limit, options.top_k + max(TIES, options.top_k))
        raise ValueError(f"top_k {options.top_k}: the engine tells of {limit} ids a token, and it takes {options.top_k + 1} "
                         f"to know the candidates; start it with --max-logprobs {options.top_k + TIES} or more, as "
                         f"`mopd serve` does, or take a top_k below {limit}")
    if limit == vocabulary:
        return vocabulary
    raise ValueError(f"top_p {options.top_p:g}: which ids it leaves is known only where the engine tells of all {vocabulary} "
                     f"of them, and it tells of {limit}; set top_k besides (train.top_k, below {limit}), take top_p 1, or "
                     "sample with sampling.engine=hf")


def check_vllm_options(options: SamplingOptions) -> None:
    """Raise ValueError for options that make no sense, or that vLLM would change without a word."""
    check_options(options)
    if 0 < options.temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"temperature {options.temperature:g}: vLLM samples at 0 (greedy) or from {LOWEST_TEMPERATURE} on")


class Writing:
    """A turn that is being written: the request, and what there is of it so far.

    told      see Turn
    unused    tokens that vLLM, which has no texts here, wrote behind a stop string
    begin     version of the weights where the engine does not say
    """

    def __init__(self, request: Request, options: SamplingOptions, *, told: int = 0):
        self.request, self.options, self.told = request, options, told
        self.limit = options.max_tokens if request.max_tokens is None else min(request.max_tokens, options.max_tokens)
        self.pieces: list[Piece] = []
        self.count = self.unused = 0

    def turn(self) -> Turn:
        """What is left to write. The draws of a later piece come from the seed and its position."""
        prompt, seed = np.asarray(self.request.tokens, np.uint32), int(self.request.seed) % 2**63
        if self.count:
            prompt = np.concatenate([prompt, *(piece.tokens for piece in self.pieces)])
            seed = stable_seed(seed, self.count)
        options = self.options
        cut = options.temperature > 0
        return Turn(prompt, self.limit - self.count, float(options.temperature), seed, tuple(options.stop_ids),
                    top_p=float(options.top_p) if cut else 1.0, top_k=options.top_k if cut else 0, told=self.told)

    def add(self, piece: Piece) -> Completion | None:
        """Take what was written of `turn()`; the whole turn where that was its end, or where a stop string ended it."""
        known, strings = self.count, self.options.stop_strings
        if len(piece.tokens):
            self.pieces.append(piece)
            self.count += len(piece.tokens)
        tokens = np.concatenate([part.tokens for part in self.pieces]) if self.pieces else piece.tokens
        if not piece.ended and (strings is None or strings.end_of(tokens, known) is None):
            return None
        parts = self.pieces
        versions = np.concatenate([part.versions for part in parts])
        sets = [one for part in parts for one in (part.candidates or (None,) * len(part.tokens))]
        whole = Completion(
            tokens, np.concatenate([part.logprob for part in parts]), piece.finish,
            int(versions[0]) if (versions == versions[0]).all() else versions.astype(np.int32),
            tuple(sets) if any(one is not None for one in sets) else None, parts[-1].experts)
        turn = stopped(whole, strings, known)
        self.unused = len(whole.tokens) - len(turn.tokens)
        return turn


def check_request(request: Request, options: SamplingOptions, vocabulary: int, positions: int | None) -> None:
    """Raise ValueError for a request without tokens or room, with foreign tokens, or longer than the model reads."""
    size, who = len(request.tokens), f"the request (session {request.session!r})"
    limit = options.max_tokens if request.max_tokens is None else min(request.max_tokens, options.max_tokens)
    if not size or limit < 1:
        raise ValueError(f"{who} has {size} tokens and asks for {limit}; both must be at least 1")
    if vocabulary and int(np.max(request.tokens)) >= vocabulary:
        raise ValueError(f"{who} has token id {int(np.max(request.tokens))}, the model knows {vocabulary}: it was written "
                         "with another tokenizer")
    if positions is not None and size + limit > positions:
        raise ValueError(f"{who}: {size} tokens and {limit} to sample exceed the {positions} that the engine reads; lower "
                         "the context limit, or raise sampling.vllm_options.max_model_len")
