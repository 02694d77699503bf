"""What was to be reached, and whether a measurement reached it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from benchmarks.pipeline.formulas import activation_bytes, parameter_bytes
from benchmarks.pipeline.order import is_in_order
from benchmarks.pipeline.subject import Subject

OFF, SPEED = 0.15, 1.5  # of measured from simulated time; against one rank
MEMORY_OFF = 0.10
POINTS = 0.002  # of accuracy, by which a layout may be behind the serial run: two standard errors for 10,000 images

Content: TypeAlias = Mapping[str, Any]


def missed_times(content: Content) -> list[str]:
    """Return in words what is too far from its simulation, or too slow; naive pipelines need not be fast."""
    found = []
    for row in content["rows"]:
        if "speed" not in row:
            continue
        what = f"{row['name']}, {row['microbatches']} microbatches"
        ratio = row["measured_over_simulated"]
        if abs(ratio - 1) > OFF:
            found.append(f"{what}: measured / simulated {ratio:.2f} is not within {OFF:.0%}")
        if row["name"] != "naive" and row["speed"] < SPEED:
            found.append(f"{what}: {row['speed']:.2f} times as fast as one rank, not {SPEED}")
    return found


def memory_ratios(content: Content) -> list[dict[str, Any]]:
    """Return the rows with what the formulas say, and measured over that."""
    subject = Subject(**content["settings"]["subject"])
    found = []
    for row in content["rows"]:
        parameters = parameter_bytes(subject, row["stage"], row["pp"])
        activations = activation_bytes(subject, row["stage"], row["pp"], row["schedule"], row["recompute"])
        ratios = {
            "parameter_formula": parameters,
            "activation_formula": activations,
            "parameter_ratio": row["parameter_bytes"] / parameters,
            "activation_ratio": row["activation_bytes"] / activations,
        }
        found.append({**row, **ratios})
    return found


def missed_memory(content: Content) -> list[str]:
    """Return in words what is too far from its formula."""
    found = []
    for row in memory_ratios(content):
        for what in ("parameter", "activation"):
            if abs(row[f"{what}_ratio"] - 1) > MEMORY_OFF:
                case = f"pp {row['pp']}, {row['schedule']}, recompute {row['recompute']}, stage {row['stage']}"
                found.append(f"{case}: {what}s measured / formula {row[f'{what}_ratio']:.2f}")
    return found


def missed_order(content: Content) -> list[str]:
    """Return in words when the schedules are not in the order that they should be in."""
    rows: Sequence[dict[str, Any]] = content["rows"]
    return [] if is_in_order(rows) else ["the schedules' bubbles are in another order"]


def missed_limit(content: Content) -> list[str]:
    """Return in words which layout did not end as it should."""
    found = []
    for row in content["rows"]:
        ways = row["layout"].split("dp ")[1].startswith("1 ")
        if (row["outcome"] == "trained") != ways:
            found.append(f"{row['layout']}: {row['outcome']} {row['words']}".strip())
    return found


def missed_accuracy(content: Content) -> list[str]:
    """Return in words which layout learnt less than the serial run."""
    serial, *others = content["rows"]
    return [
        f"{row['layout']}: {row['accuracy']:.2%}, the serial run {serial['accuracy']:.2%}"
        for row in others
        if row["accuracy"] < serial["accuracy"] - POINTS
    ]


MISSED: Mapping[str, Callable[[Content], list[str]]] = MappingProxyType(
    {
        "times": missed_times,
        "memory": missed_memory,
        "order": missed_order,
        "limit": missed_limit,
        "accuracy": missed_accuracy,
    }
)
