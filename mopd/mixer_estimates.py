"""Running means of duration, tokens and acceptance per source, taken in launch order so that no restart biases them.

Work that happens to be finished at some moment is short work: right after a start, and again after every restart, the
first to end are the short ones. A mean over what has ended is then too low. Here a launch enters the means only when
every earlier launch of its source has entered: what is averaged is always the first n launches, whole, whatever their
length. A launch that a restart interrupts keeps its number and enters once, with its full duration.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Prior:
    """What is believed of a source before any of its work has ended; weighs as much as one launch.

    seconds > 0 of one launch; tokens > 0 of one sequence; acceptance in (0, 1].
    """

    seconds: float = 1.0
    tokens: float = 1.0
    acceptance: float = 1.0

    def __post_init__(self) -> None:
        for name in ("seconds", "tokens", "acceptance"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"prior {name} must be positive, got {value}")
        if self.acceptance > 1:
            raise ValueError(f"prior acceptance must lie in (0, 1], got {self.acceptance}")


class LaunchOrderMeans:
    """Means of one source over its launches 0, 1, 2, …: plain at first, exponential with `memory` launches later.

    A launch enters with weight 1 / min(n + 1, memory), n its place; the prior counts as the launch before the first.
    """

    def __init__(self, prior: Prior, memory: int = 128):
        if memory < 2:
            raise ValueError(f"memory must be at least 2 launches, got {memory}")
        self.memory = memory
        self.seconds, self.tokens, self.acceptance = prior.seconds, prior.tokens, prior.acceptance
        self.entered = 0
        self._early: dict[int, tuple[float, float, float | None]] = {}

    def end(self, number: int, *, seconds: float, tokens: float | None, accepted: bool | None) -> None:
        """Launch `number` has ended after `seconds` ≥ 0 in flight; `tokens` a sequence of it (None where none ended).
        `accepted` None: nobody judged it. Raises ValueError if it ended before, or for numbers out of range."""
        if number < self.entered or number in self._early:
            raise ValueError(f"launch {number} has ended before")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds of launch {number} must be finite and not negative, got {seconds}")
        self._early[number] = (seconds, self.tokens if tokens is None else float(tokens),
                               None if accepted is None else float(accepted))
        while self.entered in self._early:
            took, length, verdict = self._early.pop(self.entered)
            self.entered += 1
            weight = 1.0 / min(self.entered + 1, self.memory)
            self.seconds += weight * (took - self.seconds)
            self.tokens += weight * (length - self.tokens)
            if verdict is not None:
                self.acceptance += weight * (verdict - self.acceptance)

    def duration(self, head_elapsed: float = 0.0) -> float:
        """Mean seconds of a launch. `head_elapsed`: how long the launch that is next to enter (number `entered`) has been
        running; it will take at least that, so the mean counts it as soon as that is more than the mean."""
        more = max(0.0, head_elapsed - self.seconds)
        return max(self.seconds + more / min(self.entered + 2, self.memory), 1e-9)

    def state_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {"seconds": self.seconds, "tokens": self.tokens, "acceptance": self.acceptance, "entered": self.entered,
                "early": [[number, *self._early[number]] for number in sorted(self._early)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.seconds, self.tokens, self.acceptance = state["seconds"], state["tokens"], state["acceptance"]
        self.entered = int(state["entered"])
        self._early = {int(number): (took, length, verdict) for number, took, length, verdict in state["early"]}
