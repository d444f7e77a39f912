"""The process that samples beside the learner: an engine, environments, the prefix store, and the continuous loop.

Started by `sampler.Sampler`, which holds the other end of the pipe. Its main thread samples; one thread listens, one says
every second that all is well. It ends with the process that started it, whatever ended that one.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mopd.processes import kill_marked

if TYPE_CHECKING:
    from mopd.config import Config
    from mopd.sampling.continuous import ContinuousLoop
    from prefix_store import PrefixStore

MARK = "MOPD_SAMPLER"
# environment variable that everything a sampler starts inherits: by its value they are found when the sampler is gone
BEAT_S = 1.0
TURN_S = 0.05
# the loop looks for messages at least so often
IDLE_S = 0.5
ENGINE_TRY_S, ENGINE_PAUSE_S = 5.0, 1.0
# servers that do not answer are asked again for so long, then the parent is told and after the pause it is tried again
FINAL = (ValueError, TypeError, ImportError, FileNotFoundError, NotADirectoryError, PermissionError)
# what a start can fail with that no other try mends
NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT",
            "TORCHELASTIC_RUN_ID", "MOPD_PROGRESS")
# variables of the parent's job: a sampler is none of its ranks, and an engine would take it for one
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class SamplerSpec:
    """What a sampler is made of.

    config         of the run, checked
    number         of this sampler, from 0
    log            file that gets what it prints
    weights        folder of published weights to begin with, of `version`; None: student.model as it is
    store_version  at which the prefix store is read; None: the newest
    """

    config: Config
    number: int
    log: Path
    weights: Path | None = None
    version: int = 0
    store_version: str | int | None = None

    @property
    def threads(self) -> int:
        """CPU threads of this sampler: sampling.sampler_threads, or with 0 an even share of the cores beside the learner."""
        given = self.config.sampling.sampler_threads
        return given or max(1, len(os.sched_getaffinity(0)) // (self.config.sampling.samplers + 1))


# From the parent: Give, Cancel, Weights and End; to the parent: Hello, Beat, Told and Trouble.


@dataclasses.dataclass(frozen=True)
class Give:
    works: tuple


@dataclasses.dataclass(frozen=True)
class Cancel:
    works: tuple


@dataclasses.dataclass(frozen=True)
class Weights:
    folder: Path
    version: int


@dataclasses.dataclass(frozen=True)
class End:
    pass


@dataclasses.dataclass(frozen=True)
class Hello:
    """The sampler listens."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """A sign of life: what the main thread is `doing`, and for how many seconds it has said nothing of it."""

    doing: str
    silent_s: float
    stats: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Told:
    """News of mopd.sampling.work."""

    news: tuple


@dataclasses.dataclass(frozen=True)
class Trouble:
    """Why the sampler ends; `final`: another one would end alike."""

    words: str
    final: bool


def main(connection: Connection, spec: SamplerSpec, parent: int, mark: str) -> None:
    """Sample what comes over the pipe until it says End or closes. The target of the process."""
    with contextlib.suppress(OSError):
        os.setsid()  # its own group, and no Ctrl-C from the parent's terminal
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    for name in NOT_OURS:
        os.environ.pop(name, None)
    os.environ[MARK] = mark
    os.environ["OMP_NUM_THREADS"] = str(spec.threads)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for number in (signal.SIGTERM, signal.SIGINT):
        # A job that is asked to end finishes its step, for which it needs its samplers; the parent ends them. (A handler,
        # since processes that are started here would inherit that a signal is ignored.)
        signal.signal(number, _wait_for_the_parent)
    # As in a process that was not spawned: the locks that libraries make (numcodecs, tqdm) are then without a name, and a
    # process that is killed leaves none behind.
    multiprocessing.set_start_method("fork", force=True)
    _print_to(spec.log)
    _Sampler(connection, spec, parent).run()


def _wait_for_the_parent(*_: object) -> None:
    """What a sampler does about SIGTERM and SIGINT: nothing."""


def _print_to(log: Path) -> None:
    """Standard output and error go to the end of the file, tracebacks of crashes and of SIGUSR1 too."""
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(file, stream)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)


class _Sampler:
    def __init__(self, connection: Connection, spec: SamplerSpec, parent: int):
        self.connection, self.spec, self.parent = connection, spec, parent
        self.inbox: queue.SimpleQueue = queue.SimpleQueue()
        self.sending = threading.Lock()
        self.doing, self.since = "starting", time.monotonic()
        self.version = spec.version
        self.loop: ContinuousLoop | None = None
        self.engine: Any = None
        self.unreachable: tuple[float, str] | None = None  # since when the engine's servers do not answer, and what was met
        self.domains: dict[str, Any] = {}

    def run(self) -> None:
        """Never returns."""
        threading.Thread(target=self._listen, daemon=True, name="listen").start()
        threading.Thread(target=self._beat, daemon=True, name="beat").start()
        code, ready = 0, False
        try:
            self._send(Hello())
            with contextlib.ExitStack() as parts:
                self._build(parts)
                ready = True
                self._serve()
                self._say("closing")
        except Exception as error:  # noqa: BLE001 - whatever it is, the parent is told
            traceback.print_exc()
            code = 1
            self._send(Trouble(*self._words(error, ready)))
        sys.stdout.flush()
        # What hangs in a thread or in a library's own end must not keep the process.
        os._exit(code)

    def _words(self, error: Exception, ready: bool) -> tuple[str, bool]:
        """What the parent is told of an error, and whether it is final."""
        from mopd.sampling.weight_folder import WeightsDiffer

        if isinstance(error, WeightsDiffer):
            return f"has other weights than the learner: {error}", True
        if not ready:
            return f"cannot start: {error}", isinstance(error, FINAL)
        return f"ended: {type(error).__name__}: {error}", False

    # What it stands on

    def _build(self, parts: contextlib.ExitStack) -> None:
        """What is quick to find wrong comes before what is slow to load."""
        started = time.monotonic()
        from mopd.config import resume_turns
        from mopd.sampling.continuous import ContinuousLoop
        from mopd.sampling.work import Ready, TookWeights
        from mopd.sampling.works import Works

        config, train = self.spec.config, self.spec.config.train
        self._open_domains(parts)
        store = self._open_store(parts)
        self._say("importing libraries")
        import torch

        from mopd.learner.model import check_model_source
        from mopd.sampling.engines import make_engine
        from mopd.sampling.rendering import ChatRenderer, load_tokenizer
        from mopd.sampling.weight_folder import take

        torch.set_num_threads(self.spec.threads)
        self._say("loading the student")
        check_model_source(config.student.model)
        renderer = ChatRenderer(load_tokenizer(config.student.model, trust_remote_code=config.student.trust_remote_code),
                                stop_strings=config.sampling.stop_strings)
        # How long a run waits for servers is the run's business: here they are tried again until the parent ends this.
        patient = dataclasses.replace(config, sampling=dataclasses.replace(
            config.sampling, engine_wait_s=min(config.sampling.engine_wait_s, ENGINE_TRY_S)))
        self.engine = self._patiently(lambda: make_engine(patient, number=self.spec.number, of=config.sampling.samplers))
        parts.callback(getattr(self.engine, "close", lambda: None))
        if self.spec.weights is not None:
            taken = self._patiently(lambda: take(self.engine, self.spec.weights, self.spec.version))
            self._tell([TookWeights(taken.version, taken.seconds, taken.gap)])
        model = getattr(self.engine, "model", None)
        works = Works(
            domains=self.domains, store=store, renderer=renderer, seed=config.seed, student=train.name,
            fingerprint=renderer.fingerprint(getattr(model, "config", None)), temperature=train.temperature,
            top_p=train.top_p, top_k=train.top_k, resume_turns={name: resume_turns(config, name) for name in config.domains})
        self.loop = ContinuousLoop(self.engine, works, engine_wait=config.sampling.engine_wait_s)
        parts.callback(self.loop.close)
        slots = int(getattr(self.engine, "slots", 0) or getattr(self.engine, "max_batch", 0) or train.sampling_batch)
        longest = max(domain.max_context_tokens for domain in config.domains.values())
        self._say("sampling")
        self._tell([Ready(slots, float(getattr(self.engine, "kv_tokens", 0) or slots * longest),
                          time.monotonic() - started)])
        print(f"sampler {self.spec.number} is ready after {time.monotonic() - started:.1f} s: {slots} sequences at a time, "
              f"{self.spec.threads} threads", flush=True)

    def _open_domains(self, parts: contextlib.ExitStack) -> None:
        from mopd.config import ConfigError, stream_shares
        from mopd.domains import Domain
        from mopd.environments.base import EnvironmentFailure

        config = self.spec.config
        for name, given in config.domains.items():
            self._say(f"starting environments of {name}")
            try:
                domain = self.domains[name] = Domain(name, given)
                parts.callback(domain.close)
                if stream_shares(config, name)["rollout"] > 0:
                    domain.tasks("train")
                    domain.probe()
            except (ValueError, ImportError) as error:
                raise ConfigError(f"domains.{name}.environment: {error}") from error
            except EnvironmentFailure as failure:
                raise RuntimeError(f"an environment of domain {name!r} did not start: {failure}") from failure

    def _open_store(self, parts: contextlib.ExitStack) -> PrefixStore | None:
        """The prefix store, where a stream of this run goes on from stored points."""
        from mopd.config import stream_shares
        from prefix_store import PrefixStore

        config = self.spec.config
        shares = [share for name in config.domains for stream, share in stream_shares(config, name).items()
                  if stream.endswith("_prefix")]
        if not any(share > 0 for share in shares):
            return None
        self._say("opening the prefix store")
        store = PrefixStore.open(config.store, version=self.spec.store_version)
        parts.callback(store.close)
        return store

    # The loop

    def _serve(self) -> None:
        while self._obey():
            self.since = time.monotonic()
            if self.loop.in_flight:
                self._tell(self.loop.turn(TURN_S))

    def _obey(self) -> bool:
        """Do what has been asked; with nothing in flight wait a while for it. False: end."""
        newest: Weights | None = None
        wait = IDLE_S if not self.loop.in_flight else 0.0
        while True:
            try:
                message = self.inbox.get(timeout=wait) if wait else self.inbox.get_nowait()
            except queue.Empty:
                break
            wait = 0.0
            if isinstance(message, End):
                return False
            if isinstance(message, Weights):
                newest = message
            elif isinstance(message, Give):
                self.loop.give(message.works)
            else:
                self.loop.cancel(message.works)
        if newest is not None:
            self._take(newest)
        return True

    def _take(self, weights: Weights) -> None:
        from mopd.sampling.weight_folder import take
        from mopd.sampling.work import TookWeights

        self._say(f"taking the weights of version {weights.version}")
        taken = self._patiently(lambda: take(self.engine, weights.folder, weights.version))
        self.version = weights.version
        self._tell([TookWeights(taken.version, taken.seconds, taken.gap)])
        self._say("sampling")

    def _patiently(self, act: Callable[[], Any]) -> Any:
        """What `act` returns, tried again while no server of the engine answers. That is no standing still."""
        from mopd.sampling.base import EngineUnreachable

        while True:
            try:
                found = act()
            except EngineUnreachable as error:
                now = time.monotonic()
                self.unreachable, self.since = ((self.unreachable or (now,))[0], str(error)), now
                time.sleep(ENGINE_PAUSE_S)
            else:
                self.unreachable = None
                return found

    # The pipe

    def _say(self, doing: str) -> None:
        self.doing, self.since = doing, time.monotonic()

    def _tell(self, news: list) -> None:
        if news:
            self._send(Told(tuple(news)))

    def _send(self, message: Any) -> None:
        with self.sending, contextlib.suppress(OSError):  # the parent is gone, which `_listen` sees too
            self.connection.send(message)

    def _listen(self) -> None:
        try:
            while True:
                self.inbox.put(self.connection.recv())
        except (EOFError, OSError):
            self._orphaned()

    def _beat(self) -> None:
        interval = min(BEAT_S, self.spec.config.sampling.sampler_timeout / 4)
        while True:
            time.sleep(interval)
            if os.getppid() != self.parent:
                self._orphaned()
            silent = time.monotonic() - self.since if self.loop is not None else 0.0
            try:
                stats = self._stats()
            except Exception as error:  # noqa: BLE001 - an engine whose numbers cannot be had still lives
                stats = {"stats_error": f"{type(error).__name__}: {error}"}
            self._send(Beat(self.doing, silent, stats))

    def _stats(self) -> dict[str, Any]:
        # Copies: they go on counting while these are sent.
        stats = {name: dict(value) if isinstance(value, dict) else value
                 for name, value in (getattr(self.engine, "stats", None) or {}).items()}
        if callable(servers := getattr(self.engine, "servers", None)):
            stats["servers"] = servers()
        if (down := self.unreachable) is not None:
            stats["engine_trouble"] = {"since_s": time.monotonic() - down[0], "words": down[1]}
        if self.loop is not None:
            stats |= {"busy_seconds": self.loop.busy_seconds, "counts": dict(self.loop.counts),
                      "engine_trouble": stats.get("engine_trouble") or self.loop.engine_trouble}
            stats["environments"] = {name: domain.counts() for name, domain in list(self.domains.items())}
        return stats

    def _orphaned(self) -> None:
        """The parent is gone: end with everything that was started here."""
        kill_marked(MARK, os.environ[MARK], spare=os.getpid())
        os._exit(1)
