"""Running the test suite on one number of ranks, to its last test, whatever fails on the way."""

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.harness import records
from tests.harness.job import mpirun, run
from tests.harness.records import CLAIMS, LIMIT, RUN_FOLDER

LOST_S = 10.0  # a rank that has said what failed and still runs after this time is stuck
END_S = 60.0  # from the first rank's end to the last one's
MAX_RUNS = 25
ROOT = Path(__file__).parents[2]

# The runner has limits of its own, prints failures itself, and ranks must not share a cache.
UNDER_MPI = ["--with-mpi", "-m", "mpi", "-q", "--no-summary", "-p", "no:cacheprovider"]
UNDER_MPI += ["-o", "faulthandler_timeout=0", "-o", "timeout=0"]


@dataclass
class Result:
    """What one number of ranks gave; 0 ranks are the serial tests.

    Attributes:
        outcomes: by test; a test that the run broke on without naming it is under its own words.
        reasons: why tests were skipped or left out, and what others failed with, by test.
        seconds: how long it took.
        unsteady: tests that failed and passed when they were run again by themselves: what they failed with.
        claims: for serial runs that share the test files: the folder of claims, a colon, and this run's name.
        stopped: set to end the run.
        folder: where the tests that run now are recorded.
    """

    ranks: int
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    unsteady: dict[str, str] = field(default_factory=dict)
    claims: str | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    folder: Path | None = None

    @property
    def name(self) -> str:
        """The number of ranks in words."""
        return "serial" if self.ranks == 0 else f"{self.ranks} rank" + "s" * (self.ranks > 1)

    @property
    def failures(self) -> list[str]:
        """The tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == records.FAILED]

    def count(self, outcome: str) -> int:
        """Return how many tests ended so."""
        return Counter(self.outcomes.values())[outcome]


def run_suite(
    ranks: int,
    arguments: Sequence[str],
    limit_s: float,
    test_limit_s: float,
    say: Callable[[str], None],
    result: Result | None = None,
    only: Collection[str] | None = None,
) -> Result:
    """Run the serial tests (0 ranks) or the MPI tests, again after each abort without the tests that are done.

    Args:
        ranks: how many.
        arguments: more for pytest: paths, -k ...
        limit_s: for all of it together.
        test_limit_s: for one test under MPI.
        say: called with what there is to print.
        result: what to fill in, where somebody else watches it meanwhile.
        only: the tests to run, by name; None for all.
    """
    result = result or Result(ranks)
    begin = time.monotonic()
    for _ in range(MAX_RUNS):
        left_s = limit_s - (time.monotonic() - begin)
        if left_s <= 0 or result.stopped.is_set() or not _run_on(result, arguments, left_s, test_limit_s, say, only):
            break
    else:
        say(f"{MAX_RUNS} runs ended in an abort; the tests after the last one were not run\n")
    result.seconds = time.monotonic() - begin
    return result


def run_again(
    result: Result, arguments: Sequence[str], limit_s: float, test_limit_s: float, say: Callable[[str], None]
) -> None:
    """Run the tests that failed once more, nothing else before or beside them; note those that pass as unsteady.

    A test of processes, threads and times meets a moment now and then in which the machine does something else. Such
    a test is named in the table, to be made steady; one that fails twice has failed.
    """
    failed = [test for test in result.failures if "::" in test]
    say(f"\n==== {result.name}: {len(failed)} failed, again by {'itself' if len(failed) == 1 else 'themselves'} ====\n")
    second = run_suite(result.ranks, arguments, limit_s, test_limit_s, say, only=failed)
    for test in failed:
        if second.outcomes.get(test) == records.PASSED:
            result.outcomes[test] = records.PASSED
            result.unsteady[test] = result.reasons.pop(test, "")


def _run_on(
    result: Result,
    arguments: Sequence[str],
    limit_s: float,
    test_limit_s: float,
    say: Callable[[str], None],
    only: Collection[str] | None,
) -> bool:
    """Run what is not done yet and add it to the result; return whether the run broke and there may be more."""
    with tempfile.TemporaryDirectory(prefix="nnmpi-test-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        records.write_plan(folder, result.outcomes, only)
        result.folder = folder
        spoke_long_ago = _spoke_long_ago(folder)
        ending = run(
            _command(result.ranks, arguments),
            folder / "output",
            limit_s,
            environ={
                RUN_FOLDER: name,
                LIMIT: f"{test_limit_s:g}",
                CLAIMS: result.claims,
                "PYTHONDONTWRITEBYTECODE": None,  # hundreds of processes load the same modules
                "NNMPI_EXIT_LIMIT_S": f"{test_limit_s + END_S:g}",
            },
            on_output=say,
            is_lost=lambda: spoke_long_ago() or result.stopped.is_set(),
            cwd=ROOT,
        )
        result.folder = None
        found = records.read(folder, max(1, result.ranks))
    result.outcomes |= found.outcomes
    result.reasons |= found.reasons
    if found.words:
        say(f"\n{found.words}\n")
    # A failure is known to the exit status (mpirun may hide it), to the records, or to the proofs that are missing.
    broke = not found.complete or (ending.status != 0 and not result.failures)
    if not broke:
        return False
    how = f"was killed after {ending.seconds:.0f} s" if ending.status is None else f"ended with status {ending.status}"
    say(f"\nThe run on {result.name} {how}" + (f" in {found.culprit}\n" if found.culprit else "\n"))
    culprit = found.culprit or f"(the run on {result.name} {how} outside of the tests)"
    result.outcomes[culprit] = records.FAILED
    result.reasons.setdefault(culprit, how)
    return found.culprit is not None


def _command(ranks: int, arguments: Sequence[str]) -> list[str]:
    """Return the command: pytest, under mpirun or not."""
    pytest = [sys.executable, "-m", "pytest", "-p", "tests.harness.plugin"]
    # Open MPI gives its ranks a terminal of their own, so pytest cannot see whether there is one.
    color = "--color=" + ("yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no")
    if ranks == 0:
        return [*pytest, "-m", "not mpi", "-q", "-rs", color, *arguments]
    return [*mpirun(ranks), *pytest, *UNDER_MPI, color, *arguments]


def _spoke_long_ago(folder: Path) -> Callable[[], bool]:
    """Return a function that says whether a rank under MPI reported a failure `LOST_S` ago."""

    def is_lost() -> bool:
        spoken = [path.stat() for path in folder.glob("*.err")]
        return any(found.st_size > 0 and time.time() - found.st_mtime > LOST_S for found in spoken)

    return is_lost
