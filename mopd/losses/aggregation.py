"""From per-token losses to one number: aggregation modes, cells, and the per-token weights that make splits exact.

The whole loss of a step is Σ over cells (domain, stream) of ω · agg(cell). Every `agg` is linear in the per-token
losses, so it is a weight per token: `step_weights` computes all of them once, over all rows of the step, and a
micro-batch or rank only sums weight · loss over its own tokens. No denominator is left for a split to get wrong:
1×8 = 8×1 = any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

MODES = ("token_mean", "sequence_mean", "prompt_mean", "turn_mean")

Mode = str | Mapping[str, float]


def aggregate(
    per_token: Tensor,
    *,
    mode: Mode,
    sequence: Tensor,
    group: Tensor,
    turn: Tensor,
    include: Tensor | None = None,
) -> Tensor:
    """per_token[T] -> scalar over the tokens given here, which must be the global batch of one cell.

    * ``token_mean``     all tokens alike (DAPO's normalisation, arXiv 2503.14476)
    * ``sequence_mean``  mean of each sequence, then over sequences
    * ``prompt_mean``    tokens summed within a group, divided by the group's tokens, then averaged over groups
    * ``turn_mean``      mean of each turn, then over all turns (TurnOPD, arXiv 2607.05804)

    A mapping mode → share mixes modes (see `aggregation_schedule`). ``include`` [T] bool leaves tokens out of sums and
    denominators. Gradient: that of a fixed linear combination. No token at all gives 0, still in the graph.
    For a batch that is split use `step_weights` over the whole batch and sum weight · loss instead.
    """
    weights = aggregation_weights(mode, sequence, group, turn, include=include)
    weight = torch.as_tensor(weights, dtype=per_token.dtype, device=per_token.device)
    return (torch.where(weight != 0, per_token, 0.0) * weight).sum()


def aggregation_weights(
    mode: Mode,
    sequence,
    group,
    turn,
    cell=None,
    *,
    include=None,
) -> np.ndarray:
    """Weight per token, float64 [T], whose sum is 1 in every cell that has an included token.

    sequence, group, turn, cell: integer ids [T] (numpy or torch); a turn is a (sequence, turn) pair. cell=None: one
    cell. Groups and sequences are told apart within their cell. The result depends on a token's own ids and on the
    counts only, so permuting, repacking or splitting the tokens permutes the weights and changes none.
    """
    ids = [_ids(x) for x in (sequence, group, turn)]
    cells = np.zeros(len(ids[0]), np.int64) if cell is None else _ids(cell)
    if len({len(x) for x in (*ids, cells)}) != 1:
        raise ValueError(
            f"sequence, group, turn and cell have {[len(x) for x in (*ids, cells)]} tokens; they must agree"
        )
    keep = np.ones(len(cells), bool) if include is None else np.asarray(_numpy(include), bool)
    if len(keep) != len(cells):
        raise ValueError(f"include has {len(keep)} tokens, the ids have {len(cells)}")
    shares = {mode: 1.0} if isinstance(mode, str) else dict(mode)
    weights = np.zeros(len(cells))
    for name, share in shares.items():
        if name not in MODES:
            raise ValueError(f"unknown aggregation mode {name!r}; there are: {', '.join(MODES)}")
        if keep.any() and share != 0.0:
            weights[keep] += share * _mode_weights(name, *(x[keep] for x in ids), cells[keep])
    return weights


def _mode_weights(mode: str, sequence: np.ndarray, group: np.ndarray, turn: np.ndarray, cell: np.ndarray) -> np.ndarray:
    levels = {
        "token_mean": (),
        "sequence_mean": (group, sequence),
        "prompt_mean": (group,),
        "turn_mean": (group, sequence, turn),
    }[mode]
    _, cell = np.unique(cell, return_inverse=True)
    unit = cell
    for level in levels:  # one integer per distinct tuple of ids
        _, level = np.unique(level, return_inverse=True)
        _, unit = np.unique(unit.astype(np.int64) * (int(level.max()) + 1) + level, return_inverse=True)
    tokens_in_unit = np.bincount(unit)
    _, first_token = np.unique(unit, return_index=True)
    units_in_cell = np.bincount(cell[first_token])
    return 1.0 / (tokens_in_unit[unit] * units_in_cell[cell].astype(np.float64))


def aggregation_schedule(start: str, end: str, step: float, steps: float) -> dict[str, float]:
    """Linear schedule from one mode to another (TurnOPD): {mode: share} at `step`, all `start` at 0, all `end` from
    `steps` on."""
    for name in (start, end):
        if name not in MODES:
            raise ValueError(f"unknown aggregation mode {name!r}; there are: {', '.join(MODES)}")
    if steps < 1:
        raise ValueError(f"a schedule needs at least 1 step, got {steps}")
    if start == end:
        return {start: 1.0}
    progress = min(max(step / steps, 0.0), 1.0)
    return {start: 1.0 - progress, end: progress}


def cell_weights(
    domain_share: Mapping[str, float],
    stream_share: Mapping[str, float] | Mapping[str, Mapping[str, float]],
    present: Iterable[tuple[str, str]],
    *,
    balance: Mapping[str, float] | None = None,
) -> dict[tuple[str, str], float]:
    """ω of every cell (domain, stream) that is `present` (not empty in this step): share of domain × share of stream,
    renormalised over those cells so that they sum to 1, then times the domain's `balance` factor.

    stream_share: {stream: share}, or {domain: {stream: share}}. A cell that is present although its configured share
    is 0 gets ω = 0. Raises ValueError for a domain or stream without a share, and if every present cell has share 0.
    """
    raw: dict[tuple[str, str], float] = {}
    for domain, stream in sorted(set(present)):
        if domain not in domain_share:
            raise ValueError(
                f"no share is configured for domain {domain!r}; there are: {', '.join(sorted(domain_share))}"
            )
        streams = stream_share.get(domain, stream_share)
        share = streams.get(stream) if isinstance(streams, Mapping) else None
        if share is None or isinstance(share, Mapping):
            raise ValueError(f"no share is configured for stream {stream!r} of domain {domain!r}")
        if domain_share[domain] < 0 or share < 0:
            raise ValueError(f"shares must not be negative: domain {domain!r}, stream {stream!r}")
        raw[domain, stream] = domain_share[domain] * share
    total = sum(raw.values())
    if raw and total <= 0:
        raise ValueError(f"all cells that have tokens have share 0: {sorted(raw)}")
    factor = balance or {}
    return {cell: share / total * factor.get(cell[0], 1.0) for cell, share in raw.items()}


def step_weights(
    mode: Mode,
    sequence,
    group,
    turn,
    domain,
    stream,
    *,
    domains: tuple[str, ...],
    streams: tuple[str, ...],
    domain_share: Mapping[str, float],
    stream_share: Mapping[str, float] | Mapping[str, Mapping[str, float]],
    balance: Mapping[str, float] | None = None,
    include=None,
) -> tuple[np.ndarray, dict[tuple[str, str], float]]:
    """The weight of every token of a whole step, float64 [T], and ω by cell: the step's loss is Σ weight · per-token
    loss.

    domain, stream: indices [T] into `domains` and `streams`. Compute it once, over all rows of all ranks and
    micro-batches of the step, then slice it with the rows; each micro-batch adds ``(weight * loss).sum()`` and
    nothing is divided again (undo whatever the training engine divides by: its accumulation steps, its rank mean).
    """
    domain, stream = _ids(domain), _ids(stream)
    cell = domain * len(streams) + stream
    keep = np.ones(len(cell), bool) if include is None else np.asarray(_numpy(include), bool)
    present = [(domains[c // len(streams)], streams[c % len(streams)]) for c in np.unique(cell[keep]).tolist()]
    omega = cell_weights(domain_share, stream_share, present, balance=balance)
    weights = aggregation_weights(mode, sequence, group, turn, cell, include=keep)
    table = np.zeros(len(domains) * len(streams))
    for (d, s), value in omega.items():
        table[domains.index(d) * len(streams) + streams.index(s)] = value
    return weights * (table[cell] if len(cell) else 1.0), omega


def _numpy(values) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def _ids(values) -> np.ndarray:
    return _numpy(values).astype(np.int64, copy=False).reshape(-1)
