"""Micro-batches that would overfill an expert-parallel rank are halved before anything is sent to it.

A router chooses experts layer by layer, so how many copies of tokens a rank gets is known only inside the forward pass,
after the layers before. `LoadGuard` looks there, between router and dispatch: the ranks that share a layer's experts add up
what each would get. Where that is above the budget, this pass is given up without ending it (an exception in its midst would
leave ZeRO-3 with gathered weights and other ranks waiting): this layer's tokens go evenly to all experts, so that nothing
overflows, the result is thrown away, and all ranks run the two halves of their micro-batches instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import nn

from mopd.learner.packing import MicroBatch, empty_micro_batch
from mopd.losses.chunked import join_details


@dataclasses.dataclass
class SplitCounts:
    """What a step's guard did; the same numbers on every rank.

    splits       micro-batches (halves among them) that were halved
    passes       of these, forward passes that were begun and thrown away; the others were known to be too large before
    over_budget  passes that went on above the budget since a single row was left, which cannot be halved
    busiest      most copies of tokens that one rank got in one layer of one pass
    """

    splits: int = 0
    passes: int = 0
    over_budget: int = 0
    busiest: int = 0


class LoadGuard:
    """Watches the routers of DeepSpeed's AutoEP layers in `model`.

    budget  largest number of token copies (padding included, as AutoEP sends it too) that one expert-parallel rank may get
            from all ranks in one layer of one forward pass
    Every rank must make the same calls in the same order.
    """

    def __init__(self, model: nn.Module, budget: int, *, pad_id: int, prefix_gradient: str):
        self.budget, self.pad_id, self.prefix_gradient = budget, pad_id, prefix_gradient
        self.layers = [module for module in model.modules() if getattr(module, "_is_autoep_layer", False)]
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self.counts = SplitCounts()
        self._most: torch.Tensor | None = None  # int64 [1] of the pass that is watched, on the device
        self._handles = [layer.router.register_forward_hook(self._hook(layer)) for layer in self.layers]

    def _hook(self, layer: nn.Module):
        copies = layer.top_k

        def hook(module, arguments, output):
            if self._most is None:
                return None
            scores, chosen, histogram, *rest = output
            load = histogram.to(torch.int64).view(layer.ep_size, -1).sum(1)
            if layer.ep_size > 1:
                torch.distributed.all_reduce(load, group=layer.ep_group)
            over = load.max() > self.budget
            self._most = torch.maximum(self._most, load.max()[None])
            even = torch.arange(chosen.numel(), device=chosen.device).remainder(layer.num_experts).view(-1, copies)
            chosen = torch.where(over, even.to(chosen.dtype), chosen)
            spread = torch.bincount(even.reshape(-1), minlength=layer.num_experts).to(histogram.dtype)
            return scores, chosen, torch.where(over, spread.view_as(histogram), histogram), *rest
        return hook

    def run(self, batch: MicroBatch, forward: Callable[[MicroBatch, Callable[[], bool]], tuple], backward: Callable,
            undo: Callable[[], None]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Train on one micro-batch of every rank, in halves where it must be; returns (sum of the losses, details of all its
        loss tokens in order).

        forward(batch, given_up) -> (loss, details); `given_up()` says, inside, that the result will be thrown away
        backward(loss)
        undo()  the last forward counts for nothing
        """
        most = self._expected(batch)
        known = most > self.budget
        if not known:
            self._most = torch.zeros(1, dtype=torch.int64, device=batch.input_ids.device)
            try:
                loss, details = forward(batch, lambda: bool(self._most > self.budget))
                most = self._over_world(self._most)
            finally:
                self._most = None
        if most <= self.budget:
            self.counts.busiest = max(self.counts.busiest, most)
            backward(loss)
            return loss.detach(), details
        loss = details = None  # let go of the graph before the halves make theirs
        if not known:
            undo()
        parts = self._halves(batch)
        if parts is None:
            self.counts.over_budget += 1
            self.counts.busiest = max(self.counts.busiest, most)
            loss, details = forward(batch, lambda: False)
            backward(loss)
            return loss.detach(), details
        self.counts.splits += 1
        self.counts.passes += not known
        found = [self.run(part, forward, backward, undo) for part in parts]
        details = [detail for part, (_, detail) in zip(parts, found, strict=True) if part.loss_tokens]
        return found[0][0] + found[1][0], join_details(details) if details else found[0][1]

    def take(self) -> SplitCounts:
        """The counts since the last call."""
        counts, self.counts = self.counts, SplitCounts()
        return counts

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _expected(self, batch: MicroBatch) -> int:
        """Copies that a rank gets if routers choose evenly: fewer than the busiest gets, and known before any pass."""
        tokens = max(batch.input_ids.numel(), 0 if batch.prefix_ids is None else batch.prefix_ids.numel())
        of_ranks = torch.zeros(self.world_size, dtype=torch.int64, device=batch.input_ids.device)
        of_ranks[self.rank] = tokens
        if self.world_size > 1:
            torch.distributed.all_reduce(of_ranks)
        # Whichever ranks share experts, the busiest group's mean is at least that of all.
        return max((int(of_ranks.sum()) * layer.top_k // (self.world_size) for layer in self.layers), default=0)

    def _over_world(self, most: torch.Tensor) -> int:
        if self.world_size > 1:
            torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)

    def _halves(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch] | None:
        """Two micro-batches of this rank that together have its rows: half of them each, or, where no rank has more than one,
        the rows of half of the ranks each. None where a single row of a single rank is left."""
        rows = torch.zeros(self.world_size, dtype=torch.int64, device=batch.input_ids.device)
        rows[self.rank] = batch.input_ids.shape[0] if batch.tokens else 0
        if self.world_size > 1:
            torch.distributed.all_reduce(rows)
        if int(rows.sum()) <= 1:
            return None
        nothing = empty_micro_batch(self.pad_id, self.prefix_gradient).to(batch.input_ids.device)
        if int(rows.max()) > 1:
            return halves(batch) if int(rows[self.rank]) > 1 else (batch, nothing)
        with_rows = rows.nonzero().flatten().tolist()
        early = with_rows[:(len(with_rows) + 1) // 2]
        return (batch, nothing) if self.rank in early or not batch.tokens else (nothing, batch)


def split_alerts(counts: SplitCounts, budget: int) -> list[str]:
    """A sentence where something was above the budget that cannot be halved any more."""
    if not counts.over_budget:
        return []
    return [f"{counts.over_budget} rows alone fill an expert-parallel rank above deepspeed.split_on_imbalance ({budget} "
            f"copies of tokens; the most were {counts.busiest}) and were trained all the same: take shorter rows or a larger "
            "autoep_size"]


def unless(given_up: Callable[[], bool], loss_function: Callable) -> Callable:
    """`loss_function`, or 0 where the pass is given up: what comes of its logits is nobody's loss."""
    return lambda logits, part: (logits.sum() * 0.0, {}) if given_up() else loss_function(logits, part)


def halves(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The first and the second half of a micro-batch's rows (two at least), each cut to the longest row that it has."""
    middle = batch.input_ids.shape[0] // 2
    return rows_of(batch, 0, middle), rows_of(batch, middle, batch.input_ids.shape[0])


def rows_of(batch: MicroBatch, first: int, end: int) -> MicroBatch:
    """The micro-batch of rows [first, end) alone with their loss tokens, in the same order."""
    size = batch.input_ids.shape[1]
    own = batch.source_index // size
    # Loss tokens stand in the order of their rows.
    start, stop = (int((own < row).sum()) for row in (first, end))
    part = batch.chosen(slice(start, stop))
    valid = batch.valid[first:end]
    width = max(1, int(valid.any(0).sum()))
    before = 0 if batch.prefix_ids is None else batch.prefix_ids.shape[1]
    prefix = None if batch.prefix_valid is None else batch.prefix_valid[first:end]
    return dataclasses.replace(
        part, input_ids=batch.input_ids[first:end, :width], position_ids=batch.position_ids[first:end, :width],
        valid=valid[:, :width],
        attention=None if batch.attention is None else batch.attention[first:end, :, :width, :before + width],
        source_index=(part.source_index // size - first) * width + part.source_index % size,
        tokens=int(valid.sum()) + (0 if prefix is None else int(prefix.sum())),
        prefix_ids=None if batch.prefix_ids is None else batch.prefix_ids[first:end], prefix_valid=prefix,
        routes=None if batch.routes is None else batch.routes[first:end, :width],
        prefix_routes=None if batch.prefix_routes is None else batch.prefix_routes[first:end])
