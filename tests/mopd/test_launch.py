"""Jobs on several machines: which command runs where, Slurm's file run by a shell, and what is kept running."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from mopd.config import ConfigError, load_config
from mopd.config_placement import shared_devices
from mopd.launch import CannotLaunch, Job, hostfile, is_here, jobs_of, read_hosts, sbatch
from mopd.launch_run import LaunchFailed, Supervisor, _Process, _said, launch, write_scripts

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FOUR = CONFIGS / "qwen3_30b_a3b_4_nodes.yaml"
RECIPES = sorted([*CONFIGS.glob("qwen3_30b_a3b_*.yaml"), CONFIGS / "mimo_v2_flash_paper.yaml"])


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_four_machines_get_their_commands():
    config = load_config(FOUR)
    jobs = jobs_of(config, FOUR, ["a", "b", "c", "d"])
    assert [(job.host, job.kind) for job in jobs] == [("c", "server")] * 4 + [("d", "server")] * 4 + [
        ("a", "learner"), ("b", "learner")]
    sampling = [job for job in jobs if job.name.startswith("sampling")]
    assert [job.url for job in sampling] == [f"http://c:{port}" for port in range(8000, 8004)]
    assert [job.environment["CUDA_VISIBLE_DEVICES"] for job in sampling] == ["0,1", "2,3", "4,5", "6,7"]
    embodied = [job for job in jobs if job.name.startswith("teachers.embodied")]
    assert [job.environment["CUDA_VISIBLE_DEVICES"] for job in embodied] == ["4,5", "6,7"]
    assert {"--vllm=--tensor-parallel-size", "--vllm=2"} <= set(embodied[0].command)
    assert sampling[0].command[-3:] == ("c", "--port", "8000")
    second = jobs[-1].command
    assert second[1:3] == ("-m", "mopd.local_ranks"), "torchrun's own status would be 1 where a configuration is wrong (2)"
    assert "--node_rank=1" in second and "--master_addr=a" in second and "--nproc_per_node=8" in second
    urls = next(word for word in second if word.startswith("teachers.game.urls="))
    assert json.loads(urls.partition("=")[2]) == ["http://d:8100", "http://d:8101"]
    assert hostfile(config, ["a", "b", "c", "d"]) == "a slots=8\nb slots=8\n"


def test_the_learner_by_deepspeeds_launcher():
    (learner,) = [job for job in jobs_of(load_config(FOUR), FOUR, list("abcd"), by="deepspeed") if job.kind == "learner"]
    assert learner.host == "a" and "--no_local_rank" in learner.command and "--module" in learner.command
    with pytest.raises(CannotLaunch, match="--by mpi"):
        jobs_of(load_config(FOUR), FOUR, list("abcd"), by="mpi")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_load_and_lay_themselves_out(recipe):
    config = load_config(recipe)
    hosts = [f"node-{i}" for i in range(64)]
    jobs = jobs_of(config, recipe, hosts)
    assert all(job.environment["CUDA_VISIBLE_DEVICES"] for job in jobs if job.kind == "server")
    spots = [(job.host, port) for job in jobs for port in [job.url.rpartition(":")[2]] if job.url]
    assert len(set(spots)) == len(spots)
    used = {}
    for job in jobs:
        for gpu in job.environment.get("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7").split(","):
            assert used.setdefault((job.host, gpu), job.name) == job.name, "two jobs on one device"


def test_too_few_machines_and_bad_hostfiles_are_said(tmp_path):
    with pytest.raises(CannotLaunch, match=r"wants 4 machine\(s\) \(learner on 2, sampling on 1.*there are 2: a, b"):
        jobs_of(load_config(FOUR), FOUR, ["a", "b"])
    (tmp_path / "hosts").write_text("# the cluster\nnode-1 slots=8\nnode-2 slots=8  # new\n\n")
    assert read_hosts(tmp_path / "hosts") == ["node-1", "node-2"]
    (tmp_path / "hosts").write_text("a\na slots=2\n")
    with pytest.raises(CannotLaunch, match="twice"):
        read_hosts(tmp_path / "hosts")
    with pytest.raises(CannotLaunch, match="No such file"):
        read_hosts(tmp_path / "none")
    (tmp_path / "hosts").write_text("a slots=8\n\nb slots=many\n")
    with pytest.raises(CannotLaunch, match="line 3: 'b slots=many' is no machine"):
        read_hosts(tmp_path / "hosts")
    (tmp_path / "hosts").write_bytes(b"\x00\xff\xfe")
    with pytest.raises(CannotLaunch, match="no text; a hostfile has"):
        read_hosts(tmp_path / "hosts")


def test_what_cannot_be_placed_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        load_config(FOUR, ["placement.teachers.nobody.nodes=1", "placement.sampling.urls=[http://x:1]",
                           "placement.teachers.embodied.beside=nothing", "placement.learner.devices=[cuda:0]",
                           "placement.teachers.game.device=gpu7"])
    said = str(caught.value)
    for words in ("placement.teachers.nobody: no teacher 'nobody'", "set one of the two", "'nothing' has no machines",
                  "1 devices for placement.learner.ranks_per_node=8", "'gpu7' is not a device"):
        assert words in said
    with pytest.raises(ConfigError, match="placement.teachers.embodied.port: 8100 is of placement.teachers.game too"):
        load_config(FOUR, ["placement.teachers.embodied.port=8100"])
    with pytest.raises(ConfigError, match="teachers.game.urls names other addresses"):
        load_config(FOUR, ["placement.teachers.game={urls: [http://y:1]}", "teachers.game.urls=[http://x:1]",
                           "placement.teachers.game.nodes=0", "placement.teachers.game.servers_per_node=0"])


def test_a_wrong_placement_is_no_missing_address():
    with pytest.raises(ConfigError) as caught:
        load_config(FOUR, ["placement.sampling.beside=nothing", "placement.sampling.nodes=0"])
    assert "'nothing' has no machines" in str(caught.value) and "urls" not in str(caught.value)


def test_a_device_of_two_parts_is_said():
    one = CONFIGS / "qwen3_30b_a3b_1_node.yaml"
    assert not any(shared_devices(load_config(recipe).placement) for recipe in RECIPES)
    (said,) = shared_devices(load_config(one, ["placement.sampling.first_gpu=3"]).placement)
    assert said.startswith("placement.sampling: cuda:3 of machine 1 is of placement.learner too")
    (said,) = shared_devices(load_config(one, ["placement.teachers.embodied.first_gpu=6"]).placement)
    assert said.startswith("placement.teachers.embodied: cuda:6 of machine 1 is of placement.teachers.game too")
    on_cpus = ["placement.sampling.gpus_per_server=0", "placement.sampling.first_gpu=0"]
    assert not shared_devices(load_config(one, on_cpus).placement)


def test_addresses_reach_the_parts_that_read_them():
    config = load_config(FOUR)
    assert config.teachers["embodied"].urls == ["http://node-4:8200", "http://node-4:8201"]
    own = load_config(FOUR, ["teachers.game.urls=[http://own:1]"])
    assert own.teachers["game"].urls == ["http://own:1"], "what stands there already stays"


@pytest.mark.parametrize("status", [0, 3])
def test_slurms_file_runs_the_job(tmp_path, status):
    """With stand-ins for Slurm's own commands, the file starts the servers, then the learner, and ends as it does."""
    shims = tmp_path / "bin"
    shims.mkdir()
    (shims / "scontrol").write_text("#!/bin/bash\nprintf 'n1\\nn2\\nn3\\nn4\\n'\n")
    (shims / "curl").write_text("#!/bin/bash\nexit 0\n")
    (shims / "srun").write_text('#!/bin/bash\necho "$@" >>"$LOG"\ncase "$*" in\n'
                                f'*mopd.local_ranks*) sleep 0.3; exit {status};;\n*) exec sleep 60;;\nesac\n')
    for shim in shims.iterdir():
        shim.chmod(0o755)
    config = load_config(FOUR, [f"run={tmp_path}/run"])
    jobs = jobs_of(config, FOUR, [f"$HOST_{i}" for i in range(4)])
    file = tmp_path / "job.sbatch"
    file.write_text(sbatch(config, jobs, str(tmp_path), tmp_path, options=["--partition=gpu"]))
    assert "#SBATCH --signal=B:TERM@960" in file.read_text() and "#SBATCH --partition=gpu" in file.read_text()
    environment = {"PATH": f"{shims}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "n[1-4]", "LOG": str(tmp_path / "log")}
    done = subprocess.run(["bash", str(file)], env=os.environ | environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == status, done.stderr
    lines = (tmp_path / "log").read_text().splitlines()
    learners = [line for line in lines if "mopd.local_ranks" in line]
    assert len(lines) == 10 and len(learners) == 2 and lines[-1] in learners
    assert {line.split("--nodelist=")[1].split()[0] for line in learners} == {"n1", "n2"}
    assert all("--master_addr=n1" in line and '"http://n4:8100"' in line for line in learners)


SERVER = """
import http.server, sys
class Ok(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *a): pass
print("serving", flush=True)
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Ok).serve_forever()
"""
LEARNER = """
import pathlib, sys, time
count = pathlib.Path(sys.argv[1])
runs = int(count.read_text()) + 1 if count.exists() else 1
count.write_text(str(runs))
time.sleep(float(sys.argv[3]))
print("learner", runs, *sys.argv[5:], flush=True)
sys.exit(int(sys.argv[2]) if runs == 1 else 0)
"""


def small_job(place: Path, *, status: int = 0, sleep: float = 0.3) -> tuple[list[Job], Path]:
    """A server on 127.0.0.2 and two learner processes on two loopback addresses."""
    (place / "server.py").write_text(SERVER)
    (place / "learner.py").write_text(LEARNER)
    port = free_port()
    jobs = [Job("server", "server", 1, "127.0.0.2", (sys.executable, str(place / "server.py"), "127.0.0.2", str(port)), {},
                f"http://127.0.0.2:{port}")]
    for i in range(2):
        words = (sys.executable, place / "learner.py", place / f"count-{i}", status if i == 0 else 0, sleep)
        jobs.append(Job(f"learner-{i}", "learner", i, f"127.0.0.{i + 1}", tuple(map(str, words)), {"A": "b c"}))
    write_scripts(jobs, place, place)
    return jobs, place


def supervisor(jobs, place, said, **how) -> Supervisor:
    return Supervisor(jobs, place, **{"start_s": 20, "end_s": 10, "say": said.append, **how})


def test_a_learner_that_fails_starts_again_with_all_of_its_machines(tmp_path):
    said: list[str] = []
    assert supervisor(*small_job(tmp_path, status=1), said).run() == 0
    assert [(tmp_path / f"count-{i}").read_text() for i in range(2)] == ["2", "2"]
    assert any("learner-0 on 127.0.0.1 ended with status 1. Its log" in line and "learner 1" in line for line in said)


@pytest.mark.parametrize("begun, second", [(True, "auto"), (False, "never")])
def test_a_job_that_starts_anew_goes_on_once_it_has_begun(tmp_path, begun, second):
    jobs, place = small_job(tmp_path, status=1)
    jobs = [dataclasses.replace(job, command=(*job.command, "--resume", "never")) if job.kind == "learner" else job
            for job in jobs]
    write_scripts(jobs, place, place)
    said: list[str] = []
    assert supervisor(jobs, place, said, begun=lambda: begun).run() == 0
    assert (place / "learner-0.log").read_text().split() == ["learner", "1", "never", "learner", "2", second]
    assert any("go on from the last checkpoint" in line for line in said) == begun


@pytest.mark.parametrize("status, restarts, words", [(2, 5, "ended with status 2"), (1, 0, "raise --restarts")])
def test_what_would_fail_again_ends_the_job(tmp_path, status, restarts, words):
    jobs, place = small_job(tmp_path, status=status)
    with pytest.raises(LaunchFailed, match=words):
        supervisor(jobs, place, [], restarts=restarts).run()
    assert (tmp_path / "count-0").read_text() == "1"


def test_a_server_that_dies_is_replaced_while_the_learner_goes_on(tmp_path):
    said: list[str] = []
    watched = supervisor(*small_job(tmp_path, sleep=3.0), said)

    def kill() -> None:
        while "learner-1" not in watched._running:
            time.sleep(0.02)
        watched._running["server"].process.send_signal(signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    assert watched.run() == 0
    killer.join()
    assert watched._running["server"].starts == 2 and any("is started again" in line for line in said)
    assert [(tmp_path / f"count-{i}").read_text() for i in range(2)] == ["1", "1"]


def test_last_words_are_found_among_a_launchers_own_lines(tmp_path):
    lines = ["step 1", "error: rank 0 of 2 lost the others at step 3: rank 1 left no word", *["====="] * 20]
    (tmp_path / "log").write_text("\n".join(lines))
    assert "ends with: error: rank 0 of 2 lost the others" in _said(_Process(None, None, tmp_path / "log"))
    (tmp_path / "log").write_text("one\ntwo\n\n")
    assert _said(_Process(None, None, tmp_path / "log")).endswith("ends with: one | two")
    (tmp_path / "log").write_text("")
    assert _said(_Process(None, None, tmp_path / "log")).endswith("is empty.")


def test_sigterm_ends_everything(tmp_path):
    watched = supervisor(*small_job(tmp_path, sleep=30.0), [])
    threading.Timer(1.5, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    assert watched.run() == 128 + signal.SIGTERM
    assert all(found.process.poll() is not None for found in watched._running.values())


def test_a_dry_run_writes_scripts_and_starts_nothing(tmp_path, capsys):
    config = load_config(FOUR, [f"run={tmp_path}"])
    assert launch(config, list("abcd"), dry_run=True) == 0
    assert "c: bash" in capsys.readouterr().out
    told = load_config(tmp_path / "launch" / "config.yaml", ["train.steps=1"])
    assert told.sampling.vllm_options.tensor_parallel == 2 and told.train.samples_per_step == config.train.samples_per_step
    script = (tmp_path / "launch" / "learner-0.sh").read_text()
    assert script.startswith("#!/bin/bash\ncd ") and subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    assert launch(config, list("abcd"), by="deepspeed", dry_run=True) == 0
    assert str(tmp_path / "launch" / "hostfile") in (tmp_path / "launch" / "learner.sh").read_text()
    capsys.readouterr()
    assert launch(config, [], slurm=True, dry_run=True, resume="never") == 0
    assert "10 commands on 4 machines\n" in capsys.readouterr().out
    batch = (tmp_path / "launch" / "job.sbatch").read_text()
    assert "resume=never;" in batch and batch.count('--resume "$resume"') == 2 and "--resume never" not in batch
    assert subprocess.run(["bash", "-n", str(tmp_path / "launch" / "job.sbatch")]).returncode == 0


def test_scripts_quote_what_they_are_given(tmp_path):
    job = Job("x", "learner", 0, "localhost", ("printf", "%s|%s", "a b", "$HOME'"), {"NAME": "c  d"})
    done = subprocess.run(["bash", "-c", job.script(str(tmp_path))], capture_output=True, text=True)
    assert done.stdout == "a b|$HOME'" and is_here("127.0.0.9") and is_here("localhost") and not is_here("node-1")
    assert textwrap.dedent("export NAME='c  d'") in job.script(str(tmp_path))
