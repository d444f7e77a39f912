"""Student and teacher are introduced before a run: what must agree, what is only said, and what each back end cannot do."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest

from mopd.config_teachers import TeacherConfig, teacher_errors
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import load_tokenizer
from teachers import registry as registry_module
from teachers.handshake import TokenizerMismatch, folder_identity, introduce, shared_ids
from teachers.registry import TeacherError, TeacherRegistry, TeacherSpec, model_revision
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import TeacherUnreachable

SAYS = {"sampled": True, "max_k": 20, "flat": True, "start_offset": False, "chosen_ids": False, "hidden": False,
        "full": False, "temperature": False}


@pytest.fixture(scope="module")
def student(make_folder):
    return folder_identity(make_folder(0))


def changed(identity, **more):
    return {**identity, "capabilities": SAYS, **more}


def test_the_same_tokenizer_raises_nothing_and_says_nothing(student, make_folder):
    found = introduce(student, folder_identity(make_folder(1)), teacher_id="t", stop_ids=student["end_ids"], longest=512)
    assert found.notes == () and found.shared == len(student["vocabulary"]) == student["rows"]
    assert found.facts["tokens"] == "same" and found.facts["same_template"] and found.facts["context_tokens"] == 2048
    json.dumps(found.facts)


def test_a_base_student_hears_of_a_chat_teachers_ends(student):
    end = student["end_ids"][0]
    teacher = changed(student, end_ids=[end, 9], stop_strings=["###"])
    found = introduce(changed(student, end_ids=[7]), teacher, teacher_id="chat", stop_ids=[7])
    ends, turns, strings = found.notes
    assert ends.startswith("teacher 'chat' ends its texts with ") and f"({end})" in ends and "the student with " in ends
    assert "which is no end for teacher 'chat'" in turns and "(7)" in turns
    assert "also stops at the texts '###'" in strings


def test_padding_and_unused_rows_share_the_softmax(student):
    size = len(student["vocabulary"])
    more = {**student["vocabulary"], size: "<unused_0>", size + 1: "[PAD2]"}
    near = introduce(student, {**student, "vocabulary": more, "rows": size + 64}, teacher_id="t")
    assert near.shared == size and "2 further ones" in near.notes[0] and near.facts["tokens"] == f"first {size} same"
    far = introduce(student, changed(student, rows=size + 64), teacher_id="t", backend="server")
    assert "64 rows of padding, which count in its softmax" in far.notes[0]
    with pytest.raises(TokenizerMismatch, match=f"id {size} is 'word' there and missing here"):
        shared_ids(student["vocabulary"], {**student["vocabulary"], size: "word"}, teacher_id="t")
    with pytest.raises(TokenizerMismatch, match=f"id {size} is 'reserved' there"):  # a word that text does become
        shared_ids(student["vocabulary"], {**student["vocabulary"], size: "reserved"}, teacher_id="t")


def test_a_folder_without_a_tokenizer_is_said_to_be_one(tmp_path):
    """Transformers would invent a tokenizer from the config, and the message would speak of another one."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    for read in (folder_identity, load_tokenizer):
        with pytest.raises(FileNotFoundError, match="has no tokenizer .tokenizer.json"):
            read(tmp_path)


def test_differences_that_scores_do_not_depend_on_are_notes(student):
    other = {**student, "special": [*student["special"], 9], "roles": {**student["roles"], "pad": 9},
             "chat_template": "{{x}}"}
    said = " | ".join(introduce(student, other, teacher_id="t").notes)
    for words in ("its pad token is", "is a special token only for the teacher", "another chat template"):
        assert words in said


def test_what_a_server_cannot_do_is_refused_with_what_could(student):
    def refused(**options):
        with pytest.raises(TeacherError) as error:
            introduce(student, changed(student, context_tokens=100, revision="abc"), teacher_id="t", backend="server",
                      **options)
        return str(error.value)

    assert "reads 100 tokens" in refused(longest=101) and "max_context_tokens" in refused(longest=101)
    assert "no more than 20 likeliest ids" in refused(top_k=21) and "k=20, or start it" in refused(top_k=21)
    assert "is revision abc, but teachers.t.revision says xyz" in refused(revision="xyz")
    both = refused(longest=500, top_k=64)
    assert "reads 100" in both and "--max-logprobs 64" in both
    with pytest.raises(TeacherError, match="gives no log-probabilities"):
        introduce(student, {**student, "capabilities": {**SAYS, "sampled": False}}, teacher_id="t", backend="server")
    introduce(student, changed(student, revision="abcdef"), teacher_id="t", backend="server", revision="abc", longest=100)


def test_a_server_that_hides_its_tokenizer_is_asked_how_it_reads_texts(student):
    spelled = student["spelled"].encode("open the door", add_special_tokens=False)
    hidden = {"capabilities": SAYS, "tokenized": {"open the door": spelled, "x": None}, "context_tokens": 512}
    found = introduce(student, hidden, teacher_id="t", backend="server")
    assert found.facts["tokens"] == "not told" and "wrote some texts as the same ids" in found.notes[0]
    with pytest.raises(TokenizerMismatch, match=r"'open the door' is \[5, 6\] there and \["):
        introduce(student, {**hidden, "tokenized": {"open the door": [5, 6]}}, teacher_id="t", backend="server")


class Server:
    """What a registry needs of a server before it is asked for scores."""

    gives, max_k, max_tokens = frozenset({"sampled", "top_k"}), 20, 1024

    def __init__(self, spec, says=None):
        self.spec, self.teacher, self.says, self.closed = spec, spec.id, says, False

    def identity(self):
        if self.says is None:
            raise TeacherUnreachable(self.teacher, f"connection refused by {', '.join(self.spec.urls)}")
        return {"model": "m", "capabilities": SAYS, "context_tokens": 1024, **self.says}

    def close(self):
        self.closed = True


@pytest.fixture
def servers(monkeypatch):
    """A registry asks these instead of the network; says[teacher id] is what each tells, None: it does not answer."""
    says, made = {}, []

    def make(spec):
        made.append(Server(spec, says.get(spec.id)))
        return made[-1]

    monkeypatch.setattr(registry_module, "make_backend", make)
    return says, made


def test_a_registry_of_both_kinds(make_folder, tokenizer, servers):
    says, made = servers
    one, two = make_folder(1), make_folder(2)
    urls = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    specs = [TeacherSpec("a", str(one)), TeacherSpec("s", str(two), backend="server", urls=urls),
             TeacherSpec("again", str(two), backend="server", urls=urls[::-1])]
    says["s"] = says["again"] = {"revision": model_revision(two)}
    registry = TeacherRegistry(specs, {"game": "a", "web": "s", "shop": "again"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.handshake(tokenizer, longest={"s": 1000, "a": 99}) == len(tokenizer)
    assert len(made) == 1, "two names of one place share one connection"
    assert registry.gives()["s"] == {"sampled", "top_k"} and "hidden" in registry.gives()["a"]
    scorers = registry.scorers()
    assert isinstance(scorers["web"], RemoteTeacher) and scorers["web"] is scorers["shop"]
    assert scorers["web"].revision == model_revision(two) and scorers["web"].cache is registry.cache
    manifest = registry.manifest()
    json.dumps(manifest)
    assert manifest["teachers"]["s"]["backend"] == "server" and "backend" not in manifest["teachers"]["a"]
    assert manifest["teachers"]["s"]["revision"] == model_revision(two)
    registry.close()
    assert made[0].closed


def test_every_teacher_that_does_not_fit_is_named_at_once(make_folder, tokenizer, servers):
    says, _ = servers
    foreign = make_folder(3, train_tokenizer(["zebra zebra zebra quick quick"] * 5, 300))
    says["s"] = None
    specs = [TeacherSpec("a", str(foreign)), TeacherSpec("s", backend="server", urls=("http://127.0.0.1:1",)),
             TeacherSpec("r", str(make_folder(1)), revision="0000")]
    registry = TeacherRegistry(specs, {"game": "a", "web": "s", "shop": "r"})
    with pytest.raises(TeacherError) as error:
        registry.handshake(tokenizer)
    for words in ("teacher 'a' has another tokenizer", "teachers.s.urls: teacher 's' does not answer: connection refused by "
                  "http://127.0.0.1:1; start it with `mopd teacher serve`",
                  "teachers.r.revision says 0000"):
        assert words in str(error.value)


def test_a_server_without_a_folder_here_is_pinned_by_what_it_says(tokenizer, servers):
    says, _ = servers
    says["s"] = {"revision": None}
    spec = TeacherSpec("s", backend="server", urls=("http://127.0.0.1:1",))
    registry = TeacherRegistry([spec], {"game": "s"})
    with pytest.warns(UserWarning, match="does not tell its whole tokenizer"):
        registry.handshake(tokenizer)
    assert registry.revision(spec) == "m at http://127.0.0.1:1" and registry.manifest()["teachers"]["s"]["model"] == ""


@pytest.mark.parametrize("section, errors", [
    ({"model": "m"}, []),
    ({"backend": "server", "urls": ["http://127.0.0.1:8000", "https://there"]}, []),
    ({"model": "m", "backend": "vllm", "tensor_parallel": 2}, []),
    ({}, ["teachers.t.model: missing"]),
    ({"backend": "sever"}, ["teachers.t.backend: 'sever' is not one of hf, vllm, server"]),
    ({"backend": "server"}, ["teachers.t.urls: missing"]),
    ({"backend": "server", "urls": ["127.0.0.1:8000"]}, ["teachers.t.urls[0]: '127.0.0.1:8000' is not an address"]),
    ({"backend": "server", "urls": ["http://a:1", "http://a:1"]}, ["teachers.t.urls: an address stands there twice"]),
    ({"model": "m", "urls": ["http://a:1"], "tensor_parallel": 2, "offload": True},
     ["teachers.t.urls: the back end 'hf' does not read it (server would)", "teachers.t.tensor_parallel: the back end 'hf'"]),
    ({"backend": "server", "urls": ["http://a:1"], "probe_against_model": True},
     ["probe_against_model: needs teachers.t.model"]),
    ({"backend": "server", "urls": ["http://a:1"], "api_key_env": "sk-1234"}, ["takes the name of an environment variable"]),
    ({"model": "m", "dtype": "int8"}, ["teachers.t.dtype: 'int8'"]),
    ({"backend": "server", "urls": ["http://a:1"], "timeout_s": 0.0, "max_tokens": 0},
     ["timeout_s: 0.0 must be", "max_tokens:"]),
])
def test_which_keys_go_with_which_back_end(section, errors):
    found = teacher_errors("t", TeacherConfig(**section))
    assert len(found) == len(errors), found
    assert all(words in error for words, error in zip(errors, found, strict=True)), found


def test_a_key_in_an_address_is_refused_and_not_repeated():
    (error,) = teacher_errors("t", TeacherConfig(backend="server", urls=["http://user:secret@host:1"]))
    assert "secret" not in error and "api_key_env" in error


def test_a_real_folder_tells_its_ends_from_all_three_places(make_folder):
    folder = Path(make_folder(4))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4], "stop_strings": "\n\n"}))
    told = folder_identity(folder)
    assert {3, 4} < set(told["end_ids"]) and told["stop_strings"] == ["\n\n"]
