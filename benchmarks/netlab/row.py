"""One line of the result: an algorithm at a size on so many hosts, measured, predicted, and counted."""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.tables import GrowingTable
from benchmarks.netlab.shell import LabError
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.units import format_bytes


@dataclass(frozen=True)
class LinkTimes:
    """An algorithm at a size on so many hosts: measured, predicted, and counted.

    Attributes:
        mpi: the library and its version.
        rate: of the links.
        hosts: how many.
        bytes: of the buffer; in an all-gather, of all that comes together.
        algorithm: its name.
        seconds: of each repetition, from the common start until the last rank had finished.
        predicted_s: what the model says.
        auto: the algorithm that `auto` would choose at this size on these hosts; empty for what is no all-reduce.
        expected_bytes: what all ranks together had to send in these repetitions; 0 where it is not known.
        sent_bytes: what the hosts' links have counted.
        cores: how many processor cores all ranks together have used, on average.
        operation: what was done.
    """

    mpi: str
    rate: str
    hosts: int
    bytes: int
    algorithm: str
    seconds: tuple[float, ...]
    predicted_s: float
    auto: str
    expected_bytes: float
    sent_bytes: float
    cores: float
    operation: str = ALL_REDUCE.name

    @property
    def measured_s(self) -> float:
        """The median."""
        return statistics.median(self.seconds)

    @property
    def ratio(self) -> float:
        """Measured by predicted."""
        return self.measured_s / self.predicted_s

    def check_crossed(self) -> None:
        """Return if the messages went over the links.

        Raises:
            LabError: when fewer bytes were counted there than the operation must send.
        """
        # each element must travel N-1 times to be summed, or to be known; in an all-reduce both
        ways = 2 if self.operation == ALL_REDUCE.name else 1
        least = self.expected_bytes or ways * (self.hosts - 1) * self.bytes * len(self.seconds)
        if self.sent_bytes < least:
            raise LabError(
                f"{self.algorithm} on {self.hosts} hosts sent {self.sent_bytes:.0f} bytes over the links where "
                f"{least:.0f} were to be sent: the messages went another way"
            )

    def record(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {**asdict(self), "measured_s": self.measured_s, "ratio": self.ratio}


TABLE = GrowingTable(
    # title, width, what stands there
    ("rate", 8, lambda row: row.rate),
    ("hosts", 6, lambda row: row.hosts),
    ("size", 8, lambda row: format_bytes(row.bytes)),
    ("  algorithm", -19, lambda row: f"  {row.algorithm}"),
    ("measured", 11, lambda row: f"{row.measured_s * 1e3:.1f} ms"),
    ("predicted", 12, lambda row: f"{row.predicted_s * 1e3:.1f} ms"),
    ("ratio", 7, lambda row: f"{row.ratio:.3f}"),
    ("spread", 8, lambda row: f"{(max(row.seconds) - min(row.seconds)) / row.measured_s:.1%}"),
    ("crossed", 11, lambda row: f"{row.sent_bytes / 1e6:.1f} MB"),
    ("cores", 7, lambda row: f"{row.cores:.2f}"),
)


def verdict(rows: Sequence[LinkTimes]) -> str:
    """Name the measured best and the choice of `auto` among rows of the same rate, hosts and size."""
    best = min(rows, key=lambda row: row.measured_s)
    chosen = next((row for row in rows if row.algorithm == row.auto), best)
    return f"best: {best.algorithm}; auto picks {best.auto} ({chosen.measured_s / best.measured_s - 1:.1%} slower)"


def summary(rows: Sequence[LinkTimes]) -> Iterator[str]:
    """Yield what all rows together show."""
    for algorithm in dict.fromkeys(row.algorithm for row in rows):
        ratios = [row.ratio for row in rows if row.algorithm == algorithm]
        yield f"{algorithm}: measured/predicted {min(ratios):.3f} to {max(ratios):.3f}"
