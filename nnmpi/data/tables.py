"""Tables and arrays: CSV files, tables in memory and NumPy archives.

    sepal_length_cm,petal_length_cm,species      a header, if something shows that it is one
    5.1,1.4,setosa                               features, and the label in the last column or in
    7.0,4.7,versicolor                           the one named `target`

Cells are separated by commas, semicolons, tabs, bars or spaces. The first row is names if a text
stands above numbers, or if its cells do not occur below them. Features may be numbers, dates and
texts: see `columns`; what a cell says: see `cells`. A first column that only numbers the rows is
left out, and so are rows without a label. Orange's .tab files have two more header lines.

A decimal mark belongs to a file: columns of numbers show it, by cells that only one mark reads.

Labels of a table are text or integers. The classes are the labels that occur in the training table,
sorted: integers need not begin at 0 nor be consecutive. `class_names` maps classes to labels. With
predicts="quantities", the label is a number to predict.

An .npz holds x and y; or x_train, y_train and perhaps x_test and y_test, or another name of a
held-out part (`dataset.HELD_OUT`), in any capitals.

    x    (n, ...), any real dtype: uint8 stays uint8 with scale 1/255, the rest becomes float32.
         3-D quantities are grayscale images and get a channel axis.
         Tokens: uint16 or uint32, or other integers (n, time) with several labels per sample.
    y    (n,) or (n, 1): integers from 0 on
         (n, ...): several labels per sample; -1 does not count
         any real dtype with predicts="quantities"
"""

import csv
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import nan, prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.base.errors import DataError, UsageError, counted, shortened
from nnmpi.base.files import check_unpacked, foreign, opened, read_lines
from nnmpi.data.cells import BOOLS, MARKS, amount, class_key, mark_of, number
from nnmpi.data.columns import Encoding, Table, encode, find_places, finder, fit
from nnmpi.data.dataset import (
    HELD_OUT,
    MISSING,
    TOKEN_TYPES,
    TRAIN,
    Dataset,
    LabelKind,
    as_float32,
    judge_classes,
    narrowed,
    split_indices,
)

TRAIN_PARTS = *(f"_{part}" for part in TRAIN), ""
TEST_PARTS = tuple(f"_{part}" for part in HELD_OUT)
PARTS = tuple(f"{item}{part}" for part in (*TRAIN_PARTS, *TEST_PARTS) for item in "xy")
OTHER_SCALE = 100.0  # images whose largest numbers differ by this factor have different units
HINT = "to predict numbers, give predicts='quantities'"
ENDINGS = (".csv", ".tsv", ".tab", ".data")
# what reads files of other kinds, by their suffix
READERS = dict(
    line.split(maxsplit=1)
    for line in """\
parquet pandas.read_parquet({})
feather pandas.read_feather({})
arrow pandas.read_feather({})
orc pandas.read_orc({})
json pandas.read_json({})
jsonl pandas.read_json({}, lines=True)
xml pandas.read_xml({})
xlsx pandas.read_excel({})
xls pandas.read_excel({})
xlsm pandas.read_excel({})
ods pandas.read_excel({})
h5 pandas.read_hdf({})
hdf5 pandas.read_hdf({})
hdf pandas.read_hdf({})
dta pandas.read_stata({})
sav pandas.read_spss({})
sas7bdat pandas.read_sas({})
xpt pandas.read_sas({})
pkl pandas.read_pickle({})
pickle pandas.read_pickle({})
arff pandas.DataFrame(scipy.io.arff.loadarff({})[0])
mat pandas.DataFrame(scipy.io.loadmat({})['x'])
npy pandas.DataFrame(numpy.load({}))""".splitlines()
)
SEPARATORS = "\t;|, "  # in this order: a table by semicolons may have a comma in each row, too
SNIFFED_LINES = 50
MARK_ROWS = 1000  # that show the decimal mark; more are read only if they do not
FEW = 20  # one cell of so many may be odd
CELL_BYTES = 2**30  # the longest cell of a table, beyond the 128 KiB of Python's default
NO_LABEL = MISSING - {"none", "-", "--", "."}  # these may be classes
YEARS = 1500, 2100  # numbers that may be names of columns
# in Orange's second header line
ORANGE_KINDS = frozenset(["c", "d", "s", "t", "continuous", "discrete", "string", "time"])


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
        decimal: the decimal mark, "." or ","; empty to find it.
        split: the share of the test part and the seed, of a training table that will be split.
    """

    target: str = ""
    drop: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    sample_shape: tuple[int, ...] = ()
    encoding: Encoding = ()
    as_bytes: bool | None = None
    class_names: tuple[str, ...] = ()
    decimal: str = ""
    split: tuple[float, int] | None = None


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its suffix."""
    return path.name.lower().removesuffix(".gz").endswith(ENDINGS)


def other_kind(path: Path) -> UsageError:
    """Return the error for a file of another kind, with the line of code that reads it."""
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    code = READERS.get(kind, "pandas.read_csv({}, sep=None, engine='python')").format(
        repr(str(path))
    )
    return UsageError(
        f"{path}: .{kind} files are not read; write a table, {code}.to_csv('table.csv',"
        f" index=False), or in a program train on nnmpi.data.Loader({code}, 32); read are"
        f" {', '.join(ENDINGS)}, .npz and folders, and of texts .txt, .jsonl and .csv"
    )


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's line number and cells, separated by commas; blank lines are skipped."""
    width = 0
    for line, cells in _split(path, read_lines(path), ","):
        width = width or len(cells)
        _check_width(path, line, cells, width)
        yield line, cells


def _check_width(source: object, line: int, cells: Sequence[str], width: int) -> None:
    if len(cells) != width:
        raise DataError(
            f"{source}, line {line}: {counted(len(cells), 'cell')}, but the first line has {width};"
            " put a cell with a separator in it between quotation marks"
        )


def _split(
    path: Path, lines: Iterable[str], separator: str, strict: bool = True
) -> Iterator[tuple[int, list[str]]]:
    """Yield the line number and the cells of each row that is not blank."""
    csv.field_size_limit(CELL_BYTES)
    if separator == " ":
        lines = (" ".join(line.split()) for line in lines)
    reader = csv.reader(lines, strict=strict, delimiter=separator, skipinitialspace=True)
    try:
        for cells in reader:
            if cells[1:] or any(map(str.strip, cells)):
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def find_separator(path: Path, lines: Iterable[str]) -> str:
    """Return the separator that cuts the first lines into equally many cells; else the comma."""
    first = [*islice(filter(str.strip, lines), SNIFFED_LINES)]
    if any("\0" in line for line in first):
        raise DataError(f"{path} has zero bytes, as UTF-16 text has; save it as UTF-8")
    if path.suffix == ".tab" and "\t" in "".join(first[:1]):
        return "\t"
    for separator in SEPARATORS:
        rows = [cells for _, cells in _split(path, first, separator, strict=False)]
        # the last line may be in the middle of a cell
        widths = [len(cells) for cells in rows[: len(rows) - (len(first) == SNIFFED_LINES)]]
        if len({*widths[1:]}) == 1:
            names, width = rows[0], widths[1]
            if width > 1 and (len(names) in (width, width - 1) or _counts(names, width)):
                return separator
        elif len(widths) == 1 < widths[0]:
            return separator
    return ","


def find_mark(
    source: object,
    separator: str,
    rows: Iterable[tuple[int, list[str]]],
    places: Collection[int],
    known: str = "",
) -> tuple[str, list[str]]:
    """Return the decimal mark of a file, and a sentence if its cells did not show it.

    A column of numbers shows it. One number that only the other mark reads is a typing error beside
    others that both read. Without a sign of it, commas between cells leave the point.

    Args:
        source: for messages.
        separator: of the cells.
        rows: line numbers and cells.
        places: of the columns that may show it.
        known: the mark of the training table, which decides if none is shown; empty for none.

    Raises:
        DataError: if two columns show different ones, or numbers read as two and none is shown.
    """
    counts = {place: Counter[str]() for place in places}
    found, sure = dict[tuple[int, str], str](), set[tuple[int, str]]()

    def shown() -> dict[str, str]:
        """Return where each mark is shown, and where both would do."""
        result = dict[str, str]()
        for (place, mark), where in found.items():
            count, is_one = counts[place], mark in MARKS
            odd = count["text"] + is_one * count[MARKS[mark == MARKS[0]]]
            # between commas, a comma within a cell is rather one between thousands
            likely = count[mark] * (1 if mark == separator else FEW) >= count["both"]
            if odd * FEW <= count.total() and (likely or (place, mark) in sure):
                result.setdefault(mark, where)
        return result

    for at, (line, cells) in enumerate(rows):
        row = "".join(cells)
        for place in places if "." in row or "," in row else ():
            what = mark_of(cell := cells[place]) if place < len(cells) else ""
            if not at and what == "text":
                continue
            counts[place][what] += 1
            # 1.200,5 and 0,5 leave no doubt
            if what in (*MARKS,) and (re.match("[+-]?0", cell) or {*MARKS} <= {*cell}):
                sure.add((place, what))
            if what not in ("", "text") and (place, what) not in found:
                values = [item[0] for mark in MARKS if (item := amount(cell, mark))]
                either = f" is {' or '.join(f'{value:.15g}' for value in values)}"
                where = f"line {line}, column {place + 1}: {cell!r}"
                found[place, what] = where + either * (what == "both")
        if at % MARK_ROWS == MARK_ROWS - 1 and {*shown()} & {*MARKS}:
            break
    remedy = "name the decimal mark of the table, decimal='.' or decimal=','"
    result = shown()
    either = result.pop("both", "")
    if len(result) > 1:
        signs = " and ".join(result.values())
        raise DataError(f"{source}: the decimal marks differ, in {signs}; {remedy}")
    if either and not result and not known and separator != ",":
        raise DataError(f"{source}, {either}; {remedy}")
    told = f"{either}; the training table's decimal mark, {known!r}, is taken"
    return next(iter(result), known or "."), [told] * bool(either and known and not result)


def _counts(first: Sequence[str], width: int) -> bool:
    """Return whether a first line has scikit-learn's form: rows, features, two or more classes."""
    return len(first) > 3 and first[0].isdecimal() and first[1] == str(width - 1)


def read_csv(source: Any, rules: TableRules = TableRules(), labelled: bool = True) -> Table:
    """Parse a table: a CSV file, plain or .gz, in UTF-8, or else in Windows' code page 1252.

    Args:
        source: the file; or, of a trained model, a DataFrame, a mapping of columns, mappings of
            cells, or rows.
        rules: how to read it.
        labelled: whether to read labels; a table without them needs the encoding of another one.

    Raises:
        UsageError: for a column that the table does not have.
        DataError: for a damaged table; the message names line and column.
    """
    if rules.decimal not in ("", *MARKS):
        raise UsageError(f"decimal={rules.decimal!r} is no decimal mark; give '.' or ','")
    rows = _rows_of(source) if isinstance(source, Path) else _rows_in(source, rules)
    table, places = _parse(rows, rules, labelled)
    encoding, notes = rules.encoding, list[str]()
    if not encoding:
        documents = [_place(table.source, table.names, name) for name in rules.text_columns]
        encoding, notes = fit(table, places, documents)
        places = [column.place for column in encoding]
    features, about = encode(table, encoding, places)
    samples = _shaped(table, features, encoding, rules)
    return replace(table, encoding=encoding, features=samples, notes=(*table.notes, *notes, *about))


@dataclass(frozen=True)
class _Rows:
    """The rows of a table, as texts.

    Attributes:
        source: the file, for messages.
        read: called for the line number and cells of each row; the first one may be names.
        separator: of the cells.
        is_named: whether the first row is names; None if only the others can tell.
        class_names: in scikit-learn's first line.
        roles: of the columns, in Orange's third line.
        mark: the decimal mark; empty to find it.
    """

    source: object
    read: Callable[[], Iterator[tuple[int, list[str]]]]
    separator: str = ""
    is_named: bool | None = None
    class_names: Sequence[str] = ()
    roles: Sequence[str] = ()
    mark: str = ""


def _rows_of(path: Path) -> _Rows:
    separator = find_separator(path, read_lines(path, "surrogateescape"))

    def read(begin: int = 0) -> Iterator[tuple[int, list[str]]]:
        return islice(_split(path, read_lines(path, "surrogateescape"), separator), begin, None)

    head = [*islice(read(), 3)]
    if not head:
        raise DataError(f"{path}: the table has no rows of data")
    (_, first), (line, second), (after, third) = (head * 3)[:3]
    if _counts(first, len(second)) and sum(1 for _ in read()) == int(first[0]) + 1:
        return _Rows(path, lambda: read(1), separator, class_names=first[2:])
    if len(first) == len(second) - 1 and None in {*map(number, first)}:
        first.insert(0, "")  # R's names of rows have no name
    if path.suffix == ".tab" and {*map(str.strip, second)} & ORANGE_KINDS:
        used = 2 + (after == line + 1)  # Orange's third line may be blank
        roles = [cell[:1].lower() for cell in third * (used - 2)]
        return _Rows(path, lambda: chain(head[:1], read(used)), separator, True, roles=roles)
    return _Rows(path, lambda: chain(head[:1], read(1)), separator)


def _rows_in(source: Any, rules: TableRules) -> _Rows:
    """Return the rows of a table in memory; its numbers are written with the decimal mark.

    The mark is the training table's, so that no row depends on the others.
    """
    name, mark = type(source).__name__, rules.decimal or rules.encoding[0].mark or "."
    is_columns = isinstance(source, Mapping) or hasattr(source, "columns")
    try:
        names = [*getattr(source, "columns", source)] if is_columns else None
        columns = (_cells_of(source[item]) for item in names or ())
        rows = [*zip(*columns, strict=True)] if names else [*source]
        if names is None and rows and isinstance(rows[0], Mapping):
            names = [*rows[0]]
            rows = [[row[item] for item in names] for row in rows]
        lines = [[*_cells_of(row)] for row in ([] if names is None else [names]) + rows]
    except (TypeError, ValueError, KeyError) as error:
        raise DataError(
            f"the {name} is no table; give a DataFrame, a dictionary of columns of one length, or"
            " rows with the same columns"
        ) from error

    def text(cell: Any) -> str:
        # Decimal and arrays of one number are no Real
        is_number = hasattr(cell, "__float__") and not isinstance(cell, str)
        return str(cell).replace(".", mark) if is_number else str(cell)

    texts = [(line, [*map(text, cells)]) for line, cells in enumerate(lines, names is None)]
    return _Rows(name, lambda: iter(texts), is_named=names is not None, mark=mark)


def _cells_of(values: Any) -> Any:
    """Return what iterates over values; a tensor's items are written as numbers."""
    return np.asarray(values) if hasattr(values, "__dlpack__") else values


def _parse(rows: _Rows, rules: TableRules, labelled: bool) -> tuple[Table, list[int]]:
    """Return a table without features, and the places of its columns."""
    path, encoding, is_named = rows.source, rules.encoding, rows.is_named
    begin, first = next(rows.read(), (1, []))
    width, target, notes, is_known = len(first), -1, list[str](), False
    if width < 1 + (labelled and not encoding):
        raise DataError(
            f"{path}, line {begin}: {counted(width, 'cell')}; needs at least one feature, then the"
            " label, with commas, semicolons, tabs, bars or spaces between them"
        )
    figures = [*map(number, first)]
    if width > 2 and is_named is None and figures == [*range(width)]:
        raise DataError(
            f"{path}, line {begin}: {first[0]}, {first[1]} ... seems to be a header, as pandas"
            " writes it for columns without names; write the table with to_csv(path, index=False,"
            " header=False), or give the columns names"
        )
    names = _unique(first)
    if encoding:
        left, is_known, is_named = find_places(path, first, names, encoding, is_named)
        unread = {*range(width)} - {*left}
        if labelled and not unread:
            raise DataError(
                f"{path}: each column is a feature of the model, so none is the label; for a table"
                " without labels call nnmpi.load(run).predict(table)"
            )
        if labelled and is_known and not rules.target:
            spare = [names[place] for place in sorted(unread)]
            raise UsageError(
                f"{path}: the model takes no column {shortened(', '.join(spare))}; name the"
                f" label's, target={spare[-1]!r}"
            )
        if not is_known and rows.is_named is not False:
            notes.append("the columns are taken in the order of the training table")
        free = sorted(unread)
        voters = [
            place
            for column, place in zip(encoding, left, strict=True)
            if column.kind in ("number", "date")
        ]
    else:
        if not first[0].strip() and figures[1:] in ([*range(width - 1)], [*range(1, width)]):
            is_named = width > 2 or is_named  # an index without a name, as pandas and R write it
        unread = {_place(path, names, name) for name in rules.drop}
        unread |= {place for place, role in enumerate(rows.roles) if role in ("m", "i")}
        free = left = voters = [place for place in range(width) if place not in unread]
        asked = {rules.target, *rules.drop, *rules.text_columns}
        is_named = is_named or any(not name.isdecimal() for name in asked & {*names}) or None
    if labelled and free:
        target = rows.roles.index("c") if "c" in rows.roles else free[-1]
        if rules.target and (is_known or not encoding):
            target = _place(path, names, rules.target)
        left = [place for place in left if place != target]
    mark = rules.decimal or rows.mark
    if not mark:
        known = encoding[0].mark if encoding else ""
        mark, about = find_mark(path, rows.separator, rows.read(), {*voters, target} - {-1}, known)
        notes += about
    unread -= {target}
    values, texts = array("d"), tuple(dict[int, str]() for _ in range(width))
    labels, lines, unlabelled = list[str](), list[int](), 0
    for line, cells in rows.read():
        _check_width(path, line, cells, width)
        label = _decoded(cells[target].strip()) if labelled else ""
        if labelled and labels and label.lower() in NO_LABEL:
            unlabelled += 1
            continue
        for place in unread:
            cells[place] = ""
        numbers = [number(cell, mark) for cell in cells]
        if None in numbers:
            for place, value in enumerate(numbers):
                if value is None:
                    texts[place][len(labels)] = _decoded(cells[place].strip())
                    numbers[place] = nan
        labels.append(label)
        lines.append(line)
        values.extend(cast(list[float], numbers))
    matrix = np.frombuffer(values).reshape(len(labels), width)
    if is_named is None:
        is_named, is_sure = _is_named(matrix, texts, target)
        if is_named and not is_sure:
            notes.append(f"line {begin} is taken as the names of the columns")
    start = int(is_named)
    if labelled and not start and labels[0].lower() in NO_LABEL:
        start, unlabelled = 1, unlabelled + 1
    if len(labels) == start and unlabelled:
        other = f", such as target={names[left[-1]]!r}" if left else ""
        raise DataError(
            f"{path}: no row has a label in column {names[target]!r}; give another column{other}"
        )
    if len(labels) == start:
        raise DataError(f"{path}: the table has no rows of data")
    labels = labels[start:]
    if unlabelled:
        notes.append(f"{counted(unlabelled, 'row')} without a label left out")
    if rows.class_names and {*labels} <= {*map(str, range(len(rows.class_names)))}:
        labels = [rows.class_names[int(label)] for label in labels]
    if not is_named:
        names = tuple(str(number) for number in range(1, width + 1))
    training = split_indices(len(labels), *rules.split)[0] if rules.split else slice(None)
    below = ({row - start: text for row, text in column.items()} for column in texts)
    table = Table(
        path,
        lines[start:],
        names,
        is_named,
        matrix[start:],
        tuple({row: text for row, text in column.items() if row >= 0} for column in below),
        mark,
        None if encoding else training,
        tuple(labels),
        names[target] if labelled else "",
        tuple(notes),
    )
    return table, left


def _is_named(
    matrix: NDArray[np.float64], texts: Sequence[Mapping[int, str]], target: int
) -> tuple[bool, bool]:
    """Return whether the first row of a training table is names, and whether no number is one.

    Its texts do not occur below: the target's may, as one of its classes, if others show a header.
    A text shows one above numbers, and above texts that are repeated. Its numbers are names if they
    count from 0 or 1, or rise or fall above other numbers, such as years or wavelengths.
    """
    top, below = matrix[0], matrix[1:]
    figures = np.flatnonzero(~np.isnan(top))
    words = {place: [*column.values()] for place, column in enumerate(texts) if 0 in column}
    found, above, repeated = list[int](), False, 0
    for place, (word, *cells) in words.items():
        above |= not cells and not np.isnan(below[:, place]).all()
        repeated += 0 < 2 * len({*cells}) <= len(cells)
        found += [place] * (word in cells)
    if not len(figures):
        is_class = found == [target] and repeated == len(words) > 1
        return bool(words) and (not found or above or is_class), above and not found
    if found or len(figures) < 2 and not words:
        return False, True
    steps = np.diff(top[figures])
    rises, falls = (steps > 0).all(), (steps < 0).all()
    counts = top[figures[0]] in (0, 1) and (steps == 1).all() and (above or len(steps) > 0)
    years = _are_years(top[figures]).all() and not _are_years(below[:, figures]).all(axis=0).any()
    is_clear = above or repeated + (len(figures) > 3) > 1
    is_sorted = len(steps) > 0 and (rises or falls)
    shows = above or repeated or (years and not words)
    return bool((is_sorted and is_clear) or (rises and shows and (counts or years))), False


def _are_years(values: NDArray[np.float64]) -> Any:
    """Return which numbers may be years; a missing one may."""
    least, most = YEARS
    whole = (values >= least) & (values <= most) & (values == np.rint(values))
    return whole | np.isnan(values)


def _unique(cells: Sequence[str]) -> tuple[str, ...]:
    """Return a header's names; one without a name, or that occurs again, gets its number."""
    names = [
        _decoded(cell.strip()) or f"column {number}" for number, cell in enumerate(cells, start=1)
    ]
    return tuple(
        name if name not in names[:at] else f"{name}.{at + 1}" for at, name in enumerate(names)
    )


def _place(source: object, names: Sequence[str], name: str) -> int:
    """Return the place of a column, given by its number from 1 or by its name."""
    if name.isdecimal() and 1 <= int(name) <= len(names):
        return int(name) - 1
    if (place := finder(names)(name)) >= 0:
        return place
    raise UsageError(
        f"{source} has no column {name!r}; its first line is {shortened(', '.join(names), 1000)}"
    )


def _decoded(cell: str) -> str:
    """Return a text in which bytes that are not UTF-8 are read as Windows-1252."""
    if cell.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in cell):
        return cell
    return cell.encode("utf-8", "surrogateescape").decode("cp1252", "replace")


def _shaped(
    table: Table, features: NDArray[np.float32], encoding: Encoding, rules: TableRules
) -> NDArray[Any]:
    """Return features in the shape of a sample; pixels as bytes."""
    shape = rules.sample_shape
    if not shape:
        return features
    if features.shape[1] != prod(shape):
        odd = [column.place for column in encoding if column.kind not in ("number", "list")]
        remedy = f", such as {table.dropping(odd)}" if odd else ""
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


def to_dataset(
    table: Table,
    name: str,
    class_names: tuple[str, ...] = (),
    predicts: LabelKind = "classes",
    is_trained_on: bool = True,
) -> Dataset:
    """Convert a table to a data set.

    Args:
        table: a result of `read_csv`.
        name: of the data set.
        class_names: of the training table, if this is a test table; else empty.
        predicts: the kind of labels; "any" means quantities if a label has a fraction.
        is_trained_on: whether its labels are to be learned: one class teaches nothing.
    """
    numbers = {label: number(label, table.mark) for label in table.labels}
    scale = 1 / 255 if table.features.dtype == np.uint8 else 1.0

    is_numeric = all(
        number(label, table.mark) is not None
        and label.lower() not in BOOLS
        and not (label[0] == "0" and label[1:2].isdigit())
        for label in class_names or numbers
    )
    # NaN counts as a fraction, too: nan % 1 is nan, which is true
    fraction = next((label for label, value in numbers.items() if value and value % 1), None)
    if predicts == "quantities" or (predicts == "any" and is_numeric and fraction is not None):
        values, units = dict(numbers), set[object]()
        for label in numbers:
            values[label], unit = amount(label, table.mark) or (None, None)
            units.add(unit)
        if None in units or len(units) > 1:
            values = numbers
        # NumPy converts None to NaN
        quantities = np.array([values[label] for label in table.labels], np.float64)
        for (row,) in narrowed(quantities)[1]:
            label, is_text = shortened(table.labels[row]), numbers[table.labels[row]] is None
            remedy = f"predict a class, by predicts='classes', or {table.other_target()}"
            raise DataError(
                f"{table.source}, line {table.lines[row]}: the target {label!r} is not a finite"
                f" number; {remedy if is_text else 'leave the row out'}"
            )
        return Dataset(name, table.features, quantities, 0, scale, **table.about)
    if is_numeric and fraction is not None:
        raise DataError(
            f"{table.source}: label {shortened(fraction)!r} is not a whole number; {HINT}"
        )
    spelled = {
        # from its digits: a float has 53 bits, and numbers of orders may have more
        label: str(int(label if label.lstrip("+-").isdecimal() else value))
        if is_numeric and value is not None
        else label
        for label, value in numbers.items()
    }
    known = class_names or sorted({*spelled.values()}, key=int if is_numeric else str)
    names = {class_key(label): label for label in reversed(known)}  # of two spellings the first
    is_first = is_trained_on and not class_names  # so its labels say which classes there are
    if is_first and len(names) == 1:
        raise DataError(
            f"{table.source} has only one class, {shortened(known[0])!r}, so there is nothing to"
            f" predict; {table.other_target()}"
        )
    about, class_of = table.about, {key: number for number, key in enumerate(reversed(names))}
    if unknown := [label for label in numbers if class_key(spelled[label]) not in class_of]:
        raise DataError(
            f"{table.source}: label {shortened(unknown[0])!r} is not among the training labels"
            f" {[*known]}"
        )
    y = np.array([class_of[class_key(spelled[label])] for label in table.labels])
    if is_first:
        remedy = HINT if is_numeric else table.other_target()
        about["notes"] += judge_classes(table.source, f"column {table.target!r}", y, remedy)[1]
    class_names = tuple(reversed(names.values()))
    return Dataset(name, table.features, y, len(names), scale, class_names, **about)


def refuse_rules(what: str, rules: TableRules) -> None:
    """Refuse rules of tables for another data set; those of a trained model do not apply to it.

    Raises:
        UsageError: with the name of the rule.
    """
    for name in ("target", "drop", "text_columns", "sample_shape", "class_names", "decimal"):
        if getattr(rules, name) and not rules.encoding:
            raise UsageError(f"{what} is no table with columns to choose; leave {name} out")


def load_csv(
    path: Path, name: str, predicts: LabelKind = "classes", rules: TableRules = TableRules()
) -> Dataset:
    """Return the data set of a CSV file."""
    table = read_csv(path, rules)
    return to_dataset(table, name, rules.class_names, predicts, not rules.encoding)


def load_npz(
    path: Path, name: str, predicts: LabelKind = "classes", rules: TableRules = TableRules()
) -> tuple[Dataset, Dataset | None]:
    """Return the training part of an .npz file, and the test part or None; see the module.

    Args:
        path: of the file.
        name: of the data set.
        predicts: the kind of y; "any" takes floats for quantities and integers for classes.
        rules: must be empty; they are here because `load` calls all readers alike.
    """
    refuse_rules(f"data set {path}", rules)
    arrays, has = _read(path, PARTS)
    first, second = (
        next((part for part in parts if {f"x{part}", f"y{part}"} & {*arrays}), "")
        for parts in (TRAIN_PARTS, TEST_PARTS)
    )
    needed = {f"{item}{part}" for item in "xy" for part in (first, second or first)}
    if not needed <= {*arrays}:
        raise DataError(
            f"{path}: holds {has}; needs x and y, or x_train, y_train, x_test and y_test"
        )
    for item, x in arrays.items() if rules.as_bytes else ():
        # whole numbers are bytes, whatever their dtype
        if item[0] == "x" and x.dtype.kind in "iu" and x.size and x.min() >= 0 and x.max() <= 255:
            arrays[item] = x.astype(np.uint8)
    is_other = rules.as_bytes is not None
    train = _part(path, name, arrays, first, predicts, is_other=is_other)
    if not second:
        return train, None
    test = _part(path, name, arrays, second, predicts, train.classes)
    kinds = [f"x{part} holds {arrays[f'x{part}'].dtype}" for part in (first, second)]
    if train.scale != test.scale:
        raise DataError(
            f"{path}: {' and '.join(kinds)}; bytes are divided by 255, other numbers are not: save"
            " both in one dtype"
        )
    if train.x.dtype == np.float32 and train.x.ndim > 2:
        tops = [float(np.abs(part.x).max()) for part in (train, test)]
        if min(tops) * OTHER_SCALE < max(tops):
            raise DataError(
                f"{path}: {kinds[0]} up to {tops[0]:.4g}, and {kinds[1]} up to {tops[1]:.4g}; give"
                " the images of both parts in one scale"
            )
    return train, test


def read_samples(path: Path) -> Array:
    """Return x (or x_test) of an .npz file: integers unchanged, floats as float32."""
    arrays, has = _read(path, ["x", *(f"x{part}" for part in TEST_PARTS)])
    for name, x in arrays.items():
        return x if x.dtype.kind in "iu" else _samples(path, name, x)
    raise DataError(f"{path}: holds {has}; needs x, the samples")


def _read(path: Path, names: Sequence[str]) -> tuple[dict[str, Array], str]:
    """Return the file's arrays among `names`, in that order, and the names of all, for messages.

    Capitals do not count.
    """
    what = "not a complete .npz file of arrays without pickled objects"
    with opened(path) as stream, foreign(path, DataError, what):
        if not zipfile.is_zipfile(stream):
            raise ValueError("it is truncated, or another kind of file")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as archive:
            has = shortened(", ".join(archive.files)) or "nothing"
            found = {name.lower(): name for name in archive.files}
            present = {name: found[name] for name in names if name in found}
            check_unpacked(
                path, sum(archive.zip.getinfo(f"{name}.npy").file_size for name in present.values())
            )
            arrays = {name: archive[item] for name, item in present.items()}
        if other := [name for name, result in arrays.items() if not isinstance(result, np.ndarray)]:
            raise ValueError(f"{other[0]} is not an array")
    return arrays, has


def _part(
    path: Path,
    name: str,
    arrays: dict[str, Array],
    part: str,
    predicts: LabelKind,
    classes: int = 0,
    is_other: bool = False,
) -> Dataset:
    """Return a part of an archive, of other data than a model's if its classes may be some."""
    x_name, y_name, notes = f"x{part}", f"y{part}", tuple[str, ...]()
    x, y = arrays[x_name], arrays[y_name]
    if x.ndim < 2 or y.ndim < 1 or len(y) != len(x) or 0 in (x.size, y.size):
        raise DataError(
            f"{path}: {x_name} {x.shape} and {y_name} {y.shape}; needs (n, ...) samples and (n,) or"
            " (n, ...) labels"
        )
    y = y.reshape(-1) if y.size == len(x) else y
    if predicts == "quantities" or (predicts == "any" and y.dtype.kind == "f"):
        y = _finite(path, y_name, y)
    elif y.dtype.kind not in "iu":
        raise DataError(
            f"{path}: {y_name} is {y.dtype}; save labels as whole numbers (an integer dtype);"
            f" {HINT}"
        )
    elif is_other:
        classes = int(y.max()) + 1
    elif not classes:
        classes, notes = judge_classes(path, y_name, y, HINT)
    are_many = x.dtype.kind in "iu" and x.ndim == 2 and y.ndim > 1
    if y.dtype.kind == "f" or not (are_many or x.dtype in TOKEN_TYPES):
        x = _samples(path, x_name, x)
        if y.dtype.kind != "f" and y.ndim == 2 and ((y.sum(1) == 1) & (y.max(1) == 1)).all():
            raise DataError(
                f"{path}: {y_name} has a 1 in each row and else 0; give the numbers of the classes,"
                f" {y_name}.argmax(1)"
            )
        if x.ndim == 4 and x.shape[1] in (1, 3) and x.shape[3] > 4:
            notes += (
                f"{x_name}: images of {x.shape[1]} x {x.shape[2]} pixels with {x.shape[3]}"
                " channels; if the channels are first, give x.transpose(0, 2, 3, 1)",
            )
    elif x.min() < 0:
        raise DataError(
            f"{path}: {x_name} has the token {x.min()}; tokens are whole numbers from 0 on"
        )
    elif x.dtype == np.uint8:
        x = x.astype(np.uint16)
    scale = 1 / 255 if x.dtype == np.uint8 else 1.0
    return Dataset(name, np.ascontiguousarray(x), y, classes, scale, notes=notes)


def _samples(path: Path, name: str, x: Array) -> Array:
    result = x if x.dtype == np.uint8 else _finite(path, name, x)
    return result[..., np.newaxis] if x.ndim == 3 else result


def _finite(path: Path, name: str, values: Array) -> NDArray[np.float32]:
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} is {values.dtype}; needs real numbers")
    return as_float32(f"{path}: {name}", values)
