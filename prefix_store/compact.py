"""Compaction: many small store segments become a few larger ones, in a new version with the same sequences.

Each merged segment is written aside, one after another, so that memory is bounded by the size of one; then one version
takes them all in and leaves out what they were made of. Whatever is killed before leaves only rubbish for `gc`. Writers go
on meanwhile: the new version is built on the newest one there is, and a merge whose sources have vanished from that (by
another compaction or a quarantine) is given up.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from prefix_store.building import SegmentBuilder
from prefix_store.chunked import DamagedData
from prefix_store.segment import SegmentReader
from prefix_store.verify import sound_items
from prefix_store.writer import Change, Staged, transact

if TYPE_CHECKING:
    from prefix_store.store import PrefixStore

TARGET_TOKENS = 4_000_000
# some 20 MB on disk, as much in memory while it is merged, and one of its sources unpacked


@dataclasses.dataclass(frozen=True)
class CompactReport:
    """What a compaction did.

    version      the version it made, or, where there was nothing to merge, the newest one
    merged       how many segments became
    made         how many larger ones
    sequences    moved into these
    left         damaged segments that were left as they are: name → reason
    given_up     merges that another compaction or a quarantine made useless meanwhile
    """

    version: str | None
    merged: int
    made: int
    sequences: int
    left: dict[str, str]
    given_up: int

    def __str__(self) -> str:
        lines = [f"version {self.version}: {self.merged} segments merged into {self.made}, {self.sequences} sequences moved"]
        lines += [f"  left segment {name}, which is damaged: {reason}" for name, reason in self.left.items()]
        if self.given_up:
            lines.append(f"  {self.given_up} merges given up, since others have changed their segments meanwhile")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return dataclasses.asdict(self)


def plan_bins(entries: list[dict[str, Any]], target_tokens: int) -> list[list[dict[str, Any]]]:
    """Which entries of a version become one segment each: runs of two or more, each of at most half the target, together
    at most the target. A second compaction with the same target finds at most one small segment, and so nothing to do."""
    bins: list[list[dict[str, Any]]] = []
    tokens = target_tokens + 1
    for entry in entries:
        if 2 * entry["tokens"] > target_tokens:
            continue
        if tokens + entry["tokens"] > target_tokens:
            bins.append([])
            tokens = 0
        bins[-1].append(entry)
        tokens += entry["tokens"]
    return [some for some in bins if len(some) > 1]


def compact_store(store: PrefixStore, target_tokens: int, message: str) -> CompactReport:
    """Merge the small segments of the newest version and move the handle to the version that this makes.

    Every sequence is read, checked against its id and written again. Raises ValueError for a target below 1.
    """
    if target_tokens < 1:
        raise ValueError(f"target_tokens is {target_tokens}; give how many tokens a merged segment is to hold")
    store._advance()
    left: dict[str, str] = {}
    merges: list[tuple[Staged, set[str]]] = []
    given_up = 0

    def plan(base: dict[str, Any]) -> Change | None:
        nonlocal given_up
        names = {entry["name"] for entry in base["segments"]}
        for merge in [merge for merge in merges if not merge[1] <= names]:
            merges.remove(merge)
            given_up += 1
            merge[0].discard(store)
        if not merges:
            return None
        dropped = set().union(*(sources for _, sources in merges))
        details = {"merged": len(dropped), "made": len(merges), "left": sorted(left)}
        return Change([staged for staged, _ in merges], message, "compact", dropped, details)

    try:
        for some in plan_bins(store._manifest["segments"], target_tokens):
            building, sources = _take(store, some, left)
            if len(sources) > 1:
                merges.append((Staged.of(building, store.storage.scratch()), sources))
        made = transact(store, plan)
    except BaseException:
        for staged, _ in merges:
            staged.discard_files()
        raise
    for staged, _ in merges:
        staged.discard_files()
    return CompactReport(
        store.version,
        sum(len(sources) for _, sources in merges) if made else 0,
        len(merges) if made else 0,
        sum(len(staged.ids) for staged, _ in merges) if made else 0,
        left,
        given_up,
    )


def _take(store: PrefixStore, entries: list[dict[str, Any]], left: dict[str, str]) -> tuple[SegmentBuilder, set[str]]:
    """The sequences of the segments, each once, without the segments that are damaged."""
    building = SegmentBuilder()
    sources: set[str] = set()
    for entry in entries:
        try:
            items = list(sound_items(SegmentReader(store.storage, f"segments/{entry['name']}")))
        except DamagedData as error:
            left[entry["name"]] = str(error)
            continue
        for item in items:
            if item.id not in building:
                building.add(item)
        sources.add(entry["name"])
    return building, sources
