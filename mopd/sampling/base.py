"""What every sampling engine speaks: token ids in, token ids with log-probabilities and versions out."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable
from typing import Protocol, runtime_checkable

import numpy as np

from mopd.sampling.stop_strings import StopStrings


@dataclasses.dataclass(frozen=True)
class SamplingOptions:
    """temperature 0 is greedy, whatever else is set. Otherwise temperature, then top-k, then top-p:

    top_k   only the ids that are at least as likely as the k-th; 0: all
    top_p   of these only the likeliest, until they hold this much probability; 1: all. One id always stays
    `stop_ids` end a turn and are kept as its last token; `stop_strings` end it with the token that completes one.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 32
    stop_ids: tuple[int, ...] = ()
    stop_strings: StopStrings | None = None


@dataclasses.dataclass(frozen=True)
class Request:
    """`tokens` uint32 [T] is the whole history. `seed` alone decides the random draws, whatever else is in the batch.
    `session` names a growing sequence: an engine may keep its key/value cache from one turn to the next.
    `max_tokens` lowers the options' limit for this request (domains with different turn limits sample as one batch)."""

    tokens: np.ndarray
    seed: int
    session: str | None = None
    max_tokens: int | None = None


@dataclasses.dataclass(frozen=True)
class Completion:
    """tokens uint32 [n]; logprob float32 [n] under the policy that really sampled (temperature, top-p, top-k applied);
    finish is `stop` or `length`; version is the weights version, int32 [n] where it changed within the turn. candidates: per
    token the ids over which that policy was renormalised, int32 ascending, or None where nothing was cut off; None for all
    of it where that holds throughout. experts: int16 [T + n - 1, L, k], the experts of every MoE layer for each token of the
    request and of the turn but its last, which was never fed; None where the engine does not report them."""

    tokens: np.ndarray
    logprob: np.ndarray
    finish: str
    version: int | np.ndarray
    candidates: tuple[np.ndarray | None, ...] | None = None
    experts: np.ndarray | None = None


def stopped(turn: Completion, strings: StopStrings | None, known: int = 0) -> Completion:
    """A whole turn of an engine that knows no texts, up to where one of `strings` ended it. What it wrote behind changes
    nothing before it, so this is what stopping there would have given. The first `known` tokens did not end it."""
    end = None if strings is None else strings.end_of(turn.tokens, known)
    if end is None:
        return turn
    versions = turn.version if isinstance(turn.version, int) else turn.version[:end]
    read = None if turn.experts is None else turn.experts[:len(turn.experts) - (len(turn.tokens) - end)]
    return Completion(turn.tokens[:end], turn.logprob[:end], "stop", versions,
                      None if turn.candidates is None else turn.candidates[:end], read)


@runtime_checkable
class SamplingEngine(Protocol):
    version: int

    def generate(self, requests: list[Request], options: SamplingOptions) -> list[Completion]: ...

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Forget the caches of finished sequences."""

    def load_weights(self, weights: Iterable[tuple[str, object]], version: int) -> None:
        """Take the student's weights under their Hugging Face names; all caches are dropped."""


@runtime_checkable
class StreamingEngine(SamplingEngine, Protocol):
    """An engine that writes turns while others are asked for. Requests under `generate` and `submit` never mix: `generate`
    is called while nothing is under way. New weights may come while turns are under way: these go on with the tokens they
    have, each with the version that sampled it, behind a prompt that the new weights read again."""

    def submit(self, key: Hashable, request: Request, options: SamplingOptions) -> None:
        """Begin one turn. Raises ValueError as `generate` does, and for a key that is under way."""

    def poll(self, timeout: float = 0.0) -> list[tuple[Hashable, Completion | EngineTrouble]]:
        """Turns that have ended since the last call. An engine in this process works on meanwhile (at least one token of
        every row); one elsewhere is waited for, at most `timeout` seconds and until something has ended."""

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Forget turns under way, unknown keys too: they will not be heard of again."""

    @property
    def under_way(self) -> int:
        """Turns that were submitted and have not ended."""


@dataclasses.dataclass(frozen=True)
class EngineTrouble:
    """Why a turn that was submitted was not written: `reason` is a category to count (`engine_down`, `engine_answer`, …),
    `words` say more. The sequence can go on on another engine, or on this one later."""

    reason: str
    words: str


class EngineUnreachable(RuntimeError):
    """The engine writes no turns, and has not for as long as the caller waits; the message says what it met last."""
