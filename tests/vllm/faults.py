"""Ways in which a server's answers go wrong, and the words that a user sees. docs/teachers.md shows the same table."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from typing import Any

from tests.vllm.proxy import Answer, Asked

Rows = list[dict[str, Any] | None]


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault.

    name   what is wrong, as in the document
    words  what the user sees; … stands for a part that differs from case to case
    where  "tokens": those tokens are masked and counted under these words, and asked again; "down": the server counts as
           down, the run waits; "launch": `mopd check` and the launch refuse the teacher
    after  changes a score's answer on its way back: (request, status, content) -> answer or None
    before changes a request on its way there
    """

    name: str
    words: str
    where: str
    after: Callable[[Asked, int, bytes], Answer | None] | None = None
    before: Callable[[Asked], None] | None = None


def rows(change: Callable[[Rows], Rows]) -> Callable[[Asked, int, bytes], Answer]:
    """Change the list of log-probabilities of an answer, whichever way it was asked for."""
    def after(asked: Asked, status: int, content: bytes) -> Answer:
        found = json.loads(content)
        place = found["choices"][0] if asked.path == "/v1/completions" else found
        place["prompt_logprobs"] = change(place["prompt_logprobs"])
        return status, json.dumps(found).encode()
    return after


def each(value: float) -> Callable[[Rows], Rows]:
    """Every log-probability becomes `value`."""
    return lambda found: [row and {name: {**entry, "logprob": value} for name, entry in row.items()} for row in found]


def truncate(asked: Asked) -> None:
    """A server that silently cuts the front of a long context."""
    found = json.loads(asked.content)
    key = "prompt" if asked.path == "/v1/completions" else "token_ids"
    found[key] = found[key][2:]
    asked.content = json.dumps(found).encode()


def other_context(asked: Asked) -> None:
    """Answers that were mixed up between requests."""
    found = json.loads(asked.content)
    key = "prompt" if asked.path == "/v1/completions" else "token_ids"
    found[key] = [(token + 1) % 50 for token in found[key]]
    asked.content = json.dumps(found).encode()


def hang(asked: Asked, status: int, content: bytes) -> Answer:
    time.sleep(2.5)
    return status, content


FAULTS = (
    Fault("fewer scores than tokens", "scores of another number of tokens", "tokens", rows(lambda found: found[:-1])),
    Fault("scores shifted by one token", "scores of other tokens", "tokens",
          rows(lambda found: [None, *found[2:], found[1]])),
    Fault("NaN", "non-finite log-probability", "tokens", rows(each(float("nan")))),
    Fault("a probability above 1", "log-probability above 0", "tokens", rows(each(0.5))),
    Fault("−inf, which vLLM writes as −9999", "log-probability -inf", "tokens", rows(each(-9999.0))),
    Fault("a context that was cut", "context of another length", "tokens", before=truncate),
    Fault("the answer to another request", "answer to another context", "tokens", before=other_context),
    Fault("no scores in the answer", "answer without prompt log-probabilities", "tokens", rows(lambda found: None)),
    Fault("a page of HTML", "answer is not JSON", "tokens", lambda asked, status, content: (200, b"<html>busy</html>")),
    Fault("HTTP 500", "teacher 'game' does not answer: …: HTTP 500", "down", lambda asked, status, content: (500, b"oops")),
    Fault("a connection that breaks", "teacher 'game' does not answer: …: connection broke (…)", "down",
          lambda asked, status, content: None),
    Fault("a server that hangs", "teacher 'game' does not answer: …: no answer within 1 s", "down", hang),
    Fault("a server that is gone", "teacher 'game' does not answer: …: connection refused", "down"),
    Fault("started again with other weights", "teacher 'game' does not answer: …: has other weights than were met at first: "
          "its scores of a fixed text differ by up to … nats; serve the same checkpoint, or start the run anew with this one",
          "down"),
    Fault("started again with another model", "teacher 'game' does not answer: …: serves the model …, but … was met at first",
          "down"),
    Fault("two servers of one teacher with different models", "teacher 'game': … serves the model …, but … was met at first",
          "launch"),
    Fault("another model than the configuration names", "teacher 'game': … serves game, not expert; name the right one as "
          "teachers.game.served_model", "launch"),
    Fault("another tokenizer", "teacher 'game' has another tokenizer than the student: '…' is … there and … here; scores of "
          "token ids would be meaningless. Take a teacher that was trained with the student's tokenizer", "launch"),
    Fault("a wrong key", "teacher 'embodied': … HTTP 401: refuses the key in the environment variable …", "launch"),
    Fault("no key", "teacher 'embodied': … HTTP 401: asks for a key; put it into an environment variable and name that in "
          "teachers.embodied.api_key_env", "launch"),
)
WHERE = {"tokens": "these tokens are masked, counted and asked again", "down": "the run waits and asks again",
         "launch": "refused at launch"}


def by_name(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)


def table() -> str:
    """The table of docs/teachers.md."""
    lines = ["| what goes wrong | what you see | what happens |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| {f.name} | `{f.words}` | {WHERE[f.where]} |" for f in FAULTS)])


if __name__ == "__main__":
    print(table())
