"""An SFT teacher from a real store: action tokens train, the router stays, the folder says what it was made from."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from mopd.config import Config, ConfigError, DomainConfig, OptimizerConfig, SFTConfig, StudentConfig, TeacherConfig
from mopd.learner.model import ModelNotFound, load_model
from mopd.learner.moe import router_hash, weights_hash
from mopd.learner.supervised import mean_cross_entropy
from mopd.report import build_results
from mopd.sampling.rendering import ChatRenderer
from prefix_store import PrefixStore
from prefix_store.disk import StoreError
from prefix_store.trajectory import Context, Outcome, Segment, Sequence, Source
from teachers.collect import collect_domain
from teachers.demonstrations import NoDemonstrations, read_demonstrations
from teachers.sft import run_sft

PLAYS = [("you see a door", "open the door"), ("you see a key", "take the red key"), ("look", "go north")]


def sequence(renderer, domain, number, kind="expert"):
    """A one-turn episode written in tokens as the renderer does it."""
    observation, action = PLAYS[number % len(PLAYS)]
    prompt = renderer.start([{"role": "system", "content": f"task {number}"}, {"role": "user", "content": observation}])
    written = renderer.action_tokens(action)
    tokens = np.concatenate([prompt, written]).astype(np.uint32)
    n = len(tokens)
    logprob = np.full(n, np.nan, np.float32)
    if kind == "teacher":
        logprob[len(prompt) :] = -0.5
    context = Context(
        tokens,
        logprob,
        np.full(n, -1, np.int32),
        (Segment("prompt", 0, len(prompt), -1), Segment("action", len(prompt), n, 0, kind)),
    )
    return Sequence(
        domain,
        f"task {number}",
        "env",
        "1",
        number,
        "train",
        (context,),
        (action,),
        Outcome(1.0, 1.0, True),
        Source(kind, kind, "1"),
        renderer.fingerprint(),
    )


@pytest.fixture
def config(tmp_path, make_folder, tokenizer):
    renderer = ChatRenderer(tokenizer)
    with PrefixStore.open(tmp_path / "store", "w") as store:
        for number in range(12):
            store.append(sequence(renderer, "game", number))
            store.append(sequence(renderer, "science", number + 50))
            store.append(sequence(renderer, "game", number + 100, kind="teacher"))
        store.commit("demonstrations")
    sft = SFTConfig(
        steps=8,
        rows_per_step=6,
        micro_batch_tokens=300,
        checkpoint_every=3,
        optimizer=OptimizerConfig(learning_rate=1e-2),
    )
    return Config(
        run=str(tmp_path),
        store=str(tmp_path / "store"),
        seed=3,
        domains={"game": DomainConfig(), "science": DomainConfig()},
        student=StudentConfig(model=str(make_folder(0))),
        sft=sft,
        off_policy=sft,
    )


def test_a_teacher_learns_its_demonstrations(config, tmp_path, capsys, tokenizer):
    rows = read_demonstrations(config, config.sft, ["game"], ChatRenderer(tokenizer)).rows
    assert len(rows) == 12, "only demonstrations count, not what a teacher played"
    out = tmp_path / "teacher"
    result = run_sft(config, ["game"], out)
    base, teacher = load_model(config.student.model), load_model(out)
    before, after = (mean_cross_entropy(m, rows, pad_id=0)["game"] for m in (base, teacher))
    assert after < 0.7 * before and len(result.losses) == 8
    assert router_hash(base) == router_hash(teacher) and weights_hash(base) != weights_hash(teacher)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["router_hash_before"] == manifest["router_hash_after"] == router_hash(base)
    assert manifest["domains"] == ["game"] and manifest["rows"] == 12 and manifest["store_version"]
    assert (out / "tokenizer.json").is_file()
    assert str(tmp_path) not in (out / "manifest.json").read_text(), "machine paths do not belong into a model folder"
    assert not (tmp_path / "teacher.checkpoints").exists()
    assert "result: teacher of game: 12 demonstrations, 8 steps" in capsys.readouterr().out
    first = {n: p.detach().clone() for n, p in teacher.named_parameters()}
    run_sft(config, ["game"], out)
    assert all((first[n] == p).all() for n, p in load_model(out).named_parameters()), "the same run, other weights"


def test_the_baseline_mixes_domains(config, tmp_path):
    result = run_sft(config, ["game", "science"], tmp_path / "baseline", baseline=True)
    assert json.loads((tmp_path / "baseline" / "manifest.json").read_text())["domains"] == ["game", "science"]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(8)) and [line["loss"] for line in lines] == result.losses
    for line in lines:
        assert line["tokens"] == {"sampled": 0, "trained": line["tokens"]["trained"], "computed": line["tokens"]["computed"]}
        assert 0 < line["tokens"]["trained"] < line["tokens"]["computed"] and line["environment_steps"] == 0
        assert line["seconds"]["training"] > 0 and line["seconds"]["sampling"] == 0 == line["seconds"]["scoring"]
        assert line["gradient_norm"] > 0 and line["learning_rate"] > 0
    cost = build_results(tmp_path, students=tmp_path / "none")["cost"]
    assert cost == {}
    folder = tmp_path / "students" / "off_policy_sft" / "seed-3"
    run_sft(config, ["game", "science"], folder / "model", baseline=True)
    cost = build_results(tmp_path)["cost"]["off_policy_sft"]
    assert cost["optimizer_steps"] == 8 and cost["sampled_tokens"] == 0 and cost["seconds"]["training"] > 0


def test_an_interrupted_teacher_goes_on_but_never_from_another_config(config, tmp_path, monkeypatch):
    import teachers.sft as module
    from mopd.progress import Progress

    class Stopping(Progress):
        def update(self, done, text=""):
            super().update(done, text)
            if done == 5:
                raise KeyboardInterrupt

    out, whole = tmp_path / "teacher", tmp_path / "whole"
    straight = run_sft(config, ["game"], whole)
    monkeypatch.setattr(module, "Progress", Stopping)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, ["game"], out)
    assert not out.exists() and list((tmp_path / "teacher.checkpoints").glob("*/step-3"))
    monkeypatch.undo()
    resumed = run_sft(config, ["game"], out)
    assert resumed.first_step == 3 and resumed.losses == straight.losses[3:]
    monkeypatch.setattr(module, "Progress", Stopping)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, ["game"], out)
    monkeypatch.undo()
    config.sft.rows_per_step = 5
    assert run_sft(config, ["game"], out).first_step == 0


def test_bad_input_is_named(config, tmp_path):
    with pytest.raises(ConfigError, match="unknown domain math"):
        run_sft(config, ["math"], tmp_path / "x")
    with pytest.raises(ConfigError, match="no prefix store at .*nowhere"):
        run_sft(dataclasses.replace(config, store=str(tmp_path / "nowhere")), ["game"], tmp_path / "x")
    with pytest.raises(ModelNotFound, match="gone"):
        run_sft(
            dataclasses.replace(config, student=StudentConfig(model=str(tmp_path / "gone"))), ["game"], tmp_path / "x"
        )
    config.domains["embodied"] = DomainConfig()
    with pytest.raises(NoDemonstrations, match="domain 'embodied'"):
        run_sft(config, ["embodied"], tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("command", ["sft", "collect"])
def test_a_store_may_be_a_url(config, tmp_path, monkeypatch, command):
    pytest.importorskip("obstore")
    for name, value in (("AWS_ENDPOINT_URL", "http://127.0.0.1:9"), ("AWS_REGION", "us-east-1"),
                        ("AWS_ACCESS_KEY_ID", "nobody-at-all"), ("AWS_SECRET_ACCESS_KEY", "nothing-at-all")):
        monkeypatch.setenv(name, value)
    there = dataclasses.replace(config, store="s3://bucket/store", domains={"game": DomainConfig(teacher="one")},
                                teachers={"one": TeacherConfig(model=config.student.model)})
    with pytest.raises(StoreError, match="s3://bucket/store.* does not answer"):
        if command == "sft":
            run_sft(there, ["game"], tmp_path / "x")
        else:
            collect_domain(there, "game")
