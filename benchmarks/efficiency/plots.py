"""The pictures: loss over samples and time, and steps to the goal over the batch."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.efficiency.runs import GOAL, RULES, confidence, reached
from benchmarks.harness.parts import Content
from benchmarks.harness.plots import colours
from benchmarks.synchrony.curve import read
from nnmpi.base.picture import new_figure, save_figure

_WORDS = MappingProxyType({"rate": "learning rate", "batch": "batch size"})
FLOOR, CEILING = 0.04, 4.0  # of the loss's axis: curves above it diverge


def kinds(content: Content) -> list[tuple[str, Any]]:
    """Return the varied quantity and its values, in the order of the runs."""
    return list(dict.fromkeys((row["vary"], row[row["vary"]]) for row in content["rows"]))


def draw_descent(folder: Path, content: Content) -> None:
    """Draw loss over samples (above) and over CPU time (below), for rates (left) and batches
    (right).
    """
    figure = new_figure(10, 7.5)
    panels = figure.subplots(2, 2, sharey=True)
    palette = colours()
    for column, (vary, fixed) in enumerate((("rate", "batch"), ("batch", "rate"))):
        values = [value for kind, value in kinds(content) if kind == vary]
        for number, value in enumerate(values):
            local = [row for row in content["rows"] if row["vary"] == vary and row[vary] == value]
            curves = [read(row["curve"]) for row in local]
            points = [list(item) for item in zip(*curves, strict=True)]
            losses = [[point.loss for point in item] for item in points]
            middle = [fmean(loss) for loss in losses]
            half = [confidence(loss)[1] for loss in losses]
            along = (
                [item[0].batches * local[0]["batch"] for item in points],
                [fmean(point.seconds for point in item) for item in points],
            )
            for line, x in enumerate(along):
                # the logarithmic axis of time has no zero: skip its first point
                axes, begin = panels[line][column], line
                axes.plot(
                    x[begin:],
                    middle[begin:],
                    color=palette[number],
                    label=f"{value:g}",
                    linewidth=1.4,
                )
                low, high = (
                    [m + sign * h for m, h in zip(middle, half, strict=True)] for sign in (-1, 1)
                )
                axes.fill_between(
                    x[begin:],
                    low[begin:],
                    high[begin:],
                    color=palette[number],
                    alpha=0.2,
                    linewidth=0,
                )
        fixed_value = next(row[fixed] for row in content["rows"] if row["vary"] == vary)
        panels[0][column].set_title(f"{_WORDS[fixed]} {fixed_value:g}", fontsize=10)
        above = {
            "loc": "lower center",
            "bbox_to_anchor": (0.5, 1.1),
            "ncols": 5,
            "frameon": False,
            "fontsize": 8,
        }
        panels[0][column].legend(**above, title=_WORDS[vary], title_fontsize=9)
    for line, label in enumerate(("samples", "CPU time, s (logarithmic)")):
        for axes in panels[line]:
            axes.set_xlabel(label)
            axes.set_yscale("log")
            axes.set_ylim(FLOOR, CEILING)
            axes.grid(alpha=0.3)
            if line:
                axes.set_xscale("log")
        panels[line][0].set_ylabel("test loss, mean and 95 % interval")
    save_figure(figure, folder / "descent.png")


def draw_scaling(folder: Path, content: Content) -> None:
    """Draw steps to the goal over the batch, a line for each rule, beside perfect scaling."""
    figure = new_figure(6.5, 5)
    axes = figure.subplots()
    batches = sorted({row["batch"] for row in content["rows"]})
    for number, rule in enumerate(RULES):
        local = {
            b: [row for row in content["rows"] if row["rule"] == rule and row["batch"] == b]
            for b in batches
        }
        _draw_steps(axes, local, rule, colours()[number])
    first = [
        reached(row)
        for row in content["rows"]
        if row["rule"] == "none" and row["batch"] == batches[0]
    ]
    steps = fmean(goal.batches for goal in first if goal is not None)
    axes.plot(
        batches,
        [steps * batches[0] / b for b in batches],
        ":",
        color="black",
        label="as many samples",
    )
    axes.set(
        xlabel="batch size", ylabel="steps, mean and 95 % interval", xscale="log", yscale="log"
    )
    axes.set_title(
        f"steps to an accuracy of {GOAL:.0%}, by the rule for the learning rate", fontsize=10
    )
    axes.set_xticks(batches, [str(b) for b in batches])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    save_figure(figure, folder / "scaling.png")


def _draw_steps(
    axes: Any, rows: dict[int, Sequence[dict[str, Any]]], label: str, colour: Any
) -> None:
    """Draw a line through the means of the batches whose seeds all reach the goal, with their
    intervals.
    """
    result = {}
    for x, local in rows.items():
        goals = [reached(row) for row in local]
        if all(goals):
            result[x] = confidence([goal.batches for goal in goals if goal is not None])
    means, halves = ([pair[i] for pair in result.values()] for i in (0, 1))
    axes.errorbar(
        list(result),
        means,
        yerr=halves,
        color=colour,
        label=label,
        marker="o",
        markersize=3,
        capsize=2,
    )
