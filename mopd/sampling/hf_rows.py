"""The rows that decode together in the hf engine: how they enter, take a token each, move and leave.

Knows which row sits in which slot of the cache and what it has sampled so far; which turns enter when is for others to say
(hf.py for a batch, hf_stream.py for turns that come one by one).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np
import torch

from mopd.sampling.base import Completion, Request, SamplingOptions
from mopd.sampling.draws import draw, uniforms
from mopd.sampling.shared_prefix import common_prefix, plan_prefixes
from mopd.sampling.slot_cache import MAX_IDLE, Plan

if TYPE_CHECKING:
    from mopd.sampling.hf import HFEngine


def turn_limit(request: Request, options: SamplingOptions) -> int:
    """Most tokens that this request may sample."""
    return options.max_tokens if request.max_tokens is None else min(request.max_tokens, options.max_tokens)


class _Job:
    """Tokens [start, start + len(tokens)) of a slot to compute; `wants`: offset → the rows that sample there."""

    def __init__(self, slot: int, start: int, tokens: np.ndarray, wants: dict[int, list[int]]):
        self.slot, self.start, self.tokens, self.wants = slot, start, tokens, wants


@dataclasses.dataclass(frozen=True)
class _Kind:
    """How some of the rows draw, and bool [V] at which ids their turns end."""

    options: SamplingOptions
    stops: np.ndarray

    def ended(self, tokens: np.ndarray) -> bool:
        """Whether the last of a turn's tokens [n] ended it, and not its limit alone."""
        strings = self.options.stop_strings
        return bool(self.stops[tokens[-1]]) or (strings is not None and strings.ended(tokens))


class Rows:
    """Places for `count` rows, of turns of at most `width` tokens (more room is made where one is longer).

    live   the places that decode, in the order of their slots
    over   places whose turns have ended, in that order; whoever uses the rows takes them from here
    names  sessions whose caches must stay: those of all places that hold a turn
    """

    def __init__(self, engine: HFEngine, count: int, width: int):
        self.engine = engine
        self.requests: list[Request | None] = [None] * count
        self.prompts: list[np.ndarray | None] = [None] * count
        self.limits, self.lengths, self.counts, self._kind = (np.zeros(count, dtype=np.int64) for _ in range(4))
        self.slot_of = np.full(count, -1, dtype=np.int64)
        self.tokens = np.empty((count, width), dtype=np.int64)
        self.logprobs = np.empty((count, width), dtype=np.float32)
        self.uniforms = np.empty((count, width))
        # By place, only where something is cut off, and where weights changed: most runs keep nothing.
        self.candidates: dict[int, list[np.ndarray | None]] = {}
        self.changes: dict[int, list[tuple[int, int]]] = {}
        self.experts: dict[int, np.ndarray] = {}  # of places whose turns have ended, where the engine reports them
        self.kinds: list[_Kind] = []
        self._kind_of: dict[tuple, int] = {}
        self.live: list[int] = []
        self.over: list[int] = []
        self.names: set[str] = set()

    # What a place holds

    def put(self, place: int, request: Request, options: SamplingOptions) -> None:
        """A turn that is to be sampled at this place once it is admitted."""
        limit = turn_limit(request, options)
        if limit > self.tokens.shape[1]:
            for name in ("tokens", "logprobs", "uniforms"):
                old = getattr(self, name)
                new = np.empty((len(old), max(limit, 2 * old.shape[1])), dtype=old.dtype)
                new[:, : old.shape[1]] = old
                setattr(self, name, new)
        self.requests[place], self.prompts[place] = request, np.asarray(request.tokens).astype(np.int64)
        self.limits[place], self.lengths[place], self.counts[place] = limit, len(request.tokens), 0
        self._kind[place] = self._kind_number(options)
        if request.session is not None:
            self.names.add(request.session)

    def take(self, place: int) -> Completion:
        """The turn that has ended at this place, which is free afterwards."""
        found = self.completion(place)
        self._clear(place)
        return found

    def drop(self, place: int) -> None:
        """Forget the turn at this place; what is cached of its session stays."""
        if place in self.live:
            self._leave(place)
            self.live.remove(place)
        self._clear(place)

    def _clear(self, place: int) -> None:
        request = self.requests[place]
        if request.session is not None:
            self.names.discard(request.session)
        self.requests[place] = self.prompts[place] = None
        self.candidates.pop(place, None)
        self.changes.pop(place, None)
        self.experts.pop(place, None)

    def _kind_number(self, options: SamplingOptions) -> int:
        key = (options.temperature, options.top_p, options.top_k, options.stop_ids, options.stop_strings)
        if key not in self._kind_of:
            stops = np.zeros(self.engine.vocabulary, dtype=bool)
            stops[list(options.stop_ids)] = True
            self._kind_of[key] = len(self.kinds)
            self.kinds.append(_Kind(options, stops))
        return self._kind_of[key]

    def completion(self, place: int) -> Completion:
        """What was sampled at this place."""
        count = int(self.counts[place])
        tokens = self.tokens[place, :count].astype(np.uint32)
        finish = "stop" if self.kinds[self._kind[place]].ended(tokens) else "length"
        sets = self.candidates.get(place, ())
        candidates = tuple(sets) if any(ids is not None for ids in sets) else None
        return Completion(tokens, self.logprobs[place, :count].copy(), finish, self._versions(place, count), candidates,
                          self.experts.get(place))

    def _versions(self, place: int, count: int) -> int | np.ndarray:
        """The version that sampled all tokens, or int32 [count]."""
        begin, found = 0, np.full(count, self.engine.version, dtype=np.int32)
        for end, version in self.changes.get(place, ()):
            found[begin:end] = version
            begin = end
        return int(found[0]) if (found == found[0]).all() else found

    def unseat(self) -> list[int]:
        """Weights are about to change, and with them all caches: the rows leave the batch with the tokens that they have.
        Returns their places, to be admitted again under the new weights."""
        found, self.live = self.live, []
        for place in found:
            self.changes.setdefault(place, []).append((int(self.counts[place]), self.engine.version))
        return found

    # Entering

    def admit(self, wave: list[int]) -> None:
        """Prefill what the rows of `wave` have (prompts, and tokens sampled under earlier weights), as far as it is not
        cached, and draw their next tokens."""
        engine = self.engine
        longest = max(len(self.prompts[i]) + int(self.limits[i]) for i in wave)
        jobs: list[_Job] = []
        fresh: dict[int, np.ndarray] = {}
        for i in wave:
            session, count = self.requests[i].session, int(self.counts[i])
            context = np.concatenate([self.prompts[i], self.tokens[i, :count]]) if count else self.prompts[i]
            self.uniforms[i, : self.limits[i]] = uniforms(self.requests[i].seed, int(self.limits[i]))
            slot = engine._session_slot.get(session) if session is not None else None
            shared = 0
            if slot is not None:
                shared = min(common_prefix(engine._cached[slot], context), len(context) - 1)
                engine._session_slot[session] = engine._session_slot.pop(session)
            if shared == 0:
                fresh[i] = context
            else:
                self.slot_of[i] = slot
                engine.stats["shared_tokens"] += shared
                jobs.append(_Job(slot, shared, context[shared:], {len(context) - shared - 1: [i]}))
            if slot is not None and shared == 0:
                engine._end_session(session)
        self._place(list(fresh), longest)
        trunks, trunk_copies, copies = self._plan_fresh(fresh, jobs)
        first: dict[int, torch.Tensor] = {}
        self._prefill(trunks, first)
        for source, targets, length in trunk_copies:
            engine._cache.copy([source] * len(targets), targets, length)
        self._prefill(jobs, first)
        for source, targets, length in copies:
            engine._cache.copy([source] * len(targets), targets, length)
        logits = torch.stack([first[i] for i in wave])
        self.live = sorted(self.live + wave, key=lambda i: self.slot_of[i])
        self._draw(np.array(wave), logits)

    def _place(self, wave: list[int], longest: int) -> None:
        engine = self.engine
        engine._cache.reserve(engine._cache.slots, longest)
        for i, slot in zip(wave, engine._acquire(len(wave), longest, self.names), strict=True):
            self.slot_of[i] = slot
            session = self.requests[i].session
            if session is not None:
                engine._session_slot[session] = slot
                engine._slot_session[slot] = session

    def _plan_fresh(self, fresh: dict[int, np.ndarray], jobs: list[_Job]):
        """Append jobs for contexts without a cache; returns trunk jobs, copies after them, and copies at the end."""
        leaders = plan_prefixes(fresh)
        slots = [int(self.slot_of[leader.members[0][1][0]]) for leader in leaders]
        trunks: list[_Job] = []
        followers: dict[int, list[int]] = {}
        copies = []
        total = sum(len(p) for p in fresh.values())
        for number, leader in enumerate(leaders):
            if leader.trunk == number:
                trunks.append(_Job(slots[number], 0, leader.tokens[: leader.shared], {}))
            elif leader.trunk >= 0:
                followers.setdefault(leader.trunk, []).append(slots[number])
            wants = {length - 1 - leader.shared: members for length, members in leader.members}
            jobs.append(_Job(slots[number], leader.shared, leader.tokens[leader.shared :], wants))
            targets = [int(self.slot_of[i]) for _, members in leader.members for i in members]
            targets.remove(slots[number])
            if targets:
                copies.append((slots[number], targets, len(leader.tokens)))
            total -= len(leader.tokens) - (leader.shared if leader.trunk != number else 0)
        self.engine.stats["shared_tokens"] += total
        lengths = {number: leaders[number].shared for number in followers}
        return trunks, [(slots[n], targets, lengths[n]) for n, targets in followers.items()], copies

    def _prefill(self, jobs: list[_Job], first: dict[int, torch.Tensor]) -> None:
        """Run jobs in passes of similar lengths; `first` receives the logits where rows sample."""
        engine = self.engine
        jobs = sorted(jobs, key=lambda job: (len(job.tokens), job.slot))
        while jobs:
            size = 1
            while size < len(jobs) and (size + 1) * len(jobs[size].tokens) <= engine.prefill_tokens:
                size += 1
            batch, jobs = sorted(jobs[:size], key=lambda job: job.slot), jobs[size:]
            counts = np.array([len(job.tokens) for job in batch])
            offsets = np.cumsum(counts) - counts
            plan = Plan(
                np.array([job.slot for job in batch]), np.array([job.start for job in batch]), counts, engine.device
            )
            places = [
                (int(offset) + at, members)
                for offset, job in zip(offsets, batch, strict=True)
                for at, members in job.wants.items()
            ]
            keep = np.array([place for place, _ in places] or [0])
            logits = engine._forward(plan, np.concatenate([job.tokens for job in batch]), keep)
            for row, (_, members) in enumerate(places):
                for i in members:
                    first[i] = logits[row]
            engine.stats["prefill_tokens"] += int(counts.sum())

    # Decoding

    def step(self, *, compact: bool = True) -> None:
        """One token for every live row, of which there is at least one. `compact`: no others wait to enter, so rows that
        are spread thin may move together."""
        engine = self.engine
        if compact:
            self._compact()
        live = np.array(self.live)
        counts = self.counts[live]
        plan = Plan(self.slot_of[live], self.lengths[live] + counts - 1, None, engine.device)
        logits = engine._forward(plan, self.tokens[live, counts - 1], None)
        self._draw(live, logits)
        engine.stats["decode_steps"] += 1

    def _draw(self, places: np.ndarray, logits: torch.Tensor) -> None:
        """The next token of each of `places`, from logits [len(places), V], as its own options say."""
        uniform = torch.from_numpy(self.uniforms[places, self.counts[places]]).to(self.engine.device)
        numbers = self._kind[places]
        if (numbers == numbers[0]).all():
            self._record(places, logits, uniform, self.kinds[numbers[0]])
            return
        for number in np.unique(numbers):
            mine = np.nonzero(numbers == number)[0]
            at = torch.from_numpy(mine).to(self.engine.device)
            self._record(places[mine], logits[at], uniform[at], self.kinds[number])

    def _record(self, places: np.ndarray, logits: torch.Tensor, uniform: torch.Tensor, kind: _Kind) -> None:
        """Draw and note one token per row; rows that are done leave."""
        found = draw(logits, uniform, kind.options)
        drawn = found.ids.cpu().numpy()
        counts = self.counts[places]
        self.tokens[places, counts] = drawn
        self.logprobs[places, counts] = found.logprob.cpu().numpy()
        if found.kept is not None:
            for place, ids in zip(places.tolist(), found.candidates(), strict=True):
                self.candidates.setdefault(place, []).append(ids)
        self.counts[places] = counts + 1
        self.engine.stats["sampled_tokens"] += len(places)
        done = kind.stops[drawn] | (counts + 1 >= self.limits[places])
        if kind.options.stop_strings is not None:
            done |= [kind.options.stop_strings.ended(self.tokens[place, :count + 1])
                     for place, count in zip(places.tolist(), counts.tolist(), strict=True)]
        if done.any():
            finished = set(places[done].tolist())
            for i in sorted(finished):
                self._leave(i)
            self.live = [i for i in self.live if i not in finished]
            self.over += sorted(finished)

    def _leave(self, place: int) -> None:
        engine, slot = self.engine, int(self.slot_of[place])
        if engine.reports_experts:  # before the slot is another row's
            self.experts[place] = engine._cache.routes_of(slot, int(self.lengths[place] + self.counts[place]) - 1)
        if self.requests[place].session is None:
            engine._release(slot)
        else:
            # The last token was sampled but never fed, so it is not cached.
            sampled = self.tokens[place, : self.counts[place] - 1]
            engine._cached[slot] = np.concatenate([self.prompts[place], sampled])

    def _compact(self) -> None:
        """When live rows are spread thin over the slots, move the highest into the holes below."""
        slots = self.slot_of[self.live]
        live = len(slots)
        if int(slots[-1]) - int(slots[0]) < MAX_IDLE * live:
            return
        engine = self.engine
        taken = set(slots.tolist())
        movers = [i for i in self.live if self.slot_of[i] >= live]
        targets = [s for s in range(live) if s not in taken]
        sources = [int(self.slot_of[i]) for i in movers]
        length = max(int(self.lengths[i] + self.counts[i]) for i in movers)
        length = max([length, *(len(engine._cached[s]) for s in targets if s in engine._cached)])
        engine._cache.exchange(sources, targets, length)
        free = set(engine._free)
        for i, source, target in zip(movers, sources, targets, strict=True):
            self.slot_of[i] = target
            if target in engine._cached:
                engine._cached[source] = engine._cached.pop(target)
            else:
                free.remove(target)
                free.add(source)
            self._rename(source, target)
        engine._free = sorted(free)
        self.live.sort(key=lambda i: self.slot_of[i])

    def _rename(self, source: int, target: int) -> None:
        """Exchange the sessions of two slots in the engine's tables."""
        engine = self.engine
        names = engine._slot_session.pop(source, None), engine._slot_session.pop(target, None)
        for name, slot in zip(names, (target, source), strict=True):
            if name is not None:
                engine._slot_session[slot] = name
                engine._session_slot[name] = slot
