"""One job: a stable seed from names and numbers, the same on every machine and in every process."""

from __future__ import annotations

import hashlib


def stable_seed(*parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on `parts` alone (never on `hash()`, time or order of arrival).

    Parts are integers (numpy ones too) and strings; each is written with its kind and length, so that ("ab", "c") and
    ("a", "bc"), or 1 and "1", give different seeds. Anything else raises TypeError.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, str):
            kind, text = b"s", part.encode("utf-8")
        elif isinstance(part, bool) or not hasattr(part, "__index__"):
            raise TypeError(f"stable_seed takes integers and strings, not {type(part).__name__}: {part!r}")
        else:
            kind, text = b"i", str(part.__index__()).encode("ascii")
        digest.update(kind + str(len(text)).encode("ascii") + b":" + text)
    return int.from_bytes(digest.digest(), "big") >> 1
