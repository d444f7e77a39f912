"""Expert load against the reference case and by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import mopd.learner

CASE = json.loads((Path(__file__).parents[2] / "cases" / "expert_load.json").read_text())


@pytest.mark.parametrize("convert", (torch.tensor, np.array, list))
def test_reference(convert):
    load = mopd.learner.expert_load(convert(CASE["counts"]))
    for name in ("cv", "peak", "cold"):
        torch.testing.assert_close(getattr(load, name), torch.tensor(CASE[name], dtype=torch.float64))


def test_even_and_collapsed_layers():
    load = mopd.learner.expert_load(torch.tensor([[5, 5, 5, 5], [20, 0, 0, 0]]))
    assert load.cv.tolist() == pytest.approx([0.0, 3**0.5])
    assert load.peak.tolist() == [1.0, 4.0] and load.cold.tolist() == [0.0, 0.75]


def test_a_tenth_of_the_mean_is_not_cold():
    assert mopd.learner.expert_load(torch.tensor([[1, 19, 10, 10]])).cold.tolist() == [0.0]


def test_a_layer_without_tokens_is_nan_not_even():
    load = mopd.learner.expert_load(torch.tensor([[0, 0], [1, 1]]))
    assert torch.isnan(load.cv[0]) and torch.isnan(load.peak[0]) and torch.isnan(load.cold[0])
    assert load.cv[1] == 0.0


def test_refused():
    with pytest.raises(ValueError, match="layers, experts"):
        mopd.learner.expert_load(torch.zeros(3))
    with pytest.raises(ValueError, match="negative"):
        mopd.learner.expert_load(torch.tensor([[1, -1]]))
