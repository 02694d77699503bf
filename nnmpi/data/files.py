"""Finding data files, reading their bytes, plain or gz, and the folder in which downloads are kept."""

import gzip
import os
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from nnmpi.errors import DataError, UsageError
from nnmpi.reading import check_ordinary

VARIABLE = "NNMPI_DATA"  # of the environment: the folder for downloads
POLL_S = 0.1  # between two looks at a lock that another process holds


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


def cache_folder() -> Path:
    """Return the folder for downloads: $NNMPI_DATA, or nnmpi in the platform's folder for a user's caches.

    Raises:
        UsageError: when the user has no home folder.
    """
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return expand(Path(chosen), f"${VARIABLE}")
    try:
        if sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        elif sys.platform == "win32":
            base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
        else:
            base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # as in a container, whose users need not be known to it
        raise UsageError(
            f"this user has no home folder to keep downloads in; name a folder in ${VARIABLE}, or local files as "
            "data_dir"
        ) from None
    return base / "nnmpi"


@contextmanager
def locked(folder: Path, *, patience_s: float = 3600.0) -> Iterator[None]:
    """Create the folder and hold its lock, so that nodes with a shared home folder download one after the other.

    The lock is the system's (flock) on a file that stays; it is released when its holder ends, however it ends.
    Where the file system has no locks the block runs without: the worst case is a download done twice, because
    files are renamed into place whole.

    Raises:
        DataError: when the folder cannot be written, or another process holds the lock for longer than patience_s.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror}); name another folder in ${VARIABLE}, or local files "
            "as data_dir"
        ) from error
    try:
        _wait_for_lock(handle, folder, time.monotonic() + patience_s)
        yield
    finally:
        os.close(handle)


def _wait_for_lock(handle: int, folder: Path, deadline_s: float) -> None:
    try:
        import fcntl
    except ImportError:  # Windows: no flock
        return
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline_s:
                text = f"{folder}: another process has been downloading for too long; end it, then try again"
                raise DataError(text) from None
            time.sleep(POLL_S)
        except OSError:  # a file system without locks
            return
