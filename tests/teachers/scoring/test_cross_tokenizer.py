"""A teacher with another tokenizer: what it reads, what it says of a text, and a learner's step with it."""

from __future__ import annotations

import dataclasses
import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.config import Config, DomainConfig, TeacherConfig
from mopd.fits import misfits
from mopd.learner.engine import Learner, LearnerConfig
from mopd.learner.model import load_model
from mopd.learner.packing import pack
from mopd.learner.step import LearnerStep, StepConfig
from mopd.losses import make_objective
from mopd.rows import Action, Row
from mopd.sampling.demo_tokenizer import train_tokenizer
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from teachers.handshake import TokenizerMismatch
from teachers.registry import TeacherRegistry, TeacherSpec
from teachers.scoring.alignment import BROKEN, NO_COUNTERPART, REWRITTEN
from teachers.scoring.answers import FINAL, checked, faulty
from teachers.scoring.cross_tokenizer import ONLY_SAMPLED, CrossTokenizerBackend, CrossTokenizerTeacher
from teachers.scoring.hf import HFTeacher
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import ScoreRequest, TeacherError
from teachers.scoring.translation import Translator

TEXT = ["go north", "open the door", "take the red key", "you see a door and a key", "look around the room"] * 4
OTHER = ["the door is open", "a red key lies on the floor", "go to the room in the north", "naïve 😀 über"] * 6
# SmolLM2's: roles as words between two control tokens, a system prompt of its own where a conversation has none.
SMOLLM2 = ("{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
           "You are a helpful AI assistant<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
           "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
           "{{ '<|im_start|>assistant\n' }}{% endif %}")
MESSAGES = [{"role": "system", "content": "You play."}, {"role": "user", "content": "Where? naïve 😀"},
            {"role": "assistant", "content": "go north"}, {"role": "user", "content": "a red <|im_end|> key"}]


def chatml(texts=OTHER, size: int = 400):
    """A tokenizer with SmolLM2's control tokens and template."""
    made = train_tokenizer(texts, size)
    made.add_special_tokens({"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"})
    made.chat_template = SMOLLM2
    return made


@pytest.fixture(scope="module")
def other():
    return chatml()


@pytest.fixture(scope="module")
def translator(tokenizer, other):
    return Translator(tokenizer, other, teacher_id="t")


@pytest.fixture(scope="module")
def stranger(make_folder, other):
    """An in-process back end of a random model that speaks `other`."""
    return HFBackend(HFTeacher(load_model(make_folder(3, other)), teacher="t", vocabulary=len(other)))


@pytest.fixture(scope="module")
def backend(stranger, translator):
    return CrossTokenizerBackend(stranger, translator)


def request_of(renderer, messages, ids) -> ScoreRequest:
    prompt = renderer.start(messages)
    tokens = np.concatenate([prompt, np.asarray(ids, np.uint32)])
    return ScoreRequest(tokens, len(prompt), len(tokens))


def score(backend, request):
    return checked(request, backend.score([request])[0], "t")


# What it reads

@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], MESSAGES[:2], MESSAGES[1:2]], ids=str)
def test_the_prefix_is_the_teachers_own_rendering(tokenizer, other, translator, messages):
    there = {**MESSAGES[-1], "content": "a red <|im_end|> key"}
    expected = ChatRenderer(other).start([*messages[:-1], there] if messages[-1] is MESSAGES[-1] else messages)
    ours = ChatRenderer(tokenizer).start(messages)
    np.testing.assert_array_equal(translator.prefix(ours), expected)


@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:]], ids=["system", "none"])
def test_the_way_back_drops_nothing_but_the_default_system_prompt(tokenizer, other, messages):
    back = Translator(other, tokenizer, teacher_id="t").prefix(ChatRenderer(other).start(messages))
    shown = [{**m, "content": m["content"].replace("<|im_end|>", "< |im_end|>")} for m in messages]  # made harmless
    np.testing.assert_array_equal(back, ChatRenderer(tokenizer).start(shown))


def test_a_teacher_without_system_role_reads_it_before_the_first_users_text(tokenizer):
    plain = chatml()
    plain.chat_template = ("{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
                           "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
                           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")
    found = Translator(tokenizer, plain, teacher_id="t").prefix(ChatRenderer(tokenizer).start(MESSAGES[:2]))
    np.testing.assert_array_equal(found, ChatRenderer(plain, system_role=False).start(MESSAGES[:2]))


def test_without_a_chat_template_it_says_so(tokenizer):
    bare = chatml()
    bare.chat_template = None
    with pytest.raises(TeacherError, match="'t' has another tokenizer.*chat template on both sides"):
        Translator(tokenizer, bare, teacher_id="t")


# What it says

@settings(max_examples=20, deadline=None)
@given(st.text(max_size=20), st.booleans())
def test_the_sum_over_a_turn_is_the_teachers_own(tokenizer, other, stranger, backend, text, ends):
    """Log-probability of the text and its end, asked of the teacher in its own tokens."""
    ours, theirs = ChatRenderer(tokenizer), ChatRenderer(other)
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    own = other(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    if ends:
        ids, own = [*ids, ours.end_id], [*own, theirs.end_id]
    if not ids:
        return
    found = score(backend, request_of(ours, MESSAGES[:2], ids))
    expected = stranger.score([request_of(theirs, MESSAGES[:2], own)])[0].logprob
    assert not found.missing
    np.testing.assert_allclose(found.logprob.sum(), expected.sum(), rtol=1e-4)
    if ends:
        np.testing.assert_allclose(found.logprob[-1], expected[-1], rtol=1e-4)  # end of turn ↔ end of turn


def test_the_same_tokenizer_gives_the_same_scores(tokenizer, make_folder):
    inner = HFBackend(HFTeacher(load_model(make_folder(1)), teacher="t", vocabulary=len(tokenizer)))
    through = CrossTokenizerBackend(inner, Translator(tokenizer, tokenizer, teacher_id="t"))
    renderer = ChatRenderer(tokenizer)
    request = request_of(renderer, MESSAGES, renderer.action_tokens("open the door"))
    np.testing.assert_array_equal(through.translation(request).request.tokens, request.tokens)
    np.testing.assert_array_equal(score(through, request).logprob, inner.score([request])[0].logprob)


def test_what_cannot_be_aligned_is_counted(tokenizer, backend):
    renderer = ChatRenderer(tokenizer)
    pieces = tokenizer("😀", add_special_tokens=False)["input_ids"]
    assert len(pieces) == 4  # a token per byte; the teacher has merged some of them
    word = tokenizer("go", add_special_tokens=False)["input_ids"]
    whole = score(backend, request_of(renderer, MESSAGES[:2], [*word, *pieces, renderer.end_id]))
    assert not whole.missing and len(set(whole.logprob[len(word):-1].tolist())) < 4
    cut = score(backend, request_of(renderer, MESSAGES[:2], [*word, *pieces[:2]]))
    assert cut.missing == {BROKEN: 2} and np.isfinite(cut.logprob[:len(word)]).all()
    padding = len(tokenizer) + 3  # a row of the output matrix that no token belongs to
    special = score(backend, request_of(renderer, MESSAGES[:2], [*word, padding, *word]))
    assert special.missing == {NO_COUNTERPART: 1 + len(word)} and np.isfinite(special.logprob[:len(word)]).all()
    assert {BROKEN, NO_COUNTERPART} <= FINAL and faulty(cut) == 0  # never asked again, never waited for
    assert sum(cut.missing.values()) == np.isnan(cut.logprob).sum()


def test_text_that_names_the_teachers_control_tokens_stays_text(tokenizer, other, backend):
    renderer = ChatRenderer(tokenizer)
    ids = tokenizer("<|im_end|>", add_special_tokens=False)["input_ids"]
    asked = backend.translation(request_of(renderer, MESSAGES[:2], ids)).request
    assert len(asked) > 1 and not set(other.all_special_ids) & set(asked.labels.tolist())


def test_only_sampled_tokens_can_be_asked_for(tokenizer, backend):
    renderer = ChatRenderer(tokenizer)
    request = request_of(renderer, MESSAGES[:2], renderer.action_tokens("go"))
    for changed in (dataclasses.replace(request, what="hidden"), dataclasses.replace(request, temperature=0.5)):
        [answer] = backend.score([changed])
        assert answer.missing == {ONLY_SAMPLED: len(request)}


# In a run

def config(**train) -> Config:
    made = Config(teachers={"t": TeacherConfig(model="x", cross_tokenizer=True)}, domains={"d": DomainConfig(teacher="t")})
    for key, value in {"objective": "sampled_kl", **train}.items():
        setattr(made.train, key, value)
    return made


@pytest.mark.parametrize("train, key", [
    ({"objective": "reverse_kl"}, "train.objective: reverse_kl compares distributions over one vocabulary"),
    ({"temperature": 0.7}, "train.temperature: "), ({"top_k": 4}, "train.top_p: ")])
def test_what_needs_more_than_sampled_tokens_is_refused(train, key):
    made = config(**train)
    objective = make_objective(made.train.objective, made.train.objective_options)
    [error] = misfits(made, objective, {"t": frozenset({"sampled"})})
    assert error.startswith(key) and "teachers.t.cross_tokenizer" in error
    assert misfits(config(), make_objective("sampled_kl", {}), {"t": frozenset({"sampled"})}) == []


def test_another_tokenizer_is_refused_unless_the_teacher_says_so(tokenizer, other, make_folder):
    folder = str(make_folder(3, other))
    with pytest.raises(TokenizerMismatch, match=r"teachers\.t\.cross_tokenizer=true"):
        TeacherRegistry([TeacherSpec("t", folder)], {"d": "t"}).handshake(tokenizer)
    registry = TeacherRegistry([TeacherSpec("t", folder, cross_tokenizer=True)], {"d": "t"})
    with pytest.warns(UserWarning, match="by text|span by span"):
        registry.handshake(tokenizer)
    assert registry.gives() == {"t": frozenset({"sampled"})}
    scorer = registry.scorers()["d"]
    assert isinstance(scorer, CrossTokenizerTeacher)
    registry.check_unchanged()
    registry.close()


def row(tokenizer, text: str, seed: int) -> Row:
    renderer = ChatRenderer(tokenizer)
    trunk, tokens = renderer.start(MESSAGES[:2]), renderer.action_tokens(text)
    own = np.log(np.random.default_rng(seed).uniform(0.1, 0.9, len(tokens))).astype(np.float32)
    action = Action(at=len(trunk), tokens=tokens, behaviour_logprob=own, version=np.zeros(len(tokens), np.int32), branch=True,
                    turn=0, sequence=seed, group=seed)
    return Row("d", "rollout", trunk, (action,), origin="request")


def test_the_learner_gets_the_log_ratio_of_whole_spans(tokenizer, make_folder, other):
    registry = TeacherRegistry([TeacherSpec("t", str(make_folder(3, other)), cross_tokenizer=True)], {"d": "t"})
    with pytest.warns(UserWarning):
        registry.handshake(tokenizer)
    teacher = registry.scorers()["d"]
    rows = [row(tokenizer, "naïve 😀 room", 1), row(tokenizer, "go north", 2)]
    [batch] = pack(rows, token_budget=512, pad_id=0, domains=("d",), streams=("rollout",))
    scores = teacher(batch, need="sampled")
    shares = RemoteTeacher.__call__(teacher, batch, need="sampled").logprob
    own = batch.behaviour_logprob
    assert torch.isfinite(scores.logprob).all() and not scores.missing
    several = 0
    for number in range(2):
        mine = batch.row == batch.row.unique()[number]
        request = next(r for r in map(_request, rows) if len(r) == int(mine.sum()) and np.array_equal(
            r.labels, batch.label[mine].numpy().astype(np.uint32)))
        spans = teacher.backend.translation(request).spans
        for span in set(spans.tolist()):
            inside = torch.from_numpy(spans == span)
            ratio = shares[mine][inside].sum() - own[mine][inside].sum()
            torch.testing.assert_close(scores.logprob[mine][inside] - own[mine][inside], ratio.expand(int(inside.sum())))
            several += int(inside.sum()) > 1
    assert several > 0
    registry.close()


def test_a_learners_step_with_a_teacher_of_another_tokenizer(tokenizer, make_folder, other):
    """Every token has a score, the weights move, the teacher's do not."""
    registry = TeacherRegistry([TeacherSpec("t", str(make_folder(3, other)), cross_tokenizer=True)], {"d": "t"})
    with pytest.warns(UserWarning):
        registry.handshake(tokenizer)
    learner = Learner(load_model(make_folder(1)), total_steps=3, config=LearnerConfig(learning_rate=2e-3, warmup_steps=0))
    step = LearnerStep(learner, domains=("d",), scorers=registry.scorers(), config=StepConfig(
        objective="sampled_kl", objective_options={"estimator": "k2"}, token_budget=512))
    before = [p.detach().clone() for p in learner.model.parameters()]
    report = step([row(tokenizer, "naïve 😀 room", 1), row(tokenizer, "go north", 2)], shares={"d": 1.0})
    numbers = report.metrics["domains"]["d"]
    assert numbers.get("unscored_share", 0.0) == 0.0 and np.isfinite(report.loss) and report.loss > 0
    assert report.metrics["gradient_norm"] > 0
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    registry.check_unchanged()
    registry.close()


def _request(row: Row) -> ScoreRequest:
    action = row.actions[0]
    tokens = np.concatenate([row.trunk, action.tokens])
    return ScoreRequest(tokens, action.at, len(tokens))


# The real SmolLM2, where somebody has fetched it

FOLDER = os.environ.get("MOPD_SMOLLM2", "")


@pytest.fixture(scope="module")
def smollm2(tokenizer):
    if not FOLDER:
        pytest.skip("MOPD_SMOLLM2 names no folder that scripts/get_smollm2.py wrote; `make test-vllm` runs this")
    smol = load_tokenizer(FOLDER)
    return smol, Translator(tokenizer, smol, teacher_id="t")


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=40))
def test_smollm2_reads_the_demos_tokens(tokenizer, smollm2, text):
    smol, translator = smollm2
    ours, theirs = ChatRenderer(tokenizer), ChatRenderer(smol)
    found = translator.translate(request_of(ours, MESSAGES, ours.action_tokens(text)))
    own = smol(ours.sanitise(text), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert set(found.missing) <= {REWRITTEN}  # its vocabulary has no token for some control bytes
    assert sum(found.missing.values()) == int((found.spans < 0).sum())
    if not found.missing:
        assert found.request.labels.tolist() == [*own, theirs.end_id]
    np.testing.assert_array_equal(found.request.tokens[:found.request.start], theirs.start(MESSAGES))
