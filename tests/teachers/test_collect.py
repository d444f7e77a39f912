"""Collecting: what is played, what is kept and why the rest is not, and that a killed collection goes on where it was."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections import Counter

import pytest

from mopd.config import ConfigError, semantic_errors
from mopd.environments.base import EnvironmentFailure
from prefix_store import PrefixStore
from teachers.collect import CollectBusy, NothingCollected, TeacherPlayer, collect, collect_domain, print_summary, public
from teachers.scoring.requests import TeacherError, TeacherUnreachable


@pytest.fixture
def make(tiny_run, tmp_path):
    """make(name, *overrides) -> a config whose run and store are of their own; the store has the demonstrations."""

    def one(name="one", *overrides):
        if not (tmp_path / name / "store").exists():
            shutil.copytree(tiny_run.folder / "store", tmp_path / name / "store")
        return tiny_run.config(f"run={tmp_path / name}", f"store={tmp_path / name / 'store'}", "seed=7",
                               "domains.embodied.teacher_episodes=10", "collect.batch=4", *overrides)
    return one


def ids(config):
    with PrefixStore.open(config.store) as store:
        return set(store.ids())


def counted(record):
    return {k: v for k, v in record.items() if k not in ("seconds", "version")}


def test_a_killed_collection_goes_on_where_it_stopped(make, monkeypatch):
    import teachers.collect as module

    whole, cut = make("whole"), make("cut")
    before = ids(whole)
    record = collect_domain(whole, "embodied", quiet=True)
    played = []
    real = module.play_episodes

    def stopping(engine, pools, specs, *rest, **options):
        played.append([spec.sequence for spec in specs])
        if len(played) == 3:
            raise KeyboardInterrupt
        return real(engine, pools, specs, *rest, **options)

    monkeypatch.setattr(module, "play_episodes", stopping)
    with pytest.raises(KeyboardInterrupt):
        collect_domain(cut, "embodied")
    assert played == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    resumed = collect_domain(cut, "embodied", quiet=True)
    assert played[3:] == [[8, 9]], "what was committed is played again"
    assert counted(resumed) == counted(record) and ids(cut) == ids(whole)
    assert record["episodes"] == record["kept"] == 10 and record["turns"] >= 10 and record["tokens"] >= record["turns"]
    assert len(ids(whole) - before) == len(set(ids(whole)) - before) <= 10
    collect_domain(cut, "embodied")
    assert len(played) == 4, "a whole collection is played again"
    changed = make("cut", "collect.temperature=0.5")
    assert collect_domain(changed, "embodied")["temperature"] == 0.5 and len(played) == 7, "another config goes on from this"


def test_a_teacher_that_goes_away_says_what_is_kept_and_how_to_go_on(make, monkeypatch):
    config, real, batches = make("gone"), TeacherPlayer.play, []

    def play(self, domain, specs, batch):
        batches.append(len(specs))
        if len(batches) == 2:
            raise TeacherUnreachable("embodied", "http://127.0.0.1:9: connection refused")
        return real(self, domain, specs, batch)

    monkeypatch.setattr(TeacherPlayer, "play", play)
    with pytest.raises(TeacherUnreachable, match="connection refused. 1 batches are in the store; start the teacher again"):
        collect_domain(config, "embodied", quiet=True)
    assert collect_domain(config, "embodied", quiet=True)["kept"] == 10 and batches == [4, 4, 4, 2]


def test_what_the_store_has_lost_is_played_again(make, capsys):
    config = make()
    record = collect_domain(config, "embodied")
    shutil.rmtree(config.store)
    with PrefixStore.open(config.store, "a") as store:
        store.commit("empty")
    assert counted(collect_domain(config, "embodied")) == counted(record) and len(ids(config)) == len(
        {i for b in json.loads((_folder(config) / "embodied.json").read_text())["batches"] for i in b["ids"]})
    assert "does not hold all of what" in capsys.readouterr().err


def test_a_record_of_another_or_a_damaged_collection_is_said(make, capsys):
    config = make()
    collect_domain(config, "embodied")
    assert "embodied.json" not in capsys.readouterr().err
    collect_domain(make("one", "seed=5"), "embodied")
    assert "embodied.json is of a collection with other settings" in capsys.readouterr().err
    (_folder(config) / "embodied.json").write_text('{"identity"')
    collect_domain(config, "embodied")
    assert "embodied.json cannot be read" in capsys.readouterr().err


def _folder(config):
    from pathlib import Path

    return Path(config.run) / "collected"


def test_filters_say_what_they_left_out(make, capsys):
    config = make("a", "collect.success_only=true")
    with pytest.raises(NothingCollected, match="nothing of what 'embodied' played can be kept: {'not successful': 10}"):
        collect_domain(config, "embodied")
    with pytest.raises(NothingCollected, match="score below 0.7"):
        collect_domain(make("b", "collect.min_score=0.7"), "embodied")
    nothing = make("c", "domains.embodied.teacher_episodes=0")
    assert collect_domain(nothing, "embodied")["kept"] == 0
    assert "nothing to play for domain embodied: domains.embodied.teacher_episodes is 0" in capsys.readouterr().out


def test_several_samples_of_a_task_and_the_domain_s_own_temperature(make):
    config = make("s", "collect.samples_per_task=5", "collect.temperatures.embodied=1.5", "teachers.embodied.temperature=0.7")
    before = ids(config)
    assert collect_domain(config, "embodied")["temperature"] == 1.5
    with PrefixStore.open(config.store) as store:
        new = [store.sequence(i) for i in ids(config) - before]
    tasks = Counter((s.task, s.seed) for s in new)
    assert len(tasks) == 2 and max(tasks.values()) > 1 and all(s.source.kind == "teacher" for s in new)
    config = make("t", "teachers.embodied.temperature=0.7", "teachers.embodied.max_tokens=2")
    before = ids(config)
    assert collect_domain(config, "embodied")["temperature"] == 0.7
    with PrefixStore.open(config.store) as store:
        new = [s for i in ids(config) - before for c in store.sequence(i).contexts for s in c.actions()]
    assert new and all(s.end - s.start <= 2 for s in new)


def test_infrastructure_failures_are_tried_again_and_counted(make, monkeypatch):
    from mopd.environments.babyai import BabyAIEnvironment

    real, fails = BabyAIEnvironment.step, Counter()

    def step(self, action):
        fails["steps"] += 1
        if fails["steps"] in (3, 9):
            raise EnvironmentFailure("crashed", "planted")
        return real(self, action)

    monkeypatch.setattr(BabyAIEnvironment, "step", step)
    record = collect_domain(make("f"), "embodied")
    assert record["retried"] == 2 and record["kept"] == record["episodes"] == 10 and not record["dropped"]
    fails.clear()
    record = collect_domain(make("g", "collect.retries=0"), "embodied")
    assert record["dropped"] == {"infrastructure: crashed": 2} and record["kept"] == 8 and record["retried"] == 0


def test_experts_play_too(make):
    config = make("e", "collect.player=expert", "domains.embodied.max_turns=40", "collect.success_only=true")
    before = ids(config)
    record = collect_domain(config, "embodied")
    assert record["player"] == "expert" and record["successful"] == record["kept"] > 5
    with PrefixStore.open(config.store) as store:
        new = [store.sequence(i) for i in ids(config) - before]
        assert new and all(s.source.kind == "expert" and s.outcome.success for s in new)
        assert {s.fingerprint.tokenizer for s in new} == {fp.tokenizer for fp in store.fingerprints()}


def test_what_is_played_the_same_way_again_is_counted(make):
    config = make("r", "collect.player=expert", "domains.embodied.max_turns=40", "collect.samples_per_task=5")
    before = ids(config)
    record = collect_domain(config, "embodied")
    assert record["kept"] == 2 and record["dropped"] == {"played the same way before": 8} and len(ids(config) - before) == 2


def test_several_domains_in_turn(make, capsys):
    records = collect(make("q", "collect.processes=1"), ["embodied", "game"], lambda _: pytest.fail("a process"))
    assert [r["domain"] for r in records] == ["embodied", "game"] and all(r["kept"] for r in records)
    assert not {"identity", "batches"} & set(public(records[0]))
    print_summary(records)
    assert "embodied" in capsys.readouterr().out


def test_what_cannot_be_collected_is_named(make):
    config = make()
    hf = config.teachers["embodied"]
    server = dataclasses.replace(hf, backend="server", urls=["http://127.0.0.1:9"])
    for changes, said in (({"model": ""}, "teachers.embodied.model: missing; to play domain embodied"),
                          ({"cross_tokenizer": True}, "'embodied' has another tokenizer than the student")):
        config.teachers["embodied"] = dataclasses.replace(server, **changes)
        with pytest.raises(ConfigError, match=said):
            collect_domain(config, "embodied")
    config.teachers["embodied"] = server
    cut = dataclasses.replace(config, collect=dataclasses.replace(config.collect, top_p=0.9, top_k=5,
                                                                  temperatures={"embodied": 0.001}))
    said = [e for e in semantic_errors(cut) if e.startswith("collect.")]
    assert [e.split(":")[0] for e in said] == ["collect.top_p", "collect.top_k", "collect.temperatures.embodied"]
    assert "the back end 'server', which does not tell which ids top-p left" in said[0]
    with pytest.raises(ConfigError, match="collect.top_p"):
        collect_domain(cut, "embodied")
    with pytest.raises(TeacherError, match="'embodied' does not answer: http://127.0.0.1:9: connection refused"):
        collect_domain(config, "embodied")
    config.teachers["embodied"] = hf
    for key, value, said in (("player", "student", "is not one of teacher, expert"),
                             ("temperatures", {"web": 1.0}, "no such domain")):
        wrong = dataclasses.replace(config, collect=dataclasses.replace(config.collect, **{key: value}))
        assert any(error.startswith(f"collect.{key}") and said in error for error in semantic_errors(wrong))
    import fcntl

    config = make("busy")
    _folder(config).mkdir()
    with open(_folder(config) / ".embodied.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CollectBusy, match="another process collects domain embodied"):
            collect_domain(config, "embodied")
