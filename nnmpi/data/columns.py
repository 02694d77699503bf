"""A table's columns as features, by rules that the training table gives and the model keeps.

    age  sex  seen        review             age  sex=f  sex=m  seen   review~bad  review~good
    31   f    2024-03-01  good, very good    31   1      0      19783  0           1
         m    2024-03-02  bad                31   0      1      19784  1           0

A column is one of these:

    number   as it is; true and false are 1 and 0; a missing one becomes the median of the training
             rows
    date     2024-03-01, with a time or without: days since 1970; a missing one becomes the median
    text     a feature for each text of the training table, 1 for the cell's own; a missing text, or
             one that training has not seen, has zeros. Numbers among texts are texts, as written
    words    of a column of documents: a feature for each of its commonest words, 1 if it occurs

An odd cell in a column of numbers or dates is refused by its line. Texts that are nearly all
different, such as names and tickets, tell nothing: such a column is left out.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from nnmpi.base.errors import DataError, counted, shortened
from nnmpi.data.cells import days, is_missing, split_words
from nnmpi.data.dataset import lost, lost_columns, no_number
from nnmpi.data.team import ALONE, Team

ColumnKind: TypeAlias = Literal["number", "date", "text", "words"]

# A column of texts has at most so many different ones, or a share of its rows, and never more than
# MOST_FEATURES: names of persons and free text are nearly all different.
SURE_TEXTS, TEXTS_SHARE, MOST_FEATURES = 10, 0.25, 1000
MOST_OF_TEXTS = 10_000  # features of all texts together: a small file must not fill the memory
SURE_INDEX = 10  # rows from which on 1, 2, 3 ... is an index and no feature
INDEX_NAMES = ("", "Unnamed: 0")  # of an index as pandas writes it, and reads that
FEWEST_ROWS = 2  # with a word, for it to be a feature
BLOCK_ROWS = 2**15  # of a table that are encoded at once
FEW = 20  # one cell of so many may be odd, so that it is an error and not a text


@dataclass(frozen=True)
class Column:
    """The rule of one column.

    Attributes:
        name: in the header, or the column's number from 1.
        place: in the training table, from 0.
        of: the number of columns of the training table.
        kind: see the module.
        fill: what a missing number becomes; None to refuse it.
        values: the texts or the words.
        mark: the decimal mark of the table.
    """

    name: str
    place: int
    of: int
    kind: ColumnKind = "number"
    fill: float | None = None
    values: tuple[str, ...] = ()
    mark: str = "."

    @property
    def features(self) -> tuple[str, ...]:
        """The names of its features."""
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
        is_typed: whether cells are numbers or texts by their types.
        numbers: (rows, columns), float64; NaN for a missing cell and for a text.
        texts: {column: {row: text}}, of the cells that are no numbers; of a column of texts, all.
        mark: the decimal mark.
        training: the rows that say what a missing number becomes; None for a table that is read by
            the rules of another one, so that no column may be left out.
        labels: of each row, as text.
        target: the name or number of the label's column.
        notes: sentences about what was left out, replaced or made of texts.
        encoding: the rules that made the features.
        features: (rows, *sample_shape), float32; uint8 if a sample shape is given and fits pixels.
        weights: (rows,), of the samples; None for equal ones.
    """

    source: object
    lines: Sequence[int]
    names: tuple[str, ...]
    is_named: bool
    is_typed: bool
    numbers: NDArray[np.float64] = field(repr=False)
    texts: Mapping[int, Mapping[int, str]] = field(repr=False)
    mark: str
    training: Any
    labels: tuple[str, ...] = ()
    target: str = ""
    notes: tuple[str, ...] = ()
    encoding: Encoding = ()
    features: Any = None
    weights: NDArray[np.float64] | None = None

    @property
    def about(self) -> dict[str, Any]:
        """What a data set of this table keeps of it."""
        names = (name for column in self.encoding for name in column.features)
        about = {name: getattr(self, name) for name in ("target", "encoding", "notes", "weights")}
        return about | {"columns": tuple(names) * self.is_named}

    def other_target(self) -> str:
        """Return advice to predict another column: one with few texts, or else a number."""
        by_kind = {column.kind: column.name for column in reversed(self.encoding)}
        number = ", and predicts='quantities'" if "text" not in by_kind else ""
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

    def odd(self, row: int, place: int, text: str, kind: ColumnKind) -> DataError:
        """Return the error about a cell that is no number or date, in a column of such."""
        remedy = "mend it, or empty it if it is missing"
        name = shortened(self.names[place])
        if self.training is not None and self.is_named:
            codes = by_pandas(self.source, f"dtype={{{name!r}: str}}")
            if self.is_typed:
                codes = f"make all its cells texts, frame[{name!r}] = frame[{name!r}].astype(str)"
            remedy = f"{remedy}, or, for a column of codes, {codes}"
        what = f"{shortened(repr(text))} is no {kind}, as other cells of the column are"
        return self.wrong(row, place, f"{what}; {remedy}")

    def dropping(self, places: Iterable[int]) -> str:
        """Return the argument that leaves columns out; one with a comma in its name by number."""
        names = (
            str(place + 1) if "," in self.names[place] else self.names[place] for place in places
        )
        return f"drop={[*names]}"

    def texts_of(self, place: int) -> dict[int, str]:
        """Return the texts of a column by row, without spaces around them."""
        return {row: text.strip() for row, text in self.texts.get(place, {}).items()}


def by_pandas(source: object, arguments: str = "") -> str:
    """Return the line of pandas that makes a table of what is none by the rules."""
    given = [repr(str(source)) if isinstance(source, Path) else "file", arguments]
    return (
        f"read it with pandas, frame = pandas.read_csv({', '.join(filter(None, given))}), and give"
        " nnmpi.data.load the frame, or write frame.to_csv('table.csv', index=False)"
    )


def kind_of(numbers: int, texts: Collection[str]) -> ColumnKind:
    """Return what a column of a training table is.

    Numbers or dates if all its cells are, but one, or one in FEW: these are errors, to be refused.
    Else texts.

    Args:
        numbers: how many cells are numbers.
        texts: the others, without missing ones.
    """
    if not texts:
        return "number"
    dates = sum(days(text) is not None for text in texts)
    kind: ColumnKind = "date" if dates > numbers else "number"
    total = numbers + len(texts)
    odd = total - max(numbers, dates)
    return kind if odd <= max(1, total // FEW) and 2 * odd < total else "text"


def fit(
    table: Table, kinds: Mapping[int, ColumnKind], is_index: bool
) -> tuple[Encoding, list[str]]:
    """Return the rules of these columns, and sentences about texts and what was left out.

    Args:
        table: the training table.
        kinds: {place: kind} of the columns, from 0.
        is_index: whether the first column has no name.

    Raises:
        DataError: for a wrong cell, for numbers that float32 cannot tell apart, for too many
            features of texts, and if nothing is left.
    """
    notes, empty, left, columns = list[str](), list[str](), list[str](), list[Column]()
    kept = dict(kinds)
    if 0 in kept and len(kept) > 1 and (is_index or _counts_rows(table)):
        notes.append(f"column {table.names[0]!r} is an index and left out")
        del kept[0]
    given = (~np.isnan(table.numbers)).sum(axis=0).tolist()
    fills = _fills(table, {place: kind for place, kind in kept.items() if kind in _NUMERIC})
    for place, kind in kept.items():
        name = table.names[place]
        make = partial(Column, name, place, len(table.names), kind, mark=table.mark)
        count = len(table.texts.get(place, ())) or given[place]
        if kind == "words":
            columns.append(make(values=_common_words(table, place)))
        elif not count:
            empty.append(name)
        elif kind == "text":
            values = _different_texts(table, place)
            most = max(SURE_TEXTS, int(min(TEXTS_SHARE * len(table.lines), count / 2)))
            if len(values) <= min(most, MOST_FEATURES):
                columns.append(make(values=values))
            else:
                left.append(f"{name} ({len(values)} of {count})")
        else:
            columns.append(make(fills[place]))
    if empty:
        notes.append(f"left out, without a value: {shortened(', '.join(empty))}")
    if left:
        notes.append(f"left out, with too many different texts: {shortened(', '.join(left))}")
    if not columns:
        why = "; ".join(notes) or "drop fewer of them"
        raise DataError(f"{table.source}: no column is left to learn from; {why}")
    texts = [item for item in columns if item.kind == "text"]
    if (many := sum(len(item.values) for item in columns)) > MOST_OF_TEXTS:
        largest = max(columns, key=lambda item: len(item.values))
        raise DataError(
            f"{table.source}: its texts would be {many} features, of which {MOST_OF_TEXTS} are"
            f" allowed; leave columns out: {table.dropping([largest.place])}"
        )
    if told := [f"{item.name} ({len(item.values)})" for item in texts]:
        notes.append(f"a feature for each text of {shortened(', '.join(told), 1000)}")
    return tuple(columns), notes


_NUMERIC = ("number", "date")


def _counts_rows(table: Table) -> bool:
    """Return whether the first column is 0, 1, 2 ... or 1, 2, 3 ..."""
    numbers = table.numbers[:, 0]
    return bool(
        len(numbers) >= SURE_INDEX
        and numbers[0] in (0, 1)
        and (numbers == numbers[0] + np.arange(len(numbers))).all()
    )


def _common_words(table: Table, place: int) -> tuple[str, ...]:
    texts = table.texts.get(place, {}).values()
    found = Counter(word for text in texts for word in split_words(text))
    most = [word for word, count in found.most_common(MOST_FEATURES) if count >= FEWEST_ROWS]
    if not most:
        raise DataError(
            f"{table.source}: no word of column {table.names[place]!r} occurs in {FEWEST_ROWS}"
            f" rows; leave it out: {table.dropping([place])}"
        )
    return tuple(sorted(most))


def _different_texts(table: Table, place: int) -> tuple[str, ...]:
    """Return a column's texts, sorted; see `check_spelling`."""
    spellings = dict[str, str]()
    for row, text in table.texts[place].items():
        if what := check_spelling(text, spellings):
            raise table.wrong(row, place, what)
    return tuple(sorted(spellings))


def check_spelling(text: str, spellings: dict[str, str]) -> str:
    """Return what is wrong with a text as it is written; nothing if it is right.

    Args:
        text: with the spaces around it, which do not count.
        spellings: {text without spaces: its first spelling}; the text is added.
    """
    bare = text.strip()
    first = spellings.setdefault(bare, text)
    if first != text:
        return f"{text!r} and {first!r} differ by spaces alone; write one of them"
    if bare != text and bare[:1] == '"':
        return (
            f"{text!r} has a space before its quotation mark; remove it, as pandas does by"
            " skipinitialspace=True"
        )
    if '\\"' in text:
        return (
            f"{text!r} has a backslash before a quotation mark; double the mark instead, as pandas"
            " writes what it reads by escapechar='\\\\'"
        )
    return ""


def _fills(table: Table, kinds: Mapping[int, ColumnKind]) -> dict[int, float]:
    """Return what a missing number of each column becomes: the median of the training rows."""
    result = dict[int, float]()
    for place, kind in kinds.items():
        column = _numbers(table, [place], [kind])[:, 0]
        missing = np.isnan(column)
        learned = column[table.training]
        some = learned[~np.isnan(learned)] if missing.any() else learned
        if not len(some):
            some = column[~missing]
        result[place] = float(np.median(some)) if len(some) else 0.0
        column[missing] = result[place]
        if lost_columns(column, column.astype(np.float32)):
            remedy = table.dropping([place])
            raise DataError(
                f"{table.source}: column {table.names[place]!r}: {lost(column)}, with pandas"
                f" frame[name] -= frame[name].min(), or leave the column out: {remedy}"
            )
    return result


def encode(
    table: Table, encoding: Encoding, places: Sequence[int], team: Team = ALONE
) -> tuple[NDArray[np.float32], list[str]]:
    """Return the features of a table, (rows, features), and sentences about cells without a value.

    Args:
        table: the table.
        encoding: the rules.
        places: of the rules' columns in this table.
        team: makes the array.

    Raises:
        DataError: for a cell that does not fit its column's rule.
    """
    widths = [len(column.features) for column in encoding]
    starts = np.cumsum([0, *widths])
    result = team.array((len(table.lines), int(starts[-1])), np.float32)
    numeric = [at for at, column in enumerate(encoding) if column.kind in _NUMERIC]
    fills = [encoding[at].fill or 0.0 for at in numeric]
    filled, unseen = 0, list[str]()
    for first in range(0, len(result), BLOCK_ROWS):
        rows = slice(first, first + BLOCK_ROWS)
        kinds = [encoding[at].kind for at in numeric]
        numbers = _numbers(table, [places[at] for at in numeric], kinds, rows)
        missing = np.isnan(numbers)
        if missing.any():
            for row, at in np.argwhere(missing & _without_fill(encoding, numeric))[:1].tolist():
                raise table.wrong(first + row, places[numeric[at]], no_number(""))
            np.copyto(numbers, fills, where=missing)
            filled += int(missing.sum())
        if numbers.shape[1] == result.shape[1]:
            result[rows] = numbers
        else:
            result[rows] = 0
            result[rows, starts[numeric]] = numbers
    for at, column in enumerate(encoding):
        if column.kind not in _NUMERIC:
            part = result[:, starts[at] : starts[at + 1]]
            unseen += _mark(table, column, places[at], part)
    told = f"texts that training has not seen, as if missing: {shortened(', '.join(unseen))}"
    notes = [f"{counted(filled, 'missing number')} replaced by the column's median"]
    return result, notes * bool(filled) + [told] * bool(unseen)


def _without_fill(encoding: Encoding, numeric: Sequence[int]) -> NDArray[np.bool_]:
    return np.array([encoding[at].fill is None for at in numeric], bool)


def _mark(table: Table, column: Column, place: int, part: NDArray[np.float32]) -> list[str]:
    """Write the features of texts or words; return texts without a feature."""
    index = {value: number for number, value in enumerate(column.values)}
    unseen = dict[str, None]()
    for row, text in table.texts_of(place).items():
        if column.kind == "words":
            part[row, [index[word] for word in split_words(text) & index.keys()]] = 1
        elif text in index:
            part[row, index[text]] = 1
        elif not is_missing(text):
            unseen[f"{shortened(repr(text), 40)} in {column.name}"] = None
    return list(unseen)


def _numbers(
    table: Table, places: Sequence[int], kinds: Sequence[ColumnKind], rows: slice = slice(None)
) -> NDArray[np.float64]:
    """Return columns of numbers, or of dates in days, (rows, places); NaN for missing ones.

    Raises:
        DataError: for a cell that is none, and for one that float32 cannot hold.
    """
    result = table.numbers[rows][:, [*places]]
    begin = rows.start or 0
    for at, (place, kind) in enumerate(zip(places, kinds, strict=True)):
        if kind == "date":
            for row in np.flatnonzero(~np.isnan(result[:, at]))[:1].tolist():
                raise table.odd(begin + row, place, f"{result[row, at]:.15g}", kind)
        for row, text in _in_rows(table.texts.get(place, {}), rows):
            value = days(text) if kind == "date" else None
            if value is None:
                raise table.odd(row, place, text, kind)
            result[row - begin, at] = value
    with np.errstate(over="ignore"):
        infinite = np.isinf(result.astype(np.float32))
    for row, at in np.argwhere(infinite)[:1].tolist():
        raise table.wrong(begin + row, places[at], no_number(float(result[row, at])))
    return result


def _in_rows(texts: Mapping[int, str], rows: slice) -> Iterable[tuple[int, str]]:
    """Return the texts of some rows, by row."""
    if rows.stop is None or not texts:
        return texts.items()
    return [(row, texts[row]) for row in range(rows.start, rows.stop) if row in texts]


def plain(names: Sequence[str], count: int) -> Encoding:
    """Return rules for numbers without one missing, for a model that no table has trained."""
    columns = names or [str(number) for number in range(1, count + 1)]
    return tuple(Column(name, place, count + 1) for place, name in enumerate(columns))
