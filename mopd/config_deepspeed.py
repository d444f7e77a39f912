"""How training runs under DeepSpeed: the section `deepspeed` and what does not fit together in it. Nothing here imports
torch."""

from __future__ import annotations

import dataclasses
from typing import Any

from mopd.config_supervised import one_of


@dataclasses.dataclass
class DeepSpeedConfig:
    zero_stage: int = 0
    dtype: str = "float32"
    gradient_checkpointing: bool = False
    autoep_size: int = 0  # ranks over which the experts of a Mixture-of-Experts model are spread; 0: none
    autoep_preset: str = ""  # how its MoE layers are found; empty: by the model's type
    sequence_parallel_size: int = 1  # ranks that share the columns of each micro-batch (Ulysses); 1: none do
    split_on_imbalance: int = 0  # token copies that a rank of spread experts may get in a pass; 0: any number
    offload_optimizer: bool = False  # master weights and optimizer states in the host's memory, where the update runs
    offload_parameters: bool = False  # weights in the host's memory, a module at a time on the device
    logits_mib: float = 256.0  # memory for a chunk of logits and what is made of them
    raw: dict[str, Any] = dataclasses.field(default_factory=dict)  # merged over the generated DeepSpeed config


def deepspeed_errors(given: DeepSpeedConfig) -> list[str]:
    """Everything wrong with the section by itself, each with its key; what depends on the model or the number of ranks is
    found when they are known."""
    errors: list[str] = []
    if given.zero_stage not in (0, 1, 2, 3):
        errors.append(f"deepspeed.zero_stage: {given.zero_stage} is not one of 0, 1, 2, 3")
    if given.autoep_size and given.zero_stage == 0:
        errors.append("deepspeed.autoep_size: spread experts need deepspeed.zero_stage 1, 2 or 3")
    if given.autoep_preset and not given.autoep_size:
        errors.append(f"deepspeed.autoep_preset: '{given.autoep_preset}' does nothing without deepspeed.autoep_size")
    if given.split_on_imbalance and not given.autoep_size:
        errors.append("deepspeed.split_on_imbalance: only ranks that share experts can be out of balance; set "
                      "deepspeed.autoep_size, or 0 here")
    if given.offload_optimizer and given.zero_stage == 0:
        errors.append("deepspeed.offload_optimizer: stage 0 keeps every state beside its weight on the device; take "
                      "deepspeed.zero_stage 1, 2 or 3 (1 on one process does)")
    if given.offload_parameters and given.zero_stage != 3:
        errors.append(f"deepspeed.offload_parameters: only deepspeed.zero_stage=3 brings weights to the device a module at a "
                      f"time, and it is {given.zero_stage}")
    one_of(errors, "deepspeed.dtype", given.dtype, ("float32", "bfloat16"))
    if given.logits_mib <= 0:
        errors.append(f"deepspeed.logits_mib: {given.logits_mib} must be positive")
    return errors
