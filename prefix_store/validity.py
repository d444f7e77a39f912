"""Is a sequence valid? Every rule of the data model, checked before anything is stored."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from prefix_store.content import canonical_json
from prefix_store.extras import extra_kinds, extras_fault, shared_extras_fault
from prefix_store.model import (
    LOGPROB_SLACK,
    MODEL_WRITERS,
    SEGMENT_KINDS,
    SOURCE_KINDS,
    Context,
    Fingerprint,
    InvalidSequence,
    Outcome,
    Sequence,
    Source,
    shared_segments,
    writer_kind,
)


def check_sequence(seq: Sequence, json_too: bool = True) -> None:
    """Raise InvalidSequence, naming the place, unless `seq` obeys every rule of the data model.

    - names, seed, split, action texts, outcome, source and fingerprint have their types; the source kind is one of
      SOURCE_KINDS; rewards are finite; metadata has a JSON form
    - tokens uint32, behaviour log-probabilities float32, weights versions int32, all of one length T > 0
    - segments cover [0, T) in order, without gap, overlap or empty segment; a context never begins with an action
    - the turns of the sequence's own actions count 0, 1, 2, … over its contexts; an action text stands for each;
      prompts carry turn -1 and observations the number of a turn that has been played (or -1)
    - a log-probability is NaN (and the version -1) on every token that is not an action; on an action that a teacher
      or student wrote it is finite and not above 0; on another action it is either throughout
    - a child context comes after its parent and repeats the parent's tokens, values, extras and actions up to the fork
    - extras: every context has the same names, each of one dtype (EXTRA_DTYPES) and shape of a value throughout, with
      a count ≥ 0 for each token and as many values as the counts add up to

    json_too=False leaves out whether metadata has a JSON form, for who writes it next anyway.
    """
    try:
        _check_all(seq, json_too)
    except (TypeError, AttributeError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        raise InvalidSequence(f"the sequence is not made of the data model's types: {what}") from error


def _check_all(seq: Sequence, json_too: bool) -> None:
    if not isinstance(seq, Sequence):
        raise InvalidSequence(f"{type(seq).__name__} is not a Sequence")
    _check_fields(seq, json_too)
    if not seq.contexts:
        raise InvalidSequence("the sequence has no context")
    next_turn = 0
    kinds = _extra_kinds(seq.contexts[0])
    for number, context in enumerate(seq.contexts):
        place = f"context {number}"
        _check_arrays(context, place)
        if context.extras or kinds:
            fault = extras_fault(context.extras, len(context.tokens), kinds)
            if fault:
                raise InvalidSequence(f"{place}: {fault}")
        after = _look_over(seq, context, next_turn)
        if after is None:
            _check_cover(context, place)
        if context.parent is None:
            if context.fork != 0:
                raise InvalidSequence(f"{place}: fork is {context.fork} but it has no parent (use 0)")
            if number > 0:
                raise InvalidSequence(f"{place}: only context 0 may have no parent")
        else:
            _check_child(seq, number, context)
        if after is None:
            after = _check_turns(context, place, next_turn)
            _check_values(seq, context, place)
        next_turn = after
    if next_turn == 0:
        raise InvalidSequence("the sequence has no action segment, so nothing can be learnt from it")
    if len(seq.actions) != next_turn:
        raise InvalidSequence(f"{len(seq.actions)} action texts for {next_turn} turns; give one text per turn")


def _extra_kinds(context: Context) -> dict[str, list]:
    if not isinstance(context.extras, Mapping):
        raise InvalidSequence(f"context 0: extras is {type(context.extras).__name__}, not a mapping of names to Extra")
    try:
        return extra_kinds(context.extras)
    except AttributeError as error:
        raise InvalidSequence(f"context 0: an extra is not an Extra of numpy arrays ({error})") from None


def _check_fields(seq: Sequence, json_too: bool) -> None:
    for name in ("domain", "task", "environment", "environment_version", "split"):
        if not isinstance(getattr(seq, name), str):
            raise InvalidSequence(f"{name} is {getattr(seq, name)!r}, not a string")
    if not seq.domain:
        raise InvalidSequence("domain is empty")
    for name, kind in (("outcome", Outcome), ("source", Source), ("fingerprint", Fingerprint)):
        if not isinstance(getattr(seq, name), kind):
            raise InvalidSequence(f"{name} is {type(getattr(seq, name)).__name__}, not {kind.__name__}")
    for name, part, texts in (
        ("source", seq.source, ("id", "revision")),
        ("fingerprint", seq.fingerprint, ("tokenizer", "chat_template", "model_config")),
        ("outcome", seq.outcome, ("error_category",)),
    ):
        for text in texts:
            if not isinstance(getattr(part, text), str):
                raise InvalidSequence(f"{name}.{text} is {getattr(part, text)!r}, not a string")
    for name in ("success", "is_infra", "hack"):
        if not isinstance(getattr(seq.outcome, name), bool | np.bool_):
            raise InvalidSequence(f"outcome.{name} is {getattr(seq.outcome, name)!r}, not true or false")
    if isinstance(seq.actions, str):
        raise InvalidSequence("actions is one string, not a tuple of action texts")
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
        if value and json_too:
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
    if isinstance(context.parent, bool) or not 0 <= context.parent < number:
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
    unequal = shared_extras_fault(context.extras, parent.extras, fork)
    if unequal:
        raise InvalidSequence(
            f"{place}: extra {unequal!r} differs from parent context {context.parent} before the fork at {fork}"
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


def _look_over(seq: Sequence, context: Context, next_turn: int) -> int | None:
    """One quick look at segments, turns and values of a context: the number of the next own action if all is well, None
    if something is not, or needs the closer look that names it (`_check_cover`, `_check_turns`, `_check_values`)."""
    at, last, fork = 0, None, context.fork
    for s in context.segments:
        if type(s.writer) is not str:
            raise InvalidSequence(f"segment [{s.start}, {s.end}): writer is {s.writer!r}, not a string")
    by_model = np.zeros(len(context.tokens), dtype=bool)
    writers = {"": seq.source.kind in MODEL_WRITERS}
    for s in context.segments:
        kind, start, end, turn, writer = s.kind, s.start, s.end, s.turn, s.writer
        mark = (kind, turn, writer)
        if start != at or end <= start or mark == last:
            return None
        if kind == "action":
            if end > fork:
                if turn != next_turn:
                    return None
                next_turn += 1
            if writer not in writers:
                writers[writer] = writer_kind(s, seq.source) in MODEL_WRITERS
            if not writers[writer]:
                return None  # it has log-probabilities throughout or nowhere
            by_model[start:end] = True
        elif turn != -1 and not (kind == "observation" and -1 <= turn < next_turn):
            return None
        elif kind not in SEGMENT_KINDS:
            return None
        at, last = end, mark
    logprob, version = context.behaviour_logprob, context.weights_version
    if at != len(logprob) or at == 0 or context.segments[0].kind == "action":
        return None
    there = logprob == logprob
    if there.tobytes() != by_model.tobytes():
        return None
    values = logprob[there]
    if len(values) and not (np.maximum.reduce(values) <= LOGPROB_SLACK and np.minimum.reduce(values) > -np.inf):
        return None
    if np.minimum.reduce(version) < -1 or np.greater(version != -1, by_model).any():
        return None
    return next_turn


def _check_values(seq: Sequence, context: Context, place: str) -> None:
    nan = np.isnan(context.behaviour_logprob)
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
