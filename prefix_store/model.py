"""The types of a trajectory: plain data, arrays not lists. prefix_store/trajectory.py has what is done with them.

Knows numpy only. Terms follow the method's vocabulary: a *sequence* is one agent loop on one task, a *context* one
append-only token list of it, a *segment* a maximal run of tokens of one origin, a *turn* one action segment with the
observation that follows, and a *decision point* the position just before an action segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from prefix_store.extras import Extra

SEGMENT_KINDS = ("prompt", "observation", "action")
SOURCE_KINDS = ("teacher", "expert", "demonstration", "student")
MODEL_WRITERS = ("teacher", "student")
LOGPROB_SLACK = 1e-3
# float32 log-softmax may land a rounding error above 0; anything larger is not a log-probability


class InvalidSequence(ValueError):
    """A sequence breaks a rule of the data model; the message names the rule and the place."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a context, all of one origin. `turn` numbers the turn it belongs to (the prompt: -1)."""

    kind: str
    start: int
    end: int
    turn: int
    writer: str = ""


@dataclasses.dataclass(frozen=True)
class Context:
    """One append-only token list.

    tokens            uint32 [T]   exactly what the acting model saw and wrote, never re-tokenised
    behaviour_logprob float32 [T]  log µ(token | history); NaN where no model wrote the token
    weights_version   int32 [T]    version of the weights that sampled the token; -1 where no model wrote it
    segments          cover [0, T) in order without gaps
    parent, fork      the context whose first `fork` tokens this one shares; parent is None for the first context
    extras            name → Extra: further values per token; all contexts of a sequence have the same names
    """

    tokens: np.ndarray
    behaviour_logprob: np.ndarray
    weights_version: np.ndarray
    segments: tuple[Segment, ...]
    parent: int | None = None
    fork: int = 0
    extras: Mapping[str, Extra] = dataclasses.field(default_factory=dict)

    def actions(self) -> list[Segment]:
        return [s for s in self.segments if s.kind == "action"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the task ended. `reward` trains, `true_reward` is what the environment said; `is_infra` marks a failure
    that is not the model's (it never enters a mean, a deviation or a loss)."""

    reward: float
    true_reward: float
    success: bool = False
    error_category: str = ""
    is_infra: bool = False
    hack: bool = False
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Source:
    """Who played: kind is one of SOURCE_KINDS; id names the teacher, expert, file or student@step; revision pins it."""

    kind: str
    id: str
    revision: str = ""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Hashes of what made the token ids: tokenizer (id → token map and special ids), chat template, model config."""

    tokenizer: str
    chat_template: str
    model_config: str = ""


@dataclasses.dataclass(frozen=True)
class DecisionPoint:
    """The position just before an action segment: (sequence id, context index, turn number)."""

    sequence: str
    context: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One agent loop on one task. `actions` are the action texts in order, so that an environment can be replayed;
    `seed` and `environment_version` pin the environment; `task` names the task inside the domain."""

    domain: str
    task: str
    environment: str
    environment_version: str
    seed: int
    split: str
    contexts: tuple[Context, ...]
    actions: tuple[str, ...]
    outcome: Outcome
    source: Source
    fingerprint: Fingerprint
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Number of turns played; an action that a child context shares with its parent counts once."""
        return sum(s.kind == "action" and s.end > c.fork for c in self.contexts for s in c.segments)


def own_actions(context: Context) -> list[Segment]:
    """The action segments that belong to this context: those that are not shared with its parent."""
    return [s for s in context.segments if s.kind == "action" and s.end > context.fork]


def shared_segments(parent: Context, fork: int) -> list[Segment]:
    """The parent's segments of its first `fork` tokens, the last one cut at the fork: how a child context begins."""
    return [dataclasses.replace(s, end=min(s.end, fork)) for s in parent.segments if s.start < fork]


def writer_kind(segment: Segment, source: Source) -> str:
    """Who wrote an action: the segment's writer up to a `:` or `@`, or the sequence's source where it names none."""
    return segment.writer.split(":")[0].split("@")[0] if segment.writer else source.kind
