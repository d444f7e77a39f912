"""Chats in OpenAI style, one JSON object per line: {"messages": [{"role", "content"}, …], …}.

Optional fields of a row: domain, task, environment, environment_version, seed, split, score (or reward), success,
metadata.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable
from typing import Any

from prefix_store.importers.base import ImportResult, Renderer, RowRefused, conversation_contexts, field, import_rows
from prefix_store.trajectory import Outcome, Sequence, Source


def import_chat(
    path: str | os.PathLike,
    renderer: Renderer,
    sink: Callable[[Sequence], Any],
    *,
    domain: str | None = None,
    max_context_tokens: int | None = None,
) -> ImportResult:
    """Hand each chat to `sink` as a sequence with source kind "demonstration" (the file's name and hash).

    domain is that of rows which name none. A chat that says nothing of its outcome counts as a success with reward 1:
    it is there to be learnt from. Text may be a string or a list of text parts; tool calls and tool messages are
    refused, as are other parts. Rows not taken are counted by reason in the result.
    """
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    source = Source("demonstration", pathlib.Path(path).name, digest[:16])
    fingerprint = renderer.fingerprint()

    def convert(row: dict[str, Any], line: int) -> Sequence:
        name = field(row, "domain", str, domain)
        if not name:
            raise RowRefused("no domain", "the row names no domain and none was given for the file")
        messages = [_message(m, number) for number, m in enumerate(field(row, "messages", list))]
        actions = [m["content"] for m in messages if m["role"] == "assistant"]
        contexts = conversation_contexts(
            messages, renderer, writers=["demonstration"] * len(actions), max_context_tokens=max_context_tokens
        )
        success = field(row, "success", bool, True)
        score = float(field(row, "score", (int, float), field(row, "reward", (int, float), float(success))))
        return Sequence(
            domain=name,
            task=field(row, "task", str, ""),
            environment=field(row, "environment", str, ""),
            environment_version=field(row, "environment_version", str, ""),
            seed=field(row, "seed", int, 0),
            split=field(row, "split", str, "train"),
            contexts=contexts,
            actions=tuple(actions),
            outcome=Outcome(score, score, success),
            source=source,
            fingerprint=fingerprint,
            metadata=field(row, "metadata", dict, {}) | {"line": line},
        )

    return import_rows(path, "chat", convert, sink)


def _message(message: Any, number: int) -> dict[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowRefused("wrong field", f"message {number} is not an object with a role")
    role = message["role"]
    if role not in ("system", "user", "assistant"):
        raise RowRefused("unsupported role", f"message {number} is the {role}'s; system, user and assistant are known")
    if message.get("tool_calls") or message.get("function_call"):
        raise RowRefused("tool calls", f"message {number} calls a tool")
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            raise RowRefused("unsupported content", f"message {number} has parts that are not text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise RowRefused("unsupported content", f"message {number} has no text")
    return {"role": role, "content": content}
