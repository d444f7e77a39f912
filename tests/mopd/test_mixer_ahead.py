"""What a run that samples ahead asks of the mixer: a pace that fits the trainer, ages by version, a batch that comes back."""

from __future__ import annotations

import json

import pytest

from mopd.config import Config, ConfigError, DomainConfig, TeacherConfig, load_config
from mopd.config_sampling import SamplingConfig, sampling_identity
from mopd.mixer_events import (
    Batch,
    Discard,
    EngineChanged,
    Finished,
    GroupId,
    Judged,
    Launch,
    Measured,
    Returned,
    Say,
    TrainerReady,
)
from mopd.mixer_machine import Mixer, MixerOptions
from mopd.schedule import Schedule, kl_by_stream, loss_streams, mixer_of


class Drive:
    """One source, one engine with room for all; groups end when they are told to."""

    def __init__(self, **options):
        self.mixer = Mixer({"game": 1.0}, {"game": {"rollout": 1.0}}, MixerOptions(**({"groups_per_step": 2} | options)))
        self.running: list[GroupId] = []
        self.actions = self.offer(EngineChanged(0.0, "a", 64, 1e9))

    def offer(self, event):
        actions = self.mixer.offer(event)
        self.running += [a.group for a in actions if isinstance(a, Launch)]
        self.actions = actions
        return actions

    def end(self, time, number, version=None):
        for _ in range(number):
            group = self.running.pop(0)
            self.offer(Finished(time, group, 0, 10))
            self.offer(Judged(time, group, True, version))
        return self.actions


def test_as_much_is_in_flight_as_the_trainer_needs_and_no_more():
    """Groups take 3 s. A trainer that takes 1 s needs three steps' worth in flight, one that takes 10 s one step's worth."""
    for period, steps in ((1.0, 3), (10.0, 1)):
        drive = Drive(pace=True, ahead=0.0, oversampling_maximum=8.0, max_age=8)
        time = 0.0
        starts: dict[GroupId, float] = {}
        trained = 0
        busy_until, waits = 0.0, True
        drive.offer(TrainerReady(0.0))
        most = 0
        while trained < 60:
            for group in drive.running:
                starts.setdefault(group, time)
            ending = sorted((begun + 3.0, group) for group, begun in starts.items() if group in drive.running)
            upcoming = [ending[0][0]] if ending else []
            if not waits:
                upcoming.append(busy_until)
            time = min(upcoming)
            if not waits and time == busy_until:
                found, waits = drive.offer(TrainerReady(time)), True
            else:
                group = ending[0][1]
                drive.running.remove(group)
                found = drive.offer(Finished(time, group, 0, 10)) + drive.offer(Judged(time, group, True))
                if trained > 20:
                    most = max(most, len(drive.running))
            for action in found:
                if isinstance(action, Batch):
                    trained, waits, busy_until = trained + 1, False, time + period
        assert drive.mixer.period == pytest.approx(period)
        assert 2 * (steps - 1) < most <= 2 * steps, f"{most} groups of 3 s in flight for steps of {period} s"


def test_a_group_is_as_old_as_the_weights_that_wrote_it():
    """Five groups of version 0 and one of version 1: steps 0 and 1 take two each, and in step 2 the fifth would be two
    versions old."""
    drive = Drive(max_age=1, ahead=3.0)
    drive.offer(TrainerReady(0.0))
    drive.end(1.0, 5, version=0)
    drive.end(1.0, 1, version=1)
    assert drive.mixer.ready["game/rollout"] == {2: 0, 3: 0, 4: 0, 5: 1}, "step 0 has taken the first two"
    found = drive.offer(TrainerReady(2.0))
    assert [a.groups for a in found if isinstance(a, Batch)] == [(GroupId("game/rollout", 2), GroupId("game/rollout", 3))]
    (discarded,) = [a for a in found if isinstance(a, Discard)]
    assert discarded.group.number == 4 and "stale" in discarded.reason
    assert drive.mixer.ready["game/rollout"] == {5: 1} and drive.mixer.counts["game/rollout"]["stale"] == 1


def test_a_batch_that_was_not_trained_comes_back_as_it_was():
    drive, other = Drive(groups_per_step=3), Drive(groups_per_step=3)
    for one in (drive, other):
        one.offer(TrainerReady(1.0))
        one.end(2.0, 3)
    batch = Batch(drive.mixer.plan, ())
    with pytest.raises(ValueError, match="not the last one"):
        drive.offer(Returned(3.0, batch))
    state = json.loads(json.dumps(drive.mixer.state_dict()))
    drive.end(4.0, 3)
    found = drive.offer(TrainerReady(5.0))
    (batch,) = [a for a in found if isinstance(a, Batch)]
    drive.offer(Returned(6.0, batch))
    assert drive.mixer.plan == batch.plan and not drive.mixer.trainer_ready
    assert set(batch.groups) <= {GroupId("game/rollout", n) for n in drive.mixer.ready["game/rollout"]}
    (again,) = [a for a in drive.offer(TrainerReady(7.0)) if isinstance(a, Batch)]
    assert again == batch and state["plan"]["step"] == batch.plan.step


def config(**sampling) -> Config:
    made = Config(domains={"a": DomainConfig(environment="babyai", teacher="t"),
                           "b": DomainConfig(environment="babyai", teacher="t", prefix_fraction=0.0, environments=3)},
                  teachers={"t": TeacherConfig("x")}, sampling=SamplingConfig(**sampling))
    made.train.domain_schedule = "static"
    return made


@pytest.mark.parametrize("overlap", [1, 3])
def test_overlap_bounds_what_is_finished_in_flight_and_kept(overlap):
    made = config(overlap=overlap)
    made.train.group_size = 4
    mixer = mixer_of(made)
    assert mixer.options.ahead == overlap - 1 and mixer.options.max_age == overlap
    assert mixer.options.oversampling_maximum == overlap and mixer.options.carry and mixer.options.pace
    assert mixer.source_options["b/rollout"].group_size == mixer.source_options["b/rollout"].max_in_flight == 4
    assert mixer.source_options["a/sft_prefix"].group_size == 1, "a stored trajectory is launched as one"
    assert set(mixer.sources) == {"a/rollout", "a/teacher_prefix", "a/sft_prefix", "b/rollout"}


def test_the_same_plans_with_and_without_overlap():
    """Both compose their steps alike, and follow the same measurements."""
    made = config(overlap=1)
    made.train.domain_schedule, made.train.adaptive_smoothing = "adaptive", 0.0
    made.sampling.drift.enabled, made.sampling.drift.patience, made.sampling.drift.smoothing = True, 1, 0.0
    schedule, mixer = Schedule(made), mixer_of(made)
    first = schedule.next()
    assert mixer.plan.shares == pytest.approx(first.shares) and mixer.plan.streams["a"] == first.streams["a"]
    measured = {"a": 3.0, "b": 1.0}, {"a": (3.0, 1.0), "b": (1.0, None)}
    notes = schedule.observe(*measured)
    said = [a.sentence for a in mixer.offer(Measured(1.0, *measured)) if isinstance(a, Say)]
    assert notes == said and any("prefix fraction rises from 0.50 to 0.60" in note for note in notes)
    plan, composed = schedule.next(), mixer.composer.next(mixer.schedule.shares)
    assert composed.shares == pytest.approx(plan.shares) and composed.streams == plan.streams
    assert plan.streams["a"]["rollout"] == pytest.approx(0.4) and plan.streams["b"] == {"rollout": 1.0}
    shares = loss_streams(made, "a", plan.streams["a"])
    assert shares == pytest.approx({"rollout": 0.4, "teacher_prefix": 0.3, "sft_prefix": 0.3, "demonstration": 0.0})
    made.train.demonstration_fraction = 0.2
    assert sum(loss_streams(made, "a", plan.streams["a"]).values()) == pytest.approx(1.0)
    again = Schedule(made)
    again.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    assert again.next() == schedule.next()


def test_drift_is_measured_by_tokens_over_the_prefix_streams():
    cells = {"a/rollout": {"k3": 0.5, "reverse_kl": 0.4, "trained_tokens": 10},
             "a/teacher_prefix": {"k3": 0.1, "trained_tokens": 30},
             "a/sft_prefix": {"k3": 0.5, "trained_tokens": 10}, "a/demonstration": {"k3": 9.0, "trained_tokens": 99},
             "b/rollout": {"k3": float("nan"), "trained_tokens": 3}, "c/sft_prefix": {"k3": 0.2, "trained_tokens": 1}}
    assert kl_by_stream(cells) == {"a": (0.4, pytest.approx(0.2)), "c": (None, 0.2)}


def test_what_does_not_go_with_overlap_is_refused_with_both_keys(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("domains: {a: {environment: babyai, teacher: t}}\nteachers: {t: {model: x}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["sampling.overlap=5", "train.max_staleness=4", "sampling.partial_rollouts=false",
                           "sampling.priors.z.seconds=3", "sampling.mixer.max_age=6", "sampling.drift.maximum=1",
                           "sampling.mixer.oversampling_mean=9", "sampling.samplers=0"])
    said = "\n".join(caught.value.errors)
    for words in ("sampling.overlap: 5 is above train.max_staleness=4", "sampling.partial_rollouts",
                  "sampling.priors.z: no such", "sampling.mixer.max_age: 6 is above train.max_staleness=4",
                  "sampling.drift.maximum", "oversampling_mean: 9", "sampling.samplers: 0 must be at least 1"):
        assert words in said, said


def test_only_keys_that_change_results_and_are_set_make_another_run():
    assert sampling_identity(SamplingConfig()) == {}
    assert sampling_identity(SamplingConfig(samplers=4, sampler_restarts=9)) == {}
    assert sampling_identity(SamplingConfig(overlap=2)) == {"overlap": 2}
