"""Where the numbers of a run go: metrics.jsonl, and TensorBoard's files where tensorboardX is installed."""

from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from nnmpi.errors import NnmpiError
from nnmpi.train.events import Events, can_write
from nnmpi.train.folder import RunFolder
from nnmpi.train.metrics import Metrics, read_metrics


class Recorder(AbstractContextManager["Recorder"]):
    """Writes records on the rank that has a folder, and nothing on the others."""

    def __init__(self, folder: RunFolder | None, first_step: int) -> None:
        """Open the files of a run that has done `first_step` steps; with None record nothing.

        Raises:
            NnmpiError: when a file cannot be written.
        """
        self._folder = folder
        self._metrics: Metrics | None = None
        self._events: Events | None = None
        if folder is not None:
            try:
                self._metrics = Metrics(folder.metrics)
                self._events = Events(folder.events, first_step + 1) if can_write() else None
            except OSError as error:
                raise self._problem(error) from None

    def write(self, record: dict[str, Any]) -> None:
        """Write one record everywhere; see metrics.py for its keys.

        Raises:
            NnmpiError: when a file cannot be written.
        """
        try:
            if self._metrics is not None:
                self._metrics.write(record)
            if self._events is not None:
                self._events.write(record)
        except OSError as error:
            raise self._problem(error) from None

    def read(self) -> list[dict[str, Any]]:
        """Return all records of the run; none on ranks without a folder.

        Raises:
            NnmpiError: when the file cannot be read.
        """
        if self._folder is None:
            return []
        try:
            return read_metrics(self._folder.metrics)
        except (OSError, ValueError) as error:
            raise NnmpiError(f"{self._folder.metrics} cannot be read again: {error}") from None

    def sync(self) -> None:
        """Wait until the disk has the metrics: before a checkpoint, which must not be newer than they are.

        Raises:
            OSError: when it cannot.
        """
        if self._metrics is not None:
            self._metrics.sync()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for each in (self._metrics, self._events):
            if each is not None:
                each.close()

    def _problem(self, error: OSError) -> NnmpiError:
        place = self._folder.path if self._folder else ""
        return NnmpiError(f"metrics cannot be written into {place}: {error.strerror or error}; checkpoints are intact")
