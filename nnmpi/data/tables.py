"""Tables and arrays: CSV files and NumPy archives.

    sepal_length_cm,petal_length_cm,species      a header: no feature cell of this row is a number
    5.1,1.4,setosa                               features, and the label in the last column or in
    7.0,4.7,versicolor                           the one named `target`

Cells are separated by commas, semicolons (then 1,5 is a number), tabs, bars or spaces. Features may
be numbers (also 1,000.5), true and false, dates, and texts: see `columns`. A first column that only
numbers or names the rows is left out, and so are rows without a label.

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
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice, pairwise
from math import isnan, nan, prod
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.base.errors import DataError, UsageError, counted, shortened
from nnmpi.base.files import check_unpacked, foreign, opened, read_lines
from nnmpi.data.columns import Cells, Encoding, encode, find_places, fit
from nnmpi.data.dataset import (
    HELD_OUT,
    MISSING,
    TOKEN_TYPES,
    TRAIN,
    Dataset,
    LabelKind,
    as_float32,
    lost,
    lost_columns,
)

TRAIN_PARTS = *(f"_{part}" for part in TRAIN), ""
TEST_PARTS = tuple(f"_{part}" for part in HELD_OUT)
PARTS = tuple(f"{item}{part}" for part in (*TRAIN_PARTS, *TEST_PARTS) for item in "xy")
OTHER_SCALE = 100.0  # images whose largest numbers differ by this factor have different units
SURE_CLASSES = 1000  # up to this number of classes, a set may have fewer samples than classes
MOST_CLASSES = 20  # a table may have this many, however short it is
HINT = "to predict numbers, give predicts='quantities'"
ENDINGS = (".csv", ".tsv", ".tab", ".data")
SEPARATORS = "\t;|, "  # in this order: a table by semicolons may have a comma in each row, too
SNIFFED_LINES = 50
CELL_BYTES = 2**30  # the longest cell of a table, beyond the 128 KiB of Python's default
BOOLS = {"true": 1.0, "false": 0.0}
THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
DECIMAL_COMMA = re.compile(r"[+-]?[\d.]*,\d+")
NO_LABEL = MISSING - {"none", "-", "--", "."}  # these may be classes


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
    """

    target: str = ""
    drop: tuple[str, ...] = ()
    text_columns: tuple[str, ...] = ()
    sample_shape: tuple[int, ...] = ()
    encoding: Encoding = ()
    as_bytes: bool | None = None
    class_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A parsed table.

    Attributes:
        path: of the file, for messages.
        features: (rows, *sample_shape), float32; uint8 if a sample shape is given and fits pixels.
        labels: of each row, as text.
        lines: the line number of each row, for messages.
        columns: the features' names; empty without a header.
        target: the name or number of the label's column.
        encoding: the rules that made the features.
        notes: sentences about what was left out or replaced.
    """

    path: Path
    features: NDArray[Any]
    labels: tuple[str, ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...] = ()
    target: str = ""
    encoding: Encoding = ()
    notes: tuple[str, ...] = ()

    @property
    def scale(self) -> float:
        """The factor from features to model input."""
        return 1 / 255 if self.features.dtype == np.uint8 else 1.0

    @property
    def about(self) -> dict[str, Any]:
        """What a data set of this table keeps of it."""
        return {name: getattr(self, name) for name in ("columns", "target", "encoding", "notes")}

    def other_target(self) -> str:
        """Return advice to predict another column: one with few texts, or else a number."""
        by_kind = {column.kind: column for column in reversed(self.encoding)}
        column = by_kind.get("text") or by_kind.get("number")
        if column is None:
            return "give another column as the target"
        number = ", and predicts='quantities'" if column.kind == "number" else ""
        return f"give another column, such as target={column.name!r}{number}"


def is_table(path: Path) -> bool:
    """Return whether a file is a table, by its suffix."""
    return path.name.lower().removesuffix(".gz").endswith(ENDINGS)


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's line number and cells, separated by commas; blank lines are skipped."""
    width = 0
    for line, cells in _split(path, read_lines(path), ","):
        width = width or len(cells)
        _check_width(path, line, cells, width)
        yield line, cells


def _check_width(path: Path, line: int, cells: Sequence[str], width: int) -> None:
    if len(cells) != width:
        raise DataError(
            f"{path}, line {line}: {counted(len(cells), 'cell')}, but the first line has {width};"
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
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def find_separator(path: Path, lines: Iterable[str]) -> str:
    """Return the separator that cuts the first lines into equally many cells; else the comma."""
    first = [*islice(filter(str.strip, lines), SNIFFED_LINES)]
    if any("\0" in line for line in first):
        raise DataError(f"{path} has zero bytes, as UTF-16 text has; save it as UTF-8")
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


def _counts(first: Sequence[str], width: int) -> bool:
    """Return whether a first line has scikit-learn's form: rows, features, two or more classes."""
    return len(first) > 3 and first[0].isdecimal() and first[1] == str(width - 1)


def read_csv(path: Path, rules: TableRules = TableRules(), labelled: bool = True) -> Table:
    """Parse a CSV file, plain or .gz, in UTF-8, or else in Windows' code page 1252.

    Args:
        path: of the file.
        rules: how to read it.
        labelled: whether to read labels; a table without them needs the encoding of another one.

    Raises:
        UsageError: for a column that the table does not have.
        DataError: for a damaged table; the message names line and column.
    """
    cells, labels, target, left, notes = _read_csv(path, rules, labelled)
    if encoding := rules.encoding:
        places = find_places(cells, encoding)
    else:
        documents = [_place(path, cells.names, name) for name in rules.text_columns]
        encoding, left_out = fit(cells, left, documents, target)
        places, notes = [column.place for column in encoding], [*notes, *left_out]
    features, about = encode(cells, encoding, places)
    return Table(
        path,
        _shaped(cells, features, encoding, rules),
        tuple(labels),
        tuple(cells.lines),
        tuple(name for column in encoding for name in column.features) if cells.is_named else (),
        target,
        encoding,
        (*notes, *about),
    )


def _rows_of(path: Path) -> tuple[str, list[str], Iterator[tuple[int, list[str]]]]:
    """Return a table's separator, the class names in scikit-learn's first line, and the rows."""
    separator = find_separator(path, read_lines(path, "surrogateescape"))

    def read() -> Iterator[tuple[int, list[str]]]:
        return _split(path, read_lines(path, "surrogateescape"), separator)

    begin = [*islice(rows := read(), 2)]
    if not begin:
        raise DataError(f"{path}: the table has no rows of data")
    first, second = (cells for _, cells in (begin[0], begin[-1]))
    if _counts(first, len(second)) and sum(1 for _ in read()) == int(first[0]) + 1:
        return separator, first[2:], chain(begin[1:], rows)
    if len(first) == len(second) - 1 and not any(map(_is_given, map(_number, first))):
        first.insert(0, "")  # R's names of rows have no name
    return separator, [], chain(begin, rows)


def _read_csv(
    path: Path, rules: TableRules, labelled: bool
) -> tuple[Cells, list[str], str, list[int], list[str]]:
    """Return cells, labels, the name of their column, the places of the features, and notes."""
    separator, class_names, rows = _rows_of(path)
    begin, first = next(rows)
    width = len(first)
    if width < 1 + labelled:
        raise DataError(
            f"{path}, line {begin}: {counted(width, 'cell')}; needs at least one feature, then the"
            " label, with commas, semicolons, tabs, bars or spaces between them"
        )
    if width > 2 and [*map(_number, first)] == [*range(width)]:
        raise DataError(
            f"{path}, line {begin}: {first[0]}, {first[1]} ... seems to be a header, as pandas writes"
            " it for columns without names; write the table with to_csv(path, index=False,"
            " header=False), or give the columns names"
        )
    names = _unique(first)
    dropped = {_place(path, names, name) for name in ([] if rules.encoding else rules.drop)}
    left = [place for place in range(width) if place not in dropped]
    target = -1
    if labelled and left:
        found = _target(path, names, rules, _is_header(map(_number, first)))
        target = left[-1] if found is None else found
        left = [place for place in left if place != target]
        dropped |= {target}
    is_named = _is_header([_number(first[place], separator) for place in left])
    values, texts = array("d"), tuple(dict[int, str]() for _ in range(width))
    labels, lines, unlabelled = list[str](), list[int](), 0
    for line, cells in rows if is_named else chain([(begin, first)], rows):
        _check_width(path, line, cells, width)
        label = _decoded(cells[target].strip()) if labelled else ""
        if labelled and label.lower() in NO_LABEL:
            unlabelled += 1
            continue
        for place in dropped:
            cells[place] = ""
        numbers = [_number(cell, separator) for cell in cells]
        if None in numbers:
            for place, number in enumerate(numbers):
                if number is None:
                    texts[place][len(labels)] = _decoded(cells[place].strip())
                    numbers[place] = nan
        labels.append(label)
        lines.append(line)
        values.extend(cast(list[float], numbers))
    if not labels and unlabelled:
        other = f", such as target={names[left[-1]]!r}" if left else ""
        raise DataError(
            f"{path}: no row has a label in column {names[target]!r}; give another column{other}"
        )
    if not labels:
        raise DataError(f"{path}: the table has no rows of data")
    if class_names and {*labels} <= {*map(str, range(len(class_names)))}:
        labels = [class_names[int(label)] for label in labels]
    if not is_named:
        names = tuple(str(number) for number in range(1, width + 1))
    notes = [f"{counted(unlabelled, 'row')} without a label left out"] if unlabelled else []
    matrix = np.frombuffer(values).reshape(len(labels), width)
    return (
        Cells(path, lines, names, is_named, matrix, texts, not rules.encoding),
        labels,
        names[target] if labelled else "",
        left,
        notes,
    )


def _target(path: Path, names: Sequence[str], rules: TableRules, is_named: bool) -> int | None:
    """Return the place of the label's column; None for the last one.

    A table with other names than the training table's, or without any, has its label there.
    """
    known = {column.name for column in rules.encoding}
    if not rules.target or (known and not (is_named and known & {*names})):
        return None
    return _place(path, names, rules.target)


def _is_header(row: Iterable[float | None]) -> bool:
    """Return whether a first row names columns: it has texts, and no numbers but consecutive ones.

    Such as years: country, 1960, 1961, 1962.
    """
    cells = [*row]
    numbers = [number for number in cells if number is not None and _is_given(number)]
    steps = {next - last for last, next in pairwise(numbers)}
    return not numbers or (None in cells and len(numbers) > 2 and steps == {1.0})


def _is_given(number: float | None) -> bool:
    """Return whether a cell is a number, neither a text nor missing."""
    return number is not None and not isnan(number)


def _unique(cells: Sequence[str]) -> tuple[str, ...]:
    """Return a header's names; one without a name, or that occurs again, gets its number."""
    names = [
        _decoded(cell.strip()) or f"column {number}" for number, cell in enumerate(cells, start=1)
    ]
    return tuple(
        name if name not in names[:at] else f"{name}.{at + 1}" for at, name in enumerate(names)
    )


def _place(path: Path, names: Sequence[str], name: str) -> int:
    """Return the place of a column, given by its name or its number from 1."""
    if name in names:
        return names.index(name)
    if name.isdecimal() and 1 <= int(name) <= len(names):
        return int(name) - 1
    raise UsageError(
        f"{path} has no column {name!r}; its first line is {shortened(', '.join(names), 1000)}"
    )


def _number(cell: str, separator: str = ",") -> float | None:
    """Return a cell's number, NaN if it is missing; None for a text."""
    try:
        # Python reads 1_0 as 10; a table never means that
        return None if "_" in cell else float(cell)
    except ValueError:
        word = cell.strip()
        if separator == ";" and DECIMAL_COMMA.fullmatch(word):
            return float(word.replace(".", "").replace(",", "."))
        if THOUSANDS.fullmatch(word):
            return float(word.replace(",", ""))
        return nan if word.lower() in MISSING else BOOLS.get(word.lower())


def _decoded(cell: str) -> str:
    """Return a text in which bytes that are not UTF-8 are read as Windows-1252."""
    if cell.isascii() or not any("\udc80" <= letter <= "\udcff" for letter in cell):
        return cell
    return cell.encode("utf-8", "surrogateescape").decode("cp1252", "replace")


def _shaped(
    cells: Cells, features: NDArray[np.float32], encoding: Encoding, rules: TableRules
) -> NDArray[Any]:
    """Return features in the shape of a sample; pixels as bytes."""
    shape = rules.sample_shape
    if not shape:
        return features
    if features.shape[1] != prod(shape):
        odd = [column.place for column in encoding if column.kind not in ("number", "list")]
        remedy = f", such as {cells.dropping(odd)}" if odd else ""
        raise UsageError(
            f"{cells.path} has {counted(features.shape[1], 'feature')}, but samples of"
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
            f"{cells.path}, line {cells.lines[row]}: a pixel is none of 0..255, as all of the"
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
    numbers = {label: _number(label) for label in table.labels}
    is_numeric = all(_number(label) is not None for label in class_names or table.labels)
    # NaN counts as a fraction, too: nan % 1 is nan, which is true
    fraction = next(
        (label for label, number in numbers.items() if number is not None and number % 1), None
    )
    if predicts == "quantities" or (predicts == "any" and is_numeric and fraction is not None):
        # NumPy converts None to NaN
        exact = np.array([numbers[label] for label in table.labels], np.float64)
        with np.errstate(over="ignore"):
            quantities = exact.astype(np.float32)
        for row in np.flatnonzero(~np.isfinite(quantities))[:1]:
            label, is_text = shortened(table.labels[row]), numbers[table.labels[row]] is None
            remedy = f"predict a class, by predicts='classes', or {table.other_target()}"
            raise DataError(
                f"{table.path}, line {table.lines[row]}: the target {label!r} is not a finite"
                f" number; {remedy if is_text else 'leave the row out'}"
            )
        if lost_columns(exact[:, None], quantities):
            raise DataError(f"{table.path}, the target: {lost(exact)}")
        return Dataset(name, table.features, quantities, 0, table.scale, **table.about)
    if is_numeric and fraction is not None:
        raise DataError(
            f"{table.path}: label {shortened(fraction)!r} is not a whole number; {HINT}"
        )
    spelled = {
        label: label if number is None or not is_numeric else str(int(number))
        for label, number in numbers.items()
    }
    names = class_names or tuple(sorted(set(spelled.values()), key=int if is_numeric else str))
    if is_trained_on and not class_names and len(names) == 1:
        raise DataError(
            f"{table.path} has only one class, {shortened(names[0])!r}, so there is nothing to"
            f" predict; {table.other_target()}"
        )
    if not class_names and len(names) > max(MOST_CLASSES, len(table.labels) // 2):
        raise DataError(
            f"{table.path}: the labels are {len(names)} different ones in {len(table.labels)} rows,"
            f" nearly a class for each row; {HINT if is_numeric else table.other_target()}"
        )
    about = table.about
    if is_numeric and not class_names and len(names) > MOST_CLASSES:
        note = f"column {table.target!r}: {len(names)} numbers are a class each; {HINT}"
        about["notes"] = (*table.notes, note)
    class_of = {item: number for number, item in enumerate(names)}
    if unknown := [label for label in table.labels if spelled[label] not in class_of]:
        raise DataError(
            f"{table.path}: label {shortened(unknown[0])!r} is not among the training labels"
            f" {list(names)}"
        )
    y = np.array([class_of[spelled[label]] for label in table.labels])
    return Dataset(name, table.features, y, len(names), table.scale, names, **about)


def refuse_rules(what: str, rules: TableRules) -> None:
    """Refuse rules of tables for another data set; those of a trained model do not apply to it.

    Raises:
        UsageError: with the name of the rule.
    """
    for name in ("target", "drop", "text_columns", "sample_shape", "class_names"):
        if getattr(rules, name) and not rules.encoding:
            raise UsageError(f"{what} is no table with columns to choose; leave {name} out")


def load_csv(
    path: Path, name: str, predicts: LabelKind = "classes", rules: TableRules = TableRules()
) -> tuple[Dataset, None]:
    """Return the data set of a CSV file, and None: it has no test part."""
    table = read_csv(path, rules)
    return to_dataset(table, name, rules.class_names, predicts, not rules.encoding), None


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
    arrays = _read(path, PARTS)
    first, second = (
        next((part for part in parts if {f"x{part}", f"y{part}"} & {*arrays}), "")
        for parts in (TRAIN_PARTS, TEST_PARTS)
    )
    needed = {f"{item}{part}" for item in "xy" for part in (first, second or first)}
    if not needed <= {*arrays}:
        raise DataError(
            f"{path}: holds {_names(path)}; needs x and y, or x_train, y_train, x_test and y_test"
        )
    train = _part(path, name, arrays, f"x{first}", f"y{first}", predicts)
    if not second:
        return train, None
    test = _part(path, name, arrays, f"x{second}", f"y{second}", predicts, train.classes)
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
    arrays = _read(path, ["x", *(f"x{part}" for part in TEST_PARTS)])
    name = next(iter(arrays), None)
    if name is None:
        raise DataError(f"{path}: holds {_names(path)}; needs x, the samples")
    x = arrays[name]
    return x if x.dtype.kind in "iu" else _samples(path, name, x)


def _names(path: Path) -> str:
    """Return the names of a file's arrays, for messages."""
    with zipfile.ZipFile(path) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()]
    return shortened(", ".join(names)) or "nothing"


def _read(path: Path, names: Sequence[str]) -> dict[str, Array]:
    """Return the file's arrays among `names`, in that order; capitals do not count."""
    what = "not a complete .npz file of arrays without pickled objects"
    with opened(path) as stream, foreign(path, DataError, what):
        if not zipfile.is_zipfile(stream):
            raise ValueError("it is truncated, or another kind of file")
        stream.seek(0)
        with np.load(stream, allow_pickle=False) as archive:
            found = {name.lower(): name for name in archive.files}
            present = {name: found[name] for name in names if name in found}
            check_unpacked(
                path, sum(archive.zip.getinfo(f"{name}.npy").file_size for name in present.values())
            )
            arrays = {name: archive[item] for name, item in present.items()}
        if other := [name for name, result in arrays.items() if not isinstance(result, np.ndarray)]:
            raise ValueError(f"{other[0]} is not an array")
    return arrays


def _part(
    path: Path,
    name: str,
    arrays: dict[str, Array],
    x_name: str,
    y_name: str,
    predicts: LabelKind,
    classes: int = 0,
) -> Dataset:
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
    elif (largest := int(y.max())) >= max(y.size, SURE_CLASSES, classes):
        raise DataError(
            f"{path}: {y_name} has {y.size} labels, and one of them is {largest}; number the"
            " classes from 0"
        )
    else:
        classes = classes or largest + 1
    is_tokens = x.dtype in TOKEN_TYPES or (x.dtype.kind in "iu" and x.ndim == 2 and y.ndim > 1)
    if y.dtype.kind == "f" or not is_tokens:
        x = _samples(path, x_name, x)
    elif x.min() < 0:
        raise DataError(
            f"{path}: {x_name} has the token {x.min()}; tokens are whole numbers from 0 on"
        )
    elif x.dtype == np.uint8:
        x = x.astype(np.uint16)
    return Dataset(
        name, np.ascontiguousarray(x), y, classes, 1 / 255 if x.dtype == np.uint8 else 1.0
    )


def _samples(path: Path, name: str, x: Array) -> Array:
    result = x if x.dtype == np.uint8 else _finite(path, name, x)
    return result[..., np.newaxis] if x.ndim == 3 else result


def _finite(path: Path, name: str, values: Array) -> NDArray[np.float32]:
    if values.dtype.kind not in "biuf":
        raise DataError(f"{path}: {name} is {values.dtype}; needs real numbers")
    return as_float32(f"{path}: {name}", values)
