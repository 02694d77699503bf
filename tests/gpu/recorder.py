"""The pytest plugin of `python -m tests.gpu`: notes how long each check took and what a failed one said.

A device that was given a wrong address answers everything afterwards with the same error: the process then ends, and
the runner (`tests.harness`) goes on with the next check in a new one. Where pytest-mpi is missing, its option is here.
"""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path

import pytest

FILE = "NNMPI_GPU_RECORDS"
# After one of these the process has lost its device.
FATAL = ("IllegalAddress", "illegal memory access", "MisalignedAddress", "LaunchFailure", "HardwareStackError")
LOST = 70  # exit status
PHASES = 3  # of a check on a rank: set-up, call, tear-down
LONGEST = 2000  # characters of what a failed check said


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take pytest-mpi's option where it is not installed."""
    if find_spec("pytest_mpi") is None:
        parser.addoption("--with-mpi", action="store_true", help="run on the ranks of mpirun")


def pytest_configure(config: pytest.Config) -> None:
    """Know pytest-mpi's mark."""
    config.addinivalue_line("markers", "mpi: runs on the ranks of mpirun")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for each phase of a check; end the process when the device is lost."""
    words = report.longreprtext[-LONGEST:] if report.failed else ""
    with Path(os.environ.get(FILE, os.devnull)).open("a") as file:
        file.write(json.dumps({"test": report.nodeid, "seconds": report.duration, "words": words}) + "\n")
    if any(sign in words for sign in FATAL):
        os._exit(LOST)


def read(file: Path) -> tuple[dict[str, float], dict[str, str]]:
    """Return the seconds of each check, the mean over its ranks, and what failed ones said."""
    total: dict[str, float] = {}
    phases: dict[str, int] = {}
    words: dict[str, str] = {}
    for line in file.read_text().splitlines() if file.exists() else []:
        found = json.loads(line)
        name = found["test"]
        total[name] = total.get(name, 0.0) + found["seconds"]
        phases[name] = phases.get(name, 0) + 1
        if found["words"]:
            words.setdefault(name, found["words"])
    ranks = {name: max(1, round(count / PHASES)) for name, count in phases.items()}
    return {name: seconds / ranks[name] for name, seconds in total.items()}, words
