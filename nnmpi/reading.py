"""Reading files that anybody may have written: what has no end, or does not end in nesting, is an error like others."""

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from nnmpi.errors import DataError


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


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open an ordinary file for reading its bytes, unpacked when its name ends in .gz.

    Raises:
        DataError: for a file that is missing or unreadable, or a gz stream that is cut or damaged.
    """
    try:
        check_ordinary(path)
        with path.open("rb") as plain:
            yield gzip.GzipFile(fileobj=plain) if path.suffix == ".gz" else plain
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gz file ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked when its name ends in .gz.

    Raises:
        DataError: see `opened`; and for an empty file.
    """
    with opened(path) as stream:
        content = stream.read()
    if not content:
        raise DataError(f"{path}: the file is empty")
    return content
