"""Texts that end a turn: where they end it, the same in every engine, and how a conversation goes on behind them."""

import dataclasses

import numpy as np
import pytest
import torch

from mopd.environments.pool import EnvironmentPool
from mopd.sampling.agent_loop import Harness
from mopd.sampling.base import Completion, Request, SamplingOptions, stopped
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.hf import HFEngine
from mopd.sampling.play import play_tasks
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.stop_strings import StopStrings
from mopd.sampling.vllm_turns import Piece, Writing
from tests.mopd.sampling.corridor import CorridorFamily
from tests.mopd.sampling.tiny import make


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["walk to the end. place 0 of 3", "forward", "back", "Observation: a wall"] * 4, 300)


@pytest.fixture(scope="module")
def engine(tokenizer):
    torch.set_num_threads(1)
    return HFEngine(make("qwen3_moe", len(tokenizer)), max_batch=4)


def ids(tokenizer, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False)["input_ids"], np.uint32)


def test_a_turn_ends_with_the_token_that_completes_a_text(tokenizer):
    tokens = ids(tokenizer, "go back.\nObservation: ab\nObservation: é")
    for text in ("\nObs", "back.", "Observation: a", "é", "n: a"):
        end = StopStrings([text], tokenizer).end_of(tokens)
        assert text in tokenizer.decode(tokens[:end]) and text not in tokenizer.decode(tokens[:end - 1])
    both = StopStrings(["é", "back."], tokenizer)
    assert both.end_of(tokens) == StopStrings(["back."], tokenizer).end_of(tokens)
    assert StopStrings(["forward"], tokenizer).end_of(tokens) is None
    assert StopStrings(["é"], tokenizer).end_of(tokens, known=4) == StopStrings(["é"], tokenizer).end_of(tokens)


def test_long_turns_are_searched_as_a_whole_would_be(tokenizer):
    """Only the last tokens are read at each step: against the text of everything, with random tokens."""
    draw = np.random.default_rng(0)
    for _ in range(40):
        tokens = draw.integers(0, len(tokenizer), 120).astype(np.uint32)
        whole = [tokenizer.decode(tokens[:n].tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
                 for n in range(1, len(tokens) + 1)]
        text = whole[-1][60:63].strip("\ufffd") or "e"
        plain = next((n + 1 for n, seen in enumerate(whole) if text in seen), None)
        assert StopStrings([text], tokenizer).end_of(tokens) == plain


@pytest.mark.parametrize("wrong", [[], [""], ["a", ""], [3]])
def test_what_is_no_text_is_refused(wrong, tokenizer):
    with pytest.raises(ValueError, match="not empty"):
        StopStrings(wrong, tokenizer)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_engine_stops_where_the_same_turn_would_have_gone_on(engine, tokenizer, temperature):
    draw = np.random.default_rng(1)
    requests = [Request(draw.integers(0, len(tokenizer), 8 + i).astype(np.uint32), seed=i) for i in range(12)]
    free = SamplingOptions(temperature, max_tokens=24)
    whole = engine.generate(requests, free)
    texts = [tokenizer.decode(turn.tokens[9:12].tolist()) for turn in whole[:3]]
    strings = StopStrings([text for text in texts if text.strip()], tokenizer)
    ends = [strings.end_of(turn.tokens) for turn in whole]
    assert any(end is not None for end in ends) and any(end is None for end in ends)
    options = dataclasses.replace(free, stop_strings=strings)
    streamed = {}
    for number, request in enumerate(requests):
        engine.submit(number, request, options)
    while engine.under_way:
        streamed |= dict(engine.poll())
    for turns in (engine.generate(requests, options), [streamed[number] for number in range(len(requests))]):
        for one, other, end in zip(turns, whole, ends, strict=True):
            assert one.tokens.tolist() == other.tokens[:end].tolist()
            assert one.finish == ("length" if end is None else "stop")
            np.testing.assert_allclose(one.logprob, other.logprob[:end], atol=1e-5)


def test_an_engine_that_knows_no_texts_has_its_turns_cut(tokenizer):
    tokens = ids(tokenizer, "go back.\nObservation: a wall")
    strings = StopStrings(["Observation:"], tokenizer)
    end = strings.end_of(tokens)
    assert 2 < end < len(tokens)
    logprob = -np.arange(len(tokens), dtype=np.float32)
    sets = tuple(np.array([int(token)], np.int32) for token in tokens)
    prompt = np.array([1, 2, 3], np.uint32)
    experts = np.arange((len(prompt) + len(tokens) - 1) * 4).reshape(-1, 2, 2).astype(np.int16)
    whole = Completion(tokens, logprob, "length", np.arange(len(tokens), dtype=np.int32), sets, experts)
    options = SamplingOptions(top_k=1, max_tokens=len(tokens), stop_strings=strings)
    writing = Writing(Request(prompt, 5), options)
    for at, finish in ((slice(0, 2), ""), (slice(2, None), "length")):  # in two pieces
        made = writing.add(Piece(tokens[at], logprob[at], whole.version[at], finish, sets[at], experts[:len(prompt) + (
            at.stop or len(tokens)) - 1]))
    for turn in (made, stopped(whole, strings)):
        assert turn.finish == "stop" and turn.tokens.tolist() == tokens[:end].tolist()
        assert turn.version.tolist() == list(range(end)) and len(turn.candidates) == end
        np.testing.assert_array_equal(turn.logprob, logprob[:end])
        assert writing.unused == len(tokens) - end
        np.testing.assert_array_equal(turn.experts, experts[:len(prompt) + end - 1])
    assert stopped(whole, None) is whole and stopped(whole, StopStrings(["wolf"], tokenizer)) is whole


def test_a_conversation_goes_on_behind_a_text_that_ended_a_turn(tokenizer):
    plain, renderer = ChatRenderer(tokenizer), ChatRenderer(tokenizer, stop_strings=["\nObs"])
    assert plain.stop_strings is None and renderer.stop_strings.strings == ("\nObs",)
    assert renderer.variant({"enable_thinking": False}).stop_strings is renderer.stop_strings
    talk = [{"role": "user", "content": "go"}]
    context = renderer.start(talk)
    turn = ids(tokenizer, "back\nObs")
    words = renderer.action_text(turn)
    assert words == "back\nObs", "it stays a part of what was said"
    talk += [{"role": "assistant", "content": words}, {"role": "user", "content": "a wall"}]
    more = renderer.extend(talk, np.concatenate([context, turn]))
    assert more.kind == "append"
    assert tokenizer.decode(more.tokens).startswith(tokenizer.convert_ids_to_tokens(renderer.end_id))


def test_turns_of_an_episode_end_at_the_texts(engine, tokenizer):
    harness = Harness("Say forward or back.", max_turns=4, max_turn_tokens=20, max_context_tokens=400)
    tasks = CorridorFamily().tasks("train")[:4]
    free, cut = (play_tasks(engine, EnvironmentPool(CorridorFamily(), size=4), "corridor", tasks, renderer, harness)
                 for renderer in (ChatRenderer(tokenizer), ChatRenderer(tokenizer, stop_strings=["a", "e", "o"])))
    actions = [[context.tokens[part.start:part.end] for context in played.sequence.contexts for part in context.segments
                if part.kind == "action"] for plays in (free, cut) for played in plays]

    def has_one(tokens) -> bool:
        return any(text in tokenizer.decode(tokens.tolist()) for text in "aeo")

    assert any(has_one(turn[:-1]) for turns in actions[:4] for turn in turns), "something is there to be cut"
    ended = ChatRenderer(tokenizer).stop_ids
    for turn in (turn for turns in actions[4:] for turn in turns):
        assert not has_one(turn[:-1]) and (has_one(turn) or int(turn[-1]) in ended or len(turn) == 20)
