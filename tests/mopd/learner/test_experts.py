"""Spread experts on one rank: AutoEP's own layers train the model, and everything outside still sees Hugging Face names.

Two ranks are in tests/integration/test_ranks.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mopd.learner.engine import DeepSpeedRefuses, Learner, LearnerConfig
from mopd.learner.experts import CannotSpread
from mopd.learner.weights import named_weights
from tests.mopd.learner.test_engine import batches_of, constant, weighted_cross_entropy
from tests.mopd.learner.tiny import make_model, mixed_rows


@pytest.mark.parametrize("family, preset", [("qwen3_moe", ""), ("mixtral", ""), ("deepseek_v3", ""),
                                            ("mimo_v2_flash", "deepseek_v3")])
def test_spread_experts_train_as_the_model_does_and_keep_its_names(family, preset):
    reports, weights = [], []
    rows = mixed_rows(np.random.default_rng(2), 5)
    for size in (0, 1):
        model = make_model(family)
        learner = Learner(model, config=constant(zero_stage=2, autoep_size=size, autoep_preset=preset), total_steps=2)
        start = {name: tensor.clone() for name, tensor in named_weights(learner)}
        assert all(torch.equal(start[name], tensor) for name, tensor in make_model(family).named_parameters())
        for _ in range(2):
            report = learner.train_step(batches_of(rows), weighted_cross_entropy)
        learner.check_routers()
        reports.append((report.loss, report.gradient_norm, report.expert_counts.tolist()))
        weights.append({name: tensor.clone() for name, tensor in named_weights(learner)})
        assert learner.whole is (size == 0)
        learner.close()
    assert reports[1][:2] == pytest.approx(reports[0][:2], rel=1e-4) and reports[1][2] == reports[0][2]
    assert weights[0].keys() == weights[1].keys() == start.keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=2e-3, atol=2e-4, msg=name)


def test_what_cannot_be_spread_is_said_with_its_key():
    with pytest.raises(CannotSpread, match="autoep_size: Qwen3ForCausalLM has no experts"):
        Learner(make_model("qwen3"), config=LearnerConfig(autoep_size=1), total_steps=1)
    with pytest.raises(CannotSpread, match="3 does not divide the 4 experts of model.layers.0.mlp.experts"):
        Learner(make_model("qwen3_moe"), config=LearnerConfig(autoep_size=3), total_steps=1)
    with pytest.raises(DeepSpeedRefuses, match="autoep_size=2"):
        Learner(make_model("qwen3_moe"), config=LearnerConfig(autoep_size=2), total_steps=1)
    with pytest.raises(ValueError, match="autoep_size needs zero_stage"):
        Learner(make_model("qwen3_moe"), config=LearnerConfig(autoep_size=1, zero_stage=0), total_steps=1)
