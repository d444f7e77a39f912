"""The command line. Each command checks its input before it loads anything heavy; the work is done elsewhere.

Exit status: 0 done, 1 failed, 2 wrong usage or configuration.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Merge domain-expert language models into one student (MOPD²).")
teacher_app = typer.Typer(no_args_is_help=True, help="Make domain teachers.")
store_app = typer.Typer(no_args_is_help=True, help="Look into a prefix store.")
app.add_typer(teacher_app, name="teacher")
app.add_typer(store_app, name="store")
console = Console(stderr=True, highlight=False)

ConfigPath = Annotated[Path, typer.Argument(help="YAML file; configs/ holds ready ones")]
Overrides = Annotated[list[str] | None, typer.Argument(help="key=value, for example train.steps=100 seed=2")]
Json = Annotated[bool, typer.Option("--json", help="Print the answer as JSON")]
DEMO = Path(__file__).resolve().parent.parent / "configs" / "demo.yaml"


class WrongUsage(ValueError):
    """An argument that does not fit; shown without a traceback."""


def load(path: Path, overrides: list[str] | None):
    """The checked configuration with the number of threads applied; torch is not imported yet."""
    from mopd.config import load_config

    config = load_config(path, overrides or [])
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
def import_file(config: ConfigPath, overrides: Overrides = None,
                file: Annotated[list[Path] | None, typer.Option(help="Transcripts or chat messages, JSON lines")] = None,
                domain: Annotated[str, typer.Option(help="Domain of chat messages that name none")] = "",
                expert_only: Annotated[bool, typer.Option(help="Take only episodes that an expert played alone")] = True):
    """Put demonstrations into the prefix store, rendered by the student's chat template."""
    from mopd.domains import import_demonstrations

    import_demonstrations(load(config, overrides), file or [], domain or None, expert_only=expert_only)


@teacher_app.command("sft")
def teacher_sft(config: ConfigPath, overrides: Overrides = None,
                domain: Annotated[list[str] | None, typer.Option(help="Domain(s) whose demonstrations are learnt")] = None,
                out: Annotated[Path, typer.Option(help="Hugging Face folder to make")] = Path("teacher"),
                baseline: Annotated[bool, typer.Option(help="The off-policy baseline: config section off_policy")] = False):
    """Supervised training on stored demonstrations, from the student's start, router frozen."""
    from teachers.sft import run_sft

    loaded = load(config, overrides)
    domains = domain or []
    for name in domains:
        need_domain(config, overrides, name)
    run_sft(loaded, domains or list(loaded.domains), out, baseline=baseline)


@app.command()
def collect(config: ConfigPath, overrides: Overrides = None,
            domain: Annotated[str, typer.Option(help="Which domain's teacher plays")] = ""):
    """A teacher plays its domain's training tasks; its sequences go into the prefix store."""
    from teachers.collect import collect_domain

    collect_domain(load(config, overrides), need_domain(config, overrides, domain))


@app.command()
def train(config: ConfigPath, overrides: Overrides = None,
          resume: Annotated[bool, typer.Option(help="Go on from the last checkpoint, if there is one")] = True):
    """The MOPD² run: sample, score, train; writes the student, its metrics and its checkpoints."""
    from mopd.run import train as run_training

    run_training(load(config, overrides), resume=resume)


@app.command()
def average(models: Annotated[list[Path], typer.Argument(help="Hugging Face folders of one architecture")],
            out: Annotated[Path, typer.Option(help="Folder to make")]):
    """The parameter average of several models, a baseline."""
    from mopd.learner.model import parameter_average

    parameter_average(models, out)
    print(f"result: average of {len(models)} models in {out}")


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
    result = evaluate_models(loaded, models, domain or list(loaded.domains))
    if as_json:
        print(json.dumps(result))


@app.command()
def check(config: ConfigPath, overrides: Overrides = None, as_json: Json = False):
    """Check a configuration with everything it names: models, tokenizers, teachers, store, environments."""
    from mopd.config import ConfigError

    try:
        loaded = load(config, overrides)
    except ConfigError as error:
        if as_json:
            print(json.dumps({"errors": error.errors, "warnings": [], "domains": {}, "teachers": {}}))
            raise typer.Exit(2) from None
        raise
    from mopd.check import check_launch, print_check

    result = check_launch(loaded)
    if as_json:
        print(json.dumps(result))
    else:
        print_check(result)
    if result["errors"]:
        raise typer.Exit(2)


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


@store_app.command("info")
def store_info(path: Path, as_json: Json = False):
    """What is in a store: sequences, decision points, domains, sources, versions."""
    from prefix_store import PrefixStore

    info = PrefixStore.open(path, "r").info()
    if as_json:
        print(json.dumps(info, default=str))
        return
    for key, value in info.items():
        console.print(f"{key}: {value}")


@store_app.command("verify")
def store_verify(path: Path, as_json: Json = False):
    """Check every checksum and rule; exit status 1 if something is damaged."""
    from prefix_store import PrefixStore

    result = PrefixStore.open(path, "r").verify()
    problems = [str(problem) for problem in result.problems]
    if as_json:
        print(json.dumps({"sequences": result.sequences, "problems": problems}))
    else:
        console.print(f"{result.sequences} sequences checked, {len(problems)} problems")
        for problem in problems:
            console.print(f"  {problem}", markup=False)
    if problems:
        raise typer.Exit(1)


@store_app.command("show")
def store_show(path: Path, sequence: Annotated[str, typer.Argument(help="Sequence id, or its first characters")],
               model: Annotated[Path | None, typer.Option(help="Folder with the tokenizer, to show text")] = None,
               as_json: Json = False):
    """Print one sequence readably: segments, decision points, outcome."""
    from mopd.show import show_sequence

    show_sequence(path, sequence, model, as_json)


def need_domain(path: Path, overrides: list[str] | None, name: str) -> str:
    from mopd.config import load_config

    domains = load_config(path, overrides or []).domains
    if name not in domains:
        raise WrongUsage(f"--domain {name or '(missing)'}: the config has the domains {', '.join(domains)}")
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
        console.print("interrupted; the same command goes on from here")
    sys.exit(code if isinstance(code, int) else 0)


def _fail(error: Exception) -> int:
    """Show an expected error in one message; let an unexpected one keep its traceback. Returns the exit status: 2 where
    what was asked for cannot be (a value, a folder that is not there), 1 where the work failed."""
    show = getattr(error, "show", None)
    if callable(show):  # wrong usage, found by the command line library
        show()
        return 2
    # As `python -m mopd.cli` this file is __main__.
    if type(error).__module__.split(".")[0] not in ("mopd", "teachers", "prefix_store", "__main__"):
        raise error
    console.print("[red]error:[/red] ", end="")
    console.print(str(error), soft_wrap=True, markup=False)
    return 2 if isinstance(error, ValueError | FileNotFoundError) else 1


if __name__ == "__main__":
    main()
