"""What does not fit together is refused before a launch, with its key, the reason and what could be had."""

from __future__ import annotations

import pytest

from mopd.config import Config, DomainConfig, TeacherConfig
from mopd.fits import misfits
from mopd.losses import make_objective
from mopd.losses.objectives import ObjectiveResult

SERVER, HERE = frozenset({"sampled"}), frozenset({"sampled", "full", "hidden"})
LIKELIEST = frozenset({"sampled", "top_k"})
TOP = {"support": "top_k", "k": 5}


def found(gives, objective="mopd", options=None, domain=None, **train):
    config = Config(teachers={name: TeacherConfig("folder") for name in gives},
                    domains={"game": DomainConfig(environment="e", teacher="a", **domain or {})})
    config.train.objective, config.train.objective_options = objective, dict(options or {})
    for name, value in train.items():
        setattr(config.train, name, value)
    return misfits(config, make_objective(objective, options), gives)


MIXED = {"teacher_weights": {"a": 1.0, "b": 2.0}, "teacher_mixture": "log_space"}


@pytest.mark.parametrize("objective", ["mopd", "sampled_kl", "reverse_kl", "forward_kl", "jsd"])
def test_teachers_in_this_process_serve_every_objective_and_mixture(objective):
    assert found({"a": HERE, "b": HERE}, objective, domain=MIXED) == []
    assert found({"a": HERE}, objective, top_p=0.9) == []


@pytest.mark.parametrize("objective,options", [
    ("reverse_kl", {}), ("forward_kl", {"support": "top_k", "k": 5}), ("jsd", {"beta": 0.1})])
def test_sampled_scores_are_too_little_for_a_distribution(objective, options):
    [error] = found({"a": SERVER}, objective, options)
    assert error.startswith(f"train.objective: {objective} compares whole distributions, and teacher 'a' of domain game")
    assert "take mopd or sampled_kl" in error
    assert found({"a": SERVER}, "mopd") == []


def test_the_likeliest_ids_of_a_server_do_for_forward_kl_over_them():
    assert found({"a": LIKELIEST}, "forward_kl", TOP) == []
    for objective, options in (("forward_kl", {}), ("reverse_kl", TOP), ("jsd", TOP)):
        [error] = found({"a": LIKELIEST}, objective, options)
        assert "gives the sampled token's score and its likeliest ids; take mopd or sampled_kl, forward_kl with" in error
    [error] = found({"a": LIKELIEST, "b": HERE}, "forward_kl", TOP, domain={"teacher_weights": {"a": 1.0, "b": 2.0}})
    assert error.startswith("domains.game.teacher_weights: the likeliest ids of a mixture are not")
    [error] = found({"a": LIKELIEST}, "forward_kl", TOP, top_p=0.9)
    assert error.startswith("train.top_p: ")
    assert found({"a": HERE}, "forward_kl", TOP, top_p=0.9) == []


def test_a_temperature_that_a_teacher_cannot_have_is_known_without_asking_it():
    for at in ({"temperature": 0.7}, {"objective_options": {"temperature": 0.7}}):
        config = Config(domains={"game": DomainConfig(environment="e", teacher="far")}, teachers={
            "far": TeacherConfig(backend="server", urls=["http://127.0.0.1:9"]), "near": TeacherConfig("folder"),
            "unused": TeacherConfig("folder", backend="vllm")})
        config.train.objective = "mopd"
        for name, value in at.items():
            setattr(config.train, name, value)
        objective = make_objective("mopd", config.train.objective_options)
        error = misfits(config, objective, {"far": LIKELIEST})[0]
        assert error.startswith("train.temperature: teacher 'far' (teachers.far.backend=server) scores at temperature 1 only")
        assert "compares at 0.7" in error and "teachers.far.backend=hf" in error and "unused" not in error
        config.domains["game"].teacher = "near"
        assert not any("temperature 1 only" in e for e in misfits(config, objective, {"near": HERE}))


def test_a_mixture_in_log_space_needs_all_whole_distributions():
    [error] = found({"a": HERE, "b": SERVER}, domain=MIXED)
    assert error.startswith("domains.game.teacher_mixture: log_space needs") and "teacher 'b' gives" in error
    assert "take probability" in error
    assert found({"a": HERE, "b": SERVER}, domain={**MIXED, "teacher_mixture": "probability"}) == []
    first, second = found({"a": SERVER, "b": SERVER}, "jsd", domain=MIXED)
    assert first.startswith("train.objective: jsd") and "'a', 'b'" in second


def test_candidates_need_scores_that_can_be_renormalised():
    [error] = found({"a": SERVER}, top_k=4)
    assert error.startswith("train.top_p: ") and "train.top_p=1 and train.top_k=0" in error


class Unaware:
    needs = "sampled"

    def __call__(self, *, student_logits, teacher_logits, teacher_logprob, label, behaviour_logprob, outcome_advantage):
        return ObjectiveResult(student_logits.sum(-1), {})


def test_an_objective_of_ones_own_that_knows_no_candidates():
    name = "tests.mopd.test_fits:Unaware"
    [error] = found({"a": HERE}, name, top_p=0.5)
    assert error.startswith(f"train.objective: {name} takes no `candidates`")
    assert found({"a": HERE}, name) == []


def test_sampled_tokens_mean_something_at_their_own_temperature_and_policy_alone():
    for objective in ("mopd", "sampled_kl"):
        [error] = found({"a": HERE}, objective, {"temperature": 2.0})
        assert error.startswith("train.objective_options.temperature: ") and "train.temperature=1" in error
        [error] = found({"a": HERE}, objective, demonstration_fraction=0.2)
        assert error.startswith("train.demonstration_fraction: 0.2 ") and "forward_kl" in error
    assert found({"a": HERE}, "mopd", {"temperature": 0.5}, temperature=0.5) == []
    assert found({"a": HERE}, "forward_kl", {"temperature": 2.0}, demonstration_fraction=0.2) == []


def test_one_renormalised_id_trains_nothing():
    options = {"support": "top_k", "k": 1, "tail": "renormalise"}
    assert found({"a": HERE}, "reverse_kl", options)[0].startswith("train.objective_options.k: ")
    assert found({"a": HERE}, "jsd", options) == [] == found({"a": HERE}, "reverse_kl", {**options, "tail": "bucket"})


def test_flex_attention_is_for_gpus_and_whole_graphs(monkeypatch):
    config = Config(teachers={"a": TeacherConfig("folder")}, domains={"game": DomainConfig(environment="e", teacher="a")})
    config.student.attention, config.train.prefix_gradient = "flex_attention", "none"
    errors = misfits(config, make_objective("forward_kl"), {"a": HERE})
    assert any("takes no prefix that was computed before" in e for e in errors)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert any("no backward pass on a CPU" in e for e in misfits(config, make_objective("forward_kl"), {"a": HERE}))


def test_a_tail_without_top_k_would_do_nothing():
    [error] = found({"a": HERE}, "reverse_kl", {"tail": "drop"})
    assert error.startswith("train.objective_options.tail: drop has no meaning on full support") and "support: top_k" in error
    assert found({"a": HERE}, "reverse_kl", {"tail": "drop", "support": "top_k", "k": 4}) == []
