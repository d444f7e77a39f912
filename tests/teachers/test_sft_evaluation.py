"""SFT teachers: which tokens train, where demonstrations come from, evaluation, early stop, the best step, resume."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from mopd.config import Config, ConfigError, DomainConfig, OptimizerConfig, SFTConfig, StudentConfig, semantic_errors
from mopd.learner.best import Evaluation, Evaluations
from mopd.learner.forward import PackedLM
from mopd.learner.model import load_model
from mopd.learner.packing import pack
from mopd.learner.supervised import STREAM, cross_entropy, mean_cross_entropy, rows_of_sequence
from mopd.sampling.rendering import ChatRenderer
from prefix_store.trajectory import Context, Outcome, Segment, Sequence, Source
from teachers.demonstrations import NoDemonstrations, read_demonstrations
from teachers.sft import run_sft

TALKS = [[{"role": "system", "content": "be brief"}, {"role": "user", "content": f"you see door {n}"},
          {"role": "assistant", "content": "open the door"}, {"role": "user", "content": "it is open"},
          {"role": "assistant", "content": "go north" if n % 2 else "take the red key"}] for n in range(12)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def config(tmp_path, make_folder):
    """A domain without an environment, whose demonstrations stand in a file of chats."""
    path = write(tmp_path / "chats.jsonl", [{"messages": talk} for talk in TALKS])
    return Config(run=str(tmp_path), store=str(tmp_path / "store"), seed=3, domains={"chat": DomainConfig()},
                  student=StudentConfig(model=str(make_folder(0))),
                  sft=SFTConfig(steps=6, rows_per_step=4, micro_batch_tokens=300, checkpoint_every=3, files=[path],
                                optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0)))


def renderer_of(config):
    from mopd.sampling.rendering import load_tokenizer

    return ChatRenderer(load_tokenizer(config.student.model))


def test_only_action_tokens_train(make_folder):
    """In float64: the gradient is that of the action tokens' log-probabilities alone, whatever else stands in the row."""
    model = load_model(make_folder(0), experts="eager").double()
    tokens = np.arange(5, 25, dtype=np.uint32)
    segments = (Segment("prompt", 0, 6, -1), Segment("action", 6, 9, 0, "expert"), Segment("observation", 9, 15, 0),
                Segment("action", 15, 18, 1, "expert"), Segment("observation", 18, 20, 1))
    nothing = np.full(20, np.nan, np.float32), np.full(20, -1, np.int32)
    made = Sequence("d", "t", "e", "1", 0, "train", (Context(tokens, *nothing, segments),), ("a", "b"), Outcome(1, 1, True),
                    Source("expert", "x", "1"), None)
    (row,) = rows_of_sequence(made)
    (batch,) = pack([row], token_budget=99, pad_id=0, domains=["d"], streams=(STREAM,))
    batch.weight.fill_(1.0)
    assert batch.label.tolist() == [11, 12, 13, 20, 21, 22] and batch.source_index.tolist() == [5, 6, 7, 14, 15, 16]
    PackedLM(model)(batch, cross_entropy)[0].backward()
    ours = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def gradients(trained):
        model.zero_grad()
        logprob = torch.log_softmax(model(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0], -1)
        (-sum(logprob[t - 1, int(tokens[t])] for t in trained)).backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    assert all(torch.allclose(ours[n], g, rtol=1e-9, atol=1e-12) for n, g in gradients([6, 7, 8, 15, 16, 17]).items())
    observed = gradients([6, 7, 8, 9, 15, 16, 17])  # the first token of the observation too
    assert any(not torch.allclose(ours[n], g, atol=1e-3) for n, g in observed.items())


def test_files_become_rows_and_what_is_left_out_is_counted(config, tmp_path):
    more = write(tmp_path / "more.jsonl", [
        {"messages": TALKS[0]}, {"messages": [{"role": "user", "content": "hello"}]},
        {"messages": TALKS[1], "domain": "web"}, {"messages": TALKS[2][:3]}])
    config.sft.files.append(more)
    found = read_demonstrations(config, config.sft, ["chat"], renderer_of(config))
    part = found.domains["chat"]
    assert part.sequences == len(found.rows) == 14 and not part.left_out
    assert sum(found.left_out.values()) == 2 and any("no assistant turn" in reason for reason in found.left_out)
    assert "14 demonstrations, 14 rows with" in found.describe()[0] and len(found.describe()) == 3
    again = read_demonstrations(config, dataclasses.replace(config.sft, files=config.sft.files[::-1]), ["chat"],
                                renderer_of(config))
    assert [r.origin for r in again.rows] == [r.origin for r in found.rows], "the order of files has a say"
    config.sft.files = config.sft.files[:1] * 2
    twice = read_demonstrations(config, config.sft, ["chat"], renderer_of(config)).domains["chat"]
    assert twice.sequences == 12 and twice.left_out == {"there twice": 12}


def test_nothing_to_learn_is_said_before_anything_is_loaded(config, tmp_path, monkeypatch):
    monkeypatch.setattr("teachers.sft.load_model", lambda *_, **__: pytest.fail("a model was loaded"))
    empty = write(tmp_path / "empty.jsonl", [{"messages": [{"role": "user", "content": "hello"}]}])
    with pytest.raises(NoDemonstrations, match="domain 'chat' from in .*empty.jsonl; 1 left out: no assistant turn"):
        run_sft(dataclasses.replace(config, sft=dataclasses.replace(config.sft, files=[empty])), ["chat"], tmp_path / "t")
    config.domains["chat"].max_context_tokens = 10
    with pytest.raises(NoDemonstrations, match="12 left out: no action within domains.chat.max_context_tokens=10"):
        run_sft(config, ["chat"], tmp_path / "t")
    with pytest.raises(ConfigError, match="sft.files: .*gone: no such file"):
        run_sft(dataclasses.replace(config, sft=dataclasses.replace(config.sft, files=["gone"])), ["chat"], tmp_path / "t")
    with pytest.raises(ConfigError, match="domain 'chat' has no environment, so no expert can play"):
        run_sft(dataclasses.replace(config, sft=dataclasses.replace(config.sft, experts=True)), ["chat"], tmp_path / "t")
    config.domains["chat"].max_context_tokens, config.sft.evaluate_every = 1024, 2
    with pytest.raises(ConfigError, match="domain chat has no environment to play in and no held-out"):
        run_sft(config, ["chat"], tmp_path / "t")
    for key, value, said in (("patience", 2, "sft.evaluate_every"), ("held_out_fraction", 0.1, "sft.evaluate_every"),
                             ("evaluation_split", "dev", "is not one of"), ("sources", ["human"], "is not one of")):
        wrong = dataclasses.replace(config, sft=dataclasses.replace(config.sft, evaluate_every=0, **{key: value}))
        assert any(error.startswith(f"sft.{key}: ") and said in error for error in semantic_errors(wrong, plays=False))
    assert not semantic_errors(dataclasses.replace(config), plays=False)
    assert any("environment: missing" in error for error in semantic_errors(config))


def test_without_an_environment_the_held_out_loss_decides(config, tmp_path, capsys):
    """Training far too fast gets worse after its best step: that one is written, and the training ends early."""
    config.sft = dataclasses.replace(config.sft, steps=30, evaluate_every=2, held_out_fraction=0.25, patience=3,
                                     optimizer=OptimizerConfig(learning_rate=0.3, warmup_steps=0, schedule="constant"))
    result = run_sft(config, ["chat"], tmp_path / "t")
    losses = [one.record["held_out_loss"] for _, one in result.evaluations]
    steps = [step for step, _ in result.evaluations]
    best = min(range(len(losses)), key=losses.__getitem__)
    assert result.stopped_early and result.steps == steps[-1] == steps[best] + 6 < 30 and result.best[0] == steps[best]
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["best_step"] == steps[best] and manifest["best"]["held_out_loss"] == losses[best]
    assert manifest["stopped_early"] and manifest["demonstrations"]["chat"]["held_out_rows"] == 3
    held = read_demonstrations(config, config.sft, ["chat"], renderer_of(config)).held_out
    assert mean_cross_entropy(load_model(tmp_path / "t"), held, pad_id=0)["chat"] == pytest.approx(losses[best], abs=1e-6)
    lines = [json.loads(line) for line in (tmp_path / "t.metrics.jsonl").read_text().splitlines()]
    assert [line["step"] + 1 for line in lines if "evaluation" in line] == steps
    said = capsys.readouterr().out
    assert f"that after step {steps[best]} (held-out loss" in said and "stopped early" in said
    assert "9 rows with" in said and "3 rows held out" in said


def test_an_interrupted_training_ends_as_the_whole_one(config, tmp_path, monkeypatch):
    import teachers.sft as module
    from mopd.progress import Progress

    class Stopping(Progress):
        def update(self, done, text=""):
            super().update(done, text)
            if done == 7:
                raise KeyboardInterrupt

    config.sft = dataclasses.replace(config.sft, steps=10, evaluate_every=2, held_out_fraction=0.25,
                                     optimizer=OptimizerConfig(learning_rate=0.1, warmup_steps=0))
    whole = run_sft(config, ["chat"], tmp_path / "whole")
    monkeypatch.setattr(module, "Progress", Stopping)
    with pytest.raises(KeyboardInterrupt):
        run_sft(config, ["chat"], tmp_path / "cut")
    monkeypatch.undo()
    assert list((tmp_path / "cut.checkpoints").glob("*/step-6"))
    assert list((tmp_path / "cut.checkpoints").glob("*/best/*.safetensors"))
    resumed = run_sft(config, ["chat"], tmp_path / "cut")
    assert resumed.first_step == 6 and resumed.losses == whole.losses[6:]
    assert resumed.evaluations == whole.evaluations and resumed.best == whole.best
    one, other = (dict(load_model(tmp_path / n).named_parameters()) for n in ("whole", "cut"))
    assert all(bool((one[n] == other[n]).all()) for n in one)
    records = [[{k: v for k, v in json.loads(line).items() if k != "seconds"}
                for line in (tmp_path / f"{n}.metrics.jsonl").read_text().splitlines()] for n in ("whole", "cut")]
    assert records[0] == records[1] and not (tmp_path / "cut.checkpoints").exists()


@pytest.mark.parametrize("folder", [True, False])
def test_the_best_evaluation_is_kept(tmp_path, folder):
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    kept = Evaluations(model, tmp_path / "best" if folder else None, patience=2)
    assert kept.best is None and not kept.over
    seen = {}
    for step, rank in enumerate([(0.1, 0.0), (0.5, 0.1), (0.5, 0.3), (0.5, 0.3), (0.2, 0.9)], 1):
        model.weight.data.fill_(step)
        kept.add(step, Evaluation(rank, {"step": step}))
        seen[step] = kept.over
        kept.tidy()
    assert kept.best[0] == 3 and seen == {1: False, 2: False, 3: False, 4: False, 5: True}
    if folder:
        assert [p.name for p in (tmp_path / "best").iterdir()] == ["step-3.safetensors"]
    state, other = json.loads(json.dumps(kept.state())), torch.nn.Linear(2, 2)
    if folder:
        kept = Evaluations(other, tmp_path / "best", patience=2)
        kept.load(state)
    kept.restore(other)
    assert kept.over and bool((other.weight == 3).all())


def test_a_dense_model_of_another_family_learns_too(config, tmp_path, tokenizer):
    import transformers

    from mopd.learner.model import save_model

    shape = transformers.LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                                     num_key_value_heads=2, intermediate_size=48, max_position_embeddings=256,
                                     pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
                                     eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    config.student.model = str(save_model(transformers.LlamaForCausalLM(shape), tmp_path / "llama", tokenizer=tokenizer))
    result = run_sft(config, ["chat"], tmp_path / "t")
    assert result.losses[-1] < result.losses[0] and type(load_model(tmp_path / "t")).__name__ == "LlamaForCausalLM"
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert "best_step" not in manifest and manifest["steps"] == 6
