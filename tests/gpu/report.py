"""The report of a run of the checks: the machine's facts, and for each check how it ended, why, and how long it was."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.recorder import Recorded
from tests.harness.records import FAILED, PASSED, SKIPPED
from tests.harness.suite import Result

Part = dict[str, Any]


class Report:
    """The parts that are over, and their file, which is whole whenever it is read.

    Args:
        facts: of the machine.
        file: where the report goes; None for nowhere.
    """

    def __init__(self, facts: Mapping[str, Any], file: Path | None) -> None:
        self.parts: list[Part] = []
        self.file = file
        self._facts = facts

    def add(self, part: Part) -> None:
        """Add a part that is over, and write the file."""
        self.parts.append(part)
        self._write(self.parts, passed(self.parts))

    def write_running(self, part: Part) -> None:
        """Write the file with what is known of the part that runs: all that is left if the command is killed now."""
        self._write([*self.parts, {**part, "unfinished": True}], False)

    def _write(self, parts: Sequence[Part], good: bool) -> None:
        if self.file is None:
            return
        report = {"facts": self._facts, "parts": parts, "passed": good}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(f"{self.file.name}.new")
        new.write_text(json.dumps(report, indent=1, default=str) + "\n")
        os.replace(new, self.file)


def part(result: Result, recorded: Recorded) -> Part:
    """Return a number of ranks' part of the report: how the checks ended, and what was noted of them."""
    checks = []
    for name, outcome in result.outcomes.items():
        seconds = round(recorded.seconds.get(name, 0.0), 4)
        check: dict[str, Any] = {"name": name, "outcome": outcome, "seconds": seconds}
        if outcome == SKIPPED:
            check["reason"] = result.reasons.get(name, "")
        if outcome == FAILED:
            check["reason"] = recorded.words.get(name, "it did not end")
        checks.append(check)
    counts = {outcome: result.count(outcome) for outcome in (PASSED, FAILED, SKIPPED)}
    return {"ranks": result.ranks, "seconds": round(result.seconds, 1), **counts, "checks": checks}


def not_run(ranks: int, reason: str) -> Part:
    """Return the part of a number of ranks on which nothing could be run."""
    return {"ranks": ranks, "seconds": 0.0, PASSED: 0, FAILED: 0, SKIPPED: 0, "checks": [], "not_run": reason}


def summary(parts: Sequence[Part]) -> str:
    """Return the totals in words, with the reasons why checks were left out and the names of those that failed."""
    lines = []
    for each in parts:
        name = "serial" if each["ranks"] == 0 else f"{each['ranks']} rank" + "s" * (each["ranks"] > 1)
        if "not_run" in each:
            lines.append(f"{name:>8}: not run: {each['not_run']}")
            continue
        counts = f"{each[PASSED]:5d} passed, {each[FAILED]} failed, {each[SKIPPED]} skipped"
        lines.append(f"{name:>8}: {counts}  ({each['seconds']:.1f} s)")
        if "stopped" in each:
            lines.append(f"{name:>8}: {each['stopped']}")
    checks = [check for each in parts for check in each["checks"]]
    reasons = [check["reason"] for check in checks if check["outcome"] == SKIPPED]
    lines += [f"skipped {reasons.count(reason)}: {reason}" for reason in sorted(set(reasons))]
    lines += [f"FAILED: {check['name']}" for check in checks if check["outcome"] == FAILED]
    return "\n".join(lines)


def passed(parts: Sequence[Part]) -> bool:
    """Return whether no check failed, and some passed."""
    return not any(each[FAILED] for each in parts) and any(each[PASSED] for each in parts)
