"""Student and teacher are introduced: do they mean the same by a token id, end alike, can the teacher read all of it?

Pure comparison of what both sides tell (`identity`); nothing is loaded but tokenizers and configs. What would make scores
meaningless is refused with its first difference; what only deserves to be known is a note.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from mopd.sampling.rendering import require_tokenizer_files
from teachers.scoring.requests import TeacherError


class TokenizerMismatch(TeacherError):
    """A teacher gives its ids another meaning than the student; the message names the first id that differs."""


# Names that tokenizers give to ids that no text ever becomes. In brackets: without them a word of this kind is a word.
UNUSED = re.compile(r"[<\[].*(unused|reserved|extra_id|extra_token|placeholder|dummy|pad).*[>\]]", re.IGNORECASE | re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What a handshake found of one teacher.

    shared   number of ids, from 0 on, that mean the same on both sides; the softmax runs over these where it is made here
    notes    sentences for people, each a difference that does not stand in the way
    facts    what the table shows, plain values
    """

    teacher: str
    shared: int
    notes: tuple[str, ...]
    facts: dict[str, Any]


def folder_identity(model: str | Path, *, revision: str = "", trust_remote_code: bool = False) -> dict[str, Any]:
    """What a model's folder (or hub id) tells, in the keys of ScoringBackend.identity and `special`, `roles`, `spelled`
    (the tokenizer). Reads its tokenizer and configs, no weights. Raises OSError or ValueError naming it."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    more = {"revision": revision} if revision and not Path(model).is_dir() else {}
    require_tokenizer_files(model)
    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code, **more)
        config = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code, **more)
    except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its parser raises, without its name
        if isinstance(error, OSError):
            raise
        raise ValueError(f"tokenizer or config of {model} cannot be read: {error}") from error
    text = config.get_text_config()
    try:
        told = GenerationConfig.from_pretrained(model, **more).to_dict()
    except OSError:  # many models have none
        told = {}
    ends = {tokenizer.eos_token_id, *_numbers(text.eos_token_id), *_numbers(told.get("eos_token_id"))}
    return {**tokenizer_identity(tokenizer), "model": str(model), "tokenizer": str(model), "rows": text.vocab_size,
            "end_ids": sorted(ends - {None}), "stop_strings": sorted(_texts(told.get("stop_strings"))),
            "context_tokens": getattr(text, "max_position_embeddings", None),
            "dtype": str(getattr(config, "dtype", None) or "").removeprefix("torch.")}


def tokenizer_identity(tokenizer: Any) -> dict[str, Any]:
    """What a tokenizer tells by itself."""
    return {"vocabulary": {int(i): token for token, i in tokenizer.get_vocab().items()},
            "special": sorted(int(i) for i in tokenizer.all_special_ids),
            "roles": {role: getattr(tokenizer, f"{role}_token_id", None) for role in ("bos", "eos", "pad", "unk")},
            "chat_template": getattr(tokenizer, "chat_template", None), "spelled": tokenizer}


def compare_tokenizers(student: Any, teacher: Any, *, teacher_id: str) -> int:
    """The number of ids that two tokenizers share (see `shared_ids`). Raises TokenizerMismatch."""
    return shared_ids(tokenizer_identity(student)["vocabulary"], tokenizer_identity(teacher)["vocabulary"],
                      teacher_id=teacher_id)[0]


def shared_ids(student: Mapping[int, str], teacher: Mapping[int, str], *, teacher_id: str) -> tuple[int, list[str]]:
    """(n, tokens that only one side has): ids 0 … n−1 are the same tokens on both sides.

    One side may have further ids behind the last one of the other, where their names say that no text becomes them
    (UNUSED): rows of padding with a name. Raises TokenizerMismatch naming the first id that differs otherwise.
    """
    shared = min(max(student, default=-1), max(teacher, default=-1)) + 1
    extra = []
    for number in sorted(student.keys() | teacher.keys()):
        ours, theirs = student.get(number), teacher.get(number)
        if ours == theirs:
            continue
        only = ours if theirs is None else theirs
        if number >= shared and (ours is None or theirs is None) and UNUSED.fullmatch(only):
            extra.append(only)
            continue
        raise TokenizerMismatch(
            f"teacher {teacher_id!r} has another tokenizer than the student: id {number} is {_shown(theirs)} there and "
            f"{_shown(ours)} here; scores of token ids would be meaningless. Take a teacher that was trained with the "
            f"student's tokenizer, or set teachers.{teacher_id}.cross_tokenizer=true for scores by spans of text")
    return shared, extra


def introduce(student: Mapping[str, Any], teacher: Mapping[str, Any], *, teacher_id: str, backend: str = "hf",
              stop_ids: Collection[int] = (), longest: int | None = None, top_k: int = 0,
              revision: str = "", cross_tokenizer: bool = False, stop_strings: Collection[str] = ()) -> Agreement:
    """Compare two identities.

    stop_ids     ids at which this run ends a turn
    longest      tokens of the longest context that this teacher has to read
    top_k        likeliest ids that the run asks of a teacher that gives no distribution
    revision     what the config says the teacher's must be
    stop_strings texts at which it ends one
    cross_tokenizer   its tokens may mean something else: it is asked by texts, and ids are not compared
    Raises TokenizerMismatch for other tokens, TeacherError with every other reason why this teacher cannot serve this run.
    """
    if cross_tokenizer:
        return _by_text(student, teacher, teacher_id, backend, longest, revision)
    notes: list[str] = []
    theirs = teacher.get("vocabulary")
    if theirs:
        shared, extra = shared_ids(student["vocabulary"], theirs, teacher_id=teacher_id)
    else:
        shared, extra = max(student["vocabulary"], default=-1) + 1, []
        notes.append(f"teacher {teacher_id!r} does not tell its whole tokenizer; "
                     + ("it wrote some texts as the same ids as the student's. " if _told(teacher) else "")
                     + f"Name its folder as teachers.{teacher_id}.model and all of it is compared")
    _same_spelling(student, teacher, teacher_id)
    errors = _unfit(teacher, teacher_id, backend, longest, top_k, revision)
    if errors:
        raise TeacherError("; ".join(errors))
    whole = backend == "hf"
    rows = teacher.get("rows")
    if extra:
        notes.append(f"teacher {teacher_id!r} and the student share {shared} ids; {len(extra)} further ones that only one of "
                     f"them has are unused ({_shown(extra[0])} …)"
                     + ("" if whole else ", but count in its softmax"))
    elif rows and rows > shared and not whole:
        notes.append(f"teacher {teacher_id!r} has {rows - shared} rows of padding, which count in its softmax (a trained "
                     "model gives them next to nothing)")
    notes += _differences(student, teacher, teacher_id, stop_ids, stop_strings)
    tokens = "same" if theirs and not extra else f"first {shared} same" if theirs else "not told"
    return Agreement(teacher_id, shared, tuple(notes), _facts(student, teacher, backend, longest, shared, tokens))


def _facts(student, teacher, backend, longest, shared, tokens) -> dict[str, Any]:
    """What the table shows."""
    capabilities = teacher.get("capabilities") or {}
    return {
        "backend": backend, "model": teacher.get("model"), "revision": teacher.get("revision"), "dtype": teacher.get("dtype"),
        "tokens": tokens, "ids": shared, "rows": teacher.get("rows"), "ends": teacher.get("end_ids"),
        "stop_strings": teacher.get("stop_strings") or [], "template": _digest(teacher.get("chat_template")),
        "same_template": _same_template(student, teacher), "context_tokens": teacher.get("context_tokens"),
        "needs_tokens": longest, "gives": {name: capabilities[name] for name in sorted(capabilities)}}


def _by_text(student, teacher, teacher_id, backend, longest, revision) -> Agreement:
    """A teacher that is asked in its own tokens: no id is compared, and none of its ids is cut off."""
    if errors := _unfit(teacher, teacher_id, backend, None, 0, revision):
        raise TeacherError("; ".join(errors))
    same = teacher.get("vocabulary") == student["vocabulary"]
    if same:
        notes = [f"teacher {teacher_id!r} has the student's tokenizer, and teachers.{teacher_id}.cross_tokenizer is set: "
                 "leave it out, and its scores are exact and may be of any kind"]
    else:
        notes = [f"teacher {teacher_id!r} has another tokenizer than the student: it scores the text of sampled tokens, span "
                 "by span, in its own chat template (an approximation, docs/teachers.md)"]
        reads = teacher.get("context_tokens")
        if reads is not None and longest is not None and reads < longest:
            notes.append(f"teacher {teacher_id!r} reads {reads} of its tokens, and contexts may have {longest} of the "
                         "student's: what is longer stays without a score and is counted")
    return Agreement(teacher_id, max(student["vocabulary"], default=-1) + 1, tuple(notes), _facts(
        student, teacher, backend, longest, 0, "same" if same else "another tokenizer"))


def _unfit(teacher, teacher_id, backend, longest, top_k, revision) -> list[str]:
    """Why a teacher whose tokens are right cannot serve this run, each with what could."""
    errors = []
    can = teacher.get("capabilities") or {}
    reads = teacher.get("context_tokens")
    if reads is not None and longest is not None and reads < longest:
        errors.append(f"teacher {teacher_id!r} reads {reads} tokens, but the longest context of its domains may have "
                      f"{longest}; lower their max_context_tokens, or start it with a longer context")
    if revision and teacher.get("revision") and not str(teacher["revision"]).startswith(revision):
        errors.append(f"teacher {teacher_id!r} is revision {teacher['revision']}, but teachers.{teacher_id}.revision says "
                      f"{revision}; correct the one that is wrong")
    if backend == "hf":
        return errors
    if not can.get("sampled", True):
        errors.append(f"teacher {teacher_id!r} gives no log-probabilities of given tokens; serve it with `mopd teacher "
                      "serve`")
    most = can.get("max_k")
    if top_k and most is not None and most < top_k:
        errors.append(f"teacher {teacher_id!r} tells no more than {most} likeliest ids, and train.objective_options.k is "
                      f"{top_k}; " + (f"take k={most}, or " if most else "") + "start it with a higher limit (`mopd teacher "
                      f"serve` takes k from the configuration or --max-logprobs {top_k}), or take mopd or sampled_kl")
    return errors


def _differences(student, teacher, teacher_id, stop_ids, stop_strings) -> list[str]:
    """Notes about ends, roles, special tokens and the chat template."""
    notes, names = [], student["vocabulary"]
    ours, theirs = set(student.get("end_ids") or ()), set(teacher.get("end_ids") or ())
    if theirs and ours and ours != theirs:
        notes.append(f"teacher {teacher_id!r} ends its texts with {_tokens(theirs, names)}, the student with "
                     f"{_tokens(ours, names)}: the student learns the teacher's end only as far as it samples it")
    if theirs and stop_ids and not theirs & set(stop_ids):
        notes.append(f"turns of this run end with {_tokens(stop_ids, names)}, which is no end for teacher {teacher_id!r}: "
                     "its score of every turn's last token may be low without meaning anything")
    if strings := sorted(set(teacher.get("stop_strings") or ()) - set(stop_strings)):
        notes.append(f"teacher {teacher_id!r} also stops at the texts {', '.join(map(repr, strings))}, which this run does "
                     "not know as ends (sampling.stop_strings)")
    for role, number in (student.get("roles") or {}).items():
        other = (teacher.get("roles") or {}).get(role, number)
        if role != "eos" and other != number:
            notes.append(f"teacher {teacher_id!r}: its {role} token is {_tokens([other], names)}, the student's "
                         f"{_tokens([number], names)}; scores do not depend on it")
    special = teacher.get("special")
    if special is not None and (different := sorted(set(special) ^ set(student.get("special") or ()))):
        where = "the teacher" if different[0] in special else "the student"
        notes.append(f"teacher {teacher_id!r}: {_tokens(different[:1], names)} is a special token only for {where}; ids mean "
                     "the same, so scores do not depend on it")
    if _same_template(student, teacher) is False:
        notes.append(f"teacher {teacher_id!r} comes with another chat template than the student's; it scores the student's "
                     "prompts as they are, in a form that it may not have been trained on")
    return notes


def _told(teacher: Mapping[str, Any]) -> dict[str, list[int]]:
    return {text: ids for text, ids in (teacher.get("tokenized") or {}).items() if ids is not None}


def _same_spelling(student: Mapping[str, Any], teacher: Mapping[str, Any], teacher_id: str) -> None:
    """Texts that the teacher's own tokenizer turned into ids must become the same ids here."""
    for text, ids in _told(teacher).items():
        ours = student["spelled"].encode(text, add_special_tokens=False) if student.get("spelled") is not None else ids
        if list(ours) != list(ids):
            raise TokenizerMismatch(f"teacher {teacher_id!r} has another tokenizer than the student: {text!r} is {list(ids)} "
                                    f"there and {list(ours)} here; scores of token ids would be meaningless. Take a teacher "
                                    "that was trained with the student's tokenizer")


def _same_template(student: Mapping[str, Any], teacher: Mapping[str, Any]) -> bool | None:
    if not teacher.get("chat_template"):
        return None
    return teacher["chat_template"] == student.get("chat_template")


def _digest(text: Any) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()[:12] if text else ""


def _tokens(numbers: Collection[int | None], names: Mapping[int, str]) -> str:
    known = sorted(n for n in numbers if n is not None)
    return ", ".join(f"{names.get(n, '?')!r} ({n})" for n in known) or "nothing"


def _numbers(value: Any) -> list[int]:
    return [] if value is None else [int(value)] if isinstance(value, int) else [int(v) for v in value]


def _texts(value: Any) -> list[str]:
    return [] if value is None else [value] if isinstance(value, str) else list(value)


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)
