"""The simulated schedules above one another on one axis of time: ranks down, forwards and backwards in colour."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from benchmarks.pipeline.order import SCHEDULES, STAGES, play
from nnmpi.errors import UsageError
from nnmpi.schedule.instruction import Kind
from nnmpi.train.curves import can_draw

_COLOURS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("forward", "#4c78a8"),
        Kind.B: ("backward", "#72b7b2"),
        Kind.I: ("backward to the input", "#54a24b"),
        Kind.W: ("backward to the weights", "#b5cf6b"),
    }
)
_LONGEST = 1.25  # of GPipe's time: what of the naive schedule is shown


def check_can_draw() -> None:
    """Make sure that matplotlib is there.

    Raises:
        UsageError: when it is not.
    """
    if not can_draw():
        raise UsageError("--results draws a picture, which needs matplotlib; install it: pip install 'nnmpi[plot]'")


def draw(file: Path, microbatches: int, ranks: int = STAGES) -> None:
    """Draw all schedules into a PNG file."""
    figure = importlib.import_module("matplotlib.figure").Figure(figsize=(11, 9), layout="constrained")
    panels = figure.subplots(len(SCHEDULES), 1, sharex=True)
    for name, axes in zip(SCHEDULES, panels, strict=True):
        _, simulation = play(name, microbatches, ranks)
        for kind, (label, colour) in _COLOURS.items():
            for rank in range(ranks):
                own = [s for s in simulation.spans if s.rank == rank and s.instruction.kind is kind]
                bars = [(span.begin_s, span.end_s - span.begin_s) for span in own]
                axes.broken_barh(bars, (rank - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.3)
            axes.plot([], [], color=colour, linewidth=6, label=label)
        axes.invert_yaxis()
        axes.set_yticks(range(ranks), [str(rank) for rank in range(ranks)], fontsize=7)
        title = f"{name}: {simulation.makespan_s:g} units of time, bubble {100 * simulation.bubble:.1f} %"
        axes.set_title(title, fontsize=10, loc="left")
    _, reference = play("gpipe", microbatches, ranks)
    panels[-1].set_xlim(0, _LONGEST * reference.makespan_s)
    panels[-1].set_xlabel(f"time (one forward of a rank's layers is 1); {microbatches} microbatches on {ranks} ranks")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False)
    figure.savefig(file, dpi=90)
