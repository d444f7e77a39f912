"""What a hand-over of weights costs: gathering, a folder, reading it, and the proof, beside a training step.

    python benchmarks/bench_sync.py                       the demo's model, and SmolLM2's shape (135 M parameters, random)
    python benchmarks/bench_sync.py --sizes demo          one of them
    python benchmarks/bench_sync.py --place FOLDER        where the weights lie; by default shared memory

Times are CPU seconds of this one process (medians, after one round that warms up), wall seconds beside them. The step is
one like the demo's: 24 rows with fresh turns, forward and backward and the update, without sampling and teachers.
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

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.learner.engine import Learner, LearnerConfig  # noqa: E402
from mopd.learner.model import TinyMoEConfig, new_tiny_moe  # noqa: E402
from mopd.learner.packing import pack  # noqa: E402
from mopd.rows import STREAMS, Action, Row  # noqa: E402
from mopd.sampling.hf import HFEngine  # noqa: E402
from mopd.sampling.sync import WeightFolder, hand_over, publish, take  # noqa: E402


def model_of(size: str):
    """`demo`: the demo's student; `135M`: SmolLM2-135M's shape with random weights."""
    torch.manual_seed(0)
    if size == "demo":
        return new_tiny_moe(TinyMoEConfig(), vocabulary=1024, seed=0, pad_id=0, bos_id=None, eos_id=1)
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        intermediate_size=1536, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
        eos_token_id=1)).float()


def rows_of(count: int, vocabulary: int) -> list[Row]:
    """Trunks of 100 to 200 tokens with two decision points and a fresh turn of 6 tokens at each."""
    draw, rows = np.random.default_rng(0), []
    for number in range(count):
        trunk = draw.integers(2, vocabulary, draw.integers(100, 200)).astype(np.uint32)
        actions = tuple(Action(int(at), draw.integers(2, vocabulary, 6).astype(np.uint32), np.zeros(6, np.float32),
                               np.zeros(6, np.int32), True, turn, number, number)
                        for turn, at in enumerate((len(trunk) // 2, len(trunk))))
        rows.append(Row("demo", "teacher_prefix", trunk, actions))
    return rows


def loss(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch.label, reduction="sum") / 100, {}


def timed(call, rounds: int) -> tuple[float, float]:
    """(CPU seconds, wall seconds), medians of `rounds` after a warm-up."""
    found = []
    for number in range(rounds + 1):
        cpu, wall = time.process_time(), time.perf_counter()
        call(number + 1)
        found.append((time.process_time() - cpu, time.perf_counter() - wall))
    return tuple(statistics.median(column) for column in zip(*found[1:], strict=True))


def measure(size: str, root: str, rounds: int) -> dict:
    model = model_of(size)
    learner, engine = Learner(model, config=LearnerConfig(learning_rate=1e-5), total_steps=100), HFEngine(model, verify=False)
    vocabulary = model.config.vocab_size
    place = WeightFolder(Path(root) / f"bench-{os.getpid()}")
    try:
        found = {"parameters": sum(p.numel() for p in model.parameters())}
        found["in process"] = timed(lambda v: hand_over(learner, engine, v, verify=False), rounds)
        found["in process, proved"] = timed(lambda v: hand_over(learner, engine, v), rounds)
        made = {}
        found["written to a folder"] = timed(lambda v: made.update(it=publish(learner, place, v, verify=False)), rounds)
        found["written with a probe"] = timed(lambda v: made.update(it=publish(learner, place, v)), rounds)
        found["taken and proved"] = timed(lambda v: take(engine, made["it"].path, made["it"].version), rounds)
        batches = pack(rows_of(24 if size == "demo" else 4, vocabulary), token_budget=4096, pad_id=0, domains=("demo",),
                       streams=STREAMS)
        for batch in batches:
            batch.weight = torch.ones(batch.loss_tokens)
        found["a training step"] = timed(lambda v: learner.train_step(batches, loss), 3)
        found["tokens of the step"] = sum(batch.tokens for batch in batches)
        return found
    finally:
        place.close()
        learner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=("demo", "135M"), default=["demo", "135M"])
    parser.add_argument("--place", default="/dev/shm" if os.access("/dev/shm", os.W_OK) else tempfile.gettempdir())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = {size: measure(size, options.place, options.rounds) for size in options.sizes}
    for size, found in results.items():
        parameters, tokens = found.pop("parameters"), found.pop("tokens of the step")
        print(f"{size}: {parameters / 1e6:.1f} M parameters; the step has {tokens} tokens")
        for name, (cpu, wall) in found.items():
            print(f"  {name:24s} {1000 * cpu:9.1f} ms CPU {1000 * wall:9.1f} ms wall")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
