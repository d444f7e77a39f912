"""A back end as the learner's teacher: what is known is not asked again, the rest is asked together, and early.

    rows (as they end) ─▶ prefetch ─▶ threads ─▶ back end ─▶ checked ─▶ cache ─▶ micro-batch's scores

Every answer is checked; what is missing is asked again a few times and then stays NaN with its reason. Where nothing
answers at all the run waits (`patience.py`).
"""

from __future__ import annotations

import collections
import dataclasses
import queue
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores
from teachers.scoring import wanted
from teachers.scoring.answers import checked, faulty, merged, unscored
from teachers.scoring.cache import Entry, ScoreCache
from teachers.scoring.patience import Patience
from teachers.scoring.requests import ScoreAnswer, ScoreRequest, ScoringBackend, TeacherUnreachable

ASK_AGAIN = 2
# times that tokens without a score are asked for again at once; most faults of a request do not come twice
THREADS = 4
# prefetches under way at once; each may hold many requests, and the back end has limits of its own


class RemoteTeacher:
    """A TeacherScorer over a ScoringBackend.

    backend    who answers
    revision   what pins the teacher's weights; scores of another revision are never taken from the cache
    cache      of all teachers of the run
    patience   how long it waits for a teacher that does not answer; by default not at all
    again      how often tokens without a score are asked for again

    stats counts: asked (tokens sent, those asked again included), asked_again, requests (sent), reused (tokens found in the
    cache or under way), faults (tokens whose answer was no good, before asking again), paused_s.
    """

    def __init__(self, backend: ScoringBackend, *, revision: str, cache: ScoreCache, patience: Patience | None = None,
                 again: int = ASK_AGAIN, threads: int = THREADS):
        self.backend, self.teacher, self.gives = backend, backend.teacher, backend.gives
        self.revision, self.cache, self.patience, self.again = revision, cache, patience or Patience(), again
        self.head, self.ids = getattr(backend, "head", None), getattr(backend, "ids", None)
        if self.head is None:
            self.gives -= {"hidden"}
        self.stats: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()  # of faults, whether or not asking again mended them
        self.scored_tokens = 0
        self._threads, self._pool = threads, None
        self._waiting: queue.SimpleQueue[ScoreRequest] = queue.SimpleQueue()
        self._under_way: dict[bytes, Future[Entry]] = {}
        self._lock = threading.Lock()
        self._closed = False

    # Ahead of need

    def prefetch(self, requests: Iterable[ScoreRequest]) -> None:
        """Start scoring in the background; returns at once. Never raises for what the back end says: whoever needs the
        scores asks again."""
        with self._lock:
            if self._closed:
                raise RuntimeError(f"teacher {self.teacher!r} is closed")
            new = []
            for request in requests:
                key = request.key()
                if key not in self._under_way and self.cache.get(self.revision, key) is None:
                    self._under_way[key] = Future()
                    new.append(request)
            if not new:
                return
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix=f"scores-{self.teacher}")
            for request in new:
                self._waiting.put(request)
            self._pool.submit(self._work)

    def _work(self) -> None:
        """Ask for everything that waits; what comes meanwhile is another thread's, or the next call's."""
        requests = []
        while True:
            try:
                requests.append(self._waiting.get_nowait())
            except queue.Empty:
                break
        if not requests:
            return
        keys = [request.key() for request in requests]
        try:
            found = self._ask(requests, keys)
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits for it
            self._settle(keys, error=error)
            return
        self._settle(keys, entries=found)

    def _settle(self, keys: Sequence[bytes], entries: dict[bytes, Entry] | None = None,
                error: BaseException | None = None) -> None:
        with self._lock:
            futures = [(key, self._under_way.pop(key)) for key in keys if key in self._under_way]
        for key, future in futures:
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(entries[key])

    # When needed

    def answers(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """Checked answers in the order asked, from the cache, from what is under way, or asked for now. Tokens without a
        score after asking again are NaN with reasons. Raises TeacherUnreachable."""
        keys = [request.key() for request in requests]
        by_key = dict(zip(keys, requests, strict=True))
        entries: dict[bytes, Entry] = {}
        for key, request in by_key.items():
            with self._lock:
                future = self._under_way.get(key)
            entry = self._result(future) if future is not None else None
            entry = entry or self.cache.get(self.revision, key)
            if entry is not None:
                entries[key] = entry
                with self._lock:
                    self.stats["reused"] += len(request) - int(unscored(entry.answer).sum())
        while True:
            todo = [key for key in by_key if key not in entries or (
                faulty(entries[key].answer) and entries[key].asked <= self.again)]
            if not todo:
                return [entries[key].answer for key in keys]
            entries |= self._ask([by_key[key] for key in todo], todo, entries)

    @staticmethod
    def _result(future: Future[Entry]) -> Entry | None:
        try:
            return future.result()
        except Exception:  # noqa: BLE001 - the prefetch failed; asking now says why, if it still fails
            return None

    def patient_answers(self, requests: Sequence[ScoreRequest], *, max_unscored_share: float = 1.0) -> list[ScoreAnswer]:
        """`answers`, but where nothing answers, or more than this share of the tokens stays without a score for a reason
        that may pass, it waits and asks again. Raises patience.TeacherGone when that has lasted too long."""
        wait = self.patience.begin(self.teacher)
        total = sum(map(len, requests))
        while True:
            try:
                found = self.answers(requests)
                lost = sum(map(faulty, found))
                if lost <= max_unscored_share * total:
                    wait.over()
                    self.stats["paused_s"] += wait.seconds
                    return found
                reasons = collections.Counter()
                for answer in found:
                    reasons.update(answer.missing)
                said = (f"{lost} of {total} tokens have no score ({dict(reasons)}), more than train.max_unscored_share="
                        f"{max_unscored_share:g}")
                for request, answer in zip(requests, found, strict=True):
                    if faulty(answer):  # after the pause they are asked for as if for the first time
                        self.cache.put(self.revision, request.key(), Entry(answer, asked=0))
            except TeacherUnreachable as error:
                said = f"it does not answer ({error.said})"
            wait.pause(said)

    def _ask(self, requests: Sequence[ScoreRequest], keys: Sequence[bytes],
             before: dict[bytes, Entry] | None = None) -> dict[bytes, Entry]:
        """Ask the back end, check, put into the cache; key → entry. `before` are the entries that lack scores."""
        answers = list(self.backend.score(requests))
        answers += [None] * (len(requests) - len(answers))
        found: dict[bytes, Entry] = {}
        reasons: collections.Counter[str] = collections.Counter()
        for request, key, answer in zip(requests, keys, answers, strict=False):
            part = checked(request, answer, self.teacher)
            reasons.update(part.missing)
            old = (before or {}).get(key)
            found[key] = Entry(part, 1) if old is None else Entry(merged(old.answer, part), old.asked + 1)
        with self._lock:
            self.stats.update(asked=sum(map(len, requests)), requests=len(requests), faults=sum(reasons.values()),
                              asked_again=sum(map(len, requests)) if before and keys[0] in before else 0)
            self.reasons.update(reasons)
        for key, entry in found.items():
            self.cache.put(self.revision, key, entry)
        return found

    # As a scorer

    def __call__(self, batch: MicroBatch, *, need: str = "full", temperature: float = 1.0, k: int = 0) -> Scores:
        """Scores of the micro-batch's N loss tokens (see TeacherScorer; `k` with "top_k" only). Raises ValueError for a
        `need` that the back end does not give, patience.TeacherGone where it does not answer for too long."""
        if need not in self.gives:
            raise ValueError(f"teacher {self.teacher!r} gives {', '.join(sorted(self.gives))}, not {need!r}; take the "
                             "objective 'mopd' or 'sampled_kl', or a teacher in this process")
        if not temperature > 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        sets = batch.candidates.sets() if getattr(batch, "candidates", None) is not None else None
        requests = wanted.of_batch(batch.to("cpu"), what=need, k=k, temperature=temperature,
                                   candidates=sets if need == "sampled" else None)
        answers = self.patient_answers(requests)
        self.scored_tokens += batch.loss_tokens
        device = batch.label.device
        scores = Scores(self.teacher, None)
        if need == "hidden":
            width = self.head.weight.shape[1]
            scores.hidden = torch.from_numpy(_stack([a.hidden for a in answers], (0, width))).to(device)
            scores.head = self.head
        else:
            scores.logprob = torch.from_numpy(_stack([a.logprob for a in answers], (0,))).to(device)
            scores.over_candidates = sets is not None and need == "sampled"
        if need == "full":
            scores.logits = self._logits(answers, temperature).to(device)
        if need == "top_k":
            told = [a if a.top_ids is not None else _no_top(a, k) for a in answers]
            scores.top_ids = torch.from_numpy(_stack([a.top_ids for a in told], (0, k), np.int64)).to(device)
            scores.top_logprob = torch.from_numpy(_stack([a.top_logprob for a in told], (0, k))).to(device)
        for answer in answers:
            scores.missing.update(answer.missing)
        return scores

    def _logits(self, answers: Sequence[ScoreAnswer], temperature: float) -> torch.Tensor:
        """[N, V] unscaled, from log-probabilities of all V ids: T · log π gives back π at the temperature T."""
        rows = []
        for answer in answers:
            found = np.full((len(answer.logprob), self.ids), np.nan, np.float32)
            if answer.top_ids is not None:
                np.put_along_axis(found, answer.top_ids.astype(np.int64), answer.top_logprob * temperature, axis=1)
            found[unscored(answer)] = np.nan
            rows.append(found)
        return torch.from_numpy(_stack(rows, (0, self.ids or 0)))

    def rest(self) -> None:
        """The step's scoring is over."""
        if hasattr(self.backend, "rest"):
            self.backend.rest()

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the back end can tell that its weights changed; probes tell it of the others."""
        if hasattr(self.backend, "check_unchanged"):
            self.backend.check_unchanged()

    def close(self) -> None:
        """End the threads and the back end; what is under way is given up."""
        with self._lock:
            self._closed = True
            pool, self._pool = self._pool, None
        self.backend.close()
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


def _stack(parts: Sequence[np.ndarray], empty: tuple[int, ...], dtype: type = np.float32) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if len(parts) else np.zeros(empty, dtype)


def _no_top(answer: ScoreAnswer, k: int) -> ScoreAnswer:
    """An answer without likeliest ids as one in which all of them are missing."""
    size = len(answer.logprob)
    return dataclasses.replace(answer, top_ids=np.zeros((size, k), np.int32),
                               top_logprob=np.full((size, k), np.nan, np.float32))

