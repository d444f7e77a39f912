"""A whole run with one teacher in this process and one behind a back end: same steps, pauses, alarms and other teachers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mopd.check import check_launch
from mopd.learner.model import load_model
from mopd.run import train
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.streams import Streams
from teachers import registry as registry_module
from teachers.handshake import folder_identity
from teachers.scoring import HFTeacher
from teachers.scoring.alignment import UNALIGNED
from teachers.scoring.cache import Entry
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.patience import TeacherGone
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import ScoreAnswer
from teachers.watch import TeacherWatch
from tests.integration.test_determinism import stop_after, student
from tests.teachers.scoring.faults import Planted
from tests.tiny_run import records, tiny_model

FAR = ("teachers.game.backend=server", "teachers.game.urls=[http://127.0.0.1:9]", "train.objective=mopd",
       "train.prefix_fraction=0.5", "train.domain_schedule=static")


@pytest.fixture
def planted(monkeypatch, tiny_run):
    """The back ends that stand in for servers: teacher → Planted over a real model of its folder. Pauses take no time."""
    made: dict[str, Planted] = {}

    def make(spec):
        model = load_model(spec.model)
        inner = HFBackend(HFTeacher(model, teacher=spec.id), told=folder_identity(spec.model))
        made[spec.id] = Planted(inner)
        made[spec.id].gives = frozenset({"sampled"})
        return made[spec.id]

    monkeypatch.setattr(registry_module, "make_backend", make)
    return made


def at_step(monkeypatch, number: int, act) -> None:
    """Call `act` once, when step `number` has been sampled."""
    sample, steps = Streams.sample, []

    def sampled(self, plan):
        result = sample(self, plan)
        if len(steps) == number:
            act()
        steps.append(plan.step)
        return result

    monkeypatch.setattr(Streams, "sample", sampled)


def test_a_far_teacher_trains_as_a_near_one(tiny_run, tmp_path, planted, monkeypatch):
    early, prefetch = [], RemoteTeacher.prefetch
    monkeypatch.setattr(RemoteTeacher, "prefetch",
                        lambda self, requests: (early.append(sum(map(len, requests))), prefetch(self, requests)))
    train(tiny_run.config(f"run={tmp_path / 'far'}", *FAR))
    near = ("train.objective=mopd", "train.prefix_fraction=0.5", "train.domain_schedule=static")
    train(tiny_run.config(f"run={tmp_path / 'near'}", *near))
    far, near = records(student(tmp_path / "far")), records(student(tmp_path / "near"))
    assert len(far) == len(near) == 4 and far[0]["loss"] == pytest.approx(near[0]["loss"], rel=1e-4, abs=1e-6)
    for one, other in zip(far, near, strict=True):
        assert one["missing"] == {} and one["scoring"]["teachers"]["game"]["unscored"] == 0 and other["scoring"] == {}
        assert one["tokens"]["scored"] == one["tokens"]["trained"] > 0
        game = one["scoring"]["teachers"]["game"]
        assert game["asked"] <= game["tokens"], "nothing is asked twice"
    assert sum(early) >= sum(r["domains"]["game"]["tokens"] for r in far) and len(early) > 2 * len(far), "as sequences end"
    manifest = json.loads((student(tmp_path / "far") / "manifest.json").read_text())
    [period] = manifest["teacher_history"]
    assert period["teachers"]["game"]["backend"] == "server" and period["from_step"] == 0
    assert period["teachers"]["game"]["tokens"] == sum(r["domains"]["game"]["tokens"] for r in far)


def test_a_teacher_that_goes_down_costs_time_and_nothing_else(tiny_run, tmp_path, planted, monkeypatch, capsys):
    from teachers.scoring import patience

    pauses = []

    def sleep(self, said, pause=patience.Wait.pause):
        self.patience.sleep = lambda seconds: pauses.append(seconds)
        pause(self, said)
        planted["game"].down = len(pauses) < 4

    monkeypatch.setattr(patience.Wait, "pause", sleep)

    def down():
        planted["game"].down = True
        for entry in list(planted["game"].asked):
            entry.clear()

    at_step(monkeypatch, 1, down)
    train(tiny_run.config(f"run={tmp_path}", *FAR, "train.score_cache_mib=0", "train.steps=3"))
    found = records(student(tmp_path))
    assert [r["step"] for r in found] == [0, 1, 2] and len(pauses) >= 4
    assert all(r["missing"] == {} and r["tokens"]["scored"] == r["tokens"]["trained"] > 0 for r in found)
    said = capsys.readouterr().err
    assert "teacher 'game' since" in said and "it does not answer (connection refused)" in said
    assert "answers again" in said


def test_without_patience_the_run_stops_and_goes_on_later(tiny_run, tmp_path, planted, monkeypatch):
    def down():
        planted["game"].down = True

    at_step(monkeypatch, 2, down)
    config = tiny_run.config(f"run={tmp_path}", *FAR, "train.teacher_wait_s=0", "train.score_cache_mib=0",
                             "train.checkpoint_every=1")
    with pytest.raises(TeacherGone, match="run the same command again"):
        train(config)
    monkeypatch.undo()
    done = records(student(tmp_path))
    assert [r["step"] for r in done] == [0, 1]


def test_other_teachers_when_a_run_resumes(tiny_run, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1"))
    monkeypatch.undo()
    capsys.readouterr()
    other = f"teachers.game.model={tiny_run.folder / 'teachers' / 'embodied'}"
    train(tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1", other))
    said = capsys.readouterr().err
    assert "another configuration" not in said
    assert "step 2: teachers changed: from step 2 on teacher 'game' is " in said
    assert [r["step"] for r in records(student(tmp_path))] == [0, 1, 2, 3]
    first, second = json.loads((student(tmp_path) / "manifest.json").read_text())["teacher_history"]
    assert (first["from_step"], second["from_step"]) == (0, 2)
    assert first["teachers"]["game"]["revision"] != second["teachers"]["game"]["revision"]
    assert first["teachers"]["embodied"]["revision"] == second["teachers"]["game"]["revision"]
    tokens = [sum(t["tokens"] for t in period["teachers"].values()) for period in (first, second)]
    scored = [r["tokens"]["scored"] for r in records(student(tmp_path))]
    assert tokens == [sum(scored[:2]), sum(scored[2:])]


def test_other_weights_in_mid_run_are_an_alarm(tiny_run, tmp_path, planted, monkeypatch, capsys):
    def swap():
        wrong = load_model(tiny_run.folder / "teachers" / "embodied")
        planted["game"].inner = HFBackend(HFTeacher(wrong, teacher="game"))

    kept, before = {}, TeacherWatch.before

    def watched(self, step, rows):
        known = {name: revision for name, (_, revision, _) in self.probes.backends.items()}
        for name, revision in known.items() if step == 0 else ():
            self.registry.cache.put(revision, b"known", Entry(ScoreAnswer(name, np.zeros(1, np.float32))))
        found = before(self, step, rows)
        kept[step] = [name for name, revision in known.items() if self.registry.cache.get(revision, b"known") is not None]
        return found

    monkeypatch.setattr(TeacherWatch, "before", watched)
    at_step(monkeypatch, 1, swap)
    train(tiny_run.config(f"run={tmp_path}", *FAR, "train.probe_every=1", "train.steps=3"))
    found = records(student(tmp_path))
    assert found[0]["scoring"].get("alarms") is None and found[1]["scoring"]["alarms"] == found[2]["scoring"]["alarms"] != []
    assert kept == {0: ["embodied", "game"], 1: ["embodied"], 2: ["embodied"]}, "the other teacher's scores stand"
    drift = found[1]["scoring"]["probes"]
    assert drift["game"]["largest"] > 0.1 and drift["embodied"]["largest"] < 1e-3
    assert "step 1: ALARM: teacher 'game': its probe has scores that differ by up to" in capsys.readouterr().err


def test_a_server_of_another_model_is_refused_at_launch(tiny_run, tmp_path, planted, monkeypatch):
    make = registry_module.make_backend

    def wrong(spec):
        found = make(spec)
        found.inner = HFBackend(HFTeacher(load_model(tiny_run.folder / "teachers" / "embodied"), teacher="game"),
                                told=folder_identity(spec.model))
        return found

    monkeypatch.setattr(registry_module, "make_backend", wrong)
    with pytest.raises(ValueError, match="teacher 'game': its probe has .* in this process: other weights"):
        train(tiny_run.config(f"run={tmp_path}", *FAR, "teachers.game.probe_against_model=true"))
    assert not (student(tmp_path) / "metrics.jsonl").exists()


def test_teachers_with_another_tokenizer_score_a_whole_run_by_text(tiny_run, tmp_path, planted):
    """The student has a tokenizer of its own; one teacher is behind a back end, the other in this process."""
    own = train_tokenizer([(tiny_run.folder / f"{name}.jsonl").read_text() for name in ("embodied", "game")], 330)
    student_folder = tiny_model(own, tmp_path / "student", 5)
    train(tiny_run.config(f"run={tmp_path}", f"student.model={student_folder}", *FAR, "train.prefix_fraction=0",
                          "train.steps=2", "teachers.game.cross_tokenizer=true", "teachers.embodied.cross_tokenizer=true"))
    found = records(student(tmp_path))
    assert len(found) == 2
    for step in found:
        for name in ("embodied", "game"):
            assert step["domains"][name]["tokens"] > 0 and step["domains"][name]["unscored_share"] < 0.6
        assert {reason for counts in step["missing"].values() for reason in counts} <= UNALIGNED


def test_check_shows_the_handshake_and_what_does_not_fit(tiny_run, planted):
    answer = check_launch(tiny_run.config(*FAR))
    assert answer["errors"] == [] and answer["handshake"]["game"]["backend"] == "server"
    assert answer["handshake"]["game"]["tokens"] == "same" and answer["handshake"]["embodied"]["backend"] == "hf"
    json.dumps(answer["handshake"])
    [error] = check_launch(tiny_run.config(*FAR, "train.objective=forward_kl"))["errors"]
    assert "compares whole distributions" in error and "'game'" in error
    planted.clear()
    [error] = check_launch(tiny_run.config(*FAR[:2], "train.objective=mopd", "teachers.game.revision=feed"))["errors"]
    assert "teachers.game.revision says feed" in error
