"""Reading and shortening the wording of TextWorld-Express: rooms, exits, maps.

The compact view keeps every name that an action can contain, what is open or closed, what lies where and every exit. It
drops filler words, and in games where furniture is scenery (no action ever names it) also that furniture.
"""

from __future__ import annotations

import re
from collections.abc import Collection

VIEW_VERSION = "1"

# In these games no action opens, fills or moves furniture: it is decoration around the things that can be taken.
SCENERY_GAMES = ("coin", "mapreader", "peckingorder")

_THING = re.compile(r"^(?:In (?:one|another) part of the room you see|There is also|You also see) (.*)$", re.S)
_EXIT = re.compile(
    r"^(?:Through an open (?P<open>[^,]+), to|To) the (?P<direction>North|South|East|West) you see "
    r"(?:the (?P<room>[^.]+)|a (?P<closed>closed [^.]+))$"
)
_ARTICLE = re.compile(r"^(?:an?|some|the) ")
_INSTRUCTIONS = {
    "coin": (
        r"^Your task is to search the environment and find the coin\.\s+Once you find the coin, take it\.$",
        "find the coin and take it.",
    ),
    "mapreader": (
        r"^Your task is to take the coin that is located in the (?P<a>.+?), and put it into the box found in "
        r"the (?P<b>.+?)\..*$",
        r"coin in the \g<a>, box in the \g<b>. put the coin in the box.",
    ),
    "peckingorder": (
        r"^Your task is to read and follow the instructions book.*$",
        "read and follow the instructions book, again and again.",
    ),
    "twc": (r"^Your task is to pick up objects, then place them.*$", "put each object in its usual place."),
    "cookingworld": (
        r"^You are hungry! Let's cook a delicious meal\..*$",
        "read the cookbook, cook the meal and eat it.",
    ),
}


def sentences(text: str) -> list[str]:
    """Sentences and lines of a text, without their full stops."""
    return [part.strip().rstrip(".") for part in re.split(r"(?<=[.!:])\s+|\n+", text) if part.strip()]


def room_of(text: str) -> str | None:
    """The room of a room description, else None."""
    match = re.match(r"You are in the ([^.]+)\.", text.strip())
    return match[1] if match else None


def exits_of(text: str) -> dict[str, str | None]:
    """Exits of a room description in the order of the text: direction → room behind it, None behind a closed door."""
    found: dict[str, str | None] = {}
    for sentence in sentences(text):
        match = _EXIT.match(sentence)
        if match:
            found[match["direction"].lower()] = match["room"]
    return found


def map_of(text: str) -> dict[str, list[str]] | None:
    """Room → neighbours of a map's text, else None."""
    if not text.strip().startswith("The map reads"):
        return None
    rooms = {}
    for sentence in sentences(text):
        match = re.match(r"The (.+?) connects to the (.+)$", sentence)
        if match:
            rooms[match[1]] = [name.strip() for name in re.split(r", and |, | and ", match[2])]
    return rooms


def compact(text: str, game: str, admissible: Collection[str]) -> str:
    """The same view in fewer words. Texts that are no room description or map only lose superfluous blanks."""
    rooms = map_of(text)
    if rooms is not None:
        return "map: " + " ".join(f"{room}: {', '.join(near)}." for room, near in rooms.items())
    room = room_of(text)
    if room is None:
        return re.sub(r"\s+", " ", text).strip()
    things, ways, rest = [], [], []
    for sentence in sentences(text)[1:]:
        way, thing = _EXIT.match(sentence), _THING.match(sentence)
        if way:
            behind = way["room"] or way["closed"]
            ways.append(f"{way['direction'].lower()} {behind}" + (f" (open {way['open']})" if way["open"] else ""))
        elif thing:
            name, words = _thing(thing[1])
            bare = words != name and "(" not in words or words == name
            if game in SCENERY_GAMES and bare and not any(name in action for action in admissible):
                continue
            things.append(words)
        else:
            rest.append(sentence)
    parts = [f"{room}: {', '.join(things)}." if things else f"{room}."]
    if ways:
        parts.append(f"exits: {', '.join(ways)}.")
    return " ".join([*parts, *(f"{sentence}." for sentence in rest)])


def compact_instruction(text: str, game: str) -> str:
    """The task in fewer words, where its wording is the known one."""
    pattern, replacement = _INSTRUCTIONS.get(game, ("", ""))
    text = text.strip()
    if pattern and re.match(pattern, text, re.S):
        return re.sub(pattern, replacement, text, flags=re.S)
    return re.sub(r"\s+", " ", text)


def _thing(words: str) -> tuple[str, str]:
    """(name, short description) of a thing in a room."""
    words = _ARTICLE.sub("", words)
    closed = re.match(r"^(.+?),? that is closed$", words)
    if closed:
        return closed[1], f"closed {closed[1]}"
    empty = re.match(r"^(.+?), that (?:has nothing on it|is empty)$", words)
    if empty:
        return empty[1], empty[1]
    holder = re.match(r"^(.+?),? that (?:has|contains) (.+?)(?: on it| in it)?$", words)
    if holder:
        items = [_ARTICLE.sub("", item.strip()) for item in re.split(r", and |, | and ", holder[2])]
        return holder[1], f"{holder[1]} ({', '.join(items)})"
    return words, words
