"""Draws: the right distribution, the right log-probability, nothing outside the candidates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.sampling.base import SamplingOptions
from mopd.sampling.draws import check_options, draw, uniforms


def test_uniforms_belong_to_the_seed():
    assert (uniforms(7, 5) == uniforms(7, 9)[:5]).all()
    assert not (uniforms(7, 5) == uniforms(8, 5)).any()
    assert uniforms(2**63 - 1, 3).shape == (3,)


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.5), SamplingOptions(2.0, 0.8, 6)])
def test_frequencies_are_the_policy(options):
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=10) * 2).float()
    count = 40_000
    ids, logprob = draw(logits.expand(count, -1), torch.from_numpy(generator.random(count)), options)
    for token in range(10):
        hit = ids == token
        if hit.any():
            probability = float(logprob[hit][0].exp())
            assert float(hit.float().mean()) == pytest.approx(probability, abs=4 * (0.25 / count) ** 0.5)
    assert sum(float(logprob[ids == t][0].exp()) for t in set(ids.tolist())) == pytest.approx(1, abs=1e-5)


@given(st.integers(0, 2**32), st.floats(0.05, 1.0), st.integers(0, 12), st.floats(0, 1 - 2**-40))
@settings(max_examples=60, deadline=None)
def test_candidates_hold_what_is_drawn(seed, top_p, top_k, uniform):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 10)) * 3).float()
    ids, logprob = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingOptions(1.0, top_p, top_k))
    order = logits[0].sort(descending=True, stable=True).indices.tolist()
    place = order.index(int(ids[0]))
    if top_k:
        assert place < top_k
    if place:
        above = torch.softmax(logits[0][order[: top_k or 10]].double(), -1)[:place].sum()
        assert above < top_p + 1e-6
    assert torch.isfinite(logprob).all() and float(logprob[0]) <= 1e-6


def test_the_largest_uniform_never_takes_an_excluded_token():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    ids, logprob = draw(logits, torch.tensor([1 - 2.0**-40], dtype=torch.float64), SamplingOptions(1.0, top_p=0.5))
    assert int(ids[0]) == 0 and float(logprob[0]) == pytest.approx(0)


def test_wrong_options_are_all_named():
    with pytest.raises(ValueError, match="temperature -1.*top_p 0.*top_k -2.*max_tokens 0"):
        check_options(SamplingOptions(-1, 0, -2, 0))
