"""The in-process engine: continuous batching of a Transformers model over a slot cache.

Rows at different lengths decode together, finished rows leave at once and waiting ones enter, a session keeps its keys
and values from turn to turn, and tokens that several prompts share are computed once. Fast on a CPU with a small
model: one forward pass per step without padding, copying or per-row synchronisation.
"""

from __future__ import annotations

import copy
import heapq
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from mopd.sampling.base import Completion, Request, SamplingOptions
from mopd.sampling.draws import Drawn, check_options, draw, uniforms
from mopd.sampling.shared_prefix import common_prefix, plan_prefixes
from mopd.sampling.slot_cache import ATTENTION_NAME, MAX_IDLE, Plan, SlotCache, active_plan

_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


def turn_limit(request: Request, options: SamplingOptions) -> int:
    """Most tokens that this request may sample."""
    return options.max_tokens if request.max_tokens is None else min(request.max_tokens, options.max_tokens)


class _Job:
    """Tokens [start, start + len(tokens)) of a slot to compute; `wants`: offset → the requests that sample there."""

    def __init__(self, slot: int, start: int, tokens: np.ndarray, wants: dict[int, list[int]]):
        self.slot, self.start, self.tokens, self.wants = slot, start, tokens, wants


class HFEngine:
    """A SamplingEngine around a causal language model of Transformers.

    model                    a PreTrainedModel; the engine works on its own copy, so that training may go on
    device                   where the copy lives
    max_batch                rows that decode together
    experts_implementation   for Mixture-of-Experts models: "grouped_mm", "eager", ...; None keeps the model's own
    prefill_tokens           new tokens per prefill pass
    max_cache_bytes          beyond this, caches of idle sessions are dropped, least recently used first
    version                  weights version of `model`
    verify                   compare a probe with the model's plain forward pass at construction

    `stats` counts tokens and seconds: prefill_tokens (computed), shared_tokens (taken from another row's or an earlier
    turn's cache), sampled_tokens, decode_steps, prefill_seconds, decode_seconds, evicted_sessions.
    Raises ValueError for a model whose attention cannot be exchanged, RuntimeError when the probe disagrees.
    """

    tells_ends = True  # `generate` takes `ended`

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        device: str | torch.device = "cpu",
        max_batch: int = 64,
        experts_implementation: str | None = None,
        prefill_tokens: int = 2048,
        max_cache_bytes: int = 2**31,
        version: int = 0,
        verify: bool = True,
    ):
        if max_batch < 1 or prefill_tokens < 1:
            raise ValueError(f"max_batch {max_batch} and prefill_tokens {prefill_tokens} must be at least 1")
        if not getattr(model, "_supports_attention_backend", False):
            raise ValueError(
                f"{type(model).__name__} does not take an attention function of Transformers' registry; "
                "sample it with the vllm engine"
            )
        kinds = set(getattr(model.config, "layer_types", None) or []) - {"full_attention", "sliding_attention"}
        if kinds:
            raise ValueError(
                f"{type(model).__name__} has layers of kind {sorted(kinds)}, whose state is no key/value cache; "
                "sample it with the vllm engine"
            )
        self.device = torch.device(device)
        self.max_batch, self.prefill_tokens, self.max_cache_bytes = max_batch, prefill_tokens, max_cache_bytes
        self.version = version
        self.model = copy.deepcopy(model).to(self.device).eval().requires_grad_(False)
        if experts_implementation is not None:
            self.model.set_experts_implementation(experts_implementation)
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self.max_positions = getattr(model.config, "max_position_embeddings", None) or 2**31
        self.stats = dict.fromkeys(
            ("prefill_tokens", "shared_tokens", "sampled_tokens", "decode_steps", "evicted_sessions"), 0
        ) | {"prefill_seconds": 0.0, "decode_seconds": 0.0}
        self._cache = SlotCache()
        self._forget()
        with torch.inference_mode():
            probe = np.random.Generator(np.random.Philox(key=0)).integers(0, self.vocabulary, 12)
            expected = self._plain_logprobs(probe) if verify else None
            self.model.set_attn_implementation(ATTENTION_NAME)
            if expected is not None:
                self._check_probe(probe, expected)

    @classmethod
    def from_pretrained(cls, folder: str | Path, *, dtype: torch.dtype = torch.float32, **options) -> HFEngine:
        """Load a Hugging Face folder or id (no remote code) and wrap it; `options` as for the constructor."""
        from transformers import AutoModelForCausalLM

        return cls(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), **options)

    # Sessions and weights

    def _forget(self) -> None:
        """Drop every cached token; the memory is kept."""
        self._session_slot: dict[str, int] = {}
        self._slot_session: dict[int, str] = {}
        self._cached: dict[int, np.ndarray] = {}
        self._free: list[int] = list(range(self._cache.slots))

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Forget the caches of finished sequences; unknown names are ignored (their cache may have been dropped)."""
        for session in sessions:
            slot = self._session_slot.pop(session, None)
            if slot is not None:
                self._release(slot)

    def _release(self, slot: int) -> None:
        self._slot_session.pop(slot, None)
        self._cached.pop(slot, None)
        heapq.heappush(self._free, slot)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy weights in place under their Hugging Face names; all caches are dropped.

        Names are those of the module or of its saved folder (experts one by one). Raises ValueError naming an unknown
        name, a wrong shape, or weights that did not come; the engine must not be used after such an error.
        """
        targets = dict(self.model.named_parameters(remove_duplicate=False)) | dict(self.model.named_buffers())
        seen: set[int] = set()
        pieces: dict[str, int] = {}
        with torch.no_grad():
            for name, tensor in weights:
                target = targets.get(name)
                match = _EXPERT.match(name) if target is None else None
                if match:
                    fused = f"{match[1]}.{'down_proj' if match[3] == 'down' else 'gate_up_proj'}"
                    whole = targets.get(fused)
                    if whole is not None and int(match[2]) < len(whole):
                        target = whole[int(match[2])]
                        if match[3] != "down":
                            target = target.chunk(2, dim=0)[match[3] == "up"]
                        pieces[fused] = pieces.get(fused, 0) + 1
                        if pieces[fused] == len(whole) * (1 if match[3] == "down" else 2):
                            seen.add(id(whole))
                if target is None:
                    raise ValueError(f"weights have {name!r}, which {type(self.model).__name__} does not know")
                if target.shape != tensor.shape:
                    raise ValueError(f"{name}: shape {tuple(tensor.shape)}, the engine has {tuple(target.shape)}")
                target.copy_(tensor)
                seen.add(id(target))
        missing = [n for n, p in self.model.named_parameters(remove_duplicate=True) if id(p) not in seen]
        if missing:
            raise ValueError(f"weights lack {len(missing)} of the model's parameters, first {missing[0]!r}")
        self.version = version
        self._forget()

    # Generation

    def generate(self, requests: list[Request], options: SamplingOptions,
                 ended: Callable[[int, Completion], None] | None = None) -> list[Completion]:
        """Sample one turn for each request, in the order of the requests. `ended` is told each request's number and turn as
        soon as it is written, while others still are.

        Draws depend on a request's seed alone. Raises ValueError for empty or foreign tokens, a session named twice,
        or a request that cannot fit the model's positions.
        """
        check_options(options)
        self._check_requests(requests, options)
        if not requests:
            return []
        try:
            with torch.inference_mode():
                return _Generation(self, requests, options).run(ended)
        except BaseException:
            # Tables may be half changed: a cache that might not hold what it says is worse than none.
            self._forget()
            raise

    def _check_requests(self, requests: list[Request], options: SamplingOptions) -> None:
        names = [r.session for r in requests if r.session is not None]
        if len(set(names)) != len(names):
            twice = next(n for n in names if names.count(n) > 1)
            raise ValueError(f"session {twice!r} is in one batch twice")
        for number, request in enumerate(requests):
            tokens = request.tokens
            if len(tokens) == 0:
                raise ValueError(f"request {number} (session {request.session!r}) has no tokens")
            if int(tokens.max()) >= self.vocabulary:
                raise ValueError(
                    f"request {number} (session {request.session!r}) has token id {int(tokens.max())}, the model knows "
                    f"{self.vocabulary}: it was written with another tokenizer"
                )
            limit = turn_limit(request, options)
            if limit < 1:
                raise ValueError(f"request {number} (session {request.session!r}) asks for {limit} tokens")
            if len(tokens) + limit > self.max_positions:
                raise ValueError(
                    f"request {number} (session {request.session!r}): {len(tokens)} tokens and {limit} "
                    f"to sample exceed the model's {self.max_positions} positions; lower the context limit"
                )

    def _forward(self, plan: Plan, tokens: np.ndarray, keep: np.ndarray | None) -> torch.Tensor:
        """Logits [len(keep), V] (None: of all tokens) of packed tokens int64 [N]."""
        with active_plan(plan):
            output = self.model(
                input_ids=torch.from_numpy(tokens).to(self.device)[None],
                position_ids=plan.positions[None],
                past_key_values=self._cache,
                use_cache=True,
                logits_to_keep=0 if keep is None else torch.from_numpy(keep).to(self.device),
            )
        return output.logits[0]

    def _acquire(self, count: int, length: int, protected: set[str]) -> list[int]:
        """The `count` lowest free slots, of at least `length` tokens; idle sessions give way if memory is short."""
        limit = self.max_cache_bytes // max(1, self._cache.bytes_per_token() * max(length, self._cache.capacity))
        missing = count - len(self._free)
        if missing > 0 and self._cache.slots + missing > limit:
            for session in [s for s in self._session_slot if s not in protected]:
                if missing <= 0:
                    break
                self.end_sessions([session])
                self.stats["evicted_sessions"] += 1
                missing -= 1
        if missing > 0:
            before = self._cache.slots
            self._cache.reserve(before + missing, length)
            for slot in range(before, self._cache.slots):
                heapq.heappush(self._free, slot)
        self._cache.reserve(self._cache.slots, length)
        return [heapq.heappop(self._free) for _ in range(count)]

    # Probe

    @torch.inference_mode()
    def score(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: log-probability at temperature 1 of each of `tokens` uint32 [T] but the first, given those before
        it, with the present weights. Drops the caches of all sessions."""
        ids = np.asarray(tokens).astype(np.int64)
        slot = self._acquire(1, len(ids), set())[0]
        logits = self._forward(Plan(np.array([slot]), np.array([0]), np.array([len(ids)]), self.device), ids, None)
        self._forget()
        labels = torch.from_numpy(ids[1:]).to(self.device)[:, None]
        return torch.log_softmax(logits[:-1].float(), dim=-1).gather(1, labels)[:, 0].cpu().numpy()

    def _plain_logprobs(self, tokens: np.ndarray) -> torch.Tensor:
        ids = torch.from_numpy(tokens).to(self.device)[None]
        return torch.log_softmax(self.model(input_ids=ids, use_cache=False).logits[0].float(), dim=-1)

    def _check_probe(self, tokens: np.ndarray, expected: torch.Tensor) -> None:
        """Prefill, extend and decode a short text through the slots, and compare with the plain forward pass."""
        tolerance = 1e-3 if expected.dtype == self.model.dtype else 0.2
        slot = self._acquire(1, len(tokens), set())[0]
        got = []
        for start, end in ((0, 4), (4, len(tokens) - 1), (len(tokens) - 1, len(tokens))):
            plan = Plan(np.array([slot]), np.array([start]), np.array([end - start]), self.device)
            got.append(self._forward(plan, tokens[start:end], None))
        self._forget()
        worst = (torch.log_softmax(torch.cat(got).float(), dim=-1) - expected).abs().max().item()
        if not worst <= tolerance:
            raise RuntimeError(
                f"{type(self.model).__name__} through the slot cache differs from its plain forward pass by "
                f"{worst:.3g} in log-probability (allowed {tolerance:g}); sample this model with the vllm engine"
            )


class _Generation:
    """One call of `generate`: which request sits in which slot, and what it has sampled so far."""

    def __init__(self, engine: HFEngine, requests: list[Request], options: SamplingOptions):
        self.engine, self.requests, self.options = engine, requests, options
        count = len(requests)
        self.limits = np.array([turn_limit(r, options) for r in requests])
        width = int(self.limits.max())
        self.prompts = [np.asarray(r.tokens).astype(np.int64) for r in requests]
        self.lengths = np.array([len(p) for p in self.prompts])
        self.tokens = np.empty((count, width), dtype=np.int64)
        self.logprobs = np.empty((count, width), dtype=np.float32)
        # By request, only where something is cut off: most runs keep nothing.
        self.candidates: dict[int, list[np.ndarray | None]] = {}
        self.counts = np.zeros(count, dtype=np.int64)
        self.uniforms = np.empty((count, width))
        self.stops = np.zeros(engine.vocabulary, dtype=bool)
        self.stops[list(options.stop_ids)] = True
        self.slot_of = np.full(count, -1, dtype=np.int64)
        self.live: list[int] = []
        self.over: list[int] = []  # in the order in which they ended
        self.names = {r.session for r in requests if r.session is not None}
        cached = [r.session in engine._session_slot for r in requests]
        # Growing sessions first, then by tokens, so that prompts with common beginnings enter together.
        order = sorted(range(count), key=lambda i: (not cached[i], self.prompts[i].astype(">u4").tobytes(), i))
        self.waiting = order[::-1]

    def run(self, ended: Callable[[int, Completion], None] | None = None) -> list[Completion]:
        engine, stats = self.engine, self.engine.stats
        refill = max(1, engine.max_batch // 4)
        told = 0
        while self.waiting or self.live:
            room = engine.max_batch - len(self.live)
            if self.waiting and (not self.live or room >= min(refill, len(self.waiting))):
                started = time.perf_counter()
                wave = [self.waiting.pop() for _ in range(min(room, len(self.waiting)))]
                self._admit(wave)
                stats["prefill_seconds"] += time.perf_counter() - started
            else:
                started = time.perf_counter()
                self._compact()
                self._step()
                stats["decode_seconds"] += time.perf_counter() - started
            if ended is not None:
                for request in self.over[told:]:
                    ended(request, self._completion(request))
                told = len(self.over)
        return [self._completion(i) for i in range(len(self.requests))]

    def _completion(self, request: int) -> Completion:
        count = self.counts[request]
        tokens = self.tokens[request, :count].astype(np.uint32)
        finish = "stop" if self.stops[tokens[-1]] else "length"
        sets = self.candidates.get(request, ())
        candidates = tuple(sets) if any(ids is not None for ids in sets) else None
        return Completion(tokens, self.logprobs[request, :count].copy(), finish, self.engine.version, candidates)

    # Entering

    def _admit(self, wave: list[int]) -> None:
        """Prefill the prompts of `wave`, as far as nothing of them is cached, and draw their first tokens."""
        engine = self.engine
        longest = max(len(self.prompts[i]) + int(self.limits[i]) for i in wave)
        jobs: list[_Job] = []
        fresh: dict[int, np.ndarray] = {}
        for i in wave:
            session, prompt = self.requests[i].session, self.prompts[i]
            self.uniforms[i, : self.limits[i]] = uniforms(self.requests[i].seed, int(self.limits[i]))
            slot = engine._session_slot.get(session) if session is not None else None
            shared = 0
            if slot is not None:
                shared = min(common_prefix(engine._cached[slot], prompt), len(prompt) - 1)
                engine._session_slot[session] = engine._session_slot.pop(session)
            if shared == 0:
                fresh[i] = prompt
            else:
                self.slot_of[i] = slot
                engine.stats["shared_tokens"] += shared
                jobs.append(_Job(slot, shared, prompt[shared:], {len(prompt) - shared - 1: [i]}))
            if slot is not None and shared == 0:
                engine.end_sessions([session])
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
        uniform = torch.from_numpy(self.uniforms[wave, 0]).to(engine.device)
        self._record(np.array(wave), draw(logits, uniform, self.options))

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
        """Append jobs for prompts without a cache; returns trunk jobs, copies after them, and copies at the end."""
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
        """Run jobs in passes of similar lengths; `first` receives the logits where requests sample."""
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

    def _step(self) -> None:
        """One token for every live row, which stand in the order of their slots."""
        engine = self.engine
        live = np.array(self.live)
        counts = self.counts[live]
        plan = Plan(self.slot_of[live], self.lengths[live] + counts - 1, None, engine.device)
        logits = engine._forward(plan, self.tokens[live, counts - 1], None)
        uniform = torch.from_numpy(self.uniforms[live, counts]).to(engine.device)
        self._record(live, draw(logits, uniform, self.options))
        engine.stats["decode_steps"] += 1

    def _record(self, requests: np.ndarray, found: Drawn) -> None:
        """Note one sampled token per request; rows that are done leave."""
        drawn = found.ids.cpu().numpy()
        counts = self.counts[requests]
        self.tokens[requests, counts] = drawn
        self.logprobs[requests, counts] = found.logprob.cpu().numpy()
        if found.kept is not None:
            for request, ids in zip(requests.tolist(), found.candidates(), strict=True):
                self.candidates.setdefault(request, []).append(ids)
        self.counts[requests] = counts + 1
        self.engine.stats["sampled_tokens"] += len(requests)
        done = self.stops[drawn] | (counts + 1 >= self.limits[requests])
        if done.any():
            finished = set(requests[done].tolist())
            for i in sorted(finished):
                self._leave(i)
            self.live = [i for i in self.live if i not in finished]
            self.over += sorted(finished)

    def _leave(self, request: int) -> None:
        engine, slot = self.engine, int(self.slot_of[request])
        if self.requests[request].session is None:
            engine._release(slot)
        else:
            # The last token was sampled but never fed, so it is not cached.
            sampled = self.tokens[request, : self.counts[request] - 1]
            engine._cached[slot] = np.concatenate([self.prompts[request], sampled])

    def _compact(self) -> None:
        """When live rows are spread thin over the slots and nobody waits, move the highest into the holes below."""
        slots = self.slot_of[self.live]
        live = len(slots)
        if self.waiting or int(slots[-1]) - int(slots[0]) < MAX_IDLE * live:
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
