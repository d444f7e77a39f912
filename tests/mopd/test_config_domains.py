"""Harnesses and worker processes in a config: every error at once with its key, and what `mopd check` says of them."""

from __future__ import annotations

import pytest

from mopd.check import check_launch
from mopd.config import Config, ConfigError, DomainConfig, load_config
from mopd.config_domains import HarnessConfig, domain_errors, harnesses, played_otherwise, say_harnesses, say_workers
from mopd.domains import open_domain
from mopd.environments.workers import WorkerFamily
from mopd.run_parts import identity

CORRIDOR = "tests.mopd.sampling.corridor:CorridorFamily"


def test_every_error_has_its_key():
    wrong = DomainConfig(
        action_format="line", history_window=-1, worker_processes=1, step_timeout_s=0, worker_memory_mib=-5,
        harnesses={"a b": HarnessConfig(share=0), "c": HarnessConfig(action_format="regex:(", max_turns=0)})
    found = domain_errors({"game": wrong, "walk": DomainConfig(worker_processes=-1, harnesses={"x": HarnessConfig()})})
    keys = [error.split(": ")[0] for error in found]
    assert keys == [
        "domains.game.history_window", "domains.game.action_format", "domains.game.harnesses.a b",
        "domains.game.harnesses.a b.share", "domains.game.harnesses.c.max_turns", "domains.game.harnesses.c.action_format",
        "domains.game.step_timeout_s", "domains.game.worker_memory_mib", "domains.walk.worker_processes"]


def test_a_file_names_them_all_at_once(tiny_run):
    with pytest.raises(ConfigError) as caught:
        tiny_run.config("domains.game.action_format='tag:'", "domains.embodied.harnesses={one: {share: -1}}",
                        "domains.embodied.worker_processes=2", "domains.embodied.reset_timeout_s=0")
    said = str(caught.value)
    for key in ("domains.game.action_format", "domains.embodied.harnesses.one.share", "domains.embodied.reset_timeout_s"):
        assert key in said
    with pytest.raises(ConfigError, match="domains.game.harnesses.one.shar: unknown key; did you mean share"):
        tiny_run.config("domains.game.harnesses={one: {shar: 1}}")


def test_a_harness_takes_from_its_domain_what_it_leaves_out():
    domain = DomainConfig(max_turns=5, history_window=3, thinking=True, harnesses={
        "a": HarnessConfig(share=2), "b": HarnessConfig(history_window=0, system_prompt="", thinking=False)})
    made = harnesses(domain, "Act.")
    assert made.main == "a" and made["a"].system_prompt == "Act." and made["a"].history_window == 3
    assert (made["b"].system_prompt, made["b"].history_window, made["b"].thinking, made["b"].max_turns) == ("", 0, False, 5)
    assert say_harnesses(harnesses(DomainConfig(), "Act.")) == [] == list(played_otherwise(DomainConfig()))
    assert say_harnesses(harnesses(DomainConfig(action_format="last_line"), "")) == ["harness: action_format 'last_line'"]
    assert set(played_otherwise(domain)) == {"history_window", "thinking", "harnesses"}
    assert say_workers(DomainConfig()) == ""
    assert say_workers(DomainConfig(worker_processes=2, recycle_after=9)) == (
        "environments in 2 worker processes, at most 120 s for a step and 300 s for a reset, a new process after 9 episodes")


def test_wrong_options_are_the_same_error_in_a_worker(tiny_run):
    said = []
    for processes in (0, 1):
        config = Config(domains={"walk": DomainConfig(environment=CORRIDOR, options={"lengths": 3},
                                                      worker_processes=processes)})
        with pytest.raises(ConfigError) as caught:
            open_domain(config, "walk")
        said.append(str(caught.value))
    assert said[0] == said[1] and "has no option 'lengths'; its options are: failures, delays" in said[0]


def test_check_names_processes_and_harnesses_and_refuses_what_a_template_cannot(tiny_run):
    result = check_launch(tiny_run.config(
        "domains.embodied.worker_processes=1", "domains.game.harnesses={a: {share: 3}, b: {history_window: 2}}"))
    assert result["errors"] == []
    assert result["domains"]["embodied"]["workers"].startswith("environments in 1 worker processes, at most 120 s")
    assert result["domains"]["game"]["harnesses"] == ["harness a: 75% of the tasks, 4 turns of 6 tokens",
                                                      "harness b: 25% of the tasks, 4 turns of 6 tokens, history_window 2"]
    refused = check_launch(tiny_run.config("domains.game.harnesses={a: {thinking: false}, b: {thinking: true}}"))
    assert len(refused["errors"]) == 1 and refused["errors"][0].startswith(
        "domains.game.harnesses.a.thinking: false does nothing, because the student's chat template does not read")


def test_processes_do_not_belong_to_a_runs_identity_and_harnesses_do(tiny_run):
    class Launched:
        manifest: dict = {}

    plain = identity(tiny_run.config(), Launched)
    assert identity(tiny_run.config("domains.game.worker_processes=3", "domains.game.step_timeout_s=7"), Launched) == plain
    assert identity(tiny_run.config("domains.game.history_window=3"), Launched) != plain


def test_a_domain_in_workers_plays(tmp_path):
    path = tmp_path / "walk.yaml"
    path.write_text(f"domains: {{walk: {{environment: '{CORRIDOR}', worker_processes: 2, teacher: t}}}}\n"
                    f"teachers: {{t: {{model: {tmp_path}}}}}\nstudent: {{model: {tmp_path}}}\n")
    domain = open_domain(load_config(path), "walk")
    try:
        assert isinstance(domain.family, WorkerFamily) and domain.counts()["workers"]["started"] >= 1
        environment, view = domain.pool.acquire(domain.tasks("train")[2])
        assert view.text == "place 0 of 3" and environment.step("forward").score > 0
        domain.pool.release(environment)
    finally:
        domain.close()
    assert domain.family.pids() == []
