"""Figures without a display: drawn by matplotlib, which need not be installed, and written to files."""

import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nnmpi.errors import UsageError

SUFFIXES = (".png", ".svg", ".pdf")
DPI = 90


def check_can_draw(option: str) -> None:
    """Make sure that matplotlib is there, before anything is measured.

    Args:
        option: what asks for the picture, for the error.

    Raises:
        UsageError: when it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"{option} needs matplotlib; install it (pip install matplotlib) or leave {option} out")


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches. It is none of pyplot's, which would look for a display."""
    return importlib.import_module("matplotlib.figure").Figure(figsize=(width, height), layout="constrained")


def colours() -> Sequence[Any]:
    """Return ten colours that can be told apart."""
    return importlib.import_module("matplotlib").colormaps["tab10"].colors


def put_legend_above(figure: Any, axes: Any, columns: int = 0, fontsize: float = 10) -> None:
    """Put the labels of one panel above all panels of a figure.

    Args:
        figure: where to.
        axes: whose labels; all panels have the same.
        columns: of the legend; 0 for as many as there are labels.
        fontsize: in points.
    """
    handles, labels = axes.get_legend_handles_labels()
    count = columns or len(labels)
    figure.legend(handles, labels, loc="outside upper center", ncols=count, frameon=False, fontsize=fontsize)


def save(figure: Any, file: Path, dpi: int = DPI) -> None:
    """Write a figure; the file's name says the format.

    Args:
        figure: that is drawn.
        file: where to.
        dpi: pixels of an inch.
    """
    figure.savefig(file, dpi=dpi)
