"""From stamps to the figures of one row, as columns of the printed table and as fields of the JSON file.

Of each call two kinds of time are taken:

- a rank's own: from its begin to its end. As in the OSU benchmarks, `avg`, `min` and `max` are the mean, the least and
  the most over the ranks of each rank's average.
- the collective's: from when the last rank has entered to when the last has left. The ranks of one node share a clock;
  on several nodes, whose clocks differ, it is the longest of the ranks' own times. `p50` and `p99` are over the calls,
  and everything behind them (bandwidths and ratios) is reckoned from `p50`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.collectives.names import BASELINES
from nnmpi.comm.algorithms.registry import NATIVE
from nnmpi.comm.sizes import name_bytes


@dataclass(frozen=True)
class Row:
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

    def record(self) -> dict[str, Any]:
        """Return the fields by name, as JSON values."""
        return asdict(self)


def build_rows(
    names: Sequence[str],
    stamps: NDArray[np.float64],
    nbytes: int,
    operation: str,
    one_clock: bool,
    predicted_s: Mapping[str, float],
    chosen: Mapping[str, str],
) -> list[Row]:
    """Return a row for each name.

    Args:
        names: of the contestants.
        stamps: (ranks, contestants, 2, rounds), in seconds.
        nbytes: the buffer's length.
        operation: decides what `busbw` is.
        one_clock: whether the ranks' stamps can be compared.
        predicted_s: what the model says, by name.
        chosen: what stands behind a name, where it was chosen.
    """
    ranks = stamps.shape[0]
    own = stamps[:, :, 1] - stamps[:, :, 0]  # (ranks, contestants, rounds)
    whole = stamps[:, :, 1].max(axis=0) - stamps[:, :, 0].max(axis=0) if one_clock else own.max(axis=0)
    medians = dict(zip(names, np.median(whole, axis=1), strict=True))
    rows = []
    for number, name in enumerate(names):
        averages = own[:, number].mean(axis=1)
        median = float(medians[name])
        expected = predicted_s.get(name)
        native = medians.get(BASELINES.get(name, NATIVE))
        rows.append(
            Row(
                algorithm=name,
                size=nbytes,
                avg_us=_us(averages.mean()),
                min_us=_us(averages.min()),
                max_us=_us(averages.max()),
                p50_us=_us(median),
                p99_us=_us(np.percentile(whole[number], 99)),
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


COLUMNS: tuple[tuple[str, int, Callable[[Row], str]], ...] = (
    # title, width, what stands there
    ("size", 9, lambda row: name_bytes(row.size)),
    ("avg us", 10, lambda row: _number(row.avg_us)),
    ("min us", 10, lambda row: _number(row.min_us)),
    ("max us", 10, lambda row: _number(row.max_us)),
    ("p50 us", 10, lambda row: _number(row.p50_us)),
    ("p99 us", 10, lambda row: _number(row.p99_us)),
    ("iterations", 12, lambda row: str(row.iterations)),
    ("algbw GB/s", 12, lambda row: f"{row.algbw_gbs:.3g}"),
    ("busbw GB/s", 12, lambda row: f"{row.busbw_gbs:.3g}"),
    ("predicted us", 14, lambda row: _number(row.predicted_us)),
    ("measured/predicted", 20, lambda row: _number(row.measured_over_predicted)),
    ("native/this", 13, lambda row: _number(row.speed_against_native)),
)
NAME_WIDTH = 17


def title() -> str:
    """Return the line above the rows."""
    return f"{'algorithm':<{NAME_WIDTH}}" + "".join(f"{name:>{width}}" for name, width, _ in COLUMNS)


def line(row: Row) -> str:
    """Return a row as it is printed."""
    chosen = f"  chose {row.chosen}" if row.chosen else ""
    return f"{row.algorithm:<{NAME_WIDTH}}" + "".join(f"{text(row):>{width}}" for _, width, text in COLUMNS) + chosen


def _number(value: float | None) -> str:
    """Return two digits behind the point, fewer for long numbers; a dash for what is not known."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 10000 else f"{value:.1f}" if value >= 1000 else f"{value:.2f}"
