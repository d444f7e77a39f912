"""Probes: a few fixed texts per teacher, scored at launch and now and then, whose scores must not move.

What moves them is what a run would otherwise not see: a server that was started again with other weights or another
precision, a cache in front of it that is stale, answers that depend on the order of the questions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.seeds import stable_seed
from teachers.scoring.requests import ScoreRequest, TeacherError, TeacherUnreachable

TEXTS, TOKENS = 4, 96
# enough to see other weights or a shift at once, and next to nothing beside a step
TOLERANCE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.5}
# largest |Δ log π| in nats that rounding explains: sums in another order over a few thousand terms. In bfloat16 (8 bits)
# single unlikely tokens move by tenths; another model moves tokens by whole nats


@dataclasses.dataclass(frozen=True)
class Drift:
    """What a probe found of one teacher: the largest and the mean |Δ log π| in nats, and how many tokens had no score."""

    teacher: str
    largest: float
    mean: float
    unscored: int = 0
    against: str = "its first probe"

    def exceeds(self, tolerance: float) -> bool:
        return self.unscored > 0 or not self.largest <= tolerance

    def words(self, tolerance: float) -> str:
        lost = f"{self.unscored} tokens without a score" if self.unscored else ""
        moved = (f"scores that differ by up to {self.largest:.3g} nats (mean {self.mean:.3g}, tolerance {tolerance:g}) from "
                 f"{self.against}")
        return (f"teacher {self.teacher!r}: its probe has {lost or moved}: other weights, another precision or a shift. "
                f"Compare what is served with teachers.{self.teacher}")


def random_texts(ids: Sequence[int], seed: int, *, longest: int = TOKENS) -> list[np.ndarray]:
    """TEXTS sequences uint32 [longest] of valid ids, a function of the seed alone."""
    rng = np.random.default_rng(stable_seed(seed, "probes"))
    return [rng.choice(np.asarray(ids, np.uint32), max(2, longest)) for _ in range(TEXTS)]


def requests_of(texts: Sequence[np.ndarray], temperature: float = 1.0) -> list[ScoreRequest]:
    """Every token but the first of each text."""
    return [ScoreRequest(np.asarray(text, np.uint32), 1, len(text), temperature=temperature) for text in texts]


class Probes:
    """The fixed texts of a run and what each teacher said of them first.

    backends    teacher -> (ScoringBackend, revision, dtype)
    texts       teacher -> token sequences, each of 2 tokens or more
    tolerance   nats; None: by the teacher's dtype
    every       steps between two probes; 0: at launch only
    """

    def __init__(self, backends: Mapping[str, tuple[Any, str, str]], texts: Mapping[str, Sequence[np.ndarray]], *, seed: int,
                 every: int = 50, tolerance: float | None = None):
        self.backends, self.seed, self.every, self._tolerance = dict(backends), seed, every, tolerance
        self.requests = {name: requests_of(texts[name]) for name in backends}
        self.first: dict[str, list[np.ndarray]] = {}

    def tolerance(self, teacher: str) -> float:
        """In nats."""
        if self._tolerance is not None:
            return self._tolerance
        return TOLERANCE.get(self.backends[teacher][2], max(TOLERANCE.values()))

    def due(self, step: int) -> bool:
        """Whether a probe comes before this step (the launch's own comes before all)."""
        return self.every > 0 and step > 0 and step % self.every == 0

    def _chosen(self, only: Collection[str] | None) -> list[str]:
        return [name for name in self.backends if only is None or name in only]

    def launch(self, known: Mapping[str, Any] | None = None, *, only: Collection[str] | None = None) -> list[str]:
        """Score everything for the first time, twice in different orders; what a former launch wrote (`state_dict`) counts as
        first where teacher, revision and texts are the same. `only`: of these teachers. Returns alarms. Raises
        TeacherError where a probe has no score at all, TeacherUnreachable where nothing answers."""
        alarms = []
        for name in self._chosen(only):
            revision = self.backends[name][1]
            now = self._score(name, order=0)
            if all(np.isnan(part).all() for part in now):
                raise TeacherError(f"teacher {name!r} answers, but gave none of {sum(map(len, now))} probe tokens a score; "
                                   "look at its log, and whether it gives prompt log-probabilities")
            entry = (known or {}).get(name) or {}
            same = entry.get("revision") == revision and entry.get("texts") == self._texts(name)
            self.first[name] = [np.asarray(part, np.float32) for part in entry["logprob"]] if same else now
            for drift in (_compare(name, now, self.first[name], "its first probe"),
                          _compare(name, self._score(name, order=1), now, "the same texts in another order")):
                if drift.exceeds(self.tolerance(name)):
                    alarms.append(drift.words(self.tolerance(name)))
        return alarms

    def probe(self, step: int, *, only: Collection[str] | None = None
              ) -> tuple[dict[str, dict[str, float]], dict[str, str]]:
        """({teacher: {"largest", "mean", "unscored"}}, {teacher: alarm}) of a probe before `step`, in an order that changes
        with it. A teacher that does not answer now is passed over, with {"unanswered": 1}: whoever needs its scores waits
        for it."""
        found, alarms = {}, {}
        for name in self._chosen(only):
            try:
                now = self._score(name, order=step)
            except TeacherUnreachable:
                found[name] = {"unanswered": 1}
                continue
            drift = _compare(name, now, self.first[name], "its first probe")
            found[name] = {"largest": drift.largest, "mean": drift.mean, "unscored": drift.unscored}
            if drift.exceeds(self.tolerance(name)):
                alarms[name] = drift.words(self.tolerance(name))
        return found, alarms

    def against(self, name: str, other: Any, what: str) -> Drift:
        """How far a teacher's first scores are from another back end's."""
        theirs = [np.asarray(answer.logprob, np.float32) for answer in other.score(self.requests[name])]
        return _compare(name, theirs, self.first[name], what)

    def state_dict(self) -> dict[str, Any]:
        """The first scores, as JSON values."""
        return {name: {"revision": self.backends[name][1], "texts": self._texts(name),
                       "logprob": [part.tolist() for part in self.first[name]]} for name in self.first}

    def save(self, path: Path) -> None:
        """Write `state_dict` as JSON (missing scores as null)."""
        state = self.state_dict()
        for entry in state.values():
            entry["logprob"] = [[None if v != v else v for v in part] for part in entry["logprob"]]
        path.write_text(json.dumps(state))

    @staticmethod
    def load(path: Path) -> dict[str, Any]:
        """What `save` wrote; {} where there is nothing."""
        if not path.is_file():
            return {}
        state = json.loads(path.read_text())
        for entry in state.values():
            entry["logprob"] = [[np.nan if v is None else v for v in part] for part in entry["logprob"]]
        return state

    def _texts(self, name: str) -> list[str]:
        return [request.key().hex() for request in self.requests[name]]

    def _score(self, name: str, order: int) -> list[np.ndarray]:
        """The texts' scores in their own order, asked in the order number `order`, past every cache of this program."""
        requests, backend = self.requests[name], self.backends[name][0]
        turn = np.random.default_rng(stable_seed(self.seed, "order", order)).permutation(len(requests))
        if order == 1:  # the launch's second: certainly another one
            turn = np.arange(len(requests))[::-1]
        elif order == 0:
            turn = np.arange(len(requests))
        found: list[np.ndarray] = [np.zeros(0)] * len(requests)
        for place, answer in zip(turn, backend.score([requests[i] for i in turn]), strict=True):
            logprob = np.asarray(answer.logprob, np.float32)
            fits = logprob.shape == (len(requests[place]),)
            found[place] = np.where(np.isfinite(logprob), logprob, np.nan) if fits else np.full(len(requests[place]), np.nan)
        return found


def _compare(name: str, now: Sequence[np.ndarray], first: Sequence[np.ndarray], against: str) -> Drift:
    moved = np.abs(np.concatenate(now) - np.concatenate(first))
    known = np.isfinite(moved)
    new = int((~np.isfinite(np.concatenate(now)) & np.isfinite(np.concatenate(first))).sum())
    size = moved[known]
    return Drift(name, float(size.max()) if len(size) else 0.0, float(size.mean()) if len(size) else 0.0, new, against)
