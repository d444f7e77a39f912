"""The configuration of a run: typed sections, YAML files that include one another, `key=value` overrides.

Every error of a config is reported in one message, each with its key. Nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mopd.config_base import BaseConfig, base_errors
from mopd.config_deepspeed import DeepSpeedConfig, deepspeed_errors
from mopd.config_domains import HarnessConfig, domain_errors
from mopd.config_placement import PlacementConfig, apply_placement, fleets, placement_errors
from mopd.config_ranges import range_errors
from mopd.config_sampling import SamplingConfig, sampling_errors
from mopd.config_supervised import (
    CollectConfig,
    ConsistencyConfig,
    OptimizerConfig,
    SFTConfig,
    collect_errors,
    one_of,
    play_errors,
    sft_errors,
)
from mopd.config_teachers import TeacherConfig, teacher_errors
from mopd.rows import STREAMS


class ConfigError(ValueError):
    """The configuration is wrong; the message lists every error with its key and what to do. `errors` are these alone."""

    def __init__(self, message: str, errors: typing.Sequence[str] = ()):
        super().__init__(message)
        self.errors = list(errors) or [message]


@dataclasses.dataclass
class DomainConfig:
    """A family of tasks with its environment, its teacher and its share of every batch."""

    environment: str = ""  # a registered name, or package.module:factory from your own package
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    teacher: str = ""  # an id under `teachers`
    teacher_weights: dict[str, float] = dataclasses.field(default_factory=dict)  # several teachers score together
    teacher_mixture: str = "probability"  # probability | log_space
    share: float = 1.0
    prefix_fraction: float | None = None  # overrides train.prefix_fraction for this domain
    resume_turns: int | None = None  # overrides train.resume_turns for this domain
    system_prompt: str | None = None  # replaces the environment's own
    max_turns: int = 12
    max_turn_tokens: int = 24
    max_context_tokens: int = 1024
    max_malformed: int = 0  # an episode ends after so many turns that were no action; 0: it goes on
    action_format: str = "text"  # text | last_line | tag:NAME | regex:PATTERN
    history_window: int = 0  # turns that the model still sees; 0: all
    thinking: bool | None = None  # enable_thinking of the chat template
    thinking_end: str = "</think>"
    harnesses: dict[str, HarnessConfig] = dataclasses.field(default_factory=dict)  # several ways to play, with their shares
    demonstrations: int = 300  # expert episodes
    novice_episodes: int = 300  # episodes of mixed quality, for pre-training a base model
    teacher_episodes: int = 300  # episodes that the teacher plays into the store
    evaluation_episodes: int = 0  # 0: every task of the split
    environments: int = 64  # kept ready at a time
    workers: int = 2  # threads that reset environments ahead of need
    worker_processes: int = 0  # processes for the environments; 0: in the process that samples
    step_timeout_s: float = 120.0  # of worker processes, as the keys that follow
    reset_timeout_s: float = 300.0
    recycle_after: int = 0  # episodes; 0: never
    worker_memory_mib: float = 0.0  # above it a worker is recycled; 0: no limit


@dataclasses.dataclass
class StudentConfig:
    model: str = ""  # Hugging Face folder or id from which the student starts
    trust_remote_code: bool = False
    freeze_router: bool = True
    attention: str = "auto"  # auto | sdpa | eager | flex_attention


@dataclasses.dataclass
class NoviceConfig:
    """Players of mixed quality: with this probability a turn is a random admissible action."""

    random_share: float = 0.6


@dataclasses.dataclass
class SelectionConfig:
    """Which decision points of a stored trajectory the student resumes from."""

    strategy: str = "uniform"  # uniform | uniform_depth | geometric | curriculum | weighted | pivot | package.module:factory
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    points_per_sequence: int = 0  # 0: as many as their weights allow
    success_only: bool = True
    max_prefix_tokens: int | None = None
    min_turns_from_end: int = 0
    max_turns_from_end: int | None = None
    sources: list[str] = dataclasses.field(default_factory=list)  # of a stream's source kinds only these; none: all
    splits: list[str] = dataclasses.field(default_factory=list)  # only tasks of these splits; none: all
    quotas: dict[str, int] = dataclasses.field(default_factory=dict)  # domain → most decision points of a step and stream
    draw: str = "distinct"  # replacement | distinct (within a step) | epoch (until all were drawn)
    scores: str = ""  # file of scores to begin with
    update_scores: bool = True  # measure scores in training, where the strategy draws by them
    record_scores: bool = False  # measure scores whatever the strategy, and write them down
    score_smoothing: float = 0.0  # weight of the past where a point is measured again


@dataclasses.dataclass
class TrainConfig:
    """The MOPD² run itself."""

    name: str = "student_mixed"
    steps: int = 200
    sampled_tokens: int | None = None  # a budget beside `steps`: the run ends with the step that reaches it
    samples_per_step: int = 18  # tasks and stored trajectories together, over all domains
    prefix_fraction: float = 0.5  # share of a domain's samples that resume from stored prefixes
    teacher_prefix_share: float = 0.5  # of those, share whose prefix a teacher played; the rest is demonstrations
    demonstration_fraction: float = 0.0  # weight of the stored turns' own stream (off)
    prefix_gradient: str = "full"  # full | none: prefixes of fresh turns are computed without a graph
    routing_replay: bool = False  # training sends tokens to the experts that the engine sent them to (R3)
    routing_similarity_every: int = 0  # steps between two measures of the experts that teacher and student share; 0: none
    group_size: int = 1  # sequences per rollout task
    outcome_std_normalise: bool = False  # outcome advantages over the standard deviation of their group
    fresh_turns: int = 1  # fresh turns per decision point
    resume_turns: int = 1  # turns that the student plays on from a decision point; above 1 its environment is restored
    objective: str = "forward_kl"
    objective_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    aggregation: str = "token_mean"
    aggregation_to: str | None = None  # the mode to which aggregation moves linearly until the end of the run
    balance: str = "none"  # none | fixed | normalised
    balance_weights: dict[str, float] = dataclasses.field(default_factory=dict)
    domain_schedule: str = "adaptive"  # static | adaptive
    adaptive_gamma: float = 1.0
    adaptive_minimum: float = 0.1
    adaptive_maximum: float = 0.8
    adaptive_smoothing: float = 0.9
    adaptive_kl_smoothing: float = 0.9
    adaptive_patience: int = 40  # steps without a new low of the reverse KL after which a share no longer grows
    temperature: float = 1.0
    top_p: float = 1.0  # the student samples from the likeliest ids that hold this much probability; 1: from all
    top_k: int = 0  # from this many of the likeliest ids; 0: from all
    max_staleness: int = 4  # tokens that older weights than these many versions ago sampled are left out
    staleness_decay: float = 1.0  # weight of a token per version of age
    micro_batch_tokens: int = 4096
    sampling_batch: int = 96
    checkpoint_every: int = 50
    keep_checkpoints: int = 2
    keep_best: str = ""  # reverse_kl | success | reward: the checkpoint that was best by it stays too
    async_checkpoints: bool = True  # written while training goes on; training stops for a copy in memory alone
    keep_every: int = 0  # checkpoints of steps that are multiples of it stay, also when the run is over; 0: none
    stop_within_s: float = 120.0  # after SIGTERM or SIGINT: seconds to finish the step and save
    peak_alert: float = 7.0  # expert load over the mean
    cold_alert: float = 0.3  # share of experts with less than a tenth of the mean
    router_drift_alert: float = 0.2  # share of a trained router's choices that differ from the start's
    max_infra_failure_share: float = 0.5  # above it a run stops instead of training on what is left
    tensorboard: bool = False
    selftest: bool = True
    ranks_timeout: float = 5400.0  # seconds that one process of a job waits for the others
    ranks_warn_s: float = 300.0  # seconds of waiting after which it says for whom; 0: never
    straggler_alert: float = 0.3  # share of a step for which one process held the others up
    max_unscored_share: float = 0.02  # of a teacher's tokens of a step; above it the run waits for the teacher
    teacher_wait_s: float = 3600.0  # how long; 0: fail at once
    score_cache_mib: float = 256.0  # scores of teachers behind a server that are kept
    probe_every: int = 50  # steps between two probes of every teacher; 0: at launch only
    probe_tolerance: float | None = None  # largest drift of a log-probability (nats); none: by the teacher's dtype
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


@dataclasses.dataclass
class EvaluateConfig:
    split: str = "test"
    temperature: float = 0.0
    batch: int = 128
    out: str = "${run}/eval"


@dataclasses.dataclass
class StudyConfig:
    """Arms of `mopd study`: name → overrides of this config."""

    seeds: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    arms: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    off_policy_sft: bool = True
    evaluation: list[str] = dataclasses.field(default_factory=list)  # overrides for the study's larger evaluation


@dataclasses.dataclass
class StudyPrefixConfig:
    """Factors of `mopd study-prefix`: every combination of their levels is an arm, named level-level-…"""

    seeds: list[int] = dataclasses.field(default_factory=lambda: [1, 2])
    factors: dict[str, dict[str, list[str]]] = dataclasses.field(default_factory=dict)  # factor → level → overrides
    common: list[str] = dataclasses.field(default_factory=list)  # overrides of every arm, before those of its levels
    only: list[str] = dataclasses.field(default_factory=list)  # patterns of arm names, such as "uniform-*"; none: all arms
    evaluation: list[str] = dataclasses.field(default_factory=list)  # overrides for the study's evaluation
    runs_per_process: int = 4  # arms that one process trains in turn: fewer starts, longer jobs


@dataclasses.dataclass
class Config:
    run: str = "runs/demo"
    seed: int = 1
    threads: int = 0  # CPU threads of one process; 0: as the environment says
    store: str = "${run}/store"
    domains: dict[str, DomainConfig] = dataclasses.field(default_factory=dict)
    teachers: dict[str, TeacherConfig] = dataclasses.field(default_factory=dict)
    student: StudentConfig = dataclasses.field(default_factory=StudentConfig)
    base: BaseConfig = dataclasses.field(default_factory=BaseConfig)
    novice: NoviceConfig = dataclasses.field(default_factory=NoviceConfig)
    sft: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    sft_domains: dict[str, SFTConfig] = dataclasses.field(default_factory=dict)  # overrides of sft by domain
    off_policy: SFTConfig = dataclasses.field(default_factory=SFTConfig)
    collect: CollectConfig = dataclasses.field(default_factory=CollectConfig)
    consistency: ConsistencyConfig = dataclasses.field(default_factory=ConsistencyConfig)
    selection: SelectionConfig = dataclasses.field(default_factory=SelectionConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    sampling: SamplingConfig = dataclasses.field(default_factory=SamplingConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    study: StudyConfig = dataclasses.field(default_factory=StudyConfig)
    study_prefix: StudyPrefixConfig = dataclasses.field(default_factory=StudyPrefixConfig)
    deepspeed: DeepSpeedConfig = dataclasses.field(default_factory=DeepSpeedConfig)
    placement: PlacementConfig = dataclasses.field(default_factory=PlacementConfig)
    seeds: list[int] = dataclasses.field(default_factory=lambda: [1])  # training seeds of `mopd demo`


def load_config(path: str | Path, overrides: typing.Sequence[str] = (), *, plays: bool = True) -> Config:
    """Read `path` (YAML, with `include: [other.yaml, ...]` relative to it), apply `key=value` overrides, check all.

    plays  False: for a command that can do without environments and teachers, whose domains then need none
    Raises ConfigError with every error found, each with its key.
    """
    def check(config: Config) -> list[str]:
        errors = placement_errors(config)
        if not errors:
            apply_placement(config)
            return semantic_errors(config, plays=plays)
        given = tuple(f"{key}.urls: missing" for key, fleet in fleets(config.placement).items()
                      if fleet.urls or fleet.servers_per_node)  # they come from placement, once that is right
        return errors + [error for error in semantic_errors(config, plays=plays) if not error.startswith(given)]

    return load_as(Config, path, overrides, check)


def load_as(kind: type, path: str | Path, overrides: typing.Sequence[str],
            check: typing.Callable[[Any], list[str]]) -> Any:
    """As `load_config`, for any dataclass `kind` of sections; `check` names what is wrong between its keys."""
    raw = _read(Path(path), ())
    errors: list[str] = []
    for item in overrides:
        key, equals, _ = item.partition("=")
        if not equals or not key.strip():
            errors.append(f"{item}: an override is written key=value, for example train.steps=100")
            continue
        try:
            raw = OmegaConf.merge(raw, OmegaConf.from_dotlist([item]))
        except YAMLError as error:
            errors.append(f"{item}: the value is not valid YAML: {_one_line(error)}")
        except (OmegaConfBaseException, TypeError, ValueError) as error:
            errors.append(f"{item}: does not fit what {key} is elsewhere: {_one_line(error)}")
    try:
        plain = OmegaConf.to_container(raw, resolve=False)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    _walk(kind, plain, "", errors)
    if errors:
        raise ConfigError(_message(path, errors), errors)
    try:
        merged = OmegaConf.merge(OmegaConf.structured(kind), raw)
        config = OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{path}: {_one_line(error)}") from error
    errors = check(config)
    if errors:
        raise ConfigError(_message(path, errors), errors)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Plain nested dictionaries, for JSON and for comparing two configurations."""
    return dataclasses.asdict(config)


def semantic_errors(config: Config, *, plays: bool = True) -> list[str]:
    """What is wrong between keys of a config whose types are right; each entry starts with the key. Without `plays` a domain
    may lack environment and teacher."""
    errors = []
    if not config.domains:
        errors.append("domains: no domain is configured; a run needs at least one, each with an environment and a teacher")
    for name, domain in config.domains.items():
        if not domain.environment and plays:
            errors.append(f"domains.{name}.environment: missing; name an environment or package.module:factory")
        if not domain.teacher and plays:
            errors.append(f"domains.{name}.teacher: this domain has no teacher; name one of {_names(config.teachers)}")
        elif domain.teacher and domain.teacher not in config.teachers:
            errors.append(f"domains.{name}.teacher: no teacher '{domain.teacher}' under teachers; "
                          f"there {_names(config.teachers)}")
        errors += _mixture_errors(config, name)
        if domain.share < 0:
            errors.append(f"domains.{name}.share: {domain.share} is negative")
        if domain.prefix_fraction is not None and not 0 <= domain.prefix_fraction <= 1:
            errors.append(f"domains.{name}.prefix_fraction: {domain.prefix_fraction} is not between 0 and 1")
        if domain.resume_turns is not None and domain.resume_turns < 1:
            errors.append(f"domains.{name}.resume_turns: must be at least 1, or null for train.resume_turns")
        for key in ("max_turns", "max_turn_tokens", "max_context_tokens", "workers", "environments"):
            if getattr(domain, key) < 1:
                errors.append(f"domains.{name}.{key}: must be at least 1")
        _file_name(errors, f"domains.{name}", name)
    if config.domains and sum(d.share for d in config.domains.values()) <= 0:
        errors.append("domains: the shares add up to 0; give at least one domain a positive share")
    for name, teacher in config.teachers.items():
        errors += teacher_errors(name, teacher)
    for name in config.sft_domains:
        if name not in config.domains:
            errors.append(f"sft_domains.{name}: no such domain; there is {_names(config.domains)}")
    for key, options in (("sft", config.sft), ("off_policy", config.off_policy),
                         *((f"sft_domains.{name}", part) for name, part in config.sft_domains.items())):
        errors += sft_errors(options, key, config.deepspeed.zero_stage)
    errors += collect_errors(config.collect, config.domains)
    for name, domain in config.domains.items():
        if (teacher := config.teachers.get(domain.teacher)) is not None and not teacher.cross_tokenizer:
            errors += play_errors(config.collect, name, domain.teacher, teacher.backend)
    for name in config.base.expert_shares:
        if name not in config.domains:
            errors.append(f"base.expert_shares.{name}: no such domain; there is {_names(config.domains)}")
    errors += range_errors(config)
    errors += sampling_errors(config)
    errors += domain_errors(config.domains)
    errors += base_errors(config.base)
    train = config.train
    _file_name(errors, "train.name", train.name)
    for key in ("prefix_fraction", "teacher_prefix_share", "demonstration_fraction", "max_infra_failure_share"):
        if not 0 <= getattr(train, key) <= 1:
            errors.append(f"train.{key}: {getattr(train, key)} is not between 0 and 1")
    for key in ("steps", "samples_per_step", "group_size", "fresh_turns", "resume_turns", "micro_batch_tokens",
                "sampling_batch", "adaptive_patience"):
        if getattr(train, key) < 1:
            errors.append(f"train.{key}: must be at least 1")
    if train.keep_every > 0 and train.checkpoint_every > 0 and train.keep_every % train.checkpoint_every:
        errors.append(f"train.keep_every: {train.keep_every} is not a multiple of train.checkpoint_every="
                      f"{train.checkpoint_every}, so no checkpoint would be kept at most of its multiples")
    if train.sampled_tokens is not None and train.sampled_tokens < 1:
        errors.append(f"train.sampled_tokens: {train.sampled_tokens} must be at least 1, or null for no such budget")
    if config.study_prefix.runs_per_process < 1:
        errors.append("study_prefix.runs_per_process: must be at least 1")
    if train.demonstration_fraction == 1:
        errors.append("train.demonstration_fraction: 1 leaves nothing to the student's own samples; stay below 1, or train "
                      "on stored turns alone with `mopd teacher sft --baseline`")
    if train.balance == "fixed" and set(config.domains) - set(train.balance_weights):
        missing = ", ".join(sorted(set(config.domains) - set(train.balance_weights)))
        errors.append(f"train.balance_weights: train.balance=fixed needs a weight for every domain; missing: {missing}")
    errors += _alpha_errors(config)
    if train.temperature <= 0:
        errors.append(f"train.temperature: {train.temperature} must be positive; greedy samples carry no density")
    for key, top_p in (("train", train.top_p), ("collect", config.collect.top_p)):
        if top_p == 0:
            errors.append(f"{key}.top_p: 0 leaves nothing to sample from; it must be above 0 (1 leaves all)")
    for name in train.balance_weights:
        if name not in config.domains:
            errors.append(f"train.balance_weights.{name}: no such domain; there is {_names(config.domains)}")
    if train.balance == "fixed" and train.balance_weights and not any(train.balance_weights.values()):
        errors.append("train.balance_weights: all are 0, so no domain would be trained")
    one_of(errors, "train.domain_schedule", train.domain_schedule, ("static", "adaptive"))
    one_of(errors, "train.keep_best", train.keep_best, ("", "reverse_kl", "success", "reward"))
    one_of(errors, "train.balance", train.balance, ("none", "fixed", "normalised"))
    one_of(errors, "evaluate.split", config.evaluate.split, ("train", "development", "test"))
    for key, optimizer in (("base", config.base.optimizer), ("sft", config.sft.optimizer), ("train", train.optimizer),
                           ("off_policy", config.off_policy.optimizer),
                           *((f"sft_domains.{name}", part.optimizer) for name, part in config.sft_domains.items())):
        one_of(errors, f"{key}.optimizer.schedule", optimizer.schedule, ("constant", "linear", "cosine"))
        if optimizer.learning_rate <= 0:
            errors.append(f"{key}.optimizer.learning_rate: {optimizer.learning_rate} must be positive")
        if len(optimizer.betas) != 2:
            errors.append(f"{key}.optimizer.betas: needs two numbers")
        elif not all(0 <= beta < 1 for beta in optimizer.betas):
            errors.append(f"{key}.optimizer.betas: {optimizer.betas} are not both at least 0 and below 1")
    for key, seeds in (("seeds", config.seeds), ("study.seeds", config.study.seeds)):
        if not seeds or len(set(seeds)) < len(seeds):
            errors.append(f"{key}: {seeds} must be one or more different whole numbers")
    for name in config.selection.quotas:
        if name not in config.domains:
            errors.append(f"selection.quotas.{name}: no such domain; there is {_names(config.domains)}")
    errors += deepspeed_errors(config.deepspeed)
    if config.deepspeed.sequence_parallel_size > 1 and config.train.routing_similarity_every:
        errors.append("train.routing_similarity_every: it compares routes of whole rows, and with "
                      "deepspeed.sequence_parallel_size above 1 no rank computes them; set 0")
    one_of(errors, "student.attention", config.student.attention, ("auto", "sdpa", "eager", "flex_attention"))
    one_of(errors, "train.prefix_gradient", train.prefix_gradient, ("full", "none"))
    if train.routing_replay and config.student.attention == "flex_attention":
        errors.append("train.routing_replay: routes travel with sdpa and eager attention, not with student.attention="
                      "flex_attention; set auto")
    n = len(config.domains)
    if train.domain_schedule == "adaptive" and n > 1:  # the share of a single domain never moves
        if train.adaptive_minimum * n > 1 or train.adaptive_maximum * n < 1:
            errors.append(f"train.adaptive_minimum: {n} shares between {train.adaptive_minimum} and "
                          f"{train.adaptive_maximum} cannot add up to 1")
    return errors


def _mixture_errors(config: Config, name: str) -> list[str]:
    """A domain that several teachers score together."""
    domain, key = config.domains[name], f"domains.{name}.teacher_weights"
    errors: list[str] = []
    one_of(errors, f"domains.{name}.teacher_mixture", domain.teacher_mixture, ("probability", "log_space"))
    for teacher, weight in domain.teacher_weights.items():
        if teacher not in config.teachers:
            errors.append(f"{key}.{teacher}: no teacher '{teacher}' under teachers; there {_names(config.teachers)}")
        if not weight > 0:
            errors.append(f"{key}.{teacher}: {weight} must be positive; leave a teacher out that shall not count")
    if domain.teacher_weights and domain.teacher not in domain.teacher_weights:
        errors.append(f"{key}: domains.{name}.teacher, the one that plays into the store, must be among them; "
                      f"'{domain.teacher}' is not")
    return errors


def _alpha_errors(config: Config) -> list[str]:
    """The outcome part of `mopd` needs groups to compare outcomes in."""
    train, key = config.train, "train.objective_options.alpha"
    alpha = train.objective_options.get("alpha")
    if train.objective != "mopd" or not alpha:
        return []
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or alpha < 0:
        return [f"{key}: {alpha!r} is not a number of at least 0"]
    errors = []
    if train.group_size < 2:
        errors.append(f"{key}: {alpha} would do nothing with train.group_size={train.group_size}: an outcome advantage is a "
                      "reward beside those of its group; take train.group_size of 2 or more, or alpha=0")
    if config.domains and not any(stream_shares(config, name)["rollout"] > 0 for name in config.domains):
        errors.append(f"{key}: {alpha} would do nothing: no domain has rollouts, and fresh turns have no outcome; take "
                      "train.prefix_fraction below 1, or alpha=0")
    return errors


def stream_shares(config: Config, domain: str) -> dict[str, float]:
    """Share of each stream in `domain`'s batch; the shares of rollout and prefix streams add up to 1 − λ.

    λ (`demonstration_fraction`) of the weight goes to the stored turns, scored at the same points (GKD 2306.13649).
    """
    own = config.domains[domain].prefix_fraction
    prefix = config.train.prefix_fraction if own is None else own
    lam = config.train.demonstration_fraction if prefix > 0 else 0.0
    shares = {
        "rollout": (1 - lam) * (1 - prefix),
        "teacher_prefix": (1 - lam) * prefix * config.train.teacher_prefix_share,
        "sft_prefix": (1 - lam) * prefix * (1 - config.train.teacher_prefix_share),
        "demonstration": lam,
    }
    assert set(shares) == set(STREAMS)
    return shares


def resume_turns(config: Config, domain: str) -> int:
    """Turns that the student plays on from a stored decision point of `domain`; 1 needs no environment."""
    own = config.domains[domain].resume_turns
    return config.train.resume_turns if own is None else own


def _read(path: Path, parents: tuple[Path, ...]):
    if not path.is_file():
        by = f" (included by {parents[-1]})" if parents else ""
        raise ConfigError(f"{path}: no such config file{by}; configs/ holds the ready recipes")
    path = path.resolve()
    if path in parents:
        raise ConfigError(f"{path}: includes itself through {' → '.join(str(p) for p in parents)}")
    try:
        raw = OmegaConf.load(path)
    except Exception as error:
        raise ConfigError(f"{path}: not valid YAML: {_one_line(error)}") from error
    if not OmegaConf.is_dict(raw):
        raise ConfigError(f"{path}: a config is a mapping of sections, this is not")
    includes = raw.pop("include") if "include" in raw else OmegaConf.create([])
    if not OmegaConf.is_list(includes) or not all(isinstance(name, str) and name for name in includes):
        raise ConfigError(f"{path}: include is a list of files, such as [other.yaml], not {includes!r}")
    result = OmegaConf.create({})
    for name in includes:
        result = OmegaConf.merge(result, _read(path.parent / name, (*parents, path)))
    return OmegaConf.merge(result, raw)


def _walk(kind: type, value: Any, key: str, errors: list[str]) -> None:
    """Unknown keys and wrong types below `key`, all of them."""
    if not isinstance(value, dict):
        errors.append(f"{key or 'config'}: expected a section, found {value!r}")
        return
    hints = typing.get_type_hints(kind)
    for name, item in value.items():
        full = f"{key}.{name}" if key else str(name)
        if name not in hints:
            close = difflib.get_close_matches(str(name), hints, n=1)
            errors.append(f"{full}: unknown key" + (f"; did you mean {close[0]}?" if close else
                                                    f"; known here: {', '.join(sorted(hints))}"))
            continue
        _check(hints[name], item, full, errors)


def _check(hint: Any, value: Any, key: str, errors: list[str]) -> None:
    if isinstance(value, str) and value.startswith("${"):
        return
    if dataclasses.is_dataclass(hint):
        _walk(hint, value, key, errors)
        return
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return
        _check(next(a for a in arguments if a is not type(None)), value, key, errors)
    elif origin is dict:
        if not isinstance(value, dict):
            errors.append(f"{key}: expected a mapping, found {value!r}")
        elif arguments[1] is not Any:
            for name, item in value.items():
                _check(arguments[1], item, f"{key}.{name}", errors)
    elif origin is list:
        if not isinstance(value, list):
            errors.append(f"{key}: expected a list, found {value!r}")
        else:
            for i, item in enumerate(value):
                _check(arguments[0], item, f"{key}[{i}]", errors)
    elif hint is bool:
        if not isinstance(value, bool):
            errors.append(f"{key}: expected true or false, found {value!r}")
    elif hint is int:
        if not isinstance(value, int) or isinstance(value, bool):
            errors.append(f"{key}: expected a whole number, found {value!r}")
    elif hint is float:
        if isinstance(value, str):  # YAML reads 1e-3 without a point as text
            try:
                float(value)
            except ValueError:
                errors.append(f"{key}: expected a number, found {value!r}")
        elif not isinstance(value, int | float) or isinstance(value, bool):
            errors.append(f"{key}: expected a number, found {value!r}")
    elif hint is str and not isinstance(value, str):
        errors.append(f"{key}: expected text, found " + ("nothing; give it a value or leave the key out" if value is None
                                                         else f"{value!r}; put it in quotes"))


def _file_name(errors: list[str], key: str, name: str) -> None:
    """Names of students and domains become folders, files and parts of metric names."""
    if not re.fullmatch(r"\w[\w.+-]*", name):
        errors.append(f"{key}: '{name}' also names files; use letters, digits and _ . + - only")


def _names(mapping: dict) -> str:
    return "none is configured" if not mapping else ", ".join(sorted(mapping))


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _message(path: Any, errors: list[str]) -> str:
    return f"{path}: {len(errors)} error(s) in the configuration:\n" + "\n".join(f"  {e}" for e in errors)


def learner_config(optimizer: OptimizerConfig, config: Config, *, log_file: str = "", prefix_gradient: str = "full",
                   routing_replay: bool = False, sequence_parallel_size: int = 1):
    """The learner's own config for one kind of training (imports torch)."""
    from mopd.learner.engine import LearnerConfig

    return LearnerConfig(
        learning_rate=optimizer.learning_rate, beta1=optimizer.betas[0], beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay, schedule=optimizer.schedule, warmup_steps=optimizer.warmup_steps,
        minimum_ratio=optimizer.final_fraction, gradient_clipping=optimizer.gradient_clip,
        zero_stage=config.deepspeed.zero_stage, dtype=config.deepspeed.dtype, freeze_router=config.student.freeze_router,
        seed=config.seed, gradient_checkpointing=config.deepspeed.gradient_checkpointing,
        autoep_size=config.deepspeed.autoep_size, autoep_preset=config.deepspeed.autoep_preset,
        split_on_imbalance=config.deepspeed.split_on_imbalance,
        offload_optimizer=config.deepspeed.offload_optimizer, offload_parameters=config.deepspeed.offload_parameters,
        prefix_gradient=prefix_gradient, routing_replay=routing_replay,
        sequence_parallel_size=sequence_parallel_size, logits_mib=config.deepspeed.logits_mib,
        deepspeed=config.deepspeed.raw, log_file=log_file)
