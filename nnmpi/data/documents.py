"""Files of text as documents: one by one, so that a corpus need not fit into memory.

    .txt          the whole file is one document; or, for sentences, each line that is not empty
    .csv          each row: the columns that are asked for, one under the other
    .jsonl        each line, an object: the same of its fields

All are UTF-8, plain or .gz.
"""

import codecs
import csv
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from nnmpi.data.csvfile import read_cells
from nnmpi.data.files import opened
from nnmpi.errors import DataError, UsageError
from nnmpi.reading import parse_json

CHUNK_BYTES = 2**20
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
    name = path.name.removesuffix(".gz")
    if name.endswith(".txt"):
        if columns:
            raise UsageError(f"{path} has no columns, as it is no table; leave {', '.join(columns)} out")
        yield from _lines(path) if lines else _chunks(path)
        return
    rows = _json_rows(path, columns or ("text",)) if name.endswith(".jsonl") else _table_rows(path, columns)
    empty = True
    for place, cells in rows:
        text = "\n".join(cells)
        if not text.strip():
            raise DataError(f"{path}, {place}: the document is empty; remove the row, or choose other columns")
        empty = False
        yield text, True
    if empty:
        raise DataError(f"{path}: there are no rows")


def _decoded(path: Path) -> Iterator[str]:
    """Yield a file's text, in pieces that need not end where lines do; line ends are as they are in the file."""
    with opened(path) as stream:
        decoder, done = codecs.getincrementaldecoder("utf-8")(), 0
        while True:
            chunk = stream.read(CHUNK_BYTES)
            held = len(decoder.getstate()[0])  # bytes of a character that began in the chunk before
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                at = done - held + error.start
                raise DataError(f"{path}: not UTF-8 text ({error.reason} at byte {at}); convert it") from error
            yield text.removeprefix("\ufeff") if not done else text
            done += len(chunk)
            if not chunk:
                return


def _chunks(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield one document in pieces, cut before a line that begins with no space: no tokenizer joins over that."""
    held, empty = "", True
    for text in _decoded(path):
        held += text
        cut = _last_cut(held)
        if cut:
            piece, held = held[:cut], held[cut:]
            empty = empty and not piece.strip()
            yield _unix(piece), False
    if empty and not held.strip():
        raise _is_empty(path)
    yield _unix(held), True


def _last_cut(text: str) -> int:
    """Return where the last line begins that begins with no space, behind one that ends with none; 0 for nowhere."""
    at = len(text)
    while (at := text.rfind("\n", 0, at)) >= 0:
        before = text[max(at - 2, 0) : at].removesuffix("\r")  # behind "\n\n" GPT-2's pattern looks at what comes next
        if at + 1 < len(text) and not text[at + 1].isspace() and not before[-1:].isspace():
            return at + 1
    return 0


def _lines(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield each line that is not empty as a document."""
    held, found = "", False
    for text in _decoded(path):
        *whole, held = (held + text).split("\n")
        for line in whole:
            if line.strip():
                found = True
                yield line.rstrip("\r"), True
    if held.strip():
        found = True
        yield held.rstrip("\r"), True
    if not found:
        raise _is_empty(path)


def _is_empty(path: Path) -> DataError:
    return DataError(f"{path}: the document is empty; give a text, in UTF-8")


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


def _whole_lines(pieces: Iterator[str]) -> Iterator[str]:
    """Yield a text's lines, with their ends."""
    held = ""
    for text in pieces:
        *whole, held = (held + text).split("\n")
        yield from (f"{line}\n" for line in whole)
    if held:
        yield held


def _table_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the line and the cells of each row of a CSV table with a header."""
    csv.field_size_limit(CELL_BYTES)
    places: list[int] | None = None
    for line, cells in read_cells(path, _whole_lines(_decoded(path))):
        if places is None:
            _check_columns(str(path), cells, columns)
            places = [cells.index(column) for column in columns]
        else:
            yield f"line {line}", [_unix(cells[place]) for place in places]


def _check_columns(where: str, there: Collection[str], columns: Sequence[str]) -> None:
    """Refuse columns that are not there, or more than once."""
    for column in columns:
        if column not in there:
            raise UsageError(f"{where} has no column {column!r}; its columns are: {', '.join(there)}")
        if list(there).count(column) > 1:
            raise UsageError(f"{where} has several columns {column!r}; give each another name")


def _json_rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the line and the fields of each object of a file of JSON lines."""
    for number, line in enumerate(_whole_lines(_decoded(path)), start=1):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not a JSON object; give one with a field for each column")
        _check_columns(f"{path}, line {number}", row, columns)
        wrong = next((column for column in columns if not isinstance(row[column], str)), None)
        if wrong is not None:
            raise DataError(f"{path}, line {number}: column {wrong!r} is no text")
        cells = [row[column] for column in columns]
        if any("\ud800" <= letter <= "\udfff" for letter in set("".join(cells))):  # JSON can say half a character
            raise DataError(
                f"{path}, line {number}: not Unicode text (half of a surrogate pair); write the character out"
            )
        yield f"line {number}", cells
