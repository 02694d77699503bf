"""A checkpoint that is being written: nobody sees it until it is whole.

draft = Draft(folder, step=120)
try:
    draft.open(MODEL_FILE, outlines)
    draft.write("0.weight", array)          # one array at a time, in the order of the outlines
    ...
    draft.finish(state, keep=3)
finally:
    draft.discard()                         # what is not finished is removed
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.parallel.pieces import Outline
from nnmpi.train.checkpoint import FORMAT, LATEST_FILE, PREFIX, STATE_FILE, digest, steps
from nnmpi.train.files import replace_durably, sync_folder, write_durably
from nnmpi.train.tensors import TensorWriter


class Draft:
    """A folder under a temporary name, which `finish` renames.

    All methods but `discard` raise OSError when the disk is full or not writable. Older checkpoints are then as before.

    Args:
        folder: of the run's checkpoints; it is made if needed.
        step: the updates done, which give the checkpoint its name.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._final = folder / f"{PREFIX}{step:08d}"
        self._temporary = folder / f".{self._final.name}.tmp"
        self._files: dict[str, dict[str, str | int]] = {}
        self._name = ""
        self._writer: TensorWriter | None = None

    def begin(self) -> None:
        """Make the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._temporary, ignore_errors=True)  # what a kill has left
        self._temporary.mkdir()

    def open(self, name: str, outlines: Mapping[str, Outline]) -> None:
        """Begin a file of arrays, after the one before is brought to disk."""
        self._close()
        self._name, self._writer = name, TensorWriter(self._temporary / name, outlines)

    def write(self, name: str, array: Array) -> None:
        """Write the next array of the file that was opened last."""
        assert self._writer is not None, "open a file first"
        self._writer.write(name, array)

    def finish(self, state: Mapping[str, Any], keep: int) -> str:
        """Write state.json, wait until the disk has everything, give the checkpoint its name, and return that.

        Keeps the `keep` newest ones. Checkpoints of later steps are removed too: they belong to a future that a
        resumed run has left.
        """
        self._close()
        values = {"format": FORMAT, **state, "files": self._files}
        text = json.dumps({**values, "sha256": digest(values)}, indent=1, allow_nan=False)
        write_durably(self._temporary / STATE_FILE, text.encode() + b"\n")
        sync_folder(self._temporary)
        if self._final.exists():  # the same step again, after an older one was resumed
            shutil.rmtree(self._final)
        self._temporary.rename(self._final)
        sync_folder(self._folder)
        replace_durably(self._folder / LATEST_FILE, f"{self._final.name}\n".encode())
        _prune(self._folder, self._final, keep)
        return self._final.name

    def discard(self) -> None:
        """Remove what is not finished; after `finish` this does nothing."""
        if self._writer is not None:
            self._writer.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def _close(self) -> None:
        if self._writer is not None:
            self._files[self._name] = self._writer.close()
            self._writer = None


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints beyond the `keep` newest, and those of later steps than the one just written."""
    found = steps(folder)
    kept = [each for each in found if each <= newest][:keep]
    for each in found:
        if each not in kept:
            shutil.rmtree(each, ignore_errors=True)
