"""Scores that were asked for once: by teacher revision and what was asked, bounded in bytes, the oldest use goes first."""

from __future__ import annotations

import collections
import dataclasses
import threading
from typing import Any

import numpy as np

from teachers.scoring.requests import ScoreAnswer

ENTRY_BYTES = 512
# what Python keeps around one entry's arrays


@dataclasses.dataclass(frozen=True)
class Entry:
    """An answer, and how often it was asked for: one that lacks scores is asked for again a few times."""

    answer: ScoreAnswer
    asked: int = 1

    @property
    def size(self) -> int:
        """Bytes."""
        parts: tuple[Any, ...] = (self.answer.logprob, self.answer.top_ids, self.answer.top_logprob, self.answer.hidden)
        return ENTRY_BYTES + sum(part.nbytes for part in parts if isinstance(part, np.ndarray))


class ScoreCache:
    """(teacher revision, request key) → Entry, for all teachers of a run and all threads.

    The request key (`ScoreRequest.key`) is a hash of prefix, scored tokens, what, k, temperature and candidates: nothing
    is ever looked up by a position in a batch. `limit_bytes` bounds what is kept; `evicted` counts entries that it cost.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.bytes = self.evicted = 0
        self._entries: collections.OrderedDict[tuple[str, bytes], Entry] = collections.OrderedDict()
        self._lock = threading.Lock()

    def get(self, revision: str, key: bytes) -> Entry | None:
        with self._lock:
            found = self._entries.get((revision, key))
            if found is not None:
                self._entries.move_to_end((revision, key))
            return found

    def put(self, revision: str, key: bytes, entry: Entry) -> None:
        with self._lock:
            self._drop((revision, key))
            self._entries[revision, key] = entry
            self.bytes += entry.size
            while self.bytes > self.limit_bytes and self._entries:
                self._drop(next(iter(self._entries)))
                self.evicted += 1

    def forget(self, revision: str) -> int:
        """Drop everything of one revision (its teacher turned out to be another); returns how many entries."""
        with self._lock:
            chosen = [name for name in self._entries if name[0] == revision]
            for name in chosen:
                self._drop(name)
            return len(chosen)

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, name: tuple[str, bytes]) -> None:
        entry = self._entries.pop(name, None)
        if entry is not None:
            self.bytes -= entry.size
