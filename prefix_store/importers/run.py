"""Files to sequences: read, recognise, convert, render, check, hand to a sink; and into a store in batches."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from prefix_store.importers.base import (
    Conversation,
    ImportFailed,
    ImportOptions,
    ImportResult,
    Renderer,
    RowRefused,
    UnknownFormat,
)
from prefix_store.importers.contexts import row_source, to_sequence
from prefix_store.importers.formats import LOOKED_AT, Format, detect_format, format_named, known_formats
from prefix_store.importers.reading import Row, files_of, read_rows
from prefix_store.trajectory import Fingerprint, InvalidSequence, Sequence, check_sequence

COMMIT_EVERY = 2000
# sequences per commit of an import: a killed one leaves what it had committed, and the next run finds that there

DAMAGED = "file that cannot be read"
# the reason under which a damaged file counts as one refused row

Sink = Callable[[Sequence], Any]
Progress = Callable[[int, int], None]


def import_file(
    path: str | os.PathLike,
    renderer: Renderer | None,
    sink: Sink,
    format: str = "auto",
    *,
    progress: Progress | None = None,
    go_on: bool = False,
    **options: Any,
) -> ImportResult:
    """Import a file, or every file of a folder; hand each sequence to `sink` (for instance `store.append`).

    format    a key of FORMATS, or "auto": each file is recognised by its first rows
    renderer  None will do for the store's own export, which is not rendered again
    progress  called with (bytes read, bytes in all)
    go_on     a single file that cannot be read is counted as one of a folder is, since others are imported with it
    options   the fields of `ImportOptions`

    A row that fails is counted in the result with its reason and place, never raised. Files of a folder in no known
    format are listed in `skipped`; one that is damaged is counted as DAMAGED behind the rows that could be read. Raises
    UnknownFormat for a single file that is not recognised, FileNotFoundError, ImportFailed for a single file, or a folder of
    files, that cannot be read at all; errors of the sink pass through.
    """
    chosen = ImportOptions(**options)
    wanted = None if format == "auto" else format_named(format)
    path = pathlib.Path(path)
    files = files_of(path)
    result = ImportResult(path.name or str(path), "")
    if path.is_dir() and not files:
        raise UnknownFormat(f"{path} holds no file of a known kind")
    fingerprint = renderer.fingerprint() if renderer is not None else None
    sizes = [file.stat().st_size for file in files]
    formats: dict[str, None] = {}
    failed: ImportFailed | None = None
    for number, file in enumerate(files):
        before = sum(sizes[:number])
        told = (lambda done, at=before: progress(at + done, sum(sizes))) if progress else None
        place = f"{file.relative_to(path)}:" if path.is_dir() else ""
        try:
            for form, rows in _opened(file, wanted, told):
                if renderer is None and form.name != "prefix_store":
                    raise UnknownFormat(f"{file} is in the format {form.name} and has to be rendered: give a renderer "
                                        "(a model's tokenizer and chat template)")
                formats[form.name] = None
                _import_rows(rows, form, file, place, renderer, fingerprint, sink, chosen, result)
        except UnknownFormat as error:
            if not path.is_dir() or renderer is None or wanted is not None:
                raise
            result.skipped[str(file.relative_to(path))] = str(error).split(": ", 1)[-1].split(". Known")[0].split("\n")[0]
        except ImportFailed as error:
            if not path.is_dir() and not go_on:
                raise
            failed = failed or error
            result.rows += 1
            result.refuse(DAMAGED, place.removesuffix(":") or file.name, str(error))
    if failed and not formats and not go_on:
        raise failed
    if not formats and not failed:
        raise UnknownFormat(f"{path}: none of its {len(files)} files is in a known format; for example "
                            + "; ".join(f"{name}: {why}" for name, why in list(result.skipped.items())[:3]))
    result.format = ", ".join(formats)
    return result


def formats_of(path: str | os.PathLike, format: str = "auto") -> list[str]:
    """The names of the formats that a file or the files of a folder have, by their first rows; nothing is imported. Raises
    what `import_file` raises before it takes a row."""
    if format != "auto":
        return [format_named(format).name]
    path = pathlib.Path(path)
    found: dict[str, None] = {}
    failed: ImportFailed | None = None
    for file in files_of(path):
        try:
            rows = read_rows(file)
            found[detect_format(list(itertools.islice(rows, LOOKED_AT)), file).name] = None
            rows.close()
        except UnknownFormat:
            if not path.is_dir():
                raise
        except ImportFailed as error:
            failed = failed or error
    if failed and not found:
        raise failed
    if not found:
        raise UnknownFormat(f"{path} holds no file in a known format; known formats:\n{known_formats()}")
    return list(found)


def _opened(file: pathlib.Path, wanted: Format | None, told: Callable[[int], None] | None
            ) -> Iterator[tuple[Format, Iterator[Row]]]:
    """A file's format and rows; one item, so that the file is closed whatever happens to the rows."""
    rows = read_rows(file, told)
    first = list(itertools.islice(rows, LOOKED_AT))
    form = wanted or detect_format(first, file)
    joined = itertools.chain(first, rows)
    yield form, form.group(joined, file) if form.group else joined


def _import_rows(rows: Iterator[Row], form: Format, file: pathlib.Path, place: str, renderer: Renderer | None,
                 fingerprint: Fingerprint | None, sink: Sink, options: ImportOptions, result: ImportResult) -> None:
    tokenizer = fingerprint.tokenizer if fingerprint else options.tokenizer
    for row in rows:
        where = f"{place}{row.where}" if place else row.where
        pieces: Iterable[Conversation | Sequence | RowRefused]
        try:
            pieces = _pieces(row, form, options)
        except RowRefused as refusal:
            pieces = [refusal]
        except (TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            # No row may end an import: whatever the converters did not foresee is a refused row.
            pieces = [RowRefused("unreadable row", f"{type(error).__name__}: {error}")]
        for piece in pieces:
            result.rows += 1
            try:
                if isinstance(piece, RowRefused):
                    raise piece
                if not isinstance(piece, Sequence):
                    piece = to_sequence(piece, renderer, fingerprint, row_source(file.name, row.value), options)
                else:
                    _check_export(piece, tokenizer, options)
                    tokenizer = piece.fingerprint.tokenizer
                check_sequence(piece)
            except RowRefused as refusal:
                result.refuse(refusal.reason, where, str(refusal))
                continue
            except InvalidSequence as error:
                result.refuse("invalid sequence", where, str(error))
                continue
            except RecursionError as error:
                result.refuse("unreadable row", where, str(error))
                continue
            sink(piece)
            limits = options.max_context_tokens
            if isinstance(limits, Mapping) and limits and piece.domain not in limits:
                result.unlisted[piece.domain] = options.limit(piece.domain)
            result.taken += 1
            result.turns += piece.turns
            result.tokens += sum(len(c.tokens) - c.fork for c in piece.contexts)


def _check_export(sequence: Sequence, tokenizer: str | None, options: ImportOptions) -> None:
    if options.domain is not None and sequence.domain != options.domain:
        raise RowRefused("other domain", f"domain {sequence.domain!r}")
    if tokenizer is not None and sequence.fingerprint.tokenizer != tokenizer:
        raise RowRefused("written with another tokenizer", f"{sequence.fingerprint.tokenizer}, here it is {tokenizer}")
    if options.success_only and not sequence.outcome.success:
        raise RowRefused("not successful", f"reward {sequence.outcome.reward:g}")
    limit = options.limit(sequence.domain)
    longest = max(len(c.tokens) for c in sequence.contexts)
    if limit is not None and longest > limit:
        raise RowRefused("longer than the limit", f"a context of {longest} tokens, the limit is {limit}")


def _pieces(row: Row, form: Format, options: ImportOptions) -> list[Conversation | Sequence]:
    if row.error:
        raise RowRefused("not JSON", row.error)
    if not isinstance(row.value, dict):
        raise RowRefused("not a JSON object", f"found {type(row.value).__name__}")
    made = form.convert(row.value, options)
    if isinstance(made, list) and not made:
        raise RowRefused("no assistant turn")
    return made if isinstance(made, list) else [made]


@dataclasses.dataclass
class StoreImport:
    """What an import did: one result per file or folder, and the store's version afterwards (None: nothing committed)."""

    results: list[ImportResult]
    version: str | None

    @property
    def taken(self) -> int:
        return sum(r.taken for r in self.results)

    @property
    def refused(self) -> int:
        return sum(r.rows - r.taken for r in self.results)


def import_into(
    store: Any,
    paths: Iterable[str | os.PathLike],
    renderer: Renderer | None,
    format: str = "auto",
    *,
    strict: bool = False,
    commit_every: int = COMMIT_EVERY,
    progress: Progress | None = None,
    **options: Any,
) -> StoreImport:
    """Import files and folders into a store that is open for appending, with a commit every `commit_every` sequences.

    store     a PrefixStore, or a function that makes one: it is called when there is something to put into it, so that an
              import of which nothing is taken leaves no empty store behind
    strict    commit nothing before the end, and nothing at all if any row was refused

    What is there already is counted as a duplicate. The other arguments and errors are those of `import_file`.
    """
    results: list[ImportResult] = []
    names = [pathlib.Path(path) for path in paths]
    message = f"import of {', '.join(p.name for p in names)}"
    if strict and callable(store):
        return _import_aside(store, names, renderer, format, message, commit_every=commit_every, progress=progress, **options)
    opened = None if callable(store) else store

    tokenizer = options.pop("tokenizer", None)
    if renderer is None and tokenizer is None:
        tokenizer = next((fp.tokenizer for fp in opened.fingerprints()), None) if opened is not None else None

    def sink(sequence: Sequence) -> None:
        nonlocal tokenizer, opened
        tokenizer = sequence.fingerprint.tokenizer
        if opened is None:
            opened = store()
        opened.append(sequence)
        if not strict and opened.pending >= commit_every:
            opened.commit(message)

    def duplicates() -> int:
        return 0 if opened is None else opened.duplicates

    sizes = [sum(file.stat().st_size for file in files_of(path)) for path in names]
    for number, path in enumerate(names):
        before, behind = duplicates(), sum(sizes[:number])
        told = (lambda done, _, at=behind: progress(at + done, sum(sizes))) if progress else None
        result = import_file(path, renderer, sink, format, progress=told, tokenizer=tokenizer, go_on=len(names) > 1,
                             **options)
        result.duplicates = duplicates() - before
        results.append(result)
    done = StoreImport(results, None)
    if strict and done.refused and opened is not None:
        opened.close()
    elif done.taken:
        done.version = opened.commit(message)
    return done


def _import_aside(make: Callable[[], Any], names: list[pathlib.Path], renderer: Renderer | None, format: str, message: str,
                  **options: Any) -> StoreImport:
    """All or nothing for a store that is not there yet: the rows go into a store aside first."""
    from prefix_store.store import PrefixStore

    with tempfile.TemporaryDirectory(prefix="prefix-store-import-") as folder, PrefixStore.open(folder, "a") as aside:
        done = import_into(aside, names, renderer, format, **options)
        done.version = None
        if done.taken and not done.refused:
            target = make()
            for sequence in aside:
                target.append(sequence)
            done.version = target.commit(message)
    return done
