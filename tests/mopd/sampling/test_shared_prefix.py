"""Planning of shared prompts: everything is covered once, and nothing is shared that differs."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mopd.sampling.shared_prefix import MIN_SHARED, common_prefix, plan_prefixes


def prompts_of(seed: int, count: int) -> dict[int, np.ndarray]:
    rng = np.random.default_rng(seed)
    bases = [rng.integers(0, 3, rng.integers(1, 60)) for _ in range(3)]
    made = {}
    for request in range(count):
        base = bases[rng.integers(3)]
        tail = rng.integers(0, 3, rng.integers(0, 5))
        made[request] = np.concatenate([base[: rng.integers(1, len(base) + 1)], tail]).astype(np.int64)
    return made


@given(st.integers(0, 2**32), st.integers(1, 25))
@settings(max_examples=80, deadline=None)
def test_every_prompt_is_covered_once(seed, count):
    prompts = prompts_of(seed, count)
    leaders = plan_prefixes(prompts)
    seen = []
    for number, leader in enumerate(leaders):
        for length, requests in leader.members:
            for request in requests:
                seen.append(request)
                assert prompts[request].tolist() == leader.tokens[:length].tolist()
            assert length > leader.shared
        if leader.trunk >= 0:
            owner = leaders[leader.trunk]
            assert leader.trunk <= number and owner.shared == leader.shared >= MIN_SHARED
            assert common_prefix(owner.tokens, leader.tokens) >= leader.shared
        else:
            assert leader.shared == 0
    assert sorted(seen) == sorted(prompts)
    keys = [leader.tokens.tolist() for leader in leaders]
    assert not any(a != b and b[: len(a)] == a for a in keys for b in keys)


def test_no_prompts_give_no_plan():
    assert plan_prefixes({}) == []


def test_a_chain_needs_one_leader_and_two_tails_one_trunk():
    base = np.arange(40)
    chain = {i: base[: 20 + i] for i in range(5)}
    leaders = plan_prefixes(chain)
    assert len(leaders) == 1 and len(leaders[0].tokens) == 24
    tails = {0: np.append(base, 1), 1: np.append(base, 2), 2: np.append(base, 2)}
    leaders = plan_prefixes(tails)
    assert [(x.shared, x.trunk) for x in leaders] == [(40, 0), (40, 0)]
