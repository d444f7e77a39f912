"""How long a step takes, estimated: products of weights and attention of student and teachers against a stated speed."""

from __future__ import annotations

import dataclasses
from typing import Any

from mopd.config import resume_turns, stream_shares
from mopd.memory import BYTES, sampled_here
from mopd.model_shape import Shape, shape_of


@dataclasses.dataclass(frozen=True)
class Work:
    """Of one step, at most: every sequence as long as its domain allows.

    rows         tokens that are trained on and scored, with their contexts
    loss         of these, tokens that carry loss
    sampled      tokens that are sampled
    training, scoring, prefill, decode   floating-point operations
    decode_bytes bytes that decoding reads from memory: weights once per token of a batch, the cache once per token
    """

    rows: float
    loss: float
    sampled: float
    training: float
    scoring: float
    prefill: float
    decode: float
    decode_bytes: float


def forward_flops(shape: Shape, tokens: float, context: float, loss: float) -> float:
    """Of a forward pass over `tokens` in rows of `context`, with the output layer on `loss` of them: two per parameter that
    a token meets (Kaplan et al. 2001.08361, section 2.1), and attention's scores and sums over half the context, or over
    its window."""
    attention = sum(2 * min(context / 2, layer.window or context) * (layer.query + layer.query * layer.value / layer.key)
                    for layer in shape.layers)
    return tokens * (2 * shape.active + attention) + loss * 2 * shape.head


def work_of(config: Any, student: Shape) -> Work:
    """The work of a step of this Config."""
    train = config.train
    total = sum(domain.share for domain in config.domains.values())
    rows = loss = sampled = scored = decode_bytes = prefill = decode = 0.0
    shapes: dict[str, Shape] = {}
    size = BYTES[config.deepspeed.dtype]
    for name, domain in config.domains.items():
        count = train.samples_per_step * domain.share / total
        shares, context = stream_shares(config, name), domain.max_context_tokens
        stored = shares["teacher_prefix"] + shares["sft_prefix"]
        turns = resume_turns(config, name)
        groups = count * shares["rollout"]
        new = groups * train.group_size * domain.max_turns * domain.max_turn_tokens
        new = min(new, groups * train.group_size * context)
        points = count * stored * (config.selection.points_per_sequence or domain.max_turns)
        fresh = points * train.fresh_turns * turns * domain.max_turn_tokens
        long = groups * train.group_size * context + count * stored * context + (fresh if turns == 1 else 0)
        rows, loss, sampled = rows + long, loss + new + fresh, sampled + new + fresh
        prefill += forward_flops(student, count * (stored + shares["rollout"]) * context, context, 0)
        decode += forward_flops(student, new + fresh, context, new + fresh)
        weights = (student.active + student.head) if train.sampling_batch == 1 else student.parameters
        decode_bytes += (new + fresh) * (weights * size / train.sampling_batch + student.cache(context) * size / 2)
        for teacher in domain.teacher_weights or (domain.teacher,):
            given = config.teachers.get(teacher)
            if given is None or given.backend == "server" or not given.model:
                continue
            if given.model not in shapes:
                shapes[given.model] = shape_of(given.model, trust_remote_code=given.trust_remote_code)
            scored += forward_flops(shapes[given.model], long, context, new + fresh)
    context = max((d.max_context_tokens for d in config.domains.values()), default=1024)
    once = forward_flops(student, rows, context, loss)
    passes = 4 if config.deepspeed.gradient_checkpointing else 3  # backward costs two forward passes
    return Work(rows, loss, sampled, passes * once, scored, prefill, decode, decode_bytes)


def seconds_of(config: Any, work: Work) -> dict[str, float]:
    """Phase -> seconds of a step on the learner's ranks, for the phases whose speed is known: training and scoring at
    `placement.utilisation` of `placement.device_tflops`, sampling by the larger of that and of memory traffic."""
    place = config.placement
    ranks = place.learner.nodes * place.learner.ranks_per_node
    if place.device_tflops is None:
        return {}
    speed = place.device_tflops * 1e12 * place.utilisation
    found = {"training": work.training / speed / ranks, "scoring": work.scoring / speed / ranks}
    if place.device_bandwidth is not None:
        devices = ranks
        fleet = place.sampling
        if not sampled_here(config) and fleet.servers_per_node:
            devices = fleet.servers_per_node * max(1, fleet.gpus_per_server) * (fleet.nodes or place.learner.nodes)
        found["sampling"] = max(work.decode_bytes / (place.device_bandwidth * 1e9), work.decode / speed) / devices + (
            work.prefill / speed / devices)
    return found
