"""One forward pass over a packed micro-batch: hidden states where a loss token is predicted, then the head there only.

The same code serves the student (inside DeepSpeed's engine) and in-process teachers, so that both see one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from mopd.learner.packing import MicroBatch


def base_model(model: nn.Module) -> nn.Module:
    """The transformer below the head of a Hugging Face causal LM."""
    base = getattr(model, model.base_model_prefix, None)
    if base is None or base is model:
        raise TypeError(f"{type(model).__name__} has no base model under {model.base_model_prefix!r}; "
                        "the learner needs a Hugging Face causal LM with a head of its own")
    return base


def attention_argument(config, batch: MicroBatch, dtype: torch.dtype) -> Any:
    """What goes in as `attention_mask`: None for plain causal rows, else a 4-D mask (additive for eager attention),
    cut to the sliding window for layers that have one; a dict by layer type where the model wants one."""
    window = getattr(config, "sliding_window", None)
    if not getattr(config, "use_sliding_window", True):
        window = None
    kinds = set(getattr(config, "layer_types", None) or ())
    mask = batch.attention
    if mask is None:
        return None  # Transformers builds causal and sliding masks from consecutive positions by itself
    full = _for_attention(mask, config, dtype)
    if not window:
        return {kind: full for kind in kinds} if len(kinds) > 1 else full
    distance = batch.position_ids[:, None, :, None] - batch.position_ids[:, None, None, :]
    # Padding queries keep their own key: a row without any key would be NaN.
    sliding = _for_attention(mask & (distance < window), config, dtype)
    if len(kinds) > 1:
        return {kind: sliding if "sliding" in kind else full for kind in kinds}
    return full if kinds == {"full_attention"} else sliding


def _for_attention(mask: torch.Tensor, config, dtype: torch.dtype) -> torch.Tensor:
    if getattr(config, "_attn_implementation", "sdpa") != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, torch.finfo(dtype).min)


def hidden_at_loss_tokens(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Last hidden states [N, H] at the positions that predict the loss tokens."""
    config = model.config.get_text_config()
    dtype = next(model.parameters()).dtype
    output = base_model(model)(
        input_ids=batch.input_ids,
        # Rows without branches have consecutive positions: the model's own default.
        position_ids=None if batch.attention is None else batch.position_ids,
        attention_mask=attention_argument(config, batch, dtype),
        use_cache=False,
    )
    hidden = output.last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.source_index)


def apply_head(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in float32 from hidden states [N, H], with the scaling or soft cap that the family applies."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    if scale := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = torch.tanh(logits / cap) * cap
    return logits


LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class PackedLM(nn.Module):
    """The module that DeepSpeed drives: a causal LM whose forward takes a micro-batch and returns the loss of it.

    The loss is computed inside the forward so that under ZeRO-3 the head's weights are there for it.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch, loss_function: LossFunction | None = None):
        """(loss, details) with `loss_function`, logits [N, V] without."""
        logits = apply_head(self.model, hidden_at_loss_tokens(self.model, batch))
        if loss_function is None:
            return logits
        if batch.loss_tokens == 0:  # a rank without work: zero loss with a full graph, so that every hook runs
            return logits.sum() * 0.0, {}
        return loss_function(logits, batch)
