"""From a teacher's section of the configuration to the back end that answers for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from teachers.scoring.requests import ScoringBackend, TeacherError


def make_backend(spec: Any) -> ScoringBackend:
    """The back end of a teachers.registry.TeacherSpec whose `backend` is not "hf" (in-process models score micro-batches
    themselves). Starts nothing that takes long; raises TeacherError naming what is missing."""
    if spec.backend == "server":
        from teachers.scoring.vllm_server import VLLMServers

        return VLLMServers.from_spec(spec)
    if spec.backend == "vllm":
        from teachers.scoring.vllm_local import VLLMLocal

        return VLLMLocal.from_spec(spec)
    raise TeacherError(f"teacher {spec.id!r} has the back end {spec.backend!r}; there are hf, vllm, server")


def told(identity: Mapping[str, Any], folder: Mapping[str, Any]) -> dict[str, Any]:
    """What a back end tells, completed by its model's folder where that can be read here."""
    return {**folder, **{key: value for key, value in identity.items() if value is not None}}
