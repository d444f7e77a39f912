"""Runs the commands of a job (mopd/launch.py) and looks after them: servers that end are started again, a learner that loses
a rank goes on from its checkpoint, and nothing is left behind at the end.

Commands for this machine are child processes; for others `ssh HOST` runs a script in the job's folder, which every machine
sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mopd.config_placement import shared_devices
from mopd.launch import Job, hostfile, is_here, jobs_of, machine_count, sbatch, write_config

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # servers of the job, never through a proxy
LAST_LINES, LOOKED_AT = 6, 300  # of a log: that are shown, in which last words are looked for


class LaunchFailed(RuntimeError):
    """A job that could not go on; the message names the part, its host, its log and its last words."""


@dataclasses.dataclass
class _Process:
    job: Job
    process: subprocess.Popen
    log: Path
    starts: int = 1


def write_scripts(jobs: Sequence[Job], place: Path, folder: Path) -> None:
    """NAME.sh of every job in `place`, to be run by hand or by `Supervisor`."""
    place.mkdir(parents=True, exist_ok=True)
    for job in jobs:
        script = place / f"{job.name}.sh"
        script.write_text(job.script(str(folder)))
        script.chmod(0o755)


def launch(config: Any, hosts: Sequence[str], *, slurm: bool = False, by: str = "torchrun",
           place: Path | None = None, dry_run: bool = False, port: int = 29500, restarts: int = 5,
           start_s: float = 1800.0, resume: str = "auto", options: Sequence[str] = ()) -> int:
    """`mopd launch`: write the commands of the job into `place` (RUN/launch) and, unless `dry_run`, run them; with `slurm`
    hand the batch file to sbatch. Returns the exit status. Raises CannotLaunch and LaunchFailed."""
    place, folder = (place or Path(config.run) / "launch").absolute(), Path.cwd()
    place.mkdir(parents=True, exist_ok=True)
    write_config(config, path := place / "config.yaml")
    for words in shared_devices(config.placement):
        print(f"warning {words}", file=sys.stderr)
    if slurm:
        names = [f"$HOST_{number}" for number in range(machine_count(config.placement))]
        file = place / "job.sbatch"
        jobs = jobs_of(config, path, names, port=port, resume=resume)
        file.write_text(sbatch(config, jobs, str(folder), place, options=options, wait_s=round(start_s)))
        print(f"wrote {file}: {len(jobs)} command{'s' * (len(jobs) > 1)} on {len(names)} machine{'s' * (len(names) > 1)}")
        if dry_run:
            return 0
        try:
            return subprocess.run(["sbatch", str(file)]).returncode
        except FileNotFoundError as error:
            raise LaunchFailed(f"there is no sbatch on this machine; hand {file} in where there is one") from error
    jobs = jobs_of(config, path, hosts, by=by, port=port, resume=resume)
    if by == "deepspeed":
        (place / "hostfile").write_text(hostfile(config, hosts))
        jobs = [dataclasses.replace(job, command=tuple(str(place / "hostfile") if word == "HOSTFILE" else word
                                                       for word in job.command)) for job in jobs]
    write_scripts(jobs, place, folder)
    for job in jobs:
        print(f"{job.host}: bash {place / job.name}.sh" + (f"   # {job.url}" if job.url else ""))
    own = Path(config.run) / "students" / config.train.name / f"seed-{config.seed}" / "config.json"
    before = _written(own)  # a training that begins writes it anew
    return 0 if dry_run else Supervisor(jobs, place, restarts=restarts, start_s=start_s,
                                        end_s=config.train.stop_within_s + 60, begun=lambda: _written(own) != before).run()


class Supervisor:
    """Keeps the jobs of a launch running.

    place      folder with their scripts and logs
    restarts   how many times servers and how many times the learner may be started again, each, in all
    start_s    seconds that a server may take to answer
    end_s      seconds that processes have to end when told to
    begun      whether the training has begun: from then on a start goes on, also of a job that was to start anew
    say        takes a line of what happens
    """

    def __init__(self, jobs: Sequence[Job], place: Path, *, restarts: int = 5, start_s: float = 1800.0, end_s: float = 180.0,
                 begun: Callable[[], bool] = lambda: True,
                 say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)):
        self.place, self.restarts, self.start_s, self.end_s, self.say = place, restarts, start_s, end_s, say
        self.begun = begun
        self.servers = [job for job in jobs if job.kind == "server"]
        self.learners = [job for job in jobs if job.kind == "learner"]
        self._running: dict[str, _Process] = {}
        self._spent = {"server": 0, "learner": 0}
        self._asked = 0

    def run(self) -> int:
        """Start everything, see it through; the learner's exit status, 128 + N after signal N. Raises LaunchFailed."""
        before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for job in self.servers:
                self._start(job)
            self._until_they_answer([job for job in self.servers])
            return self._see_through()
        finally:
            self._end(list(self._running.values()))
            for number, handler in before.items():
                signal.signal(number, handler)

    def _ask(self, number: int, frame: object) -> None:
        self._asked = number

    def _start(self, job: Job) -> None:
        script = self.place / f"{job.name}.sh"
        command = ["bash", str(script)]
        if not is_here(job.host):
            command = ["ssh", "-tt", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", job.host,
                       f"exec bash {shlex.quote(str(script))}"]
        log = self.place / f"{job.name}.log"
        with open(log, "ab") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                       start_new_session=True)
        old = self._running.get(job.name)
        self._running[job.name] = _Process(job, process, log, 1 if old is None else old.starts + 1)
        self.say(f"{job.name} on {job.host}: started (pid {process.pid}), log {log}")

    def _until_they_answer(self, jobs: Sequence[Job]) -> None:
        deadline, waiting = time.monotonic() + self.start_s, list(jobs)
        while waiting and not self._asked:
            waiting = [job for job in waiting if not _answers(job.url)]
            for job in waiting:
                self._mind_server(self._running[job.name])
            if waiting and time.monotonic() > deadline:
                raise LaunchFailed(f"{waiting[0].name} on {waiting[0].host} does not answer at {waiting[0].url} after "
                                   f"{self.start_s:g} s. {_said(self._running[waiting[0].name])}")
            time.sleep(0.5)

    def _mind_server(self, found: _Process) -> None:
        if (status := found.process.poll()) is None:
            return
        words = _said(found)
        self._spend("server", f"{found.job.name} on {found.job.host} ended with status {status}. {words}")
        self.say(f"{found.job.name} on {found.job.host} ended with status {status} and is started again. {words}")
        self._clear(found)
        self._start(found.job)

    def _spend(self, kind: str, words: str) -> None:
        self._spent[kind] += 1
        if self._spent[kind] > self.restarts:
            raise LaunchFailed(f"{words} It was started again {self.restarts} times already; mend the cause, or raise "
                               "--restarts")

    def _see_through(self) -> int:
        if self._asked:
            return 128 + self._asked
        for job in self.learners:
            self._start(job)
        told = False
        while True:
            learners = [self._running[job.name] for job in self.learners]
            states = [found.process.poll() for found in learners]
            if self._asked and not told:
                told = True
                self.say(f"told to end ({signal.Signals(self._asked).name}): the learner saves and ends")
                for found in learners:
                    self._tell(found, signal.SIGTERM)
                limit = time.monotonic() + self.end_s
            if told and time.monotonic() > limit:
                return 128 + self._asked
            if all(state is not None for state in states):
                if told:
                    return 128 + self._asked
                if not any(states):
                    return 0
                self._again(learners, states)
            elif any(states) and not told:
                # One machine's part is over: the others notice it within train.ranks_timeout, this hastens it.
                self._await(learners)
                self._end([found for found in learners if found.process.poll() is None])
            for job in self.servers:
                if not told:
                    self._mind_server(self._running[job.name])
            time.sleep(0.2)

    def _await(self, learners: Sequence[_Process], seconds: float = 20.0) -> None:
        """Let the others find out by themselves and leave their last words."""
        deadline = time.monotonic() + seconds
        while any(found.process.poll() is None for found in learners) and time.monotonic() < deadline:
            time.sleep(0.2)

    def _again(self, learners: Sequence[_Process], states: Sequence[int | None]) -> None:
        ended = [(found, state) for found, state in zip(learners, states, strict=True) if state]
        words = " ".join(f"{found.job.name} on {found.job.host} ended with status {state}. {_said(found)}"
                         for found, state in ended[:4])
        if any(state == 2 for _, state in ended):  # of a wrong configuration: it would end so again
            raise LaunchFailed(words)
        self._spend("learner", words)
        goes_on = self.begun()
        self.say(f"{words} All learner processes start again" + " and go on from the last checkpoint" * goes_on)
        for found in learners:
            self._clear(found)
            if goes_on:
                script = self.place / f"{found.job.name}.sh"
                script.write_text(script.read_text().replace(" --resume never", " --resume auto"))
        self._until_they_answer(self.servers)
        for job in self.learners:
            self._start(job)

    def _tell(self, found: _Process, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(found.process.pid, number)

    def _clear(self, found: _Process) -> None:
        """What an ended process left of its group."""
        self._tell(found, signal.SIGKILL)

    def _end(self, running: Sequence[_Process]) -> None:
        for found in running:
            if found.process.poll() is None:
                self._tell(found, signal.SIGTERM)
        deadline = time.monotonic() + min(self.end_s, 60.0)
        for found in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                found.process.wait(max(0.1, deadline - time.monotonic()))
            self._clear(found)
            found.process.wait()


def _written(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _answers(url: str) -> bool:
    try:
        with _DIRECT.open(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, ValueError):
        return False


def _said(found: _Process) -> str:
    """What a process's log ends with: its last words where it left some, which a launcher's own lines would bury."""
    lines = [line.strip() for line in found.log.read_text(errors="replace").splitlines() if line.strip()]
    words = [line for line in lines[-LOOKED_AT:] if re.match(r"error: |rank \d+ of \d+ ended", line)]
    if not lines:
        return f"Its log {found.log} is empty."
    return f"Its log {found.log} ends with: {' | '.join(words[-2:] or lines[-LAST_LINES:])}"
