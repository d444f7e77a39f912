"""The mixer: reference cases, exact solutions, shares within bounds, and compositions that lose nothing over steps."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mopd.mixer import (
    Composer,
    DomainSchedule,
    adaptive_shares,
    compose,
    largest_remainder,
    launch_weights,
    next_launch,
    oversampling,
)

FOLDER = Path(__file__).parents[1] / "cases"
MIXER = json.loads((FOLDER / "sample_mixer.json").read_text())
SHARES = json.loads((FOLDER / "adaptive_shares.json").read_text())

positive = st.floats(0.01, 100.0)


def test_demand_of_the_case_is_target_over_acceptance():
    expected = [b / r for b, r in zip(MIXER["target"], MIXER["acceptance"], strict=True)]
    assert expected == pytest.approx(MIXER["demand"])


@pytest.mark.parametrize("case", MIXER["oversampling"], ids=lambda c: f"mean{c['mean']}")
def test_oversampling_cases(case):
    found = oversampling(
        MIXER["demand"], MIXER["duration"], mean=case["mean"], minimum=case["min"], maximum=case["max"]
    )
    assert found == pytest.approx(case["p"], abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    domains=st.lists(st.tuples(st.floats(0.0, 50.0), positive), min_size=1, max_size=6),
    minimum=st.floats(-0.5, 1.0),
    width=st.floats(0.0, 3.0),
    at=st.floats(0.0, 1.0),
)
def test_oversampling_reaches_the_mean_exactly(domains, minimum, width, at):
    demand, duration = zip(*domains, strict=True)
    assume(sum(demand) > 0.01)
    maximum = minimum + width
    mean = min(max(minimum + at * width, minimum), maximum)
    p = oversampling(demand, duration, mean=mean, minimum=minimum, maximum=maximum)
    assert all(minimum <= x <= maximum for x in p)
    assert sum(m * x for m, x in zip(demand, p, strict=True)) / sum(demand) == pytest.approx(mean, abs=1e-9)
    order = sorted(range(len(p)), key=lambda i: duration[i])
    assert all(p[a] <= p[b] + 1e-12 for a, b in zip(order, order[1:], strict=False))


@pytest.mark.parametrize(
    "demand,duration,mean,word",
    [
        ([1.0], [1.0], 3.0, "between minimum"),
        ([1.0], [1.0], -0.1, "between minimum"),
        ([1.0, 1.0], [1.0, 0.0], 0.5, "duration of domain 1 must be positive"),
        ([1.0], [-1.0], 0.5, "positive"),
        ([1.0], [math.nan], 0.5, "finite"),
        ([0.0], [1.0], 0.5, "demand"),
        ([-1.0], [1.0], 0.5, "negative"),
        ([1.0, 2.0], [1.0], 0.5, "per domain"),
    ],
)
def test_oversampling_refuses(demand, duration, mean, word):
    with pytest.raises(ValueError, match=word):
        oversampling(demand, duration, mean=mean, minimum=0.0, maximum=2.0)


@pytest.mark.parametrize("alpha", list(MIXER["launch_weight"]))
def test_launch_weight_cases(alpha):
    found = launch_weights(MIXER["target"], MIXER["acceptance"], MIXER["accepted"], alpha=float(alpha))
    assert found == pytest.approx(MIXER["launch_weight"][alpha])


def test_launch_weights_refuse():
    with pytest.raises(ValueError, match="acceptance of domain 0"):
        launch_weights([1], [0.0], [0])
    with pytest.raises(ValueError, match="alpha"):
        launch_weights([1], [0.5], [0], alpha=2)
    with pytest.raises(ValueError, match="per domain"):
        launch_weights([1], [0.5, 1.0], [0])


def test_a_domain_that_has_enough_still_gets_the_steady_part_only():
    assert launch_weights([4], [0.5], [9], alpha=0.5) == [4.0]
    assert launch_weights([4], [0.5], [9], alpha=0.0) == [0.0]


def test_round_robin_is_smooth_and_proportional():
    credit, launched = [0.0, 0.0, 0.0], []
    for _ in range(14):
        chosen, credit = next_launch([5, 1, 1], credit)
        launched.append(chosen)
    assert launched[:7] == [0, 0, 1, 0, 2, 0, 0] and Counter(launched) == {0: 10, 1: 2, 2: 2}
    with pytest.raises(ValueError, match="positive"):
        next_launch([0.0, 0.0], [0.0, 0.0])
    assert next_launch([0.0, 1.0], [50.0, 0.0])[0] == 1


@pytest.mark.parametrize("case", SHARES["cases"], ids=lambda c: f"gamma{c['gamma']}-{c['smoothing']}")
def test_adaptive_share_cases(case):
    options = {k: v for k, v in case.items() if k != "shares"}
    assert adaptive_shares(SHARES["base"], SHARES["kl"], **options) == pytest.approx(case["shares"], abs=1e-12)


@settings(max_examples=200, deadline=None)
@given(
    domains=st.lists(st.tuples(positive, st.floats(0.0, 20.0)), min_size=1, max_size=6),
    low=st.floats(0.0, 1.0),
    high=st.floats(0.0, 1.0),
    gamma=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
)
def test_adaptive_shares_stay_in_bounds_and_sum_to_one(domains, low, high, gamma):
    base, kl = zip(*domains, strict=True)
    count = len(base)
    minimum, maximum = low / count, 1 / count + high * (1 - 1 / count)
    shares = adaptive_shares(base, kl, gamma=gamma, minimum=minimum, maximum=maximum)
    assert sum(shares) == pytest.approx(1.0, abs=1e-9)
    assert all(minimum - 1e-9 <= s <= maximum + 1e-9 for s in shares)


def test_clamping_both_ends_at_once_still_sums_to_one():
    """0.95 and 0.05 both leave [0.1, 0.6] at once; holding both would give a sum of 0.7."""
    assert adaptive_shares([0.5, 0.5], [19.0, 1.0], minimum=0.1, maximum=0.6) == pytest.approx([0.6, 0.4])


def test_nothing_left_to_learn_keeps_the_base():
    assert adaptive_shares([0.5, 0.3, 0.2], [0.0, 0.0, 0.0]) == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    "options,word",
    [
        ({"kl": [-0.1, 1.0]}, "not be negative"),
        ({"kl": [math.nan, 1.0]}, "finite"),
        ({"gamma": -1.0}, "gamma"),
        ({"minimum": 0.6}, "sum to 1"),
        ({"maximum": 0.4}, "sum to 1"),
        ({"smoothing": 1.5}, "smoothing"),
        ({"previous": [1.0]}, "per domain"),
        ({"base": [0.0, 0.0]}, "positive sum"),
    ],
)
def test_adaptive_shares_refuse(options, word):
    with pytest.raises(ValueError, match=word):
        adaptive_shares(**({"base": [0.5, 0.5], "kl": [1.0, 1.0]} | options))


def test_schedule_moves_towards_what_is_left_and_holds_what_does_not_fall():
    schedule = DomainSchedule({"game": 1, "science": 1}, smoothing=0.0, kl_smoothing=0.0, patience=3)
    assert schedule.update({"game": 1.0})[0] == {"game": 0.5, "science": 0.5}
    shares, said = schedule.update({"game": 1.0, "science": 3.0})
    assert shares == pytest.approx({"game": 0.25, "science": 0.75}) and said == []
    for step in range(1, 4):
        shares, said = schedule.update({"game": 0.9 - step / 10, "science": 3.0 + step})
    assert shares["science"] < (3.0 + 3) / (3.0 + 3 + 0.6) and "science" in said[0]
    held = shares["science"]
    assert schedule.update({"game": 0.5, "science": 9.0})[0]["science"] == held
    shares, said = schedule.update({"game": 0.4, "science": 0.4})
    assert said == [] and shares == pytest.approx({"game": 0.5, "science": 0.5})


def test_schedule_state_round_trip():
    def fresh():
        return DomainSchedule({"game": 1, "science": 2}, minimum=0.2, patience=2)

    one, other = fresh(), fresh()
    for step in range(5):
        one.update({"game": 1.0 / (step + 1), "science": 2.0})
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.update({"game": 0.3, "science": 2.5}) == other.update({"game": 0.3, "science": 2.5})
    with pytest.raises(ValueError, match="domains"):
        DomainSchedule({"maths": 1}).load_state_dict(one.state_dict())
    with pytest.raises(ValueError, match="reverse KL of domain 'game'"):
        one.update({"game": -1.0})
    with pytest.raises(ValueError, match="unknown domain"):
        one.update({"maths": 1.0})
    with pytest.raises(ValueError, match="sum to 1"):
        DomainSchedule({"game": 1, "science": 2}, minimum=0.7)


@settings(max_examples=150, deadline=None)
@given(
    weights=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=7),
    groups=st.integers(1, 20),
    steps=st.integers(1, 60),
)
def test_remainders_are_carried_and_nothing_is_lost(weights, groups, steps):
    targets = [w / sum(weights) * groups for w in weights]
    carry, given_out = None, [0] * len(targets)
    for step in range(1, steps + 1):
        counts, carry = largest_remainder(targets, carry)
        assert sum(counts) == groups and min(counts) >= 0
        given_out = [a + b for a, b in zip(given_out, counts, strict=True)]
        for total, target, owed in zip(given_out, targets, carry, strict=True):
            assert total + owed == pytest.approx(step * target, abs=1e-6)
            assert abs(owed) < 2.0


def test_largest_remainder_by_hand():
    assert largest_remainder([1.5, 0.25, 0.25])[0] == [2, 0, 0]
    assert largest_remainder([0.5, 0.5])[0] == [1, 0]
    assert largest_remainder([0.5, 0.5], [-0.5, 0.5]) == ([0, 1], [0.0, 0.0])
    assert largest_remainder([0.1, 0.2, 0.7], [0.9, 0.8, 0.3])[0] == [1, 1, 1]
    assert largest_remainder([]) == ([], [])
    with pytest.raises(ValueError, match="negative"):
        largest_remainder([-1.0])
    with pytest.raises(ValueError, match="do not match"):
        largest_remainder([1.0], [0.0, 0.0])


def test_a_carry_below_zero_is_paid_back_without_a_negative_count():
    counts, carry = largest_remainder([0.2, 0.8], [-0.9, 0.9])
    assert counts == [0, 1] and carry == pytest.approx([-0.7, 0.7])


DOMAINS = {"game": 0.5, "science": 0.3, "embodied": 0.2}
STREAMS = {"rollout": 0.5, "teacher_prefix": 0.25, "sft_prefix": 0.25}


def test_plan_is_exact_over_steps():
    plans = [compose(step, DOMAINS, 4, STREAMS) for step in range(40)]
    totals, cells = Counter(), Counter()
    for plan in plans:
        assert plan.total == 4 and sum(plan.cells.values()) == 4
        for domain, count in plan.groups.items():
            assert sum(n for (d, _), n in plan.cells.items() if d == domain) == count
        totals.update(plan.groups), cells.update(plan.cells)
    assert totals == {"game": 80, "science": 48, "embodied": 32}
    assert all(abs(cells[d, s] - totals[d] * share) <= 1 for d in DOMAINS for s, share in STREAMS.items())


def test_plan_is_a_pure_function_of_the_step():
    composer = Composer(tuple(DOMAINS), 4, STREAMS)
    assert [composer.next(DOMAINS) for _ in range(9)] == [compose(step, DOMAINS, 4, STREAMS) for step in range(9)]


def test_composer_resumes_exactly_under_moving_shares():
    def shares(step):
        return {"game": 0.5 - step * 0.013, "science": 0.3 + step * 0.013, "embodied": 0.2}

    one = Composer(tuple(DOMAINS), 5, {d: STREAMS for d in DOMAINS})
    first = [one.next(shares(step)) for step in range(7)]
    other = Composer(tuple(DOMAINS), 5, {d: STREAMS for d in DOMAINS})
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    rest = [one.next(shares(step)) for step in range(7, 20)]
    assert rest == [other.next(shares(step)) for step in range(7, 20)]
    target = sum(shares(step)["science"] * 5 for step in range(20))
    assert abs(sum(p.groups["science"] for p in first + rest) - target) < 1


def test_composer_refuses():
    with pytest.raises(ValueError, match="at least 1 group"):
        Composer(("game",), 0)
    with pytest.raises(ValueError, match="distinct"):
        Composer(("game", "game"), 1)
    with pytest.raises(ValueError, match="no share for domain science"):
        Composer(("game", "science"), 1).next({"game": 1.0})
    with pytest.raises(ValueError, match="positive sum"):
        Composer(("game",), 1).next({"game": 0.0})
    with pytest.raises(ValueError, match="stream shares of domain 'game'"):
        Composer(("game",), 1, {"rollout": 0.0})
    with pytest.raises(ValueError, match="no stream shares for domain 'science'"):
        Composer(("game", "science"), 1, {"game": {"rollout": 1.0}})
    with pytest.raises(ValueError, match="not be negative"):
        compose(-1, DOMAINS, 4)
    with pytest.raises(ValueError, match="domains"):
        Composer(("game",), 1).load_state_dict(Composer(("maths",), 1).state_dict())
