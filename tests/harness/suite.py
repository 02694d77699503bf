"""Running the test suite on a number of ranks, to its last test, whatever fails on the way; and on
several at once.

The MPI tests go through one lane then, the largest number of ranks first: two numbers of ranks at
once would be more ranks than any test is meant for. The other lanes run the serial tests, and so
does the first one when it is through: each of their files is run by whoever comes to it first.
"""

import os
import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.harness import records
from tests.harness.job import mpirun, run
from tests.harness.records import CLAIMS, FAILED, LIMIT, PASSED, RUN_FOLDER

LOST_S = 10.0  # a rank that has said what failed and still runs after this time is stuck
END_S = 60.0  # from the first rank's end to the last one's
MAX_RUNS = 25
PROGRESS_S = 20.0
ROOT = Path(__file__).parents[2]

# The runner has limits of its own, prints failures itself, and ranks must not share a cache.
UNDER_MPI = ["--with-mpi", "-m", "mpi", "-q", "--no-summary", "-p", "no:cacheprovider"]
UNDER_MPI += ["-o", "faulthandler_timeout=0", "-o", "timeout=0"]


@dataclass
class Suite:
    """The tests on one number of ranks, and what became of them.

    Attributes:
        ranks: how many; 0 for the serial tests.
        arguments: more for pytest: paths, -k ...
        limit_s: for all of it together.
        test_limit_s: for one test under MPI.
        say: called with what there is to print.
        claims: for serial runs that share the test files; see `records.CLAIMS`.
        stopped: set to end the run.
        outcomes: by test; a test that the run broke on without naming it is under its own words.
        reasons: why tests were skipped or left out, and what others failed with, by test.
        seconds: how long it took.
        cpu_s: processor seconds by test, of all ranks and of what they started.
        unsteady: tests that failed and passed when they were run again by themselves: what they
            failed with.
        folder: where the tests that run now are recorded.
    """

    ranks: int
    arguments: Sequence[str]
    limit_s: float
    test_limit_s: float
    say: Callable[[str], None]
    claims: str | None = None
    stopped: threading.Event = field(default_factory=threading.Event)
    outcomes: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    unsteady: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def name(self):
        """The number of ranks in words."""
        return "serial" if self.ranks == 0 else f"{self.ranks} rank" + "s" * (self.ranks > 1)

    @property
    def failures(self):
        """The tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == FAILED]

    def fresh(self, say, claims=None):
        """Return the same tests, of which none has run."""
        return replace(self, say=say, claims=claims, outcomes={}, reasons={}, cpu_s={}, unsteady={})

    def run(self, only=None):
        """Run the tests, all or those of some names, again after each abort without those that are
        done.
        """
        begin = time.monotonic()
        for _ in range(MAX_RUNS):
            left_s = self.limit_s - (time.monotonic() - begin)
            if left_s <= 0 or self.stopped.is_set() or not self._go_on(left_s, only):
                break
        else:
            self.say(
                f"{MAX_RUNS} runs ended in an abort; the tests after the last one were not run\n"
            )
        self.seconds = time.monotonic() - begin

    def run_again(self):
        """Run the tests that failed once more, nothing else before or beside them; note those that
        pass as unsteady.

        A test of processes, threads and times meets a moment now and then in which the machine does
        something else. Such a test is named in the table, to be made steady; one that fails twice
        has failed.
        """
        failed = [test for test in self.failures if "::" in test]
        self.say(f"\n==== {self.name}: what failed once more by itself ====\n")
        second = self.fresh(self.say)
        second.run(failed)
        for test in failed:
            if second.outcomes.get(test) == PASSED:
                self.outcomes[test] = PASSED
                self.unsteady[test] = self.reasons.pop(test, "")

    def progress(self):
        """Return how many tests have ended so far."""
        counts = Counter(self.outcomes.values()) + (
            records.count_ended(self.folder) if self.folder else Counter()
        )
        failed = f", {counts[FAILED]} failed" * (counts[FAILED] > 0)
        return f"{self.name}: {counts.total() - counts[records.LEFT_OUT]} tests{failed}"

    def _go_on(self, limit_s, only):
        """Run what is not done yet, and note it; return whether the run broke and there may be
        more.
        """
        with tempfile.TemporaryDirectory(prefix="nnmpi-test-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            records.write_plan(folder, self.outcomes, only)
            self.folder = folder
            ending = run(
                self._command(),
                folder / "output",
                limit_s,
                environ={
                    RUN_FOLDER: name,
                    LIMIT: f"{self.test_limit_s:g}",
                    CLAIMS: self.claims,
                    "PYTHONDONTWRITEBYTECODE": None,  # hundreds of processes load the same modules
                    "NNMPI_EXIT_LIMIT_S": f"{self.test_limit_s + END_S:g}",
                },
                on_output=self.say,
                is_lost=lambda: self.stopped.is_set() or _spoke_long_ago(folder),
                cwd=ROOT,
            )
            self.folder = None
            result = records.read(folder, max(1, self.ranks))
        self.outcomes |= result.outcomes
        self.reasons |= result.reasons
        self.cpu_s |= result.cpu_s
        if result.words:
            self.say(f"\n{result.words}\n")
        # A failure is known to the exit status (mpirun may hide it), to the records, or to the
        # proofs that are missing.
        if result.complete and (ending.status == 0 or self.failures):
            return False
        how = (
            f"was killed after {ending.seconds:.0f} s"
            if ending.status is None
            else f"ended with status {ending.status}"
        )
        how = f"The run on {self.name} {how}"
        self.say(f"\n{how}" + (f" in {result.culprit}\n" if result.culprit else "\n"))
        culprit = result.culprit or f"({how} outside of the tests)"
        self.outcomes[culprit] = FAILED
        self.reasons.setdefault(culprit, how)
        return result.culprit is not None

    def _command(self):
        """Return the command: pytest, under mpirun or not."""
        pytest = [sys.executable, "-m", "pytest", "-p", "tests.harness.plugin"]
        # Open MPI gives its ranks a terminal of their own, so pytest cannot see whether there is
        # one.
        color = "--color=" + (
            "yes" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else "no"
        )
        if self.ranks == 0:
            return [*pytest, "-m", "not mpi", "-q", "-rs", color, *self.arguments]
        return [*mpirun(self.ranks), *pytest, *UNDER_MPI, color, *self.arguments]


def _spoke_long_ago(folder):
    """Return whether a rank under MPI reported a failure `LOST_S` ago."""
    spoken = [path.stat() for path in folder.glob("*.err")]
    return any(result.st_size > 0 and time.time() - result.st_mtime > LOST_S for result in spoken)


def run_side_by_side(suites, lanes, say):
    """Run suites, so many at once; what each prints comes in one piece, at its end, by this thread
    alone.
    """
    ended = queue.SimpleQueue()
    stopped, all_claimed = threading.Event(), threading.Event()
    parts = []  # of each suite

    def run_lane(number, claims):
        for suite in sorted(suites, key=lambda item: -item.ranks):
            if stopped.is_set() or (all_claimed.is_set() if suite.ranks == 0 else number > 0):
                continue
            printed = []
            part = suite.fresh(printed.append, None if suite.ranks else f"{claims}:{number}")
            part.stopped = stopped
            parts.append((suite, part))
            try:
                part.run()
            except Exception as error:  # this thread's; the others go on, and the table says it
                printed.append(f"the harness itself failed: {error!r}\n")
                part.outcomes[f"(the harness, on {part.name})"] = FAILED
            if suite.ranks == 0:
                all_claimed.set()
            ended.put((part, "".join(printed)))

    def print_ended():
        while not ended.empty():
            part, text = ended.get()
            say(f"\n==== {part.name} ({part.seconds:.0f} s) ====\n{text}\n")

    begin = spoken = time.monotonic()
    # The pool waits for its threads, also where this one is interrupted.
    with (
        tempfile.TemporaryDirectory(prefix="nnmpi-claims-") as claims,
        ThreadPoolExecutor(lanes) as pool,
    ):
        running = [pool.submit(run_lane, number, claims) for number in range(lanes)]
        try:
            # Not Thread.join with a time limit: once a signal breaks that off, Python 3.11 forgets
            # the thread.
            while wait(running, timeout=0.1).not_done:
                print_ended()
                if time.monotonic() - spoken > PROGRESS_S:
                    spoken = time.monotonic()
                    under_way = [
                        part.progress() for _, part in list(parts) if part.folder is not None
                    ]
                    say(f"{spoken - begin:6.0f} s   {'   '.join(under_way)}\n")
        finally:
            stopped.set()
    print_ended()
    for suite, part in parts:
        suite.outcomes |= part.outcomes
        suite.reasons |= part.reasons
        suite.cpu_s |= part.cpu_s
        suite.seconds = max(suite.seconds, part.seconds)
