"""Training steps over the lab's links, beside the same command on simulated ranks.

    lab        mpirun -n 4 nnmpi train --allreduce ring --slow ms=200 ...
               a host for each rank
    simulated  nnmpi train --simulate 4 --network alpha_us=..,gbit=.. ...
               one process, links as measured

`--slow` stretches the computation to a given time, so that two cores are enough for 16 ranks and
both sides compute equally long. The cost of a message is measured once for each rate, by a
round trip between two hosts; all simulated runs use it.
"""

from __future__ import annotations

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import median

from benchmarks.collectives.command import ALL_REDUCE
from benchmarks.harness import results
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import Columns, ms1, render, rewrite, spread
from benchmarks.netlab.lab import Lab, LabError, Speed, lab_of
from benchmarks.netlab.launch import environment, mpi_name, parse_settings, run_job, run_ranks
from nnmpi.base.errors import UsageError
from nnmpi.train.folder import RunFolder

FOLDER = Path(__file__).resolve().parent
WARM_UP = 2  # uncounted steps: the first ones make connections
LIMIT_S = 180.0  # a longer run counts as hung
SETTINGS: Mapping[str, str] = {  # of Open MPI
    # Messages progress while ranks compute, as simulated ones do, and as cluster adapters do in
    # hardware.
    "btl_tcp_progress_thread": "1",
    # Waiting ranks sleep between polls: 16 that spin leave no core for the network.
    "threads_pthreads_yield_strategy": "nanosleep",
    "threads_pthreads_nanosleep_time": "50000",
}
ALL = (
    "--trace",
    "--eval-every",
    "0",
    "--save-every",
    "0",
    "--lr-schedule",
    "constant",
    "--optimizer",
    "sgd",
)


@dataclass(frozen=True)
class StepCase:
    """A way of training.

    Attributes:
        name: on the command line.
        options: of the train command.
        hosts: numbers of hosts.
        steps: of a run.
        scaling: "weak": computing time per host is constant; "strong": it is divided by the number
            of hosts; empty: neither applies.
    """

    name: str
    options: tuple[str, ...]
    hosts: tuple[int, ...]
    steps: int = 8
    scaling: str = ""

    def words(self, folder: Path, hosts: int) -> list[str]:
        """Return the words of the train command; its run folder is FOLDER/run."""
        parts = hosts if self.scaling == "strong" else 1
        slow_ms = 1e3 * (COMPUTING_S / parts + UPDATE_S)
        batch, steps = BATCH * (hosts if self.scaling == "weak" else 1), str(self.steps)
        count = ("--batch-size", str(batch), "--max-steps", steps, "--log-every", steps)
        return [
            "-m",
            "nnmpi.train",
            *MODEL,
            *self.options,
            *ALL,
            *count,
            "--slow",
            f"ms={slow_ms:g}",
            *_out(folder),
        ]

    def step_seconds(self, folder: Path) -> float:
        """Return the mean seconds of a step of the run in FOLDER/run, after the first ones.

        A step lasts from its first forward pass on any rank to the next step's; the trace has the
        passes of all ranks.
        """
        with gzip.open(RunFolder(folder / "run").trace, "rt") as stream:
            events = json.load(stream)["traceEvents"]
        begins_us = sorted(
            event["ts"] for event in events if event["ph"] == "X" and event["cat"] == "forward"
        )
        firsts = begins_us[:: len(begins_us) // self.steps][: self.steps]
        return float(1e-6 * (firsts[-1] - firsts[WARM_UP]) / (len(firsts) - 1 - WARM_UP))


def _out(folder: Path) -> tuple[str, str]:
    return "--out", str(folder / "run")


# 176,266 parameters: 705 KB of gradients, 59 ms at 100 Mbit/s.
MODEL, BATCH, COMPUTING_S, UPDATE_S = ("--model", "mlp", "--hidden", "384", "384"), 64, 0.16, 0.04
CASES = (
    *(StepCase(name, ("--allreduce", name), (2, 4, 8, 16)) for name in ("ring", "tree", "star")),
    *(
        StepCase(name, ("--allreduce", "ring"), (2, 4, 8), scaling=name)
        for name in ("strong", "weak")
    ),
    StepCase("ssp", ("--sync", "ssp", "--staleness", "2"), (2, 4), 16),
)


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step for one case, number of hosts and rate: each run's, and simulated."""

    rate: str
    case: str
    hosts: int
    seconds: Sequence[float]
    simulated_s: float

    @property
    def ratio(self) -> float:
        """Simulated by measured."""
        return self.simulated_s / median(self.seconds)


def steps(options: argparse.Namespace) -> None:
    """Measure all cases in several rounds, simulate them; print the table, and write it.

    Raises:
        UsageError: if no case runs on these numbers of hosts.
        LabError: if the lab cannot be made, or a run fails.
    """
    points = [
        (speed, case, hosts)
        for speed in options.rate
        for case in CASES
        for hosts in case.hosts
        if case.name in options.cases and (options.hosts is None or hosts in options.hosts)
    ]
    if not points:
        raise UsageError(
            "none of these cases is run on so many hosts; leave --hosts or --cases out"
        )
    mpi = mpi_name()
    settings = (SETTINGS if mpi.startswith("Open MPI") else {}) | parse_settings(options.set)
    links: dict[str, dict[str, float]] = {}
    seconds: dict[tuple[Speed, StepCase, int], list[float]] = defaultdict(list)
    job = {"operation": ALL_REDUCE, "sizes": (), "algorithms": (), "repeats": 5}
    with lab_of(max(hosts for *_, hosts in points), points[0][0]) as lab:
        for turn in range(options.repeats):
            for point in points if turn % 2 == 0 else points[::-1]:
                speed, case, hosts = point
                lab.set_speed(speed)
                if speed.rate not in links:
                    (links[speed.rate],) = run_job(lab, mpi, 2, settings, job, LIMIT_S)
                seconds[point].append(_measure(lab, mpi, settings, case, hosts))
                print(speed.rate, case.name, hosts, f"{ms1(seconds[point][-1])} ms", flush=True)
    rows = [
        StepTimes(
            speed.rate,
            case.name,
            hosts,
            seconds[speed, case, hosts],
            _simulate(links[speed.rate], case, hosts),
        )
        for speed, case, hosts in points
    ]
    print(table(rows))
    facts = {"machine": machine_facts(), "mpi": mpi, "settings": dict(settings)}
    results.write(options.json, {**facts, "links": links, "rows": [vars(row) for row in rows]})
    if options.json is not None and options.json.resolve().parent == FOLDER / "results":
        rewrite(FOLDER / "README.md", {"steps": table(rows)})


def _measure(lab: Lab, mpi: str, settings: Mapping[str, str], case: StepCase, hosts: int) -> float:
    """Return the seconds of a step over the links."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in run_ranks(lab, mpi, hosts, settings, case.words(Path(folder), hosts), LIMIT_S):
            pass
        return case.step_seconds(Path(folder))


def check() -> None:
    """Simulate a step over the links of the stored table again, and compare it with its row.

    Raises:
        LabError: where the times differ.
    """
    stored = json.loads((FOLDER / "results" / "steps-openmpi.json").read_text())
    names = [item.name for item in fields(StepTimes)]
    rows = [StepTimes(*map(row.get, names)) for row in stored["rows"]]
    print(table(rows))
    row = next(row for row in rows if row.case == CASES[0].name)
    simulated_s = _simulate(stored["links"][row.rate], CASES[0], row.hosts)
    if abs(simulated_s / row.simulated_s - 1) > 0.01:
        raise LabError(f"{ms1(simulated_s)} ms are simulated now, {ms1(row.simulated_s)} before")


def _simulate(link: Mapping[str, float], case: StepCase, hosts: int) -> float:
    """Return the seconds of a step on simulated ranks."""
    with tempfile.TemporaryDirectory() as folder:
        network = f"alpha_us={1e6 * link['alpha_s']:.6g},gbit={8e-9 / link['beta_s_per_byte']:.6g}"
        words = (*case.words(Path(folder), hosts), "--simulate", str(hosts), "--network", network)
        done = subprocess.run(
            (sys.executable, *words), env=environment(), capture_output=True, text=True
        )
        if done.returncode:
            raise LabError(
                f"{case.name} on {hosts} simulated ranks failed: {done.stdout}{done.stderr}"
            )
        return case.step_seconds(Path(folder))


def table(rows: Sequence[StepTimes]) -> str:
    """Return all rows as Markdown, and their errors."""
    columns: Columns = (
        ("rate", lambda row: row.rate),
        ("case", lambda row: row.case),
        ("hosts", lambda row: row.hosts),
        (
            "measured, ms",
            lambda row: spread(median(row.seconds), (min(row.seconds), max(row.seconds)), ms1),
        ),
        ("simulated, ms", lambda row: ms1(row.simulated_s)),
        ("simulated / measured", lambda row: f"{row.ratio:.3f}"),
    )
    off = sorted(abs(row.ratio - 1) for row in rows)
    within = f"{sum(item <= 0.05 for item in off)} of {len(rows)} within 5 %"
    words = f"off by {median(off):.1%} (median) to {off[-1]:.1%} at the worst; {within}"
    return f"{render(columns, rows)}\n\nSimulated against measured: {words}."
