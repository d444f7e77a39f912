"""`mopd import` and `mopd store`: what goes in, what comes out again, and what they say to people and programs."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import pytest

from mopd import cli, show
from mopd.config import load_config
from mopd.sampling.demo_tokenizer import train_tokenizer
from prefix_store import PrefixStore
from prefix_store.trajectory import example_sequence

SAMPLES = Path(__file__).parents[1] / "prefix_store" / "samples"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder with a tokenizer and nothing else: an import needs no weights."""
    folder = tmp_path_factory.mktemp("model")
    texts = [path.read_text() for path in sorted(SAMPLES.rglob("*")) if path.is_file()]
    train_tokenizer(texts, 500).save_pretrained(folder)
    return folder


@pytest.fixture
def run(monkeypatch, capfd):
    """run(arguments…) → (exit status, stdout, stderr) of `mopd` in this process."""
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["mopd", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            cli.main()
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return leaving.value.code, out, err
    return call


@pytest.fixture(scope="module")
def store(tmp_path_factory, model):
    """Random sequences of every source, extras among them, and two rendered demonstrations."""
    from mopd.importing import run_import

    path = tmp_path_factory.mktemp("stores") / "store"
    assert run_import([SAMPLES / "agentgym.json", SAMPLES / "eto.json"], path, model, domain="science") == 0
    with PrefixStore.open(path, "a") as opened:
        fingerprint = opened.fingerprints()[0]
        for seed in range(12):
            sequence = example_sequence(seed, vocabulary=300, extras=seed % 2 == 0)
            opened.append(dataclasses.replace(sequence, fingerprint=fingerprint))
        opened.commit("examples")
    return path


def test_import_needs_no_configuration(run, model, tmp_path):
    report = tmp_path / "reports" / "all.json"
    code, out, err = run("import", SAMPLES / "verifiers_results.jsonl", SAMPLES / "agentgym.json", "--store", tmp_path / "s",
                         "--model", model, "--domain", "science", "--tools-as-text", "--report", report)
    assert code == 0 and "verifiers_results.jsonl (verifiers): 2 of 3 rows taken" in out
    assert "1 the rollout ended with an error (lines 3;" in out and "agentgym.json (agentgym): 1 of 1 rows taken" in out
    assert out.splitlines()[-1] == f"result: 3 demonstrations in {tmp_path / 's'} at version v000001"
    written = json.loads(report.read_text())
    assert written["files"][0]["refused"] == {"the rollout ended with an error": [3]} and written["refused"] == 1
    with PrefixStore.open(tmp_path / "s") as opened:
        assert len(opened) == 3 and opened.verify().ok
    again = ["import", SAMPLES / "agentgym.json", "--store", tmp_path / "s", "--model", model, "--domain", "science"]
    code, out, _ = run(*again, "--json")
    answer = json.loads(out)
    assert code == 0 and (answer["taken"], answer["duplicates"], answer["version"]) == (1, 1, "v000001")


def test_nothing_taken_is_1_and_strict_takes_all_or_nothing(run, model, tmp_path):
    basic = ["--store", tmp_path / "s", "--model", model]
    code, out, _ = run("import", SAMPLES / "agentgym.json", *basic)
    assert code == 1 and "1 no domain" in out and "0 of 1 rows" in out
    code, out, _ = run("import", SAMPLES / "chat_tools.jsonl", *basic, "--domain", "d", "--strict")
    assert code == 1 and "the template has no tool calls" in out and "nothing imported" in out
    assert not (tmp_path / "s").exists(), "an import that takes nothing leaves nothing behind"
    assert run("import", SAMPLES / "chat_tools.jsonl", *basic, "--domain", "d", "--strict", "--tools-as-text")[0] == 0
    code, out, _ = run("import", SAMPLES / "eto.json", *basic, "--domain", "d", "--max-tokens", "30")
    assert code == 1 and "longer than the limit" in out


@pytest.mark.parametrize("arguments, words", [
    (["import"], "--store"),
    (["import", "nowhere.jsonl", "--store", "s", "--model", "m"], "nowhere.jsonl: no such file"),
    (["import", "{samples}/eto.json", "--store", "s"], "with --model"),
    (["import", "{samples}/eto.json", "--store", "s", "--model", "./m"], "there is no tokenizer in ./m"),
    (["import", "{samples}/eto.json", "--store", "s", "--model", "m", "--format", "csv"], "format 'csv' is none of auto"),
    (["import", "{samples}/tales/TWXCoin/a0_s20241001_steps100.json", "--store", "s", "--model", "m"], "Known formats"),
    (["import", "{samples}/eto.json", "--store", "s", "--model", "{model}", "--storage-option", "region=x"],
     "storage options region given for the local folder"),
    (["import", "{samples}/eto.json", "x=1", "--store", "s"], "one configuration and its key=value"),
    (["store", "export", "{store}", "out.jsonl", "--form", "chat"], "needs the tokenizer"),
    (["store", "export", "{store}", "out.jsonl", "--domain", "web"], "--domain web: the store has"),
    (["store", "show", "{store}", "--source", "robot"], "--source robot"),
    (["store", "info", "{store}", "--storage-option", "x"], "write KEY=VALUE"),
    (["store", "info", "{store}", "--version", "v000099"], "v000099"),
    (["store", "compact", "nowhere"], "nowhere does not exist"),
    (["store", "gc", "nowhere"], "nowhere does not exist"),
    (["store", "info", "{samples}/eto.json"], "eto.json is a file"),
    (["store", "export", "{store}", "{samples}"], "is a folder; name a file"),
    (["store", "export", "{store}", "{samples}/eto.json/x.jsonl"], "x.jsonl cannot be written: "),
    (["import", "{samples}/eto.json", "--store", "s", "--model", "{model}", "--domain", "d", "--report", "{samples}"],
     "is a folder; name a file"),
    (["import", "{samples}/eto.json", "--store", "s", "--model", "{model}", "--domain", "d", "--report",
      "{samples}/eto.json/x"], "its folder cannot be made"),
    (["import", "{samples}/eto.json", "--store", "{samples}", "--model", "{model}", "--domain", "d"],
     "is not a prefix store and not an empty folder"),
])  # fmt: skip
def test_wrong_usage_is_2_and_writes_nothing(run, store, model, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(*(a.format(samples=SAMPLES, store=store, model=model) for a in arguments))
    assert code == 2 and words in " ".join(err.split()), (code, err)
    assert out == "" and list(tmp_path.iterdir()) == []


def test_a_domain_that_the_configuration_lacks_is_refused(run, model, tmp_path):
    demo = cli.DEMO
    code, out, err = run("import", demo, "--file", SAMPLES / "eto.json", "--store", tmp_path / "s", "--model", model,
                         "--domain", "nowhere")
    assert code == 2 and "domain nowhere: the config has the domains" in err and not (tmp_path / "s").exists()


def test_rows_of_a_domain_without_a_limit_are_named_with_the_limit_they_had(run, model, tmp_path):
    chat = [{"role": "user", "content": "Where is the key?"}, {"role": "assistant", "content": "In the drawer."}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": chat, "domain": name}) + "\n" for name in ("game", "elsewhere")))
    code, out, _ = run("import", cli.DEMO, "--file", rows, "--store", tmp_path / "s", "--model", model)
    limit = max(part.max_context_tokens for part in load_config(cli.DEMO).domains.values())
    warnings = [line for line in out.splitlines() if "warning" in line]
    assert code == 0 and len(warnings) == 1, out
    assert "'elsewhere'" in warnings[0] and f"held to {limit} tokens" in warnings[0]
    code, out, _ = run("import", cli.DEMO, "--file", rows, "--store", tmp_path / "t", "--model", model, "--json")
    assert json.loads(out)["files"][0]["unlisted"] == {"elsewhere": limit}


def test_info_is_readable(run, store, tmp_path):
    out = run("store", "info", store)[1]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[0] == f"{store}, version v000002 (2 versions)" and lines[1] == "message: examples"
    with PrefixStore.open(store) as opened:
        counts = opened.info()["domains"]["science"]["demonstration"]
    row = f"science demonstration {counts['sequences']} {counts['successes']} {counts['decision_points']}"
    assert "domain played by sequences solved decision points" in lines and row in lines, out
    assert "{" not in out and "[" not in out
    PrefixStore.open(tmp_path / "empty", "a").close()
    assert "0 sequences" in run("store", "info", tmp_path / "empty")[1]


def test_answers_are_on_standard_output(run, store, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    for arguments, words in (["info", "14 sequences, "], ["verify", "14 sequences checked, 0 problems"],
                             ["compact", "version v000003"], ["gc", "removed 0 versions"]):
        code, out, err = run("store", arguments, copy)
        assert code == 0 and words in out and err == "", arguments
    PrefixStore.open(tmp_path / "empty", "a").close()
    assert json.loads(run("store", "compact", tmp_path / "empty", "--json")[1])["version"] is None


def test_info_of_another_version_where_the_newest_is_damaged(run, store, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    (copy / "versions" / "v000002.json").write_text("[]")
    code, _, err = run("store", "info", copy)
    assert code == 1 and "v000002.json fails its checksum" in err
    code, out, _ = run("store", "info", copy, "--version", "v000001", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["sequences"] == 2 and "v000002.json" in answer["damaged"]["versions"]
    assert [entry["kind"] for entry in answer["history"]] == ["commit", "damaged"]


def test_formats_are_listed(run):
    code, out, _ = run("import", "--format", "list")
    assert code == 0 and len(out.splitlines()) == 11 and "mini-swe-agent" in out


def test_export_comes_in_again_hash_for_hash(run, store, tmp_path):
    code, out, _ = run("store", "export", store, tmp_path / "all.jsonl.gz", "--json")
    assert code == 0 and json.loads(out)["sequences"] == 14
    rows = [json.loads(line) for line in gzip.open(tmp_path / "all.jsonl.gz", "rt")]
    assert any("extras" in row["contexts"][0] for row in rows)
    assert run("import", tmp_path / "all.jsonl.gz", "--store", tmp_path / "copy")[0] == 0
    with PrefixStore.open(store) as one, PrefixStore.open(tmp_path / "copy") as two:
        assert one.ids() == two.ids() and two.verify().ok
        teachers = sum(s.source.kind == "teacher" and s.outcome.success for s in one)
    code, out, err = run("store", "export", store, "-", "--source", "teacher", "--success")
    assert code == 0 and len(out.splitlines()) == teachers > 0 and "standard output" in err


def test_export_as_chats(run, store, model, tmp_path):
    code, _, err = run("store", "export", store, tmp_path / "chats.jsonl", "--form", "chat", "--model", model,
                       "--source", "demonstration", "--domain", "science")
    rows = [json.loads(line) for line in open(tmp_path / "chats.jsonl")]
    assert code == 0 and len(rows) >= 2
    (gym,) = (row for row in rows if row.get("environment") == "agentgym:maze")
    assert [m["role"] for m in gym["messages"]] == ["user", "assistant", "user", "assistant", "user", "assistant"]
    assert [m.get("loss", True) for m in gym["messages"] if m["role"] == "assistant"] == [False, True, True]
    assert gym["messages"][3]["content"] == "Thought:\nNorth is free.\n\nAction:\nmove up" and gym["source"]["kind"]


def test_show_lists_and_prints(run, store, model):
    code, out, err = run("store", "show", store, "--limit", 3)
    assert code == 0 and err == "" and "3 of 14 sequences" in out
    listed = json.loads(run("store", "show", store, "--source", "demonstration", "--domain", "science", "--json")[1])
    gym = next(row for row in listed["sequences"] if row["source_id"] == "agentgym.json")
    code, out, _ = run("store", "show", store, gym["id"][:9], "--model", model)
    assert code == 0 and out.count("▶ decision point") == 2 and "move up" in out
    assert "played by demonstration agentgym.json" in out
    assert "move up" not in run("store", "show", store, gym["id"][:9], "--model", model, "--tokens")[1]
    with PrefixStore.open(store) as opened:
        extras = next(i for i in opened.ids() if opened.sequence(i).contexts[0].extras)
        names = sorted(opened.sequence(extras).contexts[0].extras)
    out = run("store", "show", store, extras)[1]
    assert all(f"extra {name}: " in out for name in names)
    found = json.loads(run("store", "show", store, extras, "--json")[1])["contexts"][0]["extras"]
    assert sorted(found) == names
    old = json.loads(run("store", "info", store, "--version", "v000001", "--json")[1])
    assert old["sequences"] == 2 and [h["version"] for h in old["history"]] == ["v000001", "v000002"]


def test_compact_gc_and_quarantine(run, store, tmp_path):
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    code, out, _ = run("store", "compact", copy, "--json")
    answer = json.loads(out)
    assert code == 0 and (answer["segments_before"], answer["segments"]) == (2, 1)
    assert run("store", "gc", copy, "--keep-versions", 1, "--min-age", 0, "--dry-run")[0] == 0
    assert run("store", "gc", copy, "--keep-versions", 1, "--min-age", 0, "--json")[0] == 0
    with PrefixStore.open(copy) as opened:
        assert len(opened) == 14 and len(opened.info()["segment_names"]) == 1
    damaged = tmp_path / "damaged"
    shutil.copytree(store, damaged)
    chunks = [p for p in (damaged / "segments").rglob("tokens/*") if p.is_file() and p.name != "zarr.json"]
    victim = max(chunks, key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    code, out, _ = run("store", "verify", damaged, "--quarantine", "--json")
    assert code == 1 and json.loads(out)["problems"] and json.loads(out)["quarantine"]
    assert run("store", "verify", damaged)[0] == 0, "the version that quarantine made is sound"


def test_show_obeys_no_stored_text_and_prints_everywhere(tmp_path, monkeypatch):
    """Control characters in stored text are spelled out, and what an odd terminal cannot write is a question mark."""
    sequence = dataclasses.replace(example_sequence(3), task="caf\u00e9 \x1b[2Jgone", domain="\ud800")
    with PrefixStore.open(tmp_path / "store", "a") as store:
        identity = store.append(sequence)
        store.commit()
        for encoding in ("ascii", "utf-8"):
            out = io.BytesIO()
            monkeypatch.setattr("sys.stdout", io.TextIOWrapper(out, encoding=encoding))
            show.show_sequence(store, identity)
            show.list_sequences(store)
            show.show_info(store.info())
            sys.stdout.flush()
            text = out.getvalue().decode(encoding)
            assert "\x1b[2J" not in text and "\\x1b[2Jgone" in text and "decision point 0" in text
            assert ("caf\u00e9" if encoding == "utf-8" else "caf?") in text
            monkeypatch.undo()
