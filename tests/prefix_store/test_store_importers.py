"""Demonstrations come in token by token, each prefix as the template gives it, and every row not taken is counted."""

import dataclasses
import json

import numpy as np
import pytest

from prefix_store import PrefixStore
from prefix_store.importers import import_chat, import_file, import_transcripts
from prefix_store.importers.base import conversation_contexts
from prefix_store.trajectory import Fingerprint, check_sequence, continuation_of, decision_points_of, prefix_of

ROLES = {"system": 1, "user": 2, "assistant": 3}
END = 4
OFFSET = 10


@dataclasses.dataclass
class Step:
    kind: str
    tokens: np.ndarray
    fork: int = 0


class CharacterRenderer:
    """One token per character up to code point 255, one per role, one that ends a message.

    Where `forgets` is set, its template drops `<…>` thoughts from all assistant messages but the newest, as templates
    of reasoning models do.
    """

    def __init__(self, forgets: bool = False):
        self.forgets = forgets

    def _text(self, text: str) -> list[int]:
        return [OFFSET + ord(c) for c in text if ord(c) < 256]

    def _whole(self, messages) -> np.ndarray:
        ids = []
        for number, message in enumerate(messages):
            text = message["content"]
            if self.forgets and message["role"] == "assistant" and number < len(messages) - 2:
                text = text.rpartition(">")[2]
            ids += [ROLES[message["role"]], *self._text(text), END]
        return np.array([*ids, ROLES["assistant"]], dtype=np.uint32)

    def start(self, messages) -> np.ndarray:
        return self._whole(messages)

    def extend(self, messages, context_tokens) -> Step:
        whole = self._whole(messages)
        count = len(context_tokens)
        if np.array_equal(whole[:count], context_tokens):
            return Step("append", whole[count:])
        same = whole[: min(count, len(whole))] == context_tokens[: min(count, len(whole))]
        return Step("fork", whole, int(np.argmin(same)))

    def action_tokens(self, text: str) -> np.ndarray:
        return np.array([*self._text(text), END], dtype=np.uint32)

    def action_text(self, ids) -> str:
        return "".join(chr(int(i) - OFFSET) for i in ids if i >= OFFSET)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("characters", "forgets" if self.forgets else "remembers")


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
    result = import_transcripts(write(tmp_path / "t.jsonl", [transcript()]), CharacterRenderer(), taken.append)
    assert result.counts == {"taken": 1} and result.turns == 2 and result.rows == 1
    (seq,) = taken
    check_sequence(seq)
    renderer = CharacterRenderer()
    messages = [
        {"role": "system", "content": "Play."},
        {"role": "user", "content": "Find it.\na door"},
        {"role": "assistant", "content": "open door"},
        {"role": "user", "content": "a coin"},
    ]
    assert np.array_equal(prefix_of(seq, 0, 0), renderer.start(messages[:2]))
    assert np.array_equal(prefix_of(seq, 0, 1), renderer.start(messages))
    assert renderer.action_text(continuation_of(seq, 0, 1)) == "take coin" == seq.actions[1]
    assert continuation_of(seq, 0, 1)[-1] == END
    assert np.isnan(seq.contexts[0].behaviour_logprob).all() and (seq.contexts[0].weights_version == -1).all()
    assert seq.outcome.reward == seq.outcome.true_reward == 1.0 and seq.outcome.success
    assert (seq.source.kind, seq.source.id, seq.source.revision) == ("expert", "gold", "r")
    assert seq.metadata == {"ending": "done", "final_observation": "You win.", "scores": [0.0, 1.0]}
    assert [s.kind for s in seq.contexts[0].segments] == ["prompt", "action", "observation", "action"]


def test_a_template_that_forgets_makes_child_contexts():
    renderer = CharacterRenderer(forgets=True)
    messages = []
    for turn in range(4):
        messages.append({"role": "user", "content": f"view {turn}"})
        messages.append({"role": "assistant", "content": f"<thought {turn}>go {turn}"})
    contexts = conversation_contexts(messages, renderer, writers=["expert"] * 4)
    assert len(contexts) > 1 and [c.parent for c in contexts] == [None, *range(len(contexts) - 1)]
    kept = CharacterRenderer()
    assert len(conversation_contexts(messages, kept, writers=["expert"] * 4)) == 1
    seq = dataclasses.replace(_any_sequence(), contexts=contexts, actions=tuple(m["content"] for m in messages[1::2]))
    check_sequence(seq)
    points = decision_points_of(seq)
    assert [p.turn for p in points] == [0, 1, 2, 3]
    for p in points:  # the prefix is exactly what the template gives a model about to write that turn
        assert np.array_equal(prefix_of(seq, p.context, p.turn), renderer.start(messages[: 2 * p.turn + 1]))
        assert renderer.action_text(continuation_of(seq, p.context, p.turn)) == messages[2 * p.turn + 1]["content"]


def _any_sequence():
    from prefix_store.trajectory import example_sequence

    return example_sequence(0, source="expert")


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
    ]
    path, taken = write(tmp_path / "t.jsonl", rows), []
    options = {"domain": "game", "expert_only": True, "success_only": True, "max_context_tokens": 120}
    result = import_transcripts(path, CharacterRenderer(), taken.append, **options)
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
    }
    assert len(taken) == result.taken == 1 and result.rows == 13 == sum(result.counts.values())
    assert result.examples["missing field"] == "line 7: field 'score' is missing"
    assert "1 of 13 rows taken" in str(result) and "lines 6, 14" in str(result)


def chat(*messages, **fields):
    return {"messages": [{"role": r, "content": c} for r, c in messages], **fields}


def test_chats_come_in_and_what_does_not_fit_is_counted(tmp_path):
    good = [("system", "s"), ("user", "u"), ("assistant", "a"), ("user", "v"), ("assistant", "b"), ("user", "open")]
    parts = chat(("user", "u"), ("assistant", "a"))
    parts["messages"][0]["content"] = [{"type": "text", "text": "u1"}, {"type": "text", "text": "u2"}]
    image = chat(("user", "u"), ("assistant", "a"))
    image["messages"][0]["content"] = [{"type": "image_url", "image_url": {}}]
    tool = chat(("user", "u"), ("assistant", "a"))
    tool["messages"][1] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    rows = [
        chat(*good, score=0.25, success=False, task="t", seed=9),
        parts,
        chat(("user", "u")),
        chat(("assistant", "a"), ("user", "u")),
        chat(("user", "u"), ("user", "v"), ("assistant", "a")),
        chat(("user", "u"), ("tool", "x"), ("assistant", "a")),
        image,
        tool,
        {"messages": "hello"},
        {"messages": [1]},
    ]
    path, taken = write(tmp_path / "chats.jsonl", rows), []
    result = import_chat(path, CharacterRenderer(), taken.append, domain="science")
    assert result.refused == {
        "no assistant turn": [3],
        "roles out of order": [4, 5],
        "unsupported role": [6],
        "unsupported content": [7],
        "tool calls": [8],
        "wrong field": [9, 10],
    }
    first, second = taken
    assert first.turns == 2 and first.actions == ("a", "b")
    assert first.outcome.reward == 0.25 and not first.outcome.success
    assert (first.domain, first.task, first.seed, first.metadata["line"]) == ("science", "t", 9, 1)
    assert second.outcome.success and first.source.kind == "demonstration" and first.source.id == "chats.jsonl"
    assert CharacterRenderer().action_text(prefix_of(second, 0, 0)) == "u1u2"
    assert import_chat(path, CharacterRenderer(), taken.append).refused["no domain"] == [*range(1, 11)]


def test_auto_recognises_the_format_and_the_store_takes_the_rows(tmp_path):
    with PrefixStore.open(tmp_path / "store", "w") as store:
        one = import_file(write(tmp_path / "a.jsonl", [transcript()] * 2), CharacterRenderer(), store.append)
        two = import_file(write(tmp_path / "b.jsonl", [chat(("user", "u"), ("assistant", "a"))]), CharacterRenderer(),
                          store.append, domain="science")  # fmt: skip
        store.commit("demonstrations")
        assert (one.format, two.format, store.duplicates, len(store)) == ("transcripts", "chat", 1, 2)
        assert store.verify().ok and store.fingerprints() == [Fingerprint("characters", "remembers")]
    with pytest.raises(ValueError, match="neither `turns` .* nor `messages`.*'text'"):
        import_file(write(tmp_path / "c.jsonl", [{"text": "x"}]), CharacterRenderer(), print)
    with pytest.raises(ValueError, match="holds no JSON object"):
        import_file(write(tmp_path / "d.jsonl", [""]), CharacterRenderer(), print)
    with pytest.raises(FileNotFoundError):
        import_file(tmp_path / "nowhere.jsonl", CharacterRenderer(), print)
    with pytest.raises(ValueError, match="format 'x'"):
        import_file(tmp_path / "a.jsonl", CharacterRenderer(), print, form="x")


def test_the_agent_loop_may_bring_its_own_messages(tmp_path):
    def shout(row):
        return [{"role": "user", "content": row["turns"][0]["observation"].upper()},
                {"role": "assistant", "content": row["turns"][0]["action"]}]  # fmt: skip

    taken, one_turn = [], transcript(turns=transcript()["turns"][:1])
    import_file(write(tmp_path / "a.jsonl", [one_turn]), CharacterRenderer(), taken.append, messages_of=shout)
    assert CharacterRenderer().action_text(prefix_of(taken[0], 0, 0)) == "A DOOR"
