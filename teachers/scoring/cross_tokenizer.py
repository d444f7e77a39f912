"""A teacher with another tokenizer: its scores of the same text, span by span. Off unless a teacher asks for it.

Only sampled tokens can be scored: two vocabularies have no distribution in common. What is approximated stands in
`translation.py`, what a span's score becomes for its tokens in `alignment.span_advantages`.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores
from teachers.scoring import wanted
from teachers.scoring.alignment import share, span_advantages
from teachers.scoring.answers import checked
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import ScoreAnswer, ScoreRequest
from teachers.scoring.translation import Translation, Translator

KEPT = 4096  # translations, each asked for twice: by the score and by the micro-batch
ONLY_SAMPLED = "a teacher with another tokenizer scores sampled tokens alone, at temperature 1 and over all ids"
NO_OWN = "the student's own log-probability is missing"


class CrossTokenizerBackend:
    """A ScoringBackend that asks another one in its own tokens.

    inner        who answers, in the teacher's tokens
    translator   from the student's tokens to those

    An answer has the sum of the teacher's log-probabilities of a span in equal parts over the span's tokens (sums over whole
    spans are the teacher's own); tokens without a span are NaN, counted by one of alignment.UNALIGNED.
    """

    gives = frozenset({"sampled"})
    max_k = 0
    max_tokens = None  # the inner one's limit counts other tokens; it says itself what it cannot read

    def __init__(self, inner: Any, translator: Translator):
        self.inner, self.translator, self.teacher = inner, translator, inner.teacher
        self._known: collections.OrderedDict[bytes, Translation] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def returns(self) -> int:
        """How often the inner one's servers came back."""
        return getattr(self.inner, "returns", 0)

    def identity(self) -> dict[str, Any]:
        """See ScoringBackend; it tells of the teacher's own tokenizer."""
        return self.inner.identity()

    def translation(self, request: ScoreRequest) -> Translation:
        """The request in the teacher's tokens; the last KEPT ones are remembered."""
        key = request.key()
        with self._lock:
            found = self._known.get(key)
        if found is None:
            found = self.translator.translate(request)
            with self._lock:
                self._known[key] = found
                while len(self._known) > KEPT:
                    self._known.popitem(last=False)
        return found

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """See ScoringBackend."""
        answers: list[ScoreAnswer | None] = [None] * len(requests)
        asked: list[tuple[int, Translation]] = []
        for number, request in enumerate(requests):
            if request.what != "sampled" or request.temperature != 1.0 or request.candidates is not None:
                answers[number] = ScoreAnswer.nothing(self.teacher, request, ONLY_SAMPLED)
                continue
            translation = self.translation(request)
            if translation.request is None:
                answers[number] = ScoreAnswer(self.teacher, np.full(len(request), np.nan, np.float32),
                                              missing=dict(translation.missing))
            else:
                asked.append((number, translation))
        found = list(self.inner.score([translation.request for _, translation in asked])) if asked else []
        found += [None] * (len(asked) - len(found))
        for (number, translation), answer in zip(asked, found, strict=False):
            answers[number] = self._spread(requests[number], translation, answer)
        return answers

    def _spread(self, request: ScoreRequest, translation: Translation, answer: ScoreAnswer | None) -> ScoreAnswer:
        usable = checked(translation.request, answer, self.teacher)
        values = usable.logprob.astype(np.float64)
        if answer is not None and len(answer.logprob) == len(values):
            values[np.isneginf(answer.logprob)] = -np.inf  # ruled out: an answer, whoever counts it
        logprob = np.full(len(request), np.nan, np.float32)
        missing = collections.Counter(translation.missing)
        for number, (start, stop) in enumerate(translation.theirs):
            tokens = np.flatnonzero(translation.spans == number)
            total = float(values[start:stop].sum())
            if np.isnan(total):
                missing[", ".join(sorted(usable.missing)) or "not finite"] += len(tokens)
            else:
                logprob[tokens] = share(total, len(tokens))
        return ScoreAnswer(self.teacher, logprob, missing=dict(missing))

    def rest(self) -> None:
        """Its device memory may be given back until it is asked again."""
        if hasattr(self.inner, "rest"):
            self.inner.rest()

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the weights are not what they were."""
        if hasattr(self.inner, "check_unchanged"):
            self.inner.check_unchanged()

    def close(self) -> None:
        self.inner.close()


class CrossTokenizerTeacher(RemoteTeacher):
    """A RemoteTeacher over a CrossTokenizerBackend: for the learner each token of a span of several carries the whole span's
    log-ratio (alignment.span_advantages), made with the student's log-probabilities at sampling (µ, which is π_θ but for
    the updates since)."""

    by_text = True  # it scores what the ids spell, never ids that spell nothing

    def __call__(self, batch: MicroBatch, *, need: str = "sampled", temperature: float = 1.0) -> Scores:
        """See RemoteTeacher."""
        scores = super().__call__(batch, need=need, temperature=temperature)
        requests = wanted.of_batch(batch.to("cpu"), what=need, temperature=temperature)
        spans, count = [], 0
        for request in requests:
            own = self.backend.translation(request).spans
            spans.append(np.where(own < 0, -1, own + count))
            count += int(own.max(initial=-1)) + 1
        if not spans:
            return scores
        shares = scores.logprob.cpu().numpy()
        given = span_advantages(shares, batch.behaviour_logprob.float().cpu().numpy(), np.concatenate(spans))
        if lost := int((np.isfinite(shares) & ~np.isfinite(given)).sum()):
            scores.missing[NO_OWN] += lost
        scores.logprob = torch.from_numpy(given).to(scores.logprob.device)
        return scores
