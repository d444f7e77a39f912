"""Teachers as scorers of packed micro-batches: in process (hf)."""

from teachers.scoring.base import TeacherScorer
from teachers.scoring.hf import HFTeacher

__all__ = ["HFTeacher", "TeacherScorer"]
