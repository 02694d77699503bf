"""The files that are read: a row for each form, by its suffixes. What no row claims is refused.

To read another form of files, write the function that its row names below, and add the row.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nnmpi.base.errors import DataError, UsageError
from nnmpi.data import hdf5
from nnmpi.data.arrays import read_npy, read_npz
from nnmpi.data.columns import Table
from nnmpi.data.dataset import Dataset, LabelKind
from nnmpi.data.documents import (
    Pieces,
    delimited_documents,
    json_documents,
    plain_documents,
)
from nnmpi.data.images import SUFFIXES, is_image, read_image
from nnmpi.data.json_lines import has_text, json_rows
from nnmpi.data.parquet import parquet_rows
from nnmpi.data.tables import NO_RULES, TableRules, delimited_rows, rows_in, to_dataset, to_table
from nnmpi.data.team import ALONE, Team

Gives = Literal["table", "text", "arrays", "image"]


@dataclass(frozen=True)
class Reader:
    """A form of files.

    Attributes:
        suffixes: of the files, in lower case.
        help: what such a file holds, for pages and the help of options.
        gives: what is read, and by which call of `read`:
            table   (path, rules) -> `CellRows`
            text    (path, columns, whether each line is a document) -> `Pieces`
            arrays  (path, names) -> ({name: array}, the names of all arrays); with `has_names`
                    also (path, names, the given names of x and y in the file)
            image   (path, shape) -> bytes of that shape
        read: the function.
        packed: whether a .gz behind the suffix is unpacked.
        has_names: whether FILE:NAME,NAME names arrays in it; see `split_names`.
        stays: whether arrays stay in the file, however they are packed there; else `read` takes a
            `team`, which makes large ones.
        is_text: of texts whose suffix tables have, too: whether a file is one by its content.
    """

    suffixes: tuple[str, ...]
    help: str
    gives: Gives
    read: Callable[..., Any]
    packed: bool = True
    has_names: bool = False
    stays: bool = False
    is_text: Callable[[Path], bool] = lambda path: False

    def has_suffix(self, path: Path) -> bool:
        """Return whether a file's name ends in one of the suffixes, in any capitals."""
        name = path.name.lower()
        return (name.removesuffix(".gz") if self.packed else name).endswith(self.suffixes)


READERS = (
    Reader(
        (".csv", ".tsv", ".tab", ".data"),
        "a table, its cells between separators",
        "table",
        delimited_rows,
    ),
    Reader(
        (".csv",),
        "with text columns and no target, a document per row, its columns joined by line breaks",
        "text",
        delimited_documents,
    ),
    Reader(
        (".jsonl",),
        "a table, an object per line, whose fields are the columns",
        "table",
        json_rows,
    ),
    Reader(
        (".jsonl",),
        "without a target, a document per line: the field `text`, or text columns joined by line"
        " breaks",
        "text",
        json_documents,
        is_text=has_text,
    ),
    Reader(
        (".parquet",),
        "a table, with `pip install pyarrow`",
        "table",
        parquet_rows,
        packed=False,
    ),
    Reader(
        (".txt",),
        "one document, whose end is the test part; or of sentences one per line",
        "text",
        plain_documents,
    ),
    Reader(
        (".npz",),
        "arrays `x` and `y`; or `x_train`, `y_train`, `x_test`, `y_test` (or `x_val` ...)",
        "arrays",
        read_npz,
        packed=False,
    ),
    Reader(
        (".npy",),
        "an array, in a folder of `x.npy` and `y.npy`, or of `x_train.npy` ..., or with these in"
        " `train/` and `test/`; alone, samples to predict",
        "arrays",
        read_npy,
        packed=False,
        stays=True,
    ),
    Reader(
        hdf5.SUFFIXES,
        "the same names of arrays, which stay in the file; or others, as in `sim.h5:fields/u,p`",
        "arrays",
        hdf5.read_hdf5,
        packed=False,
        has_names=True,
        stays=True,
    ),
    Reader(
        SUFFIXES,
        "an image, in a folder `CLASS/`; or in `train/CLASS/` and `test/CLASS/` (or `val/`)",
        "image",
        read_image,
        packed=False,
    ),
)
# what reads files that nnmpi does not, by their suffix
BY_PANDAS = dict(
    line.split(maxsplit=1)
    for line in """\
feather pandas.read_feather({})
arrow pandas.read_feather({})
orc pandas.read_orc({})
json pandas.read_json({})
xml pandas.read_xml({})
xlsx pandas.read_excel({})
xls pandas.read_excel({})
xlsm pandas.read_excel({})
ods pandas.read_excel({})
dta pandas.read_stata({})
sav pandas.read_spss({})
sas7bdat pandas.read_sas({})
xpt pandas.read_sas({})
pkl pandas.read_pickle({})
pickle pandas.read_pickle({})
arff pandas.DataFrame(scipy.io.arff.loadarff({})[0])
mat pandas.DataFrame(scipy.io.loadmat({})['x'])""".splitlines()
)


def suffixes_of(gives: Gives) -> tuple[str, ...]:
    """Return the suffixes of files that give this."""
    return tuple(suffix for row in READERS if row.gives == gives for suffix in row.suffixes)


def first_suffixes(*gives: Gives) -> str:
    """Return the first suffix of each form of files that give one of these, as text."""
    return ", ".join(dict.fromkeys(row.suffixes[0] for row in READERS if row.gives in gives))


def split_names(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the path of a data set, and the names of arrays behind it: sim.h5:fields/u,p has two.

    Only files whose reader takes names have some; and a path that exists has none.
    """
    path, colon, names = text.partition(":")
    while colon and not any(row.has_names and row.has_suffix(Path(path)) for row in READERS):
        more, colon, names = names.partition(":")
        path += f":{more}"
    if not colon or not path or Path(text).exists():
        return text, ()
    return path, tuple(names.split(","))


def find_reader(path: Path, columns: Sequence[str] = (), has_label: bool = False) -> Reader | None:
    """Return the row that claims a file; None if none does.

    Where a suffix is both of tables and of texts, a table is what has a column of labels. Else it
    is a text if columns of text are named, or if it is one by its content.

    Args:
        path: of the file.
        columns: the columns that hold text.
        has_label: whether one is named that holds labels.
    """
    rows = {row.gives: row for row in READERS if row.has_suffix(path)}
    if "table" in rows and "text" in rows:
        text = rows.pop("text")
        if not has_label and (columns or text.is_text(path)):
            return text
    if not rows and is_image(path):  # by its content
        return next(row for row in READERS if row.gives == "image")
    return next(iter(rows.values()), None)


def is_table(path: Path) -> bool:
    """Return whether a file may be read as a table."""
    reader = find_reader(path, has_label=True)
    return reader is not None and reader.gives == "table"


def read_table(
    source: Any, rules: TableRules = NO_RULES, labelled: bool = True, team: Team = ALONE
) -> Table:
    """Read a table.

    Args:
        source: the file, or a DataFrame; of a trained model also a mapping of columns, mappings of
            cells, or rows.
        rules: how to read it.
        labelled: whether to read labels; a table without them needs the encoding of another one.
        team: makes the arrays.

    Raises:
        UsageError: for a column that the table does not have, and for a file that is no table.
        DataError: for a damaged table, and for what is none by the rules of `tables`; the message
            names line and column.
    """
    if not isinstance(source, Path):
        return to_table(rows_in(source), rules, labelled, team)
    reader = find_reader(source, has_label=True)
    if reader is None or reader.gives != "table":
        raise unread(source)
    return to_table(reader.read(source, rules), rules, labelled, team)


def load_table(
    source: Any,
    name: str,
    predicts: LabelKind = "classes",
    rules: TableRules = NO_RULES,
    team: Team = ALONE,
) -> Dataset:
    """Return the data set of a table: a file, or a DataFrame."""
    table = read_table(source, rules, team=team)
    return to_dataset(table, name, rules.class_names, predicts, not rules.encoding)


def read_documents(path: Path, columns: Sequence[str] = (), lines: bool = False) -> Pieces:
    """Yield pieces of a file's documents, each with a flag: whether it ends its document.

    Args:
        path: of a text, or of a table with columns of text.
        columns: of the table; the default is "text" for .jsonl.
        lines: whether each line of a .txt is a document.

    Raises:
        UsageError: for a missing column, and for a file that is no text.
        DataError: for an unreadable file, one that is not UTF-8 or not a table, and for an empty
            document.
    """
    row = next((row for row in READERS if row.gives == "text" and row.has_suffix(path)), None)
    if row is None:
        raise unread(path)
    empty = True
    for text, is_whole in row.read(path, columns, lines):
        empty = empty and not text.strip()
        yield text, is_whole and not empty
    if empty:
        raise DataError(f"{path}: the document is empty; give a text, in UTF-8")


def unread(path: Path) -> UsageError:
    """Return the error for a file that no row claims, with the line of code that reads it."""
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    code = BY_PANDAS.get(kind, "pandas.read_csv({}, sep=None, engine='python')").format(
        repr(str(path))
    )
    read = *suffixes_of("table"), *suffixes_of("arrays")
    return UsageError(
        f"{path}: .{kind} files are not read; write a table, {code}.to_csv('table.csv',"
        f" index=False), or in a program train on nnmpi.data.load({code}); read are"
        f" {', '.join(read)} and folders, and of texts {', '.join(suffixes_of('text'))}"
    )
