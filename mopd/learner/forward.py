"""One forward pass over a packed micro-batch: hidden states where a loss token is predicted, then head and loss there
only, a chunk of tokens at a time.

The same code serves the student (inside DeepSpeed's engine) and in-process teachers, so that both see one layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mopd.learner.attention import Packed, attention_argument, sliding_window, use_packed_attention
from mopd.learner.packing import MicroBatch
from mopd.losses.chunked import CHUNK_BYTES, Head, HeadSpec, chunk_rows, chunked_loss

if TYPE_CHECKING:
    from mopd.learner.sequence_parallel import SequenceParallel


def base_model(model: nn.Module) -> nn.Module:
    """The transformer below the head of a Hugging Face causal LM."""
    base = getattr(model, model.base_model_prefix, None)
    if base is None or base is model:
        raise TypeError(f"{type(model).__name__} has no base model under {model.base_model_prefix!r}; "
                        "the learner needs a Hugging Face causal LM with a head of its own")
    return base


def hidden_at_loss_tokens(model: nn.Module, batch: MicroBatch, over: SequenceParallel | None = None) -> torch.Tensor:
    """Last hidden states [N, H] at the positions that predict the loss tokens.

    over   the batch holds this rank's columns (`SequenceParallel.columns`); every rank of the group must call it
    A prefix part is run first, without a graph; what branches off it attends to its keys and values. Raises ValueError
    where the model's attention cannot take them.
    """
    config = model.config.get_text_config()
    dtype = next(model.parameters()).dtype
    base = base_model(model)
    extra: dict[str, Any] = {}
    if use_packed_attention(model):
        window = sliding_window(config)
        packed = Packed(trunk=batch.trunk, causal=window is None or window >= batch.trunk,
                        routes=None if batch.routes is None else batch.routes.flatten(0, 1),
                        over=over, plain=batch.attention is None)
        extra["packed"] = packed
    if batch.prefix_ids is not None:
        if not extra:
            raise ValueError(f"prefix_gradient 'none' needs sdpa or eager attention of Transformers' registry, and "
                             f"{type(model).__name__} runs {config._attn_implementation!r}; take 'full'")
        packed.prefix = {}
        with torch.no_grad():
            base(input_ids=batch.prefix_ids, use_cache=False, packed=Packed(
                keep=packed.prefix, routes=None if batch.prefix_routes is None else batch.prefix_routes.flatten(0, 1)))
    output = base(
        input_ids=batch.input_ids,
        # Rows without branches have consecutive positions: the model's own default.
        position_ids=None if batch.attention is None and over is None else batch.position_ids,
        attention_mask=attention_argument(config, batch, dtype, extra.get("packed")),
        use_cache=False,
        **extra,
    )
    hidden = output.last_hidden_state
    return hidden.reshape(-1, hidden.shape[-1]).index_select(0, batch.source_index)


def head_of(model: nn.Module) -> Head | None:
    """The output head with the scaling or soft cap that the family applies; None where it is no plain linear layer.
    Under ZeRO-3 its tensors are whole only while the head's module runs."""
    module = model.get_output_embeddings()
    if type(module).forward is not nn.Linear.forward:
        return None
    config = model.config.get_text_config()
    scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        scale /= divisor
    cap = getattr(config, "final_logit_softcapping", None)  # Gemma
    return Head(module.weight, module.bias, HeadSpec(scale, cap))


def apply_head(model: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in float32 from hidden states [N, H], with a graph, all at once."""
    config = model.config.get_text_config()
    logits = model.get_output_embeddings()(hidden).float()
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = torch.tanh(logits / cap) * cap
    return logits


# (logits float32 [n, V], micro-batch of these n loss tokens) -> (scalar, {name: [n, ...] detached}). Called for a chunk
# of the loss tokens at a time, so the scalar must be a sum over tokens.
LossFunction = Callable[[torch.Tensor, MicroBatch], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class PackedLM(nn.Module):
    """The module that DeepSpeed drives: a causal LM whose forward takes a micro-batch and returns the loss of it.

    The loss is computed inside the forward, a chunk of loss tokens at a time: never more than one chunk of logits is
    alive (see mopd.losses.chunked.chunked_loss). `logits_bytes` is the budget for a chunk's working tensors. With `over`
    micro-batches hold this rank's columns, and every rank of its group must come.
    """

    def __init__(self, model: nn.Module, *, logits_bytes: int = CHUNK_BYTES, over: SequenceParallel | None = None):
        super().__init__()
        self.model, self.logits_bytes, self.over = model, logits_bytes, over

    def forward(self, batch: MicroBatch, loss_function: LossFunction | None = None):
        """(loss, details) with `loss_function`; without one all logits [N, V] at once, with a graph."""
        hidden = hidden_at_loss_tokens(self.model, batch, self.over)
        if loss_function is None:
            return apply_head(self.model, hidden)
        if head_of(self.model) is None:  # a head of its own kind: as it is, unchunked
            logits = apply_head(self.model, hidden)
            return loss_function(logits, batch) if batch.loss_tokens else (logits.sum() * 0.0, {})
        details: dict[str, torch.Tensor] = {}

        def chunks(hidden: torch.Tensor) -> torch.Tensor:
            head = head_of(self.model)
            loss, found = chunked_loss(hidden, head, lambda logits, rows: loss_function(logits, batch.chosen(rows)),
                                       rows=chunk_rows(len(head.weight), budget_bytes=self.logits_bytes))
            details.update(found)
            return loss

        return _in_place_of_forward(self.model.get_output_embeddings(), chunks, hidden), details

    def per_token(self, batch: MicroBatch, function: Callable[[torch.Tensor, MicroBatch], Any]) -> Any:
        """`function(logits, micro-batch)` over chunks of loss tokens, without a graph; its tensors [n, ...] joined."""
        with torch.no_grad():
            _, found = self(batch, lambda logits, part: (logits.new_zeros(()), {"value": function(logits, part)}))
        return found.get("value")


def _in_place_of_forward(module: nn.Module, function: Callable[[torch.Tensor], torch.Tensor],
                         hidden: torch.Tensor) -> torch.Tensor:
    """`function(hidden)` run as the module's forward, once. The module's hooks act around it, so under ZeRO-3 its
    weights are gathered once per micro-batch on every rank, however many chunks a rank has or whether it has any."""
    module.forward = function
    try:
        return module(hidden)
    finally:
        del module.forward
