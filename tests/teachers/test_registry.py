"""Domains meet their teachers and only theirs; foreign tokenizers and missing teachers stop before anything loads."""

from __future__ import annotations

import json
import warnings

import pytest

from mopd.learner.model import ModelNotFound
from mopd.sampling.demo_tokenizer import train_tokenizer
from teachers.registry import (
    TeacherError,
    TeacherRegistry,
    TeacherSpec,
    TokenizerMismatch,
    compare_tokenizers,
    model_revision,
    route,
)


def test_route_says_every_error_at_once_and_never_guesses():
    specs = [TeacherSpec("a", "m/a"), TeacherSpec("b", "")]
    with pytest.raises(TeacherError) as error:
        route(specs, {"game": "a", "science": "", "embodied": "c"})
    for words in (
        "domain 'science' has no teacher",
        "domains.science.teacher",
        "teacher 'c', which is not configured",
        "teacher 'b' has no model",
    ):
        assert words in str(error.value)
    with pytest.warns(UserWarning, match="no domain uses teacher spare"):
        found = route([TeacherSpec("a", "m/a"), TeacherSpec("spare", "m/s")], {"game": "a", "science": "a"})
    assert found.unused == ("spare",) and [t.id for t in found.teachers] == ["a"]
    assert found.teacher("science").id == "a"
    with pytest.raises(TeacherError, match="unknown domain 'math'.*game, science"):
        found.teacher("math")


def test_a_missing_folder_is_named_before_any_weight_is_read(tmp_path, tokenizer, monkeypatch):
    registry = TeacherRegistry([TeacherSpec("a", str(tmp_path / "gone"))], {"game": "a"})
    for call in (registry.check_sources, lambda: registry.handshake(tokenizer), registry.scorers):
        with pytest.raises(ModelNotFound, match="gone"):
            call()


def test_handshake_and_shared_checkpoints(make_folder, tokenizer):
    one, two = make_folder(1), make_folder(2)
    specs = [TeacherSpec("a", str(one)), TeacherSpec("b", str(two)), TeacherSpec("c", str(one / ".." / one.name))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        registry = TeacherRegistry(specs, {"game": "a", "science": "b", "embodied": "c", "web": "a"})
    assert registry.handshake(tokenizer) == len(tokenizer)
    scorers = registry.scorers()
    assert scorers["game"] is scorers["web"] is scorers["embodied"] and scorers["game"] is not scorers["science"]
    assert scorers["game"].vocabulary == len(tokenizer)
    manifest = registry.manifest()
    json.dumps(manifest)
    assert manifest["teachers"]["a"]["domains"] == ["game", "web"]
    assert manifest["teachers"]["a"]["revision"] == manifest["teachers"]["c"]["revision"] == model_revision(one)
    assert manifest["teachers"]["a"]["revision"] != manifest["teachers"]["b"]["revision"]
    assert manifest["teachers"]["a"]["config_hash"] == manifest["teachers"]["b"]["config_hash"] != ""
    registry.check_unchanged()
    next(scorers["science"].model.parameters()).data.add_(1e-3)
    with pytest.raises(RuntimeError, match="weights of teacher 'b' changed"):
        registry.check_unchanged()
    registry.close()


def test_another_tokenizer_is_refused_at_its_first_difference(make_folder, tokenizer):
    other = train_tokenizer(["zebra zebra zebra quick quick"] * 5 + ["plays plays"] * 5, 300)
    folder = make_folder(3, other)
    registry = TeacherRegistry([TeacherSpec("a", str(folder))], {"game": "a"})
    with pytest.raises(TokenizerMismatch) as error:
        registry.handshake(tokenizer)
    ours = {i: t for t, i in tokenizer.get_vocab().items()}
    theirs = {i: t for t, i in other.get_vocab().items()}
    first = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    assert f"teacher 'a' has another tokenizer than the student: id {first} is" in str(error.value)


class FakeTokenizer:
    """The parts that a comparison reads."""

    def __init__(self, words, special=(0,), **roles):
        self.words, self.all_special_ids = words, list(special)
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = None, 0, 0, None
        vars(self).update(roles)

    def get_vocab(self):
        return {w: i for i, w in enumerate(self.words)}


def test_compare_tokenizers():
    ours = FakeTokenizer(["<end>", "a", "b"])
    assert compare_tokenizers(ours, FakeTokenizer(["<end>", "a", "b"]), teacher_id="t") == 3
    for other, words in [
        (FakeTokenizer(["<end>", "b", "a"]), "id 1 is 'b' there and 'a' here"),
        (FakeTokenizer(["<end>", "a"]), "id 2 is missing there and 'b' here"),
        (FakeTokenizer(["<end>", "a", "b", "c"]), "id 3 is 'c' there and missing here"),
        (FakeTokenizer(["<end>", "a", "b", "<unused_1>", "c"]), "id 4 is 'c' there and missing here"),
        (FakeTokenizer(["<end>", "<unused_1>", "b"]), "id 1 is '<unused_1>' there and 'a' here"),
    ]:
        with pytest.raises(TokenizerMismatch, match=words):
            compare_tokenizers(ours, other, teacher_id="t")
    more = FakeTokenizer(["<end>", "a", "b", "<unused_1>", "<|reserved_special_token_2|>"])
    assert compare_tokenizers(ours, more, teacher_id="t") == compare_tokenizers(more, ours, teacher_id="t") == 3
