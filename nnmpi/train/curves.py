"""Curves as PNG files, drawn from metrics.jsonl; needs matplotlib (the `plot` extra)."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nnmpi.compose.stats import PARTS
from nnmpi.errors import UsageError
from nnmpi.synchrony.staleness import Staleness
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_BARS = 60
FEW_WORKERS = 10  # so many colours are told apart at a glance


def bars(stale: Staleness) -> tuple[int, list[list[int]]]:
    """Return how many values of staleness share a bar, and the heights of each worker's bars, from staleness 0 on."""
    width = -(-(stale.largest() + 1) // MOST_BARS)
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


@dataclass(frozen=True)
class Panel:
    """One picture of a run.

    Attributes:
        title: above it.
        label: of the vertical axis.
        series: each line's name, and the kind and the key of its records.
        file: its own name; without one it is in the overview alone.
        along: key and label of the horizontal axis.
        from_zero: whether the vertical axis begins at 0.
    """

    title: str
    label: str
    series: Mapping[str, tuple[str, str]]
    file: str = ""
    along: tuple[str, str] = ("global_step", "step")
    from_zero: bool = True

    def has_points(self, records: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether there is anything to draw."""
        return any(_points(records, *found)[0] for found in self.series.values())


def _trained(key: str) -> dict[str, tuple[str, str]]:
    return {"training": ("train", key)}


def _tested(key: str) -> dict[str, tuple[str, str]]:
    return {"test data": ("eval", key)}


def _both(key: str) -> dict[str, tuple[str, str]]:
    return _trained(key) | _tested(key)


PERPLEXITY = Panel("Perplexity", "perplexity", _both("perplexity"), "perplexity.png", from_zero=False)
ACCURACY = Panel("Accuracy", "accuracy", _both("accuracy"), "accuracy.png", from_zero=False)
QUANTITIES = (
    Panel("Root of the mean squared error", "RMSE", _both("rmse"), "rmse.png"),
    Panel("Share of the variance that is explained", "R2", _both("r2"), "r2.png", from_zero=False),
)
PANELS = (
    Panel("Loss", "loss", _both("loss"), "loss.png", from_zero=False),
    PERPLEXITY,
    ACCURACY,
    *QUANTITIES,
    Panel("Learning rate", "learning rate", _trained("learning_rate"), "learning_rate.png"),
    Panel("Length of the gradient", "norm", _trained("grad_norm")),
    Panel("Passes over the training data", "epochs", _trained("epoch")),
    Panel("Training speed", "samples per second", _trained("samples_per_second"), "samples_per_second.png"),
    Panel("Evaluation speed", "samples per second", _tested("samples_per_second")),
    Panel("Evaluation speed in batches", "batches per second", _tested("steps_per_second")),
    Panel("Runtime of an evaluation", "seconds", _tested("runtime")),
)
SECONDS = ("elapsed_s", "seconds")
OVER_TIME = (
    Panel("Loss over time", "loss", _both("loss"), "loss_over_time.png", SECONDS, from_zero=False),
    Panel("Accuracy over time", "accuracy", _both("accuracy"), "accuracy_over_time.png", SECONDS, from_zero=False),
)
OVERVIEW, STEP_TIME, STALENESS = "overview.png", "step_time.png", "staleness.png"
COLUMNS = 3  # of the overview
SIZE, DPI = (4.8, 3.2), 140  # of a picture: inches, dots per inch
AXES = (0.18, 0.15, 0.79, 0.76)  # what curves have of a picture: from left and below, width, height; the rest is labels
COLOURS = {"train": "C0", "eval": "C1"}


def check_can_draw() -> None:
    """Check that matplotlib is installed, without the second that loading it takes.

    Raises:
        UsageError: when it is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--plot draws with matplotlib, which is not installed (pip install 'nnmpi[plot]')")


def draw(metrics: Path, folder: Path) -> list[Path]:
    """Draw the curves of a run into the folder and return the files.

    Raises:
        ImportError: without matplotlib.
        OSError: when the folder cannot be written.
    """
    records = read_metrics(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    left_out: tuple[Panel, ...] = QUANTITIES
    if any(panel.has_points(records) for panel in QUANTITIES):
        left_out = (ACCURACY, OVER_TIME[1])
    if not PERPLEXITY.has_points(records):
        left_out += (PERPLEXITY,)
    shown = [panel for panel in (*PANELS, *OVER_TIME) if panel not in left_out]
    drawings = [(panel.file, partial(_draw_panel, records, panel)) for panel in shown]
    files = _save([*drawings, (STEP_TIME, partial(_draw_times, records))], folder)
    stale = sum_staleness(records)
    if stale.count():
        files.append(draw_staleness(_matplotlib("figure").Figure, stale, folder / STALENESS))
    return files


def _matplotlib(name: str) -> Any:
    return importlib.import_module(f"matplotlib.{name}")  # without pyplot: no state, no display


def _save(drawings: Sequence[tuple[str, Callable[[Any], None]]], folder: Path) -> list[Path]:
    """Draw pictures in cells, as the overview, and cut out those that have a file of their own.

    Drawing takes most of the time, so it is done once for both; and looking for room for labels as long again, so there
    is enough of it.
    """
    rows = -(-len(drawings) // COLUMNS)
    figure = _matplotlib("figure").Figure(figsize=(SIZE[0] * COLUMNS, SIZE[1] * rows), dpi=DPI)
    canvas, save = _matplotlib("backends.backend_agg").FigureCanvasAgg(figure), _matplotlib("image").imsave
    left, low, width, height = AXES
    for number, (_, drawing) in enumerate(drawings):
        row, column = divmod(number, COLUMNS)
        place = ((column + left) / COLUMNS, (rows - 1 - row + low) / rows, width / COLUMNS, height / rows)
        axes = figure.add_axes(place)
        drawing(axes)
        axes.grid(alpha=0.3)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())
    save(folder / OVERVIEW, pixels)
    across, down = (round(DPI * inches) for inches in SIZE)
    for number, (name, _) in enumerate(drawings):
        row, column = divmod(number, COLUMNS)
        if name:
            save(folder / name, pixels[down * row : down * (row + 1), across * column : across * (column + 1)])
    return [folder / name for name, _ in drawings if name] + [folder / OVERVIEW]


def _draw_panel(records: Sequence[Mapping[str, Any]], panel: Panel, axes: Any) -> None:
    """Draw what the records have of a panel."""
    for name, (kind, key) in panel.series.items():
        x, y = _points(records, kind, key, panel.along[0])
        axes.plot(x, y, label=name, marker="." if kind == "eval" else "", color=COLOURS[kind])
    axes.set(title=panel.title, xlabel=panel.along[1], ylabel=panel.label)
    axes.set_xlim(left=0)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    if len(panel.series) > 1:
        axes.legend()


def _draw_times(records: Sequence[Mapping[str, Any]], axes: Any) -> None:
    """Stack where a step's time went, in milliseconds."""
    steps, _ = _points(records, "train", "compute_s")
    found = {label: [1e3 * value for value in _points(records, "train", key)[1]] for key, label in PARTS.items()}
    found = {label: heights for label, heights in found.items() if any(heights)}
    axes.set(title="Where a step's time goes", xlabel="step", ylabel="ms per step")
    if found:
        axes.stackplot(steps, *found.values(), labels=list(found))
        axes.legend()


def _points(
    records: Sequence[Mapping[str, Any]], kind: str, key: str, along: str = "global_step"
) -> tuple[list[float], list[float]]:
    """Return two values of each record of a kind, without those that are null (not finite) or have not got them."""
    chosen = [each for each in records if each["kind"] == kind and None not in (each.get(key), each.get(along))]
    return [each[along] for each in chosen], [each[key] for each in chosen]
