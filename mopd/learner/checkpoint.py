"""Checkpoints that are there whole or not at all: written aside, published by one rename, the last few kept.

A checkpoint folder `step-N` holds DeepSpeed's engine state (weights, optimizer) and state.json: the caller's state, with
the size and SHA-256 of every file. Names that begin with a dot are never loaded: what a killed writer left, what is being
removed, what a rollback cut off. DeepSpeed writes its part in its own format; nothing but this module's own runs should be
loaded from such a folder. Weights for others leave through `mopd.export_model`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from mopd.learner.engine import Learner
from mopd.learner.model import publish, writing
from mopd.ranks import Ranks, digest

STATE = "state.json"
TAG = "engine"
DIGESTS = "digests-of-rank-"
FINISHED = ".finished"
# in a folder of checkpoints: its run is over, and only milestones are left
CUT = ".cut-"


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
    """The newest complete checkpoint of `folder`, or None. Its files may be damaged; see `sound`."""
    found = checkpoints(folder)
    return found[-1][1] if found else None


def damage(path: str | Path, rank: int = 0, size: int = 1) -> str:
    """What is wrong with a checkpoint, "" where nothing is: the presence and size of every file, and the SHA-256 of each
    `size`-th, so that `size` ranks read all of them between them. One that an earlier version wrote has no such list and
    counts as sound."""
    path = Path(path)
    try:
        record = _record(path)
    except CheckpointError as error:
        return str(error.__cause__)
    if "digest" in record and record.pop("digest") != digest(record):
        return f"{STATE} is not what was written"
    files = sorted(record.get("files", {}).items())
    for name, (length, _) in files:
        if not (path / name).is_file():
            return f"{name} is missing"
        if (found := (path / name).stat().st_size) != length:
            return f"{name} has {found} bytes instead of {length}"
    for name, (_, expected) in files[rank::size]:
        with open(path / name, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                return f"{name} is not what was written (its SHA-256 is another)"
    return ""


def sound(folder: str | Path, ranks: Ranks | None = None, *, quiet: bool = False) -> Path | None:
    """The newest checkpoint of `folder` without damage, or None; newer ones with damage are named on stderr. Every rank must
    call it, and all ranks must see one file system. Whoever has no Ranks reads every file."""
    ranks = ranks or Ranks()
    for path in reversed(ranks.of_first(lambda: [str(found) for _, found in checkpoints(folder)])):
        words = [found for found in ranks.gather(damage(path, ranks.rank, ranks.size)) if found]
        if not words:
            return Path(path)
        if ranks.first and not quiet:
            print(f"checkpoint {path} is damaged and is not used: {words[0]}; the one before it is taken if there is one",
                  file=sys.stderr)
    return None


def folder_of(folder: str | Path, identity: Any) -> Path:
    """Where in `folder` the checkpoints of the run with this `identity` are: everything that its result depends on, as JSON
    values."""
    return Path(folder) / hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def own_folder(folder: str | Path, identity: Any, *, resume: bool = True) -> Path:
    """`folder_of` after a look at what else is there. Checkpoints of any other run are removed (going on from them would be
    neither run), and said to be; so are this run's own without `resume`, or where that run is over."""
    folder = Path(folder)
    own = folder_of(folder, identity)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        over = (path / FINISHED).exists()
        if path != own or not resume or over:
            remove(path)
            if resume and not path.name.startswith("."):
                print(f"{path} holds checkpoints of " + ("a run that is over" if over and path == own else
                      "another configuration") + "; they are removed and this run starts anew", file=sys.stderr)
    return own


def save_checkpoint(learner: Learner, folder: str | Path, state: dict[str, Any], *, keep: int = 2,
                    keep_every: int = 0) -> Path:
    """Save the learner after its current step together with `state` (JSON values); every rank must call it, and all
    ranks must see one file system. When the new one is published, the last `keep` and those whose step is a multiple of
    `keep_every` (0: none) stay; older ones go, and so do those of later steps, which belong to a future that was left."""
    learner.check_routers()
    folder = Path(folder)
    path = folder / f"step-{learner.step}"
    aside = folder / f".step-{learner.step}.writing"
    if learner.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        for half in folder.glob(".step-*"):
            shutil.rmtree(half)
        aside.mkdir()
    torch.distributed.barrier()
    with writing(aside):
        learner.engine.save_checkpoint(str(aside), tag=TAG, save_latest=False)
    torch.distributed.barrier()
    _write_digests(aside, learner.rank, learner.world_size)
    torch.distributed.barrier()
    if learner.rank == 0:
        record = {"step": learner.step, "world_size": learner.world_size, "zero_stage": learner.config.zero_stage,
                  "dtype": learner.config.dtype, "autoep_size": learner.config.autoep_size,
                  "router_hash": learner.router_hash, "caller": state, "files": _read_digests(aside)}
        record = json.loads(json.dumps(record))  # the very values that a reader gets, for their digest
        (aside / STATE).write_text(json.dumps(record | {"digest": digest(record)}, indent=1, sort_keys=True) + "\n")
        publish(aside, path)
        _tidy(folder, learner.step, keep, keep_every)
    torch.distributed.barrier()
    return path


def _write_digests(aside: Path, rank: int, size: int) -> None:
    """Bring this rank's part of the files to the disk and note their sizes and SHA-256."""
    files = sorted(file for file in aside.rglob("*") if file.is_file() and not file.name.startswith(DIGESTS))
    found = {}
    for path in files[rank::size]:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            found[str(path.relative_to(aside))] = [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    (aside / f"{DIGESTS}{rank}").write_text(json.dumps(found))


def _read_digests(aside: Path) -> dict[str, list]:
    found: dict[str, list] = {}
    for path in aside.glob(f"{DIGESTS}*"):
        found |= json.loads(path.read_text())
        path.unlink()
    return found


def _tidy(folder: Path, step: int, keep: int, keep_every: int) -> None:
    found = checkpoints(folder)
    last = {number for number, _ in [one for one in found if one[0] <= step][-keep:]}
    for number, path in found:
        if number not in last and (number > step or not keep_every or number % keep_every):
            remove(path)
    for cut in folder.glob(f"{CUT}*"):
        shutil.rmtree(cut)


def cut_after(folder: str | Path, step: int) -> list[int]:
    """Take the checkpoints of steps after `step` out of use: they stay, under names that nothing loads, until the next one
    is saved. Returns their steps."""
    cut = []
    for number, path in checkpoints(folder):
        if number > step:
            shutil.rmtree(aside := path.with_name(f"{CUT}{path.name}"), ignore_errors=True)
            path.rename(aside)
            cut.append(number)
    return cut


def close_folder(folder: str | Path, keep_every: int) -> None:
    """The run of these checkpoints is over: all of them go, but for the multiples of `keep_every` (0: none)."""
    folder = Path(folder)
    kept = [number for number, _ in checkpoints(folder) if keep_every and number % keep_every == 0]
    if not kept:
        remove(folder)
        return
    (folder / FINISHED).touch()
    for number, path in checkpoints(folder):
        if number not in kept:
            remove(path)
    for path in [*folder.glob(".step-*"), *folder.glob(f"{CUT}*")]:
        shutil.rmtree(path)


def remove(path: Path) -> None:
    """Remove a folder; a kill in between leaves nothing that looks like a checkpoint."""
    if not path.exists():
        return
    if not path.name.startswith("."):
        shutil.rmtree(aside := path.with_name(f".{path.name}.removing"), ignore_errors=True)  # of one that was killed here
        path = path.rename(aside)
    shutil.rmtree(path)


def checkpoint_record(path: str | Path) -> dict[str, Any]:
    """What state.json of a checkpoint says: "step", "world_size", "zero_stage", "dtype", "autoep_size", "router_hash",
    "caller", "files". Raises CheckpointError where it cannot be read."""
    return _record(Path(path))


def read_state(path: str | Path) -> dict[str, Any]:
    """The caller's state of a checkpoint, without loading any weights."""
    return _record(Path(path))["caller"]


def load_checkpoint(learner: Learner, path: str | Path) -> dict[str, Any]:
    """Put a learner (made with the same config on the same number of ranks) where the checkpoint was; returns the
    caller's state. Raises CheckpointError where the folder is incomplete or was written by another layout."""
    path = Path(path)
    record = _record(path)
    for key, here in (("world_size", learner.world_size), ("zero_stage", learner.config.zero_stage),
                      ("dtype", learner.config.dtype), ("autoep_size", learner.config.autoep_size)):
        if record.get(key, 0) != here:
            raise CheckpointError(f"{path} was written with {key} {record.get(key, 0)}, this run has {here}; "
                                  f"resume with {key} {record.get(key, 0)} or start from an exported model folder")
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
    """The checkpoints of one run in one folder: the last `keep` and those of every `keep_every`-th step (0: none)."""

    def __init__(self, folder: str | Path, *, keep: int = 2, keep_every: int = 0):
        if keep < 1 or keep_every < 0:
            raise ValueError(f"keep must be at least 1 and keep_every not negative, got {keep} and {keep_every}")
        self.folder, self.keep, self.keep_every = Path(folder), keep, keep_every

    def save(self, learner: Learner, step: int, state: dict[str, Any]) -> Path:
        """Save after `step` steps; raises ValueError where the learner has made another number of them."""
        if step != learner.step:
            raise ValueError(f"checkpoint for step {step}, but the learner has made {learner.step} steps")
        return save_checkpoint(learner, self.folder, state, keep=self.keep, keep_every=self.keep_every)

    def load(self, learner: Learner) -> tuple[int, dict[str, Any]] | None:
        """Go on from the newest sound checkpoint: (steps made, caller's state), or None where there is none."""
        found = sound(self.folder, quiet=learner.rank != 0)
        if found is None:
            return None
        state = load_checkpoint(learner, found)
        return learner.step, state
