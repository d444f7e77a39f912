"""Prefix mode reads nothing that was played after a decision point, and needs no environment."""

from __future__ import annotations

import json

import pytest

from mopd.environments.pool import EnvironmentPool
from mopd.environments.textworld_express import TextWorldExpressFamily
from mopd.run import train
from prefix_store import PrefixStore

pytestmark = pytest.mark.timeout(900)
PREFIX_ONLY = ("train.prefix_fraction=1", "train.demonstration_fraction=0", "train.steps=3", "train.fresh_turns=2")


class Leak(Exception):
    """What was played at a point was read."""


@pytest.fixture
def no_continuation(monkeypatch):
    for name in ("continuation", "sequence"):
        def refuse(*_, name=name):
            raise Leak(name)
        monkeypatch.setattr(PrefixStore, name, refuse)


def test_prefix_mode_reads_no_continuation_and_plays_nothing(tiny_run, tmp_path, no_continuation, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("an environment was asked for")
    for name in ("acquire", "prefetch"):
        monkeypatch.setattr(EnvironmentPool, name, refuse)
    monkeypatch.setattr(TextWorldExpressFamily, "create", refuse)
    model = train(tiny_run.config(f"run={tmp_path}", *PREFIX_ONLY))
    lines = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 3
    for line in lines:
        assert line["environment_steps"] == 0 and line["seconds"]["environments"] == 0
        assert line["tokens"]["sampled"] == line["tokens"]["trained"] > 0
        for domain in line["domains"].values():
            assert set(domain["streams"]) == {"teacher_prefix", "sft_prefix"}
            assert sum(domain["depth"].values()) == sum(s["sequences"] for s in domain["streams"].values())
    assert json.loads((model.parent / "episodes.json").read_text()) == []


@pytest.mark.parametrize("strategy", [
    ["selection.strategy=pivot", "selection.options={quantile: 0.5}", "selection.points_per_sequence=1"],
    ["selection.strategy=weighted", "selection.options={score: outcome.reward}"],
    ["selection.strategy=curriculum", "selection.draw=replacement"],
])  # fmt: skip
def test_rollouts_and_every_way_to_select_read_no_continuation(tiny_run, tmp_path, no_continuation, strategy):
    model = train(tiny_run.config(f"run={tmp_path}", "train.prefix_fraction=0.5", "train.steps=2", *strategy))
    lines = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    streams = {name for line in lines for domain in line["domains"].values() for name in domain["streams"]}
    assert streams == {"rollout", "teacher_prefix", "sft_prefix"}


def test_the_demonstration_stream_is_what_reads_continuations(tiny_run, tmp_path, no_continuation):
    with pytest.raises(Leak, match="continuation"):
        train(tiny_run.config(f"run={tmp_path}", *PREFIX_ONLY, "train.demonstration_fraction=0.5"))
