"""Tables in Parquet files, by pyarrow: read in batches of rows, so that the file may be large.

A cell is a number, a text, true or false, or a date; null is missing. Texts remain texts.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nnmpi.base.errors import DataError, UsageError
from nnmpi.base.files import foreign
from nnmpi.data.cells import Cell
from nnmpi.data.tables import CellRows, TableRules, cell_of, name_of, refuse_forms, unread_columns

BATCH_ROWS = 4096
INDEX = "__index_level_0__"  # pandas' name of an index


def parquet_rows(path: Path, rules: TableRules) -> CellRows:
    """Return the rows of a table.

    Raises:
        UsageError: without pyarrow, and for rules that are for cells between separators.
        DataError: for a damaged file, an index of pandas', and a column of lists, objects or bytes.
    """
    try:
        from pyarrow import parquet, types
    except ImportError:
        raise UsageError(f"{path} needs pyarrow: pip install pyarrow") from None
    refuse_forms(path, rules, "Parquet files")
    damaged = "not a complete Parquet file"
    with foreign(path, DataError, damaged):
        fields, count = list(parquet.read_schema(path)), parquet.read_metadata(path).num_rows
    if not fields or not count:
        raise DataError(f"{path}: the table has no rows of data")
    names = [name_of(field.name) for field in fields]
    if INDEX in names:
        raise DataError(
            f"{path}: the column {INDEX} is an index of pandas'; write the table with"
            " to_parquet(path, index=False)"
        )
    unread = unread_columns(names, rules)
    for field, name in zip(fields, names, strict=True):
        kind = field.type
        is_bytes = types.is_binary(kind) or types.is_large_binary(kind)
        if name not in unread and (types.is_nested(kind) or is_bytes):
            raise DataError(
                f"{path}: the column {name!r} holds {kind}, which is no cell of a table; leave the"
                f" column out, drop={[name]}"
            )

    def read() -> Iterator[tuple[int, list[Cell]]]:
        line = 0
        with parquet.ParquetFile(path) as file:
            batches = file.iter_batches(BATCH_ROWS)
            while True:
                with foreign(path, DataError, damaged):
                    batch = next(batches, None)
                    columns = [] if batch is None else [_cells(item) for item in batch.columns]
                if batch is None:
                    return
                for cells in zip(*columns, strict=True):
                    line += 1
                    yield line, [*cells]

    return CellRows(path, read, len(names), names)


def _cells(column: Any) -> list[Cell]:
    return [cell_of(value) for value in column.to_pylist()]
