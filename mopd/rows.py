"""What sampling hands to scoring and learning: rows of tokens with the actions that are to be trained.

A row is one trunk of tokens. An action stands either inside the trunk (a rollout: the trunk is the whole context) or
branches off it after `at` tokens (a fresh turn at a decision point: several branches share one trunk, and every trunk
token is computed once). An action's first token is predicted from trunk token `at - 1`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

STREAMS = ("rollout", "teacher_prefix", "sft_prefix", "demonstration")


@dataclasses.dataclass(frozen=True)
class Action:
    """One action segment that carries loss.

    at                 number of trunk tokens before it
    tokens             uint32 [n], the stop token included where it was sampled
    behaviour_logprob  float32 [n], log µ; NaN where unknown (the demonstration stream)
    version            int32 [n], weights version that sampled each token; -1 where no student did
    branch             False: these are trunk tokens [at, at + n); True: they hang off the trunk
    turn               turn number inside the sequence (the decision point's depth in prefix mode)
    sequence, group    integers, unique within a step: see `sequence` and `group` in the method's terms
    outcome_advantage  Â_outcome of its sequence (0 where α = 0)
    candidates         per token the ids over which µ was renormalised (top-k, top-p), an integer array with the token
                       among them; None where nothing was cut off, and None for all of it where that holds throughout
    experts            int16 [m, L, k], the experts of every MoE layer for the m tokens before the action's last one (which
                       never entered the model): its own first n - 1, and what is known of those before it. -1 where nothing
                       is known of a token; None for all of it
    """

    at: int
    tokens: np.ndarray
    behaviour_logprob: np.ndarray
    version: np.ndarray
    branch: bool
    turn: int
    sequence: int
    group: int
    outcome_advantage: float = 0.0
    candidates: tuple[np.ndarray | None, ...] | None = None
    experts: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Row:
    """One trunk with its actions. All actions of a row belong to one domain, one stream and one teacher."""

    domain: str
    stream: str
    trunk: np.ndarray
    actions: tuple[Action, ...]
    origin: str = ""

    @property
    def length(self) -> int:
        """Tokens that a forward pass over this row computes."""
        return len(self.trunk) + sum(len(a.tokens) for a in self.actions if a.branch)

    @property
    def loss_tokens(self) -> int:
        return sum(len(a.tokens) for a in self.actions)
