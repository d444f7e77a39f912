"""The project's own transcripts of played episodes, one JSON object per line, with plain text throughout.

Fields: domain, environment, environment_version, task, seed, split, source {kind, id, revision}, system, instruction,
turns [{observation, action, score, writer}], final_observation, score, success, metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prefix_store.importers.base import Conversation, ImportOptions, RowRefused, field, number
from prefix_store.importers.messages import check_order, normalise
from prefix_store.trajectory import SOURCE_KINDS, Source


def plain_messages(row: Mapping[str, Any]) -> list[dict[str, str]]:
    """A transcript's messages: the system prompt if there is one, the instruction and the first observation with a line
    break between them, then each action and the observation after it. The last observation, on which nobody acted, is
    none. An agent loop that sends other messages brings its own function of this kind."""
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for place, turn in enumerate(row["turns"]):
        instruction = row.get("instruction", "") if place == 0 else ""
        text = f"{instruction}\n{turn['observation']}" if instruction else turn["observation"]
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn["action"]}]
    return messages


def from_transcript(row: Mapping[str, Any], options: ImportOptions) -> Conversation:
    """A transcript as a conversation with its own source. Raises RowRefused for another domain than `options.domain`,
    with `options.expert_only` for a turn that the expert did not write, and for fields that are missing or wrong."""
    domain = field(row, "domain", str)
    if options.domain is not None and domain != options.domain:
        raise RowRefused("other domain", f"domain {domain!r}")
    turns = field(row, "turns", list)
    if not turns:
        raise RowRefused("no assistant turn")
    if not all(isinstance(turn, dict) for turn in turns):
        raise RowRefused("wrong field", "field 'turns' holds something that is not an object")
    writers = [field(turn, "writer", str, "expert") for turn in turns]
    if options.expert_only and set(writers) != {"expert"}:
        raise RowRefused("not played by an expert alone", f"writers {', '.join(sorted(set(writers)))}")
    success = field(row, "success", bool)
    source = field(row, "source", dict)
    source = Source(*(field(source, key, str, "") for key in ("kind", "id", "revision")))
    if source.kind not in SOURCE_KINDS:
        raise RowRefused("wrong field", f"source kind {source.kind!r} is none of {', '.join(SOURCE_KINDS)}")
    for text in ("system", "instruction"):
        field(row, text, str, "")
    for turn in turns:
        field(turn, "observation", str)
    actions = [field(turn, "action", str) for turn in turns]
    messages = normalise((options.messages_of or plain_messages)(row))
    check_order(messages, users_in_a_row=True)
    return Conversation(
        messages=messages,
        domain=domain,
        task=field(row, "task", str),
        environment=field(row, "environment", str),
        environment_version=field(row, "environment_version", str),
        seed=field(row, "seed", int),
        split=field(row, "split", str),
        reward=number(row, "score"),
        success=success,
        source=source,
        actions=actions,
        writers=writers,
        metadata=field(row, "metadata", dict, {})
        | {
            "final_observation": field(row, "final_observation", str, ""),
            "scores": [field(turn, "score", (int, float), 0.0) for turn in turns],
        },
    )


def is_transcript(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("turns"), list)
