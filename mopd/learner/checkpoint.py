"""Checkpoints that are there whole or not at all: written aside, published by one rename, the last few kept.

A checkpoint folder `step-N` holds DeepSpeed's engine state (weights, optimizer) and the caller's JSON state. DeepSpeed
writes its part in its own format; nothing but this module's own runs should be loaded from such a folder. Weights for
others leave through `mopd.learner.model.save_model`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from mopd.learner.engine import Learner
from mopd.learner.model import publish, writing

STATE = "state.json"
TAG = "engine"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be used; the message names the folder and the reason."""


def checkpoints(folder: str | Path) -> list[tuple[int, Path]]:
    """Complete checkpoints (step, path) in `folder`, oldest first. Half-written ones have another name."""
    found = []
    for path in Path(folder).glob("step-*"):
        number = path.name.removeprefix("step-")
        if number.isdigit() and (path / STATE).is_file():
            found.append((int(number), path))
    return sorted(found)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of `folder`, or None."""
    found = checkpoints(folder)
    return found[-1][1] if found else None


def own_folder(folder: str | Path, identity: Any, *, resume: bool = True) -> Path:
    """Where in `folder` the checkpoints of the run with this `identity` are: everything that its result depends on, as
    JSON values. Checkpoints of any other run are removed (going on from them would be neither run), and said to be; so
    are this run's own without `resume`."""
    folder = Path(folder)
    own = folder / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    for path in folder.iterdir() if folder.is_dir() else ():
        if path != own or not resume:
            shutil.rmtree(path)
            if resume:
                print(f"{path} holds checkpoints of another configuration; they are removed and this run starts anew",
                      file=sys.stderr)
    return own


def save_checkpoint(learner: Learner, folder: str | Path, state: dict[str, Any], *, keep: int = 2) -> Path:
    """Save the learner after its current step together with `state` (JSON values); every rank must call it, and all
    ranks must see one file system. Older checkpoints beyond `keep` are removed after the new one is published."""
    learner.check_routers()
    folder = Path(folder)
    path = folder / f"step-{learner.step}"
    aside = folder / f".step-{learner.step}.writing"
    if learner.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for half in folder.glob(".step-*.writing"):
            shutil.rmtree(half)
        aside.mkdir()
    torch.distributed.barrier()
    with writing(aside):
        learner.engine.save_checkpoint(str(aside), tag=TAG, save_latest=False)
    torch.distributed.barrier()
    if learner.rank == 0:
        record = {"step": learner.step, "world_size": learner.world_size, "zero_stage": learner.config.zero_stage,
                  "dtype": learner.config.dtype, "router_hash": learner.router_hash, "caller": state}
        (aside / STATE).write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
        publish(aside, path)
        for _, old in checkpoints(folder)[:-keep]:
            shutil.rmtree(old)
    torch.distributed.barrier()
    return path


def read_state(path: str | Path) -> dict[str, Any]:
    """The caller's state of a checkpoint, without loading any weights."""
    return _record(Path(path))["caller"]


def load_checkpoint(learner: Learner, path: str | Path) -> dict[str, Any]:
    """Put a learner (made with the same config on the same number of ranks) where the checkpoint was; returns the
    caller's state. Raises CheckpointError where the folder is incomplete or was written by another layout."""
    path = Path(path)
    record = _record(path)
    for key, here in (("world_size", learner.world_size), ("zero_stage", learner.config.zero_stage),
                      ("dtype", learner.config.dtype)):
        if record[key] != here:
            raise CheckpointError(f"{path} was written with {key} {record[key]}, this run has {here}; "
                                  f"resume with {key} {record[key]} or start from an exported model folder")
    loaded, _ = learner.engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)
    if loaded is None:
        raise CheckpointError(f"DeepSpeed could not load its state from {path}")
    learner.step = int(record["step"])
    if record["router_hash"]:
        learner.router_hash = record["router_hash"]
        learner.check_routers()
    return record["caller"]


def _record(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({error}); "
                              "take another step-N folder or start anew") from error


class Checkpoints:
    """The checkpoints of one run in one folder, the last `keep` of them."""

    def __init__(self, folder: str | Path, *, keep: int = 2):
        if keep < 1:
            raise ValueError(f"keep must be at least 1, got {keep}")
        self.folder, self.keep = Path(folder), keep

    def save(self, learner: Learner, step: int, state: dict[str, Any]) -> Path:
        """Save after `step` steps; raises ValueError where the learner has made another number of them."""
        if step != learner.step:
            raise ValueError(f"checkpoint for step {step}, but the learner has made {learner.step} steps")
        return save_checkpoint(learner, self.folder, state, keep=self.keep)

    def load(self, learner: Learner) -> tuple[int, dict[str, Any]] | None:
        """Go on from the newest complete checkpoint: (steps made, caller's state), or None where there is none."""
        found = latest(self.folder)
        if found is None:
            return None
        state = load_checkpoint(learner, found)
        return learner.step, state
