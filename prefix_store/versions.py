"""The versions of a store: small JSON manifests that each name an exact set of segments, and what no version names."""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import pathlib
import re
import socket
from typing import Any

from prefix_store.chunked import DamagedData
from prefix_store.segment import LAYOUT, Entry
from prefix_store.trajectory import canonical_json

_VERSION_FILE = re.compile(r"v(\d{6,})\.json")
_EMPTY = {"version": "", "number": 0, "message": "", "committed_at": "", "segments": []}


def version_numbers(path: pathlib.Path) -> list[int]:
    """The numbers of a store's versions, ascending."""
    matches = (_VERSION_FILE.fullmatch(name) for name in os.listdir(path / "versions"))
    return sorted(int(match[1]) for match in matches if match)


def read_version(path: pathlib.Path, version: str | int | None) -> dict[str, Any]:
    """The manifest of a version; None means the newest, and an empty manifest where nothing was committed yet.

    Raises ValueError for a version that is not there, DamagedData for one that fails its checksum.
    """
    numbers = version_numbers(path)
    if version is None:
        if not numbers:
            return dict(_EMPTY)
        number = numbers[-1]
    else:
        match = re.fullmatch(r"v?(\d+)", str(version))
        number = int(match[1]) if match else -1
        if number not in numbers:
            have = f"it has v{numbers[0]:06d} to v{numbers[-1]:06d}" if numbers else "nothing was committed yet"
            raise ValueError(f"{path} has no version {version!r}; {have}")
    file = path / "versions" / f"v{number:06d}.json"
    try:
        manifest = json.loads(file.read_bytes())
        sound = manifest["sha256"] == _manifest_digest(manifest) and manifest["number"] == number
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise DamagedData(
            f"{file} fails its checksum; open another of the store's {len(numbers)} versions by its name, or, if this "
            "is the newest, move the file away to go on from the one before it"
        )
    return manifest


def _manifest_digest(manifest: dict[str, Any]) -> str:
    content = canonical_json({key: value for key, value in manifest.items() if key != "sha256"})
    return hashlib.sha256(content.encode("ascii")).hexdigest()


def next_manifest(base: dict[str, Any], added: list[Entry], message: str) -> dict[str, Any]:
    """The manifest of the version after `base`, with `added` segments behind those of `base`."""
    number = base["number"] + 1
    manifest = {
        "layout": LAYOUT,
        "version": f"v{number:06d}",
        "number": number,
        "message": message,
        "committed_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "segments": base["segments"] + [vars(entry) for entry in added],
    }
    return manifest | {"sha256": _manifest_digest(manifest)}


def totals(manifest: dict[str, Any]) -> dict[str, int]:
    """What the version's segments hold together."""
    return {
        "sequences": sum(entry["sequences"] for entry in manifest["segments"]),
        "decision_points": sum(entry["points"] for entry in manifest["segments"]),
        "tokens": sum(entry["tokens"] for entry in manifest["segments"]),
    }


def aside_folders(path: pathlib.Path) -> tuple[list[str], list[str]]:
    """Names in `tmp/`: those of processes of this machine that are gone, and all others."""
    leftovers, writers = [], []
    for name in sorted(os.listdir(path / "tmp")):
        match = re.fullmatch(r"(?P<host>.+)\.(?P<pid>\d+)\.[0-9a-f]+", name)
        # a store being made writes its marker aside before it has a folder of its own
        here = match and match["host"] in (socket.gethostname(), "zarr.json")
        gone = here and not _alive(int(match["pid"]))
        (leftovers if gone else writers).append(name)
    return leftovers, writers


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def unreferenced(path: pathlib.Path) -> list[str]:
    """Names of published segments that no version names. Raises DamagedData if a version cannot be read."""
    named = {e["name"] for number in version_numbers(path) for e in read_version(path, number)["segments"]}
    return sorted(name for name in os.listdir(path / "segments") if name not in named and name != "zarr.json")
