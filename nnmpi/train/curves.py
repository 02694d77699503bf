"""Curves as PNG files, drawn from metrics.jsonl; needs matplotlib (the `plot` extra)."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.synchrony.staleness import Staleness
from nnmpi.train.metrics import read_metrics, sum_staleness

MOST_BARS = 60
FEW_WORKERS = 10  # so many colours are told apart at a glance


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


# file name -> (key in the records, axis label, kinds that have it)
CURVES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "loss.png": ("loss", "loss", ("train", "eval")),
    "accuracy.png": ("accuracy", "accuracy", ("train", "eval")),
    "learning_rate.png": ("learning_rate", "learning rate", ("train",)),
    "samples_per_second.png": ("samples_per_second", "samples per second", ("train",)),
}
# drawn against the seconds of the run as well
OVER_TIME: Mapping[str, str] = {"loss_over_time.png": "loss.png", "accuracy_over_time.png": "accuracy.png"}
TIMES = (("compute_s", "compute"), ("sync_s", "synchronisation"), ("input_s", "input"))


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(metrics: Path, folder: Path) -> list[Path]:
    """Draw the curves of a run into the folder and return the files.

    Raises:
        ImportError: without matplotlib.
        OSError: when the folder cannot be written.
    """
    figure_type = importlib.import_module("matplotlib.figure").Figure  # without pyplot: no state, no display
    records = read_metrics(metrics)
    folder.mkdir(parents=True, exist_ok=True)
    files = [_draw_curve(figure_type, records, CURVES[name], folder / name, "global_step", "step") for name in CURVES]
    for name, of in OVER_TIME.items():
        files.append(_draw_curve(figure_type, records, CURVES[of], folder / name, "elapsed_s", "seconds"))
    files.append(_draw_times(figure_type, records, folder / "step_time.png"))
    stale = sum_staleness(records)
    if stale.count():
        files.append(draw_staleness(figure_type, stale, folder / "staleness.png"))
    return files


def _draw_curve(
    figure_type: Any,
    records: Sequence[Mapping[str, Any]],
    curve: tuple[str, str, tuple[str, ...]],
    file: Path,
    along: str,
    along_label: str,
) -> Path:
    """Draw one key of the records along another."""
    key, label, kinds = curve
    figure = figure_type(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel=along_label, ylabel=label)
    for kind in kinds:
        x, y = _points(records, kind, key, along)
        axes.plot(x, y, label="test data" if kind == "eval" else "training", marker="." if kind == "eval" else "")
    return _finish(figure, axes, file)


def _draw_times(figure_type: Any, records: Sequence[Mapping[str, Any]], file: Path) -> Path:
    """Stack where a step's time went, in milliseconds."""
    figure = figure_type(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="ms per step")
    steps, _ = _points(records, "train", "compute_s")
    heights = [[1e3 * value for value in _points(records, "train", key)[1]] for key, _ in TIMES]
    axes.stackplot(steps, heights, labels=[label for _, label in TIMES])
    return _finish(figure, axes, file)


def _finish(figure: Any, axes: Any, file: Path) -> Path:
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=120)
    return file


def _points(
    records: Sequence[Mapping[str, Any]], kind: str, key: str, along: str = "global_step"
) -> tuple[list[float], list[float]]:
    """Return two values of each record of a kind, without those that are null (not finite) or have not got them."""
    chosen = [each for each in records if each["kind"] == kind and None not in (each.get(key), each.get(along))]
    return [each[along] for each in chosen], [each[key] for each in chosen]
