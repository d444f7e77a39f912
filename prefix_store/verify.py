"""Is a store what was written? Reads every byte of a version and lists what is wrong, sequence by sequence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from prefix_store.chunked import ArrayReader, DamagedData
from prefix_store.segment import Item, SegmentReader
from prefix_store.trajectory import InvalidSequence, check_sequence, hash_content
from prefix_store.versions import VersionRemoved, read_number, unreferenced, version_key, version_numbers

if TYPE_CHECKING:
    from prefix_store.storage import Storage
    from prefix_store.store import PrefixStore


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing that is wrong: the sequence it concerns ("" where it is not one sequence's), the segment or version
    file, and what was found."""

    sequence: str
    place: str
    message: str

    def __str__(self) -> str:
        who = f"sequence {self.sequence}" if self.sequence else "no single sequence"
        return f"{who} ({self.place}): {self.message}"


@dataclasses.dataclass(frozen=True)
class VerifyReport:
    """What was checked and what is wrong. `leftovers` and `unreferenced` are harmless remains of killed writers;
    `quarantined` is PrefixStore.quarantined(): damage that was dealt with before, and what it cost."""

    version: str | None
    segments: int
    sequences: int
    problems: tuple[Problem, ...]
    leftovers: tuple[str, ...]
    unreferenced: tuple[str, ...]
    quarantined: tuple[dict, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems

    def damaged_sequences(self) -> list[str]:
        """Ids of the sequences that have a problem, each once."""
        return sorted({p.sequence for p in self.problems if p.sequence})

    def damaged_segments(self) -> list[str]:
        """Names of the segments that have a problem, each once."""
        return sorted({p.place.removeprefix("segment ") for p in self.problems if p.place.startswith("segment ")})

    def __str__(self) -> str:
        head = f"version {self.version}: {self.sequences} sequences in {self.segments} segments, "
        lines = [head + ("all sound" if self.ok else f"{len(self.problems)} problems")]
        lines += [f"  {problem}" for problem in self.problems]
        if self.damaged_segments():
            lines.append("  `quarantine` makes a version without the damaged segments and saves what is sound in them")
        if self.quarantined:
            lost = sum(len(segment["lost"]) + segment["unknown"] for segment in self.quarantined)
            lines.append(f"  {len(self.quarantined)} segments in quarantine, with which {lost} sequences were lost")
        if self.leftovers or self.unreferenced:
            remains = f"{len(self.leftovers)} leftovers and {len(self.unreferenced)} unreferenced segments"
            lines.append(f"  {remains} of writers that were killed (harmless)")
        return "\n".join(lines)

    def to_dict(self) -> dict:
        """The report as plain JSON data."""
        return dataclasses.asdict(self) | {"ok": self.ok}


def verify_store(store: PrefixStore) -> VerifyReport:
    """Check every file of the version's segments, every chunk, and every sequence's content against its id."""
    problems: list[Problem] = []
    for number in version_numbers(store.storage):
        try:
            read_number(store.storage, number)
        except VersionRemoved:  # by a gc just now
            continue
        except DamagedData as error:
            problems.append(Problem("", version_key(number), str(error)))
    problems += _problems_of_groups(store.storage)
    entries = store._manifest["segments"]
    checked = 0
    for entry in entries:
        problems += problems_of_segment(store.storage, entry)
        checked += entry["sequences"]
    if not any(p.place.startswith("versions/") for p in problems):
        unnamed = tuple(unreferenced(store.storage))
    else:
        unnamed = ()
    leftovers = tuple(store.storage.asides()[0])
    quarantined = tuple(store.quarantined())
    return VerifyReport(store.version, len(entries), checked, tuple(problems), leftovers, unnamed, quarantined)


def _problems_of_groups(storage: Storage) -> list[Problem]:
    """What is wrong with the two group files around the segments. This program reads no data from them, but other Zarr
    programs find the segments through them."""
    problems = []
    for key in ("zarr.json", "segments/zarr.json"):
        try:
            group = json.loads(storage.read(key))
            if not isinstance(group, dict) or (group.get("zarr_format"), group.get("node_type")) != (3, "group"):
                problems.append(Problem("", key, "is not the description of a Zarr v3 group"))
        except (OSError, ValueError) as error:
            problems.append(Problem("", key, f"cannot be read: {getattr(error, 'strerror', None) or error}"))
    return problems


def problems_of_segment(storage: Storage, entry: dict) -> list[Problem]:
    """All problems of the segment that a version's entry names."""
    try:
        reader = SegmentReader(storage, f"segments/{entry['name']}")
    except DamagedData as error:
        place = f"segment {entry['name']}"
        return [Problem(identity, place, str(error)) for identity in ids_without_group(storage, entry) or [""]]
    return check_segment(reader)


def sound_items(reader: SegmentReader) -> Iterator[Item]:
    """The sequences of a segment, one after another. Raises DamagedData at the first thing that is not sound: a file that
    is not the one that was published, or a sequence whose content does not have its id."""
    for name, wanted in reader.attributes["sha256"].items():
        try:
            data = reader.storage.read(f"{reader.key}/{name}")
        except OSError as error:
            raise DamagedData(f"segment {reader.name}: {name} cannot be read: {error.strerror or error}") from error
        if hashlib.sha256(data).hexdigest() != wanted:
            raise DamagedData(f"segment {reader.name}: {name} is not the file that was published")
    for row in range(len(reader.array("sequences"))):
        item = reader.item(row)
        if hash_content(item.record, item.sequence.contexts) != item.id.hex():
            raise DamagedData(f"segment {reader.name}: the content of sequence {item.id.hex()} does not have its id")
        yield item


def check_segment(reader: SegmentReader) -> list[Problem]:
    """All problems of one segment. A damaged file is laid at the door of the sequences that have data in its damaged
    part; where that cannot be told, of all its sequences."""
    place = f"segment {reader.name}"
    try:
        ids = [row.tobytes().hex() for row in reader.ids()]
    except DamagedData as error:
        return _without_ids(reader, place, str(error))
    problems: list[Problem] = []
    for number, identity in enumerate(ids):
        try:
            record, sequence = reader.content(number)
            check_sequence(sequence)
            if hash_content(record, sequence.contexts) != identity:
                problems.append(Problem(identity, place, "its content does not have its id"))
        except (DamagedData, InvalidSequence, ValueError, KeyError, IndexError) as error:
            problems.append(Problem(identity, place, str(error)))
    problems += _check_points(reader, ids, place)
    blamed = bool(problems)
    for name, wanted in reader.attributes["sha256"].items():
        try:
            found = hashlib.sha256(reader.storage.read(f"{reader.key}/{name}")).hexdigest()
            message = "" if found == wanted else f"{name} is not the file that was published"
        except OSError as error:
            message = f"{name} cannot be read: {error.strerror or error}"
        # damage that no sequence's reading met (a description of an array, say) concerns all of them
        if message:
            problems += [Problem(identity, place, message) for identity in ([""] if blamed else ids)]
    return problems


def _without_ids(reader: SegmentReader, place: str, message: str) -> list[Problem]:
    """The table of ids is damaged: name the sequences by the hashes of their content, which are their ids."""
    problems = []
    try:
        count = len(reader.array("sequences"))
    except DamagedData as error:
        return [Problem("", place, f"{message}; {error}; its sequences cannot be told")]
    for number in range(count):
        try:
            record, sequence = reader.content(number)
            problems.append(Problem(hash_content(record, sequence.contexts), place, message))
        except (DamagedData, ValueError, KeyError, IndexError) as error:
            problems.append(Problem("", place, f"{message}; row {number}: {error}"))
    return problems


def _check_points(reader: SegmentReader, ids: list[str], place: str) -> list[Problem]:
    """The table of decision points against the sequences themselves."""
    try:
        points, table = reader.columns("points"), reader.columns("sequences")
    except DamagedData as error:
        rows = range(len(ids))
        if error.rows is not None and "points" in str(error):
            try:
                first = reader.columns("sequences")["point_start"]
                rows = np.flatnonzero((first < error.rows[1]) & (np.append(first[1:], 2**62) > error.rows[0]))
            except DamagedData:
                pass
        return [Problem(ids[row], place, str(error)) for row in rows]
    wrong = np.unique(points["sequence"][points["sequence"] != np.repeat(np.arange(len(ids)), table["turns"])])
    return [Problem(ids[row], place, "its decision points do not match its turns") for row in wrong]


def ids_without_group(storage: Storage, entry: dict) -> list[str]:
    """The ids that a segment's own table still tells, although its group file is damaged; [] where it cannot."""
    try:
        array = ArrayReader(storage, f"segments/{entry['name']}/ids")
        return [row.tobytes().hex() for row in array.all()][: entry["sequences"]]
    except DamagedData:
        return []
