"""Answers of back ends, checked and merged: what is not a usable score becomes NaN with a reason, never a number."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from teachers.scoring.alignment import UNALIGNED
from teachers.scoring.requests import ScoreAnswer, ScoreRequest

IMPOSSIBLE = "log-probability -inf"
# an answer, not a fault: the teacher rules the token out, and asking again would not change it
FINAL = UNALIGNED | {IMPOSSIBLE}
ABOVE_ZERO = 1e-3
# a log-probability above it (nats) is no rounding of 0
MALFORMED = "likeliest ids malformed"
MASS = 1.01
# the probability of likeliest ids together; what is above it is no rounding of 1


def checked(request: ScoreRequest, answer: ScoreAnswer | None, teacher: str) -> ScoreAnswer:
    """The answer with every unusable score as NaN and counted by reason. Never raises for what a back end may say.

    Reasons: "no answer", "wrong length", "out of order" (the back end says it scored other ids), "not finite", "above 0",
    IMPOSSIBLE, MALFORMED, and those that the back end gave itself for scores that it left out. Of a "top_k" request a token
    that the teacher rules out has its likeliest ids all the same, and is not missing.
    """
    size = len(request)
    if answer is None:
        return ScoreAnswer.nothing(teacher, request, "no answer")
    logprob = np.array(answer.logprob, np.float32, copy=True)
    parts = [part for part in (answer.top_ids, answer.top_logprob, answer.hidden) if part is not None]
    if logprob.shape != (size,) or any(len(part) != size for part in parts):
        return ScoreAnswer.nothing(teacher, request, "wrong length")
    if answer.labels is not None and not np.array_equal(np.asarray(answer.labels).astype(np.int64),
                                                        request.labels.astype(np.int64)):
        return ScoreAnswer.nothing(teacher, request, "out of order")
    missing: collections.Counter[str] = collections.Counter()
    hidden = answer.hidden
    if request.what == "hidden":
        if hidden is None:
            return ScoreAnswer.nothing(teacher, request, "no hidden states")
        lost = ~np.isfinite(np.asarray(hidden, np.float32)).all(axis=-1)
        hidden = np.where(lost[:, None], np.nan, hidden)
        _count(missing, answer, int(lost.sum()))
        return ScoreAnswer(teacher, logprob, hidden=hidden, missing=dict(missing))
    top_ids = top_logprob = None
    if request.what in ("top_k", "full"):
        if fault := _top_fault(request, answer):
            return ScoreAnswer.nothing(teacher, request, fault)
        top_ids, top_logprob = answer.top_ids, np.array(answer.top_logprob, np.float32, copy=True)
    impossible, above = np.isneginf(logprob), np.isfinite(logprob) & (logprob > ABOVE_ZERO)
    strange = ~np.isfinite(logprob) & ~impossible
    logprob[impossible | above | strange] = np.nan
    logprob = np.minimum(logprob, 0.0)
    if request.what == "top_k":
        strange |= np.isnan(top_logprob).any(axis=1) & ~above
        malformed = ~(strange | above) & _contradicts(request, logprob, top_ids, top_logprob)
        impossible &= False
        missing.update({MALFORMED: int(malformed.sum())} if malformed.any() else {})
        top_logprob[strange | above | malformed] = np.nan
    elif request.what == "full":
        top_logprob[np.isnan(logprob)] = np.nan
    _count(missing, answer, int(strange.sum()))
    missing.update({reason: int(lost.sum()) for reason, lost in ((IMPOSSIBLE, impossible), ("above 0", above))
                    if lost.any()})
    return ScoreAnswer(teacher, logprob, top_ids, top_logprob, None, dict(missing))


def _count(missing: collections.Counter[str], answer: ScoreAnswer, lost: int) -> None:
    """Count `lost` tokens under the back end's own reasons as far as they go, the others as not finite."""
    for reason, count in answer.missing.items():
        if reason != IMPOSSIBLE and (taken := min(int(count), lost)) > 0:
            missing[reason] += taken
            lost -= taken
    if lost:
        missing["not finite"] += lost


def _top_fault(request: ScoreRequest, answer: ScoreAnswer) -> str:
    """What is wrong with the likeliest ids of an answer as a whole, "" where nothing is."""
    ids, values = answer.top_ids, answer.top_logprob
    if ids is None or values is None or ids.shape != values.shape or ids.ndim != 2:
        return MALFORMED
    if request.what == "top_k" and ids.shape[1] != request.k:
        return MALFORMED
    return "" if not (values > ABOVE_ZERO).any() else "above 0"


def _contradicts(request: ScoreRequest, logprob: np.ndarray, ids: np.ndarray, values: np.ndarray) -> np.ndarray:
    """bool [n]: likeliest ids that cannot be those of a distribution in which the token has this log-probability (−inf and
    NaN: not known): repeated or negative, of more mass than 1, or with the token at another place."""
    ordered = np.sort(ids, axis=1)
    wrong = (ordered[:, 0] < 0) | (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    wrong |= np.exp(values.astype(np.float64)).sum(axis=1) > MASS
    mine = ids == request.labels[:, None]
    own = np.where(mine.any(axis=1), np.where(mine, values, -np.inf).max(axis=1), logprob)
    lowest = np.where(mine.any(axis=1), np.inf, values.min(axis=1))
    return wrong | (np.isfinite(logprob) & ((np.abs(own - logprob) > ABOVE_ZERO) | (logprob > lowest + ABOVE_ZERO)))


def unscored(answer: ScoreAnswer) -> np.ndarray:
    """bool [n]: tokens without a usable score."""
    if answer.top_logprob is not None:
        return np.isnan(answer.top_logprob).any(axis=1)
    if answer.hidden is not None:
        return ~np.isfinite(np.asarray(answer.hidden, np.float32)).all(axis=-1)
    return ~np.isfinite(answer.logprob)


def faulty(answer: ScoreAnswer) -> int:
    """Tokens without a score for a reason that asking again might mend."""
    return sum(count for reason, count in answer.missing.items() if reason not in FINAL)


def merged(first: ScoreAnswer, second: ScoreAnswer) -> ScoreAnswer:
    """The first answer with the second's scores where it has none; the second's reasons for what is still missing (all of
    them as one where it gave several)."""
    lost = unscored(first)
    if not lost.any():
        return first
    if lost.all():
        return second
    if first.hidden is not None or (first.top_ids is None) != (second.top_ids is None):
        return second if faulty(second) < faulty(first) else first
    found = ScoreAnswer(first.teacher, np.where(lost, second.logprob, first.logprob), *(
        None if one is None else np.where(lost[:, None], other, one)
        for one, other in ((first.top_ids, second.top_ids), (first.top_logprob, second.top_logprob))))
    left = int(unscored(found).sum())
    return dataclasses.replace(found, missing={", ".join(sorted(second.missing)): left} if left else {})

