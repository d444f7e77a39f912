"""Going back: a run continues from one of its earlier checkpoints, and what came after is cut off but kept to be read."""

from __future__ import annotations

import json
import os
from pathlib import Path

from mopd.learner.checkpoint import FINISHED, checkpoints, cut_after, damage
from mopd.metrics import read_metrics


class CannotRollBack(ValueError):
    """There is no checkpoint to go back to; the message names the steps that there are."""


def roll_back(folder: Path, own: Path, steps: int) -> str:
    """Go back `steps` steps in the run that trains in `folder`, whose checkpoints lie in `own`: to the newest sound
    checkpoint at or before that step. The next start goes on from it. Returns what was done, in words.

    The metrics of the steps after it go to metrics.cut-N.jsonl, later checkpoints out of use. Killed at any point, the
    same call does the rest. Raises CannotRollBack where no such checkpoint is kept.
    """
    metrics = folder / "metrics.jsonl"
    there = [step for step, _ in checkpoints(own)]
    made = max([*there, *(record["step"] + 1 for record in (read_metrics(metrics) if metrics.is_file() else ()))], default=0)
    target, bad = made - steps, ""
    for step, path in reversed(checkpoints(own)):
        if step > target:
            continue
        if not (words := damage(path)):
            break
        bad += f"; step {step} is damaged ({words})"
    else:
        raise CannotRollBack(
            f"--rollback {steps}: the run has made {made} steps, so it would go on from step {max(target, 0)} or before; "
            + (f"checkpoints are kept of step {', '.join(map(str, there))}{bad}" if there else
               "no checkpoint of this configuration is kept (a finished run keeps those of train.keep_every only)")
            + ". train.checkpoint_every, keep_checkpoints and keep_every decide which are; --resume never starts anew")
    name = _keep_metrics(metrics, step) if metrics.is_file() else ""
    cut = cut_after(own, step)
    (own / FINISHED).unlink(missing_ok=True)
    return (f"rolled back from step {made} to step {step}{bad}"
            + (f"; the metrics of what came after are in {name}" if name else "")
            + (f"; checkpoint{'s' * (len(cut) > 1)} of step {', '.join(map(str, cut))} will go when the next one is saved"
               if cut else ""))


def _keep_metrics(metrics: Path, step: int) -> str:
    """Copy the records of `step` and later to the next metrics.cut-N.jsonl, unless the last one holds just these; returns its
    name, "" where there are none."""
    lines = [line for line in metrics.read_bytes().splitlines(keepends=True)
             if line.endswith(b"\n") and line.strip() and json.loads(line)["step"] >= step]
    if not lines:
        return ""
    content, number = b"".join(lines), 1
    while (path := metrics.with_name(f"metrics.cut-{number}.jsonl")).exists():
        if path.read_bytes() == content:
            return path.name
        number += 1
    aside = path.with_name(f".{path.name}")
    with open(aside, "wb") as file:
        file.write(content)
        os.fsync(file.fileno())
    aside.replace(path)
    return path.name
