"""New weights for the engines, each hand-over proved: what every rank of the learner calls after a step.

    gather (ZeRO-3, spread experts) ─▶ engine.load_weights          engines of this process
                                  └─▶ WeightFolder ─▶ engine.load_folder   samplers and servers elsewhere
    and then a probe: the engine's log-probabilities of a few tokens beside the learner's
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.ranks import Ranks
from mopd.sampling.weight_folder import (
    Folder,
    Probe,
    Taken,
    WeightFolder,
    WeightFolderError,
    WeightsDiffer,
    Writer,
    folder_weights,
    read_folder,
    take,
    weights_root,
)

if TYPE_CHECKING:
    from mopd.learner.engine import Learner

__all__ = ["Folder", "HandOver", "Probe", "Published", "Taken", "WeightFolder", "WeightFolderError", "WeightsDiffer",
           "folder_weights", "hand_over", "publish", "read_folder", "take", "verify_now", "weights_root"]


@dataclasses.dataclass(frozen=True)
class Published:
    """A version that lies in a folder for whoever samples. `path` is the same on every rank."""

    path: Path
    version: int
    seconds: float
    bytes: int
    verified: bool


@dataclasses.dataclass(frozen=True)
class HandOver:
    """The engine has the weights of `version`. seconds: the whole; probe_seconds: of them for the proof; gap: largest
    difference of the probe in nats over all ranks' engines, NaN where this version was not probed; bytes: through a
    folder, else 0."""

    version: int
    seconds: float
    probe_seconds: float
    gap: float
    bytes: int = 0

    def record(self) -> dict[str, Any]:
        """For a step's record (JSON values)."""
        return {"version": self.version, "seconds": self.seconds, "probe_seconds": self.probe_seconds,
                "gap": None if math.isnan(self.gap) else self.gap, "bytes": self.bytes}


def verify_now(every: int, version: int, *, first: bool = False) -> bool:
    """Whether the hand-over of `version` is to be proved: with `every` = `sampling.verify_every` each multiple of it (1:
    all), and the first after a start whatever it is."""
    return first or (every > 0 and version % every == 0)


def publish(learner: Learner, place: WeightFolder | None, version: int, *, ranks: Ranks | None = None, layout: str = "module",
            verify: bool = True) -> Published:
    """Write the learner's weights into `place` as `version`, with a probe where `verify`. Every rank must call it; rank 0
    has the place and writes, the others help to gather and may give None.

    At most one shard and one layer are whole in memory at a time. Raises WeightFolderError on rank 0 where the place cannot
    be written (the other ranks: RankFailed with its words).
    """
    from mopd.learner.probe import make_probe
    from mopd.learner.weights import named_weights

    ranks, began = ranks or Ranks(), time.perf_counter()
    if ranks.first and place is None:
        raise ValueError("rank 0 publishes the weights and needs a WeightFolder")
    probe = make_probe(learner, seed=version) if verify else None
    trouble: Exception | None = None
    writer: Writer | None = None
    try:
        writer = Writer(place if ranks.first else None, version, layout)
    except WeightFolderError as error:
        trouble = error
    for name, tensor in named_weights(learner, layout=layout):  # to its end on every rank, also where this one failed
        if writer is not None and trouble is None:
            try:
                writer.add(name, tensor)
            except WeightFolderError as error:
                trouble = error

    def finish() -> list:
        if trouble is not None:
            raise trouble
        if not ranks.first:
            return []
        folder = writer.publish(probe)
        return [str(folder.path), folder.bytes]

    path, size = ranks.gather(ranks.together("writing the weights for the engines", finish))[0]
    return Published(Path(path), version, time.perf_counter() - began, size, verify)


def hand_over(learner: Learner, engine: Any, version: int, *, ranks: Ranks | None = None, place: WeightFolder | None = None,
              verify: bool = True, transfer: Any = None) -> HandOver:
    """Give `engine` the learner's weights as `version` and prove it. Every rank must call it, with its own engine or None.

    An engine of this process takes them as they are gathered, one by one (`load_weights`); one whose `takes` is "folder"
    takes a published folder (`load_folder`), for which rank 0 gives the `place`. With `verify` the engine scores a few
    tokens, other ones for every version, and WeightsDiffer ends the run where its log-probabilities are not the learner's.
    A `transfer` (mopd.sampling.vllm_weights.DeviceTransfer, on every rank) takes the place of both ways.
    """
    from mopd.learner.probe import make_probe
    from mopd.learner.weights import named_weights

    ranks, began = ranks or Ranks(), time.perf_counter()
    layout, size = getattr(engine, "layout", "module"), 0
    through_folder = getattr(engine, "takes", "weights") == "folder"
    if ranks.size > 1:  # what is gathered, and how, must be the same everywhere
        told = ranks.gather([through_folder, layout] if engine is not None else None)
        through_folder, layout = next((one for one in told if one is not None), [False, "module"])
    if transfer is not None:
        transfer.send(version)
        if engine is not None:
            engine.version = version
    elif through_folder:
        made = publish(learner, place, version, ranks=ranks, layout=layout, verify=verify)
        size = made.bytes

        def give() -> None:
            if engine is not None:
                engine.load_folder(made.path, version)

        ranks.together("giving the weights to the engine", give)
        if ranks.first:
            place.took("engine", version)
    else:
        weights = named_weights(learner, layout=layout)
        _load(engine, weights, version, ranks)
    gap, probing = math.nan, 0.0
    if verify:
        started = time.perf_counter()
        probe = make_probe(learner, seed=version)

        def compare() -> float:
            if transfer is not None:
                return transfer.prove(probe, version)
            return 0.0 if engine is None else probe.check(engine.score(probe.tokens), version=version)

        gap = max(ranks.gather(ranks.together("checking the engine's weights", compare)))
        probing = time.perf_counter() - started
    return HandOver(version, time.perf_counter() - began, probing, gap, size)


def _load(engine: Any, weights: Iterator, version: int, ranks: Ranks) -> None:
    """`engine.load_weights`, after which every rank has consumed all weights, also one whose engine refused some."""
    trouble: Exception | None = None
    if engine is not None:
        try:
            engine.load_weights(weights, version=version)
        except Exception as error:  # noqa: BLE001 - the other ranks still gather with this one
            trouble = error
    if ranks.size > 1:
        for _ in weights:
            pass

    def finish() -> None:
        if trouble is not None:
            raise trouble

    ranks.together("handing weights to the engine", finish)
