"""Everything that a run does about its teachers from launch to end: probes, scores ahead of need, who served when.

    launch   probes of every teacher, a warning where the teachers changed since the last checkpoint
    before   of a step: its scores are complete, or the run waits; now and then a probe
    after    of a step: tokens counted to the teachers that scored them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.config import Config
from mopd.learner.model import load_model
from mopd.ranks import Ranks
from mopd.rows import Row
from mopd.seeds import stable_seed
from teachers.history import TeacherHistory
from teachers.registry import TeacherRegistry
from teachers.scoring.hf import HFTeacher
from teachers.scoring.hf_backend import HFBackend
from teachers.scoring.probes import TEXTS, TOKENS, Probes, random_texts
from teachers.scoring.remote import RemoteTeacher
from teachers.scoring.requests import TeacherError
from teachers.scoring.service import Scoring


class TeacherWatch:
    """The teachers of one training run.

    registry     its teachers, introduced to the student
    scorers      domain → scorer, as the learner has them
    need, top_k, temperature   what the learner asks them for (mopd.learner.scores.what_to_ask)
    store        for the probes' texts, or None
    ids          token ids that texts may hold, for probes where the store has none
    folder       of the run; rank 0 keeps probes.json there
    """

    def __init__(self, config: Config, registry: TeacherRegistry, scorers: Mapping[str, Any], *, need: str,
                 temperature: float, store: Any, ids: Sequence[int], folder: Path, ranks: Ranks | None = None,
                 top_k: int = 0):
        self.config, self.registry, self.folder, self.ranks = config, registry, folder, ranks or Ranks()
        train = config.train
        registry.patience.wait_s = train.teacher_wait_s
        self.scoring = Scoring(scorers, need=need, top_k=top_k, temperature=temperature,
                               max_unscored_share=train.max_unscored_share)
        if self.scoring.teachers and self.ranks.size > 1 and train.teacher_wait_s >= train.ranks_timeout:
            raise TeacherError(f"train.ranks_timeout: {train.ranks_timeout:g} s must be above train.teacher_wait_s="
                               f"{train.teacher_wait_s:g}: while one rank waits for a teacher, the others wait for it")
        self.history = TeacherHistory()
        backends, texts = {}, {}
        for spec in registry.route.teachers:
            scorer = registry.scorer(spec)
            if any(scorer is known for known, _ in backends.values()):
                continue  # one checkpoint under several names
            backends[spec.id] = (scorer, spec)
            texts[spec.id] = self._texts(spec.id, store, ids)
        # Those that are split over ranks are probed by all ranks, and first: what fails later, fails on rank 0 alone.
        collective = {name: getattr(scorer, "collective", False) for name, (scorer, _) in backends.items()}
        backends = dict(sorted(backends.items(), key=lambda item: not collective[item[0]]))
        self._mine = None if self.ranks.first else [name for name in backends if collective[name]]
        self._specs = {name: spec for name, (_, spec) in backends.items()}
        self.probes = Probes(
            {name: (_backend(scorer), registry.revision(spec), self._dtype(spec))
             for name, (scorer, spec) in backends.items()},
            texts, seed=config.seed, every=train.probe_every, tolerance=train.probe_tolerance)
        self._returns = self._came_back()

    def launch(self, step: int, state: Mapping[str, Any] | None) -> list[str]:
        """Probe every teacher and compare with the last process (`state`: what `state_dict` gave, None for a new run).
        Returns what is to be said, and says it on stderr. Raises TeacherError where a teacher is not what it should be."""
        self.history = TeacherHistory(None if state is None else list(state["periods"]))
        said = [f"teachers changed: {words}" for words in self.history.begin(step, self.registry.manifest())]
        alarms = self.ranks.together("probing the teachers", self._launch_probes)
        self.scoring.begin()
        if self.ranks.first:
            for words in said + alarms:
                print(f"step {step}: {words}", file=sys.stderr)
        return said + alarms

    def _launch_probes(self) -> list[str]:
        if not self.ranks.first:
            self.probes.launch(only=self._mine)
            self._rest()
            return []
        path = self.folder / "probes.json"
        alarms = self.probes.launch(Probes.load(path))
        for name, spec in self._specs.items():
            if spec.probe_against_model:
                self._against_model(name, spec)
        self.probes.save(path)
        self._rest()
        return alarms

    def _against_model(self, name: str, spec: Any) -> None:
        model = load_model(spec.model, dtype=self._dtype(spec) or "float32", trust_remote_code=spec.trust_remote_code,
                           device=self.registry.device)
        drift = self.probes.against(name, HFBackend(HFTeacher(model, teacher=name)), f"{spec.model} in this process")
        if drift.exceeds(tolerance := self.probes.tolerance(name)):
            raise TeacherError(drift.words(tolerance))

    def before(self, step: int, rows: Sequence[Row]) -> dict[str, Any]:
        """Before the learner's step on `rows` (of all ranks): probe where it is due or a server came back, then wait for the
        scores. Returns what the step's record says of it; see Scoring.settle."""
        returns = self._came_back()
        record: dict[str, Any] = {}
        if self.probes.due(step) or returns != self._returns:
            mine = list(self.probes.probe(step, only=self._mine))
            found, alarms = self.ranks.of_first(lambda: mine)
            record = {"probes": found, "alarms": list(alarms.values())}
            for name, words in alarms.items():
                if self.ranks.first:
                    print(f"step {step}: ALARM: {words}", file=sys.stderr)
                self.registry.cache.forget(self.probes.backends[name][1])
        self._returns = returns
        return record | self.scoring.settle(rows, self.ranks)

    def after(self, metrics: Mapping[str, Any]) -> None:
        """Count a step's scored tokens (`metrics` as LearnerStep gives them)."""
        self.history.count({name: round(numbers.get("tokens", 0) * (1 - numbers.get("unscored_share", 0.0)))
                            for name, numbers in metrics.get("domains", {}).items()})

    def state_dict(self) -> dict[str, Any]:
        """JSON values for a checkpoint: who served from which step on, with tokens scored until now."""
        return {"periods": self.history.periods}

    def write_manifest(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The run's manifest with `teacher_history` until now; rank 0 writes it to manifest.json."""
        whole = {**manifest, "teacher_history": self.history.periods}
        if self.ranks.first:
            (self.folder / "manifest.json").write_text(json.dumps(whole, indent=1))
        return whole

    def _dtype(self, spec: Any) -> str:
        """Of a teacher's weights, "" where nobody says."""
        return spec.dtype or self.registry.identity(spec).get("dtype") or ""

    def _came_back(self) -> int:
        """How often servers came back after they had been down, over all teachers of this process; with several ranks only
        the steps of `probe_every` count, which all ranks know alike."""
        if self.ranks.size > 1:
            return 0
        return sum(getattr(teacher.backend, "returns", 0) for teacher in self.scoring.teachers)

    def _rest(self) -> None:
        for spec in self._specs.values():
            self.registry.scorer(spec).rest()

    def _texts(self, name: str, store: Any, ids: Sequence[int]) -> list[np.ndarray]:
        """What its domains' stored prefixes begin with, drawn by the seed alone; random ids where nothing is stored."""
        domains = [d for d in self.registry.route.teacher_of
                   if any(spec.id == name for spec in self.registry.route.serving(d))]
        longest = min([TOKENS, *(self.config.domains[d].max_context_tokens for d in domains)])
        rng = np.random.default_rng(stable_seed(self.config.seed, "probes", name))
        found = []
        for domain in domains if store is not None else ():
            points = store.decision_points(domain)
            for number in rng.integers(len(points), size=TEXTS) if len(points) else ():
                text = np.asarray(store.prefix(points[int(number)]))[-longest:]
                if len(text) >= 2:
                    found.append(text)
        found = [found[i] for i in sorted(rng.permutation(len(found))[:TEXTS])]
        return found or random_texts(ids, self.config.seed, longest=longest)


def _backend(scorer: Any) -> Any:
    """A ScoringBackend of a teacher's scorer."""
    return scorer.backend if isinstance(scorer, RemoteTeacher) else HFBackend(scorer)
