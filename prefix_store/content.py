"""Canonical content: the same sequence gives the same bytes in every process, and so the same id."""

from __future__ import annotations

import hashlib
import json
import operator
from typing import Any

import numpy as np

from prefix_store.extras import Extra, canonical_values, extra_kinds, hash_extras
from prefix_store.model import Context, Fingerprint, Outcome, Sequence, Source


def _plain(value: Any) -> Any:
    """JSON's default hook: numpy scalars and arrays become numbers and lists; anything else is refused by json."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys, no spaces, ASCII only and finite numbers. Raises TypeError or ValueError."""
    return _ENCODER.encode(value)


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)
_TABLE_ENCODER = json.JSONEncoder(separators=(",", ":"), check_circular=False, allow_nan=False, default=_plain)
# for lists that cannot contain themselves
_SEGMENT_ROW = operator.attrgetter("kind", "start", "end", "turn", "writer")


def segment_rows(context: Context) -> list[tuple[str, int, int, int, str]]:
    """The segments of a context as plain tuples (kind, start, end, turn, writer)."""
    return list(map(_SEGMENT_ROW, context.segments))


def sequence_record(seq: Sequence) -> dict[str, Any]:
    """Everything of a sequence but its contexts, as plain JSON data. `sequence_from_record` is the way back."""
    outcome, source, fingerprint = seq.outcome, seq.source, seq.fingerprint
    extras = extra_kinds(seq.contexts[0].extras) if seq.contexts else {}
    record = {
        "domain": seq.domain,
        "task": seq.task,
        "environment": seq.environment,
        "environment_version": seq.environment_version,
        "seed": int(seq.seed),
        "split": seq.split,
        "actions": list(seq.actions),
        "outcome": {
            "reward": float(outcome.reward),
            "true_reward": float(outcome.true_reward),
            "success": bool(outcome.success),
            "error_category": outcome.error_category,
            "is_infra": bool(outcome.is_infra),
            "hack": bool(outcome.hack),
            "metadata": outcome.metadata,
        },
        "source": {"kind": source.kind, "id": source.id, "revision": source.revision},
        "fingerprint": {
            "tokenizer": fingerprint.tokenizer,
            "chat_template": fingerprint.chat_template,
            "model_config": fingerprint.model_config,
        },
        "metadata": seq.metadata,
    }
    return record | {"extras": extras} if extras else record


def sequence_from_record(record: dict[str, Any], contexts: tuple[Context, ...]) -> Sequence:
    """A sequence from `sequence_record`'s answer (after JSON) and its contexts."""
    fields = dict(record)
    fields.pop("extras", None)
    fields["actions"] = tuple(fields["actions"])
    fields["outcome"] = Outcome(**fields["outcome"])
    fields["source"] = Source(**fields["source"])
    fields["fingerprint"] = Fingerprint(**fields["fingerprint"])
    return Sequence(contexts=contexts, **fields)


def content_hash(seq: Sequence) -> str:
    """The sequence's id: 64 hexadecimal digits of sha256 over its canonical content.

    The content is the record and the context and segment tables, each as canonical JSON after its length (uint64), then
    for each context tokens (uint32), log-probabilities (float32, every NaN the same) and weights versions (int32), and
    then, in the order of their names, the counts (int32) and values of its extras, all little-endian; the record names
    the extras with their types. Nothing else enters: neither time, process nor place. Metadata counts by its JSON form
    (a tuple equals a list).
    """
    return hash_content(canonical_json(sequence_record(seq)).encode("ascii"), seq.contexts)


def hash_content(record: bytes, contexts: tuple[Context, ...], canonical: bool = False) -> str:
    """`content_hash` of the sequence with this record (canonical JSON) and these contexts. `canonical` says that their
    log-probabilities are so already."""
    tables = [(c.parent, c.fork, len(c.tokens), segment_rows(c)) for c in contexts]
    digest = hashlib.sha256()
    for part in (record, _TABLE_ENCODER.encode(tables).encode("ascii")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    for c in contexts:
        digest.update(np.ascontiguousarray(c.tokens, dtype="<u4"))
        digest.update(c.behaviour_logprob if canonical else canonical_logprob(c.behaviour_logprob))
        digest.update(np.ascontiguousarray(c.weights_version, dtype="<i4"))
        if c.extras:
            hash_extras(digest, c.extras)
    return digest.hexdigest()


def canonical_logprob(logprob: np.ndarray) -> np.ndarray:
    """float32 with every NaN replaced by the one canonical NaN, so that equal content has equal bytes."""
    out = np.array(logprob, dtype="<f4")
    out[out != out] = np.nan
    return out


def own_copy(seq: Sequence) -> Sequence:
    """The sequence with canonical arrays of its own, so that what is stored is what was checked. Arrays of another type
    than the data model's stay as they are, for `check_sequence` to refuse."""
    contexts = tuple(
        Context(
            _own(c.tokens, np.uint32),
            _own(c.behaviour_logprob, np.float32),
            _own(c.weights_version, np.int32),
            c.segments,
            c.parent,
            c.fork,
            {name: Extra(extra.counts.copy(), canonical_values(extra.values).copy()) for name, extra in c.extras.items()},
        )
        for c in seq.contexts
    )
    return Sequence(**(vars(seq) | {"contexts": contexts}))


def _own(array: Any, dtype: type) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype != dtype:
        return array
    return canonical_logprob(array) if dtype is np.float32 else np.array(array, dtype=np.dtype(dtype).newbyteorder("<"))
