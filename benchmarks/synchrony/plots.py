"""The curves as PNG files: accuracy and loss against gradients and time, ranks beside simulated ones, heterogeneity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from benchmarks.harness.parts import Content
from benchmarks.harness.plots import new_figure, put_legend_above, save
from benchmarks.synchrony.curve import read
from benchmarks.synchrony.modes import MODES, WITH_MOMENTUM
from benchmarks.synchrony.tables import WORDS, pick, spread

_COLOURS = ("#222222", "#999999", "#c6dbef", "#6baed6", "#08519c", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd")
STYLE: Mapping[str, str] = MappingProxyType(dict(zip(MODES, _COLOURS, strict=True)))
_DASHED = ("bsp, server", "gossip, random")
_LOW = 0.90  # of the axis of accuracies; a reduced run's are lower
_X = (("batches", 0, "batches' worth of gradients"), ("seconds", 1, "simulated time, s"))
_Y = (("test accuracy, %", 3, 100.0), ("test loss", 2, 1.0))


def draw_times(folder: Path, content: Content) -> None:
    """Draw one file for each number of workers: a column for each kind of slowness."""
    for workers in dict.fromkeys(row["workers"] for row in content["rows"]):
        own = [row for row in content["rows"] if row["workers"] == workers]
        kinds = list(dict.fromkeys(row["slow"] for row in own))
        figure = new_figure(4.6 * len(kinds), 12)
        panels = figure.subplots(4, len(kinds), squeeze=False, sharey="row")
        for column, slow in enumerate(kinds):
            rows = [row for row in own if row["slow"] == slow]
            for line, (y_label, y, scale) in enumerate(_Y):
                for half, (_, x, x_label) in enumerate(_X):
                    axes = panels[line + 2 * half][column]
                    _curves(axes, rows, x, y, scale, content["settings"]["recipe"]["goal"])
                    axes.set_xlabel(x_label)
                    if column == 0:
                        axes.set_ylabel(y_label)
            panels[0][column].set_title(WORDS[slow].replace(" in a step", "\nin a step"), fontsize=10)
        put_legend_above(figure, panels[0][0], 5)
        save(figure, folder / f"times-{workers}.png", dpi=80)


def _curves(axes: Any, rows: Sequence[Mapping[str, Any]], x: int, y: int, scale: float, goal: float) -> None:
    """Draw all modes into one panel."""
    for row in rows:
        points, mode = read(row["curve"]), row["mode"]
        dashes = "--" if mode in _DASHED else "-"
        label = {"color": STYLE[mode], "linestyle": dashes, "linewidth": 1.3, "label": mode}
        axes.plot([p[x] for p in points], [scale * p[y] for p in points], **label)
    axes.grid(alpha=0.25)
    axes.set_xlim(left=0)
    if y == 3:
        axes.axhline(100 * goal, color="black", linewidth=0.6, linestyle=":")
        axes.set_ylim(100 * min(_LOW, goal - 0.2 if goal < 0.95 else _LOW), 100 * min(1.0, goal + 0.012))
    else:
        axes.set_yscale("log")
        ends = [read(row["curve"])[-1].loss for row in rows]
        axes.set_ylim(0.9 * min(ends), 1.0)


def draw_ranks(folder: Path, content: Content) -> None:
    """Draw measured curves beside those of simulated ranks: rows of modes, a column for each kind of slowness."""
    kinds = list(dict.fromkeys(row["slow"] for row in content["predicted"]))
    figure = new_figure(5.4 * len(kinds), 9)
    goal = content["settings"]["recipe"]["goal"]
    teams = [list(MODES)[:5], [list(MODES)[0], *list(MODES)[5:]]]
    panels = figure.subplots(2, len(kinds), squeeze=False, sharey=True)
    for column, slow in enumerate(kinds):
        for line, team in enumerate(teams):
            axes = panels[line][column]
            for mode in team:
                _pair(axes, content, mode, slow)
            axes.axhline(100 * goal, color="black", linewidth=0.6, linestyle=":")
            axes.set_ylim(100 * (goal - 0.07), 100 * min(1.0, goal + 0.01))
            axes.set_xlim(left=0)
            axes.grid(alpha=0.25)
            axes.set_xlabel("wall time (solid), simulated time (dotted), s")
            axes.legend(loc="lower right", fontsize=8)
            if column == 0:
                axes.set_ylabel("test accuracy, %")
        panels[0][column].set_title(WORDS[slow], fontsize=10)
    save(figure, folder / "ranks.png", dpi=80)


def _pair(axes: Any, content: Mapping[str, Any], mode: str, slow: str) -> None:
    """Draw a mode's first run on ranks, and its prediction as far."""
    measured = read(next(r for r in content["rows"] if (r["mode"], r["slow"]) == (mode, slow))["curve"])
    simulated = read(next(r for r in content["predicted"] if (r["mode"], r["slow"]) == (mode, slow))["curve"])
    if not measured:
        return
    simulated = [point for point in simulated if point[0] <= measured[-1][0]]
    for points, style, width, label in ((measured, "-", 1.4, mode), (simulated, ":", 1.4, None)):
        seconds, accuracies = [p[1] for p in points], [100 * p[3] for p in points]
        axes.plot(seconds, accuracies, style, color=STYLE[mode], linewidth=width, label=label)


def draw_heterogeneity(folder: Path, content: Content) -> None:
    """Draw accuracy, and staleness, against the factor; and against the number of equal workers."""
    workers, recipes = content["settings"]["workers"], list(dict.fromkeys(row["recipe"] for row in content["rows"]))
    figure = new_figure(15, 7)
    panels = figure.subplots(2, 3).flatten()
    slowed = [row for row in content["rows"] if row["workers"] == workers]
    factors = sorted({row["factor"] for row in slowed})
    level: dict[str, float] = {}
    for axes, recipe in zip(panels, recipes, strict=False):
        kinds = (("asp", STYLE["asp"]), ("asp, adapted", "#8c564b"), ("ssp, S = 4", STYLE["ssp, S = 4"]))
        for mode, colour in kinds:
            runs = {
                factor: pick(content, recipe=recipe, mode=mode, workers=workers, factor=factor) for factor in factors
            }
            if any(runs.values()):
                _bars(axes, {factor: own for factor, own in runs.items() if own}, colour, mode)
        level[recipe] = fmean(100 * row["accuracy"] for row in pick(content, recipe=recipe, mode="bsp"))
        axes.axhline(level[recipe], color=STYLE["bsp, ring"], linestyle="--", linewidth=1, label="bsp")
        axes.set_title(f"{workers} workers, {recipe}", fontsize=10)
        _label(axes, factors, f"factor of {content['settings']['slow_ones']} slow workers", "test accuracy, %")
    lags = [[r["staleness"] for r in slowed if (r["mode"], r["factor"]) == ("asp", factor)] for factor in factors]
    axes = panels[3]
    axes.plot(factors, [max(lag["max"] for lag in each) for each in lags], "o-", label="largest", color="black")
    axes.plot(factors, [fmean(lag["mean"] for lag in each) for each in lags], "o-", label="mean", color="#999999")
    axes.set_title(f"{workers} workers, asp", fontsize=10)
    _label(axes, factors, f"factor of {content['settings']['slow_ones']} slow workers", "staleness")
    equal = pick(content, recipe=WITH_MOMENTUM, mode="asp", factor=1.0)
    counts = sorted({row["workers"] for row in equal})
    runs = {count: [row for row in equal if row["workers"] == count] for count in counts}
    _bars(panels[4], runs, STYLE["asp"], "asp")
    panels[4].axhline(level[WITH_MOMENTUM], color=STYLE["bsp, ring"], linestyle="--", linewidth=1, label="bsp")
    panels[4].set_title(f"equal workers, {WITH_MOMENTUM}", fontsize=10)
    _label(panels[4], counts, "workers; the mean staleness is one less", "test accuracy, %")
    panels[5].set_axis_off()
    save(figure, folder / "heterogeneity.png", dpi=80)


def _bars(axes: Any, runs: Mapping[Any, Sequence[Mapping[str, Any]]], colour: str, label: str) -> None:
    """Draw mean and spread of accuracies."""
    values = [[100 * row["accuracy"] for row in own] for own in runs.values()]
    spreads = [spread(each) for each in values]
    axes.errorbar(list(runs), [fmean(v) for v in values], spreads, color=colour, marker="o", capsize=3, label=label)


def _label(axes: Any, ticks: Sequence[float], x: str, y: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8)
