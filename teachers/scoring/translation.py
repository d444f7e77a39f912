"""A student's context in a teacher's tokens: text stays text, control tokens become those of the same role.

    student's ids ─▶ bytes and control tokens ─▶ the chat template's phrases ─▶ the teacher's phrases ─▶ teacher's ids

What is approximated: the teacher reads a *rendering* of the conversation, tokenised anew as a whole, with its own template
(its own default system prompt among that). Bytes that are no characters become U+FFFD there, control tokens of the teacher
that stand in outside text are made harmless, and a conversation that the student's template writes in more than one way
comes back in the teacher's one. The action is never rendered: its text goes over byte by byte.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mopd.sampling.rendering import ChatRenderer, RenderingError
from teachers.scoring.alignment import (
    BROKEN,
    NO_COUNTERPART,
    NO_PREFIX,
    NO_TEXT,
    REWRITTEN,
    common_spans,
    token_bytes,
    whole_characters,
)
from teachers.scoring.requests import ScoreRequest, TeacherError

CONTROL = 0x10000  # where control ids begin in a stream: below are bytes, one character each
ROLES = ("eos", "bos")
# A text that no conversation holds, to find where a template puts what it is given.
MARK = "\x02{}\x03"


@dataclasses.dataclass(frozen=True)
class Phrases:
    """What a chat template writes around the texts of a conversation, each as a string with control tokens spelled out.

    system, system_user   before the system prompt, and between it and the first user's text; None where there is no such role
    first                 before the first user's text when there is no system prompt
    user_assistant        between a user's and an assistant's text that is already there
    user_generate         between a user's text and what is about to be written
    assistant_user        between an assistant's text and the next user's
    end                   what follows the last assistant's text, up to the control token that ends it; "" where none does
    """

    system: str | None
    system_user: str | None
    first: str
    user_assistant: str
    user_generate: str
    assistant_user: str
    end: str

    @classmethod
    def of(cls, renderer: ChatRenderer) -> Phrases:
        """Raises TeacherError for a template that does not write texts as they are and in order."""
        marks = [MARK.format(i) for i in range(5)]
        turns = [{"role": ("user", "assistant")[i % 2], "content": marks[i]} for i in range(4)]

        def between(messages: list[dict[str, str]], generate: bool = False) -> list[str]:
            text = renderer.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=generate,
                                                          **renderer.template_options)
            parts = []
            for message in messages:
                before, found, text = text.partition(message["content"])
                if not found:
                    raise TeacherError(f"the chat template of {_name(renderer.tokenizer)} does not write the text of every "
                                       "message as it is; scores across tokenizers need one that does")
                parts.append(before)
            return [*parts, text]

        first, user_assistant, assistant_user, _, tail = between(turns)
        generate = between(turns[:3], generate=True)[-1]
        system = system_user = None
        try:
            found = between([{"role": "system", "content": marks[4]}, *turns])
            if found[1] and found[2:] == [user_assistant, assistant_user, user_assistant, tail]:
                system, system_user = found[:2]
        except Exception:  # noqa: BLE001 - templates without a system role raise what they like
            pass
        control = _control(renderer.tokenizer)
        match = control.search(tail) if control else None
        return cls(system, system_user, first, user_assistant, generate, assistant_user, tail[:match.end()] if match else "")


def _name(tokenizer: Any) -> str:
    return repr(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _control(tokenizer: Any) -> re.Pattern[str] | None:
    names = sorted(_control_ids(tokenizer), key=lambda name: (-len(name), name))
    return re.compile("|".join(map(re.escape, names))) if names else None


def _control_ids(tokenizer: Any) -> dict[str, int]:
    found = {str(token): int(i) for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return found | dict(zip(tokenizer.all_special_tokens, map(int, tokenizer.all_special_ids), strict=True))


@dataclasses.dataclass(frozen=True, eq=False)
class Translation:
    """A request in the teacher's tokens.

    request   what the teacher is asked, or None where nothing of it can be
    spans     int32 [n], per token of the student's action the number of its span, in order; -1 where it has none
    theirs    per span the [c, d) of the teacher's scored tokens
    missing   reason -> tokens of the student without a span
    """

    request: ScoreRequest | None
    spans: np.ndarray
    theirs: tuple[tuple[int, int], ...]
    missing: dict[str, int]


class Translator:
    """From one tokenizer and chat template to another. Thread-safe.

    student, teacher   Hugging Face tokenizers with chat templates
    Raises TeacherError naming what stands in the way: no chat template, tokens whose bytes are not known.
    """

    def __init__(self, student: Any, teacher: Any, *, teacher_id: str):
        try:
            ours, self.renderer = ChatRenderer(student), ChatRenderer(teacher)
        except RenderingError as error:
            raise TeacherError(f"teacher {teacher_id!r} has another tokenizer than the student, and scores across tokenizers "
                               f"need a chat template on both sides: {error}") from None
        self.teacher = teacher_id
        self._ours, self._theirs = token_bytes(student), token_bytes(teacher)
        self._control, self._their_control = _control_ids(student), _control_ids(teacher)
        self._stream = ["" if b is None else b.decode("latin-1") for b in self._ours]
        for number in self._control.values():
            self._stream[number] = chr(CONTROL + number)
        mine, self._phrases = Phrases.of(ours), Phrases.of(self.renderer)
        self._names = {number: name for name, number in self._control.items()}
        self._table = self._roles(student, teacher, mine, ours)
        core = teacher.backend_tokenizer.to_str()
        self._rendered, self._plain = Tokenizer.from_str(core), Tokenizer.from_str(core)  # several threads may ask these
        self._plain.encode_special_tokens = True  # a control token's name in an action is text
        for one in (self._rendered, self._plain):
            one.no_truncation()
            one.no_padding()
        self._bare = not mine.first
        self._patterns = self._compile(mine)

    def _roles(self, student: Any, teacher: Any, mine: Phrases, ours: ChatRenderer) -> dict[int, str]:
        """Our control id -> what the teacher has in its place: of the same role, else of the same name."""
        found: dict[int, str] = {number: name for name, number in self._control.items() if name in self._their_control}
        for role in reversed(ROLES):
            number, other = getattr(student, f"{role}_token_id", None), getattr(teacher, f"{role}_token", None)
            if number is not None and other is not None:
                found[int(number)] = str(other)
        if mine.end and self._phrases.end:  # last: the end of a turn wins over every other role of its token
            found[int(ours.end_id)] = self._phrases.end
        return found

    def _compile(self, mine: Phrases) -> tuple[re.Pattern[str], re.Pattern[str], dict[str, str]]:
        """Patterns over streams (at the beginning, and further on) and phrase -> name; longest first."""
        head = {self._spelled(text): name for name, text in (("system", mine.system), ("first", mine.first)) if text}
        body: dict[str, str] = {}
        for name in ("system_user", "assistant_user", "user_assistant", "user_generate"):
            if text := getattr(mine, name):
                body.setdefault(self._spelled(text), name)

        def longest(texts: dict[str, str]) -> list[str]:
            return [re.escape(text) for text in sorted(texts, key=lambda text: (-len(text), text))]

        control = f"[{chr(CONTROL)}-{chr(0x10FFFF)}]"
        return re.compile("|".join(longest(head)) or "(?!)"), re.compile("|".join([*longest(body), control])), head | body

    def _spelled(self, text: str) -> str:
        """A template's text as a stream: a character per byte, one per control token."""
        names = sorted(self._control, key=lambda name: (-len(name), name))
        parts = re.split("(" + "|".join(map(re.escape, names)) + ")", text) if names else [text]
        return "".join(chr(CONTROL + self._control[part]) if part in self._control else part.encode().decode("latin-1")
                       for part in parts)

    # Prefixes

    def prefix(self, ids: np.ndarray) -> np.ndarray | None:
        """uint32 ids of the teacher for a context of the student; None where a special token in it has no counterpart."""
        if any(int(i) >= len(self._stream) for i in ids):
            return None
        stream = "".join(self._stream[int(i)] for i in ids)
        head, body, names = self._patterns
        found: list[str] = []
        at = 0
        match = head.match(stream)
        if match is None:
            found += [self._phrases.first] if self._bare else []
            match = body.search(stream)
        while match is not None:
            found.append(self._text(stream[at:match.start()]))
            name = names.get(match.group())
            text = self._table.get(ord(match.group()) - CONTROL) if name is None else self._phrase(
                name, last=match.end() == len(stream))
            if text is None:
                return None
            found.append(text)
            at = match.end()
            match = body.search(stream, at)
        found.append(self._text(stream[at:]))
        return np.asarray(self._rendered.encode("".join(found), add_special_tokens=False).ids, np.uint32)

    def _phrase(self, name: str, last: bool) -> str:
        """The teacher's phrase for ours of this name; `last`: the context ends with it, so the model is about to write."""
        if self._phrases.system is None and name.startswith("system"):  # no such role: before the first user's text
            return self._phrases.first if name == "system" else "\n\n"
        if name in ("user_assistant", "user_generate"):
            name = "user_generate" if last else "user_assistant"
        return getattr(self._phrases, name)

    def _text(self, stream: str) -> str:
        return self.renderer.sanitise(stream.encode("latin-1").decode(errors="replace"))

    # Actions

    def translate(self, request: ScoreRequest) -> Translation:
        """A request for sampled tokens in the teacher's tokens. Its action begins where the teacher's does: no token of the
        teacher reaches over that place."""
        size = len(request)
        spans, missing = np.full(size, -1, np.int32), collections.Counter()
        before = self.prefix(request.tokens[:request.start])
        if before is None or not len(before):
            return Translation(None, spans, (), {NO_COUNTERPART if before is None else NO_PREFIX: size})
        ids: list[int] = []
        theirs: list[tuple[int, int]] = []
        labels = [int(i) for i in request.labels]
        at = 0
        while at < size:
            stop = at
            while stop < size and self._bytes(labels[stop]) is not None:
                stop += 1
            if stop > at:
                self._run([self._ours[i] for i in labels[at:stop]], at, ids, spans, theirs, missing)
                at = stop
                continue
            text = self._table.get(labels[at])
            control = self._rendered.encode(text, add_special_tokens=False).ids if text else []
            if not control:  # what follows would be read after something that the teacher cannot be shown
                missing[NO_COUNTERPART] += size - at
                break
            spans[at] = len(theirs)
            theirs.append((len(ids), len(ids) + len(control)))
            ids += control
            at += 1
        if not ids:
            return Translation(None, spans, (), dict(missing))
        whole = np.concatenate([before, np.asarray(ids, np.uint32)])
        asked = ScoreRequest(whole, len(before), len(whole), temperature=request.temperature)
        return Translation(asked, spans, tuple(theirs), dict(missing))

    def _bytes(self, number: int) -> bytes | None:
        return self._ours[number] if number < len(self._ours) else None

    def _run(self, pieces: list[bytes], at: int, ids: list[int], spans: np.ndarray, theirs: list[tuple[int, int]],
             missing: collections.Counter[str]) -> None:
        """Align a run of text tokens that begins at token `at` of the action; everything is added to the last four."""
        data = b"".join(pieces)
        units: list[tuple[int, int, str]] = []  # of the teacher: bytes, tokens, why it is of no use
        for start, stop, whole in whole_characters(data):
            text = data[start:stop].decode(errors="replace")
            for part, lengths in self._parts(text) if whole else [(text, None)]:
                found = self._plain.encode(part, add_special_tokens=False).ids
                ids += found
                if lengths is None:
                    size = len(part.encode()) if whole else stop - start
                    units.append((size, len(found), REWRITTEN if whole else BROKEN))
                else:
                    units += [(length, 1, "") for length in lengths]
        edges = np.cumsum([len(ids) - sum(tokens for _, tokens, _ in units), *(tokens for _, tokens, _ in units)])
        for a, b, c, d in common_spans([len(piece) for piece in pieces], [length for length, _, _ in units]):
            reasons = sorted({why for _, _, why in units[c:d]} - {""}) or ([NO_TEXT] if edges[c] == edges[d] else [])
            if reasons:
                missing[reasons[0]] += b - a
                continue
            spans[at + a:at + b] = len(theirs)
            theirs.append((int(edges[c]), int(edges[d])))

    def _parts(self, text: str) -> list[tuple[str, list[int] | None]]:
        """A text in pieces with the bytes of the teacher's tokens of each; None for those that it cannot write as they are
        (bytes that its vocabulary lacks, characters that it normalises). One piece where it can write all."""
        def lengths(part: str) -> list[int] | None:
            return self._lengths(self._plain.encode(part, add_special_tokens=False).ids, part.encode())

        whole = lengths(text)
        if whole is not None:
            return [(text, whole)]
        good = {char: lengths(char) is not None for char in set(text)}
        pieces = ["".join(run) for _, run in itertools.groupby(text, good.__getitem__)]
        return [(piece, lengths(piece) if good[piece[0]] else None) for piece in pieces]

    def _lengths(self, ids: list[int], data: bytes) -> list[int] | None:
        """Bytes of each of the teacher's tokens of `data`; None where they are not exactly these bytes. A space that its
        tokenizer puts before every text counts for nothing."""
        pieces = [self._theirs[i] if i < len(self._theirs) else None for i in ids]
        if not pieces or any(piece is None for piece in pieces):
            return None
        whole = b"".join(pieces)
        lengths = [len(piece) for piece in pieces]
        if whole == b" " + data:
            lengths[0] -= 1
            return lengths
        return lengths if whole == data else None
