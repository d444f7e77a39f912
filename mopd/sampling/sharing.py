"""How the ranks of a run share out a step's sampling, and how what they sampled becomes one step again.

Tokens depend on seeds per sample and on nothing that a rank does, so who samples what is a matter of speed alone. Whole
groups and whole trajectories stay on one rank: a group's advantage and a shared prefix need all of their members.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from mopd.environments.base import Task
from mopd.ranks import Ranks
from mopd.rows import Action, Row
from mopd.sampling.agent_loop import Episode, EpisodeSpec

# what a record of a step reads of an episode; its tokens travel as rows
EPISODE_FIELDS = tuple(f.name for f in dataclasses.fields(Episode) if f.name not in ("spec", "sequence"))
COUNTS = ("sampled_tokens", "environment_steps", "groups", "dropped_groups")


@dataclasses.dataclass(frozen=True)
class StartedAt:
    """The turn before which another rank's episode went on from a stored point."""

    turn: int


def own(number: int, ranks: Ranks) -> bool:
    """Whether this rank samples group or trajectory `number` of the step: one after the other, as cards are dealt."""
    return number % ranks.size == ranks.rank


def merge(ranks: Ranks, samples: Any) -> None:
    """Make every rank's `samples` (StepSamples of its share) those of the whole step, equal on all ranks and in the order
    in which one process would have made them.

    Rows, counts and failures are all there; episodes of other ranks come without their sequence and environment. Seconds
    are those of the slowest rank. Every rank must call it.
    """
    if ranks.size == 1:
        return
    parts = ranks.gather({
        "rows": [row_to_plain(row) for row in samples.rows],
        "episodes": [episode_to_plain(episode) for episode in samples.episodes],
        "resumed": [episode_to_plain(episode) for episode in samples.resumed],
        "seconds": dict(samples.seconds),
        "failures": {name: dict(counts) for name, counts in samples.failures.items()},
        "outcome_groups": {name: dict(counts) for name, counts in samples.outcome_groups.items()},
        "counts": [getattr(samples, name) for name in COUNTS]})
    samples.rows = sorted((row_from_plain(row) for part in parts for row in part["rows"]), key=_place)
    for name in ("episodes", "resumed"):
        mine = {episode.spec.sequence: episode for episode in getattr(samples, name)}
        found = (episode_from_plain(episode) for part in parts for episode in part[name])
        setattr(samples, name, sorted((mine.get(e.spec.sequence, e) for e in found), key=lambda e: e.spec.sequence))
    samples.seconds = dict(max((part["seconds"] for part in parts), key=lambda seconds: sum(seconds.values())))
    for name in COUNTS:
        setattr(samples, name, sum(part["counts"][COUNTS.index(name)] for part in parts))
    samples.failures.clear()
    groups: dict[str, Counter] = {}
    for part in parts:
        for name, counts in part["failures"].items():
            samples.failures[name].update(counts)
        for name, counts in part["outcome_groups"].items():
            groups.setdefault(name, Counter()).update(counts)
    # `update` keeps zeros, which say that there were groups and none of this kind.
    samples.outcome_groups = {name: dict(counts) for name, counts in groups.items()}





def _place(row: Row) -> tuple[int, int]:
    """Where one process puts a row: rollouts, fresh turns, stored turns, sequences that went on from a stored point."""
    first = row.actions[0]
    kind = {"rollout": 0, "demonstration": 2}.get(row.stream, 1 if first.branch else 3)
    return kind, first.sequence


def row_to_plain(row: Row) -> dict[str, Any]:
    """A row as values that `mopd.encoding` takes."""
    return _fields(row) | {"actions": [_fields(action) for action in row.actions]}


def row_from_plain(plain: dict[str, Any]) -> Row:
    """The row that `row_to_plain` was given, on arrays of its own."""
    return Row(**plain | {"actions": tuple(Action(**action) for action in plain["actions"])})


def rows_equal(left: Row, right: Row) -> bool:
    """Whether two rows are the same to the bit (NaN equals NaN)."""
    return _same(_fields(left), _fields(right))


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _same(left: Any, right: Any) -> bool:
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and _same(_fields(left), _fields(right))
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(_same(a, b) for a, b in zip(left, right, strict=True))
    return left == right


def episode_to_plain(episode: Episode) -> dict[str, Any]:
    """An episode without its tokens and its environment, as values that `mopd.encoding` takes."""
    spec = episode.spec
    return {**{name: getattr(episode, name) for name in EPISODE_FIELDS},
            "spec": {"domain": spec.domain, "task": [spec.task.name, spec.task.seed, spec.task.split], "seed": spec.seed,
                     "group": spec.group, "sequence": spec.sequence,
                     "turn": None if spec.start is None else spec.start.turn}}


def episode_from_plain(plain: dict[str, Any]) -> Episode:
    """What `episode_to_plain` was given."""
    spec = dict(plain["spec"])
    turn, task = spec.pop("turn"), Task(*spec.pop("task"))
    return Episode(EpisodeSpec(**spec, task=task, start=None if turn is None else StartedAt(turn)),
                   **{name: plain[name] for name in EPISODE_FIELDS})


def share_of(rows: ListLike[Row], costs: ListLike[float], ranks: Ranks, *, together: int = 1) -> list[Row]:
    """This rank's rows to train on, evenly by cost over the ranks; with one rank all of them. `together` neighbouring ranks
    get the same. Every rank that has the same rows finds its own part without a word to the others."""
    if ranks.size == together:
        return list(rows)
    from mopd.learner.packing import spread

    return [rows[i] for i in spread(costs, ranks.size // together)[ranks.rank // together]]
