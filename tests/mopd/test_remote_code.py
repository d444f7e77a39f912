"""Python code that comes with a model's tokenizer runs only where the configuration says so."""

from __future__ import annotations

import json

import pytest

from mopd.config import Config, StudentConfig, TeacherConfig
from mopd.evaluate import _trusted
from mopd.importing import open_renderer
from mopd.sampling.rendering import load_tokenizer

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({marker!r}).write_text("it ran")
class PlantedTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def planted(tiny_run, tmp_path, monkeypatch):
    """(a tokenizer's folder with code of its own, the file that this code writes when it runs)"""
    import transformers.dynamic_module_utils as dynamic

    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = tmp_path / "model", tmp_path / "ran"
    tiny_run.tokenizer().save_pretrained(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "PlantedTokenizer", "auto_map": {"AutoTokenizer": [None, "planted.PlantedTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "planted.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def test_code_of_a_tokenizer_runs_only_when_it_is_trusted(planted, tiny_run):
    folder, marker = planted
    for refused in (load_tokenizer, open_renderer):
        with pytest.raises(ValueError, match="trust_remote_code"):
            refused(folder)
    assert not marker.exists()
    tokenizer = load_tokenizer(folder, trust_remote_code=True)
    assert marker.exists() and tokenizer.get_vocab() == tiny_run.tokenizer().get_vocab()
    assert open_renderer(folder, trust_remote_code=True).tokenizer.get_vocab() == tokenizer.get_vocab()


def test_the_config_says_what_is_trusted_when_models_play():
    config = Config(teachers={"one": TeacherConfig(model="a", trust_remote_code=True), "two": TeacherConfig(model="b")})
    assert [_trusted(config, folder) for folder in "abc"] == [True, False, False]
    config.student = StudentConfig(trust_remote_code=True)
    assert all(_trusted(config, folder) for folder in "abc")
