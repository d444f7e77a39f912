"""What has to be scored of rows and of micro-batches: one request per action, whichever of the two it is read from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mopd.learner.packing import MicroBatch
from mopd.rows import Row
from teachers.scoring.requests import ScoreRequest


def of_rows(rows: Sequence[Row], *, what: str, temperature: float, k: int = 0) -> list[ScoreRequest]:
    """A request per action, in the rows' order."""
    found = []
    for row in rows:
        trunk = np.asarray(row.trunk, np.uint32)
        for action in row.actions:
            start, stop = action.at, action.at + len(action.tokens)
            tokens = np.concatenate([trunk[:start], np.asarray(action.tokens, np.uint32)])
            candidates = getattr(action, "candidates", None)
            found.append(ScoreRequest(tokens, start, stop, what=what, k=k, temperature=temperature,
                                      candidates=None if candidates is None else tuple(candidates)))
    return found


def of_batch(batch: MicroBatch, *, what: str, temperature: float, k: int = 0,
             candidates: Sequence[np.ndarray | None] | None = None) -> list[ScoreRequest]:
    """A request per action, in the order of the micro-batch's loss tokens (each action's stand together).

    candidates   per loss token, or None
    Raises ValueError where an action's tokens are not all there (a part of a micro-batch).
    """
    if not batch.loss_tokens:
        return []
    width = batch.input_ids.shape[1]
    ids, positions = batch.input_ids.numpy().astype(np.uint32), batch.position_ids.numpy()
    source, label = batch.source_index.numpy(), batch.label.numpy().astype(np.uint32)
    owner = np.stack([batch.row.numpy(), batch.action.numpy()])
    edges = [0, *(np.flatnonzero((owner[:, 1:] != owner[:, :-1]).any(axis=0)) + 1).tolist(), len(label)]
    before = None if batch.prefix_ids is None else batch.prefix_ids.numpy().astype(np.uint32)
    split = None if batch.prefix_valid is None else batch.prefix_valid.numpy().any(axis=1)
    found = []
    for begin, end in zip(edges[:-1], edges[1:], strict=True):
        row, column = divmod(int(source[begin]), width)
        at = int(positions[row, column]) + 1
        if split is not None and split[row]:
            prefix = np.concatenate([before[row, :at - 1], ids[row, column:column + 1]])
        elif column != at - 1:
            raise ValueError(f"row {int(batch.row[begin])} of this micro-batch lacks the first tokens of action "
                             f"{int(batch.action[begin])}; teachers score whole micro-batches")
        else:
            prefix = ids[row, :at]
        found.append(ScoreRequest(
            np.concatenate([prefix, label[begin:end]]), at, at + end - begin, what=what, k=k, temperature=temperature,
            candidates=None if candidates is None else tuple(candidates[begin:end])))
    return found
