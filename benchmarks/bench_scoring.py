"""Tokens that a teacher scores per second: in this process, in vLLM, behind a vLLM server, and by a plain loop.

    python benchmarks/bench_scoring.py                 all ways that are installed
    python benchmarks/bench_scoring.py --only loop hf  without vLLM

The work is k decision points of n trajectories, played ("rollout": the turns of one trajectory stand in one context) or
resumed ("fresh": one turn branches off at each point). The plain loop reads every turn's whole context by itself and keeps
all logits. Each way is warmed up, runs `--repeats` times in turn with the others, and the median counts; CPU seconds are
those of this process and all that it started. Every way's scores are compared with the loop's. `--json FILE` keeps all
numbers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from mopd.learner.model import TinyMoEConfig, load_model, new_tiny_moe, save_model  # noqa: E402
from mopd.learner.packing import pack  # noqa: E402
from mopd.rows import STREAMS, Action, Row  # noqa: E402
from mopd.sampling.demo_tokenizer import train_tokenizer  # noqa: E402
from teachers.scoring import wanted  # noqa: E402
from teachers.scoring.cache import ScoreCache  # noqa: E402
from teachers.scoring.hf import HFTeacher  # noqa: E402
from teachers.scoring.remote import RemoteTeacher  # noqa: E402

WAYS = ("loop", "hf", "vllm", "server", "completions", "cache")
SAYS = {"loop": "plain loop", "hf": "hf, packed, prefixes shared", "vllm": "vLLM in this process", "server": "vLLM server",
        "completions": "vLLM server, /v1/completions", "cache": "vLLM server, asked a second time"}


def rows_of(kind: str, sequences: int, turns: int, observation: int, turn: int, vocabulary: int) -> list[Row]:
    """Random trajectories; the same tokens for both kinds as far as they go."""
    draw = np.random.default_rng(0)
    found = []
    for number in range(sequences):
        trunk = draw.integers(5, vocabulary, turns * (observation + turn)).astype(np.uint32)
        actions = []
        for t in range(turns):
            at = t * (observation + turn) + observation
            tokens = trunk[at:at + turn] if kind == "rollout" else draw.integers(5, vocabulary, turn).astype(np.uint32)
            actions.append(Action(at=at, tokens=tokens, behaviour_logprob=np.full(turn, -1.0, np.float32),
                                  version=np.zeros(turn, np.int32), branch=kind == "fresh", turn=t, sequence=number,
                                  group=number))
        found.append(Row("any", "rollout" if kind == "rollout" else "teacher_prefix", trunk, tuple(actions)))
    return found


def plain_loop(model, requests) -> list[np.ndarray]:
    found = []
    with torch.no_grad():
        for request in requests:
            ids = torch.from_numpy(request.tokens[:request.stop].astype(np.int64))[None]
            logp = torch.log_softmax(model(ids).logits[0], -1)[request.start - 1:request.stop - 1]
            found.append(logp.gather(1, ids[0, request.start:, None])[:, 0].numpy())
    return found


def packed(teacher: HFTeacher, rows) -> list[np.ndarray]:
    """Scores by action, in the rows' order."""
    found: dict[tuple[int, int], np.ndarray] = {}
    # Rows are given a number by their group, which is the sequence's.
    for batch in pack(rows, token_budget=4096, pad_id=0, domains=("any",), streams=STREAMS):
        scores = teacher(batch, need="sampled", temperature=1.0).logprob
        for group in batch.group.unique().tolist():
            for turn in batch.turn[batch.group == group].unique().tolist():
                found[group, turn] = scores[(batch.group == group) & (batch.turn == turn)].numpy()
    return [found[action.group, action.turn] for row in rows for action in row.actions]


def cpu_seconds() -> float:
    """Of this process and its descendants."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def measure(call) -> tuple[float, float, list[np.ndarray]]:
    cpu, wall = cpu_seconds(), time.perf_counter()
    found = call()
    return time.perf_counter() - wall, cpu_seconds() - cpu, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--sequences", type=int, default=12)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--observation", type=int, default=64)
    parser.add_argument("--turn", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        # The demo's architecture with a larger vocabulary; its tokenizer is never used, but a server wants one.
        model = new_tiny_moe(TinyMoEConfig(initializer_range=0.1), vocabulary=options.vocabulary, seed=0, pad_id=0,
                             bos_id=None, eos_id=1)
        path = save_model(model, Path(folder) / "model", tokenizer=train_tokenizer(["text for a tokenizer"] * 4, 300))
        results = run(options, path, stack)
    show(options, results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def run(options, path: Path, stack: contextlib.ExitStack) -> dict:
    """{kind: {way: {"wall", "cpu", "scored", "computed", "difference"}}}"""
    calls = {}
    limit = options.turns * (options.observation + options.turn) + 64
    if "hf" in options.only:
        teacher = HFTeacher(load_model(path), teacher="t")
        calls["hf"] = lambda rows, requests: (packed(teacher, rows), sum(row.length for row in rows))
    if "vllm" in options.only:
        from teachers.scoring.vllm_local import VLLMLocal

        local = VLLMLocal(str(path), teacher="t", dtype="float32", max_model_len=limit)
        stack.callback(local.close)
        calls["vllm"] = lambda rows, requests: asked(local, requests)
    if {"server", "completions", "cache"} & set(options.only):
        from teachers.scoring.vllm_server import VLLMServers
        from teachers.serve import ServeOptions, running

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        serving = ServeOptions(str(path), "t", port=port, dtype="float32", max_model_len=limit)
        stack.enter_context(running(serving, log=path.parent / "server.log"))
        server, older = (VLLMServers([serving.url], teacher="t") for _ in range(2))
        older.ways = ("completions",)
        stack.callback(server.close), stack.callback(older.close)
        calls["server"] = lambda rows, requests: asked(server, requests)
        calls["completions"] = lambda rows, requests: asked(older, requests)
        remembered = RemoteTeacher(server, revision="r", cache=ScoreCache(1 << 28))
        stack.callback(remembered.close)
        calls["cache"] = lambda rows, requests: ([a.logprob for a in remembered.answers(requests)], 0)
    plain = load_model(path).eval()
    results = {}
    for kind in ("rollout", "fresh"):
        rows = rows_of(kind, options.sequences, options.turns, options.observation, options.turn, options.vocabulary)
        requests = wanted.of_rows(rows, what="sampled", temperature=1.0)
        plain_calls = {"loop": lambda rows, requests: (plain_loop(plain, requests), sum(r.stop for r in requests))}
        todo = {way: call for way, call in (plain_calls | calls).items() if way in (*options.only, "loop")}
        exact = np.concatenate(plain_loop(plain, requests))
        times = {way: [] for way in todo}
        found = {}
        for repeat in range(options.repeats + 1):
            for way, call in todo.items():
                wall, cpu, (scores, computed) = measure(lambda call=call: call(rows, requests))  # noqa: B023 - called at once
                if repeat:  # the first is a warm-up, and fills the cache
                    times[way].append((wall, cpu))
                found[way] = {"scored": len(exact), "computed": computed,
                              "difference": float(np.abs(np.concatenate(scores) - exact).max())}
        results[kind] = {way: found[way] | {"wall": statistics.median(w for w, _ in times[way]),
                                            "cpu": statistics.median(c for _, c in times[way])} for way in todo}
    return results


def asked(backend, requests) -> tuple[list[np.ndarray], int]:
    before = backend.computed_tokens
    answers = backend.score(requests)
    return [answer.logprob for answer in answers], backend.computed_tokens - before


def show(options, results: dict) -> None:
    print(f"{options.sequences} trajectories of {options.turns} turns: {options.observation} tokens of observation, "
          f"{options.turn} of action; load {os.getloadavg()[0]:.1f}\n")
    print("| work | way | tokens computed | scored per second | per CPU second | of the loop's | largest difference |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for kind, ways in results.items():
        for way, r in ways.items():
            # The clock of CPU seconds ticks in hundredths: of less than a few ticks there is no rate to tell.
            told = r["cpu"] > 0.05
            rate, ratio = (f"{r['scored'] / r['cpu']:,.0f}", f"{ways['loop']['cpu'] / r['cpu']:.1f}×") if told else ("—", "—")
            print(f"| {kind} | {SAYS[way]} | {r['computed']:,} | {r['scored'] / r['wall']:,.0f} | {rate} | {ratio} | "
                  f"{r['difference']:.1e} |")


if __name__ == "__main__":
    main()
