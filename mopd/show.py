"""A store for human eyes: one sequence with its segments in colours and its decision points numbered, a list, a summary."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mopd.exporting import chosen_ids
from prefix_store import PrefixStore
from prefix_store.trajectory import Context, Sequence

STYLES = {"prompt": "cyan", "observation": "default", "action": "bold green"}
# what a terminal would obey instead of showing it; stored text must not clear the screen or pass for other text
HARMLESS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class NoSuchSequence(ValueError):
    """No sequence of the store, or more than one, has an id that begins so."""


def _console() -> Console:
    """Standard output, on which a character that its encoding does not have becomes a question mark."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
    return Console(highlight=False)


def _shown(text: str, style: str = "") -> Text:
    """Text with control characters spelled out."""
    return Text(text.translate(HARMLESS), style=style)


def find_sequence(store: PrefixStore, start: str) -> str:
    """The one id that begins with `start`; raises NoSuchSequence."""
    ids = store.ids()
    found = [i for i in ids if i.startswith(start.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise NoSuchSequence(f"{len(found)} sequences of {store.path} begin with {start!r}: "
                             f"{', '.join(i[:12] for i in found[:5])}{' …' if len(found) > 5 else ''}; write more of the id")
    raise NoSuchSequence(f"no sequence of {store.path} begins with {start!r}; it holds {len(ids)}"
                         + (f", for example {ids[0][:12]}" if ids else ""))


def show_sequence(store: PrefixStore, start: str, model: Path | None = None, as_json: bool = False, *,
                  tokens: bool = False) -> None:
    """Print the sequence whose id begins with `start`. `model` is a folder with the tokenizer that wrote it; without
    one, or with `tokens`, token ids stand for text. Raises NoSuchSequence, or ForeignFingerprint for another tokenizer."""
    identity = find_sequence(store, start)
    text = _decoder(store, None if tokens else model)
    record = describe(store.sequence(identity), identity, text)
    if as_json:
        print(json.dumps(record))
    else:
        _print(record, _console())


def list_sequences(store: PrefixStore, domains: Iterable[str] = (), sources: Iterable[str] = (),
                   success: bool | None = None, limit: int = 20, as_json: bool = False) -> None:
    """Print a line for each of the first `limit` sequences, by id, that pass the filters, and how many there are."""
    ids = chosen_ids(store, tuple(domains), tuple(sources), success=success)
    rows = []
    for identity in ids[:limit]:
        sequence = store.sequence(identity)
        rows.append({
            "id": identity, "domain": sequence.domain, "task": sequence.task, "split": sequence.split,
            "source": sequence.source.kind, "source_id": sequence.source.id, "turns": sequence.turns,
            "tokens": sum(len(c.tokens) - c.fork for c in sequence.contexts), "contexts": len(sequence.contexts),
            "success": sequence.outcome.success, "reward": sequence.outcome.reward})
    if as_json:
        print(json.dumps({"sequences": rows, "found": len(ids)}))
        return
    table = Table(box=None, pad_edge=False)
    for name in ("id", "domain", "task", "played by", "turns", "tokens", "ended", "reward"):
        table.add_column(name, justify="right" if name in ("turns", "tokens", "reward") else "left", overflow="fold",
                         no_wrap=name not in ("task", "played by"))
    for row in rows:
        table.add_row(*map(_shown, (row["id"][:12], row["domain"], row["task"], f"{row['source']} {row['source_id']}",
                                  str(row["turns"]), str(row["tokens"]), "solved" if row["success"] else "not solved",
                                  f"{row['reward']:g}")))
    console = _console()
    console.print(table)
    console.print(f"{len(rows)} of {len(ids)} sequences; `mopd store show STORE ID` prints one", style="dim")


def show_info(found: dict[str, Any]) -> None:
    """Print what `PrefixStore.info` found: what the version holds, by domain and by who played, and what else lies there."""
    console = _console()

    def line(text: str, style: str = "") -> None:
        console.print(_shown(text, style), soft_wrap=True)

    line(f"{found['path']}, version {found['version']} ({found['versions']} versions)", "bold")
    if found["message"]:
        line(f"message: {found['message']}")
    line(f"{found['sequences']:,} sequences, {found['decision_points']:,} decision points, {found['tokens']:,} tokens; "
         f"{found['segments']:,} store segments of {found['bytes'] / 1e6:,.1f} MB; layout {found['layout']}")
    if found["domains"]:
        table = Table(box=None, pad_edge=False)
        for name in ("domain", "played by", "sequences", "solved", "decision points"):
            table.add_column(name, justify="left" if name in ("domain", "played by") else "right", overflow="fold")
        for domain, sources in found["domains"].items():
            for source, counts in sources.items():
                numbers = (counts["sequences"], counts["successes"], counts["decision_points"])
                table.add_row(_shown(domain), _shown(source), *(f"{number:,}" for number in numbers))
        console.print(table)
    for fingerprint in found["fingerprints"]:
        known = (f"{what.replace('_', ' ')} {value[:16]}" for what, value in fingerprint.items() if value)
        line(f"written with {', '.join(known)}")
    for name, why in found["damaged"].items():
        line(f"damaged: {name}: {why}", "red")
    for segment in found["quarantined"]:
        lost = len(segment["lost"]) + segment["unknown"]
        line(f"in quarantine: segment {segment['name']} ({segment['reason']}); {lost} sequences were lost with it", "yellow")
    for what, names in (("writers at work", found["writers"]),
                        ("left by writers that were killed (harmless)", found["leftovers"]),
                        ("store segments that no version names (harmless; `mopd store gc`)", found["unreferenced"])):
        if names:
            line(f"{what}: {len(names)}: {', '.join(names[:5])}{', …' if len(names) > 5 else ''}")


def describe(sequence: Sequence, identity: str, text: Callable[[np.ndarray], str]) -> dict[str, Any]:
    """The sequence as JSON values: who played what and how it ended, and per context its segments with their text.
    An action has the `decision_point` before it ([context, turn]) and the sum of its log-probabilities (None where no
    model wrote it); what a child context shares with its parent is left out."""
    outcome = sequence.outcome
    return {
        "id": identity, "domain": sequence.domain, "task": sequence.task, "seed": sequence.seed, "split": sequence.split,
        "environment": sequence.environment, "environment_version": sequence.environment_version,
        "source": vars(sequence.source), "fingerprint": vars(sequence.fingerprint), "turns": sequence.turns,
        "outcome": {"reward": outcome.reward, "success": outcome.success, "error_category": outcome.error_category,
                    "is_infra": outcome.is_infra},
        "metadata": sequence.metadata,
        "contexts": [{"parent": c.parent, "fork": c.fork, "tokens": len(c.tokens), "extras": _extras(c),
                      "segments": _segments(c, number, text)} for number, c in enumerate(sequence.contexts)]}


def _segments(context: Context, number: int, text: Callable[[np.ndarray], str]) -> list[dict[str, Any]]:
    found = []
    for segment in context.segments:
        start = max(segment.start, context.fork)
        if start >= segment.end:
            continue
        part = {"kind": segment.kind, "turn": segment.turn, "start": start, "end": segment.end,
                "text": text(context.tokens[start:segment.end])}
        if segment.kind == "action":
            logprob = context.behaviour_logprob[start:segment.end]
            part["decision_point"] = [number, segment.turn]
            part["writer"] = segment.writer
            part["logprob"] = None if np.isnan(logprob).any() else float(logprob.sum())
        found.append(part)
    return found


def _extras(context: Context) -> dict[str, str]:
    """Name → type and number of values of each extra of a context."""
    return {name: f"{len(extra.values)} × {extra.values.dtype.name}"
                  + (f"{list(extra.values.shape[1:])}" if extra.values.ndim > 1 else "")
            for name, extra in sorted(context.extras.items())}


def _decoder(store: PrefixStore, model: Path | None) -> Callable[[np.ndarray], str]:
    if model is None:
        return lambda tokens: " ".join(map(str, tokens.tolist()))
    from mopd.importing import open_renderer
    from prefix_store.store import check_fingerprint

    renderer = open_renderer(model)
    check_fingerprint(store, renderer.fingerprint(), chat_template=False)
    return lambda tokens: renderer.tokenizer.decode(tokens.tolist())


def _print(record: dict[str, Any], console: Console) -> None:
    source, outcome = record["source"], record["outcome"]
    ended = "solved" if outcome["success"] else outcome["error_category"] or "not solved"
    task = f"{record['task'] or '(task without a name)'} {record['split']} {record['seed']}"
    where = f"in {record['environment']} ({record['environment_version']})" if record["environment"] else "in no environment"
    console.print(_shown(f"{record['id']}\n{record['domain']}: {task} {where}"), soft_wrap=True)
    console.print(_shown(f"played by {source['kind']} {source['id']} {source['revision'][:12]}; {record['turns']} turns, "
                         f"{ended}, reward {outcome['reward']:g}"), soft_wrap=True)
    for number, context in enumerate(record["contexts"]):
        shared = "" if context["parent"] is None else f", the first {context['fork']} shared with context {context['parent']}"
        console.print(f"\ncontext {number}: {context['tokens']} tokens{shared}", style="dim", markup=False)
        for name, what in context["extras"].items():
            console.print(f"extra {name}: {what}", style="dim", markup=False)
        for segment in context["segments"]:
            line = Text()
            if segment["kind"] == "action":
                said = "" if segment["logprob"] is None else f", log µ {segment['logprob']:.2f}"
                line.append(f"▶ decision point {segment['decision_point'][1]} (after {segment['start']} tokens{said})  ",
                            style="yellow")
            else:
                line.append(f"{segment['kind']}  ", style="dim")
            line.append(_shown(segment["text"], STYLES[segment["kind"]]))
            console.print(line, soft_wrap=True)
