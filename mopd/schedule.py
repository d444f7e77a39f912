"""What each step of a run is made of: counts by domain and stream, with shares that may follow what was measured."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from mopd.config import Config, stream_shares
from mopd.config_sampling import oversampling_maximum
from mopd.mixer import Composer, DomainSchedule, StepPlan
from mopd.mixer_drift import DriftOptions, PrefixDrift, prefix_fraction, with_prefix_fraction
from mopd.mixer_estimates import Prior
from mopd.mixer_machine import Mixer, MixerOptions, SourceOptions

NOTHING_KNOWN = Prior(seconds=1e-3)
# of a source whose work has not ended yet: too low a guess costs the trainer one wait, too high a one sends work ahead that
# is too old when it is needed


@dataclasses.dataclass(frozen=True)
class Plan:
    """Samples of one step: counts[domain][stream]; shares[domain] is the domain's share of the whole loss. Where prefix
    fractions move, `streams` is domain → {stream: share of its samples}; None: they are the configured ones."""

    step: int
    counts: dict[str, dict[str, int]]
    shares: dict[str, float]
    streams: dict[str, dict[str, float]] | None = None

    def to_json(self) -> dict:
        return dataclasses.asdict(self)


def sample_streams(config: Config) -> dict[str, dict[str, float]]:
    """Domain → {stream: share of its samples}. The stored turns' own stream rides on the samples of the prefix streams."""
    return {name: {s: w for s, w in stream_shares(config, name).items() if s != "demonstration" and w > 0}
            for name in config.domains}


def loss_streams(config: Config, domain: str, samples: Mapping[str, float]) -> dict[str, float]:
    """Share of every stream in the domain's loss where its samples are shared out as `samples` says: 1 − λ of it like them, λ
    (the configured one) to the stored turns."""
    configured, total = stream_shares(config, domain), math.fsum(samples.values())
    lam = configured["demonstration"]
    return {stream: lam if stream == "demonstration" else (1 - lam) * samples.get(stream, 0.0) / total
            for stream in configured}


def domain_schedule(config: Config) -> DomainSchedule:
    """The domains' shares; they move where train.domain_schedule is adaptive and there is something to move between."""
    train, adaptive = config.train, is_adaptive(config)
    return DomainSchedule(
        {name: domain.share for name, domain in config.domains.items()}, gamma=train.adaptive_gamma,
        minimum=train.adaptive_minimum if adaptive else 0.0, maximum=train.adaptive_maximum if adaptive else 1.0,
        smoothing=train.adaptive_smoothing, kl_smoothing=train.adaptive_kl_smoothing, patience=train.adaptive_patience)


def is_adaptive(config: Config) -> bool:
    return config.train.domain_schedule == "adaptive" and len(config.domains) > 1


def prefix_drift(config: Config) -> PrefixDrift | None:
    """What moves prefix fractions, None where sampling.drift is off."""
    drift = config.sampling.drift
    if not drift.enabled:
        return None
    options = {f.name: getattr(drift, f.name) for f in dataclasses.fields(DriftOptions)}
    return PrefixDrift({name: prefix_fraction(streams) for name, streams in sample_streams(config).items()},
                       DriftOptions(**options))


def plan_of(made: StepPlan, *, moving: bool) -> Plan:
    """The plan of a composed step; `moving`: its stream shares are not the configured ones for ever."""
    counts: dict[str, dict[str, int]] = {name: {} for name in made.shares}
    for (domain, stream), count in made.cells.items():
        counts[domain][stream] = count
    return Plan(made.step, counts, dict(made.shares), made.streams if moving else None)


class Schedule:
    """Plans steps in order for a run's config. A sample is a task to play or a stored trajectory to resume from."""

    def __init__(self, config: Config):
        streams = sample_streams(config)
        self.composer = Composer(tuple(config.domains), config.train.samples_per_step, streams)
        self.adaptive, self.shares, self.drift = is_adaptive(config), domain_schedule(config), prefix_drift(config)
        self._streams = {domain: dict(parts) for domain, parts in self.composer.streams.items()}

    def next(self) -> Plan:
        """The plan of the next step; call once per step, in order."""
        shares = dict(self.shares.shares)
        made = plan_of(self.composer.next(shares), moving=self.drift is not None)
        return dataclasses.replace(made, shares=shares)

    def observe(self, reverse_kl: Mapping[str, float],
                by_stream: Mapping[str, tuple[float | None, float | None]] | None = None) -> list[str]:
        """Take a step's mean reverse KL per token by domain (absent or not finite where there is none, as with an
        objective that reports no such number) and move adaptive shares; `by_stream` (of rollouts, of fresh turns at
        prefixes; None where there were none) moves prefix fractions. Returns sentences for the log."""
        notes = []
        if self.adaptive:
            known = {domain: value for domain, value in reverse_kl.items() if math.isfinite(value)}
            # The mean of an estimate can dip below zero where student and teacher agree.
            notes += self.shares.update({domain: max(value, 0.0) for domain, value in known.items()})[1]
            notes += [f"domain {domain}: no finite reverse KL this step, so its share does not follow it"
                      for domain in reverse_kl if domain not in known]
        if self.drift is not None and by_stream:
            fractions, said = self.drift.update(by_stream)
            if said:
                self.composer.set_streams({d: with_prefix_fraction(self._streams[d], f) for d, f in fractions.items()})
            notes += said
        return notes

    def state_dict(self) -> dict:
        """Everything that the following plans depend on, as JSON values."""
        return {"composer": self.composer.state_dict(), "shares": self.shares.state_dict(),
                "drift": self.drift.state_dict() if self.drift else None}

    def load_state_dict(self, state: Mapping) -> None:
        self.composer.load_state_dict(state["composer"])
        self.shares.load_state_dict(state["shares"])
        if self.drift is not None:
            self.drift.load_state_dict(state["drift"])


def mixer_of(config: Config) -> Mixer:
    """The mixer of a run whose sampling runs ahead: overlap k lets it be k versions ahead. What is finished or expected to be
    lies at most k − 1 steps beyond the one that is collected, what is in flight covers at most k steps more than one, and
    nothing is used more than k versions after its newest token (all can be set, see MixerConfig)."""
    sampling, train = config.sampling, config.train
    given, k = sampling.mixer, sampling.overlap
    options = MixerOptions(
        groups_per_step=train.samples_per_step, alpha=given.alpha, oversampling_mean=given.oversampling_mean,
        oversampling_minimum=given.oversampling_minimum, oversampling_maximum=oversampling_maximum(sampling),
        headroom=given.headroom, pace=True, ahead=float(max(k - 1, 0) if given.ahead is None else given.ahead),
        max_age=k if given.max_age is None else given.max_age, carry=sampling.partial_rollouts, kv_safety=given.kv_safety,
        bypass=given.bypass, memory=given.memory, max_rejected=given.max_rejected)
    streams = sample_streams(config)
    sources = {f"{name}/{stream}": SourceOptions(prior=NOTHING_KNOWN) for name, parts in streams.items() for stream in parts}
    for name, domain in config.domains.items():
        prior = sampling.priors.get(name)
        if "rollout" in streams[name]:
            sources[f"{name}/rollout"] = SourceOptions(
                group_size=train.group_size, max_in_flight=max(domain.environments * sampling.samplers, train.group_size),
                prior=NOTHING_KNOWN if prior is None else Prior(seconds=prior.seconds, tokens=prior.tokens))
    shares = {name: domain.share for name, domain in config.domains.items()}
    return Mixer(shares, streams, options, sources, schedule=domain_schedule(config) if is_adaptive(config) else None,
                 drift=prefix_drift(config))


def kl_by_stream(streams: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float | None, float | None]]:
    """Domain → the student's mean reverse KL per token (on rollouts, on fresh turns at stored prefixes), each None where the
    step had none. `streams`: "domain/stream" → numbers, as a step's metrics have them; exact where the teacher gave its
    distribution, else k3."""
    sums: dict[str, list[list[float]]] = {}
    for cell, numbers in streams.items():
        domain, stream = cell.rsplit("/", 1)
        value = numbers.get("reverse_kl", numbers.get("k3"))
        tokens = numbers.get("trained_tokens", 0)
        if stream == "demonstration" or value is None or not math.isfinite(value) or not tokens:
            continue
        part = sums.setdefault(domain, [[0.0, 0.0], [0.0, 0.0]])[stream != "rollout"]
        part[0], part[1] = part[0] + value * tokens, part[1] + tokens
    return {domain: tuple(total / tokens if tokens else None for total, tokens in parts) for domain, parts in sums.items()}
