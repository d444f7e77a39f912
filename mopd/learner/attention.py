"""Attention over packed rows: masks of shared prefixes, and an attention function that skips what they rule out.

Transformers hands keyword arguments of a model's forward down to the attention function of every layer, also when
gradient checkpointing runs a layer again. `Packed` travels that way. The products themselves are Transformers' own
(sdpa, or a family's eager function with its soft caps and sinks), called on parts:

* the leading columns that are plain causal trunk in every row need no mask: a causal kernel does half of the square;
* a prefix whose keys and values were computed before, without a graph, is put in front of every layer's own.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from mopd.learner.packing import MicroBatch
from mopd.learner.routing import follow

if TYPE_CHECKING:
    from mopd.learner.sequence_parallel import SequenceParallel

SDPA, EAGER = "mopd_packed_sdpa", "mopd_packed_eager"
_MINE = {"sdpa": SDPA, "eager": EAGER}


@dataclasses.dataclass
class Packed:
    """What the attention function must know of a packed forward pass beside its mask.

    trunk    leading columns in which no row has a branch
    causal   these columns may be computed by a causal kernel without a mask (no sliding window cuts into them)
    keep     layer number -> (keys, values) [B, Hk, P, D], to be filled: the pass over the prefix
    prefix   the same, to be read: the pass over what branches off
    routes   int16 [N, L, k], experts to be replayed for the N tokens of the pass (mopd.learner.routing); None: none
    over     splits the columns over ranks (mopd.learner.sequence_parallel): queries, keys and values are this rank's, the
             mask is whole; None: one rank has all
    plain    with `over`: all columns are causal, whatever mask Transformers made for this rank's
    """

    trunk: int = 0
    causal: bool = True
    keep: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    prefix: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None
    routes: torch.Tensor | None = None
    over: SequenceParallel | None = None
    plain: bool = False


def packed_attention(module: nn.Module, query, key, value, attention_mask, *, packed: Packed | None = None, **options):
    """An attention function of Transformers' registry: query [B, H, Q, D], key and value [B, Hk, K, D], mask
    [B, 1, Q, K], or its last rows as `attention_argument` gives them, or None -> [B, Q, H, D] and None. Without `packed` the
    plain function of the family."""
    follow(None if packed is None else packed.routes)
    if packed is None or packed.over is None:
        return _attend(module, query, key, value, attention_mask, packed, **options)
    mask = None if packed.plain else attention_mask
    return packed.over.attend(lambda q, k, v: _attend(module, q, k, v, mask, packed, **options)[0], query, key, value), None


def _attend(module: nn.Module, query, key, value, attention_mask, packed: Packed | None, **options):
    inner = _sdpa if module.config._attn_implementation == SDPA else _eager
    if packed is None:
        return inner(module, query, key, value, attention_mask, **options)
    if packed.keep is not None:
        packed.keep[module.layer_idx] = (key.detach(), value.detach())
    if packed.prefix is not None:
        keys, values = packed.prefix[module.layer_idx]
        key, value = torch.cat([keys, key], dim=2), torch.cat([values, value], dim=2)
    trunk = packed.trunk
    if attention_mask is None or not 1 < trunk < query.shape[2]:
        return inner(module, query, key, value, attention_mask, **options)
    plain = packed.causal and inner is _sdpa
    first, _ = inner(module, query[:, :, :trunk], key[:, :, :trunk], value[:, :, :trunk],
                     None if plain else attention_mask[:, :, :trunk, :trunk], **options)
    below = attention_mask.shape[2] - (query.shape[2] - trunk)  # 0 where only these rows were made
    rest, _ = inner(module, query[:, :, trunk:], key, value, attention_mask[:, :, below:], **options)
    return torch.cat([first, rest], dim=1), None


def _sdpa(*arguments, **options):
    return sdpa_attention_forward(*arguments, **options)


def _eager(module, *arguments, **options):
    family = sys.modules[type(module).__module__]
    return family.eager_attention_forward(module, *arguments, **options)


AttentionInterface.register(SDPA, packed_attention)
AttentionInterface.register(EAGER, packed_attention)
AttentionMaskInterface.register(SDPA, sdpa_mask)
AttentionMaskInterface.register(EAGER, eager_mask)


def use_packed_attention(model: nn.Module) -> bool:
    """Give a model with sdpa or eager attention the packed form of it; says whether it has it now. Other kinds
    (flash, flex) and families outside Transformers' attention registry stay as they are."""
    kind = model.config._attn_implementation
    if kind in (SDPA, EAGER):
        return True
    if kind not in _MINE or not getattr(model, "_supports_attention_backend", False):
        return False
    model.set_attn_implementation(_MINE[kind])
    return True


def attention_argument(config, batch: MicroBatch, dtype: torch.dtype, packed: Packed | None = None) -> Any:
    """What goes in as `attention_mask`: None for plain causal rows, else a 4-D mask [B, 1, T, P + T] (additive for
    sdpa and eager, a block mask for FlexAttention), cut to the sliding window for layers that have one; a dict by layer
    type where the model wants one. Where `packed_attention` needs none for the trunk, the rows behind it alone: of long
    trunks the square would be most of what a pass holds."""
    mask = batch.attention
    if mask is None:
        return None  # Transformers builds causal and sliding masks from consecutive positions by itself
    first = 0
    if packed is not None and packed.causal and config._attn_implementation == SDPA and 1 < packed.trunk < mask.shape[2]:
        first = packed.trunk
        mask = mask[:, :, first:]
    kinds = set(getattr(config, "layer_types", None) or ())
    full = _for_kernel(mask, config, dtype)
    window = sliding_window(config)
    if window is None:
        return {kind: full for kind in kinds} if len(kinds) > 1 else full
    keys = batch.position_ids
    if batch.prefix_ids is not None:
        before = torch.arange(batch.prefix_ids.shape[1], device=keys.device)
        keys = torch.cat([before.expand(len(keys), -1), keys], dim=1)
    distance = batch.position_ids[:, None, first:, None] - keys[:, None, None, :]
    # Padding queries keep their own key: a row without any key would be NaN.
    sliding = _for_kernel(mask & (distance < window), config, dtype)
    if len(kinds) > 1:
        return {kind: sliding if "sliding" in kind else full for kind in kinds}
    return full if kinds == {"full_attention"} else sliding


def sliding_window(config) -> int | None:
    """Tokens that a sliding layer sees, the query among them; None where a model has no such layers."""
    if not getattr(config, "use_sliding_window", True):
        return None
    return getattr(config, "sliding_window", None) or None


def _for_kernel(mask: torch.Tensor, config, dtype: torch.dtype) -> Any:
    kind = getattr(config, "_attn_implementation", "sdpa")
    if kind == "flex_attention":
        if torch.is_grad_enabled() and not _has_backward(mask.device):
            raise ValueError("FlexAttention has no backward pass on a CPU; take student.attention=auto (sdpa or eager) there")
        return block_mask(mask)
    if kind in ("eager", EAGER, SDPA):  # once here instead of in every layer
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)
    return mask


def _has_backward(device: torch.device) -> bool:
    """Whether FlexAttention can be trained through on a device."""
    return device.type != "cpu"


def block_mask(mask: torch.Tensor):
    """FlexAttention's block mask of mask bool [B, 1, T, K]: blocks without any True are skipped, whole blocks need no
    look at the mask."""
    from torch.nn.attention.flex_attention import create_block_mask

    rows, _, queries, keys = mask.shape
    dense = mask[:, 0]
    return create_block_mask(lambda b, h, q, k: dense[b, q, k], rows, None, queries, keys, device=mask.device)
