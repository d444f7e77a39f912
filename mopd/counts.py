"""Sums of what several processes counted, each a dict of numbers or of such dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def summed(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """One dict of the same shape with the sums; a name that only some have counts as 0 in the others: {"a": 1, "b": {"c": 2}}
    and {"b": {"c": 3}} give {"a": 1, "b": {"c": 5}}."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            if isinstance(value, Mapping):
                found[name] = summed([found.get(name, {}), value])
            else:
                found[name] = found.get(name, 0) + value
    return found
