"""The peer of bench_learner.py: TRL's DistillationTrainer on the same models and tokens, run by TRL's own interpreter.

Knows nothing of this project. Reads one task as JSON per line of its input and answers with a line `PEER {...}`.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

_loaded: dict[str, object] = {}


def trainer_of(spec: dict):
    """A DistillationTrainer (made once) whose generation is replaced by given completions."""
    if "trainer" not in _loaded:
        _loaded["trainer"] = _new_trainer(spec)
    return _loaded["trainer"]


def _new_trainer(spec: dict):
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import DistillationConfig, DistillationTrainer

    words = {f"w{i}": i for i in range(spec["vocabulary"])}
    plain = Tokenizer(models.WordLevel(words, unk_token="w0"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="w0", eos_token="w1", unk_token="w0")
    student, teacher = (AutoModelForCausalLM.from_pretrained(spec[k], dtype=torch.float32) for k in ("student", "teacher"))
    arguments = DistillationConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=8, gradient_accumulation_steps=1,
        max_completion_length=spec["turn"], beta=spec["beta"], use_cpu=True, bf16=False, report_to="none",
        gradient_checkpointing=False, learning_rate=1e-4, logging_strategy="no", save_strategy="no")
    data = Dataset.from_dict({"prompt": ["w2 w3"] * 8})
    trainer = DistillationTrainer(model=student, teacher_model=teacher, args=arguments, train_dataset=data,
                                  processing_class=tokenizer)
    trainer._prepare_inputs = lambda inputs: inputs
    trainer.current_gradient_accumulation_steps = 1
    return trainer


def steps(spec: dict) -> dict:
    """CPU and wall seconds of `repeat` optimizer steps over [turns] sequences of one prefix and a turn each."""
    import numpy as np

    trainer = trainer_of(spec)
    model = trainer.model
    if "optimizer" not in _loaded:
        _loaded["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer = _loaded["optimizer"]
    tokens = np.load(spec["tokens"])
    prompt = torch.from_numpy(tokens["prefix"].astype(np.int64)).expand(spec["turns"], -1)
    completion = torch.from_numpy(tokens["turns"].astype(np.int64))
    inputs = {"prompt_ids": prompt, "prompt_mask": torch.ones_like(prompt), "completion_ids": completion,
              "completion_mask": torch.ones_like(completion), "num_items_in_batch": torch.tensor(completion.numel())}
    cpu, wall, losses = [], [], []
    for _ in range(spec["repeat"] + spec["warmup"]):
        start, started = time.process_time(), time.perf_counter()
        losses.append(float(trainer.training_step(model, dict(inputs), inputs["num_items_in_batch"])))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        cpu.append(time.process_time() - start)
        wall.append(time.perf_counter() - started)
    return {"cpu": cpu[spec["warmup"]:], "wall": wall[spec["warmup"]:], "loss": losses[0]}


def memory(spec: dict) -> dict:
    """Peak growth of resident memory in one forward and backward of TRL's chunked divergence, in bytes, without the head's
    gradient of that pass."""
    from trl.trainer.distillation_trainer import _chunked_divergence_loss

    def run(count: int) -> None:
        generator = torch.Generator().manual_seed(0)
        hidden, other = (torch.randn(1, count, spec["hidden"], generator=generator) for _ in range(2))
        hidden.requires_grad_()
        loss, *_ = _chunked_divergence_loss(hidden, other, head, teacher_head, torch.ones(1, count), spec["beta"],
                                            num_items_in_batch=count)
        loss.backward()

    generator = torch.Generator().manual_seed(1)
    head, teacher_head = (torch.randn(spec["vocabulary"], spec["hidden"], generator=generator) for _ in range(2))
    head.requires_grad_()
    head.grad = torch.zeros_like(head)
    run(2)  # loads libraries
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before, started = resident("VmRSS"), time.process_time()
    run(spec["positions"])
    grown = resident("VmHWM") - before - head.numel() * 4
    return {"bytes": grown, "cpu": time.process_time() - started}


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def main() -> None:
    import trl

    for line in sys.stdin:
        spec = json.loads(line)
        torch.set_num_threads(spec["threads"])
        found = {"steps": steps, "memory": memory}[spec["what"]](spec)
        print("PEER " + json.dumps({**found, "trl": trl.__version__, "torch": torch.__version__}), flush=True)


if __name__ == "__main__":
    main()
