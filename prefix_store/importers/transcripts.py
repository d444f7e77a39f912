"""The project's own transcripts of played episodes, one JSON object per line, with plain text throughout.

Fields: domain, environment, environment_version, task, seed, split, source {kind, id, revision}, system, instruction,
turns [{observation, action, score, writer}], final_observation, score, success, metadata.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from prefix_store.importers.base import (
    ImportResult,
    Message,
    Renderer,
    RowRefused,
    conversation_contexts,
    field,
    import_rows,
)
from prefix_store.trajectory import SOURCE_KINDS, Outcome, Sequence, Source


def plain_messages(row: Mapping[str, Any]) -> list[Message]:
    """A transcript's messages: the system prompt if there is one, the instruction and the first observation with a line
    break between them, then each action and the observation after it. The last observation, on which nobody acted, is
    none. An agent loop that sends other messages brings its own function of this kind."""
    messages = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for number, turn in enumerate(row["turns"]):
        instruction = row.get("instruction", "") if number == 0 else ""
        text = f"{instruction}\n{turn['observation']}" if instruction else turn["observation"]
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": turn["action"]}]
    return messages


def import_transcripts(
    path: str | os.PathLike,
    renderer: Renderer,
    sink: Callable[[Sequence], Any],
    *,
    domain: str | None = None,
    messages_of: Callable[[Mapping[str, Any]], list[Message]] = plain_messages,
    max_context_tokens: int | None = None,
    expert_only: bool = False,
    success_only: bool = False,
) -> ImportResult:
    """Hand each transcript to `sink` as a sequence.

    domain        take only rows of this domain
    messages_of   how a transcript's texts become messages: just as the agent loop sends them, so that prefixes agree
    expert_only   refuse episodes in which someone else than the expert wrote a turn
    success_only  refuse episodes that failed
    Rows not taken are counted by reason in the result.
    """
    fingerprint = renderer.fingerprint()

    def convert(row: dict[str, Any], line: int) -> Sequence:
        name = field(row, "domain", str)
        if domain is not None and name != domain:
            raise RowRefused("other domain", f"domain {name!r}")
        turns = field(row, "turns", list)
        if not turns:
            raise RowRefused("no assistant turn")
        if not all(isinstance(turn, dict) for turn in turns):
            raise RowRefused("wrong field", "field 'turns' holds something that is not an object")
        writers = [field(turn, "writer", str, "expert") for turn in turns]
        if expert_only and set(writers) != {"expert"}:
            raise RowRefused("not played by an expert alone", f"writers {', '.join(sorted(set(writers)))}")
        success = field(row, "success", bool)
        if success_only and not success:
            raise RowRefused("not successful", f"score {row.get('score')}")
        source = field(row, "source", dict)
        source = Source(*(field(source, key, str, "") for key in ("kind", "id", "revision")))
        if source.kind not in SOURCE_KINDS:
            raise RowRefused("wrong field", f"source kind {source.kind!r} is none of {', '.join(SOURCE_KINDS)}")

        actions = [field(turn, "action", str) for turn in turns]
        for text in ("system", "instruction"):
            field(row, text, str, "")
        for turn in turns:
            field(turn, "observation", str)
        messages = messages_of(row)
        score = float(field(row, "score", (int, float)))
        return Sequence(
            domain=name,
            task=field(row, "task", str),
            environment=field(row, "environment", str),
            environment_version=field(row, "environment_version", str),
            seed=field(row, "seed", int),
            split=field(row, "split", str),
            contexts=conversation_contexts(messages, renderer, writers=writers, max_context_tokens=max_context_tokens),
            actions=tuple(actions),
            outcome=Outcome(score, score, success),
            source=source,
            fingerprint=fingerprint,
            metadata=field(row, "metadata", dict, {})
            | {
                "final_observation": field(row, "final_observation", str, ""),
                "scores": [field(turn, "score", (int, float), 0.0) for turn in turns],
            },
        )

    return import_rows(path, "transcripts", convert, sink)
