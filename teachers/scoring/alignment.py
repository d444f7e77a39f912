"""Two tokenisations of the same bytes, aligned: tokens to bytes, the smallest common spans, and what a span's score means.

Pure functions; nothing here knows chat templates, models or back ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from teachers.scoring.requests import TeacherError

# Why a token of the student has no span; asking again would not change it.
BROKEN = "bytes that are no whole character"
NO_COUNTERPART = "special token without counterpart"
REWRITTEN = "text that the teacher's tokenizer rewrites"
NO_PREFIX = "nothing before it in the teacher's tokens"
NO_TEXT = "token without text"
UNALIGNED = frozenset({BROKEN, NO_COUNTERPART, REWRITTEN, NO_PREFIX, NO_TEXT})

def token_bytes(tokenizer: Any) -> list[bytes | None]:
    """id -> the bytes that it stands for inside a text, None for special tokens and ids without a token.

    Two families are known: byte-level BPE (GPT-2's table of one character per byte) and SentencePiece's (`▁` for a space,
    `<0x0A>` for a byte). Raises TeacherError naming the tokenizer of any other.
    """
    core = getattr(tokenizer, "backend_tokenizer", None)
    kinds = set() if core is None else _kinds(json.loads(core.to_str()).get("decoder"))
    level = "ByteLevel" in kinds
    if not level and not kinds & {"Metaspace", "ByteFallback"}:
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise TeacherError(f"the tokenizer {name!r} is neither byte-level BPE nor of SentencePiece's kind, so the bytes of "
                           "its tokens are not known; such a model cannot teach, or learn from, one with another tokenizer")
    to_byte = {char: byte for byte, char in byte_characters().items()}
    added = tokenizer.added_tokens_decoder
    special = set(tokenizer.all_special_ids) | {i for i, token in added.items() if token.special}
    vocabulary = tokenizer.get_vocab()
    found: list[bytes | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, number in vocabulary.items():
        if number in special:
            continue
        if number in added:
            found[number] = token.encode()
        elif level:
            found[number] = bytes(to_byte[char] for char in token) if all(c in to_byte for c in token) else token.encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            found[number] = bytes([int(token[3:5], 16)])
        else:
            found[number] = token.replace("▁", " ").encode()
    return found


def _kinds(part: Any) -> set[str]:
    """The types of a decoder and of all that it is made of."""
    if not isinstance(part, dict):
        return set()
    return {part.get("type", "")}.union(*map(_kinds, part.get("decoders", [])))


def byte_characters() -> dict[int, str]:
    """byte -> the printable character that byte-level BPE writes for it (the table of GPT-2's tokenizer)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def common_spans(ours: Sequence[int], theirs: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """The smallest spans that both tokenisations of the same bytes have boundaries around.

    ours, theirs   bytes of each token, in order; both sum to the same
    Returns (a, b, c, d) per span: our tokens [a, b) and their tokens [c, d) cover exactly the same bytes, and no smaller
    span within does. Together they hold every token once. Tokens of no bytes belong to the span before them, at the
    beginning to the first. Raises ValueError where the sums differ or a length is negative.
    """
    if sum(ours) != sum(theirs) or min([0, *ours, *theirs]) < 0:
        raise ValueError(f"{sum(ours)} bytes here and {sum(theirs)} there are not the same text")
    spans: list[tuple[int, int, int, int]] = []
    a = c = i = j = x = y = 0
    while i < len(ours) or j < len(theirs):
        if j == len(theirs) or (i < len(ours) and x <= y):
            x, i = x + ours[i], i + 1
        else:
            y, j = y + theirs[j], j + 1
        if x == y and i > a and j > c and x > 0:
            while i < len(ours) and ours[i] == 0:
                i += 1
            while j < len(theirs) and theirs[j] == 0:
                j += 1
            spans.append((a, i, c, j))
            a, c = i, j
    if i > a or j > c:  # only tokens of no bytes
        spans.append((a, i, c, j))
    return spans


def whole_characters(data: bytes) -> list[tuple[int, int, bool]]:
    """Runs [start, stop) of bytes that are text (True) or that are no whole characters (False), in order, together all."""
    runs: list[tuple[int, int, bool]] = []
    at = 0
    while at < len(data):
        try:
            data[at:].decode()
            stop, broken = len(data), len(data)
        except UnicodeDecodeError as error:
            stop, broken = at + error.start, at + error.end
        if stop > at:
            runs.append((at, stop, True))
        if broken > stop:
            if runs and not runs[-1][2] and runs[-1][1] == stop:
                runs[-1] = (runs[-1][0], broken, False)
            else:
                runs.append((stop, broken, False))
        at = broken
    return runs


def share(total: float, tokens: int) -> np.ndarray:
    """float32 [tokens]: a span's log-probability in equal parts, so that sums over whole spans are right."""
    return np.full(tokens, total / tokens, np.float32)


def span_advantages(shares: np.ndarray, student: np.ndarray, spans: np.ndarray) -> np.ndarray:
    """Per-token teacher scores whose policy gradient is that of the spans.

    shares    float [n], the teacher's log-probability of each span in parts that sum to it (`share`)
    student   float [n], the student's own log-probabilities of the tokens
    spans     int [n], the number of each token's span; equal numbers stand together, -1 for tokens without a span
    Returns float32 [n]: t_i = S − Σ_{j≠i} log π(y_j) over the tokens of the same span, S the span's sum; NaN where a score
    that it needs is missing. A span of one token has t = S.

    Why. The unit that both models know is the span's text g, and the reverse KL of spans at fixed histories has the gradient
    E[(log π(g) − log π_T(g)) ∇ log π(g)], with ∇ log π(g) = Σ_i ∇ log π(y_i): every token of the span carries the *whole*
    log-ratio. An objective makes its advantage as t_i − log π(y_i), which is S − Σ_j log π(y_j) with the t_i above. Other
    ways to share S are wrong for it: S/k for each of k tokens sets a k-th of the teacher's log-probability against the whole
    of the student's own, and its optimum is a flattened teacher, π ∝ π_T^(1/k); all of S on the last token leaves the first
    ones, which decide what the span becomes, without a teacher; shares by the student's log-probabilities weigh samples by
    themselves. The price: values may lie above 0, and means over tokens (k1, k3) count a span once for each of its tokens.
    """
    shares, student = np.asarray(shares, np.float64), np.asarray(student, np.float64)
    found = np.full(len(shares), np.nan, np.float64)
    edges = [0, *(np.flatnonzero(np.diff(spans)) + 1).tolist(), len(spans)] if len(spans) else [0]
    for start, stop in zip(edges[:-1], edges[1:], strict=True):
        if spans[start] < 0:
            continue
        own = student[start:stop]
        found[start:stop] = shares[start:stop].sum() - ((own.sum() - own) if stop - start > 1 else 0.0)
    return found.astype(np.float32)
