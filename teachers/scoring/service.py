"""The scores of a run's steps by teachers that are not in this process: begun as sequences end, complete before training.

    expect(rows)   as soon as a sequence has ended: its scoring starts in the background
    settle(rows)   before the learner's step: waits until every token has its score, or its teacher's answer is final

Teachers in this process score inside the learner's step, where decision points share their prefix; they are passed over.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mopd.learner.scores import what_to_ask
from mopd.rows import Row
from teachers.scoring import wanted
from teachers.scoring.answers import unscored
from teachers.scoring.cache import Entry
from teachers.scoring.mixture import MixtureScorer
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import ScoreAnswer, ScoreRequest


class Scoring:
    """Ahead-of-need scoring for the domains of a run.

    scorers      domain → its scorer, as TeacherRegistry.scorers gives them
    need, top_k  of the learner's objective, which says what it will ask them for, at `temperature`
    max_unscored_share   see train.max_unscored_share
    """

    def __init__(self, scorers: Mapping[str, Any], *, need: str, temperature: float, top_k: int = 0,
                 max_unscored_share: float = 1.0):
        self.need, self.top_k, self.temperature, self.max_unscored_share = need, top_k, temperature, max_unscored_share
        self.remote = {domain: _remote(scorer) for domain, scorer in scorers.items()}
        self._asked: dict[int, dict[bytes, ScoreRequest]] = {}  # by teacher: what this process began for the coming step
        self._before: dict[str, Any] = {}
        self.begin()

    def begin(self) -> None:
        """Steps are counted from here on: what was asked before (a self-test, measurements at launch) is no step's."""
        self._before = {teacher.teacher: self._stats(teacher) for teacher in self.teachers}

    @property
    def teachers(self) -> list[RemoteTeacher]:
        """Each once, in the domains' order."""
        return list(dict.fromkeys(teacher for part in self.remote.values() for teacher in part))

    def expect(self, rows: Sequence[Row]) -> None:
        """Start scoring rows in the background; returns at once."""
        for teacher, requests in self._requests(rows).items():
            self._asked.setdefault(id(teacher), {}).update({request.key(): request for request in requests})
            teacher.prefetch(requests)

    def settle(self, rows: Sequence[Row], ranks: Any = None) -> dict[str, Any]:
        """Wait for the scores of a step's rows (of all ranks; each settles those that it began, and tells the others).

        Returns {} where no teacher is remote, else {"waited_s", "teachers": {id: {"tokens" wanted, "unscored", "asked",
        "asked_again", "requests", "reused", "faults" {reason: tokens}, "paused_s"}}} of this process. Raises
        patience.TeacherGone where a teacher does not answer for too long, mopd.ranks.RankFailed where it happened to another
        rank.
        """
        if not self.teachers:
            return {}
        start = time.perf_counter()
        several = ranks is not None and ranks.size > 1
        whole = self._requests(rows)
        own = {t: list(self._asked.get(id(t), {}).values()) if several else requests for t, requests in whole.items()}
        def work():
            return {t: t.patient_answers(requests, max_unscored_share=self.max_unscored_share)
                    for t, requests in own.items()}
        answers = ranks.together("waiting for the teachers", work) if several else work()
        self._asked.clear()
        if several:
            self._exchange(own, answers, ranks)
        found = {t.teacher: self._record(t, own[t], answers[t]) for t in own}
        return {"waited_s": time.perf_counter() - start, "teachers": found}

    def _requests(self, rows: Sequence[Row]) -> dict[RemoteTeacher, list[ScoreRequest]]:
        found: dict[RemoteTeacher, list[ScoreRequest]] = {}
        for row in rows:
            for teacher in self.remote[row.domain]:
                what, k = what_to_ask(teacher.gives, self.need, self.top_k)
                requests = wanted.of_rows([row], what=what, k=k, temperature=self.temperature)
                found.setdefault(teacher, []).extend(requests)
        return found

    def _exchange(self, own: Mapping[RemoteTeacher, Sequence[ScoreRequest]],
                  answers: Mapping[RemoteTeacher, Sequence[ScoreAnswer]], ranks: Any) -> None:
        """Give every rank the scores of the others, of sampled tokens and likeliest ids: its share of the rows may have been
        sampled there."""
        mine = {t.teacher: [[request.key().hex(), answer.logprob, answer.top_ids, answer.top_logprob, dict(answer.missing)]
                            for request, answer in zip(own[t], answers[t], strict=True)
                            if request.what in ("sampled", "top_k")] for t in own}
        by_name = {t.teacher: t for t in self.teachers}
        for rank, part in enumerate(ranks.gather(mine)):
            for name, entries in part.items() if rank != ranks.rank else ():
                teacher = by_name[name]
                for key, logprob, top_ids, top_logprob, missing in entries:
                    answer = ScoreAnswer(name, np.asarray(logprob, np.float32), top_ids, top_logprob, missing=dict(missing))
                    teacher.cache.put(teacher.revision, bytes.fromhex(key), Entry(answer, teacher.again + 1))

    @staticmethod
    def _stats(teacher: RemoteTeacher) -> tuple[collections.Counter, collections.Counter]:
        return teacher.stats.copy(), teacher.reasons.copy()

    def _record(self, teacher: RemoteTeacher, requests: Sequence[ScoreRequest], answers: Sequence[ScoreAnswer]) -> dict:
        stats, reasons = self._stats(teacher)
        before, known = self._before[teacher.teacher]
        self._before[teacher.teacher] = (stats, reasons)
        return {"tokens": sum(map(len, requests)), "unscored": sum(int(unscored(answer).sum()) for answer in answers),
                **{name: stats[name] - before[name] for name in ("asked", "asked_again", "requests", "reused", "paused_s")},
                "faults": {reason: count - known[reason] for reason, count in sorted(reasons.items())
                           if count > known[reason]}}


def _remote(scorer: Any) -> tuple[RemoteTeacher, ...]:
    """The remote teachers behind a domain's scorer."""
    members = scorer.members if isinstance(scorer, MixtureScorer) else (scorer,)
    return tuple(member for member in members if isinstance(member, RemoteTeacher))
