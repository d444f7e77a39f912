"""What a sampler is asked to do and what it tells of it: plain records between the loop and whoever samples for it.

A *work* is one sequence: a rollout to play, or a fresh turn to write at a stored decision point. A sampler takes works
one by one, samples all of them beside each other, and tells how each ended.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mopd.mixer_events import GroupId
from mopd.rows import Row
from mopd.sampling.episode import Episode
from prefix_store.trajectory import DecisionPoint


@dataclasses.dataclass(frozen=True)
class Work:
    """Sequence `member` of the launched `group`: a whole task, or what goes on from the stored `point` (which whoever gives
    the work has drawn). Task and draws are a function of the run's seed and these three alone, so a work that is given again
    is the same work; `attempt` only tells the news of one giving from those of another."""

    group: GroupId
    member: int
    point: DecisionPoint | None = None
    attempt: int = 0


@dataclasses.dataclass(frozen=True)
class Done:
    """A work's sequence has ended. `rows` carry group and sequence numbers 0 until the loop numbers them; their outcome
    advantages are 0 until the group is judged. `tokens` is the length of its context, `record` what is counted of it: reward,
    success, turns, malformed, attempts, ended, environment_steps (those that led to a stored point among them),
    environment_seconds, sampling_seconds, sampled_tokens, seconds (from being given to its end). `episode` is that of a
    played sequence without its tokens, None for a fresh turn."""

    work: Work
    rows: tuple[Row, ...]
    tokens: int
    record: dict[str, Any]
    episode: Episode | None = None


@dataclasses.dataclass(frozen=True)
class GaveUp:
    """A work failed for a reason of infrastructure after its retries; `reason` is its category, `record` what it says in
    plain values (attempts, and a replay's divergence)."""

    work: Work
    reason: str
    words: str
    record: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Ready:
    """The sampler has its engine and environments: so many sequences and tokens of KV memory at a time."""

    slots: int
    kv_tokens: float
    seconds: float


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


News = Done | GaveUp | Ready | TookWeights | Lost
