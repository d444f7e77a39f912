"""The student's optimizer step: packing, the DeepSpeed engine, experts, checkpoints."""

from mopd.learner.load import ExpertLoad, expert_load

__all__ = ["ExpertLoad", "expert_load"]
