"""What tensors hold at this moment, for tests and benchmarks of memory."""

from __future__ import annotations

import gc

import torch


def live_bytes() -> int:
    """Of all tensors that Python can reach, each memory once."""
    gc.collect()
    found: dict[int, int] = {}
    for thing in gc.get_objects():
        if type(thing) in (torch.Tensor, torch.nn.Parameter):
            for tensor in (thing, thing.grad if thing.is_leaf else None):
                if tensor is not None:
                    found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(found.values())
