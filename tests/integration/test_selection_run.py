"""Selection inside runs: scores come from training, runs are functions of config and seed, and go on after a kill."""

from __future__ import annotations

import json
import re

import pytest

from mopd.check import check_launch, print_check
from mopd.config import ConfigError
from mopd.report_page import _selection_words
from mopd.run import train
from prefix_store import PrefixStore
from prefix_store.scores import find_rows, read_scores
from tests.integration.test_determinism import stop_after, student
from tests.tiny_run import records, same_weights

pytestmark = pytest.mark.timeout(900)
SCORED = ("train.prefix_fraction=1", "train.steps=6", "train.fresh_turns=2", "train.checkpoint_every=2",
          "selection.strategy=pivot", "selection.options={quantile: 0.5, remeasure: 0.2, unmeasured: 0.3}",
          "selection.points_per_sequence=2", "selection.score_smoothing=0.25")


@pytest.fixture(scope="module")
def scored(tiny_run, tmp_path_factory):
    """A run that draws by what it measures."""
    run = tmp_path_factory.mktemp("scored")
    train(tiny_run.config(f"run={run}", *SCORED))
    return student(run)


def test_scores_of_what_was_trained_are_written_down(tiny_run, scored):
    found = read_scores(scored / "scores.json")
    assert set(found.columns) == {"reverse_kl", "k1", "teacher_entropy", "student_entropy", "disagreement"}
    assert (found.columns["reverse_kl"] > 0).all()
    assert ((found.columns["disagreement"] >= 0) & (found.columns["disagreement"] <= 1)).all()
    rows = find_rows(PrefixStore.open(tiny_run.folder / "store").index(), found.sequence, found.turn)
    assert (rows >= 0).all() and len(set(rows.tolist())) == len(rows)
    drawn = json.loads((scored / "selection.json").read_text())["drawn"]
    steps = records(scored)
    for name in ("game", "embodied"):
        points = sum(step["selection"][name]["points"] for step in steps)
        assert points == sum(n for depths in drawn[name].values() for n in depths.values()) > 0
        assert points * 2 == sum(sum(step["domains"][name]["depth"].values()) for step in steps)
        last = steps[-1]["selection"][name]["streams"]["sft_prefix"]
        assert last["pivots"] + last["below"] + last["unmeasured"] == last["candidates"] and last["pivots"] > 0
        assert last["scores"]["reverse_kl"]["known"] == last["pivots"] + last["below"]
    assert steps[0]["selection"]["game"]["streams"]["sft_prefix"]["unmeasured"] > 0
    words = _selection_words(steps)
    assert re.search(r"teacher \d+%", words) and re.search(r"pivots at the end: \d+% of \d+ points", words)


def test_the_same_config_and_seed_give_the_same_run(tiny_run, scored, tmp_path):
    train(tiny_run.config(f"run={tmp_path}", *SCORED))
    assert records(student(tmp_path)) == records(scored)
    assert same_weights(student(tmp_path) / "model", scored / "model")
    assert (student(tmp_path) / "scores.json").read_bytes() == (scored / "scores.json").read_bytes()


def test_a_run_that_was_interrupted_draws_what_it_would_have_drawn(tiny_run, scored, tmp_path, monkeypatch):
    """The last checkpoint is two drawn steps behind when it stops: one trained and lost, one only drawn."""
    config = tiny_run.config(f"run={tmp_path}", *SCORED)
    stop_after(monkeypatch, 4)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert len(records(student(tmp_path))) == 3 and list((student(tmp_path) / "checkpoints").glob("*/step-2"))
    monkeypatch.undo()
    train(config)
    assert records(student(tmp_path)) == records(scored)
    assert same_weights(student(tmp_path) / "model", scored / "model")
    for name in ("scores.json", "selection.json"):
        assert (student(tmp_path) / name).read_bytes() == (scored / name).read_bytes()


def test_another_run_begins_with_these_scores(tiny_run, scored, tmp_path, capsys):
    changes = ("train.prefix_fraction=1", "train.steps=2", "selection.strategy=weighted", "selection.points_per_sequence=1",
               "selection.update_scores=false", "selection.options={score: disagreement, remeasure: 0.0, unmeasured: 0.0}",
               f"selection.scores={scored / 'scores.json'}")
    answer = check_launch(tiny_run.config(*changes))
    assert answer["errors"] == [] and "by the score disagreement" in answer["selection"]
    print_check(answer)
    assert "drawn by weighted (remeasure 0.0, score disagreement, unmeasured 0.0), draw distinct" in capsys.readouterr().out
    train(tiny_run.config(f"run={tmp_path}", *changes))
    known = len(read_scores(scored / "scores.json").sequence)
    streams = [s for d in records(student(tmp_path))[0]["selection"].values() for s in d["streams"].values()]
    assert sum(s["scores"]["disagreement"]["known"] for s in streams) == known
    assert not (student(tmp_path) / "scores.json").exists()
    assert json.loads((student(tmp_path) / "manifest.json").read_text())["selection"]["sha256"]
    with pytest.raises(ConfigError, match="selection.scores|nowhere.json"):
        train(tiny_run.config(f"run={tmp_path}", *changes, "selection.scores=nowhere.json"))


@pytest.mark.parametrize("overrides, message", [
    (["selection.strategy=best"], "selection: unknown selection strategy 'best'"),
    (["selection.strategy=geometric", "selection.options={gamma: 1}"], "no option 'gamma'; there is kappa"),
    (["selection.strategy=pivot", "selection.options={threshold: 0.1}", "selection.draw=epoch"],
     "changes by the score reverse_kl; draw 'epoch' needs a fixed one"),
    (["selection.strategy=pivot"], "selection: .*give either threshold"),
    (["selection.strategy=weighted", "selection.options={score: novelty}"],
     "selection.options: .*'novelty', which is neither measured in this run nor supplied; there is disagreement, k1"),
    (["selection.strategy=weighted", "selection.options={score: disagreement}", "train.objective=mopd"],
     "selection.options: .*'disagreement', which is neither measured"),
    (["selection.strategy=weighted", "selection.update_scores=false"], "'reverse_kl', which is neither .*; there is none"),
    (["selection.strategy=weighted", "selection.options={score: outcome.metadata.nothing}"],
     "selection: no trajectory of this version has a outcome.metadata.nothing"),
    (["selection.scores=nowhere.json"], "selection: .*nowhere.json"),
    (["selection.score_smoothing=1.0"], "selection: score_smoothing is 1.0"),
    (["selection.max_prefix_tokens=1"], "domains.game: stream sft_prefix: nothing to draw"),
    (["selection.sources=[parrot]"], "selection: sources: source kind 'parrot'"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_at_launch(tiny_run, overrides, message):
    errors = check_launch(tiny_run.config("train.prefix_fraction=1", *overrides))["errors"]
    assert any(re.search(message, error) for error in errors), errors


def test_quotas_of_unknown_domains_are_refused(tiny_run):
    with pytest.raises(ConfigError, match="selection.quotas.chess: no such domain; there is embodied, game"):
        tiny_run.config("selection.quotas={chess: 3}")


def test_a_curriculum_goes_over_the_steps_of_the_run(tiny_run, tmp_path):
    train(tiny_run.config(f"run={tmp_path}", "train.prefix_fraction=1", "train.steps=3", "selection.strategy=curriculum",
                          "selection.options={direction: back_to_front, width: 0.3}", "selection.quotas={game: 3}"))
    steps = records(student(tmp_path))
    windows = [step["selection"]["game"]["streams"]["sft_prefix"]["window"] for step in steps]
    assert windows == [pytest.approx(w) for w in ([0.7, 1.0], [0.35, 0.65], [0.0, 0.3])]
    mean = [sum(int(t) * n for t, n in s["selection"]["game"]["depth"].items()) / s["selection"]["game"]["points"]
            for s in steps]
    assert mean[0] > mean[1] > mean[2] and all(s["selection"]["game"]["points"] <= 6 for s in steps)
