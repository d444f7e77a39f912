"""A resumed run goes on bit for bit; what is half-written or foreign is never loaded."""

from __future__ import annotations

import collections
import errno
import json
import threading

import numpy as np
import pytest
import torch

from mopd.learner import checkpoint
from mopd.learner.background import on_host
from mopd.learner.checkpoint import (
    CheckpointError,
    Checkpoints,
    best,
    checkpoints,
    close_folder,
    cut_after,
    damage,
    finish_saving,
    latest,
    load_checkpoint,
    own_folder,
    read_state,
    reading,
    save_checkpoint,
    sound,
)
from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.packing import pack
from mopd.learner.weights import named_weights
from mopd.rows import STREAMS
from tests.mopd.learner.tiny import make_model, mixed_rows


def train(learner, first, last):
    losses = []
    for step in range(first, last):
        rows = mixed_rows(np.random.default_rng(step), 4)
        batches = pack(rows, token_budget=100, pad_id=0, domains=("game", "science"), streams=STREAMS)
        for batch in batches:
            batch.weight.fill_(0.02)
        report = learner.train_step(
            batches,
            lambda logits, b: (
                (torch.nn.functional.cross_entropy(logits, b.label, reduction="none") * b.weight).sum(),
                {},
            ),
        )
        losses.append((report.loss, report.gradient_norm, report.learning_rate))
    return losses


def learner_of(stage=1, model=None, **changes):
    config = LearnerConfig(learning_rate=5e-3, weight_decay=0.01, warmup_steps=2, zero_stage=stage, **changes)
    return Learner(model or make_model("qwen3_moe"), config=config, total_steps=6)


KINDS = {"stage 0": {"stage": 0}, "stage 1": {"stage": 1}, "stage 2": {"stage": 2}, "stage 3": {"stage": 3},
         "low precision": {"stage": 0, "dtype": "bfloat16"}, "spread experts": {"stage": 2, "autoep_size": 1}}


@pytest.mark.parametrize("kind, background", [("stage 1", False), ("stage 2", False),
                                              *((kind, True) for kind in KINDS if kind != "stage 1")])
def test_resume_is_bit_equal(tmp_path, kind, background):
    kind = KINDS[kind]
    straight = learner_of(**kind)
    expected = train(straight, 0, 6)
    final = {n: t.clone() for n, t in named_weights(straight)}
    straight.close()

    kept = Checkpoints(tmp_path, keep=2, background=background)
    first = learner_of(**kind)
    found = train(first, 0, 3)
    kept.save(first, 3, {"cursor": 17})
    train(first, 3, 4)  # work that is lost, while the checkpoint is written
    first.close()
    assert damage(tmp_path / "step-3") == "" and first.saving.seconds > 0 if background else first.saving_seconds > 0
    second = learner_of(model=make_model("qwen3_moe", seed=5), **kind)
    assert kept.load(second) == (3, {"cursor": 17})
    found += train(second, 3, 6)
    assert found == expected
    assert all(torch.equal(final[n], t) for n, t in named_weights(second))
    second.close()


@pytest.fixture
def held(monkeypatch):
    """Writing in the background goes on only when this event is set."""
    go, write = threading.Event(), checkpoint._write_copies

    def waiting(*arguments):
        assert go.wait(60)
        write(*arguments)

    monkeypatch.setattr(checkpoint, "_write_copies", waiting)
    yield go
    go.set()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, held):
    learner = learner_of()
    kept = Checkpoints(tmp_path, keep=1, background=True)
    train(learner, 0, 1)
    kept.save(learner, 1, {})
    expected = train(learner, 1, 3)
    assert latest(tmp_path) is None and (tmp_path / ".step-1.writing").is_dir()
    held.set()
    kept.save(learner, 3, {})  # waits for the one before
    assert learner.saving_seconds > 0 and latest(tmp_path)
    finish_saving(learner)
    assert [step for step, _ in checkpoints(tmp_path)] == [3] and damage(tmp_path / "step-3") == ""
    assert not list(tmp_path.glob(".*")) and learner.saving is None
    load_checkpoint(learner, tmp_path / "step-3")
    learner.close()
    assert expected


def test_what_goes_wrong_in_the_background_is_raised_by_the_next_save(tmp_path, monkeypatch):
    learner = learner_of()
    kept = Checkpoints(tmp_path, background=True)
    kept.save(learner, 0, {})
    finish_saving(learner)

    def full(*_):
        raise RuntimeError("PytorchStreamWriter failed: file write failed, os error 28")

    train(learner, 0, 1)
    monkeypatch.setattr(type(learner.engine.checkpoint_engine), "save", full)
    kept.save(learner, 1, {})
    train(learner, 1, 2)
    with pytest.raises(OSError, match="No space left on device"):
        kept.save(learner, 2, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-0"] and damage(tmp_path / "step-0") == ""
    learner.close()


@pytest.mark.parametrize("stage,background", [(1, False), (1, True), (3, False), (3, True)])
def test_a_router_that_is_written_wrong_is_found(tmp_path, monkeypatch, stage, background):
    learner = learner_of(stage=stage, model=make_model("qwen3_moe"))
    save_checkpoint(learner, tmp_path, {}, background=background)
    finish_saving(learner)
    assert latest(tmp_path).name == "step-0"
    save = torch.save

    def spoiled(state, *arguments, **how):
        for part in (state.get("module"), state.get("frozen_param_fragments")):
            for name in part or ():
                if name.endswith("layers.1.mlp.gate.weight"):
                    part[name] = part[name] + 1e-3
        return save(state, *arguments, **how)

    monkeypatch.setattr(torch, "save", spoiled)
    learner.step = 1
    with pytest.raises(CheckpointError, match=r"the frozen router .*layers\.1\.mlp\.gate\.weight is another one"):
        save_checkpoint(learner, tmp_path, {}, background=background)
        finish_saving(learner)
    assert latest(tmp_path).name == "step-0" and not list(tmp_path.glob(".step-*"))
    learner.saving = None
    learner.close()


def test_copies_keep_what_they_are_of_and_share_what_is_shared():
    base = torch.arange(12.0)
    state = {"whole": base, "part": base[3:5], "again": base[3:5], "many": [base.view(3, 4).T, (1, "x")], "none": None}
    copied = on_host(collections.OrderedDict(state))
    base.add_(100)
    assert copied["part"] is copied["again"] and copied["part"].tolist() == [3, 4]
    assert copied["part"].untyped_storage().nbytes() == 8 and copied["many"][0].tolist()[1] == [1, 5, 9]
    assert copied["many"][1] == (1, "x") and list(copied) == list(state) and state["whole"] is base


def test_the_best_stays_and_so_it_does_when_the_run_is_over(tmp_path):
    learner = learner_of()
    own = own_folder(tmp_path, "me")
    for step, score in enumerate([-3.0, -1.0, -2.0, None, -1.0, -1.5], 1):
        learner.skip_step()
        Checkpoints(own, keep=1, background=True).save(learner, step, {}, score=score)
    learner.close()
    assert [step for step, _ in checkpoints(own)] == [2, 6], "of equals the earliest, and the last"
    assert best(own) == own / "step-2"
    close_folder(own, 0)
    assert [step for step, _ in checkpoints(own)] == [2]
    (own / "step-2" / "state.json").write_text("{")
    assert best(own) is None and best(tmp_path / "none") is None


def test_dropout_is_drawn_again_after_a_resume(tmp_path):
    def model():
        return make_model("qwen3", attention_dropout=0.3)

    straight = learner_of(model=model())
    expected = train(straight, 0, 3)
    straight.close()
    first = learner_of(model=model())
    train(first, 0, 2)
    Checkpoints(tmp_path).save(first, 2, {})
    first.close()
    torch.manual_seed(123)
    second = learner_of(model=model())
    Checkpoints(tmp_path).load(second)
    assert train(second, 2, 3) == expected[2:]
    second.close()


def test_half_written_and_foreign_checkpoints(tmp_path):
    learner = learner_of()
    assert latest(tmp_path) is None and Checkpoints(tmp_path / "none").load(learner) is None
    kept = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        train(learner, step - 1, step)
        kept.save(learner, step, {"step": step})
    assert [s for s, _ in checkpoints(tmp_path)] == [2, 3] and read_state(latest(tmp_path)) == {"step": 3}
    with pytest.raises(ValueError, match="has made 3 steps"):
        kept.save(learner, 4, {})

    (tmp_path / ".step-9.writing" / "engine").mkdir(parents=True)  # a killed writer's
    (tmp_path / "step-8").mkdir()
    assert latest(tmp_path).name == "step-3"
    with pytest.raises(CheckpointError, match="step-8 is not a complete checkpoint"):
        load_checkpoint(learner, tmp_path / "step-8")

    other = learner_of(stage=2)
    with pytest.raises(CheckpointError, match="zero_stage 1, this run has 2"):
        load_checkpoint(other, latest(tmp_path))
    other.close()
    record = json.loads((tmp_path / "step-3" / "state.json").read_text())
    record["router_hash"] = "0" * 64
    (tmp_path / "step-3" / "state.json").write_text(json.dumps(record))
    with pytest.raises(RuntimeError, match="router changed"):
        load_checkpoint(learner, tmp_path / "step-3")
    train(learner, 3, 4)
    learner.router_hash = learner.router_hash.replace("0" * 64, "")
    learner.close()


@pytest.fixture
def three(tmp_path):
    """Checkpoints of steps 0, 1 and 2, and the learner that wrote them."""
    learner = learner_of()
    for step in range(3):
        train(learner, max(step - 1, 0), step)
        Checkpoints(tmp_path, keep=3).save(learner, step, {"step": step})
    yield learner, tmp_path
    learner.close()


def test_damage_is_named_and_the_one_before_is_taken(three, capsys):
    learner, folder = three
    newest = folder / "step-2"
    assert damage(newest) == "" == damage(newest, 1, 2) and sound(folder) == newest
    weights = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    name, whole = str(weights.relative_to(newest)), weights.read_bytes()

    weights.write_bytes(whole[:-7])
    assert damage(newest) == f"{name} has {len(whole) - 7} bytes instead of {len(whole)}"
    assert sound(folder) == folder / "step-1"
    said = capsys.readouterr().err
    assert str(newest) in said and name in said and "the one before it is taken" in said

    weights.write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert f"{name} is not what was written" in damage(newest)
    found = [damage(newest, rank, 2) for rank in range(2)]
    assert sorted(map(bool, found)) == [False, True], "each file is read by one of two ranks"
    weights.unlink()
    assert damage(newest) == f"{name} is missing"
    weights.write_bytes(whole)
    assert damage(newest) == ""

    state = (newest / "state.json").read_text()
    (newest / "state.json").write_text(state.replace('"step": 2', '"step": 1'))
    assert "state.json is not what was written" in damage(newest)
    (newest / "state.json").write_text(state[: len(state) // 2])
    assert damage(newest)
    assert Checkpoints(folder).load(learner) == (1, {"step": 1}) and "step-2 is damaged" in capsys.readouterr().err
    train(learner, 1, 2)
    Checkpoints(folder).save(learner, 2, {"step": "again"})  # replaces the damaged one
    assert sound(folder) == newest and read_state(newest) == {"step": "again"}


def test_later_steps_go_when_the_run_goes_on_from_an_earlier_one(three):
    learner, folder = three
    load_checkpoint(learner, folder / "step-0")
    train(learner, 0, 1)
    Checkpoints(folder, keep=2).save(learner, 1, {})
    assert [step for step, _ in checkpoints(folder)] == [0, 1], "step 2 belongs to a future that was left"


def test_what_is_cut_is_not_loaded_and_goes_with_the_next(three):
    learner, folder = three
    assert cut_after(folder, 0) == [1, 2] and sound(folder) == folder / "step-0"
    assert len(list(folder.iterdir())) == 3, "nothing is lost yet"
    load_checkpoint(learner, folder / "step-0")
    train(learner, 0, 1)
    Checkpoints(folder).save(learner, 1, {})
    assert sorted(p.name for p in folder.iterdir()) == ["step-0", "step-1"]


def test_milestones_stay_until_the_run_is_started_anew(tmp_path, capsys):
    learner = learner_of()
    own = own_folder(tmp_path, "me")
    for step in range(1, 6):
        learner.skip_step()
        Checkpoints(own, keep=1, keep_every=2).save(learner, step, {})
    learner.close()
    assert [step for step, _ in checkpoints(own)] == [2, 4, 5]
    close_folder(own, 2)
    assert [step for step, _ in checkpoints(own)] == [2, 4]
    assert own_folder(tmp_path, "me") == own and not own.exists() and "a run that is over" in capsys.readouterr().err
    for name in (own.name, f".{own.name}.removing"):  # what a kill in the midst of this leaves
        (tmp_path / name / "step-1").mkdir(parents=True)
    close_folder(own, 0)
    assert not list(tmp_path.iterdir())


def test_a_killed_save_leaves_no_trace_for_the_next(tmp_path):
    learner = learner_of()
    for name in (".step-0.writing", ".step-9.removing", ".step-3.old-17"):
        (tmp_path / name / "engine").mkdir(parents=True)
    Checkpoints(tmp_path).save(learner, 0, {})
    assert [p.name for p in tmp_path.iterdir()] == ["step-0"]
    learner.close()


def test_checkpoints_of_other_versions_are_told_from_damaged_ones(tmp_path):
    learner = learner_of()
    path = save_checkpoint(learner, tmp_path, {"known": 1})
    record = json.loads((path / "state.json").read_text())
    for key in ("dtype", "autoep_size", "digest"):
        del record[key]
    (path / "state.json").write_text(json.dumps(record))
    state = load_checkpoint(learner, path)
    with pytest.raises(CheckpointError, match="step-0 has no 'score' in its state: another version"), reading(path):
        state["score"]
    (path / "state.json").write_text("{")
    assert damage(path).startswith("state.json cannot be read: ")
    learner.close()


def test_half_written_ones_leave_their_room_to_the_next_start(tmp_path):
    own = own_folder(tmp_path, "me")
    (own / ".step-3.writing" / "engine").mkdir(parents=True)
    (own / "step-2").mkdir()
    assert own_folder(tmp_path, "me") == own and [path.name for path in own.iterdir()] == ["step-2"]


@pytest.mark.parametrize("background", [False, True])
def test_a_disk_that_is_full_at_the_last_file_is_named(tmp_path, monkeypatch, background):
    learner = learner_of()

    def full(path, *_):
        raise OSError(errno.ENOSPC, "No space left on device")  # as what writes to an open file has it: without a name

    monkeypatch.setattr(checkpoint.Path, "write_text", lambda path, text: full(path) if path.name == "state.json" else
                        path.write_bytes(text.encode()))
    with pytest.raises(OSError, match="No space left") as caught:
        save_checkpoint(learner, tmp_path, {}, background=background)
        finish_saving(learner)
    assert caught.value.filename == str(tmp_path) and not list(tmp_path.iterdir())
    learner.close()
