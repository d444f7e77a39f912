"""What importers share: rows of a JSON lines file, conversations to contexts, and a count of every row not taken.

Rendering comes in as a small protocol; no tokenizer, template or model is known here.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from prefix_store.trajectory import (
    Context,
    Fingerprint,
    InvalidSequence,
    Segment,
    check_sequence,
    shared_segments,
)
from prefix_store.trajectory import Sequence as Trajectory

Message = Mapping[str, str]


class Extension(Protocol):
    """How a conversation goes on: kind "append" (`tokens` follow the context's own) or "fork" (`tokens` are a whole new
    context that shares its first `fork` tokens with the one before)."""

    kind: str
    tokens: np.ndarray
    fork: int


class Renderer(Protocol):
    """Messages ({"role", "content"}) to uint32 token ids through the student's chat template, once per token."""

    def start(self, messages: list[Message]) -> np.ndarray:
        """The ids of a conversation that ends with a user message, up to where the model writes."""

    def extend(self, messages: list[Message], context_tokens: np.ndarray) -> Extension:
        """Go on after an action: messages end with the assistant's message and the next user's; context_tokens end with
        the action."""

    def action_tokens(self, text: str) -> np.ndarray:
        """The ids of an action written elsewhere, with the token that ends a turn."""

    def action_text(self, ids: np.ndarray) -> str:
        """The text of an action, without the token that ended it."""

    def fingerprint(self) -> Fingerprint: ...


class RowRefused(ValueError):
    """A row that is not taken. `reason` is one of a few fixed strings and is counted; the message is the detail."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(detail or reason)
        self.reason = reason


@dataclasses.dataclass
class ImportResult:
    """What became of a file's rows.

    taken     sequences handed to the sink; turns and tokens count what they hold
    refused   reason → line numbers of the rows that were not taken (1 is the first line)
    examples  reason → what was wrong with the first such row
    """

    path: str
    format: str
    rows: int = 0
    taken: int = 0
    turns: int = 0
    tokens: int = 0
    refused: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """"taken" and every reason with its number of rows."""
        return {"taken": self.taken} | {reason: len(lines) for reason, lines in self.refused.items()}

    def refuse(self, reason: str, line: int, detail: str) -> None:
        self.refused.setdefault(reason, []).append(line)
        self.examples.setdefault(reason, f"line {line}: {detail}")

    def __str__(self) -> str:
        parts = [f"{self.path} ({self.format}): {self.taken} of {self.rows} rows taken"]
        for reason, lines in self.refused.items():
            shown = ", ".join(map(str, lines[:10])) + (", …" if len(lines) > 10 else "")
            parts.append(f"  {len(lines)} {reason} (lines {shown}; {self.examples[reason]})")
        return "\n".join(parts)


def import_rows(
    path: str | os.PathLike,
    form: str,
    convert: Callable[[dict[str, Any], int], Trajectory],
    sink: Callable[[Trajectory], Any],
) -> ImportResult:
    """Convert each row of a JSON lines file and hand it to `sink` (for instance `store.append`).

    convert(row, line) raises RowRefused for a row it does not take. A row that makes an invalid sequence is refused
    too. Blank lines are no rows. Raises FileNotFoundError; errors of the sink pass through.
    """
    path = pathlib.Path(path)
    result = ImportResult(path.name, form)
    with open(path, "rb") as file:
        for line, data in enumerate(file, 1):
            if not data.strip():
                continue
            result.rows += 1
            try:
                sequence = convert(_parse(data), line)
                check_sequence(sequence)
            except RowRefused as refusal:
                result.refuse(refusal.reason, line, str(refusal))
                continue
            except InvalidSequence as error:
                result.refuse("invalid sequence", line, str(error))
                continue
            sink(sequence)
            result.taken += 1
            result.turns += sequence.turns
            result.tokens += sum(len(c.tokens) - c.fork for c in sequence.contexts)
    return result


def _parse(data: bytes) -> dict[str, Any]:
    try:
        row = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RowRefused("not JSON", str(error)) from None
    if not isinstance(row, dict):
        raise RowRefused("not a JSON object", f"found {type(row).__name__}")
    return row


def field(row: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """row[name], which must be of `kind`; `default` where it is missing. Raises RowRefused naming the field."""
    if name not in row or row[name] is None:
        if default is ...:
            raise RowRefused("missing field", f"field {name!r} is missing")
        return default
    value = row[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RowRefused("wrong field", f"field {name!r} is a {type(value).__name__}")
    return value


def conversation_contexts(
    messages: Sequence[Message],
    renderer: Renderer,
    *,
    writers: Sequence[str],
    max_context_tokens: int | None = None,
) -> tuple[Context, ...]:
    """The contexts of a finished conversation as an agent would have had them turn by turn.

    messages is an optional system message, then user and assistant messages in turn, with at least one of the
    assistant's; what follows the last one is not rendered. writers names who wrote each assistant message. The prefix
    of each turn is exactly what the renderer gives a model that is about to write it; where that rewrites what came
    before, a child context starts. Behaviour log-probabilities are NaN: no model is known to have sampled these tokens.

    Raises RowRefused: no assistant turn, roles out of order, longer than `max_context_tokens`, or an action whose text
    the tokenizer does not give back.
    """
    head = 1 if messages and messages[0]["role"] == "system" else 0
    body = list(messages[head:])
    for number, message in enumerate(body):
        if message["role"] != ("user", "assistant")[number % 2]:
            raise RowRefused("roles out of order", f"message {head + number} is the {message['role']}'s")
    turns = len(body) // 2
    if turns == 0:
        raise RowRefused("no assistant turn")
    if len(writers) != turns:
        raise ValueError(f"{len(writers)} writers for {turns} turns")

    contexts: list[Context] = []
    parent, fork = None, 0
    tokens = np.zeros(0, dtype=np.uint32)
    segments: list[Segment] = []
    for turn in range(turns):
        seen = [*messages[:head], *body[: 2 * turn + 1]]
        if turn == 0:
            tokens = np.asarray(renderer.start(seen), dtype=np.uint32)
            segments = [Segment("prompt", 0, len(tokens), -1)]
        else:
            step = renderer.extend(seen, tokens)
            added = np.asarray(step.tokens, dtype=np.uint32)
            if step.kind == "fork":
                contexts.append(_context(tokens, segments, parent, fork))
                parent, fork = len(contexts) - 1, min(step.fork, len(added) - 1)
                tokens, segments = added, shared_segments(contexts[parent], fork)
                at = fork
            else:
                at = len(tokens)
                tokens = np.concatenate([tokens, added])
            if len(tokens) > at:
                _extend(segments, Segment("observation", at, len(tokens), turn - 1))
        text = body[2 * turn + 1]["content"]
        action = np.asarray(renderer.action_tokens(text), dtype=np.uint32)
        if renderer.action_text(action) != text:
            raise RowRefused("action does not survive the tokenizer", f"turn {turn}: {text!r}")
        segments.append(Segment("action", len(tokens), len(tokens) + len(action), turn, writers[turn]))
        tokens = np.concatenate([tokens, action])
        if max_context_tokens is not None and len(tokens) > max_context_tokens:
            detail = f"{len(tokens)} tokens after turn {turn}, the limit is {max_context_tokens}"
            raise RowRefused("longer than the limit", detail)
    contexts.append(_context(tokens, segments, parent, fork))
    return tuple(contexts)


def _extend(segments: list[Segment], new: Segment) -> None:
    """Append a segment, or lengthen the last one where it is of the same origin."""
    if segments and (segments[-1].kind, segments[-1].turn, segments[-1].writer) == (new.kind, new.turn, new.writer):
        new = dataclasses.replace(new, start=segments.pop().start)
    segments.append(new)


def _context(tokens: np.ndarray, segments: list[Segment], parent: int | None, fork: int) -> Context:
    logprob = np.full(len(tokens), np.nan, dtype=np.float32)
    return Context(tokens, logprob, np.full(len(tokens), -1, dtype=np.int32), tuple(segments), parent, fork)


def rows_of(path: str | os.PathLike) -> Iterator[dict[str, Any]]:
    """The rows of a file that are JSON objects."""
    with open(path, "rb") as file:
        for data in file:
            if data.strip():
                try:
                    yield _parse(data)
                except RowRefused:
                    continue


def detect_format(path: str | os.PathLike) -> str:
    """"transcripts" or "chat", by the first row that is a JSON object. Raises ValueError where it is neither."""
    for row in rows_of(path):
        if isinstance(row.get("turns"), list):
            return "transcripts"
        if isinstance(row.get("messages"), list):
            return "chat"
        raise ValueError(
            f"{os.fspath(path)}: the first row has neither `turns` (a transcript) nor `messages` (a chat); "
            f"it has {', '.join(map(repr, list(row)[:8])) or 'no field'}"
        )
    raise ValueError(f"{os.fspath(path)} holds no JSON object; expected one per line")


def import_file(
    path: str | os.PathLike,
    renderer: Renderer,
    sink: Callable[[Trajectory], Any],
    *,
    form: str = "auto",
    domain: str | None = None,
    max_context_tokens: int | None = None,
    expert_only: bool = False,
    success_only: bool = False,
    messages_of: Callable[[Mapping[str, Any]], list[Message]] | None = None,
) -> ImportResult:
    """Import a JSON lines file of transcripts or chats; `form` is "transcripts", "chat", or "auto" to recognise it.

    The options are those of `import_transcripts` and `import_chat`, each used where it applies.
    """
    from prefix_store.importers.chat import import_chat
    from prefix_store.importers.transcripts import import_transcripts

    form = detect_format(path) if form == "auto" else form
    if form == "transcripts":
        options = {"messages_of": messages_of} if messages_of else {}
        options |= {"expert_only": expert_only, "success_only": success_only}
        return import_transcripts(
            path, renderer, sink, domain=domain, max_context_tokens=max_context_tokens, **options
        )
    if form == "chat":
        return import_chat(path, renderer, sink, domain=domain, max_context_tokens=max_context_tokens)
    raise ValueError(f"format {form!r} is none of auto, transcripts, chat")
