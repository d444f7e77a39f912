"""Messages to token ids through any Hugging Face chat template, once per token.

A growing conversation is *appended to*: only the text behind the last action is tokenised, and what a model sampled
stays as sampled. Where the template rewrites what came before (drops earlier thinking, for instance) a fork is
returned instead. Text from outside can never become a control token. Knows nothing about environments or engines.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from prefix_store.trajectory import Fingerprint

Message = Mapping[str, str]


def load_tokenizer(folder: str | os.PathLike[str]) -> Any:
    """The tokenizer of a Hugging Face folder or id. No code from the folder is run."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def first_message(instruction: str, observation: str) -> str:
    """The first user message of every episode: the task in words, a line break, the first view."""
    return f"{instruction}\n{observation}" if instruction else observation


def transcript_messages(transcript: Mapping[str, Any]) -> list[dict[str, str]]:
    """Messages of a played transcript (a dictionary with system, instruction and turns of observation and action), just
    as the agent loop would have sent them. The view after the last action is no message: nobody acted on it."""
    messages = [{"role": "system", "content": transcript["system"]}] if transcript.get("system") else []
    for number, turn in enumerate(transcript["turns"]):
        view = turn["observation"] if number else first_message(transcript.get("instruction", ""), turn["observation"])
        messages.append({"role": "user", "content": view})
        messages.append({"role": "assistant", "content": turn["action"]})
    return messages

_VOLATILE_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")
_PROBE = "MOPD probe text"


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
    """

    prompt: np.ndarray
    action: np.ndarray
    fork: int | None = None


class ChatRenderer:
    """Renders messages with a tokenizer's chat template.

    tokenizer          a Hugging Face tokenizer with a chat template
    system_role        False: the template has no system role, so the system prompt goes before the first user message
    stop_ids           ids that end an action; by default the token that closes a message, and the tokenizer's end token
    template_options   further values that the template reads (`enable_thinking`, a date)

    `escaped` counts, by role, the control tokens found in outside text and made harmless (a space after their first
    character). Raises RenderingError where there is no template, or no token ends a turn.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        system_role: bool = True,
        stop_ids: Iterable[int] | None = None,
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
        self.escaped: collections.Counter[str] = collections.Counter()
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
        self.end_id: int = self._end_id if self._end_id in self.stop_ids else self.stop_ids[0]

    # Text

    def _turn_end(self) -> int | None:
        """The control token that the template writes directly after an assistant's words, if it writes one."""
        text = self._render([{"role": "user", "content": "a"}, {"role": "assistant", "content": _PROBE}], False)
        rest = text.rpartition(_PROBE)[2]
        match = self._control.match(rest) if self._control else None
        return None if match is None else int(self.tokenizer.convert_tokens_to_ids(match.group()))

    def _render(self, messages: list[Message], generate: bool) -> str:
        return self.tokenizer.apply_chat_template(
            [dict(m) for m in messages], tokenize=False, add_generation_prompt=generate, **self.template_options
        )

    def _encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return np.asarray(ids, dtype=np.uint32)

    def sanitise(self, text: str) -> str:
        """`text` with every control token made harmless."""
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
            m if m["role"] == "assistant" and not actions else {**m, "content": self.sanitise(m["content"])}
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
            return self._fork(messages, context_tokens)
        suffix, last = after[len(before) :], int(context_tokens[-1])
        if last in self.stop_ids:
            end = self.tokenizer.convert_ids_to_tokens(last)
            if suffix.startswith(end):
                # Tokenised with the end token in front, as in one piece, and then without it.
                return Extension("append", self._encode(suffix)[1:])
        return Extension("append", self._encode(suffix))

    def _fork(self, messages: list[Message], context_tokens: np.ndarray) -> Extension:
        tokens = self._encode(self._render(self._clean(messages, actions=True), True))
        count = min(len(tokens), len(context_tokens))
        differs = np.nonzero(tokens[:count] != context_tokens[:count])[0]
        return Extension("fork", tokens, int(differs[0]) if len(differs) else count)

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
            turns.append(RenderedTurn(prompt, action, fork))
            seen.append({**assistant, "content": self.action_text(action)})
        return turns

    def transcript(self, transcript: Mapping[str, Any]) -> np.ndarray:
        """uint32 ids of a whole transcript, up to the token that ends its last action. Where the template rewrites
        history this is the context of the last turn. Raises RenderingError for a transcript without turns."""
        turns = self.assistant_turns(transcript_messages(transcript))
        if not turns:
            raise RenderingError("a transcript without turns has nothing to render")
        return np.concatenate([turns[-1].prompt, turns[-1].action])

    # Identity

    def fingerprint(self, model_config: Any = None) -> Fingerprint:
        """Hashes of the id → token map with special ids, of the template with its options, and of a model config."""
        return Fingerprint(
            tokenizer_hash(self.tokenizer),
            _hash([self.tokenizer.chat_template, self.template_options, self.system_role]),
            "" if model_config is None else config_hash(model_config),
        )


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
