"""Trajectories as plain data: what an agent saw, wrote and achieved, token by token.

Knows numpy only. Nothing here reads a disk, a model or an environment. The types are those of model.py, the rules those
of validity.py and the ids those of content.py; this module has decision points and examples, and names all of them.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from prefix_store.content import (
    canonical_json,
    canonical_logprob,
    content_hash,
    hash_content,
    sequence_from_record,
    sequence_record,
)
from prefix_store.extras import Extra, example_extras, join_extras
from prefix_store.model import (
    LOGPROB_SLACK,
    MODEL_WRITERS,
    SEGMENT_KINDS,
    SOURCE_KINDS,
    Context,
    DecisionPoint,
    Fingerprint,
    InvalidSequence,
    Outcome,
    Segment,
    Sequence,
    Source,
    own_actions,
    shared_segments,
    writer_kind,
)
from prefix_store.validity import check_sequence

__all__ = [
    "LOGPROB_SLACK",
    "MODEL_WRITERS",
    "SEGMENT_KINDS",
    "SOURCE_KINDS",
    "Context",
    "DecisionPoint",
    "Extra",
    "Fingerprint",
    "InvalidSequence",
    "Outcome",
    "Segment",
    "Sequence",
    "Source",
    "canonical_json",
    "canonical_logprob",
    "check_sequence",
    "content_hash",
    "continuation_of",
    "decision_points_of",
    "example_sequence",
    "hash_content",
    "own_actions",
    "prefix_of",
    "sequence_from_record",
    "sequence_record",
    "sequences_equal",
    "shared_segments",
    "writer_kind",
]

# ---------------------------------------------------------------------------------------------------------------
# Decision points


def decision_points_of(seq: Sequence, sequence_id: str | None = None) -> list[DecisionPoint]:
    """The sequence's decision points in the order of their turns. An action that a child context shares with its parent
    belongs to the parent alone, so k turns give k points. `sequence_id` saves computing the content hash again."""
    sequence_id = sequence_id or content_hash(seq)
    return [DecisionPoint(sequence_id, n, s.turn) for n, c in enumerate(seq.contexts) for s in own_actions(c)]


def _own_action(seq: Sequence, context: int, turn: int) -> Segment:
    for s in own_actions(seq.contexts[context]):
        if s.turn == turn:
            return s
    raise KeyError(f"context {context} has no decision point at turn {turn}")


def prefix_of(seq: Sequence, context: int, turn: int) -> np.ndarray:
    """uint32 [p]: all tokens of the context before the action of `turn`, as its writer saw them. KeyError if none."""
    return seq.contexts[context].tokens[: _own_action(seq, context, turn).start]


def continuation_of(seq: Sequence, context: int, turn: int) -> np.ndarray:
    """uint32 [n]: the tokens of the action that was played there. KeyError if there is no such decision point."""
    s = _own_action(seq, context, turn)
    return seq.contexts[context].tokens[s.start : s.end]


def sequences_equal(a: Sequence, b: Sequence) -> bool:
    """Whether two sequences have the same content (NaN equals NaN; metadata by its JSON form)."""
    return content_hash(a) == content_hash(b)


# ---------------------------------------------------------------------------------------------------------------
# Examples


class _Builder:
    """Grows one context segment by segment."""

    def __init__(self, rng: np.random.Generator, vocabulary: int):
        self.rng, self.vocabulary = rng, vocabulary
        self.parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self.segments: list[Segment] = []
        self.length = self.fork = 0
        self.parent: int | None = None

    def begin_child(self, parent: Context, parent_number: int, fork: int) -> None:
        self.parts = [(parent.tokens[:fork], parent.behaviour_logprob[:fork], parent.weights_version[:fork])]
        self.segments = shared_segments(parent, fork)
        self.length = self.fork = fork
        self.parent = parent_number

    def add(self, kind: str, count: int, turn: int, writer: str, *, model: bool, version: int) -> None:
        logprob = -self.rng.exponential(0.7, count) if model else np.full(count, np.nan)
        self.parts.append(
            (
                self.rng.integers(0, self.vocabulary, count).astype(np.uint32),
                logprob.astype(np.float32),
                np.full(count, version if model else -1, dtype=np.int32),
            )
        )
        self.segments.append(Segment(kind, self.length, self.length + count, turn, writer))
        self.length += count

    def context(self) -> Context:
        tokens, logprob, version = (np.concatenate(column) for column in zip(*self.parts, strict=True))
        return Context(tokens, logprob, version, tuple(self.segments), self.parent, self.fork)


def _with_extras(rng: np.random.Generator, contexts: list[Context], vocabulary: int) -> list[Context]:
    done: list[Context] = []
    for c in contexts:
        action = np.zeros(len(c.tokens), dtype=bool)
        for s in c.actions():
            action[s.start : s.end] = True
        extras = example_extras(rng, action[c.fork :], vocabulary)
        if c.parent is not None:
            shared = done[c.parent].extras
            extras = {name: join_extras([shared[name].cut(0, c.fork), own]) for name, own in extras.items()}
        done.append(dataclasses.replace(c, extras=extras))
    return done


def example_sequence(
    rng: np.random.Generator | int | None = None,
    *,
    turns: int | None = None,
    domain: str | None = None,
    source: str | None = None,
    vocabulary: int = 768,
    fork: bool | None = None,
    extras: bool = False,
) -> Sequence:
    """A valid random multi-turn sequence, for tests and documents; the same generator state gives the same sequence.

    rng is a numpy Generator or a seed. By default it has 1 to 6 turns, a random domain and source kind, token ids below
    `vocabulary`, and in a third of the cases with two or more turns a child context that rewrites some history (`fork`
    forces or forbids that). With `extras` every context carries the four that `example_extras` makes.
    """
    rng = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(rng)
    turns = int(rng.integers(1, 7)) if turns is None else turns
    domain = str(rng.choice(["game", "science", "embodied"])) if domain is None else domain
    kind = str(rng.choice(SOURCE_KINDS)) if source is None else source
    draw = bool(rng.random() < 1 / 3)
    forked = turns > 1 and (draw if fork is None else fork)
    fork_turn = int(rng.integers(1, turns)) if forked else turns
    model, version = kind in MODEL_WRITERS, int(rng.integers(0, 100))

    contexts: list[Context] = []
    builder = _Builder(rng, vocabulary)
    builder.add("prompt", int(rng.integers(8, 40)), -1, "", model=False, version=version)
    for turn in range(turns):
        if turn == fork_turn:
            parent = builder.context()
            contexts.append(parent)
            cut = int(rng.integers(1, len(parent.tokens)))
            builder = _Builder(rng, vocabulary)
            builder.begin_child(parent, 0, cut)
            builder.add("observation", int(rng.integers(4, 20)), turn - 1, "history", model=False, version=version)
        builder.add("action", int(rng.integers(1, 9)), turn, kind, model=model, version=version)
        builder.add("observation", int(rng.integers(1, 30)), turn, "", model=False, version=version)
    contexts.append(builder.context())
    if extras:
        contexts = _with_extras(rng, contexts, vocabulary)

    success = bool(rng.random() < 0.6)
    return Sequence(
        domain=domain,
        task=f"example-{int(rng.integers(0, 5))}",
        environment=f"{domain}_environment",
        environment_version="1.0",
        seed=int(rng.integers(0, 2**31)),
        split="train",
        contexts=tuple(contexts),
        actions=tuple(f"do thing {int(rng.integers(0, 50))}" for _ in range(turns)),
        outcome=Outcome(reward=float(success), true_reward=float(rng.random()), success=success),
        source=Source(kind, f"{domain}_{kind}", "r1"),
        fingerprint=Fingerprint("example-tokenizer", "example-template", ""),
        metadata={"final_observation": "The end."},
    )
