"""Students as ordinary Hugging Face folders: from a checkpoint, from a finished run, or as the weighted mean of models.

What was written is read back, and its log-probabilities of a few texts are compared with those of the original.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.config import Config, load_config
from mopd.learner.checkpoint import best as best_checkpoint
from mopd.learner.checkpoint import checkpoint_record, checkpoints, damage, load_checkpoint
from mopd.learner.engine import Learner
from mopd.learner.model import ModelMismatch, load_model, parameter_average, save_model
from mopd.learner.moe import router_hash
from mopd.learner.probe import LIMIT, LOW_PRECISION_LIMIT, learner_logprobs
from mopd.learner.weights import named_weights
from mopd.ranks import Ranks
from mopd.relayout import saved_learner
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import load_tokenizer

TEXTS, TOKENS = 4, 48
SHARD_SIZE = "2GB"
# keys of a model's config.json that say nothing about what it computes
_ABOUT = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


class ExportError(ValueError):
    """An export that cannot be made; the message says why and what there is instead."""


class ExportDiffers(RuntimeError):
    """What was read back is not the model that was written; the folder is removed again."""


def student_folder(run: Path) -> Path:
    """The folder RUN/students/NAME/seed-S that `run` is, or the only one in it. Raises ExportError where there are several or
    none."""
    if (run / "config.json").is_file() and ((run / "checkpoints").is_dir() or (run / "model").is_dir()):
        return run
    found = sorted(path.parent for path in run.glob("students/*/seed-*/config.json"))
    if len(found) == 1:
        return found[0]
    if not found:
        raise ExportError(f"{run}: no student has been trained here; name a run's folder, or RUN/students/NAME/seed-S")
    raise ExportError(f"{run} has {len(found)} students; name one of {', '.join(map(str, found))}")


def source(student: Path, step: int | None, *, best: bool = False) -> tuple[int, Path]:
    """(steps made, folder) of what an export takes: the checkpoint of `step`, or the `best` one by `train.keep_best`; without
    either the finished student, else the newest sound checkpoint. Raises ExportError naming the steps that there are."""
    kept: dict[int, Path] = {}
    for own in sorted((student / "checkpoints").glob("[!.]*"), key=lambda path: path.stat().st_mtime):
        kept.update(checkpoints(own))  # of two configurations' the newer
        if best and (found := best_checkpoint(own)):
            step = int(found.name.removeprefix("step-"))
    if best and step is None:
        raise ExportError(f"{student} has no checkpoint with a score: train.keep_best names the metric by which a run keeps "
                          "its best one")
    finished = student / "model"
    if (finished / "config.json").is_file():
        steps = _finished_steps(finished)
        if step is None or step == steps and step not in kept:
            return steps, finished
    for number in sorted(kept, reverse=True) if step is None else ([step] if step in kept else []):
        if not (words := damage(kept[number])):
            return number, kept[number]
        if step is not None:
            raise ExportError(f"the checkpoint of step {step} is damaged: {words}")
        print(f"checkpoint {kept[number]} is damaged and is not used: {words}", file=sys.stderr)
    there = [f"step {number}" for number in sorted(kept)]
    if (finished / "config.json").is_file():
        there.append(f"the finished student (step {_finished_steps(finished)})")
    raise ExportError(f"{student} has {'no sound checkpoint' if step is None else f'no checkpoint of step {step}'}; there is "
                      f"{', '.join(there) or 'nothing yet'}. train.keep_checkpoints and keep_every decide which are kept")


def ranks_of(folder: Path) -> int:
    """Processes that an export from `folder` takes: as many as wrote the checkpoint, one for a model."""
    return int(checkpoint_record(folder)["world_size"]) if folder.name.startswith("step-") else 1


def export_student(student: Path, step: int | None, out: Path, *, best: bool = False,
                   shard_size: str = SHARD_SIZE) -> dict[str, Any]:
    """Write the student of `source(student, step, best=best)` to `out`; returns {"out", "step", "files",
    "largest_difference"}, the last in nats over a few texts. From a checkpoint of N ranks, each of N processes must call it
    (`ranks_of`).

    Raises ExportError and ExportDiffers, and what reading models and checkpoints raises.
    """
    check_target(out, shard_size)
    steps, folder = source(student, step, best=best)
    config = load_config(student / "config.json", plays=False)
    manifest = {"steps": steps, "exported_from": folder.name} | _manifest(student)
    if ranks_of(folder) == 1 and not folder.name.startswith("step-"):
        model = load_model(folder, dtype=config.deepspeed.dtype, trust_remote_code=config.student.trust_remote_code)
        tokenizer = load_tokenizer(folder, trust_remote_code=config.student.trust_remote_code)
        return {"step": steps} | _write(model, out, tokenizer, manifest, shard_size, HFEngine(model).score,
                                        trust_remote_code=config.student.trust_remote_code)
    ranks = Ranks.start(timeout=config.train.ranks_timeout)
    with ranks.reporting():
        learner = saved_learner(config, checkpoint_record(folder))
        load_checkpoint(learner, folder)
        model = learner.model if learner.whole else whole_student(config, learner, ranks)
        tokenizer = load_tokenizer(config.student.model, trust_remote_code=config.student.trust_remote_code)
        texts = _texts(tokenizer)
        own = [learner_logprobs(learner, text) for text in texts]  # by all ranks
        result: dict[str, Any] = {}
        if ranks.first:
            known = {text.tobytes(): found for text, found in zip(texts, own, strict=True)}
            result = {"step": steps} | _write(
                model, out, tokenizer, manifest | {"router_hash": learner.router_hash}, shard_size,
                lambda text: known[text.tobytes()], trust_remote_code=config.student.trust_remote_code)
        ranks.gather(None)  # nobody leaves before it is written
    return result


def whole_student(config: Config, learner: Learner, ranks: Ranks) -> Any:
    """An ordinary model with the learner's weights, gathered by all ranks, on rank 0; None on the others."""
    weights = {}
    for name, tensor in named_weights(learner):  # by every rank, one tensor at a time
        if ranks.first:
            weights[name] = tensor.cpu()
    if not ranks.first:
        return None
    student = load_model(config.student.model, dtype=config.deepspeed.dtype,
                         trust_remote_code=config.student.trust_remote_code)
    problem = student.load_state_dict(weights, strict=False)
    if problem.unexpected_keys:
        raise RuntimeError(f"the trained student has weights {problem.unexpected_keys[:3]} that its model does not know")
    return student


def export_mean(models: Sequence[Path], out: Path, *, weights: Sequence[float] | None = None,
                shard_size: str = SHARD_SIZE) -> dict[str, Any]:
    """Write the weighted mean of models (by default all alike) to `out`; returns {"out", "files", "largest_difference"}. Two
    models with the weights 1 − w and w are their interpolation.

    Raises ModelMismatch where configurations, tokenizers or routers differ: under one router an expert's number means the
    same in all models; a mean over several routers is no model at all.
    """
    check_target(out, shard_size)
    if len(models) < 2:
        raise ExportError(f"a mean takes two models or more, not {len(models)}")
    first = [_described(models[0]), *_identity(models[0])]
    for other in models[1:]:
        theirs = _described(other)
        if keys := sorted(key for key in first[0].keys() | theirs.keys() if first[0].get(key) != theirs.get(key)):
            raise ModelMismatch(f"{other} is not of the kind of {models[0]}: config.json differs in " + ", ".join(
                f"{key} ({theirs.get(key)} and {first[0].get(key)})" for key in keys[:3]))
        for what, mine, found in zip(("tokenizer", "router"), first[1:], _identity(other), strict=True):
            if mine != found:
                raise ModelMismatch(f"{other} has another {what} than {models[0]}, so their mean means nothing; take models "
                                    "that were trained from one base with the router frozen")
    model = parameter_average(models, weights=weights)
    shares = [1 / len(models)] * len(models) if weights is None else [w / sum(weights) for w in weights]
    return _write(model, out, load_tokenizer(models[0]),
                  {"kind": "parameter average", "models": [path.name for path in models], "weights": shares}, shard_size,
                  HFEngine(model).score)


def check_target(out: Path, shard_size: str) -> None:
    """Raise ExportError where nothing should be written to `out`, or `shard_size` is no size."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"--out {out} is there already; name another folder or remove it")
    if not re.fullmatch(r"[1-9]\d*(KB|MB|GB)", shard_size):
        raise ExportError(f"--shard-size {shard_size}: a whole number with KB, MB or GB, such as 2GB")


def _write(model: Any, out: Path, tokenizer: Any, manifest: dict, shard_size: str, live: Callable[[np.ndarray], np.ndarray],
           *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Save, read back and compare with `live` (tokens uint32 [T] → log-probabilities [T − 1])."""
    save_model(model, out, tokenizer=tokenizer, manifest=manifest, max_shard_size=shard_size)
    kind = next(model.parameters()).dtype
    engine = HFEngine(load_model(out, dtype=kind, trust_remote_code=trust_remote_code))
    gaps = [float(np.max(np.abs(np.nan_to_num(live(text) - engine.score(text), nan=np.inf)))) for text in _texts(tokenizer)]
    limit = LIMIT.get(kind, LOW_PRECISION_LIMIT)
    if max(gaps) > limit:
        shutil.rmtree(out)
        raise ExportDiffers(f"read back from {out}, the model's log-probabilities are up to {max(gaps):.3g} nats from the "
                            f"original's (they may differ by {limit:g}); nothing is left there. Look at the disk, and at "
                            "what Transformers says of this model's family")
    return {"out": str(out), "files": sorted(path.name for path in out.glob("*.safetensors")),
            "largest_difference": max(gaps)}


def _texts(tokenizer: Any) -> list[np.ndarray]:
    special = set(tokenizer.all_special_ids)
    ids = np.array([i for i in range(len(tokenizer)) if i not in special], np.uint32)
    return [np.random.default_rng(seed).choice(ids, TOKENS) for seed in range(TEXTS)]


def _described(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder} is no Hugging Face folder: its config.json cannot be read ({error})") from error
    return {key: value for key, value in found.items() if key not in _ABOUT}


def _identity(folder: Path) -> tuple[dict[str, int], str]:
    """The vocabulary of a model's tokenizer and the hash of its routers."""
    return load_tokenizer(folder).get_vocab(), router_hash(load_model(folder))


def _finished_steps(model: Path) -> int:
    return int(json.loads((model / "manifest.json").read_text())["steps"])


def _manifest(student: Path) -> dict[str, Any]:
    path = student / "manifest.json"
    return json.loads(path.read_text()) if path.is_file() else {}
