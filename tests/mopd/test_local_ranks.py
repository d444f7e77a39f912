"""What the option --ranks makes of the ends of torchrun."""

from __future__ import annotations

import signal

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from mopd import local_ranks


@pytest.mark.parametrize("status", [1, 2, 143])
def test_the_status_of_the_rank_that_failed_first_is_the_jobs(monkeypatch, capsys, status):
    def main(arguments):
        assert arguments == ["--standalone"]
        raise ChildFailedError("mopd.cli", {0: ProcessFailure(0, 10, status, "<N/A>")})

    monkeypatch.setattr(local_ranks, "main", main)
    assert local_ranks.run(["--standalone"]) == status and not capsys.readouterr().err


def test_signals_are_told_as_shells_do(monkeypatch, capsys):
    def killed(_):
        raise ChildFailedError("mopd.cli", {1: ProcessFailure(1, 10, -signal.SIGKILL, "<N/A>")})

    def told(_):
        raise SignalException("Process 10 got signal: 15", signal.SIGTERM)

    monkeypatch.setattr(local_ranks, "main", killed)
    assert local_ranks.run([]) == 137 and "rank 1 of this job was ended by SIGKILL" in capsys.readouterr().err
    monkeypatch.setattr(local_ranks, "main", told)
    assert local_ranks.run([]) == 143
    monkeypatch.setattr(local_ranks, "main", lambda _: None)
    assert local_ranks.run([]) == 0
