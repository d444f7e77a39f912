"""What a signal does to a run that asked to be told."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from mopd.signals import BrokenOff, Stop, Stopped


@pytest.fixture(autouse=True)
def interruptible():
    """Whoever runs the tests in the background has SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.005)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks(number, capfd):
    before = signal.getsignal(number)
    with Stop(60) as stop:
        assert stop.asked == 0
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)  # by launcher and terminal
        wait(0.02)
        assert stop.asked == number
        with stop.may_break():
            wait(0.02)
    assert signal.getsignal(number) is before
    assert f"{signal.Signals(number).name}: finishing this step" in capfd.readouterr().err
    assert Stopped(number).code == 128 + number


def test_time_runs_out_where_it_may():
    with Stop(0.2, quiet=True) as stop:
        stop.rest_s = 0.15
        os.kill(os.getpid(), signal.SIGTERM)
        wait(0.6)  # not here
        start = time.monotonic()
        with pytest.raises(BrokenOff), stop.may_break():
            wait(30)
        assert time.monotonic() - start < 25
        wait(0.6)  # and once only
    assert not any(thread.name == "stop" for thread in threading.enumerate()) or wait(0.5) is None


def test_a_later_interrupt_ends_at_once(monkeypatch):
    monkeypatch.setattr("mopd.signals.AGAIN_S", 0.05)
    with pytest.raises(KeyboardInterrupt), Stop(60, quiet=True):
        os.kill(os.getpid(), signal.SIGTERM)
        wait(0.1)
        os.kill(os.getpid(), signal.SIGINT)
        wait(30)


def test_what_is_ignored_stays_so_and_other_threads_touch_nothing():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stop(60, quiet=True) as stop:
        os.kill(os.getpid(), signal.SIGINT)
        wait(0.02)
        assert stop.asked == 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = []

    def elsewhere():
        before = signal.getsignal(signal.SIGTERM)
        with Stop(60) as stop:
            found.append((signal.getsignal(signal.SIGTERM) is before, stop.asked))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [(True, 0)]
