"""Rows for the learner: fresh turns at stored decision points, played sequences, and stored turns."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from mopd.rows import Action, Row
from mopd.sampling.base import Completion, Request, SamplingEngine, SamplingOptions
from mopd.sampling.contexts import candidates_of, experts_of
from prefix_store.trajectory import DecisionPoint, Sequence


@dataclasses.dataclass(frozen=True)
class FreshTurnPoint:
    """A decision point at which len(seeds) turns are sampled.

    row       points with one `row` (and domain and stream) share a trunk: each prefix is a prefix of the longest
    prefix    uint32 [T], what the acting model saw there
    turn      the turn's number in the stored sequence
    seeds     one per fresh turn
    group     number of this point's group; its turns get the sequence numbers sequence, sequence + 1, …
    at        where the point lies in the store, for those who go on from there with an environment
    """

    domain: str
    stream: str
    row: Hashable
    prefix: np.ndarray
    turn: int
    seeds: tuple[int, ...]
    group: int
    sequence: int
    at: DecisionPoint | None = None


def sample_fresh_turns(
    engine: SamplingEngine, points: ListLike[FreshTurnPoint], options: Mapping[str, SamplingOptions] | SamplingOptions,
    ended: Callable[[list[Row]], None] | None = None,
) -> list[Row]:
    """Sample every point's turns as one batch; one Row per trunk, in the order in which the trunks first appear.

    options  for all domains, or domain → options; they may differ between domains in `max_tokens` alone
    ended    told every turn as a row of its own as soon as it is written, where the engine says so (`tells_ends`)
    The fresh turns are branches off their trunk; nothing stored after a point enters anything.
    Raises ValueError for a point without tokens, for prefixes of one row that do not extend each other, and for a
    domain without options.
    """
    if not points:
        return []
    limits, shared = _limits(points, options)
    requests = [
        Request(point.prefix, seed, max_tokens=limits[point.domain]) for point in points for seed in point.seeds
    ]
    owners = [(point, member) for point in points for member in range(len(point.seeds))]

    def tell(number: int, done: Completion) -> None:
        point, member = owners[number]
        ended([Row(point.domain, point.stream, point.prefix, (fresh_action(point, member, done),), origin=str(point.row))])

    more = {"ended": tell} if ended is not None and getattr(engine, "tells_ends", False) else {}
    completions = iter(engine.generate(requests, shared, **more))
    trunks: dict[tuple, np.ndarray] = {}
    actions: dict[tuple, list[Action]] = {}
    for point in points:
        key = (point.domain, point.stream, point.row)
        shorter, longer = sorted((trunks.get(key, point.prefix), point.prefix), key=len)
        if not np.array_equal(longer[: len(shorter)], shorter):
            raise ValueError(
                f"row {point.row!r} of {point.domain}/{point.stream}: the prefixes at turn {point.turn} and before do "
                "not extend each other; give points of different contexts different rows"
            )
        trunks[key] = longer
        for member in range(len(point.seeds)):
            done = next(completions)
            actions.setdefault(key, []).append(fresh_action(point, member, done))
    return [
        Row(domain, stream, trunks[domain, stream, row], tuple(found), origin=str(row))
        for (domain, stream, row), found in actions.items()
    ]


def fresh_action(point: FreshTurnPoint, member: int, done: Completion) -> Action:
    """What was written as fresh turn `member` of a point, as a branch off its trunk."""
    return Action(
        at=len(point.prefix), tokens=done.tokens, behaviour_logprob=done.logprob,
        version=np.full(len(done.tokens), done.version, np.int32), branch=True, turn=point.turn,
        sequence=point.sequence + member, group=point.group, candidates=done.candidates, experts=done.experts,
    )


def _limits(points, options) -> tuple[dict[str, int], SamplingOptions]:
    domains = list(dict.fromkeys(point.domain for point in points))
    by_domain = options if isinstance(options, Mapping) else dict.fromkeys(domains, options)
    missing = [name for name in domains if name not in by_domain]
    if missing:
        there = ", ".join(sorted(by_domain)) or "no domain"
        raise ValueError(f"no sampling options for domain {missing[0]!r}; there are some for {there}")
    longest = max(by_domain[name].max_tokens for name in domains)
    unified = {dataclasses.replace(by_domain[name], max_tokens=longest) for name in domains}
    if len(unified) > 1:
        raise ValueError("sampling options of one batch may differ between domains in max_tokens only")
    return {name: by_domain[name].max_tokens for name in domains}, unified.pop()


def rows_from_sequence(
    sequence: Sequence, *, domain: str, stream: str, group: int, sequence_number: int, outcome_advantage: float = 0.0
) -> list[Row]:
    """A played sequence as rows, one per context that has actions of its own.

    Only what a model wrote carries loss (its log-probability is known); in the `demonstration` stream every action of
    the sequence does. Actions that a child context shares with its parent count once, in the parent. Tokens after the
    last action that carries loss are left out, since nothing is predicted from them.
    """
    rows = []
    for number, context in enumerate(sequence.contexts):
        actions, read = [], 0
        for segment in context.actions():
            known = not np.isnan(context.behaviour_logprob[segment.start : segment.end]).any()
            if segment.end <= context.fork or not (known or stream == "demonstration"):
                continue
            part = slice(segment.start, segment.end)
            actions.append(
                Action(
                    at=segment.start, tokens=context.tokens[part], behaviour_logprob=context.behaviour_logprob[part],
                    version=context.weights_version[part], branch=False, turn=segment.turn, sequence=sequence_number,
                    group=group, outcome_advantage=outcome_advantage,
                    # A stored turn is no sample of the student's: nothing is compared with what wrote it.
                    candidates=None if stream == "demonstration" else candidates_of(context, segment.start, segment.end),
                    experts=None if stream == "demonstration" else experts_of(context, read, segment.end - 1),
                )
            )
            read = segment.end - 1
        if actions:
            end = actions[-1].at + len(actions[-1].tokens)
            rows.append(Row(domain, stream, context.tokens[:end], tuple(actions), origin=f"{sequence_number}.{number}"))
    return rows


def demonstration_rows(
    store: Any, stored: Mapping[tuple, ListLike[tuple]], *, first_group: int, first_sequence: int,
    only: Collection[tuple] | None = None,
) -> list[Row]:
    """The stored turns at decision points as rows of the `demonstration` stream, one per stored context.

    store    a PrefixStore (`prefix`, `continuation`)
    stored   (domain, …) → [(DecisionPoint, …), …], all points of a key in one context of one sequence
    Each turn is a sequence and a group of its own, numbered from `first_group` and `first_sequence`. Log-probabilities
    are NaN and versions -1: no student wrote them. With `only`, the other keys have their numbers but no row.
    """
    rows = []
    numbers = itertools.count()
    for key, points in stored.items():
        if only is not None and key not in only:
            for _ in points:
                next(numbers)
            continue
        actions, trunk = [], np.empty(0, np.uint32)
        for point, *_ in points:
            prefix, tokens = store.prefix(point), store.continuation(point)
            if len(prefix) + len(tokens) > len(trunk):
                trunk = np.concatenate([prefix, tokens])
            number = next(numbers)
            actions.append(
                Action(
                    at=len(prefix), tokens=tokens, behaviour_logprob=np.full(len(tokens), np.nan, np.float32),
                    version=np.full(len(tokens), -1, np.int32), branch=False, turn=point.turn,
                    sequence=first_sequence + number, group=first_group + number,
                )
            )
        for action in actions:
            if not np.array_equal(trunk[action.at : action.at + len(action.tokens)], action.tokens):
                raise ValueError(f"stored points of {key!r} are not of one context; give them different keys")
        rows.append(Row(key[0], "demonstration", trunk, tuple(actions), origin=str(key[1:])))
    return rows
