"""Requests become the fewest prompts, and every token gets the score of its own position."""

from __future__ import annotations

import base64
import io
import json
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd.sampling.balance import FAILURES_ALLOWED, LONGEST_PAUSE, SILENCE, Balance
from teachers.scoring import vllm_http as wire
from teachers.scoring.prompts import Prompt, answers_of, checked, prompts_of
from teachers.scoring.requests import ScoreRequest


def score_of(prefix) -> float:
    """A number that only this very prefix has."""
    return -1.0 - zlib.crc32(np.asarray(prefix, "<u4").tobytes()) % 1000 / 7


def play(prompt: Prompt):
    """A back end's answer to a prompt."""
    return checked(prompt, np.array([score_of(prompt.tokens[:i + 1]) for i in range(prompt.start, len(prompt))], np.float32),
                   prompt.tokens[prompt.start:].astype(np.int64))


@st.composite
def contexts(draw):
    tokens = draw(st.lists(st.integers(0, 2), min_size=2, max_size=7))
    start = draw(st.integers(1, len(tokens) - 1))
    stop = draw(st.integers(start + 1, len(tokens)))
    return ScoreRequest(np.array(tokens, np.uint32), start, stop)


@given(st.lists(contexts(), max_size=8))
def test_every_request_gets_its_own_positions_from_the_fewest_prompts(requests):
    prompts = prompts_of(requests)
    for request, answer in zip(requests, answers_of(requests, prompts, [play(p) for p in prompts], "t"), strict=True):
        wanted = [score_of(request.tokens[:i + 1]) for i in range(request.start, request.stop)]
        assert answer.logprob.tolist() == pytest.approx(wanted)
        assert not answer.missing and answer.labels.tolist() == request.labels.tolist()
    read = {tuple(r.tokens[:r.stop].tolist()) for r in requests}
    leaves = [c for c in read if not any(o != c and o[:len(c)] == c for o in read)]
    assert len(prompts) == len(leaves)


def test_a_context_that_is_too_long_takes_none_along_that_fits():
    tokens = np.arange(9, dtype=np.uint32)
    fits, too_long = ScoreRequest(tokens, 2, 5), ScoreRequest(tokens, 2, 9)
    assert [p.parts for p in prompts_of([fits, too_long])] == [(0, 1)]
    assert [p.parts for p in prompts_of([fits, too_long], longest=6)] == [(0,), (1,)]


def test_what_prompt_log_probabilities_cannot_give_is_refused():
    tokens = np.arange(4, dtype=np.uint32)
    for request, said in (
            (ScoreRequest(tokens, 1, 3, temperature=0.7), "temperature"),
            (ScoreRequest(tokens, 1, 2, candidates=(np.array([1, 2]),)), "candidates"),
            (ScoreRequest(tokens, 1, 3, what="hidden"), "hidden")):
        with pytest.raises(ValueError, match=said):
            prompts_of([request])


def test_a_score_that_cannot_be_one_is_missing_with_its_reason():
    prompt = Prompt(np.arange(6, dtype=np.uint32), 1, 0, (0,))
    found = checked(prompt, np.array([-1.0, np.nan, 0.5, -9999.0, -2.0]), np.array([1, 2, 3, 4, 9]))
    assert found.logprob[0] == -1.0 and np.isneginf(found.logprob[3]) and np.isnan(found.logprob[[1, 2, 4]]).all()
    assert found.why.tolist() == ["", "non-finite log-probability", "log-probability above 0", "log-probability -inf",
                                  "scores of other tokens"]


def completion(prompt: Prompt, rows, echo=None) -> bytes:
    return json.dumps({"model": "m", "choices": [{"prompt_token_ids": prompt.tokens.tolist() if echo is None else echo,
                                                  "prompt_logprobs": rows}]}).encode()


def rows_of(prompt: Prompt, *, shift: int = 0):
    tokens = prompt.tokens.tolist()
    named = tokens[shift:] + tokens[:shift]
    return [None] + [{str(t): {"logprob": -float(i), "rank": 1}} for i, t in enumerate(named[1:], 1)]


def test_an_answer_is_read_from_the_position_of_its_token():
    prompt = Prompt(np.array([5, 6, 7, 8], np.uint32), 2, 0, (0,))
    assert wire.read_answer("completions", "m", prompt, completion(prompt, rows_of(prompt))).logprob.tolist() == [-2, -3]


@pytest.mark.parametrize(("change", "said"), [
    (lambda p: b"<html>", "answer is not JSON"),
    (lambda p: b"[]", "answer is not a JSON object"),
    (lambda p: b'{"choices": []}', "answer without its one choice"),
    (lambda p: json.dumps({"model": "another", "choices": [{}]}).encode(), "answer of another model"),
    (lambda p: completion(p, None), "answer without prompt log-probabilities"),
    (lambda p: completion(p, rows_of(p)[:-1]), "scores of another number of tokens"),
    (lambda p: completion(p, rows_of(p), echo=p.tolist()[1:] if hasattr(p, "tolist") else [1]), "context of another length"),
    (lambda p: completion(p, rows_of(p), echo=[9, 9, 9, 9]), "answer to another context"),
    (lambda p: completion(p, [None, 1, 2, 3]), "malformed log-probabilities"),
])
def test_an_answer_to_something_else_is_refused(change, said):
    prompt = Prompt(np.array([5, 6, 7, 8], np.uint32), 1, 0, (0,))
    with pytest.raises(wire.BadAnswer, match=said):
        wire.read_answer("completions", "m", prompt, change(prompt))


def test_shifted_rows_are_scores_of_other_tokens():
    prompt = Prompt(np.array([5, 6, 7, 8], np.uint32), 1, 0, (0,))
    found = wire.read_answer("completions", "m", prompt, completion(prompt, rows_of(prompt, shift=1)))
    assert np.isnan(found.logprob).all() and set(found.why) == {"scores of other tokens"}


def test_chosen_ids_are_asked_from_the_first_wanted_position_and_read_in_binary():
    """The form of vLLM's V2 runner: row i scores the token at prompt_logprob_start + i + 1."""
    prompt = Prompt(np.array([5, 6, 7, 8], np.uint32), 2, 0, (0,))
    asked = wire.body("chosen", "m", prompt)["sampling_params"]
    assert asked["prompt_logprob_start"] == 1 and asked["prompt_logprob_token_ids"] == [[7], [8]]
    packed = io.BytesIO()
    np.save(packed, np.array([[-0.5], [-1.5]], np.float32))
    content = {"model": "m", "prompt_token_ids": [5, 6, 7, 8],
               "prompt_token_id_logprobs": base64.b64encode(packed.getvalue()).decode()}
    assert wire.read_answer("chosen", "m", prompt, json.dumps(content).encode()).logprob.tolist() == [-0.5, -1.5]
    short = io.BytesIO()
    np.save(short, np.array([[-0.5]], np.float32))
    with pytest.raises(wire.BadAnswer, match="another number"):
        wire.read_answer("chosen", "m", prompt, json.dumps(
            content | {"prompt_token_id_logprobs": base64.b64encode(short.getvalue()).decode()}).encode())


def test_the_likeliest_ids_come_in_order_and_an_incomplete_row_is_missing():
    prompt = Prompt(np.array([5, 6, 7], np.uint32), 1, 2, (0,))
    rows = [None, {"6": {"logprob": -3.0, "rank": 4}, "1": {"logprob": -0.1, "rank": 1}, "2": {"logprob": -2.0, "rank": 2}},
            {"7": {"logprob": -0.3, "rank": 1}}]
    found = wire.read_answer("completions", "m", prompt, completion(prompt, rows))
    assert found.top_ids[0].tolist() == [1, 2] and found.logprob[0] == -3.0
    assert np.isnan(found.logprob[1]) and found.why[1] == "non-finite or positive top-k"


def test_the_least_busy_live_server_is_asked():
    balance = Balance(["http://a", "http://b/"])
    a, b = balance.endpoints
    assert balance.choose() is None and balance.due(0.0) == [a, b]
    balance.greeted(a, 1.0), balance.greeted(b, 1.0)
    a.in_flight = 2
    assert balance.choose() is b and b.url == "http://b"


def test_a_server_that_fails_is_left_alone_longer_each_time_and_known_when_it_comes_back():
    balance = Balance(["http://a"])
    (a,) = balance.endpoints
    assert not balance.greeted(a, 1.0)  # the first time is no return
    for _ in range(FAILURES_ALLOWED):
        assert a.live
        balance.failed(a, 2.0, "HTTP 500", down=False)
    assert not a.live and not balance.due(2.0) and balance.due(100.0) == [a]
    pauses = []
    for _ in range(8):
        balance.failed(a, 100.0, "connection refused", down=True)
        pauses.append(a.retry_at - 100.0)
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE
    assert "connection refused" in balance.said()
    assert balance.greeted(a, 120.0) and a.live and a.failures == 0


def test_a_server_not_heard_from_is_greeted_again_before_it_is_trusted():
    balance = Balance(["http://a"])
    (a,) = balance.endpoints
    balance.greeted(a, 1.0)
    balance.doubt(1.0 + SILENCE / 2)
    assert a.live
    balance.doubt(2.0 + SILENCE)
    assert not a.live and balance.due(2.0 + SILENCE) == [a]
    assert not balance.greeted(a, 9.0)  # it never failed, so it did not come back
