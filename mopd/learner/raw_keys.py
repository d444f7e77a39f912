"""Which keys of a DeepSpeed configuration DeepSpeed never looks at: a misspelt one would do nothing, in silence."""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import Any


class _Watched(dict):
    """A dict that remembers which keys were asked for."""

    def __init__(self, values: dict[str, Any]):
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> KeysView:
        return _WatchedKeys(self)


class _WatchedKeys(KeysView):
    def __contains__(self, key: object) -> bool:
        return key in self._mapping

    def __iter__(self) -> Iterator:
        return iter(list(dict.keys(self._mapping)))


# Read when a part of DeepSpeed is used, not when it reads its configuration.
READ_LATER = frozenset({"optimizer", "scheduler", "autotuning", "aio"})


def unread_keys(config: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """The top-level keys of `config` that DeepSpeed's own reading does not ask for, each with the known keys that look
    like it. Raises what DeepSpeed raises for a configuration that it refuses. Needs an initialised process group."""
    import difflib

    from deepspeed.runtime.config import DeepSpeedConfig

    watched = _Watched(config)
    DeepSpeedConfig(watched)
    known = watched.asked | READ_LATER
    return [(key, difflib.get_close_matches(key, sorted(known), n=2)) for key in config if key not in known]
