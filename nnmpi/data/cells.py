"""What a table's cell says: a number, a date, a missing value or a text; and a text's words."""

import re
import unicodedata
from datetime import datetime
from decimal import Decimal
from functools import cache
from math import inf, nan
from numbers import Real
from typing import Any, TypeAlias

import numpy as np

from nnmpi.data.dataset import MISSING

Cell: TypeAlias = Any
"""A cell: a text of a file; of a table in memory a text, or a number of any type."""

MARKS = ".,"
BOOLS = {"true": 1.0, "false": 0.0}
DAY_S = 86400.0
EPOCH = datetime(1970, 1, 1)
WHOLE = 2**53  # up to here, each whole number is a float
_SWAPPED = str.maketrans(".,", ",.")
_DATE = re.compile(
    r"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d+)?)?(?:Z|[+-]\d\d:?\d\d)?)?", re.ASCII
)
_NUMBER_WITH = {  # either mark, in a number that has it
    mark: re.compile(
        rf"\s*[+-]?(?:\d+{re.escape(mark)}\d*|{re.escape(mark)}\d+)(?:[eE][+-]?\d+)?\s*", re.ASCII
    )
    for mark in MARKS
}
# 1.000 and 1,000,000 may be whole numbers with a mark between thousands; 0.125 may not
_GROUPS = r"\s*[+-]?[1-9]\d{0,2}"
_THOUSANDS = re.compile(rf"{_GROUPS}(?:(?:,\d{{3}})+|(?:\.\d{{3}})+)\s*", re.ASCII)
_BOTH = re.compile(rf"{_GROUPS}(?:(?:,\d{{3}})+\.\d*|(?:\.\d{{3}})+,\d*)\s*", re.ASCII)
# Chinese, Japanese, Thai, Lao, Burmese and Khmer, which have no spaces between words
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)


def is_number(cell: Cell) -> bool:
    """Return whether a cell of a table in memory is a number, not its text."""
    # NumPy's durations are integers by their class, but have a unit
    return isinstance(cell, Real | Decimal | np.bool_) and not isinstance(cell, np.timedelta64)


def number(cell: Cell, mark: str = ".") -> float | None:
    """Return a cell's number, NaN if it is missing; None for a date and another text.

    Args:
        cell: of a file, or in memory.
        mark: the decimal mark of texts, "." or ",". Nothing stands between thousands.
    """
    if not isinstance(cell, str):
        try:
            return float(cell)
        except OverflowError:  # a whole number beyond all floats
            return inf
    word = cell.translate(_SWAPPED) if mark == "," else cell
    # Python also reads 1_000 and Arabic digits, which no other program writes for a number.
    if word.isascii() and "_" not in word:
        try:
            return float(word)
        except ValueError:
            pass
    plain = cell.strip().lower()
    return nan if plain in MISSING else BOOLS.get(plain)


def spelled(cell: Cell, mark: str = ".") -> str:
    """Return a cell as text: as it is written in a file; a number's shortest spelling."""
    if isinstance(cell, str):
        return cell
    if isinstance(cell, float | np.floating) and float(cell) % 1 == 0 and abs(float(cell)) < WHOLE:
        return f"{cell:.0f}"  # pandas makes floats of whole numbers if one is missing
    return str(cell).replace(".", mark)


def is_missing(text: str) -> bool:
    """Return whether a text stands for a missing value."""
    return text.strip().lower() in MISSING


def mark_of(text: str) -> str:
    """Return the decimal mark that a number shows: "." or ","; empty for a text without one.

    It is "?" if the mark may separate thousands, and ".," if one mark does and the other is the
    decimal mark.
    """
    if _THOUSANDS.fullmatch(text):
        return "?"
    if _BOTH.fullmatch(text):
        return MARKS
    return next((mark for mark, form in _NUMBER_WITH.items() if form.fullmatch(text)), "")


def days(text: str) -> float | None:
    """Return an ISO date, with a time or without, in days since 1970; None for another text."""
    text = text.strip()
    if not _DATE.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    zone = moment.utcoffset()
    seconds = (moment.replace(tzinfo=None) - EPOCH).total_seconds()
    return (seconds - (zone.total_seconds() if zone else 0.0)) / DAY_S


def class_key(label: str) -> str:
    """Return what a label is compared by: True, TRUE and 1 are one class."""
    value = BOOLS.get(label.lower())
    return label if value is None else f"{value:.0f}"


def split_words(text: str) -> set[str]:
    """Return the different words of a text, in lower case.

    Of scripts without spaces between words: the pairs of neighbouring characters.
    """
    found = set[str]()
    for run, word in _words().findall(text.lower()):
        found |= {word} if word else {run[i : i + 2] for i in range(max(len(run) - 1, 1))}
    return found


@cache
def _words() -> re.Pattern[str]:
    # \w lacks the signs that are vowels in India's scripts and in Thai
    signs = "".join(c for c in map(chr, range(0x300, 0x1E00)) if unicodedata.category(c)[0] == "M")
    return re.compile(rf"((?:[{_UNSPACED}])+)|((?:(?![{_UNSPACED}])[\w{signs}])+)")
