"""Config files: includes, overrides, types, and every error of a kind in one message with its key."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from mopd.config import Config, ConfigError, learner_config, load_config, stream_shares, to_dict

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.yaml"))
WHOLE = [p for p in CONFIGS if p.stem in ("demo", "demo_quick", "tiny")]
GOOD = """
domains:
  game: {environment: babyai, teacher: game}
  science: {environment: babyai, teacher: other}
teachers:
  game: {model: g}
  other: {model: o}
"""


@pytest.fixture
def write(tmp_path):
    def make(text=GOOD, name="c.yaml"):
        (tmp_path / name).write_text(text)
        return tmp_path / name
    return make


def errors_of(path, *overrides) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    message = str(caught.value)
    assert str(path) in message and all(error in message for error in caught.value.errors)
    return caught.value.errors


@pytest.mark.parametrize("path", WHOLE, ids=lambda p: p.stem)
def test_ready_recipes_load(path):
    config = load_config(path)
    assert set(config.domains) == {"game", "science", "embodied"}
    assert config.train.demonstration_fraction == 0, "headline arms learn from their own samples alone"
    assert config.student.model == f"{config.run}/base" and config.store == f"{config.run}/store"


def test_overrides_win_and_keep_their_types(write):
    config = load_config(write(), ["train.steps=7", "train.optimizer.betas=[0.8,0.9]", "train.optimizer.learning_rate=2e-3",
                                   "domains.game.share=2", "run=a/b", "domains.game.prefix_fraction=null",
                                   "train.objective_options={beta: 0.3}"])
    assert config.train.steps == 7 and config.train.optimizer.betas == [0.8, 0.9]
    assert config.train.optimizer.learning_rate == 0.002 and config.domains["game"].share == 2.0
    assert config.store == "a/b/store" and config.domains["game"].prefix_fraction is None
    assert config.train.objective_options == {"beta": 0.3}


def test_includes_merge_and_the_file_itself_wins(write, tmp_path):
    (tmp_path / "parts").mkdir()
    write("train: {steps: 5, group_size: 3}\n" + GOOD, "parts/a.yaml")
    write("include: [parts/a.yaml]\ntrain: {steps: 9}\n", "b.yaml")
    config = load_config(write("include: [b.yaml]\nseed: 4\n"))
    assert (config.train.steps, config.train.group_size, config.seed) == (9, 3, 4)


def test_circles_and_missing_files_are_named(write, tmp_path):
    write("include: [c.yaml]", "d.yaml")
    with pytest.raises(ConfigError, match="includes itself through"):
        load_config(write("include: [d.yaml]"))
    with pytest.raises(ConfigError, match=r"nowhere.yaml: no such config file \(included by .*c.yaml\)"):
        load_config(write("include: [nowhere.yaml]"))
    with pytest.raises(ConfigError, match="no such config file; configs/"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_config(write("a: [1"))
    with pytest.raises(ConfigError, match="a mapping"):
        load_config(write("- 1"))


def test_every_unknown_key_and_wrong_type_in_one_message(write):
    path = write(GOOD + "train: {stepz: 3, objective: 4, tensorboard: 1}\nseed: 1.5\nseeds: 3\n")
    errors = errors_of(path, "sft.steps=many", "foo", "domains.game.turns=3", "collect=7", "base.expert_shares.game=x")
    assert sorted(e.split(":")[0] for e in errors) == [
        "base.expert_shares.game", "collect", "domains.game.turns", "foo", "seed", "seeds", "sft.steps", "train.objective",
        "train.stepz", "train.tensorboard"]
    by_key = {e.split(":")[0]: e for e in errors}
    assert "did you mean steps?" in by_key["train.stepz"] and "key=value" in by_key["foo"]
    assert "whole number, found 1.5" in by_key["seed"] and "'many'" in by_key["sft.steps"]


def test_every_contradiction_in_one_message(write):
    path = write("domains:\n  game: {environment: '', teacher: nobody, share: -1}\n  web: {environment: x}\n"
                 "teachers: {game: {}}\n")
    errors = errors_of(path, "train.prefix_fraction=1.5", "train.temperature=0", "evaluate.split=exam",
                       "sft_domains.nope.steps=3", "deepspeed.zero_stage=7", "base.hidden=100", "base.experts_per_token=9",
                       "train.balance=fixed", "train.adaptive_minimum=0.7", "train.steps=0", "off_policy.optimizer.betas=[1]",
                       "train.optimizer.schedule=step", "train.demonstration_fraction=1", "domains.web.prefix_fraction=2")
    wanted = {"domains.game.environment": "missing", "domains.game.teacher": "'nobody'", "domains.game.share": "-1",
              "domains.web.teacher": "no teacher; name one of game", "teachers.game.model": "missing",
              "domains": "add up to 0", "train.prefix_fraction": "1.5", "train.temperature": "positive",
              "evaluate.split": "'exam'",
              "sft_domains.nope": "no such domain", "deepspeed.zero_stage": "7", "base.hidden": "multiple",
              "base.experts_per_token": "more than", "train.balance_weights": "missing: game, web",
              "train.adaptive_minimum": "cannot add up", "train.steps": "at least 1", "off_policy.optimizer.betas": "two",
              "train.optimizer.schedule": "'step'", "train.demonstration_fraction": "below 1",
              "domains.web.prefix_fraction": "not between 0 and 1"}
    found = {e.split(": ")[0]: e for e in errors}
    assert set(found) == set(wanted) and len(found) == len(errors)
    for key, words in wanted.items():
        assert words in found[key]


@pytest.mark.parametrize("override", [
    "train.optimizer.learning_rate=nan", "train.temperature=inf", "train.optimizer.weight_decay=-1", "seed=-1", "threads=-3",
    "train.checkpoint_every=0", "train.keep_checkpoints=0", "train.adaptive_smoothing=2", "train.adaptive_gamma=-1",
    "train.optimizer.betas=[2,3]", "domains.game.share=nan", "domains.game.evaluation_episodes=-4", "collect.batch=0",
    "evaluate.batch=0", "evaluate.temperature=-1", "novice.random_share=2", "sft.rows_per_step=0", "off_policy.steps=-1",
    "sft_domains.game.optimizer.learning_rate=-1", "base.expert_shares.game=-1", "base.max_positions=0", "seeds=[]",
    "study.seeds=[1,1]", "seeds=[-1]", "train.balance_weights.game=-1", "train.balance_weights.web=1", "train.name=../evil",
    "train.name=''", "train.keep_every=-50", "train.keep_every=70", "train.stop_within_s=-1"])
def test_a_number_or_name_out_of_range_is_refused_before_any_work(write, override):
    key = override.split("=")[0]
    errors = errors_of(write(), override)
    assert len(errors) == 1 and errors[0].startswith(key)


def test_balance_weights_that_are_all_zero_train_nothing(write):
    [error] = errors_of(write(), "train.balance=fixed", "train.balance_weights={game: 0, science: 0}")
    assert "no domain would be trained" in error


def test_a_domain_whose_name_cannot_name_a_file_is_refused(write):
    assert any(e.startswith("domains.a/b: ") for e in errors_of(write(GOOD.replace("science:", '"a/b":'))))


@pytest.mark.parametrize("override, words", [
    ("train.steps=[1", "not valid YAML"), ("==", "key=value"), ("=3", "key=value"), ("domains.game=[1]", "does not fit"),
    ("run==", "not valid YAML")])
def test_an_override_that_cannot_be_read_is_named(write, override, words):
    errors = errors_of(write(), override, "train.stepz=1")
    assert len(errors) == 2 and errors[0].startswith(override) and words in errors[0], "beside the other errors"


@pytest.mark.parametrize("include", ["other.yaml", "3", "[3]", "['']", "{a: b}"])
def test_an_include_that_is_no_list_of_files_is_refused(write, include):
    assert "include is a list of files" in errors_of(write(f"include: {include}\n"))[0]


def test_a_config_without_domains_is_refused(write):
    assert "no domain is configured" in errors_of(write("seed: 1"))[0]


def test_a_single_domain_needs_no_room_for_adaptive_shares(write):
    one = "domains: {game: {environment: babyai, teacher: game}}\nteachers: {game: {model: g}}\n"
    assert load_config(write(one)).train.domain_schedule == "adaptive"


@pytest.mark.parametrize("prefix, teacher, lam", [(0.5, 0.5, 0.0), (0.0, 0.3, 0.5), (1.0, 0.25, 0.4)])
def test_stream_shares_sum_to_one(write, prefix, teacher, lam):
    config = load_config(write(), [f"train.prefix_fraction={prefix}", f"train.teacher_prefix_share={teacher}",
                                   f"train.demonstration_fraction={lam}"])
    shares = stream_shares(config, "game")
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["demonstration"] == (lam if prefix else 0.0)
    if prefix:
        assert shares["teacher_prefix"] == pytest.approx((1 - lam) * prefix * teacher)


def test_the_learners_config_takes_every_optimizer_key(write):
    config = load_config(write(), ["train.optimizer={learning_rate: 0.5, betas: [0.1, 0.2], weight_decay: 0.3, schedule: "
                                   "linear, warmup_steps: 4, final_fraction: 0.6, gradient_clip: 0.7}",
                                   "deepspeed={zero_stage: 2, dtype: bfloat16, raw: {a: 1}}", "seed=9",
                                   "student.freeze_router=false"])
    made = learner_config(config.train.optimizer, config, log_file="x")
    assert (made.learning_rate, made.beta1, made.beta2, made.weight_decay) == (0.5, 0.1, 0.2, 0.3)
    assert (made.schedule, made.warmup_steps, made.minimum_ratio, made.gradient_clipping) == ("linear", 4, 0.6, 0.7)
    assert (made.zero_stage, made.dtype, made.deepspeed, made.seed) == (2, "bfloat16", {"a": 1}, 9)
    assert made.freeze_router is False and made.log_file == "x"


def test_a_config_is_plain_data(write):
    config = load_config(write())
    again = to_dict(config)
    assert isinstance(again["domains"]["game"]["options"], dict)
    assert set(again) == {f.name for f in dataclasses.fields(Config)}


def test_reading_a_config_is_light():
    heavy = "[m for m in ('torch', 'transformers', 'zarr', 'matplotlib') if m in sys.modules]"
    code = f"import sys, mopd.cli, mopd.config, mopd.demo, mopd.pipeline; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_option_that_would_do_nothing_is_refused(write):
    demo = write()
    outcome = ["train.objective=mopd", "train.objective_options={alpha: 0.5}"]
    group = ["train.group_size=2"]
    with pytest.raises(ConfigError, match=r"train.objective_options.alpha: 0.5 would do nothing with train.group_size=1"):
        load_config(demo, outcome)
    with pytest.raises(ConfigError, match="train.objective_options.alpha: 0.5 would do nothing: no domain has rollouts"):
        load_config(demo, [*outcome, *group, "train.prefix_fraction=1"])
    for wrong in ("-0.5", "much", "true"):
        with pytest.raises(ConfigError, match="train.objective_options.alpha: .* is not a number of at least 0"):
            load_config(demo, ["train.objective=mopd", f"train.objective_options={{alpha: {wrong}}}", *group])
    assert load_config(demo, [*outcome, *group])
    assert load_config(demo, ["train.objective=mopd", "train.objective_options={alpha: 0}"])


def test_several_teachers_of_a_domain_are_checked(write):
    weights = "domains.game.teacher_weights={game: 0.5, other: 2}"
    config = load_config(write(), [weights, "domains.game.teacher_mixture=log_space"])
    assert config.domains["game"].teacher_weights == {"game": 0.5, "other": 2.0}
    errors = errors_of(write(), "domains.game.teacher_weights={other: -1, third: 1}", "domains.science.teacher_mixture=sum")
    assert len(errors) == 4
    for key in ("domains.game.teacher_weights.other: -1.0 must be positive", "domains.game.teacher_weights.third: no teacher",
                "domains.game.teacher_weights: domains.game.teacher, the one that plays into the store, must be among them",
                "domains.science.teacher_mixture: 'sum' is not one of probability, log_space"):
        assert any(error.startswith(key) for error in errors), key


def test_a_text_key_without_a_value_is_told_from_a_number(write):
    with pytest.raises(ConfigError) as nothing:
        load_config(write(), ["domains.game.teacher="])
    with pytest.raises(ConfigError) as number:
        load_config(write(), ["domains.game.teacher=3"])
    assert "domains.game.teacher: expected text, found nothing; give it a value" in str(nothing.value)
    assert "domains.game.teacher: expected text, found 3; put it in quotes" in str(number.value)
