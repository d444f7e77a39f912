"""Turns that vLLM writes for the student, without vLLM: pieces, candidate sets, versions, and answers that are none."""

import json

import numpy as np
import pytest

from mopd.sampling.balance import Balance
from mopd.sampling.base import Request, SamplingOptions
from mopd.sampling.vllm_turns import Turn, Writing, piece_of
from mopd.sampling.vllm_wire import UNLABELLED, BadAnswer, body, read_piece

PROMPT = np.array([4, 5, 6], np.uint32)
OPTIONS = SamplingOptions(0.7, top_k=2, max_tokens=5, stop_ids=(2,))


def answer(tokens=(7, 8), logprob=(-0.5, -1.0), versions=((UNLABELLED, 0, 2),), told=None, **changes):
    """What a server says. told: per token {id: log-probability} besides the sampled one."""
    content = [{"token_id": t, "logprob": v,
                "top_logprobs": [{"token_id": i, "logprob": p} for i, p in (extra or {}).items()]}
               for t, v, extra in zip(tokens, logprob, told or [None] * len(tokens), strict=True)]
    spans = [{"version": name, "start": a, "end": b} for name, a, b in versions]
    choice = {"token_ids": list(tokens), "logprobs": {"content": content}, "weight_versions": spans} | changes
    return json.dumps({"model": "m", "prompt_token_ids": PROMPT.tolist(), "choices": [choice]}).encode()


def read(turn, content, known=None):
    return read_piece("m", turn, content, versions={UNLABELLED: 0} if known is None else known, vocabulary=20)


def test_a_turn_is_put_together_from_its_pieces():
    writing = Writing(Request(PROMPT, 9), OPTIONS, told=6)
    first = writing.turn()
    assert first.sampling()["top_k"] == 2 and first.sampling()["logprobs"] == 6 and body("m", first)["token_ids"] == [4, 5, 6]
    told = [{8: -0.9, 9: -9999.0}, {7: -0.5, 9: -9999.0}]
    assert writing.add(read(first, answer(told=told))) is None  # broken off: no stop id and room left
    rest = writing.turn()
    assert rest.tokens.tolist() == [4, 5, 6, 7, 8] and rest.limit == 3 and rest.seed not in (9, first.seed)
    assert writing.add(piece_of(rest, [], [])) is None and writing.turn().seed == rest.seed
    done = writing.add(piece_of(rest, [3, 2], [-0.1, -0.2], version=np.array([4, 5]), vocabulary=20,
                                likeliest=[((3, 1), (-0.1, -np.inf)), ((2, 3, 1), (-0.2, -3.0, -np.inf))]))
    assert done.tokens.tolist() == [7, 8, 3, 2] and done.finish == "stop" and done.version.tolist() == [0, 0, 4, 5]
    assert [ids.tolist() for ids in done.candidates] == [[7, 8], [7, 8], [3], [2, 3]]
    assert np.allclose(done.logprob, [-0.5, -1.0, -0.1, -0.2])


def test_greedy_turns_cut_nothing_off():
    turn = Writing(Request(PROMPT, 1), SamplingOptions(0, top_p=0.5, top_k=3, max_tokens=2)).turn()
    assert (turn.top_p, turn.top_k) == (1.0, 0) and turn.sampling()["top_k"] == -1


def test_the_server_says_which_weights_sampled_each_token():
    turn = Turn(PROMPT, 4, 1.0, 1)
    piece = read(turn, answer((7, 8, 9), (-1, -1, -1), (("3", 0, 1), ("4", 1, 3))))
    assert piece.versions.tolist() == [3, 4, 4] and not piece.ended
    assert read(turn, answer()).versions.tolist() == [0, 0]


@pytest.mark.parametrize(("said", "content", "known"), [
    ("weights of an unknown name, 'default'", answer(), {}),  # a server that began anew
    ("weights of an unknown name, 'theirs'", answer(versions=(("theirs", 0, 2),)), None),
    ("does not say which weights", answer(versions=(("3", 0, 1),)), None),
    ("does not say which weights", answer(versions=()), None),
    ("versions of other tokens", answer(versions=(("3", 1, 2),)), None),
    ("another context", answer().replace(b"[4, 5, 6]", b"[4, 5, 7]"), None),
    ("another model", answer().replace(b'"m"', b'"n"'), None),
    ("without its ids", answer(token_ids=[7, 9]), None),
    ("non-finite", answer(logprob=(-0.5, -9999.0)), None),
    ("above 0", answer(logprob=(-0.5, 0.5)), None),
    ("a turn of 5 tokens", answer((7,) * 5, (-1,) * 5, (("3", 0, 5),)), None),
    ("not JSON", b"<html>", None),
])
def test_an_answer_that_is_none_is_refused_with_its_reason(said, content, known):
    with pytest.raises(BadAnswer, match=said):
        read(Turn(PROMPT, 4, 1.0, 1), content, known)


@pytest.mark.parametrize(("said", "told"), [
    ("more ids tie with the 2-th likeliest", [{8: -0.9}, {7: -0.5}]),  # none of those told of was cut off
    ("none of its candidates", [{7: -9999.0, 9: -0.9}, {8: -9999.0}]),
])
def test_a_candidate_set_that_is_not_known_is_not_guessed(said, told):
    turn = Turn(PROMPT, 4, 1.0, 1, top_k=2, told=3)
    ids = [((t, *extra), (-9999.0 if t in extra else v, *extra.values()))
           for t, v, extra in zip((7, 8), (-0.5, -1.0), told, strict=True)]
    with pytest.raises(ValueError, match=said):
        piece_of(turn, [7, 8], [-0.5, -1.0], likeliest=ids, vocabulary=20)


def test_nothing_cut_off_is_none():
    turn = Turn(PROMPT, 4, 1.0, 1, top_p=0.99, told=3)
    assert piece_of(turn, [1], [-0.5], likeliest=[((0, 1, 2), (-1.0, -0.5, -2.0))], vocabulary=3).candidates == (None,)


def test_a_session_keeps_its_server_while_that_is_live():
    balance = Balance(["http://a", "http://b"])
    one, other = balance.endpoints
    for endpoint in (one, other):
        balance.greeted(endpoint, 0.0)
    one.in_flight = 5
    assert balance.choose() is other and balance.choose("http://a") is one
    balance.failed(one, 1.0, "gone", down=True)
    assert balance.choose("http://a") is other
