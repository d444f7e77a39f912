"""What `mopd export` writes of a student's checkpoint, vLLM loads: its log-probabilities are Transformers'."""

from __future__ import annotations

import json

import numpy as np
import torch

from mopd.config import to_dict
from mopd.export_model import export_student
from mopd.learner.checkpoint import save_checkpoint
from mopd.learner.model import load_model
from mopd.learner.packing import pack
from mopd.relayout import saved_learner
from mopd.rows import STREAMS, Action, Row
from tests.vllm.conftest import hf_scores, questions
from tests.vllm.test_agreement import check_against_hf


def rows(vocabulary: int) -> list[Row]:
    tokens = np.random.default_rng(0).integers(0, vocabulary, 40).astype(np.uint32)
    action = Action(5, tokens[5:], np.zeros(35, np.float32), np.zeros(35, np.int32), False, 0, 0, 0)
    return [Row("game", "rollout", tokens, (action,), "a row")]


def loss(logits, batch):
    return torch.nn.functional.cross_entropy(logits, batch.label, reduction="none").mean(), {}


def test_an_exported_checkpoint_is_the_same_model_in_vllm(models, tiny_run, tmp_path):
    """With experts in AutoEP's layers and files of 60 kB, as far from the usual folder as it gets."""
    from teachers.scoring.vllm_local import VLLMLocal

    config = tiny_run.config(f"student.model={models['game']}", "deepspeed.zero_stage=2", "deepspeed.autoep_size=1",
                             "train.optimizer.learning_rate=0.01")
    vocabulary, student = len(tiny_run.tokenizer()), tmp_path / "student"
    learner = saved_learner(config, {"zero_stage": 2, "dtype": "float32", "autoep_size": 1})
    batches = pack(rows(vocabulary), token_budget=100, pad_id=0, domains=("game",), streams=STREAMS)
    for _ in range(3):
        learner.train_step(batches, loss)
    save_checkpoint(learner, student / "checkpoints" / "own", {}, score=-1.0, background=True)
    learner.close()
    (student / "config.json").write_text(json.dumps(to_dict(config)))
    result = export_student(student, None, tmp_path / "exported", best=True, shard_size="60KB")
    assert result["step"] == 3 and len(result["files"]) > 2 and result["largest_difference"] < 1e-4
    assert (tmp_path / "exported" / "generation_config.json").is_file()
    assert type(load_model(tmp_path / "exported")).__name__ == "Qwen3MoeForCausalLM"
    requests = questions(vocabulary)
    moved = [np.abs(a - b).max() for a, b in zip(hf_scores(models["game"], requests),
                                                 hf_scores(tmp_path / "exported", requests), strict=True)]
    assert max(moved) > 0.1, "three steps did not change it"
    backend = VLLMLocal(str(tmp_path / "exported"), teacher="exported", dtype="float32", max_model_len=512,
                        max_request_tokens=200)
    try:
        check_against_hf(tmp_path / "exported", requests, backend.score(requests))
    finally:
        backend.close()
