"""Tests of finding and ending processes that others left."""

import os
import signal
import subprocess
import sys
import time

import pytest

from mopd.processes import children, end_with_this, known

pytestmark = pytest.mark.skipif(not known(), reason="this system does not tell of its processes")
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
PARENT = f"""
import subprocess, sys, time
from multiprocessing import resource_tracker
from mopd.processes import children, end_with_this
def start():
    return subprocess.Popen([sys.executable, "-c", {STUBBORN!r}], start_new_session=True, stdout=subprocess.PIPE)
kept = start()
before = children()
ended = start()
resource_tracker.ensure_running()
tracker = resource_tracker._resource_tracker._pid
assert children() - before == {{ended.pid, tracker}}
kept.stdout.readline(), ended.stdout.readline()
guard = end_with_this(children() - before)
assert str(tracker) not in [word.partition(":")[0] for word in guard.args[5:]]
print(kept.pid, ended.pid, guard.pid, flush=True)
time.sleep(600)
"""


def lives(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def until_gone(process: int) -> None:
    deadline = time.monotonic() + 60
    while lives(process):
        assert time.monotonic() < deadline, "it lives on"
        time.sleep(0.05)


def test_what_is_guarded_ends_with_a_process_that_is_killed_and_nothing_else_does():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    kept, ended, guard = (int(word) for word in parent.stdout.readline().split())
    try:
        assert lives(ended) and lives(guard)
        parent.kill()
        parent.wait()
        until_gone(ended)
        until_gone(guard)
        assert lives(kept)
    finally:
        for process in (kept, ended):
            if lives(process):
                os.kill(process, signal.SIGKILL)
        parent.stdout.close()


def test_a_guard_ends_with_the_last_of_its_processes():
    before = children()
    child = subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE)
    child.stdout.readline()
    guard = end_with_this(children() - before)
    child.kill()
    child.wait()
    child.stdout.close()
    assert guard.wait(60) == 0
    assert end_with_this([child.pid]) is None
