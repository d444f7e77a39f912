"""Runs a set of jobs that depend on one another, several at a time, and goes on where an earlier run stopped.

A job is a command of this package in a process of its own; it knows nothing about models. What a job made is kept as
long as the parts of the config that it reads and everything it depends on are the same.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from mopd.locks import only_process
from mopd.progress import human_seconds


class JobFailed(RuntimeError):
    """A job ended with an error; the message holds its last words and where the whole log is."""


@dataclasses.dataclass
class Job:
    """One command.

    text       what it does, in plain words
    arguments  of the command line
    outputs    paths that exist when it is done; what lies there inside the run's folder is removed before it starts
    needs      names of the jobs whose results it takes
    seconds    a guess of its duration on two quiet cores
    reads      everything else that its result depends on, as JSON values; None: its arguments
    exclusive  it runs alone with all cores
    """

    name: str
    text: str
    arguments: list[str]
    outputs: list[Path]
    needs: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 10.0
    reads: Any = None
    exclusive: bool = False


class Pipeline:
    """Runs `jobs` in the folder `run`, as the only pipeline there. Records, logs and progress files are in `run/jobs`."""

    def __init__(self, run: Path, jobs: list[Job], *, slots: int | None = None, console: Console | None = None):
        self.run_folder = Path(run)
        self.folder = self.run_folder / "jobs"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.jobs = {job.name: job for job in jobs}
        if len(self.jobs) != len(jobs):
            raise ValueError("two jobs have the same name")
        self.cores = len(os.sched_getaffinity(0))
        self.slots = slots or max(1, min(self.cores, 4))
        self.console = console or Console(stderr=True, highlight=False)
        self.keys: dict[str, str] = {}
        for job in jobs:
            missing = [n for n in job.needs if n not in self.keys]
            if missing:
                raise ValueError(f"job {job.name} needs {missing}, which must stand before it")
            content = [job.name, job.arguments if job.reads is None else job.reads, [self.keys[n] for n in job.needs]]
            self.keys[job.name] = hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
        self.seconds: dict[str, float] = {}
        self.spans: dict[str, tuple[float, float]] = {}  # when each job ran, by the clock on the wall
        self.pace = 1.0  # how much longer jobs take here than guessed

    def finished(self, job: Job) -> bool:
        """Whether an earlier run has done this very job and its outputs are still there."""
        record = self.folder / f"{job.name}.json"
        if not record.is_file():
            return False
        try:
            content = json.loads(record.read_text())
        except ValueError:
            return False
        if content.get("key") != self.keys[job.name] or not all(p.exists() for p in job.outputs):
            return False
        self.seconds[job.name] = float(content["seconds"])
        self.spans[job.name] = tuple(content.get("span", (0.0, self.seconds[job.name])))
        return True

    @property
    def wall_seconds(self) -> float:
        """Seconds in which at least one of the finished jobs ran, whether in this call or in the one that made it."""
        total, until = 0.0, 0.0
        for start, end in sorted(self.spans.values()):
            total += max(end - max(start, until), 0.0)
            until = max(until, end)
        return total

    def run(self, on_done: Callable[[Job], None] | None = None) -> dict[str, float]:
        """Run what is not done yet; returns the seconds that each job took (now or when it was made).

        Raises JobFailed after the jobs beside a failed one were ended, or when another pipeline runs in this folder.
        SIGINT and SIGTERM end the running jobs and keep what is finished.
        """
        busy = JobFailed(f"another process is at work in {self.run_folder}; wait for it, or give this one a folder of its "
                         "own with run=FOLDER")
        with only_process(self.folder / ".lock", busy):
            return self._run(on_done)

    def _run(self, on_done: Callable[[Job], None] | None) -> dict[str, float]:
        done = {name for name, job in self.jobs.items() if self.finished(job)}
        # A job whose input is made anew must run again even if its own record is still there.
        for name, job in self.jobs.items():
            if name in done and any(n not in done for n in job.needs):
                done.discard(name)
                del self.seconds[name], self.spans[name]
        if done:
            self._say(f"{len(done)} of {len(self.jobs)} stages are already there and are reused.")
        running: dict[str, tuple[subprocess.Popen, float]] = {}
        shown: dict[str, float] = {}
        told: list[int] = []

        def stop(number: int, _) -> None:
            told.append(number)
            raise KeyboardInterrupt

        # an ignored SIGINT stays ignored: that is how a shell starts what it puts in the background
        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)
                    if number == signal.SIGTERM or signal.getsignal(number) is not signal.SIG_IGN}
        try:
            while len(done) < len(self.jobs):
                if told:  # raised where Python drops exceptions, in a finaliser for instance
                    raise KeyboardInterrupt
                for name, job in self.jobs.items():
                    if name in done or name in running or any(n not in done for n in job.needs):
                        continue
                    alone = any(self.jobs[n].exclusive for n in running)
                    if alone or len(running) >= self.slots or (job.exclusive and running):
                        break  # in order, so that an exclusive job gets its turn
                    number = len(done) + len(running) + 1
                    self._say(f"[bold]\\[{number}/{len(self.jobs)}][/bold] {escape(job.text)} "
                              f"[dim](about {human_seconds(job.seconds * self.pace)}; all that is left: about "
                              f"{human_seconds(self.left(done, running))})[/dim]")
                    running[name] = (self._start(job), time.time())
                time.sleep(0.1)
                for name in list(running):
                    process, start = running[name]
                    code = process.poll()
                    self._show(running, shown, done)
                    if code is None:
                        continue
                    del running[name]
                    self._finish(self.jobs[name], code, start, time.time())
                    done.add(name)
                    if on_done:
                        on_done(self.jobs[name])
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            for process, _ in running.values():
                _end(process)
        return dict(self.seconds)

    def _finish(self, job: Job, code: int, start: float, end: float) -> None:
        """Record a job that ended; raises JobFailed where it did not do what it should."""
        if code != 0:
            raise JobFailed(self._last_words(job, code))
        missing = [str(p) for p in job.outputs if not p.exists()]
        if missing:
            raise JobFailed(f"{job.name} ended well but left no {missing}; see {self._log(job)}")
        self.seconds[job.name], self.spans[job.name] = end - start, (start, end)
        record = self.folder / f"{job.name}.json"
        temporary = record.with_suffix(".tmp")
        temporary.write_text(json.dumps({"key": self.keys[job.name], "seconds": end - start, "span": [start, end]}))
        temporary.replace(record)
        guessed = sum(self.jobs[n].seconds for n in self.seconds)
        self.pace = min(max(sum(self.seconds.values()) / guessed, 0.3), 5.0) if guessed else 1.0
        said = self._said(job)
        self._say(f"      {job.name} done in {human_seconds(end - start)}" + (f": {escape(said[0])}" if said else ""))
        for line in said[1:]:
            self._say(f"        {escape(line)}")

    def _say(self, text: str) -> None:
        # In a log every message is one line, however narrow it thinks its reader is.
        self.console.print(text, soft_wrap=not self.console.is_terminal)

    def left(self, done: set[str], running: dict[str, tuple[subprocess.Popen, float]]) -> float:
        """Seconds until all jobs are done, by playing the schedule through with the guessed durations."""
        clock, finished = 0.0, set(done)
        ends = {}
        for name, (_, start) in running.items():
            ends[name] = max(self.jobs[name].seconds * self.pace - (time.time() - start), 1.0)
        while len(finished) < len(self.jobs):
            for name, job in self.jobs.items():
                if name in finished or name in ends or any(n not in finished for n in job.needs):
                    continue
                if any(self.jobs[n].exclusive for n in ends) or len(ends) >= self.slots or (job.exclusive and ends):
                    break
                ends[name] = clock + job.seconds * self.pace
            first = min(ends, key=lambda n: (ends[n], n))
            clock = max(clock, ends.pop(first))
            finished.add(first)
        return clock

    def _start(self, job: Job) -> subprocess.Popen:
        threads = self.cores if job.exclusive else max(1, self.cores // self.slots)
        environment = dict(os.environ, MOPD_PROGRESS=str(self.folder / f"{job.name}.progress"),
                           MOPD_PIPELINE=str(os.getpid()),
                           OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads), OMP_WAIT_POLICY="PASSIVE",
                           PYTHONUNBUFFERED="1", PYTHONWARNINGS="ignore")
        Path(environment["MOPD_PROGRESS"]).unlink(missing_ok=True)
        (self.folder / f"{job.name}.json").unlink(missing_ok=True)
        for output in job.outputs:
            # What an earlier config left would be taken for this one's, or be added to. Other folders are the user's.
            if not output.resolve().is_relative_to(self.run_folder.resolve()):
                continue
            if output.is_dir():
                shutil.rmtree(output)
            else:
                output.unlink(missing_ok=True)
        with open(self._log(job), "w") as log:
            return subprocess.Popen([sys.executable, "-m", "mopd.cli", *job.arguments], stdout=log,
                                    stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                                    start_new_session=True)

    def _log(self, job: Job) -> Path:
        return self.folder / f"{job.name}.log"

    def _last_words(self, job: Job, code: int) -> str:
        lines = self._log(job).read_text(errors="replace").splitlines()
        words = "\n".join(f"    {line}" for line in lines[-15:])
        return f"{job.name} failed (exit status {code}). Its last words, from {self._log(job)}:\n{words}"

    def _said(self, job: Job) -> list[str]:
        """What a job printed in lines that begin with `result: `, shown to the user."""
        lines = self._log(job).read_text(errors="replace").splitlines()
        return [line.removeprefix("result: ") for line in lines if line.startswith("result: ")]

    def _show(self, running: dict, shown: dict[str, float], done: set[str]) -> None:
        now = time.monotonic()
        every = 1.0 if self.console.is_terminal else 30.0
        if now - shown.get("", 0.0) < every:
            return
        shown[""] = now
        parts = []
        for other in running:
            try:
                state = json.loads((self.folder / f"{other}.progress").read_text())
            except (OSError, ValueError):
                parts.append(f"{other} starting")
                continue
            share = min(state["done"] / state["total"], 1.0)
            bar = "█" * int(share * 12) + "░" * (12 - int(share * 12))
            parts.append(f"{other} {bar} {share:4.0%} {state['text']}")
        line = "   ".join(parts) + f"   about {human_seconds(self.left(done, running))} left in all"
        if self.console.is_terminal:
            self.console.file.write(f"\r\033[K{line[: self.console.width - 1]}\r")
            self.console.file.flush()
        else:
            self.console.print(f"      {line}", markup=False, soft_wrap=True)


def _end(process: subprocess.Popen) -> None:
    """End a job and everything it started."""
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:
            return
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue
        else:
            break
