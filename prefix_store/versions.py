"""The versions of a store: a chain of small JSON manifests that each name an exact set of segments.

A manifest is made under a number that only one process can take, from the one before it. So the chain has no gap and no
branch, whoever makes version n + 1 has read version n, and what one process writes into it all later ones know: that is
what commits, compaction and garbage collection rely on instead of locks and clocks. A number is never given back: a
version that `gc` removes leaves a stone under its name.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import re
import uuid
from collections.abc import Iterator
from typing import Any

from prefix_store.chunked import DamagedData
from prefix_store.segment import LAYOUT, NAME_DIGITS
from prefix_store.storage import Storage
from prefix_store.trajectory import canonical_json

_VERSION_FILE = re.compile(r"v(\d{6,})\.json")
_SEGMENT_NAME = re.compile(rf"[0-9a-f]{{{NAME_DIGITS}}}")
_EMPTY = {"version": "", "number": 0, "message": "", "committed_at": "", "segments": []}


class VersionRemoved(ValueError):
    """The version was there and `gc` has removed it."""


def version_name(number: int) -> str:
    return f"v{number:06d}"


def version_key(number: int) -> str:
    return f"versions/{version_name(number)}.json"


def taken_numbers(storage: Storage) -> list[int]:
    """The numbers that were ever given, ascending; those of removed versions too."""
    matches = (_VERSION_FILE.fullmatch(name) for name in storage.names("versions"))
    return sorted(int(match[1]) for match in matches if match)


def version_numbers(storage: Storage) -> list[int]:
    """The numbers of a store's versions, ascending, without those that `gc` has removed."""
    try:
        oldest = newest_version(storage).get("oldest", 1)
    except DamagedData:  # then what was removed shows only when it is opened
        oldest = 1
    return [number for number in taken_numbers(storage) if number >= oldest]


def read_version(storage: Storage, version: str | int | None) -> dict[str, Any]:
    """The manifest of a version; None means the newest, and an empty manifest where nothing was committed yet.

    Raises ValueError for a version that is not there (VersionRemoved where gc removed it), DamagedData for one that
    fails its checksum.
    """
    if version is None:
        return newest_version(storage)
    match = re.fullmatch(r"v?(\d+)", str(version))
    number, numbers = int(match[1]) if match else -1, version_numbers(storage)
    if number in numbers:
        return read_number(storage, number)
    have = f"it has {version_name(numbers[0])} to {version_name(numbers[-1])}" if numbers else "nothing was committed yet"
    if numbers and 0 < number < numbers[0]:
        raise VersionRemoved(f"{storage.location} has version {version!r} no longer: gc removed it; {have}")
    raise ValueError(f"{storage.location} has no version {version!r}; {have}")


def newest_version(storage: Storage) -> dict[str, Any]:
    """The newest manifest, an empty one where nothing was committed yet. Raises DamagedData where it is not sound."""
    removed = 0
    while True:
        numbers = taken_numbers(storage)
        if not numbers:
            return dict(_EMPTY)
        if numbers[-1] == removed:  # gc never removes the newest
            raise _unsound(storage, removed)
        try:
            return read_number(storage, numbers[-1])
        except VersionRemoved:  # it was not the newest any more when it was read
            removed = numbers[-1]


def newest_after(storage: Storage, manifest: dict[str, Any]) -> dict[str, Any]:
    """The newest manifest, starting from one that is known: as a rule one question to the storage."""
    while True:
        try:
            manifest = read_number(storage, manifest["number"] + 1)
        except FileNotFoundError:
            return manifest
        except VersionRemoved:  # this handle has stood still while others have tidied up
            manifest = newest_version(storage)


def read_number(storage: Storage, number: int) -> dict[str, Any]:
    """The manifest with this number. Raises FileNotFoundError where it was not given yet, VersionRemoved where gc removed
    the version, DamagedData where the file fails its checksum or cannot be read."""
    try:
        data = storage.read(version_key(number))
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise DamagedData(f"{storage.location}: {version_key(number)} cannot be read: {reason}") from error
    try:
        manifest = json.loads(data)
        removed_by = manifest.get("removed_by")
        sound = manifest["number"] == number and (removed_by or manifest["sha256"] == _digest(manifest))
    except (ValueError, KeyError, TypeError, AttributeError):
        sound = removed_by = False
    if not sound:
        raise _unsound(storage, number)
    if removed_by:
        raise VersionRemoved(f"{storage.location}: {version_name(number)} was removed by gc (see {removed_by})")
    return manifest


def _unsound(storage: Storage, number: int) -> DamagedData:
    return DamagedData(
        f"{storage.location}: {version_key(number)} fails its checksum; open another of the store's versions by its "
        "name, or, if this is the newest, move the file away to go on from the one before it"
    )


def _digest(manifest: dict[str, Any]) -> str:
    content = canonical_json({key: value for key, value in manifest.items() if key != "sha256"})
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def next_manifest(
    base: dict[str, Any],
    *,
    added: list[dict[str, Any]],
    message: str,
    kind: str = "commit",
    dropped: set[str] = frozenset(),
    details: dict[str, Any] | None = None,
    quarantined: list[dict[str, Any]] | None = None,
    oldest: int | None = None,
) -> dict[str, Any]:
    """The manifest of the version after `base`: its segments without `dropped`, and the entries of `added` behind them.

    kind is "commit", "compact", "quarantine" or "gc", details what it has to say of itself. Later versions carry on
    `oldest` (number of the oldest version that is kept), `collected` (that of the last gc), `rewritten` (that of the
    last version that left out segments of the one before it) and `quarantined`.
    """
    number = base["number"] + 1
    manifest = {
        "layout": LAYOUT,
        "version": version_name(number),
        "number": number,
        "kind": kind,
        "message": message,
        "committed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # tells two writers' attempts at one number apart, whatever they hold
        "nonce": uuid.uuid4().hex,
        "oldest": oldest or base.get("oldest", 1),
        "collected": number if kind == "gc" else base.get("collected", 0),
        "rewritten": number if dropped else base.get("rewritten", 0),
        "details": details or {},
        "quarantined": base.get("quarantined", []) if quarantined is None else quarantined,
        "segments": [entry for entry in base["segments"] if entry["name"] not in dropped] + added,
    }
    return manifest | {"sha256": _digest(manifest)}


def manifest_bytes(manifest: dict[str, Any]) -> bytes:
    """One line per segment: small, and still something to look at."""
    head = json.dumps({key: value for key, value in manifest.items() if key != "segments"}, indent=1)
    rows = ",\n".join(json.dumps(entry, separators=(",", ":")) for entry in manifest["segments"])
    return f'{head[:-2]},\n "segments": [\n{rows}]\n}}\n'.encode()


def remove_version(storage: Storage, number: int, removed_by: str) -> int:
    """Put a stone in the place of a version, which keeps its number taken; the bytes that this frees."""
    try:
        size = len(storage.read(version_key(number)))
    except FileNotFoundError:  # somebody has moved it away
        size = 0
    stone = json.dumps({"layout": LAYOUT, "number": number, "removed_by": removed_by}).encode()
    storage.replace(version_key(number), stone)
    return max(0, size - len(stone))


def is_removed(storage: Storage, number: int) -> bool:
    """Whether a version has its stone already."""
    try:
        return "removed_by" in json.loads(storage.read(version_key(number)))
    except (ValueError, FileNotFoundError):
        return False


def totals(manifest: dict[str, Any]) -> dict[str, int]:
    """What the version's segments hold together."""
    return {
        "sequences": sum(entry["sequences"] for entry in manifest["segments"]),
        "decision_points": sum(entry["points"] for entry in manifest["segments"]),
        "tokens": sum(entry["tokens"] for entry in manifest["segments"]),
    }


def eras(storage: Storage, newest: dict[str, Any], oldest: int) -> Iterator[dict[str, Any]]:
    """The newest manifest, and of each time before a version that left out segments the last one, down to `oldest`.

    In between versions only add segments, so that these name everything that any version does. Raises DamagedData if one
    of them cannot be read.
    """
    manifest = newest
    while True:
        yield manifest
        before = manifest.get("rewritten", 0) - 1
        if before < max(oldest, 1):
            return
        manifest = read_number(storage, before)


def named_segments(storage: Storage, newest: dict[str, Any], oldest: int) -> set[str]:
    """Names of all segments that a version from `oldest` up to `newest` names, or keeps as quarantined."""
    named: set[str] = set()
    for manifest in eras(storage, newest, oldest):
        named.update(entry["name"] for entry in manifest["segments"])
        named.update(entry["name"] for entry in manifest.get("quarantined", []))
    return named


def present_segments(storage: Storage) -> list[str]:
    """Names of all published segments. What else somebody has put beside them is no business of the store's."""
    return [name for name in storage.names("segments") if _SEGMENT_NAME.fullmatch(name)]


def unreferenced(storage: Storage) -> list[str]:
    """Names of published segments that no version names. Raises DamagedData if a version cannot be read."""
    while True:
        present = present_segments(storage)  # before the versions are read: what is published now may be named then
        newest = newest_version(storage)
        try:
            named = named_segments(storage, newest, newest.get("oldest", 1))
        except VersionRemoved:  # by a gc just now
            continue
        return [name for name in present if name not in named]
