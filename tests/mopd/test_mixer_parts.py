"""The mixer's parts alone: placement by KV need, means in launch order, the drift rule."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.mixer import Composer
from mopd.mixer_dispatch import Dispatch
from mopd.mixer_drift import DriftOptions, PrefixDrift
from mopd.mixer_estimates import LaunchOrderMeans, Prior


def test_a_sequence_goes_where_most_of_its_kind_still_fit():
    dispatch = Dispatch(safety=1.5)
    dispatch.set_engine("many slots", 10, 350.0)  # 3.5 sequences of 100 tokens
    dispatch.set_engine("much memory", 5, 10_000.0)  # 5 sequences, for want of slots
    assert dispatch.place("a", 100.0) == "much memory"
    assert dispatch.place("b", 100.0) == "much memory"
    assert dispatch.place("c", 100.0) == "many slots", "3.5 against 3"
    assert dispatch.place("d", 1.0) == "many slots", "of short ones 9 against 3"
    assert dispatch.release("c") == "many slots" and dispatch.total_free == 10 + 5 - 3


def test_admission_needs_the_safety_multiple_and_an_oversized_one_waits_for_an_empty_engine():
    dispatch = Dispatch(safety=2.0)
    dispatch.set_engine("e", 8, 1000.0)
    assert [dispatch.place(key, 300.0) for key in "abc"] == ["e", "e", None], "400 are free, 600 are asked for"
    dispatch.release("a"), dispatch.release("b")
    assert dispatch.place("large", 5000.0) == "e"
    assert dispatch.place("small", 1.0) is None
    dispatch.release("large")
    assert dispatch.place("small", 1.0) == "e"
    assert dispatch.place("large", 5000.0) is None
    with pytest.raises(ValueError, match="on no engine"):
        dispatch.release("large")
    with pytest.raises(ValueError, match="at least 1 slot"):
        dispatch.set_engine("f", 0, 1.0)
    with pytest.raises(ValueError, match="safety"):
        Dispatch(safety=0.5)


def test_an_engine_that_is_gone_gives_its_sequences_back_in_order():
    dispatch = Dispatch()
    assert dispatch.place("a", 1.0) is None
    dispatch.set_engine("one", 4, 100.0)
    for key in "abc":
        dispatch.place(key, 1.0)
    other = Dispatch()
    other.load_state_dict(json.loads(json.dumps(dispatch.state_dict())))
    assert other.state_dict() == dispatch.state_dict() and other.total_free == 1
    assert other.remove_engine("one") == ["a", "b", "c"] and other.total_free == other.total_slots == 0


@settings(max_examples=60, deadline=None)
@given(order=st.permutations(range(12)), cut=st.integers(0, 12), memory=st.sampled_from([2, 5, 100]))
def test_means_do_not_depend_on_the_order_in_which_work_ends(order, cut, memory):
    def end(means, number):
        means.end(number, seconds=float(number * number), tokens=100 + number, accepted=number % 3 == 0)

    straight = LaunchOrderMeans(Prior(2.0, 50.0, 0.5), memory)
    for number in range(12):
        end(straight, number)
    other = LaunchOrderMeans(Prior(2.0, 50.0, 0.5), memory)
    for number in order[:cut]:
        end(other, number)
    missing = min(set(range(13)) - set(order[:cut]))
    assert other.entered == missing, "what was launched after one that still runs waits for it"
    again = LaunchOrderMeans(Prior(), memory)
    again.load_state_dict(json.loads(json.dumps(other.state_dict())))
    for number in order[cut:]:
        end(again, number)
    assert again.state_dict() == straight.state_dict()


def test_means_by_hand():
    means = LaunchOrderMeans(Prior(seconds=10.0, tokens=1.0, acceptance=1.0), memory=4)
    means.end(1, seconds=40.0, tokens=None, accepted=None)
    assert means.seconds == 10.0
    means.end(0, seconds=20.0, tokens=3.0, accepted=False)
    assert means.seconds == pytest.approx((10 + 20 + 40) / 3) and means.acceptance == 0.5
    assert means.duration(5.0) == means.seconds, "a running one says nothing before it is longer than the mean"
    assert means.duration(63.0 + means.seconds) == pytest.approx(means.seconds + 63.0 / 4)
    with pytest.raises(ValueError, match="has ended before"):
        means.end(0, seconds=1.0, tokens=1.0, accepted=True)
    with pytest.raises(ValueError, match="not negative"):
        means.end(2, seconds=-1.0, tokens=1.0, accepted=True)
    for wrong in ({"seconds": 0.0}, {"tokens": float("nan")}, {"acceptance": 1.5}):
        with pytest.raises(ValueError, match="prior"):
            Prior(**wrong)


def test_drift_moves_stepwise_within_bounds_and_back():
    options = DriftOptions(step=0.2, maximum=0.8, patience=3, smoothing=0.0)
    drift = PrefixDrift({"game": 0.5, "science": 0.0}, options)
    seen, said = [], []
    for step in range(30):
        kl = (3.0, 1.0) if step < 12 else (1.6, 1.0) if step < 20 else (1.0, 1.0)
        fractions, sentences = drift.update({"game": kl, "science": (9.0, None)})
        seen.append(fractions["game"])
        said += sentences
    assert seen == pytest.approx([0.5] * 2 + [0.7] * 3 + [0.8] * 15 + [0.6] * 3 + [0.5] * 7)
    assert len(said) == 4 and "rises from 0.50 to 0.70" in said[0] and "ratio 3.00, above 2" in said[0]
    assert "falls" in said[-1] and fractions["science"] == 0.0


def test_drift_state_round_trip_and_refusals():
    one, other = (PrefixDrift({"game": 0.5}, DriftOptions(patience=2)) for _ in range(2))
    for step in range(5):
        one.update({"game": (2.0 + step, 0.5)})
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert one.update({"game": (9.0, -0.1)}) == other.update({"game": (9.0, -0.1)})
    assert one.ratio("game") > 2
    with pytest.raises(ValueError, match="unknown domain 'maths'"):
        one.update({"maths": (1.0, 1.0)})
    with pytest.raises(ValueError, match="finite"):
        one.update({"game": (float("nan"), 1.0)})
    with pytest.raises(ValueError, match="domains"):
        PrefixDrift({"maths": 0.5}).load_state_dict(one.state_dict())
    for wrong in ({"ratio_low": 3.0}, {"maximum": 1.0}, {"step": 0.0}, {"smoothing": 1.0}, {"patience": 0}):
        with pytest.raises(ValueError):
            DriftOptions(**wrong)


def test_a_composers_streams_move_and_are_part_of_its_state():
    def made():
        return Composer(("game", "science"), 10, {"rollout": 0.5, "sft_prefix": 0.5})

    one, other = made(), made()
    one.next({"game": 1, "science": 1})
    one.set_streams({"game": {"sft_prefix": 0.8, "rollout": 0.2}})
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    plans = [one.next({"game": 1, "science": 1}) for _ in range(10)]
    assert plans == [other.next({"game": 1, "science": 1}) for _ in range(10)]
    assert sum(p.cells.get(("game", "rollout"), 0) for p in plans) == 10
    assert sum(p.cells.get(("science", "rollout"), 0) for p in plans) == 25
    with pytest.raises(ValueError, match="stream shares of domain 'game' must name"):
        one.set_streams({"game": {"rollout": 1.0}})
    state = one.state_dict()
    with pytest.raises(ValueError, match="is for streams"):
        Composer(("game", "science"), 10, {"rollout": 1.0}).load_state_dict(state)
