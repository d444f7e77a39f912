"""Progress of one piece of work: a bar on a terminal, plain lines in a log, and a file that a pipeline can watch.

A pipeline sets MOPD_PROGRESS to a path; this process then writes {"done", "total", "text", "seconds"} there (whole or
not at all), and the pipeline draws the bars of all its jobs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def human_seconds(seconds: float) -> str:
    """`95` → `1m35s`."""
    seconds = int(round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


class Progress:
    """Counts `done` of `total` units of `title`; `update` may be called as often as one likes."""

    def __init__(self, title: str, total: float, *, interval: float = 2.0):
        self.title, self.total, self.interval = title, max(total, 1e-9), interval
        self.file = os.environ.get("MOPD_PROGRESS")
        self.start, self.last, self.done = time.monotonic(), -1e9, 0.0
        self.first: float | None = None
        self.update(0, "")

    def update(self, done: float, text: str = "") -> None:
        """Say that `done` units are finished. `text` is shown behind the bar."""
        self.done = done
        if self.first is None or done < self.first:
            self.first, self.first_time = done, time.monotonic()
        now = time.monotonic()
        if now - self.last < self.interval and done < self.total:
            return
        self.last = now
        if self.file:
            temporary = Path(f"{self.file}.tmp")
            temporary.write_text(json.dumps(
                {"done": done, "total": self.total, "title": self.title, "text": text, "seconds": now - self.start}))
            temporary.replace(self.file)
            return
        # The rate counts only what this process did: a resumed run starts with work already done.
        worked = done - self.first
        left = (now - self.first_time) / worked * (self.total - done) if worked > 0 else None
        line = f"{self.title}: {done:g}/{self.total:g}" + (f", {human_seconds(left)} left" if left else "") + (
            f"  {text}" if text else "")
        if sys.stderr.isatty():
            print(f"\r\033[K{line}", end="\n" if done >= self.total else "", file=sys.stderr, flush=True)
        elif done == 0 or done >= self.total or int(done / self.total * 10) != getattr(self, "tenth", -1):
            self.tenth = int(done / self.total * 10)
            print(line, file=sys.stderr, flush=True)
