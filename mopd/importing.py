"""Demonstrations into a prefix store, rendered with a model's chat template: what `mopd import` does.

With a run's configuration, model, store and token limits come from there; without one they are given.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.progress import Progress

if TYPE_CHECKING:
    from mopd.config import Config
    from mopd.sampling.rendering import ChatRenderer

BIG = 20_000_000
# bytes from which an import says how far it is
MEGABYTE = 1_000_000


class WrongImport(ValueError):
    """Something that an import needs is missing or does not fit; shown without a traceback."""


def open_renderer(model: str | Path, *, trust_remote_code: bool = False) -> ChatRenderer:
    """The renderer of a model folder or hub id; only its tokenizer and chat template are read. Raises WrongImport."""
    from mopd.sampling.rendering import ChatRenderer, load_tokenizer

    folder = Path(model)
    local = folder.exists() or folder.is_absolute() or str(model).startswith(".") or len(folder.parts) != 2
    if local and not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        raise WrongImport(f"there is no tokenizer in {model}; give a Hugging Face folder with tokenizer.json or a hub id of "
                          "the form owner/name")
    try:
        return ChatRenderer(load_tokenizer(model, trust_remote_code=trust_remote_code))
    except OSError as error:
        where = "" if folder.exists() else ", which is no folder here,"
        raise WrongImport(f"the tokenizer of {model}{where} cannot be read: {error}") from error


def run_import(
    files: Sequence[str | Path],
    store: str | Path,
    model: str | Path | None = None,
    *,
    format: str = "auto",
    domain: str | None = None,
    max_tokens: int | Mapping[str, int] | None = None,
    expert_only: bool = False,
    success_only: bool = False,
    success_reward: float = 1.0,
    system: str | None = None,
    tools_as_text: bool = False,
    messages_of: Any = None,
    strict: bool = False,
    report: Path | None = None,
    as_json: bool = False,
    storage_options: Mapping[str, str] | None = None,
    trust_remote_code: bool = False,
    thinking: bool | None = None,
) -> int:
    """Import files and folders into a store, which is made if it is not there and a row is taken; print what became of
    the rows.

    model      folder or hub id whose tokenizer and chat template render the rows; None will do for store exports
    report     file for every row that was not taken, as JSON (on the screen are the first ten of each reason)
    strict     commit nothing if any row is refused
    trust_remote_code  let Python code that comes with `model`'s tokenizer run
    thinking   what the chat template is told as `enable_thinking`; None: nothing
    Other arguments are those of `prefix_store.importers.ImportOptions`. Returns the exit status: 0 if something went in
    (or was there already), 1 if nothing did. Raises WrongImport for no files, a file that is not there, or no model where
    one is needed, or a report that cannot be written; UnknownFormat, ImportFailed, ForeignFingerprint, StoreError.
    """
    from mopd.sampling.rendering import transcript_messages
    from prefix_store import PrefixStore
    from prefix_store.importers import ImportFailed, import_into
    from prefix_store.importers.reading import files_of
    from prefix_store.importers.run import formats_of
    from prefix_store.store import StoreNotFound, check_fingerprint

    if not files:
        raise WrongImport("no file to import: name at least one")
    for path in files:
        if not Path(path).exists():
            raise WrongImport(f"{path}: no such file or folder")
    found: set[str] = set()
    for path in files:
        try:
            found |= set(formats_of(path, format))
        except ImportFailed:  # beside others it is counted, and they are imported
            if len(files) == 1:
                raise
    if model is None and found != {"prefix_store"}:
        raise WrongImport(f"the rows ({', '.join(sorted(found))}) have to be rendered: name a folder with tokenizer and chat "
                          "template with --model")
    if report is not None:
        _check_report(report)
    renderer = None if model is None else open_renderer(model, trust_remote_code=trust_remote_code)
    if renderer is not None and thinking is not None:
        renderer = renderer.variant({"enable_thinking": thinking})
    total = sum(file.stat().st_size for path in files for file in files_of(path))
    bar = Progress("import, MB", total / MEGABYTE) if total >= BIG else None
    progress = (lambda done, _: bar.update(done / MEGABYTE)) if bar else None
    options: dict[str, Any] = {
        "domain": domain, "max_context_tokens": max_tokens, "expert_only": expert_only, "success_only": success_only,
        "success_reward": success_reward, "system": system, "tools_as_text": tools_as_text,
        "messages_of": messages_of or transcript_messages}
    extra = {"storage_options": dict(storage_options)} if storage_options else {}
    with contextlib.ExitStack() as stack:
        def make() -> PrefixStore:
            return stack.enter_context(PrefixStore.open(store, "a", **extra))

        target, version = make, None
        try:
            PrefixStore.open(store, **extra).close()
            target = make()
            version = target.version
        except StoreNotFound:  # made when the first row is taken
            pass
        except ValueError as error:
            if type(error) is ValueError:  # options or a URL that do not fit
                raise WrongImport(str(error)) from None
            raise
        if version is not None and renderer is not None:
            check_fingerprint(target, renderer.fingerprint())
        done = import_into(target, files, renderer, format, strict=strict, progress=progress, **options)
    version = done.version or version
    _say(done, store, version, renderer, strict, report, as_json)
    return 1 if not done.taken or (strict and done.refused) else 0


def _check_report(report: Path) -> None:
    """Make the report's folder. Raises WrongImport before anything is imported where no report can be written."""
    try:
        report.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongImport(f"--report {report}: its folder cannot be made: {error.strerror or error}") from None
    if report.is_dir():
        raise WrongImport(f"--report {report} is a folder; name a file")


def _say(done: Any, store: Any, version: str | None, renderer: ChatRenderer | None, strict: bool, report: Path | None,
         as_json: bool) -> None:
    notes = {}
    if renderer is not None:
        notes = dict(renderer.left_out) | {
            f"control tokens in a {role} message made harmless": count for role, count in renderer.escaped.items()}
    refused_all = strict and done.refused > 0
    answer = {
        "store": str(store), "version": version, "taken": 0 if refused_all else done.taken, "refused": done.refused,
        "duplicates": sum(r.duplicates for r in done.results), "notes": notes,
        "files": [r.as_json() for r in done.results]}
    if report is not None:
        report.write_text(json.dumps(answer, indent=1) + "\n")
    if as_json:
        print(json.dumps(answer))
        return
    for result in done.results:
        print(result)
    for what, count in notes.items():
        print(f"  {count} × {what}")
    if refused_all:
        print(f"result: nothing imported: {done.refused} rows were refused and --strict allows none")
    elif version is None:
        print(f"result: nothing imported; {store} has nothing in it")
    else:
        print(f"result: {done.taken} demonstrations in {store} at version {version}")


def import_from_config(config: Config, files: Sequence[str | Path], domain: str | None, *, store: str | None = None,
                       model: str | None = None, max_tokens: int | None = None, **options: Any) -> int:
    """`run_import` with the store, student and each domain's `max_context_tokens` of a configuration, as far as they are
    not given. Returns the exit status."""
    from mopd.config import ConfigError
    from mopd.config_domains import thinking_of, words_of

    if not files:
        raise ConfigError("no file to import: name at least one with --file")
    if domain is not None and domain not in config.domains:
        raise ConfigError(f"--domain {domain}: the config has the domains {', '.join(config.domains)}")
    limits = max_tokens or {name: part.max_context_tokens for name, part in config.domains.items()}
    rendered = config.domains if domain is None else {domain: config.domains[domain]}
    try:
        options = {"thinking": thinking_of(rendered), "messages_of": words_of(config.domains)} | options
    except ValueError as error:
        raise ConfigError(f"domains: {error}") from None
    return run_import(files, store or config.store, model or config.student.model, domain=domain, max_tokens=limits,
                      trust_remote_code=model is None and config.student.trust_remote_code, **options)
