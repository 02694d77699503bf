"""Time against ranks, both axes logarithmic: a row of panels per machine, a panel per message size."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import plots
from benchmarks.scaling.crossovers import best_by_ranks, fastest_by_ranks
from benchmarks.scaling.sweep import NAMES, MachineModel, SimulatedTime, is_power
from nnmpi.units import format_bytes

UNITS = {
    1e-6: "1 us",
    1e-5: "10 us",
    1e-4: "100 us",
    1e-3: "1 ms",
    1e-2: "10 ms",
    0.1: "100 ms",
    1.0: "1 s",
    10.0: "10 s",
}


def draw(file: Path, models: Sequence[MachineModel], points: Sequence[SimulatedTime]) -> None:
    """Draw a panel for each machine and message size.

    Args:
        file: its name says the format.
        models: the machines.
        points: of all of them.
    """
    sizes = sorted({point.nbytes for point in points})
    figure = plots.new_figure(1.6 + 3.6 * len(sizes), 1.2 + 3.9 * len(models))
    panels = figure.subplots(len(models), len(sizes), sharex=True, sharey="col", squeeze=False)
    for model, row in zip(models, panels, strict=True):
        for nbytes, axes in zip(sizes, row, strict=True):
            own = [point for point in points if (point.machine, point.nbytes) == (model.name, nbytes)]
            _panel(axes, own)
            axes.set_title(f"{model.name}, {format_bytes(nbytes)}", fontsize=11)
    for axes in panels[-1]:
        axes.set_xlabel("ranks")
    for row in panels:
        row[0].set_ylabel("time of one all-reduce")
    panels[0][0].plot([], [], ".", color="grey", label="points: ranks that are no power of two")
    panels[0][0].plot([], [], "o", mfc="none", mec="black", ms=9, label="another is the fastest from here on")
    plots.put_legend_above(figure, panels[0][0], columns=2 * len(sizes) - 1, fontsize=11)
    plots.save(figure, file)


def _panel(axes: Any, points: Sequence[SimulatedTime]) -> None:
    """Draw one machine and size: lines over the powers of two, points for other numbers of ranks."""
    colours = plots.colours()
    axes.set(xscale="log", yscale="log")
    for colour, name in zip(colours, NAMES, strict=False):
        own = [point for point in points if point.algorithm == name]
        powers, others = ([p for p in own if is_power(p.ranks) == power] for power in (True, False))
        axes.plot([p.ranks for p in powers], [p.seconds for p in powers], color=colour, linewidth=1.5, label=name)
        axes.plot([p.ranks for p in others], [p.seconds for p in others], color=colour, linestyle="", marker=".", ms=5)
    _mark_crossovers(axes, points, colours)
    ranks = sorted({point.ranks for point in points if is_power(point.ranks)})
    axes.set_xticks(ranks[:: 2 if len(ranks) > 6 else 1], [str(n) for n in ranks[:: 2 if len(ranks) > 6 else 1]])
    low, high = axes.get_ylim()
    ticks = [tick for tick in UNITS if low <= tick <= high]
    axes.set_yticks(ticks, [UNITS[tick] for tick in ticks])
    axes.minorticks_off()
    axes.grid(alpha=0.25)


def _mark_crossovers(axes: Any, points: Sequence[SimulatedTime], colours: Sequence[Any]) -> None:
    """Ring where another algorithm becomes the fastest, with the number of ranks; write the whole order in a corner."""
    powers = [point for point in points if is_power(point.ranks)]
    last = ""
    for ranks, point in sorted(fastest_by_ranks(powers).items()):
        if last and point.algorithm != last:
            colour = colours[NAMES.index(point.algorithm)]
            axes.plot([ranks], [point.seconds], "o", mfc="none", mec="black", ms=9)
            where = (ranks, point.seconds)
            at_edge = point.ranks == powers[-1].ranks  # the number goes to the left, to stay inside the frame
            shift, side = ((-1, -8), "right") if at_edge else ((3, -8), "left")
            axes.annotate(
                f"{ranks}", where, shift, textcoords="offset points", ha=side, va="top", fontsize=9, color=colour
            )
        last = point.algorithm
    words = "\n".join(["fastest:", *best_by_ranks(powers)])
    axes.text(0.03, 0.97, words, transform=axes.transAxes, va="top", fontsize=8.5, linespacing=1.3)
