"""Teachers as scorers of packed micro-batches: in process (hf), and several as one (mixture)."""

from teachers.scoring.base import TeacherScorer
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer

__all__ = ["HFTeacher", "MixtureScorer", "TeacherScorer"]
