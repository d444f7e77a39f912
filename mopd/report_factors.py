"""A study over factors as numbers and tables: what each arm reached, and the main effect of each factor.

Knows the plan of the study (STUDY_FILE), evaluations and metrics as `mopd.report` read them; trains and plays nothing.
"""

from __future__ import annotations

import collections
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mopd.statistics import mean_interval

STUDY_FILE = "study.json"
# In the study's folder: {"factors": {factor: [levels]}, "seeds": [...], "arms": {name: {"levels": {factor: level}, ...}}}

Key = tuple[str, ...]


def read_plan(run: Path, notes: list[str]) -> dict[str, Any] | None:
    """The plan of the study in this folder; None where it holds none, or a broken one (which goes to `notes`)."""
    try:
        plan = json.loads((run / STUDY_FILE).read_text(encoding="utf-8"))
        factors = {str(f): [str(level) for level in levels] for f, levels in plan["factors"].items()}
        arms = {str(name): {f: str(arm["levels"][f]) for f in factors} for name, arm in plan["arms"].items()}
        return {"factors": factors, "arms": arms, "seeds": [str(s) for s in plan["seeds"]],
                "budget": {name: arm.get("budget") for name, arm in plan["arms"].items()}}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        notes.append(f"{STUDY_FILE} is not the plan of a study ({type(error).__name__}: {error}); left out.")
        return None


def planned(plan: dict[str, Any], evaluations: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Evaluations without those of runs (arm, seed) that are not in the plan: an earlier, larger study may lie here."""
    kept = {}
    for model, by_seed in evaluations.items():
        mine = {s: e for s, e in by_seed.items() if s == "" or (model in plan["arms"] and s in plan["seeds"])}
        if mine:
            kept[model] = mine
    return kept


def study_results(plan: dict[str, Any], results: dict[str, Any], trained: dict[str, dict[str, list[dict[str, Any]]]],
                  notes: list[str]) -> dict[str, Any]:
    """{"factors", "seeds", "arms": {name: {levels, budget, seeds, steps, sampled_tokens, cpu_seconds, depth}}, "effects"}

    Arms in the plan's order; their numbers are means over the training seeds that are there (None without any). `effects`
    as `main_effects` gives them. What is missing is said in `notes`.
    """
    runs: dict[str, dict[str, dict[str, float]]] = {}
    for name in plan["arms"]:
        own = results["seeds"].get(name, {})
        runs[name] = {s: run_numbers(records) for s, records in trained.get(name, {}).items() if s in plan["seeds"]}
        for seed, part in own.items():
            numbers = runs[name].setdefault(seed, {})
            numbers["normalised"] = _float(part.get("normalised"))
            numbers.update({f"score.{d}": _float(v) for d, v in part["scores"].items()})
    arms = {}
    for name, levels in plan["arms"].items():
        found = list(runs[name].values())
        arms[name] = {"levels": levels, "budget": plan["budget"].get(name), "seeds": len(found), **{
            k: _mean([n[k] for n in found if k in n]) for k in ("steps", "sampled_tokens", "cpu_seconds", "depth")}}
    missing = [f"{name}@{seed}" for name in plan["arms"] for seed in plan["seeds"]
               if not math.isfinite(runs[name].get(seed, {}).get("normalised", math.nan))]
    if missing:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        total = len(plan["arms"]) * len(plan["seeds"])
        notes.append(f"{len(missing)} of {total} runs have no normalised score yet: {shown}.")
    cells = {(*levels.values(), seed): numbers for name, levels in plan["arms"].items()
             for seed, numbers in runs[name].items()}
    effects = main_effects(cells, plan["factors"])
    for factor, part in effects.items():
        if part["left_out"]:
            notes.append(f"Main effect of {factor}: {part['left_out']} of {part['left_out'] + part['blocks']} blocks are "
                         "left out, a level of theirs is missing.")
    return {"factors": plan["factors"], "seeds": plan["seeds"], "arms": arms, "effects": effects}


def run_numbers(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Steps, sampled tokens, CPU seconds, and the mean depth (turn number from 0) of the points that were drawn."""
    depths: collections.Counter[int] = collections.Counter()
    for record in records:
        for part in record.get("domains", {}).values():
            depths.update({int(depth): count for depth, count in (part.get("depth") or {}).items()})
    total = sum(depths.values())
    cpu = [record["seconds"].get("cpu") for record in records if record.get("seconds")]
    return {"steps": len(records), "sampled_tokens": sum(_float(r["tokens"]["sampled"]) for r in records),
            "cpu_seconds": math.fsum(cpu) if cpu and None not in cpu else math.nan,
            "depth": sum(d * n for d, n in depths.items()) / total if total else math.nan}


def main_effects(cells: Mapping[Key, Mapping[str, float]], factors: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """What changing one factor does, the others and the seed held: {factor: {"reference", "blocks", "left_out", "levels"}}.

    cells    (level of each factor in order, seed) → numbers of this run, `normalised` among them
    A block is everything but the factor's own level: the other factors' levels and the seed. Only blocks in which every
    level has a `normalised` count; the others are `left_out`. Each of `levels` has the means over the blocks of all numbers
    (`means`), and against the first level, the `reference`, the mean paired difference of `normalised` with its 95%
    interval (t over the blocks) and the number of blocks in which it is `ahead`. An interaction between factors counts
    as noise there: it widens the interval. A factor with a single level has no effect to show.
    """
    effects = {}
    for place, (factor, levels) in enumerate(factors.items()):
        if len(levels) < 2:
            continue
        blocks: dict[Key, dict[str, Mapping[str, float]]] = {}
        for key, numbers in cells.items():
            blocks.setdefault(key[:place] + key[place + 1:], {})[key[place]] = numbers
        whole = [block for _, block in sorted(blocks.items()) if all(
            math.isfinite(block.get(level, {}).get("normalised", math.nan)) for level in levels)]
        rows = []
        for level in levels:
            names = dict.fromkeys(itertools.chain.from_iterable(block[level] for block in whole))
            own = {"level": level, "means": {n: _mean([b[level].get(n, math.nan) for b in whole]) for n in names}}
            if level != levels[0]:
                gaps = np.array([b[level]["normalised"] - b[levels[0]]["normalised"] for b in whole])
                mean, low, high = mean_interval(gaps)
                own |= {"difference": mean, "low": low, "high": high, "ahead": int((gaps > 0).sum())}
            rows.append(own)
        effects[factor] = {"reference": levels[0], "blocks": len(whole), "left_out": len(blocks) - len(whole), "levels": rows}
    return effects


# Tables


def effect_rows(part: dict[str, Any], domains: Sequence[str], count) -> tuple[list[str], list[list[str]]]:
    """(titles, rows of text cells) of one factor's main effect; `count` writes a number of tokens."""
    titles = ["level", *domains, "normalised", f"against {part['reference']}", "ahead in", "sampled tokens", "CPU seconds",
              "depth"]
    rows = []
    for row in part["levels"]:
        means = row["means"]
        cells = [row["level"], *(_two(means.get(f"score.{d}")) for d in domains), _two(means.get("normalised"))]
        if not _known(row.get("difference")):
            cells += ["—", "—"]
        else:
            between = f" [{row['low']:+.3f}, {row['high']:+.3f}]" if _known(row["low"]) else ""
            cells += [f"{row['difference']:+.3f}{between}", f"{row['ahead']} of {part['blocks']}"]
        cells += [count(means.get("sampled_tokens")), _number(means.get("cpu_seconds"), ".0f"), _two(means.get("depth"))]
        rows.append(cells)
    return titles, rows


EFFECT_CAPTION = ("means over all arms and seeds with this level · against: mean difference of the normalised score to the "
                  "factor's first level, other factors and seed held, with a 95% interval (t over these pairs) · depth: mean "
                  "turn number of the drawn points, the first turn is 0")


def effects_markdown(study: dict[str, Any], domains: Sequence[str], count) -> str:
    """The main effects in Markdown, a table per factor."""
    parts = []
    for factor, part in study["effects"].items():
        titles, rows = effect_rows(part, domains, count)
        lines = [f"**{factor}** ({part['blocks']} pairs)", "",
                 "| " + " | ".join(titles) + " |", "| --- |" + " ---: |" * (len(titles) - 1)]
        lines += ["| " + " | ".join([f"`{row[0]}`", *row[1:]]) + " |" for row in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n\n" + EFFECT_CAPTION[0].upper() + EFFECT_CAPTION[1:] + ".\n"


def _two(value: float | None) -> str:
    return _number(value, ".2f")


def _number(value: float | None, form: str) -> str:
    return f"{value:{form}}" if _known(value) else "—"


def _known(value: float | None) -> bool:
    """Whether there is a number: nan becomes None on its way through results.json."""
    return value is not None and math.isfinite(value)


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
