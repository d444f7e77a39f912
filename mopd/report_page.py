"""The one-file HTML page of a run: tables, inline SVG plots, episodes coloured by the teacher's log-probabilities.

Knows the plain data that `mopd.report` read, not the files. The page loads nothing from anywhere (its content policy
forbids it), follows the reader's light or dark scheme, and escapes every text that a model or environment wrote.
"""

from __future__ import annotations

import collections
import html
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mopd import report_plots as plots
from mopd.report import COST_PARTS, cost_columns, format_count, format_seconds, own_domain, table_rows
from mopd.report_factors import EFFECT_CAPTION, effect_rows

MAX_EPISODE_BYTES = 1_400_000
# Of the page's 3 MB; plots take a few hundred kB.
MAX_OTHER_TEXT = 4000
# Characters of one prompt or observation that are shown.

Students = dict[str, dict[str, list[dict[str, Any]]]]

_PART_WORDS = {"training": "training", "sampling": "student sampling", "scoring": "teacher scoring",
               "environments": "environments", "grading": "grading", "rest": "everything else"}

_BINS = ((0.9, "over 90%"), (0.5, "50–90%"), (0.2, "20–50%"), (0.05, "5–20%"), (0.0, "under 5%"))
# The teacher's probability of the sampled token. Blue to orange with growing contrast, which colour-blind readers can
# tell apart; the last class is underlined as well.


def _e(text: Any) -> str:
    return html.escape(str(text), quote=True)


def render_page(results: dict[str, Any], students: Students, episodes: list[dict[str, Any]], *,
                name: str = "run") -> str:
    """The whole page as text, from what `build_results` and `load_students` return and what episodes.json holds."""
    parts = [_effects(results)] if results.get("study") else [_score_plots(results), _cost(results)]
    body = "\n".join([_head(results, name), _table(results), *parts[:1], _students(results, students), *parts[1:],
                      _episodes(episodes), _notes(results)])
    return ('<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'; "
            "script-src 'unsafe-inline'; img-src data:\">\n"
            '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
            f"<title>{_e(name)} · MOPD² report</title>\n<style>{_CSS}</style>\n</head>\n<body>\n"
            f"<main>\n{body}\n</main>\n"
            f'<div id="tip" role="status" hidden></div>\n<script>{_JS}</script>\n</body>\n</html>\n')


def _figure(title: str, picture: str, words: str = "") -> str:
    return f"<figure><figcaption><b>{_e(title)}</b>{' ' + _e(words) if words else ''}</figcaption>{picture}</figure>"


def _head(results: dict[str, Any], name: str) -> str:
    value = results.get("normalised", {}).get("student_mixed")
    tiles = []
    if value is not None:
        low, high = results["normalised_interval"]["student_mixed"]
        between = "" if low is None else f"95%: {low:.2f} to {high:.2f}"
        tiles.append(("normalised score of the mixed student", f"{value:.2f}", between))
    average = results.get("normalised", {}).get("parameter_average")
    if average is not None:
        tiles.append(("normalised score of the parameter average", f"{average:.2f}", ""))
    difference = results.get("above_parameter_average", {}).get("student_mixed")
    if difference and difference["difference"] is not None:
        between = "" if difference["low"] is None else f"95%: {difference['low']:+.2f} to {difference['high']:+.2f}"
        tiles.append(("student above the parameter average", f"{difference['difference']:+.2f}", between))
    if results.get("wall_seconds") is not None:
        tiles.append(("whole run", format_seconds(results["wall_seconds"]), ""))
    shown = "".join(f"<div class=tile><span>{_e(t)}</span><strong>{_e(v)}</strong><small>{_e(w)}</small></div>"
                    for t, v, w in tiles)
    stages = results.get("stages") or {}
    listed = "".join(f"<tr><td>{_e(s)}</td><td>{_e(format_seconds(t))}</td></tr>" for s, t in stages.items())
    if listed:
        listed = f"<details><summary>Time by stage</summary><table class=plain>{listed}</table></details>"
    return (f"<header><p class=kicker>MOPD² report · {_e(name)}</p><h1>Several teachers, one student</h1>"
            "<p>One small language model was trained on its own samples to act like several teachers, each an expert "
            "in one domain, with the teacher's signal on every token that it wrote. This page shows what it reached on "
            "tasks that no model was trained on, and what that cost.</p>"
            f"<div class=tiles>{shown}</div>{listed}</header>")


def _table(results: dict[str, Any]) -> str:
    rows = table_rows(results)
    if not rows:
        return ("<section><h2>Results</h2><p class=missing>No evaluations and no training metrics are there yet.</p>"
                "</section>")
    domains, costs = results["domains"], cost_columns(results)
    head = "".join(f'<th scope=col><i class=dot style="background:{plots.domain_colour(i)}"></i>{_e(d)}</th>'
                   for i, d in enumerate(domains))
    lines = []
    for row in rows:
        cells = []
        for domain in domains:
            part = results["models"].get(row["model"], {}).get(domain)
            if part is None or part["score"] is None:
                cells.append("<td>—</td>")
                continue
            own = row["own"] == domain
            more = f"{part['low']:.3f} to {part['high']:.3f}, {part['n']} tasks"
            if part.get("progress") is not None:
                more += f"; mean progress {part['progress']:.3f}"
            score, half = row["scores"][domain]
            mark = (" class=own", " ◆") if own else ("", "")
            cells.append(f'<td{mark[0]} title="{_e(more)}">{score}{mark[1]}<small>{half}</small></td>')
        lines.append(f"<tr><th scope=row>{_e(row['model'])}</th>{''.join(cells)}<td>{row['normalised']}<small>"
                     f"{_e(row['interval'])}</small></td>{''.join(f'<td>{row[key]}</td>' for key, _ in costs)}</tr>")
    seeds = "".join(
        f"<tr><td>{_e(m)}</td><td>{_e(s)}</td>"
        f"<td>{_e(', '.join(f'{d} {_two(v)}' for d, v in p['scores'].items()))}</td>"
        f"<td>{_two(p.get('normalised'))}</td></tr>"
        for m, by_seed in results.get("seeds", {}).items() for s, p in by_seed.items())
    if seeds:
        seeds = ("<details><summary>Each training seed</summary><div class=scroll><table class=plain><tr><th>model</th>"
                 f"<th>seed</th><th>success shares</th><th>normalised</th></tr>{seeds}</table></div></details>")
    return (f"<section><h2>Results</h2><div class=scroll><table class=results><thead><tr><th scope=col>model</th>{head}"
            f"<th scope=col>normalised</th>{''.join(f'<th scope=col>{_e(title)}</th>' for _, title in costs)}"
            f"</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
            "<p class=fine>Success share on held-out tasks, ± half of its 95% Wilson interval; ◆ marks a teacher in "
            "its own domain. Normalised: mean over domains of (model − base) / (teacher − base), its interval from a "
            "bootstrap that draws the tasks of all models together. Intervals speak about the choice of tasks; a "
            "student's numbers are means over its training seeds. Costs are those of training the student.</p>"
            f"{seeds}</section>")


def _effects(results: dict[str, Any]) -> str:
    """The main effects of a study over factors, a table per factor."""
    tables = []
    for factor, part in results["study"]["effects"].items():
        titles, rows = effect_rows(part, results["domains"], format_count)
        head = "".join(f"<th scope=col>{_e(title)}</th>" for title in titles)
        lines = "".join("<tr><th scope=row>" + _e(row[0]) + "</th>" + "".join(f"<td>{_e(c)}</td>" for c in row[1:]) + "</tr>"
                        for row in rows)
        tables.append(f"<h3>{_e(factor)} <small>{part['blocks']} pairs</small></h3><div class=scroll><table class=plain><tr>"
                      f"{head}</tr>{lines}</table></div>")
    return (f"<section><h2>Main effects</h2>{''.join(tables)}<p class=fine>{_e(EFFECT_CAPTION[0].upper())}"
            f"{_e(EFFECT_CAPTION[1:])}.</p></section>")


def _two(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"


def _score_plots(results: dict[str, Any]) -> str:
    models, domains = results.get("models", {}), results["domains"]
    if not models:
        return ""
    figures = [_figure("Scores", plots.scores_plot(models, domains, {m: own_domain(m) for m in models}),
                       "with 95% intervals; outlined: a teacher in its own domain")]
    rows = []
    for model, value in results.get("normalised", {}).items():
        if value is not None and model != "base":
            low, high = results["normalised_interval"][model]
            own = [p.get("normalised") for p in results["seeds"].get(model, {}).values()]
            seeds = [x for x in own if x is not None]
            rows.append((model, value, low, high, seeds))
    if rows:
        figures.append(_figure("Normalised scores", plots.normalised_plot(rows),
                               "bar: 95% interval over tasks; ticks: training seeds"))
    return f"<section><div class=grid>{''.join(figures)}</div></section>"


def _series(by_seed: dict[str, list[dict[str, Any]]], domain: str, key: str) -> list[tuple[np.ndarray, np.ndarray]]:
    """(steps, values) per training seed, nan where a step has no such number; seeds without any number are left out."""
    found = []
    for records in by_seed.values():
        values = np.array([_float(r.get("domains", {}).get(domain, {}).get(key)) for r in records])
        if not np.isnan(values).all():
            found.append((np.array([r["step"] for r in records]), values))
    return found


def _ahead(key: str, by_seed: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Curves of a student whose samplers ran ahead of training: who waited for whom, and how old its tokens were."""
    def series(number) -> list[tuple[np.ndarray, np.ndarray]]:
        found = []
        for records in by_seed.values():
            values = np.array([number(r) for r in records])
            if not np.isnan(values).all():
                found.append((np.array([r["step"] for r in records]), values))
        return found

    def idle(record: dict[str, Any]) -> float:
        seconds = record.get("seconds", {})
        return _float(seconds.get("idle")) / (_float(seconds.get("total")) or math.nan)

    def told(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
        return series(lambda record: _float(record.get("sampling", {}).get(name)))

    if not (busy := told("busy_share")):
        return []
    shares = {"trainer waits for samples": series(idle), "samplers have turns under way": busy}
    ages = {"mean": told("staleness_mean"), "oldest": told("staleness_max")}
    dropped = collections.Counter()
    for records in by_seed.values():
        for record in records:
            dropped.update(record.get("sampling", {}).get("dropped", {}))
    words = ", ".join(f"{number} {reason}" for reason, number in sorted(dropped.items())) or "none"
    return [_figure("Training and sampling beside each other", plots.curves_plot(
                f"{key}-overlap", "share of the time", {name: s for name, s in shares.items() if s}, smoothed=True,
                limits=(0, 1)), "strong: running mean over seeds; faint: each seed"),
            _figure("Age of the tokens", plots.curves_plot(
                f"{key}-staleness", "versions behind the trainer", {name: s for name, s in ages.items() if s},
                smoothed=False), f"groups dropped: {words}")]


def _float(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else math.nan


def _students(results: dict[str, Any], students: Students) -> str:
    if not students:
        return "<section><h2>Training</h2><p class=missing>No training metrics are there yet.</p></section>"
    parts = []
    for i, (name, by_seed) in enumerate(students.items()):
        inside = _student(f"s{i}", name, by_seed, results)
        steps = max(r[-1]["step"] for r in by_seed.values())
        seeds = f"{len(by_seed)} training seed{'s' if len(by_seed) > 1 else ''}"
        parts.append(f"<details{' open' if i == 0 else ''}><summary><b>{_e(name)}</b> · {seeds}, to step {steps}"
                     f"</summary>{inside}</details>")
    return f"<section><h2>Training</h2>{''.join(parts)}</section>"


def _student(key: str, name: str, by_seed: dict[str, list[dict[str, Any]]], results: dict[str, Any]) -> str:
    everything = [r for records in by_seed.values() for r in records]
    seen = dict.fromkeys(d for r in everything for d in r.get("domains", {}))
    # A domain keeps its colour on the whole page.
    domains = [d for d in results["domains"] if d in seen] + [d for d in seen if d not in results["domains"]]
    figures, absent = [], []
    curves = {d: s for d in domains if (s := _series(by_seed, d, "reverse_kl"))}
    if curves:
        figures.append(_figure("Reverse KL to the domain's teacher", plots.curves_plot(
            f"{key}-kl", "reverse KL per token (nats)", curves, smoothed=True),
            "strong: running mean over seeds; faint: each seed"))
    else:
        absent.append("reverse KL by domain")
    curves = {d: s for d in domains if (s := _series(by_seed, d, "share"))}
    if curves:
        figures.append(_figure("Share of each domain in the batch", plots.curves_plot(
            f"{key}-share", "share of the batch", curves, smoothed=False, limits=(0, 1)), "mean over seeds"))
    else:
        absent.append("shares by domain")
    figures += _ahead(key, by_seed)
    depths = {d: collections.Counter() for d in domains}
    tokens = {d: collections.Counter() for d in domains}
    for record in everything:
        for domain, part in record.get("domains", {}).items():
            for depth, count in (part.get("depth") or {}).items():
                depths[domain][int(depth)] += count
            for stream, numbers in (part.get("streams") or {}).items():
                tokens[domain][stream] += numbers.get("tokens") or 0
    if any(depths.values()):
        figures.append(_figure("Depth of the decision points", plots.depth_plot(f"{key}-depth", depths),
                               _selection_words(everything)))
    else:
        absent.append("the depth of decision points")
    streams = list(dict.fromkeys(s for t in tokens.values() for s in t))
    if streams:
        total = sum(sum(t.values()) for t in tokens.values()) or 1
        split = ", ".join(f"{s} {sum(t[s] for t in tokens.values()) / total:.0%}" for s in streams)
        figures.append(_figure("Trained tokens by stream", plots.streams_plot(f"{key}-streams", tokens, streams),
                               f"all seeds: {split}"))
    else:
        absent.append("token counts by stream")
    load = _expert_load(key, by_seed)
    if load:
        figures.append(load)
    else:
        absent.append("expert load")
    alerts = collections.Counter(a for r in everything for a in (r.get("router") or {}).get("alerts", []))
    more = "".join(f"<li>{_e(a)}{f' ({n} steps)' if n > 1 else ''}</li>" for a, n in alerts.most_common(8))
    if len(alerts) > 8:
        more += f"<li>and {len(alerts) - 8} further alerts</li>"
    if more:
        more = f"<p class=fine>Expert-load alerts:</p><ul class=fine>{more}</ul>"
    if absent:
        more += f"<p class=missing>{_e(name)} reports no {_e(', no '.join(absent))}.</p>"
    return f"<div class=grid>{''.join(figures)}</div>{_end_of_training(by_seed, domains)}{more}"


def _selection_words(records: list[dict[str, Any]]) -> str:
    """Where the decision points came from, over all steps and seeds, and the share of pivots at the end if there are any."""
    sources: collections.Counter[str] = collections.Counter()
    for record in records:
        for part in (record.get("selection") or {}).values():
            sources.update(part.get("sources") or {})
    total = sum(sources.values())
    words = [", ".join(f"{kind} {count / total:.0%}" for kind, count in sources.most_common())] if total else []
    last = [stream for part in ((records[-1].get("selection") or {}) if records else {}).values()
            for stream in (part.get("streams") or {}).values()]
    if candidates := sum(s["candidates"] for s in last if "pivots" in s):
        words.append(f"pivots at the end: {sum(s.get('pivots', 0) for s in last) / candidates:.0%} of {candidates} points")
    return "; ".join(words)


def _expert_load(key: str, by_seed: dict[str, list[dict[str, Any]]]) -> str:
    """The first training seed that reports a load; layers by step."""
    for seed, records in by_seed.items():
        there = [r for r in records if (r.get("router") or {}).get("cv")]
        layers = {len(r["router"][k]) for r in there for k in ("cv", "peak", "cold") if r["router"].get(k)}
        if len(layers) != 1:
            continue
        blank = [math.nan] * layers.pop()
        loads = {k: np.array([[_float(v) for v in r["router"].get(k) or blank] for r in there])
                 for k in ("cv", "peak", "cold")}
        picture = plots.expert_load_plot(f"{key}-load", np.array([r["step"] for r in there]), loads)
        return _figure("Expert load by layer", picture, f"training seed {seed}")
    return ""


def _end_of_training(by_seed: dict[str, list[dict[str, Any]]], domains: list[str]) -> str:
    """A table of each domain's gauges at both ends of training, means over a tenth of the steps of every seed."""
    kinds = [("reverse_kl", "reverse KL", ".3f"), ("forward_kl", "forward KL", ".3f"),
             ("teacher_agreement", "agreement with the teacher", ".0%"),
             ("entropy_student", "entropy of the student", ".2f"), ("entropy_teacher", "entropy of the teacher", ".2f"),
             ("success", "success while training", ".0%"),
             ("turns", "turns", ".1f"), ("masked_share", "masked tokens", ".1%"),
             ("staleness", "staleness", ".1f")]
    lines = []
    for kind, words, form in kinds:
        cells = []
        for domain in domains:
            ends = [v[~np.isnan(v)] for _, v in _series(by_seed, domain, kind)]
            if ends:
                first = np.mean([v[:max(1, len(v) // 10)].mean() for v in ends])
                last = np.mean([v[-max(1, len(v) // 10):].mean() for v in ends])
                cells.append(f"<td>{first:{form}} → {last:{form}}</td>")
            else:
                cells.append("<td>—</td>")
        lines.append(f"<tr><th scope=row>{words}</th>{''.join(cells)}</tr>")
    cells = []
    for domain in domains:
        infra: collections.Counter[str] = collections.Counter()
        for records in by_seed.values():
            for record in records:
                infra.update(record.get("domains", {}).get(domain, {}).get("infra_failures") or {})
        cells.append(f"<td>{_e(', '.join(f'{c} {k}' for k, c in sorted(infra.items())) or 'none')}</td>")
    lines.append(f"<tr><th scope=row>infrastructure failures, all seeds</th>{''.join(cells)}</tr>")
    head = "".join(f"<th scope=col>{_e(d)}</th>" for d in domains)
    return (f"<div class=scroll><table class=plain><tr><th>first → last tenth of the steps</th>{head}</tr>"
            f"{''.join(lines)}</table></div>") if domains else ""


def _cost(results: dict[str, Any]) -> str:
    cost = results.get("cost", {})
    if not cost:
        return ""
    seconds = {}
    for name, part in cost.items():
        rest = part["total_seconds"] - sum(part["seconds"].values())
        seconds[name] = {**part["seconds"], "rest": max(0.0, rest) if rest > 0.005 * part["total_seconds"] else 0.0}
    lines = ""
    for name, part in cost.items():
        total = sum(seconds[name].values()) or 1.0
        split = ", ".join(f"{_PART_WORDS[p]} {v / total:.0%}" for p, v in seconds[name].items() if v)
        counts = [format_count(part[k]) for k in ("sampled_tokens", "trained_tokens", "computed_tokens",
                                                  "environment_steps")]
        each = f"{part['total_seconds'] / max(1, part['optimizer_steps']):.2f}"
        lines += (f"<tr><th scope=row>{_e(name)}</th>"
                  + "".join(f"<td>{_e(c)}</td>" for c in (part["optimizer_steps"], *counts, each))
                  + f"<td class=wide>{_e(split)}</td></tr>")
    picture = plots.cost_plot(seconds, {p: _PART_WORDS[p] for p in (*COST_PARTS, "rest")})
    figure = _figure("Where the seconds went", picture, "mean over training seeds")
    head = "".join(f"<th scope=col>{w}</th>" for w in (
        "student", "optimizer steps", "sampled tokens", "trained tokens", "computed tokens", "environment steps",
        "seconds a step", "split"))
    return (f"<section><h2>Cost</h2><div class=grid>{figure}</div><div class=scroll><table class=plain><tr>{head}</tr>"
            f"{lines}</table></div></section>")


# Episodes


def _shade(logprob: float) -> int:
    if math.isnan(logprob):
        return len(_BINS)
    return next(i for i, (least, _) in enumerate(_BINS) if math.exp(min(0.0, logprob)) >= least)


def _token(token: dict[str, Any]) -> str:
    teacher, student = _float(token.get("teacher_logprob")), _float(token.get("student_logprob"))
    said = [f"{who} {value:.2f} ({math.exp(min(0.0, value)):.1%})"
            for who, value in (("teacher", teacher), ("student", student)) if not math.isnan(value)]
    text = str(token.get("text", ""))
    shown = _e(text).replace("\n", "↵\n") if text else "∅"
    return f'<i class=t{_shade(teacher)} title="{" · ".join(said) or "not scored"}">{shown}</i>'


def _segment(segment: dict[str, Any]) -> str:
    kind, text = str(segment.get("kind", "")), str(segment.get("text", ""))
    if kind == "action":
        tokens = segment.get("tokens") or []
        return f"<pre class=action>{''.join(map(_token, tokens)) if tokens else _e(text)}</pre>"
    cut = text[:MAX_OTHER_TEXT]
    more = f"\n… {len(text) - len(cut)} more characters" if len(cut) < len(text) else ""
    block = f"<pre class=other>{_e(cut + more)}</pre>"
    return f"<details class=prompt><summary>prompt</summary>{block}</details>" if kind == "prompt" else block


def _episode(episode: dict[str, Any], first: bool) -> str:
    segments = [s for s in episode.get("segments") or [] if isinstance(s, dict)]
    scored = [_float(t.get("teacher_logprob")) for s in segments for t in s.get("tokens") or []]
    scored = [x for x in scored if not math.isnan(x)]
    turns = sum(s.get("kind") == "action" for s in segments)
    mean = f" · teacher {np.mean(scored):.2f} nats a token" if scored else ""
    outcome = "success" if episode.get("success") else "no success"
    title = " · ".join(_e(episode[k]) for k in ("domain", "task", "model") if episode.get(k))
    length = f"{turns} turn{'' if turns == 1 else 's'}"
    return (f"<details class=episode{' open' if first else ''}><summary><b>{title}</b> "
            f"<span class=fine>{outcome}, {length}{mean}</span></summary>{''.join(map(_segment, segments))}</details>")


def _interleaved(episodes: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One of each domain after the other, so that a cut leaves every domain its first ones."""
    by_domain: dict[str, list[dict[str, Any]]] = {}
    for episode in episodes:
        by_domain.setdefault(str(episode.get("domain", "")), []).append(episode)
    for i in range(max((len(v) for v in by_domain.values()), default=0)):
        yield from (v[i] for v in by_domain.values() if i < len(v))


def _episodes(episodes: list[dict[str, Any]]) -> str:
    head = "<section><h2>Episodes, as the teacher sees them</h2>"
    if not episodes:
        return head + "<p class=missing>No sampled episodes are there.</p></section>"
    shown, size, left_out = [], 0, 0
    for episode in _interleaved(episodes):
        text = _episode(episode, not shown)
        if size + len(text.encode()) > MAX_EPISODE_BYTES:
            left_out += 1
            continue
        size += len(text.encode())
        shown.append(text)
    legend = "".join(f"<span><i class=t{i}>{_e(words)}</i></span>" for i, (_, words) in enumerate(_BINS))
    more = ""
    if left_out:
        more = f"<p class=missing>{left_out} further episodes are left out to keep this page small.</p>"
    return (f"{head}<p>Every token that the model wrote, coloured by the probability that the domain's teacher gives "
            "it in that place. Hover over or tap a token for both log-probabilities.</p>"
            f"<p class=legend>teacher: {legend}</p>{''.join(shown)}{more}</section>")


def _notes(results: dict[str, Any]) -> str:
    if not results.get("notes"):
        return ""
    return ("<section><h2>What is missing or special</h2><ul class=fine>"
            + "".join(f"<li>{_e(n)}</li>" for n in results["notes"]) + "</ul></section>")


_LIGHT = ("--paper:#fbfaf7;--card:#fff;--ink:#22262b;--soft:#5d656f;--line:#dcdcd6;--mark:#f1efe8;"
          "--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#b0568f;--c4:#b98500;--c5:#3f9bd1;"
          "--k0:#33508f;--k1:#3fa7a0;--k2:#d0a62a;--k3:#b5577f;--k4:#7a68ae;--k5:#a9afb8;"
          "--l0:#3b1f6b;--l1:#43418e;--l2:#3a6396;--l3:#2f8290;--l4:#2f9e80;--l5:#5ab55f;--l6:#93b83c;--l7:#bfa91c;"
          "--t0:#bcdcf5;--t1:#e0eef8;--t2:#f3e9d6;--t3:#fbcf9b;--t4:#f39a4e")
_DARK = ("--paper:#15181c;--card:#1d2126;--ink:#e6e7e3;--soft:#a3abb5;--line:#3a4048;--mark:#262b31;"
         "--c0:#56b0ea;--c1:#f28a48;--c2:#35c79e;--c3:#dd93c2;--c4:#e6b84a;--c5:#9ad4f5;"
         "--k0:#7f9ce0;--k1:#5cc4bc;--k2:#e0bd55;--k3:#d983a6;--k4:#a999dd;--k5:#747c86;"
         "--l0:#b49af0;--l1:#8f93ee;--l2:#6fa6ea;--l3:#56bed0;--l4:#4fd1a8;--l5:#83dc86;--l6:#bfe070;--l7:#ecd95f;"
         "--t0:#1f4f73;--t1:#233948;--t2:#3b362a;--t3:#6e4718;--t4:#a85a12")

_CSS = (f":root{{color-scheme:light dark;{_LIGHT}}}@media(prefers-color-scheme:dark){{:root{{{_DARK}}}}}" """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:66rem;margin:0 auto;padding:1.5rem 1rem 5rem}
h1{font-size:1.9rem;line-height:1.2;margin:.2rem 0 .6rem}h2{font-size:1.25rem;margin:2.4rem 0 .7rem}
header>p{max-width:44rem}.kicker{color:var(--soft);font-size:.85rem;margin:0}
.fine,small,.missing{color:var(--soft);font-size:.84rem}.missing{border-left:3px solid var(--c4);padding-left:.7rem}
.tiles{display:flex;flex-wrap:wrap;gap:.7rem;margin:1.2rem 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.7rem 1rem;flex:1 1 9.5rem}
.tile span,.tile small{display:block;color:var(--soft);font-size:.8rem;line-height:1.3}.tile strong{font-size:1.55rem}
.scroll{overflow-x:auto;margin:.6rem 0}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
.results{width:100%;background:var(--card)}
th,td{padding:.42rem .7rem;text-align:right;border-bottom:1px solid var(--line);vertical-align:top;white-space:nowrap}
th{font-weight:600}th[scope=row],tr>:first-child{text-align:left}
.results th[scope=row],.results th:first-child{position:sticky;left:0;background:var(--card)}
td small{display:block}.own{font-weight:700;background:var(--mark)}
thead th{border-bottom:2px solid var(--line);font-size:.86rem}
.wide{white-space:normal;min-width:18rem}.plain{font-size:.86rem}.plain th{font-weight:500}
.dot{display:inline-block;width:.65em;height:.65em;border-radius:50%;margin-right:.4em}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,25rem),1fr));gap:1rem;align-items:start;
margin:.8rem 0}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.8rem;max-width:36rem}
figcaption{font-size:.88rem;color:var(--soft);margin-bottom:.4rem}figcaption b{color:var(--ink)}
svg{display:block;width:100%;height:auto}
details{margin:.6rem 0}summary{cursor:pointer;padding:.3rem 0}
.episode{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:.4rem .9rem}
pre{white-space:pre-wrap;overflow-wrap:anywhere;margin:.4rem 0;
font:.86rem/1.6 ui-monospace,"SF Mono",Menlo,Consolas,monospace}
.other{color:var(--soft);background:var(--mark);border-radius:6px;padding:.5rem .7rem;max-height:22rem;overflow-y:auto}
.action{border-left:3px solid var(--c0);padding-left:.7rem}.prompt summary{font-size:.84rem;color:var(--soft)}
@media(max-width:40rem){.tile strong{font-size:1.25rem}th,td{padding:.35rem .4rem}
.results{font-size:.84rem}.results small{font-size:.72rem}}
pre i,.legend i{font-style:normal;border-radius:3px;padding:.08em 0}.legend i{padding:.15em .5em;margin-left:.35em}
.legend{font-size:.84rem;display:flex;flex-wrap:wrap;gap:.3rem 0;align-items:center}
.t0{background:var(--t0)}.t1{background:var(--t1)}.t2{background:var(--t2)}.t3{background:var(--t3)}
.t4{background:var(--t4);text-decoration:underline}
#tip{position:fixed;left:50%;bottom:1rem;transform:translateX(-50%);background:var(--ink);color:var(--paper);
padding:.45rem .9rem;border-radius:8px;font-size:.86rem;max-width:92vw}
""")

_JS = """(function(){var tip=document.getElementById("tip");document.addEventListener("click",function(e){
var t=e.target.closest("pre i[title],td[title]");tip.hidden=!t;if(t){tip.textContent=t.title}})})()"""
