"""A teacher in these processes that none of them holds whole: DeepSpeed ZeRO-3 splits its frozen weights over the ranks.

A forward pass gathers one module's weights after the other, so every rank must make it: all calls of a sharded teacher are
collective. Whoever calls sees to it that all ranks call equally often and in the same order (a rank without work with
`mopd.learner.packing.empty_micro_batch`); `collective` says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib

import torch
from torch import nn

from mopd.learner.engine import start_processes
from mopd.learner.forward import head_of, hidden_at_loss_tokens
from mopd.learner.moe import find_routers, gathered
from mopd.learner.packing import MicroBatch
from mopd.losses.chunked import Head
from teachers.scoring.hf import HFTeacher


class ShardedTeacher(HFTeacher):
    """A frozen causal LM as a scorer, of whose parameters each of N ranks keeps about 1/N.

    model        whole, in the host's memory; it is split here, one parameter at a time, and is not to be used otherwise
                 again. Every rank must give the same model
    offload      each rank's part lies in the host's memory, and goes to the device only when it is gathered

    Every rank must make it, and then make the same calls in the same order. The output head is gathered by the first call
    after a `rest`, and whole on every rank until the next `rest`. Raises ValueError for a model whose forward passes would
    gather other weights on every rank, or whose output head is of its own kind.
    """

    collective = True

    def __init__(self, model: nn.Module, *, teacher: str, vocabulary: int | None = None, offload: bool = False):
        if not torch.distributed.is_initialized():
            start_processes()
        import deepspeed  # its messages go where the learner has sent them

        if loop := next((r for r in find_routers(model) if isinstance(r.experts, nn.ModuleList)), None):
            raise ValueError(f"teacher {teacher!r} cannot be split over ranks: its experts ({loop.experts_name}) are modules "
                             "of their own, and which of them run depends on the tokens, which are others on every rank. "
                             f"Leave teachers.{teacher}.shard out, or serve it with `mopd teacher serve`")
        if head_of(model) is None:
            raise ValueError(f"teacher {teacher!r} cannot be split over ranks: its output head is no plain linear layer. "
                             f"Leave teachers.{teacher}.shard out, or serve it with `mopd teacher serve`")
        self.model = model.eval().requires_grad_(False)
        self.teacher, self.vocabulary, self.offloaded, self.scored_tokens = teacher, vocabulary, None, 0
        weight = model.get_output_embeddings().weight
        if torch.isnan(weight).any():
            raise ValueError(f"the output matrix of teacher {teacher!r} has NaN entries; its checkpoint is damaged")
        self.ids = len(weight) if vocabulary is None else min(vocabulary, len(weight))
        kind = next(model.parameters()).dtype
        config = {
            "train_micro_batch_size_per_gpu": 1,
            # Nothing is kept whole: small parameters are gathered as the others are.
            # The other linear function would stand in for torch's in the whole process, and saves what only training keeps.
            "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0,
                                  "memory_efficient_linear": False},
            "bf16": {"enabled": kind == torch.bfloat16}, "fp16": {"enabled": kind == torch.float16},
        }
        if offload:
            config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
        self.frame = _Frame(model)
        # Split before the engine sees it, which would bring the whole model to the device. Buffers it leaves alone.
        deepspeed.zero.Init(module=self.frame, config_dict_or_path=config)
        self.engine, *_ = deepspeed.initialize(model=self.frame, config=config, dist_init_required=False)
        self.device = torch.device(self.engine.device)
        for buffer in model.buffers():
            buffer.data = buffer.to(self.device)
        self._gathered: Head | None = None
        self.weights_hash = self._hash()

    @property
    def head(self) -> Head:
        """The output head of the shared ids, whole. Collective after a `rest`."""
        if self._gathered is None:
            with contextlib.ExitStack() as held:
                found = head_of(self.model)
                for tensor in (found.weight, found.bias):
                    if tensor is not None:
                        held.enter_context(gathered(tensor))
                cut = head_of(self.model).cut(self.vocabulary)
                self._gathered = dataclasses.replace(
                    cut, weight=cut.weight.detach().to(self.device, copy=True),
                    bias=None if cut.bias is None else cut.bias.detach().to(self.device, copy=True))
        return self._gathered

    def _states(self, batch: MicroBatch) -> torch.Tensor:
        _ = self.head  # at the same place on every rank
        return self.frame(batch)

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """As HFTeacher's, but not rounded to the model's precision before they become float32."""
        return self.head.logits(states)

    def _hash(self) -> str:
        """SHA-256 over this rank's part of every parameter, and every buffer, in name order."""
        digest = hashlib.sha256()
        for name, tensor in sorted([*self.model.named_parameters(), *self.model.named_buffers()]):
            part = getattr(tensor, "ds_tensor", tensor)
            digest.update(name.encode())
            digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @property
    def elements(self) -> int:
        """Numbers of the parameters that this rank keeps."""
        return sum(p.ds_tensor.numel() for p in self.model.parameters())

    def rest(self) -> None:
        """The step's scoring is over: the output head is released. Not collective."""
        self._gathered = None

    def close(self) -> None:
        """The model is forgotten. Not collective."""
        if self.model is not None:
            self.engine.destroy()
        self.model = self.frame = self.engine = self._gathered = None


class _Frame(nn.Module):
    """What DeepSpeed drives: one forward is one micro-batch's hidden states at its loss tokens, [N, H]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        return hidden_at_loss_tokens(self.model, batch)
