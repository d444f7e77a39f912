"""The command line: exit statuses, one readable message, JSON where a program would read it."""

from __future__ import annotations

import errno
import json
import subprocess
import sys

import pytest

from mopd import cli
from mopd.learner.model import TinyMoEConfig, new_tiny_moe, save_model
from prefix_store import PrefixStore
from tests.tiny_run import environment, mopd


@pytest.fixture
def run(monkeypatch, capfd):
    """run(arguments…) → (exit status, stdout, stderr) of `mopd` in this process."""
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["mopd", *map(str, arguments)])
        monkeypatch.setattr(cli.console, "_width", 200)
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capfd.readouterr()
        return leaving.value.code, out, err
    return call


@pytest.fixture(scope="module")
def wider(tmp_path_factory):
    """A model folder of another shape."""
    shape = TinyMoEConfig(hidden_size=64, layers=2, head_dim=8, experts=4, expert_size=24)
    return save_model(new_tiny_moe(shape, vocabulary=50, seed=0, pad_id=0, bos_id=None, eos_id=1),
                      tmp_path_factory.mktemp("wider") / "model")


def test_help_and_wrong_usage(run):
    assert run("--help")[0] == 0 and run("train", "--help")[0] == 0
    for wrong in (["fly"], ["train"], ["train", "x.yaml", "--nonsense"], ["store"]):
        code, out, err = run(*wrong)
        assert code == 2 and "Traceback" not in out + err, wrong


def test_a_wrong_config_is_2_and_says_everything_once(run, tiny_run):
    code, out, err = run("train", tiny_run.path, "train.stepz=3", "seed=x")
    assert code == 2 and out == "" and "Traceback" not in err
    assert "2 error(s)" in err and "did you mean steps?" in err and "seed: expected a whole number" in err
    assert err.count("error:") == 1


@pytest.mark.parametrize("command, words", [
    (["train", "{config}", "student.model=nowhere/at/all"], "no model folder at nowhere/at/all"),
    (["demonstrate", "{config}", "--domain", "web"], "domain web: the config has the domains embodied, game"),
    (["collect", "{config}", "--domain", "web"], "domain web: the config has the domains embodied, game"),
    (["collect", "{config}", "store=nowhere", "--domain", "game"], "no prefix store at nowhere"),
    (["teacher", "sft", "{config}", "--domain", "web"], "domain web: the config has"),
    (["teacher", "sft", "{config}", "store=nowhere"], "no prefix store at nowhere"),
    (["import", "{config}", "--file", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    (["base", "{config}"], "no transcripts"),
    (["eval", "{config}", "--model", "student"], "write NAME=FOLDER"),
    (["eval", "{config}", "--model", "student=/no/where"], "no model folder at /no/where"),
    (["eval", "{config}", "--model", "a/b=x"], "model name 'a/b'"),
    (["eval", "{config}", "domains.game.options={games: {nogame: ''}}", "--domain", "game"], "nogame"),
    (["demonstrate", "{config}", "domains.embodied.options.levels=[NoLevel]", "--domain", "embodied"], "NoLevel"),
    (["report", "/no/where"], "no such run folder"),
    (["store", "info", "/no/where"], "/no/where does not exist"),
    (["store", "show", "/no/where", "abc"], "/no/where does not exist"),
    (["average", "/no/where", "/nor/here", "--out", "x"], "/no/where is no Hugging Face folder"),
    (["train", "{config}", "--resume", "maybe"], "--resume maybe: auto goes on"),
    (["train", "{config}", "--resume", "never", "--rollback", "2"], "leave one of them out"),
    (["export", "/no/where", "--out", "x"], "no student has been trained here"),
    (["export", "{base}", "{other}", "--out", "x"], "say --average or --interpolate"),
    (["export", "{base}", "--interpolate", "--out", "x"], "takes two models, not 1"),
    (["export", "{base}", "{other}", "--average", "--out", "x"], "config.json differs in"),
    (["average", "{base}", "{other}", "--out", "x"], "config.json differs in"),
    (["export", "{base}", "--best", "--step", "3", "--out", "x"], "--step and --best are two checkpoints"),
    (["export", "{base}", "{base}", "--average", "--best", "--out", "x"], "--best belongs to a run's folder"),
])
def test_what_cannot_be_is_2_and_one_message(run, tiny_run, wider, command, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    places = {"{config}": tiny_run.path, "{base}": tiny_run.folder / "base", "{other}": wider}
    code, out, err = run(*(str(places.get(part, part)) for part in command))
    assert code == 2, (code, err)
    assert words in " ".join(err.split()) and "Traceback" not in err and err.count("error:") == 1
    assert out == "" and list(tmp_path.iterdir()) == [], "something was written although nothing could be done"


def test_check_answers_programs_and_people(run, tiny_run):
    code, out, err = run("check", tiny_run.path, "--json")
    answer = json.loads(out)
    assert code == 0 and answer["errors"] == [] and set(answer["domains"]) == {"embodied", "game"}
    assert answer["domains"]["game"]["stored"]["teacher_prefix"]["sequences"] == 3
    assert answer["domains"]["embodied"]["tasks"] == {"train": 60, "development": 20, "test": 20}
    code, out, err = run("check", tiny_run.path)
    assert code == 0 and "Nothing stands in the way" in out and "3 stored sequences" in out and "babyai" in out
    for wrong in ("student.model=/no/where", "train.stepz=1", "domains.game.share=-0.5"):
        code, out, err = run("check", tiny_run.path, wrong, "--json")
        (error,) = json.loads(out)["errors"]
        assert code == 2 and error.startswith(wrong.split("=")[0])


def test_store_commands(run, tiny_run):
    store = tiny_run.folder / "store"
    code, out, _ = run("store", "info", store, "--json")
    assert code == 0 and json.loads(out)["domains"]["game"]["expert"]["sequences"] == 6
    assert "25 sequences" in run("store", "info", store)[1]
    assert run("store", "verify", store)[0] == 0
    assert json.loads(run("store", "verify", store, "--json")[1]) == {"sequences": 25, "problems": []}


def test_an_export_whose_reader_is_gone_says_so(tiny_run):
    """As under `mopd store export STORE - | head`; the shell's own tools end with this status too."""
    process = subprocess.Popen([sys.executable, "-m", "mopd.cli", "store", "export", str(tiny_run.folder / "store"), "-"],
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    process.stdout.close()
    said = process.stderr.read()
    assert process.wait(60) == 141 and "Traceback" not in said
    assert "standard output was closed by its reader after" in said and "of 25 sequences" in said
    process.stderr.close()


def test_import_with_a_configuration(run, tiny_run, tmp_path):
    transcripts = tiny_run.folder / "game.jsonl"
    code, out, _ = run("import", tiny_run.path, f"store={tmp_path / 'one'}", "--file", transcripts, "--domain", "game")
    assert code == 0 and "result: 6 demonstrations" in out and "game.jsonl (transcripts): 6 of 6 rows taken" in out
    code, out, _ = run("import", transcripts, tiny_run.path, "--store", tmp_path / "two", "--json")
    assert code == 0 and json.loads(out)["taken"] == 6
    with PrefixStore.open(tmp_path / "one") as one, PrefixStore.open(tmp_path / "two") as two:
        assert one.ids() == two.ids()


def test_verify_of_a_damaged_store_is_1(run, tiny_run, tmp_path):
    import shutil
    shutil.copytree(tiny_run.folder / "store", tmp_path / "store")
    chunks = [p for p in (tmp_path / "store" / "segments").rglob("*") if p.is_file() and p.name != "zarr.json"]
    victim = max(chunks, key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, out, err = run("store", "verify", tmp_path / "store", "--json")
    assert code == 1 and json.loads(out)["problems"] and "Traceback" not in err


def test_store_show(run, tiny_run):
    store = tiny_run.folder / "store"
    with PrefixStore.open(store) as opened:
        point = opened.decision_points("game", sources=("teacher",))[1]
        sequence = opened.sequence(point.sequence)
    code, out, err = run("store", "show", store, point.sequence[:10], "--model", tiny_run.folder / "base")
    assert code == 0 and err == "" and point.sequence in out
    assert "played by teacher game" in out and "Answer with one action." in out and "log µ -" in out
    assert out.count("▶ decision point") == sequence.turns and "▶ decision point 0 (after" in out
    answer = json.loads(run("store", "show", store, point.sequence, "--json", "--model", tiny_run.folder / "base")[1])
    (context,) = answer["contexts"]
    tokens = sequence.contexts[0].tokens
    assert "".join(s["text"] for s in context["segments"]) == tiny_run.tokenizer().decode(tokens.tolist())
    actions = [s for s in context["segments"] if s["kind"] == "action"]
    assert [s["decision_point"] for s in actions] == [[0, t] for t in range(sequence.turns)]
    assert all(s["logprob"] < 0 for s in actions)
    plain = json.loads(run("store", "show", store, point.sequence, "--json")[1])
    assert plain["contexts"][0]["segments"][0]["text"].split()[0] == str(int(tokens[0]))
    code, _, err = run("store", "show", store, "zz")
    assert code == 2 and "no sequence" in err and "it holds 25, for example" in err
    code, _, err = run("store", "show", store, "")
    assert code == 2 and "25 sequences" in err and "write more" in err


def test_evaluation_answers_programs(run, tiny_run, tmp_path):
    code, out, _ = run("eval", tiny_run.path, f"evaluate.out={tmp_path}", "domains.embodied.evaluation_episodes=3",
                       "--model", f"a={tiny_run.folder / 'base'}", "--model", f"b={tiny_run.folder / 'base'}",
                       "--domain", "embodied", "--json")
    answer = json.loads(out)  # and nothing else on stdout
    assert code == 0 and answer["a"] == answer["b"] and answer["a"]["embodied"]["n"] == 3
    first, second = (json.loads((tmp_path / f"{m}.embodied.json").read_text()) for m in "ab")
    assert first["episodes"] == second["episodes"], "the same model on the same tasks and seeds"
    assert all("success" in e and e["failure"] == "" for e in first["episodes"])


def test_a_broken_run_is_1_with_a_traceback_only_for_bugs(run, tiny_run, monkeypatch):
    from mopd import run as module
    from mopd.run import TooManyFailures

    def fail(*_, **__):
        raise TooManyFailures("all of them")
    monkeypatch.setattr(module, "train", fail)
    code, _, err = run("train", tiny_run.path)
    assert code == 1 and "error: all of them" in err and "Traceback" not in err

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "/some/file")
    monkeypatch.setattr(module, "train", full)
    code, _, err = run("train", tiny_run.path)
    assert code == 1 and "error: No space left on device: /some/file" in err and "Traceback" not in err

    def bug(*_, **__):
        raise KeyError("bug")
    monkeypatch.setattr(module, "train", bug)
    monkeypatch.setattr("sys.argv", ["mopd", "train", str(tiny_run.path)])
    with pytest.raises(KeyError):
        cli.main()

    def stop(*_, **__):
        raise KeyboardInterrupt
    monkeypatch.setattr(module, "train", stop)
    code, _, err = run("train", tiny_run.path)
    assert code == 130 and "goes on from here" in err
    monkeypatch.setattr("mopd.domains.demonstrate_domain", stop)  # which keeps nothing of what it began
    code, _, err = run("demonstrate", tiny_run.path, "--domain", "game")
    assert code == 130 and "starts again" in err


def test_as_a_process():
    done = mopd("check", "/no/such.yaml")
    assert done.returncode == 2 and "no such config file" in done.stderr and "Traceback" not in done.stderr
    done = mopd("report", "/no/such")
    assert done.returncode == 2 and "no such run folder" in done.stderr and "Traceback" not in done.stderr
