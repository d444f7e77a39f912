"""Everything that `mopd train` stands on, at the smallest size: random models with one tokenizer, a store, a config."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from mopd.config import Config, load_config
from mopd.domains import Domain, import_demonstrations, open_domains
from mopd.environments.demonstrations import demonstrate, write_transcripts
from mopd.learner.model import TinyMoEConfig, load_model, new_tiny_moe, save_model
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import transcript_messages
from teachers.collect import collect_domain

REPOSITORY = Path(__file__).resolve().parents[1]
CONFIG = """
run: {run}
seed: 1
threads: 1
store: {run}/store
student: {{model: {run}/base}}
teachers:
  embodied: {{model: {run}/teachers/embodied}}
  game: {{model: {run}/teachers/game}}
domains:
  embodied:
    environment: babyai
    options: {{sizes: {{train: 60, development: 20, test: 20}}}}
    teacher: embodied
    max_turns: 4
    max_turn_tokens: 6
    demonstrations: 12
    novice_episodes: 0
    teacher_episodes: 4
    environments: 8
  game:
    environment: textworld_express
    options: {{games: {{peckingorder: ""}}}}
    teacher: game
    max_turns: 4
    max_turn_tokens: 6
    demonstrations: 6
    novice_episodes: 0
    teacher_episodes: 3
    environments: 8
selection: {{success_only: false}}
train:
  steps: 4
  samples_per_step: 8
  prefix_fraction: 0.5
  checkpoint_every: 100
  adaptive_smoothing: 0.2
  optimizer: {{learning_rate: 2.0e-3, warmup_steps: 0}}
"""


@dataclasses.dataclass
class TinyRun:
    """The parts lie in `folder` and are shared by all tests of a session: write elsewhere, with `run=`."""

    folder: Path
    path: Path

    def config(self, *overrides: str) -> Config:
        return load_config(self.path, list(overrides))

    def tokenizer(self):
        from mopd.sampling.rendering import load_tokenizer

        return load_tokenizer(self.folder / "base")


def tiny_model(tokenizer, folder: Path, seed: int) -> Path:
    """A random model of 2 layers, with weights large enough that what it says depends on what it reads."""
    shape = TinyMoEConfig(hidden_size=32, layers=2, head_dim=8, experts=4, expert_size=24, max_positions=1024,
                          initializer_range=0.2)
    model = new_tiny_moe(shape, vocabulary=len(tokenizer), seed=seed, pad_id=tokenizer.pad_token_id, bos_id=None,
                         eos_id=tokenizer.eos_token_id)
    return save_model(model, folder, tokenizer=tokenizer)


def make_tiny_run(folder: Path) -> TinyRun:
    """Experts play, a tokenizer is trained on what they saw, teachers play: about two seconds without the imports."""
    tiny = TinyRun(folder, folder / "tiny.yaml")
    tiny.path.write_text(CONFIG.format(run=folder))
    config = tiny.config()
    transcripts = {}
    for name, domain in open_domains(config).items():
        with_closing(domain, lambda d=domain, n=name: transcripts.update({n: demonstrate(
            d.family, n, d.spread("train", d.config.demonstrations), seed=1, max_turns=12).transcripts}))
    texts = [m["content"] for played in transcripts.values() for t in played for m in transcript_messages(t)]
    tokenizer = train_tokenizer(texts, 400)
    tiny_model(tokenizer, folder / "base", 0)
    for seed, name in enumerate(config.domains, 1):
        write_transcripts(folder / f"{name}.jsonl", transcripts[name])
        tiny_model(tokenizer, folder / "teachers" / name, seed)
    import_demonstrations(config, [folder / f"{name}.jsonl" for name in config.domains], None, expert_only=True)
    for name in config.domains:
        collect_domain(config, name)
    return tiny


def with_closing(domain: Domain, call) -> None:
    try:
        call()
    finally:
        domain.close()


def environment(**changes: str) -> dict[str, str]:
    """Of a process of `mopd`: one thread, this repository on its path."""
    path = os.pathsep.join(filter(None, [changes.pop("PYTHONPATH", ""), str(REPOSITORY)]))
    return os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": path, "COLUMNS": "200"} | changes


TOGETHER = """
import os, sys, torch
if torch.distributed.is_initialized():
    torch.distributed.barrier()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)  # on a busy machine gloo's threads may still run when an interpreter takes itself apart, which aborts it
"""


def torchrun(code: str, place: Path, *, timeout: float, processes: int = 2, **changes: str) -> subprocess.CompletedProcess:
    """Run `code` on several processes that torchrun starts, as a script in `place`; a failure fails the test with what
    they said."""
    script = Path(place) / "ranks.py"
    script.write_text(code + TOGETHER)
    done = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}",
                           str(script)], env=environment(**changes), cwd=REPOSITORY, capture_output=True, text=True,
                          timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return done


def mopd(*arguments: object, cwd: Path | None = None, timeout: float = 800, **changes: str) -> subprocess.CompletedProcess:
    """Run `python -m mopd.cli …` to its end; output and errors are kept as text."""
    return subprocess.run([sys.executable, "-m", "mopd.cli", *map(str, arguments)], capture_output=True, text=True,
                          timeout=timeout, cwd=cwd or REPOSITORY, env=environment(**changes))


def start_mopd(*arguments: object, log: Path, **changes: str) -> subprocess.Popen:
    """The same, not waited for."""
    with open(log, "w") as file:
        return subprocess.Popen([sys.executable, "-m", "mopd.cli", *map(str, arguments)], stdout=file,
                                stderr=subprocess.STDOUT, cwd=REPOSITORY, env=environment(**changes))


def records(student: Path) -> list[dict]:
    """The steps of a student's folder without what clocks wrote."""
    lines = (student / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in ("seconds", "ranks")} for line in lines]


def same_weights(first: Path, second: Path) -> bool:
    one, other = (dict(load_model(f).named_parameters()) for f in (first, second))
    return one.keys() == other.keys() and all(bool((one[n] == other[n]).all()) for n in one)
