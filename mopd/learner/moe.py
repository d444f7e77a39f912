"""Mixture-of-Experts care: find and freeze routers, prove that they stayed as they were, and watch expert loads."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable

import torch
from torch import nn


@dataclasses.dataclass(frozen=True)
class Router:
    """One MoE layer's router: its name in the model, the module, and the experts that it feeds. `spread`: it is one of
    DeepSpeed's AutoEP, and this rank holds some of the `num_experts` experts."""

    name: str
    module: nn.Module
    experts: nn.Module
    experts_name: str
    num_experts: int
    spread: bool = False


def find_routers(model: nn.Module) -> list[Router]:
    """Routers in layer order, found by shape rather than by family: a block that has `experts` (or a list of them) next
    to a `gate` or `router` whose weight is [E, H] with E the number of experts. Covers Qwen2/3-MoE, Mixtral, OLMoE,
    DeepSeek-V2/V3 and their relatives, and the blocks that AutoEP puts in their place. A dense model gives an empty list."""
    found = []
    for name, block in model.named_modules():
        if getattr(block, "_is_autoep_layer", False):
            found.append(Router(f"{name}.router", block.router, block.experts, f"{name}.experts", block.num_experts, True))
            continue
        experts = getattr(block, "experts", None)
        if not isinstance(experts, nn.Module):
            continue
        for child_name, child in block.named_children():
            weight = _router_weight(child)
            if child is experts or weight is None:
                continue
            count = _expert_count(experts)
            rows = getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 empties the tensor and keeps its shape aside
            if count is None or rows != count:
                continue
            prefix = f"{name}." if name else ""
            found.append(Router(f"{prefix}{child_name}", child, experts, f"{prefix}experts", count))
    return found


def _router_weight(module: nn.Module) -> torch.Tensor | None:
    weight = getattr(module, "weight", None)
    if weight is None:  # routers that wrap a linear layer
        inner = getattr(module, "layer", getattr(module, "linear", getattr(module, "classifier", None)))
        weight = getattr(inner, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and len(getattr(weight, "ds_shape", weight.shape)) == 2 else None


def _expert_count(experts: nn.Module) -> int | None:
    if isinstance(experts, nn.ModuleList):
        return len(experts)
    for name in ("num_experts", "n_routed_experts", "num_local_experts"):
        if isinstance(value := getattr(experts, name, None), int):
            return value
    first = next(experts.parameters(recurse=False), None)
    return None if first is None else getattr(first, "ds_shape", first.shape)[0]


def freeze_routers(model: nn.Module, frozen: bool = True) -> list[str]:
    """Take router weights (and biases) out of training, or put them back; returns the routers' names. Call it before
    `deepspeed.initialize`, which partitions only what requires a gradient. Expert biases that are buffers (DeepSeek's
    e_score_correction_bias) never train."""
    routers = find_routers(model)
    for router in routers:
        for parameter in router.module.parameters():
            parameter.requires_grad_(not frozen)
    return [router.name for router in routers]


def router_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Router weights and biases by full name, buffers included, gathered where ZeRO-3 has split them."""
    state = {}
    for router in find_routers(model):
        tensors = [*router.module.named_parameters(), *router.module.named_buffers()]
        for name, tensor in tensors:
            with gathered(tensor):
                state[f"{router.name}.{name}"] = tensor.detach().cpu().clone()
    return state


def router_hash(model: nn.Module, named: Callable[[str], str] | None = None) -> str:
    """SHA-256 over the bytes of all routers: equal before and after means that they were really frozen. `named` gives the
    model's own name of what AutoEP named anew, so that the hash does not depend on where experts are."""
    digest = hashlib.sha256()
    state = router_state(model)
    for name, tensor in sorted({named(name) if named else name: tensor for name, tensor in state.items()}.items()):
        digest.update(name.encode())
        digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over every parameter and buffer in name order; what shows that a frozen model stayed frozen."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def chosen_experts(router: nn.Module, output) -> torch.Tensor:
    """The experts int64 [T, k] that a router of Transformers chose, from what its forward gave: those that give logits alone
    choose the largest."""
    if isinstance(output, tuple) and not output[-1].is_floating_point():
        return output[-1]
    logits = output[0] if isinstance(output, tuple) else output
    return logits.topk(getattr(router, "top_k", None) or 1, dim=-1).indices


def gathered(tensor: torch.Tensor, *, modified: bool = False):
    """Context in which a parameter that ZeRO-3 has split is whole on every rank; nothing for any other tensor. `modified`:
    what it is at the end (alike on every rank) stays."""
    if not hasattr(tensor, "ds_id"):
        return contextlib.nullcontext()
    import deepspeed

    return deepspeed.zero.GatheredParameters([tensor], modifier_rank=0 if modified else None)


class ExpertLoadCounter:
    """Counts tokens per layer and expert, in the training forward and for real tokens only.

    Hooks stand on the experts modules and do nothing unless `counting(valid)` is open: evaluation, teachers and the
    recomputation that gradient checkpointing does during the backward pass therefore never count.
    """

    def __init__(self, model: nn.Module):
        self.routers = find_routers(model)
        width = max((r.num_experts for r in self.routers), default=0)
        self.counts = torch.zeros(len(self.routers), width, dtype=torch.int64)
        self._valid: tuple[torch.Tensor, ...] = ()
        self._passes = [0] * len(self.routers)
        self._before = self.counts.clone()
        self._handles = []
        for layer, router in enumerate(self.routers):
            # families that still loop over experts in the block, and experts that see other ranks' tokens
            if isinstance(router.experts, nn.ModuleList) or router.spread:
                hook = self._from_router(layer, router)
                self._handles.append(router.module.register_forward_hook(hook))
            else:
                self._handles.append(router.experts.register_forward_pre_hook(self._from_experts(layer)))

    def _from_experts(self, layer: int):
        def hook(module, arguments):
            if self._valid:
                self._add(layer, arguments[1])
        return hook

    def _from_router(self, layer: int, router: Router):
        def hook(module, arguments, output):
            if not self._valid:
                return
            self._add(layer, output[1] if router.spread else chosen_experts(module, output))  # of scores, experts, counts
        return hook

    def _add(self, layer: int, chosen: torch.Tensor) -> None:
        valid = self._valid[self._passes[layer]]
        self._passes[layer] += 1
        chosen = chosen.reshape(valid.numel(), -1)[valid.reshape(-1)]
        width = self.counts.shape[1]
        self.counts[layer] += torch.bincount(chosen.reshape(-1), minlength=width)[:width].cpu()

    @contextlib.contextmanager
    def counting(self, *valid: torch.Tensor):
        """While open, one forward pass for each `valid` bool [B, T] is counted, in this order: the tokens that it
        marks."""
        self._valid, self._passes = valid, [0] * len(self.routers)
        self._before = self.counts.clone()
        try:
            yield
        finally:
            self._valid = ()

    def undo(self) -> None:
        """Forget what the last `counting` counted: its pass was given up."""
        self.counts.copy_(self._before)

    def take(self) -> torch.Tensor:
        """Counts int64 [L, E] since the last call."""
        counts = self.counts.clone()
        self.counts.zero_()
        return counts

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
