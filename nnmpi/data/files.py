"""Finding data files and reading their bytes, plain or gz."""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

from nnmpi.errors import DataError, UsageError


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked when its name ends in .gz.

    Raises:
        DataError: for a file that is missing, unreadable or empty, or a gz stream that is cut or damaged.
    """
    try:
        content = path.read_bytes()
        if content and path.suffix == ".gz":
            content = gzip.decompress(content)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a whole gz file ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error
    if not content:
        raise DataError(f"{path}: the file is empty")
    return content


def expand(path: Path, what: str) -> Path:
    """Return the path with ~ or ~user at its head replaced by the home folder that it stands for.

    Raises:
        UsageError: when there is no such user, or the user has no home.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(f"{what} {path}: the system knows no home folder {path.parts[0]}; write it out") from None


def find(folder: Path, names: Iterable[str]) -> Path | None:
    """Return the first of these files, plain before .gz, that the folder has, or None."""
    for name in names:
        for path in (folder / name, folder / f"{name}.gz"):
            if path.is_file():
                return path
    return None
