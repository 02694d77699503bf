"""What a table's cell says: a number, an amount with its unit, a date, a list, words.

A file has one decimal mark. `1.200,5` shows that it is a comma, `0.5` that it is a point; `1.000`
is one or a thousand, and says nothing.
"""

import re
import unicodedata
from datetime import datetime
from functools import cache
from math import nan

from nnmpi.data.dataset import MISSING

MARKS = ".,"
BOOLS = {"true": 1.0, "false": 0.0}
_GAPS = "'’\xa0\u202f"  # between thousands, beside the other mark; of an amount a plain space, too
# with points between thousands, or with an exponent
_NUMBER = {
    mark: re.compile(
        rf"(?=[+-]?{re.escape(mark)}?\d)[+-]?"
        rf"(?:[1-9]\d{{0,2}}(?:[{other}{_GAPS}]\d{{3}})+(?:{re.escape(mark)}\d*)?"
        rf"|\d*(?:{re.escape(mark)}\d*)?(?:[eE][+-]?\d+)?)"
    )
    for mark, other in ((".", ","), (",", "."))
}
_MONEY = r"[$¢£¤¥฿₠-⃀]"
# behind a number without a space between; 5a, 2B and 2019Q1 are codes
_UNITS = (
    "% ‰ ° °C °F € £ $ ¥ ¢ ₹ EUR USD GBP CHF JPY km m cm mm µm mi ft in kg g mg t lb lbs oz l ml"
    " s ms h min d kW W V Hz kHz MHz GHz kB KB MB GB TB hp px"
)
UNITS = frozenset(_UNITS.split())
_AMOUNT = re.compile(
    rf"([+−–-]?)({_MONEY}\s?|[A-Z]{{3}}\s)?([+−–-]?[.,]?\d(?:[\d., {_GAPS}]*\d)?(?:[eE][+-]?\d+)?)"
    rf"((?:{'|'.join(map(re.escape, UNITS))}|{_MONEY}|\s[^\W\d_]\S*|\s[%‰°€$£¥¢₹]\S*)?)"
)
ISO = "ISO 8601"
_TIMES = "%H:%M", "%H:%M:%S", "%I:%M %p", "%I:%M:%S %p"
_DAYS = """\
%Y-%m-%d
%Y/%m/%d
%Y-%m
%Y/%m
%m/%d/%Y
%d/%m/%Y
%m/%d/%y
%d/%m/%y
%d.%m.%Y
%d.%m.%y
%d-%m-%Y
%m-%d-%Y
%b %d %Y
%b %d, %Y
%B %d, %Y
%d %b %Y
%d %B %Y
%b-%d-%Y
%d-%b-%Y
%d-%b-%y
%b %Y
%B %Y""".splitlines()
DATES = ISO, *_TIMES, *(f"{day} {time}".strip() for time in ("", *_TIMES) for day in _DAYS)
DAY_S = 86400.0
EPOCH, NO_DAY = datetime(1970, 1, 1), datetime(1900, 1, 1)  # a time alone is of this day
# Chinese, Japanese, Thai, Lao, Burmese and Khmer, which have no spaces between words
_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3005-\u3007\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)


def number(cell: str, mark: str = ".") -> float | None:
    """Return a cell's number, NaN if it is missing; None for a text.

    Args:
        cell: its text.
        mark: the decimal mark, "." or ",". The other one may stand between thousands.
    """
    try:
        if mark == ".":
            # Python reads 1_0 as 10; a table never means that
            return None if "_" in cell else float(cell)
    except ValueError:
        pass
    word = re.sub("[−–]", "-", cell.strip().lower())
    if _NUMBER[mark].fullmatch(word):
        return float(re.sub(rf"[^\d{mark}e+-]", "", word).replace(mark, "."))
    return nan if word in MISSING else BOOLS.get(word)


def amount(text: str, mark: str = ".") -> tuple[float, tuple[str, str]] | None:
    """Return a number, and the signs before and behind it; None for another text.

    "-$12.99" is (-12.99, ("$", "")), and "12 km" (12.0, ("", "km")). "1 234" is 1234 here, and for
    `number` a text, since it may be a list.
    """
    found = _AMOUNT.fullmatch(text.strip())
    if found is None:
        return None
    minus, before, digits, behind = ((part or "").strip() for part in found.groups())
    value = number(minus + digits.replace(" ", "'"), mark)
    return None if value is None else (value, (before, behind))


def is_text(cell: str) -> bool:
    """Return whether neither decimal mark reads a number, with a unit or without."""
    return not any(amount(cell, mark) for mark in MARKS)


def mark_of(cell: str) -> str:
    """Return the decimal mark that a number shows; "both" if it is two, "text" for no number.

    It is empty if both marks read the same. A unit is a listed one; "01.2024" is no number.
    """
    point, comma = (amount(cell, mark) for mark in MARKS)
    measured = point or comma
    if measured is None or measured[1][1] not in (*UNITS, "") or re.match(r"[+-]?0\d", cell):
        return "" if cell.isdecimal() or cell.strip().lower() in {*MISSING, *BOOLS} else "text"
    if point and comma:
        return "both" if point != comma else ""
    return MARKS[point is None]


def days(text: str, form: str) -> float | None:
    """Return a date of this format in days since 1970; None for another text."""
    if re.search(r":(?!\d\d)", text):  # 2:1 is a score
        return None
    try:
        moment = (
            datetime.fromisoformat(text.replace("/", "-"))
            if form == ISO
            else datetime.strptime(text, form)
        )
    except ValueError:
        return None
    zone, since = moment.utcoffset(), NO_DAY if form in _TIMES else EPOCH
    seconds = (moment.replace(tzinfo=None) - since).total_seconds()
    return (seconds - (zone.total_seconds() if zone else 0.0)) / DAY_S


def class_key(label: str) -> str:
    """Return what a label is compared by: True, TRUE and 1 are one class."""
    value = BOOLS.get(label.lower())
    return label if value is None else f"{value:.0f}"


def numbers_in(text: str) -> list[float]:
    """Return numbers separated by spaces; none for another text."""
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        return []


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
