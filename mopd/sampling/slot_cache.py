"""Keys and values of many sequences of different lengths, and the attention that reads them.

A *slot* holds one sequence's keys and values, [slots, heads, capacity, head size] per layer. A forward pass carries
the new tokens of many slots packed into one row, so that nothing but attention is ever padded. Knows nothing about
requests, sampling or weights.
"""

from __future__ import annotations

import threading

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

ATTENTION_NAME = "mopd_slots"
TOKEN_BLOCK = 64
# capacity grows by whole blocks: each growth copies the arena once, so it must not happen at every step

MAX_IDLE = 4
# decoding covers a range of slots up to this many times wider than its live rows; beyond it, live keys are gathered

_active = threading.local()


class Plan:
    """Where the packed tokens of one forward pass belong.

    slots      int64 [R]  slot of each row, ascending
    starts     int64 [R]  tokens already cached in each slot
    counts     int64 [R]  new tokens of each row; the pass carries N = sum(counts) tokens, row after row. None: one each
    """

    def __init__(self, slots: np.ndarray, starts: np.ndarray, counts: np.ndarray | None, device: torch.device):
        rows = len(slots)
        first, width = int(slots[0]), int(slots[-1]) - int(slots[0]) + 1
        self.rows = rows
        self.window = (first, first + width) if width == rows else None
        self.slots = torch.from_numpy(slots).to(device)
        self.scatter = None
        self._masks: dict[int | None, torch.Tensor] = {}
        if counts is None:
            self.widest, self.length = 1, int(starts.max()) + 1
            self.token_slots = self.slots
            self.positions = torch.from_numpy(starts).to(device)
            self.query_positions = self.positions[:, None]
            if rows < width <= MAX_IDLE * rows:
                # Idle slots between live ones: attending for them in vain is cheaper than copying keys every step.
                self.rows, self.window = width, (first, first + width)
                self.scatter = self.slots - first
                self.query_positions = torch.zeros(width, 1, dtype=torch.int64, device=device)
                self.query_positions[self.scatter, 0] = self.positions
            return
        self.widest, self.length = int(counts.max()), int((starts + counts).max())
        row_of = np.repeat(np.arange(rows), counts)
        within = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        self.token_slots = torch.from_numpy(slots[row_of]).to(device)
        self.positions = torch.from_numpy(starts[row_of] + within).to(device)
        if rows * self.widest != len(within):
            self.scatter = torch.from_numpy(row_of * self.widest + within).to(device)
        self.query_positions = torch.from_numpy(starts[:, None] + np.arange(self.widest)[None]).to(device)

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask [R, 1, widest, length]: key j is seen from position i when i - window < j <= i."""
        if window not in self._masks:
            keys = torch.arange(self.length, device=self.positions.device)
            hidden = keys > self.query_positions[:, :, None]
            if window is not None:
                hidden |= keys <= self.query_positions[:, :, None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, -torch.inf)
            self._masks[window] = mask[:, None]
        return self._masks[window]


class SlotCache(Cache):
    """A Transformers cache whose rows live in slots. Tensors appear at the first forward pass, in the model's dtype. Beside
    keys and values it keeps, where somebody notes them, the experts that each cached token was sent to."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self.routes: dict[int, torch.Tensor] = {}  # MoE layer → int16 [slots, 1, capacity, k]
        self.slots = 0
        self.capacity = 0

    def reserve(self, slots: int, capacity: int) -> None:
        """Make room for `slots` sequences of `capacity` tokens; what is cached stays."""
        if slots <= self.slots and capacity <= self.capacity:
            return
        if capacity > self.capacity:
            capacity = -(-max(capacity, self.capacity + self.capacity // 4) // TOKEN_BLOCK) * TOKEN_BLOCK
        self.slots, self.capacity = max(slots, self.slots), max(capacity, self.capacity)
        for tensors in (self.keys, self.values, self.routes):
            for layer, old in tensors.items():
                new = old.new_zeros(self.slots, old.shape[1], self.capacity, old.shape[3])
                new[: old.shape[0], :, : old.shape[2]] = old
                tensors[layer] = new

    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers; 0 before the first forward pass."""
        tensors = [*self.keys.values(), *self.values.values(), *self.routes.values()]
        return sum(t.shape[1] * t.shape[3] * t.element_size() for t in tensors)

    def clear(self) -> None:
        """Give the memory back."""
        self.keys, self.values, self.routes, self.slots, self.capacity = {}, {}, {}, 0, 0

    def copy(self, source: list[int], target: list[int], length: int) -> None:
        """Copy the first `length` tokens of each source slot over the target slot beside it in the list."""
        if not source:
            return
        for tensors in (self.keys, self.values, self.routes):
            for tensor in tensors.values():
                index = torch.as_tensor(source, device=tensor.device)
                tensor[torch.as_tensor(target, device=tensor.device), :, :length] = tensor[index, :, :length]

    def exchange(self, left: list[int], right: list[int], length: int) -> None:
        """Exchange the first `length` tokens of the slots of two lists without common members."""
        self.copy(left + right, right + left, length)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        """Write the packed keys and values [1, heads, N, size] to their slots; returns the layer's whole arena."""
        plan = _active.plan
        if layer_idx not in self.keys:
            for tensors, states in ((self.keys, key_states), (self.values, value_states)):
                tensors[layer_idx] = states.new_zeros(self.slots, states.shape[1], self.capacity, states.shape[3])
        keys, values = self.keys[layer_idx], self.values[layer_idx]
        keys[plan.token_slots, :, plan.positions] = key_states[0].transpose(0, 1)
        values[plan.token_slots, :, plan.positions] = value_states[0].transpose(0, 1)
        return keys, values

    def note_routes(self, layer: int, chosen: torch.Tensor) -> None:
        """The experts [N, k] that MoE layer `layer` sends the tokens of the running pass to; nothing outside of one."""
        plan = getattr(_active, "plan", None)
        if plan is None:
            return
        if layer not in self.routes:
            self.routes[layer] = torch.zeros(self.slots, 1, self.capacity, chosen.shape[1], dtype=torch.int16,
                                             device=chosen.device)
        self.routes[layer][plan.token_slots, 0, plan.positions] = chosen.to(torch.int16)

    def routes_of(self, slot: int, length: int) -> np.ndarray:
        """int16 [length, L, k]: the experts of the first `length` tokens of a slot."""
        layers = [self.routes[layer][slot, 0, :length] for layer in sorted(self.routes)]
        return torch.stack(layers, dim=1).cpu().numpy()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed to the model, so that no length has to be guessed."""
        return 0


def slot_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, **kwargs):
    """Attention of packed queries [1, H, N, D] over the slots' keys and values [slots, Hk, capacity, D].

    Returns [1, N, H, D] and None, as Transformers' attention functions do. Raises NotImplementedError for attention
    that has more than a scale and a window (logit soft caps, sinks, position biases).
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise NotImplementedError(
                f"{type(module).__name__} uses attention option {name!r}, which this engine does not have; "
                "sample this model with the vllm engine"
            )
    plan: Plan = _active.plan
    _, heads, tokens, size = query.shape
    groups = heads // key.shape[1]
    scaling = size**-0.5 if scaling is None else scaling
    if plan.window is not None:
        key = key[plan.window[0] : plan.window[1], :, : plan.length]
        value = value[plan.window[0] : plan.window[1], :, : plan.length]
    else:
        key = key[:, :, : plan.length].index_select(0, plan.slots)
        value = value[:, :, : plan.length].index_select(0, plan.slots)
    mask = plan.mask(sliding_window, query.dtype)
    flat = query[0].transpose(0, 1)
    if plan.scatter is not None:
        flat = flat.new_zeros(plan.rows * plan.widest, heads, size).index_copy_(0, plan.scatter, flat)
    if plan.widest == 1:
        # Plain products: on CPU faster than the fused kernel for one query, and they take strided keys as they are.
        grouped = (flat * scaling).reshape(plan.rows, key.shape[1], groups, size)
        weights = torch.softmax(torch.matmul(grouped, key.transpose(2, 3)).add_(mask), dim=-1, dtype=torch.float32)
        out = torch.matmul(weights.to(value.dtype), value).reshape(plan.rows, heads, -1)
    else:
        padded = flat.reshape(plan.rows, plan.widest, heads, size).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            padded, key, value, attn_mask=mask, scale=scaling, enable_gqa=groups > 1
        )
        out = out.transpose(1, 2).reshape(plan.rows * plan.widest, heads, -1)
    if plan.scatter is not None:
        out = out.index_select(0, plan.scatter)
    return out[None], None


class active_plan:
    """Context manager: the plan that cache and attention follow inside (per thread)."""

    def __init__(self, plan: Plan):
        self._plan = plan

    def __enter__(self) -> Plan:
        _active.plan = self._plan
        return self._plan

    def __exit__(self, *exc) -> None:
        _active.plan = None


AttentionInterface.register(ATTENTION_NAME, slot_attention)
