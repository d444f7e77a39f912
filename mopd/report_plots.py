"""The report's plots, each an inline SVG string that follows the page's colours in light and dark.

Knows numbers and matplotlib only; no files. Figures are drawn small (one phone column) with placeholder colours that
become CSS variables (`var(--ink)`, `var(--c0)` …), so that one picture serves both schemes. Same data, same bytes.
"""

from __future__ import annotations

import functools
import html
import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

WIDTH = 4.7
# Inches: 338 points, so that 8.5 point text is still readable when a phone shrinks the plot by a quarter.

DOMAIN_COLOURS = 6
PART_COLOURS = 6
_INK, _FAINT = "#0a0101", "#0a0102"
_DOMAIN = [f"#0b01{i:02x}" for i in range(DOMAIN_COLOURS)]
_PART = [f"#0c01{i:02x}" for i in range(PART_COLOURS)]
_LAYER = [f"#0d01{i:02x}" for i in range(8)]
_VARIABLES = {_INK: "--ink", _FAINT: "--line", **{c: f"--c{i}" for i, c in enumerate(_DOMAIN)},
              **{c: f"--k{i}" for i, c in enumerate(_PART)}, **{c: f"--l{i}" for i, c in enumerate(_LAYER)}}
# Placeholders that matplotlib would not use by itself; report_page.py gives each variable its two values.

_STYLE = {"svg.fonttype": "none", "font.size": 8.5, "font.family": "DejaVu Sans", "axes.spines.top": False,
          "axes.spines.right": False, "axes.edgecolor": _FAINT, "axes.labelcolor": _INK, "axes.titlesize": 9,
          "axes.titlelocation": "left", "axes.titlecolor": _INK, "text.color": _INK, "xtick.color": _FAINT,
          "ytick.color": _FAINT, "xtick.labelcolor": _INK, "ytick.labelcolor": _INK, "axes.grid": True,
          "grid.color": _FAINT, "grid.linewidth": 0.6, "axes.axisbelow": True, "legend.frameon": False,
          "legend.fontsize": 8.5, "lines.solid_capstyle": "round", "axes.facecolor": "none", "figure.facecolor": "none"}


def domain_colour(index: int) -> str:
    """CSS name of a domain's colour."""
    return f"var(--c{index % DOMAIN_COLOURS})"


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean of `values` [n] over `window` entries, fewer at the ends; nan entries are passed over, and
    the result is nan only where the whole window is."""
    half = max(0, int(window)) // 2
    there = ~np.isnan(values)
    total = np.concatenate([[0.0], np.cumsum(np.where(there, values, 0.0))])
    count = np.concatenate([[0], np.cumsum(there)])
    at = np.arange(len(values))
    low, high = np.maximum(at - half, 0), np.minimum(at + half + 1, len(values))
    number = count[high] - count[low]
    return np.divide(total[high] - total[low], number, out=np.full(len(values), np.nan), where=number > 0)


def _svg(figure: Figure, name: str, label: str) -> str:
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg"):]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="([^"]+)"', head).group(1)
    # Several pictures share one page: their ids must differ.
    rest = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', rest)
    rest = re.sub(r'(href="|url\()#', rf"\1#{name}-", rest)
    rest = re.sub(r"#0[abcd]01[0-9a-f]{2}\b", lambda m: f"var({_VARIABLES[m.group(0)]})", rest)
    rest = rest.replace("'DejaVu Sans'", "system-ui, sans-serif")
    return f'<svg viewBox="{box}" role="img" aria-label="{html.escape(label, quote=True)}">{rest}'


def _styled(draw: Callable[..., str]) -> Callable[..., str]:
    """Run a plot function under the report's style and leave matplotlib's settings as they were."""
    @functools.wraps(draw)
    def inside(*args: Any, **options: Any) -> str:
        with matplotlib.rc_context(_STYLE):
            return draw(*args, **options)
    return inside


class _Drawing:
    """A figure of one column of the page; `done` gives the SVG."""

    def __init__(self, name: str, label: str, height: float, rows: int = 1):
        self.name, self.label = name, label
        self.figure = Figure(figsize=(WIDTH, height), layout="constrained")
        self.axes = self.figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]

    def done(self) -> str:
        return _svg(self.figure, self.name, self.label)


def _legend(drawing: _Drawing, handles: Sequence[Any], labels: Sequence[str], columns: int = 4) -> None:
    drawing.figure.legend(handles, labels, loc="outside upper left", ncols=min(columns, max(1, len(labels))),
                          columnspacing=1.2, handlelength=1.4, borderaxespad=0.1)


@_styled
def scores_plot(models: Mapping[str, Mapping[str, Mapping[str, float]]], domains: Sequence[str],
                own: Mapping[str, str | None]) -> str:
    """Bars of {model: {domain: {score, low, high}}} with intervals; a teacher's bar in its own domain is outlined."""
    names = list(models)
    draw = _Drawing("scores", "Held-out success share of every model by domain",
                    0.7 + len(names) * (0.14 * len(domains) + 0.1))
    axis, size = draw.axes[0], 0.82 / max(1, len(domains))
    handles = []
    for j, domain in enumerate(domains):
        rows = [(i, models[m][domain], own.get(m) == domain) for i, m in enumerate(names)
                if models[m].get(domain, {}).get("score") is not None]
        y = np.array([i + (j - (len(domains) - 1) / 2) * size for i, _, _ in rows])
        x = np.array([p["score"] for _, p, _ in rows], dtype=float)
        around = [[max(0.0, p["score"] - p["low"]) for _, p, _ in rows],
                  [max(0.0, p["high"] - p["score"]) for _, p, _ in rows]]
        bars = axis.barh(y, x, size * 0.92, color=_DOMAIN[j % DOMAIN_COLOURS], alpha=0.75)
        for bar, (_, _, mine) in zip(bars, rows, strict=True):
            if mine:
                bar.set(edgecolor=_INK, linewidth=1.1, alpha=1.0)
        axis.errorbar(x, y, xerr=around, fmt="none", ecolor=_INK, elinewidth=0.8)
        handles.append(bars)
    axis.set(xlim=(0, 1), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)), yticklabels=names)
    axis.set_xlabel("success share")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    _legend(draw, handles, domains)
    return draw.done()


@_styled
def normalised_plot(rows: Sequence[tuple[str, float, float | None, float | None, Sequence[float]]]) -> str:
    """Dots with intervals of (model, value, low, high, values of its training seeds); 0 is the base, 1 the teachers."""
    draw = _Drawing("normalised", "Normalised score of every model", 0.6 + 0.24 * len(rows))
    axis = draw.axes[0]
    for at in (0, 1):
        axis.axvline(at, color=_INK, linewidth=0.8, linestyle=(0, (3, 3)))
    for i, (_, value, low, high, seeds) in enumerate(rows):
        if low is not None and high is not None:
            axis.plot([low, high], [i, i], color=_DOMAIN[0], linewidth=2.2)
        axis.plot(seeds, [i] * len(seeds), "|", color=_INK, markersize=8, markeredgewidth=1)
        axis.plot([value], [i], "o", color=_DOMAIN[0], markersize=5.5)
    axis.set(ylim=(len(rows) - 0.5, -0.5), yticks=range(len(rows)), yticklabels=[r[0] for r in rows])
    axis.set_xlabel("0 = base, 1 = each domain's own teacher")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    return draw.done()


@_styled
def curves_plot(name: str, label: str, curves: Mapping[str, Sequence[tuple[np.ndarray, np.ndarray]]], *,
                smoothed: bool, limits: tuple[float | None, float | None] = (None, None)) -> str:
    """One line per domain over steps: {domain: [(steps [n], values [n]) per training seed]}. Each seed is drawn faint;
    the strong line is the mean over seeds, smoothed over a twelfth of the run if `smoothed`."""
    draw = _Drawing(name, label, 2.7)
    axis, handles = draw.axes[0], []
    shown = []
    for i, (domain, seeds) in enumerate(curves.items()):
        colour = _DOMAIN[i % DOMAIN_COLOURS]
        for steps, values in seeds:
            axis.plot(*_thin(steps, values), color=colour, alpha=0.28, linewidth=0.7)
        steps = np.unique(np.concatenate([s for s, _ in seeds]))
        mean = _mean_at(steps, seeds)
        line = smooth(mean, max(3, len(steps) // 12)) if smoothed else mean
        handles += axis.plot(*_thin(steps, line), color=colour, linewidth=1.8)
        shown.append(domain)
    axis.set_ylim(*limits)
    axis.set(xlabel="optimizer step", ylabel=label)
    axis.margins(x=0.01)
    _legend(draw, handles, shown)
    return draw.done()


def _mean_at(steps: np.ndarray, seeds: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """Mean over seeds at each step, nan where no seed has a number."""
    total, count = np.zeros(len(steps)), np.zeros(len(steps))
    for own_steps, values in seeds:
        at = np.searchsorted(steps, own_steps)
        there = ~np.isnan(values)
        total[at[there]] += values[there]
        count[at[there]] += 1
    return np.divide(total, count, out=np.full(len(steps), np.nan), where=count > 0)


def _thin(steps: np.ndarray, values: np.ndarray, limit: int = 400) -> tuple[np.ndarray, np.ndarray]:
    """At most `limit` points, evenly picked, the last one kept: more cannot be seen at this width."""
    if len(steps) <= limit:
        return steps, values
    keep = np.unique(np.linspace(0, len(steps) - 1, limit).round().astype(int))
    return steps[keep], values[keep]


@_styled
def cost_plot(seconds: Mapping[str, Mapping[str, float]], parts: Mapping[str, str]) -> str:
    """Stacked bars of {student: {part: seconds}}; `parts` maps part to its words and gives the order."""
    draw = _Drawing("cost", "Seconds of training by what they were spent on", 0.95 + 0.34 * len(seconds))
    axis, left, handles = draw.axes[0], np.zeros(len(seconds)), []
    shown = [p for p in parts if any(s.get(p, 0) > 0 for s in seconds.values())]
    for part in shown:
        width = np.array([s.get(part, 0.0) for s in seconds.values()])
        handles.append(axis.barh(range(len(seconds)), width, 0.62, left=left, color=_PART[list(parts).index(part)]))
        left += width
    axis.set(yticks=range(len(seconds)), yticklabels=list(seconds), ylim=(len(seconds) - 0.5, -0.5), xlabel="seconds")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    _legend(draw, handles, [parts[p] for p in shown], columns=2)
    return draw.done()


@_styled
def expert_load_plot(name: str, steps: np.ndarray, loads: Mapping[str, np.ndarray]) -> str:
    """Three panels over steps, a line per layer: {"cv" | "peak" | "cold": [steps, layers]}."""
    words = {"cv": "cv = std / mean load", "peak": "peak = max / mean load",
             "cold": "cold = share of experts under a tenth of the mean"}
    draw = _Drawing(name, "Expert load by layer over steps", 4.4, rows=len(loads))
    handles: list[Any] = []
    layers = next(iter(loads.values())).shape[1]
    for axis, (kind, values) in zip(draw.axes, loads.items(), strict=True):
        lines = [axis.plot(*_thin(steps, values[:, i]), color=_LAYER[i * (len(_LAYER) - 1) // max(1, layers - 1)],
                           linewidth=0.9)[0] for i in range(layers)]
        axis.set_title(words.get(kind, kind))
        axis.set_ylim(bottom=0)
        axis.margins(x=0.01)
        handles = handles or lines
    draw.axes[-1].set_xlabel("optimizer step")
    shown = range(layers) if layers <= 8 else np.unique(np.linspace(0, layers - 1, 5).astype(int))
    _legend(draw, [handles[i] for i in shown], [f"layer {i}" for i in shown])
    return draw.done()


@_styled
def depth_plot(name: str, depths: Mapping[str, Mapping[int, float]], *, last: int = 20) -> str:
    """Grouped bars of {domain: {turn of the decision point: count}} as shares within the domain; what is deeper than
    `last` shares one bin."""
    draw = _Drawing(name, "Depth of the decision points by domain", 2.6)
    axis, handles = draw.axes[0], []
    deepest = min(last, max((max(d) for d in depths.values() if d), default=0))
    size = 0.86 / max(1, len(depths))
    for j, counts in enumerate(depths.values()):
        folded = np.zeros(deepest + 1)
        for depth, count in counts.items():
            folded[min(depth, deepest)] += count
        x = np.arange(deepest + 1) + (j - (len(depths) - 1) / 2) * size
        handles.append(axis.bar(x, folded / max(1.0, folded.sum()), size, color=_DOMAIN[j % DOMAIN_COLOURS]))
    over = any(max(d, default=0) > last for d in depths.values())
    ticks = np.unique(np.linspace(0, deepest, min(deepest + 1, 11)).astype(int))
    axis.set(xlabel="turn of the decision point (0 = the first)", ylabel="share of the domain's points", xticks=ticks,
             xticklabels=[f"{t}+" if over and t == last else str(t) for t in ticks])
    axis.grid(axis="x", visible=False)
    _legend(draw, handles, list(depths))
    return draw.done()


@_styled
def streams_plot(name: str, tokens: Mapping[str, Mapping[str, float]], streams: Sequence[str]) -> str:
    """Stacked bars of {domain: {stream: trained tokens}}."""
    draw = _Drawing(name, "Trained tokens by domain and stream", 0.9 + 0.34 * len(tokens))
    axis, left, handles = draw.axes[0], np.zeros(len(tokens)), []
    for i, stream in enumerate(streams):
        width = np.array([t.get(stream, 0) for t in tokens.values()], dtype=float)
        handles.append(axis.barh(range(len(tokens)), width, 0.62, left=left, color=_PART[i % PART_COLOURS]))
        left += width
    axis.xaxis.set_major_formatter(lambda v, _: f"{v / 1000:g}k" if v >= 1000 else f"{v:g}")
    axis.set(yticks=range(len(tokens)), yticklabels=list(tokens), ylim=(len(tokens) - 0.5, -0.5),
             xlabel="action tokens with loss")
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    _legend(draw, handles, list(streams), columns=3)
    return draw.done()
