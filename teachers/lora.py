"""Low-rank adapters (peft) on a teacher in training: which weights they can sit on, how they get there, and their merge.

LoRA: Hu et al., arXiv 2106.09685. Linear layers are adapted as modules, the fused expert matrices of Mixture-of-Experts
families ([experts, out, in] in one parameter) as parameters (peft's `target_parameters`). Routers, embeddings and the
output head are never adapted.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mopd.config import ConfigError
from mopd.config_supervised import LoRAConfig
from mopd.learner.forward import PackedLM
from mopd.learner.moe import find_routers
from mopd.learner.packing import pack
from mopd.learner.supervised import STREAM
from mopd.rows import Row

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2}
# largest difference of a log-probability (nats) between adapters and merged weights that rounding explains


class MergeMismatch(RuntimeError):
    """The merged weights say something else than the adapters did; the message names the size."""


def check_lora(section: str = "sft") -> None:
    """Raise ConfigError where peft is not installed. `section`: the configuration's that asks for adapters."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(f"{section}.lora.rank: adapters need peft, which is not installed; pip install 'mopd[lora]', or "
                          f"set {section}.lora.rank=0")


def adaptable(model: nn.Module) -> dict[str, str]:
    """Full name → "linear" or "parameter" of everything in `model` that an adapter can sit on."""
    head, routers = model.get_output_embeddings(), find_routers(model)
    barred = tuple(f"{router.name}." for router in routers)
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and not f"{name}.".startswith(barred or ("\n",)):
            found[name] = "linear"
    for router in routers:
        for name, parameter in router.experts.named_parameters(recurse=False):
            if parameter.dim() == 3:
                found[f"{router.experts_name}.{name}"] = "parameter"
    return found


def choose_targets(model: nn.Module, wanted: Sequence[str], section: str = "sft") -> tuple[list[str], list[str]]:
    """(modules, parameters) whose names end with one of `wanted` ("q_proj", "experts.down_proj", a full name), all that
    there are without any. Raises ConfigError for a name that fits nothing, with those that exist, and for a router."""
    there = adaptable(model)
    if not there:
        raise ConfigError(f"{section}.lora: {type(model).__name__} has no linear layer that an adapter can sit on; set "
                          f"{section}.lora.rank=0")
    chosen: dict[str, str] = {}
    errors = []
    for target in wanted or [""]:
        fitting = {name: kind for name, kind in there.items() if not target or f".{name}".endswith(f".{target}")}
        if not fitting:
            router = any(f".{r.name}.weight".endswith((f".{target}", f".{target}.weight")) for r in find_routers(model))
            short = sorted({".".join(name.split(".")[-2:]) if kind == "parameter" else name.split(".")[-1]
                            for name, kind in there.items()})
            errors.append(f"{section}.lora.targets: '{target}' " + (
                "is the router, which stays as it is" if router else f"fits nothing in {type(model).__name__}")
                + f"; there is {', '.join(short)}")
        chosen |= fitting
    if errors:
        raise ConfigError("; ".join(errors))
    return tuple([name for name, kind in chosen.items() if kind == wish] for wish in ("linear", "parameter"))


def check_targets(base: str | Path, options: LoRAConfig, section: str = "sft", *, trust_remote_code: bool = False) -> None:
    """Raise ConfigError for adapters that the model in `base` has no place for, by its config alone: no weight is read."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    _chosen(model, options, section)


def _chosen(model: nn.Module, options: LoRAConfig, section: str) -> tuple[list[str], list[str]]:
    modules, parameters = choose_targets(model, options.targets, section)
    if parameters and options.dropout:
        raise ConfigError(f"{section}.lora.dropout: {options.dropout} cannot be had on the fused expert matrices "
                          f"({parameters[0]}); set 0, or name other {section}.lora.targets")
    return modules, parameters


def add_lora(model: nn.Module, options: LoRAConfig, *, seed: int, section: str = "sft") -> Any:
    """Put adapters into `model` (in place) and freeze everything else; returns peft's tuner for `merge_lora`. The
    beginning is drawn from `seed` alone and changes nothing that the model says. Without targets all are taken that peft can
    adapt (see `adapted`). Raises ConfigError for targets that it cannot."""
    from peft import LoraConfig
    from peft.tuners.lora import LoraModel

    modules, parameters = _chosen(model, options, section)
    config = LoraConfig(r=options.rank, lora_alpha=options.alpha, lora_dropout=options.dropout, target_modules=modules,
                        target_parameters=parameters or None, bias="none")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # peft's own, for some families
        torch.manual_seed(seed)
        try:
            tuner = LoraModel(model, config, "default")
        except ValueError as error:
            raise ConfigError(f"{section}.lora.targets: peft refuses them for {type(model).__name__}: {error}") from error
    # For some families peft takes the names of dense and shared experts for those of the fused ones and leaves them out.
    missing = sorted({*modules, *parameters} - adapted(model))
    if missing and options.targets:
        raise ConfigError(f"{section}.lora.targets: peft puts no adapter on {missing[0]} of {type(model).__name__} "
                          f"({len(missing)} such); name other targets")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return tuner


def adapted(model: nn.Module) -> set[str]:
    """The names, as `adaptable` has them, of what carries an adapter."""
    found = set()
    for name, module in model.named_modules():
        if hasattr(module, "lora_A"):  # wrappers of several parameters of one module stand inside one another
            name = name.replace(".base_layer", "")
            found.add(f"{name}.{module.parameter_name}" if hasattr(module, "parameter_name") else name)
    return found


def merge_lora(tuner: Any) -> nn.Module:
    """Add the adapters to the weights that they sit on and take them out; returns the plain model."""
    return tuner.merge_and_unload()


def label_logprobs(model: nn.Module, rows: Sequence[Row], *, pad_id: int, token_budget: int) -> torch.Tensor:
    """float32 [N], log-probabilities of all loss tokens of `rows`, in the order of `pack`."""
    model.eval()
    device = next(model.parameters()).device
    batches = pack(rows, token_budget=token_budget, pad_id=pad_id, domains=sorted({row.domain for row in rows}),
                   streams=(STREAM,), by_domain=False)
    found = [PackedLM(model).per_token(batch.to(device), lambda logits, part: torch.log_softmax(logits, -1).gather(
        1, part.label[:, None])[:, 0]) for batch in batches]
    return torch.cat(found).float().cpu()


def require_equal(adapters: torch.Tensor, merged: torch.Tensor, dtype: torch.dtype) -> float:
    """The largest difference of two models' log-probabilities [N]; raises MergeMismatch beyond what rounding explains."""
    largest = float((adapters - merged).abs().max())
    if not largest <= TOLERANCE.get(dtype, 1e-3):
        raise MergeMismatch(f"the merged weights give log-probabilities that differ by up to {largest:.3g} from those with "
                            f"adapters; rounding explains {TOLERANCE.get(dtype, 1e-3):g}. Export without LoRA "
                            "(lora.rank=0), or name other lora.targets")
    return largest
