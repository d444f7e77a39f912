"""Pictures of simulations: occupancy and collection over time, as a PNG or SVG by matplotlib, or as a line of text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mopd.simulator import Simulation

BLOCKS = " ▁▂▃▄▅▆▇█"


def sparkline(values: np.ndarray) -> str:
    """One character per value in [0, 1]: ` ` for 0, `█` for 1."""
    return "".join(BLOCKS[int(np.clip(round(float(v) * 8), 0, 8))] for v in values)


def occupancy(simulation: Simulation, bins: int) -> np.ndarray:
    """Share of the slots that were busy in each of `bins` equal parts of the run, from its start."""
    width = simulation.end / bins
    return simulation.busy_seconds(0.0, simulation.end, bins) / (simulation.slots * width)


def plot(simulations: Mapping[str, Simulation], path: str | Path) -> Path:
    """Write a picture: occupancy over time above, batches handed out over time below, a line for each scheduler.

    The ending of `path` names the format (.png, .svg, .pdf). Raises ValueError for another.
    """
    import matplotlib
    from matplotlib.figure import Figure

    file = Path(path)
    if file.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot {file}: the name must end in .png, .svg or .pdf")
    style = {"svg.hashsalt": "mopd", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7, 5), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        for name, found in simulations.items():
            edges = np.linspace(0, found.end, 101)
            above.stairs(occupancy(found, 100), edges, label=name, linewidth=1.3)
            below.step(found.ready_at, np.arange(1, found.steps + 1), where="post", label=name, linewidth=1.3)
        above.set(ylabel="share of slots busy", ylim=(0, 1.05))
        below.set(ylabel="batches collected", xlabel="seconds")
        for axis in (above, below):
            axis.grid(alpha=0.3)
        figure.legend(*above.get_legend_handles_labels(), loc="outside upper left", ncols=4, frameon=False)
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if file.suffix == ".svg" else {"CreationDate": None} if file.suffix == ".pdf" else {}
        figure.savefig(file, dpi=110, metadata=metadata)
    return file
