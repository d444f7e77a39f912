"""A state saved in one layout goes on in any other: other ranks, ZeRO stages and spreads of experts, moments included."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mopd.learner.checkpoint import CheckpointError, damage, finish_saving, load_checkpoint, save_checkpoint
from mopd.learner.engine import start_processes
from mopd.learner.packing import pack
from mopd.learner.portable import load_portable, save_portable
from mopd.rows import STREAMS
from tests.mopd.learner.test_checkpoint import learner_of
from tests.mopd.learner.tiny import make_model, mixed_rows

SAVED, STEPS = 2, 4
TWO = {"zero 2": {"stage": 2}, "zero 3": {"stage": 3}, "experts over 2, zero 1": {"stage": 1, "autoep_size": 2},
       "experts over 2, zero 3": {"stage": 3, "autoep_size": 2}}
LOW = {"dtype": "bfloat16"}
# how a state is saved, and stages that take it
ONE = {"zero 0": ({"stage": 0}, (1, 3)), "zero 1": ({"stage": 1}, (0,)), "zero 3": ({"stage": 3}, (2,)),
       "experts, zero 2": ({"stage": 2, "autoep_size": 1}, (0,)), "experts, zero 3": ({"stage": 3, "autoep_size": 1}, (1,)),
       "low precision, zero 0": ({"stage": 0, **LOW}, (2, 3)), "low precision, zero 2": ({"stage": 2, **LOW}, (0,))}


def train(learner, first: int, last: int, rank: int = 0, size: int = 1) -> list:
    """(loss, gradient norm) of steps [first, last); two ranks share the rows of one."""
    found = []
    for step in range(first, last):
        rows = mixed_rows(np.random.default_rng(step), 5)
        batches = pack(rows[rank::size], token_budget=100, pad_id=0, domains=("game", "science"), streams=STREAMS)
        for batch in batches:
            batch.weight.fill_(0.02)
        report = learner.train_step(batches, lambda logits, b: (
            (torch.nn.functional.cross_entropy(logits, b.label, reduction="none") * b.weight).sum(), {}))
        found.append((report.loss, report.gradient_norm))
    return found


def foreign(**kind):
    """A learner that starts from other weights: what it has afterwards, it was given. Routers are frozen, so alike."""
    model, like = make_model("qwen3_moe", seed=5), dict(make_model("qwen3_moe").named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.copy_(like[name])
    return learner_of(model=model, **kind)


def ranks_main(place: str) -> None:
    """On two ranks: save in each layout (in the background), go on, and write the portable state; then take what one rank
    wrote."""
    rank, size = start_processes()
    result = {}
    for name, kind in TWO.items():
        learner = learner_of(**kind)
        train(learner, 0, SAVED, rank, size)
        path = save_checkpoint(learner, Path(place) / name, {"of": name}, background=True)
        ahead = train(learner, SAVED, STEPS, rank, size)
        finish_saving(learner)
        assert damage(path) == "" and load_checkpoint(learner, path) == {"of": name}
        save_portable(learner, Path(place) / f"{name} portable")
        assert train(learner, SAVED, STEPS, rank, size) == ahead, "to the bit, in its own layout"
        learner.close()
        learner = foreign(**kind)
        load_portable(learner, Path(place) / "one")
        learner.step = SAVED
        result[name] = (ahead, train(learner, SAVED, STEPS, rank, size))
        learner.close()
    result["failed"] = failed(rank, Path(place))
    every = [None] * size
    torch.distributed.all_gather_object(every, result.pop("failed"))
    result["failed"] = every
    if rank == 0:
        (Path(place) / "portable.json").write_text(json.dumps(result))


@pytest.fixture(scope="module")
def straight():
    learner = learner_of(stage=0)
    found = train(learner, 0, STEPS)
    learner.close()
    return found


def failed(rank: int, place: Path) -> str:
    """What each rank says where rank 1 cannot write its part in the background."""
    learner = learner_of(stage=2)
    engine, save = learner.engine.checkpoint_engine, learner.engine.checkpoint_engine.save
    if rank == 1:
        engine.save = lambda state, path: (_ for _ in ()).throw(PermissionError(f"{Path(path).name} is not to be written"))
    save_checkpoint(learner, place / "failed", {}, background=True)
    train(learner, 0, 1, rank, 2)
    try:
        save_checkpoint(learner, place / "failed", {}, background=True)
        return "no error"
    except (CheckpointError, PermissionError) as error:
        engine.save = save
        save_checkpoint(learner, place / "failed", {}, background=True)  # goes on where the cause is gone
        finish_saving(learner)
        return f"{type(error).__name__}: {error}"
    finally:
        learner.close()


def write_one(place: Path) -> None:
    """The portable state of one rank, in `one`."""
    learner = learner_of(stage=0)
    train(learner, 0, SAVED)
    save_portable(learner, place / "one")
    learner.close()


@pytest.fixture(scope="module")
def place(two_ranks):
    return two_ranks


@pytest.fixture(scope="module")
def two(two_ranks):
    return json.loads((two_ranks / "portable.json").read_text())


def close(found, expected, rel=2e-5):
    for one, other in zip(found, expected, strict=True):
        assert tuple(one) == pytest.approx(tuple(other), rel=rel)


def test_a_rank_that_cannot_write_is_named_on_all(two, place):
    of_first, of_second = two["failed"]
    assert of_first.startswith("CheckpointError: rank 1 could not write its part of the last checkpoint, so it is not there: "
                               "PermissionError: ")
    assert of_second.startswith("PermissionError: ")
    assert [path.name for path in (place / "failed").iterdir()] == ["step-1"]


@pytest.mark.parametrize("name", TWO)
def test_one_rank_goes_on_as_two_and_two_as_one(straight, two, place, name):
    ahead, from_one = two[name]
    close(ahead, straight[SAVED:])
    close(from_one, straight[SAVED:])
    learner = foreign(stage=0)
    load_portable(learner, place / f"{name} portable")
    learner.step = SAVED
    close(train(learner, SAVED, STEPS), straight[SAVED:])
    learner.close()


@pytest.mark.parametrize("name", ONE)
def test_stages_take_each_other_s_state(place, straight, tmp_path, name):
    kind, stages = ONE[name]
    first = learner_of(**kind)
    train(first, 0, SAVED)
    save_portable(first, tmp_path / "portable")
    expected = train(first, SAVED, STEPS)
    first.close()
    low = LOW if "dtype" in kind else {}
    for stage in stages:
        learner = foreign(stage=stage, **low)
        load_portable(learner, tmp_path / "portable")
        learner.step = SAVED
        close(train(learner, SAVED, STEPS), expected, rel=2e-2 if low else 2e-5)
        learner.close()
    if not low:
        close(expected, straight[SAVED:])


def test_before_the_first_step_there_are_no_moments(tmp_path, straight):
    learner = learner_of(stage=2)
    save_portable(learner, tmp_path / "portable")
    learner.close()
    learner = foreign(stage=3)
    load_portable(learner, tmp_path / "portable")
    close(train(learner, 0, 2), straight[:2])
    learner.close()


def test_another_layout_needs_a_converter_and_another_precision_is_refused(tmp_path, place, straight, capsys):
    learner = learner_of(stage=2)
    train(learner, 0, SAVED)
    path = save_checkpoint(learner, tmp_path, {"cursor": 3})
    learner.close()
    learner = foreign(stage=0)
    with pytest.raises(CheckpointError, match="zero_stage 2, this run has 0"):
        load_checkpoint(learner, path)
    assert load_checkpoint(learner, path, convert=lambda folder: place / "one") == {"cursor": 3} and learner.step == SAVED
    assert "step-2 was written with zero_stage 2, this run has zero_stage 0" in capsys.readouterr().err
    close(train(learner, SAVED, STEPS), straight[SAVED:])
    learner.close()
    learner = foreign(stage=0, dtype="bfloat16")
    with pytest.raises(CheckpointError, match="dtype float32, this run has bfloat16"):
        load_checkpoint(learner, path, convert=lambda folder: place / "one")
    learner.close()
