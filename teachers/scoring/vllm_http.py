"""What is said to a vLLM server and how its answer is read. Pure: no network, no clock.

Three ways of asking, from the dearest to the cheapest for the server:

- "completions"  /v1/completions, which every OpenAI-compatible vLLM has; each position is decoded to text that nobody reads
- "tokens"       /inference/v1/generate with detokenize=false (vLLM's --enable-scale-out): ids in, ids out, no text
- "chosen"       the same with prompt_logprob_token_ids and prompt_logprob_start: scores of the wanted positions only, in
                 binary (needs vLLM's V2 runner, that is a GPU)
"""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np

from mopd.sampling.base import Completion
from mopd.sampling.vllm_wire import BadAnswer, Refused, error_text, largest_k, parse_json
from teachers.scoring.prompts import Prompt, PromptScores, checked
from teachers.scoring.turns import Turn, written

__all__ = ["PATHS", "WAYS", "BadAnswer", "Refused", "body", "error_text", "largest_k", "parse_json", "read_answer"]

WAYS = ("chosen", "tokens", "completions")
PATHS = {"chosen": "/inference/v1/generate", "tokens": "/inference/v1/generate", "completions": "/v1/completions"}


def body(way: str, model: str, prompt: Prompt | Turn) -> dict[str, Any]:
    """The JSON of one request."""
    if isinstance(prompt, Turn):
        return _turn_body(way, model, prompt)
    tokens = prompt.tokens.tolist()
    if way == "completions":
        return {"model": model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": prompt.k,
                "add_special_tokens": False, "return_token_ids": True, "seed": 0}
    sampling = {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "seed": 0}
    if way == "chosen":
        sampling |= {"prompt_logprob_token_ids": [[token] for token in tokens[prompt.start:]],
                     "prompt_logprob_start": prompt.start - 1}
    else:
        sampling |= {"prompt_logprobs": prompt.k}
    return {"model": model, "token_ids": tokens, "sampling_params": sampling, "return_token_ids": True}


def _turn_body(way: str, model: str, turn: Turn) -> dict[str, Any]:
    sampling, tokens = turn.sampling(), turn.tokens.tolist()
    if way == "completions":
        return {"model": model, "prompt": tokens, "add_special_tokens": False, "return_token_ids": True, **sampling}
    return {"model": model, "token_ids": tokens, "sampling_params": sampling | {"detokenize": False},
            "return_token_ids": True}


def read_answer(way: str, model: str, prompt: Prompt | Turn, content: bytes) -> PromptScores | Completion:
    """Scores, or what was written, out of a server's 200 answer; raises BadAnswer for one that does not belong to the
    question."""
    found = parse_json(content)
    if found.get("model") not in (None, model):
        raise BadAnswer("answer of another model")
    echo = found.get("prompt_token_ids")
    if way == "completions" or isinstance(prompt, Turn):
        choices = found.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise BadAnswer("answer without its one choice")
        found = choices[0]
        echo = found.get("prompt_token_ids", echo)
    if echo is not None and (not isinstance(echo, list) or len(echo) != len(prompt.tokens)):
        raise BadAnswer("context of another length")
    if echo is not None and echo != prompt.tokens.tolist():
        raise BadAnswer("answer to another context")
    if isinstance(prompt, Turn):
        return _written(prompt, found)
    if way == "chosen":
        return _chosen(prompt, found.get("prompt_token_id_logprobs"))
    rows = found.get("prompt_logprobs")
    if not isinstance(rows, list):
        raise BadAnswer("answer without prompt log-probabilities")
    if len(rows) != len(prompt):
        raise BadAnswer("scores of another number of tokens")
    return _rows(prompt, rows[prompt.start:])


def _written(turn: Turn, choice: dict[str, Any]) -> Completion:
    tokens, told = choice.get("token_ids"), choice.get("logprobs")
    if not isinstance(tokens, list) or not isinstance(told, dict):
        raise BadAnswer("a turn without its ids or log-probabilities")
    content = told.get("content")  # "completions" has bare numbers instead
    try:
        if content is not None and [entry["token_id"] for entry in content] != tokens:
            raise BadAnswer("log-probabilities of other tokens")
        values = told["token_logprobs"] if content is None else [entry["logprob"] for entry in content]
        return written(turn, tokens, values)
    except (KeyError, TypeError) as error:
        raise BadAnswer("malformed log-probabilities") from error
    except BadAnswer:
        raise
    except (ValueError, OverflowError) as error:
        raise BadAnswer(str(error)) from error


def _chosen(prompt: Prompt, packed: Any) -> PromptScores:
    if not isinstance(packed, str):
        raise BadAnswer("answer without the chosen ids' log-probabilities")
    try:
        values = np.load(io.BytesIO(base64.b64decode(packed, validate=True)), allow_pickle=False)
    except ValueError as error:
        raise BadAnswer("unreadable log-probabilities") from error
    wanted = prompt.tokens[prompt.start:]
    if values.shape != (len(wanted), 1):
        raise BadAnswer("scores of another number of tokens")
    return checked(prompt, values[:, 0], wanted)  # the ids were part of the question


def _rows(prompt: Prompt, rows: list[Any]) -> PromptScores:
    """From {id: {"logprob", "rank", …}} of each position."""
    wanted = prompt.tokens[prompt.start:].tolist()
    n, k = len(rows), prompt.k
    logprob, labels = np.full(n, np.nan, np.float32), np.array(wanted, np.int64)
    top_ids = np.zeros((n, k), np.int32) if k else None
    top_logprob = np.full((n, k), np.nan, np.float32) if k else None
    try:
        for i, (token, row) in enumerate(zip(wanted, rows, strict=True)):
            mine = row.get(str(token))
            if mine is None:  # what it scored instead; any id of the row shows that it is not ours
                labels[i] = int(next(iter(row), -1))
                continue
            if mine["logprob"] is not None:
                logprob[i] = mine["logprob"]
            if k:
                best = [(entry["logprob"], int(name)) for name, entry in row.items() if 1 <= entry["rank"] <= k]
                if len(best) >= k:
                    best.sort(reverse=True)
                    top_logprob[i], top_ids[i] = zip(*best[:k], strict=True)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadAnswer("malformed log-probabilities") from error
    return checked(prompt, logprob, labels, top_ids, top_logprob)
