"""How long a checkpoint stops training: written before it goes on, and in the background.

    OMP_NUM_THREADS=2 python benchmarks/bench_checkpoint.py [--hidden 640] [--saves 3] [--zero-stage 1] [--folder DIR]

Trains a random dense model (about 100 M parameters by default) on the CPU, saves every few steps in both ways in turn, and
prints per way: how long the call stopped training, how long until the checkpoint was there, and how long a step took that ran
beside the writing and one that did not.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from mopd.learner.checkpoint import finish_saving, save_checkpoint  # noqa: E402
from mopd.learner.engine import Learner, LearnerConfig  # noqa: E402
from mopd.learner.packing import pack  # noqa: E402
from mopd.rows import STREAMS, Action, Row  # noqa: E402

BETWEEN = 4  # steps from one save to the next


def make_learner(hidden: int, stage: int) -> Learner:
    import transformers

    config = transformers.Qwen3Config(
        vocab_size=32_000, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=12,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 64, head_dim=64, max_position_embeddings=512,
        tie_word_embeddings=True)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return Learner(model, config=LearnerConfig(zero_stage=stage), total_steps=1000)


def batches(tokens: int):
    draw = np.random.default_rng(0).integers(0, 32_000, tokens).astype(np.uint32)
    action = Action(1, draw[1:], np.zeros(tokens - 1, np.float32), np.zeros(tokens - 1, np.int32), False, 0, 0, 0)
    return pack([Row("any", "rollout", draw, (action,), "a row")], token_budget=tokens, pad_id=0, domains=("any",),
                streams=STREAMS)


def loss(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch.label, reduction="none").mean(), {}


def measure(learner: Learner, folder: Path, *, background: bool, rows) -> dict[str, float | None]:
    """One save and the steps after it, in seconds."""
    began = time.perf_counter()
    save_checkpoint(learner, folder, {}, keep=1, background=background)
    stopped, beside, alone = time.perf_counter() - began, [], []
    for _ in range(BETWEEN):
        step = time.perf_counter()
        learner.train_step(rows, loss)
        writing = learner.saving is not None and learner.saving.seconds is None
        (beside if writing else alone).append(time.perf_counter() - step)
    wait = time.perf_counter()
    finish_saving(learner)
    waited = time.perf_counter() - wait
    for _ in range(2 - len(alone)):
        step = time.perf_counter()
        learner.train_step(rows, loss)
        alone.append(time.perf_counter() - step)
    return {"stopped": stopped, "there after": learner.saving_seconds, "waited for at the end": waited,
            "step beside writing": statistics.mean(beside) if beside else None, "step alone": statistics.mean(alone)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=640, help="a multiple of 64")
    parser.add_argument("--tokens", type=int, default=128, help="of a step")
    parser.add_argument("--saves", type=int, default=3, help="in each way; the first of each is left out")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where the checkpoints go; by default a temporary folder")
    options = parser.parse_args()
    learner, rows = make_learner(options.hidden, options.zero_stage), batches(options.tokens)
    parameters = sum(p.numel() for p in learner.model.parameters())
    learner.train_step(rows, loss)
    found: dict[bool, list[dict[str, float | None]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for _ in range(options.saves):
            for background in found:
                found[background].append(measure(learner, Path(folder), background=background, rows=rows))
        size = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    learner.close()
    result = {("in the background" if background else "before going on"):
              {name: round(statistics.median(values), 3) if values else None for name in several[0]
               for values in [[one[name] for one in several[1:] or several if one[name] is not None]]}
              for background, several in found.items()}
    ratio = result["before going on"]["stopped"] / result["in the background"]["stopped"]
    print(json.dumps({"parameters": parameters, "checkpoint bytes": size, **result, "stop is shorter by": round(ratio, 1)},
                     indent=1))


if __name__ == "__main__":
    main()
