"""A real back end that can be told to misbehave as servers do."""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np

from teachers.scoring import HFTeacher
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.requests import ScoreAnswer, ScoreRequest, TeacherUnreachable
from tests.mopd.learner.tiny import make_model


class Planted:
    """Passes requests on to `inner`. `fault(request, answer, number)` may change an answer (the `number`-th of all);
    `down` refuses everything; `pause_s` makes every call take that long. `asked` keeps the requests of every call."""

    def __init__(self, inner: HFBackend, fault=None):
        self.inner, self.fault = inner, fault
        self.teacher, self.gives, self.max_k = inner.teacher, inner.gives, inner.max_k
        self.max_tokens, self.head, self.ids = inner.max_tokens, inner.head, inner.ids
        self.down, self.pause_s, self.closed = False, 0.0, False
        self.asked: list[list[ScoreRequest]] = []
        self._count, self._lock = 0, threading.Lock()

    def identity(self):
        if self.down:
            raise TeacherUnreachable(self.teacher, "connection refused")
        return self.inner.identity()

    def score(self, requests):
        if self.down:
            raise TeacherUnreachable(self.teacher, "connection refused")
        if self.pause_s:
            time.sleep(self.pause_s)
        answers = self.inner.score(requests)
        with self._lock:
            self.asked.append(list(requests))
            found = []
            for request, answer in zip(requests, answers, strict=True):
                found.append(answer if self.fault is None else self.fault(request, answer, self._count))
                self._count += 1
        return found

    def close(self):
        self.closed = True


def backend(seed: int = 0, name: str = "t", family: str = "qwen3_moe") -> HFBackend:
    return HFBackend(HFTeacher(make_model(family, seed=seed), teacher=name))


def short(request, answer, number) -> ScoreAnswer:
    return dataclasses.replace(answer, logprob=answer.logprob[:-1])


def not_a_number(request, answer, number) -> ScoreAnswer:
    return dataclasses.replace(answer, logprob=np.where(np.arange(len(request)) % 2 == 0, np.nan, answer.logprob))


def shifted(request, answer, number) -> ScoreAnswer:
    return dataclasses.replace(answer, logprob=np.roll(answer.logprob, 1))


def above_zero(request, answer, number) -> ScoreAnswer:
    return dataclasses.replace(answer, logprob=-answer.logprob)


def swapped(request, answer, number) -> ScoreAnswer:
    """The answer to another request, of the same length."""
    return dataclasses.replace(answer, labels=np.roll(answer.labels, 1) + 1)


def once(fault, every: int = 1):
    """Only the first `every` answers."""
    return lambda request, answer, number: fault(request, answer, number) if number < every else answer
