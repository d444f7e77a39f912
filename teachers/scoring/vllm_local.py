"""A teacher in vLLM in this process: the same questions and answers as behind a server, without the network.

On a GPU this is the fast way to score with a model that fits beside the student; the CPU build is for tests and small runs.
"""

from __future__ import annotations

import collections
import json
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.processes import children, end_with_this
from mopd.sampling.base import Completion
from teachers.scoring.prompts import Prompt, PromptScores, answers_of, checked, prompts_of
from teachers.scoring.requests import ScoreAnswer, ScoreRequest, TeacherError
from teachers.scoring.turns import MODE, Turn, written


class VLLMLocal:
    """ScoringBackend over a `vllm.LLM`.

    model               Hugging Face folder or hub id
    dtype               "float32", "bfloat16", "float16"; none: the checkpoint's own
    max_model_len       longest context and one token; none: the model's own limit
    max_k               limit of "top_k"; none: all ids
    max_request_tokens  tokens handed to vLLM together
    memory_share        share of the GPU's memory that vLLM may take; on CPU `cache_gib` of memory holds its cache

    Raises TeacherError where vLLM is not installed. The engine is started by the first `score`, which raises TeacherError
    where vLLM does not take the model.
    """

    gives = frozenset({"sampled", "top_k"})

    def __init__(self, model: str, *, teacher: str, dtype: str = "", trust_remote_code: bool = False, revision: str = "",
                 tensor_parallel: int = 1, pipeline_parallel: int = 1, max_model_len: int | None = None,
                 max_k: int | None = None, max_request_tokens: int = 65536, memory_share: float = 0.3, cache_gib: int = 1):
        from teachers.serve import need_vllm

        need_vllm(f"teachers.{teacher}.backend=vllm")
        self.teacher, self.model, self.dtype = teacher, model, dtype
        self.max_request_tokens, self.cache_gib, self.memory_share = max_request_tokens, cache_gib, memory_share
        self.faults: collections.Counter[str] = collections.Counter()
        self.scored_tokens = self.computed_tokens = 0
        config = Path(model) / "config.json"
        self._details = json.loads(config.read_text()) if config.is_file() else {}
        self.max_k = max_k or self._details.get("vocab_size") or 20
        # One token less than the model reads: vLLM insists on writing one.
        limit = max_model_len or self._details.get("max_position_embeddings")
        self.max_tokens: int | None = limit - 1 if limit else None
        self._options = {"model": model, "dtype": dtype or "auto", "trust_remote_code": trust_remote_code,
                         "revision": None if self._details else revision or None, "tensor_parallel_size": tensor_parallel,
                         "pipeline_parallel_size": pipeline_parallel, "max_model_len": max_model_len,
                         "max_logprobs": self.max_k, "generation_config": "vllm", "logprobs_mode": MODE,
                         "disable_log_stats": True, "seed": 0}
        self._lock = threading.Lock()  # a vllm.LLM is asked by one thread at a time
        self._llm: Any = None
        self._guard: Any = None
        self._closed = False

    @classmethod
    def from_spec(cls, spec: Any) -> VLLMLocal:
        """From a teachers.registry.TeacherSpec."""
        return cls(str(spec.model), teacher=spec.id, dtype=spec.dtype, trust_remote_code=spec.trust_remote_code,
                   revision=spec.revision, tensor_parallel=spec.tensor_parallel, pipeline_parallel=spec.pipeline_parallel,
                   max_request_tokens=spec.max_request_tokens)

    def _engine(self) -> Any:
        """The vllm.LLM, started when it is first needed; the caller holds the lock."""
        if self._closed:
            raise RuntimeError(f"teacher {self.teacher!r} is closed")
        if self._llm is None:
            from teachers.serve import vllm_environment, vllm_runs_on_cpu

            for name, value in vllm_environment(self.cache_gib).items():
                os.environ.setdefault(name, value)
            from vllm import LLM

            # On the CPU compiling a model's kernels takes long and gains nothing for scoring.
            more = {"enforce_eager": True} if vllm_runs_on_cpu() else {"gpu_memory_utilization": self.memory_share}
            before = children()
            try:
                self._llm = LLM(**self._options, **more)
            except (ValueError, RuntimeError, OSError) as error:
                raise TeacherError(f"teacher {self.teacher!r}: vLLM does not take {self.model}: "
                                   f"{' '.join(str(error).split())[:500]}") from error
            self._guard = end_with_this(children() - before)  # vLLM's engine process outlives one that is killed
            self.max_tokens = self._llm.llm_engine.model_config.max_model_len - 1
        return self._llm

    def identity(self) -> dict[str, Any]:
        """See ScoringBackend."""
        from teachers.registry import model_revision

        return {"model": self.model, "revision": model_revision(self.model),
                "dtype": self.dtype or self._details.get("dtype") or self._details.get("torch_dtype"),
                "tokenizer": self.model, "rows": self._details.get("vocab_size"), "context_tokens": self.max_tokens,
                "capabilities": {"sampled": True, "max_k": self.max_k, "flat": True, "start_offset": False,
                                 "chosen_ids": False, "hidden": False, "full": False, "temperature": False}}

    def score(self, requests: Sequence[ScoreRequest]) -> list[ScoreAnswer]:
        """See ScoringBackend. Raises ValueError for requests that no prompt log-probability answers."""
        requests = list(requests)
        if not prompts_of(requests):  # raises before an engine is started
            return []
        with self._lock:
            self._engine()
            prompts = prompts_of(requests, self.max_tokens)
            scores: list[PromptScores | str] = ["not asked"] * len(prompts)
            for numbers in self._batches(prompts, scores):
                self._score(prompts, numbers, scores)
            self.scored_tokens += sum(map(len, requests))
            self.computed_tokens += sum(map(len, prompts))
        for found in scores:
            if isinstance(found, str):
                self.faults[found] += 1
        return answers_of(requests, prompts, scores, self.teacher)

    def write(self, turns: Sequence[Turn]) -> list[Completion | str]:
        """Turns in the order asked, or the reason why there is none."""
        turns = list(turns)
        if not turns:
            return []
        found: list[Completion | str] = ["not asked"] * len(turns)
        with self._lock:
            self._engine()
            for numbers in self._batches(turns, found):
                self._write(turns, numbers, found)
        for answer in found:
            if isinstance(answer, str):
                self.faults[answer] += 1
        return found

    def _write(self, turns: list[Turn], numbers: list[int], found: list[Completion | str]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=turns[n].tokens.tolist()) for n in numbers],
            [SamplingParams(**turns[n].sampling(), flat_logprobs=True, detokenize=False) for n in numbers], use_tqdm=False)
        for number, output in zip(numbers, outputs, strict=True):
            flat, tokens = output.outputs[0].logprobs, list(output.outputs[0].token_ids)
            begin = np.asarray(flat.start_indices)  # the sampled token stands first in each position
            try:
                if np.asarray(flat.token_ids)[begin].tolist() != tokens:
                    raise ValueError("log-probabilities of other tokens")
                found[number] = written(turns[number], tokens, np.asarray(flat.logprobs, np.float32)[begin])
            except ValueError as error:
                found[number] = f"unusable answer: {error}"

    def _batches(self, prompts: Sequence[Prompt | Turn], scores: list[Any]) -> list[list[int]]:
        """Numbers of the prompts that are asked together; those that are too long get their reason at once."""
        batches, room = [], 0
        for number, prompt in enumerate(prompts):
            if len(prompt) > self.max_tokens:
                scores[number] = f"context longer than the model's {self.max_tokens} tokens"
                continue
            if not batches or len(prompt) > room:
                batches.append([])
                room = self.max_request_tokens
            batches[-1].append(number)
            room -= len(prompt)
        return batches

    def _score(self, prompts: list[Prompt], numbers: list[int], scores: list[PromptScores | str]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        asked = [prompts[n] for n in numbers]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=p.tokens.tolist()) for p in asked],
            [SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=p.k, flat_logprobs=True, detokenize=False)
             for p in asked], use_tqdm=False)
        for number, prompt, output in zip(numbers, asked, outputs, strict=True):
            try:
                scores[number] = _read(prompt, output.prompt_logprobs)
            except ValueError as error:
                scores[number] = f"unusable answer: {error}"

    def close(self) -> None:
        """Its engine process ends and its memory is free."""
        with self._lock:
            llm, self._llm, self._closed = self._llm, None, True
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()


def _read(prompt: Prompt, flat: Any) -> PromptScores:
    """From a vllm.logprobs.FlatLogprobs: the token itself stands first in each position, the likeliest ids follow."""
    if len(flat) != len(prompt):
        raise ValueError(f"{len(flat)} positions for {len(prompt)} tokens")
    begin = np.asarray(flat.start_indices)[prompt.start:]
    width = np.asarray(flat.end_indices)[prompt.start:] - begin
    if (width != prompt.k + 1).any():
        raise ValueError(f"{sorted(set(width.tolist()))} log-probabilities a position, not {prompt.k + 1}")
    ids, values = np.asarray(flat.token_ids), np.asarray(flat.logprobs, np.float32)
    top = begin[:, None] + np.arange(1, prompt.k + 1)
    return checked(prompt, values[begin], ids[begin], ids[top] if prompt.k else None, values[top] if prompt.k else None)
