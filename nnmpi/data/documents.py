"""The documents of a text file, each a piece of writing of its own.

    .txt          the file is one; for sentences, each line that is not empty is one
    .csv          each row is one: the chosen columns, joined by newlines
    .jsonl        each line is one: the chosen fields of its object, joined by newlines

A reader of `readers.READERS` that gives texts is one of the functions below.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnmpi.base.errors import DataError, UsageError
from nnmpi.base.files import read_lines
from nnmpi.data.json_lines import TEXT, json_objects
from nnmpi.data.tables import read_cells

PIECE = 2**20  # characters: size of the pieces that a document is tokenized in

Pieces: TypeAlias = Iterator[tuple[str, bool]]
"""Pieces of documents, each with a flag: whether it ends its document."""


def plain_documents(path: Path, columns: Sequence[str], lines: bool) -> Pieces:
    """Yield the document of a text without a form, or each of its lines as one."""
    if columns:
        raise UsageError(
            f"{path} has no columns: it is not a table; leave {', '.join(columns)} out"
        )
    if lines:
        return ((line.rstrip("\n"), True) for line in read_lines(path) if line.strip())
    return _pieces(path)


def delimited_documents(path: Path, columns: Sequence[str], lines: bool) -> Pieces:
    """Yield the chosen cells of each row of a CSV table, as one document."""
    rows = read_cells(path)
    _, header = next(rows, (1, []))
    return _joined(path, columns, ((line, header, cells) for line, cells in rows))


def json_documents(path: Path, columns: Sequence[str], lines: bool) -> Pieces:
    """Yield the chosen fields of each line's object, as one document."""
    rows = ((line, [*row], [*row.values()]) for line, row in json_objects(path))
    return _joined(path, columns or (TEXT,), rows)


def _pieces(path: Path) -> Pieces:
    """Yield one document in pieces of about PIECE characters.

    The tokens must be those of the undivided text. A piece therefore ends before a line whose first
    character is no space: no tokenizer merges across it. It does not end after an empty line: there
    the split of GPT-2's pattern depends on the next character.
    """
    piece, size = [""], 0
    for line in read_lines(path):
        if size > PIECE and line[:1].strip() and piece[-1][-2:-1].strip():
            yield "".join(piece), False
            piece, size = [], 0
        piece.append(line)
        size += len(line)
    yield "".join(piece), True


def _joined(
    path: Path, columns: Sequence[str], rows: Iterable[tuple[int, list[str], list[Any]]]
) -> Pieces:
    """Yield the chosen cells of rows, given by line number, names and cells."""
    for line, names, cells in rows:
        where = f"{path}, line {line}"
        for column in columns:
            if names.count(column) != 1:
                raise UsageError(
                    f"{where} must have one column {column!r}; its columns are: {', '.join(names)}"
                )
        try:  # TypeError: not a text; UnicodeEncodeError: half of a character, such as "\ud800"
            text = "\n".join(cells[names.index(column)] for column in columns)
            text.encode()
        except (TypeError, UnicodeEncodeError):
            raise DataError(f"{where}: a column is not Unicode text") from None
        if not text.strip():
            raise DataError(
                f"{where}: the document is empty; remove the row, or choose other columns"
            )
        yield text, True
