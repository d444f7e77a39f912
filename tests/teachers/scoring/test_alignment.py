"""Two tokenisations of one text: the smallest common spans, bytes of tokens, and the policy gradient of a span."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mopd.sampling.demo_tokenizer import train_tokenizer
from teachers.scoring.alignment import common_spans, share, span_advantages, token_bytes, whole_characters
from teachers.scoring.requests import TeacherError


@st.composite
def two_cuts(draw):
    """Token lengths of two tokenisations of the same bytes, tokens of no bytes among them."""
    total = draw(st.integers(0, 30))

    def lengths():
        inner = sorted(draw(st.lists(st.integers(0, total), max_size=12))) if total else []
        return [b - a for a, b in itertools.pairwise([0, *inner, total])] if total or inner else []

    return lengths(), lengths()


@settings(max_examples=300, deadline=None)
@given(two_cuts())
def test_spans_are_the_smallest_that_both_have_boundaries_around(cuts):
    ours, theirs = cuts
    spans = common_spans(ours, theirs)
    assert [i for a, b, _, _ in spans for i in range(a, b)] == list(range(len(ours)))
    assert [i for _, _, c, d in spans for i in range(c, d)] == list(range(len(theirs)))
    edges = [{0, *np.cumsum(part).tolist()} for part in (ours, theirs)]
    common = sorted(edges[0] & edges[1])
    assert len(spans) == max(len(common) - 1, 0)
    ends = np.cumsum([0, *(sum(ours[a:b]) for a, b, _, _ in spans)]).tolist()
    assert ends == common
    assert all(sum(ours[a:b]) == sum(theirs[c:d]) for a, b, c, d in spans)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=20))
def test_the_same_tokens_are_spans_of_one_token_each(lengths):
    assert common_spans(lengths, lengths) == [(i, i + 1, i, i + 1) for i in range(len(lengths))]


def test_different_texts_are_refused():
    with pytest.raises(ValueError, match="5 bytes here and 4 there"):
        common_spans([2, 3], [4])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=40))
def test_runs_of_characters_hold_every_byte_once(data):
    runs = whole_characters(data)
    assert b"".join(data[a:b] for a, b, _ in runs) == data
    assert all(a < b for a, b, _ in runs)
    assert [kind for kind, _ in itertools.groupby(whole for *_, whole in runs)] == [whole for *_, whole in runs]
    for a, b, whole in runs:
        if whole:
            data[a:b].decode()
        else:
            with pytest.raises(UnicodeDecodeError):
                data[a:b].decode()


def test_a_character_cut_at_the_end_is_told_from_text():
    assert whole_characters("né".encode()[:-1] + b"") == [(0, 1, True), (1, 2, False)]
    assert whole_characters("a😀b".encode()) == [(0, 6, True)]


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """A BPE of SentencePiece's kind: `▁` for spaces, bytes for what it does not know."""
    data = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *data, "▁", *"abcdefghijklmnopqrstuvwxyz", "th", "▁th"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocabulary, [("t", "h"), ("▁", "th")], unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_the_bytes_of_tokens_are_the_text(text):
    for tokenizer in TOKENIZERS:
        found = token_bytes(tokenizer)
        ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        whole = b"".join(found[i] for i in ids)
        assert whole in (text.encode(), b" " + text.encode())


TOKENIZERS = (train_tokenizer(["go north", "open the door"] * 4, 300), sentencepiece_like())


def test_special_tokens_have_no_bytes_and_unknown_kinds_are_refused():
    found = token_bytes(TOKENIZERS[0])
    assert all(found[i] is None for i in TOKENIZERS[0].all_special_ids)
    core = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    with pytest.raises(TeacherError, match="neither byte-level BPE nor"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]"))


def test_shares_sum_to_the_span_and_scores_of_single_tokens_stay():
    spans = np.array([0, 1, 1, 1, -1, 2])
    shares = np.concatenate([[-0.5], share(-3.0, 3), [np.nan], [-2.0]])
    student = np.array([-1.0, -0.1, -0.2, -0.3, -1.0, np.nan])
    found = span_advantages(shares, student, spans)
    np.testing.assert_allclose(found[[0, 5]], [-0.5, -2.0])
    np.testing.assert_allclose(found[1:4] - student[1:4], [-3.0 + 0.6] * 3, rtol=1e-6)  # the whole log-ratio, each token
    assert np.isnan(found[4])
    student[2] = np.nan
    assert np.isnan(span_advantages(shares, student, spans)[1:4]).all()


def test_the_expected_gradient_is_that_of_the_reverse_kl_of_spans():
    """All texts of two tokens from a vocabulary of three, enumerated: E[Σ_i (t_i − log π(y_i)) ∇ log π(y_i)] is −∇KL of the
    pair; with the sum in equal parts it is another vector."""
    torch.manual_seed(1)
    first = torch.randn(3, dtype=torch.float64, requires_grad=True)
    second = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    teacher = torch.log_softmax(torch.randn(9, dtype=torch.float64), 0).view(3, 3)
    p, q = torch.log_softmax(first, 0), torch.log_softmax(second, 1)
    pair = p[:, None] + q
    wanted = torch.autograd.grad((pair.exp() * (pair - teacher)).sum(), (first, second), retain_graph=True)

    def gradient(attribute):
        total = 0.0
        for a, b in itertools.product(range(3), repeat=2):
            own = torch.stack([p[a], q[a, b]])
            target = torch.as_tensor(attribute(share(float(teacher[a, b]), 2), own.detach().numpy()), dtype=torch.float64)
            total = total - pair[a, b].detach().exp() * ((target - own.detach()) * own).sum()
        return torch.autograd.grad(total, (first, second), retain_graph=True)

    right = gradient(lambda shares, own: span_advantages(shares, own, np.zeros(2, int)))
    equal_parts = gradient(lambda shares, own: shares)
    last_token = gradient(lambda shares, own: np.array([own[0], shares.sum() - own[0]]))
    for found, expected in zip(right, wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert (equal_parts[0] - wanted[0]).abs().max() > 0.01 and (last_token[0] - wanted[0]).abs().max() > 0.01
