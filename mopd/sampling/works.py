"""What a work plays: its task, its decision point and its random draws, as functions of the run's seed and the work alone.

Stands between the works that a sampler is given (work.py) and what the loop drives (episode.py, fresh_turn.py).
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mopd.domains import Domain
from mopd.mixer_events import GroupId
from mopd.rows import Row
from mopd.sampling.base import SamplingOptions
from mopd.sampling.episode import Episode, EpisodeSpec, Playing
from mopd.sampling.fresh_turn import FreshTurnPoint
from mopd.sampling.rendering import ChatRenderer
from mopd.sampling.resume import Resumer, Resumption
from mopd.sampling.sharing import StartedAt
from mopd.sampling.work import Work
from mopd.seeds import stable_seed
from prefix_store import PrefixStore
from prefix_store.trajectory import DecisionPoint, Fingerprint, Source

KEPT_PREFIXES = 64
# decision points whose tokens are remembered: the fresh turns of one are given one after the other


def source_of(group: GroupId) -> tuple[str, str]:
    """(domain, stream) of a launched group."""
    domain, _, stream = group.source.rpartition("/")
    return domain, stream


def seed_of(run_seed: int, work: Work) -> int:
    """What decides every draw of a work."""
    group = (run_seed, work.group.source, work.group.number)
    return stable_seed(*group, work.member) if work.point is None else stable_seed(*group, work.point.turn, work.member)


class Works:
    """Makes what is played of works.

    domains       name → Domain with its pool and harness
    store         a PrefixStore at the run's version; None where no stream goes on from stored points
    seed          of the run
    student       its name
    resume_turns  domain → turns that are played on from a decision point; 1, as where none is given, takes no environment
    """

    def __init__(self, *, domains: Mapping[str, Domain], store: PrefixStore | None, renderer: ChatRenderer,
                 fingerprint: Fingerprint, seed: int, student: str, temperature: float = 1.0, top_p: float = 1.0,
                 top_k: int = 0, resume_turns: Mapping[str, int] | None = None):
        self.domains, self.store, self.renderer, self.seed = domains, store, renderer, seed
        self.fingerprint, self.source = fingerprint, Source("student", student)
        longest = max((h.max_turn_tokens for d in domains.values() for h in d.harnesses.values()), default=1)
        self.options = SamplingOptions(temperature, top_p, top_k, longest, renderer.stop_ids,
                                       renderer.stop_strings)
        turns = {name: number for name, number in (resume_turns or {}).items() if number > 1}
        self.resumer = Resumer(domains=domains, store=store, renderer=renderer, turns=turns) if turns and store else None
        self._prefixes: collections.OrderedDict[DecisionPoint, np.ndarray] = collections.OrderedDict()

    def check(self, work: Work) -> None:
        """Raise ValueError for a work that nobody could play here."""
        domain, stream = source_of(work.group)
        if domain not in self.domains:
            raise ValueError(f"{work.group}: there is no domain {domain!r}; there is {', '.join(self.domains)}")
        if (work.point is None) != (stream == "rollout"):
            raise ValueError(f"{work.group}, sequence {work.member}: a work of stream {stream!r} "
                             f"{'needs' if work.point is None else 'has no'} decision point")
        if work.point is not None and self.store is None:
            raise ValueError(f"{work.group} goes on from a stored prefix, but no prefix store is open")

    def plays(self, work: Work) -> bool:
        """Whether an environment is needed."""
        return work.point is None or (self.resumer is not None and source_of(work.group)[0] in self.resumer.turns)

    def playing(self, work: Work, number: int) -> Playing:
        """The episode of a work that `plays`. Raises KeyError and DamagedData where the store does not give its point."""
        name = source_of(work.group)[0]
        domain, start = self.domains[name], None
        if work.point is None:
            # All sequences of a group: they are compared with each other.
            task = domain.draw("train", self.seed, work.group.source, work.group.number)
            harness = domain.harnesses.pick(self.seed, work.group.source, work.group.number)
        else:
            conversation = self.resumer.conversation(name, work.point.sequence)
            task, harness = conversation.recording.task, conversation.harness_name
            start = Resumption(self._prefix(work.point), work.point.turn, self.resumer.turns[name], conversation,
                               domain.replayer)
        spec = EpisodeSpec(name, task, seed_of(self.seed, work), 0, work.member, start, harness)
        return Playing(spec, domain.harnesses, self.renderer, family=domain.pool.family, source=self.source,
                       fingerprint=self.fingerprint, number=number)

    def fresh_turn(self, work: Work) -> FreshTurnPoint:
        """The decision point of a work that is one fresh turn, with its seed. Raises KeyError and DamagedData as the store
        does."""
        name, stream = source_of(work.group)
        key = (stream, work.group.number, work.point.sequence, work.point.context)
        return FreshTurnPoint(domain=name, stream=stream, row=key, prefix=self._prefix(work.point), turn=work.point.turn,
                              seeds=(seed_of(self.seed, work),), group=0, sequence=0, at=work.point)

    def turn_tokens(self, domain: str) -> int:
        """Most tokens of one turn."""
        return self.domains[domain].harness.max_turn_tokens

    def _prefix(self, point: DecisionPoint) -> np.ndarray:
        if point not in self._prefixes:
            self._prefixes[point] = self.store.prefix(point)
            if len(self._prefixes) > KEPT_PREFIXES:
                self._prefixes.popitem(last=False)
        self._prefixes.move_to_end(point)
        return self._prefixes[point]


def without_tokens(episode: Episode) -> Episode:
    """What records read of an episode, fit to be sent: its tokens travel as rows."""
    spec = episode.spec
    start = None if spec.start is None else StartedAt(spec.start.turn)
    return dataclasses.replace(episode, sequence=None, spec=dataclasses.replace(spec, start=start))


def renumber(rows: Iterable[Row], *, group: int, sequence: int, outcome_advantage: float = 0.0) -> list[Row]:
    """Rows of one sequence with the numbers that it has within a step."""
    changes: dict[str, Any] = {"group": group, "sequence": sequence, "outcome_advantage": outcome_advantage}
    return [dataclasses.replace(row, actions=tuple(dataclasses.replace(action, **changes) for action in row.actions))
            for row in rows]
