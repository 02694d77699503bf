"""Writing files so that a kill or a power cut leaves the old state or the new one, never half of either."""

import hashlib
import os
from pathlib import Path


def write_durably(file: Path, content: bytes) -> None:
    """Write a new file and wait until the disk has it; the name may be seen half-written, so use it inside a folder
    that nobody reads yet.

    Raises:
        OSError: when the disk is full or not writable.
    """
    with file.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def replace_durably(file: Path, content: bytes) -> None:
    """Give the file this content at once: readers see the old or the new one, also after a crash.

    Raises:
        OSError: when the disk is full or not writable; the old content then stays and nothing is left beside it.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    try:
        write_durably(temporary, content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Wait until the disk has the folder's names."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def sha256(file: Path) -> str:
    """Return the file's SHA-256 in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
