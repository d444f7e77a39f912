"""Domain balance: deviations merged over ranks exactly, and the clipped factors."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.losses import Moments, domain_balance, merge_moments, moments


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-50, 50), max_size=40), cuts=st.lists(st.integers(0, 40), max_size=4),
    shift=st.sampled_from([0.0, 1e6]),
)  # fmt: skip
def test_merging_parts_gives_the_whole(values, cuts, shift):
    array = np.array(values) + shift
    parts = np.split(array, sorted(min(c, len(array)) for c in cuts))
    merged = merge_moments(moments(torch.from_numpy(p)) for p in parts)
    assert merged.count == len(array)
    expected = array.std() if len(array) else 0.0
    assert merged.deviation == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_normalised_factors():
    log_ratio = {"game": torch.tensor([1.0, -1.0] * 50), "science": torch.tensor([0.1, -0.1] * 50)}
    found = domain_balance("normalised", log_ratio, log_ratio={d: moments(x) for d, x in log_ratio.items()})
    everything = torch.cat(list(log_ratio.values())).double().std(correction=0).item()
    assert found["game"] == pytest.approx(everything / 1.0)
    assert found["science"] == 4.0  # 7.1, clipped
    loud = {"game": moments(torch.tensor([100.0, -100.0])), "science": moments(torch.tensor([1.0, -1.0] * 500))}
    assert domain_balance("normalised", loud, log_ratio=loud)["game"] == 0.25


def test_no_deviation_or_no_tokens_gives_one():
    log_ratio = {"game": moments(torch.tensor([2.0, 2.0])), "science": moments(torch.tensor([0.0, 4.0]))}
    found = domain_balance("normalised", ["game", "science", "embodied"], log_ratio=log_ratio)
    assert found["game"] == 1.0 and found["embodied"] == 1.0
    assert Moments().merge(Moments()).deviation == 0.0


def test_none_and_fixed():
    assert domain_balance("none", ["game"]) == {"game": 1.0}
    assert domain_balance("fixed", ["game"], fixed={"game": 2.0}) == {"game": 2.0}
    with pytest.raises(ValueError, match="science"):
        domain_balance("fixed", ["game", "science"], fixed={"game": 2.0})
    with pytest.raises(ValueError, match="normalised"):
        domain_balance("equal", ["game"])


def test_missing_scores_must_be_left_out():
    with pytest.raises(ValueError, match="unscored"):
        moments(torch.tensor([1.0, torch.nan]))
