"""What a run needs of a device's memory, estimated from configuration and config.json alone, before anything is loaded.

Weights, gradients and optimizer states follow from DeepSpeed's stages (ZeRO, 1910.02054) and are exact to a few percent
(tests/mopd/test_memory.py counts the tensors); activations, caches and logits are what the code keeps, counted by layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mopd.model_shape import Layer, Shape, shape_of

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
BUCKET = 500_000_000  # elements of DeepSpeed's buffer for gradients on their way (zero_optimization.reduce_bucket_size)
LIVE = 1_000_000_000  # elements that ZeRO-3 keeps gathered at most (stage3_max_live_parameters)
KEPT = {"sampling": ("parameters", "optimizer", "engine", "sleeper", "cache", "resident teachers"),
        "scoring": ("parameters", "optimizer", "engine", "resident teachers", "loaded teachers", "scoring"),
        "training": ("parameters", "gradients", "optimizer", "buckets", "gathered", "activations", "logits", "engine",
                     "resident teachers"),
        "update": ("parameters", "gradients", "optimizer", "update", "engine", "resident teachers")}


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Bytes of one rank.

    device   part -> bytes on the device; host: part -> bytes in the host's memory that offloading takes there
    phases   phase of a step -> bytes on the device; the largest is what the device must hold
    notes    what the numbers assume, a sentence each
    """

    ranks: int
    device: Mapping[str, int]
    host: Mapping[str, int]
    phases: Mapping[str, int]
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> int:
        return max(self.phases.values())

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=self.phases.__getitem__)


def model_states(shape: Shape, *, stage: int, dtype: str, ranks: int = 1, experts_over: int = 0,
                 offload_optimizer: bool = False, offload_parameters: bool = False) -> tuple[dict[str, int], dict[str, int]]:
    """(on the device, in the host's memory): part -> bytes of one rank between and in the steps of the student's training.

    Per trained parameter: its weight in `dtype`, a gradient in `dtype`, and in float32 a master weight (not at stage 0 in
    float32, where the weight is the master) and AdamW's two moments. Stage 1 splits master and moments over the ranks that
    hold the parameter, 2 the gradients too, 3 the weights too. Of experts spread over E ranks a rank holds 1/E, split
    further over ranks / E.
    """
    size, spread = BYTES[dtype], max(1, experts_over)
    trained, frozen = shape.parameters - shape.frozen, shape.frozen
    here = shape.dense + shape.experts / spread  # weights that a rank has where no stage splits them
    trained_here = here - frozen
    part = trained / ranks  # of what stages split: experts too, over ranks / E of 1 / E of them
    weights = shape.parameters / ranks * size if stage == 3 else here * size
    gradients = (part if stage >= 2 else trained_here) * size
    optimizer = 8 * (part if stage else trained_here) + (4 * part if stage else 0 if dtype == "float32" else 4 * trained_here)
    bucket = min(BUCKET, trained) * size if stage else 0
    update = 4 * part if stage and dtype != "float32" else 0 if stage or dtype == "float32" else 4 * trained_here
    device = {"parameters": weights, "gradients": gradients, "optimizer": optimizer, "buckets": bucket, "update": update,
              "gathered": min(LIVE, here) * size if stage == 3 and ranks > 1 else 0}
    host: dict[str, float] = {}
    if offload_optimizer:
        # The update runs there, on float32 gradients; two buffers of the largest tensor carry them over.
        host = {"optimizer": optimizer, "gradients": 4 * part + (4 * part if stage < 3 else size * part)}
        device |= {"optimizer": 0, "update": 0, "buckets": bucket + shape.largest * size}
        if stage >= 2:
            device["gradients"] = 0
    if offload_parameters:
        host["parameters"] = weights
        device |= {"parameters": 0, "gathered": min(LIVE, here) * size}
    return ({name: round(value) for name, value in device.items()}, {name: round(value) for name, value in host.items()})


def layer_activations(layer: Layer, hidden: int, size: int) -> int:
    """Bytes per token that the backward pass of one layer needs, as Transformers writes it: for each norm its float32 input,
    what it normalised and its output; queries, keys and values as attention takes them, and its result; where queries and
    keys have norms, these; the MLP's gate, up, activation and product; of a MoE layer these of every expert that the token
    goes to, with its hidden state there before and after."""
    norm = 4 * hidden + 2 * size * hidden
    heads = size * (2 * layer.query + layer.key + layer.value) + layer.normed * (4 + size) * (layer.query + layer.key)
    mlp = 4 * size * layer.dense
    routed = layer.chosen * size * (2 * hidden + 4 * layer.expert) + 8 * layer.experts
    return 2 * norm + heads + mlp + routed


def activations(shape: Shape, *, tokens: int, context: int, dtype: str, checkpointing: bool, columns_over: int = 1) -> int:
    """Bytes that a micro-batch of `tokens` in rows of `context` needs between forward and backward pass: every layer's, or
    with checkpointing every layer's input and one layer's own; and at most the mask of rows with branches (tokens × context).
    Of `columns_over` ranks that share micro-batches each has `tokens` of them, and the mask whole."""
    size = BYTES[dtype]
    each = [layer_activations(layer, shape.hidden, size) * tokens for layer in shape.layers]
    ends = tokens * shape.hidden * (size + 4)
    whole = tokens * columns_over
    mask = whole * min(context, whole) * (1 + size)
    if checkpointing:
        return len(each) * tokens * shape.hidden * size + max(each, default=0) + ends + mask
    return sum(each) + ends + mask


def estimate(config: Any, shape: Shape | None = None) -> Estimate:
    """Memory of one rank of a run of this Config. Raises UnknownShape for a model whose config.json is not at hand."""
    given, place, train = config.deepspeed, config.placement, config.train
    ranks = place.learner.nodes * place.learner.ranks_per_node
    shape = shape or shape_of(config.student.model, trust_remote_code=config.student.trust_remote_code,
                              freeze_router=config.student.freeze_router)
    context = max((domain.max_context_tokens for domain in config.domains.values()), default=1024)
    over = given.sequence_parallel_size
    tokens, notes = max(train.micro_batch_tokens, -(-context // over)), []
    if tokens > train.micro_batch_tokens:
        notes.append(f"a micro-batch has {context} tokens, one whole sequence, which is more than train.micro_batch_tokens"
                     + (f" of {over} ranks" if over > 1 else ""))
    device, host = model_states(shape, stage=given.zero_stage, dtype=given.dtype, ranks=ranks, experts_over=given.autoep_size,
                                offload_optimizer=given.offload_optimizer, offload_parameters=given.offload_parameters)
    device["activations"] = activations(shape, tokens=tokens, context=context, dtype=given.dtype,
                                        checkpointing=given.gradient_checkpointing, columns_over=over)
    device["logits"] = round(given.logits_mib * 2**20) + shape.hidden * 8 * tokens
    size, whole = BYTES[given.dtype], given.zero_stage < 3 and not given.autoep_size
    engine = config.sampling.engine
    if not sampled_here(config):
        notes.append("sampling is on servers, which have devices of their own" if engine == "server" else
                     "sampling is on a device of its own, placement.sampling.device")
    elif engine == "vllm":
        share, have = config.sampling.vllm_options.gpu_memory_utilization, device_memory(config)[0]
        device["sleeper" if config.sampling.vllm_options.sleep else "engine"] = round(share * (have or 0))
        notes.append("the engine vllm takes the share of the device that sampling.vllm_options.gpu_memory_utilization says, "
                     "weights and cache together")
    else:
        device["engine"] = 0 if whole else shape.parameters * size
        device["cache"] = train.sampling_batch * shape.cache(context) * size
    _teachers(config, device, notes, ranks, tokens * over, shape)  # teachers read whole rows
    phases = {phase: sum(device.get(part, 0) for part in parts) for phase, parts in KEPT.items()}
    return Estimate(ranks, device, host, phases, tuple(notes))


def sampled_here(config: Any) -> bool:
    """Whether an engine samples in the learner's processes, on their devices."""
    return config.sampling.engine != "server" and not config.placement.sampling.device


def _teachers(config: Any, device: dict[str, int], notes: list[str], ranks: int, tokens: int, student: Shape) -> None:
    """Weights of the teachers that score in the learner's processes, and what scoring keeps."""
    used = {name for domain in config.domains.values() for name in (*domain.teacher_weights, domain.teacher)}
    scoring = 0
    for name in sorted(used & config.teachers.keys()):
        teacher = config.teachers[name]
        if teacher.backend == "server":
            continue
        own = config.placement.teachers.get(name)
        if own is not None and own.device:
            notes.append(f"teacher {name} is on a device of its own, {own.device}")
            continue
        shape = shape_of(teacher.model, trust_remote_code=teacher.trust_remote_code)
        size = BYTES[teacher.dtype or config.deepspeed.dtype]
        held = shape.parameters * size // (ranks if teacher.shard else 1)
        part = "loaded teachers" if teacher.offload else "resident teachers"
        # One after the other is brought to the device; those that stay add up.
        device[part] = max(device.get(part, 0), held) if teacher.offload else device.get(part, 0) + held
        layer = max((layer_activations(layer, shape.hidden, size) for layer in shape.layers), default=0)
        scoring = max(scoring, tokens * (layer + 2 * shape.hidden * size))
    device["scoring"] = scoring


def table_of(found: Estimate) -> list[tuple[str, str, float]]:
    """(part, what it is, GiB) of everything that is not zero, in the order of a step."""
    words = {"parameters": "weights of the student", "gradients": "its gradients",
             "optimizer": "master weights and optimizer states", "buckets": "gradients on their way to other ranks",
             "update": "float32 gradients of the update", "gathered": "weights gathered for a pass (ZeRO-3)",
             "activations": "activations of a micro-batch", "logits": "a chunk of logits",
             "engine": "the sampling engine's own copy", "sleeper": "the sampling engine, asleep in training",
             "cache": "its key/value cache",
             "resident teachers": "teachers that stay", "loaded teachers": "the largest teacher that comes to score",
             "scoring": "activations of scoring"}
    return [(part, words[part], found.device[part] / GIB) for part in words if found.device.get(part)]


def device_memory(config: Any) -> tuple[int | None, str]:
    """(bytes of one device, where the number is from); None where nothing says it."""
    if config.placement.device_memory_gib is not None:
        return round(config.placement.device_memory_gib * GIB), "placement.device_memory_gib"
    import os

    import torch

    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name(0)
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return pages // config.placement.learner.ranks_per_node, "this machine's memory, shared by the ranks on it"


def warnings_of(found: Estimate, config: Any) -> list[str]:
    """What does not fit, a sentence each with the remedies that would help most."""
    said = []
    have, source = device_memory(config)
    if have is not None and found.peak > have:
        said.append(f"memory: a rank needs about {found.peak / GIB:.1f} GiB in {found.peak_phase}, and a device has "
                    f"{have / GIB:.1f} GiB ({source}). {_remedy(found, config)}")
    limit = config.placement.host_memory_gib
    need = sum(found.host.values()) * config.placement.learner.ranks_per_node / GIB
    if limit is not None and need > limit:
        said.append(f"memory: what is offloaded takes about {need:.1f} GiB of a machine's memory, and "
                    f"placement.host_memory_gib is {limit:g}; take more machines or less offloading")
    return said


def _remedy(found: Estimate, config: Any) -> str:
    inside = {part: found.device.get(part, 0) for part in KEPT[found.peak_phase]}
    largest = max(inside, key=inside.__getitem__)
    given = config.deepspeed
    remedies = {
        "activations": "set deepspeed.gradient_checkpointing=true" if not given.gradient_checkpointing
                       else "lower train.micro_batch_tokens",
        "optimizer": "raise deepspeed.zero_stage or the number of ranks, or set deepspeed.offload_optimizer=true",
        "parameters": "take deepspeed.zero_stage=3 on more ranks" if given.zero_stage < 3
                      else "take more ranks, or set deepspeed.offload_parameters=true",
        "gradients": "raise deepspeed.zero_stage to 2 or more",
        "resident teachers": "put teachers behind servers, or set teachers.NAME.offload or shard",
        "loaded teachers": "put teachers behind servers, or set teachers.NAME.shard",
        "engine": "put sampling on servers (placement.sampling)", "cache": "lower train.sampling_batch",
        "logits": "lower deepspeed.logits_mib", "scoring": "lower train.micro_batch_tokens",
    }
    return f"The largest part of it is {largest}: {remedies.get(largest, 'take more ranks')}"
