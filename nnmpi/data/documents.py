"""Files of text as documents: one by one, so that a corpus need not fit into memory.

    .txt          the whole file is one document; or, for sentences, each line that is not empty
    .csv          each row: the columns that are asked for, one under the other
    .jsonl        each line, an object: the same of its fields

All are UTF-8, plain or .gz.
"""

import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from nnmpi.data.tables import read_cells, read_lines
from nnmpi.errors import DataError, UsageError
from nnmpi.files import parse_json

PIECE = 2**20  # characters
CELL_BYTES = 2**30  # the longest cell of a table
ENDINGS = (".txt", ".jsonl")


def is_text(path: Path, columns: Sequence[str]) -> bool:
    """Return whether a file holds a text: by its ending, and a table if columns of it are asked for."""
    name = path.name.removesuffix(".gz")
    return name.endswith(ENDINGS) or (bool(columns) and name.endswith(".csv"))


def read_documents(path: Path, columns: Sequence[str] = (), lines: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield pieces of a file's documents, and whether the document ends with the piece.

    Args:
        path: ending in .txt, .csv or .jsonl, or these and .gz.
        columns: of a table; of .jsonl "text" by default.
        lines: whether each line of a .txt is a document.

    Raises:
        UsageError: for a column that is not there.
        DataError: for a file that cannot be read, is not UTF-8 or no table, and for an empty document.
    """
    name, empty = path.name.removesuffix(".gz"), True
    if name.endswith(".txt"):
        if columns:
            raise UsageError(f"{path} has no columns, as it is no table; leave {', '.join(columns)} out")
        rows = ((line.rstrip("\n"), True) for line in read_lines(path) if line.strip()) if lines else _pieces(path)
        for text, is_whole in rows:
            empty = empty and not text.strip()
            yield text, is_whole and not empty
    else:
        for line, cells in _json_rows(path, columns or ("text",)) if name.endswith(".jsonl") else _rows(path, columns):
            text, empty = "\n".join(cells), False
            if not text.strip():
                raise DataError(f"{path}, line {line}: the document is empty; remove the row, or choose other columns")
            yield text, True
    if empty:
        raise DataError(f"{path}: the document is empty; give a text, in UTF-8")


def _pieces(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield one document in pieces, cut before a line that begins with no space: no tokenizer joins over that.

    Behind an empty line it is not cut: there GPT-2's pattern looks at what comes next.
    """
    held, size = [""], 0
    for line in read_lines(path):
        if size > PIECE and line[:1].strip() and held[-1][-2:-1].strip():
            yield "".join(held), False
            held, size = [], 0
        held.append(line)
        size += len(line)
    yield "".join(held), True


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of each row of a CSV table with a header."""
    csv.field_size_limit(CELL_BYTES)
    rows = read_cells(path)
    _, header = next(rows, (1, []))
    _check_columns(str(path), header, columns)
    places = [header.index(column) for column in columns]
    yield from ((line, [cells[place] for place in places]) for line, cells in rows)


def _check_columns(where: str, there: Collection[str], columns: Sequence[str]) -> None:
    """Refuse columns that are not there, or more than once."""
    for column in columns:
        if list(there).count(column) != 1:
            raise UsageError(f"{where} has no single column {column!r}; its columns are: {', '.join(there)}")


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the fields of each object of a file of JSON lines."""
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{where}: not a JSON object; give one with a field for each column")
        _check_columns(where, row, columns)
        cells = [row[column] for column in columns]
        if not all(isinstance(cell, str) and _is_unicode(cell) for cell in cells):
            raise DataError(f"{where}: a column is no Unicode text")
        yield number, cells


def _is_unicode(text: str) -> bool:
    """Return whether a text has no half of a surrogate pair, which JSON can say."""
    try:
        return text.encode() is not None
    except UnicodeEncodeError:
        return False
