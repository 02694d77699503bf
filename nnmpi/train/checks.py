"""What values options may have: each check raises one sentence that names the option and the value."""

import math

from nnmpi.errors import UsageError

LONG = 1e9  # epochs or MiB beyond any use; keeps what is computed from them finite


def require(holds: bool, sentence: str) -> None:
    """Raise a UsageError with the sentence unless the condition holds."""
    if not holds:
        raise UsageError(sentence)


def positive(option: str, value: float, limit: float = math.inf) -> None:
    """Refuse what is not a number above 0 and below the limit."""
    bound = "a finite number above 0" if limit == math.inf else f"a number above 0 and below {limit:g}"
    require(0 < value < limit, f"{option} is {value}; give {bound}")


def not_negative(option: str, value: float, limit: float = math.inf) -> None:
    """Refuse what is not a number, 0 or above, below the limit."""
    bound = "0 or a finite number above it" if limit == math.inf else f"a number from 0 up to, not including, {limit:g}"
    require(0 <= value < limit, f"{option} is {value}; give {bound}")


def fraction(option: str, value: float) -> None:
    """Refuse what is not in [0, 1)."""
    require(0 <= value < 1, f"{option} is {value}; give a number from 0 up to, not including, 1")


def at_least_one(option: str, value: int) -> None:
    """Refuse counts below 1."""
    require(value >= 1, f"{option} is {value}; give a whole number, 1 or more")
