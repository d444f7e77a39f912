"""Model folders: saved whole, loaded from safetensors, averaged; what is not there is said."""

from __future__ import annotations

import errno
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.model import (
    DamagedModel,
    ModelNotFound,
    TinyMoEConfig,
    check_model_source,
    load_model,
    new_tiny_moe,
    parameter_average,
    save_model,
)
from mopd.learner.weights import named_weights, state_dict
from tests.mopd.learner.tiny import make_model

SMALL = TinyMoEConfig(hidden_size=32, layers=2, head_dim=8, expert_size=16, experts=4)


def small(seed=0):
    return new_tiny_moe(SMALL, vocabulary=50, seed=seed, pad_id=0, bos_id=None, eos_id=1)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(2, 30)[None]).logits


def test_the_demo_model_has_the_stated_size():
    model = new_tiny_moe(TinyMoEConfig(), vocabulary=768, seed=0, pad_id=0, bos_id=None, eos_id=1)
    assert 2.4e6 < sum(p.numel() for p in model.parameters()) < 3e6
    assert model.config._experts_implementation == "grouped_mm" and model.config._attn_implementation == "sdpa"


def test_seed_alone_decides_the_weights():
    torch.manual_seed(1)
    first, drawn = small(3), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn, "the global random state was touched"
    torch.manual_seed(2)
    second, other = small(3), small(4)
    assert torch.equal(logits(first), logits(second)) and not torch.equal(logits(first), logits(other))


def test_save_and_load(tmp_path):
    model = small()
    folder = save_model(model, tmp_path / "model", manifest={"kind": "test"})
    assert {p.name for p in folder.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "manifest.json",
    }
    assert [p.name for p in tmp_path.iterdir()] == ["model"], "something was left beside the folder"
    assert json.loads((folder / "manifest.json").read_text()) == {"kind": "test"}
    torch.testing.assert_close(logits(load_model(folder)), logits(model), rtol=0, atol=0)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    torch.testing.assert_close(logits(plain), logits(model), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        logits(load_model(folder, experts="eager", attention="eager")), logits(model), rtol=1e-4, atol=1e-5
    )
    save_model(small(9), folder)  # replaces
    assert torch.equal(logits(load_model(folder)), logits(small(9)))


def test_a_full_disk_is_named_and_nothing_half_written_stays(tmp_path):
    """Transformers' tokenizers and safetensors each have an exception of their own for it."""
    for error in (Exception("No space left on device (os error 28)"), OSError(errno.ENOSPC, "No space left on device")):
        class Tokenizer:
            def save_pretrained(self, folder, error=error):
                raise error
        with pytest.raises(OSError, match="No space left") as caught:
            save_model(small(), tmp_path / "model", tokenizer=Tokenizer())
        assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(ModelNotFound, match="no model folder at .*nowhere"):
        load_model(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFound, match="no config.json"):
        load_model(tmp_path / "empty")
    (tmp_path / "empty" / "config.json").write_text("{}")
    (tmp_path / "empty" / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelNotFound, match="no .safetensors"):
        load_model(tmp_path / "empty")
    with pytest.raises(ModelNotFound, match="runs/demo/base"):
        load_model("runs/demo/base/that/is/not/there")
    check_model_source("Qwen/Qwen3-30B-A3B")  # a hub id is not a folder that is missing


def test_damaged_weights_are_found_before_anything_is_loaded(tmp_path):
    folder = save_model(small(), tmp_path / "model")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for broken, words in ((whole[:-100], "bytes where its header says"), (whole[:40], "do not hold the header"),
                          (b"", "do not hold the header"), (whole[:8] + b"#" + whole[9:], "header cannot be read"),
                          (whole + b"more", "bytes where its header says")):
        file.write_bytes(broken)
        with pytest.raises(DamagedModel, match=words):
            check_model_source(folder)
    file.write_bytes(whole)
    check_model_source(folder)


def test_a_shard_that_is_missing_is_named(tmp_path):
    folder = save_model(small(), tmp_path / "model", max_shard_size="20KB")
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 2
    check_model_source(folder)
    shards[1].unlink()
    with pytest.raises(DamagedModel, match=f"lacks 1 of its {len(shards)} weight files, for example {shards[1].name}"):
        load_model(folder)


def test_weights_that_are_not_there_are_not_made_up(tmp_path):
    folder = save_model(small(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedModel, match="lacks the weights of 1 parameters, for example model.norm.weight"):
        load_model(folder)
    expert = next(name for name in tensors if "experts.0" in name)
    save_file({k: v for k, v in tensors.items() if k != expert}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DamagedModel, match="cannot be loaded"):
        load_model(folder)


def test_weights_that_are_no_numbers_are_refused(tmp_path):
    model = small()
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[3] = float("nan")
    with pytest.raises(DamagedModel, match="layers.1.input_layernorm.weight holds numbers that are not finite"):
        load_model(save_model(model, tmp_path / "model"))


def test_parameter_average(tmp_path):
    models = [small(1), small(2)]
    folders = [save_model(m, tmp_path / f"m{i}") for i, m in enumerate(models)]
    result = parameter_average(folders, tmp_path / "out", weights=[1, 3])
    for (_, a), b, c in zip(result.named_parameters(), *(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(a.detach(), b.detach() * 0.25 + c.detach() * 0.75)
    assert torch.equal(logits(load_model(tmp_path / "out")), logits(result))
    torch.testing.assert_close(logits(parameter_average(folders[:1])), logits(models[0]), rtol=0, atol=0)
    other = save_model(make_model("qwen3"), tmp_path / "other")
    with pytest.raises(ValueError, match="other has other parameters"):
        parameter_average([folders[0], other])


@pytest.mark.parametrize("stage", [1, 3])
def test_named_weights_rebuild_the_model(tmp_path, stage):
    model = small()
    expected = logits(model)
    learner = Learner(model, config=LearnerConfig(zero_stage=stage), total_steps=1)
    weights = dict(named_weights(learner))
    other = small(7)
    missing, unexpected = other.load_state_dict({n: w.clone() for n, w in weights.items()}, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}  # tied to the embeddings
    assert torch.equal(logits(other), expected)
    save_model(learner.model, tmp_path / "saved", state_dict=state_dict(learner))
    assert torch.equal(logits(load_model(tmp_path / "saved")), expected)
    saved = dict(named_weights(learner, layout="checkpoint"))
    assert "model.layers.0.mlp.experts.3.down_proj.weight" in saved
    assert saved["model.layers.0.mlp.experts.3.down_proj.weight"].shape == (32, 16)
    with pytest.raises(ValueError, match="layout"):
        named_weights(learner, layout="vllm")
    learner.close()
    assert torch.equal(logits(model), expected), "the model is whole again after close"
    assert all(not hasattr(p, "ds_id") for p in model.parameters())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
