"""Tables and arrays: CSV files and NumPy archives.

    sepal_length_cm,petal_length_cm,species      a header: no feature cell of this row is a number
    5.1,1.4,setosa                               features, and the label in the last column or in
    7.0,4.7,versicolor                           the one named `target`

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
import zipfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from nnmpi.backend.array import Array
from nnmpi.base.errors import DataError, UsageError, shortened
from nnmpi.base.files import check_unpacked, foreign, opened
from nnmpi.data.dataset import (
    HELD_OUT,
    MISSING,
    TOKEN_TYPES,
    TRAIN,
    Dataset,
    LabelKind,
    as_float32,
    check_index,
    lost,
    lost_columns,
    no_number,
)

TRAIN_PARTS = *(f"_{part}" for part in TRAIN), ""
TEST_PARTS = tuple(f"_{part}" for part in HELD_OUT)
PARTS = tuple(f"{item}{part}" for part in (*TRAIN_PARTS, *TEST_PARTS) for item in "xy")
OTHER_SCALE = 100.0  # images whose largest numbers differ by this factor have different units
SURE_CLASSES = 1000  # up to this number of classes, a set may have fewer samples than classes
NO_LABELS = {*MISSING} - {"none"}  # which is a class of many tables
BOOLS = {"true": "1", "false": "0"}  # features, as pandas, R and spreadsheets write them
MOST_CLASSES = 20  # a table may have this many, however short it is
HINT = (
    "give classes, or predict numbers: by the loss mse, mae or huber (in a call of load by"
    " predicts='quantities')"
)


@dataclass(frozen=True)
class Table:
    """A parsed table.

    Attributes:
        path: of the file, for messages.
        features: (rows, columns), float32.
        labels: of each row, as text.
        lines: the line number of each row, for messages.
        columns: the features' names; empty without a header.
    """

    path: Path
    features: NDArray[np.float32]
    labels: tuple[str, ...]
    lines: tuple[int, ...]
    columns: tuple[str, ...] = ()


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, plain or .gz, each with its newline."""
    try:
        with opened(path) as stream, TextIOWrapper(cast(Any, stream), "utf-8-sig") as text:
            yield from text
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); convert it") from error


def read_cells(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yield each row's line number and cells; blank lines are skipped."""
    reader, width = csv.reader(read_lines(path), strict=True), 0
    try:
        for cells in reader:
            width = width or len(cells)
            if len(cells) not in (0, width):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(cells)} cells, but the first line has"
                    f" {width}"
                )
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def read_csv(path: Path, target: str = "", features: int | None = None) -> Table:
    """Parse a CSV file, plain or .gz, in UTF-8.

    Args:
        path: of the file.
        target: the column of the label, by name or by number from 1; empty for the last one.
        features: the number of features of a table that may lack labels; None if all columns but
            the label's are features.
    """
    values, label_at, width = array("d"), -1, 0
    labels, lines, names = list[str](), list[int](), list[str]()
    for line, cells in read_cells(path):
        is_first, width = not width, len(cells)
        if is_first:
            if features not in (None, width, width - 1):
                raise DataError(
                    f"{path}, line {line}: {width} cells; needs {features} features, and maybe a"
                    " label"
                )
            label_at = width if width == features else _target_column(path, cells, target)
            if width > 2 and [*map(_number, cells)] == [*range(width)]:
                raise DataError(
                    f"{path}, line {line}: {cells[0]}, {cells[1]} ... seems to be a header, as"
                    " pandas writes it for columns without names; write the table with"
                    " to_csv(path, index=False, header=False), or give the columns names"
                )
        label = cells.pop(label_at).strip() if label_at < width else ""
        numbers = [_number(BOOLS.get(item.strip().lower(), item)) for item in cells]
        if is_first and {*numbers} == {None}:
            names = [cell.strip() for cell in cells]
            check_index(path, names)
            continue
        labels.append(label)
        lines.append(line)
        if None in numbers:
            raise _wrong_cell(path, line, numbers.index(None), label_at, cells[numbers.index(None)])
        values.extend(cast(list[float], numbers))
    if not labels:
        raise DataError(f"{path}: the table has no rows of data")
    exact = np.frombuffer(values).reshape(len(labels), -1)
    with np.errstate(over="ignore"):  # the check below raises an error with line and column
        result = exact.astype(np.float32)
    for row, column in np.argwhere(~np.isfinite(result))[:1].tolist():
        raise _wrong_cell(path, lines[row], column, label_at, exact[row, column].item())
    for column in lost_columns(exact, result)[:1]:
        raise DataError(
            f"{path}, column {column + 1 + (column >= label_at)}: {lost(exact[:, column])}"
        )
    for label, line in zip(labels, lines, strict=True) if label_at < width else ():
        if label.lower() in NO_LABELS:
            raise DataError(
                f"{path}, line {line}, column {label_at + 1}: the label is missing"
                + (f" ({label!r}); leave such rows out, or rename the class" if label else "")
            )
    return Table(path, result, tuple(labels), tuple(lines), tuple(names))


def _wrong_cell(path: Path, line: int, feature: int, label_at: int, value: object) -> DataError:
    return DataError(
        f"{path}, line {line}, column {feature + 1 + (feature >= label_at)}: {no_number(value)}"
    )


def _target_column(path: Path, first: list[str], target: str) -> int:
    """Return the label's column in a table with this first row."""
    if len(first) < 2:
        raise DataError(
            f"{path}, line 1: {len(first)} cell; needs at least one feature, then the label, with"
            " commas"
        )
    names = [cell.strip() for cell in first]
    if not target:
        return len(first) - 1
    if target in names:
        return names.index(target)
    if target.isdecimal() and 1 <= int(target) <= len(first):
        return int(target) - 1
    raise DataError(f"{path} has no column {target!r}; its first line is {', '.join(names)}")


def _number(cell: str) -> float | None:
    try:
        # Python reads 1_0 as 10; a table never means that
        return None if "_" in cell else float(cell)
    except ValueError:
        return None


def to_dataset(
    table: Table, name: str, class_names: tuple[str, ...] = (), predicts: LabelKind = "classes"
) -> Dataset:
    """Convert a table to a data set.

    Args:
        table: a result of `read_csv`.
        name: of the data set.
        class_names: of the training table, if this is a test table; else empty.
        predicts: the kind of labels; "any" means quantities if a label has a fraction.
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
            label = shortened(table.labels[row])
            raise DataError(
                f"{table.path}, line {table.lines[row]}: the target {label!r} is not a finite"
                " number"
            )
        if lost_columns(exact[:, None], quantities):
            raise DataError(f"{table.path}, the target: {lost(exact)}")
        return Dataset(name, table.features, quantities, 0, columns=table.columns)
    if is_numeric and fraction is not None:
        raise DataError(
            f"{table.path}: label {shortened(fraction)!r} is not a whole number; {HINT}"
        )
    spelled = {
        label: label if number is None or not is_numeric else str(int(number))
        for label, number in numbers.items()
    }
    names = class_names or tuple(sorted(set(spelled.values()), key=int if is_numeric else str))
    if not class_names and len(names) > max(MOST_CLASSES, len(table.labels) // 2):
        raise DataError(
            f"{table.path}: the labels are {len(names)} different ones in {len(table.labels)} rows,"
            f" nearly a class for each row; give another column as the target; {HINT}"
        )
    class_of = {item: number for number, item in enumerate(names)}
    if unknown := [label for label in table.labels if spelled[label] not in class_of]:
        raise DataError(
            f"{table.path}: label {shortened(unknown[0])!r} is not among the training labels"
            f" {list(names)}"
        )
    y = np.array([class_of[spelled[label]] for label in table.labels])
    return Dataset(name, table.features, y, len(names), 1.0, names, table.columns)


def load_csv(
    path: Path, name: str, predicts: LabelKind = "classes", target: str = ""
) -> tuple[Dataset, None]:
    """Return the data set of a CSV file, and None: it has no test part."""
    return to_dataset(read_csv(path, target), name, predicts=predicts), None


def load_npz(
    path: Path, name: str, predicts: LabelKind = "classes", target: str = ""
) -> tuple[Dataset, Dataset | None]:
    """Return the training part of an .npz file, and the test part or None; see the module.

    Args:
        path: of the file.
        name: of the data set.
        predicts: the kind of y; "any" takes floats for quantities and integers for classes.
        target: must be empty; it is here because `load` calls all readers alike.
    """
    if target:
        raise UsageError(
            f"data set {path} has no columns of labels to choose from; leave the target out"
        )
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
