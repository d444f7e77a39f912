"""Turns that vLLM is to write, without vLLM: what is asked, which answers are none, and that requests are what decides."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mopd.sampling.base import Request, SamplingEngine, SamplingOptions
from teachers.playing import VLLMEngine
from teachers.scoring import vllm_http as wire
from teachers.scoring.requests import TeacherError
from teachers.scoring.turns import Turn, turns_of, written

PROMPT = np.array([4, 5, 6], np.uint32)
TURN = Turn(PROMPT, limit=3, temperature=0.7, seed=9, stop_ids=(2,))


def answer(tokens=(7, 2), logprob=(-0.5, -1.0), **changes):
    """What a server says in `tokens` style."""
    content = [{"token_id": t, "logprob": v} for t, v in zip(tokens, logprob, strict=True)]
    choice = {"token_ids": list(tokens), "logprobs": {"content": content}} | changes
    return json.dumps({"model": "m", "prompt_token_ids": PROMPT.tolist(), "choices": [choice]}).encode()


def test_a_request_is_asked_with_nothing_left_to_a_server_s_defaults():
    options = SamplingOptions(temperature=0.7, max_tokens=8, stop_ids=(2,))
    first, second = turns_of([Request(PROMPT, 2**63 + 5), Request(PROMPT[:1], 6, max_tokens=3)], options, teacher="t")
    assert (first.seed, first.limit, second.limit, len(second)) == (5, 8, 3, 3) and first.tempered
    body = wire.body("tokens", "m", first)
    assert body["token_ids"] == [4, 5, 6] and wire.body("completions", "m", first)["prompt"] == [4, 5, 6]
    for sampling in (body["sampling_params"], wire.body("completions", "m", first)):
        assert sampling["seed"] == 5 and sampling["stop_token_ids"] == [2] and sampling["ignore_eos"]
        assert (sampling["top_p"], sampling["top_k"], sampling["repetition_penalty"]) == (1.0, -1, 1.0)
        assert sampling["logprobs"] == 0


def test_answers_become_turns():
    done = wire.read_answer("tokens", "m", TURN, answer())
    assert done.tokens.tolist() == [7, 2] and done.finish == "stop" and done.logprob.tolist() == [-0.5, -1.0]
    assert wire.read_answer("tokens", "m", TURN, answer((7, 8, 9), (-1, -2, -3))).finish == "length"
    assert wire.read_answer("tokens", "m", TURN, answer((7, 8, 2), (-1, -2, 1e-5))).finish == "stop"
    bare = {"token_ids": [7, 2], "logprobs": {"token_logprobs": [-0.5, -1.0]}, "prompt_token_ids": PROMPT.tolist()}
    done = wire.read_answer("completions", "m", TURN, json.dumps({"choices": [bare]}).encode())
    assert done.logprob.tolist() == [-0.5, -1.0]


@pytest.mark.parametrize(("said", "content"), [
    ("breaks off before its end", answer((7,), (-1.0,))),
    ("goes on behind its end", answer((2, 7), (-1.0, -1.0))),
    ("a turn of 4 tokens", answer((7, 7, 7, 7), (-1.0,) * 4)),
    ("a turn of 0 tokens", answer((), ())),
    ("non-finite", answer((7, 2), (float("nan"), -1.0))),
    ("non-finite", answer((7, 2), (-9999.0, -1.0))),
    ("above 0", answer((7, 2), (0.5, -1.0))),
    ("ids that are none", answer((-1, 2), (-1.0, -1.0))),
    ("log-probabilities of other tokens", answer(token_ids=[8, 2])),
    ("without its ids or log-probabilities", answer(logprobs=None)),
    ("non-finite", answer(logprobs={"token_logprobs": [None, -1.0]})),
    ("malformed", answer(logprobs={})),
    ("malformed", answer(logprobs={"content": [{"logprob": -1.0}] * 2})),
    ("without its one choice", b"{}"),
    ("another context", answer().replace(b"[4, 5, 6]", b"[4, 5, 7]")),
    ("another length", answer().replace(b"[4, 5, 6]", b"[4, 5]")),
    ("another model", answer().replace(b'"m"', b'"n"')),
])
def test_what_is_no_turn_is_refused_with_its_reason(said, content):
    with pytest.raises(wire.BadAnswer, match=said):
        wire.read_answer("tokens", "m", TURN, content)


@pytest.mark.parametrize(("options", "said"), [
    ({"top_p": 0.9}, "does not tell which ids top-p and top-k left"), ({"top_k": 5}, "does not tell which ids"),
    ({"temperature": 0.001}, "from 0.01 on"), ({"temperature": -1.0}, "must be 0 or more"),
    ({"max_tokens": 0}, "max_tokens 0")])
def test_what_vllm_cannot_do_is_refused_before_it_is_asked(options, said):
    with pytest.raises(ValueError, match=said):
        turns_of([Request(PROMPT, 1)], SamplingOptions(**options), teacher="t")


def test_requests_without_tokens_or_room_are_named():
    for request in (Request(PROMPT[:0], 1, "s"), Request(PROMPT, 1, "s", max_tokens=0)):
        with pytest.raises(ValueError, match="request 0 .session 's'. has"):
            turns_of([request], SamplingOptions(), teacher="t")


class Writing:
    """A writer that answers from a list, and tells what it was asked."""

    teacher, max_tokens = "t", 20

    def __init__(self, *answers):
        self.answers, self.asked, self.closed = list(answers), [], False

    def write(self, turns):
        self.asked.append(turns)
        return self.answers[:len(turns)]

    def close(self):
        self.closed = True


def test_the_engine_gives_turns_in_order_and_names_the_one_that_is_missing():
    one, other = (written(TURN, ids, [-1.0] * len(ids)) for ids in ([7, 2], [2]))
    engine = VLLMEngine(writer := Writing(one, other), max_batch=5)
    assert isinstance(engine, SamplingEngine) and engine.max_positions == 21 and engine.max_batch == 5
    options = SamplingOptions(stop_ids=(2,))
    assert engine.generate([Request(PROMPT, 1), Request(PROMPT, 2)], options) == [one, other]
    assert engine.generate([], options) == [] and len(writer.asked) == 1
    engine = VLLMEngine(Writing(one, "a turn that breaks off before its end"))
    with pytest.raises(TeacherError, match="'t' wrote no turn for request 1 .session 'b'.: a turn that breaks off"):
        engine.generate([Request(PROMPT, 1, "a"), Request(PROMPT, 2, "b")], options)
    with pytest.raises(TeacherError, match="never replaced"):
        engine.load_weights([], 1)
    engine.close()
    assert engine.writer.closed
