"""What the two vLLM engines of the student have in common: turns that are written in pieces, and weights from a folder."""

from __future__ import annotations

import abc
import collections
import os
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mopd.sampling.base import Completion, EngineTrouble, EngineUnreachable, Request, SamplingOptions
from mopd.sampling.vllm_turns import Writing, check_request, check_vllm_options, told_of
from mopd.sampling.weight_folder import WeightFolder

SHARED_MEMORY = "/dev/shm"
# Seconds between two tries to write a turn of `generate` that had trouble: the first and the longest; each doubles it.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0


class TurnEngine(abc.ABC):
    """Common ground of the StreamingEngines over vLLM. An heir writes turns (`_begin`), gives them up (`_end`), hears of them
    (`_hear`), and takes a folder of weights (`_take`).

    vocabulary     rows of the model's output
    max_positions  tokens of the longest context with what is written behind it; None where it does not say
    max_logprobs   most ids that it tells of each token; -1: all
    max_batch      turns that are worth having under way at once
    """

    tells_ends = True  # `generate` takes `ended`
    takes, layout = "folder", "checkpoint"  # see mopd/sampling/sync.py
    vocabulary: int
    max_positions: int | None
    max_logprobs: int

    def __init__(self, *, max_batch: int, version: int, patience_s: float = 0.0):
        self.max_batch, self.version, self.patience_s = max_batch, version, patience_s
        self.stats: dict[str, Any] = {"sampled_tokens": 0, "prompt_tokens": 0, "turns": 0, "pieces": 0, "unused_tokens": 0,
                                      "troubles": collections.Counter()}
        self._writing: dict[Hashable, Writing] = {}
        self._sessions: set[str] = set()
        self._count = 0

    # For heirs

    @abc.abstractmethod
    def _begin(self, key: Hashable, writing: Writing) -> None:
        """Have a turn written."""

    @abc.abstractmethod
    def _end(self, keys: list[Hashable]) -> None:
        """Give turns up that are under way."""

    @abc.abstractmethod
    def _hear(self, timeout: float) -> list[tuple[Hashable, Completion | EngineTrouble]]:
        """Turns that have ended since the last call; wait for one, at most `timeout` seconds."""

    @abc.abstractmethod
    def _take(self, folder: Path, version: int) -> None:
        """Take a published folder of weights."""

    # The interface

    @property
    def under_way(self) -> int:
        """Turns that were submitted and have not ended."""
        return len(self._writing)

    def submit(self, key: Hashable, request: Request, options: SamplingOptions) -> None:
        """Begin one turn. Raises ValueError for what vLLM cannot do or tell exactly, a request without tokens or room, and
        for a key or a session that is under way."""
        told = self._check(request, options)
        if key in self._writing:
            raise ValueError(f"a turn with the key {key!r} is under way")
        if request.session is not None and request.session in self._sessions:
            raise ValueError(f"session {request.session!r} has a turn under way")
        writing = Writing(request, options, told=told)
        self._begin(key, writing)
        self._writing[key] = writing
        if request.session is not None:
            self._sessions.add(request.session)

    def _check(self, request: Request, options: SamplingOptions) -> int:
        check_vllm_options(options)
        told = told_of(options, self.max_logprobs, self.vocabulary)
        check_request(request, options, self.vocabulary, self.max_positions)
        return told

    def poll(self, timeout: float = 0.0) -> list[tuple[Hashable, Completion | EngineTrouble]]:
        """Turns that have ended, after at most about `timeout` seconds; with none under way at once."""
        if not self._writing:
            return []
        found = self._hear(timeout)
        for key, what in found:
            writing = self._forget(key)
            if isinstance(what, Completion):
                self.stats["turns"] += 1
                self.stats["sampled_tokens"] += len(what.tokens)
                self.stats["prompt_tokens"] += len(writing.request.tokens)
                self.stats["pieces"] += len(writing.pieces)
                self.stats["unused_tokens"] += writing.unused
            else:
                self.stats["troubles"][what.reason] += 1
        return found

    def _forget(self, key: Hashable) -> Writing:
        writing = self._writing.pop(key)
        self._sessions.discard(writing.request.session)
        return writing

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Forget turns under way, unknown keys too; the engine drops their work."""
        gone = [key for key in keys if key in self._writing]
        for key in gone:
            self._forget(key)
        self._end(gone)

    def generate(self, requests: list[Request], options: SamplingOptions,
                 ended: Callable[[int, Completion], None] | None = None) -> list[Completion]:
        """One turn for each request, in their order; `ended` is told each as soon as it is written. A turn with trouble is
        asked for again with growing pauses.

        Raises ValueError as `submit`, before anything is asked; RuntimeError while submitted turns are under way;
        EngineUnreachable where a turn had trouble for `patience_s` seconds.
        """
        names = [r.session for r in requests if r.session is not None]
        if len(set(names)) != len(names):
            raise ValueError(f"session {next(n for n in names if names.count(n) > 1)!r} is in one batch twice")
        if self.under_way:
            raise RuntimeError(f"{self.under_way} submitted turns are under way; poll them to their end before generate")
        for request in requests:
            self._check(request, options)
        found: list[Completion | None] = [None] * len(requests)
        since: float | None = None  # a turn was written last, or trouble began
        again: list[int] = []
        pause, due = FIRST_PAUSE, 0.0
        try:
            for number, request in enumerate(requests):
                self.submit(number, request, options)
            while self.under_way or again:
                heard = self.poll(0.5) if self.under_way else []
                for number, what in heard:
                    if isinstance(what, Completion):
                        found[number], since, pause = what, None, FIRST_PAUSE
                        if ended is not None:
                            ended(number, what)
                        continue
                    since = time.monotonic() if since is None else since
                    if time.monotonic() - since >= self.patience_s:
                        raise EngineUnreachable(f"{what.words} ({what.reason}), for {self.patience_s:g} s "
                                                "(sampling.engine_wait_s)")
                    if not again:
                        due = time.monotonic() + pause
                        pause = min(2 * pause, LONGEST_PAUSE)
                    again.append(number)
                if again and time.monotonic() >= due:
                    for number in again:
                        self.submit(number, requests[number], options)
                    again = []
                elif again and not self.under_way:
                    time.sleep(max(0.0, due - time.monotonic()))
        finally:
            self.abort(list(self._writing))
        return found

    def end_sessions(self, sessions: Iterable[str]) -> None:  # noqa: B027 - an heir may have nothing to forget
        """vLLM finds known prefixes by itself, and drops them when it needs the room."""

    def load_folder(self, folder: str | Path, version: int) -> None:
        """Take the weights of a published folder in the layout "checkpoint" (mopd/sampling/weight_folder.py). Turns under way
        go on: what they have is read again under the new weights, each token keeps the version that sampled it."""
        self._take(Path(folder), version)
        self.version = version

    def load_weights(self, weights: Iterable[tuple[str, Any]], version: int) -> None:
        """Take weights under their Hugging Face names, experts one by one, by way of a folder that is removed afterwards."""
        place = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="mopd-weights-", dir=place) as root:
            made = WeightFolder(Path(root) / "weights").write(weights, version, layout=self.layout)
            self.load_folder(made.path, version)

    @abc.abstractmethod
    def score(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probability at temperature 1 of each of `tokens` uint32 [T] but the first, given those before
        it, with the present weights."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back; turns under way are forgotten."""
