"""What a loop tells the mixer (events) and what the mixer asks of it (actions): plain records, no behaviour."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from mopd.mixer import StepPlan


class GroupId(NamedTuple):
    """Launch `number` (0, 1, 2, …) of a source "domain/stream". The loop makes its task and seeds from these two and the
    run's seed alone, so that a group that is launched again after a restart is the same group."""

    source: str
    number: int

    def __str__(self) -> str:
        return f"{self.source}#{self.number}"


@dataclasses.dataclass(frozen=True)
class EngineChanged:
    """Engine `engine` has `slots` sequences and `kv_tokens` tokens of KV memory from now on; 0 slots: it is gone, and what
    ran there is launched again elsewhere."""

    time: float
    engine: str
    slots: int
    kv_tokens: float


@dataclasses.dataclass(frozen=True)
class Finished:
    """Sequence `member` of a group has ended with `tokens` tokens in its context."""

    time: float
    group: GroupId
    member: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Failed:
    """Sequence `member` of a group was given up for a reason of infrastructure, after its retries; it leaves its group."""

    time: float
    group: GroupId
    member: int
    reason: str


@dataclasses.dataclass(frozen=True)
class Judged:
    """A group whose sequences have all ended is scored: it may enter a batch, or (accepted=False: no spread, nothing
    scored, …) it may not. `version` is the newest weights that wrote in it, from which `max_age` counts; None: those of the
    step that is collected."""

    time: float
    group: GroupId
    accepted: bool
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class TrainerReady:
    """The learner can take the next batch."""

    time: float


@dataclasses.dataclass(frozen=True)
class Returned:
    """The last batch was not trained after all (the run ends): its groups wait again, and its plan stands."""

    time: float
    batch: Batch


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a trained step measured: mean reverse KL per token by domain, and (of rollouts, of fresh turns at prefixes) by
    domain, None where the step had none. Moves adaptive shares and prefix fractions, where these are on."""

    time: float
    reverse_kl: Mapping[str, float]
    by_stream: Mapping[str, tuple[float | None, float | None]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Completed:
    """How a group ended that an earlier process finished: seconds in flight, tokens of a sequence, accepted or not, and its
    version as in Judged."""

    seconds: float
    tokens: float
    accepted: bool = True
    version: int | None = None


@dataclasses.dataclass(frozen=True)
class Restarted:
    """This process has just begun; `time` is its own clock, which may start anew. No engine is known any more.

    kept        groups of the loaded state of which the loop still has the tokens (all: None). They go on where they were,
                and a kept group whose sequences had all ended is owed a Judged. All others begin again, under their numbers
    completed   groups that were finished after the state was saved, or by an earlier run, and could be used again
    """

    time: float
    kept: frozenset[GroupId] | None = None
    completed: Mapping[GroupId, Completed] = dataclasses.field(default_factory=dict)


Event = EngineChanged | Finished | Failed | Judged | TrainerReady | Returned | Measured | Restarted


@dataclasses.dataclass(frozen=True)
class Launch:
    """Start sequence `member` of `group` on `engine`, or go on with it there (`resume`) from the tokens that there are."""

    group: GroupId
    member: int
    engine: str
    resume: bool = False


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Stop sequence `member` of `group` on `engine` and throw its tokens away; it will not be heard of again."""

    group: GroupId
    member: int
    engine: str


@dataclasses.dataclass(frozen=True)
class Batch:
    """Train on these groups: exactly `plan.cells` of each (domain, stream), the earliest launched first."""

    plan: StepPlan
    groups: tuple[GroupId, ...]


@dataclasses.dataclass(frozen=True)
class Discard:
    """A group that has ended, or sequences of it have, and that will not be used: no Judged is expected for it any more.
    `reason` is for the log."""

    group: GroupId
    reason: str


@dataclasses.dataclass(frozen=True)
class Say:
    """A sentence for the log."""

    sentence: str


Action = Launch | Cancel | Batch | Discard | Say
