"""Scores of decision points: measured while training, supplied from a file, or stored with the trajectories.

A score is one number per decision point under a name, NaN where there is none. Strategies draw by them; a run writes
them down so that another run can be given them. Reads the index and outcome records: no tokens.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import pathlib
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prefix_store.index import PointIndex
from prefix_store.trajectory import DecisionPoint

MEASURED = ("reverse_kl", "k1", "teacher_entropy", "student_entropy", "disagreement")
"""What training measures at a decision point, means over the sampled tokens of its fresh turns: the reverse KL per token
(exact where the teacher's distribution is there, else the k3 estimate), log π_θ − log π_T of the sampled tokens, both
entropies in nats, and the share of sampled tokens that are not the teacher's most likely one."""

NEED_DISTRIBUTION = ("teacher_entropy", "disagreement")
"""Those that need the teacher's whole distribution, not the sampled token's log-probability alone."""

STORED = ("outcome.", "metadata.", "extra.")
"""How the names of scores begin that are stored with the trajectories."""

NOT_SCORES = ("sequence", "turn", "context", "step", "domain", "source")


FLOAT32_MAX = float(np.finfo(np.float32).max)


class ScoresError(ValueError):
    """Scores that cannot be read or do not fit; the message names the file and the place."""


class Scores:
    """The table of scores over the points of an index, float32.

    `changed` grows whenever a value changes. A table takes 4 bytes per point of the index and name, once a score of that
    name is there.
    """

    def __init__(self, index: PointIndex, smoothing: float = 0.0):
        """smoothing: weight of the past where a point is measured again; 0 keeps the last measurement."""
        if not 0 <= smoothing < 1:
            raise ValueError(f"score_smoothing is {smoothing}; it must be at least 0 and below 1")
        self.index, self.smoothing, self.changed = index, float(smoothing), 0
        self._values: dict[str, np.ndarray] = {}
        self._step: np.ndarray | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names under which any score is there, sorted."""
        return tuple(sorted(self._values))

    def of(self, name: str, rows: np.ndarray) -> np.ndarray:
        """float64 [n]: the scores of these rows of the index; NaN where there is none."""
        if name == "outcome.success":
            return self.index.success[rows].astype(np.float64)
        values = self._values.get(name)
        return np.full(len(rows), np.nan) if values is None else values[rows].astype(np.float64)

    def steps(self, rows: np.ndarray) -> np.ndarray:
        """int64 [n]: the step in which each row was last measured; -1 where it never was."""
        return np.full(len(rows), -1) if self._step is None else self._step[rows].astype(np.int64)

    def touched(self) -> np.ndarray:
        """int64 [n]: the rows that were measured, ascending."""
        return np.zeros(0, dtype=np.int64) if self._step is None else np.flatnonzero(self._step >= 0)

    def supply(self, name: str, rows: np.ndarray, values: np.ndarray) -> None:
        """Put in scores from elsewhere; they are no measurements and not part of the state."""
        self._column(name)[rows] = values
        self.changed += 1

    def record(self, step: int, rows: np.ndarray, measured: Mapping[str, np.ndarray]) -> None:
        """Take measurements of `step`: name → float [n] beside rows; a NaN leaves a score as it is."""
        if self._step is None:
            self._step = np.full(len(self.index), -1, dtype=np.int32)
        for name, values in sorted(measured.items()):
            here = np.abs(values) <= FLOAT32_MAX  # NaN is not
            column, where, new = self._column(name), rows[here], np.asarray(values, dtype=np.float64)[here]
            if self.smoothing:
                old = column[where].astype(np.float64)
                new = np.where(np.isnan(old), new, self.smoothing * old + (1.0 - self.smoothing) * new)
            column[where] = new
        self._step[rows] = step
        self.changed += 1

    def summary(self, name: str, rows: np.ndarray) -> dict[str, Any]:
        """{"measured": how many of these rows have the score, and its mean, min, median, max}."""
        found = self.of(name, rows)
        found = found[~np.isnan(found)]
        if not len(found):
            return {"known": 0}
        return {"known": len(found), "mean": float(found.mean()), "min": float(found.min()),
                "median": float(np.median(found)), "max": float(found.max())}

    def state_dict(self) -> dict[str, Any]:
        """The measured points alone, packed: JSON values, about 10 bytes per point and name before compression."""
        rows = self.touched()
        if not len(rows):
            return {"points": 0, "names": [], "data": ""}
        names = list(self.names)
        parts = [np.diff(rows, prepend=0).astype("<i8"), self._step[rows].astype("<i4")]
        parts += [self._values[name][rows].astype("<f4") for name in names]
        packed = zlib.compress(b"".join(part.tobytes() for part in parts), 6)
        return {"points": len(rows), "names": names, "data": base64.b85encode(packed).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the measurements of `state_dict` in, over the supplied scores. Forgets other measurements only in a table
        that has none: load into a fresh one."""
        if not state["points"]:
            return
        data, n, at = zlib.decompress(base64.b85decode(state["data"])), int(state["points"]), 0

        def take(kind: str) -> np.ndarray:
            nonlocal at
            values = np.frombuffer(data, kind, n, at)
            at += values.nbytes
            return values

        rows = np.cumsum(take("<i8"))
        if rows[-1] >= len(self.index):
            raise ScoresError(f"the saved scores reach decision point {rows[-1]}, there are {len(self.index)}")
        self._step = np.full(len(self.index), -1, dtype=np.int32)
        self._step[rows] = take("<i4")
        for name in state["names"]:
            self._column(name)[rows] = take("<f4")
        self.changed += 1

    def _column(self, name: str) -> np.ndarray:
        if name not in self._values:
            self._values[name] = np.full(len(self.index), np.nan, dtype=np.float32)
        return self._values[name]


# ------------------------------------------------------------------------------------------------- points and rows


def find_rows(index: PointIndex, sequences: Sequence[str], turns: Iterable[int]) -> np.ndarray:
    """int64 [n]: the row of turn turns[i] of sequence sequences[i] (64 hexadecimal digits); -1 where there is none."""
    turns = np.fromiter(turns, dtype=np.int64, count=len(sequences))
    rows = np.full(len(sequences), -1, dtype=np.int64)
    if not len(sequences) or not index.sequences:
        return rows
    unique = sorted(set(sequences))
    ordinals = np.full(len(unique), -1, dtype=np.int64)
    known = np.ascontiguousarray(index.ids).view("S32").ravel()
    right = [i for i, text in enumerate(unique) if _is_id(text)]
    wanted = np.array([bytes.fromhex(unique[i]) for i in right], dtype="S32")
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    ordinals[right] = np.where(known[at] == wanted, at, -1)
    number = {text: i for i, text in enumerate(unique)}
    ordinal = ordinals[np.fromiter((number[text] for text in sequences), dtype=np.int64, count=len(sequences))]
    first = np.asarray(index.first)
    row = first[ordinal] + turns
    there = (ordinal >= 0) & (turns >= 0) & (row < first[np.minimum(ordinal + 1, len(first) - 1)])
    rows[there] = row[there]
    return rows


def rows_of(index: PointIndex, points: Sequence[DecisionPoint]) -> np.ndarray:
    """int64 [n]: the rows of decision points. Raises KeyError naming the first that the index does not have."""
    rows = find_rows(index, [p.sequence for p in points], (p.turn for p in points))
    wrong = np.flatnonzero((rows < 0) | (index.context[rows] != [p.context for p in points])) if len(points) else []
    if len(wrong):
        raise KeyError(f"this version of the store has no {points[wrong[0]]}")
    return rows


def _is_id(text: object) -> bool:
    try:
        return isinstance(text, str) and len(text) == 64 and len(bytes.fromhex(text)) == 32
    except ValueError:
        return False


# ------------------------------------------------------------------------------------------------- stored with trajectories


def stored_scores(store: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows int64 [n], values float64 [n]) of a number that is stored with the trajectories.

    name  `outcome.reward`, `outcome.true_reward`, `outcome.success`, `outcome.metadata.KEY` or `metadata.KEY`: a number
          counts for every decision point of its trajectory, a list with one number per turn for each its own;
          `extra.NAME`: the mean of the extra's values beside the tokens of the turn that was played at the point
    Reads records and extras, no tokens. Raises ScoresError where `store` is an index alone, for an unknown name, where no
    trajectory has such a number, and for a list of another length.
    """
    if not hasattr(store, "records"):
        raise ScoresError(f"score {name!r} is stored with the trajectories; give the store itself, not its index")
    if name.startswith("extra."):
        return _extra_scores(store, name.removeprefix("extra."))
    path = name.split(".", 2 if name.startswith("outcome.metadata.") else 1)
    if path[0] == "outcome" and path[1] not in ("reward", "true_reward", "success", "metadata"):
        raise ScoresError(f"no stored score {name!r}; there is outcome.reward, outcome.true_reward, outcome.success, "
                          "outcome.metadata.KEY, metadata.KEY and extra.NAME")
    index = store.index()
    first, rows, values = index.first, [], []
    for ordinal, record in store.records():
        value = record
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is None:
            continue
        here = np.arange(first[ordinal], first[ordinal + 1])
        try:
            found = np.broadcast_to(np.asarray(value, dtype=np.float64), here.shape)
        except (TypeError, ValueError):
            raise ScoresError(f"sequence {index.sequence_id(ordinal)}: {name} is {value!r}; it must be a number, or a list "
                              f"with one for each of its {len(here)} turns") from None
        rows.append(here)
        values.append(found)
    if not rows:
        raise ScoresError(f"no trajectory of this version has a {name}")
    return np.concatenate(rows), np.concatenate(values)


def _extra_scores(store: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(rows, values) of the points where the extra has a finite value beside what was played."""
    if name not in [extra["name"] for extra in store.extras()]:
        raise ScoresError(f"no trajectory of this version has an extra {name!r}")
    index, rows, values = store.index(), [], []
    for ordinal, record in store.records():
        if name not in record.get("extras", {}):
            continue
        here = np.arange(index.first[ordinal], index.first[ordinal + 1])
        contexts = index.context[here]
        for context in np.unique(contexts).tolist():
            extra = store.extra(name, index.sequence_id(ordinal), context)
            ends = np.concatenate([[0], np.cumsum(extra.counts, dtype=np.int64)])
            for row in here[contexts == context].tolist():
                start = int(index.prefix_tokens[row])
                found = extra.values[ends[start]:ends[start + int(index.action_tokens[row])]].astype(np.float64)
                found = found[np.isfinite(found)]
                if found.size:
                    rows.append(row)
                    values.append(found.mean())
    return np.array(rows, dtype=np.int64), np.array(values)


# ------------------------------------------------------------------------------------------------- files


@dataclasses.dataclass(frozen=True)
class SuppliedScores:
    """Scores by sequence and turn, from a file or computed elsewhere.

    sequence   n ids (64 hexadecimal digits)
    turn       int64 [n]
    columns    name → float64 [n], NaN where there is none
    digest     sha256 of all of it
    """

    sequence: tuple[str, ...]
    turn: np.ndarray
    columns: Mapping[str, np.ndarray]

    def __post_init__(self) -> None:
        for text in self.sequence:
            if not isinstance(text, str) or not text.isascii():
                raise ScoresError(f"scores: {text!r} is no sequence id (64 hexadecimal digits)")
        for name, values in {"turn": self.turn, **self.columns}.items():
            if np.ndim(values) != 1:
                raise ScoresError(f"scores: {name!r} has {np.ndim(values)} dimensions; give one number per decision point")
            if len(values) != len(self.sequence):
                raise ScoresError(f"scores: {len(self.sequence)} sequences and {len(values)} values of {name!r}")

    @property
    def digest(self) -> str:
        found = hashlib.sha256("\n".join(self.sequence).encode())
        found.update(np.ascontiguousarray(self.turn, dtype="<i8").tobytes())
        for name in sorted(self.columns):
            found.update(name.encode() + b"\0" + np.ascontiguousarray(self.columns[name], dtype="<f8").tobytes())
        return found.hexdigest()

    def put_into(self, scores: Scores) -> dict[str, int]:
        """Supply a table with these. Returns {"points": taken, "unknown": points that the version does not have,
        "not_finite": values that are no numbers, or too large for a float32}."""
        rows = find_rows(scores.index, self.sequence, self.turn)
        lost = 0
        for name, values in self.columns.items():
            finite = np.abs(values) <= FLOAT32_MAX  # NaN is not
            there = (rows >= 0) & finite
            lost += int((~finite).sum())
            scores.supply(name, rows[there], values[there])
        return {"points": int((rows >= 0).sum()), "unknown": int((rows < 0).sum()), "not_finite": lost}


def read_scores(path: str | os.PathLike) -> SuppliedScores:
    """Scores from a file: columns `sequence`, `turn` and one or more of numbers (the columns context, step, domain and
    source are passed over).

    By the name's end: `.json`, a list of records or a mapping of columns; `.jsonl`, a record a line; `.parquet`.
    Raises ScoresError naming the file and what is wrong with it, OSError where it cannot be read.
    """
    path = pathlib.Path(path)
    if path.suffix == ".parquet":
        columns = _parquet(path)
    elif path.suffix in (".json", ".jsonl"):
        try:
            text = path.read_text(encoding="utf-8")
            data = [json.loads(line) for line in text.split("\n") if line.strip()] if path.suffix == ".jsonl" \
                else json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ScoresError(f"{path}: not valid JSON ({error})") from error
        columns = data if isinstance(data, dict) else _columns(path, data)
    else:
        raise ScoresError(f"{path}: scores are read from .json, .jsonl or .parquet files")
    for name in ("sequence", "turn"):
        if name not in columns:
            raise ScoresError(f"{path}: no column {name!r}; there is {', '.join(columns) or 'nothing'}")
    names = [name for name in columns if name not in NOT_SCORES]
    if not names:
        raise ScoresError(f"{path}: no score beside sequence and turn; add a column of numbers, for example 'score'")
    try:
        found = {name: np.array([np.nan if v is None else v for v in columns[name]], dtype=np.float64) for name in names}
        turn = np.array(list(columns["turn"]), dtype=np.float64)
        if not (turn == np.floor(turn)).all():
            raise ScoresError(f"{path}: a turn is no whole number")
        # float64 says whole numbers exactly up to 2^53, more turns than any trajectory has
        return SuppliedScores(tuple(columns["sequence"]), np.clip(turn, -1, 2**53).astype(np.int64), found)
    except ScoresError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ScoresError(f"{path}: {error}") from error


def write_scores(path: str | os.PathLike, scores: Scores) -> int:
    """Write every measured point as `read_scores` reads them, by columns (`.json` or `.parquet`); returns how many."""
    path, index = pathlib.Path(path), scores.index
    rows = scores.touched()
    columns: dict[str, list] = {
        "sequence": [index.sequence_id(int(i)) for i in index.sequence[rows]],
        "turn": index.turn[rows].tolist(),
        "domain": [index.domains[i] for i in index.domain[rows]],
        "step": scores.steps(rows).tolist(),
    }
    for name in scores.names:
        columns[name] = [None if np.isnan(v) else v for v in scores.of(name, rows).tolist()]
    aside = path.with_name(f".{path.name}.writing")
    if path.suffix == ".parquet":
        arrow, parquet = _arrow(path)
        parquet.write_table(arrow.table(columns), aside)
    elif path.suffix == ".json":
        aside.write_text(json.dumps(columns), encoding="utf-8")
    else:
        raise ScoresError(f"{path}: scores are written as .json or .parquet")
    os.replace(aside, path)
    return len(rows)


def _columns(path: pathlib.Path, records: Any) -> dict[str, list]:
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ScoresError(f"{path}: expected records with sequence, turn and a score, or a mapping of columns")
    names = list(dict.fromkeys(name for record in records for name in record))
    for number, record in enumerate(records, 1):
        if "sequence" not in record or "turn" not in record:
            raise ScoresError(f"{path}: record {number} has no {'turn' if 'sequence' in record else 'sequence'}")
    return {name: [record.get(name) for record in records] for name in names}


def _parquet(path: pathlib.Path) -> dict[str, list]:
    arrow, parquet = _arrow(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of scores")
    try:
        return parquet.read_table(path).to_pydict()
    except arrow.ArrowInvalid as error:
        raise ScoresError(f"{path}: not a Parquet file ({error})") from error


def _arrow(path: pathlib.Path):
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ScoresError(f"{path}: Parquet files need pyarrow (pip install pyarrow); .json needs nothing") from error
    return pyarrow, pyarrow.parquet
