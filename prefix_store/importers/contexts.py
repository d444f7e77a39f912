"""A conversation becomes a sequence: contexts and segments from the renderer's turns, outcome and source beside them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from prefix_store.importers.base import Conversation, ImportOptions, Renderer, RowRefused, Turn
from prefix_store.importers.messages import as_text
from prefix_store.trajectory import Context, Fingerprint, Outcome, Segment, Sequence, Source, shared_segments

TEMPLATE_KEYS = ("role", "content", "tool_calls", "reasoning_content", "tool_call_id", "name")


def to_sequence(talk: Conversation, renderer: Renderer, fingerprint: Fingerprint, source: Source,
                options: ImportOptions) -> Sequence:
    """Render a conversation turn by turn. What follows the last turn is no context of any; its text becomes
    metadata["final_observation"]. Raises RowRefused: no domain, no assistant turn, not successful, longer than the
    limit, and what the renderer refuses."""
    if not talk.domain:
        raise RowRefused("no domain", "the row names no domain and none was given for the file")
    if options.success_only and not talk.success:
        raise RowRefused("not successful", f"reward {talk.reward:g}")
    messages, tools = talk.messages, talk.tools
    if options.system and messages and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": options.system}, *messages]
    if options.tools_as_text:
        messages, tools = as_text(messages, tools), None
    wanted = [n for n, m in enumerate(messages) if m["role"] == "assistant" and m.get("loss", True)]
    if not wanted:
        raise RowRefused("no assistant turn")
    writers = talk.writers or ["demonstration"] * len(wanted)
    if len(writers) != len(wanted) or (talk.actions is not None and len(talk.actions) != len(wanted)):
        raise ValueError(f"{len(writers)} writers and {len(talk.actions or ())} actions for {len(wanted)} turns")
    shown = [{key: m[key] for key in TEMPLATE_KEYS if key in m} for m in messages]
    texts: list[str] = []
    contexts = turns_to_contexts(_noting(renderer.turns(shown, wanted, tools), texts), writers, options.limit(talk.domain))
    metadata = dict(talk.metadata)
    after = [m["content"] for m in messages[wanted[-1] + 1 :] if m["role"] != "assistant"]
    if any(after) and "final_observation" not in metadata:
        metadata["final_observation"] = "\n".join(after)
    if talk.actions is None:
        plain = [messages[n]["content"] if not messages[n].get("tool_calls") else text
                 for n, text in zip(wanted, texts, strict=True)]
    else:
        plain = talk.actions
    return Sequence(
        domain=talk.domain,
        task=talk.task,
        environment=talk.environment,
        environment_version=talk.environment_version,
        seed=talk.seed,
        split=talk.split,
        contexts=contexts,
        actions=tuple(plain),
        outcome=Outcome(talk.reward, talk.reward, talk.success, metadata=talk.outcome_metadata),
        source=talk.source or source,
        fingerprint=fingerprint,
        metadata=metadata,
    )


def _noting(turns: Iterable[Turn], texts: list[str]) -> Iterable[Turn]:
    for turn in turns:
        texts.append(turn.text)
        yield turn


def turns_to_contexts(turns: Iterable[Turn], writers: list[str], max_tokens: int | None = None) -> tuple[Context, ...]:
    """The contexts of rendered turns, as an agent would have had them. Where a turn's prompt rewrites what came before,
    a child context starts. Behaviour log-probabilities are NaN: no model is known to have sampled these tokens. Raises
    RowRefused for a context that grows beyond `max_tokens`."""
    contexts: list[Context] = []
    parent, fork = None, 0
    tokens = np.zeros(0, dtype=np.uint32)
    segments: list[Segment] = []
    for number, turn in enumerate(turns):
        if max_tokens is not None and len(turn.prompt) + len(turn.action) > max_tokens:
            count = len(turn.prompt) + len(turn.action)
            raise RowRefused("longer than the limit", f"{count} tokens after turn {number}, the limit is {max_tokens}")
        if number and turn.fork is not None:
            contexts.append(_context(tokens, segments, parent, fork))
            parent, fork = len(contexts) - 1, min(turn.fork, len(turn.prompt) - 1)
            segments, at = shared_segments(contexts[parent], fork), fork
        else:
            at = len(tokens)
        prompt = np.asarray(turn.prompt, dtype=np.uint32)
        if number == 0:
            if not len(prompt):
                raise RowRefused("the template gives the model nothing to see", f"turn {number}")
            segments = [Segment("prompt", 0, len(prompt), -1)]
        elif len(prompt) > at:
            _extend(segments, Segment("observation", at, len(prompt), number - 1))
        tokens = np.concatenate([prompt, np.asarray(turn.action, dtype=np.uint32)])
        segments.append(Segment("action", len(prompt), len(tokens), number, writers[number]))
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


def row_source(name: str, row: Any) -> Source:
    """A demonstration's source: the file's name and the hash of the row, so that the same row in a file that has grown
    is the same demonstration."""
    text = json.dumps(row, sort_keys=True, ensure_ascii=True, default=str)
    return Source("demonstration", name, hashlib.sha256(text.encode("ascii")).hexdigest()[:16])
