"""A teacher behind a back end says what the same model says in process, whatever goes wrong on the way."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.encoding import decode, encode
from mopd.learner.packing import pack
from mopd.learner.scores import what_to_ask
from mopd.losses.candidates import CandidateSets
from mopd.rows import STREAMS
from teachers.scoring import HFTeacher, MixtureScorer, TeacherScorer, wanted
from teachers.scoring.answers import IMPOSSIBLE, checked, faulty, merged, unscored
from teachers.scoring.cache import Entry, ScoreCache
from teachers.scoring.patience import Patience, TeacherGone
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import ScoreAnswer, ScoreRequest, ScoringBackend, TeacherUnreachable
from teachers.scoring.service import Scoring
from tests.mopd.learner.tiny import make_model, mixed_rows
from tests.teachers.scoring import faults

DOMAINS = ("game", "science")


def rows_of(seed: int = 0, count: int = 6):
    return mixed_rows(np.random.default_rng(seed), count)


def batches(rows, budget: int = 40, **options):
    return pack(rows, token_budget=budget, pad_id=0, domains=DOMAINS, streams=STREAMS, **options)


def remote(planted=None, *, limit: int = 1 << 20, wait_s: float = 0.0, said: list | None = None, **options):
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    patience = Patience(wait_s, say=(said if said is not None else []).append, clock=lambda: clock[0], sleep=sleep)
    return RemoteTeacher(planted or faults.Planted(faults.backend()), revision="r", cache=ScoreCache(limit),
                         patience=patience, **options)


@pytest.mark.parametrize("prefix_gradient", ["full", "none"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_equal_the_in_process_teachers_on_the_same_micro_batches(prefix_gradient, temperature):
    direct, far = HFTeacher(make_model("qwen3_moe"), teacher="t"), remote()
    assert isinstance(far, TeacherScorer) and isinstance(far.backend, ScoringBackend)
    found = batches(rows_of(), prefix_gradient=prefix_gradient)
    assert len(found) > 2
    for batch in found:
        for need in ("sampled", "full", "hidden"):
            ours, theirs = far(batch, need=need, temperature=temperature), direct(batch, need=need, temperature=temperature)
            assert ours.teacher == "t" and not ours.missing and ours.scored().all()
            if need == "hidden":
                torch.testing.assert_close(ours.head.logits(ours.hidden), theirs.head.logits(theirs.hidden), atol=2e-5,
                                           rtol=1e-4)
                continue
            torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-5, rtol=0)
            if need == "full":
                same = [torch.log_softmax(s.logits / temperature, -1) for s in (ours, theirs)]
                torch.testing.assert_close(*same, atol=2e-5, rtol=1e-4)


def test_candidates_reach_the_back_end():
    rng = np.random.default_rng(3)
    (batch,) = batches([r for r in rows_of() if r.domain == "game"], budget=5000)
    sets = [np.unique(np.append(rng.integers(0, 61, 5), label)) if i % 3 else None
            for i, label in enumerate(batch.label.tolist())]
    batch.candidates = CandidateSets.of(sets)
    far, direct = remote(), HFTeacher(make_model("qwen3_moe"), teacher="t")
    ours = far(batch, need="sampled")
    assert ours.over_candidates
    torch.testing.assert_close(ours.logprob, direct(batch, need="sampled").logprob, atol=1e-5, rtol=0)
    batch.candidates = None
    assert not torch.allclose(far(batch, need="sampled").logprob, ours.logprob), "other candidates are another question"


def test_a_mixture_of_a_near_and_a_far_teacher():
    far = RemoteTeacher(faults.backend(1, "far"), revision="1", cache=ScoreCache(1 << 20))
    far.gives = frozenset({"sampled"})  # as a server
    near, other = (HFTeacher(make_model("qwen3_moe", seed=s), teacher=str(s)) for s in (0, 1))
    (batch, *_) = batches(rows_of())
    mixed = MixtureScorer([near, far], [1, 3])(batch, need="sampled").logprob
    torch.testing.assert_close(mixed, MixtureScorer([near, other], [1, 3])(batch, need="sampled").logprob, atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="log space needs whole distributions, and far gives the sampled"):
        MixtureScorer([near, far], [1, 3], "log_space")


def test_nothing_is_scored_twice():
    rows = rows_of(2)
    planted = faults.Planted(faults.backend())
    far = remote(planted)
    for batch in batches(rows):
        far(batch, need="sampled")
    tokens = sum(row.loss_tokens for row in rows)
    assert sum(len(r) for call in planted.asked for r in call) == tokens == far.stats["asked"]
    calls = len(planted.asked)
    for batch in batches(rows, budget=90, prefix_gradient="none"):  # the same actions in other micro-batches
        far(batch, need="sampled")
    assert len(planted.asked) == calls and far.stats["reused"] == tokens
    far(batches(rows)[0], need="sampled", temperature=0.5)
    assert len(planted.asked) == calls + 1, "another temperature is another question"


def test_prefetched_scores_are_waited_for_and_not_asked_again():
    planted = faults.Planted(faults.backend())
    planted.pause_s = 0.05
    far, rows = remote(planted), rows_of(4)
    for row in rows:
        far.prefetch(wanted.of_rows([row], what="sampled", temperature=1.0))
    direct = HFTeacher(make_model("qwen3_moe"), teacher="t")
    for batch in batches(rows):
        expected = direct(batch, need="sampled").logprob
        torch.testing.assert_close(far(batch, need="sampled").logprob, expected, atol=1e-5, rtol=0)
    assert sum(len(r) for call in planted.asked for r in call) == sum(row.loss_tokens for row in rows)
    far.close()
    assert planted.closed and not [t for t in threading.enumerate() if t.name.startswith("scores-t")]
    with pytest.raises(RuntimeError, match="closed"):
        far.prefetch(wanted.of_rows(rows, what="sampled", temperature=1.0))


def test_a_failed_prefetch_is_asked_again_when_needed():
    planted = faults.Planted(faults.backend())
    far, rows = remote(planted), rows_of()
    planted.down = True
    far.prefetch(wanted.of_rows(rows, what="sampled", temperature=1.0))
    while far._under_way:
        threading.Event().wait(0.01)
    with pytest.raises(TeacherUnreachable, match="'t' does not answer: connection refused"):
        far.answers(wanted.of_rows(rows[:1], what="sampled", temperature=1.0))
    planted.down = False
    assert all(np.isfinite(a.logprob).all() for a in far.answers(wanted.of_rows(rows, what="sampled", temperature=1.0)))


@pytest.mark.parametrize("fault, reason", [
    (faults.short, "wrong length"), (faults.not_a_number, "not finite"), (faults.above_zero, "above 0"),
    (faults.swapped, "out of order"), (lambda request, answer, number: None, "no answer")])
def test_a_bad_answer_is_masked_counted_and_asked_again(fault, reason):
    rows = rows_of()
    batch = batches(rows, budget=5000)[0]
    broken = remote(faults.Planted(faults.backend(), fault), again=1)
    scores = broken(batch, need="sampled")
    lost = int((~scores.scored()).sum())
    assert lost > 0 and dict(scores.missing) == {reason: lost} and broken.reasons[reason] > 0
    assert torch.isnan(scores.logprob[~scores.scored()]).all()
    assert broken.stats["asked_again"] > 0
    asked = len(broken.backend.asked)
    again = broken(batch, need="sampled")
    assert len(broken.backend.asked) == asked and again.missing == scores.missing, "what stayed missing is not asked for ever"
    mended = remote(faults.Planted(faults.backend(), faults.once(fault, every=3)))
    scores = mended(batch, need="sampled")
    assert scores.scored().all() and not scores.missing and mended.reasons[reason] > 0
    torch.testing.assert_close(scores.logprob, HFTeacher(make_model("qwen3_moe"), teacher="t")(batch, need="sampled").logprob,
                               atol=1e-5, rtol=0)


def test_what_a_teacher_rules_out_is_final_and_pauses_nothing():
    def impossible(request, answer, number):
        return ScoreAnswer("t", np.where(np.arange(len(request)) == 0, -np.inf, answer.logprob).astype(np.float32))

    far = remote(faults.Planted(faults.backend(), impossible))
    answers = far.patient_answers(wanted.of_rows(rows_of(), what="sampled", temperature=1.0), max_unscored_share=0.0)
    assert all(a.missing == {IMPOSSIBLE: 1} for a in answers) and len(far.backend.asked) == 1


def test_a_short_list_of_answers_is_no_crash():
    far = remote()
    score = far.backend.score
    far.backend.score = lambda requests: score(requests)[:-1]
    (answer,) = far.answers(wanted.of_rows(rows_of(), what="sampled", temperature=1.0)[-1:])
    assert answer.missing == {"no answer": len(answer.logprob)}


def test_the_run_waits_for_a_teacher_that_is_down_and_loses_nothing():
    said: list[str] = []
    planted = faults.Planted(faults.backend())
    far = remote(planted, wait_s=600.0, said=said)
    planted.down = True
    sleep, pauses = far.patience.sleep, []

    def up_after_five(seconds):
        sleep(seconds)
        pauses.append(seconds)
        planted.down = len(pauses) < 5

    far.patience.sleep = up_after_five
    batch = batches(rows_of())[0]
    scores = far(batch, need="sampled")
    assert scores.scored().all() and pauses == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert len(said) == 2
    assert said[0].startswith("teacher 't' since ") and "it does not answer (connection refused)" in said[0]
    assert "train.teacher_wait_s" in said[0] and said[1] == "teacher 't' answers again after 31 s; the run goes on"
    assert far.stats["paused_s"] == 31.0


def test_waiting_ends_with_a_message_and_at_once_without_patience():
    batch = batches(rows_of())[0]
    for wait_s, words in ((100.0, "after 100 s of waiting"), (0.0, "train.teacher_wait_s is 0")):
        planted = faults.Planted(faults.backend())
        planted.down = True
        with pytest.raises(TeacherGone, match=words) as error:
            remote(planted, wait_s=wait_s)(batch, need="sampled")
        assert "run the same command again" in str(error.value) and "connection refused" in str(error.value)


def test_too_many_unscored_tokens_pause_the_step_until_the_answers_are_good():
    said: list[str] = []
    rows = rows_of()
    planted = faults.Planted(faults.backend(), faults.not_a_number)
    far = remote(planted, wait_s=60.0, said=said, again=1)
    sleep = far.patience.sleep

    def mended(seconds):
        sleep(seconds)
        planted.fault = None

    far.patience.sleep = mended
    scoring = Scoring({"game": far, "science": far}, need="sampled", temperature=1.0, max_unscored_share=0.02)
    record = scoring.settle(rows)
    tokens = sum(row.loss_tokens for row in rows)
    assert record["teachers"]["t"]["tokens"] == tokens and record["teachers"]["t"]["unscored"] == 0
    assert record["teachers"]["t"]["faults"]["not finite"] > 0 and record["teachers"]["t"]["paused_s"] == 1.0
    assert "tokens have no score" in said[0] and "train.max_unscored_share=0.02" in said[0] and "answers again" in said[1]
    loose = Scoring({"game": remote(faults.Planted(faults.backend(), faults.not_a_number), said=said)}, need="sampled",
                    temperature=1.0, max_unscored_share=0.9)
    assert loose.settle([r for r in rows if r.domain == "game"])["teachers"]["t"]["unscored"] > 0


def test_expected_rows_are_ready_when_the_step_settles():
    rows = rows_of(7)
    far = remote()
    near = HFTeacher(make_model("qwen3_moe"), teacher="near")
    scoring = Scoring({"game": far, "science": near}, need="sampled", temperature=1.0)
    for row in rows:
        scoring.expect([row])
    record = scoring.settle(rows)
    mine = sum(row.loss_tokens for row in rows if row.domain == "game")
    assert record["teachers"]["t"]["tokens"] == record["teachers"]["t"]["asked"] == mine and record["waited_s"] >= 0
    assert Scoring({"game": near}, need="full", temperature=1.0).settle(rows[:1]) == {}
    far.close()


def test_the_cache_is_bounded_and_a_run_goes_on_without_room():
    cache = ScoreCache(2000)
    answer = ScoreAnswer("t", np.zeros(100, np.float32))
    size = Entry(answer).size
    for number in range(5):
        cache.put("r", bytes([number]), Entry(answer))
    assert cache.bytes <= 2000 and len(cache) == 2000 // size and cache.evicted == 5 - len(cache)
    assert cache.get("r", bytes([4])) and cache.get("r", bytes([0])) is None and cache.get("other", bytes([4])) is None
    assert cache.forget("r") == 2000 // size and cache.bytes == 0
    rows = rows_of()
    far = remote(limit=0)
    Scoring({"game": far, "science": far}, need="sampled", temperature=1.0).settle(rows)
    assert all(far(batch, need="sampled").scored().all() for batch in batches(rows)) and len(far.cache) == 0


def test_requests_say_what_is_wrong_with_them():
    tokens = np.arange(9, dtype=np.uint32)
    for arguments, words in [((tokens, 0, 3), "1 ≤ start"), ((tokens, 4, 4), "1 ≤ start"), ((tokens, 4, 10), "of 9 cannot")]:
        with pytest.raises(ValueError, match=words):
            ScoreRequest(*arguments)
    for more, words in [({"what": "all"}, "unknown"), ({"k": 2}, "does not fit"), ({"what": "top_k"}, "does not fit"),
                        ({"temperature": 0.0}, "positive"), ({"candidates": (None,)}, "1 sets of candidates for 3")]:
        with pytest.raises(ValueError, match=words):
            ScoreRequest(tokens, 2, 5, **more)
    with pytest.raises(ValueError, match="k=0 does not fit what='top_k'"):
        remote()(batches(rows_of())[0], need="top_k")
    far = remote()
    far.gives = frozenset({"sampled"})
    with pytest.raises(ValueError, match="gives sampled, not 'top_k'"):
        far(batches(rows_of())[0], need="top_k", k=2)
    keys = {ScoreRequest(tokens, 2, 5, **more).key() for more in (
        {}, {"temperature": 0.5}, {"what": "full"}, {"what": "top_k", "k": 2}, {"what": "top_k", "k": 3},
        {"candidates": (None, None, np.array([4]))}, {"candidates": (None, np.array([4]), None)})}
    assert len(keys) == 7 and ScoreRequest(tokens[:5], 2, 5).key() == ScoreRequest(tokens, 2, 5).key()
    assert ScoreRequest(tokens, 2, 5).key() not in (ScoreRequest(tokens, 3, 5).key(), ScoreRequest(tokens, 2, 6).key())


def test_top_k_answers_are_checked_too():
    request = ScoreRequest(np.arange(9, dtype=np.uint32), 2, 5, what="top_k", k=3)
    (good,) = faults.backend().score([request])
    assert not checked(request, good, "t").missing and (np.diff(good.top_logprob, axis=1) <= 0).all()
    bare = ScoreAnswer("t", good.logprob)
    narrow = ScoreAnswer("t", good.logprob, good.top_ids[:, :2], good.top_logprob[:, :2])
    for answer in (bare, narrow):
        assert checked(request, answer, "t").missing == {"likeliest ids malformed": 3}


def of_top(good, **changes) -> ScoreAnswer:
    """A good answer with rows of its likeliest ids replaced: {row: (ids, log-probabilities)}."""
    ids, values = good.top_ids.copy(), good.top_logprob.copy()
    for row, (new_ids, new_values) in changes.pop("rows", {}).items():
        ids[row], values[row] = new_ids, new_values
    return dataclasses.replace(good, top_ids=ids, top_logprob=values, **changes)


def test_likeliest_ids_that_cannot_be_those_of_a_distribution_lose_their_token():
    request = ScoreRequest(np.array([3, 4, 5, 6, 7, 8], np.uint32), 2, 6, what="top_k", k=3)
    (good,) = faults.backend().score([request])
    ids, values = good.top_ids, good.top_logprob
    for rows, reason in (
            ({1: ([ids[1, 0]] * 3, values[1])}, "likeliest ids malformed"),
            ({1: ([-1, *ids[1, 1:]], values[1])}, "likeliest ids malformed"),
            ({1: (ids[1], [-0.1, -0.1, -0.1])}, "likeliest ids malformed"),  # of more mass than 1
            ({1: (ids[1], good.logprob[1] - np.array([0.1, 0.2, 0.3]))}, "likeliest ids malformed"),  # the token is likelier
            ({1: ([6, *ids[1, 1:]], good.logprob[1] + np.array([0.5, 0, 0]))}, "likeliest ids malformed"),  # of two scores
            ({1: (ids[1], [values[1, 0], np.nan, values[1, 2]])}, "not finite")):
        found = checked(request, of_top(good, rows=rows), "t")
        assert found.missing == {reason: 1} and unscored(found).tolist() == [False, True, False, False], rows
        assert np.isnan(found.top_logprob[1]).all() and faulty(found) == 1
        mended = merged(found, checked(request, good, "t"))
        assert not mended.missing and np.array_equal(mended.top_logprob, values) and np.array_equal(mended.top_ids, ids)
    ruled_out = good.logprob.copy()
    ruled_out[2] = -np.inf
    kept = values[2].copy()
    kept[2] = -np.inf
    found = checked(request, of_top(good, logprob=ruled_out, rows={2: ([50, 51, 52], kept)}), "t")
    assert not found.missing and not unscored(found).any() and np.isnan(found.logprob[2]), "its likeliest ids are an answer"
    lost = good.logprob.copy()
    lost[0] = np.nan
    assert unscored(checked(request, of_top(good, logprob=lost), "t")).tolist() == [True, False, False, False]


def test_the_likeliest_ids_are_those_of_the_same_model_in_process():
    direct, planted = HFTeacher(make_model("qwen3_moe"), teacher="t"), faults.Planted(faults.backend())
    planted.gives = frozenset({"sampled", "top_k"})  # as a server
    far = remote(planted)
    assert what_to_ask(far.gives, "full", 4) == ("top_k", 4) and what_to_ask(direct.gives, "full", 4) == ("hidden", 0)
    assert what_to_ask(far.gives, "sampled", 0) == ("sampled", 0) and what_to_ask(far.gives, "full", 0) == ("full", 0)
    rows = rows_of(4)
    scoring = Scoring({"game": far, "science": far}, need="full", top_k=4, temperature=1.0)
    scoring.settle(rows)
    calls = len(planted.asked)
    for batch in batches(rows):
        ours, theirs = far(batch, need="top_k", k=4), direct(batch, need="full")
        best = torch.log_softmax(theirs.logits, -1).topk(4, dim=-1)
        torch.testing.assert_close(ours.top_logprob, best.values, atol=1e-5, rtol=0)
        assert torch.equal(ours.top_ids, best.indices) and ours.scored().all()
        torch.testing.assert_close(ours.logprob, theirs.logprob, atol=1e-5, rtol=0)
    assert len(planted.asked) == calls, "all of it was asked for as the step settled"

    def bare(request, answer, number):
        return dataclasses.replace(answer, top_ids=None, top_logprob=None)

    worse = faults.Planted(faults.backend(), bare)
    found = remote(worse, again=0)(batch, need="top_k", k=4)
    assert not found.scored().any() and found.missing == {"likeliest ids malformed": batch.loss_tokens}


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_asking_again_only_ever_adds_scores(answers):
    """A token has a score as soon as one answer had it, the first one's; what is left is counted once."""
    def answer(number, lost):
        values = np.where(lost, np.nan, -1.0 - number).astype(np.float32)
        return ScoreAnswer("t", values, missing={"not finite": sum(lost)} if any(lost) else {})

    whole = answer(0, answers[0])
    for number, lost in enumerate(answers[1:], 1):
        whole = merged(whole, answer(number, lost))
    for token in range(5):
        first = next((n for n, lost in enumerate(answers) if not lost[token]), None)
        assert np.isnan(whole.logprob[token]) if first is None else whole.logprob[token] == -1.0 - first
    assert faulty(whole) == int(unscored(whole).sum()) == sum(whole.missing.values())


def test_a_context_that_is_too_long_has_a_reason():
    inner = faults.backend()
    inner.max_tokens = 6
    request = ScoreRequest(np.arange(9, dtype=np.uint32), 2, 9)
    assert inner.score([request])[0].missing == {"context longer than the model's 6 tokens": 7}


class TwoRanks:
    """Two ranks in two threads: what `Scoring.settle` needs of mopd.ranks.Ranks, over the same encoding."""

    size = 2

    def __init__(self, rank: int, meeting: threading.Barrier, board: list):
        self.rank, self.meeting, self.board = rank, meeting, board

    def gather(self, value):
        self.board[self.rank] = encode(value)
        self.meeting.wait(30)
        found = [decode(memoryview(part)) for part in self.board]
        self.meeting.wait(30)
        return found

    def together(self, what, work):
        return work()


@pytest.mark.parametrize("need,top_k", [("sampled", 0), ("full", 3)])
def test_ranks_share_the_scores_that_each_began(need, top_k):
    rows = rows_of(9, 8)
    meeting, board, backends, done = threading.Barrier(2), [None, None], [], []

    def rank(number: int) -> None:
        planted = faults.Planted(faults.backend())
        planted.gives = frozenset({"sampled", "top_k"})
        far = remote(planted)
        backends.append(planted)
        scoring = Scoring({"game": far, "science": far}, need=need, top_k=top_k, temperature=1.0)
        for row in rows[number::2]:
            scoring.expect([row])
        scoring.settle(rows, TwoRanks(number, meeting, board))
        # What a rank trains on is not what it sampled.
        asked = {"need": "top_k", "k": top_k} if top_k else {"need": need}
        done.append([far(batch, **asked).scored().all() for batch in batches(rows[1 - number::2])])
        far.close()

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(done) == 2 and all(map(all, done))
    asked = sum(len(request) for planted in backends for call in planted.asked for request in call)
    assert asked == sum(row.loss_tokens for row in rows)
