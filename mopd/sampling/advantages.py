"""Outcome advantages of rollouts: what a sequence's reward says beside the others of its group.

Knows groups and rewards; how a group's rewards become advantages is a function that is handed in.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike

from mopd.sampling.agent_loop import Episode

# A group's rewards [G] -> its advantages [G]; None for a group that has no spread.
GroupAdvantage = Callable[[ListLike[float]], ListLike[float] | None]


def outcome_advantages(episodes: Iterable[Episode], advantage: GroupAdvantage) -> tuple[dict[int, float], dict[str, Counter]]:
    """Â_outcome by sequence number, and by domain how many groups there were (METHOD section 6, steps 1 and 5).

    Infrastructure failures have left their group before anything is computed: they enter no mean and get no advantage. A
    group is every other episode of one task, and `Outcome.reward` is what counts of it. 0 is given, and counted, where a
    group says nothing: `no_spread` (all rewards alike) and `single` (failures left one sequence). `groups` counts all with
    at least one sequence left. The result does not depend on the order in which episodes ended.
    """
    members: dict[tuple[str, int], list[Episode]] = defaultdict(list)
    for episode in episodes:
        if not episode.failure:
            members[episode.spec.domain, episode.spec.group].append(episode)
    found: dict[int, float] = {}
    counts: dict[str, Counter] = defaultdict(Counter)
    for (domain, _), group in members.items():
        group = sorted(group, key=lambda e: e.spec.sequence)
        values = advantage([e.sequence.outcome.reward for e in group]) if len(group) > 1 else None
        single = len(group) == 1
        counts[domain].update({"groups": 1, "no_spread": int(not single and values is None), "single": int(single)})
        found |= {e.spec.sequence: 0.0 if values is None else float(values[i]) for i, e in enumerate(group)}
    return found, {domain: dict(count) for domain, count in counts.items()}
