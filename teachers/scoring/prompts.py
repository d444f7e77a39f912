"""Requests that vLLM answers by prompt log-probabilities: as few prompts as possible, and their scores handed back.

One pass over a prompt scores all of its positions. So a request whose context is the beginning of another's costs nothing:
the turns of one trajectory are one prompt, that of its last turn.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np

from teachers.scoring.requests import ScoreAnswer, ScoreRequest

# vLLM writes -9999 where JSON cannot carry -inf.
CLAMPED = -9000.0
RULED_OUT = "log-probability -inf"
OTHER_TOKENS = "scores of other tokens"
# Rounding may leave the most certain token a little above 0; more than this is no log-probability.
ABOVE_ZERO = 1e-3


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """One context to be read once.

    tokens  uint32 [T]
    start   first position that somebody wants (≥ 1); everything from here on is scored
    k       likeliest ids wanted at each of these positions, 0 for none
    parts   numbers of the requests that it answers
    """

    tokens: np.ndarray
    start: int
    k: int
    parts: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.tokens)


@dataclasses.dataclass(eq=False)
class PromptScores:
    """Scores of a prompt's positions from `start` on, checked.

    logprob      float32 [n], NaN where missing, -inf where the teacher rules the token out
    top_ids      int32 [n, k] or None, likeliest first; top_logprob float32 [n, k]
    labels       int32 [n], the ids that were scored
    why          str [n]: the reason where a score is missing, else ""
    """

    logprob: np.ndarray
    top_ids: np.ndarray | None
    top_logprob: np.ndarray | None
    labels: np.ndarray
    why: np.ndarray


def prompts_of(requests: Sequence[ScoreRequest], longest: int | None = None) -> list[Prompt]:
    """The fewest prompts that answer `requests`, in an order that depends on the requests alone. A request of more than
    `longest` tokens stays by itself, so that none that would fit shares its fate.

    Raises ValueError for what prompt log-probabilities cannot give: they know no temperature, no candidates and no hidden
    states."""
    for number, request in enumerate(requests):
        if request.temperature != 1.0:
            raise ValueError(f"request {number}: temperature {request.temperature}; vLLM's prompt log-probabilities are "
                             "always those at temperature 1")
        if request.candidates is not None:
            raise ValueError(f"request {number}: vLLM's prompt log-probabilities run over all ids, never over candidates")
        if request.what not in ("sampled", "top_k"):
            raise ValueError(f"request {number}: what={request.what!r}; vLLM's prompt log-probabilities give 'sampled' and "
                             "'top_k'")
    by_k: dict[int, list[tuple[bytes, int]]] = collections.defaultdict(list)
    for number, request in enumerate(requests):
        # Big-endian, so that sorting the bytes sorts the ids and a prefix stands right before what it begins.
        by_k[request.k].append((np.ascontiguousarray(request.tokens[:request.stop], ">u4").tobytes(), number))
    found = []
    for k in sorted(by_k):
        whole, members = b"", []
        for text, number in sorted(by_k[k], reverse=True):
            if longest is not None and requests[number].stop > longest:
                found.append(_prompt(requests, [number], k))
                continue
            if members and whole.startswith(text):
                members.append(number)
                continue
            if members:
                found.append(_prompt(requests, members, k))
            whole, members = text, [number]
        if members:
            found.append(_prompt(requests, members, k))
    return sorted(found, key=lambda prompt: min(prompt.parts))


def _prompt(requests: Sequence[ScoreRequest], members: list[int], k: int) -> Prompt:
    first = requests[members[0]]
    return Prompt(np.asarray(first.tokens[:first.stop]), min(requests[m].start for m in members), k, tuple(sorted(members)))


def checked(prompt: Prompt, logprob: np.ndarray, labels: np.ndarray, top_ids: np.ndarray | None = None,
            top_logprob: np.ndarray | None = None) -> PromptScores:
    """Scores of tokens[start:] with everything that cannot be one masked: NaN and a reason.

    logprob [n]; labels [n] the ids that the back end says it scored; top_ids, top_logprob [n, k] where k > 0, in any order.
    Raises ValueError for another number of positions."""
    wanted = prompt.tokens[prompt.start:].astype(np.int64)
    if len(logprob) != len(wanted) or len(labels) != len(wanted):
        raise ValueError(f"{len(logprob)} scores for {len(wanted)} tokens")
    logprob = np.asarray(logprob, np.float32)
    why = np.full(len(wanted), "", dtype=object)
    # The last reason written wins, so the most telling comes last.
    why[np.asarray(logprob) > ABOVE_ZERO] = "log-probability above 0"
    why[~np.isfinite(logprob)] = "non-finite log-probability"
    why[logprob <= CLAMPED] = RULED_OUT
    why[np.asarray(labels, np.int64) != wanted] = OTHER_TOKENS
    if top_ids is not None:
        broken = np.isnan(top_logprob).any(axis=1) | (top_logprob > ABOVE_ZERO).any(axis=1)
        why[broken & ((why == "") | (why == RULED_OUT))] = "non-finite or positive top-k"
        order = np.argsort(-top_logprob, axis=1, kind="stable")
        top_ids = np.take_along_axis(np.asarray(top_ids, np.int32), order, 1)
        top_logprob = np.minimum(np.take_along_axis(np.asarray(top_logprob, np.float32), order, 1), 0.0)
        top_logprob[top_logprob <= CLAMPED] = -np.inf
        top_logprob[(why != "") & (why != RULED_OUT)] = np.nan
    logprob = np.where(why == "", np.minimum(logprob, 0.0), np.nan).astype(np.float32)
    logprob[why == RULED_OUT] = -np.inf
    return PromptScores(logprob, top_ids, top_logprob, np.asarray(labels, np.int32), why)


def answers_of(requests: Sequence[ScoreRequest], prompts: Sequence[Prompt], scores: Sequence[PromptScores | str],
               teacher: str) -> list[ScoreAnswer]:
    """Answers in the order of `requests`; scores[i] belongs to prompts[i], a text there is why the whole prompt has none."""
    answers: list[ScoreAnswer | None] = [None] * len(requests)
    for prompt, found in zip(prompts, scores, strict=True):
        for number in prompt.parts:
            request = requests[number]
            if isinstance(found, str):
                answers[number] = ScoreAnswer.nothing(teacher, request, found)
                continue
            at = slice(request.start - prompt.start, request.stop - prompt.start)
            missing = collections.Counter(reason for reason in found.why[at] if reason)
            answers[number] = ScoreAnswer(
                teacher, found.logprob[at].copy(), None if found.top_ids is None else found.top_ids[at].copy(),
                None if found.top_logprob is None else found.top_logprob[at].copy(), missing=dict(missing),
                # Tokens that were taken for others have their reason already; the rest of the answer stands.
                labels=None if OTHER_TOKENS in missing else found.labels[at].copy())
    return answers
