"""How many samples of each domain and stream the next step takes: shares that move, composed into whole numbers.

A pure state machine without clients or clocks. The plan of step n + 1 is made before step n is trained, so that its
environments can be reset ahead of need; adaptive shares therefore follow the measurements with a lag of one step, which
keeps every plan a function of (config, seed, step).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mopd.config import Config, stream_shares
from mopd.mixer import Composer, DomainSchedule


@dataclasses.dataclass(frozen=True)
class Plan:
    """Samples of one step: counts[domain][stream]; shares[domain] is the domain's share of the whole loss."""

    step: int
    counts: dict[str, dict[str, int]]
    shares: dict[str, float]

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


class Schedule:
    """Plans steps in order for a run's config. A sample is a task to play or a stored trajectory to resume from."""

    def __init__(self, config: Config):
        train = config.train
        base = {name: domain.share for name, domain in config.domains.items()}
        streams = {}
        for name in base:
            # The stored turns' own stream rides on the samples of the prefix streams.
            streams[name] = {s: w for s, w in stream_shares(config, name).items() if s != "demonstration" and w > 0}
        self.composer = Composer(tuple(base), train.samples_per_step, streams)
        self.adaptive = train.domain_schedule == "adaptive" and len(base) > 1
        self.shares = DomainSchedule(
            base, gamma=train.adaptive_gamma, minimum=train.adaptive_minimum if self.adaptive else 0.0,
            maximum=train.adaptive_maximum if self.adaptive else 1.0, smoothing=train.adaptive_smoothing,
            kl_smoothing=train.adaptive_kl_smoothing, patience=train.adaptive_patience)

    def next(self) -> Plan:
        """The plan of the next step; call once per step, in order."""
        shares = dict(self.shares.shares)
        composed = self.composer.next(shares)
        counts: dict[str, dict[str, int]] = {name: {} for name in shares}
        for (domain, stream), count in composed.cells.items():
            counts[domain][stream] = count
        return Plan(composed.step, counts, shares)

    def observe(self, reverse_kl: Mapping[str, float]) -> list[str]:
        """Take a step's mean reverse KL per token by domain (absent or not finite where there is none, as with an
        objective that reports no such number) and move adaptive shares; returns sentences for the log."""
        if not self.adaptive:
            return []
        known = {domain: value for domain, value in reverse_kl.items() if math.isfinite(value)}
        # The mean of an estimate can dip below zero where student and teacher agree.
        notes = self.shares.update({domain: max(value, 0.0) for domain, value in known.items()})[1]
        return notes + [f"domain {domain}: no finite reverse KL this step, so its share does not follow it"
                        for domain in reverse_kl if domain not in known]

    def state_dict(self) -> dict:
        """Everything that the following plans depend on, as JSON values."""
        return {"composer": self.composer.state_dict(), "shares": self.shares.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self.composer.load_state_dict(state["composer"])
        self.shares.load_state_dict(state["shares"])
