"""Tables from rows and columns: Markdown for a README, text for a screen; and the tables inside a
README.

A column is a title and a cell: a key of the rows, or a function of a row.

    render((("case", "case"), ("ms", lambda row: ms(row["step_s"]))), rows, markdown=True)
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from nnmpi.base.errors import UsageError

Cell: TypeAlias = str | Callable[[Any], Any]
Columns: TypeAlias = Sequence[tuple[str, Cell]]

MISSING = "-"
_END = "<!-- end -->"


def render(columns: Columns, rows: Iterable[Any], markdown: bool = True) -> str:
    """Return the table of some rows.

    Args:
        columns: title and cell of each.
        rows: mappings, or the arguments of the columns' functions.
        markdown: False: aligned text.
    """
    cells = [
        [title for title, _ in columns],
        *([_text(cell, row) for _, cell in columns] for row in rows),
    ]
    if markdown:
        head, *body = (f"| {' | '.join(row)} |" for row in cells)
        return "\n".join([head, "|---" * len(columns) + "|", *body])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    )


class GrowingTable:
    """A table that is printed row by row during the measurement, with fixed widths.

    Args:
        columns: title, width and cell of each; cells are right-aligned, left-aligned for a negative
            width.
    """

    def __init__(self, *columns: tuple[str, int, Cell]) -> None:
        self._columns = columns

    def head(self) -> str:
        """Return the heading."""
        return "".join(_pad(title, width) for title, width, _ in self._columns).rstrip()

    def line(self, row: Any) -> str:
        """Return a row's line."""
        return "".join(_pad(_text(cell, row), width) for _, width, cell in self._columns).rstrip()


def _text(cell: Cell, row: Any) -> str:
    return str(row[cell] if isinstance(cell, str) else cell(row))


def _pad(text: str, width: int) -> str:
    return f"{text:>{width}}" if width > 0 else f"{text:<{-width}}"


def labelled(pairs: Iterable[tuple[str, Any]]) -> str:
    """Return names and values, a line for each pair, the values aligned."""
    result = list(pairs)
    width = max((len(name) for name, _ in result), default=0) + 1
    return "\n".join(f"{name + ':':<{width}} {value}" for name, value in result)


def rewrite(file: Path, tables: Mapping[str, str]) -> None:
    """Replace tables in a README, between their marks.

        <!-- times -->
        | ... |
        <!-- end -->

    Args:
        file: the README.
        tables: by the names in the marks.

    Raises:
        UsageError: for a name without marks in the file; then nothing is written.
    """
    text = file.read_text()
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        if text.count(begin) != 1 or _END not in text.partition(begin)[2]:
            raise UsageError(
                f"{file} has no place for the table {name!r}; mark one by {begin.strip()} and"
                f" {_END}"
            )
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n{_END}{rest.partition(_END)[2]}"
    file.write_text(text)


def number(value: float | None, form: str = ".2f") -> str:
    """Return a number in this format; a dash for None, which means not measured."""
    return MISSING if value is None else format(value, form)


def percent(share: float | None) -> str:
    """Return a share of 1 in percent with its sign; a dash for None."""
    return MISSING if share is None else f"{100 * share:.1f} %"


def ms(seconds: float) -> str:
    """Return milliseconds with three significant digits."""
    value = 1e3 * seconds
    return f"{value:.{max(0, 2 - len(str(int(value))) + (value < 1) + 1)}f}"


def ms1(seconds: float) -> str:
    """Return milliseconds with one decimal."""
    return f"{1e3 * seconds:.1f}"


def mib(nbytes: float | None) -> str:
    """Return bytes in MiB; a dash for None."""
    return MISSING if nbytes is None else f"{nbytes / 2**20:.0f}"


def spread(middle: float, quartiles: Sequence[float], text: Callable[[float], str] = number) -> str:
    """Return a median with its quartiles: "1.70 (1.60 to 1.80)".

    Args:
        middle: the median.
        quartiles: the first and the third.
        text: formats a number.
    """
    first, third = quartiles
    return f"{text(middle)} ({text(first)} to {text(third)})"
