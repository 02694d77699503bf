"""Checkpoints as folders of safetensors and JSON that are whole or absent; written and read by one process.

    checkpoints/
      step-00000120/  model.safetensors  optimizer.safetensors  state.json
      step-00000180/  ...
      latest          the name of the newest one, written last
      best            the name of the one with the best evaluation, which stays; with --keep-best

A checkpoint is written under a temporary name (see `CheckpointWriter`), every file is brought to disk, and then the
folder is renamed: a kill at any moment leaves the older ones as they were. state.json holds the size and SHA-256 of the
other two files, and the SHA-256 of its own values, so that damage is found before a weight is used. No pickle anywhere.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnmpi.backend.array import Array
from nnmpi.errors import CheckpointError
from nnmpi.files import sha256, sync_folder, write_atomically, write_synced
from nnmpi.parallel.shard_map import ArraySpec
from nnmpi.reading import read_json
from nnmpi.train.tensor_file import TensorFile, TensorWriter

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
BEST_FILE = "best"
PREFIX = "step-"
FORMAT = 1  # of state.json; a change that older programs would misread raises it


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on. Each array is that of the whole model, whatever the layout of the run was.

    Attributes:
        model: parameters and buffers by full name; read when they are asked for.
        optimizer: state arrays by "slot/full.parameter.name"; read when they are asked for.
        state: JSON values: step, epoch, batch, seed, the optimizer's scalars and what the loop adds.
    """

    model: TensorFile
    optimizer: TensorFile
    state: Mapping[str, Any]


def check_folder(folder: Path, writes: bool = True) -> None:
    """Check that a run can go on from what is here and write more, before it does work that could not be kept.

    A folder that is not there yet is fine.

    Raises:
        CheckpointError: when it is no folder, may not be read or written, or has a folder as `latest`.
    """
    latest, remedy = folder / LATEST_FILE, "let this user read and write it, or copy the run to where that is so"
    try:
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():  # a file, or a link that leads nowhere: there is no checkpoint, and none can be written
            raise CheckpointError(f"{folder} is not a folder; put the run's checkpoints there, or move it away")
        os.scandir(folder).close()  # glob finds nothing where it may not look, and says so to nobody
        if latest.is_dir():
            raise CheckpointError(f"{latest} is a folder and not a file with a name; remove it to go on")
        refused = None if not writes or os.access(folder, os.W_OK) else "it may not be written"
    except OSError as error:
        refused = error.strerror or str(error)
    if refused:
        raise CheckpointError(f"{folder} cannot be used ({refused}); {remedy}")


def load_checkpoint(folder: Path, best: bool = False) -> tuple[Checkpoint, Path, list[str]] | None:
    """Return the checkpoint that `latest` names, its folder, and notices; or None where there is none yet.

    Where that one is damaged the newest good one is taken, and a notice says so.

    Args:
        folder: of the checkpoints.
        best: take the one that `best` names, and no other.

    Raises:
        CheckpointError: when there are checkpoints and none of them is whole.
    """
    if best:
        found = _named(folder, BEST_FILE)
        if found is None:
            raise CheckpointError(f"{folder} keeps no best checkpoint; train with --keep-best")
        return read_checkpoint(found), found, []
    notices: list[str] = []
    for candidate in _candidates(folder):
        try:
            return read_checkpoint(candidate), candidate, notices
        except CheckpointError as error:
            notices.append(f"{error}; an older checkpoint is used instead")
    if notices:
        raise CheckpointError(f"no checkpoint in {folder} is whole: {notices[0].rpartition(';')[0]}")
    return None


def read_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in this folder.

    Raises:
        CheckpointError: when a file is missing, unreadable, cut, changed, or of a newer format; the message names it.
    """
    file = folder / STATE_FILE
    try:
        state = read_json(file)
        found, files = state.pop("sha256"), state["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged or missing ({type(error).__name__}: {error})") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{file} has another format than {FORMAT}; use the version of nnmpi that wrote it")
    if found != digest(state):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in it")
    try:
        _verify(folder, files)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error.strerror or error})") from None
    except (AttributeError, KeyError, TypeError):
        raise CheckpointError(f"{file} does not say the sizes and sums of its files") from None
    del state["format"], state["files"]
    return Checkpoint(TensorFile(folder / MODEL_FILE), TensorFile(folder / OPTIMIZER_FILE), state)


def digest(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, however they are laid out in a file."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _verify(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check sizes first (cheap, finds a cut file), then the sums."""
    for name in (MODEL_FILE, OPTIMIZER_FILE):
        file, wanted = folder / name, files.get(name)
        if wanted is None:
            raise CheckpointError(f"{folder / STATE_FILE} says nothing of {name}")
        if not file.is_file():
            raise CheckpointError(f"{file} is missing")
        if file.stat().st_size != wanted["bytes"]:
            raise CheckpointError(f"{file} has {file.stat().st_size} bytes, not {wanted['bytes']}")
        if sha256(file) != wanted["sha256"]:
            raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in {STATE_FILE}")


def steps(folder: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first; temporary ones begin with a dot and are not among them."""
    return sorted((each for each in folder.glob(f"{PREFIX}*") if each.is_dir()), reverse=True)


def newest(folder: Path) -> Path:
    """Return the newest checkpoint's folder; there must be one."""
    return steps(folder)[0]


def _candidates(folder: Path) -> list[Path]:
    """Return the folders to try: what `latest` names first, then from the newest on."""
    found, named = steps(folder), _named(folder, LATEST_FILE)
    return found if named is None else [named, *(each for each in found if each != named)]


def _named(folder: Path, file: str) -> Path | None:
    """Return the checkpoint that a file names; None where it names none."""
    try:
        named = folder / (folder / file).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    return named if named in steps(folder) else None


class CheckpointWriter:
    """Writes a checkpoint that nobody sees until it is whole: a folder under a temporary name, which `finish` renames.

        writer = CheckpointWriter(folder, step=120)
        try:
            writer.begin()
            writer.open(MODEL_FILE, outlines)
            writer.write("0.weight", array)     # one array at a time, in the order of the outlines
            ...
            writer.finish(state, keep=3)        # all that waits for the disk, or looks at every byte, is done here
        finally:
            writer.discard()                    # what is not finished is removed

    All methods but `discard` raise OSError when the disk is full or not writable. Older checkpoints are then as before.

    Args:
        folder: of the run's checkpoints; it is made if needed.
        step: the updates done, which give the checkpoint its name.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self._folder = folder
        self._final = folder / f"{PREFIX}{step:08d}"
        self._temporary = folder / f".{self._final.name}.tmp"
        self._writers: dict[str, TensorWriter] = {}

    def begin(self) -> None:
        """Make the folder."""
        if not self._folder.is_dir():
            self._folder.mkdir()  # not the run's folder: somebody may have removed it
            sync_folder(self._folder.parent)
        for left in self._folder.glob(f".{PREFIX}*.tmp"):  # by a kill
            shutil.rmtree(left, ignore_errors=True)
        self._temporary.mkdir()

    def open(self, name: str, specs: Mapping[str, ArraySpec], metadata: Mapping[str, str] | None = None) -> None:
        """Begin a file of arrays."""
        self._writers[name] = TensorWriter(self._temporary / name, specs, metadata)

    def write(self, name: str, array: Array) -> None:
        """Write the next array of the file that was opened last."""
        self._writers[next(reversed(self._writers))].write(name, array)

    def finish(self, state: Mapping[str, Any], keep: int, best: bool = False) -> str:
        """Write state.json, wait until the disk has everything, give the checkpoint its name, and return that.

        Keeps the `keep` newest ones, and the best. Checkpoints of later steps are removed too: they belong to a future
        that a resumed run has left.

        Args:
            state: JSON values.
            keep: how many of the newest ones stay.
            best: whether this is the best one so far, which stays too.
        """
        files = {name: writer.close() for name, writer in self._writers.items()}
        values = {"format": FORMAT, **state, "files": files}
        text = json.dumps({**values, "sha256": digest(values)}, indent=1, allow_nan=False)
        write_synced(self._temporary / STATE_FILE, text.encode() + b"\n")
        sync_folder(self._temporary)
        if self._final.exists():  # the same step again, after an older one was resumed
            shutil.rmtree(self._final)
        self._temporary.rename(self._final)
        sync_folder(self._folder)
        for file in (LATEST_FILE, BEST_FILE)[: 1 + best]:
            write_atomically(self._folder / file, f"{self._final.name}\n".encode())
        _prune(self._folder, self._final, keep)
        return self._final.name

    def discard(self) -> None:
        """Remove what is not finished; after `finish` this does nothing."""
        for writer in self._writers.values():
            writer.abandon()
        shutil.rmtree(self._temporary, ignore_errors=True)


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints beyond the `keep` newest and the best, and those of later steps than the one just written."""
    found, best = steps(folder), _named(folder, BEST_FILE)
    past = [each for each in found if each <= newest]
    for each in found:
        if each not in past[:keep] and not (each == best and each in past):
            shutil.rmtree(each, ignore_errors=True)
