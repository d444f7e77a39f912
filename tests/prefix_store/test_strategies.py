"""Weights of the strategies are their formulas, and draws follow the weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore
from prefix_store.scores import Scores
from prefix_store.selection import NothingToSelect, SelectionOptions, Selector, make_strategy
from prefix_store.trajectory import example_sequence

STREAM = ("game", "sft_prefix")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    path = tmp_path_factory.mktemp("strategies") / "store"
    with PrefixStore.open(path, "w") as writer:
        for seed in range(70):
            writer.append(example_sequence(seed))
        writer.commit()
    return PrefixStore.open(path)


class Columns:
    """As much of an index as strategies read."""

    def __init__(self, turns):
        self.turns = np.repeat(turns, turns).astype(np.int32)
        self.turn = np.concatenate([np.arange(n) for n in turns]).astype(np.int32)
        self.sequence = np.repeat(np.arange(len(turns)), turns)
        self.success = np.zeros(len(self.turn), dtype=bool)

    def __len__(self):
        return len(self.turn)


def weights_of(name, turns, step=0, scores=None, **options):
    """A strategy's weights over trajectories of these lengths; scores is a list, None where unknown."""
    index = Columns(turns)
    rows = np.arange(len(index))
    strategy = make_strategy(name, options)
    if scores is None:
        return strategy(index, rows, step)
    table = Scores(index)
    known = np.array([s is not None for s in scores])
    table.record(0, rows[known], {"reverse_kl": np.array([s for s in scores if s is not None], dtype=float)})
    return strategy(index, rows, step, table)


# --------------------------------------------------------------------------------------------------- curriculum


def test_a_curriculum_goes_from_the_first_turns_to_the_last():
    at = [weights_of("curriculum", [4], step, steps=4, width=0.25).tolist() for step in range(6)]
    np.testing.assert_allclose(at, [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 1], [0, 0, 0, 1]])
    back = [weights_of("curriculum", [4], s, steps=4, width=0.25, direction="back_to_front").tolist() for s in range(6)]
    np.testing.assert_allclose(back, np.array(at)[:, ::-1])
    # A turn that is half inside the window comes half as often; 2 turns cover half a trajectory each.
    np.testing.assert_allclose(weights_of("curriculum", [2, 1], 0, steps=9, width=0.75), [1, 0.5, 0.75])
    wide = [weights_of("curriculum", [4], s, steps=4, width=0.25, widen=True).sum() for s in range(5)]
    np.testing.assert_allclose(wide, [1, 2, 3, 4, 4])
    np.testing.assert_allclose(weights_of("curriculum", [3, 5], 7, steps=20, width=1.0), 1.0)


@given(turns=st.lists(st.integers(1, 9), min_size=1, max_size=6), steps=st.integers(1, 50), step=st.integers(0, 60),
       width=st.floats(0.01, 1.0), widen=st.booleans(), direction=st.sampled_from(["front_to_back", "back_to_front"]))
@settings(max_examples=80, deadline=None)
def test_every_trajectory_has_a_point_in_every_window(turns, steps, step, width, widen, direction):
    index = Columns(turns)
    weights = weights_of("curriculum", turns, step, steps=steps, width=width, widen=widen, direction=direction)
    assert ((0 <= weights) & (weights <= 1)).all()
    covered = np.bincount(index.sequence, weights / index.turns)  # how much of the window a trajectory covers
    low, high = make_strategy("curriculum", dict(steps=steps, width=width, widen=widen, direction=direction)).window(step)
    np.testing.assert_allclose(covered, high - low, atol=1e-7)
    assert -1e-9 <= low < high <= 1 + 1e-9
    if widen and step < 60:
        later = weights_of("curriculum", turns, step + 1, steps=steps, width=width, widen=True, direction=direction)
        assert (later >= weights - 1e-9).all()


def test_a_curriculum_takes_the_length_of_the_run():
    assert make_strategy("curriculum", {}, steps=30).steps == 30
    assert make_strategy("curriculum", {"steps": 10}, steps=30).steps == 10
    with pytest.raises(ValueError, match="'curriculum' refuses .*steps is not known"):
        make_strategy("curriculum", {})


# --------------------------------------------------------------------------------------------------- weighted


def normal(values):
    return np.array(values) / np.sum(values)


def test_weights_by_score():
    known = dict(turns=[5], scores=[0.1, 0.2, 0.0, 0.4, 0.1], remeasure=0.0)
    np.testing.assert_allclose(weights_of("weighted", **known, floor=0.0), normal([1, 2, 0, 4, 1]), rtol=1e-6)
    np.testing.assert_allclose(weights_of("weighted", **known, floor=0.05), normal([2, 4, 1, 8, 2]), rtol=1e-6)
    square, inverse = weights_of("weighted", **known, exponent=2.0, floor=0.05), weights_of(
        "weighted", **known, exponent=-1.0, floor=0.1)
    np.testing.assert_allclose(square, normal([4, 16, 1, 64, 4]), rtol=1e-6)
    np.testing.assert_allclose(inverse, normal([4, 2, 4, 1, 4]), rtol=1e-6)
    np.testing.assert_allclose(weights_of("weighted", **known, exponent=0.0), np.full(5, 0.2))
    np.testing.assert_allclose(weights_of("weighted", **known, temperature=0.1), normal(np.exp([1, 2, 0, 4, 1])), rtol=1e-6)
    mixed = weights_of("weighted", turns=[5], scores=known["scores"], floor=0.0, remeasure=0.25)
    np.testing.assert_allclose(mixed, 0.75 * normal([1, 2, 0, 4, 1]) + 0.25 / 5, rtol=1e-6)


@pytest.mark.parametrize("unmeasured, same_as", [("optimistic", 0.4), ("mean", 0.2), (0.3, 0.3)])
def test_what_was_never_measured_has_a_stated_score(unmeasured, same_as):
    found = weights_of("weighted", [4], scores=[0.4, None, 0.1, 0.1], floor=0.0, remeasure=0.0, unmeasured=unmeasured)
    np.testing.assert_allclose(found, normal([0.4, same_as, 0.1, 0.1]), rtol=1e-6)
    np.testing.assert_allclose(weights_of("weighted", [3], scores=[None] * 3, unmeasured=unmeasured), np.full(3, 1 / 3))


def test_optimism_holds_where_low_scores_are_wanted():
    found = weights_of("weighted", [3], scores=[0.4, None, 0.1], exponent=-1.0, floor=0.01, remeasure=0.0)
    assert found[1] == found[2] == found.max()


def test_weights_stay_finite_and_reach_what_is_left():
    for exponent in (50.0, -50.0):
        assert np.isfinite(weights_of("weighted", [3], scores=[1e-30, 1e30, 1.0], exponent=exponent, floor=1e-30)).all()
    assert np.isfinite(weights_of("weighted", [3], scores=[-1e30, 1e30, 0.0], temperature=1e-3)).all()
    zero = dict(turns=[3], floor=0.0)
    np.testing.assert_allclose(weights_of("weighted", scores=[0.0, None, 0.0], remeasure=0.0, **zero), [0, 1, 0])
    assert not weights_of("weighted", scores=[0.0] * 3, remeasure=0.0, **zero).any()
    assert weights_of("weighted", scores=[0.0] * 3, remeasure=0.1, **zero).all()


# --------------------------------------------------------------------------------------------------- pivot


def test_pivots_have_most_of_the_draws():
    scores = [0.5, 0.05, 0.1, None, 0.2, None]
    found = weights_of("pivot", [6], scores=scores, threshold=0.1, remeasure=0.1, unmeasured=0.3)
    np.testing.assert_allclose(found, [0.3, 0.05, 0.05, 0.15, 0.3, 0.15])  # at the threshold is not above it
    np.testing.assert_allclose(weights_of("pivot", [6], scores=scores, quantile=0.5, remeasure=0, unmeasured=0),
                               [0.5, 0, 0, 0, 0.5, 0])
    everything = weights_of("pivot", [4], scores=[1.0, 2.0, None, 3.0], threshold=0.1, remeasure=0.1, unmeasured=0.3)
    np.testing.assert_allclose(everything, normal([0.6 / 3, 0.6 / 3, 0.3, 0.6 / 3]))  # nothing below: its share to the others


def test_where_no_point_is_a_pivot():
    for scores in ([None] * 3, [0.1, None, 0.2]):
        np.testing.assert_allclose(weights_of("pivot", [3], scores=scores, threshold=0.5), 1.0)
    with pytest.raises(NothingToSelect, match=r"a reverse_kl above 0.5 \(2 are at or below it"):
        weights_of("pivot", [3], scores=[0.1, None, 0.2], threshold=0.5, none_left="stop")
    np.testing.assert_allclose(weights_of("pivot", [3], scores=[None] * 3, quantile=0.5), 1.0)


@pytest.mark.parametrize("name, options, message", [
    ("curriculum", {"steps": 0}, "steps is 0"), ("curriculum", {"steps": 5, "width": 0}, "width is 0"),
    ("curriculum", {"steps": 5, "direction": "up"}, "direction is 'up'"),
    ("weighted", {"floor": 0, "exponent": -1}, "floor is 0; .* negative exponent"),
    ("weighted", {"temperature": 0}, "temperature is 0"), ("weighted", {"unmeasured": "high"}, "unmeasured is 'high'"),
    ("weighted", {"remeasure": 1.5}, "remeasure is 1.5"), ("weighted", {"scores": "x"}, "no option 'scores'; there is"),
    ("weighted", {"exponent": float("nan")}, "exponent is nan"),
    ("pivot", {}, "either threshold .* or quantile"), ("pivot", {"threshold": 1, "quantile": 0.5}, "either threshold"),
    ("pivot", {"quantile": 1.0}, "quantile is 1.0"), ("pivot", {"threshold": 0.1, "remeasure": 1.0}, "remeasure is 1.0"),
    ("pivot", {"threshold": 0.1, "remeasure": 0.5, "unmeasured": 0.5}, "leave no draws"),
    ("pivot", {"threshold": 0.1, "none_left": "go"}, "none_left is 'go'"),
])  # fmt: skip
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_strategy(name, options)


# --------------------------------------------------------------------------------------------------- draws


def chi_square(counts, expected):
    """Σ (found − expected)² / expected over the cells that can occur, in standard deviations above its mean."""
    counts, expected = np.asarray(counts, dtype=float), np.asarray(expected, dtype=float)
    assert not counts[expected == 0].any(), "something was drawn that has no weight"
    cells = expected > 0
    statistic = ((counts - expected)[cells] ** 2 / expected[cells]).sum()
    freedom = cells.sum() - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


def measured(selector, store, seed=0):
    """Give half of the points a score."""
    rng = np.random.default_rng(seed)
    index = store.index()
    rows = np.flatnonzero(rng.random(len(index)) < 0.5)
    selector.observe(0, {index.point(int(r)): {"reverse_kl": float(rng.exponential(0.3))} for r in rows})
    return selector


STRATEGIES = [("uniform", {}), ("geometric", {"kappa": 0.6}), ("uniform_depth", {}),
              ("curriculum", {"steps": 10, "width": 0.3}), ("curriculum", {"direction": "back_to_front", "widen": True}),
              ("weighted", {}), ("weighted", {"exponent": 2.0, "unmeasured": 0.05}),
              ("pivot", {"threshold": 0.3}), ("pivot", {"quantile": 0.8, "remeasure": 0.05})]  # fmt: skip


@pytest.mark.parametrize("strategy, options", STRATEGIES)
def test_points_are_drawn_by_their_weights(store, strategy, options):
    selector = measured(Selector(store, SelectionOptions(strategy, options), seed=3, steps=10), store)
    count, step = 6000, 4
    candidates = selector._at(step, *STREAM)
    expected = candidates.weights / candidates.weights.sum() * count
    drawn = {p: 0 for p in map(store.index().point, candidates.rows)}
    for point in selector.select(step, *STREAM, count):
        drawn[point] += 1
    assert abs(chi_square(list(drawn.values()), expected)) < 4


@pytest.mark.parametrize("points", [1, 3, "all"])
@pytest.mark.parametrize("strategy, options", STRATEGIES[1:2] + STRATEGIES[3:4] + STRATEGIES[6:8])
def test_points_of_trajectories_are_drawn_by_their_weights_too(store, strategy, options, points):
    options = SelectionOptions(strategy, options, points_per_sequence=points)
    selector = measured(Selector(store, options, seed=4, steps=10), store)
    step = 4
    groups = selector.select_sequences(step, *STREAM, 3000)
    assert max(map(len, groups)) <= (1000 if points == "all" else points)
    assert all(groups) and all(len({p.sequence for p in g}) == 1 for g in groups)
    assert all([p.turn for p in g] == sorted({p.turn for p in g}) for g in groups)
    candidates = selector._at(step, *STREAM)
    drawn = {p: 0 for p in map(store.index().point, candidates.rows)}
    for group in groups:
        for point in group:
            drawn[point] += 1
    expected = candidates.weights / candidates.sequence_weights.sum() * 3000  # P(trajectory) · P(point | trajectory)
    # Points of one trajectory come together, so counts spread less or more than independent draws would: a wider gate.
    assert chi_square(list(drawn.values()), expected) < 12
    assert abs(sum(drawn.values()) - expected.sum()) < 5 * np.sqrt(3 * expected.sum())


@given(weights=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=8).filter(lambda w: max(w) > 1e-3),
       points=st.integers(1, 9), seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_a_trajectory_gives_the_number_of_points_it_should(weights, points, seed):
    from prefix_store.selection import _systematic

    weights = np.array(weights)
    share = weights / max(weights.max(), weights.sum() / points)
    found = _systematic(share, np.random.default_rng(seed))
    assert len(set(found.tolist())) == len(found) and (np.diff(found) > 0).all()
    assert max(1, np.floor(share.sum() + 1e-9)) <= len(found) <= min(points, np.ceil(share.sum() - 1e-9))
    assert (share[found] > 0).all() and set(np.flatnonzero(share >= 1 - 1e-12)) <= set(found.tolist())


def test_systematic_sampling_takes_each_with_its_share():
    from prefix_store.selection import _systematic

    share, rng, n = np.array([1.0, 0.5, 0.2, 0.7, 0.6]), np.random.default_rng(0), 4000
    taken = np.zeros((5, 5))
    for _ in range(n):
        found = _systematic(share, rng)
        taken[np.ix_(found, found)] += 1
    assert np.abs(np.diag(taken) / n - share).max() < 4 * np.sqrt(0.25 / n)
    assert (taken > 0).all(), "two points that can never be drawn together"
