"""Every built-in family, played for real: equal starts, disjoint splits, experts that win, malformed actions."""

from __future__ import annotations

import threading

import pytest

from mopd.environments.base import SPLITS, Environment, EnvironmentFailure, EnvironmentFamily, Task
from mopd.environments.registry import make_family


def play(environment, task, actions=None):
    """All observations of an episode played by the expert, or by given actions; and the actions."""
    observation = environment.reset(task, expert=actions is None)
    seen, played = [observation], []
    while not observation.done and (actions is None or len(played) < len(actions)):
        action = environment.expert_action() if actions is None else actions[len(played)]
        assert action is not None, f"expert has no way on in {task} after {played}"
        observation = environment.step(action)
        seen.append(observation)
        played.append(action)
    return seen, played


def test_is_a_family(family):
    assert isinstance(family, EnvironmentFamily)
    assert isinstance(family.create(), Environment)
    assert family.version and 0 < len(family.system_prompt) < 120


def test_splits_are_disjoint_and_stable(family):
    splits = {split: family.tasks(split) for split in SPLITS}
    for split, tasks in splits.items():
        assert tasks and tasks == family.tasks(split)
        assert all(task.split == split for task in tasks)
        assert len(set(tasks)) == len(tasks)
    pairs = [{(task.name, task.seed) for task in tasks} for tasks in splits.values()]
    assert not pairs[0] & pairs[1] and not pairs[0] & pairs[2] and not pairs[1] & pairs[2]
    with pytest.raises(ValueError, match="train, development, test"):
        family.tasks("validation")


def test_same_task_same_episode(family):
    """Another environment replays the same actions to the same texts and scores."""
    for task in family.tasks("train")[:3]:
        first, actions = play(family.create(), task)
        again, _ = play(family.create(), task, actions)
        assert [(o.text, o.score, o.done) for o in first] == [(o.text, o.score, o.done) for o in again]


def test_different_tasks_differ(family):
    environment = family.create()
    assert len({(o.text, o.instruction) for o in map(environment.reset, family.tasks("train")[:8])}) >= 5


def test_expert_wins(family):
    environment = family.create()
    for task in family.tasks("test")[:6]:
        seen, actions = play(environment, task)
        assert seen[-1].success and seen[-1].done and seen[-1].score == 1.0, (task, actions)
        assert seen[0].instruction and not seen[0].done and all(o.text for o in seen)
        assert all(0.0 <= o.score <= 1.0 for o in seen)


def test_malformed_action_counts_and_changes_nothing(family):
    environment = family.create()
    task = family.tasks("train")[0]
    observation = environment.reset(task, expert=True)
    odd = environment.step("dance the tango")
    assert odd.malformed and not odd.done and odd.score == observation.score
    assert odd.text.startswith("unknown action.")
    assert environment.step("").malformed
    after, _ = play(environment, task)
    assert after[-1].success


def test_interleaved_threads_replay_identically(family):
    """Episodes played at once in one process equal episodes played one after the other."""
    tasks = family.tasks("train")[:4]
    alone = [play(family.create(), task) for task in tasks]
    together = [None] * len(tasks)

    def run(index):
        together[index] = play(family.create(), tasks[index], alone[index][1])[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (seen, _), other in zip(alone, together, strict=True):
        assert [(o.text, o.score) for o in seen] == [(o.text, o.score) for o in other]


def test_step_before_reset_is_a_failure(family):
    with pytest.raises(EnvironmentFailure, match="not_reset"):
        family.create().step("look around")


def test_foreign_task_is_refused(family):
    with pytest.raises(Exception, match="no-such-task"):
        family.create().reset(Task("no-such-task", 0, "train"))


GAMES = {
    "coin": "numLocations=4,includeDoors=1,numDistractorItems=3",
    "peckingorder": "",
    "mapreader": "numLocations=4,maxDistanceApart=2,maxDistractorItemsPerLocation=1,includeDoors=0",
    "cookingworld": "numLocations=2,numIngredients=1,numDistractorItems=2,includeDoors=0,limitInventorySize=0",
    "twc": "numLocations=1,numItemsToPutAway=2,includeDoors=0,limitInventorySize=0",
    "simonsays": "",
}


def test_other_games_are_won_and_the_compact_view_hides_nothing_that_can_be_acted_on():
    family = make_family("textworld_express", {"games": GAMES})
    plain = make_family("textworld_express", {"games": GAMES, "compact": False, "expert": "gold"})
    try:
        environment, other = family.create(), plain.create()
        for task in family.tasks("development")[: 3 * len(GAMES)]:
            seen, _ = play(environment, task)
            assert seen[-1].success, task
            first = seen[0]
            for action in first.admissible:
                if task.name != "simonsays" and action.startswith(("take ", "open ")) and "door" not in action:
                    assert action.split(" ", 1)[1] in first.text, (task, action, first.text)
            gold, _ = play(other, task)
            assert gold[-1].success and len(gold[0].text) >= len(first.text), task
    finally:
        family.close()
        plain.close()


def test_science_experts_name_things_as_the_text_does(families):
    family = families["scienceworld"]
    environment = family.create()
    for task in family.tasks("development")[:6]:
        seen, actions = play(environment, task)
        for index, action in enumerate(actions):
            if action.startswith("focus on "):
                assert action.removeprefix("focus on ") in seen[index].text


@pytest.mark.parametrize(("expert", "name"), [("walk", "find-plant"), ("gold", "find-animal")])
def test_other_science_experts(families, expert, name):
    family = make_family("scienceworld", {"tasks": [name], "expert": expert})
    family._machines = families["scienceworld"]._machines  # the process is running already
    seen, actions = play(family.create(), family.tasks("train")[0])
    assert seen[-1].success and not any(action.startswith(("teleport", "open door")) for action in actions)


def test_babyai_levels_with_other_goals():
    levels = ["BabyAI-PickupDist-v0", "BabyAI-OpenDoorColor-v0", "BabyAI-PutNextLocalS5N3-v0"]
    family = make_family("babyai", {"levels": levels, "sizes": {"train": 6}})
    environment = family.create()
    played = [play(environment, task)[1] for task in family.tasks("train")]
    assert any("pick up" in actions for actions in played) and any("toggle" in actions for actions in played)


def test_level_generation_prints_nothing(families, capsys):
    environment = families["babyai"].create()
    for task in families["babyai"].tasks("train")[:40]:
        environment.reset(task)
    assert capsys.readouterr().out == ""
