"""The processes of one run: who is who, what they tell one another, and how the loss of one ends them all.

Processes come from a launcher (torchrun, DeepSpeed's, Slurm); the learner's collectives are DeepSpeed's. This is only what
the loop around the learner needs: plain values from every rank to every rank, and errors that name a rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from mopd.encoding import decode, encode

Result = TypeVar("Result")
WAIT_S = 2.0
# how long a rank that lost the others waits for their last words
TELLS = ("gloo", "nccl", "connection closed by peer", "connection reset", "timed out", "timeout", "broken pipe")
# how libraries word a collective that failed; they raise a bare RuntimeError


class RankFailed(RuntimeError):
    """Another rank failed, or was lost; the message names it and its last words."""


class RanksDiffer(ValueError):
    """The ranks of a job do not run the same thing; the message names the rank and what differs."""


class Ranks:
    """This process among `size` processes, of which `rank` counts from 0. Without arguments: one process alone, for which
    every method is free of cost and of torch.

    Every rank must call `gather`, `agree` and `together`, in the same order.
    """

    def __init__(self, rank: int = 0, size: int = 1, group: Any = None, store: Any = None):
        self.rank, self.size, self._group, self._store = rank, size, group, store
        self.place, self._places = "the start", 0
        self._waited, self._exchanges = 0.0, 0
        self._watch: Any = None

    @property
    def first(self) -> bool:
        """Whether this rank writes what the run writes once."""
        return self.rank == 0

    @classmethod
    def start(cls, *, timeout: float, warn_after: float = 0.0) -> Ranks:
        """Join the process group that a launcher prepared; alone where there is none. `timeout`: seconds that a rank waits
        for the others in any exchange before it gives up; `warn_after`: after which it says whom it waits for (0: never)."""
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
            return cls()
        import datetime

        import torch

        from mopd.learner.engine import start_processes

        try:
            rank, size = start_processes(timeout=timeout)
        except RuntimeError as error:
            raise RankFailed(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']} did not find the others within "
                             f"{timeout:g} s ({said(error)}). Start every rank, with one MASTER_ADDR and MASTER_PORT that "
                             "all of them reach") from error
        # Plain values travel over gloo whatever the learner's own back end: no detour over a device, and errors that
        # come back as exceptions.
        group = None
        if torch.distributed.get_backend() != "gloo":
            group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=timeout))
        store = torch.distributed.distributed_c10d._get_default_store()
        for name in ("ended", "place", "exchange"):
            store.delete_key(f"mopd/{name}/{rank}")  # of an earlier job of these processes
        made = cls(rank, size, group, store)
        if warn_after:
            from mopd.rank_watch import RankWatch

            made._watch = RankWatch(store, rank, size, after=warn_after)
        return made

    def at(self, place: str) -> None:
        """Note where this rank is, in words ("step 3, sampling"): what the others read of it if it is lost."""
        self.place, self._places = place, self._places + 1
        if self.size > 1:
            self._store.set(f"mopd/place/{self.rank}", f"{self._places} {place}")
        if self._watch is not None:
            self._watch.at(self._places)

    def take_waited(self) -> float:
        """Seconds in exchanges since this was last asked: what they took, and mostly the wait for the last rank."""
        waited, self._waited = self._waited, 0.0
        return waited

    def ending(self) -> None:
        """An error ends this rank. Its launcher may be about to end it too, since another rank is gone: SIGTERM no longer
        does, so that last words are said and a checkpoint is written to its end; launchers send SIGKILL later."""
        if self.size > 1 and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def stop_watching(self) -> None:
        """End the watch that says whom this rank waits for."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank, in rank order. Values as `mopd.encoding.encode` takes them. Raises RankFailed where a
        rank is lost or does not come within the timeout."""
        if self.size == 1:
            return [value]
        began = time.perf_counter()
        self._exchanges += 1
        try:
            if self._watch is not None:
                self._watch.exchanging(self._exchanges)
            return exchange(value, self.size, group=self._group)
        except RuntimeError as error:
            raise RankFailed(self.who_failed(error)) from error
        finally:
            self._waited += time.perf_counter() - began
            if self._watch is not None:
                self._watch.exchanging(0)

    def agree(self, what: str, value: Any) -> None:
        """Raise RanksDiffer where a rank's `value` (JSON values) is not rank 0's. Of mappings only the digests of their
        items travel, and the message names the items that differ."""
        if self.size == 1:
            return
        items = value if isinstance(value, Mapping) else {"": value}
        mine = {str(key): digest(item) for key, item in items.items()}
        first, *others = self.gather(mine)
        for rank, theirs in enumerate(others, 1):
            keys = sorted(key for key in first.keys() | theirs.keys() if first.get(key) != theirs.get(key))
            if keys:
                which = "" if keys == [""] else f": {', '.join(keys[:8])}" + (" …" if len(keys) > 8 else "")
                raise RanksDiffer(f"rank {rank} of {self.size} differs from rank 0 in {what}{which}. Start every rank with "
                                  "the same command, code, models and store")

    def together(self, what: str, work: Callable[[], Result]) -> Result:
        """`work()` on every rank; where it failed on any, no rank goes on: those whose own work failed raise their own
        error, the others RankFailed with the words of the first that failed."""
        if self.size == 1:
            return work()
        failure: Exception | None = None
        result: Any = None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must hear of it
            failure = error
        words = self.gather(None if failure is None else said(failure))
        if failure is not None:
            raise failure
        if failed := [rank for rank, word in enumerate(words) if word is not None]:
            raise RankFailed(f"{what} failed on rank {failed[0]} of {self.size}: {words[failed[0]]}")
        return result

    def of_first(self, work: Callable[[], Any]) -> Any:
        """What `work()` gives on rank 0, on every rank; the others do not call it."""
        return work() if self.size == 1 else self.gather(work() if self.first else None)[0]

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Around the whole job: an error is said with the rank that it ended and left as last words for the others; one
        that a collective raised because of another rank becomes RankFailed. What every rank says alike is said by rank 0."""
        try:
            yield
        except Exception as error:
            if self.size == 1:
                raise
            lost = isinstance(error, RankFailed) or of_collectives(error)
            if lost and not isinstance(error, RankFailed):
                raised: Exception = RankFailed(self.who_failed(error))
                raised.__cause__ = error
            else:
                raised = error
            line = self.ended(raised)
            if not line and not self.first:
                # as rank 0 ends (mopd/cli.py): a launcher passes on the status of whoever was first
                raise SystemExit(2 if isinstance(raised, ValueError | FileNotFoundError | FileExistsError) else 1) from None
            if line and not lost:
                print(line, file=sys.stderr, flush=True)
            raise raised from raised.__cause__
        finally:
            self.stop_watching()

    def ended(self, error: BaseException) -> str:
        """Leave this rank's last words for the others; returns them as a line for the log, "" where rank 0 says the very
        same of itself."""
        if self.size == 1:
            return ""
        words = said(error)
        try:
            self._store.set(f"mopd/ended/{self.rank}", words)
            if not self.first and self._words(0, WAIT_S / 2) == words:
                return ""
        except RuntimeError:  # the store is gone with the process that kept it
            pass
        return f"rank {self.rank} of {self.size} ended at {self.place}: {words}"

    def who_failed(self, error: BaseException) -> str:
        """Which rank is missing, as far as can be known, and what it said last."""
        head = f"rank {self.rank} of {self.size} lost the others at {self.place}"
        tail = f" ({said(error).split('. ')[0]}). Run the same command again: it goes on from the last checkpoint"
        try:
            deadline = time.monotonic() + WAIT_S
            others = [rank for rank in range(self.size) if rank != self.rank]
            while not (words := {r: w for r in others if (w := self._words(r)) is not None}) and time.monotonic() < deadline:
                time.sleep(0.05)
            if words:
                return head + ": " + "; ".join(f"rank {r} ended with {w}" for r, w in words.items()) + tail
            places = "; ".join(f"rank {r} was last seen at {self._place(r)}" for r in others)
            return f"{head}: {places}, and left no word{tail}"
        except RuntimeError:
            return f"{head}: the process that kept their common store is gone{tail}"

    def _words(self, rank: int, wait: float = 0.0) -> str | None:
        key, deadline = f"mopd/ended/{rank}", time.monotonic() + wait
        while not self._store.check([key]):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.05)
        return self._store.get(key).decode()

    def _place(self, rank: int) -> str:
        from mopd.rank_watch import place_of

        return place_of(self._store, rank)[1]


def exchange(value: Any, size: int, *, group: Any = None, device: Any = "cpu") -> list[Any]:
    """The value of every one of `size` processes, in rank order, as plain bytes (`mopd.encoding`: nothing that is received
    is run). Every process must call it. `group` and `device` as the back end wants its tensors."""
    if size == 1:
        return [value]
    import torch

    data = torch.frombuffer(bytearray(encode(value)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch.distributed.all_gather(sizes, torch.tensor([len(data)], device=device), group=group)
    counts = [int(count) for count in sizes]
    padded = torch.zeros(max(counts), dtype=torch.uint8)
    padded[:len(data)] = data
    parts = [torch.empty(max(counts), dtype=torch.uint8, device=device) for _ in range(size)]
    torch.distributed.all_gather(parts, padded.to(device), group=group)
    return [decode(memoryview(part.cpu().numpy())[:count]) for part, count in zip(parts, counts, strict=True)]


def leave() -> None:
    """Leave the process group together with the other ranks, if there are any: the end of a job that went well. Every rank
    must call it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()  # or the threads of its back end may still run when the process ends


def of_collectives(error: BaseException) -> bool:
    """Whether an error is what a failed collective raises here (and so the fault of another rank)."""
    if type(error).__module__.startswith("torch.distributed"):
        return True
    return type(error) is RuntimeError and any(word in str(error).lower() for word in TELLS)


def digest(value: Any) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def said(error: BaseException) -> str:
    """An error in one line of at most 500 characters."""
    line = " ".join(str(error).split())
    return f"{type(error).__name__}: {line}"[:500]


def start_on_this_machine(ranks: int, arguments: list[str]) -> None:
    """Replace this process by torchrun with `ranks` processes of `mopd` with these arguments; does not return."""
    environment = dict(os.environ)
    # Their parent is torchrun, which stops them; that this process ends with its pipeline holds for torchrun too.
    environment.pop("MOPD_PIPELINE", None)
    command = [sys.executable, "-m", "mopd.local_ranks", "--standalone", f"--nproc_per_node={ranks}", "-m", "mopd.cli",
               *arguments]
    sys.stdout.flush()
    os.execvpe(sys.executable, command, environment)
