"""Draws: the right distribution, the right log-probability, nothing outside the candidates."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.sampling import draws
from mopd.sampling.base import SamplingOptions
from mopd.sampling.draws import check_options, draw, kept_ids, uniforms


def test_uniforms_belong_to_the_seed():
    assert (uniforms(7, 5) == uniforms(7, 9)[:5]).all()
    assert not (uniforms(7, 5) == uniforms(8, 5)).any()
    assert uniforms(2**63 - 1, 3).shape == (3,)


@pytest.mark.parametrize("options", [SamplingOptions(), SamplingOptions(0.5), SamplingOptions(2.0, 0.8, 6)])
def test_frequencies_are_the_policy(options):
    generator = np.random.default_rng(0)
    logits = torch.from_numpy(generator.normal(size=10) * 2).float()
    count = 40_000
    drawn = draw(logits.expand(count, -1), torch.from_numpy(generator.random(count)), options)
    ids, logprob = drawn.ids, drawn.logprob
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
    drawn = draw(logits, torch.tensor([uniform], dtype=torch.float64), SamplingOptions(1.0, top_p, top_k))
    ids, logprob = drawn.ids, drawn.logprob
    order = logits[0].sort(descending=True, stable=True).indices.tolist()
    place = order.index(int(ids[0]))
    if top_k:
        assert place < top_k
    if place:
        above = torch.softmax(logits[0][order[: top_k or 10]].double(), -1)[:place].sum()
        assert above < top_p + 1e-6
    assert torch.isfinite(logprob).all() and float(logprob[0]) <= 1e-6
    (candidates,) = drawn.candidates()
    if candidates is None:
        assert torch.allclose(logprob, torch.log_softmax(logits, -1)[0, ids])
    else:
        assert candidates.dtype == np.int32 and (np.diff(candidates) > 0).all() and int(ids[0]) in candidates
        set_of = torch.from_numpy(candidates).long()
        assert float(logprob[0]) == pytest.approx(
            float(torch.log_softmax(logits[0, set_of].double(), -1)[set_of == ids[0]]), abs=1e-5)


def by_the_words(row, top_p, top_k):
    """The ids that top-k and top-p leave of float64 probabilities, by their definition alone."""
    p, ids = np.exp(row - row.max()), range(len(row))
    if top_k:
        kth = sorted(row, reverse=True)[min(top_k, len(row)) - 1]
        ids = [i for i in ids if row[i] >= kth]
    ids, above, left = sorted(ids, key=lambda i: (-row[i], i)), 0.0, []
    total = sum(p[i] for i in ids)
    for i in ids:
        if top_p < 1 and above >= top_p * total:
            break
        left.append(i)
        above += p[i]
    return sorted(left)


@given(st.integers(0, 2**32), st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.99, 1.0]), st.integers(0, 14), st.integers(1, 6),
       st.sampled_from([1, 3, 100]))
@settings(max_examples=150, deadline=None)
def test_what_is_left_is_what_the_words_say_ties_and_neighbours_included(seed, top_p, top_k, rows, look):
    """Few distinct values, so that ids tie where top-k and top-p cut; every row as if it stood alone, and however many of
    the likeliest ids are looked at first."""
    logits = torch.from_numpy(np.random.default_rng(seed).integers(-2, 3, (rows, 12)) * 0.75).float()
    with mock.patch.object(draws, "FIRST_LOOK", look):
        kept = kept_ids(logits, top_p, top_k)
    if top_p == 1 and not 0 < top_k < 12:
        assert kept is None
        return
    for row, left in zip(logits, kept, strict=True):
        assert left.nonzero()[:, 0].tolist() == by_the_words(row.double().numpy(), top_p, top_k)
        assert torch.equal(left, kept_ids(row[None], top_p, top_k)[0])


def test_top_k_keeps_whatever_ties_with_its_last_and_one_id_always_stays():
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0], [0.0, 0.0, 0.0, 0.0, 9.0]])
    assert kept_ids(logits, 1.0, 3)[0].tolist() == [True] * 5
    assert kept_ids(logits, 1.0, 2).sum(-1).tolist() == [2, 5]
    assert kept_ids(logits, 1e-9, 0).tolist() == [[False, True] + [False] * 3, [False] * 4 + [True]]
    assert kept_ids(torch.zeros(1, 4), 0.5, 0)[0].tolist() == [True, True, False, False]
    assert kept_ids(logits, 1.0, 5) is None and kept_ids(logits, 1.0, 0) is None


def test_greedy_cuts_nothing():
    drawn = draw(torch.randn(3, 20), torch.rand(3, dtype=torch.float64), SamplingOptions(0.0, 0.5, 2))
    assert drawn.kept is None and drawn.candidates() == [None] * 3


def test_the_largest_uniform_never_takes_an_excluded_token():
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    for column in range(4):  # wherever the likeliest id stands
        drawn = draw(logits.roll(column, -1), torch.tensor([1 - 2.0**-40], dtype=torch.float64), SamplingOptions(top_p=0.5))
        assert int(drawn.ids[0]) == column and float(drawn.logprob[0]) == pytest.approx(0)


def test_wrong_options_are_all_named():
    with pytest.raises(ValueError, match="temperature -1.*top_p 0.*top_k -2.*max_tokens 0"):
        check_options(SamplingOptions(-1, 0, -2, 0))
