"""Plans hold exact shares over many steps, follow measurements one step late, and go on after a restart."""

from __future__ import annotations

import json
import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config import Config, DomainConfig, TeacherConfig, TrainConfig, stream_shares
from mopd.schedule import Plan, Schedule


def config(shares=(1.0, 2.0, 3.0), prefix=None, **train) -> Config:
    names = [f"d{i}" for i in range(len(shares))]
    domains = {n: DomainConfig(environment="babyai", teacher="t", share=s) for n, s in zip(names, shares, strict=True)}
    if prefix is not None:
        domains["d0"].prefix_fraction = prefix
    return Config(domains=domains, teachers={"t": TeacherConfig("x")},
                  train=TrainConfig(**({"domain_schedule": "static"} | train)))


def totals(plans) -> Counter:
    counts = Counter()
    for plan in plans:
        for domain, streams in plan.counts.items():
            counts.update({(domain, stream): n for stream, n in streams.items()})
    return counts


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.05, 5), min_size=1, max_size=4), st.integers(1, 20), st.floats(0, 1), st.floats(0, 1),
       st.floats(0, 0.9))
def test_static_shares_are_exact_over_many_steps(shares, samples, prefix, teacher, demonstration):
    made = config(tuple(shares), samples_per_step=samples, prefix_fraction=prefix, teacher_prefix_share=teacher,
                  demonstration_fraction=demonstration)
    schedule = Schedule(made)
    plans = [schedule.next() for _ in range(100)]
    assert [plan.step for plan in plans] == list(range(100))
    assert all(sum(sum(s.values()) for s in plan.counts.values()) == samples for plan in plans)
    counts = totals(plans)
    for name, domain in made.domains.items():
        share = domain.share / sum(shares)
        own = {s: w for s, w in stream_shares(made, name).items() if s != "demonstration"}
        assert plans[0].shares[name] == pytest.approx(share)
        for stream, weight in own.items():
            wanted = 100 * samples * share * weight / sum(own.values())
            assert abs(counts[name, stream] - wanted) <= 2, "a cell is off by more than a sample and what a domain owes"


def test_a_domains_own_prefix_fraction_wins():
    schedule = Schedule(config(prefix=1.0, samples_per_step=12, prefix_fraction=0.0))
    counts = totals(schedule.next() for _ in range(10))
    assert {stream for (name, stream) in counts if name == "d0"} == {"teacher_prefix", "sft_prefix"}
    assert {stream for (name, stream) in counts if name != "d0"} == {"rollout"}


def test_the_demonstration_stream_rides_on_the_prefix_samples():
    without, with_it = (totals(Schedule(config(demonstration_fraction=f, samples_per_step=8)).next() for _ in range(50))
                        for f in (0.0, 0.5))
    assert without == with_it and not any(stream == "demonstration" for _, stream in with_it)


def test_adaptive_shares_follow_one_step_late():
    schedule = Schedule(config((1.0, 1.0), domain_schedule="adaptive", adaptive_smoothing=0.0, adaptive_kl_smoothing=0.0,
                               adaptive_minimum=0.1, adaptive_maximum=0.9, samples_per_step=10))
    plan = schedule.next()
    following = schedule.next()  # made before the first step was trained
    assert plan.shares == following.shares == {"d0": 0.5, "d1": 0.5}
    assert schedule.observe({"d0": 3.0, "d1": 1.0}) == []
    assert schedule.next().shares == pytest.approx({"d0": 0.75, "d1": 0.25})
    schedule.observe({"d0": 100.0, "d1": 1.0})
    moved = schedule.next()
    assert moved.shares == pytest.approx({"d0": 0.9, "d1": 0.1})
    assert sum(moved.counts["d0"].values()) in (8, 9, 10)


def test_static_shares_and_a_single_domain_never_move():
    for made in (config((1.0, 1.0)), config((1.0,), domain_schedule="adaptive")):
        schedule = Schedule(made)
        first = schedule.next().shares
        schedule.observe({name: 9.0 if name == "d0" else 0.1 for name in made.domains})
        assert schedule.next().shares == first


def test_numbers_that_are_missing_or_no_kl_move_nothing():
    schedule = Schedule(config((1.0, 1.0), domain_schedule="adaptive", adaptive_smoothing=0.0, adaptive_kl_smoothing=0.0))
    assert "d0: no finite reverse KL" in schedule.observe({"d0": math.nan, "d1": 1.0})[0]
    assert schedule.next().shares == {"d0": 0.5, "d1": 0.5}
    schedule.observe({"d1": 1.0})
    assert schedule.next().shares == {"d0": 0.5, "d1": 0.5}
    schedule.observe({"d0": -0.25, "d1": 1.0})  # an estimate just below zero
    shares = schedule.next().shares
    assert shares["d0"] == pytest.approx(0.2) and shares["d1"] == pytest.approx(0.8)


def test_a_domain_that_stopped_learning_is_named():
    schedule = Schedule(config((1.0, 1.0), domain_schedule="adaptive", adaptive_patience=2))
    said = []
    for step in range(6):
        said += schedule.observe({"d0": 2.0, "d1": 1.0 / (step + 1)})
    assert said and all("domain d0" in line for line in said)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 12), st.integers(1, 9), st.randoms(use_true_random=False))
def test_a_restarted_schedule_goes_on(stop, samples, random):
    made = config((1.0, 2.0, 4.0), domain_schedule="adaptive", samples_per_step=samples, adaptive_smoothing=0.3)
    measured = [{f"d{i}": random.random() for i in range(3) if random.random() < 0.9} for _ in range(16)]

    def go(schedule, steps):
        plans = []
        for step in steps:
            plans.append(schedule.next())
            schedule.observe(measured[step])
        return plans

    straight = go(Schedule(made), range(16))
    first = Schedule(made)
    head = go(first, range(stop))
    second = Schedule(made)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert head + go(second, range(stop, 16)) == straight
    assert Plan(**json.loads(json.dumps(straight[-1].to_json()))) == straight[-1]
