"""Scripted experts for TextWorld-Express, which use nothing but what they have seen, and cleaned gold paths.

A player is started with the first state, told of every action with the state that followed (its own or not), and asked
for its next action. States are the simulator's answers: `observation`, `validActions` and `score`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Protocol

from mopd.environments.textworld_express_view import exits_of, map_of, room_of

State = dict[str, Any]


class Player(Protocol):
    def start(self, state: State, instruction: str) -> None: ...

    def saw(self, action: str, state: State) -> None:
        """`action` was played and led to `state`."""

    def next(self) -> str | None:
        """The next action, None when there is no way on."""


class _Walker:
    """Remembers rooms and exits, finds ways through them. Exits count in the order in which the text lists them."""

    def start(self, state: State, instruction: str) -> None:
        self.instruction = instruction
        self.exits: dict[str, dict[str, str | None]] = {}
        self.room = ""
        self.state = state
        self._look(state)

    def saw(self, action: str, state: State) -> None:
        self.state = state
        opened = re.match(r"You open the .+?, revealing the (.+?)\.", state["observation"])
        way = re.match(r"open door to (?:the )?(\w+)$", action)
        if opened and way:
            self.exits[self.room][way[1]] = opened[1]
        self._look(state)

    def _look(self, state: State) -> None:
        room = room_of(state["observation"])
        if room is not None:
            self.room = room
            self.exits[room] = exits_of(state["observation"])

    def step_to(self, wanted: Callable[[str | None], bool], links: dict[str, list[str]] | None = None) -> str | None:
        """First action of a shortest way to a room that is `wanted` (None stands for what is behind a closed door).
        `links` (a map) tells neighbours of rooms that were not visited."""
        links = links or {}
        queue: list[tuple[str, str]] = []
        for direction, room in self.exits[self.room].items():
            if wanted(room):
                return self._through(direction, room)
            if room is not None:
                queue.append((room, self._through(direction, room)))
        reached = {self.room, *(room for room, _ in queue)}
        while queue:
            room, first = queue.pop(0)
            near = list(self.exits[room].values()) if room in self.exits else links.get(room, [])
            for other in near:
                if wanted(other):
                    return first
                if other is not None and other not in reached:
                    reached.add(other)
                    queue.append((other, first))
        return None

    @staticmethod
    def _through(direction: str, room: str | None) -> str:
        return f"move {direction}" if room is not None else f"open door to {direction}"


class CoinPlayer(_Walker):
    """Takes the coin when it is there; else goes to the nearest room not yet visited, exits in the order listed."""

    def next(self) -> str | None:
        if "take coin" in self.state["validActions"]:
            return "take coin"
        return self.step_to(lambda room: room is None or room not in self.exits)


class MapReaderPlayer(_Walker):
    """To the coin and back to the box; reads the map once, when the way is not in sight."""

    def start(self, state: State, instruction: str) -> None:
        super().start(state, instruction)
        found = re.search(
            r"coin that is located in the (.+?), and put it into the box found in the (.+?)\.", instruction
        )
        self.coin, self.box = (found[1], found[2]) if found else ("", "")
        self.map: dict[str, list[str]] = {}

    def saw(self, action: str, state: State) -> None:
        super().saw(action, state)
        self.map = map_of(state["observation"]) or self.map

    def next(self) -> str | None:
        valid = self.state["validActions"]
        for action in ("put coin in box", "take coin"):
            if action in valid and (action != "put coin in box" or self.room == self.box):
                return action
        goal = self.box if any(action.startswith("put coin in ") for action in valid) or self._holds() else self.coin
        way = self.step_to(lambda room: room == goal, self.map)
        if way is None and not self.map and "read map" in valid:
            return "read map"
        return way

    def _holds(self) -> bool:
        return self.state["score"] > 0


class PeckingOrderPlayer:
    """Reads the book, does what it says, reads again."""

    def start(self, state: State, instruction: str) -> None:
        self._order: str | None = None

    def saw(self, action: str, state: State) -> None:
        order = re.search(r"The current task is to (.+?)\.\s*$", state["observation"].strip())
        self._order = order[1].replace(" the ", " ") if order and action.startswith("read ") else None

    def next(self) -> str | None:
        return self._order or "read instructions book"


class PathPlayer:
    """Plays a fixed list of actions; has no way on once something else was played."""

    def __init__(self, path: list[str]):
        self.path = path

    def start(self, state: State, instruction: str) -> None:
        self._at: int | None = 0

    def saw(self, action: str, state: State) -> None:
        on_path = self._at is not None and self._at < len(self.path) and self.path[self._at] == action
        self._at = self._at + 1 if on_path else None

    def next(self) -> str | None:
        return self.path[self._at] if self._at is not None and self._at < len(self.path) else None


PLAYERS: dict[str, type] = {"coin": CoinPlayer, "mapreader": MapReaderPlayer, "peckingorder": PeckingOrderPlayer}

# Actions of gold paths that change nothing, and ones often superfluous; each is left out if the rest still wins.
_IDLE = ("look around", "inventory", "task")
_DOUBTFUL = re.compile(r"^(close |examine |read map$)")


def clean_path(gold: list[str], wins: Callable[[Player], bool]) -> Player | None:
    """The gold path without its idle actions, if that still wins; None where even the full path does not."""
    path = [action for action in gold if action not in _IDLE]
    if not wins(PathPlayer(path)):
        return PathPlayer(gold) if wins(PathPlayer(gold)) else None
    for index in range(len(path) - 1, -1, -1):
        if _DOUBTFUL.match(path[index]):
            shorter = path[:index] + path[index + 1 :]
            if wins(PathPlayer(shorter)):
                path = shorter
    return PathPlayer(path)
