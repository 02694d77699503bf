"""A run's staleness as a picture: how often gradients were how stale, and how stale each worker's were.

gradients                          staleness by worker
   | ##                               |             v          v  largest
   | ##  ##                           |  v    v     #          #  mean
   | oo  oo  ##  .. xx                |  #    #     #
   +--------------------              +---------------
     0   1   2      9  staleness         0    1     2   worker       one colour each: the bars on the right are
                                                                     the legend of those on the left
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.synchrony.staleness import Staleness

MOST_BARS = 60
FEW_WORKERS = 10  # so many colours are told apart at a glance


def sum_staleness(records: Sequence[Mapping[str, Any]]) -> Staleness:
    """Return the counts of a whole run, of all its records of kind "staleness"; without workers if there are none.

    Workers are counted together by their number also where a run was resumed with more or fewer of them.
    """
    found = [Staleness.from_json(each) for each in records if each["kind"] == "staleness"]
    total = Staleness(max((len(each.histograms) for each in found), default=0))
    for each in found:
        for mine, theirs in zip(total.histograms, each.histograms, strict=False):
            mine.update(theirs)
    return total


def bars(stale: Staleness, most: int = MOST_BARS) -> tuple[int, list[list[int]]]:
    """Return how many values of staleness share a bar, and the heights of each worker's bars, from staleness 0 on.

    Args:
        most: the largest number of bars.
    """
    width = -(-(stale.largest() + 1) // most)
    heights = [[0] * (stale.largest() // width + 1) for _ in stale.histograms]
    for own, histogram in zip(heights, stale.histograms, strict=True):
        for staleness, count in histogram.items():
            own[staleness // width] += count
    return width, heights


def draw_staleness(figure_type: Any, stale: Staleness, file: Path) -> Path:
    """Draw the picture of a run that has gradients with a staleness, and return the file.

    Args:
        figure_type: matplotlib's Figure.

    Raises:
        OSError: when the file cannot be written.
    """
    figure = figure_type(figsize=(9.6, 4.0), layout="constrained")
    figure.suptitle(f"{stale.count()} gradients: staleness {stale.mean():.3g} on average, at most {stale.largest()}")
    left, right = figure.subplots(1, 2)
    workers = range(len(stale.histograms))
    colours = _colours(len(workers))
    _draw_bars(left, stale, colours)
    right.bar(workers, [stale.mean(worker) for worker in workers], color=colours, label="mean")
    right.plot(workers, [stale.largest(worker) for worker in workers], "v", color="black", ms=4, label="largest")
    right.set(xlabel="worker", ylabel="staleness")
    right.legend()
    for axes in (left, right):
        axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.set_axisbelow(True)
        axes.grid(alpha=0.3)
        axes.set_ylim(0, max(1, axes.get_ylim()[1]))
    figure.savefig(file, dpi=120)
    return file


def _draw_bars(axes: Any, stale: Staleness, colours: Sequence[Any]) -> None:
    """Stack the workers' bars."""
    width, heights = bars(stale)
    edges = [width * number - 0.5 for number in range(len(heights[0]) + 1)]
    below = [0] * len(heights[0])
    for own, colour in zip(heights, colours, strict=True):
        top = [one + other for one, other in zip(below, own, strict=True)]
        axes.stairs(top, edges, baseline=below, fill=True, color=colour)  # one shape per worker, not one per bar
        below = top
    axes.set(xlabel="staleness" if width == 1 else f"staleness, {width} values to a bar", ylabel="gradients")


def _colours(count: int) -> list[Any]:
    """Return a colour for each worker: of many, neighbours have similar ones."""
    colormaps = importlib.import_module("matplotlib").colormaps
    if count <= FEW_WORKERS:
        return list(colormaps["tab10"].colors[:count])
    return [colormaps["viridis"](worker / (count - 1)) for worker in range(count)]
