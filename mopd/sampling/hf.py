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
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path

import numpy as np
import torch

from mopd.sampling.base import Completion, Request, SamplingOptions
from mopd.sampling.draws import check_options
from mopd.sampling.hf_rows import Rows, turn_limit
from mopd.sampling.hf_stream import Stream
from mopd.sampling.slot_cache import ATTENTION_NAME, Plan, SlotCache, active_plan
from mopd.sampling.weight_folder import folder_weights

_EXPERT = re.compile(r"(.*experts)\.(\d+)\.(gate|up|down)_proj\.weight$")


class HFEngine:
    """A StreamingEngine around a causal language model of Transformers.

    model                    a PreTrainedModel; the engine works on its own copy, so that training may go on
    device                   where the copy lives
    max_batch                rows that decode together
    experts_implementation   for Mixture-of-Experts models: "grouped_mm", "eager", ...; None keeps the model's own
    prefill_tokens           new tokens per prefill pass
    max_cache_bytes          beyond this, caches of idle sessions are dropped, least recently used first
    version                  weights version of `model`
    verify                   compare a probe with the model's plain forward pass at construction
    report_experts           completions say which experts each token went to (`Completion.experts`), as routing replay needs

    `stats` counts tokens and seconds: prefill_tokens (computed), shared_tokens (taken from another row's or an earlier
    turn's cache), sampled_tokens, decode_steps, prefill_seconds, decode_seconds, evicted_sessions.
    Raises ValueError for a model whose attention cannot be exchanged, CannotReplay where it shall report experts and cannot,
    RuntimeError when the probe disagrees.
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
        report_experts: bool = False,
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
        self.reports_experts = report_experts
        if report_experts:
            from mopd.learner.routing import tell_routes

            tell_routes(self.model, self._cache.note_routes)
        self._stream: Stream | None = None
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
        """Forget the caches of finished sequences; unknown names are ignored (their cache may have been dropped). Raises
        ValueError for a session with a turn under way."""
        busy = self._stream.sessions if self._stream is not None else set()
        for session in sessions:
            if session in busy:
                raise ValueError(f"session {session!r} has a turn under way; abort it before the session ends")
            self._end_session(session)

    def _end_session(self, session: str) -> None:
        slot = self._session_slot.pop(session, None)
        if slot is not None:
            self._release(slot)

    def _release(self, slot: int) -> None:
        self._slot_session.pop(slot, None)
        self._cached.pop(slot, None)
        heapq.heappush(self._free, slot)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Copy weights in place under their Hugging Face names; all caches are dropped. Turns under way go on: what they have
        is read again under the new weights, each token keeps the version that sampled it.

        Names are those of the module or of its saved folder (experts one by one). Raises ValueError naming an unknown
        name, a wrong shape, or weights that did not come; the engine must not be used after such an error.
        """
        if self._stream is not None:
            self._stream.unseat()
        self._forget()
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

    def load_folder(self, folder: str | Path, version: int) -> None:
        """Take the weights of a published folder (mopd/sampling/weight_folder.py), copied in place from mapped files. Raises
        WeightFolderError, before anything is copied, where the folder is not whole."""
        self.load_weights(folder_weights(folder), version)

    # Generation

    def generate(self, requests: list[Request], options: SamplingOptions,
                 ended: Callable[[int, Completion], None] | None = None) -> list[Completion]:
        """Sample one turn for each request, in the order of the requests. `ended` is told each request's number and turn as
        soon as it is written, while others still are.

        Draws depend on a request's seed alone. Raises ValueError for empty or foreign tokens, a session named twice,
        or a request that cannot fit the model's positions; RuntimeError while submitted turns are under way.
        """
        check_options(options)
        self._check_requests(requests, options)
        if self.under_way:
            raise RuntimeError(f"{self.under_way} submitted turns are under way; poll them to their end before generate")
        if not requests:
            return []
        try:
            with torch.inference_mode():
                return self._generate(requests, options, ended)
        except BaseException:
            # Tables may be half changed: a cache that might not hold what it says is worse than none.
            self._forget()
            raise

    def _generate(self, requests: list[Request], options: SamplingOptions,
                  ended: Callable[[int, Completion], None] | None) -> list[Completion]:
        rows = Rows(self, len(requests), max(turn_limit(r, options) for r in requests))
        for i, request in enumerate(requests):
            rows.put(i, request, options)
        cached = [r.session in self._session_slot for r in requests]
        # Growing sessions first, then by tokens, so that prompts with common beginnings enter together.
        order = sorted(range(len(requests)), key=lambda i: (not cached[i], rows.prompts[i].astype(">u4").tobytes(), i))
        waiting, refill, told = order[::-1], max(1, self.max_batch // 4), 0
        while waiting or rows.live:
            started, room = time.perf_counter(), self.max_batch - len(rows.live)
            if waiting and (not rows.live or room >= min(refill, len(waiting))):
                rows.admit([waiting.pop() for _ in range(min(room, len(waiting)))])
                self.stats["prefill_seconds"] += time.perf_counter() - started
            else:
                rows.step(compact=not waiting)
                self.stats["decode_seconds"] += time.perf_counter() - started
            if ended is not None:
                for i in rows.over[told:]:
                    ended(i, rows.completion(i))
                told = len(rows.over)
        return [rows.completion(i) for i in range(len(requests))]

    # Turns that come one by one

    @property
    def under_way(self) -> int:
        """Turns that were submitted and have not ended."""
        return len(self._stream.turns) if self._stream is not None else 0

    def submit(self, key: Hashable, request: Request, options: SamplingOptions) -> None:
        """Begin one turn; it enters the batch with the next `poll` that finds room. Draws depend on the request's seed alone,
        so it gets the tokens that `generate` would give it. Raises ValueError as `generate` does, for a key that is under
        way, and for a session with another turn under way."""
        check_options(options)
        self._check_requests([request], options)
        if self._stream is None:
            self._stream = Stream(self)
        if key in self._stream.turns:
            raise ValueError(f"a turn with the key {key!r} is under way")
        if request.session is not None and request.session in self._stream.sessions:
            raise ValueError(f"session {request.session!r} has a turn under way")
        self._stream.submit(key, request, options)

    @torch.inference_mode()
    def poll(self, timeout: float = 0.0) -> list[tuple[Hashable, Completion]]:
        """Turns that have ended. Works until one has or `timeout` seconds are over, and writes at least one token of each row
        in the batch. Where the work itself fails, every turn under way is forgotten."""
        if not self.under_way:
            return []
        try:
            return self._stream.poll(timeout)
        except BaseException:
            self._stream = None
            self._forget()
            raise

    def abort(self, keys: Iterable[Hashable]) -> None:
        """Forget turns under way, unknown keys too; their places are free at once."""
        if self._stream is not None:
            self._stream.abort(keys)

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
                self._end_session(session)
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
        it, with the present weights. Turns under way are not disturbed."""
        ids = np.asarray(tokens).astype(np.int64)
        slot = self._acquire(1, len(ids), self._stream.rows.names if self._stream is not None else set())[0]
        logits = self._forward(Plan(np.array([slot]), np.array([0]), np.array([len(ids)]), self.device), ids, None)
        self._release(slot)
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

