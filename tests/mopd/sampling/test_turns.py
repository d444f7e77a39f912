"""Conversations that somebody else had, through chat templates: each prompt is what the template gives a model about to
write the turn, each action what it renders for the message after that."""

import copy
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from mopd.sampling.chat_text import ChatReader, to_chat
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import ChatRenderer
from prefix_store.importers import Conversation, ImportOptions, RowRefused
from prefix_store.importers.chat import from_chat
from prefix_store.importers.contexts import to_sequence
from prefix_store.trajectory import Source, check_sequence, decision_points_of, prefix_of

TEXTS = ["go to the red ball. <think>look around</think>", '{"name": "get_weather", "arguments": {"town": "Oslo"}}',
         "system user assistant tool tools function calls"] * 3  # fmt: skip

# The shape of Qwen3's template: tools in the system prompt, results as the user's, thinking kept only behind the last
# user's message, an empty thought where a last answer has none.
QWEN = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{%- if m.role == 'user' and not m.content.startswith('<tool_response>') %}
    {%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if message.reasoning_content is string %}{%- set thought = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# Begins a turn with an open thought that its own rendering of a message does not have; the marks say what was generated.
OPENED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
          "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
UNENDED = ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
           "{% if add_generation_prompt %}assistant: {% endif %}")
STRICT = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('roles must alternate') }}{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CLOSING = CHATML.replace("{% if add_generation_prompt %}", "{% if not add_generation_prompt %}<|end|>{% endif %}"
                         "{% if add_generation_prompt %}")
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {"type": "object"}}}


def make_tokenizer():
    made = train_tokenizer(TEXTS, 420)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}, replace_extra_special_tokens=False)
    made.add_tokens([AddedToken("<think>"), AddedToken("</think>"), AddedToken("<tool_call>"), AddedToken("</tool_call>")])
    return made


BASE = make_tokenizer()


def renderer(template):
    other = copy.deepcopy(BASE)
    other.chat_template = template
    return ChatRenderer(other)


def text_of(render, ids):
    return render.tokenizer.decode(ids.tolist())


def check(render, messages, wanted, tools=None):
    """Every prompt is the template's text, and what is not tokenised again is what stood before."""
    found = list(render.turns(messages, wanted, tools))
    context = np.zeros(0, np.uint32)
    for number, turn in zip(wanted, found, strict=True):
        assert text_of(render, turn.prompt) == render._render(messages[:number], True, tools)
        assert turn.action[-1] in render.stop_ids and render.action_text(turn.action) == turn.text
        if turn.fork is None:
            assert turn.prompt[: len(context)].tolist() == context.tolist()
        else:
            assert turn.prompt[: turn.fork].tolist() == context[: turn.fork].tolist()
            assert len(context) == turn.fork or turn.prompt[turn.fork] != context[turn.fork]
        context = np.concatenate([turn.prompt, turn.action])
    return found


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def call(**arguments):
    return {"type": "function", "id": "call_1", "function": {"name": "get_weather", "arguments": arguments}}


def test_thinking_that_the_template_drops_forks():
    messages = [said("system", "s"), said("user", "a"), said("assistant", "<think>\nt1\n</think>\n\ngo"), said("user", "b"),
                said("assistant", "stop", reasoning_content="t2"), said("user", "c"), said("assistant", "go")]
    render = renderer(QWEN)
    first, second, third = check(render, messages, [2, 4, 6])
    assert first.text == "<think>\nt1\n</think>\n\ngo" and second.text == "<think>\nt2\n</think>\n\nstop"
    assert third.text == "<think>\n\n</think>\n\ngo", "what this template makes of a last answer without a thought"
    assert first.fork is None and second.fork == len(first.prompt) and third.fork is not None
    assert "t1" not in text_of(render, second.prompt) and "t1" not in text_of(render, third.prompt)


def test_tool_calls_are_what_the_template_makes_of_them():
    messages = [said("user", "weather?"), said("assistant", "", reasoning_content="ask", tool_calls=[call(town="Oslo")] * 2),
                said("tool", "3", tool_call_id="call_1"), said("tool", "4"), said("assistant", "3 and 4"),
                said("assistant", "degrees"), said("user", "thanks")]
    render = renderer(QWEN)
    first, second, third = check(render, messages, [1, 4, 5], [WEATHER])
    one = '\n<tool_call>\n{"name": "get_weather", "arguments": {"town": "Oslo"}}\n</tool_call>'
    assert first.text == "<think>\nask\n</think>\n\n" + one * 2
    assert text_of(render, first.prompt).startswith('<|im_start|>system\n# Tools\n<tools>\n{"type": "function"')
    # Behind the last user's message thinking stays, so the tools' results are appended, both in one message.
    assert second.fork is None and text_of(render, second.prompt[len(first.prompt) + len(first.action) :]) == (
        "\n<|im_start|>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n")
    assert third.text.endswith("degrees")
    # Only what is wanted is a turn.
    (only,) = check(render, messages, [4], [WEATHER])
    assert only.prompt.tolist() == second.prompt.tolist()


def test_templates_that_cannot_show_it_refuse_or_say_so():
    calling = [said("user", "a"), said("assistant", "", tool_calls=[call()])]
    plain = renderer(CHATML)
    with pytest.raises(RowRefused, match="tools_as_text") as refusal:
        list(plain.turns(calling, [1]))
    assert refusal.value.reason == "the template has no tool calls"
    assert plain._can("tool"), "ChatML shows a message of any role"
    one = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    only_chat = renderer(CHATML.replace(one, "{% if m.role != 'tool' %}" + one + "{% endif %}"))
    with pytest.raises(RowRefused) as refusal:
        list(only_chat.turns([said("user", "a"), said("assistant", "b"), said("tool", "c"), said("assistant", "d")], [1, 3]))
    assert refusal.value.reason == "the template has no tool results"
    list(plain.turns([said("user", "a"), said("assistant", "b", reasoning_content="t")], [1], [WEATHER]))
    assert plain.left_out == {
        "a tool list that the template does not show": 1, "reasoning that the template does not show": 1}
    with pytest.raises(RowRefused, match="roles must alternate") as refusal:
        list(renderer(STRICT).turns([said("user", "a"), said("user", "b"), said("assistant", "c")], [2]))
    assert refusal.value.reason == "the template refuses the conversation"


def test_generation_marks_say_what_was_generated():
    messages = [said("user", "a"), said("assistant", "thought</think>go"), said("user", "b"), said("assistant", "c</think>d")]
    render = renderer(OPENED)
    first, second = check(render, messages, [1, 3])
    assert first.text == "thought</think>go" and text_of(render, first.prompt).endswith("assistant\n<think>\n")
    assert second.fork == len(first.prompt) - 2, "the template's history lacks the opened thought and the line after it"
    without = renderer(OPENED.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
    with pytest.raises(RowRefused) as refusal:
        list(without.turns(messages, [1]))
    assert refusal.value.reason == "the template does not begin the message as its generation prompt does"


def test_templates_without_an_end_or_with_one_more():
    messages = [said("user", "a"), said("assistant", "go"), said("user", "b"), said("assistant", "stop")]
    first, second = check(renderer(UNENDED), messages, [1, 3])
    assert first.text == "go\n" and second.fork == len(first.prompt) + len(first.action) - 1
    render = renderer(CLOSING)
    first, second = check(render, messages, [1, 3])
    assert text_of(render, first.action) == "go<|im_end|>" and second.fork is None


def test_control_tokens_in_what_was_said_and_seen():
    render = renderer(CHATML)
    messages = [said("user", "a <|im_end|> b"), said("assistant", "go<|im_end|>")]
    with pytest.raises(RowRefused, match="control token") as refusal:
        list(render.turns(messages, [1]))
    assert refusal.value.reason == "action does not survive the tokenizer"
    (turn,) = render.turns([messages[0], said("assistant", "go")], [1])
    ends = int((turn.prompt == render.tokenizer.convert_tokens_to_ids("<|im_end|>")).sum())
    assert ends == 1 and "a < |im_end|> b" in text_of(render, turn.prompt) and render.escaped == {"user": 2, "assistant": 1}
    tool = copy.deepcopy(WEATHER)
    tool["function"]["description"] = "<|im_end|>"
    (turn,) = renderer(QWEN).turns([said("user", "a"), said("assistant", "go")], [1], [tool])
    assert "< |im_end|>" in text_of(render, turn.prompt)


def test_a_system_prompt_without_its_role():
    render = ChatRenderer(renderer(CHATML).tokenizer, system_role=False)
    (turn,) = render.turns([said("system", "s"), said("user", "a"), said("assistant", "go")], [2])
    assert text_of(render, turn.prompt) == "<|im_start|>user\ns\n\na<|im_end|>\n<|im_start|>assistant\n"
    with pytest.raises(RowRefused, match="no user's message"):
        list(render.turns([said("system", "s"), said("assistant", "go")], [1]))


texts = st.text(st.sampled_from("ab go.\n<|>é🙂{}\"\\"), min_size=1, max_size=12).filter(lambda t: t.strip())


ANY_ROLE = st.sampled_from(["assistant", "user", "tool", "system", "thinking", "calling"])


@given(st.lists(st.tuples(ANY_ROLE, texts), max_size=8), st.sampled_from(["qwen", "chatml", "unended"]))
@settings(max_examples=40, deadline=None)
def test_any_conversation_renders_as_the_template_gives_it(parts, name):
    render = RENDERERS[name]
    messages = [said("user", "start")]
    for role, text in parts:
        more = {"reasoning_content": "t " + text} if role == "thinking" else {}
        if role == "calling" and name == "qwen":
            more = {"tool_calls": [call(town=text)]}
        messages.append(said(role if role in ("user", "tool", "system") else "assistant", text, **more))
    wanted = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    check(render, messages, wanted)
    if not wanted:
        return
    talk = Conversation(messages=messages, domain="d")
    sequence = to_sequence(talk, render, render.fingerprint(), Source("demonstration", "x"), ImportOptions())
    check_sequence(sequence)
    for point, number in zip(decision_points_of(sequence), wanted, strict=True):
        assert text_of(render, prefix_of(sequence, point.context, point.turn)) == render._render(messages[:number], True)


RENDERERS = {"qwen": renderer(QWEN), "chatml": renderer(CHATML), "unended": renderer(UNENDED)}


@pytest.mark.parametrize("template", [QWEN, CHATML, BASE.chat_template])
@pytest.mark.parametrize("system", [True, False])
def test_chats_come_out_as_they_went_in(template, system):
    render = renderer(template)
    messages = [said("system", "Be\nbrief.")] * system + [
        said("user", "a"), said("assistant", "<think>\nt\n</think>\n\ngo"), said("user", "b\n\nc"), said("assistant", "ok"),
        said("user", "d"), said("assistant", "<think>\nu\n</think>\n\nstop")]
    wanted = [n for n, m in enumerate(messages) if m["role"] == "assistant"]
    marked = [m | ({"loss": False} if n == wanted[1] else {}) for n, m in enumerate(messages)]
    talk = Conversation(messages=marked, domain="d")
    sequence = to_sequence(talk, render, render.fingerprint(), Source("demonstration", "x"), ImportOptions())
    row, exact = to_chat(sequence, "id", ChatReader(render))
    assert exact and [m["role"] for m in row["messages"]] == [m["role"] for m in messages]
    assert [m["content"] for m in row["messages"]] == [m["content"] for m in messages]
    assert row["messages"][wanted[1]]["loss"] is False
    again = to_sequence(from_chat(json.loads(json.dumps(row)), ImportOptions()), render, render.fingerprint(),
                        Source("demonstration", "x"), ImportOptions())
    assert [c.tokens.tolist() for c in again.contexts] == [c.tokens.tolist() for c in sequence.contexts]


def test_a_chat_of_another_template_is_given_by_segment():
    render = renderer(CHATML)
    talk = Conversation(messages=[said("user", "a"), said("assistant", "go"), said("user", "b"), said("assistant", "stop")],
                        domain="d")
    sequence = to_sequence(talk, render, render.fingerprint(), Source("demonstration", "x"), ImportOptions())
    row, exact = to_chat(sequence, "id", ChatReader(renderer(BASE.chat_template)))
    assert not exact and row["messages_are"] == "segments"
    assert [m["role"] for m in row["messages"]] == ["user", "assistant"] * 2 and row["messages"][1]["content"] == "go"
