"""The `mopd store` commands: look into a prefix store, check it, take it out, tidy it.

A store is a folder or, with the storage options that it needs, an object store's URL (s3://bucket/prefix).
"""

from __future__ import annotations

import dataclasses
import json
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from prefix_store import PrefixStore

app = typer.Typer(no_args_is_help=True, help="Look into a prefix store, check, export and tidy it.")
console = Console(stderr=True, highlight=False)
# beside the answer on standard output; what `export` says goes here, since its rows may go there

Location = Annotated[str, typer.Argument(metavar="STORE", help="Folder, or URL like s3://bucket/prefix")]
Version = Annotated[str | None, typer.Option("--version", help="An older version, like v000003")]
StorageOptions = Annotated[list[str] | None, typer.Option(
    "--storage-option", metavar="KEY=VALUE", help="Of an object store, like endpoint=http://localhost:9000; may be repeated")]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON")]
Domains = Annotated[list[str] | None, typer.Option("--domain", help="Only this domain; may be repeated")]
Sources = Annotated[list[str] | None, typer.Option(
    "--source", help="Only this kind: teacher, expert, demonstration or student; may be repeated")]
Success = Annotated[bool | None, typer.Option("--success/--failure", help="Only sequences that succeeded, or failed")]


class WrongOption(ValueError):
    """An option that does not fit; shown without a traceback."""


def storage_options(items: list[str] | None) -> dict[str, Any]:
    """Keyword arguments of PrefixStore.open for --storage-option KEY=VALUE items. Raises WrongOption."""
    options = {}
    for item in items or []:
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise WrongOption(f"--storage-option {item.partition('=')[0]}: write KEY=VALUE")
        options[key] = value
    return {"storage_options": options} if options else {}


def open_store(location: str, mode: str = "r", version: str | None = None, options: list[str] | None = None, *,
               skip_damaged: bool = False) -> PrefixStore:
    """The store at a location; one that is not there is an error in every mode."""
    from prefix_store import PrefixStore

    more = storage_options(options)
    try:
        if mode == "a":
            PrefixStore.open(location, "r", **more).close()  # "a" would make a store
        return PrefixStore.open(location, mode, version, skip_damaged=skip_damaged, **more)
    except ValueError as error:
        if type(error) is ValueError:  # a version or URL that is not there
            raise WrongOption(str(error)) from None
        raise


def _plain(value: Any) -> dict[str, Any]:
    return value.to_dict() if hasattr(value, "to_dict") else dataclasses.asdict(value)


@app.command("info")
def info(store: Location, version: Version = None, storage_option: StorageOptions = None, as_json: Json = False):
    """What is in a store: sequences, decision points, domains, sources, versions."""
    with open_store(store, version=version, options=storage_option) as opened:
        found = opened.info()
        if as_json:
            print(json.dumps(found | {"history": opened.history()}, default=str))
            return
    from mopd.show import show_info

    show_info(found)


@app.command("show")
def show(store: Location,
         sequence: Annotated[str | None, typer.Argument(help="Sequence id, or how it begins; without it: a list")] = None,
         model: Annotated[Path | None, typer.Option(help="Folder with the tokenizer, to show text")] = None,
         tokens: Annotated[bool, typer.Option("--tokens", help="Show token ids, also with --model")] = False,
         domain: Domains = None, source: Sources = None, success: Success = None,
         limit: Annotated[int, typer.Option(min=1, help="How many sequences the list has at most")] = 20,
         version: Version = None, storage_option: StorageOptions = None, as_json: Json = False):
    """One sequence readably: segments coloured, decision points numbered, how it ended. Without an id: a list."""
    from mopd.show import list_sequences, show_sequence

    with open_store(store, version=version, options=storage_option) as opened:
        if sequence is None:
            list_sequences(opened, domain or [], source or [], success, limit, as_json)
        else:
            show_sequence(opened, sequence, model, as_json, tokens=tokens)


@app.command("verify")
def verify(store: Location, version: Version = None,
           quarantine: Annotated[bool, typer.Option(
               "--quarantine", help="Make a version without what is damaged; what is sound in it is kept")] = False,
           storage_option: StorageOptions = None, as_json: Json = False):
    """Check every checksum and rule; exit status 1 if something is damaged (with --quarantine: if something was lost)."""
    if quarantine and version is not None:
        raise WrongOption("--quarantine makes a new version of the newest one; leave --version away")
    with open_store(store, "a" if quarantine else "r", version, storage_option) as opened:
        result = opened.verify()
        done = opened.quarantine(result) if quarantine and not result.ok else None
    problems = [str(problem) for problem in result.problems]
    if as_json:
        answer = {"sequences": result.sequences, "problems": problems}
        print(json.dumps(answer | ({"quarantine": _plain(done)} if done is not None else {}), default=str))
    else:
        print(f"{result.sequences} sequences checked, {len(problems)} problems")
        for problem in problems:
            print(f"  {problem}")
        if done is not None:
            print(done)
    if problems:
        raise typer.Exit(1)


@app.command("export")
def export(store: Location, out: Annotated[str, typer.Argument(help="File to write; - is standard output")],
           form: Annotated[str, typer.Option(help="tokens: exact, imports again; chat: OpenAI-style messages")] = "tokens",
           model: Annotated[Path | None, typer.Option(help="Folder with tokenizer and template, for --form chat")] = None,
           domain: Domains = None, source: Sources = None, success: Success = None,
           version: Version = None, storage_option: StorageOptions = None, as_json: Json = False):
    """Write sequences as JSON lines, one each: token by token, or as chats."""
    from mopd import exporting

    with open_store(store, version=version, options=storage_option) as opened:
        try:
            done = exporting.export(opened, out, form=form, model=model, domains=domain or (), sources=source or (),
                                    success=success)
        except exporting.ReaderGone as gone:
            console.print(f"{gone}", soft_wrap=True)
            raise typer.Exit(128 + signal.SIGPIPE) from None  # the status of any program that its reader left
    if as_json and out != "-":
        print(json.dumps(done))
        return
    console.print(f"{done['sequences']} sequences written to {out if out != '-' else 'standard output'}", soft_wrap=True)
    if done["by_segment"]:
        console.print(f"{done['by_segment']} of them were not written by this chat template, or not by it alone: their "
                      "messages are by segment", soft_wrap=True)


@app.command("compact")
def compact(store: Location,
            target_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of a merged segment, about")] = None,
            message: Annotated[str, typer.Option(help="The new version's message")] = "compact",
            storage_option: StorageOptions = None, as_json: Json = False):
    """Merge small segments into a new version with the same sequences; older versions stay readable."""
    options = {} if target_tokens is None else {"target_tokens": target_tokens}
    with open_store(store, "a", options=storage_option) as opened:
        before = len(opened.info()["segment_names"])
        version = opened.compact(message=message, **options) or None
        after = len(opened.info()["segment_names"])
    if as_json:
        print(json.dumps({"version": version, "segments_before": before, "segments": after}))
    elif before == after:
        print(f"version {version}: nothing to merge; segments: {after}")
    else:
        print(f"version {version}: {before} segments are now {after}")


@app.command("gc")
def gc(store: Location,
       keep_versions: Annotated[int | None, typer.Option(min=1, help="Forget all versions but the newest so many")] = None,
       min_age: Annotated[float, typer.Option(min=0, help="Spare what is younger than so many seconds")] = 3600.0,
       dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go")] = False,
       storage_option: StorageOptions = None, as_json: Json = False):
    """Remove what no version names: segments and leftovers of writers that were killed."""
    with open_store(store, "a", options=storage_option) as opened:
        done = opened.gc(keep_versions=keep_versions, min_age_seconds=min_age, dry_run=dry_run)
    if as_json:
        print(json.dumps(_plain(done), default=str))
    else:
        print(done)
