"""The text views: what they keep and what they drop."""

from __future__ import annotations

import numpy as np

from mopd.environments import scienceworld_view, textworld_express_view
from mopd.environments.babyai import describe_view

KITCHEN = """This room is called the kitchen. In it, you see:
\tthe agent
\ta substance called air
\ta chair. On the chair is: nothing.
\ta counter. On the counter is: a bowl (containing a red apple, a banana), a drawer.
\ta cupboard. The cupboard door is closed.
\ta glass jar (containing a substance called sodium chloride)
\ta oven, which is turned on. The oven door is closed.
\ta red box (containing nothing)
\ta sink, which is turned off. In the sink is: nothing.
\ta table. On the table is: a glass cup (containing nothing), a switch, which is on.
\ta thermometer, currently reading a temperature of 10 degrees celsius
You also see:
\tA door to the bathroom (that is open)
\tA door to the hallway (that is closed)
"""


def test_scienceworld_room():
    assert scienceworld_view.compact(KITCHEN) == (
        "kitchen: chair, counter (bowl (red apple, banana), drawer), cupboard (closed), glass jar (sodium chloride), "
        "oven (on; closed), red box, sink, table (glass cup, switch (on)), thermometer (10 degrees). "
        "exits: bathroom, hallway (closed)."
    )
    room = scienceworld_view.parse_room(KITCHEN)
    assert room.name == "kitchen" and room.things[0][0] == "chair" and "red box" in [name for name, _ in room.things]


def test_scienceworld_plants_and_other_texts():
    outside = (
        "This outside location is called the outside. Here you see: \n\tthe agent\n\ta flower pot 3 (containing a pea "
        "plant in the adult stage with a tall height, soil)\n\ta blue jay egg\n"
    )
    assert scienceworld_view.compact(outside) == "outside: flower pot 3 (pea plant, soil), blue jay egg."
    assert scienceworld_view.compact("You move the dove to the inventory.") == "You move the dove to the inventory."
    assert scienceworld_view.compact("In your inventory, you see:\n\ta blue jay egg\n\tan orange\n") == (
        "In your inventory, you see: blue jay egg, orange"
    )
    question = (
        "Ambiguous request: Please enter the number for the action you intended (or blank to cancel):\n"
        "0:\tfocus on wood cup (in art studio)\n1:\tfocus on wood cup (in kitchen)\n"
    )
    assert scienceworld_view.compact(question) == (
        "which one? answer with its number. 0: focus on wood cup (in art studio); 1: focus on wood cup (in kitchen)."
    )
    assert scienceworld_view.parse_room("You open the door.") is None


def test_scienceworld_instruction():
    text = "Your task is to find a(n) animal. First, focus on the thing. Then, move it to the red box in the kitchen."
    assert scienceworld_view.compact_instruction(text) == (
        "find an animal, focus on it, move it to the red box in the kitchen."
    )
    assert scienceworld_view.compact_instruction("Your task is to boil  water.") == "boil water."


COIN = (
    "You are in the kitchen. In one part of the room you see a stove. There is also an oven. You also see a fridge "
    "that is closed. In another part of the room you see a counter, that has nothing on it. There is also a shelf "
    "that has a coin on it. \nTo the North you see the pantry. To the West you see a closed wood door. "
    "Through an open screen door, to the East you see the backyard. "
)


def test_textworld_express_scenery_goes_only_where_no_action_names_it():
    view = textworld_express_view
    short = view.compact(COIN, "coin", {"take coin", "move north"})
    assert (
        short == "kitchen: shelf (coin). exits: north pantry, west closed wood door, east backyard (open screen door)."
    )
    assert view.compact(COIN, "cookingworld", set()).startswith(
        "kitchen: stove, oven, closed fridge, counter, shelf (coin)."
    )
    assert "fridge" in view.compact(COIN, "coin", {"open fridge"})
    assert view.exits_of(COIN) == {"north": "pantry", "west": None, "east": "backyard"}


def test_textworld_express_map():
    text = (
        "The map reads:\n  The living room connects to the cupboard and chamber.\n"
        "  The chamber connects to the living room.\n"
    )
    assert textworld_express_view.map_of(text) == {"living room": ["cupboard", "chamber"], "chamber": ["living room"]}
    assert textworld_express_view.compact(text, "mapreader", set()) == (
        "map: living room: cupboard, chamber. chamber: living room."
    )
    assert textworld_express_view.compact("You take\n the coin. ", "coin", set()) == "You take the coin."


def test_babyai_view_names_what_is_in_front():
    from minigrid.core.constants import COLOR_TO_IDX, OBJECT_TO_IDX

    image = np.zeros((7, 7, 3), dtype=np.uint8)  # all unseen
    image[:, 3:, 0] = OBJECT_TO_IDX["empty"]
    image[2, 6] = (OBJECT_TO_IDX["wall"], COLOR_TO_IDX["grey"], 0)
    image[3, 5] = (OBJECT_TO_IDX["ball"], COLOR_TO_IDX["red"], 0)
    image[5, 4] = (OBJECT_TO_IDX["door"], COLOR_TO_IDX["blue"], 2)
    assert describe_view(image, None) == "ahead ball. left wall. red ball 1 ahead. locked blue door 2 ahead 2 right."
    assert describe_view(image, "grey key").endswith(" carrying grey key.")
