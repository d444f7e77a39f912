"""Messages in the shapes that data sets use → one shape: role, content, tool_calls, reasoning_content, loss.

Raises RowRefused wherever a message does not say clearly what was seen or written; nothing is guessed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from prefix_store.importers.base import RowRefused

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bing": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "tool_response": "tool", "function_response": "tool",
    "function_call": "call", "tool_call": "call",
}  # fmt: skip
TOOL_RESPONSE = "<tool_response>"
HERMES_SYSTEM = (
    "You are a function calling AI model. You are provided with function signatures within <tools></tools> XML tags. "
    "For each function call return a JSON object with function name and arguments within <tool_call></tool_call> XML tags."
)


def normalise(messages: Any, *, role: str = "role", content: str = "content") -> list[dict[str, Any]]:
    """Messages of a row in the common shape; `role` and `content` name its keys (ShareGPT: from, value).

    Known roles are the keys of ROLES. A `function_call` message is the assistant's with the calls that its text spells
    as JSON. A tool result that already carries Hermes' <tool_response> tags stays what it is, text in a user message:
    that is what templates make of tool results whose tags they write themselves. "loss": False is set on an assistant's
    message that says loss false, train false or weight 0.
    """
    if not isinstance(messages, list):
        raise RowRefused("wrong field", f"messages are a {type(messages).__name__}, not a list")
    found = []
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get(role), str):
            raise RowRefused("wrong field", f"message {place} is not an object with a {role!r}")
        known = ROLES.get(message[role])
        if known is None:
            raise RowRefused("unsupported role", f"message {place} is the {message[role]}'s; known are {', '.join(ROLES)}")
        text = plain_text(message.get(content), place)
        one: dict[str, Any] = {"role": known, "content": text or ""}
        if known == "call":
            one = {"role": "assistant", "content": "", "tool_calls": _calls_in(text, place)}
        elif known == "assistant":
            calls = message.get("tool_calls") or ([message["function_call"]] if message.get("function_call") else None)
            if calls:
                one["tool_calls"] = tool_calls(calls, place)
            thinking = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
            if isinstance(thinking, str) and thinking:
                one["reasoning_content"] = unicode_text(thinking, place)
        elif known == "tool":
            if one["content"].lstrip().startswith(TOOL_RESPONSE):
                one = {"role": "user", "content": one["content"], "tool": True}
            else:
                for key in ("tool_call_id", "name"):
                    if isinstance(message.get(key), str):
                        one[key] = unicode_text(message[key], place)
        if text is None and known != "assistant":
            raise RowRefused("unsupported content", f"message {place} has no text")
        if text is None and not one.get("tool_calls"):
            raise RowRefused("unsupported content", f"message {place} has neither text nor tool calls")
        if one["role"] == "assistant" and _unwanted(message):
            one["loss"] = False
        found.append(one)
    return found


def _unwanted(message: Mapping[str, Any]) -> bool:
    weight = message.get("weight")
    return message.get("loss") is False or message.get("train") is False or (
        isinstance(weight, int | float) and weight == 0)


def plain_text(content: Any, place: int) -> str | None:
    """The text of a message's content: a string, or a list of text parts put together; None where there is none."""
    if isinstance(content, list):
        if not all(isinstance(p, Mapping) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise RowRefused("unsupported content", f"message {place} has parts that are not text")
        content = "".join(part["text"] for part in content)
    if content is None:
        return None
    if not isinstance(content, str):
        raise RowRefused("unsupported content", f"the content of message {place} is a {type(content).__name__}")
    return unicode_text(content, place)


def unicode_text(text: str, place: Any) -> str:
    """`text`, which must have a UTF-8 form: half a surrogate pair is no character that a tokenizer could read."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise RowRefused("text is not Unicode", f"message {place} holds half a surrogate pair") from None
    return text


def tool_calls(calls: Any, place: int) -> list[dict[str, Any]]:
    """Tool calls as OpenAI's form with arguments as an object, which is what chat templates read.

    Taken are OpenAI's {"id", "type", "function": {"name", "arguments"}}, the flat {"id", "name", "arguments"}, each
    also as JSON text; arguments as an object or as its JSON text.
    """
    if not isinstance(calls, list):
        raise RowRefused("tool call that cannot be read", f"tool calls of message {place} are a {type(calls).__name__}")
    found = []
    for call in calls:
        call = _json_object(call, place) if isinstance(call, str) else call
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        name = inner.get("name") if isinstance(inner, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RowRefused("tool call that cannot be read", f"message {place} calls a tool without a name")
        arguments = inner.get("arguments", {})
        if isinstance(arguments, str):
            arguments = _json_object(arguments, place) if arguments.strip() else {}
        if arguments is None:
            arguments = {}
        if not isinstance(arguments, Mapping):
            raise RowRefused("tool call that cannot be read",
                             f"arguments of {name!r} in message {place} are a {type(arguments).__name__}, not an object")
        one: dict[str, Any] = {"type": "function", "function": {
            "name": unicode_text(name, place), "arguments": unicode_value(arguments, place)}}
        if isinstance(call.get("id"), str):
            one["id"] = unicode_text(call["id"], place)
        found.append(one)
    return found


def unicode_value(value: Any, place: Any) -> Any:
    """A JSON value in which every text is Unicode (`unicode_text`)."""
    if isinstance(value, str):
        return unicode_text(value, place)
    if isinstance(value, Mapping):
        return {unicode_text(str(key), place): unicode_value(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [unicode_value(item, place) for item in value]
    return value


def _json_object(text: str, place: int) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRefused("tool call that cannot be read", f"message {place}: {error}") from None
    if not isinstance(value, dict):
        raise RowRefused("tool call that cannot be read", f"message {place}: {type(value).__name__} where an object belongs")
    return value


def _calls_in(text: str | None, place: int) -> list[dict[str, Any]]:
    """The calls of a `function_call` message: JSON of one call or of a list of them."""
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise RowRefused("tool call that cannot be read", f"message {place}: {error}") from None
    return tool_calls(value if isinstance(value, list) else [value], place)


def tool_list(tools: Any) -> list[dict[str, Any]] | None:
    """A row's tools in OpenAI's form, or None where it has none: a list of {"type": "function", "function": {…}} or of
    functions, or its JSON text; each tool may be JSON text too."""
    if isinstance(tools, str):
        tools = _tools_text(tools) if tools.strip() else None
    if not tools:
        return None
    if isinstance(tools, Mapping):
        tools = [tools]
    if not isinstance(tools, list):
        raise RowRefused("tools that cannot be read", f"tools are a {type(tools).__name__}, not a list")
    found = []
    for tool in tools:
        tool = _tools_text(tool) if isinstance(tool, str) else tool
        if not isinstance(tool, Mapping):
            raise RowRefused("tools that cannot be read", f"a tool is a {type(tool).__name__}, not an object")
        inner = tool.get("function", tool)
        if not isinstance(inner, Mapping) or not isinstance(inner.get("name"), str):
            raise RowRefused("tools that cannot be read", "a tool has no name")
        found.append(unicode_value({"type": "function", "function": inner}, "tools"))
    return found


def _tools_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RowRefused("tools that cannot be read", f"the text of the tools is not JSON: {error}") from None


def check_order(messages: Sequence[Mapping[str, Any]], *, users_in_a_row: bool) -> None:
    """Raise RowRefused where roles are out of order: the assistant's or a tool's message before any user's, a tool
    result that follows neither an assistant's message nor another result, or, unless `users_in_a_row`, a user's message
    after a user's (a turn is missing between them). Several messages of the assistant in a row, several tool results in
    a row and a system message in the middle are in order."""
    last = ""
    for place, message in enumerate(messages):
        role = "tool" if message.get("tool") else message["role"]
        wrong = (
            (role in ("assistant", "tool") and not any(m["role"] == "user" for m in messages[:place]))
            or (role == "tool" and last not in ("assistant", "tool"))
            or (role == "user" and last == "user" and not users_in_a_row)
        )
        if wrong:
            before = f"after the {last}'s" if last else "and is the first"
            raise RowRefused("roles out of order", f"message {place} is the {role}'s {before}")
        last = role if role != "system" or not last else last


def as_text(messages: list[dict[str, Any]], tools: list[Any] | None) -> list[dict[str, Any]]:
    """The conversation without tool fields, everything as Hermes' text: the tool list in the system prompt, calls as
    <tool_call> and results as <tool_response> in user messages (several in a row in one)."""
    found: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            calls = "\n".join(
                f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>"
                for call in message.get("tool_calls", ()))
            text = "\n".join(part for part in (message["content"], calls) if part)
            found.append({k: v for k, v in message.items() if k != "tool_calls"} | {"content": text})
        elif message["role"] == "tool":
            text = f"{TOOL_RESPONSE}\n{message['content']}\n</tool_response>"
            if found and found[-1].get("tool"):
                text = found.pop()["content"] + "\n" + text
            found.append({"role": "user", "content": text, "tool": True})
        else:
            found.append(message)
    if tools:
        listed = f"{HERMES_SYSTEM}\n<tools>\n{json.dumps(tools, ensure_ascii=False)}\n</tools>"
        if found and found[0]["role"] == "system":
            found[0] = found[0] | {"content": f"{found[0]['content']}\n\n{listed}"}
        else:
            found.insert(0, {"role": "system", "content": listed})
    return found
