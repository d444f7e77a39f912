"""Demonstrations in the formats that people have become sequences, token by token, rendered turn by turn."""

from prefix_store.importers.base import (
    Conversation,
    ImportFailed,
    ImportOptions,
    ImportResult,
    Renderer,
    RowRefused,
    UnknownFormat,
)
from prefix_store.importers.formats import FORMATS
from prefix_store.importers.run import StoreImport, import_file, import_into

__all__ = [
    "FORMATS",
    "Conversation",
    "ImportFailed",
    "ImportOptions",
    "ImportResult",
    "Renderer",
    "RowRefused",
    "StoreImport",
    "UnknownFormat",
    "import_file",
    "import_into",
]
