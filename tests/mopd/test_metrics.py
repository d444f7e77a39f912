"""The metrics file: whole lines, plain JSON, honest resume."""

import errno
import json
import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mopd.metrics import MetricsError, MetricsLog, clean, flatten, read_metrics

RECORD = {"loss": 0.5, "domains": {"game": {"reverse_kl": 0.25, "reward": None}}, "router": {"cv": [0.5, 1.0]}}


def write(path, steps, **options):
    with MetricsLog(path, **options) as writer:
        for step in steps:
            writer.write({"step": step, **RECORD})
    return writer


def test_records_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "deep" / "metrics.jsonl"
    write(path, [1, 2, 3])
    assert read_metrics(path) == [{"step": s, **RECORD} for s in (1, 2, 3)]
    assert path.read_text().count("\n") == 3


def test_a_line_is_readable_before_the_run_ends(tmp_path):
    writer = MetricsLog(tmp_path / "m.jsonl")
    writer.write({"step": 0})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 0}]
    writer.close()
    writer.close()
    with pytest.raises(MetricsError, match="after close"):
        writer.write({"step": 1})


def test_numpy_and_tensor_like_values_become_plain_numbers(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as writer:
        writer.write({"step": np.int64(4), "x": np.float32(0.5), "cv": np.array([1.0, 2.0]), "n": {3: np.int32(7)},
                      "flag": np.bool_(True)})
    assert read_metrics(path) == [{"step": 4, "x": 0.5, "cv": [1.0, 2.0], "n": {"3": 7}, "flag": True}]


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path):
    path = tmp_path / "m.jsonl"
    with MetricsLog(path) as writer:
        writer.write({"step": 1, "loss": math.nan, "domains": {"game": {"x": np.array([1.0, np.inf])}}})
    line = json.loads(path.read_text(), parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    assert line["loss"] is None and line["domains"]["game"]["x"] == [1.0, None]
    assert line["non_finite"] == ["loss", "domains/game/x/1"]


def test_an_unknown_type_is_named_with_its_key():
    with pytest.raises(MetricsError, match="domains/game is a object"):
        clean({"domains": {"game": object()}})


def test_resume_cuts_later_steps_and_counts_them(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, range(1, 8))
    writer = write(path, [5, 6], first_step=5)
    assert writer.removed == 3
    assert [r["step"] for r in read_metrics(path)] == [1, 2, 3, 4, 5, 6]
    assert write(path, [0]).removed == 6
    assert [r["step"] for r in read_metrics(path)] == [0]


def test_steps_only_go_up(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as writer:
        writer.write({"step": 3})
        for record in ({"step": 3}, {"step": 2}, {"loss": 1.0}, {"step": 4.0}, {"step": True}):
            with pytest.raises(MetricsError, match="step"):
                writer.write(record)
    write(tmp_path / "m.jsonl", [4], first_step=4)
    assert [r["step"] for r in read_metrics(tmp_path / "m.jsonl")] == [3, 4]


@given(cut=st.integers(0, 400), resume=st.integers(0, 6))
def test_a_kill_at_any_byte_loses_at_most_the_last_line(tmp_path_factory, cut, resume):
    path = tmp_path_factory.mktemp("m") / "m.jsonl"
    write(path, range(1, 6))
    whole = path.read_bytes()
    path.write_bytes(whole[:cut])
    kept = [r["step"] for r in read_metrics(path)]
    assert kept == list(range(1, whole[:cut].count(b"\n") + 1))
    write(path, [7], first_step=resume)
    assert [r["step"] for r in read_metrics(path)] == [s for s in kept if s < resume] + [7]


def test_a_broken_line_in_the_middle_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step":1}\n{"step":2\n{"step":3}\n')
    with pytest.raises(MetricsError, match="m.jsonl line 2"):
        read_metrics(path)
    path.write_text('{"step":1}\n{"step":1}\n')
    with pytest.raises(MetricsError, match="does not follow"):
        read_metrics(path)


def test_flatten_gives_every_number_its_path():
    assert dict(flatten({**RECORD, "alerts": ["x"], "on": True})) == {
        "loss": 0.5, "domains/game/reverse_kl": 0.25, "router/cv/0": 0.5, "router/cv/1": 1.0}


def test_tensorboard_gets_the_same_numbers(tmp_path):
    pytest.importorskip("torch")
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    write(tmp_path / "m.jsonl", [1, 2], tensorboard=True)
    events = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("domains/game/reverse_kl")] == [(1, 0.25), (2, 0.25)]
    assert "step" not in events.Tags()["scalars"]


def test_two_processes_do_not_write_one_file(tmp_path):
    """The second one is refused before it cuts off a single record of the first."""
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write({"step": 0})
        code = f"from mopd.metrics import MetricsLog\nMetricsLog({str(path)!r})"
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert second.returncode == 1 and "another process is training here" in second.stderr
        log.write({"step": 1})
    assert [record["step"] for record in read_metrics(path)] == [0, 1]
    MetricsLog(path, first_step=2).close()


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched, pytest.raises(OSError, match="metrics.jsonl") as caught:
            patched.setattr("mopd.metrics.os.write", full)
            log.write({"step": 0})
        assert caught.value.errno == errno.ENOSPC
