"""The learner's step: the sum over micro-batches and ranks, quick to start, without a compiler."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd.learner.engine import DeepSpeedRefuses, Learner, LearnerConfig, learning_rate_at
from mopd.learner.forward import PackedLM
from mopd.learner.packing import pack
from mopd.learner.weights import named_weights
from mopd.rows import STREAMS
from tests.mopd.learner.tiny import make_model, mixed_rows
from tests.tiny_run import torchrun

DOMAINS = ("game", "science")
ROOT = Path(__file__).resolve().parents[3]


def batches_of(rows, budget=200):
    batches = pack(rows, token_budget=budget, pad_id=0, domains=DOMAINS, streams=STREAMS)
    for batch in batches:
        batch.weight = (1.0 + batch.label.float() / 10) / 50
    return batches


def weighted_cross_entropy(logits, batch):
    losses = torch.nn.functional.cross_entropy(logits, batch.label, reduction="none")
    return (losses * batch.weight).sum(), {"losses": losses.detach()}


def constant(**changes) -> LearnerConfig:
    return LearnerConfig(**{"learning_rate": 1e-2, "schedule": "constant", "weight_decay": 0.05, **changes})


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("clipping", [0.0, 0.3])
def test_steps_equal_plain_adamw(stage, clipping):
    rng = np.random.default_rng(0)
    rows = [mixed_rows(rng, 5) for _ in range(3)]
    model = make_model("qwen3_moe")
    reference = copy.deepcopy(model)
    learner = Learner(model, config=constant(zero_stage=stage, gradient_clipping=clipping), total_steps=3)
    routers = set(learner.router_names)
    assert routers == {"model.layers.0.mlp.gate", "model.layers.1.mlp.gate"}
    decayed, plain = [], []
    for name, parameter in reference.named_parameters():
        if name.removesuffix(".weight") in routers:
            continue
        (decayed if parameter.dim() > 1 else plain).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=1e-2, betas=(0.9, 0.98)
    )
    for number, part in enumerate(rows):
        report = learner.train_step(batches_of(part), weighted_cross_entropy)
        optimizer.zero_grad()
        (whole,) = [pack(part, token_budget=10_000, pad_id=0, domains=DOMAINS, streams=STREAMS, by_domain=False)]
        whole[0].weight = (1.0 + whole[0].label.float() / 10) / 50
        loss, _ = PackedLM(reference)(whole[0], weighted_cross_entropy)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_([*decayed, *plain], clipping or math.inf)
        optimizer.step()
        assert report.step == number and report.micro_batches > 1
        assert report.loss == pytest.approx(loss.item(), rel=1e-5)
        assert report.gradient_norm == pytest.approx(norm.item(), rel=1e-4)
        assert report.tokens == sum(b.tokens for b in batches_of(part))
    for (name, mine), theirs in zip(learner.model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=2e-3, atol=2e-4, msg=name)
    learner.check_routers()
    learner.close()
    assert all(p.data_ptr() for p in model.parameters())


def test_the_split_into_micro_batches_changes_nothing():
    rows = mixed_rows(np.random.default_rng(1), 9)
    norms = []
    for budget in (40, 200, 5000):
        learner = Learner(make_model("qwen3_moe"), config=constant(), total_steps=1)
        report = learner.train_step(batches_of(rows, budget), weighted_cross_entropy)
        norms.append((report.loss, report.gradient_norm, report.expert_counts.tolist()))
        learner.close()
    assert norms[0][:2] == pytest.approx(norms[1][:2], rel=1e-5) and norms[1][:2] == pytest.approx(
        norms[2][:2], rel=1e-5
    )
    assert norms[0][2] == norms[1][2] == norms[2][2]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_loss_that_is_not_finite_updates_nothing(stage):
    model = make_model("qwen3")
    learner = Learner(model, config=constant(zero_stage=stage), total_steps=3)
    before = {n: w.clone() for n, w in named_weights(learner)}
    batches = batches_of(mixed_rows(np.random.default_rng(0), 4))
    batches[-1].weight[0] = math.nan
    with pytest.raises(FloatingPointError, match="step 0: the loss is nan; no update was made"):
        learner.train_step(batches, weighted_cross_entropy)
    assert all(torch.equal(before[n], w) for n, w in named_weights(learner))
    with pytest.raises(FloatingPointError, match="ended at step 0"):
        learner.train_step(batches_of(mixed_rows(np.random.default_rng(0), 4)), weighted_cross_entropy)
    learner.close()


def test_schedules():
    config = LearnerConfig(learning_rate=1.0, warmup_steps=4, minimum_ratio=0.1, schedule="cosine")
    rates = [learning_rate_at(s, config, 24) for s in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0]) and rates[24] == pytest.approx(0.1)
    assert rates[14] == pytest.approx(0.55) and all(a > b for a, b in zip(rates[4:], rates[5:], strict=False))
    linear = LearnerConfig(learning_rate=2.0, schedule="linear")
    assert learning_rate_at(5, linear, 10) == pytest.approx(1.0)
    assert learning_rate_at(9, LearnerConfig(learning_rate=2.0, schedule="constant"), 10) == 2.0


def test_every_config_error_at_once():
    with pytest.raises(ValueError) as error:
        Learner(
            make_model("qwen3"), config=LearnerConfig(schedule="step", zero_stage=5, learning_rate=0), total_steps=1
        )
    assert all(word in str(error.value) for word in ("schedule", "zero_stage", "learning_rate"))


def test_raw_keys_that_deepspeed_does_not_take_are_named():
    with pytest.raises(DeepSpeedRefuses, match="deepspeed.raw adds") as caught:
        Learner(make_model("qwen3"), config=LearnerConfig(deepspeed={"zero_optimization": 3}), total_steps=1)
    assert "must be a mapping" in str(caught.value)


def test_raw_keys_that_deepspeed_never_reads_are_named():
    """A misspelt key would do nothing without a word; a known one that is read otherwise passes."""
    said = "never reads the keys zero_optimisation .did you mean zero_optimization."
    with pytest.raises(DeepSpeedRefuses, match=said) as caught:
        Learner(make_model("qwen3"), total_steps=1, config=LearnerConfig(
            deepspeed={"zero_optimisation": {"offload": True}, "flops_profiler": {"enabled": False}, "dump_state": False}))
    assert "flops_profiler (" not in str(caught.value) and "dump_state (" not in str(caught.value)


@pytest.mark.parametrize("raw, key, instead", [
    ({"train_batch_size": 7}, "train_batch_size", "micro_batch_tokens"), ({"bf16": {"enabled": True}}, "bf16", "dtype"),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage", "deepspeed.zero_stage")])
def test_raw_keys_that_the_learner_sets_are_refused(raw, key, instead):
    with pytest.raises(ValueError, match="is made here") as caught:
        Learner(make_model("qwen3"), config=LearnerConfig(deepspeed=raw), total_steps=1)
    assert key in str(caught.value) and instead in str(caught.value)


def test_checkpointed_activations_and_bfloat16():
    rows = mixed_rows(np.random.default_rng(1), 6)
    found = []
    for config in (constant(), constant(gradient_checkpointing=True), constant(dtype="bfloat16")):
        learner = Learner(make_model("qwen3_moe"), config=config, total_steps=1)
        report = learner.train_step(batches_of(rows), weighted_cross_entropy)
        found.append((report.loss, report.gradient_norm, int(report.expert_counts.sum())))
        learner.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    assert found[2][:2] == pytest.approx(found[0][:2], rel=0.05)
    assert found[0][2] == found[1][2] == found[2][2] == 2 * 2 * report.tokens


def run_python(code: str, *, processes: int = 0, timeout: int = 150, **environment) -> str:
    """Run `code` in a fresh process, or on `processes` ranks through torchrun; returns what it printed."""
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    if processes:
        return torchrun(code, environment["SCRATCH"], processes=processes, timeout=timeout, **environment).stdout
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


START = """
import time
start = time.perf_counter()
import torch, deepspeed
from tests.mopd.learner.test_engine import *
imported = time.perf_counter()
learner = Learner(make_model("qwen3"), config=constant(), total_steps=1)
learner.train_step(batches_of(mixed_rows(np.random.default_rng(0), 2)), weighted_cross_entropy)
print("seconds", time.perf_counter() - imported)
"""


def test_one_process_starts_without_a_compiler_port_or_noise(tmp_path):
    out = run_python(START, PATH="/nonexistent", TORCH_EXTENSIONS_DIR=str(tmp_path / "extensions"))
    assert not (tmp_path / "extensions").exists(), "DeepSpeed compiled something"
    assert out.startswith("seconds ") and len(out.splitlines()) == 1, f"noise on stdout: {out}"
    assert float(out.split()[1]) < 60, "a start without a build takes seconds"


RANKS = """
import json
from mopd.learner.checkpoint import Checkpoints
from tests.mopd.learner.test_engine import *

rank = int(os.environ["RANK"])
results = {}
for stage in (0, 1, 2, 3):
    found = []
    # A few loss tokens a chunk: the ranks have other numbers of chunks, and one has none.
    learner = Learner(make_model("qwen3_moe", tie_word_embeddings=stage % 2 == 1), total_steps=4,
                      config=constant(zero_stage=stage, gradient_clipping=0.5, logits_mib=0.005))
    for step, split in enumerate(SPLITS):
        rows = mixed_rows(np.random.default_rng(step), 7)
        mine = rows[:split] if rank == 0 else rows[split:]
        report = learner.train_step(batches_of(mine), weighted_cross_entropy)
        found.append([report.loss, report.gradient_norm, report.tokens, report.expert_counts.tolist()])
    weights = {n: float(w.double().abs().sum()) for n, w in named_weights(learner)}
    learner.check_routers()
    scored = learner.forward_only(batches_of(mine), lambda logits, b: b.label)
    assert sum(map(len, scored)) == sum(r.loss_tokens for r in mine)
    results[stage] = [found, weights]
    saved = Checkpoints(os.environ["SCRATCH"] + f"/zero{stage}")
    saved.save(learner, learner.step, {"stage": stage})
    after = learner.train_step(batches_of(mine), weighted_cross_entropy)
    learner.close()
    assert all(p.data.numel() for p in learner.model.parameters())
    learner = Learner(make_model("qwen3_moe", seed=4, tie_word_embeddings=stage % 2 == 1), config=learner.config,
                      total_steps=4)
    assert saved.load(learner) == (4, {"stage": stage})
    again = learner.train_step(batches_of(mine), weighted_cross_entropy)
    assert (again.loss, again.gradient_norm) == (after.loss, after.gradient_norm), f"ZeRO {stage}: resumed differently"
    learner.close()
if rank == 0:
    print("RESULT" + json.dumps(results), flush=True)
torch.distributed.barrier()
torch.distributed.destroy_process_group()  # or gloo's threads may still run when the process ends
"""
SPLITS = [2, 7, 0, 6]  # rows on rank 0 of 7; once all are there, once none


@pytest.mark.timeout(900)
def test_two_ranks_with_other_token_counts_equal_one_process(tmp_path):
    out = run_python(RANKS, processes=2, timeout=600, SCRATCH=str(tmp_path))
    results = json.loads(out[out.index("RESULT") + 6 :])
    expected, weights = {}, {}
    for tied in (False, True):
        learner = Learner(make_model("qwen3_moe", tie_word_embeddings=tied), total_steps=4,
                          config=constant(zero_stage=0, gradient_clipping=0.5))
        expected[tied] = []
        for step in range(len(SPLITS)):
            report = learner.train_step(batches_of(mixed_rows(np.random.default_rng(step), 7)), weighted_cross_entropy)
            expected[tied].append([report.loss, report.gradient_norm, report.tokens, report.expert_counts.tolist()])
        weights[tied] = {n: float(p.detach().double().abs().sum()) for n, p in learner.model.named_parameters()}
        learner.close()
    for stage, (found, theirs) in results.items():
        tied = int(stage) % 2 == 1
        for mine, other in zip(expected[tied], found, strict=True):
            assert other[:2] == pytest.approx(mine[:2], rel=3e-4), f"ZeRO {stage}"
            assert other[2:] == mine[2:], f"ZeRO {stage}"
        assert theirs == pytest.approx(weights[tied], rel=2e-3), f"ZeRO {stage}"
