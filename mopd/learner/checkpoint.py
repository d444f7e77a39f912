"""Checkpoints that are there whole or not at all: written aside, published by one rename, the last few and the best kept.

A checkpoint folder `step-N` holds DeepSpeed's engine state (weights, optimizer) and state.json: the caller's state, with
the size and SHA-256 of every file. Names that begin with a dot are never loaded: what a killed writer left, what is being
removed, what a rollback cut off. DeepSpeed writes its part in its own format; nothing but this module's own runs should be
loaded from such a folder. Weights for others leave through `mopd.export_model`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mopd.learner.background import HostCopies, Saving, copying
from mopd.learner.engine import Learner
from mopd.learner.model import publish, writing
from mopd.learner.moe import find_routers
from mopd.learner.portable import load_portable
from mopd.ranks import Ranks, digest, exchange

STATE = "state.json"
TAG = "engine"
DIGESTS = "digests-of-rank-"
GRACE_S = 20.0  # that a process which ends gives other ranks to write their part
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
        return f"{STATE} cannot be read: {error.__cause__}"
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
    neither run), and said to be; so are this run's own without `resume`, or where that run is over. What a kill or a full
    disk left half-written goes without a word: a start may need the room."""
    folder = Path(folder)
    own = folder_of(folder, identity)
    for half in own.glob(".step-*"):
        shutil.rmtree(half, ignore_errors=True)
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        over = (path / FINISHED).exists()
        if path != own or not resume or over:
            remove(path)
            if resume and not path.name.startswith("."):
                print(f"{path} holds checkpoints of " + ("a run that is over" if over and path == own else
                      "another configuration") + "; they are removed and this run starts anew", file=sys.stderr)
    return own


def save_checkpoint(learner: Learner, folder: str | Path, state: dict[str, Any], *, keep: int = 2,
                    keep_every: int = 0, score: float | None = None, background: bool = False) -> Path:
    """Save the learner after its current step together with `state` (JSON values); every rank must call it, and all
    ranks must see one file system. When the new one is published, the last `keep`, those whose step is a multiple of
    `keep_every` (0: none) and the one with the highest `score` stay; others go, and so do those of later steps, which
    belong to a future that was left.

    background  return as soon as everything is copied to the host's memory; it is written meanwhile, and published when all
                ranks have. The next save waits for it, as `finish_saving` does
    """
    finish_saving(learner)
    began = time.perf_counter()
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
    record = {"step": learner.step, "world_size": learner.world_size, "zero_stage": learner.config.zero_stage,
              "dtype": learner.config.dtype, "autoep_size": learner.config.autoep_size,
              "autoep_preset": learner.config.autoep_preset,
              "router_hash": learner.router_hash, "score": score, "caller": state}
    record = json.loads(json.dumps(record))  # the very values that a reader gets, for their digest
    rank, size = learner.rank, learner.world_size
    routers, states = router_parts(learner), Path(learner.engine._get_ckpt_name(str(aside), TAG))

    def publishing() -> None:
        if rank == 0:
            with writing(aside):
                _publish(aside, path, record)
            _tidy(folder, record["step"], keep, keep_every)

    if background:
        with copying(learner.engine) as copies:
            learner.engine.save_checkpoint(str(aside), tag=TAG, save_latest=False)
        learner.saving = Saving(lambda give_up: _write_copies(copies, aside, rank, size, publishing, give_up,
                                                              lambda: check_written(states, routers)), began=began)
        return path
    with writing(aside):
        learner.engine.save_checkpoint(str(aside), tag=TAG, save_latest=False)
        check_written(states, routers)
    torch.distributed.barrier()
    files = sorted(file for file in aside.rglob("*") if file.is_file() and not file.name.startswith(DIGESTS))
    _write_digests(aside, rank, files[rank::size])
    torch.distributed.barrier()
    publishing()
    torch.distributed.barrier()
    learner.saving = None
    learner.saving_seconds = time.perf_counter() - began
    return path


def finish_saving(learner: Learner) -> None:
    """Wait until a checkpoint that is being written in the background is there; every rank must call it. Raises what went
    wrong, on the other ranks a CheckpointError with its words."""
    if (saving := learner.saving) is None:
        return
    for waits in (learner.rank > 0, learner.rank == 0):  # rank 0's thread waits for the others' parts
        error = saving.wait() if waits else None
        said = exchange("" if error is None else f"{type(error).__name__}: {error}", learner.world_size,
                        device=learner.device)
        if not any(said):
            continue
        saving.give_up.set()
        saving.wait()
        learner.saving = None
        if error is not None:
            raise error
        rank, words = next((rank, words) for rank, words in enumerate(said) if words)
        raise CheckpointError(f"rank {rank} could not write its part of the last checkpoint, so it is not there: {words}")
    learner.saving, learner.saving_seconds = None, saving.seconds


def settle_saving(learner: Learner) -> None:
    """An error ends the run: a checkpoint that is being written is written to its end, without a word to the other ranks;
    their parts are waited for only shortly, since what ended this rank may have ended them."""
    if (saving := learner.saving) is not None:
        saving.wait(None if learner.world_size == 1 else GRACE_S)
        saving.give_up.set()
        saving.wait()


def _write_copies(copies: HostCopies, aside: Path, rank: int, size: int, publishing: Callable[[], None],
                  give_up: threading.Event, check: Callable[[], None]) -> None:
    """Write what was copied, check it, say so to rank 0, and there publish when all ranks have; no collectives, since the
    training has its own under way."""
    with writing(aside, remove=size == 1):
        paths = []
        while copies.files:
            state, path = copies.files.pop()
            copies.inner.save(state, path)
            paths.append(Path(path))
            del state
        check()
        _write_digests(aside, rank, paths)
        if rank == 0:
            _wait_for(aside, size, give_up)
            known = {name for part in aside.glob(f"{DIGESTS}*") for name in json.loads(part.read_text())}
            rest = [file for file in aside.rglob("*") if file.is_file() and not file.name.startswith(DIGESTS)
                    and str(file.relative_to(aside)) not in known]
            _write_digests(aside, size, rest)  # what DeepSpeed writes past its checkpoint engine
    publishing()


def router_parts(learner: Learner) -> dict[str, set[str]]:
    """Of every frozen router's parameter, by DeepSpeed's name for it: the SHA-256 of what this rank has of it in memory,
    whole and, where ZeRO-3 splits it, its part. Empty on ranks that do not write it: below stage 3 rank 0 does alone."""
    if not learner.config.freeze_router or learner.rank and learner.config.zero_stage < 3:
        return {}
    known = {id(parameter) for router in find_routers(learner.model) for parameter in router.module.parameters()}
    return {name: {_bytes_digest(tensor) for tensor in (parameter.data, getattr(parameter, "ds_tensor", None))
                   if tensor is not None}
            for name, parameter in learner.engine.module.named_parameters() if id(parameter) in known}


def check_written(path: Path, routers: dict[str, set[str]]) -> None:
    """Raise CheckpointError where DeepSpeed's file of this rank's weights has another router than `router_parts`, whose hash
    was right. Reads no more than the routers."""
    if not routers:
        return
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    for name, expected in routers.items():
        held = [part[name] for part in (state.get("module"), state.get("frozen_param_fragments"))
                if part and name in part and part[name].numel()]
        if not held or any(_bytes_digest(tensor) not in expected for tensor in held):
            raise CheckpointError(f"{path}: the frozen router {name} is {'another one' if held else 'missing'} in what was "
                                  "written, so this checkpoint is not kept; look at the disk, and at DeepSpeed's version")


def _bytes_digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def _wait_for(aside: Path, size: int, give_up: threading.Event) -> None:
    ended = None
    while (there := len(list(aside.glob(f"{DIGESTS}*")))) < size:
        if give_up.is_set():
            raise CheckpointError(f"{aside}: only {there} of {size} ranks could write their part")
        if not threading.main_thread().is_alive():  # nobody will wait for the other ranks any more
            ended = ended or time.monotonic()
            if time.monotonic() - ended > GRACE_S:
                raise CheckpointError(f"{aside}: only {there} of {size} ranks wrote their part before this process ended")
        time.sleep(0.02)


def _write_digests(aside: Path, number: int, files: list[Path]) -> None:
    """Bring files to the disk and note their sizes and SHA-256 under a rank's number."""
    found = {}
    for path in files:
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            found[str(path.relative_to(aside))] = [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]
    half = aside / f".{DIGESTS}{number}"
    half.write_text(json.dumps(found))
    half.rename(aside / f"{DIGESTS}{number}")


def _publish(aside: Path, path: Path, record: dict[str, Any]) -> None:
    files: dict[str, list] = {}
    for part in aside.glob(f"{DIGESTS}*"):
        files |= json.loads(part.read_text())
        part.unlink()
    record = json.loads(json.dumps(record | {"files": files}))
    (aside / STATE).write_text(json.dumps(record | {"digest": digest(record)}, indent=1, sort_keys=True) + "\n")
    publish(aside, path)


def best(folder: str | Path) -> Path | None:
    """The complete checkpoint of `folder` with the highest score, of equals the earliest; None where none has one."""
    found = []
    for step, path in checkpoints(folder):
        with contextlib.suppress(CheckpointError):  # damage is `sound`'s business
            if (score := _record(path).get("score")) is not None:
                found.append((score, -step, path))
    return max(found)[2] if found else None


def _tidy(folder: Path, step: int, keep: int, keep_every: int) -> None:
    for number, path in checkpoints(folder):
        if number > step:
            remove(path)
    found = checkpoints(folder)
    kept = {path for _, path in found[-keep:]} | {best(folder)}
    for number, path in found:
        if path not in kept and (not keep_every or number % keep_every):
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
    """The run of these checkpoints is over: all of them go, but for the multiples of `keep_every` (0: none) and the best."""
    folder = Path(folder)
    kept = [number for number, path in checkpoints(folder)
            if keep_every and number % keep_every == 0 or path == best(folder)]
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


def load_checkpoint(learner: Learner, path: str | Path, *,
                    convert: Callable[[Path], Path] | None = None) -> dict[str, Any]:
    """Put a learner where the checkpoint was; returns the caller's state. Every rank must call it.

    convert  path → the folder with its portable state (mopd.relayout), for a checkpoint of another number of ranks, ZeRO
             stage or spread of experts; following steps then differ from those of the saved layout by rounding
    Raises CheckpointError where the folder is incomplete, of another dtype or, without `convert`, of another layout.
    """
    path = Path(path)
    record = _record(path)
    here = {"world_size": learner.world_size, "zero_stage": learner.config.zero_stage,
            "autoep_size": learner.config.autoep_size, "dtype": learner.config.dtype}
    there = {key: record.get(key, value if key == "dtype" else 0) for key, value in here.items()}  # of earlier versions
    other = {key: value for key, value in there.items() if value != here[key]}
    if other and (convert is None or "dtype" in other):
        key, there = next(reversed(other.items()))
        raise CheckpointError(f"{path} was written with {key} {there}, this run has {here[key]}; "
                              f"resume with {key} {there} or start from an exported model folder")
    if other:
        if learner.rank == 0:
            print(f"{path.name} was written with " + ", ".join(f"{key} {value}" for key, value in other.items()) +
                  ", this run has " + ", ".join(f"{key} {here[key]}" for key in other) +
                  ": its state is put together by name, and following steps differ by rounding", file=sys.stderr)
        load_portable(learner, convert(path))
    else:
        loaded, _ = learner.engine.load_checkpoint(str(path), tag=TAG, load_lr_scheduler_states=False)
        if loaded is None:
            raise CheckpointError(f"DeepSpeed could not load its state from {path}")
    learner.step = int(record["step"])
    if record["router_hash"]:
        learner.router_hash = record["router_hash"]
        learner.check_routers()
    return record["caller"]


@contextlib.contextmanager
def reading(path: Path | None):
    """Around the use of what `load_checkpoint` gave: a value that is not there is a CheckpointError."""
    try:
        yield
    except KeyError as error:
        if path is None:
            raise
        raise CheckpointError(f"{path} has no {error} in its state: another version of this program wrote it. Go on with "
                              "that version, or take its weights by `mopd export RUN --step N`, or start anew "
                              "(--resume never)") from error


def _record(path: Path) -> dict[str, Any]:
    try:
        return json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint ({error}); "
                              "take another step-N folder or start anew") from error


class Checkpoints:
    """The checkpoints of one run in one folder: the last `keep`, those of every `keep_every`-th step (0: none), the best."""

    def __init__(self, folder: str | Path, *, keep: int = 2, keep_every: int = 0, background: bool = False):
        if keep < 1 or keep_every < 0:
            raise ValueError(f"keep must be at least 1 and keep_every not negative, got {keep} and {keep_every}")
        self.folder, self.keep, self.keep_every, self.background = Path(folder), keep, keep_every, background

    def save(self, learner: Learner, step: int, state: dict[str, Any], *, score: float | None = None) -> Path:
        """Save after `step` steps; raises ValueError where the learner has made another number of them."""
        if step != learner.step:
            raise ValueError(f"checkpoint for step {step}, but the learner has made {learner.step} steps")
        return save_checkpoint(learner, self.folder, state, keep=self.keep, keep_every=self.keep_every, score=score,
                               background=self.background)

    def load(self, learner: Learner) -> tuple[int, dict[str, Any]] | None:
        """Go on from the newest sound checkpoint: (steps made, caller's state), or None where there is none."""
        found = sound(self.folder, quiet=learner.rank != 0)
        if found is None:
            return None
        state = load_checkpoint(learner, found)
        return learner.step, state
