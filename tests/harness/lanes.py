"""Running the serial tests and the MPI tests side by side, as many runs at once as there are cores.

The MPI tests go through one lane, the largest number of ranks first: two numbers of ranks at once would be more ranks
than any test is meant for. The other lanes run the serial tests, and so does the first one when it is through: each of
their files is run by whoever comes to it first.
"""

import queue
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

from tests.harness import records
from tests.harness.records import FAILED
from tests.harness.suite import Result, run_suite

PROGRESS_S = 20.0


def run_side_by_side(
    sizes: Sequence[int],
    lanes: int,
    arguments: Callable[[int], Sequence[str]],
    limit_s: float,
    test_limit_s: float,
    say: Callable[[str], None],
) -> list[Result]:
    """Run the tests on each number of ranks, several at once; what a run prints comes in one piece, at its end.

    Args:
        sizes: numbers of ranks, 0 for the serial tests.
        lanes: how many runs at once.
        arguments: gives more for pytest, for a number of ranks.
        limit_s: for each of the runs.
        test_limit_s: for one test under MPI.
        say: called with what there is to print, by this thread alone.

    Returns:
        What each number of ranks gave, in the order of `sizes`.
    """
    with tempfile.TemporaryDirectory(prefix="nnmpi-claims-") as claims:
        work = _Work(sizes, lanes, Path(claims))
        begin = spoken = time.monotonic()
        with ThreadPoolExecutor(lanes) as pool:  # waits for its threads, also where this one is interrupted
            running = [pool.submit(work.run_lane, arguments, limit_s, test_limit_s) for _ in range(lanes)]
            try:
                # Not Thread.join with a time limit: once a signal breaks that off, Python 3.11 forgets the thread.
                while wait(running, timeout=0.1).not_done:
                    work.print_ended(say)
                    if time.monotonic() - spoken > PROGRESS_S:
                        spoken = time.monotonic()
                        say(f"{spoken - begin:6.0f} s   {work.progress()}\n")
            finally:
                work.stop()
        work.print_ended(say)
        return [merged(size, [each for each in work.results if each.ranks == size]) for size in sizes]


def merged(ranks: int, results: Sequence[Result]) -> Result:
    """Return what several runs on one number of ranks gave together; its time is that of the longest."""
    total = Result(ranks, seconds=max((result.seconds for result in results), default=0.0))
    for result in results:
        total.outcomes |= result.outcomes
        total.reasons |= result.reasons
    return total


class _Work:
    """The runs that are to come, those that are under way, and those that ended."""

    def __init__(self, sizes: Sequence[int], lanes: int, claims: Path) -> None:
        self.results: list[Result] = []
        self._claims = claims
        self._lock = threading.Lock()
        self._ended: queue.SimpleQueue[tuple[Result, str]] = queue.SimpleQueue()
        self._under_way: list[Result] = []
        self._serial_ended = self._stopped = False
        self._sizes = sorted((size for size in sizes if size), reverse=True)
        self._serial = lanes if 0 in sizes else 0  # so many runs of the serial tests may still begin

    def run_lane(self, arguments: Callable[[int], Sequence[str]], limit_s: float, test_limit_s: float) -> None:
        """Do one run after the other until there is none left."""
        while (result := self._begin()) is not None:
            printed: list[str] = []
            try:
                run_suite(result.ranks, arguments(result.ranks), limit_s, test_limit_s, printed.append, result)
            except Exception as error:  # this thread's; the others go on, and the table says it
                printed.append(f"the harness itself failed: {error!r}\n")
                result.outcomes[f"(the harness, on {result.name})"] = FAILED
            with self._lock:
                self._under_way.remove(result)
                self._serial_ended |= result.ranks == 0  # every file has been claimed then
            self._ended.put((result, "".join(printed)))

    def _begin(self) -> Result | None:
        with self._lock:
            if self._stopped:
                return None
            if self._sizes and not any(result.ranks for result in self._under_way):
                result = Result(self._sizes.pop(0))
            elif self._serial and not self._serial_ended:
                self._serial -= 1
                result = Result(0, claims=f"{self._claims}:{self._serial}")
            else:
                return None
            self.results.append(result)
            self._under_way.append(result)
            return result

    def stop(self) -> None:
        """End all runs."""
        with self._lock:
            self._stopped = True
            for result in self._under_way:
                result.stopped.set()

    def print_ended(self, say: Callable[[str], None]) -> None:
        """Print what the runs that have ended printed."""
        while not self._ended.empty():
            result, text = self._ended.get()
            say(f"\n==== {result.name} ({result.seconds:.0f} s) ====\n{text}\n")

    def progress(self) -> str:
        """Return how many tests have ended in each of the runs under way."""
        with self._lock:
            under_way = list(self._under_way)
        return "   ".join(f"{result.name}: {_ended(result)}" for result in under_way)


def _ended(result: Result) -> str:
    counts = records.count_ended(folder) if (folder := result.folder) is not None else {}
    failed = counts.get(FAILED, 0) + len(result.failures)
    over = sum(counts.values()) - counts.get(records.LEFT_OUT, 0) + len(result.outcomes)
    return f"{over} tests" + f", {failed} failed" * (failed > 0)
