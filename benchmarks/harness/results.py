"""The JSON files of results: replaced as a whole, so that an interruption leaves what was measured
before.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from nnmpi.errors import UsageError, raised_as
from nnmpi.files import write_atomically


def check_writable(option: str, file: Path | None) -> None:
    """Find out before anything is measured whether a file can be made, without making it.

    Args:
        option: that named the file.
        file: None when the option was not given; then all is well.

    Raises:
        UsageError: when it is a folder, or its own folder is missing or refuses files.
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
    """Give the file this content; do nothing without a file.

    Raises:
        OSError: when the disk is full or gone.
    """
    if file is not None:
        write_atomically(file, (json.dumps(content, indent=1) + "\n").encode())
