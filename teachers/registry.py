"""Which teacher serves which domain, whether it fits the student, and one loaded copy or connection per checkpoint.

Everything that can be wrong is found before any weight is loaded: `route` reads the config, `handshake` asks both sides who
they are, `scorers` loads the models.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import warnings
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from mopd.config_teachers import TeacherConfig
from mopd.learner.model import check_model_source, load_model
from teachers.handshake import (
    Agreement,
    TokenizerMismatch,
    compare_tokenizers,
    folder_identity,
    introduce,
    tokenizer_identity,
)
from teachers.scoring.backends import make_backend, told
from teachers.scoring.cache import ScoreCache
from teachers.scoring.patience import Patience
from teachers.scoring.requests import TeacherError, TeacherUnreachable

__all__ = ["Mixture", "Route", "TeacherError", "TeacherRegistry", "TeacherSpec", "TokenizerMismatch", "compare_tokenizers",
           "model_revision", "route"]


@dataclasses.dataclass(frozen=True)
class TeacherSpec:
    """One teacher: its id, where its model is and who answers for it; see mopd.config_teachers.TeacherConfig."""

    id: str
    model: str = ""
    trust_remote_code: bool = False
    dtype: str = "float32"
    backend: str = "hf"
    revision: str = ""
    offload: bool = False
    shard: bool = False
    urls: tuple[str, ...] = ()
    served_model: str = ""
    api_key_env: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    timeout_s: float = 120.0
    retries: int = 4
    concurrency: int = 16
    max_request_tokens: int = 65536
    cross_tokenizer: bool = False
    probe_against_model: bool = False
    temperature: float | None = None
    max_tokens: int | None = None

    @classmethod
    def from_config(cls, name: str, config: TeacherConfig, *, dtype: str) -> TeacherSpec:
        """`dtype` where the section of a teacher in this process names none; vLLM takes the checkpoint's own then."""
        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(TeacherConfig)}
        usual = dtype if config.backend == "hf" else ""
        return cls(**values | {"id": name, "urls": tuple(config.urls), "dtype": config.dtype or usual})

    @property
    def place(self) -> tuple:
        """What two teachers that are one checkpoint behind one back end have in common: they share what is loaded."""
        if self.backend == "server":
            return "server", tuple(sorted(self.urls)), self.served_model, self.cross_tokenizer
        path = Path(self.model)
        model = str(path.resolve()) if path.exists() else self.model
        return (self.backend, model, self.revision if not path.exists() else "", self.dtype, self.trust_remote_code,
                self.offload, self.shard, self.tensor_parallel, self.pipeline_parallel, self.cross_tokenizer)


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
        if not spec.model and spec.backend != "server":
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


def _several_ranks() -> bool:
    import torch

    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


class TeacherRegistry:
    """The run's teachers. `route` errors are raised at once, before anything is loaded.

    device       of in-process teachers; `devices` has that of single ones, by name
    cache_bytes  for scores of the others, together
    patience     how long the others are waited for; by default not at all (a launch fails at once)

    agreements holds what the last handshake found, by teacher.
    """

    def __init__(self, teachers: Iterable[TeacherSpec], domains: Mapping[str, str], *,
                 mixtures: Mapping[str, Mixture] | None = None, device: str = "cpu", cache_bytes: int = 256 << 20,
                 patience: Patience | None = None, devices: Mapping[str, str] | None = None):
        self.mixtures = dict(mixtures or {})
        self.route = route(teachers, domains, self.mixtures)
        self.device, self.devices = device, dict(devices or {})
        self.patience, self.cache = patience or Patience(), ScoreCache(cache_bytes)
        self.agreements: dict[str, Agreement] = {}
        self._shared: int | None = None
        self._told: dict[str, dict[str, Any]] = {}
        self._revisions: dict[tuple, str] = {}
        self._backends: dict[tuple, Any] = {}
        self._scorers: dict[tuple, Any] = {}
        self._mixed: dict[tuple, Any] = {}
        self._translators: dict[str, Any] = {}

    def check_sources(self) -> None:
        """Raise ModelNotFound for the first teacher whose folder is missing or incomplete."""
        for spec in self.route.teachers:
            if spec.model:
                check_model_source(spec.model)

    def handshake(self, student_tokenizer: Any, *, student: Mapping[str, Any] | None = None,
                  stop_ids: Collection[int] = (), longest: Mapping[str, int] | None = None,
                  top_k: int = 0, stop_strings: Collection[str] = ()) -> int:
        """Introduce every teacher to the student (see teachers.handshake); returns the number of ids that all share.

        student      its identity; by default what its tokenizer tells
        stop_ids     at which the run ends a turn
        stop_strings texts at which it ends one
        longest      teacher -> tokens of the longest context that it has to read
        top_k        likeliest ids that the run asks of teachers that give no distribution
        No model weights are read but for their fingerprint. Warns of every note; raises TokenizerMismatch or TeacherError
        with everything that does not fit, of all teachers at once.
        """
        self.check_sources()
        student = student or tokenizer_identity(student_tokenizer)
        errors: list[Exception] = []
        for spec in self.route.teachers:
            try:
                found = introduce(student, self.identity(spec), teacher_id=spec.id, backend=spec.backend, stop_ids=stop_ids,
                                  longest=(longest or {}).get(spec.id), top_k=top_k, revision=spec.revision,
                                  cross_tokenizer=spec.cross_tokenizer, stop_strings=stop_strings)
                if spec.cross_tokenizer:
                    self._translators[spec.id] = self._translator(spec, student_tokenizer)
            except (TeacherError, TeacherUnreachable, OSError, ValueError) as error:
                if isinstance(error, TeacherUnreachable) and spec.backend == "server":
                    error = TeacherError(f"teachers.{spec.id}.urls: {error}; start it with `mopd teacher serve`, or correct "
                                         "the address")
                errors.append(error)
                continue
            self.agreements[spec.id] = found
            for note in found.notes:
                warnings.warn(note, stacklevel=2)
        if errors:
            kind = TokenizerMismatch if all(isinstance(e, TokenizerMismatch) for e in errors) else TeacherError
            raise kind("; ".join(map(str, errors)))
        self._shared = min((found.shared for found in self.agreements.values()), default=None)
        return self._shared

    def identity(self, spec: TeacherSpec) -> dict[str, Any]:
        """What a teacher tells about itself, its model's folder included where that can be read; asked once. Raises
        TeacherError, TeacherUnreachable, or OSError where the folder cannot be read."""
        if spec.id not in self._told:
            folder: dict[str, Any] = {}
            answered = {} if spec.backend == "hf" else self.backend(spec).identity()
            source = spec.model or answered.get("tokenizer")
            if source:
                folder = folder_identity(source, revision=spec.revision, trust_remote_code=spec.trust_remote_code)
                folder["dtype"] = spec.dtype or folder["dtype"]
                folder["revision"] = self.revision(spec)
            self._told[spec.id] = told(answered, folder)
        return self._told[spec.id]

    def revision(self, spec: TeacherSpec) -> str:
        """What pins a teacher's weights: its folder's fingerprint, its hub id with the revision, or what its server says."""
        if spec.place not in self._revisions:
            if spec.model:
                found = model_revision(spec.model)
                if not Path(spec.model).is_dir() and spec.revision:
                    found = f"{spec.model}@{spec.revision}"
            else:
                answered = self.backend(spec).identity()
                found = answered.get("revision") or f"{answered.get('model') or spec.served_model} at {', '.join(spec.urls)}"
            self._revisions[spec.place] = str(found)
        return self._revisions[spec.place]

    def backend(self, spec: TeacherSpec) -> Any:
        """The ScoringBackend of a teacher that is not in this process; teachers of one place share it."""
        if spec.place not in self._backends:
            self._backends[spec.place] = make_backend(spec)
        return self._backends[spec.place]

    def _translator(self, spec: TeacherSpec, student_tokenizer: Any) -> Any:
        """From the student's tokens to those of a teacher with another tokenizer. Raises TeacherError."""
        from teachers.scoring.translation import Translator

        speaks = self.identity(spec).get("spelled")
        if speaks is None:
            raise TeacherError(f"teacher {spec.id!r} does not tell its tokenizer, and teachers.{spec.id}.cross_tokenizer "
                               f"needs it; name the folder of what it serves as teachers.{spec.id}.model")
        return Translator(student_tokenizer, speaks, teacher_id=spec.id)

    def gives(self) -> dict[str, frozenset[str]]:
        """Teacher -> what it can deliver to the learner, without loading it; those that the handshake let pass."""
        from teachers.scoring.hf import HFTeacher

        found = {spec.id: HFTeacher.gives if spec.backend == "hf" else frozenset(self.backend(spec).gives)
                 for spec in self.route.teachers if spec.id in self.agreements}
        return found | {spec.id: frozenset({"sampled"}) for spec in self.route.teachers
                        if spec.id in found and spec.cross_tokenizer}

    def scorers(self) -> dict[str, Any]:
        """domain -> HFTeacher, ShardedTeacher (then every rank must call this), RemoteTeacher, or a MixtureScorer of
        several. Teachers that are one checkpoint share one loaded model or connection, whichever domains and mixtures they
        serve."""
        from teachers.scoring.mixture import MixtureScorer

        self.check_sources()
        found = {}
        for domain, spec in self.route.teacher_of.items():
            parts = self.route.mixture_of.get(domain)
            if parts is None:
                found[domain] = self.scorer(spec)
                continue
            key = (parts, self.mixtures[domain].kind)
            if key not in self._mixed:
                self._mixed[key] = MixtureScorer([self.scorer(member) for member, _ in parts],
                                                 [weight for _, weight in parts], self.mixtures[domain].kind)
            found[domain] = self._mixed[key]
        return found

    def scorer(self, spec: TeacherSpec) -> Any:
        """One teacher's TeacherScorer, loaded or connected when first asked for."""
        from teachers.scoring.remote import RemoteTeacher

        if spec.place not in self._scorers and spec.cross_tokenizer:
            self._scorers[spec.place] = self._by_text(spec)
        elif spec.place not in self._scorers and spec.backend != "hf":
            self._scorers[spec.place] = RemoteTeacher(self.backend(spec), revision=self.revision(spec), cache=self.cache,
                                                      patience=self.patience)
        elif spec.place not in self._scorers:
            self._scorers[spec.place] = self._in_process(spec, self._shared)
        return self._scorers[spec.place]

    def _in_process(self, spec: TeacherSpec, vocabulary: int | None) -> Any:
        from teachers.scoring.hf import HFTeacher

        sharded = spec.shard and _several_ranks()
        if spec.shard and not sharded:
            print(f"teachers.{spec.id}.shard has no effect on one rank: the teacher is loaded whole", file=sys.stderr)
        more = {"revision": spec.revision} if spec.revision and not Path(spec.model).is_dir() else {}
        device = self.devices.get(spec.id) or self.device
        model = load_model(spec.model, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code,
                           device="cpu" if spec.offload or sharded else device, **more)
        if sharded:
            from teachers.scoring.sharded import ShardedTeacher

            return ShardedTeacher(model, teacher=spec.id, vocabulary=vocabulary, offload=spec.offload)
        return HFTeacher(model, teacher=spec.id, vocabulary=vocabulary, device=device, offload=spec.offload)

    def _by_text(self, spec: TeacherSpec) -> Any:
        """A teacher with another tokenizer, wherever it runs. Raises RuntimeError before a handshake."""
        from teachers.scoring.cross_tokenizer import CrossTokenizerBackend, CrossTokenizerTeacher
        from teachers.scoring.hf_backend import HFBackend

        if spec.id not in self._translators:
            raise RuntimeError(f"teacher {spec.id!r} has another tokenizer and was not introduced: call handshake first")
        if spec.backend == "hf":
            told_here = self.identity(spec)
            inner = HFBackend(self._in_process(spec, max(told_here["vocabulary"]) + 1), told=told_here)
        else:
            inner = self.backend(spec)
        return CrossTokenizerTeacher(CrossTokenizerBackend(inner, self._translators[spec.id]),
                                     revision=self.revision(spec), cache=self.cache, patience=self.patience)

    def manifest(self) -> dict[str, Any]:
        """Who serves which domain and exactly which weights, as JSON values."""
        from mopd.sampling.rendering import config_hash

        entries = {}
        for spec in self.route.teachers:
            config = Path(spec.model) / "config.json"
            entries[spec.id] = {
                "model": str(spec.model), "revision": self.revision(spec),
                "dtype": spec.dtype or self._told.get(spec.id, {}).get("dtype") or "",
                "config_hash": config_hash(json.loads(config.read_text())) if spec.model and config.is_file() else "",
                "domains": [d for d in self.route.teacher_of if spec in self.route.serving(d)]}
            if spec.backend != "hf":
                entries[spec.id] |= {"backend": spec.backend, "urls": list(spec.urls), "served_model": spec.served_model}
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
        for place, backend in self._backends.items():
            if place not in self._scorers:
                backend.close()
        self._backends.clear()
        self._scorers.clear()
        self._mixed.clear()
