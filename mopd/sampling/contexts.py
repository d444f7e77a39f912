"""Builds the contexts of a sequence while it is played: who wrote which token, with which log-probability."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

import numpy as np

from mopd.sampling.rendering import Extension
from prefix_store.trajectory import Context, Extra, Segment

CANDIDATES = "candidates"
# the extra of stored contexts that keeps, per token, the ids over which the policy that wrote it was renormalised
EXPERTS = "routed_experts"
# and the experts [L, k] that each token went to when the model read it, where the engine reports them


class _Growing:
    """One context under construction."""

    def __init__(self, parent: int | None = None, fork: int = 0):
        self.parent, self.fork = parent, fork
        self.tokens = np.empty(0, np.uint32)
        self.logprobs = np.empty(0, np.float32)
        self.versions = np.empty(0, np.int32)
        self.segments: list[Segment] = []
        self.candidates: dict[int, np.ndarray] = {}  # token → the ids over which its writer's policy was renormalised
        self.experts: np.ndarray | None = None  # int16 [m, L, k] of the first m tokens

    def add(self, kind: str, tokens: np.ndarray, turn: int, writer: str, logprobs,
            version: int | np.ndarray) -> None:
        if len(tokens) == 0:
            return
        start = len(self.tokens)
        self.tokens = np.concatenate([self.tokens, tokens.astype(np.uint32)])
        self.logprobs = np.concatenate([self.logprobs, np.broadcast_to(np.float32(logprobs), len(tokens))])
        self.versions = np.concatenate([self.versions, np.full(len(tokens), version, np.int32)])
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.kind, last.turn, last.writer) == (kind, turn, writer):
            # A segment is a maximal run.
            start = self.segments.pop().start
        self.segments.append(Segment(kind, start, len(self.tokens), turn, writer))


class ContextBuilder:
    """Grows a sequence's contexts: `prompt`, then `act` and `observe` in turn. `turn` is the number of the first action's
    turn: above 0 where the prompt holds turns that others played."""

    def __init__(self, prompt: np.ndarray, *, turn: int = 0):
        self._contexts = [_Growing()]
        self._contexts[0].add("prompt", prompt, -1, "", np.nan, -1)
        self.turns = turn

    @property
    def tokens(self) -> np.ndarray:
        """uint32 [T]: what the model sees next."""
        return self._contexts[-1].tokens

    def act(self, tokens: np.ndarray, logprobs: np.ndarray | float, version: int | np.ndarray, writer: str,
            candidates: ListLike[np.ndarray | None] | None = None, experts: np.ndarray | None = None) -> None:
        """Append an action as it was written; `logprobs` NaN and version -1 where no model wrote it, `version` (of all, or
        int32 by token), `candidates` and `experts` as a Completion has them. Of a token that was read more than once the
        first experts stay: those under which the tokens behind it were sampled."""
        growing = self._contexts[-1]
        if experts is not None:
            known = growing.experts
            growing.experts = experts if known is None else np.concatenate([known, experts[len(known):]])
        sets = enumerate(candidates or (), start=len(growing.tokens))
        growing.candidates.update((place, ids) for place, ids in sets if ids is not None)
        growing.add("action", tokens, self.turns, writer, logprobs, version)
        self.turns += 1

    def observe(self, extension: Extension) -> None:
        """Append the observation after the last action, or start a child context where history was rewritten.

        A rewritten context's own tokens are an observation: no model sampled them in this form, so they carry no loss.
        """
        turn = self.turns - 1
        if extension.kind == "append":
            self._contexts[-1].add("observation", extension.tokens, turn, "", np.nan, -1)
            return
        parent = self._contexts[-1]
        # At least one token must be the child's own.
        fork = min(extension.fork, len(extension.tokens) - 1)
        child = _Growing(len(self._contexts) - 1, fork)
        for s in parent.segments:
            if s.start < fork:
                end = min(s.end, fork)
                part = slice(s.start, end)
                child.tokens = parent.tokens[:end]
                child.logprobs, child.versions = parent.logprobs[:end], parent.versions[:end]
                child.segments.append(Segment(s.kind, part.start, end, s.turn, s.writer))
        child.candidates = {place: ids for place, ids in parent.candidates.items() if place < fork}
        child.experts = None if parent.experts is None else parent.experts[:fork]
        child.add("observation", extension.tokens[fork:], turn, "", np.nan, -1)
        self._contexts.append(child)

    def build(self) -> tuple[Context, ...]:
        """The finished contexts. Tokens after the last action were seen by nobody if play has ended; they are kept.

        Where top-p or top-k cut ids off, all contexts have the extra CANDIDATES: a count of 0 says that nothing was cut.
        Where the engine told of experts, all have EXPERTS, with a count of 0 for tokens that it never read.
        """
        cut = any(c.candidates for c in self._contexts)
        shape = next((c.experts.shape[1:] for c in self._contexts if c.experts is not None), None)
        return tuple(
            Context(c.tokens, c.logprobs, c.versions, tuple(c.segments), c.parent, c.fork,
                    ({CANDIDATES: _extra(c)} if cut else {})
                    | ({} if shape is None else {EXPERTS: _routes(c, shape)})) for c in self._contexts
        )


def _extra(growing: _Growing) -> Extra:
    return Extra.ragged((growing.candidates.get(place, ()) for place in range(len(growing.tokens))), np.uint32)


def _routes(growing: _Growing, shape: tuple[int, ...]) -> Extra:
    found = np.zeros((0, *shape), np.int16) if growing.experts is None else growing.experts
    return Extra.per_token(found, np.arange(len(growing.tokens)) < len(found))


def experts_of(context: Context, start: int, end: int) -> np.ndarray | None:
    """The experts of a context's tokens [start, end) as an Action has them, int16 [end - start, L, k]; None where none are
    known."""
    extra = context.extras.get(EXPERTS)
    if extra is None or not extra.counts[start:end].any():
        return None
    found = np.full((end - start, *extra.values.shape[1:]), -1, np.int16)
    found[extra.counts[start:end] > 0] = extra.cut(start, end).values
    return found


def candidates_of(context: Context, start: int, end: int) -> tuple[np.ndarray | None, ...] | None:
    """The candidate sets of a context's tokens [start, end), int32 each, as an Action has them; None where there are none."""
    extra = context.extras.get(CANDIDATES)
    if extra is None or not extra.counts[start:end].any():
        return None
    part = extra.cut(start, end)
    offsets, ids = part.offsets(), part.values.astype(np.int32)
    return tuple(ids[a:b] if b > a else None for a, b in zip(offsets, offsets[1:], strict=False))
