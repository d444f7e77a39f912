"""Which engine writes the student's tokens: `sampling.engine` of a configuration, made.

An engine of one's own is `package.module:factory`, called as factory(config, model=…, number=…, of=…): it returns a
StreamingEngine (mopd/sampling/base.py) that may have besides

    score(tokens)                 log-probabilities float32 [T - 1] of a text: weights that it is handed are proved with it
    takes = "folder", layout      weights reach it by load_folder(folder, version), see mopd/sampling/sync.py
    tells_ends                    generate takes `ended`
    max_batch, kv_tokens, max_positions, stats, close()
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mopd.config_engine import ENGINES, longest_context
from mopd.counts import summed
from mopd.sampling.base import SamplingOptions, StreamingEngine


def make_engine(config: Any, model: Any = None, *, folder: str | Path = "", number: int = 0, of: int = 1,
                max_batch: int | None = None) -> StreamingEngine:
    """The engine that `config.sampling` names, with the student's weights as they were at its start (version 0).

    model      the loaded student, where the caller has it; only an engine of this process reads it
    folder     another model than config.student.model
    number, of which of several engines this is (a sampler, a rank): servers are shared out among them
    max_batch  turns under way at once; none: train.sampling_batch

    Raises ValueError for what is wrong with the configuration, OSError for a model that cannot be read, ImportError for an
    engine that cannot be imported, and EngineUnreachable where servers do not answer for sampling.engine_wait_s.
    """
    sampling, source = config.sampling, str(folder or config.student.model)
    batch = max_batch or config.train.sampling_batch
    if sampling.engine == "hf":
        return _hf(config, model, source, batch)
    if sampling.engine not in ENGINES:
        return check_engine(factory(sampling.engine)(config, model=model, number=number, of=of), sampling.engine)
    details = student_config(config, source)
    if sampling.engine == "vllm":
        return _vllm(config, details, source, batch)
    return _server(config, details, batch, number, of)


def _hf(config: Any, model: Any, source: str, batch: int) -> StreamingEngine:
    from mopd.learner.model import load_model
    from mopd.sampling.hf import HFEngine

    device = config.placement.sampling.device or (next(model.parameters()).device if model is not None else default_device())
    if model is None:
        model = load_model(source, dtype=config.deepspeed.dtype, attention=config.student.attention,
                           trust_remote_code=config.student.trust_remote_code)
    return HFEngine(model, device=device, max_batch=batch, report_experts=config.train.routing_replay)


def default_device() -> str:
    """Where an engine of this process lives that nobody gave a place."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _vllm(config: Any, details: Any, source: str, batch: int) -> StreamingEngine:
    from mopd.sampling.vllm_local import VLLMEngine

    given = config.sampling.vllm_options
    return VLLMEngine(source, dtype=given.dtype or config.deepspeed.dtype, max_batch=batch,
                      max_model_len=context_tokens(config, details), tensor_parallel=given.tensor_parallel,
                      pipeline_parallel=given.pipeline_parallel, sleeps=given.sleep,
                      memory_share=given.gpu_memory_utilization,
                      cache_gib=given.cache_gib, trust_remote_code=config.student.trust_remote_code,
                      report_experts=config.train.routing_replay, more=given.arguments)


def _server(config: Any, details: Any, batch: int, number: int, of: int) -> StreamingEngine:
    from mopd.sampling.vllm_fleet import VLLMFleet

    sampling = config.sampling
    urls = sampling.urls[number::of]
    if not urls:
        raise ValueError(f"sampling.urls: {len(sampling.urls)} servers for {of} processes that sample, and each server takes "
                         "its weights from one of them; name more servers, or start fewer processes")
    fleet = VLLMFleet(urls, vocabulary=rows_of(details), served_model=sampling.served_model,
                      api_key_env=sampling.api_key_env, timeout_s=sampling.engine_timeout_s,
                      retries=sampling.engine_retries, max_batch=batch, patience_s=sampling.engine_wait_s)
    try:
        return fleet.connect()
    except BaseException:
        fleet.close()
        raise


def factory(name: str) -> Callable[..., Any]:
    """What `package.module:factory` names. Raises ValueError where there is none."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"sampling.engine: '{name}': cannot import {module_name!r} ({error}); is its package "
                         "installed?") from error
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"sampling.engine: '{name}': module {module_name!r} has no {attribute!r} that can be called")
    return found


def check_engine(engine: Any, name: str) -> StreamingEngine:
    """The engine; raises ValueError naming what it lacks."""
    lacks = [method for method in ("generate", "submit", "poll", "abort", "end_sessions", "load_weights", "under_way",
                                   "version") if not hasattr(engine, method)]
    if lacks:
        raise ValueError(f"sampling.engine: '{name}' made a {type(engine).__name__}, which lacks {', '.join(lacks)} of a "
                         "StreamingEngine (mopd/sampling/base.py)")
    return engine


def engine_faults(stats: Mapping[str, Any]) -> dict[str, int]:
    """Reason → how often an engine met it, also where another try mended it, of its `stats`: `faults` of servers,
    `troubles`, turns that were not written, and `unused_tokens`, written behind a stop string."""
    faults, troubles = dict(stats.get("faults", {})), dict(stats.get("troubles", {}))  # other threads go on counting
    unused = stats.get("unused_tokens", 0)
    behind = {"tokens behind a stop string": unused} if unused else {}
    return summed([faults, behind, {f"turns not written: {reason}": number for reason, number in troubles.items()}])


def student_config(config: Any, source: str = "") -> Any:
    """The student's model configuration (of Transformers), without its weights."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source or config.student.model, trust_remote_code=config.student.trust_remote_code)


def rows_of(details: Any) -> int:
    """Rows of the model's output."""
    return int(details.get_text_config().vocab_size)


def context_tokens(config: Any, details: Any) -> int:
    """Tokens of the longest context that vLLM is started for: as configured, else what the domains need."""
    given = config.sampling.vllm_options.max_model_len
    positions = getattr(details.get_text_config(), "max_position_embeddings", None) or 2**31
    return given or min(longest_context(config), positions)


def engine_known(config: Any) -> None:
    """Raise ValueError where the engine could not be made here: a plugin that cannot be imported, vLLM that is missing."""
    engine = config.sampling.engine
    if engine not in ENGINES:
        factory(engine)
    elif engine == "vllm":
        from mopd.sampling.vllm_presence import need_vllm

        need_vllm("sampling.engine=vllm")


def describe_engine(config: Any) -> dict[str, Any]:
    """What `mopd check` says of the engine: {"engine", "where", "can"}; servers are asked, nothing is loaded. Raises
    ValueError for what does not fit, EngineUnreachable where no server answers."""
    engine_known(config)
    sampling, train = config.sampling, config.train
    options = SamplingOptions(train.temperature, train.top_p, train.top_k)
    if sampling.engine == "hf":
        can = ["candidate sets of any top-p and top-k", "routed experts" if train.routing_replay else ""]
        return _described("hf", "this process" + (f", {device}" if (device := config.placement.sampling.device) else ""), can)
    if sampling.engine not in ENGINES:
        return _described(sampling.engine, "an engine of your own", [])
    from mopd.sampling.vllm_turns import check_vllm_options, told_of

    check_vllm_options(options)
    details = student_config(config)
    rows = rows_of(details)
    if sampling.engine == "vllm":
        from mopd.sampling.vllm_presence import need_vllm

        version = need_vllm("sampling.engine=vllm")
        told = told_of(options, -1, rows)
        return _described(f"vllm {version}", "this process", [
            f"contexts of {context_tokens(config, details)} tokens", _say_told(told)])
    from mopd.sampling.vllm_fleet import VLLMFleet

    fleet = VLLMFleet(sampling.urls, vocabulary=rows, served_model=sampling.served_model, api_key_env=sampling.api_key_env,
                      timeout_s=sampling.engine_timeout_s, patience_s=0)
    try:
        fleet.connect()
        told = told_of(options, fleet.max_logprobs, rows)
        longest = longest_context(config)
        if fleet.max_positions is not None and fleet.max_positions < min(longest, context_tokens(config, details)):
            raise ValueError(f"sampling.urls: the servers read {fleet.max_positions} tokens, and a domain's context with a "
                             f"turn may have {longest}; start them with --max-model-len {longest}, as `mopd serve` does")
        where = ", ".join(f"{url} {said}" for url, said in fleet.servers().items())
        return _described("server", where, [f"contexts of {fleet.max_positions} tokens", _say_told(told)])
    finally:
        fleet.close()


def _described(engine: str, where: str, can: list[str]) -> dict[str, Any]:
    return {"engine": engine, "where": where, "can": [one for one in can if one]}


def _say_told(told: int) -> str:
    return f"candidate sets from the {told} likeliest ids of each token" if told else "all ids are candidates"
