"""`mopd teacher serve`: start a vLLM server that scores for a teacher, with the right flags, and leave nothing behind.

It knows nothing about scoring; teachers/scoring/vllm_server.py asks such a server.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mopd.addresses import loopback
from mopd.progress import Progress, human_seconds
from mopd.sampling import vllm_presence
from mopd.sampling.vllm_presence import vllm_environment, vllm_runs_on_cpu
from teachers.scoring.requests import TeacherError
from teachers.scoring.turns import MODE, MODE_FLAG

# How long a server may take until it answers; a large model on a slow disk needs minutes.
START_SECONDS = 1800.0
# A server that was asked to end gets this long before it is made to; one that still loads has nothing to finish.
STOP_SECONDS, LOADING_STOP_SECONDS = 20.0, 1.0
SCORE_SECONDS = 120.0
# the first score of a server may compile what later ones reuse


def need_vllm(asked_by: str) -> str:
    """The version of vLLM; raises TeacherError naming who asked for it and how to install it."""
    try:
        return vllm_presence.need_vllm(asked_by)
    except vllm_presence.VLLMMissing as error:
        raise TeacherError(str(error)) from None


@dataclasses.dataclass(frozen=True)
class ServeOptions:
    """What a server is started with.

    model           Hugging Face folder or hub id
    name            the name under which it is served
    teacher         its id in a configuration, "" for none
    api_key_env     environment variable that holds the key, "" for no key
    max_model_len   longest context and one token; None: the model's own limit
    max_logprobs    limit of "top_k"
    batch_tokens    tokens of one forward, which bounds the memory that [tokens, vocabulary] logits take; None: vLLM's default
    cache_gib       memory of the cache, CPU build only
    memory_share    share of the GPU's memory, None: vLLM's default
    extra           further arguments, handed on as they are
    variables       environment variables of the server besides (name, value)
    lines           what to paste into a configuration; none: those of a teacher
    """

    model: str
    name: str
    teacher: str = ""
    host: str = "127.0.0.1"
    port: int = 8000
    dtype: str = ""
    api_key_env: str = ""
    trust_remote_code: bool = False
    revision: str = ""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_model_len: int | None = None
    max_logprobs: int = 20
    batch_tokens: int | None = None
    cache_gib: int = 1
    memory_share: float | None = None
    seed: int = 0
    extra: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    lines: str = ""

    @property
    def url(self) -> str:
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def command(options: ServeOptions, *, on_cpu: bool) -> list[str]:
    """The command line of the server. The key is not in it: other users of the machine can read command lines."""
    # The module, not the script `vllm`: that one looks for a distribution of this name, which the CPU build is not.
    words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", options.model,
             "--served-model-name", options.name, "--host", options.host, "--port", str(options.port),
             "--seed", str(options.seed), "--max-logprobs", str(options.max_logprobs),
             # Ids in, ids out: no position is decoded to text that nobody reads.
             "--enable-scale-out",
             # The checkpoint's own generation defaults (penalties, top-p) are for those who sample.
             "--generation-config", "vllm",
             # Of a turn that it writes the log-probabilities of the policy that wrote it; scores of given tokens stay.
             MODE_FLAG, MODE,
             "--disable-uvicorn-access-log"]
    for flag, value in (("--dtype", options.dtype), ("--max-model-len", options.max_model_len),
                        ("--max-num-batched-tokens", options.batch_tokens)):
        if value:
            words += [flag, str(value)]
    if options.revision and not Path(options.model).is_dir():
        words += ["--revision", options.revision]
    if options.trust_remote_code:
        words.append("--trust-remote-code")
    if options.tensor_parallel > 1:
        words += ["--tensor-parallel-size", str(options.tensor_parallel)]
    if options.pipeline_parallel > 1:
        words += ["--pipeline-parallel-size", str(options.pipeline_parallel)]
    if on_cpu:
        # Without it vLLM compiles all of a model's kernels with g++ at its first start, for nothing that scoring gains.
        words.append("--enforce-eager")
    if options.memory_share is not None and not on_cpu:
        words += ["--gpu-memory-utilization", str(options.memory_share)]
    return [*words, *options.extra]


def check_port(host: str, port: int) -> None:
    """Raise TeacherError where nothing can listen at host:port, before minutes are spent on loading a model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise TeacherError(f"nothing can listen at {host}:{port} ({error.strerror}); is another server running there? "
                               "Take another --port") from error


class ServerFailed(RuntimeError):
    """A server that ended before it answered, took too long, or answers and cannot score; the message says which."""


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never through a proxy of the environment


def answers(url: str) -> bool:
    """Whether a server says that it is ready there. Some say so before the engine has made its first step: see `scores`."""
    try:
        with _OPENER.open(f"{url}/health", timeout=5) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def scores(options: ServeOptions, *, seconds: float = SCORE_SECONDS) -> str:
    """Let a server score three tokens; why it cannot, "" where it can."""
    headers = {"Content-Type": "application/json"}
    if options.api_key_env:
        headers["Authorization"] = f"Bearer {os.environ[options.api_key_env]}"
    asked = json.dumps({"model": options.name, "prompt": [1, 0, 1], "max_tokens": 1, "prompt_logprobs": 0}).encode()
    try:
        with _OPENER.open(urllib.request.Request(f"{options.url}/v1/completions", asked, headers), timeout=seconds):
            return ""
    except urllib.error.HTTPError as error:
        return f"HTTP {error.code}"
    except (urllib.error.URLError, OSError) as error:
        return str(getattr(error, "reason", error))


def start(options: ServeOptions, *, log: Path | None = None) -> subprocess.Popen:
    """Start a server and return at once; its words go to `log`, or to this process's standard error.

    Raises TeacherError where vLLM is missing, the key is not set, or the port is taken."""
    need_vllm("mopd teacher serve")
    check_port(options.host, options.port)
    environment = os.environ | vllm_environment(options.cache_gib) | dict(options.variables)
    environment.pop("VLLM_API_KEY", None)
    if options.api_key_env:
        if not os.environ.get(options.api_key_env):
            raise TeacherError(f"the environment variable {options.api_key_env}, which should hold the key, is not set")
        environment["VLLM_API_KEY"] = os.environ[options.api_key_env]
    words = command(options, on_cpu=vllm_runs_on_cpu())
    with open(log, "ab") if log else contextlib.nullcontext() as out:
        # A session of its own: the engine's processes are in it too, and an interrupt at the terminal comes through us.
        return subprocess.Popen(words, env=environment, stdin=subprocess.DEVNULL, stdout=out or sys.stderr,
                                stderr=out or sys.stderr, start_new_session=True, preexec_fn=_end_with_parent)


@contextlib.contextmanager
def running(options: ServeOptions, *, log: Path | None = None, seconds: float = START_SECONDS) -> Iterator[subprocess.Popen]:
    """A server that answers, for as long as the block runs; then it and all of its processes are gone.

    Raises TeacherError as `start` does, ServerFailed where the server ends, does not answer within `seconds`, or cannot
    score."""
    process = start(options, log=log)
    grace = LOADING_STOP_SECONDS
    try:
        wait_until_ready(process, options, seconds=seconds, log=log)
        grace = STOP_SECONDS
        yield process
    finally:
        stop(process, seconds=grace)


def _end_with_parent() -> None:
    """In the new process: SIGTERM when the one that started it is gone, even by SIGKILL."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def wait_until_ready(process: subprocess.Popen, options: ServeOptions, *, seconds: float = START_SECONDS,
                     log: Path | None = None) -> None:
    """Return when the server has scored a first text, with progress; raises ServerFailed where it ends, takes longer than
    `seconds`, or cannot score."""
    words = f"its words are in {log}" if log else "its last words stand above"
    begin = time.monotonic()
    progress = Progress(f"{options.name} starts, seconds of at most", round(seconds), interval=5.0)
    while not answers(options.url):
        spent = time.monotonic() - begin
        if process.poll() is not None:
            raise ServerFailed(f"the server of {options.model} ended with status {process.returncode} before it answered; "
                               + words)
        if spent > seconds:
            raise ServerFailed(f"the server of {options.model} did not answer within {human_seconds(seconds)}; {words}")
        progress.update(min(round(spent), progress.total - 1))
        time.sleep(0.25)
    if failed := scores(options):
        raise ServerFailed(f"the server of {options.model} answers, but its first score failed ({failed}): vLLM may not run "
                           f"this model here; {words}")
    progress.update(progress.total, f"answers after {human_seconds(time.monotonic() - begin)}")


def stop(process: subprocess.Popen, *, seconds: float = STOP_SECONDS) -> None:
    """End a server and everything that it started, after `seconds` by force; nothing of it runs when this returns."""
    if process.poll() is None:
        _tell(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    # Engine processes that outlive their parent are in its group still; most of them end by themselves in a moment.
    end = time.monotonic() + seconds / 4
    while group_members(process.pid) and time.monotonic() < end:
        time.sleep(0.1)
    # Python's trackers of shared memory end when those whose memory it is are gone, and remove what they left.
    for number in group_members(process.pid, trackers=False):
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
    process.wait()
    end = time.monotonic() + 2.0
    while group_members(process.pid) and time.monotonic() < end:
        time.sleep(0.05)
    _tell(process.pid, signal.SIGKILL)
    while group_members(process.pid):
        time.sleep(0.05)


def _tell(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


def group_members(group: int, *, trackers: bool = True) -> list[int]:
    """Processes of a process group that still run; those that only wait to be reaped do not. Without `trackers` those are
    left out that remove the shared memory of others (multiprocessing.resource_tracker)."""
    import psutil

    found = []
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.info["status"] == psutil.STATUS_ZOMBIE or os.getpgid(process.pid) != group:
                continue
            if trackers or "resource_tracker" not in " ".join(_words(process)):
                found.append(process.pid)
    return found


def _words(process: object) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:  # it ended meanwhile
        return []


def config_lines(options: ServeOptions) -> str:
    """What to paste into a run's configuration."""
    if options.lines:
        return options.lines
    lines = ["teachers:", f"  {options.teacher or options.name}:", "    backend: server", f"    model: {options.model}",
             f"    urls: [{json.dumps(options.url)}]", f"    served_model: {options.name}"]
    if options.api_key_env:
        lines.append(f"    api_key_env: {options.api_key_env}")
    return "\n".join(lines)


class _AskedToEnd(Exception):
    """A signal asked us to end."""


def serve(options: ServeOptions, *, as_json: bool = False) -> int:
    """Run a server in the foreground until it ends or a signal ends it; 0 after SIGTERM, SIGHUP or an interrupt, else its own
    status. Says where it answers when it does, as text or as one line of JSON. Raises ModelNotFound for a folder that is no
    model, before vLLM needs half a minute to stumble over it, and what `running` raises."""
    from mopd.learner.model import check_model_source

    check_model_source(options.model)
    if not loopback(options.host):
        print(f"warning: {options.host} is more than this machine: whoever reaches the port can use the model"
              + ("" if options.api_key_env else "; name a key with --api-key-env")
              + ". A key guards only paths under /v1 and /inference; put a firewall or a proxy before the rest "
              "(docs/teachers.md, \"Security\")", file=sys.stderr)
    ending, grace = False, LOADING_STOP_SECONDS

    def asked(number: int, frame: object) -> None:
        nonlocal ending
        if not ending:  # a second signal must not interrupt the tidying that the first one began
            ending = True
            print(f"ending the server (at most {human_seconds(grace * 1.25 + 2)}) ...", file=sys.stderr, flush=True)
            raise _AskedToEnd

    before = {number: signal.signal(number, asked) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        with running(options) as process:
            grace = STOP_SECONDS
            if as_json:
                print(json.dumps({"url": options.url, "served_model": options.name, "pid": process.pid}), flush=True)
            else:
                print(f"ready: {options.url} serves {options.name}\n\n{config_lines(options)}\n\nEnd it with Ctrl-C.",
                      flush=True)
            status = process.wait()
            print(f"the server ended by itself with status {status}", file=sys.stderr)
            return status if status > 0 else 1
    except _AskedToEnd:
        return 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def options_from_config(config: object, teacher: str, **changes: object) -> ServeOptions:
    """A teacher of a configuration as a server; `changes` (those that are not None) win. Raises TeacherError for an unknown
    teacher or one without a model."""
    teachers = config.teachers
    if teacher not in teachers:
        raise TeacherError(f"no teacher {teacher!r} under teachers; there are {', '.join(teachers) or 'none'}")
    found = teachers[teacher]
    if not found.model:
        raise TeacherError(f"teachers.{teacher}.model: missing; name the Hugging Face folder or id that is to be served")
    first = urlsplit(found.urls[0]) if found.urls else None
    k = config.train.objective_options.get("k")
    values = {"model": found.model, "name": found.served_model or teacher, "teacher": teacher, "dtype": found.dtype,
              "api_key_env": found.api_key_env, "trust_remote_code": found.trust_remote_code, "revision": found.revision,
              "tensor_parallel": found.tensor_parallel, "pipeline_parallel": found.pipeline_parallel,
              "max_logprobs": max(20, k) if isinstance(k, int) else 20, "seed": config.seed}
    if first is not None:  # an address of another machine is not one to listen at
        values["port"] = first.port or 8000
    return ServeOptions(**values | {name: value for name, value in changes.items() if value is not None})
