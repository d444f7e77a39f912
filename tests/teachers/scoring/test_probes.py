"""Probes see other weights, another precision, a shift and answers that depend on their order; rounding they let pass."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from teachers.history import TeacherHistory
from teachers.scoring import HFTeacher
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.probes import TEXTS, TOKENS, Probes, random_texts
from teachers.scoring.requests import TeacherError
from tests.mopd.learner.tiny import make_model
from tests.teachers.scoring import faults


def probes(planted, *, every=2, tolerance=None, revision="r", dtype="float32"):
    texts = random_texts(range(2, 61), 3, longest=30)
    return Probes({"t": (planted, revision, dtype)}, {"t": texts}, seed=1, every=every, tolerance=tolerance)


def test_texts_are_the_seeds_alone():
    one, two = random_texts(range(9), 1), random_texts(range(9), 1)
    assert len(one) == TEXTS and all(len(t) == TOKENS for t in one)
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(one[0], random_texts(range(9), 2)[0])


def test_an_unchanged_teacher_is_quiet_and_asked_in_changing_order():
    planted = faults.Planted(faults.backend())
    found = probes(planted)
    assert found.launch() == []
    orders = []
    for step in (2, 4, 6, 8):
        drift, alarms = found.probe(step)
        assert alarms == {} and drift["t"]["largest"] < 1e-4 and drift["t"]["unscored"] == 0
        orders.append([request.key() for request in planted.asked[-1]])
    assert len({tuple(order) for order in orders}) > 1 and len({tuple(sorted(order)) for order in orders}) == 1
    assert [step for step in range(7) if found.due(step)] == [2, 4, 6]
    assert not any(probes(planted, every=0).due(step) for step in range(9))


@pytest.mark.parametrize("fault", [faults.shifted, faults.not_a_number, faults.short])
def test_a_fault_between_two_probes_is_an_alarm(fault):
    planted = faults.Planted(faults.backend())
    found = probes(planted)
    found.launch()
    planted.fault = fault
    (alarm,) = found.probe(2)[1].values()
    assert alarm.startswith("teacher 't': its probe has ") and "teachers.t" in alarm
    if fault is faults.shifted:
        assert "scores that differ by up to" in alarm and "tolerance 0.001" in alarm


def test_other_weights_and_another_precision_are_told_apart_from_rounding():
    planted = faults.Planted(faults.backend())
    found = probes(planted)
    found.launch()
    inner = planted.inner
    planted.inner = faults.backend(1)
    drift, alarms = found.probe(2)
    assert drift["t"]["largest"] > 0.5 and list(alarms) == ["t"]
    assert "other weights, another precision or a shift" in alarms["t"]
    planted.inner = HFBackend(HFTeacher(make_model("qwen3_moe").to(torch.bfloat16), teacher="t"))
    drift, alarms = found.probe(2)
    assert list(alarms) == ["t"] and 1e-3 < drift["t"]["largest"]
    planted.inner = inner
    assert found.probe(4)[1] == {}
    lax = probes(faults.Planted(faults.backend()), tolerance=1e3)
    lax.launch()
    lax.backends["t"][0].inner = faults.backend(1)
    assert lax.probe(2)[1] == {}


def test_answers_that_depend_on_their_order_show_at_launch():
    def by_place(request, answer, number):
        return dataclasses.replace(answer, logprob=answer.logprob - 0.01 * (number % TEXTS))

    (alarm,) = probes(faults.Planted(faults.backend(), by_place)).launch()
    assert "from the same texts in another order" in alarm


def test_a_restart_compares_with_the_first_process(tmp_path):
    first = probes(faults.Planted(faults.backend()))
    first.launch()
    first.save(tmp_path / "probes.json")
    known = Probes.load(tmp_path / "probes.json")
    assert probes(faults.Planted(faults.backend())).launch(known) == []
    (alarm,) = probes(faults.Planted(faults.backend(1))).launch(known)
    assert "from its first probe" in alarm
    assert probes(faults.Planted(faults.backend(1)), revision="new").launch(known) == [], "another teacher begins anew"
    assert Probes.load(tmp_path / "none.json") == {}


def test_no_score_at_all_stops_the_launch_and_a_silent_teacher_is_passed_over():
    def nothing(request, answer, number):
        return dataclasses.replace(answer, logprob=np.full(len(request), np.nan, np.float32))

    with pytest.raises(TeacherError, match="gave none of 116 probe tokens a score"):
        probes(faults.Planted(faults.backend(), nothing)).launch()
    planted = faults.Planted(faults.backend())
    found = probes(planted)
    found.launch()
    planted.down = True
    assert found.probe(2) == ({"t": {"unanswered": 1}}, {})


def test_against_the_model_in_this_process():
    found = probes(faults.Planted(faults.backend()))
    found.launch()
    assert not found.against("t", faults.backend(), "here").exceeds(1e-3)
    wrong = found.against("t", faults.backend(1), "model in this process")
    assert wrong.exceeds(0.5) and "from model in this process" in wrong.words(0.5)
    shifted = probes(faults.Planted(faults.backend(), faults.shifted))
    shifted.launch()
    assert shifted.against("t", faults.backend(), "here").exceeds(0.5), "a shift is there from the launch on"


def test_the_history_says_what_changed_and_counts_tokens():
    def manifest(**teachers):
        return {"teachers": {name: {"model": f"m/{name}", "revision": revision, "domains": domains}
                             for name, (revision, domains) in teachers.items()}}

    history = TeacherHistory()
    assert history.begin(0, manifest(a=("1", ["game"]), b=("2", ["web"]))) == []
    history.count({"game": 5, "web": 7})
    again = TeacherHistory(history.periods)
    assert again.begin(10, manifest(a=("1", ["game"]), b=("2", ["web"]))) == [] and len(again.periods) == 1
    again.count({"game": 1})
    said = again.begin(12, manifest(a=("9", ["game"]), c=("3", ["web"])))
    assert said == ["from step 12 on teacher 'a' is m/a 9 instead of m/a 1",
                    "from step 12 on teacher 'b' no longer serves web", "from step 12 on teacher 'c' (m/c 3) is new, for web"]
    again.count({"game": 2, "web": 3})
    assert [{n: t["tokens"] for n, t in p["teachers"].items()} for p in again.periods] == [{"a": 6, "b": 7}, {"a": 2, "c": 3}]
    assert [p["from_step"] for p in again.periods] == [0, 12]


def test_offloaded_weights_come_and_go_and_score_the_same():
    from mopd.learner.packing import pack
    from mopd.rows import STREAMS
    from tests.mopd.learner.tiny import mixed_rows

    rows = [r for r in mixed_rows(np.random.default_rng(0), 6) if r.domain == "game"]
    (batch,) = pack(rows, token_budget=1000, pad_id=0, domains=("game",), streams=STREAMS)
    stays = HFTeacher(make_model("qwen3_moe"), teacher="t")
    moves = HFTeacher(make_model("qwen3_moe"), teacher="t", offload=True)
    for turn in range(3):
        assert not moves.offloaded.here
        assert torch.equal(moves(batch, need="sampled").logprob, stays(batch, need="sampled").logprob)
        hidden = moves(batch, need="hidden")
        assert moves.offloaded.here and moves.offloaded.moves == turn + 1, "between two rests they are brought once"
        moves.rest()
        torch.testing.assert_close(hidden.head.logits(hidden.hidden), stays(batch, need="full").logits)
    moves.check_unchanged()
    stays.rest()
    moves.close()
