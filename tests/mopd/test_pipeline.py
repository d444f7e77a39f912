"""Jobs in the order of what they need, reused while nothing they depend on changed, ended together, gone on with."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from rich.console import Console

from mopd.config import Config, load_config
from mopd.config_sampling import WITHOUT_EFFECT
from mopd.demo import Stages, run_demo
from mopd.pipeline import Job, JobFailed, Pipeline
from tests.tiny_run import REPOSITORY, environment

DEMO = REPOSITORY / "configs" / "demo.yaml"


class Scripts:
    """Jobs that are small Python programs instead of commands of mopd, run by the real pipeline."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.run = folder, folder / "run"
        started = subprocess.Popen

        def popen(command, **options):
            assert command[1:3] == ["-m", "mopd.cli"]
            return started([sys.executable, "-c", command[3]], **options)
        monkeypatch.setattr("mopd.pipeline.subprocess.Popen", popen)

    def job(self, name, body="", needs=(), reads=None, **options) -> Job:
        """Writes its inputs' text and its own into OUT, and its name with the time into `trace`."""
        out = self.run / f"{name}.out"
        code = textwrap.dedent(f"""
            import sys, time
            trace = open({str(self.folder / 'trace')!r}, "a", buffering=1)
            trace.write("start {name}\\n")
            """) + textwrap.dedent(body) + textwrap.dedent(f"""
            open({str(out)!r}, "a").write("made")
            print("result: {name} is made")
            trace.write("end {name}\\n")
            """)
        return Job(name, f"make {name}", [code], [out], needs=list(needs), reads=[] if reads is None else reads, **options)

    def go(self, *jobs, slots=2) -> str:
        """Run them; returns what was said."""
        console = Console(file=io.StringIO(), width=200)
        (self.folder / "trace").write_text("")
        self.pipeline = Pipeline(self.run, list(jobs), slots=slots, console=console)
        try:
            self.pipeline.run()
        finally:
            self.said = console.file.getvalue()
        return self.said

    @property
    def trace(self) -> list[str]:
        return (self.folder / "trace").read_text().splitlines()

    def started(self) -> list[str]:
        return [line.split()[1] for line in self.trace if line.startswith("start")]


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    return Scripts(tmp_path, monkeypatch)


def test_jobs_run_after_what_they_need(scripts):
    said = scripts.go(scripts.job("a"), scripts.job("b"), scripts.job("c", needs=["a", "b"]), scripts.job("d", needs=["c"]))
    trace = scripts.trace
    assert trace.index("start c") > max(trace.index("end a"), trace.index("end b"))
    assert trace.index("start d") > trace.index("end c")
    for words in ("[1/4] make a", "[4/4] make d", "all that is left: about", "d done in", "d is made"):
        assert words in said
    assert set(scripts.pipeline.seconds) == {"a", "b", "c", "d"} and scripts.pipeline.wall_seconds > 0


def test_an_exclusive_job_runs_alone(scripts):
    wait = "time.sleep(0.3)"
    scripts.go(scripts.job("a", wait), scripts.job("b", wait, exclusive=True), scripts.job("c", wait), slots=3)
    trace = scripts.trace
    place = trace.index("start b")
    assert trace[place + 1] == "end b" and "end a" in trace[:place] and "start c" in trace[place:]


def test_only_so_many_jobs_at_once(scripts):
    scripts.go(*(scripts.job(n, "time.sleep(0.1)") for n in "abcde"), slots=2)
    running = most = 0
    for line in scripts.trace:
        running += 1 if line.startswith("start") else -1
        most = max(most, running)
    assert most == 2


def test_what_is_there_is_reused_until_something_it_depends_on_changes(scripts):
    def jobs(a=1, b=1, c=1):
        return (scripts.job("a", reads=[a]), scripts.job("b", reads=[b]), scripts.job("c", needs=["a"], reads=[c]),
                scripts.job("d", needs=["b", "c"]))
    scripts.go(*jobs())
    wall = scripts.pipeline.wall_seconds
    assert "4 of 4 stages are already there" in scripts.go(*jobs()) and scripts.started() == []
    assert scripts.pipeline.wall_seconds == pytest.approx(wall), "the time of the run that made it, not of looking at it"
    assert scripts.go(*jobs(c=2)) and scripts.started() == ["c", "d"]
    assert scripts.go(*jobs(a=2, c=2)) and scripts.started() == ["a", "c", "d"]
    (scripts.run / "b.out").unlink()
    assert scripts.go(*jobs(a=2, c=2)) and scripts.started() == ["b", "d"]
    (scripts.run / "jobs" / "a.json").write_text("{ torn")
    assert scripts.go(*jobs(a=2, c=2)) and scripts.started() == ["a", "c", "d"]
    assert {(scripts.run / f"{n}.out").read_text() for n in "abcd"} == {"made"}, "old outputs go before a job runs again"


def test_without_reads_the_arguments_count(scripts):
    first = dataclasses.replace(scripts.job("a"), reads=None)
    scripts.go(first)
    scripts.go(first)
    assert scripts.started() == []
    scripts.go(dataclasses.replace(first, arguments=[first.arguments[0] + "\n# another"]))
    assert scripts.started() == ["a"]


def test_outputs_outside_the_run_are_never_removed(scripts):
    mine = scripts.folder / "mine"
    mine.mkdir()
    (mine / "precious").write_text("mine")
    job = dataclasses.replace(scripts.job("a", f"open({str(mine / 'new')!r}, 'w')"), outputs=[mine])
    scripts.go(job)
    assert (mine / "precious").read_text() == "mine" and (mine / "new").exists()


def test_a_failure_shows_its_last_words_and_ends_the_rest(scripts):
    endless = scripts.job("endless", "time.sleep(600)")
    broken = scripts.job("broken", "time.sleep(0.5); print('the disk is on fire'); sys.exit(3)")
    start = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        scripts.go(scripts.job("good"), endless, broken, scripts.job("later", needs=["broken"]), slots=3)
    assert time.monotonic() - start < 60
    message = str(caught.value)
    assert "broken failed (exit status 3)" in message and "the disk is on fire" in message and "broken.log" in message
    assert "later" not in scripts.started() and "end endless" not in scripts.trace
    assert (scripts.run / "jobs" / "good.json").exists() and not (scripts.run / "jobs" / "broken.json").exists()
    scripts.go(scripts.job("good"), scripts.job("endless"), scripts.job("broken"), scripts.job("later", needs=["broken"]))
    assert sorted(scripts.started()) == ["broken", "endless", "later"], "what was finished before the failure is kept"


def test_a_job_that_leaves_nothing_is_a_failure(scripts):
    job = dataclasses.replace(scripts.job("a"), outputs=[scripts.run / "other"])
    with pytest.raises(JobFailed, match="ended well but left no"):
        scripts.go(job)


def test_two_pipelines_in_one_folder_are_refused(scripts):
    import fcntl
    (scripts.run / "jobs").mkdir(parents=True)
    with open(scripts.run / "jobs" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(JobFailed, match="another process is at work in .*run"):
            scripts.go(scripts.job("a"))
    scripts.go(scripts.job("a"))
    assert scripts.started() == ["a"]


def test_wrong_job_lists_are_refused(tmp_path):
    job = Job("a", "", [], [])
    with pytest.raises(ValueError, match="same name"):
        Pipeline(tmp_path, [job, job])
    with pytest.raises(ValueError, match="must stand before"):
        Pipeline(tmp_path, [dataclasses.replace(job, needs=["b"])])


def test_what_is_left_is_played_through(tmp_path):
    jobs = [Job("a", "", [], [], seconds=10), Job("b", "", [], [], seconds=4), Job("c", "", [], [], needs=["b"], seconds=5),
            Job("d", "", [], [], needs=["a", "c"], seconds=7, exclusive=True)]
    two, one = (Pipeline(tmp_path, jobs, slots=n) for n in (2, 1))
    assert two.left(set(), {}) == 10 + 7 and one.left(set(), {}) == 26
    assert two.left({"a", "b"}, {}) == 12
    two.pace = 2.0
    assert two.left(set(), {}) == 34


PARENT = """
import signal, sys
from pathlib import Path
from mopd.pipeline import Job, Pipeline
signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests in the background has it ignored
run = Path(sys.argv[1])
options = ["run=" + str(run), "domains.embodied.demonstrations=20000", "domains.embodied.novice_episodes=0"]
out = run / "t.jsonl"
job = Job("play", "play", ["demonstrate", sys.argv[2], *options, "--domain", "embodied", "--out", str(out)], [out])
Pipeline(run, [job]).run()
"""


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_ends_takes_its_jobs_along(tmp_path, sent):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), str(REPOSITORY / "configs" / "tiny.yaml")],
                              env=environment(), stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    progress, deadline = tmp_path / "jobs" / "play.progress", time.monotonic() + 200
    while not progress.exists() and time.monotonic() < deadline:
        assert parent.poll() is None
        time.sleep(0.05)
    (job,) = children(parent.pid)
    assert alive(job)
    parent.send_signal(sent)
    assert parent.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while alive(job) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(job), "the job outlived the pipeline that started it"
    assert not (tmp_path / "jobs" / "play.json").exists() and not (tmp_path / "t.jsonl").exists()


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


# What the demo's stages depend on


def keys(*overrides, config: Path = DEMO, study: bool = False, tmp=Path("unused")) -> dict[str, str]:
    """Job → key of the demo's stages for a config; nothing is run."""
    overrides = [f"run={tmp}", *overrides]
    loaded = load_config(config, overrides)
    stages = Stages(config, overrides, loaded)
    jobs = [*stages.foundation(), *stages.student(loaded.train.name, [], loaded.seeds), stages.off_policy(1)]
    jobs += stages.evaluation(Path(loaded.run), [f"{loaded.train.name}@{s}" for s in loaded.seeds], [])
    return Pipeline(tmp, jobs).keys


@pytest.fixture
def stages(tmp_path):
    before = keys(tmp=tmp_path)

    def changed(*overrides) -> set[str]:
        after = keys(*overrides, tmp=tmp_path)
        return {name for name in before if after.get(name) != before[name]}
    changed.all = set(before)
    return changed


def kinds(names) -> set[str]:
    return {name.removesuffix("_1").removesuffix("_2").split("_")[0] if name.startswith(("collect", "demonstrate", "teacher"))
            else "eval students" if name.startswith("eval_students") else "eval teachers" if name.startswith("eval_teachers")
            else name.removesuffix("_1").removesuffix("_2") for name in names}


EVERYTHING_AFTER_IMPORT = {"import", "teacher", "collect", "average", "student_mixed", "off_policy_sft", "eval teachers",
                           "eval students"}


@pytest.mark.parametrize("override, again", [
    ("train.steps=7", {"student_mixed", "eval students"}),
    ("train.objective=jsd", {"student_mixed", "eval students"}),
    ("selection.strategy=geometric", {"student_mixed", "eval students"}),
    ("domains.game.share=2", {"base", *EVERYTHING_AFTER_IMPORT}),
    ("domains.game.prefix_fraction=0.2", {"student_mixed", "eval students"}),
    ("evaluate.split=development", {"eval teachers", "eval students"}),
    ("evaluate.temperature=1", {"eval teachers", "eval students"}),
    ("off_policy.steps=7", {"off_policy_sft"}),
    ("base.layers=3", {"base", *EVERYTHING_AFTER_IMPORT}),
    ("sft.steps=7", EVERYTHING_AFTER_IMPORT),
    ("collect.temperature=0.5", EVERYTHING_AFTER_IMPORT),
    ("domains.game.max_turn_tokens=5", EVERYTHING_AFTER_IMPORT),
    ("domains.game.teacher_episodes=5", EVERYTHING_AFTER_IMPORT),
    ("domains.game.demonstrations=5", {"demonstrate", "base", *EVERYTHING_AFTER_IMPORT}),
    ("domains.game.system_prompt=hello", {"demonstrate", "base", *EVERYTHING_AFTER_IMPORT}),
    ("novice.random_share=0.1", {"demonstrate", "base", *EVERYTHING_AFTER_IMPORT}),
    ("deepspeed.zero_stage=1", {"base", *EVERYTHING_AFTER_IMPORT}),
    ("student.freeze_router=false", EVERYTHING_AFTER_IMPORT),
    ("threads=1", set()),
    ("domains.game.workers=1", set()),
    ("domains.game.environments=5", set()),
    ("study.seeds=[5]", set()),
])
def test_a_key_reruns_what_depends_on_it_and_nothing_else(stages, override, again):
    assert kinds(stages(override)) == again


def test_the_seed_reruns_everything(stages):
    assert stages("seed=9") == stages.all


def test_one_domains_demonstrations_leave_the_others_alone(stages):
    changed = stages("domains.game.novice_episodes=5")
    assert "demonstrate_game" in changed and "demonstrate_science" not in changed
    assert {"eval_teachers_science"} <= changed


def test_every_key_of_the_config_is_accounted_for(tmp_path, monkeypatch):
    """A key that no stage's record holds would leave an old result in place of a new one."""
    idle = {"run", "store", "threads", "seeds", "evaluate.out", "domains.*.environments", "domains.*.workers",
            "domains.*.worker_processes", "domains.*.step_timeout_s", "domains.*.reset_timeout_s", "domains.*.recycle_after",
            "domains.*.worker_memory_mib",
            "consistency.points", "consistency.threshold"}  # what a launch says of its teachers changes nothing
    idle |= {f"sampling.{key}" for key in WITHOUT_EFFECT}
    config = load_config(DEMO, [f"run={tmp_path}"])
    monkeypatch.setattr("mopd.demo.load_config", lambda path, overrides: config)

    def made():
        stages = Stages(DEMO, [], config)
        jobs = [*stages.foundation(), *stages.student(config.train.name, [], config.seeds), stages.off_policy(1)]
        jobs += stages.evaluation(tmp_path, [f"{config.train.name}@{seed}" for seed in config.seeds], [])
        return Pipeline(tmp_path, jobs).keys

    before, missed, tried = made(), [], 0
    for owner, key, path in leaves(config):
        general = ".".join("*" if number == 1 and path[0] == "domains" else part for number, part in enumerate(path))
        sections = ("study", "study_prefix", "teachers", "placement")  # the last says where things are computed
        if general in idle or path[0] in sections or general in ("student.model", "domains.*.teacher"):
            continue
        get, put = (dict.get, dict.__setitem__) if isinstance(owner, dict) else (getattr, setattr)
        value = get(owner, key)
        put(owner, key, not value if isinstance(value, bool) else value + 1 if isinstance(value, int | float) else
            {"other": 1} if isinstance(value, dict) else [5.5] if isinstance(value, list) else "other")
        if made() == before:
            missed.append(".".join(path))
        put(owner, key, value)
        tried += 1
    assert missed == [] and tried > 100 and made() == before


def leaves(node, path=()):
    """(owner, key, path) of every value that is no section; of mappings by name, the entries that are there."""
    names = node if isinstance(node, dict) else [field.name for field in dataclasses.fields(node)]
    for name in list(names):
        value = node[name] if isinstance(node, dict) else getattr(node, name)
        inside = list(value.values()) if isinstance(value, dict) else [value]
        if any(map(dataclasses.is_dataclass, inside)):
            yield from leaves(value, (*path, name))
        elif (*path, name) != ("sft_domains",):
            yield node, name, (*path, name)


def test_a_model_of_the_users_own_is_taken_as_it_is(tmp_path):
    def made(*overrides):
        overrides = [f"run={tmp_path / 'run'}", *overrides]
        config = load_config(DEMO, overrides)
        foundation = Stages(DEMO, overrides, config).foundation()
        evaluation = Stages(DEMO, overrides, config).evaluation(Path(config.run), ["student_mixed@1"], [])
        Pipeline(tmp_path / "run", [*foundation, *Stages(DEMO, overrides, config).student("student_mixed", [], [1]),
                                    *evaluation])  # refuses a job whose inputs are missing
        return [job.name for job in foundation], evaluation[0].arguments
    names, _ = made()
    assert "base" in names and "teacher_game" in names and "average" in names
    names, arguments = made("student.model=my/own")
    assert "base" not in names and "teacher_game" in names and "base=my/own" in arguments
    names, arguments = made("teachers.game.model=my/teacher")
    assert "teacher_game" not in names and "teacher_science" in names and "average" not in names
    assert "teacher_game=my/teacher" in arguments and not any("parameter_average" in a for a in arguments)


def test_one_teacher_of_two_domains_learns_from_both(tmp_path):
    overrides = [f"run={tmp_path}", "domains.science.teacher=game"]
    jobs = {job.name: job for job in Stages(DEMO, overrides, load_config(DEMO, overrides)).foundation()}
    arguments = jobs["teacher_game"].arguments
    assert [arguments[i + 1] for i, word in enumerate(arguments) if word == "--domain"] == ["game", "science"]
    assert "teacher_science" not in jobs and jobs["collect_science"].needs == ["teacher_game"]


def test_fresh_deletes_only_the_folder_of_a_run(tmp_path):
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis").write_text("years of work")
    for run in (tmp_path / "documents", Path.cwd(), Path.cwd().parent):
        with pytest.raises(ValueError, match="is not the folder of an earlier run"):
            run_demo(DEMO, [f"run={run}"], quick=False, fresh=True)
    assert (tmp_path / "documents" / "thesis").exists() and os.path.exists(DEMO)


def test_an_old_record_without_a_span_still_counts(tmp_path):
    job = Job("a", "", ["x"], [])
    pipeline = Pipeline(tmp_path, [job])
    (tmp_path / "jobs" / "a.json").write_text(json.dumps({"key": pipeline.keys["a"], "seconds": 5.0}))
    assert pipeline.finished(job) and pipeline.wall_seconds == 5.0
    assert isinstance(load_config(DEMO), Config)
