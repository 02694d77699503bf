"""The file of results: written anew, at once, after each size, so that an interruption leaves what was measured."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.collectives.rows import Row
from nnmpi.errors import UsageError
from nnmpi.train.files import replace_durably


def check_writable(option: str, file: Path) -> None:
    """Make sure that the file can be made, without making it.

    Raises:
        UsageError: when it is a folder, or its own folder is missing or refuses files.
    """
    if file.is_dir():
        raise UsageError(f"{option} {file} is a folder; give the name of a file in it")
    try:
        number, probe = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise UsageError(f"{option} {file} cannot be written: {error.strerror}; give a path that can") from None
    os.close(number)
    os.unlink(probe)


def write(file: Path, header: Mapping[str, Any], rows: list[Row], finished: bool) -> None:
    """Replace the file by the header and these rows.

    Raises:
        OSError: when the disk is full or gone.
    """
    content = {"header": {**header, "finished": finished}, "rows": [row.record() for row in rows]}
    replace_durably(file, (json.dumps(content, indent=1) + "\n").encode())


def read(file: Path) -> dict[str, Any]:
    """Return what `write` wrote: "header" and "rows".

    Raises:
        UsageError: for another kind of file.
    """
    try:
        content: dict[str, Any] = json.loads(file.read_text())
        content["rows"][0]["algorithm"], content["header"]["ranks"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UsageError(f"{file} holds no rows of this benchmark: {error}") from None
    return content
