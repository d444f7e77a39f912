"""Where the parts of a run are: the section `placement` names devices and machines of learner ranks, sampling engines and
teachers, and what a device can hold and do. Nothing here imports torch.

`mopd launch` starts what it describes (mopd/launch.py), `mopd check` estimates memory and time from it (mopd/memory.py).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass
class LearnerPlacement:
    """Machines and processes of the learner; a run whose processes somebody else starts is estimated by them."""

    nodes: int = 1  # machines
    ranks_per_node: int = 1  # processes on each, one device each
    devices: list[str] = dataclasses.field(default_factory=list)  # of the ranks of a machine, such as [cuda:2, cuda:3]


@dataclasses.dataclass
class FleetPlacement:
    """Servers of one kind: addresses of some that run, or machines on which `mopd launch` starts them."""

    urls: list[str] = dataclasses.field(default_factory=list)  # of servers that run already
    device: str = ""  # of an engine in the learner's processes, such as cuda:1; empty: the rank's own
    nodes: int = 0  # machines of its own; 0: those of `beside`
    beside: str = "learner"  # whose machines it shares where it has none: learner, sampling, or teachers.NAME
    servers_per_node: int = 0  # servers that `mopd launch` starts on each of these machines
    gpus_per_server: int = 1  # devices of one server (vLLM's tensor parallel size); 0: it runs on CPUs
    first_gpu: int = 0  # of a machine, where servers share it with others
    port: int = 0  # of the first server of a machine, the others follow; 0: 8000, and 100 more for each fleet before it


@dataclasses.dataclass
class PlacementConfig:
    """Which machine and device does what."""

    learner: LearnerPlacement = dataclasses.field(default_factory=LearnerPlacement)
    sampling: FleetPlacement = dataclasses.field(default_factory=FleetPlacement)
    teachers: dict[str, FleetPlacement] = dataclasses.field(default_factory=dict)  # by name
    device_memory_gib: float | None = None  # of one device; none: of the one found here
    host_memory_gib: float | None = None  # of one machine; none: of this one
    device_tflops: float | None = None  # of one device in deepspeed.dtype, at its peak; none: no estimate of time
    device_bandwidth: float | None = None  # GB/s of one device's memory; none: no estimate of sampling's time
    utilisation: float = 0.35  # share of device_tflops that training and scoring reach


def placement_errors(config: Any) -> list[str]:
    """Everything wrong with `config.placement`, against the teachers and the sampling that `config` has; ranges of numbers
    are in mopd/config_ranges.py."""
    place, errors = config.placement, []
    if place.learner.devices and len(place.learner.devices) != place.learner.ranks_per_node:
        errors.append(f"placement.learner.devices: {len(place.learner.devices)} devices for placement.learner.ranks_per_node="
                      f"{place.learner.ranks_per_node} processes; name one for each, or none")
    errors += _devices("placement.learner.devices", place.learner.devices)
    if len(set(place.learner.devices)) < len(place.learner.devices):
        errors.append("placement.learner.devices: a device stands there twice; each process needs its own")
    ranks, experts = place.learner.nodes * place.learner.ranks_per_node, config.deepspeed.autoep_size
    if ranks > 1 and experts > 1 and ranks % experts:
        errors.append(f"deepspeed.autoep_size: experts spread over {experts} ranks need a multiple of {experts} ranks, and "
                      f"placement.learner has {ranks}")
    if ranks > 1 and ranks % (columns := max(1, config.deepspeed.sequence_parallel_size)):
        errors.append(f"deepspeed.sequence_parallel_size: {columns} ranks share columns, which needs a multiple of {columns} "
                      f"ranks, and placement.learner has {ranks}")
    for name, fleet in place.teachers.items():
        key = f"placement.teachers.{name}"
        if name not in config.teachers:
            errors.append(f"{key}: no teacher '{name}' under teachers; there "
                          f"{', '.join(sorted(config.teachers)) or 'none is configured'}")
            continue
        errors += _fleet(key, fleet)
        teacher = config.teachers[name]
        if (fleet.urls or fleet.servers_per_node) and teacher.backend != "server":
            errors.append(f"{key}: servers are for teachers.{name}.backend=server, and it is '{teacher.backend}'")
        if fleet.device and teacher.backend == "server":
            errors.append(f"{key}.device: a server has its own device; leave it out, or set teachers.{name}.backend")
        if fleet.device and (teacher.shard or teacher.backend == "vllm"):
            errors.append(f"{key}.device: only a teacher with backend 'hf' and without shard lies on one device")
        if fleet.urls and teacher.urls and sorted(fleet.urls) != sorted(teacher.urls):
            errors.append(f"{key}.urls: teachers.{name}.urls names other addresses ({', '.join(teacher.urls)}); set one "
                          "of the two")
    errors += _fleet("placement.sampling", place.sampling)
    sampling, fleet = config.sampling, place.sampling
    if (fleet.urls or fleet.servers_per_node) and sampling.engine != "server":
        errors.append(f"placement.sampling: servers are for sampling.engine=server, and it is '{sampling.engine}'")
    if fleet.device and sampling.engine != "hf":
        errors.append(f"placement.sampling.device: only the engine 'hf' reads it, and sampling.engine is '{sampling.engine}'")
    if fleet.urls and sampling.urls and sorted(sampling.urls) != sorted(fleet.urls):
        errors.append(f"placement.sampling.urls: sampling.urls names other addresses ({', '.join(sampling.urls)}); set one "
                      "of the two")
    for key in ("device_memory_gib", "host_memory_gib", "device_tflops", "device_bandwidth"):
        if (value := getattr(place, key)) is not None and value <= 0:
            errors.append(f"placement.{key}: {value} must be positive, or null")
    if not 0 < place.utilisation <= 1:
        errors.append(f"placement.utilisation: {place.utilisation} is not above 0 and at most 1")
    for key, fleet in fleets(place).items():
        if fleet.servers_per_node and not fleet.nodes:
            other = fleets(place).get(fleet.beside)
            if fleet.beside != "learner" and (other is None or not (other.nodes and other.servers_per_node)):
                errors.append(f"placement.{key}.beside: '{fleet.beside}' has no machines to share; name learner, or a fleet "
                              "with nodes and servers_per_node (sampling, teachers.NAME)")
    return errors or _ports(place)


def _fleet(key: str, fleet: FleetPlacement) -> list[str]:
    errors = []
    if fleet.urls and fleet.servers_per_node:
        errors.append(f"{key}: urls are of servers that run, servers_per_node of servers to start; set one of the two")
    if fleet.device and (fleet.urls or fleet.servers_per_node):
        errors.append(f"{key}.device: it is of an engine in the learner's processes; with servers leave it out")
    if fleet.nodes and not fleet.servers_per_node:
        errors.append(f"{key}.nodes: {fleet.nodes} machines without a server; set {key}.servers_per_node")
    return errors + _devices(f"{key}.device", [fleet.device] if fleet.device else [])


def _devices(key: str, names: list[str]) -> list[str]:
    return [f"{key}: '{name}' is not a device such as cpu or cuda:0" for name in names
            if not re.fullmatch(r"cpu|cuda:\d+", name)]


def _ports(place: PlacementConfig) -> list[str]:
    """Two fleets on one machine must not meet on a port."""
    taken: dict[tuple[int, int], str] = {}
    errors = []
    for key, part in machines(place).items():
        for spot in ((machine, port) for machine in part for port in (ports(place, key) if key != "learner" else ())):
            if taken.setdefault(spot, key) != key:
                errors.append(f"placement.{key}.port: {spot[1]} is of placement.{taken[spot]} too, on the same machine")
                break
    return errors


def shared_devices(place: PlacementConfig) -> list[str]:
    """A warning for every part that `mopd launch` would start on a device of a machine which another part has: possible where
    both fit into it, and otherwise found out late."""
    taken: dict[tuple[int, int], str] = {}
    found: dict[tuple[str, str], str] = {}
    names = place.learner.devices or [f"cuda:{number}" for number in range(place.learner.ranks_per_node)]
    own = [int(name.removeprefix("cuda:")) for name in names if name != "cpu"]
    for key, part in machines(place).items():
        fleet = fleets(place).get(key)
        many = 0 if fleet is None else fleet.servers_per_node * fleet.gpus_per_server
        for machine in part:
            for gpu in own if fleet is None else range(fleet.first_gpu, fleet.first_gpu + many):
                if (other := taken.setdefault((machine, gpu), key)) != key:
                    found.setdefault((key, other), f"placement.{key}: cuda:{gpu} of machine {machine + 1} is of placement."
                                     f"{other} too, and both must fit into its memory; set placement.{key}.first_gpu, or "
                                     "give it machines of its own")
    return list(found.values())


def fleets(place: PlacementConfig) -> dict[str, FleetPlacement]:
    """Every fleet by its key under `placement`, sampling first."""
    return {"sampling": place.sampling, **{f"teachers.{name}": fleet for name, fleet in place.teachers.items()}}


def machines(place: PlacementConfig) -> dict[str, list[int]]:
    """The machines of the learner ("learner") and of every fleet that is to be started, numbered from 0 in this order: the
    learner's, then those of each fleet that has its own."""
    found, taken = {"learner": list(range(place.learner.nodes))}, place.learner.nodes
    for key, fleet in fleets(place).items():
        if fleet.servers_per_node:
            found[key] = list(range(taken, taken + fleet.nodes))
            taken += fleet.nodes
    shared = {key: found[fleets(place)[key].beside] for key, part in found.items() if not part}
    return found | shared


def ports(place: PlacementConfig, key: str) -> list[int]:
    """Of a fleet's servers on each of its machines."""
    fleet = fleets(place)[key]
    first = fleet.port or 8000 + 100 * list(fleets(place)).index(key)
    return list(range(first, first + fleet.servers_per_node))


def addresses(place: PlacementConfig, hosts: Sequence[str] = ()) -> dict[str, list[str]]:
    """URLs of every fleet by its key: those named, or those of the servers that are to be started, on `hosts` in the order of
    `machines`. Without hosts one machine is this one and several are called node-1, node-2, …"""
    of = machines(place)
    count = 1 + max(number for part in of.values() for number in part)
    names = list(hosts) or (["127.0.0.1"] if count == 1 else [f"node-{number + 1}" for number in range(count)])
    return {key: fleet.urls or [f"http://{names[number]}:{port}" for number in of[key] for port in ports(place, key)]
            for key, fleet in fleets(place).items() if fleet.urls or fleet.servers_per_node}


def apply_placement(config: Any) -> None:
    """Put the servers' addresses where the parts read them, `teachers.NAME.urls` and `sampling.urls`, unless they stand
    there already."""
    for key, urls in addresses(config.placement).items():
        part = config.sampling if key == "sampling" else config.teachers[key.partition(".")[2]]
        if not part.urls:
            part.urls = urls
