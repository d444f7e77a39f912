"""Held-out play: several models, the same tasks and seeds for each, one file per model and domain, written anew by each
call as soon as its episodes are over."""

from __future__ import annotations

import json
from pathlib import Path

from mopd.config import Config, ConfigError
from mopd.domains import close_domains, open_domains
from mopd.learner.model import check_model_source, load_model
from mopd.metrics import clean
from mopd.progress import Progress
from mopd.sampling.hf import HFEngine
from mopd.sampling.play import play_tasks
from mopd.sampling.rendering import ChatRenderer, load_tokenizer
from mopd.statistics import wilson_interval


def evaluate_models(config: Config, models: dict[str, str], domains: list[str], *, report: bool = True) -> dict:
    """Play the tasks of `evaluate.split` in each domain with each model (name → folder).

    Returns {model: {domain: {"score", "n", "low", "high"}}}: score is the share of tasks solved, low and high its 95%
    Wilson interval. Infrastructure failures are left out of n and counted in the files. `report` prints a line
    per model.
    """
    for model, folder in models.items():
        if not model or "/" in model or model.startswith("."):
            raise ConfigError(f"model name {model!r}: it names the files of its results; write NAME=FOLDER without / in NAME")
        check_model_source(folder)
    out = Path(config.evaluate.out)
    out.mkdir(parents=True, exist_ok=True)
    opened = open_domains(config, domains)
    try:
        tasks = {n: d.spread(config.evaluate.split, d.config.evaluation_episodes) for n, d in opened.items()}
        total = len(models) * sum(map(len, tasks.values()))
        progress, done = Progress("evaluation", total), 0
        results: dict[str, dict] = {}
        engines: dict[str, tuple[HFEngine, ChatRenderer]] = {}
        # Domain by domain, so that the environments of a task that is costly to start are reused by every model.
        for name, domain in opened.items():
            for model, folder in models.items():
                if model not in engines:
                    trusted = _trusted(config, folder)
                    tokenizer = load_tokenizer(folder, trust_remote_code=trusted)
                    engines[model] = (HFEngine(load_model(folder, trust_remote_code=trusted),
                                               max_batch=config.evaluate.batch), ChatRenderer(
                                                   tokenizer, stop_strings=config.sampling.stop_strings))
                engine, renderer = engines[model]
                played = play_tasks(engine, domain.pool, name, tasks[name], renderer, domain.harnesses,
                                    temperature=config.evaluate.temperature, seed=config.seed,
                                    progress=lambda n, base=done, m=model: progress.update(base + n, m))
                done += len(tasks[name])
                progress.update(done, f"{model} {name}")
                record = _record(model, name, config, played)
                _write(out / f"{model}.{name}.json", record)
                results.setdefault(model, {})[name] = {k: record[k] for k in ("score", "n", "low", "high")}
    finally:
        close_domains(opened)
    for model, scores in results.items() if report else ():
        print(f"result: {model}: " + ", ".join(
            f"{d} {s['score']:.2f} [{s['low']:.2f}, {s['high']:.2f}] of {s['n']}" if s["n"] else
            f"{d} not measured, every episode failed for reasons of infrastructure" for d, s in scores.items()))
    if report:
        print(f"episodes: {out}/")
    return results


def _trusted(config: Config, folder: str) -> bool:
    """Whether the config lets code that comes with this model run: the student's word holds for what came of it too."""
    return config.student.trust_remote_code or any(t.trust_remote_code for t in config.teachers.values() if t.model == folder)


def _record(model: str, domain: str, config: Config, played) -> dict:
    counted = [p for p in played if not p.failure]
    wins = sum(p.success for p in counted)
    low, high = wilson_interval(wins, len(counted))
    # Without a single episode that counts there is neither score nor interval: None, which every JSON reader takes.
    return clean({
        "model": model, "domain": domain, "split": config.evaluate.split, "temperature": config.evaluate.temperature,
        "score": wins / len(counted) if counted else None, "n": len(counted), "low": low, "high": high,
        "failures": len(played) - len(counted), **_by_harness(counted),
        "episodes": [{"task": f"{p.task.name}:{p.task.seed}", "score": p.score, "success": p.success, "turns": p.turns,
                      "failure": p.failure} | ({"harness": p.harness} if p.harness else {}) for p in played]})


def _by_harness(counted) -> dict:
    """{"harnesses": {name: {"score", "n"}}} where a domain has several; nothing else."""
    parts = {name: [p for p in counted if p.harness == name] for name in sorted({p.harness for p in counted if p.harness})}
    return {"harnesses": {name: {"score": sum(p.success for p in part) / len(part), "n": len(part)}
                          for name, part in parts.items()}} if parts else {}


def _write(path: Path, record: dict) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record))
    temporary.replace(path)
