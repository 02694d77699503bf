"""Puts tables into a README, between the marks that say where they belong.

<!-- times -->
| ... |
<!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from nnmpi.errors import UsageError


def rewrite(file: Path, tables: Mapping[str, str]) -> None:
    """Replace what stands between the marks of each name.

    Raises:
        UsageError: when a name has no marks in the file; nothing is written then.
    """
    text = file.read_text()
    for name, table in tables.items():
        pieces = re.split(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end -->)", text, flags=re.DOTALL)
        if len(pieces) != 2:
            raise UsageError(f"{file} has {len(pieces) - 1} places for the table {name!r}; mark one by <!-- {name} -->")
        text = f"{pieces[0]}{table}\n{pieces[1]}"
    file.write_text(text)


def table(head: str, rows: list[str]) -> str:
    """Return a Markdown table: cells are divided by | in each line given, without the outer ones."""
    columns = head.count("|") + 1
    return "\n".join([f"| {head} |", "|---" * columns + "|", *(f"| {row} |" for row in rows)])
