"""The student in vLLM in this process: continuous batching, paged caches and prefix reuse by vLLM; turns come one by one.

On a GPU this is the fast way to sample with a model that fits there; the CPU build is for tests and small runs.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mopd.learner.routing import moe_layers
from mopd.processes import children, end_with_this
from mopd.sampling.base import Completion, EngineTrouble
from mopd.sampling.vllm_engine import TurnEngine
from mopd.sampling.vllm_presence import (
    need_vllm,
    positions_of,
    vllm_environment,
    vllm_runs_on_cpu,
    whole_prompts,
)
from mopd.sampling.vllm_turns import MODE, Piece, Turn, Writing, piece_of
from mopd.sampling.vllm_weights import WORKER_EXTENSION, load_in_process


class VLLMRefuses(ValueError):
    """vLLM does not take the model or an option; the message has its words."""


class VLLMEngine(TurnEngine):
    """A StreamingEngine over a `vllm.LLM` of this process.

    model            Hugging Face folder or hub id
    dtype            "float32", "bfloat16", "float16"; none: the checkpoint's own
    max_batch        turns that decode together
    max_model_len    tokens of the longest context with what is written behind it; None: the model's own limit
    memory_share     share of the GPU's memory that vLLM may take; on CPU `cache_gib` of memory holds its cache
    sleeps           `sleep` gives its GPU memory back and `wake` takes it again; on CPU vLLM cannot
    report_experts   completions say which experts each token went to; vLLM tells it through its second model runner (GPU)
    more             further arguments of `vllm.LLM`, which win
    version          weights version of `model`

    Draws come from each request's seed: the same seed and the same logits give the same token, whatever else is in the
    batch; the logits may differ by rounding with the batch. Raises VLLMMissing where vLLM is not installed and VLLMRefuses
    where it does not take the model.
    """

    def __init__(self, model: str | Path, *, dtype: str = "", max_batch: int = 64, max_model_len: int | None = None,
                 tensor_parallel: int = 1, pipeline_parallel: int = 1, memory_share: float = 0.4, cache_gib: int = 1,
                 trust_remote_code: bool = False, report_experts: bool = False, more: Mapping[str, Any] | None = None,
                 version: int = 0, sleeps: bool = False):
        need_vllm("sampling.engine=vllm")
        super().__init__(max_batch=max_batch, version=version)
        for name, value in vllm_environment(cache_gib).items():
            os.environ.setdefault(name, value)
        from vllm import LLM

        on_cpu = vllm_runs_on_cpu()
        if report_experts and on_cpu:
            raise VLLMRefuses("train.routing_replay: vLLM tells which experts it chose through its second model runner, "
                              "which needs a GPU; take sampling.engine=hf, or train.routing_replay=false")
        if sleeps and on_cpu:
            raise VLLMRefuses("sampling.vllm_options.sleep: vLLM's sleep mode gives memory of a GPU back, and here it runs "
                              "on CPUs, whose memory is not shared out; leave it out")
        self.sleeps, self.asleep = sleeps, False
        # On the CPU compiling a model's kernels takes long and gains little.
        place = {"enforce_eager": True} | whole_prompts(max_model_len or positions_of(model)) if on_cpu else \
            {"gpu_memory_utilization": memory_share}
        options = {"model": str(model), "dtype": dtype or "auto", "trust_remote_code": trust_remote_code,
                   "tensor_parallel_size": tensor_parallel, "pipeline_parallel_size": pipeline_parallel,
                   "max_model_len": max_model_len, "max_num_seqs": max_batch, "max_logprobs": -1, "logprobs_mode": MODE,
                   "generation_config": "vllm", "enable_prefix_caching": True, "skip_tokenizer_init": True,
                   "disable_log_stats": True, "seed": 0, "worker_extension_cls": WORKER_EXTENSION} | place
        if report_experts:
            options["enable_return_routed_experts"] = True
        if sleeps:
            options["enable_sleep_mode"] = True
        before = children()
        try:
            self._llm = LLM(**options | dict(more or {}))
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise VLLMRefuses(f"sampling.engine=vllm: vLLM does not take {model}: "
                              f"{' '.join(str(error).split())[:500]}") from error
        self._engine = self._llm.llm_engine
        self._guard = end_with_this(children() - before)  # vLLM's engine process outlives one that is killed
        config = self._engine.vllm_config
        self.max_positions = int(config.model_config.max_model_len)
        self.vocabulary = int(config.model_config.get_vocab_size())
        self.max_logprobs = int(config.model_config.max_logprobs)
        cache = config.cache_config
        self.kv_tokens = int((cache.num_gpu_blocks or 0) * cache.block_size) or None  # tokens that its cache holds
        self._moe_layers = moe_layers(config.model_config.hf_config) if report_experts else []
        self._numbers = itertools.count()
        self._asked: dict[str, tuple[Hashable, Turn]] = {}  # vLLM's name of a request -> whose piece it is
        self._name_of: dict[Hashable, str] = {}
        self._scores: dict[str, Any] = {}
        self._told: list[tuple[Hashable, Completion | EngineTrouble]] = []
        self._engine.set_weight_version(str(version))

    def _begin(self, key: Hashable, writing: Writing) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        turn = writing.turn()
        self._asked[self._add(turn.tokens, SamplingParams(**turn.sampling(), flat_logprobs=True, detokenize=False,
                                                          output_kind=RequestOutputKind.FINAL_ONLY))] = (key, turn)
        self._name_of[key] = next(reversed(self._asked))

    def _add(self, tokens: np.ndarray, sampling: Any) -> str:
        from vllm.inputs import TokensPrompt

        name = f"mopd-{next(self._numbers)}"
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=np.asarray(tokens).tolist()), sampling)
        return name

    def _end(self, keys: list[Hashable]) -> None:
        names = [self._name_of.pop(key) for key in keys if key in self._name_of]
        for name in names:
            del self._asked[name]
        if names:
            self._engine.abort_request(names)
        gone = set(keys)
        self._told = [(key, what) for key, what in self._told if key not in gone]

    def _hear(self, timeout: float) -> list[tuple[Hashable, Completion | EngineTrouble]]:
        begin = time.perf_counter()
        while not self._told and self._asked:
            self._step()
            if time.perf_counter() - begin >= timeout:
                break
        found, self._told = self._told, []
        return found

    def _step(self) -> None:
        """One step of vLLM, and what ended with it."""
        for output in self._engine.step():
            if not output.finished:
                continue
            if output.request_id in self._scores:
                self._scores[output.request_id] = output
                continue
            key, turn = self._asked.pop(output.request_id)
            del self._name_of[key]
            try:
                done = self._writing[key].add(self._piece(turn, output.outputs[0]))
            except ValueError as error:
                self._told.append((key, EngineTrouble("engine_answer", f"vLLM wrote no usable turn: {error}")))
                continue
            if done is None:
                self._begin(key, self._writing[key])  # broken off: the rest behind what there is
            else:
                self._told.append((key, done))

    def _piece(self, turn: Turn, output: Any) -> Piece:
        """From a vllm.CompletionOutput with flat log-probabilities: the sampled token stands first in each position."""
        tokens, flat = list(output.token_ids), output.logprobs
        begin, end = np.asarray(flat.start_indices, np.int64), np.asarray(flat.end_indices, np.int64)
        ids, values = np.asarray(flat.token_ids, np.int64), np.asarray(flat.logprobs, np.float32)
        if ids[begin].tolist() != tokens:
            raise ValueError("log-probabilities of other tokens")
        versions = np.full(len(tokens), self.version, np.int32)
        for span in output.weight_versions or ():
            versions[span.start:span.end] = int(span.version)
        told = [(ids[a:b], values[a:b]) for a, b in zip(begin, end, strict=True)] if turn.told else None
        piece = piece_of(turn, tokens, values[begin], version=versions, likeliest=told, vocabulary=self.vocabulary)
        return dataclasses.replace(piece, experts=self._experts(turn, output)) if self._moe_layers else piece

    def _experts(self, turn: Turn, output: Any) -> np.ndarray:
        """int16 [T + n - 1, L, k] of the MoE layers; vLLM tells of all layers of the model."""
        told, size = output.routed_experts, len(turn.tokens) + len(output.token_ids) - 1
        if told is None or len(told) != size:
            raise ValueError(f"experts of {0 if told is None else len(told)} tokens instead of {size}")
        return told[:, self._moe_layers].astype(np.int16)

    def _take(self, folder: Path, version: int) -> None:
        """Nothing is computed between the old weights' caches and the new weights: requests wait meanwhile."""
        core = self._engine.engine_core
        apart = hasattr(core, "call_utility")  # it runs in a process of its own, and by itself
        if apart:
            core.call_utility("pause_scheduler", "keep", False)
        try:
            load_in_process(self._llm, folder)
            self._engine.set_weight_version(str(version))
        finally:
            if apart:
                core.call_utility("resume_scheduler")

    def score(self, tokens: np.ndarray) -> np.ndarray:
        """See TurnEngine. Turns under way go on meanwhile."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        name = self._add(tokens, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, flat_logprobs=True,
                                                detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY))
        self._scores[name] = None
        while self._scores[name] is None:
            self._step()
        flat = self._scores.pop(name).prompt_logprobs
        begin = np.asarray(flat.start_indices, np.int64)[1:]
        if np.asarray(flat.token_ids, np.int64)[begin].tolist() != np.asarray(tokens, np.int64)[1:].tolist():
            raise RuntimeError("vLLM scored other tokens than those that it was given")
        return np.asarray(flat.logprobs, np.float32)[begin]

    def sleep(self) -> None:
        """Between sampling and the next weights: vLLM's weights go to the host's memory and its cache is dropped. Nothing
        where it was not made with `sleeps`. Raises RuntimeError with turns under way."""
        if not self.sleeps or self.asleep:
            return
        if self._asked:
            raise RuntimeError(f"{len(self._asked)} turns are under way; the engine sleeps between samplings only")
        self._llm.sleep(level=1)
        self.asleep = True

    def wake(self) -> None:
        """Take the device's memory again, before new weights come."""
        if self.asleep:
            self._llm.wake_up()
            self.asleep = False

    def close(self) -> None:
        """Its engine process ends and its memory is free; may be called twice."""
        if self._llm is not None:
            self._llm, core = None, self._engine.engine_core
            core.shutdown()
            self._writing.clear()
            if self._guard is not None:
                self._guard.kill()
                self._guard.wait()
