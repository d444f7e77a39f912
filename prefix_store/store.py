"""PrefixStore: trajectories on disk, transactional and versioned, read token by token.

A store is a folder, local or in an object store: `segments/` holds immutable Zarr v3 groups, `versions/` small JSON files
that each name an exact set of segments. What is not named by a version does not count, and a version appears at once, so
readers need no lock and a killed writer leaves the store as it was. Reading is in reading.py, writing in writer.py; the
layout is described in docs/prefix_store.md.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from prefix_store.chunked import DamagedData
from prefix_store.disk import FORBIDDEN, FULL, StoreError
from prefix_store.merged import maintain
from prefix_store.reading import StoreReader
from prefix_store.segment import LAYOUT
from prefix_store.storage import LocalStorage, Storage, storage_for
from prefix_store.trajectory import SOURCE_KINDS, Fingerprint, Sequence
from prefix_store.versions import (
    VersionRemoved,
    newest_after,
    read_number,
    read_version,
    totals,
    unreferenced,
    version_name,
    version_numbers,
)
from prefix_store.writer import Writer

if TYPE_CHECKING:
    from prefix_store.compact import CompactReport
    from prefix_store.gc import GcReport
    from prefix_store.quarantine import QuarantineReport
    from prefix_store.verify import VerifyReport


class StoreNotFound(StoreError, FileNotFoundError):
    """There is no store at the path."""


class StoreExists(StoreError, FileExistsError):
    """There is something at the path already."""


class ForeignFingerprint(StoreError):
    """The token ids of a store come from another tokenizer (or chat template) than the reader's."""


class PrefixStore(StoreReader):
    """A store opened at one version. Use `PrefixStore.open`.

    Reading is safe from several threads. Any number of processes may append and commit at once; each handle that writes
    belongs to one process.
    """

    def __init__(self, storage: Storage, mode: str, manifest: dict[str, Any], skip_damaged: bool):
        super().__init__(storage, manifest, skip_damaged)
        self.mode = mode
        self.duplicates = 0
        """How many appends brought a sequence that was there already (in the buffer or committed)."""
        self.compaction: CompactReport | None = None
        """What this handle's last `compact` did."""
        self._writer = Writer(self)

    @property
    def path(self) -> pathlib.Path | str:
        """Where the store lies: the path of a folder, or the URL of an object store's prefix."""
        return self.storage.path if isinstance(self.storage, LocalStorage) else self.storage.location

    # ------------------------------------------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        mode: str = "r",
        version: str | int | None = None,
        *,
        skip_damaged: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> PrefixStore:
        """Open the store at `path`, a local folder or the URL of an object store's prefix ("s3://bucket/prefix").

        mode      "r" reads the newest version, or `version` ("v000003" or 3); "a" reads and appends and makes the store
                  if there is none; "w" makes a new store and refuses a path where something is
        skip_damaged  leave out segments that cannot be read (they are named in `.damaged`) instead of raising
        storage_options  for an object store, as obstore takes them: "endpoint", "region", "access_key_id", …; what is
                  not given comes from the environment

        Raises StoreNotFound, StoreExists, StoreError (an object store that does not answer), DamagedData, or ValueError
        for an unknown mode or version (VersionRemoved for one that gc has removed).
        """
        if mode not in ("r", "a", "w"):
            raise ValueError(f"mode {mode!r} is none of 'r' (read), 'a' (append), 'w' (make new)")
        if version is not None and mode != "r":
            raise ValueError(f"version {version!r} with mode {mode!r}: an older version can only be read; use mode 'r'")
        storage = storage_for(path, storage_options)
        marker = _marker(storage)
        if mode != "r" and (marker is None or mode == "w"):
            _make(storage, mode, marker is not None)
            marker = _marker(storage)
        if marker is None:
            found = "holds no prefix store" if _top(storage) else "is an empty folder"
            if isinstance(storage, LocalStorage) and not storage.path.is_dir():
                found = "is a file" if storage.path.exists() else "does not exist"
            raise StoreNotFound(
                f"{storage.location} {found}; make a store there with "
                "PrefixStore.open(path, 'w'), or collect or import trajectories into it first"
            )
        _check_marker(storage, marker)
        return cls(storage, mode, read_version(storage, version), skip_damaged)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was appended and not committed, and remove what was written aside. Reading goes on working."""
        with self._lock:
            self._writer.clear()

    # ------------------------------------------------------------------------------------------------- writing

    def append(self, sequence: Sequence) -> str:
        """Add a sequence to the next commit and return its id (content hash).

        A sequence that is there already, in the buffer or committed, is not stored again; `duplicates` counts it.
        Raises InvalidSequence naming the place, and StoreError in mode "r" or when the disk is full.
        """
        self._must_write()
        with self._lock, self._write_errors():
            return self._writer.append(sequence)

    def commit(self, message: str = "") -> str:
        """Publish what was appended as a new version and return its name ("v000003").

        All or nothing: on success the handle stands at the new version, which also holds whatever other writers have
        committed meanwhile; on failure (StoreError, for instance a full disk) the store is as before, and what was
        appended is kept for another try. With nothing to add, the newest version is returned and no new one made.
        """
        self._must_write()
        with self._lock, self._write_errors():
            made = self._writer.commit(message)
            if made:
                maintain(self.storage, *self._list())
            self._writer.clear()
            return self._manifest["version"]

    @property
    def pending(self) -> int:
        """Sequences appended and not yet committed."""
        return self._writer.pending

    def compact(self, *, target_tokens: int | None = None, message: str = "compact") -> str:
        """Merge small store segments into ones of about `target_tokens` tokens and return the version that has them.

        The new version holds the same sequences under the same ids; older versions stay readable. See compact.py.
        Raises StoreError in mode "r" or when the disk is full; `compaction` says what was done and what was left.
        """
        from prefix_store.compact import TARGET_TOKENS, compact_store

        self._must_write()
        with self._lock, self._write_errors():
            self.compaction = compact_store(self, TARGET_TOKENS if target_tokens is None else target_tokens, message)
            return self._manifest["version"]

    def gc(self, *, keep_versions: int | None = None, min_age_seconds: float = 3600.0, dry_run: bool = False) -> GcReport:
        """Remove what no version names: segments of killed writers, old indexes, leftovers. See gc.py.

        keep_versions n removes all versions but the newest n first (None keeps all), so that what only they name goes
        too; min_age_seconds spares what is younger (safety does not depend on it: running writers lose nothing, but must
        publish again what was taken from them); dry_run only says what would go. Raises StoreError in mode "r",
        DamagedData where a version's file cannot be read.
        """
        from prefix_store.gc import collect

        self._must_write()
        with self._lock, self._write_errors():
            return collect(self, keep_versions, min_age_seconds, dry_run)

    def quarantine(self, found: VerifyReport | list[str] | None = None, *, message: str = "quarantine") -> QuarantineReport:
        """Make a version without the damaged segments: what is sound in them is saved into a fresh one, the rest named.

        found is a report of `verify()`, names of segments, or None to look for damage first. Damaged files stay where
        they are. See quarantine.py. Raises StoreError in mode "r" or when the disk is full.
        """
        from prefix_store.quarantine import quarantine_segments

        self._must_write()
        with self._lock, self._write_errors():
            return quarantine_segments(self, found, message)

    def quarantined(self) -> list[dict[str, Any]]:
        """Segments that `quarantine` took out, up to this version: name, reason, saved (number of sequences), lost (ids)
        and unknown (number of lost sequences whose ids cannot be told)."""
        return [dict(entry) for entry in self._manifest.get("quarantined", [])]

    def _must_write(self) -> None:
        if self.mode == "r":
            raise StoreError(f"{self.path} is open for reading; open it with mode 'a' to append")

    @contextlib.contextmanager
    def _write_errors(self) -> Iterator[None]:
        """Turn a full disk, or one that may not be written, into a StoreError that says so; nothing is published half."""
        try:
            yield
        except DamagedData as error:
            raise self._with_remedy(error) from error
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise StoreError(
                    f"{self.path} cannot be written: {error.strerror}: {error.filename}; nothing was committed and the store "
                    "is as before. Open it with mode 'r' to read it"
                ) from error
            if error.errno not in FULL:
                raise
            kept = " and commit again: what was appended is still in memory" if self.pending else ""
            raise StoreError(
                f"{self.path}: no room left on the device ({error.strerror}); nothing was committed and the store is as "
                f"before. Free some space{kept}"
            ) from error

    def _advance(self) -> None:
        """Take the newest version as the one to build on."""
        newest = newest_after(self.storage, self._manifest)
        if newest["number"] != self._manifest["number"]:
            self._writer.advanced(self._manifest, newest)
            self._move_to(newest)

    # ------------------------------------------------------------------------------------------------- versions

    @property
    def version(self) -> str | None:
        """The version that this handle reads, None before the first commit."""
        return self._manifest["version"] or None

    def versions(self) -> list[str]:
        """Names of all versions, oldest first, without those that gc has removed."""
        return [version_name(number) for number in version_numbers(self.storage)]

    def history(self) -> list[dict[str, Any]]:
        """Per version, oldest first: version, kind ("commit", "compact", "quarantine", "gc"), message, committed_at,
        details (what a compaction, quarantine or gc did), segments, sequences, decision_points, tokens. A version whose
        file is damaged has the kind "damaged", and the reason in the place of its message."""
        out = []
        for number in version_numbers(self.storage):
            try:
                manifest = read_number(self.storage, number)
            except VersionRemoved:  # by a gc just now
                continue
            except DamagedData as error:
                unknown = {"committed_at": "", "kind": "damaged", "details": {}, "segments": 0}
                nothing = {"sequences": 0, "decision_points": 0, "tokens": 0}
                out.append({"version": version_name(number), "message": str(error)} | unknown | nothing)
                continue
            entry = {key: manifest[key] for key in ("version", "message", "committed_at")}
            entry |= {"kind": manifest.get("kind", "commit"), "details": manifest.get("details", {})}
            out.append(entry | {"segments": len(manifest["segments"])} | totals(manifest))
        return out

    def refresh(self) -> str | None:
        """Move this handle to the newest version and return its name. Decision points drawn before stay valid."""
        with self._lock:
            self._advance()
        return self.version

    # ------------------------------------------------------------------------------------------------- about

    def info(self) -> dict[str, Any]:
        """What this version holds and what else lies in the folder, as plain JSON data.

        `domains` counts sequences, decision points and successes by domain and source; `leftovers` are unfinished
        writings of processes of this machine that are gone, `writers` those of others; `unreferenced` are segments that
        no version names (a writer that was killed between its two steps, or is just between them). All three are
        harmless. `damaged` names segments that were skipped and a version's file that is damaged, with which
        unreferenced segments cannot be told.
        """
        points = self.index()
        first = points.first[:-1]
        pairs, which = np.unique(np.stack([points.domain[first], points.source[first]]), axis=1, return_inverse=True)
        domains: dict[str, Any] = {}
        for number, (domain, source) in enumerate(pairs.T):
            rows = first[which.ravel() == number]
            domains.setdefault(points.domains[domain], {})[SOURCE_KINDS[source]] = {
                "sequences": len(rows),
                "successes": int(points.success[rows].sum()),
                "decision_points": int(points.turns[rows].sum()),
            }
        size = sum(
            entry["bytes"] if "bytes" in entry else self.storage.usage(f"segments/{entry['name']}")[0]
            for entry in self._manifest["segments"]
        )
        leftovers, writers = self.storage.asides()
        damaged, unnamed = dict(self.damaged), []
        try:
            unnamed = unreferenced(self.storage)
        except DamagedData as error:
            damaged["versions"] = str(error)
        return {
            "path": str(self.path),
            "layout": LAYOUT,
            "version": self.version,
            "versions": len(self.versions()),
            "message": self._manifest["message"],
            "sequences": len(self),
            "decision_points": len(points),
            "tokens": totals(self._manifest)["tokens"],
            "segments": len(self._manifest["segments"]),
            "segment_names": [entry["name"] for entry in self._manifest["segments"]],
            "bytes": size,
            "domains": domains,
            "fingerprints": [vars(fp) for fp in self.fingerprints()],
            "damaged": damaged,
            "leftovers": leftovers,
            "writers": writers,
            "quarantined": self.quarantined(),
            "unreferenced": unnamed,
        }

    def verify(self) -> VerifyReport:
        """Read and check every byte of this version; the report lists problems by sequence. See verify.py."""
        from prefix_store.verify import verify_store

        return verify_store(self)


# ---------------------------------------------------------------------------------------------------------------
# The folder

_PARTS = {"index", "segments", "versions", "tmp", "zarr.json"}
_MARKER = {"zarr_format": 3, "node_type": "group", "attributes": {"prefix_store": {"layout": LAYOUT}}}


def _marker(storage: Storage) -> bytes | None:
    try:
        return storage.read("zarr.json")
    except (FileNotFoundError, NotADirectoryError):
        return None


def _top(storage: Storage) -> list[str] | None:
    """What lies directly in the folder; None where it is no folder."""
    try:
        return storage.names("")
    except NotADirectoryError:
        return None


def _make(storage: Storage, mode: str, there: bool) -> None:
    """Make an empty store. Raises StoreExists where something else is, or in mode "w" anything."""
    top = _top(storage)
    if mode == "w" and (there or top is None or top):
        raise StoreExists(f"{storage.location} is there already; open it with mode 'a' to append, or choose another path")
    if top is None or any(name not in _PARTS for name in top):
        raise StoreExists(f"{storage.location} is not a prefix store and not an empty folder; choose another path")
    group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
    try:
        storage.create("segments/zarr.json", group)
        made = storage.create("zarr.json", json.dumps(_MARKER, indent=1).encode())
    except OSError as error:
        if isinstance(storage, LocalStorage) and error.errno not in FULL | FORBIDDEN | {errno.EEXIST}:
            raise
        raise StoreError(f"no store can be made at {storage.location}: {error.strerror or error}") from error
    finally:
        storage.close()
    if not made and mode == "w":
        raise StoreExists(f"{storage.location} was made by another process just now; open it with mode 'a' to append")


def _check_marker(storage: Storage, marker: bytes) -> None:
    try:
        layout = json.loads(marker)["attributes"]["prefix_store"]["layout"]
    except (ValueError, KeyError, TypeError) as error:
        raise StoreNotFound(f"{storage.location} is not a prefix store: zarr.json does not say so ({error!r})") from None
    if layout != LAYOUT:
        raise StoreError(
            f"{storage.location} has layout {layout}, this prefix_store reads layout {LAYOUT}; use the one that wrote it"
        )


def check_fingerprint(store: PrefixStore, fingerprint: Fingerprint, *, chat_template: bool = True) -> None:
    """Raise ForeignFingerprint unless every sequence of the store was written with this tokenizer and chat template.

    The tokenizer hash must be equal, since ids are meaningless under another; `chat_template=False` allows another
    template. The model config is not compared: any model with the same tokenizer can read the ids.
    """
    for name, wanted in (("tokenizer", True), ("chat_template", chat_template)):
        mine = getattr(fingerprint, name)
        theirs = sorted({getattr(found, name) for found in store.fingerprints()} - {mine})
        if wanted and theirs:
            what = name.replace("_", " ")
            raise ForeignFingerprint(
                f"the store {store.path} was written with another {what}: it has {what} {', '.join(theirs)}, "
                f"the model has {mine}. Collect or import the trajectories again with this model's {what}, "
                f"or use a model folder that has the store's"
            )
