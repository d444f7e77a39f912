"""What a sampler is asked to do and what it tells of it: plain records between the loop and whoever samples for it.

A *work* is one sequence: a rollout to play, or a fresh turn to write at a stored decision point. A sampler takes works
one by one, samples all of them beside each other, and tells how each ended.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mopd.mixer_events import GroupId
from mopd.rows import Row


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequence `member` of the launched `group`. What it plays (task, trajectory, decision point, draws) is a function of
    the run's seed, group and member alone, so a work that is given again is the same work."""

    group: GroupId
    member: int


@dataclasses.dataclass(frozen=True)
class Done:
    """A work's sequence has ended. `rows` carry group and sequence numbers 0 until the loop numbers them; their outcome
    advantages are 0 until the group is judged. `tokens` is the length of its context, `record` what is counted of it: reward,
    success, turns, malformed, attempts, ended, environment_steps, environment_seconds, sampling_seconds, sampled_tokens,
    and for stored points "point" (sequence, context, turn)."""

    work: Work
    rows: tuple[Row, ...]
    tokens: int
    record: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class GaveUp:
    """A work failed for a reason of infrastructure after its retries; `reason` is its category."""

    work: Work
    reason: str
    words: str


@dataclasses.dataclass(frozen=True)
class TookWeights:
    """The sampler's engine has the weights of `version`; its probe differed by `gap` nats from the learner's (NaN: none)."""

    version: int
    seconds: float
    gap: float = float("nan")


@dataclasses.dataclass(frozen=True)
class Lost:
    """The sampler is gone (killed, crashed, hung); `works` were under way there and begin again elsewhere."""

    words: str
    works: tuple[Work, ...] = ()


News = Done | GaveUp | TookWeights | Lost
