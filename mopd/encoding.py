"""Plain values and numpy arrays as bytes and back, for what goes from one process of a run to another.

A JSON header for structure and the arrays' bytes behind it: reading runs no code of the sender's, unlike pickle.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

KINDS = "biuf"
# booleans, integers, floats: kinds of arrays whose bytes are their values


def encode(value: Any) -> bytes:
    """None, bool, int, float, str, list, tuple, dict (keys of the same types) and arrays of numbers, nested at will.

    Floats keep every bit of their value, NaN included; numpy scalars become Python's. Raises TypeError for any other type.
    """
    arrays: list[np.ndarray] = []
    header = json.dumps(_plain(value, arrays)).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *(array.tobytes() for array in arrays)])


def decode(data: bytes | memoryview) -> Any:
    """What `encode` was given; arrays are copies of their own. Raises ValueError for bytes that it did not make."""
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 + length:
        raise ValueError(f"{len(view)} bytes do not hold their header of {length}")
    return _Reader(view[8 + length:]).value(json.loads(bytes(view[8:8 + length])))


def _plain(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in KINDS:
            raise TypeError(f"an array of {value.dtype} has no plain bytes")
        arrays.append(np.ascontiguousarray(value))
        return {"array": value.dtype.str, "shape": list(value.shape)}
    if isinstance(value, list):
        return [_plain(item, arrays) for item in value]
    if isinstance(value, tuple):
        return {"tuple": [_plain(item, arrays) for item in value]}
    if isinstance(value, dict):
        return {"items": [[_plain(key, arrays), _plain(item, arrays)] for key, item in value.items()]}
    raise TypeError(f"a {type(value).__name__} cannot be sent: {value!r:.80}")


class _Reader:
    """Rebuilds values in the order in which they were written, so that each array is the next in the bytes."""

    def __init__(self, data: memoryview):
        self.data, self.at = data, 0

    def value(self, plain: Any) -> Any:
        if isinstance(plain, list):
            return [self.value(item) for item in plain]
        if not isinstance(plain, dict):
            return plain
        if "array" in plain:
            kind, shape = np.dtype(plain["array"]), tuple(plain["shape"])
            if kind.kind not in KINDS:
                raise ValueError(f"arrays of {kind} are not read")
            start, self.at = self.at, self.at + kind.itemsize * int(np.prod(shape, dtype=np.int64))
            if self.at > len(self.data):
                raise ValueError(f"the bytes end inside an array of shape {shape}")
            return np.frombuffer(self.data[start:self.at], dtype=kind).reshape(shape).copy()
        if "tuple" in plain:
            return tuple(self.value(item) for item in plain["tuple"])
        return {self.value(key): self.value(item) for key, item in plain["items"]}
