"""CSV tables: numeric features, the label in the last column, an optional header row.

    sepal_length_cm,petal_length_cm,species        a header: no feature cell of the first row is a number
    5.1,1.4,setosa
    7.0,4.7,versicolor

Labels may be text or whole numbers. Either way the classes are the labels that occur in the training table, sorted,
so numbers need not begin at 0 nor be consecutive; `class_names` says which class stands for which label.
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

from nnmpi.data.dataset import Dataset
from nnmpi.data.files import read_bytes
from nnmpi.errors import DataError


@dataclass(frozen=True)
class Table:
    """A parsed file: features (rows, columns) float32, and the label cells as text."""

    path: Path
    features: NDArray[np.float32]
    labels: tuple[str, ...]


def read_csv(path: Path) -> Table:
    """Return the table of a CSV file, plain or .gz, in UTF-8.

    Raises:
        DataError: for an empty file, rows of different length, or a feature that is not a finite number; the message
            names the file, the line and the column.
    """
    text = _read_text(path)
    values, labels, width = array("d"), [], 0
    for line, cells in read_cells(path, io.StringIO(text, newline="")):
        if not width:
            width = len(cells)
            if _is_header(path, cells):
                continue
        values.extend(_numbers(path, line, cells))
        labels.append(_label(path, line, cells))
    if not labels:
        raise DataError(f"{path}: the table has no rows of data")
    features = np.frombuffer(values, np.float64).reshape(len(labels), width - 1).astype(np.float32)
    return Table(path, features, tuple(labels))


def _read_text(path: Path) -> str:
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def read_features(path: Path, columns: int) -> NDArray[np.float32]:
    """Return the features of a table (rows, columns), which may have a column of labels behind them.

    Args:
        path: of a CSV file, plain or .gz, in UTF-8.
        columns: how many features there are.

    Raises:
        DataError: as `read_csv`, and for another number of columns.
    """
    rows: list[list[float]] = []
    for line, cells in read_cells(path, io.StringIO(_read_text(path), newline="")):
        if len(cells) not in (columns, columns + 1):
            raise DataError(f"{path}, line {line}: {len(cells)} cells; needs {columns} features, and maybe a label")
        features = [*cells[:columns], ""]
        if rows or any(_is_number(cell) for cell in features):
            rows.append(_numbers(path, line, features))
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


def _is_header(path: Path, first: list[str]) -> bool:
    if len(first) < 2:
        raise DataError(f"{path}, line 1: {len(first)} cell; needs at least one feature, then the label, with commas")
    return not any(_is_number(cell) for cell in first[:-1])


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # Python reads 1_0 as 10, and a table never means that


def _numbers(path: Path, line: int, cells: list[str]) -> list[float]:
    """Return the features of one row. Fast while all is well; a bad row is searched for the cell to name."""
    limit = float(np.finfo(np.float32).max)
    try:
        numbers = [float(cell) for cell in cells[:-1]]
        if max(map(abs, numbers)) <= limit and not math.isnan(sum(numbers)) and "_" not in "".join(cells[:-1]):
            return numbers
    except ValueError:
        pass  # a cell is text: named below
    for column, cell in enumerate(cells[:-1], start=1):
        if not _is_number(cell) or not abs(float(cell)) <= limit:
            raise DataError(f"{path}, line {line}, column {column}: {cell!r} is not a finite number")
    raise AssertionError(f"{path}, line {line}: no bad cell found")


def _label(path: Path, line: int, cells: list[str]) -> str:
    label = cells[-1].strip()
    if not label:
        raise DataError(f"{path}, line {line}, column {len(cells)}: the label is missing")
    return label


def _class_names(table: Table) -> tuple[str, ...]:
    """Return the labels that occur, sorted: by value when all are whole numbers, else as text."""
    found = sorted(set(table.labels))
    if not all(_is_number(label) for label in found):
        return tuple(found)
    broken = [label for label in found if not _is_whole(label)]
    if broken:
        raise DataError(f"{table.path}: label {broken[0]!r} is not a whole number; give classes, as numbers or text")
    return tuple(str(number) for number in sorted({int(float(label)) for label in found}))


def _is_whole(label: str) -> bool:
    return _is_number(label) and math.isfinite(float(label)) and float(label) == int(float(label))


def to_dataset(table: Table, name: str, class_names: tuple[str, ...] = ()) -> Dataset:
    """Return the table as a data set.

    Args:
        table: what `read_csv` gave.
        name: of the data set.
        class_names: those of the training table, for a test table; empty for the labels that occur.

    Raises:
        DataError: for a label that is not one of the class names.
    """
    class_names = class_names or _class_names(table)
    numeric = all(_is_whole(label) for label in class_names)
    number = {label: i for i, label in enumerate(class_names)}
    labels = [str(int(float(label))) if numeric and _is_whole(label) else label for label in table.labels]
    unknown = [label for label in labels if label not in number]
    if unknown:
        raise DataError(f"{table.path}: label {unknown[0]!r} is not among the training labels {list(class_names)}")
    y = np.array([number[label] for label in labels], np.int64)
    return Dataset(name, table.features, y, len(class_names), 1.0, class_names)
