"""A table's columns as features, by rules that the training table gives and the model keeps.

    age  sex  seen        review             age  sex=f  sex=m  seen   review~bad  review~good
    31   f    2024-03-01  good, very good    31   1      0      19783  0           1
         m    2024-03-02  bad                31   0      1      19784  1           0

A column is one of these:

    number   as it is, also with a unit, the same in each cell; true and false are 1 and 0; a
             missing one becomes the median of the training rows
    date     2024-03-01, with a time or without, 3/31/2024 or Mar 1 2024: days since 1970; a missing
             one becomes the median
    list     numbers in one cell, such as pixels, "0 12 255": a feature for each
    text     a feature for each text of the training table, 1 for the cell's own; a missing text, or
             one that training has not seen, has zeros
    words    of a column of documents: a feature for each of its commonest words, 1 if it occurs

A column is what most of its different cells are; one that is odd is refused by its line.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DataError, counted, shortened
from nnmpi.data.cells import DATES, UNITS, amount, days, number, numbers_in, split_words
from nnmpi.data.dataset import lost_columns, no_number

ColumnKind: TypeAlias = Literal["number", "date", "list", "text", "words"]

# A column of texts has at most so many different ones, or a share of its rows, and never more than
# MOST_FEATURES: names of persons and free text are nearly all different.
SURE_TEXTS, TEXTS_SHARE, MOST_FEATURES = 10, 0.25, 1000
SURE_INDEX = 10  # rows from which on 1, 2, 3 ... is an index and no feature
LARGE_INDEX = 3000  # and so is 5001, 5002, 5003 ..., while 1960, 1961, 1962 ... are years
INDEX_NAMES = ("column 1", "unnamed: 0", "rownames", "row.names", "index")
FEWEST_ROWS = 2  # with a word, for it to be a feature
SENTENCE = 3  # words of a text from which on it may be a document
FEW = 20  # one text of so many may be odd
SAMPLE = 20  # texts of a column that show which formats of dates may be its own


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
        values: the texts or the words; the format of dates; the signs before and behind a number
            with a unit.
        size: the length of a list.
        mark: the decimal mark of the table; empty if it is unknown.
    """

    name: str
    place: int
    of: int
    kind: ColumnKind = "number"
    fill: float | None = None
    offset: float = 0.0
    values: tuple[str, ...] = ()
    size: int = 1
    mark: str = ""

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
        source: the file, for messages.
        lines: the line number of each row, for messages.
        names: of the columns, or their numbers from 1.
        is_named: whether the table has a header.
        numbers: (rows, columns), float64; NaN for a missing cell and for a text.
        texts: of each column, by row: the cells that are no numbers.
        mark: the decimal mark.
        training: the rows that say what a missing number becomes; None for a table that is read by
            the rules of another one, so that no column may be left out.
    """

    source: object
    lines: Sequence[int]
    names: tuple[str, ...]
    is_named: bool
    numbers: NDArray[np.float64]
    texts: tuple[Mapping[int, str], ...]
    mark: str
    training: Any

    def wrong(self, row: int, place: int, what: str) -> DataError:
        """Return an error about a cell."""
        name = f" ({shortened(self.names[place])})" if self.is_named else ""
        remedy = (
            "" if self.training is None else f", or leave the column out: {self.dropping([place])}"
        )
        return DataError(
            f"{self.source}, line {self.lines[row]}, column {place + 1}{name}: {what}{remedy}"
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
    """Return the rules of these columns, and sentences about texts and what was left out.

    Args:
        cells: of the training table.
        places: of the columns, from 0.
        documents: those that hold documents.
        target: the label's column, for advice.

    Raises:
        DataError: for a wrong cell, and if nothing is left.
    """
    notes, columns = list[str](), list[Column]()
    rows = len(cells.lines)
    for place in places:
        column = None if place in documents else _fit(cells, place)
        if place in documents:
            columns.append(_fit_words(cells, place))
        elif place == 0 and len(places) > 1 and _is_index(cells):
            notes.append(f"column {cells.names[0]!r} is an index and left out")
        elif column is None:
            notes.append(f"column {cells.names[place]!r} is empty and left out")
        elif column.kind != "text" or len(column.values) <= _most_texts(rows):
            columns.append(column)
        else:
            note = (
                f"column {column.name!r} has {len(column.values)} different texts in {rows} rows"
                " and is left out"
            )
            if len(sorted(column.values, key=len)[len(column.values) // 2].split()) >= SENTENCE:
                words = f"text_columns={[cells.named(place)]} target={target!r}"
                note += f", or learn from its words: {words}"
            notes.append(note)
    if not columns:
        why = "; ".join(notes) or "drop fewer of them"
        raise DataError(f"{cells.source}: no column is left to learn from; {why}")
    if texts := [f"{item.name} ({len(item.values)})" for item in columns if item.kind == "text"]:
        notes.append(f"a feature for each text of {shortened(', '.join(texts), 1000)}")
    return tuple(columns), notes


def _most_texts(rows: int) -> int:
    return min(max(SURE_TEXTS, int(TEXTS_SHARE * rows)), MOST_FEATURES)


def _is_index(cells: Cells) -> bool:
    """Return whether the first column only numbers or names the rows."""
    rows, texts, numbers = len(cells.lines), cells.texts[0], cells.numbers[:, 0]
    if cells.is_named and cells.names[0].lower() in INDEX_NAMES:
        return len({*cells.words(0)}) == rows
    counts = rows >= SURE_INDEX and not texts and not 1 < numbers[0] < LARGE_INDEX
    return bool(counts and (np.diff(numbers) == 1).all())


def _fit_words(cells: Cells, place: int) -> Column:
    found = Counter(word for text in cells.words(place) for word in split_words(text))
    most = [word for word, count in found.most_common(MOST_FEATURES) if count >= FEWEST_ROWS]
    name = cells.names[place]
    if not most:
        raise DataError(
            f"{cells.source}: no word of column {name!r} occurs in {FEWEST_ROWS} rows; leave it"
            f" out: {cells.dropping([place])}"
        )
    return Column(name, place, len(cells.names), "words", values=tuple(sorted(most)))


def _fit(cells: Cells, place: int) -> Column | None:
    numbers, texts = cells.numbers[:, place], cells.texts[place]
    given, words = numbers[~np.isnan(numbers)], {*texts.values()}
    make = partial(Column, cells.names[place], place, len(cells.names), mark=cells.mark)
    if not len(given) and not words:
        return None
    if len(given) >= len(texts) or len(np.unique(given)) > SURE_TEXTS:
        return make("number", *_middle(cells, _numbers(cells, place)))
    (kind, *values), count, fits = _commonest(cells, place, words)
    if kind == "text" or (count <= max(SURE_TEXTS, len(words) / 2) and (len(given) or not fits)):
        return make("text", values=tuple(sorted({*cells.words(place)} - {""})))
    if kind == "list":
        return make(kind, size=values[0])
    read = _dates if kind == "date" else _numbers
    return make(kind, *_middle(cells, read(cells, place, *values)), tuple(values))


def _commonest(
    cells: Cells, place: int, words: Collection[str]
) -> tuple[tuple[Any, ...], int, bool]:
    """Return what most of a column's different texts are, how many are of this kind, and whether
    all fit: numbers with a unit, lists of a length, or dates of a format.

    Raises:
        DataError: for dates of which nobody knows whether the month or the day is first.
    """
    found, kinds = Counter[tuple[Any, ...]](), Counter({"text": 0})
    some, few = sorted(words)[:: len(words) // SAMPLE + 1], len(words) * (FEW - 1)
    forms = [
        form for form in DATES if sum(days(text, form) is not None for text in some) * 5 > len(some)
    ]
    for word in words:
        items: list[tuple[Any, ...]] = [
            ("date", form) for form in forms if days(word, form) is not None
        ]
        own = amount(word, cells.mark)
        measured = own or amount(word, "," if cells.mark == "." else ".")
        # a unit that is none of the usual ones is one only behind the file's own numbers
        if measured and (own or measured[1][1] in (*UNITS, "")):
            items = [("number", *measured[1])]
        elif (size := len(numbers_in(word))) > 1:
            items = [("list", size)]
        found.update(items)
        kinds.update({item[0] for item in items})
    for item in [*found]:
        # "1 room" and "2 rooms" are texts: a word is a unit if it is that of all
        if item[0] == "number" and item[2] not in (*UNITS, "") and found[item] * FEW < few:
            kinds["number"] -= found.pop(item)
    ((kind, count),) = kinds.most_common(1)
    best, *others = [item for item, _ in found.most_common() if item[0] == kind] or [("text",)]
    for word in words:
        for other in others if kind == "date" else ():
            either = {days(word, item[1]) for item in (best, other)} - {None}
            if found[other] == found[best] and len(either) > 1:
                raise DataError(
                    f"{cells.source}: {word!r} in column {cells.names[place]!r} may have the month"
                    " or the day first; write it as 2024-03-31, or leave the column out:"
                    f" {cells.dropping([place])}"
                )
    return best, count, found[best] == len(words)


def _middle(cells: Cells, values: NDArray[np.float64]) -> tuple[float, float]:
    """Return what a missing number becomes, and the offset that float32 needs, 0 for none."""
    learned, given = (part[~np.isnan(part)] for part in (values[cells.training], values))
    middle = float(np.median(learned if len(learned) else given))
    return middle, middle if lost_columns(given[:, None], given.astype(np.float32)) else 0.0


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
                if len(values := numbers_in(text)) != column.size:
                    what = f"{shortened(repr(text))} is not a list of {column.size} numbers"
                    raise cells.wrong(row, place, what)
                part[row] = values
        else:
            read = _dates if column.kind == "date" else _numbers
            numbers = read(cells, place, *column.values)
            missing = np.isnan(numbers)
            if missing.any():
                if column.fill is None:
                    raise cells.wrong(int(missing.argmax()), place, no_number(""))
                filled += int(missing.sum())
                numbers[missing] = column.fill
            part[:, 0] = numbers - column.offset
    told = f"texts that training has not seen, as if missing: {shortened(', '.join(unseen))}"
    notes = [f"{counted(filled, 'missing number')} replaced by the column's median"]
    return result, notes * bool(filled) + [told] * bool(unseen)


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


def _numbers(cells: Cells, place: int, before: str = "", behind: str = "") -> NDArray[np.float64]:
    """Return a column of numbers, NaN for missing ones; each has the unit, if there is one."""
    result = cells.numbers[:, place].copy()
    bare = np.flatnonzero(~np.isnan(result)) if before or behind else ()
    others = {int(row): f"{result[row]:.15g}" for row in bare} | dict(cells.texts[place])
    for row, text in others.items():
        value, unit = amount(text, cells.mark) or (np.nan, None)
        if unit != (before, behind):
            what = f"number with {before or behind!r}" if before or behind else "number"
            raise cells.wrong(
                row,
                place,
                f"{shortened(repr(text))} is no {what}, as other cells of the column are; mend it,"
                " or empty it if it is missing",
            )
        result[row] = value
    with np.errstate(over="ignore"):
        infinite = np.isinf(result.astype(np.float32))
    for row in np.flatnonzero(infinite)[:1].tolist():
        raise cells.wrong(row, place, no_number(float(result[row])))
    return result


def _dates(cells: Cells, place: int, form: str) -> NDArray[np.float64]:
    """Return a column of dates in days, NaN for missing ones."""
    result = np.full(len(cells.lines), np.nan)
    for row, text in enumerate(cells.words(place)):
        day = days(text, form) if text else np.nan
        if day is None:
            raise cells.wrong(
                row, place, f"{shortened(repr(text))} is no date as the others are; mend it"
            )
        result[row] = day
    return result


def find_places(source: object, names: Sequence[str], encoding: Encoding) -> tuple[list[int], bool]:
    """Return where the columns of the rules are in another table, and whether by their names.

    By name, without regard to case, if its first row has one of them. Otherwise in the order of the
    training table, with or without the columns that no rule has.

    Args:
        source: the table, for messages.
        names: the cells of its first row.
        encoding: the rules.

    Raises:
        DataError: for a column that is missing.
    """
    places = [*map(finder(names), (item.name for item in encoding))]
    needed = f"the model needs {shortened(', '.join(item.name for item in encoding))}"
    # some of its names may be cells, too, beside numbers
    is_header = -1 not in places or all(number(name) is None for name in names if name)
    if max(places) >= 0 and is_header and has_names(encoding):
        if -1 in places or len({*places}) < len(places):
            wrong = [place < 0 or places.count(place) > 1 for place in places].index(True)
            raise DataError(f"{source} has no column {encoding[wrong].name!r}; {needed}")
        return places, True
    width = len(names)
    if width == len(encoding):
        return [*range(width)], False
    if max(column.place for column in encoding) < width <= encoding[0].of:
        return [column.place for column in encoding], False
    raise DataError(f"{source}: {counted(width, 'column')}; {needed}")


def finder(names: Sequence[str]) -> Callable[[str], int]:
    """Return what finds the place of a name, or else of one in other capitals; -1 without it."""
    places = {name: place for place, name in enumerate(names)}
    others = {name.lower(): place for name, place in places.items()}
    return lambda name: places.get(name, others.get(name.lower(), -1))


def has_names(encoding: Encoding) -> bool:
    """Return whether the columns of the training table had names, not only numbers."""
    return any(item.name != str(item.place + 1) for item in encoding)


def plain(names: Sequence[str], count: int) -> Encoding:
    """Return rules for numbers without one missing, for a model that no table has trained."""
    columns = names or [str(number) for number in range(1, count + 1)]
    return tuple(Column(name, place, count + 1) for place, name in enumerate(columns))
