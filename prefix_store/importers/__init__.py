"""Demonstrations in the formats that people have become sequences, token by token, rendered turn by turn."""

from prefix_store.importers.base import ImportResult, Renderer, import_file
from prefix_store.importers.chat import import_chat
from prefix_store.importers.transcripts import import_transcripts

__all__ = ["ImportResult", "Renderer", "import_chat", "import_file", "import_transcripts"]
