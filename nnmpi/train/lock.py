"""The lock on a run's folder: two jobs that write one run would mix their metrics and lose each other's checkpoints."""

import os
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType

from nnmpi.errors import UsageError

POLL_S = 0.1


class FolderLock(AbstractContextManager["FolderLock"]):
    """Holds a folder from `take` to the end of its block.

    The lock is the system's (flock) on the folder itself, so it leaves no file and ends with its process, however that
    ends. Where the file system has no such locks (NFS refuses them for folders) the run goes on without.
    """

    def __init__(self, folder: Path, patience_s: float = 5.0) -> None:
        """Do nothing yet.

        Args:
            patience_s: how long to wait for a job that is just being killed.
        """
        self._folder, self._patience_s = folder, patience_s
        self._handle: int | None = None

    def take(self) -> None:
        """Take the lock of the folder, which exists.

        Raises:
            UsageError: when the folder cannot be read, or another process keeps the lock.
        """
        try:
            self._handle = os.open(self._folder, os.O_RDONLY)
        except OSError as error:
            raise UsageError(f"{self._folder} cannot be read ({error.strerror}); give a folder that can") from None
        deadline_s = time.monotonic() + self._patience_s
        while not self._try():
            if time.monotonic() > deadline_s:
                raise UsageError(
                    f"{self._folder} is in use by another job; wait for its end or stop it, or give another --out"
                )
            time.sleep(POLL_S)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _try(self) -> bool:
        """Return whether the lock is held now, or cannot be had on this system."""
        assert self._handle is not None
        try:
            import fcntl

            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except (ImportError, OSError):  # Windows; a file system without locks
            return True
        return True
