"""Garbage collection: what no version names goes, and on demand old versions before that.

How this cannot harm a writer that has published a segment and is about to name it, whatever the clocks say:

1. `gc` lists the segments, then reads the newest version n and takes those that no kept version names.
2. Before it removes anything it makes version n + 1, equal to n but for a note that a gc was made there. If somebody else
   takes that number, it begins again.
3. A version names every segment of the one before it and new ones of its writer. The writer of a version after n + 1 has
   read that note, and gives each segment that it began to publish before it a new name (see `writer.transact`). The
   versions up to n + 1 are known not to name what was taken. So nothing that was taken is ever named again.

This needs only that one process wins each version number, and holds for a local folder and an object store alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from prefix_store.merged import stale_indexes
from prefix_store.versions import (
    VersionRemoved,
    eras,
    is_removed,
    manifest_bytes,
    named_segments,
    next_manifest,
    present_segments,
    read_number,
    remove_version,
    version_key,
    version_name,
    version_numbers,
)

if TYPE_CHECKING:
    from prefix_store.store import PrefixStore


@dataclasses.dataclass(frozen=True)
class GcReport:
    """What was removed (with `dry_run`: would be): names of versions, segments, index folders and leftovers of killed
    writers, and the bytes that this frees. `young` are segments that no version names and that were spared for their age;
    `version` is the newest version after it."""

    version: str | None
    versions: tuple[str, ...]
    segments: tuple[str, ...]
    indexes: tuple[str, ...]
    leftovers: tuple[str, ...]
    young: tuple[str, ...]
    bytes: int
    dry_run: bool

    def __str__(self) -> str:
        what = [f"{len(self.versions)} versions", f"{len(self.segments)} segments", f"{len(self.indexes)} indexes"]
        what.append(f"{len(self.leftovers)} leftovers")
        text = f"{'would remove' if self.dry_run else 'removed'} {', '.join(what)}: {self.bytes:,} bytes"
        return text + (f"; {len(self.young)} segments that no version names are too young" if self.young else "")

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return dataclasses.asdict(self)


def collect(store: PrefixStore, keep_versions: int | None, min_age_seconds: float, dry_run: bool) -> GcReport:
    """See PrefixStore.gc. Raises ValueError for a number of versions below 1 or a negative age."""
    if keep_versions is not None and keep_versions < 1:
        raise ValueError(f"keep_versions is {keep_versions}; at least the newest version stays")
    if min_age_seconds < 0:
        raise ValueError(f"min_age_seconds is {min_age_seconds}; give 0 or more")
    storage = store.storage
    while True:
        present = present_segments(storage)
        store._advance()
        base = store._manifest
        try:
            oldest = _oldest(store, keep_versions)
            named = named_segments(storage, base, oldest)
        except VersionRemoved:  # by another gc just now
            continue
        usage = {name: storage.usage(f"segments/{name}") for name in present if name not in named}
        segments = tuple(name for name, (_, age) in usage.items() if age >= min_age_seconds)
        versions = [number for number in range(base.get("oldest", 1), oldest)]
        if dry_run or not (segments or versions):
            break
        details = {"versions": [version_name(number) for number in versions], "segments": len(segments)}
        manifest = next_manifest(base, added=[], message="gc", kind="gc", oldest=oldest, details=details)
        if storage.create(version_key(manifest["number"]), manifest_bytes(manifest)):
            store._move_to(manifest)
            break

    size = sum(usage[name][0] for name in segments)
    if dry_run:
        size += sum(len(storage.read(version_key(number))) for number in versions)
    else:
        for name in segments:
            storage.delete_folder(f"segments/{name}")
        # from the oldest on, so that what a killed gc has not come to lies together, just below the oldest that is kept
        for number in reversed(list(_without_stone(store, oldest))):
            size += remove_version(storage, number, store.version)
    indexes = []
    for name in _useless_indexes(store, oldest):
        used, age = storage.usage(f"index/{name}")
        if age >= min_age_seconds:
            indexes.append(name)
            size += used
            if not dry_run:
                storage.delete_folder(f"index/{name}")
    leftovers, freed = storage.remove_leftovers(min_age_seconds, dry_run)
    storage.close()
    return GcReport(
        store.version,
        tuple(version_name(number) for number in versions),
        segments,
        tuple(indexes),
        tuple(leftovers),
        tuple(name for name in usage if name not in segments),
        size + freed,
        dry_run,
    )


def _oldest(store: PrefixStore, keep_versions: int | None) -> int:
    """The number of the oldest version to keep. The versions that gc itself has made do not count."""
    base = store._manifest
    if keep_versions is not None:
        kept = 0
        for number in reversed(version_numbers(store.storage)):
            if number <= base["number"]:
                kept += read_number(store.storage, number).get("kind") != "gc"
            if kept == keep_versions:
                return max(number, base.get("oldest", 1))
    return base.get("oldest", 1)


def _useless_indexes(store: PrefixStore, oldest: int) -> list[str]:
    """Indexes that serve no version; an index may be removed at any time, since readers make it again."""
    try:
        manifests = list(eras(store.storage, store._manifest, oldest))
    except VersionRemoved:  # by another gc just now, which sees to the indexes too
        return []
    return stale_indexes(store.storage, [[entry["name"] for entry in manifest["segments"]] for manifest in manifests])


def _without_stone(store: PrefixStore, oldest: int) -> Iterator[int]:
    """Numbers below the oldest kept version, from there down, as far as they have not been removed yet."""
    for number in range(oldest - 1, 0, -1):
        if is_removed(store.storage, number):
            return
        yield number
