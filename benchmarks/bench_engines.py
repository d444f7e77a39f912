"""Sampled tokens per second of each engine: hf (a batch at once, turns one by one), vllm in process, a vLLM server.

    python benchmarks/bench_engines.py [--model demo|FOLDER] [--engines hf,stream,vllm,server] [--requests 64] [--tokens 32]

All engines write the same number of tokens behind the same prompts (no stop ids), float32, one thread each. The first of
`--runs` + 1 runs warms up and is dropped; the others are told as median and range, in tokens per wall second of one process
and what it started. Ratios are to hf. Run it alone, or say the load that it prints beside the numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402

from mopd.learner.model import TinyMoEConfig, load_model, new_tiny_moe  # noqa: E402
from mopd.sampling.base import Request, SamplingOptions  # noqa: E402


def machine() -> str:
    """The processor's name and the cores that this process may use."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        name = next((line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line), name)
    return f"{name}, {len(os.sched_getaffinity(0))} cores"


def demo_model(folder: Path) -> Path:
    """The demo's student by shape: a random Mixture-of-Experts model of 2.7 M parameters, 768 ids."""
    model = new_tiny_moe(TinyMoEConfig(), vocabulary=768, seed=0, pad_id=0, bos_id=None, eos_id=1)
    model.save_pretrained(folder)
    return folder


def requests_of(rows: int, count: int, prompt: int) -> list[Request]:
    """`count` prompts of `prompt` tokens, in groups of 4 that share their first half."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(count):
        if number % 4 == 0:
            shared = draw.integers(2, rows, prompt // 2)
        tokens = np.concatenate([shared, draw.integers(2, rows, prompt - prompt // 2)])
        found.append(Request(tokens.astype(np.uint32), number))
    return found


def streamed(engine, requests: list[Request], options: SamplingOptions) -> int:
    """Tokens of all requests, submitted one by one."""
    for number, request in enumerate(requests):
        engine.submit(number, request, options)
    total = 0
    while engine.under_way:
        total += sum(len(done.tokens) for _, done in engine.poll(0.02))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo", help="demo, or a Hugging Face folder")
    parser.add_argument("--engines", default="hf,stream,vllm,server")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        folder = demo_model(Path(place)) if given.model == "demo" else Path(given.model)
        model = load_model(folder)
        rows = int(model.config.get_text_config().vocab_size)
        requests = requests_of(rows, given.requests, given.prompt)
        options = SamplingOptions(max_tokens=given.tokens)
        found = {}
        for name in given.engines.split(","):
            with _engine(name, folder, model, rows, given) as engine:
                speeds = []
                for _ in range(given.runs + 1):
                    begin = time.perf_counter()
                    total = streamed(engine, requests, options) if name == "stream" else sum(
                        len(done.tokens) for done in engine.generate(requests, options))
                    speeds.append(total / (time.perf_counter() - begin))
            found[name] = speeds[1:]
            median = statistics.median(speeds[1:])
            print(f"{name:7} {median:8.0f} tokens/s  ({min(speeds[1:]):.0f} to {max(speeds[1:]):.0f})"
                  + (f"  {median / statistics.median(found['hf']):.2f} of hf" if "hf" in found else "")
                  + f"  load {os.getloadavg()[0]:.1f}", flush=True)
        print(json.dumps({"machine": machine(), "model": given.model, "requests": given.requests, "prompt": given.prompt,
                          "tokens": given.tokens, "batch": given.batch, "tokens_per_second": found}))


class _engine:
    """Context manager: an engine by its name, and an end of what it started."""

    def __init__(self, name: str, folder: Path, model, rows: int, given):
        self.name, self.folder, self.model, self.rows, self.given = name, folder, model, rows, given
        self.process, self.engine = None, None

    def __enter__(self):
        from mopd.sampling.hf import HFEngine

        longest = self.given.prompt + self.given.tokens
        if self.name in ("hf", "stream"):
            self.engine = HFEngine(self.model, max_batch=self.given.batch)
        elif self.name == "vllm":
            from mopd.sampling.vllm_local import VLLMEngine

            self.engine = VLLMEngine(self.folder, dtype="float32", max_batch=self.given.batch, max_model_len=longest)
        elif self.name == "server":
            from mopd.sampling.vllm_fleet import VLLMFleet
            from teachers import serve
            from teachers.serve_student import student_options

            options = student_options(str(self.folder), port=8471, dtype="float32", max_model_len=longest,
                                      extra=("--max-num-seqs", str(self.given.batch), "--skip-tokenizer-init"))
            self.process = serve.start(options)
            while not serve.answers(options.url):
                if self.process.poll() is not None:
                    raise SystemExit("the server did not start; its last words stand above")
                time.sleep(0.5)
            self.engine = VLLMFleet([options.url], vocabulary=self.rows, max_batch=self.given.batch).connect()
        else:
            raise SystemExit(f"--engines: {self.name} is not one of hf, stream, vllm, server")
        return self.engine

    def __exit__(self, *_: object) -> None:
        getattr(self.engine, "close", lambda: None)()
        if self.process is not None:
            from teachers import serve

            serve.stop(self.process)


if __name__ == "__main__":
    main()
