"""The probe of an engine's weights: equal weights pass, a weight that did not come is found and both numbers are said."""

from __future__ import annotations

import pytest
import torch

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.probe import WeightsDiffer, check_weights
from mopd.learner.weights import named_weights
from mopd.sampling.hf import HFEngine
from tests.mopd.learner.tiny import make_model


@pytest.mark.parametrize("options", [{}, {"prefix_gradient": "none"}, {"zero_stage": 3}])
def test_a_weight_that_did_not_come_is_found(options):
    engine = HFEngine(make_model("qwen3_moe"))
    learner = Learner(make_model("qwen3_moe", seed=3), config=LearnerConfig(**options), total_steps=1)
    with pytest.raises(WeightsDiffer, match=r"log-probability -\d+\.\d+, the learner -\d+\.\d+ \(they may differ by 0.001\)"):
        check_weights(learner, engine.score)
    engine.load_weights(named_weights(learner), version=1)
    assert check_weights(learner, engine.score) < 1e-4
    with torch.no_grad():
        engine.model.model.layers[1].mlp.experts.down_proj.mul_(1.1)
    with pytest.raises(WeightsDiffer, match="after step 0 the engine gives token"):
        check_weights(learner, engine.score)
    learner.close()
