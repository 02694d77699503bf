"""TensorBoard event files, through tensorboardX (the `tensorboard` extra)."""

import importlib
import importlib.util
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

SKIPPED = ("kind", "global_step", "epoch")


class Events:
    """Writes every number of a metrics record as a scalar KIND/KEY at its step."""

    def __init__(self, folder: Path, first_step: int) -> None:
        """Take down where a new event file will be; a viewer drops what older files hold from `first_step` on."""
        self._folder, self._first_step = folder, first_step
        self._writer: Any = None

    def write(self, record: Mapping[str, Any]) -> None:
        """Add the record's numbers; what is no number, or not a finite one, is left out.

        The first call opens the file: tensorboardX loads all of PyTorch where it finds it, which takes seconds in which
        the other ranks would wait for the first step.

        Raises:
            ImportError: without tensorboardX.
        """
        if self._writer is None:
            module = importlib.import_module("tensorboardX")
            self._writer = module.SummaryWriter(str(self._folder), purge_step=self._first_step or None)
        for key, value in record.items():
            if key not in SKIPPED and isinstance(value, int | float) and isfinite(value):
                self._writer.add_scalar(f"{record['kind']}/{key}", value, record["global_step"])

    def close(self) -> None:
        """Bring everything to the file and end the writer's thread."""
        if self._writer is not None:
            self._writer.close()


def can_write() -> bool:
    """Return whether tensorboardX is installed."""
    return importlib.util.find_spec("tensorboardX") is not None
