"""The student's weights under their Hugging Face names, whole, for engines that sample and for export."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from mopd.learner.engine import Learner
from mopd.learner.moe import gathered

LAYOUTS = ("module", "checkpoint")
_LAYER = re.compile(r"(?:[^.\d]+\.)*\d*")  # a name up to its first number: "model.layers.3"


def named_weights(learner: Learner, *, layout: str = "module") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter, tied ones once; under ZeRO-3, and where experts are spread over ranks, gathered one
    at a time, so every rank must consume the iterator.

    layout  module: names of the module in memory (what an in-process Transformers engine takes), no copies outside
            ZeRO-3; checkpoint: names as saved (one matrix per expert), what vLLM's loaders take. A layer at a time is then
            whole in memory
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    weights = _module_weights(learner.model) if learner.experts is None else learner.experts.named_weights(learner.model)
    return weights if layout == "module" else _as_saved(learner.model, weights)


def state_dict(learner: Learner) -> dict[str, torch.Tensor]:
    """All weights on the CPU under module names, for `save_model(state_dict=…)`; every rank must call it."""
    return {name: tensor.cpu() for name, tensor in named_weights(learner)}


def _module_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        split = hasattr(parameter, "ds_id")
        with gathered(parameter):
            tensor = parameter.detach()
            yield name, tensor.clone() if split else tensor


def _as_saved(model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights under the names and in the shapes in which Transformers saves this model, one layer after the other:
    no conversion of its reaches over layers."""
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in itertools.groupby(weights, key=lambda item: _LAYER.match(item[0])[0]):
        yield from revert_weight_conversion(model, dict(layer)).items()
