"""Quarantine: a version without the damaged segments, in which everything of them that is sound goes on living.

A sequence is saved if it can be read and its content has its id; the saved ones of a segment go into a fresh one. The new
version and all after it record which segments were taken out and which sequences were lost; `gc` leaves the damaged files
where they are, for whoever wants to look at them. Older versions go on naming the damaged segments.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from prefix_store.building import SegmentBuilder
from prefix_store.chunked import DamagedData
from prefix_store.segment import Item, SegmentReader
from prefix_store.trajectory import InvalidSequence, check_sequence, hash_content
from prefix_store.verify import VerifyReport, ids_without_group, problems_of_segment
from prefix_store.writer import Change, Staged, transact

if TYPE_CHECKING:
    from prefix_store.store import PrefixStore


@dataclasses.dataclass(frozen=True)
class QuarantineReport:
    """What a quarantine did.

    version   the version it made, or the newest one where nothing was damaged
    segments  per segment that was taken out: name, reason, saved (number of sequences), lost (ids), unknown (number of
              lost sequences whose ids cannot be told)
    sound     names of segments that were asked for and in which nothing is wrong: they stay
    """

    version: str | None
    segments: tuple[dict[str, Any], ...]
    sound: tuple[str, ...]

    @property
    def lost(self) -> list[str]:
        """Ids of all sequences that were lost."""
        return sorted(identity for segment in self.segments for identity in segment["lost"])

    def __str__(self) -> str:
        lines = [f"version {self.version}: {len(self.segments)} segments in quarantine"]
        for segment in self.segments:
            count = f"{segment['saved']} sequences saved, {len(segment['lost']) + segment['unknown']} lost"
            lines.append(f"  segment {segment['name']}: {count} ({segment['reason']})")
            lines += [f"    lost {identity}" for identity in segment["lost"]]
            if segment["unknown"]:
                lines.append(f"    lost {segment['unknown']} more whose ids cannot be told")
        lines += [f"  segment {name} is sound and stays" for name in self.sound]
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON data."""
        return dataclasses.asdict(self)


def quarantine_segments(store: PrefixStore, found: VerifyReport | list[str] | None, message: str) -> QuarantineReport:
    """See PrefixStore.quarantine. Raises ValueError for a segment that the newest version does not name."""
    store._advance()
    entries = {entry["name"]: entry for entry in store._manifest["segments"]}
    if isinstance(found, VerifyReport):
        # a report may be of an older version, of which another quarantine has taken out something since
        names = [name for name in found.damaged_segments() if name in entries]
    else:
        names = list(entries) if found is None else list(dict.fromkeys([found] if isinstance(found, str) else found))
    for name in names:
        if name not in entries:
            raise ValueError(f"{store.path} {store.version} names no segment {name!r}; `verify` says which are damaged")

    parts: list[tuple[Staged | None, dict[str, Any]]] = []
    sound = []
    try:
        for name in names:
            problems = problems_of_segment(store.storage, entries[name])
            if not problems:
                sound.append(name)
                continue
            saved, lost, unknown = salvage(store, entries[name])
            reason = problems[0].message + (f" (and {len(problems) - 1} more)" if len(problems) > 1 else "")
            row = {"name": name, "reason": reason, "saved": len(saved), "lost": lost, "unknown": unknown}
            parts.append((Staged.of(saved, store.storage.scratch()) if len(saved) else None, row))

        def plan(base: dict[str, Any]) -> Change | None:
            now = {entry["name"] for entry in base["segments"]}
            for part in [part for part in parts if part[1]["name"] not in now]:
                parts.remove(part)
                if part[0] is not None:
                    part[0].discard(store)
            if not parts:
                return None
            rows = [row for _, row in parts]
            details = {"segments": len(rows), "lost": sum(len(row["lost"]) + row["unknown"] for row in rows)}
            return Change(
                [staged for staged, _ in parts if staged is not None],
                message,
                "quarantine",
                {row["name"] for row in rows},
                details,
                quarantined=base.get("quarantined", []) + rows,
            )

        transact(store, plan)
    finally:
        for staged, _ in parts:
            if staged is not None:
                staged.discard_files()
    store._writer.forget_committed()
    for _, row in parts:
        store.damaged.pop(row["name"], None)
    return QuarantineReport(store.version, tuple(row for _, row in parts), tuple(sound) if found is not None else ())


def salvage(store: PrefixStore, entry: dict[str, Any]) -> tuple[SegmentBuilder, list[str], int]:
    """What can be read of a damaged segment: the sound sequences, the ids of the lost ones, and how many more are lost.

    A sequence is sound if every chunk of it passes its checksum, it obeys the data model and its content has its id;
    where the table of ids is what is damaged, its content's hash is its id.
    """
    try:
        reader = SegmentReader(store.storage, f"segments/{entry['name']}", checked=False)
    except DamagedData:
        known = ids_without_group(store.storage, entry)
        return SegmentBuilder(), known, entry["sequences"] - len(known)
    saved, lost, unknown = SegmentBuilder(), [], 0
    for row in range(entry["sequences"]):
        identity = None
        try:
            identity = reader.array("ids").read(row, row + 1).tobytes()
        except (DamagedData, KeyError, IndexError):
            pass
        try:
            record, sequence = reader.content(row)
            check_sequence(sequence)
            key = bytes.fromhex(hash_content(record, sequence.contexts))
            if identity not in (None, key):
                raise DamagedData("its content does not have its id")
            if key not in saved:
                saved.add(Item(key, record, sequence))
        except (DamagedData, InvalidSequence, ValueError, KeyError, IndexError, TypeError):
            if identity is None:
                unknown += 1
            else:
                lost.append(identity.hex())
    return saved, lost, unknown
