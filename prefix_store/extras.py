"""Extras: any number of values of one type beside each token (a teacher's top-k, candidate sets, routed experts).

Knows numpy only. An extra has a free name; its values lie in one array, token after token, with a count per token.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

EXTRA_NAME = re.compile(r"(?!zarr\.json$)[A-Za-z][A-Za-z0-9_.-]{0,99}")
# a name is a folder on disk and a node of a Zarr hierarchy, in which zarr.json is the group's own file
EXTRA_DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)


@dataclasses.dataclass(frozen=True)
class Extra:
    """Values beside the tokens of one context.

    counts  int32 [T]               how many values token t has (0: none)
    values  [sum(counts), ...tail]  of one of EXTRA_DTYPES: those of token 0, then those of token 1, …; `tail` is the
                                    shape of one value: () for an id or a probability, (layers, k) for routed experts
    """

    counts: np.ndarray
    values: np.ndarray

    @classmethod
    def per_token(cls, values: np.ndarray, present: np.ndarray | None = None) -> Extra:
        """One value of shape `values.shape[1:]` for each token where `present` (bool [T]) holds; None: for every token.

        Raises ValueError if `values` does not have one row for each of those tokens.
        """
        values = np.asarray(values)
        counts = np.ones(len(values), np.int32) if present is None else np.asarray(present, dtype=bool).astype(np.int32)
        if counts.sum() != len(values):
            raise ValueError(f"{len(values)} values for {counts.sum()} tokens; give one row per present token")
        return cls(counts, values)

    @classmethod
    def ragged(cls, rows: Iterable[Any], dtype: Any) -> Extra:
        """From one array-like per token, each [n_t, ...tail] with n_t ≥ 0 (an empty list is no value)."""
        arrays = [np.asarray(row, dtype=dtype) for row in rows]
        counts = np.array([len(row) for row in arrays], dtype=np.int32)
        full = [row for row in arrays if len(row)]
        return cls(counts, np.concatenate(full) if full else np.zeros(0, dtype=dtype))

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.counts)

    @property
    def kind(self) -> tuple[str, tuple[int, ...]]:
        """(dtype name, tail): what all contexts of a sequence have alike."""
        return self.values.dtype.name, self.values.shape[1:]

    def offsets(self) -> np.ndarray:
        """int64 [T + 1]: the values of token t are values[offsets[t] : offsets[t + 1]]."""
        return np.concatenate([[0], np.cumsum(self.counts, dtype=np.int64)])

    def at(self, token: int) -> np.ndarray:
        """[counts[token], ...tail]: the values of one token."""
        start = int(self.counts[:token].sum(dtype=np.int64))
        return self.values[start : start + int(self.counts[token])]

    def cut(self, start: int, stop: int) -> Extra:
        """The extra of tokens [start, stop), as views."""
        first = int(self.counts[:start].sum(dtype=np.int64))
        counts = self.counts[start:stop]
        return Extra(counts, self.values[first : first + int(counts.sum(dtype=np.int64))])

    def copy(self) -> Extra:
        return Extra(self.counts.copy(), self.values.copy())


def join_extras(parts: list[Extra]) -> Extra:
    """Extras of consecutive runs of tokens (at least one, all of one kind) as that of all of them."""
    if len(parts) == 1:
        return parts[0]
    return Extra(np.concatenate([p.counts for p in parts]), np.concatenate([p.values for p in parts]))


def canonical_values(values: np.ndarray) -> np.ndarray:
    """Contiguous little-endian values with every NaN the same, so that equal content has equal bytes."""
    out = np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("<"))
    if out.dtype.kind == "f":
        nan = np.isnan(out)
        if nan.any():
            out = out.copy()
            out[nan] = np.nan
    return out


def extra_kinds(extras: Mapping[str, Extra]) -> dict[str, list]:
    """Name → [dtype name, [tail …]] as plain JSON data: how a sequence's record names its extras."""
    return {name: [extra.kind[0], list(extra.kind[1])] for name, extra in extras.items()}


def hash_extras(digest: Any, extras: Mapping[str, Extra]) -> None:
    """Feed counts (int32) and canonical values of each extra, in the order of their names, to a hashlib digest."""
    for name in sorted(extras):
        digest.update(np.ascontiguousarray(extras[name].counts, dtype="<i4"))
        digest.update(canonical_values(extras[name].values).tobytes())


def extras_fault(extras: Mapping[str, Extra], length: int, kinds: Mapping[str, list]) -> str:
    """What is wrong with the extras of a context of `length` tokens whose sequence has extras of these kinds, or ""."""
    if set(extras) != set(kinds):
        odd = sorted(set(extras) ^ set(kinds))[0]
        return f"extra {odd!r} is not in every context of the sequence (give counts of 0 where there is none)"
    for name, extra in extras.items():
        if not isinstance(name, str) or not EXTRA_NAME.fullmatch(name):
            return f"extra name {name!r}: use a letter and then letters, digits, '_', '.' or '-', 100 at most, not zarr.json"
        if not isinstance(extra, Extra):
            return f"extra {name!r} is {type(extra).__name__}, not an Extra"
        for what, array in (("counts", extra.counts), ("values", extra.values)):
            if not isinstance(array, np.ndarray) or array.ndim == 0:
                return f"extra {name!r}: {what} is {type(array).__name__}, not an array with rows"
        if extra.counts.dtype != np.int32 or extra.counts.shape != (length,):
            found = f"{extra.counts.dtype} {extra.counts.shape}"
            return f"extra {name!r}: counts is {found}, not an int32 vector of {length} entries"
        if extra.values.dtype.name not in EXTRA_DTYPES:
            return f"extra {name!r}: values of type {extra.values.dtype} cannot be kept; use one of {', '.join(EXTRA_DTYPES)}"
        if 0 in extra.values.shape[1:]:
            return f"extra {name!r}: a value has shape {extra.values.shape[1:]}, which holds nothing"
        if length and extra.counts.min() < 0:
            return f"extra {name!r}: count of token {int(np.argmin(extra.counts))} is below 0"
        total = int(extra.counts.sum(dtype=np.int64))
        if total != len(extra.values):
            return f"extra {name!r}: {len(extra.values)} values, but the counts add up to {total}"
        if [extra.kind[0], list(extra.kind[1])] != kinds[name]:
            return f"extra {name!r} is {extra.kind}, in the sequence's first context {tuple(kinds[name])}"
    return ""


def shared_extras_fault(extras: Mapping[str, Extra], parents: Mapping[str, Extra], fork: int) -> str:
    """The name of an extra that is not the parent's over the first `fork` tokens, or ""."""
    for name, extra in extras.items():
        mine, theirs = extra.cut(0, fork), parents[name].cut(0, fork)
        same = np.array_equal(mine.counts, theirs.counts)
        if not same or canonical_values(mine.values).tobytes() != canonical_values(theirs.values).tobytes():
            return name
    return ""


def example_extras(rng: np.random.Generator, action: np.ndarray, vocabulary: int) -> dict[str, Extra]:
    """Random extras of the four usual kinds for tests and documents; `action` bool [T] marks the sampled tokens."""
    k, layers, sampled, length = 4, 2, int(action.sum()), len(action)
    ids = rng.integers(0, vocabulary, (sampled, k)).astype(np.uint32)
    logprobs = np.sort(-rng.exponential(1.0, (sampled, k)).astype(np.float32))[:, ::-1]
    sizes = np.where(action, rng.integers(1, 6, length), 0).astype(np.int32)
    return {
        "teacher_topk_ids": Extra.per_token(ids, action),
        "teacher_topk_logprobs": Extra.per_token(np.ascontiguousarray(logprobs), action),
        "candidates": Extra(sizes, rng.integers(0, vocabulary, int(sizes.sum())).astype(np.uint32)),
        "routed_experts": Extra.per_token(rng.integers(0, 8, (length, layers, 2)).astype(np.uint8)),
    }
