"""`mopd train` with sampling ahead on two real servers: one dies for good, the other comes back, and no step is lost."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.integration.test_overlap import check_accounts, check_batches, student
from tests.tiny_run import records, start_mopd
from tests.vllm.conftest import student_servers

STEPS = 16


@pytest.fixture
def pair(models, tmp_path):
    """Two servers of the student."""
    with student_servers(models["game"], tmp_path) as found:
        yield found


def test_a_run_goes_on_without_a_server_and_waits_where_none_is_left(pair, models, tiny_run, tmp_path):
    changes = (f"student.model={models['game']}", "sampling.engine=server", "sampling.overlap=1", f"train.steps={STEPS}",
               f"sampling.urls=[{pair[0].url},{pair[1].url}]", "sampling.vllm_options.dtype=float32", "train.selftest=false",
               "consistency.points=0", "domains.embodied.max_context_tokens=480", "domains.game.max_context_tokens=480")
    log, folder = tmp_path / "log", student(tmp_path)
    run = start_mopd("train", tiny_run.path, f"run={tmp_path}", *changes, log=log)

    def after(step: int) -> None:
        wait_for(lambda: (folder / "metrics.jsonl").exists() and len(records(folder)) >= step, run, log)

    try:
        after(2)
        pair[1].kill()
        after(5)
        pair[0].kill()
        wait_for(lambda: "sampler-0: its engine has not answered for" in log.read_text(), run, log)
        before = len(records(folder))
        assert before < STEPS and f"{pair[0].url} does not answer (" in log.read_text()
        pair[0].start()  # with the weights of its folder; the run gives it the newest
        assert run.wait(600) == 0, log.read_text()
    finally:
        run.kill()
    said, steps = log.read_text(), records(folder)
    assert f"{pair[1].url} does not answer (" in said and f"{pair[0].url} answers again" in said
    assert [step["step"] for step in steps] == list(range(STEPS))
    check_batches(tiny_run.config(f"run={tmp_path}", *changes), steps)
    check_accounts(tmp_path, steps)
    for step in steps:
        told = step["sampling"]
        assert told["samplers_replaced"] == 0 and (told["weights"]["gap"] or 0.0) < 1e-4 and not step["missing"]
    assert steps[-1]["sampling"]["versions"]["sampler-0"] >= STEPS - 2
    assert steps[-1]["sampling"]["engine_faults"]["a server did not take new weights"] >= 1


def wait_for(what, run, log: Path, seconds: float = 600) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert run.poll() is None and time.monotonic() < end, log.read_text()
        time.sleep(0.1)
