"""Reading and shortening the wording of ScienceWorld: rooms, what is in them, exits, tasks.

The compact view keeps every name that an action can contain, what contains what, open and closed, on and off, and drops
filler: articles, "a substance called", the agent itself, the air, things that are empty or off.
"""

from __future__ import annotations

import dataclasses
import re

VIEW_VERSION = "1"

_ROOM = re.compile(r"^This (?:room|outside location) is called the (.+?)\. (?:In it|Here),? you see:", re.S)
_ARTICLE = re.compile(r"^(?:an?|the|some) ", re.I)
_TASKS = (
    (
        re.compile(
            r"^Your task is to find a\(n\) (?P<kind>.+?)\. First, focus on the thing\. Then, move it to the "
            r"(?P<box>.+?) in the (?P<room>.+?)\.$"
        ),
        r"find a \g<kind>, focus on it, move it to the \g<box> in the \g<room>.",
    ),
    (
        re.compile(
            r"^Your task is to find the animal with the (?P<which>longest|shortest) life span\.\s+The animals are in "
            r"the 'outside' location\.\s+Focus on the animal with the .+ life span\.$"
        ),
        r"focus on the animal with the \g<which> life span, outside.",
    ),
)


@dataclasses.dataclass(frozen=True)
class Room:
    """A room description. `things` are (name, short description) pairs in the order of the text."""

    name: str
    things: tuple[tuple[str, str], ...]
    exits: tuple[str, ...]


def parse_room(text: str) -> Room | None:
    """The room that a look-around text describes, else None."""
    text = text.strip()
    head = _ROOM.match(text)
    if head is None:
        return None
    body, _, doors = text[head.end() :].partition("You also see:")
    things = []
    for line in body.split("\n"):
        if line.strip() and line.strip() not in ("the agent", "a substance called air"):
            things.append(_thing(line.strip()))
    exits = []
    for door in re.findall(r"door to the (.+?) \(that is (open|closed)\)", doors):
        exits.append(door[0] if door[1] == "open" else f"{door[0]} (closed)")
    return Room(head[1], tuple(things), tuple(exits))


def compact(text: str) -> str:
    """The same text in fewer words; a text that is no room description only loses filler words and blanks."""
    room = parse_room(text)
    if room is None:
        return _plain(text)
    things = ", ".join(words for _, words in room.things) or "nothing"
    return f"{room.name}: {things}." + (f" exits: {', '.join(room.exits)}." if room.exits else "")


def compact_instruction(text: str) -> str:
    """The task in fewer words, where its wording is a known one."""
    text = re.sub(r"\s+", " ", text).strip()
    for pattern, short in _TASKS:
        if pattern.match(text):
            return re.sub(r"^find a (?=[aeiou])", "find an ", pattern.sub(short, text))
    return re.sub(r"^Your task is to ", "", text)


def _plain(text: str) -> str:
    text = re.sub(r"a substance called ", "", text)
    lines = [line.strip() for line in text.strip().split("\n") if line.strip()]
    if lines and lines[0].startswith("Ambiguous request"):
        return f"which one? answer with its number. {'; '.join(line.replace(chr(9), ' ') for line in lines[1:])}."
    if lines and lines[0].endswith(":"):
        return f"{lines[0]} {', '.join(_ARTICLE.sub('', line) for line in lines[1:])}"
    return re.sub(r"\s+", " ", " ".join(lines))


def _thing(line: str) -> tuple[str, str]:
    """(name, short description) of one line, such as `a table. On the table is: a glass cup (containing nothing).`"""
    first, *rest = re.split(r"(?<=[^.])\. +", line.rstrip(". "))
    name, state = _name_and_state(first)
    inside = ""
    for sentence in rest:
        holds = re.match(r"^(?:On|In) the .+? is: (.+)$", sentence, re.S)
        if re.match(r"^The .+? door is closed$", sentence):
            state.append("closed")
        elif re.match(r"^The .+? door is open$", sentence):
            state.append("open")
        elif holds:
            inside = _items(holds[1])
        else:
            state.append(sentence)
    notes = [*state, *([inside] if inside else [])]
    return name, f"{name} ({'; '.join(notes)})" if notes else name


def _name_and_state(text: str) -> tuple[str, list[str]]:
    state = []
    off = re.match(r"^(.+?), which is (.+)$", text)
    if off:
        text = off[1]
        if not re.match(r"^(turned off|deactivated|off)$", off[2].rstrip(", ")):
            state.append(off[2].removeprefix("turned "))
    reading = re.match(r"^(.+?), currently reading a temperature of (.+)$", text)
    if reading:
        text = reading[1]
        state.append(reading[2].replace(" celsius", ""))
    holds = re.match(r"^(.+?) \(containing (.+)\)$", text)
    if holds:
        text = holds[1]
        inside = _items(holds[2])
        if inside:
            state.append(inside)
    return _noun(text), state


def _items(text: str) -> str:
    """A list of things inside a thing; empty for `nothing`."""
    parts, depth, part = [], 0, ""
    for letter in text.rstrip(". "):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            parts.append(part)
            part = ""
        else:
            part += letter
    parts.append(part)
    words: list[str] = []
    for item in (p.strip() for p in parts):
        if item.startswith("which is "):  # "a switch, which is off": a state, not a thing
            if words and item != "which is off" and item != "which is closed":
                words[-1] += f" ({item.removeprefix('which is ')})"
        elif item and item != "nothing":
            name, state = _name_and_state(item)
            words.append(f"{name} ({'; '.join(state)})" if state else name)
    return ", ".join(words)


def _noun(text: str) -> str:
    text = _ARTICLE.sub("", text.strip())
    text = text.removeprefix("substance called ")
    return re.sub(r" in the adult stage( with an? \w+ height)?", "", text)
