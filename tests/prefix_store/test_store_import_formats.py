"""Each format that is known, from a small file of its real structure (tests/prefix_store/samples)."""

import json
import pathlib

import pytest
from character_renderer import CharacterRenderer

from prefix_store.importers import UnknownFormat, import_file
from prefix_store.trajectory import check_sequence, continuation_of, decision_points_of, prefix_of

SAMPLES = pathlib.Path(__file__).parent / "samples"


def taken_from(name, form=None, **options):
    """The sequences of a sample, and the import's result; every sequence is checked."""
    taken = []
    options = {"domain": "d"} | options
    result = import_file(SAMPLES / name, CharacterRenderer(), taken.append, **options)
    for sequence in taken:
        check_sequence(sequence)
    assert form is None or result.format == form, result
    return taken, result


def turns(sequence):
    """[(what stood before the action, action)] as text, without the ends."""
    read = CharacterRenderer().read
    return [(read(prefix_of(sequence, p.context, p.turn)), read(continuation_of(sequence, p.context, p.turn)))
            for p in decision_points_of(sequence)]


def test_openai_chats_with_tools():
    (tools, plain), result = taken_from("chat_tools.jsonl", "chat")
    assert result.counts == {"taken": 2}
    (before, calls), (after, answer) = turns(tools)
    assert '"name": "get_weather"' in before and before.endswith("Is it colder in Bergen or in Oslo?")
    assert calls == "".join(
        f'[{{"name": "get_weather", "arguments": {{"town": "{town}"}}}}]' for town in ("Bergen", "Oslo"))
    assert after == before + calls + '{"celsius": 4}{"celsius": -3}' and answer == "Oslo is colder: -3 degrees."
    assert tools.actions == (calls, answer) and tools.metadata == {"final_observation": "Thank you"}
    # A message of weight 0 is context, a system message in the middle stands where it stood.
    assert turns(plain) == [("Name a prime.", "Seven."), ("Name a prime.Seven.Or eleven.Be brief now.Another?", "13")]
    assert plain.actions == ("Seven.", "13")


def test_sharegpt_with_tools():
    (tools, plain), _ = taken_from("sharegpt_tools.json", "sharegpt")
    (before, call), (after, answer) = turns(tools)
    assert before.startswith('[{"type": "function", "function": {"name": "get_time"') and "Tell the time." in before
    assert call == '[{"name": "get_time", "arguments": {"town": "Lima"}}]' and after.endswith('{"time": "14:05"}')
    assert answer == "It is 14:05 in Lima." and turns(plain) == [("Say hello.", "Hello.")]


def test_agentgym_learns_only_from_messages_with_loss():
    (one,), _ = taken_from("agentgym.json", "agentgym")
    (before, first), (_, second) = turns(one)
    assert before.endswith("I'll follow your instructions.Walls left and right. The goal is two steps north.")
    assert one.actions == (first, second) and first.startswith("Thought:\nNorth")
    assert [s.kind for s in one.contexts[0].segments] == ["prompt", "action", "observation", "action"]
    assert (one.environment, one.task, one.seed, one.metadata["id"]) == ("agentgym:maze", "maze", 17, "maze_17")
    assert one.outcome.success and one.outcome.reward == 1.0


def test_eto_begins_with_an_ok_that_nobody_decided():
    (one,), _ = taken_from("eto.json", "eto")
    assert [action for _, action in turns(one)] == list(one.actions) and len(one.actions) == 2
    assert turns(one)[0][0].endswith("heat.OKMelt the ice. You are in the kitchen.")
    assert one.outcome.reward == 0.75 and not one.outcome.success
    (one,), _ = taken_from("eto.json", success_reward=0.7)
    assert one.outcome.success


def test_hermes_stays_the_text_that_its_system_prompt_asks_for():
    (one,), _ = taken_from("hermes.json", "hermes")
    (before, call), (after, _) = turns(one)
    assert call.startswith("<tool_call>\n{") and one.actions[0] == call
    assert after == before + call + '<tool_response>\n{"name": "add", "content": 5}\n</tool_response>'


def test_swe_agent_folders():
    (find, fix), result = taken_from("swe_agent", "swe-agent")
    assert result.rows == 2 and fix.environment == find.environment == "swe-agent"
    (before, call), (after, done) = turns(fix)
    assert before.endswith("demonstration: lsISSUE: sum.py does not parse.")
    assert call == 'I look at the file.[{"name": "bash", "arguments": {"command": "cat sum.py"}}]'
    assert after == before + call + "def sum(a, b)\n    return a + b" and done == 'Done.[{"name": "submit", "arguments": {}}]'
    assert fix.outcome.success and fix.outcome.metadata == {"judged_by": "exit_status"}
    assert fix.metadata == {"exit_status": "submitted", "final_observation": "diff --git a/sum.py b/sum.py"}
    assert not find.outcome.success and find.outcome.reward == 0.0 and find.turns == 2
    assert len(taken_from("swe_agent", success_only=True)[0]) == 1


def test_mini_swe_agent_new_and_old():
    (one,), _ = taken_from("mini", "mini-swe-agent")
    (before, call), _ = turns(one)
    assert before.startswith('[{"type": "function", "function": {"name": "bash"')
    assert call == 'Let me look.[{"name": "bash", "arguments": {"command": "ls"}}]' and one.turns == 2
    assert one.environment_version == "2.0.0" and one.outcome.success and "final_observation" not in one.metadata
    (old,), _ = taken_from("mini_old.traj.json", "chat")
    assert old.turns == 2 and old.actions[0].endswith("echo hello\n```")
    assert taken_from("mini_old.traj.json", "mini-swe-agent", format="mini-swe-agent")[0][0].turns == 2


def test_verifiers_rollouts():
    (tool, plain), result = taken_from("verifiers_results.jsonl", "verifiers")
    assert result.refused == {"the rollout ended with an error": [3]} and "no answer" in str(result)
    (before, call), (after, answer) = turns(tool)
    assert before.startswith('[{"type": "function", "function": {"name": "search"')
    assert call == '[{"name": "search", "arguments": {"what": "pen"}}]' and after.endswith("in the drawer")
    assert answer == "In the drawer." and tool.outcome.success and tool.outcome.metadata["metrics"]["correct"] == 1.0
    assert turns(plain) == [("What is 2+2? ", "5")] and not plain.outcome.success and plain.task == "1"


def test_verifiers_traces_give_each_sampled_message_once():
    (first, second), result = taken_from("verifiers_traces.jsonl", "verifiers")
    assert result.rows == 2 and first.actions == ("crane", "trace") and second.actions == ("brave",)
    assert turns(second)[0][0] == "Guess the word.Five letters.craneTwo are right.A hint: it begins with b."
    assert first.outcome.reward == 0.5 and first.environment == "words" and first.task == "WordTask:7"


def test_tales_episodes():
    (lost, won), result = taken_from("tales", "tales")
    assert list(result.skipped) == ["TWXCoin/a0_s20241001_steps100.json"] and "skipped" in str(result)
    assert lost.actions == ("take lamp", "go north") and won.actions == ("take lamp", "go south")
    assert turns(won)[0] == ("You are in a hall. A lamp is here.\n> ", "take lamp")
    assert (won.environment, won.seed, won.outcome.success, lost.outcome.success) == ("TWXCoin", 20241001, True, False)
    assert lost.outcome.reward == 0.5 and won.metadata == {"scores": [0.0, 1.0], "final_observation": "A coin! You have won."}
    (shown, _), _ = taken_from("tales", system="Play well.")
    assert turns(shown)[0][0].startswith("Play well.You are")


def test_tools_as_text_for_templates_without_tools():
    (tools, _), _ = taken_from("chat_tools.jsonl", tools_as_text=True)
    (before, calls), (after, _) = turns(tools)
    assert "<tools>\n[{" in before and calls.count("<tool_call>\n{") == 2
    results = "\n".join(f'<tool_response>\n{{"celsius": {c}}}\n</tool_response>' for c in (4, -3))
    assert after.endswith(results)


def test_every_sample_alone_is_recognised_and_a_mixed_folder_says_what_it_took():
    taken, result = taken_from(".")
    assert set(result.format.split(", ")) == {
        "agentgym", "chat", "eto", "hermes", "mini-swe-agent", "sharegpt", "swe-agent", "tales", "verifiers"}
    assert result.rows == sum(result.counts.values()) and len(taken) == result.taken
    assert list(result.refused) == ["the rollout ended with an error"]
    assert result.refused["the rollout ended with an error"] == ["verifiers_results.jsonl:3"]


def test_the_wrong_format_is_refused_row_by_row(tmp_path):
    taken, result = taken_from("eto.json", format="chat")
    assert not taken and result.refused == {"missing field": [1]}
    (tmp_path / "x.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(UnknownFormat, match="none of its 1 files"):
        import_file(tmp_path, CharacterRenderer(), print)
