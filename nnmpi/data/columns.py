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

A column is what most of its different cells are; one that is odd is refused by its line. Texts that
are nearly all different, such as names and tickets, tell nothing: such a column is left out.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DataError, counted, shortened
from nnmpi.data.cells import (
    DATES,
    MARKS,
    UNITS,
    amount,
    days,
    is_text,
    number,
    numbers_in,
    split_words,
)
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
BARE: tuple[Any, ...] = ("number", "", "")  # a number without a unit
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
class Table:
    """A table: its cells, and what was made of them.

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
        labels: of each row, as text.
        target: the name or number of the label's column.
        notes: sentences about what was left out, replaced or made of texts.
        encoding: the rules that made the features.
        features: (rows, *sample_shape), float32; uint8 if a sample shape is given and fits pixels.
    """

    source: object
    lines: Sequence[int]
    names: tuple[str, ...]
    is_named: bool
    numbers: NDArray[np.float64]
    texts: tuple[Mapping[int, str], ...]
    mark: str
    training: Any
    labels: tuple[str, ...] = ()
    target: str = ""
    notes: tuple[str, ...] = ()
    encoding: Encoding = ()
    features: Any = None

    @property
    def about(self) -> dict[str, Any]:
        """What a data set of this table keeps of it."""
        names = (name for column in self.encoding for name in column.features)
        about = {name: getattr(self, name) for name in ("target", "encoding", "notes")}
        return about | {"columns": tuple(names) * self.is_named}

    def other_target(self) -> str:
        """Return advice to predict another column: one with few texts, or else a number."""
        by_kind = {column.kind: column.name for column in reversed(self.encoding)}
        number = ", and predicts='quantities'" * ("text" not in by_kind)
        if name := by_kind.get("text") or by_kind.get("number"):
            return f"give another column, such as target={name!r}{number}"
        return "give another column as the target"

    def wrong(self, row: int, place: int, what: str) -> DataError:
        """Return an error about a cell."""
        name = f" ({shortened(self.names[place])})" if self.is_named else ""
        remedy = (
            "" if self.training is None else f", or leave the column out: {self.dropping([place])}"
        )
        return DataError(
            f"{self.source}, line {self.lines[row]}, column {place + 1}{name}: {what}{remedy}"
        )

    def listed(self, places: Iterable[int]) -> list[str]:
        """Return columns as an argument: their names, or the number of one with a comma in it."""
        return [
            str(place + 1) if "," in self.names[place] else self.names[place] for place in places
        ]

    def dropping(self, places: Iterable[int]) -> str:
        """Return the argument that leaves columns out."""
        return f"drop={self.listed(places)}"

    def words(self, place: int) -> list[str]:
        """Return the cells of a column as texts; a missing one is empty."""
        texts = [
            "" if np.isnan(value) else f"{value:.15g}" for value in self.numbers[:, place].tolist()
        ]
        for row, text in self.texts[place].items():
            texts[row] = text
        return texts


def fit(
    table: Table, places: Sequence[int], documents: Sequence[int]
) -> tuple[Encoding, list[str]]:
    """Return the rules of these columns, and sentences about texts and what was left out.

    Args:
        table: the training table.
        places: of the columns, from 0.
        documents: those that hold documents.

    Raises:
        DataError: for a wrong cell, and if nothing is left.
    """
    notes, columns, left, prose = list[str](), list[Column](), list[str](), list[int]()
    for place in places:
        column, name, texts = None, table.names[place], table.texts[place]
        given = len(texts) + int((~np.isnan(table.numbers[:, place])).sum())
        most = max(SURE_TEXTS, int(min(TEXTS_SHARE * len(table.lines), given / 2)))
        if place in documents:
            columns.append(_fit_words(table, place))
        elif place == 0 and len(places) > 1 and _is_index(table):
            notes.append(f"column {name!r} is an index and left out")
        elif (column := _fit(table, place)) is None:
            notes.append(f"column {name!r} is empty and left out")
        elif column.kind != "text" or len(column.values) <= min(most, MOST_FEATURES):
            columns.append(column)
        else:
            left.append(f"{name} ({len(column.values)} of {given})")
            sentences = [text for text in texts.values() if len(text.split()) >= SENTENCE]
            prose += [place] * (2 * len(sentences) > given)
    if left:
        words = f"text_columns={table.listed(prose)} target={table.target!r}"
        told = f"; to learn from words: {words}" * bool(prose)
        notes.append(f"left out, with too many different texts: {shortened(', '.join(left))}{told}")
    if not columns:
        why = "; ".join(notes) or "drop fewer of them"
        raise DataError(f"{table.source}: no column is left to learn from; {why}")
    if split := [f"{item.name} ({len(item.values)})" for item in columns if item.kind == "text"]:
        notes.append(f"a feature for each text of {shortened(', '.join(split), 1000)}")
    return tuple(columns), notes


def _is_index(table: Table) -> bool:
    """Return whether the first column only numbers or names the rows."""
    rows, numbers = len(table.lines), table.numbers[:, 0]
    if table.is_named and table.names[0].lower() in INDEX_NAMES:
        return len({*table.words(0)}) == rows
    counts = rows >= SURE_INDEX and not table.texts[0] and not 1 < numbers[0] < LARGE_INDEX
    return bool(counts and (np.diff(numbers) == 1).all())


def _fit_words(table: Table, place: int) -> Column:
    found = Counter(word for text in table.words(place) for word in split_words(text))
    most = [word for word, count in found.most_common(MOST_FEATURES) if count >= FEWEST_ROWS]
    name = table.names[place]
    if not most:
        raise DataError(
            f"{table.source}: no word of column {name!r} occurs in {FEWEST_ROWS} rows; leave it"
            f" out: {table.dropping([place])}"
        )
    return Column(name, place, len(table.names), "words", values=tuple(sorted(most)))


def _fit(table: Table, place: int) -> Column | None:
    numbers, texts = table.numbers[:, place], [*table.texts[place].values()]
    given, words = numbers[~np.isnan(numbers)], {*texts}
    make = partial(Column, table.names[place], place, len(table.names), mark=table.mark)
    if not len(given) and not words:
        return None
    item, is_sure = BARE, True
    if len(given) < len(texts) and len(np.unique(given)) <= SURE_TEXTS:
        item, is_sure = _commonest(table, place, words, bool(len(given)))
    elif len(texts) * FEW > len(given):  # 113803 and A/5 21171: tickets
        is_sure = sum(map(is_text, words)) <= max(SURE_TEXTS, len(texts) / 2)
    kind, *values = item if is_sure else ("text",)
    if kind == "text":
        return make("text", values=tuple(sorted({*table.words(place)} - {""})))
    if kind == "list":
        return make(kind, size=values[0])
    values = values if any(values) else []
    fill, offset = _middle(table, _numbers(table, place, kind, values))
    return make(kind, fill, offset, tuple(values))


def _commonest(
    table: Table, place: int, words: Collection[str], has_numbers: bool
) -> tuple[tuple[Any, ...], bool]:
    """Return what most of a column's different texts are, and whether the column is that: numbers
    with a unit, lists of a length, or dates of a format.

    Raises:
        DataError: for dates of which nobody knows whether the month or the day is first, and for
            what may be lists or numbers with a space between thousands.
    """
    found, kinds = Counter[tuple[Any, ...]](), Counter[str]()
    some, other = sorted(words)[:: len(words) // SAMPLE + 1], MARKS[table.mark == MARKS[0]]
    forms = [
        form for form in DATES if sum(days(text, form) is not None for text in some) * 5 > len(some)
    ]
    for word in words:
        items: list[tuple[Any, ...]] = [
            ("date", form) for form in forms if days(word, form) is not None
        ]
        own = amount(word, table.mark)
        measured = own or amount(word, other)
        # a unit that is none of the usual ones is one only behind the file's own numbers
        if measured and (own or measured[1][1] in (*UNITS, "")):
            items = [("number", *measured[1])]
        if (size := len(numbers_in(word))) > 1:
            items.append(("list", size))
        found.update(items)
        kinds.update({item[0] for item in items})
    for item in [*found]:
        # "1 room" and "2 rooms" are texts: a word is a unit if it is that of all
        is_unit = item[0] != "number" or item[2] in (*UNITS, "")
        if not is_unit and found[item] * FEW < len(words) * (FEW - 1):
            kinds["number"] -= found.pop(item)
    counts = {item: (kinds[item[0]], count) for item, count in found.items()}
    best = max(counts, key=lambda item: counts[item], default=("text",))
    rivals = [item for item in counts if item != best and counts[item] == counts[best]]
    for rival, word in product(rivals, sorted(words)):
        either, remedy = "be a list or one number", "a number without spaces"
        is_other = rival[0] != best[0] and not has_numbers
        if rival[0] == best[0] == "date":
            either, remedy = "have the month or the day first", "it as 2024-03-31"
            is_other = len({days(word, item[1]) for item in (best, rival)} - {None}) > 1
        if is_other:
            raise DataError(
                f"{table.source}: {word!r} in column {table.names[place]!r} may {either}; write"
                f" {remedy}, or leave the column out: {table.dropping([place])}"
            )
    count, fits = kinds[best[0]], found[best] == len(words)
    alone = fits and (not has_numbers or best == BARE)
    return best, best[0] != "text" and (alone or count > max(SURE_TEXTS, len(words) / 2))


def _middle(table: Table, values: NDArray[np.float64]) -> tuple[float, float]:
    """Return what a missing number becomes, and the offset that float32 needs, 0 for none."""
    learned, given = (part[~np.isnan(part)] for part in (values[table.training], values))
    middle = float(np.median(learned if len(learned) else given))
    return middle, middle if lost_columns(given[:, None], given.astype(np.float32)) else 0.0


def encode(
    table: Table, encoding: Encoding, places: Sequence[int]
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the features of a table, (rows, features), and sentences about cells without a value.

    Args:
        table: the table.
        encoding: the rules.
        places: of the rules' columns in this table.

    Raises:
        DataError: for a cell that does not fit its column's rule.
    """
    filled, unseen = 0, list[str]()
    size = sum(len(column.features) for column in encoding)
    result, at = np.zeros((len(table.lines), size), np.float32), 0
    for column, place in zip(encoding, places, strict=True):
        part = result[:, at : at + len(column.features)]
        at += len(column.features)
        if column.kind in ("text", "words"):
            unseen += _mark(table, column, place, part)
        elif column.kind == "list":
            for row, text in enumerate(table.words(place)):
                if len(values := numbers_in(text)) != column.size:
                    what = f"{shortened(repr(text))} is not a list of {column.size} numbers"
                    raise table.wrong(row, place, what)
                part[row] = values
        else:
            numbers = _numbers(table, place, column.kind, column.values)
            missing = np.isnan(numbers)
            if missing.any():
                if column.fill is None:
                    raise table.wrong(int(missing.argmax()), place, no_number(""))
                filled += int(missing.sum())
                numbers[missing] = column.fill
            part[:, 0] = numbers - column.offset
    told = f"texts that training has not seen, as if missing: {shortened(', '.join(unseen))}"
    notes = [f"{counted(filled, 'missing number')} replaced by the column's median"]
    return result, notes * bool(filled) + [told] * bool(unseen)


def _mark(table: Table, column: Column, place: int, part: NDArray[np.float32]) -> list[str]:
    """Write the features of texts or words; return texts without a feature."""
    index = {value: number for number, value in enumerate(column.values)}
    unseen = dict[str, None]()
    for row, text in enumerate(table.words(place)):
        if column.kind == "words":
            part[row, [index[word] for word in split_words(text) & index.keys()]] = 1
        elif text in index:
            part[row, index[text]] = 1
        elif text:
            unseen[f"{shortened(repr(text), 40)} in {column.name}"] = None
    return list(unseen)


def _numbers(
    table: Table, place: int, kind: ColumnKind, values: Sequence[str]
) -> NDArray[np.float64]:
    """Return a column of numbers, or of dates in days, NaN for missing ones.

    Args:
        table, place: the column.
        kind: "number" or "date".
        values: the format of dates; the signs before and behind a number, if there is a unit.
    """
    result, unit = table.numbers[:, place].copy(), next(filter(None, values), "")
    what = kind if kind == "date" or not unit else f"number with {unit!r}"

    def read(text: str) -> float | None:
        if kind == "date":
            return days(text, unit)
        value, signs = amount(text, table.mark) or (None, None)
        return value if signs == (tuple(values) or ("", "")) else None

    bare = np.flatnonzero(~np.isnan(result)) if unit else ()
    others = {int(row): f"{result[row]:.15g}" for row in bare} | dict(table.texts[place])
    for row, text in others.items():
        if (value := read(text)) is None:
            raise table.wrong(
                row,
                place,
                f"{shortened(repr(text))} is no {what}, as other cells of the column are; mend it,"
                " or empty it if it is missing",
            )
        result[row] = value
    with np.errstate(over="ignore"):
        infinite = np.isinf(result.astype(np.float32))
    for row in np.flatnonzero(infinite)[:1].tolist():
        raise table.wrong(row, place, no_number(float(result[row])))
    return result


def find_places(
    source: object,
    first: Sequence[str],
    names: Sequence[str],
    encoding: Encoding,
    is_named: bool | None = None,
) -> tuple[list[int], bool, bool]:
    """Return where the columns of the rules are in another table, whether they were found by their
    names, and whether its first row is names.

    By name, without regard to case, if its first row has one of them. Otherwise in the order of the
    training table, with or without the columns that no rule has.

    Args:
        source: the table, for messages.
        first: the cells of its first row.
        names: the same as names.
        encoding: the rules.
        is_named: whether the first row is names; None to find out.

    Raises:
        DataError: for a column that is missing, and for a header with other names.
    """
    needed = f"the model needs {shortened(', '.join(item.name for item in encoding))}"
    known = any(item.name != str(item.place + 1) for item in encoding)
    places = [*map(finder(names), (item.name for item in encoding))]
    # some of its names may be cells, too, beside numbers
    is_header = -1 not in places or all(number(name) is None for name in names if name)
    if known and is_header and max(places) >= 0 and is_named is not False:
        wrong = [place < 0 or places.count(place) > 1 for place in places]
        if any(wrong):
            missing = encoding[wrong.index(True)].name
            raise DataError(f"{source} has no column {missing!r}; {needed}")
        cells = [cell.strip() for cell in first]
        taken = [cells[place] for place in places]
        for cell in taken:
            if cells.count(cell) > taken.count(cell):
                raise DataError(f"{source} has several columns {cell!r}; rename all but one")
        return places, True, True
    width = len(names)
    places = [*range(width)]
    if max(column.place for column in encoding) < width <= encoding[0].of and is_named is not False:
        places = [column.place for column in encoding]
    if len(places) != len(encoding):
        raise DataError(f"{source}: {counted(width, 'column')}; {needed}")
    if is_named is None:
        # a first row is told by itself: no result depends on the rows below
        pairs = zip(encoding, places, strict=True)
        bare = [first[at] for item, at in pairs if item.kind == "number" and not item.values]
        is_named = bool(bare) and all(number(cell) is None and is_text(cell) for cell in bare)
    if is_named and known:
        raise DataError(f"{source} has the columns {shortened(', '.join(names))}; {needed}")
    return places, False, is_named


def finder(names: Sequence[str]) -> Callable[[str], int]:
    """Return what finds the place of a name, or else of one in other capitals; -1 without it."""
    places = {name: place for place, name in enumerate(names)}
    others = {name.lower(): place for name, place in places.items()}
    return lambda name: places.get(name, others.get(name.lower(), -1))


def plain(names: Sequence[str], count: int) -> Encoding:
    """Return rules for numbers without one missing, for a model that no table has trained."""
    columns = names or [str(number) for number in range(1, count + 1)]
    return tuple(Column(name, place, count + 1) for place, name in enumerate(columns))
