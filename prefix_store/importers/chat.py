"""Chats: OpenAI-style messages, and ShareGPT conversations in the variants of AgentGym, ETO and Hermes.

OpenAI style (one object per row): {"messages": [{"role", "content", "tool_calls"?}, …], "tools"?}. ShareGPT:
{"conversations": [{"from", "value", "loss"?}, …], "system"?, "tools"?}. Further fields of a row, each optional: domain,
task, environment, environment_version, seed, split, score or reward, success, id, metadata.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prefix_store.importers.base import Conversation, ImportOptions, RowRefused, field, number, text_id
from prefix_store.importers.messages import check_order, normalise, tool_list


def from_chat(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """OpenAI-style messages. A chat that says nothing of its outcome counts as a success with reward 1: it is there to
    be learnt from. Tools come from `tools` or the older `functions`."""
    messages = normalise(listed(row, "messages"))
    check_order(messages, users_in_a_row=False)
    return conversation(row, messages, row.get("tools") or row.get("functions"), options)


def from_sharegpt(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """ShareGPT conversations; an assistant's message with "loss": false is context and no decision point (AgentGym's
    AgentTraj). The keys of a message may be from and value, or role and content."""
    messages = _sharegpt_messages(row)
    check_order(messages, users_in_a_row=False)
    return conversation(row, messages, row.get("tools"), options)


def from_agentgym(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """AgentGym: `item_id` is the environment's name and the number of its task ("alfworld_1204")."""
    talk = from_sharegpt(row, options)
    name, _, item = text_id(row, "item_id").rpartition("_")
    if name and not talk.environment:
        talk.environment = f"agentgym:{name}"
        talk.task = talk.task or name
        talk.seed = talk.seed or (int(item) if item.isascii() and item.isdigit() and len(item) < 18 else 0)
    return talk


def from_eto(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """ETO: the first pair is the instruction and a fixed "OK" that ETO's own code writes (`construct_preference.py` cuts
    it off as "the instruction part"); nobody decided anything there, so it is no decision point. `reward` is there for
    some tasks only."""
    messages = _sharegpt_messages(row)
    check_order(messages, users_in_a_row=False)
    if _has_fixed_start(messages):
        messages[1]["loss"] = False
    return conversation(row, messages, None, options)


def _sharegpt_messages(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    talk = listed(row, "conversations")
    new_keys = bool(talk) and isinstance(talk[0], Mapping) and "role" in talk[0] and "from" not in talk[0]
    messages = normalise(talk) if new_keys else normalise(talk, role="from", content="value")
    system = field(row, "system", str, "")
    if system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": normalise([{"role": "system", "content": system}])[0]["content"]})
    return messages


def listed(row: Mapping[str, Any], name: str) -> list[Any]:
    """A row's list of messages, which some data sets keep as its JSON text. Raises RowRefused for anything else."""
    value = row.get(name)
    if isinstance(value, str):
        try:
            row = {name: json.loads(value)}
        except (ValueError, RecursionError):
            pass
    return field(row, name, list)


def _has_fixed_start(messages: list[dict[str, Any]]) -> bool:
    return len(messages) > 2 and messages[1]["role"] == "assistant" and (
        messages[1]["content"].strip().rstrip(".").upper() == "OK")


def conversation(row: Mapping[str, Any], messages: list[dict[str, Any]], tools: Any,
                 options: ImportOptions) -> Conversation:
    """The conversation of a row whose fields beside the messages have the names that this module's docstring lists."""
    for place, message in enumerate(messages):
        empty = not message["content"].strip() and not message.get("tool_calls")
        if message["role"] == "assistant" and message.get("loss", True) and empty:
            raise RowRefused("empty action", f"message {place} of the assistant has neither text nor tool calls")
    reward, success = outcome_of(row, options)
    identity = text_id(row, "id", "item_id", "instance_id")
    metadata = row.get("metadata") or {}
    metadata = metadata if isinstance(metadata, dict) else {"metadata": metadata}
    return Conversation(
        messages=messages,
        domain=field(row, "domain", str, options.domain),
        tools=tool_list(tools),
        task=field(row, "task", str, ""),
        environment=field(row, "environment", str, ""),
        environment_version=field(row, "environment_version", str, ""),
        seed=field(row, "seed", int, 0),
        split=field(row, "split", str, "train"),
        reward=reward,
        success=success,
        metadata=metadata | ({"id": identity} if identity else {}),
    )


def outcome_of(row: Mapping[str, Any], options: ImportOptions) -> tuple[float, bool]:
    """(reward, success) of a row. Success is what the row says, else whether its reward reaches
    `options.success_reward`; a row that says nothing is a success with reward 1."""
    reward = number(row, "score", number(row, "reward", None))
    success = field(row, "success", bool, None)
    if success is None:
        success = reward is None or reward >= options.success_reward
    return (float(success) if reward is None else reward), success


# ---------------------------------------------------------------------------------------------------------------
# Recognising


def is_chat(row: Mapping[str, Any]) -> bool:
    messages = row.get("messages")
    as_json = isinstance(messages, str) and messages.lstrip().startswith("[")
    return (isinstance(messages, list) or as_json) and not {"trajectory_format", "trajectory", "history"} & row.keys() and (
        not isinstance(row.get("info"), Mapping) or "mini_version" not in row["info"])


def _talk(row: Mapping[str, Any]) -> list[Any] | None:
    talk = row.get("conversations")
    return talk if isinstance(talk, list) and all(isinstance(m, Mapping) for m in talk) else None


def is_agentgym(row: Mapping[str, Any]) -> bool:
    return _talk(row) is not None and "item_id" in row


def is_eto(row: Mapping[str, Any]) -> bool:
    talk = _talk(row)
    return talk is not None and "item_id" not in row and "id" in row and len(talk) > 2 and not is_hermes(row) and (
        talk[1].get("from") == "gpt" and isinstance(talk[1].get("value"), str) and "loss" not in talk[1]
        and talk[1]["value"].strip().rstrip(".").upper() == "OK")


def is_hermes(row: Mapping[str, Any]) -> bool:
    talk = _talk(row)
    return talk is not None and "item_id" not in row and any(
        isinstance(m.get("value"), str) and ("<tool_call>" in m["value"] or "<tool_response>" in m["value"]) for m in talk)


def is_sharegpt(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("conversations"), list) and not (is_agentgym(row) or is_eto(row) or is_hermes(row))
