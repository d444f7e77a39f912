"""How fast a learner step with shared prefixes is, what its loss takes in memory, and what scoring costs.

    python benchmarks/bench_learner.py step     packed rows, repeated prefixes, a detached prefix, and TRL
    python benchmarks/bench_learner.py memory   peak memory of the loss at T = 4,096 and V = 151,936, and TRL
    python benchmarks/bench_learner.py scoring  a teacher's scores of k decision points
    python benchmarks/bench_learner.py small    the loss of the demo's tiny vocabulary in chunks and at once

TRL runs under an interpreter of its own, made once (docs/performance.md) and named by --peer-python; without one its
columns stay empty. Times are CPU seconds of one process (`--wall` shows wall seconds too): they depend little on what
else the machine does. Runs of the compared programs alternate; medians are shown. `--json FILE` keeps all numbers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.learner.engine import Learner, LearnerConfig  # noqa: E402
from mopd.learner.forward import PackedLM, apply_head, hidden_at_loss_tokens  # noqa: E402
from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model  # noqa: E402
from mopd.learner.packing import pack  # noqa: E402
from mopd.learner.step import LearnerStep, StepConfig  # noqa: E402
from mopd.losses.chunked import Head, chunk_rows, chunked_logprob, chunked_loss  # noqa: E402
from mopd.losses.objectives import make_objective  # noqa: E402
from mopd.rows import STREAMS, Action, Row  # noqa: E402
from teachers.scoring.hf import HFTeacher  # noqa: E402

TURN, VOCABULARY = 64, 8192
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, INNER = 256, 6, 8, 4, 32, 768
LINEAR = LAYERS * (HIDDEN * HEAD_SIZE * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER)  # backbone weights: 4.7 M


def model_of(seed: int):
    """A dense Qwen3 of 4.7 M backbone parameters with a vocabulary of 8,192 and random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, head_dim=HEAD_SIZE, intermediate_size=INNER, max_position_embeddings=8192,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None)).float()


def action(at: int, tokens: np.ndarray, *, branch: bool, number: int) -> Action:
    return Action(at, tokens, np.full(len(tokens), -1.0, np.float32), np.zeros(len(tokens), np.int32), branch, 0,
                  number, 0)


def shared_rows(prefix: np.ndarray, turns: np.ndarray) -> list[Row]:
    """One row: all turns branch off the prefix."""
    return [Row("d", "teacher_prefix", prefix, tuple(action(len(prefix), t, branch=True, number=i)
                                                      for i, t in enumerate(turns)), "shared")]


def repeated_rows(prefix: np.ndarray, turns: np.ndarray) -> list[Row]:
    """A row per turn, each with its own copy of the prefix."""
    return [Row("d", "rollout", np.concatenate([prefix, t]), (action(len(prefix), t, branch=False, number=i),), "own")
            for i, t in enumerate(turns)]


def flops(form: str, prefix: int, turns: int) -> float:
    """Floating point operations executed by one step with one teacher forward: products of weights, attention, head.

    Training takes 3 times a forward's products; attention's backward pass computes 5 products where the forward has 2
    (it makes the weights again), so 3.5 times. A causal kernel does half of its square, a masked one all of it.
    """
    own = turns * (TURN - 1)
    if form == "repeated":
        graph, free, pairs, free_pairs = turns * (prefix + TURN - 1), 0, turns * (prefix + TURN - 1) ** 2 / 2, 0.0
    elif form == "masked square":
        graph, free, pairs, free_pairs = prefix + own, 0, float((prefix + own) ** 2), 0.0
    elif form == "packed":
        graph, free, pairs, free_pairs = prefix + own, 0, prefix**2 / 2 + own * (prefix + own), 0.0
    else:  # none: the prefix forward only, the branch-point token and the turns behind it
        graph, free = own + 1, prefix - 1
        pairs, free_pairs = float((own + 1) * (prefix + own)), (prefix - 1) ** 2 / 2
    linear, attention = 2 * LINEAR, 4 * LAYERS * HEADS * HEAD_SIZE
    student = linear * (3 * graph + free) + attention * (3.5 * pairs + free_pairs)
    teacher = linear * (graph + free) + attention * (pairs + free_pairs)
    return student + teacher + 2 * HIDDEN * VOCABULARY * turns * TURN * 4


class OwnStep:
    """LearnerStep on the benchmark's models, with everything that a training run does: scores, weights, metrics."""

    def __init__(self, *, prefix_gradient: str = "full"):
        learner = Learner(model_of(0), total_steps=10**6, config=LearnerConfig(
            learning_rate=1e-4, zero_stage=0, prefix_gradient=prefix_gradient))
        self.step = LearnerStep(learner, domains=("d",), scorers={"d": HFTeacher(model_of(1), teacher="t")},
                                config=StepConfig(objective="forward_kl", token_budget=4 * 2112))

    def __call__(self, rows: list[Row]) -> float:
        return self.step(rows, shares={"d": 1.0}, step=0).loss


def timed(function) -> dict[str, float]:
    start, started = time.process_time(), time.perf_counter()
    value = function()
    return {"cpu": time.process_time() - start, "wall": time.perf_counter() - started, "value": value}


class Peer:
    """TRL under its own interpreter, started once; `python` empty: there is none."""

    def __init__(self, python: str, threads: int):
        self.process = None
        if python:
            ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "DS_ACCELERATOR")
            environment = {name: value for name, value in os.environ.items() if name not in ranks}
            environment |= {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
            self.errors = tempfile.TemporaryFile("w+")
            self.process = subprocess.Popen(
                [python, str(Path(__file__).with_name("trl_peer.py"))], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, text=True, env=environment)

    def __call__(self, spec: dict, limit: float | None = None) -> dict | None:
        """The answer to one task; None without a peer, and {"over_limit": seconds} where it was ended after `limit`.
        Raises RuntimeError with its last words where it died."""
        if self.process is None:
            return None
        self.process.stdin.write(json.dumps(spec) + "\n")
        self.process.stdin.flush()
        late = threading.Event()
        timer = threading.Timer(limit or 10**6, lambda: (late.set(), self.process.kill()))
        timer.daemon = True
        timer.start()
        for line in self.process.stdout:
            if line.startswith("PEER "):
                timer.cancel()
                return json.loads(line[5:])
        timer.cancel()
        if late.is_set():
            return {"over_limit": limit}
        self.errors.seek(0)
        raise RuntimeError(f"TRL failed:\n{self.errors.read()[-3000:]}")

    def close(self) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.stdin.close()
            self.process.wait()


def bench_step(options) -> list[dict]:
    found = []
    own, none = OwnStep(), OwnStep(prefix_gradient="none")
    peer = Peer(options.peer_python, options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        save_model(model_of(0), f"{scratch}/student")
        save_model(model_of(1), f"{scratch}/teacher")
        for length in options.prefixes:
            for turns in options.turns:
                rng = np.random.default_rng([length, turns])
                prefix = rng.integers(2, VOCABULARY, length).astype(np.uint32)
                tokens = rng.integers(2, VOCABULARY, (turns, TURN)).astype(np.uint32)
                cell = {"prefix": length, "turns": turns,
                        "times": step_times(own, none, peer, prefix, tokens, scratch, options),
                        "flops": {form: flops(form, length, turns) for form in FORMS}}
                found.append(cell)
                print(step_line(cell, options.wall), flush=True)
    peer.close()
    return found


FORMS = ("packed", "repeated", "none", "masked square")


def step_times(own: OwnStep, none: OwnStep, peer: Peer, prefix, tokens, scratch: str, options) -> dict[str, list[dict]]:
    """Measured steps over one prefix with its turns [n, TURN], by program; the programs take turns."""
    np.savez(f"{scratch}/tokens.npz", prefix=prefix, turns=tokens)
    forms = {"packed": lambda: own(shared_rows(prefix, tokens)), "repeated": lambda: own(repeated_rows(prefix, tokens)),
             "none": lambda: none(shared_rows(prefix, tokens))}
    task = {"what": "steps", "student": f"{scratch}/student", "teacher": f"{scratch}/teacher",
            "tokens": f"{scratch}/tokens.npz", "vocabulary": VOCABULARY, "turn": TURN, "turns": len(tokens), "beta": 0.0,
            "threads": options.threads, "repeat": 1}
    times: dict[str, list[dict]] = {name: [] for name in [*forms, "trl"]}
    for turn in range(options.repeat + options.warmup):
        for name, form in forms.items():
            measured = timed(form)
            print(f"{len(prefix)} {len(tokens)} {name} {measured}", file=sys.stderr, flush=True)
            if turn >= options.warmup:
                times[name].append(measured)
        if turn >= options.warmup:
            theirs = peer({**task, "warmup": options.warmup if turn == options.warmup else 0})
            if theirs:
                print(f"{len(prefix)} {len(tokens)} TRL {theirs}", file=sys.stderr, flush=True)
                times["trl"].append({"cpu": theirs["cpu"][0], "wall": theirs["wall"][0], "value": theirs["loss"]})
    return times


def median(measured: list[dict], clock: str = "cpu") -> float:
    return statistics.median(m[clock] for m in measured) if measured else float("nan")


def step_line(cell: dict, wall: bool) -> str:
    """One row of the table: seconds, tokens per second, speed-up over repeated prefixes against its bound, over TRL."""
    time_of = {name: median(measured) for name, measured in cell["times"].items()}
    count, tokens = cell["flops"], cell["turns"] * TURN
    speed, bound = time_of["repeated"] / time_of["packed"], count["repeated"] / count["packed"]
    line = (f"| {cell['prefix']} | {cell['turns']} | {time_of['packed']:.2f} | {time_of['none']:.2f} | "
            f"{time_of['repeated']:.2f} | {time_of['trl']:.2f} | {tokens / time_of['packed']:.0f} | {speed:.2f} | "
            f"{bound:.2f} | {speed / bound:.0%} | {time_of['trl'] / time_of['packed']:.1f} | "
            f"{time_of['repeated'] / time_of['none']:.2f} | {count['repeated'] / count['none']:.2f} |")
    if wall:
        line += " wall " + " ".join(f"{name} {median(m, 'wall'):.1f}" for name, m in cell["times"].items())
    return line


OBJECTIVES = {
    "forward_kl": ("forward_kl", {}, 0.0), "reverse_kl": ("reverse_kl", {}, 1.0), "jsd": ("jsd", {"beta": 0.5}, 0.5),
    "reverse_kl top 64": ("reverse_kl", {"support": "top_k", "k": 64}, None), "mopd": ("mopd", {}, None),
    "sampled_kl": ("sampled_kl", {}, None),
}


def bench_memory(options) -> list[dict]:
    """Each measurement in a process of its own, so that its peak is its own."""
    found = []
    for name, (_, _, beta) in OBJECTIVES.items():
        if options.objectives and name not in options.objectives:
            continue
        for vocabulary in options.vocabularies:
            spec = {"objective": name, "vocabulary": vocabulary, "positions": options.positions,
                    "hidden": options.hidden, "threads": options.threads, "mib": options.logits_mib}
            done = subprocess.run([sys.executable, __file__, "own-memory", json.dumps(spec)], capture_output=True,
                                  text=True, timeout=options.limit)
            if done.returncode:
                raise RuntimeError(done.stderr[-3000:])
            mine = json.loads(done.stdout.splitlines()[-1])
            theirs = None
            if beta is not None:
                peer = Peer(options.peer_python, options.threads)
                theirs = peer({**spec, "what": "memory", "beta": beta}, options.limit)
                peer.close()
            found.append({**spec, "own": mine, "trl": theirs})
            their = "– | –"
            if theirs:
                their = f"{theirs['bytes'] / 2**20:.0f} | {theirs['cpu']:.1f}" if "bytes" in theirs else \
                    f"not done in {theirs['over_limit']:.0f} s | –"
            print(f"| {name} | {vocabulary} | {mine['bytes'] / 2**20:.0f} | {mine['cpu']:.1f} | {their} |", flush=True)
    return found


def own_memory(spec: dict) -> None:
    """Peak growth of resident memory in one forward and backward of the loss, without the head's gradient of that pass
    (the one that it is added to is there before)."""
    torch.set_num_threads(spec["threads"])
    name, options, _ = OBJECTIVES[spec["objective"]]
    objective = make_objective(name, options)
    generator = torch.Generator().manual_seed(1)
    size = (spec["vocabulary"], spec["hidden"])
    head, teacher = torch.randn(size, generator=generator).requires_grad_(), Head(torch.randn(size, generator=generator))
    count = spec["positions"]
    label = torch.arange(count) % spec["vocabulary"]
    hidden, other = (torch.randn(count, spec["hidden"], generator=generator) for _ in range(2))
    hidden.requires_grad_()

    # Sampled scores are there before a step's loss; a whole distribution is made beside the student's, chunk by chunk.
    scores = chunked_logprob(other, teacher.weight, label) if objective.needs == "sampled" else None

    def loss(logits, rows):
        theirs = teacher.logits(other[rows]) if scores is None else None
        score = None if scores is None else scores[rows]
        result = objective(student_logits=logits, teacher_logits=theirs, teacher_logprob=score,
                           label=label[rows], behaviour_logprob=torch.zeros(len(logits)), outcome_advantage=None)
        return result.loss.sum() / count, result.diagnostics

    rows = chunk_rows(spec["vocabulary"], budget_bytes=int(spec["mib"] * 2**20))
    chunked_loss(hidden[:2], Head(head), loss, rows=rows)[0].backward()  # loads libraries, and makes head.grad
    before, started = start_of_peak(), time.process_time()
    chunked_loss(hidden, Head(head), loss, rows=rows)[0].backward()
    grown = resident("VmHWM") - before - head.numel() * 4
    print(json.dumps({"bytes": grown, "cpu": time.process_time() - started, "rows": rows}))


def start_of_peak() -> int:
    """Forget the process's peak so far; bytes in memory now."""
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def resident(what: str) -> int:
    """Bytes of this process in memory: VmRSS now, VmHWM at most since start_of_peak (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(what)]
    return int(line.split()[1]) * 1024


def bench_scoring(options) -> list[dict]:
    """Hidden scores of k decision points spread over one trajectory, against a plain forward of as many tokens."""
    teacher, found = HFTeacher(model_of(1), teacher="t"), []
    for length in options.prefixes:
        for points in options.turns:
            rng = np.random.default_rng([length, points])
            trunk = rng.integers(2, VOCABULARY, length).astype(np.uint32)
            places = np.linspace(length // points, length, points).astype(int)
            row = Row("d", "teacher_prefix", trunk, tuple(
                action(int(at), rng.integers(2, VOCABULARY, TURN).astype(np.uint32), branch=True, number=i)
                for i, at in enumerate(places)), "points")
            (batch,) = pack([row], token_budget=10**6, pad_id=0, domains=("d",), streams=STREAMS)
            plain = torch.from_numpy(rng.integers(2, VOCABULARY, (1, batch.tokens)))

            def forward(plain=plain):
                with torch.no_grad():
                    teacher.model.model(input_ids=plain, use_cache=False)

            times: dict[str, list[dict]] = {"scores": [], "forward": []}
            for turn in range(options.repeat + options.warmup):
                for name, run in (("scores", lambda batch=batch: teacher(batch, need="hidden") and None),
                                  ("forward", forward)):
                    measured = timed(run)
                    if turn >= options.warmup:
                        times[name].append(measured)
            found.append({"trunk": length, "points": points, "tokens": batch.tokens, "times": times})
            a, b = median(times["scores"]), median(times["forward"])
            print(f"| {length} | {points} | {batch.tokens} | {a:.3f} | {b:.3f} | {a / b:.2f} |", flush=True)
    return found


def bench_small(options) -> list[dict]:
    """The demo's model and a micro-batch of its size: loss in chunks (what runs), and logits at once under autograd."""
    model, teacher = (new_tiny_moe(TinyMoEConfig(), vocabulary=1024, seed=s, pad_id=0, bos_id=None, eos_id=1)
                      for s in (0, 1))
    rng, found = np.random.default_rng(0), []
    rows = []
    for i in range(8):
        trunk = rng.integers(2, 1024, int(rng.integers(110, 330))).astype(np.uint32)
        turns = [action(int(at), rng.integers(2, 1024, 6).astype(np.uint32), branch=True, number=t)
                 for t, at in enumerate(np.linspace(40, len(trunk), 6).astype(int))]
        rows.append(Row("d", "teacher_prefix", trunk, tuple(turns), str(i)))
    batches = pack(rows, token_budget=2048, pad_id=0, domains=("d",), streams=STREAMS)
    head = HFTeacher(teacher, teacher="t")
    scores = [head(batch, need="hidden") for batch in batches]
    for name in options.objectives or ("forward_kl", "reverse_kl"):
        objective = make_objective(name)
        runs: dict[str, list[dict]] = {"chunks": [], "at once": []}
        for turn in range(options.repeat + options.warmup):
            for kind in runs:
                start = time.process_time()
                model.zero_grad()
                for batch, score in zip(batches, scores, strict=True):
                    small_backward(model, objective, batch, score, chunks=kind == "chunks")
                if turn >= options.warmup:
                    runs[kind].append({"cpu": time.process_time() - start})
        found.append({"objective": name, "times": runs})
        a, b = median(runs["chunks"]), median(runs["at once"])
        print(f"| {name} | {a:.3f} | {b:.3f} | {a / b:.2f} |", flush=True)
    return found


def small_backward(model, objective, batch, score, *, chunks: bool) -> None:
    """Forward and backward of one micro-batch, through the chunked loss or through autograd over all logits."""
    batch.extra["hidden"] = score.hidden

    def loss(logits, part):
        result = objective(student_logits=logits, teacher_logits=score.head.logits(part.extra["hidden"]),
                           teacher_logprob=None, label=part.label, behaviour_logprob=part.behaviour_logprob)
        return result.loss.sum(), result.diagnostics

    if chunks:
        value, _ = PackedLM(model)(batch, loss)
    else:
        value, _ = loss(apply_head(model, hidden_at_loss_tokens(model, batch)), batch)
    value.backward()


HEADERS = {
    "step": "| prefix | turns | packed s | none s | repeated s | TRL s | loss tokens/s | speed-up over repeated | bound "
            "(FLOPs) | of bound | over TRL | none over repeated | its bound |",
    "memory": "| objective | V | own MiB | own s | TRL MiB | TRL s |",
    "scoring": "| trunk | points | tokens | scores s | plain forward s | ratio |",
    "small": "| objective | chunks s | at once s | ratio |",
}


def main() -> None:
    if sys.argv[1:2] == ["own-memory"]:
        own_memory(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(HEADERS))
    parser.add_argument("--prefixes", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 4, 8], help="turns, or decision points for scoring")
    parser.add_argument("--repeat", type=int, default=3, help="measured runs of each program")
    parser.add_argument("--warmup", type=int, default=1, help="runs of each program before the measured ones")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--peer-python", default="", help="interpreter of a virtual environment with trl")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of one memory run, ours or TRL's")
    parser.add_argument("--objectives", nargs="+", default=[])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[151_936])
    parser.add_argument("--positions", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden states in the memory runs")
    parser.add_argument("--logits-mib", type=float, default=256.0)
    parser.add_argument("--wall", action="store_true")
    parser.add_argument("--json", default="", help="file for all numbers")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    header = HEADERS[options.what]
    print(header + "\n|" + " --- |" * (header.count("|") - 1), flush=True)
    bench = {"step": bench_step, "memory": bench_memory, "scoring": bench_scoring, "small": bench_small}[options.what]
    found = bench(options)
    if options.json:
        Path(options.json).write_text(json.dumps({"options": vars(options), "results": found}, indent=1))


if __name__ == "__main__":
    main()
