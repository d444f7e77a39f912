"""A renderer without a tokenizer, for the importers' tests: one token per character, per role and per end of a message."""

import json

import numpy as np

from prefix_store.importers import RowRefused
from prefix_store.trajectory import Fingerprint

ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}
END, TOOLS = 5, 6
OFFSET = 10


class Turn:
    def __init__(self, prompt, action, fork, text):
        self.prompt, self.action, self.fork, self.text = prompt, action, fork, text


class CharacterRenderer:
    """Characters up to code point 255 are tokens; the others it cannot write.

    Where `forgets` is set, its template drops `<…>` thoughts from all assistant messages but the newest, as templates
    of reasoning models do.
    """

    def __init__(self, forgets: bool = False):
        self.forgets = forgets

    def _text(self, text: str) -> list[int]:
        return [OFFSET + ord(c) for c in text if ord(c) < 256]

    def _body(self, message, newest: bool) -> str:
        text = message["content"]
        if message.get("reasoning_content"):
            text = f"<{message['reasoning_content']}>{text}"
        if self.forgets and message["role"] == "assistant" and not newest:
            text = text.rpartition(">")[2]
        return text + "".join(f"[{json.dumps(call['function'])}]" for call in message.get("tool_calls", ()))

    def whole(self, messages, tools=None) -> np.ndarray:
        """What a model sees that is about to answer `messages`."""
        ids = [TOOLS, *self._text(json.dumps(tools))] if tools else []
        for message in messages:
            ids += [ROLES[message["role"]], *self._text(self._body(message, False)), END]
        return np.array([*ids, ROLES["assistant"]], dtype=np.uint32)

    def turns(self, messages, wanted, tools=None):
        context = None
        for number in wanted:
            prompt, fork = self.whole(messages[:number], tools), None
            if context is not None and not np.array_equal(prompt[: len(context)], context):
                count = min(len(prompt), len(context))
                same = prompt[:count] == context[:count]
                fork = int(np.argmin(same)) if not same.all() else count
            text = self._body(messages[number], True)
            action = np.array([*self._text(text), END], dtype=np.uint32)
            if self.read(action) != text:
                raise RowRefused("action does not survive the tokenizer", f"message {number}: {text!r}")
            yield Turn(prompt, action, fork, text)
            context = np.concatenate([prompt, action])

    def read(self, ids) -> str:
        return "".join(chr(int(i) - OFFSET) for i in ids if i >= OFFSET)

    def fingerprint(self) -> Fingerprint:
        return Fingerprint("characters", "forgets" if self.forgets else "remembers")
