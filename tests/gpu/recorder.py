"""The pytest plugin of `python -m tests.gpu`: notes at once how each check goes, how long it takes and what it says.

A device that was given a wrong address answers everything afterwards with the same error: the process then ends, and
the runner (`tests.harness`) goes on with the next check in a new one. So it does after a serial check that hangs.
Where pytest-mpi is missing, its option is here.
"""

import faulthandler
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TextIO

import pytest

from nnmpi.backend.device_errors import _FATAL  # the one list of them, by CUDA's numbers
from tests.harness.records import DEFAULT_LIMIT_S, FAILED, LIMIT, PASSED, SKIPPED, STARTED

FILE = "NNMPI_GPU_RECORDS"
LOST = 70  # exit status
PHASES = 3  # of a check on a rank: set-up, call, tear-down
LONGEST = 2000  # characters of what a failed check said


@dataclass
class Recorded:
    """What is noted of the checks so far, each by the check's name.

    Attributes:
        seconds: how long it took, the mean over its ranks.
        words: what a failed one said, or where a hung one was.
        outcomes: how it ended; "started" if it has not.
        reasons: why it was left out.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)


class Watch:
    """Ends the process in a check that hangs, and leaves where it was.

    It is a thread of C: a call into CUDA that never returns lets no signal handler run, and may let no Python run.

    Args:
        file: for the name of the check that runs, and for where it hung.
        limit_s: how long a check may take.
    """

    def __init__(self, file: TextIO, limit_s: float) -> None:
        self._file = file
        self._limit_s = limit_s

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Run the check within its time."""
        self._file.seek(0)
        self._file.truncate()
        self._file.write(f"{item.nodeid}\nIt has not ended after {self._limit_s:g} s. ")
        self._file.flush()
        faulthandler.dump_traceback_later(self._limit_s, file=self._file, exit=True)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Take pytest-mpi's option where it is not installed."""
    if find_spec("pytest_mpi") is None:
        parser.addoption("--with-mpi", action="store_true", help="run on the ranks of mpirun")


def pytest_configure(config: pytest.Config) -> None:
    """Know pytest-mpi's mark; watch the serial checks (under MPI the harness does)."""
    config.addinivalue_line("markers", "mpi: runs on the ranks of mpirun")
    if FILE in os.environ and not config.getoption("--with-mpi"):
        file = Path(f"{os.environ[FILE]}.{os.getpid()}").open("w")  # noqa: SIM115 (open until the process ends)
        config.add_cleanup(file.close)
        config.pluginmanager.register(Watch(file, float(os.environ.get(LIMIT, DEFAULT_LIMIT_S))), "nnmpi-watch")


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a check has begun."""
    _write({"test": nodeid, "when": STARTED})


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    """Mark the report of a check that lost the device."""
    report: Any = yield
    report.lost = call.excinfo is not None and is_fatal(call.excinfo.value)
    return report


@pytest.hookimpl(trylast=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a line for each phase of a check; end the process when the device is lost."""
    words = report.longreprtext[-LONGEST:] if report.failed else ""
    if report.skipped:
        words = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
    line = {"when": report.when, "outcome": report.outcome, "seconds": report.duration, "words": words}
    _write({"test": report.nodeid, **line})
    if getattr(report, "lost", False):
        os._exit(LOST)


def is_fatal(error: BaseException | None) -> bool:
    """Return whether an error, or what led to it, is one after which CUDA answers to nothing in this process."""
    if error is None:
        return False
    if isinstance(error, BaseExceptionGroup) and any(is_fatal(each) for each in error.exceptions):
        return True
    is_cudas = type(error).__name__ in ("CUDARuntimeError", "CUDADriverError")
    return (is_cudas and getattr(error, "status", None) in _FATAL) or is_fatal(error.__cause__ or error.__context__)


def read(file: Path) -> Recorded:
    """Return what is noted so far, of all ranks and of all processes that ran one after another."""
    found = Recorded()
    phases: dict[str, int] = {}
    text = file.read_text() if file.exists() else ""
    for line in text.split("\n")[:-1]:  # the last one may be cut off
        record = json.loads(line)
        name = record["test"]
        if record["when"] == STARTED:
            found.outcomes.setdefault(name, STARTED)
            continue
        _judge(found, record)
        found.seconds[name] = found.seconds.get(name, 0.0) + record["seconds"]
        phases[name] = phases.get(name, 0) + 1
    for name, count in phases.items():
        found.seconds[name] /= max(1, round(count / PHASES))
    for path in file.parent.glob(f"{file.name}.*"):
        name, _, words = path.read_text(errors="replace").partition("\n")
        if "most recent call first" in words and found.outcomes.get(name) == STARTED:
            found.words[name] = _last_thread(words)
    return found


def _judge(found: Recorded, record: dict[str, Any]) -> None:
    """Add to a check's outcome what one more phase of it gave: one that failed is kept, one that passed is next."""
    name, outcome = record["test"], record["outcome"]
    if outcome == FAILED:
        found.words.setdefault(name, record["words"])
    if outcome == SKIPPED:
        found.reasons.setdefault(name, record["words"])
    now = found.outcomes.get(name, STARTED)
    if outcome == FAILED or now == FAILED:
        found.outcomes[name] = FAILED
    elif record["when"] == "call" and outcome == PASSED:
        found.outcomes[name] = PASSED
    elif outcome == SKIPPED and now == STARTED:
        found.outcomes[name] = SKIPPED


def _last_thread(words: str) -> str:
    """Return the first sentence and the main thread's stack, which comes last."""
    start = words.partition("\n")[0]
    stack = words[words.rindex("most recent call first") :].partition("\n")[2]
    return f"{start}\n{stack}"[:LONGEST]


def _write(record: dict[str, Any]) -> None:
    with Path(os.environ.get(FILE, os.devnull)).open("a") as file:
        file.write(json.dumps(record) + "\n")
