"""Puts tables into a README, between the marks that say where they belong.

<!-- times -->
| ... |
<!-- end -->
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nnmpi.errors import UsageError

_END = "<!-- end -->"


def rewrite(file: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between the marks of each name.

    Raises:
        UsageError: when a name has no marks in the file; nothing is written then.
    """
    text = file.read_text()
    for name, table in tables.items():
        begin = f"<!-- {name} -->\n"
        if text.count(begin) != 1 or _END not in text.partition(begin)[2]:
            raise UsageError(f"{file} has no place for the table {name!r}; mark one by {begin.strip()} and {_END}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table}\n{_END}{rest.partition(_END)[2]}"
    file.write_text(text)


def table(head: str, rows: list[str]) -> str:
    """Return a Markdown table: cells are divided by | in each line given, without the outer ones."""
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|---" * columns + "|", *(f"| {row} |" for row in rows)])
