"""The formats that are known: how each is recognised and converted, and what a file turns out to be."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prefix_store.importers import chat, exported, trajectories, transcripts
from prefix_store.importers.base import Conversation, ImportOptions, UnknownFormat
from prefix_store.importers.reading import Row
from prefix_store.trajectory import Sequence

LOOKED_AT = 20
# rows of a file by which its format is told


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that rows come in.

    about       one line for people
    recognises  whether a row (a JSON object) has it
    convert     a row → conversation(s), or a finished sequence that needs no rendering; raises RowRefused
    group       rows of a file and its path → rows that are conversations, where those are not the same
    """

    name: str
    about: str
    recognises: Callable[[Mapping[str, Any]], bool]
    convert: Callable[[Mapping[str, Any], ImportOptions], Conversation | Sequence | list[Conversation]]
    group: Callable[[Iterator[Row], Any], Iterator[Row]] | None = None


FORMATS: dict[str, Format] = {f.name: f for f in (
    Format("transcripts", "this project's transcripts of played episodes: `turns`",
           transcripts.is_transcript, transcripts.from_transcript),
    Format("prefix_store", "this store's own export (mopd store export), token-exact",
           exported.is_export, lambda row, _: exported.from_row(row)),
    Format("chat", "OpenAI-style `messages`, with tool calls and tools", chat.is_chat, chat.from_chat),
    Format("sharegpt", "ShareGPT `conversations` with from and value", chat.is_sharegpt, chat.from_sharegpt),
    Format("agentgym", "AgentGym's AgentTraj: `item_id` and `conversations` with loss flags",
           chat.is_agentgym, chat.from_agentgym),
    Format("eto", "ETO's trajectories: `id` and `conversations` that begin with an instruction and OK",
           chat.is_eto, chat.from_eto),
    Format("hermes", "ShareGPT `conversations` with <tool_call> and <tool_response> in their text",
           chat.is_hermes, chat.from_sharegpt),
    Format("swe-agent", "SWE-agent's .traj: `history`", trajectories.is_swe_agent, trajectories.from_swe_agent),
    Format("mini-swe-agent", "mini-SWE-agent's .traj.json: `messages` and `trajectory_format`",
           trajectories.is_mini_swe_agent, trajectories.from_mini_swe_agent),
    Format("verifiers", "verifiers' results.jsonl (`prompt`, `completion`, `reward`) or traces.jsonl (`traces`)",
           trajectories.is_verifiers, trajectories.from_verifiers),
    Format("tales", "TALES' rollouts: one step per row, with `Observation` and `Action`",
           trajectories.is_tales, trajectories.from_tales, trajectories.tales_episodes),
)}  # fmt: skip


def known_formats() -> str:
    """One line per format, for a message."""
    return "\n".join(f"  {f.name:<15} {f.about}" for f in FORMATS.values())


def format_named(name: str) -> Format:
    """The format of that name; raises UnknownFormat listing those that there are."""
    if name not in FORMATS:
        raise UnknownFormat(f"format {name!r} is none of auto, {', '.join(FORMATS)}")
    return FORMATS[name]


def detect_format(rows: Iterable[Row], path: str | os.PathLike) -> Format:
    """The format of a file by its first rows that are JSON objects. Raises UnknownFormat where no format fits the first
    of them, or more than one fits, or the rows do not agree."""
    name = os.fspath(path)
    values = [row.value for row in rows if isinstance(row.value, dict)]
    if not values:
        raise UnknownFormat(f"{name} holds no JSON object; known formats:\n{known_formats()}")
    found: dict[str, int] = {}
    for place, value in enumerate(values):
        fitting = [f.name for f in FORMATS.values() if f.recognises(value)]
        if len(fitting) > 1:
            raise UnknownFormat(f"{name}: row {place + 1} could be {' or '.join(fitting)} (it has {_seen(value)}); "
                                f"say which with the option format")
        for one in fitting:
            found.setdefault(one, place + 1)
    talks = {"sharegpt", "hermes", "eto"} & found.keys()
    if len(found) > 1 and talks == found.keys():
        # One data set: some of its conversations use tools, or begin otherwise.
        return FORMATS["hermes" if "hermes" in talks else "sharegpt"]
    if len(found) > 1:
        said = ", ".join(f"row {row} is {one}" for one, row in found.items())
        raise UnknownFormat(f"{name} mixes formats: {said}; take them apart, or say which to take with the option format")
    if not found:
        raise UnknownFormat(f"{name}: its rows are in no format that is known; the first has {_seen(values[0])}. "
                            f"Known formats:\n{known_formats()}")
    return FORMATS[next(iter(found))]


def _seen(row: Mapping[str, Any]) -> str:
    """The fields of a row with the types of their values."""
    parts = [f"{str(key)[:40]!r} ({type(value).__name__})" for key, value in itertools.islice(row.items(), 8)]
    return ", ".join(parts) + (f" and {len(row) - 8} more" if len(row) > 8 else "") if parts else "no field"
