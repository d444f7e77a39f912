"""Which experts tokens go to: told by a model's routers, and replayed in the student's training pass (R3).

Routing replay ("Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370): the
engine says which experts it used for each token, and training uses the same. Only the choice is replayed. The gate weights of
the chosen experts are the learner's own router's, renormalised over them where its family does so, and carry gradient:

    g_i = I_i exp(s_i) / Σ_j I_j exp(s_j)        I the engine's choice, s the learner's router logits

A token whose choice is unknown is routed freely.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import nn

from mopd.learner.moe import Router, find_routers, gathered

UNKNOWN = -1
# stands in a token's routes where the engine did not tell them
_here = threading.local()
# the routes of the layer that runs now in this thread


class CannotReplay(ValueError):
    """A model whose routes cannot be told or replayed; the message names its family."""


@dataclasses.dataclass(frozen=True)
class GateRule:
    """How a family makes gate weights of router logits: softmax or sigmoid scores, of the chosen experts, divided by their
    sum where `normalised`, times `scale`."""

    score: str
    normalised: bool
    scale: float = 1.0

    def weights(self, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """float32 [N, k] of router logits [N, E] and experts int64 [N, k], with the graph of the logits."""
        logits = logits.float()
        scores = torch.softmax(logits, dim=-1) if self.score == "softmax" else torch.sigmoid(logits)
        found = scores.gather(1, chosen)
        if self.normalised:
            found = found / found.sum(dim=-1, keepdim=True)
        return found * self.scale


def gate_rules(model: nn.Module) -> list[GateRule]:
    """The rule of every MoE layer, in the order of `find_routers`, found by asking each router once and trying the rules that
    there are. Every rank must call it where weights are split.

    Raises CannotReplay, naming the family, for a model without routers and for routers that fit no rule.
    """
    routers = find_routers(model)
    if not routers:
        raise _dense(model)
    return [_rule_of(router, type(model).__name__) for router in routers]


def _rule_of(router: Router, family: str) -> GateRule:
    refused = CannotReplay(f"train.routing_replay: {router.name} of {family} is a {type(router.module).__name__}, whose gate "
                           "weights cannot be told from its logits (a Qwen-MoE, Mixtral, OLMoE, DeepSeek or MiMo router "
                           "can); set train.routing_replay=false")
    with contextlib.ExitStack() as whole, torch.no_grad():
        for parameter in router.module.parameters():
            whole.enter_context(gathered(parameter))
        weight = next((p for p in router.module.parameters() if p.dim() == 2), None)
        if weight is None or isinstance(router.experts, nn.ModuleList):
            raise refused
        draw = torch.Generator().manual_seed(0)
        hidden = torch.randn(32, weight.shape[1], generator=draw).to(weight)
        # Logits of about 1, or all rules would agree on flat scores.
        hidden = hidden / (hidden @ weight.T).float().std().clamp_min(1e-12).to(hidden)
        answer = router.module(hidden)
    if not _tells(answer):
        raise refused
    logits, weights, chosen = answer
    for score in ("softmax", "sigmoid"):
        for normalised in (True, False):
            ratio = weights.float() / GateRule(score, normalised).weights(logits, chosen)
            tolerance = 1e-3 if weights.dtype == torch.float32 else 3e-2
            scale = float(ratio.mean())
            if bool(torch.isfinite(ratio).all()) and float((ratio - scale).abs().max()) <= tolerance * scale:
                return GateRule(score, normalised, 1.0 if abs(scale - 1) <= tolerance else scale)
    raise refused


def _tells(answer) -> bool:
    """Whether a router answers with (logits [N, E], weights [N, k], experts [N, k])."""
    return (isinstance(answer, tuple) and len(answer) == 3 and all(isinstance(part, torch.Tensor) for part in answer)
            and not answer[2].is_floating_point() and answer[1].shape == answer[2].shape and answer[0].dim() == 2)


def chosen_by(router: Router, answer) -> torch.Tensor:
    """Experts int64 [N, k] of a router's answer; DeepSpeed's AutoEP routers answer (weights, experts, counts)."""
    return answer[1] if router.spread else answer[2]


def tell_routes(model: nn.Module, note: Callable[[int, torch.Tensor], None]) -> None:
    """Have a model's routers tell `note(layer, experts int64 [N, k])` of every pass from now on, N its tokens in order.
    Raises CannotReplay where training could not replay what they tell."""
    gate_rules(model)

    def hook(layer: int, router: Router):
        return lambda module, arguments, answer: note(layer, chosen_by(router, answer))

    for layer, router in enumerate(find_routers(model)):
        router.module.register_forward_hook(hook(layer, router))


def moe_layers(config) -> list[int]:
    """The numbers of the decoder layers that have a router, of a model configuration (of Transformers); no weights are made.
    Raises CannotReplay for a model without any."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = [int(number[1]) for router in find_routers(model) if (number := re.search(r"\.(\d+)\.", router.name))]
    if not found:
        raise _dense(model)
    return found


def _dense(model: nn.Module) -> CannotReplay:
    return CannotReplay(f"{type(model).__name__} has no router over experts, so there are no routes to replay; set "
                        "train.routing_replay=false")


class Choices:
    """Notes which experts a model's routers choose. While `noting()` is open, every pass leaves them in `last`: int16 tensors
    [N, k] by layer, N the tokens of the pass in order. Raises CannotReplay as `gate_rules` does for what a router answers."""

    def __init__(self, model: nn.Module):
        self.routers = find_routers(model)
        self.last: list[torch.Tensor | None] = [None] * len(self.routers)
        self._open = False
        self._handles = [router.module.register_forward_hook(self._hook(layer, router))
                         for layer, router in enumerate(self.routers)]

    def _hook(self, layer: int, router: Router):
        def hook(module, arguments, answer):
            if self._open:
                if not router.spread and not _tells(answer):
                    raise CannotReplay(f"{router.name} is a {type(module).__name__}, which does not tell its experts")
                self.last[layer] = chosen_by(router, answer).detach().to(torch.int16)
        return hook

    @contextlib.contextmanager
    def noting(self) -> Iterator[Choices]:
        self._open = True
        try:
            yield self
        finally:
            self._open = False

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def follow(routes: torch.Tensor | None) -> None:
    """The tokens of the layer that runs next in this thread have these routes, int16 [N, L, k]; None: they are free. Called
    by every layer's attention, which is told them anew where gradient checkpointing runs a layer again."""
    _here.routes = routes


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Tokens whose routes were replayed in a step, and of these by MoE layer those for which the learner's own router would
    have taken another set of experts; int64 [L] each."""

    tokens: torch.Tensor
    other: torch.Tensor

    def record(self) -> dict[str, list]:
        """For a step's metrics: the number of tokens, and their share with another set, by layer."""
        return {"tokens": self.tokens.tolist(), "other_share": (self.other / self.tokens.clamp_min(1)).tolist()}


class RoutingReplay:
    """Replays routes in a student under training: whatever routes its passes are given (`mopd.learner.attention.Packed`).
    Make it after `deepspeed.initialize` with the rules from before, and before whatever else looks at routers.

    While `counting()` is open, tokens are counted (recomputation by gradient checkpointing is not inside).
    """

    def __init__(self, model: nn.Module, rules: list[GateRule]):
        self.routers = find_routers(model)
        if len(self.routers) != len(rules):
            raise CannotReplay(f"{type(model).__name__} has {len(self.routers)} routers now and had {len(rules)} before")
        self.counts = torch.zeros(2, len(rules), dtype=torch.int64)
        self._last = torch.zeros_like(self.counts)
        self._counts = False
        self._handles = [router.module.register_forward_hook(self._hook(layer, router, rule))
                         for layer, (router, rule) in enumerate(zip(self.routers, rules, strict=True))]

    def _hook(self, layer: int, router: Router, rule: GateRule):
        def hook(module, arguments, answer):
            routes = getattr(_here, "routes", None)
            if routes is None:
                return None
            chosen = chosen_by(router, answer)
            given = routes[:, layer].to(chosen.device, chosen.dtype)
            if given.shape != chosen.shape:
                raise ValueError(f"{router.name} chooses {tuple(chosen.shape)} experts, the routes to replay are "
                                 f"{tuple(given.shape)}: they are of another model")
            known = given[:, :1] >= 0
            if self._counts:
                differs = (given.sort(dim=-1).values != chosen.sort(dim=-1).values).any(dim=-1, keepdim=True) & known
                self._last[:, layer] += torch.stack([known.sum(), differs.sum()]).cpu()
            given = torch.where(known, given, chosen)
            logits, weights = (module.gate(arguments[0]), answer[0]) if router.spread else answer[:2]
            weights = torch.where(known, rule.weights(logits, given).to(weights.dtype), weights)
            if not router.spread:
                return logits, weights, given
            counts = torch.bincount(given.reshape(-1), minlength=router.num_experts)
            return weights, given, counts.to(answer[2].dtype).view_as(answer[2])
        return hook

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Count one pass."""
        self._counts, self._last = True, torch.zeros_like(self.counts)
        try:
            yield
        finally:
            self._counts = False
            self.counts += self._last

    def undo(self) -> None:
        """The last counted pass was thrown away."""
        self.counts -= self._last
        self._last = torch.zeros_like(self.counts)

    def take(self) -> torch.Tensor:
        """int64 [2, L]: tokens replayed, and those with another set, since the last call."""
        counts, self.counts = self.counts, torch.zeros_like(self.counts)
        return counts

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def overlap(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """float32 [N]: Jaccard overlap |A ∩ B| / |A ∪ B| of the sets of experts [N, k] and [N, m] (each without repetition)."""
    both = (left[:, :, None] == right[:, None, :]).any(-1).sum(-1)
    return both.float() / (left.shape[1] + right.shape[1] - both)


def place_routes(routes: np.ndarray, told: np.ndarray, end: int) -> None:
    """Put routes `told` int16 [m, L, k], which end before position `end`, into routes [T, L, k] where nothing is known yet:
    the first that are told of a token are those under which it was sampled."""
    start = end - len(told)
    part = routes[start:end]
    free = part[:, 0, 0] == UNKNOWN
    part[free] = told[free]
