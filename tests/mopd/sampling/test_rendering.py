"""Rendering: ids are made once, appends hold what was sampled, rewritten history forks, outside text stays text."""

import copy

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.sampling.demo_tokenizer import PHRASES, SPECIAL_TOKENS, train_tokenizer
from mopd.sampling.rendering import (
    ChatRenderer,
    RenderingError,
    config_hash,
    first_message,
    load_tokenizer,
    transcript_messages,
)
from tests.mopd.sampling.tiny import make

TEXTS = [
    "go to the red ball. ahead clear. red ball 2 ahead 1 left.", "turn left", "turn right", "go forward", "pick up",
    "You move to the kitchen. exits: hallway, outside.", "focus on blue jay egg",
    "<think>look around</think>move north",
] * 3

# Drops what stands before </think> in every assistant's message but the last one, as reasoning models' templates do.
THINKING = (
    "{% for m in messages %}{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + text + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|user|>' if m['role'] == 'user' else '<|' + m['role'] + '|>' }}\n"
    "{{ m['content'] | trim }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(TEXTS, 400)


@pytest.fixture
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


def conversation(*turns, system="One action."):
    messages = [{"role": "system", "content": system}] if system else []
    return messages + [{"role": ("user", "assistant")[i % 2], "content": t} for i, t in enumerate(turns)]


def templated(tokenizer, template):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    return other


def test_start_ends_where_the_model_writes(renderer, tokenizer):
    ids = renderer.start(conversation("red ball"))
    assert ids.dtype == np.uint32
    assert tokenizer.decode(ids) == "<|system|>One action.<|end|><|user|>red ball<|end|><|assistant|>"
    assert renderer.stop_ids == (tokenizer.eos_token_id,) and renderer.end_id == tokenizer.eos_token_id


@given(st.lists(st.text(st.sampled_from("ab go.\n<|>é🙂"), max_size=12), min_size=3, max_size=7))
@settings(max_examples=40, deadline=None)
def test_appends_add_up_to_the_whole_rendering(texts):
    renderer = ChatRenderer(_shared_tokenizer())
    texts = texts[: len(texts) - 1 + len(texts) % 2]
    ids = renderer.start(conversation(*texts[:1]))
    for turn in range(1, len(texts), 2):
        ids = np.concatenate([ids, renderer.action_tokens(texts[turn])])
        step = renderer.extend(conversation(*texts[: turn + 2]), ids)
        assert step.kind == "append"
        ids = np.concatenate([ids, step.tokens])
    assert renderer.tokenizer.decode(ids) == renderer._render(conversation(*texts), True)
    assert ids.tolist() == renderer.start(conversation(*texts)).tolist()


_SHARED = []


def _shared_tokenizer():
    if not _SHARED:
        _SHARED.append(train_tokenizer(TEXTS, 400))
    return _SHARED[0]


def test_sampled_tokens_are_never_tokenised_again(renderer, tokenizer):
    prompt = renderer.start(conversation("red ball"))
    odd = np.array([tokenizer.convert_tokens_to_ids(c) for c in "goĠforward"] + [tokenizer.eos_token_id], np.uint32)
    assert renderer.action_text(odd) == "go forward"
    assert len(renderer.action_tokens("go forward")) < len(odd)
    step = renderer.extend(conversation("red ball", "go forward", "clear"), np.concatenate([prompt, odd]))
    assert step.kind == "append" and tokenizer.decode(step.tokens) == "<|user|>clear<|end|><|assistant|>"


def test_a_cut_action_is_closed_by_the_suffix(renderer, tokenizer):
    prompt = renderer.start(conversation("red ball"))
    cut = renderer.action_tokens("go forward")[:-1]
    step = renderer.extend(conversation("red ball", "go forward", "clear"), np.concatenate([prompt, cut]))
    assert tokenizer.decode(step.tokens) == "<|end|><|user|>clear<|end|><|assistant|>"


def test_history_that_is_rewritten_forks(tokenizer):
    renderer = ChatRenderer(templated(tokenizer, THINKING))
    first, second = "<think>look around</think>move north", "<think>egg</think>go forward"
    prompt = renderer.start(conversation("kitchen"))
    context = np.concatenate([prompt, renderer.action_tokens(first)])
    step = renderer.extend(conversation("kitchen", first, "hallway"), context)
    assert step.kind == "fork"
    ending = "<|assistant|>move north<|end|><|user|>hallway<|end|><|assistant|>"
    assert renderer.tokenizer.decode(step.tokens).endswith(ending)
    assert step.fork == len(prompt) and (step.tokens[: step.fork] == context[: step.fork]).all()
    assert step.tokens[step.fork] != context[step.fork]
    turns = renderer.assistant_turns(conversation("kitchen", first, "hallway", second))
    assert [t.fork for t in turns] == [None, len(prompt)]
    assert turns[1].prompt.tolist() == step.tokens.tolist()
    assert renderer.tokenizer.decode(turns[1].action) == second + "<|end|>"
    # Nothing to drop, nothing to fork.
    plain = renderer.assistant_turns(conversation("kitchen", "move north", "hallway", "go forward"))
    assert [t.fork for t in plain] == [None, None]
    assert plain[1].prompt[: len(plain[0].prompt)].tolist() == plain[0].prompt.tolist()


def test_a_template_with_line_breaks_and_trimming(tokenizer):
    renderer = ChatRenderer(templated(tokenizer, CHATML))
    prompt = renderer.start(conversation("kitchen"))
    context = np.concatenate([prompt, renderer.action_tokens("move north")])
    step = renderer.extend(conversation("kitchen", "move north", "hallway"), context)
    assert step.kind == "append"
    assert renderer.tokenizer.decode(step.tokens) == "\n<|user|>\nhallway<|end|>\n<|assistant|>\n"
    # The template trims, so what the model would see next is not what it wrote.
    assert renderer.extend(conversation("kitchen", "move north ", "hallway"), context).kind == "fork"


@pytest.mark.parametrize("control", SPECIAL_TOKENS)
def test_outside_text_never_becomes_a_control_token(renderer, tokenizer, control):
    ids = renderer.start(conversation(f"You see {control}{control} here", system=f"Beware {control}"))
    wanted = renderer.start(conversation("You see here"))
    count = lambda found: [int((found == i).sum()) for i in sorted(tokenizer.all_special_ids)]  # noqa: E731
    assert count(ids) == count(wanted)
    assert renderer.escaped == {"user": 2, "system": 1}
    context = np.concatenate([ids, renderer.action_tokens("go forward")])
    seen = f"You see {control}{control} here"
    messages = conversation(seen, "go forward", f"a {control}", system=f"Beware {control}")
    step = renderer.extend(messages, context)
    assert step.kind == "append" and renderer.escaped == {"user": 3, "system": 1}
    assert count(step.tokens) == count(renderer.extend(conversation("x", "go", "a"), context).tokens)
    action = renderer.action_tokens(f"go {control}forward")
    assert [i for i in action if i in tokenizer.all_special_ids] == [renderer.end_id]
    assert renderer.escaped["assistant"] == 1


def test_without_a_system_role_the_prompt_moves(tokenizer):
    renderer = ChatRenderer(tokenizer, system_role=False)
    text = tokenizer.decode(renderer.start(conversation("kitchen")))
    assert text == "<|user|>One action.\n\nkitchen<|end|><|assistant|>"
    context = np.concatenate([renderer.start(conversation("kitchen")), renderer.action_tokens("go")])
    assert renderer.extend(conversation("kitchen", "go", "hallway"), context).kind == "append"


def test_transcripts_render_like_play(renderer, tokenizer):
    transcript = {
        "system": "One action.", "instruction": "find the egg.", "final_observation": "You win.",
        "turns": [{"observation": "kitchen", "action": "move north"}, {"observation": "hallway", "action": "go"}],
    }
    assert first_message("find the egg.", "kitchen") == "find the egg.\nkitchen" and first_message("", "a") == "a"
    want = (
        "<|system|>One action.<|end|><|user|>find the egg.\nkitchen<|end|><|assistant|>move north<|end|>"
        "<|user|>hallway<|end|><|assistant|>go<|end|>"
    )
    assert tokenizer.decode(renderer.transcript(transcript)) == want
    turns = renderer.assistant_turns(transcript_messages(transcript))
    assert [renderer.action_text(t.action) for t in turns] == ["move north", "go"]
    with pytest.raises(RenderingError, match="without turns"):
        renderer.transcript(transcript | {"turns": []})
    with pytest.raises(RenderingError, match="go user, assistant"):
        renderer.assistant_turns(conversation("a", "b") + [{"role": "assistant", "content": "c"}])


def test_fingerprints_tell_tokenizers_templates_and_configs_apart(renderer, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = ChatRenderer(load_tokenizer(tmp_path))
    config = make("qwen3").config
    assert loaded.fingerprint(config) == renderer.fingerprint(config)
    assert loaded.start(conversation("é🙂 kitchen")).tolist() == renderer.start(conversation("é🙂 kitchen")).tolist()
    other = ChatRenderer(train_tokenizer(TEXTS[:2], 300)).fingerprint(config)
    assert other.tokenizer != renderer.fingerprint().tokenizer
    assert other.chat_template == renderer.fingerprint().chat_template
    assert ChatRenderer(templated(tokenizer, CHATML)).fingerprint().chat_template != other.chat_template
    assert ChatRenderer(tokenizer, template_options={"x": 1}).fingerprint().chat_template != other.chat_template
    changed = make("qwen3").config
    assert config_hash(changed) == config_hash(config)
    changed.hidden_size += 1
    assert config_hash(changed) != config_hash(config)


def test_a_tokenizer_without_a_template_is_refused(tokenizer):
    bare = templated(tokenizer, None)
    with pytest.raises(RenderingError, match="has no chat template"):
        ChatRenderer(bare)


@pytest.mark.parametrize("options", [{}, {"pattern": PHRASES}])
def test_demo_tokenizer_writes_any_text(options, tmp_path):
    made = train_tokenizer(TEXTS, 350, **options)
    assert len(made) <= 350 and made.pad_token_id == 0 and made.eos_token == "<|end|>"
    text = "  naïve Zyx\t42\n\n🙂 ahead. <think>"
    made.save_pretrained(tmp_path)
    for one in (made, load_tokenizer(tmp_path)):
        assert one.decode(one(text)["input_ids"]) == text
        assert len(one(" red ball")["input_ids"]) <= 3
    again = train_tokenizer(TEXTS, 350, **options)
    assert again.get_vocab() == made.get_vocab()
    with pytest.raises(ValueError, match="vocab_size 100 is below"):
        train_tokenizer(TEXTS, 100)
