"""Is a store what was written? Reads every byte of a version and lists what is wrong, sequence by sequence."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
from typing import TYPE_CHECKING

import numpy as np

from prefix_store.chunked import DamagedData
from prefix_store.segment import SegmentReader
from prefix_store.trajectory import InvalidSequence, check_sequence, hash_content
from prefix_store.versions import aside_folders, read_version, unreferenced, version_numbers

if TYPE_CHECKING:
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
    """What was checked and what is wrong. `leftovers` and `unreferenced` are harmless remains of killed writers."""

    version: str | None
    segments: int
    sequences: int
    problems: tuple[Problem, ...]
    leftovers: tuple[str, ...]
    unreferenced: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def damaged_sequences(self) -> list[str]:
        """Ids of the sequences that have a problem, each once."""
        return sorted({p.sequence for p in self.problems if p.sequence})

    def __str__(self) -> str:
        head = f"version {self.version}: {self.sequences} sequences in {self.segments} segments, "
        lines = [head + ("all sound" if self.ok else f"{len(self.problems)} problems")]
        lines += [f"  {problem}" for problem in self.problems]
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
    for number in version_numbers(store.path):
        try:
            read_version(store.path, number)
        except DamagedData as error:
            problems.append(Problem("", f"versions/v{number:06d}.json", str(error)))
    entries = store._manifest["segments"]
    checked = 0
    for entry in entries:
        folder = store.path / "segments" / entry["name"]
        try:
            reader = SegmentReader(folder)
        except DamagedData as error:
            lost = _ids_without_group(folder, entry["sequences"])
            problems += [Problem(identity, f"segment {entry['name']}", str(error)) for identity in lost]
            continue
        problems += check_segment(reader)
        checked += entry["sequences"]
    if not any(p.place.startswith("versions/") for p in problems):
        unnamed = tuple(unreferenced(store.path))
    else:
        unnamed = ()
    return VerifyReport(
        store.version, len(entries), checked, tuple(problems), tuple(aside_folders(store.path)[0]), unnamed
    )


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
            found = hashlib.sha256((reader.folder / name).read_bytes()).hexdigest()
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


def _ids_without_group(folder: pathlib.Path, count: int) -> list[str]:
    """The ids that the segment's own table still tells, although its group file is damaged; [""] where it cannot."""
    from prefix_store.chunked import ArrayReader

    try:
        return [row.tobytes().hex() for row in ArrayReader(folder / "ids").all()][:count]
    except (DamagedData, json.JSONDecodeError):
        return [""]
