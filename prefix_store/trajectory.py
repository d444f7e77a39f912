"""Trajectories as plain data: what an agent saw, wrote and achieved, token by token.

Knows numpy only. Nothing here reads a disk, a model or an environment. Terms follow the method's vocabulary:
a *sequence* is one agent loop on one task, a *context* one append-only token list of it, a *segment* a maximal run
of tokens of one origin, a *turn* one action segment with the observation that follows, and a *decision point* the
position just before an action segment.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from typing import Any

import numpy as np

SEGMENT_KINDS = ("prompt", "observation", "action")
SOURCE_KINDS = ("teacher", "expert", "demonstration", "student")
MODEL_WRITERS = ("teacher", "student")
LOGPROB_SLACK = 1e-3
# float32 log-softmax may land a rounding error above 0; anything larger is not a log-probability


class InvalidSequence(ValueError):
    """A sequence breaks a rule of the data model; the message names the rule and the place."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Tokens [start, end) of a context, all of one origin. `turn` numbers the turn it belongs to (the prompt: -1)."""

    kind: str
    start: int
    end: int
    turn: int
    writer: str = ""


@dataclasses.dataclass(frozen=True)
class Context:
    """One append-only token list.

    tokens            uint32 [T]   exactly what the acting model saw and wrote, never re-tokenised
    behaviour_logprob float32 [T]  log µ(token | history); NaN where no model wrote the token
    weights_version   int32 [T]    version of the weights that sampled the token; -1 where no model wrote it
    segments          cover [0, T) in order without gaps
    parent, fork      the context whose first `fork` tokens this one shares; parent is None for the first context
    """

    tokens: np.ndarray
    behaviour_logprob: np.ndarray
    weights_version: np.ndarray
    segments: tuple[Segment, ...]
    parent: int | None = None
    fork: int = 0

    def actions(self) -> list[Segment]:
        return [s for s in self.segments if s.kind == "action"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How the task ended. `reward` trains, `true_reward` is what the environment said; `is_infra` marks a failure
    that is not the model's (it never enters a mean, a deviation or a loss)."""

    reward: float
    true_reward: float
    success: bool = False
    error_category: str = ""
    is_infra: bool = False
    hack: bool = False
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Source:
    """Who played: kind is one of SOURCE_KINDS; id names the teacher, expert, file or student@step; revision pins it."""

    kind: str
    id: str
    revision: str = ""


@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Hashes of what made the token ids: tokenizer (id → token map and special ids), chat template, model config."""

    tokenizer: str
    chat_template: str
    model_config: str = ""


@dataclasses.dataclass(frozen=True)
class DecisionPoint:
    """The position just before an action segment: (sequence id, context index, turn number)."""

    sequence: str
    context: int
    turn: int


@dataclasses.dataclass(frozen=True)
class Sequence:
    """One agent loop on one task. `actions` are the action texts in order, so that an environment can be replayed;
    `seed` and `environment_version` pin the environment; `task` names the task inside the domain."""

    domain: str
    task: str
    environment: str
    environment_version: str
    seed: int
    split: str
    contexts: tuple[Context, ...]
    actions: tuple[str, ...]
    outcome: Outcome
    source: Source
    fingerprint: Fingerprint
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def turns(self) -> int:
        """Number of turns played; an action that a child context shares with its parent counts once."""
        return sum(s.kind == "action" and s.end > c.fork for c in self.contexts for s in c.segments)


# ---------------------------------------------------------------------------------------------------------------
# Canonical content: the same sequence gives the same bytes in every process, and so the same id.


def _plain(value: Any) -> Any:
    """JSON's default hook: numpy scalars and arrays become numbers and lists; anything else is refused by json."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def canonical_json(value: Any) -> str:
    """`value` as JSON with sorted keys, no spaces, ASCII only and finite numbers. Raises TypeError or ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False, default=_plain)


def sequence_record(seq: Sequence) -> dict[str, Any]:
    """Everything of a sequence but its contexts, as plain JSON data. `sequence_from_record` is the way back."""
    outcome, source, fingerprint = seq.outcome, seq.source, seq.fingerprint
    return {
        "domain": seq.domain,
        "task": seq.task,
        "environment": seq.environment,
        "environment_version": seq.environment_version,
        "seed": int(seq.seed),
        "split": seq.split,
        "actions": list(seq.actions),
        "outcome": {
            "reward": float(outcome.reward),
            "true_reward": float(outcome.true_reward),
            "success": bool(outcome.success),
            "error_category": outcome.error_category,
            "is_infra": bool(outcome.is_infra),
            "hack": bool(outcome.hack),
            "metadata": outcome.metadata,
        },
        "source": {"kind": source.kind, "id": source.id, "revision": source.revision},
        "fingerprint": {
            "tokenizer": fingerprint.tokenizer,
            "chat_template": fingerprint.chat_template,
            "model_config": fingerprint.model_config,
        },
        "metadata": seq.metadata,
    }


def sequence_from_record(record: dict[str, Any], contexts: tuple[Context, ...]) -> Sequence:
    """A sequence from `sequence_record`'s answer (after JSON) and its contexts."""
    fields = dict(record)
    fields["actions"] = tuple(fields["actions"])
    fields["outcome"] = Outcome(**fields["outcome"])
    fields["source"] = Source(**fields["source"])
    fields["fingerprint"] = Fingerprint(**fields["fingerprint"])
    return Sequence(contexts=contexts, **fields)


def content_hash(seq: Sequence) -> str:
    """The sequence's id: 64 hexadecimal digits of sha256 over its canonical content.

    The content is the record and the context and segment tables, each as canonical JSON after its length (uint64), then
    for each context tokens (uint32), log-probabilities (float32, every NaN the same) and weights versions (int32), all
    little-endian. Nothing else enters: neither time, process nor place. Metadata counts by its JSON form (a tuple
    equals a list).
    """
    return hash_content(canonical_json(sequence_record(seq)).encode("ascii"), seq.contexts)


def hash_content(record: bytes, contexts: tuple[Context, ...]) -> str:
    """`content_hash` of the sequence with this record (canonical JSON) and these contexts."""
    tables = []
    for c in contexts:
        segments = [[s.kind, int(s.start), int(s.end), int(s.turn), s.writer] for s in c.segments]
        tables.append([c.parent, int(c.fork), len(c.tokens), segments])
    digest = hashlib.sha256()
    for part in (record, canonical_json(tables).encode("ascii")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    for c in contexts:
        digest.update(np.ascontiguousarray(c.tokens, dtype="<u4"))
        digest.update(canonical_logprob(c.behaviour_logprob))
        digest.update(np.ascontiguousarray(c.weights_version, dtype="<i4"))
    return digest.hexdigest()


def canonical_logprob(logprob: np.ndarray) -> np.ndarray:
    """float32 with every NaN replaced by the one canonical NaN, so that equal content has equal bytes."""
    out = np.array(logprob, dtype="<f4")
    out[np.isnan(out)] = np.float32("nan")
    return out


# ---------------------------------------------------------------------------------------------------------------
# Validity


def own_actions(context: Context) -> list[Segment]:
    """The action segments that belong to this context: those that are not shared with its parent."""
    return [s for s in context.segments if s.kind == "action" and s.end > context.fork]


def shared_segments(parent: Context, fork: int) -> list[Segment]:
    """The parent's segments of its first `fork` tokens, the last one cut at the fork: how a child context begins."""
    return [dataclasses.replace(s, end=min(s.end, fork)) for s in parent.segments if s.start < fork]


def writer_kind(segment: Segment, source: Source) -> str:
    """Who wrote an action: the segment's writer up to a `:` or `@`, or the sequence's source where it names none."""
    return segment.writer.split(":")[0].split("@")[0] if segment.writer else source.kind


def check_sequence(seq: Sequence) -> None:
    """Raise InvalidSequence, naming the place, unless `seq` obeys every rule of the data model.

    - names, seed, split and action texts have their types; the source kind is one of SOURCE_KINDS; rewards are finite;
      metadata has a JSON form
    - tokens uint32, behaviour log-probabilities float32, weights versions int32, all of one length T > 0
    - segments cover [0, T) in order, without gap, overlap or empty segment; a context never begins with an action
    - the turns of the sequence's own actions count 0, 1, 2, … over its contexts; an action text stands for each;
      prompts carry turn -1 and observations the number of a turn that has been played (or -1)
    - a log-probability is NaN (and the version -1) on every token that is not an action; on an action that a teacher
      or student wrote it is finite and not above 0; on another action it is either throughout
    - a child context comes after its parent and repeats the parent's tokens, values and actions up to the fork
    """
    _check_fields(seq)
    if not seq.contexts:
        raise InvalidSequence("the sequence has no context")
    next_turn = 0
    for number, context in enumerate(seq.contexts):
        place = f"context {number}"
        _check_arrays(context, place)
        _check_cover(context, place)
        if context.parent is None:
            if context.fork != 0:
                raise InvalidSequence(f"{place}: fork is {context.fork} but it has no parent (use 0)")
            if number > 0:
                raise InvalidSequence(f"{place}: only context 0 may have no parent")
        else:
            _check_child(seq, number, context)
        next_turn = _check_turns(context, place, next_turn)
        _check_values(seq, context, place)
    if next_turn == 0:
        raise InvalidSequence("the sequence has no action segment, so nothing can be learnt from it")
    if len(seq.actions) != next_turn:
        raise InvalidSequence(f"{len(seq.actions)} action texts for {next_turn} turns; give one text per turn")


def _check_fields(seq: Sequence) -> None:
    for name in ("domain", "task", "environment", "environment_version", "split"):
        if not isinstance(getattr(seq, name), str):
            raise InvalidSequence(f"{name} is {getattr(seq, name)!r}, not a string")
    if not seq.domain:
        raise InvalidSequence("domain is empty")
    if isinstance(seq.seed, bool) or not isinstance(seq.seed, int | np.integer):
        raise InvalidSequence(f"seed is {seq.seed!r}, not an integer")
    if seq.source.kind not in SOURCE_KINDS:
        raise InvalidSequence(f"source kind {seq.source.kind!r} is none of {', '.join(SOURCE_KINDS)}")
    if not seq.fingerprint.tokenizer:
        raise InvalidSequence("the fingerprint names no tokenizer, so no reader could tell whether the ids are its own")
    for turn, text in enumerate(seq.actions):
        if not isinstance(text, str):
            raise InvalidSequence(f"action text of turn {turn} is {text!r}, not a string")
    for name in ("reward", "true_reward"):
        value = getattr(seq.outcome, name)
        if not isinstance(value, int | float | np.number) or not math.isfinite(value):
            raise InvalidSequence(f"outcome.{name} is {value!r}, not a finite number")
    for name, value in (("metadata", seq.metadata), ("outcome.metadata", seq.outcome.metadata)):
        if not isinstance(value, dict):
            raise InvalidSequence(f"{name} is {type(value).__name__}, not a dict")
        try:
            canonical_json(value)
        except (TypeError, ValueError) as error:
            raise InvalidSequence(f"{name} cannot be written as JSON: {error}") from None


def _check_arrays(context: Context, place: str) -> None:
    length = len(context.tokens)
    for name, dtype in (("tokens", np.uint32), ("behaviour_logprob", np.float32), ("weights_version", np.int32)):
        array = getattr(context, name)
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            found = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidSequence(f"{place}: {name} is {found}, not a {np.dtype(dtype)} vector")
        if len(array) != length:
            raise InvalidSequence(f"{place}: {name} has {len(array)} entries for {length} tokens")
    if length == 0:
        raise InvalidSequence(f"{place}: no tokens")


def _check_cover(context: Context, place: str) -> None:
    at, last = 0, None
    for number, s in enumerate(context.segments):
        where = f"{place}, segment {number} ({s.kind} [{s.start}, {s.end}))"
        if s.kind not in SEGMENT_KINDS:
            raise InvalidSequence(f"{where}: kind is none of {', '.join(SEGMENT_KINDS)}")
        if s.start != at:
            raise InvalidSequence(f"{where}: {'gap' if s.start > at else 'overlap'} after token {at}")
        if s.end <= s.start:
            raise InvalidSequence(f"{where}: empty segment")
        if last is not None and (last.kind, last.turn, last.writer) == (s.kind, s.turn, s.writer):
            raise InvalidSequence(f"{where}: continues the segment before it; one segment is a maximal run")
        at, last = s.end, s
    if at != len(context.tokens):
        raise InvalidSequence(f"{place}: segments end at token {at} of {len(context.tokens)}")
    if context.segments[0].kind == "action":
        raise InvalidSequence(f"{place}: begins with an action, which then has no prefix")


def _check_child(seq: Sequence, number: int, context: Context) -> None:
    place = f"context {number}"
    if not 0 <= context.parent < number:
        raise InvalidSequence(f"{place}: parent {context.parent} is not an earlier context")
    parent, fork = seq.contexts[context.parent], context.fork
    if not 0 <= fork < len(context.tokens) or fork > len(parent.tokens):
        limit = min(len(parent.tokens), len(context.tokens) - 1)
        raise InvalidSequence(f"{place}: fork {fork} is outside [0, {limit}]")
    for name in ("tokens", "behaviour_logprob", "weights_version"):
        mine, theirs = getattr(context, name)[:fork], getattr(parent, name)[:fork]
        different = ~((mine == theirs) | ((mine != mine) & (theirs != theirs)))  # NaN equals NaN here
        if different.any():
            at = int(np.argmax(different))
            raise InvalidSequence(
                f"{place}: {name} differs from parent context {context.parent} at token {at}, before the fork at {fork}"
            )
    shared = [(s.start, s.end, s.turn, s.writer) for s in context.segments if s.kind == "action" and s.start < fork]
    theirs = [(s.start, s.end, s.turn, s.writer) for s in shared_segments(parent, fork) if s.kind == "action"]
    if shared != theirs:
        raise InvalidSequence(
            f"{place}: its actions before the fork at {fork} are not those of parent context {context.parent}"
            " (an action never crosses the fork: `shared_segments` gives the right beginning)"
        )


def _check_turns(context: Context, place: str, next_turn: int) -> int:
    """Check the turn numbers of one context and return the number of the next own action."""
    for number, s in enumerate(context.segments):
        where = f"{place}, segment {number} ({s.kind} [{s.start}, {s.end}))"
        if s.kind == "prompt" and s.turn != -1:
            raise InvalidSequence(f"{where}: turn {s.turn}; a prompt has turn -1")
        if s.kind == "observation" and not -1 <= s.turn < next_turn:
            raise InvalidSequence(f"{where}: turn {s.turn} has not been played yet")
        if s.kind == "action" and s.end > context.fork:
            if s.turn != next_turn:
                raise InvalidSequence(f"{where}: turn {s.turn}, expected {next_turn}")
            next_turn += 1
    return next_turn


def _values_hold(seq: Sequence, context: Context, nan: np.ndarray) -> bool:
    """Whether `_check_values` finds nothing, by one pass over the whole context."""
    segments = context.segments
    starts = np.array([s.start for s in segments])
    sizes = np.diff(starts, append=len(nan))
    absent = np.add.reduceat(nan, starts, dtype=np.int64)
    versions = np.add.reduceat(context.weights_version != -1, starts, dtype=np.int64)
    action = np.array([s.kind == "action" for s in segments])
    model = np.array([s.kind == "action" and writer_kind(s, seq.source) in MODEL_WRITERS for s in segments])
    whole, none = absent == sizes, absent == 0
    placed = np.where(model, none, np.where(action, none | whole, whole & (versions == 0))).all()
    # a NaN is neither above nor infinite
    bad = (context.behaviour_logprob > LOGPROB_SLACK) | np.isinf(context.behaviour_logprob)
    return bool(placed and not bad.any() and context.weights_version.min() >= -1)


def _check_values(seq: Sequence, context: Context, place: str) -> None:
    nan = np.isnan(context.behaviour_logprob)
    if _values_hold(seq, context, nan):
        return
    for number, s in enumerate(context.segments):
        where = f"{place}, segment {number} ({s.kind} [{s.start}, {s.end}))"
        inside, versions = nan[s.start : s.end], context.weights_version[s.start : s.end]
        if s.kind != "action":
            if not inside.all():
                at = s.start + int(np.argmin(inside))
                raise InvalidSequence(f"{where}: token {at} has a log-probability, but no model wrote it (use NaN)")
            if (versions != -1).any():
                raise InvalidSequence(f"{where}: has a weights version, but no model wrote it (use -1)")
            continue
        if (versions < -1).any():
            raise InvalidSequence(f"{where}: weights version below -1")
        written_by_model = writer_kind(s, seq.source) in MODEL_WRITERS
        if inside.any() and (written_by_model or not inside.all()):
            at = s.start + int(np.argmax(inside))
            raise InvalidSequence(
                f"{where}: token {at} has no log-probability, but {writer_kind(s, seq.source)!r} wrote this action"
                + ("" if written_by_model else " and gave others (give all or none)")
            )
        values = context.behaviour_logprob[s.start : s.end]
        bad = ~inside & ~((values <= LOGPROB_SLACK) & np.isfinite(values))
        if bad.any():
            at = s.start + int(np.argmax(bad))
            raise InvalidSequence(f"{where}: log-probability of token {at} is {context.behaviour_logprob[at]}")


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


def example_sequence(
    rng: np.random.Generator | int | None = None,
    *,
    turns: int | None = None,
    domain: str | None = None,
    source: str | None = None,
    vocabulary: int = 768,
    fork: bool | None = None,
) -> Sequence:
    """A valid random multi-turn sequence, for tests and documents; the same generator state gives the same sequence.

    rng is a numpy Generator or a seed. By default it has 1 to 6 turns, a random domain and source kind, token ids below
    `vocabulary`, and in a third of the cases with two or more turns a child context that rewrites some history (`fork`
    forces or forbids that).
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
