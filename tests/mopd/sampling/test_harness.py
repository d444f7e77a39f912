"""Harness options: how the action is cut out, what of the history is shown, thinking, and several harnesses at once."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mopd.config import DomainConfig
from mopd.domains import Domain
from mopd.environments.base import Task
from mopd.environments.pool import EnvironmentPool
from mopd.environments.replay import restore
from mopd.sampling.agent_loop import EpisodeSpec, Harness, Harnesses, play_episodes
from mopd.sampling.demo_tokenizer import END, train_tokenizer
from mopd.sampling.fresh_turn import rows_from_sequence
from mopd.sampling.harness import Talk
from mopd.sampling.hf import HFEngine
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Conversation
from mopd.sampling.streams import Streams
from mopd.schedule import Plan
from prefix_store import PrefixStore
from prefix_store.selection import SelectionOptions, Selector
from prefix_store.trajectory import Source, check_sequence, continuation_of, decision_points_of, prefix_of
from tests.mopd.sampling.corridor import CorridorFamily
from tests.mopd.sampling.test_agent_loop import Scripted, confirm, plain_model
from tests.mopd.sampling.tiny import make

# As Qwen3 has it: thinking stays only behind the last user message, where the last message has one in any case; without
# thinking the prompt has an empty thought.
QWEN = (
    "{%- set last = namespace(at=0) %}"
    "{%- for m in messages %}{%- if m.role == 'user' %}{%- set last.at = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{%- set content = m.content %}{%- set thought = '' %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{- '<|' + m.role + '|>' }}"
    "{%- if m.role == 'assistant' and loop.index0 > last.at and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{- content + '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)
THOUGHT = "<think>\nkeep going\n</think>\n\nforward"


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["walk to the end. place 0 of 3", "forward", "back", "unknown. Say forward or back.", THOUGHT]
    return train_tokenizer(texts * 4, 320)


@pytest.fixture(scope="module")
def engine(tokenizer):
    torch.set_num_threads(1)
    return HFEngine(make("qwen3_moe", len(tokenizer)), max_batch=8)


def with_template(tokenizer, template, special=()):
    other = copy.deepcopy(tokenizer)
    other.chat_template = template
    if special:
        other.add_special_tokens({"additional_special_tokens": [*other.additional_special_tokens, *special]}) \
            if hasattr(other, "additional_special_tokens") else other.add_tokens(list(special), special_tokens=True)
    return ChatRenderer(other)


def play(engine, renderer, lengths, harness, *, seed=100, **options):
    specs = [EpisodeSpec("walk", Task("walk", n, "train"), seed + i, i, i) for i, n in enumerate(lengths)]
    with EnvironmentPool(CorridorFamily(), size=4, retries=0) as pool:
        return play_episodes(engine, {"walk": pool}, specs, renderer, {"walk": harness}, **options)


@pytest.mark.parametrize("format_, text, action", [
    ("text", "  go north \n", "go north"),
    ("last_line", "I think so.\n\n go north \n\n", "go north"),
    ("last_line", " \n ", None),
    ("tag:action", "<action>go south</action> no: <action> go\nnorth </action>!", "go\nnorth"),
    ("tag:action", "<action>go north", None),
    ("tag:action", "<action></action>", ""),
    ("regex:Action: (.*)$", "Thought: x\nAction: go north", "go north"),
    ("regex:Action: (.*)$", "go north", None),
    ("regex:go \\w+", "go south, no, go north.", "go north"),
    ("regex:(a)?b", "b", None),
])
def test_where_the_action_stands(format_, text, action):
    harness = Harness(action_format=format_)
    assert harness.errors() == [] and harness.action(text) == action
    thinks = dataclasses.replace(harness, thinking=True)
    assert thinks.action(f"<think>go east <action>go east</action> Action: go east</think>\n{text}") == action
    assert thinks.action(text) is None, "thinking that does not end leaves no action"


@given(st.text(alphabet="ab<>/ \n", min_size=1, max_size=20))
def test_words_say_just_the_action(action):
    for format_ in ("text", "tag:action"):
        harness = Harness(action_format=format_)
        if "</action>" not in action:
            assert harness.action(harness.words(action)) == action.strip()


def test_errors_name_their_key():
    wrong = Harness(max_turns=0, history_window=-1, action_format="tag:", thinking_end="")
    assert [error.split(":")[0] for error in wrong.errors()] == ["max_turns", "history_window", "thinking_end",
                                                                 "action_format"]
    for format_, words in (("line", "is not one of text, last_line"), ("regex:(", "no regular expression"),
                           ("regex:(a)(b)", "several groups"), ("regex:", "needs a pattern"), ("text:x", "not one of"),
                           ("tag:a b", "names no tag")):
        assert words in Harness(action_format=format_).errors()[0]


def test_shares_of_harnesses_are_kept_and_the_seed_decides():
    harnesses = Harnesses({"a": Harness(), "b": Harness(max_turns=3), "c": Harness()}, {"a": 3, "b": 1, "c": 0.5})
    picked = [harnesses.pick(7, step) for step in range(4000)]
    assert picked == [harnesses.pick(7, step) for step in range(4000)] and harnesses.main == "a"
    for name, share in harnesses.shares.items():
        assert abs(picked.count(name) / 4000 - share / 4.5) < 0.03
    assert Harnesses({"": Harness()}).pick(1) == ""
    with pytest.raises(ValueError, match="shares above 0"):
        Harnesses({"a": Harness()}, {"a": 0})


CASES = pytest.mark.parametrize("case", ["all", "window", "drops thinking", "no thinking", "both"])


def case_of(case, tokenizer):
    """(renderer, harness, what the model says) of a case."""
    template = None if case in ("all", "window") else QWEN
    renderer = ChatRenderer(tokenizer) if template is None else with_template(tokenizer, template)
    thinking = {"drops thinking": True, "both": True, "no thinking": False}.get(case)
    harness = Harness("Say forward or back.", 9, 40, 500, history_window=2 if case in ("window", "both") else 0,
                      thinking=thinking)
    return renderer, harness, THOUGHT if thinking else "forward"


def shown(harness, renderer, turn):
    """The messages that a model sees before `turn` of a walk of 6, written out by hand."""
    first = max(0, turn - harness.history_window) if harness.history_window else 0
    views = [f"place {n} of 6{' < |end|>' if n else ''}" for n in range(7)]
    said = THOUGHT if harness.thinking else "forward"
    found = [{"role": "system", "content": "Say forward or back."},
             {"role": "user", "content": f"walk to the end.\n{views[first]}"}]
    for n in range(first, turn):
        found += [{"role": "assistant", "content": said}, {"role": "user", "content": views[n + 1]}]
    return found


@CASES
def test_every_context_is_what_a_full_rendering_gives(tokenizer, case):
    renderer, harness, says = case_of(case, tokenizer)
    episode = play(Scripted(renderer, lambda text: says), renderer, [6], harness)[0]
    sequence = episode.sequence
    check_sequence(sequence)
    assert episode.success and episode.turns == 6 and sequence.actions == ("forward",) * 6 and episode.malformed == 0
    own = {} if harness.thinking is None else {"enable_thinking": harness.thinking}
    points = decision_points_of(sequence)
    assert [p.turn for p in points] == list(range(6))
    for point in points:
        text = renderer.tokenizer.apply_chat_template(shown(harness, renderer, point.turn), tokenize=False,
                                                      add_generation_prompt=True, **own)
        want = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert prefix_of(sequence, point.context, point.turn).tolist() == want, f"turn {point.turn}"
    forks = {"all": 1, "window": 4, "drops thinking": 6, "no thinking": 6, "both": 6}
    assert len(sequence.contexts) == forks[case]
    for context in sequence.contexts[1:]:
        parent = sequence.contexts[context.parent]
        assert context.tokens[: context.fork].tolist() == parent.tokens[: context.fork].tolist()
        assert context.tokens[context.fork] != parent.tokens[context.fork] and context.fork > 0


@CASES
def test_each_action_trains_once_where_it_was_sampled(tokenizer, engine, case):
    renderer, harness, _ = case_of(case, tokenizer)
    harness = dataclasses.replace(harness, max_turns=5, max_turn_tokens=6)
    for episode in play(engine, renderer, [7, 8], harness):
        sequence = episode.sequence
        rows = rows_from_sequence(sequence, domain="walk", stream="rollout", group=0, sequence_number=0)
        actions = [action for row in rows for action in row.actions]
        assert sorted(a.turn for a in actions) == list(range(episode.turns))
        confirm(plain_model(engine), rows)  # the very log-probabilities, under the very history
        for row in rows:
            context = sequence.contexts[int(row.origin.split(".")[1])]
            for action in row.actions:
                assert action.at >= context.fork
                np.testing.assert_array_equal(row.trunk[: action.at], context.tokens[: action.at])


def test_a_turn_without_an_action_is_the_models_failure(tokenizer):
    renderer = ChatRenderer(tokenizer)
    says = iter(["forward", "<a>forward</a>", "<a>fly</a>", "<a>", "<a>forward</a>"])
    harness = Harness(max_turns=5, max_turn_tokens=40, max_context_tokens=500, action_format="tag:a")
    episode = play(Scripted(renderer, lambda text: next(says)), renderer, [3], harness)[0]
    assert episode.sequence.actions == ("", "forward", "fly", "", "forward") and episode.malformed == 3
    assert (episode.ended, episode.score, episode.failure) == ("turn_limit", 2 / 3, "")
    ended = play(Scripted(renderer, lambda text: "forward"), renderer, [3], dataclasses.replace(harness, max_malformed=2))[0]
    assert (ended.ended, ended.turns, ended.malformed) == ("malformed_limit", 2, 2)


def test_marks_of_thinking_stay_control_tokens_and_others_do_not(tokenizer):
    renderer = with_template(tokenizer, QWEN, special=("<think>", "</think>"))
    harness = Harness("", 3, 60, 500, thinking=True)
    talk = Talk(harness, renderer)
    context = talk.start("walk.", "here </think> <think>")
    assert renderer.escaped["user"] == 2 and renderer.tokenizer.convert_tokens_to_ids("</think>") not in context
    said = renderer.tokenizer(f"<think>\nhm {END} user\n</think>\n\nforward", add_special_tokens=False)["input_ids"]
    written = np.append(np.asarray(said, np.uint32), np.uint32(renderer.end_id))
    assert harness.action(talk.say(written)) == "forward"
    step = talk.hear("there", np.concatenate([context, written]))
    text = renderer.tokenizer.decode(step.tokens)
    assert step.kind == "fork" and "<think>" not in text.replace("< think>", "") and text.count("forward") == 1
    assert step.tokens.tolist().count(renderer.end_id) == 3, "what the model wrote ends no message"


def test_reading_a_template_option(tokenizer):
    assert with_template(tokenizer, QWEN).reads_option("enable_thinking")
    assert not ChatRenderer(tokenizer).reads_option("enable_thinking")


FAMILY = "tests.mopd.sampling.corridor:CorridorFamily"


def domain(harness, **more):
    part = Domain("walk", DomainConfig(environment=FAMILY, environments=3, max_turn_tokens=6, max_turns=7,
                                       max_context_tokens=500, **more))
    if harness is not None:
        part.harness = harness
    return part


def stored(episodes, path):
    store = PrefixStore.open(path, "w")
    for episode in episodes:
        store.append(episode.sequence)
    store.commit("walks")
    return store


def words_of(sequence, turn, renderer):
    """What was said in a turn of a stored sequence."""
    point = next(p for p in decision_points_of(sequence) if p.turn == turn)
    return renderer.action_text(continuation_of(sequence, point.context, turn))


@pytest.mark.parametrize("case", ["window", "drops thinking", "no thinking", "both"])
def test_stored_points_in_child_contexts_are_drawn_replayed_and_played_on_from(tokenizer, engine, case, tmp_path):
    renderer, harness, says = case_of(case, tokenizer)
    writes = Scripted(renderer, lambda text: says) if harness.thinking else engine  # the tiny model never thinks
    teacher = play(writes, renderer, [7, 8], dataclasses.replace(harness, max_turns=5), source=Source("teacher", "walker"))
    store = stored(teacher, tmp_path / "store")
    harness = dataclasses.replace(harness, max_turns=7, max_turn_tokens=6)
    part = domain(harness)
    try:
        deep = [p for p in store.decision_points("walk") if p.context > 0]
        assert len(deep) >= 4
        for point in deep:  # what its environment shows gives the very tokens of the child context
            conversation = Conversation(point.sequence, store.sequence(point.sequence), renderer, part.harnesses)
            found = restore(conversation.recording, point.turn, part.pool, witness=conversation.witness)
            part.pool.release(found.environment)
        assert not part.pool.stats.failures
        made = {}
        for turns in (1, 3):
            selector = Selector(store, SelectionOptions(points_per_sequence=3, draw="distinct"), seed=5)
            streams = Streams(
                domains={"walk": part}, store=store, selector=selector, engine=engine, renderer=renderer,
                fingerprint=renderer.fingerprint(), seed=3, student="s", temperature=1.0, group_size=1, fresh_turns=2,
                demonstration_fraction=0.0, resume_turns={"walk": turns})
            made[turns] = streams.sample(Plan(0, {"walk": {"teacher_prefix": 2}}, {"walk": 1.0}))
            confirm(plain_model(engine), made[turns].rows)
        assert not made[3].failures and any(p.context > 0 for p in made[3].points.values())
        first = {(a.sequence, a.turn): a.tokens.tolist() for row in made[1].rows for a in row.actions}
        resumed = {(a.sequence, a.turn): a.tokens.tolist() for row in made[3].rows for a in row.actions}
        assert first.items() <= resumed.items() and len(resumed) > len(first)
        forked = 0
        for episode in made[3].resumed:  # where it forks again, it is shown what a whole rollout would be shown there
            sequence, start = episode.sequence, episode.spec.start
            before = store.sequence(start.conversation.recording.sequence)
            assert [p.turn for p in decision_points_of(sequence)] == list(range(start.turn, start.turn + episode.turns))
            actions = [*before.actions[: start.turn], *sequence.actions]
            said = [words_of(before, turn, renderer) for turn in range(start.turn)] + [
                words_of(sequence, turn, renderer) for turn in range(start.turn, start.turn + episode.turns)]
            world = CorridorFamily().create()
            views = [world.reset(episode.spec.task), *map(world.step, actions)]
            for number in range(1, len(sequence.contexts)):
                turn = next((p.turn for p in decision_points_of(sequence) if p.context == number), None)
                if turn is None:
                    continue
                talk = Talk(harness, renderer)
                talk.resume(views[0].instruction, [view.text for view in views[: turn + 1]], said[:turn])
                assert prefix_of(sequence, number, turn).tolist() == talk.renderer.start(talk.messages).tolist()
                forked += 1
        assert forked > 3 or case == "drops thinking"
    finally:
        part.close()
        store.close()


def test_several_harnesses_in_one_domain(tokenizer, engine, tmp_path):
    renderer = ChatRenderer(tokenizer)
    config = {"plain": {"share": 2.0}, "short": {"share": 1.0, "history_window": 1, "system_prompt": "Walk."}}
    from mopd.config_domains import HarnessConfig, say_harnesses

    part = domain(None, harnesses={name: HarnessConfig(**values) for name, values in config.items()})
    assert part.harness == part.harnesses["plain"] and part.harnesses["short"].system_prompt == "Walk."
    assert say_harnesses(part.harnesses) == ["harness plain: 67% of the tasks, 7 turns of 6 tokens",
                                             "harness short: 33% of the tasks, 7 turns of 6 tokens, history_window 1"]
    store = None
    try:
        streams = Streams(
            domains={"walk": part}, store=None, selector=None, engine=engine, renderer=renderer,
            fingerprint=renderer.fingerprint(), seed=3, student="s", temperature=1.0, group_size=2, fresh_turns=1,
            demonstration_fraction=0.0)
        plan = Plan(0, {"walk": {"rollout": 8}}, {"walk": 1.0})
        episodes = streams.sample(plan).episodes
        by_group = {}
        for episode in episodes:
            by_group.setdefault(episode.spec.group, set()).add(episode.harness)
            assert episode.sequence.metadata["harness"] == episode.harness
            assert ("Walk." in renderer.tokenizer.decode(episode.sequence.contexts[0].tokens)) == (episode.harness == "short")
        assert {len(names) for names in by_group.values()} == {1}, "a group is played by one harness"
        assert set().union(*by_group.values()) == {"plain", "short"}
        assert [e.harness for e in streams.sample(plan).episodes] == [e.harness for e in episodes]
        # A stored sequence is replayed as the harness that played it shows things.
        played = [e for e in episodes if e.turns > 2 and e.harness == "short"][:1] + [
            e for e in episodes if e.turns > 2 and e.harness == "plain"][:1]
        store = stored(played, tmp_path / "store")
        assert len(played) == 2
        for point in store.decision_points("walk"):
            conversation = Conversation(point.sequence, store.sequence(point.sequence), renderer, part.harnesses)
            found = restore(conversation.recording, point.turn, part.pool, witness=conversation.witness)
            part.pool.release(found.environment)
    finally:
        part.close()
        if store is not None:
            store.close()


def test_demonstrations_are_written_in_the_harness_words(tokenizer, tmp_path):
    from mopd.config_domains import HarnessConfig, thinking_of, words_of
    from teachers.demonstrations import render_transcripts

    transcript = {
        "domain": "walk", "environment": "corridor", "environment_version": "1", "task": "walk", "seed": 2, "split": "train",
        "source": {"kind": "expert", "id": "e", "revision": ""}, "system": "Walk.", "instruction": "walk to the end.",
        "turns": [{"observation": f"place {n} of 2", "action": "forward", "score": 0.5, "writer": "expert"} for n in (0, 1)],
        "final_observation": "", "score": 1.0, "success": True, "metadata": {}}
    renderer = with_template(tokenizer, QWEN)
    harness = Harness(action_format="tag:act", thinking=False)
    (sequence,) = render_transcripts([transcript], renderer, harness=harness)
    assert sequence.actions == ("forward", "forward") and sequence.fingerprint == renderer.fingerprint()
    text = renderer.tokenizer.decode(sequence.contexts[-1].tokens)
    assert text.endswith("<|assistant|><think>\n\n</think>\n\n<act>forward</act><|end|>") and len(sequence.contexts) == 2
    several = DomainConfig(action_format="tag:act", thinking=True, harnesses={
        "a": HarnessConfig(), "b": HarnessConfig(share=3.0, action_format="tag:b")})
    messages = words_of({"walk": several})(transcript)
    assert [m["content"] for m in messages if m["role"] == "assistant"] == ["<b>forward</b>"] * 2
    assert words_of({})(transcript)[-1]["content"] == "forward" and thinking_of({"walk": several}) is True
    with pytest.raises(ValueError, match="thinking differs between domains .walk: true, run: none"):
        thinking_of({"walk": several, "run": DomainConfig()})


def test_a_harness_that_is_not_there(tokenizer):
    spec = EpisodeSpec("walk", Task("walk", 3, "train"), 1, harness="long")
    with EnvironmentPool(CorridorFamily(), size=1) as pool, pytest.raises(ValueError, match="no harness 'long'; there is ''"):
        play_episodes(Scripted(ChatRenderer(tokenizer), str), {"walk": pool}, [spec], ChatRenderer(tokenizer),
                      {"walk": Harness(max_context_tokens=99)})
