"""`mopd teacher sft` with evaluation by play and early stop, killed in mid-training and started again; and `mopd collect`."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from mopd.sampling.rendering import ChatRenderer
from teachers.demonstrations import read_demonstrations
from tests.tiny_run import mopd, same_weights, start_mopd

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]


def test_killed_and_resumed_as_if_nothing_had_been(tiny_run, tmp_path):
    """The teacher plays the development split every other step; SIGKILL after two evaluations changes nothing."""
    settings = ["sft.steps=10", "sft.rows_per_step=4", "sft.checkpoint_every=3", "sft.evaluate_every=2", "sft.patience=3",
                "sft.evaluation_episodes=4", "sft.held_out_fraction=0.2", "sft.optimizer.learning_rate=3e-3",
                f"run={tmp_path}"]
    command = ["teacher", "sft", tiny_run.path, "embodied", *settings]
    whole = mopd(*command, "--out", tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    cut = start_mopd(*command, "--out", tmp_path / "cut", log=tmp_path / "cut.log")
    deadline = time.monotonic() + 900
    while not list((tmp_path / "cut.checkpoints").glob("*/step-4/state.json")):
        assert cut.poll() is None and time.monotonic() < deadline, (tmp_path / "cut.log").read_text()
        time.sleep(0.01)
    os.kill(cut.pid, signal.SIGKILL)
    cut.wait()
    again = mopd(*command, "--out", tmp_path / "cut")
    assert again.returncode == 0 and not (tmp_path / "cut.checkpoints").exists(), again.stderr

    manifests = [json.loads((tmp_path / name / "manifest.json").read_text()) for name in ("whole", "cut")]
    records = [[{k: v for k, v in json.loads(line).items() if k != "seconds"}
                for line in (tmp_path / f"{name}.metrics.jsonl").read_text().splitlines()] for name in ("whole", "cut")]
    assert records[0] == records[1], "losses and evaluations, bit for bit"
    assert same_weights(tmp_path / "whole", tmp_path / "cut")
    for key in ("best_step", "best", "evaluations", "stopped_early", "steps", "router_hash_after", "demonstrations"):
        assert manifests[0][key] == manifests[1][key], key
    first = manifests[0]
    played = first["best"]["domains"]["embodied"]
    assert first["best"]["by"] == "play" and played["n"] == 4 and 0 <= played["success"] <= 1 and played["held_out_loss"] > 0
    assert first["best_step"] in [e["step"] for e in first["evaluations"]] and first["router_hash_before"] == \
        first["router_hash_after"]
    ranks = [(e["success"], e["score"]) for e in first["evaluations"]]
    assert (first["best"]["success"], first["best"]["score"]) == max(ranks)
    behind = len(ranks) - 1 - ranks.index(max(ranks))
    assert first["stopped_early"] == (behind >= 3) and (first["stopped_early"] or first["steps"] == 10)
    assert "solves" in whole.stdout and "which is written" in whole.stdout and "demonstrations" in whole.stdout


def test_experts_teach_without_a_store(tiny_run, tmp_path):
    config = tiny_run.config(f"store={tmp_path / 'none'}", "sft.experts=true", "domains.embodied.max_turns=40")
    found = read_demonstrations(config, config.sft, ["embodied"], ChatRenderer(tiny_run.tokenizer()))
    part = found.domains["embodied"]
    assert 6 <= part.sequences <= 12 and part.splits == {"train": part.sequences} and found.store_version is None
    assert part.sequences + sum(part.left_out.values()) == 12, "an episode was lost without a word"


def test_a_launch_says_how_far_the_teachers_are(tiny_run, tmp_path, capsys):
    from mopd.run import train

    config = tiny_run.config(f"run={tmp_path}", "train.steps=1", "train.samples_per_step=2", "consistency.points=5")
    train(config)
    found = json.loads((tmp_path / "students" / "student_mixed" / "seed-1" / "consistency.json").read_text())
    assert [(d["domain"], d["turns"], d["estimator"]) for d in found] == [("embodied", 5, "exact"), ("game", 5, "exact")]
    said = " ".join(capsys.readouterr().err.split())
    assert said.count("is far from the student's start") == 2 and "of 5 turns of the student's start" in said


def test_collect_and_compare_from_the_command_line(tiny_run, tmp_path):
    import shutil

    from prefix_store import PrefixStore
    from teachers.collect import collect_domain

    places = [[f"run={tmp_path / name}", f"store={tmp_path / name / 'store'}", "seed=5"] for name in ("beside", "in_turn")]
    for name in ("beside", "in_turn"):
        shutil.copytree(tiny_run.folder / "store", tmp_path / name / "store")
    done = mopd("collect", tiny_run.path, *places[0], "collect.processes=2", "--json")
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [r["domain"] for r in records] == ["embodied", "game"] and all(r["kept"] == r["episodes"] > 0 for r in records)
    assert not {"identity", "batches"} & set(records[0])
    for name in ("embodied", "game"):
        collect_domain(tiny_run.config(*places[1]), name)
    stores = [set(PrefixStore.open(tmp_path / name / "store").ids()) for name in ("beside", "in_turn")]
    assert stores[0] == stores[1], "what is played depends on what is played beside it"
    done = mopd("teacher", "compare", tiny_run.path, "consistency.points=3", "--domain", "game", "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)
    assert found["far"] and found["low"] < found["kl"] < found["high"] and found["threshold"] == 0.1
