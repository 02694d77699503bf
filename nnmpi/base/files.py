"""Files that survive a kill: atomic writes, folder locks, one cache folder.

$NNMPI_DATA, or ~/.cache/nnmpi      (macOS: ~/Library/Caches/nnmpi; where it cannot be made,
                                      nnmpi-UID in the folder for temporary files)
  mnist/ ...                          downloads
  sets/, tokens/                      data sets and texts, prepared: see `data.cache`
  fit-*.json, profile-*.json          measurements of this machine
  kernels/                            machine code that numba has made, unless $NUMBA_CACHE_DIR
                                      names a folder

Files of unknown origin cannot hang or crash the program. Endless files (pipes, devices) and endless
nesting raise ordinary errors. `foreign` turns a library's error about a damaged file into a
sentence. A packed file may unpack only to a limit.
"""

import codecs
import errno
import gzip
import hashlib
import io
import json
import os
import shutil
import stat
import sys
import tempfile
import tomllib
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from itertools import chain, groupby, repeat
from math import isfinite
from pathlib import Path, PosixPath
from sys import float_info
from time import sleep
from types import UnionType
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

from nnmpi.base.errors import DataError, NnmpiError, UsageError, raised_as, shortened

VARIABLE = "NNMPI_DATA"
LOCK_FILE = ".lock"
POLL_S = 0.05  # between two attempts to take a lock
PATIENCE = 100  # attempts to be the only one that writes a file
# A packed file may unpack to this many times its size, plus this many bytes: tables and images
# become 3 to 30 times as long, zeros a thousand times. A text takes longer: a row of 6 bytes costs
# a hundred bytes and 3 microseconds.
UNPACKED, UNPACKED_BYTES = 100, 2**28
TEXT, TEXT_BYTES = 30, 2**23
PROBED = 2**20  # bytes of a packed text that may be parsed before all of it is measured
LINE = 2**28  # most characters of a line; text8, a corpus, is one line of 10**8
BLOCK_CHARACTERS = 2**19  # of a text that are read at once
DOTS = 10_000  # of a TOML file: a key of 16,000 names in dots takes tomllib 1 GB and 4 s
BLANK_LINES = 2**20  # most blank lines between two others
JSON_BYTES = 2**26  # most bytes of a JSON value, which takes up to forty times as much memory
# By what nnmpi knows a file of its own: all of a row are in it. A page; a picture as .svg, .png,
# .pdf; a model for ONNX; exported weights (a checkpoint's have no format).
OWN_MARKS = (
    (b'<meta name="generator" content="nnmpi">',),
    (b"<dc:title>nnmpi</dc:title>",),
    (b"Software\0nnmpi",),
    (b"/Creator (nnmpi)",),
    (b"\x12\x05nnmpi",),
    (b'"format":"pt"', b'"nnmpi":"{'),
)
MARKED_BYTES = 2**20  # of a file's beginning and end, in which its marks are
OF_A_RUN = ("config.json", "metrics.jsonl")  # a folder with these is a run's


def expand(path: Path, what: str) -> Path:
    """Return the path with a leading ~ or ~user replaced by the home folder.

    Raises:
        UsageError: when there is no such user, or the user has no home.
    """
    try:
        return path.expanduser()
    except RuntimeError:
        raise UsageError(
            f"{what} {path}: the system has no home folder {path.parts[0]}; give the full path"
        ) from None


def cache_folder() -> Path:
    """Return the folder for all files that nnmpi keeps between runs.

    Raises:
        UsageError: when the user has no home folder, as in a container; see `private`.
    """
    if chosen := os.environ.get(VARIABLE):
        return expand(Path(chosen), f"${VARIABLE}")
    try:
        if sys.platform == "darwin":
            folder = private(Path.home() / "Library" / "Caches" / "nnmpi")
        else:
            parent = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = private(Path(parent) / "nnmpi")
    except RuntimeError:
        raise UsageError(
            f"this user has no home folder to keep files in; set ${VARIABLE} to a folder"
        ) from None
    if folder.is_dir():
        return folder
    # a home that cannot be written
    temporary = Path(tempfile.gettempdir(), f"nnmpi-{os.getuid()}")
    if temporary.is_symlink():
        raise UsageError(f"{temporary} is a link; remove it, or set ${VARIABLE} to a folder")
    return private(temporary)


def private(folder: Path) -> Path:
    """Return a folder that only this user can write; make it if possible.

    What is read from a cache is trusted: compiled kernels are code.

    Raises:
        UsageError: when it belongs to another user.
    """
    with suppress(OSError):  # one that cannot be made is named when it is used
        folder.mkdir(0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid():
            raise UsageError(
                f"{folder} belongs to another user, whose files are not trusted; set ${VARIABLE} to"
                " a folder of your own"
            )
        if found.st_mode & 0o022:
            folder.chmod(found.st_mode & 0o755)
    return folder


@contextmanager
def locked(folder: Path, patience_s: float = 3600.0) -> Iterator[None]:
    """Make the folder and hold its lock; the end of the process releases it in any case.

    Raises:
        UsageError: when the folder cannot be written, or another process keeps the lock for longer
            than `patience_s`. A full disk and an exceeded quota have their own exit status.
    """
    from filelock import FileLock, Timeout

    with raised_as(
        UsageError,
        f"{folder} cannot be written",
        f"give another one, or set ${VARIABLE} if nnmpi chose it",
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            os.close(_open_lock(folder, os.O_RDWR | os.O_CREAT))
            lock = FileLock(folder / LOCK_FILE, timeout=patience_s, poll_interval=POLL_S)
            lock.acquire()
        except Timeout:
            raise UsageError(
                f"{folder} is in use by another process; wait for it to end, or stop it"
            ) from None
    try:
        yield
    finally:
        lock.release()


def _open_lock(folder: Path, flags: int) -> int:
    """Open a folder's lock file, never what a link in its place leads to.

    The folder may be shared, and filelock before 3.20.3 empties the file that it opens.

    Raises:
        UsageError: for a link.
        OSError: when it cannot be opened.
    """
    file = folder / LOCK_FILE
    try:
        return os.open(file, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP and file.is_symlink():
            raise UsageError(
                f"{file} is a link, which may lead to anybody's file; remove it, or give another"
                f" folder, or set ${VARIABLE} if nnmpi chose it"
            ) from None
        raise


def is_locked(folder: Path) -> bool:
    """Return whether a process holds the lock of a folder, as far as the system says.

    Nothing is written, so that a user sees it who may only read.

    Raises:
        UsageError: when this user may not read the lock.
    """
    try:
        from fcntl import LOCK_NB, LOCK_SH, flock

        number = _open_lock(folder, os.O_RDONLY)
    except PermissionError:
        raise UsageError(
            f"{folder / LOCK_FILE} cannot be read by this user, so whether a process works in the"
            " folder is unknown; ask its owner"
        ) from None
    except (ImportError, OSError):  # a browser has no locks; no lock was ever taken
        return False
    try:
        flock(number, LOCK_SH | LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(number)
    return False


@contextmanager
def entered(folder: Path, root: Path | None = None) -> Iterator[int]:
    """Yield a folder's descriptor, for calls relative to it that no link can lead elsewhere.

    All that nnmpi writes into a run's folder, or removes there, it reaches this way: the folder may
    come from somebody else.

    Args:
        folder: to enter.
        root: the folder that the user named, which may be a link; below it, none is followed. None:
            `folder` itself.

    Raises:
        OSError: for a missing folder, and for a link or a file in its place.
    """
    number = os.open(root or folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folder.relative_to(root or folder).parts:
            try:
                below = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=number)
            except NotADirectoryError as error:  # what the system says of a link, too
                raise OSError(error.errno, f"{part} is a link or a file, not a folder") from None
            os.close(number)
            number = below
        yield number
    finally:
        os.close(number)


def opened_to_write(
    file: Path, mode: str = "wb", buffering: int = -1, root: Path | None = None
) -> Any:
    """Open an ordinary file for writing or appending; refuse a link, which may lead anywhere.

    Args:
        mode: "w" or "a" for text, "wb" or "ab" for bytes.
        buffering: as in `open`.
        root: see `entered`.

    Raises:
        OSError: when it cannot be opened.
    """
    check_ordinary(file)
    with entered(file.parent, root) as parent:
        return open(
            file,
            mode,
            buffering,
            None if "b" in mode else "utf-8",
            opener=lambda _, flags: os.open(file.name, flags | os.O_NOFOLLOW, 0o666, dir_fd=parent),
        )


class OutputFile(PosixPath):
    """A file for a command to write, as the type of an option: see `command.check_output`."""


def is_own(file: Path) -> bool:
    """Return whether nnmpi has written a file, by the marks in it."""
    with file.open("rb") as stream:
        text = stream.read(MARKED_BYTES)
        stream.seek(max(len(text), file.stat().st_size - MARKED_BYTES))
        text += stream.read(MARKED_BYTES)
    return any(all(mark in text for mark in row) for row in OWN_MARKS)


def write_synced(file: Path, content: bytes, root: Path | None = None) -> None:
    """Write a file and sync it to disk; a kill may leave half of it."""
    with opened_to_write(file, root=root) as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def write_atomically(file: Path, content: bytes, root: Path | None = None) -> None:
    """Replace a file's content atomically: readers see the old or the new one, also after a crash.

    A link is replaced, not followed.

    Args:
        root: see `entered`.

    Raises:
        OSError: when the disk is full or not writable; the old content stays. Also for a device
            such as /dev/null, which root would replace.
    """
    if not file.is_dir():  # the system says so
        check_ordinary(file)
    # the same name, so that the next write removes what a killed process has left
    temporary = file.parent / f".{file.name}.tmp"  # a folder such as . has no name
    with entered(file.parent, root) as parent:
        with _only_writer(temporary.name, parent):
            write_synced(temporary, content, root)
            os.replace(temporary.name, file.name, src_dir_fd=parent, dst_dir_fd=parent)
        os.fsync(parent)


@contextmanager
def _only_writer(name: str, parent: int) -> Iterator[None]:
    """Create a file for the body, which renames it, and hold its lock: others may write it, too.

    The lock is on this file, not on the folder, which users lock for purposes of their own. One
    that is stopped meanwhile is not awaited for ever.
    """
    number = None
    for _ in range(PATIENCE):
        with suppress(FileExistsError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            number = os.open(name, flags, 0o666, dir_fd=parent)
            if _take_lock(number) is not False and _is_still(name, parent, number):
                break
            os.close(number)  # another command took it for a killed one's, and removes it
            number = None
        if not _remove_left_over(name, parent):
            sleep(POLL_S)
    else:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=parent)
    try:
        yield
    except BaseException:
        if number is None or _is_still(name, parent, number):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=parent)
        raise
    finally:
        if number is not None:
            os.close(number)


def _remove_left_over(name: str, parent: int) -> bool:
    """Remove a file that nobody writes any more, or a link or a pipe in its place.

    Returns:
        whether it is gone.
    """
    try:
        number = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=parent)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            return False
        os.unlink(name, dir_fd=parent)
        return True
    try:
        if not (_take_lock(number) and _is_still(name, parent, number)):
            return False
        os.unlink(name, dir_fd=parent)  # under its lock: who has just created it, notices
        return True
    finally:
        os.close(number)


def _take_lock(number: int) -> bool | None:
    """Take a file's lock if it is free; return whether it was, None where there are no locks."""
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock

        flock(number, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # a browser and some file systems
        return None
    return True


def _is_still(name: str, parent: int, number: int) -> bool:
    """Return whether a name is that of an open file."""
    with suppress(FileNotFoundError):
        found = os.stat(name, dir_fd=parent, follow_symlinks=False)
        return os.path.samestat(found, os.fstat(number))
    return False


def write_text(file: Path, text: str) -> None:
    """Write a text; see `write_atomically`. A device or a link, such as /dev/stdout, is kept."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        file.write_text(text, encoding="utf-8")
    else:
        write_atomically(file, text.encode())


def write_json(file: Path, value: Any, root: Path | None = None) -> None:
    """Replace a file's content by a JSON value; see `write_atomically` and `json_text`."""
    write_atomically(file, json_text(value, indent=1).encode() + b"\n", root)


@contextmanager
def folder_atomically(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; it is synced and renamed when the body ends.

    Raises:
        OSError: when it cannot be written, or there is something of its name.
    """
    temporary, root = folder.with_name(f".{folder.name}.tmp"), folder.parent
    remove_folder(temporary, root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        make_folder(temporary, root)
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
        sync_folder(temporary, root)
        rename(temporary, folder.name)
        sync_folder(root)
    finally:
        remove_folder(temporary, root)


def rename(path: Path, name: str, root: Path | None = None) -> None:
    """Give a file or folder another name in its folder; see `entered` for `root`."""
    with entered(path.parent, root) as parent:
        os.rename(path.name, name, src_dir_fd=parent, dst_dir_fd=parent)


def make_folder(folder: Path, root: Path | None = None) -> None:
    """Create a folder in an existing one; an existing folder stays.

    Args:
        root: see `entered`.

    Raises:
        OSError: for a link or a file in its place.
    """
    with entered(folder.parent, root) as parent:
        try:
            os.mkdir(folder.name, dir_fd=parent)
        except FileExistsError:
            if not stat.S_ISDIR(os.stat(folder.name, dir_fd=parent, follow_symlinks=False).st_mode):
                raise


def remove_folder(folder: Path, root: Path | None = None) -> None:
    """Remove a folder with all in it as far as the system lets; never what a link leads to.

    Args:
        root: see `entered`.
    """
    with suppress(OSError), entered(folder.parent, root) as parent:
        if not folder.is_symlink():
            shutil.rmtree(folder.name, ignore_errors=True, dir_fd=parent)
        else:
            os.unlink(folder.name, dir_fd=parent)


def sync_folder(folder: Path, root: Path | None = None) -> None:
    """Sync a folder to disk, so that new and renamed entries survive a crash."""
    with entered(folder, root) as number:
        os.fsync(number)


def sha256(file: Path) -> str:
    """Return the file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_ordinary(file: Path) -> None:
    """Refuse an existing path that is no ordinary file.

    Raises:
        OSError: for a folder, and for a pipe or a device, which may have no end; also when the
            system cannot examine the path.
    """
    if file.exists() and not file.is_file():
        raise OSError("not an ordinary file")


@contextmanager
def foreign(file: Path, kind: type[NnmpiError], what: str = "cannot be read") -> Iterator[None]:
    """Turn any error of a library about a user's file into "FILE: WHAT (its reason)".

    Catches BaseException: the panics of libraries in Rust are not subclasses of Exception.
    """
    try:
        check_ordinary(file)
        yield
    except (NnmpiError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = str(getattr(error, "strerror", None) or error)
        raise kind(f"{file}: {what} ({shortened(reason)})") from error


def read_text(file: Path) -> str:
    """Return the text of an ordinary file.

    Raises:
        OSError: when the file is missing or unreadable.
        ValueError: when it is not UTF-8.
    """
    check_ordinary(file)
    return file.read_text(encoding="utf-8")


def json_text(value: Any, **form: Any) -> str:
    """Return a value as JSON text, the only way in which nnmpi writes JSON for others.

    Args:
        form: as `json.dumps` takes it.

    Raises:
        ValueError: for NaN and infinity, which JSON lacks and other programs refuse.
    """
    return json.dumps(value, allow_nan=False, **form)


def parse_json(text: str | bytes, once: bool = False) -> Any:
    """Return the value of a JSON text.

    Args:
        text: of the value.
        once: whether an object may not name a field twice; else the last one counts.

    Raises:
        ValueError: when the text is not JSON, which has no NaN, a number is too large or has too
            many digits, lists are nested too deeply, or a field is there twice.
    """
    try:
        of_pairs = _without_doubles if once else None
        return json.loads(
            text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=of_pairs
        )
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict[str, Any]()
    for name, value in pairs:
        if name in result:
            raise ValueError(f"it names {name!r} twice")
        result[name] = value
    return result


def _finite(text: str) -> float:
    if isfinite(number := float(text)):
        return number
    raise ValueError(f"{text} is no finite number")


def read_json(file: Path) -> Any:
    """Return the JSON value in an ordinary file.

    Raises:
        OSError, ValueError: see `read_text` and `parse_json`; also for one of more than
            `JSON_BYTES`.
    """
    check_ordinary(file)
    if file.stat().st_size > JSON_BYTES:
        raise ValueError(f"it is longer than {JSON_BYTES >> 20} MiB")
    return parse_json(read_text(file))


def read_records(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of an ordinary file with one in each line.

    A last line without its end, which a kill has truncated, is left out.

    Raises:
        OSError: when the file is missing or unreadable.
        ValueError: names the first line that is no JSON object.
    """
    check_ordinary(file)
    with file.open(encoding="utf-8", newline="\n") as stream:
        number = 0
        while line := stream.readline(JSON_BYTES):
            number += 1
            is_whole = line.endswith("\n")
            try:
                record = parse_json(line)
                if not isinstance(record, dict):
                    raise ValueError(f"{shortened(line.strip(), 40)} is no JSON object")
            except ValueError as error:
                if is_whole or stream.read(1):
                    raise ValueError(f"line {number}: {error}") from None
                return
            yield record


def read_toml(file: Path) -> Any:
    """Return the values in a TOML file.

    Raises:
        OSError, ValueError: see `read_text`; also when the text is not TOML, or nested too deeply.
    """
    text = read_text(file)
    if text.count(".") > DOTS:
        raise ValueError(f"it has more than {DOTS:,} dots")
    try:
        repr(result := tomllib.loads(text.removeprefix("\ufeff")))  # as an error would show it
        return result
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def rebuilt(kind: Any, value: Any) -> Any:
    """Return the value of this type that was written as JSON, such as a dataclass of dataclasses.

    Raises:
        AttributeError, KeyError, TypeError, ValueError: for a value of another type.
    """
    origin, of = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, UnionType):
        return None if value is None else rebuilt(of[0], value)
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        for name in value.keys() - hints.keys():
            raise TypeError(f"{name} is not one of {', '.join(hints)}")
        return kind(**{name: rebuilt(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if kind is not bool and int in getattr(kind, "__bases__", ()):
        # Bytes may be written as text, such as "1GiB"
        return kind(str(value))
    if origin is tuple and isinstance(value, list | tuple):
        if of[-1] is not ... and len(of) != len(value):
            raise ValueError(f"{shortened(repr(value))} has {len(value)} values, not {len(of)}")
        return tuple(map(rebuilt, repeat(of[0]) if of[-1] is ... else of, value))
    if origin is Mapping:  # JSON has a list of pairs if keys are not text
        pairs = value.items() if isinstance(value, dict) else value
        return {rebuilt(of[0], key): rebuilt(of[1], item) for key, item in pairs}
    fits = (
        value in of
        if origin is Literal
        else isinstance(value, int | float if kind is float else origin or kind)
    )
    if isinstance(value, bool) and kind in (int, float):  # Python's True is 1, JSON's is not
        fits = False
    if fits and kind is float and not abs(value) <= float_info.max:  # a whole number of many digits
        raise ValueError(f"{shortened(repr(value))} is no finite number")
    if not fits:
        raise TypeError(f"{shortened(repr(value))} is given for {getattr(kind, '__name__', kind)}")
    return value


def check_unpacked(
    path: Path, nbytes: int, packed: int | None = None, is_text: bool = False
) -> None:
    """Refuse packed data that unpack to far more bytes, before they fill the memory.

    Args:
        path: the packed file, or a folder of packed files.
        nbytes: the unpacked size that its header gives, or the bytes unpacked so far.
        packed: the bytes of all files; None for those of `path`.
        is_text: whether it is parsed line by line.

    Raises:
        DataError: above the limit.
    """
    times, free = (TEXT, TEXT_BYTES) if is_text else (UNPACKED, UNPACKED_BYTES)
    if nbytes > free + times * (path.stat().st_size if packed is None else packed):
        raise DataError(
            f"{path} unpacks to more than {times} times its size; if that is intended, unpack"
            " it first"
        )


class _Unpacked(io.RawIOBase):
    """The unpacked bytes of a gz file, up to the limit of `check_unpacked`.

    A text is measured when PROBED bytes of it were read. Unpacking takes a hundredth of the time of
    parsing, so a text that is too long is refused before nearly all of that time is spent.
    """

    def __init__(self, path: Path, plain: BinaryIO, is_text: bool) -> None:
        self._path, self._is_text, self._is_measured = path, is_text, not is_text
        self._stream = gzip.GzipFile(fileobj=plain)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._stream.readinto(buffer)
        check_unpacked(self._path, self._stream.tell(), is_text=self._is_text)
        if not self._is_measured and self._stream.tell() > PROBED:
            self._is_measured = True
            self._measure()
        return count

    def _measure(self) -> None:
        """Unpack all of the file, into nothing."""
        chunk = bytearray(PROBED)
        with self._path.open("rb") as plain, gzip.GzipFile(fileobj=plain) as stream:
            while stream.readinto(chunk):
                check_unpacked(self._path, stream.tell(), is_text=self._is_text)


@contextmanager
def opened(path: Path, is_text: bool = False) -> Iterator[io.BufferedReader]:
    """Open an ordinary file for reading its bytes, unpacked when its name ends in .gz.

    Args:
        path: of the file.
        is_text: whether it is parsed line by line, for which the limits are lower.

    Raises:
        DataError: for a missing or unreadable file, and for a gz stream that is truncated, damaged
            or far too long.
    """
    try:
        check_ordinary(path)
        with path.open("rb") as plain:
            packed = path.suffix == ".gz"
            yield io.BufferedReader(_Unpacked(path, plain, is_text)) if packed else plain
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: not a complete gz file ({error}); get it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text, plain or .gz, each with its newline.

    Raises:
        DataError: see `read_line_blocks`.
    """
    return chain.from_iterable(read_line_blocks(path))


def read_line_blocks(path: Path, newline: str | None = None) -> Iterator[list[str]]:
    """Yield the lines of a UTF-8 text, plain or .gz, each with its newline, many at once.

    Args:
        path: of the file.
        newline: what ends a line, as for `open`; "" keeps its ends as they are.

    Raises:
        DataError: see `opened`; also for other text, endless lines, and heaps of blank lines.
    """
    blank = 0
    try:
        with (
            opened(path, is_text=True) as stream,
            io.TextIOWrapper(stream, "utf-8-sig", newline=newline) as text,
        ):
            if stream.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
                raise DataError(f"{path} is UTF-16 text; save it as UTF-8")
            while characters := text.read(BLOCK_CHARACTERS):
                characters += text.readline(LINE + 1)
                lines = io.StringIO(characters, newline="").readlines()
                if max(map(len, lines)) > LINE:
                    raise DataError(
                        f"{path} has a line of more than {LINE:,} characters; divide it"
                    )
                if not any(map(str.isspace, lines)):
                    blank = 0
                    yield lines
                    continue
                for is_blank, run in groupby(map(str.isspace, lines)):
                    blank = blank + len([*run]) if is_blank else 0
                    if blank > BLANK_LINES:
                        raise DataError(
                            f"{path} has more than {BLANK_LINES:,} blank lines in a row; remove"
                            " them"
                        )
                yield lines
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text ({error.reason}); convert it") from error


def read_bytes(path: Path) -> bytes:
    """Return the content of a file, unpacked when its name ends in .gz.

    Raises:
        DataError: see `opened`; also for an empty file.
    """
    with opened(path) as stream:
        content = stream.read()
    if not content:
        raise DataError(f"{path}: the file is empty")
    return content
