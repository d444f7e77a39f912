"""Draws are pure functions of what they should depend on, follow their distribution, and start again exactly."""

import dataclasses
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest

from prefix_store import PrefixStore
from prefix_store.selection import NothingToSelect, SelectionOptions, Selector, make_strategy
from prefix_store.trajectory import example_sequence


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("selection") / "store"
    with PrefixStore.open(path, "w") as writer:
        for seed in range(150):
            writer.append(example_sequence(seed))
        writer.commit()
    return PrefixStore.open(path)


def selector(store, seed=1, **options):
    return Selector(store, SelectionOptions(**options), seed)


ARGUMENTS = [(0, "game", "teacher_prefix", 7), (0, "game", "sft_prefix", 7), (0, "science", "sft_prefix", 7),
             (1, "game", "teacher_prefix", 7)]  # fmt: skip


@pytest.mark.parametrize("draw", ["replacement", "distinct"])
@pytest.mark.parametrize("method", ["select", "select_sequences"])
def test_a_draw_is_a_function_of_seed_step_domain_stream(store, draw, method):
    def ask(chooser, arguments):
        return getattr(chooser, method)(*arguments)

    forward, backward = selector(store, draw=draw), selector(store, draw=draw)
    first = [ask(forward, a) for a in ARGUMENTS]
    assert first == [ask(backward, a) for a in ARGUMENTS[::-1]][::-1]  # other draws and their order do not matter
    assert first == [ask(forward, a) for a in ARGUMENTS]
    assert first != [ask(selector(store, 2, draw=draw), a) for a in ARGUMENTS]
    assert len({repr(answer) for answer in first}) == len(ARGUMENTS)
    assert ask(forward, (np.int64(0), *ARGUMENTS[0][1:])) == first[0]


def test_a_draw_is_the_same_in_every_process(store):
    code = "import sys; from prefix_store import PrefixStore; from prefix_store.selection import *;"
    code += "s = Selector(PrefixStore.open(sys.argv[1]), seed=1); print(s.select(0, 'game', 'teacher_prefix', 7))"
    answer = subprocess.run([sys.executable, "-c", code, store.path], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == repr(selector(store).select(*ARGUMENTS[0]))


def test_streams_take_their_sources_and_filters_hold(store):
    chooser = selector(store, success_only=True, max_prefix_tokens=90, min_turns_from_end=1)
    for stream, kinds in (("teacher_prefix", {"teacher"}), ("sft_prefix", {"expert", "demonstration"})):
        for p in chooser.select(0, "embodied", stream, 50):
            seq = store.sequence(p.sequence)
            assert seq.domain == "embodied" and seq.source.kind in kinds and seq.outcome.success
            assert len(store.prefix(p)) <= 90 and p.turn < seq.turns - 1
        found = chooser.available("embodied", stream)
        assert 0 < found["sequences"] <= found["decision_points"]
    with pytest.raises(ValueError, match="stream 'rollout' resumes no stored trajectories; .* sft_prefix"):
        chooser.select(0, "embodied", "rollout", 1)
    own = selector(store, stream_sources={"mine": ("student",)})
    assert all(store.sequence(p.sequence).source.kind == "student" for p in own.select(0, "game", "mine", 20))


def expected_depths(store, weight):
    index = store.index()
    rows = index.rows("game", sources=("expert", "demonstration"))
    depth = index.turn[rows]
    p = weight(depth, np.bincount(depth))
    return np.bincount(depth, weights=p / p.sum())


@pytest.mark.parametrize("draw", ["replacement", "distinct"])
@pytest.mark.parametrize(
    "strategy, options, weight",
    [
        ("uniform", {}, lambda t, n: np.ones(len(t))),
        ("uniform_depth", {}, lambda t, n: 1 / n[t]),
        ("geometric", {"kappa": 0.5}, lambda t, n: 0.5**t),
        ("geometric", {"kappa": 2.0}, lambda t, n: 2.0**t),
    ],
)
def test_depths_follow_the_strategy(store, draw, strategy, options, weight):
    chooser = selector(store, strategy=strategy, options=options, draw=draw)
    count = 4000
    if draw == "replacement":
        points = chooser.select(0, "game", "sft_prefix", count)
    else:  # the first of a weighted order is drawn by the weights
        points = [chooser.select(step, "game", "sft_prefix", 1)[0] for step in range(count)]
    found = np.bincount([p.turn for p in points]) / count
    expected = expected_depths(store, weight)
    assert np.abs(found - expected).max() < 4 * np.sqrt(0.25 / count)  # four standard errors


def test_one_point_per_sequence_has_the_same_law_as_single_points(store):
    count = 4000
    for strategy, weight in (("uniform", lambda t, n: np.ones(len(t))), ("geometric", lambda t, n: 0.8**t)):
        chooser = selector(store, strategy=strategy, points_per_sequence=1)
        points = chooser.select_sequences(0, "game", "sft_prefix", count)
        assert all(len(p) == 1 for p in points)
        found = np.bincount([p[0].turn for p in points]) / count
        assert np.abs(found - expected_depths(store, weight)).max() < 4 * np.sqrt(0.25 / count)


def test_points_of_a_sequence_are_met_alike_whatever_their_number(store):
    for points in (2, "all"):
        chosen = selector(store, points_per_sequence=points).select_sequences(0, "game", "sft_prefix", 4000)
        met = Counter(p for group in chosen for p in group)
        everything = store.index().rows("game", sources=("expert", "demonstration"))
        assert len(met) == len(everything)
        rates = np.array(list(met.values())) / sum(met.values()) * len(everything)
        assert np.abs(rates - 1).max() < 0.6 and abs(np.mean(rates) - 1) < 1e-9


def test_sequences_come_with_their_points_in_order(store):
    for points in (0, "all", 1, 3):
        for group in selector(store, points_per_sequence=points).select_sequences(4, "game", "teacher_prefix", 12):
            (identity,) = {p.sequence for p in group}
            turns = store.sequence(identity).turns
            numbers = [p.turn for p in group]
            assert numbers == sorted(set(numbers)) and len(numbers) == min(turns, points or turns, key=_size)


def _size(value):
    return 10**9 if value == "all" else value


def test_distinct_repeats_nothing_while_candidates_last(store):
    chooser = selector(store, draw="distinct")
    found = chooser.available("game", "teacher_prefix")
    points = chooser.select(3, "game", "teacher_prefix", found["decision_points"] + 5)
    assert len(set(points)) == found["decision_points"] == len(set(points[:-5]))
    groups = chooser.select_sequences(3, "game", "teacher_prefix", found["sequences"])
    assert len({g[0].sequence for g in groups}) == found["sequences"]


@pytest.mark.parametrize("points", ["all", 2])
def test_an_epoch_repeats_nothing_and_goes_on_after_a_restart(store, points):
    def steps(chooser, begin, end):
        return [(chooser.select(s, "game", "sft_prefix", 5), chooser.select_sequences(s, "game", "sft_prefix", 3))
                for s in range(begin, end)]  # fmt: skip

    options = {"draw": "epoch", "points_per_sequence": points}
    whole = selector(store, **options)
    all_steps = steps(whole, 0, 40)
    first = selector(store, **options)
    assert steps(first, 0, 13) == all_steps[:13]
    state = json.loads(json.dumps(first.state_dict()))
    steps(first, 13, 20)  # drawn and never trained: not in the state, so it is drawn again
    second = selector(store, **options)
    second.load_state_dict(state)
    assert steps(second, 13, 40) == all_steps[13:]
    assert second.statistics() == whole.statistics() and second.state_dict() == whole.state_dict()
    count = whole.available("game", "sft_prefix")["decision_points"]
    drawn = [p for chosen, _ in all_steps for p in chosen]
    for begin in range(0, len(drawn) - count + 1, count):
        assert len(set(drawn[begin : begin + count])) == count
    assert drawn[:count] != drawn[count : 2 * count]  # every epoch has its own order
    with pytest.raises(ValueError, match="saved with seed 1, this run has seed 2"):
        selector(store, 2, **options).load_state_dict(state)


def test_statistics_count_what_was_drawn(store):
    chooser = selector(store)
    points = chooser.select(0, "game", "sft_prefix", 30)
    points += [p for g in chooser.select_sequences(0, "science", "teacher_prefix", 4) for p in g]
    expected = Counter()
    for p in points:
        seq = store.sequence(p.sequence)
        expected[seq.domain, seq.source.kind, p.turn] += 1
    found = {(d, s, t): n for d, v in chooser.statistics().items() for s, h in v.items() for t, n in h.items()}
    assert found == dict(expected)
    assert json.loads(json.dumps(chooser.state_dict()))["statistics"]["science"]["teacher"]


def test_nothing_to_select_says_which_filter_left_nothing(store):
    with pytest.raises(NothingToSelect, match="0 of domain 'chess'.*Collect or import"):
        selector(store).select(0, "chess", "teacher_prefix", 1)
    with pytest.raises(NothingToSelect, match=r"[1-9]\d* of these from successful trajectories, none after"):
        selector(store, success_only=True, max_prefix_tokens=1).select_sequences(0, "game", "teacher_prefix", 1)
    before = (chooser := selector(store, draw="epoch")).state_dict()
    chooser.require("game", "teacher_prefix")
    with pytest.raises(NothingToSelect, match="0 of domain 'chess'"):
        chooser.require("chess", "teacher_prefix")
    assert chooser.state_dict() == before
    assert selector(store, max_prefix_tokens=1).available("game", "teacher_prefix") == {
        "sequences": 0, "decision_points": 0}  # fmt: skip


class LastTurn:
    """A strategy from outside: only the last turn of each trajectory, and every second step only the first."""

    by_step = True

    def __call__(self, index, rows, step):
        return (index.turn[rows] == (index.turns[rows] - 1 if step % 2 == 0 else 0)).astype(float)


class Wrong:
    by_step = False

    def __init__(self, weights=1.0):
        self.weights = weights

    def __call__(self, index, rows, step):
        return np.full(len(rows), self.weights)


def test_a_strategy_by_dotted_path(store):
    chooser = selector(store, strategy=f"{__name__}:LastTurn")
    for draw in ("replacement", "distinct"):
        chooser = selector(store, strategy=f"{__name__}:LastTurn", draw=draw)
        for step in (0, 1, 2):
            points = chooser.select(step, "game", "teacher_prefix", 20)
            points += [p for g in chooser.select_sequences(step, "game", "teacher_prefix", 5) for p in g]
            assert all(p.turn == (0 if step % 2 else store.sequence(p.sequence).turns - 1) for p in points)
    with pytest.raises(ValueError, match="changes by step"):
        selector(store, strategy=f"{__name__}:LastTurn", draw="epoch")


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("best", {}, "unknown selection strategy 'best'; use one of uniform, uniform_depth, geometric"),
        ("nowhere.at_all:Thing", {}, "'nowhere.at_all:Thing' cannot be imported"),
        ("prefix_store.selection:Thing", {}, "cannot be imported"),
        ("geometric", {"kappa": 0}, "kappa is 0; it must be"),
        ("geometric", {"gamma": 1}, "refuses its options"),
    ],
)
def test_bad_strategies_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_strategy(name, options)


def test_bad_weights_and_options_are_refused(store):
    for weights, error in ((np.nan, ValueError), (-1.0, ValueError), (0.0, NothingToSelect)):
        with pytest.raises(error, match="Wrong"):
            selector(store, strategy=f"{__name__}:Wrong", options={"weights": weights}).select(*ARGUMENTS[0])
    for name, value in (("points_per_sequence", -1), ("points_per_sequence", "most"), ("draw", "once")):
        with pytest.raises(ValueError, match=name):
            dataclasses.replace(SelectionOptions(), **{name: value})


def test_geometric_weights_do_not_overflow():
    index = type("Index", (), {"turn": np.array([0, 5000], dtype=np.int32)})()
    for kappa in (1e-3, 1e3):
        weights = make_strategy("geometric", {"kappa": kappa})(index, np.array([0, 1]), 0)
        assert np.isfinite(weights).all() and weights.max() == 1.0
