"""Steps of training over the lab's links, beside the same command on simulated ranks.

    lab        mpirun -n 4 python -m nnmpi.train --allreduce ring --slow ms=200 ...       a host for each rank
    simulated  python -m nnmpi.train --simulate 4 --network alpha_us=..,gbit=.. ...      one process, links as measured

Computing is slowed down to a given time, so that two cores are enough for 16 ranks and both sides compute as long. What
a message costs is measured once for each rate, by sending one to and fro between two hosts; all simulated runs get it.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median

from benchmarks.collectives.command import ALL_REDUCE
from benchmarks.harness import results
from benchmarks.harness.launch import ROOT
from benchmarks.harness.machine import machine_facts
from benchmarks.harness.tables import Columns, GrowingTable, ms1, render, rewrite, spread
from benchmarks.netlab.build import built
from benchmarks.netlab.lab import Lab
from benchmarks.netlab.launch import environment, run_job, start_ranks
from benchmarks.netlab.link import Speed
from benchmarks.netlab.shell import LabError
from benchmarks.netlab.state import State
from nnmpi.train.trace import TRACE_FILE

FOLDER = Path(__file__).resolve().parent
WARM_UP = 2  # the first steps make connections
LIMIT_S = 180.0  # after which a run hangs
SETTINGS: Mapping[str, Mapping[str, str]] = {
    "openmpi": {
        # Messages move on while ranks compute, as the simulated ones do, and as adapters of clusters let them.
        "btl_tcp_progress_thread": "1",
        # Ranks that wait sleep between two looks: 16 that spin leave no core for the network.
        "threads_pthreads_yield_strategy": "nanosleep",
        "threads_pthreads_nanosleep_time": "50000",
    },
    "mpich": {},
}
ALL = ("--trace", "--eval-every", "0", "--save-every", "0", "--schedule", "constant", "--optimizer", "sgd")


@dataclass(frozen=True)
class StepCase:
    """A way of training.

    Attributes:
        name: of it.
        options: of the train command.
        times: seconds of computing by kind; nnmpi lasts as long as all of them together, by --slow.
        batch: samples of a step.
        hosts: on how many it is run.
        steps: of a run.
        scaling: "weak", where each host computes for as long whatever their number, or "strong", where they share
            that out. Empty for neither.
    """

    name: str
    options: tuple[str, ...]
    times: Mapping[str, float]
    batch: int
    hosts: tuple[int, ...]
    steps: int
    scaling: str = ""

    def times_on(self, hosts: int) -> dict[str, float]:
        """Return the seconds of computing on so many hosts; each updates all weights."""
        parts = hosts if self.scaling == "strong" else 1
        return {kind: each / (parts if kind != "STEP" else 1) for kind, each in self.times.items()}

    def batch_on(self, hosts: int) -> int:
        """Return the samples of a step on so many hosts."""
        return self.batch * (hosts if self.scaling == "weak" else 1)

    def words(self, folder: Path, hosts: int) -> list[str]:
        """Return the words of the train command; the run is FOLDER/run."""
        steps, batch = str(self.steps), str(self.batch_on(hosts))
        count = ("--batch-size", batch, "--max-steps", steps, "--log-every", steps)
        files = ("--slow", f"ms={1e3 * sum(self.times_on(hosts).values()):g}", "--out", str(folder / "run"))
        return ["-m", "nnmpi.train", *self.options, *ALL, *count, *files]

    def step_seconds(self, folder: Path) -> float:
        """Return what a step of the run in FOLDER/run took, of those after the first ones.

        That is from where its forward passes begin to where they begin in the last step; the trace has all ranks'.
        """
        with gzip.open(folder / "run" / TRACE_FILE, "rt") as stream:
            events = json.load(stream)["traceEvents"]
        begins_us = sorted(event["ts"] for event in events if event["ph"] == "X" and event["cat"] == "forward")
        each = len(begins_us) // self.steps
        return _between([begin_us / 1e6 for begin_us in begins_us[::each]][: self.steps])


def _between(begins_s: Sequence[float]) -> float:
    """Return the seconds of a step by the moments at which steps began, but for the first ones."""
    return (begins_s[-1] - begins_s[WARM_UP]) / (len(begins_s) - 1 - WARM_UP)


# 176,266 parameters: 705 KB of gradients, 59 ms at 100 Mbit/s.
_REPLICAS, _STEP = ("--model", "mlp", "--hidden", "384", "384"), {"F": 0.06, "B": 0.1, "STEP": 0.04}
CASES = (
    *(
        StepCase(name, (*_REPLICAS, "--allreduce", name), _STEP, 64, (2, 4, 8, 16), 8)
        for name in ("ring", "tree", "ps")
    ),
    *(
        StepCase(name, ("--allreduce", "ring", *_REPLICAS), _STEP, 64, (2, 4, 8), 8, name)
        for name in ("strong", "weak")
    ),
    StepCase("ssp", (*_REPLICAS, "--sync", "ssp", "--staleness", "2"), _STEP, 64, (2, 4), 16),
)


@dataclass(frozen=True)
class StepTimes:
    """A case on so many hosts at a rate: measured and simulated.

    Attributes:
        rate: of the links.
        hosts: how many.
        case: its name.
        seconds: of a step, in each run over the links.
        simulated_s: of a step.
    """

    rate: str
    hosts: int
    case: str
    seconds: tuple[float, ...]
    simulated_s: float

    @property
    def measured_s(self) -> float:
        """The median."""
        return median(self.seconds)

    @property
    def ratio(self) -> float:
        """Simulated by measured."""
        return self.simulated_s / self.measured_s


TABLE = GrowingTable(
    ("rate", -9, lambda row: row.rate),
    ("hosts", 6, lambda row: row.hosts),
    ("  case", -18, lambda row: f"  {row.case}"),
    ("measured", 11, lambda row: f"{ms1(row.measured_s)} ms"),
    ("simulated", 11, lambda row: f"{ms1(row.simulated_s)} ms"),
    ("ratio", 7, lambda row: f"{row.ratio:.3f}"),
    ("spread", 8, lambda row: f"{(max(row.seconds) - min(row.seconds)) / row.measured_s:.1%}"),
)


@dataclass
class StepsRun:
    """A run of the benchmark, and what it has found so far.

    Attributes:
        mpi: the library's name and version.
        library: a name of `launch.LIBRARIES`.
        settings: of it, beyond the lab's own.
        links: what was measured of them, by rate.
        rows: by rate, hosts and case.
    """

    mpi: str
    library: str
    settings: Mapping[str, str]
    links: dict[str, dict[str, float]] = field(default_factory=dict)
    rows: dict[tuple[str, int, str], StepTimes] = field(default_factory=dict)

    def run(self, places: Sequence[tuple[Speed, int, StepCase]], repeats: int) -> None:
        """Measure and simulate, in so many rounds of all places, and print the rows.

        Raises:
            LabError: when the lab cannot be made, or a run fails.
        """
        most = max(hosts for _, hosts, _ in places)
        with built(State(f"steps-{os.getpid()}"), most, places[0][0]) as lab:
            for turn in range(repeats):
                for speed, hosts, case in places if turn % 2 == 0 else places[::-1]:
                    lab.set_speed(speed)
                    if speed.rate not in self.links:
                        self.links[speed.rate] = self._measure_link(lab)
                        print(speed.rate, self.links[speed.rate], flush=True)
                    self._measure(lab, speed, hosts, case)
        print(TABLE.head())
        for speed, hosts, case in places:
            print(TABLE.line(self.rows[speed.rate, hosts, case.name]))
        print(summary(list(self.rows.values())))

    def _measure_link(self, lab: Lab) -> dict[str, float]:
        """Return what a message costs between two hosts."""
        what = {"operation": ALL_REDUCE, "sizes": (), "algorithms": ()}
        job = {**what, "repeats": 5, "cut_bytes": 2**30, "trains": True}
        (found,) = run_job(lab, self.library, 2, self.settings, job, LIMIT_S)
        return {name: value for name, value in found.items() if name not in ("kind", "native")}

    def _measure(self, lab: Lab, speed: Speed, hosts: int, case: StepCase) -> None:
        """Run a case once over the links; simulate it if that was not done."""
        key = speed.rate, hosts, case.name
        before = self.rows.get(key)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(folder)
            self._start(lab, hosts, case.words(place, hosts), place / "log", f"{case.name} on {hosts} hosts")
            taken_s = case.step_seconds(place)
        if before is None:
            before = StepTimes(*key, (), self._simulate(speed, hosts, case))
        self.rows[key] = replace(before, seconds=(*before.seconds, taken_s))
        print(TABLE.line(self.rows[key]), flush=True)

    def _start(self, lab: Lab, hosts: int, words: Sequence[str], log: Path, what: str) -> None:
        """Run a command of Python's on the first hosts."""
        process = start_ranks(lab, self.library, hosts, self.settings, (sys.executable, *words), log)
        _wait(process, log, what)

    def _simulate(self, speed: Speed, hosts: int, case: StepCase) -> float:
        """Return what a step takes on simulated ranks."""
        with tempfile.TemporaryDirectory() as folder:
            network = describe_network(self.links[speed.rate])
            words = (*case.words(Path(folder), hosts), "--simulate", str(hosts), "--network", network)
            variables = environment(os.environ, paths=[ROOT])
            done = subprocess.run((sys.executable, *words), env=variables, capture_output=True, text=True)
            if done.returncode:
                raise LabError(f"{case.name} on {hosts} simulated ranks failed: {done.stdout}{done.stderr}")
            return case.step_seconds(Path(folder))

    def save(self, path: Path | None) -> None:
        """Write what has been found so far as JSON; in the benchmark's own results its table in the README, too."""
        rows = [{**asdict(row), "measured_s": row.measured_s, "ratio": row.ratio} for row in self.rows.values()]
        facts = {"machine": machine_facts(), "mpi": self.mpi, "settings": dict(self.settings)}
        results.write(path, {**facts, "links": self.links, "rows": rows})
        if path is not None and path.resolve().parent == FOLDER / "results":
            rewrite(FOLDER / "README.md", {"steps": table(list(self.rows.values()))})


def describe_network(link: Mapping[str, float]) -> str:
    """Return a measured link as --network takes it."""
    return f"alpha_us={1e6 * link['alpha_s']:.6g},gbit={8e-9 / link['beta_s_per_byte']:.6g}"


def table(rows: Sequence[StepTimes]) -> str:
    """Return all rows as Markdown, and how far they are off."""
    ordered = sorted(rows, key=lambda row: (row.rate, [case.name for case in CASES].index(row.case), row.hosts))
    columns: Columns = (
        ("rate", lambda row: row.rate),
        ("case", lambda row: row.case),
        ("hosts", lambda row: row.hosts),
        ("measured, ms", lambda row: spread(row.measured_s, (min(row.seconds), max(row.seconds)), ms1)),
        ("simulated, ms", lambda row: ms1(row.simulated_s)),
        ("simulated / measured", lambda row: f"{row.ratio:.3f}"),
    )
    return f"{render(columns, ordered)}\n\nSimulated against measured: {summary(rows)}."


def summary(rows: Sequence[StepTimes]) -> str:
    """Return how far all rows together are off."""
    off = sorted(abs(row.ratio - 1) for row in rows)
    within = sum(each <= 0.05 for each in off)
    return f"off by {median(off):.1%} (median) to {off[-1]:.1%} at the worst; {within} of {len(rows)} within 5 %"


def _wait(process: subprocess.Popen[bytes], log: Path, what: str) -> None:
    """Return when a run has ended well.

    Raises:
        LabError: with what it printed last, when it has not, or not in time.
    """
    try:
        status: int | None = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        process.kill()
        process.wait()
    if status != 0:
        said = "\n".join(log.read_text().strip().splitlines()[-15:])
        raise LabError(f"{what} {'hung' if status is None else f'ended with status {status}'}; it said:\n{said}")
