"""Experts that DeepSpeed's AutoEP spreads over ranks: their optimizer groups, and their weights put together again.

AutoEP exchanges every MoE block for a layer of its own, whose rank holds some of the experts as w1, w3 (gate, up) and w2
(down). Everything else here keeps Hugging Face names, so engines and exports see an ordinary model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from mopd.learner.moe import find_routers, gathered

FUSED = ("gate_up_proj", "down_proj")


@dataclasses.dataclass(frozen=True)
class Block:
    """A MoE block as it was: the name of the block, of its router and experts in it, the router's parameters, and whether
    its fused experts are [E, 2I, H] (the other layout is [E, H, 2I])."""

    name: str
    router: str
    experts: str
    router_parameters: tuple[str, ...]
    rows_first: bool


@dataclasses.dataclass(frozen=True)
class Part:
    """A parameter, the name of the whole tensor that it is (a part) of, and `take`: whole tensor → this parameter's."""

    parameter: nn.Parameter
    name: str
    take: Callable[[torch.Tensor], torch.Tensor]


class CannotSpread(ValueError):
    """A model whose experts cannot be spread over this many ranks; the message names the key and the reason."""


class SpreadExperts:
    """Knows a model's MoE blocks by their Hugging Face names; make it before `deepspeed.initialize` exchanges them.

    size    ranks that share the experts of a layer
    Raises CannotSpread for a model without MoE blocks, whose experts are not held in two fused matrices, or whose number of
    experts `size` does not divide.
    """

    def __init__(self, model: nn.Module, size: int):
        from deepspeed.moe.fused_expert_layout import classify_fused_gate_up_layout

        self.blocks: dict[str, Block] = {}
        replaced: set[int] = set()
        for router in find_routers(model):
            name, _, child = router.name.rpartition(".")
            shapes = {n: tuple(p.shape) for n, p in router.experts.named_parameters()}
            layout = classify_fused_gate_up_layout(shapes[FUSED[0]], shapes[FUSED[1]]) if set(shapes) == set(FUSED) else None
            if layout is None:
                raise CannotSpread(f"deepspeed.autoep_size: {router.experts_name} holds {sorted(shapes)[:4]}, not one "
                                   f"{' and one '.join(FUSED)}; this model's experts cannot be spread, set 0")
            if router.num_experts % size:
                raise CannotSpread(f"deepspeed.autoep_size: {size} does not divide the {router.num_experts} experts of "
                                   f"{router.experts_name}")
            replaced.update(id(p) for module in (router.module, router.experts) for p in module.parameters())
            self.blocks[name] = Block(name, child, router.experts_name.rpartition(".")[2],
                                      tuple(n for n, _ in router.module.named_parameters()),
                                      layout.layout == "gate_up_first")
        if not self.blocks:
            raise CannotSpread(f"deepspeed.autoep_size: {type(model).__name__} has no experts to spread; set 0")
        self._model_config, self.size = model.config, size
        # What is not exchanged stays the same object under DeepSpeed, wherever it hangs afterwards.
        self._kept = {id(p): n for n, p in model.named_parameters() if id(p) not in replaced}

    def config(self, preset: str, *, inside: str) -> dict[str, Any]:
        """DeepSpeed's `expert_parallel` section; `inside`: the model's name in the module that DeepSpeed drives. The blocks
        are named one by one, since DeepSpeed's own patterns expect the model to be that module."""
        names = "|".join(re.escape(f"{inside}.{name}") for name in self.blocks)
        section = {"enabled": True, "autoep_size": self.size, "moe_layer_pattern": f"(?:{names})"}
        if preset:
            section["preset_model"] = preset
        norm = getattr(self._model_config.get_text_config(), "norm_topk_prob", None)
        return section if norm is None else section | {"route_norm": bool(norm)}

    @staticmethod
    def groups(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Optimizer groups with experts in groups of their own, as ZeRO wants them: their states are partitioned over
        other ranks."""
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        named = [{**group, "name": f"part {number}"} for number, group in enumerate(groups)]
        return [group for group in split_params_into_different_moe_groups_for_optimizer(named) if group["params"]]

    def named_weights(self, model: nn.Module, take: Callable[[nn.Parameter], torch.Tensor] | None = None
                      ) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole tensor) of every parameter, gathered from the ranks one block at a time; every rank must
        consume the iterator. `take` gives something else of a parameter (of the experts of this rank) than its weights."""
        take = take or whole
        done = set()
        for name, parameter in model.named_parameters():
            if (known := self._kept.get(id(parameter))) is not None:
                yield known, take(parameter)
                continue
            block = next(b for b in self.blocks.values() if name.startswith(f"{b.name}."))
            if block.name not in done:
                done.add(block.name)
                yield from self._block(model.get_submodule(block.name), block, take)

    def router_name(self, name: str) -> str:
        """The model's own name of what AutoEP calls BLOCK.router.gate.weight, and of the like."""
        block = next(b for b in self.blocks.values() if name.startswith(f"{b.name}.router."))
        return f"{block.name}.{block.router}.{name.rpartition('.')[2]}"

    def parts(self, model: nn.Module) -> Iterator[Part]:
        """Every parameter that this rank has, with the Hugging Face name of the tensor that it is of and how it is cut out
        of that."""
        for name, parameter in model.named_parameters():
            if (known := self._kept.get(id(parameter))) is not None:
                yield Part(parameter, known, lambda tensor: tensor)
                continue
            block = next(b for b in self.blocks.values() if name.startswith(f"{b.name}."))
            layer, own = model.get_submodule(block.name), name.rpartition(".")[2]
            if own in ("w1", "w3", "w2"):
                yield Part(parameter, f"{block.name}.{block.experts}.{FUSED[own == 'w2']}", _cut(layer, block, own))
            elif own in block.router_parameters:  # AutoEP may hold a buffer of the router's as a parameter
                yield Part(parameter, f"{block.name}.{block.router}.{own}", lambda tensor: tensor)

    def _block(self, layer: nn.Module, block: Block, take: Callable[[nn.Parameter], torch.Tensor]
               ) -> Iterator[tuple[str, torch.Tensor]]:
        for name in block.router_parameters:
            own = layer.router.gate.bias if name.endswith("bias") else layer.router.gate.weight
            yield f"{block.name}.{block.router}.{name}", take(own)
        gate, up, down = (_of_all_ranks(layer, take(getattr(layer.experts, name))) for name in ("w1", "w3", "w2"))
        fused = torch.cat([gate, up], dim=1)
        if not block.rows_first:
            fused, down = fused.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
        yield f"{block.name}.{block.experts}.{FUSED[0]}", fused
        yield f"{block.name}.{block.experts}.{FUSED[1]}", down


def _cut(layer: nn.Module, block: Block, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """How this rank's w1, w3 or w2 is cut out of a block's fused matrix of all experts."""
    first = layer.ep_rank * layer.num_local_experts

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        mine = tensor[first:first + layer.num_local_experts]
        if not block.rows_first:
            mine = mine.transpose(1, 2)
        half = mine.shape[1] // 2
        return {"w1": mine[:, :half], "w3": mine[:, half:], "w2": mine}[name].contiguous()
    return cut


def whole(parameter: nn.Parameter) -> torch.Tensor:
    """The parameter's weights, a copy where ZeRO-3 has split them; every rank must call it."""
    with gathered(parameter):
        tensor = parameter.detach()
        return tensor.clone() if hasattr(parameter, "ds_id") else tensor


def _of_all_ranks(layer: nn.Module, own: torch.Tensor) -> torch.Tensor:
    """The experts of all ranks [E, …] from this rank's [E / ranks, …]."""
    own = own.contiguous()
    if layer.ep_size == 1:
        return own
    parts = [torch.empty_like(own) for _ in range(layer.ep_size)]
    torch.distributed.all_gather(parts, own, group=layer.ep_group)
    return torch.cat(parts)
