"""All exercises, by kind and by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from nnmpi.command import suggest
from nnmpi.errors import UsageError
from nnmpi.exercise import collectives, costs, operators, plans, schedules, sharding, staleness
from nnmpi.exercise.exercise import Exercise

KINDS: Mapping[str, tuple[Exercise, ...]] = MappingProxyType(
    {
        "collectives": collectives.EXERCISES,
        "what they cost": costs.EXERCISES,
        "pipeline schedules": schedules.EXERCISES,
        "gradients of operations": operators.EXERCISES,
        "what ranks share out": sharding.EXERCISES,
        "who may go on": staleness.EXERCISES,
        "memory plans": plans.EXERCISES,
    }
)

EXERCISES: Mapping[str, Exercise] = MappingProxyType({each.name: each for kind in KINDS.values() for each in kind})


def find_exercise(name: str) -> Exercise:
    """Return the exercise of this name.

    Raises:
        UsageError: for a name that there is not, with the nearest ones.
    """
    if name not in EXERCISES:
        near = suggest(name.replace("-", "_"), [each.replace("-", "_") for each in EXERCISES])
        raise UsageError(f"there is no exercise {name!r}{near}; python -m nnmpi.exercise lists them")
    return EXERCISES[name]
