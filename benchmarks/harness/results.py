"""The JSON files of results, replaced atomically: an interruption leaves the previous content."""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from nnmpi.base.errors import UsageError, raised_as
from nnmpi.base.files import write_atomically


def check_writable(option: str, file: Path | None) -> None:
    """Check before a measurement that the file can be made, without making it.

    Args:
        option: the option that names the file.
        file: None without the option.

    Raises:
        UsageError: for a folder, and if its folder is missing or refuses files.
    """
    if file is None:
        return
    if file.is_dir():
        raise UsageError(f"{option} {file} is a folder; give the name of a file in it")
    with (
        raised_as(UsageError, f"{option} {file} cannot be written", "give a path that can"),
        NamedTemporaryFile(prefix=f".{file.name}.", dir=file.parent),
    ):
        pass


def write(file: Path | None, content: Mapping[str, Any]) -> None:
    """Write the content, if there is a file."""
    if file is not None:
        write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())
