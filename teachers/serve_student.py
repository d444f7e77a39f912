"""`mopd serve`: what a vLLM server of the student is started with, so that it samples for a run and takes its weights.

teachers/serve.py starts and ends it.
"""

from __future__ import annotations

import dataclasses
import json
from urllib.parse import urlsplit

from mopd.sampling.engines import context_tokens, student_config
from mopd.sampling.vllm_presence import positions_of, vllm_runs_on_cpu, whole_prompts
from mopd.sampling.vllm_turns import TIES
from mopd.sampling.vllm_weights import serve_arguments, serve_environment
from teachers.serve import ServeOptions

NAME = "student"


def for_student(options: ServeOptions, *, transfer: str = "file") -> ServeOptions:
    """The same server with what sampling needs: prefixes are cached, and weights come by `sampling.weight_transfer`."""
    lines = ["sampling:", "  engine: server", f"  urls: [{json.dumps(options.url)}]", f"  served_model: {options.name}"]
    if options.api_key_env:
        lines.append(f"  api_key_env: {options.api_key_env}")
    if transfer != "file":
        lines.append(f"  weight_transfer: {transfer}")
    whole: tuple[str, ...] = ()
    tokens = options.batch_tokens
    if vllm_runs_on_cpu():  # see whole_prompts
        whole = ("--no-enable-chunked-prefill",)
        tokens = tokens or whole_prompts(options.max_model_len or positions_of(options.model))["max_num_batched_tokens"]
    return dataclasses.replace(
        options, extra=("--enable-prefix-caching", *whole, *serve_arguments(transfer), *options.extra), batch_tokens=tokens,
        variables=tuple(serve_environment(transfer).items()), lines="\n".join(lines))


def student_options(source: str, *, config: object | None = None, number: int = 0, **changes: object) -> ServeOptions:
    """A server of the student of `config` (its server `number` of sampling.urls), or of a model; `changes` that are not
    None win."""
    values: dict[str, object] = {"name": NAME, "max_logprobs": 20}
    transfer = "file"
    if config is not None:
        sampling, train = config.sampling, config.train
        transfer = sampling.weight_transfer
        vllm = sampling.vllm_options
        urls = sampling.urls
        values |= {"name": sampling.served_model or NAME, "dtype": vllm.dtype or config.deepspeed.dtype,
                   "api_key_env": sampling.api_key_env, "trust_remote_code": config.student.trust_remote_code,
                   "tensor_parallel": vllm.tensor_parallel, "pipeline_parallel": vllm.pipeline_parallel,
                   "max_model_len": context_tokens(config, student_config(config)),
                   "memory_share": vllm.gpu_memory_utilization, "cache_gib": vllm.cache_gib, "seed": config.seed,
                   "max_logprobs": max(20, train.top_k + max(TIES, train.top_k)) if train.top_k else 20}
        if number < len(urls):
            values["port"] = urlsplit(urls[number]).port or 8000
        source = config.student.model
    values |= {key: value for key, value in changes.items() if value is not None}
    return for_student(ServeOptions(source, **values), transfer=transfer)
