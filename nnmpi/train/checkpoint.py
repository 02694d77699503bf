"""Checkpoints: folders of safetensors and JSON that are whole or absent.

    checkpoints/
      step-00000120/  model.safetensors  optimizer.safetensors  state.json
      step-00000180/  ...
      latest          the name of the newest one, written last

A checkpoint is written under a temporary name (see `draft`), every file is brought to disk, and then the folder is
renamed: a kill at any moment leaves the older ones as they were. state.json holds the size and SHA-256 of the other two
files, and the SHA-256 of its own values, so that damage is found before a weight is used. No pickle anywhere.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nnmpi.errors import CheckpointError
from nnmpi.train.files import sha256
from nnmpi.train.tensors import TensorFile

MODEL_FILE = "model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "state.json"
LATEST_FILE = "latest"
PREFIX = "step-"
FORMAT = 1  # of state.json; a change that older programs would misread raises it


@dataclass(frozen=True)
class Checkpoint:
    """Everything that a run needs to go on. Arrays are whole, whatever the layout of the run that wrote them.

    Attributes:
        model: parameters and buffers by full name; read when they are asked for.
        optimizer: state arrays by "slot/full.parameter.name"; read when they are asked for.
        state: JSON values: step, epoch, batch, seed, the optimizer's scalars and what the loop adds.
    """

    model: TensorFile
    optimizer: TensorFile
    state: Mapping[str, Any]


def check_folder(folder: Path) -> None:
    """Check that a run can go on from what is here and write more, before it does work that could not be kept.

    A folder that is not there yet is fine.

    Raises:
        CheckpointError: when it is no folder, may not be read or written, or has a folder as `latest`.
    """
    latest, ways = folder / LATEST_FILE, "let this user read and write it, or copy the run to where that is so"
    try:
        if not os.path.lexists(folder):
            return
        if not folder.is_dir():  # a file, or a link that leads nowhere: there is no checkpoint, and none can be written
            raise CheckpointError(f"{folder} is not a folder; put the run's checkpoints there, or move it away")
        os.scandir(folder).close()  # glob finds nothing where it may not look, and says so to nobody
        if latest.is_dir():
            raise CheckpointError(f"{latest} is a folder and not a file with a name; remove it to go on")
        refused = None if os.access(folder, os.W_OK) else "it may not be written"
    except OSError as error:
        refused = error.strerror or str(error)
    if refused:
        raise CheckpointError(f"{folder} cannot be used ({refused}); {ways}")


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
        CheckpointError: when a file is missing, unreadable, cut, changed, or of a newer format; the message names it.
    """
    file = folder / STATE_FILE
    try:
        state = json.loads(file.read_text())
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


def _candidates(folder: Path) -> list[Path]:
    """Return the folders to try: what `latest` names first, then from the newest on."""
    found = steps(folder)
    try:
        named = folder / (folder / LATEST_FILE).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return found
    return [named, *(each for each in found if each != named)] if named in found else found
