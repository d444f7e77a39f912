"""One stored sequence for human eyes: its segments in colours, its decision points numbered, how it ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from prefix_store import PrefixStore
from prefix_store.trajectory import Context, Sequence

STYLES = {"prompt": "cyan", "observation": "default", "action": "bold green"}


class NoSuchSequence(ValueError):
    """No sequence of the store, or more than one, has an id that begins so."""


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


def show_sequence(path: Path, start: str, model: Path | None = None, as_json: bool = False) -> None:
    """Print the sequence whose id begins with `start`. `model` is a folder with the tokenizer that wrote it; without
    one, token ids stand for text. Raises NoSuchSequence, or ForeignFingerprint for another tokenizer."""
    with PrefixStore.open(path) as store:
        identity = find_sequence(store, start)
        text = _decoder(store, model)
        record = describe(store.sequence(identity), identity, text)
    if as_json:
        print(json.dumps(record))
    else:
        _print(record, Console(highlight=False))


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
        "contexts": [{"parent": c.parent, "fork": c.fork, "tokens": len(c.tokens),
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


def _decoder(store: PrefixStore, model: Path | None) -> Callable[[np.ndarray], str]:
    if model is None:
        return lambda tokens: " ".join(map(str, tokens.tolist()))
    from mopd.learner.model import check_model_source
    from mopd.sampling.rendering import ChatRenderer, load_tokenizer
    from prefix_store.store import check_fingerprint

    check_model_source(model)
    tokenizer = load_tokenizer(model)
    check_fingerprint(store, ChatRenderer(tokenizer).fingerprint(), chat_template=False)
    return lambda tokens: tokenizer.decode(tokens.tolist())


def _print(record: dict[str, Any], console: Console) -> None:
    source, outcome = record["source"], record["outcome"]
    ended = "solved" if outcome["success"] else outcome["error_category"] or "not solved"
    console.print(f"{record['id']}\n{record['domain']}: {record['task']} {record['split']} {record['seed']} in "
                  f"{record['environment']} ({record['environment_version']})", markup=False, soft_wrap=True)
    console.print(f"played by {source['kind']} {source['id']} {source['revision'][:12]}; {record['turns']} turns, {ended}, "
                  f"reward {outcome['reward']:g}", markup=False, soft_wrap=True)
    for number, context in enumerate(record["contexts"]):
        shared = "" if context["parent"] is None else f", the first {context['fork']} shared with context {context['parent']}"
        console.print(f"\ncontext {number}: {context['tokens']} tokens{shared}", style="dim", markup=False)
        for segment in context["segments"]:
            line = Text()
            if segment["kind"] == "action":
                said = "" if segment["logprob"] is None else f", log µ {segment['logprob']:.2f}"
                line.append(f"▶ decision point {segment['decision_point'][1]} (after {segment['start']} tokens{said})  ",
                            style="yellow")
            else:
                line.append(f"{segment['kind']}  ", style="dim")
            line.append(segment["text"], style=STYLES[segment["kind"]])
            console.print(line, soft_wrap=True)
