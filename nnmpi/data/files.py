"""Finding data files, and reading their bytes, plain or gz."""

import gzip
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nnmpi.errors import DataError
from nnmpi.reading import check_ordinary


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked when its name ends in .gz.

    Raises:
        DataError: for a file that is missing, unreadable or empty, or a gz stream that is cut or damaged.
    """
    with opened(path) as stream:
        content = stream.read()
    if not content:
        raise DataError(f"{path}: the file is empty")
    return content


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    """Open a file for reading its bytes, unpacked when its name ends in .gz.

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


def find(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these files, plain before .gz, that the folder has, or None."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None
