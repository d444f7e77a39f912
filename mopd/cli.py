"""The command line. Each command checks its input before it loads anything heavy; the work is done elsewhere.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration, 128 + N ended by signal N.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from mopd.store_commands import StorageOptions, storage_options
from mopd.store_commands import app as store_app

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Merge domain-expert language models into one student (MOPD²).")
teacher_app = typer.Typer(no_args_is_help=True, help="Make and serve domain teachers.")
app.add_typer(teacher_app, name="teacher")
app.add_typer(store_app, name="store")
console = Console(stderr=True, highlight=False)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file; configs/ holds ready ones")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example train.steps=100 seed=2")]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON")]
KeyVariable = Annotated[str | None, typer.Option(help="Environment variable that holds the key")]
MemoryShare = Annotated[float | None, typer.Option(help="Share of the GPU's memory")]
RemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run code of the model's folder")]
VLLMArguments = Annotated[list[str] | None, typer.Option(help="A further argument of vLLM, as --vllm=--enforce-eager")]
Listen = Annotated[str, typer.Option(help="Where to listen; beyond this machine only if you say so")]
DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"
SIMULATE = DEMO.with_name("simulate.yaml")


# What the system refuses and no bug can be: a traceback would only hide which path it was.
_OF_THE_SYSTEM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR)


class WrongUsage(ValueError):
    """An argument that does not fit; shown without a traceback."""


def load(path: Path, overrides: list[str] | None, *, plays: bool = True):
    """The checked configuration with the number of threads applied; torch is not imported yet."""
    from mopd.config import load_config

    config = load_config(path, overrides or [], plays=plays)
    if config.threads:
        os.environ["OMP_NUM_THREADS"] = str(config.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return config


@app.command()
def demo(overrides: Overrides = None,
         config: Annotated[Path, typer.Option(help="The recipe")] = DEMO,
         quick: Annotated[bool, typer.Option("--quick", help="The same stages at a small size, in minutes")] = False,
         fresh: Annotated[bool, typer.Option("--fresh", help="Throw earlier results of this run away")] = False):
    """Three real teachers merged into one student: environments, base model, teachers, store, MOPD², result."""
    from mopd.demo import run_demo

    run_demo(config, overrides or [], quick=quick, fresh=fresh)


@app.command()
def study(overrides: Overrides = None,
          config: Annotated[Path, typer.Option(help="The recipe")] = DEMO,
          quick: Annotated[bool, typer.Option("--quick")] = False,
          fresh: Annotated[bool, typer.Option("--fresh", help="Throw earlier results of this study away")] = False):
    """The ablation on the demo's teachers: rollouts only, prefixes only, mixed, and supervised training."""
    from mopd.demo import run_study

    run_study(config, overrides or [], quick=quick, fresh=fresh)


@app.command("study-prefix")
def study_prefix(overrides: Overrides = None,
                 config: Annotated[Path | None, typer.Option(help="The recipe; by default configs/study_prefix.yaml")] = None,
                 quick: Annotated[bool, typer.Option("--quick", help="A few arms at a small size, in minutes")] = False,
                 fresh: Annotated[bool, typer.Option("--fresh", help="Throw earlier results of this study away")] = False):
    """Which stored prefixes, how many fresh turns, whose: every combination on the demo's teachers, at an equal budget."""
    from mopd.study_prefix import run_study_prefix

    run_study_prefix(config, overrides or [], quick=quick, fresh=fresh)


@app.command("study-prefix-runs", hidden=True)
def study_prefix_runs(config: ConfigPath, overrides: Overrides = None,
                      run: Annotated[list[str] | None, typer.Option(help="ARM@SEED=KEY; may be repeated")] = None,
                      marker: Annotated[Path, typer.Option(help="File written at the end")] = Path("runs.json")):
    """A part of the prefix study in one process."""
    from mopd.study_prefix import run_arms

    load(config, overrides)
    run_arms(config, overrides or [], run or [], marker)


@app.command()
def demonstrate(config: ConfigPath, overrides: Overrides = None,
                domain: Annotated[str, typer.Option(help="Which domain's expert plays")] = "",
                out: Annotated[Path, typer.Option(help="JSON lines of transcripts")] = Path("transcripts.jsonl")):
    """Experts play a domain's training tasks; transcripts as JSON lines, no model involved."""
    from mopd.domains import demonstrate_domain

    demonstrate_domain(load(config, overrides), need_domain(config, overrides, domain), out)


@app.command()
def base(config: ConfigPath, overrides: Overrides = None,
         transcripts: Annotated[list[Path] | None, typer.Option(help="Transcripts to learn from; may be repeated")] = None,
         out: Annotated[Path, typer.Option(help="Hugging Face folder to make")] = Path("base")):
    """Train a tokenizer and pre-train a tiny Mixture-of-Experts base model on transcripts."""
    from mopd.base_model import make_base

    make_base(load(config, overrides), transcripts or [], out)


@app.command("import")
def import_command(
    sources: Annotated[list[str] | None, typer.Argument(
        metavar="FILE… | CONFIG.yaml [key=value…]", help="Files or folders, and a configuration if there is one")] = None,
    file: Annotated[list[Path] | None, typer.Option(help="A file or folder; may be repeated")] = None,
    store: Annotated[str | None, typer.Option(help="Folder or URL of the store; by default the configuration's")] = None,
    model: Annotated[str | None, typer.Option(help="Folder with tokenizer and chat template; or the student's")] = None,
    domain: Annotated[str, typer.Option(help="Domain of rows that name none")] = "",
    format: Annotated[str, typer.Option(help="auto recognises it; `--format list` says what there is")] = "auto",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Refuse rows whose context is longer")] = None,
    expert_only: Annotated[bool, typer.Option(help="Of transcripts, only episodes that an expert played alone")] = True,
    success_only: Annotated[bool, typer.Option("--success-only", help="Refuse rows that failed")] = False,
    success_reward: Annotated[float, typer.Option(help="A row with a reward alone succeeded from this on")] = 1.0,
    system: Annotated[str | None, typer.Option(help="System prompt of rows that have none")] = None,
    tools_as_text: Annotated[bool, typer.Option(
        "--tools-as-text", help="Tool lists, calls and results as <tool_call> text, for templates without tools")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Import nothing if any row is refused")] = False,
    report: Annotated[Path | None, typer.Option(help="File for every row that was not taken, as JSON")] = None,
    storage_option: StorageOptions = None, as_json: Json = False,
):
    """Put demonstrations into the prefix store, rendered by a model's chat template."""
    from mopd.importing import import_from_config, run_import

    if format == "list":
        from prefix_store.importers.formats import known_formats

        print(known_formats())
        return
    configs, overrides, files = [], [], [str(path) for path in file or []]
    for source in sources or []:
        if source.endswith((".yaml", ".yml")):
            configs.append(Path(source))
        elif "=" in source and not Path(source).exists():
            overrides.append(source)
        else:
            files.append(source)
    if len(configs) > 1 or (overrides and not configs):
        raise WrongUsage(f"one configuration and its key=value, please, not {', '.join(map(str, configs)) or overrides[0]}")
    options = {"format": format, "expert_only": expert_only, "success_only": success_only,
               "success_reward": success_reward, "system": system,
               "tools_as_text": tools_as_text, "strict": strict, "report": report, "as_json": as_json,
               **storage_options(storage_option)}
    if configs:
        code = import_from_config(load(configs[0], overrides), files, domain or None, store=store, model=model,
                                  max_tokens=max_tokens, **options)
    elif store is None:
        raise WrongUsage("--store: name the store, or a configuration (*.yaml) that does")
    else:
        code = run_import(files, store, model, domain=domain or None, max_tokens=max_tokens, **options)
    if code:
        raise typer.Exit(code)


@teacher_app.command("sft")
def teacher_sft(config: ConfigPath,
                words: Annotated[list[str] | None, typer.Argument(metavar="[DOMAIN…] [key=value…]",
                                                                  help="Whose demonstrations are learnt; overrides")] = None,
                domain: Annotated[list[str] | None, typer.Option(help="Domain(s) whose demonstrations are learnt")] = None,
                out: Annotated[Path, typer.Option(help="Hugging Face folder to make")] = Path("teacher"),
                baseline: Annotated[bool, typer.Option(help="The off-policy baseline: config section off_policy")] = False,
                ranks: Annotated[int, typer.Option(min=1, help="Processes to start here; else see docs/distributed.md")] = 1):
    """Supervised training on demonstrations (of a store, files or experts), from the student's start, router frozen."""
    from mopd.ranks import leave, start_on_this_machine
    from teachers.sft import check_layout, run_sft

    loaded = load(config, [word for word in words or [] if "=" in word], plays=False)
    domains = list(dict.fromkeys([*(word for word in words or [] if "=" not in word), *(domain or [])]))
    for name in domains:
        known_domain(loaded, name)
    if ranks > 1:
        _no_launcher()
        check_layout(loaded)
        chosen = [f"--domain={name}" for name in domain or []]
        start_on_this_machine(ranks, ["teacher", "sft", str(config), *(words or []), *chosen, "--out", str(out),
                                      *(["--baseline"] if baseline else [])])
    run_sft(loaded, domains or list(loaded.domains), out, baseline=baseline)
    leave()


@teacher_app.command("compare")
def teacher_compare(config: ConfigPath, overrides: Overrides = None,
                    domain: Annotated[list[str] | None, typer.Option(help="Only these domains")] = None,
                    as_json: Json = False):
    """How far every teacher is from the student's start: the reverse KL per token on the student's own samples."""
    from mopd.check import compare_teachers
    from teachers.consistency import print_distances

    loaded = load(config, overrides)
    for name in domain or []:
        known_domain(loaded, name)
    found = compare_teachers(loaded, domain or list(loaded.domains))
    if as_json:
        print(json.dumps([distance.as_json() for distance in found]))
    else:
        print_distances(found)


@teacher_app.command("serve")
def teacher_serve(
    source: Annotated[str, typer.Argument(metavar="MODEL | CONFIG.yaml", help="Model folder or hub id, or a configuration")],
    teacher: Annotated[str, typer.Argument(help="Which teacher of the configuration; of a model, its name")] = "",
    host: Listen = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default the configuration's, or 8000")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; by default the checkpoint's own")] = None,
    api_key_env: KeyVariable = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context; by default the model's")] = None,
    max_logprobs: Annotated[int | None, typer.Option(min=1, help="Most log-probabilities of a position")] = None,
    batch_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of one forward; fewer take less memory")] = None,
    cache_gib: Annotated[int, typer.Option(min=1, help="Memory of the cache, without a GPU")] = 1,
    memory_share: MemoryShare = None,
    trust_remote_code: RemoteCode = False,
    vllm: VLLMArguments = None,
    as_json: Json = False,
):
    """Serve a teacher with vLLM until Ctrl-C; prints the lines for your configuration when it is ready."""
    from teachers.serve import ServeOptions, options_from_config, serve

    given = {"host": host, "port": port, "dtype": dtype, "api_key_env": api_key_env, "max_model_len": max_model_len,
             "max_logprobs": max_logprobs, "batch_tokens": batch_tokens, "cache_gib": cache_gib,
             "memory_share": memory_share, "trust_remote_code": trust_remote_code or None, "extra": tuple(vllm or ())}
    if source.endswith((".yaml", ".yml")):
        if not teacher:
            raise WrongUsage("name the teacher of the configuration that is to be served: mopd teacher serve CONFIG TEACHER")
        options = options_from_config(load(Path(source), None), teacher, **given)
    else:
        name = teacher or Path(source).name
        options = ServeOptions(source, name, **{key: value for key, value in given.items() if value is not None})
    if code := serve(options, as_json=as_json):
        raise typer.Exit(code)


@app.command()
def serve(
    source: Annotated[str, typer.Argument(metavar="MODEL | CONFIG.yaml", help="Model folder or hub id, or a configuration")],
    number: Annotated[int, typer.Option(min=0, help="Which of the configuration's sampling.urls, from 0")] = 0,
    name: Annotated[str | None, typer.Option(help="The name under which it is served; by default student")] = None,
    host: Listen = "127.0.0.1",
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="By default the configuration's, or 8000")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; by default the configuration's")] = None,
    api_key_env: KeyVariable = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context; by default what domains need")] = None,
    max_logprobs: Annotated[int | None, typer.Option(min=1, help="Most ids that it tells of a token, for top-k")] = None,
    cache_gib: Annotated[int | None, typer.Option(min=1, help="Memory of the cache, without a GPU")] = None,
    memory_share: MemoryShare = None,
    trust_remote_code: RemoteCode = False,
    vllm: VLLMArguments = None,
    as_json: Json = False,
):
    """Serve the student with vLLM until Ctrl-C, for a run with sampling.engine=server: it samples and takes new weights."""
    from teachers import serve as serving
    from teachers.serve_student import student_options

    given = {"name": name, "host": host, "port": port, "dtype": dtype, "api_key_env": api_key_env,
             "max_model_len": max_model_len, "max_logprobs": max_logprobs, "cache_gib": cache_gib,
             "memory_share": memory_share, "trust_remote_code": trust_remote_code or None, "extra": tuple(vllm or ())}
    config = load(Path(source), None) if source.endswith((".yaml", ".yml")) else None
    if code := serving.serve(student_options(source, config=config, number=number, **given), as_json=as_json):
        raise typer.Exit(code)


@app.command()
def collect(config: ConfigPath, overrides: Overrides = None,
            domain: Annotated[list[str] | None, typer.Option(help="Only these domains; may be repeated")] = None,
            as_json: Json = False):
    """Teachers (or experts) play their domains' training tasks; what passes the filters goes into the prefix store."""
    from teachers import collect as collecting

    loaded = load(config, overrides)
    for name in domain or []:
        known_domain(loaded, name)
    names = list(dict.fromkeys(domain or loaded.domains))
    records = collecting.collect(loaded, names, lambda name: ["collect", str(config), *(overrides or []), "--domain", name],
                                 quiet=as_json)
    if as_json:
        print(json.dumps([collecting.public(record) for record in records]))
    elif len(records) > 1:
        collecting.print_summary(records)


def _no_launcher() -> None:
    if "RANK" in os.environ:
        raise WrongUsage("--ranks starts the processes of a job itself; under torchrun or another launcher leave it out")


def _known_resume(resume: str) -> None:
    if resume not in ("auto", "never"):
        raise WrongUsage(f"--resume {resume}: auto goes on from the last checkpoint, if there is one; never starts anew")


@app.command()
def train(config: ConfigPath, overrides: Overrides = None,
          resume: Annotated[str, typer.Option(help="auto: go on, unless the run is finished; never: start anew")] = "auto",
          rollback: Annotated[int, typer.Option(min=0, help="Go back this many steps first, to a kept checkpoint")] = 0,
          ranks: Annotated[int, typer.Option(min=1, help="Processes to start here; else see docs/distributed.md")] = 1):
    """The MOPD² run: sample, score, train; writes the student, its metrics and its checkpoints."""
    loaded = load(config, overrides)
    _known_resume(resume)
    if rollback and resume == "never":
        raise WrongUsage("--rollback goes on from a checkpoint, and --resume never from none; leave one of them out")
    use_devices(loaded.placement.learner.devices)
    if ranks > 1:
        _no_launcher()
        from mopd.ranks import start_on_this_machine

        start_on_this_machine(ranks, ["train", str(config), *(overrides or []), "--resume", resume,
                                      "--rollback", str(rollback)])
    from mopd.ranks import leave
    from mopd.run import train as run_training
    from mopd.signals import Stopped

    try:
        run_training(loaded, resume=resume == "auto", rollback=rollback)
    except Stopped:  # all ranks were
        leave()
        raise
    leave()


@app.command()
def launch(config: ConfigPath, overrides: Overrides = None,
           hosts: Annotated[Path | None, typer.Option(help="Hostfile: a machine a line, as `node-1 slots=8`")] = None,
           slurm: Annotated[bool, typer.Option("--slurm", help="Write an sbatch file and hand it in")] = False,
           by: Annotated[str, typer.Option(help="torchrun or deepspeed: what starts the learner's processes")] = "torchrun",
           dry_run: Annotated[bool, typer.Option("--dry-run", help="Only write and print the commands")] = False,
           out: Annotated[Path | None, typer.Option(help="Folder for scripts and logs; else RUN/launch")] = None,
           port: Annotated[int, typer.Option(min=1, max=65535, help="Where the learner's processes meet")] = 29500,
           restarts: Annotated[int, typer.Option(min=0, help="Of servers, and of the learner, before the job ends")] = 5,
           start_s: Annotated[float, typer.Option(min=1, help="Seconds that a server may take to answer")] = 1800.0,
           resume: Annotated[str, typer.Option(help="auto or never, as of mopd train")] = "auto",
           sbatch: Annotated[list[str] | None, typer.Option(help="A line for Slurm, as --sbatch=--partition=gpu")] = None):
    """A training run on several machines, as `placement` lays it out: servers, then the learner's processes; kept running."""
    from mopd.launch import read_hosts
    from mopd.launch_run import launch as run_launch

    if (hosts is None) == (not slurm):
        raise WrongUsage("name the machines by --hosts FILE, or say --slurm")
    if slurm and by != "torchrun" or sbatch and not slurm:
        raise WrongUsage(f"--by {by} is not for --slurm, where torchrun starts the learner's processes; leave it out" if slurm
                         else "--sbatch is a line for Slurm's file; say --slurm, or leave it out")
    _known_resume(resume)
    code = run_launch(load(config, overrides), read_hosts(hosts) if hosts else [], slurm=slurm, by=by, place=out,
                      dry_run=dry_run, port=port, restarts=restarts, start_s=start_s, resume=resume, options=sbatch or [])
    if code:
        raise typer.Exit(code)


@app.command("export")
def export_command(
    sources: Annotated[list[Path], typer.Argument(metavar="RUN | MODEL…", help="A run's folder; else models")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to make")],
    step: Annotated[int | None, typer.Option(min=0, help="Its checkpoint; else the finished student, or the newest")] = None,
    best: Annotated[bool, typer.Option("--best", help="Its best checkpoint by train.keep_best")] = False,
    average: Annotated[bool, typer.Option("--average", help="The mean of models, a baseline")] = False,
    interpolate: Annotated[bool, typer.Option("--interpolate", help="Between two models, by --weight")] = False,
    weight: Annotated[float, typer.Option(min=0, max=1, help="Of the second model, with --interpolate")] = 0.5,
    shard_size: Annotated[str, typer.Option(help="Largest weight file")] = "2GB",
    as_json: Json = False,
):
    """A student of a checkpoint or a finished run, or a mean of models, as a Hugging Face folder; read back and compared."""
    if average and interpolate:
        raise WrongUsage("--average and --interpolate are two things; name one")
    if interpolate and len(sources) != 2:
        raise WrongUsage(f"--interpolate takes two models, not {len(sources)}")
    if (average or interpolate) and (step is not None or best):
        raise WrongUsage(f"--{'best' if best else 'step'} belongs to a run's folder; export that first, then take its mean "
                         "with others")
    if best and step is not None:
        raise WrongUsage("--step and --best are two checkpoints; name one")
    if not (average or interpolate) and len(sources) != 1:
        raise WrongUsage("one run's folder, please; or say --average or --interpolate with models")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that it can run beside a training
    from mopd import export_model

    if average or interpolate:
        result = export_model.export_mean(sources, out, weights=[1 - weight, weight] if interpolate else None,
                                          shard_size=shard_size)
    else:
        export_model.check_target(out, shard_size)
        student = export_model.student_folder(sources[0])
        steps, folder = export_model.source(student, step, best=best)
        ranks = export_model.ranks_of(folder)
        if ranks > 1 and "RANK" not in os.environ:
            from mopd.ranks import start_on_this_machine

            start_on_this_machine(ranks, ["export", str(student), "--step", str(steps), "--out", str(out), "--shard-size",
                                          shard_size, *(["--json"] if as_json else [])])
        result = export_model.export_student(student, step, out, best=best, shard_size=shard_size)
        from mopd.ranks import leave

        leave()
    if result and as_json:
        print(json.dumps(result))
    elif result:
        what = f"step {result['step']}" if "step" in result else "the mean"
        print(f"result: {what} in {out}, {len(result['files'])} weight file(s); read back, its log-probabilities differ by "
              f"at most {result['largest_difference']:.2g} nats")


@app.command(hidden=True)
def average(models: Annotated[list[Path], typer.Argument(help="Hugging Face folders of one architecture")],
            out: Annotated[Path, typer.Option(help="Folder to make")]):
    """As `export --average`."""
    export_command(models, out, average=True)


@app.command("eval")
def evaluate_command(config: ConfigPath, overrides: Overrides = None,
                     model: Annotated[list[str] | None, typer.Option(help="NAME=FOLDER; may be repeated")] = None,
                     domain: Annotated[list[str] | None, typer.Option(help="Only these domains")] = None,
                     as_json: Json = False):
    """Play held-out tasks with one or more models, the same seeds for each."""
    from mopd.evaluate import evaluate_models

    loaded = load(config, overrides)
    models = {}
    for item in model or [f"student={loaded.student.model}"]:
        name, _, folder = item.partition("=")
        if not folder:
            raise WrongUsage(f"--model {item}: write NAME=FOLDER")
        models[name] = folder
    for name in domain or []:
        need_domain(config, overrides, name)
    result = evaluate_models(loaded, models, domain or list(loaded.domains), report=not as_json)
    if as_json:
        print(json.dumps(result))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, as_json: Json = False,
          estimate: Annotated[bool, typer.Option("--estimate", help="Only memory and time, from config.json")] = False):
    """Check a configuration with everything it names: models, tokenizers, teachers, store, environments; estimate memory."""
    from mopd.config import ConfigError

    try:
        loaded = load(config, overrides)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"errors": error.errors, "warnings": [], "domains": {}, "teachers": {}}))
            raise typer.Exit(2) from None
        raise
    if estimate:
        from mopd.check_estimate import estimate_record, print_estimate

        record = estimate_record(loaded)
        print(json.dumps(record)) if as_json else print_estimate(record, Console(highlight=False))
        raise typer.Exit(2 if "unknown" in record else 0)
    from mopd.check import check_launch, print_check

    result = check_launch(loaded)
    if as_json:
        print(json.dumps(result))
    else:
        print_check(result)
    if result["errors"]:
        raise typer.Exit(2)


@app.command()
def selftest(config: ConfigPath, overrides: Overrides = None, as_json: Json = False):
    """Prove the training signal on your own student, teachers and objective: alignment, masks, identity, splits."""
    import dataclasses

    loaded = load(config, overrides)
    from mopd.run import selftest_run
    from mopd.selftest import print_checks

    checks = selftest_run(loaded)
    if as_json:
        print(json.dumps([dataclasses.asdict(check) for check in checks]))
    else:
        print_checks(checks)
    if any(check.passed is False for check in checks):
        raise typer.Exit(1)


@app.command()
def report(run: Annotated[Path, typer.Argument(help="A run's folder")], as_json: Json = False,
           markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown")] = False):
    """Write results.json and report.html of a run and print its table."""
    from mopd.report import markdown_table, print_results, write_report

    if not run.is_dir():
        raise WrongUsage(f"{run}: no such run folder; `mopd demo` makes runs/demo")
    # A study's students lie in the run that it belongs to.
    beside = run.parent / "students"
    page = write_report(run, students=beside if run.name == "study" and beside.is_dir() else None)
    results = json.loads((run / "results.json").read_text())
    if as_json:
        print(json.dumps(results))
    elif markdown:
        print(markdown_table(results))
    else:
        print_results(results, Console(highlight=False))
        console.print(f"Report: {page}", soft_wrap=True)


@app.command()
def simulate(config: Annotated[Path, typer.Argument(help="What to simulate; configs/simulate*.yaml are examples")] = SIMULATE,
             overrides: Overrides = None,
             plot: Annotated[Path | None, typer.Option(help="Picture to write: .png, .svg or .pdf")] = None,
             as_json: Json = False):
    """Plan a cluster without one: compare schedulers on a mix of sources, size engines, environments and teachers."""
    from mopd.simulate import run_simulate

    if "=" in str(config) and not config.exists():  # an override alone: the example's configuration
        config, overrides = SIMULATE, [str(config), *(overrides or [])]
    run_simulate(config, overrides or [], as_json=as_json, plot_to=plot)


def use_devices(names: list[str]) -> None:
    """Let this process, and those that it starts, see these devices alone, unless the environment says which already."""
    if names and "CUDA_VISIBLE_DEVICES" not in os.environ:
        from mopd.launch import devices_environment

        os.environ.update(devices_environment(names))


def need_domain(path: Path, overrides: list[str] | None, name: str) -> str:
    from mopd.config import load_config

    return known_domain(load_config(path, overrides or []), name)


def known_domain(config, name: str) -> str:
    """The name of a domain of the configuration; raises WrongUsage for another."""
    if name not in config.domains:
        raise WrongUsage(f"domain {name or '(missing)'}: the config has the domains {', '.join(config.domains)}")
    return name


def main() -> None:
    """Entry point of the console script."""
    if "MOPD_PIPELINE" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: end with the pipeline that started this job
        if os.getppid() != int(os.environ["MOPD_PIPELINE"]):
            sys.exit(1)  # it ended before this process could ask to be told
    try:
        code = app(standalone_mode=False)
    except typer.Exit as leaving:
        code = leaving.exit_code
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = _fail(error)
    if code == 130:  # the command line library turns an interrupt into this status
        goes_on = {"demo", "study", "study-prefix", "train", "collect"} & set(sys.argv[1:2]) or sys.argv[1:3] == [
            "teacher", "sft"]
        console.print("interrupted; the same command " + ("goes on from here" if goes_on else
                      "starts again, and nothing half-done is left"))
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    """Show an expected error in one message; let an unexpected one keep its traceback. Returns the exit status: 2 where
    what was asked for cannot be (a value, a folder that is not there or is something else), 1 where the work failed."""
    show = getattr(error, "show", None)
    if callable(show):  # wrong usage, found by the command line library
        show()
        return 2
    if isinstance(error, OSError) and type(error).__module__ == "builtins" and error.errno in _OF_THE_SYSTEM:
        console.print("[red]error:[/red] ", end="")
        console.print(f"{error.strerror}: {error.filename or 'while writing'}. Make room, or name another place (run=FOLDER, "
                      "--out); what was finished is kept", soft_wrap=True, markup=False)
        return 1
    # As `python -m mopd.cli` this file is __main__.
    if type(error).__module__.split(".")[0] not in ("mopd", "teachers", "prefix_store", "__main__"):
        raise error
    console.print("[red]error:[/red] ", end="")
    console.print(str(error), soft_wrap=True, markup=False)
    return 2 if isinstance(error, ValueError | FileNotFoundError | FileExistsError) else 1


if __name__ == "__main__":
    main()
