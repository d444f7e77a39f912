"""The configuration of one teacher, and which of its keys go with which back end. Nothing here imports torch."""

from __future__ import annotations

import dataclasses
import re
from urllib.parse import urlsplit

BACKENDS = ("hf", "vllm", "server")
DTYPES = ("", "float32", "bfloat16", "float16")


@dataclasses.dataclass
class TeacherConfig:
    """One teacher and where it answers: in this process, in vLLM in this process, or at servers."""

    model: str = ""  # Hugging Face folder or id; of a server what it serves, where that can be read here
    trust_remote_code: bool = False
    backend: str = "hf"  # hf | vllm | server
    revision: str = ""  # of a hub id; of a folder the first digits of its fingerprint
    dtype: str = ""  # none: deepspeed.dtype; with vLLM the checkpoint's own
    offload: bool = False  # hf: weights leave the device between uses
    shard: bool = False  # hf: weights split over the ranks of a job
    urls: list[str] = dataclasses.field(default_factory=list)  # server: any number, http://host:port
    served_model: str = ""  # server: the name under which it serves the model; none: its only one
    api_key_env: str = ""  # server: name of the environment variable that holds its key
    tensor_parallel: int = 1  # vllm
    pipeline_parallel: int = 1  # vllm
    timeout_s: float = 120.0  # server: of one request
    retries: int = 4  # server: of one request, before the teacher counts as down
    concurrency: int = 16  # server: requests under way at once
    max_request_tokens: int = 65536  # server, vllm: tokens sent together
    cross_tokenizer: bool = False  # it may have another tokenizer than the student: scores by spans of text
    probe_against_model: bool = False  # server, vllm: compare its probes with `model` loaded in this process
    temperature: float | None = None  # when it plays into the store; none: collect.temperature
    max_tokens: int | None = None  # of a turn that it plays; none: the domain's max_turn_tokens


# Key -> the back ends that read it; keys that are not here are read by all.
READ_BY = {
    "offload": ("hf",), "shard": ("hf",), "urls": ("server",), "served_model": ("server",),
    "api_key_env": ("server",), "tensor_parallel": ("vllm",), "pipeline_parallel": ("vllm",), "timeout_s": ("server",),
    "retries": ("server",), "concurrency": ("server",), "max_request_tokens": ("vllm", "server"),
    "probe_against_model": ("vllm", "server"),
}


def teacher_errors(name: str, teacher: TeacherConfig) -> list[str]:
    """Everything wrong with one teacher's section, each with its key."""
    key, errors = f"teachers.{name}", []
    if teacher.backend not in BACKENDS:
        return [f"{key}.backend: '{teacher.backend}' is not one of {', '.join(BACKENDS)}"]
    if not teacher.model and teacher.backend != "server":
        errors.append(f"{key}.model: missing; name a Hugging Face folder or id")
    if teacher.backend == "server" and not teacher.urls:
        errors.append(f"{key}.urls: missing; name the address of one server or several, such as [http://127.0.0.1:8000] "
                      "(`mopd teacher serve` starts one)")
    for number, url in enumerate(teacher.urls):
        errors += url_errors(f"{key}.urls[{number}]", url)
    if len(set(teacher.urls)) < len(teacher.urls):
        errors.append(f"{key}.urls: an address stands there twice; name every server once")
    defaults = TeacherConfig()
    for field, backends in READ_BY.items():
        if teacher.backend not in backends and getattr(teacher, field) != getattr(defaults, field):
            errors.append(f"{key}.{field}: the back end '{teacher.backend}' does not read it ({', '.join(backends)} would); "
                          f"leave it out, or set {key}.backend")
    if teacher.dtype not in DTYPES:
        errors.append(f"{key}.dtype: '{teacher.dtype}' is not one of {', '.join(DTYPES[1:])}")
    if teacher.shard and teacher.cross_tokenizer:
        errors.append(f"{key}.shard: a teacher under {key}.cross_tokenizer answers each rank by itself, but ranks that share "
                      "its weights must ask together; leave one of the two out")
    if teacher.probe_against_model and not teacher.model and teacher.backend == "server":
        errors.append(f"{key}.probe_against_model: needs {key}.model, the folder that the server serves")
    if teacher.probe_against_model and teacher.cross_tokenizer:
        errors.append(f"{key}.probe_against_model: its probes are in the student's tokens, which {key}.model does not know "
                      f"under {key}.cross_tokenizer; leave one of the two out")
    if teacher.api_key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", teacher.api_key_env):
        errors.append(f"{key}.api_key_env: takes the name of an environment variable, never the key itself")
    if teacher.timeout_s <= 0:
        errors.append(f"{key}.timeout_s: {teacher.timeout_s} must be positive")
    if teacher.max_tokens is not None and teacher.max_tokens < 1:
        errors.append(f"{key}.max_tokens: must be at least 1, or null for the domain's max_turn_tokens")
    return errors


def url_errors(key: str, url: str) -> list[str]:
    """What is wrong with the address of a server that stands at `key`."""
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment
        secret = parts.username is not None or parts.password is not None
        _ = parts.port
    except ValueError:
        wrong, secret = True, "@" in url
    if secret:  # not repeated: it may hold a key
        return [f"{key}: an address holds no user name or key; put the key into an environment variable and name that in "
                "api_key_env"]
    return [f"{key}: '{url}' is not an address such as http://127.0.0.1:8000"] if wrong else []
