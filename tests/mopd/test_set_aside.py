"""An unfinished run of another configuration makes way, whenever that is killed."""

import json
import os
from pathlib import Path

import pytest

from mopd.learner.checkpoint import FINISHED
from mopd.set_aside import set_aside

MINE, OTHER = "checkpoints/mine", "checkpoints/other"


def student(place: Path, *owners: str) -> Path:
    folder = place / "seed-1"
    for owner in owners:
        (folder / owner / "step-4").mkdir(parents=True)
        (folder / owner / "step-4" / "state.json").write_text("{}")
    (folder / "model").mkdir()
    for name in (".lock", "metrics.jsonl", "model/config.json"):
        (folder / name).write_text(name)
    (folder / "config.json").write_text(json.dumps({"train": {"steps": 9, "objective": "jsd"}, "seed": 1}))
    return folder


def begin(folder: Path) -> str:
    return set_aside(folder, folder / MINE, {"train": {"steps": 7, "objective": "jsd"}, "seed": 1})


def test_it_lies_beside_with_all_that_it_wrote(tmp_path):
    folder = student(tmp_path, OTHER)
    said = begin(folder)
    aside = tmp_path / ".seed-1.set-aside"
    assert "4 steps" in said and "(train.steps was 9 and is 7)" in said and str(aside) in said
    assert sorted(os.listdir(folder)) == [".lock", "model"]
    assert sorted(os.listdir(aside)) == ["checkpoints", "config.json", "metrics.jsonl"]
    assert (aside / OTHER / "step-4" / "state.json").exists() and begin(folder) == ""


def test_nothing_is_moved_where_this_run_goes_on_or_the_other_is_over(tmp_path):
    both = student(tmp_path / "both", OTHER, MINE)
    over = student(tmp_path / "over", OTHER)
    (over / OTHER / FINISHED).touch()
    for folder in (both, over):
        before = sorted(folder.rglob("*"))
        assert begin(folder) == "" and sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("moves", range(4))
def test_killed_in_between_the_next_start_does_the_rest(tmp_path, monkeypatch, moves):
    (earlier := tmp_path / ".seed-1.set-aside").mkdir()
    (earlier / "old").touch()
    folder, rename, left = student(tmp_path, OTHER), Path.rename, [moves]

    def killed(self, target):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            begin(folder)
    begin(folder)
    assert sorted(os.listdir(tmp_path / ".seed-1.set-aside")) == ["checkpoints", "config.json", "metrics.jsonl"]
    assert not (tmp_path / ".seed-1.setting-aside").exists() and not (folder / "checkpoints").exists()
