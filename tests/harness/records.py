"""What each rank leaves behind in the run's folder, written by the plugin and read by the runner.

RANK.log    one JSON object a line: a test has started, or has ended with an outcome
RANK.err    what the rank says of a failure or a hang
RANK.ok     the rank's session came to its end
done        tests that a run after an abort leaves out, one a line
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STARTED, PASSED, FAILED, SKIPPED = "started", "passed", "failed", "skipped"


class Writer:
    """One rank's records."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.errors = folder / f"{rank}.err"
        self._log = folder / f"{rank}.log"
        self._ok = folder / f"{rank}.ok"

    def write(self, test: str, outcome: str, reason: str = "") -> None:
        """Add a line; it is on disk when this returns, should the rank be killed then."""
        with self._log.open("a") as file:
            file.write(json.dumps({"test": test, "outcome": outcome, "reason": reason}) + "\n")

    def finish(self) -> None:
        """Leave the proof that the session came to its end."""
        self._ok.touch()


@dataclass(frozen=True)
class Records:
    """What all ranks of one run left.

    Attributes:
        outcomes: tests that are over: passed or skipped on all ranks, or failed on any.
        culprit: the test that the run did not survive; None if it did, or if no test had begun.
        reasons: why tests were skipped, by test.
        complete: whether every rank came to its end.
        words: what the ranks said, those that said the same together.
    """

    outcomes: dict[str, str]
    culprit: str | None
    reasons: dict[str, str]
    complete: bool
    words: str


def read(folder: Path, ranks: int) -> Records:
    """Return what `ranks` ranks left in the folder."""
    logs = [_lines(folder / f"{rank}.log") for rank in range(ranks)]
    ended = [{line["test"]: line for line in log if line["outcome"] != STARTED} for log in logs]
    names = dict.fromkeys(line["test"] for log in logs for line in log)  # in the order in which they were begun
    outcomes = {}
    for name in names:
        found = [log[name]["outcome"] for log in ended if name in log]
        if FAILED in found:
            outcomes[name] = FAILED
        elif len(found) == ranks:
            outcomes[name] = PASSED if PASSED in found else SKIPPED
    complete = all((folder / f"{rank}.ok").exists() for rank in range(ranks))
    culprit = None if complete else next((name for name in names if outcomes.get(name, FAILED) == FAILED), None)
    reasons = {name: log[name]["reason"] for log in ended for name in log if log[name]["outcome"] == SKIPPED}
    return Records(outcomes, culprit, reasons, complete, _words(folder, ranks))


def write_done(folder: Path, tests: Iterable[str]) -> None:
    """Tell the next run which tests to leave out."""
    (folder / "done").write_text("".join(f"{test}\n" for test in tests))


def read_done(folder: Path) -> set[str]:
    """Return the tests to leave out."""
    path = folder / "done"
    return set(path.read_text().splitlines()) if path.exists() else set()


def _lines(path: Path) -> list[dict[str, Any]]:
    """Return the log's records; a last line that was cut off is left out."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def _words(folder: Path, ranks: int) -> str:
    """Return what the ranks said, each text once, under the numbers of the ranks that said it.

    Texts that differ in no more than the rank they name are the same.
    """
    said: dict[str, tuple[str, list[str]]] = {}
    for rank in range(ranks):
        path = folder / f"{rank}.err"
        text = path.read_text(errors="replace").strip() if path.exists() else ""
        if text:
            said.setdefault(re.sub(r"rank \d+ of", "rank", text), (text, []))[1].append(str(rank))
    return "\n".join(f"---- rank {', '.join(who)} of {ranks} ----\n{text}" for text, who in said.values())
