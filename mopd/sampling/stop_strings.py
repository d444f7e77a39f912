"""Texts that end a turn, beside the ids that do: found in the text of a turn's tokens, the same way in every engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

# Tokens of a turn that are read again besides one for each byte of the longest text: such as have no text of their own.
SLACK = 16


class StopStrings:
    """A turn ends with the first token after which its text holds one of `strings`. That token stays, with whatever it brings
    behind the text: ids are what a student wrote, and nothing of them is cut in two.

    strings    non-empty texts
    tokenizer  the student's; its text of the tokens counts, control tokens as they are spelled
    """

    def __init__(self, strings: Iterable[str], tokenizer: Any):
        self.strings = tuple(dict.fromkeys(strings))
        if not self.strings or not all(isinstance(text, str) and text for text in self.strings):
            raise ValueError(f"stop strings must be texts that are not empty, got {list(self.strings)!r}")
        self.tokenizer = tokenizer
        self._window = max(len(text.encode()) for text in self.strings) + SLACK

    def __repr__(self) -> str:
        return f"StopStrings({list(self.strings)!r})"

    def ended(self, tokens: np.ndarray) -> bool:
        """Whether the text of a turn's tokens [n], of which all but the last did not end it, holds one of the strings."""
        text = self.tokenizer.decode([int(token) for token in tokens[-self._window:]], skip_special_tokens=False,
                                     clean_up_tokenization_spaces=False)
        return any(string in text for string in self.strings)

    def end_of(self, tokens: np.ndarray, known: int = 0) -> int | None:
        """How many of the tokens [n] make the turn, where a string ended it; None where none did. The first `known` of them
        are known not to have."""
        return next((count for count in range(known + 1, len(tokens) + 1) if self.ended(tokens[:count])), None)
