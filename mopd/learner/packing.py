"""Lay rows out as tensors: micro-batches of similar length, shared prefixes computed once, every loss token indexed.

Knows rows and tensors; nothing of models, DeepSpeed or losses. A branch (a fresh turn) sits behind its trunk in the
same row, sees its prefix and itself only, and its positions continue after the prefix. The first token of each action
is predicted from trunk token `at - 1`, so N branches at one point put N labels on one position. Nothing is computed
that carries no loss: the last token of an action and the trunk behind the last label's predecessor are left out.

With `prefix_gradient` "none" the prefixes are a part of their own, computed without a graph. The branch-point token is
then computed once more, with a graph, in front of the turns that branch off it: it predicts their first tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from mopd.learner.routing import UNKNOWN, place_routes
from mopd.losses.candidates import CandidateSets, join_candidates
from mopd.rows import Action, Row

# Per-loss-token fields in their fixed order; `weight` is filled by the step.
TOKEN_FIELDS = (
    "source_index", "label", "behaviour_logprob", "domain", "stream", "group", "sequence", "turn", "version",
    "outcome_advantage", "weight", "row", "action",
)


PREFIX_GRADIENTS = ("full", "none")


class InvalidRow(ValueError):
    """A row that cannot be trained on; the message names the row's origin and the rule."""


@dataclasses.dataclass
class MicroBatch:
    """B rows padded on the right to T tokens, with N loss tokens over all rows.

    input_ids, position_ids  int64 [B, T]
    valid              bool [B, T], False on padding; what expert loads count
    attention          bool [B, 1, T, T] (True: query row may see key column) or None where plain causal attention is
                       exact (no branches; right padding is never seen by a real token). With a prefix part
                       [B, 1, T, P + T], the prefix's columns first
    trunk              leading columns in which no row has a branch (0 without a mask or with a prefix part)
    source_index       int64 [N], index into the flattened B*T of the position that predicts the token
    label              int64 [N]
    behaviour_logprob  float32 [N], log µ, NaN where unknown
    domain, stream     int64 [N], index into the names that `pack` was given
    group, sequence, turn, version   int64 [N]
    outcome_advantage  float32 [N]
    weight             float32 [N], the token's share of the whole step's loss (zeros until a step fills it)
    row, action        int64 [N], the token's row in the list given to `pack` and its action inside that row
    tokens             number of real tokens (valid.sum(), and of the prefix part)
    prefix_ids, prefix_valid  int64, bool [B, P] tokens that are computed without a graph, from position 0 on; or None
    extra              further tensors with one row per loss token (teacher scores), moved along by `to`
    candidates         N CandidateSets, over which µ was renormalised and over which student and teachers are to be; None
                       where nothing was cut off anywhere
    routes, prefix_routes  int16 [B, T, L, k], [B, P, L, k], the experts to be replayed for every token that is computed, -1
                       where it is free; None where nothing is replayed
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
    trunk: int = 0
    prefix_ids: torch.Tensor | None = None
    prefix_valid: torch.Tensor | None = None
    extra: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    candidates: CandidateSets | None = None
    routes: torch.Tensor | None = None
    prefix_routes: torch.Tensor | None = None

    @property
    def loss_tokens(self) -> int:
        """N."""
        return len(self.label)

    @property
    def padded_tokens(self) -> int:
        """B * (P + T), what a forward pass computes."""
        return self.input_ids.numel() + (0 if self.prefix_ids is None else self.prefix_ids.numel())

    def chosen(self, rows: slice) -> MicroBatch:
        """The micro-batch with some of its loss tokens only; the tokens that are computed stay whole."""
        if rows.start == 0 and rows.stop >= self.loss_tokens:
            return self
        fields = {name: getattr(self, name)[rows] for name in TOKEN_FIELDS}
        fields["candidates"] = None if self.candidates is None else self.candidates[rows]
        return dataclasses.replace(self, **fields, extra={name: value[rows] for name, value in self.extra.items()})

    def to(self, device: torch.device | str) -> MicroBatch:
        """The same micro-batch with every tensor on `device`."""
        moved = {
            f.name: value.to(device, non_blocking=True)
            for f in dataclasses.fields(self)
            if isinstance(value := getattr(self, f.name), torch.Tensor)
        }
        extra = {name: value.to(device, non_blocking=True) for name, value in self.extra.items()}
        candidates = None if self.candidates is None else self.candidates.to(device)
        return dataclasses.replace(self, **moved, extra=extra, candidates=candidates)


def computed_length(row: Row, prefix_gradient: str = "full") -> int:
    """Tokens that a forward pass over the packed row really computes (see the module text for what is left out)."""
    if prefix_gradient == "none" and _only_branches(row):
        prefix, own = _split(row)
        return prefix + own
    trunk, branches = _needed(row)
    return trunk + branches


def _only_branches(row: Row) -> bool:
    return all(action.branch for action in row.actions)


def _split(row: Row) -> tuple[int, int]:
    """Tokens of a row of branches that are computed without a graph, and with one."""
    points = {action.at for action in row.actions}
    return max(points) - 1, len(points) + sum(len(action.tokens) - 1 for action in row.actions)


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
    ends behind the trunk, trunk tokens that differ from the action's, arrays of unequal length, or a token that is not in
    its candidate set."""
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
        if action.candidates is not None:
            if len(action.candidates) != n:
                bad(f"action {i} has {n} tokens and {len(action.candidates)} candidate sets")
            for place, (token, ids) in enumerate(zip(action.tokens, action.candidates, strict=True)):
                if ids is not None and not (ids == token).any():
                    bad(f"action {i}: token {place}, id {token}, is not in its candidate set of {len(ids)} ids; the set must "
                        "be the one that it was sampled from")
        if action.experts is not None and not (
                action.experts.ndim == 3 and n - 1 <= len(action.experts) <= action.at + n - 1):
            bad(f"action {i} starts after {action.at} tokens, has {n} and experts of shape {action.experts.shape}; they must "
                "be [m, L, k] of the m tokens before its last one, its own among them")
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


def row_cost(row: Row, *, even_length: float = float("inf")) -> float:
    """What a row costs in a forward pass, in tokens: its computed tokens, each dearer by length / even_length, where
    `even_length` is the context at which attention costs as much as the products of weights (about 12 hidden sizes in
    an ordinary transformer; infinite: attention is left out)."""
    tokens = computed_length(row)
    return tokens * (1.0 + tokens / even_length)


def spread(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices of rows per rank, evenly by cost: longest first, each to the rank with the least so far. The largest sum
    is at most 4/3 of the best possible (Graham 1969). A pure function of its arguments: equal costs go by their order
    and to the lower rank, so every rank that knows all rows finds its own without a word to the others."""
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    total, chosen = [0.0] * ranks, [[] for _ in range(ranks)]
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = min(range(ranks), key=lambda r: (total[r], r))
        total[rank] += costs[i]
        chosen[rank].append(i)
    return [sorted(part) for part in chosen]


def pack(rows: Sequence[Row], *, token_budget: int, pad_id: int, domains: Sequence[str], streams: Sequence[str],
         by_domain: bool = True, max_rows: int | None = None, prefix_gradient: str = "full") -> list[MicroBatch]:
    """Micro-batches over `rows`, sorted by length so that little is padded.

    by_domain        each micro-batch holds rows of one domain only, so that one teacher scores it whole
    prefix_gradient  "full", or "none": rows of branches have their prefixes in a part without a graph. Rows with an
                     action inside their trunk keep their whole graph. Every micro-batch then has such a part, empty
                     for some, so that all ranks make the same number of passes
    Raises InvalidRow for a malformed row and ValueError for a domain or stream that is not in the lists given.
    """
    if prefix_gradient not in PREFIX_GRADIENTS:
        raise ValueError(f"prefix_gradient must be one of {', '.join(PREFIX_GRADIENTS)}, got {prefix_gradient!r}")
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
        lengths = [computed_length(rows[i], prefix_gradient) for i in part]
        for chosen in micro_batch_plan(lengths, token_budget, max_rows):
            numbers = [part[i] for i in chosen]
            names = (domain_number, stream_number)
            batches.append(_lay_out(rows, numbers, pad_id, *names) if prefix_gradient == "full" else
                           _lay_out_detached(rows, numbers, pad_id, *names))
    return batches


def _token_columns(columns, row: Row, number: int, a: int, source, domain_number, stream_number) -> None:
    """Append the per-loss-token fields of action `a` of a row, predicted from the positions `source`."""
    action = row.actions[a]
    columns["source_index"].append(source)
    columns["label"].append(action.tokens)
    columns["behaviour_logprob"].append(action.behaviour_logprob)
    columns["version"].append(action.version)
    for name, value in (("domain", domain_number[row.domain]), ("stream", stream_number[row.stream]),
                        ("group", action.group), ("sequence", action.sequence), ("turn", action.turn),
                        ("outcome_advantage", action.outcome_advantage), ("row", number), ("action", a)):
        columns[name].append(np.full(len(action.tokens), value))


def _flat_fields(columns) -> dict[str, torch.Tensor]:
    flat = {}
    for name, parts in columns.items():
        kind = np.float32 if name in ("behaviour_logprob", "outcome_advantage") else np.int64
        flat[name] = torch.from_numpy(np.concatenate(parts).astype(kind))
    return flat | {"weight": torch.zeros(len(flat["label"]))}


def _candidate_sets(rows, numbers) -> CandidateSets | None:
    """Of the micro-batch's loss tokens, in the order in which both layouts go through rows and actions."""
    actions = [action for i in numbers for action in rows[i].actions]
    return join_candidates([action.candidates for action in actions], [len(action.tokens) for action in actions])


def _no_routes(rows: Sequence[Row], numbers: Sequence[int], *shape: int) -> np.ndarray | None:
    """int16 [*shape, L, k] of unknown routes; None where no action of these rows has any. Raises InvalidRow where they are
    not of one model."""
    kinds = {action.experts.shape[1:]: rows[i] for i in numbers for action in rows[i].actions if action.experts is not None}
    if len(kinds) > 1:
        raise InvalidRow(f"row {list(kinds.values())[-1].origin or '(no origin)'} has experts of {list(kinds)[-1]} (layers, "
                         f"experts per token), others of {list(kinds)[0]}: they are of another model")
    return np.full((*shape, *next(iter(kinds))), UNKNOWN, np.int16) if kinds else None


def _trunk_routes(row: Row, like: np.ndarray) -> np.ndarray:
    """int16 [trunk, L, k] of one row: what its actions know."""
    found = np.full((len(row.trunk), *like.shape[-2:]), UNKNOWN, np.int16)
    for action in row.actions:
        if action.experts is not None:
            end = action.at if action.branch else action.at + len(action.tokens) - 1
            own = len(action.tokens) - 1 if action.branch else 0
            place_routes(found, action.experts[:len(action.experts) - own], end)
    return found


def _branch_routes(action: Action) -> np.ndarray | int:
    """int16 [n - 1, L, k] of a branch's tokens but its last."""
    return UNKNOWN if action.experts is None else action.experts[len(action.experts) - (len(action.tokens) - 1):]


def _whole_row(row: Row, ids, positions, seen, before: int, routes=None) -> list[tuple[int, np.ndarray]]:
    """Fill one row of a part with its trunk and what branches off it; returns each action's number and the columns that
    predict its tokens. `seen` may be None where nothing branches off; its own columns start at `before`."""
    trunk, _ = _needed(row)
    if routes is not None:
        routes[:trunk] = _trunk_routes(row, routes)[:trunk]
    ids[:trunk], positions[:trunk] = row.trunk[:trunk], np.arange(trunk)
    if seen is not None:
        seen[:trunk, before:before + trunk] = np.tril(np.ones((trunk, trunk), dtype=bool))
    end, sources = trunk, []
    for a, action in enumerate(row.actions):
        at, n = action.at, len(action.tokens)
        source = np.arange(at - 1, at + n - 1)
        if action.branch and n > 1:
            start, end = end, end + n - 1
            ids[start:end], positions[start:end] = action.tokens[:-1], np.arange(at, at + n - 1)
            if routes is not None:
                routes[start:end] = _branch_routes(action)
            seen[start:end, before:before + at] = True
            seen[start:end, before + start:before + end] = np.tril(np.ones((n - 1, n - 1), dtype=bool))
            source[1:] = np.arange(start, end)
        sources.append((a, source))
    return sources


def _pad(positions, seen, end: int, before: int) -> None:
    """Positions and mask of one row's padding, which starts at column `end`."""
    rest = np.arange(end, len(positions))
    positions[end:] = rest - end + int(positions[:end].max()) + 1
    if seen is not None:  # padding sees itself: a query without any key would be NaN
        seen[rest, before + rest] = True


def _lay_out(rows, numbers, pad_id, domain_number, stream_number) -> MicroBatch:
    width = max(computed_length(rows[i]) for i in numbers)
    size = len(numbers)
    ids = np.full((size, width), pad_id, dtype=np.int64)
    # Padding keeps counting: a falling position would read as a new packed sequence in Transformers' mask code.
    positions = np.tile(np.arange(width, dtype=np.int64), (size, 1))
    valid = np.zeros((size, width), dtype=bool)
    branches = any(a.branch and len(a.tokens) > 1 for i in numbers for a in rows[i].actions)
    seen = np.zeros((size, width, width), dtype=bool) if branches else None
    routes = _no_routes(rows, numbers, size, width)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_FIELDS if name != "weight"}
    for b, number in enumerate(numbers):
        row = rows[number]
        for a, source in _whole_row(row, ids[b], positions[b], None if seen is None else seen[b], 0,
                                    None if routes is None else routes[b]):
            _token_columns(columns, row, number, a, source + b * width, domain_number, stream_number)
        end = computed_length(row)
        valid[b, :end] = True
        _pad(positions[b], None if seen is None else seen[b], end, 0)
    return MicroBatch(
        input_ids=torch.from_numpy(ids), position_ids=torch.from_numpy(positions), valid=torch.from_numpy(valid),
        attention=None if seen is None else torch.from_numpy(seen[:, None]),
        trunk=0 if seen is None else min(_needed(rows[i])[0] for i in numbers),
        tokens=int(valid.sum()), candidates=_candidate_sets(rows, numbers),
        routes=None if routes is None else torch.from_numpy(routes), **_flat_fields(columns))


def _lay_out_detached(rows, numbers, pad_id, domain_number, stream_number) -> MicroBatch:
    """The layout of prefix_gradient "none": per row of branches its prefix, and for each decision point the token
    before it followed by what branches off there."""
    parts = [_split(rows[i]) if _only_branches(rows[i]) else (0, computed_length(rows[i])) for i in numbers]
    size, width = len(numbers), max(own for _, own in parts)
    before = max(1, *(prefix for prefix, _ in parts))
    prefix_ids = np.full((size, before), pad_id, dtype=np.int64)
    prefix_valid = np.zeros((size, before), dtype=bool)
    ids = np.full((size, width), pad_id, dtype=np.int64)
    positions = np.zeros((size, width), dtype=np.int64)
    valid = np.zeros((size, width), dtype=bool)
    seen = np.zeros((size, width, before + width), dtype=bool)
    routes, prefix_routes = _no_routes(rows, numbers, size, width), _no_routes(rows, numbers, size, before)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in TOKEN_FIELDS if name != "weight"}
    for b, number in enumerate(numbers):
        row, (prefix, own) = rows[number], parts[b]
        if routes is not None and prefix:
            prefix_routes[b, :prefix] = _trunk_routes(row, routes)[:prefix]
        prefix_ids[b, :prefix], prefix_valid[b, :prefix] = row.trunk[:prefix], True
        fill = _branches_behind_points if _only_branches(row) else _whole_row
        for a, source in fill(row, ids[b], positions[b], seen[b], before, None if routes is None else routes[b]):
            _token_columns(columns, row, number, a, source + b * width, domain_number, stream_number)
        valid[b, :own] = True
        _pad(positions[b], seen[b], own, before)
    return MicroBatch(
        input_ids=torch.from_numpy(ids), position_ids=torch.from_numpy(positions), valid=torch.from_numpy(valid),
        attention=torch.from_numpy(seen[:, None]), prefix_ids=torch.from_numpy(prefix_ids),
        prefix_valid=torch.from_numpy(prefix_valid), tokens=int(valid.sum()) + int(prefix_valid.sum()),
        candidates=_candidate_sets(rows, numbers), routes=None if routes is None else torch.from_numpy(routes),
        prefix_routes=None if routes is None else torch.from_numpy(prefix_routes), **_flat_fields(columns))


def _branches_behind_points(row: Row, ids, positions, seen, before: int, routes=None) -> list[tuple[int, np.ndarray]]:
    """As _whole_row for a row of branches whose prefixes are in the part without a graph."""
    point_column, end, sources = {}, 0, []
    trunk = None if routes is None else _trunk_routes(row, routes)
    for a, action in enumerate(row.actions):
        at, n = action.at, len(action.tokens)
        if at not in point_column:
            point_column[at] = end
            ids[end], positions[end] = row.trunk[at - 1], at - 1
            seen[end, :at - 1] = seen[end, before + end] = True
            if routes is not None:
                routes[end] = trunk[at - 1]
            end += 1
        point, start, end = point_column[at], end, end + n - 1
        ids[start:end] = action.tokens[:-1]
        positions[start:end] = np.arange(at, at + n - 1)
        if routes is not None:
            routes[start:end] = _branch_routes(action)
        seen[start:end, :at - 1] = seen[start:end, before + point] = True
        seen[start:end, before + start:before + end] = np.tril(np.ones((n - 1, n - 1), dtype=bool))
        sources.append((a, np.concatenate([[point], np.arange(start, end)])))
    return sources


def empty_micro_batch(pad_id: int, prefix_gradient: str = "full") -> MicroBatch:
    """One row of padding without loss tokens: what a rank without work computes so that no other rank waits for it."""
    none = torch.zeros(0, dtype=torch.int64)
    flat = {name: none.clone() for name in TOKEN_FIELDS}
    for name in ("behaviour_logprob", "outcome_advantage", "weight"):
        flat[name] = torch.zeros(0)
    batch = MicroBatch(input_ids=torch.full((1, 2), pad_id, dtype=torch.int64), position_ids=torch.arange(2)[None],
                       valid=torch.zeros(1, 2, dtype=torch.bool), attention=None, tokens=0, **flat)
    if prefix_gradient == "none":
        batch.prefix_ids = torch.full((1, 1), pad_id, dtype=torch.int64)
        batch.prefix_valid = torch.zeros(1, 1, dtype=torch.bool)
        batch.attention = torch.tensor([[[[False, True, False], [False, True, True]]]])
    return batch
