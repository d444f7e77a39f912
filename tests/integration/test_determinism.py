"""A run is a pure function of config and seed: in another process, killed and resumed, and not for another seed."""

from __future__ import annotations

import shutil
import signal
import time

import pytest

from mopd.learner.checkpoint import checkpoints
from mopd.run import train
from tests.tiny_run import mopd, records, same_weights, start_mopd

pytestmark = pytest.mark.timeout(900)
STEPS = 12
CHANGES = [f"train.steps={STEPS}", "train.checkpoint_every=4", "train.group_size=2", "train.fresh_turns=2",
           "train.demonstration_fraction=0.2"]


def student(run):
    return run / "students" / "student_mixed" / "seed-1"


@pytest.fixture(scope="module")
def straight(tiny_run, tmp_path_factory):
    """The run of this process."""
    run = tmp_path_factory.mktemp("straight")
    train(tiny_run.config(f"run={run}", *CHANGES))
    return student(run)


def test_another_process_gives_the_same_bits(tiny_run, straight, tmp_path):
    done = mopd("train", tiny_run.path, f"run={tmp_path}", *CHANGES)
    assert done.returncode == 0, done.stderr
    first, second = records(straight), records(student(tmp_path))
    assert len(first) == STEPS and first == second
    assert [r["loss"] for r in first] != [first[0]["loss"]] * STEPS
    assert same_weights(straight / "model", student(tmp_path) / "model")
    shares = {r["domains"]["game"]["share"] for r in first}
    assert len(shares) > 3, "the shares never moved, so this shows nothing about adaptive runs"


def test_a_killed_run_goes_on_as_if_nothing_had_happened(tiny_run, straight, tmp_path):
    command = ("train", tiny_run.path, f"run={tmp_path}", *CHANGES)
    process = start_mopd(*command, log=tmp_path / "log")
    folder, deadline = student(tmp_path), time.monotonic() + 800
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if list((folder / "checkpoints").glob("*/step-4/state.json")) and len(records(folder)) >= 6:
                break
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL, (tmp_path / "log").read_text()
    killed = records(folder)
    assert 6 <= len(killed) < STEPS and not (folder / "model").exists()
    (own,) = (folder / "checkpoints").iterdir()
    assert [step for step, _ in checkpoints(own)][-1] < len(killed), "the kill must lose steps that were written down"
    done = mopd(*command)
    assert done.returncode == 0, done.stderr
    assert records(folder) == records(straight) and records(folder)[:len(killed)] == killed
    assert same_weights(straight / "model", folder / "model")
    assert not (folder / "checkpoints").exists()


def test_another_seed_gives_another_run(tiny_run, straight, tmp_path):
    train(tiny_run.config(f"run={tmp_path}", *CHANGES, "seed=2", "train.steps=2"))
    other = records(tmp_path / "students" / "student_mixed" / "seed-2")
    assert [r["loss"] for r in other] != [r["loss"] for r in records(straight)[:2]]


def test_a_checkpoint_of_another_config_is_not_gone_on_from(tiny_run, tmp_path, monkeypatch, capsys):
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1", "train.objective=reverse_kl"))
    assert list((student(tmp_path) / "checkpoints").glob("*/step-2"))
    monkeypatch.undo()
    train(tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1", "train.objective=jsd"))
    said = capsys.readouterr().err
    assert "another configuration, 2 steps of it" in said and "finished student" not in said
    assert 'train.objective was "reverse_kl" and is "jsd"' in said
    aside = student(tmp_path).with_name(".seed-1.set-aside")
    assert len(records(aside)) == 2 and list((aside / "checkpoints").glob("*/step-2")) and str(aside) in said
    train(tiny_run.config(f"run={tmp_path / 'fresh'}", "train.checkpoint_every=1", "train.objective=jsd"))
    assert records(student(tmp_path)) == records(student(tmp_path / "fresh"))
    # Put back, it is gone on from.
    shutil.rmtree(student(tmp_path))
    aside.rename(student(tmp_path))
    train(tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1", "train.objective=reverse_kl"))
    assert "starts anew" not in capsys.readouterr().err
    assert [record["step"] for record in records(student(tmp_path))] == list(range(len(records(student(tmp_path / "fresh")))))


def test_a_finished_run_is_not_trained_again_unless_asked(tiny_run, tmp_path, monkeypatch, capsys):
    config = tiny_run.config(f"run={tmp_path}", "train.steps=2", "train.checkpoint_every=1", "train.keep_every=1")
    folder = student(tmp_path)
    assert train(config) == folder / "model"
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    capsys.readouterr()
    other = tiny_run.config(f"run={tmp_path}", "train.steps=2", "train.checkpoint_every=2", "deepspeed.zero_stage=1")
    stop_after(monkeypatch, 1)  # whatever samples below ends with KeyboardInterrupt
    for again in (config, other):  # keys that change no result make no other run
        assert train(again) == folder / "model"
        said = capsys.readouterr()
        assert "finished before, with 2 steps" in said.out and "--resume never" in said.out
        assert f"model: {folder / 'model'}" in said.out and "trained anew and replaced" not in said.err
    kept = [folder / "config.json", *(folder / "model").iterdir(), *(folder / "checkpoints").rglob("state.json")]
    assert len(kept) > 4 and all(path.stat().st_mtime_ns == written[path] for path in kept)
    assert list((folder / "checkpoints").glob("*/step-*")), "milestones stay, whatever keep_every is now"

    def begins(*overrides, **how):
        """Whether it begins to train, and what it says before."""
        with pytest.raises(KeyboardInterrupt):
            train(tiny_run.config(f"run={tmp_path}", "train.steps=2", "train.checkpoint_every=1", *overrides), **how)
        return capsys.readouterr().err

    mark = (folder / "finished.json").read_bytes()
    assert "holds a finished student; it is trained anew" in begins(resume=False)
    assert not (folder / "finished.json").exists(), "what is being trained is not finished"
    begins()
    for overrides in (["train.objective=jsd"], [f"teachers.game.model={tiny_run.folder}/teachers/embodied"]):
        (folder / "finished.json").write_bytes(mark)
        begins(*overrides)
    (folder / "finished.json").write_bytes(mark)
    (folder / "model" / "config.json").unlink()
    begins()


def test_no_resume_starts_anew(tiny_run, tmp_path, monkeypatch):
    config = tiny_run.config(f"run={tmp_path}", "train.checkpoint_every=1")
    stop_after(monkeypatch, 3)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    first = records(student(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        train(config, resume=False)
    assert [r["step"] for r in records(student(tmp_path))] == [0, 1] and records(student(tmp_path)) == first
    train(config)  # two more steps
    assert [r["step"] for r in records(student(tmp_path))] == [0, 1, 2, 3], "with resume it goes on from step 2"


def stop_after(monkeypatch, calls: int) -> None:
    """Interrupt `train` where it samples for the `calls`-th time in one call of it."""
    from mopd.sampling.streams import Streams

    sample, made = Streams.sample, []

    def counting(self, plan):
        made.append(self)
        if sum(one is self for one in made) == calls:
            raise KeyboardInterrupt
        return sample(self, plan)

    monkeypatch.setattr(Streams, "sample", counting)
