"""The JSON file: replaced as a whole after each case, so that what is there can be read at any time."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnmpi.errors import UsageError


def check_writable(option: str, file: Path) -> None:
    """Find out before anything is measured whether a file can be written.

    Raises:
        UsageError: when it cannot.
    """
    folder = file.parent
    if not folder.is_dir() or not os.access(folder, os.W_OK) or file.is_dir():
        raise UsageError(f"{option} {file} cannot be written; give a file in a folder that is there")


def write(file: Path, content: Mapping[str, Any]) -> None:
    """Replace the file."""
    unfinished = file.with_name(file.name + ".unfinished")
    unfinished.write_text(json.dumps(content, indent=1) + "\n")
    unfinished.replace(file)
