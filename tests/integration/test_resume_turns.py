"""Training that plays several turns on from stored points, with real environments; and what a launch says about it."""

from __future__ import annotations

import dataclasses
import json

import pytest

from mopd.check import check_launch
from mopd.environments.pool import EnvironmentPool
from mopd.run import TooManyFailures, train
from prefix_store import PrefixStore
from tests.tiny_run import records

pytestmark = pytest.mark.timeout(900)
RESUME = ("train.prefix_fraction=1", "train.resume_turns=2", "train.fresh_turns=2", "train.samples_per_step=4",
          "selection.points_per_sequence=1")


def student(run):
    return run / "students" / "student_mixed" / "seed-1"


@pytest.fixture(scope="module")
def resumed(tiny_run, tmp_path_factory):
    run = tmp_path_factory.mktemp("resumed")
    train(tiny_run.config(f"run={run}", *RESUME, "train.prefix_fraction=0.75", "train.steps=3"))
    return student(run)


def test_two_turns_from_stored_points_train_beside_rollouts(resumed):
    lines = records(resumed)
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        played = 0
        for name, numbers in line["domains"].items():
            found, samples = numbers["resumed"], numbers["samples"]
            prefixes = samples.get("teacher_prefix", 0) + samples.get("sft_prefix", 0)
            assert (found is None) == (prefixes == 0), name
            if found is None:
                continue
            assert found["sequences"] == 2 * prefixes and found["failed"] == 0 and found["diverged"] == []
            assert 1 <= found["turns"] <= 2 and (found["success"] is None) == (found["finished"] == 0)
            played += found["replayed_steps"] + round(found["turns"] * found["sequences"])
            actions = sum(numbers["streams"][s]["sequences"] for s in ("teacher_prefix", "sft_prefix") if s in
                          numbers["streams"])
            assert actions == round(found["turns"] * found["sequences"]) > found["sequences"]
            assert numbers["mismatch_max"] < 1e-3 and numbers["infra_failures"] == {}
        rollouts = sum(n["turns"] * n["samples"].get("rollout", 0) for n in line["domains"].values() if n["turns"])
        assert line["environment_steps"] == played + round(rollouts) and line["dropped_groups"] == 0
        assert line["tokens"]["sampled"] == line["tokens"]["trained"] > 0
    assert sum(n["resumed"]["replayed_steps"] for line in lines for n in line["domains"].values() if n["resumed"]) > 0


def test_the_same_seed_gives_the_same_run(tiny_run, resumed, tmp_path, monkeypatch):
    """Whatever is restored ahead of need, and however long that takes."""
    from mopd.environments.replay import Replayer

    expect = Replayer.expect
    monkeypatch.setattr(Replayer, "expect", lambda self, jobs, room=None: expect(self, (), room=room))
    train(tiny_run.config(f"run={tmp_path}", *RESUME, "train.prefix_fraction=0.75", "train.steps=3"))
    assert records(student(tmp_path)) == records(resumed)


def changed_store(tiny_run, path, change):
    """A copy of the tiny run's store with `change` made to every sequence."""
    with PrefixStore.open(tiny_run.folder / "store") as store, PrefixStore.open(path, "w") as copied:
        for number, sequence in enumerate(store):
            copied.append(change(number, sequence))
        copied.commit("changed")
    return path


def with_another_action(sequence):
    """The first action was not the one that the text says."""
    other = next(a for a in ("turn left", "go forward", "look around") if a != sequence.actions[0])
    return dataclasses.replace(sequence, actions=(other, *sequence.actions[1:]))


def test_replays_that_diverge_are_counted_and_too_many_stop_the_run(tiny_run, tmp_path):
    store = changed_store(tiny_run, tmp_path / "store", lambda n, s: with_another_action(s) if n % 2 and
                          s.domain == "embodied" else s)
    options = (f"store={store}", *RESUME, "train.samples_per_step=12", "train.domain_schedule=static", "train.steps=1")
    train(tiny_run.config(f"run={tmp_path}", *options, "train.max_infra_failure_share=1"))
    (line,) = records(student(tmp_path))
    embodied = line["domains"]["embodied"]
    count = embodied["infra_failures"]["replay_diverged"]
    assert 0 < count == embodied["resumed"]["failed"] < embodied["resumed"]["sequences"]
    assert line["domains"]["game"]["infra_failures"] == {} and line["dropped_groups"] == count // 2
    found = embodied["resumed"]["diverged"][0]
    assert found["turn"] >= 1 and found["expected"] != found["found"] and found["domain"] == "embodied"
    with pytest.raises(TooManyFailures, match="resumed sequences failed .*replay_diverged.*before turn 1: expected"):
        train(tiny_run.config(f"run={tmp_path / 'strict'}", *options, "train.max_infra_failure_share=0.01"))


def test_one_turn_stays_without_environment(tiny_run, tmp_path, monkeypatch):
    """With resume_turns 1 in one domain, nothing is restored there; its fresh turns are those of a run without the key."""
    acquire = EnvironmentPool.acquire

    def only_game(self, *arguments, **options):
        assert self.family.name == "textworld_express", "an environment was asked for"
        return acquire(self, *arguments, **options)
    monkeypatch.setattr(EnvironmentPool, "acquire", only_game)
    part = ("train.domain_schedule=static", "train.steps=1")
    train(tiny_run.config(f"run={tmp_path / 'two'}", *RESUME, *part, "domains.embodied.resume_turns=1"))
    monkeypatch.setattr(EnvironmentPool, "acquire", None)
    train(tiny_run.config(f"run={tmp_path / 'one'}", *RESUME, *part, "train.resume_turns=1"))
    two, one = (records(student(tmp_path / name))[0]["domains"]["embodied"] for name in ("two", "one"))
    # Batched with others, log-probabilities may be rounded otherwise in their last bit.
    for key in ("samples", "tokens", "depth", "resumed", "infra_failures"):
        assert two[key] == one[key], key
    assert two["reverse_kl"] == pytest.approx(one["reverse_kl"], rel=1e-4)
    assert one["resumed"] is None and one["tokens"] > 0


def test_a_launch_refuses_points_without_an_environment(tiny_run, tmp_path):
    static = changed_store(tiny_run, tmp_path / "static", lambda n, s: dataclasses.replace(s, environment="")
                           if s.source.kind == "expert" and s.domain == "game" else s)
    config = tiny_run.config(f"store={static}", *RESUME)
    (error,) = check_launch(config)["errors"]
    assert error.startswith("domains.game: 2 turns are to be played on from stored points of stream sft_prefix")
    assert "static demonstration" in error and "Set domains.game.resume_turns=1" in error
    for remedy in ("domains.game.resume_turns=1", "train.teacher_prefix_share=1"):
        answer = check_launch(tiny_run.config(f"store={static}", *RESUME, remedy))
        assert answer["errors"] == []
    assert answer["domains"]["game"]["resume_turns"] == 2
    older = changed_store(tiny_run, tmp_path / "older", lambda n, s: dataclasses.replace(s, environment_version="0.1"))
    errors = check_launch(tiny_run.config(f"store={older}", *RESUME))["errors"]
    assert len(errors) == 4 and all("version '0.1'" in e and "collect or import it again" in e for e in errors)
    assert check_launch(tiny_run.config(f"store={older}"))["errors"] == [], "fresh turns need no environment"


def test_wrong_numbers_of_turns_are_named(tiny_run):
    from mopd.config import ConfigError

    with pytest.raises(ConfigError) as caught:
        tiny_run.config("train.resume_turns=0", "domains.game.resume_turns=-1")
    assert json.dumps(caught.value.errors).count("must be at least 1") == 2
