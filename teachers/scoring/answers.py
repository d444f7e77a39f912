"""Answers of back ends, checked and merged: what is not a usable score becomes NaN with a reason, never a number."""

from __future__ import annotations

import collections

import numpy as np

from teachers.scoring.alignment import UNALIGNED
from teachers.scoring.requests import ScoreAnswer, ScoreRequest

IMPOSSIBLE = "log-probability -inf"
# an answer, not a fault: the teacher rules the token out, and asking again would not change it
FINAL = UNALIGNED | {IMPOSSIBLE}
ABOVE_ZERO = 1e-3
# a log-probability above it (nats) is no rounding of 0


def checked(request: ScoreRequest, answer: ScoreAnswer | None, teacher: str) -> ScoreAnswer:
    """The answer with every unusable score as NaN and counted by reason. Never raises for what a back end may say.

    Reasons: "no answer", "wrong length", "out of order" (the back end says it scored other ids), "not finite", "above 0",
    IMPOSSIBLE, "likeliest ids malformed", and those that the back end gave itself for scores that it left out.
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
    impossible, above = np.isneginf(logprob), np.isfinite(logprob) & (logprob > ABOVE_ZERO)
    strange = ~np.isfinite(logprob) & ~impossible
    logprob[impossible | above | strange] = np.nan
    logprob = np.minimum(logprob, 0.0)
    _count(missing, answer, int(strange.sum()))
    missing.update({reason: int(lost.sum()) for reason, lost in ((IMPOSSIBLE, impossible), ("above 0", above))
                    if lost.any()})
    if request.what in ("top_k", "full"):
        fault = _top_fault(request, answer)
        if fault:
            return ScoreAnswer.nothing(teacher, request, fault)
    return ScoreAnswer(teacher, logprob, answer.top_ids, answer.top_logprob, None, dict(missing))


def _count(missing: collections.Counter[str], answer: ScoreAnswer, lost: int) -> None:
    """Count `lost` tokens under the back end's own reasons as far as they go, the others as not finite."""
    for reason, count in answer.missing.items():
        if reason != IMPOSSIBLE and (taken := min(int(count), lost)) > 0:
            missing[reason] += taken
            lost -= taken
    if lost:
        missing["not finite"] += lost


def _top_fault(request: ScoreRequest, answer: ScoreAnswer) -> str:
    ids, values = answer.top_ids, answer.top_logprob
    if ids is None or values is None or ids.shape != values.shape or ids.ndim != 2:
        return "likeliest ids malformed"
    if request.what == "top_k" and ids.shape[1] != request.k:
        return "likeliest ids malformed"
    return "" if not (values > ABOVE_ZERO).any() else "above 0"


def unscored(answer: ScoreAnswer) -> np.ndarray:
    """bool [n]: tokens without a usable score."""
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
    if lost.all() or not any(part is not None for part in (first.top_ids, first.hidden)):
        if lost.all():
            return second
        logprob = np.where(lost, second.logprob, first.logprob)
        left = int((~np.isfinite(logprob)).sum())
        return ScoreAnswer(first.teacher, logprob, missing={", ".join(sorted(second.missing)): left} if left else {})
    return second if faulty(second) < faulty(first) else first

