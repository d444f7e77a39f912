"""An unfinished run whose configuration is not that of the run that begins in its folder: moved aside, not thrown away."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from mopd.learner.checkpoint import FINISHED, checkpoints

STAYS = (".lock", "model")  # of who works here now; of a run that was finished before
NAMED = 5


def set_aside(folder: Path, own: Path, config: dict[str, Any]) -> str:
    """Move what an unfinished run of another configuration left in a student's folder to a hidden folder beside it, whose
    earlier content goes; returns what was done, in words, or "" where there is no such run. Killed at any point, the next
    call does the rest.

    own      where the checkpoints of the run that begins are: it is gone on from where there are some, and all stays
    config   its configuration as JSON values, to say which keys differ
    """
    place = folder / "checkpoints"
    aside, half = (folder.with_name(f".{folder.name}.{name}") for name in ("set-aside", "setting-aside"))
    if (half / place.name).exists():  # killed before it had its name
        shutil.rmtree(aside, ignore_errors=True)
        half.rename(aside)
    others = [path for path in place.glob("[!.]*") if path != own and not (path / FINISHED).exists() and checkpoints(path)]
    if not others or checkpoints(own):
        return ""
    steps = max(step for path in others for step, _ in checkpoints(path))
    half.mkdir(exist_ok=True)
    # The checkpoints last: as long as they are here, this is done again.
    found = sorted((path for path in folder.iterdir() if path.name not in STAYS and path != place), key=str)
    differ = _differences(half if (half / "config.json").is_file() else folder, config)
    for path in [*found, place]:
        path.rename(half / path.name)
    earlier = "What lay there before is removed. " if aside.exists() else ""
    shutil.rmtree(aside, ignore_errors=True)
    half.rename(aside)
    return (f"{folder} held an unfinished run of another configuration, {steps} steps of it in a checkpoint{differ}. It lies "
            f"in {aside} now, until another takes its place, and this run starts anew. {earlier}To go on with it, end this "
            f"one, `mv {folder} {folder.with_name('.' + folder.name + '.other')} && mv {aside} {folder}`, and give its "
            "configuration")


def _differences(folder: Path, config: dict[str, Any]) -> str:
    try:
        before = _flat(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError):
        return ""
    now = _flat(json.loads(json.dumps(config)))
    keys = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
    said = [f"{key} was {json.dumps(before.get(key))} and is {json.dumps(now.get(key))}" for key in keys[:NAMED]]
    return f" ({'; '.join(said)}{'; …' if len(keys) > NAMED else ''})" if said else ""


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict) or not values:
        return {name: values}
    return {key: value for part, inner in values.items()
            for key, value in _flat(inner, f"{name}.{part}" if name else str(part)).items()}
