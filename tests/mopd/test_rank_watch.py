"""Who holds the others up: by a step's waits, and said while a rank waits."""

from __future__ import annotations

import time

import pytest
import torch

from mopd.rank_watch import RankWatch, place_of, straggling
from mopd.ranks import Ranks


def test_the_rank_that_waited_least_is_the_slowest():
    record, alert = straggling([4.0, 4.2, 0.1, 4.1], 10.0, 0.3)
    assert record == {"waited": [4.0, 4.2, 0.1, 4.1], "slowest": 2, "lag": pytest.approx(4.0)}
    assert alert == "rank 2 held the others up for 4.0 of the step's 10.0 s (train.straggler_alert=0.3)"
    assert straggling([0.2, 0.1], 10.0, 0.3)[1] == "" and straggling([3.0, 0.0], 10.0, 1.0)[1] == ""
    # A wait that all share is nobody's fault, and one rank alone that waits has no straggler behind it.
    assert straggling([5.0, 5.0, 5.0], 10.0, 0.3)[1] == ""
    assert straggling([0.0, 0.1, 5.0], 10.0, 0.3)[1] == ""


@pytest.fixture
def store():
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_a_rank_that_waits_says_for_whom_once(store, capsys):
    ranks = [Ranks(rank, 3, store=store) for rank in range(3)]
    for rank in ranks:
        rank.at("step 3, sampling")
    assert place_of(store, 2) == (1, "step 3, sampling")
    watches = []
    for number in (0, 1):
        ranks[number]._watch = RankWatch(store, number, 3, after=0.2)
        ranks[number].at("step 3, training")
        watches.append(ranks[number]._watch)
    time.sleep(0.8)
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "of the waiting ranks the lowest speaks, once"
    assert said.startswith("rank 0 of 3 has been at step 3, training for 0 s and waits for rank 2 (at step 3, sampling)")
    ranks[2].at("step 3, training")
    for number in (0, 1):
        ranks[number].at("step 3, handing weights to the engine")
    time.sleep(0.5)
    assert "waits for rank 2 (at step 3, training)" in capsys.readouterr().err
    for rank in ranks[:2]:
        rank.stop_watching()
        rank.stop_watching()
    assert not any(watch._thread.is_alive() for watch in watches)


def test_a_rank_that_stands_still_at_the_same_place_is_said(store, capsys):
    ranks = [Ranks(rank, 3, store=store) for rank in range(3)]
    for number, rank in enumerate(ranks):
        rank._watch = RankWatch(store, number, 3, after=0.4)
        rank.at("step 3, sampling")
    for rank in ranks[:2]:
        rank._watch.exchanging(7)  # the third never comes
    time.sleep(1.5)
    for rank in ranks:
        rank.stop_watching()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rank 0 of 3 has been at step 3, sampling" in said
    assert "waits for rank 2 (at step 3, sampling)" in said


def test_one_process_alone_waits_for_nobody():
    alone = Ranks()
    assert alone.gather(1) == [1] and alone.take_waited() == 0.0
