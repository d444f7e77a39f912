"""PrefixStore: trajectories on disk, transactional and versioned, read token by token.

On disk a store is a folder: `segments/` holds immutable Zarr v3 groups, `versions/` small JSON files that each name an
exact set of segments, `tmp/` what writers have not published yet. Segments and versions appear by rename and link,
whole or not at all, so readers need no lock and a killed writer leaves the store as it was. The layout is described in
docs/prefix_store.md.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import threading
import uuid
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from prefix_store.chunked import DamagedData
from prefix_store.disk import FULL, StoreError, publish_file, publish_folder, sync_folder
from prefix_store.index import DecisionPoints, PointIndex, StoreIndex
from prefix_store.segment import LAYOUT, Entry, Item, SegmentReader, write_segment
from prefix_store.trajectory import (
    SOURCE_KINDS,
    DecisionPoint,
    Fingerprint,
    Sequence,
    canonical_json,
    check_sequence,
    hash_content,
    sequence_record,
)
from prefix_store.versions import aside_folders, next_manifest, read_version, totals, unreferenced, version_numbers

if TYPE_CHECKING:
    from prefix_store.verify import VerifyReport

SPILL_TOKENS = 8_000_000
# about 100 MB of buffered arrays; beyond that an append writes its buffer aside, still unpublished


class StoreNotFound(StoreError, FileNotFoundError):
    """There is no store at the path."""


class StoreExists(StoreError, FileExistsError):
    """There is something at the path already."""


class ForeignFingerprint(StoreError):
    """The token ids of a store come from another tokenizer (or chat template) than the reader's."""


class PrefixStore:
    """A store opened at one version. Use `PrefixStore.open`.

    Reading is safe from several threads. Any number of processes may append and commit at once; each handle that writes
    belongs to one process.
    """

    def __init__(self, path: pathlib.Path, mode: str, manifest: dict[str, Any], skip_damaged: bool):
        self.path, self.mode = path, mode
        self.duplicates = 0
        """How many appends brought a sequence that was there already (in the buffer or committed)."""
        self.damaged: dict[str, str] = {}
        """Segments that were left out because they cannot be read (only with `skip_damaged`): name → reason."""
        self._skip_damaged = skip_damaged
        self._manifest = manifest
        self._readers: dict[str, SegmentReader] = {}
        self._index: StoreIndex | None = None
        self._lock = threading.RLock()
        self._buffer: dict[bytes, Item] = {}
        self._buffered_tokens = 0
        self._staged: list[tuple[pathlib.Path, Entry, list[bytes]]] = []
        self._staged_ids: set[bytes] = set()
        self._committed: set[bytes] | None = None
        self._aside: pathlib.Path | None = None

    # ------------------------------------------------------------------------------------------------- opening

    @classmethod
    def open(
        cls,
        path: str | os.PathLike,
        mode: str = "r",
        version: str | int | None = None,
        *,
        skip_damaged: bool = False,
    ) -> PrefixStore:
        """Open the store at `path`.

        mode      "r" reads the newest version, or `version` ("v000003" or 3); "a" reads and appends and makes the store
                  if there is none; "w" makes a new store and refuses a path where something is
        skip_damaged  leave out segments that cannot be read (they are named in `.damaged`) instead of raising

        Raises StoreNotFound, StoreExists, DamagedData, or ValueError for an unknown mode or version.
        """
        path = pathlib.Path(path)
        if mode not in ("r", "a", "w"):
            raise ValueError(f"mode {mode!r} is none of 'r' (read), 'a' (append), 'w' (make new)")
        if version is not None and mode != "r":
            raise ValueError(f"version {version!r} with mode {mode!r}: an older version can only be read; use mode 'r'")
        marker = path / "zarr.json"
        if mode == "w" and (marker.exists() or (path.exists() and (not path.is_dir() or any(path.iterdir())))):
            raise StoreExists(f"{path} is there already; open it with mode 'a' to append, or choose another path")
        if mode in ("a", "w") and not marker.exists():
            if path.exists() and (not path.is_dir() or any(p.name not in _PARTS for p in path.iterdir())):
                raise StoreExists(f"{path} is not a prefix store and not an empty folder; choose another path")
            if not _make(path) and mode == "w":
                raise StoreExists(f"{path} was made by another process just now; open it with mode 'a' to append")
        if not marker.exists():
            found = "is an empty folder" if path.is_dir() and not any(path.iterdir()) else "holds no prefix store"
            raise StoreNotFound(
                f"{path} {found if path.exists() else 'does not exist'}; make a store there with "
                "PrefixStore.open(path, 'w'), or collect or import trajectories into it first"
            )
        _check_marker(marker)
        return cls(path, mode, read_version(path, version), skip_damaged)

    def __enter__(self) -> PrefixStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was appended and not committed, and remove what was written aside. Reading goes on working."""
        with self._lock:
            self._buffer.clear()
            self._buffered_tokens = 0
            self._staged.clear()
            self._staged_ids.clear()
            if self._aside is not None:
                shutil.rmtree(self._aside, ignore_errors=True)
                self._aside = None

    # ------------------------------------------------------------------------------------------------- writing

    def append(self, sequence: Sequence) -> str:
        """Add a sequence to the next commit and return its id (content hash).

        A sequence that is there already, in the buffer or committed, is not stored again; `duplicates` counts it.
        Raises InvalidSequence naming the place, and StoreError in mode "r" or when the disk is full.
        """
        self._must_write()
        check_sequence(sequence)
        record = canonical_json(sequence_record(sequence)).encode("ascii")
        identity = hash_content(record, sequence.contexts)
        key = bytes.fromhex(identity)
        with self._lock:
            if key in self._buffer or key in self._staged_ids or key in self._committed_ids():
                self.duplicates += 1
                return identity
            self._buffer[key] = Item(key, record, _frozen_copy(sequence))
            self._buffered_tokens += sum(len(c.tokens) - c.fork for c in sequence.contexts)
            if self._buffered_tokens >= SPILL_TOKENS:
                self._stage()
        return identity

    def commit(self, message: str = "") -> str:
        """Publish what was appended as a new version and return its name ("v000003").

        All or nothing: on success the handle stands at the new version, which also holds whatever other writers have
        committed meanwhile; on failure (StoreError, for instance a full disk) the store is as before, and what was
        appended is kept for another try. With nothing to add, the newest version is returned and no new one made.
        """
        self._must_write()
        with self._lock, _disk_errors(self.path):
            if self._buffer:
                self._stage()
            while True:
                self._advance()
                self._drop_committed()
                if not self._staged and self._manifest["number"] > 0:
                    break
                for number, (folder, entry, ids) in enumerate(self._staged):
                    target = self.path / "segments" / entry.name
                    if folder != target:
                        publish_folder(folder, target)
                        self._staged[number] = (target, entry, ids)
                manifest = next_manifest(self._manifest, [entry for _, entry, _ in self._staged], message)
                target = self.path / "versions" / f"{manifest['version']}.json"
                if publish_file(target, json.dumps(manifest, indent=1).encode(), self._scratch()):
                    self._committed_ids().update(self._staged_ids)
                    self._move_to(manifest)
                    break
            self.close()
            return self._manifest["version"]

    @property
    def pending(self) -> int:
        """Sequences appended and not yet committed."""
        return len(self._buffer) + len(self._staged_ids)

    def _must_write(self) -> None:
        if self.mode == "r":
            raise StoreError(f"{self.path} is open for reading; open it with mode 'a' to append")

    def _scratch(self) -> pathlib.Path:
        """This handle's own folder for unpublished files, made when first needed."""
        if self._aside is None:
            aside = self.path / "tmp" / f"{socket.gethostname()}.{os.getpid()}.{uuid.uuid4().hex[:12]}"
            aside.mkdir(parents=True)
            self._aside = aside
        return self._aside

    def _stage(self) -> None:
        """Write the buffer aside as a segment."""
        items = list(self._buffer.values())
        with _disk_errors(self.path):
            folder, entry = write_segment(self._scratch(), items)
        self._staged.append((folder, entry, [item.id for item in items]))
        self._staged_ids.update(self._buffer)
        self._buffer.clear()
        self._buffered_tokens = 0

    def _advance(self) -> None:
        """Take the newest version as the one to build on."""
        newest = read_version(self.path, None)
        if newest["number"] != self._manifest["number"]:
            known = {entry["name"] for entry in self._manifest["segments"]}
            if self._committed is not None:
                for entry in newest["segments"]:
                    if entry["name"] not in known:
                        self._committed.update(_id_list(self._reader(entry["name"])))
            self._move_to(newest)

    def _drop_committed(self) -> None:
        """Take out of the staged segments what another writer has committed since it was appended."""
        committed, kept = self._committed_ids(), []
        named = {entry["name"] for entry in self._manifest["segments"]}
        for folder, entry, ids in self._staged:
            if entry.name in named:
                continue  # an earlier try published it and failed only afterwards
            fresh = [i for i, key in enumerate(ids) if key not in committed]
            if len(fresh) < len(ids):
                self.duplicates += len(ids) - len(fresh)
                reader = SegmentReader(folder)
                items = [reader.item(i) for i in fresh]
                if items:
                    kept.append((*write_segment(self._scratch(), items), [item.id for item in items]))
                shutil.rmtree(folder)  # no version names it, and its name is this writer's alone
            else:
                kept.append((folder, entry, ids))
        self._staged = kept
        self._staged_ids = {key for _, _, ids in kept for key in ids}

    def _committed_ids(self) -> set[bytes]:
        if self._committed is None:
            self._committed = set()
            for reader in self._segments():
                self._committed.update(_id_list(reader))
        return self._committed

    # ------------------------------------------------------------------------------------------------- versions

    @property
    def version(self) -> str | None:
        """The version that this handle reads, None before the first commit."""
        return self._manifest["version"] or None

    def versions(self) -> list[str]:
        """Names of all versions, oldest first."""
        return [f"v{number:06d}" for number in version_numbers(self.path)]

    def history(self) -> list[dict[str, Any]]:
        """Per version, oldest first: version, message, committed_at, segments, sequences, decision_points, tokens."""
        out = []
        for number in version_numbers(self.path):
            manifest = read_version(self.path, number)
            entry = {key: manifest[key] for key in ("version", "message", "committed_at")}
            out.append(entry | {"segments": len(manifest["segments"])} | totals(manifest))
        return out

    def refresh(self) -> str | None:
        """Move this handle to the newest version and return its name. Decision points drawn before stay valid."""
        with self._lock:
            self._advance()
        return self.version

    def _move_to(self, manifest: dict[str, Any]) -> None:
        self._manifest, self._index = manifest, None

    # ------------------------------------------------------------------------------------------------- reading

    def _reader(self, name: str) -> SegmentReader:
        reader = self._readers.get(name)
        if reader is None:
            reader = self._readers[name] = SegmentReader(self.path / "segments" / name)
        return reader

    def _segments(self) -> list[SegmentReader]:
        """Readers of this version's segments, in the version's order, without those that were found damaged."""
        readers = []
        for entry in self._manifest["segments"]:
            if entry["name"] in self.damaged:
                continue
            try:
                reader = self._reader(entry["name"])
                if self._skip_damaged:
                    for table in ("sequences", "contexts", "points"):
                        reader.columns(table)
                    reader.ids()
                readers.append(reader)
            except DamagedData as error:
                if not self._skip_damaged:
                    raise self._with_remedy(error) from error
                self.damaged[entry["name"]] = str(error)
        return readers

    def _store_index(self) -> StoreIndex:
        with self._lock:
            if self._index is None:
                try:
                    self._index = StoreIndex(self._segments())
                except DamagedData as error:
                    raise self._with_remedy(error) from error
            return self._index

    def _with_remedy(self, error: DamagedData) -> DamagedData:
        if str(self.path) in str(error):
            return error
        remedy = "`verify()` says what is lost, and PrefixStore.open(path, skip_damaged=True) opens the rest"
        return DamagedData(f"{self.path}: {error}; {remedy}", error.rows)

    def index(self) -> PointIndex:
        """The version's decision points as numpy columns. Raises DamagedData if a segment's tables cannot be read."""
        return self._store_index().points

    def __len__(self) -> int:
        """Committed sequences in this version (without damaged segments, where those are skipped)."""
        if self._skip_damaged:
            self._segments()
        return sum(entry["sequences"] for entry in self._manifest["segments"] if entry["name"] not in self.damaged)

    def ids(self) -> list[str]:
        """The ids of all sequences of this version, ascending."""
        points = self.index()
        return [points.sequence_id(ordinal) for ordinal in range(points.sequences)]

    def __iter__(self) -> Iterator[Sequence]:
        return (self.sequence(identity) for identity in self.ids())

    def __contains__(self, sequence_id: str) -> bool:
        try:
            self._store_index().find(sequence_id)
        except KeyError:
            return False
        return True

    def sequence(self, sequence_id: str) -> Sequence:
        """The whole sequence with this id. Raises KeyError if this version does not hold it, DamagedData if it cannot
        be read."""
        index = self._store_index()
        segment, row, _ = index.where[index.find(sequence_id)].tolist()
        return index.segments[segment].item(row).sequence

    def decision_points(
        self,
        domain: str | None = None,
        *,
        sources: Iterable[str] | None = None,
        success_only: bool = False,
        max_prefix_tokens: int | None = None,
    ) -> DecisionPoints:
        """The decision points that pass every filter, ordered by sequence id and turn, as a lazy sequence.

        sources are source kinds ("teacher", "expert", "demonstration", "student"); None takes all.
        """
        points = self.index()
        rows = points.rows(domain, sources=sources, success_only=success_only, max_prefix_tokens=max_prefix_tokens)
        return DecisionPoints(points, rows)

    def prefix(self, point: DecisionPoint) -> np.ndarray:
        """uint32 [p]: all tokens of the context before the decision point, as the acting model saw them, and nothing of
        what was played there. Raises KeyError for a point that is not there, DamagedData where it cannot be read."""
        index = self._store_index()
        row = index.locate(point)
        return self._tokens(index, row, 0, int(index.points.prefix_tokens[row]))

    def continuation(self, point: DecisionPoint) -> np.ndarray:
        """uint32 [n]: the tokens of the action that was played at the decision point. The one route to them: for the
        demonstration stream and for analysis, never for a stream that learns from fresh turns."""
        index = self._store_index()
        row = index.locate(point)
        start = int(index.points.prefix_tokens[row])
        return self._tokens(index, row, start, start + int(index.points.action_tokens[row]))

    def _tokens(self, index: StoreIndex, row: int, start: int, stop: int) -> np.ndarray:
        segment, ranges = index.pieces(row, start, stop)
        tokens = index.segments[segment].array("tokens")
        parts = [tokens.read(a, b) for a, b in ranges]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    # ------------------------------------------------------------------------------------------------- about

    def fingerprints(self) -> list[Fingerprint]:
        """The distinct fingerprints of this version's sequences, in a fixed order."""
        found = {Fingerprint(**fp) for reader in self._segments() for fp in reader.attributes["fingerprints"]}
        return sorted(found, key=lambda fp: (fp.tokenizer, fp.chat_template, fp.model_config))

    def info(self) -> dict[str, Any]:
        """What this version holds and what else lies in the folder, as plain JSON data.

        `domains` counts sequences, decision points and successes by domain and source; `leftovers` are unfinished
        writings of processes of this machine that are gone, `writers` those of others; `unreferenced` are segments that
        no version names (a writer that was killed between its two steps, or is just between them). All three are
        harmless.
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
            file.stat().st_size
            for entry in self._manifest["segments"]
            for file in (self.path / "segments" / entry["name"]).rglob("*")
            if file.is_file()
        )
        leftovers, writers = aside_folders(self.path)
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
            "damaged": dict(self.damaged),
            "leftovers": leftovers,
            "writers": writers,
            "unreferenced": unreferenced(self.path),
        }

    def verify(self) -> VerifyReport:
        """Read and check every byte of this version; the report lists problems by sequence. See verify.py."""
        from prefix_store.verify import verify_store

        return verify_store(self)


# ---------------------------------------------------------------------------------------------------------------
# The folder

_PARTS = {"segments", "versions", "tmp", "zarr.json"}
_MARKER = {"zarr_format": 3, "node_type": "group", "attributes": {"prefix_store": {"layout": LAYOUT}}}


def _make(path: pathlib.Path) -> bool:
    """Make an empty store; True if this call did, False if another process was first."""
    with _disk_errors(path):
        for part in ("segments", "versions", "tmp"):
            (path / part).mkdir(parents=True, exist_ok=True)
        group = json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}).encode()
        publish_file(path / "segments" / "zarr.json", group, path / "tmp")
        made = publish_file(path / "zarr.json", json.dumps(_MARKER, indent=1).encode(), path / "tmp")
        sync_folder(path.resolve().parent)
        return made


def _check_marker(marker: pathlib.Path) -> None:
    try:
        layout = json.loads(marker.read_bytes())["attributes"]["prefix_store"]["layout"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreNotFound(f"{marker.parent} is not a prefix store: zarr.json does not say so ({error!r})") from None
    if layout != LAYOUT:
        raise StoreError(
            f"{marker.parent} has layout {layout}, this prefix_store reads layout {LAYOUT}; use the one that wrote it"
        )


def _id_list(reader: SegmentReader) -> list[bytes]:
    data = reader.ids().tobytes()
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def _frozen_copy(sequence: Sequence) -> Sequence:
    """The sequence with arrays of its own, so that what is committed is what was appended."""
    contexts = tuple(
        dataclasses.replace(
            c,
            tokens=c.tokens.copy(),
            behaviour_logprob=c.behaviour_logprob.copy(),
            weights_version=c.weights_version.copy(),
        )
        for c in sequence.contexts
    )
    return dataclasses.replace(sequence, contexts=contexts)


@contextlib.contextmanager
def _disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turn a full disk into a StoreError that says what to do; nothing is published half."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StoreError(
            f"{path}: no room left on the device ({error.strerror}); nothing was committed and the store is as before. "
            "Free some space and commit again: what was appended is still in memory"
        ) from error


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
