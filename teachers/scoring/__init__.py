"""Teachers as scorers of packed micro-batches: in process (hf), behind a back end (remote), and several as one (mixture)."""

from teachers.scoring.base import TeacherScorer
from teachers.scoring.hf import HFTeacher
from teachers.scoring.mixture import MixtureScorer
from teachers.scoring.remote import RemoteTeacher

__all__ = ["HFTeacher", "MixtureScorer", "RemoteTeacher", "TeacherScorer"]
