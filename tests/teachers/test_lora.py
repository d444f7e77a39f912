"""Adapters: where they can sit, that they change nothing at first, and that the merged export says what they say."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

from mopd.config import Config, ConfigError, DomainConfig, OptimizerConfig, SFTConfig, StudentConfig
from mopd.config_supervised import LoRAConfig
from mopd.learner.model import load_model
from mopd.learner.moe import router_hash
from teachers import sft
from teachers.lora import (
    MergeMismatch,
    adaptable,
    adapted,
    add_lora,
    check_targets,
    choose_targets,
    merge_lora,
    require_equal,
)
from teachers.sft import run_sft
from tests.mopd.learner.tiny import make_model
from tests.teachers.test_sft_evaluation import TALKS, write

pytest.importorskip("peft")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "mixtral", "deepseek_v3"])
def test_merged_weights_say_what_the_adapters_said(family):
    model = make_model(family)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("grouped_mm")
    ids, names, routers = torch.arange(2, 22)[None], set(dict(model.named_parameters())), router_hash(model)
    before = model(ids).logits.detach()
    tuner = add_lora(model, LoRAConfig(rank=2, alpha=4.0), seed=1)
    assert torch.equal(model(ids).logits, before), "adapters begin with nothing"
    if family != "deepseek_v3":  # there peft takes shared experts for fused ones and leaves some out
        assert adapted(model) == set(adaptable(copy.deepcopy(make_model(family))))
    model(ids).logits.logsumexp(-1).sum().backward()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in n for n in trained)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0.0, 0.1)
    with torch.no_grad():
        adapters = model.eval()(ids).logits
        merged = merge_lora(tuner)(ids).logits
    assert (adapters - before).abs().max() > 0.1 and torch.allclose(adapters, merged, atol=1e-4)
    assert set(dict(model.named_parameters())) == names and router_hash(model) == routers
    require_equal(adapters, merged, torch.float32)
    with pytest.raises(MergeMismatch, match="differ by up to"):
        require_equal(adapters, before, torch.float32)


def test_targets_are_names_that_exist():
    model = make_model("qwen3_moe")
    modules, parameters = choose_targets(model, ["q_proj", "experts.down_proj"])
    assert len(modules) == len(parameters) == 2 and parameters[0] == "model.layers.0.mlp.experts.down_proj"
    with pytest.raises(ConfigError, match="'query' fits nothing in Qwen3MoeForCausalLM; there is experts.down_proj, "
                                          "experts.gate_up_proj, k_proj, o_proj, q_proj, v_proj"):
        choose_targets(model, ["query", "q_proj"])
    for router in ("gate", "mlp.gate", "gate.weight"):
        with pytest.raises(ConfigError, match=f"'{router}' is the router, which stays"):
            choose_targets(model, [router])
    with pytest.raises(ConfigError, match="'lm_head' fits nothing"):
        choose_targets(model, ["lm_head"])
    with pytest.raises(ConfigError, match="sft.lora.dropout: 0.1 cannot be had on the fused expert matrices"):
        add_lora(model, LoRAConfig(rank=2, dropout=0.1), seed=0)
    add_lora(model, LoRAConfig(rank=2, dropout=0.1, targets=["q_proj"]), seed=0)


def test_a_teacher_with_adapters_learns_and_leaves_as_an_ordinary_model(tmp_path, make_folder, monkeypatch):
    config = Config(run=str(tmp_path), seed=3, domains={"chat": DomainConfig()},
                    student=StudentConfig(model=str(make_folder(0))),
                    sft=SFTConfig(steps=8, rows_per_step=4, micro_batch_tokens=300, evaluate_every=4, held_out_fraction=0.2,
                                  files=[write(tmp_path / "chats.jsonl", [{"messages": talk} for talk in TALKS])],
                                  lora=LoRAConfig(rank=4, alpha=8.0),
                                  optimizer=OptimizerConfig(learning_rate=2e-2, warmup_steps=0)))
    result = run_sft(config, ["chat"], tmp_path / "t")
    base, teacher = load_model(config.student.model), load_model(tmp_path / "t")
    one, other = dict(base.named_parameters()), dict(teacher.named_parameters())
    assert one.keys() == other.keys() and result.losses[-1] < 0.95 * result.losses[0]
    changed = {n for n in one if not torch.equal(one[n], other[n])}
    assert {n.split(".")[-1] for n in changed if "experts" in n} == {"gate_up_proj", "down_proj"}
    assert not any("gate.weight" in n or "embed" in n or "norm" in n for n in changed) and len(changed) == 12
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["lora"]["rank"] == 4 and manifest["lora"]["merged_difference"] < 1e-4
    assert manifest["lora"]["on"][:2] == ["experts.down_proj", "experts.gate_up_proj"]
    assert manifest["router_hash_before"] == manifest["router_hash_after"] == router_hash(teacher)
    again = run_sft(config, ["chat"], tmp_path / "u")
    assert again.losses == result.losses
    # Refused by the model's config, before demonstrations or weights are read.
    monkeypatch.setattr(sft, "read_demonstrations", lambda *_: pytest.fail("demonstrations were read"))
    config.sft = dataclasses.replace(config.sft, lora=LoRAConfig(rank=4, targets=["nothing"]))
    with pytest.raises(ConfigError, match="^sft.lora.targets: 'nothing' fits nothing"):
        run_sft(config, ["chat"], tmp_path / "v")
    config.sft_domains["chat"] = config.sft  # a domain's own section is the one that is named
    with pytest.raises(ConfigError, match="^sft_domains.chat.lora.targets: 'nothing' fits nothing"):
        run_sft(config, ["chat"], tmp_path / "w")
    config.sft_domains["chat"] = dataclasses.replace(config.sft, lora=LoRAConfig(rank=4, dropout=0.1))
    with pytest.raises(ConfigError, match="^sft_domains.chat.lora.dropout: 0.1 cannot be had"):
        run_sft(config, ["chat"], tmp_path / "w")


@pytest.mark.parametrize("family", ["qwen3_moe", "llama", "mixtral", "deepseek_v3"])
def test_a_models_config_tells_what_can_be_adapted(family, tmp_path):
    model = make_model(family)
    model.config.save_pretrained(tmp_path)
    there = sorted({name.split(".")[-1] for name, kind in adaptable(model).items() if kind == "linear"})
    check_targets(tmp_path, LoRAConfig(rank=2, targets=there))
    with pytest.raises(ConfigError, match="'gate' is the router" if "moe" in family else "'gate' "):
        check_targets(tmp_path, LoRAConfig(rank=2, targets=["gate"]))
