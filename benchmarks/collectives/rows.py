"""From stamps to the figures of one row, as columns of the printed table, as fields of the JSON file, and as a picture.

Of each call two kinds of time are taken:

- a rank's own: from its begin to its end. As in the OSU benchmarks, `avg`, `min` and `max` are the mean, the least and
  the most over the ranks of each rank's average.
- the collective's: from when the last rank has entered to when the last has left. The ranks of one node share a clock;
  on several nodes, whose clocks differ, it is the longest of the ranks' own times. `p50` and `p99` are over the calls,
  and everything behind them (bandwidths and ratios) follows from `p50`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives.options import BASELINES
from benchmarks.harness import plots
from benchmarks.harness.tables import MISSING, GrowingTable
from nnmpi.comm.algorithms.registry import NATIVE
from nnmpi.errors import counted
from nnmpi.units import format_bytes

MARKERS = "osD^vP*X<>h"


@dataclass(frozen=True)
class CallTimes:
    """One algorithm at one size; times in microseconds, bandwidths in 1e9 bytes per second, None for what is not known.

    Attributes:
        size: bytes of each rank's buffer.
        algbw_gbs: size / time.
        busbw_gbs: algbw times what the operation moves over a rank's link per byte of the buffer, at least.
        speed_against_native: time of MPI's own call / time of this; above 1 this is the faster one. For the update's
            contestants MPI's call with the update stands in its place.
        chosen: what "auto" chose.
    """

    algorithm: str
    size: int
    avg_us: float
    min_us: float
    max_us: float
    p50_us: float
    p99_us: float
    iterations: int
    algbw_gbs: float
    busbw_gbs: float
    predicted_us: float | None
    measured_over_predicted: float | None
    speed_against_native: float | None
    chosen: str | None = None


def build_rows(
    names: Sequence[str],
    stamps: NDArray[np.float64],
    nbytes: int,
    operation: str,
    one_clock: bool,
    predicted_s: Mapping[str, float],
    chosen: Mapping[str, str],
) -> list[CallTimes]:
    """Return a row for each name.

    Args:
        names: of the contestants, in the order of the stamps.
        stamps: (ranks, contestants, 2, rounds), in seconds.
        nbytes: the buffer's length.
        operation: decides what `busbw` is.
        one_clock: whether the ranks' stamps can be compared.
        predicted_s: what the model says, by name.
        chosen: what stands behind a name, where it was chosen.
    """
    ranks = stamps.shape[0]
    own = stamps[:, :, 1] - stamps[:, :, 0]  # (ranks, contestants, rounds)
    lasted = stamps[:, :, 1].max(axis=0) - stamps[:, :, 0].max(axis=0) if one_clock else own.max(axis=0)
    medians = dict(zip(names, np.median(lasted, axis=1), strict=True))
    rows = []
    for number, name in enumerate(names):
        averages = own[:, number].mean(axis=1)
        median = float(medians[name])
        expected = predicted_s.get(name)
        native = medians.get(BASELINES.get(name, NATIVE))
        rows.append(
            CallTimes(
                algorithm=name,
                size=nbytes,
                avg_us=_us(averages.mean()),
                min_us=_us(averages.min()),
                max_us=_us(averages.max()),
                p50_us=_us(median),
                p99_us=_us(np.percentile(lasted[number], 99)),
                iterations=int(own.shape[-1]),
                algbw_gbs=_digits(nbytes / median / 1e9),
                busbw_gbs=_digits(nbytes / median / 1e9 * bus_factor(operation, ranks)),
                predicted_us=None if expected is None else _us(expected),
                measured_over_predicted=None if not expected else _digits(median / expected),
                speed_against_native=None if native is None else _digits(native / median),
                chosen=chosen.get(name),
            )
        )
    return rows


def bus_factor(operation: str, ranks: int) -> float:
    """Return the least bytes that pass a rank's link, one way, per byte of the buffer; as nccl-tests defines busbw."""
    return {
        "all-reduce": 2 * (ranks - 1) / ranks,
        "reduce-scatter": (ranks - 1) / ranks,
        "all-gather": (ranks - 1) / ranks,
        "broadcast": 1.0,
    }[operation]


def _us(seconds: float) -> float:
    return round(1e6 * float(seconds), 3)


def _digits(value: float) -> float:
    return float(f"{float(value):.4g}")


def _number(value: float | None) -> str:
    """Return two digits behind the point, fewer for long numbers; a dash for what is not known."""
    if value is None:
        return MISSING
    return f"{value:.0f}" if value >= 10000 else f"{value:.1f}" if value >= 1000 else f"{value:.2f}"


TABLE = GrowingTable(
    # title, width, what stands there
    ("algorithm", -17, lambda row: row.algorithm),
    ("size", 9, lambda row: format_bytes(row.size)),
    ("avg us", 10, lambda row: _number(row.avg_us)),
    ("min us", 10, lambda row: _number(row.min_us)),
    ("max us", 10, lambda row: _number(row.max_us)),
    ("p50 us", 10, lambda row: _number(row.p50_us)),
    ("p99 us", 10, lambda row: _number(row.p99_us)),
    ("iterations", 12, lambda row: row.iterations),
    ("algbw GB/s", 12, lambda row: f"{row.algbw_gbs:.3g}"),
    ("busbw GB/s", 12, lambda row: f"{row.busbw_gbs:.3g}"),
    ("predicted us", 14, lambda row: _number(row.predicted_us)),
    ("measured/predicted", 20, lambda row: _number(row.measured_over_predicted)),
    ("native/this", 13, lambda row: _number(row.speed_against_native)),
    ("", -1, lambda row: f"  chose {row.chosen}" if row.chosen else ""),
)


def content(header: Mapping[str, Any], rows: Sequence[CallTimes], finished: bool) -> dict[str, Any]:
    """Return what the JSON file holds.

    Args:
        header: what ran, on what.
        rows: so far.
        finished: whether these are all.
    """
    return {"header": {**header, "finished": finished}, "rows": [asdict(row) for row in rows]}


def draw(file: Path, header: Mapping[str, Any], rows: Sequence[CallTimes]) -> None:
    """Draw time over MPI's own against size, measured and predicted; without MPI's own the time itself.

    What does other work (the update, too) or is another one's call (`auto`, on one node `hierarchical`) is left out.

    Args:
        file: its name says the format.
        header: what ran, on what.
        rows: all of them.
    """
    own_us = {row.size: row.p50_us for row in rows if row.algorithm == "native"}
    left_out = {"native+update", "fused", "auto"} | ({"native"} if own_us else set())
    left_out |= {"hierarchical"} if header["nodes"] == 1 else set()
    figure = plots.new_figure(9, 5)
    label = "time / that of MPI's own" if own_us else "time, us"
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="bytes in each rank's buffer", ylabel=label)
    colours = plots.colours()
    for number, name in enumerate(dict.fromkeys(row.algorithm for row in rows if row.algorithm not in left_out)):
        shown = [row for row in rows if row.algorithm == name and row.size in (own_us or {row.size})]
        axes.plot(
            [row.size for row in shown],
            [row.p50_us / own_us.get(row.size, 1) for row in shown],
            color=colours[number % len(colours)],
            marker=MARKERS[number % len(MARKERS)],
            linewidth=1.2,
            label=name,
        )
        predicted = [(row.size, row.predicted_us / own_us.get(row.size, 1)) for row in shown if row.predicted_us]
        if predicted:
            axes.plot(*zip(*predicted, strict=True), color=colours[number % len(colours)], linewidth=1, linestyle=":")
    if own_us:
        axes.axhline(1, color="black", linewidth=1.2, label="MPI's own")
    if any(row.predicted_us for row in rows):
        axes.plot([], [], color="grey", linewidth=1, linestyle=":", label="predicted")
    sizes = sorted({row.size for row in rows})
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes], rotation=45, ha="right")
    axes.minorticks_off()
    low, high = axes.get_ylim()
    ticks = [each for each in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20) if low <= each <= high]
    if own_us:
        axes.set_yticks(ticks, [f"{each:g}" for each in ticks])
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper")
    axes.set_title(
        f"{header['operation']}, {header['ranks']} ranks on {counted(header['nodes'], 'node')}, "
        f"{header['mpi']}, {header['dtype']}"
    )
    plots.save(figure, file, dpi=100)
