"""Lay rows out as tensors: micro-batches of similar length, shared prefixes computed once, every loss token indexed.

Knows rows and tensors; nothing of models, DeepSpeed or losses. A branch (a fresh turn) sits behind its trunk in the
same row, sees its prefix and itself only, and its positions continue after the prefix. The first token of each action
is predicted from trunk token `at - 1`, so N branches at one point put N labels on one position. Nothing is computed
that carries no loss: the last token of an action and the trunk behind the last label's predecessor are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from mopd.rows import Row

# Per-loss-token fields in their fixed order; `weight` is filled by the step.
TOKEN_FIELDS = (
    "source_index", "label", "behaviour_logprob", "domain", "stream", "group", "sequence", "turn", "version",
    "outcome_advantage", "weight", "row", "action",
)


class InvalidRow(ValueError):
    """A row that cannot be trained on; the message names the row's origin and the rule."""


@dataclasses.dataclass
class MicroBatch:
    """B rows padded on the right to T tokens, with N loss tokens over all rows.

    input_ids, position_ids  int64 [B, T]
    valid              bool [B, T], False on padding; what expert loads count
    attention          bool [B, 1, T, T] (True: query row may see key column) or None where plain causal attention is
                       exact (no branches; right padding is never seen by a real token)
    source_index       int64 [N], index into the flattened B*T of the position that predicts the token
    label              int64 [N]
    behaviour_logprob  float32 [N], log µ, NaN where unknown
    domain, stream     int64 [N], index into the names that `pack` was given
    group, sequence, turn, version   int64 [N]
    outcome_advantage  float32 [N]
    weight             float32 [N], the token's share of the whole step's loss (zeros until a step fills it)
    row, action        int64 [N], the token's row in the list given to `pack` and its action inside that row
    tokens             number of real tokens (valid.sum())
    extra              further tensors with one row per loss token (teacher scores), moved along by `to`
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    valid: torch.Tensor
    attention: torch.Tensor | None
    source_index: torch.Tensor
    label: torch.Tensor
    behaviour_logprob: torch.Tensor
    domain: torch.Tensor
    stream: torch.Tensor
    group: torch.Tensor
    sequence: torch.Tensor
    turn: torch.Tensor
    version: torch.Tensor
    outcome_advantage: torch.Tensor
    weight: torch.Tensor
    row: torch.Tensor
    action: torch.Tensor
    tokens: int
    extra: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def loss_tokens(self) -> int:
        """N."""
        return len(self.label)

    @property
    def padded_tokens(self) -> int:
        """B * T, what a forward pass computes."""
        return self.input_ids.numel()

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        return dataclasses.replace(self, **moved, extra=extra)


def computed_length(row: Row) -> int:
    """Tokens that a forward pass over the packed row really computes (see the module text for what is left out)."""
    trunk, branches = _needed(row)
    return trunk + branches


def _needed(row: Row) -> tuple[int, int]:
    trunk, branches = 1, 0
    for action in row.actions:
        n = len(action.tokens)
        if action.branch:
            trunk = max(trunk, action.at)
            branches += n - 1
        else:
            trunk = max(trunk, action.at + n - 1)
    return trunk, branches


def check_row(row: Row) -> None:
    """Raise InvalidRow where a row breaks the data model: an action without tokens, one that starts before token 1 or
    ends behind the trunk, trunk tokens that differ from the action's, or arrays of unequal length."""
    def bad(reason: str):
        raise InvalidRow(f"row {row.origin or '(no origin)'} of domain {row.domain!r}, stream {row.stream!r}: {reason}")

    if not row.actions:
        bad("it has no action, so nothing would be trained; leave such rows out before packing")
    size = len(row.trunk)
    for i, action in enumerate(row.actions):
        n = len(action.tokens)
        if n == 0:
            bad(f"action {i} has no tokens")
        if not 1 <= action.at <= size:
            bad(f"action {i} starts after {action.at} of {size} trunk tokens; at least one token must stand before it")
        if len(action.behaviour_logprob) != n or len(action.version) != n:
            bad(f"action {i} has {n} tokens, {len(action.behaviour_logprob)} log-probabilities and "
                f"{len(action.version)} versions")
        if not action.branch:
            if action.at + n > size:
                bad(f"action {i} covers trunk tokens [{action.at}, {action.at + n}) of a trunk of {size}")
            if not np.array_equal(row.trunk[action.at:action.at + n], action.tokens):
                bad(f"action {i}'s tokens differ from the trunk's at {action.at}")


def micro_batch_plan(lengths: Sequence[int], token_budget: int, max_rows: int | None = None) -> list[list[int]]:
    """Indices of rows per micro-batch, longest first; each holds at most `token_budget` padded tokens unless a single
    row is longer than that. Of all such cuts of the sorted rows the one that costs least, where a micro-batch costs its
    padded tokens and a fixed part. Equal lengths keep their order."""
    if token_budget < 1:
        raise ValueError(f"token_budget must be positive, got {token_budget}")
    # The fixed part in tokens: measured as about 100 on two CPU cores at budgets of 1,000 to 2,000, where step time
    # hardly depends on the budget; larger budgets belong to devices that want larger batches.
    fixed = max(96, token_budget // 16)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    cost, start = [0.0] + [float("inf")] * len(order), [0] * (len(order) + 1)
    for end in range(1, len(order) + 1):
        for begin in range(end - 1, -1, -1):
            rows, width = end - begin, lengths[order[begin]]
            if rows > 1 and (rows * width > token_budget or rows > (max_rows or rows)):
                break
            if cost[begin] + rows * width + fixed < cost[end]:
                cost[end], start[end] = cost[begin] + rows * width + fixed, begin
    plan, end = [], len(order)
    while end:
        plan.append(order[start[end]:end])
        end = start[end]
    return plan[::-1]


def pack(rows: Sequence[Row], *, token_budget: int, pad_id: int, domains: Sequence[str], streams: Sequence[str],
         by_domain: bool = True, max_rows: int | None = None) -> list[MicroBatch]:
    """Micro-batches over `rows`, sorted by length so that little is padded.

    by_domain   each micro-batch holds rows of one domain only, so that one teacher scores it whole
    Raises InvalidRow for a malformed row and ValueError for a domain or stream that is not in the lists given.
    """
    domain_number = {name: i for i, name in enumerate(domains)}
    stream_number = {name: i for i, name in enumerate(streams)}
    for row in rows:
        check_row(row)
        if row.domain not in domain_number:
            raise ValueError(f"row {row.origin}: domain {row.domain!r} is not one of {list(domains)}")
        if row.stream not in stream_number:
            raise ValueError(f"row {row.origin}: stream {row.stream!r} is not one of {list(streams)}")
    if by_domain:
        parts = [[i for i, row in enumerate(rows) if row.domain == name] for name in domains]
    else:
        parts = [list(range(len(rows)))]
    batches = []
    for part in parts:
        lengths = [computed_length(rows[i]) for i in part]
        for chosen in micro_batch_plan(lengths, token_budget, max_rows):
            numbers = [part[i] for i in chosen]
            batches.append(_lay_out(rows, numbers, pad_id, domain_number, stream_number))
    return batches


def _lay_out(rows, numbers, pad_id, domain_number, stream_number) -> MicroBatch:
    width = max(computed_length(rows[i]) for i in numbers)
    size = len(numbers)
    ids = np.full((size, width), pad_id, dtype=np.int64)
    # Padding keeps counting: a falling position would read as a new packed sequence in Transformers' mask code.
    positions = np.tile(np.arange(width, dtype=np.int64), (size, 1))
    valid = np.zeros((size, width), dtype=bool)
    attention = None
    if any(a.branch and len(a.tokens) > 1 for i in numbers for a in rows[i].actions):
        attention = np.tile(np.tril(np.ones((width, width), dtype=bool)), (size, 1, 1))
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_FIELDS if name != "weight"}
    for b, number in enumerate(numbers):
        row = rows[number]
        trunk, _ = _needed(row)
        ids[b, :trunk] = row.trunk[:trunk]
        end = trunk
        for a, action in enumerate(row.actions):
            n = len(action.tokens)
            source = np.arange(action.at - 1, action.at + n - 1)
            if action.branch and n > 1:
                start, end = end, end + n - 1
                ids[b, start:end] = action.tokens[:-1]
                positions[b, start:end] = np.arange(action.at, action.at + n - 1)
                attention[b, start:end, action.at:start] = False
                source[1:] = np.arange(start, end)
            columns["source_index"].append(source + b * width)
            columns["label"].append(action.tokens)
            columns["behaviour_logprob"].append(action.behaviour_logprob)
            columns["version"].append(action.version)
            for name, value in (("domain", domain_number[row.domain]), ("stream", stream_number[row.stream]),
                                ("group", action.group), ("sequence", action.sequence), ("turn", action.turn),
                                ("outcome_advantage", action.outcome_advantage), ("row", number), ("action", a)):
                columns[name].append(np.full(n, value))
        valid[b, :end] = True
        positions[b, end:] = np.arange(width - end) + int(positions[b, :end].max()) + 1
    flat = {}
    for name, parts in columns.items():
        kind = np.float32 if name in ("behaviour_logprob", "outcome_advantage") else np.int64
        flat[name] = torch.from_numpy(np.concatenate(parts).astype(kind))
    return MicroBatch(
        input_ids=torch.from_numpy(ids), position_ids=torch.from_numpy(positions), valid=torch.from_numpy(valid),
        attention=None if attention is None else torch.from_numpy(attention[:, None]),
        weight=torch.zeros(len(flat["label"])), tokens=int(valid.sum()), **flat)


def empty_micro_batch(pad_id: int) -> MicroBatch:
    """One row of padding without loss tokens: what a rank without work computes so that no other rank waits for it."""
    none = torch.zeros(0, dtype=torch.int64)
    flat = {name: none.clone() for name in TOKEN_FIELDS}
    for name in ("behaviour_logprob", "outcome_advantage", "weight"):
        flat[name] = torch.zeros(0)
    return MicroBatch(input_ids=torch.full((1, 2), pad_id, dtype=torch.int64), position_ids=torch.arange(2)[None],
                      valid=torch.zeros(1, 2, dtype=torch.bool), attention=None, tokens=0, **flat)
