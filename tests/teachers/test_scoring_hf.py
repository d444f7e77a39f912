"""The in-process teacher: scores without a graph, missing ones as NaN, weights untouched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.learner.moe import weights_hash
from mopd.learner.packing import pack
from mopd.rows import STREAMS
from teachers.scoring import HFTeacher, TeacherScorer
from tests.mopd.learner.tiny import make_model, mixed_rows, repeated_prefix_logits


def one_batch():
    rows = [r for r in mixed_rows(np.random.default_rng(0), 6) if r.domain == "game"]
    (batch,) = pack(rows, token_budget=1000, pad_id=0, domains=("game",), streams=STREAMS)
    return rows, batch


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_separate_forwards_and_carry_no_graph(temperature):
    rows, batch = one_batch()
    model = make_model("qwen3_moe")
    before = weights_hash(model)
    teacher = HFTeacher(model, teacher="t")
    assert isinstance(teacher, TeacherScorer)
    scores = teacher(batch, need="full", temperature=temperature)
    rows = [rows[i] for i in dict.fromkeys(batch.row.tolist())]  # packing sorts by length
    with torch.no_grad():
        expected = repeated_prefix_logits(make_model("qwen3_moe"), rows)
    torch.testing.assert_close(scores.logits, expected, rtol=1e-4, atol=3e-5)
    logprob = torch.log_softmax(expected / temperature, -1).gather(1, batch.label[:, None])[:, 0]
    torch.testing.assert_close(scores.logprob, logprob, rtol=1e-4, atol=3e-5)
    hidden = teacher(batch, need="hidden", temperature=temperature)
    assert hidden.hidden.shape == (batch.loss_tokens, 32) and not scores.missing and not hidden.missing
    assert hidden.logits is None and hidden.logprob is None and hidden.scored().all()
    torch.testing.assert_close(hidden.head.logits(hidden.hidden), scores.logits)
    assert not any(t.requires_grad for t in (scores.logits, scores.logprob, hidden.hidden, hidden.head.logits(
        hidden.hidden)))
    assert not any(p.requires_grad for p in model.parameters()) and not model.training
    sampled = teacher(batch, need="sampled", temperature=temperature)
    assert sampled.logits is None and torch.allclose(sampled.logprob, scores.logprob, atol=1e-6)
    teacher.check_unchanged()
    assert weights_hash(model) == before and teacher.scored_tokens == 3 * batch.loss_tokens


def test_scores_that_are_not_finite_are_missing_and_counted():
    _, batch = one_batch()
    model = make_model("qwen3")
    poison = int(batch.input_ids.reshape(-1)[batch.source_index[-1]])
    model.get_input_embeddings().weight.data[poison] = float("nan")
    scores = HFTeacher(model, teacher="t")(batch, need="full")
    lost = ~torch.isfinite(scores.logprob)
    assert 0 < int(lost.sum()) < batch.loss_tokens
    assert dict(scores.missing) == {"non-finite logits": int(lost.sum())}
    assert torch.isnan(scores.logits[lost]).all() and torch.isfinite(scores.logits[~lost]).all()
    assert torch.isnan(scores.logprob[lost]).all()
    for need in ("sampled", "hidden"):
        other = HFTeacher(model, teacher="t")(batch, need=need)
        assert torch.equal(other.scored(), ~lost) and other.missing == scores.missing, need
    model.get_output_embeddings().weight.data[3, 3] = float("nan")
    with pytest.raises(ValueError, match="output matrix of teacher 't' has NaN"):
        HFTeacher(model, teacher="t")


def test_wrong_requests_are_refused():
    _, batch = one_batch()
    teacher = HFTeacher(make_model("qwen3"), teacher="t")
    with pytest.raises(ValueError, match="need must be"):
        teacher(batch, need="top_k")
    with pytest.raises(ValueError, match="temperature"):
        teacher(batch, temperature=0.0)
