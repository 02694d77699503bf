"""Steps of training over the lab's links, beside the same command on simulated ranks.

    lab        mpirun -n 4 python -m nnmpi.train --allreduce ring --slow ms=200 ...       a host for each rank
    simulated  python -m nnmpi.train --simulate 4 --network alpha_us=..,gbit=.. ...      one process, links as measured

Computing is slowed down to a given time, so that two cores are enough for 16 ranks and both sides
compute as long. What a message costs is measured once for each rate, by sending one to and fro
between two hosts; all simulated runs get it.
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
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.collectives.command import ALL_REDUCE
from benchmarks.harness import results
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import Columns, ms1, render, rewrite, spread
from benchmarks.netlab.lab import Lab, LabError, Speed, made
from benchmarks.netlab.launch import environment, mpi_name, parse_settings, run_job, run_ranks
from nnmpi.errors import UsageError
from nnmpi.train.trace import TRACE_FILE

FOLDER = Path(__file__).resolve().parent
WARM_UP = 2  # the first steps make connections
LIMIT_S = 180.0  # after which a run hangs
SETTINGS: Mapping[str, str] = {  # of Open MPI
    # Messages move on while ranks compute, as the simulated ones do, and as adapters of clusters
    # let them.
    "btl_tcp_progress_thread": "1",
    # Ranks that wait sleep between two looks: 16 that spin leave no core for the network.
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
        name: of it.
        options: of the train command.
        hosts: on how many it is run.
        steps: of a run.
        scaling: "weak", where each host computes for as long whatever their number, or "strong",
            where they share that out. Empty for neither.
    """

    name: str
    options: tuple[str, ...]
    hosts: tuple[int, ...]
    steps: int = 8
    scaling: str = ""

    def words(self, folder: Path, hosts: int) -> list[str]:
        """Return the words of the train command; the run is FOLDER/run."""
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
        """Return what a step of the run in FOLDER/run took, of those after the first ones.

        That is from where its forward passes begin to where they begin in the last step; the trace
        has all ranks'.
        """
        with gzip.open(folder / "run" / TRACE_FILE, "rt") as stream:
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
    *(StepCase(name, ("--allreduce", name), (2, 4, 8, 16)) for name in ("ring", "tree", "ps")),
    *(
        StepCase(name, ("--allreduce", "ring"), (2, 4, 8), scaling=name)
        for name in ("strong", "weak")
    ),
    StepCase("ssp", ("--sync", "ssp", "--staleness", "2"), (2, 4), 16),
)


@dataclass(frozen=True)
class StepTimes:
    """A case on so many hosts at a rate: seconds of a step in each run over the links, and
    simulated.
    """

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
    """Measure and simulate, in so many rounds of all cases; print the table, and write it.

    Raises:
        UsageError: for cases that are not run on so many hosts.
        LabError: when the lab cannot be made, or a run fails.
    """
    places = [
        (speed, case, hosts)
        for speed in options.rate
        for case in CASES
        for hosts in case.hosts
        if case.name in options.cases and (options.hosts is None or hosts in options.hosts)
    ]
    if not places:
        raise UsageError(
            "none of these cases is run on so many hosts; leave --hosts or --cases out"
        )
    mpi = mpi_name()
    settings = (SETTINGS if mpi.startswith("Open MPI") else {}) | parse_settings(options.set)
    links: dict[str, dict[str, float]] = {}
    seconds: dict[tuple[Speed, StepCase, int], list[float]] = defaultdict(list)
    job = {"operation": ALL_REDUCE, "sizes": (), "algorithms": (), "repeats": 5}
    with made(max(hosts for *_, hosts in places), places[0][0]) as lab:
        for turn in range(options.repeats):
            for place in places if turn % 2 == 0 else places[::-1]:
                speed, case, hosts = place
                lab.set_speed(speed)
                if speed.rate not in links:
                    (links[speed.rate],) = run_job(lab, mpi, 2, settings, job, LIMIT_S)
                seconds[place].append(_measure(lab, mpi, settings, case, hosts))
                print(speed.rate, case.name, hosts, f"{ms1(seconds[place][-1])} ms", flush=True)
    rows = [
        StepTimes(
            speed.rate,
            case.name,
            hosts,
            seconds[speed, case, hosts],
            _simulate(links[speed.rate], case, hosts),
        )
        for speed, case, hosts in places
    ]
    print(table(rows))
    facts = {"machine": machine_facts(), "mpi": mpi, "settings": dict(settings)}
    results.write(options.json, {**facts, "links": links, "rows": [vars(row) for row in rows]})
    if options.json is not None and options.json.resolve().parent == FOLDER / "results":
        rewrite(FOLDER / "README.md", {"steps": table(rows)})


def _measure(lab: Lab, mpi: str, settings: Mapping[str, str], case: StepCase, hosts: int) -> float:
    """Return what a step takes over the links."""
    with tempfile.TemporaryDirectory() as folder:
        for _ in run_ranks(lab, mpi, hosts, settings, case.words(Path(folder), hosts), LIMIT_S):
            pass
        return case.step_seconds(Path(folder))


def _simulate(link: Mapping[str, float], case: StepCase, hosts: int) -> float:
    """Return what a step takes on simulated ranks."""
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
    """Return all rows as Markdown, and how far they are off."""
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
