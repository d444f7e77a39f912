"""Plain values and arrays as bytes: what comes back is what went in, to the bit, and nothing else is taken or read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mopd.encoding import decode, encode

plain = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=8)
kinds = st.sampled_from(["<u4", "<f4", "<f8", "<i8", "|b1"])
arrays = hnp.arrays(kinds, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0))
keys = st.text(max_size=4) | st.integers(-5, 5)
values = st.recursive(plain | arrays, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4)
                      | st.lists(inner, max_size=3).map(tuple), max_leaves=12)


def same(left, right) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@settings(deadline=None)
@given(values)
def test_what_comes_back_is_what_went_in(value):
    assert same(decode(encode(value)), value)


def test_not_a_number_stays_one_and_numpy_scalars_become_plain():
    found = decode(encode([float("nan"), np.float32(0.1), np.int64(3), np.bool_(True), float("-inf")]))
    assert np.isnan(found[0]) and found[1:] == [float(np.float32(0.1)), 3, True, float("-inf")]
    assert [type(v) for v in found[1:4]] == [float, int, bool]


@pytest.mark.parametrize("value", [{1, 2}, object(), b"bytes", np.array(["text"]), np.array([None])])
def test_other_types_are_refused(value):
    with pytest.raises(TypeError):
        encode({"deep": [value]})


def test_cut_or_foreign_bytes_are_refused():
    data = encode({"tokens": np.arange(9, dtype=np.uint32)})
    for cut in (5, 20, len(data) - 1):
        with pytest.raises(ValueError):
            decode(data[:cut])
    with pytest.raises(ValueError, match="not read"):
        decode(encode(np.arange(2)).replace(b"<i8", b"|O8"))
