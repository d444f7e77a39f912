"""What a teacher's back end is asked and what it answers: one typed request, one typed answer, whatever stands behind it."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

WHAT = ("sampled", "top_k", "hidden", "full")


class TeacherError(ValueError):
    """Teachers and domains do not fit; the message names the domain or teacher and the remedy."""


class TeacherUnreachable(RuntimeError):
    """Nothing of a teacher answers. Whoever asked may ask again later: nothing is lost by waiting.

    teacher   its id
    said      what the last attempt met ("connection refused by http://127.0.0.1:8000", "503 Service Unavailable")
    """

    def __init__(self, teacher: str, said: str):
        super().__init__(f"teacher {teacher!r} does not answer: {said}")
        self.teacher, self.said = teacher, said


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreRequest:
    """Score tokens[start:stop], each given all tokens before it.

    tokens       uint32 [T], the whole context: what stands before the action and the action
    start, stop  1 ≤ start < stop ≤ T; the first token of a context has nothing before it and no score
    what         "sampled" (log π of the tokens themselves), "top_k" (that and the k likeliest ids), "hidden" (the hidden
                 states before the output head), "full" (top_k over the whole vocabulary)
    k            number of likeliest ids, 0 unless `what` is "top_k"
    temperature  log softmax(logits / temperature)
    candidates   per scored token the ids (an integer array with the token among them) over which the softmax runs, or
                 None for all ids; None for the whole: all ids everywhere

    Raises ValueError for values that do not fit together.
    """

    tokens: np.ndarray
    start: int
    stop: int
    what: str = "sampled"
    k: int = 0
    temperature: float = 1.0
    candidates: tuple[np.ndarray | None, ...] | None = None

    def __post_init__(self):
        if not 1 <= self.start < self.stop <= len(self.tokens):
            raise ValueError(f"tokens[{self.start}:{self.stop}] of {len(self.tokens)} cannot be scored; it takes 1 ≤ start < "
                             "stop ≤ length")
        if self.what not in WHAT:
            raise ValueError(f"what={self.what!r} is unknown; there are {', '.join(WHAT)}")
        if (self.k > 0) != (self.what == "top_k"):
            raise ValueError(f"k={self.k} does not fit what={self.what!r}: 'top_k' takes k ≥ 1, the others 0")
        if not self.temperature > 0:
            raise ValueError(f"temperature must be positive, got {self.temperature}")
        if self.candidates is not None and len(self.candidates) != len(self):
            raise ValueError(f"{len(self.candidates)} sets of candidates for {len(self)} tokens")

    def __len__(self) -> int:
        """Tokens to be scored."""
        return self.stop - self.start

    @property
    def labels(self) -> np.ndarray:
        """uint32 [n], the tokens to be scored."""
        return self.tokens[self.start:self.stop]

    def key(self) -> bytes:
        """16 bytes that name everything asked for (prefix, scored tokens, what, k, temperature, candidates)."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.start, self.stop, self.what, self.k, float(self.temperature))).encode())
        digest.update(np.ascontiguousarray(self.tokens[:self.stop], "<u4").tobytes())
        for ids in self.candidates or ():
            digest.update(b"all" if ids is None else len(ids).to_bytes(4, "little")
                          + np.sort(np.asarray(ids)).astype("<u4").tobytes())
        return digest.digest()


@dataclasses.dataclass(frozen=True, eq=False)
class ScoreAnswer:
    """A teacher's answer to one request of n tokens.

    teacher      its id
    logprob      float32 [n], log π of the tokens; NaN where missing
    top_ids      int32 [n, k] likeliest ids first, or None
    top_logprob  float32 [n, k] their log π, NaN where missing, or None
    hidden       [n, H] or None
    missing      reason -> tokens without a score
    labels       int32 [n] the ids that the back end says it scored, where it says so: an answer to another request shows
    """

    teacher: str
    logprob: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprob: np.ndarray | None = None
    hidden: Any | None = None
    missing: dict[str, int] = dataclasses.field(default_factory=dict)
    labels: np.ndarray | None = None

    @classmethod
    def nothing(cls, teacher: str, request: ScoreRequest, reason: str) -> ScoreAnswer:
        """No token of the request has a score."""
        return cls(teacher, np.full(len(request), np.nan, np.float32), missing={reason: len(request)})


@runtime_checkable
class ScoringBackend(Protocol):
    """One teacher: a model in this process, vLLM in this process, or any number of servers.

    teacher     its id
    gives       {"sampled"} and what else of WHAT it can
    max_k       largest k of "top_k"; 0 where it cannot
    max_tokens  longest context that it reads, None where it does not say
    """

    teacher: str
    gives: frozenset[str]
    max_k: int
    max_tokens: int | None

    def identity(self) -> dict[str, Any]:
        """What the handshake compares; a key that the back end cannot tell is absent or None. Raises TeacherError naming the
        teacher, TeacherUnreachable where nothing answers.

        model           what it says it serves
        revision        what pins its weights (see teachers.registry.model_revision)
        dtype           precision of its weights
        tokenizer       a folder or hub id to read the tokenizer from
        vocabulary      number -> token, where it can tell by itself
        rows            rows of the output matrix, padding included
        end_ids         ids at which it stops
        stop_strings    texts at which it stops
        chat_template   its text
        context_tokens  longest context
        capabilities    {"sampled": bool, "max_k": int, "flat": bool, "start_offset": bool, "chosen_ids": bool,
                        "hidden": bool, "full": bool}
        """

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """Answers in the order asked. One bad answer never raises (NaN and a reason); TeacherUnreachable where nothing
        answers at all. May be called from several threads at once."""

    def close(self) -> None:
        """Give its resources back; requests under way end."""
