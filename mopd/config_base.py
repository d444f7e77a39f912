"""The configuration of a tiny base model's pre-training: the section `base`. Nothing here imports torch."""

from __future__ import annotations

import dataclasses

from mopd.config_supervised import OptimizerConfig


@dataclasses.dataclass
class BaseConfig:
    """Pre-training of the tiny Mixture-of-Experts base model on the environments' text."""

    vocabulary: int = 1024
    hidden: int = 128
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    experts: int = 8
    experts_per_token: int = 2
    expert_intermediate: int = 192
    max_positions: int = 2048
    steps: int = 400
    rows_per_step: int = 24  # episodes per optimizer step
    micro_batch_tokens: int = 4096
    expert_shares: dict[str, float] = dataclasses.field(default_factory=dict)  # domain → share of expert episodes
    optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)


def base_errors(base: BaseConfig) -> list[str]:
    """What does not fit together in the section, each with its key."""
    errors = [f"base.{key}: must be at least 1" for key in ("hidden", "layers", "heads", "kv_heads", "experts",
                                                            "experts_per_token", "expert_intermediate", "steps",
                                                            "rows_per_step") if getattr(base, key) < 1]
    if errors:
        return errors
    if base.hidden % (2 * base.heads):
        errors.append(f"base.hidden: {base.hidden} is not a multiple of 2 × base.heads = {2 * base.heads}")
    if base.heads % base.kv_heads:
        errors.append(f"base.heads: {base.heads} is not a multiple of base.kv_heads = {base.kv_heads}")
    if base.experts_per_token > base.experts:
        errors.append(f"base.experts_per_token: {base.experts_per_token} is more than base.experts = {base.experts}")
    return errors
