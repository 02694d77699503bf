"""python -m tests.gpu [options] [arguments for pytest]: all checks that need a device, and a report of them as JSON."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.gpu.report import Report

ROOT = Path(__file__).parents[2]
STAND_IN = ROOT / "tests/device/fake"
RESULTS = ROOT / "benchmarks/gpu/results"
# Whatever this machine's Python has: no option of a plugin that may be missing, no warning of a newer library as error.
PLAINLY = [
    "-o",
    "addopts=--import-mode=importlib",
    "-W",
    "default",
    "-p",
    "no:cacheprovider",
    "-p",
    "tests.gpu.recorder",
    # The recorder ends what hangs, with or without pytest-timeout, whose signals no call into CUDA would let through.
    *("-o", "faulthandler_timeout=0", "-o", "timeout=0", "-o", "timeout_method=thread"),
]
SAVE_S = 2.0  # between two writings of the report while checks run
PROBE = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"


def main(words: Sequence[str]) -> int:
    """Run the checks, print the totals, write the report; return 1 if one failed, or there is no device."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that running jobs are ended
    options, arguments = _parser().parse_known_args(words)
    if options.backend == "fake":
        _put_first(STAND_IN)

    from nnmpi.backend.device import device_problem  # finds the stand-in only now

    problem = device_problem()
    if problem is not None:
        print(f"scripts/test-gpu: there is no device to run the checks on: {problem}", file=sys.stderr)
        return 1
    return run(options, arguments)


def run(options: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Run the checks on the device that there is."""
    from benchmarks.gpu.facts import collect, is_stand_in, short_name
    from nnmpi.backend.device import select
    from tests.gpu.report import Report, not_run, passed, summary

    backend = select("cupy")
    facts = collect(backend)
    file = options.json or (None if is_stand_in(backend) else RESULTS / f"{short_name(backend)}-checks.json")
    report = Report(facts, file)
    for name, value in facts.items():
        _say(f"{name + ':':<22} {value}\n")
    missing = mpi_problem()
    for ranks in ([] if options.no_serial else [0]) + options.ranks:
        _say(f"\n==== {'serial' if ranks == 0 else f'{ranks} ranks'} ====\n")
        if ranks and missing:
            report.add(not_run(ranks, missing))
        else:
            checks(ranks, arguments, options, report)
    _say(f"\n==== total ====\n{summary(report.parts)}\n")
    if file is not None:
        _say(f"the report is in {file}\n")
    return int(not passed(report.parts))


def checks(ranks: int, arguments: Sequence[str], options: argparse.Namespace, report: Report) -> None:
    """Add the report's part of so many ranks (0 for the serial checks); write it again and again while they run."""
    from tests.gpu.recorder import FILE, read
    from tests.gpu.report import part
    from tests.harness.suite import Result, run_suite

    begin = written = time.monotonic()

    def say(text: str) -> None:  # called many times a second, also where there is nothing to say
        nonlocal written
        _say(text)
        if time.monotonic() - written > SAVE_S:
            recorded = read(records)
            seconds = time.monotonic() - begin
            report.write_running(part(Result(ranks, recorded.outcomes, recorded.reasons, seconds), recorded))
            written = time.monotonic()

    with tempfile.TemporaryDirectory(prefix="nnmpi-gpu-") as folder:
        records = Path(folder) / "records"
        os.environ[FILE] = str(records)
        names_files = any((ROOT / word.partition("::")[0]).exists() for word in arguments)
        words = [*PLAINLY, *arguments, *([] if names_files else ["tests/gpu"])]
        result = run_suite(ranks, words, options.limit_s, options.test_limit_s, say)
        found = part(result, read(records))
    if result.seconds >= options.limit_s:
        found["stopped"] = f"stopped after {options.limit_s:g} s (--limit-s); what is not listed was not run"
    report.add(found)


def mpi_problem() -> str | None:
    """Return why nothing can be run on several ranks, None if it can: asked of a process of its own."""
    from nnmpi.errors import LaunchError
    from tests.harness.job import mpirun

    try:
        mpirun(1)
    except LaunchError as error:
        return str(error)
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    words = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    return None if done.returncode == 0 else f"mpi4py finds no MPI library: {words[-1]}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="scripts/test-gpu", description=__doc__)
    add = parser.add_argument
    add("--backend", choices=("cupy", "fake"), default="cupy", help="the device, or its stand-in that NumPy computes")
    add(
        "--ranks",
        type=lambda text: [int(word) for word in text.replace(",", " ").split()],
        default=[1, 2, 4],
        help="numbers of ranks for the checks under MPI (default 1,2,4)",
    )
    add("--no-serial", action="store_true", help="leave the serial checks out")
    add("--json", type=Path, help="the report's file (default: benchmarks/gpu/results/DEVICE-checks.json on a card)")
    add("--limit-s", type=float, default=1200, help="seconds for one part (default 1200)")
    add("--test-limit-s", type=float, default=120, help="seconds for one check (default 120)")
    return parser


def _put_first(folder: Path) -> None:
    """Let this process and those that it starts find modules in a folder before any other."""
    sys.path.insert(0, str(folder))
    paths = [str(folder), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
