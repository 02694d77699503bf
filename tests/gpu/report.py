"""The report of a run of the checks: the machine's facts, and for each check how it ended, why, and how long it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.harness.records import FAILED, PASSED, SKIPPED
from tests.harness.suite import Result

Part = dict[str, Any]


def part(result: Result, seconds: Mapping[str, float], words: Mapping[str, str]) -> Part:
    """Return a number of ranks' part of the report.

    Args:
        seconds, words: of each check; see `recorder.read`.
    """
    checks = []
    for name, outcome in result.outcomes.items():
        check: dict[str, Any] = {"name": name, "outcome": outcome, "seconds": round(seconds.get(name, 0.0), 4)}
        if outcome == SKIPPED:
            check["reason"] = result.reasons.get(name, "")
        if outcome == FAILED:
            check["reason"] = words.get(name, "it did not end")
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
    checks = [check for each in parts for check in each["checks"]]
    reasons = [check["reason"] for check in checks if check["outcome"] == SKIPPED]
    lines += [f"skipped {reasons.count(reason)}: {reason}" for reason in sorted(set(reasons))]
    lines += [f"FAILED: {check['name']}" for check in checks if check["outcome"] == FAILED]
    return "\n".join(lines)


def passed(parts: Sequence[Part]) -> bool:
    """Return whether no check failed, and some passed."""
    return not any(each[FAILED] for each in parts) and any(each[PASSED] for each in parts)
