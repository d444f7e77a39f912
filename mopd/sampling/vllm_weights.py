"""The student's weights into vLLM engines: one in this process, or servers over HTTP, from a published folder.

The folder holds the layout "checkpoint" (`engine.layout`), which vLLM's loaders take. mopd/sampling/vllm_worker.py does the
loading inside vLLM's workers; here is who asks for it, and the proof afterwards. Imports no vLLM.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from mopd.addresses import takes_proxy
from mopd.sampling.weight_folder import Folder, Probe, WeightFolderError, WeightsDiffer, read_folder

WORKER_EXTENSION = "mopd.sampling.vllm_worker.WeightsExtension"
FILE_BACKEND = "mopd_file"
BACKENDS = {"file": FILE_BACKEND, "nccl": "nccl", "ipc": "ipc"}
LAYOUT = "checkpoint"


def load_in_process(llm: Any, folder: str | Path) -> None:
    """Have a `vllm.LLM`, made with worker_extension_cls=WORKER_EXTENSION, take a published folder; its prefix cache is
    emptied, and requests under way are read again before they go on. Raises what the workers raise."""
    llm.collective_rpc("mopd_take_folder", args=(str(need_layout(read_folder(folder)).path),))
    if not llm.reset_prefix_cache(reset_running_requests=True):
        raise WeightFolderError("vLLM has the new weights and could not empty its cache of what the old ones computed: "
                                "nothing that it samples can be trusted. Start anew")


def serve_arguments(transfer: str = "file") -> list[str]:
    """What a server's command line needs to take weights by `sampling.weight_transfer`."""
    found = ["--weight-transfer-config", json.dumps({"backend": BACKENDS[transfer]})]
    return [*found, "--worker-extension-cls", WORKER_EXTENSION] if transfer == "file" else found


def serve_environment(transfer: str = "file") -> dict[str, str]:
    """And its environment. The routes that change weights exist in vLLM's development mode only: keep such a server off
    open networks. `ipc` over HTTP sends handles of GPU memory as pickles, which vLLM reads only where it is told to."""
    found = {"VLLM_SERVER_DEV_MODE": "1"}
    return found | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if transfer == "ipc" else found


def need_layout(folder: Folder) -> Folder:
    """The folder; raises WeightFolderError where its names are not those that vLLM's loaders know."""
    if folder.layout != LAYOUT:
        raise WeightFolderError(f"{folder.path} has the layout {folder.layout!r}, vLLM takes {LAYOUT!r}: publish it with "
                                f"layout={LAYOUT!r}")
    return folder


class ServerRefuses(RuntimeError):
    """A server did not do its part of a weight update; the message has its address and words."""


@dataclasses.dataclass(frozen=True)
class ServerTook:
    """How one server fared: `words` is empty where it has the weights, else why not. gap: the probe's difference in nats, NaN
    where there was none."""

    words: str
    seconds: float
    gap: float = math.nan


class ServerWeights:
    """Hands weights to vLLM servers (`serve_arguments`, `serve_environment`) through vLLM's weight-transfer routes.

    urls     each server's address
    headers  of every request (a key)
    timeout_s  of one request; loading a large model takes minutes
    score    (url, tokens uint32 [T]) → log-probabilities float32 [T - 1]; by default a prompt's, over /v1/completions
    `out` names the servers that do not have the newest weights and why; they are to be asked for nothing until a later `take`
    has reached them.
    """

    def __init__(self, urls: Sequence[str], *, headers: Mapping[str, str] | None = None, timeout_s: float = 600.0,
                 score: Callable[[str, np.ndarray], np.ndarray] | None = None):
        self.urls = [url.rstrip("/") for url in urls]
        self.out: dict[str, str] = {}
        # A connection of its own for each request: a step lasts longer than servers keep idle ones, and such a one breaks.
        self._clients = {url: httpx2.Client(base_url=url, headers=dict(headers or {}), trust_env=takes_proxy(url),
                                            limits=httpx2.Limits(max_keepalive_connections=0),
                                            timeout=httpx2.Timeout(timeout_s, connect=min(10.0, timeout_s)))
                         for url in self.urls}
        self._names: dict[str, str] = {}
        self._score = score or self.logprobs

    def take(self, folder: str | Path, version: int, *, keep: bool = False,
             only: Sequence[str] | None = None) -> dict[str, ServerTook]:
        """Give a published folder to all servers (or `only` some) at once and prove each by the folder's probe; returns url →
        how it fared.

        keep  requests under way wait and go on, their prompts read again; else they end where they are ("abort"), and the
              client goes on with what they have
        A server that fails is named in `out`, the others go on. Raises WeightFolderError for a folder that is not whole, and
        WeightsDiffer where a server took the weights and its probe shows others.
        """
        made, urls = need_layout(read_folder(folder)), list(only or self.urls)
        if made.version != version:
            raise WeightFolderError(f"{folder} holds version {made.version}, not {version}")
        with concurrent.futures.ThreadPoolExecutor(len(urls), thread_name_prefix="weights") as threads:
            waiting = {url: threads.submit(self._one, url, made, keep) for url in urls}
        found, differs = {}, None
        for url, future in waiting.items():
            try:
                found[url] = future.result()
                self.out.pop(url, None)
            except WeightsDiffer as error:
                differs, self.out[url] = error, str(error)
            except (ServerRefuses, httpx2.HTTPError) as error:
                words = str(error) or type(error).__name__
                found[url] = ServerTook(f"{url} did not take the weights of step {version}: {words}", math.nan)
                self.out[url] = found[url].words
        if differs is not None:
            raise differs
        return found

    def _one(self, url: str, folder: Folder, keep: bool) -> ServerTook:
        began = time.perf_counter()
        self._ask(url, "/pause", params={"mode": "keep" if keep else "abort"})
        try:
            self._ask(url, "/init_weight_transfer_engine", {"init_info": {}})
            try:
                self._ask(url, "/start_weight_update")
            except ServerRefuses:  # an update that was broken off (a client that died) is still open there
                self._ask(url, "/finish_weight_update")
                self._ask(url, "/start_weight_update")
            self._ask(url, "/update_weights", {"update_info": {"folder": str(folder.path)}})
            self._ask(url, "/finish_weight_update", {"weight_version": str(folder.version)})
            # Whatever goes on is read again: its keys and values are of the old weights.
            self._ask(url, "/reset_prefix_cache", params={"reset_running_requests": "true"})
        finally:
            self._ask(url, "/resume")
        self.check(url, folder.version)
        gap = math.nan
        if folder.probe is not None:
            gap = folder.probe.check(self._score(url, folder.probe.tokens), version=folder.version, who=url)
        return ServerTook("", time.perf_counter() - began, gap)

    def check(self, url: str, version: int) -> None:
        """Raise ServerRefuses where a server says that it has other weights than those of `version`."""
        told = self._ask(url, "/weight_info", method="GET").get("weight_version")
        if told != str(version):
            raise ServerRefuses(f"{url} says that it has the weights of step {told}, not {version}: somebody else gives it "
                                "weights, or it began anew")

    def logprobs(self, url: str, tokens: np.ndarray) -> np.ndarray:
        """float32 [T - 1]: the server's log-probability of each of `tokens` uint32 [T] but the first."""
        if url not in self._names:
            self._names[url] = self._ask(url, "/v1/models", method="GET")["data"][0]["id"]
        answer = self._ask(url, "/v1/completions", {
            "model": self._names[url], "prompt": [int(token) for token in tokens], "max_tokens": 1, "temperature": 0.0,
            "prompt_logprobs": 0})
        rows = answer["choices"][0]["prompt_logprobs"]
        own = zip(tokens[1:], rows[1:], strict=True)
        return np.array([row[str(int(token))]["logprob"] for token, row in own], np.float32)

    def _ask(self, url: str, route: str, body: dict[str, Any] | None = None, *, method: str = "POST",
             params: dict[str, str] | None = None) -> dict[str, Any]:
        answer = self._clients[url].request(method, route, json=body, params=params)
        if answer.status_code == 404:
            raise ServerRefuses(f"{url} knows no {route}: start it with VLLM_SERVER_DEV_MODE=1 and "
                                f"{' '.join(serve_arguments())}")
        if not answer.is_success:
            raise ServerRefuses(f"{route} of {url} answered {answer.status_code}: {answer.text[:300]}")
        return answer.json() if answer.content else {}

    def close(self) -> None:
        for client in self._clients.values():
            client.close()


class TransferRefused(ValueError):
    """`sampling.weight_transfer` cannot be had here; the message names the reason and what could."""


def transfer_errors(config: Any) -> list[str]:
    """Why `sampling.weight_transfer` of a configuration cannot be had on this machine; each entry starts with the key."""
    import torch

    transfer = config.sampling.weight_transfer
    return [] if transfer == "file" or torch.cuda.is_available() else [_no_gpu(transfer)]


def _no_gpu(transfer: str) -> str:
    return (f"sampling.weight_transfer: {transfer} moves weights between GPUs, and this machine has none that torch can use; "
            "take sampling.weight_transfer=file, which works anywhere")


def device_transfer(config: Any, learner: Any, ranks: Any) -> DeviceTransfer | None:
    """What `sampling.weight_transfer` names, to all of `sampling.urls`; None for `file`. Every rank must call it."""
    transfer, sampling = config.sampling.weight_transfer, config.sampling
    if transfer == "file":
        return None
    with socket.socket() as free:
        free.bind(("", 0))
        port = ranks.gather(free.getsockname()[1])[0]
    key = os.environ.get(sampling.api_key_env, "") if sampling.api_key_env else ""
    servers = ServerWeights(sampling.urls, headers={"Authorization": f"Bearer {key}"} if key else {},
                            timeout_s=sampling.engine_timeout_s)
    return DeviceTransfer(learner, servers, transfer, rank=ranks.rank,
                          master=(os.environ.get("MASTER_ADDR", "127.0.0.1"), port))


class DeviceTransfer:
    """Weights from the learner's GPUs to the servers' by vLLM's own back ends, without a file: `nccl` (a broadcast to every
    worker of every server) or `ipc` (handles of GPU memory, for servers on the learner's own GPUs). Every rank makes one and
    calls `send`. vLLM must be installed beside the learner.

    master   address and port of rank 0 that all workers of all servers reach (nccl)
    Raises TransferRefused on a machine without GPUs.
    """

    def __init__(self, learner: Any, servers: ServerWeights, transfer: str, *, rank: int,
                 master: tuple[str, int] | None = None):
        import torch

        if transfer not in ("nccl", "ipc"):
            raise ValueError(f"transfer must be nccl or ipc, got {transfer!r}")
        if not torch.cuda.is_available():
            raise TransferRefused(_no_gpu(transfer))
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        self.servers, self.client = servers, _AllServers(servers)
        if transfer == "nccl":
            if master is None:
                raise TransferRefused("sampling.weight_transfer: nccl needs an address and a port of rank 0 that all servers "
                                      "reach")
            info = NCCLTrainerInitInfo(master[0], master[1], 1 + sum(self.client.sizes), rank=rank)
        else:
            info = IPCTrainerInitInfo(rank=rank)
        self.engine = WeightTransferTrainerFactory.trainer_init(info, client=self.client, source=_source(learner))

    def send(self, version: int) -> None:
        """Give all servers the learner's weights as `version`; every rank must call it."""
        self.client.version = version
        if self.engine.is_sender:
            self.client.each("/pause", params={"mode": "abort"})
        try:
            self.engine.send_weights()
            if self.engine.is_sender:
                self.client.each("/reset_prefix_cache", params={"reset_running_requests": "true"})
        finally:
            if self.engine.is_sender:
                self.client.each("/resume")


    def prove(self, probe: Probe, version: int) -> float:
        """Largest difference of a probe over all servers, asked by the rank that sends; 0 on the others."""
        if not self.engine.is_sender:
            return 0.0
        found = []
        for url in self.servers.urls:
            self.servers.check(url, version)
            found.append(probe.check(self.servers.logprobs(url, probe.tokens), version=version, who=url))
        return max(found)


class _AllServers:
    """vLLM's `VLLMWeightSyncClient` for several servers at once: every worker has a rank of its own in the one group."""

    def __init__(self, servers: ServerWeights):
        self.servers, self.version = servers, 0
        self.sizes = [int(servers._ask(url, "/get_world_size", method="GET")["world_size"]) for url in servers.urls]

    def each(self, route: str, bodies: Sequence[dict[str, Any] | None] | None = None, **options: Any) -> None:
        urls, failed = self.servers.urls, []

        def ask(url: str, body: dict[str, Any] | None) -> None:
            try:
                self.servers._ask(url, route, body, **options)
            except Exception as error:  # noqa: BLE001 - told together, below
                failed.append(f"{url}: {error}")

        threads = [threading.Thread(target=ask, args=(url, body), daemon=True)
                   for url, body in zip(urls, bodies or [None] * len(urls), strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise ServerRefuses("; ".join(failed))

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        bodies, offset = [], int(init_info.get("rank_offset", 1))
        for size in self.sizes:
            own = init_info | {"rank_offset": offset} if "rank_offset" in init_info else init_info
            bodies.append({"init_info": own})
            offset += size
        self.each("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self.each("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        from vllm.distributed.weight_transfer.clients import _json_safe_update_payload

        self.each("/update_weights", [{"update_info": _json_safe_update_payload(update_info)}] * len(self.sizes))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.each("/finish_weight_update", [{"weight_version": weight_version or str(self.version)}] * len(self.sizes))


def _source(learner: Any):
    """The learner as vLLM's `WeightSource`: names and shapes once, tensors anew for every version."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

    from mopd.learner.weights import named_weights

    class Source(WeightSource):
        def __init__(self):
            self._known: list[ParamMeta] = []

        def metadata(self) -> list[ParamMeta]:
            if not self._known:  # gathered once: what a layer is saved as shows on its tensors
                self._known = [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]
            return self._known

        def __iter__(self):
            return iter(named_weights(learner, layout=LAYOUT))

    return Source()
