"""The node's cache of prepared data: folders that are written once, and read by all that follow.

    ~/.cache/nnmpi/sets/KEY/data/       data sets: see `prepared`
                   tokens/KEY/data/     texts: see `text`

KEY is a hash of all that the content depends on, with the versions of nnmpi and of the form: so a
changed source has another folder, and none is ever changed. A folder appears when it is complete;
while one process writes it under the lock of KEY, others wait, and then find it. When there is no
room, what was not used for UNUSED_DAYS is removed.
"""

import os
import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from hashlib import sha256
from os import EX_CANTCREAT
from pathlib import Path
from time import time
from typing import Any

from nnmpi.base.errors import UsageError, raised_as
from nnmpi.base.files import (
    VARIABLE,
    cache_folder,
    folder_atomically,
    is_locked,
    json_text,
    locked,
    remove_folder,
)
from nnmpi.base.version import VERSION
from nnmpi.data.team import ALONE, Team

SETS, TEXTS = KINDS = ("sets", "tokens")
DATA = "data"
UNUSED_DAYS = 30
DAY_S = 86400


@dataclass(frozen=True)
class Entry:
    """A folder of the cache.

    Attributes:
        folder: KIND/KEY.
        nbytes: of the files in it.
        unused_days: since it was used last.
    """

    folder: Path
    nbytes: int
    unused_days: float


def entry_of(kind: str, content: Any) -> Path:
    """Return the folder KIND/KEY of what depends on these JSON values."""
    key = sha256(json_text([VERSION, content]).encode()).hexdigest()[:32]
    return cache_folder() / kind / key


def filled(entry: Path, write: Callable[[Path], None], team: Team = ALONE) -> Path:
    """Return the folder with an entry's data; write it first if it is missing. Collective.

    Args:
        entry: of `entry_of`.
        write: called on all ranks with an empty folder to fill.
        team: of the ranks that write together.

    Raises:
        UsageError: when it cannot be written, also for want of room, with a status of its own.
        NnmpiError: of `write`; then nothing is left.
    """
    try:
        return _filled(entry, write, team)
    except UsageError as error:
        if error.exit_status != EX_CANTCREAT or not team.first(remove_unused):
            raise
    return _filled(entry, write, team)


def _filled(entry: Path, write: Callable[[Path], None], team: Team) -> Path:
    folder = entry / DATA
    if not team.first(folder.is_dir):
        with ExitStack() as stack:

            def begin() -> str:
                stack.enter_context(locked(entry))
                if folder.is_dir():  # another job has written it meanwhile
                    return ""
                stack.callback(_remove_without_data, entry)
                stack.enter_context(writing(folder))
                return str(stack.enter_context(folder_atomically(folder)))

            temporary = team.first(begin)
            if temporary:
                write(Path(temporary))
            with team.agreed():
                stack.close()
    with suppress(OSError):  # of another user's cache
        os.utime(entry)
    return folder


def _remove_without_data(entry: Path) -> None:
    if not (entry / DATA).is_dir():
        remove_folder(entry)


def writing(folder: Path) -> AbstractContextManager[None]:
    """Return a context in which an error of the system is one about a folder of the cache."""
    remedy = f"make room there, or set ${VARIABLE} to a folder on another disk"
    return raised_as(UsageError, f"{folder.parent} cannot be written", remedy)


def entries() -> list[Entry]:
    """Return all folders of the cache, the one that was used last first."""
    now, found = time(), list[Entry]()
    for kind in KINDS:
        for folder in (cache_folder() / kind).glob("*/"):
            with suppress(OSError):  # another process has removed it
                sizes = (file.stat().st_size for file in folder.rglob("*") if file.is_file())
                days = (now - folder.stat().st_mtime) / DAY_S
                found.append(Entry(folder, sum(sizes), days))
    return sorted(found, key=lambda entry: entry.unused_days)


def remove_unused() -> int:
    """Remove what was not used for UNUSED_DAYS and is not in work; return its bytes."""
    removed = 0
    for entry in entries():
        if entry.unused_days > UNUSED_DAYS and not is_locked(entry.folder):
            remove_folder(entry.folder)
            removed += entry.nbytes
    return removed


def free_bytes() -> int:
    """Return the room on the disk of the cache."""
    folder = cache_folder()
    return shutil.disk_usage(folder if folder.is_dir() else folder.parent).free
