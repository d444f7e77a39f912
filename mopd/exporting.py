"""Sequences out of a prefix store as JSON lines: every token and value, or as chats that people can read."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np

from prefix_store import PrefixStore

FORMS = ("tokens", "chat")


class WrongExport(ValueError):
    """An export that cannot be made as asked."""


class ReaderGone(RuntimeError):
    """Who read standard output has closed it, as `head` does; the message says how far the export came."""


def chosen_ids(store: PrefixStore, domains: Iterable[str] = (), sources: Iterable[str] = (), *,
               success: bool | None = None) -> list[str]:
    """Ids of the sequences that pass every filter, ascending. Raises WrongExport for a domain that the store does not
    hold or a source kind that there is not."""
    from prefix_store.trajectory import SOURCE_KINDS

    index = store.index()
    for name in domains:
        if name not in index.domains:
            raise WrongExport(f"--domain {name}: the store has {', '.join(index.domains) or 'no sequences'}")
    for kind in sources:
        if kind not in SOURCE_KINDS:
            raise WrongExport(f"--source {kind}: sources are {', '.join(SOURCE_KINDS)}")
    first = np.asarray(index.first)[:-1]
    keep = np.ones(len(first), dtype=bool)
    if domains:
        keep &= np.isin(index.domain[first], [index.domains.index(name) for name in domains])
    if sources:
        keep &= np.isin(index.source[first], [SOURCE_KINDS.index(kind) for kind in sources])
    if success is not None:
        keep &= np.asarray(index.success[first], dtype=bool) == success
    return [index.sequence_id(int(ordinal)) for ordinal in np.flatnonzero(keep)]


def export(store: PrefixStore, out: str, *, form: str = "tokens", model: Path | None = None, domains: Iterable[str] = (),
           sources: Iterable[str] = (), success: bool | None = None) -> dict[str, Any]:
    """Write the chosen sequences to `out` ("-": standard output; a name ending in .gz is packed), one JSON object a line.

    form   "tokens": the store's own format, which imports again to equal content hashes; "chat": OpenAI-style messages,
           for which `model` names the folder with the tokenizer and chat template
    Returns what was written: {"out", "form", "sequences", "by_segment"}; the last counts chats whose template could not be
    taken apart, so that their messages are by segment. A file appears whole or not at all. Raises ReaderGone where who reads
    standard output has closed it.
    """
    if form not in FORMS:
        raise WrongExport(f"--form {form}: it is one of {', '.join(FORMS)}")
    if form == "chat" and model is None:
        raise WrongExport("--form chat needs the tokenizer: name its folder with --model")
    ids = chosen_ids(store, tuple(domains), tuple(sources), success=success)
    rows = _token_rows(store, ids) if form == "tokens" else _chat_rows(store, ids, model)
    count = by_segment = 0
    try:
        with _opened(out) as file:
            for row, exact in rows:
                file.write(json.dumps(row, separators=(",", ":")) + "\n")
                count += 1
                by_segment += not exact
            file.flush()
    except BrokenPipeError:
        # What is still in the buffer has nowhere to go; the interpreter would stumble over it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise ReaderGone(f"standard output was closed by its reader after {count} of {len(ids)} sequences") from None
    return {"out": out, "form": form, "sequences": count, "by_segment": by_segment}


def _token_rows(store: PrefixStore, ids: list[str]) -> Iterator[tuple[dict[str, Any], bool]]:
    from prefix_store.importers.exported import to_row

    for identity in ids:
        yield to_row(store.sequence(identity), identity), True


def _chat_rows(store: PrefixStore, ids: list[str], model: Path) -> Iterator[tuple[dict[str, Any], bool]]:
    from mopd.importing import open_renderer
    from mopd.sampling.chat_text import ChatReader, to_chat
    from prefix_store.store import check_fingerprint

    renderer = open_renderer(model)
    check_fingerprint(store, renderer.fingerprint(), chat_template=False)
    reader = ChatReader(renderer)
    for identity in ids:
        yield to_chat(store.sequence(identity), identity, reader)


@contextlib.contextmanager
def _opened(out: str) -> Iterator[IO[str]]:
    if out == "-":
        yield sys.stdout
        return
    path = Path(out)
    if path.is_dir():
        raise WrongExport(f"{out} is a folder; name a file")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = gzip.open(aside, "wt", encoding="utf-8") if out.endswith(".gz") else open(aside, "w", encoding="utf-8")
    except OSError as error:
        raise WrongExport(f"{out} cannot be written: {error.strerror or error}") from None
    try:
        with opened as file:
            yield file
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
