"""Checkpoints: folders of safetensors and JSON that are whole or absent.

    checkpoints/
      step-00000120/  model.safetensors  optimizer.safetensors  state.json
      step-00000180/  ...
      latest          the name of the newest one, written last

A checkpoint is written under a temporary name, every file is brought to disk, and then the folder is renamed: a kill
at any moment leaves the older ones as they were. state.json holds the size and SHA-256 of the other two files, and the
SHA-256 of its own values, so that damage is found before a weight is used. No pickle anywhere.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from nnmpi.backend.array import Array
from nnmpi.errors import CheckpointError
from nnmpi.train.files import replace_durably, sha256, sync_folder, write_durably

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
PREFIX = "step-"
FORMAT = 1  # of state.json; a change that older programs would misread raises it


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on.

    Attributes:
        model: parameters and buffers by full name.
        optimizer: state arrays by "slot/full.parameter.name".
        state: JSON values: step, epoch, batch, seed, the optimizer's scalars and what the loop adds.
    """

    model: Mapping[str, Array]
    optimizer: Mapping[str, Array]
    state: Mapping[str, Any]


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write the checkpoint into `folder`, under its `state["step"]`, and return its own folder.

    Keeps the `keep` newest ones. Checkpoints of later steps are removed too: they belong to a future that a resumed
    run has left.

    Raises:
        OSError: when the disk is full or not writable; older checkpoints are then as before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"{PREFIX}{checkpoint.state['step']:08d}"
    temporary = folder / f".{final.name}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _write(temporary, checkpoint)
        if final.exists():  # the same step again, after an older one was resumed
            shutil.rmtree(final)
        temporary.rename(final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    sync_folder(folder)
    replace_durably(folder / LATEST_FILE, f"{final.name}\n".encode())
    _prune(folder, final, keep)
    return final


def load_checkpoint(folder: Path) -> tuple[Checkpoint, Path, list[str]] | None:
    """Return the checkpoint that `latest` names, its folder, and notices; or None where there is none yet.

    Where that one is damaged the newest good one is taken, and a notice says so.

    Raises:
        CheckpointError: when there are checkpoints and none of them is whole.
    """
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
        CheckpointError: when a file is missing, cut, changed, or of a newer format; the message names it.
    """
    file = folder / STATE_FILE
    try:
        state = json.loads(file.read_text())
        found, files = state.pop("sha256"), state["files"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{file} is damaged or missing ({type(error).__name__}: {error})") from None
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{file} has another format than {FORMAT}; use the version of nnmpi that wrote it")
    if found != _sum(state):
        raise CheckpointError(f"{file} is damaged: its SHA-256 is not the one in it")
    _verify(folder, files)
    del state["format"], state["files"]
    return Checkpoint(_load(folder / MODEL_FILE), _load(folder / OPTIMIZER_FILE), state)


def check_fit(found: Mapping[str, Array], expected: Mapping[str, Array], file: Path) -> None:
    """Check that the arrays of a file have the names, shapes and dtypes that the run expects.

    Raises:
        CheckpointError: naming the file, the array and both shapes or dtypes.
    """
    for name, array in expected.items():
        if name not in found:
            raise CheckpointError(f"{file} has no {name}, which this model needs with shape {array.shape}")
        other = found[name]
        if (other.shape, other.dtype) != (array.shape, array.dtype):
            raise CheckpointError(
                f"{file} has {name} with shape {other.shape} and {other.dtype}, "
                f"but this model needs shape {array.shape} and {array.dtype}"
            )
    for name in found:
        if name not in expected:
            raise CheckpointError(f"{file} has {name} with shape {found[name].shape}, which this model does not have")


def _write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the three files into a folder that nobody reads yet, and wait until the disk has them."""
    for name, arrays in ((MODEL_FILE, checkpoint.model), (OPTIMIZER_FILE, checkpoint.optimizer)):
        write_durably(folder / name, _serialize(arrays))
    files = {
        name: {"bytes": (folder / name).stat().st_size, "sha256": sha256(folder / name)}
        for name in (MODEL_FILE, OPTIMIZER_FILE)
    }
    state = {"format": FORMAT, **checkpoint.state, "files": files}
    text = json.dumps({**state, "sha256": _sum(state)}, indent=1, allow_nan=False)
    write_durably(folder / STATE_FILE, text.encode() + b"\n")
    sync_folder(folder)


def _sum(state: Mapping[str, Any]) -> str:
    """Return the SHA-256 of JSON values, however they are laid out in a file."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _serialize(arrays: Mapping[str, Array]) -> bytes:
    """Return the arrays as the bytes of a safetensors file.

    safetensors 0.8.0 scrambles arrays that are not C-contiguous, silently; `order="C"` copies those (and, unlike
    ascontiguousarray, leaves a 0-d array 0-d).
    """
    return bytes(save({name: np.asarray(array, order="C") for name, array in arrays.items()}))


def _load(file: Path) -> dict[str, Array]:
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from None


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


def _steps(folder: Path) -> list[Path]:
    """Return the checkpoints' folders, newest first; temporary ones begin with a dot and are not among them."""
    return sorted((each for each in folder.glob(f"{PREFIX}*") if each.is_dir()), reverse=True)


def _candidates(folder: Path) -> list[Path]:
    """Return the folders to try: what `latest` names first, then from the newest on."""
    found = _steps(folder)
    try:
        named = folder / (folder / LATEST_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return found
    return [named, *(each for each in found if each != named)] if named in found else found


def _prune(folder: Path, newest: Path, keep: int) -> None:
    """Remove checkpoints beyond the `keep` newest, and those of later steps than the one just written."""
    found = _steps(folder)
    kept = [each for each in found if each <= newest][:keep]
    for each in found:
        if each not in kept:
            shutil.rmtree(each, ignore_errors=True)
