"""ScienceWorld tasks: a house full of objects, simulated in Java, many environments in one process.

Makes the simulator deterministic (see ScienceWorldFamily), shows a room when it is entered, and plays experts that name
things as the text shows them.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Sequence

from mopd.environments import scienceworld_view as view
from mopd.environments.base import SPLITS, EnvironmentFailure, Observation, Task
from mopd.environments.java import JavaMachine, JavaObject
from mopd.environments.scienceworld_experts import (
    HOUSE,
    PROVEN,
    UNKNOWN,
    PathPlayer,
    Player,
    clean_path,
    scripted_player,
)

ENTRY = "scienceworld.runtime.pythonapi.PythonInterface"
RANDOM = "scala.util.Random$.MODULE$"
COUNTER = "util.UniqueIdentifier$.MODULE$"
DEFAULT_TASKS = ("find-living-thing", "find-plant", "find-non-living-thing")
SPLIT_METHODS = {"train": "getVariationsTrain", "development": "getVariationsDev", "test": "getVariationsTest"}
EXPERT_TURNS = 80
CHOICES = 8


class ScienceWorldFamily:
    """Tasks by name, their variations split as the benchmark splits them.

    tasks           task names, such as find-living-thing; a split's tasks take them in turn
    simplification  the simulator's own simplifications, comma separated; "easy" opens all doors and allows teleporting
    compact         write texts in fewer words; see scienceworld_view for what is left out
    look_on_move    show the room when it is entered, which saves a `look around`
    expert          "teleport" or "walk" (scripted players, by how they move) or "gold" (the cleaned gold paths)
    processes       Java processes to spread environments over; one plays about a hundred steps a second
    timeout_s       seconds after which a call into Java counts as hung
    heap_mb         Java heap per process; a live environment takes tens of megabytes

    The simulator keeps one random generator and one counter of object numbers for all environments of a process, and
    iterates over sets of objects in the order of their memory identity. Here each environment gets its own random seed
    at every step and its own counter, calls are not interleaved, and the identity is made constant (-XX:hashCode=2):
    the same actions give the same texts, whatever else is played beside them.
    """

    def __init__(
        self,
        *,
        tasks: Sequence[str] = DEFAULT_TASKS,
        simplification: str = "easy",
        compact: bool = True,
        look_on_move: bool = True,
        expert: str = "teleport",
        processes: int = 1,
        timeout_s: float = 120.0, heap_mb: int = 3072,
    ):
        from scienceworld.constants import ID2TASK, JAR_PATH

        self.task_names = tuple(tasks)
        if not self.task_names:
            raise ValueError("scienceworld: `tasks` is empty; name at least one, for instance find-living-thing")
        for name in self.task_names:
            if name not in ID2TASK.values():
                raise ValueError(f"scienceworld: no task {name!r}; tasks are: {', '.join(sorted(ID2TASK.values()))}")
        if expert not in ("teleport", "walk", "gold"):
            raise ValueError(f"scienceworld: expert is {expert!r}; it must be teleport, walk or gold")
        if processes < 1:
            raise ValueError(f"scienceworld: processes is {processes}; it must be at least 1")
        self.name = "scienceworld"
        package = importlib.metadata.version("scienceworld")
        wording = f"view {view.VIEW_VERSION}" if compact else "plain view"
        self.version = f"scienceworld {package}, {simplification or 'full'}, {wording}" + (
            ", look" if look_on_move else ""
        )
        self.system_prompt = "Answer with one action."
        self.simplification, self.compact, self.look_on_move, self.expert = (
            simplification,
            compact,
            look_on_move,
            expert,
        )
        self._machines = [
            JavaMachine(
                self.name, JAR_PATH, timeout_s=timeout_s, heap_mb=heap_mb,
                options=("-XX:+UnlockExperimentalVMOptions", "-XX:hashCode=2"),
            )
            for _ in range(processes)
        ]
        self._turn = itertools.count()
        self._splits: dict[str, list[Task]] = {}
        # (task name, variation) → what wins there: a choice for the scripted player, or a path
        self.known_ways: dict[tuple[str, int], int | list[str] | None] = {}

    @property
    def java(self) -> JavaMachine:
        """The first Java process."""
        return self._machines[0]

    @property
    def java_starts(self) -> int:
        """How often a Java process was started, over all of them: starts beyond one of each follow an end."""
        return sum(machine.generation for machine in self._machines)

    def tasks(self, split: str) -> list[Task]:
        if split not in SPLITS:
            raise ValueError(f"unknown split {split!r}; splits are {', '.join(SPLITS)}")
        if not self._splits:
            self._read_splits()
        return list(self._splits[split])

    def create(self) -> ScienceWorldEnvironment:
        return ScienceWorldEnvironment(self, self._machines[next(self._turn) % len(self._machines)])

    def close(self) -> None:
        for machine in self._machines:
            machine.close()

    def _read_splits(self) -> None:
        with self.java.lock:
            interface = self.java.new(ENTRY)
            possible = ["easy", *interface.call("getPossibleSimplifications").split(", ")]
            for part in filter(None, self.simplification.split(",")):
                if part not in possible:
                    raise ValueError(f"scienceworld: no simplification {part!r}; there are: {', '.join(possible)}")
            variations: dict[str, dict[str, list[int]]] = {split: {} for split in SPLITS}
            for name in self.task_names:
                message = interface.call("load", name, 0, self.simplification, False)
                if message:
                    raise EnvironmentFailure("load_failed", f"scienceworld {name}: {message}")
                for split, method in SPLIT_METHODS.items():
                    variations[split][name] = [int(v) for v in interface.call(method)]
        for split, by_name in variations.items():
            rows = itertools.zip_longest(*by_name.values())
            self._splits[split] = [
                Task(name, variation, split)
                for row in rows
                for name, variation in zip(by_name, row, strict=True)
                if variation is not None
            ]


class ScienceWorldEnvironment:
    """One task at a time. An action that the simulator does not know is `malformed`."""

    def __init__(self, family: ScienceWorldFamily, machine: JavaMachine):
        self._family = family
        self._machine = machine
        self._interface: JavaObject | None = None
        self._random: JavaObject | None = None
        self._counter: JavaObject | None = None
        self._objects = 0
        self._task: Task | None = None
        self._steps = 0
        self._instruction = ""
        self._look = ""
        self._score = 0.0
        self._completed = False
        self._player: Player | None = None

    def reset(self, task: Task, *, expert: bool = False) -> Observation:
        if task.name not in self._family.task_names:
            raise ValueError(
                f"scienceworld: task {task.name!r} is not among the configured ones: "
                f"{', '.join(self._family.task_names)}"
            )
        self._task = task
        self._player = None
        way = self._known_way(task) if expert else None
        self._load(task)
        if way is not None:
            self._player = self._make_player(way)
            self._player.start(self._look, self._instruction)
        return self._observe(self._look)

    def step(self, action: str) -> Observation:
        if self._interface is None or self._task is None:
            raise EnvironmentFailure("not_reset", "scienceworld: step before reset")
        room = view.parse_room(self._look)
        answer = self._play(action)
        if self._player is not None:
            self._player.saw(action.strip(), answer, self._look)
        entered = view.parse_room(self._look)
        moved = entered is not None and (room is None or room.name != entered.name)
        malformed = answer.startswith(UNKNOWN)
        if malformed:
            text = "unknown action." if self._family.compact else answer
        elif moved and self._family.look_on_move:
            text = self._look if self._family.compact else f"{answer}\n{self._look}"
        else:
            text = answer
        return self._observe(text, malformed=malformed)

    def expert_action(self) -> str | None:
        return None if self._player is None else self._player.next()

    def possible_actions(self) -> tuple[str, ...]:
        """Actions that the visible text suggests (the simulator's own list has a thousand entries): moving, looking,
        and focusing on or picking up what is in sight. Not all of them are accepted."""
        room = view.parse_room(self._look)
        things = [name for name, _ in room.things] if room else []
        here = room.name if room else ""
        moves = (
            [f"teleport to {name}" for name in HOUSE if name != here]
            if self._family.expert == "teleport"
            else [f"go to {name}" for name in HOUSE.get(here, ())]
        )
        return (
            "look around",
            "inventory",
            *moves,
            *(f"focus on {t}" for t in things),
            *(f"pick up {t}" for t in things),
        )

    def close(self) -> None:
        self._interface = self._random = self._counter = self._player = self._task = None

    def _load(self, task: Task, *, gold: bool = False) -> list[str]:
        """Load a task from its beginning; returns the gold path where asked for."""
        with self._machine.lock:
            if self._interface is None or not self._interface.alive:
                self._interface = self._machine.new(ENTRY)
                self._random, self._counter = self._machine.static(RANDOM), self._machine.static(COUNTER)
            message = self._interface.call("load", task.name, task.seed, self._family.simplification, gold)
            if message:
                raise EnvironmentFailure("load_failed", f"scienceworld {task.name} {task.seed}: {message}")
            path = [str(action) for action in self._interface.call("getGoldActionSequence")] if gold else []
            self._instruction = self._interface.call("getTaskDescription").strip()
            self._look = self._interface.call("freeActionLook")
            self._objects = self._counter.call("count")
        self._steps, self._score, self._completed = 0, 0.0, False
        return path

    def _play(self, action: str) -> str:
        with self._machine.lock:
            self._random.call("setSeed", self._task.seed * 1009 + self._steps)
            self._counter.call("count_$eq", self._objects)
            answer = self._interface.call("step", action.strip())
            self._score = self._interface.call("getScore")
            self._completed = self._interface.call("getCompleted")
            self._look = self._interface.call("freeActionLook")
            self._objects = self._counter.call("count")
        self._steps += 1
        return answer.strip()

    def _observe(self, text: str, *, malformed: bool = False) -> Observation:
        text = view.compact(text) if self._family.compact else text.strip()
        instruction = view.compact_instruction(self._instruction) if self._family.compact else self._instruction
        success = self._score >= 1.0
        # A wrong focus makes the score negative: the task can no longer be done.
        done = success or self._completed or self._score < 0
        return Observation(text, instruction, min(1.0, max(0.0, self._score)), done, success, None, malformed)

    def _known_way(self, task: Task) -> int | list[str] | None:
        """What wins this task: a scripted player's choice or a path; found once by trying, then remembered."""
        key = (task.name, task.seed)
        if key not in self._family.known_ways:
            proven = self._family.expert != "gold" and task.name in PROVEN
            self._family.known_ways[key] = 0 if proven else self._find_way(task)
        return self._family.known_ways[key]

    def _make_player(self, way: int | list[str]) -> Player | None:
        if isinstance(way, list):
            return PathPlayer(way)
        return scripted_player(self._instruction, way, self._family.expert == "teleport")

    def _find_way(self, task: Task) -> int | list[str] | None:
        self._load(task)
        if self._family.expert != "gold":
            for choice in range(CHOICES):
                player = self._make_player(choice)
                if player is None:
                    break
                if self._wins(task, player):
                    return choice
        return clean_path(self._load(task, gold=True), lambda player: self._wins(task, player))

    def _wins(self, task: Task, player: Player) -> bool:
        self._load(task)
        player.start(self._look, self._instruction)
        for _ in range(EXPERT_TURNS):
            action = player.next()
            if action is None:
                return False
            answer = self._play(action)
            player.saw(action, answer, self._look)
            if self._score >= 1.0:
                return True
            if self._completed or self._score < 0:
                return False
        return False
