"""Which teacher serves which domain, whether it speaks the student's token ids, and one loaded copy per checkpoint.

Everything that can be wrong is found before any weight is loaded: `route` reads the config, `handshake` the
tokenizers, `load` the models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mopd.learner.model import check_model_source, load_model
from mopd.sampling.rendering import tokenizer_hash


class TeacherError(ValueError):
    """Teachers and domains do not fit; the message names the domain or teacher and the remedy."""


class TokenizerMismatch(TeacherError):
    """A teacher gives its ids another meaning than the student; the message names the first id that differs."""


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
    """One teacher: its id and where its model is (a Hugging Face folder or hub id)."""

    id: str
    model: str
    trust_remote_code: bool = False
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Several teachers of one domain: id -> weight, mixed in `kind` "probability" or "log_space" (mopd.losses.mixture)."""

    weights: Mapping[str, float]
    kind: str = "probability"


@dataclasses.dataclass(frozen=True)
class Route:
    """Domain -> teacher, checked. `unused` are configured teachers that no domain names; `mixture_of` has the weighted
    teachers of the domains that several score together."""

    teacher_of: dict[str, TeacherSpec]
    unused: tuple[str, ...]
    mixture_of: dict[str, tuple[tuple[TeacherSpec, float], ...]] = dataclasses.field(default_factory=dict)

    def teacher(self, domain: str) -> TeacherSpec:
        """Raises TeacherError for a domain that is not in the run; nothing is ever sent to a default teacher."""
        if domain not in self.teacher_of:
            raise TeacherError(f"unknown domain {domain!r}; the run's domains are {', '.join(self.teacher_of)}")
        return self.teacher_of[domain]

    @property
    def teachers(self) -> list[TeacherSpec]:
        """The teachers in use, each once."""
        return list(dict.fromkeys(spec for domain in self.teacher_of for spec in self.serving(domain)))

    def serving(self, domain: str) -> list[TeacherSpec]:
        """The teachers that score a domain's samples: one, or those of its mixture."""
        if domain in self.mixture_of:
            return [spec for spec, _ in self.mixture_of[domain]]
        return [self.teacher(domain)]


def route(teachers: Iterable[TeacherSpec], domains: Mapping[str, str],
          mixtures: Mapping[str, Mixture] | None = None) -> Route:
    """Check `domains` (domain -> teacher id) and `mixtures` (domain -> several in its place) against `teachers`; raises
    TeacherError with all errors at once, warns of teachers that nobody uses."""
    mixtures = mixtures or {}
    known = {spec.id: spec for spec in teachers}
    names = ", ".join(sorted(known)) or "none"
    errors = []
    for domain, wanted in domains.items():
        if not wanted:
            errors.append(f"domain {domain!r} has no teacher; name one of the configured teachers ({names}) as "
                          f"domains.{domain}.teacher")
        elif wanted not in known:
            errors.append(f"domain {domain!r} names teacher {wanted!r}, which is not configured; "
                          f"add teachers.{wanted} or name one of: {names}")
    for domain, mixture in mixtures.items():
        if domain not in domains:
            errors.append(f"a mixture of teachers is given for domain {domain!r}, which is not in the run")
        for wanted, weight in mixture.weights.items():
            if wanted not in known:
                errors.append(f"domain {domain!r} names teacher {wanted!r} in its mixture, which is not configured; "
                              f"add teachers.{wanted} or name one of: {names}")
            if not weight > 0:
                errors.append(f"domain {domain!r} gives teacher {wanted!r} the weight {weight}; weights must be positive")
    for spec in known.values():
        if not spec.model:
            errors.append(f"teacher {spec.id!r} has no model; set teachers.{spec.id}.model to a Hugging Face folder or "
                          "hub id")
    if errors:
        raise TeacherError("; ".join(errors))
    scoring = {t for domain, t in domains.items() if domain not in mixtures}
    unused = tuple(sorted(set(known) - scoring - {t for mixture in mixtures.values() for t in mixture.weights}))
    if unused:
        warnings.warn(f"no domain uses teacher {', '.join(unused)}; it will not be loaded", stacklevel=2)
    return Route({domain: known[wanted] for domain, wanted in domains.items()}, unused, {
        domain: tuple((known[wanted], weight) for wanted, weight in mixture.weights.items())
        for domain, mixture in mixtures.items()})


def compare_tokenizers(student: Any, teacher: Any, *, teacher_id: str) -> int:
    """The number of ids of two tokenizers that agree: every id the same token, the same ids special, the same roles.

    Output matrices may have further rows (padding); they are cut off where scores are made. Raises TokenizerMismatch
    naming the first id that differs."""
    ours = {int(i): token for token, i in student.get_vocab().items()}
    theirs = {int(i): token for token, i in teacher.get_vocab().items()}
    for number in sorted(ours.keys() | theirs.keys()):
        if ours.get(number) != theirs.get(number):
            raise TokenizerMismatch(
                f"teacher {teacher_id!r} has another tokenizer than the student: id {number} is "
                f"{_shown(theirs.get(number))} there and {_shown(ours.get(number))} here; scores of token ids would be "
                "meaningless. Take a teacher that was trained with the student's tokenizer")
    for role in ("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"):
        if getattr(student, role, None) != getattr(teacher, role, None):
            raise TokenizerMismatch(f"teacher {teacher_id!r}: {role} is {getattr(teacher, role, None)}, the student's "
                                    f"is {getattr(student, role, None)}; save both with one tokenizer")
    ours_special, theirs_special = set(student.all_special_ids), set(teacher.all_special_ids)
    if different := sorted(ours_special ^ theirs_special):
        where = "the teacher" if different[0] in theirs_special else "the student"
        raise TokenizerMismatch(f"teacher {teacher_id!r}: id {different[0]} ({_shown(ours.get(different[0]))}) is a "
                                f"special token only for {where}; save both with one tokenizer")
    return max(ours, default=-1) + 1


def _shown(token: str | None) -> str:
    return "missing" if token is None else repr(token)


def model_revision(source: str | Path) -> str:
    """What pins a model: 32 hex digits of a SHA-256 over its config and safetensors; a hub id stands for itself."""
    folder = Path(source)
    if not folder.is_dir():
        return str(source)
    digest = hashlib.sha256()
    for path in [folder / "config.json", *sorted(folder.glob("*.safetensors"))]:
        digest.update(path.name.encode())
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()[:32]


class TeacherRegistry:
    """The run's teachers. `route` errors are raised at once, before anything is loaded."""

    def __init__(self, teachers: Iterable[TeacherSpec], domains: Mapping[str, str], *,
                 mixtures: Mapping[str, Mixture] | None = None, device: str = "cpu"):
        self.mixtures = dict(mixtures or {})
        self.route = route(teachers, domains, self.mixtures)
        self.device = device
        self._shared: int | None = None
        self._scorers: dict[tuple, Any] = {}
        self._mixed: dict[tuple, Any] = {}

    def check_sources(self) -> None:
        """Raise ModelNotFound for the first teacher whose folder is missing or incomplete."""
        for spec in self.route.teachers:
            check_model_source(spec.model)

    def handshake(self, student_tokenizer: Any) -> int:
        """Compare every teacher's tokenizer with the student's; returns the number of ids that they share. Raises
        TokenizerMismatch. No model weights are read."""
        from transformers import AutoTokenizer

        self.check_sources()
        ours = tokenizer_hash(student_tokenizer)
        sizes = []
        for spec in self.route.teachers:
            theirs = AutoTokenizer.from_pretrained(spec.model, trust_remote_code=spec.trust_remote_code)
            size = compare_tokenizers(student_tokenizer, theirs, teacher_id=spec.id)
            if tokenizer_hash(theirs) != ours:
                raise TokenizerMismatch(f"teacher {spec.id!r}: the tokenizer's fingerprint differs from the student's")
            sizes.append(size)
        self._shared = min(sizes, default=None)
        return self._shared

    def scorers(self) -> dict[str, Any]:
        """domain -> HFTeacher, or a MixtureScorer of several. Teachers that are one checkpoint share one loaded model,
        whichever domains and mixtures they serve."""
        from teachers.scoring.mixture import MixtureScorer

        self.check_sources()
        found = {}
        for domain, spec in self.route.teacher_of.items():
            parts = self.route.mixture_of.get(domain)
            if parts is None:
                found[domain] = self._scorer(spec)
                continue
            key = (parts, self.mixtures[domain].kind)
            if key not in self._mixed:
                self._mixed[key] = MixtureScorer([self._scorer(member) for member, _ in parts],
                                                 [weight for _, weight in parts], self.mixtures[domain].kind)
            found[domain] = self._mixed[key]
        return found

    def _scorer(self, spec: TeacherSpec) -> Any:
        from teachers.scoring.hf import HFTeacher

        path = Path(spec.model)
        key = (str(path.resolve()) if path.exists() else spec.model, spec.dtype, spec.trust_remote_code)
        if key not in self._scorers:
            model = load_model(spec.model, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code, device=self.device)
            self._scorers[key] = HFTeacher(model, teacher=spec.id, vocabulary=self._shared)
        return self._scorers[key]

    def manifest(self) -> dict[str, Any]:
        """Who serves which domain and exactly which weights, as JSON values."""
        from mopd.sampling.rendering import config_hash

        entries = {}
        for spec in self.route.teachers:
            config = Path(spec.model) / "config.json"
            entries[spec.id] = {
                "model": str(spec.model), "revision": model_revision(spec.model), "dtype": spec.dtype,
                "config_hash": config_hash(json.loads(config.read_text())) if config.is_file() else "",
                "domains": [d for d in self.route.teacher_of if spec in self.route.serving(d)]}
        found = {"teachers": entries, "unused": list(self.route.unused)}
        if self.mixtures:
            found["mixtures"] = {d: {"kind": m.kind, "weights": dict(m.weights)} for d, m in self.mixtures.items()}
        return found

    def check_unchanged(self) -> None:
        """Raise RuntimeError where a loaded teacher's weights changed."""
        for scorer in self._scorers.values():
            scorer.check_unchanged()

    def close(self) -> None:
        for scorer in self._scorers.values():
            scorer.close()
        self._scorers.clear()
        self._mixed.clear()
