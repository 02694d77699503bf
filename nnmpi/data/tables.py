"""Tables: CSV files, and DataFrames. One rule, without guesses:

    sepal_length_cm,petal_length_cm,species      the first row names the columns
    5.1,1.4,setosa                               features, and the label in the last column or in
    7.0,4.7,versicolor                           the one named `target`

    text        UTF-8, plain or .gz; cells with a separator or a line's end stand between quotes
    separator   the one of tab, semicolon, bar and comma that occurs in the first row; a first row
                with none of them is of a table of one column
    names       the first row, all different and no numbers; with header=False the columns are
                called 1, 2, 3 ...; a first column without a name is an index, and left out
    numbers     5, -1.5, 2e-3, with one decimal mark in the table: the point, or the comma if all
                show it or `decimal` says so; nothing between thousands; true and false are 1 and 0
    dates       2024-03-01, with a time or without
    missing     empty, or a word of `dataset.MISSING`: NA, nan, null, ? ...; a row without a label
                is left out
    texts       everything else, as it is written, without spaces around it

What becomes of a column of numbers, dates or texts: see `columns`. What is no such table is refused
with the line of pandas that makes it one; a DataFrame is read by the same rule, but its texts
remain texts. A table to evaluate or to predict from has its columns found by name; without names,
they stand in the order of the training table.

Labels of a table are text or integers. The classes are the labels that occur in the training table,
sorted: integers need not begin at 0 nor be consecutive. `class_names` maps classes to labels. With
predicts="quantities", the label is a number to predict.
"""

import csv
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from math import isfinite, nan, prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Integers
from nnmpi.base.errors import DataError, UsageError, counted, shortened
from nnmpi.base.files import read_line_blocks
from nnmpi.data.cells import (
    BOOLS,
    MARKS,
    Cell,
    class_key,
    days,
    is_missing,
    is_number,
    mark_of,
    number,
    spelled,
)
from nnmpi.data.columns import (
    INDEX_NAMES,
    ColumnKind,
    Encoding,
    Table,
    by_pandas,
    check_spelling,
    encode,
    fit,
    kind_of,
)
from nnmpi.data.dataset import MISSING, Dataset, LabelKind, judge_classes, narrowed, split_indices
from nnmpi.data.team import ALONE, Spool, Team

HINT = "to predict numbers, give predicts='quantities'"
SEPARATORS = "\t;|,"
NO_SEPARATOR = "\x1f"  # of a table of one column: no cell may have it
CELL_BYTES = 2**30  # the longest cell of a table, beyond the 128 KiB of Python's default
NO_LABEL = MISSING - {"none", "-", "--", "."}  # these may be classes
# The second line of a table of Orange's names the kinds of its columns.
ORANGE_KINDS = frozenset(["c", "d", "s", "t", "continuous", "discrete", "string", "time"])
MOST_ADVISED = 20  # columns to leave out, in a sentence
UNREAD = "nan"  # in place of a cell that is not read as a number


@dataclass(frozen=True)
class TableRules:
    """How a table is read.

    Attributes:
        target: the column of the label, by name or by number from 1; empty for the last one.
        drop: columns to leave out, by name or number.
        text_columns: columns of documents, whose words become features.
        sample_shape: of a sample, such as (28, 28, 1) for pixels; empty for a row of features.
        encoding: of the training table, for another one; empty for a training table.
        as_bytes: whether samples are bytes, as those of the training table; None for a training
            table, of which whole numbers up to 255 are pixels if a sample is an image.
        class_names: of the training table, for another one, which may lack some; empty to find
            them.
        decimal: the decimal mark, "." or ","; empty for that of the training table, and in a
            training table for the one that its numbers show.
        header: whether the first row of a file names the columns.
        split: the share of the test part and the seed, of a training table that will be split.
        stratify: whether it will be split class by class.
        sample_weight: the column of the samples' weights in a training table, by name or number;
            empty for none.
    """

    target: str = ""
    drop: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    sample_shape: tuple[int, ...] = ()
    encoding: Encoding = ()
    as_bytes: bool | None = None
    class_names: tuple[str, ...] = ()
    decimal: str = ""
    header: bool = True
    split: tuple[float, int] | None = None
    stratify: bool = False
    sample_weight: str = ""


NO_RULES = TableRules()


# ---- the rows of a file ----


def read_cells(
    path: Path, separator: str = "", header: bool = True
) -> Generator[tuple[int, list[str]]]:
    """Yield each row's line number and cells, all of one length; blank lines are no rows.

    Args:
        path: of the file.
        separator: of the cells; empty to find it.
        header: whether the first row is names.

    Raises:
        DataError: for what is no table; see the module.
    """
    return _cells_in(path, _lines(path), separator or find_separator(path), header)


def _cells_in(
    path: Path, lines: Iterator[str], separator: str, header: bool, width: int = 0, before: int = 0
) -> Generator[tuple[int, list[str]]]:
    """Yield the rows of some lines; see `read_cells`.

    Args:
        width: the number of cells; 0 for that of the first row.
        before: the number of lines before these.
    """
    csv.field_size_limit(CELL_BYTES)
    reader = csv.reader(lines, strict=True, delimiter=separator)
    begin = before + 1
    try:
        for cells in reader:
            if len(cells) > 1 or (cells and (cells[0].strip() or cells == [""])):
                width = width or len(cells)
                if len(cells) != width:
                    raise _ragged(path, before + reader.line_num, len(cells), width, header)
                yield before + reader.line_num, cells
            elif width == 1:
                raise DataError(
                    f"{path}, line {before + reader.line_num} is blank; remove it, or write a"
                    ' missing cell of a table of one column as ""'
                )
            begin = before + reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"{path}, line {begin}: not CSV ({_what_csv_says(error)}); a cell with a quotation mark"
            ' in it stands between quotation marks, its own ones doubled, "like ""this"""'
        ) from error


def _what_csv_says(error: csv.Error) -> str:
    """Return Python's words, or clearer ones."""
    if "end of data" in str(error):
        return "a quotation mark that begins a cell is not closed"
    if "expected after" in str(error):
        return "a separator or the line's end must follow the quotation mark that ends a cell"
    return str(error)


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a table, with their ends."""
    return chain.from_iterable(_line_blocks(path))


def _line_blocks(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a table, with their ends, many at once."""
    ends_with_return = None
    try:
        for lines in read_line_blocks(path, newline=""):
            text = "".join(lines)
            if "\0" in text:
                raise DataError(f"{path} has zero bytes, as UTF-16 text has; save it as UTF-8")
            if ends_with_return is None:
                ends_with_return = lines[0].endswith("\r")
            has_return = "\r" in text and not ends_with_return
            if has_return and text.count("\r") > text.count("\r\n"):
                raise DataError(
                    f"{path} has a carriage return within a line, which may or may not end it;"
                    " remove it"
                )
            yield lines
    except DataError as error:
        if not isinstance(error.__cause__, UnicodeDecodeError):
            raise
        raise DataError(f"{error}, or {by_pandas(path, 'encoding=...')}") from error.__cause__


def find_separator(path: Path, not_this: str = "") -> str:
    """Return the separator that occurs in the first row, outside of quotes.

    Args:
        path: of the file.
        not_this: one that does not count.

    Raises:
        DataError: if several do.
    """
    bare = re.sub(r'"[^"]*"', "", _first_row(path))
    if bare[:4].lower() == "sep=":
        raise DataError(
            f"{path}: the first line names a separator and no columns; remove it, or"
            f" {by_pandas(path, f'sep={bare[4:5]!r}, skiprows=1')}"
        )
    found = [mark for mark in SEPARATORS if mark in bare and mark != not_this]
    if len(found) > 1:
        raise DataError(
            f"{path}: the first line has {' and '.join(map(repr, found))}, so it is unclear what"
            " separates the cells; put the cells that contain one between quotation marks, or"
            f" {by_pandas(path, f'sep={found[0]!r}')}"
        )
    return found[0] if found else NO_SEPARATOR


def _first_row(path: Path) -> str:
    """Return the lines of the first row: of quoted cells, there may be several."""
    result, quotes = list[str](), 0
    for line in _lines(path):
        if result or line.strip():
            result.append(line)
            quotes += line.count('"')
            if quotes % 2 == 0:
                break
    return "".join(result)


def _ragged(path: Path, line: int, count: int, width: int, header: bool) -> DataError:
    """Return the error about a row of another length than the first."""
    what = f"{path}, line {line}: {counted(count, 'cell')}, but the first line has {width}"
    remedy = "put a cell with a separator in it between quotation marks"
    if header and count == width + 1:
        remedy += f"; if the first column has no name, {by_pandas(path, 'index_col=0')}"
    return DataError(f"{what}; {remedy}")


# ---- the rows of any table ----


@dataclass(frozen=True)
class CellRows:
    """The rows of a table.

    Attributes:
        source: the file, or the type of another object, for messages.
        read: called for the line number and cells of each row of data.
        width: the number of cells of each row.
        header: the names of the columns as they are given, or None.
        line: of the first row.
        separator: of the cells.
        is_typed: whether a cell is a number or a text by its type, as in memory and in JSON; else
            all cells are texts, and those that can be are numbers.
    """

    source: object
    read: Callable[[], Iterator[tuple[int, list[Cell]]]]
    width: int
    header: list[str] | None
    line: int = 0
    separator: str = ""
    is_typed: bool = True

    def in_blocks(self) -> Iterator["_Block"]:
        """Yield the rows in blocks: of a file of texts as lines, else all in one."""
        if not isinstance(self.source, Path) or self.is_typed or self.width == 1:
            yield _Block([], "", self.read)
            return
        before, blocks = 0, _line_blocks(self.source)
        header_lines = 0 if self.header is None else self.line
        for block in blocks:
            if before < header_lines:
                skipped = min(header_lines - before, len(block))
                block, before = block[skipped:], before + skipped
            if not block:
                continue
            text = "".join(block)
            # a cell between quotation marks may go on in the next block
            rest = chain(block, chain.from_iterable(blocks)) if '"' in text else iter(block)
            is_named = self.header is not None
            cells = partial(
                _cells_in, self.source, rest, self.separator, is_named, self.width, before
            )
            yield _Block(block, text, cells, before + 1)
            before += len(block)

    @property
    def has_index(self) -> bool:
        """Whether the first column has no name, as an index that pandas writes."""
        return self.header is not None and self.header[0] in INDEX_NAMES

    @property
    def names(self) -> tuple[str, ...]:
        """The columns' names; one without a name, or without a header, is called by its number."""
        if self.header is None:
            return tuple(str(number) for number in range(1, self.width + 1))
        return tuple(name or f"column {number}" for number, name in enumerate(self.header, start=1))

    def check_header(self) -> None:
        """Refuse a first row that may be data: with a number or a date.

        Raises:
            DataError: with the cell.
        """
        for place, name in enumerate(() if self.is_typed else self.header or ()):
            if not is_missing(name) and (number(name) is not None or days(name) is not None):
                raise DataError(
                    f"{self.source}, line {self.line}, column {place + 1}: {shortened(repr(name))}"
                    " is no name of a column; if the table has no header, give header=False, and"
                    " else names that are no numbers, such as"
                    f" {shortened(repr(f'column {name}'))}"
                )


@dataclass(frozen=True)
class _Block:
    """Rows of a table that follow one another.

    Attributes:
        lines: a line for each row, with its end; or nothing.
        text: the lines as one.
        read: called for the line number and cells of each row.
        first: the number of the first line.
    """

    lines: list[str]
    text: str
    read: Callable[[], Iterator[tuple[int, list[Cell]]]]
    first: int = 0


def name_of(value: object) -> str:
    """Return a column's name as one line, without spaces around it."""
    return " ".join(str(value).strip().splitlines())


def _check_different(source: object, names: Sequence[str]) -> None:
    """Refuse two columns of one name.

    Raises:
        DataError: with the name.
    """
    places = dict[str, int]()
    for place, name in enumerate(names):
        if places.setdefault(name, place) != place:
            raise DataError(
                f"{source}: columns {places[name] + 1} and {place + 1} are both named"
                f" {shortened(repr(name))}; rename one of them"
            )


def delimited_rows(path: Path, rules: TableRules) -> CellRows:
    """Return the rows of a file whose cells stand between separators.

    Raises:
        DataError: for what is no table; see the module.
    """
    mark = rules.decimal or (rules.encoding[0].mark if rules.encoding else "")
    # Without a header the first row may be 1,5: of a table of one column, if that is a number.
    separator = find_separator(path, "" if rules.header or mark != "," else ",")

    def read() -> Iterator[tuple[int, list[Cell]]]:
        rows = read_cells(path, separator, rules.header)
        if rules.header:
            next(rows)
        return rows

    with closing(read_cells(path, separator, rules.header)) as rows:
        line, first = next(rows, (1, []))
        _, second = next(rows, (1, []))
    kinds = {cell.strip().lower() for cell in second} - {""}
    if rules.header and kinds and (kinds <= ORANGE_KINDS or _is_orange(path, kinds)):
        raise DataError(
            f"{path}: the second line names kinds of columns, as Orange's tables have; leave lines"
            f" 2 and 3 out, or {by_pandas(path, 'sep=..., skiprows=[1, 2]')}"
        )
    if not (second if rules.header else first):
        raise DataError(f"{path}: the table has no rows of data")
    header = [*map(name_of, first)] if rules.header else None
    return CellRows(path, read, len(first), header, line, separator, is_typed=False)


def _is_orange(path: Path, kinds: Collection[str]) -> bool:
    """Return whether some kinds are Orange's, in a file that has its suffix."""
    return path.name.removesuffix(".gz").endswith(".tab") and bool(ORANGE_KINDS & {*kinds})


def refuse_forms(path: Path, rules: TableRules, what: str) -> None:
    """Refuse rules of cells between separators for files that have names and numbers by themselves.

    Args:
        path: of the table.
        rules: of it; those of another table are not the user's.
        what: the kind of files.

    Raises:
        UsageError: with the option.
    """
    if rules.encoding:
        return
    for name, is_given in (("header", not rules.header), ("decimal", bool(rules.decimal))):
        if is_given:
            raise UsageError(f"{path}: {what} name their fields and have numbers; leave {name} out")


def unread_columns(names: Sequence[str], rules: TableRules) -> set[str]:
    """Return the columns whose cells do not count, so that they may hold anything."""
    if rules.encoding:
        return {*names} - {column.name for column in rules.encoding} - {rules.target}
    return {name for place, name in enumerate(names, 1) if {name, str(place)} & {*rules.drop}}


def is_frame(source: Any) -> bool:
    """Return whether an object is a DataFrame, of pandas or polars."""
    return hasattr(type(source), "columns") and hasattr(type(source), "to_numpy")


def rows_in(source: Any) -> CellRows:
    """Return the rows of a table in memory."""
    name = type(source).__name__
    is_columns = isinstance(source, Mapping) or hasattr(source, "columns")
    try:
        names = [*getattr(source, "columns", source)] if is_columns else None
        if names is not None:
            _check_different(name, [*map(name_of, names)])
        columns = (_cells_of(source[item]) for item in names or ())
        rows = [*zip(*columns, strict=True)] if names else [*source]
        if names is None and rows and isinstance(rows[0], Mapping):
            names = [*rows[0]]
            rows = [[row[item] for item in names] for row in rows]
        cells = [[*map(cell_of, _cells_of(row))] for row in rows]
        width = len(names or (cells[0] if cells else ()))
        if any(len(row) != width for row in cells):
            raise ValueError("rows of several lengths")
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the {name} is no table; give a DataFrame, a dictionary of columns of one length, or"
            " rows with the same columns"
        ) from error
    if not cells:
        raise DataError(f"{name}: the table has no rows of data")
    header = None if names is None else [*map(name_of, names)]
    return CellRows(
        name, lambda: ((line, [*row]) for line, row in enumerate(cells, 1)), width, header
    )


def _cells_of(values: Any) -> Any:
    """Return what iterates over values; a tensor's items are written as numbers."""
    return np.asarray(values) if hasattr(values, "__dlpack__") else values


def cell_of(value: Any) -> Cell:
    """Return a cell: a number of any type, or a text."""
    value = value[()] if isinstance(value, np.ndarray) and not value.ndim else value
    if value is None:
        return ""
    return value if is_number(value) else str(value)


# ---- which columns are read ----


@dataclass(frozen=True)
class _Plan:
    """What is read of a table.

    Attributes:
        places: of the features' columns.
        texts: those among them that are known to be texts.
        target: the place of the label; -1 for none.
        notes: sentences.
        weight: the place of the samples' weights; -1 for none.
    """

    places: list[int]
    texts: list[int]
    target: int
    notes: tuple[str, ...] = ()
    weight: int = -1

    @property
    def numbers(self) -> list[int]:
        """The places of cells that may be numbers: of features, and of weights."""
        return [*self.places, self.weight] if self.weight >= 0 else self.places


def _plan_training(rows: CellRows, rules: TableRules) -> _Plan:
    """Return what is read of a training table."""
    if rows.width < 2 and rows.is_typed:
        raise DataError(
            f"{rows.source}: {counted(rows.width, 'column')}; needs at least one feature, and the"
            " label"
        )
    if rows.width < 2:
        raise DataError(
            f"{rows.source}, line {rows.line}: {counted(rows.width, 'cell')}; needs at least one"
            " feature, then the label, with commas, semicolons, tabs or bars between them, or"
            f" {by_pandas(rows.source, 'sep=...')}"
        )
    rows.check_header()
    _check_different(rows.source, rows.names)
    place_of = _finder(rows.source, rows.names)
    dropped = {*map(place_of, rules.drop)}
    weight = place_of(rules.sample_weight) if rules.sample_weight else -1
    left = [place for place in range(rows.width) if place not in dropped and place != weight]
    target = place_of(rules.target) if rules.target else left[-1] if left else -1
    if weight in (target, *dropped) and weight >= 0:
        name = rows.names[weight]
        raise UsageError(
            f"{rows.source}: column {name!r} cannot be the weights of the samples, sample_weight,"
            f" and {'the label' if weight == target else 'left out'}; name another one"
        )
    return _Plan([place for place in left if place != target], [], target, weight=weight)


def _plan_other(rows: CellRows, rules: TableRules, labelled: bool) -> _Plan:
    """Return what is read of a table for which the training table's encoding holds."""
    encoding, names = rules.encoding, rows.names
    is_known = rows.header is not None and _has_names(encoding)
    if is_known:
        places = find_places(rows.source, names, encoding)
    else:
        rows.check_header()
        places = _places_in_order(rows, encoding)
    _check_different(rows.source, names)
    texts = [
        place
        for column, place in zip(encoding, places, strict=True)
        if column.kind in ("text", "words")
    ]
    notes = tuple[str, ...]()
    if not is_known and not rows.is_typed and _has_names(encoding):
        notes = ("the columns are taken in the order of the training table",)
    if not labelled:
        return _Plan(places, texts, -1, notes)
    features = {*places}
    spare = [place for place in range(rows.has_index, rows.width) if place not in features]
    if not spare:
        raise DataError(
            f"{rows.source}: each column is a feature of the model, so none is the label; for a"
            " table without labels call nnmpi.load(run).predict(table)"
        )
    if is_known and not rules.target:
        raise UsageError(
            f"{rows.source}: the model takes no column"
            f" {shortened(', '.join(names[place] for place in spare))}; name the label's,"
            f" target={names[spare[-1]]!r}"
        )
    if is_known or (rules.target.isdecimal() and not _has_names(encoding)):
        return _Plan(places, texts, _finder(rows.source, names)(rules.target), notes)
    if len(spare) > 1:
        raise DataError(
            f"{rows.source}: {len(spare)} columns are no features of the model, and without their"
            " names it is unclear which is the label; give the table a header"
        )
    return _Plan(places, texts, spare[0], notes)


def _finder(source: object, names: Sequence[str]) -> Callable[[str], int]:
    """Return what finds the place of a column by its name, or by its number from 1.

    A name goes first: columns of a DataFrame may be called 0, 1, 2 ...
    """
    find = _by_name(names)

    def place_of(name: str) -> int:
        if name in names:
            return names.index(name)
        if name.isdecimal() and 1 <= int(name) <= len(names):
            return int(name) - 1
        if (place := find(name)) < 0:
            first = shortened(", ".join(names), 1000)
            raise UsageError(f"{source} has no column {name!r}; its first line is {first}")
        return place

    return place_of


def _by_name(names: Sequence[str]) -> Callable[[str], int]:
    """Return what finds the place of a name, or else of one in other capitals; -1 without it."""
    places = {name: place for place, name in enumerate(names)}
    others = {name.lower(): place for name, place in places.items()}
    return lambda name: places.get(name, others.get(name.lower(), -1))


def _has_names(encoding: Encoding) -> bool:
    """Return whether the columns of the training table had names."""
    return any(column.name != str(column.place + 1) for column in encoding)


def find_places(source: object, names: Sequence[str], encoding: Encoding) -> list[int]:
    """Return where the columns of the rules are in another table: by name, in any capitals.

    Args:
        source: the table, for messages.
        names: of its columns.
        encoding: the rules.

    Raises:
        DataError: for a column that is missing.
    """
    places = [*map(_by_name(names), (item.name for item in encoding))]
    taken = dict[int, str]()
    for column, place in zip(encoding, places, strict=True):
        if place < 0:
            bare = "" if max(places) >= 0 else "; if it has no header, give header=False"
            raise DataError(f"{source} has no column {column.name!r}; {_needed(encoding)}{bare}")
        if taken.setdefault(place, column.name) != column.name:
            both = f"{taken[place]!r} and {column.name!r}"
            raise DataError(f"{source} has one column for {both}; {_needed(encoding)}")
    return places


def _places_in_order(rows: CellRows, encoding: Encoding) -> list[int]:
    """Return where the columns of the rules are in another table, without names.

    They stand in the order of the training table: the features alone, or in a file all its columns.

    Raises:
        DataError: for another number of columns.
    """
    columns = range(rows.has_index, rows.width)
    if isinstance(rows.source, Path) and len(columns) == encoding[0].of:
        return [columns[item.place] for item in encoding]
    if len(columns) != len(encoding):
        raise DataError(f"{rows.source}: {counted(len(columns), 'column')}; {_needed(encoding)}")
    return [*columns]


def _needed(encoding: Encoding) -> str:
    return f"the model needs {shortened(', '.join(item.name for item in encoding))}"


# ---- reading ----


def to_table(
    rows: CellRows, rules: TableRules = NO_RULES, labelled: bool = True, team: Team = ALONE
) -> Table:
    """Make a table of rows: its features, its labels, and what its columns are.

    Args:
        rows: of a file, or in memory; see `readers.read_table`.
        rules: how to read them.
        labelled: whether to read labels; a table without them needs the encoding of another one.
        team: makes the arrays.

    Raises:
        UsageError: for a column that the table does not have.
        DataError: for a damaged table, and for what is none by the rules of this module; the
            message names line and column.
    """
    if rules.decimal not in ("", *MARKS):
        raise UsageError(f"decimal={rules.decimal!r} is no decimal mark; give '.' or ','")
    encoding = rules.encoding
    plan = _plan_other(rows, rules, labelled) if encoding else _plan_training(rows, rules)
    read = _read(rows, plan, rules, team)
    names, training = rows.names, None
    if not encoding:
        training = _training_rows(read, rules)
    table = Table(
        rows.source,
        read.lines,
        names,
        rows.header is not None,
        rows.is_typed,
        read.matrix,
        read.texts,
        read.mark,
        training,
        tuple(read.labels),
        names[plan.target] if plan.target >= 0 else "",
        (*plan.notes, *read.notes),
    )
    places, notes = plan.places, list[str]()
    if not encoding:
        place_of = _finder(rows.source, names)
        documents = {*map(place_of, rules.text_columns)}
        kinds = _find_kinds(rows, plan, read, documents)
        encoding, notes = fit(table, kinds, rows.has_index)
        places = [column.place for column in encoding]
    features, about = encode(table, encoding, places, team)
    samples = _shaped(table, features, encoding, rules)
    table = replace(table, features=samples, weights=_weights_in(table, plan.weight))
    return replace(table, encoding=encoding, notes=(*table.notes, *notes, *about))


def _training_rows(read: "_Read", rules: TableRules) -> Integers | slice:
    """Return the rows of a table that will be in the training part."""
    if rules.split is None:
        return slice(None)
    classes = None
    if rules.stratify:
        keys = _ClassLabels(read.labels, read.mark).keys
        classes = np.array([keys[label] for label in read.labels])
    return split_indices(len(read.lines), *rules.split, classes)[0]


def _weights_in(table: Table, place: int) -> NDArray[np.float64] | None:
    """Return the weights of the samples in a column; None for none.

    Raises:
        DataError: for a cell that is no number from 0 on, or missing.
    """
    if place < 0:
        return None
    weights, texts = table.numbers[:, place].copy(), table.texts.get(place, {})
    for row in np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))[:1].tolist():
        given = texts.get(row, "" if np.isnan(weights[row]) else f"{weights[row]:.15g}")
        what = f"{shortened(repr(given))} is no weight" if given else "the weight is missing"
        raise DataError(
            f"{table.source}, line {table.lines[row]}, column {place + 1}: {what} of a sample; give"
            " a finite number from 0, or another column, sample_weight"
        )
    return weights


@dataclass
class _Read:
    """The cells of a table.

    Attributes:
        width: the number of columns.
        mark: the decimal mark.
        values: numbers; NaN for a missing cell and for a text.
        texts: {column: {row: text}}.
        lines: the line number of each row.
        labels: of each row.
        unlabelled: how many rows were left out, which have no label.
        shown: by `mark_of`: where it is shown.
    """

    width: int
    mark: str
    values: Spool
    texts: dict[int, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    lines: "array[int]" = field(default_factory=lambda: array("q"))
    labels: list[str] = field(default_factory=list)
    unlabelled: int = 0
    shown: dict[str, str] = field(default_factory=dict)

    @property
    def matrix(self) -> NDArray[np.float64]:
        return self.values.numbers.reshape(len(self.lines), self.width)

    def note_mark(self, line: int, place: int, cell: str) -> None:
        """Note the decimal mark that a cell shows."""
        if ("." in cell or "," in cell) and (mark := mark_of(cell)):
            sign = mark + ("," if "," in cell else ".") if mark == "?" else mark
            if sign not in self.shown:
                where = f"line {line}, column {place + 1}: {shortened(repr(cell))}"
                self.shown[sign] = where

    @property
    def notes(self) -> list[str]:
        told = f"{counted(self.unlabelled, 'row')} without a label left out"
        return [told] * bool(self.unlabelled)


def _labelled(
    rows: Iterable[tuple[int, list[Cell]]], plan: _Plan, mark: str
) -> Iterator[tuple[int, str | None, list[Cell]]]:
    """Yield the line, label and cells of each row; the label is None if there is none."""
    for line, cells in rows:
        label: str | None = ""
        if plan.target >= 0:
            label = spelled(cells[plan.target], mark)
            if label.strip().lower() in NO_LABEL:
                label = None
        yield line, label, cells


def _read(rows: CellRows, plan: _Plan, rules: TableRules, team: Team) -> _Read:
    """Return the cells of a table.

    Raises:
        DataError: for a table without rows, and one whose decimal mark is unclear.
    """
    known = rules.decimal or (rules.encoding[0].mark if rules.encoding else "")
    read = _Read(rows.width, known or ".", team.spool())
    finds_mark = not rows.is_typed and not known
    stays_text = rows.is_typed and not rules.encoding
    features = {*plan.numbers}
    unread = [place for place in range(rows.width) if place not in features]
    spellings = dict[str, str]()  # of equal labels one object is kept
    for block in rows.in_blocks():
        if block.lines and _read_plain(block, rows, plan, read, spellings, finds_mark):
            continue
        for line, label, cells in _labelled(block.read(), plan, read.mark):
            if label is None:
                read.unlabelled += 1
                continue
            row = len(read.lines)
            read.lines.append(line)
            read.labels.append(spellings.setdefault(label, label))
            if finds_mark and plan.target >= 0:
                read.note_mark(line, plan.target, label)
            for place in unread:
                cells[place] = UNREAD
            for place in plan.texts:
                if not is_missing(text := spelled(cells[place], read.mark)):
                    read.texts[place][row] = text
                cells[place] = UNREAD
            # where a row before had a text, this one has
            numbers = [] if stays_text or read.texts else _plain_numbers(cells, read)
            if finds_mark and not (numbers and "." in read.shown):
                for place in plan.numbers:
                    read.note_mark(line, place, cells[place])
            read.values.extend(numbers or _numbers_of(cells, read, row, stays_text))
    if not read.lines:
        name = rows.names[plan.target]
        what = f"no row has a label in column {name!r}; give another column, by target"
        raise DataError(f"{rows.source}: {what if read.unlabelled else 'no rows of data'}")
    if finds_mark:
        _find_mark(rows, read)
    _check_labels(rows, read)
    return read


def _read_plain(
    block: _Block,
    rows: CellRows,
    plan: _Plan,
    read: _Read,
    spellings: dict[str, str],
    finds_mark: bool,
) -> bool:
    """Read lines of nothing but numbers by NumPy's reader, which is three times as fast.

    Returns:
        whether they are such; else nothing was read.
    """
    text, separator, target = block.text, rows.separator, plan.target
    if read.mark != "." or plan.texts or '"' in text or "_" in text or not text.isascii():
        return False
    if finds_mark and separator != "," and "." not in read.shown and ("." in text or "," in text):
        return False
    characters = np.frombuffer(text.encode("ascii"), np.uint8)
    ends = np.flatnonzero(characters == ord("\n"))
    if len(ends) + (not text.endswith("\n")) != len(block.lines):
        return False  # lines that end with a carriage return
    separators = np.flatnonzero(characters == ord(separator))
    before = np.searchsorted(separators, ends)  # separators before each line's end
    widths = np.diff(before, prepend=0, append=len(separators))[: len(block.lines)] + 1
    if np.any(widths != rows.width):
        return False
    labels = [""] * len(block.lines)
    if target == rows.width - 1:
        labels = [line[line.rindex(separator) + 1 :].rstrip("\r\n") for line in block.lines]
    elif target >= 0:
        labels = [line.split(separator, target + 1)[target] for line in block.lines]
    if target >= 0 and any(label.strip().lower() in NO_LABEL for label in {*labels}):
        return False
    try:
        values = np.loadtxt(
            block.lines, delimiter=separator, comments=None, usecols=plan.numbers, ndmin=2
        )
    except ValueError:
        return False
    if len(values) != len(block.lines):  # a line was blank
        return False
    full = np.full((len(values), rows.width), nan)
    full[:, plan.numbers] = values
    read.values.extend(full.reshape(-1))
    read.lines.extend(range(block.first, block.first + len(values)))
    read.labels += [spellings.setdefault(label, label) for label in labels]
    return True


def _plain_numbers(cells: Sequence[Cell], read: _Read) -> list[float]:
    """Return the numbers of a row that has nothing else, the fastest way; else nothing."""
    try:
        joined = "".join(cells)
        if read.mark == "." and joined.isascii() and "_" not in joined:
            return [*map(float, cells)]
    except (TypeError, ValueError):  # a number in memory; a text, or a missing cell
        pass
    return []


def _numbers_of(cells: Sequence[Cell], read: _Read, row: int, stays_text: bool) -> list[float]:
    """Return the numbers of a row, NaN where there is none, and note its texts."""
    result = list[float]()
    for place, cell in enumerate(cells):
        if stays_text and isinstance(cell, str):
            value = nan if is_missing(cell) else None
        else:
            value = number(cell, read.mark)
        if value is None:
            read.texts[place][row] = cell
        result.append(nan if value is None else value)
    return result


# ---- the decimal mark ----


def _find_mark(rows: CellRows, read: _Read) -> None:
    """Find the decimal mark that the numbers of a training table show, and read them by it.

    Raises:
        DataError: if they show two, or one that may stand between thousands.
    """
    shown, remedy = read.shown, "name the decimal mark, decimal='.' or decimal=','"
    if "." in shown and "," in shown:
        raise DataError(
            f"{rows.source}: two decimal marks are shown, in {shown['.']} and {shown[',']};"
            f" {remedy}"
        )
    if "." in shown or rows.separator == ",":  # beside commas, a point is none between thousands
        shown.pop("?.", None)
    if "," in shown:
        shown.pop("?,", None)
    for sign, arguments in (
        ("?,", "thousands=','"),
        ("?.", "decimal=',', thousands='.'"),
        (MARKS, "thousands=..."),
    ):
        if sign in shown:
            raise DataError(
                f"{rows.source}, {shown[sign]} may have a mark between thousands, which is not"
                f" read; {remedy}, or {by_pandas(rows.source, f'sep=..., {arguments}')}"
            )
    if "," not in shown:
        return
    if rows.header is None and rows.separator == ",":
        raise DataError(
            f"{rows.source}, {shown[',']}: a table without a header cannot have commas both in"
            " numbers and between cells; give the columns names in a first row"
        )
    read.mark, matrix = ",", read.matrix
    for place, texts in read.texts.items():
        for row, text in [*texts.items()]:
            if (value := number(text, ",")) is not None:
                matrix[row, place] = value
                del texts[row]


# ---- what the columns are ----


def _find_kinds(
    rows: CellRows, plan: _Plan, read: _Read, documents: Collection[int]
) -> dict[int, ColumnKind]:
    """Return the kind of each column of a training table; of texts, note all cells as written."""
    counts = (~np.isnan(read.matrix)).sum(axis=0).tolist()
    kinds: dict[int, ColumnKind] = {
        place: "words" if place in documents else kind_of(counts[place], _values(read, place))
        for place in plan.places
    }
    _check_first_row(rows, plan, read, kinds)
    mixed = [place for place, kind in kinds.items() if kind in ("text", "words") and counts[place]]
    row = 0
    for _, label, cells in _labelled(rows.read(), plan, read.mark) if mixed else ():
        if label is None:
            continue
        for place in mixed:
            if not is_missing(text := spelled(cells[place], read.mark)):
                read.texts[place][row] = text
        row += 1
    return kinds


def _values(read: _Read, place: int) -> Collection[str]:
    return read.texts[place].values() if place in read.texts else ()


def _check_first_row(
    rows: CellRows, plan: _Plan, read: _Read, kinds: Mapping[int, ColumnKind]
) -> None:
    """Refuse a first row of texts that may be data: one occurs again below, and none is above
    numbers or dates.

    Raises:
        DataError: with the text.
    """
    header, has_numbers = rows.header, np.any(~np.isnan(read.matrix), axis=0).tolist()
    if header is None or rows.is_typed:
        return
    for place, kind in kinds.items():
        if header[place] and (kind == "date" or (kind == "number" and has_numbers[place])):
            return
    if all(number(label, read.mark) is not None for label in {*read.labels}):
        return
    for place in (*plan.places, plan.target):
        below = read.labels if place == plan.target else _values(read, place)
        if header[place] and any(text.strip() == header[place] for text in below):
            raise DataError(
                f"{rows.source}, line {rows.line}: {shortened(repr(header[place]))} occurs again"
                f" below in column {place + 1}, and may be no name; if the table has no header,"
                " give header=False, and else rename the column"
            )


def _check_labels(rows: CellRows, read: _Read) -> None:
    """Take the spaces around labels away; see `check_spelling`.

    Raises:
        DataError: for a label that is wrong.
    """
    spellings, bare = (
        dict[str, str](),
        {label: label.strip() for label in dict.fromkeys(read.labels)},
    )
    for label in bare:
        is_number = number(label, read.mark) is not None
        if not is_number and (what := check_spelling(label, spellings)):
            line = read.lines[read.labels.index(label)]
            raise DataError(f"{rows.source}, line {line}: the label {what}")
    if any(label != stripped for label, stripped in bare.items()):
        read.labels = [bare[label] for label in read.labels]


# ---- a data set ----


def _shaped(
    table: Table, features: NDArray[np.float32], encoding: Encoding, rules: TableRules
) -> NDArray[Any]:
    """Return features in the shape of a sample; pixels as bytes."""
    shape = rules.sample_shape
    if not shape:
        return features
    if features.shape[1] != prod(shape):
        odd = [column.place for column in encoding if column.kind != "number"]
        remedy = f", such as {table.dropping(odd)}" if 0 < len(odd) <= MOST_ADVISED else ""
        raise UsageError(
            f"{table.source} has {counted(features.shape[1], 'feature')}, but samples of"
            f" {' x '.join(map(str, shape))} have {prod(shape)}; give another shape, or leave"
            f" columns out{remedy}"
        )
    samples = features.reshape(len(features), *shape)
    if rules.as_bytes is False or (rules.as_bytes is None and len(shape) != 3):
        return samples
    with np.errstate(invalid="ignore"):
        pixels = samples.astype(np.uint8)
    fits = pixels == samples
    if rules.as_bytes and not fits.all():
        row = int(np.argwhere(~fits)[0, 0])
        raise DataError(
            f"{table.source}, line {table.lines[row]}: a pixel is none of 0..255, as all of the"
            " training table are; give pixels of the same kind"
        )
    return pixels if fits.all() else samples


class _ClassLabels:
    """The different labels of a table, as names of classes.

    Args:
        labels: of the rows.
        mark: the decimal mark.
        class_names: of the training table, for another one; else empty.

    Attributes:
        numbers: each label as a number; None for a text.
        is_numeric: whether all are numbers.
        spelled: each label as its class is called: 1.0 is 1.
        keys: by what each label is compared with others.
    """

    def __init__(self, labels: Iterable[str], mark: str, class_names: tuple[str, ...] = ()) -> None:
        self.numbers = {label: number(label, mark) for label in dict.fromkeys(labels)}
        self.is_numeric = all(
            _is_class_number(label, mark) for label in class_names or self.numbers
        )
        self.spelled = {
            label: _as_integer(label, value) if self.is_numeric else label
            for label, value in self.numbers.items()
        }
        self.keys = {label: class_key(text) for label, text in self.spelled.items()}


def _is_class_number(label: str, mark: str) -> bool:
    """Return whether a label is the number of a class, none with a zero in front, and no bool."""
    has_zero = label[0] == "0" and label[1:2].isdigit()
    return number(label, mark) is not None and label.lower() not in BOOLS and not has_zero


def _as_integer(label: str, value: float | None) -> str:
    """Return a label as an integer, if it is one: from its digits, since a float has 53 bits."""
    if label.lstrip("+-").isdecimal():
        return str(int(label))
    return str(int(value)) if value is not None and isfinite(value) else label


def to_dataset(
    table: Table,
    name: str,
    class_names: tuple[str, ...] = (),
    predicts: LabelKind = "classes",
    is_trained_on: bool = True,
) -> Dataset:
    """Convert a table to a data set.

    Args:
        table: a result of `to_table`.
        name: of the data set.
        class_names: of the training table, if this is a test table; else empty.
        predicts: the kind of labels; "any" means quantities if a label has a fraction.
        is_trained_on: whether its labels are to be learned: one class teaches nothing.
    """
    labels = _ClassLabels(table.labels, table.mark, class_names)
    numbers, is_numeric = labels.numbers, labels.is_numeric
    # NaN counts as a fraction, too: nan % 1 is nan, which is true
    fraction = next((label for label, value in numbers.items() if value and value % 1), None)
    y: NDArray[Any]
    if predicts == "quantities" or (predicts == "any" and is_numeric and fraction is not None):
        y, about = _quantities(table, numbers), {"classes": 0, **table.about}
    elif is_numeric and fraction is not None:
        raise DataError(
            f"{table.source}: label {shortened(fraction)!r} is not a whole number; {HINT}"
        )
    else:
        is_first = is_trained_on and not class_names  # so its labels say which classes there are
        y, about = _classes(table, labels, class_names, is_first)
    scale = 1 / 255 if table.features.dtype == np.uint8 else 1.0
    return Dataset(name, table.features, y, scale=scale, **about)


def _quantities(table: Table, numbers: Mapping[str, float | None]) -> NDArray[np.float64]:
    """Return the labels as numbers.

    Raises:
        DataError: for one that is none, or not finite.
    """
    # NumPy converts None to NaN
    quantities = np.array([numbers[label] for label in table.labels], np.float64)
    for (row,) in narrowed(quantities)[1]:
        label, is_text = shortened(table.labels[row]), numbers[table.labels[row]] is None
        remedy = f"predict a class, by predicts='classes', or {table.other_target()}"
        raise DataError(
            f"{table.source}, line {table.lines[row]}: the target {label!r} is not a finite"
            f" number; {remedy if is_text else 'leave the row out'}"
        )
    return quantities


def _classes(
    table: Table, labels: _ClassLabels, known_names: Sequence[str], is_first: bool
) -> tuple[Integers, dict[str, Any]]:
    """Return the labels as numbers of classes, and what the data set keeps of these and the table.

    Args:
        table: the table.
        labels: of its rows.
        known_names: of the classes of the training table; empty to find them.
        is_first: whether the labels are to be learned: one class teaches nothing.

    Raises:
        DataError: for labels that are no classes, or none of those of the training table.
    """
    key = int if labels.is_numeric else str
    known = known_names or sorted({*labels.spelled.values()}, key=key)
    names = {class_key(label): label for label in reversed(known)}  # of two spellings the first
    if is_first and len(names) == 1:
        raise DataError(
            f"{table.source} has only one class, {shortened(known[0])!r}, so there is nothing to"
            f" predict; {table.other_target()}"
        )
    class_of = {key: number for number, key in enumerate(reversed(names))}
    if unknown := [label for label in labels.numbers if labels.keys[label] not in class_of]:
        raise DataError(
            f"{table.source}: label {shortened(unknown[0])!r} is not among the training labels"
            f" {[*known]}"
        )
    classes = {label: class_of[key] for label, key in labels.keys.items()}
    y = np.array([classes[label] for label in table.labels])
    about = {
        "classes": len(names),
        "class_names": tuple(reversed(names.values())),
        **table.about,
    }
    if is_first:
        remedy = HINT if labels.is_numeric else table.other_target()
        about["notes"] += judge_classes(table.source, f"column {table.target!r}", y, remedy)[1]
    return y, about


def refuse_rules(what: str, rules: TableRules) -> None:
    """Refuse rules of tables for another data set; those of a trained model do not apply to it.

    Raises:
        UsageError: with the name of the rule.
    """
    names = "target drop text_columns sample_shape class_names decimal header sample_weight"
    for name in names.split():
        if getattr(rules, name) != getattr(NO_RULES, name) and not rules.encoding:
            raise UsageError(f"{what} is no table with columns to choose; leave {name} out")
