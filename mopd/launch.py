"""The commands of a job on several machines, made from the section `placement`: learner ranks under torchrun, DeepSpeed's
launcher or Slurm, and the servers that sample and score.

Only says what is to be run; mopd/launch_run.py runs it. Environments need no commands: they live in the processes that
sample (docs/environments.md).
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mopd.addresses import loopback
from mopd.config_placement import addresses, fleets, machines, ports

BY = ("torchrun", "deepspeed")
# Of this shell's environment, what the processes on other machines are given too; keys and tokens are not among them.
CARRIED = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "PYTHONPATH")
CARRIED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "VLLM_")


class CannotLaunch(ValueError):
    """A job that cannot be laid out on the given machines; the message says what to change."""


@dataclasses.dataclass(frozen=True)
class Job:
    """One command on one machine.

    name         also of its log and script
    kind         learner, or server
    machine      number of the machine, host its name
    environment  variables that it needs beside the machine's own
    url          of a server
    """

    name: str
    kind: str
    machine: int
    host: str
    command: tuple[str, ...]
    environment: dict[str, str]
    url: str = ""

    def script(self, folder: str) -> str:
        """A shell script that runs it in `folder`."""
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in sorted(self.environment.items()))
        return f"#!/bin/bash\ncd {shlex.quote(folder)} || exit 1\n{exports}exec {shlex.join(self.command)}\n"


def read_hosts(path: Path) -> list[str]:
    """Host names of a hostfile in DeepSpeed's format, `name slots=8`, one a line; `#` begins a comment."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "no text"
        raise CannotLaunch(f"--hosts {path}: {why}; a hostfile has one machine a line, such as `node-1 slots=8`") from error
    parts = [(number, line.split("#")[0].split()) for number, line in enumerate(lines, 1)]
    for number, words in parts:
        if words and not re.fullmatch(r"[\w.:-]+( slots=\d+)?", " ".join(words)):
            raise CannotLaunch(f"--hosts {path}, line {number}: '{' '.join(words)}' is no machine; a line is a name or an "
                               "address, such as `node-1 slots=8`")
    names = [words[0] for _, words in parts if words]
    if len(set(names)) < len(names):
        raise CannotLaunch(f"--hosts {path}: a machine stands there twice")
    return names


def machine_count(place: Any) -> int:
    return 1 + max(number for part in machines(place).values() for number in part)


def is_here(host: str) -> bool:
    """Whether commands for this host run on this machine: localhost, or a loopback address."""
    return loopback(host) or host == os.uname().nodename


def carried() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in CARRIED or name.startswith(CARRIED_PREFIXES)}


def write_config(config: Any, path: Path) -> None:
    """The configuration as every process of the job reads it: overrides applied, and what servers are told by `placement`."""
    from omegaconf import OmegaConf

    plain = dataclasses.asdict(config)
    plain["sampling"]["vllm_options"]["tensor_parallel"] = max(
        1, config.placement.sampling.gpus_per_server if config.placement.sampling.servers_per_node
        else config.sampling.vllm_options.tensor_parallel)
    OmegaConf.save(OmegaConf.create(plain), path)


def jobs_of(config: Any, path: Path, hosts: Sequence[str], *, by: str = "torchrun", port: int = 29500,
            resume: str = "auto") -> list[Job]:
    """Every command of the job, servers first. `path` is the file that `write_config` wrote; the addresses of servers that
    are started are given to the learner beside it. Raises CannotLaunch."""
    place = config.placement
    wanted = machine_count(place)
    if len(hosts) < wanted:
        parts = ", ".join(f"{key} on {len(part)}" for key, part in machines(place).items())
        raise CannotLaunch(f"placement wants {wanted} machine(s) ({parts}), and there are {len(hosts)}: "
                           f"{', '.join(hosts) or 'none'}")
    found = _servers(config, path, hosts)
    started = {key: urls for key, urls in addresses(place, hosts).items() if fleets(place)[key].servers_per_node}
    more = [f"{key}.urls={json.dumps(urls)}" for key, urls in started.items()]
    train = ["-m", "mopd.cli", "train", str(path), *more, "--resume", resume]
    environment = carried() | devices_environment(place.learner.devices)
    learners = [hosts[number] for number in machines(place)["learner"]]
    if all(is_here(host) for host in learners):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    per = place.learner.ranks_per_node
    if by == "deepspeed":
        command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", "HOSTFILE", "--num_nodes",
                   str(len(learners)), "--num_gpus", str(per), "--master_addr", learners[0], "--master_port", str(port),
                   "--no_local_rank", "--module", *train[1:]]
        return [*found, Job("learner", "learner", 0, learners[0], tuple(command), environment)]
    if by != "torchrun":
        raise CannotLaunch(f"--by {by}: the learner's processes are started by {' or '.join(BY)}")
    for number, host in enumerate(learners):
        command = [sys.executable, "-m", "mopd.local_ranks", f"--nnodes={len(learners)}", f"--nproc_per_node={per}",
                   f"--node_rank={number}", f"--master_addr={learners[0]}", f"--master_port={port}", *train]
        machine = machines(place)["learner"][number]
        found.append(Job(f"learner-{number}", "learner", machine, host, tuple(command), environment))
    return found


def _servers(config: Any, path: Path, hosts: Sequence[str]) -> list[Job]:
    found = []
    place = config.placement
    for key, part in machines(place).items():
        if key == "learner":
            continue
        fleet, name = fleets(place)[key], key.rpartition(".")[2]
        for machine in part:
            for number, port in enumerate(ports(place, key)):
                host = hosts[machine]
                size = max(1, fleet.gpus_per_server)
                if key == "sampling":
                    command = [sys.executable, "-m", "mopd.cli", "serve", str(path)]
                else:
                    command = [sys.executable, "-m", "mopd.cli", "teacher", "serve", str(path), name]
                    command += ["--vllm=--tensor-parallel-size", f"--vllm={size}"] * (size > 1)
                command += ["--host", host, "--port", str(port)]
                first = fleet.first_gpu + number * fleet.gpus_per_server
                gpus = [f"cuda:{gpu}" for gpu in range(first, first + fleet.gpus_per_server)]
                found.append(Job(f"{key}-{machine}-{number}", "server", machine, host, tuple(command),
                                 carried() | devices_environment(gpus), f"http://{host}:{port}"))
    return found


def devices_environment(names: Sequence[str]) -> dict[str, str]:
    """The environment in which a process sees these devices alone; empty: all."""
    if not names:
        return {}
    if all(name == "cpu" for name in names):
        return {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    return {"CUDA_VISIBLE_DEVICES": ",".join(name.removeprefix("cuda:") for name in names)}


def hostfile(config: Any, hosts: Sequence[str]) -> str:
    """The learner's machines as DeepSpeed's launcher reads them."""
    return "".join(f"{hosts[number]} slots={config.placement.learner.ranks_per_node}\n"
                   for number in machines(config.placement)["learner"])


def sbatch(config: Any, jobs: Sequence[Job], folder: str, logs: Path, *, options: Sequence[str] = (),
           wait_s: int = 1800) -> str:
    """A Slurm batch file for the whole job. `jobs` are those of hosts named $HOST_0, $HOST_1, …, which the file sets from the
    allocation. Slurm's warning before it takes the nodes away reaches the learner as SIGTERM, which saves and ends."""
    nodes, per = machine_count(config.placement), config.placement.learner.ranks_per_node
    warn = round(config.train.stop_within_s) + 60
    learners = len(machines(config.placement)["learner"])
    lines = ["#!/bin/bash", f"#SBATCH --job-name={config.train.name}", f"#SBATCH --nodes={nodes}",
             "#SBATCH --ntasks-per-node=1",
             f"#SBATCH --signal=B:TERM@{warn}", f"#SBATCH --output={logs}/slurm-%j.log",
             *(f"#SBATCH {option}" for option in options),
             f"# {nodes} machine(s); the learner has {learners} with {per} process(es) each.",
             "set -u", f"cd {shlex.quote(folder)} || exit 1",
             'hosts=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
             *(f'export HOST_{number}="${{hosts[{number}]}}"' for number in range(nodes)), "servers=()", "learners=()", ""]
    step = "srun --overlap --nodes=1 --ntasks=1"
    for job in jobs:
        exports = "".join(f"export {name}={shlex.quote(value)}; " for name, value in sorted(job.environment.items()))
        words = " ".join(_shell(word) for word in job.command)
        kill = "" if job.kind == "server" else " --kill-on-bad-exit=1"
        lines += [f"# {job.name}", f'({exports}exec {step}{kill} --nodelist="$HOST_{job.machine}" {words} '
                  f'>"{logs}/{job.name}.log" 2>&1) &', f"{'servers' if job.kind == 'server' else 'learners'}+=($!)"]
        if job.url:
            lines.append(f'urls="${{urls:-}} {job.url}"')
    urls = any(job.url for job in jobs)
    wait = [f"for ((i = 0; i < {wait_s // 5}; i++)); do up=1; for url in $urls; do curl -sf --noproxy '*' \"$url/health\" "
            ">/dev/null || up=0; done; [ $up = 1 ] && break; sleep 5; done"] if urls else []
    lines = [line.replace(" --resume never ", ' --resume "$resume" ') for line in lines]
    requeued = '[ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && resume=auto  # what was begun before goes on'
    lines.insert(lines.index("servers=()"), f"resume=never; {requeued}")
    # Servers come first in `jobs`; the learner's lines follow the wait.
    first = next(number for number, line in enumerate(lines) if line.startswith("# learner"))
    lines[first:first] = wait
    return "\n".join([*lines, "", "trap 'kill -TERM \"${learners[@]}\" 2>/dev/null' TERM INT", "status=0",
                      'for learner in "${learners[@]}"; do',
                      '  while wait "$learner"; code=$?; kill -0 "$learner" 2>/dev/null; do :; done',
                      "  [ $code -ne 0 ] && status=$code", "done",
                      '[ ${#servers[@]} -gt 0 ] && kill -TERM "${servers[@]}" 2>/dev/null', "exit $status", ""])


def _shell(word: str) -> str:
    """A word of a command for the batch file; the hosts' variables in it are left for the shell to fill in."""
    if "$HOST_" not in word:
        return shlex.quote(word)
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("`", "\\`") + '"'
