"""Collectives across a lab's links: measured, compared with the model, counted."""

import argparse
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import GrowingTable
from benchmarks.netlab.lab import Lab, LabError, Speed, lab_of
from benchmarks.netlab.launch import mpi_name, parse_settings, run_job
from nnmpi.base.units import format_bytes
from nnmpi.comm.algorithms.registry import COLLECTIVES, NATIVE, find_collective
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.fit import Fit, choose
from nnmpi.comm.machine import Curve, Link, Machine


@dataclass(frozen=True)
class LinkTimes:
    """An algorithm at one size and number of hosts: measured, predicted, and counted.

    Attributes:
        mpi: the library and its version.
        rate: of the links.
        hosts: how many.
        operation: such as "all-reduce".
        bytes: of the buffer; of an all-gather, of the result.
        algorithm: its name.
        seconds: of each repetition, from the common start to the last rank's end.
        predicted_s: by the cost model.
        auto: the algorithm that `auto` would choose at this size on these hosts; empty for other
            operations than all-reduce.
        expected_bytes: that all ranks together must send in these repetitions; 0 if unknown.
        sent_bytes: that the hosts' links counted.
        cores: processor cores that all ranks together used, on average.
    """

    mpi: str
    rate: str
    hosts: int
    operation: str
    bytes: int
    algorithm: str
    seconds: tuple[float, ...]
    predicted_s: float
    auto: str
    expected_bytes: float
    sent_bytes: float
    cores: float

    @property
    def measured_s(self) -> float:
        """The median of the repetitions."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """Measured by predicted."""
        return self.measured_s / self.predicted_s

    def check_crossed(self) -> None:
        """Check that the messages crossed the links.

        Raises:
            LabError: if the links counted fewer bytes than the operation must send.
        """
        # each element travels N-1 times to be summed, N-1 times to reach all ranks, or both
        ways = 2 if self.operation == ALL_REDUCE.name else 1
        least = self.expected_bytes or ways * (self.hosts - 1) * self.bytes * len(self.seconds)
        if self.sent_bytes < least:
            raise LabError(
                f"{self.algorithm} on {self.hosts} hosts sent {self.sent_bytes:.0f} bytes over the"
                f" links where {least:.0f} were to be sent: the messages went another way"
            )


TABLE = GrowingTable(
    # title, width, cell
    ("rate", 8, lambda row: row.rate),
    ("hosts", 6, lambda row: row.hosts),
    ("size", 8, lambda row: format_bytes(row.bytes)),
    ("  algorithm", -19, lambda row: f"  {row.algorithm}{' (auto)' * (row.algorithm == row.auto)}"),
    ("measured", 11, lambda row: f"{row.measured_s * 1e3:.1f} ms"),
    ("predicted", 12, lambda row: f"{row.predicted_s * 1e3:.1f} ms"),
    ("ratio", 7, lambda row: f"{row.ratio:.3f}"),
    ("spread", 8, lambda row: f"{(max(row.seconds) - min(row.seconds)) / row.measured_s:.1%}"),
    ("crossed", 11, lambda row: f"{row.sent_bytes / 1e6:.1f} MB"),
    ("cores", 7, lambda row: f"{row.cores:.2f}"),
)


def bench(options: argparse.Namespace) -> None:
    """Measure everything, print it row by row, and write it as JSON, even after an interruption.

    Raises:
        UsageError: for an unknown algorithm.
        LabError: if the lab cannot be made, a job fails, or messages bypassed the links.
    """
    names = tuple(
        how
        for (what, how), item in COLLECTIVES.items()
        if what == options.operation and not item.takes_nodes
    )
    options.algorithms = options.algorithms or (*names, NATIVE)
    for name in options.algorithms:
        if name != NATIVE:
            find_collective(options.operation, name)
    mpi, settings = mpi_name(), parse_settings(options.set)
    links: list[dict[str, Any]] = []
    rows: list[LinkTimes] = []
    print(f"{mpi}; {machine_facts()}; median of {options.repeats}", flush=True)
    try:
        with lab_of(max(options.hosts), options.rate[0]) as lab:
            for speed in options.rate:
                lab.set_speed(speed)
                for hosts in options.hosts:
                    _measure(lab, speed, hosts, mpi, settings, options, links, rows)
    finally:
        result = [{**asdict(row), "measured_s": row.measured_s, "ratio": row.ratio} for row in rows]
        facts = {"machine": machine_facts(), "mpi": mpi, "settings": settings}
        results.write(options.json, {**facts, "links": links, "rows": result})
    for algorithm in options.algorithms:
        ratios = [row.ratio for row in rows if row.algorithm == algorithm]
        print(f"{algorithm}: measured/predicted {min(ratios):.3f} to {max(ratios):.3f}")


def _measure(
    lab: Lab,
    speed: Speed,
    hosts: int,
    mpi: str,
    settings: Mapping[str, str],
    options: argparse.Namespace,
    links: list[dict[str, Any]],
    rows: list[LinkTimes],
) -> None:
    """Run the job on `hosts` hosts; append to `links` and `rows`."""
    job = {name: getattr(options, name) for name in ("operation", "sizes", "algorithms", "repeats")}
    # a job counts as hung after three times a parameter server's time for all of it
    server_s = sum(2 * (hosts - 1) * nbytes for nbytes in options.sizes) / speed.payload_bytes_per_s
    limit_s = 60.0 + 3 * (options.repeats + 2) * (len(options.algorithms) + 1) * server_s
    begin = time.monotonic()
    for result in run_job(lab, mpi, hosts, settings, job, limit_s):
        if result.pop("kind") == "link":
            links.append({"rate": speed.rate, "hosts": hosts, **result})
            fit = fit_of(result, hosts, mpi)
            mbit, most = 8e-6 / result["beta_s_per_byte"], 8e-6 * speed.payload_bytes_per_s
            print(
                f"\n{hosts} hosts at {speed.rate}: alpha {result['alpha_s'] * 1e3:.3f} ms, beta"
                f" {mbit:.1f} Mbit/s (at most {most:.1f}), gamma"
                f" {result['gamma_s_per_byte'] * 1e9:.3f} ns/byte; made in"
                f" {time.monotonic() - begin:.1f} s\n{TABLE.head()}",
                flush=True,
            )
            continue
        name, nbytes = result["algorithm"], result["bytes"]
        row = LinkTimes(
            mpi=mpi,
            rate=speed.rate,
            hosts=hosts,
            operation=options.operation,
            predicted_s=fit.predict(name, nbytes, operation=options.operation),
            auto=(
                choose(nbytes, hosts, fit).algorithm if options.operation == ALL_REDUCE.name else ""
            ),
            **result,
        )
        row.check_crossed()
        rows.append(row)
        print(TABLE.line(row), flush=True)


def fit_of(link: Mapping[str, Any], hosts: int, mpi: str) -> Fit:
    """Return the fit of a lab: one rank per host, equal links between them.

    Algorithms made of steps are predicted by simulating these with alpha, beta and gamma. The steps
    of MPI's own all-reduce are unknown: it is measured, apart from the rows.

    Args:
        link: the worker's measurement before its first row.
        hosts: how many.
        mpi: the library.
    """
    line, nodes = Link.line(link["alpha_s"], link["beta_s_per_byte"]), tuple(range(hosts))
    native = Curve(tuple((nbytes, seconds) for nbytes, seconds in link["native"]))
    return Fit(
        machine=Machine(
            inside=line, across=line, nodes=nodes, add=Curve.line(0.0, link["gamma_s_per_byte"])
        ),
        native=native,
        native_started=native,
        shared=None,
        facts={"ranks": hosts, "nodes": list(nodes), "mpi": mpi},
    )
