"""Downloading one file by pooch: mirrors in order, checked, and put in place whole or not at all."""

import gzip
import hashlib
import zlib
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import urlsplit

import pooch

from nnmpi.data.sources import Source
from nnmpi.errors import DataError

BLOCK_BYTES = 1 << 16


def silent(_: str) -> None:
    """Report nothing."""


def download(source: Source, folder: Path, *, stall_s: float = 30.0, report: Callable[[str], None] = silent) -> Path:
    """Return the path of the file in the folder, downloaded and checked if it is not there yet.

    Args:
        source: what to download, from where, and its checksum.
        folder: where the file will lie.
        stall_s: a mirror that sends nothing for this long is given up.
        report: called with a sentence when a transfer begins.

    Raises:
        DataError: when no mirror gave the file (the message says what each one did) or the folder cannot be written.
    """
    final = folder / source.filename
    if final.is_file():
        return final
    pooch.get_logger().setLevel("ERROR")
    problems = []
    for url in source.urls:
        report(f"downloading {source.filename} from {urlsplit(url).netloc}")
        try:
            with TemporaryDirectory(dir=folder) as place:
                fetched = pooch.retrieve(url, None, source.filename, place, downloader=_downloader(stall_s))
                problem = check(Path(fetched), source)
                if problem is None:
                    return Path(fetched).replace(final)
        except (OSError, ValueError) as error:  # of requests, too
            problem = str(error)
        problems.append(f"{url}: {problem}")
    raise DataError(
        f"{source.filename} could not be downloaded to {folder} ({'; '.join(problems)}); "
        "try again later, or get the file by other means and name its folder as data_dir"
    )


def _downloader(stall_s: float) -> pooch.HTTPDownloader:
    return pooch.HTTPDownloader(chunk_size=BLOCK_BYTES, timeout=stall_s)


def check(path: Path, source: Source) -> str | None:
    """Return what is wrong with the file's checksum, as half a sentence, or None when it is right."""
    digest, what = hashlib.sha256(), "unpacked content" if source.unpacked else "file"
    try:
        with gzip.open(path) if source.unpacked else path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        return f"sent something that is not a whole gz file ({error})"
    if digest.hexdigest() != source.sha256:
        return f"the {what} has SHA-256 {digest.hexdigest()} and should have {source.sha256}"
    return None
