"""Transcripts of experts and novices, and their files."""

from __future__ import annotations

import json

import pytest

from mopd.environments.demonstrations import InvalidTranscript, demonstrate, read_transcripts, write_transcripts


def test_expert_transcripts(family):
    tasks = family.tasks("train")[:3]
    finished = []
    result = demonstrate(
        family, "some-domain", tasks, seed=1, max_turns=60, progress=lambda n, of: finished.append((n, of))
    )
    assert result.counts == {"kept": 3} and finished[-1] == (3, 3)
    assert [(t["task"], t["seed"]) for t in result.transcripts] == [(task.name, task.seed) for task in tasks]
    assert result.environment_steps == sum(len(t["turns"]) for t in result.transcripts)
    for transcript in result.transcripts:
        assert transcript["success"] and transcript["score"] == 1.0 and transcript["domain"] == "some-domain"
        assert {turn["writer"] for turn in transcript["turns"]} == {"expert"}
        assert transcript["turns"][-1]["score"] == 1.0


def test_novices_mix_random_actions_and_are_reproducible(family):
    tasks = family.tasks("train")[:4]
    runs = [
        demonstrate(family, "d", tasks, seed=3, random_share=0.5, max_turns=12, keep="all", workers=workers)
        for workers in (1, 3)
    ]
    assert runs[0].transcripts == runs[1].transcripts
    writers = [turn["writer"] for t in runs[0].transcripts for turn in t["turns"]]
    assert "expert" in writers and "random" in writers
    assert sum(runs[0].counts.values()) == len(tasks)


def test_failures_are_counted(families):
    family = families["babyai"]
    result = demonstrate(family, "d", family.tasks("train")[:20], seed=0, max_turns=2)
    assert result.counts["turn_limit"] + result.counts.get("kept", 0) == 20
    assert result.examples["turn_limit"].startswith("BabyAI-")
    random_only = demonstrate(family, "d", family.tasks("train")[:5], seed=0, expert=False, max_turns=5, keep="all")
    assert {turn["writer"] for t in random_only.transcripts for turn in t["turns"]} == {"random"}


@pytest.mark.parametrize("wrong", [{"keep": "some"}, {"random_share": 1.5}, {"max_turns": 0}])
def test_wrong_arguments(families, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        demonstrate(families["babyai"], "d", [], seed=0, **wrong)


def test_files(families, tmp_path):
    family = families["babyai"]
    transcripts = demonstrate(family, "d", family.tasks("train")[:3], seed=0).transcripts
    path = tmp_path / "inner" / "some.jsonl"
    assert write_transcripts(path, transcripts) == 3
    assert list(read_transcripts(path)) == transcripts
    lines = path.read_text().splitlines()
    for change, message in [
        (lambda t: t.pop("instruction"), "'instruction' is missing"),
        (lambda t: t.update(seed="7"), "'seed' is a str"),
        (lambda t: t.update(split="all"), "split is 'all'"),
        (lambda t: t.update(turns=[]), "turns is empty"),
        (lambda t: t["turns"][0].update(writer="me"), r"turns\[0\].writer is 'me'"),
    ]:
        broken = json.loads(lines[1])
        change(broken)
        path.write_text("\n".join([lines[0], json.dumps(broken)]))
        with pytest.raises(InvalidTranscript, match=f"some.jsonl:2.*{message}"):
            list(read_transcripts(path))
        with pytest.raises(InvalidTranscript):
            write_transcripts(path.with_name("other.jsonl"), [broken])
    path.write_text(lines[0] + "\n{")
    with pytest.raises(InvalidTranscript, match="some.jsonl:2: not JSON"):
        list(read_transcripts(path))
    path.write_bytes(lines[0].encode() + b"\n\x80\xff")
    with pytest.raises(InvalidTranscript, match="some.jsonl:2: not JSON"):
        list(read_transcripts(path))
    assert [p.name for p in path.parent.iterdir()] == ["some.jsonl"]
