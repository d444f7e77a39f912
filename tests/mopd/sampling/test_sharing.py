"""A step's samples on several ranks: every rank ends with the whole step, in the order of one process."""

from __future__ import annotations

import threading
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.environments.base import Task
from mopd.ranks import Ranks
from mopd.rows import Action, Row
from mopd.sampling.agent_loop import Episode, EpisodeSpec
from mopd.sampling.sharing import StartedAt, merge, own, row_from_plain, row_to_plain, rows_equal, share_of
from mopd.sampling.streams import StepSamples


class Threads(Ranks):
    """Ranks that are threads of this process; what they give each other goes through the real encoding."""

    def __init__(self, rank: int, size: int, board: list, barrier: threading.Barrier):
        super().__init__(rank, size)
        self.board, self.barrier = board, barrier

    def gather(self, value):
        from mopd.encoding import decode, encode

        self.board[self.rank] = encode(value)
        self.barrier.wait(timeout=20)
        return [decode(data) for data in self.board]


def action(sequence: int, *, branch: bool, candidates=None) -> Action:
    extra = {"candidates": candidates} if "candidates" in Action.__dataclass_fields__ else {}
    return Action(at=3, tokens=np.array([5, 6], np.uint32), behaviour_logprob=np.array([-0.5, np.nan], np.float32),
                  version=np.array([2, -1], np.int32), branch=branch, turn=1, sequence=sequence, group=sequence,
                  outcome_advantage=0.25, **extra)


def row(stream: str, sequence: int, *, branch: bool = False, candidates=None) -> Row:
    trunk = np.arange(sequence, sequence + 5, dtype=np.uint32)
    return Row("game", stream, trunk, (action(sequence, branch=branch, candidates=candidates),), f"row {sequence}")


def test_rows_come_back_to_the_bit():
    sets = (np.array([1, 5], np.int32), None)
    for one in (row("rollout", 1), row("sft_prefix", 7, branch=True, candidates=sets)):
        from mopd.encoding import decode, encode

        again = row_from_plain(decode(encode(row_to_plain(one))))
        assert rows_equal(one, again) and type(again.actions) is tuple
    assert not rows_equal(row("rollout", 1), row("rollout", 2))


def samples_of(number: int) -> StepSamples:
    """The part of a step that belongs to group `number`."""
    failed = number == 3
    spec = EpisodeSpec("game", Task("walk", number, "train"), seed=11, group=number, sequence=number)
    resumed = EpisodeSpec("game", Task("walk", number, "train"), 12, 20 + number, 20 + number, StartedAt(4))
    return StepSamples(
        rows=[row("rollout", number), row("teacher_prefix", 10 + number, branch=True), row("demonstration", 40 + number),
              row("teacher_prefix", 20 + number)],
        episodes=[Episode(spec, failure="reset" if failed else "", score=0.5 * number)],
        resumed=[Episode(resumed, turns=number, failure_record={"at": [1, "x"]})],
        sampled_tokens=number, environment_steps=1, seconds={"sampling": float(number), "environments": 1.0},
        failures={"game": Counter({"reset": int(failed)})}, groups=2, dropped_groups=int(failed),
        outcome_groups={"game": {"groups": 1, "no_spread": 0, "single": int(failed)}})


def together(parts: list[StepSamples]) -> StepSamples:
    total = StepSamples([], [])
    groups: Counter = Counter()
    for part in parts:
        for name in ("rows", "episodes", "resumed"):
            getattr(total, name).extend(getattr(part, name))
        for name in ("sampled_tokens", "environment_steps", "groups", "dropped_groups"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
        total.seconds = max(total.seconds, part.seconds, key=lambda s: sum(s.values()))
        total.failures["game"].update(part.failures["game"])
        groups.update(part.outcome_groups["game"])
    total.outcome_groups = {"game": dict(groups)} if parts else {}
    return total


def test_every_rank_has_the_whole_step_in_the_order_of_one_process():
    for size in (2, 3, 7):
        board, barrier, found = [None] * size, threading.Barrier(size), {}

        def work(rank: int):
            ranks = Threads(rank, size, board, barrier)  # noqa: B023 - joined below, before the next round
            mine = together([samples_of(n) for n in range(5) if own(n, ranks)])
            merge(ranks, mine)
            found[rank] = mine  # noqa: B023

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        places = [r for start in (0, 10, 40, 20) for r in range(start, start + 5)]
        for one in found.values():
            assert [r.actions[0].sequence for r in one.rows] == places
            assert all(rows_equal(a, b) for a, b in zip(one.rows, found[0].rows, strict=True))
            assert [e.spec.sequence for e in one.episodes] == list(range(5))
            assert [e.score for e in one.episodes] == [0, 0.5, 1.0, 1.5, 2.0]
            assert [(e.spec.start.turn, e.turns, e.failure_record) for e in one.resumed] == [
                (4, n, {"at": [1, "x"]}) for n in range(5)]
            assert (one.sampled_tokens, one.environment_steps, one.groups, one.dropped_groups) == (10, 5, 10, 1)
            assert one.failures["game"]["reset"] == 1
            assert one.outcome_groups == {"game": {"groups": 5, "no_spread": 0, "single": 1}}


@settings(deadline=None)  # the first example imports torch
@given(st.lists(st.floats(0.1, 50), max_size=12), st.integers(1, 5))
def test_rows_to_train_on_are_shared_out_once_each(costs, size):
    rows = [row("rollout", n) for n in range(len(costs))]
    parts = [share_of(rows, costs, Ranks(rank, size)) for rank in range(size)]
    assert sorted(r.actions[0].sequence for part in parts for r in part) == list(range(len(costs)))
    if costs and size > 1:
        loads = [sum(costs[r.actions[0].sequence] for r in part) for part in parts]
        assert max(loads) <= max(4 / 3 * max(sum(costs) / size, max(costs)) + 1e-9, sum(sorted(costs)[-2:]))
