"""Which numbers a config may hold: the lowest and highest value of every key that has one, checked in one pass.

What ties several keys together is in `mopd/config.py`, which checks what stands here too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

# Section -> key -> (lowest, highest); None: no limit. Both are allowed values.
RANGES: dict[str, dict[str, tuple[float | None, float | None]]] = {
    "Config": {"seed": (0, None), "threads": (0, None), "seeds": (0, None)},
    "DomainConfig": dict.fromkeys(("demonstrations", "novice_episodes", "teacher_episodes", "evaluation_episodes"),
                                  (0, None)),
    "OptimizerConfig": {"weight_decay": (0, None), "warmup_steps": (0, None), "final_fraction": (0, 1),
                        "gradient_clip": (0, None)},
    "BaseConfig": {"vocabulary": (1, None), "max_positions": (2, None), "micro_batch_tokens": (1, None),
                   "expert_shares": (0, None)},
    "NoviceConfig": {"random_share": (0, 1)},
    "TeacherConfig": {"tensor_parallel": (1, None), "pipeline_parallel": (1, None), "retries": (0, None),
                      "concurrency": (1, None), "max_request_tokens": (1, None), "temperature": (0, None)},
    "SFTConfig": dict.fromkeys(("steps", "rows_per_step", "micro_batch_tokens", "checkpoint_every"), (1, None))
    | {"held_out_fraction": (0, 0.9)}
    | dict.fromkeys(("evaluate_every", "evaluation_episodes", "patience"), (0, None)),
    "LoRAConfig": {"rank": (0, None), "dropout": (0, 0.9)},
    "CollectConfig": {"temperature": (0, None), "top_p": (0, 1), "top_k": (0, None), "batch": (1, None),
                      "samples_per_task": (1, None), "retries": (0, None), "processes": (0, None)},
    "ConsistencyConfig": {"points": (0, None), "threshold": (0, None)},
    "DeepSpeedConfig": {"autoep_size": (0, None), "sequence_parallel_size": (1, None), "split_on_imbalance": (0, None)},
    "LearnerPlacement": {"nodes": (1, None), "ranks_per_node": (1, None)},
    "FleetPlacement": {"nodes": (0, None), "servers_per_node": (0, None), "gpus_per_server": (0, None),
                       "first_gpu": (0, None), "port": (0, 65535)},
    "EvaluateConfig": {"temperature": (0, None), "batch": (1, None)},
    "StudyConfig": {"seeds": (0, None)},
    "TrainConfig": {"checkpoint_every": (1, None), "keep_checkpoints": (1, None), "keep_every": (0, None),
                    "stop_within_s": (0, None), "adaptive_gamma": (0, None),
                    "adaptive_minimum": (0, 1), "adaptive_maximum": (0, 1), "adaptive_smoothing": (0, 1),
                    "top_p": (0, 1), "top_k": (0, None), "max_staleness": (0, None), "staleness_decay": (0, 1),
                    "balance_weights": (0, None),
                    "peak_alert": (0, None), "cold_alert": (0, 1), "router_drift_alert": (0, 1),
                    "routing_similarity_every": (0, None),
                    "ranks_timeout": (1, None), "ranks_warn_s": (0, None), "straggler_alert": (0, 1),
                    "max_unscored_share": (0, 1), "teacher_wait_s": (0, None),
                    "score_cache_mib": (0, None), "probe_every": (0, None), "probe_tolerance": (0, None)},
}


def range_errors(config: Any) -> list[str]:
    """Every number below `config` (a tree of dataclasses) that is not finite or outside its range, each with its key."""
    errors = []
    for key, value, (low, high) in _numbers(config, ""):
        if not math.isfinite(value):
            errors.append(f"{key}: {value} is not a finite number")
        elif low is not None and value < low or high is not None and value > high:
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            errors.append(f"{key}: {value} must be {wanted}")
    return errors


def _numbers(section: Any, prefix: str) -> Iterator[tuple[str, float, tuple[float | None, float | None]]]:
    limits = RANGES.get(type(section).__name__, {})
    for field in dataclasses.fields(section):
        yield from _within(getattr(section, field.name), f"{prefix}{field.name}", limits.get(field.name, (None, None)))


def _within(value: Any, key: str, limits: tuple[float | None, float | None]):
    if dataclasses.is_dataclass(value):
        yield from _numbers(value, f"{key}.")
    elif isinstance(value, dict):
        for name, item in value.items():
            yield from _within(item, f"{key}.{name}", limits)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _within(item, f"{key}[{number}]", limits)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield key, value, limits
