"""The simulator: near a clairvoyant scheduler on 25 unequal sources, repeatable, and sizes that really feed a trainer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mopd.cli import app
from mopd.config import ConfigError, load_as
from mopd.simulate import NothingToSimulate, Scenario, SimulateConfig, config_errors, run_simulate, scenario
from mopd.simulator import Cluster, Simulator, bound_step_seconds
from mopd.simulator_plot import occupancy, plot, sparkline
from mopd.simulator_sizing import bounds, little, size_cluster
from mopd.simulator_traces import SourceModel, TraceError, Work, read_trace, write_trace

CONFIGS = Path(__file__).parents[2] / "configs"


def read(path: Path, *overrides: str) -> Scenario:
    return scenario(load_as(SimulateConfig, path, overrides, config_errors))


@pytest.fixture(scope="module")
def unequal() -> dict:
    """The 25-source scenario at moderate size under three schedulers."""
    made = read(CONFIGS / "simulate.yaml", "groups_per_step=48", "cluster.slots=12")
    found = {name: Simulator(made.scheduler(name, 70), made.cluster, made.work, 70).run()
             for name in ("corrected", "deficit", "clairvoyant")}
    return {"made": made, **found}


def test_the_sources_are_as_unequal_as_they_should_be(unequal):
    models = list(unequal["made"].work.models.values())
    seconds, tokens = [m.seconds for m in models], [m.tokens for m in models]
    assert len(models) == 25
    assert max(seconds) / min(seconds) == pytest.approx(66) and max(tokens) / min(tokens) == pytest.approx(90)


def test_corrected_scheduling_is_within_five_percent_of_a_clairvoyant_one(unequal):
    corrected, best = unequal["corrected"], unequal["clairvoyant"]
    assert best.occupancy > 0.99
    assert corrected.occupancy >= 0.95 * best.occupancy
    assert corrected.useful_share == 1.0, "busy with work that is used"
    bound = bound_step_seconds(unequal["made"].work, unequal["made"].target, corrected.slots)
    assert corrected.step_seconds < 1.1 * bound
    assert unequal["deficit"].occupancy < 0.9 * best.occupancy, "or this would show nothing"


def test_batches_of_every_scheduler_have_the_exact_mix(unequal):
    target = np.array(list(unequal["made"].target.values()))
    for name in ("corrected", "deficit", "clairvoyant"):
        collected = np.array(unequal[name].collected)
        assert (collected.sum(axis=1) == 48).all()
        assert (np.abs(collected.cumsum(axis=0) - target * np.arange(1, 71)[:, None]) < 2).all()


def test_a_simulation_repeats_itself_and_slots_are_never_more_than_there_are(unequal):
    made = unequal["made"]
    runs = [Simulator(made.scheduler("corrected", 8), made.cluster, made.work, 8).run() for _ in range(2)]
    assert runs[0].numbers() == runs[1].numbers() and runs[0].ready_at == unequal["corrected"].ready_at[:8]
    assert max(runs[0].busy) <= made.cluster.all_slots and min(runs[0].busy) >= 0


def test_occupancy_by_hand(tmp_path):
    """One source of 4 s on 4 slots, 2 groups a step, nothing random: Little's law can be read off."""
    models = {"d/rollout": SourceModel("d/rollout", "d", 4.0, 100.0, spread=0.0)}
    work, cluster = Work(models, 0), Cluster(engines=2, slots=2, kv_tokens=1000.0)
    assert bound_step_seconds(work, {"d/rollout": 2.0}, 4) == 2.0
    need = little(work, {"d/rollout": 2.0}, cluster, 2.0)
    assert (need.slots, need.kv_tokens) == (4.0, 200.0)
    assert bounds(work, {"d/rollout": 2.0}, cluster) == {"engine slots": 2.0, "KV memory": 0.2, "trainer": 0.0}
    path = tmp_path / "one.yaml"
    path.write_text("groups_per_step: 2\nsources: {d: {seconds: 4, tokens: 100, spread: 0}}\n"
                    "cluster: {engines: 2, slots: 2, kv_tokens: 1000}\n")
    made = read(path)
    found = Simulator(made.scheduler("corrected", 9), made.cluster, made.work, 9).run()
    assert found.occupancy == 1.0 and found.step_seconds == pytest.approx(2.0) and found.first == 4.0
    assert found.kv_peak == pytest.approx(200.0) and found.kv_over_share == 0.0
    assert sparkline(occupancy(found, 4)) == "████" and sparkline(np.array([0, 0.5, 1])) == " ▄█"


def test_teachers_and_trainer_bound_a_run(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("groups_per_step: 4\nsources: {d: {seconds: 2, tokens: 100, spread: 0}}\n"
                    "cluster: {engines: 1, slots: 16, kv_tokens: 1.0e+5}\n")
    scored = read(path, "cluster.teacher_servers=1", "cluster.teacher_tokens_per_second=100")
    found = Simulator(scored.scheduler("corrected", 20), scored.cluster, scored.work, 20).run()
    assert found.step_seconds == pytest.approx(4.0, rel=0.05), "4 groups of 1 s at the teacher"
    trained = read(path, "cluster.trainer_seconds=9")
    found = Simulator(trained.scheduler("corrected", 20), trained.cluster, trained.work, 20).run()
    assert found.step_seconds == pytest.approx(9.0) and found.trainer_idle_share == 0.0
    strict = read(path, "mixer.carry=false", "cluster.slots=9", "sources.d.spread=0.8")
    found = Simulator(strict.scheduler("corrected", 20), strict.cluster, strict.work, 20).run()
    assert found.mean_age == 0.0 and found.steps == 20


def test_a_sized_cluster_feeds_its_trainer_and_less_does_not(tmp_path):
    path = tmp_path / "size.yaml"
    path.write_text("groups_per_step: 24\nsources:\n  slow: {seconds: 60, tokens: 4000, group_size: 2, turns: 6, "
                    "prefix_fraction: 0.5}\n  fast: {seconds: 5, tokens: 500}\ncluster: {slots: 8, kv_tokens: 60000, "
                    "trainer_seconds: 20, teacher_tokens_per_second: 2000}\n")
    made = read(path)
    tries = size_cluster(lambda cluster: made.scheduler("corrected", 25, cluster), made.work, made.target, made.cluster,
                         steps=25, idle_share=0.05)
    last = tries[-1]
    assert last.scarce == "trainer" and last.idle_share <= 0.05
    assert last.cluster.all_slots >= little(made.work, made.target, made.cluster, 20.0).slots
    assert all(t.idle_share > 0.05 for t in tries[:-1])
    half = Cluster(**{**last.cluster.__dict__, "engines": max(1, last.cluster.engines // 2)})
    found = Simulator(made.scheduler("corrected", 25, half), half, made.work, 25).run()
    assert found.settled()[0] > 0.05
    with pytest.raises(ValueError, match="sized to a trainer's pace"):
        size_cluster(lambda cluster: None, made.work, made.target, Cluster(), steps=3)


def test_work_is_a_function_of_the_launch_alone():
    model = SourceModel("d/rollout", "d", 3.0, 700.0, 0.5, 0.4, group_size=3)
    one, other = Work({"d/rollout": model}, 5), Work({"d/rollout": model}, 5)
    other.sequence("d/rollout", 5000, 0)
    assert one.sequence("d/rollout", 17, 2) == other.sequence("d/rollout", 17, 2)
    seconds, tokens, accepted = one.block("d/rollout", 0)
    assert seconds.mean() == pytest.approx(3.0, rel=0.05) and tokens.mean() == pytest.approx(700, rel=0.05)
    assert accepted.mean() == pytest.approx(0.4, abs=0.05)
    assert 0.3 < np.corrcoef(np.log(seconds.ravel()), np.log(tokens.ravel()))[0, 1] < 0.7


def test_traces_are_read_and_written(tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"domain": d, "seconds": s, "tokens": 10 * s, "accepted": ok}) + "\n"
                             for d, s, ok in (("game", 2.0, True), ("game", 4.0, False), ("science", 30.0, True))))
    lengths = read_trace(trace)
    assert lengths["game"].seconds.tolist() == [2.0, 4.0] and lengths["game"].accepted.tolist() == [1.0, 0.0]
    assert write_trace(tmp_path / "again.jsonl", lengths) == 3
    again = read_trace(tmp_path / "again.jsonl")
    for domain, own in lengths.items():
        assert all((getattr(again[domain], f) == getattr(own, f)).all() for f in ("seconds", "tokens", "accepted"))
    path = tmp_path / "config.yaml"
    path.write_text(f"steps: 5\ngroups_per_step: 6\ntrace: {trace}\ncluster: {{engines: 1, slots: 8}}\n")
    made = read(path)
    assert set(made.target) == {"game/rollout", "science/rollout"}
    assert set(np.unique(made.work.block("game/rollout", 0)[0])) == {2.0, 4.0}
    for text, word in (('{"domain": "game", "tokens": 3}', "line 1: no 'seconds'"), ("[1]", "expected an object"),
                       ("{", "not JSON"), ("", "no finished"),
                       ('{"domain": "g", "seconds": -1, "tokens": 3}', "must be positive")):
        trace.write_text(text)
        with pytest.raises(TraceError, match=word):
            read_trace(trace)
    with pytest.raises(TraceError, match="no file"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_runs_metrics_serve_as_a_trace(tmp_path):
    record = {"environment_steps": 40, "seconds": {"environments": 20.0}, "domains": {
        "game": {"turns": 5.0, "infra_failures": {"crash": 2},
                 "streams": {"rollout": {"tokens": 1200, "sequences": 40}}},  # 40 actions: 8 sequences of 150 tokens
        "science": {"turns": None, "infra_failures": {}, "streams": {"sft_prefix": {"tokens": 9, "sequences": 3}}}}}
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps(record) + "\n")
    game = read_trace(file, tokens_per_second=100.0)["game"]
    assert (game.seconds[0], game.tokens[0], game.turns[0]) == (150 / 100 + 5 * 0.5, 150.0, 5.0)
    assert game.accepted[0] == pytest.approx(0.8)
    with pytest.raises(TraceError, match="tokens_per_second"):
        read_trace(file)


def test_a_training_configuration_gives_shares_streams_and_groups(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text(f"steps: 4\ntrain_config: {CONFIGS / 'demo.yaml'}\nsources:\n  game: {{seconds: 2}}\n  embodied: "
                    "{seconds: 1}\ncluster: {engines: 1, slots: 32}\n")
    with pytest.raises(NothingToSimulate, match="domain science"):
        read(path)
    made = read(path, "sources.science.seconds=20")
    assert {s.split("/")[0] for s in made.target} == {"game", "embodied", "science"}
    assert any(s.endswith("sft_prefix") for s in made.target)
    assert sum(made.target.values()) == pytest.approx(made.options.groups_per_step)


def test_every_error_of_a_configuration_is_said_at_once(tmp_path):
    path = tmp_path / "wrong.yaml"
    path.write_text("steps: 1\ncompare: [best]\nsources: {d: {acceptance: 2, seconds: 0}}\ncluster: {slots: 0}\n"
                    "mixer: {alfa: 1}\nsize: {enabled: true}\n")
    with pytest.raises(ConfigError) as error:
        run_simulate(path, [])
    for key in ("steps", "compare", "sources.d.acceptance", "sources.d.seconds", "cluster.slots", "mixer.alfa",
                "cluster.trainer_seconds"):
        assert any(e.startswith(key + ":") for e in error.value.errors), key
    path.write_text("steps: 5\n")
    with pytest.raises(ConfigError, match="nothing to simulate"):
        run_simulate(path, [])
    path.write_text("steps: 5\nsources: {d: {share: 0}}\n")
    with pytest.raises(NothingToSimulate, match="every share is 0"):
        run_simulate(path, [])
    path.write_text("steps: 5\nsources: {d: {seconds: .inf}}\n")
    with pytest.raises(ConfigError, match="sources.d.seconds: must be positive and finite"):
        run_simulate(path, [])


def test_the_command_prints_plots_and_answers_in_json(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("steps: 6\ngroups_per_step: 8\nsources: {a: {seconds: 9}, b: {seconds: 1}}\n"
                    "cluster: {engines: 2, slots: 8, trainer_seconds: 3}\nsize: {enabled: true, steps: 6}\n")
    picture = tmp_path / "plots" / "small.png"
    shown = CliRunner().invoke(app, ["simulate", str(path), "steps=7", "--plot", str(picture)])
    assert shown.exit_code == 0, shown.output
    assert "clairvoyant" in shown.output and "need: " in shown.output and "teacher servers" in shown.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    told = CliRunner().invoke(app, ["simulate", str(path), "--json"])
    answer = json.loads(told.stdout.strip().splitlines()[-1])
    assert set(answer["schedulers"]) == {"corrected", "deficit", "target", "clairvoyant"} and answer["size"]["engines"] >= 1
    with pytest.raises(ValueError, match="must end in"):
        plot({}, tmp_path / "plot.gif")


def test_the_example_configurations_are_valid():
    for path in sorted(CONFIGS.glob("simulate*.yaml")):
        assert read(path).target
