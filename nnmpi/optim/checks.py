"""Checks of the numbers a person chooses: each returns the value, or raises a sentence that says what would work."""

import math
from reprlib import repr as shortened
from typing import Any

from nnmpi.errors import UsageError


def non_negative(name: str, value: float) -> float:
    """Return the value as a float that is finite and at least 0.

    Raises:
        UsageError: for a negative or infinite value, NaN, or what is no number.
    """
    number = _number(name, value, "a finite number of at least 0")
    if not 0 <= number < math.inf:  # false for NaN too
        raise UsageError(f"{name} is {number}; give a finite number of at least 0")
    return number


def below_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1): what a decaying average may keep of its past.

    Raises:
        UsageError: for a value outside [0, 1), NaN, or what is no number.
    """
    number = _number(name, value, "a number of at least 0 and below 1")
    if not 0 <= number < 1:
        raise UsageError(f"{name} is {number}; give a number of at least 0 and below 1")
    return number


def at_most_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1].

    Raises:
        UsageError: for a value outside [0, 1], NaN, or what is no number.
    """
    number = _number(name, value, "a number from 0 to 1")
    if not 0 <= number <= 1:
        raise UsageError(f"{name} is {number}; give a number from 0 to 1")
    return number


def at_least(name: str, value: int, least: int) -> int:
    """Return the value if it is not below `least`; an error calls it `name`.

    Raises:
        UsageError: for a smaller value, or what is no number.
    """
    try:
        too_small = value < least
    except TypeError:
        raise _no_number(name, value, f"at least {least}") from None
    if too_small:
        raise UsageError(f"{name} is {value}; give at least {least}")
    return value


def _number(name: str, value: Any, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise _no_number(name, value, wanted) from None


def _no_number(name: str, value: Any, wanted: str) -> UsageError:
    """Return the error for a value that no number can be made of."""
    return UsageError(f"{name} is {shortened(value)}; give {wanted}")
