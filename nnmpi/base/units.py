"""Bytes as text: "64k", "1MiB", "1.5 MiB", in powers of 1024; times; tables.

`Bytes`, `Every` and `Seconds` are types of options: made of a text, with a ValueError for a wrong
one.
"""

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, TypeAlias

from nnmpi.base.errors import UsageError

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_DIGITS = 20  # of a number of bytes, at most; no machine has more memory
_WORD = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as "4", "64k", "1MB", "1.5 GiB"; k, KB, KiB are 1024.

    A fraction of a byte is dropped: "13.3MiB" is 13946060 bytes.

    Raises:
        UsageError: for other text, and for a fraction without a unit.
    """
    result = _WORD.fullmatch(text.strip())
    if result is None or ("." in result[1] and not result[2] and float(result[1]) % 1):
        raise UsageError(
            f"{text!r} is not a number of bytes; write it like 4, 64k, 1MiB or 1.5GiB (k is 1024)"
        )
    if len(result[1]) > _DIGITS:
        raise UsageError(
            f"{text[:_DIGITS]}... has too many digits; give a number of bytes such as 512MiB"
        )
    return int(Decimal(result[1]) * _UNITS[result[2].upper()])


if TYPE_CHECKING:
    Bytes: TypeAlias = int  # which Python code may give
else:

    class Bytes(int):
        """A number of bytes, made of a text for `parse_bytes`."""

        def __new__(cls, text: str) -> "Bytes":
            """Parse the text."""
            return super().__new__(cls, parse_bytes(text))


class Every(str):
    """An interval: 100steps, 2epochs, or a number of epochs; 0 for never.

    Attributes:
        steps, epochs: the interval in one of the units; 0 in the other.
    """

    steps: int
    epochs: int

    def __new__(cls, text: str) -> "Every":
        """Parse the text."""
        result = re.fullmatch(r"(\d{1,9}) ?(?:(steps?)|epochs?)?", text, re.ASCII)
        if result is None:
            raise ValueError(text)
        self = super().__new__(cls, text)
        self.steps, self.epochs = (int(result[1]), 0) if result[2] else (0, int(result[1]))
        return self


class Seconds(float):
    """A time, made of a text such as 3h, 90m, 1h30m, 45s, or of seconds."""

    def __new__(cls, text: object) -> "Seconds":
        """Parse the text."""
        hours, minutes, seconds = r"(?:(\d+)h)?", r"(?:(\d+)m)?", r"(?:(\d+(?:\.\d+)?)s?)?"
        result = re.fullmatch(f"(?=.){hours}{minutes}{seconds}", str(text), re.ASCII)
        if result is None:
            raise ValueError(text)
        given = [float(part or 0) for part in result.groups()]
        return super().__new__(cls, 3600 * given[0] + 60 * given[1] + given[2])


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: columns as wide as their longest cell, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def format_bytes(nbytes: int) -> str:
    """Return bytes as text in the largest unit with a number of at least 1, for `parse_bytes`.

    format_bytes(65536) -> "64 KiB"   format_bytes(1000) -> "1000 B"
    """
    *_, (unit, size) = (pair for pair in _UNITS.items() if pair[1] <= max(nbytes, 1))
    return f"{nbytes / size:.4g} {f'{unit}i' if unit else ''}B"


def parse_settings(text: str) -> dict[str, float]:
    """Return the numbers of a text such as "alpha_us=50, gbit=10", by name; {} if malformed."""
    pairs = [entry.partition("=")[::2] for entry in text.split(",")]
    try:
        values = {name.strip(): float(number) for name, number in pairs}
    except ValueError:
        return {}
    return values if len(values) == len(pairs) else {}  # a repeated name is malformed


def format_seconds(seconds: float, digits: int = 4) -> str:
    """Return a time in s, ms or us, whichever suits: format_seconds(2.5e-6) -> "2.5 us"."""
    seconds = float(f"{seconds:.{digits}g}")  # before the unit is chosen: 0.9996 s are no 1e+03 ms
    unit, factor = next(
        ((u, f) for u, f in (("s", 1.0), ("ms", 1e-3)) if seconds >= f), ("us", 1e-6)
    )
    return f"{float(f'{seconds / factor:.{digits}g}'):.15g} {unit}"


def format_duration(seconds: float) -> str:
    """Return a long time as text: 0.4 s, 12.3 s, 4 min 05 s, 2 h 03 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )
