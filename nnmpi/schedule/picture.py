"""A simulated run as a PNG: a row for each rank, time across, colours for kinds; needs matplotlib (extra `plot`)."""

import importlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from nnmpi.errors import UsageError
from nnmpi.schedule.instruction import Kind
from nnmpi.schedule.schedule import Schedule
from nnmpi.schedule.simulate import Simulation

_COLOURS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
    {
        Kind.F: ("forward", "#4c78a8"),
        Kind.B: ("backward", "#72b7b2"),
        Kind.I: ("backward to the input", "#72b7b2"),
        Kind.W: ("backward to the weights", "#b5cf6b"),
        Kind.REDUCE: ("sum over replicas", "#f2cf5b"),
        Kind.STEP: ("update", "#e45756"),
    }
)
_CHARACTERS = 200  # that fit across the picture, so that a label can be left out where its bar is too narrow


def draw(schedule: Schedule, simulation: Simulation, file: Path) -> None:
    """Draw a simulated run into a PNG file.

    Raises:
        UsageError: without matplotlib.
        OSError: when the file cannot be written.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--png needs matplotlib; install it (pip install 'nnmpi[plot]') or leave --png out")
    figure_type = importlib.import_module("matplotlib.figure").Figure  # without pyplot: no state, no display
    figure = figure_type(figsize=(11.0, 1.6 + 0.45 * schedule.ranks), layout="constrained")
    title = f"{schedule.name}, {schedule.ranks} ranks, {schedule.microbatches} microbatches: bubble "
    axes = figure.add_subplot(xlabel="ms (modelled)", title=f"{title}{100 * simulation.bubble:.1f} %")
    named: set[str] = set()
    for span in simulation.spans:
        if span.instruction.kind not in _COLOURS or span.end_s == span.begin_s:
            continue
        one = span.instruction
        name, colour = _COLOURS[one.kind]
        height, row = (0.16, span.rank + 0.42) if one.kind is Kind.REDUCE else (0.64, float(span.rank))
        begin_ms, long_ms = 1e3 * span.begin_s, 1e3 * (span.end_s - span.begin_s)
        label = "" if name in named else name
        axes.barh(row, long_ms, height, begin_ms, color=colour, edgecolor="white", linewidth=0.5, label=label or None)
        named.add(name)
        text = f"{one.stage}:{one.microbatch}" if schedule.virtual > 1 else str(one.microbatch)
        if one.microbatch is not None and long_ms / simulation.makespan_s / 1e3 * _CHARACTERS >= len(text):
            axes.text(begin_ms + long_ms / 2, row, text, ha="center", va="center", fontsize=6)
    axes.set_yticks(range(schedule.ranks), [f"rank {rank}" for rank in range(schedule.ranks)])
    axes.invert_yaxis()
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=len(_COLOURS), fontsize=8, frameon=False)
    figure.savefig(file, format="png", dpi=120)
