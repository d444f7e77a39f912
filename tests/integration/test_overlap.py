"""Whole runs whose sampling runs ahead: exact batches, tokens of a bounded age, nothing lost to a SIGKILL of any process."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from mopd.mixer import Composer
from mopd.run import train
from mopd.sampling.assemble import numbers_of
from mopd.sampling.samplers import Samplers
from mopd.schedule import sample_streams
from mopd.sources import Ahead
from tests.tiny_run import mopd, records, start_mopd

pytestmark = pytest.mark.timeout(600)


def student(run):
    return run / "students" / "student_mixed" / "seed-1"


def accounts(run):
    return json.loads((student(run) / "accounts.json").read_text())


def check_batches(config, steps):
    """Every step has exactly the groups of its plan: those of a composer that was fed the shares that were used."""
    composer = Composer(tuple(config.domains), config.train.samples_per_step, sample_streams(config))
    for step in steps:
        plan = composer.next({name: domain["share"] for name, domain in step["domains"].items()})
        given = {f"{d}/{s}": n for (d, s), n in plan.cells.items()}
        assert {source: len(numbers_of(words)) for source, words in step["sampling"]["groups"].items()} == given
        assert step["groups"] >= sum(given.values())
        for name, domain in step["domains"].items():
            wanted = plan.cells.get((name, "rollout"), 0) * config.train.group_size
            assert domain["streams"].get("rollout", {"sequences": 0})["sequences"] >= wanted, "an action at least of each"
        assert math.isfinite(step["loss"]) and not step["skipped"]


def check_accounts(run, steps):
    """Every launched group was trained once, or dropped and counted, or is left over at the end."""
    for source, account in accounts(run).items():
        trained = [n for step in steps for n in numbers_of(step["sampling"]["groups"].get(source, ""))]
        dropped = Counter(n for step in steps for words in step["sampling"]["dropped_groups"].get(source, {}).values()
                          for n in numbers_of(words))
        assert len(trained) == len(set(trained)) == account["trained"], f"{source}: a group was trained twice"
        assert not set(trained) & set(dropped) and max(dropped.values(), default=1) == 1
        assert set(trained) | set(dropped) <= set(range(account["launched"]))
        assert account["launched"] == account["trained"] + sum(account["dropped"].values()) + account["left"], source


def test_a_killed_run_with_overlap_loses_and_doubles_no_group(tiny_run, tmp_path):
    changes = ("train.steps=8", "train.checkpoint_every=2", "train.group_size=2", "train.fresh_turns=2", "sampling.overlap=2",
               "train.demonstration_fraction=0.2", "train.selftest=false", "consistency.points=0")
    command = ("train", tiny_run.path, f"run={tmp_path}", *changes)
    process, folder = start_mopd(*command, log=tmp_path / "log"), student(tmp_path)
    deadline = time.monotonic() + 300
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if list((folder / "checkpoints").glob("*/step-2/state.json")) and len(records(folder)) >= 3:
                break
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    done = mopd(*command)
    assert done.returncode == 0, done.stderr
    assert "goes on from step" in done.stderr
    steps = records(folder)
    assert [step["step"] for step in steps] == list(range(8))
    config = tiny_run.config(*changes)
    check_batches(config, steps)
    check_accounts(tmp_path, steps)
    for step in steps:
        assert step["sampling"]["staleness_max"] <= config.train.max_staleness
        assert step["weights"]["version"] == step["step"] + 1
        assert step["selection"]["game"]["points"] > 0 and set(step["selection"]["game"]["sources"]) <= {"teacher", "expert"}
    assert any(step["sampling"]["staleness_mean"] > 0 for step in steps), "nothing was sampled ahead"
    assert sum(step["domains"][d]["streams"].get("demonstration", {"tokens": 0})["tokens"] > 0
               for step in steps for d in step["domains"]) > 8
    assert "trainer idle" in done.stderr and "staleness" in done.stderr and "leaked" not in done.stderr


def before_each_step(monkeypatch, act) -> tuple[list, list]:
    """Have `act(step, sampler)` called before each step takes its samples, in this process. Returns what steps take and the
    samplers that are started, as they come."""
    taken, live = [], []
    original_take, original_begin = Ahead.take, Samplers._begin

    def begin(self, name):
        original_begin(self, name)
        live.append(self._live[name])

    def take(self, step):
        act(step, live[-1])
        taken.append(original_take(self, step))
        return taken[-1]

    monkeypatch.setattr(Ahead, "take", take)
    monkeypatch.setattr(Samplers, "_begin", begin)
    return taken, live


def test_processes_of_environments_that_are_killed_under_a_sampler_cost_no_step(tiny_run, tmp_path, monkeypatch):
    """SIGKILL of the worker that holds BabyAI's environments and of the game's Java, under a sampler that goes on."""
    killed = []

    def kill(step, sampler):
        for mark in {1: ["worker_process"], 3: ["java"]}.get(step, ()):
            found = [child for child in psutil.Process(sampler.pid).children() if mark in " ".join(child.cmdline())]
            assert found, f"no {mark} under the sampler"
            killed.extend(found)
            for child in found:
                child.kill()
        told = time.monotonic() + 60  # both are asked again within two steps, and a sampler tells its counts every second
        while step == 6 and time.monotonic() < told:
            counts = sampler.stats["environments"]
            if (counts["game"]["java"]["started"], counts["embodied"]["workers"]["started"]) == (2, 2):
                break
            time.sleep(0.1)

    _, live = before_each_step(monkeypatch, kill)
    changes = ("train.steps=7", "sampling.overlap=1", "train.prefix_fraction=0", "train.selftest=false",
               "consistency.points=0", "domains.embodied.worker_processes=1")
    train(tiny_run.config(f"run={tmp_path}", *changes))
    steps = records(student(tmp_path))
    assert [step["step"] for step in steps] == list(range(7)) and len(live) == 1 and len(killed) >= 2
    last = steps[-1]["domains"]
    assert last["embodied"]["workers"] == {"started": 2, "died": 1}
    assert set(last["embodied"]["environment_failures"]) <= {"worker_died"}
    # Nobody may have been about to ask them: then the death costs no episode, and the second start tells of it.
    assert last["game"]["java"] == {"started": 2} and set(last["game"]["environment_failures"]) <= {"java_died"}
    check_accounts(tmp_path, steps)


def test_a_sampler_that_is_killed_costs_no_step(tiny_run, tmp_path, monkeypatch, capsys):
    """SIGKILL of the only sampler in mid-run: counted, replaced, its sequences begun again; outcome advantages are there."""
    taken, live = before_each_step(
        monkeypatch, lambda step, sampler: step == 2 and os.kill(sampler.pid, signal.SIGKILL))
    changes = ("train.steps=5", "train.group_size=2", "sampling.overlap=1", "train.selftest=false", "consistency.points=0",
               "sampling.partial_rollouts=false")
    config = tiny_run.config(f"run={tmp_path}", *changes)
    train(config)
    steps = records(student(tmp_path))
    assert [step["step"] for step in steps] == list(range(5)) and len(live) == 2
    assert steps[-1]["sampling"]["samplers_replaced"] == 1
    assert any("is gone" in note for step in steps for note in step["notes"])
    assert "sampler-0 is gone" in capsys.readouterr().err
    check_batches(config, steps)
    check_accounts(tmp_path, steps)
    for plan, samples, _ in taken:
        newest = [int(a.version.max()) for row in samples.rows for a in row.actions if a.version.max() >= 0]
        assert all(plan.step - version <= 1 for version in newest), "a batch ended what was in flight, so nothing is older"
        sequences = {(a.sequence, a.group) for row in samples.rows for a in row.actions}
        assert len({s for s, _ in sequences}) == len(sequences), "numbers of sequences are unique within a step"
    assert not [t for t in threading.enumerate() if t.name == "coordinator"]


def test_a_slow_domain_keeps_exact_shares_on_two_ranks(tiny_run, tmp_path):
    """One domain's environments sleep in every step; batches hold the mix all the same, and more of it is in flight. Rank 0
    coordinates, both ranks train."""
    changes = ("train.steps=5", "sampling.overlap=3", "train.prefix_fraction=0", "train.selftest=false",
               "consistency.points=0", "train.domain_schedule=static", "domains.embodied.options.pause=0.5",
               "domains.embodied.environment=tests.integration.slow_babyai:family")
    done = mopd("train", tiny_run.path, f"run={tmp_path}", *changes, "--ranks", 2)
    assert done.returncode == 0, done.stderr
    steps = records(student(tmp_path))
    check_batches(tiny_run.config(*changes), steps)
    check_accounts(tmp_path, steps)
    sources = steps[-1]["sampling"]["sources"]
    assert sources["embodied/rollout"]["seconds"] > 0.5, "a sequence has at least one step"
    fast, slow = sorted((sources[f"{domain}/rollout"] for domain in ("embodied", "game")), key=lambda s: s["seconds"])
    assert slow["oversampling"] > fast["oversampling"], "the slow one has more in flight"
