"""Checks of the numbers a person chooses: each returns the value, or raises a sentence that says what would work."""

import math

from nnmpi.errors import UsageError


def non_negative(name: str, value: float) -> float:
    """Return the value as a float that is finite and at least 0.

    Raises:
        UsageError: for a negative or infinite value, or NaN.
    """
    number = float(value)
    if not 0 <= number < math.inf:  # false for NaN too
        raise UsageError(f"{name} is {number}; give a finite number of at least 0")
    return number


def below_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1): what a decaying average may keep of its past.

    Raises:
        UsageError: for a value outside [0, 1), or NaN.
    """
    number = float(value)
    if not 0 <= number < 1:
        raise UsageError(f"{name} is {number}; give a number of at least 0 and below 1")
    return number


def at_most_one(name: str, value: float) -> float:
    """Return the value as a float in [0, 1].

    Raises:
        UsageError: for a value outside [0, 1], or NaN.
    """
    number = float(value)
    if not 0 <= number <= 1:
        raise UsageError(f"{name} is {number}; give a number from 0 to 1")
    return number


def at_least(name: str, value: int, least: int) -> int:
    """Return the value if it is not below `least`.

    Raises:
        UsageError: for a smaller value.
    """
    if value < least:
        raise UsageError(f"{name} is {value}; give at least {least}")
    return value
