"""The agent loop: outcomes, infrastructure failures, determinism, and tokens that a plain forward pass confirms."""

import copy
import re

import numpy as np
import pytest
import torch

from mopd.environments.pool import EnvironmentPool
from mopd.environments.registry import make_family
from mopd.sampling import agent_loop
from mopd.sampling.agent_loop import EpisodeSpec, Harness, play_episodes
from mopd.sampling.base import Completion, SamplingOptions
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.fresh_turn import FreshTurnPoint, demonstration_rows, rows_from_sequence, sample_fresh_turns
from mopd.sampling.hf import HFEngine
from mopd.sampling.play import play_tasks
from mopd.sampling.rendering import ChatRenderer
from prefix_store import PrefixStore
from prefix_store.trajectory import Source, check_sequence, content_hash, decision_points_of
from tests.mopd.sampling.corridor import CorridorFamily
from tests.mopd.sampling.tiny import make

# Keeps the system prompt and the last three messages: from the third turn on, history is rewritten every time.
WINDOW = (
    "{% for m in messages %}{% if loop.first or loop.index >= loop.length - 2 %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
HARNESS = Harness("Say forward or back.", max_turns=6, max_turn_tokens=5, max_context_tokens=400)


@pytest.fixture(scope="module")
def tokenizer():
    texts = ["walk to the end. place 0 of 3", "forward", "back", "unknown. Say forward or back."]
    return train_tokenizer(texts * 4, 300)


@pytest.fixture(scope="module")
def engine(tokenizer):
    torch.set_num_threads(1)
    return HFEngine(make("qwen3_moe", len(tokenizer)), max_batch=5)


@pytest.fixture
def renderer(tokenizer):
    return ChatRenderer(tokenizer)


class Scripted:
    """An engine whose words are a function of the text before them."""

    version, max_batch, max_positions = 3, 4, 512

    def __init__(self, renderer, answer):
        self.renderer, self.answer, self.ended, self.batches = renderer, answer, [], []

    def generate(self, requests, options):
        self.batches.append(len(requests))
        done = []
        for request in requests:
            tokens = self.renderer.action_tokens(self.answer(self.renderer.tokenizer.decode(request.tokens)))
            cut = tokens[: request.max_tokens]
            finish = "stop" if len(cut) == len(tokens) else "length"
            done.append(Completion(cut, np.full(len(cut), -0.5, np.float32), finish, self.version))
        return done

    def end_sessions(self, sessions):
        self.ended += sessions

    def load_weights(self, weights, version):
        raise NotImplementedError


def specs(lengths, split="train"):
    from mopd.environments.base import Task

    return [EpisodeSpec("walk", Task("walk", n, split), 100 + i, i // 2, i) for i, n in enumerate(lengths)]


def play(engine, renderer, lengths, family=None, harness=HARNESS, **options):
    family = family or CorridorFamily()
    with EnvironmentPool(family, size=4, retries=0) as pool:
        return play_episodes(engine, {"walk": pool}, specs(lengths), renderer, {"walk": harness}, **options)


def confirm(model, rows):
    """Each action's log-probabilities are those of a plain forward pass over the trunk before it."""
    for row in rows:
        for action in row.actions:
            whole = np.concatenate([row.trunk[: action.at], action.tokens]).astype(np.int64)
            with torch.no_grad():
                logits = model(torch.from_numpy(whole)[None]).logits[0, action.at - 1 : -1].float()
            want = torch.log_softmax(logits, -1).gather(1, torch.from_numpy(whole[action.at :])[:, None])[:, 0]
            np.testing.assert_allclose(action.behaviour_logprob, want.numpy(), atol=1e-4)
            if not action.branch:
                assert row.trunk[action.at : action.at + len(action.tokens)].tolist() == action.tokens.tolist()


def test_a_solved_task(renderer, tokenizer):
    engine = Scripted(renderer, lambda text: " forward")
    source = Source("teacher", "walker", "r1")
    episode = play(engine, renderer, [3], source=source)[0]
    assert (episode.success, episode.score, episode.turns, episode.ended, episode.failure) == (True, 1.0, 3, "done", "")
    sequence = episode.sequence
    check_sequence(sequence)
    assert sequence.actions == ("forward",) * 3 and sequence.source == source and sequence.turns == 3
    assert (sequence.environment, sequence.environment_version, sequence.seed) == ("corridor", "1", 3)
    context = sequence.contexts[0]
    assert tokenizer.decode(context.tokens) == (
        "<|system|>Say forward or back.<|end|><|user|>walk to the end.\nplace 0 of 3<|end|><|assistant|> forward<|end|>"
        "<|user|>place 1 of 3 < |end|><|end|><|assistant|> forward<|end|>"
        "<|user|>place 2 of 3 < |end|><|end|><|assistant|> forward<|end|>"
    )
    assert [(s.kind, s.turn) for s in context.segments] == [
        ("prompt", -1), ("action", 0), ("observation", 0), ("action", 1), ("observation", 1), ("action", 2)
    ]
    for s in context.segments:
        mine = s.kind == "action"
        assert (context.weights_version[s.start : s.end] == (3 if mine else -1)).all()
        assert np.isnan(context.behaviour_logprob[s.start : s.end]).any() != mine
    assert set(engine.ended) == {"episode-0-1"}


@pytest.mark.parametrize(
    "harness, answer, ended, turns",
    [
        (Harness("", 2, 5, 400), "forward", "turn_limit", 2),
        (Harness("", 9, 5, 60), "back", "context_limit", None),
        (Harness("", 9, 5, 400, max_malformed=2), "fly", "malformed_limit", 2),
    ],
)
def test_limits_are_outcomes(renderer, harness, answer, ended, turns):
    episode = play(Scripted(renderer, lambda text: answer), renderer, [5], harness=harness)[0]
    assert episode.ended == ended and episode.failure == "" and not episode.success
    assert turns is None or episode.turns == turns
    outcome = episode.sequence.outcome
    assert outcome.error_category == ended and not outcome.is_infra and outcome.reward == episode.score
    assert episode.malformed == outcome.metadata["malformed"] == (2 if answer == "fly" else 0)
    check_sequence(episode.sequence)
    assert ended != "context_limit" or len(episode.sequence.contexts[0].tokens) >= 60


def test_a_prompt_that_fills_the_context_is_no_outcome(renderer):
    episode = play(Scripted(renderer, lambda text: "forward"), renderer, [5], harness=Harness("", 2, 5, 8))[0]
    assert episode.failure == "prompt_too_long" and episode.sequence is None and episode.attempts == 1
    assert "max_context_tokens is 8" in episode.failure_text


def test_an_action_cut_by_its_limit_goes_on(renderer, tokenizer):
    harness = Harness("", 2, 1, 400)
    episode = play(Scripted(renderer, lambda text: "forward"), renderer, [5], harness=harness)[0]
    assert episode.sequence.metadata["cut_actions"] == 2
    check_sequence(episode.sequence)
    context = episode.sequence.contexts[0]
    assert [s.end - s.start for s in context.actions()] == [1, 1]
    assert tokenizer.decode(context.tokens[context.actions()[0].end :][:2]).startswith("<|end|><|user|>")


def test_environment_failures_are_played_again_and_then_counted(renderer, monkeypatch):
    monkeypatch.setattr(agent_loop, "RETRY_PAUSE_S", 0.001)
    family = CorridorFamily({(2, "step"): 1, (3, "reset"): 2, (4, "step"): 99, (5, "crash"): 99, (6, "reset"): 99})
    seen = []
    episodes = play(
        Scripted(renderer, lambda text: "forward"), renderer, [1, 2, 3, 4, 5, 6], family, progress=seen.append
    )
    assert [e.failure for e in episodes] == ["", "", "", "lost_process", "environment_exception", "lost_process"]
    assert [e.attempts for e in episodes] == [1, 2, 3, 3, 3, 3]
    assert [e.success for e in episodes] == [True] * 3 + [False] * 3
    assert [e.sequence is None for e in episodes] == [False] * 3 + [True] * 3
    assert [e.turns for e in episodes[:3]] == [1, 2, 3] and "a bug" in episodes[4].failure_text
    assert seen[-1] == 6 and seen == sorted(seen)
    for episode in episodes[:3]:
        check_sequence(episode.sequence)


def test_a_failed_try_leaves_no_trace(engine, renderer):
    family = CorridorFamily({(3, "step"): 1})
    again, plain = (play(engine, renderer, [2, 3, 4], f)[1] for f in (family, None))
    # Another batch around it may round the last bit of a log-probability otherwise, no more.
    assert again.attempts == 2 and again.sequence.actions == plain.sequence.actions
    mine, other = again.sequence.contexts[0], plain.sequence.contexts[0]
    assert mine.tokens.tolist() == other.tokens.tolist() and mine.segments == other.segments
    np.testing.assert_allclose(mine.behaviour_logprob, other.behaviour_logprob, atol=1e-5)


def test_slow_environments_and_batch_size_change_nothing(engine, renderer, tokenizer):
    lengths = [1, 2, 3, 4, 5, 6, 7, 8]
    plain = play(engine, renderer, lengths)
    slow = play(engine, renderer, lengths, CorridorFamily(delays={1: 0.03, 4: 0.01}))
    assert [content_hash(a.sequence) for a in plain] == [content_hash(b.sequence) for b in slow]
    narrow = play(engine, renderer, lengths, max_live=2)
    assert [a.sequence.contexts[0].tokens.tolist() for a in plain] == [
        b.sequence.contexts[0].tokens.tolist() for b in narrow
    ]
    assert len({tuple(a.sequence.contexts[0].tokens.tolist()) for a in plain}) == 8
    assert sum(a.environment_seconds for a in slow) > 0.02 and all(a.sampling_seconds > 0 for a in slow)
    assert not engine._session_slot


def test_played_rows_agree_with_a_plain_forward_pass(engine, renderer):
    episodes = play(engine, renderer, [4, 5, 6])
    for number, episode in enumerate(episodes):
        check_sequence(episode.sequence)
        rows = rows_from_sequence(
            episode.sequence, domain="walk", stream="rollout", group=1, sequence_number=number, outcome_advantage=0.25
        )
        assert len(rows) == 1 and len(rows[0].actions) == 6 == episode.turns
        assert [a.turn for a in rows[0].actions] == list(range(6))
        assert {(a.sequence, a.group, a.outcome_advantage) for a in rows[0].actions} == {(number, 1, 0.25)}
        last = rows[0].actions[-1]
        assert len(rows[0].trunk) == last.at + len(last.tokens) == rows[0].length
        confirm(plain_model(engine), rows)


def plain_model(engine):
    """The engine's weights in a model with ordinary attention."""
    model = copy.deepcopy(engine.model)
    model.set_attn_implementation("sdpa")
    return model


def test_rewritten_history_becomes_child_contexts(engine, tokenizer):
    windowed = copy.deepcopy(tokenizer)
    windowed.chat_template = WINDOW
    renderer = ChatRenderer(windowed)
    episode = play(engine, renderer, [7])[0]
    check_sequence(episode.sequence)
    contexts = episode.sequence.contexts
    assert len(contexts) == 6 and episode.sequence.turns == 6  # turns 0 and 1 share one; the last one has no action
    assert [c.parent for c in contexts] == [None, 0, 1, 2, 3, 4]
    prompt = windowed.decode(contexts[1].tokens[: contexts[1].fork])
    assert prompt == "<|system|>Say forward or back.<|end|><|user|>"
    rows = rows_from_sequence(episode.sequence, domain="walk", stream="rollout", group=0, sequence_number=0)
    assert [a.turn for r in rows for a in r.actions] == list(range(6)) and len(rows) == 5
    confirm(plain_model(engine), rows)
    assert [(p.context, p.turn) for p in decision_points_of(episode.sequence)] == [
        (0, 0), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5)
    ]


def points_of(episodes, members=2):
    points = []
    for number, episode in enumerate(episodes):
        context = episode.sequence.contexts[0]
        for action in context.actions():
            seeds = tuple(1000 * number + 10 * action.turn + m for m in range(members))
            points.append(
                FreshTurnPoint(
                    "walk", "teacher_prefix", number, context.tokens[: action.start], action.turn, seeds,
                    group=50 + len(points), sequence=200 + members * len(points),
                )
            )
    return points


def test_fresh_turns_branch_off_one_trunk(engine, renderer):
    episodes = play(engine, renderer, [4, 5])
    points = points_of(episodes)
    options = SamplingOptions(max_tokens=5, stop_ids=renderer.stop_ids)
    before = engine.stats["prefill_tokens"]
    rows = sample_fresh_turns(engine, points, {"walk": options})
    assert len(rows) == 2 and [len(r.actions) for r in rows] == [12, 12]
    longest = sum(max(len(p.prefix) for p in points if p.row == n) for n in (0, 1))
    # Waves of max_batch requests may compute a trunk again, but far less than every prefix.
    assert engine.stats["prefill_tokens"] - before <= 5 * longest < sum(2 * len(p.prefix) for p in points)
    actions = [a for r in rows for a in r.actions]
    assert sorted(a.sequence for a in actions) == list(range(200, 224))
    assert sorted({a.group for a in actions}) == list(range(50, 62))
    assert all(a.branch and (a.version == engine.version).all() for a in actions)
    for row, episode in zip(rows, episodes, strict=True):
        trunk = episode.sequence.contexts[0].tokens[: len(row.trunk)]
        assert row.trunk.tolist() == trunk.tolist() and max(a.at for a in row.actions) == len(row.trunk)
    confirm(plain_model(engine), rows)
    again = sample_fresh_turns(engine, points, {"walk": options})
    assert [a.tokens.tolist() for r in again for a in r.actions] == [a.tokens.tolist() for a in actions]
    assert sample_fresh_turns(engine, [], {}) == []


def test_points_that_do_not_belong_together_are_refused(engine, renderer):
    points = points_of(play(engine, renderer, [4]), members=1)
    odd = copy.copy(points[1])
    object.__setattr__(odd, "prefix", points[1].prefix[::-1].copy())
    with pytest.raises(ValueError, match="do not extend each other"):
        sample_fresh_turns(engine, [points[0], odd], SamplingOptions(max_tokens=2))
    with pytest.raises(ValueError, match="no sampling options for domain 'walk'"):
        sample_fresh_turns(engine, points, {"fly": SamplingOptions()})


def test_stored_turns_become_demonstration_rows(engine, renderer, tmp_path):
    sequence = play(engine, renderer, [5])[0].sequence
    store = PrefixStore.open(tmp_path / "store", "w")
    name = store.append(sequence)
    store.commit("one")
    points = decision_points_of(store.sequence(name))
    rows = demonstration_rows(store, {("walk", "teacher_prefix", 0): [(p, 0, 0) for p in points[1:4]]},
                              first_group=7, first_sequence=70)
    assert len(rows) == 1 and rows[0].stream == "demonstration"
    assert [(a.turn, a.group, a.sequence, a.branch) for a in rows[0].actions] == [
        (1, 7, 70, False), (2, 8, 71, False), (3, 9, 72, False)
    ]
    context = sequence.contexts[0]
    assert [a.tokens.tolist() for a in rows[0].actions] == [
        context.tokens[s.start : s.end].tolist() for s in context.actions()[1:4]
    ]
    assert rows[0].trunk.tolist() == context.tokens[: context.actions()[3].end].tolist()
    assert all(np.isnan(a.behaviour_logprob).all() and (a.version == -1).all() for a in rows[0].actions)


def test_what_no_model_wrote_carries_no_loss_but_as_demonstration(engine, renderer):
    import dataclasses

    sequence = play(engine, renderer, [5])[0].sequence
    context = sequence.contexts[0]
    logprob = context.behaviour_logprob.copy()
    second = context.actions()[1]
    logprob[second.start : second.end] = np.nan
    changed = dataclasses.replace(sequence, contexts=(dataclasses.replace(context, behaviour_logprob=logprob),))
    make_rows = lambda stream: rows_from_sequence(  # noqa: E731
        changed, domain="walk", stream=stream, group=0, sequence_number=0
    )
    assert [a.turn for a in make_rows("rollout")[0].actions] == [0, 2, 3, 4, 5]
    assert [a.turn for a in make_rows("demonstration")[0].actions] == list(range(6))


def test_no_more_episodes_live_than_the_pool_has_environments_for(renderer):
    family = CorridorFamily()
    engine = Scripted(renderer, lambda text: "forward")
    with EnvironmentPool(family, size=2) as pool:
        played = play_tasks(engine, pool, "walk", family.tasks("test")[:5], renderer, HARNESS, seed=3)
    assert all(p.success for p in played) and max(engine.batches) == 2


def test_play_tasks_reports_in_order(renderer):
    family = CorridorFamily()
    tasks = family.tasks("test")[:4] + family.tasks("test")[:1]
    engine = Scripted(renderer, lambda text: "forward" if int(re.findall(r"of (\d)", text)[-1]) != 2 else "back")
    seen = []
    with EnvironmentPool(family, size=8) as pool:
        played = play_tasks(engine, pool, "walk", tasks, renderer, HARNESS, seed=3, progress=seen.append)
    assert [p.task for p in played] == tasks
    assert [p.success for p in played] == [True, False, True, True, True]
    assert [p.turns for p in played] == [1, 6, 3, 4, 1] and played[1].ended == "turn_limit"
    assert seen[-1] == 5 and max(engine.batches) == 4  # never more at once than the engine's batch


def test_repeated_tasks_get_their_own_draws(engine, renderer):
    family = CorridorFamily()
    tasks = [family.tasks("test")[6]] * 3
    with EnvironmentPool(family, size=2) as pool:
        first, second = (
            [p.sequence.contexts[0].tokens.tolist() for p in play_tasks(
                engine, pool, "walk", tasks, renderer, HARNESS, temperature=1.0, seed=seed)]
            for seed in (1, 2)
        )
    assert len({tuple(t) for t in first + second}) == 6


@pytest.mark.parametrize(
    "domains, harness, message",
    [
        ((), HARNESS, "domain 'walk' has no environment pool; there is one for no domain"),
        (("walk",), Harness(max_context_tokens=9999), "max_context_tokens 9999 exceeds the model's 512"),
        (("walk",), Harness("", 0, 5, 400), "max_turns: 0 must be at least 1"),
    ],
)
def test_what_cannot_be_played_is_refused_first(renderer, domains, harness, message):
    family = CorridorFamily()
    with EnvironmentPool(family, size=1) as pool, pytest.raises(ValueError, match=message):
        play_episodes(Scripted(renderer, str), dict.fromkeys(domains, pool), specs([3]), renderer, {"walk": harness})
    assert not family.made


def test_real_babyai(engine, renderer):
    family = make_family("babyai", {})
    harness = Harness(family.system_prompt, max_turns=3, max_turn_tokens=4, max_context_tokens=512)
    answers = Scripted(renderer, lambda text: "go forward")
    with EnvironmentPool(family, size=3) as pool:
        tasks = family.tasks("development")[:6]
        played = play_tasks(engine, pool, "embodied", tasks, renderer, harness, temperature=1.0)
        walked = play_tasks(answers, pool, "embodied", tasks, renderer, harness)
    for one in played + walked:
        assert one.failure == ""
        check_sequence(one.sequence)
    assert sum(p.malformed for p in played) > 0 and sum(p.malformed for p in walked) == 0
