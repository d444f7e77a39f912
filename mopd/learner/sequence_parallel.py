"""Long contexts over several ranks: each computes a part of a micro-batch's columns; attention is DeepSpeed's Ulysses.

Ranks of a group have the same rows. Every layer but attention sees a rank's own columns only; around attention Ulysses
exchanges them for heads, so that each rank attends for some heads over all columns, with the whole mask of branches
(mopd/learner/attention.py), and exchanges back. A loss token belongs to the rank whose column predicts it, so for the loss,
its denominators and the gradient's sum over ranks such ranks are ranks like any other.
Ulysses: Jacobs et al., arXiv 2309.14509.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from mopd.learner.attention import sliding_window
from mopd.learner.packing import TOKEN_FIELDS, MicroBatch
from mopd.learner.routing import UNKNOWN
from mopd.learner.step_metrics import begins_of


def sequence_parallel_errors(model_config: Any, size: int) -> list[str]:
    """Why a model's attention cannot be split over `size` ranks; `model_config` is its text configuration."""
    heads = int(model_config.num_attention_heads)
    keys = int(getattr(model_config, "num_key_value_heads", None) or heads)
    found = []
    if heads % size or keys % size:
        found.append(f"it has {heads} attention heads and {keys} of keys and values, and each rank of {size} takes as many")
    if sliding_window(model_config) is not None:
        found.append("it has layers with a sliding window, whose masks are made of positions that one rank has not all of")
    return found


class SequenceParallel:
    """This rank's place in its group of `size` neighbours (ranks 0 … size − 1 are the first group, and so on).

    Every rank of the job must make one, in the same order. Raises ValueError where the ranks make no whole groups, or the
    model's attention cannot be split so.
    """

    def __init__(self, model: nn.Module, size: int, *, rank: int, world_size: int, pad_id: int):
        if world_size % size:
            raise ValueError(f"sequence_parallel_size {size}: {world_size} ranks make no whole groups of so many")
        config = model.config.get_text_config()
        errors = sequence_parallel_errors(config, size)
        if config._attn_implementation not in ("sdpa", "mopd_packed_sdpa"):
            errors.append(f"its attention is {config._attn_implementation!r}, and only sdpa is computed in parts of its "
                          "heads (student.attention)")
        if errors:
            raise ValueError(f"sequence_parallel_size {size}: {type(model).__name__} cannot be split so: "
                             + "; ".join(errors))
        import deepspeed.comm
        from deepspeed.sequence.layer import DistributedAttention

        self.size, self.place, self.pad_id = size, rank % size, pad_id
        groups = [deepspeed.comm.new_group(list(range(first, first + size))) for first in range(0, world_size, size)]
        self._group = groups[rank // size]
        self._attention = DistributedAttention(_core, self._group, scatter_idx=2, gather_idx=1)

    def mine(self, batch: MicroBatch) -> MicroBatch:
        """The micro-batch (on the CPU, as `pack` made it) with the loss tokens alone that this rank's columns predict; the
        columns stay whole. In `extra` "begins": whether a token is its action's first, bool [n]."""
        chosen = self._chosen(batch)
        begins = torch.from_numpy(begins_of(batch.row.numpy(), batch.action.numpy()))
        fields = {name: getattr(batch, name)[chosen] for name in TOKEN_FIELDS}
        candidates = None if batch.candidates is None else batch.candidates[chosen]
        return dataclasses.replace(batch, **fields, candidates=candidates,
                                   extra={name: value[chosen] for name, value in (batch.extra | {"begins": begins}).items()})

    def columns(self, batch: MicroBatch) -> MicroBatch:
        """What this rank computes of `mine(…)`: its columns, the mask whole. Columns are filled up to a multiple of the
        group's size with padding, which sees itself and is seen by nobody."""
        width = self._width(batch)
        total = batch.input_ids.shape[1]
        more, own = width * self.size - total, slice(self.place * width, (self.place + 1) * width)
        mask = batch.attention
        if mask is not None and more:
            mask = pad(mask, (0, more, 0, more))
            mask[:, :, range(total, total + more), range(total, total + more)] = True
        valid = pad(batch.valid, (0, more))[:, own]
        routes = None if batch.routes is None else pad(batch.routes, (0, 0, 0, 0, 0, more), value=UNKNOWN)[:, own]
        row, column = batch.source_index // total, self._column(batch)
        return dataclasses.replace(
            batch, input_ids=pad(batch.input_ids, (0, more), value=self.pad_id)[:, own].contiguous(),
            position_ids=pad(batch.position_ids, (0, more))[:, own].contiguous(), valid=valid.contiguous(), attention=mask,
            routes=routes, source_index=row * width + column - own.start, tokens=int(valid.sum()))

    def join(self, batch: MicroBatch, values: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """Numbers [N] of all loss tokens of a micro-batch, of which each rank of the group has those of `mine(batch)`;
        `device` is that of the ranks' exchanges."""
        whole = torch.zeros(batch.loss_tokens, dtype=torch.float64)
        if values is not None:
            whole[self._chosen(batch)] = values.double().cpu()
        whole = whole.to(device)
        torch.distributed.all_reduce(whole, group=self._group)
        return whole

    def attend(self, function, query, key, value) -> torch.Tensor:
        """`function` of query [B, H/s, T, D], key and value [B, Hk/s, T, D] -> [B, T, H/s, D] for this rank's heads, given
        its columns [B, H, T/s, D] of all; returns [B, T/s, H, D]."""
        # Ulysses wants [B, T, H, D].
        return self._attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), 0, function=function)

    def _chosen(self, batch: MicroBatch) -> torch.Tensor:
        return (self._column(batch) // self._width(batch) == self.place).nonzero()[:, 0]

    def _width(self, batch: MicroBatch) -> int:
        return -(-batch.input_ids.shape[1] // self.size)

    @staticmethod
    def _column(batch: MicroBatch) -> torch.Tensor:
        return batch.source_index % batch.input_ids.shape[1]


def _core(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, function) -> torch.Tensor:
    return function(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
