"""How a domain's tasks are played: what the model is shown, how its action is cut out of its words, and when play ends.

A `Talk` keeps one sequence's conversation and turns it into tokens: suffixes inside a context, and a new context where the
harness or the chat template shows history in another way than before. Knows no engines and no environments.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike

import numpy as np

from mopd.sampling.rendering import ChatRenderer, Extension, Message, first_message
from mopd.seeds import stable_seed

TEXT, LAST_LINE, TAG, REGEX = "text", "last_line", "tag", "regex"
_TAG_NAME = re.compile(r"[A-Za-z_][\w.-]*$")


@dataclasses.dataclass(frozen=True)
class Harness:
    """How a domain's tasks are played.

    system_prompt        told once, before the instruction; empty for none
    max_turns            actions per episode
    max_turn_tokens      tokens per action, the end token among them
    max_context_tokens   tokens of a context; an episode that would need more ends
    max_malformed        end an episode after so many actions that the environment did not understand; 0: never
    action_format        where the action stands in a turn's text: `text` (all of it), `last_line` (the last line that is not
                         empty), `tag:NAME` (inside the last <NAME>…</NAME>), `regex:PATTERN` (the last match's first group,
                         or all of it without groups; `.` matches line breaks too)
    history_window       how many of the last turns the model still sees, with the instruction in front; 0: all
    thinking             what the chat template is told as `enable_thinking`; None: nothing. With True the words up to the
                         last `thinking_end` are no part of the action, and without one there is no action
    thinking_end         what closes thinking
    """

    system_prompt: str = ""
    max_turns: int = 32
    max_turn_tokens: int = 32
    max_context_tokens: int = 1024
    max_malformed: int = 0
    action_format: str = TEXT
    history_window: int = 0
    thinking: bool | None = None
    thinking_end: str = "</think>"

    def errors(self) -> list[str]:
        """What is wrong with these values, each beginning with its name."""
        found = [f"{key}: {getattr(self, key)} must be at least {least}" for key, least in (
            ("max_turns", 1), ("max_turn_tokens", 1), ("max_context_tokens", 1), ("max_malformed", 0), ("history_window", 0))
            if getattr(self, key) < least]
        if not self.thinking_end:
            found.append("thinking_end: it is empty; name what closes thinking, such as </think>")
        kind, _, rest = self.action_format.partition(":")
        if kind == TAG and not _TAG_NAME.match(rest):
            found.append(f"action_format: {self.action_format!r} names no tag; write tag:action for <action>…</action>")
        elif kind == REGEX:
            try:
                if re.compile(rest).groups > 1:
                    found.append(f"action_format: {rest!r} has several groups; the action is the first, so make the others "
                                 "(?:…)")
            except re.error as error:
                found.append(f"action_format: {rest!r} is no regular expression: {error}")
            if not rest:
                found.append("action_format: regex: needs a pattern, such as regex:Action: (.*)")
        elif kind not in (TEXT, LAST_LINE, TAG) or (rest and kind != TAG):
            found.append(f"action_format: {self.action_format!r} is not one of text, last_line, tag:NAME, regex:PATTERN")
        return found

    def action(self, text: str) -> str | None:
        """The action in a turn's text, without blanks around it; None where there is none, which is the model's failure."""
        if self.thinking:
            _, end, text = text.rpartition(self.thinking_end)
            if not end:
                return None
        kind, _, rest = self.action_format.partition(":")
        if kind == TEXT:
            return text.strip()
        if kind == LAST_LINE:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            return lines[-1] if lines else None
        pattern = rf"<{re.escape(rest)}>(.*?)</{re.escape(rest)}>" if kind == TAG else rest
        found = list(re.finditer(pattern, text, re.DOTALL))
        said = found[-1][found[-1].re.groups] if found else None  # group 0 is the whole match
        return None if said is None else said.strip()

    def words(self, action: str) -> str:
        """A turn's text that says just this action, as somebody writes it who plays by this harness. A pattern of one's own
        cannot be turned round: there it is the action alone."""
        kind, _, rest = self.action_format.partition(":")
        return f"<{rest}>{action}</{rest}>" if kind == TAG else action

    def renderer(self, renderer: ChatRenderer) -> ChatRenderer:
        """The renderer as this harness wants it: the same one where it asks for nothing."""
        if self.thinking is None:
            return renderer
        marks = (self.thinking_end, self.thinking_end.replace("/", "", 1))
        return renderer.variant({"enable_thinking": self.thinking}, unescaped=marks)


class Harnesses(Mapping[str, Harness]):
    """The harnesses of one domain by name, with the share of tasks that each gets. A domain that has one has it under ""."""

    def __init__(self, harnesses: Mapping[str, Harness], shares: Mapping[str, float] | None = None):
        """shares: relative to each other; equal where none are given. Raises ValueError for none at all, or shares that are
        not above 0."""
        self._harnesses = dict(harnesses)
        self.shares = {name: float((shares or {}).get(name, 1.0)) for name in self._harnesses}
        if not self._harnesses or not all(0 < share < float("inf") for share in self.shares.values()):
            raise ValueError(f"harnesses need shares above 0: {self.shares or 'none'}")

    def __getitem__(self, name: str) -> Harness:
        return self._harnesses[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._harnesses)

    def __len__(self) -> int:
        return len(self._harnesses)

    @property
    def main(self) -> str:
        """The name of the one with the largest share, the first of several such."""
        return max(self._harnesses, key=lambda name: self.shares[name])

    def pick(self, *seed: int | str) -> str:
        """The name of the harness that a task gets: a function of `seed` alone, in the long run by the shares."""
        if len(self._harnesses) == 1:
            return next(iter(self._harnesses))
        point = stable_seed("harness", *seed) / 2**63 * sum(self.shares.values())
        for name, share in self.shares.items():
            point -= share
            if point < 0:
                return name
        return self.main


def harnesses_of(given: Harness | Harnesses) -> Harnesses:
    """A domain's harnesses, where one alone may be given."""
    return Harnesses({"": given}) if isinstance(given, Harness) else given


class Talk:
    """The conversation of one sequence, and what of it the model sees.

    harness    what is shown (`system_prompt`, `history_window`) and how (`thinking`)
    renderer   of the model that reads it
    `views` are the observations shown so far, `said` the turns' texts as they were written: one each per turn.

    Inside a context only what is new is tokenised. A history window that moves on, or a template that shows earlier turns in
    another way (without their thinking), gives a fork: the whole conversation rendered anew, of which the leading tokens
    that are the same are shared with the context before.
    """

    def __init__(self, harness: Harness, renderer: ChatRenderer):
        self.harness, self.renderer = harness, harness.renderer(renderer)
        self.instruction = ""
        self.views: list[str] = []
        self.said: list[str] = []

    @property
    def begins(self) -> int:
        """The turn whose view is the first that the model sees now."""
        window = self.harness.history_window
        return max(0, len(self.views) - 1 - window) if window else 0

    @property
    def messages(self) -> list[Message]:
        """The conversation as the model sees it now."""
        first, system = self.begins, self.harness.system_prompt
        found: list[Message] = [{"role": "system", "content": system}] if system else []
        found.append({"role": "user", "content": first_message(self.instruction, self.views[first])})
        for turn in range(first, len(self.said)):
            found.append({"role": "assistant", "content": self.said[turn]})
            if turn + 1 < len(self.views):
                found.append({"role": "user", "content": self.views[turn + 1]})
        return found

    def start(self, instruction: str, view: str) -> np.ndarray:
        """uint32 ids of the first prompt: the task in words and the first observation."""
        self.instruction, self.views, self.said = instruction, [view], []
        return self.renderer.start(self.messages)

    def resume(self, instruction: str, views: ListLike[str], said: ListLike[str]) -> None:
        """Go on behind turns that are known: views before turns 0, 1, … and what was said in each but the last."""
        self.instruction, self.views, self.said = instruction, list(views), list(said)

    def say(self, tokens: np.ndarray) -> str:
        """Take a turn as it was written; returns its text, without the token that ended it."""
        self.said.append(self.renderer.action_text(tokens))
        return self.said[-1]

    def hear(self, view: str, context_tokens: np.ndarray) -> Extension:
        """Take the next observation. `context_tokens` uint32: what the model saw and wrote, up to the end of its turn."""
        before = self.begins
        self.views.append(view)
        if self.begins != before:
            return self.renderer.fork(self.messages, context_tokens)
        return self.renderer.extend(self.messages, context_tokens)
