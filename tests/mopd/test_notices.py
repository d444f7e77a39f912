"""What a run says while it goes: every kind of alert once, a stop where a domain goes untrained, one run in a folder."""

from __future__ import annotations

import subprocess
import sys

import pytest

from mopd.locks import only_process
from mopd.metrics import MetricsBusy
from mopd.run_records import NothingScored, Notices


def metrics(unscored, alerts=()):
    return {"alerts": list(alerts), "missing": {"t": {"non-finite logits": 3}},
            "domains": {"game": {"unscored_share": unscored}, "science": {"unscored_share": 0.0}}}


def test_an_alert_is_said_once_whatever_its_numbers(capsys):
    notices = Notices()
    for step, alert in enumerate(["layer 1: peak 7.25 above 7", "layer 2: peak 9.5 above 7", "teacher t: 3 tokens"]):
        notices.say(step, metrics(0.0, [alert]))
    said = capsys.readouterr().err.splitlines()
    assert [line.split(" (said")[0] for line in said] == ["step 0: layer 1: peak 7.25 above 7", "step 2: teacher t: 3 tokens"]


def test_a_domain_that_no_teacher_scores_stops_the_run():
    notices = Notices()
    for step, share in enumerate([1.0, 1.0, 0.5, 1.0, 1.0]):
        notices.say(step, metrics(share))
    with pytest.raises(NothingScored, match="'game'.*non-finite logits"):
        notices.say(5, metrics(1.0))


def test_one_process_at_a_time_holds_a_folder(tmp_path):
    code = ("import pathlib, sys; from mopd.locks import only_process; from mopd.metrics import MetricsBusy\n"
            "path = pathlib.Path(sys.argv[1])\n"
            "with only_process(path, MetricsBusy.at(path)): pass")
    with only_process(tmp_path / ".lock", MetricsBusy.at(tmp_path)):
        other = subprocess.run([sys.executable, "-c", code, str(tmp_path / ".lock")], capture_output=True, text=True)
        assert other.returncode and "another process is training here" in other.stderr
        with pytest.raises(MetricsBusy), only_process(tmp_path / ".lock", MetricsBusy.at(tmp_path)):
            pass
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path / ".lock")]).returncode == 0


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch):
    """It cannot keep a second process out; the user should know."""
    import errno
    import fcntl

    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(fcntl, "flock", without)
    with pytest.warns(UserWarning, match="no locks .No locks available."):
        with only_process(tmp_path / ".lock", RuntimeError("busy")):
            pass
