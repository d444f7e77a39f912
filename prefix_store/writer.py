"""The writing half of a store: what was appended and not committed, and how a change becomes the next version."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import shutil
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prefix_store.building import Entry, SegmentBuilder, prepare
from prefix_store.index import KnownIds
from prefix_store.segment import NAME_DIGITS, SegmentReader
from prefix_store.trajectory import Sequence
from prefix_store.versions import manifest_bytes, next_manifest, version_key

if TYPE_CHECKING:
    from prefix_store.store import PrefixStore

SPILL_TOKENS = 8_000_000
# about 25 MB of packed tokens, or 100 MB of extras; beyond that an append writes its buffer aside, still unpublished


@dataclasses.dataclass
class Staged:
    """A finished segment that no version names yet.

    files      by name relative to the segment's folder: bytes, or the local file that has them
    ids        content hashes of its sequences
    folder     the scratch folder of the files, where they are files
    base       number of the version that was the newest when publishing it began; None before that
    published  whether all of it is in the store
    offered    whether a version may name it: one was tried that does, and nobody knows with what result
    """

    entry: Entry
    files: dict[str, bytes | pathlib.Path]
    ids: list[bytes]
    folder: pathlib.Path | None = None
    base: int | None = None
    published: bool = False
    offered: bool = False

    @classmethod
    def of(cls, building: SegmentBuilder, aside: pathlib.Path | None = None) -> Staged:
        """What is in the builder as a segment: in memory, or with `aside` written into a folder in it."""
        if aside is None:
            entry, files = building.encode()
            return cls(entry, files, building.ids)
        folder, entry = building.write(aside)
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        return cls(entry, files, building.ids, folder)

    @property
    def bytes(self) -> int:
        return sum(len(f) if isinstance(f, bytes) else f.stat().st_size for f in self.files.values())

    def row(self) -> dict[str, Any]:
        """Its entry in a manifest."""
        return vars(self.entry) | {"bytes": self.bytes}

    def renew(self) -> None:
        """Give the segment a name that nobody has ever seen; only the group file changes."""
        data = self.files["zarr.json"]
        group = json.loads(data if isinstance(data, bytes) else data.read_bytes())
        group["attributes"]["prefix_store"]["nonce"] = uuid.uuid4().hex
        data = self.files["zarr.json"] = json.dumps(group, indent=1).encode()
        self.entry = dataclasses.replace(self.entry, name=hashlib.sha256(data).hexdigest()[:NAME_DIGITS])
        self.base, self.published, self.offered = None, False, False

    def reader(self) -> SegmentReader:
        return SegmentReader(_Files(f"segments/{self.entry.name}", self.files), f"segments/{self.entry.name}")

    def discard(self, store: PrefixStore) -> None:
        """Remove what there is of it. Its name is this writer's alone; where a version may have it, it stays for `gc`."""
        if self.base is not None and not self.offered:
            store.storage.delete_folder(f"segments/{self.entry.name}")
        self.discard_files()

    def discard_files(self) -> None:
        """Remove the files in the scratch folder."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


class _Files:
    """A staged segment as a storage to read from."""

    def __init__(self, prefix: str, files: Mapping[str, bytes | pathlib.Path]):
        self.location, self._prefix, self._files = "staged", prefix + "/", files

    def read(self, key: str) -> bytes:
        data = self._files[key.removeprefix(self._prefix)]
        return data if isinstance(data, bytes) else data.read_bytes()

    def file(self, key: str) -> _Bytes:
        return _Bytes(self.read(key))


class _Bytes:
    def __init__(self, data: bytes):
        self._data, self.size = data, len(data)

    def read(self, start: int, stop: int) -> memoryview:
        return memoryview(self._data)[start:stop]


@dataclasses.dataclass
class Change:
    """What the next version is to be, as `next_manifest` takes it, and the segments to publish before."""

    staged: list[Staged]
    message: str
    kind: str = "commit"
    dropped: set[str] = dataclasses.field(default_factory=set)
    details: dict[str, Any] | None = None
    quarantined: list[dict[str, Any]] | None = None
    oldest: int | None = None


def transact(store: PrefixStore, plan: Callable[[dict[str, Any]], Change | None]) -> bool:
    """Make the next version: plan(newest manifest) says what it is to be, again and again until it can be had.

    Segments are published first, then the version is made under the next number, which only one process can take; who
    finds it taken begins again from the version that took it. Returns False where the plan is None: nothing to do.

    A segment that is published but not named yet looks like rubbish, and `gc` may take it. It says so by a version of its
    own, made before it removes anything. So whoever names a segment looks at the version that it builds on: if a gc was
    made after the one that was the newest when publishing began, the segment gets a new name and is published again.
    Since versions are a chain, one of the two always sees the other.
    """
    while True:
        store._advance()
        base = store._manifest
        change = plan(base)
        if change is None:
            return False
        for staged in change.staged:
            if staged.base is not None and staged.base < base.get("collected", 0):
                staged.renew()
            if staged.base is None:
                staged.base = base["number"]
            if not staged.published:
                store.storage.put_folder(f"segments/{staged.entry.name}", staged.files)
                staged.published = True
        manifest = next_manifest(
            base,
            added=[staged.row() for staged in change.staged],
            message=change.message,
            kind=change.kind,
            dropped=change.dropped,
            details=change.details,
            quarantined=change.quarantined,
            oldest=change.oldest,
        )
        _offer(change.staged, True)
        if store.storage.create(version_key(manifest["number"]), manifest_bytes(manifest)):
            store._move_to(manifest)
            return True
        _offer(change.staged, False)


def _offer(staged: list[Staged], offered: bool) -> None:
    for each in staged:
        each.offered = offered


class Writer:
    """What one handle has appended and not committed. `store._lock` guards it."""

    def __init__(self, store: PrefixStore):
        self.store = store
        self.buffer = SegmentBuilder()
        self.staged: list[Staged] = []
        self.staged_ids: set[bytes] = set()
        self._committed: KnownIds | None = None

    def append(self, sequence: Sequence) -> str:
        item = prepare(sequence)
        key, identity = item.id, item.id.hex()
        if key in self.buffer or key in self.staged_ids or key in self.committed():
            self.store.duplicates += 1
            return identity
        self.buffer.add(item)
        if self.buffer.weight >= SPILL_TOKENS:
            self._stage(self.store.storage.scratch())
        return identity

    def commit(self, message: str) -> bool:
        """Make a version of what was appended; whether there was something to make it of. `clear` comes after it."""
        if len(self.buffer):
            self._stage(None)

        def plan(base: dict[str, Any]) -> Change | None:
            self._drop_committed(base)
            # the first commit makes a version even of nothing, so that the store has one
            return Change(list(self.staged), message) if self.staged or base["number"] == 0 else None

        made = transact(self.store, plan)
        if made:
            self.committed().update(self.staged_ids)
        return made

    def clear(self) -> None:
        """Forget what was appended and remove what was written for it."""
        self.buffer = SegmentBuilder()
        self.staged.clear()
        self.staged_ids.clear()
        self.store.storage.close()

    @property
    def pending(self) -> int:
        return len(self.buffer) + len(self.staged_ids)

    def _stage(self, aside: pathlib.Path | None) -> None:
        """Turn the buffer into a segment."""
        staged = Staged.of(self.buffer, aside)
        self.staged.append(staged)
        self.staged_ids.update(staged.ids)
        self.buffer = SegmentBuilder()

    def _drop_committed(self, base: dict[str, Any]) -> None:
        """Take out of the staged segments what another writer has committed since it was appended."""
        committed, kept = self.committed(), []
        named = {entry["name"] for entry in base["segments"]}
        for staged in self.staged:
            if staged.entry.name in named:
                continue  # an earlier try published it and failed only afterwards
            fresh = [row for row, key in enumerate(staged.ids) if key not in committed]
            if len(fresh) == len(staged.ids):
                kept.append(staged)
                continue
            self.store.duplicates += len(staged.ids) - len(fresh)
            if fresh:
                reader, building = staged.reader(), SegmentBuilder()
                for row in fresh:
                    building.add(reader.item(row))
                kept.append(Staged.of(building, staged.folder and self.store.storage.scratch()))
            staged.discard(self.store)
        self.staged = kept
        self.staged_ids = {key for staged in kept for key in staged.ids}

    def advanced(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        """The handle moves from one version to a later one: learn what others have committed."""
        if self._committed is None:
            return
        if old.get("quarantined", []) != new.get("quarantined", []):
            self.forget_committed()
            return
        known = {entry["name"] for entry in old["segments"]}
        for entry in new["segments"]:
            if entry["name"] not in known:
                self._committed.add_segment(self.store._reader(entry["name"]))

    def forget_committed(self) -> None:
        """Learn anew what the version holds: a quarantine has lost sequences, which may come again."""
        self._committed = None

    def committed(self) -> KnownIds:
        """The ids of the version's sequences."""
        if self._committed is None:
            self._committed = KnownIds(self.store.storage, *self.store._list())
        return self._committed
