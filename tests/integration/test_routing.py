"""Whole runs with routing replay: the engine's experts reach the training pass, and change nothing where both agree."""

from __future__ import annotations

import pytest

from mopd.run import train
from tests.tiny_run import records


def test_a_run_replays_the_routes_of_its_engine_and_proves_its_weights(tiny_run, tmp_path):
    found = {}
    for name, options in {"free": (), "replayed": ("train.routing_replay=true", "train.routing_similarity_every=2")}.items():
        train(tiny_run.config(f"run={tmp_path / name}", f"store={tiny_run.config().store}", "train.steps=2",
                              "consistency.points=0", "train.selftest=false", *options))
        found[name] = records(tmp_path / name / "students" / "student_mixed" / "seed-1")
    for free, replayed in zip(found["free"], found["replayed"], strict=True):
        # Strictly on-policy: the learner would choose the same, so nothing but rounding may differ.
        assert replayed["loss"] == pytest.approx(free["loss"], rel=1e-4)
        replay, tokens = replayed["router"]["replay"], sum(part["tokens"] for part in replayed["domains"].values())
        assert max(replay["other_share"]) < 0.01 and min(replay["tokens"]) > tokens
        assert "replay" not in free["router"]
        assert replayed["weights"]["gap"] < 1e-4 and replayed["weights"]["version"] == replayed["step"] + 1
    similar = [step["router"].get("similarity") for step in found["replayed"]]
    assert set(similar[0]) == {"embodied", "game"} and similar[1] is None
    assert all(0 < part["overlap"] < 1 for part in similar[0].values())
