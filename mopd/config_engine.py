"""The configuration of what writes the student's tokens: which engine, where, vLLM's options. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from mopd.config_teachers import DTYPES, url_errors

ENGINES = ("hf", "vllm", "server")
LOWEST_TEMPERATURE = 0.01
# vLLM raises temperatures between 0 and this one without a word.


@dataclasses.dataclass
class VLLMOptionsConfig:
    """What vLLM is started with, in the process that samples or by `mopd serve`."""

    dtype: str = ""  # none: deepspeed.dtype
    max_model_len: int | None = None  # tokens of the longest context with its turn; none: the longest that a domain may need
    gpu_memory_utilization: float = 0.4  # share of a GPU's memory; the learner may need the rest
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    cache_gib: int = 1  # memory of its cache, without a GPU
    sleep: bool = False  # engine vllm on a GPU: weights and cache leave the device while the student trains
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)  # further arguments of vllm.LLM, which win


def is_plugin(engine: str) -> bool:
    """Whether `engine` is a dotted path `package.module:factory`."""
    return re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", engine) is not None


def engine_errors(config: Any) -> list[str]:
    """What is wrong with the engine of a Config; each entry starts with its key."""
    sampling, errors = config.sampling, []
    engine, vllm = sampling.engine, sampling.vllm_options
    if engine not in ENGINES and not is_plugin(engine):
        return [f"sampling.engine: '{engine}' is not one of {', '.join(ENGINES)}, nor package.module:factory"]
    if engine == "server" and not sampling.urls:
        errors.append("sampling.urls: missing; name the address of one server or several, such as [http://127.0.0.1:8000] "
                      "(`mopd serve` starts one)")
    for number, url in enumerate(sampling.urls):
        errors += url_errors(f"sampling.urls[{number}]", url)
    if len(set(sampling.urls)) < len(sampling.urls):
        errors.append("sampling.urls: an address stands there twice; name every server once")
    if engine == "server" and sampling.overlap > 0 and sampling.samplers > len(sampling.urls) > 0:
        errors.append(f"sampling.samplers: {sampling.samplers} samplers share {len(sampling.urls)} servers, and each server "
                      "takes its weights from one of them; lower it, or name more sampling.urls")
    for key, value in (("urls", []), ("served_model", ""), ("api_key_env", "")):
        if engine in ("hf", "vllm") and getattr(sampling, key) != value:
            errors.append(f"sampling.{key}: the engine '{engine}' does not read it; leave it out, or set "
                          "sampling.engine=server")
    if engine == "hf" and vllm != VLLMOptionsConfig():
        errors.append("sampling.vllm_options: the engine 'hf' does not read them; leave them out, or set sampling.engine")
    if vllm.sleep and (engine != "vllm" or sampling.overlap > 0):
        why = "samples while the student trains (sampling.overlap)" if engine == "vllm" else \
            "has devices of its own" if engine == "server" else "has nothing of vLLM on the device"
        errors.append(f"sampling.vllm_options.sleep: the engine '{engine}' {why}, so nothing could sleep; leave it out")
    if sampling.engine_options and engine in ENGINES:
        errors.append(f"sampling.engine_options: are for an engine of your own; '{engine}' does not read them")
    if sampling.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", sampling.api_key_env):
        errors.append("sampling.api_key_env: takes the name of an environment variable, never the key itself")
    if vllm.dtype not in DTYPES:
        errors.append(f"sampling.vllm_options.dtype: '{vllm.dtype}' is not one of {', '.join(DTYPES[1:])}")
    for key, value, least in (("engine_timeout_s", sampling.engine_timeout_s, 1),
                              ("engine_wait_s", sampling.engine_wait_s, 0),
                              ("engine_retries", sampling.engine_retries, 0),
                              ("vllm_options.tensor_parallel", vllm.tensor_parallel, 1),
                              ("vllm_options.pipeline_parallel", vllm.pipeline_parallel, 1),
                              ("vllm_options.cache_gib", vllm.cache_gib, 1),
                              ("vllm_options.max_model_len", vllm.max_model_len, 2)):
        if value is not None and value < least:
            errors.append(f"sampling.{key}: {value} must be at least {least}")
    if not 0 < vllm.gpu_memory_utilization <= 1:
        errors.append(f"sampling.vllm_options.gpu_memory_utilization: {vllm.gpu_memory_utilization} is not above 0 and at "
                      "most 1")
    return errors + (_vllm_errors(config) if engine in ("vllm", "server") else [])


def _vllm_errors(config: Any) -> list[str]:
    """What vLLM cannot give exactly."""
    sampling, train, errors = config.sampling, config.train, []
    if 0 < train.temperature < LOWEST_TEMPERATURE:
        errors.append(f"train.temperature: {train.temperature:g}; vLLM samples at 0 (greedy) or from {LOWEST_TEMPERATURE} on")
    if train.top_p < 1 and not train.top_k and sampling.engine == "server":
        errors.append(f"train.top_p: which ids top-p {train.top_p:g} leaves is known only where the engine tells of all ids "
                      "of the vocabulary, and a server tells of --max-logprobs; set train.top_k besides, take train.top_p=1, "
                      "or sampling.engine=hf")
    if train.routing_replay and sampling.engine == "server":
        errors.append("train.routing_replay: servers are not asked which experts they chose; take sampling.engine=hf (or "
                      "vllm beside a GPU), or train.routing_replay=false")
    longest, given = longest_context(config), sampling.vllm_options.max_model_len
    if given is not None and given < longest:
        errors.append(f"sampling.vllm_options.max_model_len: {given} is less than the {longest} tokens that a domain's "
                      "context and a turn may have (domains.NAME.max_context_tokens, max_turn_tokens); raise it")
    return errors


def longest_context(config: Any) -> int:
    """Tokens of the longest context that a domain of the run may have, with a turn behind it."""
    return max((domain.max_context_tokens + domain.max_turn_tokens for domain in config.domains.values()), default=1024)
