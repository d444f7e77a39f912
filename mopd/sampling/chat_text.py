"""Tokens back to messages: what a chat template wrote is taken apart again, by how it frames each role.

The frames are learnt from the template itself (what it writes before and after a probe text in each role). A text that
they do not explain whole is not guessed at.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from mopd.sampling.rendering import ChatRenderer
from prefix_store.importers.base import RowRefused
from prefix_store.trajectory import Sequence

_PROBE = "MOPD probe text"
_OTHER = "MOPD other text"


@dataclasses.dataclass(frozen=True)
class Frame:
    """What a template writes before and after the text of a role's message."""

    role: str
    before: str
    after: str


class ChatReader:
    """Reads messages out of tokens that `renderer`'s tokenizer and template made."""

    def __init__(self, renderer: ChatRenderer):
        self.renderer = renderer
        user, said = {"role": "user", "content": _OTHER}, {"role": "assistant", "content": _OTHER}
        self.prompt = self._render([user], True)[len(self._render([user], False)) :]
        self.first: list[Frame] = []
        self.later: list[Frame] = []
        for role in ("system", "user"):
            probe = {"role": role, "content": _PROBE}
            before, _, after = self._render([probe, user] if role == "system" else [probe], False).partition(_PROBE)
            self.first.append(Frame(role, before, self._until_user(after) if role == "system" else after))
        # Templates may show the last message of all in another way than those before it, or refuse an order of roles.
        cases = [(role, history, []) for role in ("system", "user", "tool") for history in ([user, said], [user])]
        for role, history, following in [*cases, ("assistant", [user], []), ("assistant", [user], [user])]:
            base = self._render(history, False)
            whole = self._render([*history, {"role": role, "content": _PROBE}, *following], False)
            if base and whole.startswith(base) and _PROBE in whole:
                before, _, after = whole[len(base) :].partition(_PROBE)
                self.later.append(Frame(role, before, self._until_user(after) if following else after))
        self.first = self._sorted(self.first)
        self.later = self._sorted(self.later)

    def _sorted(self, frames: list[Frame]) -> list[Frame]:
        """Frames that tell where a message begins and ends, those that say most first."""
        control = self.renderer._control
        sure = {f for f in frames if f.before and control is not None and control.search(f.after)}
        return sorted(sure, key=lambda f: (-len(f.before), f.before, f.role))

    def _render(self, messages: list[dict[str, str]], generate: bool) -> str:
        try:
            return self.renderer._try_render(messages, generate, None)
        except RowRefused:
            return ""

    def _until_user(self, after: str) -> str:
        """What follows a probe text, without the header of the user's message behind it."""
        whole = self._render([{"role": "user", "content": _PROBE}], False)
        header = whole.partition(_PROBE)[0]
        text = after.partition(_OTHER)[0]
        for size in range(min(len(header), len(text)), 0, -1):
            if text.endswith(header[-size:]):
                return text[: len(text) - size]
        return text

    def messages(self, text: str) -> list[dict[str, str]] | None:
        """The messages of a prompt's text, up to the generation prompt at its end; None where the frames do not explain
        it from beginning to end."""
        found: list[dict[str, str]] = []
        at, frames = 0, self.first
        while not (found and text[at:] == self.prompt):
            frame = next((f for f in frames if text.startswith(f.before, at)), None)
            if frame is None:
                return None
            end = text.find(frame.after, at + len(frame.before))
            if end < 0:
                return None
            found.append({"role": frame.role, "content": text[at + len(frame.before) : end]})
            at, frames = end + len(frame.after), self.later
        return found

    def conversation(self, sequence: Sequence) -> list[dict[str, Any]] | None:
        """A sequence's messages, each action as it was written; an assistant's message that nobody played carries
        "loss": False. None where some prompt is not explained, or its history is shorter than what was played."""
        found: list[dict[str, Any]] = []
        for context in sequence.contexts:
            for segment in context.actions():
                if segment.end <= context.fork:
                    continue
                seen = self.messages(self._text(context.tokens[: segment.start]))
                if seen is None or len(seen) < len(found):
                    return None
                found += [m | ({"loss": False} if m["role"] == "assistant" else {}) for m in seen[len(found) :]]
                action = self.renderer.action_text(context.tokens[segment.start : segment.end])
                found.append({"role": "assistant", "content": action})
        return found

    def _text(self, tokens: np.ndarray) -> str:
        return self.renderer.tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def plain(self, sequence: Sequence) -> list[dict[str, Any]]:
        """Messages by segment where the template cannot be taken apart: what was seen is the user's, control tokens left
        out."""
        found: list[dict[str, Any]] = []
        for context in sequence.contexts:
            for s in context.segments:
                if s.end <= context.fork:
                    continue
                tokens = context.tokens[max(s.start, context.fork) : s.end]
                text = self.renderer.tokenizer.decode(tokens.tolist(), skip_special_tokens=True)
                if s.kind == "action":
                    found.append({"role": "assistant", "content": text})
                    continue
                if found and found[-1]["role"] == "user":
                    text = found.pop()["content"] + text
                found.append({"role": "user", "content": text})
        return found


def to_chat(sequence: Sequence, identity: str, reader: ChatReader) -> tuple[dict[str, Any], bool]:
    """A sequence as an OpenAI-style chat that `mopd import` reads again, and whether its messages are exactly those that
    the template was given (else they are by segment, and "messages_are" says "segments")."""
    messages = reader.conversation(sequence)
    outcome = sequence.outcome
    row: dict[str, Any] = {
        "id": identity, "messages": messages if messages is not None else reader.plain(sequence),
        "domain": sequence.domain, "task": sequence.task, "environment": sequence.environment,
        "environment_version": sequence.environment_version, "seed": int(sequence.seed), "split": sequence.split,
        "score": float(outcome.reward), "success": bool(outcome.success), "source": vars(sequence.source),
        "metadata": sequence.metadata}
    if messages is None:
        row["messages_are"] = "segments"
    return row, messages is not None
