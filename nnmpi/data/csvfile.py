"""CSV tables: numeric features, the label in the last column or in one that is named, an optional header row.

    sepal_length_cm,petal_length_cm,species        a header: no feature cell of the first row is a number
    5.1,1.4,setosa
    7.0,4.7,versicolor

Labels may be text or whole numbers. Either way the classes are the labels that occur in the training table, sorted,
so numbers need not begin at 0 nor be consecutive; `class_names` says which class stands for which label. With a zero in
front (007) they are text. Where quantities are wanted, the label is a number that is predicted.
"""

import csv
import io
import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nnmpi.data.dataset import Dataset, Wanted
from nnmpi.data.files import read_bytes
from nnmpi.errors import DataError, shortened


@dataclass(frozen=True)
class Table:
    """A parsed file: features (rows, columns) float32, and the label cells as text, each with its line."""

    path: Path
    features: NDArray[np.float32]
    labels: tuple[str, ...]
    lines: tuple[int, ...]


def read_csv(path: Path, target: str = "") -> Table:
    """Return the table of a CSV file, plain or .gz, in UTF-8.

    Args:
        path: of the file.
        target: the column of the label, by its name in the header or its number from 1; empty for the last one.

    Raises:
        DataError: for an empty file, rows of different length, a target that is no column, or a feature that is not a
            finite number; the message names the file, the line and the column.
    """
    text = _read_text(path)
    values, labels, lines, width, place = array("d"), [], [], 0, 0
    for line, cells in read_cells(path, io.StringIO(text, newline="")):
        if not width:
            width, place = len(cells), _target_column(path, cells, target)
            if not any(_is_number(cell) for column, cell in enumerate(cells) if column != place):  # a header
                continue
        label = cells.pop(place)
        values.extend(_numbers(path, line, cells, place))
        labels.append(_label(path, line, label, place))
        lines.append(line)
    if not labels:
        raise DataError(f"{path}: the table has no rows of data")
    features = np.frombuffer(values, np.float64).reshape(len(labels), width - 1).astype(np.float32)
    return Table(path, features, tuple(labels), tuple(lines))


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_features(path: Path, columns: int, target: str = "") -> NDArray[np.float32]:
    """Return the features of a table (rows, columns), which may have a column of labels as well.

    Args:
        path: of a CSV file, plain or .gz, in UTF-8.
        columns: how many features there are.
        target: the column of the labels, see `read_csv`.

    Raises:
        DataError: as `read_csv`, and for another number of columns.
    """
    rows: list[list[float]] = []
    place: int | None = None
    for line, cells in read_cells(path, io.StringIO(_read_text(path), newline="")):
        if len(cells) not in (columns, columns + 1):
            raise DataError(f"{path}, line {line}: {len(cells)} cells; needs {columns} features, and maybe a label")
        if place is None:
            place = columns if len(cells) == columns else _target_column(path, cells, target)
        features = [cell for column, cell in enumerate(cells) if column != place]
        if rows or any(_is_number(cell) for cell in features):
            rows.append(_numbers(path, line, features, place))
    if not rows:
        raise DataError(f"{path}: the table has no rows of data")
    return np.array(rows, np.float32)


def read_cells(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the line and the cells of each row of a table; blank lines separate nothing.

    Raises:
        DataError: for what is no CSV, and for rows of different length.
    """
    reader, width = csv.reader(lines, strict=True), 0
    try:
        for cells in reader:
            width = width or len(cells)
            if len(cells) not in (0, width):
                raise DataError(f"{path}, line {reader.line_num}: {len(cells)} cells, and the first line has {width}")
            if cells:
                yield reader.line_num, cells
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: not CSV ({error})") from error


def _target_column(path: Path, first: list[str], target: str) -> int:
    """Return the column of the label in a table that begins with these cells."""
    if len(first) < 2:
        raise DataError(f"{path}, line 1: {len(first)} cell; needs at least one feature, then the label, with commas")
    names = [cell.strip() for cell in first]
    if not target:
        return len(first) - 1
    if target in names:
        return names.index(target)
    if target.isdecimal() and 1 <= int(target) <= len(first):
        return int(target) - 1
    raise DataError(f"{path} has no column {target!r}; its first line is {', '.join(names)}")


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads 1_0 as 10, and a table never means that


def _numbers(path: Path, line: int, cells: list[str], place: int) -> list[float]:
    """Return the features of one row. Fast while all is well; a bad row is searched for the cell to name.

    Args:
        cells: the features.
        place: the column of the label, which is not among them.
    """
    limit = float(np.finfo(np.float32).max)
    try:
        numbers = [float(cell) for cell in cells]
        if max(map(abs, numbers)) <= limit and not math.isnan(sum(numbers)) and "_" not in "".join(cells):
            return numbers
    except ValueError:
        pass  # a cell is text: named below
    for number, cell in enumerate(cells):
        column = number + 1 + (number >= place)
        if not _is_number(cell) or not abs(float(cell)) <= limit:
            raise DataError(f"{path}, line {line}, column {column}: {shortened(cell)!r} is not a finite number")
    raise AssertionError(f"{path}, line {line}: no bad cell found")


def _label(path: Path, line: int, cell: str, place: int) -> str:
    label = cell.strip()
    if not label:
        raise DataError(f"{path}, line {line}, column {place + 1}: the label is missing")
    return label


def _are_fractions(labels: Iterable[str]) -> bool:
    found = set(labels)
    return all(map(_is_number, found)) and not all(map(_is_whole, found))


def _quantities(table: Table) -> NDArray[np.float32]:
    limit = float(np.finfo(np.float32).max)
    for line, label in zip(table.lines, table.labels, strict=True):
        if not _is_number(label) or not abs(float(label)) <= limit:
            raise DataError(
                f"{table.path}, line {line}: the target {shortened(label)!r} is not a finite number; name another "
                "column, or take it for a class"
            )
    return np.array([float(label) for label in table.labels], np.float32)


def _class_names(table: Table) -> tuple[str, ...]:
    """Return the labels that occur, sorted: by value when all are whole numbers, else as text."""
    found = sorted(set(table.labels))
    if not all(_is_number(label) for label in found):
        return tuple(found)
    broken = [label for label in found if not _is_whole(label)]
    if broken:
        raise DataError(
            f"{table.path}: label {shortened(broken[0])!r} is not a whole number; give classes, as numbers or text, or "
            "predict numbers: wanted='quantities', as the losses mse, mae and huber do"
        )
    if not any(map(_has_zeros, found)):
        return tuple(str(number) for number in sorted({int(float(label)) for label in found}))
    spelled: dict[float, str] = {}
    for label in found:
        if (other := spelled.setdefault(float(label), label)) != label:
            raise DataError(
                f"{table.path}: the labels {shortened(other)!r} and {shortened(label)!r} are one number, but zeros in "
                "front make them text; write them alike"
            )
    return tuple(found)


def _is_whole(label: str) -> bool:
    return _is_number(label) and math.isfinite(float(label)) and float(label) == int(float(label))


def _is_count(label: str) -> bool:
    return _is_whole(label) and not _has_zeros(label)


def _has_zeros(label: str) -> bool:
    """Return whether a number is spelled with zeros in front, as codes are, not numbers."""
    digits = label.lstrip("+-")
    return len(digits) > 1 and digits[0] == "0" and digits[1].isdecimal()


def to_dataset(table: Table, name: str, class_names: tuple[str, ...] = (), wanted: Wanted = "classes") -> Dataset:
    """Return the table as a data set.

    Args:
        table: what `read_csv` gave.
        name: of the data set.
        class_names: those of the training table, for a test table; empty for the labels that occur.
        wanted: what the labels are to be; "any" takes numbers for quantities if there is one that is not whole.

    Raises:
        DataError: for a label that is not one of the class names, or is to be a quantity and no number.
    """
    if wanted == "quantities" or (wanted == "any" and _are_fractions(table.labels)):
        return Dataset(name, table.features, _quantities(table), 0)
    class_names = class_names or _class_names(table)
    numeric = all(_is_count(label) for label in class_names)
    number = {label: i for i, label in enumerate(class_names)}
    labels = [str(int(float(label))) if numeric and _is_count(label) else label for label in table.labels]
    unknown = [label for label in labels if label not in number]
    if unknown:
        raise DataError(
            f"{table.path}: label {shortened(str(unknown[0]))!r} is not among the training labels {list(class_names)}"
        )
    y = np.array([number[label] for label in labels], np.int64)
    return Dataset(name, table.features, y, len(class_names), 1.0, class_names)
