"""How long and how large the work of each source is: drawn from lognormals, or from what real runs recorded.

A trace is a JSONL of finished sequences: {"domain": NAME, "seconds": s, "tokens": n, "turns": k, "accepted": true}; `turns`
and `accepted` may be left out. A run's metrics.jsonl serves too; see `read_trace`.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

BLOCK = 1024
# groups drawn at a time; a source's n-th group never depends on how many are asked for


class TraceError(ValueError):
    """A trace cannot be used; names the file, the line and what is missing."""


@dataclasses.dataclass(frozen=True)
class Lengths:
    """Recorded sequences of a domain, entry by entry: seconds > 0, tokens > 0, accepted (0 or 1, or a share between)."""

    seconds: np.ndarray
    tokens: np.ndarray
    turns: np.ndarray
    accepted: np.ndarray


@dataclasses.dataclass(frozen=True)
class SourceModel:
    """A source's work. seconds, tokens: means of one sequence; spread: standard deviation of the log of both (lognormal, half
    of its variance common to both); acceptance of a group; recorded: draw from these entries instead."""

    name: str
    domain: str
    seconds: float
    tokens: float
    spread: float = 0.8
    acceptance: float = 1.0
    group_size: int = 1
    recorded: Lengths | None = None

    def mean_group_seconds(self, work: Work) -> float:
        """Mean seconds until the last sequence of a group has ended, over the first block of `work`."""
        return float(work.block(self.name, 0)[0].max(axis=1).mean())


class Work:
    """What launch `number` of a source takes: a pure function of (seed, source, number)."""

    def __init__(self, models: Mapping[str, SourceModel], seed: int):
        self.models, self.seed = dict(models), seed
        self._index = {name: i for i, name in enumerate(models)}
        self._blocks: dict[tuple[str, int], tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def block(self, source: str, block: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(seconds [BLOCK, G], tokens [BLOCK, G], accepted [BLOCK]) of the launches from block · BLOCK on."""
        key = (source, block)
        if key not in self._blocks:
            model = self.models[source]
            rng = np.random.default_rng([self.seed, self._index[source], block])
            shape = (BLOCK, model.group_size)
            if model.recorded is not None:
                rows = rng.integers(len(model.recorded.seconds), size=shape)
                seconds, tokens = model.recorded.seconds[rows], model.recorded.tokens[rows]
                accepted = rng.random(BLOCK) < model.recorded.accepted[rows].mean(axis=1)
            else:
                common = rng.standard_normal(shape)
                parts = [math.sqrt(0.5) * (common + rng.standard_normal(shape)) for _ in range(2)]
                shrink = -0.5 * model.spread**2  # so that the mean is what it says
                seconds = model.seconds * np.exp(model.spread * parts[0] + shrink)
                tokens = np.maximum(np.rint(model.tokens * np.exp(model.spread * parts[1] + shrink)), 1.0)
                accepted = rng.random(BLOCK) < model.acceptance
            self._blocks[key] = (np.asarray(seconds, float), np.asarray(tokens, float), accepted)
        return self._blocks[key]

    def sequence(self, source: str, number: int, member: int) -> tuple[float, int]:
        """(seconds, tokens) of one sequence."""
        seconds, tokens, _ = self.block(source, number // BLOCK)
        return float(seconds[number % BLOCK, member]), int(tokens[number % BLOCK, member])

    def accepted(self, source: str, number: int) -> bool:
        return bool(self.block(source, number // BLOCK)[2][number % BLOCK])


def read_trace(path: str | Path, *, tokens_per_second: float | None = None) -> dict[str, Lengths]:
    """Recorded sequences by domain of a trace, or of a run's metrics.jsonl.

    A metrics.jsonl has each step's mean action tokens and turns of a domain's rollouts, but no sequence's seconds: these are
    made of `tokens_per_second` of one sequence and of the run's own environment seconds per step; acceptance is the share
    that did not fail. It has no observation tokens, so KV needs come out too low. Raises TraceError for a file without
    usable lines, with what is missing.
    """
    file = Path(path)
    if not file.is_file():
        raise TraceError(f"trace: there is no file {file}")
    rows: dict[str, list[tuple[float, float, float, float]]] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise TraceError(f"{file}, line {number}: not JSON ({error})") from error
        if not isinstance(record, dict):
            raise TraceError(f"{file}, line {number}: expected an object, found {line[:40]!r}")
        try:
            found = _metrics_rows(record, tokens_per_second) if "domains" in record else [_trace_row(record)]
        except (KeyError, TypeError, ValueError) as error:
            said = f"no {error.args[0]!r}" if isinstance(error, KeyError) else str(error)
            raise TraceError(f"{file}, line {number}: {said}. A line of a trace is "
                             '{"domain": "game", "seconds": 12.5, "tokens": 830, "turns": 6, "accepted": true}') from error
        for domain, row in found:
            rows.setdefault(domain, []).append(row)
    if not rows:
        raise TraceError(f"{file}: no finished sequence in it" + (
            "; a metrics.jsonl must be of a run that played rollouts (train.prefix_fraction below 1)"
            if file.name == "metrics.jsonl" else ""))
    return {d: Lengths(*(np.array(column) for column in zip(*entries, strict=True))) for d, entries in rows.items()}


def write_trace(path: str | Path, lengths: Mapping[str, Lengths]) -> int:
    """The trace of `lengths` as JSONL, which `read_trace` reads back; returns the number of lines."""
    lines = [json.dumps({"domain": domain, "seconds": float(s), "tokens": float(t), "turns": float(k), "accepted": float(a)})
             for domain, own in lengths.items()
             for s, t, k, a in zip(own.seconds, own.tokens, own.turns, own.accepted, strict=True)]
    Path(path).write_text("".join(line + "\n" for line in lines))
    return len(lines)


def _trace_row(record: Mapping) -> tuple[str, tuple[float, float, float, float]]:
    row = (float(record["seconds"]), float(record["tokens"]), float(record.get("turns", 1)),
           float(record.get("accepted", True)))
    if not (all(map(math.isfinite, row)) and row[0] > 0 and row[1] > 0 and row[2] >= 1 and 0 <= row[3] <= 1):
        raise ValueError(f"seconds, tokens and turns must be positive and accepted lie in [0, 1], got {row}")
    return str(record["domain"]), row


def _metrics_rows(record: Mapping, tokens_per_second: float | None) -> list[tuple[str, tuple[float, float, float, float]]]:
    if not tokens_per_second:
        raise ValueError("a metrics.jsonl has no seconds of single sequences; set cluster.tokens_per_second, what one "
                         "sequence is decoded with, and they are reckoned from its tokens and environment steps")
    steps = record["environment_steps"]
    per_step = record["seconds"]["environments"] / steps if steps else 0.0
    found = []
    for domain, numbers in record["domains"].items():
        rollout = numbers["streams"].get("rollout")
        if not rollout or not rollout["sequences"] or not numbers["turns"]:
            continue
        turns = float(numbers["turns"])
        played = rollout["sequences"] / turns  # the record counts a stream's actions under this name
        tokens, failed = rollout["tokens"] / played, sum(numbers["infra_failures"].values())
        found.append((domain, (tokens / tokens_per_second + turns * per_step, max(tokens, 1.0), max(turns, 1.0),
                               played / (played + failed))))
    return found
