"""docs/configuration.md names every key of the configuration with its type and default, and none that does not exist."""

import dataclasses
import json
import re
import types
import typing
from pathlib import Path

import pytest

from mopd.config import Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false"}
PLURALS = {str: "texts", int: "whole numbers", float: "numbers"}


def words(hint) -> str:
    """A type as the page writes it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return "section"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("null" if a is type(None) else words(a) for a in arguments)
    if origin is list:
        return f"list of {PLURALS[arguments[0]]}"
    if origin is dict:
        value = arguments[1]
        if dataclasses.is_dataclass(value):
            return "sections by name"
        if value is typing.Any:
            return "mapping"
        return "mapping of " + (PLURALS[value] if value in PLURALS else re.sub("^(list|mapping)", r"\1s", words(value)))
    return WORDS[hint]


def default(field: dataclasses.Field) -> str:
    """A default as the page writes it; a section has none of its own."""
    value = field.default if field.default is not dataclasses.MISSING else field.default_factory()
    return "" if dataclasses.is_dataclass(value) else f"`{json.dumps(value)}`"


def sections(kind: type = Config, path: str = "") -> dict[str, type]:
    """Every section's path in the page's words (`domains.NAME`) with its dataclass; the top level is ''."""
    found = {path: kind}
    for name, hint in typing.get_type_hints(kind).items():
        inner = hint if dataclasses.is_dataclass(hint) else next(
            (a for a in typing.get_args(hint) if dataclasses.is_dataclass(a)), None)
        if inner is not None:
            full = f"{path}.{name}".lstrip(".") + ("" if inner is hint else ".NAME")
            found |= sections(inner, full)
    return found


def tables() -> dict[str, dict[str, tuple[str, str, str]]]:
    """{section path: {key: (type, default, meaning)}} as the page has it."""
    found: dict[str, dict[str, tuple[str, str, str]]] = {}
    paths: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paths = [""] if line == "## Top level" else re.findall(r"`([^`]+)`", line)
        row = re.match(r"\| `(\w+)` \|(.*)\|(.*)\|(.*)\|$", line)
        if row:
            for path in paths:
                assert row[1] not in found.setdefault(path, {}), f"{path}.{row[1]} is described twice"
                found[path][row[1]] = tuple(cell.strip() for cell in row.groups()[1:])
    return found


def test_every_section_is_on_the_page_and_no_other():
    assert set(tables()) == set(sections())


@pytest.mark.parametrize("path", sections())
def test_every_key_has_its_type_and_default(path):
    kind, rows = sections()[path], tables().get(path, {})
    hints = typing.get_type_hints(kind)
    expected = {f.name: (words(hints[f.name]), default(f)) for f in dataclasses.fields(kind)}
    assert {key: row[:2] for key, row in rows.items()} == expected
    assert all(len(row[2]) > 3 for row in rows.values()), "a key without a meaning"
