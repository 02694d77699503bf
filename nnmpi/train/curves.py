"""Curves as PNG files, drawn from metrics.jsonl; needs matplotlib (the `plot` extra)."""

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nnmpi.train.metrics import read_metrics
from nnmpi.train.stale import draw_staleness, sum_staleness

# file name -> (key in the records, axis label, kinds that have it)
CURVES: Mapping[str, tuple[str, str, tuple[str, ...]]] = {
    "loss.png": ("loss", "loss", ("train", "eval")),
    "accuracy.png": ("accuracy", "accuracy", ("train", "eval")),
    "learning_rate.png": ("learning_rate", "learning rate", ("train",)),
    "samples_per_second.png": ("samples_per_second", "samples per second", ("train",)),
}
# drawn against virtual time as well, where a run has one
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
    if any("virtual_s" in each for each in records):
        for name, of in OVER_TIME.items():
            label = "virtual time in seconds"
            files.append(_draw_curve(figure_type, records, CURVES[of], folder / name, "virtual_s", label))
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
