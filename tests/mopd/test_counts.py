"""Nested counts of several processes."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mopd.counts import summed

FLAT = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9))


@given(st.lists(FLAT, max_size=4))
def test_flat_counts_add_up_as_counters_do(parts):
    total = Counter()
    for part in parts:
        total.update(part)
    assert summed(parts) == dict(total)


def test_inner_counts_are_added_and_the_parts_stay_as_they_were():
    parts = [{"x": {"a": 1, "y": {"b": 2}}}, {"x": {"y": {"b": 3, "c": 1}}, "z": 4}]
    assert summed(parts) == {"x": {"a": 1, "y": {"b": 5, "c": 1}}, "z": 4}
    assert parts[0] == {"x": {"a": 1, "y": {"b": 2}}}
