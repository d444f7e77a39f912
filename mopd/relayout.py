"""A checkpoint for another number of ranks, ZeRO stage or spread of experts: as many processes as wrote it load it on this
machine's CPUs and write its state under the model's own names (mopd.learner.portable)."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from mopd.config import Config, learner_config, load_config
from mopd.learner.checkpoint import CheckpointError, checkpoint_record, load_checkpoint
from mopd.learner.engine import Learner
from mopd.learner.model import load_model, publish, writing
from mopd.learner.portable import INDEX, save_portable
from mopd.ranks import Ranks, leave

# What a launcher tells the processes of a job; the ones started here are a job of their own.
_OF_A_JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "MOPD_PIPELINE")


def saved_learner(config: Config, record: dict[str, Any]) -> Learner:
    """The learner that wrote a checkpoint with this record, on as many ranks: of the run's config, but as the state lies."""
    base = learner_config(config.train.optimizer, config, prefix_gradient=config.train.prefix_gradient)
    layout = dataclasses.replace(
        base, zero_stage=record["zero_stage"], dtype=record.get("dtype", config.deepspeed.dtype),
        autoep_size=record.get("autoep_size", 0), autoep_preset=record.get("autoep_preset", base.autoep_preset),
        split_on_imbalance=0, offload_optimizer=False, offload_parameters=False)
    model = load_model(config.student.model, attention=config.student.attention,
                       trust_remote_code=config.student.trust_remote_code)
    return Learner(model, config=layout, total_steps=config.train.steps)


def portable_copy(checkpoint: Path, student: Path, ranks: Ranks) -> Path:
    """The folder with the portable state of a checkpoint of the run whose config.json is in `student`, made by rank 0 if
    it is not there; it goes with the next save. Every rank must call it. Raises CheckpointError with the words of a failure.
    """
    place = checkpoint.with_name(f".{checkpoint.name}.portable")

    def make() -> None:
        if not ranks.first or (place / INDEX).is_file():
            return
        size = int(checkpoint_record(checkpoint)["world_size"])
        environment = {name: value for name, value in os.environ.items()
                       if name not in _OF_A_JOB and not name.startswith("TORCHELASTIC_")}
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={size}", "-m", __name__,
             str(student), str(checkpoint), str(place)], capture_output=True, text=True,
            env=environment | {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"})
        if done.returncode:
            raise CheckpointError(f"{checkpoint} was written by {size} processes, and loading it by as many on this machine "
                                  f"failed: {done.stderr[-2000:]}")

    ranks.together("putting a checkpoint of another layout together", make)
    return place


def main(student: str, checkpoint: str, place: str) -> None:
    """What each of the processes does."""
    config, record = load_config(Path(student) / "config.json", plays=False), checkpoint_record(checkpoint)
    ranks = Ranks.start(timeout=config.train.ranks_timeout)
    with ranks.reporting():
        learner = saved_learner(config, record)
        load_checkpoint(learner, checkpoint)
        aside = Path(f"{place}.writing")
        if ranks.first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir()
        ranks.gather(None)
        with writing(aside, remove=ranks.first):
            save_portable(learner, aside)
        if ranks.first:
            publish(aside, Path(place))
        ranks.gather(None)
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
