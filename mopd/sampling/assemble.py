"""Groups that ended one by one become the samples of one step: judged, numbered, trunks shared, counted."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np

from mopd.encoding import decode, encode
from mopd.environments.base import Task
from mopd.mixer_events import GroupId
from mopd.rows import Row
from mopd.sampling.advantages import GroupAdvantage
from mopd.sampling.episode import Episode, EpisodeSpec
from mopd.sampling.fresh_turn import demonstration_rows
from mopd.sampling.sharing import StartedAt, episode_from_plain, episode_to_plain, row_from_plain, row_to_plain
from mopd.sampling.streams import StepSamples
from mopd.sampling.work import Done, GaveUp, Work
from mopd.sampling.works import renumber, source_of
from prefix_store.trajectory import DecisionPoint


@dataclasses.dataclass(frozen=True)
class EndedGroup:
    """A launched group whose sequences have all ended. done, failed: by member, in their order; advantages: of `done`.

    accepted   whether it may enter a batch; `reason` says why not
    verdict    what is counted of it: groups, no_spread, single; None where outcomes are not compared
    version    newest weights that wrote in it
    """

    group: GroupId
    done: tuple[Done, ...]
    failed: tuple[GaveUp, ...]
    advantages: tuple[float, ...]
    accepted: bool
    reason: str
    verdict: dict[str, int] | None
    version: int

    @property
    def sampled_tokens(self) -> int:
        return sum(one.record.get("sampled_tokens", 0) for one in self.done)


def judge(group: GroupId, done: Iterable[Done], failed: Iterable[GaveUp], *, advantage: GroupAdvantage | None,
          needs_spread: bool) -> EndedGroup:
    """How a group of one task's sequences, or of the fresh turns of one stored trajectory, ended (METHOD section 6, steps 1
    and 5). Failures leave it first. With `advantage` rollouts' rewards are compared; where they have no spread every
    advantage is 0, and with `needs_spread` (the outcome part is on) the group is refused."""
    done = tuple(sorted(done, key=lambda one: one.work.member))
    failed = tuple(sorted(failed, key=lambda one: one.work.member))
    values, verdict, accepted, reason = [0.0] * len(done), None, bool(done), "" if done else "every sequence failed"
    if advantage is not None and source_of(group)[1] == "rollout" and done:
        found = advantage([one.record["reward"] for one in done]) if len(done) > 1 else None
        single = len(done) == 1
        verdict = {"groups": 1, "no_spread": int(not single and found is None), "single": int(single)}
        if found is not None:
            values = [float(value) for value in found]
        elif needs_spread and not single:
            accepted, reason = False, "no spread"
    versions = [int(np.max(action.version)) for one in done for row in one.rows for action in row.actions
                if len(action.version)]
    return EndedGroup(group, done, failed, tuple(values), accepted, reason, verdict, max(versions, default=0))


class Assembly:
    """Makes the samples of steps.

    store            for the stored turns' own stream; None where no stream goes on from stored points
    demonstration    weight of that stream; 0: it has no rows
    """

    def __init__(self, *, store: Any = None, demonstration: float = 0.0):
        self.store, self.demonstration = store, demonstration

    def samples(self, groups: ListLike[EndedGroup], dropped: ListLike[EndedGroup] = ()) -> StepSamples:
        """The step of `groups`; failures and outcomes of `dropped` ones, which no step has, are counted in it too. Numbers of
        groups and sequences are unique within the step, as in mopd.sampling.streams: rollouts first, then fresh turns, a
        group for each decision point, then stored turns."""
        result = StepSamples([], [])
        numbers = _Numbers()
        rollouts = [one for one in groups if source_of(one.group)[1] == "rollout"]
        for one in rollouts:
            self._rollout(one, numbers, result)
        stored: dict[tuple, list[tuple[DecisionPoint, int, int]]] = {}
        resumed: list[Row] = []
        for one in groups:
            if source_of(one.group)[1] != "rollout":
                resumed += self._prefixes(one, numbers, result, stored)
        if self.demonstration > 0 and stored:
            result.rows += demonstration_rows(self.store, stored, first_group=numbers.group, first_sequence=numbers.sequence)
        result.rows += resumed
        for one in dropped:
            result.dropped_groups += 1
            result.groups += 1
            self._count(one, result)
        for one in groups:
            self._count(one, result)
        return result

    @staticmethod
    def _count(one: EndedGroup, result: StepSamples) -> None:
        domain = source_of(one.group)[0]
        result.failures[domain].update(failure.reason for failure in one.failed)
        result.sampled_tokens += one.sampled_tokens
        for done in one.done:
            result.environment_steps += done.record.get("environment_steps", 0)
            result.seconds["environments"] += done.record.get("environment_seconds", 0.0)
        if one.verdict is not None:
            counts = Counter(result.outcome_groups.get(domain, {"groups": 0, "no_spread": 0, "single": 0}))
            counts.update(one.verdict)
            result.outcome_groups[domain] = dict(counts)
        result.episodes += [_failed(failure) for failure in one.failed if failure.work.point is None]
        result.resumed += [_failed(failure) for failure in one.failed if failure.work.point is not None]

    @staticmethod
    def _rollout(one: EndedGroup, numbers: _Numbers, result: StepSamples) -> None:
        group = numbers.next_group()
        for done, value in zip(one.done, one.advantages, strict=True):
            sequence = numbers.next_sequence()
            result.rows += renumber(done.rows, group=group, sequence=sequence, outcome_advantage=value)
            if done.episode is not None:
                result.episodes.append(_numbered(done.episode, group, sequence))
        result.groups += 1

    @staticmethod
    def _prefixes(one: EndedGroup, numbers: _Numbers, result: StepSamples,
                  stored: dict[tuple, list[tuple[DecisionPoint, int, int]]]) -> list[Row]:
        """Number the fresh turns of a stored trajectory; returns the rows of sequences that were played on."""
        domain, stream = source_of(one.group)
        trunks: dict[tuple, list[Row]] = {}
        played: list[Row] = []
        by_point: dict[DecisionPoint, list[Done]] = {}
        for work in sorted((done.work for done in (*one.done, *one.failed)), key=lambda work: work.member):
            by_point.setdefault(work.point, [])
        for done in one.done:
            by_point[done.work.point].append(done)
        for point, turns in by_point.items():
            group = numbers.next_group()
            key = (domain, stream, one.group.number, point.sequence, point.context)
            result.points[group] = point
            result.groups += 1
            result.dropped_groups += not turns
            stored.setdefault(key, []).append((point, group, numbers.sequence))
            for done in turns:
                rows = renumber(done.rows, group=group, sequence=(sequence := numbers.next_sequence()))
                if done.episode is None:
                    trunks.setdefault(key, []).extend(rows)
                else:
                    played += rows
                    result.resumed.append(_numbered(done.episode, group, sequence))
        result.rows += [_shared(rows, origin=str(key[1:])) for key, rows in trunks.items()]
        return played


class _Numbers:
    """Group and sequence numbers of one step."""

    def __init__(self) -> None:
        self.group = self.sequence = 0

    def next_group(self) -> int:
        self.group += 1
        return self.group - 1

    def next_sequence(self) -> int:
        self.sequence += 1
        return self.sequence - 1


def _shared(rows: ListLike[Row], *, origin: str) -> Row:
    """Rows with one branch each as one row whose trunk is the longest of theirs, of which the others are beginnings."""
    trunk = max((row.trunk for row in rows), key=len)
    for row in rows:
        if not np.array_equal(trunk[:len(row.trunk)], row.trunk):
            raise ValueError(f"{origin}: prefixes of one stored context do not extend each other")
    return Row(rows[0].domain, rows[0].stream, trunk, tuple(action for row in rows for action in row.actions), origin)


def _numbered(episode: Episode, group: int, sequence: int) -> Episode:
    return dataclasses.replace(episode, spec=dataclasses.replace(episode.spec, group=group, sequence=sequence))


def _failed(failure: GaveUp) -> Episode:
    """The episode that a record reads of a sequence that was given up."""
    work = failure.work
    start = None if work.point is None else StartedAt(work.point.turn)
    record = {key: value for key, value in failure.record.items() if key != "attempts"}
    return Episode(EpisodeSpec(source_of(work.group)[0], Task("", 0, "train"), 0, -1, -1, start), failure=failure.reason,
                   failure_text=failure.words, failure_record=record, attempts=failure.record.get("attempts", 1))


def staleness(rows: Iterable[Row], version: int) -> tuple[float, int]:
    """(mean, largest) number of versions by which the student's tokens of a step are older than `version`; 0 without any."""
    ages = [version - action.version[action.version >= 0] for row in rows for action in row.actions]
    whole = np.concatenate(ages) if ages else np.zeros(0, np.int64)
    return (float(whole.mean()), int(whole.max())) if len(whole) else (0.0, 0)


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers in words: 0, 1, 2, 5 → "0-2,5"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def numbers_of(words: str) -> list[int]:
    """What `ranges` was given, ascending."""
    bounds = [part.split("-") for part in words.split(",") if part]
    return [n for part in bounds for n in range(int(part[0]), int(part[-1]) + 1)]


def group_to_text(one: EndedGroup) -> str:
    """An ended group as printable text, for a checkpoint's JSON."""
    plain = {"group": list(one.group), "advantages": list(one.advantages), "verdict": one.verdict, "version": one.version,
             "done": [{"work": _work_to_plain(done.work), "rows": [row_to_plain(row) for row in done.rows],
                       "tokens": done.tokens, "record": done.record,
                       "episode": None if done.episode is None else episode_to_plain(done.episode)} for done in one.done],
             "failed": [{"work": _work_to_plain(failure.work), "reason": failure.reason, "words": failure.words,
                         "record": failure.record} for failure in one.failed]}
    return base64.b64encode(zlib.compress(encode(plain))).decode()


def group_from_text(text: str) -> EndedGroup:
    """What `group_to_text` was given (an accepted group)."""
    plain = decode(zlib.decompress(base64.b64decode(text)))
    done = tuple(Done(_work_from_plain(d["work"]), tuple(row_from_plain(row) for row in d["rows"]), d["tokens"], d["record"],
                      None if d["episode"] is None else episode_from_plain(d["episode"])) for d in plain["done"])
    failed = tuple(GaveUp(_work_from_plain(f["work"]), f["reason"], f["words"], f["record"]) for f in plain["failed"])
    return EndedGroup(GroupId(*plain["group"]), done, failed, tuple(plain["advantages"]), True, "", plain["verdict"],
                      plain["version"])


def _work_to_plain(work: Work) -> list:
    point = None if work.point is None else [work.point.sequence, work.point.context, work.point.turn]
    return [list(work.group), work.member, point, work.attempt]


def _work_from_plain(plain: ListLike) -> Work:
    group, member, point, attempt = plain
    return Work(GroupId(*group), member, None if point is None else DecisionPoint(*point), attempt)
