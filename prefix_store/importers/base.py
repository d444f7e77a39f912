"""What importers share: the conversation that a row becomes, how rows are refused, and the count of what became of them.

Rendering comes in as a small protocol; no tokenizer, template or model is known here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from prefix_store.trajectory import Fingerprint, Source

Message = Mapping[str, Any]
Where = int | str
"""Where a row stands: its line (1 is the first) or number, in a folder "file:line"."""


class RowRefused(ValueError):
    """A row that is not taken. `reason` is one of a few fixed strings and is counted; the message is the detail."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(detail or reason)
        self.reason = reason


class UnknownFormat(ValueError):
    """A file in no format that is known, or in more than one; the message lists the formats and what was seen."""


class ImportFailed(ValueError):
    """A file that cannot be read at all (damaged, compressed in a way that needs a missing package)."""


class Turn(Protocol):
    """One assistant message as tokens.

    prompt  uint32 [T]  all tokens before the action, as the template gives them to a model about to write it
    action  uint32 [n]  what the template renders for the message after that, with the token that ends the turn
    fork    None where `prompt` continues the turn before; else the number of leading tokens that it shares with it
    text    the action's text without the token that ended it
    """

    prompt: np.ndarray
    action: np.ndarray
    fork: int | None
    text: str


class Renderer(Protocol):
    """Messages to tokens through the student's chat template; each token is made once."""

    def turns(self, messages: Sequence[Message], wanted: Sequence[int], tools: Sequence[Any] | None = None) -> Iterable[Turn]:
        """The turns of a finished conversation, in order; one for each message number in `wanted` (an assistant's).

        messages are {"role": system|user|assistant|tool, "content": str, …} with `tool_calls` (OpenAI's form, arguments
        as objects), `reasoning_content`, `tool_call_id` and `name` where there are any; tools is OpenAI's list. Raises
        RowRefused where the template cannot render them or the tokenizer does not give an action's text back.
        """

    def fingerprint(self) -> Fingerprint: ...


@dataclasses.dataclass
class Conversation:
    """A row in the common form, before it is rendered.

    messages  normalised messages (see `messages.py`); those of the assistant carry "loss": False where nobody is to
              learn from them: they are context and no decision points
    actions   texts for replay, one per turn; None takes the rendered text of each turn
    writers   who wrote each turn; "demonstration" if None
    source    None makes it a demonstration, named by file and hash of the row
    """

    messages: list[dict[str, Any]]
    domain: str | None = None
    tools: list[Any] | None = None
    task: str = ""
    environment: str = ""
    environment_version: str = ""
    seed: int = 0
    split: str = "train"
    reward: float = 1.0
    success: bool = True
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    outcome_metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    actions: list[str] | None = None
    writers: list[str] | None = None
    source: Source | None = None


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """How rows become sequences; each format uses what applies to it.

    domain              that of rows which name none; of transcripts and exports, only rows of this domain are taken
    max_context_tokens  a row whose context grows beyond is refused; a mapping gives it by domain
    expert_only         refuse transcripts in which someone else than the expert wrote a turn
    success_only        refuse rows that failed
    success_reward      a row with a reward and no word on success succeeded if its reward is at least this
    system              system prompt of rows that have none
    tools_as_text       write tool lists, calls and results as Hermes' text (<tool_call>…), for templates without tools
    messages_of         transcript → messages, just as the agent loop sends them
    tokenizer           hash of the tokenizer that an export's sequences must have, where no renderer says it
    """

    domain: str | None = None
    max_context_tokens: int | Mapping[str, int] | None = None
    expert_only: bool = False
    success_only: bool = False
    success_reward: float = 1.0
    system: str | None = None
    tools_as_text: bool = False
    messages_of: Any = None
    tokenizer: str | None = None

    def limit(self, domain: str) -> int | None:
        """The token limit of a domain's contexts; a domain that the mapping does not name has the largest of it."""
        limit = self.max_context_tokens
        if isinstance(limit, Mapping):
            return limit.get(domain, max(limit.values(), default=None))
        return limit


@dataclasses.dataclass
class ImportResult:
    """What became of a file's rows.

    format      the format it was read as (of a folder: all of them, in order)
    taken       sequences handed to the sink, `duplicates` of which were there already; turns and tokens count what they
                hold
    refused     reason → where the rows stand that were not taken
    examples    reason → what was wrong with the first such row
    skipped     files of a folder that are no trajectories → why
    unlisted    domains for which the limits by domain have none → the limit that their rows were held to (the largest)
    """

    path: str
    format: str
    rows: int = 0
    taken: int = 0
    duplicates: int = 0
    turns: int = 0
    tokens: int = 0
    refused: dict[str, list[Where]] = dataclasses.field(default_factory=dict)
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    unlisted: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """"taken" and every reason with its number of rows."""
        return {"taken": self.taken} | {reason: len(rows) for reason, rows in self.refused.items()}

    def refuse(self, reason: str, where: Where, detail: str) -> None:
        self.refused.setdefault(reason, []).append(where)
        self.examples.setdefault(reason, f"{_place(where)}: {detail}"[:300])

    def as_json(self) -> dict[str, Any]:
        """Everything as plain JSON data, every refused row with its place."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        again = f", {self.duplicates} of them there already" if self.duplicates else ""
        parts = [f"{self.path} ({self.format}): {self.taken} of {self.rows} rows taken{again}"]
        for reason, rows in self.refused.items():
            shown = ", ".join(map(str, rows[:10])) + (", …" if len(rows) > 10 else "")
            parts.append(f"  {len(rows)} {reason} (lines {shown}; {self.examples[reason]})")
        parts += [f"  skipped {name}: {why}" for name, why in list(self.skipped.items())[:5]]
        if len(self.skipped) > 5:
            parts.append(f"  and {len(self.skipped) - 5} more files skipped")
        for domain, limit in self.unlisted.items():
            parts.append(f"  warning: no token limit is known for the domain {domain!r}; its rows were held to {limit} "
                         "tokens, the largest limit of the others")
        return "\n".join(parts)


def _place(where: Where) -> str:
    return f"line {where}" if isinstance(where, int) else where


def field(row: Mapping[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """row[name], which must be of `kind` and, where it is text, Unicode; `default` where it is missing. Raises RowRefused
    naming the field."""
    if name not in row or row[name] is None:
        if default is ...:
            raise RowRefused("missing field", f"field {name!r} is missing")
        return default
    value = row[name]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise RowRefused("wrong field", f"field {name!r} is a {type(value).__name__}")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise RowRefused("text is not Unicode", f"field {name!r} holds half a surrogate pair") from None
    return value


def number(row: Mapping[str, Any], name: str, default: Any = ...) -> float:
    """row[name] as a float; `default` where it is missing. Raises RowRefused for anything but a number that fits one."""
    value = field(row, name, (int, float), default)
    try:
        return value if value is default else float(value)
    except OverflowError:
        raise RowRefused("wrong field", f"field {name!r} is too large for a number") from None


def text_id(row: Mapping[str, Any], *names: str) -> str:
    """The first of the named fields that is there, as text; "" if none. Raises RowRefused for a list or an object."""
    for name in names:
        value = row.get(name)
        if value is not None and value != "":
            return str(field(row, name, (str, int, float)))
    return ""
