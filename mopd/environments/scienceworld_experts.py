"""Scripted experts for ScienceWorld, which name things as the text shows them, and cleaned gold paths.

A player is started with the first look and the task, told of every action with what followed, and asked for its next
action. It takes the first candidate in sight, as the text lists them; `choice` asks for a later one, where an
environment has found by trying that the first does not win.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Protocol

from mopd.environments.scienceworld_view import Room, parse_room

UNKNOWN = ("No known action matches that input.", "Unknown action.")
# The house is the same in all tasks.
HOUSE = {
    "hallway": ("art studio", "bedroom", "greenhouse", "kitchen", "living room", "workshop"),
    "kitchen": ("bathroom", "hallway", "outside"),
    "greenhouse": ("hallway", "outside"),
    "outside": ("foundry", "greenhouse", "kitchen"),
    "art studio": ("hallway",),
    "bedroom": ("hallway",),
    "living room": ("hallway",),
    "workshop": ("hallway",),
    "bathroom": ("kitchen",),
    "foundry": ("outside",),
}
ANIMAL = re.compile(r"^baby |^adult | egg$")
# In each life span task one animal of three is from the long-lived ones and one from the short-lived ones.
LIVES = {
    "longest": ("giant tortoise", "parrot", "elephant", "crocodile", "brown bear"),
    "shortest": ("dragonfly", "ant", "mouse", "hedgehog", "chameleon"),
}
# Things that can be focused on but not moved.
FIXTURES = ("bathtub", "sink", "toilet", "ground")
# Tasks whose scripted player won every variation, moving either way; in others it is tried before it is used.
PROVEN = (
    "find-living-thing",
    "find-animal",
    "find-plant",
    "find-non-living-thing",
    "lifespan-longest-lived",
    "lifespan-shortest-lived",
)
POT = re.compile(r"^(flower pot \d+) \(((?!water|soil|nothing)[^,)]+), soil\)$")
FIND_TASK = re.compile(r"find a\(n\) (?P<kind>.+?)\..*move it to the (?P<box>.+?) in the (?P<room>.+?)\.")
LIFE_TASK = re.compile(r"find the animal with the (?P<which>longest|shortest) life span\.")


class Player(Protocol):
    def start(self, look: str, instruction: str) -> None: ...

    def saw(self, action: str, answer: str, look: str) -> None:
        """`action` was played; the simulator said `answer`; `look` describes the room now."""

    def next(self) -> str | None:
        """The next action, None when there is no way on."""


class _Traveller:
    """Knows where it is and moves by `go to` (walk) or `teleport to`."""

    def __init__(self, choice: int, teleport: bool):
        self.choice = choice
        self.teleport = teleport

    def start(self, look: str, instruction: str) -> None:
        self.instruction = instruction
        self.room: Room | None = parse_room(look)
        self.last = ""

    def saw(self, action: str, answer: str, look: str) -> None:
        # After a question of the simulator ("Ambiguous request") it takes no other action: that one may be said again.
        self.last = "" if answer.startswith(UNKNOWN) else action
        self.room = parse_room(look) or self.room

    def travel(self, goal: str) -> str | None:
        here = self.room.name if self.room else ""
        if self.teleport:
            return f"teleport to {goal}"
        queue, reached = [(room, room) for room in HOUSE.get(here, ())], {here}
        while queue:
            room, first = queue.pop(0)
            if room == goal:
                return f"go to {first}"
            if room not in reached:
                reached.add(room)
                queue += [(other, first) for other in HOUSE.get(room, ())]
        return None

    def pick(self, candidates: list[str]) -> str | None:
        return candidates[self.choice] if self.choice < len(candidates) else None

    def fresh(self, action: str | None) -> str | None:
        """The same action twice in a row means that it did not help."""
        return None if action == self.last else action


class FindPlayer(_Traveller):
    """find-…: focus on the thing, carry it to the box. Candidates have the names and the order of the room text."""

    def start(self, look: str, instruction: str) -> None:
        super().start(look, instruction)
        task = FIND_TASK.search(instruction)
        self.kind, self.box, self.goal = (task["kind"], task["box"], task["room"]) if task else ("", "", "")
        self.source = {"plant": "greenhouse", "animal": "outside", "living thing": "outside"}.get(self.kind, self.goal)
        self.thing = self.carrier = ""
        self.holding = False

    def saw(self, action: str, answer: str, look: str) -> None:
        if action.startswith("focus on ") and answer.startswith("You focus on "):
            self.thing = action.removeprefix("focus on ")
            pots = [pot for pot, inside in self._pots() if inside == self.thing]
            self.carrier = pots[0] if pots else self.thing
            self.source, self.holding = (self.room.name if self.room else self.source), False
        if self.carrier and action == f"pick up {self.carrier}" and "to the inventory" in answer:
            self.holding = True
        super().saw(action, answer, look)

    def next(self) -> str | None:
        if self.room is None or not self.goal:
            return None
        here = self.room.name
        if not self.thing:
            if here != self.source:
                return self.fresh(self.travel(self.source))
            thing = self.pick(self.candidates())
            return self.fresh(f"focus on {thing}") if thing else None
        if self.source != self.goal and not self.holding:
            return self.fresh(f"pick up {self.carrier}" if here == self.source else self.travel(self.source))
        if here != self.goal:
            return self.fresh(self.travel(self.goal))
        return self.fresh(f"move {self.carrier} to {self.box}")

    def candidates(self) -> list[str]:
        if self.kind == "plant":
            return list(dict.fromkeys(inside for _, inside in self._pots()))
        names = [name for name, _ in self.room.things]
        if self.kind in ("animal", "living thing"):
            return [name for name in names if ANIMAL.search(name)]
        return [name for name in names if name != self.box and name not in FIXTURES and not ANIMAL.search(name)]

    def _pots(self) -> list[tuple[str, str]]:
        found = [POT.match(words) for _, words in self.room.things] if self.room else []
        return [(match[1], match[2]) for match in found if match]


class LifeSpanPlayer(_Traveller):
    """lifespan-…: go outside and focus on the animal that lives longest, or shortest."""

    def next(self) -> str | None:
        if self.room is None:
            return None
        if self.room.name != "outside":
            return self.fresh(self.travel("outside"))
        lives = LIVES[LIFE_TASK.search(self.instruction)["which"]]
        animals = [name for name, _ in self.room.things if ANIMAL.search(name)]
        known = [name for name in animals if re.sub(r"^baby |^adult | egg$", "", name) in lives]
        animal = self.pick([*known, *(name for name in animals if name not in known)])
        return self.fresh(f"focus on {animal}") if animal else None


class PathPlayer:
    """Plays a fixed list of actions; has no way on once something else was played."""

    def __init__(self, path: list[str]):
        self.path = path

    def start(self, look: str, instruction: str) -> None:
        self._at: int | None = 0

    def saw(self, action: str, answer: str, look: str) -> None:
        on_path = self._at is not None and self._at < len(self.path) and self.path[self._at] == action
        self._at = self._at + 1 if on_path else None

    def next(self) -> str | None:
        return self.path[self._at] if self._at is not None and self._at < len(self.path) else None


def scripted_player(instruction: str, choice: int, teleport: bool) -> Player | None:
    """The scripted player for a task's words, None where there is none."""
    if FIND_TASK.search(instruction):
        return FindPlayer(choice, teleport)
    if LIFE_TASK.search(instruction):
        return LifeSpanPlayer(choice, teleport)
    return None


def clean_path(gold: list[str], wins: Callable[[Player], bool]) -> list[str] | None:
    """The gold path without openings of open doors and looking around, if that still wins; None where no form wins."""
    for drop in (re.compile(r"^(open door to |look around$)"), re.compile(r"^look around$"), re.compile(r"^$")):
        path = [action for action in gold if not drop.match(action)]
        if wins(PathPlayer(path)):
            return path
    return None
