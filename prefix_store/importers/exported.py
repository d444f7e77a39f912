"""The store's own export: sequences as JSON rows with every token, value and extra, and back, hash for hash.

    {"format": "prefix_store", "layout": 1, "id": <content hash>, "record": {…}, "contexts": [{"parent", "fork", "length",
     "segments": [[kind, start, end, turn, writer], …], "tokens", "behaviour_logprob", "weights_version", "extras"}, …]}

Arrays are base64 of little-endian values and hold a context's own tokens, from its fork on: tokens uint32,
behaviour_logprob float32 (null: NaN throughout), weights_version int32 (null: -1 throughout); extras: name → {"dtype",
"shape" of one value, "counts" int32 base64, "values" base64}.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from prefix_store.extras import EXTRA_DTYPES, Extra, join_extras
from prefix_store.importers.base import RowRefused, field
from prefix_store.trajectory import (
    Context,
    InvalidSequence,
    Segment,
    Sequence,
    check_sequence,
    content_hash,
    sequence_from_record,
    sequence_record,
)

FORMAT = "prefix_store"
LAYOUT = 1


def to_row(sequence: Sequence, identity: str | None = None) -> dict[str, Any]:
    """A sequence as a row of plain JSON data. `identity` saves computing its content hash again."""
    contexts = []
    for c in sequence.contexts:
        own = c.behaviour_logprob[c.fork :]
        versions = c.weights_version[c.fork :]
        extras = {}
        for name in sorted(c.extras):
            extra = c.extras[name].cut(c.fork, len(c.tokens))
            extras[name] = {"dtype": extra.values.dtype.name, "shape": list(extra.values.shape[1:]),
                            "counts": _pack(extra.counts, "<i4"), "values": _pack(extra.values)}
        contexts.append({
            "parent": c.parent, "fork": int(c.fork), "length": len(c.tokens),
            "segments": [[s.kind, int(s.start), int(s.end), int(s.turn), s.writer] for s in c.segments],
            "tokens": _pack(c.tokens[c.fork :], "<u4"),
            "behaviour_logprob": None if np.isnan(own).all() else _pack(own, "<f4"),
            "weights_version": None if (versions == -1).all() else _pack(versions, "<i4"),
        } | ({"extras": extras} if extras else {}))
    return {"format": FORMAT, "layout": LAYOUT, "id": identity or content_hash(sequence),
            "record": sequence_record(sequence), "contexts": contexts}


def from_row(row: Mapping[str, Any]) -> Sequence:
    """The sequence of a row. Raises RowRefused where a field is missing or wrong or the content is not what the row's
    id says."""
    if row.get("layout") != LAYOUT:
        raise RowRefused("export of another layout", f"layout {row.get('layout')!r}, this program reads {LAYOUT}")
    try:
        contexts: list[Context] = []
        for c in field(row, "contexts", list):
            contexts.append(_context(c, contexts))
        sequence = sequence_from_record(field(row, "record", dict), tuple(contexts))
        check_sequence(sequence)
        found = content_hash(sequence)
    except InvalidSequence:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, binascii.Error) as error:
        if isinstance(error, RowRefused):
            raise
        raise RowRefused("export that cannot be read", f"{type(error).__name__}: {error}") from None
    if found != row.get("id"):
        raise RowRefused("export whose content is not what its id says", f"id {row.get('id')!r}, content {found}")
    return sequence


def _context(c: Mapping[str, Any], before: list[Context]) -> Context:
    parent, fork = c["parent"], c["fork"]
    tokens = _unpack(c["tokens"], "<u4")
    logprob = np.full(len(tokens), np.nan, np.float32)
    if c["behaviour_logprob"] is not None:
        logprob = _unpack(c["behaviour_logprob"], "<f4")
    version = np.full(len(tokens), -1, np.int32)
    if c["weights_version"] is not None:
        version = _unpack(c["weights_version"], "<i4")
    extras = {}
    for name, e in c.get("extras", {}).items():
        shape = [int(n) for n in e["shape"]]
        if e["dtype"] not in EXTRA_DTYPES:
            raise ValueError(f"extra {name!r} has dtype {e['dtype']!r}")
        dtype = np.dtype(e["dtype"]).newbyteorder("<")
        extras[name] = Extra(counts=_unpack(e["counts"], "<i4"), values=_unpack(e["values"], dtype).reshape([-1, *shape]))
    if parent is not None:
        if isinstance(parent, bool) or not 0 <= parent < len(before) or not 0 <= fork <= len(before[parent].tokens):
            raise ValueError(f"parent {parent!r} and fork {fork!r} name no tokens of an earlier context")
        p = before[parent]
        tokens = np.concatenate([p.tokens[:fork], tokens])
        logprob = np.concatenate([p.behaviour_logprob[:fork], logprob])
        version = np.concatenate([p.weights_version[:fork], version])
        extras = {name: join_extras([p.extras[name].cut(0, fork), own]) for name, own in extras.items()}
    segments = tuple(Segment(str(kind), int(start), int(end), int(turn), str(writer))
                     for kind, start, end, turn, writer in c["segments"])
    context = Context(tokens, logprob, version, segments, parent, fork)
    return dataclasses.replace(context, extras=extras) if extras else context


def _pack(array: np.ndarray, dtype: str | None = None) -> str:
    array = np.ascontiguousarray(array, dtype=dtype or array.dtype.newbyteorder("<"))
    return base64.b64encode(array.tobytes()).decode("ascii")


def _unpack(text: str, dtype: Any) -> np.ndarray:
    array = np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)
    return array.astype(array.dtype.newbyteorder("="))


def is_export(row: Mapping[str, Any]) -> bool:
    return row.get("format") == FORMAT and isinstance(row.get("contexts"), list)
