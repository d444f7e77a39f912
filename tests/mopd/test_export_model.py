"""Means of models: right to rounding, refused where they would mean nothing, and never over what is there."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from mopd import export_model
from mopd.export_model import ExportDiffers, ExportError, export_mean, student_folder
from mopd.learner.model import ModelMismatch, load_model, save_model
from mopd.learner.moe import router_hash


@pytest.fixture(scope="module")
def models(tiny_run, tmp_path_factory):
    """The base and two models that were "trained" from it, router untouched."""
    place, tokenizer = tmp_path_factory.mktemp("models"), tiny_run.tokenizer()
    found = [tiny_run.folder / "base"]
    for seed in (1, 2):
        model = load_model(found[0])
        torch.manual_seed(seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "mlp.gate." not in name:
                    parameter += 0.02 * torch.randn_like(parameter)
        found.append(save_model(model, place / f"model-{seed}", tokenizer=tokenizer))
    return found


def weights(folder):
    return {name: parameter.detach().double() for name, parameter in load_model(folder).named_parameters()}


def test_interpolation_and_mean(models, tmp_path):
    _, one, other = models
    result = export_mean([one, other], tmp_path / "between", weights=[0.75, 0.25], shard_size="30KB")
    assert result["largest_difference"] < 1e-5 and len(result["files"]) > 1
    export_mean(models, tmp_path / "mean")
    parts = [weights(folder) for folder in models]
    for name, found in weights(tmp_path / "between").items():
        torch.testing.assert_close(found, 0.75 * parts[1][name] + 0.25 * parts[2][name], rtol=1e-6, atol=1e-7)
    for name, found in weights(tmp_path / "mean").items():
        torch.testing.assert_close(found, sum(part[name] for part in parts) / 3, rtol=1e-6, atol=1e-7)
    assert router_hash(load_model(tmp_path / "mean")) == router_hash(load_model(models[0]))
    manifest = json.loads((tmp_path / "between" / "manifest.json").read_text())
    assert manifest["weights"] == [0.75, 0.25] and manifest["models"] == ["model-1", "model-2"]
    assert (tmp_path / "mean" / "tokenizer.json").is_file() and (tmp_path / "mean" / "generation_config.json").is_file()


def test_what_has_no_mean_is_refused(models, tiny_run, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ModelMismatch, match="another router"):
        export_mean([models[0], tiny_run.folder / "teachers" / "game"], out)
    changed = shutil.copytree(models[1], tmp_path / "changed")
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"num_experts_per_tok": 1}))
    with pytest.raises(ModelMismatch, match=r"config.json differs in num_experts_per_tok \(1 and 2\)"):
        export_mean([models[0], changed], out)
    words = shutil.copytree(models[1], tmp_path / "words")
    tokenizer = json.loads((words / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = sorted(vocabulary, key=vocabulary.get)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (words / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelMismatch, match="another tokenizer"):
        export_mean([models[0], words], out)
    with pytest.raises(ExportError, match="two models or more"):
        export_mean(models[:1], out)
    with pytest.raises(ExportError, match="no Hugging Face folder"):
        export_mean([models[0], tmp_path], out)
    with pytest.raises(ExportError, match="--shard-size many"):
        export_mean(models, out, shard_size="many")
    assert not out.exists()
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(ExportError, match="is there already"):
        export_mean(models, out)
    assert list(out.iterdir()) == [out / "mine"]


def test_a_copy_that_differs_is_not_left_behind(models, tmp_path, monkeypatch):
    saving = save_model

    def wrong(model, folder, **how):
        with torch.no_grad():
            model.model.norm.weight += 1.0
        saving(model, folder, **how)
        with torch.no_grad():
            model.model.norm.weight -= 1.0

    monkeypatch.setattr(export_model, "save_model", wrong)
    with pytest.raises(ExportDiffers, match="nothing is left there"):
        export_mean(models, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_names_its_student(tmp_path):
    with pytest.raises(ExportError, match="no student has been trained here"):
        student_folder(tmp_path)
    for seed in (1, 2):
        folder = tmp_path / "students" / "mine" / f"seed-{seed}"
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if seed == 1:
            assert student_folder(tmp_path) == student_folder(folder) == folder
    with pytest.raises(ExportError, match="has 2 students; name one of .*seed-1, .*seed-2"):
        student_folder(tmp_path)
    with pytest.raises(ExportError, match="no sound checkpoint; there is nothing yet"):
        export_model.source(folder, None)
