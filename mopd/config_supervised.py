"""Sections of the configuration that make teachers and their store: supervised training, adapters, play, consistency.

What `mopd/config.py` is made of; nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection


@dataclasses.dataclass
class OptimizerConfig:
    learning_rate: float = 1e-3
    betas: list[float] = dataclasses.field(default_factory=lambda: [0.9, 0.98])
    weight_decay: float = 0.0
    schedule: str = "cosine"  # constant | linear | cosine
    warmup_steps: int = 5
    final_fraction: float = 0.1  # learning rate at the end over the peak
    gradient_clip: float = 1.0


@dataclasses.dataclass
class LoRAConfig:
    """Low-rank adapters in place of whole matrices; merged into the weights on export."""

    rank: int = 0  # 0: none, all weights but the router train
    alpha: float = 16.0
    dropout: float = 0.0
    targets: list[str] = dataclasses.field(default_factory=list)  # ends of module or parameter names; none: all that can be


@dataclasses.dataclass
class SFTConfig:
    """Supervised training on demonstrations: a teacher, or the off-policy baseline."""

    steps: int = 200
    rows_per_step: int = 16  # trajectories per optimizer step
    micro_batch_tokens: int = 4096
    checkpoint_every: int = 50
    files: list[str] = dataclasses.field(default_factory=list)  # demonstrations in the formats of `mopd import`
    format: str = "auto"
    experts: bool = False  # the domains' experts play `domains.NAME.demonstrations` tasks
    store: str = ""  # "": the run's, unless files or experts are named
    sources: list[str] = dataclasses.field(default_factory=lambda: ["expert", "demonstration"])  # of a store, these kinds
    success_only: bool = False
    held_out_fraction: float = 0.0  # of each domain's demonstrations, kept for a held-out loss
    evaluate_every: int = 0  # 0: no evaluation
    evaluation_episodes: int = 0  # 0: domains.NAME.evaluation_episodes
    evaluation_split: str = "development"
    patience: int = 0  # evaluations without a new best that end the training; 0: none do
    lora: LoRAConfig = dataclasses.field(default_factory=LoRAConfig)
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


@dataclasses.dataclass
class CollectConfig:
    """Teachers or experts play the training tasks into the prefix store."""

    player: str = "teacher"  # teacher | expert
    temperature: float = 1.0
    temperatures: dict[str, float] = dataclasses.field(default_factory=dict)  # domain → its own
    top_p: float = 1.0  # teachers sample from the likeliest ids that hold this much probability; 1: from all
    top_k: int = 0  # from this many of the likeliest ids; 0: from all
    batch: int = 64
    samples_per_task: int = 1
    success_only: bool = False
    min_score: float | None = None  # leave out episodes with a lower score
    retries: int = 2  # how often an episode is played again after an infrastructure failure
    processes: int = 0  # domains that play side by side, each in a process; 0: as many as there are cores, at most 4


@dataclasses.dataclass
class ConsistencyConfig:
    """How far the teachers are from the student's start, on its own samples."""

    points: int = 32  # decision points per domain; 0: not measured at a launch of `mopd train`
    threshold: float = 0.1  # reverse KL in nats per token above which a teacher is warned of


def sft_errors(options: SFTConfig, key: str, zero_stage: int) -> list[str]:
    """What does not fit together in one section of supervised training, found under `key`."""
    errors: list[str] = []
    one_of(errors, f"{key}.evaluation_split", options.evaluation_split, ("train", "development", "test"))
    for kind in options.sources:
        one_of(errors, f"{key}.sources", kind, ("expert", "demonstration", "teacher", "student"))
    if options.patience and not options.evaluate_every:
        errors.append(f"{key}.patience: {options.patience} would do nothing without evaluations; set {key}.evaluate_every")
    if options.held_out_fraction and not options.evaluate_every:
        errors.append(f"{key}.held_out_fraction: {options.held_out_fraction} would only waste demonstrations without "
                      f"evaluations; set {key}.evaluate_every")
    if options.evaluate_every and zero_stage == 3:
        errors.append(f"{key}.evaluate_every: an evaluation reads the whole weights, which deepspeed.zero_stage=3 splits; "
                      "take 0, 1 or 2, or evaluate_every=0")
    if options.lora.rank and options.lora.alpha <= 0:
        errors.append(f"{key}.lora.alpha: {options.lora.alpha} must be positive")
    if options.lora.rank and zero_stage == 3:
        errors.append(f"{key}.lora.rank: adapters are merged into whole weights, which deepspeed.zero_stage=3 splits; take "
                      "0, 1 or 2")
    return errors


def collect_errors(options: CollectConfig, domains: Collection[str]) -> list[str]:
    """What does not fit together in `collect`, given the names of the domains."""
    errors: list[str] = []
    one_of(errors, "collect.player", options.player, ("teacher", "expert"))
    for name, value in options.temperatures.items():
        if name not in domains:
            errors.append(f"collect.temperatures.{name}: no such domain; there is {', '.join(domains) or 'none'} (a "
                          "teacher's own temperature is teachers.NAME.temperature)")
        if value < 0:
            errors.append(f"collect.temperatures.{name}: {value} must be at least 0")
    return errors


def play_errors(options: CollectConfig, domain: str, teacher: str, backend: str) -> list[str]:
    """What keeps the teacher of a domain from playing it through its back end at the settings of `collect`. vLLM tells the
    log-probabilities of what it sampled, but not which ids top-p and top-k left."""
    if options.player != "teacher" or backend == "hf":
        return []
    errors = [f"collect.{key}: domain {domain}'s teacher '{teacher}' plays through the back end '{backend}', which does not "
              f"tell which ids {said} left; take {usual}, or teachers.{teacher}.backend=hf"
              for key, said, usual in (("top_p", "top-p", 1.0), ("top_k", "top-k", 0)) if getattr(options, key) != usual]
    temperature = options.temperatures.get(domain)
    if temperature is not None and 0 < temperature < 0.01:
        errors.append(f"collect.temperatures.{domain}: {temperature:g}; vLLM samples at 0 (greedy) or from 0.01 on")
    return errors


def one_of(errors: list[str], key: str, value: str, allowed: tuple[str, ...]) -> None:
    """Add an error where `value` is none of the allowed words."""
    if value not in allowed:
        errors.append(f"{key}: '{value}' is not one of {', '.join(allowed)}")
