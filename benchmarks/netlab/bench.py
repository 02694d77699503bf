"""The whole benchmark: makes a lab, measures across it, compares with the model, takes the lab down."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import results
from benchmarks.harness.machine import machine_facts
from benchmarks.netlab.build import built
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.launch import run_job
from benchmarks.netlab.link import Speed
from benchmarks.netlab.row import TABLE, LinkTimes, summary, verdict
from benchmarks.netlab.shell import LabError
from benchmarks.netlab.state import State
from nnmpi.comm.collective import ALL_REDUCE
from nnmpi.comm.fit import Fit, choose
from nnmpi.comm.machine import Curve, Link, Machine


@dataclass(frozen=True)
class Plan:
    """What `bench` measures: every algorithm at every size on every number of hosts at every rate.

    Attributes:
        operation: such as "all-reduce".
        hosts: numbers of them.
        speeds: of the links.
        sizes: bytes of the buffers.
        algorithms: names.
        repeats: times that each is measured.
        cut_bytes: messages longer than that are cut into pieces.
    """

    operation: str
    hosts: tuple[int, ...]
    speeds: tuple[Speed, ...]
    sizes: tuple[int, ...]
    algorithms: tuple[str, ...]
    repeats: int
    cut_bytes: int

    def limit_s(self, hosts: int, speed: Speed) -> float:
        """Return the time after which a job on so many hosts hangs: thrice what servers would take for all of it."""
        server_s = sum(2 * (hosts - 1) * nbytes for nbytes in self.sizes) / speed.payload_bytes_per_s
        return 60.0 + 3 * (self.repeats + 2) * (len(self.algorithms) + 1) * server_s

    def job(self) -> dict[str, Any]:
        """Return what the ranks of one job need to know, as JSON values."""
        return {
            "operation": self.operation,
            "sizes": self.sizes,
            "algorithms": self.algorithms,
            "repeats": self.repeats,
            "cut_bytes": self.cut_bytes,
        }


@dataclass
class LabRun:
    """A run of the benchmark, and what it has found so far.

    Attributes:
        plan: what is measured.
        mpi: the library's name and version, as they stand in the result.
        library: a name of `launch.LIBRARIES`.
        settings: of the library, beyond the lab's own.
        links: what was measured of them.
        rows: of every algorithm.
    """

    plan: Plan
    mpi: str
    library: str
    settings: Mapping[str, str]
    links: list[dict[str, Any]] = field(default_factory=list)
    rows: list[LinkTimes] = field(default_factory=list)

    def run(self) -> None:
        """Measure everything and print it row by row.

        Raises:
            LabError: when the lab cannot be made, a job fails, or messages did not cross the links.
        """
        plan, begin = self.plan, time.monotonic()
        print(f"{self.mpi}; {machine_facts()}; median of {plan.repeats}", flush=True)
        with built(State(f"bench-{os.getpid()}"), max(plan.hosts), plan.speeds[0]) as lab:
            print(f"lab: {len(lab.hosts)} hosts, made in {time.monotonic() - begin:.1f} s", flush=True)
            for speed in plan.speeds:
                lab.set_speed(speed)
                for hosts in plan.hosts:
                    self._measure(lab, speed, hosts)
        for line in summary(self.rows):
            print(line)
        print(f"{time.monotonic() - begin:.0f} s in all; the lab is taken down", flush=True)

    def _measure(self, lab: Lab, speed: Speed, hosts: int) -> None:
        """Run the job on so many hosts."""
        plan, before, found = self.plan, _sent(lab), len(self.rows)
        link: dict[str, Any] = {}
        findings = run_job(lab, self.library, hosts, self.settings, plan.job(), plan.limit_s(hosts, speed))
        for finding in findings:
            if finding.pop("kind") == "link":
                link = {"rate": speed.rate, "hosts": hosts, **finding}
                self.links.append(link)
                print(_describe(link, speed), TABLE.head(), sep="\n", flush=True)
                continue
            fit = fit_of(link, hosts, self.mpi)
            row = LinkTimes(
                mpi=self.mpi,
                rate=speed.rate,
                hosts=hosts,
                operation=plan.operation,
                predicted_s=fit.predict(finding["algorithm"], finding["bytes"], operation=plan.operation),
                auto=choose(finding["bytes"], hosts, fit).algorithm if plan.operation == ALL_REDUCE.name else "",
                **finding,
            )
            row.check_crossed()
            self.rows.append(row)
            print(TABLE.line(row), flush=True)
            group = [each for each in self.rows[found:] if each.bytes == row.bytes]
            if len(group) == len(plan.algorithms):
                print(f"{'':24}{verdict(group)}", flush=True)
        _check_counters(_sent(lab) - before, self.rows[found:])

    def save(self, path: Path | None) -> None:
        """Write what has been found so far as JSON."""
        found = {
            "machine": machine_facts(),
            "mpi": self.mpi,
            "settings": dict(self.settings),
            "links": self.links,
            "rows": [row.record() for row in self.rows],
        }
        results.write(path, found)


def _describe(link: Mapping[str, Any], speed: Speed) -> str:
    """Return the line that says what was measured of the link."""
    measured = 8e-6 / link["beta_s_per_byte"]
    return (
        f"\n{link['hosts']} hosts at {speed.rate}: alpha {link['alpha_s'] * 1e3:.3f} ms, "
        f"beta {link['beta_s_per_byte'] * 1e9:.2f} ns/byte = {measured:.1f} Mbit/s "
        f"(at most {8e-6 * speed.payload_bytes_per_s:.1f}; both ways at once "
        f"{8e-6 / link['both_ways_s_per_byte']:.1f}), gamma {link['gamma_s_per_byte'] * 1e9:.3f} ns/byte"
    )


def _sent(lab: Lab) -> int:
    """Return the bytes that all hosts together have sent, as the switch has counted them."""
    return sum(sent for _, sent in lab.bytes().values())


def _check_counters(counted: int, rows: Sequence[LinkTimes]) -> None:
    """Compare the switch's counters with the hosts' own.

    Raises:
        LabError: when the switch has seen less than the hosts say they sent.
    """
    said = sum(row.sent_bytes for row in rows)
    print(f"{'':24}{counted / 1e6:.1f} MB crossed the links, counted at the switch", flush=True)
    if counted < said:
        raise LabError(f"the hosts sent {said:.0f} bytes, but the switch has counted {counted} only")


def fit_of(link: Mapping[str, Any], hosts: int, mpi: str) -> Fit:
    """Return the fit of a lab: one rank on every host, and between them links alike.

    What is made of steps is predicted by simulating them with alpha, beta and gamma. Of MPI's own all-reduce there are
    no steps to look at: it was measured, apart from the rows.

    Args:
        link: what the worker measured before its first row.
        hosts: how many.
        mpi: the library.
    """
    line = Link.line(link["alpha_s"], link["beta_s_per_byte"])
    nodes = tuple(range(hosts))
    add = Curve.line(0.0, link["gamma_s_per_byte"])
    native = Curve(tuple((nbytes, seconds) for nbytes, seconds in link["native"]))
    return Fit(
        machine=Machine(inside=line, across=line, nodes=nodes, add=add),
        native=native,
        native_started=native,
        shared=None,
        facts={"ranks": hosts, "nodes": list(nodes), "mpi": mpi},
    )
