"""Downloading one file: mirrors in order, resumed where it broke off, checked, and put in place whole or not at all.

    mirror 1 -> part file -> size, SHA-256 -> fsync -> rename      done
       | 404, stalled, wrong checksum ...
    mirror 2 -> ...

Each mirror has its own part file, because mirrors may pack the same content differently. A part file that is left
(the process was killed, the line broke) is continued by the next attempt with a Range request.
"""

import gzip
import hashlib
import http.client
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from nnmpi.data.sources import Source
from nnmpi.errors import DataError

BLOCK_BYTES = 1 << 16
LEAST_BYTES_PER_S = 1000


class MirrorError(Exception):
    """What one mirror did wrong, in words. `resume` says whether asking it again may help."""

    def __init__(self, text: str, *, resume: bool = False) -> None:
        super().__init__(text)
        self.resume = resume


def silent(_: str) -> None:
    """Report nothing."""


def download(
    source: Source,
    folder: Path,
    *,
    stall_s: float = 30.0,
    tries: int = 5,
    report: Callable[[str], None] = silent,
) -> Path:
    """Return the path of the file in the folder, downloaded and checked if it is not there yet.

    Args:
        source: what to download, from where, and its checksum.
        folder: where the file will lie.
        stall_s: a mirror that sends nothing for this long, or next to nothing, is given up for this attempt.
        tries: attempts for each mirror; only a transfer that broke off after making progress is tried again.
        report: called with a sentence when a transfer begins.

    Raises:
        DataError: when no mirror gave the file (the message says what each one did) or the folder cannot be written.
    """
    final = folder / source.filename
    if final.is_file():
        return final
    said = []
    for url in source.urls:
        part = folder / f".{source.filename}.{hashlib.sha256(url.encode()).hexdigest()[:8]}.part"
        report(f"downloading {source.filename} from {urlsplit(url).netloc}")
        try:
            _from_mirror(url, part, source, stall_s, tries)
        except MirrorError as error:
            said.append(f"{url}: {error}")
            continue
        _put_in_place(part, final)
        return final
    raise DataError(
        f"{source.filename} could not be downloaded to {folder} ({'; '.join(said)}); "
        "try again later, or get the file by other means and name its folder as data_dir"
    )


def _from_mirror(url: str, part: Path, source: Source, stall_s: float, tries: int) -> None:
    """Fill the part file from one mirror until it passes the check, or raise MirrorError."""
    for attempt in range(tries):
        before = _size(part)
        try:
            _transfer(url, part, source, stall_s)
        except MirrorError as error:
            if not (error.resume and _size(part) > before) or attempt == tries - 1:
                raise
            continue
        problem = check(part, source)
        if problem is None:
            return
        _remove(part)
        if before == 0:
            raise MirrorError(problem)
        # Old bytes and new ones did not fit together: this mirror gets one chance to send the whole file.
    raise MirrorError(f"sent a damaged file {tries} times")


def _transfer(url: str, part: Path, source: Source, stall_s: float) -> None:
    """Append to the part file what the mirror still has to send.

    Raises:
        MirrorError: when the mirror refuses, stalls, or breaks off; what was received stays in the part file.
    """
    have = _size(part)
    headers = {"User-Agent": "nnmpi", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        with _opener().open(urllib.request.Request(url, headers=headers), timeout=stall_s) as response:
            resumed = response.status == http.client.PARTIAL_CONTENT
            if resumed and not str(response.headers["Content-Range"]).startswith(f"bytes {have}-"):
                _remove(part)
                raise MirrorError(f"answered with the wrong range {response.headers['Content-Range']!r}")
            length = response.headers["Content-Length"]
            start = have if resumed else 0  # a server without Range sends everything again
            total = start + int(length) if length and re.fullmatch("[0-9]{1,18}", length) else None
            _receive(response, part, start, source, stall_s)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is left to send: the part file is whole, or the check will throw it away
        raise MirrorError(f"HTTP status {error.code} {error.reason}") from error
    except TimeoutError as error:
        raise MirrorError(f"sent nothing for {stall_s:g} s", resume=True) from error
    except urllib.error.URLError as error:
        stalled = isinstance(error.reason, TimeoutError)
        raise MirrorError(f"no answer for {stall_s:g} s" if stalled else f"{error.reason}") from error
    except ValueError as error:  # what its redirect names is no address
        raise MirrorError(f"sent to an address that cannot be read ({error})") from error
    except (OSError, http.client.HTTPException) as error:
        raise MirrorError(f"connection broken ({error})", resume=True) from error
    if total is not None and _size(part) < total:
        raise MirrorError(f"broke off after {_size(part)} of {total} bytes", resume=True)


class _Limited(urllib.request.AbstractHTTPHandler):
    """Gives up a head of an answer that drips in: a socket's own limit is for each byte."""

    def do_open(self, http_class: Any, req: urllib.request.Request, **options: Any) -> http.client.HTTPResponse:
        """Open it with a connection that ends when the head of its answer has not come within its limit."""

        class Connection(http_class):  # type: ignore[misc]
            def getresponse(self) -> Any:
                """Return the answer once its head is here."""
                late, sock = threading.Event(), self.sock

                def give_up() -> None:
                    late.set()
                    with suppress(OSError):  # it may have ended by itself
                        sock.shutdown(socket.SHUT_RDWR)

                timer = threading.Timer(self.timeout, give_up)
                timer.daemon = True
                timer.start()
                try:
                    return super().getresponse()
                finally:
                    timer.cancel()
                    if late.is_set():
                        raise urllib.error.URLError(TimeoutError())

        return super().do_open(Connection, req, **options)


class _Http(_Limited, urllib.request.HTTPHandler):
    """By http."""


class _Https(_Limited, urllib.request.HTTPSHandler):
    """By https."""


def _opener() -> urllib.request.OpenerDirector:
    """Return what opens http and https alone, also where it is redirected to."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        _Http,
        _Https,
        urllib.request.HTTPDefaultErrorHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.UnknownHandler,
    ):
        opener.add_handler(handler())
    return opener


def _receive(response: http.client.HTTPResponse, part: Path, start: int, source: Source, stall_s: float) -> None:
    # A gz file may be a little larger than its content, never much: more than this is something else.
    limit = source.size_bytes + (source.size_bytes // 100 + 1024 if source.unpacked else 0)
    with _writing(part, start) as file:
        checked, before = time.monotonic(), start
        while block := response.read1(BLOCK_BYTES):
            start += len(block)
            if start > limit:
                file.close()
                _remove(part)
                raise MirrorError(f"sent more than the {limit} bytes that the file can have")
            _write(file, block, part)
            if time.monotonic() - checked > stall_s:
                if start - before < LEAST_BYTES_PER_S * stall_s:
                    raise MirrorError(f"sent {start - before} bytes in {stall_s:g} s", resume=True)
                checked, before = time.monotonic(), start


def _writing(part: Path, start: int) -> IO[bytes]:
    try:
        # Whoever may write into a shared folder could leave a link there, to a file of this user's.
        file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666), "r+b", 0)
        file.truncate(start)
        file.seek(start)
    except OSError as error:
        raise DataError(f"{part}: cannot be written ({error.strerror})") from error
    return file


def _write(file: IO[bytes], block: bytes, part: Path) -> None:
    view = memoryview(block)
    try:
        while view:
            view = view[file.write(view) :]
    except OSError as error:  # a full disk is not the mirror's fault
        raise DataError(f"{part}: cannot be written ({error.strerror})") from error


def check(path: Path, source: Source) -> str | None:
    """Return what is wrong with the file's size or checksum, as half a sentence, or None when it is right."""
    digest, size = hashlib.sha256(), 0
    what = "unpacked content" if source.unpacked else "file"
    try:
        with gzip.open(path) if source.unpacked else path.open("rb") as file:
            while size <= source.size_bytes and (block := file.read(BLOCK_BYTES)):
                digest.update(block)
                size += len(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"sent something that is not a whole gz file ({error})"
    except FileNotFoundError:
        return "sent nothing"
    if size != source.size_bytes:
        more = "more than " if size > source.size_bytes else ""
        return f"the {what} has {more}{min(size, source.size_bytes)} bytes and should have {source.size_bytes}"
    if digest.hexdigest() != source.sha256:
        return f"the {what} has SHA-256 {digest.hexdigest()} and should have {source.sha256}"
    return None


def _put_in_place(part: Path, final: Path) -> None:
    """Give the checked file its name, on disk before the name; then remove what other mirrors left."""
    try:
        with part.open("rb+") as file:
            os.fsync(file.fileno())
        part.replace(final)
        if os.name == "posix":  # the new name is on disk once the folder is
            handle = os.open(final.parent, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
    except OSError as error:
        raise DataError(f"{final}: cannot be written ({error.strerror})") from error
    for other in final.parent.glob(f".{final.name}.*.part"):
        _remove(other)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
