"""The metrics file of a training run: one JSON object a step, appended whole, cut back on resume.

Knows nothing about what the numbers mean. `mopd.report` reads the file back; an optional TensorBoard writer gets the
same numbers. Lines are plain JSON: a number that is not finite is written as null and named in the line's
`non_finite` list, so that every JSON reader can take the file and nothing is lost without a word.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mopd.locks import lock_alone


class MetricsError(ValueError):
    """A metrics file or record breaks the format; the message names the file and the line or key."""


class MetricsBusy(RuntimeError):
    """Another process trains here; the message names the place and the remedy."""

    @classmethod
    def at(cls, place: Path) -> MetricsBusy:
        return cls(f"{place}: another process is training here; wait for it, or give this run another name (train.name), "
                   "seed or folder (run)")


def clean(value: Any, path: str = "", non_finite: list[str] | None = None) -> Any:
    """A copy of `value` made of plain JSON types.

    Arrays and tensors become lists, their scalars numbers, non-finite floats None (their path is appended to
    `non_finite`, such as `domains/game/reverse_kl`). Raises MetricsError for a type that has no JSON form.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        if non_finite is not None:
            non_finite.append(path)
        return None
    if isinstance(value, Mapping):
        return {str(k): clean(v, f"{path}/{k}" if path else str(k), non_finite) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v, f"{path}/{i}", non_finite) for i, v in enumerate(value)]
    if hasattr(value, "tolist"):  # numpy arrays and scalars, torch tensors
        return clean(value.tolist(), path, non_finite)
    raise MetricsError(f"metrics: {path or 'record'} is a {type(value).__name__}; "
                       "give numbers, strings, lists or dicts")


def flatten(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a nested record with its path (`domains/game/share`), in order; strings and nulls have none."""
    for key, value in record.items():
        path = f"{prefix}/{key}" if prefix else str(key)
        if isinstance(value, Mapping):
            yield from flatten(value, path)
        elif isinstance(value, (list, tuple)):
            yield from flatten({str(i): v for i, v in enumerate(value)}, path)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield path, float(value)


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise MetricsError(f"{where} is not JSON ({error}); repair or delete this line") from None
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        raise MetricsError(f"{where} has no whole-number 'step'; repair or delete this line")
    return record


def _scan(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(byte offset, record) of each whole line. A last line without its newline was torn by a kill and is left out."""
    data = path.read_bytes()
    offset, number, last = 0, 0, None
    while (end := data.find(b"\n", offset)) >= 0:
        number += 1
        line = data[offset:end]
        if line.strip():
            record = _parse(line, f"{path.name} line {number}")
            if last is not None and record["step"] <= last:
                raise MetricsError(f"{path.name} line {number}: step {record['step']} does not follow step {last}; "
                                   "two runs wrote into one file")
            last = record["step"]
            yield offset, record
        offset = end + 1


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """All whole records of a metrics file in order of their steps; safe while a run writes.

    A torn last line is left out. Raises MetricsError for any other broken line, FileNotFoundError without a file.
    """
    return [record for _, record in _scan(Path(path))]


class MetricsLog:
    """Appends one line a step to `path` and, if asked, the same numbers to TensorBoard.

    `first_step` is the first step that will be written: 0 begins a run, a resumed run gives the step that it goes on
    with. Records of that step and later ones are cut off, since those steps are played again; a torn last line goes as
    well. `removed` counts the records that were cut. Each line reaches the file in one write, so a reader or a kill
    never sees half of one followed by another. `tensorboard` is a folder, or True for one beside the file.
    Use as a context manager, or call `close`. Raises MetricsBusy while another process writes the same file.
    """

    def __init__(self, path: Path | str, *, first_step: int = 0, tensorboard: Path | str | bool = False):
        self.path = Path(path)
        self.removed = 0
        self.last_step: int | None = None
        self._tensorboard = None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if not lock_alone(self._file):
                raise MetricsBusy.at(self.path)
            os.ftruncate(self._file, self._kept_bytes(first_step))
        except BaseException:
            os.close(self._file)
            raise
        os.fsync(self._file)
        if tensorboard:
            folder = self.path.parent / "tensorboard" if tensorboard is True else tensorboard
            self._tensorboard = _summary_writer(folder, first_step)

    def _kept_bytes(self, first_step: int) -> int:
        """Length of the file up to the last record that stays."""
        whole = self.path.read_bytes().rfind(b"\n") + 1
        for offset, record in _scan(self.path):
            if record["step"] >= first_step:
                self.removed += 1
                whole = min(whole, offset)
            else:
                self.last_step = record["step"]
        return whole

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step's record. `step` is a whole number above the last one; raises MetricsError otherwise."""
        if self._file < 0:
            raise MetricsError(f"{self.path.name}: write after close")
        non_finite: list[str] = []
        plain = clean(record, non_finite=non_finite)
        step = plain.get("step")
        if type(step) is not int:
            raise MetricsError(f"{self.path.name}: a record needs a whole-number 'step', not {step!r}")
        if self.last_step is not None and step <= self.last_step:
            raise MetricsError(f"{self.path.name}: step {step} does not follow step {self.last_step}")
        if non_finite:
            plain["non_finite"] = non_finite
        line = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        written = 0
        while written < len(line):  # a full disk or a signal may cut a write short
            try:
                written += os.write(self._file, line[written:])
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from error
        self.last_step = step
        if self._tensorboard is not None:
            for tag, value in flatten({k: v for k, v in plain.items() if k != "step"}):
                self._tensorboard.add_scalar(tag, value, step)

    def flush(self) -> None:
        """Bring what was written to the disk: before a checkpoint, which must not be ahead of it."""
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """Flush to disk and close; safe to call twice."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1
        if self._tensorboard is not None:
            self._tensorboard.close()
            self._tensorboard = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _summary_writer(folder: Path | str, first_step: int) -> Any:
    """TensorBoard's writer, imported only here because it brings torch with it."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MetricsError(f"TensorBoard curves were asked for but cannot be written ({error}); "
                           "pip install tensorboard, or switch them off") from None
    return SummaryWriter(log_dir=str(folder), purge_step=first_step)
