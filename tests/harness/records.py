"""What each rank leaves behind in the run's folder, written by the plugin and read by the runner.

RANK.log    one JSON object a line: a test has started, or has ended with an outcome
RANK.err    what the rank says of a failure or a hang
RANK.ok     the rank's session came to its end
plan        the tests that a run after an abort leaves out, and those to run, null for all

Serial runs that share the tests have one more folder, with a file for each test file, named by who
claims it.
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

STARTED, PASSED, FAILED, SKIPPED, LEFT_OUT = "started", "passed", "failed", "skipped", "left out"

# Variables by which the runner speaks to the plugin on every rank.
RUN_FOLDER = "NNMPI_TEST_RUN"
LIMIT = "NNMPI_TEST_LIMIT_S"
# a folder for all that share the tests, a colon, the run's name: the same after an abort
CLAIMS = "NNMPI_TEST_CLAIMS"
DEFAULT_LIMIT_S = 60.0


class Writer:
    """One rank's records."""

    def __init__(self, folder, rank):
        self.errors = folder / f"{rank}.err"
        self._log = folder / f"{rank}.log"
        self._ok = folder / f"{rank}.ok"

    def write(self, test, outcome, reason="", cpu_s=0.0):
        """Add a line; it is on disk when this returns, should the rank be killed then."""
        line = {"test": test, "outcome": outcome, "reason": reason, "cpu_s": cpu_s}
        with self._log.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def finish(self):
        """Leave the proof that the session came to its end."""
        self._ok.touch()


@dataclass(frozen=True)
class Records:
    """What all ranks of one run left.

    Attributes:
        outcomes: tests that are over: passed, skipped or left out on all ranks, or failed on any.
        culprit: the test that the run did not survive; None if it did, or if no test had begun.
        reasons: why tests were skipped or left out, and what others failed with, by test.
        complete: whether every rank came to its end.
        words: what the ranks said, those that said the same together.
        cpu_s: processor seconds by test, of all ranks and of what they started.
    """

    outcomes: dict[str, str]
    culprit: str | None
    reasons: dict[str, str]
    complete: bool
    words: str
    cpu_s: dict[str, float]


def read(folder, ranks):
    """Return what `ranks` ranks left in the folder."""
    logs = [_lines(folder / f"{rank}.log") for rank in range(ranks)]
    ended = [{line["test"]: line for line in log if line["outcome"] != STARTED} for log in logs]
    # in the order in which they were begun
    names = dict.fromkeys(line["test"] for log in logs for line in log)
    outcomes = {}
    for name in names:
        result = [log[name]["outcome"] for log in ended if name in log]
        if FAILED in result:
            outcomes[name] = FAILED
        elif len(result) == ranks:
            outcomes[name] = PASSED if PASSED in result else result[0]
    complete = all((folder / f"{rank}.ok").exists() for rank in range(ranks))
    culprit = (
        None
        if complete
        else next((name for name in names if outcomes.get(name, FAILED) == FAILED), None)
    )
    reasons = {name: log[name]["reason"] for log in ended for name in log if log[name]["reason"]}
    cpu_s = {name: sum(log[name]["cpu_s"] for log in ended if name in log) for name in outcomes}
    return Records(outcomes, culprit, reasons, complete, _words(folder, ranks), cpu_s)


def write_plan(folder, done, only):
    """Tell the next run which tests to leave out, and, if not None, which ones alone to run."""
    (folder / "plan").write_text(json.dumps([list(done), only and list(only)]))


def read_plan(folder):
    """Return a function that says whether a test is to be run."""
    done, only = (tests and set(tests) for tests in json.loads((folder / "plan").read_text()))
    return lambda test: test not in done and (only is None or test in only)


def count_ended(folder):
    """Return how many tests ended so far on the first rank, by outcome."""
    return Counter(
        line["outcome"] for line in _lines(folder / "0.log") if line["outcome"] != STARTED
    )


def claim(claims, file):
    """Return whether a test file is this run's from now on, or has been before; see `CLAIMS`."""
    folder, _, name = claims.rpartition(":")
    path = Path(folder, re.sub(r"\W", "-", file))
    try:
        with path.open("x") as new:
            new.write(name)
    except FileExistsError:
        return path.read_text() == name
    return True


def _lines(path):
    """Return the log's records; a last line that was cut off is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _words(folder, ranks):
    """Return what the ranks said, each text once, under the numbers of the ranks that said it.

    Texts that differ in no more than the rank they name are the same.
    """
    message = {}
    for rank in range(ranks):
        path = folder / f"{rank}.err"
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        if text:
            message.setdefault(re.sub(r"rank \d+ of", "rank", text), (text, []))[1].append(
                str(rank)
            )
    return "\n".join(
        f"---- rank {', '.join(who)} of {ranks} ----\n{text}" for text, who in message.values()
    )
