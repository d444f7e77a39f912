"""TextWorld-Express games: short text worlds with gold paths, many of them in one Java process.

Knows the games' wording (a compact view can be asked for) and plays a scripted expert where the gold path is hard to
predict from what a player has seen.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from typing import Any

from mopd.environments import textworld_express_view as view
from mopd.environments.base import SPLITS, EnvironmentFailure, Observation, Task
from mopd.environments.java import JavaMachine, JavaObject
from mopd.environments.textworld_express_experts import PLAYERS, Player, clean_path

FOLDS = {"train": "train", "development": "dev", "test": "test"}
FOLD_SEEDS = {"train": range(0, 1000), "development": range(10_000, 11_000), "test": range(20_000, 21_000)}
DEFAULT_GAMES = {
    "coin": "numLocations=6,includeDoors=0,numDistractorItems=2",
    "mapreader": "numLocations=4,maxDistanceApart=2,maxDistractorItemsPerLocation=0,includeDoors=0",
    "peckingorder": "",
}
ENTRY = "textworldexpress.runtime.PythonInterface"
EXPERT_TURNS = 60


class TextWorldExpressFamily:
    """Games by name.

    games      game name → the game's own parameter string; a split's tasks take the games in turn
    compact    write views in fewer words; see textworld_express_view for what is left out
    expert     "scripted" (a player that uses only what it saw, where one exists for the game) or "gold"
    timeout_s  seconds after which a call into Java counts as hung
    """

    def __init__(
        self,
        *,
        games: Mapping[str, str] | None = None,
        compact: bool = True,
        expert: str = "scripted",
        timeout_s: float = 60.0,
    ):
        from textworld_express.constants import JAR_PATH

        self.games = dict(DEFAULT_GAMES if games is None else games)
        if not self.games:
            raise ValueError("textworld_express: `games` is empty; name at least one, for instance coin")
        if expert not in ("scripted", "gold"):
            raise ValueError(f"textworld_express: expert is {expert!r}; it must be scripted or gold")
        self.name = "textworld_express"
        package = importlib.metadata.version("textworld-express")
        self.version = f"textworld-express {package}, " + (f"view {view.VIEW_VERSION}" if compact else "plain view")
        self.system_prompt = "Answer with one action."
        self.compact = compact
        self.expert = expert
        self.java = JavaMachine(self.name, JAR_PATH, timeout_s=timeout_s, heap_mb=512)
        self._checked = False

    @property
    def java_starts(self) -> int:
        """How often a Java process was started: more than one was ended, or ended by itself."""
        return self.java.generation

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; splits are {', '.join(SPLITS)}")
        return [Task(game, seed, split) for seed in FOLD_SEEDS[split] for game in self.games]

    def create(self) -> TextWorldExpressEnvironment:
        if not self._checked:
            self._check_games()
        return TextWorldExpressEnvironment(self)

    def close(self) -> None:
        self.java.close()

    def _check_games(self) -> None:
        interface = self.java.new(ENTRY)
        known = [str(name) for name in interface.call("getGameNames")]
        for game, parameters in self.games.items():
            message = interface.call("load", game, parameters)
            if not message:
                # Of some errors `load` says nothing: an unknown game, parameters that are no list of name=value.
                state = json.loads(interface.call("generateNewGameJSON", FOLD_SEEDS["train"][0], FOLDS["train"], False))
                text = state.get("observation", str(state))
                message = text if _failed(text) else "" if game in known else "no such game"
            if message:
                raise ValueError(
                    f"textworld_express: game {game!r} with parameters {parameters!r}: {message.strip()} "
                    f"(games: {', '.join(known)}; parameters: name=value, comma separated)"
                )
        self._checked = True


def _failed(observation: str | None) -> bool:
    """Whether the simulator gave no game: it says so in the place of the first observation."""
    return observation is None or observation.startswith("ERROR:")


class TextWorldExpressEnvironment:
    """One game at a time; an action that is not admissible is `malformed` and changes nothing."""

    def __init__(self, family: TextWorldExpressFamily):
        self._family = family
        self._interfaces: dict[str, JavaObject] = {}
        self._interface: JavaObject | None = None
        self._state: dict[str, Any] = {}
        self._task: Task | None = None
        self._instruction = ""
        self._admissible: frozenset[str] = frozenset()
        self._player: Player | None = None

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        if task.name not in self._family.games:
            raise ValueError(
                f"textworld_express: task names the game {task.name!r}, which is not among the configured "
                f"ones: {', '.join(self._family.games)}"
            )
        self._interface = self._interface_for(task.name)
        self._task, self._player = task, None
        if expert:
            self._player = self._find_player(task)
        state = self._start(task)
        if self._player is not None:
            self._player.start(state, self._instruction)
        return self._observe(state)

    def step(self, action: str) -> Observation:
        if self._interface is None or self._task is None:
            raise EnvironmentFailure("not_reset", "textworld_express: step before reset")
        action = action.strip()
        if action not in self._admissible:
            # The simulator answers the same way; asking it would only cost a call.
            return self._observe(self._state, malformed=True)
        state = self._play(action)
        if self._player is not None:
            self._player.saw(action, state)
        return self._observe(state)

    def expert_action(self) -> str | None:
        if self._player is None:
            return None
        action = self._player.next()
        return action if action in self._admissible else None

    def close(self) -> None:
        self._interfaces.clear()
        self._interface = self._player = self._task = None

    def _interface_for(self, game: str) -> JavaObject:
        """The simulator with a game loaded, which costs more than a new start of the game: one is kept for each."""
        interface = self._interfaces.get(game)
        if interface is None or not interface.alive:
            interface = self._family.java.new(ENTRY)
            message = interface.call("load", game, self._family.games[game])
            if message:
                raise EnvironmentFailure("load_failed", f"textworld_express {game}: {message}")
            self._interfaces[game] = interface
        return interface

    def _start(self, task: Task, gold: bool = False) -> dict[str, Any]:
        state = json.loads(self._interface.call("generateNewGameJSON", task.seed, FOLDS[task.split], gold))
        if _failed(state.get("observation")):
            raise EnvironmentFailure("load_failed", f"textworld_express {task.name} seed {task.seed}: {state}")
        self._instruction = self._interface.call("getTaskDescription").strip()
        return self._keep(state)

    def _play(self, action: str) -> dict[str, Any]:
        return self._keep(json.loads(self._interface.call("stepJSON", action)))

    def _keep(self, state: dict[str, Any]) -> dict[str, Any]:
        self._state = state
        self._admissible = frozenset(state["validActions"])
        return state

    def _observe(self, state: dict[str, Any], *, malformed: bool = False) -> Observation:
        text, instruction = state["observation"], self._instruction
        if self._family.compact:
            text = view.compact(text, self._task.name, self._admissible)
            instruction = view.compact_instruction(instruction, self._task.name)
        else:
            text = text.strip()
        if malformed:
            text = "unknown action."
        success = bool(state["tasksuccess"]) or state["score"] >= 1.0
        done = success or bool(state["taskfailure"])
        score = min(1.0, max(0.0, float(state["score"])))
        return Observation(text, instruction, score, done, success, tuple(sorted(self._admissible)), malformed)

    def _find_player(self, task: Task) -> Player | None:
        """An expert that is known to win this task: it is tried before it is handed out."""
        if self._family.expert == "scripted" and task.name in PLAYERS:
            player = PLAYERS[task.name]()
            if self._wins(task, player):
                return PLAYERS[task.name]()
        self._start(task, gold=True)
        path = []
        for action in self._interface.call("getGoldActionSequence"):
            if action in self._admissible:  # gold paths hold a few actions that the game does not know
                path.append(str(action))
                self._play(action)
        return clean_path(path, lambda candidate: self._wins(task, candidate))

    def _wins(self, task: Task, player: Player) -> bool:
        state = self._start(task)
        player.start(state, self._instruction)
        for _ in range(EXPERT_TURNS):
            action = player.next()
            if action is None or action not in self._admissible:
                return False
            state = self._play(action)
            player.saw(action, state)
            if state["tasksuccess"] or state["score"] >= 1.0:
                return True
            if state["taskfailure"]:
                return False
        return False
