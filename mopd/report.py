"""From a run folder to results.json, a table in the terminal and report.html.

Reads what the stages of a run left behind and knows nothing about models or environments:

    eval/MODEL.DOMAIN.json or eval/MODEL.json   held-out episodes (the latter with `domains`)
    students/NAME/seed-S/metrics.jsonl          one record a step
    episodes.json, or the student's own         sampled episodes with the teacher's scores
    timings.json                                seconds by stage
    study.json                                  the plan of a study over factors, see `report_factors.py`

A part that is missing or broken becomes a sentence in `notes`, never an
exception. The HTML itself is in `report_page.py`, its plots in `report_plots.py`.

A model evaluated for several training seeds (`NAME@SEED`) is shown as NAME, the mean over its seeds.
"""

from __future__ import annotations

import collections
import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from mopd.metrics import MetricsError, clean, read_metrics
from mopd.report_factors import (
    EFFECT_CAPTION,
    effect_rows,
    effects_markdown,
    planned,
    read_plan,
    study_results,
)
from mopd.statistics import (
    bootstrap_interval,
    normalised_score,
    paired_bootstrap,
    paired_difference,
    wilson_interval,
)

COST_PARTS = ("training", "sampling", "scoring", "environments", "grading")
BASELINE = "parameter_average"
_FIRST = ("base", "teacher_*", BASELINE, "student_mixed", "student_rollout", "student_prefix", "off_policy_sft")

Episodes = dict[tuple[str, int], dict[str, Any]]


def own_domain(model: str) -> str | None:
    """The domain of a teacher's name (`teacher_game` → `game`), None for other models."""
    return model.removeprefix("teacher_") if model.startswith("teacher_") else None


def build_results(run: Path | str, *, students: Path | None = None, resamples: int = 2000,
                  seed: int = 0) -> dict[str, Any]:
    """Everything that the table and the page show, from the files of one run folder, as plain JSON data.

    `students` is where the students were trained, if not in RUN/students. Once one of them was evaluated, only those
    that were count.

    Beside `models`, `normalised` and `cost`: `normalised_interval`, `normalised_by_domain`, `above_parameter_average`
    ({NAME: {difference, low, high}}, paired), `seeds` (each training seed's own scores), `domains`, `stages`,
    `wall_seconds`, `study` (of a study over factors, else None: arms and main effects) and `notes`, the sentences about
    what is missing. A value that does not exist is None.

    `score` is the success share of the episodes without an infrastructure failure, which are counted in
    `infra_failures` and leave `n`; its 95% interval is Wilson's on the number of tasks. `progress` is the mean of the
    environments' own scores with a bootstrap interval.
    """
    run = Path(run)
    notes: list[str] = []
    evaluations, plan = load_evaluations(run, notes), read_plan(run, notes)
    if plan:
        evaluations = planned(plan, evaluations)
    domains = _domains(evaluations)
    results: dict[str, Any] = {"domains": domains, "models": {}, "normalised": {}, "normalised_interval": {},
                               "normalised_by_domain": {}, "above_parameter_average": {}, "seeds": {}}
    for model, by_seed in evaluations.items():
        results["models"][model] = {d: _domain_scores(by_seed, d, model, notes) for d in domains
                                    if any(d in e for e in by_seed.values())}
        if set(by_seed) != {""}:
            results["seeds"][model] = {s: {"scores": {d: e[d]["score"] for d in domains if d in e}}
                                       for s, e in by_seed.items()}
    _add_normalised(results, evaluations, domains, notes, resamples=resamples, seed=seed)
    trained = load_students(students or run / "students", notes, evaluations)
    results["cost"] = {name: _cost(by_seed) for name, by_seed in trained.items()}
    results["study"] = study_results(plan, results, trained, notes) if plan else None
    timings = _read_json(run / "timings.json", run, notes) or {}
    results["stages"] = timings.get("stages", {})
    results["wall_seconds"] = timings.get("wall_seconds")
    results["notes"] = list(dict.fromkeys(notes))
    return clean(results)


def write_report(run: Path | str, *, students: Path | None = None) -> Path:
    """Write RUN/results.json and RUN/report.html (one self-contained file); returns the path of the page.
    `students` as for `build_results`.

    Both appear whole: they are written aside and renamed. Raises FileNotFoundError when the run folder is not there.
    """
    from mopd.report_page import render_page  # brings matplotlib, which the terminal table does not need

    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"no run folder at {run}; give the folder that holds eval/ and students/")
    results = build_results(run, students=students)
    notes: list[str] = []
    folder = students or run / "students"
    trained = load_students(folder, [], load_evaluations(run, []))
    # The run's own choice of episodes, else those of the first student that kept some.
    kept = [run / "episodes.json", *(folder / name / f"seed-{s}" / "episodes.json" for name in trained
                                     for s in trained[name])]
    path = next((p for p in kept if p.is_file()), kept[0])
    episodes = _read_json(path, path.parent, notes)
    if episodes is not None and not (isinstance(episodes, list) and all(isinstance(e, dict) for e in episodes)):
        notes.append("episodes.json: not a list of episodes; none are shown.")
        episodes = None
    results["notes"] += notes
    if results["study"]:
        trained = _two_of(trained, results)
    _write(run / "results.json", json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    _write(run / "report.html", render_page(results, trained, episodes or [], name=run.resolve().name))
    return run / "report.html"


def _two_of(trained: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Of many arms the best and the first, to draw: curves of dozens would make the page huge and show nothing more."""
    scored = [a for a in results["study"]["arms"] if a in trained and results["normalised"].get(a) is not None]
    best = max(scored, key=lambda a: results["normalised"][a], default=None)
    return {name: trained[name] for name in dict.fromkeys([best, *results["study"]["arms"]]) if name in trained
            and name in (best, next(iter(results["study"]["arms"])))}


# Reading


def load_evaluations(run: Path, notes: list[str]) -> dict[str, dict[str, dict[str, dict[str, Any]]]]:
    """{model: {training seed or "": {domain: {score, n, low, high, episodes, infra}}}} in the order of the table.

    `episodes` maps (task, how many times it came before) to {success, score, turns}, without infrastructure failures.
    """
    files = sorted((run / "eval").glob("*.json"))
    if not files:
        notes.append("eval/: no evaluation is there, so there are no scores.")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    splits = {}
    for path in files:
        data = _read_json(path, run, notes)
        if data is None:
            continue
        try:
            model, _, seed = str(data.get("model") or path.stem).partition("@")
            splits[path.stem] = data.get("split", "")
            parts = {data["domain"]: data} if "domain" in data else data["domains"]
            domains = {d: _read_domain(part, f"{path.stem}, {d}", notes) for d, part in parts.items()}
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            notes.append(f"eval/{path.name}: not an evaluation ({type(error).__name__}: {error}); left out.")
            continue
        found.setdefault(model, {}).setdefault(seed, {}).update(domains)
    if len(set(splits.values())) > 1:
        notes.append("Models were evaluated on different splits: "
                     + ", ".join(f"{m} on {s or 'an unnamed one'}" for m, s in splits.items()) + ".")
    for name in ("base", BASELINE):
        if files and name not in found:
            notes.append(f"eval/: no evaluation of {name} is there.")

    def place(model: str) -> tuple[int, str]:
        for i, pattern in enumerate(_FIRST):
            if model == pattern or (pattern.endswith("*") and model.startswith(pattern[:-1])):
                return i, ""
        return len(_FIRST), model
    order = list(next((e for n in ("base", *found) for e in found.get(n, {}).values()), {}))
    rank = {f"teacher_{d}": i for i, d in enumerate(order)}
    return {m: found[m] for m in sorted(found, key=lambda m: (*place(m), rank.get(m, len(rank)), m))}


def _read_domain(part: dict[str, Any], where: str, notes: list[str]) -> dict[str, Any]:
    listed = part.get("episodes") or []
    if not listed:
        n, score = int(part["n"]), float(part["score"])
        low, high = wilson_interval(score * n, n)
        notes.append(f"{where}: no single episodes are stored, so it has no place in paired intervals.")
        return {"score": score, "n": n, "low": low, "high": high, "episodes": {},
                "infra": {}}
    seen: collections.Counter[str] = collections.Counter()
    infra: collections.Counter[str] = collections.Counter()
    episodes: Episodes = {}
    for episode in listed:
        key = (str(episode["task"]), seen[episode["task"]])
        seen[episode["task"]] += 1
        if episode.get("failure"):
            infra[episode["failure"]] += 1
            continue
        episodes[key] = {"success": bool(episode["success"]), "score": float(episode.get("score", episode["success"])),
                         "turns": episode.get("turns")}
    n = len(episodes)
    if infra:
        notes.append(f"{where}: {sum(infra.values())} of {len(listed)} episodes are left out for infrastructure "
                     f"failures ({', '.join(f'{c} {k}' for c, k in sorted(infra.items()))}).")
    successes = sum(e["success"] for e in episodes.values())
    low, high = wilson_interval(successes, n)
    return {"score": successes / n if n else math.nan, "n": n, "low": low, "high": high, "episodes": episodes,
            "infra": dict(infra)}


def load_students(folder: Path, notes: list[str],
                  evaluations: dict[str, Any] | None = None) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """{student: {training seed: records of FOLDER/student/seed-S/metrics.jsonl}}, the mixed student first. Runs that
    are not in `evaluations` are left out, unless none is."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    paths = sorted(folder.glob("*/seed-*/metrics.jsonl"))
    evaluated = [p for p in paths
                 if {"", p.parts[-2].removeprefix("seed-")} & set((evaluations or {}).get(p.parts[-3], ()))]
    if evaluated and len(evaluated) < len(paths):
        others = [f"{p.parts[-3]} {p.parts[-2]}" for p in paths if p not in evaluated]
        notes.append(f"students/: trained but not evaluated here, so left out: {', '.join(others)}.")
    for path in evaluated or paths:
        where = f"students/{path.relative_to(folder).as_posix()}"
        try:
            records = read_metrics(path)
        except (MetricsError, OSError) as error:
            notes.append(f"{where}: {error}; left out.")
            continue
        if records:
            found.setdefault(path.parts[-3], {})[path.parts[-2].removeprefix("seed-")] = records
        else:
            notes.append(f"{where}: holds no step yet.")
    if not found:
        notes.append("students/: no training metrics are there, so there are no curves and no costs.")
    return dict(sorted(found.items(), key=lambda item: (_FIRST.index(item[0]) if item[0] in _FIRST else 99, item[0])))


def _read_json(path: Path, run: Path, notes: list[str]) -> Any:
    where = path.relative_to(run).as_posix()
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"{where} is not there.")
    except (OSError, ValueError) as error:
        notes.append(f"{where} is not readable ({error}); left out.")
    return None


def _domains(evaluations: dict[str, Any]) -> list[str]:
    names: dict[str, None] = {}
    for by_seed in evaluations.values():
        for domains in by_seed.values():
            names.update(dict.fromkeys(domains))
    return list(names)


# Numbers


def _domain_scores(by_seed: dict[str, Any], domain: str, model: str, notes: list[str]) -> dict[str, Any]:
    parts = [e[domain] for e in by_seed.values() if domain in e]
    if len(parts) < len(by_seed):
        notes.append(f"{model}, {domain}: only {len(parts)} of {len(by_seed)} training seeds were evaluated.")
    n = min(p["n"] for p in parts)
    score = float(np.mean([p["score"] for p in parts]))
    low, high = (parts[0]["low"], parts[0]["high"]) if len(parts) == 1 else wilson_interval(
        0.0 if math.isnan(score) else score * n, n)
    out = {"score": score, "n": n, "low": low, "high": high}
    per_task: dict[Any, list[float]] = collections.defaultdict(list)
    for part in parts:
        for key, episode in part["episodes"].items():
            per_task[key].append(episode["score"])
    if per_task:
        means = np.array([np.mean(v) for v in per_task.values()])
        out["progress"] = float(means.mean())
        out["progress_low"], out["progress_high"] = bootstrap_interval(means)
        turns = [e["turns"] for p in parts for e in p["episodes"].values() if e["turns"] is not None]
        out["turns"] = float(np.mean(turns)) if turns else None
    infra = sum((collections.Counter(p["infra"]) for p in parts), collections.Counter())
    if infra:
        out["infra_failures"] = dict(infra)
    return out


def _add_normalised(results: dict[str, Any], evaluations: dict[str, Any], domains: list[str], notes: list[str], *,
                    resamples: int, seed: int) -> None:
    base = evaluations.get("base", {}).get("")
    teachers = {d: evaluations.get(f"teacher_{d}", {}).get("", {}).get(d) for d in domains}
    missing = [f"teacher_{d}" for d, t in teachers.items() if t is None]
    if base is None or missing or not domains:
        if evaluations:
            notes.append("Normalised scores need the base and every domain's own teacher; not there: "
                         + ", ".join((["base"] if base is None else []) + missing) + ".")
        return

    def aligned(*models: str) -> list[tuple[dict, dict, dict]] | None:
        """(rows per model, base rows, teacher rows) of success on the tasks that all of them played, by domain."""
        rows: list[dict[str, np.ndarray]] = [{} for _ in range(len(models) + 2)]
        for d in domains:
            seeds = [[e.get(d, {"episodes": {}})["episodes"] for e in evaluations[m].values()] for m in models]
            references = [[base.get(d, {"episodes": {}})["episodes"]], [teachers[d]["episodes"]]]
            everyone = [*seeds, *references]
            keys = sorted(set.intersection(*(set(e) for group in everyone for e in group)))
            most = max((len(e) for group in everyone for e in group), default=0)
            if not keys:
                return None
            if len(keys) < most:
                notes.append(f"{' and '.join(models)}, {d}: {len(keys)} of {most} tasks were played by the base, the "
                             "teacher and this model alike; the normalised score uses those.")
            for row, group in zip(rows, everyone, strict=True):
                row[d] = np.array([[e[k]["success"] for k in keys] for e in group], dtype=np.float64)
        return rows

    for model in evaluations:
        rows = aligned(model)
        if rows is None:
            notes.append(f"{model}: no normalised score, a domain has no task that base, teacher and model all played.")
            results["normalised"][model], results["normalised_interval"][model] = None, [None, None]
            continue
        mine, base_rows, teacher_rows = rows
        score = paired_bootstrap(mine, base_rows, teacher_rows, resamples=resamples, seed=seed)
        notes += [f"Normalised scores: {w}." for w in score.words]
        results["normalised"][model] = score.value
        results["normalised_interval"][model] = [score.low, score.high]
        results["normalised_by_domain"][model] = {
            d: {"value": score.by_domain[d], "low": score.by_domain_interval[d][0],
                "high": score.by_domain_interval[d][1]} for d in domains}
        flat_base, flat_teacher = ({d: float(r[d].mean()) for d in domains} for r in (base_rows, teacher_rows))
        for i, training_seed in enumerate(evaluations[model] if model in results["seeds"] else ()):
            one = normalised_score({d: float(mine[d][i].mean()) for d in domains}, flat_base, flat_teacher)
            results["seeds"][model][training_seed]["normalised"] = one.mean
        if BASELINE in evaluations and model != BASELINE and model != "base" and own_domain(model) is None:
            both = aligned(model, BASELINE)
            if both is not None:
                pair = [paired_bootstrap(x, both[2], both[3], resamples=resamples, seed=seed) for x in both[:2]]
                difference, low, high = paired_difference(*pair)
                results["above_parameter_average"][model] = {"difference": difference, "low": low, "high": high}


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


def _cost(by_seed: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Totals over the steps of a run, averaged over training seeds."""
    totals = []
    for records in by_seed.values():
        t: dict[str, Any] = {f"{k}_tokens": sum(_number(r.get("tokens", {}).get(k)) for r in records)
                             for k in ("sampled", "trained", "computed")}
        t["environment_steps"] = sum(_number(r.get("environment_steps")) for r in records)
        t["optimizer_steps"] = len(records)
        t["seconds"] = {p: sum(_number(r.get("seconds", {}).get(p)) for r in records) for p in COST_PARTS}
        t["total_seconds"] = sum(_number(r.get("seconds", {}).get("total")) for r in records)
        if not t["total_seconds"]:
            t["total_seconds"] = sum(t["seconds"].values())
        streams: collections.Counter[str] = collections.Counter()
        for record in records:
            for domain in record.get("domains", {}).values():
                for stream, part in (domain.get("streams") or {}).items():
                    streams[stream] += _number(part.get("tokens"))
        t["streams"] = dict(streams)
        totals.append(t)

    def mean(key: str) -> float:
        return float(np.mean([t[key] for t in totals]))
    names = sorted({s for t in totals for s in t["streams"]})
    seconds = {p: float(np.mean([t["seconds"][p] for t in totals])) for p in COST_PARTS}
    if not seconds["grading"]:
        del seconds["grading"]
    counts = {k: round(mean(k)) for k in ("sampled_tokens", "trained_tokens", "computed_tokens", "environment_steps",
                                          "optimizer_steps")}
    return {**counts, "seconds": seconds, "total_seconds": mean("total_seconds"), "training_seeds": len(totals),
            "streams": {s: round(np.mean([t["streams"].get(s, 0) for t in totals])) for s in names}}


def _write(path: Path, text: str) -> None:
    aside = path.with_name(path.name + ".part")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


# Tables


def format_count(value: float | None) -> str:
    """1234567 → `1.2M`; None → an em dash."""
    if value is None:
        return "—"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.1f}{suffix}"
    return f"{value:.0f}"


def format_seconds(value: float | None) -> str:
    """75 → `1 min 15 s`; None → an em dash."""
    if value is None:
        return "—"
    value = round(value)
    if value < 60:
        return f"{value} s"
    if value < 3600:
        return f"{value // 60} min {value % 60:02d} s"
    return f"{value // 3600} h {value % 3600 // 60:02d} min"


def table_rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    """The result table as text cells, one dict a model: `model`, `own`, `scores` {domain: (score, half width)},
    `normalised`, `interval`, and those of `cost_columns`. Used by the terminal, Markdown and HTML tables."""
    arms = (results.get("study") or {}).get("arms", {})
    rows = []
    for model in dict.fromkeys([*results.get("models", {}), *results.get("cost", {})]):
        scores = {}
        for domain, part in results["models"].get(model, {}).items():
            if part["score"] is not None:
                scores[domain] = (f"{part['score']:.2f}", f"±{(part['high'] - part['low']) / 2:.2f}")
        value = results.get("normalised", {}).get(model)
        low, high = results.get("normalised_interval", {}).get(model) or (None, None)
        cost = results.get("cost", {}).get(model, {})
        rows.append({"model": model, "own": own_domain(model), "scores": scores,
                     "normalised": "—" if value is None else f"{value:.2f}",
                     "interval": "" if low is None or low == high else f"[{low:.2f}, {high:.2f}]",
                     "sampled": format_count(cost.get("sampled_tokens")),
                     "environment": format_count(cost.get("environment_steps")),
                     "seconds": "—" if not cost else f"{cost['total_seconds']:,.0f}",
                     **{key: "—" if arms.get(model, {}).get(key) is None else f"{arms[model][key]:{form}}"
                        for key, form in (("steps", ".0f"), ("cpu_seconds", ".0f"), ("depth", ".2f"))}})
    return rows


def cost_columns(results: dict[str, Any]) -> list[tuple[str, str]]:
    """(key in `table_rows`, title) of what stands behind the scores. In a study over factors an exact count of the equal
    budget, and the depth of what was drawn."""
    if results.get("study"):
        return [("sampled", "sampled tokens"), ("steps", "steps"), ("cpu_seconds", "CPU seconds"), ("depth", "depth")]
    return [("sampled", "sampled tokens"), ("environment", "environment steps"), ("seconds", "seconds")]


_CAPTION = ("success share ± half of its 95% interval · ◆ a teacher in its own domain · normalised: 0 = base, 1 = the "
            "teachers, paired bootstrap over held-out tasks · costs are those of the student's training, a mean over "
            "seeds")


def print_results(results: dict[str, Any], console: Console | None = None) -> None:
    """Print the result table (two tables on a narrow terminal), the comparison with the parameter average and notes."""
    console = console or Console()
    rows, domains = table_rows(results), results.get("domains", [])
    costs = cost_columns(results)
    wide = console.width >= 74 + 14 * len(domains)
    look = {"title_justify": "left", "caption_justify": "left", "box": box.SIMPLE_HEAD, "pad_edge": False,
            "padding": (0, 1) if wide else (0, 1, 0, 0)}
    table = Table(title="Held-out results", caption=_CAPTION, **look)
    table.add_column("model", no_wrap=True)
    for domain in domains:
        table.add_column(domain, justify="right", no_wrap=True)
    table.add_column("normalised", justify="right", no_wrap=True)
    for _, title in costs if wide else ():
        table.add_column(title, justify="right")
    for row in rows:
        cells = [row["model"]]
        for domain in domains:
            own = row["own"] == domain
            text = " ".join(row["scores"].get(domain, ("—",))) + ("◆" if own else " ")
            cells.append(f"[bold]{text}[/bold]" if own else text)
        cells.append(" ".join(filter(None, (row["normalised"], row["interval"].replace("[", "\\[")))))
        cells += [row[key] for key, _ in costs] if wide else []
        table.add_row(*cells)
    if rows:
        console.print(table)
    if not wide and results.get("cost"):
        table = Table(title="Cost of training", **look)
        table.add_column("model", no_wrap=True)
        for _, title in costs:
            table.add_column(title, justify="right")
        for row in rows:
            if row["model"] in results["cost"]:
                table.add_row(row["model"], *(row[key] for key, _ in costs))
        console.print(table)
    study = results.get("study")
    for factor, part in study["effects"].items() if study else ():
        titles, lines = effect_rows(part, domains, format_count)
        table = Table(title=f"Main effect of {factor} ({part['blocks']} pairs)", **look)
        for title in titles:
            table.add_column(title, justify="left" if title == "level" else "right")
        for line in lines:
            table.add_row(*(cell.replace("[", "\\[") for cell in line))
        console.print(table)
    if study:
        console.print(EFFECT_CAPTION, style="dim")
    for model, part in results.get("above_parameter_average", {}).items() if not study else ():
        if part["difference"] is not None:
            between = "" if part["low"] is None else f" \\[{part['low']:+.2f}, {part['high']:+.2f}]"
            console.print(f"{model} against the parameter average, normalised: {part['difference']:+.2f}{between}")
    if results.get("wall_seconds") is not None:
        console.print(f"Whole run: {format_seconds(results['wall_seconds'])}")
    for note in results.get("notes", []):
        console.print(f"note: {note}", style="yellow", markup=False)


def markdown_table(results: dict[str, Any]) -> str:
    """The same table in Markdown, for a README; of a study over factors with its main effects before it."""
    domains, costs = results.get("domains", []), cost_columns(results)
    head = ["model", *domains, "normalised", *(title for _, title in costs)]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    for row in table_rows(results):
        cells = [f"`{row['model']}`"]
        for domain in domains:
            text = " ".join(row["scores"].get(domain, ("—",)))
            cells.append(f"**{text}** ◆" if row["own"] == domain else text)
        cells += [f"{row['normalised']} {row['interval']}".strip(), *(row[key] for key, _ in costs)]
        lines.append("| " + " | ".join(cells) + " |")
    before = effects_markdown(results["study"], domains, format_count) + "\n" if results.get("study") else ""
    return before + "\n".join(lines) + "\n\n" + _CAPTION[0].upper() + _CAPTION[1:] + ".\n"
