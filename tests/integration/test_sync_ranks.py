"""Weights of two real ranks: split by ZeRO-3, spread by AutoEP, they reach a folder and every rank's engine whole."""

from __future__ import annotations

import json

import pytest

from tests.mopd.learner.test_engine import run_python

pytestmark = pytest.mark.timeout(600)

BOTH = """
import json, os
from pathlib import Path
from tests.mopd.learner.test_engine import *
from mopd.learner.weights import named_weights
from mopd.ranks import RankFailed, Ranks
from mopd.sampling.hf import HFEngine
from mopd.sampling.sync import WeightFolder, WeightFolderError, folder_weights, hand_over, publish, take

ranks = Ranks.start(timeout=120)
scratch = Path(os.environ["SCRATCH"])
found = {}
for name, options in {"zero-3": {"zero_stage": 3}, "spread": {"zero_stage": 2, "autoep_size": 2}}.items():
    model, engine = make_model("qwen3_moe"), HFEngine(make_model("qwen3_moe", seed=9))
    learner = Learner(model, config=constant(**options), total_steps=3)
    learner.train_step(batches_of(mixed_rows(np.random.default_rng(ranks.rank), 3)), weighted_cross_entropy)
    place = WeightFolder(scratch / name, shard_bytes=9000) if ranks.first else None
    for layout in ("module", "checkpoint"):
        made = publish(learner, place, 1 if layout == "module" else 2, ranks=ranks, layout=layout)
        taken = take(engine, made.path, made.version)  # every rank reads the one folder
        found[f"{name} {layout}"] = taken.gap
    done = hand_over(learner, engine, 3, ranks=ranks)
    found[f"{name} in process"], found[f"{name} version"] = done.gap, engine.version
    whole = {n: t.clone() for n, t in named_weights(learner)}
    found[f"{name} equal"] = all(torch.equal(t, dict(engine.model.named_parameters())[n]) for n, t in whole.items())
    if ranks.first:
        place.shard_bytes, place.root = 10**9, scratch / "nowhere" / "at all"
    try:
        publish(learner, place, 4, ranks=ranks)
        found[f"{name} failure"] = "none"
    except (WeightFolderError, RankFailed) as error:
        found[f"{name} failure"] = f"{type(error).__name__}: {error}"
    again = hand_over(learner, engine, 5, ranks=ranks)  # the ranks are still in step
    found[f"{name} after"] = again.gap
    learner.close()
(scratch / f"rank-{ranks.rank}.json").write_text(json.dumps(found))
"""


def test_two_ranks_hand_over_whole_weights_and_fail_together(tmp_path):
    run_python(BOTH, processes=2, timeout=400, SCRATCH=str(tmp_path))
    first, second = (json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1))
    for found in (first, second):
        for name in ("zero-3", "spread"):
            assert all(found[f"{name} {how}"] < 1e-4 for how in ("module", "checkpoint", "in process", "after"))
            assert found[f"{name} equal"] and found[f"{name} version"] == 3
    for name in ("zero-3", "spread"):
        assert first[f"{name} failure"].startswith("WeightFolderError: the weights of step 4 could not be written to ")
        assert second[f"{name} failure"].startswith("RankFailed: writing the weights for the engines failed on rank 0 of 2")
