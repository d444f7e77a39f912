"""Checkpoints that are written while training goes on: DeepSpeed's state is copied to the host's memory, a thread writes it.

DeepSpeed hands every file of a checkpoint to its checkpoint engine. `HostCopies` stands in its place for the time of a save
and keeps copies instead of writing. DeepSpeed's own engines of this kind are no choice here: the decoupled one wants the fast
one, which compiles its writer (AsyncIO) on first use and needs CUDA's pinned buffers, DataStates is another package.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch


class HostCopies:
    """Keeps what it is to save as `files` [(state, path)], every tensor a copy in the host's memory; the checkpoint engine
    `inner` does the rest."""

    def __init__(self, inner: Any):
        self.inner = inner
        self.files: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def save(self, state_dict, path: str) -> None:
        self.files.append((on_host(state_dict), path))

    def commit(self, info) -> bool:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies are under way
        return True

    def preserves_storage_sharing(self) -> bool:
        return False  # each copy is a tensor's own part of its storage, so DeepSpeed need not make one before


@contextlib.contextmanager
def copying(engine) -> Iterator[HostCopies]:
    """While open, DeepSpeed's `engine.save_checkpoint` fills the HostCopies instead of writing."""
    inner = engine.checkpoint_engine
    engine.checkpoint_engine = copies = HostCopies(inner)
    try:
        yield copies
    finally:
        engine.checkpoint_engine = inner


def on_host(value: Any, seen: dict[tuple, torch.Tensor] | None = None) -> Any:
    """A copy of nested dicts, lists and tuples whose tensors are in the host's memory, pinned where they come from a GPU (the
    copies are done when the stream is). One tensor under two names stays one."""
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        key = (value.device, value.untyped_storage().data_ptr(), value.storage_offset(), value.dtype, tuple(value.shape),
               tuple(value.stride()))
        if key not in seen:
            source = value.detach()
            room = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
            seen[key] = room.copy_(source, non_blocking=source.is_cuda)
        return seen[key]
    if isinstance(value, dict):
        found = copy.copy(value)  # keeps the kind and what hangs on it (a state dict's metadata)
        for name, item in value.items():
            found[name] = on_host(item, seen)
        return found
    if isinstance(value, list):
        return [on_host(item, seen) for item in value]
    if isinstance(value, tuple):
        parts = [on_host(item, seen) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return copy.deepcopy(value)


class Saving:
    """`work` in a thread of its own, begun at once. The process does not end before it has; a kill does not wait.

    began   `time.perf_counter()` when the save began, before the copy
    seconds of the whole save, None until it is done
    give_up set by whoever knows that what `work` (which is given it) waits for will not come
    """

    def __init__(self, work: Callable[[threading.Event], None], *, began: float):
        self.give_up = threading.Event()
        self.seconds: float | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work, began), name="checkpoint")
        self._thread.start()

    def _run(self, work: Callable[[threading.Event], None], began: float) -> None:
        try:
            work(self.give_up)
        except BaseException as error:  # noqa: BLE001 - it is raised where the save is waited for
            self.error = error
            if not threading.main_thread().is_alive():
                print(f"the last checkpoint could not be written: {type(error).__name__}: {error}", file=sys.stderr)
        self.seconds = time.perf_counter() - began

    def wait(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, at most `timeout` seconds; returns what went wrong."""
        self._thread.join(timeout)
        return self.error
