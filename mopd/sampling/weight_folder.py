"""A version of the student's weights as a folder: written aside, published by rename, read back by whoever samples.

A folder holds safetensors shards under Hugging Face names and `weights.json`, which is there last: the version, every shard's
size and check sum, and a probe (a few tokens with the learner's log-probabilities), so that an engine on the other side can
prove what it took. Knows neither learner nor engine; `mopd.sampling.sync` writes with the one and reads with the other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

MANIFEST = "weights.json"
OWNER = ".owner"
# locked by the process that writes there
FORMAT = 1
SHARD_BYTES = 256 * 2**20
SHARED_MEMORY = Path("/dev/shm")


class WeightFolderError(RuntimeError):
    """A folder of weights that could not be written, or is not whole; the message names it and what to do."""


class WeightsDiffer(RuntimeError):
    """The engine samples with other weights than the learner trains; the message has both numbers."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """What tells whether weights arrived: tokens uint32 [T], the learner's logprob float32 [T - 1] of each but the first
    given those before it, and the largest difference in nats that rounding explains."""

    tokens: np.ndarray
    logprob: np.ndarray
    limit: float

    def check(self, given: np.ndarray, *, version: int, who: str = "the engine") -> float:
        """The largest difference in nats to `given` float32 [T - 1]; raises WeightsDiffer, with both numbers, above
        `limit`."""
        given = np.asarray(given, np.float32)
        if given.shape != self.logprob.shape:
            raise ValueError(f"{who} scored {given.shape} of a probe of {len(self.tokens)} tokens")
        gaps = np.abs(self.logprob - given)
        worst = int(np.argmax(np.where(np.isfinite(gaps), gaps, np.inf)))
        if not gaps[worst] <= self.limit:
            raise WeightsDiffer(
                f"after step {version} {who} gives token {worst + 1} of a fixed text the log-probability "
                f"{given[worst]:.5f}, the learner {self.logprob[worst]:.5f} (they may differ by {self.limit:g}): {who} does "
                "not have the learner's weights, so nothing that it samples can be trusted. Start anew, and with "
                "deepspeed.zero_stage=1 if it happens again")
        return float(gaps[worst])


@dataclasses.dataclass(frozen=True)
class Folder:
    """A published folder as its manifest says. `layout`: names of the module in memory, or `checkpoint` (one matrix per
    expert, as models are saved); `digest` tells two contents apart; `shards`: (file, bytes, check sum)."""

    path: Path
    version: int
    layout: str
    digest: str
    bytes: int
    shards: tuple[tuple[str, int, int], ...]
    probe: Probe | None = None


def read_folder(path: str | Path) -> Folder:
    """What `path` holds. Raises WeightFolderError where it is gone, half-written or not of this kind; the shards' bytes are
    compared with their check sums when they are read (`folder_weights`)."""
    path = Path(path)
    try:
        found = json.loads((path / MANIFEST).read_text())
        probe = found["probe"]
        folder = Folder(
            path, int(found["version"]), str(found["layout"]), str(found["digest"]), int(found["bytes"]),
            tuple((str(name), int(size), int(total)) for name, size, total in found["shards"]),
            None if probe is None else Probe(np.array(probe["tokens"], np.uint32), np.array(probe["logprob"], np.float32),
                                             float(probe["limit"])))
        kind = found["format"]
    except FileNotFoundError as error:
        state = "is gone (a newer version has taken its place)" if not path.is_dir() else f"has no {MANIFEST}: half-written"
        raise WeightFolderError(f"the weights' folder {path} {state}; take the newest version") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightFolderError(f"{path / MANIFEST} cannot be read ({type(error).__name__}: {error}); the learner must "
                                "publish this version again") from error
    if kind != FORMAT:
        raise WeightFolderError(f"{path} has format {kind}, this release reads {FORMAT}: learner and sampler must run the "
                                "same release")
    for name, size, _ in folder.shards:
        if Path(name).name != name:
            raise WeightFolderError(f"{path / MANIFEST} names a shard {name!r} outside its folder")
        there = (path / name).stat().st_size if (path / name).is_file() else -1
        if there != size:
            raise WeightFolderError(f"{path / name} has {max(there, 0)} bytes instead of {size}: the folder is half-written "
                                    "or was changed; the learner must publish this version again")
    return folder


def folder_weights(path: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every weight in the folder, on the CPU, from mapped files: valid until the next one is asked for.
    Raises WeightFolderError, before the first weight, as `read_folder` does and where a shard's bytes are not those that
    were written: an engine must not take half of a version."""
    from safetensors import safe_open

    folder = read_folder(path)
    for name, _, total in folder.shards:
        if _sum_of(folder.path / name) != total:
            raise WeightFolderError(f"{folder.path / name} is not what was written (its check sum differs); the learner must "
                                    f"publish version {folder.version} again")
    return _read(folder, safe_open)


def _read(folder: Folder, safe_open: Callable[..., Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, _, _ in folder.shards:
        with safe_open(folder.path / name, framework="pt", device="cpu") as shard:
            for key in shard.keys():  # noqa: SIM118 - not a mapping
                yield key, shard.get_tensor(key)


@dataclasses.dataclass(frozen=True)
class Taken:
    """An engine has the weights of `version`: after `seconds`, with the probe `gap` nats off (NaN: the folder has none)."""

    version: int
    seconds: float
    gap: float


def take(engine: Any, path: str | Path, version: int, *, who: str = "the engine") -> Taken:
    """Give a published folder to an engine that has `load_folder(folder, version)` and `score(tokens)`, and prove it.

    Raises WeightFolderError for a folder that is not whole or holds another version, WeightsDiffer where the probe shows
    other weights.
    """
    began = time.perf_counter()
    folder = read_folder(path)
    if folder.version != version:
        raise WeightFolderError(f"{path} holds version {folder.version}, not {version}")
    engine.load_folder(folder.path, version)
    gap = float("nan")
    if folder.probe is not None:
        gap = folder.probe.check(engine.score(folder.probe.tokens), version=version, who=who)
    return Taken(version, time.perf_counter() - began, gap)


def weights_root(configured: str, run_folder: str | Path) -> Path:
    """Where a run's weights lie: in a folder of its own in `configured` (sampling.weights_folder), by default in shared
    memory, or inside the run's folder where a machine has no /dev/shm."""
    run = str(Path(run_folder).absolute())
    own = f"mopd-{os.getuid()}-{hashlib.sha256(run.encode()).hexdigest()[:12]}"
    if configured:
        return Path(configured) / own
    return SHARED_MEMORY / own if os.access(SHARED_MEMORY, os.W_OK) else Path(run) / "weights"


class WeightFolder:
    """The place of one run's versions, written by one process. What an earlier process of the run left there is removed, and
    in shared memory what other runs left that were killed.

    root         the folder; engines on other machines must see it under the same name
    shard_bytes  weights are written in files of about this size, and no more of them is gathered at a time
    Raises WeightFolderError where the place cannot be made.
    """

    def __init__(self, root: str | Path, *, shard_bytes: int = SHARD_BYTES):
        if shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, got {shard_bytes}")
        self.root, self.shard_bytes = Path(root), shard_bytes
        self._taken: dict[str, int] = {}
        self.newest: int | None = None
        try:
            self._owned = _own(self.root)
            if self.root.parent == SHARED_MEMORY:
                _sweep(self.root)
            for left in self.root.iterdir():
                if left.is_dir() and left.name.startswith((".writing-", "v-")):
                    shutil.rmtree(left)
        except OSError as error:
            raise WeightFolderError(f"sampling.weights_folder: {self.root} cannot be used ({error.strerror}); name a folder "
                                    "that this machine may write to") from error

    def path(self, version: int) -> Path:
        return self.root / f"v-{version:08d}"

    def write(self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, layout: str = "module",
              probe: Probe | None = None) -> Folder:
        """Write a version aside, shard by shard as `weights` come, and publish it. Raises WeightFolderError where the disk is
        full or cannot be written; nothing half-written is left then, and older versions stay."""
        writer = Writer(self, version, layout)
        try:
            for name, tensor in weights:
                writer.add(name, tensor)
            return writer.publish(probe)
        except BaseException:
            writer.discard()
            raise

    def join(self, reader: str) -> None:
        """Know a reader: nothing newer than what it has is removed until it has taken a newer version."""
        self._taken.setdefault(reader, -1)

    def took(self, reader: str, version: int) -> None:
        """`reader` has the weights of `version`; versions that every known reader is past are removed."""
        self._taken[reader] = max(version, self._taken.get(reader, -1))
        self._tidy()

    def forget(self, reader: str) -> None:
        """A reader is gone."""
        self._taken.pop(reader, None)
        self._tidy()

    def _tidy(self) -> None:
        if self.newest is None:
            return
        oldest = min(self._taken.values(), default=self.newest)
        for folder in self.root.glob("v-*"):
            number = folder.name[2:]
            if number.isdigit() and int(number) < min(oldest, self.newest):
                shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        """Remove everything; may be called twice."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._owned.close()


def _own(root: Path) -> IO[bytes]:
    """Make the folder and lock it for this process's life; the lock ends with the process, however that ends. Where it cannot
    be had the folder is used all the same: this process has it already, or the file system has no locks."""
    for _ in range(20):
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        opened = open(root / OWNER, "wb")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(root / OWNER), os.fstat(opened.fileno())):  # else it was swept away in between
                return opened
        except OSError:
            time.sleep(0.02)  # somebody who sweeps looks at it just now
        opened.close()
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return open(root / OWNER, "wb")


def _sweep(root: Path) -> None:
    """Remove the folders beside `root` whose owners are gone."""
    for other in root.parent.glob(f"mopd-{os.getuid()}-*"):
        if other == root:
            continue
        with contextlib.suppress(OSError), open(other / OWNER, "rb") as opened:  # alive: it is locked
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(other, ignore_errors=True)


class Writer:
    """One version under construction. A writer without a place takes tensors and forgets them: what ranks use that only
    help to gather."""

    def __init__(self, place: WeightFolder | None, version: int, layout: str):
        self.place, self.version, self.layout = place, version, layout
        self._shard: dict[str, torch.Tensor] = {}
        self._held = 0
        self._shards: list[tuple[str, int, int]] = []
        self._aside: Path | None = None
        if place is not None:
            self._aside = place.root / f".writing-{version:08d}"
            with self._writing():
                shutil.rmtree(self._aside, ignore_errors=True)
                self._aside.mkdir(mode=0o700)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one weight; a shard that is full is written."""
        if self.place is None:
            return
        size = tensor.numel() * tensor.element_size()
        if self._shard and self._held + size > self.place.shard_bytes:
            self._flush()
        self._shard[name] = tensor.detach().cpu().contiguous()
        self._held += size

    def _flush(self) -> None:
        from safetensors.torch import save_file

        if not self._shard:
            return
        name = f"weights-{len(self._shards) + 1:05d}.safetensors"
        file = self._aside / name
        with self._writing():
            save_file(self._shard, file, metadata={"format": "pt"})
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        self._shards.append((name, file.stat().st_size, _sum_of(file)))
        self._shard, self._held = {}, 0

    def publish(self, probe: Probe | None = None) -> Folder:
        """Write what is left and the manifest, and give the folder its name."""
        self._flush()
        digest = hashlib.sha256(json.dumps(self._shards).encode()).hexdigest()
        total = sum(size for _, size, _ in self._shards)
        plain = None if probe is None else {
            "tokens": probe.tokens.tolist(), "logprob": [float(x) for x in probe.logprob], "limit": probe.limit}
        target = self.place.path(self.version)
        with self._writing():
            with open(self._aside / MANIFEST, "w") as manifest:
                json.dump({"format": FORMAT, "version": self.version, "layout": self.layout, "digest": digest, "bytes": total,
                           "shards": self._shards, "probe": plain}, manifest)
                manifest.flush()
                os.fsync(manifest.fileno())
            if target.exists():  # a step that is done again after going back
                shutil.rmtree(target)
            self._aside.rename(target)
        self.place.newest = self.version
        self.place._tidy()
        return Folder(target, self.version, self.layout, digest, total, tuple(self._shards), probe)

    def discard(self) -> None:
        """Leave nothing behind."""
        self._shard = {}
        if self._aside is not None:
            shutil.rmtree(self._aside, ignore_errors=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        from safetensors import SafetensorError

        try:
            yield
        except (OSError, SafetensorError) as error:
            self.discard()
            full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(error)
            remedy = ("it is full: make room, or name another place with sampling.weights_folder (a version takes the "
                      "student's size, and two or three may lie there)" if full else
                      "sampling.weights_folder names another place")
            raise WeightFolderError(f"the weights of step {self.version} could not be written to {self.place.root} "
                                    f"({error}); {remedy}") from error


def _sum_of(file: Path) -> int:
    """CRC-32 of a file's bytes, read through a mapping."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return zlib.crc32(mapped)
