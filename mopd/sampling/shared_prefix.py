"""Which prompts of a batch share their first tokens, so that these are computed once.

Pure planning on token arrays: knows nothing about caches or models.
"""

from __future__ import annotations

import dataclasses

import numpy as np

MIN_SHARED = 16
# below this many tokens a second forward pass costs more than what it saves


@dataclasses.dataclass
class Leader:
    """The longest prompt of a chain in which each prompt is a prefix of the next.

    tokens   int64 [T]
    members  (length, requests) per prompt of the chain; a member's tokens are `tokens[:length]`
    shared   its first tokens that another leader of the same trunk computes for it; 0 without a trunk
    trunk    index of that leader in the plan; its own index where it computes the trunk itself, -1 without one
    """

    tokens: np.ndarray
    members: list[tuple[int, list[int]]]
    shared: int = 0
    trunk: int = -1


def common_prefix(left: np.ndarray, right: np.ndarray) -> int:
    """Number of leading tokens that two arrays have in common."""
    count = min(len(left), len(right))
    differs = np.nonzero(left[:count] != right[:count])[0]
    return int(differs[0]) if len(differs) else count


def plan_prefixes(prompts: dict[int, np.ndarray]) -> list[Leader]:
    """Leaders for `prompts` (request → tokens), in lexicographic order of their tokens.

    Equal prompts become one member. A prompt that is a prefix of another joins its chain and costs nothing. Neighbours
    that share MIN_SHARED tokens or more get a common trunk, as long as a wider trunk does not save less than a deeper
    one. The trunk ends before the last token of every member, whose hidden state is needed for itself.
    """
    by_key: dict[bytes, list[int]] = {}
    for request, tokens in prompts.items():
        by_key.setdefault(tokens.astype(">u4").tobytes(), []).append(request)
    # Fixed-width big-endian bytes sort like token lists, and a prefix stands directly before its extensions.
    keys = sorted(by_key)
    leaders: list[Leader] = []
    following = b""
    for key in reversed(keys):
        if leaders and following.startswith(key):
            leaders[-1].members.append((len(key) // 4, by_key[key]))
        else:
            leaders.append(Leader(prompts[by_key[key][0]], [(len(key) // 4, by_key[key])]))
        following = key
    leaders.reverse()
    start = 0
    while start < len(leaders):
        first = leaders[start]
        shared, end = len(first.tokens), start + 1
        limit = min(length for length, _ in first.members) - 1
        while end < len(leaders):
            other = leaders[end]
            depth = min(common_prefix(first.tokens, other.tokens), limit, min(n for n, _ in other.members) - 1)
            width = end - start
            if depth < MIN_SHARED or (width > 1 and width * min(shared, depth) < (width - 1) * shared):
                break
            shared, end = min(shared, depth), end + 1
        if end - start > 1:
            for leader in leaders[start:end]:
                leader.shared, leader.trunk = shared, start
        start = end
    return leaders
