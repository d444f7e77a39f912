"""How far a teacher is from the student's start: exact values, intervals, warnings, and where the prefixes come from."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil

import numpy as np
import pytest
import torch

from mopd.check import compare_teachers
from mopd.learner.model import load_model
from mopd.learner.scores import Scores
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from prefix_store import PrefixStore
from teachers.consistency import measure_distances, print_distances, ratio_interval
from teachers.registry import model_revision
from teachers.scoring.hf import HFTeacher


class Sampled:
    """A teacher that gives the sampled token's score alone, as a server does; every tenth is missing."""

    teacher, gives = "served", frozenset({"sampled"})

    def __init__(self, model):
        self.inner = HFTeacher(model, teacher="served")

    def __call__(self, batch, *, need, temperature):
        scores = self.inner(batch, need=need, temperature=temperature).logprob.clone()
        scores[::10] = math.nan
        return Scores("served", scores)


@pytest.fixture(scope="module")
def parts(tiny_run):
    config = tiny_run.config("consistency.points=24")
    student = load_model(config.student.model)
    with PrefixStore.open(config.store) as store:
        yield (config, student, HFEngine(student, max_batch=32),
               ChatRenderer(load_tokenizer(config.student.model)), store)


def test_a_teacher_that_is_the_student_is_at_zero_and_others_are_where_they_are(parts, tiny_run):
    config, student, engine, renderer, store = parts
    same = HFTeacher(load_model(config.student.model), teacher="same")
    other = HFTeacher(load_model(config.teachers["game"].model), teacher="game")
    zero, far = (measure_distances(config, ["game"], student, engine, {"game": scorer}, renderer, store)[0]
                 for scorer in (same, other))
    assert abs(zero.kl) < 1e-6 and not zero.far and zero.warning == ""
    assert far.kl > 0.2 and far.low < far.kl < far.high and far.far and far.estimator == "exact"
    assert far.turns == 24 and far.tokens >= 24 and far.tokens == zero.tokens and far.unscored == 0
    for words in ("consistency.threshold=0.1", "0.19 against", "0.04", "2606.30406"):
        assert words in far.warning
    assert "of another origin" in far.warning and "set consistency.threshold above" in far.warning and not far.own
    again = measure_distances(config, ["game"], student, engine, {"game": other}, renderer, store)[0]
    assert again == far, "the same weights and config, another number"
    served = measure_distances(config, ["game"], student, engine, {"game": Sampled(other.model)}, renderer, store)[0]
    assert served.estimator == "sampled" and served.unscored == -(-far.tokens // 10) and served.tokens < far.tokens
    assert served.low < far.kl < served.high, "the sampled estimate is of the same quantity"
    plain = far.as_json()
    assert json.loads(json.dumps(plain)) == plain and plain["far"] is True


def test_a_teacher_made_from_the_student_is_not_called_one_of_another_origin(parts, tmp_path):
    config, student, engine, renderer, store = parts
    folder = shutil.copytree(config.teachers["game"].model, tmp_path / "made")
    teachers = config.teachers | {"game": dataclasses.replace(config.teachers["game"], model=str(folder))}
    config = dataclasses.replace(config, teachers=teachers)
    scorer = {"game": HFTeacher(load_model(folder), teacher="game")}
    for base, own in ((model_revision(config.student.model), True), ("another", False), (None, False)):
        (folder / "manifest.json").write_text(json.dumps({"base_revision": base}))
        [found] = measure_distances(config, ["game"], student, engine, scorer, renderer, store, points=4)
        assert found.far and found.own == own and found.as_json()["own"] == own
        assert ("made from this very start" in found.warning) == own != ("of another origin" in found.warning)


def test_the_exact_value_is_that_of_plain_forward_passes(parts):
    from mopd.sampling.base import SamplingOptions
    from mopd.sampling.fresh_turn import sample_fresh_turns
    from teachers.consistency import _points

    config, student, engine, renderer, store = parts
    teacher = load_model(config.teachers["embodied"].model)
    found = measure_distances(config, ["embodied"], student, engine, {"embodied": HFTeacher(teacher, teacher="x")}, renderer,
                              store, points=3)[0]
    points, _ = _points(config, "embodied", renderer, store, 3, False)
    options = SamplingOptions(1.0, max_tokens=6, stop_ids=renderer.stop_ids)
    total, count = 0.0, 0
    for row in sample_fresh_turns(engine, points, options):
        for action in row.actions:
            ids = torch.from_numpy(np.concatenate([row.trunk[:action.at], action.tokens]).astype(np.int64))[None]
            p, q = (torch.log_softmax(m(ids).logits[0, action.at - 1:-1].detach().double(), -1) for m in (student, teacher))
            total += float((p.exp() * (p - q)).sum())
            count += len(action.tokens)
    assert found.tokens == count and found.kl == pytest.approx(total / count, rel=1e-4)


def test_without_a_store_demonstrations_are_what_is_answered_to(parts, tiny_run, capsys):
    config, student, engine, renderer, _ = parts
    teacher = {"game": HFTeacher(student, teacher="game")}
    nothing = measure_distances(config, ["game"], student, engine, teacher, renderer, None)[0]
    assert math.isnan(nothing.kl) and nothing.as_json()["kl"] is None and "sft.files" in str(nothing) and not nothing.far
    files = dataclasses.replace(config, sft=dataclasses.replace(config.sft, files=[str(tiny_run.folder / "game.jsonl")]))
    found = measure_distances(files, ["game"], student, engine, teacher, renderer, None)[0]
    assert found.where == "at demonstrations' turns" and found.turns > 3 and abs(found.kl) < 1e-6
    print_distances([found, dataclasses.replace(found, kl=0.5)])
    out = capsys.readouterr().out
    assert "reverse KL 0.0000" in out and out.count("warning") == 1


def test_the_command_says_it_for_every_domain(tiny_run, tmp_path):
    found = compare_teachers(tiny_run.config("consistency.points=4", f"run={tmp_path}"), ["embodied", "game"])
    assert [(d.domain, d.teacher, d.turns) for d in found] == [("embodied", "embodied", 4), ("game", "game", 4)]
    assert all(d.far and "at prefixes of the store" in str(d) for d in found)


def test_intervals_of_a_ratio_cover_it():
    """1,000 draws of 40 turns of unequal length: 95% intervals hold the true mean in 92 to 98 of a hundred."""
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(1000):
        counts = rng.integers(1, 9, 40)
        own = rng.normal(0.5, 0.3, 40)  # tokens of one turn are alike
        sums = [float(rng.normal(m, 0.2, n).sum()) for m, n in zip(own, counts, strict=True)]
        mean, low, high = ratio_interval(sums, counts.tolist())
        inside += low <= 0.5 <= high
        assert low < mean < high
    assert 920 <= inside <= 980
    assert all(map(math.isnan, ratio_interval([], [])))
    mean, low, high = ratio_interval([1.0], [4])
    assert mean == 0.25 and math.isnan(low) and math.isnan(high)
