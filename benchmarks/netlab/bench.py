"""The whole benchmark: makes a lab, measures across it, compares with the model, takes the lab down."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.accuracy.machine import facts
from benchmarks.netlab.build import built
from benchmarks.netlab.job import run_job
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.link import Speed
from benchmarks.netlab.plan import Plan, as_json
from benchmarks.netlab.predict import fit_of
from benchmarks.netlab.row import HEADER, Row, summary, verdict
from benchmarks.netlab.shell import LabError
from benchmarks.netlab.state import State
from nnmpi.comm.choose import choose


@dataclass
class Bench:
    """A run of the benchmark, and what it has found so far.

    Attributes:
        mpi: the library's name and version, as they stand in the result.
        library: a name of `launch.LIBRARIES`.
        settings: of the library, beyond the lab's own.
    """

    plan: Plan
    mpi: str
    library: str
    settings: Mapping[str, str]
    links: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def run(self) -> None:
        """Measure everything and print it row by row.

        Raises:
            LabError: when the lab cannot be made, a job fails, or messages did not cross the links.
        """
        plan, begin = self.plan, time.monotonic()
        print(f"{self.mpi}; {facts()}; median of {plan.repeats}", flush=True)
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
        findings = run_job(lab, self.library, hosts, self.settings, as_json(plan), plan.limit_s(hosts, speed))
        for finding in findings:
            if finding.pop("kind") == "link":
                link = {"rate": speed.rate, "hosts": hosts, **finding}
                self.links.append(link)
                print(_describe(link, speed), HEADER, sep="\n", flush=True)
                continue
            fit = fit_of(link, hosts, self.mpi)
            predicted = fit.predict(finding["algorithm"], finding["bytes"])
            auto = choose(finding["bytes"], hosts, fit).algorithm
            row = Row(mpi=self.mpi, rate=speed.rate, hosts=hosts, predicted_s=predicted, auto=auto, **finding)
            row.check_crossed()
            self.rows.append(row)
            print(row.line(), flush=True)
            group = [each for each in self.rows[found:] if each.bytes == row.bytes]
            if len(group) == len(plan.algorithms):
                print(f"{'':24}{verdict(group)}", flush=True)
        _check_counters(_sent(lab) - before, self.rows[found:])

    def save(self, path: Path) -> None:
        """Write what has been found so far as JSON."""
        found = {
            "machine": facts(),
            "mpi": self.mpi,
            "settings": dict(self.settings),
            "links": self.links,
            "rows": [row.record() for row in self.rows],
        }
        path.write_text(json.dumps(found, indent=1) + "\n")


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


def _check_counters(counted: int, rows: Sequence[Row]) -> None:
    """Compare the switch's counters with the hosts' own.

    Raises:
        LabError: when the switch has seen less than the hosts say they sent.
    """
    said = sum(row.sent_bytes for row in rows)
    print(f"{'':24}{counted / 1e6:.1f} MB crossed the links, counted at the switch", flush=True)
    if counted < said:
        raise LabError(f"the hosts sent {said:.0f} bytes, but the switch has counted {counted} only")
