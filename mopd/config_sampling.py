"""The configuration of sampling: how far it runs ahead of training, who samples, and how the mix is kept.

Nothing here imports torch. What ties these keys to others is in `sampling_errors`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from mopd.config_engine import VLLMOptionsConfig, engine_errors


@dataclasses.dataclass
class MixerConfig:
    """The sample mixer of a run with overlap; see MixerOptions in mopd/mixer_machine.py and docs/mixer.md."""

    alpha: float = 0.5  # share of the steady mix in the launch weights; the rest follows what the step lacks
    oversampling_mean: float | None = None  # none: what keeps the trainer supplied, and no more than fills the slots
    oversampling_minimum: float = 0.0
    oversampling_maximum: float | None = None  # steps' worth in flight beyond one; none: sampling.overlap
    headroom: float = 2.0  # most in flight, over the slots, where there is no mean
    ahead: float | None = None  # steps' worth that may be finished beyond the step that is collected; none: overlap - 1
    max_age: int | None = None  # versions that a finished group may wait; none: sampling.overlap
    kv_safety: float = 1.5  # a sequence is admitted where this many times its predicted KV need is free
    bypass: int = 32  # sequences that may overtake one that fits nowhere
    memory: int = 128  # launches over which the running means reach back
    max_rejected: int = 500  # groups of one source refused in a row after which the run ends


@dataclasses.dataclass
class PriorConfig:
    """What is believed of a domain's rollouts before the first has ended."""

    seconds: float = 1.0
    tokens: float = 1.0


@dataclasses.dataclass
class DriftConfig:
    """The shift towards stored prefixes where a domain's rollouts leave the teacher's ground (mopd/mixer_drift.py)."""

    enabled: bool = False
    ratio_high: float = 2.0  # the prefix fraction rises where rollout KL over prefix KL is above it
    ratio_low: float = 1.25  # and falls back where it is below it
    step: float = 0.1
    maximum: float = 0.9
    smoothing: float = 0.9
    patience: int = 10


@dataclasses.dataclass
class SamplingConfig:
    """How the student's tokens are sampled."""

    engine: str = "hf"  # hf | vllm | server | package.module:factory
    urls: list[str] = dataclasses.field(default_factory=list)  # server: any number, http://host:port
    served_model: str = ""  # server: the name under which it serves the student; none: its only one
    api_key_env: str = ""  # server: name of the environment variable that holds its key
    engine_timeout_s: float = 600.0  # server: of one turn
    engine_retries: int = 4  # server: of one turn, before it counts as trouble
    engine_wait_s: float = 600.0  # how long a step waits for an engine that writes nothing
    stop_strings: list[str] = dataclasses.field(default_factory=list)  # texts that end a turn, beside the template's end
    vllm_options: VLLMOptionsConfig = dataclasses.field(default_factory=VLLMOptionsConfig)
    engine_options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of an engine of your own
    overlap: int = 0  # versions by which sampling may run ahead of training; 0: strictly on-policy
    samplers: int = 1  # processes that sample while the learner trains (overlap of 1 or more)
    sampler_threads: int = 0  # CPU threads of one of them; 0: an even share of the cores, beside the learner's
    partial_rollouts: bool = True  # unfinished sequences go on under new weights; false: a batch ends what is in flight
    sampler_timeout: float = 600.0  # seconds without a word of a sampler after which it is replaced
    sampler_restarts: int = 5  # replacements of samplers within an hour; one more ends the run
    weights_folder: str = ""  # where new weights lie for samplers and servers; empty: shared memory of this machine
    verify_every: int = 1  # versions between two proofs that an engine has the learner's weights; 1: every hand-over
    weight_transfer: str = "file"  # file | nccl | ipc: how weights reach vLLM servers
    mixer: MixerConfig = dataclasses.field(default_factory=MixerConfig)
    priors: dict[str, PriorConfig] = dataclasses.field(default_factory=dict)  # domain → what its rollouts take
    drift: DriftConfig = dataclasses.field(default_factory=DriftConfig)


# Keys on which no result depends: a run goes on from its checkpoint whatever they are.
WITHOUT_EFFECT = ("urls", "served_model", "api_key_env", "engine_timeout_s", "engine_retries", "engine_wait_s",
                  "samplers", "sampler_threads", "sampler_timeout", "sampler_restarts", "weights_folder", "verify_every",
                  "weight_transfer", "priors")
WEIGHT_TRANSFERS = ("file", "nccl", "ipc")


def sampling_identity(sampling: SamplingConfig) -> dict[str, Any]:
    """What a run's result depends on of this section, as JSON values: the keys that are not at their defaults, so that a new
    key takes no checkpoint out of use."""
    default, given = dataclasses.asdict(SamplingConfig()), dataclasses.asdict(sampling)
    return {key: value for key, value in given.items() if key not in WITHOUT_EFFECT and value != default[key]}


def sampling_errors(config: Any) -> list[str]:
    """What is wrong in the section `sampling` of a Config, and between it and others; each entry starts with its key."""
    sampling, train, errors = config.sampling, config.train, []
    mixer, drift = sampling.mixer, sampling.drift
    for key, value, least in (
            ("overlap", sampling.overlap, 0), ("samplers", sampling.samplers, 1),
            ("sampler_threads", sampling.sampler_threads, 0),
            ("sampler_restarts", sampling.sampler_restarts, 0), ("verify_every", sampling.verify_every, 0),
            ("mixer.alpha", mixer.alpha, 0),
            ("mixer.oversampling_minimum", mixer.oversampling_minimum, 0), ("mixer.headroom", mixer.headroom, 1),
            ("mixer.ahead", mixer.ahead, 0), ("mixer.max_age", mixer.max_age, 0), ("mixer.kv_safety", mixer.kv_safety, 1),
            ("mixer.bypass", mixer.bypass, 0), ("mixer.memory", mixer.memory, 2),
            ("mixer.max_rejected", mixer.max_rejected, 1), ("drift.patience", drift.patience, 1)):
        if value is not None and value < least:
            errors.append(f"sampling.{key}: {value} must be at least {least}")
    if sampling.sampler_timeout <= 0:
        errors.append(f"sampling.sampler_timeout: {sampling.sampler_timeout} must be positive")
    if mixer.alpha > 1:
        errors.append(f"sampling.mixer.alpha: {mixer.alpha} must be at most 1")
    for name, prior in sampling.priors.items():
        if name not in config.domains:
            errors.append(f"sampling.priors.{name}: no such domain; there is {', '.join(sorted(config.domains)) or 'none'}")
        for key in ("seconds", "tokens"):
            if not getattr(prior, key) > 0:
                errors.append(f"sampling.priors.{name}.{key}: {getattr(prior, key)} must be positive")
    if not all(isinstance(text, str) and text for text in sampling.stop_strings):
        errors.append(f"sampling.stop_strings: {sampling.stop_strings} must be texts that are not empty")
    if sampling.weight_transfer not in WEIGHT_TRANSFERS:
        errors.append(f"sampling.weight_transfer: '{sampling.weight_transfer}' is not one of {', '.join(WEIGHT_TRANSFERS)}")
    elif sampling.weight_transfer != "file" and (sampling.engine != "server" or sampling.overlap > 0):
        errors.append(f"sampling.weight_transfer: {sampling.weight_transfer} goes from the learner to servers between two "
                      "steps: it needs sampling.engine=server and sampling.overlap=0; take file")
    errors += engine_errors(config)
    errors += _drift_errors(drift)
    if sampling.overlap < 1:
        return errors
    if sampling.overlap > train.max_staleness:
        errors.append(f"sampling.overlap: {sampling.overlap} is above train.max_staleness={train.max_staleness}: tokens that "
                      "are sampled so far ahead would be left out of the loss; raise train.max_staleness or lower "
                      "sampling.overlap")
    if not sampling.partial_rollouts and sampling.overlap > 1:
        errors.append(f"sampling.partial_rollouts: without partial rollouts a batch ends all that is in flight, so sampling "
                      f"runs ahead by one version at most; set sampling.overlap=1 instead of {sampling.overlap}")
    if mixer.max_age is not None and mixer.max_age > train.max_staleness:
        errors.append(f"sampling.mixer.max_age: {mixer.max_age} is above train.max_staleness={train.max_staleness}: groups "
                      "would wait until none of their tokens trains; lower it")
    highest = oversampling_maximum(sampling)
    if mixer.oversampling_minimum > highest:
        errors.append(f"sampling.mixer.oversampling_minimum: {mixer.oversampling_minimum} is above oversampling_maximum, "
                      f"which is {highest:g}")
    elif mixer.oversampling_mean is not None and not mixer.oversampling_minimum <= mixer.oversampling_mean <= highest:
        errors.append(f"sampling.mixer.oversampling_mean: {mixer.oversampling_mean} is not between oversampling_minimum "
                      f"{mixer.oversampling_minimum:g} and oversampling_maximum {highest:g}")
    return errors


def oversampling_maximum(sampling: SamplingConfig) -> float:
    """Steps' worth of groups in flight beyond one: by default as many as there may be versions between start and use."""
    given = sampling.mixer.oversampling_maximum
    return float(sampling.overlap if given is None else given)


def _drift_errors(drift: DriftConfig) -> list[str]:
    errors = []
    if not 0 < drift.ratio_low <= drift.ratio_high:
        errors.append(f"sampling.drift.ratio_low: {drift.ratio_low} must be positive and at most ratio_high "
                      f"{drift.ratio_high}")
    for key, low, high in (("step", 0, 1), ("maximum", 0, 1)):
        if not low < getattr(drift, key) <= high:
            errors.append(f"sampling.drift.{key}: {getattr(drift, key)} must be above {low} and at most {high}")
    if drift.maximum == 1:
        errors.append("sampling.drift.maximum: must be below 1: without any rollouts nothing could be measured any more")
    if not 0 <= drift.smoothing < 1:
        errors.append(f"sampling.drift.smoothing: {drift.smoothing} must be at least 0 and below 1")
    return errors
