"""Reading files that anybody may have written: what has no end, or does not end in nesting, is an error like others."""

import json
from pathlib import Path
from typing import Any


def check_ordinary(file: Path) -> None:
    """Refuse what is there and is no ordinary file.

    Raises:
        OSError: for a pipe or a device, which may have no end, and for a folder; when the system does not say.
    """
    if file.exists() and not file.is_file():
        raise OSError("not an ordinary file")


def read_text(file: Path) -> str:
    """Return the text of an ordinary file.

    Raises:
        OSError: when there is none, or it cannot be read.
        ValueError: when it is no UTF-8.
    """
    check_ordinary(file)
    return file.read_text(encoding="utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: when it is none; for numbers of too many digits and lists within lists without end, too.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("values within values, too deep to be read") from None


def read_json(file: Path) -> Any:
    """Return the JSON value in an ordinary file.

    Raises:
        OSError, ValueError: see `read_text` and `parse_json`.
    """
    return parse_json(read_text(file))
