"""Training objectives as pure functions on tensors: no I/O, no models, no config objects."""

from mopd.losses.aggregation import (
    aggregate,
    aggregation_schedule,
    aggregation_weights,
    cell_weights,
    step_weights,
)
from mopd.losses.balance import Moments, domain_balance, merge_moments, moments
from mopd.losses.candidates import CandidateSets
from mopd.losses.chunked import chunked_divergence, chunked_logprob
from mopd.losses.distribution import divergence
from mopd.losses.objectives import Objective, ObjectiveResult, make_objective
from mopd.losses.policy import PolicyGradient, candidate_logprob, policy_gradient, sampled_kl

__all__ = [
    "CandidateSets", "Moments", "Objective", "ObjectiveResult", "PolicyGradient", "aggregate", "aggregation_schedule",
    "aggregation_weights", "candidate_logprob", "cell_weights", "chunked_divergence", "chunked_logprob", "divergence",
    "domain_balance", "make_objective", "merge_moments", "moments", "policy_gradient", "sampled_kl", "step_weights",
]  # fmt: skip
