"""Demonstrations come in token by token, each prefix as the template gives it, and every row not taken is counted."""

import gzip
import json
import random

import numpy as np
import pytest
from character_renderer import END, CharacterRenderer
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prefix_store import PrefixStore
from prefix_store.importers import (
    FORMATS,
    Conversation,
    ImportFailed,
    ImportOptions,
    UnknownFormat,
    import_file,
    import_into,
)
from prefix_store.importers.contexts import to_sequence
from prefix_store.importers.exported import from_row, to_row
from prefix_store.importers.run import DAMAGED, formats_of
from prefix_store.trajectory import (
    Fingerprint,
    Source,
    check_sequence,
    content_hash,
    continuation_of,
    decision_points_of,
    example_sequence,
    prefix_of,
)


def transcript(**changes):
    turns = [
        {"observation": "a door", "action": "open door", "score": 0.0, "writer": "expert"},
        {"observation": "a coin", "action": "take coin", "score": 1.0, "writer": "expert"},
    ]
    row = {
        "domain": "game", "environment": "coin", "environment_version": "1", "task": "coin-easy", "seed": 3,
        "split": "train", "source": {"kind": "expert", "id": "gold", "revision": "r"}, "system": "Play.",
        "instruction": "Find it.", "turns": turns, "final_observation": "You win.", "score": 1.0, "success": True,
        "metadata": {"ending": "done"},
    }  # fmt: skip
    return row | changes


def write(path, rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_a_transcript_becomes_a_sequence(tmp_path):
    taken = []
    result = import_file(write(tmp_path / "t.jsonl", [transcript()]), CharacterRenderer(), taken.append)
    assert result.counts == {"taken": 1} and result.turns == 2 and result.rows == 1 and result.format == "transcripts"
    (seq,) = taken
    check_sequence(seq)
    renderer = CharacterRenderer()
    messages = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Find it.\na door"},
        {"role": "assistant", "content": "open door"},
        {"role": "user", "content": "a coin"},
    ]
    assert np.array_equal(prefix_of(seq, 0, 0), renderer.whole(messages[:2]))
    assert np.array_equal(prefix_of(seq, 0, 1), renderer.whole(messages))
    assert renderer.read(continuation_of(seq, 0, 1)) == "take coin" == seq.actions[1]
    assert continuation_of(seq, 0, 1)[-1] == END
    assert np.isnan(seq.contexts[0].behaviour_logprob).all() and (seq.contexts[0].weights_version == -1).all()
    assert seq.outcome.reward == seq.outcome.true_reward == 1.0 and seq.outcome.success
    assert (seq.source.kind, seq.source.id, seq.source.revision) == ("expert", "gold", "r")
    assert seq.metadata == {"ending": "done", "final_observation": "You win.", "scores": [0.0, 1.0]}
    assert [s.kind for s in seq.contexts[0].segments] == ["prompt", "action", "observation", "action"]


def render(messages, renderer, **fields):
    talk = Conversation(messages=messages, domain="game", **fields)
    return to_sequence(talk, renderer, renderer.fingerprint(), Source("demonstration", "x"), ImportOptions())


def test_a_template_that_forgets_makes_child_contexts():
    renderer = CharacterRenderer(forgets=True)
    messages = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"view {turn}"})
        messages.append({"role": "assistant", "content": f"<thought {turn}>go {turn}"})
    seq = render(messages, renderer)
    assert len(seq.contexts) > 1 and [c.parent for c in seq.contexts] == [None, *range(len(seq.contexts) - 1)]
    assert len(render(messages, CharacterRenderer()).contexts) == 1
    check_sequence(seq)
    points = decision_points_of(seq)
    assert [p.turn for p in points] == [0, 1, 2, 3]
    for p in points:  # the prefix is exactly what the template gives a model about to write that turn
        assert np.array_equal(prefix_of(seq, p.context, p.turn), renderer.whole(messages[: 2 * p.turn + 1]))
        assert renderer.read(continuation_of(seq, p.context, p.turn)) == messages[2 * p.turn + 1]["content"]


def test_every_transcript_not_taken_is_counted_with_its_line(tmp_path):
    mixed = [dict(t, writer=w) for t, w in zip(transcript()["turns"], ("random", "expert"), strict=True)]
    odd = [dict(transcript()["turns"][0], action="öffne 門")]
    rows = [
        transcript(),
        "{broken",
        "[1]",
        transcript(turns=[]),
        "",
        transcript(seed="3"),
        {k: v for k, v in transcript().items() if k != "score"},
        transcript(turns=mixed),
        transcript(success=False),
        transcript(domain="science"),
        transcript(turns=odd),
        transcript(instruction="long " * 50),
        transcript(score=float("inf")),
        transcript(source={"kind": "oracle", "id": "x"}),
        transcript(instruction="half \ud800"),
    ]
    path, taken = write(tmp_path / "t.jsonl", rows), []
    options = {"domain": "game", "expert_only": True, "success_only": True, "max_context_tokens": {"game": 120}}
    result = import_file(path, CharacterRenderer(), taken.append, **options)
    assert result.refused == {
        "not JSON": [2],
        "not a JSON object": [3],
        "no assistant turn": [4],
        "wrong field": [6, 14],
        "missing field": [7],
        "not played by an expert alone": [8],
        "not successful": [9],
        "other domain": [10],
        "action does not survive the tokenizer": [11],
        "longer than the limit": [12],
        "invalid sequence": [13],
        "text is not Unicode": [15],
    }
    assert len(taken) == result.taken == 1 and result.rows == 14 == sum(result.counts.values())
    assert result.examples["missing field"] == "line 7: field 'score' is missing"
    assert "1 of 14 rows taken" in str(result) and "lines 6, 14" in str(result)


def chat(*messages, **fields):
    return {"messages": [{"role": r, "content": c} for r, c in messages], **fields}


def test_chats_come_in_and_what_does_not_fit_is_counted(tmp_path):
    good = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"), ("user", "open")]
    pair = (("user", "u"), ("assistant", "a"))
    image, bad_call, named = chat(*pair), chat(*pair), chat(*pair)
    image["messages"][0]["content"] = [{"type": "image_url", "image_url": {}}]
    bad_call["messages"][1] |= {"content": None, "tool_calls": [{"id": "1"}]}
    named["messages"][1] |= {"tool_calls": [{"function": {"name": "f", "arguments": "{no json"}}]}
    rows = [
        chat(*good, score=0.25, success=False, task="t", seed=9, id="first"),
        chat(("user", "u")),
        chat(("assistant", "a"), ("user", "u")),
        chat(("user", "u"), ("user", "v"), ("assistant", "a")),
        chat(("user", "u"), ("tool", "x"), ("assistant", "a")),
        chat(("user", "u"), ("narrator", "x"), ("assistant", "a")),
        image,
        bad_call,
        named,
        {"messages": "hello"},
        {"messages": [1]},
        chat(("user", "u"), ("assistant", " ")),
        chat(("user", "u"), ("assistant", None)),
        chat(*pair, tools="{"),
        chat(*pair, tools=[1]),
        chat(*pair, score=10**400),
    ]
    path, taken = write(tmp_path / "chats.jsonl", rows), []
    result = import_file(path, CharacterRenderer(), taken.append, "chat", domain="science")
    assert result.refused == {
        "no assistant turn": [2],
        "roles out of order": [3, 4, 5],
        "unsupported role": [6],
        "unsupported content": [7, 13],
        "tool call that cannot be read": [8, 9],
        "wrong field": [10, 11, 16],
        "empty action": [12],
        "tools that cannot be read": [14, 15],
    }
    (first,) = taken
    assert first.turns == 2 and first.actions == ("a", "b")
    assert first.outcome.reward == 0.25 and not first.outcome.success
    assert (first.domain, first.task, first.seed) == ("science", "t", 9)
    assert first.metadata == {"id": "first", "final_observation": "open"}
    assert first.source.kind == "demonstration" and first.source.id == "chats.jsonl"
    # Messages as JSON text, and metadata of any kind, as some data sets have them.
    as_text = {"messages": json.dumps(chat(*pair)["messages"]), "metadata": "m"}
    assert import_file(write(tmp_path / "text.jsonl", [as_text]), CharacterRenderer(), taken.append, domain="d").taken == 1
    assert taken.pop().metadata == {"metadata": "m"}
    without = import_file(path, CharacterRenderer(), taken.append, "chat")
    assert without.refused["no domain"] == [1, 2] and without.taken == 0


def test_what_files_look_like(tmp_path):
    """JSON lines, arrays, one object, over several lines or not, packed or not: the same rows."""
    rows = [chat(("user", f"u{n}" + "x" * n), ("assistant", "a")) for n in range(3)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text("\n " + json.dumps(rows, indent=2) + "\n")
    (tmp_path / "c.jsonl").write_bytes(b"\xef\xbb\xbf" + "\r\n\r\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    import pyarrow
    import pyarrow.parquet

    with pyarrow.OSFile(str(tmp_path / "e.jsonl.zst"), "wb") as raw, pyarrow.CompressedOutputStream(raw, "zstd") as file:
        file.write("\n".join(map(json.dumps, rows)).encode())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    found = {}
    for path in sorted(tmp_path.iterdir()):
        taken, told = [], []
        result = import_file(path, CharacterRenderer(), taken.append, domain="d",
                             progress=lambda done, total, told=told: told.append((done, total)))
        found[path.name] = [(s.source.revision, s.contexts[0].tokens.tolist()) for s in taken]
        assert result.format == "chat" and told[-1] == (path.stat().st_size,) * 2
    assert len(found) == 6 and all(value == found["a.json"] and len(value) == 3 for value in found.values())
    (tmp_path / "one.json").write_text(json.dumps(rows[0], indent=3))
    assert import_file(tmp_path / "one.json", CharacterRenderer(), print, domain="d").taken == 1
    whole = import_file(tmp_path, CharacterRenderer(), lambda s: None, domain="d")
    assert whole.taken == 19 and whole.format == "chat"


@pytest.mark.parametrize("text, taken, refused", [
    ('[{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, {"messa', 1, [2]),
    ('[{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}, nonsense, {}]', 1, [2]),
    ('{\n "messages": [{"role": "user", "content": "u"},\n {"role": "assi', 0, [1]),
    ('{"messages": [\n{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}', 1, [1]),
])  # fmt: skip
def test_broken_json(tmp_path, text, taken, refused):
    (tmp_path / "x.json").write_text(text)
    result = import_file(tmp_path / "x.json", CharacterRenderer(), lambda s: None, "chat", domain="d")
    if refused == [1] and taken:  # an object over lines whose second is a row of its own is still one broken object
        assert result.rows >= 1 and result.refused["not JSON"][0] == 1
        return
    assert (result.taken, result.refused) == (taken, {"not JSON": refused})


GOOD = b'{"messages": [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]}'
TALK = b'[{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]'


@pytest.mark.parametrize("lines, taken, refused", [
    ([b'{"a": 1}{"b": 2}', GOOD, GOOD], 2, {"not JSON": [1]}),
    ([GOOD + b" and more", GOOD, GOOD], 2, {"not JSON": [1]}),
    ([GOOD.replace(b'"u"', b'"\xe9"'), GOOD, GOOD], 2, {"not JSON": [1]}),
    ([TALK, TALK, TALK], 3, {}),
    ([b"[" + GOOD + b"]", b"[" + GOOD + b", " + GOOD + b"]"], 3, {}),
    ([b"[" + GOOD + b"]", GOOD], 1, {"not JSON": [2]}),
    ([TALK, b"tail"], 1, {"not JSON": [2]}),
    ([GOOD, GOOD.replace(b"[{", b'[], "task": "\\ud800", "messages": [{')], 1, {"text is not Unicode": [2]}),
])  # fmt: skip
def test_no_line_costs_or_hides_another(tmp_path, lines, taken, refused):
    """A first line that is wrong is one row, and what stands behind an array is taken, or counted."""
    (tmp_path / "x.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    result = import_file(tmp_path / "x.jsonl", CharacterRenderer(), lambda s: None, "chat", domain="d")
    assert (result.taken, result.refused) == (taken, refused)


def test_damaged_files_say_so(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"messages": []}\n' * 99)[:-12])
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    for name in ("a.jsonl.gz", "b.parquet"):
        with pytest.raises(ImportFailed, match=name):
            import_file(tmp_path / name, CharacterRenderer(), print, "chat")


def test_a_damaged_file_costs_a_folder_its_own_rows_only(tmp_path):
    rows = [json.loads(GOOD.replace(b'"u"', b'"%s"' % random.Random(n).randbytes(2000).hex().encode())) for n in range(500)]
    (tmp_path / "demos").mkdir()
    packed = gzip.compress("\n".join(map(json.dumps, rows)).encode())
    (tmp_path / "demos" / "a.jsonl.gz").write_bytes(packed[: 3 * len(packed) // 4])
    (tmp_path / "demos" / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    (tmp_path / "demos" / "c.jsonl").write_bytes(GOOD + b"\n")
    taken = []
    result = import_file(tmp_path / "demos", CharacterRenderer(), taken.append, domain="d")
    assert result.refused == {DAMAGED: ["a.jsonl.gz", "b.parquet"]} and result.format == "chat"
    assert result.taken == len(taken) == result.rows - 2 and 1 < result.taken < 500, "what stood before the damage is there"
    assert "cannot be read" in str(result) and "b.parquet" in str(result)
    assert formats_of(tmp_path / "demos") == ["chat"]
    with PrefixStore.open(tmp_path / "store", "a") as store:
        names = [tmp_path / "demos" / name for name in ("b.parquet", "c.jsonl")]
        done = import_into(store, names, CharacterRenderer(), domain="d")
        assert (done.taken, done.refused) == (1, 1), "several files that are named are as those of a folder"
        assert import_into(store, names, CharacterRenderer(), strict=True, domain="d").version is None
    (tmp_path / "demos" / "c.jsonl").unlink()
    (tmp_path / "demos" / "a.jsonl.gz").unlink()
    for read in (formats_of, lambda folder: import_file(folder, CharacterRenderer(), print, domain="d")):
        with pytest.raises(ImportFailed, match="b.parquet"):
            read(tmp_path / "demos")


def test_flipped_bits_in_packed_files_say_so(tmp_path):
    """Whatever byte of a packed file is wrong: it is read, or it is named, without a traceback."""
    import pyarrow
    import pyarrow.parquet

    rows = [json.loads(GOOD.replace(b'"u"', b'"%d"' % n)) for n in range(30)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", compression="none")
    for name, data in (("a.jsonl.gz", gzip.compress("\n".join(map(json.dumps, rows)).encode())),
                       ("a.parquet", (tmp_path / "a.parquet").read_bytes())):
        failed = 0
        for at in range(1, len(data), 23):
            (tmp_path / name).write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
            try:
                import_file(tmp_path / name, CharacterRenderer(), lambda s: None, "chat", domain="d")
            except ImportFailed as error:
                assert name in str(error)
                failed += 1
        assert failed


def test_auto_recognises_the_format_or_says_what_it_saw(tmp_path):
    one = import_file(write(tmp_path / "a.jsonl", [transcript()] * 2), CharacterRenderer(), lambda s: None)
    two = import_file(write(tmp_path / "b.jsonl", [chat(("user", "u"), ("assistant", "a"))]), CharacterRenderer(),
                      lambda s: None, domain="science")  # fmt: skip
    assert (one.format, two.format) == ("transcripts", "chat")
    with pytest.raises(UnknownFormat, match=r"(?s)no format that is known.*'text' \(str\).*sharegpt.*verifiers"):
        import_file(write(tmp_path / "c.jsonl", [{"text": "x"}]), CharacterRenderer(), print)
    with pytest.raises(UnknownFormat, match="holds no JSON object"):
        import_file(write(tmp_path / "d.jsonl", [""]), CharacterRenderer(), print)
    with pytest.raises(UnknownFormat, match="could be transcripts or chat"):
        import_file(write(tmp_path / "e.jsonl", [chat(("user", "u")) | {"turns": []}]), CharacterRenderer(), print)
    with pytest.raises(UnknownFormat, match="mixes formats: row 1 is chat, row 2 is transcripts"):
        import_file(write(tmp_path / "f.jsonl", [chat(("user", "u")), transcript()]), CharacterRenderer(), print)
    with pytest.raises(FileNotFoundError):
        import_file(tmp_path / "nowhere.jsonl", CharacterRenderer(), print)
    with pytest.raises(UnknownFormat, match="format 'x' is none of auto, transcripts"):
        import_file(tmp_path / "a.jsonl", CharacterRenderer(), print, format="x")
    with pytest.raises(UnknownFormat, match="give a renderer"):
        import_file(tmp_path / "a.jsonl", None, print)


def test_into_a_store_in_batches_with_duplicates(tmp_path):
    rows = [chat(("user", f"u{n % 7}"), ("assistant", "a")) for n in range(10)] + [{"messages": []}]
    path = write(tmp_path / "a.jsonl", rows)
    with PrefixStore.open(tmp_path / "store", "w") as store:
        done = import_into(store, [path], CharacterRenderer(), domain="d", commit_every=3)
        assert (done.taken, done.refused, done.results[0].duplicates) == (10, 1, 3)
        assert len(store) == 7 and len(store.versions()) >= 2 and done.version == store.version
        again = import_into(store, [path], CharacterRenderer(), domain="d")
        assert again.results[0].duplicates == 10 and len(store) == 7
        strict = import_into(store, [write(tmp_path / "b.jsonl", [chat(("user", "new"), ("assistant", "a")), "{"])],
                             CharacterRenderer(), domain="d", strict=True, commit_every=1)
        assert strict.version is None and strict.refused == 1 and store.pending == 0 and len(store) == 7
        assert store.verify().ok and store.fingerprints() == [Fingerprint("characters", "remembers")]


def test_the_agent_loop_may_bring_its_own_messages(tmp_path):
    def shout(row):
        return [{"role": "user", "content": row["turns"][0]["observation"].upper()},
                {"role": "assistant", "content": row["turns"][0]["action"]}]  # fmt: skip

    taken, one_turn = [], transcript(turns=transcript()["turns"][:1])
    import_file(write(tmp_path / "a.jsonl", [one_turn]), CharacterRenderer(), taken.append, messages_of=shout)
    assert CharacterRenderer().read(prefix_of(taken[0], 0, 0)) == "A DOOR"


# ---------------------------------------------------------------------------------------------------------------
# The store's own export


@pytest.mark.parametrize("extras", [False, True])
def test_export_and_import_are_the_same_content(tmp_path, extras):
    sequences = [example_sequence(seed, extras=extras) for seed in range(20)]
    rows = [to_row(s) for s in sequences]
    assert any(row["contexts"][-1]["parent"] is not None for row in rows)
    assert all("extras" in c for row in rows for c in row["contexts"]) == extras
    path, taken = write(tmp_path / "e.jsonl", rows), []
    result = import_file(path, None, taken.append)
    assert result.format == "prefix_store" and result.counts == {"taken": 20}
    assert [content_hash(s) for s in taken] == [content_hash(s) for s in sequences] == [row["id"] for row in rows]
    changed = json.loads(json.dumps(rows[0]))
    changed["record"]["seed"] += 1
    cut = json.loads(json.dumps(rows[1]))
    cut["contexts"][0]["tokens"] = cut["contexts"][0]["tokens"][:-4]
    write(path, [rows[0], changed, rows[2] | {"layout": 2}, cut])
    result = import_file(path, None, lambda s: None, tokenizer="another")
    assert set(result.refused) - {"invalid sequence", "export that cannot be read"} == {
        "written with another tokenizer", "export whose content is not what its id says", "export of another layout"}
    assert len(sum(result.refused.values(), [])) == 4


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(sorted({
        "role", "content", "from", "value", "loss", "messages", "conversations", "tools", "tool_calls", "function", "name",
        "arguments", "id", "item_id", "history", "info", "prompt", "completion", "reward", "traces", "nodes", "message",
        "parent", "sampled", "rewards", "score", "turns", "action", "observation", "domain", "task", "source", "seed",
        "metadata", "Step", "Observation", "Action", "Thinking", "contexts", "record", "layout", "segments", "tokens",
        "fork", "success", "split", "tales episode", "file", "environment", "agent", "tool_call_ids", "errors", "error",
        "text", "type", "weight", "system"})), inner, max_size=4),
    max_leaves=6)  # fmt: skip
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt", "function_call", "observation", "x"])
message = st.fixed_dictionaries({}, optional={
    "role": roles, "from": roles, "content": st.text(max_size=5) | json_values, "value": st.text(max_size=5),
    "loss": json_values, "tool_calls": json_values, "agent": st.text(max_size=2), "message": json_values})
rows_near = st.one_of(*(st.fixed_dictionaries({key: st.lists(message | json_values, max_size=4)}, optional={
    "domain": st.just("d"), "tools": json_values, "info": json_values, "reward": json_values, "completion": json_values,
    "metadata": json_values, "item_id": json_values, "rewards": json_values, "seed": json_values, "system": json_values})
    for key in ("messages", "conversations", "history", "prompt", "turns", "nodes", "traces", "contexts")))  # fmt: skip


@given(st.lists(json_values | rows_near, min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_no_row_can_crash_an_import(tmp_path_factory, rows):
    path = tmp_path_factory.mktemp("fuzz") / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in [{}, *rows]), encoding="utf-8")
    for name in FORMATS:
        taken = []
        result = import_file(path, CharacterRenderer(), taken.append, name, domain="d")
        assert len(taken) + sum(map(len, result.refused.values())) == result.rows
        if name != "tales":
            assert result.rows > len(rows)
        # The last net of the import is for what its parts did not foresee; they should foresee this.
        assert "unreadable row" not in result.refused, (name, result.examples)
        for sequence in taken:
            check_sequence(sequence)


@given(st.binary(max_size=200), st.sampled_from(["x.jsonl", "x.json"]))
@example(b"0", "x.json")
@example(b"[0", "x.jsonl")
@settings(max_examples=50, deadline=None)
def test_no_bytes_can_crash_an_import(tmp_path_factory, data, name):
    path = tmp_path_factory.mktemp("fuzz") / name
    path.write_bytes(b"[" + data if name == "x.json" else data)
    result = import_file(path, CharacterRenderer(), lambda s: None, "chat", domain="d")
    assert result.taken == 0 and result.rows == sum(map(len, result.refused.values()))


words = st.text(st.characters(max_codepoint=255, exclude_characters="<>"), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(st.tuples(st.sampled_from(["assistant", "user", "tool", "system", "context"]), words), max_size=12),
       st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_prefix_is_what_the_template_gives(parts, forgets):
    """Any order of roles: prefixes are renderings, actions the messages with loss, nothing between is lost."""
    messages = [{"role": "user", "content": "start"}]
    for role, text in parts:
        one = {"role": "assistant" if role == "context" else role, "content": f"<t>{text}" if role == "assistant" else text}
        messages.append(one | ({"loss": False} if role == "context" else {}))
    wanted = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("loss", True)]
    if not wanted:
        return
    renderer = CharacterRenderer(forgets)
    sequence = render(messages, renderer)
    check_sequence(sequence)
    points = decision_points_of(sequence)
    assert len(points) == len(wanted) == sequence.turns
    for point, number in zip(points, wanted, strict=True):
        assert np.array_equal(prefix_of(sequence, point.context, point.turn), renderer.whole(messages[:number]))
        assert renderer.read(continuation_of(sequence, point.context, point.turn)) == messages[number]["content"]


def test_exported_rows_survive_json():
    row = json.loads(json.dumps(to_row(example_sequence(3, fork=True, turns=4))))
    assert content_hash(from_row(row)) == row["id"]
