"""Draws are pure functions of what they should depend on, follow their distribution, and start again exactly."""

import dataclasses
import inspect
import json
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import prefix_store.scores
import prefix_store.strategies
from prefix_store import PrefixStore
from prefix_store.segment import SegmentReader
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
    def step(chooser, s):
        return chooser.select(s, "game", "sft_prefix", 5), chooser.select_sequences(s, "game", "sft_prefix", 3)

    def steps(chooser, begin, end):
        found = []
        for s in range(begin, end):
            found.append(step(chooser, s))
            chooser.observe(s)
        return found

    options = {"draw": "epoch", "points_per_sequence": points}
    whole = selector(store, **options)
    all_steps = steps(whole, 0, 40)
    first = selector(store, **options)
    assert steps(first, 0, 12) == all_steps[:12]
    before = first.state_dict()
    drawn_ahead = [step(first, s) for s in (12, 13, 14)]
    assert drawn_ahead == all_steps[12:15]
    assert first.state_dict() == before, "what was drawn and never trained is in the state"
    first.observe(12)
    state = json.loads(json.dumps(first.state_dict()))  # 13 and 14 are drawn again
    second = selector(store, **options)
    second.load_state_dict(state)
    assert steps(second, 13, 40) == all_steps[13:]
    assert second.statistics() == whole.statistics() and second.state_dict() == whole.state_dict()
    count = whole.available("game", "sft_prefix")["decision_points"]
    drawn = [p for chosen, _ in all_steps for p in chosen]
    for begin in range(0, len(drawn) - count + 1, count):
        assert len(set(drawn[begin : begin + count])) == count
    assert drawn[:count] != drawn[count : 2 * count]  # every epoch has its own order
    assert second.state_dict() == whole.state_dict()


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
    assert chooser.state_dict()["points"] == []
    chooser.observe(0)
    assert {(d, s, t): n for d, s, t, n in json.loads(json.dumps(chooser.state_dict()))["points"]} == found


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
        ("best", {}, "unknown selection strategy 'best'; use one of uniform, uniform_depth, geometric, curriculum"),
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


# ------------------------------------------------------------------------------------------- quotas and filters


def test_draws_over_several_domains_follow_their_shares(store):
    chooser = selector(store)
    for count, expected in ((12, {"game": 8, "science": 4}), (10, {"game": 7, "science": 3}), (1, {"game": 1, "science": 0})):
        points = chooser.select(0, {"game": 2, "science": 1, "embodied": 0}, "sft_prefix", count)
        domains = Counter(store.sequence(p.sequence).domain for p in points)
        assert domains == {name: n for name, n in expected.items() if n}
    groups = chooser.select_sequences(1, {"game": 0.5, "science": 0.5}, "sft_prefix", 4)
    assert [store.sequence(g[0].sequence).domain for g in groups] == ["game"] * 2 + ["science"] * 2
    assert groups[:2] == selector(store).select_sequences(1, "game", "sft_prefix", 2)
    for shares in ({}, {"game": 0}, {"game": -1, "science": 2}, {"game": float("nan")}):
        with pytest.raises(ValueError, match="shares by domain"):
            chooser.select(0, shares, "sft_prefix", 3)


@pytest.mark.parametrize("draw", ["replacement", "distinct", "epoch"])
def test_a_quota_bounds_the_points_of_a_domain(store, draw):
    chooser, free = selector(store, draw=draw, quotas={"game": 7}), selector(store, draw=draw)
    for step in range(3):
        groups = chooser.select_sequences(step, "game", "sft_prefix", 6)
        whole = free.select_sequences(step, "game", "sft_prefix", 6)
        points, everything = [p for g in groups for p in g], [p for g in whole for p in g]
        assert len(points) == 7 < len(everything) and set(points) <= set(everything) and all(groups)
        assert chooser.drawn(step)["game"]["points"] == 7
        assert chooser.drawn(step)["game"]["over_quota"] == len(everything) - 7
    few, free = selector(store, draw=draw, quotas={"game": 7}), selector(store, draw=draw)
    assert len(few.select(9, "game", "sft_prefix", 20)) == 7 and len(few.select(9, "science", "sft_prefix", 20)) == 20
    assert few.select_sequences(9, "game", "sft_prefix", 1) == free.select_sequences(9, "game", "sft_prefix", 1)
    with pytest.raises(ValueError, match="quotas.game is 0"):
        SelectionOptions(quotas={"game": 0})


def test_a_quota_leaves_out_at_random(store):
    """Each point of a trajectory is left out as often as any other."""
    kept, drawn = Counter(), Counter()
    chooser, free = selector(store, quotas={"game": 4}), selector(store)
    for step in range(500):
        kept.update(p.turn for g in chooser.select_sequences(step, "game", "sft_prefix", 3) for p in g)
        groups = free.select_sequences(step, "game", "sft_prefix", 3)
        total = sum(map(len, groups))
        for p in (p for g in groups for p in g):
            drawn[p.turn] += min(1.0, 4 / total)
    for depth, expected in drawn.items():
        assert abs(kept[depth] - expected) < 5 * np.sqrt(expected), (depth, kept[depth], expected)


def test_filters_by_turns_from_the_end_and_source(store):
    for most, least in ((0, 0), (2, 1)):
        chooser = selector(store, max_turns_from_end=most, min_turns_from_end=least)
        for p in chooser.select(0, "game", "sft_prefix", 60):
            assert least <= store.sequence(p.sequence).turns - 1 - p.turn <= most
    only = selector(store, sources=("expert",))
    assert {store.sequence(p.sequence).source.kind for p in only.select(0, "game", "sft_prefix", 60)} == {"expert"}
    with pytest.raises(NothingToSelect, match="leaves none to this stream"):
        only.require("game", "teacher_prefix")
    with pytest.raises(ValueError, match="source kind 'parrot' is none of"):
        SelectionOptions(sources=("parrot",))
    with pytest.raises(ValueError, match="max_turns_from_end 1 is below min_turns_from_end 2"):
        SelectionOptions(max_turns_from_end=1, min_turns_from_end=2)
    with pytest.raises(ValueError, match="max_prefix_tokens is -1"):
        SelectionOptions(max_prefix_tokens=-1)


# ------------------------------------------------------------------------------------------- scores and restarts


PIVOT = {"strategy": "pivot", "options": {"threshold": 0.3, "remeasure": 0.2, "unmeasured": 0.2}, "points_per_sequence": 2}


def true_score(point, step):
    """What training would measure: high for late turns, and falling."""
    return {"reverse_kl": 0.2 * point.turn * 0.9**step, "disagreement": (point.turn % 3) / 3}


def play(chooser, begin, end, stream=("game", "sft_prefix"), before=lambda chooser, step: None):
    """Steps of a run: draw, train, tell."""
    found = []
    for step in range(begin, end):
        points = [p for g in chooser.select_sequences(step, *stream, 4) for p in g]
        found.append(points)
        before(chooser, step)
        chooser.observe(step, {p: true_score(p, step) for p in points})
    return found


@pytest.mark.parametrize("options", [
    PIVOT, {**PIVOT, "draw": "distinct", "score_smoothing": 0.5, "quotas": {"game": 5}},
    {"strategy": "weighted", "options": {"score": "disagreement"}, "draw": "distinct"},
    {"strategy": "curriculum", "options": {"steps": 9}}, {"strategy": "uniform", "draw": "epoch"},
])  # fmt: skip
@given(killed=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 4)), min_size=1, max_size=4))
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_run_killed_anywhere_goes_on_as_if_nothing_had_happened(store, options, killed):
    """`killed`: after how many trained steps the state is saved, and how many more are trained and lost."""
    whole = selector(store, **options)
    straight = play(whole, 0, 14)
    chooser, done, found = selector(store, **options), 0, []
    for trained, lost in killed:
        found += play(chooser, done, min(done + trained, 14), before=looked_ahead)
        done = min(done + trained, 14)
        state = json.dumps(chooser.state_dict())
        play(chooser, done, min(done + lost, 14))
        chooser.select_sequences(min(done + lost, 14), "game", "sft_prefix", 4)
        chooser = selector(store, **options)
        chooser.load_state_dict(json.loads(state))
    found += play(chooser, done, 14)
    assert found == straight
    assert chooser.state_dict() == whole.state_dict() and chooser.statistics() == whole.statistics()


def looked_ahead(chooser, step):
    with chooser.looking_ahead():
        chooser.select_sequences(step + 1, "game", "sft_prefix", 4)
        chooser.select(step + 1, "science", "teacher_prefix", 3)


def test_a_look_ahead_sees_the_draw_that_comes_and_leaves_no_trace(store):
    chooser = selector(store, draw="epoch")
    chooser.select(0, "game", "sft_prefix", 5)
    with chooser.looking_ahead():
        ahead = chooser.select(1, "game", "sft_prefix", 5)
    before = chooser.statistics()
    assert sum(n for s in before["game"].values() for n in s.values()) == 5
    assert chooser.select(1, "game", "sft_prefix", 5) == ahead


def test_pivots_are_measured_again_and_come_back(store):
    chooser = selector(store, **PIVOT)
    candidates = chooser.available("game", "sft_prefix")["decision_points"]
    for step in range(120):
        points = [p for g in chooser.select_sequences(step, "game", "sft_prefix", 4) for p in g]
        # The early turns are hard at first and the late ones later on.
        chooser.observe(step, {p: {"reverse_kl": float((p.turn <= 1) == (step < 60))} for p in points})
        if step == 59:
            early = chooser.describe(60, "game", "sft_prefix")
    assert 0 < early["pivots"] and early["pivots"] + early["below"] + early["unmeasured"] == candidates
    index, rows = store.index(), chooser._at(120, "game", "sft_prefix").rows
    score, turn, step = chooser.scores.of("reverse_kl", rows), index.turn[rows], chooser.scores.steps(rows)
    assert ((score > 0.3) & (turn > 1)).sum() > 10, "points that were below the threshold never came back"
    assert ((score == 0) & (turn <= 1) & (step >= 60)).sum() > 10, "points that fell below it are still pivots"
    drawn = Counter(p.turn > 1 for p in chooser.select(121, "game", "sft_prefix", 4000))
    late = score[turn > 1]
    expected = chooser._at(121, "game", "sft_prefix").weights[turn > 1].sum()
    assert abs(drawn[True] / 4000 - expected) < 4 * np.sqrt(0.25 / 4000) and (late > 0.3).any()


def test_what_was_measured_changes_the_next_draws_only_where_it_should(store):
    chooser = selector(store, **PIVOT)
    first = chooser.select(1, "game", "sft_prefix", 30)
    assert first == chooser.select(1, "game", "sft_prefix", 30)
    chooser.observe(0, {first[0]: 1.0}, name="reverse_kl")
    second = chooser.select(1, "game", "sft_prefix", 30)
    assert second != first and Counter(second)[first[0]] > 10
    fixed = selector(store, **PIVOT, update_scores=False)
    fixed.observe(0, {first[0]: 1.0})
    assert fixed.select(1, "game", "sft_prefix", 30) == first and not fixed.wants_scores
    with pytest.raises(ValueError, match="record_scores keeps .*choose one"):
        SelectionOptions(record_scores=True, update_scores=False)
    with pytest.raises(NothingToSelect, match="none_left: all"):
        selector(store, strategy="pivot", options={"threshold": 0.1, "none_left": "stop"}).require("game", "sft_prefix")
    assert not selector(store).wants_scores and selector(store, record_scores=True).wants_scores


def test_measurements_that_are_no_numbers_are_counted(store):
    chooser = selector(store, record_scores=True)
    points = chooser.select(0, "game", "sft_prefix", 3)
    assert len(set(points)) == 3
    said = chooser.observe(0, {points[0]: {"reverse_kl": float("inf"), "k1": 0.5}, points[1]: {"k1": float("nan")}})
    assert said == {"points": 2, "not_finite": 2}
    rows = np.flatnonzero(chooser.scores.of("k1", np.arange(len(store.index()))) == 0.5)
    assert [store.index().point(int(r)) for r in rows] == points[:1]
    state = chooser.state_dict()
    with pytest.raises(KeyError, match="no DecisionPoint"):
        chooser.observe(1, {points[0]: 1.0, dataclasses.replace(points[1], turn=99): 1.0})
    with pytest.raises(KeyError, match="no DecisionPoint"):
        chooser.observe(1, {dataclasses.replace(points[1], sequence="ab" * 32): 1.0})
    assert chooser.state_dict() == state, "half of an observation was taken"


def test_the_state_grows_with_what_was_trained_and_fits_its_run_only(store):
    chooser = selector(store, **PIVOT)
    play(chooser, 0, 3)
    state = json.loads(json.dumps(chooser.state_dict()))
    assert len(json.dumps(state["scores"])) < 100 + 40 * state["scores"]["points"]
    wrong = [
        (lambda: selector(store, 2, **PIVOT), "saved with seed 1, this run has seed 2"),
        (lambda: selector(store, **PIVOT, max_prefix_tokens=500), "other options: max_prefix_tokens was None and is 500"),
        (lambda: selector(store, **{**PIVOT, "options": {"threshold": 0.5}}), "other options: options was .*0.3"),
    ]
    for make, message in wrong:
        with pytest.raises(ValueError, match=message):
            make().load_state_dict(state)
    with pytest.raises(ValueError, match="layout None, this one reads"):
        selector(store, **PIVOT).load_state_dict({"seed": 1})


def test_the_state_belongs_to_what_the_store_holds_not_to_how_it_came_there(store, tmp_path):
    def other(seeds, commits):
        with PrefixStore.open(tmp_path / f"{len(seeds)}-{commits}", "w") as writer:
            for number, seed in enumerate(seeds):
                writer.append(example_sequence(seed))
                if number % (len(seeds) // commits) == 0:
                    writer.commit()
            writer.commit()
        return PrefixStore.open(writer.path)

    one, other_order, grown = other(range(30), 1), other(range(29, -1, -1), 5), other(range(31), 1)
    chooser = selector(one, **PIVOT)
    play(chooser, 0, 4)
    state = chooser.state_dict()
    same = selector(other_order, **PIVOT)
    same.load_state_dict(state)
    assert play(same, 4, 8) == play(chooser, 4, 8)
    with pytest.raises(ValueError, match="other contents of the store"):
        selector(grown, **PIVOT).load_state_dict(state)


class ByTwoScores:
    """A strategy from outside that reads scores."""

    by_step = False
    scores = ("k1", "disagreement")

    def __call__(self, index, rows, step, scores):
        k1, disagreement = (np.nan_to_num(scores.of(name, rows)) for name in self.scores)
        return k1 * disagreement + 1e-6


def test_a_strategy_from_outside_reads_scores(store):
    chooser = selector(store, strategy=f"{__name__}:ByTwoScores")
    point = chooser.select(0, "game", "sft_prefix", 1)[0]
    chooser.observe(0, {point: {"k1": 0.5, "disagreement": 1.0}})
    assert Counter(chooser.select(1, "game", "sft_prefix", 50))[point] > 45
    with pytest.raises(ValueError, match="changes by the score k1, disagreement; draw 'epoch'"):
        selector(store, strategy=f"{__name__}:ByTwoScores", draw="epoch")
    with pytest.raises(ValueError, match="draws by the score 'disagreement', which is neither measured"):
        chooser.require_scores(["k1", "reverse_kl"])
    chooser.require_scores(["k1", "disagreement"])


def test_no_strategy_touches_what_was_played(store, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("selection read tokens")

    fresh = PrefixStore.open(store.path)
    for name in ("continuation", "sequence", "prefix"):
        monkeypatch.setattr(PrefixStore, name, refuse)
    array = SegmentReader.array
    monkeypatch.setattr(SegmentReader, "array", lambda self, name: array(self, name) if name != "tokens" else refuse())
    with pytest.raises(AssertionError, match="selection read tokens"):
        SegmentReader.array(None, "tokens")
    for options in (PIVOT, {"strategy": "weighted"}, {"strategy": "weighted", "options": {"score": "outcome.reward"}},
                    {"strategy": "curriculum", "options": {"steps": 5}}, {"strategy": "uniform", "draw": "epoch"}):
        chooser = selector(fresh, **options)
        play(chooser, 0, 2)
        chooser.describe(2, "game", "sft_prefix")
        chooser.state_dict()
    for module in (prefix_store.selection, prefix_store.strategies, prefix_store.scores):
        source = inspect.getsource(module)
        assert not any(word in source for word in ("continuation", ".sequence(", "store.prefix("))
