"""Names, dotted paths and options, and what is said when they are wrong."""

from __future__ import annotations

import sys
import textwrap

import pytest

from mopd.environments.base import EnvironmentFailure
from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import EnvironmentConfigError, make_family


def test_unknown_name_lists_what_exists():
    with pytest.raises(EnvironmentConfigError, match="textworld_express, scienceworld, babyai"):
        make_family("atari")


def test_unknown_option_lists_the_options():
    with pytest.raises(EnvironmentConfigError, match="'level'.*levels, sizes"):
        make_family("babyai", {"level": "x"})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("babyai", {"levels": ["BabyAI-Nowhere-v0"]}, "BabyAI-GoToLocal-v0"),
        ("babyai", {"sizes": {"validation": 3}}, "train, development, test"),
        ("scienceworld", {"tasks": ["find-dragon"]}, "find-living-thing"),
        ("scienceworld", {"expert": "fly"}, "teleport, walk or gold"),
        ("textworld_express", {"games": {}}, "`games` is empty"),
        ("textworld_express", {"expert": "best"}, "scripted or gold"),
        ("textworld_express", {"timeout_s": "soon"}, "timeout_s is 'soon'"),
        ("scienceworld", {"heap_mb": -1}, "heap_mb is -1"),
        ("textworld_express", {"games": 3}, "refuses its options"),
        ("babyai", {"sizes": {"train": "many"}}, "refuses its options"),
        ("babyai", {"levels": 3}, "refuses its options"),
    ],
)
def test_wrong_values_name_the_remedy(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_family(name, options)


@pytest.mark.parametrize(("game", "parameters", "message"), [
    ("coin", "numRooms=3", "numLocations"),
    ("coin", "many", "'coin' with parameters 'many'"),
    ("coin", "numLocations=abc", "'coin' with parameters 'numLocations=abc'"),
    ("gold", "", "game 'gold'.*peckingorder"),
])
def test_game_parameters_are_checked_by_the_simulator(families, game, parameters, message):
    """It says nothing of most of them, and then hands out its error message as if it were the first observation."""
    wrong = make_family("textworld_express", {"games": {"mapreader": "", game: parameters}})
    wrong.java.close()
    wrong.java = families["textworld_express"].java
    with pytest.raises(ValueError, match=message):
        wrong.create()


def test_a_game_that_could_not_be_loaded_is_a_failure_and_no_task(families):
    wrong = make_family("textworld_express", {"games": {"coin": "many"}})
    wrong.java, wrong._checked = families["textworld_express"].java, True
    with pytest.raises(EnvironmentFailure, match="not initialized"):
        wrong.create().reset(wrong.tasks("train")[0])


PACKAGE = '''
from mopd.environments.base import Observation, Task

class Guess:
    """Say the number that the task's seed is."""
    def reset(self, task, *, expert=False):
        self.task, self.expert = task, expert
        return Observation("say a number", f"say {task.seed}")
    def step(self, action):
        right = action == str(self.task.seed)
        return Observation("yes" if right else "no", "", float(right), right, right)
    def expert_action(self):
        return str(self.task.seed) if self.expert else None
    def close(self):
        pass

class Guesses:
    name, version, system_prompt = "guess", "1", "Answer with a number."
    def __init__(self, *, size=3):
        self.size = size
    def tasks(self, split):
        start = {"train": 0, "development": 100, "test": 200}[split]
        return [Task("guess", start + i, split) for i in range(self.size)]
    def create(self):
        return Guess()
    def close(self):
        pass

not_a_family = dict
'''


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    (tmp_path / "people_guess").mkdir()
    (tmp_path / "people_guess" / "__init__.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "people_guess"
    sys.modules.pop("people_guess", None)


@pytest.mark.parametrize("separator", [":", "."])
def test_family_from_another_package(own_package, separator):
    family = make_family(f"{own_package}{separator}Guesses", {"size": 2})
    task = family.tasks("test")[1]
    with EnvironmentPool(family, size=1) as pool:
        environment, observation = pool.acquire(task, expert=True)
        assert observation.instruction == "say 201"
        assert environment.step(environment.expert_action()).success


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("people_guess:Nothing", "has no 'Nothing'"),
        ("people_guess.inner:Guesses", "no module 'people_guess.inner'"),
        ("people_guess:not_a_family", "returned a dict"),
    ],
)
def test_wrong_dotted_paths(own_package, path, message):
    with pytest.raises(EnvironmentConfigError, match=message):
        make_family(path)
