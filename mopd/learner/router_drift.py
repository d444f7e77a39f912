"""How far routers that are trained have moved from where they were: in their weights, and in whom they choose.

The choice is compared on fixed inputs: what each router saw of a few random texts before training. So the number tells of
the router alone, not of the layers before it. Everything starts from the model as it was loaded, so a resumed run measures
from the run's start and needs no state.
"""

from __future__ import annotations

import copy
import dataclasses

import torch
from torch import nn

from mopd.learner.moe import chosen_experts, find_routers, router_state

TEXTS, TOKENS = 4, 32


@dataclasses.dataclass(frozen=True)
class Drift:
    """One number a MoE layer.

    relative_l2  ‖w − w₀‖₂ / ‖w₀‖₂ of the router's weights and biases
    changed      share of the probe tokens' top-k choices that the router at the start did not make
    """

    relative_l2: list[float]
    changed: list[float]


class RouterDrift:
    """Measures `model`'s routers against themselves at the time of this call, which must be before `deepspeed.initialize`:
    the model is then whole and runs without other ranks."""

    def __init__(self, model: nn.Module, *, seed: int = 0):
        # Modules of their own, on the CPU: under ZeRO-3 the model's have hooks that belong into a pass of the whole model.
        self._names, self._routers = [], []
        for router in find_routers(model):
            self._names.append(router.name.rpartition(".")[0])
            self._routers.append(copy.deepcopy(router.module).cpu().requires_grad_(False))
        self._start = [{name: tensor.clone() for name, tensor in _state(module)} for module in self._routers]
        self._inputs = self._seen(model, seed)
        self._chosen = [self._choice(layer) for layer in range(len(self._routers))]

    @torch.no_grad()
    def _seen(self, model: nn.Module, seed: int) -> list[torch.Tensor]:
        """What each router is given for the probe tokens, [TEXTS * TOKENS, H] on the CPU."""
        vocabulary = int(model.config.get_text_config().vocab_size)
        tokens = torch.randint(vocabulary, (TEXTS, TOKENS), generator=torch.Generator().manual_seed(seed))
        seen: dict[int, torch.Tensor] = {}
        handles = [router.module.register_forward_pre_hook(
            lambda module, arguments, layer=layer: seen.__setitem__(layer, arguments[0].detach().cpu()))
            for layer, router in enumerate(find_routers(model))]
        was_training = model.training
        try:
            model.eval()(input_ids=tokens.to(next(model.parameters()).device), use_cache=False)
        finally:
            model.train(was_training)
            for handle in handles:
                handle.remove()
        return [seen[layer].reshape(-1, seen[layer].shape[-1]) for layer in range(len(handles))]

    @torch.no_grad()
    def _choice(self, layer: int) -> torch.Tensor:
        """bool [tokens, E]: the experts that the layer's router chooses now."""
        router = self._routers[layer]
        weight = next(tensor for _, tensor in _state(router) if tensor.dim() == 2)
        output = router(self._inputs[layer].to(weight.dtype))
        chosen = chosen_experts(router, output).reshape(len(self._inputs[layer]), -1)
        return torch.zeros(len(chosen), len(weight), dtype=torch.bool).scatter_(1, chosen, True)

    @torch.no_grad()
    def measure(self, model: nn.Module) -> Drift:
        """How the routers of `model` (under DeepSpeed) stand to the start's. Every rank must call it."""
        now: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in router_state(model).items():
            block = next(block for block in self._names if name.startswith(f"{block}."))
            # AutoEP's routers are `router.gate`; the family's own name is another.
            now.setdefault(block, {})[name.removeprefix(f"{block}.").partition(".")[2].removeprefix("gate.")] = tensor
        moved, changed = [], []
        for layer, (block, router, start) in enumerate(zip(self._names, self._routers, self._start, strict=True)):
            for name, tensor in _state(router):
                if name in now[block]:
                    tensor.copy_(now[block][name])
            difference = sum(_squares(tensor.double() - start[name].double()) for name, tensor in _state(router))
            size = sum(_squares(tensor.double()) for tensor in start.values())
            moved.append((difference / size) ** 0.5 if size else float("nan"))
            chosen = self._choice(layer)
            changed.append(1.0 - float((chosen & self._chosen[layer]).sum()) / float(chosen.sum()))
        return Drift(moved, changed)


def _squares(tensor: torch.Tensor) -> float:
    return float(tensor.square().sum())


def _state(module: nn.Module):
    return [*module.named_parameters(), *module.named_buffers()]


def drift_alerts(drift: Drift, limit: float) -> list[str]:
    """Sentences about layers whose router chooses otherwise than at the start for more than `limit` of the choices."""
    return [f"MoE layer {layer}: {share:.0%} of its router's choices for a fixed text are other experts than at the start "
            f"(limit {limit:.0%}); student.freeze_router keeps them" for layer, share in enumerate(drift.changed)
            if share > limit]
