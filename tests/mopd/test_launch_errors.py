"""What a launch refuses, before any weight is loaded or anything is played; and what a dying environment counts as."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from mopd.check import check_launch, open_launch
from mopd.config import ConfigError
from mopd.domains import open_domains
from mopd.learner.model import load_model
from mopd.run import train
from mopd.sampling import streams
from mopd.sampling.agent_loop import EpisodeSpec, play_episodes
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.failures import TooManyFailures, refuse_failures
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.streams import StepSamples
from prefix_store import PrefixStore
from tests.tiny_run import same_weights, tiny_model


@pytest.fixture
def errors(tiny_run, tmp_path, monkeypatch):
    """errors(overrides…) → what `train` says, one entry per error; nothing was loaded, played or written."""
    def refuse(*_, **__):
        raise AssertionError("work was begun although the config is wrong")
    for name in ("mopd.run_parts.load_model", "teachers.registry.load_model", "mopd.run_parts.HFEngine",
                 "mopd.run_parts.Learner"):
        monkeypatch.setattr(name, refuse)

    def call(*overrides):
        with pytest.raises(ConfigError) as caught:
            train(tiny_run.config(f"run={tmp_path / 'run'}", *overrides))
        assert not (tmp_path / "run").exists()
        return caught.value.errors
    return call


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A model folder with another tokenizer."""
    tokenizer = train_tokenizer(["quite another text about other things entirely"] * 3, 300)
    return tiny_model(tokenizer, tmp_path_factory.mktemp("foreign") / "model", 5)


def test_a_config_that_is_right_passes(tiny_run):
    answer = check_launch(tiny_run.config())
    assert answer["errors"] == []
    assert answer["domains"]["game"]["stored"] == {"teacher_prefix": {"sequences": 3, "decision_points": 12},
                                                   "sft_prefix": answer["domains"]["game"]["stored"]["sft_prefix"]}


def test_a_domain_without_a_teacher(tiny_run):
    with pytest.raises(ConfigError, match="domains.game.teacher: this domain has no teacher; name one of embodied, game"):
        tiny_run.config("domains.game.teacher=''")
    with pytest.raises(ConfigError, match="domains.game.teacher: no teacher 'x' under teachers; there embodied, game"):
        tiny_run.config("domains.game.teacher=x")


def test_a_model_that_is_not_there(errors):
    (error,) = errors("student.model=no/such/folder")
    assert error.startswith("student.model: there is no model folder at no/such/folder; give a Hugging Face folder")
    first, second = errors("teachers.game.model=no/such/one", "teachers.embodied.model=no/such/two")
    assert first.startswith("teachers.embodied.model:") and "no/such/two" in first
    assert second.startswith("teachers.game.model:") and "no/such/one" in second


def test_a_model_folder_without_safe_weights(errors, tmp_path):
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_text("{}")
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"")
    (error,) = errors(f"teachers.game.model={tmp_path / 'pickled'}")
    assert "no .safetensors file" in error and "pickled weights are not read" in error


def test_a_run_folder_that_cannot_be_made(tiny_run, tmp_path):
    (tmp_path / "file").write_text("")
    assert check_launch(tiny_run.config(f"run={tmp_path}/file/run"))["errors"] == [
        f"run: {tmp_path}/file/run cannot be a folder, because {tmp_path}/file is a file; name another with run=FOLDER"]


def test_damaged_weights_of_a_teacher(errors, tiny_run, tmp_path):
    folder = Path(shutil.copytree(tiny_run.folder / "teachers" / "game", tmp_path / "cut"))
    os.truncate(folder / "model.safetensors", 3000)
    [error] = errors(f"teachers.game.model={folder}")
    assert error.startswith("teachers.game.model: ") and "model.safetensors is damaged" in error


def test_a_teacher_that_cannot_read_whole_episodes(errors, tiny_run, tmp_path):
    folder = Path(shutil.copytree(tiny_run.folder / "teachers" / "game", tmp_path / "short"))
    shape = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(shape | {"max_position_embeddings": 512}))
    [error] = errors(f"teachers.game.model={folder}")
    assert error.startswith("domains.game.max_context_tokens: 1024 is more than the 512 positions of its teacher 'game'")


def test_a_teacher_with_another_tokenizer(errors, foreign):
    (error,) = errors(f"teachers.game.model={foreign}")
    assert error.startswith("teachers: teacher 'game' has another tokenizer than the student: id ")
    assert "Take a teacher that was trained with the student's tokenizer" in error


def test_an_empty_store(errors, tmp_path):
    with PrefixStore.open(tmp_path / "empty", "w") as store:
        store.commit("nothing")
    (error,) = errors(f"store={tmp_path / 'empty'}")
    assert error.startswith(f"store: the prefix store {tmp_path / 'empty'} is empty")
    assert "mopd import" in error and "train.prefix_fraction=0" in error


def test_a_store_that_is_not_there(errors, tmp_path):
    (error,) = errors(f"store={tmp_path / 'none'}")
    assert error.startswith(f"store: {tmp_path / 'none'} does not exist") and "import" in error


def test_a_store_of_another_tokenizer(errors, tmp_path, foreign, tiny_run):
    errors_ = errors(f"student.model={foreign}", f"teachers.game.model={foreign}", f"teachers.embodied.model={foreign}")
    (error,) = errors_
    assert error.startswith("store: ") and "was written with another tokenizer" in error
    assert "Collect or import the trajectories again" in error


def test_a_stream_without_decision_points(errors, tiny_run, tmp_path):
    with PrefixStore.open(tiny_run.folder / "store") as store, PrefixStore.open(tmp_path / "part", "w") as part:
        for sequence in store:
            if not (sequence.domain == "game" and sequence.source.kind == "teacher"):
                part.append(sequence)
        part.commit("without what the game's teacher played")
    (error,) = errors(f"store={tmp_path / 'part'}")
    assert error.startswith("domains.game: stream teacher_prefix: nothing to draw") and "Collect or import" in error
    assert "loosen the selection's filters, or give this stream no share" in error
    first, second = errors("selection.success_only=true")
    assert all("from successful trajectories" in e and "teacher_prefix" in e for e in (first, second))


def test_no_store_is_needed_for_rollouts_alone(tiny_run):
    launch = open_launch(tiny_run.config("train.prefix_fraction=0", "store=/no/where"))
    launch.close()
    assert launch.store is None and launch.selector is None


@pytest.mark.parametrize("override, key, words", [
    ("train.objective=reverse_kll", "train.objective", "there are: mopd, reverse_kl"),
    ("train.objective_options={betta: 1}", "train.objective", "has no option 'betta'"),
    ("train.aggregation=mean", "train.aggregation", "token_mean"),
    ("train.adaptive_kl_smoothing=1", "train.domain_schedule", "kl_smoothing"),
    ("train.optimizer.gradient_clip=-1", "train.optimizer.gradient_clip", "at least 0"),
    ("deepspeed.autoep_size=2", "deepspeed.autoep_size", "zero_stage 1, 2 or 3"),
    ("selection.strategy=best", "selection", "uniform_depth"),
    ("selection.draw=twice", "selection", "distinct"),
    ("domains.game.environment=textworld", "domains.game.environment", "textworld_express"),
    ("domains.game.options.gamez=1", "domains.game.environment", "gamez"),
    ("domains.game.options.games={nogame: ''}", "domains.game.environment", "nogame"),
    ("domains.embodied.options.levels=[BabyAI-Nowhere-v0]", "domains.embodied.environment", "BabyAI-Nowhere-v0"),
    ("domains.embodied.max_context_tokens=5000", "domains.embodied.max_context_tokens", "1024 positions"),
])
def test_each_wrong_value_is_one_error_with_its_key(errors, override, key, words):
    (error,) = errors(override)
    assert error.startswith(f"{key}: ") and words in error


def test_all_errors_at_once(errors, foreign):
    found = errors("train.objective=nope", "selection.draw=twice", "domains.game.environment=nope",
                   f"teachers.game.model={foreign}", "train.aggregation=nope")
    assert [e.split(":")[0] for e in found] == ["train.objective", "teachers", "train.aggregation", "selection",
                                                "domains.game.environment"]


def test_a_teacher_that_nobody_needs_is_said(tiny_run):
    answer = check_launch(tiny_run.config(f"teachers.spare.model={tiny_run.folder / 'base'}"))
    assert answer["errors"] == [] and any("spare" in warning for warning in answer["warnings"])


# A Java process that is killed under a rollout


class Killing:
    """An engine that kills the domain's Java process before its calls of the given numbers."""

    def __init__(self, engine, java, at):
        self.engine, self.java, self.at, self.calls, self.killed = engine, java, at, 0, 0
        self.version, self.max_batch, self.max_positions = engine.version, engine.max_batch, engine.max_positions

    def generate(self, requests, options):
        self.calls += 1
        if self.at is None or self.calls in self.at:
            if self.java.pid is not None:
                os.kill(self.java.pid, signal.SIGKILL)
                self.killed += 1
        return self.engine.generate(requests, options)

    def end_sessions(self, sessions):
        self.engine.end_sessions(sessions)


@pytest.fixture
def game(tiny_run):
    """play(at) → (episodes, engine): four rollouts of the game domain, its Java process killed at these calls."""
    config = tiny_run.config()
    domains = open_domains(config, ["game"])
    domain, tokenizer = domains["game"], tiny_run.tokenizer()
    # Words that the game takes, so that actions reach Java: the expert's own, one after the other.
    tasks = domain.spread("train", 4)

    def play(at):
        engine = Killing(HFEngine(load_model(tiny_run.folder / "base"), max_batch=8), domain.family.java, at)
        specs = [EpisodeSpec("game", task, 100 + i, i, i) for i, task in enumerate(tasks)]
        return play_episodes(engine, {"game": domain.pool}, specs, ChatRenderer(tokenizer), {"game": domain.harness},
                             temperature=1.0), engine
    yield play
    domain.close()


@pytest.fixture
def admissible(monkeypatch):
    """Actions become ones that the game admits, so that every step is a call into Java."""
    from mopd.environments.textworld_express import TextWorldExpressEnvironment

    step = TextWorldExpressEnvironment.step
    monkeypatch.setattr(TextWorldExpressEnvironment, "step",
                        lambda self, action: step(self, sorted(self._admissible)[len(action) % len(self._admissible)]))


def test_a_killed_java_process_is_tried_again(game, admissible):
    undisturbed, _ = game(())
    assert all(e.sequence is not None and e.attempts == 1 for e in undisturbed)
    disturbed, engine = game((2,))
    assert engine.killed == 1
    assert all(e.failure == "" and e.sequence is not None for e in disturbed)
    assert any(e.attempts == 2 for e in disturbed)
    assert all(e.attempts == 2 or e.turns == 1 for e in disturbed), "what was under way is played again from its start"
    for one, other in zip(undisturbed, disturbed, strict=True):
        assert (one.score, one.success, one.turns) == (other.score, other.success, other.turns)
        np.testing.assert_array_equal(one.sequence.contexts[-1].tokens, other.sequence.contexts[-1].tokens)


def test_a_java_process_that_always_dies_is_no_reward(game, admissible, tiny_run):
    episodes, engine = game(None)
    assert engine.killed >= 3
    for episode in episodes:
        assert episode.failure == "java_died" and episode.attempts == 3
        assert episode.sequence is None, "a sequence would carry a reward of zero"
        assert "Java process" in episode.failure_text
    samples = StepSamples([], episodes)
    samples.failures["game"].update(e.failure for e in episodes)
    with pytest.raises(TooManyFailures) as caught:
        refuse_failures(tiny_run.config(), 7, samples)
    message = str(caught.value)
    assert "step 7: 4 of 4 rollouts" in message and "java_died" in message and "goes on from the last checkpoint" in message
    refuse_failures(tiny_run.config("train.max_infra_failure_share=1"), 7, samples)


@pytest.fixture
def dying(admissible, monkeypatch):
    """Every rollout of every run kills the game's Java process before each of its turns."""
    play = streams.play_episodes

    def killing(engine, pools, specs, *arguments, **options):
        return play(Killing(engine, pools["game"].family.java, None), pools, specs, *arguments, **options)
    monkeypatch.setattr(streams, "play_episodes", killing)


def test_a_step_of_which_nothing_is_left_is_skipped(tiny_run, tmp_path, dying):
    config = tiny_run.config(f"run={tmp_path}", "train.steps=2", "train.max_infra_failure_share=1",
                             "domains.embodied.share=0", "train.domain_schedule=static", "train.prefix_fraction=0",
                             "train.samples_per_step=2")
    with pytest.warns(UserWarning, match="step 0: no token is left to train on"):
        model = train(config)
    lines = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["skipped"], line["tokens"]["trained"]) for line in lines] == [(0, True, 0), (1, True, 0)]
    assert same_weights(model, tiny_run.folder / "base")


def test_a_step_whose_game_dies_trains_on_the_rest(tiny_run, tmp_path, dying):
    config = tiny_run.config(f"run={tmp_path}", "train.steps=2", "train.max_infra_failure_share=1", "train.group_size=2")
    model = train(config)
    lines = [json.loads(line) for line in (model.parent / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for line in lines:
        game, embodied = line["domains"]["game"], line["domains"]["embodied"]
        assert game["infra_failures"] == {"java_died": 4} and embodied["infra_failures"] == {}
        assert "rollout" not in game["streams"] and game["streams"]["teacher_prefix"]["tokens"] > 0
        assert game["reward"] is None and game["success"] is None, "a failure is no zero reward"
        assert embodied["streams"]["rollout"]["tokens"] > 0 and embodied["reward"] is not None
        assert line["dropped_groups"] == 2 and sum(line["omega"].values()) == pytest.approx(1)
    assert all(page["domain"] == "embodied" for page in json.loads((model.parent / "episodes.json").read_text()))


def test_an_evaluation_that_only_fails_has_no_score(tiny_run, tmp_path, admissible, monkeypatch, capsys):
    from mopd import evaluate
    from mopd.sampling import play

    episodes = play.play_episodes

    def killing(engine, pools, specs, *arguments, **options):
        return episodes(Killing(engine, pools["game"].family.java, None), pools, specs, *arguments, **options)
    monkeypatch.setattr(play, "play_episodes", killing)
    config = tiny_run.config(f"evaluate.out={tmp_path}", "domains.game.evaluation_episodes=2")
    answer = evaluate.evaluate_models(config, {"m": str(tiny_run.folder / "base")}, ["game"])
    assert answer == {"m": {"game": {"score": None, "n": 0, "low": None, "high": None}}}
    record = json.loads((tmp_path / "m.game.json").read_text(), parse_constant=lambda _: pytest.fail("not plain JSON"))
    assert record["failures"] == 2 and {e["failure"] for e in record["episodes"]} == {"java_died"}
    assert "not measured" in capsys.readouterr().out


def test_a_teacher_that_cannot_play_is_an_error(tiny_run, tmp_path, admissible, monkeypatch):
    from teachers import collect

    episodes = collect.play_episodes

    def killing(engine, pools, specs, *arguments, **options):
        return episodes(Killing(engine, pools["game"].family.java, None), pools, specs, *arguments, **options)
    monkeypatch.setattr(collect, "play_episodes", killing)
    with PrefixStore.open(tmp_path / "store", "w") as store:
        store.commit("empty")
    with pytest.raises(collect.NothingCollected, match="java_died.: 3"):
        collect.collect_domain(tiny_run.config(f"run={tmp_path}", f"store={tmp_path / 'store'}"), "game")
    assert not list((tmp_path / "collected").glob("*.json")) and len(PrefixStore.open(tmp_path / "store")) == 0


def test_an_objective_that_has_no_use_is_refused_with_the_reason(errors):
    (error,) = errors("train.objective=sampled_kl", "train.objective_options={estimator: k1}")
    assert error.startswith("train.objective: objective 'sampled_kl': k1 = log p − log q cannot be a loss")
    assert "Use 'k2'" in error
    (error,) = errors("train.objective=mopd", "train.objective_options={temperature: 2}")
    assert error.startswith("train.objective_options.temperature: ")


def test_a_mixture_that_its_teachers_cannot_give(errors, monkeypatch):
    monkeypatch.setattr("teachers.scoring.hf.HFTeacher.gives", frozenset({"sampled"}))
    (error,) = errors("train.objective=mopd", "domains.game.teacher_weights={game: 1, embodied: 1}",
                      "domains.game.teacher_mixture=log_space")
    assert error.startswith("domains.game.teacher_mixture: log_space needs every teacher's whole distribution")
