"""JSON lines: an object in each line, as a row of a table or as a document.

    {"petal_length_cm": 1.4, "species": "setosa"}       a table: its columns are the fields of all
    {"petal_length_cm": 4.7, "species": "versicolor"}   objects, in the order in which they occur
    {"text": "of oranges", "source": "book"}            documents

A cell of a table is a number, a text, true or false; a field that an object lacks, or that is null,
is missing. Texts remain texts, even those that look like a number.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnmpi.base.errors import DataError, shortened
from nnmpi.base.files import parse_json, read_lines
from nnmpi.data.cells import Cell
from nnmpi.data.tables import CellRows, TableRules, name_of, refuse_forms, unread_columns

TEXT = "text"  # the field that makes a file one of documents


def json_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line's number and object; blank lines have none.

    Raises:
        DataError: for a line that is no object, or has two fields of one name.
    """
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line, once=True)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            what = "not a JSON object; give one with a field for each column"
            raise DataError(f"{path}, line {number}: {what}")
        yield number, row


def has_text(path: Path) -> bool:
    """Return whether the first object has the field of documents."""
    return path.is_file() and any(TEXT in row for _, row in _first(path))


def json_rows(path: Path, rules: TableRules) -> CellRows:
    """Return the rows of a table.

    Raises:
        UsageError: for rules that are for files of cells between separators.
        DataError: for a line that is no object, and for a column with lists or objects in it.
    """
    refuse_forms(path, rules, "JSON lines")
    fields = [*dict.fromkeys(field for _, row in json_objects(path) for field in row)]
    if not fields:
        raise DataError(f"{path}: the table has no rows of data")
    names = [*map(name_of, fields)]
    unread = unread_columns(names, rules)

    def read() -> Iterator[tuple[int, list[Cell]]]:
        for line, row in json_objects(path):
            yield line, [_cell(path, line, row, field, field in unread) for field in fields]

    return CellRows(path, read, len(fields), names)


def _first(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for pair in json_objects(path):
        yield pair
        return


def _cell(path: Path, line: int, row: dict[str, Any], field: str, is_unread: bool) -> Cell:
    value = row.get(field)
    if value is None or is_unread:
        return ""
    if isinstance(value, dict | list):
        raise DataError(
            f"{path}, line {line}: the field {shortened(repr(field))} holds"
            f" {'a list' if isinstance(value, list) else 'an object'}, which is no cell of a table;"
            f" leave the column out, drop={[field]}, or, if this is a text, name its columns,"
            " text_columns=..."
        )
    return value
