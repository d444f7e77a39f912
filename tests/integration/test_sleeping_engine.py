"""An engine on the learner's device sleeps while the student trains and is awake for weights and sampling."""

from __future__ import annotations

import pytest

from mopd.run import train
from mopd.sampling.hf import HFEngine
from tests.tiny_run import records

CALLS: list[str] = []


class Sleeper(HFEngine):
    """Refuses to work while it sleeps, as vLLM in sleep mode would."""

    asleep = False

    def sleep(self) -> None:
        self.asleep = True
        CALLS.append("sleep")

    def wake(self) -> None:
        self.asleep = False
        CALLS.append("wake")

    def generate(self, *arguments, **options):
        assert not self.asleep, "it samples asleep"
        if CALLS[-1] != "sample":
            CALLS.append("sample")
        return super().generate(*arguments, **options)

    def load_weights(self, weights, version):
        assert not self.asleep, "it takes weights asleep"
        CALLS.append("weights")
        return super().load_weights(weights, version)


def make(config, *, model, number, of):
    return Sleeper(model, max_batch=config.train.sampling_batch)


@pytest.mark.timeout(300)
def test_it_sleeps_between_sampling_and_the_next_weights(tiny_run, tmp_path):
    CALLS[:] = ["start"]
    changes = ("train.steps=2", "train.selftest=false", "consistency.points=0")
    train(tiny_run.config(f"run={tmp_path}/slept", *changes, f"sampling.engine={__name__}:make"))
    assert CALLS == ["start", *["sample", "sleep", "wake", "weights"] * 2]
    train(tiny_run.config(f"run={tmp_path}/plain", *changes))
    slept, plain = (records(tmp_path / name / "students" / "student_mixed" / "seed-1") for name in ("slept", "plain"))
    assert [(r["loss"], r["gradient_norm"]) for r in slept] == [(r["loss"], r["gradient_norm"]) for r in plain]
