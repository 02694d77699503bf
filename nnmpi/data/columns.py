"""A table's columns as features, by rules that the training table gives and the model keeps.

    age  sex  seen        review             age  sex=f  sex=m  seen   review~bad  review~good
    31   f    2024-03-01  good, very good    31   1      0      19783  0           1
         m    2024-03-02  bad                31   0      1      19784  1           0

A column is one of these:

    number   as it is; true and false are 1 and 0; a missing one becomes the column's median
    date     2024-03-01, with a time or without, 3/1/2024 or Mar 1 2024: days since 1970; a missing
             one becomes the median
    list     numbers in one cell, such as pixels, "0 12 255": a feature for each
    text     a feature for each text of the training table, 1 for the cell's own; a missing text, or
             one that training has not seen, has zeros
    words    of a column of documents: a feature for each of its commonest words, 1 if it occurs
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DataError, counted, shortened
from nnmpi.data.dataset import no_number

ColumnKind: TypeAlias = Literal["number", "date", "list", "text", "words"]

MOST_LOST = 0.01  # largest rounding error of float32 allowed, in standard deviations of the column
# A column of texts has at most so many different ones, or a share of its rows, and never more than
# MOST_FEATURES: names of persons and free text are nearly all different.
SURE_TEXTS, TEXTS_SHARE, MOST_FEATURES = 10, 0.25, 1000
SURE_INDEX = 10  # rows from which on 1, 2, 3 ... is an index and no feature
LARGE_INDEX = 3000  # and so is 5001, 5002, 5003 ..., while 1960, 1961, 1962 ... are years
INDEX_NAMES = ("column 1", "unnamed: 0", "rownames", "row.names", "index")
FEWEST_ROWS = 2  # with a word, for it to be a feature
SENTENCE = 3  # words of a text from which on it may be a document
DAY_S = 86400.0
ISO = "ISO 8601"
_DAYS = ("%m/%d/%Y", "%d/%m/%Y", "%m/%d/%y", "%d.%m.%Y", "%b %d %Y", "%b-%d-%Y", "%d-%b-%Y")
DATES = (ISO, *(f"{day}{time}" for time in ("", " %H:%M", " %H:%M:%S") for day in _DAYS))
EPOCH = datetime(1970, 1, 1)


@dataclass(frozen=True)
class Column:
    """The rule of one column.

    Attributes:
        name: in the header, or the column's number from 1.
        place: in the training table, from 0.
        of: the number of columns of the training table.
        kind: see the module.
        fill: what a missing number becomes; None to refuse it.
        offset: subtracted from numbers whose differences float32 would lose.
        values: the texts or the words; the format of dates.
        size: the length of a list.
    """

    name: str
    place: int
    of: int
    kind: ColumnKind = "number"
    fill: float | None = None
    offset: float = 0.0
    values: tuple[str, ...] = ()
    size: int = 1

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features."""
        if self.kind == "list":
            return tuple(f"{self.name} {number}" for number in range(1, self.size + 1))
        if self.kind in ("text", "words"):
            sign = "=" if self.kind == "text" else "~"
            return tuple(f"{self.name}{sign}{value}" for value in self.values)
        return (self.name,)


Encoding: TypeAlias = tuple[Column, ...]


@dataclass(frozen=True)
class Cells:
    """The cells of a table.

    Attributes:
        path: of the file, for messages.
        lines: the line number of each row, for messages.
        names: of the columns, or their numbers from 1.
        is_named: whether the table has a header.
        numbers: (rows, columns), float64; NaN for a missing cell and for a text.
        texts: of each column, by row: the cells that are no numbers.
        is_training: whether the table gives the rules, so that a column may be left out.
    """

    path: Path
    lines: Sequence[int]
    names: tuple[str, ...]
    is_named: bool
    numbers: NDArray[np.float64]
    texts: tuple[Mapping[int, str], ...]
    is_training: bool

    def wrong(self, row: int, place: int, what: str) -> DataError:
        """Return an error about a cell."""
        name = f" ({shortened(self.names[place])})" if self.is_named else ""
        remedy = f", or leave the column out: {self.dropping([place])}" if self.is_training else ""
        return DataError(
            f"{self.path}, line {self.lines[row]}, column {place + 1}{name}: {what}{remedy}"
        )

    def named(self, place: int) -> str:
        """Return a column as an argument: its name, or its number if the name has a comma."""
        name = self.names[place]
        return str(place + 1) if "," in name else name

    def dropping(self, places: Iterable[int]) -> str:
        """Return the argument that leaves columns out."""
        return f"drop={[self.named(place) for place in places]}"

    def words(self, place: int) -> list[str]:
        """Return the cells of a column as texts; a missing one is empty."""
        texts = [
            "" if np.isnan(value) else f"{value:.15g}" for value in self.numbers[:, place].tolist()
        ]
        for row, text in self.texts[place].items():
            texts[row] = text
        return texts


def fit(
    cells: Cells, places: Sequence[int], documents: Sequence[int], target: str
) -> tuple[Encoding, list[str]]:
    """Return the rules of these columns, and sentences about what was left out.

    Args:
        cells: of the training table.
        places: of the columns, from 0.
        documents: those that hold documents.
        target: the label's column, for advice.

    Raises:
        DataError: for a wrong cell, and for texts that are nearly all different.
    """
    notes, columns, different = list[str](), list[Column](), list[tuple[int, int]]()
    for place in places:
        if place == 0 and len(places) > 1 and _is_index(cells):
            notes.append(f"column {cells.names[0]!r} is an index and left out")
            continue
        column = _fit(cells, place, place in documents)
        if column is None:
            notes.append(f"column {cells.names[place]!r} is empty and left out")
        elif column.kind == "text" and len(column.values) > _most_texts(len(cells.lines)):
            different.append((len(column.values), place))
        else:
            columns.append(column)
    if different:
        _refuse_different(cells, different, target)
    if not columns:
        raise DataError(f"{cells.path}: no column is left to learn from; drop fewer of them")
    return tuple(columns), notes


def _most_texts(rows: int) -> int:
    return min(max(SURE_TEXTS, int(TEXTS_SHARE * rows)), MOST_FEATURES)


def _refuse_different(cells: Cells, different: Sequence[tuple[int, int]], target: str) -> None:
    count, first = max(different)
    places = [place for _, place in different]
    others = f", and {len(places) - 1} more columns are like it" if len(places) > 1 else ""
    longest = max(places, key=lambda place: len("".join(cells.texts[place].values())))
    typical = sorted(cells.texts[longest].values(), key=len)[len(cells.texts[longest]) // 2]
    words = (
        f", or learn from its words: text_columns={[cells.named(longest)]} target={target!r}"
        if len(typical.split()) >= SENTENCE
        else ""
    )
    them = "them" if len(places) > 1 else "it"
    raise DataError(
        f"{cells.path}: column {cells.names[first]!r} has {count} different texts in"
        f" {len(cells.lines)} rows{others}; leave {them} out: {cells.dropping(places)}{words}"
    )


def _is_index(cells: Cells) -> bool:
    """Return whether the first column only numbers or names the rows."""
    rows, texts, numbers = len(cells.lines), cells.texts[0], cells.numbers[:, 0]
    if cells.is_named and cells.names[0].lower() in INDEX_NAMES:
        return len({*cells.words(0)}) == rows
    counts = rows >= SURE_INDEX and not texts and not 1 < numbers[0] < LARGE_INDEX
    return bool(counts and (np.diff(numbers) == 1).all())


def _fit(cells: Cells, place: int, is_document: bool) -> Column | None:
    numbers, texts = cells.numbers[:, place], cells.texts[place]
    name, of = cells.names[place], len(cells.names)
    given = numbers[~np.isnan(numbers)]
    if is_document:
        found = Counter(word for text in cells.words(place) for word in split_words(text))
        most = [word for word, count in found.most_common(MOST_FEATURES) if count >= FEWEST_ROWS]
        return Column(name, place, of, "words", values=tuple(sorted(most)) or (" ",))
    if not len(given) and not texts:
        return None
    if len(given) and len(given) >= len(texts):
        return Column(name, place, of, "number", *_middle(_numbers(cells, place)))
    if not len(given) and (form := _date_format({*texts.values()})):
        middle, offset = _middle(_dates(cells, place, form))
        return Column(name, place, of, "date", middle, offset, (form,))
    sizes = {len(_list(text) or ()) for text in texts.values()}
    if not len(given) and len(sizes) == 1 and (size := sizes.pop()) > 1:
        return Column(name, place, of, "list", size=size)
    return Column(name, place, of, "text", values=tuple(sorted({*cells.words(place)} - {""})))


def _middle(values: NDArray[np.float64]) -> tuple[float, float]:
    """Return what a missing number becomes, and the offset that float32 needs, 0 for none."""
    given = values[~np.isnan(values)]
    middle = float(np.median(given))
    lost = np.abs(given.astype(np.float32) - given).max() > MOST_LOST * given.std()
    return middle, middle if lost and (given != given[0]).any() else 0.0


def encode(
    cells: Cells, encoding: Encoding, places: Sequence[int]
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the features of a table, (rows, features), and sentences about cells without a value.

    Args:
        cells: of the table.
        encoding: the rules.
        places: of the rules' columns in this table.

    Raises:
        DataError: for a cell that does not fit its column's rule.
    """
    filled, unseen = 0, list[str]()
    size = sum(len(column.features) for column in encoding)
    result, at = np.zeros((len(cells.lines), size), np.float32), 0
    for column, place in zip(encoding, places, strict=True):
        part = result[:, at : at + len(column.features)]
        at += len(column.features)
        if column.kind in ("text", "words"):
            unseen += _mark(cells, column, place, part)
        elif column.kind == "list":
            for row, text in enumerate(cells.words(place)):
                if len(values := _list(text) or ()) != column.size:
                    what = f"{shortened(repr(text))} is not a list of {column.size} numbers"
                    raise cells.wrong(row, place, what)
                part[row] = values
        else:
            is_date = column.kind == "date"
            numbers = _dates(cells, place, *column.values) if is_date else _numbers(cells, place)
            missing = np.isnan(numbers)
            if missing.any():
                if column.fill is None:
                    raise cells.wrong(int(missing.argmax()), place, no_number(""))
                filled += int(missing.sum())
                numbers[missing] = column.fill
            part[:, 0] = numbers - column.offset
    notes = []
    if filled:
        notes.append(f"{counted(filled, 'missing number')} replaced by the column's median")
    if unseen:
        notes.append(
            f"texts that training has not seen, as if missing: {shortened(', '.join(unseen))}"
        )
    return result, notes


def _mark(cells: Cells, column: Column, place: int, part: NDArray[np.float32]) -> list[str]:
    """Write the features of texts or words; return texts without a feature."""
    index = {value: number for number, value in enumerate(column.values)}
    unseen = dict[str, None]()
    for row, text in enumerate(cells.words(place)):
        if column.kind == "words":
            part[row, [index[word] for word in split_words(text) & index.keys()]] = 1
        elif text in index:
            part[row, index[text]] = 1
        elif text:
            unseen[f"{shortened(repr(text), 40)} in {column.name}"] = None
    return list(unseen)


def _numbers(cells: Cells, place: int) -> NDArray[np.float64]:
    """Return a column of numbers, NaN for missing ones."""
    result = cells.numbers[:, place].copy()
    for row, text in cells.texts[place].items():
        what = f"{shortened(repr(text))} is no number, as other cells of the column are"
        raise cells.wrong(row, place, f"{what}; mend it, or empty it if it is missing")
    with np.errstate(over="ignore"):
        infinite = np.isinf(result.astype(np.float32))
    for row in np.flatnonzero(infinite)[:1].tolist():
        raise cells.wrong(row, place, no_number(float(result[row])))
    return result


def _dates(cells: Cells, place: int, form: str) -> NDArray[np.float64]:
    """Return a column of dates in days, NaN for missing ones."""
    result = np.full(len(cells.lines), np.nan)
    for row, text in enumerate(cells.words(place)):
        days = _days(text, form) if text else np.nan
        if days is None:
            raise cells.wrong(row, place, f"{shortened(repr(text))} is no date as the others are")
        result[row] = days
    return result


def _date_format(texts: Collection[str]) -> str | None:
    """Return the one of DATES that all texts have; None if there is none, or month or day."""
    first = next(iter(texts))
    fits = [
        form
        for form in DATES
        if _days(first, form) is not None and all(_days(text, form) is not None for text in texts)
    ]
    return fits[0] if len(fits) == 1 else None


def _days(text: str, form: str) -> float | None:
    """Return a date of this format in days since 1970; None for another text."""
    try:
        moment = (
            datetime.fromisoformat(text.replace("/", "-"))
            if form == ISO
            else datetime.strptime(text, form)
        )
    except ValueError:
        return None
    zone = moment.utcoffset()
    seconds = (moment.replace(tzinfo=None) - EPOCH).total_seconds()
    return (seconds - (zone.total_seconds() if zone else 0.0)) / DAY_S


def _list(text: str) -> list[float] | None:
    """Return numbers separated by spaces; None for another text."""
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        return None


def split_words(text: str) -> set[str]:
    """Return the different words of a text, in lower case."""
    return {*re.findall(r"\w+", text.lower())}


def find_places(cells: Cells, encoding: Encoding) -> list[int]:
    """Return where the columns of the rules are in this table.

    By name, if both tables have headers. A table without one, or with other names, has the columns
    in the order of the training table, with or without those that no rule has.

    Raises:
        DataError: for a column that is missing.
    """
    names = [column.name for column in encoding]
    if cells.is_named and {*names} & {*cells.names}:
        for name in names:
            if name not in cells.names:
                raise DataError(
                    f"{cells.path} has no column {name!r}; the model needs"
                    f" {shortened(', '.join(names))}"
                )
        return [cells.names.index(name) for name in names]
    width = len(cells.names)
    if width == len(encoding):
        return [*range(width)]
    if max(column.place for column in encoding) < width <= encoding[0].of:
        return [column.place for column in encoding]
    raise DataError(
        f"{cells.path}: {counted(width, 'column')}; the model needs {len(encoding)}:"
        f" {shortened(', '.join(names))}"
    )


def plain(names: Sequence[str], count: int) -> Encoding:
    """Return rules for numbers without one missing, for a model that no table has trained."""
    columns = names or [str(number) for number in range(1, count + 1)]
    return tuple(Column(name, place, count + 1) for place, name in enumerate(columns))
