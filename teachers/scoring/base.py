"""What every teacher back end gives: scores of a packed micro-batch, a name, and proof that it stayed as it was."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mopd.learner.packing import MicroBatch
from mopd.learner.scores import Scores


@runtime_checkable
class TeacherScorer(Protocol):
    """One teacher. Calling it scores a micro-batch's loss tokens (see `mopd.learner.scores.Scorer`).

    gives   what it can deliver: {"sampled"}, or {"sampled", "full", "hidden"}
    A scorer whose `collective` is true must be called equally often by every rank (teachers.scoring.sharded).
    """

    teacher: str
    gives: frozenset[str]

    def __call__(self, batch: MicroBatch, *, need: str = "full", temperature: float = 1.0) -> Scores: ...

    def rest(self) -> None:
        """The step's scoring is over; device memory may be given back until the next call."""

    def check_unchanged(self) -> None:
        """Raise RuntimeError where the teacher's weights are not what they were when it was loaded."""

    def close(self) -> None:
        """Give its resources back."""
