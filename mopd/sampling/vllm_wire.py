"""What is said to a vLLM server that samples for the student, and how its answer is read. Pure: no network, no clock.

Token ids in, token ids out, no text: `/inference/v1/generate` of vLLM's `--enable-scale-out`, whose answers say which weights
sampled each token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from mopd.sampling.vllm_turns import Piece, Turn, piece_of

PATH = "/inference/v1/generate"
UNLABELLED = "default"
# what vLLM calls its weights before anybody gave it others


class BadAnswer(ValueError):
    """An answer that is not one to this question; the text is the reason under which its tokens are counted."""


class Refused(ValueError):
    """The server says that this request is wrong; asking again would not help."""


def body(model: str, turn: Turn) -> dict[str, Any]:
    """The JSON of one request."""
    return {"model": model, "token_ids": turn.tokens.tolist(), "sampling_params": turn.sampling() | {"detokenize": False},
            "return_token_ids": True}


def read_piece(model: str, turn: Turn, content: bytes, *, versions: Mapping[str, int], vocabulary: int) -> Piece:
    """What was written, out of a server's 200 answer; raises BadAnswer for one that does not belong to the question.

    versions  what the server may call its weights → our number; other names are numbers themselves
    """
    found = parse_json(content)
    if found.get("model") not in (None, model):
        raise BadAnswer("answer of another model")
    choices = found.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadAnswer("answer without its one choice")
    choice = choices[0]
    echo = choice.get("prompt_token_ids", found.get("prompt_token_ids"))
    if echo is not None and echo != turn.tokens.tolist():
        raise BadAnswer("answer to another context")
    tokens = choice.get("token_ids") or []
    entries = (choice.get("logprobs") or {}).get("content") or []
    try:
        if not isinstance(tokens, list) or [entry["token_id"] for entry in entries] != tokens:
            raise BadAnswer("a turn without its ids or log-probabilities")
        told = [([e["token_id"] for e in entry["top_logprobs"]], [e["logprob"] for e in entry["top_logprobs"]])
                for entry in entries] if turn.told else None
        if told is not None:
            told = [([token, *ids], [entry["logprob"], *values])
                    for token, entry, (ids, values) in zip(tokens, entries, told, strict=True)]
        spans = choice.get("weight_versions")
        return piece_of(turn, tokens, [entry["logprob"] for entry in entries],
                        version=_versions(spans, len(tokens), versions), likeliest=told, vocabulary=vocabulary)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadAnswer("malformed log-probabilities") from error
    except BadAnswer:
        raise
    except (ValueError, OverflowError) as error:
        raise BadAnswer(str(error)) from error


def _versions(spans: Any, count: int, known: Mapping[str, int]) -> np.ndarray:
    """int32 [count] from vLLM's spans [{"version", "start", "end"}]."""
    found, at = np.empty(count, np.int32), 0
    for span in spans or ():
        name = str(span["version"])
        number = known.get(name)
        if number is None:
            if not name.isdigit():
                raise BadAnswer(f"weights of an unknown name, {name!r}: somebody else gives this server weights")
            number = int(name)
        if span["start"] != at:
            raise BadAnswer("weights' versions of other tokens")
        found[at:span["end"]], at = number, span["end"]
    if at != count:
        raise BadAnswer("an answer that does not say which weights sampled it")
    return found


def parse_json(content: bytes) -> dict[str, Any]:
    """An answer's JSON object; raises BadAnswer. NaN and Infinity are read, so that they are seen."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadAnswer("answer is not JSON") from error
    if not isinstance(found, dict):
        raise BadAnswer("answer is not a JSON object")
    return found


def error_text(content: bytes) -> str:
    """What a server says about a request that it did not take, in one short line."""
    try:
        found = json.loads(content)
        text = found.get("error", found)
        text = text.get("message", text) if isinstance(text, dict) else text
        text = text if isinstance(text, str) else json.dumps(text)
    except (ValueError, AttributeError):
        text = content[:400].decode(errors="replace")
    return " ".join(text.split())[:200] or "no words"


def largest_k(content: bytes) -> int | None:
    """The limit that vLLM names when it is asked for too many log-probabilities."""
    found = re.search(r"max allowed: (\d+)", error_text(content))
    return int(found.group(1)) if found else None
