"""Messages to token ids through any Hugging Face chat template, once per token.

A growing conversation is *appended to*: only the text behind the last action is tokenised, and what a model sampled
stays as sampled. Where the template rewrites what came before (drops earlier thinking, for instance) a fork is
returned instead. Text from outside can never become a control token. Knows nothing about environments or engines.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.sampling.stop_strings import StopStrings
from prefix_store.importers.base import RowRefused
from prefix_store.trajectory import Fingerprint

Message = Mapping[str, Any]


def load_tokenizer(folder: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """The tokenizer of a Hugging Face folder or id. No code from the folder is run unless `trust_remote_code` is set."""
    from transformers import AutoTokenizer

    require_tokenizer_files(folder)
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its parser raises, without its name
        if isinstance(error, OSError):
            raise
        raise ValueError(f"the tokenizer of {folder} cannot be read: {error}") from error


def require_tokenizer_files(folder: str | os.PathLike[str]) -> None:
    """Raise FileNotFoundError where a model's folder holds no tokenizer: Transformers would invent one from its config."""
    path = Path(folder)
    if path.is_dir() and not any(any(path.glob(name)) for name in TOKENIZER_FILES):
        raise FileNotFoundError(f"{folder} has no tokenizer (tokenizer.json, tokenizer_config.json, vocab.json, *.model); "
                                "save the model's own tokenizer into this folder")


def first_message(instruction: str, observation: str) -> str:
    """The first user message of every episode: the task in words, a line break, the first view."""
    return f"{instruction}\n{observation}" if instruction else observation


def transcript_messages(transcript: Mapping[str, Any], words: Callable[[str], str] = str) -> list[dict[str, str]]:
    """Messages of a played transcript (a dictionary with system, instruction and turns of observation and action), just
    as the agent loop would have sent them. The view after the last action is no message: nobody acted on it. `words` is how
    an action is said (Harness.words)."""
    messages = [{"role": "system", "content": transcript["system"]}] if transcript.get("system") else []
    for number, turn in enumerate(transcript["turns"]):
        view = turn["observation"] if number else first_message(transcript.get("instruction", ""), turn["observation"])
        messages.append({"role": "user", "content": view})
        messages.append({"role": "assistant", "content": words(turn["action"])})
    return messages

TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_PROBE = "MOPD probe text"
_PROBE_NAME = "mopd_probe_name"
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class RenderingError(ValueError):
    """A chat template or tokenizer that cannot be used; the message names what is missing and the remedy."""


@dataclasses.dataclass(frozen=True)
class Extension:
    """How a conversation goes on.

    kind    "append": `tokens` uint32 follow the context's own; "fork": `tokens` are the whole new context
    fork    number of leading tokens that a fork shares with the context before it; 0 for an append
    """

    kind: str
    tokens: np.ndarray
    fork: int = 0


@dataclasses.dataclass(frozen=True)
class RenderedTurn:
    """One turn of a finished transcript.

    prompt   uint32 [T]  all tokens before the action, as the model would have seen them
    action   uint32 [n]  the action's text and the token that ends it
    fork     None where `prompt` continues the turn before; else the number of leading tokens that it shares with it
    text     the action's text without the token that ended it
    """

    prompt: np.ndarray
    action: np.ndarray
    fork: int | None = None
    text: str = ""


class ChatRenderer:
    """Renders messages with a tokenizer's chat template.

    tokenizer          a Hugging Face tokenizer with a chat template
    system_role        False: the template has no system role, so the system prompt goes before the first user message
    stop_ids           ids that end an action; by default the token that closes a message, and the tokenizer's end token
    stop_strings       texts that end one too; they stay part of it
    template_options   further values that the template reads (`enable_thinking`, a date)

    `escaped` counts, by role, the control tokens found in outside text and made harmless (a space after their first
    character); `left_out` counts conversations by what the template has no place for.
    Raises RenderingError where there is no template, or no token ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_role: bool = True,
        stop_ids: Iterable[int] | None = None,
        stop_strings: Iterable[str] = (),
        template_options: Mapping[str, Any] | None = None,
    ):
        if not getattr(tokenizer, "chat_template", None):
            name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
            raise RenderingError(
                f"tokenizer {name!r} has no chat template; set tokenizer.chat_template before saving it"
            )
        self.tokenizer = tokenizer
        self.system_role = system_role
        self.template_options = dict(template_options or {})
        self._told = self.template_options
        self.escaped: collections.Counter[str] = collections.Counter()
        self.left_out: collections.Counter[str] = collections.Counter()
        self._abilities: dict[str, bool] = {}
        self._unescaped: re.Pattern[str] | None = None
        control = {str(t): i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
        control |= dict(zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True))
        self._control_ids = frozenset(control.values())
        names = sorted(control, key=lambda name: (-len(name), name))
        self._control = re.compile("|".join(re.escape(name) for name in names)) if names else None
        self._end_id = self._turn_end()
        if stop_ids is None:
            stop_ids = [i for i in (self._end_id, tokenizer.eos_token_id) if i is not None]
        self.stop_ids: tuple[int, ...] = tuple(sorted({int(i) for i in stop_ids}))
        if not self.stop_ids:
            raise RenderingError("no token ends a turn: the tokenizer has no eos token; set one, or pass stop_ids")
        strings = tuple(stop_strings)
        self.stop_strings = StopStrings(strings, tokenizer) if strings else None
        self.end_id: int = self._end_id if self._end_id in self.stop_ids else self.stop_ids[0]

    # Text

    def _turn_end(self) -> int | None:
        """The control token that the template writes directly after an assistant's words, if it writes one."""
        text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}], False)
        rest = text.rpartition(_PROBE)[2]
        match = self._control.match(rest) if self._control else None
        return None if match is None else int(self.tokenizer.convert_tokens_to_ids(match.group()))

    def _render(self, messages: list[Message], generate: bool, tools: Any = None) -> str:
        return self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], tools=tools, tokenize=False, add_generation_prompt=generate,
            **self.template_options,
        )

    def _encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def variant(self, template_options: Mapping[str, Any], *, unescaped: Iterable[str] = ()) -> ChatRenderer:
        """The same renderer with further values for the template. `unescaped` control tokens stay what they are in what the
        model itself said, where the history is rendered anew (those that frame its thinking)."""
        other = copy.copy(self)
        other.template_options, other._abilities = {**self.template_options, **template_options}, {}
        marks = [re.escape(mark) for mark in unescaped if self._control is not None and self._control.fullmatch(mark)]
        other._unescaped = re.compile("|".join(marks)) if marks else None
        return other

    def reads_option(self, name: str) -> bool:
        """Whether what a model is shown depends on the template option `name` (true or false)."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
        shown = {self.variant({name: value})._render(talk, True) for value in (True, False)}
        return len(shown) > 1

    def sanitise(self, text: str, *, own: bool = False) -> str:
        """`text` with every control token made harmless; with `own`, the model's words, but for those of a `variant` that
        are to stay."""
        if own and self._unescaped is not None:
            parts = self._unescaped.split(text)
            marks = self._unescaped.findall(text)
            return "".join(self.sanitise(part) + mark for part, mark in zip(parts, [*marks, ""], strict=True))
        while self._control is not None and self._control.search(text):
            text = self._control.sub(lambda m: m.group()[0] + " " + m.group()[1:] if len(m.group()) > 1 else " ", text)
        return text

    def _count(self, message: Message) -> None:
        found = len(self._control.findall(message["content"])) if self._control else 0
        if found:
            self.escaped[message["role"]] += found

    def _clean(self, messages: list[Message], actions: bool) -> list[Message]:
        """Messages with outside text made harmless (assistants' words only if `actions`), system prompt in place."""
        cleaned = [
            m if m["role"] == "assistant" and not actions else
            {**m, "content": self.sanitise(m["content"], own=m["role"] == "assistant")}
            for m in messages
        ]
        if self.system_role or cleaned[0]["role"] != "system":
            return cleaned
        if len(cleaned) < 2 or cleaned[1]["role"] != "user":
            raise RenderingError("without a system role, the system prompt must stand before a first user message")
        first = {**cleaned[1], "content": cleaned[0]["content"] + "\n\n" + cleaned[1]["content"]}
        return [first, *cleaned[2:]]

    # Tokens

    def start(self, messages: list[Message]) -> np.ndarray:
        """uint32 ids of a conversation that ends with a user message, up to where the model writes."""
        for message in messages:
            self._count(message)
        return self._encode(self._render(self._clean(messages, actions=True), True))

    def extend(self, messages: list[Message], context_tokens: np.ndarray) -> Extension:
        """Go on after an action.

        messages         the whole conversation: …, the assistant's message as `action_text` gave it, the new user
                         message
        context_tokens   uint32 ids up to and including the action as it was sampled
        Nothing in `context_tokens` is tokenised again for an append. An action that was cut by its length limit gets
        the template's closing words in the appended tokens.
        """
        if len(messages) < 3 or messages[-2]["role"] != "assistant" or messages[-1]["role"] != "user":
            raise RenderingError("extend needs messages that end with an assistant's and a user's")
        self._count(messages[-1])
        cleaned = self._clean(messages, actions=False)
        before = self._render(cleaned[:-2], True) + cleaned[-2]["content"]
        after = self._render(cleaned, True)
        if not after.startswith(before):
            return self._fork(messages, context_tokens)  # what is new has been counted
        suffix, last = after[len(before) :], int(context_tokens[-1])
        if last in self.stop_ids:
            end = self.tokenizer.convert_ids_to_tokens(last)
            if suffix.startswith(end):
                # Tokenised with the end token in front, as in one piece, and then without it.
                return Extension("append", self._encode(suffix)[1:])
        return Extension("append", self._encode(suffix))

    def fork(self, messages: list[Message], context_tokens: np.ndarray) -> Extension:
        """Go on with a conversation whose history is shown in another way than in `context_tokens` uint32: all of `messages`,
        which end with a new user message, rendered anew. The model's own words become tokens by way of their text."""
        self._count(messages[-1])
        return self._fork(messages, context_tokens)

    def _fork(self, messages: list[Message], context_tokens: np.ndarray) -> Extension:
        tokens = self._encode(self._render(self._clean(messages, actions=True), True))
        return Extension("fork", tokens, _common(tokens, context_tokens))

    def action_text(self, ids: np.ndarray) -> str:
        """The text of a sampled action, without the token that ended it."""
        ids = [int(i) for i in ids]
        if ids and ids[-1] in self.stop_ids:
            ids.pop()
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def action_tokens(self, text: str) -> np.ndarray:
        """uint32 ids of an action that was written elsewhere: its text and the token that ends a turn."""
        self._count({"role": "assistant", "content": text})
        return np.append(self._encode(self.sanitise(text)), np.uint32(self.end_id))

    def assistant_turns(self, messages: list[Message]) -> list[RenderedTurn]:
        """The turns of a finished transcript as an agent would have played them: what it saw, and what it wrote.

        messages   an optional system message, then user and assistant messages in turn; what follows the last
                   assistant's message is not rendered
        """
        body = messages[1:] if messages and messages[0]["role"] == "system" else messages
        if [m["role"] for m in body] != [("user", "assistant")[i % 2] for i in range(len(body))]:
            raise RenderingError(f"a transcript's messages go user, assistant, …, not {[m['role'] for m in body]}")
        offset = len(messages) - len(body)
        turns: list[RenderedTurn] = []
        seen: list[Message] = list(messages[:offset])
        for number in range(0, len(body) - 1, 2):
            user, assistant = body[number], body[number + 1]
            seen.append(user)
            if not turns:
                prompt, fork = self.start(seen), None
            else:
                context = np.concatenate([turns[-1].prompt, turns[-1].action])
                step = self.extend(seen, context)
                whole = step.kind == "fork"
                prompt = step.tokens if whole else np.concatenate([context, step.tokens])
                fork = step.fork if whole else None
            action = self.action_tokens(assistant["content"])
            text = self.action_text(action)
            turns.append(RenderedTurn(prompt, action, fork, text))
            seen.append({**assistant, "content": text})
        return turns

    # Conversations that somebody else had

    def turns(self, messages: Sequence[Message], wanted: Sequence[int], tools: Sequence[Any] | None = None
              ) -> Iterator[RenderedTurn]:
        """The turns of a finished conversation whose texts were written elsewhere, one for each of the messages `wanted`.

        The prompt of a turn is what the template gives a model that is about to write it (all messages before, the tool
        list and the generation prompt); its action is what the template renders after that once the message is there, up
        to the token that ends the turn: tool calls and thinking in the template's own writing. Only what is new behind
        the last action is tokenised; where the template rewrites what came before, the turn forks.

        Raises prefix_store's RowRefused with the reason: the template refuses the messages, cannot show tool calls or
        tool results, does not begin the message as its generation prompt does, or the tokenizer does not give an action's
        text back (a control token inside it among that).
        """
        shown, offset = self._outside(messages, set(wanted), tools)
        tools = None if tools is None else self._harmless(list(tools))
        context = np.zeros(0, np.uint32)
        text: str | None = ""  # of the context; None where the template does not show how the last action ended
        for number in wanted:
            place = number - offset
            before = self._try_render(shown[:place], True, tools)
            said, end = self._said(shown[: place + 1], before, tools, number)
            if text is not None and before.startswith(text):
                prompt, fork = np.concatenate([context, self._after(context, before[len(text) :])]), None
            else:
                prompt = self._encode(before)
                fork = _common(prompt, context)
            action = self._encode(said + end) if end else np.append(self._encode(said), np.uint32(self.end_id))
            if self.action_text(action) != said:
                raise RowRefused("action does not survive the tokenizer", f"message {number}: {said[:200]!r}")
            context = np.concatenate([prompt, action])
            # A template that writes no end token does not show the one that ended the action: the next turn forks.
            text = before + said + end if end else None
            yield RenderedTurn(prompt, action, fork, said)

    def _outside(self, messages: Sequence[Message], wanted: set[int], tools: Sequence[Any] | None
                 ) -> tuple[list[Message], int]:
        """Messages with every control token in them made harmless, and by how many places they moved (a system prompt
        that went into the first message). Raises RowRefused where the template cannot show what they hold."""
        shown = []
        for number, message in enumerate(messages):
            harmless = self._harmless(dict(message), count=message["role"])
            if number in wanted and harmless != message:
                raise RowRefused("action does not survive the tokenizer", f"message {number} holds a control token")
            if message.get("tool_calls") and not self._can("tool_calls"):
                raise RowRefused("the template has no tool calls", f"message {number}; they can be imported as text "
                                                                   "(option tools_as_text)")
            if message["role"] == "tool" and not self._can("tool"):
                raise RowRefused("the template has no tool results", f"message {number}; they can be imported as text "
                                                                     "(option tools_as_text)")
            shown.append(harmless)
        if tools and not self._can("tools"):
            self.left_out["a tool list that the template does not show"] += 1
        if any(m.get("reasoning_content") for m in shown) and not self._can("reasoning_content"):
            self.left_out["reasoning that the template does not show"] += 1
        if self.system_role or not shown or shown[0]["role"] != "system":
            return shown, 0
        if len(shown) < 2 or shown[1]["role"] != "user":
            raise RowRefused("the template has no system prompt", "and no user's message comes first to take it")
        return [{**shown[1], "content": shown[0]["content"] + "\n\n" + shown[1]["content"]}, *shown[2:]], 1

    def _harmless(self, value: Any, count: str = "") -> Any:
        """A JSON value with every control token in its texts made harmless; counted under `count` if given."""
        if isinstance(value, str):
            if count and self._control is not None:
                found = len(self._control.findall(value))
                if found:
                    self.escaped[count] += found
            return self.sanitise(value)
        if isinstance(value, Mapping):
            return {self._harmless(key, count): self._harmless(item, count) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._harmless(item, count) for item in value]
        return value

    def _said(self, messages: list[Message], before: str, tools: Any, number: int) -> tuple[str, str]:
        """What the template renders for the last message, an assistant's, after `before`: its text, and the token that
        ends the turn ("" where the template writes none). From the template's generation marks where it has some, else
        from rendering with and without the message."""
        marks: list[tuple[int, int]] = []
        if self._marked(tools):
            whole, marks = self._try_marks(messages, tools)
            common = len(os.path.commonprefix([whole, before]))
            marks = [mark for mark in marks if mark[1] > common]
        else:
            whole = self._try_render(messages, False, tools)
        stop = marks[-1][1] if marks else len(whole)
        if whole.startswith(before):
            start = len(before)
        elif marks:
            start = marks[0][0]
        elif (start := self._after_prompt(whole, messages, before, tools)) < 0:
            raise RowRefused("the template does not begin the message as its generation prompt does",
                             f"message {number}: after {before[-40:]!r} it renders {whole[-80:]!r}")
        # Content holds no control token by now, so any that ends a turn is the template's. What closes a message comes
        # before what closes a conversation.
        ends = [(int(self.tokenizer.convert_tokens_to_ids(m.group())), m)
                for m in (self._control.finditer(whole, start) if self._control else ()) if m.start() <= stop]
        for wanted in ({self.end_id}, set(self.stop_ids)):
            found = [m for token, m in ends if token in wanted]
            if found:
                return whole[start : found[-1].start()], found[-1].group()
        return whole[start:stop], ""

    def _after_prompt(self, whole: str, messages: list[Message], before: str, tools: Any) -> int:
        """Where the last message begins in a rendering whose history is not that of `before` (a template that shows the
        last message of all in another way): behind the last generation prompt, which has a control token in it and so
        is the template's own. -1 where the template has no such prompt."""
        history = self._try_render(messages[:-1], False, tools)
        prompt = before[len(history) :] if before.startswith(history) else ""
        if self._control is None or not self._control.search(prompt):
            return -1
        at = whole.rfind(prompt)
        return -1 if at < 0 else at + len(prompt)

    def _after(self, context: np.ndarray, text: str) -> np.ndarray:
        """uint32 ids of what follows a context that ends with an action."""
        if not text:
            return np.zeros(0, np.uint32)
        if len(context) and int(context[-1]) in self.stop_ids:
            # Tokenised with the end token in front, as in one piece, and then without it.
            ids = self._encode(self.tokenizer.convert_ids_to_tokens(int(context[-1])) + text)
            if len(ids) and ids[0] == context[-1]:
                return ids[1:]
        return self._encode(text)

    def _try_render(self, messages: list[Message], generate: bool, tools: Any) -> str:
        with _refusing():
            return self._render(messages, generate, tools)

    def _try_marks(self, messages: list[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """The rendering and the [start, end) of what its generation marks enclose, in characters."""
        from transformers.utils.chat_template_utils import render_jinja_template

        with _refusing():
            rendered, marks = render_jinja_template(
                conversations=[[dict(m) for m in messages]], tools=tools, return_assistant_tokens_mask=True,
                chat_template=self.tokenizer.get_chat_template(None, tools),
                **{**self.tokenizer.special_tokens_map, **self.template_options})
        return rendered[0], [(int(a), int(b)) for a, b in marks[0]]

    def _marked(self, tools: Any) -> bool:
        return _GENERATION.search(self.tokenizer.get_chat_template(None, tools)) is not None

    def _can(self, what: str) -> bool:
        """Whether the template shows "tool_calls", a "tool" message, a list of "tools" or "reasoning_content"."""
        if what not in self._abilities:
            user = {"role": "user", "content": "a"}
            call = {"id": "a1b2c3d4e", "type": "function", "function": {"name": _PROBE_NAME, "arguments": {}}}
            calling = {"role": "assistant", "content": "", "tool_calls": [call]}
            tools = None
            if what == "tool_calls":
                messages = [user, calling]
            elif what == "tool":
                first = calling if self._can("tool_calls") else {"role": "assistant", "content": "b"}
                messages = [user, first, {"role": "tool", "content": _PROBE_NAME, "name": "b", "tool_call_id": "a1b2c3d4e"}]
            elif what == "tools":
                messages = [user]
                tools = [{"type": "function", "function": {
                    "name": _PROBE_NAME, "description": "", "parameters": {"type": "object", "properties": {}}}}]
            else:
                messages = [user, {"role": "assistant", "content": "b", what: _PROBE_NAME}]
            try:
                self._abilities[what] = _PROBE_NAME in self._try_render(messages, False, tools)
            except RowRefused:
                self._abilities[what] = False
        return self._abilities[what]

    def transcript(self, transcript: Mapping[str, Any]) -> np.ndarray:
        """uint32 ids of a whole transcript, up to the token that ends its last action. Where the template rewrites
        history this is the context of the last turn. Raises RenderingError for a transcript without turns."""
        turns = self.assistant_turns(transcript_messages(transcript))
        if not turns:
            raise RenderingError("a transcript without turns has nothing to render")
        return np.concatenate([turns[-1].prompt, turns[-1].action])

    # Identity

    def fingerprint(self, model_config: Any = None) -> Fingerprint:
        """Hashes of the id → token map with special ids, of the template with its options, and of a model config. A variant
        has that of the renderer that it was made from: one store takes what a domain's several harnesses wrote."""
        return Fingerprint(
            tokenizer_hash(self.tokenizer),
            _hash([self.tokenizer.chat_template, self._told, self.system_role]),
            "" if model_config is None else config_hash(model_config),
        )


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """Turn whatever a chat template raises (its own `raise_exception`, a missing value, a wrong type) into a refusal."""
    import jinja2

    try:
        yield
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
        raise RowRefused("the template refuses the conversation", str(error)[:200] or type(error).__name__) from None


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that two contexts share."""
    count = min(len(a), len(b))
    differs = np.nonzero(a[:count] != b[:count])[0]
    return int(differs[0]) if len(differs) else count


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:32]


def tokenizer_hash(tokenizer: Any) -> str:
    """Hash of everything that gives an id its meaning: the sorted id → token map and which ids are special."""
    vocabulary = sorted((int(i), token) for token, i in tokenizer.get_vocab().items())
    special = sorted(int(i) for i in tokenizer.all_special_ids)
    return _hash([vocabulary, special])


def config_hash(model_config: Any) -> str:
    """Hash of a model's configuration (an object with `to_dict`, or a mapping), without paths and versions."""
    values = model_config.to_dict() if hasattr(model_config, "to_dict") else dict(model_config)
    return _hash({k: v for k, v in values.items() if k not in _VOLATILE_CONFIG and not k.startswith("_attn")})
