"""Time against size, both axes logarithmic: what was measured as points, what the model predicted as lines."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives.rows import Row
from nnmpi.comm.sizes import name_bytes
from nnmpi.errors import UsageError
from nnmpi.train.curves import can_draw

MARKERS = "osD^vP*X<>h"


def check_can_draw() -> None:
    """Make sure that matplotlib is there.

    Raises:
        UsageError: when it is not.
    """
    if not can_draw():
        raise UsageError("--plot needs matplotlib; install it (pip install 'nnmpi[plot]') or leave --plot out")


def draw(file: Path, header: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Draw the rows into the file; its name says the format."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(10.8, 6.0), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="bytes in each rank's buffer", ylabel="time, us")
    colours = importlib.import_module("matplotlib").colormaps["tab10"].colors
    some = any(row.predicted_us for row in rows)
    for number, name in enumerate(dict.fromkeys(row.algorithm for row in rows)):
        own = [row for row in rows if row.algorithm == name]
        _draw_one(axes, own, colours[number % len(colours)], MARKERS[number % len(MARKERS)], some)
    sizes = sorted({row.size for row in rows})
    axes.set_xticks(sizes, [name_bytes(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    if some:
        axes.plot([], [], color="grey", label="lines: predicted")
        axes.plot([], [], color="grey", marker="o", linestyle="", label="points: measured, median")
    figure.legend(loc="outside right upper")
    axes.set_title(
        f"{header['operation']}, {header['ranks']} ranks on {header['nodes']} node{'s' * (header['nodes'] != 1)}, "
        f"{header['mpi']}, {header['dtype']}"
    )
    figure.savefig(file, dpi=120)


def _draw_one(axes: Any, rows: Sequence[Row], colour: Any, marker: str, some_predicted: bool) -> None:
    """Draw one algorithm's points, and its line where there is a prediction; else a thin line joins the points."""
    chosen = any(row.chosen for row in rows)  # the lines of what was chosen are there already
    predicted = [(row.size, row.predicted_us) for row in rows if row.predicted_us and not chosen]
    if predicted:
        axes.plot(*zip(*predicted, strict=True), color=colour, linewidth=1.4)
    axes.plot(
        [row.size for row in rows],
        [row.p50_us for row in rows],
        color=colour,
        marker=marker,
        markersize=6,
        linestyle="" if predicted or chosen and some_predicted else ":",
        linewidth=0.8,
        label=rows[0].algorithm + ("" if predicted or chosen or not some_predicted else " (not predicted)"),
    )
