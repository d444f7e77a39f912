"""A learner's state under the model's own names, for another number of ranks, ZeRO stage or spread of experts.

Weights in float32 (the master weights where there are any) and AdamW's moments, whole, in safetensors: what each rank of
any layout takes its part of. DeepSpeed's universal checkpoints are not for all of these: ds_to_universal of DeepSpeed 0.19.8
refuses stage 0 ("can't find *_optim_states.pt files") and dense models of stages 1 and 2 ("Required
universal_checkpoint_info state is missing"), and its results are loaded by ZeRO optimizers, which stage 0 has none of. This
module reads and sets states through DeepSpeed's calls for single parameters instead, which work in every stage.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mopd.learner.engine import Learner
from mopd.learner.experts import Part, whole
from mopd.learner.moe import gathered

INDEX = "portable.json"
WEIGHT, MOMENTS = "weight", ("exp_avg", "exp_avg_sq")
FILE_BYTES = 2 << 30


def save_portable(learner: Learner, folder: Path) -> None:
    """Write the learner's weights and optimizer states to `folder`, by rank 0; every rank must call it."""
    from safetensors.torch import save_file

    adam_steps = _link(learner)
    files: dict[str, str] = {}
    waiting: dict[str, torch.Tensor] = {}

    def flush() -> None:
        if waiting:
            name = f"part-{len(set(files.values())):05d}.safetensors"
            save_file(waiting, folder / name)
            files.update(dict.fromkeys(waiting, name))
            waiting.clear()

    if learner.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    for name, tensor in _states(learner, moments=adam_steps > 0):
        if learner.rank == 0:
            waiting[name] = tensor.float().cpu().contiguous()
            if sum(t.nbytes for t in waiting.values()) >= FILE_BYTES:
                flush()
    if learner.rank == 0:
        flush()
        (folder / INDEX).write_text(json.dumps({"adam_steps": adam_steps, "files": files}))
    torch.distributed.barrier()


def load_portable(learner: Learner, folder: Path) -> None:
    """Take weights and optimizer states from what `save_portable` wrote; every rank must call it. Raises KeyError for a
    parameter that is not there."""
    from safetensors import safe_open

    index = json.loads((folder / INDEX).read_text())
    opened: dict[str, Any] = {}

    def read(name: str) -> torch.Tensor:
        file = index["files"][name]
        if file not in opened:
            opened.clear()
            opened[file] = safe_open(folder / file, framework="pt")
        return opened[file].get_tensor(name)

    steps = index["adam_steps"]
    if steps:
        _make_states(learner)
        _link(learner)
    for part in parts(learner):
        weight = part.take(read(f"{WEIGHT}.{part.name}"))
        _set_weight(part.parameter, weight)
        if not part.parameter.requires_grad:
            continue
        _set(learner, part.parameter, weight, None)
        for key in MOMENTS if steps else ():
            _set(learner, part.parameter, part.take(read(f"{key}.{part.name}")), key)
    for state in _adam(learner).state.values():
        if steps:
            state["step"].fill_(float(steps))


def parts(learner: Learner) -> Iterator[Part]:
    """Every parameter that this rank has a part of, with the name of the whole tensor that it is of; tied ones once."""
    if learner.experts is not None:
        yield from learner.experts.parts(learner.model)
        return
    for name, parameter in learner.model.named_parameters():
        yield Part(parameter, name, lambda tensor: tensor)


def _states(learner: Learner, *, moments: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor): weight.NAME of every parameter, exp_avg.NAME and exp_avg_sq.NAME of those that train."""
    for key in (WEIGHT, *(MOMENTS if moments else ())):
        def taken(parameter: nn.Parameter, key=key) -> torch.Tensor:
            if not parameter.requires_grad:
                return whole(parameter)
            found = _get(learner, parameter, None if key == WEIGHT else key)
            return whole(parameter) if found is None else found

        if learner.experts is not None:
            found = learner.experts.named_weights(learner.model, taken)
        else:
            found = ((name, taken(parameter)) for name, parameter in learner.model.named_parameters())
        frozen = {part.name for part in parts(learner) if not part.parameter.requires_grad} if key != WEIGHT else set()
        for name, tensor in found:
            if name not in frozen:
                yield f"{key}.{name}", tensor


def _adam(learner: Learner) -> torch.optim.Optimizer:
    """torch's AdamW inside whatever DeepSpeed wraps around it."""
    return getattr(learner.optimizer, "optimizer", learner.optimizer)


def _make_states(learner: Learner) -> None:
    """Empty moments for every parameter of AdamW: it makes them in its first step only."""
    adam = _adam(learner)
    # Stage 3 puts its flat master weights into AdamW's groups during a step only.
    flat = getattr(learner.optimizer, "fp32_partitioned_groups_flat", None)
    for parameter in flat or [parameter for group in adam.param_groups for parameter in group["params"]]:
        if not adam.state[parameter]:
            adam.state[parameter] = {"step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                                     **{key: torch.zeros_like(parameter) for key in MOMENTS}}


def _link(learner: Learner) -> int:
    """Have stages 1 and 2 (and stage 0 in bfloat16) find the moments of single parameters, which they do in their first step;
    returns the steps that AdamW has made."""
    states = [state for state in _adam(learner).state.values() if "step" in state]
    if states and hasattr(learner.optimizer, "_lazy_init_hp_params_optimizer_state"):
        learner.optimizer._hp_optimizer_states_linked = False  # loading undoes the links and leaves this as it was
        learner.optimizer._lazy_init_hp_params_optimizer_state()
    return int(states[0]["step"]) if states else 0


def _master(learner: Learner, parameter: nn.Parameter) -> torch.Tensor | None:
    """What AdamW itself updates for a parameter that trains in stage 0: the parameter, in bfloat16 its float32 copy. None in
    the other stages, where it is part of something flat."""
    if learner.config.zero_stage:
        return None
    optimizer = learner.optimizer
    if not hasattr(optimizer, "fp32_groups"):
        return parameter
    return next(own for lows, highs in zip(optimizer.fp16_groups, optimizer.fp32_groups, strict=True)
                for low, own in zip(lows, highs, strict=True) if low is parameter)


def _get(learner: Learner, parameter: nn.Parameter, key: str | None) -> torch.Tensor | None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if (own := _master(learner, parameter)) is not None:
        return own.detach() if key is None else _adam(learner).state[own][key]
    return safe_get_full_fp32_param(parameter) if key is None else safe_get_full_optimizer_state(parameter, key)


def _set(learner: Learner, parameter: nn.Parameter, value: torch.Tensor, key: str | None) -> None:
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

    value = value.float().to(learner.device)
    if (own := _master(learner, parameter)) is not None:
        (own.data if key is None else _adam(learner).state[own][key]).copy_(value)
    elif key is None:
        safe_set_full_fp32_param(parameter, value)
    else:
        safe_set_full_optimizer_state(parameter, value, key)


@torch.no_grad()
def _set_weight(parameter: nn.Parameter, value: torch.Tensor) -> None:
    with gathered(parameter, modified=True):
        parameter.data.copy_(value.reshape(parameter.shape))
