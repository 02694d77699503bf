"""The speeds as bars: how many times faster than PyTorch's fastest way, a panel for each number of ranks."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.training.contestants import JIT, PURE, STOCK
from benchmarks.training.rows import ratios
from nnmpi.errors import UsageError
from nnmpi.train.curves import can_draw

COLOURS: Mapping[str, str] = {PURE: "#4c78a8", JIT: "#72b7b2"}
HEIGHT = 0.38  # of a bar; two of them make a case


def check_can_draw() -> None:
    """Make sure that matplotlib is there.

    Raises:
        UsageError: when it is not.
    """
    if not can_draw():
        raise UsageError("--plot draws a picture, which needs matplotlib; install it: pip install 'nnmpi[plot]'")


def draw(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the picture; whiskers are quartiles of the rounds' ratios."""
    found = [each for each in ratios(rows) if each["of"] == STOCK]
    numbers = list(dict.fromkeys(each["ranks"] for each in found))
    if not numbers:
        return
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(5 * len(numbers), 4), layout="constrained")
    panels = figure.subplots(1, len(numbers), squeeze=False)[0]
    for ranks, axes in zip(numbers, panels, strict=True):
        mine = [each for each in found if each["ranks"] == ranks]
        cases = list(dict.fromkeys(each["case"] for each in mine))
        for place, (group, colour) in enumerate(COLOURS.items()):
            bars = [each for each in mine if each["over"] == group]
            y = [cases.index(each["case"]) + (place - 0.5) * HEIGHT for each in bars]
            x = [each["ratio"] for each in bars]
            spread = [[abs(each["ratio"] - each["quartiles"][i]) for each in bars] for i in (0, 1)]
            axes.barh(y, x, HEIGHT, xerr=spread if bars else None, color=colour, label=group)
            for at, each in zip(y, bars, strict=True):
                axes.text(each["quartiles"][1], at, f" {each['ratio']:.2f}", va="center", fontsize=8)
        axes.axvline(1, color="black", linewidth=0.8)
        axes.set_yticks(range(len(cases)), cases)
        axes.invert_yaxis()
        axes.set_title(f"{ranks} rank{'s' * (ranks > 1)}, one thread each", loc="left", fontsize=10)
        axes.set_xlabel("times as fast as PyTorch" + " with DDP and gloo" * (ranks > 1))
    panels[0].legend(frameon=False)
    figure.savefig(file, dpi=90)
